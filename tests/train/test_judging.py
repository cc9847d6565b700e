"""A running engine judges drafters: its counters, what it refuses, and what is never compared with its rows.

The engine is a stand-in that decodes with the tiny target, so that draftsmith's own counters are the witness. A real
vLLM is asked in test_judging_engine.py.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import DRAFT_LENGTH, FakeEngine
from image_server import IMAGE, ImageEngine, image_url
from reports import ENVIRONMENT, result
from runs import base_of, make_config, write_held_out

from draftsmith.data import http
from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.data.answers.sglang import FinishReason, GeneratedInfo
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats, length_interval, total_of
from draftsmith.inference.measuring.judged import Judge, JudgedResult, JudgedSetting, JudgedSpeed
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.results import EvaluationCost, read_evaluation, write_evaluation
from draftsmith.models import DRAFTERS, Target, load_drafter, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import train
from draftsmith.train.engine.answers import RequestSettings, ServerRun, stats_by_batch
from draftsmith.train.engine.judging import ENGINE, EngineJudge, JudgeSettings
from draftsmith.train.engine.sglang_counters import SglangInfo, counters_of
from draftsmith.train.engine.vllm_counters import Counters
from draftsmith.train.evaluation.budget import checkpoints_without_gain
from draftsmith.train.evaluation.by_engine import log_judged
from draftsmith.train.run_folder.checkpoint import checkpoint_name, checkpoints
from draftsmith.train.run_folder.run_folder import best_measured, compared_rows, link_best
from draftsmith.train.run_folder.tracking import Tracker, read_metrics

LOAD = RequestSettings(Sampling(), batch_size=1, repeats=1)
NUM_NEW_TOKENS = 8


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.002)
    monkeypatch.setattr(http, "ATTEMPTS", 2)


@pytest.fixture(scope="module")
def prompts(tiny_target: Target) -> PromptSet:
    texts = ["heat the iron", "strikes it, and", "return [iron.hit()", "again and again"]
    return PromptSet("held_out", [tiny_target.encode(text) for text in texts])


@pytest.fixture(scope="module")
def folders(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two drafters of one kind, whose acceptance differs: one of the target's own layers, and one of other weights."""
    found = {}
    torch.manual_seed(0)
    for scale, name in enumerate(("one", "other")):
        drafter_class = DRAFTERS["draft_model"]
        drafter = drafter_class.from_target(drafter_class.config_class(kind="draft_model"), tiny_target)
        for parameter in drafter.parameters():
            parameter.data += 0.1 * scale * torch.randn_like(parameter)
        found[name] = tmp_path_factory.mktemp("drafters") / name
        save_drafter(drafter, found[name])
    return found


@pytest.fixture
def engine(tiny_target: Target, folders: dict[str, Path]) -> Iterator[FakeEngine]:
    engine = FakeEngine(tiny_target, str(folders["other"]))
    yield engine
    engine.close()


@pytest.fixture
def plain(tiny_target: Target) -> Iterator[FakeEngine]:
    plain = FakeEngine(tiny_target)
    yield plain
    plain.close()


def judge_at(engine: FakeEngine, target: Target, **beside: FakeEngine) -> EngineJudge:
    urls = {name: server.url for name, server in beside.items()}
    return EngineJudge(JudgeSettings(engine.url, "--engine", urls, NUM_NEW_TOKENS, DRAFT_LENGTH), target)


# --- what a row holds


def own_stats(target: Target, drafter: Path, prompts: PromptSet) -> list[Stats]:
    """Return draftsmith's own counters of each prompt."""
    decoder = SpeculativeDecoder(target, load_drafter(str(drafter), target))
    return decoder.generate(prompts.token_ids, NUM_NEW_TOKENS, draft_length=DRAFT_LENGTH).stats.requests


