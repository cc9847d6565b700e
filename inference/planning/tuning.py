"""Chooses draft length, tree and schedule for one drafter, from acceptance on some prompts and from measured costs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import PlainValidator

from draftsmith.inference.decoding.counters import DraftLength, Interval, tokens_reach
from draftsmith.inference.decoding.decoder import Output, SpeculativeDecoder
from draftsmith.inference.decoding.schedule import AnySchedule, Schedule, for_sglang, for_vllm, schedule_from_json
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.measuring.results import Setting
from draftsmith.inference.planning.best_draft import (
    acceptance_length,
    fit_schedule,
    fit_tree,
    rank_accuracies,
    rates_of_rounds,
    tree_acceptance_length,
)
from draftsmith.inference.planning.confidence import ConfidenceChoice, choose_confidence, draft_everywhere
from draftsmith.inference.planning.cost_measurement import CostRange, longest_context, measure_costs
from draftsmith.inference.planning.costs import Costs, DraftChances
from draftsmith.inference.planning.costs_after_evaluation import typical_context
from draftsmith.inference.planning.fixed_batches import DecodedRequest, fixed_batch_speedup
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Natural, NonNegative
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.storage.typed_json import optional, to_json

LONGEST = 8  # most tokens of a chain that are tried
RANKS, TREE_NODES = 8, 32  # most children of a node, and most nodes, of a tree that is tried
ANSWERS = 24  # most answers that rank accuracies are counted on


@dataclass(frozen=True, kw_only=True)
class PredictedDraft:
    """The best draft at a batch size, as choice.json has it."""

    batch_size: Natural
    draft_length: DraftLength  # 0: speculation off
    tree_nodes: Natural | None
    schedule: Annotated[AnySchedule, PlainValidator(schedule_from_json)] | None = optional()
    acceptance_length: NonNegative
    speedup: NonNegative  # where the batch stays full, as a server's does
    speedup_ci95: Interval = optional()  # by the errors of costs and of acceptance; None with speculation off
    fixed_batch_speedup: NonNegative | None  # None where rounds of single requests are not known, as of trees

    def is_of(self, setting: Setting) -> bool:
        """Return whether a setting decodes with this draft at this batch size."""
        names = ("batch_size", "draft_length", "tree_nodes", "schedule")
        return all(getattr(self, name) == getattr(setting, name) for name in names)


@dataclass(frozen=True)
class Tuning:
    """The best schedule for one drafter, the tree and the confidence rule that were tried, and their predictions."""

    schedule: Schedule
    tree: StaticTree | None  # at the smallest batch size, where it is predicted to beat the chain
    confidence: ConfidenceChoice | None  # ending chains by confidence, likewise; None where that was not tried
    rates: list[float | None]  # conditional acceptance rates, the first that of all rounds
    accuracies: list[list[float]]  # by depth and rank; empty where no tree was fitted
    predicted: list[PredictedDraft]  # the chain of each batch size, then the confident chain and the tree if they pay

    def to_json(self) -> dict[str, Any]:
        """Return the fields of choice.json that the fit gives."""
        return {
            "draft_length": self.predicted[0].draft_length,
            "tree": self.tree and [list(path) for path in self.tree.choices],
            "schedule": self.schedule.to_json(),
            "confident": self.confidence and {**asdict(self.confidence), "pays": self.confidence.pays},
            "acceptance_rates_of_rounds": self.rates,
            "rank_accuracies": self.accuracies,
            "predicted": to_json(self.predicted),
            "vllm": {"num_speculative_tokens_per_batch_size": for_vllm(self.schedule)},
            "sglang": for_sglang(self.schedule),
        }


def tune(
    target: Target,
    drafter: Drafter,
    name: str,
    prompts: PromptSet,
    settings: MeasureSettings,
    batches: Sequence[int],
    cost_seconds: float = CostRange.seconds,
) -> tuple[Tuning, Costs]:
    """Measure acceptance at the longest draft length, then costs; return the best draft for each of some batch sizes.

    The batch sizes rise, and costs are measured for about `cost_seconds`. Raises `UserError` where no answer is longer
    than a token, and where the target's context is too short to measure costs.
    """
    longest = min(LONGEST, drafter.max_draft_length or LONGEST)
    decoded = decode(target, drafter, prompts, replace(settings, draft=longest))
    total, batch, context = decoded.stats.total, batches[0], typical_context(prompts, settings.max_new_tokens)
    if not total.num_rounds:
        raise UserError("every answer ends with its first token, which leaves nothing to fit: give other prompts")
    rates = rates_of_rounds(total.conditional_acceptance_rates, total.num_drafts, total.num_rounds)
    greedy = settings.temperature == 0
    nodes = TREE_NODES if drafter.can_branch and greedy else 0
    reach = CostRange(max(batches), min(context, longest_context(target, longest, nodes)), longest, nodes, cost_seconds)
    costs = measure_costs(target, drafter, reach, name).drafting_with(DraftChances.of(total))
    length_reach = tokens_reach(decoded.stats.requests)
    schedule = fit_schedule(rates, costs, batches, context, length_reach)
    requests = [
        DecodedRequest(len(ids), stats) for ids, stats in zip(prompts.token_ids, decoded.stats.requests, strict=True)
    ]
    on_cpu = target.device.type == "cpu"
    predicted = [predicted_chain(schedule, rates, costs, size, context, requests, on_cpu) for size in batches]
    texts = list(zip(prompts.token_ids, decoded.token_ids, strict=True))[:ANSWERS]

    confidence, tree, accuracies = None, None, []
    if drafter.can_sample and greedy and longest > 1:
        confidence = choose_confidence(draft_everywhere(drafter, target, texts, longest), costs, batch, context)
        if confidence.pays:
            predicted.append(predicted_confident(confidence, batch))
    if drafter.can_branch and greedy:
        accuracies = rank_accuracies(drafter, target, texts, longest, RANKS)
        tree = fit_tree(accuracies, costs, batch, context, TREE_NODES)
        tree_draft = predicted_tree(tree, accuracies, costs, batch, context)
        if tree_draft.speedup > predicted[0].speedup:
            predicted.append(tree_draft)
        else:
            tree = None
    predicted = [
        replace(draft, speedup_ci95=costs.interval(draft.speedup, length_reach)) if draft.draft_length else draft
        for draft in predicted
    ]
    return Tuning(schedule, tree, confidence, rates, accuracies, predicted), costs


def predicted_chain(
    schedule: Schedule,
    rates: Sequence[float | None],
    costs: Costs,
    batch: int,
    context: int,
    requests: list[DecodedRequest],
    on_cpu: bool,
) -> PredictedDraft:
    """Return the prediction for the schedule's chain at a batch size; `requests` give the rounds of fixed batches."""
    length = schedule.draft_length(batch)
    emitted = acceptance_length(rates, length)
    return PredictedDraft(
        batch_size=batch,
        draft_length=length,
        tree_nodes=None,
        acceptance_length=emitted,
        speedup=costs.speedup(emitted, length, batch, context),
        fixed_batch_speedup=fixed_batch_speedup(costs, length, requests, batch, on_cpu),
    )


