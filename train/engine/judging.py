"""An engine as the judge of drafters: each is swapped into a running vLLM, and its own counters tell the acceptance.

Where the user gives a command for that, a vLLM or SGLang is started anew with each drafter instead. Servers beside it
run the same target and stay as they are: a plain one, named `none`, and others such as `ngram` or the target's own
`mtp`. They do not hang on the drafter, so each is measured once.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.data.http import Server
from draftsmith.inference.decoding.counters import length_interval, total_of
from draftsmith.inference.measuring.judged import JudgedResult, JudgedSetting
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import real_path
from draftsmith.models.storage.typed_json import from_json
from draftsmith.train.engine.answers import (
    MeasuredServer,
    RequestSettings,
    ServerRun,
    compare_texts,
    measured_server,
    run_on_server,
    speed_beside,
    stats_by_batch,
)
from draftsmith.train.engine.restarted import COMMAND, started_engine

ENGINE, PLAIN = "", "none"  # names of the server that takes drafters, and of the one without a drafter
METHOD = "swap_drafter"  # of the worker extension recipes/serving/vllm_swap.py
MEND = (
    "start it as serve_vllm_swappable.sh of `draftsmith export CHECKPOINT --engine vllm --swappable` does, or give in "
    f"{COMMAND} what starts it with $DRAFTER; one that serves the drafter already is measured by `draftsmith evaluate "
    "--engine URL --as-served`"
)


@dataclass
class SwapAnswer:
    """The answer at /collective_rpc: why each worker did not take the drafter; an empty text where it did."""

    results: Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(min_length=1)]


@dataclass(frozen=True)
class JudgeSettings:
    """The servers that judge, and how long their answers may get."""

    url: str  # of the engine that takes the drafters
    setting: str  # where the user gave it, such as `--engine`
    beside: dict[str, str] = field(default_factory=dict)  # name -> URL of servers that stay as they are
    max_new_tokens: int = 64
    draft_length: int | None = None  # that the engine must have; None: whatever it has
    seed: int = 0
    command: str | None = None  # that starts the engine with $DRAFTER, anew for each drafter; None: it runs
    log: Path = Path("engine.log")  # of the engines that the command starts


class EngineJudge:
    """An engine and the servers beside it. Raises `UserError` where one of them is not there or is not what it should.

    An engine that a command starts is there within `drafting_with` alone.
    """

    def __init__(self, settings: JudgeSettings, target: Target) -> None:
        self.settings, self.target = settings, target
        self._servers: dict[str, MeasuredServer] = {}
        if settings.command is None:
            self._meet(ENGINE, settings.url)
        for name, url in settings.beside.items():
            self._meet(name, url)
        self._runs: dict[tuple[str, str, int, RequestSettings], ServerRun] = {}  # of the servers beside it
        self._swap_seconds: float | None = None
        self._start_seconds: float | None = None

    def _meet(self, name: str, url: str) -> None:
        """Take in a server that runs, and check that it is what its name says."""
        setting = self.settings.setting + (f", beside it {name}" if name else "")
        endpoint = Endpoint(url, self.target, self.settings.max_new_tokens, self.settings.seed, setting)
        server = measured_server(endpoint, drafts=name != PLAIN)
        if name == ENGINE and self.settings.draft_length not in (None, server.draft_length):
            raise UserError(
                f"{server.name} drafts {server.draft_length} tokens, and the draft length is "
                f"{self.settings.draft_length}: start it with that, or give {server.draft_length}"
            )
        others = [other for known, other in self._servers.items() if known != name]
        if differing := [other for other in others if other.endpoint.is_sglang != endpoint.is_sglang]:
            raise UserError(
                f"{server.name} is {server.judge.engine}, and {differing[0].name} is {differing[0].judge.engine}: give "
                "servers of one engine, whose times compare"
            )
        self._servers[name] = server

    @property
    def engine(self) -> str:
        """The engine that takes the drafters, vllm or sglang. One that a command starts is what the command names."""
        if self.settings.command is not None:
            return "sglang" if "sglang" in self.settings.command else "vllm"
        return "sglang" if self._servers[ENGINE].endpoint.is_sglang else "vllm"

    @contextlib.contextmanager
    def drafting_with(self, drafter: Path, on_wait: Callable[[], None]) -> Iterator[None]:
        """Have the engine draft with the drafter in a folder: by a swap, or by starting it anew for this block.

        `on_wait` is called while an engine starts. Raises `UserError` where it cannot take the drafter or start.
        """
        if self.settings.command is None:
            self.swap(drafter)
            yield
            return
        server = Server(self.settings.url, self.settings.setting, f"see to what {COMMAND} starts")
        with started_engine(self.settings.command, drafter, server, self.settings.log, on_wait) as seconds:
            self._start_seconds = seconds
            self._meet(ENGINE, self.settings.url)
            started = self._servers[ENGINE]
            if started.endpoint.is_sglang != (self.engine == "sglang"):
                raise UserError(
                    f"{COMMAND} starts {started.judge.engine}, and drafters are given to it as {self.engine} loads "
                    "them: let the word sglang stand in the command where it starts an SGLang, and only there"
                )
            yield

    def swap(self, drafter: Path) -> None:
        """Let the engine take the drafter in a folder that it sees, in the layout that engines load.

        Raises `UserError` where it cannot, with the reason.
        """
        served = self._servers[ENGINE]
        if served.endpoint.is_sglang:
            raise UserError(
                f"{served.name} is an SGLang, which takes no other drafter while it runs: end it, give in {COMMAND} "
                "what starts it with $DRAFTER; one that serves the drafter already is measured by `draftsmith evaluate "
                "--engine URL --as-served`"
            )
        self._swap_seconds = swap_drafter(served.endpoint.server, drafter)

    def measure(
        self, prompts: PromptSet, loads: list[RequestSettings], on_batch: Callable[[], None]
    ) -> dict[str, list[JudgedResult]]:
        """Return a row for each load: of the drafter that the engine has now, and of those of the servers beside it.

        They stand by the names of the servers; that of the engine is `ENGINE`. Servers beside it are measured once.
        """
        if prompts.images:
            for server in self._servers.values():
                server.endpoint.check_takes_images()
        return {
            name: [self._row(name, prompts, load, on_batch) for load in loads]
            for name in self._servers
            if name != PLAIN
        }

    def _run(self, name: str, prompts: PromptSet, load: RequestSettings, on_batch: Callable[[], None]) -> ServerRun:
        key = name, prompts.name, len(prompts.token_ids), load
        if name == ENGINE or key not in self._runs:
            self._runs[key] = run_on_server(self._servers[name], prompts, load, on_batch)
        return self._runs[key]

    def _row(self, name: str, prompts: PromptSet, load: RequestSettings, on_batch: Callable[[], None]) -> JudgedResult:
        run = self._run(name, prompts, load, on_batch)
        by_batch = stats_by_batch(run, load.batch_size)
        total = total_of(by_batch)
        if name == ENGINE and not total.num_drafts:
            raise UserError(f"{self._servers[name].name} drafted nothing: give other prompts or longer answers")
        plain = self._run(PLAIN, prompts, load, on_batch) if PLAIN in self._servers else None
        texts = None
        if plain and load.sampling.greedy:
            texts = compare_texts(prompts, run.texts, self._servers[PLAIN].endpoint, plain.texts)
        setting = JudgedSetting(
            judge=self._servers[name].judge,
            prompt_set=prompts.name,
            num_prompts=len(prompts.token_ids),
            temperature=load.sampling.temperature,
            top_p=load.sampling.top_p,
            batch_size=load.batch_size,
            draft_length=total.draft_length,
            max_new_tokens=self.settings.max_new_tokens,
        )
        return JudgedResult(
            setting=setting,
            acceptance=total,
            mean_acceptance_length_ci95=length_interval(by_batch),
            speed=speed_beside(run, plain, load.repeats),
            texts=texts,
            swap_seconds=self._swap_seconds if name == ENGINE else None,
            start_seconds=self._start_seconds if name == ENGINE else None,
        )


def swap_drafter(server: Server, drafter: Path) -> float:
    """Let a running vLLM take the drafter in a folder; return the seconds that it took.

    Its prefix cache is emptied, for it holds keys of the drafter before. Raises `UserError` with the reason where it
    cannot.
    """
    start, body = time.perf_counter(), {"method": METHOD, "args": [str(real_path(drafter))]}
    try:
        reasons = from_json(SwapAnswer, server.json("/collective_rpc", body)).results
    except UserError as error:
        raise UserError(f"{server.name} takes no other drafter while it runs ({error}): {MEND}") from None
    if reason := next(filter(None, reasons), ""):
        raise UserError(
            f"{server.name} cannot take {drafter} while it runs: {reason}. Give in {COMMAND} "
            "what starts the engine anew with $DRAFTER, or start it so and give `--as-served`"
        )
    server.text("/reset_prefix_cache", {})
    return time.perf_counter() - start
