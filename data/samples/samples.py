"""Training text as the target wrote it: token ids kept as sampled, one JSON object a line.

A folder of samples holds samples.jsonl and prepared.json, which says what wrote them. Its loss mask is not stored: a
sample is trained on in its `spans`, which the target generated. The rest, a prompt or the user's next turn, is read and
not learned.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.target.target import Target

SAMPLES, PREPARED = "samples.jsonl", "prepared.json"
AGREEMENT = 0.9  # the target that wrote greedy text finds at least this share of its tokens likeliest, despite rounding
CHECKED_SAMPLES = 8


class Span(NamedTuple):
    """A stretch of tokens, from start to end - 1, which the target generated."""

    start: int
    end: int
    label: str = "answer"  # or "thinking", "tool_call"


@dataclass
class Sample:
    """A text that the target read and wrote, token by token as it stood before it."""

    token_ids: list[int]
    spans: list[Span]  # ascending, without overlap
    finish_reason: str = "length"  # the last answer was cut; or "eos"; or "given": the target did not write it
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    prompt_index: int = 0  # place among the prompts
    domain: str = ""  # kind of traffic, as the prompt has it

    def generated(self) -> list[int]:
        """Return the tokens that the target generated."""
        return [token for span in self.spans for token in self.token_ids[span.start : span.end]]


def loss_mask(sample: Sample) -> Tensor:
    """Return a mask [T], true where the target generated."""
    mask = torch.zeros(len(sample.token_ids), dtype=torch.bool)
    for span in sample.spans:
        mask[span.start : span.end] = True
    return mask


def sample_line(sample: Sample) -> str:
    """Return the line of samples.jsonl that holds a sample."""
    return json.dumps(vars(sample), separators=(",", ":")) + "\n"


def read_samples(folder: Path, drop_cut: bool = False) -> list[Sample]:
    """Return all samples of a folder that `prepare` wrote; `drop_cut` leaves out those that the length limit cut.

    Raises `UserError` for a folder without samples, for a damaged line, and where all samples are left out.
    """
    if folder.is_file():
        raise UserError(
            f"{folder} is a file: give the folder that `draftsmith prepare --prompts {folder} --out FOLDER` writes"
        )
    if not (folder / SAMPLES).is_file() or not (folder / PREPARED).is_file():
        state = "unfinished samples" if (folder / PREPARED).is_file() else "no prepared samples"
        raise UserError(f"{folder} holds {state}: run `draftsmith prepare --out {folder}` first")
    with open(folder / SAMPLES, "rb") as file:
        samples = [_read_line(line, f"{folder / SAMPLES} line {number}") for number, line in enumerate(file, 1)]
    kept = [sample for sample in samples if not (drop_cut and sample.finish_reason == "length")]
    if not kept:
        raise UserError(f"all {len(samples)} samples in {folder} were cut: raise --max-new-tokens, or keep cut ones")
    return kept


def _read_line(line: bytes, where: str) -> Sample:
    try:
        fields = json.loads(line)
        return Sample(**{**fields, "spans": [Span(*span) for span in fields["spans"]]})
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{where} is damaged: remove the file, and the same `draftsmith prepare` writes it anew"
        ) from None


def read_prepared(folder: Path) -> dict[str, Any]:
    """Return the content of prepared.json: what wrote the samples, with which settings."""
    return json.loads((folder / PREPARED).read_text())


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
    return hashlib.sha256((folder / SAMPLES).read_bytes()).hexdigest()[:16]
