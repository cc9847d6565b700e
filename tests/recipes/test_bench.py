"""`draftsmith bench`: what is sent to a running server, and what is made of its answers."""

import json
import math
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming_server import StreamingServer

from draftsmith.data.http import Server, run_in_loop
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.models.errors import UserError
from draftsmith.models.storage.reading import read_typed
from draftsmith.recipes.bench.arrivals import Mix, planned_requests
from draftsmith.recipes.bench.client import Reply, ask, request_of
from draftsmith.recipes.bench.results import BenchLoad, BenchStage, BenchTest, Limits, percentile, stage_of
from draftsmith.recipes.bench.runner import Rival, send_all
from draftsmith.recipes.bench.server_logs import read_log
from draftsmith.recipes.bench.trace import TraceRequest, read_trace
from draftsmith.recipes.bench.verdict import difference, search_rate, search_text, verdict
from draftsmith.recipes.cli.main import main


@pytest.fixture
def start() -> Iterator[Callable[..., StreamingServer]]:
    servers: list[StreamingServer] = []

    def start_one(*arguments: Any, **settings: Any) -> StreamingServer:
        servers.append(StreamingServer(*arguments, **settings))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


# --- traces

HELLO = Prompt(text="hello")
ASKED = Prompt(messages=[{"role": "user", "content": "hi"}])
VLLM = """\
(APIServer pid=3) DEBUG 11-22 20:14:45 [request_logger.py:51] Request a details: prompt: 'it\\'s', prompt_token_ids: \
[5, 6], prompt_embeds shape: None.
(APIServer pid=3) INFO 11-22 20:14:45 [request_logger.py:66] Received request a: params: SamplingParams(n=1, \
max_tokens=16, min_tokens=0), lora_request: None.
(APIServer pid=3) DEBUG 11-22 20:14:48 [request_logger.py:51] Request b details: prompt: 'x', prompt_token_ids: None, \
prompt_embeds shape: None.
"""
VLLM_BODIES = """\
DEBUG 12-31 23:59:59 [request_logger.py:75] Request N/A JSON body: {"messages":[{"role":"user","content":"hi"}],\
"max_tokens":3}
DEBUG 12-31 23:59:59 [request_logger.py:51] Request c details: prompt: '<u>hi', prompt_token_ids: [1], \
prompt_embeds shape: None.
"""
OLD_VLLM = """\
INFO 01-02 03:04:05 [logger.py:43] Received request d: prompt: "hello", params: SamplingParams(n=1, max_tokens=9, \
x=1), prompt_token_ids: None, prompt_embeds shape: None, lora_request: None.
"""
SGLANG = """\
[2026-05-27 20:00:05 TP0] Receive: obj=GenerateReqInput(rid='r', text='hello', input_ids=None, \
sampling_params={'temperature': 0.7, 'max_new_tokens': 12}, stream=True)
[2026-05-27 20:00:06 TP0] Receive: obj=GenerateReqInput(rid='s', text='he' ... 'lo', input_ids=None, stream=True)
[2026-05-27 20:00:07 TP0] Finish: obj=GenerateReqInput(rid='r', text='hello'), out={'text': 'x'}
[2026-05-27 20:00:07 TP0] Receive: obj=GenerateReqInput(rid='t', text=None, input_ids=[4, 5], stream=True)
"""
SGLANG_OPENAI = """\
[2026-05-27 20:00:05] Receive OpenAI: obj={'messages': [{'role': 'user', 'content': 'hi'}], 'max_tokens': 4}
"""
SGLANG_JSON = """\
{"timestamp": "2026-05-27T20:00:05.5", "event": "request.received", "rid": "r", "obj": {"text": "hello", \
"input_ids": null, "sampling_params": {"max_new_tokens": 12}}}
{"timestamp": "2026-05-27T20:00:06", "event": "request.finished", "rid": "r", "obj": {"text": "hello"}}
"""


def known(prompt: Prompt | list[int] | None, seconds: float | None = None, limit: int | None = None) -> TraceRequest:
    return TraceRequest(prompt, None, limit, False, seconds)


