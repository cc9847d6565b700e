"""`draftsmith plan --gpu`: what it writes and says without a target's weights, its page, and what it refuses."""

import html
import io
import json
import re
import runpy
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import CHROMIUM, browse, computed, needs_node
from rich.console import Console

from draftsmith.inference.planning.gpu_roofline import (
    BYTES,
    DrafterShape,
    Machine,
    RooflineCosts,
    TargetTimes,
    dollars_per_million,
)
from draftsmith.inference.planning.gpus import GPUS
from draftsmith.inference.planning.plans import DataFlow, GpuPlan, TrainingWay
from draftsmith.models.drafter_configs import DRAFTER_CONFIGS
from draftsmith.models.errors import UserError
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.models.target.shape import CachedLayers, RoutedExperts, TargetShape, target_shape
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.configs.command_settings import PlanSettings
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS, target_config
from draftsmith.recipes.configs.recipes import recipe_named
from draftsmith.recipes.pages.rendering import SCRIPTS
from draftsmith.recipes.planning.drafter_shapes import DRAFT_MODELS, PASSES, drafter_of_shape, drafter_shape
from draftsmith.recipes.planning.gpu_plan import gpu_plan
from draftsmith.recipes.planning.training_plan import (
    cheapest_text,
    commands,
    memory_cell,
    print_training,
    training_assumptions,
)
from draftsmith.train.config import resolve
from draftsmith.train.hardware.estimates import meta_target
from draftsmith.train.hardware.ways import CARRIED, Training, cheapest_of, training_plan

