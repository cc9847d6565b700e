"""The folder of samples that `prepare` writes.

It holds prepared.json, which says what wrote the samples; shards, samples-00000.arrow and so on, in Arrow's columns;
and index.json with the checksum of each shard. index.json is written last: without it the samples are unfinished. An
older draftsmith wrote samples.jsonl, one sample a line, with a checksum beside it; it is read, too.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, TypeVar

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from draftsmith.data.bad_rows import BadRow
from draftsmith.data.parallel import on_all_cores
from draftsmith.data.progress import progress_bar
from draftsmith.data.samples.lines import CHECKSUM, LINES, read_lines_of
from draftsmith.data.samples.sample import Sample, loss_mask
from draftsmith.data.samples.samples import SCHEMA, Samples, joined_samples, pieces
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.files import file_hash, write_json, writing
from draftsmith.models.storage.reading import read_json, read_typed
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.models.target.target import ChatSettings, Target

PREPARED, INDEX = "prepared.json", "index.json"
WRITERS = ("target", "target_fingerprint", "written_by")  # keys of prepared.json without which nobody wrote the samples
AGREEMENT = 0.9  # the target that wrote greedy text finds at least this share of its tokens likeliest, despite rounding
CHECKED_SAMPLES = 8
SHARD_INPUTS = 1 << 12  # prompts whose samples are one shard: enough of them for all cores
HASH_THREADS = 8  # hashing lets go of Python's lock
REPAIR = "remove {}, and the same `draftsmith prepare` writes the samples anew"

T = TypeVar("T")


# --- what stands in the folder


@dataclass
class Index:
    """The content of index.json."""

    sha256: Annotated[list[str], Field(min_length=1)]  # of each shard, in their order


def shard_file(number: int) -> str:
    """Return the name of a shard's file."""
    return f"samples-{number:05d}.arrow"


def is_written(folder: Path) -> bool:
    """Return whether all samples of a folder are there."""
    return (folder / INDEX).is_file() or (folder / LINES).is_file()


def data_hash(folder: Path) -> str:
    """Return 16 hex digits that stand for the samples of a folder."""
    return file_hash(folder / (INDEX if (folder / INDEX).is_file() else LINES))[:16]


# --- writing


def shard_parts(inputs: Sequence[T]) -> list[Sequence[T]]:
    """Return inputs, such as prompts, in parts that become a shard each."""
    return [inputs[start : start + SHARD_INPUTS] for start in range(0, len(inputs), SHARD_INPUTS)]


def write_samples(folder: Path, parts: Sequence[T], read: Callable[[T], Iterable[Sample | BadRow]]) -> list[BadRow]:
    """Write the samples that `read` gives of each part into a shard of its own, and return the bad rows.

    All cores share the parts. Whoever calls it gives a `whole_folder`, and sees to it that prepared.json stands there.
    """
    bad: list[BadRow] = []
    with progress_bar(visible=len(parts) > 1) as progress:
        task = progress.add_task("writing samples", total=len(parts), detail="")
        index = Index([])
        for sha256, rows in on_all_cores(partial(_write_shard, folder, read), list(enumerate(parts))):
            index.sha256.append(sha256)
            bad += rows
            progress.update(task, advance=1)
    write_json(folder / INDEX, to_json(index))
    return bad


