"""The target's answers: the very tokens it decoded, and the same file after an interruption."""

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.answers import prepare as prepare_module
from draftsmith.data.answers.estimate import Spread, estimate
from draftsmith.data.answers.journal import Journal, checksum
from draftsmith.data.answers.prepare import (
    AnswerJob,
    PrepareSettings,
    default_max_new_tokens,
    open_folder,
    prepare,
    run_name,
)
from draftsmith.data.answers.summary import cut_text
from draftsmith.data.answers.turns import Dialogue
from draftsmith.data.prompts.checks import check_samples, notice_without_checksum, num_known_tokens
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts, read_prompts
from draftsmith.data.prompts.splits import HELD_OUT
from draftsmith.data.samples.folder import (
    INDEX,
    PREPARED,
    check_same_target,
    read_chat,
    read_prepared,
    read_samples,
    shard_file,
)
from draftsmith.data.samples.lines import CHECKSUM, LINES
from draftsmith.data.samples.sample import Sample, sample_line
from draftsmith.data.samples.samples import Samples, pieces
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.target.chat_template import set_chat
from draftsmith.models.target.target import ChatSettings
from draftsmith.recipes.cli.main import main

SAMPLINGS = (Sampling(0.0), Sampling(1.5, 0.9, 20))
SETTINGS = PrepareSettings(max_new_tokens=12, samplings=SAMPLINGS, batch_size=2, batches_a_share=2)
SHARD = shard_file(0)
NUM_PROMPTS = 10  # at each temperature a share of two and one of three


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"strike {'the iron ' * (i % 4)}{i}\n" for i in range(NUM_PROMPTS)))
    return str(path)


