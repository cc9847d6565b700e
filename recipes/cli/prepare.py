"""`draftsmith prepare`, also as `accelerate launch -m draftsmith.data`."""

import shlex
from collections.abc import Sequence
from typing import TypeVar

from rich.console import Console

from draftsmith.data.answers.estimate import estimate
from draftsmith.data.answers.off_policy import store_conversations
from draftsmith.data.answers.prepare import AnswerJob, PrepareSettings, default_max_new_tokens, prepare
from draftsmith.data.processes import device_of_process, rank_and_num_ranks
from draftsmith.data.prompts.splits import HELD_OUT
from draftsmith.inference.decoding.decoder import check_sampling
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.target.chat_template import set_chat
from draftsmith.models.target.target import ChatSettings
from draftsmith.recipes.configs.data_settings import PrepareCommandSettings
from draftsmith.recipes.evaluation.inputs import DRAFT_LENGTH, load_target

T = TypeVar("T", int, float)


def run(settings: PrepareCommandSettings, console: Console) -> None:
    """Let the target answer prompts. Raises `UserError` for settings that would have no effect."""
    samplings = samplings_in_turn(settings.temperature, settings.top_p, settings.top_k)
    if settings.endpoint:
        target = Target.without_weights(settings.target)
        set_chat(target, ChatSettings(settings.chat_template_kwargs or {}))
    else:
        device = settings.device or device_of_process()
        target = load_target(settings.target, device, settings.chat_template_kwargs)
    answers = PrepareSettings(
        max_new_tokens=settings.max_new_tokens or default_max_new_tokens(target),
        samplings=samplings,
        batch_size=settings.batch_size,
        seed=settings.seed,
        drafter=settings.drafter or "none",
        draft_length=DRAFT_LENGTH if settings.draft_length is None else settings.draft_length,
        endpoint=settings.endpoint,
        skip_long=settings.skip_long,
        refuse_surrogates=settings.refuse_surrogates,
        max_bad_share=settings.max_bad_share,
        held_out_share=settings.held_out_share,
        answers_per_prompt=settings.answers_per_prompt,
    )
    if settings.dry_run:
        console.print(estimate(AnswerJob(target, settings.prompts, answers)).table())
        return
    if settings.as_given:
        limits = settings.held_out_share, settings.refuse_surrogates, settings.max_bad_share
        store_conversations(target, settings.prompts, settings.out, *limits)
    else:
        prepare(target, settings.prompts, settings.out, answers)
    if rank_and_num_ranks()[0] == 0:
        words = ["train", "eagle3", f"target={settings.target}", f"data.samples={settings.out}", "run.dir=runs/NAME"]
        words += [f"evaluation.prompts={settings.out / HELD_OUT}"] if settings.held_out_share else []
        console.print(f"next: draftsmith {shlex.join(words)}")


def samplings_in_turn(
    temperatures: Sequence[float], top_p: Sequence[float], top_k: Sequence[int]
) -> tuple[Sampling, ...]:
    """Return one sampling for each temperature; a single top-p or top-k is that of all temperatures above 0."""
    top_p = one_for_each("--top-p", top_p, 1.0, temperatures)
    top_k = one_for_each("--top-k", top_k, 0, temperatures)
    return tuple(check_sampling(*values) for values in zip(temperatures, top_p, top_k, strict=True))


def one_for_each(name: str, values: Sequence[T], off: T, temperatures: Sequence[float]) -> Sequence[T]:
    """Return a value for each temperature; a single one holds wherever sampling is not greedy, if it is anywhere."""
    if len(values) == 1:
        return [values[0] if temperature or not any(temperatures) else off for temperature in temperatures]
    if len(values) != len(temperatures):
        raise UserError(f"{name} has {len(values)} values for {len(temperatures)} temperatures: give one, or as many")
    return values
