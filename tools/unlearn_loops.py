"""Teach the embedded target to repeat itself less, by what else it could have said where its loops begin.

    python tools/unlearn_loops.py --model DIR/model --text TEXT.jsonl --out DIR2 [--kept-share 0.6] [--threads 2]

DIR2/model is the result. Given several models, it begins with the mean of their weights, and takes the card of the
first.

The model answers beginnings of all training text greedily, most of which it has read once at most and does not know by
heart. Answers that loop are cut near where the loop begins, and the model goes on from there by sampling. Then it is
trained: the samples without a loop are made likelier, and the first tokens of the loops are made less likely, by
-log(1 - p) (Welleck et al., "Neural Text Generation with Unlikelihood Training", arXiv 1908.04319, section 5.2). It
goes on learning the text, so that it forgets little. The loss of unlikelihood alone is not enough: it makes all tokens
unlikely where a loop begins, and those of the loop stay the likeliest.

The training alone takes nearly all loops and costs held-out loss. The mean of the weights before and after it takes
most of them for a part of that (Wortsman et al., "Robust fine-tuning of zero-shot models", arXiv 2109.01903).
"""

import argparse
import random
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from tiny_target_quality import GRAM, LONGEST_PROMPT, NEW_TOKENS, REPEATED, function_loss, loops
from tiny_target_text import Document, read_documents
from torch import Tensor
from train_tiny_target import Shape, TargetRun, Text, Training, mean_model
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.models.devices import training_precision
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Precision

TINY = 1e-4
CUTS = -4, -2, -1, 0, 0, 0, 0, 1, 2, 4, 8  # tokens behind the beginning of a loop: most cuts are right there


@dataclass
class Unlearning:
    """The settings of the training."""

    num_documents: int = 7500  # whose beginnings are prompts, but for those that are too long
    batch_size: int = 128  # of prompts that are answered at once
    samples_per_loop: int = 4
    pairs_per_step: int = 24
    pairs_per_pass: int = 12  # of a step, forward and backward at once
    num_unwanted: int = 8  # tokens of a loop that are made less likely
    steps: int = 150
    learning_rate: float = 7e-4
    kept_share: float = 0.6  # of the weights before, in the mean that is written
    seed: int = 9


@dataclass
class LoopPair:
    """A beginning of an answer, and two ways to go on, as token ids."""

    beginning: list[int]  # the prompt, and the answer up to near where its loop begins
    wanted: list[int]  # a sample without a loop
    unwanted: list[int]  # the first tokens of the loop


