"""`draftsmith replay`: every drafter, draft length, tree and verification mode from one recording of the target.

No time is measured: one plain decoding of the prompts a temperature and one pass over each text score everything
(inference/replay/replay.py). Written to replay.json.
"""

import itertools
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.counters import Stats, length_interval, paired_difference, total_of
from draftsmith.inference.decoding.decoder import check_sampling, check_shape
from draftsmith.inference.measuring.calibration import calibration_bins, calibration_error
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.replay.replay import (
    AcceptanceTrace,
    check_replayed,
    check_replayed_as,
    expected_stats,
    record,
    replay,
)
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.files import require_writable, write_json
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, StaticTree
from draftsmith.models.typed_json import to_json
from draftsmith.recipes.configs.command_settings import ReplaySettings
from draftsmith.recipes.evaluation.inputs import notice_overwriting, parse_tree, read_prompt_sets
from draftsmith.recipes.reports.report_data import checkpoint_names


def run(settings: ReplaySettings, console: Console) -> None:
    """Replay drafters (checkpoints, Hub names, `ngram`), print the rows and write them to OUT/replay.json.

    Of rows beyond the first drafter's, `difference` is their acceptance length less that drafter's at the same setting,
    with a paired interval. Raises `UserError`, before anything is decoded, for what cannot be replayed.
    """
    notice_overwriting(settings.out / "replay.json")
    temperatures = dict.fromkeys(settings.temperature)
    samplings = [check_sampling(temperature, settings.top_p, 0) for temperature in temperatures]
    trees = [check_replayed_as(parse_tree(text), "one_hot") for text in dict.fromkeys(settings.tree)]
    target = Target.from_pretrained(settings.target, settings.device)
    prompt_sets = read_prompt_sets(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    drafters = {name: load_drafter(name, target) for name in settings.drafter}
    for drafter in drafters.values():
        check_replayed(drafter)
        for tree in trees if drafter.can_branch else ():
            check_shape(tree, drafter)
    require_writable(settings.out)
    longest = max([settings.draft_length, *(tree.depth for tree in trees)])
    rows: list[dict[str, Any]] = []
    with cpu_threads(settings.num_threads):
        for prompts, sampling in itertools.product(prompt_sets, samplings):
            recording = record(target, prompts.token_ids, sampling, settings.max_new_tokens, longest, settings.seed)
            traces = replay(target, recording, drafters, longest)
            rows += replayed_rows(drafters, prompts, sampling, settings, trees, traces)
    content = {"target": target.name, "environment": to_json(environment(target)), "results": rows}
    write_json(settings.out / "replay.json", content)
    print_replays(rows, console)
    console.print(f"expected counters of {len(rows)} settings: {settings.out / 'replay.json'}")


def replayed_rows(
    drafters: dict[str, Drafter],
    prompts: PromptSet,
    sampling: Sampling,
    settings: ReplaySettings,
    trees: list[Chain | StaticTree],
    traces: dict[str, list[AcceptanceTrace]],
) -> list[dict[str, Any]]:
    """Return the rows of all drafters on one set of prompts at one temperature."""
    rows = []
    first = next(iter(drafters))
    for name, drafter in drafters.items():
        for shape, mode in shapes_and_modes(drafter, sampling, settings, trees):
            stats = [expected_stats(trace, shape, mode) for trace in traces[name]]
            row = {"drafter": name, **replayed_row(prompts, sampling, shape, mode, stats, settings, traces[name])}
            if name != first and (shape, mode) in shapes_and_modes(drafters[first], sampling, settings, trees):
                others = [expected_stats(trace, shape, mode) for trace in traces[first]]
                row["difference"] = {"from": first, **to_json(paired_difference(stats, others))}
            rows.append(row)
    return rows


def print_replays(rows: list[dict[str, Any]], console: Console) -> None:
    """Acceptance lengths, a line a drafter and mode, a column a draft length or tree."""
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    short = {name: ", ".join(filter(None, checkpoint_names(name))) for name in drafters}
    told_apart = len(set(short.values())) == len(short)
    for setting, block in itertools.groupby(rows, lambda row: (row["prompt_set"], row["temperature"], row["top_p"])):
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for row in block:
            column = str(row["draft_length"]) if row["tree_nodes"] is None else f"tree of {row['tree_nodes']}"
            name = short[row["drafter"]] if told_apart else row["drafter"]
            line = lines.setdefault((name, row["verification_mode"]), {})
            line[column] = f"{row['mean_acceptance_length']:.2f}"
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        table = Table("drafter", "mode", *columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for names, line in lines.items():
            table.add_row(*names, *(line.get(column, "–") for column in columns))
        prompt_set, temperature, top_p = setting
        title = f"acceptance length by draft length: {prompt_set}, temperature {temperature:g}, top-p {top_p:g}"
        console.print(Text(title, style="bold"), table)


def shapes_and_modes(
    drafter: Drafter, sampling: Sampling, settings: ReplaySettings, trees: list[Chain | StaticTree]
) -> list[tuple[Chain | StaticTree, VerificationMode]]:
    """The shapes and verification modes that a drafter is replayed with at a temperature."""
    exact: VerificationMode = "greedy" if sampling.greedy else "one_hot"
    modes: list[VerificationMode] = [exact]
    if not sampling.greedy and drafter.can_sample:
        modes.append("probabilistic")
    chains = [
        Chain(depth)
        for depth in range(1, min(settings.draft_length, drafter.max_draft_length or settings.draft_length) + 1)
    ]
    own_trees = trees if drafter.can_branch else ()
    return [*((chain, mode) for mode in modes for chain in chains), *((tree, exact) for tree in own_trees)]


def replayed_row(
    prompts: PromptSet,
    sampling: Sampling,
    shape: Chain | StaticTree,
    mode: VerificationMode,
    stats: list[Stats],
    settings: ReplaySettings,
    traces: list[AcceptanceTrace],
) -> dict[str, Any]:
    """Return a row of replay.json; its counters are expected values, which may be fractions."""
    is_chain = isinstance(shape, Chain)
    bins = calibration_bins(traces, shape.depth, mode) if is_chain else []
    calibration = {"calibration": to_json(bins), "calibration_error": list(map(calibration_error, bins))}
    return {
        "prompt_set": prompts.name,
        "num_prompts": len(prompts.token_ids),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "verification_mode": mode,
        "draft_length": shape.depth,
        "tree_nodes": None if is_chain else shape.num_nodes,
        "max_new_tokens": settings.max_new_tokens,
        **total_of(stats).to_json(),
        "mean_acceptance_length_ci95": length_interval(stats),
        **(calibration if is_chain else {}),
    }
