"""transformers' own decoding beside ours: the same weights, prompts, limits and stop rules, in the same process.

`generate` is its plain decoding, `assisted` its assisted generation with a drafter that is a draft model, and
`prompt_lookup` that with n-grams of the text. They decode one prompt at a time, which is all that assisted generation
can. The stock model is a copy that shares the target's weights, on transformers' usual attention.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.inference.decoding.decoder import Output, OutputStats, Timing
from draftsmith.models import Drafter, Target
from draftsmith.models.drafters.draft_model import DraftModel
from draftsmith.models.errors import UserError, first_line

BASELINES = ("generate", "assisted", "prompt_lookup")


@dataclass
class Baseline:
    """A way in which transformers decodes."""

    name: str  # of BASELINES
    model: PreTrainedModel
    eos_token_ids: list[int]
    drafter: str | None = None  # name of the drafter that assists
    assistant: PreTrainedModel | None = None

    @property
    def key(self) -> str:
        """The name, with that of the drafter that assists."""
        return f"{self.name} with {self.drafter}" if self.drafter else self.name

    def decode(self, prompt: list[int], settings: GenerationSettings, request_id: int) -> Output:
        """Decode the answer to one prompt, timed; `settings.shape` says how many tokens to draft."""
        with torch.random.fork_rng():  # so that every repeat samples the same text
            torch.manual_seed(settings.seed + request_id)
            start = time.perf_counter()
            try:
                token_ids = self._generate(prompt, settings)
            except ValueError as error:
                raise UserError(f"baseline {self.name}: transformers refuses, {first_line(error)}") from None
            seconds = time.perf_counter() - start
        return Output([token_ids], [], OutputStats([]), Timing(seconds, 0.0, {}, []))

    @torch.no_grad()
    def _generate(self, prompt: list[int], settings: GenerationSettings) -> list[int]:
        ids = torch.tensor([prompt], device=self.model.device)
        config = generation_config(settings, self.eos_token_ids)
        if self.name == "prompt_lookup":
            config.prompt_lookup_num_tokens = settings.shape.depth
        if self.assistant is not None:
            drafting = self.assistant.generation_config = generation_config(settings, self.eos_token_ids)
            drafting.num_assistant_tokens = settings.shape.depth
            drafting.num_assistant_tokens_schedule = "constant"
            drafting.assistant_confidence_threshold = 0.0  # drafts its full length, as ours does
        text = self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=config, assistant_model=self.assistant
        )
        return text[0, len(prompt) :].tolist()


def generation_config(settings: GenerationSettings, eos_token_ids: list[int]) -> GenerationConfig:
    """Return our settings in transformers' words, and nothing else: a model's own config may cut or penalise."""
    sampling = settings.sampling
    cuts = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=not sampling.greedy,
        eos_token_id=eos_token_ids or None,
        pad_token_id=eos_token_ids[0] if eos_token_ids else None,
        **({} if sampling.greedy else cuts),
    )


def make_baselines(names: Sequence[str], target: Target, drafters: dict[str, Drafter]) -> list[Baseline]:
    """Return the baselines of these names, `assisted` once for each draft model.

    Raises `UserError` for one that does not apply.
    """
    if unknown := [name for name in names if name not in BASELINES]:
        raise UserError(f"--baseline {unknown[0]}: give {', '.join(BASELINES)}")
    if not names:
        return []
    assistants = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, DraftModel)}
    if "assisted" in names and not assistants:
        raise UserError("--baseline assisted needs a draft model among the drafters: add one, or leave it out")
    model = stock(target.model)
    baselines = [Baseline(name, model, target.eos_token_ids) for name in names if name != "assisted"]
    if "assisted" in names:
        baselines += [
            Baseline("assisted", model, target.eos_token_ids, name, stock(drafter.model))
            for name, drafter in assistants.items()
        ]
    return baselines


def stock(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy on transformers' usual attention that shares the weights, except those laid out anew for a CPU."""
    shared = {
        id(weight): weight if weight.is_contiguous() else nn.Parameter(weight.detach().contiguous(), False)
        for weight in model.parameters()
    }
    copied = cast(PreTrainedModel, copy.deepcopy(model, cast(dict, shared)))
    try:
        copied.set_attn_implementation("sdpa")
    except ValueError:  # of families that lack it, such as Gemma-2
        copied.set_attn_implementation("eager")
    copied.generation_config = GenerationConfig()
    return copied.eval()