@pytest.fixture(scope="module")
def folder(source: str, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("samples")
    prepare(tiny_target, source, out, SETTINGS)
    return out


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    return list(read_samples(folder))


@pytest.fixture(scope="module")
def encoded(source: str, tiny_target: Target) -> list[list[int]]:
    return encode_prompts(read_prompts(source), tiny_target)


def test_every_prompt_is_answered_once(samples: list[Sample], encoded: list[list[int]]) -> None:
    assert [sample.prompt_index for sample in samples] == list(range(NUM_PROMPTS))
    for sample, prompt in zip(samples, encoded, strict=True):
        assert sample.spans == [(len(prompt), len(sample.token_ids), "answer")]
        assert sample.token_ids[: len(prompt)] == prompt
        assert 1 <= len(sample.generated()) <= SETTINGS.max_new_tokens


def test_samplings_alternate_by_prompt(samples: list[Sample]) -> None:
    """By place in the prompts file, not by the order of answering, which sorts by length."""
    found = [Sampling(sample.temperature, sample.top_p, sample.top_k) for sample in samples]
    assert found == list(SAMPLINGS) * (NUM_PROMPTS // 2)


def test_every_prompt_is_answered_by_each_sampling(
    folder: Path, source: str, tiny_target: Target, tmp_path: Path
) -> None:
    """The first answers are those that it has alone, and the second ones are at the other temperature."""
    prepare(tiny_target, source, tmp_path, replace(SETTINGS, answers_per_prompt=2))
    found, once = list(read_samples(tmp_path)), list(read_samples(folder))
    assert [sample.token_ids for sample in found[:NUM_PROMPTS]] == [sample.token_ids for sample in once]
    assert [sample.prompt_index for sample in found] == 2 * list(range(NUM_PROMPTS))
    assert len({(sample.prompt_index, sample.temperature) for sample in found}) == 2 * NUM_PROMPTS
    assert read_prepared(tmp_path)["num_prompts"] == NUM_PROMPTS


def test_a_greedy_answer_is_not_written_twice() -> None:
    with pytest.raises(UserError, match="answers_per_prompt 3: at temperature 0 a prompt has one answer: give at most"):
        replace(SETTINGS, answers_per_prompt=3)
    replace(SETTINGS, samplings=SAMPLINGS[1:], answers_per_prompt=3)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_are_what_the_target_decodes(
    sampling: Sampling, samples: list[Sample], encoded: list[list[int]], tiny_target: Target
) -> None:
    """Each alone, with the noise of its place in the file: neither batch nor neighbours may show in an answer."""
    decoder = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    for sample in samples:
        if sample.temperature == sampling.temperature:
            index = sample.prompt_index
            output = decoder.generate([encoded[index]], 12, **vars(sampling), request_ids=[index])
            assert sample.generated() == output.token_ids[0]


def test_a_drafter_leaves_the_answers_alone(folder: Path, source: str, tiny_target: Target, tmp_path: Path) -> None:
    """Speculative decoding meets the same noise, sampled answers included: the files are the same to the byte."""
    prepare(tiny_target, source, tmp_path, replace(SETTINGS, drafter="ngram", batch_size=3))
    assert (tmp_path / INDEX).read_bytes() == (folder / INDEX).read_bytes()


CHATTING = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_folder_keeps_the_day_on_which_it_was_begun(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates that print the date would make other prompts of it tomorrow, and the folder would be refused."""

    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date(2040, 1, 2)

    target = copy.copy(tiny_target)
    target.tokenizer = copy.deepcopy(tiny_target.tokenizer)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = CHATTING
    source = tmp_path / "p.jsonl"
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "strike"}]}))
    out = tmp_path / "out"
    prepare(target, str(source), out, SETTINGS)
    begun = read_chat(out)
    assert begun.date == str(date.today())
    monkeypatch.setattr(prepare_module, "date", Tomorrow)
    set_chat(target, ChatSettings())
    prepare(target, str(source), out, SETTINGS)
    assert read_chat(out) == begun
    set_chat(target, ChatSettings({"m": 1}))
    with pytest.raises(UserError, match=r"other .* settings \(chat.kwargs.m unknown -> 1"):
        prepare(target, str(source), out, SETTINGS)


@pytest.mark.parametrize(
    ("template", "markers", "own", "longest"),
    [
        (None, [], None, 64),  # half of its context
        (None, [], 12, 12),
        (CHATTING, [], None, 2048),
        (CHATTING, ["<think>", "</think>"], None, 16384),
        (CHATTING, ["<think>", "</think>"], 12, 12),
    ],
)
def test_answers_are_as_long_as_the_target_needs(
    template: str | None, markers: list[str], own: int | None, longest: int, tiny_target: Target
) -> None:
    target = copy.copy(tiny_target)
    target.tokenizer = copy.deepcopy(tiny_target.tokenizer)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = template
    target.tokenizer.add_tokens(markers)
    target.model = copy.copy(tiny_target.model)
    target.model.generation_config = copy.deepcopy(tiny_target.model.generation_config)
    target.model.generation_config.max_new_tokens = own
    if template:
        target.text_config = copy.deepcopy(tiny_target.text_config)
        target.text_config.max_position_embeddings = 1 << 17
    assert default_max_new_tokens(target) == longest


def test_cut_answers_are_told(
    source: str, tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tiny_target, source, tmp_path, replace(SETTINGS, max_new_tokens=1))
    said = " ".join(capsys.readouterr().err.split())
    assert f"{NUM_PROMPTS} of {NUM_PROMPTS} samples end in an answer that --max-new-tokens 1 cut" in said
    samples = [Sample([1, 2], [Span(1, 2)], "eos", unanswered_turns=left) for left in (0, 2, 1)]
    assert "3 turns of 2 conversations got no answer" in cut_text(Samples.of(samples), {})
    assert cut_text(Samples.of(samples[:1]), {}) == ""


def test_finish_reason(source: str, tiny_target: Target, samples: list[Sample], tmp_path: Path) -> None:
    """The tiny target rarely ends a text by itself, so a token that one answer holds in its middle ends it, too."""
    eos = samples[0].generated()[3]
    generation_config = tiny_target.model.generation_config
    before = generation_config.eos_token_id
    generation_config.eos_token_id = [before, eos]
    try:
        prepare(tiny_target, source, tmp_path, SETTINGS)
    finally:
        generation_config.eos_token_id = before
    found = list(read_samples(tmp_path))
    for sample in found:
        answer = sample.generated()
        assert not {before, eos} & set(answer[:-1])  # nothing follows the end of a text
        ended = answer[-1] in (before, eos)
        assert sample.finish_reason == ("eos" if ended else "length")
        assert ended or len(answer) == SETTINGS.max_new_tokens
    assert {sample.finish_reason for sample in found} == {"eos", "length"}
    assert list(read_samples(tmp_path, drop_cut=True)) == [sample for sample in found if sample.finish_reason == "eos"]


@pytest.mark.parametrize("kept", [0, 0.05, 0.35, 0.5, 0.75, 0.97, 1])
def test_interrupted_anywhere_the_file_is_the_same(
    kept: float, folder: Path, source: str, tiny_target: Target, tmp_path: Path
) -> None:
    """A kill leaves part of a line and part of a share, with any number of processes; then another number goes on."""
    open_folder(tmp_path, read_prepared(folder))
    for rank, share in enumerate(AnswerJob(tiny_target, source, SETTINGS).shares()):
        journal = Journal(tmp_path, rank, run_name(read_prepared(folder)))
        for index in reversed(share):
            journal.append(index, [read_samples(folder)[index]])
        journal.close()
        content = journal.path.read_bytes()
        journal.path.write_bytes(content[: int(len(content) * kept)])
    prepare(tiny_target, source, tmp_path, SETTINGS)
    assert (tmp_path / INDEX).read_bytes() == (folder / INDEX).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX, PREPARED, SHARD]


def test_whole_shares_are_not_decoded_again(
    folder: Path, source: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = AnswerJob(tiny_target, source, SETTINGS)
    first, second, *others = job.shares()
    open_folder(tmp_path, read_prepared(folder))
    journal = Journal(tmp_path, 0, run_name(read_prepared(folder)))
    for index in [*first, *chain(*others), second[1]]:
        journal.append(index, [read_samples(folder)[index]])
    journal.close()
    decoded: list[int] = []
    take = Dialogue.take
    monkeypatch.setattr(Dialogue, "take", lambda self, *args: (decoded.append(self.index), take(self, *args)))
    prepare(tiny_target, source, tmp_path, SETTINGS)
    assert sorted(decoded) == sorted(second)


def in_lines(folder: Path, out: Path) -> Path:
    """Write the samples of a folder as an older draftsmith did."""
    assert main(["convert", "--samples", str(folder), "--out", str(out)]) == 0
    return out


def flipped(content: bytes) -> bytes:
    """One digit of one token id is another one."""
    place = content.index(b"token_ids") + len(b'token_ids":[')
    return content[:place] + (b"1" if content[place : place + 1] != b"1" else b"2") + content[place + 1 :]


def of_another_run(content: bytes) -> bytes:
    """A good line of the same prompts, answered at another seed."""
    answer = content.splitlines()[0].rpartition(b"\t")[0]
    return answer + b"\t" + checksum(answer, "another run") + b"\n"


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        of_another_run,
        lambda content: b"x" + content,
        lambda content: content.replace(b"\n", b"", 1),
        lambda content: b"\n" + content,
        lambda content: b"99999999\t{}\n" + content,
        lambda content: bytes(1000) + b"\n" + content,
    ],
)
def test_a_damaged_journal_loses_nothing_but_its_damaged_lines(
    damage: Callable[[bytes], bytes],
    folder: Path,
    source: str,
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was damaged is answered again, and said so; it is neither trained on nor waited for."""
    job = AnswerJob(tiny_target, source, SETTINGS)
    open_folder(tmp_path, read_prepared(folder))
    journal = Journal(tmp_path, 0, run_name(read_prepared(folder)))
    for index in job.shares()[0]:
        journal.append(index, [read_samples(folder)[index]])
    journal.close()
    journal.path.write_bytes(damage(journal.path.read_bytes()))
    prepare(tiny_target, source, tmp_path, SETTINGS)
    assert (tmp_path / INDEX).read_bytes() == (folder / INDEX).read_bytes()
    assert "1 lines of" in capsys.readouterr().err


def test_a_finished_folder_is_checked_before_it_is_called_finished(
    folder: Path, source: str, tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `train` would refuse holds no answers, whatever its name; its journals are still there."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    prepare(tiny_target, source, tmp_path, SETTINGS)
    assert "holds all answers already" in capsys.readouterr().out
    (tmp_path / "answers-0.partial").touch()
    (tmp_path / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])
    with pytest.raises(UserError, match="was changed since"):
        prepare(tiny_target, source, tmp_path, SETTINGS)
    assert "holds all answers already" not in capsys.readouterr().out
    assert (tmp_path / "answers-0.partial").exists()


def test_a_journal_that_leads_nowhere(source: str, tiny_target: Target, folder: Path, tmp_path: Path) -> None:
    (tmp_path / PREPARED).write_bytes((folder / PREPARED).read_bytes())
    (tmp_path / "answers-0.partial").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="answers-0.partial"):
        prepare(tiny_target, source, tmp_path, SETTINGS)


def test_processes_share_the_prompts(
    folder: Path, source: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two processes leaves the merging to the first; together they write what one alone does."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        assert not (tmp_path / INDEX).exists()
        monkeypatch.setenv("RANK", rank)
        prepare(tiny_target, source, tmp_path, SETTINGS)
    assert (tmp_path / INDEX).read_bytes() == (folder / INDEX).read_bytes()


def test_a_killed_process_goes_on_to_the_same_file(
    python: str, tiny_target_dir: Path, source: str, tiny_target: Target, tmp_path: Path
) -> None:
    """SIGKILL as soon as something is written. benchmarks/prepare_kill.py does it twenty times at random moments."""
    arguments = ["--max-new-tokens", "100", "--temperature", "0", "1.5", "--batch-size", "2", "--device", "cpu"]
    command = [python, "-m", "draftsmith.data", "--target", str(tiny_target_dir), "--prompts", source]
    journal = tmp_path / "killed" / "answers-0.partial"
    process = subprocess.Popen([*command, "--out", str(tmp_path / "killed"), *arguments])
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.002)
    _, pid, *_ = (tmp_path / ".killed.lock").read_text().split()
    os.kill(int(pid), signal.SIGKILL)  # the program, of which a warm Python's client waits for the end
    assert process.wait() == -signal.SIGKILL
    settings = PrepareSettings(100, (Sampling(0.0), Sampling(1.5)), batch_size=2)
    for out in ("killed", "whole"):
        prepare(tiny_target, source, tmp_path / out, settings)
    assert (tmp_path / "killed" / INDEX).read_bytes() == (tmp_path / "whole" / INDEX).read_bytes()


def test_a_later_process_leaves_what_the_first_one_held_out(folder: Path, tmp_path: Path) -> None:
    """Each process opens the folder, before there are answers; what other settings held out goes."""
    prepared = {**read_prepared(folder), "num_held_out": 1}
    open_folder(tmp_path, prepared)
    (tmp_path / HELD_OUT).write_text("kept\n")
    open_folder(tmp_path, prepared)
    assert (tmp_path / HELD_OUT).exists()
    open_folder(tmp_path, read_prepared(folder))
    assert not (tmp_path / HELD_OUT).exists()


def test_unfinished_samples_are_not_trained_on(folder: Path, tmp_path: Path) -> None:
    open_folder(tmp_path, read_prepared(folder))
    with pytest.raises(UserError, match="unfinished samples"):
        read_samples(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_new_tokens": 13}, r"settings.max_new_tokens \d+ -> 13"),
        ({"samplings": (Sampling(0.0),)}, "settings.samplings "),
        ({"seed": 1}, r"settings.seed \d -> 1"),
        ({"samplings": SAMPLINGS[::-1]}, "settings.samplings "),
    ],
)
def test_folder_of_other_settings_is_refused(
    change: dict[str, Any], told: str, folder: Path, source: str, tiny_target: Target
) -> None:
    """Going on would mix answers that were asked for differently."""
    before = (folder / INDEX).read_bytes()
    with pytest.raises(UserError, match=f"another target, prompts or settings .{told}"):
        prepare(tiny_target, source, folder, replace(SETTINGS, **change))
    assert (folder / INDEX).read_bytes() == before


def test_prompts_lie_where_they_like(folder: Path, source: str, tiny_target: Target, tmp_path: Path) -> None:
    """Their content tells them, as the fingerprint does the target; an older draftsmith had fewer settings."""
    copies = shutil.copytree(folder, tmp_path / "samples")
    prepared = read_prepared(copies)
    del prepared["settings"]["skip_long"]
    (copies / "prepared.json").write_text(json.dumps({**prepared, "target": "elsewhere"}))
    shutil.copy(source, tmp_path / "moved.txt")
    prepare(tiny_target, str(tmp_path / "moved.txt"), copies, SETTINGS)
    with pytest.raises(UserError, match="settings.skip_long False -> True"):
        prepare(tiny_target, source, copies, replace(SETTINGS, skip_long=True))


def test_edited_prompts_are_refused(source: str, tiny_target: Target, tmp_path: Path) -> None:
    """The same path with other prompts of the same number: the answers there belong to the old ones."""
    copy = tmp_path / "prompts.txt"
    copy.write_text(Path(source).read_text())
    prepare(tiny_target, str(copy), tmp_path / "out", SETTINGS)
    copy.write_text(Path(source).read_text().replace("iron", "gold"))
    with pytest.raises(UserError, match="another target, prompts or settings"):
        prepare(tiny_target, str(copy), tmp_path / "out", SETTINGS)


def test_samples_of_another_target_are_refused(
    folder: Path, tiny_target: Target, make_target_dir: Callable[..., Path]
) -> None:
    """Same shapes and tokenizer, other weights: nothing but the fingerprint tells them apart."""
    check_same_target(folder, tiny_target)
    other = Target.from_pretrained(make_target_dir(initializer_range=0.1), "cpu")
    with pytest.raises(UserError, match="prepare them again"):
        check_same_target(folder, other)


def test_samples_of_a_server_are_checked_by_what_it_wrote(
    folder: Path, tiny_target: Target, make_target_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """A server shows no weights to take a fingerprint of; greedy text shows who wrote it."""
    for name in (INDEX, SHARD):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "prepared.json").write_text(json.dumps({**read_prepared(folder), "target_fingerprint": None}))
    check_same_target(tmp_path, tiny_target)
    other = Target.from_pretrained(make_target_dir(initializer_range=0.1), "cpu")
    with pytest.raises(UserError, match="greedy tokens"):
        check_same_target(tmp_path, other)


DAMAGED_LINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda line: [line],
    "no ids": lambda line: {**line, "token_ids": []},
    "a negative id": lambda line: {**line, "token_ids": [-1, *line["token_ids"]]},
    "a huge id": lambda line: {**line, "token_ids": [2**70, *line["token_ids"]]},
    "an id that is text": lambda line: {**line, "token_ids": ["1", *line["token_ids"]]},
    "an id that is true": lambda line: {**line, "token_ids": [True, *line["token_ids"]]},
    "a field of another name": lambda line: {**line, "temprature": 0.5},
    "no spans": lambda line: {name: value for name, value in line.items() if name != "spans"},
    "a span of one bound": lambda line: {**line, "spans": [[1]]},
    "a reversed span": lambda line: {**line, "spans": [[4, 2, "answer"]]},
    "a span beyond the text": lambda line: {**line, "spans": [[1, len(line["token_ids"]) + 1, "answer"]]},
    "a negative span": lambda line: {**line, "spans": [[-2, 3, "answer"]]},
    "overlapping spans": lambda line: {**line, "spans": [[1, 4, "answer"], [3, 5, "answer"]]},
    "spans out of order": lambda line: {**line, "spans": [[3, 5, "answer"], [1, 3, "answer"]]},
    "an unknown end": lambda line: {**line, "finish_reason": "stop"},
    "a negative temperature": lambda line: {**line, "temperature": -1},
    "a top-p above 1": lambda line: {**line, "top_p": 1.5},
    "a domain that is a list": lambda line: {**line, "domain": ["code"]},
}


