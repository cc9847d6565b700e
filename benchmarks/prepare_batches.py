"""Whether an answer depends on its batch: decoded alone, in a batch of 32, and drafted for in one of 16.

    python benchmarks/prepare_batches.py

On the quickstart target in fp32 on one CPU thread. The noise is the same; only rounding differs.
"""

import random

import torch

from draftsmith.data.prompts.standard_library import stdlib_functions
from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET


def main() -> None:
    torch.set_num_threads(1)
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32)
    generator = random.Random(3)
    functions = generator.sample(stdlib_functions(held_out=False), 160)
    prompts = [target.encode(function)[: generator.choice([5, 20, 60])] for function in functions]
    plain, drafted = (SpeculativeDecoder(target, load_drafter(name, target)) for name in ("none", "ngram"))
    for temperature in (0.0, 1.0):
        batch = plain.generate(prompts, 48, temperature, batch_size=32).token_ids
        other = drafted.generate(prompts, 48, temperature, batch_size=16, draft_length=4).token_ids
        alone = [plain.generate([p], 48, temperature, request_ids=[i]).token_ids[0] for i, p in enumerate(prompts)]
        for name, answers in (("alone", alone), ("with n-grams in a batch of 16", other)):
            same = sum(a == b for a, b in zip(answers, batch, strict=True))
            print(f"temperature {temperature:g}: {same} of {len(prompts)} answers {name} are those of a batch of 32")


if __name__ == "__main__":
    main()
