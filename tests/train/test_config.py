"""Recipe, file and command line become one config, or one line that says which key is wrong."""

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from draftsmith.data.answers.changed_settings import flatten
from draftsmith.models import DRAFTERS
from draftsmith.models.drafter_configs import DRAFTER_CONFIGS
from draftsmith.models.errors import UserError
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import TrainConfig
from draftsmith.train.config import dump, resolve

NEEDED = ["target=t", "data.samples=s", "run.dir=r"]  # what recipes leave to the user
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def resolve_eagle3(*overrides: str) -> TrainConfig:
    return resolve(RECIPES["eagle3"](), None, [*NEEDED, *overrides])


@every_recipe
def test_every_recipe_needs_only_what_depends_on_the_user(recipe: Callable[[], TrainConfig]) -> None:
    config = resolve(recipe(), None, NEEDED)
    assert (config.target, config.data.samples, config.run.dir) == ("t", "s", "r")


@pytest.mark.parametrize("left_out", NEEDED)
def test_what_the_recipe_leaves_empty_is_asked_for(left_out: str) -> None:
    with pytest.raises(UserError, match=f"^{left_out.split('=')[0]} is not set"):
        resolve(RECIPES["medusa"](), None, [argument for argument in NEEDED if argument != left_out])


def test_values_take_the_type_of_their_field() -> None:
    """YAML reads 1e-4 as a text and 1 as an int; a learning rate of type str would fail only in the optimiser."""
    config = resolve_eagle3(
        "optimizer.learning_rate=1e-4",
        "optimizer.weight_decay=1",
        "evaluation.temperatures=[0, 0.7]",
        "evaluation.baselines=[]",
        "drafter.layer_ids=[1, 2, 3]",
        "drafter.draft_vocab_size=null",
        "drafter.divergence=reverse_kl",
        "run.steps=7",
    )
    assert config.optimizer.learning_rate == 0.0001
    assert isinstance(config.optimizer.weight_decay, float)
    assert config.evaluation.temperatures == [0.0, 0.7]
    assert config.evaluation.baselines == []
    drafter = RECIPES["eagle3"]().drafter
    assert config.drafter == replace(drafter, layer_ids=[1, 2, 3], draft_vocab_size=None, divergence="reverse_kl")
    assert config.run.steps == 7


def test_later_overrides_win() -> None:
    assert resolve_eagle3("run.steps=7", "run.steps=8").run.steps == 8


def test_a_value_may_hold_equals_signs() -> None:
    assert resolve_eagle3("run.wandb_project=a=b").run.wandb_project == "a=b"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),  # misspelt
        ("optimizer.steps", "run.steps"),  # in the wrong part
        ("learning_rate", "optimizer.learning_rate"),  # without its part
        ("drafter.unrol_steps", "drafter.unroll_steps"),  # the drafter's own
        ("lr", "optimizer.learning_rate"),  # as others call it
        ("optimizer.lr", "optimizer.learning_rate"),
        ("epochs", "run.steps"),
        ("batch_size", "data.batch_size"),  # of two
    ],
)
def test_unknown_key_names_the_nearest_first(key: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f"unknown key '{key}'; nearest: {nearest}"):
        resolve_eagle3(f"{key}=1")


def test_keys_of_another_family_are_unknown() -> None:
    """A setting that would have no effect is refused."""
    with pytest.raises(UserError, match=r"unknown key 'drafter.num_heads'"):
        resolve_eagle3("drafter.num_heads=2")


@pytest.mark.parametrize(
    "argument",
    [
        "run.steps=many",
        "run.steps=1.5",
        "run.steps=null",
        "run.steps=0",
        "optimizer.learning_rate=[1]",
        "evaluation.temperatures=-1",
        "evaluation.baselines=[medusae]",
        "drafter.unroll_steps=x",
        "drafter.divergence=kl",
        "optimizer.beta1=2",
        "optimizer.weight_decay=-1",
        "optimizer.warmup_share=5",
        "optimizer.final_share=-1",
        "optimizer.max_gradient_norm=0",
        "evaluation.temperatures=[0, -1]",
        "drafter.draft_vocab_size=-5",
        "run.seed=-1",
        "run.stuck_after=1800",
        "run.timeout=300",
        "run.steps=true",
        "run.steps=[3]",
        "run.steps={3: 4}",
        f"run.steps={10**30}",
        "optimizer.learning_rate=.nan",
        "optimizer.weight_decay=.inf",
        "optimizer.learning_rate=false",
        "optimizer.max_gradient_norm=.nan",
        "evaluation.temperatures=[.nan]",
        "drafter.step_decay=-.inf",
        "drafter.layer_ids=[true]",
        "data.samples=[a]",
        "data.packing=2",
        f"run.wandb_project={'x' * 256}",
        "init_from=''",
    ],
)
def test_wrong_value_names_the_key(argument: str) -> None:
    with pytest.raises(UserError, match=argument.split("=")[0]) as caught:
        resolve_eagle3(argument)
    assert "\n" not in str(caught.value)


