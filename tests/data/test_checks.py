"""Each check is shown the fault that it is there for, and lets pass what is right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import FAMILIES, changed, chat_target
from families import KINDS, target_and_plain_model
from rich.console import Console

from draftsmith.data.prompts.checks import (
    check_capture,
    check_mask,
    check_prepared,
    check_samples,
    notice_other_target,
    notice_padding,
    notice_seen_prompts,
    shown_sample,
)
from draftsmith.data.samples.sample import Sample
from draftsmith.data.samples.samples import Samples
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.drafters.medusa import Medusa, MedusaConfig
from draftsmith.models.errors import UserError
from draftsmith.models.target.identity import identity

LLAMA3, CHATML = FAMILIES["llama3"], FAMILIES["chatml"]


def sample(token_ids: list[int], start: int = 1, index: int = 0) -> Sample:
    return Sample(token_ids, [Span(start, len(token_ids))], "eos", 0.0, 1.0, 0, index)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


# --- the mask


def sample_of(*spans: tuple[int, int]) -> Sample:
    return Sample([0] * 10, [Span(*span) for span in spans])


@pytest.mark.parametrize(
    ("spans", "max_length", "reason"),
    [
        ([[(3, 9)], [(5, 10)]], 3, "all answers in data begin beyond data.max_length=3: raise it"),
        ([[], [(5, 5)]], 20, "no token in data is trained on"),
        ([[(0, 10)], [(0, 4), (4, 10)]], 20, "every token in data is trained on, the prompts too"),
        ([[(0, 10)], [(0, 9)]], 8, "every token in data is trained on"),
    ],
)
def test_masks_of_nothing_and_of_everything_are_refused(spans: Any, max_length: int, reason: str) -> None:
    """Either trains to the end, with a loss that falls."""
    with pytest.raises(UserError, match=reason):
        check_mask(Samples.of([sample_of(*pairs) for pairs in spans]), max_length, "data")


def test_masks_between_are_fine() -> None:
    check_mask(Samples.of([sample_of((3, 9)), sample_of()]), 4, "data")


# --- tokens


def test_tokens_that_are_not_the_targets_are_refused() -> None:
    """Of five rows of padding the target may have sampled one; an id behind them is an index error on a GPU."""
    target = chat_target(CHATML, padding=5)
    last = target.vocab_size - 1
    check_samples(Samples.of([sample([1, last])]), target, 9, "data")
    assert "⟦⟧" in shown_sample(sample([1, last]), target).plain  # it has no text
    with pytest.raises(UserError, match=f"prompt 8 in data .sample 2. holds token id {last + 1}.*ends at {last}"):
        check_samples(Samples.of([sample([1, 2]), sample([1, last + 1], index=7)]), target, 9, "data")


def test_texts_beyond_the_context_are_refused_unless_given() -> None:
    target = chat_target(CHATML)
    long = sample([1] * (target.context + 1))
    with pytest.raises(UserError, match=f"prompt 1 in data .sample 1. has {target.context + 1} tokens"):
        check_samples(Samples.of([long]), target, 9, "data")
    check_samples(Samples.of([replace(long, finish_reason="given")]), target, 9, "data")


def test_padding_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    """And how often the target wrote it, which is legitimate: it sampled from all of its rows."""
    texts = Samples.of([sample([1, 260]), sample([1, 259])])
    notice_padding(texts, chat_target(CHATML))
    assert not said(capsys)
    notice_padding(texts, chat_target(CHATML, padding=5))
    assert "has 265 rows and its tokenizer 260 tokens" in (told := said(capsys))
    assert "which the target wrote in 1 samples" in told


def test_a_doubled_beginning_of_text_in_samples_is_refused() -> None:
    """A server may add one to token ids that have it."""
    target = chat_target(LLAMA3)
    assert target.tokenizer is not None
    bos = target.tokenizer.bos_token_id
    check_samples(Samples.of([sample([bos, 5, 6])]), target, 9, "data")
    with pytest.raises(UserError, match="prompt 4 in data .sample 2. begins with the beginning-of-text token twice"):
        check_samples(Samples.of([sample([bos, 5, 6]), sample([bos, bos, 6], index=3)]), target, 9, "data")


# --- who wrote it, and for whom


def other_targets() -> dict[str, tuple[str, Target]]:
    """The llama3 target with one thing changed: what the change is called, and the target."""
    other_template = changed(LLAMA3, "| trim", "")
    template, vocabulary, merges = chat_target(other_template), chat_target(LLAMA3), chat_target(LLAMA3)
    for target in (vocabulary, merges):
        assert target.tokenizer is not None
    vocabulary.tokenizer.add_tokens(["<|new|>"])  # type: ignore[union-attr]
    backend = json.loads(merges.tokenizer.backend_tokenizer.to_str())  # type: ignore[union-attr]
    backend["post_processor"] = None  # the vocabulary stays as it is, the BOS before texts is gone
    merges.tokenizer._tokenizer = type(merges.tokenizer.backend_tokenizer).from_str(json.dumps(backend))  # type: ignore[union-attr]
    return {
        "template": ("another chat template", template),
        "vocabulary": ("another tokenizer", vocabulary),
        "special tokens before texts": ("another tokenizer", merges),
    }


@pytest.mark.parametrize("case", other_targets())
def test_samples_and_drafters_of_another_tokenizer_or_template_are_refused(case: str, tmp_path: Path) -> None:
    """Shapes agree, everything loads, and acceptance is low for no visible reason."""
    target = chat_target(LLAMA3)
    name, other = other_targets()[case]
    (tmp_path / "prepared.json").write_text(json.dumps({**identity(target), "target": "own", "written_by": "decoder"}))
    check_prepared(tmp_path, target)
    with pytest.raises(UserError, match=f"{name}.*prepare them again"):
        check_prepared(tmp_path, other)

    save_drafter(Medusa.from_target(MedusaConfig(num_heads=1), target), tmp_path / "drafter")
    load_drafter(tmp_path / "drafter", target)
    with pytest.raises(UserError, match=f"drafter .*{name}.*train it again"):
        load_drafter(tmp_path / "drafter", other)


def test_a_drafter_for_other_weights_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measuring a drafter on a fine-tuned target is a thing to do; not knowing it is not."""
    torch.manual_seed(0)
    target, other = chat_target(LLAMA3), chat_target(LLAMA3)
    save_drafter(Medusa.from_target(MedusaConfig(num_heads=1), target), tmp_path)
    notice_other_target(load_drafter(tmp_path, target), target)
    notice_other_target(load_drafter("ngram", target), target)
    assert not said(capsys)
    notice_other_target(load_drafter(tmp_path, other), other)
    assert "trained for a target with other weights" in said(capsys)


