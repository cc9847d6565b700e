"""The config of a training run, made from recipe, file and command line.

Recipes return a whole `TrainConfig`; `--config FILE` and `key=value` change fields of it by their dotted names. A key
that does not exist is an error that names the nearest ones.
"""

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from draftsmith.data.answers.changed_settings import flatten
from draftsmith.models.drafter_configs import DRAFTER_CONFIGS, DrafterConfig
from draftsmith.models.errors import UserError, shown
from draftsmith.models.ranges import (
    BelowOne,
    Count,
    Depth,
    Name,
    Natural,
    NonNegative,
    Number,
    Precision,
    Seed,
    Share,
    Temperature,
    checked,
)
from draftsmith.models.storage.reading import parse_yaml, read_yaml

Seconds = Annotated[Number, Field(ge=1)]


@dataclass
class DataConfig:
    """The samples, their batches, and the target's features."""

    samples: Name  # folder that `draftsmith prepare` wrote
    batch_size: Count = 32  # samples, or tokens trained on, an optimiser step, over all ranks
    batch_unit: Literal["samples", "tokens"] = "samples"  # of batch_size
    max_length: Count | None = None  # tokens of a row, where longer samples are cut; None: as many as they need
    drop_cut: bool = False  # leave out samples whose answer the length limit of `prepare` cut
    tokens_per_micro_batch: Count = 16384  # of a forward pass on one rank: rows x longest row, padding included
    packing: bool = False  # several samples a row, as many as fit max_length
    held_out_prompts: Natural = 0  # whose samples only tell what training brings; at most one prompt in 32
    on_policy_share: Share = 0.0  # of the steps that train on text which the drafter itself writes, if it can
    on_policy_rise: Share = 0.0  # share of all steps over which on_policy_share rises from 0
    # Computed by the target beside the drafter; stored once, and read; or streamed from servers that compute them.
    features: Literal["online", "stored", "streamed"] = "online"
    features_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "bfloat16"  # of stored and kept features
    features_layers: list[Natural] | None = None  # target layers that are stored, for several drafters; None: its own
    features_dir: Name | None = None  # where they are stored; None: in the folder of the samples
    # URL of a vLLM that computes them, or several; None: the target does, in this process.
    features_endpoint: Name | list[Name] | None = None
    # URL of the file service beside each of these servers, where this process does not see its folder.
    features_files: Name | list[Name] | None = None
    features_kept_gb: NonNegative = 0.0  # of streamed features, kept on the disk for later epochs

    @property
    def servers(self) -> list[str]:
        """The addresses of the servers that compute features."""
        return _as_list(self.features_endpoint)

    @property
    def file_services(self) -> list[str]:
        """The addresses of the services that give the servers' files; none where this process sees their folders."""
        return _as_list(self.features_files)


def _as_list(values: str | list[str] | None) -> list[str]:
    return values if isinstance(values, list) else [] if values is None else [values]


@dataclass
class OptimizerConfig:
    """AdamW or Muon, its learning rate over the steps, and the limits to a gradient."""

    learning_rate: NonNegative = 3e-4  # at its peak
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    weight_decay: NonNegative = 0.0
    matrices: Literal["adamw", "muon"] = "adamw"  # what trains inner matrices; AdamW trains all else
    matrices_rate_factor: NonNegative = 1.0  # of Muon's learning rate, beside that of AdamW
    decay: Literal["cosine", "late"] = "cosine"  # late: the peak is kept until decay_share of all steps is left
    warmup_share: Share = 0.04  # of all steps, linear
    decay_share: Share = 0.2  # of all steps, of the late decay, which is linear
    final_share: Share = 0.1  # of the peak, reached at the end
    max_gradient_norm: Annotated[float, Field(gt=0)] = 0.5  # larger gradients are scaled down to it; .inf: none is
    max_nonfinite_steps: Count = 5  # in a row; each is skipped, so many end the run

    def decay_start(self, num_steps: int) -> int:
        """Return how many of so many steps the late decay leaves at the peak, warm-up included."""
        return num_steps - round(self.decay_share * num_steps)


@dataclass
class EvaluationConfig:
    """The measurement of each checkpoint."""

    prompts: Name | None = None  # .jsonl, .txt or Hub dataset; None: checkpoints are not evaluated
    num_prompts: Count = 16  # taken from them
    max_new_tokens: Count = 64
    temperatures: Annotated[list[Temperature], Field(min_length=1)] = field(default_factory=lambda: [0.0])
    batch_size: Count = 1
    draft_length: Depth = 4
    repeats: Count = 5
    num_threads: Count | None = None  # of the CPU, while measuring; None: as many as in training
    untrained: bool = False  # measure the drafter before its first step, too
    baselines: list[Name] = field(default_factory=lambda: ["ngram"])  # training-free drafters measured beside
    time_share: Share | None = 0.2  # of training's time, kept by fewer repeats, then prompts; None: no limit
    patience: Count | None = None  # stop after so many checkpoints without longer acceptance; None: never
    engine: Name | None = None  # URL of the engine that takes each checkpoint and measures it; None: draftsmith decodes
    # Servers of the same target beside it, as NAME=URL: none=URL drafts nothing, others such as ngram=URL do.
    engine_beside: list[Name] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether draftsmith's own decoder measures, with the whole target."""
        return self.prompts is not None and self.engine is None


