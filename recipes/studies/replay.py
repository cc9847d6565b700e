"""`draftsmith replay`: every drafter, draft length, tree and verification mode from one recording of the target.

No time is measured: one plain decoding of the prompts a temperature and one pass over each text score everything
(inference/replay/replay.py). Written to replay.json.
"""

import itertools
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.counters import PairedDifference, Stats, length_interval, paired_difference, total_of
from draftsmith.inference.decoding.decoder import check_sampling, check_shape
from draftsmith.inference.measuring.calibration import calibration_bins, calibration_error
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.results import CalibrationBin, Environment, Interval
from draftsmith.inference.replay.replay import (
    AcceptanceTrace,
    check_replayed,
    check_replayed_as,
    expected_stats,
    record,
    replay,
)
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, StaticTree
from draftsmith.models.storage.files import write_json
from draftsmith.models.storage.typed_json import flat, optional, to_json
from draftsmith.recipes.configs.command_settings import ReplaySettings
from draftsmith.recipes.evaluation.inputs import load_target, parse_tree, read_prompt_sets
from draftsmith.recipes.pages.tables import for_terminal, table_of
from draftsmith.recipes.report_data.measured import checkpoint_names
from draftsmith.recipes.reports.report import build_report

Draft = tuple[Chain | StaticTree, VerificationMode]  # what is replayed: a shape and how it is verified


@dataclass(frozen=True)
class DifferenceFromFirst:
    """The acceptance length of a drafter less that of the first one, over the same prompts."""

    first: str
    paired: PairedDifference

    def to_json(self) -> dict[str, object]:
        return {"from": self.first, **to_json(self.paired)}


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """A row of replay.json. Its counters are expected values, which may be fractions."""

    drafter: str
    prompt_set: str
    num_prompts: int
    temperature: float
    top_p: float
    verification_mode: VerificationMode
    draft_length: int
    tree_nodes: int | None  # None: a chain
    max_new_tokens: int
    acceptance: Stats = flat()
    mean_acceptance_length_ci95: Interval
    calibration: list[list[CalibrationBin]] | None = optional()  # of chains
    calibration_error: list[float | None] | None = optional()
    difference: DifferenceFromFirst | None = optional()  # of drafters after the first that drafts alike


@dataclass(frozen=True)
class Replay:
    """The content of replay.json."""

    target: str
    environment: Environment
    results: list[ReplayResult]


