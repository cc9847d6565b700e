"""Drafters that several test files make, and the batches and rounds that they are tried on."""

from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import BatchEngine
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState
from draftsmith.models.losses.chain_loss import LossSums
from draftsmith.models.sampling.sampling import Noise, Sampling
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import chain_window

TRAINABLE = [kind for kind, drafter_class in DRAFTERS.items() if drafter_class.depths is not Drafter.depths]
# Block drafters are as small as the quickstart's: tests make many of them, and train some.
BLOCKS: dict[str, Any] = {"num_layers": 2, "block_size": 5}
SMALLER: dict[str, dict[str, Any]] = {
    "dflash": BLOCKS,
    "dflash2": BLOCKS,
    "dspark": {**BLOCKS, "markov_rank": 16},
    "domino": {**BLOCKS, "memory_size": 32, "code_size": 16},
    "p_eagle": {"num_layers": 2, "num_depths": 4},
}


def untrained(kind: str, target: Target, **fields: Any) -> Drafter:
    """Wrong nearly always, which an output must not show. In evaluation mode, in which nothing is drawn by chance."""
    torch.manual_seed(1)
    config = DRAFTERS[kind].config_class(kind=kind, **{**SMALLER.get(kind, {}), **fields})
    return DRAFTERS[kind].from_target(config, target).eval()


def build(kind: str, target: Target, **fields: Any) -> Drafter:
    """Neither trained nor as new: noise in the weights lets nothing vanish or agree by accident."""
    drafter = untrained(kind, target, **fields)
    add_noise(drafter, 0.05)
    return drafter


def add_noise(drafter: Drafter, size: float) -> None:
    """The weights become some that fp16 holds, as which a CPU reads them in drafting."""
    for parameter in drafter.parameters():
        parameter.data = (parameter.data + size * torch.randn_like(parameter)).half().to(parameter)


def loss_of(drafter: Drafter, batch: Batch, target: Target) -> LossSums:
    return drafter.loss(batch, target.features(batch, drafter.layer_ids))


def random_batch(target: Target, rows: int = 3, length: int = 12) -> Batch:
    token_ids = torch.randint(1, target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(2))
    loss_mask = torch.arange(length)[None] >= torch.tensor([3, 5, 4])[:rows, None]
    return Batch(token_ids, loss_mask)


def first_round(drafter: Drafter, target: Target, token_ids: Tensor, sample_drafts: bool = False) -> DecodingState:
    """The state after the target read all but the last of the tokens [B, T]."""
    window = chain_window(torch.zeros(len(token_ids), dtype=torch.int64), token_ids.shape[1] - 1)
    features = target.run(token_ids[:, :-1], window, SlotCache(*token_ids.shape), drafter.layer_ids)
    lengths = torch.full((len(token_ids),), token_ids.shape[1])
    padded = torch.cat([token_ids, torch.zeros(len(token_ids), 8, dtype=torch.int64)], 1)
    sampling = Sampling(1.0 if sample_drafts else 0.0)
    noise = Noise(0, torch.arange(len(token_ids)))
    shape = drafter.own_shape(4)
    cache = drafter.new_cache(*padded.shape, shape)
    drafter.prefill(cache, token_ids, features, window)
    state = DecodingState(
        padded,
        lengths,
        features,
        window.positions,
        token_ids[:, 1:],
        lengths - 2,
        sampling,
        noise,
        sample_drafts,
        cache,
    )
    if drafter.reads_predictions:
        state.predictions = torch.full((len(lengths), shape.num_nodes + 1), NO_TOKEN)
    return state


def assert_trained_as_decoded(drafter: Drafter, target: Target, tolerance: float = 1e-5) -> None:
    """Inputs, positions, masks and labels of training, by the chance that a drawn draft is accepted.

    The decoder's drafter reads a prompt and draws a draft; training reads prompt and draft as one text. At the deepest
    prediction of a text there is one slot a row, whose chance is that of the decoder's distribution against the
    target's own at that place.
    """
    kind = drafter.kind
    prompts = random_batch(target, length=8).token_ids
    depth = min(4, drafter.max_draft_length or 4)
    with torch.no_grad():
        draft = drafter.propose(first_round(drafter, target, prompts, sample_drafts=True), Chain(depth))
    assert draft.logits is not None
    text = torch.cat([prompts, draft.tokens], 1)
    for i in range(depth):
        length = prompts.shape[1] + i + 1
        # from the newest token on; a draft model predicts every token from the text alone
        first = length - 1 if kind == "draft_model" else prompts.shape[1] - 1
        batch = Batch(text[:, :length], (torch.arange(length) >= first).expand(3, -1))
        with torch.no_grad():
            sums = loss_of(drafter, batch, target)
        name = f"sampled_acceptance_{0 if kind == 'draft_model' else i}"
        if name not in sums:
            assert i > 0
            return
        p = target.logits(target.features(batch).last_hidden[:, -2]).softmax(-1)
        q = draft.logits[:, i].softmax(-1)
        torch.testing.assert_close(sums[name][0], torch.minimum(p, q).sum(), atol=tolerance, rtol=tolerance)
        assert sums[name][1] == 3
        assert sums[name.replace("sampled_acceptance", "accuracy")][0] == (p.argmax(-1) == q.argmax(-1)).sum()


def noisy(kind: str, target: Target, **fields: Any) -> Drafter:
    """A drafter no weight of which is a copy or zero."""
    torch.manual_seed(0)
    drafter_class = DRAFTERS[kind]
    drafter = drafter_class.from_target(drafter_class.config_class(kind=kind, **fields), target)
    add_noise(drafter, 0.1)
    return drafter


def assert_same_drafter(found: Drafter, expected: Drafter) -> None:
    """Tensor by tensor to the bit, and in all that engines read: then so are drafts."""
    assert found.kind == expected.kind
    assert found.layer_ids == expected.layer_ids
    ours, theirs = found.engine_tensors(), expected.engine_tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


TEXTS = ["The smith", "def strike(", "heats it again, and", "A draft is cheap", "iron iron iron", "x"]


def batch_of(prompts: list[list[int]], answers: list[list[int]]) -> Batch:
    """Prompts and answers, padded, loss on the answers."""
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    token_ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    mask = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        token_ids[row, : len(text)] = torch.tensor(text)
        mask[row, len(prompt) : len(text)] = True
    return Batch(token_ids, mask)


def trained(kind: str, target: Target, prompts: list[list[int]], num_steps: int = 20, **config: Any) -> Drafter:
    """After a few steps on half of the answers, so that some drafts are followed and some are not."""
    torch.manual_seed(1)
    drafter_class = DRAFTERS[kind]
    drafter = drafter_class.from_target(drafter_class.config_class(kind=kind, **config), target).train()
    plain = SpeculativeDecoder(target, DRAFTERS["none"].from_target(None, target))
    answers = plain.generate(prompts[::2], 28, batch_size=len(prompts)).token_ids
    batch = batch_of(prompts[::2], answers)
    drafter.fit_vocabulary(torch.bincount(batch.token_ids[batch.loss_mask], minlength=target.vocab_size))
    features = target.features(batch, drafter.layer_ids)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], 1e-2)
    for _ in range(num_steps):
        total, count = drafter.loss(batch, features)["loss"]
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


@torch.no_grad()
def admit(engine: BatchEngine, rows: list[int], prompts: list[list[int]]) -> None:
    """Let an engine read prompts into free rows, of which each is the request of its number."""
    engine.read_to_end(engine.open_rows(rows, prompts, rows))
