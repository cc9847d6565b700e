"""Weaknesses of a rightly wired drafter: vocabulary, later depths, an unsure target, temperature, unknown texts.

What a weakness costs is found by changing the replayed chances of acceptance to what they would be without it.

Shapes: N places of an answer where a round can start, K depths.
"""

from collections.abc import Iterator

import numpy as np

from draftsmith.inference.decoding.counters import Stats, length_interval, total_of
from draftsmith.inference.diagnosis.replayed_drafter import (
    LEAST_COST,
    LEAST_PROMPTS,
    ReplayedDrafter,
    gain_text,
    significant_gain,
)
from draftsmith.inference.measuring.results import Finding

LOW_FIRST = 0.6  # share of first drafted tokens accepted, below which acceptance is low
SURE = 0.5  # probability of the target's likeliest token from which on it is sure


def outside_vocabulary(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Find out what tokens cost that the drafter cannot propose, by accepting them as often as the others."""
    if replayed.drafter.draft_to_target() is None:
        return
    ids = replayed.target_ids
    outside = [~np.isin(trace.following, ids) & (trace.following >= 0) for trace in replayed.traces]
    share = float(np.concatenate([mark[:, 0] for mark in outside]).mean())
    inside_rate = replayed.accepted_share(marks=[~mark for mark in outside])
    gain = replayed.gain(
        replayed.with_accept(lambda trace, accept: np.where(np.isin(trace.following, ids), accept, inside_rate))
    )
    if gain:
        yield Finding(
            "draft vocabulary",
            {"share_outside": share, "draft_vocabulary": len(ids), "gain": gain},
            f"{share:.1%} of the target's tokens are not among the {len(ids)} that the drafter can propose; accepted "
            f"as often as the others, {gain_text(gain)}",
            "choose it by how often this target writes each token on such prompts, or raise drafter.draft_vocab_size",
            gain.difference,
        )


def decay(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Find out what later tokens of a draft lose, by accepting each as often as a first token at its place.

    The same tokens of the same texts are compared, so that it makes no difference how hard they are.
    """
    if replayed.draft_length < 2:
        return
    as_first_tokens = replayed.with_accept(lambda trace, accept: as_first(accept))
    rates, first_rates = replayed.accepted_share(), replayed.accepted_share(as_first_tokens)
    if gain := replayed.gain(as_first_tokens):
        yield Finding(
            "decay with depth",
            {"conditional_rates": rates.tolist(), "as_first_tokens": first_rates.tolist(), "gain": gain},
            f"accepted by depth, given those before: {listed(rates)}; the same tokens as first of a draft: "
            f"{listed(first_rates)}; without that fall {gain_text(gain)}",
            "train as many depths as are drafted, longer, or draft fewer tokens",
            gain.difference,
        )


def as_first(accept: np.ndarray) -> np.ndarray:
    """Return [N, K] with a[i + j, 0] at [i, j], and 0 beyond the text."""
    places, depth = accept.shape
    first = np.pad(accept[:, 0], (0, depth))
    return np.stack([first[j : j + places] for j in range(depth)], 1)


def listed(rates: np.ndarray) -> str:
    return ", ".join(f"{rate:.2f}" for rate in rates)


def uncertain_target(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Find out what it costs that the target is unsure.

    Above temperature 0 it is what no drafter of chains can reach. In greedy decoding it is what this drafter loses by
    being right less often where the target is unsure.
    """
    if not replayed.recording.sampling.greedy:
        yield from even_draws(replayed)
        return
    sure = [trace.best >= SURE for trace in replayed.traces]
    share = 1 - float(np.concatenate([mark[:, 0] for mark in sure]).mean())
    at_sure, at_unsure = replayed.accepted_share(marks=sure), replayed.accepted_share(marks=[~mark for mark in sure])
    gain = replayed.gain(replayed.with_accept(lambda trace, accept: np.where(trace.best >= SURE, accept, at_sure)))
    if gain and at_unsure[0] < LOW_FIRST <= at_sure[0]:
        yield Finding(
            "high target entropy",
            {"share_unsure": share, "accepted_where_sure": at_sure[0], "accepted_where_unsure": at_unsure[0]},
            f"at {share:.0%} of the places the target gives no token {SURE:.0%}; first tokens are accepted in "
            f"{at_unsure[0]:.2f} there and in {at_sure[0]:.2f} elsewhere; without the difference {gain_text(gain)}",
            "draft fewer tokens, or trees, on such text: this is no fault of the drafter",
            gain.difference,
        )


def even_draws(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Find out how many tokens of a draft are lost even where every proposal is the target's likeliest token."""
    ceiling = total_of(replayed.stats(replayed.with_accept(lambda trace, accept: trace.best)))
    length = ceiling.mean_acceptance_length
    lost = replayed.draft_length + 1 - length
    if lost >= LEAST_COST and (ceiling.conditional_acceptance_rates[0] or 0) < LOW_FIRST:
        yield Finding(
            "high target entropy",
            {"ceiling_acceptance_length": length},
            f"the target draws so evenly that the best single proposals have an acceptance length of {length:.2f} at "
            "most",
            "lower temperature or top-p where that serves, verify by probability, or draft trees",
            lost,
        )


def temperature(drawn: list[Stats], greedy: list[Stats], above_zero: float) -> Iterator[Finding]:
    """Compare the drafter on the same prompts at a temperature above 0 and at 0, from counters by prompt."""
    if gain := significant_gain(greedy, drawn):
        yield Finding(
            "temperature",
            {"temperature": above_zero, "gain_at_0": gain},
            f"at temperature 0 instead of {above_zero:g}, {gain_text(gain)}",
            "lower the temperature where that serves, or train on text drawn at it",
            gain.difference,
        )


def domain_shift(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Find the domains whose interval of the acceptance length lies below that of all other domains together."""
    stats = replayed.stats(replayed.traces)
    by_domain = list(zip(replayed.domains, stats, strict=bool(replayed.domains)))
    for domain in dict.fromkeys(replayed.domains):
        own = [counters for name, counters in by_domain if name == domain]
        others = [counters for name, counters in by_domain if name != domain]
        if min(len(own), len(others)) < LEAST_PROMPTS:
            continue
        here, there = length_interval(own), length_interval(others)
        assert here
        assert there
        length, elsewhere = (total_of(counters).mean_acceptance_length for counters in (own, others))
        if here[1] < there[0] and elsewhere - length >= LEAST_COST:
            yield Finding(
                "domain shift",
                {"domain": domain, "acceptance_length": length, "ci95": here, "elsewhere": elsewhere},
                f"acceptance length {length:.2f} [{here[0]:.2f}, {here[1]:.2f}] on {domain or 'prompts of no domain'}, "
                f"{elsewhere:.2f} [{there[0]:.2f}, {there[1]:.2f}] on the others",
                "train on the target's own answers to prompts of that domain",
                elsewhere - total_of(stats).mean_acceptance_length,
            )


def less_than_before(replayed: ReplayedDrafter) -> Iterator[Finding]:
    """Find out whether first tokens are accepted less than half as often as they were before."""
    first, reference = replayed.first_accepted(replayed.traces), replayed.reference
    if reference is None or first >= 0.5 * reference.first_accepted:
        return
    if reference.in_training:
        cause, where = "position-0 collapse", "in training"
        mend = "compare what training read with what the decoder gives: layers, positions, tokens, masks, template"
    else:
        cause, where = "domain shift", "on other prompts"
        mend = "train on the target's own answers to prompts like these"
    yield Finding(
        cause,
        {"first_accepted": first, "before": reference.first_accepted, "source": reference.source},
        f"{first:.2f} of the first drafted tokens are accepted, {reference.first_accepted:.2f} by {reference.source}, "
        f"{where}",
        mend,
        None,
    )
