"""A bad row costs itself alone where the user allows some: the others are answered as if it stood nowhere."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from chats import FAMILIES, chat_target

from draftsmith.data.answers.off_policy import store_conversations
from draftsmith.data.answers.prepare import AnswerJob, PrepareSettings, prepare
from draftsmith.data.bad_rows import BAD_ROWS
from draftsmith.data.samples import folder as folder_module
from draftsmith.data.samples.folder import read_samples
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.recipes.configs.data_settings import PrepareCommandSettings

GOOD = [{"role": "user", "content": "how hot is iron?"}, {"role": "assistant", "content": "Red."}]
RENDERED = [{"role": "user", "content": "<|im_start|>user"}, {"role": "assistant", "content": "Red."}]
BAD = {  # by what is said of them: lines that give no prompt, or none that the target could read
    "is not JSON": '{"messages": [',
    'has no "prompt" text': '{"text": "strike"}',
    "is not a list of objects": '{"messages": "strike"}',
    "it has been rendered before": json.dumps({"messages": RENDERED}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return chat_target(FAMILIES["qwen3"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Eight good rows, with a bad one behind each of the first four."""
    lines = []
    for number in range(8):
        question = {**GOOD[0], "content": f"how hot is iron {number}?"}
        lines.append(json.dumps({"messages": [question, GOOD[1]], "domain": str(number)}))
        lines += list(BAD.values())[number : number + 1]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "rows.jsonl"


def settings(max_bad_share: float) -> PrepareSettings:
    return PrepareSettings(4, (Sampling(0.0),), max_bad_share=max_bad_share)


def write(target: Target, source: Path, out: Path, as_given: bool, max_bad_share: float) -> None:
    if as_given:
        store_conversations(target, str(source), out, max_bad_share=max_bad_share)
    else:
        prepare(target, str(source), out, settings(max_bad_share))


@pytest.mark.parametrize("as_given", [False, True])
def test_bad_rows_are_left_out_and_listed(as_given: bool, source: Path, target: Target, tmp_path: Path) -> None:
    write(target, source, tmp_path / "out", as_given, 4 / 12)
    assert [sample.domain for sample in read_samples(tmp_path / "out")] == list("01234567")
    rows = [json.loads(line) for line in (tmp_path / "out" / BAD_ROWS).read_text().splitlines()]
    lines = [2, 4, 6, 8]
    assert [row["where"] for row in rows] == [f"{source} line {line}" for line in lines]
    for row, said in zip(rows, BAD, strict=True):
        assert said in row["reason"], row


@pytest.mark.parametrize("as_given", [False, True])
@pytest.mark.parametrize(
    ("max_bad_share", "message"),
    [(0.0, "line 2 is not JSON"), (3.5 / 12, "4 of 12 rows are bad, more than --max-bad-share .*line 2 is not")],
)
def test_more_bad_rows_end_the_run(
    as_given: bool, max_bad_share: float, message: str, source: Path, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        write(target, source, tmp_path / "out", as_given, max_bad_share)
    assert not (tmp_path / "out").exists()


def test_a_mixture_counts_the_rows_that_it_does_not_take(source: Path, target: Target, tmp_path: Path) -> None:
    """Three of the twelve rows give no prompt; of the nine others, one of which is bad, the mixture takes one."""
    (tmp_path / "mix.yaml").write_text(f"sources: [{{source: {source}}}]\nnum_prompts: 1\n")
    job = AnswerJob(target, str(tmp_path / "mix.yaml"), settings(4 / 12))
    assert (len(job.kept), len(job.bad.rows), job.bad.num_rows) == (1, 3, 12)


def test_all_cores_find_what_one_finds(
    source: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, the hash of the prompts and the bad rows, in the order of the prompts."""
    alone = AnswerJob(target, str(source), settings(0.5))
    write(target, source, tmp_path / "alone", True, 0.5)
    monkeypatch.setattr(folder_module, "SHARD_INPUTS", 2)
    shared = AnswerJob(target, str(source), settings(0.5))
    assert (shared.hash, shared.lengths, shared.kept, shared.bad) == (alone.hash, alone.lengths, alone.kept, alone.bad)
    write(target, source, tmp_path / "shared", True, 0.5)
    assert len(list((tmp_path / "shared").glob("*.arrow"))) > 1
    assert list(read_samples(tmp_path / "shared")) == list(read_samples(tmp_path / "alone"))
    assert (tmp_path / "shared" / BAD_ROWS).read_text() == (tmp_path / "alone" / BAD_ROWS).read_text()


def test_the_first_rows_are_refused_at_once_unless_they_may_be_bad(source: Path, tiny_target_dir: Path) -> None:
    """Before anything is loaded, in which a user would wait."""
    settings = PrepareCommandSettings(target=str(tiny_target_dir), prompts=str(source), out=source.parent / "out")
    with pytest.raises(UserError, match="line 2 is not JSON"):
        settings.refuse_mistakes()
    replace(settings, max_bad_share=0.5).refuse_mistakes()
