"""`evaluate --replay`: every drafter, draft length, tree and verification mode from one recording of the target.

No time is measured: one plain decoding of the prompts a temperature and one pass over each text score everything
(inference/replay/replay.py). Written to replay.json.
"""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.inference.decoding.counters import Stats, length_interval, paired_difference
from draftsmith.inference.decoding.decoder import check_sampling, check_shape
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, acceptance_fields
from draftsmith.inference.replay.calibration import calibration_fields
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
from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.files import require_writable, write_json
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, DynamicTree, StaticTree
from draftsmith.recipes.reports.contents import checkpoint_names

LONGEST = 8  # draft length up to which chains are replayed where none is given


@dataclass(frozen=True)
class ReplaySettings:
    samplings: tuple[Sampling, ...] = (Sampling(),)
    longest: int = LONGEST  # chains of 1 to so many tokens
    trees: tuple[Chain | StaticTree, ...] = ()
    max_new_tokens: int = 64
    seed: int = 0


def replay_drafters(
    target: Target,
    names: list[str],
    prompt_sets: list[PromptSet],
    settings: ReplaySettings,
    out: Path,
    console: Console,
) -> dict[str, Any]:
    """Replay drafters (checkpoints, Hub names, `ngram`); prints, writes and returns the content of OUT/replay.json.

    Of rows beyond the first drafter's, `difference` is their acceptance length less that drafter's at the same setting,
    with a paired interval. Raises `UserError`, before anything is decoded, for what cannot be replayed.
    """
    require_at_least("--draft-length", settings.longest)
    drafters = {name: load_drafter(name, target) for name in names}
    for drafter in drafters.values():
        check_replayed(drafter)
        for tree in settings.trees if drafter.can_branch else ():
            check_shape(tree, drafter)
    require_writable(out)
    longest = max([settings.longest, *(tree.depth for tree in settings.trees)])
    rows: list[dict[str, Any]] = []
    for prompts, sampling in itertools.product(prompt_sets, settings.samplings):
        recording = record(target, prompts.token_ids, sampling, settings.max_new_tokens, longest, settings.seed)
        traces = replay(target, recording, drafters, longest)
        for name, drafter in drafters.items():
            for shape, mode in settings_of(drafter, sampling, settings):
                stats = [expected_stats(trace, shape, mode) for trace in traces[name]]
                row = {"drafter": name, **replayed_row(prompts, sampling, shape, mode, stats, settings, traces[name])}
                if name != names[0] and (shape, mode) in settings_of(drafters[names[0]], sampling, settings):
                    others = [expected_stats(trace, shape, mode) for trace in traces[names[0]]]
                    row["difference"] = {"from": names[0], **paired_difference(stats, others)}
                rows.append(row)
    content = {"target": target.name, "environment": environment(target), "results": rows}
    write_json(out / "replay.json", content)
    print_replays(rows, console)
    console.print(f"expected counters of {len(rows)} settings: {out / 'replay.json'}")
    return content


def replay_settings(args: argparse.Namespace, grid: list[MeasureSettings]) -> ReplaySettings:
    """From the command line; `UserError` for what a replay does not look at."""
    given = {
        "--choose": args.choose is not None,
        "--batch-size": args.batch_size != [1],
        "--repeats": args.repeats is not None,
        "--minutes": args.minutes is not None,
        "--baseline": bool(args.baseline),
        "--certify": args.certify,
        "--synthetic-acceptance": bool(args.synthetic_acceptance),
        "--verification-mode": args.verification_mode is not None,
    }
    refuse_without_effect(given, "--replay, which takes no time and tries all modes")
    samplings = tuple(dict.fromkeys(check_sampling(one.temperature, one.top_p, 0) for one in grid))
    trees: dict[Chain | StaticTree, None] = {}
    for draft in (one.draft for one in grid if not isinstance(one.draft, int)):
        if not isinstance(draft, StaticTree | DynamicTree):
            raise UserError("a schedule cannot be replayed, it goes by how many requests run: leave out --replay")
        trees[check_replayed_as(draft, "one_hot")] = None
    return ReplaySettings(samplings, max(args.draft_length or [LONGEST]), tuple(trees), args.max_new_tokens, args.seed)


def refuse_without_effect(given: dict[str, bool], mode: str) -> None:
    """`UserError` for the first option that was given and that a mode of `evaluate` does not look at."""
    for name in (name for name, was_given in given.items() if was_given):
        raise UserError(f"{name} has no effect with {mode}: leave it out")


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


def settings_of(
    drafter: Drafter, sampling: Sampling, settings: ReplaySettings
) -> list[tuple[Chain | StaticTree, VerificationMode]]:
    """The shapes and verification modes that a drafter is replayed with at a temperature."""
    exact: VerificationMode = "greedy" if sampling.greedy else "one_hot"
    modes: list[VerificationMode] = [exact]
    if not sampling.greedy and drafter.can_sample:
        modes.append("probabilistic")
    chains = [
        Chain(depth) for depth in range(1, min(settings.longest, drafter.max_draft_length or settings.longest) + 1)
    ]
    trees = settings.trees if drafter.can_branch else ()
    return [*((chain, mode) for mode in modes for chain in chains), *((tree, exact) for tree in trees)]


def replayed_row(
    prompts: PromptSet,
    sampling: Sampling,
    shape: Chain | StaticTree,
    mode: VerificationMode,
    stats: list[Stats],
    settings: ReplaySettings,
    traces: list[AcceptanceTrace],
) -> dict[str, Any]:
    """One row of replay.json; its counters are expected values, which may be fractions."""
    is_chain = isinstance(shape, Chain)
    return {
        "prompt_set": prompts.name,
        "num_prompts": len(prompts.token_ids),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "verification_mode": mode,
        "draft_length": shape.depth,
        "tree_nodes": None if is_chain else shape.num_nodes,
        "max_new_tokens": settings.max_new_tokens,
        **acceptance_fields(sum(stats[1:], stats[0])),
        "mean_acceptance_length_ci95": length_interval(stats),
        **(calibration_fields(traces, shape.depth, mode) if is_chain else {}),
    }