def test_prompts_with_images_are_judged(tiny_target: Target, folders: dict[str, Path]) -> None:
    """They go with their images, to the engine and to the plain server, and count as what the target sees does."""
    pixels = [bytes([90, 60, 33]), bytes([70, 80])]
    (placeholder,) = tiny_target.encode(IMAGE, add_special_tokens=False)
    texts = [[5, placeholder, 9, 20], [placeholder, 30, 31], [8, 9, 10]]
    images = [[image_url(pixels[0])], [image_url(pixels[1])], []]
    seen = PromptSet("seen", [[5, *pixels[0], 9, 20], [*pixels[1], 30, 31], [8, 9, 10]])
    engine, plain = ImageEngine(tiny_target, str(folders["one"])), ImageEngine(tiny_target)
    try:
        judge = judge_at(engine, tiny_target, none=plain)
        (row,) = judge.measure(PromptSet("images", texts, images=images), [LOAD], lambda: None)[ENGINE]
        blind, sighted = (plain.decoder.generate(of, NUM_NEW_TOKENS).token_ids[0] for of in (texts, seen.token_ids))
        gap = Endpoint(plain.url, tiny_target, NUM_NEW_TOKENS).top_two_gap(texts[0], images[0])
    finally:
        engine.close()
        plain.close()
    assert row.acceptance == total_of(own_stats(tiny_target, folders["one"], seen))
    assert row.texts is not None
    assert row.texts.identical == len(texts)
    assert blind != sighted
    assert gap == 0.25


def test_a_row_counts_what_the_engine_counted_of_the_swapped_drafter(
    engine: FakeEngine, plain: FakeEngine, tiny_target: Target, folders: dict[str, Path], prompts: PromptSet
) -> None:
    """Each drafter's counters are its own, though the server's go on; the cache is emptied after each swap."""
    judge = judge_at(engine, tiny_target, none=plain)
    rows = {}
    for name, folder in folders.items():
        judge.swap(folder)
        (rows[name],) = judge.measure(prompts, [LOAD], lambda: None)[ENGINE]
    assert engine.swapped == list(folders)
    assert engine.resets == 2
    for name, folder in folders.items():
        expected = total_of(own_stats(tiny_target, folder, prompts))
        found = rows[name].acceptance
        assert replace(found, num_rounds=expected.num_rounds) == expected
        assert rows[name].texts is not None
        assert rows[name].texts.identical == rows[name].texts.checked == len(prompts.token_ids)
        assert rows[name].swap_seconds
    assert rows["one"].acceptance != rows["other"].acceptance
    assert rows["one"].setting == replace(rows["other"].setting, num_prompts=1)
    assert rows["one"].setting.judge == Judge("vLLM 0.32.0", "elsewhere")


def test_the_interval_is_over_batches(
    engine: FakeEngine, tiny_target: Target, folders: dict[str, Path], prompts: PromptSet
) -> None:
    """Of one prompt each, it is the interval over prompts that draftsmith's own rows have."""
    judge = judge_at(engine, tiny_target)
    judge.swap(folders["one"])
    (row,) = judge.measure(prompts, [LOAD], lambda: None)[ENGINE]
    by_prompt = own_stats(tiny_target, folders["one"], prompts)
    assert row.mean_acceptance_length_ci95 == pytest.approx(length_interval(by_prompt))
    engine.pause = 0.2  # in which a second request comes, on a busy machine, too
    (pairs,) = judge.measure(prompts, [replace(LOAD, batch_size=2)], lambda: None)[ENGINE]
    assert pairs.acceptance == row.acceptance
    assert pairs.mean_acceptance_length_ci95 is None  # of two batches
    assert engine.most_at_a_time == 2


