"""Acceptance read from a metrics page: counters of vLLM's names, differences of readings, and what they mean."""

import http.server
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reports import result, write_results
from rich.console import Console
from torch.distributed.elastic.utils.distributed import get_free_port

from draftsmith.models.errors import UserError
from draftsmith.recipes.configs.server_settings import WatchSettings
from draftsmith.recipes.watching import alerts
from draftsmith.recipes.watching.change import ChangeTest
from draftsmith.recipes.watching.history import History
from draftsmith.recipes.watching.readings import Latency, Reading, parse_page
from draftsmith.recipes.watching.reference import Reference, judgement, read_reference
from draftsmith.recipes.watching.watch import AcceptanceFell, Pool, run
from draftsmith.train.engine.vllm_counters import Counters, parse_metrics

LABELS = 'engine="{engine}",model_name="tiny, \\"quoted\\""'


def page(num_drafts: int, accepted: tuple[int, ...], engine: int = 0) -> str:
    """As vLLM 0.32.0 prints it, beside other metrics."""
    labels = LABELS.replace("{engine}", str(engine))
    total = sum(accepted)
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(num_drafts)}",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(num_drafts * len(accepted))}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(total)}",
        f"vllm:num_requests_running{{{labels}}} 3.0",
    ]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{{labels},position="{i}"}} {float(count)}' for i, count in enumerate(accepted)]
    return "\n".join(lines) + "\n"


def test_counters_of_a_page() -> None:
    found = parse_metrics(page(100, (60, 30)))
    assert found == Counters(100, 200, 90, (60, 30))
    assert found.mean_acceptance_length == 1.9
    assert found.per_position_acceptance_rates == [0.6, 0.3]


def test_standard_error_is_that_of_the_drafts() -> None:
    """40 drafts with none accepted, 30 with one, 30 with two: the mean of a has this spread."""
    accepted = [0] * 40 + [1] * 30 + [2] * 30
    mean = sum(accepted) / 100
    variance = sum((a - mean) ** 2 for a in accepted) / 100
    assert parse_metrics(page(100, (60, 30))).standard_error == pytest.approx((variance / 100) ** 0.5)


def test_engines_of_one_server_are_summed() -> None:
    assert parse_metrics(page(100, (60, 30)) + page(10, (5, 1), engine=1)) == Counters(110, 220, 96, (65, 31))


def test_server_without_speculation() -> None:
    with pytest.raises(UserError, match="counts no drafts"):
        parse_metrics("vllm:num_requests_running 0.0\n")


@pytest.mark.parametrize(
    "changed",
    [
        page(10, (5,)).replace('position="0"', f'position="{position}"')
        for position in ("200000000", "-1", "1.5", "", "\u00b2", "9" * 5000)
    ]
    + [page(10, (5,)).replace("10.0", value) for value in ("-10", "NaN", "+Inf", "1e300", "1.5", "9" * 5000, "x", "")]
    + [
        page(10, (5,)).replace("quoted", "\\\\" * 1000),
        page(10, (5,)) * 10_000,
        page(10, (20,)),
        "vllm:spec_decode_num_drafts_total{",
        "vllm:spec_decode_num_drafts_total",
        "<html>",
        "",
    ],
)
def test_a_page_that_cannot_be_is_one_line(changed: str) -> None:
    start = time.perf_counter()
    with pytest.raises(UserError) as refused:
        parse_metrics(changed)
    assert time.perf_counter() - start < 5
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("earlier", "now", "anew"),
    [
        (page(100, (60, 30)), page(101, (60, 30)), False),
        (page(0, ()), page(10, (6, 3)), False),
        (page(100, (60, 30)), page(99, (60, 30)), True),
        (page(100, (60, 30)), page(100, (60, 29)), True),
        (page(100, (60, 30)), page(200, (60, 30, 9)), True),
        (page(100, (60, 30)), page(300, (90,)), True),
        (page(100, (60, 30)), page(200, (90, 40)).replace("1.7e+09", "1.8e+09"), True),
    ],
)
def test_a_server_that_was_started_anew(earlier: str, now: str, anew: bool) -> None:
    """Fewer of anything, other positions, or a later time of birth; then everything is new."""
    found = parse_metrics(now)
    assert found.started_since(parse_metrics(earlier)) == anew
    assert (found - parse_metrics(earlier) == found) == (anew or not parse_metrics(earlier).num_drafts)


