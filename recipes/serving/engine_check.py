"""The outside witness: a real engine serves target and drafter on held-out prompts, and its counters stand beside ours.

The engine is an environment that has vLLM (`vllm_server.py` runs under its interpreter), or a vLLM that is running.
"""

import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.decoder import OutputStats
from draftsmith.inference.measuring.lossless import compare_outputs
from draftsmith.inference.measuring.results import LosslessCheck
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.typed_json import to_json
from draftsmith.recipes.serving import watch
from draftsmith.recipes.serving.engine_speed import EngineSpeed, TimedRequest, engine_speed
from draftsmith.recipes.serving.watch import Counters

SERVER = Path(__file__).with_name("vllm_server.py")
REQUEST_TIMEOUT = 300.0  # seconds
TOLERANCE = 0.02  # largest relative difference of mean acceptance lengths that counts as agreement
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",  # modules of this folder are not what vLLM means by their names
}
OUR_BATCH_SIZE = 16
LOGGED = re.compile(r"(\(\w+ pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?(.*)")  # process, what it says
ERROR = re.compile(r"[\w.]*(?:Error|Exception)(?:: |$)")
WRAPPED = "root cause"  # what errors say that only point to another one
PYDANTIC = re.compile(r"\d+ validation errors? for ")


@dataclass
class EngineRun:
    """What an engine generated for the prompts, and what it counted meanwhile."""

    version: str
    token_ids: list[list[int]]
    counters: Counters
    timed: list[TimedRequest] = field(default_factory=list)  # the prompts again, one by one; none from an address


@dataclass
class EngineReport:
    """One drafter on an engine beside ourselves: the same prompts, temperature 0."""

    kind: str
    draft_length: int
    stats: OutputStats  # ours
    engine: EngineRun
    texts: LosslessCheck  # the engine's texts against ours
    speed: EngineSpeed | None = None  # with the drafter against without it; None: not timed

    @property
    def num_prompts(self) -> int:
        return len(self.stats.requests)

    @property
    def ours(self) -> Stats:
        return self.stats.total

    @property
    def relative_difference(self) -> float:
        """Of the mean acceptance lengths."""
        return abs(self.engine.counters.mean_acceptance_length / self.ours.mean_acceptance_length - 1)

    @property
    def agrees(self) -> bool:
        return self.relative_difference <= TOLERANCE and self.texts.divergences == 0

    def row(self) -> dict[str, Any]:
        """For engine_check.json and tables."""
        counters = self.engine.counters
        return {
            "engine": self.engine.version,
            "drafter_kind": self.kind,
            "draft_length": self.draft_length,
            "num_prompts": self.num_prompts,
            "ours": {
                "num_drafts": self.ours.num_drafts,
                "num_accepted_tokens": self.ours.num_accepted_tokens,
                "mean_acceptance_length": self.ours.mean_acceptance_length,
                "per_position_acceptance_rates": self.ours.per_position_acceptance_rates,
            },
            "theirs": {
                "num_drafts": counters.num_drafts,
                "num_accepted_tokens": counters.num_accepted_tokens,
                "mean_acceptance_length": counters.mean_acceptance_length,
                "per_position_acceptance_rates": counters.per_position_acceptance_rates,
            },
            "relative_difference": self.relative_difference,
            "texts": to_json(self.texts),
            "agrees": self.agrees,
            "speed": None if self.speed is None else self.speed.as_dict(),
        }


def check_engine(
    engine: str,
    settings: dict[str, Any],
    drafter: Drafter,
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
) -> EngineReport:
    """Decode the prompts greedily with the engine and ourselves.

    `engine`: the folder of an environment with vLLM, or the address of a running one (http://...), which must serve
    this target with this drafter, and nobody else meanwhile. `settings`: vLLM's speculative config, which a running
    one has already. Raises `UserError` where the engine cannot be reached or refuses.
    """
    draft_length = settings["num_speculative_tokens"]
    output = SpeculativeDecoder(target, drafter).generate(
        prompts, max_new_tokens, draft_length=draft_length, batch_size=OUR_BATCH_SIZE
    )
    if engine.startswith("http"):
        run = run_endpoint(engine, prompts, max_new_tokens)
    else:
        run = run_venv(Path(engine), settings, target, prompts, max_new_tokens)
    if not run.counters.num_drafts:
        raise UserError(f"{engine} drafted nothing: it does not serve with this drafter")
    texts = compare_outputs(target, prompts, output.token_ids, run.token_ids)
    return EngineReport(drafter.kind, draft_length, output.stats, run, texts)


def add_speed(
    report: EngineReport, venv: Path, target: Target, prompts: list[list[int]], max_new_tokens: int
) -> EngineReport:
    """Decode the prompts without the drafter too, for what it was worth; `report` is of that environment."""
    plain = run_venv(venv, None, target, prompts, max_new_tokens)
    return replace(report, speed=engine_speed(plain.timed, report.engine.timed, report.stats))


