"""Acceptance that others have published, with its source: what a plan may expect before anything is trained.

Their targets, texts and engines are not the reader's: a first guess, to be replaced by an own measurement.
"""

from dataclasses import dataclass

from draftsmith.inference.planning.best_draft import equal_rates


@dataclass(frozen=True)
class Published:
    """Acceptance of chains. Where only a length is known, all depths are taken to have the same conditional rate."""

    kind: str
    where: str  # target and text
    source: str
    draft_length: int
    length: float | None = None  # acceptance length at `draft_length`, the bonus token counted
    unconditional: tuple[float, ...] = ()  # share of drafts with more than i tokens accepted

    @property
    def rates(self) -> list[float]:
        """Conditional acceptance rate of each depth."""
        if self.length is not None:
            return equal_rates(self.length, self.draft_length)
        before = (1.0, *self.unconditional[:-1])
        return [now / then for now, then in zip(self.unconditional, before, strict=True)]


VLLM_20780 = "vLLM issue 20780, one H100"
SPECFORGE = "SpecForge, docs/spec_bundle/public/raw_data/data.json"
SPECULATORS = "speculators 0.9, examples/train, 5,000 samples of ShareGPT"
NEBIUS = "model cards of nebius, trained by KL divergence"

PUBLISHED = (
    Published("eagle", "Llama-3.1-8B, MT-Bench", VLLM_20780, 4, 2.39),
    Published("eagle3", "Llama-3.1-8B, MT-Bench", VLLM_20780, 4, 3.08),
    Published("eagle3", "Llama-3.1-8B, MATH-500", SPECFORGE, 7, 5.40),
    Published("eagle3", "Llama-3.1-8B, GSM8K", SPECFORGE, 7, 2.97),
    Published("eagle3", "Qwen3-8B, little training", SPECULATORS, 3, unconditional=(0.3436, 0.0900, 0.0127)),
    Published("p_eagle", "gpt-oss-120b, MT-Bench", "P-EAGLE, arXiv 2602.01469, and its README", 5, 2.68),
    Published("p_eagle", "Qwen3-8B, little training", SPECULATORS, 4, unconditional=(0.4084, 0.1084, 0.0158, 0.0015)),
    Published("medusa", "Llama-3.1-8B, temperature 0", NEBIUS, 6, 2.19),
    Published("mlp_speculator", "Llama-3.1-8B, temperature 0", NEBIUS, 6, 2.43),
)