def test_difference_of_readings() -> None:
    earlier, now = parse_metrics(page(100, (60, 30))), parse_metrics(page(150, (90, 40)))
    assert now - earlier == Counters(50, 100, 40, (30, 10))
    assert earlier - now == earlier  # the server was started anew: everything is new


@pytest.mark.parametrize(
    ("num_drafts", "accepted", "said"),
    [
        (1000, (600, 300), "as measured"),
        (1000, (610, 310), "as measured"),
        (1000, (400, 100), "retrain"),
        (1000, (560, 255), "slightly below"),
        (1000, (700, 400), "better than measured"),
        (100, (10, 0), "too few to judge"),
    ],
)
def test_judgement(num_drafts: int, accepted: tuple[int, ...], said: str) -> None:
    """Beyond chance (two standard errors), and by a tenth of the tokens that drafting gains."""
    assert said in judgement(parse_metrics(page(num_drafts, accepted)), Reference([0.6, 0.3], 0.0, 0.0))


def test_the_reference_is_uncertain_too() -> None:
    """From six prompts it was 2.00 [1.35, 2.65], and traffic of 1.70 was called a reason to retrain."""
    traffic = Counters(5000, 10_000, 3500, (2500, 1000))
    assert traffic.mean_acceptance_length == 1.7
    sure, unsure = Reference([0.7, 0.3], 0.0, 0.01), Reference([0.7, 0.3], 0.0, (2.65 - 1.35) / 2 / 1.96)
    assert "retrain" in judgement(traffic, sure)
    assert judgement(traffic, unsure).startswith("as measured, as far as its reference of +- 0.66 tells")


@pytest.mark.parametrize(("interval", "error"), [([2.0, 2.4], 0.4 / 2 / 1.96), (None, None)])
def test_the_error_of_a_reference(interval: list[float] | None, error: float | None, tmp_path: Path) -> None:
    """The error is that of its prompts; without an interval over them, that of a thousand independent drafts."""
    row = {**result(0.6, 1.0), "mean_acceptance_length_ci95": interval}
    write_results(tmp_path / "evaluation.json", [row])
    lengths = [n for n, rounds in enumerate(row["acceptance_histogram"]) for _ in range(rounds)]
    expected = error or float(np.std(lengths)) / len(lengths) ** 0.5
    assert read_reference(tmp_path, 4).standard_error == pytest.approx(expected, rel=1e-3)


RATES = [0.6, 0.4, 0.25, 0.15]


def under_schedule(num_drafts: dict[int, int], rates: list[float]) -> Counters:
    """Return what a server counts after so many drafts of each length, accepted at the rates of the positions."""
    accepted = [rate * sum(n for length, n in num_drafts.items() if length > i) for i, rate in enumerate(rates)]
    drafted = sum(length * n for length, n in num_drafts.items())
    return Counters(sum(num_drafts.values()), drafted, round(sum(accepted)), tuple(map(round, accepted)))


@pytest.mark.parametrize(
    "num_drafts",
    [{1: 10_000}, {4: 10_000}, {2: 10_000}, {3: 5_000, 2: 5_000}, {1: 5_000, 4: 5_000}, {1: 3000, 2: 4000, 4: 3000}],
)
def test_server_with_a_schedule(num_drafts: dict[int, int]) -> None:
    """Fewer tokens drafted under load are no loss of acceptance; fewer accepted of those drafted are."""
    reference = Reference(RATES, 0.0, 0.0)
    found = under_schedule(num_drafts, RATES)
    low, high = reference.range_at(found.mean_draft_length)
    assert low - 1e-3 <= found.mean_acceptance_length <= high + 1e-3
    assert judgement(found, reference) == "as measured"
    assert "retrain" in judgement(under_schedule(num_drafts, [0.7 * rate for rate in RATES]), reference)
    assert "better" in judgement(under_schedule(num_drafts, [1.4 * rate for rate in RATES]), reference)


def test_what_is_as_measured_for_the_tokens_drafted() -> None:
    """By hand: 2.5 tokens are 2 and 3 in equal parts at best; at worst 1 and 4."""
    reference = Reference(RATES, 0.0, 0.0)
    assert reference.range_at(4) == pytest.approx((2.4, 2.4))
    assert reference.range_at(1) == pytest.approx((1.6, 1.6))
    assert reference.range_at(2.5) == pytest.approx((1 + (0.6 + 1.4) / 2, 1 + (1.0 + 1.25) / 2))
    assert Reference([0.6], 0.0, 0.0).range_at(1) == pytest.approx((1.6, 1.6))


