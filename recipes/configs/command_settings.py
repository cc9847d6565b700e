"""The settings of every command. Each field is a flag of the command line, or one of its positional arguments.
The docstring of a class is what `--help` of its command says, with an example.

Nothing slow is imported here, so that `--help` and mistakes in flags are answered at once.
"""

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

VerificationMode = Literal["greedy", "one_hot", "probabilistic", "block", "without_replacement", "typical"]
Engine = Literal["vllm", "sglang", "speculators", "safeailab", "fasterdecoding"]
Lognormal = tuple[float, float]  # median and sigma

# Groups of flags, in the order of `--help`.
INPUT, DECODING, TRAFFIC, MEASURING, OUTPUT = "input", "decoding", "traffic", "measuring", "output and machine"
GROUPS = (INPUT, DECODING, TRAFFIC, MEASURING, OUTPUT)


def option(
    group: str,
    help: str,
    default: Any = MISSING,
    metavar: str | tuple[str, str] | None = None,
    least: float | None = None,
    repeatable: bool = False,
    positional: bool = False,
) -> Any:
    """Return a field that is a flag, in a group of `--help`. It is required where it has no default.

    A tuple takes its values in a row, or one at a time from a `repeatable` flag. No value may be below `least`.
    """
    metadata = {"group": group, "metavar": metavar, "least": least, "repeatable": repeatable, "positional": positional}
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """The machine that a command computes on."""

    device: str | None = option(OUTPUT, "cpu, cuda or cuda:N (a GPU if there is one)", None, "D")


@dataclass(frozen=True, kw_only=True)
class OfTarget(OnDevice):
    """A command for one target."""

    target: str = option(INPUT, "Hub name or directory", metavar="T")


