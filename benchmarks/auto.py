"""`draftsmith auto` beside training every kind with all of the time, on three kinds of traffic of the embedded target.

    python benchmarks/auto.py FOLDER [--traffic code dialogue tables] [--minutes 10 40] [--jobs 2] [--plot FILE]

A search gets so many minutes, on one thread. Then each of its kinds alone gets the time that the search had for its
race and its winner, on the same answers. At the end all of them, the search's choice and the lookups are measured in
turns on the search's test prompts, each at the draft length that is best on prompts of its race: how near comes the
choice to the best of all? A third table has the forecast of each kind after the first rung beside what it came to
alone, which judges the declines of recipes/auto/race.py. The fourth has each choice that was trained beside the better
lookup, in turns on prompts of files that neither the search nor its target learnt from. FOLDER keeps what was found,
but for the fourth table: give the same command again to go on.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from acceptance_forecast import tables
from matplotlib.figure import Figure
from rich.console import Console

from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.prompts.splits import write_prompts
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference.measuring import measure
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.results import Evaluation, read_evaluation
from draftsmith.inference.measuring.speed import Outputs, ratio_interval, speedup_of
from draftsmith.inference.planning.best_draft import acceptance_length
from draftsmith.models import Target, load_drafter
from draftsmith.recipes.auto import auto
from draftsmith.recipes.auto.auto import Auto
from draftsmith.recipes.auto.budget import PROBE_SHARE, TIMED_SAMPLES, recipe_of_auto
from draftsmith.recipes.auto.contenders import new_contenders
from draftsmith.recipes.auto.race import LOOKUPS, Contender, growth_to_come
from draftsmith.recipes.auto.score import grown
from draftsmith.recipes.auto.service_level import fastest_first
from draftsmith.recipes.configs.training_settings import AutoSettings
from draftsmith.recipes.evaluation.comparison import EvaluationOptions, evaluate_side_by_side, evaluation_paths
from draftsmith.recipes.pages.figures import BASELINE_COLOUR, COLOURS, save_plot
from draftsmith.recipes.pages.tables import draft_text, ratio_text
from draftsmith.recipes.quickstart.budget import time_step
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for
from draftsmith.train import train
from draftsmith.train.evaluation.pooling import subset
from draftsmith.train.run_folder.checkpoint import checkpoints

NUM_PROMPTS, NEW_TOKENS = 3000, 96
LENGTHS = (1, 2, 4, 8)  # tokens drafted a round, of which each drafter's best counts
NUM_CHOOSING = 16  # prompts of the race on which the best of these lengths is found
DEPTH = 4  # tokens drafted a round, for the forecasts
TRAFFICS = ("code", "dialogue", "tables")
PANEL = 2.2  # inches


def prompts_of(traffic: str, target: Target) -> list[Prompt]:
    """Return begun functions, questions for functions, or begun tables of character codes."""
    if traffic == "tables":
        return tables()[:NUM_PROMPTS]
    wants_chats = traffic == "dialogue"
    return [prompt for prompt in prompts_for(target, held_out=False) if bool(prompt.messages) == wants_chats][
        :NUM_PROMPTS
    ]


def settings_of(folder: Path, traffic: str, minutes: float) -> AutoSettings:
    """Return what the search is asked for."""
    return AutoSettings(
        traffic=str(folder / f"{traffic}.jsonl"),
        max_new_tokens=NEW_TOKENS,
        budget=minutes / 60,
        device="cpu",
        out=folder / f"{traffic}-{minutes:g}" / "search",
    )


def train_alone(settings: AutoSettings, kind: str) -> None:
    """Train one kind with all of the time that the search had for training, on the answers of the search.

    Its steps are timed anew, since the machine may have become slower or faster.
    """
    search = Auto(settings, Console(quiet=True))
    plan, samples = search.state.plan, read_samples(search.folder.samples)
    recipe = recipe_of_auto(kind, plan.target_is_small)
    drafter = new_contenders([kind], search.target, None)[kind]
    timed = time_step(recipe, drafter, search.target, [samples[number] for number in range(TIMED_SAMPLES)])
    runs_target = plan.stored_layers is None or recipe.drafter.starts_from_layers
    seconds = (PROBE_SHARE + plan.num_rungs) * plan.rung_seconds + plan.final_seconds
    config = search.config(kind, int(seconds / (timed.loss + runs_target * timed.features)))
    config.run.dir = str(settings.out.with_name(kind))
    train(config)


def compare(settings: AutoSettings, kinds: list[str]) -> list[Evaluation]:
    """Measure the kinds that were trained alone, what the search trained, and lookups; return them, fastest first.

    The fastest kind alone is then measured behind the better lookup of the search, too, as the search does with its.
    """
    search = Auto(settings, Console(quiet=True))
    alone = [str(checkpoints(settings.out.with_name(kind))[-1]) for kind in kinds]
    found = measured(search, alone + search.folder.drafters_of(search.state.finalists), "comparison")
    fastest = next(evaluation.drafter for evaluation in fastest_first(found) if evaluation.drafter in alone)
    lookup = max(search.state.lookups, key=lambda score: score.speedup).name
    return fastest_first(found + measured(search, [f"{lookup}+{fastest}"], "comparison_of_cascade"))


def measured(search: Auto, names: list[str], folder: str) -> list[Evaluation]:
    """Measure drafters in turns, each at its best draft length on the test prompts of a search; once for all calls.

    The lengths are those that are fastest on some prompts of the race, so that the test prompts choose nothing.
    """
    out = search.settings.out.with_name(folder)
    paths = evaluation_paths(out, names)
    if not all(path.is_file() for path in paths):
        grid = [replace(search.measuring, draft=length, repeats=1) for length in LENGTHS]
        options = EvaluationOptions(search.state.plan.num_threads, skips_impossible=True)
        choosing = subset(search.racing, list(range(NUM_CHOOSING)))
        found = evaluate_side_by_side(search.target, names, [choosing], grid, out / "lengths", options)
        best = {evaluation.drafter: evaluation.best.setting.draft_length for evaluation in found}
        grid = [settings for settings in grid if settings.draft in best.values()]
        options = replace(options, drafts={name: [length] for name, length in best.items()})
        test = search.prompt_set(search.folder.prompts.test)
        evaluate_side_by_side(search.target, names, [test], grid, out, options)
    return [read_evaluation(path) for path in paths]


def chosen_by(settings: AutoSettings) -> str:
    """Return what the search found to be fastest where it measured."""
    search = Auto(settings, Console(quiet=True))
    own = [read_evaluation(path) for path in search.folder.evaluations(search.state.finalists)]
    return fastest_first(own)[0].drafter


def line_of(settings: AutoSettings, traffic: str, minutes: float, kinds: list[str]) -> str:
    """Return a line of the table: the search's choice beside the best of all."""
    ranked = compare(settings, kinds)
    speedups = {evaluation.drafter: evaluation.best.speed.speedup for evaluation in ranked}
    best, chosen = ranked[0].drafter, chosen_by(settings)
    lookups = ", ".join(f"{name} {speedups[name]:.2f}×" for name in ("ngram", "suffix"))
    return (
        f"| {traffic} | {minutes:g} | {shown(chosen)} {speedups[chosen]:.2f}× | {shown(best)} {speedups[best]:.2f}× "
        f"| {speedups[chosen] / speedups[best]:.1%} | {lookups} |"
    )


