"""The loop that keeps a drafter good: it moves when the traffic does, promotes what is better, and survives a kill."""

import json
import math
import random
import shutil
import string
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk_faults import contents, recorded_changes, restore
from drafters import untrained
from rich.console import Console
from scipy.stats import hypergeom
from transformers import LlamaForCausalLM

from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.data.prompts.sources import read_folder
from draftsmith.data.prompts.splits import Split
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.models import Drafter, Target, load_drafter, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.recipes.auto.traffic import FEWEST
from draftsmith.recipes.configs.training_settings import RefreshSettings
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.recipes.refreshing import refresh, traffic, traffic_shift, training
from draftsmith.recipes.refreshing.champions import KEPT, Champions
from draftsmith.recipes.refreshing.folders import copy_checkpoint
from draftsmith.recipes.refreshing.judgement import Comparison, Judgement, Lengths, compare
from draftsmith.recipes.refreshing.state import Round, read_state
from draftsmith.recipes.refreshing.traffic import bits_per_byte, clean, read_new
from draftsmith.recipes.refreshing.traffic_shift import Look, acceptance_p_value, domains_p_value, shift_of, why_moved
from draftsmith.recipes.refreshing.training import RoundPlan
from draftsmith.recipes.refreshing.window import Window
from draftsmith.recipes.watching.history import History
from draftsmith.recipes.watching.readings import Latency, Reading
from draftsmith.train.engine.vllm_counters import Counters

# --- whether the traffic moved


def stats_of(number: int, rate: float, chances: np.random.Generator) -> list[Stats]:
    """Return prompts of 20 drafts of four tokens, of which about this share is accepted; each has its own rate."""
    found = []
    for own in chances.beta(8 * rate, 8 * (1 - rate), size=number):
        accepted = chances.binomial(4, own, size=20)
        found.append(Stats(4, 20, 80, int(accepted.sum()), int(accepted.sum()) + 20, 20, [0, 0, 0, 0, 20]))
    return found


def alarms(new_rate: float, new_shares: list[float], rounds: int) -> float:
    """Return the share of simulated rounds that move, beside traffic of rate 0.5 and equal shares."""
    chances, number = np.random.default_rng(0), 0
    names = ["code", "chat", "mail"]
    for _ in range(rounds):
        new, old = stats_of(24, new_rate, chances), stats_of(32, 0.5, chances)
        counts = [
            dict(zip(names, chances.multinomial(200, part).tolist(), strict=True)) for part in (new_shares, [1 / 3] * 3)
        ]
        look = Look(2.0, domains_p_value(*counts), shift_of(*counts), acceptance_p_value(new, old))
        number += why_moved(look, 0.2) is not None
    return number / rounds