ROOT = Path(__file__).parents[2]
PLAN = ["plan", "--target", "llama_3_1_8b", "--gpu", "H100", "--drafter", "eagle3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for a target whose shape is known here, of which no file is on this machine."""
    out = tmp_path_factory.mktemp("plan")
    more = "--drafter ngram --batch-size 1 64 512 --price 2.5 --acceptance 0.8 --draft-length 2 4"
    samples = "--samples 50000 --tokens-per-sample 1024"
    assert main([*PLAN, *more.split(), *samples.split(), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def plan(folder: Path) -> GpuPlan:
    content = json.loads((folder / "gpu_plan.json").read_text())
    plan = from_json(GpuPlan, content)
    assert to_json(plan) == content
    return plan


def test_a_plan_leads_with_a_length_that_was_asked_for(tmp_path: Path) -> None:
    """What is known of EAGLE-3's acceptance ends at four tokens, so a shorter draft would be best."""
    assert main([*PLAN, "--draft-length", "8", "--out", str(tmp_path / "plan")]) == 0
    assert "with draft length 8" in (tmp_path / "plan" / "plan.html").read_text()


def test_a_plan_for_a_gpu_that_is_not_here(plan: GpuPlan) -> None:
    """Its numbers are those of the roofline, and batches that do not fit have no outcome."""
    times = TargetTimes(plan.target, Machine(GPUS["H100"]))
    costs = RooflineCosts(times, plan.shapes[0])
    assert plan.context == 2048
    (row,) = (row for row in plan.steps if row.context == 2048)
    assert row.milliseconds == {str(batch): times.plain(batch, 2048) for batch in (1, 64, 512)}
    assert row.rows_that_fit == 208
    eagle3 = plan.drafters[0]
    assert eagle3.by_batch_size[1].break_even_acceptance_length == {
        str(length): costs.break_even(length, 64, 2048) for length in (2, 4)
    }
    assert [(one.batch_size, one.drafter) for one in plan.outcomes] == [
        (batch, drafter) for batch in (1, 64) for drafter in ("none", "eagle3", "ngram")
    ]
    plain, drafted, _ = plan.outcomes[:3]
    best = eagle3.expected[0].by_batch_size[0]
    assert plain.reply_seconds == pytest.approx(300 * times.plain(1, 2048) / 1000)
    assert plain.reply_seconds / drafted.reply_seconds == pytest.approx(best.speedup)
    assert drafted.dollars_per_million is not None
    assert drafted.dollars_per_million == pytest.approx(2.5 / 3600 / drafted.tokens_a_second * 1e6)


def test_the_page_stands_alone(folder: Path, plan: GpuPlan) -> None:
    page = (folder / "plan.html").read_text()
    assert len(page) < 150_000
    assert not re.search(r"""(src|href)=["'](?!#)|@import|<link""", page)
    assert "Only 208 texts of 2048 tokens fit" in page
    assert "90% of the data sheet" in page  # the assumptions
    for outcome in plan.outcomes:
        assert f"{outcome.reply_seconds:.2f} s" in page
    for gpu in GPUS.values():
        assert gpu.source in page


# --- training


@pytest.fixture(scope="module")
def training() -> Training:
    """EAGLE-3 for an 8B on eight H100; samples fill a whole number of batches."""
    return training_for("eagle3", 8)


def training_for(recipe: str, num_gpus: int, gpu: str = "H100", target: str = "llama_3_1_8b") -> Training:
    config, name = target_config(target)
    with torch.device("meta"):
        drafter, settings = drafter_of_shape(recipe, meta_target(config, name))
    assert settings is not None
    shape, machine = target_shape(config, name), Machine(GPUS[gpu], num_gpus)
    return Training(recipe, settings, drafter, config, shape, machine, 64_000, 1000, 3)


def ways_of(training: Training) -> dict[str, TrainingWay]:
    return {way.name: way for way in training_plan(training, 2.0).ways}


def test_training_takes_what_theory_says(plan: GpuPlan) -> None:
    """A token of an 8B has four states of 4096 values in bf16; what a server sends is what the disk keeps.

    In every epoch but the first, stored features spare the pass through the target's layers.
    """
    (planned,) = plan.training or []  # nothing trains n-grams
    tokens = 50_000 * 1024
    assert (planned.drafter, planned.steps) == ("eagle3", 50_000 * 3 // 32)
    assert planned.samples_bytes == 4 * tokens
    assert planned.features_bytes == 4 * 4096 * 2 * tokens
    ways = {way.name: way for way in planned.ways}
    assert list(ways) == ["online, whole", "stored, whole", "stored, by a vLLM"]
    whole, kept, sent = ways.values()
    assert sent.network.num_bytes == sent.stored_bytes == kept.stored_bytes == planned.features_bytes
    assert whole.stored_bytes == whole.disk.num_bytes == whole.network.num_bytes == whole.link.num_bytes == 0
    assert kept.disk.num_bytes == 4 * planned.features_bytes  # written once, and read in three epochs
    assert kept.memory_bytes < whole.memory_bytes
    pass_of_layers = 2 * plan.target.active_weights_of_layers * tokens / (0.35 * GPUS["H100"].bf16)
    steps = planned.steps * 32 * 1024 / tokens  # epochs, but for the last part of a batch
    spared = (steps - 1) * pass_of_layers - planned.features_bytes / CARRIED
    assert 3600 * (whole.hours - kept.hours) == pytest.approx(spared, rel=1e-6)
    assert [way.dollars for way in planned.ways] == pytest.approx([2.5 * way.gpu_hours for way in planned.ways])


def test_what_training_takes_grows_with_the_samples(training: Training) -> None:
    """Twice the samples take twice of everything but memory; GPU hours of products do not depend on how many GPUs."""
    double = ways_of(replace(training, samples=2 * training.samples))
    for name, way in ways_of(training).items():
        assert double[name].hours == pytest.approx(2 * way.hours, rel=1e-9)
        assert double[name].stored_bytes == 2 * way.stored_bytes
        for moved, twice in zip((way.disk, way.network, way.link), traffic_of(double[name]), strict=True):
            assert twice == DataFlow(pytest.approx(2 * moved.num_bytes), pytest.approx(moved.rate))
        assert double[name].memory_bytes == way.memory_bytes
    one = ways_of(replace(training, machine=Machine(GPUS["H100"])))
    assert one["online, whole"].gpu_hours == pytest.approx(ways_of(training)["online, whole"].gpu_hours)


def traffic_of(way: TrainingWay) -> tuple[DataFlow, DataFlow, DataFlow]:
    return way.disk, way.network, way.link


def test_a_target_in_pieces_goes_over_the_link(training: Training) -> None:
    """Each GPU gets seven eighths of the layers for every micro-batch, beside gradients; a slow link bounds the run.

    Both go while the GPUs compute.
    """
    whole, pieces = (ways_of(training)[f"online, {where}"] for where in ("whole", "in pieces"))
    layers = 2 * training.target.weights_of_layers
    assert pieces.link.num_bytes - whole.link.num_bytes == pytest.approx(training.steps * layers * 7 / 8)
    assert pieces.memory_bytes < whole.memory_bytes
    assert pieces.bound_by == whole.bound_by == "products"
    assert pieces.hours == whole.hours
    slow = replace(training, machine=Machine(replace(GPUS["H100"], link=1e9), 8))
    slowed = ways_of(slow)["online, in pieces"]
    assert slowed.bound_by == "link"
    assert 3600 * slowed.hours == pytest.approx(slowed.link.num_bytes / (0.7 * 1e9))


def test_each_machine_can_hold_the_target_in_pieces() -> None:
    """Sixteen GPUs in two machines: less memory in sixteen pieces, and less over the network in twice eight."""
    training = training_for("eagle3", 16, target="llama_3_3_70b")
    twice, once = (ways_of(training)[f"online, {where}"] for where in ("in pieces", "in pieces over machines"))
    layers = 2 * training.target.weights_of_layers
    passes = training.steps * max(1, training.batch_size * training.tokens_per_sample / 16 / 8192)
    assert twice.tokens_per_micro_batch == once.tokens_per_micro_batch == 8192
    assert twice.memory_bytes - once.memory_bytes == pytest.approx(layers / 16)
    assert once.link.num_bytes - twice.link.num_bytes == pytest.approx(passes * layers / 16)
    assert twice.hours <= once.hours
    assert "--num_machines 2" in once.command
    assert once.command.endswith("run.target_placement=sharded_over_machines")


def test_streamed_features_take_no_disk(training: Training) -> None:
    """Some GPUs serve what the others train on, in every epoch; no split of eight can beat all of them always at work.

    A target that no GPU holds beside a drafter fits where it has its GPUs alone.
    """
    ways = ways_of(training)
    streamed, stored = (ways[f"{features}, by a vLLM"] for features in ("streamed", "stored"))
    assert streamed.stored_bytes == streamed.disk.num_bytes == streamed.storing_hours == 0
    assert streamed.network.num_bytes == 3 * stored.network.num_bytes
    steps = training.steps * training.batch_size * training.tokens_per_sample / training.tokens
    pass_of_layers = 2 * training.target.active_weights_of_layers * training.tokens / (0.35 * GPUS["H100"].bf16) / 8
    drafter = 3600 * ways["online, whole"].hours - steps * pass_of_layers
    assert 0 < drafter < 3600 * streamed.hours
    assert drafter + training.epochs * pass_of_layers <= 3600 * streamed.hours
    large = ways_of(training_for("eagle3", 8, target="llama_3_3_70b"))
    assert large["streamed, by a vLLM"].fits
    assert not large["online, whole"].fits
    assert "streamed, by a vLLM" not in ways_of(training_for("eagle3", 2, target="llama_3_3_70b"))


def test_the_cheapest_way_is_one_that_fits(training: Training) -> None:
    """A way that does not fit is said to be so, with the smallest micro-batches, and is never the cheapest."""
    large = replace(training_for("eagle3", 8, target="llama_3_3_70b"), samples=500_000, tokens_per_sample=1500)
    for one in (training, large):
        planned = training_plan(one, None)
        fitting = [way for way in planned.ways if way.fits]
        assert planned.cheapest == min(fitting, key=lambda way: way.gpu_hours).name
        online = [way for way in fitting if not way.stored_bytes]
        assert planned.cheapest_without_disk == min(online, key=lambda way: way.gpu_hours).name
        for way in planned.ways:
            assert way.fits == (way.memory_bytes <= 0.9 * 80e9)
    assert planned.features_bytes == pytest.approx(49e12, rel=0.005)  # as issue trackers tell of such a run
    ways = {way.name: way for way in planned.ways}
    assert [name for name, way in ways.items() if not way.fits] == ["online, whole", "stored, whole"]
    assert ways["online, whole"].tokens_per_micro_batch == 2048
    assert ways["stored, in pieces"].tokens_per_micro_batch == 8192  # of 16,384 that the recipe has
    assert memory_cell(ways["online, whole"]).text.endswith("(no)")
    assert "No way of training eagle3 fits" in cheapest_text(replace(planned, cheapest=None))
    kept = replace(ways["stored, in pieces"], gpu_hours=1.0)
    assert cheapest_of([kept, replace(kept, name="smaller", stored_bytes=1)]) == "smaller"


def test_nothing_fits_small_gpus() -> None:
    planned = training_plan(training_for("eagle3", 1, "L4"), None)
    assert planned.cheapest is planned.cheapest_without_disk is None
    assert not any(way.fits for way in planned.ways)


@pytest.mark.parametrize(("recipe", "num_gpus"), [("eagle3", 1), ("eagle3", 6), ("dflash", 16)])
def test_the_commands_of_ways_are_taken(recipe: str, num_gpus: int) -> None:
    """Their settings are those of a run, whose batches all GPUs share."""
    for way in ways_of(training_for(recipe, num_gpus)).values():
        words = shlex.split(way.command)
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        start = words.index("draftsmith.train") + 1
        config = resolve(recipe_named(words[start]), overrides=words[start + 1 :])
        processes = int(words[words.index("--num_processes") + 1]) if "--num_processes" in words else 1
        assert config.data.batch_size % processes == 0
        assert config.run.steps == 64_000 * 3 // config.data.batch_size
        assert config.data.features == way.name.split(",")[0]
        assert bool(config.data.servers) == (way.server_command is not None)
        assert config.data.tokens_per_micro_batch == way.tokens_per_micro_batch


def test_training_is_printed_and_on_the_page(folder: Path, plan: GpuPlan) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    print_training(plan, console)
    printed, page = console.export_text(), (folder / "plan.html").read_text()
    (planned,) = plan.training or []
    words = " ".join(printed.split())
    for line in (cheapest_text(planned), *training_assumptions(plan)):
        assert line in words
        assert html.escape(line).replace("&#x27;", "&#39;") in page
    (cheapest,) = commands(planned, planned.cheapest)
    assert cheapest in words
    for way in planned.ways:
        assert way.name in printed
        assert f"{way.gpu_hours:.2g}" in printed
        assert way.name in page


def test_samples_need_a_drafter_that_is_trained(tmp_path: Path) -> None:
    settings = PlanSettings(target="llama_3_1_8b", gpu="H100", drafter=("ngram",), samples=9, out=tmp_path / "out")
    with pytest.raises(UserError, match="no recipe trains these drafters"):
        gpu_plan(settings)


# --- sizes, the panel and mistakes


PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
MIXTURE = TargetShape(
    10**9,
    10**8,
    10**8,
    [RoutedExperts(24, 64, 4, 2 * 10**6)],
    "mixture",
    24,
    [CachedLayers(12, 1024, 512), CachedLayers(12, 1024, None)],
    10**6,
)
DRAFTERS = [
    DrafterShape("eagle3", "token", 4 * 10**8, 1, 2048, None),
    DrafterShape("medusa", "head", 4 * 10**8, 0, 0, 4),
    DrafterShape("dflash", "block", 10**9, 5, 10_240, 15),
    DrafterShape("ngram", "none", 0, 0, 0, None),
]


@needs_node
def test_the_panel_computes_what_python_does(plan: GpuPlan) -> None:
    """To the digit: dense targets and mixtures, every kind of draft, types of weights, GPUs, loads and contexts."""
    machines = [Machine(GPUS["H100"]), Machine(GPUS["B200"], 4, "fp4"), Machine(GPUS["L4"], weights="fp8")]
    places = [(1, 128), (16, 4096), (200, 65_536)]
    call = """[...machines].map(({ gpu, num_gpus, weights }) => targets.map((target) => {
      const machine = machineOf({ machine: machines[0], bytes }, gpu, num_gpus, weights);
      return places.map(([batch, context]) => ({
        rows: rowsThatFit(machine, target, context), dollars: dollarsPerMillion(2, num_gpus, batch, 5),
        rounds: drafters.map((drafter) => {
          const costs = planCosts(machine, target, drafter, batch, context, 4);
          return [costs.plain_ms, ...costs.draft.map((draft, i) => draft + costs.verify[i] + costs.host)];
        }),
      }));
    }))"""
    values: dict[str, Any] = {
        "machines": machines, "targets": [plan.target, MIXTURE], "drafters": DRAFTERS, "places": places, "bytes": BYTES
    }  # fmt: skip
    found = computed(call, (*SCRIPTS, "plan_panel.js"), **values)
    for machine, by_target in zip(machines, found, strict=True):
        for target, by_place in zip(values["targets"], by_target, strict=True):
            times = TargetTimes(target, machine)
            for (batch, context), seen in zip(places, by_place, strict=True):
                assert seen["rows"] == times.rows_that_fit(context)
                assert seen["dollars"] == pytest.approx(dollars_per_million(2, machine.num_gpus, batch, 5))
                for drafter, rounds in zip(DRAFTERS, seen["rounds"], strict=True):
                    costs = RooflineCosts(times, drafter)
                    steps = [costs.break_even(length, batch, context) for length in range(5)]
                    assert rounds == pytest.approx([times.plain(batch, context), *steps], rel=1e-12)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_a_browser(folder: Path, plan: GpuPlan) -> None:
    """It logs no error, and the panel starts with the plan's own speedup."""
    seen = browse(folder, "--dump-dom", "--window-size=390,900", f"file://{folder}/plan.html")
    assert "CONSOLE" not in seen.stderr
    found = re.search(r'data-speedups="\[(.*?)\]"', seen.stdout)
    assert found is not None
    best = plan.drafters[0].expected[0].by_batch_size[0]
    assert float(found[1].split(",")[best.draft_length - 1]) == pytest.approx(best.speedup)


def test_every_kind_of_drafter_has_its_passes() -> None:
    """And sizes for the shape of Llama-3.1-8B, in millions of weights as algorithms count them."""
    priceless = {"lookahead", "none"}  # what the first costs depends on the text
    assert set(PASSES) | priceless == set(DRAFTER_CONFIGS)
    config = PUBLIC_TARGETS["llama_3_1_8b"].config
    for kind, millions in {"eagle3": 425, "eagle": 777, "p_eagle": 1079, "dflash": 1700}.items():
        assert round(drafter_shape(kind, config, "8B")[0].weights / 1e6) == millions
    for kind in PASSES.keys() - DRAFT_MODELS:
        shape, found = drafter_shape(kind, config, "8B")
        assert (found, shape.passes) == (kind, PASSES[kind])
    draft_model, kind = drafter_shape("qwen3_0_6b", config, "8B")
    assert (kind, draft_model.passes, draft_model.layers, draft_model.cache_values) == (
        "draft_model",
        "token",
        28,
        57_344,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu H101", "give one of B200, H200, H100"),
        ("--price 2", "--price has no effect without --gpu"),
        ("--samples 1000", "give --gpu, such as --gpu H100"),
        ("--epochs 2", "--epochs has no effect without --gpu"),
        ("--gpu H100 --epochs 2", "--epochs has no effect without --samples"),
        ("--gpu H100 --tokens-per-sample 9", "--tokens-per-sample has no effect without --samples"),
        ("--gpu H100 --device cpu", "--device has no effect with --gpu"),
        ("--gpu H100 --context 200000", "131072 tokens at most"),
        ("--gpu H100 --target short --draft-length 5 --drafter medusa", "up to 4 tokens"),
        ("--gpu H100 --target short --drafter lookahead", "its cost is not known"),
        ("--gpu H100 --target short --drafter draft_model", "for a draft model its name or folder"),
        ("--gpu A10 --target wide", "give --num-gpus 3"),
        ("--gpu H100 --target short --drafter medusa_2", "give its kind"),
        ("--gpu H100 --target nothing", "does not load"),
        ("--gpu H100 --target packed", "quantised by new: give --weights"),
    ],
)
def test_mistakes(
    arguments: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    one_layer = {"model_type": "llama", "num_hidden_layers": 1}
    configs = {
        "nothing": {"model_type": "nothing"},
        "packed": {"quantization_config": {"quant_method": "new"}, **one_layer},
        "short": {"model_type": "llama", "num_hidden_layers": 8},
        "wide": {**one_layer, "hidden_size": 32_768, "intermediate_size": 200_000},  # 26.1 billion weights
    }
    for name, content in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    given = ["plan", "--target", "llama_3_1_8b", "--drafter", "eagle3", "--out", "out", *arguments.split()]
    assert main(given) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("quantisation", "weights"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "int8"),
        ({**PACKED, "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "int4"),
        ({**PACKED, "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "int8"),
    ],
)
def test_weights_are_counted_as_they_are_stored(quantisation: Any, weights: str, tmp_path: Path) -> None:
    """Also where draftsmith does not unpack them: an engine serves them."""
    config = {"model_type": "llama", "num_hidden_layers": 8, "quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = PlanSettings(target=str(tmp_path), gpu="H100", drafter=("eagle3",), out=tmp_path / "out")
    assert gpu_plan(settings).machine.weights == weights


def test_the_documented_errors_are_those_of_today() -> None:
    """Of the figures for one target, which a moment computes; `python benchmarks/roofline.py` prints them all."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "roofline.py"))
    figures = [one for one in benchmark["PUBLISHED"] if one.target == "Llama-3.1-8B"]
    assert len(figures) > 10
    page = (ROOT / "docs" / "roofline.md").read_text()
    for row in benchmark["table"](figures).splitlines()[2:]:
        assert row in page
