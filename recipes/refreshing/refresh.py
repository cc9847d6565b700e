"""`draftsmith refresh`: the drafter follows the traffic, round by round.

A round takes new prompts, asks whether the traffic moved, trains a challenger from the champion, judges both, and
promotes the better one. Each stage writes what it found into state.json when it is done, so the same command goes on
where it was stopped; the champion serves all the while.
"""

import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from rich.console import Console

from draftsmith.data.answers.prepare import prepare
from draftsmith.data.http import Server
from draftsmith.data.processes import locked
from draftsmith.data.progress import notice, warn
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.prompts.splits import write_prompts
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats, total_of
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, pick_prompts
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_whole
from draftsmith.recipes.auto.traffic import FEWEST, longest_prompt
from draftsmith.recipes.configs.training_settings import RefreshSettings
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.recipes.refreshing.champions import LINK, Champions
from draftsmith.recipes.refreshing.folders import copy_checkpoint, keep_only
from draftsmith.recipes.refreshing.judgement import Comparison, Judgement, compare
from draftsmith.recipes.refreshing.page import refresh_page
from draftsmith.recipes.refreshing.state import RefreshState, Round, read_state, write_state
from draftsmith.recipes.refreshing.traffic import MOST_JUDGED, clean, read_new
from draftsmith.recipes.refreshing.traffic_shift import (
    Look,
    Survival,
    acceptance_p_value,
    domains_p_value,
    fall_in_history,
    shift_of,
    why_moved,
)
from draftsmith.recipes.refreshing.training import make_plan, training_config
from draftsmith.recipes.refreshing.window import Window
from draftsmith.train import train
from draftsmith.train.engine.judging import swap_drafter
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.run_folder.run_folder import best_measured

CHALLENGERS = "challengers"  # folder of the last one, where it may still become better than the champion
DRAFT_LENGTH = 4  # at which acceptance is measured, as far as a drafter drafts so many
DAY = 86_400.0


def run(settings: RefreshSettings, console: Console) -> None:
    """Make a round, or one after the other with `settings.follow`. Writes only below `settings.out`."""
    if settings.rollback:
        roll_back(settings, console)
        return
    serving, state = Champions(settings.out).serving, read_state(settings.out)
    if serving is None and settings.drafter is None:
        raise UserError(f"{settings.out} holds no champion yet: give the one that serves now by --drafter CHECKPOINT")
    if settings.drafter and state.rounds:
        notice(f"champion {serving} serves already; --drafter is of the first call and has no effect")
    target = load_target(settings.target or state.target or str(EMBEDDED_TARGET), settings.device)
    if settings.follow is None:
        one_round(settings, target, console)
        return
    with locked(settings.out):
        Refresh(settings, target, console)  # raises here what no other traffic would mend
    while True:
        try:
            one_round(settings, target, console)
        except UserError as error:  # such as a log that is just being rotated
            console.print(f"{time.strftime('%Y-%m-%d %H:%M')}  {error}")
        time.sleep(60 * settings.follow)


def one_round(settings: RefreshSettings, target: Target, console: Console) -> None:
    """Make one round in a folder that no other process writes meanwhile."""
    with locked(settings.out):
        Refresh(settings, target, console).run()


def roll_back(settings: RefreshSettings, console: Console) -> None:
    """Let the champion before serve again at once, also while a round goes on, which then promotes nothing."""
    champions = Champions(settings.out)
    number = champions.roll_back()
    console.print(f"champion {number} serves again: {champions.link}", soft_wrap=True)
    swap_into_server(settings, champions)


def swap_into_server(settings: RefreshSettings, champions: Champions) -> None:
    """Let the running server take the champion, where one is given; say so where it does not."""
    if settings.server is None:
        return
    try:
        swap_drafter(Server(settings.server, "--server", "start it, or leave it out"), champions.link)
    except UserError as error:
        warn(f"{error}; start it anew with {champions.link}")


