"""The acceptance that training predicts on the very texts that the decoder wrote: a witness that the two agree.

Greedy decoding commits the target's own text, whatever is drafted. So one training pass over prompt and answer
(teacher forcing) says for every place how many drafted tokens in a row would be right, and a walk over these figures,
round by round as the decoder goes, gives the decoder's own counters. A drafter that sees other features, positions or
tokens in the decoder than in training still decodes the right text, only slower: the two counters tell.

The walk drafts as deep as the decoder does, also beyond the depths that were trained: depths that were trained too
little make no gap, they show in both.
"""

from draftsmith.inference.decoding.counters import Stats, paired_difference, total_of
from draftsmith.inference.decoding.decoder import SpeculativeDecoder, check_sampling, resolve_settings
from draftsmith.inference.measuring.results import Result, TeacherForced, TeacherForcedGap
from draftsmith.inference.replay.replay import AcceptanceTrace, Recording, replay
from draftsmith.models import Drafter, Target, load_drafter

LEAST_PROMPTS = 4  # of fewer, an interval over prompts says nothing
TOLERANCE = 0.02  # share of the acceptance length that rounding may explain
CAUSES = "training and drafting see different features, layers, positions, tokens or draft vocabulary"


def teacher_forced_traces(
    target: Target,
    drafters: dict[str, Drafter],
    prompts: list[list[int]],
    answers: list[list[int]],
    draft_length: int,
    max_new_tokens: int,
) -> dict[str, list[AcceptanceTrace]]:
    """Return the traces from which `expected_stats` makes the counters of each prompt that training predicts.

    `answers` are greedy outputs. The drafters draft chains, are in evaluation mode, and wrote the same answers.
    """
    texts = beyond_limit(target, prompts, answers, draft_length, max_new_tokens)
    return replay(target, Recording(prompts, texts, max_new_tokens), drafters, draft_length)


def beyond_limit(
    target: Target, prompts: list[list[int]], answers: list[list[int]], num_more: int, max_new_tokens: int
) -> list[list[int]]:
    """Return answers with `num_more` further tokens where the limit cut them: the last draft reaches that far.

    There are fewer where the target's context ends.
    """
    cut = [i for i, answer in enumerate(answers) if len(answer) == max_new_tokens]
    cut = [i for i in cut if answers[i][-1] not in target.eos_token_ids]
    texts = list(answers)
    if cut:
        plain = SpeculativeDecoder(target, load_drafter("none", target))
        settings = resolve_settings(plain.drafter, check_sampling(0.0, 1.0, 0), num_more)
        more = plain.decode([prompts[i] + answers[i] for i in cut], settings, batch_size=1).token_ids
        for i, token_ids in zip(cut, more, strict=True):
            texts[i] = (answers[i] + token_ids)[: target.context - len(prompts[i])]
    return texts


def gap_to_training(forced: list[Stats], decoded: list[Stats]) -> TeacherForcedGap:
    """Return the decoder's acceptance length less the one that training predicts, from both counters of each prompt.

    The interval is a paired bootstrap over prompts. The gap is `flagged` where 0 lies outside the interval and the gap
    exceeds 2 % of the predicted length, and there are at least four prompts. In fp32 both counters are equal up to
    ties. In low precision a training pass rounds otherwise than the decoder and turns near ties around, in either
    direction and on few prompts, which leaves 0 inside the interval; where many prompts make it narrow, the 2 % stand
    against a small lean of rounding.
    """
    gap, reach = paired_difference(decoded, forced), TOLERANCE * total_of(forced).mean_acceptance_length
    low, high = gap.ci95 or (0.0, 0.0)
    beyond_chance = len(forced) >= LEAST_PROMPTS and not low <= 0 <= high
    return TeacherForcedGap(**vars(gap), flagged=beyond_chance and abs(gap.difference) > reach)


def predicted_acceptance(forced: list[Stats]) -> TeacherForced:
    """Return the acceptance that training predicts, from its counters of each prompt."""
    total = total_of(forced)
    return TeacherForced(
        total.mean_acceptance_length, total.conditional_acceptance_rates, total.per_position_acceptance_rates
    )


def gap_warning(row: Result) -> str | None:
    """Return one line about a row whose gap is flagged, with the likely causes."""
    gap = row.teacher_forced_gap
    if gap is None or not gap.flagged:
        return None
    assert row.teacher_forced
    assert gap.ci95
    predicted = row.teacher_forced.mean_acceptance_length
    return (
        f"the decoder's acceptance length {predicted + gap.difference:.2f} is not the {predicted:.2f} that training "
        f"predicts on the same texts (difference {gap.difference:+.2f}, 95 % interval {gap.ci95[0]:+.2f} to "
        f"{gap.ci95[1]:+.2f}): {CAUSES}"
    )
