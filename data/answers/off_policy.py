"""Conversations stored as they are: off-policy, for a user who insists on text that the target did not write."""

import hashlib
from pathlib import Path

from draftsmith.data.answers.prepare import keep_date, open_folder, show_written
from draftsmith.data.processes import locked
from draftsmith.data.prompts.conversations import encode_conversation
from draftsmith.data.prompts.prompts import read_split
from draftsmith.data.prompts.splits import HELD_OUT, write_prompts
from draftsmith.data.samples.samples import Sample, sample_line, write_samples
from draftsmith.inference.measuring.spans import Markers
from draftsmith.models import Target
from draftsmith.models.target.identity import identity
from draftsmith.models.typed_json import to_json


def store_conversations(
    target: Target, source: str, out: Path, held_out_share: float = 0.0, refuse_surrogates: bool = False
) -> None:
    """Write the conversations at `source`, with the spans of their answers, into the folder `out`.

    It writes the files of `prepare`, with "given" as the writer in prepared.json and as the reason that answers end.
    Raises `UserError`, before anything is written, for a conversation that the target would never meet in this form.
    """
    keep_date(target, out)
    split = read_split(source, held_out_share, refuse_surrogates)
    markers, lines = Markers.of_target(target), []
    for index, prompt in enumerate(split.train):
        token_ids, answers = encode_conversation(prompt, target)
        spans = []
        for start, end in answers:
            label = markers.open_label(token_ids[:start], target.eos_token_ids)
            spans += markers.spans(token_ids[:end], start, label)
        # nobody knows how the text was drawn: it is taken as drawn from the plain distribution
        sample = Sample(token_ids, spans, "given", 1.0, 1.0, 0, index, prompt.domain)
        lines.append(sample_line(sample))
    prepared = {
        "target": target.name,
        **identity(target),
        "chat": to_json(target.chat),
        "written_by": "given",
        "prompts": source,
        "prompts_hash": hashlib.sha256("".join(lines).encode()).hexdigest()[:16],
        "num_prompts": len(lines),
        "num_held_out": len(split.held_out),
        "settings": {"held_out_share": held_out_share},
    }
    with locked(out):
        open_folder(out, prepared)
        if split.held_out:
            write_prompts(out / HELD_OUT, split.held_out)
        write_samples(out, (line.encode() for line in lines))
    show_written(out, target)
