"""CPU decoding beside transformers', in one process: the goals of the decoder as ratios.

    python benchmarks/decoding_cpu.py [--drafter CHECKPOINT] [--prompts N] [--max-new-tokens N] [--repeats N]

1. greedy, batch 1, draft length 4: ours against transformers' assisted generation with the same target and draft model
2. what a round costs beyond the forward passes of target and draft model
3. batch 8 against batch 1 eight times, and what bounds that: what a pass of the target costs at each shape, and rows
   that stand idle because their texts ended before the longest one
4. plain decoding against `model.generate`

Without `--drafter` an untrained draft model of one of the target's layers serves: ratios at equal acceptance.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import total_of
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import DRAFTERS, Target, load_drafter
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import Window, chain_window
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

DRAFT_LENGTH = 4


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each, taken in turns, after one warm-up each."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return {name: statistics.median(taken) for name, taken in times.items()}


def generate(
    model: PreTrainedModel, prompt: list[int], limit: int, assistant: PreTrainedModel | None = None
) -> list[int]:
    """Return the tokens of transformers' greedy generation, with the same limit and stop rule."""
    ids = torch.tensor([prompt])
    settings: dict[str, Any] = {"max_new_tokens": limit, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    if assistant is not None:
        settings["assistant_model"] = assistant
    return model.generate(ids, **settings)[0, len(prompt) :].tolist()  # type: ignore[operator]


@torch.no_grad()
def pass_milliseconds(
    target: Target, lengths: list[int], shapes: list[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Return the median time of the target's pass and head over so many new tokens in each of so many rows, by both.

    `lengths`: what stands in the caches, of one row alone or of all.
    """
    runs: dict[str, Callable[[], object]] = {}
    for rows, tokens in shapes:
        cache = SlotCache(rows, max(lengths) + tokens)
        window = chain_window(torch.tensor(lengths[:rows]), tokens)
        token_ids = torch.randint(target.vocab_size, (rows, tokens))

        def run(token_ids: torch.Tensor = token_ids, window: Window = window, cache: SlotCache = cache) -> torch.Tensor:
            return target.logits(target.run(token_ids, window, cache).last_hidden)

        runs[f"{rows} {tokens}"] = run
    return {(int(name.split()[0]), int(name.split()[1])): 1000 * t for name, t in interleaved(runs, 25).items()}


@dataclass
class Compared:
    """The decoders of draftsmith and the models of transformers, with the same weights, and the prompts for all."""

    target: Target
    plain: SpeculativeDecoder
    ours: SpeculativeDecoder
    stock: PreTrainedModel
    assistant: PreTrainedModel
    prompts: list[list[int]]
    limit: int  # new tokens

    def one_by_one(self, decoder: SpeculativeDecoder) -> None:
        for prompt in self.prompts:
            decoder.generate([prompt], self.limit, draft_length=DRAFT_LENGTH)

    def check(self) -> None:
        """Raise `AssertionError` unless all write the same texts."""
        for prompt in self.prompts[:2]:
            expected = generate(self.stock, prompt, self.limit)
            assert generate(self.stock, prompt, self.limit, self.assistant) == expected
            assert self.ours.generate([prompt], self.limit, draft_length=DRAFT_LENGTH).token_ids[0] == expected

    def seconds(self, repeats: int) -> dict[str, float]:
        """Return the median seconds that each takes for all prompts."""
        prompts, limit = self.prompts, self.limit
        return interleaved(
            {
                "ours plain": lambda: self.one_by_one(self.plain),
                "ours speculative": lambda: self.one_by_one(self.ours),
                "transformers generate": lambda: [generate(self.stock, prompt, limit) for prompt in prompts],
                "transformers assisted": lambda: [
                    generate(self.stock, prompt, limit, self.assistant) for prompt in prompts
                ],
                "ours plain, one batch": lambda: self.plain.generate(prompts, limit),
                "ours speculative, one batch": lambda: self.ours.generate(prompts, limit, draft_length=DRAFT_LENGTH),
            },
            repeats,
        )


def make_compared(checkpoint: Path | None, num_prompts: int, limit: int) -> Compared:
    """Return decoders and models with the weights of a checkpoint, or of an untrained draft model of one layer."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    if checkpoint:
        drafter = load_drafter(checkpoint, target)
    else:
        drafter = DRAFTERS["draft_model"].from_target(DraftModelConfig(num_layers=1), target).eval()
    assert isinstance(drafter, DraftModel)
    stock = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32).eval()
    assistant = AutoModelForCausalLM.from_config(drafter.model.config, attn_implementation="sdpa").eval()
    assistant.load_state_dict(drafter.model.state_dict())
    assistant.generation_config.eos_token_id = stock.generation_config.eos_token_id
    assistant.generation_config.num_assistant_tokens = DRAFT_LENGTH
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # always drafts its full length, as ours does
    prompts = [target.encode(function_prompt(function)) for function in stdlib_functions(held_out=True)]
    prompts = [prompt for prompt in prompts if len(prompt) < 128][:: max(1, 200 // num_prompts)][:num_prompts]
    plain, ours = (SpeculativeDecoder(target, each) for each in (load_drafter("none", target), drafter))
    return Compared(target, plain, ours, stock, assistant, prompts, limit)


def report(compared: Compared, times: dict[str, float]) -> None:
    """Print speeds, ratios, and what bounds those of a batch."""
    prompts, limit = compared.prompts, compared.limit
    outputs = [compared.ours.generate([prompt], limit, draft_length=DRAFT_LENGTH) for prompt in prompts]
    num_tokens = sum(len(output.token_ids[0]) for output in outputs)
    total = total_of([output.stats.total for output in outputs])
    rounds = [output.stats.total.num_rounds for output in outputs]
    halfway = [len(prompt) + limit // 2 for prompt in sorted(prompts, key=len, reverse=True)]
    one, full = (1, DRAFT_LENGTH + 1), (len(prompts), DRAFT_LENGTH + 1)
    passes = pass_milliseconds(compared.target, halfway, [(1, 1), one, (len(prompts), 1), full])
    host = sum(output.timing.phases["host"] for output in outputs) / total.num_rounds

    def ratio(name: str, other: str) -> str:
        return f"{times[other] / times[name]:.2f} times as fast as {other}"

    print(f"{len(prompts)} prompts, up to {limit} new tokens, acceptance length {total.mean_acceptance_length:.2f}\n")
    for name, time_taken in times.items():
        print(f"{name:30} {num_tokens / time_taken:8.1f} tokens/s")
    print()
    print(f"ours speculative: {ratio('ours speculative', 'transformers assisted')} (goal 2)")
    print(f"ours plain: {ratio('ours plain', 'transformers generate')} (goal 1)")
    print(f"a batch of {len(prompts)}: {ratio('ours plain, one batch', 'ours plain')} (goal 2)")
    print(f"a batch of {len(prompts)}: {ratio('ours speculative, one batch', 'ours speculative')} (goal 2)")
    cost = ", ".join(f"{rows} x {tokens}: {time_taken:.1f}" for (rows, tokens), time_taken in passes.items())
    print(f"a pass of the target over rows x new tokens, ms: {cost}")
    ceiling, busy = len(prompts) * passes[one] / passes[full], sum(rounds) / len(prompts) / max(rounds)
    print(f"so the target's passes allow a batch {ceiling:.2f} times the speed while every row is busy;")
    print(f"here rows are busy {100 * busy:.0f} % of the rounds, which leaves {ceiling * busy:.2f}")
    print(f"host time a round, outside draft and verification: {host:.2f} ms (goal 1)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drafter", type=Path, help="checkpoint of a draft model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(0)
    compared = make_compared(args.drafter, args.prompts, args.max_new_tokens)
    compared.check()
    times = compared.seconds(args.repeats)
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {args.num_threads} thread(s), torch {torch.__version__}, commit {git_commit()}")
    report(compared, times)


if __name__ == "__main__":
    main()