def test_servers_beside_it_are_measured_once(
    engine: FakeEngine, plain: FakeEngine, tiny_target: Target, folders: dict[str, Path], prompts: PromptSet
) -> None:
    ngram = FakeEngine(tiny_target, "ngram")
    try:
        judge = judge_at(engine, tiny_target, none=plain, ngram=ngram)
        first = judge.measure(prompts, [LOAD], lambda: None)
        asked = len(plain.asked), len(ngram.asked)
        judge.swap(folders["one"])
        second = judge.measure(prompts, [LOAD], lambda: None)
    finally:
        ngram.close()
    assert (len(plain.asked), len(ngram.asked)) == asked == (8, 8)  # once for texts and counters, once for times
    assert first["ngram"] == second["ngram"]
    assert first["ngram"][0].swap_seconds is None
    assert set(first) == {ENGINE, "ngram"}
    speed = second[ENGINE][0].speed
    assert speed.baseline_tokens_per_second == first[ENGINE][0].speed.baseline_tokens_per_second
    assert speed.speedup == pytest.approx(speed.tokens_per_second / speed.baseline_tokens_per_second)


def test_texts_that_part_are_told_with_the_plain_servers_gap(
    engine: FakeEngine, plain: FakeEngine, tiny_target: Target, prompts: PromptSet
) -> None:
    def changed(number: int, answer: dict) -> dict | None:
        if number == 2:
            answer["choices"][0]["token_ids"][3] = 5
        return None

    judge = judge_at(engine, tiny_target, none=plain)
    engine.trouble = changed
    (row,) = judge.measure(prompts, [LOAD], lambda: None)[ENGINE]
    assert row.texts
    assert (row.texts.checked, row.texts.identical) == (4, 3)
    (difference,) = row.texts.first_differences
    assert (difference.request, difference.position, difference.speculative_token) == (1, 3, 5)
    assert difference.top_two_gap == pytest.approx(0.25)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dev_mode": False}, "takes no other drafter while it runs .*404.*serve_vllm_swappable.sh.*--as-served"),
        ({"reason": "config.json differs in hidden_size"}, "differs in hidden_size. Give in DRAFTSMITH_ENGINE_COMMAND"),
    ],
)
def test_an_engine_that_cannot_swap_is_refused_with_the_mend(
    changes: dict[str, Any], reason: str, engine: FakeEngine, tiny_target: Target, folders: dict[str, Path]
) -> None:
    for name, value in changes.items():
        setattr(engine, name, value)
    with pytest.raises(UserError, match=reason) as refused:
        judge_at(engine, tiny_target).swap(folders["one"])
    assert "\n" not in str(refused.value)
    assert not engine.swapped


def test_servers_that_are_not_what_they_should_be(engine: FakeEngine, plain: FakeEngine, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="counts no drafts"):
        judge_at(plain, tiny_target)
    with pytest.raises(UserError, match="beside it none.*has a drafter"):
        judge_at(engine, tiny_target, none=engine)
    with pytest.raises(UserError, match="drafts 4 tokens, and the draft length is 3"):
        EngineJudge(JudgeSettings(engine.url, "--engine", draft_length=3), tiny_target)


# --- an SGLang, which tells its counters with each answer


@pytest.fixture
def sglang(tiny_target: Target, folders: dict[str, Path]) -> Iterator[FakeEngine]:
    sglang = FakeEngine(tiny_target, str(folders["one"]), "sglang")
    yield sglang
    sglang.close()


def test_an_sglang_counts_as_we_do(
    sglang: FakeEngine, tiny_target: Target, folders: dict[str, Path], prompts: PromptSet
) -> None:
    """Also of two requests at a time: what others ask meanwhile is counted with their answers."""
    plain = FakeEngine(tiny_target, "none", "sglang")
    try:
        judge = judge_at(sglang, tiny_target, none=plain)
        loads = [LOAD, replace(LOAD, batch_size=2)]
        rows = judge.measure(prompts, loads, lambda: None)[ENGINE]
        gap = Endpoint(plain.url, tiny_target, NUM_NEW_TOKENS).top_two_gap([5, 6, 7])
    finally:
        plain.close()
    by_prompt = own_stats(tiny_target, folders["one"], prompts)
    for row in rows:
        assert replace(row.acceptance, num_rounds=0) == replace(total_of(by_prompt), num_rounds=0)
        assert row.setting.judge == Judge("SGLang 0.5.23", sglang.url)
        assert row.texts
        assert row.texts.identical == len(by_prompt)
    assert rows[0].mean_acceptance_length_ci95 == pytest.approx(length_interval(by_prompt))
    assert gap == 0.25