def write_evaluation(folder: Path) -> None:
    """Two temperatures; at 0 the first positions are accepted at 0.6 and 0.3."""
    rows = [result(0.5, 1.0, temperature=1.0), result(0.6, 1.0)]
    rows[1]["acceptance_histogram"] = [400, 300, 100, 100, 100]
    write_results(folder / "evaluation.json", rows)


def test_reference_is_cut_to_the_servers_draft_length(tmp_path: Path) -> None:
    """1 + the rates of the first K positions is the acceptance length at K, as vLLM defines it. Greedy comes first."""
    write_evaluation(tmp_path)
    reference = read_reference(tmp_path, 2)
    assert (reference.per_position_acceptance_rates, reference.temperature) == ([0.6, 0.3], 0.0)
    with pytest.raises(UserError, match="nothing was measured there with 5"):
        read_reference(tmp_path, 5)
    with pytest.raises(UserError, match="holds no evaluation.json"):
        read_reference(tmp_path / "other", 2)


Pages = tuple[str, list[str]]


@pytest.fixture
def make_server() -> Iterator[Callable[[], Pages]]:
    """Call it for a server that gives pages in turn, the last one for ever."""
    running = []

    def made() -> Pages:
        pages: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/metrics"
                body = (pages.pop(0) if len(pages) > 1 else pages[0]).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        running.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}", pages

    yield made
    for one in running:
        one.shutdown()
        one.server_close()


@pytest.fixture
def server(make_server: Callable[[], Pages]) -> Pages:
    return make_server()


def watch(url: str, readings: int, console: Console | None = None, **settings: Any) -> str:
    """Return what is printed of so many looks."""
    console = console or Console(record=True, width=200)
    urls = (url,) if isinstance(url, str) else url
    run(WatchSettings(url=urls, interval=0.1, readings=readings, **settings), console)
    return console.export_text()


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.recipes.watching.watch.time.sleep", lambda seconds: None)


def test_watch(server: Pages, tmp_path: Path) -> None:
    """Traffic that costs more than it may ends in an exit code of its own."""
    write_evaluation(tmp_path)
    url, pages = server
    pages += [page(1000, (600, 300)), page(2000, (900, 350)), page(2000, (900, 350))]
    console = Console(record=True, width=200)
    with pytest.raises(AcceptanceFell, match="retrain: this traffic") as fell:
        watch(url, 2, console, against=tmp_path)
    assert fell.value.exit_code == 3
    text = console.export_text()
    first, second, third = text.split("\n  measured 1.90 at temperature 0, drift ")[0:3]
    assert first.startswith("since its start: acceptance length 1.90")
    assert second.startswith("+0.00: as measured")
    assert "acceptance length 1.35" in second  # of the 1000 drafts since
    assert third.startswith("-0.55: retrain")
    assert text.count("ALERT  retrain") == 1
    assert "no drafts" in third


