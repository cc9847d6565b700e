"""Decode prompts with vLLM and write down what it generated and what it counted.

Runs under the interpreter of an environment that has vLLM, which need not have draftsmith: it imports nothing of ours.

    VENV/bin/python vllm_script.py JOB.json RUN.json

JOB.json holds `llm` (keyword arguments of vllm.LLM), `sampling` (of vllm.SamplingParams), `prompts` (token ids), and
whether each prompt is decoded again alone and timed (`is_timed`).
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
        "timed": [timed(llm, prompt, sampling) for prompt in job["prompts"]] if job["is_timed"] else [],
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


def timed(llm: Any, prompt: list[int], sampling: Any) -> dict[str, float]:
    """Return what one request took after its first token, by the engine's own clock."""
    before = counters(llm).get("num_drafts", 0)
    metrics = generate(llm, [prompt], sampling)[0].metrics
    return {
        "seconds": metrics.last_token_ts - metrics.first_token_ts,
        "num_tokens": metrics.num_generation_tokens - 1,
        "num_drafts": counters(llm).get("num_drafts", 0) - before,
    }


if __name__ == "__main__":
    main()
