"""The target answers prompts: text for training that it really writes."""

import hashlib
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.filesize import decimal

from draftsmith.data.answers.changed_settings import changes_text, flatten, setting_changes
from draftsmith.data.answers.endpoint import MOST_REQUESTS, Endpoint
from draftsmith.data.answers.journal import Journal, journals_in, merge_journals, read_journals, remove_journals
from draftsmith.data.answers.summary import show_written
from draftsmith.data.answers.turns import Dialogue
from draftsmith.data.answers.with_images import OPTION
from draftsmith.data.bad_rows import BadRow, BadRows
from draftsmith.data.console import say
from draftsmith.data.parallel import on_all_cores
from draftsmith.data.processes import locked, rank_and_num_ranks
from draftsmith.data.progress import notice, progress_bar
from draftsmith.data.prompts.checks import (
    check_bos,
    check_not_rendered,
    check_token_ids,
    notice_raw_texts,
)
from draftsmith.data.prompts.conversations import check_images_written
from draftsmith.data.prompts.prompts import read_split
from draftsmith.data.prompts.splits import HELD_OUT, write_prompts
from draftsmith.data.samples.folder import (
    PREPARED,
    SHARD_INPUTS,
    is_written,
    read_chat,
    read_prepared,
    shard_parts,
)
from draftsmith.data.samples.images import keep_image, read_image
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.measuring.spans import Markers
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError, whole_number
from draftsmith.models.ranges import BelowOne, Count, Depth, Name, Seed, checked_fields
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.files import finish_moving, write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.models.target.chat_template import has_template
from draftsmith.models.target.identity import template_hash, tokenizer_fingerprint

# Keys of prepared.json that are names and counts of what hashes tell exactly.
IMPLIED = ("target", "prompts", "num_prompts", "num_held_out", "num_skipped")


@dataclass
class PrepareSettings:
    """The settings by which the target answers prompts."""

    max_new_tokens: Count = 256  # of a turn; `default_max_new_tokens` knows better for a target
    # prompt i is answered by samplings[i % len], and further times by those that follow
    samplings: Annotated[tuple[Sampling, ...], Field(min_length=1)] = (Sampling(0.0), Sampling(1.0))
    batch_size: Count = 32  # prompts answered at a time
    batches_a_share: Count = 8  # decoded together: more keep the batch full, fewer lose less to an interruption
    seed: Seed = 0
    drafter: Name = "none"  # a kind or a checkpoint, which speeds the decoder up
    draft_length: Depth = 4
    endpoint: Name | None = None  # URL of a server that answers instead of the decoder
    skip_long: bool = False  # leave out prompts that the context has no room for, rather than refuse them
    refuse_surrogates: bool = False  # raise `UserError` for prompts with lone surrogates, rather than replace them
    max_bad_share: BelowOne = 0.0  # of all rows that give no prompt, and are left out; more raise `UserError`
    held_out_share: BelowOne = 0.0  # of the prompts, never answered and kept in held_out.jsonl to evaluate on
    answers_per_prompt: Count = 1

    def __post_init__(self) -> None:
        vars(self).update(checked_fields(type(self), vars(self), "prepare: "))
        if self.answers_per_prompt > len(self.samplings) and any(not each.temperature for each in self.samplings):
            raise UserError(
                f"prepare: answers_per_prompt {self.answers_per_prompt}: at temperature 0 a prompt has one answer: "
                f"give at most {len(self.samplings)}, the number of temperatures, or temperatures above 0 alone"
            )

    @property
    def share(self) -> int:
        """Number of prompts that are decoded together: what a kill loses at most."""
        return self.batches_a_share * self.batch_size