@dataclass
class RunConfig:
    """The run's folder, its length, its devices, and what it says and keeps on the way."""

    dir: Name = ""  # the folder to write, such as runs/NAME
    steps: Count = 1000
    checkpoint_every: Count = 250  # steps; the last step is always kept
    log_every: Count = 10  # steps
    seed: Seed = 0
    device: Name | None = None  # None: the GPU if there is one
    # The target's layers: whole on each device, in pieces on those of each machine or of all machines, or in turn on
    # the GPUs of one process.
    target_placement: Literal["replicated", "sharded", "sharded_over_machines", "device_map"] = "replicated"
    processes_per_text: Count = 1  # of a machine, which take each text together, if the drafter can divide it
    wandb_project: Name | None = None  # None: no wandb
    keep_checkpoints: Count | None = None  # so many of the newest keep their weights, as does the best; None: all
    timeout: Seconds = 1800.0  # that a process waits for the others before it gives up
    stuck_after: Seconds = 300.0  # at one place, after which a process says where it is
    precision: Precision | None = None  # of matrix products; None: bf16 on GPUs that have it, fp32 on CPUs
    compile: bool = False  # the loss, on a CPU: faster steps after some seconds of compiling
    profile: bool = False  # write a trace of a few steps into profile/

    @property
    def target_in_pieces(self) -> bool:
        """Whether processes hold the target's layers together."""
        return self.target_placement in ("sharded", "sharded_over_machines")


@dataclass
class TrainConfig:
    """All settings of a training run. The limits in the types are checked wherever settings are read from a user."""

    target: Name
    drafter: DrafterConfig
    data: DataConfig
    init_from: Name | None = None  # drafter to train on, of this project or another's; None: a new one
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)
    # Keys that the file or the command line set; not written to config.yaml.
    explicit_keys: frozenset[str] = field(default=frozenset(), compare=False)


# Names that other projects give to a setting.
OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "epochs": "run.steps",
    "num_epochs": "run.steps",
    "max_steps": "run.steps",
    "model": "target",
    "output_dir": "run.dir",
    "warmup": "optimizer.warmup_share",
}


def contents(config: TrainConfig) -> dict[str, Any]:
    """Return the settings as nested dicts."""
    content = asdict(config)
    del content["explicit_keys"]
    return content


