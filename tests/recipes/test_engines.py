"""The outside witness: a real vLLM serves what export writes, and counts what draftsmith counts.

    DRAFTSMITH_VLLM=VENV pytest -m engine -s          VENV holds vLLM 0.32.0 for CPU; about ten minutes on two cores

Two targets: the one that ships, on 50 held-out prompts, and a random one of Qwen3 shape (tied embeddings, heads wider
than hidden size / heads, eight layers). Drafters train for a few steps: agreement must not hang on how good they are.
"""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_target import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from vllm_process import serving

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.http import Server
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.decoding.schedule import Schedule, for_vllm
from draftsmith.inference.measuring.certify import texts_check
from draftsmith.inference.measuring.lossless import compare_outputs
from draftsmith.inference.measuring.speed import counted
from draftsmith.models import DRAFTERS, Checkpoint, Drafter, Target, load_drafter, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.typed_json import to_json
from draftsmith.models.training_free.ngram import Ngram, NgramConfig
from draftsmith.recipes.auto.engine_costs import EngineTimes
from draftsmith.recipes.auto.score import ServingLoad
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.configs.server_settings import WatchSettings
from draftsmith.recipes.engine_rules.engine_key_names import DROPPED, RANDOM, REFUSED
from draftsmith.recipes.engine_rules.layout_check import tensor_problems
from draftsmith.recipes.engine_rules.loader_rules import LOADER_RULES
from draftsmith.recipes.quickstart.budget import new_drafter
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for, write_jsonl
from draftsmith.recipes.serving.engine_check import EngineReport, check_engine, counted_until_end, print_reports
from draftsmith.recipes.serving.export import export_checkpoint
from draftsmith.recipes.serving.model_card import DYNAMIC_KINDS
from draftsmith.recipes.serving.serve_commands import plugin_config, serve_command, speculative_config
from draftsmith.recipes.serving.vllm_run import ENVIRONMENT, EngineJob, SpeculativeConfig, run_environment
from draftsmith.recipes.watching import watch
from draftsmith.train import train
from draftsmith.train.engine.vllm_counters import MEND, Counters, read_counters

pytestmark = pytest.mark.engine
STEPS = 30
NUM_PROMPTS = 50
MENDED = Path(__file__).parents[1] / "helpers" / "mended_cpu_vllm"
MAX_NEW_TOKENS = 64
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2)
TRAINED = [kind for kind in ("draft_model", "eagle", "eagle3", "p_eagle", "dflash", "medusa") if kind in DRAFTERS]


@pytest.fixture(scope="module")
def venv() -> Iterator[Path]:
    """The environment whose vLLMs compute in the process that asks them, which starts in half the time."""
    path = os.environ.get("DRAFTSMITH_VLLM")
    if not path:
        pytest.skip("DRAFTSMITH_VLLM names no environment with vLLM")
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield Path(path)


