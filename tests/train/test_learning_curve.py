"""The learning curve: the drafter on samples that it is not trained on, wherever their features come from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import base_of, final_weights, make_config
from scipy.special import expit, logit

from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import read_samples
from draftsmith.data.samples.samples import Samples, held_out_samples
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.train import train
from draftsmith.train.config import TrainConfig
from draftsmith.train.evaluation import held_out
from draftsmith.train.evaluation.forecast import FINISHED_RUNS, FinishedRun, forecast, forecast_text, outcome_text
from draftsmith.train.evaluation.held_out import HeldOutSamples, is_on_curve
from draftsmith.train.loop import TrainingRun
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.run_folder.learning_curve import CurvePoint, learning_curve, log_point, newest_forecast
from draftsmith.train.run_folder.run_folder import best_checkpoint
from draftsmith.train.run_folder.tracking import read_metrics

KINDS = ("eagle3", "medusa", "dflash", "draft_model")  # several depths, heads, blocks, one depth
RUN = {"steps": 12, "checkpoint_every": 6}
DEPTH = 5  # drafted tokens of a round


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return base_of(tiny_target_dir, tiny_target, tmp_path_factory.mktemp("data"))


def config_of(kind: str, base: dict[str, Any], folder: Path, **data: Any) -> TrainConfig:
    return make_config(kind, base, folder, data={"held_out_prompts": 64, **data}, run=RUN)


def test_points_lie_closer_in_the_first_tenth() -> None:
    assert [step for step in range(300) if is_on_curve(step, 200)] == [
        8,
        10,
        11,
        13,
        16,
        19,
        20,
        23,
        32,
        45,
        64,
        91,
        128,
        181,
        256,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_point_is_what_the_last_checkpoint_does(
    kind: str, base: dict[str, Any], tiny_target: Target, tmp_path: Path
) -> None:
    """Its loss on samples that no step has read, each by itself; with stored features it is the same."""
    runs = [train(config_of(kind, base, tmp_path / "online"))]
    if kind != "draft_model":
        stored = {"features": "stored", "features_dtype": "float32", "features_dir": str(tmp_path / "features")}
        runs.append(train(config_of(kind, base, tmp_path / "stored", **stored)))
    drafter = load_drafter(str(checkpoints(runs[0])[-1]), tiny_target).eval()
    samples = read_samples(Path(base["data.samples"]))
    places = held_out_samples(samples, 64)
    assert places
    plan = BatchPlan(Samples.of([samples[i] for i in sorted(places)]), 1, 512, 512, 0)
    sums: dict[str, list[float]] = {"loss": [0, 0], "simulated_acceptance_length": [0, 0]}
    with torch.no_grad():
        for place in plan.read:
            batch = plan.collate([[place]])
            found = drafter.loss(batch, tiny_target.features(batch, drafter.layer_ids))
            for name, pair in sums.items():
                pair[:] = [value + more.item() for value, more in zip(pair, found[name], strict=True)]
    expected = [total / count for total, count in sums.values()]
    for run in runs:
        curve = learning_curve(run)
        assert [point.step for point in curve] == [6, 8, 11, 12]
        assert [curve[-1].loss, curve[-1].acceptance_length] == pytest.approx(expected, rel=1e-4)


def test_measuring_changes_nothing(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are the same to the bit, whether the curve is followed or not."""
    followed = train(config_of("p_eagle", base, tmp_path / "followed"))
    monkeypatch.setattr(TrainingRun, "follow_curve", lambda self, step: None)
    alone = train(config_of("p_eagle", base, tmp_path / "alone"))
    for name, weight in final_weights(followed).items():
        assert torch.equal(weight, final_weights(alone)[name]), name


