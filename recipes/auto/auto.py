"""`draftsmith auto`: from a target and its traffic to the best drafter that a budget of time can buy.

Each stage writes what it found into auto.json when it is done, so the same command goes on where it was stopped. Of
several processes all answer, train and count acceptance; the first one decides, measures time, writes and tells.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.processes import decided_by_first, device_of_process, locked, rank_and_num_ranks
from draftsmith.data.progress import notice
from draftsmith.data.prompts.prompts import read_prompt_set, read_prompts
from draftsmith.data.prompts.splits import write_prompts
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.measure import DraftSetting, MeasureSettings, PromptSet
from draftsmith.inference.planning.cost_measurement import (
    CostRange,
    longest_context,
    measure_costs_in_turns,
    powers_of_2,
)
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.costs_after_evaluation import typical_context
from draftsmith.inference.traffic.stages import Sla
from draftsmith.models import Drafter, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import real_path, write_json
from draftsmith.models.storage.sealed_json import read_sealed, write_sealed
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.auto.budget import cost_seconds, in_words, make_plan, plan_lines, recipe_of_auto
from draftsmith.recipes.auto.contenders import new_contenders, served_kinds
from draftsmith.recipes.auto.engine_costs import EngineTimes
from draftsmith.recipes.auto.folder import SearchFolder
from draftsmith.recipes.auto.race import LOOKUPS, NONE_CAN_PAY, Conditions, decided, run_rung, why_over
from draftsmith.recipes.auto.result import SearchResult
from draftsmith.recipes.auto.score import (
    LONGEST,
    Score,
    ScoredLookup,
    ServingLoad,
    best_length,
    longest_draft,
    measure_score,
    needed_rate,
    plain_speedup,
)
from draftsmith.recipes.auto.state import AutoState
from draftsmith.recipes.auto.traffic import describe_answers, divide, longest_prompt
from draftsmith.recipes.auto.tuned_drafts import TunedDrafts, tuned_drafts
from draftsmith.recipes.configs.training_settings import AutoSettings
from draftsmith.recipes.engine_rules.loader_rules import LOADER_RULES, check_name, is_served
from draftsmith.recipes.evaluation.comparison import EvaluationOptions, evaluate_side_by_side
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.quickstart.budget import ANSWERS
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train import TrainConfig, train
from draftsmith.train.evaluation.pooling import subset

MOST_REPEATS = 25


def run(settings: AutoSettings, console: Console) -> None:
    """Do everything, or what an earlier call left to do. Writes only below `settings.out`."""
    with locked(settings.out):
        Auto(settings, console).run()


class Auto:
    """The stages of one search, in its folder."""

    def __init__(self, settings: AutoSettings, console: Console) -> None:
        self.settings, self.folder = settings, SearchFolder(settings.out)
        rank, num_ranks = rank_and_num_ranks()
        self.is_first, self.console = rank == 0, console
        console.quiet = console.quiet or not self.is_first
        self.kinds = served_kinds(settings)
        self.target = load_target(settings.target or str(EMBEDDED_TARGET), settings.device or device_of_process())
        if num_ranks > 1:
            PartialState(cpu=self.target.device.type == "cpu")  # in which the processes find each other
        self.state = decided_by_first(lambda: self.earlier() or self.begin())

    def run(self) -> None:
        """Say what the prompts are and what the time allows, and go through the stages that are left."""
        for line in (self.state.traffic.text, *plan_lines(self.state.plan), needed_line(self.state.needed_rates)):
            self.console.print(line)
        if self.settings.dry_run:
            return
        self.answer()
        self.race()
        self.finish()
        if self.is_first:
            SearchResult(self.settings, self.target, self.state, self.load, self.console).tell()

    # --- what is found out before anything is trained

    def earlier(self) -> AutoState | None:
        """Return what an earlier call found; `UserError` where it was asked for something else."""
        path = self.folder.state
        if not path.exists():
            return None
        state = read_sealed(AutoState, path, f"restore it, give another --out, or remove {self.settings.out}")
        if state.asked != asked(self.settings):
            raise UserError(
                f"{self.settings.out} holds a search with {state.asked}: give that to go on, another --out, or "
                "remove it"
            )
        if state.target_fingerprint != self.target.fingerprint():
            raise UserError(
                f"{self.settings.out} holds a search for {self.target.name} with other weights, config or dtype: give "
                "that target as it was to go on, another --out, or remove it"
            )
        return state

    def begin(self) -> AutoState:
        """Look at what can race, at the traffic, and at what the time allows."""
        settings, target = self.settings, self.target
        longest = longest_prompt(target, settings.max_new_tokens)
        drafters = new_contenders(self.kinds, target, settings.engine)
        traffic = divide(settings.traffic, target, longest, settings.keep_personal_data, self.folder.prompts)
        self.check_names(drafters)
        drafters = self.served_by_timed_engine(drafters)
        training = read_prompts(self.folder.prompts.training)
        self.console.print(f"measuring what {in_words(settings.budget)} allow on this machine ...")
        plan = make_plan(target, training, traffic, drafters, settings.budget, self.answers)
        rivals = {} if self.engine else {name: load_drafter(name, target) for name in LOOKUPS}
        costs = self.costs({**drafters, **rivals}, plan.num_threads)
        needed = {
            kind: needed_rate(costs[kind], longest_draft(drafter), self.load) for kind, drafter in drafters.items()
        }
        over = NONE_CAN_PAY if all(rate is None for rate in needed.values()) else None
        return self.save(AutoState(asked(settings), target.fingerprint(), traffic, plan, needed, [], [], [], over=over))

    def check_names(self, drafters: dict[str, Drafter]) -> None:
        """Raise `UserError` where vLLM would guess another kind of drafter from the name of the folder to export to."""
        for drafter in drafters.values() if self.settings.engine != "sglang" else []:
            if rules := LOADER_RULES.get(("vllm", drafter.kind)):
                check_name(rules.method, "--out", str(real_path(self.folder.export)))

    def served_by_timed_engine(self, drafters: dict[str, Drafter]) -> dict[str, Drafter]:
        """Return the kinds whose costs the timed vLLM tells, for it serves them; all where none is timed.

        Raises `UserError` where none is left.
        """
        if not self.engine:
            return drafters
        found = {}
        for kind, drafter in drafters.items():
            try:
                self.costs({kind: drafter}, None)
                found[kind] = drafter
            except UserError as error:
                notice(f"{kind} does not race: {error}")
        if not found:
            raise UserError(f"--check {self.settings.check} serves none of --drafters {self.settings.drafters}")
        return found

    def save(self, state: AutoState) -> AutoState:
        """Keep what was found so far, and write it."""
        if self.is_first:
            write_sealed(self.folder.state, state)
        self.state = state
        return state

    # --- the stages

    def answer(self) -> None:
        """Let the target answer the prompts to train on."""
        chosen = self.folder.answered
        if self.is_first and not chosen.is_file():
            write_prompts(chosen, read_prompts(self.folder.prompts.training)[: self.state.plan.num_prompts])
        wait_for_first()
        settings = replace(self.answers, answers_per_prompt=self.state.plan.answers_per_prompt)
        prepare(self.target, str(chosen), self.folder.samples, settings)
        wait_for_first()  # it puts together what all wrote
        if self.state.answers is None:
            self.save(replace(self.state, answers=describe_answers(read_samples(self.folder.samples))))
        assert self.state.answers is not None
        self.console.print(self.state.answers.text)

    def race(self) -> None:
        """Score the lookups, and train kinds in rungs until one is left or none can win."""
        if not self.state.lookups:
            lookups = [self.scored(name, name, 0)[0] for name in decided_by_first(self.rivals)]
            self.save(replace(self.state, lookups=lookups))
        plan, payable = self.state.plan, self.state.payable
        for kind in payable[len(self.state.probes) :] if self.state.over is None else []:
            score, _ = self.trained(kind, plan.steps_of_probe(kind, len(payable)))
            self.save(replace(self.state, probes=[*self.state.probes, score]))
        while len(self.state.rungs) < plan.num_rungs and self.state.over is None:
            alive = self.state.rungs[-1].kept if self.state.rungs else payable
            contenders = run_rung(alive, self.state.newest_scores, self.trained, self.conditions)
            rung = decided(len(self.state.rungs) + 1, contenders, self.state.lookups)
            over = why_over(contenders, self.state.lookups, self.plain_speedup)
            self.save(replace(self.state, rungs=[*self.state.rungs, rung], over=over))
            self.console.print(rung.decision)
            if over:
                self.console.print(over)

    @property
    def conditions(self) -> Conditions:
        """The conditions of the race. Engines serve no lookup before a kind, and under an SLA none is predicted."""
        leader = max(self.state.lookups, key=lambda score: score.speedup, default=None)
        if leader is None or self.settings.engine or self.load.sla.tpot_ms is not None:
            return Conditions(self.state.plan, self.load, None)
        return Conditions(self.state.plan, self.load, ScoredLookup(leader, self.folder.costs(leader.name)))

    def rivals(self) -> list[str]:
        """Return the lookups that are rivals: what the engine serves, and a vLLM that is timed may lack a package."""
        found, engine = [], self.settings.engine
        for name in LOOKUPS:
            if engine and not is_served(name, engine):
                notice(f"{name} is no rival: {engine} does not serve it")
                continue
            try:
                if self.engine:
                    self.costs({name: load_drafter(name, self.target)}, None)
                found.append(name)
            except UserError as error:
                notice(f"{name} is no rival: {error}")
        return found

    @property
    def plain_speedup(self) -> float:
        """The speedup that plain decoding is predicted to have: 0 where it breaks the SLA."""
        return plain_speedup(self.folder.costs(next(iter(self.state.needed_rates))), self.load)

    def finish(self) -> None:
        """Give the winner the training that is left, and measure it beside the lookups on prompts that nothing saw."""
        state = self.state
        if state.rungs and state.over is None and state.final is None:
            [kind] = state.rungs[-1].kept
            score, _ = self.trained(kind, state.plan.final_steps(kind, state.newest_scores[kind].steps))
            self.save(replace(state, final=score))
        if self.state.final and self.state.cascade is None and not self.settings.engine:  # engines serve no cascades
            lookup = max(self.state.lookups, key=lambda score: score.speedup)
            name, steps = f"{lookup.name}+{self.state.final.name}", self.state.final.steps
            score, _ = self.scored(self.folder.drafter_of(name, steps), name, steps)
            self.save(replace(self.state, cascade=score))
        if self.state.final and self.state.tuned is None and not self.settings.engine:
            tuned = decided_by_first(self.tuned)
            self.save(replace(self.state, tuned=tuned))
            self.console.print(tuned.text)
        finalists = self.state.finalists
        names, paths = self.folder.drafters_of(finalists), self.folder.evaluations(finalists)
        if decided_by_first(lambda: not all(path.is_file() for path in paths)):
            test, plan = self.tested, self.state.plan
            options = EvaluationOptions(
                plan.num_threads,
                minutes=plan.measure_minutes,
                sample_texts=True,
                skips_impossible=True,
                drafts=dict(zip(names, map(self.measured_drafts, finalists), strict=True)),
                costs=True,
            )
            evaluate_side_by_side(self.target, names, [test], self.grid(), self.folder.comparison, options)

    def tuned(self) -> TunedDrafts:
        """Return the trees and other drafts that are predicted to serve the winner better than chains."""
        assert self.state.final
        final, threads, seconds = self.state.final, self.state.plan.num_threads, cost_seconds(self.settings.budget)
        drafter = load_drafter(self.folder.drafter_of(final.name, final.steps), self.target)
        with cpu_threads(threads):
            return tuned_drafts(self.target, drafter, final.name, self.racing, self.measuring, seconds)

    def grid(self) -> list[MeasureSettings]:
        """Return the settings that are measured at the end: the draft lengths foretold as best, by batch size.

        Smaller batches than the load's are measured for the schedule that is exported: a server's load comes and goes.
        The winner's other drafts are measured at the load alone.
        """
        grid = []
        for size in powers_of_2(self.load.batch_size):
            lengths = sorted({self.foretold_length(score, size) for score in self.state.finalists})
            grid += [replace(self.measuring, batch_size=size, draft=length, repeats=MOST_REPEATS) for length in lengths]
        return grid + [replace(self.measuring, draft=draft, repeats=MOST_REPEATS) for draft in self.other_drafts]

    def foretold_length(self, score: Score, batch_size: int) -> int:
        """Return the draft length that is foretold as best for a finalist at a batch size, one at the least."""
        load = replace(self.load, batch_size=batch_size)
        return max(1, best_length(score, self.folder.costs(score.name), load))

    def measured_drafts(self, score: Score) -> list[DraftSetting]:
        """Return the drafts that a finalist is measured at: the lengths foretold as best for itself, and its others."""
        sizes = powers_of_2(self.load.batch_size)
        lengths = {self.foretold_length(score, size) for size in sizes}
        return [*sorted(lengths), *(self.other_drafts if score == self.state.final else [])]

    @property
    def other_drafts(self) -> list[DraftSetting]:
        """The winner's drafts that are no chains of one length."""
        return list(self.state.tuned.drafts) if self.state.tuned else []

    # --- training and scoring

    def trained(self, kind: str, num_steps: int) -> tuple[Score, Costs]:
        """Train a kind for so many steps in all, and score what it has become."""
        train(self.config(kind, num_steps))
        wait_for_first()  # it writes the checkpoint
        return self.scored(str(self.folder.checkpoint(kind, num_steps)), kind, num_steps)

    def config(self, kind: str, num_steps: int) -> TrainConfig:
        """Return the recipe of a kind for the search."""
        plan = self.state.plan
        config = recipe_of_auto(kind, plan.target_is_small)
        config.target, config.data.samples = plan.target, str(self.folder.samples)
        config.data.held_out_prompts = 0
        if plan.stored_layers is not None and not config.drafter.starts_from_layers:
            config.data.features, config.data.features_layers = "stored", plan.stored_layers
            config.data.features_dir = str(self.folder.features)
        config.evaluation.prompts = None
        config.run.dir, config.run.device = str(self.folder.run(kind)), self.settings.device
        config.run.steps = config.run.checkpoint_every = num_steps
        config.run.log_every = max(1, num_steps // 40)
        return config

    def scored(self, drafter_name: str, name: str, steps: int) -> tuple[Score, Costs]:
        """Return the score of a drafter on the prompts of the race, and what it costs."""
        score, costs = decided_by_first(lambda: self.measured(drafter_name, name, steps))
        self.console.print(score.text)
        return score, costs

    def measured(self, drafter_name: str, name: str, steps: int) -> tuple[Score, Costs]:
        """Measure a drafter on the prompts of the race, and what it costs."""
        drafter, threads = load_drafter(drafter_name, self.target), self.state.plan.num_threads
        costs = self.costs({name: drafter}, threads)[name]
        with cpu_threads(threads):
            score = measure_score(self.target, drafter, name, steps, self.racing, self.measuring, costs, self.load)
        return score, costs

    def costs(self, drafters: dict[str, Drafter], num_threads: int | None) -> dict[str, Costs]:
        """Return what rounds with each drafter cost. Training does not change that, so it is measured once.

        Drafters that are measured together take turns, so that their costs can be compared.
        """
        new = {name: drafter for name, drafter in drafters.items() if not self.folder.costs_file(name).is_file()}
        if self.engine:
            found = {name: self.engine.costs(name, new[name], longest_draft(new[name])) for name in new}
        else:
            context = min(self.load.context, longest_context(self.target, LONGEST))
            reach = CostRange(self.load.batch_size, context, LONGEST, seconds=cost_seconds(self.settings.budget))
            with cpu_threads(num_threads):
                found = measure_costs_in_turns(self.target, new, reach)
        for name, costs in found.items():
            write_json(self.folder.costs_file(name), to_json(costs))
        return {name: self.folder.costs(name) for name in drafters}

    @cached_property
    def engine(self) -> EngineTimes | None:
        """The engine in which rounds are timed, if one is."""
        environment = self.settings.timed_engine
        if environment is None:
            return None
        return EngineTimes(environment, self.target, self.prompt_set(self.folder.prompts.racing).token_ids, self.load)

    @property
    def answers(self) -> PrepareSettings:
        """The settings that the target answers with."""
        return replace(ANSWERS, max_new_tokens=self.settings.max_new_tokens)

    @property
    def measuring(self) -> MeasureSettings:
        """The settings that drafters are measured with: temperature, batch size and length of the traffic's answers."""
        settings, logged = self.settings, self.state.traffic.temperature
        temperature = (logged or 0.0) if settings.temperature is None else settings.temperature
        return MeasureSettings(temperature, batch_size=settings.batch_size, max_new_tokens=settings.max_new_tokens)

    @cached_property
    def load(self) -> ServingLoad:
        """The load that speedups are predicted for."""
        racing = self.prompt_set(self.folder.prompts.racing)
        context = typical_context(racing, self.settings.max_new_tokens)
        return ServingLoad(self.settings.batch_size, context, Sla(self.settings.sla_ttft_ms, self.settings.sla_tpot_ms))

    @cached_property
    def racing(self) -> PromptSet:
        """The prompts that scores are of."""
        return subset(self.prompt_set(self.folder.prompts.racing), list(range(self.state.plan.num_racing)))

    @cached_property
    def tested(self) -> PromptSet:
        """The prompts that tell the result."""
        return subset(self.prompt_set(self.folder.prompts.test), list(range(self.state.plan.num_tested)))

    def prompt_set(self, path: Path) -> PromptSet:
        return read_prompt_set(str(path), self.target, None, self.settings.max_new_tokens)


def wait_for_first() -> None:
    """Wait until the first process has come here, too."""
    decided_by_first(lambda: None)


def asked(settings: AutoSettings) -> str:
    """Return the flags that a search was asked for with, of which nothing may change when it goes on."""
    names = ("target", "traffic", "drafters", "engine", "keep_personal_data", "batch_size", "max_new_tokens", "budget")
    values = {name: getattr(settings, name) for name in (*names, "temperature", "sla_ttft_ms", "sla_tpot_ms")}
    values["check"] = settings.timed_engine
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    given = {flag: value for flag, value in flags.items() if value is not None and value is not False}
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in given.items())


def needed_line(needed_rates: dict[str, float | None]) -> str:
    """Return in words what must be learnt to pay."""
    rates = [
        f"{kind} {'none is enough, it does not race' if rate is None else f'{rate:.2f}'}"
        for kind, rate in needed_rates.items()
    ]
    return f"pays where drafted tokens are accepted at a rate of: {', '.join(rates)}"
