"""Conversations stored as they are: off-policy, for a user who insists on text that the target did not write."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from draftsmith.data.answers.prepare import check_same_answers, has_answers, keep_date
from draftsmith.data.answers.summary import show_written
from draftsmith.data.bad_rows import BadRow, BadRows
from draftsmith.data.processes import locked, rank_and_num_ranks
from draftsmith.data.prompts.conversations import encode_conversation
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_split
from draftsmith.data.prompts.splits import HELD_OUT, write_prompts
from draftsmith.data.samples.folder import PREPARED, shard_parts, write_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.measuring.spans import Markers
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import whole_folder, write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.models.target.identity import identity


def store_conversations(
    target: Target,
    source: str,
    out: Path,
    held_out_share: float = 0.0,
    refuse_surrogates: bool = False,
    max_bad_share: float = 0.0,
) -> None:
    """Write the conversations at `source`, with the spans of their answers, into the folder `out`.

    It writes the files of `prepare`, with "given" as the writer in prepared.json and as the reason that answers end.
    A conversation that the target would never meet in this form is a bad row. Of several processes the first one does
    all of this, and the others nothing. Raises `UserError`, before anything is written, for more than `max_bad_share`
    of them.
    """
    if rank_and_num_ranks()[0] > 0:
        return
    keep_date(target, out)
    bad = BadRows(max_bad_share)
    split = read_split(source, held_out_share, refuse_surrogates, bad)
    prepared = {
        "target": target.name,
        **identity(target),
        "chat": to_json(target.chat),
        "written_by": "given",
        "prompts": source,
        "prompts_hash": prompts_hash(split.train),
        "num_prompts": len(split.train),
        "num_held_out": len(split.held_out),
        "settings": {"held_out_share": held_out_share},
    }
    with locked(out):
        if has_answers(out):
            check_same_answers(out, prepared)
        with whole_folder(out) as hidden:
            write_json(hidden / PREPARED, prepared)
            if split.held_out:
                write_prompts(hidden / HELD_OUT, split.held_out)
            parts = shard_parts(list(enumerate(split.train)))
            bad.rows += write_samples(hidden, parts, partial(given_samples, target, max_bad_share))
            bad.check()
            bad.write(hidden)
    show_written(out, target)


def prompts_hash(prompts: list[Prompt]) -> str:
    """Return 16 hex digits that stand for conversations with their answers."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.messages, prompt.tools, prompt.domain]).encode())
    return digest.hexdigest()[:16]


def given_samples(
    target: Target, max_bad_share: float, part: Sequence[tuple[int, Prompt]]
) -> Iterator[Sample | BadRow]:
    """Yield the sample of each conversation, given with its place among all, or why it gives none.

    Raises `UserError` in place of the latter where no row may be bad.
    """
    markers, bad = Markers.of_target(target), BadRows(max_bad_share)
    for index, prompt in part:
        try:
            token_ids, answers = encode_conversation(prompt, target)
        except UserError as error:
            bad.add(prompt.where, error)
            continue
        spans = []
        for start, end in answers:
            label = markers.open_label(token_ids[:start], target.eos_token_ids)
            spans += markers.spans(token_ids[:end], start, label)
        # nobody knows how the text was drawn: it is taken as drawn from the plain distribution
        yield Sample(token_ids, spans, "given", 1.0, 1.0, 0, index, prompt.domain)
    yield from bad.rows
