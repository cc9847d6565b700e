"""The layouts of targets' own heads for further tokens (MTP): their names on disk, and what families compute with them.

Read in the source of vLLM 0.32.0, which serves them. A wrong entry shows nowhere but in the acceptance.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from draftsmith.models.errors import UserError, whole_number


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The names and the rules of one family's head."""

    count: str  # field of the target's config.json with the number of heads
    prefix: str  # of the names of all tensors of the head; {layers} stands for the number of the target's layers
    layer: str = ""  # further prefix of the decoder layer's tensors
    token_norm: str  # norm of the token's embedding
    state_norm: str  # norm of the target's state
    fuse: str  # matrix that makes the layer's input of both
    last_norm: str  # norm of the layer's output, which the target's own output matrix reads
    repeats: tuple[str, ...] = ()  # copies of the target's embedding and output matrix, which no engine reads
    state_first: bool = False  # the matrix reads [state; embedding], not [embedding; state]
    reads_normed: bool = True  # the target's state is taken behind its final norm
    recycles_normed: bool = True  # further tokens read the layer's output behind its last norm
    zeroes_first: bool = False  # at position 0 the embedding counts as zero
    architecture: str | None = None  # by which an engine knows the head, where the model type alone is not enough

    def names(self) -> dict[str, str]:
        """Return the head's own name of each part, by that of `Mtp`."""
        return {
            "token_norm": self.token_norm,
            "state_norm": self.state_norm,
            "fuse": self.fuse,
            "last_norm": self.last_norm,
        }


MIMO = HeadLayout(
    count="num_nextn_predict_layers",
    prefix="model.mtp_layers.0.",
    token_norm="token_layernorm",
    state_norm="hidden_layernorm",
    fuse="input_proj",
    last_norm="final_layernorm",
    state_first=True,
    reads_normed=False,  # vLLM's MiMoModel ends before the final norm, unlike all other targets
    zeroes_first=True,
    architecture="MiMoForCausalLM",
)
QWEN = HeadLayout(
    count="mtp_num_hidden_layers",
    prefix="mtp.",
    layer="layers.0.",
    token_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    fuse="fc",
    last_norm="norm",
)
DEEPSEEK = HeadLayout(
    count="num_nextn_predict_layers",
    prefix="model.layers.{layers}.",
    token_norm="enorm",
    state_norm="hnorm",
    fuse="eh_proj",
    last_norm="shared_head.norm",
    repeats=("embed_tokens.weight", "shared_head.head.weight"),
    zeroes_first=True,
)
LAYOUTS: dict[str, HeadLayout] = {  # by the target's model_type; the first three have no heads of their own
    "llama": MIMO,
    "mistral": MIMO,
    "qwen3": QWEN,
    "qwen2": MIMO,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next": replace(QWEN, count="num_nextn_predict_layers"),
    "glm4_moe": replace(DEEPSEEK, recycles_normed=False),
    "deepseek_v3": DEEPSEEK,
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def head_layout(config: PretrainedConfig) -> HeadLayout:
    """Return the layout of a target's head by its text config. Raises `UserError` where there is none, or not yet."""
    layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise UserError(
            f"targets of type {config.model_type} have no head for further tokens that draftsmith knows (those of "
            f"{', '.join(LAYOUTS)} are known): train another kind of drafter, such as eagle3"
        )
    if getattr(config, "kv_lora_rank", None):
        raise UserError(
            f"the head of {config.model_type} attends by compressed keys, which MTP training does not compute yet: "
            "train another kind of drafter, such as eagle3"
        )
    if (number := num_heads(config, layout)) > 1:
        raise UserError(
            f"this target has {number} heads for further tokens, and draftsmith trains a single one, used again for "
            "each token: train another kind of drafter, such as eagle3"
        )
    return layout


def num_heads(config: PretrainedConfig, layout: HeadLayout) -> int:
    """Return the number of heads that a target's config claims; GLM's claims 1 even where the files have none.

    Raises `UserError` where the field is no whole number.
    """
    return whole_number(layout.count, getattr(config, layout.count, None) or 0, least=0)


def to_layout(tensors: dict[str, Tensor], layout: HeadLayout, config: PretrainedConfig) -> dict[str, Tensor]:
    """Return the tensors of `Mtp` by their names in the target's files, experts one by one."""
    prefix, parts = layout.prefix.format(layers=config.num_hidden_layers), layout.names()
    renamed = {}
    for name, tensor in one_by_one(tensors).items():
        part, _, rest = name.partition(".")
        renamed[f"{prefix}{parts[part]}.{rest}" if part in parts else f"{prefix}{layout.layer}{rest}"] = tensor
    return renamed


def from_layout(tensors: dict[str, Tensor], layout: HeadLayout, config: PretrainedConfig) -> dict[str, Tensor]:
    """Return the inverse of `to_layout`; names that it would not give stay as they are."""
    prefix, parts = layout.prefix.format(layers=config.num_hidden_layers), layout.names()
    own = {f"{name}.weight": f"{part}.weight" for part, name in parts.items()}
    renamed = {}
    for name, tensor in tensors.items():
        rest = name.removeprefix(prefix)
        if rest in layout.repeats:
            continue
        renamed[own.get(rest) or f"layer.{rest.removeprefix(layout.layer)}"] = tensor
    return together(renamed)


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with a matrix for each expert, as checkpoints have them, from one for all, as transformers does.

    `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I] become three matrices of each of E experts.
    """
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if not path.endswith(".experts"):
            apart[name] = tensor
            continue
        pieces = (
            {"gate": tensor.chunk(2, 1)[0], "up": tensor.chunk(2, 1)[1]} if part == "gate_up_proj" else {"down": tensor}
        )
        for piece, matrices in pieces.items():
            apart |= {f"{path}.{expert}.{piece}_proj.weight": matrix for expert, matrix in enumerate(matrices)}
    return apart


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inverse of `one_by_one`; experts that are together already stay so."""
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    joined: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if (match := EXPERT.fullmatch(name)) is None:
            joined[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for path, by_number in experts.items():
        parts = [by_number[number] for number in sorted(by_number)]
        if any(part.keys() != {"gate", "up", "down"} for part in parts):
            raise UserError(f"the target's {path} lack some of their matrices: get its files whole")
        joined[f"{path}.gate_up_proj"] = torch.stack([torch.cat([part["gate"], part["up"]]) for part in parts])
        joined[f"{path}.down_proj"] = torch.stack([part["down"] for part in parts])
    return joined