def beside_lookup(settings: AutoSettings, traffic: str) -> str | None:
    """Return a line of the fourth table: how much faster than the better lookup the search's choice is.

    Each has the draft at which it was fastest at the end of the search. None where the choice is a lookup, and for
    tables, which are of no files.
    """
    search = Auto(settings, Console(quiet=True))
    chosen, *others = fastest_first(list(map(read_evaluation, search.folder.evaluations(search.state.finalists))))
    if chosen.drafter in LOOKUPS or traffic == "tables":
        return None
    lookup = next(evaluation for evaluation in others if evaluation.drafter in LOOKUPS)
    wants_chats = traffic == "dialogue"
    held_out = [prompt for prompt in prompts_for(search.target, held_out=True) if bool(prompt.messages) == wants_chats]
    plain, own, rival = outputs_in_turns(
        search,
        {"none": 1, chosen.drafter: draft_of(search, chosen), lookup.drafter: draft_of(search, lookup)},
        measure.PromptSet("held out", encode_prompts(held_out, search.target)),
    )
    ratios = [(own, plain), (rival, plain), (own, rival)]
    texts = " | ".join(ratio_text(speedup_of(*pair), ratio_interval(*pair)) for pair in ratios)
    name = f"{shown(chosen.drafter)}, {draft_text(chosen.best.setting)}"
    return f"| {traffic} | {len(held_out)} | {name} | {lookup.drafter} | {texts} |"


