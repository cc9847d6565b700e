"""Traffic that drifts over twelve rounds: acceptance with `draftsmith refresh`, without it, and with naive training.

    python benchmarks/refresh.py FOLDER [--seeds 0 1 2] [--prompts 512] [--steps 100] [--plot docs/refresh.png]

The embedded target continues functions of the standard library, C++ headers, docstrings and modules of Python, whose
shares move from round to round. The log of the sixth round is garbage, while users go on as before. A drafter is
trained on functions alone. Then it is left as it is, trained on the newest log alone in each round, or refreshed, with
the same steps in each round and the same recipe. After each round all decode fresh prompts of its traffic. Beside them
stands a second naive drafter, which does not train on the prompts that the refresh holds out to judge by: what it lacks
beside the first one is the price of judging.

A seed draws the prompts, and the first drafter's weights. FOLDER keeps all: give the same command again to go on. Seeds
may be run by several processes, and the command with all of them prints the tables and draws the plot.
"""

import argparse
import ast
import json
import random
import string
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import torch
from matplotlib.figure import Figure
from rich.console import Console
from scipy.special import stdtrit

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts, read_prompts
from draftsmith.data.prompts.sources import read_folder
from draftsmith.data.prompts.splits import prompt_hash, write_prompts
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats, paired_difference, total_of
from draftsmith.inference.measuring.environment import device_name, git_commit
from draftsmith.models import Target, load_drafter
from draftsmith.models.storage.files import write_whole
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.configs.training_settings import RefreshSettings
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.pages.figures import COLOURS, save_plot
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.recipes.refreshing.champions import Champions
from draftsmith.recipes.refreshing.refresh import DRAFT_LENGTH, one_round
from draftsmith.recipes.refreshing.state import read_state
from draftsmith.recipes.refreshing.training import RoundPlan, training_config
from draftsmith.recipes.refreshing.window import Window
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
KIND, NEW_TOKENS, BATCH_SIZE, NUM_TESTED = "hydra", 48, 16, 96
ARMS, OTHERS = ("refreshed", "left", "naive", "less"), ("left", "naive", "less")  # less: naive, without the held-out
OUTCOMES = "outcomes.json"
FIRST_PROMPTS, FIRST_STEPS = 800, 60  # of the drafter that serves at first
LONGEST = 240  # characters of a prompt
SITE = Path(torch.__file__).parents[1]


# --- traffic


def all_prompts(seed: int) -> dict[str, list[Prompt]]:
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
        random.Random(seed).shuffle(kept)
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

    def __init__(self, seed: int) -> None:
        self._left = all_prompts(seed)

    def ask(self, shares: Shares, number: int) -> list[Prompt]:
        """Return so many prompts with these shares of domains."""
        return [self._left[domain].pop() for domain, share in shares.items() for _ in range(round(share * number))]


# --- the drafters