def _write_shard(
    folder: Path, read: Callable[[T], Iterable[Sample | BadRow]], part: tuple[int, T]
) -> tuple[str, list[BadRow]]:
    """Write the samples of a part, given with its number, and return the checksum of its shard, and the bad rows."""
    path, bad = folder / shard_file(part[0]), []

    def samples() -> Iterator[Sample]:
        for row in read(part[1]):
            if isinstance(row, Sample):
                yield row
            else:
                bad.append(row)

    with writing(path):
        with open(path, "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for piece in pieces(samples()):
                writer.write_batch(piece)
        return file_hash(path), bad


# --- reading


def read_samples(folder: Path, drop_cut: bool = False) -> Samples:
    """Return all samples of a folder that `prepare` wrote; `drop_cut` leaves out those that the length limit cut.

    Raises `UserError` for a folder without samples, for files that were changed since they were written, for what is no
    sample, and where all samples are left out.
    """
    if folder.is_file():
        raise UserError(
            f"{folder} is a file: give the folder that `draftsmith prepare --prompts {quote(str(folder))} --out FOLDER`"
            " writes"
        )
    if not is_written(folder) or not (folder / PREPARED).is_file():
        state = "unfinished samples" if (folder / PREPARED).is_file() else "no prepared samples"
        raise UserError(f"{folder} holds {state}: run `draftsmith prepare --out {quote(str(folder))}` first")
    file = INDEX if (folder / INDEX).is_file() else LINES
    try:
        samples = _read_shards(folder) if file == INDEX else joined_samples([read_lines_of(folder)], str(folder))
    except UserError as error:
        raise UserError(f"{error}: {REPAIR.format(file)}") from None
    if drop_cut and not len(whole := samples.select(samples.column("finish_reason") != "length")):
        raise UserError(f"all {len(samples)} samples in {folder} were cut: raise --max-new-tokens, or keep cut ones")
    return whole if drop_cut else samples


def _read_shards(folder: Path) -> Samples:
    index = read_typed(Index, folder / INDEX)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        tables = pool.map(partial(_read_shard, folder), itertools.count(), index.sha256)
        return joined_samples(tables, str(folder))


def _read_shard(folder: Path, number: int, sha256: str) -> pa.Table:
    """Return a shard, mapped into memory. Raises `UserError` where it is not as it was written."""
    path = folder / shard_file(number)
    try:
        if file_hash(path) != sha256:
            raise UserError(f"{path} was changed since `draftsmith prepare` wrote it")
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}") from None


def has_checksum(folder: Path) -> bool:
    """Return whether it is known that the samples are as they were written; an older draftsmith kept no checksum."""
    return (folder / INDEX).is_file() or (folder / CHECKSUM).is_file()


# --- who wrote them


def read_prepared(folder: Path) -> dict[str, Any]:
    """Return the content of prepared.json: what wrote the samples, with which settings."""
    content = read_json(folder / PREPARED)
    if not isinstance(content, dict) or not all(isinstance(content.get(key, 0), str | None) for key in WRITERS):
        raise UserError(f"{folder / PREPARED} does not say what wrote the samples: prepare them again")
    return content


def read_chat(folder: Path) -> ChatSettings:
    """Return the settings that the chat template was rendered with. An older draftsmith gave it none."""
    try:
        return from_json(ChatSettings, read_prepared(folder).get("chat", {}))
    except UserError as error:
        raise UserError(f"{folder / PREPARED}: {error}: prepare the samples again") from None


def check_same_target(folder: Path, target: Target) -> None:
    """Raise `UserError` for samples that another target wrote."""
    prepared = read_prepared(folder)
    if prepared["target_fingerprint"] is None:  # written by a server, whose weights were not seen
        samples = read_samples(folder)
        share = agreement(greedy_samples(samples.select(~samples.has_images)), partial(likeliest, target))
        if share < AGREEMENT:
            raise UserError(
                f"{target.name} would write {share:.0%} of the greedy tokens in {folder}, which {prepared['target']} "
                f"wrote behind an endpoint; the same target writes {AGREEMENT:.0%} or more: give the target that was "
                "served, or prepare again"
            )
    elif prepared["target_fingerprint"] != target.fingerprint():
        raise UserError(
            f"the samples in {folder} were written by {prepared['target']} "
            f"({prepared['target_fingerprint']}), not by {target.name} ({target.fingerprint()}): prepare them again"
        )


def likeliest(target: Target, sample: Sample) -> Tensor:
    """Return the token that the target finds likeliest after each token of a sample without images, [T]."""
    row = torch.tensor([sample.token_ids], device=target.device)
    features = target.features(Batch(row, torch.ones_like(row, dtype=torch.bool)))
    return target.logits(features.last_hidden[0]).argmax(-1).cpu()


def greedy_samples(samples: Samples) -> list[Sample]:
    """Return a few samples that the target wrote greedily, as far as there are any."""
    greedy = (samples.column("temperature") == 0) & (samples.column("finish_reason") != "given")
    return [samples[int(index)] for index in greedy.nonzero()[0][:CHECKED_SAMPLES]]


def agreement(greedy: list[Sample], likeliest: Callable[[Sample], Tensor]) -> float:
    """Return the share of the written tokens of greedy samples that are the likeliest; 1 where there are no samples."""
    if not greedy:
        return 1.0
    matches = []
    for sample in greedy:
        match = likeliest(sample)[:-1] == torch.tensor(sample.token_ids[1:])
        matches.append(match[loss_mask(sample)[1:]].float())
    return float(torch.cat(matches).mean())
