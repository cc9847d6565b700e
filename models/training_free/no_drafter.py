"""The drafter that proposes nothing: plain decoding on the same kernels, the baseline of every speedup."""

from dataclasses import dataclass

from draftsmith.models.drafter_parts.base import Drafter, DrafterConfig
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, chain
from draftsmith.models.sampling.trees import Shape


@dataclass
class NoneConfig(DrafterConfig):
    kind: str = "none"


class NoDrafter(Drafter):
    kind = "none"
    config_class = NoneConfig
    can_sample = False
    max_draft_length = 0

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        return chain(state.token_ids[:, :0])
