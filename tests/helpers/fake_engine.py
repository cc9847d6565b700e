"""A vLLM in its developer mode, with the extension that swaps drafters, or an SGLang, in the process of the test."""

import json
from pathlib import Path
from typing import Any

from fake_server import FakeServer

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.models import Target, load_drafter

DRAFT_LENGTH = 4


class CountingDecoder:
    """Decodes with a drafter as draftsmith does, and counts as vLLM would."""

    def __init__(self, target: Target, drafter: str) -> None:
        self.decoder = SpeculativeDecoder(target, load_drafter(drafter, target))
        self.drafts = drafter != "none"
        self.stats = Stats(DRAFT_LENGTH)

    def generate(self, prompts: list[list[int]], limit: int) -> Any:
        output = self.decoder.generate(prompts, limit, draft_length=DRAFT_LENGTH)
        if self.drafts:
            self.stats += output.stats.total
        return output


class FakeEngine(FakeServer):
    """A server with a drafter, or without one ("none"), which has no counters then."""

    def __init__(self, target: Target, drafter: str = "none", form: str = "vllm") -> None:
        super().__init__(target, form)
        self.decoder: Any = CountingDecoder(target, drafter)
        self.swapped: list[str] = []  # folders, in their order
        self.architectures: list[str] = []  # that their config.json name
        self.info: dict[str, Any] = {"version": "0.5.23", "speculative_num_steps": DRAFT_LENGTH}  # of an SGLang
        self.resets = 0  # of the prefix cache
        self.reason = ""  # why it takes no drafter
        self.dev_mode = True
        self.version: Any = "0.32.0"

    def get(self, path: str) -> dict | str:
        if path == "/server_info":
            algorithm = {"speculative_algorithm": "EAGLE" if self.decoder.drafts else None}
            return {**algorithm, "speculative_num_draft_tokens": DRAFT_LENGTH + 1, **self.info}
        if path == "/version":
            return {"version": self.version}
        if path == "/metrics":
            return self.page(self.decoder.stats) if self.decoder.drafts else ""
        return super().get(path)

    def take(self, folder: str) -> None:
        """Decode with another drafter from now on. The server's counters go on."""
        stats, self.decoder = self.decoder.stats, CountingDecoder(self.target, folder)
        self.decoder.stats = stats

    def drafted(self, output: Any) -> dict:
        """Return what SGLang tells of its drafts beside an answer."""
        stats = output.stats.total
        if not self.decoder.drafts or not stats.num_drafts:
            return {}
        longest = max(place for place, count in enumerate(stats.acceptance_histogram) if count)
        return {
            "spec_verify_ct": stats.num_drafts,
            "spec_num_proposed_drafts": stats.num_draft_tokens,
            "spec_num_correct_drafts": stats.num_accepted_tokens,
            "spec_correct_drafts_histogram": stats.acceptance_histogram[: longest + 1],
        }

    def page(self, stats: Stats) -> str:
        """Return the counters as vLLM's page has them."""
        values = {
            "drafts": stats.num_drafts,
            "draft_tokens": stats.num_draft_tokens,
            "accepted_tokens": stats.num_accepted_tokens,
        }
        lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}.0' for name, value in values.items()]
        for place in range(stats.draft_length):
            count = sum(stats.acceptance_histogram[place + 1 :])
            lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}.0')
        return "\n".join(lines) + "\n"

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        if self.dev_mode and path == "/collective_rpc":
            assert body["method"] == "swap_drafter"
            (folder,) = body["args"]
            if not self.reason:
                self.take(folder)
                self.swapped.append(Path(folder).name)
                self.architectures += json.loads((Path(folder) / "config.json").read_text())["architectures"]
            return 200, {"results": [self.reason]}
        if self.dev_mode and path == "/reset_prefix_cache":
            self.resets += 1
            return 200, {}
        status, answer = super().post(path, body)
        if "logprobs" in body:
            answer["choices"][0]["logprobs"] = {"top_logprobs": [{"token_id:5": -0.5, "token_id:7": -0.75}]}
        if "top_logprobs_num" in body:
            answer["meta_info"]["output_top_logprobs"] = [[[-0.5, 5, None], [-0.75, 7, None]]]
        return status, answer
