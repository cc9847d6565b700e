"""One batch being decoded: read the prompts, then rounds of draft -> verify -> commit until every row is done.

Shapes: B rows, P longest prompt, M slots a row, N drafted tokens, D nodes on the longest path of a draft, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import verify
from draftsmith.inference.clock import PhaseClock
from draftsmith.inference.stats import RoundCounters, Stats
from draftsmith.inference.verify import Verified
from draftsmith.models.base import NO_TOKEN, DecodingState, Draft, Drafter
from draftsmith.models.sampling import Noise, Sampling, Stream, cut, sample
from draftsmith.models.slots import SlotCache, Window, chain_window
from draftsmith.models.target import Features, Target
from draftsmith.models.trees import Chain, Shape, ancestor_words, node_depths


@dataclass(frozen=True)
class GenerationSettings:
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    shape: Shape = Chain(4)
    verification_mode: verify.VerificationMode = "greedy"
    seed: int = 0
    stop_at_eos: bool = True


@dataclass
class Round:
    """What one round added to each row, on the device."""

    tokens: Tensor  # [B, D + 1] accepted drafts, then the target's token, then anything
    num_accepted: Tensor  # [B]
    num_emitted: Tensor  # [B] of these tokens, how many were kept; 0 for rows that were done before


class Generation:
    """Decodes one batch of prompts. Call `prefill` once, then `round` while `running`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: list[list[int]],
        settings: GenerationSettings,
        request_ids: list[int],
    ) -> None:
        self.target, self.drafter, self.settings = target, drafter, settings
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
        self.limits = self.prompt_lengths + settings.max_new_tokens  # [B] length at which a row is cut
        longest = max(map(len, prompts))
        num_slots = longest + settings.max_new_tokens + settings.shape.num_nodes + 1  # a full round may pass the limit
        rows = torch.zeros(len(prompts), num_slots, dtype=torch.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self.token_ids = rows.to(target.device)
        self.longest_prompt = longest
        self.cache = SlotCache(num_slots)
        self.noise = Noise(settings.seed, torch.tensor(request_ids, device=target.device))
        self.eos = torch.tensor(target.eos_token_ids if settings.stop_at_eos else [], device=target.device)
        self.counters = RoundCounters(settings.shape.depth)
        self.clock = PhaseClock(target.device)
        self.finished = torch.zeros(len(prompts), dtype=torch.bool, device=target.device)
        self.state: DecodingState

    @torch.no_grad()
    def prefill(self) -> None:
        """Read the prompts and add each row's first token."""
        prompt_ids = self.token_ids[:, : self.longest_prompt]
        window = chain_window(torch.zeros_like(self.prompt_lengths), self.longest_prompt)
        features = self.target.run(prompt_ids, window, self.cache, self.drafter.layer_ids)
        newest = (self.prompt_lengths - 1)[:, None, None].expand(-1, 1, features.last_hidden.shape[-1])
        logits = self.target.logits(features.last_hidden.gather(1, newest))  # [B, 1, V]
        first = self._draw(logits, self.prompt_lengths[:, None])
        self.token_ids.scatter_(1, self.prompt_lengths[:, None], first)
        self.finished = torch.isin(first[:, 0], self.eos) | (self.settings.max_new_tokens == 1)
        self.state = DecodingState(
            token_ids=self.token_ids,
            lengths=self.prompt_lengths + 1,
            features=features,
            positions=window.positions,
            num_new=self.prompt_lengths,
            sampling=self.settings.sampling,
            noise=self.noise,
            sample_drafts=self.settings.verification_mode == "probabilistic",
        )

    def running(self) -> bool:
        return not bool(self.finished.all())

    @torch.no_grad()
    def round(self) -> Round:
        """Draft, read the draft with the target, accept, commit."""
        state = self.state
        self.clock.mark(None)
        draft = self.drafter.propose(state, self.settings.shape)
        self.clock.mark("draft")
        tokens = torch.cat([state.newest()[:, None], draft.tokens.clamp(min=0)], 1)  # [B, N + 1]
        features = self.target.run(tokens, draft_window(state.lengths - 1, draft), self.cache, self.drafter.layer_ids)
        verified = self._verify(self.target.logits(features.last_hidden), draft)
        self.clock.mark("verify")
        return self._commit(draft, verified, features)

    def _draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's own tokens [B, T] for `positions` [B, T] from logits [B, T, V]."""
        if self.settings.sampling.greedy:
            return logits.argmax(-1)
        uniforms = self.noise.uniforms(positions, Stream.TARGET)
        return sample(cut(logits, self.settings.sampling).softmax(-1), uniforms)

    def _verify(self, logits: Tensor, draft: Draft) -> Verified:
        """logits [B, N + 1, V] of what follows each column of the window"""
        shape = draft.tokens, draft.parents, draft.depth
        if self.settings.verification_mode == "greedy":
            return verify.greedy(logits, *shape)
        logits = cut(logits, self.settings.sampling)
        positions = self.state.lengths[:, None] + torch.arange(draft.depth + 1, device=logits.device)
        target_uniforms = self.noise.uniforms(positions, Stream.TARGET)
        if draft.logits is None:
            return verify.one_hot(logits, *shape, target_uniforms)
        accept_uniforms = self.noise.uniforms(positions[:, :-1], Stream.ACCEPT)
        return verify.probabilistic(logits, draft.logits, draft.tokens, accept_uniforms, target_uniforms)

    def _commit(self, draft: Draft, verified: Verified, features: Features) -> Round:
        state, active = self.state, ~self.finished
        num_accepted, tokens = verified.num_accepted, draft.tokens
        prefix = state.lengths - 1
        if not draft.is_chain:
            self.cache.keep_path(prefix, verified.path)
            features = features.gather(verified.path)
            tokens = tokens.gather(1, (verified.path - 1).clamp(min=0))
        tokens = torch.cat([tokens, verified.next_token[:, None]], 1)  # [B, D + 1]
        tokens.scatter_(1, num_accepted[:, None], verified.next_token[:, None])
        positions = prefix[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.token_ids.scatter_(1, positions + 1, tokens)  # what lies past the new length is written over later

        columns = torch.arange(tokens.shape[1], device=tokens.device)
        ends_text = torch.isin(tokens, self.eos) & (columns <= num_accepted[:, None])
        until_end = torch.where(ends_text, columns + 1, tokens.shape[1] + 1).amin(1)  # [B] tokens up to an EOS
        num_emitted = torch.minimum(num_accepted + 1, until_end)
        num_emitted = torch.minimum(num_emitted, self.limits - state.lengths) * active
        self.counters.add((draft.tokens != NO_TOKEN).sum(1), torch.minimum(num_accepted, until_end), active)

        state.lengths = state.lengths + num_emitted
        state.features, state.positions, state.num_new = features, positions, num_accepted + 1
        self.finished = self.finished | ends_text.any(1) | (state.lengths >= self.limits)
        return Round(tokens, num_accepted, num_emitted)

    def outputs(self) -> tuple[list[list[int]], list[Stats]]:
        """New token ids of each row, and its counters."""
        rows, starts, ends = (x.tolist() for x in (self.token_ids, self.prompt_lengths, self.state.lengths))
        new = [row[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        return new, self.counters.per_request([len(ids) for ids in new])

    def phase_milliseconds(self) -> dict[str, Any]:
        return self.clock.milliseconds()


def draft_window(prefix: Tensor, draft: Draft) -> Window:
    """The newest committed token of each row, at slot `prefix` [B], and the nodes of its draft."""
    window = chain_window(prefix, draft.tokens.shape[1] + 1)
    if draft.is_chain:
        return window
    positions = prefix[:, None] + node_depths(draft.parents, draft.depth)
    return Window(window.slots, positions, prefix, ancestor_words(draft.parents, draft.depth))
