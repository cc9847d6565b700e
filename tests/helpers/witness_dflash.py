"""speculators 0.9.0 as an outside witness for DFlash training: what its blocks make of random weights.

    PYTHON tests/helpers/witness_dflash.py OUT.safetensors [dflash2]     PYTHON of an environment that has speculators

`tests/golden/dflash_witness.safetensors` was written by exactly this. `tests/golden/dflash2_witness.safetensors` was
written with `dflash2`, whose layers convolve the rows of a block and which has the whole vocabulary. A file holds the
drafter in the plain layout (`drafter.*`), the target's embedding, final norm and head (`target.*`), and for one
document and for three packed ones (`1.*` and `3.*`): tokens [1, S], loss_mask [1, S], documents [1, S], features
[1, S, A * H], last_hidden [1, S, H] before the final norm, anchors [M], and for the blocks of these anchors logits and
teacher [M, R, Vd] as its loss compares them.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import speculators.models.dflash.core as core
import torch
from safetensors.torch import save_file
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

WIDTH, VOCAB, DRAFT_VOCAB, TARGET_LAYERS, LENGTH = 32, 96, 24, 6, 26
LAYERS, BLOCK, MASK_TOKEN = 2, 5, 7
LAYER_IDS = [1, 3, 5]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def build_target(folder: Path) -> LlamaForCausalLM:
    """Write a random target into a folder."""
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=TARGET_LAYERS, **SHAPE))
    target.model.norm.weight.data += 0.1 * torch.randn(WIDTH)
    target.lm_head.weight.data *= 20
    target.save_pretrained(folder)
    return target


def vocabulary_tables() -> dict[str, object]:
    d2t, t2d = build_vocab_mappings_from_distribution({i: VOCAB - i for i in range(10, 80)}, DRAFT_VOCAB, VOCAB)
    return {"t2d": t2d, "d2t": d2t, "draft_vocab_size": DRAFT_VOCAB}


def build_drafter(target_dir: Path, model: type = DFlashDraftModel, **settings: int) -> DFlashDraftModel:
    if model is DFlash2DraftModel:
        tables = {"t2d": None, "d2t": None, "draft_vocab_size": VOCAB}
    else:
        tables = vocabulary_tables()
    drafter = model.from_training_args(
        Qwen3Config(num_hidden_layers=LAYERS, layer_types=["full_attention"] * LAYERS, **SHAPE),
        **tables,
        block_size=BLOCK,
        mask_token_id=MASK_TOKEN,
        verifier_name_or_path=str(target_dir),
        target_layer_ids=LAYER_IDS,
        draft_attn_impl="sdpa",
        **settings,
    )
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name and "verifier" not in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif "conv" in name:  # nothing at first, and one where a row is its own
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.requires_grad:
                parameter.mul_(8)
    return drafter.float().eval()


def packed(lengths: list[int]) -> dict[str, Tensor]:
    """Documents side by side, each with a prompt of three tokens."""
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= 3 for length in lengths])[None]
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    inside = torch.cat([torch.arange(length) < length - BLOCK for length in lengths])[None]
    return {
        "tokens": torch.randint(0, VOCAB, (1, total)),
        "loss_mask": mask,
        "documents": documents,
        "features": torch.randn(1, total, len(LAYER_IDS) * WIDTH),
        "last_hidden": torch.randn(1, total, WIDTH),
        "anchors": (mask & inside)[0].nonzero()[:, 0],  # of all blocks that end in their document
    }


def positions_of(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, [1, S]."""
    return torch.cat([torch.arange(int(count)) for count in documents[0].unique(return_counts=True)[1]])[None]


def stored(drafter: DFlashDraftModel, target: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the tensors of the drafter, and those of the target that stand for its layers."""
    skipped = ("verifier", "embed_tokens", "candidate_selector")
    if isinstance(drafter, DFlash2DraftModel):
        skipped += ("lm_head",)  # the target's
    tensors = {f"drafter.{n}": t for n, t in drafter.state_dict().items() if not n.startswith(skipped)}
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return tensors | {f"target.{n}": target.state_dict()[n] for n in names}


def witness(drafter: DFlashDraftModel, case: dict[str, Tensor]) -> dict[str, Tensor]:
    anchors = case["anchors"]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    with torch.no_grad():
        _, logits, teacher, *_ = drafter._backbone_forward(
            case["features"],
            case["tokens"],
            case["loss_mask"],
            case["last_hidden"],
            case["documents"],
            positions_of(case["documents"]),
            max_anchors=len(anchors),
        )
    return {name: x[0].unflatten(0, (-1, BLOCK)) for name, x in (("logits", logits), ("teacher", teacher))}


def main(out: Path, kind: str) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        target = build_target(Path(folder))
        if kind == "dflash2":
            sizes = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
            drafter = build_drafter(Path(folder), DFlash2DraftModel, **sizes)
        else:
            drafter = build_drafter(Path(folder))
    tensors = stored(drafter, target)
    for lengths in ([LENGTH], [9, 7, LENGTH - 16]):
        case = packed(lengths)
        case |= witness(drafter, case)
        tensors |= {f"{len(lengths)}.{name}": tensor for name, tensor in case.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(sys.argv[2:] or ["dflash"]))
