"""Answers from a server: what is asked, what is refused, and what a server in trouble does to a run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer

from draftsmith.data import http
from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.answers.turns import Dialogue
from draftsmith.data.samples.folder import INDEX, read_samples
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling

SETTINGS = PrepareSettings(max_new_tokens=6, samplings=(Sampling(0.0),), batch_size=3)
NUM_PROMPTS = 12


@pytest.fixture
def make_server(tiny_target: Target) -> Iterator[Callable[..., FakeServer]]:
    servers = []

    def make(form: str = "vllm", target: Target = tiny_target) -> FakeServer:
        servers.append(FakeServer(target, form))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.002)
    monkeypatch.setattr(http, "ATTEMPTS", 4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"strike {'the iron ' * (i % 4)}{i}\n" for i in range(NUM_PROMPTS)))
    return str(path)


@pytest.fixture(scope="module")
def served(tiny_target_dir: Path) -> Target:
    return Target.without_weights(tiny_target_dir)


@pytest.fixture(scope="module")
def expected(source: str, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the decoder in the process writes."""
    out = tmp_path_factory.mktemp("expected")
    prepare(tiny_target, source, out, SETTINGS)
    return (out / INDEX).read_bytes()


def asking(server: FakeServer) -> PrepareSettings:
    return replace(SETTINGS, endpoint=server.url)


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_a_server_writes_the_same_file(
    form: str, make_server: Callable[..., FakeServer], served: Target, source: str, expected: bytes, tmp_path: Path
) -> None:
    """No text was ever tokenised again, and no more requests stood open than allowed."""
    server = make_server(form)
    prepare(served, source, tmp_path, asking(server))
    assert (tmp_path / INDEX).read_bytes() == expected
    assert 1 < server.most_at_a_time <= SETTINGS.batch_size
    assert len(server.asked) == NUM_PROMPTS


def test_everything_that_shapes_an_answer_is_sent(
    make_server: Callable[..., FakeServer], served: Target, source: str, tmp_path: Path
) -> None:
    """A server's own defaults (vLLM reads them from the model's generation_config.json) must not come in."""
    server = make_server()
    prepare(served, source, tmp_path, replace(asking(server), samplings=(Sampling(0.7, 0.9, 5),)))
    body = server.asked[0]
    asked = {key: body[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")}
    assert asked == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 6,
    }  # fmt: skip
    assert body["stop_token_ids"] == served.eos_token_ids
    assert len({body["seed"] for body in server.asked}) == NUM_PROMPTS
    sample = read_samples(tmp_path)[0]
    assert (sample.temperature, sample.top_p, sample.top_k) == (0.7, 0.9, 5)


def first_choice(answer: dict, **changes: Any) -> dict:
    return {"choices": [{**answer["choices"][0], **changes}]}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: 429,
        lambda answer: 503,
        lambda answer: {"object": "error"},
        lambda answer: {"choices": []},
        lambda answer: first_choice(answer, token_ids=None),
        lambda answer: first_choice(answer, token_ids=[]),
        lambda answer: first_choice(answer, token_ids=[10**6]),
        lambda answer: first_choice(answer, token_ids=["5"]),
        lambda answer: first_choice(answer, token_ids=[5.0]),
        lambda answer: first_choice(answer, token_ids=[-1]),
        lambda answer: first_choice(answer, finish_reason=[]),
        lambda answer: {"choices": {}},
        lambda answer: {"choices": ["text"]},
        lambda answer: first_choice(answer, token_ids=[5] * 7),
        lambda answer: first_choice(answer, prompt_token_ids=[1]),
        lambda answer: first_choice(answer, finish_reason="abort"),
    ],
)
def test_passing_trouble_leaves_no_trace(
    spoil: Callable[[dict], Any],
    make_server: Callable[..., FakeServer],
    served: Target,
    source: str,
    expected: bytes,
    tmp_path: Path,
) -> None:
    """The first answers are spoilt: they are asked for again, and neither missing nor there twice."""
    server = make_server()
    server.trouble = lambda number, answer: spoil(answer) if number <= 3 else None
    prepare(served, source, tmp_path, asking(server))
    assert (tmp_path / INDEX).read_bytes() == expected
    assert len(server.asked) == NUM_PROMPTS + 3


def test_waits_double(make_server: Callable[..., FakeServer], served: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()
    endpoint = Endpoint(server.url, served, 6)
    waits: list[float] = []
    monkeypatch.setattr(http, "FIRST_WAIT", 1.0)
    monkeypatch.setattr(http, "ATTEMPTS", 8)
    monkeypatch.setattr(endpoint.server.stopped, "wait", lambda seconds: waits.append(seconds))
    server.trouble = lambda number, answer: 500
    with pytest.raises(UserError, match="8 times in a row, at last with: HTTP 500"):
        endpoint.complete([5, 6], Sampling(), 0)
    highest = [1, 2, 4, 8, 16, 30, 30]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, highest, strict=False))


