"""Decode prompts with vLLM and write down what it generated and what it counted.

Runs under the interpreter of an environment that has vLLM, which need not have draftsmith: it imports nothing of ours.

    VENV/bin/python vllm_server.py JOB.json RESULT.json

JOB.json holds `llm` (keyword arguments of vllm.LLM), `sampling` (of vllm.SamplingParams) and `prompts` (token ids);
RESULT.json gets `version`, `token_ids`, and `counters`: vLLM's own vllm:spec_decode_* metrics without that prefix.
"""

import json
import os
import sys
from pathlib import Path

PREFIX = "vllm:spec_decode_"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for name, value in job.get("environment", {}).items():
        os.environ.setdefault(name, value)

    import vllm

    llm = vllm.LLM(disable_log_stats=False, **job["llm"])
    sampling = vllm.SamplingParams(**job["sampling"])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    counters = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            counters[metric.name.removeprefix(PREFIX)] = getattr(metric, "values", None) or metric.value
    result = {
        "version": vllm.__version__,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
