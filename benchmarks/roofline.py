"""The roofline of `draftsmith plan --gpu` beside figures that others published: python benchmarks/roofline.py

It prints the tables of docs/roofline.md. Every figure with a target, a GPU and a batch size is taken, also those that
are missed. A speed is compared in tokens a second of one text; a speedup with the acceptance length that its source
gives for the same run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from draftsmith.inference.planning.gpu_roofline import Machine, RooflineCosts, TargetTimes, WeightType
from draftsmith.inference.planning.gpus import GPUS
from draftsmith.models.target.shape import TargetShape, target_shape
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS
from draftsmith.recipes.planning.drafter_shapes import drafter_shape

CONTEXT = 1024  # tokens, where a source does not say: questions and answers of its benchmarks are about as long


def _config(model_type: str, **shape: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **shape)


def _llama(hidden: int, layers: int, heads: int, key_value_heads: int, inner: int, vocabulary: int) -> Any:
    return _config(
        "llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
    )


def _qwen3(hidden: int, layers: int, heads: int, inner: int, tied: bool) -> Any:
    return _config(
        "qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=151936,
        eos_token_id=151645,
        tie_word_embeddings=tied,
    )


CONFIGS: dict[str, Any] = {
    "Llama-3.1-8B": PUBLIC_TARGETS["llama_3_1_8b"].config,
    "Llama-3.3-70B": PUBLIC_TARGETS["llama_3_3_70b"].config,
    "Llama-3.2-1B": _config(
        "llama",
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "Llama-2-7B": _llama(4096, 32, 32, 32, 11008, 32000),  # Vicuna-7B has the same shape
    "Llama-2-13B": _llama(5120, 40, 40, 40, 13824, 32000),  # Vicuna-13B
    "Llama-2-70B": _llama(8192, 80, 64, 8, 28672, 32000),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": PUBLIC_TARGETS["qwen3_8b"].config,
    "Qwen3-14B": _qwen3(5120, 40, 40, 17408, tied=False),
    "Qwen3-32B": PUBLIC_TARGETS["qwen3_32b"].config,
    "Qwen3-30B-A3B": PUBLIC_TARGETS["qwen3_30b_a3b"].config,
}


@dataclass(frozen=True)
class Published:
    """A published figure: the speed of plain decoding, or the speedup of a drafter at an acceptance length."""

    source: str
    engine: str
    target: str
    gpu: str
    figure: float  # tokens a second of one text; with a drafter the speedup
    drafter: str = ""  # none: plain decoding
    draft_length: int = 0
    acceptance_length: float = 0.0
    nodes: int | None = None  # of a tree
    batch: int = 1
    num_gpus: int = 1
    weights: WeightType = "bf16"
    context: int = CONTEXT
    gpu_named: bool = True  # else it is taken for this one, because the source names none


ENGINE, EAGER = "engine", "eager"  # Hugging Face's modelling, kernel by kernel, whose plain decoding waits for the host
GPT_FAST = "gpt-fast, README"
VLLM_20780 = "vLLM issue 20780"
ANGELSLIM = "AngelSlim, benchmarks of its documentation, mean of four sets"
SPECFORGE = "SpecForge, data of its spec bundle"
SPEC_BENCH = "Spec-Bench, leaderboard, mean of six tasks"
MODEL_OPTIMIZER = "Model-Optimizer, README, MT-Bench"


def _tree(target: str, gpu: str, drafter: str, speedup: float, length: float, depth: int, nodes: int) -> Published:
    """Return a figure of Spec-Bench: reference code of the authors, one text at a time, in fp16."""
    return Published(SPEC_BENCH, EAGER, target, gpu, speedup, drafter, depth, length, nodes)


def _angelslim(target: str, plain: float, speculative: float, length: float) -> list[Published]:
    return [
        Published(ANGELSLIM, ENGINE, target, "H100", plain, gpu_named=False),
        Published(ANGELSLIM, ENGINE, target, "H100", speculative / plain, "eagle3", 2, length, gpu_named=False),
    ]


def _specforge(target: str, batch: int, draft_length: int, speedup: float, length: float) -> Published:
    return Published(
        SPECFORGE, ENGINE, target, "H100", speedup, "eagle3", draft_length, length, batch=batch, gpu_named=False
    )


PUBLISHED = [
    Published(GPT_FAST, ENGINE, "Llama-3.1-8B", "A100-80GB", 93.9, context=128),
    Published(GPT_FAST, ENGINE, "Llama-3.1-8B", "A100-80GB", 137.6, weights="int8", context=128),
    Published(GPT_FAST, ENGINE, "Llama-2-7B", "A100-80GB", 104.9, context=128),
    Published(GPT_FAST, ENGINE, "Llama-2-7B", "A100-80GB", 155.6, weights="int8", context=128),
    Published(GPT_FAST, ENGINE, "Llama-2-7B", "A100-80GB", 196.8, weights="int4", context=128),
    Published(GPT_FAST, ENGINE, "Llama-2-70B", "A100-80GB", 19.1, weights="int8", context=128),
    Published(GPT_FAST, ENGINE, "Llama-2-70B", "A100-80GB", 25.3, weights="int4", context=128),
    Published(f"{GPT_FAST}, before compilation", EAGER, "Llama-2-7B", "A100-80GB", 25.5, context=128),
    Published("Medusa, README", EAGER, "Llama-2-7B", "A100-80GB", 45),
    Published("SGLang, documentation, MT-Bench", ENGINE, "Llama-3.1-8B", "H100", 158.34),
    Published(VLLM_20780, ENGINE, "Llama-3.1-8B", "H100", 1000 / 7.07),
    Published(VLLM_20780, ENGINE, "Llama-3.1-8B", "H100", 7.07 / 4.32, "eagle3", 2, 2.36),
    Published(VLLM_20780, ENGINE, "Llama-3.1-8B", "H100", 7.07 / 4.09, "eagle3", 3, 2.79),
    Published(VLLM_20780, ENGINE, "Llama-3.1-8B", "H100", 7.07 / 4.05, "eagle3", 4, 3.08),
    Published(VLLM_20780, ENGINE, "Llama-3.1-8B", "H100", 7.07 / 4.13, "eagle3", 5, 3.32),
    Published(VLLM_20780, ENGINE, "Llama-3.1-8B", "H100", 7.07 / 4.29, "eagle3", 7, 3.54),
    Published(VLLM_20780, ENGINE, "Llama-3.1-8B", "H100", 7.07 / 4.29, "eagle", 3, 2.29),
    Published("vLLM pull request 16937", ENGINE, "Llama-3.1-8B", "H100", 133),
    Published("Hazy Research, half of the bandwidth at most", ENGINE, "Llama-3.2-1B", "H100", 677, context=128),
    Published(MODEL_OPTIMIZER, ENGINE, "Qwen3-8B", "H100", 145),
    Published(MODEL_OPTIMIZER, ENGINE, "Qwen3-8B", "H100", 422 / 145, "dflash", 15, 3.475),
    Published(MODEL_OPTIMIZER, ENGINE, "Qwen3-8B", "H100", 443 / 145, "dflash", 7, 4.08),
    Published(MODEL_OPTIMIZER, ENGINE, "Qwen3-8B", "H100", 377, num_gpus=8),
    Published(MODEL_OPTIMIZER, ENGINE, "Qwen3-8B", "H100", 919 / 377, "dflash", 15, 3.475, num_gpus=8),
    Published(MODEL_OPTIMIZER, ENGINE, "Qwen3-8B", "H100", 1053 / 377, "dflash", 7, 4.08, num_gpus=8),
    Published("TensorRT-LLM, blog, in FP8", ENGINE, "Llama-3.3-70B", "H200", 51.14, weights="fp8"),
    Published("SpecForge issue 339", ENGINE, "Qwen3-30B-A3B", "H100", 222),
    Published("DFlash, a user", ENGINE, "Llama-3.1-8B", "RTX-PRO-6000", 90),
    Published("DFlash, a user", ENGINE, "Llama-3.1-8B", "RTX-PRO-6000", 430 / 90, "dflash", 7, 6.1),
    Published("JetSpec, MATH-500", EAGER, "Qwen3-8B", "H100", 9.64, "dflash", 16, 10.76, 256),
    _tree("Llama-2-7B", "A100-80GB", "eagle", 2.10, 3.58, 5, 25),
    _tree("Llama-2-7B", "A100-80GB", "eagle", 2.36, 4.34, 6, 60),
    _tree("Llama-2-7B", "A100-80GB", "medusa", 1.71, 2.31, 4, 63),
    _tree("Llama-2-7B", "A100-80GB", "hydra", 2.07, 3.26, 4, 63),
    _tree("Llama-2-7B", "A100-80GB", "ngram", 1.66, 1.75, 10, 10),
    _tree("Llama-2-13B", "A100-80GB", "eagle3", 3.02, 5.71, 8, 60),
    _tree("Llama-2-13B", "A100-80GB", "eagle", 2.46, 4.43, 6, 60),
    _tree("Llama-2-13B", "A100-80GB", "medusa", 1.80, 2.39, 4, 63),
    _tree("Llama-2-7B", "RTX-3090", "eagle", 2.19, 4.34, 6, 60),
    _tree("Llama-2-7B", "RTX-3090", "medusa", 1.44, 2.31, 4, 63),
    *_angelslim("Qwen3-1.7B", 381.05, 642.93, 2.17),
    *_angelslim("Qwen3-4B", 233.26, 386.94, 2.08),
    *_angelslim("Qwen3-8B", 151.81, 257.52, 1.99),
    *_angelslim("Qwen3-14B", 93.26, 145.33, 1.79),
    *_angelslim("Qwen3-32B", 43.32, 74.1, 1.91),
    *_angelslim("Qwen3-30B-A3B", 320.87, 438.07, 2.04),
    _specforge("Llama-3.1-8B", 1, 7, 3.34, 5.40),
    _specforge("Llama-3.1-8B", 1, 7, 2.99, 4.91),
    _specforge("Llama-3.1-8B", 1, 7, 2.37, 3.86),
    _specforge("Llama-3.1-8B", 1, 7, 1.75, 2.97),
    _specforge("Qwen3-30B-A3B", 8, 7, 2.48, 5.29),
    _specforge("Qwen3-30B-A3B", 8, 7, 2.25, 5.12),
    _specforge("Qwen3-30B-A3B", 8, 7, 2.29, 4.58),
    _specforge("Qwen3-30B-A3B", 8, 5, 1.56, 2.83),
    _specforge("Qwen3-30B-A3B", 8, 5, 1.40, 3.01),
]


@cache
def shape_of(target: str) -> TargetShape:
    return target_shape(CONFIGS[target], target)


def predicted(figure: Published) -> float:
    """Return what the roofline gives for a published figure."""
    machine = Machine(GPUS[figure.gpu], figure.num_gpus, figure.weights)
    times = TargetTimes(shape_of(figure.target), machine)
    if not figure.drafter:
        return 1000 / times.plain(figure.batch, figure.context)
    shape, _ = drafter_shape(figure.drafter, CONFIGS[figure.target], figure.target)
    draft = figure.draft_length, figure.batch, figure.context, figure.nodes
    return RooflineCosts(times, shape).speedup(figure.acceptance_length, *draft)


def error(figure: Published) -> float:
    return predicted(figure) / figure.figure - 1


GROUPS: dict[str, Callable[[Published], bool]] = {
    "Speed of engines, plain decoding": lambda entry: entry.engine == ENGINE and not entry.drafter and entry.gpu_named,
    "Speedup in engines": lambda entry: entry.engine == ENGINE and bool(entry.drafter) and entry.gpu_named,
    "Engines on a GPU that is not named, taken for an H100": lambda entry: not entry.gpu_named,
    "Code of research, mostly eager": lambda entry: entry.engine == EAGER,
}


def table(figures: list[Published]) -> str:
    """Return figures, predictions and errors in Markdown."""
    head = ["source", "target", "GPU", "batch", "decoding", "tokens a round", "published", "predicted", "error"]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---:|---|---:|---:|---:|---:|"]
    for figure in figures:
        unit = "×" if figure.drafter else " tokens/s"
        digits = 2 if figure.drafter else 0
        nodes = f", {figure.nodes} nodes" if figure.nodes else ""
        row = [
            figure.source,
            figure.target + ("" if figure.weights == "bf16" else f", {figure.weights}"),
            f"{figure.num_gpus} × {figure.gpu}" if figure.num_gpus > 1 else figure.gpu,
            str(figure.batch),
            f"{figure.drafter}, K={figure.draft_length}{nodes}" if figure.drafter else "plain",
            f"{figure.acceptance_length:.2f}" if figure.drafter else "",
            f"{figure.figure:.{digits}f}{unit}",
            f"{predicted(figure):.{digits}f}{unit}",
            f"{100 * error(figure):+.0f} %",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def summary() -> str:
    """Return the errors of each group of figures in Markdown."""
    lines = ["| figures | number | median size of the error | largest | within 20 % |", "|---|---:|---:|---:|---:|"]
    for name, chosen in GROUPS.items():
        errors = [error(figure) for figure in PUBLISHED if chosen(figure)]
        sizes = [abs(each) for each in errors]
        near = sum(size <= 0.2 for size in sizes)
        largest = max(errors, key=abs)
        lines.append(f"| {name} | {len(sizes)} | {median(sizes):.0%} | {largest:+.0%} | {near} |")
    return "\n".join(lines)


def page() -> str:
    parts = [summary()]
    for name, chosen in GROUPS.items():
        parts += [f"### {name}", table([figure for figure in PUBLISHED if chosen(figure)])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
