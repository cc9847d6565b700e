"""The pages of commands that judge over time or search for long, made from findings that nobody measured."""

from pathlib import Path

from reports import TEMPERATURES, evaluation, result

from draftsmith.inference.measuring.certify import CertifySettings
from draftsmith.inference.measuring.results import Evaluation, upgraded
from draftsmith.models.storage.typed_json import from_json
from draftsmith.recipes.auto.budget import AutoPlan
from draftsmith.recipes.auto.page import auto_page
from draftsmith.recipes.auto.race import Contender, Rung
from draftsmith.recipes.auto.score import Score
from draftsmith.recipes.auto.state import AutoState
from draftsmith.recipes.auto.traffic import TrafficSummary
from draftsmith.recipes.refreshing.judgement import Comparison, Judgement, Lengths
from draftsmith.recipes.refreshing.page import refresh_page
from draftsmith.recipes.refreshing.state import RefreshState, Round
from draftsmith.recipes.refreshing.traffic import TrafficCounts
from draftsmith.recipes.refreshing.traffic_shift import Look
from draftsmith.recipes.refreshing.training import RoundPlan
from draftsmith.recipes.watching.page import Series, watch_page
from draftsmith.recipes.watching.readings import Latency, Reading
from draftsmith.train.engine.vllm_counters import Counters

TARGET = "runs/models/Some-Model-Of-A-Long-Name-8B-Instruct"
NOON = 1.79e9


def write_command_pages(folder: Path) -> None:
    """Write auto.html, refresh.html and watch.html."""
    evaluations = [measured("eagle3", 0.75), measured("suffix", 0.3)]
    (folder / "auto.html").write_text(auto_page(search(), evaluations, evaluations, []))
    (folder / "refresh.html").write_text(refresh_page(RefreshState({}, rounds()), 2))
    fallen = Series("http://server-1.example.org:8000", readings(0.6, 0.45), 2.18, ["retrain: acceptance has fallen"])
    steady = Series("http://server-2.example.org:8000", readings(0.62, 0.62), 2.18, [])
    (folder / "watch.html").write_text(watch_page([fallen, steady], 60))


def measured(drafter: str, keep: float) -> Evaluation:
    rows = [result(keep, 4.0, temperature) for temperature in TEMPERATURES]
    return from_json(Evaluation, upgraded(evaluation(rows, drafter, drafter)))


def search() -> AutoState:
    def score(name: str, steps: int, speedup: float) -> Score:
        rates: list[float | None] = [0.6, 0.5, 0.4, 0.3]
        return Score(name, steps, rates, 1.0, 4, 1 + speedup, speedup, speedup - 0.1, speedup + 0.1)

    contenders = [
        Contender(score(name, 900, speedup), 0.15, 1.4 * speedup, 1.7 * speedup)
        for name, speedup in (("eagle3", 1.3), ("hydra", 1.2), ("dflash", 1.1))
    ]
    decision = "rung 1: eagle3 and hydra go on; dflash is dropped: forecast 1.54×, eagle3 1.82×"
    return AutoState(
        asked="",
        target_fingerprint=None,
        traffic=TrafficSummary(
            *(130, 10, 1, 100, 15, 15, 412.0, 0.4, {"code": 80, "chat": 40, "": 10}),
            num_unfit=0,
            with_tools=0.1,
            scripts={"Latin": 0.98, "Cyrillic": 0.02},
            temperature=0.7,
            requests_per_second=3.2,
        ),
        plan=AutoPlan(
            *(TARGET, 8.0, 40_000, 1, 64, 64, None, {"eagle3": 0.41, "hydra": 0.2}, None, 1800.0, 14_400.0),
            certificates=CertifySettings(),
            measure_minutes=60.0,
            target_is_small=False,
        ),
        needed_rates={"eagle3": 0.35, "hydra": None},
        lookups=[score("ngram", 0, 1.1), score("suffix", 0, 1.2)],
        probes=[score(name, 200, 1.05) for name in ("eagle3", "hydra", "dflash")],
        rungs=[Rung(contenders, ["eagle3", "hydra"], decision)],
        final=score("eagle3", 20_000, 1.9),
    )


def rounds() -> list[Round]:
    def comparison(champion: float, challenger: float) -> Comparison:
        def lengths(champion: float, challenger: float, reach: float) -> Lengths:
            gain = challenger - champion
            return Lengths(48, champion, challenger, gain, (gain - reach, gain + reach))

        expected = lengths(champion - 0.3, challenger - 0.35, 0.03)
        return Comparison(expected, lengths(champion, challenger, 0.1), 1.2, (1.1, 1.3), 48, 0)

    counts = TrafficCounts(300, 3, 2, 1, 20, 240, 34, {"code": 174, "chat": 100})
    looks = [
        Look(2.4, 0.3, 0.01, 0.4, trains=False, reason="acceptance is as it was: 2.40 tokens a round"),
        Look(2.0, 0.001, 0.2, 0.001, reason="acceptance fell from 2.40 to 2.00 on the newest prompts (p = 0.001)"),
    ]
    judgement = Judgement(comparison(2.0, 2.5), comparison(2.4, 2.38))
    plan = RoundPlan("eagle3", 240, 140, 400, 64)
    return [
        Round(1, NOON, TARGET, "f", 0, 1, counts, looks[0], outcome="not trained on"),
        Round(2, NOON + 1e5, TARGET, "f", 0, 2, counts, looks[1], plan, judgement, "challenger 2 serves", 2.5, True),
    ]


def readings(before: float, after: float) -> list[Reading]:
    """An hour of looks, in the second half of which a drafted token is accepted with another chance."""
    found = []
    for minute in range(60):
        keep = before if minute < 30 else after
        accepted = tuple(round(1000 * keep**depth) for depth in (1, 2, 3))
        counters = Counters(1000, 3000, sum(accepted), accepted)
        found.append(Reading(NOON + 60 * minute, counters, None, Latency(30.0, 1000), Latency(12.0, 1000), 5.0))
    return found