def test_a_drafter_says_itself_what_does_not_fit_together() -> None:
    arguments = [*NEEDED, "drafter.model=m", "drafter.num_layers=2"]
    with pytest.raises(UserError, match=r"^drafter.model brings its own num_layers and hidden_size: leave them out"):
        resolve(RECIPES["draft_model"](), None, arguments)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("run.steps", "is not key=value"),
        ("run.steps=[1", r"^run.steps: the value '\[1' is not YAML"),
        ("evaluation.temperatures=0.5", r"evaluation.temperatures=0.5: give a list, such as \[0.5\]"),
    ],
)
def test_malformed_arguments_are_refused(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_eagle3(argument)


@every_recipe
def test_dumped_config_gives_the_same_run(recipe: Callable[[], TrainConfig], tmp_path: Path) -> None:
    """`--config RUN/config.yaml` repeats a run: every value survives YAML, small floats and None among them."""
    config = resolve(recipe(), None, [*NEEDED, "optimizer.learning_rate=1e-5", "evaluation.temperatures=[0, 1e-5]"])
    (tmp_path / "config.yaml").write_text(dump(config))
    assert resolve(recipe(), tmp_path / "config.yaml") == config


def test_command_line_wins_over_file_over_recipe(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("run:\n  steps: 2\n  seed: 3\ndata: {batch_size: 4}\n")
    config = resolve(RECIPES["eagle3"](), file, [*NEEDED, "run.steps=5"])
    assert (config.run.steps, config.run.seed, config.data.batch_size) == (5, 3, 4)
    assert config.run.checkpoint_every == RECIPES["eagle3"]().run.checkpoint_every


def test_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    """All keys of a draft model's config are keys of Medusa's too: without this check they would be taken."""
    (tmp_path / "config.yaml").write_text(dump(resolve(RECIPES["draft_model"](), None, NEEDED)))
    with pytest.raises(UserError, match="draft_model.*needs its own recipe"):
        resolve_eagle3("drafter.kind=draft_model")
    with pytest.raises(UserError, match="draft_model.*needs its own recipe"):
        resolve(RECIPES["medusa"](), tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no keys"), (b"- 1\n", "holds no keys"), (b"a: [\n", "is not YAML"), (b"\xff\xfe\xff", "is not")],
)
def test_file_that_is_no_config(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        resolve(RECIPES["eagle3"](), file, NEEDED)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        resolve(RECIPES["eagle3"](), tmp_path / "missing.yaml", NEEDED)


def test_keys_are_dotted_names() -> None:
    assert flatten({"a": 1, "b": {"c": [1, 2], "d": {"e": None}}}) == {"a": 1, "b.c": [1, 2], "b.d.e": None}


PARTS = [hint for hint in get_type_hints(TrainConfig).values() if is_dataclass(hint)]


@pytest.mark.parametrize("settings", [TrainConfig, *PARTS, *DRAFTER_CONFIGS.values()])
def test_every_number_and_name_has_its_range(settings: type) -> None:
    """A bare int or float would take what no run can use; kinds are checked by their own table."""
    hints = get_type_hints(settings, include_extras=True)
    bare = {
        name: hint
        for name, hint in hints.items()
        if {int, float, str} & ({hint} if get_origin(hint) is Annotated else {hint, *get_args(hint)})
    }
    assert bare.keys() <= {"kind", "explicit_keys"}


def test_every_family_has_its_settings() -> None:
    """`DRAFTER_CONFIGS` is read without torch, `DRAFTERS` with it."""
    assert {kind: drafter.config_class for kind, drafter in DRAFTERS.items()} == DRAFTER_CONFIGS