def lengths(num_prompt_tokens: int, max_new_tokens: int, seconds: float) -> TraceRequest:
    return TraceRequest(None, num_prompt_tokens, max_new_tokens, True, seconds)


TRACES = {
    "texts": ("t.txt", "hello\n", [known(HELLO)]),
    "prompts": ("t.jsonl", '{"prompt": "hello"}\n', [known(HELLO)]),
    "OpenAI's requests": (
        "t.jsonl",
        '{"body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}, "timestamp": 12.5}\n'
        '{"prompt": "hello", "timestamp": 12}\n',
        [known(HELLO, 0.0), known(ASKED, 0.5, 5)],
    ),
    "milliseconds of an epoch": (
        "t.jsonl",
        '{"prompt": "hello", "time": 1700000000000}\n{"prompt": "hello", "time": 1700000001500}\n',
        [known(HELLO, 0.0), known(HELLO, 1.5)],
    ),
    "Mooncake": (
        "t.jsonl",
        '{"timestamp": 1000, "input_length": 70, "output_length": 5, "hash_ids": [1]}\n'
        '{"timestamp": 3500, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n',
        [lengths(70, 5, 0.0), lengths(7, 2, 2.5)],
    ),
    "Azure": (
        "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,9,1",
        [lengths(374, 44, 0.0), lengths(9, 1, 1.0)],
    ),
    "BurstGPT": (
        "t.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,47,12,59,Conversation log\n",
        [lengths(47, 12, 0.0)],
    ),
    "vLLM": ("t.log", VLLM, [known([5, 6], 0.0, 16), known(Prompt(text="x"), 3.0)]),
    "vLLM's bodies": ("t.log", VLLM_BODIES, [known(ASKED, 0.0, 3)]),
    "an old vLLM": ("t.log", OLD_VLLM, [known(HELLO, 0.0, 9)]),
    "SGLang": ("t.log", SGLANG, [known(HELLO, 0.0, 12), known([4, 5], 2.0)]),
    "SGLang's bodies": ("t.log", SGLANG_OPENAI, [known(ASKED, 0.0, 4)]),
    "SGLang in JSON": ("t.log", SGLANG_JSON, [known(HELLO, 0.0, 12)]),
}


