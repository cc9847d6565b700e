"""speculators 0.9.0 as an outside witness for EAGLE-3 training: what its unrolled forward makes of random weights.

    PYTHON tests/helpers/witness_eagle3.py VARIANT OUT.safetensors    with the Python of an environment with speculators

`tests/golden/VARIANT_witness.safetensors` were written by exactly this. The variants are `eagle3`, `eagle3_1` (with
`fc_norm` and `norm_output`) and `eagle3_norm_before_fc`. A file holds the drafter in the plain layout
(`drafter.*`), the target's embedding, final norm and head (`target.*`), and for one document and for three packed ones
(`1.*` and `3.*`): tokens [1, S], loss_mask [1, S], documents [1, S], features [1, S, 3H], last_hidden [1, S, H] before
the final norm; for each unrolled step k logits.k and teacher.k [S, Vd] as its loss compares them, and each of its
losses NAME.k [S] on them. Of the last two variants, which differ in logits alone, it holds the packed case and no
losses.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import speculators.models.eagle3.core as core
import torch
from safetensors.torch import save_file
from speculators.losses import eager, resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.eagle3.metrics import align_for_step
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, VOCAB, DRAFT_VOCAB, LAYERS, LENGTH, STEPS = 32, 96, 24, 6, 24, 4
LAYER_IDS = [2, 3, 4]
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
LOSSES = {
    "forward_kl": eager.kl_div_loss,
    "reverse_kl": eager.reverse_kl_div_loss,
    "jensen_shannon": eager.js_div_loss,
    "cross_entropy": eager.ce_loss,
    "total_variation": eager.tv_loss,
    "lk_hybrid": eager.lk_hybrid_loss,
}


VARIANTS: dict[str, dict[str, bool]] = {
    "eagle3": {"norm_before_fc": False, "fc_norm": False, "norm_output": False},
    "eagle3_1": {"norm_before_fc": False, "fc_norm": True, "norm_output": True},
    "eagle3_norm_before_fc": {"norm_before_fc": True, "fc_norm": False, "norm_output": False},
}


def build_drafter(target_dir: Path, variant: str) -> Eagle3DraftModel:
    d2t, t2d = build_vocab_mappings_from_distribution({i: VOCAB - i for i in range(10, 80)}, DRAFT_VOCAB, VOCAB)
    drafter = Eagle3DraftModel.from_training_args(
        LlamaConfig(num_hidden_layers=1, layer_types=["full_attention"], **SHAPE),
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=False,
        **VARIANTS[variant],
        ttt_steps=STEPS,
        verifier_name_or_path=str(target_dir),
        target_layer_ids=LAYER_IDS,
        draft_attn_impl="sdpa",
    )
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name and "verifier" not in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif parameter.requires_grad:
                parameter.mul_(8)
    return drafter.float().eval()


def packed(lengths: list[int]) -> dict[str, Tensor]:
    """Documents side by side, each with a prompt of three tokens."""
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= 3 for length in lengths])[None]
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    return {
        "tokens": torch.randint(0, VOCAB, (1, total)),
        "loss_mask": mask,
        "documents": documents,
        "features": torch.randn(1, total, 3 * WIDTH),
        "last_hidden": torch.randn(1, total, WIDTH),
    }


def shifted(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """The slots as its own training packs them: each document loses one, for its tokens and teachers come one later."""
    parts = []
    for document in case["documents"].unique():
        inside = case["documents"][0] == document
        parts.append(
            shift_batch(
                {
                    "input_ids": case["tokens"][0, inside],
                    "hidden_states": case["features"][0, inside],
                    "verifier_last_hidden_states": case["last_hidden"][0, inside],
                    "loss_mask": case["loss_mask"][0, inside],
                    "lengths": inside.sum()[None],
                    "position_ids": torch.arange(int(inside.sum())),
                }
            )
        )
    slots = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
    lengths = slots.pop("lengths")[0]
    slots["document_ids"] = torch.arange(len(parts)).repeat_interleave(lengths)[None]
    return slots


def witness(drafter: Eagle3DraftModel, case: dict[str, Tensor]) -> dict[str, Tensor]:
    """By slot in the numbering of the unshifted tokens; `align_for_step` is what its training applies."""
    seen = []
    original = core.compute_metrics

    def record(logits, targets, loss_mask, prev_correct, step, *rest, **named):
        seen.append(align_for_step(logits, targets, None, None, step)[:2])
        return original(logits, targets, loss_mask, prev_correct, step, *rest, **named)

    core.compute_metrics = record
    with torch.no_grad():
        drafter(**shifted(case), ttt_steps=STEPS, loss_config=resolve_loss_config("kl_div", "eager"))
    core.compute_metrics = original
    documents = case["documents"][0]
    slots = torch.cat([(documents[:-1] == documents[1:]), torch.tensor([False])]).nonzero()[:, 0]
    found = {}
    for k, (logits, teacher) in enumerate(seen):
        by_slot = {"logits": logits[0], "teacher": teacher[0]}
        by_slot |= {name: function(logits, teacher)[0] for name, function in LOSSES.items()}
        for name, values in by_slot.items():
            found[f"{name}.{k}"] = values.new_zeros(len(documents), *values.shape[1:])
            found[f"{name}.{k}"][slots[: len(values)]] = values
    return found


def main(variant: str, out: Path) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **SHAPE))
        target.model.norm.weight.data += 0.1 * torch.randn(WIDTH)
        target.lm_head.weight.data *= 20
        target.save_pretrained(folder)
        drafter = build_drafter(Path(folder), variant)
    skipped = ("verifier", "embed_tokens")
    tensors = {f"drafter.{n}": t for n, t in drafter.state_dict().items() if not n.startswith(skipped)}
    tensors |= {
        f"target.{n}": target.state_dict()[n]
        for n in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    }
    packings = [[LENGTH], [9, 6, LENGTH - 15]]
    for lengths in packings if variant == "eagle3" else packings[1:]:
        case = packed(lengths)
        found = witness(drafter, case)
        if variant != "eagle3":
            found = {name: values for name, values in found.items() if name.startswith("logits")}
        case |= found
        tensors |= {f"{len(lengths)}.{name}": tensor for name, tensor in case.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
