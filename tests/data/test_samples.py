"""Samples in columns are the samples that were written: to the token, in both forms, and nothing damaged passes.

A run on the lines of an older draftsmith trains the same batches as one on columns.
"""

import json
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from draftsmith.data.parallel import on_all_cores
from draftsmith.data.samples import folder as folder_module
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import INDEX, PREPARED, data_hash, read_samples, shard_file, write_samples
from draftsmith.data.samples.lines import LINES
from draftsmith.data.samples.sample import Sample, loss_mask
from draftsmith.data.samples.samples import SCHEMA, Samples, held_out_samples, pieces
from draftsmith.inference.measuring.spans import Span
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import file_hash
from draftsmith.recipes.cli.main import main

NUM_SAMPLES = 70


def some_samples() -> list[Sample]:
    """Samples of all lengths: without a span, with one, with two that touch each other, and with an empty one."""
    chance = random.Random(0)
    samples = []
    for index in range(NUM_SAMPLES):
        length = chance.randrange(1, 30)
        bounds = sorted(chance.choices(range(length + 1), k=2 * (index % 3)))
        spans = [Span(*pair, "thinking") for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        if index % 7 == 0:
            spans = [Span(length // 3, length // 2), Span(length // 2, length)]
        ids = [chance.randrange(2**31) for _ in range(length)]
        reason = ("length", "eos", "given")[index % 3]
        samples.append(Sample(ids, spans, reason, 0.5, 0.9, 20, index // 2, f"döma{index % 4}", index % 5))
    return samples


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The samples in shards of 16, written by several processes in pieces of 5."""
    monkeypatch.setattr(folder_module, "SHARD_INPUTS", 16)
    monkeypatch.setattr("draftsmith.data.samples.samples.ROWS", 5)
    folder = tmp_path / "samples"
    folder.mkdir()
    write_samples(folder, folder_module.shard_parts(some_samples()), iter)
    (folder / PREPARED).write_text("{}")
    return folder


def convert(folder: Path, out: Path) -> Path:
    assert main(["convert", "--samples", str(folder), "--out", str(out)]) == 0
    return out


def test_what_is_written_is_read(folder: Path) -> None:
    assert len(list(folder.glob("*.arrow"))) == 5
    samples = read_samples(folder)
    assert list(samples) == some_samples()
    whole = read_samples(folder, drop_cut=True)
    assert list(whole) == [sample for sample in some_samples() if sample.finish_reason != "length"]


@pytest.mark.parametrize("drop_cut", [False, True])
def test_columns_are_those_of_the_samples(drop_cut: bool, folder: Path) -> None:
    """Each number of a column against the sample itself, also where some of the rows are left out."""
    columns = read_samples(folder, drop_cut)
    samples = [sample for sample in some_samples() if not drop_cut or sample.finish_reason != "length"]
    assert columns.lengths.tolist() == [len(sample.token_ids) for sample in samples]
    assert columns.largest.tolist() == [max(sample.token_ids) for sample in samples]
    assert columns.at(3).tolist() == [sample.token_ids[:4][-1] for sample in samples]
    assert columns.prompts.tolist() == [sample.prompt_index for sample in samples]
    assert columns.column("domain").tolist() == [sample.domain for sample in samples]
    for first, end in ((0, 1 << 30), (1, 7)):
        masks = [loss_mask(sample)[first:end] for sample in samples]
        assert columns.num_generated(first, end).tolist() == [int(mask.sum()) for mask in masks]
    for index, sample in enumerate(samples):
        assert columns.token_ids(index).tolist() == sample.token_ids
        assert columns.spans(index) == [(span.start, span.end) for span in sample.spans]


def test_tokens_stay_on_the_disk(folder: Path) -> None:
    """What a process holds of a million samples are their lengths and spans: token ids are views of mapped files."""
    before = pa.total_allocated_bytes()
    samples = read_samples(folder)
    assert pa.total_allocated_bytes() == before
    assert not samples.token_ids(3).flags.owndata


def test_shards_do_not_depend_on_the_number_of_processes(folder: Path) -> None:
    """The hash that a run keeps of its samples is that of their shards."""
    parts = enumerate(folder_module.shard_parts(some_samples()))
    alone = [folder_module._write_shard(folder, iter, part)[0] for part in parts]
    assert alone == json.loads((folder / INDEX).read_text())["sha256"]
    assert data_hash(folder) == file_hash(folder / INDEX)[:16]


def test_lines_go_in_and_come_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order and with nothing lost, however many processes share the lines."""
    monkeypatch.setattr("draftsmith.data.samples.lines.PART_LINES", 16)
    lines = convert(folder, tmp_path / "lines")
    assert {path.name for path in lines.iterdir()} == {PREPARED, LINES, f"{LINES}.sha256"}
    assert len((lines / LINES).read_text().splitlines()) == NUM_SAMPLES
    assert list(read_samples(lines)) == some_samples()
    back = convert(lines, tmp_path / "back")
    assert (back / INDEX).read_bytes() == (folder / INDEX).read_bytes()


def batches_hash(samples: Samples) -> str:
    """Return the hash of what twenty steps on the samples read."""
    digest = sha256()
    plan = BatchPlan(samples, 4, 20, 100, seed=3, held_out=held_out_samples(samples, 1))
    for step in range(20):
        for rows in plan.micro_batches(step, 0, 1):
            batch = plan.collate(rows)
            digest.update(batch.token_ids.numpy().tobytes() + batch.loss_mask.numpy().tobytes())
    return digest.hexdigest()[:16]


def test_old_folders_train_the_same_batches(folder: Path, tmp_path: Path) -> None:
    """In the same order, where samples are left out and held out, too: a run of an older draftsmith goes on."""
    lines = convert(folder, tmp_path / "lines")
    for drop_cut, expected in (
        (False, "c48ed35e68407ace"),
        (True, "071915d9350d8bc0"),
    ):  # found with commit 89e0757, which knew lines alone
        for form in (folder, lines):
            assert batches_hash(read_samples(form, drop_cut)) == expected


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda folder: flip(folder / shard_file(2)), "samples-00002.arrow was changed since"),
    "a cut file": (
        lambda folder: (folder / shard_file(1)).write_bytes((folder / shard_file(1)).read_bytes()[:-8]),
        "samples-00001.arrow was changed since",
    ),
    "a missing shard": (lambda folder: (folder / shard_file(4)).unlink(), "samples-00004.arrow cannot be read"),
    "swapped shards": (
        lambda folder: shutil.copy(folder / shard_file(0), folder / shard_file(1)),
        "samples-00001.arrow was changed since",
    ),
    "no shards": (lambda folder: (folder / INDEX).write_text('{"sha256": []}'), "index.json: sha256"),
    "no JSON": (lambda folder: (folder / INDEX).write_text("{"), "index.json is not JSON"),
    "no index": (lambda folder: (folder / INDEX).unlink(), "holds unfinished samples"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(damage: str, folder: Path) -> None:
    harm, message = DAMAGES[damage]
    harm(folder)
    with pytest.raises(UserError, match=message):
        read_samples(folder)


def forged(folder: Path, table: pa.Table) -> Path:
    """Write a table as the only shard, with a checksum that is right."""
    with pa.OSFile(str(folder / shard_file(0)), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    (folder / INDEX).write_text(json.dumps({"sha256": [file_hash(folder / shard_file(0))]}))
    return folder


@pytest.mark.parametrize("spans", [[(4, 2)], [(-2, 3)], [(1, 9)], [(1, 4), (3, 5)], [(3, 5), (1, 3)], [(1, 2), (0, 1)]])
def test_forged_spans_are_refused(spans: list[tuple[int, int]], folder: Path) -> None:
    """A checksum can be right and the samples wrong: numpy would train on other tokens without a word."""
    sound = Sample([1] * 6, [Span(1, 3), Span(3, 6)])
    for samples in ([Sample([1] * 6, [Span(*span) for span in spans]), sound], [sound, Sample([], [])]):
        with pytest.raises(UserError, match="spans overlap, are out of order, or reach beyond their tokens"):
            read_samples(forged(folder, pa.Table.from_batches(list(pieces(samples)))))
    assert len(read_samples(forged(folder, pa.Table.from_batches(list(pieces([sound])))))) == 1


def test_forged_columns_are_refused(folder: Path) -> None:
    table = pa.Table.from_batches(list(pieces([Sample([1], [])])))
    nothing = pa.array([None], pa.int32())
    for other in (
        table.drop_columns(["domain"]),
        table.set_column(6, SCHEMA.field("prompt_index"), nothing),
        table.slice(0, 0),
    ):
        with pytest.raises(UserError, match="is damaged"):
            read_samples(forged(folder, other))


def test_a_new_folder_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What lies in a folder would be mixed with what is written."""
    assert main(["convert", "--samples", str(folder), "--out", str(folder)]) == 2
    assert "is there already: give a new folder" in capsys.readouterr().err
    assert list(read_samples(folder)) == some_samples()


def test_processes_keep_the_order_and_tell_the_first_mistake() -> None:
    def squared(number: int) -> int:
        if number in (5, 7):
            raise UserError(f"{number} is not squared")
        return number**2

    assert list(on_all_cores(squared, range(5))) == [0, 1, 4, 9, 16]
    assert not list(on_all_cores(squared, []))
    with pytest.raises(UserError, match="^5 is not squared$"):
        list(on_all_cores(squared, range(9)))


def test_a_sample_beyond_the_last_ends_a_walk() -> None:
    samples = Samples.of(some_samples())
    with pytest.raises(IndexError):
        samples[NUM_SAMPLES]
    assert np.array_equal(samples.token_ids(NUM_SAMPLES - 1), samples[-1].token_ids)