@pytest.mark.parametrize(("name", "content", "expected"), TRACES.values(), ids=TRACES)
def test_a_trace_is_read(name: str, content: str, expected: list[TraceRequest], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert read_trace(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("times", "seconds"), [(("12-31 23:59:59", "01-01 00:00:01"), 2.0), (("02-28 23:59:59", "03-01 00:00:01"), 2.0)]
)
def test_a_log_without_years_may_cross_one(times: tuple[str, str], seconds: float, tmp_path: Path) -> None:
    """The file was last written to in 2026, which is no leap year."""
    lines = VLLM_BODIES.splitlines()
    texts = [lines[0].replace("12-31 23:59:59", at) for at in times]
    (tmp_path / "t.log").write_text("\n".join(texts) + "\n")
    written = datetime.fromisoformat("2026-03-05").timestamp()
    os.utime(tmp_path / "t.log", (written, written))
    assert [request.seconds for request in read_trace(tmp_path / "t.log")] == [0.0, seconds]


BAD_TRACES = {
    "some times": ("t.jsonl", '{"prompt": "a", "time": 1}\n{"prompt": "b"}\n', "1 of 2 requests have a time"),
    "no request": ("t.log", "INFO 11-22 20:14:45 ready\n", "holds no request with its prompt"),
    "no such day": ("t.log", VLLM.replace("11-22", "13-45"), "has the time"),
    "no time": ("t.jsonl", '{"prompt": "a", "time": "noon"}\n', "where a time is meant"),
    "endless": ("t.jsonl", '{"prompt": "a", "time": 1e999}\n', "is not JSON"),
    "no lengths": ("t.csv", "a,b\n1,2\n", "has neither a prompt"),
    "half a token": ("t.csv", "Timestamp,Request tokens,Response tokens\n1,1.5,2\n", "number of tokens"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_TRACES.values(), ids=BAD_TRACES)
def test_a_bad_trace_costs_a_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_trace(tmp_path / name)


# --- arrivals


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (VLLM.replace("n=1, ", "n=1, temperature=0.6, "), [0.6, None]),
        (OLD_VLLM.replace("n=1, ", "n=1, temperature=1.0, "), [1.0]),
        (VLLM_BODIES.replace('"max_tokens"', '"temperature":0,"max_tokens"'), [0.0]),
        (SGLANG, [0.7, None]),
        (SGLANG_OPENAI, [None]),
        (SGLANG_JSON.replace('{"max_new', '{"temperature": 1, "max_new'), [1.0]),
    ],
)
def test_a_log_tells_temperatures(content: str, expected: list[float | None], tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(content)
    assert [request.temperature for request in read_log(tmp_path / "server.log")] == expected


def mix_of(*requests: TraceRequest, prompts: tuple[Prompt, ...] = ()) -> Mix:
    return Mix(list(requests), list(prompts), 64, 0.0)


@pytest.mark.parametrize("burstiness", [1.0, 3.0])
def test_arrivals_have_their_rate_and_spread(burstiness: float) -> None:
    """Gamma gaps have mean 1 / rate and the coefficient of variation asked for; both within four standard errors."""
    count = 20_000
    planned = planned_requests(mix_of(known(HELLO)), BenchLoad("rate", 5.0, burstiness), count, seed=1)
    gaps = np.diff([request.seconds for request in planned])
    assert gaps.mean() == pytest.approx(0.2, abs=4 * 0.2 * burstiness / math.sqrt(count))
    kurtosis = 3 + 6 * burstiness**2  # of a gamma distribution with that coefficient of variation
    error = gaps.std() * math.sqrt((kurtosis - 1) / (4 * count))
    assert gaps.std() == pytest.approx(0.2 * burstiness, abs=4 * error)
    assert planned == planned_requests(mix_of(known(HELLO)), BenchLoad("rate", 5.0, burstiness), count, seed=1)


def test_a_trace_keeps_its_order_and_times() -> None:
    requests = [known(Prompt(text=str(number)), 2.0 * number) for number in range(5)]
    planned = planned_requests(mix_of(*requests), BenchLoad("trace", 4.0), 4, seed=0)
    assert [each.request.body["prompt"] for each in planned] == ["0", "1", "2", "3"]
    assert [request.seconds for request in planned] == [0.0, 0.5, 1.0, 1.5]


def test_lengths_take_the_nearest_prompts() -> None:
    prompts = tuple(Prompt(text="x" * size) for size in (10, 100, 1000))
    mix = mix_of(lengths(30, 5, 0.0), lengths(400, 500, 1.0), prompts=prompts)
    short, long = planned_requests(mix, BenchLoad("trace", 1.0), 2, seed=0, characters_a_token=3.0)
    assert len(short.request.body["prompt"]) == 100
    assert len(long.request.body["prompt"]) == 1000
    assert (short.request.body["max_tokens"], long.request.body["max_tokens"]) == (5, 64)
    assert short.request.body["ignore_eos"]


# --- requests


def reply_of(server: StreamingServer, prompt: Prompt, timeout: float = 30.0) -> Reply:
    asked = request_of(prompt, 6, 0.0, is_exact=False, seed=1)
    return run_in_loop(ask(Server(server.url, "bench", "mend", timeout), "served", asked, 0.0, 0.0))


@pytest.mark.parametrize("prompt", [HELLO, ASKED])
def test_an_answer_is_followed(prompt: Prompt, start: Callable[..., StreamingServer]) -> None:
    """Six tokens in three events: two gaps, and the server's own count of tokens."""
    server = start()
    reply = reply_of(server, prompt)
    assert (reply.num_prompt_tokens, reply.num_output_tokens, reply.failure) == (7, 6, "")
    assert len(reply.gaps) == 2
    assert reply.sent < reply.first_token < reply.finished
    assert sum(reply.gaps) == pytest.approx(reply.finished - reply.first_token)
    assert reply.tpot_ms == pytest.approx(1000 * (reply.finished - reply.first_token) / 5)
    ((path, body),) = server.asked
    assert path == ("/v1/completions" if prompt is HELLO else "/v1/chat/completions")
    assert body["model"] == "served"
    assert body["max_tokens"] == 6


@pytest.mark.parametrize(("trouble", "failure"), [(503, "HTTP 503"), ("error", "out of blocks")])
def test_a_failure_is_counted(trouble: Any, failure: str, start: Callable[..., StreamingServer]) -> None:
    server = start(trouble)
    assert failure in reply_of(server, HELLO).failure
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("trouble", "message"), [(401, "refuses: HTTP 401"), (302, "HTTP 302"), ("no usage", "how many tokens")]
)
def test_what_will_not_pass_ends_it(trouble: Any, message: str, start: Callable[..., StreamingServer]) -> None:
    with pytest.raises(UserError, match=message):
        reply_of(start(trouble), HELLO)


