"""Medusa heads for a vLLM that has none of its own (from 0.33.0 on): a proposer for its `method: custom_class`.

Export puts this file beside config.json and model.safetensors, which it reads. It imports nothing of ours or of vLLM's:

    PYTHONPATH=DIRECTORY vllm serve TARGET --speculative-config \
        '{"method": "custom_class", "model": "vllm_medusa.MedusaProposer", "num_speculative_tokens": 4}'

vLLM's V1 model runner makes the class, gives it the target once (`load_model`), and asks for drafts after each step.
It tells which tokens were sampled, but no hidden state, and not how many drafts each request had. So the states are
taken where the target turns them into logits, one behind each request's newest token and each of its drafts; and a
draft is remembered by the text it continues. Where the rows do not add up, because vLLM cut or dropped drafts or
computed logits of a prompt meanwhile, nothing is proposed in that step. No text can come out wrong by any of this,
since the target verifies every draft.

Shapes: R rows, H hidden width, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F


class MedusaProposer:
    """The class that vLLM's `custom_class` asks for: made with its config, with `load_model` and `propose`."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_drafts = vllm_config.speculative_config.num_speculative_tokens
        self.folder = Path(__file__).parent
        self.config = json.loads((self.folder / "config.json").read_text())
        if self.num_drafts > self.config["num_heads"]:
            raise ValueError(f"num_speculative_tokens {self.num_drafts}: these are {self.config['num_heads']} heads")
        self.states: Tensor  # [R, H] that the target last made logits of
        self.drafted: dict[bytes, int] = {}  # text -> how many drafts were proposed behind it in the last step

    def load_model(self, target_model: Any) -> None:
        """Load the heads as the target is, and look on from now when it computes logits."""
        like = next(target_model.parameters())
        tensors = load_file(self.folder / "model.safetensors")
        self.tensors = {name: tensor.to(like) for name, tensor in tensors.items()}
        compute_logits = target_model.compute_logits

        def compute(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.states = hidden_states
            return compute_logits(hidden_states, *args, **kwargs)

        target_model.compute_logits = compute

    @torch.inference_mode()
    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts for each request; none where it sampled nothing, for it is still reading its prompt.

        `token_ids_cpu` [requests, tokens] holds each text, the sampled tokens at its end, `num_tokens_no_spec` its
        length.
        """
        rows, newest, texts = 0, [], []
        for request, sampled in enumerate(sampled_token_ids):
            text, length = token_ids_cpu[request], int(num_tokens_no_spec[request])
            newest.append(rows + len(sampled) - 1)
            rows += 1
            if sampled:
                rows += self.drafted.get(text[: length - len(sampled)].tobytes(), 0)
                texts.append(text[:length].tobytes())
        waiting = [bool(sampled) for sampled in sampled_token_ids]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        self.drafted = {}
        if rows == len(self.states) and any(waiting):
            picked = [row for row, wanted in zip(newest, waiting, strict=True) if wanted]
            found = iter(self.heads(self.states[picked]).tolist())
            drafts = [next(found) if wanted else [] for wanted in waiting]
            self.drafted = dict.fromkeys(texts, self.num_drafts)
        return drafts

    def heads(self, states: Tensor) -> Tensor:
        """The likeliest token of each head: [R, H] -> [R, num_drafts] int64"""
        tokens = []
        for head in range(self.num_drafts):
            x = states
            for layer in range(self.config["num_hidden_layers"]):
                name = f"blocks.{head}.layers.{layer}"
                x = x + F.silu(F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]))
            output = 0 if self.config["original_lm_head"] else head
            tokens.append(F.linear(x, self.tensors[f"lm_heads.{output}.weight"]).argmax(-1))
        return torch.stack(tokens, 1)
