"""The user's prompts: personal data masked, divided once and for all, and described, as are the target's answers."""

import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.data.bad_rows import BadRows
from draftsmith.data.progress import notice
from draftsmith.data.prompts.checks import check_bos, check_not_rendered, check_token_ids
from draftsmith.data.prompts.prompt_formats import Prompt, text_of
from draftsmith.data.prompts.prompts import read_unique, tokenise
from draftsmith.data.prompts.splits import deduplicate, opening_hash, prompt_hash, split_prompts, write_prompts
from draftsmith.data.samples.sample import Sample
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.recipes.bench.server_logs import LoggedRequest, read_log

HELD_OUT_SHARE = 0.2  # of the prompts, half of which race and half of which tell the result
NEWEST_SHARE = 0.1  # of a log, which tells the result
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
    num_unfit: int  # left out, such as those with images, or with the marks of a chat template in their text
    with_tools: float  # share of the prompts
    scripts: dict[str, float]  # shares of the letters by what they are of, such as Latin
    temperature: float | None  # median of the requests in a log
    requests_per_second: float | None  # in a log

    @property
    def text(self) -> str:
        domains = ", ".join(f"{name or 'no domain'} {number}" for name, number in self.domains.items())
        masked = f"; personal data masked in {self.num_masked}" if self.num_masked else ""
        long = f"; {self.num_too_long} too long and left out" if self.num_too_long else ""
        unfit = f"; {self.num_unfit} unfit and left out" if self.num_unfit else ""
        scripts = ", ".join(f"{name} {share:.0%}" for name, share in self.scripts.items())
        rate = "" if self.requests_per_second is None else f"; {self.requests_per_second:.2g} requests a second"
        heat = "" if self.temperature is None else f"; temperature {self.temperature:g}"
        return (
            f"{self.num_prompts} prompts of {self.mean_tokens:.0f} tokens on the mean ({domains}; {self.chats:.0%} "
            f"chats, {self.with_tools:.0%} with tools; letters: {scripts or 'none'}{rate}{heat})"
            f"{masked}{long}{unfit}: {self.num_training} to train on, {self.num_racing} to race on, {self.num_test} to "
            "test the result on"
        )


@dataclass(frozen=True)
class AnswerSummary:
    """A description of what the target wrote to the prompts that are trained on."""

    num_answers: int
    mean_tokens: float  # of an answer
    cut: float  # share of the samples whose last answer the limit of its tokens ended
    shares: dict[str, float]  # of the tokens, by what they are part of: "answer", "thinking", "tool_call"

    @property
    def text(self) -> str:
        parts = {"thinking": "thinking", "tool_call": "tool calls"}
        shares = "".join(f", {self.shares.get(label, 0.0):.0%} {name}" for label, name in parts.items())
        return (
            f"{self.num_answers} answers of {self.mean_tokens:.0f} tokens on the mean{shares}; {self.cut:.0%} are cut"
        )


def describe_answers(samples: Iterable[Sample]) -> AnswerSummary:
    """Return a description of the answers in samples, of which there is one at least."""
    tokens: Counter[str] = Counter()
    num_answers = num_samples = num_cut = 0
    for sample in samples:
        num_samples += 1
        num_cut += sample.finish_reason == "length"
        answers = [span for i, span in enumerate(sample.spans) if not i or sample.spans[i - 1].end < span.start]
        num_answers += len(answers)
        for span in sample.spans:
            tokens[span.label] += span.end - span.start
    total = tokens.total()
    shares = {label: number / total for label, number in tokens.most_common()}
    return AnswerSummary(num_answers, total / num_answers, num_cut / num_samples, shares)


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


def longest_prompt(target: Target, max_new_tokens: int) -> int:
    """Return the most tokens of a prompt that leave room for an answer. Raises `UserError` where there is no room."""
    longest = target.context - max_new_tokens
    if longest < 1:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt, for {target.name} reads {target.context} "
            "tokens at most: give less, or a target with a longer context"
        )
    return longest


