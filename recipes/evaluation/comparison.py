"""Drafters side by side: measured in one process, in turns, each with an evaluation.json of its own.

Of several processes all but the first only count acceptance, each on its share of the prompts, and are gone before the
first one, alone on the machine, measures speed on its own.
"""

import time
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, product
from pathlib import Path

from rich.progress import Progress

from draftsmith.data.processes import on_first, rank_and_num_ranks
from draftsmith.data.progress import progress_bar
from draftsmith.data.prompts.checks import notice_other_target
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.baselines import make_baselines
from draftsmith.inference.measuring.certify import CertifySettings, certify, num_checks, plain_texts
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.measure import (
    Contender,
    DraftSetting,
    MeasureSettings,
    PromptSet,
    check_settings,
)
from draftsmith.inference.measuring.results import Evaluation, Result, read_evaluation, write_evaluation
from draftsmith.inference.measuring.sample_texts import SampleText, sample_texts
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.costs_after_evaluation import costs_beside
from draftsmith.inference.planning.predictions import with_predictions
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import require_writable, whole_folder, write_json, write_whole
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.evaluation.diagnoses import with_diagnoses
from draftsmith.recipes.evaluation.measurements import Measurement, Timer
from draftsmith.recipes.report_data.reading import read_report_data, report_data_of
from draftsmith.recipes.reports.report import evaluation_markdown

