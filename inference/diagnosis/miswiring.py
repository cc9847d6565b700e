"""Experiments with another wiring: another target, template, layers, features, or map of the draft vocabulary.

The weights of a drafter fit one wiring only. So where it was given a wrong one, the right one raises its acceptance at
once.

Shapes: B rows, T tokens of a text, Vd draft vocabulary.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.diagnosis.replayed_drafter import ReplayedDrafter, gain_text, significant_gain
from draftsmith.inference.measuring.results import Finding
from draftsmith.inference.replay.replay import (
    AcceptanceTrace,
    acceptance_trace,
    read_texts,
    record,
    replay,
    select_layers,
)
from draftsmith.inference.replay.token_scores import score_drafter
from draftsmith.models.layers import shift_left
from draftsmith.models.target.chat_template import opened_question
from draftsmith.models.target.identity import PARTS
from draftsmith.models.target.target import Features, spread_layer_ids

KNOWN = 0.9  # least share of first drafted tokens that is accepted where features hold the answer
LEARNT = 1 / 3  # least part of that share that a drafter reaches on its own features if it was trained on them
AGAIN = 0.5  # least share of places where a drafter that learnt to copy the answer drafts the newest token again
TAIL = 3  # last tokens of a prompt, which show the template


# --- another target


def other_identity(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Compare what the checkpoint says of its target with the target itself."""
    for key, recorded in (replayed.drafter.trained_for or {}).items():
        name, fingerprint = PARTS[key]
        if recorded != (own := fingerprint(replayed.target)):
            yield Finding(
                "template mismatch" if key == "template_hash" else "fingerprint mismatch",
                {"recorded": recorded, "found": own},
                f"the drafter was trained for {name} ({key} {recorded}) than {replayed.target.name} has ({own})",
                "serve it with the target, tokenizer and template that it was trained for, or train it for this one",
                None,
            )


