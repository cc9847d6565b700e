"""The settings of the commands for a running server, as those in command_settings.py."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import (
    BatchSize,
    Count,
    Depth,
    FilePath,
    Name,
    Number,
    Positive,
    Seed,
    Temperature,
    TwoOrMore,
)
from draftsmith.recipes.configs.command_settings import (
    DECODING,
    INPUT,
    MEASURING,
    OUTPUT,
    SAMPLED,
    TRAFFIC,
    Rate,
    Requests,
    Settings,
    check_address,
    option,
)

Port = Annotated[Count, Field(le=65535)]
Repeats = Annotated[Count, Field(ge=3)]  # fewer have no interval


@dataclass(frozen=True, kw_only=True)
class OfTraffic(Settings):
    """The user's own traffic, which is sent to a server."""

    trace: FilePath | None = option(INPUT, "requests with their times, docs/bench.md", None, "FILE")
    prompts: Name | None = option(INPUT, "file, folder or Hub NAME:COLUMN", None, "P")
    max_new_tokens: Count = option(DECODING, "longest answer, in tokens", 256, "N")
    temperature: Temperature = option(DECODING, SAMPLED, 0.0, "X")
    seed: Seed = option(DECODING, "another seed draws other requests", 0, "N")
    concurrency: tuple[BatchSize, ...] = option(TRAFFIC, "clients that ask at once, a stage each", (), "N")
    requests: Requests = option(TRAFFIC, "of each run: more narrows intervals", 50, "N")
    timeout: Annotated[Number, Field(ge=0.1)] = option(
        MEASURING, "seconds until an answer counts as failed", 120.0, "X"
    )
    out: FilePath = option(OUTPUT, "folder to write", metavar="DIR")

    def refuse_mistakes(self) -> None:
        if self.trace is None and self.prompts is None:
            raise UserError("give --trace FILE or --prompts P: what to send")
        most = max(self.concurrency, default=0)
        if self.requests < most:
            raise UserError(f"--requests {self.requests}: give at least {most}, one for each client")
        super().refuse_mistakes()


@dataclass(frozen=True, kw_only=True)
class BenchSettings(OfTraffic):
    """Put a running server under your own traffic, or two of them in turns.

    example:
      draftsmith bench http://localhost:8000 --beside http://localhost:8001 \\
        --trace vllm.log --concurrency 1 4 16 --out runs/bench
    """

    url: Name = option(INPUT, "vLLM, SGLang or another OpenAI server", metavar="URL", positional=True)
    beside: Name | None = option(INPUT, "another one, compared with the first", None, "URL")
    model: Name | None = option(INPUT, "name that the server knows (its first)", None, "NAME")
    rate: tuple[Rate, ...] = option(TRAFFIC, "requests a second, a stage each: an open test", (), "R")
    find_rate: bool = option(TRAFFIC, "search the highest rate within the limits", False)
    burstiness: Positive = option(TRAFFIC, "spread of arrivals at a --rate: 1 is Poisson, 3 bursts", 1.0, "CV")
    speed: Positive = option(TRAFFIC, "times the speed of the trace's own arrivals", 1.0, "X")
    repeats: Count = option(MEASURING, "runs of each stage and server", 3, "N")
    sla_ttft_ms: Positive | None = option(MEASURING, "latest first token of 95 % of requests", None, "MS")
    sla_tpot_ms: Positive | None = option(MEASURING, "longest later token of 95 % of requests", None, "MS")
    sla_e2e_ms: Positive | None = option(MEASURING, "longest whole answer of 95 % of requests", None, "MS")

    def refuse_mistakes(self) -> None:
        check_address(self.url, "bench")
        if self.beside:
            check_address(self.beside, "--beside")
        loads = [bool(self.rate), bool(self.concurrency), self.find_rate]
        if sum(loads) > 1:
            raise UserError(
                "give one of --rate, --concurrency and --find-rate; none replays the trace at its own times"
            )
        if not any(loads) and self.trace is None:
            raise UserError("give --rate (requests a second), --concurrency (requests at once) or --find-rate")
        if self.find_rate and not (self.sla_ttft_ms or self.sla_tpot_ms or self.sla_e2e_ms):
            raise UserError(
                "--find-rate needs limits to find the rate for: give --sla-ttft-ms, --sla-tpot-ms or --sla-e2e-ms"
            )
        if self.burstiness != 1 and not self.rate:
            raise UserError("--burstiness has no effect without --rate: leave it out")
        if self.speed != 1 and any(loads):
            raise UserError("--speed is of the trace's own times: leave out --rate, --concurrency and --find-rate")
        super().refuse_mistakes()