def test_prompts_that_were_trained_on_are_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    samples = Samples.of([sample([1, 2, 3, 4], 2), sample([5, 6, 7], 2)])
    notice_seen_prompts([[1, 2, 3], [5]], samples)
    assert not said(capsys)
    notice_seen_prompts([[1, 2], [5]], samples)
    assert "1 of 2 prompts of the evaluation are also trained on" in said(capsys)


# --- features


def test_the_capture_of_layers_that_read_masks() -> None:
    """DeepSeek's sparse attention chooses by the mask, also in the plain forward that is compared with."""
    target, _ = target_and_plain_model(*KINDS["sparse attention"])
    check_capture(target, (1, 2), list(range(3, 20)))


def test_the_capture_is_that_of_a_plain_forward(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by one, in another order, without the final norm, or not a number."""
    token_ids = list(range(20))
    last = tiny_target.num_layers
    check_capture(tiny_target, (1, 3, last), token_ids)
    check_capture(tiny_target, (), token_ids)
    layers = tiny_target.decoder_layers
    with monkeypatch.context() as patch:
        patch.setattr(tiny_target, "decoder_layers", [*layers[1:], layers[0]])  # engines' other convention
        with pytest.raises(UserError, match="layer 1 of .* is not what a plain forward gives"):
            check_capture(tiny_target, (1, 2), token_ids)
        with pytest.raises(UserError, match=f"layer {last} of .* is not what a plain forward gives"):
            check_capture(tiny_target, (last,), token_ids)
        check_capture(tiny_target, (), token_ids)
    features = Target.features
    with monkeypatch.context() as patch:
        patch.setattr(tiny_target, "features", lambda *a: halved(features(tiny_target, *a)))
        with pytest.raises(UserError, match="the last hidden state"):
            check_capture(tiny_target, (1,), token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(tiny_target, "logits", lambda hidden: hidden @ torch.full((hidden.shape[-1], 300), float("nan")))
        with pytest.raises(UserError, match="the head's logits"):
            check_capture(tiny_target, (1,), token_ids)


def halved(features: Any) -> Any:
    features.last_hidden = features.last_hidden / 2
    return features


# --- what is shown


def test_a_sample_is_shown_with_its_mask() -> None:
    """By colour on a terminal, by brackets in a log."""
    target = chat_target(CHATML)
    ids = target.encode("<|im_start|>user\nhot?<|im_end|>\n<|im_start|>assistant\nRed.<|im_end|>")
    text = shown_sample(sample(ids, len(ids) - 5), target)
    assert text.plain.endswith("<|im_start|>assistant\n⟦Red.<|im_end|>⟧")
    assert f"5 of its {len(ids)} tokens" in text.plain
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as capture:
        console.print(text)
    assert "\x1b[32m⟦Red.<|im_end|>⟧\x1b[0m" in capture.get()


def test_long_samples_are_shortened() -> None:
    target = chat_target(CHATML)
    text = shown_sample(sample(target.encode("a" * 4000), 2000), target)
    assert len(text.plain) < 1000
