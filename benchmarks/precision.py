"""A training step of each family on a CPU with products in bf16, beside one in fp32.

    python benchmarks/precision.py [KIND ...] [--repeats 3]

The quickstart's recipes on the embedded target, by one thread: loss, gradient and the optimiser's step on answers of
the target, whose own pass is not counted. The two precisions take turns. What is printed is the ratio of the medians.
"""

import argparse
from statistics import median

import torch

from draftsmith.data.answers.prepare import PrepareSettings
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.environment import device_name, git_commit
from draftsmith.models import DRAFTERS, Target, load_drafter
from draftsmith.models.devices import multiplies_bf16
from draftsmith.models.ranges import Precision
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.budget import time_step, timed_samples
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

KINDS = [name.removeprefix("quickstart_") for name in RECIPES if name.startswith("quickstart_")]
NUM_PROMPTS, ANSWERS = 32, PrepareSettings(max_new_tokens=96, batch_size=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=KINDS)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    prompts = [Prompt(text=function_prompt(function)) for function in stdlib_functions(held_out=False)[:NUM_PROMPTS]]
    samples, _ = timed_samples(SpeculativeDecoder(target, load_drafter("none", target)), prompts, ANSWERS)
    has = "has" if multiplies_bf16(target.device) else "does not have"
    print(f"{device_name(target)}, which {has} instructions for bf16, 1 thread, commit {git_commit()}")
    for kind in args.kinds:
        config = RECIPES[f"quickstart_{kind}"]()
        drafter = DRAFTERS[config.drafter.kind].from_target(config.drafter, target)
        seconds: dict[Precision, list[float]] = {"fp32": [], "bf16": []}
        for _ in range(args.repeats):
            for config.run.precision, times in seconds.items():
                times.append(time_step(config, drafter, target, samples).loss)
        of_fp32, of_bf16 = map(median, seconds.values())
        print(f"{kind:14} fp32 {of_fp32:.3f} s, bf16 {of_bf16:.3f} s: {of_fp32 / of_bf16:.2f}", flush=True)


if __name__ == "__main__":
    main()
