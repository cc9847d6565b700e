"""Drafters broken in known ways, each named for what it is, and sound ones, of which nothing is said."""

import copy
import dataclasses
import html
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from drafters import batch_of
from reports import typed_result

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.diagnosis.diagnose import diagnose, is_low
from draftsmith.inference.diagnosis.miswiring import shifted
from draftsmith.inference.diagnosis.replayed_drafter import Reference
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.measuring.results import Evaluation, Finding, Result
from draftsmith.inference.replay.replay import Recording, expected_stats, record, replay
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter, save_drafter
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.target.chat_template import opened_question
from draftsmith.models.target.identity import identity
from draftsmith.models.target.target import Features
from draftsmith.recipes.evaluation.comparison import evaluate_side_by_side
from draftsmith.recipes.evaluation.diagnoses import with_diagnoses
from draftsmith.recipes.report_data.reading import read_report_data
from draftsmith.recipes.reports import report
from draftsmith.recipes.reports.acceptance import diagnosis
from draftsmith.recipes.reports.report import build_report

TEXTS = ["The smith", "def strike(", "heats it again", "A draft is", "iron iron", "x", "cheap to make", "return ["]
MORE_TEXTS = ["return [iron", "throw it away", "def x", "smith heats", "the draft", "cheap iron", "A smith", "it is"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|endoftext|>Q: ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:\n' }}{% endif %}"
)
NUM_TOKENS, DRAFT_LENGTH, STEPS = 16, 3, 110


@pytest.fixture(scope="module")
def target(tiny_target_dir: Any) -> Target:
    """The tiny one, which chats."""
    target = Target.from_pretrained(tiny_target_dir, "cpu", torch.float32)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = TEMPLATE
    return target


@pytest.fixture(scope="module")
def recording(target: Target) -> Recording:
    return record(target, [opened_question(target, text) for text in TEXTS], Sampling(), NUM_TOKENS, DRAFT_LENGTH)


def learnt_by_heart(target: Target, recording: Recording, steps: int, shift: int = 0, **config: Any) -> Drafter:
    """An EAGLE-3 drafter trained on the very texts, with features `shift` places later where that is not 0."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    kind = DRAFTERS["eagle3"]
    settings = {"kind": "eagle3", "unroll_steps": DRAFT_LENGTH, "layer_ids": [1, 2], **config}
    drafter = kind.from_target(kind.config_class(**settings), target).train()
    batch = batch_of(recording.prompts, recording.answers)
    drafter.fit_vocabulary(torch.bincount(batch.token_ids[batch.loss_mask], minlength=target.vocab_size))
    features = target.features(batch, drafter.layer_ids)
    assert features.layers is not None
    features = Features(features.last_hidden, shifted(features.layers, shift))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], 1e-2)
    # A rate that falls in the last third, or what the last step changed would decide.
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 3 * (1 - step / steps)))
    for _ in range(steps):
        total, count = drafter.loss(batch, features)["loss"]
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        falling.step()
    drafter.trained_for = identity(target)
    return drafter.eval()


@pytest.fixture(scope="module")
def sound(target: Target, recording: Recording) -> Drafter:
    return learnt_by_heart(target, recording, STEPS)


def found(target: Target, drafter: Drafter, recording: Recording, **more: Any) -> list[Finding]:
    return diagnose(target, drafter, recording, DRAFT_LENGTH, **more)


def acceptance(target: Target, drafter: Drafter, recording: Recording) -> Stats:
    traces = replay(target, recording, {"d": drafter}, DRAFT_LENGTH)["d"]
    stats = [expected_stats(trace, Chain(DRAFT_LENGTH), "greedy") for trace in traces]
    return sum(stats[1:], stats[0])


@pytest.fixture
def reported(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Causes that the report names after an evaluation of the drafter's checkpoint on prompts."""
    monkeypatch.setattr(report, "draw_plots", lambda plots, folder: {})

    def causes(drafter: Drafter, prompts: list[list[int]]) -> list[str]:
        save_drafter(drafter, tmp_path / "drafter")
        # beside the row that the report leads with, at one token: too few for causes that show behind it
        grid = [MeasureSettings(draft=k, max_new_tokens=NUM_TOKENS, repeats=1) for k in (DRAFT_LENGTH, 1)]
        evaluate_side_by_side(target, [str(tmp_path / "drafter")], [PromptSet("p", prompts)], grid, tmp_path / "out")
        table = diagnosis(read_report_data(tmp_path / "out")).tables[0]
        page = build_report(tmp_path / "out").read_text()
        section = page[page.index('id="diagnosis"') :]
        assert all(f">{row[4].text}</td>" in html.unescape(section) for row in table.rows)
        return table.column("cause")

    return causes


