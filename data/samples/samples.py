"""Training text as the target wrote it: token ids kept as sampled, one JSON object a line.

A folder of samples holds samples.jsonl, its checksum, and prepared.json, which says what wrote them. The loss mask is
not stored: a sample is trained on in its `spans`, which the target generated. The rest, a prompt or the user's next
turn, is read and not learned.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from draftsmith.inference.measuring.spans import Index, Span
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.files import file_hash, whole_folder, write_whole
from draftsmith.models.ranges import AboveZero, Natural, NonNegative, checked
from draftsmith.models.reading import read_json, read_json_lines, read_text
from draftsmith.models.target.target import ChatSettings, Target
from draftsmith.models.typed_json import from_json

SAMPLES, PREPARED = "samples.jsonl", "prepared.json"
CHECKSUM = f"{SAMPLES}.sha256"  # in the form of `sha256sum`
WRITERS = ("target", "target_fingerprint", "written_by")  # keys of prepared.json without which nobody wrote the samples
AGREEMENT = 0.9  # the target that wrote greedy text finds at least this share of its tokens likeliest, despite rounding
CHECKED_SAMPLES = 8
HELD_OUT = 32  # one prompt in so many, at most, is kept out of training
REPAIR = "remove the file, and the same `draftsmith prepare` writes it anew"

FinishReason = Literal["length", "eos", "given"]


@dataclass
class Sample:
    """A text that the target read and wrote, token by token as it stood before it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    token_ids: Annotated[list[Index], Field(min_length=1)]
    spans: list[Span]  # ascending, without overlap
    finish_reason: FinishReason = "length"  # the last answer was cut; or "eos"; or "given": the target did not write it
    temperature: NonNegative = 0.0
    top_p: AboveZero = 1.0
    top_k: Natural = 0
    prompt_index: Natural = 0  # place among the prompts
    domain: str = ""  # kind of traffic, as the prompt has it
    unanswered_turns: Natural = 0  # later ones: this answer was cut, the context is full, or a tool's result is missing
    line: int = field(default=0, init=False, compare=False)  # number of its line in samples.jsonl, for messages

    def generated(self) -> list[int]:
        """Return the tokens that the target generated."""
        return [token for span in self.spans for token in self.token_ids[span.start : span.end]]


def loss_mask(sample: Sample) -> Tensor:
    """Return a mask [T], true where the target generated."""
    mask = torch.zeros(len(sample.token_ids), dtype=torch.bool)
    for span in sample.spans:
        mask[span.start : span.end] = True
    return mask


def held_out_samples(samples: list[Sample], num_prompts: int) -> frozenset[int]:
    """Return the places of the samples of so many prompts, or of one prompt in 32 where there are fewer.

    All samples of a prompt go together, since they begin alike. The choice is the same for each run on these samples.
    """
    prompts = sorted({sample.prompt_index for sample in samples}, key=lambda index: sha256(b"%d" % index).digest())
    held_out = set(prompts[: min(num_prompts, len(prompts) // HELD_OUT)])
    return frozenset(place for place, sample in enumerate(samples) if sample.prompt_index in held_out)


def sample_line(sample: Sample) -> str:
    """Return the line of samples.jsonl that holds a sample."""
    fields = {name: value for name, value in vars(sample).items() if name != "line"}
    return json.dumps(fields, separators=(",", ":")) + "\n"


def write_samples(folder: Path, lines: Iterable[bytes]) -> None:
    """Write samples.jsonl whole or not at all; its checksum stands beside it before it appears."""
    with whole_folder(folder) as partial:
        with open(partial / SAMPLES, "wb") as file:
            file.writelines(lines)
        write_whole(partial / CHECKSUM, f"{file_hash(partial / SAMPLES)}  {SAMPLES}\n")


def read_samples(folder: Path, drop_cut: bool = False) -> list[Sample]:
    """Return all samples of a folder that `prepare` wrote; `drop_cut` leaves out those that the length limit cut.

    Raises `UserError` for a folder without samples, for a line that holds no sample, for a file that was changed since
    `prepare` wrote it, and where all samples are left out.
    """
    if folder.is_file():
        raise UserError(
            f"{folder} is a file: give the folder that `draftsmith prepare --prompts {quote(str(folder))} --out FOLDER`"
            " writes"
        )
    path = folder / SAMPLES
    if not path.is_file() or not (folder / PREPARED).is_file():
        state = "unfinished samples" if (folder / PREPARED).is_file() else "no prepared samples"
        raise UserError(f"{folder} holds {state}: run `draftsmith prepare --out {quote(str(folder))}` first")
    try:
        samples = [_sample(content, place) for place, content in read_json_lines(path)]
    except UserError as error:
        raise UserError(f"{error}: {REPAIR}") from None
    if has_checksum(folder) and read_text(folder / CHECKSUM).split()[:1] != [file_hash(path)]:
        raise UserError(
            f"{path} was changed since `draftsmith prepare` wrote it: {REPAIR}; or remove {CHECKSUM} beside it to "
            "train on the changed file"
        )
    kept = [sample for sample in samples if not (drop_cut and sample.finish_reason == "length")]
    if not kept:
        raise UserError(f"all {len(samples)} samples in {folder} were cut: raise --max-new-tokens, or keep cut ones")
    return kept


def has_checksum(folder: Path) -> bool:
    """Return whether it is known that samples.jsonl is as it was written; an older draftsmith kept no checksum."""
    return (folder / CHECKSUM).is_file()


def _sample(content: Any, place: str) -> Sample:
    """Return the sample that a line holds. Raises `UserError` for wrong types and for spans outside of the text."""
    try:
        sample = checked(Sample, content)
    except UserError as error:
        raise UserError(f"{place} is damaged ({error})") from None
    bounds = [0, *(bound for start, end, _ in sample.spans for bound in (start, end)), len(sample.token_ids)]
    if bounds != sorted(bounds):
        raise UserError(f"{place} is damaged (its spans overlap, are out of order, or reach beyond its tokens)")
    sample.line = int(place.rpartition(" ")[2])
    return sample


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
        share = agreement(read_samples(folder), partial(likeliest, target))
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


def likeliest(target: Target, token_ids: list[int]) -> Tensor:
    """Return the token that the target finds likeliest after each token of a text, [T]."""
    row = torch.tensor([token_ids], device=target.device)
    features = target.features(Batch(row, torch.ones_like(row, dtype=torch.bool)))
    return target.logits(features.last_hidden[0]).argmax(-1).cpu()


def agreement(samples: list[Sample], likeliest: Callable[[list[int]], Tensor]) -> float:
    """Return the share of the written tokens of a few greedy samples that are the likeliest; 1 where none is greedy."""
    greedy = [sample for sample in samples if sample.temperature == 0 and sample.finish_reason != "given"]
    if not greedy:
        return 1.0
    matches = []
    for sample in greedy[:CHECKED_SAMPLES]:
        match = likeliest(sample.token_ids)[:-1] == torch.tensor(sample.token_ids[1:])
        matches.append(match[loss_mask(sample)[1:]].float())
    return float(torch.cat(matches).mean())


def data_hash(folder: Path) -> str:
    """Return 16 hex digits that stand for the content of samples.jsonl."""
    return file_hash(folder / SAMPLES)[:16]