@dataclass(frozen=True, kw_only=True)
class OfDrafters(OfTarget):
    """The settings that all commands share which measure drafters on prompts."""

    drafter: tuple[str, ...] = option(INPUT, "checkpoint, ngram, suffix, lookahead, none", metavar="D", repeatable=True)
    num_prompts: int | None = option(INPUT, "take so many of each (all)", None, "N", least=1)
    top_p: float = option(DECODING, "probability that is sampled from", 1.0, "P")
    max_new_tokens: int = option(DECODING, "tokens of an answer", 32, "N", least=1)
    seed: int = option(DECODING, "seed of the noise", 0, "N")
    num_threads: int | None = option(OUTPUT, "CPU threads (torch's default)", None, "N", least=1)
    out: Path = option(OUTPUT, "folder to write", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(OfDrafters):
    """Measure acceptance and speed of drafters beside plain decoding.

    example:
      draftsmith evaluate --target MODEL --drafter runs/my/best --drafter ngram \\
        --prompts held_out.jsonl --temperature 0 1 --batch-size 1 4 --out runs/my-evaluation
    """

    prompts: tuple[str, ...] = option(INPUT, "files, folders, Hub NAME:COLUMN, .yaml", metavar="P")
    baseline: tuple[str, ...] = option(INPUT, "generate, assisted, prompt_lookup", (), metavar="NAME")
    temperature: tuple[float, ...] = option(DECODING, "temperatures to sample at", (0.0,), "X")
    batch_size: tuple[int, ...] = option(DECODING, "prompts decoded at a time", (1,), "N", least=1)
    draft_length: tuple[int, ...] = option(DECODING, "of chains (4, none beside a --tree)", (), "K", least=1)
    tree: tuple[str, ...] = option(DECODING, "NODES,DEPTH,WIDTH or a .json of choices", (), "TREE")
    schedule: Path | None = option(DECODING, "draft lengths by load (docs/load.md)", None, "FILE")
    verification_mode: VerificationMode | None = option(DECODING, "(the usual one of the drafter)", None, "MODE")
    synthetic_acceptance: tuple[float, ...] = option(DECODING, "accept at these chances", (), "RATE")
    repeats: int | None = option(MEASURING, "of every setting (5 that fit in 4 minutes)", None, "N", least=1)
    minutes: float | None = option(MEASURING, "time of all, instead of --repeats", None, "X", least=0.01)
    certify: bool = option(MEASURING, "test that the output is the target's", False)


@dataclass(frozen=True, kw_only=True)
class TuneSettings(OfDrafters):
    """Fit draft length, tree and schedule on some prompts, and measure them on others.

    example:
      draftsmith tune --target MODEL --drafter runs/my/best --fit-prompts fit.jsonl \\
        --prompts held_out.jsonl --batch-size 1 4 8 --out runs/my-choice
    """

    prompts: tuple[str, ...] = option(INPUT, "prompts to measure on", metavar="P")
    fit_prompts: str | None = option(INPUT, "other prompts to fit on (half of --prompts)", None, "P")
    temperature: float = option(DECODING, "temperature to sample at", 0.0, "X")
    batch_size: tuple[int, ...] = option(DECODING, "prompts decoded at a time", (1,), "N", least=1)
    verification_mode: VerificationMode | None = option(DECODING, "(the usual one of the drafter)", None, "MODE")
    repeats: int = option(MEASURING, "of every setting", 5, "N", least=1)


@dataclass(frozen=True, kw_only=True)
class LoadTestSettings(OfDrafters):
    """Put a drafter under traffic, with speculation on, off and scheduled.

    example:
      draftsmith load-test --target MODEL --drafter runs/my/best --prompts held_out.jsonl \\
        --concurrency 1 2 4 8 --out runs/my-load
    """

    prompts: str = option(INPUT, "file, folder, Hub NAME:COLUMN or .yaml", metavar="P")
    temperature: float = option(DECODING, "temperature to sample at", 0.0, "X")
    draft_length: int = option(DECODING, "drafted tokens of a round", 4, "K", least=1)
    schedule: Path | None = option(DECODING, "of draft lengths (from measured costs)", None, "FILE")
    verification_mode: VerificationMode | None = option(DECODING, "(the usual one of the drafter)", None, "MODE")
    rate: tuple[float, ...] = option(TRAFFIC, "stages of an open test: requests a second", (), "R", least=0.001)
    concurrency: tuple[int, ...] = option(TRAFFIC, "stages of a closed test: requests at once", (), "N", least=1)
    requests: int | None = option(TRAFFIC, "of each run (50, but 8 for each client)", None, "N", least=10)
    max_batch: int | None = option(TRAFFIC, "requests that an open test runs at once (16)", None, "N", least=1)
    prompt_lengths: Lognormal | None = option(TRAFFIC, "lognormal, by the nearest prompts", None, ("MEDIAN", "SIGMA"))
    output_lengths: Lognormal | None = option(TRAFFIC, "lognormal, answers are cut there", None, ("MEDIAN", "SIGMA"))
    repeats: int = option(MEASURING, "runs of each stage", 3, "N", least=1)
    sla_ttft_ms: float | None = option(MEASURING, "limit for p95 of the time to first token", None, "MS")
    sla_tpot_ms: float | None = option(MEASURING, "limit for p95 of the time per later token", None, "MS")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(OfDrafters):
    """Find the acceptance of all draft lengths and verification modes from one recording.

    example:
      draftsmith replay --target MODEL --drafter runs/my/best --drafter ngram \\
        --prompts held_out.jsonl --temperature 0 1 --out runs/my-replay
    """

    prompts: tuple[str, ...] = option(INPUT, "files, folders, Hub NAME:COLUMN, .yaml", metavar="P")
    temperature: tuple[float, ...] = option(DECODING, "temperatures to sample at", (0.0,), "X")
    draft_length: int = option(DECODING, "the longest chain to replay", 8, "K", least=1)
    tree: tuple[str, ...] = option(DECODING, "a static tree: .json of choices", (), "FILE")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(OfTarget):
    """Say before training whether a drafter can pay, from what it costs on this device.

    example:
      draftsmith plan --target MODEL --drafter eagle3 --drafter medusa --out runs/plan
    """

    drafter: tuple[str, ...] = option(INPUT, "kind or recipe, untrained, or a checkpoint", metavar="D", repeatable=True)
    acceptance: tuple[str, ...] = option(INPUT, "measured acceptance, or a rate for all depths", (), "FILE_OR_RATE")
    batch_size: tuple[int, ...] = option(DECODING, "requests decoded at a time", (1, 2, 4, 8, 16, 32), "N", least=1)
    context: int | None = option(DECODING, "tokens of a request (256, at most half)", None, "N", least=1)
    draft_length: tuple[int, ...] = option(DECODING, "(1 to 8, or as far as the drafter goes)", (), "K", least=1)
    tree_nodes: tuple[int, ...] = option(DECODING, "plan trees of so many nodes, too", (), "N", least=2)
    num_threads: int | None = option(OUTPUT, "CPU threads (torch's default)", None, "N", least=1)
    out: Path = option(OUTPUT, "folder to write", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings(OnDevice):
    """Train and measure drafters with nothing to download.

    example:
      draftsmith quickstart --minutes 10
    """

    target: str | None = option(INPUT, "Hub name or directory (one is shipped)", None, "T")
    drafters: str = option(INPUT, "comma-separated", "eagle3,hydra,medusa,draft_model", "KINDS")
    minutes: float = option(MEASURING, "time for everything", 10.0, "X", least=0.001)
    out: Path = option(OUTPUT, "folder to write", Path("runs/quickstart"), "DIR")


@dataclass(frozen=True, kw_only=True)
class PrepareCommandSettings(OfTarget):
    """Let the target answer prompts: the text to train on.

    example:
      draftsmith prepare --target MODEL --prompts P.jsonl --held-out-share 0.05 --out data/my
    """

    prompts: str = option(INPUT, "file, folder, Hub NAME:COLUMN or .yaml", metavar="P")
    held_out_share: float = option(INPUT, "of the prompts, kept in OUT/held_out.jsonl", 0.0, "X")
    skip_long: bool = option(INPUT, "leave out prompts beyond the context", False)
    refuse_surrogates: bool = option(INPUT, "stop at half characters, which are replaced else", False)
    as_given: bool = option(INPUT, "store conversations as they are", False)
    max_new_tokens: int = option(DECODING, "tokens of an answer", 256, "N", least=1)
    temperature: tuple[float, ...] = option(DECODING, "taken in turn", (0.0, 1.0), "X")
    top_p: tuple[float, ...] = option(DECODING, "one a temperature, or one for all", (1.0,), "P")
    top_k: tuple[int, ...] = option(DECODING, "likewise; 0 is off", (0,), "K")
    batch_size: int = option(DECODING, "prompts answered at a time", 32, "N", least=1)
    seed: int = option(DECODING, "seed of the noise", 0, "N")
    drafter: str | None = option(DECODING, "speeds the target up, such as ngram (none)", None, "D")
    draft_length: int | None = option(DECODING, "drafted tokens of a round (4)", None, "K", least=1)
    endpoint: str | None = option(DECODING, "vLLM or SGLang server that answers", None, "URL")
    dry_run: bool = option(OUTPUT, "measure what all will take; write nothing", False)
    out: Path = option(OUTPUT, "folder to write", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Train a drafter by a recipe; the same command resumes an interrupted run.

    recipes:
      eagle, eagle3, p_eagle, medusa, medusa_2, hydra, mlp_speculator, draft_model;
      quickstart_ before any of them but medusa_2: for the target that draftsmith ships;
      those for public targets: docs/recipes.md

    example:
      draftsmith train eagle3 target=MODEL data.samples=data/my run.dir=runs/my \\
        evaluation.prompts=data/my/held_out.jsonl

    the keys that are set most often; all, with their values, are in the config.yaml of any run:
      target=MODEL                     Hub name or directory
      data.samples=DIR                 what draftsmith prepare wrote
      run.dir=DIR                      folder to write, such as runs/my
      evaluation.prompts=FILE          measure every checkpoint on these
      run.steps=N                      of the optimiser
      run.checkpoint_every=N           steps
      optimizer.learning_rate=RATE     at its peak
      data.batch_size=N                samples a step, over all processes
      data.max_length=N                tokens of a row
      data.tokens_per_micro_batch=N    of a forward pass: less takes less memory
      init_from=CHECKPOINT             train on from it
    """

    recipe: str = option(INPUT, "see below", metavar="RECIPE", positional=True)
    config: Path | None = option(INPUT, "YAML over the recipe, as of a run", None, "FILE")
    overfit: int | None = option(INPUT, "only learn N sequences, as a check", None, "N")
    overrides: tuple[str, ...] = option(INPUT, "over both, by dotted name", (), "key=value", positional=True)


@dataclass(frozen=True, kw_only=True)
class ExportSettings(OfTarget):
    """Write a checkpoint as a serving engine loads it, with the command that serves it.

    example:
      draftsmith export runs/my/best --engine vllm --target MODEL --out exported
    """

    checkpoint: str = option(INPUT, "such as runs/NAME/best, or a Hub name", metavar="CHECKPOINT", positional=True)
    engine: Engine = option(INPUT, "vllm, sglang, or another project's layout", metavar="ENGINE")
    prompts: str | None = option(MEASURING, "held-out prompts to measure it on", None, "P")
    num_prompts: int | None = option(MEASURING, "take so many of them (all)", None, "N", least=1)
    draft_length: tuple[int, ...] = option(MEASURING, "to serve with, or to choose from (1 to 5)", (), "K", least=1)
    batch_size: tuple[int, ...] = option(MEASURING, "several give a schedule", (1,), "N", least=1)
    max_new_tokens: int = option(MEASURING, "tokens of an answer", 64, "N", least=2)
    repeats: int = option(MEASURING, "of every setting", 3, "N", least=1)
    check: str | None = option(MEASURING, "compare with a vLLM: its venv or URL", None, "VENV_OR_URL")
    push: str | None = option(OUTPUT, "upload it to the Hub", None, "NAME")
    out: Path = option(OUTPUT, "folder to write", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Show the acceptance of a running vLLM, beside what was measured at export.

    example:
      draftsmith watch http://localhost:8000 --against exported
    """

    url: str = option(INPUT, "such as http://localhost:8000", metavar="URL", positional=True)
    against: Path | None = option(INPUT, "exported folder with its evaluation.json", None, "DIR")
    interval: float = option(INPUT, "seconds between readings", 30.0, "X", least=0.1)
    readings: int | None = option(INPUT, "stop after so many (never)", None, "N", least=1)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(OfTarget):
    """Stream text; tokens that were drafted and accepted are green.

    example:
      draftsmith generate "PROMPT" --target MODEL --drafter runs/my/best
    """

    prompt: str = option(INPUT, "text to go on with", metavar="PROMPT", positional=True)
    drafter: str = option(INPUT, "checkpoint, ngram, suffix, lookahead, none", metavar="D")
    max_new_tokens: int = option(DECODING, "tokens of the answer", 128, "N", least=1)
    temperature: float = option(DECODING, "temperature to sample at", 0.0, "X")
    top_p: float = option(DECODING, "probability that is sampled from", 1.0, "P")
    draft_length: int | None = option(DECODING, "drafted tokens of a round (4)", None, "K", least=1)
    schedule: Path | None = option(DECODING, "draft lengths by load (docs/load.md)", None, "FILE")
    seed: int = option(DECODING, "seed of the noise", 0, "N")


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Rebuild report.html and figures/ of a run, of a folder of runs, or of an evaluation.

    example:
      draftsmith report runs/my
    """

    run: Path = option(INPUT, "a run, a folder of runs, or an evaluation", metavar="RUN", positional=True)
