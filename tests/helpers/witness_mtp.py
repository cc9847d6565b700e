"""speculators 0.9.0 as an outside witness for MTP heads: what its module makes of random weights.

    PYTHON tests/helpers/witness_mtp.py OUT.safetensors     with the Python of an environment that has speculators

`tests/golden/mtp_witness.safetensors` was written by exactly this. It holds the head of a Qwen3 target by Qwen's names
(`mtp.*`), the target's embedding and output matrix (`target.*`), tokens [1, T], hidden [1, T, H], which stands for the
target's states, and of each of three steps the logits [1, T - 4, V].
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

STEPS, LENGTH = 3, 16
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
NAMES = {
    "mtp_layers.0.input_proj": "mtp.fc",
    "mtp_layers.0.final_layernorm": "mtp.norm",
    "mtp_layers.0.hidden_layernorm": "mtp.pre_fc_norm_hidden",
    "mtp_layers.0.token_layernorm": "mtp.pre_fc_norm_embedding",
    "mtp_layers.0": "mtp.layers.0",
}


def renamed(name: str) -> str:
    """Return Qwen's name of a tensor of speculators', as its own converter has it."""
    place = next(place for place in NAMES if name.startswith(f"{place}."))
    return NAMES[place] + name.removeprefix(place)


def build_head(target_dir: Path) -> MTPDraftModel:
    config = MTPSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**SHAPE),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target_dir)),
        ),
    )
    head = MTPDraftModel(config)
    head.load_verifier_weights()
    with torch.no_grad():
        for name, parameter in head.mtp_layers.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return head.float().eval()


def main(out: Path) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        target = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        target.lm_head.weight.data *= 20
        target.save_pretrained(folder)
        head = build_head(Path(folder))
    tokens, hidden = torch.randint(0, SHAPE["vocab_size"], (1, LENGTH)), torch.randn(1, LENGTH, SHAPE["hidden_size"])
    with torch.no_grad():
        logits, *_ = head(tokens, hidden)
    tensors = {renamed(name): tensor for name, tensor in head.state_dict().items() if name.startswith("mtp_layers")}
    tensors |= {"target.embedding": head.embed_tokens.weight, "target.head": head.lm_head.weight}
    tensors |= {"tokens": tokens, "hidden": hidden, **{f"logits.{step}": part for step, part in enumerate(logits)}}
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
