"""`draftsmith evaluate --engine URL`: a vLLM or SGLang measures drafters, one after the other, on the same prompts."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from draftsmith.data.http import named_urls
from draftsmith.data.progress import progress_bar
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.judged import JudgedResult
from draftsmith.inference.measuring.results import Evaluation
from draftsmith.models import Target, read_checkpoint
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.files import made_folder, require_writable
from draftsmith.models.target.chat_template import set_chat
from draftsmith.models.target.target import ChatSettings
from draftsmith.recipes.configs.command_settings import EvaluateSettings
from draftsmith.recipes.evaluation.comparison import refuse_others, write_evaluations
from draftsmith.recipes.evaluation.inputs import DEFAULT_REPEATS, load_head, read_prompt_sets
from draftsmith.recipes.serving.export import is_training_free, write_drafter
from draftsmith.train.engine.answers import RequestSettings
from draftsmith.train.engine.judging import ENGINE, PLAIN, EngineJudge, JudgeSettings
from draftsmith.train.engine.restarted import COMMAND, ENGINE_LOG


def evaluate_by_engine(settings: EvaluateSettings) -> list[Evaluation]:
    """Let the engine measure each drafter at each setting; write and return one evaluation a drafter.

    The target's embedding, head and tokenizer are loaded, its layers are not: an engine runs targets that cannot be
    decoded here. Raises `UserError` for drafters that the engine cannot take, and for servers that are not there.
    """
    start = time.perf_counter()
    assert settings.engine
    beside = named_urls(settings.beside, "--beside")
    names = [*settings.drafter, *(name for name in beside if name != PLAIN)]
    if len(set(names)) < len(names):
        raise UserError("--beside: give its servers other names than the drafters")
    require_writable(settings.out)
    refuse_others(settings.out, names, "evaluation.json", "an evaluation")
    target = load_head(settings.target)
    set_chat(target, ChatSettings(settings.chat_template_kwargs or {}))
    judge = EngineJudge(
        JudgeSettings(
            settings.engine,
            "--engine",
            beside,
            settings.max_new_tokens,
            next(iter(settings.draft_length), None),
            settings.seed,
            None if settings.as_served else os.environ.get(COMMAND),
            settings.out / ENGINE_LOG,
        ),
        target,
    )
    rows, kinds = judged_rows(judge, target, settings)
    evaluations = [
        Evaluation(
            target=target.name,
            drafter=name,
            drafter_kind=kinds.get(name, name),
            environment=environment(target),
            results=[],
            judged=rows[name],
        )
        for name in names
    ]
    evaluations = [replace(evaluation, seconds=time.perf_counter() - start) for evaluation in evaluations]
    write_evaluations(evaluations, {}, None, settings.out)
    return evaluations


def judged_rows(
    judge: EngineJudge, target: Target, settings: EvaluateSettings
) -> tuple[dict[str, list[JudgedResult]], dict[str, str]]:
    """Return the rows of each drafter, and of each server beside the engine, by name; and the drafters' kinds."""
    prompt_sets = read_prompt_sets(
        settings.prompts, target, settings.num_prompts, settings.max_new_tokens, with_images=True
    )
    repeats = settings.repeats or DEFAULT_REPEATS
    loads = [
        RequestSettings(Sampling(temperature, settings.top_p), size, repeats)
        for temperature, size in product(settings.temperature, settings.batch_size)
    ]
    rows: dict[str, list[JudgedResult]] = {}
    kinds = {}
    with progress_bar() as progress:
        task = progress.add_task("asking the engine", total=None, detail="")
        for name in settings.drafter:
            with drafting_with(judge, name, target, settings) as kinds[name]:
                measured = [judge.measure(prompts, loads, lambda: progress.advance(task)) for prompts in prompt_sets]
            for server in measured[0]:
                rows[server or name] = [row for of_set in measured for row in of_set[server]]
    assert ENGINE not in rows
    return rows, kinds


@contextmanager
def drafting_with(judge: EngineJudge, name: str, target: Target, settings: EvaluateSettings) -> Iterator[str]:
    """Have the engine draft with a drafter, as it is exported for it; yield its kind.

    It is exported beside `--out`, which the engine sees where it sees what is written there. Nothing is done for an
    engine that serves the drafter already.
    """
    if settings.as_served:
        yield kind_as_served(name, target)
        return
    if is_training_free(name):
        raise UserError(
            f"--drafter {name} has no weights that an engine could take: start one with it, and give --beside "
            f"{name}=URL"
        )
    folder = settings.out.absolute().parent
    with made_folder(folder), TemporaryDirectory(prefix=f".{settings.out.name}-", dir=folder) as temporary:
        Path(temporary).chmod(0o755)  # an engine may run as another user
        exported = write_drafter(name, judge.engine, target, {}, Path(temporary))
        with judge.drafting_with(Path(temporary), lambda: None):
            yield exported.kind


def kind_as_served(name: str, target: Target) -> str:
    """Return the kind of a drafter that the engine was started with."""
    return name if is_training_free(name) else read_checkpoint(name, target).kind
