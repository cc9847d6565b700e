"""`draftsmith quickstart`: from nothing to measured drafters, in a given time.

The target writes training text, each drafter is trained on it and measured briefly after every checkpoint. Then the
best checkpoints are compared in one process, on prompts that did not choose them, and the fastest is exported. What
the time allows (prompts, steps) is measured first and kept in plan.yaml, so that an interrupted run goes on with the
same plan.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from pydantic import TypeAdapter
from rich.console import Console

from draftsmith.data.answers.prepare import PrepareSettings, decode_answers, prepare
from draftsmith.data.answers.turns import Dialogue, Markers
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts, read_prompts
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.files import require_writable
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.recipes.configs.command_settings import QuickstartSettings
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.comparison import Options, compare, evaluation_paths
from draftsmith.recipes.reports.printing import print_summary
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.serving.deliver import DeliverySettings, deliver
from draftsmith.recipes.serving.engine_rules import RULES
from draftsmith.train import TrainConfig, train
from draftsmith.train.folder.run_folder import best_checkpoint, worth

EMBEDDED_TARGET = Path(__file__).parents[1] / "tiny_python"
# Shares of the time; the rest is for loading, the report, and estimates that were too low.
PREPARE_SHARE, TRAINING_SHARE, CHECKPOINT_SHARE, COMPARISON_SHARE = 0.12, 0.51, 0.07, 0.27
# How the drafters divide the time for training. Heads learn fast, layers with attention go on learning.
WEIGHTS = {"eagle3": 5, "eagle": 5, "p_eagle": 5, "hydra": 4, "mlp_speculator": 4, "medusa": 3, "draft_model": 1}
CHECKPOINTS = 2  # a run
MAX_NEW_TOKENS = 128  # of training text, a prompt
NUM_HELD_OUT = 64  # prompts for the comparison, and again as many for checkpoints
COMPARISON = MeasureSettings(max_new_tokens=96, repeats=5)
ANSWERS = PrepareSettings(max_new_tokens=MAX_NEW_TOKENS, batch_size=64)
TIMED_PROMPTS = 8


@dataclass
class Plan:
    """What the time allows on this machine."""

    target: str
    minutes: float
    num_prompts: int  # that the target answers for training
    num_checkpoint_prompts: int  # that a checkpoint is measured on
    num_comparison_prompts: int
    num_threads: int | None  # of the CPU, that plain decoding is fastest with; None on a GPU
    steps: dict[str, int]  # by drafter


def run(settings: QuickstartSettings, console: Console) -> None:
    """Do everything, or what an interrupted call left to do. Writes only below `settings.out`."""
    kinds = [kind.strip() for kind in settings.drafters.split(",") if kind.strip()]
    if unknown := [kind for kind in kinds if kind not in WEIGHTS] or (not kinds):
        raise UserError(f"--drafters {unknown if kinds else '(empty)'}: choose from {', '.join(WEIGHTS)}")
    out, minutes = settings.out, settings.minutes
    name = settings.target or str(EMBEDDED_TARGET)
    target = Target.from_pretrained(name, settings.device)
    require_writable(out)

    train_prompts, held_out = (prompts_for(target, is_held_out) for is_held_out in (False, True))
    plan = load_plan(out / "plan.yaml", name, minutes) or measure_plan(target, train_prompts, kinds, minutes, console)
    (out / "plan.yaml").write_text(yaml.safe_dump(asdict(plan), sort_keys=False))
    missing = [kind for kind in kinds if kind not in plan.steps]
    if missing:
        raise UserError(f"{out} was begun without {', '.join(missing)}: give another --out")

    prompts = out / "prompts"
    prompts.mkdir(exist_ok=True)
    write_jsonl(prompts / "training.jsonl", train_prompts[: plan.num_prompts])
    write_jsonl(prompts / "comparison.jsonl", held_out[: plan.num_comparison_prompts])
    write_jsonl(prompts / "checkpoints.jsonl", held_out[NUM_HELD_OUT : 2 * NUM_HELD_OUT])
    prepare(target, str(prompts / "training.jsonl"), out / "samples", ANSWERS)
    for kind in kinds:
        train(quickstart_config(kind, plan, out, settings.device))

    fastest = ranked({best_checkpoint(out / kind): kind for kind in kinds}, target, plan, out)
    best = next(iter(fastest))
    console.print(f"\nreport: {build_report(out)}")
    print_summary(out, console)
    console.print(f"best drafter: {best}", soft_wrap=True)
    served = fastest_served(fastest)
    if served is None:
        console.print(f"nothing is exported: vLLM serves none of {', '.join(kinds)}")
        return
    if served != best:
        console.print(f"vLLM does not serve {fastest[best]}: the fastest that it serves is {fastest[served]}")
    deliver(str(served), "vllm", target, out / "export", DeliverySettings(), None, console)


def ranked(checkpoints: dict[Path, str], target: Target, plan: Plan, out: Path) -> dict[Path, str]:
    """The checkpoints and their kinds, the fastest first, as they compare with each other and with n-grams."""
    names = [*map(str, checkpoints), "ngram"]
    source = str(out / "prompts" / "comparison.jsonl")
    paths = evaluation_paths(out / "comparison", names)
    if not all(path.is_file() for path in paths):
        prompts = PromptSet("comparison", encode_prompts(read_prompts(source), target))
        options = Options(plan.num_threads, sample_texts=True, costs=True)
        compare(target, names, [prompts], [COMPARISON], out / "comparison", options)
    values = [worth(json.loads(path.read_text())["results"][0]) for path in paths[: len(checkpoints)]]
    order = sorted(zip(values, checkpoints.items(), strict=True), key=lambda pair: pair[0], reverse=True)
    return dict(pair for _, pair in order)


def fastest_served(fastest: dict[Path, str]) -> Path | None:
    """The first checkpoint of a kind that vLLM serves."""
    return next((checkpoint for checkpoint, kind in fastest.items() if ("vllm", kind) in RULES), None)


# --- prompts


def prompts_for(target: Target, held_out: bool) -> list[str]:
    """Prompts in random order that fit the target's context."""
    longest = min(target.context - MAX_NEW_TOKENS, 128)
    return [prompt for prompt in shuffled_prompts(held_out) if len(target.encode(prompt)) <= longest]


