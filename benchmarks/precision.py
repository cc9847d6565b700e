"""A training step of each family on a CPU with products in bf16, beside one in fp32.

    python benchmarks/precision.py [KIND ...] [--repeats 3]

The quickstart's recipes on the embedded target: loss, gradient and the optimiser's step on answers of the target, whose
own pass is not counted. The two precisions take turns, on other answers each time. torch compiles a product in bf16 for
each number of rows, and these differ from step to step, as they do in training. So the same steps are taken once more,
to show what they would take if all products were compiled. Printed are medians and their ratios.
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
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    functions = stdlib_functions(held_out=False)[: NUM_PROMPTS * args.repeats]
    prompts = [Prompt(text=function_prompt(function)) for function in functions]
    samples, _ = timed_samples(SpeculativeDecoder(target, load_drafter("none", target)), prompts, ANSWERS)
    with_amx = "with" if torch.cpu._is_amx_tile_supported() else "without"
    print(f"{device_name(target)} {with_amx} AMX, {torch.get_num_threads()} threads, commit {git_commit()}")
    for kind in args.kinds:
        config = RECIPES[f"quickstart_{kind}"]()
        drafter = DRAFTERS[config.drafter.kind].from_target(config.drafter, target)
        fp32, bf16, compiled = list[float](), list[float](), list[float]()
        turns: list[tuple[Precision, list[float]]] = [("fp32", fp32), ("bf16", bf16), ("bf16", compiled)]
        for start in range(0, len(samples), NUM_PROMPTS):
            for config.run.precision, times in turns:
                times.append(time_step(config, drafter, target, samples[start : start + NUM_PROMPTS]).loss)
        ratios = [median(fp32) / median(times) for times in (bf16, compiled)]
        print(
            f"{kind:14} fp32 {median(fp32):.3f} s, bf16 {median(bf16):.3f} s: {ratios[0]:.2f}; "
            f"compiled {median(compiled):.3f} s: {ratios[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
