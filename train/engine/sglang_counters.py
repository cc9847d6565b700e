"""SGLang's own counters of speculative decoding: it tells them with each answer, so that others may ask it meanwhile.

Read in the released source of SGLang 0.5.23, and compared with a server of it (`pytest -m engine`). As in vLLM's
counters, and other than in draftsmith's, accepted tokens behind the end of a text are among `num_accepted_tokens`.
Other than in both, a round in which n-grams found nothing is a draft like others.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from draftsmith.data.answers.sglang import GeneratedInfo
from draftsmith.data.http import Server
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Natural
from draftsmith.models.storage.typed_json import from_json
from draftsmith.train.engine.vllm_counters import MOST_POSITIONS, Counters

BY_STEPS = ("EAGLE", "EAGLE3", "STANDALONE", "FROZEN_KV_MTP")  # algorithms whose drafts are built in steps
Setting = Annotated[Natural, Field(le=MOST_POSITIONS)]


@dataclass
class SglangInfo:
    """The answer at /server_info: the version of an SGLang, and how it was told to draft."""

    version: Annotated[str, Field(max_length=100)]
    speculative_algorithm: Annotated[str, Field(max_length=100)] | None = None  # None: it does not draft
    speculative_num_steps: Setting | None = None  # longest path of a draft, where it is built in steps
    speculative_num_draft_tokens: Setting | None = None  # of a draft, the newest token of the text among them
    speculative_eagle_topk: Setting | None = None  # children of a node; 1: a chain
    speculative_adaptive: bool | None = None  # the number of steps changes

    @property
    def text(self) -> str:
        """SGLang with its version, and the shape of its drafts where they are no chains."""
        nodes = (self.speculative_num_draft_tokens or 1) - 1
        tree = f", trees of {nodes} nodes" if nodes and (self.speculative_eagle_topk or 1) > 1 else ""
        return f"SGLang {self.version}{tree}"

    @property
    def draft_length(self) -> int:
        """Longest path of a draft; 0 where nothing is drafted."""
        if self.speculative_algorithm is None:
            return 0
        if self.speculative_algorithm in BY_STEPS and self.speculative_num_steps:
            return self.speculative_num_steps
        return (self.speculative_num_draft_tokens or 1) - 1


def read_info(server: Server) -> SglangInfo:
    """Return what an SGLang says of itself. Raises `UserError` where it is silent, or where drafts differ in length.

    It tells drafted tokens by the length that it has at last, so that they would be wrong where that changes.
    """
    info = from_json(SglangInfo, server.json("/server_info"), f"{server.name}/server_info")
    if info.speculative_adaptive:
        raise UserError(
            f"{server.name} changes its draft length while it runs: start it without --speculative-adaptive"
        )
    return info


def counters_of(told: GeneratedInfo, draft_length: int) -> Counters:
    """Return what SGLang counted for one answer. Raises `UserError` for counters that contradict each other."""
    histogram = told.spec_correct_drafts_histogram
    per_position = tuple(sum(histogram[place:]) for place in range(1, draft_length + 1))
    if len(histogram) > draft_length + 1 or sum(histogram) != told.spec_verify_ct:
        raise UserError(
            f"the server counts accepted tokens of {sum(histogram)} drafts, and {told.spec_verify_ct} drafts"
        )
    return Counters(told.spec_verify_ct, told.spec_num_proposed_drafts, told.spec_num_correct_drafts, per_position)
