"""The outside witness: a real engine serves target and drafter on held-out prompts, and its counters stand beside ours.

The engine is an environment that has vLLM, or a vLLM that is running (vllm_run.py).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Round, Stats
from draftsmith.inference.decoding.decoder import OutputStats
from draftsmith.inference.measuring.lossless import compare_outputs
from draftsmith.inference.measuring.results import LosslessCheck
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import Chain, DynamicTree
from draftsmith.recipes.pages.tables import Row, for_terminal, table_of
from draftsmith.recipes.serving.engine_speed import EngineSpeed, engine_speed
from draftsmith.recipes.serving.vllm_run import EngineJob, EngineRun, SpeculativeConfig, run_address, run_environment
from draftsmith.train.engine.vllm_counters import Counters

# The largest relative difference of mean acceptance lengths that counts as agreement. Half precision has near ties in
# drafts as in texts. In fp32 they are rare, so that a difference as small as that of a wrong layer is found.
TOLERANCE, FP32_TOLERANCE = 0.02, 0.001
OUR_BATCH_SIZE = 16
OWN_RULES = ("suffix",)  # kinds that vLLM drafts with by rules of its own, so that its counters are its own


@dataclass
class EngineReport:
    """The outcome of decoding the same prompts with an engine and with draftsmith, at temperature 0."""

    kind: str
    draft_length: int
    stats: OutputStats  # ours
    ours: Stats  # over all prompts, counted as engines do
    engine: EngineRun
    texts: LosslessCheck  # the engine's texts against ours
    in_fp32: bool
    speed: EngineSpeed | None = None  # with the drafter against without it; None: not timed

    @property
    def num_prompts(self) -> int:
        """Number of prompts that both decoded."""
        return len(self.stats.requests)

    @property
    def relative_difference(self) -> float:
        """Difference of the mean acceptance lengths, as a share of ours."""
        return abs(self.engine.counters.mean_acceptance_length / self.ours.mean_acceptance_length - 1)

    @property
    def tolerance(self) -> float:
        """The largest relative difference that counts as agreement: a text that went on otherwise is counted so."""
        return FP32_TOLERANCE if self.in_fp32 and not self.texts.near_tie_divergences else TOLERANCE

    @property
    def agrees(self) -> bool:
        """Whether texts differ at near ties alone, and acceptance lengths little where the engine drafts as we do."""
        is_counted_alike = self.kind in OWN_RULES or self.relative_difference <= self.tolerance
        return is_counted_alike and self.texts.divergences == 0

    def to_json(self) -> dict[str, object]:
        """Return the content of engine_check.json."""
        return {
            "engine": self.engine.version,
            "drafter_kind": self.kind,
            "draft_length": self.draft_length,
            "num_prompts": self.num_prompts,
            "ours": counts_of(self.ours),
            "theirs": counts_of(self.engine.counters),
            "relative_difference": self.relative_difference,
            "tolerance": self.tolerance,
            "texts": self.texts,
            "agrees": self.agrees,
            "speed": self.speed,
        }


def counts_of(counters: Stats | Counters) -> dict[str, float | list[float]]:
    """Return what engine_check.json holds of our counters, or of the engine's."""
    return {
        "num_drafts": counters.num_drafts,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "mean_acceptance_length": counters.mean_acceptance_length,
        "per_position_acceptance_rates": counters.per_position_acceptance_rates,
    }


