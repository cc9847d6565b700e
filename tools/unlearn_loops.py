"""Teach the embedded target to repeat itself less: unlikelihood training on its own greedy answers.

    python tools/unlearn_loops.py --model DIR/model --text TEXT.jsonl --out DIR2 [--steps 60] [--threads 2]

Given several models, it begins with the mean of their weights, and takes the card of the first.

Each step has two parts (Welleck et al., "Neural Text Generation with Unlikelihood Training", arXiv 1908.04319, section
5.2). The model answers some prompts greedily; the tokens of runs of four that stand earlier in the same answer are made
less likely, by -log(1 - p). And it goes on learning the standard library's text, so that it forgets nothing. The
prompts are beginnings of all training text, most of which the model has read once at most and does not know by heart.

The training alone takes nearly all loops and costs much held-out loss. The mean of the weights before and after it
takes most of them for a twentieth of that (Wortsman et al., "Robust fine-tuning of zero-shot models", arXiv
2109.01903).
"""

import argparse
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_target_quality import GRAM, LONGEST_PROMPT, NEW_TOKENS, function_loss
from tiny_target_text import STANDARD_LIBRARY, Document, read_documents
from torch import Tensor
from train_tiny_target import Shape, StepRows, Training, loss_of, mean_model, tokenize
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.models.devices import training_precision

TINY = 1e-6
PROMPTS = 10_000  # documents whose beginnings are prompts


@dataclass
class Unlearning:
    """The settings of the training."""

    steps: int = 60
    answers: int = 48  # a step
    weight: float = 1.0  # of the unlikelihood beside the loss on text
    learning_rate: float = 3e-4
    kept_share: float = 0.5  # of the weights before, in the mean that is written
    report_every: int = 10


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
def greedy_texts(model: Any, prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return prompts with greedy answers, [B, T], and where the answers are, bool [B, T]; padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.eval()
    texts = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=pad)
    is_answer = torch.zeros_like(texts, dtype=torch.bool)
    ends = set(model.generation_config.eos_token_id)
    for row, text in enumerate(texts.tolist()):
        end = next((place for place in range(longest, len(text)) if text[place] in ends), len(text))
        is_answer[row, longest:end] = True
    return texts, is_answer


def repeated(texts: Tensor, is_answer: Tensor) -> Tensor:
    """Return which tokens [B, T] of answers belong to a run of `GRAM` that stands earlier in the same answer."""
    found = torch.zeros_like(is_answer)
    for row, (text, inside) in enumerate(zip(texts.tolist(), is_answer.tolist(), strict=True)):
        places = [place for place, own in enumerate(inside) if own]
        seen: set[tuple[int, ...]] = set()
        for start in places[: len(places) - GRAM + 1]:
            gram = tuple(text[start : start + GRAM])
            if gram in seen:
                found[row, start : start + GRAM] = True
            seen.add(gram)
    return found


def unlikelihood(model: PreTrainedModel, texts: Tensor, prompt_mask: Tensor, unwanted: Tensor) -> Tensor:
    """Return the mean of -log(1 - p) over unwanted tokens [B, T]; 0 where there are none."""
    with training_precision(texts.device, None):
        positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
        logits = model(texts, attention_mask=prompt_mask, position_ids=positions, use_cache=False).logits
    chances = logits[:, :-1].float().softmax(-1).gather(2, texts[:, 1:, None])[..., 0]
    losses = -torch.log((1 - chances).clamp(min=TINY))
    wanted = unwanted[:, 1:]
    return (losses * wanted).sum() / wanted.sum().clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Unlearning.steps)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = Unlearning(steps=args.steps)
    tokenizer = AutoTokenizer.from_pretrained(args.model[0])
    model: Any = mean_model(args.model)
    model.set_attn_implementation("eager")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    chances, start = random.Random(0), time.monotonic()
    documents = list(read_documents(args.text))
    prompts = prompts_of(chances.sample(documents, PROMPTS), tokenizer)
    library = [document for document in documents if document.source == STANDARD_LIBRARY]
    rows = StepRows(tokenize(library, tokenizer), Shape(), Training())
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / 10, (settings.steps - step) / 20)
        drawn = chances.sample(prompts, settings.answers)
        texts, is_answer = greedy_texts(model, drawn, tokenizer.pad_token_id)
        unwanted = repeated(texts, is_answer)
        length = texts.shape[1]
        longest = max(map(len, drawn))
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * (length - longest + len(p)) for p in drawn])
        model.train()
        penalty = unlikelihood(model, texts, mask, unwanted)
        (settings.weight * penalty).backward()
        text_rows = rows.of_step(step)
        loss = 0.0
        for part in text_rows.split(8):
            share = loss_of(model, part) * (len(part) / len(text_rows))
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % settings.report_every == 0:
            share_repeated = unwanted.sum().item() / max(1, is_answer.sum().item())
            print(
                f"step {step + 1}, {time.monotonic() - start:.0f} s: loss {loss:.3f}, unlikelihood {penalty:.3f}, "
                f"{share_repeated:.1%} of the tokens of answers are repeated",
                flush=True,
            )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.lerp_(before[name], settings.kept_share)
    model.eval()
    print(f"held-out loss {function_loss(model, tokenizer, stdlib_functions(held_out=True)).per_token:.3f}")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(args.out, state_dict=weights)
    tokenizer.save_pretrained(args.out)
    done = ", ".join(f"{name} {value}" for name, value in asdict(settings).items())
    line = f"* Then unlearnt loops by `tools/unlearn_loops.py`: {done}.\n"
    card = (Path(args.model[0]) / "README.md").read_text().replace("\n| setting", f"{line}\n| setting", 1)
    (args.out / "README.md").write_text(card)


if __name__ == "__main__":
    main()