def test_watch_goes_on(server: Pages, tmp_path: Path) -> None:
    """While the server is away, and when it is back with another draft length, after what it counted before."""
    write_evaluation(tmp_path)
    url, pages = server
    pages += [page(1000, (600, 300)), "no page", page(99, (50, 40, 30, 20, 10))]
    pages += [page(500, (250, 160, 120)), page(700, (370, 220, 160))]
    text = watch(url, 4, against=tmp_path)
    _, away, longer, anew, later = [line for line in text.splitlines() if line[:1].isdigit() or "since" in line]
    assert "the server counts no drafts" in away
    assert "nothing was measured there with 5 or more draft tokens" in longer
    assert "the server was started anew; acceptance length 2.06" in anew
    assert "(500 drafts of 3.0 tokens)" in anew
    assert "(200 drafts of 3.0 tokens)" in later
    with pytest.raises(UserError, match="holds no evaluation.json"):
        watch(url, 1, against=tmp_path / "other")


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:9", "no model server answers there"), ("localhost:9", "no URL: give http://")],
)
def test_no_server(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        watch(url, 1)


LATENCIES = """
vllm:time_to_first_token_seconds_bucket{le="0.1"} 3
vllm:time_to_first_token_seconds_sum{engine="0"} 4.0
vllm:time_to_first_token_seconds_count{engine="0"} 20
vllm:inter_token_latency_seconds_sum{engine="0"} 6.0
vllm:inter_token_latency_seconds_count{engine="0"} 400
vllm:request_time_per_output_token_seconds_sum{engine="0"} 0.1
vllm:request_time_per_output_token_seconds_count{engine="0"} 20
"""
OF_SGLANG = """
sglang:spec_accept_length{model_name="tiny"} 2.5
sglang:num_running_reqs{model_name="tiny"} 4
sglang:time_to_first_token_seconds_sum{model_name="tiny"} 1.0
sglang:time_to_first_token_seconds_count{model_name="tiny"} 10
"""


def test_latencies_of_a_page() -> None:
    """Engines are summed, and differences of two pages are what was waited between them.

    A step brings several tokens: a token takes less than from one step to the next.
    """
    earlier = parse_page(page(100, (60, 30)) + LATENCIES, 0.0)
    assert (earlier.ttft.milliseconds, earlier.tpot.milliseconds, earlier.running) == (200.0, 5.0, 3.0)
    later = parse_page(
        page(200, (60, 30)) + LATENCIES.replace("4.0", "5.0").replace('0"} 20\nvllm:inter', '0"} 30\nvllm:inter'), 1.0
    )
    assert later.since(earlier).ttft == Latency(1.0, 10)
    assert later.since(earlier).tpot.milliseconds is None
    assert earlier.since(later).ttft == earlier.ttft  # the server was started anew


def test_an_sglang_tells_a_mean(server: Pages) -> None:
    url, pages = server
    pages += [OF_SGLANG]
    text = watch(url, 1)
    assert "acceptance length 2.50, as the server tells it of its newest batches  TTFT 100.0 ms" in text
    assert parse_page(OF_SGLANG, 0.0).running == 4


def test_the_means_of_an_sglangs_ranks_are_averaged_once_they_have_counted() -> None:
    """A rank that has just been started tells 0, of no batches."""
    row = 'sglang:spec_accept_length{{dp_rank="{}"}} {}\n'
    told = {rank: row.format(rank, length) for rank, length in enumerate((2.0, 3.0, 0.0))}
    assert parse_page(told[0] + told[1] + told[2], 0.0).acceptance_length == 2.5
    assert parse_page(told[2], 0.0).acceptance_length is None


@pytest.mark.parametrize("value", ["NaN", "-1", "x", "+Inf"])
def test_a_page_with_latencies_that_cannot_be(value: str) -> None:
    with pytest.raises(UserError, match="is no page of a server's metrics"):
        parse_page(page(100, (60, 30)) + LATENCIES.replace("4.0", value), 0.0)


# --- changes


def readings_of(rate: float, number: int, chances: np.random.Generator) -> list[Counters]:
    accepted = [int(chances.binomial(1000, rate)) for _ in range(number)]
    return [Counters(1000, 1000, count, (count,)) for count in accepted]


def first_change(counters: list[Counters]) -> tuple[int, float, float] | None:
    test = ChangeTest()
    for number, one in enumerate(counters):
        if change := test.add(float(number), one.mean_acceptance_length, one.standard_error):
            return number, change.before, change.after
    return None


def test_a_fall_is_found_soon_and_told() -> None:
    """From 0.6 to 0.54 of the drafts: 3.9 standard errors of a look; the time and both levels are told."""
    chances = np.random.default_rng(0)
    found = first_change(readings_of(0.6, 500, chances) + readings_of(0.54, 50, chances))
    assert found is not None
    number, before, after = found
    assert 500 <= number < 512
    assert before == pytest.approx(1.6, abs=0.01)
    assert after == pytest.approx(1.54, abs=0.02)


def test_steady_traffic_gives_no_alarm() -> None:
    """Ten days of looks, whose number of drafts changes tenfold over the day; a rise is none either."""
    chances = np.random.default_rng(1)
    drafts = (1100 + 1000 * np.sin(np.arange(14_400) / 230)).astype(int)
    counters = [
        Counters(n, n, a, (a,)) for n, a in zip(drafts.tolist(), chances.binomial(drafts, 0.6).tolist(), strict=True)
    ]
    assert first_change(counters) is None
    assert first_change(readings_of(0.5, 300, chances) + readings_of(0.6, 300, chances)) is None


def test_small_falls_among_noise_are_found_in_pools() -> None:
    """A third of a standard deviation of a look: thirty that are judged together show it long before one by one."""
    chances = np.random.default_rng(2)

    def counters(rate: float, number: int) -> list[Counters]:
        rates = np.clip(chances.normal(rate, 0.1, number), 0.05, 0.95)
        return [Counters(1000, 1000, a, (a,)) for a in chances.binomial(1000, rates).tolist()]

    look = parse_page(OF_SGLANG, 0.0)
    counted = counters(0.6, 3000) + counters(0.57, 1500)
    readings = [replace(look, time=60.0 * i, counters=one, accepted=None) for i, one in enumerate(counted)]
    found = {size: first_in_pools(size, readings) for size in (1, 30)}
    assert 3000 < found[30] < 3000 + 30 * 30
    assert found[30] < found[1]


def first_in_pools(size: int, readings: list[Reading]) -> int:
    pool = Pool(size)
    return next((number for number, reading in enumerate(readings) if pool.add(reading)), len(readings))


# --- what is kept and told elsewhere


def test_history_goes_on(server: Pages, tmp_path: Path) -> None:
    """A later process knows what an earlier one read, and finds a fall between both."""
    url, pages = server
    history = tmp_path / "kept" / "watch.db"
    chances = np.random.default_rng(0)
    looks = [[1000, int(chances.binomial(1000, 0.6)), int(chances.binomial(1000, 0.3))] for _ in range(21)]
    totals = np.cumsum(looks, 0).tolist()
    pages += [page(drafts, (first, second)) + LATENCIES for drafts, first, second in totals]
    watch(url, 20, history=history)
    assert len(list(History(history).of(url))) == 20
    drafts, first, second = totals[-1]
    pages[:] = [page(drafts + 1000 * n, (first + 500 * n, second + 200 * n)) for n in range(8)]
    with pytest.raises(AcceptanceFell, match=r"has fallen from 1\.(89|9\d) to 1\.70 since"):
        watch(url, 7, history=history)
    kept = list(History(history).of(url))
    assert (kept[0].counters.accepted_per_position, kept[0].ttft) == (tuple(looks[1][1:]), Latency())


def test_a_file_that_is_no_history_is_refused(server: Pages, tmp_path: Path) -> None:
    url, pages = server
    pages += [page(1000, (600, 300))]
    (tmp_path / "other").write_text("a text of some length, which is no database" * 100)
    with pytest.raises(UserError, match="--history .*other cannot be used .*give another file"):
        watch(url, 1, history=tmp_path / "other")


def test_a_history_that_was_changed_is_refused_and_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "watch.db"
    History(path).add("http://one", Reading(60.0, Counters(10, 20, 5, (4, 1)), None, Latency(), Latency(), 0.0))
    with sqlite3.connect(path) as database:
        database.execute("""UPDATE readings SET reading = '{"time": "late"}'""")
    with pytest.raises(UserError, match=r"--history .*watch.db: .*time"):
        History(path).newest("http://one", 1)


def test_several_servers_a_page_and_gauges(make_server: Callable[[], Pages], tmp_path: Path) -> None:
    write_evaluation(tmp_path)
    (url, pages), (other, others) = make_server(), make_server()
    pages += [page(n, (6 * n // 10, 3 * n // 10)) + LATENCIES for n in (1000, 2000, 3000)]
    others += [OF_SGLANG]
    port = get_free_port()
    text = watch((url, other), 2, against=tmp_path, page=tmp_path / "watch.html", listen=port)  # type: ignore[arg-type]
    assert text.count(f"{url}  ") == text.count(f"{other}  ") == 3
    gauges = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert f'draftsmith_acceptance_length{{server="{url}"}} 1.9' in gauges
    assert f'draftsmith_acceptance_length{{server="{other}"}} 2.5' in gauges
    assert f'draftsmith_alert{{server="{url}"}} 0.0' in gauges
    content = (tmp_path / "watch.html").read_text()
    assert "No fall of acceptance was found" in content
    assert '<meta http-equiv="refresh" content="5">' in content
    assert content.count("<svg") == 2
    assert "http://" not in content.replace(url, "").replace(other, "").replace("http://www.w3.org", "")


def test_alerts_go_to_the_webhook(server: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the key of the model servers, which is not meant for it."""
    write_evaluation(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    sent: list[Any] = []

    def post(url: str, **how: Any) -> Any:
        sent.append((url, how["json"], "headers" in how))
        return SimpleNamespace(raise_for_status=lambda: None)

    monkeypatch.setattr(alerts.httpx, "post", post)
    url, pages = server
    pages += [page(1000, (600, 300)), page(2000, (900, 350))]
    with pytest.raises(AcceptanceFell):
        watch(url, 1, against=tmp_path, webhook="http://127.0.0.1:9/hook")
    [(address, body, has_headers)] = sent
    assert address == "http://127.0.0.1:9/hook"
    assert body["text"].startswith(f"{url}: retrain")
    assert not has_headers