def check_engine(
    engine: str,
    speculative: SpeculativeConfig,
    drafter: Drafter,
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
    is_timed: bool = False,
) -> EngineReport:
    """Decode the prompts greedily with the engine and with draftsmith, and compare.

    `engine`: the folder of an environment with vLLM, or the address of a running one (http://...), which must serve
    this target with this drafter, and nobody else meanwhile. A running one has been told `speculative` already.
    `is_timed`: whether an environment also times each prompt alone, for `add_speed`. Raises `UserError` where the
    engine cannot be reached or refuses.
    """
    draft_length = speculative.num_speculative_tokens
    decoder = SpeculativeDecoder(target, drafter)
    output = decoder.generate(prompts, max_new_tokens, draft_length=draft_length, batch_size=OUR_BATCH_SIZE)
    ours = counted_as_engines_do(decoder, prompts, output.token_ids, Chain(draft_length))
    if engine.startswith("http"):
        run = run_address(engine, target, prompts, max_new_tokens)
    else:
        job = EngineJob(prompts, max_new_tokens, timed=[[prompt] for prompt in prompts] if is_timed else [])
        run = run_environment(Path(engine), speculative, target, job)
    if not run.counters.num_drafts:
        raise UserError(f"{engine} drafted nothing: it does not serve with this drafter")
    texts = compare_outputs(target, prompts, output.token_ids, run.token_ids)
    return EngineReport(drafter.kind, draft_length, output.stats, ours, run, texts, target.dtype == torch.float32)


def counted_as_engines_do(
    decoder: SpeculativeDecoder, prompts: list[list[int]], texts: list[list[int]], draft: Chain | DynamicTree
) -> Stats:
    """Return the decoder's counters of greedy texts that it wrote for the prompts, counted as vLLM and SGLang do.

    They count all accepted tokens of a text's last round, those behind the end of the text, too. These are known from
    decoding on behind the end.
    """
    tree = draft if isinstance(draft, DynamicTree) else None
    endless = decoder.generate(
        prompts,
        max(map(len, texts)),
        draft_length=draft.depth,
        tree=tree,
        batch_size=OUR_BATCH_SIZE,
        stop_at_eos=False,
    )
    return counted_until_end(texts, endless.rounds, draft.depth)


def counted_until_end(texts: list[list[int]], rounds: list[list[Round]], draft_length: int) -> Stats:
    """Return the counters of the rounds that begin within a text, where decoding went on behind the end of each."""
    stats = Stats(draft_length, num_emitted_tokens=sum(map(len, texts)))
    for text, of_text in zip(texts, rounds, strict=True):
        for start, num_drafted, num_accepted in of_text:
            if start < len(text):
                stats.count_round(num_drafted, num_accepted)
    return stats


def add_speed(
    report: EngineReport, environment: Path, target: Target, prompts: list[list[int]], max_new_tokens: int
) -> EngineReport:
    """Return a timed report with the engine's speed, for which the environment decodes without the drafter too."""
    job = EngineJob(prompts, max_new_tokens, timed=[[prompt] for prompt in prompts])
    plain = run_environment(environment, None, target, job)
    return replace(report, speed=engine_speed(plain.timed, report.engine.timed, report.stats))


def print_reports(reports: list[EngineReport], console: Console) -> None:
    """Print one line for each drafter: the engine's counters, ours, and what became of the texts."""
    if reports:
        console.print(f"{reports[0].engine.version} / draftsmith, {reports[0].num_prompts} prompts, temperature 0")
        console.print(for_terminal(table_of("", map(report_row, reports), words=("drafter", "texts"))))
    for report in reports:
        if report.speed:
            console.print(f"{report.kind}, {report.speed.text()}")


def report_row(report: EngineReport) -> Row:
    ours, theirs, texts = report.ours, report.engine.counters, report.texts
    ties = f", {texts.near_tie_divergences} near-ties" if texts.near_tie_divergences else ""
    return {
        "drafter": report.kind,
        "K": str(report.draft_length),
        "drafts": f"{theirs.num_drafts} / {ours.num_drafts}",
        "accepted": f"{theirs.num_accepted_tokens} / {ours.num_accepted_tokens}",
        "acceptance length": f"{theirs.mean_acceptance_length:.3f} / {ours.mean_acceptance_length:.3f}",
        "difference": f"{report.relative_difference:.2%}",
        "texts": f"{texts.identical}/{texts.checked} identical{ties}",
    }