def default_max_new_tokens(target: Target) -> int:
    """Return the most tokens of an answer where nobody gave a number, at most half of the target's context.

    It is that of the target's generation config; else 16,384 for a target that thinks, 2,048 for one with a chat
    template, and 256 for others, many of which never end a text.
    """
    own = target.model.generation_config.max_new_tokens
    usual = 256
    if own is not None:
        usual = whole_number(f"{target.name}: max_new_tokens in its generation config", own, 1)
    elif has_template(target.tokenizer):
        usual = 16384 if Markers.of_target(target).thinks else 2048
    return min(usual, target.context // 2)


def prepare(target: Target, source: str, out: Path, settings: PrepareSettings) -> None:
    """Write the target's answers to the prompts at `source` into the folder `out`.

    Interrupted, it goes on where it stopped. An answer's noise is keyed by the seed and the prompt, and prompts are
    decoded in shares that are a function of the prompts and the settings alone, a share that was interrupted from its
    beginning, so that the file is the same in the end to the byte. (A server batches as it likes: there, sampled
    answers are each drawn once, but not reproducible.)

    Several processes take shares in turn and journals of their own; the first one waits for the others and merges.
    Raises `UserError` for bad prompts, before anything is written, for a folder that holds the answers of other prompts
    or settings, and for one that another call writes.
    """
    with locked(out):
        keep_date(target, out)
        write_answers(AnswerJob(target, source, settings), out)


def keep_date(target: Target, out: Path) -> None:
    """Let the chat template print the day on which the folder was begun, today for a new one.

    Many templates print the date, and a folder that goes on tomorrow must hold the same prompts.
    """
    begun = str(date.today())
    if (out / PREPARED).is_file():
        begun = read_chat(out).date or begun
    target.chat = replace(target.chat, date=begun)


def write_answers(job: "AnswerJob", out: Path) -> None:
    """Write the answers that are missing in the folder `out`."""
    rank, num_ranks = rank_and_num_ranks()
    prepared = job.prepared()
    open_folder(out, prepared)
    run = run_name(prepared)
    if rank == 0:
        job.bad.write(out)
        if job.held_out:
            write_prompts(out / HELD_OUT, job.held_out)
    if is_written(out):
        if rank == 0:
            show_written(out, job.target, job.num_kept_prompts)
            finish_moving(out)  # these two are of a kill just after the file was there
            remove_journals(out)
            say(f"{out} holds all answers already")
        return
    answered = read_journals(out, run)
    journal = Journal(out, rank, run)
    if rank == 0 and answered.num_damaged:
        notice(
            f"{answered.num_damaged} lines of {out}/answers-*.partial are damaged, or of another run or version: their "
            "prompts are answered again"
        )
    done = set(answered.places)
    shares = [share for share in job.shares()[rank::num_ranks] if not done.issuperset(share)]
    total = len(done.union(*shares))

    start, num_tokens, num_written = time.perf_counter(), 0, 0
    with progress_bar(visible=rank == 0) as progress:
        task = progress.add_task("the target writes training text", total=total, completed=len(done), detail="")
        for dialogue in job.answers(shares, done):
            num_tokens += dialogue.num_tokens
            if dialogue.number in done:  # decoded again for the sake of its share
                continue
            for image in dialogue.images:
                keep_image(out, image)
            journal.append(dialogue.number, dialogue.samples)
            num_written += 1
            rate = num_tokens / (time.perf_counter() - start)
            disk = journal.num_bytes * total / (len(done) + num_written)
            detail = (
                f"{num_tokens} tokens  {rate:.0f} tokens/s  {decimal(journal.num_bytes)} of about {decimal(int(disk))}"
            )
            progress.update(task, advance=1, detail=detail)
    journal.close()
    if rank == 0:
        wait_for_answers(out, run, job.kept)
        merge_journals(out, run)
        show_written(out, job.target, job.num_kept_prompts)


@dataclass
class EncodedPrompts:
    """Facts of some prompts that were encoded."""

    lengths: list[int] = field(default_factory=list)  # of each in tokens; 0: it is bad
    hashed: bytearray = field(default_factory=bytearray)  # what answers depend on, of those that are not bad
    bad: list[BadRow] = field(default_factory=list)


class AnswerJob:
    """The prompts at a source, checked, and the settings by which the target answers them.

    Answers are numbered: first one of each prompt, in their order, then the second ones.
    """

    def __init__(self, target: Target, source: str, settings: PrepareSettings) -> None:
        self.target, self.source, self.settings = target, source, settings
        self.endpoint, self.context = None, target.context
        if settings.endpoint:
            if settings.batch_size > MOST_REQUESTS:
                raise UserError(
                    f"batch_size {settings.batch_size}: a server is sent up to {MOST_REQUESTS} prompts at a time"
                )
            self.endpoint = Endpoint(settings.endpoint, target, settings.max_new_tokens, settings.seed)
            self.context = self.endpoint.context
        self.bad = BadRows(settings.max_bad_share)
        split = read_split(source, settings.held_out_share, settings.refuse_surrogates, self.bad)
        self.prompts, self.held_out = split.train, split.held_out
        self._check_images(source)
        self._markers = Markers.of_target(target)
        notice_raw_texts(self.prompts, target)
        digest, self.lengths = hashlib.sha256(), []
        with progress_bar(visible=len(self.prompts) > SHARD_INPUTS) as progress:
            task = progress.add_task("prompts are encoded", total=len(self.prompts), detail="")
            for part in on_all_cores(self._encode, shard_parts(range(len(self.prompts)))):
                digest.update(part.hashed)
                self.lengths += part.lengths
                self.bad.rows += part.bad
                progress.update(task, completed=len(self.lengths))
        self.bad.check()
        self.hash = digest.hexdigest()[:16]
        kept, count = self._kept_prompts(), len(self.prompts)
        self.kept = [answer * count + prompt for answer in range(settings.answers_per_prompt) for prompt in kept]

    @property
    def num_kept_prompts(self) -> int:
        """Number of prompts that are answered."""
        return len(self.kept) // self.settings.answers_per_prompt

    def _check_images(self, source: str) -> None:
        """Raise `UserError` for prompts with images that nobody here can read."""
        number = sum(bool(prompt.image_urls) for prompt in self.prompts)
        if number and self.endpoint is None:
            raise UserError(
                f"{source}: {number} of {len(self.prompts)} prompts hold images, and draftsmith does not load the "
                f"towers of {self.target.name} that read them: give --endpoint URL of a vLLM that serves it with "
                f"{OPTION}"
            )
        if number and self.endpoint is not None:
            self.endpoint.check_takes_images()

    def _encode(self, indices: Sequence[int]) -> "EncodedPrompts":
        """Encode and check some prompts. Their token ids are not kept: those of all prompts may not fit in memory."""
        part, bad = EncodedPrompts(), BadRows(self.settings.max_bad_share)
        for index in indices:
            prompt, length = self.prompts[index], 0
            try:
                dialogue = self.checked_dialogue(index)
                length = len(dialogue.context)
                part.hashed += json.dumps([dialogue.context, prompt.messages, prompt.tools, prompt.domain]).encode()
                images = [read_image(url, dialogue.where).name for url in prompt.image_urls]
                part.hashed += "".join(images).encode()
            except UserError as error:
                bad.add(prompt.where or f"prompt {index + 1}", error)
            part.lengths.append(length)
        part.bad = bad.rows
        return part

    def checked_dialogue(self, index: int) -> Dialogue:
        """Return a prompt, unanswered. Raises `UserError` for one that the target would never meet."""
        check_not_rendered(self.prompts[index], self.target)
        check_images_written(self.prompts[index], self.target)
        dialogue = self.dialogue(index)
        check_bos(dialogue.context, self.target, dialogue.where)
        check_token_ids(dialogue.context, self.target, dialogue.where)
        if not dialogue.context:
            raise UserError(f"{dialogue.where} is empty after tokenisation")
        dialogue.check_later_turns()
        return dialogue

    def dialogue(self, number: int) -> Dialogue:
        """Return the prompt of an answer, unanswered."""
        prompt = number % len(self.prompts)
        sampling = self.settings.samplings[self.sampling_of(number)]
        return Dialogue(self.prompts[prompt], prompt, number, sampling, self.target, self._markers)

    def length_of(self, number: int) -> int:
        """Return the tokens of an answer's prompt."""
        return self.lengths[number % len(self.prompts)]

    def sampling_of(self, number: int) -> int:
        """Return the place of an answer's sampling: those of a prompt follow one after the other."""
        return (number % len(self.prompts) + number // len(self.prompts)) % len(self.settings.samplings)

    def _kept_prompts(self) -> list[int]:
        """Return the prompts that leave room for an answer. Raises `UserError` for others that may not be left out."""
        limit = self.context - self.settings.max_new_tokens
        long = [index for index, length in enumerate(self.lengths) if length > limit]
        kept = [index for index, length in enumerate(self.lengths) if 0 < length <= limit]
        if long and not (self.settings.skip_long and kept):
            room = self.context - max(self.lengths)
            lower = f"give --max-new-tokens {room}" if room > 0 else "lower --max-new-tokens"
            leave_out = "" if self.settings.skip_long else ", or leave long prompts out with --skip-long"
            raise UserError(
                f"{self.dialogue(long[0]).where} has {self.lengths[long[0]]} tokens, which with "
                f"{self.settings.max_new_tokens} new ones exceeds the target's context of {self.context}, as "
                f"{len(long)} of {len(self.lengths)} do: shorten it, {lower}{leave_out}"
            )
        return kept

    def prepared(self) -> dict:
        """Return the content of prepared.json: all that the answers depend on."""
        settings = {
            key: getattr(self.settings, key)
            for key in ("max_new_tokens", "answers_per_prompt", "seed", "skip_long", "held_out_share")
        }
        has_weights = self.target.device.type != "meta"
        return {
            "target": self.target.name,
            "target_fingerprint": self.target.fingerprint() if has_weights else None,
            "tokenizer_fingerprint": tokenizer_fingerprint(self.target),
            "template_hash": template_hash(self.target),
            "chat": to_json(self.target.chat),
            "written_by": "endpoint" if self.endpoint else "decoder",
            "prompts": self.source,
            "prompts_hash": self.hash,
            "num_prompts": self.num_kept_prompts,
            "num_held_out": len(self.held_out),
            "num_skipped": len(self.prompts) - self.num_kept_prompts,
            "settings": {**settings, "samplings": [asdict(sampling) for sampling in self.settings.samplings]},
        }

    def shares(self) -> list[list[int]]:
        """Return the answers in shares that are decoded together: of one sampling, and prompts of similar length.

        The shares of one sampling are of about equal size: at the end of each the last requests run in a batch that is
        nearly empty, which would be most of the time of a small one.
        """
        shares = []
        for sampling in sorted(set(map(self.sampling_of, self.kept))):
            order = [number for number in self.kept if self.sampling_of(number) == sampling]
            order.sort(key=lambda number: (self.length_of(number), number))
            count = -(-len(order) // self.settings.share)
            edges = [len(order) * place // count for place in range(count + 1)]
            shares += [order[start:end] for start, end in pairwise(edges)]
        return shares

    def sampled_share(self, size: int) -> list[int]:
        """Return answers drawn at random, to measure on."""
        chosen = random.Random(0).sample(self.kept, min(size, len(self.kept)))
        return sorted(chosen, key=self.length_of)

    def answers(self, shares: list[list[int]], done: Iterable[int] = ()) -> Iterator[Dialogue]:
        """Write the answers of some shares. An endpoint leaves out those that are done, the decoder repeats them."""
        if self.endpoint is not None:
            done = set(done)
            missing = (self.dialogue(index) for share in shares for index in share if index not in done)
            yield from self.endpoint.answers(missing, self.settings.batch_size)
            return
        decoder = SpeculativeDecoder(self.target, load_drafter(self.settings.drafter, self.target))
        for share in shares:
            yield from decode_answers(decoder, [self.dialogue(index) for index in share], self.settings)


def decode_answers(
    decoder: SpeculativeDecoder, dialogues: list[Dialogue], settings: PrepareSettings
) -> Iterator[Dialogue]:
    """Answer all turns of the dialogues, the first turns together, then the second; yield each dialogue as it ends."""
    most = decoder.target.context - settings.max_new_tokens
    while dialogues:
        for sampling in dict.fromkeys(dialogue.sampling for dialogue in dialogues):
            chosen = [dialogue for dialogue in dialogues if dialogue.sampling == sampling]
            generation_settings = resolve_settings(
                decoder.drafter, sampling, settings.max_new_tokens, settings.draft_length, seed=settings.seed
            )
            contexts, ids = [dialogue.context for dialogue in chosen], [dialogue.request_id for dialogue in chosen]
            generation = decoder.start(contexts, generation_settings, ids, settings.batch_size)
            while generation.running():
                for emission in generation.step():
                    request, dialogue = generation.requests[emission.request], chosen[emission.request]
                    if request.finished:
                        dialogue.take(request.token_ids, most)
                        if dialogue.finished:
                            yield dialogue
        dialogues = [dialogue for dialogue in dialogues if not dialogue.finished]


def open_folder(out: Path, prepared: dict) -> None:
    """Make the folder, where one without an answer may have been of other settings. `UserError` for other answers."""
    if not has_answers(out):
        held_out_before = (out / PREPARED).is_file() and read_prepared(out).get("num_held_out")
        if held_out_before and not prepared["num_held_out"]:  # else the first process writes the file anew
            (out / HELD_OUT).unlink(missing_ok=True)
        write_json(out / PREPARED, prepared)
    check_same_answers(out, prepared)


def has_answers(out: Path) -> bool:
    """Return whether a folder holds answers, some or all, and what they depend on."""
    has_some = is_written(out) or any(path.lstat().st_size for path in journals_in(out))
    return has_some and (out / PREPARED).is_file()


def check_same_answers(out: Path, prepared: dict) -> None:
    """Raise `UserError` where the answers in a folder depend on something else than what is asked for."""
    defaults = {f"settings.{name}": value for name, value in asdict(PrepareSettings()).items()} | {"chat.date": None}
    stored = {**defaults, **flatten(read_prepared(out))}  # an older version did not write all settings
    changed = setting_changes(stored, {**defaults, **flatten(to_json(prepared))})
    if decisive := {key: text for key, text in changed.items() if key not in implied_keys(prepared)}:
        raise UserError(
            f"{out} holds samples of another target, prompts or settings ({changes_text(decisive)}): give the same "
            "again, another folder, or remove it"
        )


def run_name(prepared: dict[str, Any]) -> str:
    """Return a name for all that answers depend on, in 16 hex digits."""
    decisive = {key: value for key, value in prepared.items() if key not in implied_keys(prepared)}
    return hashlib.sha256(json.dumps(to_json(decisive), sort_keys=True).encode()).hexdigest()[:16]


def implied_keys(prepared: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys of prepared.json that other keys tell better. An endpoint's weights have only a name."""
    return IMPLIED if prepared["target_fingerprint"] else IMPLIED[1:]


def wait_for_answers(out: Path, run: str, prompts: list[int]) -> None:
    """Return when all processes have written theirs. There is no process group to time out; a crash ends them all."""
    while True:
        start = time.perf_counter()
        if read_journals(out, run).places.keys() >= set(prompts):
            return
        time.sleep(0.2 + 10 * (time.perf_counter() - start))
