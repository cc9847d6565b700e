"""Answers prompts by transformers' assisted generation with a draft model, or with n-grams of the text.

    python assisted_generation.py TARGET --draft-model DIR --draft-length 4      prompts are lines of the standard input
    python assisted_generation.py TARGET --ngrams 4 --draft-length 4

It lies beside an exported draft model, runs where transformers is installed, and imports nothing of draftsmith.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft-model")
    parser.add_argument("--ngrams", type=int, help="longest n-gram to look up, in place of a draft model")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args(words)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = load(args.target)
    assistant = load(args.draft_model) if args.draft_model else None
    for line in sys.stdin:
        prompt = tokenizer(line.rstrip("\n"), return_tensors="pt").to(target.device)
        answer = generate(target, prompt, assistant, args.draft_length, args.max_new_tokens, args.ngrams)
        print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]), flush=True)


def load(name: str) -> Any:
    """Return a model in the type that its weights are stored in, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model.to(device).eval()


def generate(target: Any, prompt: Any, assistant: Any, draft_length: int, max_new_tokens: int, ngrams: int | None):
    """Return the tokens of prompt and greedy answer [1, T]; an assistant drafts `draft_length` tokens in each round.

    Its own settings would change that number from round to round, and end a draft early at an unsure token.
    """
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    if assistant is None:
        settings |= {"prompt_lookup_num_tokens": draft_length, "max_matching_ngram_size": ngrams}
    else:
        drafting = assistant.generation_config
        drafting.num_assistant_tokens, drafting.num_assistant_tokens_schedule = draft_length, "constant"
        drafting.assistant_confidence_threshold = 0.0
        settings["assistant_model"] = assistant
    return target.generate(**prompt, **settings)


if __name__ == "__main__":
    main()
