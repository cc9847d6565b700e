"""Traffic that drifts over twelve rounds: acceptance with `draftsmith refresh`, without it, and with naive training.

    python benchmarks/refresh.py FOLDER [--prompts 200] [--steps 50] [--plot docs/refresh.png]

The embedded target continues functions of the standard library, C++ headers, docstrings and modules of Python, whose
shares move from round to round. The log of the sixth round is garbage, while users go on as before. A drafter is
trained on functions alone. Then it is left as it is, trained on the newest log alone in each round, or refreshed, with
the same steps in each round and the same recipe. After each round all three decode fresh prompts of its traffic.
"""

import argparse
import ast
import random
import string
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.prompts.sources import read_folder
from draftsmith.data.prompts.splits import write_prompts
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats, paired_difference, total_of
from draftsmith.inference.measuring.environment import device_name, git_commit
from draftsmith.models import Target, load_drafter
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.configs.training_settings import RefreshSettings
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.pages.figures import COLOURS, save_plot
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.recipes.refreshing.champions import Champions
from draftsmith.recipes.refreshing.refresh import DRAFT_LENGTH, one_round
from draftsmith.recipes.refreshing.state import read_state
from draftsmith.recipes.refreshing.training import RoundPlan, training_config
from draftsmith.train import TrainConfig, train
from draftsmith.train.run_folder.checkpoint import checkpoints

Shares = dict[str, float]  # of the prompts, by domain

POISONED = 6
ROUNDS: list[Shares] = [
    {"functions": 1.0},
    {"functions": 1.0},
    {"functions": 0.7, "headers": 0.3},
    {"functions": 0.5, "headers": 0.5},
    {"functions": 0.5, "headers": 0.5},
    {"functions": 0.5, "headers": 0.5},  # of its users; the log is garbage
    {"functions": 0.3, "headers": 0.4, "docstrings": 0.3},
    {"functions": 0.2, "headers": 0.2, "docstrings": 0.6},
    {"functions": 0.2, "headers": 0.2, "docstrings": 0.6},
    {"functions": 0.3, "docstrings": 0.3, "modules": 0.4},
    {"functions": 0.2, "docstrings": 0.2, "modules": 0.6},
    {"functions": 1.0},
]
KIND, NEW_TOKENS, BATCH_SIZE, NUM_TESTED = "hydra", 48, 16, 48
LONGEST = 240  # characters of a prompt
SITE = Path(torch.__file__).parents[1]


# --- traffic