def resolve(recipe: TrainConfig, file: Path | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Return the recipe with the values of a config file, then of `key=value` arguments, put over it.

    Raises `UserError` for unknown keys, values of the wrong type, and a file that is not such a config.
    """
    content = contents(recipe)
    known_keys = list(flatten(content))
    changes = [*_file_values(file), *map(_parse_override, overrides)]
    kind = dict(changes).get("drafter.kind", recipe.drafter.kind)
    if kind != recipe.drafter.kind:
        raise UserError(f"drafter.kind {shown(kind)} needs its own recipe, this is one for {recipe.drafter.kind}")
    for key, value in changes:
        if key not in known_keys:
            near = ", ".join(nearest(key, known_keys)) or "none, the config.yaml of any run holds all keys"
            raise UserError(f"unknown key {shown(key)}; nearest: {near}")
        *parents, last = key.split(".")
        reduce(getitem, parents, content)[last] = value
    config = from_dict(content)
    config.explicit_keys = frozenset(key for key, _ in changes)
    return config


def nearest(key: str, known_keys: list[str]) -> list[str]:
    """Return at most four keys that a user may have meant, the likeliest first, by the last part of their names."""
    last, last_parts = key.rpartition(".")[2], {known: known.rpartition(".")[2] for known in known_keys}
    similar = difflib.get_close_matches(last, list(dict.fromkeys(last_parts.values())), n=3, cutoff=0.6)
    candidates = [OTHER_NAMES[last]] if last in OTHER_NAMES else []
    candidates += [known for name in similar for known in known_keys if last_parts[known] == name]
    return list(dict.fromkeys(candidates))[:4]


def from_dict(content: dict[str, Any]) -> TrainConfig:
    """Return the config with nested dicts as its settings, the drafter's part as the config class of its kind.

    Raises `UserError` for a value of the wrong type, beyond its limits, or without effect beside the others.
    """
    for key, value in flatten(content).items():
        if value == "" and key in ("target", "data.samples", "run.dir"):
            raise UserError(f"{key} is not set: give {key}=...")
    drafter_class = DRAFTER_CONFIGS[content["drafter"]["kind"]]
    drafter = checked(drafter_class, content["drafter"], "drafter")
    config = checked(TrainConfig, {**content, "drafter": {"kind": drafter.kind}})
    config.drafter = drafter
    _check_data(config)
    if config.optimizer.decay == "cosine" and config.optimizer.decay_share != OptimizerConfig.decay_share:
        raise UserError("optimizer.decay_share has no effect on the cosine: give optimizer.decay=late, too")
    if config.optimizer.matrices == "adamw" and config.optimizer.matrices_rate_factor != 1:
        raise UserError(
            "optimizer.matrices_rate_factor has no effect on AdamW: give optimizer.matrices_rate_factor=1, or "
            "optimizer.matrices=muon"
        )
    _check_changed_target(config)
    _check_evaluation(config)
    if config.run.stuck_after >= config.run.timeout:
        raise UserError(
            f"run.stuck_after={config.run.stuck_after:g} s: a process would give up, after run.timeout="
            f"{config.run.timeout:g} s, before it says where it hangs; give run.timeout={2 * config.run.stuck_after:g}"
        )
    return config


def _check_data(config: TrainConfig) -> None:
    data = config.data
    if data.max_length and data.tokens_per_micro_batch < data.max_length:
        raise UserError(
            f"data.tokens_per_micro_batch={data.tokens_per_micro_batch} holds no row of "
            f"data.max_length={data.max_length}: give data.tokens_per_micro_batch={data.max_length}, or lower both"
        )
    if data.features_kept_gb and data.features != "streamed":
        raise UserError(
            f"data.features_kept_gb={data.features_kept_gb:g} is of streamed features: give data.features=streamed, too"
        )
    of_stored = ["features_layers"] if data.features_kept_gb else ["features_dtype", "features_layers", "features_dir"]
    for key in of_stored:
        value = getattr(data, key)
        if data.features != "stored" and value != getattr(DataConfig, key):
            raise UserError(f"data.{key}={value} is of stored features: give data.features=stored, too")
    if data.features == "online" and data.features_endpoint is not None:
        raise UserError(
            f"data.features_endpoint={data.features_endpoint} computes features that are streamed or stored: give "
            "data.features=streamed or data.features=stored, too"
        )
    if data.features == "streamed" and not data.servers:
        raise UserError("data.features=streamed: give data.features_endpoint=URL of a server that computes them, too")
    if data.file_services and len(data.file_services) != len(data.servers):
        raise UserError(
            f"data.features_files: {len(data.file_services)} for {len(data.servers)} servers: give one for each of "
            "data.features_endpoint, in its order, or leave it out"
        )
    if data.on_policy_share and data.features != "online":
        raise UserError(
            f"data.on_policy_share: the drafter's own text has no {data.features} features; give data.features=online"
        )
    if data.on_policy_rise and not data.on_policy_share:
        raise UserError("data.on_policy_rise has no effect without data.on_policy_share: set it, or leave both out")


def _check_changed_target(config: TrainConfig) -> None:
    """Refuse layouts of the target that a drafter which trains it along cannot change."""
    if not config.drafter.changes_target:
        return
    for key, value, possible in (
        ("data.features", config.data.features, "online"),
        ("run.target_placement", config.run.target_placement, "replicated"),
    ):
        if value != possible:
            raise UserError(f"{key}={value}: the target is trained along with this drafter; give {possible}")


def _check_evaluation(config: TrainConfig) -> None:
    evaluation = config.evaluation
    if evaluation.patience and not (evaluation.prompts or config.data.held_out_prompts):
        raise UserError(
            "evaluation.patience has no effect without evaluation.prompts or data.held_out_prompts: give one of them, "
            "or leave it out"
        )
    for name in evaluation.baselines:
        if name not in DRAFTER_CONFIGS:
            raise UserError(f"evaluation.baselines: no drafter {name!r}; there are {', '.join(DRAFTER_CONFIGS)}")
    if evaluation.engine is None:
        if evaluation.engine_beside:
            raise UserError("evaluation.engine_beside: these servers stand beside evaluation.engine: give that, too")
        return
    from draftsmith.data.http import checked_url, named_urls  # here, since whoever reads a config needs no httpx

    checked_url(evaluation.engine, "evaluation.engine")
    named_urls(evaluation.engine_beside, "evaluation.engine_beside")
    if evaluation.prompts is None:
        raise UserError("evaluation.engine has nothing to answer: give evaluation.prompts, too")
    for key, mend in (("baselines", "give evaluation.engine_beside"), ("num_threads", "leave it out")):
        if getattr(evaluation, key) != getattr(EvaluationConfig(), key):
            raise UserError(f"evaluation.{key} is of draftsmith's own decoder, and evaluation.engine decodes: {mend}")


def dump(config: TrainConfig) -> str:
    """Return YAML that `--config` reads back to the same config."""
    return yaml.safe_dump(contents(config), sort_keys=False)


def _file_values(file: Path | None) -> list[tuple[str, Any]]:
    if file is None:
        return []
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise UserError(f"config file {file} holds no keys: give a config.yaml of a run")
    return list(flatten(content).items())


def _parse_override(argument: str) -> tuple[str, Any]:
    key, equals, value = argument.partition("=")
    if not equals:
        raise UserError(f"{shown(argument)} is not key=value")
    return key, parse_yaml(value, f"{key}: the value {shown(value)}")
