"""Decode prompts with vLLM and write down what it generated and what it counted.

Runs under the interpreter of an environment that has vLLM, which need not have draftsmith: it imports nothing of ours.

    VENV/bin/python vllm_script.py JOB.json RUN.json

JOB.json holds `llm` (keyword arguments of vllm.LLM), `sampling` (of vllm.SamplingParams), `prompts` (token ids), and
batches of prompts that are decoded after them and timed (`timed`).
RUN.json gets the fields of `EngineRun` in vllm_run.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

COUNTERS = {  # vLLM's metric -> field
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import vllm

    llm = vllm.LLM(disable_log_stats=False, **job["llm"])
    sampling = vllm.SamplingParams(**job["sampling"])
    outputs = generate(llm, job["prompts"], sampling)
    run = {
        "version": f"vLLM {vllm.__version__}",
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters(llm),
        "timed": [timed(llm, batch, sampling) for batch in job["timed"]],
    }
    Path(sys.argv[2]).write_text(json.dumps(run))


def generate(llm: Any, prompts: list[list[int]], sampling: Any) -> list[Any]:
    """Return vLLM's outputs for prompts that it decodes together."""
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def counters(llm: Any) -> dict[str, Any]:
    """Return the counters as they stand now; none of a vLLM without a drafter."""
    return {
        COUNTERS[metric.name]: getattr(metric, "values", None) or metric.value
        for metric in llm.get_metrics()
        if metric.name in COUNTERS
    }


def timed(llm: Any, prompts: list[list[int]], sampling: Any) -> dict[str, float]:
    """Return what a batch took after its first tokens, by the engine's own clock: the mean of its requests."""
    before = counters(llm)
    metrics = [output.metrics for output in generate(llm, prompts, sampling)]
    after = counters(llm)
    return {
        "num_requests": len(prompts),
        "seconds": sum(each.last_token_ts - each.first_token_ts for each in metrics) / len(prompts),
        "num_tokens": sum(each.num_generation_tokens - 1 for each in metrics),
        "num_drafts": after.get("num_drafts", 0) - before.get("num_drafts", 0),
        "num_accepted_tokens": after.get("num_accepted_tokens", 0) - before.get("num_accepted_tokens", 0),
    }


if __name__ == "__main__":
    main()
