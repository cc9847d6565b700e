"""Stored features: the same training as with the target beside the drafter, and nothing damaged or foreign read."""

import itertools
import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from disk_faults import largest_file
from feature_stores import make_store, source_of
from safetensors.torch import save_file

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.features import stored as features
from draftsmith.data.features import writer as feature_writer
from draftsmith.data.features.stored import HEADER, StoredFeatures, checksum, decode, encode, read_header
from draftsmith.data.features.writer import batches_of, check_disk, write_shards
from draftsmith.data.prefetch import prefetched
from draftsmith.data.processes import locked
from draftsmith.data.samples.batches import BatchPlan, MicroBatch
from draftsmith.data.samples.folder import read_samples
from draftsmith.data.samples.samples import Samples
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.target.target import Features
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import TrainConfig, loop, train
from draftsmith.train.config import resolve
from draftsmith.train.run_folder.tracking import read_metrics


@pytest.fixture(scope="module")
def samples(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 24 samples."""
    folder = tmp_path_factory.mktemp("data")
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"strike {'the iron ' * (i // 2 % 4)}{i}\n" for i in range(24)))
    prepare(tiny_target, str(prompts), folder / "samples", PrepareSettings(max_new_tokens=24))
    return folder / "samples"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SHARD_BYTES", 50_000)


def make_plan(samples: Samples, max_length: int = 40) -> BatchPlan:
    return BatchPlan(samples, 4, max_length, 200, seed=0)


def write(store: StoredFeatures, target: Target) -> StoredFeatures:
    write_shards(store, store.missing(), source_of(store, target))
    return store


def test_what_is_read_is_what_the_target_computes(samples: Path, tiny_target: Target, tmp_path: Path) -> None:
    """Packed or not, whatever the batches: each sample at its own place, zeros in the padding."""
    plan = make_plan(read_samples(samples))
    store = write(make_store(tmp_path / "store", tiny_target, plan), tiny_target)
    assert len(store.shards) > 2
    for packing, ahead in itertools.product((False, True), repeat=2):
        plan.packing = packing
        for rows in plan.micro_batches(0, 0, 1):
            batch = plan.collate(rows)
            if ahead:
                store.read_ahead(rows, batch, pin_memory=False)
            found, expected = store.read(rows, batch, tiny_target), tiny_target.features(batch, (1, 2))
            assert found.layers is not None
            assert expected.layers is not None
            real = torch.arange(batch.token_ids.shape[1]) < torch.tensor(
                [[sum(plan.lengths[index] for index in row)] for row in rows]
            )
            torch.testing.assert_close(found.last_hidden[real], expected.last_hidden[real])
            torch.testing.assert_close(found.layers[real], expected.layers[real])
            assert not found.last_hidden[~real].any()


def test_widths_of_a_gpu_keep_to_the_size_of_micro_batches(samples: Path, tiny_target: Target, tmp_path: Path) -> None:
    plan = replace(make_plan(read_samples(samples), 100), width_multiple=16)
    store = make_store(tmp_path / "store", tiny_target, plan)
    batches = [plan.collate(rows) for shard in store.shards for rows in batches_of(store, shard)]
    assert max(batch.token_ids.numel() for batch in batches) <= plan.tokens_per_micro_batch


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what a process reads")
def test_a_sample_is_read_without_its_shard(samples: Path, tiny_target: Target, tmp_path: Path) -> None:
    """safetensors read the whole shard for each sample, when the file was not mapped into memory."""
    plan = make_plan(read_samples(samples))
    store = write(make_store(tmp_path / "store", tiny_target, plan), tiny_target)
    rows = plan.micro_batches(0, 0, 1)[0]
    batch = plan.collate(rows)
    store.read(rows, batch, tiny_target)  # opens shards
    before = bytes_read()
    store.read(rows, batch, tiny_target)
    assert bytes_read() - before < store.shards[0].num_tokens * store.contents.bytes_per_token


def bytes_read() -> int:
    """Return how many bytes this process has read from files by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def make_config(
    kind: str, samples: Path, target_dir: Path, run: Path, changes: dict[str, str] | None = None, **data: Any
) -> TrainConfig:
    values = {"target": target_dir, "run.dir": run, "run.steps": 8, "run.log_every": 1, "run.device": "cpu"}
    values |= {"data.samples": samples, "data.batch_size": 8, "data.max_length": 60, "data.tokens_per_micro_batch": 200}
    values["optimizer.learning_rate"] = 1e-3  # eight steps show that the loss falls
    values |= {f"data.{key}": value for key, value in data.items()} | (changes or {})
    recipe = RECIPES[kind]()
    if kind == "eagle3":
        recipe.drafter.draft_vocab_size = 64
    return resolve(recipe, None, [f"{key}={value}" for key, value in values.items()])


def loss_curve(config: TrainConfig) -> list[float]:
    return [line["loss"] for line in read_metrics(train(config)) if "loss" in line]


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_stored_and_online_training_are_the_same(
    kind: str, samples: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One loss curve, and once the features are stored the target's layers are never loaded."""
    online = loss_curve(make_config(kind, samples, tiny_target_dir, tmp_path / "online"))
    stored = {"features": "stored", "features_dtype": "float32", "features_dir": tmp_path / "store"}
    first = loss_curve(make_config(kind, samples, tiny_target_dir, tmp_path / "first", **stored))
    monkeypatch.delattr(Target, "from_pretrained")
    monkeypatch.delattr(Target, "features")
    second = loss_curve(make_config(kind, samples, tiny_target_dir, tmp_path / "second", packing=True, **stored))
    assert len(online) == 8
    assert online[-1] < online[0]
    assert first == pytest.approx(online, abs=1e-5)
    assert second == pytest.approx(online, abs=1e-5)


def test_drafters_share_a_store_of_the_layers_of_all(
    samples: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads its own layers of it, and learns from them what it learns from the target itself."""
    layers = {"eagle3": {"drafter.layer_ids": "[2]"}, "medusa": {}}
    online = {
        kind: loss_curve(make_config(kind, samples, tiny_target_dir, tmp_path / kind, changes=changes))
        for kind, changes in layers.items()
    }
    stored = {"features": "stored", "features_dtype": "float32", "features_layers": "[1, 2]"}
    for kind, changes in layers.items():
        config = make_config(kind, samples, tiny_target_dir, tmp_path / f"{kind}-stored", changes=changes, **stored)
        assert loss_curve(config) == pytest.approx(online[kind], abs=1e-5)
        monkeypatch.delattr(Target, "features", raising=False)  # the first one has stored them
    (store,) = samples.glob("features-*")
    assert store.name == "features-1-2-float32"
    config = make_config("eagle3", samples, tiny_target_dir, tmp_path / "less", **{**stored, "features_layers": "[1]"})
    with pytest.raises(UserError, match=r"features_layers=\[1\] lacks .*, which the drafter reads: add them"):
        train(config)


def test_training_reads_ahead(
    samples: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all is read from the disk in a thread, on a CPU in its place: that gives the same losses."""
    stored = {"features": "stored", "features_dir": tmp_path / "store"}
    load, threads = StoredFeatures._load, set()

    def noted(self: StoredFeatures, *args: Any) -> Any:
        threads.add(threading.current_thread().name)
        return load(self, *args)

    monkeypatch.setattr(StoredFeatures, "_load", noted)
    at_once = loss_curve(make_config("medusa", samples, tiny_target_dir, tmp_path / "at_once", **stored))
    assert threads == {threading.main_thread().name}
    threads.clear()
    monkeypatch.setattr(loop, "prefetched", lambda make, steps, num_ahead: prefetched(make, steps, 1))  # as on a GPU
    assert loss_curve(make_config("medusa", samples, tiny_target_dir, tmp_path / "ahead", **stored)) == at_once
    assert threads == {"prefetch_0"}


def test_checksums_are_computed_once(
    samples: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later starts compare size and time of change; a shard that was written to, or all without index.json, again."""
    stored = {"features": "stored", "features_dir": tmp_path / "store"}

    def start(name: str) -> int:
        """How many checksums that took."""
        computed = []
        monkeypatch.setattr(features, "checksum", lambda tensors: computed.append(1) or checksum(tensors))
        train(make_config("medusa", samples, tiny_target_dir, tmp_path / name, **stored))
        return len(computed)

    checksum = features.checksum
    assert start("first") == start("second") == 0
    shards = sorted((tmp_path / "store").glob("shard-*"))
    shards[0].touch()
    assert [start("third"), start("fourth")] == [1, 0]
    status = shards[-1].stat()
    flip_last_bit(shards[-1])
    os.utime(shards[-1], ns=(status.st_atime_ns, status.st_mtime_ns))  # as a failing disk would
    (tmp_path / "store" / "index.json").unlink()
    with pytest.raises(UserError, match=f"{shards[-1].name} is damaged"):
        start("fifth")


def test_a_draft_model_needs_the_layers(samples: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.features=online"):
        train(make_config("draft_model", samples, tiny_target_dir, tmp_path / "run", features="stored"))
    assert not (tmp_path / "run").exists()


def test_ends_are_those_of_the_whole_target(tiny_target: Target, tiny_target_dir: Path) -> None:
    """Embedding, head and sizes, and no other weight but the final norm."""
    ends = Target.head_from_pretrained(tiny_target_dir, tiny_target.fingerprint(), "cpu")
    hidden = torch.randn(3, tiny_target.hidden_size)
    token_ids = torch.arange(5)
    assert torch.equal(ends.logits(hidden), tiny_target.logits(hidden))
    assert torch.equal(ends.embedding(token_ids), tiny_target.embedding(token_ids))
    assert ends.head_fingerprint() == tiny_target.head_fingerprint()
    for size in ("num_layers", "hidden_size", "vocab_size", "context", "eos_token_ids"):
        assert getattr(ends, size) == getattr(tiny_target, size)
    own = 2 * tiny_target.vocab_size * tiny_target.hidden_size + tiny_target.hidden_size
    assert sum(parameter.numel() for parameter in ends.model.parameters()) == own


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 0.0), (torch.bfloat16, 2**-8), (torch.float8_e4m3fn, 2**-4)]
)
def test_codecs_err_by_half_a_unit_at_most(dtype: torch.dtype, error: float) -> None:
    """Relative to each value, by the format's bits of precision; 0 stays 0, outliers of a vector stay finite."""
    states = torch.randn(50, 3, 64) * torch.logspace(-3, 4, 50)[:, None, None]
    states[:, :, 0] *= 100  # as the outlier channels of large models are
    states[0] = 0
    encoded = encode(states, dtype)
    decoded = decode(encoded["hidden"], encoded.get("scales"), torch.float32)
    normal = states.abs() >= states.abs().amax(-1, keepdim=True) * 2**-14  # above fp8's subnormal numbers
    assert ((decoded - states).abs() <= error * states.abs() * (1 + 1e-6))[normal].all()
    assert (decoded[0] == 0).all()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", [truncate, *[flip_a_bit] * 3])
def test_damaged_shards_are_refused_by_name(
    damage: Callable[[Path], None], samples: Path, tiny_target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Any bit, of the header too; removed, the shard is written anew."""
    stored: dict[str, Any] = {"features": "stored", "features_dir": tmp_path / "store", "changes": {"run.steps": "2"}}
    before = loss_curve(make_config("medusa", samples, tiny_target_dir, tmp_path / "before", **stored))
    shard = sorted((tmp_path / "store").glob("shard-*"))[1]
    content = shard.read_bytes()
    damage(shard)
    with pytest.raises(UserError, match=shard.name):
        train(make_config("medusa", samples, tiny_target_dir, tmp_path / "run", **stored))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    shard.unlink()
    assert loss_curve(make_config("medusa", samples, tiny_target_dir, tmp_path / "run", **stored)) == before
    assert shard.read_bytes() == content


def store_other_shapes(path: Path) -> None:
    """Under a header and a checksum that agree with all else, as no accident does."""
    header, tensors = read_header(path), {"hidden": torch.zeros(3)}
    save_file(tensors, path, metadata={HEADER: json.dumps({**header, "checksum": checksum(tensors)})})


def store_no_header(path: Path) -> None:
    save_file({"hidden": torch.zeros(3)}, path, metadata={HEADER: "[]"})


@pytest.mark.parametrize("forge", [store_other_shapes, store_no_header])
def test_forged_shards_are_refused(
    forge: Callable[[Path], None], samples: Path, tiny_target: Target, tmp_path: Path
) -> None:
    """Training would end in the middle of a step, with a traceback."""
    store = make_store(tmp_path, tiny_target, make_plan(read_samples(samples)))
    write(store, tiny_target)
    assert not store.problems(0, 1)
    forge(tmp_path / store.shards[0].file)
    assert store.shards[0].file in store.problems(0, 1)[0]


@pytest.mark.parametrize(
    "change",
    [{"layer_ids": (1, 3)}, {"dtype": "bfloat16"}, {"target_fingerprint": "0" * 16}, {"ends_fingerprint": "0" * 16}],
)
def test_foreign_shards_are_refused(change: dict[str, Any], samples: Path, tiny_target: Target, tmp_path: Path) -> None:
    plan = make_plan(read_samples(samples))
    write(make_store(tmp_path, tiny_target, plan), tiny_target)
    other = make_store(tmp_path, tiny_target, plan, **change)
    assert next(iter(change)) in (other.problem(other.shards[0]) or "")
    assert len(make_store(tmp_path, tiny_target, plan).problems(0, 1)) == 0


def test_features_of_other_samples_are_refused(samples: Path, tiny_target: Target, tmp_path: Path) -> None:
    """One token changed, or a cut elsewhere; a longer cut that cuts nothing is the same."""
    texts = read_samples(samples)
    write(make_store(tmp_path, tiny_target, make_plan(texts, 100)), tiny_target)
    assert not make_store(tmp_path, tiny_target, make_plan(texts, 90)).problems(0, 1)
    changed = list(texts)
    changed[3].token_ids[-1] += 1
    for plan in (make_plan(Samples.of(changed), 100), make_plan(read_samples(samples), 30)):
        other = make_store(tmp_path, tiny_target, plan)
        assert "samples_hash" in (other.problem(other.shards[0]) or "")


def test_ranks_in_step_ask_equally_often(samples: Path, tiny_target: Target, tmp_path: Path) -> None:
    """A target in pieces computes when all ranks do; whoever has no shard to write asks as often as the others."""
    store = make_store(tmp_path, tiny_target, make_plan(read_samples(samples)))
    missing, num_ranks, asked = store.missing(), len(store.shards) + 1, [0] * (len(store.shards) + 1)
    for rank in range(num_ranks):

        def source(rows: MicroBatch, batch: Batch, rank: int = rank) -> Features:
            asked[rank] += 1
            return tiny_target.features(batch, store.contents.layer_ids)

        write_shards(store, missing, source, rank, num_ranks, in_step=True)
    assert not store.missing()
    assert len(set(asked)) == 1
    assert asked[0] > 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_write_what_one_would(num_ranks: int, samples: Path, tiny_target: Target, tmp_path: Path) -> None:
    """Each sample once, whoever stores it; what an interrupted run finished is kept."""
    plan = make_plan(read_samples(samples))
    whole = write(make_store(tmp_path / "whole", tiny_target, plan), tiny_target)
    shared = make_store(tmp_path / "shared", tiny_target, plan)
    (tmp_path / "shared").mkdir()
    kept = tmp_path / "shared" / whole.shards[0].file
    shutil.copy(tmp_path / "whole" / kept.name, kept)
    written = kept.stat().st_mtime_ns
    missing = shared.missing()
    for rank in reversed(range(num_ranks)):
        write_shards(shared, missing, source_of(shared, tiny_target), rank, num_ranks)
    assert not shared.missing()
    assert kept.stat().st_mtime_ns == written
    for shard in whole.shards:
        assert (tmp_path / "shared" / shard.file).read_bytes() == (tmp_path / "whole" / shard.file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [shard.file for shard in whole.shards]


def test_one_run_writes_and_a_full_disk_leaves_no_part(samples: Path, tiny_target: Target, tmp_path: Path) -> None:
    """Two runs may share a folder of features, one after the other; a shard that cannot be written is not there."""
    store = make_store(tmp_path / "features", tiny_target, make_plan(read_samples(samples)))
    with locked(store.folder), pytest.raises(UserError, match="features is being written by process"):
        write_shards(store, store.missing(), source_of(store, tiny_target))
    with largest_file(1000), pytest.raises(UserError, match="cannot write to .*shard-.*: File too large"):
        write_shards(store, store.missing(), source_of(store, tiny_target))
    assert not list(store.folder.iterdir())
    write_shards(store, store.missing(), source_of(store, tiny_target))
    assert not store.missing()


def test_index_says_where_each_sample_is(samples: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    stored = {"features": "stored", "features_dtype": "float8_e4m3fn"}
    loss_curve(make_config("medusa", samples, tiny_target_dir, tmp_path, **stored))
    folder = samples / "features-float8_e4m3fn"
    index = json.loads((folder / "index.json").read_text())
    lengths = [length for shard in index["shards"] for length in shard["lengths"]]
    assert lengths == [min(60, len(sample.token_ids)) for sample in read_samples(samples)]
    assert [shard["file"] for shard in index["shards"]] == sorted(path.name for path in folder.glob("shard-*"))
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_size_is_predicted_and_must_fit(
    dtype: str, samples: Path, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted to the byte but for the headers, and nothing is written where it does not fit."""
    store = make_store(tmp_path / "store", tiny_target, make_plan(read_samples(samples)), dtype=dtype)
    needed = store.contents.bytes_per_token * sum(shard.num_tokens for shard in store.shards)
    monkeypatch.setattr(feature_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match="data.features_dir"):
        check_disk(store)
    assert not (tmp_path / "store").exists()
    monkeypatch.setattr(feature_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    write(store, tiny_target)
    stored = sum((tmp_path / "store" / shard.file).stat().st_size for shard in store.shards)
    assert needed < stored < needed + 2000 * len(store.shards)


def test_broken_hidden_states_are_refused(samples: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    target = Target.from_pretrained(tiny_target_dir, "cpu", torch.float32)
    target.embedding.weight.data.fill_(float("nan"))  # type: ignore[operator]
    with pytest.raises(UserError, match="not finite on sample"):
        write(make_store(tmp_path, target, make_plan(read_samples(samples))), target)
    assert not list(tmp_path.glob("shard-*"))
