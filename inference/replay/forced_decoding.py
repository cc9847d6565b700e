"""Forced decoding: the output follows a known text, one token a round, whatever is drafted.

Every round runs the decoder's own kernels on its own state, at a known length of the text. Timing needs that
(planning/cost_measurement.py), and it shows which drafts would have been right (planning/best_draft.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models import Drafter, Target
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.cache import SlotCache


class ForcedBatchEngine(BatchEngine):
    """An engine with one row for each text. A round verifies greedily, accepts nothing, and emits the text's token.

    The target verifies the text's next tokens in place of what was drafted. So its work, such as which experts it
    reads, depends on the text and not on how good a drafter is. What was drafted is kept in `drafted`, [B, N].
    """

    drafted: Tensor

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        shape: Shape,
        texts: list[list[int]],
        num_rounds: int,
        cache: SlotCache | None = None,
    ) -> None:
        """`cache`: one with room for this draft, which other engines that follow the same texts use, too."""
        longest = max(map(len, texts))
        settings = GenerationSettings(max_new_tokens=num_rounds + 1, shape=shape, stop_at_eos=False)
        num_slots = cache.num_slots if cache else longest + shape.num_nodes + 2
        super().__init__(target, drafter, settings, len(texts), num_slots)
        self.cache = cache or self.cache
        padded = torch.zeros(len(texts), num_slots, dtype=torch.int64)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        self.texts = padded.to(target.device)

    @torch.inference_mode()  # in which drafters may have made their tokens
    def draft(self, draft_length: int | None = None) -> Draft:
        state = self.state
        state.token_ids.copy_(self.texts)
        state.next_ids[:, :1] = self.texts.gather(1, state.lengths[:, None] - 1)  # no draft is ever accepted
        draft = super().draft(draft_length)
        tokens = draft.tokens
        self.drafted = tokens.clone()
        next_places = state.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        tokens.copy_(self.texts.gather(1, next_places.clamp(max=self.num_slots - 1)))
        return draft

    def _accept(self, state: DecodingState, logits: Tensor, draft: Draft) -> Verified:
        verified = super()._accept(state, logits, draft)
        return verified._replace(num_accepted=torch.zeros_like(verified.num_accepted))


def start_forced(engine: ForcedBatchEngine, prompts: list[list[int]]) -> Generation:
    """Begin to follow the engine's texts behind their prompts; the caller steps, at most `num_rounds` times."""
    generation = Generation(engine, prompts)
    generation.step()
    return generation


@dataclass
class ForcedBatch:
    """Prompts and answers that are being followed; the longest answer takes `num_rounds` rounds."""

    texts: Sequence[tuple[list[int], list[int]]]
    engine: ForcedBatchEngine
    generation: Generation
    num_rounds: int


def force_answers(
    target: Target, drafter: Drafter, shape: Shape, texts: Sequence[tuple[list[int], list[int]]], batch_size: int = 8
) -> Iterator[ForcedBatch]:
    """Begin to follow answers behind their prompts, a batch at a time. A batch of one-token answers is left out."""
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        num_rounds = max(len(answer) for _, answer in batch) - 1
        if num_rounds < 1:
            continue
        # rows whose answers have ended follow anything until the last one ends
        whole = [prompt + answer + [0] * (num_rounds + 1 - len(answer)) for prompt, answer in batch]
        engine = ForcedBatchEngine(target, drafter, shape, whole, num_rounds)
        yield ForcedBatch(batch, engine, start_forced(engine, [prompt for prompt, _ in batch]), num_rounds)