@dataclass(frozen=True)
class Simulation:
    """The folder and the seed of a simulation, its target and the amounts of a round."""

    folder: Path
    seed: int
    target: Target
    num_prompts: int
    steps: int

    def first_drafter(self, asked: list[Prompt]) -> Path:
        """Return a new drafter that was trained on the answers to these prompts."""
        prompts, folder = self.folder / "first.jsonl", self.folder / "first"
        write_prompts(prompts, asked)
        config = RECIPES[f"quickstart_{KIND}"]()
        config.target, config.evaluation.prompts = str(EMBEDDED_TARGET), None
        config.data.samples, config.run.dir, config.run.device = str(folder / "samples"), str(folder / "run"), "cpu"
        config.run.steps = config.run.checkpoint_every = FIRST_STEPS
        config.run.seed = self.seed
        return self.trained(config, prompts)

    def naive(self, before: Path, prompts: Path, folder: Path) -> Path:
        """Return a drafter trained on from the one before, on the newest prompts alone."""
        plan = RoundPlan(KIND, self.num_prompts, 0, self.steps, NEW_TOKENS)
        config = training_config(plan, self.target, before, folder, "cpu")
        config.data.held_out_prompts, config.evaluation.patience = 0, None
        return self.trained(config, prompts)

    def without_held_out(self, log: Path, number: int) -> Path:
        """Return the file of a log's prompts but for those that the refresh held out in that round."""
        window, path = Window(self.folder / "refreshed" / "prompts"), log.with_suffix(".less.jsonl")
        held_out = set(map(prompt_hash, window.held_out(number))) if number in window.numbers() else set()
        write_prompts(path, [prompt for prompt in read_prompts(log) if prompt_hash(prompt) not in held_out])
        return path

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

    def run(self) -> list["Outcome"]:
        """Return what came of each round. Each is written when it is over, so that an ended simulation goes on."""
        users, chances, outcomes = Users(self.seed), random.Random(self.seed), read_outcomes(self.folder)
        naive = less = first = self.first_drafter(users.ask({"functions": 1.0}, FIRST_PROMPTS))
        for number, shares in enumerate(ROUNDS, 1):
            log = self.folder / "logs" / f"{number}.jsonl"
            asked = users.ask(shares, self.num_prompts)
            write_prompts(log, garbage(len(asked), chances) if number == POISONED else asked)
            tested = users.ask(shares, NUM_TESTED)
            refreshed = self.refresh(log, first)
            naive = self.naive(naive, log, self.folder / "naive" / str(number))
            less = self.naive(less, self.without_held_out(log, number), self.folder / "less" / str(number))
            if number > len(outcomes):
                checkpoint_of = dict(zip(ARMS, (refreshed, first, naive, less), strict=True))
                stats = {arm: self.measure(checkpoint, tested) for arm, checkpoint in checkpoint_of.items()}
                newest = read_state(self.folder / "refreshed").rounds[-1]
                said = [newest.look.reason] if newest.look else []
                outcomes.append(Outcome(stats, " -> ".join([*said, newest.outcome or ""])))
                write_whole(self.folder / OUTCOMES, json.dumps(list(map(asdict, outcomes))))
                print(row(number, outcomes[-1]), flush=True)
        return outcomes


# --- the result


@dataclass(frozen=True)
class Outcome:
    """The counters of each arm after a round, by prompt, and what the refresh did in it."""

    stats: dict[str, list[Stats]]
    said: str

    @property
    def lengths(self) -> dict[str, float]:
        """The acceptance length of each arm."""
        return {arm: total_of(stats).mean_acceptance_length for arm, stats in self.stats.items()}

    def gain(self, other: str, arm: str = "refreshed") -> tuple[float, float, float]:
        """Return the gain of an arm over another one, with its 95 % interval over prompts."""
        found = paired_difference(self.stats[arm], self.stats[other])
        assert found.ci95
        return found.difference, *found.ci95


