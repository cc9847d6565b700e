"""What costs a rightly wired drafter: its vocabulary, its later depths, an unsure target, a temperature, other texts.

Each is undone in the replayed chances of acceptance. Shapes: N places of an answer where a round can start, K depths.
"""

from collections.abc import Iterator

import numpy as np

from draftsmith.inference.decoding.counters import Stats, length_interval
from draftsmith.inference.diagnosis.replayed_drafter import (
    LEAST_PROMPTS,
    WORTH,
    ReplayedDrafter,
    plus,
    worthy_gain,
)
from draftsmith.inference.measuring.results import Finding

LOW_FIRST = 0.6  # share of first drafted tokens accepted, below which acceptance is low
SURE = 0.5  # probability of the target's likeliest token from which on it is sure


def outside_vocabulary(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Tokens that the drafter cannot propose, as if they were accepted as often as the others."""
    if replayed.drafter.draft_to_target() is None:
        return
    ids = replayed.target_ids()
    outside = [~np.isin(one.following, ids) & (one.following >= 0) for one in replayed.traces]
    share = float(np.concatenate([one[:, 0] for one in outside]).mean())
    inside_rate = pooled(replayed, [~one for one in outside])
    if gain := replayed.gain(
        replayed.with_accept(lambda one, accept: np.where(np.isin(one.following, ids), accept, inside_rate))
    ):
        yield Finding(
            "draft vocabulary",
            {"share_outside": share, "draft_vocabulary": len(ids), "gain": gain},
            f"{share:.1%} of the target's tokens are not among the {len(ids)} that the drafter can propose; accepted "
            f"as often as the others, {plus(gain)}",
            "choose it by how often this target writes each token on such prompts, or raise drafter.draft_vocab_size",
            gain["difference"],
        )


def pooled(replayed: ReplayedDrafter, marks: list[np.ndarray]) -> np.ndarray:
    """Of the drafts offered at marked places [N, K], the share accepted at each depth, [K]."""
    weights = [replayed.weights(index) * mark for index, mark in enumerate(marks)]
    accepted = sum((weight * replayed.accept(index)).sum(0) for index, weight in enumerate(weights))
    return np.asarray(accepted / np.maximum(sum(weight.sum(0) for weight in weights), 1e-9))


def decay(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Later tokens of a draft, as if each were as good as the first one of a draft that starts there.

    The same tokens of the same texts are compared, so that what is left is not how hard they are.
    """
    if replayed.draft_length < 2:
        return
    fresh = replayed.with_accept(lambda one, accept: as_first(accept))
    every = [np.ones_like(one.rank, dtype=bool) for one in replayed.traces]
    found, gain = pooled(replayed, every), replayed.gain(fresh)
    weights = [replayed.weights(index) for index in range(len(replayed.traces))]
    firsts = sum((w * one.accept[replayed.mode]).sum(0) for w, one in zip(weights, fresh, strict=True))
    expected = np.asarray(firsts / np.maximum(sum(w.sum(0) for w in weights), 1e-9))
    if gain:
        yield Finding(
            "decay with depth",
            {"conditional_rates": found.tolist(), "as_first_tokens": expected.tolist(), "gain": gain},
            f"accepted by depth, given those before: {listed(found)}; the same tokens as first of a draft: "
            f"{listed(expected)}; without that fall {plus(gain)}",
            "train as many depths as are drafted, longer, or draft fewer tokens",
            gain["difference"],
        )


def as_first(accept: np.ndarray) -> np.ndarray:
    """[N, K] -> a[i + j, 0] at [i, j]; 0 beyond the text"""
    places, depth = accept.shape
    first = np.pad(accept[:, 0], (0, depth))
    return np.stack([first[j : j + places] for j in range(depth)], 1)


def listed(rates: np.ndarray) -> str:
    return ", ".join(f"{rate:.2f}" for rate in rates)


def uncertain_target(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """What no drafter of one token can reach where the target draws; and where it is unsure, what it costs this one."""
    if not replayed.recording.sampling.greedy:
        ceiling = replayed.stats(replayed.with_accept(lambda one, accept: one.best))
        now = sum(ceiling[1:], ceiling[0])
        lost = replayed.draft_length + 1 - now.mean_acceptance_length
        if lost >= WORTH and (now.conditional_acceptance_rates[0] or 0) < LOW_FIRST:
            yield Finding(
                "high target entropy",
                {"ceiling_acceptance_length": now.mean_acceptance_length},
                f"the target draws so evenly that the best single proposals have an acceptance length of "
                f"{now.mean_acceptance_length:.2f} at most",
                "lower temperature or top-p where that serves, verify by probability, or draft trees",
                lost,
            )
        return
    sure = [one.best >= SURE for one in replayed.traces]
    share = 1 - float(np.concatenate([one[:, 0] for one in sure]).mean())
    at_sure, at_unsure = pooled(replayed, sure), pooled(replayed, [~one for one in sure])
    gain = replayed.gain(replayed.with_accept(lambda one, accept: np.where(one.best >= SURE, accept, at_sure)))
    if gain and at_unsure[0] < LOW_FIRST <= at_sure[0]:
        yield Finding(
            "high target entropy",
            {"share_unsure": share, "accepted_where_sure": at_sure[0], "accepted_where_unsure": at_unsure[0]},
            f"at {share:.0%} of the places the target gives no token {SURE:.0%}; first tokens are accepted in "
            f"{at_unsure[0]:.2f} there and in {at_sure[0]:.2f} elsewhere; without the difference {plus(gain)}",
            "draft fewer tokens, or trees, on such text: this is no fault of the drafter",
            gain["difference"],
        )


def temperature(drawn: list[Stats], greedy: list[Stats], above_zero: float) -> Iterator[Finding]:
    """The same drafter and prompts at a temperature above 0 and at 0, by prompt."""
    if gain := worthy_gain(greedy, drawn):
        yield Finding(
            "temperature",
            {"temperature": above_zero, "gain_at_0": gain},
            f"at temperature 0 instead of {above_zero:g}, {plus(gain)}",
            "lower the temperature where that serves, or train on text drawn at it",
            gain["difference"],
        )


def domain_shift(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """A domain whose interval lies below that of all others together."""
    stats, domains = replayed.stats(replayed.traces), replayed.domains
    for domain in dict.fromkeys(domains):
        own = [one for one, name in zip(stats, domains, strict=True) if name == domain]
        others = [one for one, name in zip(stats, domains, strict=True) if name != domain]
        if min(len(own), len(others)) < LEAST_PROMPTS:
            continue
        here, there = length_interval(own), length_interval(others)
        assert here is not None
        assert there is not None
        length, elsewhere = (sum(s[1:], s[0]).mean_acceptance_length for s in (own, others))
        cost = elsewhere - sum(stats[1:], stats[0]).mean_acceptance_length
        if here[1] < there[0] and elsewhere - length >= WORTH:
            yield Finding(
                "domain shift",
                {"domain": domain, "acceptance_length": length, "ci95": here, "elsewhere": elsewhere},
                f"acceptance length {length:.2f} [{here[0]:.2f}, {here[1]:.2f}] on {domain or 'prompts of no domain'}, "
                f"{elsewhere:.2f} [{there[0]:.2f}, {there[1]:.2f}] on the others",
                "train on the target's own answers to prompts of that domain",
                cost,
            )


def less_than_before(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Less than half of the first tokens that were accepted before, and no other cause found."""
    first, reference = replayed.first_accepted(replayed.traces), replayed.reference
    if reference is None or first >= 0.5 * reference.first_accepted:
        return
    measured = {"first_accepted": first, "before": reference.first_accepted, "source": reference.source}
    evidence = (
        f"{first:.2f} of the first drafted tokens are accepted, {reference.first_accepted:.2f} by {reference.source}"
    )
    if reference.in_training:
        mend = "compare what training read with what the decoder gives: layers, positions, tokens, masks, template"
        yield Finding("position-0 collapse", measured, f"{evidence}, in training", mend, None)
    else:
        mend = "train on the target's own answers to prompts like these"
        yield Finding("domain shift", measured, f"{evidence}, on other prompts", mend, None)
