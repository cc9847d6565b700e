"""The user's prompts: personal data masked, divided once and for all, and described."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.data.bad_rows import BadRows
from draftsmith.data.progress import notice
from draftsmith.data.prompts.checks import check_bos, check_not_rendered, check_token_ids
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_unique, tokenise
from draftsmith.data.prompts.splits import Split, deduplicate, prompt_hash, split_prompts, write_prompts
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.recipes.bench.server_logs import read_log

HELD_OUT_SHARE = 0.2  # of the prompts, half of which race and half of which tell the result
FEWEST = 8  # prompts for each of the two
MOST = 64
# Patterns of personal data, and what is written in their place.
PERSONAL = {
    "<email>": re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "<key>": re.compile(r"\b(?:sk|pk|hf|ghp|gho|xoxb|xoxp|AKIA)[-_]?[A-Za-z0-9_-]{16,}"),
    "<address>": re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"),
    "<number>": re.compile(r"(?<![\w.])\+?\d(?:[ ().-]?\d){8,18}(?!\w|\.\d)"),  # of a telephone, card or account
}


@dataclass(frozen=True)
class TrafficSummary:
    """A description of the prompts that fit the target."""

    num_prompts: int
    num_masked: int  # prompts in which personal data was masked
    num_too_long: int  # left out
    num_training: int
    num_racing: int
    num_test: int
    mean_tokens: float  # of a prompt
    chats: float  # share of the prompts
    domains: dict[str, int]  # prompts by domain; "": without one
    num_unfit: int = 0  # left out, such as those with images, or with the marks of a chat template in their text

    @property
    def text(self) -> str:
        domains = ", ".join(f"{name or 'no domain'} {number}" for name, number in self.domains.items())
        masked = f"; personal data masked in {self.num_masked}" if self.num_masked else ""
        long = f"; {self.num_too_long} too long and left out" if self.num_too_long else ""
        unfit = f"; {self.num_unfit} unfit and left out" if self.num_unfit else ""
        return (
            f"{self.num_prompts} prompts of {self.mean_tokens:.0f} tokens on the mean ({domains})"
            f"{masked}{long}{unfit}: {self.num_training} to train on, {self.num_racing} to race on, {self.num_test} to "
            "test the result on"
        )


@dataclass(frozen=True)
class DividedPrompts:
    """The files of prompts: to train on, to race on, and to test the result on, which nothing sees before."""

    folder: Path

    @property
    def training(self) -> Path:
        return self.folder / "training.jsonl"

    @property
    def racing(self) -> Path:
        return self.folder / "racing.jsonl"

    @property
    def test(self) -> Path:
        return self.folder / "test.jsonl"


def divide(source: str, target: Target, longest: int, keeps_personal: bool, divided: DividedPrompts) -> TrafficSummary:
    """Write the prompts of a source in three parts that share none, by their beginnings alone, and describe them.

    Prompts that cannot be answered here, and those of more than `longest` tokens, are left out. Raises `UserError`
    where too few are left.
    """
    unique = deduplicate(logged_prompts(source)) if is_log(source) else read_unique(source, False, BadRows(0.0))
    split = split_prompts(unique, HELD_OUT_SHARE) if len(unique) >= 2 * FEWEST else Split(unique, [])
    masked = {id(prompt) for part in (split.train, split.held_out) for prompt in part if mask(prompt) != prompt}
    kept, lengths, num_too_long, num_unfit = [], [], 0, 0
    for part in (split.train, split.held_out):
        fitting = []
        for prompt in part:
            number = len(encode(prompt, target))
            if number == 0:
                num_unfit += 1
                continue
            if number > longest:
                num_too_long += 1
                continue
            lengths.append(number)
            fitting.append(prompt if keeps_personal else mask(prompt))
        kept.append(fitting)
    training, held_out = kept
    held_out.sort(key=prompt_hash)
    racing, test = held_out[: 2 * MOST : 2], held_out[1 : 2 * MOST : 2]
    if min(len(racing), len(test)) < FEWEST:
        unfit = f", beside {num_unfit} that cannot be answered here," if num_unfit else ""
        raise UserError(
            f"--traffic {source}: {len(training) + len(held_out)} different prompts of at most {longest} tokens{unfit} "
            f"are too few to hold {2 * FEWEST} out: give about {round(2 * FEWEST / HELD_OUT_SHARE)} or more"
        )
    for path, prompts in ((divided.training, training), (divided.racing, racing), (divided.test, test)):
        write_prompts(path, prompts)
    everything = [*training, *held_out]
    return TrafficSummary(
        num_prompts=len(everything),
        num_masked=0 if keeps_personal else len(masked),
        num_too_long=num_too_long,
        num_training=len(training),
        num_racing=len(racing),
        num_test=len(test),
        mean_tokens=sum(lengths) / len(lengths),
        chats=sum(prompt.messages is not None for prompt in everything) / len(everything),
        domains=dict(Counter(prompt.domain for prompt in everything).most_common()),
        num_unfit=num_unfit,
    )


def is_log(source: str) -> bool:
    """Return whether a source of traffic is the log of a server."""
    return Path(source).suffix == ".log"


def logged_prompts(source: str) -> list[Prompt]:
    """Return the prompts in the log of a vLLM or SGLang. Raises `UserError` where it holds no requests."""
    logged = [request.prompt for request in read_log(Path(source))]
    prompts = [prompt for prompt in logged if isinstance(prompt, Prompt)]
    if len(prompts) < len(logged):
        notice(f"{source}: {len(logged) - len(prompts)} requests were logged as token ids alone, and are left out")
    return prompts


def encode(prompt: Prompt, target: Target) -> list[int]:
    """Return the token ids of a prompt; none for one that cannot be answered here, which must not stop the others."""
    try:
        check_not_rendered(prompt, target)
        ids = tokenise(prompt, target)
        check_bos(ids, target, prompt.where)
        check_token_ids(ids, target, prompt.where)
    except UserError:
        return []
    return [] if prompt.image_urls else ids


def mask(prompt: Prompt) -> Prompt:
    """Return a prompt with personal data masked in its text or in its messages."""
    if prompt.messages is None:
        return replace(prompt, text=masked_text(str(prompt.text)))
    messages = [{**message, "content": masked_content(message["content"])} for message in prompt.messages]
    return replace(prompt, messages=messages)


def masked_content(content: Any) -> Any:
    """Return the content of a message, a text or parts of which some are texts, with personal data masked."""
    if isinstance(content, str):
        return masked_text(content)
    if not isinstance(content, list):
        return content
    return [{**part, "text": masked_text(part["text"])} if "text" in part else part for part in content]


def masked_text(text: str) -> str:
    """Return a text with what looks like personal data replaced."""
    for name, pattern in PERSONAL.items():
        text = pattern.sub(name, text)
    return text