def outputs_in_turns(
    search: Auto, drafts: dict[str, measure.DraftSetting], prompts: measure.PromptSet
) -> list[Outputs]:
    """Return what drafters, given with their drafts, decode in turns, each prompt once."""
    contenders = {
        name: measure.Contender(
            name, load_drafter(name, search.target), replace(search.measuring, draft=draft, repeats=1)
        )
        for name, draft in drafts.items()
    }
    resolved = {name: contender.settings.resolve(contender.drafter) for name, contender in contenders.items()}
    return list(measure.decode_all(search.target, contenders, resolved, prompts, (), lambda: None).values())


def draft_of(search: Auto, measured: Evaluation) -> measure.DraftSetting:
    """Return the draft at which a drafter was fastest at the end of a search."""
    setting, tuned = measured.best.setting, search.state.tuned
    if setting.tree_nodes and tuned and tuned.tree:
        return tuned.tree
    return setting.schedule or setting.draft_length


def first_contenders(settings: AutoSettings) -> list[Contender]:
    """Return all kinds that raced, as they were after the first rung."""
    return [contender for rung in Auto(settings, Console(quiet=True)).state.rungs[:1] for contender in rung.contenders]


def forecast_line(settings: AutoSettings, traffic: str, minutes: float, first: Contender) -> str:
    """Return a line of the third table: a kind after the first rung, and its forecast beside what it came to alone."""
    search, kind = Auto(settings, Console(quiet=True)), first.score.name
    checkpoint = checkpoints(settings.out.with_name(kind))[-1]
    last, _ = search.measured(str(checkpoint), kind, int(checkpoint.name.rpartition("-")[2]))
    usual, best = growth_to_come(first.growth, last.steps / first.score.steps)
    now, reached = first.score.rates, last.rates
    lengths = [acceptance_length(rates, DEPTH) for rates in (now, grown(now, usual), grown(now, best), reached)]
    tokens = " | ".join(f"{length:.2f}" for length in lengths)
    return f"| {kind} | {traffic} | {minutes:g} | {first.score.steps} | {first.growth:.2f} | {last.steps} | {tokens} |"


def shown(name: str) -> str:
    """Return the name of a kind for the table: `search: suffix+hydra` for a cascade of the search."""
    lookup, plus, path = name.rpartition("+")
    parts = Path(path).parts
    if "checkpoints" not in parts:
        return name
    kind = lookup + plus + parts[parts.index("checkpoints") - 1]
    return f"search: {kind}" if "search" in parts else f"alone: {kind}"


def draw(cases: list[tuple[str, AutoSettings]], figure: Figure) -> None:
    """Draw a panel for each case: speedups with their intervals, the search's choice in another colour."""
    panels = figure.subplots(len(cases), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, settings) in zip(panels, cases, strict=True):
        ranked, chosen = compare(settings, settings.kinds)[::-1], chosen_by(settings)
        for place, evaluation in enumerate(ranked):
            speed = evaluation.best.speed
            assert speed.speedup_ci95
            colour = COLOURS[1] if evaluation.drafter == chosen else COLOURS[0]
            axes.plot(speed.speedup_ci95, [place, place], "-", color=colour)
            axes.plot(speed.speedup, place, "o", color=colour)
        axes.set_yticks(range(len(ranked)), [shown(evaluation.drafter) for evaluation in ranked])
        axes.axvline(1, color=BASELINE_COLOUR, linewidth=1)
        axes.set_title(title)
    panels[-1].set_xlabel("Speedup (the search's choice is orange)")


