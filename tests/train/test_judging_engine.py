"""A real vLLM judges: counters after a swap equal those of one that was started with the drafter.

DRAFTSMITH_VLLM=VENV pytest -m engine -s tests/train/test_judging_engine.py     VENV holds vLLM 0.32.0 for CPU
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_targets import export_trained_head
from vllm_process import serving

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.judged import JudgedResult
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.models import DRAFTERS, Target, load_drafter, save_drafter
from draftsmith.models.drafter_configs import DraftModelConfig, NgramConfig
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.training_free.ngram import Ngram
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for, write_jsonl
from draftsmith.recipes.serving.serve_commands import speculative_config
from draftsmith.recipes.serving.vllm_run import EngineJob, run_environment
from draftsmith.train import train
from draftsmith.train.engine.answers import RequestSettings
from draftsmith.train.engine.judging import ENGINE, EngineJudge, JudgeSettings
from draftsmith.train.run_folder.checkpoint import checkpoints

pytestmark = pytest.mark.engine
KINDS = ("eagle3", "eagle", "draft_model")
NUM_PROMPTS, NUM_NEW_TOKENS, DRAFT_LENGTH = 12, 48, 4
LOAD = RequestSettings(Sampling(), batch_size=1, repeats=1)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(EMBEDDED_TARGET.resolve(), "cpu", torch.float32)


@pytest.fixture(scope="module")
def prompts(target: Target) -> PromptSet:
    held_out = prompts_for(target, held_out=True)[:NUM_PROMPTS]
    return PromptSet("held_out", [target.encode(prompt.text) for prompt in held_out if prompt.text])


@pytest.fixture(scope="module")
def runs(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind with an early and a late checkpoint, the early one exported for swapping."""
    folder = tmp_path_factory.mktemp("judged")
    write_jsonl(folder / "prompts.jsonl", prompts_for(target, held_out=False)[:32])
    settings = PrepareSettings(max_new_tokens=48, samplings=(Sampling(0.0),), batch_size=32)
    prepare(target, str(folder / "prompts.jsonl"), folder / "samples", settings)
    found = {}
    for place, kind in enumerate(KINDS):
        config = RECIPES[f"quickstart_{kind}"]()
        config.target, config.data.samples = target.name, str(folder / "samples")
        config.run.dir, config.run.device = str(folder / str(place) / "run"), "cpu"
        config.run.steps, config.run.checkpoint_every = 24, 4
        found[kind] = train(config)
        words = ["export", str(checkpoints(found[kind])[0]), "--engine", "vllm", "--swappable"]
        assert main([*words, "--target", target.name, "--out", str(folder / str(place) / "served")]) == 0
    return found


def options(kind: str, drafter: Path, context: int = 256) -> list[str]:
    settings = speculative_config(kind, str(drafter), DRAFT_LENGTH)
    return ["--max-model-len", str(context), "--speculative-config", settings.text]


def judge_of(url: str, target: Target) -> EngineJudge:
    return EngineJudge(JudgeSettings(url, "--engine", {}, NUM_NEW_TOKENS, DRAFT_LENGTH), target)


