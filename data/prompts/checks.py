"""Checks that stop a run, or warn, before it spends hours on text that the target would never meet.

Each is a function that is called at one place; docs/data.md lists them. A `check_...` raises `UserError`, a
`notice_...` tells the user and goes on.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.text import Text

from draftsmith.data.progress import notice, notice_once, warn
from draftsmith.data.prompts.prompt_formats import Prompt, text_of
from draftsmith.data.samples.folder import has_checksum, read_prepared
from draftsmith.data.samples.sample import Sample
from draftsmith.data.samples.samples import Samples
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.errors import UserError
from draftsmith.models.slots.forward import causal_rows
from draftsmith.models.target.chat_template import has_template
from draftsmith.models.target.identity import check_identity
from draftsmith.models.target.target import Target

CAPTURE_TOKENS = 64  # tokens of a text that captured hidden states are compared on
SHOWN_PROMPT, SHOWN_ANSWER = 300, 500  # characters of a sample on the console


# --- prompts


def check_not_rendered(prompt: Prompt, target: Target) -> None:
    """Refuse messages that have been through a chat template already; a second pass nests one chat in another.

    Answers are passed over: they may well begin with a token for thinking.
    """
    special = _special_tokens(target.tokenizer)
    for number, message in enumerate(prompt.messages or [], 1):
        content = text_of(message).lstrip()
        if message["role"] != "assistant" and special and content.startswith(special):
            raise UserError(
                f"{prompt.where or 'the prompt'}: message {number} begins with {content[:20]!r}, a token of chat "
                'templates: it has been rendered before; give the bare text, or the whole as a "prompt"'
            )


@lru_cache(1)  # a tokenizer makes its table of added tokens anew each time
def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def check_bos(token_ids: list[int], target: Target, where: str) -> None:
    """Refuse two beginnings of text in a row: one stood in the text or template, one came from the tokenizer."""
    bos = target.tokenizer.bos_token_id if target.tokenizer else None
    if bos is not None and token_ids[:2] == [bos, bos]:
        raise UserError(
            f"{where} begins with the beginning-of-text token twice: take it out of the text, the tokenizer puts "
            "it there"
        )


def check_token_ids(token_ids: list[int], target: Target, where: str) -> None:
    """Refuse ids that the target has no embedding for."""
    largest = max(token_ids, default=0)
    if largest >= target.vocab_size:
        raise UserError(
            f"{where} holds token id {largest}, and the vocabulary of {target.name} ends at {target.vocab_size - 1}: "
            "use the tokenizer that the target was trained with"
        )


def num_known_tokens(target: Target) -> int:
    """Return one more than the largest id of the tokenizer; rows of the vocabulary from there on have no text."""
    if target.tokenizer is None:
        return target.vocab_size
    return max(target.tokenizer.get_vocab().values()) + 1


def notice_raw_texts(prompts: list[Prompt], target: Target) -> None:
    """Say so where a target that chats is given bare texts, which it was hardly trained to continue."""
    num_texts = sum(prompt.text is not None for prompt in prompts)
    if num_texts and has_template(target.tokenizer):
        notice_once(
            f"{num_texts} of {len(prompts)} prompts are bare texts and are used as they are, without the chat template "
            f'of {target.name}: give "messages" if it will be chatted with'
        )


# --- samples


def check_prepared(folder: Path, target: Target) -> None:
    """Refuse samples that were written with another tokenizer or chat template than the target's."""
    mend = "prepare them again, or give the target as it was then"
    keys = ("tokenizer_fingerprint", "template_hash")
    check_identity(f"what {folder} holds", read_prepared(folder), target, keys, mend)


def check_samples(samples: Samples, target: Target, max_length: int, where: str) -> None:
    """Refuse samples with tokens that the target does not know, a doubled beginning of text, or a wrong loss mask.

    Text that the target read or wrote is never longer than its context; given text may be, and is cut.
    """
    bos = target.tokenizer.bos_token_id if target.tokenizer else None
    has_wrong_ids = samples.largest >= target.vocab_size
    is_too_long = (samples.lengths > target.context) & (samples.column("finish_reason") != "given")
    begins_twice = (samples.at(0) == bos) & (samples.at(1) == bos) & (samples.lengths > 1)
    for index in np.flatnonzero(has_wrong_ids | is_too_long | begins_twice).tolist():  # the first of them ends it
        name = f"the sample of prompt {samples.prompts[index] + 1} in {where} (sample {index + 1})"
        token_ids = samples.token_ids(index).tolist()
        check_token_ids(token_ids, target, name)
        check_bos(token_ids, target, name)
        raise UserError(
            f"{name} has {len(token_ids)} tokens, and {target.name} reads {target.context}: it did not write that; "
            "prepare it again"
        )
    check_mask(samples, max_length, where)


def check_mask(samples: Samples, max_length: int, where: str) -> None:
    """Refuse samples of which no token is trained on after the cut at `max_length`, or every one."""
    num_trained = samples.num_generated(0, max_length).sum()
    if not num_trained and samples.num_generated().any():
        raise UserError(f"all answers in {where} begin beyond data.max_length={max_length}: raise it")
    if not num_trained:
        raise UserError(f"no token in {where} is trained on, its samples hold no answers: prepare them again")
    if num_trained == samples.lengths.clip(max=max_length).sum():
        raise UserError(f"every token in {where} is trained on, the prompts too: its spans are wrong, prepare it again")