def pooled(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome of a round by several seeds, whose prompts are taken together."""
    stats = {arm: [of_prompt for outcome in outcomes for of_prompt in outcome.stats[arm]] for arm in ARMS}
    ends = Counter(outcome.said.split(" -> ")[-1].split(":")[0] for outcome in outcomes)
    return Outcome(stats, ", ".join(f"{number} {end}" for end, number in ends.items()))


def read_outcomes(folder: Path) -> list[Outcome]:
    """Return what the folder of a simulation holds."""
    path = folder / OUTCOMES
    return [
        Outcome({arm: [Stats(**of_prompt) for of_prompt in stats] for arm, stats in row["stats"].items()}, row["said"])
        for row in (json.loads(path.read_text()) if path.is_file() else [])
    ]


def row(number: int, outcome: Outcome) -> str:
    """Return a line of a table."""
    lengths = "  ".join(f"{outcome.lengths[arm]:6.3f}" for arm in ARMS)
    gains = "  ".join("{:+.3f} [{:+.3f}, {:+.3f}]".format(*outcome.gain(arm)) for arm in OTHERS)
    return f"{number:5}  {lengths}  {gains}  {outcome.said}"


def print_table(title: str, outcomes: list[Outcome]) -> None:
    """Print the rounds."""
    print(
        f"\n{title}: round; tokens a round of {', '.join(ARMS)}; gain over left, naive and less; what the refresh did"
    )
    for number, outcome in enumerate(outcomes, 1):
        print(row(number, outcome))


def print_mean_gains(by_seed: list[list[Outcome]]) -> None:
    """Print the mean gain over the rounds by seed, its interval over seeds, and how many rounds lie surely below."""
    for arm, other in (("refreshed", "left"), ("refreshed", "naive"), ("refreshed", "less"), ("less", "naive")):
        gains = [[outcome.gain(other, arm) for outcome in outcomes] for outcomes in by_seed]
        means = [fmean(gain for gain, _, _ in of_seed) for of_seed in gains]
        of_seeds = ", ".join(f"{mean:+.3f}" for mean in means)
        reach = ""
        if len(means) > 2:
            reach = f" ± {float(stdtrit(len(means) - 1, 0.975)) * stdev(means) / len(means) ** 0.5:.3f} (95 %)"
        together = [gain for of_seed in gains for gain in of_seed]
        below = sum(high < 0 for _, _, high in together)
        above = sum(low > 0 for _, low, _ in together)
        print(f"{arm} over {other}: mean gain {fmean(means):+.3f}{reach}, by seed {of_seeds}")
        print(f"  of {len(together)} intervals {below} lie below 0 and {above} above")


def print_sharpness(simulations: list[Simulation]) -> None:
    """Print how many standard errors the challengers' gains are from 0, as judged by expectation and by decoding."""
    rounds = [round for simulation in simulations for round in read_state(simulation.folder / "refreshed").rounds]
    judged = [round.judgement.new for round in rounds if round.judgement]
    for name, lengths in (("expected", [new.expected for new in judged]), ("decoded", [new.decoded for new in judged])):
        errors = [2 * of.difference / (of.ci95[1] - of.difference) for of in lengths if of.ci95]  # half of it is 2
        prompts = fmean(of.num_prompts for of in lengths)
        print(
            f"{name} gains of {len(errors)} challengers on {prompts:.0f} prompts: {fmean(errors):.1f} standard errors"
        )


def draw(outcomes: list[Outcome], figure: Figure) -> None:
    """Draw tokens a round and gains by round."""
    above, below = figure.subplots(2, 1, sharex=True)
    numbers = list(range(1, len(outcomes) + 1))
    for arm, colour in zip(ARMS, COLOURS, strict=False):
        above.plot(numbers, [outcome.lengths[arm] for outcome in outcomes], "o-", color=colour, label=arm)
    for arm, colour in zip(OTHERS, COLOURS[1:], strict=False):
        gains, lows, highs = zip(*(outcome.gain(arm) for outcome in outcomes), strict=True)
        below.plot(numbers, gains, "o-", color=colour, label=f"over {arm}")
        below.fill_between(numbers, lows, highs, color=colour, alpha=0.15)
    for axes, text in ((above, "Tokens a round"), (below, "Gain of the refresh")):
        axes.axvline(POISONED, linestyle=":", color="grey", linewidth=1)
        axes.set_ylabel(text)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(ARMS))
    below.axhline(0, color="grey", linewidth=1)
    below.set_xlabel("Round (dotted: its log is garbage)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=512, help="of each round's log")
    parser.add_argument("--steps", type=int, default=100, help="of training in each round")
    parser.add_argument("--plot", type=Path, default=Path("docs/refresh.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(str(EMBEDDED_TARGET), "cpu")
    simulations = [Simulation(args.folder / str(seed), seed, target, args.prompts, args.steps) for seed in args.seeds]
    by_seed = [simulation.run() for simulation in simulations]
    together = [pooled(list(of_round)) for of_round in zip(*by_seed, strict=True)]
    save_plot(args.plot, partial(draw, together), 5.4)
    print(f"\n{device_name(target)}, 1 thread, commit {git_commit()}")
    print(f"{args.prompts} prompts and {args.steps} steps a round, {KIND}, {NUM_TESTED} fresh prompts tested by seed")
    for seed, outcomes in zip(args.seeds, by_seed, strict=True):
        print_table(f"seed {seed}", outcomes)
    print_table("all seeds", together)
    print_mean_gains(by_seed)
    print_sharpness(simulations)


if __name__ == "__main__":
    main()