def other_template(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Decode prompts again inside the target's chat template, those that do not end as it opens an answer."""
    target, recording = replayed.target, replayed.recording
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    tail = opened_question(target, "x")[-TAIL:]
    outside = [index for index, prompt in enumerate(recording.prompts) if prompt[-TAIL:] != tail]
    if not outside:
        return
    contents = [str(tokenizer.decode(recording.prompts[index], skip_special_tokens=True)) for index in outside]
    prompts = [opened_question(target, content) for content in contents]
    if max(map(len, prompts)) + recording.max_new_tokens > target.context:
        return
    inside = record(
        target, prompts, recording.sampling, recording.max_new_tokens, replayed.draft_length, recording.seed
    )
    traces = replay(target, inside, {"drafter": replayed.drafter}, replayed.draft_length)["drafter"]
    before = replayed.stats([replayed.traces[index] for index in outside])
    if gain := significant_gain(replayed.stats(traces), before):
        yield Finding(
            "template mismatch",
            {"prompts": len(recording.prompts), "outside_template": len(outside), "gain_inside": gain},
            f"{len(outside)} of {len(recording.prompts)} prompts do not end as the chat template opens an answer; "
            f"inside it, with the target's answers to that, {gain_text(gain)}",
            "give the prompts as messages, so that they are rendered as in training",
            gain.difference,
        )


# --- the wiring


@dataclass(frozen=True)
class Wiring:
    """The features of the target that a drafter reads."""

    layer_ids: tuple[int, ...]
    shift: int = 0  # each slot gets the features of the slot that is so many later
    before_norm: bool = False  # the last hidden state is read before the final norm

    def features(self, features: Features, all_ids: tuple[int, ...]) -> Features:
        """Return what the drafter reads out of the features of all layers."""
        last_hidden = features.last_hidden
        if self.before_norm:
            of_last_layer = select_layers(features, all_ids, all_ids[-1:]).layers
            assert of_last_layer is not None
            last_hidden = of_last_layer
        layers = select_layers(features, all_ids, self.layer_ids).layers
        return Features(shifted(last_hidden, self.shift), None if layers is None else shifted(layers, self.shift))


def shifted(x: Tensor, by: int) -> Tensor:
    """Return x [B, T, ...] with x[:, t + by] at t, and zeros beyond its ends."""
    return shift_left(x, by) if by >= 0 else shift_left(x.flip(1), -by).flip(1)


def other_wirings(replayed: ReplayedDrafter) -> dict[str, Wiring]:
    """Return other wirings that the drafter may have been trained with, by their names."""
    own, num_layers = replayed.drafter.layer_ids, replayed.target.num_layers
    wirings = {"features shifted (-1)": Wiring(own, -1), "features shifted (+1)": Wiring(own, 1)}
    if not own:
        return {**wirings, "features before the final norm": Wiring((), before_norm=True)}
    for layer_ids in (
        tuple(layer_id - 1 for layer_id in own),
        tuple(layer_id + 1 for layer_id in own),
        tuple(spread_layer_ids(num_layers)),
    ):
        fits = len(layer_ids) == len(own) and layer_ids != own
        if fits and all(1 <= layer_id <= num_layers for layer_id in layer_ids):
            wirings[f"layer ids {list(layer_ids)}"] = Wiring(layer_ids)
    return wirings


def other_wiring(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Find the best of the other wirings, where one of them lifts acceptance."""
    traces_by_wiring = traces_with(replayed, other_wirings(replayed))
    if not reads_answer(replayed, traces_by_wiring["features shifted (+1)"]):
        del traces_by_wiring["features shifted (+1)"]
    gains = {name: gain for name, traces in traces_by_wiring.items() if (gain := replayed.gain(traces))}
    if not gains:
        return
    best = max(gains, key=lambda name: gains[name].difference)
    if best.startswith("layer ids"):
        cause, mend = "wrong layer ids", f"give {best}, counted after N layers, in the drafter's config"
    elif best == "features shifted (+1)":
        cause = "features shifted"
        mend = "train it, and if it was, look for labels shifted by one: it learnt from features that hold the answer"
    else:
        cause, mend = best.partition(" (")[0], "train it on the features that the decoder gives"
    measured = {
        "layer_ids": list(replayed.drafter.layer_ids),
        "first_accepted": replayed.first_accepted(replayed.traces),
        "tried": gains,
    }
    yield Finding(cause, measured, f"with {best}, {gain_text(gains[best])}", mend, gains[best].difference)


def traces_with(replayed: ReplayedDrafter, wirings: dict[str, Wiring]) -> dict[str, list[AcceptanceTrace]]:
    """Return the traces under each wiring. The target reads each text once."""
    target, recording = replayed.target, replayed.recording
    layer_ids = {layer_id for wiring in wirings.values() for layer_id in wiring.layer_ids}
    all_ids = tuple(sorted({*layer_ids, target.num_layers}))
    traces: dict[str, list[AcceptanceTrace]] = {name: [] for name in wirings}
    for index, (batch, features, target_scores) in enumerate(read_texts(target, recording, all_ids)):
        for name, wiring in wirings.items():
            wired = wiring.features(features, all_ids)
            scores = score_drafter(replayed.drafter, batch, wired, replayed.draft_length, recording.sampling)
            traces[name].append(acceptance_trace(recording, index, target_scores, scores))
    return traces


def reads_answer(replayed: ReplayedDrafter, shifted_traces: list[AcceptanceTrace]) -> bool:
    """Return whether the drafter was trained on the features of one slot later, by its traces on such features.

    They hold the answer, so that they raise the acceptance of rightly trained drafters, too. But these get some tokens
    right on their own features, and do not draft the newest token again there.
    """
    ids = replayed.target_ids
    again = [
        ids[trace.choice[:-1, 0]] == np.array(answer[: len(trace.choice) - 1])
        for trace, answer in zip(replayed.traces, replayed.recording.answers, strict=True)
    ]
    with_answer = replayed.first_accepted(shifted_traces)
    learnt_nothing = replayed.first_accepted(replayed.traces) < LEARNT * with_answer
    return (learnt_nothing and with_answer >= KNOWN) or float(np.concatenate(again).mean()) >= AGAIN


# --- the draft vocabulary


def other_map(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Find out what another map to target ids gains, where the drafter's own looks wrong.

    A map looks wrong where it has other ids than `t2d` marks; then the map that `t2d` marks is tried. It also looks
    wrong where it has the first ids only; then a map that was fitted to the other texts is tried.
    """
    ids, marked = replayed.drafter.draft_to_target(), getattr(replayed.drafter, "t2d", None)
    if ids is None:
        return
    marked_ids = marked.nonzero()[:, 0] if isinstance(marked, Tensor) else ids
    if len(marked_ids) == len(ids) and not torch.equal(marked_ids, ids):
        maps, source = [marked_ids.cpu().numpy()] * len(replayed.traces), "the map that t2d marks"
    elif torch.equal(ids.cpu(), torch.arange(len(ids))):
        maps, source = fitted_maps(replayed), "a map fitted to the other texts"
    else:
        return
    next_map = iter(maps)
    gain = replayed.gain(
        replayed.with_accept(lambda trace, accept: (next(next_map)[trace.choice] == trace.following).astype(float))
    )
    if gain:
        unmapped = float((replayed.target_ids == np.arange(len(ids))).mean())
        yield Finding(
            "missing d2t",
            {"share_of_ids_unmapped": unmapped, "gain": gain},
            f"{unmapped:.0%} of the draft ids stand for the target's token of the same number; with {source}, "
            f"{gain_text(gain)}",
            "write d2t, target id less draft id, as it was in training: it lies with the checkpoint",
            gain.difference,
        )


def fitted_maps(replayed: ReplayedDrafter) -> list[np.ndarray]:
    """Return a map [Vd] for each text: to each draft id, the commonest token of the other texts where it was likeliest.

    -2 stands for ids that never were, since it equals no token.
    """
    pairs = [
        list(zip(trace.choice[:, 0].tolist(), trace.following[:, 0].tolist(), strict=True)) for trace in replayed.traces
    ]
    maps = []
    for index in range(len(pairs)):
        fitted = np.full(len(replayed.target_ids), -2)
        counts = Counter(pair for number, text in enumerate(pairs) if number != index for pair in text)
        for (choice, token), _ in reversed(counts.most_common()):  # the commonest is written last
            if choice >= 0 and token >= 0:
                fitted[choice] = token
        maps.append(fitted)
    return maps
