"""The end of a search: what was found is told, and the best of it exported."""

from dataclasses import dataclass, replace
from operator import itemgetter

from rich.console import Console

from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.results import Evaluation, Result, read_evaluation
from draftsmith.models import Target, load_drafter
from draftsmith.models.storage.files import write_whole
from draftsmith.recipes.auto.folder import SearchFolder
from draftsmith.recipes.auto.page import NONE_KEEPS_SLA, auto_page, more_time
from draftsmith.recipes.auto.score import ServingLoad
from draftsmith.recipes.auto.service_level import (
    at_batch_size,
    chains_alone,
    fastest_first,
    kept,
    sla_lines,
    within_sla,
)
from draftsmith.recipes.auto.state import AutoState
from draftsmith.recipes.configs.command_settings import ExportSettings
from draftsmith.recipes.configs.training_settings import AutoSettings
from draftsmith.recipes.engine_rules.loader_rules import TRAINING_FREE, is_served
from draftsmith.recipes.evaluation.comparison import certify_measured
from draftsmith.recipes.pages.tables import draft_text
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.reports.terminal import print_summary
from draftsmith.recipes.serving.export import why_not_served
from draftsmith.recipes.serving.export_command import export
from draftsmith.recipes.serving.model_card import as_schedule, schedule_of


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search: its decisions, and the measurements in its folder."""

    settings: AutoSettings
    target: Target
    state: AutoState
    load: ServingLoad
    console: Console

    @property
    def folder(self) -> SearchFolder:
        return SearchFolder(self.settings.out)

    def tell(self) -> None:
        """Certify the fastest, and the fastest that the engine serves; print the report and the result; export."""
        state, folder = self.state, self.folder
        within = self.within_sla([read_evaluation(path) for path in folder.evaluations(state.finalists)])
        served = self.fastest_served(within)
        best = [evaluation.drafter for evaluation in within[:1] if does_pay(evaluation)]
        evaluations = self.certified([*best, *([served] if served else [])])
        at_load, within = at_batch_size(evaluations, self.load.batch_size), self.within_sla(evaluations)
        self.console.print(f"\nreport: {build_report(folder.comparison)}")
        print_summary(folder.comparison, self.console)
        pays = bool(within) and does_pay(within[0])
        where = " in the bundled decoder" if self.settings.timed_engine else ""
        nothing = f"nothing pays on this traffic at this load{where}" if within else NONE_KEEPS_SLA
        title = f"the best drafter is {within[0].drafter}, {draft_text(within[0].best.setting)}" if pays else nothing
        lines = [*sla_lines(at_load, self.load.sla), *self.with_more_time()]
        write_whole(folder.page, auto_page(state, fastest_first(at_load), within, lines))
        self.console.print(f"how it was found: {folder.page}", soft_wrap=True)
        for line in (title, *lines):
            self.console.print(line, soft_wrap=True)
        if served:
            [chosen] = [evaluation for evaluation in chains_alone(evaluations) if evaluation.drafter == served]
            self.export_chosen(chosen)

    def within_sla(self, evaluations: list[Evaluation]) -> list[Evaluation]:
        """Return what was measured at the load and is not shown to break the SLA, the fastest first."""
        return fastest_first(within_sla(at_batch_size(evaluations, self.load.batch_size), self.load.sla))

    def certified(self, chosen: list[str]) -> list[Evaluation]:
        """Return what was measured of all finalists, those that are chosen with a certificate."""
        names, plan = self.folder.drafters_of(self.state.finalists), self.state.plan
        test = read_prompt_set(str(self.folder.prompts.test), self.target, None, self.settings.max_new_tokens)
        with cpu_threads(plan.num_threads):
            return certify_measured(self.target, names, chosen, test, plan.certificates, self.folder.comparison)

    def fastest_served(self, within: list[Evaluation]) -> str | None:
        """Return the first of those that pay that the engine serves; say so where there is none of them."""
        chains, engine = fastest_first(chains_alone(within)), self.settings.engine or "vllm"
        paying = (
            self.paying_in_engine(chains) if self.settings.timed_engine else [row for row in chains if does_pay(row)]
        )
        served = (evaluation.drafter for evaluation in paying if self.is_exportable(evaluation, engine))
        name = next(served, None)
        if paying and name is None:
            self.console.print(f"{engine} serves none of those that pay: nothing is exported")
        return name

    def paying_in_engine(self, evaluations: list[Evaluation]) -> list[Evaluation]:
        """Return what is foretold to pay in the engine, the fastest first, and say how fast each of them would be.

        It follows from the acceptance that was measured at the end, and from the engine's own times.
        """
        speedups = {
            evaluation.drafter: max(self.speedup_in_engine(evaluation.drafter, row) for row in evaluation.results)
            for evaluation in evaluations
        }
        told = ", ".join(f"{name} {speedup:.2f}×" for name, speedup in speedups.items())
        self.console.print(f"foretold for {self.settings.check} from its own times: {told}", soft_wrap=True)
        paying = [evaluation for evaluation in evaluations if speedups[evaluation.drafter] > 1]
        return sorted(paying, key=lambda evaluation: speedups[evaluation.drafter], reverse=True)

    def speedup_in_engine(self, drafter: str, row: Result) -> float:
        """Return the speedup that an engine's own times foretell for what a finalist was measured to accept."""
        [name] = [
            score.name for score in self.state.finalists if self.folder.drafter_of(score.name, score.steps) == drafter
        ]
        setting = row.setting
        return self.folder.costs(name).speedup(
            row.tokens_a_round, setting.draft_length, setting.batch_size, self.load.context
        )

    def served_drafts(self, chosen: Evaluation) -> tuple[Evaluation, Schedule | None]:
        """Return what was measured at the load, or at all that a schedule follows from, and that schedule if any.

        What broke the SLA at the load is left out. Where an engine was timed, only the rows of the draft lengths that
        its times foretell as fastest are returned.
        """
        allowed = [
            row
            for row in chosen.results
            if row.setting.batch_size != self.load.batch_size or kept(row, self.load.sla) is not False
        ]
        chosen = replace(chosen, results=allowed)
        schedule = schedule_of(chosen.drafter_kind, chosen)
        if self.settings.timed_engine:
            speedups = [(self.speedup_in_engine(chosen.drafter, row), row) for row in chosen.results]
            fastest = {
                size: max((found for found in speedups if found[1].setting.batch_size == size), key=itemgetter(0))
                for size in sorted({row.setting.batch_size for row in chosen.results})
            }
            lengths = {size: row.setting.draft_length if speedup > 1 else 0 for size, (speedup, row) in fastest.items()}
            schedule = as_schedule(chosen.drafter_kind, lengths)
            chosen = replace(chosen, results=[row for _, row in fastest.values()])
        return (chosen, schedule) if schedule else (at_batch_size([chosen], self.load.batch_size)[0], None)

    def export_chosen(self, chosen: Evaluation) -> None:
        """Export a drafter, given what was measured of it at all batch sizes, unless it is not lossless."""
        out = self.folder.export
        if chosen.certificate and not chosen.certificate.passed:
            self.console.print(f"{chosen.drafter} did not pass its certificate of losslessness: nothing is exported")
        elif out.is_dir():
            self.console.print(f"exported: {out}", soft_wrap=True)
        else:
            measured, schedule = self.served_drafts(chosen)
            exported = ExportSettings(
                target=self.target.name,
                checkpoint=chosen.drafter,
                engine=self.settings.engine or "vllm",
                check=self.settings.check,
                prompts=str(self.folder.prompts.test) if self.settings.check else None,
                max_new_tokens=self.settings.max_new_tokens,
                out=out,
            )
            export(exported, self.target, self.console, measured, schedule)

    def is_exportable(self, measured: Evaluation, engine: str) -> bool:
        """Return whether an engine serves what was measured, for this target too where it was trained."""
        if not is_served(measured.drafter_kind, engine):
            return False
        is_trained = measured.drafter_kind not in TRAINING_FREE
        return not is_trained or why_not_served(load_drafter(measured.drafter, self.target), engine) is None

    def with_more_time(self) -> list[str]:
        """Return what more training would bring to the winner, if there is one."""
        final = self.state.final
        if final is None:
            return []
        before = self.state.newest_scores[final.name]
        return [more_time(before, final, self.folder.costs(final.name), self.load)]


def does_pay(measured: Evaluation) -> bool:
    """Return whether a drafter was measured to pay at one of its settings."""
    return any(row.pays for row in measured.results)
