"""Measure the embedded target, or any other, on the standard library's held-out files.

    python tools/tiny_target_quality.py [TARGET] [--prompts 300]

It prints the loss in nats a token and in nats a byte, which compares tokenizers: on functions of held-out files and on
some of the others, which the embedded target was trained on. And it prints the share of greedy answers that run into a
loop: on functions that were begun and, where the target has a chat template, on questions.
"""

import argparse
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.data.prompts.code_dialogues import code_dialogues
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions, stdlib_groups
from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter
from draftsmith.models.target.chat_template import has_template
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

NEW_TOKENS = 96
LONGEST_PROMPT = 128  # tokens
BATCH_SIZE = 64
READ_EVERY = 50  # of so many functions that are not held out one is read
GRAM, REPEATED = 4, 5  # an answer loops that holds the same run of 4 tokens 5 times


@dataclass
class FunctionLoss:
    """The cross-entropy of functions, summed."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def per_token(self) -> float:
        return self.nats / self.num_tokens

    @property
    def per_byte(self) -> float:
        return self.nats / self.num_bytes


def function_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, functions: list[str]) -> FunctionLoss:
    """Return the loss on each function from its start to the mark behind it, as far as the model's context reaches."""
    total = FunctionLoss(0.0, 0, 0)
    mark = tokenizer.bos_token_id
    for ids in tokenizer(functions, add_special_tokens=False, verbose=False)["input_ids"]:
        text = [mark, *ids, mark][: model.config.max_position_embeddings + 1]
        row = torch.tensor([text], device=model.device)  # [1, T + 1]
        with torch.no_grad():
            logits = model(input_ids=row[:, :-1], use_cache=False).logits
        total.nats += torch.nn.functional.cross_entropy(logits[0].float(), row[0, 1:], reduction="sum").item()
        total.num_tokens += row.shape[1] - 1
        total.num_bytes += len(str(tokenizer.decode(row[0], skip_special_tokens=True)).encode())
    return total


def loops(token_ids: list[int]) -> bool:
    """Return whether a text repeats itself: the same `GRAM` tokens stand in it at least `REPEATED` times."""
    grams = Counter(zip(*(token_ids[start:] for start in range(GRAM)), strict=False))
    return max(grams.values(), default=0) >= REPEATED


def greedy_answers(target: Target, prompts: list[Prompt]) -> list[list[int]]:
    """Return the token ids of the greedy answers to those prompts that are short enough."""
    encoded = [ids for ids in encode_prompts(prompts, target) if len(ids) <= LONGEST_PROMPT]
    decoder = SpeculativeDecoder(target, load_drafter("none", target))
    answers = []
    for start in range(0, len(encoded), BATCH_SIZE):
        answers += decoder.generate(encoded[start : start + BATCH_SIZE], NEW_TOKENS).token_ids
    return answers


def held_out_prompts(target: Target) -> dict[str, list[Prompt]]:
    """Return the prompts of the held-out files by their kind."""
    prompts = {
        "begun functions": [Prompt(text=function_prompt(function)) for function in stdlib_functions(held_out=True)]
    }
    if has_template(target.tokenizer):
        dialogues = code_dialogues(stdlib_groups(held_out=True))
        prompts["questions"] = [Prompt(messages=messages[:1]) for messages in dialogues]
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default=str(EMBEDDED_TARGET))
    parser.add_argument("--prompts", type=int, help="of each kind; all where it is not given")
    args = parser.parse_args()
    target = Target.from_pretrained(args.target, "cpu", torch.float32)
    assert target.tokenizer is not None
    functions = {True: stdlib_functions(held_out=True), False: stdlib_functions(held_out=False)[::READ_EVERY]}
    for held_out, chosen in functions.items():
        loss = function_loss(target.model, target.tokenizer, chosen)
        files = "held-out files" if held_out else "other files"
        print(f"{len(chosen)} functions of {files}: {loss.per_token:.3f} nats a token, {loss.per_byte:.3f} nats a byte")
    for kind, prompts in held_out_prompts(target).items():
        answers = greedy_answers(target, prompts[: args.prompts])
        share = sum(map(loops, answers)) / len(answers)
        print(f"{kind}: {share:.1%} of {len(answers)} greedy answers of {NEW_TOKENS} tokens loop")


if __name__ == "__main__":
    main()
