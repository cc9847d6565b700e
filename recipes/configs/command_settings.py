"""The settings of commands: each field is a flag of the command line, or a positional argument.

The docstring of a class is what `--help` of its command says, with an example. Settings of other commands stand in
data_settings.py, training_settings.py and server_settings.py.

Nothing slow is imported here, so that `--help` and mistakes in flags are answered at once.
"""

from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import (
    AboveZero,
    BatchSize,
    Count,
    Depth,
    FilePath,
    Name,
    NonNegative,
    Number,
    Positive,
    Seed,
    Share,
    Temperature,
    TwoOrMore,
)
from draftsmith.models.storage.reading import JsonObject
from draftsmith.recipes.configs.named_files import check_names

if TYPE_CHECKING:
    from draftsmith.train.config import TrainConfig


VerificationMode = Literal["greedy", "one_hot", "probabilistic", "block", "without_replacement", "typical"]
# Flags of `evaluate` that say how draftsmith decodes.
ENGINE_LACKS = (
    *("baseline", "tree", "schedule", "verification_mode", "synthetic_acceptance", "minutes", "certify"),
    *("num_threads", "device"),
)
Engine = Literal[
    "vllm", "sglang", "transformers", "llama_cpp", "tensorrt_llm", "speculators", "safeailab", "fasterdecoding"
]
Baseline = Literal["generate", "assisted", "prompt_lookup"]
WeightType = Literal["bf16", "fp8", "int8", "int4", "fp4"]
Minutes = Annotated[Number, Field(ge=0.001)]
Requests = Annotated[Count, Field(ge=10, le=1_000_000)]
Rate = Annotated[Number, Field(ge=0.001)]
Lognormal = tuple[NonNegative, NonNegative]  # median and sigma

# Help of several commands.
TEMPLATE = "what the target's chat template is told besides, as JSON"
SAMPLED = "0 takes the likeliest token, 1 samples"
ACCEPTED = "how drafts are accepted, docs/lossless.md (the usual one)"
DRAWN = "sample from the likeliest tokens with this probability"

# Groups of flags, in the order of `--help`.
INPUT, DECODING, TRAFFIC, MEASURING, OUTPUT = "input", "decoding", "traffic", "measuring", "output and machine"
ELSEWHERE = "a GPU that is not here"
GROUPS = (INPUT, DECODING, TRAFFIC, MEASURING, ELSEWHERE, OUTPUT)


def option(
    group: str,
    help: str,
    default: Any = MISSING,
    metavar: str | tuple[str, str] | None = None,
    repeatable: bool = False,
    positional: bool = False,
) -> Any:
    """Return a field that is a flag, in a group of `--help`. It is required where it has no default.

    A tuple takes its values in a row, or one at a time from a `repeatable` flag. The type of a field says which values
    it may have (models/ranges.py).
    """
    metadata = {"group": group, "metavar": metavar, "repeatable": repeatable, "positional": positional}
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of any command."""

    def refuse_mistakes(self) -> None:
        """Raise `UserError` for settings that do not go together, and for files that are not there.

        It is called before anything slow is imported.
        """
        check_names(vars(self))

    def refuse(self, names: tuple[str, ...], where: str) -> None:
        """Refuse settings that were given other values than their defaults, and have no effect."""
        if ignored := next((name for name in names if getattr(self, name) != getattr(type(self), name)), None):
            raise UserError(f"--{ignored.replace('_', '-')} has no effect {where}: leave it out")


def check_address(url: str, setting: str) -> None:
    """Refuse what is no address of a server. httpx is imported here: `--help` does not wait for it."""
    from draftsmith.data.http import checked_url

    checked_url(url, setting)


@dataclass(frozen=True, kw_only=True)
class OnDevice(Settings):
    """The machine that a command computes on."""

    device: Name | None = option(OUTPUT, "cpu, cuda or cuda:N (a GPU if there is one)", None, "D")


@dataclass(frozen=True, kw_only=True)
class OfTarget(OnDevice):
    """A command for one target."""

    target: Name = option(INPUT, "Hub name or directory", metavar="T")


@dataclass(frozen=True, kw_only=True)
class WithChats(OfTarget):
    """A command that puts chats through the target's template."""

    chat_template_kwargs: JsonObject | None = option(INPUT, TEMPLATE, None, "JSON")