def test_no_more_clients_than_asked_for(start: Callable[..., StreamingServer]) -> None:
    server = start()
    rival = Rival(Server(server.url, "bench", "mend"), "served")
    planned = planned_requests(mix_of(known(HELLO)), BenchLoad("concurrency", 3), 12, seed=0)
    replies = send_all(rival, planned, BenchLoad("concurrency", 3))
    assert len(replies) == len(server.asked) == 12
    assert server.most_at_once <= 3


# --- measures

ALONE = BenchLoad("concurrency", 1)


def replies(count: int, token_ms: float, ttft_ms: float = 100.0, failing: int = 0) -> list[Reply]:
    """Return answers of eleven tokens, one behind the other."""
    found = []
    for number in range(count):
        sent = number * (ttft_ms + 10 * token_ms) / 1000
        first = sent + ttft_ms / 1000
        finished = first + 10 * token_ms / 1000
        failure = "lost" if number < failing else ""
        found.append(Reply(sent, sent, first, finished, (token_ms / 1000,) * 10, 5, 11, failure))
    return found


def stage(token_ms: list[float], load: BenchLoad = ALONE, **settings: Any) -> BenchStage:
    limits = Limits(tpot_ms=25.0)
    return stage_of("http://a", load, [replies(20, each, **settings) for each in token_ms], limits, None)


def test_what_a_stage_shows() -> None:
    """Twenty answers of eleven tokens, 100 ms to the first and 20 ms for each further: 300 ms each, 6 s a run."""
    found = stage([20.0, 20.0])
    assert found.num_requests == 40
    assert found.ttft_ms.p50 is not None
    assert found.ttft_ms.p50.value == pytest.approx(100)
    assert found.tpot_ms.p50 is not None
    assert found.tpot_ms.p50.value == pytest.approx(20)
    assert found.runs[0].seconds == pytest.approx(6)
    assert found.runs[0].output_tokens_per_second == pytest.approx(20 * 11 / 6)
    assert found.runs[0].goodput == pytest.approx(20 / 6)
    assert found.sla_share == 1
    assert found.sla_share_interval is not None
    assert found.sla_share_interval[0] == pytest.approx(40 / (40 + 1.96**2), abs=1e-3)  # Wilson's, of 40 of 40


def test_failed_and_slow_requests_keep_no_limits() -> None:
    assert stage([20.0], failing=5).sla_share == 0.75
    assert stage([30.0]).sla_share == 0
    assert stage([30.0]).runs[0].goodput == 0


def test_a_percentile_is_bounded_by_its_neighbours() -> None:
    """The interval covers the true percentile at least as often as it says; too few values bound none."""
    rng = np.random.default_rng(0)
    hits, truth = 0, -math.log(0.05)
    for _ in range(200):
        found = percentile(list(rng.exponential(size=200)), 0.95)
        assert found is not None
        assert found.interval is not None
        hits += found.interval[0] <= truth <= found.interval[1]
    assert hits >= 180  # 190 expected, and 200 * 0.95 - 3 standard errors
    few = percentile(list(rng.exponential(size=20)), 0.99)
    assert few is not None
    assert few.interval is None
    assert percentile([], 0.5) is None


