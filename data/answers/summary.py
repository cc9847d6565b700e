"""The summary of a folder of samples, which is printed when the folder is written."""

from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.console import say
from draftsmith.data.progress import notice
from draftsmith.data.prompts.checks import check_samples, num_with_padding, shown_sample
from draftsmith.data.prompts.splits import HELD_OUT
from draftsmith.data.samples.folder import read_prepared, read_samples
from draftsmith.data.samples.samples import Samples
from draftsmith.models import Target


def show_written(out: Path, target: Target, num_asked: int = 0) -> None:
    """Check what a folder holds now, and show a sample of it. `num_asked`: prompts that should have an answer.

    Raises `UserError` where it is not fit to train on.
    """
    samples = read_samples(out)
    check_samples(samples, target, int(samples.lengths.max()), str(out))
    say(shown_sample(samples[0], target))
    num_prompts, num_tokens = len(np.unique(samples.prompts)), samples.num_generated().sum()
    text = f"{out}: {len(samples)} samples of {num_prompts} prompts, {num_tokens} tokens to train on"
    if num_held_out := read_prepared(out).get("num_held_out"):
        text += f"; {num_held_out} prompts are held out in {out / HELD_OUT}"
    if number := num_with_padding(samples, target):
        text += f"; {number} samples hold tokens that {target.name} has and its tokenizer does not: they are kept"
    say(text)
    if text := cut_text(samples, read_prepared(out)):
        notice(text)
    if num_asked > num_prompts:
        notice(
            f"{num_asked - num_prompts} prompts have no answer: with what the target reads for their images they "
            "exceed its context"
        )


def cut_text(samples: Samples, prepared: dict[str, Any]) -> str:
    """Return in words how many answers were cut and how many turns got none; empty where all is whole."""
    num_cut = (samples.column("finish_reason") == "length").sum()
    unanswered = samples.column("unanswered_turns")
    texts = []
    if num_cut:
        limit = prepared["settings"]["max_new_tokens"]
        texts.append(
            f"{num_cut} of {len(samples)} samples end in an answer that --max-new-tokens {limit} cut, so that how it "
            "ends is not learnt: raise it"
        )
    if unanswered.any():
        texts.append(
            f"{unanswered.sum()} turns of {(unanswered > 0).sum()} conversations got no answer, because the one before "
            "was cut, the context is full, or the target called a tool whose result nobody has"
        )
    return "; ".join(texts)