COSTS_SHARE = 0.1  # of the time that an evaluation takes, for measuring costs


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of an evaluation of several drafters, besides what it measures."""

    num_threads: int | None = None  # of the CPU; None leaves torch's
    certify: CertifySettings | None = None  # add a certificate of losslessness for every drafter
    baselines: tuple[str, ...] = ()  # of transformers, at batch size 1
    minutes: float | None = None  # for all: each setting gets the repeats that fit; None: those of its own
    sample_texts: bool = False  # write samples.json
    skips_impossible: bool = False  # leave out settings with drafts that a drafter cannot make; else refuse them
    drafts: dict[str, list[DraftSetting]] | None = None  # those at which alone each drafter is measured, all in turns
    costs: bool = False  # write costs.json of the drafters for which a share of the time is enough, the fastest first
    known_costs: dict[str, Costs] = field(default_factory=dict)  # that were measured before, to write and predict with


def evaluate_side_by_side(
    target: Target,
    names: list[str],
    prompt_sets: list[PromptSet],
    grid: list[MeasureSettings],
    out: Path,
    options: EvaluationOptions = EvaluationOptions(),
) -> list[Evaluation]:
    """Measure drafters (checkpoints, Hub names, `ngram`) at each setting on each set of prompts.

    Writes, when all is measured, and returns one evaluation a drafter; of several processes the first does, and the
    others return nothing. Raises `UserError`, before anything is measured, for drafters and settings that do not go
    together.
    """
    start = time.perf_counter()
    rank, num_ranks = rank_and_num_ranks()
    drafters = loaded_drafters(target, names)
    parts = contenders_by_part(target, drafters, grid, options)
    if options.baselines and all(settings.batch_size > 1 for settings in grid):
        raise UserError("--baseline: transformers decodes single prompts: add --batch-size 1")
    baselines = make_baselines(options.baselines, target, drafters)
    if rank == 0:
        require_writable(out)
        refuse_others(out, names, "evaluation.json", "an evaluation")
    measurements = [Measurement(prompts, part, num_ranks) for prompts, part in product(prompt_sets, parts)]
    with progress_bar(rank == 0) as progress, cpu_threads(options.num_threads):
        minutes = options.minutes and options.minutes * (1 - COSTS_SHARE * options.costs)
        timer = Timer(measurements, minutes, progress)
        of_others = on_first([] if rank == 0 else [measurement.count(target, rank) for measurement in measurements])
        if rank:
            return []
        rows: dict[str, list[Result]] = {name: [] for name in drafters}
        for number, (measurement, seconds) in enumerate(zip(measurements, timer.shares(), strict=True)):
            measured = measurement.measure(target, seconds, timer.advance, baselines)
            of_ranks = [measured, *(counted[number] for counted in of_others[1:])]
            for key, contender in measurement.contenders.items():
                rows[contender.name].append(measurement.pool([of_rank[key] for of_rank in of_ranks if of_rank]))
        measuring_seconds = timer.seconds
        evaluations = with_diagnoses(
            evaluations_of(target, drafters, rows), list(drafters.values()), target, prompt_sets
        )
        if options.certify:
            evaluations = with_certificates(evaluations, drafters, target, prompt_sets[0], options.certify, progress)
    texts = texts_of_leader(target, drafters, evaluations, prompt_sets[0], grid) if options.sample_texts else None
    costs = dict(options.known_costs)
    if options.costs:
        with cpu_threads(options.num_threads):
            costs = affordable_costs(target, drafters, evaluations, prompt_sets[0], COSTS_SHARE * measuring_seconds)
    evaluations = [replace(evaluation, seconds=time.perf_counter() - start) for evaluation in evaluations]
    write_evaluations(evaluations, costs, texts, out)
    return evaluations


def contenders_by_part(
    target: Target, drafters: dict[str, Drafter], grid: list[MeasureSettings], options: EvaluationOptions
) -> list[list[Contender]]:
    """Return who takes turns with whom: all drafters at one setting, or at those of `settings_in_turns`.

    A drafter that takes turns with itself at another draft is loaded twice: it must not remember the other's texts.
    Raises `UserError` for drafters and settings that do not go together.
    """

    @cache
    def copy_of(name: str, number: int) -> Drafter:
        return load_drafter(name, target) if number else drafters[name]

    parts = []
    for together in settings_in_turns(grid, options):
        part: list[Contender] = []
        for settings, (name, drafter) in product(together, drafters.items()):
            if is_measured(name, drafter, settings, options):
                check_settings(settings, {name: drafter})
                copies = sum(contender.name == name for contender in part)
                part.append(Contender(name, copy_of(name, copies), settings))
        parts.append(part)
    return [part for part in parts if part]


def settings_in_turns(grid: list[MeasureSettings], options: EvaluationOptions) -> list[list[MeasureSettings]]:
    """Return the settings of each part of an evaluation.

    Where each drafter has drafts of its own, successive settings that differ in their drafts alone are one part.
    """
    if options.drafts is None:
        return [[settings] for settings in grid]
    return [list(together) for _, together in groupby(grid, lambda settings: replace(settings, draft=0))]


def is_measured(name: str, drafter: Drafter, settings: MeasureSettings, options: EvaluationOptions) -> bool:
    """Return whether a drafter is measured at a setting."""
    is_wanted = options.drafts is None or settings.draft in options.drafts[name]
    return is_wanted and (settings.allows(drafter) or not options.skips_impossible)


def evaluations_of(target: Target, drafters: dict[str, Drafter], rows: dict[str, list[Result]]) -> list[Evaluation]:
    """Return an evaluation of each drafter with its rows."""
    env = environment(target)
    return [
        Evaluation(target=target.name, drafter=name, drafter_kind=drafter.kind, environment=env, results=rows[name])
        for name, drafter in drafters.items()
    ]


def texts_of_leader(
    target: Target,
    drafters: dict[str, Drafter],
    evaluations: list[Evaluation],
    prompts: PromptSet,
    grid: list[MeasureSettings],
) -> list[SampleText]:
    """Return sample texts of the drafter that leads, at settings that it can draft at."""
    name = report_data_of(evaluations).leader[0].evaluation.drafter
    possible = [settings for settings in grid if settings.allows(drafters[name])]
    return sample_texts(target, drafters[name], name, prompts, possible)


def refuse_others(out: Path, names: list[str], file: str, content: str) -> None:
    """Raise `UserError` where a folder holds files of other drafters than these, which would stay beside new ones.

    What they hold was not measured together. `content` says what that is.
    """
    written = [path.with_name(file) for path in evaluation_paths(out, names)]
    others = [path for path in (out / file, *out.glob(f"[0-9]*-*/{file}")) if path not in written]
    if found := [str(path.parent) for path in others if path.is_file()]:
        raise UserError(f"{content} of other drafters lies in {', '.join(found)}: give another --out, or remove it")


def loaded_drafters(target: Target, names: list[str]) -> dict[str, Drafter]:
    """Load drafters by name, and say which of them were made for other weights of the target."""
    drafters = {name: load_drafter(name, target) for name in names}
    for drafter in drafters.values():
        notice_other_target(drafter, target)
    return drafters


def write_evaluations(
    evaluations: list[Evaluation], costs: dict[str, Costs], texts: list[SampleText] | None, out: Path
) -> None:
    """Write the files of each drafter, costs.json where they were measured, evaluation.md and samples.json of all.

    Rows say what the costs predict, where there are some. The files are written all or none. Costs and texts of an
    earlier evaluation in the folder go, so that they never stand beside results which they are not of.
    """
    evaluations = [with_predictions(evaluation, costs.get(evaluation.drafter)) for evaluation in evaluations]
    with whole_folder(out) as folder:
        paths = evaluation_paths(folder, [evaluation.drafter for evaluation in evaluations])
        for path, evaluation in zip(paths, evaluations, strict=True):
            own = [costs[evaluation.drafter]] if evaluation.drafter in costs else []
            for drafter_costs in own:
                write_json(path.with_name("costs.json"), to_json(drafter_costs))
            write_evaluation(path, evaluation)
            write_whole(path.with_suffix(".md"), evaluation_markdown([evaluation], own))
        write_whole(folder / "evaluation.md", evaluation_markdown(evaluations, list(costs.values())))
        if texts is not None:
            write_json(folder / "samples.json", to_json(texts), indent=1)
        for path in (folder / "samples.json", *(path.with_name("costs.json") for path in paths)):
            if not path.exists():
                (out / path.relative_to(folder)).unlink(missing_ok=True)


def affordable_costs(
    target: Target, drafters: dict[str, Drafter], evaluations: list[Evaluation], prompts: PromptSet, seconds: float
) -> dict[str, Costs]:
    """Return the costs of a round by drafter, the fastest first, as long as the seconds last."""
    end = time.perf_counter() + seconds
    costs = {}
    with progress_bar() as progress:
        task = progress.add_task("measuring costs", total=float(len(evaluations)), detail="")
        fastest_first = sorted(evaluations, key=lambda evaluation: evaluation.results[0].rank_key, reverse=True)
        for number, evaluation in enumerate(fastest_first):

            def show(share: float, number: int = number) -> None:
                progress.update(task, completed=number + share)

            name, seconds_left = evaluation.drafter, end - time.perf_counter()
            own = costs_beside(target, drafters[name], name, evaluation.results, prompts, seconds_left, show)
            if own:
                costs[name] = own
    return costs


def with_certificates(
    evaluations: list[Evaluation],
    drafters: dict[str, Drafter],
    target: Target,
    prompts: PromptSet,
    settings: CertifySettings,
    progress: Progress,
) -> list[Evaluation]:
    """Return evaluations with a new certificate for each of these drafters."""
    task = progress.add_task("certifying", total=sum(map(num_checks, drafters.values())), detail="")
    expected = plain_texts(target, prompts.token_ids, settings)
    certificates = {
        name: certify(
            target, drafter, prompts.token_ids, settings, expected, on_progress=lambda: progress.advance(task)
        )
        for name, drafter in drafters.items()
    }
    return [
        replace(evaluation, certificate=certificates.get(evaluation.drafter, evaluation.certificate))
        for evaluation in evaluations
    ]


def certify_measured(
    target: Target, names: list[str], chosen: list[str], prompts: PromptSet, settings: CertifySettings, out: Path
) -> list[Evaluation]:
    """Certify those of the drafters measured in a folder that are chosen, and write it to their evaluations there.

    `names` are all of them. Those that have a certificate keep it. Returns all evaluations.
    """
    evaluations = [read_evaluation(path) for path in evaluation_paths(out, names)]
    missing = [each.drafter for each in evaluations if each.drafter in chosen and not each.certificate]
    if missing:
        drafters = loaded_drafters(target, missing)
        with progress_bar() as progress:
            evaluations = with_certificates(evaluations, drafters, target, prompts, settings, progress)
        data = read_report_data(out)
        write_evaluations(evaluations, {costs.drafter: costs for costs in data.costs}, data.samples or None, out)
    return evaluations


def evaluation_paths(out: Path, names: list[str]) -> list[Path]:
    """Return OUT/evaluation.json for one drafter, OUT/NUMBER-NAME/evaluation.json for several."""
    if len(names) == 1:
        return [out / "evaluation.json"]
    return [out / f"{number}-{Path(name).name}" / "evaluation.json" for number, name in enumerate(names, 1)]