def all_prompts() -> dict[str, list[Prompt]]:
    """Return the prompts of each domain in random order."""
    texts = {
        "functions": list(map(function_prompt, stdlib_functions(held_out=False))),
        "headers": [str(prompt.text) for prompt in read_folder(SITE / "torch/include/ATen", ("h",))],
        "modules": [str(prompt.text) for prompt in read_folder(SITE / "transformers/models", ("py",))],
        "docstrings": docstrings(SITE / "transformers/models"),
    }
    found = {}
    for domain, of_domain in texts.items():
        kept = list(dict.fromkeys(text[:LONGEST].rstrip() for text in of_domain if len(text) >= LONGEST // 4))
        random.Random(0).shuffle(kept)
        found[domain] = [Prompt(text=text, domain=domain) for text in kept]
    return found


def docstrings(folder: Path) -> list[str]:
    """Return the docstrings below a folder."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    trees = (ast.parse(path.read_text("utf-8")) for path in sorted(folder.rglob("*.py")))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in map(ast.get_docstring, nodes) if text]


def garbage(number: int, chances: random.Random) -> list[Prompt]:
    """Return prompts of printable characters drawn at random."""
    symbols = string.ascii_letters + string.digits + string.punctuation + " "
    return [Prompt(text="".join(chances.choices(symbols, k=LONGEST // 2)), domain="functions") for _ in range(number)]


class Users:
    """The users, who ask each prompt once."""

    def __init__(self) -> None:
        self._left = all_prompts()

    def ask(self, shares: Shares, number: int) -> list[Prompt]:
        """Return so many prompts with these shares of domains."""
        return [self._left[domain].pop() for domain, share in shares.items() for _ in range(round(share * number))]


# --- the drafters


@dataclass
class Simulation:
    """The folder, the target and the amounts of a simulation."""

    folder: Path
    target: Target
    num_prompts: int
    steps: int
    users: Users = field(default_factory=Users)

    def first_drafter(self, steps: int) -> Path:
        """Return a new drafter that was trained on functions alone."""
        prompts, folder = self.folder / "first.jsonl", self.folder / "first"
        write_prompts(prompts, self.users.ask({"functions": 1.0}, 4 * self.num_prompts))
        config = RECIPES[f"quickstart_{KIND}"]()
        config.target, config.evaluation.prompts = str(EMBEDDED_TARGET), None
        config.data.samples, config.run.dir, config.run.device = str(folder / "samples"), str(folder / "run"), "cpu"
        config.run.steps = config.run.checkpoint_every = steps
        return self.trained(config, prompts)

    def naive(self, before: Path, log: Path, number: int) -> Path:
        """Return a drafter trained on from the one before, on the newest log alone."""
        plan = RoundPlan(KIND, self.num_prompts, 0, self.steps, NEW_TOKENS)
        config = training_config(plan, self.target, before, self.folder / "naive" / str(number), "cpu")
        config.data.held_out_prompts, config.evaluation.patience = 0, None
        return self.trained(config, log)

    def trained(self, config: TrainConfig, prompts: Path) -> Path:
        """Return the last checkpoint of a run on the target's answers to prompts."""
        answers = PrepareSettings(max_new_tokens=NEW_TOKENS, batch_size=2 * BATCH_SIZE)
        prepare(self.target, str(prompts), Path(config.data.samples), answers)
        train(config)
        return checkpoints(Path(config.run.dir))[-1]

    def refresh(self, log: Path, first: Path) -> Path:
        """Return the champion after a round of a refresh."""
        settings = RefreshSettings(
            drafter=str(first),
            traffic=str(log),
            batch_size=BATCH_SIZE,
            max_new_tokens=NEW_TOKENS,
            steps=self.steps,
            device="cpu",
            out=self.folder / "refreshed",
        )
        one_round(settings, self.target, Console())
        champions = Champions(settings.out)
        assert champions.serving is not None
        return champions.path(champions.serving)

    def measure(self, checkpoint: Path, prompts: list[Prompt]) -> list[Stats]:
        """Return the counters of a drafter by prompt."""
        decoder = SpeculativeDecoder(self.target, load_drafter(checkpoint, self.target))
        return decoder.generate(
            encode_prompts(prompts, self.target), NEW_TOKENS, draft_length=DRAFT_LENGTH, batch_size=BATCH_SIZE
        ).stats.requests


# --- the result


@dataclass
class Outcome:
    """Acceptance lengths after a round, and what the refresh did in it."""

    lengths: dict[str, float]  # by arm
    gains: dict[str, tuple[float, float, float]]  # of the refresh over each other arm, with its interval
    said: str


def outcome_of(stats: dict[str, list[Stats]], said: str) -> Outcome:
    lengths = {arm: total_of(of_arm).mean_acceptance_length for arm, of_arm in stats.items()}
    gains = {}
    for arm in ("left", "naive"):
        found = paired_difference(stats["refreshed"], stats[arm])
        assert found.ci95
        gains[arm] = (found.difference, *found.ci95)
    return Outcome(lengths, gains, said)


def row(number: int, outcome: Outcome) -> str:
    lengths = "  ".join(f"{outcome.lengths[arm]:6.3f}" for arm in ("refreshed", "left", "naive"))
    gains = "  ".join("{:+.3f} [{:+.3f}, {:+.3f}]".format(*outcome.gains[arm]) for arm in ("left", "naive"))
    return f"{number:5}  {lengths}  {gains}  {outcome.said}"


def draw(outcomes: list[Outcome], figure: Figure) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    numbers = list(range(1, len(outcomes) + 1))
    for arm, colour in zip(("refreshed", "left", "naive"), COLOURS, strict=False):
        above.plot(numbers, [outcome.lengths[arm] for outcome in outcomes], "o-", color=colour, label=arm)
    for arm, colour in zip(("left", "naive"), COLOURS[1:], strict=False):
        gains: Any = [outcome.gains[arm] for outcome in outcomes]
        below.plot(numbers, [gain for gain, _, _ in gains], "o-", color=colour, label=f"over {arm}")
        below.fill_between(
            numbers, [low for _, low, _ in gains], [high for *_, high in gains], color=colour, alpha=0.15
        )
    for axes, text in ((above, "Tokens a round"), (below, "Gain of the refresh")):
        axes.axvline(POISONED, linestyle=":", color="grey", linewidth=1)
        axes.set_ylabel(text)
        axes.legend()
    below.axhline(0, color="grey", linewidth=1)
    below.set_xlabel("Round (dotted: its log is garbage)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=200, help="of each round's log")
    parser.add_argument("--steps", type=int, default=50, help="of training in each round")
    parser.add_argument("--first-steps", type=int, default=60, help="of the drafter that serves at first")
    parser.add_argument("--rounds", type=int, default=len(ROUNDS))
    parser.add_argument("--plot", type=Path, default=Path("docs/refresh.png"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, chances = time.perf_counter(), random.Random(0)
    target = load_target(str(EMBEDDED_TARGET), "cpu")
    simulation = Simulation(arguments.folder, target, arguments.prompts, arguments.steps)
    first = simulation.first_drafter(arguments.first_steps)
    naive, outcomes = first, []
    for number, shares in enumerate(ROUNDS[: arguments.rounds], 1):
        log = arguments.folder / "logs" / f"{number}.jsonl"
        asked = simulation.users.ask(shares, arguments.prompts)
        write_prompts(log, garbage(len(asked), chances) if number == POISONED else asked)
        refreshed, naive = simulation.refresh(log, first), simulation.naive(naive, log, number)
        tested = simulation.users.ask(shares, NUM_TESTED)
        arms = {"refreshed": refreshed, "left": first, "naive": naive}
        stats = {arm: simulation.measure(checkpoint, tested) for arm, checkpoint in arms.items()}
        newest = read_state(arguments.folder / "refreshed").rounds[-1]
        outcomes.append(outcome_of(stats, f"{newest.look.reason if newest.look else ''} -> {newest.outcome}"))
        print(row(number, outcomes[-1]), flush=True)
        save_plot(arguments.plot, partial(draw, outcomes), 5.4)
    minutes = (time.perf_counter() - start) / 60
    print(f"\n{device_name(target)}, 1 thread, commit {git_commit()}, {minutes:.1f} minutes")
    print(f"{arguments.prompts} prompts and {arguments.steps} steps a round, {KIND}, {NUM_TESTED} fresh prompts tested")
    print("round  refreshed  left  naive; gain over left and over naive, 95 % intervals; what the refresh did")
    for number, outcome in enumerate(outcomes, 1):
        print(row(number, outcome))
    for arm in ("left", "naive"):
        lowest = min(outcome.gains[arm][2] for outcome in outcomes)
        mean = sum(outcome.gains[arm][0] for outcome in outcomes) / len(outcomes)
        print(f"over {arm}: mean gain {mean:+.3f}; the lowest upper end of an interval {lowest:+.3f}")


if __name__ == "__main__":
    main()
