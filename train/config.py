"""The config of a training run, and how recipe, file and command line become one.

Recipes return a whole `TrainConfig`; `--config FILE` and `key=value` change fields of it by their dotted names. A key
that does not exist is an error that names the nearest ones.
"""

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from draftsmith.data.answers.changed_settings import flatten
from draftsmith.data.features.stored import StoredDtype
from draftsmith.models import DRAFTERS
from draftsmith.models.drafting.base import DrafterConfig
from draftsmith.models.errors import UserError, require_at_least


@dataclass
class DataConfig:
    samples: str  # folder that `draftsmith prepare` wrote
    batch_size: int = 32  # samples an optimiser step, over all ranks
    max_length: int = 2048  # tokens of a row; longer samples are cut
    drop_cut: bool = False  # leave out samples whose answer the length limit of `prepare` cut
    tokens_per_micro_batch: int = 16384  # of a forward pass on one rank: rows x longest row, padding included
    packing: bool = False  # several samples a row, as many as fit max_length
    on_policy_share: float = 0.0  # of the steps that train on text which the drafter writes itself, for draft models
    on_policy_rise: float = 0.0  # share of all steps over which that rises from nothing
    features: Literal["online", "stored"] = "online"  # computed by the target beside the drafter, or once and read
    features_dtype: StoredDtype = "bfloat16"  # of stored features
    features_dir: str | None = None  # where they are stored; None: in the folder of the samples
    features_endpoint: str | None = None  # URL of a vLLM that computes them; None: the target does, in this process


@dataclass
class OptimizerConfig:
    learning_rate: float = 3e-4  # AdamW, at its peak
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    warmup_share: float = 0.04  # of all steps, linear
    final_share: float = 0.1  # of the peak, reached on a cosine
    max_gradient_norm: float = 0.5
    max_nonfinite_steps: int = 5  # in a row; each is skipped, so many end the run


@dataclass
class EvaluationConfig:
    prompts: str | None = None  # .jsonl, .txt or Hub dataset; None: checkpoints are not evaluated
    num_prompts: int = 16  # taken from them
    max_new_tokens: int = 64
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    batch_size: int = 1
    draft_length: int = 4
    repeats: int = 5
    num_threads: int | None = None  # of the CPU, while measuring; None: as many as in training
    untrained: bool = False  # measure the drafter before its first step, too
    baselines: list[str] = field(default_factory=lambda: ["ngram"])  # training-free drafters measured beside
    time_share: float | None = 0.2  # of training's time, kept by fewer repeats, then prompts; None: no limit
    patience: int | None = None  # stop after so many checkpoints without a better speedup; None: go through all steps


@dataclass
class RunConfig:
    dir: str = ""  # the folder to write, such as runs/NAME
    steps: int = 1000
    checkpoint_every: int = 250  # steps; the last step is always kept
    log_every: int = 10  # steps
    seed: int = 0
    device: str | None = None  # None: the GPU if there is one
    # The target's layers: whole on each device, in pieces on all, or in turn on the GPUs of one process.
    target_placement: Literal["replicated", "sharded", "device_map"] = "replicated"
    wandb_project: str | None = None  # None: no wandb
    keep_checkpoints: int | None = None  # so many of the newest keep their weights, as does the best; None: all
    timeout: float = 1800.0  # seconds that a process waits for the others before it gives up
    stuck_after: float = 300.0  # seconds at one place after which a process says where it is
    compile: bool = False  # the loss, on a CPU: faster steps after some seconds of compiling
    profile: bool = False  # write a trace of a few steps into profile/


@dataclass
class TrainConfig:
    target: str
    drafter: DrafterConfig
    data: DataConfig
    init_from: str | None = None  # drafter to train on, of this project or another's; None: a new one
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)
    # Keys that the file or the command line set; not written to config.yaml.
    explicit_keys: frozenset[str] = field(default=frozenset(), compare=False)


# What others call a setting.
OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "epochs": "run.steps",
    "num_epochs": "run.steps",
    "max_steps": "run.steps",
    "model": "target",
    "output_dir": "run.dir",
    "warmup": "optimizer.warmup_share",
}
AT_LEAST = {
    1: (
        "data.batch_size",
        "data.max_length",
        "optimizer.max_nonfinite_steps",
        "evaluation.num_prompts",
        "evaluation.max_new_tokens",
        "evaluation.batch_size",
        "evaluation.draft_length",
        "evaluation.repeats",
        "evaluation.num_threads",
        "evaluation.patience",
        "run.steps",
        "run.checkpoint_every",
        "run.log_every",
        "run.keep_checkpoints",
        "run.timeout",
        "run.stuck_after",
        "drafter.draft_vocab_size",
        "drafter.hidden_size",
        "drafter.intermediate_size",
        "drafter.inner_size",
    ),
    0: ("optimizer.learning_rate", "optimizer.weight_decay", "evaluation.temperatures"),
}
SHARES = (
    "data.on_policy_share",
    "data.on_policy_rise",
    "optimizer.warmup_share",
    "optimizer.final_share",
    "evaluation.time_share",
)


def contents(config: TrainConfig) -> dict[str, Any]:
    """The settings, as nested dicts."""
    content = asdict(config)
    del content["explicit_keys"]
    return content