def predicted_confident(confidence: ConfidenceChoice, batch: int) -> PredictedDraft:
    """Return the prediction for chains that end by the drafter's confidence."""
    return PredictedDraft(
        batch_size=batch,
        draft_length=confidence.rule.longest,
        tree_nodes=None,
        schedule=confidence.rule,
        acceptance_length=confidence.acceptance_length,
        speedup=confidence.speedup,
        fixed_batch_speedup=None,
    )


def predicted_tree(
    tree: StaticTree, accuracies: list[list[float]], costs: Costs, batch: int, context: int
) -> PredictedDraft:
    """Return the prediction for a tree, from accuracies by depth and rank."""
    emitted = tree_acceptance_length(tree, accuracies)
    return PredictedDraft(
        batch_size=batch,
        draft_length=tree.depth,
        tree_nodes=tree.num_nodes,
        acceptance_length=emitted,
        speedup=costs.speedup(emitted, tree.depth, batch, context, tree.num_nodes),
        fixed_batch_speedup=None,
    )


def decode(target: Target, drafter: Drafter, prompts: PromptSet, settings: MeasureSettings) -> Output:
    """Decode all prompts once, untimed."""
    drafter.forget()
    return SpeculativeDecoder(target, drafter).decode(prompts.token_ids, settings.resolve(drafter), batch_size=8)