def test_a_running_sglang_takes_no_other_drafter(
    sglang: FakeEngine, tiny_target: Target, folders: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match="give in DRAFTSMITH_ENGINE_COMMAND what starts it .*--as-served") as refused:
        judge_at(sglang, tiny_target).swap(folders["one"])
    assert "\n" not in str(refused.value)


def test_engines_are_not_mixed(sglang: FakeEngine, plain: FakeEngine, tiny_target: Target) -> None:
    """A speedup is over the same engine."""
    with pytest.raises(UserError, match="is vLLM 0.32.0, and .* is SGLang 0.5.23: give servers of one engine"):
        judge_at(sglang, tiny_target, none=plain)


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"speculative_algorithm": None}, "drafts nothing: start it with --speculative-algorithm"),
        ({"speculative_adaptive": True}, "without --speculative-adaptive"),
        ({"speculative_num_steps": 3}, "drafts 3 tokens, and the draft length is 4"),
        ({"speculative_num_steps": "many"}, "/server_info: speculative_num_steps"),
    ],
)
def test_an_sglang_that_is_not_what_it_should_be(
    info: dict[str, Any], reason: str, sglang: FakeEngine, tiny_target: Target
) -> None:
    sglang.info |= info
    with pytest.raises(UserError, match=reason):
        judge_at(sglang, tiny_target)


