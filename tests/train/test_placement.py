"""The same run in every layout: processes, accumulation, and what is in pieces where change nothing that is learnt.

tests/golden/trajectory.json holds losses and gradient norms of one process. Layouts that accelerate has for GPUs only
run on processes of a CPU that it takes for them (as_gpus.py): the same code but for kernels and links between devices.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from drafters import untrained
from runs import arguments, base_of, final_weights, make_config
from safetensors.torch import load_file
from tiny_target import tiny_tokenizer
from torch import distributed
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor

import draftsmith.recipes
from draftsmith.data.features import stored as features
from draftsmith.data.samples.folder import PREPARED, write_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.data.samples.samples import Samples, held_out_samples
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.errors import UserError
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import train
from draftsmith.train.hardware import meter, placement
from draftsmith.train.hardware.layouts import make_accelerator
from draftsmith.train.hardware.placement import check_placement, devices_of_layers, memory_needed
from draftsmith.train.inputs.features import free_memory
from draftsmith.train.process.signals import Stopped
from draftsmith.train.run_folder.checkpoint import checkpoints, remove
from draftsmith.train.run_folder.learning_curve import learning_curve
from draftsmith.train.run_folder.tracking import read_metrics
from draftsmith.train.run_folder.training_state import MOMENTS, STEP, WEIGHT, part_file, piece_of_zero3
from draftsmith.train.run_folder.vocabulary import read_vocabulary
from draftsmith.train.setup import check_states_precision

TESTS = Path(__file__).parents[1]
LAUNCH = Path(draftsmith.recipes.__file__).parent / "launch"
TRAJECTORY = TESTS / "golden" / "trajectory.json"
TOLERANCE = 1e-4  # relative; sums in another order differ by 1e-7 a step
RUN = {"steps": 4, "checkpoint_every": 3}  # a step follows what is measured and saved
HELD_OUT_PROMPT = 51  # the one that is held out of prompts 0 to 47 and itself


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Samples of very different lengths, the same on every machine."""
    folder = tmp_path_factory.mktemp("data")
    base = {**base_of(tiny_target_dir, tiny_target, folder), "data.held_out_prompts": 1}
    chance = random.Random(0)
    samples = []
    for prompt in [*range(48), HELD_OUT_PROMPT, HELD_OUT_PROMPT, HELD_OUT_PROMPT]:
        length = chance.randrange(8, 60)
        ids = [chance.randrange(3, 300) for _ in range(length)]
        samples.append(Sample(ids, [Span(length // 3, length)], prompt_index=prompt))
    assert held_out_samples(Samples.of(samples), 1) == {48, 49, 50}
    write_samples(folder / "samples", [samples], iter)
    return base


def trajectory(run: Path) -> list[list[float]]:
    return [[line["loss"], line["gradient_norm"]] for line in read_metrics(run) if "loss" in line]


def last_point(run: Path) -> list[float]:
    """Loss and acceptance length on the held-out samples, which two processes share unequally."""
    point = learning_curve(run)[-1]
    return [point.step, point.loss, point.acceptance_length]


def expected() -> list[list[float]]:
    return json.loads(TRAJECTORY.read_text())


@pytest.fixture(scope="module")
def one_process(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(make_config("eagle3", base, tmp_path_factory.mktemp("one"), run=RUN))


def run_words(base: dict[str, Any], run: Path) -> list[str]:
    """Return the recipe and the settings of a run whose device the launcher chooses."""
    settings = [key for key in arguments(base, run, run=RUN) if not key.startswith("run.device")]
    return ["eagle3", "drafter.draft_vocab_size=null", *settings]


def start(
    python: str, config: str, words: list[str], *options: str, script: bool = True, **environment: str
) -> subprocess.Popen[str]:
    """`accelerate launch` with a config of recipes/launch."""
    program = [str(TESTS / "helpers" / "as_gpus.py")] if script else ["-m", "draftsmith.train"]
    command = [python, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / f"{config}.yaml")]
    command += [*options, *program, *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", **environment}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def launch(python: str, config: str, words: list[str], *options: str, **how: Any) -> tuple[int, str, str]:
    """The exit code and what was printed."""
    process = start(python, config, words, *options, "--main_process_port", "0", **how)
    output, errors = process.communicate(timeout=400)
    return process.returncode, output, errors


LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {  # launcher config -> how the run describes it, options
    "one_gpu": ("1 x cpu, one process", ()),
    "cpu": ("2 x cpu, DDP", ()),
    "ddp": ("2 x cpu, DDP", ("--num_processes", "2")),
    "fsdp2": ("2 x cpu, FSDP2, target sharded over 2 processes", ("--num_processes", "2")),
    "zero2": ("2 x cpu, ZeRO-2", ("--num_processes", "2")),
    "zero3": ("2 x cpu, ZeRO-3, target sharded", ("--num_processes", "2")),
    "zero3_offload": ("2 x cpu, ZeRO-3", ("--num_processes", "2")),
}
OF_GPUS = ("fsdp2", "zero2", "zero3", "zero3_offload")  # on a CPU only with as_gpus.py


def test_every_launcher_config_is_run() -> None:
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == {*LAYOUTS, "two_machines", "kubernetes"}


def assert_trajectory(run: Path, one_process: Path) -> None:
    """Losses, gradient norms and weights are those of one process."""
    assert trajectory(run) == [pytest.approx(step, rel=TOLERANCE) for step in expected()]
    assert last_point(run) == pytest.approx(last_point(one_process), rel=TOLERANCE)
    weights = final_weights(one_process)
    for name, weight in final_weights(run).items():
        torch.testing.assert_close(weight, weights[name], atol=1e-5, rtol=1e-4)


def test_one_process_gives_the_trajectory(one_process: Path) -> None:
    assert trajectory(one_process) == [pytest.approx(step, rel=TOLERANCE) for step in expected()]


def test_accumulation_gives_the_trajectory(base: dict[str, Any], tmp_path: Path) -> None:
    data = {"tokens_per_micro_batch": 150, "max_length": 60}
    run = train(make_config("eagle3", base, tmp_path, data=data, run=RUN))
    assert trajectory(run) == [pytest.approx(step, rel=TOLERANCE) for step in expected()]


@pytest.fixture(scope="module")
def interrupted(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that one process stopped after two of its steps."""
    folder, loss = tmp_path_factory.mktemp("interrupted"), Eagle3.loss

    def interrupt(self: Eagle3, *arguments: Any) -> Any:
        if self.progress == 1 / 4:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(self, *arguments)

    config = make_config("eagle3", base, folder, run=RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle3, "loss", interrupt)
        with pytest.raises(Stopped):
            train(config)
    return folder


def assert_same_state(run: Path, one_process: Path) -> None:
    """Compare what a resumed run goes on from, by the names of the parameters."""
    found, wanted = (checkpoints(path)[-1] / "trainer" for path in (run, one_process))
    for part in (WEIGHT, STEP, *MOMENTS):
        expected, scale = load_file(part_file(wanted, part)), {"exp_avg_sq": 1e-9}.get(part, 1e-6)
        torch.testing.assert_close(load_file(part_file(found, part)), expected, atol=scale, rtol=1e-3)


@pytest.mark.parametrize("config", LAYOUTS)
def test_layouts_go_on_with_the_trajectory(
    config: str, python: str, base: dict[str, Any], one_process: Path, interrupted: Path, tmp_path: Path
) -> None:
    """Two steps by one process, two in the layout; what it saves is what one process would have saved."""
    layout, options = LAYOUTS[config]
    placed = {"run.target_placement": "sharded"} if "sharded" in layout else {}
    shutil.copytree(interrupted, tmp_path / "run")
    words = run_words({**base, **placed}, tmp_path / "run")
    code, output, errors = launch(python, config, words, *options, script=config in OF_GPUS)
    assert code == 0, errors[-3000:]
    assert " ".join(output.split()).startswith(layout)
    assert_trajectory(tmp_path / "run", one_process)
    assert_same_state(tmp_path / "run", one_process)


@pytest.mark.parametrize(("config", "goes_on"), [("cpu", False), ("fsdp2", False), ("fsdp2", True)])
def test_muon_moves_whole_matrices_alike_in_two_processes(
    config: str, goes_on: bool, python: str, base: dict[str, Any], tmp_path: Path
) -> None:
    """FSDP2 holds pieces of them, and of the momentum that it goes on from, which one process had written.

    Muon makes small directions hundreds of times as long, and so what the two sums of gradients round apart.
    """
    base = {**base, "optimizer.matrices": "muon"}
    one, two = tmp_path / "one", tmp_path / "two"
    expected = final_weights(train(make_config("eagle3", base, one, run=RUN)))
    if goes_on:
        shutil.copytree(one, two)
        remove(checkpoints(two)[-1])
    words = run_words(base, two)
    code, _, errors = launch(python, config, words, "--num_processes", "2", script=config in OF_GPUS)
    assert code == 0, errors[-3000:]
    for name, weight in final_weights(two).items():
        torch.testing.assert_close(weight, expected[name], atol=5e-5, rtol=0)


def test_pieces_of_zero3_are_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven numbers on three processes: nine places, as DeepSpeed lays them out."""
    pieces, parameter = [], SimpleNamespace(ds_tensor=torch.zeros(3))
    for rank in range(3):
        monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
        pieces.append(piece_of_zero3(parameter, torch.arange(1, 8)))
    assert torch.cat(pieces).tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0]


def test_two_machines_give_the_trajectory(python: str, base: dict[str, Any], one_process: Path, tmp_path: Path) -> None:
    """Two launchers, with two processes each, which hold the target together on each machine.

    The second one's Python is not the warm one, and has a hash seed of its own.
    """
    base = {**base, "run.target_placement": "sharded"}
    pythons = [python, sys.executable]
    where = ["--num_processes", "4", "--main_process_ip", "127.0.0.1", "--main_process_port", str(get_free_port())]
    machines = [
        start(
            pythons[rank], "two_machines", run_words(base, tmp_path), *where, "--machine_rank", str(rank), script=False
        )
        for rank in range(2)
    ]
    outputs = [machine.communicate(timeout=400) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert " ".join(outputs[0][0].split()).startswith("4 x cpu, DDP, target sharded over 2 processes")
    assert_trajectory(tmp_path, one_process)


STORED = {"data.features": "stored", "data.features_dtype": "float32"}
SHARD_BYTES = 350_000


@pytest.fixture(scope="module")
def in_pieces(python: str, base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of two processes by one launch, of the target in pieces and of a wrong mean."""
    folder = tmp_path_factory.mktemp("pieces")
    sharded = {**base, "run.target_placement": "sharded"}
    words = [
        *run_words({**sharded, **STORED, "data.features_dir": folder / "features"}, folder / "stored"),
        "--then",
        *run_words({**sharded, "drafter.draft_vocab_size": 200, "run.steps": 1}, folder / "vocabulary"),
        "--then",
        *run_words(base, folder / "means"),
        "--per-rank-mean",
    ]
    code, _, errors = launch(python, "fsdp2", words, "--num_processes", "2", SHARD_BYTES=str(SHARD_BYTES))
    assert code == 0, errors[-3000:]
    return folder


def test_a_target_in_pieces_stores_what_a_whole_one_does(
    in_pieces: Path, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three shards by two processes, whose layers are there only together; then the one trajectory from them."""
    monkeypatch.setattr(features, "SHARD_BYTES", SHARD_BYTES)
    whole = {**base, **STORED, "data.features_dir": tmp_path / "features"}
    train(make_config("eagle3", whole, tmp_path / "run", run=RUN))
    assert trajectory(in_pieces / "stored") == [pytest.approx(step, rel=TOLERANCE) for step in expected()]
    files = sorted(path.name for path in (tmp_path / "features").glob("shard-*"))
    assert len(files) == 3
    for file in files:
        found, wanted = (load_file(folder / "features" / file) for folder in (in_pieces, tmp_path))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("stored", [False, True])
def test_a_device_map_gives_the_trajectory(
    stored: bool, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU in the place of both devices: moves between them are those of test_device_map.py."""
    for module in (placement, meter):
        monkeypatch.setattr(module, "target_devices", lambda *_: [torch.device("cpu")] * 2)
    store = {"features": "stored", "features_dtype": "float32", "features_dir": str(tmp_path / "store")}
    data = store if stored else {}
    run = train(make_config("eagle3", base, tmp_path / "run", data=data, run={**RUN, "target_placement": "device_map"}))
    assert trajectory(run) == [pytest.approx(step, rel=TOLERANCE) for step in expected()]


@pytest.mark.parametrize(("num_gpus", "on_first"), [(2, 23), (3, 4), (4, 0)])
def test_layers_lie_where_there_is_room(
    num_gpus: int, on_first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70B: the first GPU also holds ends, drafter, optimiser and a micro-batch, 59 GB, as much as 34 of 80 layers."""
    PUBLIC_TARGETS["llama_3_3_70b"].config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = RECIPES["eagle3_llama_3_3_70b_usable"]()
    config.target, config.run.target_placement = str(tmp_path), "device_map"
    gpus = [torch.device("cuda", index) for index in range(num_gpus)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140e9, 141e9))
    monkeypatch.setattr(placement, "default_dtype", lambda device: torch.bfloat16)
    target = Target.without_weights(tmp_path)
    of_layers, taken = devices_of_layers(config, gpus[0]), memory_needed(config, gpus[0], target)
    beside = taken.ends_bytes + taken.drafter_bytes + taken.working_bytes
    assert beside / taken.layer_bytes * 80 == pytest.approx(34.2, abs=0.1)
    counts = [of_layers.count(gpu) for gpu in gpus]
    assert of_layers == [gpu for gpu, count in zip(gpus, counts, strict=True) for _ in range(count)]
    assert counts[0] == on_first
    assert max(counts[1:]) - min(counts[1:]) <= 1
    assert sum(counts) == 80
    monkeypatch.setattr(Accelerator, "device", gpus[0])
    text = placement.place(config, Accelerator(), target).text()
    assert f"over {num_gpus} GPUs; on the first device target" in text
    assert "of the target, of 140 GB that are free" in text


@pytest.mark.parametrize(
    ("num_processes", "num_gpus", "changes", "reason"),
    [
        (1, 1, {}, "needs several GPUs, and this process has 1"),
        (2, 2, {}, "needs one process .*, not DDP: start with recipes/launch/one_gpu.yaml"),
        (
            1,
            2,
            {"evaluation.prompts": "prompts.jsonl"},
            "leaves no process a target that decodes: let an engine measure",
        ),
        (1, 2, {}, "puts layers on GPUs, and this run is on cpu"),
    ],
)
def test_device_maps_are_refused(
    num_processes: int,
    num_gpus: int,
    changes: dict[str, Any],
    reason: str,
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(Accelerator, "num_processes", num_processes)
    config = make_config("eagle3", {**base, **changes, "run.target_placement": "device_map"}, tmp_path)
    with pytest.raises(UserError, match=f"run.target_placement=device_map {reason}"):
        check_placement(config, accelerator)


def test_a_target_in_pieces_measures_a_draft_vocabulary(in_pieces: Path) -> None:
    """Both processes compute, and the main one writes the result."""
    found = read_vocabulary(in_pieces / "vocabulary")
    assert found is not None
    (inside,) = found.domains.values()
    assert 0 < inside.greedy < 1


def test_means_of_means_are_found(in_pieces: Path) -> None:
    """Each process dividing by its own tokens is the bug that the trajectory is there for."""
    found = trajectory(in_pieces / "means")
    assert len(found) == len(expected())
    assert found != [pytest.approx(step, rel=TOLERANCE) for step in expected()]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run.target_placement": "sharded"}, "needs several processes"),
        ({"run.target_placement": "sharded", "data.features": "stored"}, "needs several processes"),
    ],
)
def test_targets_in_pieces_are_refused(
    changes: dict[str, Any], reason: str, base: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        train(make_config("eagle3", {**base, **changes}, tmp_path, run=RUN))


def test_what_cannot_fit_is_refused(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the target is loaded, with what would help."""
    memory = type("Memory", (), {"available": 100_000})
    monkeypatch.setattr("draftsmith.train.hardware.placement.psutil.virtual_memory", memory)
    with pytest.raises(UserError, match=r"do not fit .* of 100 kB that are free\): data.features=stored"):
        train(make_config("eagle3", base, tmp_path, run=RUN))


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ("stored", "let an engine measure by evaluation.engine=URL, or leave out evaluation.prompts, or take more"),
        ("online", "let an engine measure by evaluation.engine=URL, or leave out evaluation.prompts; then data.feat"),
    ],
)
def test_an_evaluation_that_decodes_takes_the_whole_target(
    features: str, told: str, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where features are stored, and training has its ends alone: these then lie there a second time."""
    accelerator = Accelerator(cpu=True)
    config = make_config("eagle3", {**base, "data.features": features}, tmp_path)
    target = Target.without_weights(config.target)
    needed = memory_needed(config, accelerator.device, target)
    assert placement.place(config, accelerator, target).target == needed.ends_bytes + needed.layer_bytes * (
        features == "online"
    )
    config.evaluation.prompts = "prompts.txt"
    ends = 1 if features == "online" else 2
    assert placement.place(config, accelerator, target).target == ends * needed.ends_bytes + needed.layer_bytes
    monkeypatch.setattr(placement, "free_bytes", lambda *_: 100.0)
    with pytest.raises(UserError, match=re.escape(told)):
        placement.place(config, accelerator, target)


def test_the_own_gpu_is_the_one_that_was_asked_for(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has "cuda" for its device, without an index, and run.device=cuda:1 makes that the current one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    config = make_config("eagle3", {**base, "run.target_placement": "device_map"}, tmp_path)
    assert [gpu.index for gpu in placement.target_devices(config, torch.device("cuda"))] == [1, 0, 2]
    assert [gpu.index for gpu in placement.target_devices(config, torch.device("cuda", 2))] == [2, 0, 1]


def test_a_target_in_pieces_stays_in_pieces(tiny_target_dir: Path) -> None:
    """Each layer is put together for its own computation alone, and nothing holds it when the target is let go."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        target = Target.sharded_from_pretrained(tiny_target_dir, "cpu", torch.float32)
        target.features(Batch(torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.bool)))
        weights = [weight for layer in target.decoder_layers for weight in layer.parameters()]
        assert all(isinstance(weight, DTensor) for weight in weights)
        layer = weakref.ref(target.decoder_layers[0])
        del target, weights
        free_memory()
        assert layer() is None
    finally:
        distributed.destroy_process_group()


def test_layers_that_cannot_be_stored_from_are_refused(
    base: dict[str, Any], tmp_path: Path, make_target_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends and drafter fit; the layers, which the pass over the samples needs, do not."""
    target = Target.from_pretrained(make_target_dir(intermediate_size=4096), "cpu", torch.float32)  # 6.3 MB of layers
    config = make_config("medusa", {**base, "target": target.name, "data.features": "stored"}, tmp_path, run=RUN)
    prepared = tmp_path / "samples" / PREPARED
    shutil.copytree(base["data.samples"], tmp_path / "samples")
    prepared.write_text(json.dumps({**json.loads(prepared.read_text()), "target_fingerprint": target.fingerprint()}))
    config.data.samples = str(tmp_path / "samples")
    memory = type("Memory", (), {"available": 3_000_000})
    monkeypatch.setattr("draftsmith.train.hardware.placement.psutil.virtual_memory", memory)
    with pytest.raises(UserError, match=r"6.\d* MB .* of 3 MB that are free: give data.features_endpoint"):
        train(config)


def test_fp32_beside_states_in_bf16_is_refused(make_target_dir: Callable[..., Path]) -> None:
    """As they are on a GPU. A draft model reads tokens alone."""
    bf16_target = Target.from_pretrained(make_target_dir(), "cpu", torch.bfloat16)
    with pytest.raises(UserError, match="run.precision=fp32: hidden states of .* are in torch.bfloat16"):
        check_states_precision("fp32", untrained("medusa", bf16_target), bf16_target)
    check_states_precision(None, untrained("medusa", bf16_target), bf16_target)
    check_states_precision("fp32", untrained("draft_model", bf16_target), bf16_target)


def test_asking_a_cpu_for_fsdp_is_refused(
    python: str, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    code, _, errors = launch(python, "fsdp2", run_words(base, tmp_path / "run"), "--num_processes", "1", script=False)
    assert code != 0
    assert "start with recipes/launch/cpu.yaml" in errors


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7", "data.tokens_per_micro_batch divides a batch"),
        ("ACCELERATE_DYNAMO_BACKEND", "x", "accelerate does not start .*ACCELERATE_"),
    ],
)
def test_what_a_launcher_must_not_set_is_refused(
    name: str, value: str, told: str, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate reads it from the environment: the first would silently divide each gradient by seven."""
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        make_accelerator(make_config("medusa", base, tmp_path, run=RUN))