def test_a_difference_and_its_verdict() -> None:
    """Three runs 2.0, 2.2 and 1.8 times as fast: Student's interval of the logarithms, by hand."""
    load = BenchLoad("rate", 2.0)
    slow, fast = stage([20.0] * 3, load), stage([10.0, 20.0 / 2.2, 20.0 / 1.8], load)
    found = difference(slow, fast)
    logs = np.log([2.0, 2.2, 1.8])
    reach = 4.302653 * logs.std(ddof=1) / math.sqrt(3)
    assert found.ratio == pytest.approx(math.exp(logs.mean()))
    assert found.interval == pytest.approx((math.exp(logs.mean() - reach), math.exp(logs.mean() + reach)))
    assert "faster at 2 requests a second: 1.99x" in verdict([found], "http://a", "http://b")
    assert "slower" in verdict([difference(fast, slow)], "http://a", "http://b")
    assert "no difference can be told" in verdict([difference(slow, slow)], "a", "b")
    assert "too few runs" in verdict([difference(stage([20.0], load), stage([10.0], load))], "a", "b")


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 55.0])
def test_the_highest_rate_is_found(capacity: float) -> None:
    """A server that keeps its limits up to a capacity: what is found is at most a tenth below it, and never above."""

    def measure(rate: float) -> BenchStage:
        runs = [replies(20, 20.0 if rate <= capacity else 30.0, ttft_ms=1000 / rate - 200)]
        return stage_of("http://a", BenchLoad("rate", rate), runs, Limits(tpot_ms=25.0), None)

    best, tried = search_rate(measure, 1.0)
    assert best is not None
    assert capacity / 1.1 <= best.load.value <= capacity
    assert "keeps the limits" in search_text(best, tried)


def test_no_rate_may_be_found() -> None:
    def measure(rate: float) -> BenchStage:
        return stage([30.0], BenchLoad("rate", rate))

    best, tried = search_rate(measure, 1.0)
    assert best is None
    assert len(tried) == 4  # an answer takes 0.4 s: at a rate of 1/8 one hardly ever meets another
    assert "does not keep the limits" in search_text(best, tried)


# --- the command


def test_the_command(start: Callable[..., StreamingServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers get the same requests, each run, and no key goes where none is set."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    plain, fast = start(), start(speculates=True)
    prompts, out = tmp_path / "p.txt", tmp_path / "out"
    prompts.write_text("hello\nworld\n")
    arguments = ["bench", plain.url, "--beside", fast.url, "--prompts", str(prompts), "--concurrency", "2"]
    arguments += ["--requests", "10", "--repeats", "3", "--max-new-tokens", "6", "--out", str(out)]
    assert main(arguments) == 0
    test = read_typed(BenchTest, out / "bench.json")
    assert [stage.server for stage in test.stages] == [plain.url, fast.url]
    assert [stage.num_requests for stage in test.stages] == [30, 30]
    assert test.stages[0].acceptance is None
    assert test.stages[1].acceptance is not None
    assert test.stages[1].acceptance.num_drafts == 300
    assert test.stages[1].acceptance.mean_acceptance_length == 2.0
    assert len(test.verdict) == 1

    def sent(server: StreamingServer) -> list[str]:
        return sorted(json.dumps(body) for _, body in server.asked)

    assert sent(plain) == sent(fast)
    assert plain.keys == [None] * len(plain.asked)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--prompts p.txt", "give --rate"),
        ("--rate 1", "give --trace FILE or --prompts"),
        ("--prompts p.txt --rate 1 --concurrency 2", "give one of --rate"),
        ("--prompts p.txt --find-rate", "needs limits"),
        ("--prompts p.txt --concurrency 2 --burstiness 2", "has no effect without --rate"),
        ("--prompts p.txt --concurrency 2 --speed 2", "--speed is of the trace's own times"),
        ("--prompts p.txt --concurrency 50 --requests 20", "at least 50"),
    ],
)
def test_mistakes_are_told(words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "http://127.0.0.1:1", *words.split(), "--out", str(tmp_path / "o")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
