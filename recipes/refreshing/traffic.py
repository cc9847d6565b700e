"""New traffic: read from where it was left, cleaned, and divided into prompts to train on and prompts held out."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.data.bad_rows import BadRows
from draftsmith.data.progress import notice
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.data.prompts.splits import Split, deduplicate, opening_hash, prompt_hash, split_prompts
from draftsmith.inference.measuring.measure import pick_prompts
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.recipes.auto.traffic import (
    FEWEST,
    HELD_OUT_SHARE,
    encode_fitting,
    is_log,
    logged_prompts,
    mask,
    why_left_out,
)
from draftsmith.recipes.bench.server_logs import read_log

# Bits a byte. Random printable characters take 6.6 or more whatever the target is, and text that it hardly knows 5.5.
NOISE_BITS = 6.0
READ_TOKENS = 512  # of a prompt, by which noise is told
ROWS = 16  # of prompts that are read at once
MOST_NOISE = 0.5  # share of a round's prompts; of more, the others are not trusted either
MOST_PROMPTS = 4096  # of a round
MOST_JUDGED = 64  # about so many of them are held out at most, and all of these judge
ANY_SHARE = 1.0  # of rows may give no prompt, such as a last line that is still being written


@dataclass(frozen=True)
class Taken:
    """The part of a source of traffic that was taken: so many prompts from its beginning."""

    num_prompts: int
    first: str  # hash of the first of them: where it is another, the file is another one of the same name


@dataclass(frozen=True)
class TrafficCounts:
    """Counts of what became of the new prompts of a round."""

    num_new: int  # without those that equal others
    num_masked: int = 0  # in which personal data was masked
    num_unfit: int = 0  # left out, such as those with images, or with the marks of a chat template in their text
    num_too_long: int = 0  # left out
    num_noise: int = 0  # left out
    num_training: int = 0
    num_held_out: int = 0
    domains: dict[str, int] | None = None  # prompts by domain, of those that are kept; "": without one

    @property
    def is_noise(self) -> bool:
        """Whether so many prompts are noise that the others are not trusted either."""
        num_fitting = self.num_new - self.num_unfit - self.num_too_long
        return num_fitting >= 2 * FEWEST and self.num_noise > MOST_NOISE * num_fitting

    @property
    def text(self) -> str:
        """The counts in words."""
        domains = ", ".join(f"{name or 'no domain'} {number}" for name, number in (self.domains or {}).items())
        parts = [f"{self.num_new} new prompts" + (f" ({domains})" if domains else "")]
        parts += [f"{self.num_training} to train on, {self.num_held_out} held out"] if self.num_training else []
        for number, what in (
            (self.num_masked, "with masked personal data"),
            (self.num_unfit, "unfit and left out"),
            (self.num_too_long, "too long and left out"),
            (self.num_noise, "are noise and left out"),
        ):
            parts += [f"{number} {what}"] if number else []
        return "; ".join(parts)


def read_new(source: str, taken: Taken | None) -> tuple[list[Prompt], Taken | None]:
    """Return the prompts of a source behind those that were taken before, and what is taken then.

    A source whose first prompt is another one is read from its beginning. Raises `UserError` for what holds no prompts.
    """
    prompts = read_traffic(source)
    if not prompts:
        return [], taken
    now = Taken(len(prompts), prompt_hash(prompts[0]))
    goes_on = taken is not None and taken.first == now.first and taken.num_prompts <= now.num_prompts
    return prompts[taken.num_prompts if taken and goes_on else 0 :], now


def read_traffic(source: str) -> list[Prompt]:
    """Return the prompts of any source, or of the log of a vLLM or SGLang. Raises `UserError` where it holds none."""
    if is_log(source):
        return logged_prompts(read_log(Path(source)), source)
    bad = BadRows(ANY_SHARE)
    prompts = read_prompts(source, bad)
    if bad.rows:
        notice(f"{source}: {len(bad.rows)} rows give no prompt and are left out, the first: {bad.rows[0].reason}")
    return prompts


def clean(prompts: list[Prompt], target: Target, longest: int, keeps_personal: bool) -> tuple[Split, TrafficCounts]:
    """Return new prompts divided by their beginnings, so that those that begin alike are on one side; with counts.

    Left out are prompts that equal others, have more than `longest` tokens, or are noise; of many, some are drawn.
    Nothing is left of a round that is mostly noise, or too small to be judged on. Raises `UserError` where there are
    prompts enough for a round and this target can answer none of them: to wait for more would not help.
    """
    unique = pick_prompts(deduplicate(prompts), MOST_PROMPTS)
    masked = unique if keeps_personal else [mask(prompt) for prompt in unique]
    encoded, unfit = encode_fitting(masked, target)
    fitting = [(prompt, ids) for prompt, ids in encoded if len(ids) <= longest]
    if not fitting and len(unique) >= 2 * FEWEST:
        left_out = why_left_out(len(encoded), unfit, longest, target)
        raise UserError(
            f"--traffic: none of {len(unique)} new prompts can be answered, {left_out}: give others, or another target"
        )
    bits = bits_per_byte([ids for _, ids in fitting], target)
    kept = [prompt for (prompt, _), bits_of_prompt in zip(fitting, bits, strict=True) if bits_of_prompt <= NOISE_BITS]
    counts = TrafficCounts(
        num_new=len(unique),
        num_masked=sum(before != after for before, after in zip(unique, masked, strict=True)),
        num_unfit=len(unfit),
        num_too_long=len(encoded) - len(fitting),
        num_noise=len(fitting) - len(kept),
    )
    if len(kept) < 2 * FEWEST or counts.is_noise:
        return Split([], []), counts
    num_openings = len(set(map(opening_hash, kept)))
    split = split_prompts(kept, min(HELD_OUT_SHARE, MOST_JUDGED / num_openings))
    if len(split.held_out) < FEWEST:
        return Split([], []), counts
    return split, replace(
        counts,
        num_training=len(split.train),
        num_held_out=len(split.held_out),
        domains=dict(Counter(prompt.domain for prompt in kept).most_common()),
    )


@torch.no_grad()
def bits_per_byte(texts: list[list[int]], target: Target) -> list[float]:
    """Return the bits that the target needs for a byte of each text's beginning, by its own chances of each token.

    Text that it knows takes one or two. Random letters take at least the logarithm of their number, whatever the
    target. The target reads `ROWS` texts of about one length at once.
    """
    bits = [0.0] * len(texts)
    by_length = sorted((i for i in range(len(texts)) if len(texts[i]) > 1), key=lambda i: len(texts[i]))
    for start in range(0, len(by_length), ROWS):
        group = by_length[start : start + ROWS]
        rows = [torch.tensor(texts[i][:READ_TOKENS]) for i in group]
        token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(target.device)  # [B, T]
        hidden = target.features(Batch(token_ids, torch.ones_like(token_ids, dtype=torch.bool))).last_hidden
        for i, row, hidden_of_row in zip(group, rows, hidden, strict=True):
            logits = target.logits(hidden_of_row[: len(row) - 1]).float()
            nats = float(F.cross_entropy(logits, row[1:].to(target.device), reduction="sum"))
            bits[i] = nats / math.log(2) / (num_bytes(row[1:], target) or math.inf)
    return bits


def num_bytes(token_ids: Tensor, target: Target) -> int:
    """Return the number of bytes of a text."""
    assert target.tokenizer is not None
    return len(str(target.tokenizer.decode(token_ids.tolist())).encode("utf-8", "replace"))
