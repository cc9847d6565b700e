"""Decode prompts with vLLM and write down what it generated and what it counted.

Runs under the interpreter of an environment that has vLLM, which need not have draftsmith: it imports nothing of ours.

    VENV/bin/python vllm_server.py JOB.json RESULT.json

JOB.json holds `llm` (keyword arguments of vllm.LLM), `sampling` (of vllm.SamplingParams) and `prompts` (token ids);
RESULT.json gets `version`, `token_ids`, `counters` (vLLM's own vllm:spec_decode_* metrics without that prefix), and
`timed`: each prompt once more, alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import vllm

    llm = vllm.LLM(disable_log_stats=False, **job["llm"])
    sampling = vllm.SamplingParams(**job["sampling"])
    outputs = generate(llm, job["prompts"], sampling)
    result = {
        "version": vllm.__version__,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters(llm),
        "timed": [timed(llm, prompt, sampling) for prompt in job["prompts"]],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def generate(llm: Any, prompts: list[list[int]], sampling: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def counters(llm: Any) -> dict[str, Any]:
    """As they stand now."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            found[metric.name.removeprefix(PREFIX)] = getattr(metric, "values", None) or metric.value
    return found


def timed(llm: Any, prompt: list[int], sampling: Any) -> dict[str, Any]:
    """What one request took behind its first token, by the engine's own clock."""
    before = counters(llm).get("num_drafts", 0)
    metrics = generate(llm, [prompt], sampling)[0].metrics
    return {
        "seconds": metrics.last_token_ts - metrics.first_token_ts,
        "num_tokens": metrics.num_generation_tokens - 1,
        "num_drafts": counters(llm).get("num_drafts", 0) - before,
    }


if __name__ == "__main__":
    main()
