"""Drafters side by side: measured in one process, in turns, each with an evaluation.json of its own.

Of several processes all but the first only count acceptance, each on its share of the prompts, and are gone before the
first one, alone on the machine, measures speed on its own.
"""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from rich.progress import Progress

from draftsmith.data.progress import progress_bar
from draftsmith.data.prompts.checks import notice_other_target
from draftsmith.data.ranks import rank_and_num_ranks
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.baselines import make_baselines
from draftsmith.inference.measuring.certify import CertifySettings, certify, num_checks
from draftsmith.inference.measuring.environment import environment, evaluation
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, check_settings, measure
from draftsmith.inference.measuring.results import Evaluation
from draftsmith.inference.measuring.sample_texts import sample_texts
from draftsmith.inference.planning.costs_beside import costs_beside
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.files import require_writable, write_json
from draftsmith.models.typed_json import from_json
from draftsmith.recipes.evaluation.diagnoses import add_diagnoses
from draftsmith.recipes.reports.report import evaluation_markdown
from draftsmith.recipes.reports.report_data import report_data
from draftsmith.train.evaluation.pooling import Row, pool, share_of, subset
from draftsmith.train.folder.run_folder import worth

COSTS_SHARE = 0.1  # of the time that an evaluation takes, for measuring costs

T = TypeVar("T")
LONGEST_WAIT = timedelta(days=7)  # for the others' counts; where one dies its launcher ends all


@dataclass(frozen=True)
class Options:
    """What a comparison is besides its contenders, prompts and settings."""

    num_threads: int | None = None  # of the CPU; None leaves torch's
    certify: bool = False  # add a certificate of losslessness for every drafter
    baselines: tuple[str, ...] = ()  # of transformers, at batch size 1
    minutes: float | None = None  # for all: each setting gets the repeats that fit; None: those of its own
    sample_texts: bool = False  # write samples.json
    costs: bool = False  # write costs.json of the drafters for which a share of the time is enough, the fastest first


def compare(
    target: Target,
    names: list[str],
    prompt_sets: list[PromptSet],
    grid: list[MeasureSettings],
    out: Path,
    options: Options = Options(),
) -> list[dict[str, Any]]:
    """Measure drafters (checkpoints, Hub names, `ngram`, `none`) at each setting on each set of prompts.

    Writes and returns what was found; of several processes the first does, and the others return nothing. Raises
    `UserError`, before anything is measured or written, for drafters and settings that do not go together.
    """
    start = time.perf_counter()
    rank, num_ranks = rank_and_num_ranks()
    drafters = {name: load_drafter(name, target) for name in names}
    for drafter in drafters.values():
        notice_other_target(drafter, target)
    for settings in grid:
        check_settings(settings, drafters)
    if options.baselines and all(settings.batch_size > 1 for settings in grid):
        raise UserError("--baseline: transformers decodes single prompts: add --batch-size 1")
    baselines = make_baselines(options.baselines, target, drafters)
    require_writable(out)
    shared = [Shared(prompts, settings, num_ranks) for prompts, settings in itertools.product(prompt_sets, grid)]
    with progress_bar(rank == 0) as progress, cpu_threads(options.num_threads):
        minutes = options.minutes and options.minutes * (1 - COSTS_SHARE * options.costs)
        work = Work([(one.part(0), one.settings) for one in shared], minutes, progress)
        of_others = on_first([] if rank == 0 else [one.count(target, drafters, rank) for one in shared])
        if rank:
            return []
        rows: dict[str, list[Row]] = {name: [] for name in drafters}
        for number, (prompts, settings) in enumerate(work.parts()):
            measured = measure(target, drafters, prompts, settings, work.advance, baselines)
            of_ranks = [measured, *(counted[number] for counted in of_others[1:])]
            for name in drafters:
                rows[name].append(shared[number].pool([found[name] for found in of_ranks if found]))
        measuring_seconds = work.seconds
        env = environment(target)
        contents = [evaluation(target, name, drafter.kind, rows[name], env) for name, drafter in drafters.items()]
        add_diagnoses(contents, list(drafters.values()), target, prompt_sets)
        if options.certify:
            add_certificates(contents, list(drafters.values()), target, prompt_sets[0], progress)
    write_contents(contents, {}, out, start)
    if options.sample_texts:
        leader = report_data(from_json(list[Evaluation], contents)).leader[0].evaluation.drafter
        texts = sample_texts(target, drafters[leader], leader, prompt_sets[0], grid[0])
        (out / "samples.json").write_text(json.dumps(texts, indent=1) + "\n")
    if options.costs:
        with cpu_threads(options.num_threads):
            costs = affordable_costs(target, drafters, contents, prompt_sets[0], COSTS_SHARE * measuring_seconds)
        write_contents(contents, costs, out, start)
    return contents