def started(command: list[str], log: Path) -> None:
    """Run a command on one thread, with its output in a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("a") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=True)


def run_all(folder: Path, cases: list[tuple[str, float]], num_jobs: int) -> None:
    """Run the searches of all cases, then each kind alone, so many at a time; what is done already stays."""

    def run(traffic: str, minutes: float, what: str) -> None:
        settings = settings_of(folder, traffic, minutes)
        done = settings.out / "auto.html" if what == "search" else settings.out.with_name(what) / "done"
        if not done.is_file():
            own = ["--only", traffic, f"{minutes:g}", what]
            started([sys.executable, __file__, str(folder), *own], settings.out.with_name(f"{what}.log"))
            done.touch()

    searches = [(*case, "search") for case in cases]
    alone = [(*case, kind) for case in cases for kind in settings_of(folder, *case).kinds]
    with ThreadPoolExecutor(num_jobs) as pool:
        list(pool.map(lambda each: run(*each), searches))
        list(pool.map(lambda each: run(*each), alone))


def run_one(settings: AutoSettings, what: str) -> None:
    """Run the search, or one kind alone."""
    if what == "search":
        auto.run(settings, Console(width=120))
    else:
        train_alone(settings, what)


def print_tables(folder: Path, cases: list[tuple[str, float]]) -> None:
    """Print what the search chose beside the best, all drafters, and how much each kind grew."""
    print("| traffic | minutes | chosen by the search | best of all | ratio | lookups |\n|---|---|---|---|---|---|")
    for traffic, minutes in cases:
        settings = settings_of(folder, traffic, minutes)
        print(line_of(settings, traffic, minutes, settings.kinds), flush=True)
    print("\n| traffic | minutes | drafter | draft length | speedup | tokens a round |\n|---|---|---|---|---|---|")
    for traffic, minutes in cases:
        settings = settings_of(folder, traffic, minutes)
        for evaluation in compare(settings, settings.kinds):
            row = evaluation.best
            speedup = ratio_text(row.speed.speedup, row.speed.speedup_ci95)
            print(
                f"| {traffic} | {minutes:g} | {shown(evaluation.drafter)} | {row.setting.draft_length} | {speedup} "
                f"| {row.tokens_a_round:.2f} |"
            )
    print("\n| kind | traffic | minutes | steps | growth | steps alone | tokens a round | forecast | at best | alone |")
    print(10 * "|---" + "|")
    for traffic, minutes in cases:
        settings = settings_of(folder, traffic, minutes)
        for contender in first_contenders(settings):
            print(forecast_line(settings, traffic, minutes, contender), flush=True)
    print("\n| traffic | prompts | chosen | lookup | speedup | that of the lookup | over the lookup |")
    print(7 * "|---" + "|")
    for traffic, minutes in cases:
        if line := beside_lookup(settings_of(folder, traffic, minutes), traffic):
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traffic", nargs="+", choices=TRAFFICS, default=list(TRAFFICS))
    parser.add_argument("--minutes", nargs="+", type=float, default=[10.0, 40.0])
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, of one thread each")
    parser.add_argument("--plot", type=Path, help="PNG of the second table")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)  # traffic, minutes, and the search or a kind
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only:
        traffic, minutes, what = args.only
        run_one(settings_of(args.folder, traffic, float(minutes)), what)
        return
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    cases = [(traffic, minutes) for minutes in args.minutes for traffic in args.traffic]
    for traffic in args.traffic:
        write_prompts(args.folder / f"{traffic}.jsonl", prompts_of(traffic, target))
    run_all(args.folder, cases, args.jobs)
    env = environment(target)
    print(f"{env.command}, {env.device}, one thread a run, commit {env.git_commit}\n")
    print_tables(args.folder, cases)
    if args.plot:
        panels = [
            (f"{traffic}, {minutes:g} minutes", settings_of(args.folder, traffic, minutes))
            for traffic, minutes in cases
        ]
        save_plot(args.plot, partial(draw, panels), PANEL * len(panels))


if __name__ == "__main__":
    main()
