"""Samples in columns, as Arrow has them: a million samples of a thousand tokens are four gigabytes that all processes
share through the page cache, and a start of training reads numbers of them, not lists.

S samples, N spans of all of them, T tokens of one.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from hashlib import sha256
from heapq import nsmallest
from itertools import islice

import numpy as np
import pyarrow as pa

from draftsmith.data.samples.sample import Sample
from draftsmith.inference.measuring.spans import Span
from draftsmith.models.errors import UserError, first_line

HELD_OUT = 32  # one prompt in so many, at most, is kept out of training
LONGEST = (1 << 31) - 1  # tokens of a sample
ROWS = 1024  # samples of a piece, which are lists in memory while it is made
SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("label", pa.string())])
SCHEMA = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(SPAN)),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("prompt_index", pa.int32()),
        ("domain", pa.string()),
        ("unanswered_turns", pa.int32()),
        ("images", pa.list_(pa.string())),
        ("sent_ids", pa.list_(pa.int32())),
    ]
)  # the fields of `Sample`
OLDER_SCHEMA = pa.schema(list(SCHEMA)[:-2])  # of an older draftsmith, which had no images


class Samples:
    """Samples in columns. The token ids stay where they are, on the disk or in memory, until a sample is asked for."""

    def __init__(self, table: pa.Table, rows: np.ndarray | None = None) -> None:
        """`table` has the columns of `SCHEMA`; `rows` [S]: those of its rows that are the samples, None: all."""
        self._table = table
        self.rows = np.arange(len(table)) if rows is None else rows
        lists, spans = table["token_ids"].chunks, table["spans"].chunks
        self._ids = [part.values.to_numpy() for part in lists]
        self._edges = [part.offsets.to_numpy() for part in lists]  # where each sample of a part begins, and its end
        self._part = self._chosen([np.full(len(part), number) for number, part in enumerate(lists)])
        self._first = self._chosen([edges[:-1] for edges in self._edges])
        self.lengths = self._chosen([np.diff(edges) for edges in self._edges]).astype(np.int64)  # [S], in tokens
        self.span_starts = np.concatenate([part.values.field("start").to_numpy() for part in spans])  # [N]
        self.span_ends = np.concatenate([part.values.field("end").to_numpy() for part in spans])  # [N]
        numbers = np.concatenate([np.diff(part.offsets.to_numpy()) for part in spans])
        self.num_spans = numbers[self.rows]  # [S]
        self.first_spans = (np.cumsum(numbers) - numbers)[self.rows]  # [S], places in the two above
        self.prompts = table["prompt_index"].to_numpy()[self.rows]  # [S], places among the prompts

    @classmethod
    def of(cls, samples: list[Sample]) -> "Samples":
        """Return the columns of samples in memory."""
        return cls(pa.Table.from_batches(list(pieces(samples))))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self._table.slice(int(self.rows[index]), 1).to_pylist()[0]
        return Sample(**{**row, "spans": [Span(**span) for span in row["spans"]]})

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def select(self, chosen: np.ndarray) -> "Samples":
        """Return those samples of which a mask [S] is true."""
        return Samples(self._table, self.rows[chosen])

    def column(self, name: str) -> np.ndarray:
        """Return a field of all samples, [S]: numbers, or texts as objects."""
        return self._table[name].to_numpy()[self.rows]

    def token_ids(self, index: int) -> np.ndarray:
        """Return the token ids of a sample, [T] int32, without a copy."""
        first = self._first[index]
        return self._ids[self._part[index]][first : first + self.lengths[index]]

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Return the stretches [start, end) of a sample that the target generated."""
        first = self.first_spans[index]
        inside = slice(first, first + self.num_spans[index])
        return list(zip(self.span_starts[inside].tolist(), self.span_ends[inside].tolist(), strict=True))

    def num_generated(self, first: int = 0, end: int = LONGEST) -> np.ndarray:
        """Return how many tokens of each sample the target generated among its tokens [first, end), [S] int64."""
        inside = np.minimum(self.span_ends, end).astype(np.int64) - np.maximum(self.span_starts, first)
        total = np.concatenate([[0], np.cumsum(inside.clip(min=0))])
        return total[self.first_spans + self.num_spans] - total[self.first_spans]

    @cached_property
    def largest(self) -> np.ndarray:
        """The largest token id of each sample, [S] uint32, in which a negative one would be very large."""
        parts = zip(self._ids, self._edges, strict=True)
        return self._chosen([np.maximum.reduceat(ids.view(np.uint32), edges[:-1]) for ids, edges in parts])

    @cached_property
    def has_images(self) -> np.ndarray:
        """Whether each sample holds images, [S] bool."""
        lengths = [np.diff(part.offsets.to_numpy()) for part in self._table["images"].chunks]
        return self._chosen(lengths) > 0

    def at(self, place: int) -> np.ndarray:
        """Return the token at a place of each sample, [S]; of one that ends before it, the last."""
        parts = zip(self._ids, self._edges, strict=True)
        return self._chosen([ids[np.minimum(edges[:-1] + place, edges[1:] - 1)] for ids, edges in parts])

    def _chosen(self, parts: list[np.ndarray]) -> np.ndarray:
        """Return what stands in `parts` for the rows of the table, for the samples."""
        return np.concatenate(parts)[self.rows]


