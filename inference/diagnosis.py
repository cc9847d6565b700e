"""Why a drafter's acceptance is low: each cause is a measurement or an experiment on texts that the target wrote.

Every cause says what it costs, in tokens a round: the acceptance length that the recorded texts would have if the
cause were gone, replayed round by round, less the one they have. It is named where that is at least `WORTH` and its
paired interval over prompts leaves out 0. Where a drafter may be wired wrongly, it is tried with the other wiring, with
neighbouring layers, features of the place before or after, another map of its vocabulary: weights fit one wiring
only, so that the right one lifts the acceptance at once. docs/diagnosis.md says what was tested.

Shapes: N places of an answer where a round can start, K depths.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.replay import (
    Recording,
    Track,
    expected_stats,
    length_interval,
    paired_difference,
    record,
    replay,
    select_layers,
    starts,
    survival,
    text_batch,
    track,
)
from draftsmith.inference.stats import Stats
from draftsmith.inference.verify import VerificationMode
from draftsmith.models import Drafter, Target
from draftsmith.models.eagle3 import default_layer_ids
from draftsmith.models.identity import PARTS
from draftsmith.models.layers import shift_left
from draftsmith.models.scores import score_drafter, score_target
from draftsmith.models.target import Features
from draftsmith.models.trees import Chain

LOW_FIRST = 0.6  # share of first drafted tokens accepted, below which acceptance is low
LOW_FALL = 0.5  # and the share of it that a later token, all before it accepted, must reach
LEAST_ROUNDS = 20  # that reached a depth, for its rate to say anything
WORTH = 0.2  # tokens a round that a cause must cost
LEAST_PROMPTS = 4  # of fewer, an interval over prompts says nothing
SURE = 0.5  # probability of the target's likeliest token from which on it is sure
KNOWN = 0.8  # share of first drafted tokens accepted, as of a drafter that reads the answer
TAIL = 3  # last tokens of a prompt that show the template

Finding = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """What the drafter accepted before: of the first drafted tokens, and where that was measured."""

    first_accepted: float
    source: str  # a file
    in_training: bool  # on the training text, else on an evaluation's prompts


@dataclass
class Case:
    """A drafter on recorded texts."""

    target: Target
    drafter: Drafter
    recording: Recording
    draft_length: int
    tracks: list[Track]
    domains: list[str]
    reference: Reference | None

    @property
    def mode(self) -> VerificationMode:
        return "greedy" if self.recording.sampling.greedy else "one_hot"

    def stats(self, tracks: list[Track]) -> list[Stats]:
        return [expected_stats(one, Chain(self.draft_length), self.mode) for one in tracks]

    def accept(self, index: int) -> np.ndarray:
        """[N, K]"""
        return self.tracks[index].accept[self.mode]

    def with_accept(self, change: Callable[[Track, np.ndarray], np.ndarray]) -> list[Track]:
        """The tracks with other chances."""
        return [replace(one, accept={self.mode: change(one, one.accept[self.mode])}) for one in self.tracks]

    def gain(self, tracks: list[Track], of: slice = slice(None)) -> dict[str, Any] | None:
        """The acceptance length that other tracks add; None where that is not worth a word, or may be chance."""
        found = paired_difference(self.stats(tracks), self.stats(self.tracks[of]))
        low = found["ci95"][0]
        return found if len(tracks) >= LEAST_PROMPTS and low > 0 and found["difference"] >= WORTH else None

    def weights(self, index: int) -> np.ndarray:
        """Chance that a draft of each place and depth is offered with all before it accepted, [N, K]."""
        one = self.tracks[index]
        alive = survival(one, Chain(self.draft_length), self.mode)
        before = np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], 1)
        return starts(alive, one.limit)[:, None] * before

    def first_accepted(self, tracks: list[Track]) -> float:
        """Share of first drafted tokens."""
        stats = self.stats(tracks)
        return sum(stats[1:], stats[0]).conditional_acceptance_rates[0] or 0.0


def is_low(stats: Stats) -> bool:
    """Whether acceptance asks for a diagnosis: few first tokens accepted, or a fall to less than half behind them."""
    first, *later = stats.conditional_acceptance_rates
    reached = np.cumsum(stats.acceptance_histogram[::-1])[::-1][1:]  # rounds that accepted at least 1, 2, ...
    falls = (
        rate < LOW_FALL * (first or 0)
        for rate, rounds in zip(later, reached, strict=False)
        if rate is not None and rounds >= LEAST_ROUNDS
    )
    return first is not None and (first < LOW_FIRST or any(falls))


def diagnose(
    target: Target,
    drafter: Drafter,
    recording: Recording,
    draft_length: int,
    domains: list[str] | None = None,
    reference: Reference | None = None,
    greedy: list[Stats] | None = None,
) -> list[Finding]:
    """The causes that the evidence points to, the costliest first; empty where nothing wrong was found.

    `domains` and `greedy`, its counters at temperature 0, by prompt. The drafter is in evaluation mode and can be
    replayed. A finding has `cause`, `measured` (figures), `evidence` (a sentence), `mend` and `cost`, tokens a round or
    None where no experiment tells.
    """
    tracks = replay(target, recording, {"d": drafter}, draft_length)["d"]
    case = Case(target, drafter, recording, draft_length, tracks, domains or [], reference)
    wiring = [*other_identity(case), *other_wiring(case), *other_map(case)]
    found = [*wiring, *other_template(case), *decay(case), *uncertain_target(case), *domain_shift(case)]
    if greedy is not None:
        found += temperature(case, greedy)
    if not any(one["cause"] == "missing d2t" for one in wiring):
        found += outside_vocabulary(case)
    if not any(one["cost"] for one in found):
        found += less_than_before(case)
    return sorted(found, key=lambda one: -(one["cost"] or 0))


def finding(cause: str, measured: dict[str, Any], evidence: str, mend: str, cost: float | None) -> Finding:
    return {"cause": cause, "measured": measured, "evidence": evidence, "mend": mend, "cost": cost}


def plus(gain: dict[str, Any]) -> str:
    """A gain in words."""
    low, high = gain["ci95"]
    return f"acceptance length {gain['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"


# --- another target


def other_identity(case: Case) -> Iterator[Finding]:
    """What the checkpoint says of its target against the target itself."""
    for key, recorded in (case.drafter.trained_for or {}).items():
        name, fingerprint = PARTS[key]
        if recorded != (own := fingerprint(case.target)):
            yield finding(
                "template mismatch" if key == "template_hash" else "fingerprint mismatch",
                {"recorded": recorded, "found": own},
                f"the drafter was trained for {name} ({key} {recorded}) than {case.target.name} has ({own})",
                "serve it with the target, tokenizer and template that it was trained for, or train it for this one",
                None,
            )


def other_template(case: Case) -> Iterator[Finding]:
    """Prompts that do not end as the target's chat template opens an answer: put them into it, and decode again."""
    tokenizer, recording = case.target.tokenizer, case.recording
    if tokenizer is None or not tokenizer.chat_template:
        return
    tail = rendered(case.target, "x")[-TAIL:]
    outside = [prompt for prompt in recording.prompts if prompt[-TAIL:] != tail]
    if not outside:
        return
    contents = [str(tokenizer.decode(prompt, skip_special_tokens=True)) for prompt in outside]
    prompts = [rendered(case.target, content) for content in contents]
    room = max(map(len, prompts)) + recording.max_new_tokens <= case.target.context
    if not room:
        return
    inside = record(
        case.target, prompts, recording.sampling, recording.max_new_tokens, case.draft_length, recording.seed
    )
    now = replace(recording, prompts=outside, answers=[
        answer for prompt, answer in zip(recording.prompts, recording.answers, strict=True) if prompt[-TAIL:] != tail
    ])  # fmt: skip
    before, after = (
        case.stats(replay(case.target, texts, {"d": case.drafter}, case.draft_length)["d"]) for texts in (now, inside)
    )
    gain = paired_difference(after, before)
    if len(prompts) >= LEAST_PROMPTS and gain["ci95"][0] > 0 and gain["difference"] >= WORTH:
        yield finding(
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


def wirings(case: Case) -> dict[str, Wiring]:
    """Other wirings that a drafter may have been trained with, by the cause that they would be."""
    own, num_layers = case.drafter.layer_ids, case.target.num_layers
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


def other_wiring(case: Case) -> Iterator[Finding]:
    """The best of the other wirings, where one of them lifts acceptance."""
    tried = rewired(case, wirings(case))
    if not reads_answer(case, tried["features shifted (+1)"]):
        del tried["features shifted (+1)"]
    gains = {name: gain for name, tracks in tried.items() if (gain := case.gain(tracks))}
    if not gains:
        return
    best = max(gains, key=lambda name: gains[name]["difference"])
    measured = {
        "layer_ids": list(case.drafter.layer_ids),
        "first_accepted": case.first_accepted(case.tracks),
        "tried": gains,
    }
    if best.startswith("layer ids"):
        cause, mend = "wrong layer ids", f"give {best}, counted after N layers, in the drafter's config"
    elif best == "features shifted (+1)":
        cause = "features shifted"
        mend = "train it, and if it was, look for labels shifted by one: it learnt from features that hold the answer"
    else:
        cause, mend = best.partition(" (")[0], "train it on the features that the decoder gives"
    yield finding(cause, measured, f"with {best}, {plus(gains[best])}", mend, gains[best]["difference"])


def rewired(case: Case, tried: dict[str, Wiring]) -> dict[str, list[Track]]:
    """The tracks under each wiring; one pass of the target a text."""
    layer_ids = {layer_id for wiring in tried.values() for layer_id in wiring.layer_ids}
    all_ids = tuple(sorted({*layer_ids, case.target.num_layers}))
    tracks: dict[str, list[Track]] = {name: [] for name in tried}
    for index in range(len(case.tracks)):
        batch, sampling = text_batch(case.recording, index, case.target.device), case.recording.sampling
        read = case.target.features(batch, all_ids)
        rated = score_target(case.target, read.last_hidden, batch, sampling)
        for name, wiring in tried.items():
            features = wiring.features(read, all_ids)
            scores = score_drafter(case.drafter, batch, features, case.draft_length, sampling)
            tracks[name].append(track(case.recording, index, rated, scores))
    return tracks


def reads_answer(case: Case, later: list[Track]) -> bool:
    """Whether it was trained on features of a place later, if at all: those hold the answer, and lift others too.

    Not so a drafter that learnt something: then it drafts no token that stands there already, and gets some right.
    """
    ids = target_ids(case.drafter)
    again = [
        ids[one.choice[:-1, 0]] == np.array(answer[: len(one.choice) - 1])
        for one, answer in zip(case.tracks, case.recording.answers, strict=True)
    ]
    learnt_nothing = case.first_accepted(case.tracks) < 1 - KNOWN and case.first_accepted(later) >= KNOWN
    return learnt_nothing or float(np.concatenate(again).mean()) >= SURE


# --- the draft vocabulary


def target_ids(drafter: Drafter) -> np.ndarray:
    """Target ids of the draft vocabulary [Vd]."""
    ids = drafter.draft_to_target()
    return np.arange(drafter.target.vocab_size) if ids is None else ids.cpu().numpy()


def other_map(case: Case) -> Iterator[Finding]:
    """A map that holds the first ids only, or not those that `t2d` marks: another one, found on half of the texts."""
    ids = case.drafter.draft_to_target()
    if ids is None:
        return
    marked = getattr(case.drafter, "t2d", None)
    marked_ids = marked.nonzero()[:, 0] if isinstance(marked, Tensor) else ids
    if torch.equal(ids.cpu(), torch.arange(len(ids))) or not torch.equal(marked_ids, ids):
        fitted = fitted_map(case, slice(0, None, 2))
        halves = slice(1, None, 2)
        tracks = case.with_accept(lambda one, accept: (fitted[one.choice] == one.following).astype(float))[halves]
        if gain := case.gain(tracks, halves):
            low = float((target_ids(case.drafter) == np.arange(len(ids))).mean())
            yield finding(
                "missing d2t",
                {"share_of_ids_unmapped": low, "gain": gain},
                f"{low:.0%} of the draft ids stand for the target's token of the same number; with a map fitted to "
                f"half of the texts, on the other half {plus(gain)}",
                "write d2t, target id less draft id, as it was in training: it lies with the checkpoint",
                gain["difference"],
            )


def fitted_map(case: Case, texts: slice) -> np.ndarray:
    """Of each draft id the token that stood most often where it was likeliest, [Vd]; -2 where it never was."""
    ids = target_ids(case.drafter)
    counts = np.zeros((len(ids), case.target.vocab_size), dtype=np.int64)
    for one in case.tracks[texts]:
        seen = (one.choice[:, 0] >= 0) & (one.following[:, 0] >= 0)
        np.add.at(counts, (one.choice[seen, 0], one.following[seen, 0]), 1)
    return np.where(counts.any(1), counts.argmax(1), -2)


def outside_vocabulary(case: Case) -> Iterator[Finding]:
    """Tokens that the drafter cannot propose, as if they were accepted as often as the others."""
    if case.drafter.draft_to_target() is None:
        return
    ids = target_ids(case.drafter)
    outside = [~np.isin(one.following, ids) & (one.following >= 0) for one in case.tracks]
    share = float(np.concatenate([one[:, 0] for one in outside]).mean())
    inside_rate = pooled(case, [~one for one in outside])
    if gain := case.gain(
        case.with_accept(lambda one, accept: np.where(np.isin(one.following, ids), accept, inside_rate))
    ):
        yield finding(
            "draft vocabulary",
            {"share_outside": share, "draft_vocabulary": len(ids), "gain": gain},
            f"{share:.1%} of the target's tokens are not among the {len(ids)} that the drafter can propose; accepted "
            f"as often as the others, {plus(gain)}",
            "choose it by how often this target writes each token on such prompts, or raise drafter.draft_vocab_size",
            gain["difference"],
        )


def pooled(case: Case, marks: list[np.ndarray]) -> np.ndarray:
    """Of the drafts offered at marked places [N, K], the share accepted at each depth, [K]."""
    weights = [case.weights(index) * mark for index, mark in enumerate(marks)]
    accepted = sum((weight * case.accept(index)).sum(0) for index, weight in enumerate(weights))
    return np.asarray(accepted / np.maximum(sum(weight.sum(0) for weight in weights), 1e-9))


# --- the text


def decay(case: Case) -> Iterator[Finding]:
    """Later tokens of a draft, as if each were as good as the first one of a draft that starts there.

    The same tokens of the same texts are compared, so that what is left is not how hard they are.
    """
    if case.draft_length < 2:
        return
    fresh = case.with_accept(lambda one, accept: as_first(accept))
    every = [np.ones_like(one.rank, dtype=bool) for one in case.tracks]
    found, gain = pooled(case, every), case.gain(fresh)
    weights = [case.weights(index) for index in range(len(case.tracks))]
    firsts = sum((w * one.accept[case.mode]).sum(0) for w, one in zip(weights, fresh, strict=True))
    expected = np.asarray(firsts / np.maximum(sum(w.sum(0) for w in weights), 1e-9))
    if gain:
        yield finding(
            "decay with depth",
            {"conditional_rates": found.tolist(), "as_first_tokens": expected.tolist(), "gain": gain},
            f"given those before, {listed(found)} are accepted by depth, of the same tokens as first of a draft "
            f"{listed(expected)}; without that fall {plus(gain)}",
            "train as many depths as are drafted (drafter.unroll_steps, num_heads), longer, or draft fewer tokens",
            gain["difference"],
        )


def as_first(accept: np.ndarray) -> np.ndarray:
    """[N, K] -> a[i + j, 0] at [i, j]; 0 beyond the text"""
    places, depth = accept.shape
    first = np.pad(accept[:, 0], (0, depth))
    return np.stack([first[j : j + places] for j in range(depth)], 1)


def listed(rates: np.ndarray) -> str:
    return ", ".join(f"{rate:.2f}" for rate in rates)


def uncertain_target(case: Case) -> Iterator[Finding]:
    """What no drafter of one token can reach where the target draws; and where it is unsure, what it costs this one."""
    if not case.recording.sampling.greedy:
        ceiling = case.stats(case.with_accept(lambda one, accept: one.best))
        now = sum(ceiling[1:], ceiling[0])
        lost = case.draft_length + 1 - now.mean_acceptance_length
        if lost >= WORTH and (now.conditional_acceptance_rates[0] or 0) < LOW_FIRST:
            yield finding(
                "high target entropy",
                {"ceiling_acceptance_length": now.mean_acceptance_length},
                f"the target draws so evenly that the best single proposals have an acceptance length of "
                f"{now.mean_acceptance_length:.2f} at most",
                "lower temperature or top-p where that serves, verify by probability, or draft trees",
                lost,
            )
        return
    sure = [one.best >= SURE for one in case.tracks]
    share = 1 - float(np.concatenate([one[:, 0] for one in sure]).mean())
    at_sure, at_unsure = pooled(case, sure), pooled(case, [~one for one in sure])
    gain = case.gain(case.with_accept(lambda one, accept: np.where(one.best >= SURE, accept, at_sure)))
    if gain and at_unsure[0] < LOW_FIRST <= at_sure[0]:
        yield finding(
            "high target entropy",
            {"share_unsure": share, "accepted_where_sure": at_sure[0], "accepted_where_unsure": at_unsure[0]},
            f"at {share:.0%} of the places the target gives no token {SURE:.0%}; first tokens are accepted in "
            f"{at_unsure[0]:.2f} there and in {at_sure[0]:.2f} elsewhere; without the difference {plus(gain)}",
            "nothing in the drafter is wrong: draft fewer tokens or trees on such text",
            gain["difference"],
        )


def temperature(case: Case, greedy: list[Stats]) -> Iterator[Finding]:
    """The same drafter and prompts at temperature 0."""
    gain = paired_difference(greedy, case.stats(case.tracks))
    if len(greedy) >= LEAST_PROMPTS and gain["ci95"][0] > 0 and gain["difference"] >= WORTH:
        yield finding(
            "temperature",
            {"temperature": case.recording.sampling.temperature, "gain_at_0": gain},
            f"at temperature 0 instead of {case.recording.sampling.temperature:g}, {plus(gain)}",
            "lower the temperature where that serves, or train on text drawn at it",
            gain["difference"],
        )


def domain_shift(case: Case) -> Iterator[Finding]:
    """A domain whose interval lies below that of all others together."""
    stats, domains = case.stats(case.tracks), case.domains
    for domain in dict.fromkeys(domains):
        own = [one for one, name in zip(stats, domains, strict=True) if name == domain]
        others = [one for one, name in zip(stats, domains, strict=True) if name != domain]
        if min(len(own), len(others)) < LEAST_PROMPTS:
            continue
        here, there = length_interval(own), length_interval(others)
        length, elsewhere = (sum(s[1:], s[0]).mean_acceptance_length for s in (own, others))
        cost = elsewhere - sum(stats[1:], stats[0]).mean_acceptance_length
        if here[1] < there[0] and elsewhere - length >= WORTH:
            yield finding(
                "domain shift",
                {"domain": domain, "acceptance_length": length, "ci95": here, "elsewhere": elsewhere},
                f"acceptance length {length:.2f} [{here[0]:.2f}, {here[1]:.2f}] on {domain or 'prompts of no domain'}, "
                f"{elsewhere:.2f} [{there[0]:.2f}, {there[1]:.2f}] on the others",
                "train on the target's own answers to prompts of that domain",
                cost,
            )


def less_than_before(case: Case) -> Iterator[Finding]:
    """Less than half of the first tokens that were accepted before, and no other cause found."""
    first, reference = case.first_accepted(case.tracks), case.reference
    if reference is None or first >= 0.5 * reference.first_accepted:
        return
    measured = {"first_accepted": first, "before": reference.first_accepted, "source": reference.source}
    evidence = (
        f"{first:.2f} of the first drafted tokens are accepted, {reference.first_accepted:.2f} by {reference.source}"
    )
    if reference.in_training:
        mend = "compare what training read with what the decoder gives: layers, positions, tokens, masks, template"
        yield finding("position-0 collapse", measured, f"{evidence}, in training", mend, None)
    else:
        mend = "train on the target's own answers to prompts like these"
        yield finding("domain shift", measured, f"{evidence}, on other prompts", mend, None)
