"""The drafter that proposes nothing: plain decoding on the same kernels, the baseline of every speedup."""

from draftsmith.models.drafter_configs import NoneConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, chain
from draftsmith.models.sampling.trees import Shape


class NoDrafter(Drafter):
    kind = "none"
    config_class = NoneConfig
    can_sample = False
    max_draft_length = 0

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        return chain(state.token_ids[:, :0])