@pytest.fixture(scope="module")
def reports() -> Iterator[list[EngineReport]]:
    """Gathered by the tests and printed at the end: the table of docs/serving.md."""
    found: list[EngineReport] = []
    yield found
    print_reports(found, Console(width=120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(EMBEDDED_TARGET.resolve(), "cpu", torch.float32)


@pytest.fixture(scope="module")
def samples(folder: Path, target: Target) -> Path:
    """The target's own answers to a few prompts, to train on."""
    write_jsonl(folder / "training.jsonl", prompts_for(target, held_out=False)[:64])
    settings = PrepareSettings(max_new_tokens=64, samplings=(Sampling(0.0),), batch_size=64)
    prepare(target, str(folder / "training.jsonl"), folder / "samples", settings)
    return folder / "samples"


@pytest.fixture(scope="module")
def held_out(target: Target) -> list[list[int]]:
    return encode_prompts(prompts_for(target, held_out=True)[:NUM_PROMPTS], target)


@pytest.fixture(scope="module")
def served(target: Target, samples: Path, folder: Path) -> Callable[[str], Path]:
    """Return the export of a drafter of a kind, which is trained when it is first asked for."""

    @functools.cache
    def made(kind: str) -> Path:
        name = kind.replace("eagle", "e")  # vLLM reads methods from paths
        out = folder / f"out-{name}"
        export_checkpoint(train_briefly(kind, target, samples, folder / f"run-{name}"), "vllm", target, out)
        return out

    return made


def train_briefly(kind: str, target: Target, samples: Path, run: Path, **fields: Any) -> Path:
    """A checkpoint after a few steps of the quickstart's recipe."""
    config = RECIPES[f"quickstart_{kind}"]()
    for name, value in fields.items():
        setattr(config.drafter, name, value)
    config.target = target.name
    config.data.samples = str(samples)
    config.run.dir = str(run)
    config.run.steps = config.run.checkpoint_every = STEPS
    config.run.device = "cpu"
    train(config)
    return sorted((run / "checkpoints").iterdir())[-1]


def assert_agreement(report: EngineReport) -> None:
    """Counters equal to the token, texts identical but for near-ties; and enough accepted to tell it from nothing."""
    assert counts_of(report.engine.counters) == counts_of(report.ours)
    assert report.texts.divergences == 0, to_json(report)
    assert report.ours.num_accepted_tokens > report.num_prompts


def counts_of(counters: Stats | Counters) -> tuple[float, float, float]:
    return counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens


@pytest.mark.parametrize("kind", ["ngram", *TRAINED])
def test_vllm_accepts_what_we_accept(
    kind: str,
    venv: Path,
    target: Target,
    served: Callable[[str], Path],
    held_out: list[list[int]],
    reports: list[EngineReport],
) -> None:
    drafter: Drafter
    if kind == "ngram":
        drafter, settings = Ngram(NgramConfig(occurrence="earliest")), NGRAM
    else:
        drafter, settings = load_drafter(served(kind), target), speculative_config(kind, str(served(kind)), 4)
    report = check_engine(str(venv), settings, drafter, target, held_out, MAX_NEW_TOKENS)
    reports.append(report)
    assert_agreement(report)


@pytest.mark.parametrize("kind", [kind for kind in ("eagle3", "draft_model", "medusa") if kind in TRAINED])
def test_sampled_texts_are_the_targets_and_as_many_tokens_are_accepted(
    kind: str, venv: Path, target: Target, served: Callable[[str], Path], held_out: list[list[int]]
) -> None:
    """At temperature 1. vLLM accepts a token that it drafted as the likeliest, as `one_hot` does.

    As a control, the same texts are not those of a target at another temperature.
    """
    prompts = held_out * 4
    settings = speculative_config(kind, str(served(kind)), 4)
    run = run_environment(venv, settings, target, EngineJob(prompts, MAX_NEW_TOKENS, temperature=1.0), MENDED)
    assert texts_check(target, prompts, run.token_ids, Sampling(1.0)).p_value > 1e-4
    assert texts_check(target, prompts, run.token_ids, Sampling(0.9)).p_value < 1e-4
    decoder = SpeculativeDecoder(target, load_drafter(served(kind), target))
    generation = resolve_settings(decoder.drafter, Sampling(1.0), MAX_NEW_TOKENS, 4, "one_hot", stop_at_eos=False)
    endless = decoder.decode(prompts, generation, batch_size=16)
    texts = [counted(ids, target.eos_token_ids, MAX_NEW_TOKENS) for ids in endless.token_ids]
    ours = counted_until_end(texts, endless.rounds, 4)
    theirs = run.counters
    rates = [(counts.num_accepted_tokens / counts.num_drafts) for counts in (ours, theirs)]
    error = theirs.standard_error * (1 + theirs.num_drafts / ours.num_drafts) ** 0.5
    print(f"{kind} at temperature 1: accepted a draft {rates[1]:.4f} (vLLM), {rates[0]:.4f} (ours), error {error:.4f}")
    assert abs(rates[0] - rates[1]) < 4 * error


# --- a target of another family


def family_config(family: str) -> PretrainedConfig:
    """Heads of 32 over a width of 48, a mixture of experts, and one with sinks and a sliding window beside it."""
    tokenizer = tiny_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    experts = {"hidden_size": 64, "num_experts_per_tok": 2}
    changes: dict[str, dict[str, Any]] = {
        "qwen3": {"rope_theta": 20000.0, "tie_word_embeddings": True},
        "qwen3_moe": {**experts, "num_experts": 8, "moe_intermediate_size": 64, "tie_word_embeddings": True},
        "gpt_oss": {
            **experts,
            "num_local_experts": 8,
            "sliding_window": 32,
            "max_position_embeddings": 4096,
            "initializer_range": 0.05,
        },
    }
    return AutoConfig.for_model(family, **{**fields, **changes[family]})


@pytest.fixture(scope="module")
def families(folder: Path) -> Callable[[str], tuple[Target, Path]]:
    """Return a target of a family with random weights, wide enough that greedy text varies, and its samples."""
    words = ["heat", "the", "iron", "and", "strike", "it", "again", "with", "a", "hammer", "that", "is", "heavy"]
    prompts = [Prompt(text=f"{' '.join(words[i % 7 : i % 7 + 6])} {i}") for i in range(96)]
    write_jsonl(folder / "words.jsonl", prompts)

    @functools.cache
    def made(family: str) -> tuple[Target, Path]:
        directory, samples = folder / family, folder / f"{family}-samples"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(family_config(family)).save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
        target = Target.from_pretrained(directory, "cpu", torch.float32)
        settings = PrepareSettings(max_new_tokens=48, samplings=(Sampling(0.0),), batch_size=32)
        prepare(target, str(folder / "words.jsonl"), samples, settings)
        return target, samples

    return made


@pytest.mark.parametrize(
    ("family", "kind", "fields"),
    [
        (family, kind, fields)
        for family, kind, fields in (
            ("qwen3", "draft_model", {"num_layers": 2}),
            ("qwen3", "eagle", {}),
            # a table, and other layers than the default
            ("qwen3", "eagle3", {"draft_vocab_size": 200, "layer_ids": [1, 4, 6]}),
            # EAGLE-3.1
            ("qwen3", "eagle3", {"feature_norm": "each", "norm_output": True, "starting_layers": "target"}),
            ("qwen3", "eagle3", {"feature_norm": "all"}),
            ("qwen3", "medusa", {"num_layers": 2}),
            ("qwen3_moe", "eagle3", {}),
            ("gpt_oss", "eagle3", {}),
        )
        if kind in TRAINED
    ],
)
def test_another_family(
    family: str,
    kind: str,
    fields: dict[str, Any],
    venv: Path,
    families: Callable[[str], tuple[Target, Path]],
    folder: Path,
    reports: list[EngineReport],
) -> None:
    target, samples = families(family)
    name = "-".join([family, kind.replace("eagle", "e"), *fields])
    checkpoint = train_briefly(kind, target, samples, folder / f"run-{name}", **fields)
    export_checkpoint(checkpoint, "vllm", target, folder / f"out-{name}")
    drafter = load_drafter(folder / f"out-{name}", target)
    prompts = [target.encode(f"strike {i} times and heat it again") for i in range(NUM_PROMPTS)]
    settings = speculative_config(kind, str(folder / f"out-{name}"), 4)
    report = check_engine(str(venv), settings, drafter, target, prompts, MAX_NEW_TOKENS)
    reports.append(report)
    assert_agreement(report)


# --- what else is claimed of vLLM


@pytest.mark.parametrize(("kind", "fields"), [("eagle3", {}), ("dflash", {"num_layers": 2, "block_size": 5})])
def test_speculators_directory_is_served(
    kind: str,
    fields: dict[str, Any],
    venv: Path,
    target: Target,
    samples: Path,
    held_out: list[list[int]],
    folder: Path,
) -> None:
    """The other format gives vLLM the same drafter."""
    run, out = folder / f"run-speculators-{kind}", folder / f"out-speculators-{kind}"
    checkpoint = train_briefly(kind, target, samples, run, draft_vocab_size=1000, **fields)
    export_checkpoint(checkpoint, "speculators", target, out)
    drafter = load_drafter(out, target)
    settings = speculative_config(kind, str(out), 4)
    report = check_engine(str(venv), settings, drafter, target, held_out[:10], MAX_NEW_TOKENS)
    assert counts_of(report.engine.counters) == counts_of(report.ours)
    assert report.texts.divergences == 0


def test_a_wrong_layer_is_seen(
    venv: Path, target: Target, served: Callable[[str], Path], held_out: list[list[int]], folder: Path
) -> None:
    """The check has teeth: a directory whose layer ids are one off is served without a word, and found out.

    By exact counts alone, for acceptance as a whole may hardly move.
    """
    out = Path(shutil.copytree(served("eagle3"), folder / "out-wrong"))
    drafter = load_drafter(out, target)
    config = json.loads((out / "config.json").read_text())
    ids = config["eagle_aux_hidden_state_layer_ids"]
    config["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in ids] if ids[0] > 1 else [i + 1 for i in ids[:-1]] + [1]
    (out / "config.json").write_text(json.dumps(config))
    settings = speculative_config("eagle3", str(out), 4)
    report = check_engine(str(venv), settings, drafter, target, held_out[:20], MAX_NEW_TOKENS)
    assert counts_of(report.engine.counters) != counts_of(report.ours)
    assert report.texts.divergences == 0  # speculation stays lossless, which is why nobody notices


@pytest.fixture(scope="module")
def small_export(target: Target, samples: Path, folder: Path) -> Path:
    checkpoint = train_briefly("eagle3", target, samples, folder / "run-tensors", draft_vocab_size=1000)
    export_checkpoint(checkpoint, "vllm", target, folder / "out-tensors")
    return folder / "out-tensors"


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"fc.weight": None}, RANDOM),
        ({"layers.0.self_attn.o_proj.bias": "norm.weight"}, DROPPED),
        ({"verifier_norm.weight": "norm.weight"}, REFUSED),
        ({"norm.weight": None, "final_norm.weight": "norm.weight"}, REFUSED),
    ],
)
def test_tensors_that_do_not_fit(
    change: dict[str, str | None],
    outcome: str,
    venv: Path,
    target: Target,
    small_export: Path,
    held_out: list[list[int]],
    tmp_path: Path,
) -> None:
    """What the rules say of a tensor too few, too many, or under another name is what vLLM does."""
    drafter, whole = load_drafter(small_export, target), load_file(small_export / "model.safetensors")
    tensors = {name: tensor for name, tensor in whole.items() if name not in change}
    tensors.update({name: whole[source].clone() for name, source in change.items() if source})
    config, rules = json.loads((small_export / "config.json").read_text()), LOADER_RULES["vllm", "eagle3"]
    *_, problem = tensor_problems(rules, Checkpoint("eagle3", config, tensors), target)
    assert problem.endswith(outcome)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = speculative_config("eagle3", str(tmp_path), 4)
    if outcome == REFUSED:
        with pytest.raises(UserError, match="^vLLM in .* failed"):
            check_engine(str(venv), settings, drafter, target, held_out[:10], MAX_NEW_TOKENS)
        return
    report = check_engine(str(venv), settings, drafter, target, held_out[:10], MAX_NEW_TOKENS)
    if outcome == DROPPED:
        assert_agreement(report)
    else:
        assert report.engine.counters.num_accepted_tokens < report.ours.num_accepted_tokens / 2