@dataclass(frozen=True, kw_only=True)
class OfDrafters(WithChats):
    """The settings that all commands share which measure drafters on prompts."""

    drafter: tuple[Name, ...] = option(INPUT, "checkpoint, mtp, ngram, suffix, lookahead", metavar="D", repeatable=True)
    num_prompts: Count | None = option(INPUT, "take so many prompts of each set (all)", None, "N")
    top_p: AboveZero = option(DECODING, DRAWN, 1.0, "P")
    max_new_tokens: Count = option(DECODING, "longest answer, in tokens", 32, "N")
    seed: Seed = option(DECODING, "another seed samples other texts", 0, "N")
    num_threads: Count | None = option(OUTPUT, "CPU threads (PyTorch's default)", None, "N")
    out: FilePath = option(OUTPUT, "folder to write", metavar="DIR")

    def refuse_mistakes(self) -> None:
        if "none" in self.drafter:
            raise UserError("--drafter none: plain decoding is measured beside each drafter anyway; leave it out")
        super().refuse_mistakes()


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(OfDrafters):
    """Measure acceptance and speed of drafters beside plain decoding.

    example:
      draftsmith evaluate --target MODEL --drafter runs/my/best --prompts P --temperature 0 1 --out DIR
    """

    prompts: tuple[Name, ...] = option(INPUT, "files, folders, Hub NAME:COLUMN, .yaml", metavar="P")
    baseline: tuple[Baseline, ...] = option(INPUT, "generate, assisted, prompt_lookup", (), metavar="NAME")
    engine: Name | None = option(INPUT, "a vLLM or SGLang measures them, docs/serving.md", None, "URL")
    beside: tuple[Name, ...] = option(INPUT, "other servers of the target; none=URL has no drafter", (), "N=URL")
    as_served: bool = option(INPUT, "--engine serves the drafter already: swap nothing", False)
    temperature: tuple[Temperature, ...] = option(DECODING, SAMPLED, (0.0,), "X")
    batch_size: tuple[BatchSize, ...] = option(DECODING, "prompts decoded at a time; measure at each", (1,), "N")
    draft_length: tuple[Depth, ...] = option(DECODING, "tokens drafted a round (4, none beside --tree)", (), "K")
    tree: tuple[Name, ...] = option(DECODING, "NODES,DEPTH,WIDTH, NODES,DEPTH or a .json", (), "TREE")
    schedule: FilePath | None = option(DECODING, "draft lengths by load (docs/load.md)", None, "FILE")
    verification_mode: VerificationMode | None = option(DECODING, ACCEPTED, None, "MODE")
    synthetic_acceptance: tuple[Share, ...] = option(DECODING, "accept by these chances, one a depth", (), "X")
    repeats: Count | None = option(MEASURING, "decode so often; more narrow the intervals (5 in 4 minutes)", None, "N")
    minutes: Minutes | None = option(MEASURING, "repeat as often as fits, instead of --repeats", None, "X")
    certify: bool = option(MEASURING, "test that the output is the target's", False)

    def refuse_mistakes(self) -> None:
        if self.synthetic_acceptance and self.verification_mode:
            raise UserError("--synthetic-acceptance is a verification mode of its own: leave out --verification-mode")
        if self.repeats is not None and self.minutes is not None:
            raise UserError("--minutes chooses the repeats: leave out --repeats")
        self._refuse_beside_engine()
        from draftsmith.data.processes import rank_and_num_ranks  # here, as `--help` needs no rich

        num_processes = rank_and_num_ranks()[1]
        if self.certify and num_processes > 1:
            raise UserError(f"--certify cannot be shared by {num_processes} processes: start `draftsmith evaluate`")
        if self.engine and num_processes > 1:
            raise UserError(f"--engine is asked by one process, not {num_processes}: start `draftsmith evaluate`")
        super().refuse_mistakes()

    def _refuse_beside_engine(self) -> None:
        """Refuse what is of draftsmith's own decoder beside --engine, and what is of --engine without it."""
        if self.engine is None:
            if self.beside or self.as_served:
                raise UserError("--beside and --as-served are of a running engine: give --engine URL, too")
            return
        for name in ENGINE_LACKS:
            if getattr(self, name) != getattr(type(self), name):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} is of draftsmith's own decoder, and --engine decodes: leave out {flag}")
        if len(self.draft_length) > 1:
            raise UserError("--draft-length: an engine has one, with which it was started: give that, or leave it out")
        if self.as_served and len(self.drafter) > 1:
            raise UserError("--as-served: an engine serves one drafter: give one --drafter")
        if len(set(self.drafter)) < len(self.drafter):
            raise UserError("--drafter: give each drafter once")
        check_address(self.engine, "--engine")


