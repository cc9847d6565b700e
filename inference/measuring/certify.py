"""A certificate that a drafter leaves the output of the target as it is, on the user's own target and prompts.

Greedy output is compared with plain decoding token by token, alone and in a ragged batch. Sampled output is judged by
the target's own law at each place: with the tokens ordered from the likeliest down, the mass before a token plus a
random share of its own is uniform if the token was drawn from that law, whatever stands before it (Rosenblatt 1952).
A chi-square test over equal bins finds output that is drawn from another law; as a control, the same test has to find
typical acceptance, which is lossy.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.decoding.decoder import SpeculativeDecoder, resolve_settings
from draftsmith.inference.measuring.lossless import LosslessCheck, compare
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.sampling.sampling import Sampling, probabilities
from draftsmith.models.target.slots import run_causal

BINS = 20
ALPHA = 1e-4  # a lossless drafter fails one test in ten thousand
GREEDY_BATCH = 8
RESCORED = 32  # texts that the target reads at once


@dataclass(frozen=True)
class CertifySettings:
    max_new_tokens: int = 64
    draft_length: int = 4
    num_texts: int = 256  # sampled for each mode, from the prompts in turn
    batch_size: int = 32
    temperature: float = 1.0


def certify(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    settings: CertifySettings,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The certificate: `greedy` counts, for each sampled mode its chi-square test, and whether all of it passed.

    `on_progress` is called after each of `num_checks(drafter)` checks.
    """
    decoder = SpeculativeDecoder(target, drafter)
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    certificate: dict[str, Any] = {"greedy": {}, "sampled": {}}
    for batch_size in (1, GREEDY_BATCH):
        check = greedy_check(plain, decoder, prompts, settings, batch_size)
        certificate["greedy"][f"batch_size_{batch_size}"] = asdict(check)
        on_progress()
    for mode in sampled_modes(drafter):
        certificate["sampled"][mode] = sampled_check(decoder, mode, prompts, settings)
        on_progress()
    greedy = certificate["greedy"].values()
    lossless = [test for mode, test in certificate["sampled"].items() if mode != "typical"]
    certificate["passed"] = not any(check["divergences"] for check in greedy) and all(
        test["p_value"] >= ALPHA for test in lossless
    )
    certificate["control_found"] = certificate["sampled"]["typical"]["p_value"] < ALPHA
    return certificate


def num_checks(drafter: Drafter) -> int:
    return 2 + len(sampled_modes(drafter))


def sampled_modes(drafter: Drafter) -> list[VerificationMode]:
    """The lossless ones that it can be verified by, and the control."""
    return ["one_hot", "probabilistic", "block", "typical"] if drafter.can_sample else ["one_hot", "typical"]


def greedy_check(
    plain: SpeculativeDecoder,
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    settings: CertifySettings,
    batch_size: int,
) -> LosslessCheck:
    """Plain decoding of single prompts against speculative decoding in a batch whose rows change hands."""
    found, expected = (
        one.decode(
            prompts,
            resolve_settings(one.drafter, Sampling(), settings.max_new_tokens, settings.draft_length),
            batch_size=size,
        ).token_ids
        for one, size in ((decoder, batch_size), (plain, 1))
    )
    return compare(plain.target, prompts, expected, found)


def sampled_check(
    decoder: SpeculativeDecoder, mode: VerificationMode, prompts: list[list[int]], settings: CertifySettings
) -> dict[str, float]:
    """Chi-square of sampled texts against the target's law."""
    sampling = Sampling(settings.temperature)
    how = resolve_settings(decoder.drafter, sampling, settings.max_new_tokens, settings.draft_length, mode)
    chosen = [prompts[i % len(prompts)] for i in range(settings.num_texts)]
    output = decoder.decode(chosen, how, batch_size=min(settings.batch_size, settings.num_texts))
    # a text's first token is plain sampling in any mode: leave it out
    uniforms = [
        uniforms_of(decoder.target, chosen[i : i + RESCORED], output.token_ids[i : i + RESCORED], sampling)
        for i in range(0, len(chosen), RESCORED)
    ]
    counts = torch.histc(torch.cat(uniforms), BINS, 0, 1)
    statistic, p_value = chi_square(counts, counts.sum() / BINS)
    return {"num_tokens": int(counts.sum()), "chi_square": statistic, "degrees": BINS - 1, "p_value": p_value}


@torch.no_grad()
def uniforms_of(target: Target, prompts: list[list[int]], answers: list[list[int]], sampling: Sampling) -> Tensor:
    """Where each answer token after the first lies in the target's law, fp64 in [0, 1]; uniform if drawn from it."""
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)  # [B, T]
    hidden = run_causal(target.model, rows.to(target.device))
    generator = torch.Generator().manual_seed(0)
    found = []
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        start, end = len(prompt) + 1, len(text)  # places of the tokens judged
        if start == end:
            continue
        p = probabilities(target.logits(hidden[row, start - 1 : end - 1]), sampling).double().cpu()  # [T, V]
        own = p.gather(1, torch.tensor(text[start:end])[:, None])
        before = (p * (p > own)).sum(1)
        tied = (p * (p == own)).sum(1)  # equally likely tokens share their mass
        found.append(before + tied * torch.rand(end - start, dtype=torch.float64, generator=generator))
    return torch.cat(found)


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, float]:
    """Pearson's statistic of counts [n] against what was expected, and its p-value at n - 1 degrees of freedom."""
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    degrees = torch.tensor(len(counts) - 1, dtype=torch.float64)
    return float(statistic), float(torch.special.gammaincc(degrees / 2, statistic / 2))
