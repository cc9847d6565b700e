"""One batch being decoded: read the prompts, then rounds of draft -> verify -> commit until every row is done.

Shapes: B rows, P longest prompt, M slots a row, N drafted tokens, V vocabulary.
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
from draftsmith.models.sampling import Noise, Sampling, Stream, probabilities, sample
from draftsmith.models.slots import SlotCache
from draftsmith.models.target import Features, Target


@dataclass(frozen=True)
class GenerationSettings:
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    draft_length: int = 4
    verification_mode: verify.VerificationMode = "greedy"
    seed: int = 0
    stop_at_eos: bool = True


@dataclass
class Round:
    """What one round added to each row, on the device."""

    window: Tensor  # [B, N + 1] accepted drafts, then the target's token, then anything
    num_accepted: Tensor  # [B]
    num_emitted: Tensor  # [B] tokens of the window that were kept; 0 for rows that were done before


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
        num_slots = longest + settings.max_new_tokens + settings.draft_length + 1  # a full round may pass the limit
        rows = torch.zeros(len(prompts), num_slots, dtype=torch.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self.token_ids = rows.to(target.device)
        self.longest_prompt = longest
        self.cache = SlotCache(num_slots)
        self.noise = Noise(settings.seed, torch.tensor(request_ids, device=target.device))
        self.eos = torch.tensor(target.eos_token_ids if settings.stop_at_eos else [], device=target.device)
        self.counters = RoundCounters(settings.draft_length)
        self.clock = PhaseClock(target.device)
        self.finished = torch.zeros(len(prompts), dtype=torch.bool, device=target.device)
        self.state: DecodingState

    @torch.no_grad()
    def prefill(self) -> None:
        """Read the prompts and add each row's first token."""
        prompt_ids = self.token_ids[:, : self.longest_prompt]
        positions = torch.arange(self.longest_prompt, device=prompt_ids.device).expand_as(prompt_ids)
        features = self.target.run(prompt_ids, positions, self.cache, self.drafter.layer_ids)
        newest = (self.prompt_lengths - 1)[:, None, None].expand(-1, 1, features.last_hidden.shape[-1])
        logits = self.target.logits(features.last_hidden.gather(1, newest))  # [B, 1, V]
        first = self._draw(logits, self.prompt_lengths[:, None])
        self.token_ids.scatter_(1, self.prompt_lengths[:, None], first)
        self.finished = torch.isin(first[:, 0], self.eos) | (self.settings.max_new_tokens == 1)
        self.state = DecodingState(
            token_ids=self.token_ids,
            lengths=self.prompt_lengths + 1,
            features=features,
            positions=positions,
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
        draft = self.drafter.propose(state, self.settings.draft_length)
        self.clock.mark("draft")
        tokens = torch.cat([state.newest()[:, None], draft.tokens.clamp(min=0)], 1)  # [B, N + 1]
        slots = state.lengths[:, None] - 1 + torch.arange(tokens.shape[1], device=tokens.device)
        features = self.target.run(tokens, slots, self.cache, self.drafter.layer_ids)
        verified = self._verify(self.target.logits(features.last_hidden), draft, slots + 1)
        self.clock.mark("verify")
        return self._commit(draft, verified, features, slots)

    def _draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's own tokens [B, T] for `positions` [B, T] from logits [B, T, V]."""
        if self.settings.sampling.greedy:
            return logits.argmax(-1)
        uniforms = self.noise.uniforms(positions, Stream.TARGET)
        return sample(probabilities(logits, self.settings.sampling), uniforms)

    def _verify(self, logits: Tensor, draft: Draft, positions: Tensor) -> Verified:
        """logits [B, N + 1, V] of the tokens at `positions` [B, N + 1]"""
        if self.settings.verification_mode == "greedy":
            return verify.greedy(logits, draft.tokens)
        p = probabilities(logits, self.settings.sampling)
        target_uniforms = self.noise.uniforms(positions, Stream.TARGET)
        if draft.probabilities is None:
            return verify.one_hot(p, draft.tokens, target_uniforms)
        accept_uniforms = self.noise.uniforms(positions[:, :-1], Stream.ACCEPT)
        return verify.probabilistic(p, draft.probabilities, draft.tokens, accept_uniforms, target_uniforms)

    def _commit(self, draft: Draft, verified: Verified, features: Features, slots: Tensor) -> Round:
        state, active = self.state, ~self.finished
        num_accepted = verified.num_accepted
        window = torch.cat([draft.tokens, verified.next_token[:, None]], 1)
        window.scatter_(1, num_accepted[:, None], verified.next_token[:, None])
        self.token_ids.scatter_(1, slots + 1, window)  # what lies past the new length is written over later

        columns = torch.arange(window.shape[1], device=window.device)
        ends_text = torch.isin(window, self.eos) & (columns <= num_accepted[:, None])
        until_end = torch.where(ends_text, columns + 1, window.shape[1] + 1).amin(1)  # [B] tokens up to an EOS
        num_emitted = torch.minimum(num_accepted + 1, until_end)
        num_emitted = torch.minimum(num_emitted, self.limits - state.lengths) * active
        self.counters.add((draft.tokens != NO_TOKEN).sum(1), torch.minimum(num_accepted, until_end), active)

        state.lengths = state.lengths + num_emitted
        state.features, state.positions, state.num_new = features, slots, num_accepted + 1
        self.finished = self.finished | ends_text.any(1) | (state.lengths >= self.limits)
        return Round(window, num_accepted, num_emitted)

    def outputs(self) -> tuple[list[list[int]], list[Stats]]:
        """New token ids of each row, and its counters."""
        rows, starts, ends = (x.tolist() for x in (self.token_ids, self.prompt_lengths, self.state.lengths))
        new = [row[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
        return new, self.counters.per_request([len(ids) for ids in new])

    def phase_milliseconds(self) -> dict[str, Any]:
        return self.clock.milliseconds()
