"""The page in a browser, from a file, without a network: nothing fails or overflows, and sliders move the curve."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from reports import write_grid

from draftsmith.recipes.reports.contents import read_measured
from draftsmith.recipes.reports.panel import Change, profiles, speedups
from draftsmith.recipes.reports.report import build_report, page_file

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
    "--disable-web-security",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
]
WIDTHS = (400, 1200)
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


def browse(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    profile = folder / "browser"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(folder: Path) -> None:
    (folder / "harness.html").write_text(HARNESS)
    seen = browse(folder, "--dump-dom", f"file://{folder}/harness.html")
    assert "CONSOLE" not in seen.stderr  # an error of the page would be logged
    text = re.search(r'<pre id="found">(.*?)</pre>', seen.stdout, re.DOTALL)
    assert text is not None
    found = json.loads(html.unescape(text.group(1)))
    assert len(found) == len(WIDTHS)
    eagle3, ngram = profiles(read_measured(folder))
    for page in found:
        assert page["overflow"] <= 0
        assert page["requests"] == 0
        assert page["measured"] == pytest.approx(speedups(eagle3, eagle3.costs[0]))
        assert page["accepted"] == pytest.approx(speedups(eagle3, eagle3.costs[0], Change(first_rate=0.9)))
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


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_both_formulas_agree(folder: Path) -> None:
    changes = [Change(), Change(0.31), Change(1.0, 0.0, 2.5), Change(0.0, 3.0)]
    shapes = profiles(read_measured(folder))
    cases: list[dict[str, Any]] = [
        {"profile": profile.to_json(), "costs": vars(costs), "change": vars(change)}
        for profile in shapes
        for costs in profile.costs
        for change in changes
    ]
    call = "cases.map((one) => speedups(one.profile, one.costs, one.change))"
    script = f"{page_file('panel.js')}\nconst cases = {json.dumps(cases)};\nconsole.log(JSON.stringify({call}));"
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, timeout=30, check=True)
    expected = [speedups(profile, costs, change) for profile in shapes for costs in profile.costs for change in changes]
    assert json.loads(done.stdout) == [pytest.approx(values, rel=1e-12) for values in expected]