def test_a_sound_drafter_is_called_sound(target: Target, sound: Drafter, recording: Recording) -> None:
    stats = acceptance(target, sound, recording)
    assert stats.mean_acceptance_length > 3
    assert not is_low(stats)
    assert found(target, sound, recording, domains=["a", "b"] * 4, reference=Reference(0.9, "metrics", True)) == []


def test_a_drafter_that_was_trained_too_little_is_not_called_miswired(target: Target, recording: Recording) -> None:
    drafter = learnt_by_heart(target, recording, 12)
    assert is_low(acceptance(target, drafter, recording))
    assert {one.cause for one in found(target, drafter, recording)} <= {"decay with depth", "high target entropy"}


def test_wrong_layer_ids(target: Target, sound: Drafter, recording: Recording, reported: Any) -> None:
    drafter = copy.copy(sound)
    drafter.layer_ids = (2, 3)
    drafter.config = dataclasses.replace(cast(Any, sound.config), layer_ids=[2, 3])
    assert is_low(acceptance(target, drafter, recording))
    first = found(target, drafter, recording)[0]
    assert first.cause == "wrong layer ids"
    assert "layer ids [1, 2]" in first.mend
    right = acceptance(target, sound, recording).mean_acceptance_length
    assert first.cost == pytest.approx(right - acceptance(target, drafter, recording).mean_acceptance_length)
    assert reported(drafter, recording.prompts)[0] == "wrong layer ids"


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_features(shift: int, target: Target, recording: Recording, reported: Any) -> None:
    """Trained on the features of the place before, or of the place after, which hold the answer."""
    drafter = learnt_by_heart(target, recording, STEPS, shift)
    first = found(target, drafter, recording)[0]
    assert first.cause == "features shifted"
    assert f"({shift:+d})" in first.evidence
    if shift == 1:
        assert reported(drafter, recording.prompts)[0] == "features shifted"


def test_missing_d2t(target: Target, reported: Any) -> None:
    """Without t2d a map is fitted to other texts, which takes more of them."""
    prompts = [opened_question(target, text) for text in TEXTS + MORE_TEXTS]
    recording = record(target, prompts, Sampling(), NUM_TOKENS, DRAFT_LENGTH)
    drafter = learnt_by_heart(target, recording, STEPS, draft_vocab_size=128)
    assert found(target, drafter, recording) == []
    drafter.d2t.zero_()
    for marked in (True, False):  # t2d still tells which tokens there were, or is missing, too
        if not marked:
            drafter.t2d.copy_(torch.arange(target.vocab_size) < 128)
        causes = [one.cause for one in found(target, drafter, recording)]
        assert causes[0] == "missing d2t"
        assert "draft vocabulary" not in causes  # what the map would cover is not known
    assert reported(drafter, recording.prompts)[0] == "missing d2t"


def test_truncated_vocabulary(target: Target, recording: Recording, reported: Any) -> None:
    drafter = learnt_by_heart(target, recording, STEPS, draft_vocab_size=24)
    (first, *_) = found(target, drafter, recording)
    assert first.cause == "draft vocabulary"
    assert reported(drafter, recording.prompts)[0] == "draft vocabulary"
    ids = drafter.draft_to_target()
    assert ids is not None
    written = torch.tensor([token for answer in recording.answers for token in answer[1:]])
    assert first.measured["share_outside"] == pytest.approx(float((~torch.isin(written, ids)).float().mean()), abs=0.05)