@pytest.mark.parametrize("damage", DAMAGED_LINES)
@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_line_that_is_no_sample_is_named(damage: str, has_checksum: bool, folder: Path, tmp_path: Path) -> None:
    """All of these trained silently, or ended in a traceback; also in folders of before there were checksums."""
    copy = in_lines(folder, tmp_path / "samples")
    lines = (copy / LINES).read_text().splitlines()
    lines[2] = json.dumps(DAMAGED_LINES[damage](json.loads(lines[2])))
    (copy / LINES).write_text("\n".join(lines) + "\n")
    if not has_checksum:
        (copy / CHECKSUM).unlink()
    with pytest.raises(UserError, match="samples.jsonl line 3 is damaged .*: remove samples.jsonl, and the same"):
        read_samples(copy)


def test_edited_samples_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another id within the vocabulary, or a line less, is a text that the target did not write: no range shows it."""
    copy = in_lines(folder, tmp_path / "samples")
    first, *others = (copy / LINES).read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["token_ids"][-1] ^= 1
    for edited in ([json.dumps(line) + "\n", *others], others):
        (copy / LINES).write_text("".join(edited))
        with pytest.raises(UserError, match="samples.jsonl was changed since .*; remove samples.jsonl.sha256"):
            read_samples(copy)
    notice_without_checksum(copy)
    assert not capsys.readouterr().err
    (copy / CHECKSUM).unlink()  # as an older draftsmith, which wrote none, left its folders
    assert len(read_samples(copy)) == NUM_PROMPTS - 1
    notice_without_checksum(copy)
    assert "have no checksum" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{", '{"target": 5}', '{"written_by": ["decoder"]}'])
def test_a_damaged_prepared_json_is_one_line(content: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "samples")
    (copy / PREPARED).write_text(content)
    with pytest.raises(UserError, match=r"prepared\.json"):
        read_prepared(copy)


def test_tokens_without_text_are_kept_and_counted(
    source: str, make_target_dir: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target samples from all rows of its head, those too that pad it beyond the tokenizer."""
    target = Target.from_pretrained(make_target_dir(initializer_range=0.1, vocab_size=1000), "cpu")
    prepare(target, source, tmp_path, replace(SETTINGS, samplings=(Sampling(1.0),)))
    samples = read_samples(tmp_path)
    count = sum(max(sample.token_ids) >= num_known_tokens(target) for sample in samples)
    assert count > 0
    assert f"{count} samples hold tokens that" in " ".join(capsys.readouterr().out.split())
    check_samples(samples, target, 100, "samples")