@pytest.mark.parametrize(
    ("info", "text", "length"),
    [
        ({"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}, "SGLang 1", 3),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 2},
            "SGLang 1, trees of 7 nodes",
            3,
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": None}, "SGLang 1", 7),
        ({"speculative_algorithm": None, "speculative_num_steps": 3}, "SGLang 1", 0),
    ],
)
def test_the_shape_of_an_sglangs_drafts(info: dict[str, Any], text: str, length: int) -> None:
    sglang = SglangInfo("1", speculative_num_draft_tokens=8, **info)
    assert (sglang.text, sglang.draft_length) == (text, length)


@pytest.mark.parametrize("histogram", [[3, 1], [1, 1, 1, 1]])
def test_counters_of_an_answer_that_contradict_each_other(histogram: list[int]) -> None:
    """Fewer drafts than were verified, and drafts that accepted more than the draft length."""
    told = GeneratedInfo(FinishReason("length"), None, sum(histogram) + (histogram[0] > 1), 9, 3, histogram)
    with pytest.raises(UserError, match="counts accepted tokens of"):
        counters_of(told, 2)


@pytest.mark.parametrize("counters", [Counters(10, 40, 7, (3, 4, 0, 0)), Counters(10, 40, 9, (3, 1, 0, 0))])
def test_counters_that_contradict_each_other(counters: Counters) -> None:
    with pytest.raises(UserError, match="contradict each other"):
        stats_by_batch(ServerRun([[1]], [counters], [1], [1.0]), 1)


# --- never mixed with the own decoder's rows


def judged_row(accepted: int, url: str = "http://a:1", engine: str = "vLLM 0.32.0", **changes: Any) -> JudgedResult:
    length = changes.get("draft_length", 1)
    setting = JudgedSetting(
        judge=Judge(engine, url),
        prompt_set="held_out",
        num_prompts=16,
        temperature=0.0,
        top_p=1.0,
        batch_size=1,
        draft_length=1,
        max_new_tokens=64,
    )
    return JudgedResult(
        setting=replace(setting, **changes),
        acceptance=Stats(length, 100, 100, accepted, 200, 100, [100 - accepted, accepted, *[0] * (length - 1)]),
        mean_acceptance_length_ci95=(0.99 + accepted / 100, 1.01 + accepted / 100),
        speed=JudgedSpeed(
            tokens_per_second=100.0, baseline_tokens_per_second=80.0, speedup=1.25, speedup_ci95=None, repeats=1
        ),
    )


def write_checkpoint(run: Path, step: int, rows: list[Any]) -> Path:
    """A checkpoint with rows of the own decoder (dicts) or of an engine."""
    folder = run / "checkpoints" / checkpoint_name(step)
    folder.mkdir(parents=True)
    content = {"target": "t", "drafter": str(folder), "drafter_kind": "k", "environment": ENVIRONMENT, "results": []}
    content["judged" if isinstance(rows[0], JudgedResult) else "results"] = to_json(rows)
    (folder / "evaluation.json").write_text(json.dumps(content))
    return folder


def test_best_is_chosen_among_the_rows_of_one_judge(tmp_path: Path) -> None:
    """That of the newest checkpoint: an acceptance of another decoder, or of another version of it, counts nothing."""

    def best(*steps: Any) -> int:
        run = tmp_path / str(len(list(tmp_path.iterdir())))
        for step, rows in enumerate(steps, 1):
            write_checkpoint(run, step, [rows])
        path = link_best(run)
        assert path == best_measured(run)
        assert path
        return int(path.name.removeprefix("step-"))

    own = result(0.9, 1.0)  # accepts far more than any judged row
    assert best(judged_row(30), judged_row(50), judged_row(40)) == 2
    assert best(judged_row(30), judged_row(50), judged_row(50)) == 3  # equal: the later one
    assert best(own, judged_row(30), judged_row(20)) == 2
    assert best(judged_row(99), own, result(0.3, 1.0)) == 2
    assert best(judged_row(50), judged_row(40, url="http://b:2"), judged_row(30)) == 1  # one engine, started anew
    assert best(judged_row(50, engine="vLLM 0.31.0"), judged_row(40), judged_row(30)) == 2
    assert best(judged_row(50, draft_length=5), judged_row(40), judged_row(30)) == 2
    assert best(judged_row(50, num_prompts=8), judged_row(40)) == 1  # a share of the time left some out


def test_patience_counts_judged_checkpoints_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, [result(0.9, 1.0)])
    for step, accepted in enumerate((30, 31, 31), 2):
        write_checkpoint(tmp_path, step, [judged_row(accepted)])
    assert [path.name[-1] for path in compared_rows(tmp_path)] == ["2", "3", "4"]
    assert checkpoints_without_gain(list(compared_rows(tmp_path).values())) == 2


def test_an_evaluation_holds_rows_of_one_judge(tmp_path: Path) -> None:
    """Written and read back it is the same; a file with rows of both kinds, or of none, is refused."""
    folder = write_checkpoint(tmp_path, 1, [judged_row(30), judged_row(20, temperature=1.0)])
    path = folder / "evaluation.json"
    evaluation = read_evaluation(path)
    assert evaluation.first == judged_row(30)
    write_evaluation(path, evaluation)
    assert read_evaluation(path) == evaluation
    content = json.loads(path.read_text())
    assert content["judged"][0]["judge"] == {"engine": "vLLM 0.32.0", "url": "http://a:1"}
    for wrong in ({"results": [result(0.5, 1.0)]}, {"judged": None}):
        path.write_text(json.dumps({**content, **wrong}))
        with pytest.raises(UserError, match="either results or judged rows"):
            read_evaluation(path)


# --- in a run


def test_a_resumed_run_logs_its_last_evaluation_once(tmp_path: Path) -> None:
    """Without a plain server beside there is no speedup; its speed is not that of training."""
    config, row = RECIPES["medusa"](), judged_row(30)
    alone = replace(row, speed=replace(row.speed, speedup=None, baseline_tokens_per_second=None))
    tracker = Tracker(config, tmp_path, 0)
    tracker.log(4, {"loss": 1.0, "tokens_per_second": 900.0})
    log_judged(tmp_path / checkpoint_name(4), alone, EvaluationCost(1.0, 2.0, 16, 1, 0.2), tracker)
    trained, judged = read_metrics(tmp_path)
    assert judged["engine_tokens_per_second"] == 100
    assert judged.keys() & trained.keys() == {"step"}
    Tracker(config, tmp_path, 4)  # which logs the evaluation anew
    assert read_metrics(tmp_path) == [trained]


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    return {**base_of(tiny_target_dir, tiny_target, folder), "evaluation.prompts": write_held_out(folder)}


EVALUATION = {"max_new_tokens": 8, "repeats": 1, "time_share": None}
RUN = {"steps": 4, "checkpoint_every": 2}


def test_a_run_is_judged_after_each_checkpoint(
    base: dict[str, Any],
    plain: FakeEngine,
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where no engine is there, the run ends behind its untrained checkpoint, which says how to start one."""
    evaluation: dict[str, Any] = {**EVALUATION, "engine": "http://127.0.0.1:9"}
    with pytest.raises(
        UserError, match=r"draftsmith export .*step-000000 --engine vllm --swappable.* the same command"
    ):
        train(make_config("medusa", base, tmp_path / "run", run=RUN, evaluation=evaluation))
    (untrained,) = checkpoints(tmp_path / "run")
    engine, ngram = FakeEngine(tiny_target, str(untrained)), FakeEngine(tiny_target, "ngram")
    evaluation |= {"engine": engine.url, "engine_beside": f"[none={plain.url}, ngram={ngram.url}]"}
    try:
        run = train(make_config("medusa", base, tmp_path / "run", run=RUN, evaluation=evaluation))
    finally:
        engine.close()
        ngram.close()
    names = [path.name for path in checkpoints(run)]
    assert engine.swapped == names == ["step-000000", "step-000002", "step-000004"]
    evaluations = [read_evaluation(path / "evaluation.json") for path in checkpoints(run)]
    assert not any(evaluation.results for evaluation in evaluations)
    lengths = [evaluation.first.acceptance.mean_acceptance_length for evaluation in evaluations]
    assert (run / "best").resolve().name == names[max(range(3), key=lambda place: (lengths[place], place))]
    beside = [read_evaluation(path / "evaluation.ngram.json") for path in checkpoints(run)]
    assert beside[0].judged == beside[2].judged
    assert not (run / "costs.json").exists()
    said = capsys.readouterr().out
    assert f"step-000002, by vLLM 0.32.0 at {engine.url}: acceptance length" in said
    assert main(["report", str(run)]) == 0
    report = (run / "report.md").read_text()
    assert "## Judged by an engine" in report
    assert all(f"step {step}" in report for step in (0, 2, 4))


def test_an_engine_that_dies_does_not_end_training(base: dict[str, Any], tiny_target: Target, tmp_path: Path) -> None:
    medusa = DRAFTERS["medusa"]
    save_drafter(medusa.from_target(medusa.config_class(kind="medusa"), tiny_target), tmp_path / "first")
    engine = FakeEngine(tiny_target, str(tmp_path / "first"))

    def die(number: int, answer: dict) -> int | None:
        return 400 if len(engine.swapped) > 1 else None

    engine.trouble = die
    evaluation = {**EVALUATION, "engine": engine.url}
    run = train(make_config("medusa", base, tmp_path / "run", run=RUN, evaluation=evaluation))
    engine.close()
    written = [sorted(path.name for path in folder.glob("evaluation*")) for folder in checkpoints(run)]
    assert written == [["evaluation.json"], ["evaluation.error.txt"], ["evaluation.error.txt"]]


@pytest.mark.parametrize(
    ("evaluation", "reason"),
    [
        ({"engine": "http://a:1", "prompts": None}, "give evaluation.prompts, too"),
        ({"engine_beside": "[none=http://a:1]"}, "stand beside evaluation.engine"),
        ({"engine": "localhost"}, "is no URL"),
        ({"engine": "http://a:1", "engine_beside": "[http://a:1]"}, "give NAME=URL"),
        ({"engine": "http://a:1", "engine_beside": "[a=http://a:1, a=http://b:1]"}, "each with a name of its own"),
        ({"engine": "http://a:1", "engine_beside": "[../a=http://a:1]"}, "give NAME=URL"),
        ({"engine": "http://a:1", "baselines": "[suffix]"}, "give evaluation.engine_beside"),
        ({"engine": "http://a:1", "num_threads": 1}, "evaluation.num_threads is of draftsmith's own decoder"),
    ],
)
def test_settings_without_effect_are_refused(evaluation: dict[str, Any], reason: str, tmp_path: Path) -> None:
    base = {"target": "t", "data.samples": "s", "evaluation.prompts": "p.txt"}
    with pytest.raises(UserError, match=reason):
        make_config("medusa", base, tmp_path, evaluation=evaluation)


def test_a_drafter_in_a_target_of_its_own_is_refused(base: dict[str, Any], tmp_path: Path) -> None:
    evaluation = {"engine": "http://127.0.0.1:9"}
    with pytest.raises(UserError, match="served in a target of its own"):
        train(make_config("medusa_2", base, tmp_path / "run", run=RUN, evaluation=evaluation))


# --- as a command


def test_the_command_swaps_each_drafter(
    engine: FakeEngine,
    plain: FakeEngine,
    tiny_target_dir: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the target the head alone is loaded; the drafters are exported beside --out, and nothing of that stays."""
    monkeypatch.delattr(Target, "from_pretrained")
    held_out = write_held_out(tmp_path)
    words = ["evaluate", "--target", str(tiny_target_dir), "--engine", engine.url, "--prompts", str(held_out)]
    words += ["--repeats", "1", "--max-new-tokens", "8", "--beside", f"none={plain.url}"]
    drafters = [word for folder in folders.values() for word in ("--drafter", str(folder))]
    assert main([*words, *drafters, "--out", str(tmp_path / "out" / "both")]) == 0, capsys.readouterr().err
    assert len(engine.swapped) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["both"]
    found = [read_evaluation(tmp_path / "out" / "both" / name / "evaluation.json") for name in ("1-one", "2-other")]
    assert [evaluation.drafter_kind for evaluation in found] == ["draft_model"] * 2
    assert "Judged by an engine" in (tmp_path / "out" / "both" / "report.md").read_text()
    assert "vLLM 0.32.0: temperature 0" in capsys.readouterr().out
    served = ["--drafter", str(folders["one"]), "--as-served", "--out", str(tmp_path / "served")]
    engine.dev_mode = False
    assert main([*words, *served]) == 0
    assert len(engine.swapped) == 2
    assert main([*words, "--drafter", "ngram", "--out", str(tmp_path / "ngram")]) == 2
    assert "--beside ngram=URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--beside", "none=http://a:1"], "give --engine URL, too"),
        (["--as-served"], "give --engine URL, too"),
        (["--engine", "http://a:1", "--certify"], "leave out --certify"),
        (["--engine", "http://a:1", "--tree", "8,3"], "leave out --tree"),
        (["--engine", "http://a:1", "--draft-length", "2", "4"], "an engine has one"),
        (["--engine", "http://a:1", "--as-served", "--drafter", "e"], "give one --drafter"),
        (["--engine", "a"], "is no URL"),
    ],
)
def test_flags_of_the_own_decoder_are_refused(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", "--target", "t", "--drafter", "d", "--prompts", "p.txt", "--out", str(tmp_path / "out")]
    assert main([*command, *words]) == 2
    assert reason in capsys.readouterr().err