def shuffled_prompts(held_out: bool) -> list[str]:
    prompts = [function_prompt(function) for function in stdlib_functions(held_out)]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    return [prompts[i] for i in order]


def write_jsonl(path: Path, prompts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


# --- the plan


def load_plan(path: Path, target: str, minutes: float) -> Plan | None:
    """The plan of an interrupted run; `UserError` where that run was another one."""
    if not path.is_file():
        return None
    plan = TypeAdapter(Plan).validate_python(yaml.safe_load(path.read_text()))
    if (plan.target, plan.minutes) != (target, minutes):
        raise UserError(f"{path.parent} holds a quickstart with other settings: give another --out, or remove it")
    return plan


def measure_plan(target: Target, prompts: list[str], kinds: list[str], minutes: float, console: Console) -> Plan:
    """Time a batch of answers, a decoded prompt and a few training steps of each drafter, and divide."""
    console.print(f"measuring what {minutes:g} minutes allow on this machine ...")
    seconds = minutes * 60
    encoded = [target.encode(prompt) for prompt in prompts[: ANSWERS.batch_size]]
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    plain.generate(encoded[:1], max_new_tokens=4)  # warm-up

    start = time.perf_counter()
    dialogues = [
        Dialogue(Prompt(text=prompt), index, Sampling(1.0), target, Markers.of(target))
        for index, prompt in enumerate(prompts[: ANSWERS.batch_size])
    ]
    samples = [sample for dialogue in decode_answers(plain, dialogues, ANSWERS) for sample in dialogue.samples]
    num_batches = max(2, int(seconds * PREPARE_SHARE / (time.perf_counter() - start)))

    num_threads, per_token = fastest_num_threads(plain, encoded[:TIMED_PROMPTS])
    brief = RECIPES[f"quickstart_{kinds[0]}"]().evaluation
    # a prompt is decoded plainly and with each contender, which take about as long
    checkpoint_prompt = 3 * per_token * brief.max_new_tokens * brief.repeats * CHECKPOINTS * len(kinds)
    comparison_prompt = (len(kinds) + 2) * per_token * COMPARISON.max_new_tokens * COMPARISON.repeats

    total = sum(WEIGHTS[kind] for kind in kinds)
    steps = {}
    for kind in kinds:
        config = RECIPES[f"quickstart_{kind}"]()
        tokens = config.data.batch_size * target.context
        batches = BatchPlan(samples, config.data.batch_size, target.context, tokens, seed=0)
        drafter = DRAFTERS[kind].from_target(config.drafter, target).to(target.device)
        share = TRAINING_SHARE * WEIGHTS[kind] / total
        steps[kind] = max(8, int(seconds * share / seconds_per_step(drafter, target, batches)))
    return Plan(
        target=target.name,
        minutes=minutes,
        num_prompts=min(len(prompts), num_batches * ANSWERS.batch_size),
        num_checkpoint_prompts=min(NUM_HELD_OUT, max(2, int(seconds * CHECKPOINT_SHARE / checkpoint_prompt))),
        num_comparison_prompts=min(NUM_HELD_OUT, max(4, int(seconds * COMPARISON_SHARE / comparison_prompt))),
        num_threads=num_threads,
        steps=steps,
    )


def fastest_num_threads(plain: SpeculativeDecoder, prompts: list[list[int]]) -> tuple[int | None, float]:
    """The number of CPU threads, one or all, that decodes the prompts fastest, and its seconds a token."""
    candidates = [None] if plain.target.device.type == "cuda" else [torch.get_num_threads(), 1]
    times = {}
    for num_threads in candidates:
        with cpu_threads(num_threads):
            outputs = [plain.generate([prompt], COMPARISON.max_new_tokens) for prompt in prompts]
        num_tokens = sum(len(output.token_ids[0]) for output in outputs)
        times[num_threads] = sum(output.timing.total for output in outputs) / num_tokens
    fastest = min(times, key=lambda num_threads: times[num_threads])
    return fastest, times[fastest]


def seconds_per_step(drafter: Drafter, target: Target, batches: BatchPlan) -> float:
    """Mean time of loss and gradient over the batches there are, after one to warm up."""
    times = []
    for step in range(1 + batches.steps_per_epoch):
        start = time.perf_counter()
        batch = batches.collate(batches.micro_batches(step, 0, 1)[0]).to(target.device)
        total, count = drafter(batch, target.features(batch, drafter.layer_ids))["loss"]
        (total / count).backward()
        total.item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return sum(times[1:]) / len(times[1:])


def quickstart_config(kind: str, plan: Plan, out: Path, device: str | None) -> TrainConfig:
    """The quickstart recipe of a drafter, cut to the plan."""
    config = RECIPES[f"quickstart_{kind}"]()
    config.target = plan.target
    config.data.samples = str(out / "samples")
    config.data.max_length = 512
    config.evaluation.prompts = str(out / "prompts" / "checkpoints.jsonl")
    config.evaluation.num_prompts = plan.num_checkpoint_prompts
    config.evaluation.num_threads = plan.num_threads
    config.run.dir = str(out / kind)
    config.run.steps = plan.steps[kind]
    config.run.checkpoint_every = -(-plan.steps[kind] // CHECKPOINTS)
    config.run.log_every = max(1, plan.steps[kind] // 40)
    config.run.device = device
    return config
