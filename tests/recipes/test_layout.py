"""Every kind of page in a browser, on a phone and on a desk, light and dark: what is seen first, and can be read.

Positions and colours are measured in the page itself. Pictures are not compared: fonts differ between machines.
"""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_pages import write_command_pages
from load_tests import load_test, stage
from pages import CHROMIUM, browse
from reports import plan_content, replay_content, write_grid, write_run, write_samples

from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.pages.rendering import playground_page
from draftsmith.recipes.reports.report import build_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

PHONE, DESK = (390, 844), (1280, 900)
DARK = "--blink-settings=preferredColorScheme=0"
LEAST_CONTRAST = 4.5  # of text and its ground, for readable text by WCAG 2.2, 1.4.3
LEAST_TEXT = 6.5  # pixels of letters in a figure
MOST_BYTES = 1_500_000  # of all kinds of pages together
PAGES = (
    *("runs/report.html", "grid/report.html", "broken/report.html", "load/report.html", "plan/report.html"),
    *("replay/report.html", "gpu/plan.html", "playground.html", "auto.html", "refresh.html", "watch.html"),
)
LEADING = {"runs/report.html": "2.03×", "grid/report.html": "1.42×", "auto.html": "2.03×"}  # the speedup of the verdict

MEASURE = """
window.measured = (frame) => {
  const page = frame.contentDocument, view = frame.contentWindow;
  page.querySelectorAll("details").forEach((details) => { details.open = true; });
  const style = (element) => view.getComputedStyle(element);
  const seen = (element) => element.getClientRects().length > 0;
  const all = [...page.body.querySelectorAll("*")].filter(seen);
  const name = (element) => `${element.tagName}.${element.getAttribute("class") || ""}`;
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = channels(colour).map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      if (channels(style(at).backgroundColor)[3] === 255) return style(at).backgroundColor;
    }
    return "white";
  };
  const contrast = (element) => {
    const [low, high] = [light(style(element).color), light(ground(element))].sort((a, b) => a - b);
    return (high + .05) / (low + .05);
  };
  const holds = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const texts = all.filter((element) => holds(element) && !element.closest("svg, option, script, .ahead, .unread"));
  const places = all.map((element) => [name(element), element.getBoundingClientRect().right]);
  const letters = [...page.querySelectorAll("figure > svg text")].filter(seen);
  const scale = (matrix) => Math.hypot(matrix.a, matrix.b); // of text that may stand upright
  const first = page.querySelector(".facts dd");
  return {
    overflow: page.documentElement.scrollWidth - frame.clientWidth,
    wide: places.filter(([, right]) => right > frame.clientWidth + 1).map(([element]) => element),
    scrolled: [...page.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth + 1).length,
    pale: texts.map((element) => [name(element), contrast(element)]).filter(([, value]) => value < LEAST).slice(0, 5),
    rows: [...new Set([...page.querySelectorAll("tbody tr")].filter(seen).map((row) => style(row).display))],
    letters: Math.min(99, ...letters.map((text) => parseFloat(style(text).fontSize) * scale(text.getScreenCTM()))),
    first: first && [first.firstChild.data, first.getBoundingClientRect().bottom],
    empty: [...page.querySelectorAll("section")].filter((section) => section.children.length < 2).map((one) => one.id),
    requests: view.performance.getEntriesByType("resource").length,
  };
};
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of each kind, in the names of `PAGES`."""
    folder = tmp_path_factory.mktemp("pages")
    for name, keep, draft_ms in (("eagle3", 0.75, 4.0), ("medusa", 0.4, 1.0), ("draft_model", 0.7, 21.0)):
        write_run(folder / "runs" / name, keep, draft_ms)
    write_samples(folder / "runs")
    write_grid(folder / "grid")
    write_run(folder / "broken" / "eagle3", 0.75, 4.0, divergences=3)
    stages = [stage(load, name, 90.0, 5.0) for load in (1, 2, 4) for name in ("off", "on", "scheduled")]
    studies = {
        "load": to_json(load_test("medusa", stages, "no clear gain")),
        "plan": plan_content("medusa"),
        "replay": replay_content("medusa"),
    }
    for name, content in studies.items():
        (folder / name).mkdir()
        (folder / name / f"{name}.json").write_text(json.dumps(content))
    for name in ("runs", "grid", "broken", *studies):
        build_report(folder / name)
    words = "plan --target llama_3_1_8b --gpu H100 --drafter eagle3 --drafter ngram --price 2.5 --samples 50000 --out"
    assert main([*words.split(), str(folder / "gpu")]) == 0
    (folder / "playground.html").write_text(playground_page())
    write_command_pages(folder)
    return folder


def measured(folder: Path, size: tuple[int, int], *flags: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is measured in each page at a size of the screen."""
    width, height = size
    frames = "".join(f'<iframe src="{page}" width="{width}" height="{height}"></iframe>' for page in PAGES)
    script = MEASURE.replace("LEAST", str(LEAST_CONTRAST))
    call = 'JSON.stringify([...document.querySelectorAll("iframe")].map(measured))'
    harness = f"""<!doctype html><style>iframe {{ border: 0 }}</style><pre id="found"></pre>{frames}<script>{script}
    window.onload = () => {{ document.getElementById("found").textContent = {call}; }};</script>"""
    (folder / "harness.html").write_text(harness)
    seen = browse(folder, *flags, "--dump-dom", f"file://{folder}/harness.html")
    assert "CONSOLE" not in seen.stderr  # an error of a page would be logged
    found = re.search(r'<pre id="found">(.*?)</pre>', seen.stdout, re.DOTALL)
    assert found is not None
    yield from zip(PAGES, json.loads(html.unescape(found[1])), strict=True)


@pytest.mark.parametrize("flags", [(), (DARK,)], ids=["light", "dark"])
def test_on_a_phone(folder: Path, flags: tuple[str, ...]) -> None:
    """Nothing is wider than the screen, tables are cards, figures can be read, and the speedup is seen at once."""
    for page, seen in measured(folder, PHONE, *flags):
        assert (page, seen["overflow"], seen["wide"], seen["scrolled"]) == (page, 0, [], 0)
        assert (page, seen["pale"], seen["empty"], seen["requests"]) == (page, [], [], 0)
        assert page == "playground.html" or set(seen["rows"]) == {"block"}
        assert (page, seen["letters"]) >= (page, LEAST_TEXT)
        if page in LEADING:
            assert seen["first"][0] == LEADING[page]
            assert seen["first"][1] < PHONE[1]


@pytest.mark.parametrize("flags", [(), (DARK,)], ids=["light", "dark"])
def test_on_a_desk(folder: Path, flags: tuple[str, ...]) -> None:
    for page, seen in measured(folder, DESK, *flags):
        assert (page, seen["overflow"], seen["pale"], seen["empty"], seen["requests"]) == (page, 0, [], [], 0)
        assert (page, set(seen["rows"]) - {"table-row"}) == (page, set())
        if page in LEADING:
            assert seen["first"][0] == LEADING[page]
            assert seen["first"][1] < DESK[1] / 2


def test_pages_are_small(folder: Path) -> None:
    assert sum((folder / page).stat().st_size for page in PAGES) < MOST_BYTES
