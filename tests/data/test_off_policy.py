"""Given conversations on disk: the sample format of target-written text, marked as what it is."""

import json
from pathlib import Path

import pytest
from chats import FAMILIES, chat_target

from draftsmith.data.answers.off_policy import store_conversations
from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.data.prompts.splits import HELD_OUT
from draftsmith.data.samples.folder import read_prepared, read_samples
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling


@pytest.fixture(scope="module")
def target() -> Target:
    return chat_target(FAMILIES["qwen3"])


def write_conversations(path: Path, count: int) -> str:
    rows = [
        {
            "domain": "heat",
            "messages": [
                {"role": "user", "content": f"how hot is iron {i}?"},
                {"role": "assistant", "content": f"<think>\nlook {i}\n</think>\n\nRed."},
            ],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    return str(path)


def test_given_conversations_are_samples_marked_off_policy(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_conversations(target, write_conversations(tmp_path / "c.jsonl", 3), tmp_path / "out")
    samples, prepared = read_samples(tmp_path / "out"), read_prepared(tmp_path / "out")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store_conversations(target, str(tmp_path / "c.jsonl"), tmp_path / "other")
    assert not (tmp_path / "other").exists()  # two processes would write the same files
    assert (prepared["written_by"], prepared["num_prompts"]) == ("given", 3)  # the fourth is the first
    assert "left out 1 of 4 prompts" in capsys.readouterr().err
    assert target.tokenizer is not None
    for i, sample in enumerate(samples):
        thought, answer = (target.tokenizer.decode(sample.token_ids[s.start : s.end]) for s in sample.spans)
        assert thought == f"<think>\nlook {i}\n</think>"
        assert answer == "\n\nRed.<|im_end|>"
        assert [span.label for span in sample.spans] == ["thinking", "answer"]
        assert isinstance(sample.spans[0], Span)
        assert (sample.finish_reason, sample.domain, sample.prompt_index) == ("given", "heat", i)


def test_a_bad_conversation_leaves_no_folder(target: Target, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "hot?"}]}\n')
    with pytest.raises(UserError, match="c.jsonl line 1 has no answer"):
        store_conversations(target, str(tmp_path / "c.jsonl"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_same_prompts_are_held_out_whoever_answers(target: Target, tmp_path: Path) -> None:
    """What one run holds out the other may not train on, whether the target answers or the answers are given."""
    source = write_conversations(tmp_path / "c.jsonl", 20)
    store_conversations(target, source, tmp_path / "given", 0.3)
    settings = PrepareSettings(max_new_tokens=4, samplings=(Sampling(),), held_out_share=0.3)
    prepare(target, source, tmp_path / "written", settings)
    given, written = (read_prompts(str(tmp_path / name / HELD_OUT)) for name in ("given", "written"))
    assert given == written
    assert {prompt.domain for prompt in written} == {"heat"}
    for folder in (tmp_path / "given", tmp_path / "written"):
        assert len(read_samples(folder)) + len(written) == 20
        assert read_prepared(folder)["num_held_out"] == len(written)
    assert read_prepared(tmp_path / "written")["written_by"] == "decoder"