def prompts_of(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the prompts of documents that are short enough: functions that were begun, and first questions."""
    prompts = []
    for document in documents:
        if document.messages is None:
            begun = function_prompt(str(document.text))
            prompts.append([tokenizer.bos_token_id, *tokenizer(begun, add_special_tokens=False)["input_ids"]])
        else:
            asked = tokenizer.apply_chat_template(document.messages[:1], add_generation_prompt=True, tokenize=False)
            prompts.append(tokenizer(asked, add_special_tokens=False)["input_ids"])
    return [prompt for prompt in prompts if len(prompt) <= LONGEST_PROMPT]


@torch.no_grad()
def answers(model: Any, prompts: list[list[int]], sampled: bool) -> list[list[int]]:
    """Return the answers to prompts, up to the token that ends them: greedy, or sampled at temperature 1."""
    longest, pad = max(map(len, prompts)), model.config.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sampled else {"do_sample": False}
    texts = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, pad_token_id=pad, **settings)
    ends = set(model.generation_config.eos_token_id)
    found = []
    for answer in texts[:, longest:].tolist():
        end = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
        found.append(answer[:end])
    return found


def grams(answer: list[int]) -> list[tuple[int, ...]]:
    """Return the runs of `GRAM` tokens of an answer, by where they begin."""
    return [tuple(answer[start : start + GRAM]) for start in range(len(answer) - GRAM + 1)]


def loop_start(answer: list[int]) -> int:
    """Return where an answer that loops begins to repeat itself: the first copy of a run that comes back and back."""
    counts, seen = Counter(grams(answer)), set()
    for start, gram in enumerate(grams(answer)):
        if gram in seen:
            return start
        if counts[gram] >= REPEATED:
            seen.add(gram)
    raise ValueError("the answer holds no loop")


def nears_a_loop(answer: list[int]) -> bool:
    """Return whether an answer holds a run so often that once more would be a loop, or is one."""
    return max(Counter(grams(answer)).values(), default=0) >= REPEATED - 1


def loop_pairs(model: Any, prompts: list[list[int]], settings: Unlearning) -> list[LoopPair]:
    """Return pairs of those prompts whose greedy answers loop, the short ones first.

    A loop gives up to `samples_per_loop` pairs: as many as there are samples that do not end in a loop again.
    """
    chances = random.Random(settings.seed)
    prompts = sorted(prompts, key=len)
    pairs = []
    for first in range(0, len(prompts), settings.batch_size):
        batch = prompts[first : first + settings.batch_size]
        cut = [
            (prompt, answer, min(max(0, loop_start(answer) + chances.choice(CUTS)), len(answer) - 1))
            for prompt, answer in zip(batch, answers(model, batch, sampled=False), strict=True)
            if loops(answer)
            for _ in range(settings.samples_per_loop)
        ]
        if not cut:
            continue
        samples = answers(model, [prompt + answer[:place] for prompt, answer, place in cut], sampled=True)
        for (prompt, answer, place), sample in zip(cut, samples, strict=True):
            if not nears_a_loop(answer[:place] + sample):
                unwanted = answer[place : place + settings.num_unwanted]
                pairs.append(LoopPair(prompt + answer[:place], sample, unwanted))
    return pairs


def continuation_losses(model: Any, beginnings: list[list[int]], continuations: list[list[int]]) -> Tensor:
    """Return the cross-entropy of the tokens of all continuations, one after another, [N]."""
    texts = [first + last for first, last in zip(beginnings, continuations, strict=True)]
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    inside = torch.zeros_like(ids, dtype=torch.bool)
    for row, (text, beginning) in enumerate(zip(texts, beginnings, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        inside[row, len(beginning) : len(text)] = True
    with training_precision(ids.device, None):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    wanted = inside[:, 1:]
    return torch.nn.functional.cross_entropy(logits[wanted].float(), ids[:, 1:][wanted], reduction="none")


def unlikelihood(losses: Tensor) -> Tensor:
    """Return -log(1 - p) of tokens with these cross-entropies -log(p), of any shape."""
    return -torch.log((1 - losses.neg().exp()).clamp(min=TINY))


class UnlearningRun(TargetRun):
    """A training whose steps learn from pairs beside the text."""

    def __init__(
        self,
        text: Text,
        out: Path,
        shape: Shape,
        training: Training,
        pairs: list[LoopPair],
        settings: Unlearning,
    ) -> None:
        super().__init__(text, out, shape, training)
        self.pairs, self.settings = pairs, settings

    def take_step(self) -> float:
        """Take one step and return the loss on the text."""
        chances = random.Random(f"{self.settings.seed} {self.step}")
        drawn = chances.sample(self.pairs, min(len(self.pairs), self.settings.pairs_per_step))
        # Pairs of about the same length need little padding.
        drawn.sort(key=lambda pair: len(pair.beginning) + len(pair.wanted))
        num_wanted = sum(len(pair.wanted) for pair in drawn)
        num_unwanted = sum(len(pair.unwanted) for pair in drawn)
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled for
            for first in range(0, len(drawn), self.settings.pairs_per_pass):
                part = drawn[first : first + self.settings.pairs_per_pass]
                beginnings = [pair.beginning for pair in part]
                wanted = continuation_losses(self.model, beginnings, [pair.wanted for pair in part])
                (wanted.sum() / num_wanted).backward()
                unwanted = continuation_losses(self.model, beginnings, [pair.unwanted for pair in part])
                (unlikelihood(unwanted).sum() / num_unwanted).backward()
        return super().take_step()


def write_mean(run: UnlearningRun, before: list[Tensor], starts: list[str]) -> None:
    """Write the mean of the weights before the training and after it, its tokenizer and its card."""
    with torch.no_grad():
        for after, old in zip(run.model.parameters(), before, strict=True):
            after.lerp_(old, run.settings.kept_share)
    run.model.eval()
    with torch.compiler.set_stance("force_eager"):
        held_out = function_loss(run.model, run.text.tokenizer, run.text.held_out)
    print(f"held-out loss {held_out.per_token:.3f}")
    run.save_model()  # not the state, so that the command given again finds the weights after the training
    done = ", ".join(f"{name} {value}" for name, value in asdict(run.settings).items())
    line = f"* Then unlearnt loops by `tools/unlearn_loops.py`: {done}.\n"
    card = (Path(starts[0]) / "README.md").read_text().replace("\n| setting", f"{line}\n| setting", 1)
    (run.out / "model/README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=Unlearning.num_documents)
    parser.add_argument("--steps", type=int, default=Unlearning.steps)
    parser.add_argument("--kept-share", type=float, default=Unlearning.kept_share)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=get_args(Precision), help="of the steps on text")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(Unlearning.seed)
    settings = Unlearning(num_documents=args.documents, steps=args.steps, kept_share=args.kept_share)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model[0])
    text = Text(list(read_documents(args.text)), stdlib_functions(held_out=True), tokenizer)
    prompts = prompts_of(random.Random(settings.seed).sample(text.documents, settings.num_documents), tokenizer)
    pairs = loop_pairs(mean_model(args.model).bfloat16().eval(), prompts, settings)
    print(f"{len(pairs)} pairs of {len(prompts)} prompts", flush=True)
    if not pairs:
        raise UserError("no answer loops, or none has a sample without a loop: give more --documents")
    training = Training(steps=settings.steps, precision=args.precision, start=args.model, seed=settings.seed)
    training.optimizer.decay_share, training.optimizer.learning_rate = 1.0, settings.learning_rate
    run = UnlearningRun(text, args.out, Shape(), training, pairs, settings)
    before = list(mean_model(args.model).parameters())
    run.train()
    write_mean(run, before, args.model)


if __name__ == "__main__":
    main()
