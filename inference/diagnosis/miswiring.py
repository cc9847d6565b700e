"""Experiments with another wiring: another target, template, layers, features, or map of the draft vocabulary.

A drafter's weights fit one wiring only, so that the right one lifts the acceptance at once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.diagnosis.replayed_drafter import ReplayedDrafter, plus, worthy_gain
from draftsmith.inference.measuring.results import Finding
from draftsmith.inference.replay.replay import (
    AcceptanceTrace,
    acceptance_trace,
    record,
    replay,
    select_layers,
)
from draftsmith.inference.replay.token_scores import score_drafter, score_target
from draftsmith.models import Target
from draftsmith.models.drafters.eagle3 import default_layer_ids
from draftsmith.models.layers import shift_left
from draftsmith.models.target.identity import PARTS
from draftsmith.models.target.target import Features

KNOWN = 0.9  # share of first drafted tokens that a drafter has which reads the answer
LEARNT = 1 / 3  # of that share: what a drafter has at least that learnt something else
AGAIN = 0.5  # share of places where a drafter that reads the answer drafts the newest token again
TAIL = 3  # last tokens of a prompt that show the template


# --- another target


def other_identity(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """What the checkpoint says of its target against the target itself."""
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
    """Prompts that do not end as the target's chat template opens an answer: put them into it, and decode again."""
    tokenizer, recording = replayed.target.tokenizer, replayed.recording
    if tokenizer is None or not tokenizer.chat_template:
        return
    tail = rendered(replayed.target, "x")[-TAIL:]
    outside = [prompt for prompt in recording.prompts if prompt[-TAIL:] != tail]
    if not outside:
        return
    contents = [str(tokenizer.decode(prompt, skip_special_tokens=True)) for prompt in outside]
    prompts = [rendered(replayed.target, content) for content in contents]
    room = max(map(len, prompts)) + recording.max_new_tokens <= replayed.target.context
    if not room:
        return
    inside = record(
        replayed.target, prompts, recording.sampling, recording.max_new_tokens, replayed.draft_length, recording.seed
    )
    now = replace(recording, prompts=outside, answers=[
        answer for prompt, answer in zip(recording.prompts, recording.answers, strict=True) if prompt[-TAIL:] != tail
    ])  # fmt: skip
    before, after = (
        replayed.stats(replay(replayed.target, texts, {"d": replayed.drafter}, replayed.draft_length)["d"])
        for texts in (now, inside)
    )
    if gain := worthy_gain(after, before):
        yield Finding(
            "template mismatch",
            {"prompts": len(recording.prompts), "outside_template": len(outside), "gain_inside": gain},
            f"{len(outside)} of {len(recording.prompts)} prompts do not end as the chat template opens an answer; "
            f"inside it, with the target's answers to that, {plus(gain)}",
            "give the prompts as messages, so that they are rendered as in training",
            gain["difference"],
        )


def rendered(target: Target, content: str) -> list[int]:
    """Token ids of a question in the chat template, opened for the answer."""
    assert target.tokenizer is not None
    messages = [{"role": "user", "content": content}]
    text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


# --- the wiring


@dataclass(frozen=True)
class Wiring:
    """What a drafter reads of the target."""

    layer_ids: tuple[int, ...]
    shift: int = 0  # features of so many places later
    before_norm: bool = False  # the last hidden state before the final norm

    def features(self, read: Features, all_ids: tuple[int, ...]) -> Features:
        """Out of the features of all layers."""
        last_hidden = read.last_hidden
        if self.before_norm:
            of_last = select_layers(read, all_ids, all_ids[-1:]).layers
            assert of_last is not None
            last_hidden = of_last
        features = select_layers(Features(last_hidden, read.layers), all_ids, self.layer_ids)
        layers = features.layers
        return Features(shifted(last_hidden, self.shift), None if layers is None else shifted(layers, self.shift))


def shifted(x: Tensor, by: int) -> Tensor:
    """x[:, t] <- x[:, t + by], zeros coming in."""
    return shift_left(x, by) if by >= 0 else shift_left(x.flip(1), -by).flip(1)


def wirings(replayed: ReplayedDrafter) -> dict[str, Wiring]:
    """Other wirings that a drafter may have been trained with, by the cause that they would be."""
    own, num_layers = replayed.drafter.layer_ids, replayed.target.num_layers
    found = {"features shifted (-1)": Wiring(own, -1), "features shifted (+1)": Wiring(own, 1)}
    if not own:
        return {**found, "features before the final norm": Wiring((), before_norm=True)}
    for layer_ids in (
        tuple(layer_id - 1 for layer_id in own),
        tuple(layer_id + 1 for layer_id in own),
        tuple(default_layer_ids(num_layers)),
    ):
        fits = len(layer_ids) == len(own) and layer_ids != own
        if fits and all(1 <= layer_id <= num_layers for layer_id in layer_ids):
            found[f"layer ids {list(layer_ids)}"] = Wiring(layer_ids)
    return found


