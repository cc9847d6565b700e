"""The device's side of decoding: a fixed number of rows, each with one request's text, cache and state.

`admit` reads prompts into free rows; `draft` and `verify` make a round: draft -> one pass of the target -> accept ->
commit. Nothing in a round depends on values that the host would have to wait for: shapes are fixed, ends of texts and
length limits are decided here, and what happened leaves as one small tensor, a record.

Shapes: B rows, M slots a row, N drafted tokens, D nodes on the longest path of a draft, H hidden width, V vocabulary.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from draftsmith.inference import verify
from draftsmith.inference.graphs import Replay
from draftsmith.inference.verify import Verified
from draftsmith.models.base import NO_TOKEN, DecodingState, Draft, Drafter
from draftsmith.models.sampling import Noise, Sampling, Stream, cut, sample
from draftsmith.models.slots import SlotCache, Window, chain_window
from draftsmith.models.target import Features, Target
from draftsmith.models.trees import Chain, Shape, ancestor_words, node_depths

PREFILL_CHUNK = 512  # prompt tokens a row that the target reads at once


@dataclass(frozen=True)
class GenerationSettings:
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    shape: Shape = Chain(4)
    verification_mode: verify.VerificationMode = "greedy"
    seed: int = 0
    stop_at_eos: bool = True
    synthetic_rates: tuple[float, ...] = ()  # chance of each depth to be accepted, for verification mode synthetic


RECORD_HEAD = 4  # emitted, drafted, accepted, finished: then the tokens


class Rows:
    """Rows are free until a request is admitted to them, and again when its record says that it is finished."""

    def __init__(
        self, target: Target, drafter: Drafter, settings: GenerationSettings, num_rows: int, num_slots: int
    ) -> None:
        """`num_slots` holds prompt, answer and a whole draft beyond it."""
        self.target, self.drafter, self.settings = target, drafter, settings
        self.num_rows, self.num_slots = num_rows, num_slots
        self.rules = rules_on(target.device)
        device, depth = target.device, settings.shape.depth
        self.cache = SlotCache(num_rows, num_slots)
        self.eos = torch.tensor(target.eos_token_ids if settings.stop_at_eos else [], device=device)
        self.limits = torch.full((num_rows,), 2, device=device)  # length at which a row is cut
        self.finished = torch.ones(num_rows, dtype=torch.bool, device=device)
        width, num_layers = target.hidden_size, len(drafter.layer_ids)
        layers = torch.zeros(num_rows, depth + 1, num_layers * width, dtype=target.dtype, device=device)
        hidden = torch.zeros(num_rows, depth + 1, width, dtype=target.dtype, device=device)
        self.state = DecodingState(
            token_ids=torch.zeros(num_rows, num_slots, dtype=torch.int64, device=device),
            lengths=torch.full((num_rows,), 2, device=device),
            features=Features(hidden, layers if num_layers else None),
            positions=torch.arange(depth + 1, device=device).repeat(num_rows, 1),
            num_new=torch.ones(num_rows, dtype=torch.int64, device=device),
            sampling=settings.sampling,
            noise=Noise(settings.seed, torch.zeros(num_rows, dtype=torch.int64, device=device)),
            sample_drafts=settings.verification_mode in verify.SAMPLED_DRAFTS,
            memory=drafter.new_memory(num_rows, num_slots, settings.shape),
        )
        if drafter.reads_predictions:
            columns = settings.shape.num_nodes + 1
            self.state.predictions = torch.full((num_rows, columns), NO_TOKEN, device=device)
        self._newest_draft: Draft
        self._propose = Replay(self._draft_all, device)
        self._verify_and_commit = Replay(self._verify_all, device)

    def clear(self) -> None:
        """Free all rows."""
        self.finished.fill_(True)

    @torch.no_grad()
    def admit(self, rows: list[int], prompts: list[list[int]], request_ids: list[int]) -> Tensor:
        """Read the prompts into the given rows, and give each its first token. Returns the record of these rows."""
        device = self.target.device
        index = torch.tensor(rows, device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        token_ids = torch.zeros(len(prompts), max(map(len, prompts)) + 1, dtype=torch.int64)
        for row, prompt in zip(token_ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        token_ids = token_ids.to(device)
        newest = self._read_prompts(index, token_ids, lengths)
        self.state.noise.assign(index, torch.tensor(request_ids, device=device))

        logits = self.target.logits(newest.last_hidden)
        if self.settings.sampling.greedy:
            first = logits.argmax(-1)  # [b, 1]
        else:
            uniforms = self.state.noise.uniforms(lengths[:, None], Stream.TARGET, rows=index)
            first = sample(cut(logits, self.settings.sampling).softmax(-1), uniforms)
        token_ids.scatter_(1, lengths[:, None], first)
        finished = torch.isin(first[:, 0], self.eos) | (self.settings.max_new_tokens == 1)

        state = self.state
        state.token_ids[index, : token_ids.shape[1]] = token_ids
        state.lengths[index] = lengths + 1
        state.positions[index] = lengths[:, None] - 1 + torch.arange(state.positions.shape[1], device=device)
        state.num_new[index] = 1
        state.features.put(newest, index)
        if state.predictions is not None:
            state.predictions[index] = NO_TOKEN
        self.finished[index] = finished
        self.limits[index] = lengths + self.settings.max_new_tokens
        head = torch.zeros(len(prompts), RECORD_HEAD, dtype=torch.int64, device=device)
        head[:, 0], head[:, 3] = 1, finished
        return torch.cat([head, first], 1)

    def _read_prompts(self, index: Tensor, token_ids: Tensor, lengths: Tensor) -> Features:
        """Target and drafter read prompts [b, P + 1] chunk by chunk; returns the features of each newest token."""
        cache, memory = self.cache, self.state.memory
        if len(index) < self.num_rows:
            cache, memory = cache.rows(index), memory and memory.rows(index)
        found: Features | None = None
        for start in range(0, token_ids.shape[1] - 1, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, token_ids.shape[1] - 1)
            window = chain_window(torch.full_like(lengths, start), end - start)
            features = self.target.run(token_ids[:, start:end], window, cache, self.drafter.layer_ids)
            self.drafter.read(memory, token_ids, features, window)
            column = lengths - 1 - start
            here = features.gather(column.clamp(0, end - start - 1)[:, None])
            found = here if found is None else here.where(column >= 0, found)
        assert found is not None
        return found

    def expect(self, longest: int) -> None:
        """No row that is not finished is longer than `longest` tokens: on a CPU the target reads no slots beyond.

        On a GPU rounds are recorded for all slots, and the kernel skips by itself what no token sees.
        """
        if self.target.device.type == "cpu":
            self.cache.num_seen = min(self.num_slots, longest + self.settings.shape.num_nodes)

    def draft(self) -> None:
        """The first half of a round: every row gets a draft."""
        self._newest_draft = self._propose()

    def verify(self) -> Tensor:
        """The second half: read the draft with the target, accept, commit. Returns the record: [B, 5 + D] or less."""
        return self._verify_and_commit()

    @torch.no_grad()
    def _draft_all(self) -> Draft:
        return self.drafter.propose(self.state, self.settings.shape)

    @torch.no_grad()
    def _verify_all(self) -> Tensor:
        state, draft = self.state, self._newest_draft
        tokens = torch.cat([state.newest()[:, None], draft.tokens.clamp(min=0)], 1)  # [B, N + 1]
        features = self.target.run(tokens, draft_window(state.lengths - 1, draft), self.cache, self.drafter.layer_ids)
        logits = self.target.logits(features.last_hidden)  # [B, N + 1, V] of what follows each column of the window
        verified = self._verify(logits, draft)
        if state.predictions is not None:
            state.predictions.copy_(logits.argmax(-1))
        return self._commit(draft, verified, features)

    def _verify(self, logits: Tensor, draft: Draft) -> Verified:
        mode, state, rules = self.settings.verification_mode, self.state, self.rules
        nodes = draft.tokens, draft.parents, draft.depth
        if mode == "greedy":
            return rules.greedy(logits, *nodes)
        each_node = torch.arange(draft.tokens.shape[1], device=logits.device)
        coins = state.noise.uniforms(state.lengths[:, None], Stream.ACCEPT, each_node)
        if mode == "synthetic":
            return verify.synthetic(logits, *nodes, self.settings.synthetic_rates, coins[:, : draft.depth])
        logits = cut(logits, self.settings.sampling)
        if mode == "typical":
            return rules.typical(logits, *nodes)
        positions = state.lengths[:, None] + torch.arange(draft.depth + 1, device=logits.device)
        uniforms = state.noise.uniforms(positions, Stream.TARGET)
        if mode == "one_hot":
            return rules.one_hot(logits, *nodes, uniforms)
        assert draft.logits is not None
        if mode == "without_replacement":
            return rules.without_replacement(logits, draft.logits, *nodes, coins, uniforms)
        rule = rules.block if mode == "block" else rules.probabilistic
        return rule(logits, draft.logits, draft.tokens, coins, uniforms)

    def _commit(self, draft: Draft, verified: Verified, features: Features) -> Tensor:
        """Append what was accepted to the rows that are not finished, and keep what the next round reads."""
        state, num_accepted, tokens = self.state, verified.num_accepted, draft.tokens
        prefix = state.lengths - 1
        if not draft.is_chain:
            self.cache.keep_path(prefix, verified.path)
            features = features.gather(torch.cat([torch.zeros_like(verified.path[:, :1]), verified.path], 1))
            tokens = tokens.gather(1, (verified.path - 1).clamp(min=0))
        tokens = torch.cat([tokens.clamp(min=0), verified.next_token[:, None]], 1)  # [B, D + 1]
        tokens.scatter_(1, num_accepted[:, None], verified.next_token[:, None])
        columns = torch.arange(state.positions.shape[1], device=tokens.device)
        positions = prefix[:, None] + columns
        columns = columns[: tokens.shape[1]]
        # what lies past the new length is some token, and is written over later
        state.token_ids.scatter_(1, state.lengths[:, None] + columns, tokens)

        ends_text = torch.isin(tokens, self.eos) & (columns <= num_accepted[:, None])
        until_end = torch.where(ends_text, columns + 1, tokens.shape[1] + 1).amin(1)  # [B] tokens up to an EOS
        num_emitted = torch.minimum(num_accepted + 1, until_end)
        num_emitted = torch.minimum(num_emitted, self.limits - state.lengths) * ~self.finished
        num_drafted = (draft.tokens != NO_TOKEN).sum(1)

        state.lengths += num_emitted
        self.finished |= ends_text.any(1) | (state.lengths >= self.limits)
        state.features.put(features)
        state.positions.copy_(positions)
        state.num_new.copy_(num_accepted + 1)
        head = [num_emitted, num_drafted, torch.minimum(num_accepted, until_end), self.finished.long()]
        return torch.cat([torch.stack(head, 1), tokens], 1)


def rules_on(device: torch.device) -> ModuleType:
    """The verification rules: on a GPU the kernels, else their specification."""
    if device.type != "cuda":
        return verify
    from draftsmith.inference import verify_kernels  # needs triton

    return verify_kernels


def draft_window(prefix: Tensor, draft: Draft) -> Window:
    """The newest committed token of each row, at slot `prefix` [B], and the nodes of its draft."""
    window = chain_window(prefix, draft.tokens.shape[1] + 1)
    if draft.is_chain:
        return window
    positions = prefix[:, None] + node_depths(draft.parents, draft.depth)
    return Window(window.slots, positions, prefix, ancestor_words(draft.parents, draft.depth))