class Refresh:
    """The stages of a round, in the folder of a refresh."""

    def __init__(self, settings: RefreshSettings, target: Target, console: Console) -> None:
        self.settings, self.target, self.console, self.out = settings, target, console, settings.out
        self.champions, self.window = Champions(self.out), Window(self.out / "prompts")
        self.state = read_state(self.out)
        self.longest = longest_prompt(target, settings.max_new_tokens)
        serving = self.champions.serving
        # Both raise where the drafter does not go with the target.
        champion = self.first_champion() if serving is None else load_drafter(self.champions.path(serving), target)
        if self.state.target != target.name:
            self.save(replace(self.state, target=target.name))
        if serving is None:
            self.champions.begin(champion)

    def run(self) -> None:
        """Finish the round that an earlier call began, or make one of the new prompts."""
        self.forget_old_prompts()
        self.tidy()
        if self.state.open is None and not self.begin():
            return
        self.look()
        if self.round.look and self.round.look.trains:
            self.train()
            self.judge()
        self.finish()

    # --- what is known

    @property
    def round(self) -> Round:
        """The round that is going on."""
        assert self.state.open is not None
        return self.state.open

    @property
    def folder(self) -> Path:
        """The folder of the round's training, which is removed at its end."""
        return self.out / "rounds" / str(self.round.number)

    @property
    def prompts(self) -> int:
        """The round whose prompts are the newest."""
        assert self.round.prompts is not None
        return self.round.prompts

    @cached_property
    def champion(self) -> Drafter:
        """The drafter that served when the round began."""
        return load_drafter(self.champions.path(self.round.champion), self.target)

    @cached_property
    def fingerprint(self) -> str | None:
        """The fingerprint of the target."""
        return self.target.fingerprint()

    @property
    def target_is_new(self) -> bool:
        """Whether the last round before this one that looked at its traffic had another target."""
        seen = [round.fingerprint for round in self.state.rounds if round.look]
        return bool(seen) and self.fingerprint != seen[-1]

    def first_champion(self) -> Drafter:
        """Return the drafter that was given. Raises `UserError` where it cannot be trained on."""
        assert self.settings.drafter is not None
        drafter = load_drafter(self.settings.drafter, self.target)
        if not drafter.trainable() or drafter.config.changes_target:
            raise UserError(
                f"--drafter {self.settings.drafter}: give the checkpoint of a drafter that is trained beside its target"
            )
        return drafter

    def save(self, state: RefreshState) -> None:
        """Write what was found so far."""
        write_state(self.out, state)
        self.state = state

    def update(self, current: Round) -> None:
        """Write what was found in the round so far."""
        self.save(self.state.with_round(current))

    # --- the stages

    def forget_old_prompts(self) -> None:
        """Delete prompts older than the window, and give up a round whose own are, or whose target has changed."""
        oldest, current = time.time() - DAY * self.settings.window, self.state.open
        kept = [round.number for round in self.state.rounds if round.prompts and round.time >= oldest]
        if current and current.prompts not in kept:
            self.close("given up: its prompts are not kept any more")
        elif current and current.fingerprint != self.fingerprint:
            self.close("given up: the target has changed")
        self.window.keep_only(kept)

    def begin(self) -> bool:
        """Begin a round with the new prompts; return whether there is one.

        Where the target is new, the newest prompts that are kept do. A round without prompts to trust ends at once.
        """
        source, kept, number = self.settings.traffic, self.window.numbers(), self.state.next_number
        if source is None and not (self.target_is_new and kept):
            raise UserError("--traffic: give new prompts; only a new target is tried on those that are kept")
        new, taken = read_new(source, self.state.taken.get(source)) if source else ([], None)
        split, counts = clean(new, self.target, self.longest, self.settings.keep_personal_data)
        prompts = number if split.train else kept[-1] if kept and self.target_is_new else None
        if prompts is None and not counts.is_noise:
            self.console.print(f"{counts.text}: too few for a round, so they wait for more")
            return False
        state, serving = self.state, self.champions.serving
        if split.train:
            self.window.write(number, split)
        if source and taken and (split.train or counts.is_noise):
            state = replace(state, taken={**state.taken, source: taken})
        assert serving is not None
        began = Round(number, time.time(), self.target.name, self.fingerprint, serving, prompts, counts)
        self.save(state.with_round(began))
        self.console.print(f"round {number}: {counts.text}")
        if prompts is None:
            self.close(f"refused: {counts.num_noise} of {counts.num_new} prompts are noise")
        return prompts is not None

    def look(self) -> None:
        """Ask whether the traffic moved, or how much acceptance a new target left, and decide whether to train."""
        if self.round.look is not None:
            return
        newest = self.acceptance_on(self.judging(self.prompts))
        look = Look(total_of(newest).mean_acceptance_length)
        reference = self.state.last_trained or self.first_kept()
        if self.target_is_new:
            survival = self.survival()
            left = f", and {survival.share:.0%} of what drafting brought survives" if survival else ""
            look = replace(look, survival=survival, reason=f"the target is new{left}")
        elif reference is None or reference.prompts not in self.window.numbers():
            look = replace(look, reason="there is no earlier traffic to compare with")
        else:
            look = self.compared(look, newest, reference)
        self.update(replace(self.round, look=look))
        self.console.print(f"{'training' if look.trains else 'no training'}: {look.reason}")

    def first_kept(self) -> Round | None:
        """Return the oldest round before this one whose prompts are kept, if any."""
        kept = self.window.numbers()
        return next((round for round in self.state.rounds if round.prompts in kept and round.outcome), None)

    def compared(self, look: Look, newest: list[Stats], reference: Round) -> Look:
        """Return the look with the tests of the newest traffic beside that of an earlier round, and the decision."""
        assert reference.prompts is not None
        new, old = self.window.domains(self.prompts), self.window.domains(reference.prompts)
        earlier = self.acceptance_on(self.judging(reference.prompts))
        look = replace(
            look,
            domains_p_value=domains_p_value(new, old),
            shift=shift_of(new, old),
            acceptance_p_value=acceptance_p_value(newest, earlier),
        )
        reason = why_moved(look, self.settings.false_alarms)
        if reason is None and self.settings.history:
            reason = fall_in_history(self.settings.history, reference.time)
        if reason is None and reference.promoted:
            reason = "the traffic has not moved, but the last training paid"
        return replace(look, trains=reason is not None, reason=reason or "the traffic has not moved")

    def survival(self) -> Survival | None:
        """Return how much of the champion's acceptance a new target left; None where it was not measured before."""
        before = next((round for round in reversed(self.state.rounds) if round.outcome and round.acceptance), None)
        if before is None or before.acceptance is None or before.serves != self.round.champion:
            return None
        if before.prompts is None or before.prompts not in self.window.numbers():
            return None
        now = self.acceptance_on(self.judging(before.prompts))
        return Survival(before.acceptance, total_of(now).mean_acceptance_length)

    def train(self) -> None:
        """Let the target answer new and older prompts, and train the challenger on the answers."""
        if self.round.judgement is not None:
            return
        new = self.window.training(self.prompts)
        old = self.window.earlier_training(self.prompts, len(new) + MOST_JUDGED)
        if self.round.plan is None:
            timed = load_drafter(self.champions.path(self.round.champion), self.target).train()
            self.update(replace(self.round, plan=make_plan(self.target, timed, new, old, self.settings)))
        plan = self.round.plan
        assert plan is not None
        self.console.print(plan.text)
        chosen = self.folder / "prompts.jsonl"
        if not chosen.is_file():  # later there may be fewer older ones
            write_prompts(chosen, [*pick_prompts(new, plan.num_new), *old[: plan.num_old]])
        prepare(self.target, str(chosen), self.folder / "samples", plan.answers)
        train(training_config(plan, self.target, self.start(), self.folder, self.settings.device))

    def start(self) -> Path:
        """Return the checkpoint to train on from: the champion, or the last challenger where nothing was decided.

        So what one round cannot show adds up over several.
        """
        last, champion = self.state.last_trained, self.round.champion
        if last and (last.fingerprint, last.champion) == (self.fingerprint, champion):
            challenger = self.out / CHALLENGERS / str(last.number)
            if challenger.is_dir():
                return challenger
        return self.champions.path(champion)

    def judge(self) -> None:
        """Judge the challenger beside the champion, on the newest held-out prompts and on those of before."""
        if self.round.judgement is not None:
            return
        challenger = load_drafter(self.challenger(), self.target)
        old = self.window.earlier_held_out(self.prompts, MOST_JUDGED)
        new = self.beside_champion(challenger, self.judging(self.prompts))
        judgement = Judgement(new, self.beside_champion(challenger, old) if len(old) >= FEWEST else None)
        self.update(replace(self.round, judgement=judgement))
        self.console.print(judgement.text)

    def challenger(self) -> Path:
        """Return the checkpoint that training ended with: the best on held-out answers, else the last."""
        run = self.folder / "run"
        return best_measured(run) or checkpoints(run)[-1]

    def finish(self) -> None:
        """Promote the challenger where it is better, and end the round."""
        judgement, look = self.round.judgement, self.round.look
        assert look is not None
        if judgement is None:
            self.close(f"nothing to do: {look.reason}", look.acceptance)
            return
        reason, number = judgement.reason_against, self.round.number
        if judgement.is_undecided:
            copy_checkpoint(self.challenger(), self.out / CHALLENGERS / str(number))
        if reason is None and not self.champions.promote(number, self.challenger(), self.round.champion):
            reason = "it was rolled back meanwhile"
        if reason is not None:
            self.close(f"not promoted: {reason}", judgement.new.decoded.champion)
            return
        self.close(f"promoted: champion {self.round.number} serves", judgement.new.decoded.challenger, promoted=True)
        swap_into_server(self.settings, self.champions)

    def close(self, outcome: str, acceptance: float | None = None, promoted: bool = False) -> None:
        """End the round: write what came of it, and remove what it trained on."""
        current = self.round
        self.update(replace(current, outcome=outcome, acceptance=acceptance, promoted=promoted))
        self.tidy()
        self.console.print(f"round {current.number}: {outcome} ({self.out / LINK})", soft_wrap=True)

    def tidy(self) -> None:
        """Remove what no round needs any more, and write the page: again at each call, for one may have been killed."""
        last = self.state.last_trained
        keep_only(self.out / "rounds", [self.round.number] if self.state.open else [])
        keep_only(self.out / CHALLENGERS, [last.number] if last else [])
        if self.state.rounds:
            write_whole(self.out / "refresh.html", refresh_page(self.state, self.champions.serving))

    # --- measuring

    @property
    def measuring(self) -> MeasureSettings:
        """The settings that drafters are measured with, once: acceptance is the same in every repeat."""
        settings, longest = self.settings, self.champion.max_draft_length or DRAFT_LENGTH
        return MeasureSettings(
            settings.temperature,
            batch_size=settings.batch_size,
            draft=min(DRAFT_LENGTH, longest),
            max_new_tokens=settings.max_new_tokens,
            repeats=1,
        )

    def judging(self, number: int) -> list[Prompt]:
        """Return held-out prompts of a round, by which its traffic is judged."""
        return pick_prompts(self.window.held_out(number), MOST_JUDGED)

    def acceptance_on(self, prompts: list[Prompt]) -> list[Stats]:
        """Return the champion's counters on each prompt."""
        self.champion.forget()
        decoder, settings = SpeculativeDecoder(self.target, self.champion), self.measuring
        output = decoder.decode(
            encode_prompts(prompts, self.target), settings.resolve(self.champion), batch_size=settings.batch_size
        )
        return output.stats.requests

    def beside_champion(self, challenger: Drafter, prompts: list[Prompt]) -> Comparison:
        """Return the challenger beside the champion on some prompts."""
        prompt_set = PromptSet("held out", encode_prompts(prompts, self.target))
        return compare(self.target, self.champion, challenger, prompt_set, self.measuring)