@dataclass(frozen=True, kw_only=True)
class TuneServerSettings(OfTraffic):
    """Find the draft length that a real vLLM serves your traffic fastest with.

    example:
      draftsmith tune-server /opt/vllm --target MODEL --drafter runs/my/best \\
        --prompts prompts.jsonl --concurrency 1 4 16 --out runs/served
    """

    venv: FilePath = option(INPUT, "virtual environment that has vLLM", metavar="VENV", positional=True)
    target: Name = option(INPUT, "Hub name or directory", metavar="T")
    drafter: Name = option(INPUT, "checkpoint, ngram or suffix", metavar="D")
    vllm: Name | None = option(INPUT, "more options of vLLM, in quotes", None, "WORDS")
    draft_length: Depth | None = option(DECODING, "longest to try (6, lookups 8)", None, "K")
    max_new_tokens: TwoOrMore = option(DECODING, "longest answer, in tokens", 256, "N")
    concurrency: tuple[BatchSize, ...] = option(TRAFFIC, "clients that ask at once, a stage each", (1,), "N")
    repeats: Repeats = option(MEASURING, "runs of each stage", 5, "N")

    @property
    def vllm_options(self) -> list[str]:
        """The words of the user's that each vLLM is started with."""
        return shlex.split(self.vllm or "")

    @property
    def python(self) -> Path:
        """The interpreter that has vLLM."""
        return self.venv / "bin" / "python"

    def refuse_mistakes(self) -> None:
        if not self.python.is_file():
            raise UserError(f"{self.venv}: no bin/python there: give a virtual environment with vLLM")
        try:
            words = self.vllm_options
        except ValueError as error:
            raise UserError(f"--vllm {self.vllm}: {error}: close its quotes") from None
        own = {"--model", "--host", "--port", "--speculative-config"}
        if taken := sorted(own & {word.partition("=")[0] for word in words}):
            raise UserError(f"--vllm: {taken[0]} is set by tune-server: leave it out")
        super().refuse_mistakes()


@dataclass(frozen=True, kw_only=True)
class WatchSettings(Settings):
    """Show acceptance and latency of running servers, beside what was measured at export and before.

    example:
      draftsmith watch http://localhost:8000 --against exported --history watch.db --page watch.html
    """

    url: tuple[Name, ...] = option(INPUT, "such as http://localhost:8000", metavar="URL", positional=True)
    against: FilePath | None = option(INPUT, "exported folder with its evaluation.json", None, "DIR")
    history: FilePath | None = option(INPUT, "database of what was read, which goes on", None, "FILE")
    interval: Annotated[Number, Field(ge=0.1)] = option(INPUT, "seconds between readings", 30.0, "X")
    readings: Count | None = option(INPUT, "stop after so many (never)", None, "N")
    page: FilePath | None = option(OUTPUT, "page that loads itself anew", None, "FILE")
    webhook: Name | None = option(OUTPUT, "address that gets alerts as JSON", None, "URL")
    listen: Port | None = option(OUTPUT, "port of gauges for Prometheus, on this machine", None, "PORT")

    def refuse_mistakes(self) -> None:
        for url in self.url:
            check_address(url, "watch")
        if len(set(self.url)) < len(self.url):
            raise UserError("watch: give each server once")
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise UserError("--webhook: give its whole address, which begins with https://")
        super().refuse_mistakes()