def run(settings: ReplaySettings, console: Console) -> None:
    """Replay drafters (checkpoints, Hub names, `ngram`), print the results and write them to OUT/replay.json.

    Raises `UserError`, before anything is decoded, for what cannot be replayed.
    """
    temperatures = dict.fromkeys(settings.temperature)
    samplings = [check_sampling(temperature, settings.top_p, 0) for temperature in temperatures]
    trees = [check_replayed_as(parse_tree(text), "one_hot") for text in dict.fromkeys(settings.tree)]
    target = load_target(settings.target, settings.device, settings.chat_template_kwargs)
    prompt_sets = read_prompt_sets(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    drafters = {name: load_drafter(name, target) for name in settings.drafter}
    if trees and not any(drafter.can_branch for drafter in drafters.values()):
        raise UserError(f"--tree: {', '.join(drafters)} drafts chains only: leave it out")
    if len({(tree.num_nodes, tree.depth) for tree in trees}) < len(trees):
        raise UserError("--tree: trees of as many nodes and levels cannot be told apart: replay them one by one")
    for drafter in drafters.values():
        check_replayed(drafter)
        for tree in trees if drafter.can_branch else ():
            check_shape(tree, drafter)
    longest = max([settings.draft_length, *(tree.depth for tree in trees)])
    results: list[ReplayResult] = []
    with cpu_threads(settings.num_threads):
        for prompts, sampling in itertools.product(prompt_sets, samplings):
            recording = record(target, prompts.token_ids, sampling, settings.max_new_tokens, longest, settings.seed)
            traces = replay(target, recording, drafters, longest)
            drafts = {name: drafts_of(drafter, sampling, settings, trees) for name, drafter in drafters.items()}
            results += replay_results(prompts, sampling, settings.max_new_tokens, drafts, traces)
        content = Replay(target.name, environment(target), results)
    write_json(settings.out / "replay.json", to_json(content))
    print_results(results, console)
    console.print(f"expected counters of {len(results)} settings: {settings.out / 'replay.json'}")
    console.print(f"report: {build_report(settings.out)}")


def drafts_of(
    drafter: Drafter, sampling: Sampling, settings: ReplaySettings, trees: list[Chain | StaticTree]
) -> list[Draft]:
    """Return the shapes and verification modes that a drafter is replayed with at a temperature."""
    exact: VerificationMode = "greedy" if sampling.greedy else "one_hot"
    modes: list[VerificationMode] = [exact]
    if not sampling.greedy and drafter.can_sample:
        modes.append("probabilistic")
    longest = min(settings.draft_length, drafter.max_draft_length or settings.draft_length)
    chains: list[Draft] = [(Chain(depth), mode) for mode in modes for depth in range(1, longest + 1)]
    return [*chains, *((tree, exact) for tree in trees if drafter.can_branch)]


def replay_results(
    prompts: PromptSet,
    sampling: Sampling,
    max_new_tokens: int,
    drafts: dict[str, list[Draft]],
    traces: dict[str, list[AcceptanceTrace]],
) -> list[ReplayResult]:
    """Return the results of all drafters, by name, on one set of prompts at one temperature."""
    results = []
    first = next(iter(drafts))
    for name, own_drafts in drafts.items():
        for shape, mode in own_drafts:
            stats = [expected_stats(trace, shape, mode) for trace in traces[name]]
            difference = bins = None
            if name != first and (shape, mode) in drafts[first]:
                others = [expected_stats(trace, shape, mode) for trace in traces[first]]
                difference = DifferenceFromFirst(first, paired_difference(stats, others))
            if isinstance(shape, Chain):
                bins = calibration_bins(traces[name], shape.depth, mode)
            result = ReplayResult(
                drafter=name,
                prompt_set=prompts.name,
                num_prompts=len(prompts.token_ids),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                verification_mode=mode,
                draft_length=shape.depth,
                tree_nodes=None if isinstance(shape, Chain) else shape.num_nodes,
                max_new_tokens=max_new_tokens,
                acceptance=total_of(stats),
                mean_acceptance_length_ci95=length_interval(stats),
                calibration=bins,
                calibration_error=None if bins is None else list(map(calibration_error, bins)),
                difference=difference,
            )
            results.append(result)
    return results


def print_results(results: list[ReplayResult], console: Console) -> None:
    """Print acceptance lengths, a line for each drafter and mode, a column for each draft length or tree."""
    short_names = {row.drafter: ", ".join(filter(None, checkpoint_names(row.drafter))) for row in results}
    if len(set(short_names.values())) < len(short_names):
        short_names = {name: name for name in short_names}
    for setting, block in itertools.groupby(results, lambda row: (row.prompt_set, row.temperature, row.top_p)):
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for row in block:
            name, mode = short_names[row.drafter], row.verification_mode
            line = lines.setdefault((name, mode), {"drafter": name, "mode": mode})
            tree = f"tree of {row.tree_nodes}, {row.draft_length} deep"
            column = str(row.draft_length) if row.tree_nodes is None else tree
            line[column] = f"{row.acceptance.mean_acceptance_length:.2f}"
        prompt_set, temperature, top_p = setting
        title = f"acceptance length by draft length: {prompt_set}, temperature {temperature:g}, top-p {top_p:g}"
        console.print(Text(title, style="bold"), for_terminal(table_of("", lines.values(), words=("drafter", "mode"))))