def test_wrong_template(target: Target, sound: Drafter, recording: Recording, reported: Any) -> None:
    """Bare prompts for a drafter that knows them in the template; and a checkpoint of another template."""
    bare = record(target, [target.encode(text) for text in TEXTS], Sampling(), NUM_TOKENS, DRAFT_LENGTH)
    causes = found(target, sound, bare)
    assert causes[0].cause == "template mismatch"
    assert causes[0].measured["outside_template"] == len(TEXTS)
    assert reported(sound, bare.prompts)[0] == "template mismatch"
    other = copy.copy(sound)
    other.trained_for = {**(sound.trained_for or {}), "template_hash": "0" * 16}
    (first,) = found(target, other, recording)
    assert first.cause == "template mismatch"
    assert first.measured["recorded"] == "0" * 16


def test_decay_with_depth(target: Target, recording: Recording) -> None:
    """Trained on one step, drafting three."""
    drafter = learnt_by_heart(target, recording, STEPS, unroll_steps=1)
    causes = found(target, drafter, recording)
    assert causes[0].cause == "decay with depth"
    assert not any(one.cause in ("wrong layer ids", "features shifted") for one in causes)


def test_domain_shift(target: Target, sound: Drafter, recording: Recording) -> None:
    """Prompts that it knows and prompts that it does not; and all of the latter, against what it had before."""
    strange = [opened_question(target, text) for text in ("3.14", "zebra", "Why?", "[[[[")]
    mixed = record(target, [*recording.prompts[:4], *strange], Sampling(), NUM_TOKENS, DRAFT_LENGTH)
    first = found(target, sound, mixed, domains=["known"] * 4 + ["strange"] * 4)[0]
    assert first.cause == "domain shift"
    assert first.measured["domain"] == "strange"
    only = dataclasses.replace(mixed, prompts=mixed.prompts[4:], answers=mixed.answers[4:])
    reference = Reference(0.95, "evaluation.json", in_training=False)
    assert "domain shift" in [one.cause for one in found(target, sound, only, reference=reference)]
    reference = Reference(0.95, "metrics.jsonl", in_training=True)
    assert "position-0 collapse" in [one.cause for one in found(target, sound, only, reference=reference)]


def test_target_entropy(target: Target, sound: Drafter, recording: Recording) -> None:
    """At a temperature at which the target draws almost evenly no proposal is good, and none is at fault."""
    hot = record(target, recording.prompts, Sampling(5.0), NUM_TOKENS, DRAFT_LENGTH)
    (entropy,) = found(target, sound, hot)
    assert entropy.cause == "high target entropy"
    ceiling = entropy.measured
    best = SpeculativeDecoder(target, load_drafter("none", target)).generate(recording.prompts, 1).stats.total
    assert best.mean_acceptance_length <= ceiling["ceiling_acceptance_length"] < 2


def test_temperature(target: Target, sound: Drafter, recording: Recording) -> None:
    """A sampled row is told where temperature 0, measured in the same run, is better."""
    row = typed_result(0.5, 1.0, length=DRAFT_LENGTH)
    setting = replace(row.setting, prompt_set="p", max_new_tokens=NUM_TOKENS)
    well = replace(row, setting=setting, acceptance=Stats(DRAFT_LENGTH, 40, 120, 120, 160, 40, [0, 0, 0, 40]))
    badly = replace(
        row,
        setting=replace(setting, temperature=5.0, verification_mode="one_hot"),
        acceptance=Stats(DRAFT_LENGTH, 40, 120, 0, 40, 40, [40, 0, 0, 0]),
    )
    prompts = PromptSet("p", recording.prompts)

    def diagnosed(*rows: Result) -> list[Result]:
        evaluation = Evaluation(
            target="t", drafter="d", drafter_kind="k", environment=environment(target), results=list(rows)
        )
        (evaluation,) = with_diagnoses([evaluation], [sound], target, [prompts])
        return evaluation.results

    greedy, sampled = diagnosed(well, badly)
    assert greedy.diagnosis is None
    (finding,) = sampled.diagnosis
    assert (finding.cause, finding.measured["temperature"]) == ("temperature", 5.0)
    assert finding.cost > 1
    assert diagnosed(badly)[0].diagnosis is None
