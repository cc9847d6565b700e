"""The overfit gate: a drafter that cannot learn a handful of sequences by heart will not learn anything.

The drafter is trained on N answers of the target until the decoder, on the same prompts, accepts nearly every drafted
token. A drafter that fails here is wired wrongly, whatever its loss says, and an hour of training would not show it.
The gate has steps and a learning rate of its own: those of a recipe are made for long runs on much text.
"""

from dataclasses import dataclass

import torch

from draftsmith.data.console import say
from draftsmith.data.processes import rank_and_num_ranks
from draftsmith.data.progress import progress_bar
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.sample import Sample
from draftsmith.data.samples.samples import Samples
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import load_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.losses.chain_loss import LossSums
from draftsmith.models.target.target import Features
from draftsmith.train.config import EvaluationConfig, OptimizerConfig, TrainConfig
from draftsmith.train.optimizer import learning_rate, set_learning_rate
from draftsmith.train.process.stages import Stages
from draftsmith.train.setup import Setup, set_up
from draftsmith.train.step import accumulate_gradients

GOAL = 0.9  # share of the longest possible acceptance length, K + 1
STEPS = 600
CHECK_EVERY = 50  # steps
RATE = 0.3  # learning rate x hidden width, for a step of AdamW to change as much at every width (arXiv 2203.03466)
LEARNT = 0.9  # an accuracy that counts as learnt by heart


@dataclass
class Overfit:
    """Acceptance and accuracies that a drafter reached."""

    acceptance_length: float  # of the decoder
    goal: float
    steps: int
    accuracies: list[float]  # of each depth in training, on the true tokens
    rates: list[float | None]  # of acceptance in the decoder at each position, where those before it were accepted
    outside_vocabulary: float  # share of the answers' tokens that the drafter cannot propose

    @property
    def passed(self) -> bool:
        return self.acceptance_length >= self.goal

    def cause(self) -> str:
        """Return the known cause that the figures point to, in words."""
        if self.outside_vocabulary > 1 - LEARNT:
            return (
                f"{self.outside_vocabulary:.0%} of the answers' tokens are not in the draft vocabulary: raise "
                "drafter.draft_vocab_size"
            )
        if self.accuracies[0] < LEARNT:
            return (
                f"not even the first drafted token was learnt (accuracy {self.accuracies[0]:.2f} in training): "
                "look for wrong layers, labels or a dead gradient"
            )
        weak = next((i for i, accuracy in enumerate(self.accuracies) if accuracy < LEARNT), None)
        if weak is not None:
            return (
                f"depth {weak} was not learnt (accuracy {self.accuracies[weak]:.2f}), depth 0 was: look at "
                "the labels and the weight of later depths"
            )
        if self.rates[0] is not None and self.rates[0] < LEARNT:
            return (
                f"the decoder accepts {self.rates[0]:.2f} of the first tokens, of which training gets "
                f"{self.accuracies[0]:.2f} right: training and drafting see different features, tokens or positions"
            )
        return (
            f"the decoder accepts {', '.join('-' if r is None else f'{r:.2f}' for r in self.rates)} by position where "
            "training is right at every depth that it covers: train as many depths as are drafted "
            "(drafter.unroll_steps), or drafting feeds itself something else than training does"
        )


