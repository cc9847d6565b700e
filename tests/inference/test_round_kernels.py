"""The ends of a round in one kernel each give what their plain form gives, and leave the state as it does."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from draftsmith.inference.decoding import round_steps
from draftsmith.inference.decoding.round_steps import Ends
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft, chain
from draftsmith.models.sampling.sampling import Noise, Sampling
from draftsmith.models.target.target import Features

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
from draftsmith.inference.decoding import round_kernels

pytestmark = pytest.mark.usefixtures("watched_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, SLOTS, VOCABULARY, DEPTH = 5, 96, 9, 4  # the state has room for drafts of DEPTH
TREE = torch.tensor([-1, -1, 0, 0, 1, 3, 3])
WIDE = torch.tensor([-1, *[(node - 1) // 2 for node in range(1, 40)]])  # more columns than a word has
PATHS = {
    "chain": None,
    "none": None,
    "tree": [[2, 4, 6], [1, 3, 3], [2, 5, 5], [0, 0, 0], [1, 4, 7]],
    "wide tree": None,
}


def on_device(*shape: int, low: int = 0, high: int = VOCABULARY) -> Tensor:
    return torch.randint(low, high, shape, device=DEVICE)


def make_draft(name: str) -> Draft:
    if name in ("chain", "none"):
        return chain(on_device(ROWS, DEPTH - 1 if name == "chain" else 0, low=NO_TOKEN))
    parents = (TREE if name == "tree" else WIDE).to(DEVICE)
    return Draft(on_device(ROWS, len(parents), low=NO_TOKEN), parents.expand(ROWS, -1), 3 if name == "tree" else 6)


def make_state() -> DecodingState:
    return DecodingState(
        token_ids=on_device(ROWS, SLOTS),
        lengths=torch.tensor([2, 7, 31, 8, 12], device=DEVICE),
        features=Features(
            torch.zeros(ROWS, DEPTH + 1, 24, device=DEVICE), torch.zeros(ROWS, DEPTH + 1, 40, device=DEVICE)
        ),
        positions=on_device(ROWS, DEPTH + 1),
        next_ids=on_device(ROWS, DEPTH + 1),
        newest_column=on_device(ROWS),
        sampling=Sampling(),
        noise=Noise(0, torch.arange(ROWS, device=DEVICE)),
        sample_drafts=False,
    )


def clone(state: DecodingState) -> DecodingState:
    changed = ("token_ids", "lengths", "positions", "next_ids", "newest_column")
    copied = {name: getattr(state, name).clone() for name in changed}
    features = Features(state.features.last_hidden.clone(), state.features.layers.clone())
    kept = {field.name: getattr(state, field.name) for field in fields(state)}
    return DecodingState(**{**kept, **copied, "features": features})


@pytest.mark.parametrize("name", ["chain", "none", "tree", "wide tree"])
def test_what_the_target_reads(name: str) -> None:
    torch.manual_seed(0)
    state, draft = make_state(), make_draft(name)
    expected, window = round_steps.open_round(state.token_ids, state.lengths, draft)
    found, kernel_window = round_kernels.open_round(state.token_ids, state.lengths, draft)
    assert torch.equal(found, expected)
    for part in fields(window):
        one, other = getattr(window, part.name), getattr(kernel_window, part.name)
        assert (one is None) == (other is None), part.name
        assert one is None or (torch.equal(one, other) and one.dtype == other.dtype), part.name


@pytest.mark.parametrize("eos", [[], [2, 3, 5]])
@pytest.mark.parametrize("name", ["chain", "none", "tree"])
def test_what_is_kept(name: str, eos: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go on, end by their own token, at a limit within the draft, or have ended before."""
    monkeypatch.setattr(round_kernels, "BLOCK", 32)
    torch.manual_seed(1)
    for _ in range(2):
        state, draft = make_state(), make_draft(name)
        paths = torch.tensor(PATHS["tree"]) if name == "tree" else torch.arange(1, draft.depth + 1).expand(ROWS, -1)
        num_accepted = on_device(ROWS, high=draft.depth + 1)
        verified = Verified(num_accepted, paths.to(DEVICE).contiguous(), on_device(ROWS))
        limits = state.lengths + torch.tensor([9, 1, 9, 2, 9], device=DEVICE)
        features = Features(*(torch.randn(ROWS, draft.tokens.shape[1] + 1, width, device=DEVICE) for width in (24, 40)))
        results = []
        for steps in (round_steps, round_kernels):
            own = clone(state)
            finished = torch.tensor([False, False, False, False, True], device=DEVICE)
            ends = Ends(limits, torch.tensor(eos, dtype=torch.int64, device=DEVICE), finished)
            record = steps.close_round(own, ends, draft, verified, features)
            whole = (
                own.token_ids,
                own.lengths,
                own.positions,
                own.next_ids,
                own.newest_column,
                own.features.last_hidden,
                own.features.layers,
            )
            results.append((record, finished, *whole))
        for expected, found in zip(*results, strict=True):
            assert expected.dtype == found.dtype
            assert torch.equal(expected, found)