def resolve(recipe: TrainConfig, file: Path | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """The recipe with the values of a config file, then of `key=value` arguments, put over it.

    Raises `UserError` for unknown keys, values of the wrong type, and a file that is not such a config.
    """
    values = flatten(contents(recipe))
    changes = [*_file_values(file), *map(_parse_override, overrides)]
    kind = dict(changes).get("drafter.kind", recipe.drafter.kind)
    if kind != recipe.drafter.kind:
        raise UserError(f"drafter.kind {kind!r} needs its own recipe, this is one for {recipe.drafter.kind}")
    for key, value in changes:
        if key not in values:
            near = ", ".join(nearest(key, list(values))) or "none, the config.yaml of any run holds all keys"
            raise UserError(f"unknown key {key!r}; nearest: {near}")
        values[key] = value
    config = from_dict(unflatten(values))
    config.explicit_keys = frozenset(key for key, _ in changes)
    return config


def nearest(key: str, known: list[str]) -> list[str]:
    """The keys that a user may have meant, at most four, the likeliest first: alike in what stands behind the part."""
    last, names = key.rpartition(".")[2], {one: one.rpartition(".")[2] for one in known}
    alike = difflib.get_close_matches(last, list(dict.fromkeys(names.values())), n=3, cutoff=0.6)
    found = [OTHER_NAMES[last]] if last in OTHER_NAMES else []
    found += [one for name in alike for one in known if names[one] == name]
    return list(dict.fromkeys(found))[:4]


def from_dict(content: dict[str, Any]) -> TrainConfig:
    """Check types. The drafter's part is read by the config class of its kind."""
    drafter_class = DRAFTERS[content["drafter"]["kind"]].config_class
    drafter = _validate(drafter_class, content["drafter"], "drafter.")
    config = _validate(TrainConfig, {**content, "drafter": {"kind": drafter.kind}}, "")
    config.drafter = drafter
    check(config)
    return config


def check(config: TrainConfig) -> None:
    """Values that no run can use."""
    for key, text in {"target": config.target, "data.samples": config.data.samples, "run.dir": config.run.dir}.items():
        if not text:
            raise UserError(f"{key} is not set: give {key}=...")
    values = flatten(contents(config))
    for least, keys in AT_LEAST.items():
        for key in keys:
            value = values.get(key)  # not every drafter has all of its keys
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    require_at_least(key, one, least)
    for key in SHARES:
        if values[key] is not None and not 0 <= values[key] <= 1:
            raise UserError(f"{key}={values[key]}: give a share from 0 to 1")
    if config.data.tokens_per_micro_batch < config.data.max_length:
        raise UserError(
            f"data.tokens_per_micro_batch={config.data.tokens_per_micro_batch} holds no row of "
            f"data.max_length={config.data.max_length}: raise it or lower data.max_length"
        )
    for key in ("features_dtype", "features_dir", "features_endpoint"):
        value = getattr(config.data, key)
        if config.data.features == "online" and value != getattr(DataConfig, key):
            raise UserError(f"data.{key}={value} is of stored features: give data.features=stored, too")
    if config.data.on_policy_share and config.data.features == "stored":
        raise UserError(
            "data.on_policy_share: the drafter's own text has no stored features; give data.features=online"
        )
    if config.data.on_policy_rise and not config.data.on_policy_share:
        raise UserError("data.on_policy_rise has no effect without data.on_policy_share: set it, or leave both out")
    if config.drafter.changes_target:
        for key, setting, served in (
            ("data.features", config.data.features, "online"),
            ("run.target_placement", config.run.target_placement, "replicated"),
        ):
            if setting != served:
                raise UserError(f"{key}={setting}: the target is trained along with this drafter; give {served}")
    if config.run.stuck_after >= config.run.timeout:
        raise UserError(
            f"run.stuck_after={config.run.stuck_after:g} s: a process would give up, after run.timeout="
            f"{config.run.timeout:g} s, before it says where it is stuck; give less"
        )
    for key, beta in {"optimizer.beta1": config.optimizer.beta1, "optimizer.beta2": config.optimizer.beta2}.items():
        if not 0 <= beta < 1:
            raise UserError(f"{key}={beta}: give a number from 0 to below 1")
    if not config.optimizer.max_gradient_norm > 0:
        raise UserError(
            f"optimizer.max_gradient_norm={config.optimizer.max_gradient_norm} leaves nothing of a gradient: give more "
            "than 0, or .inf to cut none"
        )
    if not 0 <= config.run.seed < 2**32:
        raise UserError(f"run.seed={config.run.seed}: give a number from 0 to {2**32 - 1}")
    if config.evaluation.patience and not config.evaluation.prompts:
        raise UserError("evaluation.patience has no effect without evaluation.prompts: give prompts, or leave it out")
    if not config.evaluation.temperatures:
        raise UserError("evaluation.temperatures is empty: give at least one")
    for name in config.evaluation.baselines:
        if name not in DRAFTERS:
            raise UserError(f"evaluation.baselines: no drafter {name!r}; there are {', '.join(DRAFTERS)}")


def dump(config: TrainConfig) -> str:
    """YAML that `--config` reads back to the same config."""
    return yaml.safe_dump(contents(config), sort_keys=False)


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, key = name.split(".")
        part = content
        for parent in parents:
            part = part.setdefault(parent, {})
        part[key] = value
    return content


def _file_values(file: Path | None) -> list[tuple[str, Any]]:
    if file is None:
        return []
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise UserError(f"config file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"config file {file} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise UserError(f"config file {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"config file {file} holds no keys: give a config.yaml of a run")
    return list(flatten(content).items())


def _parse_override(argument: str) -> tuple[str, Any]:
    key, equals, value = argument.partition("=")
    if not equals:
        raise UserError(f"{argument!r} is not key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"{key}: cannot read the value {value!r}; quote it as in YAML") from None


def _validate(config_class: type, content: dict[str, Any], prefix: str) -> Any:
    try:
        return TypeAdapter(config_class).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = prefix + ".".join(map(str, first["loc"]))
        if first["type"] == "list_type":
            raise UserError(f"{key}={first['input']}: give a list, such as [{first['input']}]") from None
        raise UserError(f"{key}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