def run_venv(
    venv: Path,
    settings: dict[str, Any] | None,
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
    plugins: Path | None = None,
) -> EngineRun:
    """Decode with the vLLM of an environment, in the target's precision. `settings` None: without a drafter.

    All prompts at once, which is counted, then each of them alone, which is timed. `plugins`: a folder from which
    vLLM imports what the settings name.
    """
    python = venv / "bin" / "python"
    if not python.is_file():
        raise UserError(f"--check {venv}: no bin/python there: give an environment with vLLM, or an http address")
    longest = max(map(len, prompts)) + max_new_tokens + 16
    job = {
        "llm": {
            "model": str(Path(target.name).resolve()) if Path(target.name).is_dir() else target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_model_len": min(longest, target.context),
            "enforce_eager": True,
            "seed": 0,
            "speculative_config": settings,
        },
        "sampling": {"temperature": 0.0, "max_tokens": max_new_tokens},
        "prompts": prompts,
    }
    # PYTHONPATH is for our interpreter; the rest may be needed to find compilers and devices
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if plugins:
        environment["PYTHONPATH"] = str(plugins.resolve())
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(job))
        process = subprocess.run(
            [str(python), str(SERVER), str(asked), str(answer)],
            env={**ENVIRONMENT, **environment},
            capture_output=True,
            text=True,
        )
        if process.returncode:
            raise UserError(f"vLLM in {venv} failed: {root_cause(process.stdout, process.stderr)}")
        result = json.loads(answer.read_text())
    timed = [TimedRequest(**one) for one in result["timed"]]
    return EngineRun(f"vLLM {result['version']}", result["token_ids"], counters_of(result["counters"]), timed)


def counters_of(found: dict[str, Any]) -> Counters:
    """From the names of `llm.get_metrics()`."""
    return Counters(
        found.get("num_drafts", 0),
        found.get("num_draft_tokens", 0),
        found.get("num_accepted_tokens", 0),
        tuple(found.get("num_accepted_tokens_per_pos") or ()),
    )


def root_cause(stdout: str, stderr: str) -> str:
    """The error that a failed vLLM died of, in one line.

    Its processes log their tracebacks to stdout, the one that fails first; those that wait for it then raise errors
    of their own, in the end that of the main process on stderr. An error of the settings stands on stderr alone.
    """
    for text in (stdout, stderr):
        errors: dict[str, str] = {}  # process -> the last error that it logged
        lines = text.splitlines()
        for number, line in enumerate(lines):
            match = LOGGED.fullmatch(line)
            assert match is not None
            process, message = match.groups(default="")
            if ERROR.match(message) and WRAPPED not in message:
                if PYDANTIC.search(message):  # says what is wrong on the next line
                    message = f"{message}: {''.join(lines[number + 1 : number + 2]).strip()}"
                errors[process] = message
        if errors:
            return next(iter(errors.values()))
    return (stdout + stderr).strip().rpartition("\n")[2] or "no message"


def run_endpoint(url: str, prompts: list[list[int]], max_new_tokens: int) -> EngineRun:
    """Send the prompts, one by one, to a running vLLM; what it counted is the difference of two readings."""
    server = watch.vllm_at(url, REQUEST_TIMEOUT)
    before = watch.read_counters(server)
    request = {"max_tokens": max_new_tokens, "temperature": 0, "return_token_ids": True}
    try:
        request["model"] = server.json("/v1/models")["data"][0]["id"]
        answers = [server.json("/v1/completions", {**request, "prompt": prompt}) for prompt in prompts]
        token_ids = [answer["choices"][0]["token_ids"] for answer in answers]
        version = server.json("/version").get("version", "unknown")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"{server.name} answers as no vLLM does ({type(error).__name__}: {error}): {server.mend}"
        ) from None
    return EngineRun(f"vLLM {version}", token_ids, watch.read_counters(server) - before)


def print_reports(reports: list[EngineReport], console: Console) -> None:
    """One line a drafter: their counters, ours, and what became of the texts."""
    table = Table("drafter", "K", "drafts", "accepted", "acceptance length", "difference", "texts", box=None)
    for report in reports:
        ours, theirs, texts = report.ours, report.engine.counters, report.texts
        ties = f", {texts.near_tie_divergences} near-ties" if texts.near_tie_divergences else ""
        table.add_row(
            report.kind,
            str(report.draft_length),
            f"{theirs.num_drafts} / {ours.num_drafts}",
            f"{theirs.num_accepted_tokens} / {ours.num_accepted_tokens}",
            f"{theirs.mean_acceptance_length:.3f} / {ours.mean_acceptance_length:.3f}",
            f"{report.relative_difference:.2%}",
            f"{texts.identical}/{texts.checked} identical{ties}",
        )
    if reports:
        console.print(f"{reports[0].engine.version} / draftsmith, {reports[0].num_prompts} prompts, temperature 0")
        console.print(table)
    for report in reports:
        if report.speed:
            console.print(f"{report.kind}, {report.speed.text()}", soft_wrap=True, highlight=False)