def test_the_curve_chooses_and_stops_where_nothing_decodes(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`best` has the longest acceptance; patience counts checkpoints that bring no more."""
    lengths = dict(zip(range(1, 9), (1.1, 1.5, 1.4, 1.5, 1.2, 1.1, 1.6, 1.7), strict=True))

    def follow(run: TrainingRun, step: int) -> None:
        assert run.tracker
        log_point(CurvePoint(step, 1.0, lengths[step]), run.tracker)

    monkeypatch.setattr(TrainingRun, "follow_curve", follow)
    config = config_of("medusa", base, tmp_path / "run")
    config.run.steps, config.run.checkpoint_every, config.evaluation.patience = 8, 1, 3
    for _ in range(2):  # the same command again trains no further
        run = train(config)
        assert read_metrics(run)[-1]["stopped_early"]
        assert [checkpoint.name for checkpoint in checkpoints(run)][-1] == "step-000005"  # 4 only equals 2
        assert best_checkpoint(run).name == (run / "best").resolve().name == "step-000004"  # the later of two equals


def test_patience_needs_something_to_watch(base: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation.patience has no effect without .* or data.held_out_prompts"):
        make_config("medusa", base, tmp_path, data={"held_out_prompts": 0}, evaluation={"patience": 2})


def finished_runs(generator: np.random.Generator, num_runs: int) -> list[FinishedRun]:
    """Return runs whose ends rise from their tenths by a known law: a line between log-odds, and normal noise."""
    tenths = generator.normal(-1.5, 0.6, num_runs)
    ends = 1.0 + 0.8 * tenths + generator.normal(0, 0.2, num_runs)
    fifths = tenths + 0.5 + generator.normal(0, 0.1, num_runs)
    return [FinishedRun(*expit(values)) for values in zip(tenths, fifths, ends, strict=True)]


def curve_to(share: float, num_steps: int) -> list[CurvePoint]:
    """Return the points of a tenth of a run, in which such a share of the drafted tokens is accepted."""
    steps = [step for step in range(num_steps // 10 + 1) if is_on_curve(step, num_steps)]
    return [CurvePoint(step, 1.0, 1 + DEPTH * share) for step in steps]


def test_nine_in_ten_intervals_hold_the_end() -> None:
    """Runs follow a law that is known, of which a forecast knows nothing but twelve of them."""
    generator, inside = np.random.default_rng(0), 0
    for _ in range(400):
        *finished, new = finished_runs(generator, 13)
        found = forecast(curve_to(new.tenth, 400), DEPTH, 400, finished)
        assert found
        inside += found.low <= 1 + DEPTH * new.end <= found.high
    assert 0.85 <= inside / 400 <= 0.95


def test_twice_the_steps_bring_what_the_law_says() -> None:
    """Without noise the gain is known: a fifth of twice the steps is where a tenth of these was, half a unit higher."""
    finished = [FinishedRun(*expit([tenth, tenth + 0.5, 1 + 0.8 * tenth])) for tenth in (-3.0, -2.0, -1.0)]
    found = forecast(curve_to(expit(-1.5), 400), DEPTH, 400, finished)
    assert found
    assert found.acceptance_length == pytest.approx(1 + DEPTH * expit(1 - 1.2))
    assert found.gain == pytest.approx(DEPTH * (expit(1 - 1.2 + 0.8 * 0.5) - expit(1 - 1.2)))
    assert [found.low, found.high] == pytest.approx([found.acceptance_length] * 2)
    assert "which pays" in forecast_text(found)


def test_away_from_the_finished_runs_it_is_less_sure_and_says_so() -> None:
    """But no more than all drafted tokens is ever foretold."""
    finished = finished_runs(np.random.default_rng(0), 12)
    near, far = (forecast(curve_to(expit(level), 400), DEPTH, 400, finished) for level in (-1.5, 1.5))
    assert near
    assert far
    wide, narrow = (np.subtract(*logit((np.array([found.high, found.low]) - 1) / DEPTH)) for found in (far, near))
    assert wide > 1.3 * narrow
    assert far.low < far.acceptance_length < far.high < 1 + DEPTH
    assert (near.known, far.known) == (True, False)
    assert "trust it little" in forecast_text(far)
    assert "trust it little" not in forecast_text(near)


@pytest.mark.parametrize(("share", "num_steps"), [(0.2, 90), (0.0, 400), (1.0, 400)])
def test_too_little_foretells_nothing(share: float, num_steps: int) -> None:
    """Two points are too few; and where no token is accepted, or each, nothing can be said of how that rises."""
    assert forecast(curve_to(share, num_steps), DEPTH, num_steps, FINISHED_RUNS) is None


def test_a_run_tells_its_end_after_a_tenth_and_what_came_of_it(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(held_out, "FIRST_POINT", 4)  # so that a short run has enough points
    monkeypatch.setattr(HeldOutSamples, "measure", lambda self, step: CurvePoint(step, 1.0, 1 + step / 100))
    config = config_of("medusa", base, tmp_path / "run")
    config.run.steps = config.run.checkpoint_every = 80
    run = train(config)
    found, curve = newest_forecast(run), learning_curve(run)
    depth = load_drafter(str(checkpoints(run)[-1]), Target.from_pretrained(config.target, "cpu")).simulated_depth
    assert found == forecast(curve, depth, 80, FINISHED_RUNS)
    assert found
    assert (found.step, found.num_steps) == (8, 80)
    said = capsys.readouterr().out
    assert forecast_text(found) in said
    assert outcome_text(found, curve[-1].acceptance_length) in said