def other_wiring(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """The best of the other wirings, where one of them lifts acceptance."""
    tried = rewired(replayed, wirings(replayed))
    if not reads_answer(replayed, tried["features shifted (+1)"]):
        del tried["features shifted (+1)"]
    gains = {name: gain for name, traces in tried.items() if (gain := replayed.gain(traces))}
    if not gains:
        return
    best = max(gains, key=lambda name: gains[name]["difference"])
    measured = {
        "layer_ids": list(replayed.drafter.layer_ids),
        "first_accepted": replayed.first_accepted(replayed.traces),
        "tried": gains,
    }
    if best.startswith("layer ids"):
        cause, mend = "wrong layer ids", f"give {best}, counted after N layers, in the drafter's config"
    elif best == "features shifted (+1)":
        cause = "features shifted"
        mend = "train it, and if it was, look for labels shifted by one: it learnt from features that hold the answer"
    else:
        cause, mend = best.partition(" (")[0], "train it on the features that the decoder gives"
    yield Finding(cause, measured, f"with {best}, {plus(gains[best])}", mend, gains[best]["difference"])


def rewired(replayed: ReplayedDrafter, tried: dict[str, Wiring]) -> dict[str, list[AcceptanceTrace]]:
    """The traces under each wiring; one pass of the target a text."""
    layer_ids = {layer_id for wiring in tried.values() for layer_id in wiring.layer_ids}
    all_ids = tuple(sorted({*layer_ids, replayed.target.num_layers}))
    traces: dict[str, list[AcceptanceTrace]] = {name: [] for name in tried}
    for index in range(len(replayed.traces)):
        batch, sampling = replayed.recording.batch(index, replayed.target.device), replayed.recording.sampling
        read = replayed.target.features(batch, all_ids)
        rated = score_target(replayed.target, read.last_hidden, batch, sampling)
        for name, wiring in tried.items():
            features = wiring.features(read, all_ids)
            scores = score_drafter(replayed.drafter, batch, features, replayed.draft_length, sampling)
            traces[name].append(acceptance_trace(replayed.recording, index, rated, scores))
    return traces


def reads_answer(replayed: ReplayedDrafter, later: list[AcceptanceTrace]) -> bool:
    """Whether it was trained on features of a place later, if at all: those hold the answer, and lift others too.

    Not so a drafter that learnt something: that gets some right, and does not draft the newest token again.
    """
    ids = replayed.target_ids()
    again = [
        ids[one.choice[:-1, 0]] == np.array(answer[: len(one.choice) - 1])
        for one, answer in zip(replayed.traces, replayed.recording.answers, strict=True)
    ]
    reads_it = replayed.first_accepted(later)
    learnt_nothing = replayed.first_accepted(replayed.traces) < LEARNT * reads_it
    return (learnt_nothing and reads_it >= KNOWN) or float(np.concatenate(again).mean()) >= AGAIN


# --- the draft vocabulary


def other_map(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """A map of the first ids only, or of others than `t2d` marks: what those bring, or a map found on other texts."""
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
    read = iter(maps)
    if gain := replayed.gain(
        replayed.with_accept(lambda one, accept: (next(read)[one.choice] == one.following).astype(float))
    ):
        low = float((replayed.target_ids() == np.arange(len(ids))).mean())
        yield Finding(
            "missing d2t",
            {"share_of_ids_unmapped": low, "gain": gain},
            f"{low:.0%} of the draft ids stand for the target's token of the same number; with {source}, {plus(gain)}",
            "write d2t, target id less draft id, as it was in training: it lies with the checkpoint",
            gain["difference"],
        )


def fitted_maps(replayed: ReplayedDrafter) -> list[np.ndarray]:
    """For each text a map [Vd]: the token that stood most often, in the other texts, where a draft id was likeliest."""
    pairs = [list(zip(one.choice[:, 0].tolist(), one.following[:, 0].tolist(), strict=True)) for one in replayed.traces]
    maps = []
    for index in range(len(pairs)):
        fitted = np.full(len(replayed.target_ids()), -2)
        counts = Counter(pair for number, text in enumerate(pairs) if number != index for pair in text)
        for (choice, token), _ in reversed(counts.most_common()):  # the commonest is written last
            if choice >= 0 and token >= 0:
                fitted[choice] = token
        maps.append(fitted)
    return maps