def test_lone_surrogates_are_replaced_or_refused(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scraped chats were cut within characters. Tokenizers and files take none of the halves; whole characters stay."""
    half, whole = "\\ud83d", "\\ud83d\\ude00"
    rows = [f'{{"prompt": "strike the {text} iron {i}"}}\n' for i in range(4) for text in (half, whole)]
    (path := tmp_path / "p.jsonl").write_text("".join(rows))
    settings = replace(SETTINGS, held_out_share=0.5)
    with pytest.raises(UserError, match=r"4 lone surrogates \(.* in 4 prompts, the first in .*p.jsonl line 1: mend"):
        prepare(tiny_target, str(path), tmp_path / "out", replace(settings, refuse_surrogates=True))
    assert not (tmp_path / "out").exists()
    prepare(tiny_target, str(path), tmp_path / "out", settings)
    assert "4 lone surrogates (halves of characters) in 4 prompts" in " ".join(capsys.readouterr().err.split())
    held_out = [prompt.text for prompt in read_prompts(tmp_path / "out" / "held_out.jsonl")]
    assert held_out
    texts = [f"strike the {character} iron {i}" for i in range(4) for character in "\ufffd\U0001f600"]
    assert held_out == [text for text in texts if text in held_out]
    assert len(read_samples(tmp_path / "out")) == 8 - len(held_out)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {name: value}
            for name in ("max_new_tokens", "batch_size", "draft_length")
            for value in (0, "many", 1.5, True)
        ),
        *({"held_out_share": value} for value in (1.0, float("nan"), "half")),
        *({"samplings": value} for value in ((), 5, (0.5,))),
        *({"seed": value} for value in (-1, 2**64)),
        {"endpoint": ""},
    ],
)
def test_settings_beyond_their_limits_are_one_line(change: dict[str, Any], source: str, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        AnswerJob(tiny_target, source, replace(SETTINGS, **change))


@pytest.mark.parametrize(
    "prompts",
    [["text"], [5], "text", [None], [{"prompt": "text"}]],
)
def test_what_is_no_prompt_is_one_line(prompts: Any, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="give a list of `Prompt`"):
        encode_prompts(prompts, tiny_target)
    texts = encode_prompts((Prompt("strike") for _ in range(2)), tiny_target)  # a generator is a list like others
    assert texts[0] == texts[1] == tiny_target.encode("strike")


def test_folder_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prepared samples"):
        read_samples(tmp_path)


@pytest.mark.parametrize("with_bad", [False, True])
def test_bad_prompts_leave_no_folder(with_bad: bool, tiny_target: Target, tmp_path: Path) -> None:
    """Too long for the context, or bad, and none is left to answer."""
    rows = [{"prompt": "iron " * tiny_target.context}, *([{"prompt": "<|endoftext|>iron"}] if with_bad else [])]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = replace(SETTINGS, skip_long=with_bad, max_bad_share=0.5)
    with pytest.raises(UserError, match="exceeds the target's context"):
        prepare(tiny_target, str(tmp_path / "prompts.jsonl"), tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_long_prompts_are_left_out_on_request(source: str, tiny_target: Target, tmp_path: Path) -> None:
    """Indices stay those of the prompts file, and with them the noise of the others."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("iron " * tiny_target.context + "\n" + Path(source).read_text())
    prepare(tiny_target, str(prompts), tmp_path / "out", replace(SETTINGS, skip_long=True))
    assert [sample.prompt_index for sample in read_samples(tmp_path / "out")] == list(range(1, NUM_PROMPTS + 1))
    assert read_prepared(tmp_path / "out")["num_skipped"] == 1


def test_estimate_of_a_fully_sampled_set_is_exact(source: str, samples: list[Sample], tiny_target: Target) -> None:
    found = estimate(AnswerJob(tiny_target, source, replace(SETTINGS, batch_size=NUM_PROMPTS)))
    assert found.generated == Spread(sum(len(sample.generated()) for sample in samples), 0)
    assert found.stored == Spread(sum(len(sample.token_ids) for sample in samples), 0)
    columns = sum(piece.nbytes for sample in samples for piece in pieces([sample]))
    assert found.disk == Spread(columns + sum(len(sample_line(sample)) for sample in samples), 0)
    assert found.feature_bytes(3, 2).total == found.stored.total * 4 * 32 * 2  # the tiny target is 32 wide


def test_spread_covers_the_total_as_often_as_it_says() -> None:
    """95 % of the intervals from samples of 100 out of 1,000 skewed lengths hold the true total."""
    generator = random.Random(0)
    values = [generator.expovariate(1.0) for _ in range(1000)]
    spreads = [Spread.over(generator.sample(values, 100), 1000) for _ in range(1000)]
    covered = sum(abs(spread.total - sum(values)) <= spread.margin for spread in spreads)
    assert 900 < covered < 980


def test_what_wrote_the_samples_is_kept(folder: Path, source: str, tiny_target: Target) -> None:
    prepared = json.loads((folder / "prepared.json").read_text())
    assert prepared["target_fingerprint"] == tiny_target.fingerprint()
    assert (prepared["prompts"], prepared["num_prompts"]) == (source, NUM_PROMPTS)
    assert [sampling["temperature"] for sampling in prepared["settings"]["samplings"]] == [0.0, 1.5]