@pytest.mark.parametrize("kind", KINDS)
def test_counters_after_a_swap_are_those_of_a_fresh_engine(
    kind: str,
    target: Target,
    prompts: PromptSet,
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint is taken from the run as it lies there, swapped in and out again; the texts never change.

    Drafters of other kinds are refused by name, and the engine goes on with the one that it has.
    """
    served, newest = runs[kind].parent / "served", checkpoints(runs[kind])[-1]
    other = checkpoints(runs[KINDS[KINDS.index(kind) - 1]])[-1]
    swap = ["--worker-extension-cls", "vllm_swap.DraftSwap"]
    environment = {"PYTHONPATH": str(served), "VLLM_SERVER_DEV_MODE": "1"}
    rows: list[JudgedResult] = []
    with serving(target.name, tmp_path / "swapped.log", *options(kind, served), *swap, **environment) as url:
        judge = judge_of(url, target)
        rows += judge.measure(prompts, [LOAD], lambda: None)[ENGINE]
        for drafter in (newest, served):
            judge.swap(drafter)
            rows += judge.measure(prompts, [LOAD], lambda: None)[ENGINE]
        with pytest.raises(UserError, match="differs from that of the served drafter in"):
            judge.swap(other)
        rows += judge.measure(prompts, [LOAD], lambda: None)[ENGINE]
    fresh = tmp_path / "fresh"
    assert main(["export", str(newest), "--engine", "vllm", "--target", target.name, "--out", str(fresh)]) == 0
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # starts in half the time
    config = speculative_config(kind, str(fresh), DRAFT_LENGTH)
    environment_of_vllm = Path(os.environ["DRAFTSMITH_VLLM"])
    job = EngineJob(prompts.token_ids, NUM_NEW_TOKENS)
    expected = run_environment(environment_of_vllm, config, target, job).counters
    first, swapped, back, after_refusal = (row.acceptance for row in rows)
    print(f"{kind}: {first}, swapped {swapped}, fresh {expected}; {rows[1].swap_seconds:.3f} s")
    assert swapped.num_drafts == expected.num_drafts
    assert swapped.num_accepted_tokens == expected.num_accepted_tokens
    assert swapped != first
    assert first == back == after_refusal


def test_ngrams_and_the_targets_own_head_stand_beside_a_drafter(tmp_path: Path) -> None:
    """Each server counts what draftsmith's own decoder counts with its drafter. The target has an MTP head."""
    texts = [f"strike {i} times and heat it" for i in range(NUM_PROMPTS)]
    target = export_trained_head(tmp_path, "qwen2", texts)
    (tmp_path / "prompts.txt").write_text("\n".join(texts) + "\n")
    without_head = Target.from_pretrained(tmp_path / "target", "cpu", torch.float32)
    copy = DRAFTERS["draft_model"].from_target(DraftModelConfig(num_layers=2), without_head)
    save_drafter(copy, tmp_path / "checkpoint-of-copy")
    words = ["export", str(tmp_path / "checkpoint-of-copy"), "--engine", "vllm", "--target", str(tmp_path / "target")]
    assert main([*words, "--out", str(tmp_path / "copy")]) == 0
    places = {"draft_model": str(tmp_path / "copy"), "ngram": "", "mtp": target.name}
    with contextlib.ExitStack() as servers:
        urls = {}
        for kind, place in places.items():
            of_server = options(kind, Path(place), target.context)
            urls[kind] = servers.enter_context(serving(target.name, tmp_path / f"{kind}.log", *of_server))
        with pytest.raises(UserError, match="takes no other drafter while it runs"):
            judge_of(urls["draft_model"], target).swap(tmp_path / "checkpoint-of-copy")
        words = ["evaluate", "--engine", urls.pop("draft_model"), "--as-served", "--drafter", places["draft_model"]]
        words += ["--beside", *(f"{name}={url}" for name, url in urls.items()), "--target", target.name]
        words += ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", str(NUM_NEW_TOKENS)]
        assert main([*words, "--repeats", "1", "--out", str(tmp_path / "judged")]) == 0
    ours = {
        places["draft_model"]: load_drafter(places["draft_model"], target),
        "ngram": Ngram(NgramConfig(occurrence="earliest")),
        "mtp": load_drafter("mtp", target),
    }
    evaluations = [read_evaluation(file) for file in (tmp_path / "judged").glob("*/evaluation.json")]
    assert {evaluation.drafter for evaluation in evaluations} == set(ours)
    for evaluation in evaluations:
        (row,) = evaluation.judged
        decoder = SpeculativeDecoder(target, ours[evaluation.drafter])
        expected = decoder.generate(texts, NUM_NEW_TOKENS, draft_length=DRAFT_LENGTH).stats.total
        print(f"{evaluation.drafter}: {row.acceptance}")
        assert row.acceptance == replace(expected, num_rounds=expected.num_drafts)
        assert row.acceptance.num_accepted_tokens > 0