def test_watching_a_running_server(
    target: Target, held_out: list[list[int]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`draftsmith watch` and `--check URL` on a real server: its page holds what they read."""
    options = ("--max-model-len", "256", "--speculative-config", NGRAM.text)
    with serving(target.name, folder / "server.log", *options) as url:
        assert read_counters(Server(url, "watch", MEND)) == Counters(accepted_per_position=(0,) * 4)
        drafter = Ngram(NgramConfig(occurrence="earliest"))
        report = check_engine(url, NGRAM, drafter, target, held_out[:10], MAX_NEW_TOKENS)
        assert_agreement(report)
        assert read_counters(Server(url, "watch", MEND)) == report.engine.counters
        watch.run(WatchSettings(url=(url,), interval=0.1, readings=1), Console(width=120))
    assert "acceptance length" in capsys.readouterr().out


def test_a_server_drafts_by_its_schedule(
    target: Target, served: Callable[[str], Path], held_out: list[list[int]], folder: Path
) -> None:
    """Four tokens for a request alone, two each for two, none for eight; texts stay those of the target."""
    schedule = Schedule(((1, 4), (2, 2), (4, 0)))
    config = replace(
        speculative_config("eagle3", str(served("eagle3")), schedule.longest),
        num_speculative_tokens_per_batch_size=for_vllm(schedule),
    )
    prompts = held_out[:8]
    expected = SpeculativeDecoder(target, load_drafter("none", target)).generate(
        prompts, MAX_NEW_TOKENS, stop_at_eos=False
    )
    drafted_at_once = []
    options = ("--max-model-len", "256", "--max-num-seqs", "8", "--speculative-config", config.text)
    with serving(target.name, folder / "schedule.log", *options) as url:
        server = Server(url, "schedule", MEND)
        for size in (1, 2, 8):
            before = read_counters(server)
            body = {"model": target.name, "prompt": prompts[:size], "max_tokens": MAX_NEW_TOKENS, "temperature": 0}
            answer = server.json("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
            assert [choice["token_ids"] for choice in answer["choices"]] == expected.token_ids[:size]
            drafted_at_once.append(read_counters(server) - before)
    print(drafted_at_once)
    alone, of_two, of_eight = drafted_at_once
    assert alone.num_draft_tokens == 4 * alone.num_drafts > 0
    assert 2 <= of_two.num_draft_tokens / of_two.num_drafts < 3  # the slower one ends alone
    assert of_eight.num_draft_tokens < 0.05 * 8 * MAX_NEW_TOKENS  # before all of them have been read


def test_vllms_suffixes_write_our_text(venv: Path, target: Target, held_out: list[list[int]]) -> None:
    """Its suffix trees (arctic-inference) draft by rules of their own, so that its counters are its own."""
    if not list(venv.glob("lib/*/site-packages/arctic_inference")):
        pytest.skip("this vLLM has no arctic-inference")
    plain = SpeculativeDecoder(target, load_drafter("none", target)).generate(held_out, MAX_NEW_TOKENS)
    run = run_environment(venv, speculative_config("suffix", "", 4), target, EngineJob(held_out, MAX_NEW_TOKENS))
    print(f"suffix: {run.counters}")
    assert compare_outputs(target, held_out, plain.token_ids, run.token_ids).divergences == 0
    assert len(held_out) < run.counters.num_accepted_tokens < run.counters.num_draft_tokens


@pytest.mark.parametrize("lookup", ["ngram", "suffix"])
def test_lookups_are_exported_and_checked(lookup: str, venv: Path, target: Target, tmp_path: Path) -> None:
    """vLLM continues another copy of an n-gram than ours does by default, and suffixes by rules of its own."""
    write_jsonl(tmp_path / "prompts.jsonl", prompts_for(target, held_out=True)[:20])
    arguments = ["--target", target.name, "--engine", "vllm", "--check", str(venv), "--draft-length", "4"]
    arguments += ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "32", "--repeats", "1"]
    assert main(["export", lookup, *arguments, "--out", str(tmp_path / "out")]) == 0


def test_vllm_tells_what_its_rounds_cost(venv: Path, target: Target, held_out: list[list[int]]) -> None:
    """It times plain steps and rounds of a drafter that learnt nothing, alone and two requests at a time."""
    drafter = new_drafter(RECIPES["quickstart_eagle3"](), target)
    costs = EngineTimes(venv, target, held_out, ServingLoad(2, 100)).costs("eagle3", drafter, 8)
    print([(row.draft_length, row.batch, row.round_ms) for row in costs.fitted_on])
    measured = {(row.batch, row.draft_length): row.round_ms for row in costs.fitted_on}
    assert set(measured) == {(1, 0), (1, 1), (1, 8), (2, 0), (2, 1), (2, 8)}
    assert min(measured.values()) > 0
    assert costs.device.startswith("vLLM 0.")


def test_plain_vllm_writes_our_text(venv: Path, target: Target, held_out: list[list[int]]) -> None:
    """Without any drafter: what differs with one is then the drafter's doing."""
    run = run_environment(venv, None, target, EngineJob(held_out[:20], MAX_NEW_TOKENS))
    plain = SpeculativeDecoder(target, load_drafter("none", target)).generate(held_out[:20], MAX_NEW_TOKENS)
    assert run.counters == Counters()
    assert compare_outputs(target, held_out[:20], plain.token_ids, run.token_ids).divergences == 0


def test_vllm_reads_the_schedule(venv: Path, target: Target, tmp_path: Path) -> None:
    """The command with the lengths by batch size goes through vLLM's own command line, checks and scheduler's table."""
    schedule = Schedule(((1, 4), (8, 2), (24, 0)))
    commands = []
    for kind in DYNAMIC_KINDS:
        drafter_class, name = DRAFTERS[kind], kind.replace("eagle", "e")
        drafter = drafter_class.from_target(drafter_class.config_class(kind=kind), target)
        save_drafter(drafter, tmp_path / f"checkpoint-{name}")
        exported = export_checkpoint(tmp_path / f"checkpoint-{name}", "vllm", target, tmp_path / f"out-{name}")
        commands.append(serve_command(exported, "vllm", exported.directory, 3, schedule))
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(__file__).parents[1] / "helpers" / "vllm_reads.py"
    answer = tmp_path / "answer.json"
    command = [str(venv / "bin/python"), str(script), str(tmp_path / "commands.json"), str(answer)]
    subprocess.run(command, env={**ENVIRONMENT, **environment}, check=True, capture_output=True)
    for kind, found in zip(DYNAMIC_KINDS, json.loads(answer.read_text()), strict=True):
        assert found["method"] == kind
        assert found["num_speculative_tokens"] == schedule.longest
        assert found["lengths"][1:] == [schedule.draft_length(n) for n in range(1, len(found["lengths"]))]
        assert len(found["lengths"]) > 25


def test_medusa_as_a_plug_in(
    venv: Path, target: Target, served: Callable[[str], Path], held_out: list[list[int]]
) -> None:
    """What newer vLLMs need for Medusa heads, in the one that has heads of its own too."""
    out = served("medusa")
    ours = SpeculativeDecoder(target, load_drafter(out, target)).generate(held_out, MAX_NEW_TOKENS, draft_length=4)
    run = run_environment(venv, plugin_config(4), target, EngineJob(held_out, MAX_NEW_TOKENS), out)
    assert compare_outputs(target, held_out, ours.token_ids, run.token_ids).divergences == 0
    expected = ours.stats.total.mean_acceptance_length
    assert run.counters.mean_acceptance_length == pytest.approx(expected, rel=0.02)
    assert run.counters.num_accepted_tokens > len(held_out)
