"""A certificate that a drafter leaves the output of the target as it is, on the user's own target and prompts.

Greedy output is compared with plain decoding token by token, alone and in a ragged batch. Sampled output is judged by
the target's own distribution at each place: with the tokens ordered from the likeliest down, the mass before a token
plus a random share of its own is uniform if the token was drawn from it, whatever stands before it (Rosenblatt 1952).
A chi-square test over equal bins finds output that is drawn from another one; as a control, the same test has to find
typical acceptance, which is lossy.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from scipy.stats import chi2
from torch import Tensor

from draftsmith.inference.decoding.decoder import SpeculativeDecoder, resolve_settings
from draftsmith.inference.measuring.lossless import compare_outputs
from draftsmith.inference.measuring.results import Certificate, ChiSquareTest, LosslessCheck
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.sampling.sampling import Sampling, probabilities
from draftsmith.models.slots.forward import run_causal

BINS = 20
ALPHA = 1e-4  # a lossless drafter fails one test in ten thousand
GREEDY_BATCH = 8
CONTROL: VerificationMode = "typical"  # a lossy mode
RESCORED = 32  # texts that the target reads at once


@dataclass(frozen=True)
class CertifySettings:
    """The amount of text that is decoded for a certificate."""

    max_new_tokens: int = 64
    draft_length: int = 4  # or as far as the drafter goes
    num_prompts: int | None = None  # decoded greedily; None: all
    num_texts: int = 256  # sampled for each mode, from the prompts in turn
    batch_size: int = 32
    temperature: float = 1.0


def certify(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    settings: CertifySettings,
    expected: list[list[int]] | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Certificate:
    """Check a drafter's output, greedy and sampled, and return the certificate.

    `expected` are the `plain_texts` of these prompts and settings, which several drafters share; None: decode them.
    `on_progress` is called after each of `num_checks(drafter)` checks.
    """
    decoder = SpeculativeDecoder(target, drafter)
    longest = drafter.max_draft_length or settings.draft_length
    settings = replace(settings, draft_length=min(settings.draft_length, longest))
    expected = plain_texts(target, prompts, settings) if expected is None else expected
    greedy: dict[str, LosslessCheck] = {}
    sampled: dict[str, ChiSquareTest] = {}
    for batch_size in (1, GREEDY_BATCH):
        greedy[f"batch_size_{batch_size}"] = greedy_check(decoder, prompts, expected, settings, batch_size)
        on_progress()
    for mode in sampled_modes(drafter):
        sampled[mode] = sampled_check(decoder, mode, prompts, settings)
        on_progress()
    passed = not any(check.divergences for check in greedy.values()) and all(
        test.p_value >= ALPHA for mode, test in sampled.items() if mode != CONTROL
    )
    return Certificate(greedy, sampled, passed, control_found=sampled[CONTROL].p_value < ALPHA)


def num_checks(drafter: Drafter) -> int:
    return 2 + len(sampled_modes(drafter))


def sampled_modes(drafter: Drafter) -> list[VerificationMode]:
    """Return the lossless modes by which a drafter can be verified, and the control."""
    return ["one_hot", "probabilistic", "block", CONTROL] if drafter.can_sample else ["one_hot", CONTROL]


def plain_texts(target: Target, prompts: list[list[int]], settings: CertifySettings) -> list[list[int]]:
    """Return the greedy answers of plain decoding to the prompts of a certificate, each decoded alone."""
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    return plain.generate(prompts[: settings.num_prompts], settings.max_new_tokens).token_ids


def greedy_check(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    expected: list[list[int]],
    settings: CertifySettings,
    batch_size: int,
) -> LosslessCheck:
    """Compare plain decoding of single prompts with speculative decoding in a batch whose rows change hands."""
    prompts = prompts[: settings.num_prompts]
    generation = resolve_settings(decoder.drafter, Sampling(), settings.max_new_tokens, settings.draft_length)
    actual = decoder.decode(prompts, generation, batch_size=batch_size).token_ids
    return compare_outputs(decoder.target, prompts, expected, actual)


def sampled_check(
    decoder: SpeculativeDecoder, mode: VerificationMode, prompts: list[list[int]], settings: CertifySettings
) -> ChiSquareTest:
    """Return the chi-square test of sampled texts against the target's distribution."""
    sampling = Sampling(settings.temperature)
    generation = resolve_settings(decoder.drafter, sampling, settings.max_new_tokens, settings.draft_length, mode)
    chosen = [prompts[i % len(prompts)] for i in range(settings.num_texts)]
    output = decoder.decode(chosen, generation, batch_size=min(settings.batch_size, settings.num_texts))
    return texts_check(decoder.target, chosen, output.token_ids, sampling)


def texts_check(
    target: Target, prompts: list[list[int]], answers: list[list[int]], sampling: Sampling
) -> ChiSquareTest:
    """Return the chi-square test of sampled answers to prompts against the target's distribution.

    An answer's first token is plain sampling whatever drafts, and is left out.
    """
    parts = (slice(i, i + RESCORED) for i in range(0, len(prompts), RESCORED))
    generator = torch.Generator().manual_seed(0)  # one for all: the same shares in each part would add up
    uniforms = [uniforms_of(target, prompts[part], answers[part], sampling, generator) for part in parts]
    counts = torch.histc(torch.cat(uniforms), BINS, 0, 1)
    statistic, p_value = chi_square(counts, counts.sum() / BINS)
    return ChiSquareTest(int(counts.sum()), statistic, BINS - 1, p_value)


@torch.no_grad()
def uniforms_of(
    target: Target,
    prompts: list[list[int]],
    answers: list[list[int]],
    sampling: Sampling,
    generator: torch.Generator,
) -> Tensor:
    """Return where each answer token after the first lies in the target's distribution: fp64, uniform if drawn so.

    The share of a token's own mass comes from the generator.
    """
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)  # [B, T]
    hidden = run_causal(target.model, rows.to(target.device))
    uniforms = []
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        start, end = len(prompt) + 1, len(text)  # places of the tokens judged
        if start == end:
            continue
        p = probabilities(target.logits(hidden[row, start - 1 : end - 1]), sampling).double().cpu()  # [T, V]
        own = p.gather(1, torch.tensor(text[start:end])[:, None])
        before = (p * (p > own)).sum(1)
        tied = (p * (p == own)).sum(1)  # equally likely tokens share their mass
        uniforms.append(before + tied * torch.rand(end - start, dtype=torch.float64, generator=generator))
    return torch.cat(uniforms)


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return Pearson's statistic of counts [n] against what was expected, and its p-value at n - 1 degrees."""
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    return float(statistic), float(chi2.sf(float(statistic), len(counts) - 1))
