"""Drafters side by side: measured in one process, in turns, each with an evaluation.json of its own."""

import itertools
from pathlib import Path
from typing import Any

from rich.progress import Progress

from draftsmith.data.checks import notice_other_target
from draftsmith.data.progress import progress_bar
from draftsmith.inference.certify import CertifySettings, certify, num_checks
from draftsmith.inference.clock import cpu_threads
from draftsmith.inference.evaluation import environment, evaluation, write_evaluation
from draftsmith.inference.measure import MeasureSettings, PromptSet, check_settings, measure
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import require_at_least
from draftsmith.train.run_folder import require_writable


def compare(
    target: Target,
    names: list[str],
    prompt_sets: list[PromptSet],
    grid: list[MeasureSettings],
    out: Path,
    num_threads: int | None = None,
    with_certificate: bool = False,
) -> list[dict[str, Any]]:
    """Measure drafters (checkpoints, Hub names, `ngram`, `none`) at each setting on each set of prompts.

    Returns and writes what was found.

    Raises `UserError`, before anything is measured or written, for drafters and settings that do not go together.
    """
    drafters = {name: load_drafter(name, target) for name in names}
    for drafter in drafters.values():
        notice_other_target(drafter, target)
    for settings in grid:
        check_settings(settings, drafters)
    if num_threads is not None:
        require_at_least("--num-threads", num_threads)
    require_writable(out)
    rows: dict[str, list] = {name: [] for name in drafters}
    with progress_bar() as progress, cpu_threads(num_threads):
        places = list(itertools.product(prompt_sets, grid))
        total = sum(
            -(-len(prompts.token_ids) // settings.batch_size) * settings.repeats for prompts, settings in places
        )
        task = progress.add_task("evaluating", total=total, detail="")
        for prompts, settings in places:
            for name, row in measure(target, drafters, prompts, settings, lambda: progress.advance(task)).items():
                rows[name].append(row)
        env = environment(target)
        contents = [evaluation(target, name, drafter.kind, rows[name], env) for name, drafter in drafters.items()]
        if with_certificate:
            add_certificates(contents, list(drafters.values()), target, prompt_sets[0], progress)
    for path, content in zip(evaluation_paths(out, list(drafters)), contents, strict=True):
        write_evaluation(path, content)
    return contents


def add_certificates(
    contents: list[dict[str, Any]], drafters: list[Drafter], target: Target, prompts: PromptSet, progress: Progress
) -> None:
    """Put `certificate` into the content of every drafter that drafts."""
    certified = [(one, drafter) for one, drafter in zip(contents, drafters, strict=True) if drafter.kind != "none"]
    task = progress.add_task("certifying", total=sum(num_checks(drafter) for _, drafter in certified), detail="")
    for content, drafter in certified:
        settings = CertifySettings()
        content["certificate"] = certify(
            target, drafter, prompts.token_ids, settings, on_progress=lambda: progress.advance(task)
        )


def evaluation_paths(out: Path, names: list[str]) -> list[Path]:
    """OUT/evaluation.json for one drafter, OUT/NUMBER-NAME/evaluation.json for several."""
    if len(names) == 1:
        return [out / "evaluation.json"]
    return [out / f"{number}-{Path(name).name}" / "evaluation.json" for number, name in enumerate(names, 1)]