def divide(source: str, target: Target, longest: int, keeps_personal: bool, divided: DividedPrompts) -> TrafficSummary:
    """Write the prompts of a source in three parts, none of which begin alike, and describe them.

    Prompts that cannot be answered here, and those of more than `longest` tokens, are left out. Raises `UserError`
    where too few are left.
    """
    logged = read_log(Path(source)) if is_log(source) else []
    found = deduplicate(logged_prompts(logged, source)) if logged else read_unique(source, False, BadRows(0.0))
    prompts = found if keeps_personal else list(map(mask, found))
    num_masked = sum(before != after for before, after in zip(found, prompts, strict=True))
    parts = (parts_of_log if logged else parts_by_hash)(deduplicate(prompts))
    kept: list[list[Prompt]] = []
    lengths: list[int] = []
    unfit: list[str] = []
    num_too_long = 0
    for part in parts:
        encoded, reasons = encode_fitting(part, target)
        fitting = [(prompt, ids) for prompt, ids in encoded if len(ids) <= longest]
        unfit += reasons
        num_too_long += len(encoded) - len(fitting)
        lengths += [len(ids) for _, ids in fitting]
        kept.append([prompt for prompt, _ in fitting])
    training = kept[0]
    racing, test = (sorted(part, key=prompt_hash)[:MOST] for part in kept[1:])
    everything = [prompt for part in kept for prompt in part]
    if min(len(racing), len(test)) < FEWEST:
        left_out = why_left_out(num_too_long, unfit, longest, target)
        beside = f", beside {left_out}," if left_out else ""
        raise UserError(
            f"--traffic {source}: {len(everything)} different prompts{beside} are too few to hold {2 * FEWEST} out: "
            f"give about {round(2 * FEWEST / HELD_OUT_SHARE)} or more"
        )
    for path, part in ((divided.training, training), (divided.racing, racing), (divided.test, test)):
        write_prompts(path, part)
    return TrafficSummary(
        num_prompts=len(everything),
        num_masked=num_masked,
        num_too_long=num_too_long,
        num_training=len(training),
        num_racing=len(racing),
        num_test=len(test),
        mean_tokens=sum(lengths) / len(lengths),
        chats=sum(prompt.messages is not None for prompt in everything) / len(everything),
        domains=dict(Counter(prompt.domain for prompt in everything).most_common()),
        num_unfit=len(unfit),
        with_tools=sum(bool(prompt.tools) for prompt in everything) / len(everything),
        scripts=scripts_of(map(written_text, everything)),
        temperature=median_temperature(logged),
        requests_per_second=arrival_rate(logged),
    )


def parts_by_hash(unique: list[Prompt]) -> list[list[Prompt]]:
    """Return prompts to train on, to race on and to test on, divided by their beginnings alone."""
    if len(unique) < 2 * FEWEST:
        return [unique, [], []]
    outer = split_prompts(unique, HELD_OUT_SHARE)
    if len(outer.held_out) < 2 * FEWEST:
        return [outer.train, outer.held_out, []]
    inner = split_prompts(outer.held_out, HELD_OUT_SHARE / 2)
    return [outer.train, inner.train, inner.held_out]


def parts_of_log(prompts: list[Prompt]) -> list[list[Prompt]]:
    """Return prompts to train on, to race on and to test on, of which the last came after all others.

    For a drafter serves what comes after its training. Newest prompts that begin as older ones did are left out.
    """
    if len(prompts) < 2 * FEWEST:
        return [prompts, [], []]
    num_older = int((1 - NEWEST_SHARE) * len(prompts))
    older, newest = prompts[:num_older], prompts[num_older:]
    split, begun = split_prompts(older, HELD_OUT_SHARE / 2), set(map(opening_hash, older))
    return [split.train, split.held_out, [prompt for prompt in newest if opening_hash(prompt) not in begun]]


