"""The page in a browser, from a file, without a network: nothing fails or overflows, and sliders move the curve."""

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from pages import CHROMIUM, browse, computed, needs_node
from playground import PAGE
from reports import write_grid

from draftsmith.inference.planning.best_draft import acceptance_length
from draftsmith.inference.planning.roofline import Roofline, roofline_costs
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.configs.playground_data import playground_data
from draftsmith.recipes.configs.published_acceptance import PUBLISHED
from draftsmith.recipes.pages.rendering import playground_page
from draftsmith.recipes.report_data.reading import read_report_data
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.reports.what_if import profiles_of, speedups

WIDTHS = (400, 1200)
UNMOVED = {"first_rate": None, "draft_scale": 1, "verify_scale": 1}  # where the panel's sliders stand at first
HARNESS = """<!doctype html><pre id="found"></pre>
<iframe src="report.html" width="400" height="900"></iframe>
<iframe src="report.html" width="1200" height="900"></iframe>
<script>
window.onload = () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, panel = page.getElementById("panel"), seen = {};
    seen.overflow = page.documentElement.scrollWidth - frame.clientWidth;
    seen.requests = frame.contentWindow.performance.getEntriesByType("resource").length;
    const move = (name, value) => {
      panel.elements[name].value = value;
      panel.elements[name].dispatchEvent(new frame.contentWindow.Event("input", { bubbles: true }));
      return JSON.parse(panel.dataset.speedups);
    };
    seen.measured = JSON.parse(panel.dataset.speedups);
    seen.points = panel.querySelectorAll(".charts rect.point").length;
    seen.accepted = move("first_rate", 90);
    seen.address = frame.contentWindow.location.hash;
    seen.hidden = panel.querySelectorAll(".charts rect.point").length;
    panel.querySelector("button").click();
    seen.batch = move("batch", 2);
    seen.other = move("drafter", 1);
    return seen;
  });
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    write_grid(folder)
    build_report(folder)
    return folder


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(folder: Path) -> None:
    (folder / "harness.html").write_text(HARNESS)
    seen = browse(folder, "--dump-dom", f"file://{folder}/harness.html")
    assert "CONSOLE" not in seen.stderr  # an error of the page would be logged
    text = re.search(r'<pre id="found">(.*?)</pre>', seen.stdout, re.DOTALL)
    assert text is not None
    found = json.loads(html.unescape(text.group(1)))
    assert len(found) == len(WIDTHS)
    eagle3, ngram = profiles_of(read_report_data(folder))
    power = math.log(0.9) / math.log(eagle3.rates[0])
    better = replace(eagle3, rates=[rate**power for rate in eagle3.rates])
    accepted = speedups(better, better.costs[0])
    for page in found:
        assert page["overflow"] <= 0
        assert page["requests"] == 0
        assert page["measured"] == pytest.approx(speedups(eagle3, eagle3.costs[0]))
        assert page["accepted"] == pytest.approx(accepted)
        assert page["batch"] == pytest.approx(speedups(eagle3, eagle3.costs[2]))
        assert page["other"] == pytest.approx(speedups(ngram, ngram.costs[0]))
        assert (page["points"], page["hidden"]) == (6, 0)  # three draft lengths, three batch sizes
        assert "first_rate=90" in page["address"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_screenshot(folder: Path) -> None:
    shot = folder / "page.png"
    seen = browse(folder, f"--screenshot={shot}", "--window-size=1200,1000", f"file://{folder}/report.html#batch=16")
    assert "CONSOLE" not in seen.stderr
    pixels = matplotlib.image.imread(shot)
    assert pixels.shape[:2] == (1000, 1200)
    rows_with_content = (pixels[..., :3].std(axis=(1, 2)) > 0.02).mean()
    assert rows_with_content > 0.5


@needs_node
def test_the_panel_shows_the_predictions_of_the_tables(folder: Path) -> None:
    """Before a slider is moved it computes what stands in report.md."""
    profiles = profiles_of(read_report_data(folder))
    call = "profiles.map((profile) => profile.costs.map((costs) => speedups(profile, costs, unmoved)))"
    expected = [[pytest.approx(speedups(profile, costs), rel=1e-12) for costs in profile.costs] for profile in profiles]
    assert computed(call, profiles=profiles, unmoved=UNMOVED) == expected


@needs_node
def test_moving_acceptance_and_costs(folder: Path) -> None:
    profile = profiles_of(read_report_data(folder))[0]
    costs = profile.costs[0]
    call = "changes.map((change) => speedups(profile, costs, change))"
    same, perfect = {**UNMOVED, "first_rate": profile.rates[0]}, {**UNMOVED, "first_rate": 0.999, "draft_scale": 0}
    halved = {**UNMOVED, "verify_scale": 0.5}
    found = computed(call, profile=profile, costs=costs, changes=[same, perfect, halved])
    assert found[0] == pytest.approx(speedups(profile, costs))
    assert found[1][3] == pytest.approx(5 / (costs.verify[4] + costs.host), rel=0.01)
    cheaper = (costs.draft[1] + costs.verify[1] + costs.host) / (costs.draft[1] + costs.verify[1] / 2 + costs.host)
    assert found[2][0] == pytest.approx(speedups(profile, costs)[0] * cheaper)
    assert computed("acceptanceLength([0.5], 3)") == 1.875  # the last rate goes on
    where = computed(
        'curves.map((values) => cliffText("batch size", [1, 4, 16], values))',
        curves=[[1.2, 1.1, 0.9], [1.2, 1.1, 1.01], [0.9, 0.8, 0.7]],
    )
    assert where == [
        "pays up to batch size 4",
        "pays at batch size 16, the end of the scale",
        "pays at no batch size shown",
    ]
    assert computed("changedRates([0.5, 0.25, 1, 0], 0.25)") == pytest.approx([0.25, 0.0625, 1, 0])


@needs_node
def test_the_story_runs_on_one_clock() -> None:
    """Three rounds of 15 ms beside plain steps of 10 ms: at 30 ms two rounds have given 5 tokens, plain decoding 3."""
    story = {"rounds": [{"num_tokens": 1}, {"num_tokens": 4}, {"num_tokens": 3}], "round_ms": 15, "plain_ms": 10}
    call = "[0, 14, 30, 45, 1000].map((ms) => storyAt(story, ms))"
    found = [(at["done"], at["tokens"], at["plain"], at["total"]) for at in computed(call, story=story)]
    assert found == [(0, 0, 0, 8), (0, 0, 1, 8), (2, 5, 3, 8), (3, 8, 4, 8), (3, 8, 8, 8)]


@needs_node
def test_the_playground_computes_what_the_planner_does() -> None:
    """Chains and blocks, at light and heavy loads and contexts, to the digit."""
    models = [
        Roofline(draft_cost, parallel, ridge, cache_share, 0.05)
        for draft_cost, parallel in ((0.0, False), (0.05, False), (0.2, True))
        for ridge, cache_share in ((295.0, 8.7e-6), (153.0, 1e-4))
    ]
    places = [(1, 128), (64, 1024), (512, 131_072)]
    call = "models.map((model) => places.map(([batch, context]) => rooflineCosts(model, batch, context, 16)))"
    expected = [[to_json(roofline_costs(model, *place, 16)) for place in places] for model in models]
    assert computed(call, models=models, places=places) == expected


def test_where_the_roofline_bends() -> None:
    """By hand: tokens are free up to the ridge, caches are read once a pass, and a block drafts all in one pass."""
    model = Roofline(draft_cost=0.1, parallel=False, ridge=100.0, cache_share=0.001, host=0.0)
    light, heavy = roofline_costs(model, 1, 0, 4), roofline_costs(model, 50, 0, 4)
    assert (light.verify, light.draft[4]) == ([1.0] * 5, pytest.approx(0.4))
    assert heavy.verify == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.5])
    assert roofline_costs(model, 10, 100, 4).verify == pytest.approx([1.0] * 5)  # a plain step reads the caches, too
    assert roofline_costs(replace(model, parallel=True), 1, 0, 4).draft == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.1])


def test_the_playground_has_the_acceptance_that_others_reached() -> None:
    """One rate of all depths, at which drafts are as long as at theirs."""
    for one, entry in zip(playground_data().reached, PUBLISHED, strict=True):
        depth = entry.draft_length
        expected = entry.length or 1 + sum(entry.unconditional)
        assert acceptance_length([one.rate] * depth, depth) == pytest.approx(expected)


def test_the_playground_in_the_docs_is_the_one_of_today() -> None:
    """It is written by tools/playground.py, asks for nothing and is small."""
    page = playground_page()
    assert PAGE.read_text() == page
    assert not re.search(r"""(src|href)=|@import|<link|https?://""", page.replace("http://www.w3.org/2000/svg", ""))
    assert len(page) < 100_000