def write_contents(contents: list[dict[str, Any]], costs: dict[str, dict[str, Any]], out: Path, start: float) -> None:
    """The files of each drafter, costs.json where they were measured, and evaluation.md of all.

    `start`: since when the seconds count, which each content gets, too.
    """
    paths = evaluation_paths(out, [content["drafter"] for content in contents])
    for path, content in zip(paths, contents, strict=True):
        own = [costs[content["drafter"]]] if content["drafter"] in costs else []
        for one in own:
            write_json(path.with_name("costs.json"), one)
        content["seconds"] = time.perf_counter() - start
        write_json(path, content)
        text = evaluation_markdown(from_json(list[Evaluation], [content]), own)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
    text = evaluation_markdown(from_json(list[Evaluation], contents), list(costs.values()))
    (out / "evaluation.md").write_text(text, encoding="utf-8")


def affordable_costs(
    target: Target, drafters: dict[str, Drafter], contents: list[dict[str, Any]], prompts: PromptSet, seconds: float
) -> dict[str, dict[str, Any]]:
    """Contents of costs.json by drafter, the fastest first, as long as the seconds last."""
    end = time.perf_counter() + seconds
    found = {}
    with progress_bar() as progress:
        task = progress.add_task("measuring costs", total=float(len(contents)), detail="")
        best_first = sorted(contents, key=lambda one: worth(one["results"][0]), reverse=True)
        for number, content in enumerate(best_first):

            def show(share: float, number: int = number) -> None:
                progress.update(task, completed=number + share)

            name, rows, left = content["drafter"], content["results"], end - time.perf_counter()
            costs = costs_beside(target, drafters[name], name, rows, prompts, left, show)
            if costs:
                found[name] = costs.to_json()
    return found


class Shared:
    """A set of prompts at one setting, shared out over the processes."""

    def __init__(self, prompts: PromptSet, settings: MeasureSettings, num_ranks: int) -> None:
        self.settings, self._prompts, size = settings, prompts, settings.batch_size
        self._shares = [share_of(len(prompts.token_ids), rank, num_ranks, size) for rank in range(num_ranks)]

    def part(self, rank: int) -> PromptSet:
        return subset(self._prompts, self._shares[rank])

    def count(self, target: Target, drafters: dict[str, Drafter], rank: int) -> dict[str, Row]:
        """Rows of which only the counters are wanted, by drafter; none where there are no prompts for a process."""
        once = replace(self.settings, repeats=1, seconds=None)
        return measure(target, drafters, self.part(rank), once) if self._shares[rank] else {}

    def pool(self, rows: list[Row]) -> Row:
        """One drafter's row from those of the processes with a share."""
        return pool(rows, [share for share in self._shares if share])


def on_first(own: T) -> list[T]:
    """What every process has, in their order, on the first of them; nothing on the others."""
    rank, num_ranks = rank_and_num_ranks()
    if num_ranks == 1:
        return [own]
    dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    found: list[Any] | None = None if rank else [None] * num_ranks
    dist.gather_object(own, found)
    dist.destroy_process_group()
    return found or []


class Work:
    """What is to be measured, with its share of the time and its progress bar.

    A limit of time says how many repeats there are, never the figures that were found: that keeps them honest.
    """

    def __init__(
        self, places: list[tuple[PromptSet, MeasureSettings]], minutes: float | None, progress: Progress
    ) -> None:
        self._places, self._seconds, self._progress = places, minutes and minutes * 60, progress
        self._batches = [-(-len(prompts.token_ids) // settings.batch_size) for prompts, settings in places]
        total = self._seconds or sum(n * one.repeats for n, (_, one) in zip(self._batches, places, strict=True))
        self._task = progress.add_task("evaluating", total=total, detail="seconds" if self._seconds else "batches")
        self._start = time.perf_counter()

    def parts(self) -> Iterator[tuple[PromptSet, MeasureSettings]]:
        """Prompts and settings in turn; each gets its share, by its number of batches, of the time that is left."""
        for number, (prompts, settings) in enumerate(self._places):
            if self._seconds:
                left = self._seconds - self.seconds
                share = self._batches[number] / sum(self._batches[number:])
                settings = replace(settings, seconds=left * share)
            yield prompts, settings

    @property
    def seconds(self) -> float:
        """Since the first part began."""
        return time.perf_counter() - self._start

    def advance(self) -> None:
        if self._seconds:
            self._progress.update(self._task, completed=self.seconds)
        else:
            self._progress.advance(self._task)


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