def why_left_out(num_too_long: int, unfit: list[str], longest: int, target: Target) -> str:
    """Return in words which prompts are left out, and why: too long ones, and others, of which each has a reason."""
    parts = []
    if num_too_long:
        parts.append(
            f"{num_too_long} of more than {longest} tokens (all that --max-new-tokens leaves of the {target.context} "
            f"that {target.name} reads: give less for longer prompts)"
        )
    if unfit:
        parts.append(f"{len(unfit)} that cannot be answered here (the first: {unfit[0]})")
    return " and ".join(parts)


def is_log(source: str) -> bool:
    """Return whether a source of traffic is the log of a server."""
    return Path(source).suffix == ".log"


def median_temperature(logged: Sequence[LoggedRequest]) -> float | None:
    """Return the temperature of which as many requests have a lower one as a higher; None where no log tells."""
    known = [request.temperature for request in logged if request.temperature is not None]
    return statistics.median_low(known) if known else None


def arrival_rate(logged: Sequence[LoggedRequest]) -> float | None:
    """Return how many requests came in a second from the first to the last; None where no time lies between."""
    times = [request.seconds for request in logged]
    seconds = max(times, default=0.0) - min(times, default=0.0)
    return (len(times) - 1) / seconds if seconds > 0 else None


def written_text(prompt: Prompt) -> str:
    """Return what stands in a prompt, of a chat all messages."""
    return str(prompt.text) if prompt.messages is None else "\n".join(map(text_of, prompt.messages))


def scripts_of(texts: Iterable[str]) -> dict[str, float]:
    """Return the shares of the letters by script, as Unicode names them (Latin, Cyrillic, Cjk), the largest first."""
    letters = Counter(character for text in texts for character in text if character.isalpha())
    scripts: Counter[str] = Counter()
    for letter, number in letters.items():
        scripts[unicodedata.name(letter, "OTHER").split()[0].capitalize()] += number
    return {
        name: number / letters.total() for name, number in scripts.most_common() if number >= 0.005 * letters.total()
    }


def logged_prompts(logged: Sequence[LoggedRequest], source: str) -> list[Prompt]:
    """Return the prompts among the requests of a log, and tell of those that were logged without one."""
    prompts = [request.prompt for request in logged if isinstance(request.prompt, Prompt)]
    if len(prompts) < len(logged):
        notice(
            f"{source}: {len(logged) - len(prompts)} requests were logged as the server read them, in token ids, and "
            "are left out: let vLLM log what clients send, too, with --uvicorn-log-level debug"
        )
    return prompts


def encode_fitting(prompts: list[Prompt], target: Target) -> tuple[list[tuple[Prompt, list[int]]], list[str]]:
    """Return the prompts that can be answered here with their token ids, and why each of the others cannot be."""
    encoded, unfit = [], []
    for prompt in prompts:
        try:
            encoded.append((prompt, encode(prompt, target)))
        except UserError as error:
            unfit.append(str(error))
    return encoded, unfit


def encode(prompt: Prompt, target: Target) -> list[int]:
    """Return the token ids of a prompt. Raises `UserError` for one that cannot be answered here."""
    where = prompt.where or "a prompt"
    if prompt.image_urls:
        raise UserError(f"{where} holds images: give text alone")
    check_not_rendered(prompt, target)
    ids = tokenise(prompt, target)
    check_bos(ids, target, where)
    check_token_ids(ids, target, where)
    if not ids:
        raise UserError(f"{where} is empty: give a text")
    return ids


def mask(prompt: Prompt) -> Prompt:
    """Return a prompt with personal data masked in its text or in its messages."""
    return replace(prompt, text=masked(prompt.text), messages=masked(prompt.messages))


def masked(value: Any) -> Any:
    """Return a value of JSON with personal data masked in all of its texts, such as arguments of tool calls."""
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, list):
        return [masked(part) for part in value]
    return {key: masked(part) for key, part in value.items()} if isinstance(value, dict) else value


def masked_text(text: str) -> str:
    """Return a text with what looks like personal data replaced."""
    for name, pattern in PERSONAL.items():
        text = pattern.sub(name, text)
    return text
