"""The costs of rounds in a vLLM, from short runs with drafters that need not be trained.

vLLM tells how long its steps take, and not which part of a step drafts: a round is fitted as a whole. One start of the
engine times one draft length, for a request alone and for as many as the load has.
"""

import statistics
import tempfile
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path

from draftsmith.inference.measuring.environment import device_name
from draftsmith.inference.planning.costs import Costs, RoundTimes, fit_terms, pass_terms
from draftsmith.models import Drafter, Target
from draftsmith.models.checkpoints import save_drafter
from draftsmith.recipes.auto.score import ServingLoad
from draftsmith.recipes.engine_rules.loader_rules import TRAINING_FREE
from draftsmith.recipes.serving.export import write_drafter
from draftsmith.recipes.serving.export_command import as_served
from draftsmith.recipes.serving.serve_commands import speculative_config
from draftsmith.recipes.serving.vllm_run import EngineJob, EngineRun, SpeculativeConfig, run_environment

NUM_TOKENS = 48  # of an answer
NUM_ALONE = 4  # prompts that are decoded one by one
# Terms of a whole round: few settings are timed, and a straight line between them is the least that is assumed.
TERMS = ("pass", "row x context", "drafts", "draft token")


class EngineTimes:
    """A vLLM in a virtual environment, and what its rounds cost at a load."""

    def __init__(self, environment: Path, target: Target, prompts: list[list[int]], load: ServingLoad) -> None:
        self.environment, self.target, self.load = environment, target, load
        alone = [[prompt] for prompt in prompts[:NUM_ALONE]]
        together = [list(islice(cycle(prompts), load.batch_size))] if load.batch_size > 1 else []
        self.batches = [*alone, *together]

    def costs(self, name: str, drafter: Drafter, longest: int) -> Costs:
        """Return the costs of rounds with a drafter, trained or not, whose drafts have up to `longest` tokens.

        Raises `UserError` where the engine does not serve it.
        """
        rows = [*self.rows(0, self.plain), *self.drafted(drafter, sorted({1, longest}))]
        terms = [pass_terms(row.nodes, row.batch, row.context, row.tree) for row in rows]
        return Costs(
            device=f"{self.plain.version} on {device_name(self.target)}",
            target=self.target.name,
            drafter=name,
            drafter_kind=drafter.kind,
            draft_ms={},
            verify_ms=fit_terms([{name: row[name] for name in TERMS} for row in terms], [row.round_ms for row in rows]),
            host=0.0,
            plain_host=0.0,
            fitted_on=rows,
        )

    @cached_property
    def plain(self) -> EngineRun:
        """The run without a drafter."""
        return self.run(None, self.target)

    def drafted(self, drafter: Drafter, lengths: list[int]) -> list[RoundTimes]:
        """Return the times of rounds of some draft lengths, at each batch size."""
        kind, target, model = drafter.kind, self.target, ""
        with tempfile.TemporaryDirectory() as temporary:
            if kind not in TRAINING_FREE:
                saved, served = Path(temporary) / "saved", Path(temporary) / "served"
                save_drafter(drafter, saved)
                served.mkdir()
                exported = write_drafter(saved, "vllm", target, {}, served)
                kind, model, (target, _) = exported.kind, str(served), as_served(exported, target)
            runs = {length: self.run(speculative_config(kind, model, length), target) for length in lengths}
        return [row for length, run in runs.items() for row in self.rows(length, run)]

    def run(self, speculative: SpeculativeConfig | None, target: Target) -> EngineRun:
        """Return a run that timed all batches twice: the first time warms up, and reads the prompts."""
        job = EngineJob(self.batches[0], NUM_TOKENS, stops_at_eos=False, timed=[*self.batches, *self.batches])
        return run_environment(self.environment, speculative, target, job)

    def rows(self, draft_length: int, run: EngineRun) -> list[RoundTimes]:
        """Return the median times of a run, at each batch size."""
        milliseconds: dict[int, list[float]] = {}
        for batch in run.timed[len(self.batches) :]:
            milliseconds.setdefault(batch.num_requests, []).append(batch.round_ms)
        medians = {size: statistics.median(times) for size, times in milliseconds.items()}
        return [
            RoundTimes(draft_length, size, self.load.context, draft_length, False, 0.0, round_ms, round_ms)
            for size, round_ms in medians.items()
        ]