def notice_seen_prompts(evaluated: list[list[int]], samples: Samples) -> None:
    """Say so where prompts of an evaluation are among those trained on: what is measured there is not held out."""
    answered = np.flatnonzero(samples.num_spans)
    prompt_lengths = samples.span_starts[samples.first_spans[answered]]
    alike = np.isin(prompt_lengths, [len(token_ids) for token_ids in evaluated])
    pairs = zip(answered[alike].tolist(), prompt_lengths[alike].tolist(), strict=True)
    texts = [np.array(token_ids, np.int32).tobytes() for token_ids in evaluated]
    asked = set(texts)
    seen = {text for index, length in pairs if (text := samples.token_ids(index)[:length].tobytes()) in asked}
    count = sum(text in seen for text in texts)
    if count:
        warn(
            f"{count} of {len(evaluated)} prompts of the evaluation are also trained on, which flatters the drafter: "
            "hold prompts out with `draftsmith prepare --held-out-share`"
        )


def notice_padding(samples: Samples, target: Target) -> None:
    """Say so where the target's vocabulary goes on beyond its tokenizer, and how many samples hold such tokens."""
    known = num_known_tokens(target)
    if known < target.vocab_size:
        notice(
            f"the vocabulary of {target.name} has {target.vocab_size} rows and its tokenizer {known} tokens: the rows "
            f"beyond are padding without text, which the target wrote in {num_with_padding(samples, target)} samples"
        )


def notice_images(samples: Samples) -> None:
    """Say so where samples hold images: engines differ in what a drafter gets to read there."""
    if number := int(samples.has_images.sum()):
        notice(
            f"{number} of {len(samples)} samples hold images. The drafter learns with the embedding of their "
            "placeholder tokens and with positions that count tokens, as vLLM's V2 model runner serves EAGLE drafters. "
            "vLLM's V1 runner counts M-RoPE's first axis instead; its MTP heads, and the drafters of SGLang, read the "
            "image's own embeddings. There, expect fewer accepted tokens behind images"
        )


def num_with_padding(samples: Samples, target: Target) -> int:
    """Return the number of samples with a token that the target's tokenizer does not know. The target sampled it."""
    return int((samples.largest >= num_known_tokens(target)).sum())


def notice_without_checksum(folder: Path) -> None:
    """Say so where samples have no checksum: that they were changed would show in no other way."""
    if not has_checksum(folder):
        notice(f"the samples in {folder} have no checksum: an older draftsmith wrote them, or it was removed")


def shown_sample(sample: Sample, target: Target) -> Text:
    """Return a sample as text; what is trained on is green and between ⟦ ⟧; long stretches are cut in their middle."""
    assert target.tokenizer is not None
    token_ids = sample.token_ids
    text = Text()
    position = 0
    for start, end in [*((span.start, span.end) for span in sample.spans), (len(token_ids), len(token_ids))]:
        for ids, trained in ((token_ids[position:start], False), (token_ids[start:end], True)):
            if ids:
                piece = _shortened(str(target.tokenizer.decode(ids)), SHOWN_ANSWER if trained else SHOWN_PROMPT)
                text.append(f"⟦{piece}⟧" if trained else piece, style="green" if trained else "dim")
        position = end
    num_trained = len(sample.generated())
    return Text(f"a sample; {num_trained} of its {len(token_ids)} tokens are trained on, in ⟦green⟧:\n").append(text)


def _shortened(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


# --- features


@torch.no_grad()
def check_capture(target: Target, layer_ids: tuple[int, ...], token_ids: list[int]) -> None:
    """Refuse a target whose captured features are not what a plain forward of transformers calls `hidden_states[N]`.

    Layers, the last hidden state, and the head's logits from it are compared on the first of the tokens.
    """
    row = torch.tensor([token_ids[:CAPTURE_TOKENS]], device=target.device)
    features = target.features(Batch(row, torch.ones_like(row, dtype=torch.bool)), layer_ids)
    mask = causal_rows(target.model, row)
    plain = target.model(input_ids=row, attention_mask=mask, output_hidden_states=True, use_cache=False)
    pairs = {"the last hidden state": (features.last_hidden, plain.hidden_states[-1])}
    if features.layers is not None:
        captured = features.layers.split(target.hidden_size, dim=-1)
        for layer_id, hidden in zip(sorted(layer_ids), captured, strict=True):
            if layer_id == target.num_layers:  # of the last layer's, transformers gives what the final norm makes of it
                hidden = target.final_norm(hidden)
            pairs[f"layer {layer_id}"] = (hidden, plain.hidden_states[layer_id])
    pairs["the head's logits"] = (target.logits(features.last_hidden), plain.logits)
    tolerance = 1e-3 if target.dtype == torch.float32 else 0.1
    for name, (own, expected) in pairs.items():
        error = (own.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6)
        if not error < tolerance:  # also where one of them is not a number
            raise UserError(
                f"{name} of {target.name} is not what a plain forward gives (relative error {float(error):.1e}): "
                f"draftsmith cannot read {type(target.model).__name__}; report this, or use another target"
            )


def notice_other_target(drafter: Drafter, target: Target) -> None:
    """Say so where a drafter was trained for other weights: it is measured right, and drafts worse than it could."""
    trained_for = (drafter.trained_for or {}).get("target_fingerprint")
    if trained_for not in (None, target.fingerprint()):
        warn(
            f"this {drafter.kind} drafter was trained for a target with other weights, config or dtype "
            f"({trained_for}) than {target.name} ({target.fingerprint()})"
        )
