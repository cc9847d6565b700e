"""`draftsmith bench` beside vLLM's own benchmark on one real server.

DRAFTSMITH_VLLM names its virtual environment, which vLLM's benchmark wants pandas in.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from vllm_process import serving

from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.models.storage.reading import read_typed
from draftsmith.recipes.bench.results import BenchTest
from draftsmith.recipes.bench.trace import read_trace
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

pytestmark = pytest.mark.engine
NUM_REQUESTS, NUM_TOKENS, CLIENTS, TURNS = 40, 32, 2, 3
NOISE = 0.15  # of a ratio of means over turns, on a machine that other work shares
BENCH_SERVE = """\
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # `vllm bench serve`, whose command wants a package of the name vllm, which the CPU build is not


def test_times_are_those_of_vllm_bench_serve(tmp_path: Path) -> None:
    """The two tools take turns with the same prompts; means of TTFT and TPOT agree, and so does the throughput.

    The prompts are sent once before, for they then lie in the server's prefix cache for both. The server's log, read as
    a trace, holds what was sent.
    """
    prompts = [function_prompt(function) for function in stdlib_functions(held_out=True)[:NUM_REQUESTS]]
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    log, ours, theirs = tmp_path / "vllm.log", [], []
    options = ("--max-model-len", "512", "--max-num-seqs", "8", "--enable-log-requests")
    with serving(str(EMBEDDED_TARGET), log, *options, VLLM_LOGGING_LEVEL="DEBUG") as url:
        bench(url, source, tmp_path / "warm-up")
        for turn in range(TURNS):
            ours.append(bench(url, source, tmp_path / f"ours-{turn}"))
            theirs.append(bench_serve(url, source, tmp_path / f"theirs-{turn}.json"))
    ratios = np.mean(ours, axis=0) / np.mean(theirs, axis=0)
    print(f"TTFT, TPOT, tokens a second: ours {np.mean(ours, axis=0)}, theirs {np.mean(theirs, axis=0)}: {ratios}")
    assert np.abs(np.log(ratios)).max() < NOISE
    logged = {request.prompt.text for request in read_trace(log) if isinstance(request.prompt, Prompt)}
    assert logged == set(prompts)


def bench(url: str, prompts: Path, out: Path) -> tuple[float, float, float]:
    """Return mean TTFT and TPOT in ms, and output tokens a second, as `draftsmith bench` measures them."""
    words = f"bench {url} --prompts {prompts} --concurrency {CLIENTS} --requests {NUM_REQUESTS} --repeats 1"
    assert main([*words.split(), "--max-new-tokens", str(NUM_TOKENS), "--out", str(out)]) == 0
    (stage,) = read_typed(BenchTest, out / "bench.json").stages
    assert stage.num_failed == 0
    (run,) = stage.runs
    assert run.mean_ttft_ms is not None
    assert run.mean_tpot_ms is not None
    return run.mean_ttft_ms, run.mean_tpot_ms, run.output_tokens_per_second


def bench_serve(url: str, prompts: Path, result: Path) -> tuple[float, float, float]:
    """Return mean TTFT and TPOT in ms, and output tokens a second, as vLLM's own tool measures them."""
    python = Path(os.environ["DRAFTSMITH_VLLM"]) / "bin" / "python"
    command = [str(python), "-c", BENCH_SERVE, "--backend", "openai"]
    command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", str(EMBEDDED_TARGET)]
    command += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", str(NUM_TOKENS)]
    command += ["--skip-chat-template", "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(CLIENTS)]
    command += ["--temperature", "0", "--save-result", "--result-dir", str(result.parent)]
    command += ["--result-filename", result.name]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env={**variables, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(result.read_text())
    return found["mean_ttft_ms"], found["mean_tpot_ms"], found["output_throughput"]
