"""Prompts decoded by a real vLLM: one that is started in a virtual environment, or one that runs at an address."""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.files import real_path
from draftsmith.models.storage.reading import read_typed
from draftsmith.models.storage.typed_json import optional, to_json
from draftsmith.recipes.serving.engine_speed import TimedBatch
from draftsmith.train.engine.engine_errors import root_cause
from draftsmith.train.engine.vllm_counters import Counters, read_counters, read_version

SCRIPT = Path(__file__).with_name("vllm_script.py")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",  # modules of this folder are not what vLLM means by their names
}
MEMORY_SHARE = 0.9  # of a GPU's free memory, that vLLM may take
SPARE = 16  # tokens of the context beyond prompts and answers


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The value of vLLM's `--speculative-config`: what it is told of a drafter, by its own names."""

    method: str
    model: str | None = optional()  # directory or name on the Hub; None where the drafter has no files of its own
    num_speculative_tokens: int
    parallel_drafting: bool | None = optional()
    prompt_lookup_max: int | None = optional()
    prompt_lookup_min: int | None = optional()
    num_speculative_tokens_per_batch_size: list[list[int]] | None = optional()  # as `for_vllm` returns it

    @property
    def text(self) -> str:
        """The config as a word of a command."""
        return json.dumps(to_json(self))


@dataclass(frozen=True)
class EngineJob:
    """The prompts that an engine decodes at once, which is counted, and batches that it decodes then, each timed."""

    prompts: list[list[int]]
    max_new_tokens: int
    temperature: float = 0.0
    stops_at_eos: bool = True
    timed: list[list[list[int]]] = field(default_factory=list)  # batches of prompts

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with its answer."""
        batches = [self.prompts, *self.timed]
        return max(len(prompt) for batch in batches for prompt in batch) + self.max_new_tokens


@dataclass
class EngineRun:
    """The texts that an engine generated for the prompts, and what it counted meanwhile."""

    version: str
    token_ids: list[list[int]]
    counters: Counters
    timed: list[TimedBatch] = field(default_factory=list)


def run_environment(
    folder: Path, speculative: SpeculativeConfig | None, target: Target, job: EngineJob, plugins: Path | None = None
) -> EngineRun:
    """Decode with the vLLM of a virtual environment, in the target's precision. `speculative` None: without a drafter.

    `plugins`: a folder from which vLLM imports what `speculative` names. Raises `UserError` where there is no vLLM, or
    where it fails.
    """
    python = folder / "bin" / "python"
    if not python.is_file():
        raise UserError(f"--check {folder}: no bin/python there: give an environment with vLLM, or an http address")
    memory = {}
    if target.device.type == "cuda":  # where our own target lies, too
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(target.device)
        memory["gpu_memory_utilization"] = round(MEMORY_SHARE * free / total, 3)
    content = {
        "llm": {
            **memory,
            "model": str(real_path(Path(target.name))) if Path(target.name).is_dir() else target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_model_len": min(job.longest + SPARE, target.context),
            "enforce_eager": target.device.type == "cpu" or not job.timed,  # a server on a GPU replays CUDA graphs
            "seed": 0,
            "speculative_config": to_json(speculative),
        },
        "sampling": {
            "temperature": job.temperature,
            "max_tokens": job.max_new_tokens,
            "ignore_eos": not job.stops_at_eos,
        },
        "prompts": job.prompts,
        "timed": job.timed,
    }
    variables = vllm_environment()
    if plugins:
        variables["PYTHONPATH"] = str(real_path(plugins))
    with tempfile.TemporaryDirectory() as temporary:
        asked, answer = Path(temporary) / "job.json", Path(temporary) / "run.json"
        asked.write_text(json.dumps(content))
        command = [str(python), str(SCRIPT), str(asked), str(answer)]
        process = subprocess.run(command, env=variables, capture_output=True, text=True)
        if process.returncode:
            raise UserError(f"vLLM in {folder} failed: {root_cause(process.stdout, process.stderr)}")
        return read_typed(EngineRun, answer)


def vllm_environment() -> dict[str, str]:
    """Return the environment variables of a vLLM that is started: ours, which also name its compilers and devices.

    PYTHONPATH is for our own interpreter.
    """
    return ENVIRONMENT | {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run_address(url: str, target: Target, prompts: list[list[int]], max_new_tokens: int) -> EngineRun:
    """Send the prompts, one by one, to a running vLLM; what it counted is the difference of two readings.

    Raises `UserError` where it cannot be reached, refuses or is none.
    """
    endpoint = Endpoint(url, target, max_new_tokens, setting="--check")
    version = read_version(endpoint.server)
    before = read_counters(endpoint.server)
    token_ids = [endpoint.complete(prompt, Sampling(), number).new_ids for number, prompt in enumerate(prompts)]
    return EngineRun(f"vLLM {version}", token_ids, read_counters(endpoint.server) - before)