@dataclass(frozen=True, kw_only=True)
class TuneSettings(OfDrafters):
    """Fit draft length, tree and schedule on some prompts, and measure them on others.

    example:
      draftsmith tune --target MODEL --drafter runs/my/best --fit-prompts fit.jsonl \\
        --prompts held_out.jsonl --batch-size 1 4 8 --out runs/my-choice
    """

    prompts: tuple[Name, ...] = option(INPUT, "prompts to measure on", metavar="P")
    fit_prompts: Name | None = option(INPUT, "other prompts to fit on (half of --prompts)", None, "P")
    temperature: Temperature = option(DECODING, SAMPLED, 0.0, "X")
    batch_size: tuple[BatchSize, ...] = option(DECODING, "prompts decoded at a time; fit for each", (1,), "N")
    verification_mode: VerificationMode | None = option(DECODING, ACCEPTED, None, "MODE")
    repeats: Count = option(MEASURING, "decode so often; more narrow the intervals", 5, "N")


@dataclass(frozen=True, kw_only=True)
class LoadTestSettings(OfDrafters):
    """Put a drafter under traffic, with speculation on, off and scheduled.

    example:
      draftsmith load-test --target MODEL --drafter runs/my/best --prompts P --concurrency 1 4 --out DIR
    """

    prompts: Name = option(INPUT, "file, folder, Hub NAME:COLUMN or .yaml", metavar="P")
    temperature: Temperature = option(DECODING, SAMPLED, 0.0, "X")
    draft_length: Depth = option(DECODING, "tokens drafted a round", 4, "K")
    schedule: FilePath | None = option(DECODING, "draft lengths by load (from measured costs)", None, "FILE")
    verification_mode: VerificationMode | None = option(DECODING, ACCEPTED, None, "MODE")
    rate: tuple[Rate, ...] = option(TRAFFIC, "requests a second, a stage each: an open test", (), "R")
    concurrency: tuple[BatchSize, ...] = option(TRAFFIC, "clients at once, a stage each: a closed test", (), "N")
    requests: Requests | None = option(TRAFFIC, "of each run: more narrows intervals (50, but 8 a client)", None, "N")
    max_batch: BatchSize | None = option(TRAFFIC, "requests that an open test runs at once (16)", None, "N")
    prompt_lengths: Lognormal | None = option(
        TRAFFIC, "drawn lengths: the nearest are taken", None, ("MEDIAN", "SIGMA")
    )
    output_lengths: Lognormal | None = option(
        TRAFFIC, "drawn lengths: answers are cut there", None, ("MEDIAN", "SIGMA")
    )
    prefill_chunk: Count | None = option(
        TRAFFIC, "try reading prompts so many tokens at a time, while others decode", None, "N"
    )
    wait_ms: NonNegative = option(TRAFFIC, "longest wait for others whose prompts are read, too", 0.0, "MS")
    repeats: Count = option(TRAFFIC, "runs of each stage", 3, "N")
    sla_ttft_ms: Positive | None = option(TRAFFIC, "latest first token of 95 % of requests", None, "MS")
    sla_tpot_ms: Positive | None = option(TRAFFIC, "longest later token of 95 % of requests", None, "MS")

    def refuse_mistakes(self) -> None:
        if len(self.drafter) > 1:
            raise UserError("--drafter: give one; plain decoding is measured beside it")
        if bool(self.rate) == bool(self.concurrency):
            raise UserError("give either --rate (requests a second) or --concurrency (requests at once)")
        if self.concurrency and self.max_batch is not None:
            raise UserError("--max-batch has no effect with --concurrency, which sets the batch: leave it out")
        least = 2 * max(self.concurrency, default=0)
        if self.requests is not None and self.requests < least:
            raise UserError(
                f"--requests {self.requests}: give at least {least}, the first of each client is not counted"
            )
        super().refuse_mistakes()


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(OfDrafters):
    """Find the acceptance of all draft lengths and verification modes from one recording.

    example:
      draftsmith replay --target MODEL --drafter runs/my/best --drafter ngram \\
        --prompts held_out.jsonl --temperature 0 1 --out runs/my-replay
    """

    prompts: tuple[Name, ...] = option(INPUT, "files, folders, Hub NAME:COLUMN, .yaml", metavar="P")
    temperature: tuple[Temperature, ...] = option(DECODING, SAMPLED, (0.0,), "X")
    draft_length: Depth = option(DECODING, "replay chains of 1 to so many tokens", 8, "K")
    tree: tuple[Name, ...] = option(DECODING, "a static tree: .json of choices", (), "FILE")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(OfTarget):
    """Say before training whether a drafter can pay: from its costs here or, predicted, on another GPU.

    example:
      draftsmith plan --target MODEL --drafter eagle3 --drafter medusa --out runs/plan
      draftsmith plan --target T --gpu H100 --num-gpus 8 --drafter eagle3 --samples 70000 --out plan
    """

    drafter: tuple[Name, ...] = option(INPUT, "kind, recipe or checkpoint", metavar="D", repeatable=True)
    acceptance: tuple[Name, ...] = option(INPUT, "measured acceptance (a file), or a rate for all depths", (), "A")
    batch_size: tuple[BatchSize, ...] = option(DECODING, "requests decoded at a time", (1, 2, 4, 8, 16, 32), "N")
    context: Count | None = option(
        DECODING, "tokens of a request so far (256, at most half; 2048 with --gpu)", None, "N"
    )
    draft_length: tuple[Depth, ...] = option(DECODING, "tokens drafted a round (1 to 8, or as it can)", (), "K")
    tree_nodes: tuple[TwoOrMore, ...] = option(DECODING, "plan trees of so many drafted tokens, too", (), "N")
    gpu: Name | None = option(ELSEWHERE, "predict for this GPU from the target's config.json alone", None, "GPU")
    num_gpus: Count | None = option(ELSEWHERE, "GPUs among which the target is divided (1)", None, "N")
    weights: WeightType | None = option(ELSEWHERE, "bf16, fp8, int8, int4, fp4 (as config.json says)", None, "TYPE")
    price: Positive | None = option(ELSEWHERE, "dollars that one GPU costs an hour", None, "X")
    reply: Count | None = option(ELSEWHERE, "tokens of a typical reply (300)", None, "N")
    samples: Count | None = option(ELSEWHERE, "plan training on so many samples, too: hours, disk, network", None, "N")
    tokens_per_sample: Count | None = option(ELSEWHERE, "tokens of a sample, prompt and answer (800)", None, "N")
    epochs: Count | None = option(ELSEWHERE, "times that each sample is trained on (3)", None, "N")
    num_threads: Count | None = option(OUTPUT, "CPU threads (PyTorch's default)", None, "N")
    out: FilePath = option(OUTPUT, "folder to write", metavar="DIR")

    def refuse_mistakes(self) -> None:
        if self.gpu is None:
            if self.samples:
                raise UserError(
                    "--samples plans a training on GPUs by their data sheets: give --gpu, such as --gpu H100"
                )
            self.refuse(("num_gpus", "weights", "price", "reply", "tokens_per_sample", "epochs"), "without --gpu")
            super().refuse_mistakes()
            return
        if not self.samples:
            self.refuse(("tokens_per_sample", "epochs"), "without --samples")
        self.refuse(("device", "num_threads", "tree_nodes"), "with --gpu, which measures nothing here")
        from draftsmith.inference.planning.gpus import gpu_named  # here, as `--help` needs neither
        from draftsmith.recipes.configs.public_targets import public_target

        gpu_named(self.gpu)
        check_names({"out": self.out} if public_target(self.target) else {"target": self.target, "out": self.out})


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Train a drafter by a recipe; the same command resumes an interrupted run.

    recipes:
      eagle, eagle3, p_eagle, dflash, dflash2, dspark, domino, mtp, new_mtp, medusa, medusa_2,
      hydra, mlp_speculator, draft_model;
      quickstart_ before any of them but new_mtp and medusa_2: for the target that draftsmith ships;
      those for public targets: docs/recipes.md

    the keys that are set most often; all, with their values, are in the config.yaml of any run:
      target=MODEL                     Hub name or directory
      data.samples=DIR                 what draftsmith prepare wrote
      run.dir=DIR                      folder to write, such as runs/my
      evaluation.prompts=FILE          measure every checkpoint on these
      run.steps=N                      batches to train on: more takes longer and accepts more
      run.checkpoint_every=N           steps from one checkpoint to the next
      optimizer.learning_rate=RATE     at its peak: too high, and the loss is not finite
      data.batch_size=N                samples a step, over all processes
      data.max_length=N                tokens of a row: longer samples are cut
      data.tokens_per_micro_batch=N    of a forward pass: less takes less memory
      init_from=CHECKPOINT             train on from it

    example:
      draftsmith train eagle3 target=MODEL data.samples=data/my run.dir=runs/my \\
        evaluation.prompts=data/my/held_out.jsonl
    """

    recipe: Name = option(INPUT, "see below", metavar="RECIPE", positional=True)
    config: FilePath | None = option(INPUT, "YAML over the recipe, such as the config.yaml of a run", None, "FILE")
    overfit: Count | None = option(INPUT, "only learn N sequences by heart, as a check", None, "N")
    overrides: tuple[str, ...] = option(INPUT, "settings over both, by dotted name", (), "key=value", positional=True)

    def resolved(self) -> "TrainConfig":
        """Return the whole config of the run. Raises `UserError` for an unknown recipe and for settings of no run."""
        from draftsmith.recipes.configs.recipes import recipe_named  # here, as `--help` needs no recipes
        from draftsmith.train.config import resolve

        return resolve(recipe_named(self.recipe), self.config, self.overrides)

    def refuse_mistakes(self) -> None:
        from draftsmith.data.answers.changed_settings import flatten
        from draftsmith.train.config import contents

        super().refuse_mistakes()
        check_names(flatten(contents(self.resolved())))


@dataclass(frozen=True, kw_only=True)
class ExportSettings(WithChats):
    """Write a checkpoint as a serving engine loads it, with the command that serves it.

    example:
      draftsmith export runs/my/best --engine vllm --target MODEL --out exported
    """

    checkpoint: Name = option(INPUT, "such as runs/NAME/best, or a Hub name", metavar="CHECKPOINT", positional=True)
    engine: Engine = option(INPUT, "vllm, sglang, llama_cpp, transformers, ...", metavar="ENGINE")
    prompts: Name | None = option(MEASURING, "held-out prompts: measure it on them, for its draft length", None, "P")
    num_prompts: Count | None = option(MEASURING, "take so many of them (all)", None, "N")
    draft_length: tuple[Depth, ...] = option(MEASURING, "tokens drafted a round, to choose from (1 to 5)", (), "K")
    batch_size: tuple[BatchSize, ...] = option(MEASURING, "requests at a time; several give a schedule", (1,), "N")
    temperature: Temperature = option(MEASURING, "of the traffic that will be served", 0.0, "X")
    max_new_tokens: TwoOrMore = option(MEASURING, "longest answer while measuring, in tokens", 64, "N")
    repeats: Count = option(MEASURING, "decode so often; more narrow the intervals", 3, "N")
    check: Name | None = option(MEASURING, "compare with a vLLM: its venv or URL", None, "VENV_OR_URL")
    push: Name | None = option(OUTPUT, "upload it to the Hub", None, "NAME")
    swappable: bool = option(OUTPUT, "add a script that serves it for evaluate --engine", False)
    out: FilePath = option(OUTPUT, "folder to write", metavar="DIR")

    def refuse_mistakes(self) -> None:
        if not self.prompts:
            measured = ("num_prompts", "batch_size", "temperature", "max_new_tokens", "repeats", "chat_template_kwargs")
            self.refuse(measured, "without --prompts")
        super().refuse_mistakes()


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(WithChats):
    """Stream text; tokens that were drafted and accepted are green.

    example:
      draftsmith generate "PROMPT" --target MODEL --drafter runs/my/best
    """

    prompt: str = option(INPUT, "a question, or a text to continue", metavar="PROMPT", positional=True)
    drafter: Name = option(INPUT, "checkpoint, mtp, ngram, suffix, lookahead, none", metavar="D")
    max_new_tokens: Count = option(DECODING, "longest answer, in tokens", 128, "N")
    temperature: Temperature = option(DECODING, SAMPLED, 0.0, "X")
    top_p: AboveZero = option(DECODING, DRAWN, 1.0, "P")
    draft_length: Depth | None = option(DECODING, "tokens drafted a round (4)", None, "K")
    schedule: FilePath | None = option(DECODING, "draft lengths by load (docs/load.md)", None, "FILE")
    seed: Seed = option(DECODING, "another seed samples another text", 0, "N")
    raw: bool = option(INPUT, "continue the text as it stands, outside the chat template", False)

    def refuse_mistakes(self) -> None:
        if self.raw and self.chat_template_kwargs:
            raise UserError("--chat-template-kwargs has no effect with --raw: leave one out")
        if self.schedule and self.draft_length is not None:
            raise UserError("--schedule sets the draft length: leave out --draft-length")
        super().refuse_mistakes()


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Settings):
    """Rebuild report.html and figures/ of a run, of a folder of runs, or of an evaluation.

    example:
      draftsmith report runs/my
    """

    run: FilePath = option(INPUT, "a run, a folder of runs, or an evaluation", metavar="RUN", positional=True)