def pieces(samples: Iterable[Sample]) -> Iterator[pa.RecordBatch]:
    """Yield samples in columns, up to `ROWS` at a time."""
    samples = iter(samples)
    while rows := [
        {**vars(sample), "spans": [span._asdict() for span in sample.spans]} for sample in islice(samples, ROWS)
    ]:
        yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def joined_samples(tables: Iterable[pa.Table], where: str) -> Samples:
    """Return the samples of tables that anybody may have written. Raises `UserError` where they hold none."""
    reason = "it holds no samples"
    try:
        table = pa.concat_tables(map(with_images, tables))
        table.validate(full=True)
        if not table.schema.equals(SCHEMA) or any(column.null_count for column in table.columns):
            reason = "its columns are not those of samples"
        elif len(table):
            samples = Samples(table)
            if are_sound(samples):
                return samples
            reason = "its spans overlap, are out of order, or reach beyond their tokens"
    except pa.ArrowException as error:
        reason = first_line(error)
    raise UserError(f"{where} is damaged ({reason})")


def with_images(table: pa.Table) -> pa.Table:
    """Return a table of samples that an older draftsmith wrote with the columns that are empty without images."""
    if not table.schema.equals(OLDER_SCHEMA):
        return table
    for column in list(SCHEMA)[-2:]:
        table = table.append_column(column, pa.array([[]] * len(table), column.type))
    return table


def are_sound(samples: Samples) -> bool:
    """Return whether all samples of a table hold tokens, and their spans are in order and within them."""
    before = np.roll(samples.span_ends, 1)  # [N], the end of the span before
    before[samples.first_spans[samples.num_spans > 0]] = 0
    ends = np.repeat(samples.lengths, samples.num_spans)
    starts_behind = (before <= samples.span_starts) & (samples.span_starts <= samples.span_ends)
    return bool(samples.lengths.all() and (starts_behind & (samples.span_ends <= ends)).all())


def held_out_samples(samples: Samples, num_prompts: int) -> frozenset[int]:
    """Return the places of the samples of so many prompts, or of one prompt in 32 where there are fewer.

    All samples of a prompt go together, since they begin alike. The choice is the same for each run on these samples.
    """
    prompts = np.unique(samples.prompts).tolist()
    number = min(num_prompts, len(prompts) // HELD_OUT)
    chosen = nsmallest(number, prompts, key=lambda index: sha256(b"%d" % index).digest())
    return frozenset(np.flatnonzero(np.isin(samples.prompts, chosen)).tolist())