def test_a_server_that_goes_away_ends_the_run_and_another_goes_on(
    make_server: Callable[..., FakeServer], served: Target, source: str, expected: bytes, tmp_path: Path
) -> None:
    """One error that says so, nothing lost; the answers that are there are not asked for again."""
    server = make_server()
    server.trouble = lambda number, answer: 502 if number > 5 else None
    with pytest.raises(UserError, match="what is written is kept"):
        prepare(served, source, tmp_path, asking(server))
    kept = (tmp_path / "answers-0.partial").read_text().count("\n")
    assert kept == 5
    other = make_server()
    prepare(served, source, tmp_path, asking(other))
    assert (tmp_path / INDEX).read_bytes() == expected
    assert len(other.asked) == NUM_PROMPTS - kept


def test_a_server_of_less_context_goes_on(
    make_server: Callable[..., FakeServer], served: Target, source: str, tmp_path: Path
) -> None:
    """The first has answered a prompt that the second has no room for; nobody waits for as many as are left."""
    server, other = make_server(), make_server()
    server.trouble = lambda number, answer: 502 if number >= NUM_PROMPTS else None
    settings = replace(asking(server), batch_size=1, skip_long=True)
    with pytest.raises(UserError, match="what is written is kept"):
        prepare(served, source, tmp_path, settings)
    other.models = [{"id": "served", "max_model_len": 20}]
    prepare(served, source, tmp_path, replace(settings, endpoint=other.url))
    assert len(read_samples(tmp_path)) == NUM_PROMPTS - 1


def test_a_refusal_is_not_repeated(
    make_server: Callable[..., FakeServer], served: Target, source: str, tmp_path: Path
) -> None:
    server = make_server()
    server.trouble = lambda number, answer: 400
    with pytest.raises(UserError, match="HTTP 400: .*trouble"):
        prepare(served, source, tmp_path, asking(server))
    assert len(server.asked) <= SETTINGS.batch_size


def test_the_shorter_context_counts(
    make_server: Callable[..., FakeServer], served: Target, source: str, tmp_path: Path
) -> None:
    server = make_server()
    server.models = [{"id": "served", "max_model_len": 20}]
    with pytest.raises(UserError, match="context of 20"):
        prepare(served, source, tmp_path / "out", asking(server))
    assert not (tmp_path / "out").exists()


def test_unfit_servers_are_refused(make_server: Callable[..., FakeServer], tiny_target: Target, served: Target) -> None:
    """Before the first prompt, each with its mend."""

    def refused(server: FakeServer, message: str) -> None:
        with pytest.raises(UserError, match=message):
            Endpoint(server.url, served, 6)

    refused(make_server(form="text only"), "without token ids")
    two = make_server()
    two.models = [{"id": "one"}, {"id": "two"}]
    refused(two, r"serves \['one', 'two'\]")
    gone = make_server()
    gone.close()
    refused(gone, "no model server answers")
    foreign = make_server()
    foreign.target = type("Foreign", (), {"encode": staticmethod(lambda text: tiny_target.encode(text)[1:])})()
    refused(foreign, "tokenizer is not that")
    with pytest.raises(UserError, match="give http://HOST:PORT"):
        Endpoint("localhost:8000", served, 6)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        *(("vllm", told) for told in ([], 5, {"data": None}, {"data": [None]}, {"data": [{"id": 5}]})),
        *(("vllm", {"data": [{"id": "m", "max_model_len": length}]}) for length in (-1, 0, "9", 1e300, True, [])),
        ("vllm", {"data": [{"id": "m" * 10**6}, {"id": "\ud800"}]}),
        *(("odd", told) for told in ([], {"choices": 5}, {"choices": [5]}, {"choices": [{"token_ids": "abc"}]})),
        *(("odd", told) for told in ({"choices": [{"token_ids": [1], "prompt_token_ids": {}}]}, {"output_ids": [1]})),
        ("odd", {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}, "input_token_logprobs": [5]}}),
    ],
)
def test_what_no_server_should_tell_is_one_line(
    form: str, told: Any, make_server: Callable[..., FakeServer], served: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    monkeypatch.setattr(server, *(("get", lambda path: told) if form == "vllm" else ("post", lambda *_: (200, told))))
    with pytest.raises(UserError) as refused:
        Endpoint(server.url, served, 6)
    assert len(str(refused.value)) < 1000


def test_more_requests_than_threads_are_refused(
    make_server: Callable[..., FakeServer], served: Target, source: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="batch_size 100000: a server is sent up to 1024"):
        prepare(served, source, tmp_path, replace(asking(make_server()), batch_size=100_000))


def test_a_panic_in_a_thread_is_raised(make_server: Callable[..., FakeServer], served: Target) -> None:
    """The Rust tokenizers panic with what is no `Exception`; whoever waits for the answers learns of it."""

    class PanicException(BaseException):
        """A stand-in for what pyo3 raises where Rust panics."""

    def dialogues() -> Iterator[Dialogue]:
        raise PanicException("index out of bounds")
        yield

    with pytest.raises(PanicException):
        list(Endpoint(make_server().url, served, 6).answers(dialogues(), 1))


def test_other_ends_of_text_are_refused(
    make_server: Callable[..., FakeServer], served: Target, source: str, tmp_path: Path
) -> None:
    """Answers would be cut where the target goes on."""
    server = make_server()
    server.trouble = lambda number, answer: first_choice(answer, finish_reason="stop", token_ids=[5, 6])
    with pytest.raises(UserError, match="ends texts at token 6"):
        prepare(served, source, tmp_path, asking(server))