def overfit(config: TrainConfig, num_sequences: int) -> Overfit:
    """Train on the target's own greedy answers to the prompts of `num_sequences` samples; nothing is written.

    Stops as soon as the decoder reaches the goal. Raises `UserError` with the likely cause where it does not, after
    STEPS steps.
    """
    require_at_least("--overfit", num_sequences)
    if config.data.features != "online":
        raise UserError("--overfit reads the target's features as it goes: give data.features=online")
    if config.data.on_policy_share:
        raise UserError("--overfit learns the target's text by heart: leave out data.on_policy_share")
    if rank_and_num_ranks()[1] != 1:
        raise UserError("--overfit learns in one process: start it as draftsmith train")
    if config.drafter.changes_target:
        raise UserError(
            "--overfit: this drafter changes the target that it is judged by; give the recipe medusa instead"
        )
    config.drafter = config.drafter.for_overfitting()
    config.data.batch_size, config.data.batch_unit = 1, "samples"
    setup = set_up(config)
    if len(setup.plan.samples) < num_sequences:
        raise UserError(f"--overfit {num_sequences}: {config.data.samples} has {len(setup.plan.samples)} samples")
    drafter = setup.drafter
    schedule = OptimizerConfig(learning_rate=RATE / setup.target.hidden_size)
    gate, stages = Gate(setup, num_sequences, config.evaluation), Stages(setup.accelerator.device)
    model, optimizer = setup.accelerator.prepare(
        drafter, torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], weight_decay=0.0)
    )
    with progress_bar() as progress:
        task = progress.add_task(f"overfitting {drafter.kind}", total=STEPS, detail="")
        for step in range(STEPS):
            set_learning_rate(optimizer, learning_rate(step, STEPS, schedule))
            (sums,) = accumulate_gradients(setup, model, [([], gate.batch)], gate.features, stages)
            setup.accelerator.clip_grad_norm_(model.parameters(), schedule.max_gradient_norm)
            optimizer.step()
            optimizer.zero_grad()
            progress.update(task, advance=1, detail=f"loss {float(sums['loss'][0] / sums['loss'][1]):.3f}")
            if (step + 1) % CHECK_EVERY == 0 or step + 1 == STEPS:
                result = gate.judge(sums, step + 1)
                if result.passed:
                    break
    summary = f"acceptance length {result.acceptance_length:.2f} of {result.goal:.2f} asked for, {result.steps} steps"
    if not result.passed:
        raise UserError(f"overfit gate: {drafter.kind} on {num_sequences} sequences, {summary}: {result.cause()}")
    say(f"overfit gate passed: {drafter.kind} on {num_sequences} sequences, {summary}")
    return result


class Gate:
    """The sequences to learn, on which the decoder judges the drafter."""

    def __init__(self, setup: Setup, num_sequences: int, config: EvaluationConfig) -> None:
        self.target, self.drafter = setup.target, setup.drafter
        self.draft_length = min(config.draft_length, self.drafter.max_draft_length or config.draft_length)
        samples = setup.plan.samples
        longest = (-samples.lengths).argsort(kind="stable")[:num_sequences]
        self.prompts = [samples.token_ids(i)[: samples.spans(i)[0][0]].tolist() for i in longest]
        # a draft reaches beyond the last token that is asked for: learn that far
        room = self.target.context - max(map(len, self.prompts)) - self.draft_length
        self.num_tokens = min(config.max_new_tokens, room)
        plain = SpeculativeDecoder(self.target, load_drafter("none", self.target))
        self.answers = plain.generate(self.prompts, self.num_tokens + self.draft_length).token_ids
        learnt = [
            Sample(prompt + answer, [Span(len(prompt), len(prompt) + len(answer))])
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
        ]
        plan = BatchPlan(
            Samples.of(learnt), len(learnt), self.target.context, len(learnt) * self.target.context, seed=0
        )
        self.batch = plan.collate([[index] for index in range(len(learnt))]).to(self.target.device)

    def features(self, _: object, batch: Batch) -> Features:
        """Return the target's features of a batch, as a `FeatureSource`."""
        return self.target.features(batch, self.drafter.layer_ids)

    def judge(self, sums: LossSums, step: int) -> Overfit:
        """Decode the prompts with the drafter as it is now. `sums` are those of its last training step."""
        self.drafter.eval()
        output = SpeculativeDecoder(self.target, self.drafter).generate(
            self.prompts, self.num_tokens, draft_length=self.draft_length
        )
        self.drafter.train()
        names = [f"accuracy_{depth}" for depth in range(self.draft_length)]
        total = output.stats.total
        return Overfit(
            total.mean_acceptance_length,
            GOAL * (self.draft_length + 1),
            step,
            [float(sums[name][0] / sums[name][1]) for name in names if name in sums],
            total.conditional_acceptance_rates,
            self.share_outside_vocabulary(),
        )

    def share_outside_vocabulary(self) -> float:
        """Return the share of the answers' tokens that the drafter cannot propose."""
        ids = self.drafter.draft_to_target()
        written = torch.tensor([token for answer in self.answers for token in answer])
        return 0.0 if ids is None else float((~torch.isin(written, ids.cpu())).float().mean())
