"""`auto` and `refresh` given what they cannot use: one line says what is wrong and what to do."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drafters import untrained

from draftsmith.inference.measuring.certify import CertifySettings
from draftsmith.models import Target, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.recipes.auto import auto
from draftsmith.recipes.auto.budget import AutoPlan, plan_lines
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.refreshing import refresh, traffic

GOOD = [{"prompt": f"strike {'the iron ' * (i % 4)}{i}"} for i in range(120)]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LOG = "DEBUG 11-24 10:00:00 [logger.py:1] Request r{0} details: prompt: 'strike {0}', prompt_token_ids: None, "


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# A name, its content, and what `auto` and `refresh` say of it.
TRAFFIC = {
    "nothing.jsonl": ("", "holds no prompts", "holds no prompts"),
    "blank.jsonl": ("\n\n", "holds no prompts", "holds no prompts"),
    "nothing.log": ("", "holds no request with its prompt: start vLLM", "holds no request with its prompt: start vLLM"),
    "started.log": ("INFO 11-24 10:00:00 Started\n", "holds no request with its prompt", "holds no request"),
    "good.log": ("\n".join(map(LOG.format, range(120))), "it goes on", "it goes on"),
    "few.jsonl": (lines(GOOD[:10]), "too few to hold 16 out: give about 80", "wait for more"),
    "alike.jsonl": (lines(GOOD[:1] * 100), "1 different prompts .* too few", "wait for more"),
    "long.jsonl": (
        lines([{"prompt": f"{i} " + "iron " * 400} for i in range(90)]),
        "too few",
        "90 of more than 112 tokens",
    ),
    "cut.jsonl": (lines(GOOD)[:-9], "line 120 is not JSON", "it goes on"),
    "other.jsonl": (
        lines([{"text": 3}] * 90),
        "line 1",
        "holds no prompts: none of 90 rows gives one, the first: .*line 1 has no",
    ),
    "images.jsonl": (
        lines(
            [{"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": f"{i}"}]}]} for i in range(9)]
        ),
        "cannot be answered here",
        "unfit",
    ),
}


def going_on(*_: Any) -> None:
    raise UserError("it goes on")


@pytest.mark.parametrize("command", ["auto", "refresh"])
@pytest.mark.parametrize("name", TRAFFIC)
def test_unusable_traffic_is_told_in_a_line(
    name: str,
    command: str,
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content, *told = TRAFFIC[name]
    expected = told[command == "refresh"]
    (tmp_path / name).write_text(content)
    arguments = [command, "--target", str(tiny_target_dir), "--traffic", str(tmp_path / name), "--device", "cpu"]
    arguments += ["--max-new-tokens", "16", "--out", str(tmp_path / "out")]
    if command == "refresh":
        save_drafter(untrained("medusa", tiny_target), tmp_path / "drafter")
        arguments += ["--drafter", str(tmp_path / "drafter")]
    monkeypatch.setattr(auto, "make_plan", going_on)
    monkeypatch.setattr(refresh.Refresh, "look", going_on)
    monkeypatch.setattr(traffic, "NOISE_BITS", math.inf)
    code, printed = main(arguments), capsys.readouterr()
    if code == 0:  # `refresh` waits for more
        assert re.search(expected, " ".join(printed.out.split() + printed.err.split()))
        assert "wait for more" in " ".join(printed.out.split())
    else:
        (line,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert re.search(expected, line), line
        assert code == 2
    assert "Traceback" not in printed.err


def test_a_budget_that_is_too_small_is_told() -> None:
    certificates = CertifySettings()
    plan = AutoPlan(
        "t", 0.01, 64, 1, 64, 64, None, {"eagle3": 1.0}, None, 10.0, 10.0, certificates, 1.0, False, least_seconds=72.0
    )
    assert plan_lines(plan)[0] == (
        "--budget 0.01 is too small: timing, scores, 64 answers, a rung and the winner, of 8 steps each, alone take "
        "about 0.02 hours here; give ten times that"
    )
    assert "too small" not in " ".join(plan_lines(replace(plan, hours=0.1)))