def test_traffic_that_stays_is_cried_as_moved_as_seldom_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of both tests is 0.2; the share of alarms in 300 rounds may lie three standard errors above it."""
    monkeypatch.setattr(traffic_shift, "DRAWS", 199)
    monkeypatch.setattr(traffic_shift, "LEAST_SHIFT", 0.0)
    found = alarms(0.5, [1 / 3] * 3, 300)
    assert 0.05 < found <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / 300)
    assert alarms(0.5, [0.6, 0.2, 0.2], 20) == 1.0
    assert alarms(0.25, [1 / 3] * 3, 20) == 1.0
    assert alarms(0.75, [1 / 3] * 3, 20) < 0.5  # more acceptance asks for no training


def test_the_chance_of_domains_is_that_of_the_hypergeometric_distribution() -> None:
    """The exact chance of two domains is a sum: 7 of 20 new prompts are of a domain that has 17 of all 60."""
    numbers = np.arange(18)
    chances = hypergeom(60, 17, 20).pmf(numbers)
    at_least_as_far = np.abs(numbers - 17 * 20 / 60) >= abs(7 - 17 * 20 / 60) - 1e-9
    found = domains_p_value({"code": 7, "chat": 13}, {"code": 10, "chat": 30})
    assert found == pytest.approx(chances[at_least_as_far].sum(), abs=4 * math.sqrt(0.25 / traffic_shift.DRAWS))


def test_a_shift_that_is_sure_and_small_moves_nothing() -> None:
    """Two percent of a million prompts are no chance, and no reason to train."""
    new, old = {"code": 520_000, "chat": 480_000}, {"code": 500_000, "chat": 500_000}
    look = Look(2.0, domains_p_value(new, old), shift_of(new, old))
    assert look.domains_p_value is not None
    assert look.domains_p_value < 0.001
    assert look.shift == pytest.approx(0.02)
    assert why_moved(look, 0.05) is None
    assert "moved by 20%" in str(why_moved(replace(look, shift=0.2), 0.05))


def test_a_fall_that_watch_has_found_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "watch.db"
    assert traffic_shift.fall_in_history(path, 0.0) is None
    assert "there is no such file" in capsys.readouterr().err
    history = History(path)
    chances = np.random.default_rng(0)
    for minute in range(120):
        accepted = int(chances.binomial(1000, 0.6 if minute < 60 else 0.5))
        counters = Counters(1000, 1000, accepted, (accepted,))
        history.add("http://one", Reading(60.0 * minute, counters, None, Latency(), Latency(), 0.0))
    assert "http://one: acceptance length has fallen" in str(traffic_shift.fall_in_history(path, 1800.0))
    assert traffic_shift.fall_in_history(path, 7200.0) is None


# --- new traffic


def write_rows(path: Path, first: int, end: int, domain: str = "forge") -> Path:
    """Append prompts of the tiny target's words."""
    rows = [{"prompt": f"strike {'the iron ' * (i % 4)}{i} {domain}", "domain": domain} for i in range(first, end)]
    with open(path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_log_that_grows_is_read_from_where_it_was_left(tmp_path: Path) -> None:
    log = write_rows(tmp_path / "log.jsonl", 0, 10)
    prompts, taken = read_new(str(log), None)
    assert len(prompts) == 10
    assert read_new(str(log), taken) == ([], taken)
    write_rows(log, 10, 13)
    more, taken = read_new(str(log), taken)
    assert [str(prompt.text).split()[-2] for prompt in more] == ["10", "11", "12"]
    log.unlink()
    write_rows(log, 5, 30)  # rotated: another file of the same name
    assert len(read_new(str(log), taken)[0]) == 25


def test_prompts_that_nobody_can_answer_are_left_out(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that cannot be answered are left out: one of them would stop `prepare`, and so every round."""
    monkeypatch.setattr(traffic, "NOISE_BITS", math.inf)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    unfit = [Prompt(text="<|endoftext|>strike"), Prompt(messages=[{"role": "user", "content": [picture]}])]
    prompts = [Prompt(text=f"strike {i}") for i in range(80)]
    split, counts = clean([*prompts, *unfit, Prompt(text="iron " * 400)], tiny_target, 100, False)
    assert (counts.num_new, counts.num_unfit, counts.num_too_long, counts.num_noise) == (83, 2, 1, 0)
    assert len(split.train) + len(split.held_out) == 80


def test_bits_are_those_of_the_model_itself(tiny_target: Target) -> None:
    """transformers' own loss of each text alone is the witness; of a text without a second token there are none."""
    texts = [f"The smith heats the {word}" for word in ("iron", "iron again and again", "x")] * 7
    encoded, expected = [tiny_target.encode(text) for text in texts], []
    for text, ids in zip(texts, encoded, strict=True):
        row = torch.tensor([ids])
        with torch.no_grad():
            loss = float(tiny_target.model(row, labels=row).loss)
        expected.append(loss * (len(ids) - 1) / math.log(2) / len(text.encode()))
    assert bits_per_byte([*encoded, [5]], tiny_target) == pytest.approx([*expected, 0.0], rel=1e-4)


def test_garbage_is_left_out_and_a_round_of_it_refused() -> None:
    target, chances = Target.from_pretrained(EMBEDDED_TARGET, "cpu"), random.Random(0)
    code = read_folder(Path(__file__).parents[2] / "models", ("py",))
    modules = [Prompt(text=str(prompt.text)[:200]) for prompt in code[:80]]
    garbage = [Prompt(text="".join(chances.choices(string.printable[:94], k=100))) for _ in range(40)]
    split, counts = clean([*modules, *garbage], target, 256, False)
    assert len(garbage) <= counts.num_noise < len(garbage) + 5  # a table of numbers is strange to it, too
    assert not {prompt.text for prompt in [*split.train, *split.held_out]} & {prompt.text for prompt in garbage}
    assert len(split.held_out) >= FEWEST
    refused, counts = clean([*modules[:30], *garbage], target, 256, False)
    assert counts.is_noise
    assert not refused.train


# --- judging


def lengths(low: float, high: float) -> Lengths:
    middle = (low + high) / 2
    return Lengths(64, 2.0, 2.0 + middle, middle, (low, high))


def comparison(low: float, high: float, divergences: int = 0, decoded: tuple[float, float] = (-0.5, 0.5)) -> Comparison:
    return Comparison(lengths(low, high), lengths(*decoded), 1.0, None, 64, divergences)


def unknown(found: Comparison) -> Comparison:
    """Return a comparison as of too few prompts for an interval."""
    return replace(found, expected=replace(found.expected, ci95=None))


@pytest.mark.parametrize(
    ("new", "old", "reason"),
    [
        (comparison(0.01, 0.2), comparison(-0.09, 0.1), None),
        (comparison(0.01, 0.2), None, None),
        (comparison(-0.2, 0.21), comparison(0.1, 0.2), None),
        (comparison(-0.2, 0.2), comparison(0.1, 0.2), "not expected to be better"),
        (comparison(-0.2, 0.1), comparison(0.1, 0.2), "not expected to be better"),
        # by Student's t with 63 degrees of freedom 95 % lie above the middle less 0.84 of half the interval
        (comparison(0.5, 0.9), comparison(-0.11, 0.1), None),
        (comparison(0.5, 0.9), comparison(-0.13, 0.1), "may lose more than 10%"),  # as after a round of poison
        (comparison(0.1, 0.2, divergences=1), comparison(0.1, 0.2), "not the target's"),
        (comparison(0.1, 0.2), comparison(0.1, 0.2, divergences=1), "not the target's"),
        (unknown(comparison(0.1, 0.2)), None, None),
        (comparison(0.1, 0.2, decoded=(-0.21, 0.02)), None, None),  # 95 % lie below -0.095 + 0.096
        (comparison(0.1, 0.2, decoded=(-0.21, 0.01)), None, "decoding accepts less"),  # -0.1 + 0.092
    ],
)
def test_only_what_is_better_there_and_no_worse_before_is_promoted(
    new: Comparison, old: Comparison | None, reason: str | None
) -> None:
    found = Judgement(new, old).reason_against
    assert (found is None) if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("new", "old", "undecided"),
    [
        (comparison(-0.2, 0.2), None, True),
        (comparison(-0.2, 0.01), None, False),  # 95 % lie below -0.095 + 0.088
        (comparison(-0.2, 0.02), None, True),
        (comparison(0.1, 0.2), None, False),  # it is promoted
        (comparison(0.1, 0.2), comparison(-0.25, 0.05), True),  # kept back, but it may have lost little
        (comparison(0.1, 0.2), comparison(-0.25, -0.1), False),
        (comparison(-0.2, 0.2, divergences=1), None, False),
        (unknown(comparison(-0.2, 0.1)), None, True),
        (comparison(0.1, 0.2, decoded=(-0.21, 0.01)), None, False),
    ],
)
def test_what_is_not_shown_to_be_worse_is_trained_on(new: Comparison, old: Comparison | None, undecided: bool) -> None:
    assert Judgement(new, old).is_undecided == undecided


def test_a_drafter_beside_itself_differs_in_nothing(tiny_target: Target) -> None:
    drafter = untrained("medusa", tiny_target)
    prompts = PromptSet("p", [tiny_target.encode(f"strike {i}") for i in range(6)])
    found = compare(tiny_target, drafter, drafter, prompts, MeasureSettings(max_new_tokens=12, repeats=1))
    for of_both in (found.expected, found.decoded):
        assert (of_both.difference, of_both.ci95) == (0.0, (0.0, 0.0))
    assert (found.num_compared, found.num_divergences) == (6, 0)


# --- champions


def test_champions_are_promoted_rolled_back_and_thinned_out(tiny_target: Target, tmp_path: Path) -> None:
    champions, drafter = Champions(tmp_path), untrained("medusa", tiny_target)
    assert champions.serving is None
    champions.begin(drafter)
    with pytest.raises(UserError, match="no champion from before"):
        champions.roll_back()
    for number in (2, 3, 5):
        save_drafter(drafter, tmp_path / "run" / str(number))
        champions.promote(number, tmp_path / "run" / str(number), champions.serving or 0)
    assert (champions.serving, champions.numbers()) == (5, [2, 3, 5])
    assert len(champions.numbers()) == KEPT
    assert champions.roll_back() == 3
    assert champions.was_rolled_back(5)
    load_drafter(champions.link, tiny_target)
    champions.promote(6, tmp_path / "run" / "5", 3)
    assert (champions.serving, champions.numbers()) == (6, [2, 3, 6])  # 5 was rolled back from
    assert champions.roll_back() == 3
    assert champions.roll_back() == 2


def test_a_rollback_while_a_champion_is_copied_holds(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, drafter, other = copy_checkpoint, untrained("medusa", tiny_target), Champions(tmp_path)
    other.begin(drafter)
    save_drafter(drafter, tmp_path / "run")
    assert other.promote(1, tmp_path / "run", before=0)

    def rolled_back(checkpoint: Path, out: Path) -> None:
        own(checkpoint, out)
        other.roll_back()

    monkeypatch.setattr("draftsmith.recipes.refreshing.champions.copy_checkpoint", rolled_back)
    assert not Champions(tmp_path).promote(2, tmp_path / "run", before=1)
    assert other.serving == 0


# --- the whole


@pytest.fixture
def settings(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RefreshSettings:
    """Rounds of a second or two. The tiny target, whose weights are random, finds all texts equally strange."""
    monkeypatch.setattr(traffic, "NOISE_BITS", math.inf)
    monkeypatch.setattr(refresh, "load_target", lambda *_: tiny_target)
    monkeypatch.setattr(training, "RATE_SHARE", 1.0)  # the champion knows nothing yet
    save_drafter(untrained("medusa", tiny_target), tmp_path / "first")
    return RefreshSettings(
        drafter=str(tmp_path / "first"),
        traffic=str(write_rows(tmp_path / "log.jsonl", 0, 90)),
        max_new_tokens=12,
        batch_size=8,
        steps=24,
        out=tmp_path / "out",
        device="cpu",
    )


def run(settings: RefreshSettings) -> Round | None:
    """Make a round, and return the newest."""
    refresh.run(settings, Console(quiet=True))
    rounds = read_state(settings.out).rounds
    return rounds[-1] if rounds else None


def always_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every challenger win, whatever so few steps taught it."""
    monkeypatch.setattr(refresh, "compare", lambda *_: comparison(0.1, 0.2))


def test_rounds_from_a_first_champion_on(
    settings: RefreshSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains, waits for more traffic, trains on where training paid, keeps what it needs, and goes back."""
    always_better(monkeypatch)
    first = run(settings)
    assert first is not None
    assert first.judgement is not None
    assert first.judgement.old is None
    champions = Champions(settings.out)
    assert champions.serving == first.number == 1
    assert run(settings) == first  # nothing new
    write_rows(tmp_path / "log.jsonl", 90, 180)
    second = run(settings)
    assert second is not None
    assert second.look is not None
    assert second.look.reason == "the traffic has not moved, but the last training paid"
    assert second.champion == 1
    assert second.judgement is not None
    assert second.judgement.old is not None
    assert sorted(path.name for path in (settings.out / "prompts").iterdir()) == ["1", "2"]
    assert not list((settings.out / "rounds").iterdir())
    assert "champion" in (settings.out / "refresh.html").read_text()
    assert champions.serving == 2
    refresh.run(RefreshSettings(rollback=True, out=settings.out), Console(quiet=True))
    assert champions.serving == 1


def test_later_calls_take_the_target_of_the_first_though_no_round_was_made(
    settings: RefreshSettings, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call found too few prompts; then a scheduler names new traffic alone."""
    always_better(monkeypatch)
    named: list[str] = []
    monkeypatch.setattr(refresh, "load_target", lambda name, _: named.append(name) or tiny_target)
    few = write_rows(tmp_path / "few.jsonl", 0, 4)
    first = replace(settings, target=tiny_target.name, traffic=str(few))
    assert run(first) is None
    assert run(replace(settings, drafter=None)) is not None
    assert named == [tiny_target.name] * 2


def test_of_many_prompts_no_more_are_held_out_than_judge(tiny_target: Target, tmp_path: Path) -> None:
    """As many are held out as can be used, give or take the chance of hashes; all turns of a conversation together."""
    texts = read_prompts(write_rows(tmp_path / "log.jsonl", 0, 2000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "NOISE_BITS", math.inf)
        split, _ = clean(texts, tiny_target, 64, True)
    assert abs(len(split.held_out) - 64) < 4 * math.sqrt(64)


def test_what_begins_alike_is_not_trained_on_and_judged_by(tmp_path: Path) -> None:
    """A longer log holds out a smaller share, so a prompt of it may be trained on that a shorter log held out."""

    def turns(name: str, number: int) -> list[Prompt]:
        first = [{"role": "user", "content": name}]
        more = [{"role": "assistant", "content": "so"}, {"role": "user", "content": "go on"}]
        return [Prompt(messages=first + more * i) for i in range(number)]

    window = Window(tmp_path)
    window.write(1, Split(turns("a", 1), [*turns("b", 3), *turns("c", 2)]))
    window.write(2, Split(turns("d", 1), [*turns("a", 2), *turns("b", 4)[3:]]))
    window.write(3, Split([*turns("e", 1), *turns("f", 2)[1:]], turns("c", 1)))
    window.write(4, Split(turns("b", 1), [*turns("g", 1), *turns("f", 1)]))
    judging = window.earlier_held_out(3, 9)
    assert [prompt.messages for prompt in judging] == [prompt.messages for prompt in turns("b", 4)]
    assert len(window.earlier_held_out(3, 2)) == 2

    def openings(prompts: list[Prompt]) -> set[str]:
        return {str(prompt.messages[0]["content"]) for prompt in prompts if prompt.messages}

    assert openings(window.earlier_held_out(4, 9)) == {"c"}
    assert openings(window.earlier_training(4, 9)) == {"a", "d", "e"}


def test_traffic_that_stays_is_not_trained_on(
    settings: RefreshSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "compare", lambda *_: comparison(-0.1, 0.1))
    first = run(settings)
    assert first is not None
    assert first.outcome == "not promoted: it is not expected to be better on the newest traffic"
    monkeypatch.setattr(refresh, "train", lambda _: pytest.fail("it trains"))
    write_rows(tmp_path / "log.jsonl", 90, 180)
    second = run(settings)
    assert second is not None
    assert second.outcome == "nothing to do: the traffic has not moved"
    write_rows(tmp_path / "log.jsonl", 180, 270, "mail")
    with pytest.raises(pytest.fail.Exception, match="it trains"):
        run(settings)
    open_round = read_state(settings.out).open
    assert open_round is not None
    assert open_round.look is not None
    assert open_round.look.reason.startswith("the shares of domains moved by 100%")


def noted_starts(settings: RefreshSettings, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each training from now on adds the checkpoint that it starts from."""
    starts: list[str] = []
    own = refresh.train

    def noted(config: Any) -> Path:
        starts.append(str(Path(config.init_from).relative_to(settings.out)))
        return own(config)

    monkeypatch.setattr(refresh, "train", noted)
    return starts


def test_small_gains_add_up(settings: RefreshSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the traffic moves a challenger is trained on from, until it is shown to be better, or worse."""
    as_good, worse = comparison(-0.25, 0.2), comparison(-0.3, 0.01)
    rounds = [(as_good, "forge"), (as_good, "forge"), (as_good, "mail"), (worse, "forge"), (as_good, "mail")]
    starts = noted_starts(settings, monkeypatch)
    for number, (found, domain) in enumerate(rounds):
        monkeypatch.setattr(refresh, "compare", lambda *_, found=found: found)
        write_rows(tmp_path / "log.jsonl", 90 * number + 90, 90 * number + 180, domain)
        run(settings)
    assert starts == ["champions/0", "challengers/1", "challengers/3", "champions/0"]
    assert [path.name for path in (settings.out / "challengers").iterdir()] == ["5"]


def test_a_round_of_garbage_is_refused_and_forgotten(
    settings: RefreshSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "NOISE_BITS", -1.0)
    refused = run(settings)
    assert refused is not None
    assert refused.outcome == "refused: 90 of 90 prompts are noise"
    assert not (settings.out / "prompts").exists()
    assert Champions(settings.out).serving == 0
    monkeypatch.setattr(traffic, "NOISE_BITS", math.inf)
    write_rows(tmp_path / "log.jsonl", 90, 180)
    always_better(monkeypatch)
    newest = run(settings)
    assert newest is not None
    assert (newest.traffic.num_new, newest.promoted) == (90, True)


def test_a_server_is_told_and_may_be_silent(settings: RefreshSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The champion is promoted whether the server takes it or not."""
    always_better(monkeypatch)
    told: list[tuple[str, Path]] = []

    def refuse(server: Any, champion: Path) -> None:
        told.append((server.url, champion.resolve()))
        raise UserError("it takes no other drafter")

    monkeypatch.setattr(refresh, "swap_drafter", refuse)
    newest = run(replace(settings, server="http://localhost:8000"))
    assert newest is not None
    assert newest.promoted
    refresh.run(replace(settings, traffic=None, rollback=True, server="http://localhost:8000"), Console(quiet=True))
    assert [(url, path.name) for url, path in told] == [("http://localhost:8000", "1"), ("http://localhost:8000", "0")]


def test_a_rollback_while_a_round_goes_on_holds(
    settings: RefreshSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_better(monkeypatch)
    run(settings)
    write_rows(tmp_path / "log.jsonl", 90, 180)
    own = refresh.train

    def rolled_back(config: Any) -> Path:
        refresh.run(RefreshSettings(rollback=True, out=settings.out), Console(quiet=True))
        return own(config)

    monkeypatch.setattr(refresh, "train", rolled_back)
    second = run(settings)
    assert second is not None
    assert second.outcome == "not promoted: it was rolled back meanwhile"
    assert Champions(settings.out).serving == 0


def test_old_text_is_deleted(settings: RefreshSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the window, no file holds a word of it, nor does one of a round that was never finished."""
    monkeypatch.setattr(refresh, "train", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(settings)

    def files_with(text: bytes) -> list[str]:
        return [name for name, found in contents(settings.out).items() if isinstance(found, bytes) and text in found]

    assert len(files_with(b"strike the iron")) >= 2
    now = refresh.time.time()
    monkeypatch.setattr(refresh.time, "time", lambda: now + 31 * refresh.DAY)
    newest = run(settings)
    assert newest is not None
    assert newest.outcome == "given up: its prompts are not kept any more"
    assert not files_with(b"strike the iron")


def changed_target(target_dir: Path, folder: Path) -> Target:
    """A second version of the tiny target: the same tokenizer, other weights."""
    shutil.copytree(target_dir, folder)
    model = LlamaForCausalLM.from_pretrained(target_dir)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return Target.from_pretrained(folder, "cpu", torch.float32)


def test_a_new_target_starts_from_the_old_drafter(
    settings: RefreshSettings, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survival of acceptance is told, and the kept prompts train for the new target, once."""
    always_better(monkeypatch)
    before = run(settings)
    assert before is not None
    first_version, version2 = refresh.load_target, changed_target(tiny_target_dir, tmp_path / "v2")
    monkeypatch.setattr(refresh, "load_target", lambda *_: version2)
    again = replace(settings, traffic=None, target=version2.name)
    newest = run(again)
    assert newest is not None
    assert newest.prompts == before.number
    assert newest.look is not None
    assert newest.look.survival is not None
    assert newest.look.survival.before == before.acceptance
    assert newest.look.survival.after > 1
    assert "survives" in newest.look.reason
    assert newest.plan is not None
    assert Champions(settings.out).serving == newest.number
    with pytest.raises(UserError, match="--traffic: give new prompts"):
        run(again)
    monkeypatch.setattr(refresh, "load_target", first_version)  # the new version was no good
    back = run(replace(settings, traffic=None))
    assert back is not None
    assert back.look is not None
    assert back.look.reason.startswith("the target is new")


def test_a_new_target_is_trained_for_after_a_rollback_too(
    settings: RefreshSettings, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody measured what serves then; compared with themselves the prompts would have moved nowhere."""
    always_better(monkeypatch)
    run(settings)
    Champions(settings.out).roll_back()
    version2 = changed_target(tiny_target_dir, tmp_path / "v2")
    monkeypatch.setattr(refresh, "load_target", lambda *_: version2)
    newest = run(replace(settings, traffic=None, target=version2.name))
    assert newest is not None
    assert newest.look is not None
    assert (newest.look.reason, newest.look.survival) == ("the target is new", None)
    assert newest.promoted


def second_version(folder: Path) -> Target:
    """Return the embedded target after a few steps of training on functions that it did not see."""
    shutil.copytree(EMBEDDED_TARGET, folder)
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32)
    model = LlamaForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for text in stdlib_functions(held_out=True)[:64]:
        row = torch.tensor([target.encode(text)[:256]])
        model(row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return Target.from_pretrained(folder, "cpu")


@pytest.mark.long
def test_two_versions_of_the_embedded_target(tmp_path: Path) -> None:
    """A drafter of the first version keeps much of its acceptance on the second, and is no worse after the refresh."""
    target, version2 = Target.from_pretrained(EMBEDDED_TARGET, "cpu"), second_version(tmp_path / "v2")
    prompts = [{"prompt": function_prompt(text)[:240]} for text in stdlib_functions(held_out=False)[:160]]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    save_drafter(untrained("hydra", target), tmp_path / "first")
    settings = RefreshSettings(
        drafter=str(tmp_path / "first"),
        traffic=str(tmp_path / "log.jsonl"),
        max_new_tokens=32,
        batch_size=8,
        steps=60,
        out=tmp_path / "out",
        device="cpu",
    )
    refresh.one_round(settings, target, Console())
    assert read_state(settings.out).rounds[-1].promoted
    refresh.one_round(replace(settings, traffic=None), version2, Console())
    newest = read_state(settings.out).rounds[-1]
    assert newest.look is not None
    assert newest.look.survival is not None
    assert 0.3 < newest.look.survival.share < 1.1
    assert newest.judgement is not None
    assert newest.judgement.new.num_divergences == 0
    expected, decoded = newest.judgement.new.expected, newest.judgement.new.decoded
    assert newest.acceptance == (decoded.challenger if newest.promoted else decoded.champion)
    assert (expected.challenger if newest.promoted else expected.champion) >= expected.champion


def test_follow_outlives_a_log_that_cannot_be_read(
    settings: RefreshSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_better(monkeypatch)
    waits: list[float] = []

    own_sleep = time.sleep

    def wait(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            own_sleep(seconds)  # of what other tests have left running
            return
        waits.append(seconds)
        if len(waits) == 1:
            (tmp_path / "log.jsonl").rename(tmp_path / "away")
        elif len(waits) == 2:
            (tmp_path / "away").rename(tmp_path / "log.jsonl")
            write_rows(tmp_path / "log.jsonl", 90, 180)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", wait)
    with pytest.raises(KeyboardInterrupt):
        run(replace(settings, follow=2.0))
    assert waits == [120.0] * 3
    assert [one.promoted for one in read_state(settings.out).rounds] == [True, True]


@pytest.mark.parametrize("given", [{"traffic": "log.jsonl"}, {"follow": 5.0}, {"steps": 3}, {"window": 7.0}])
def test_a_rollback_refuses_what_it_would_not_heed(given: dict[str, Any], tmp_path: Path) -> None:
    (name,) = given
    with pytest.raises(UserError, match=f"--rollback does nothing else: leave out --{name}"):
        RefreshSettings(rollback=True, out=tmp_path, **given).refuse_mistakes()
    RefreshSettings(rollback=True, out=tmp_path, server="http://localhost:8000").refuse_mistakes()


def test_what_cannot_be_trained_on_is_refused(settings: RefreshSettings) -> None:
    with pytest.raises(UserError, match="holds no champion yet: give the one that serves now"):
        run(replace(settings, drafter=None))
    with pytest.raises(UserError, match="--drafter ngram: give the checkpoint of a drafter"):
        run(replace(settings, drafter="ngram"))


@pytest.mark.parametrize("tried", [pytest.param(slice(None), marks=pytest.mark.long), slice(5, None, 47)])
def test_a_round_killed_at_any_change_leaves_a_champion_and_goes_on(
    tried: slice, settings: RefreshSettings, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each change on the disk a whole champion serves; from some of them the same command comes to the same end.

    `pytest -m long` goes on from all.
    """
    always_better(monkeypatch)
    settings = replace(settings, steps=2)
    run(settings)
    write_rows(tmp_path / "log.jsonl", 90, 180)
    with recorded_changes(settings.out) as states:
        run(settings)
    whole = {name for name in contents(settings.out) if not name.endswith(".lock")}
    assert len(states) > 60
    for state in states:
        link = state["champion"]
        assert isinstance(link, Path)
        assert {f"{link}/config.json", f"{link}/model.safetensors"} <= state.keys()
    for number in range(len(states))[tried]:
        restore(settings.out, states[number])
        newest = run(settings)
        assert newest is not None
        assert (newest.number, newest.promoted, Champions(settings.out).serving) == (2, True, 2), number
        assert {name for name in contents(settings.out) if not name.endswith(".lock")} == whole, number
    load_drafter(settings.out / "champion", tiny_target)


@pytest.mark.parametrize(("num_new", "held_out", "patience"), [(1800, 0, None), (1848, 64, 2)])
def test_few_held_out_answers_do_not_end_a_training(
    num_new: int, held_out: int, patience: int | None, tiny_target: Target, tmp_path: Path
) -> None:
    """The 64 held-out prompts that tell more than noise take 2,048 prompts, for one in 32 is held out."""
    plan = training.RoundPlan("medusa", num_new, 200, 100, 8)
    config = training.training_config(plan, tiny_target, tmp_path, tmp_path, "cpu")
    assert (config.data.held_out_prompts, config.evaluation.patience) == (held_out, patience)


def test_the_champion_is_timed_as_it_will_be_trained(
    settings: RefreshSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kinds train on a part of a text's places, and read all of them only where they are evaluated."""
    always_better(monkeypatch)
    modes: list[bool] = []
    own_plan = refresh.make_plan

    def plan(target: Target, champion: Drafter, *rest: Any) -> RoundPlan:
        modes.append(champion.training)
        return own_plan(target, champion, *rest)

    monkeypatch.setattr(refresh, "make_plan", plan)
    run(settings)
    assert modes == [True]


def test_the_plan_keeps_to_the_budget(settings: RefreshSettings, tiny_target: Target) -> None:
    """Twice the budget allows no fewer steps; what is given is taken; nothing is learnt by heart."""
    drafter = untrained("medusa", tiny_target)
    prompts = [Prompt(text=f"strike {i}") for i in range(400)]
    make: Callable[..., Any] = training.make_plan
    given = make(tiny_target, drafter, prompts[:200], prompts[200:], replace(settings, steps=7))
    assert (given.num_new, given.num_old, given.num_steps) == (200, 32, 7)
    small = make(tiny_target, drafter, prompts[:200], prompts[200:], replace(settings, steps=None, budget=0.0001))
    assert small.num_new + small.num_old <= 200
    large = make(tiny_target, drafter, prompts[:200], prompts[200:], replace(settings, steps=None, budget=10.0))
    assert (large.num_new, large.num_old) == (200, 32)
    assert large.num_steps == training.MOST_EPOCHS * 232 // training.recipe_of("medusa", tiny_target).data.batch_size
