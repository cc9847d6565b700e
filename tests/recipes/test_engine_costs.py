"""The costs of rounds in a vLLM, with a script in its place whose times are known; test_engines.py asks a real one."""

import sys
from pathlib import Path

import pytest

from draftsmith.models import Target, load_drafter
from draftsmith.models.drafter_configs import Eagle3Config
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.recipes.auto.engine_costs import EngineTimes
from draftsmith.recipes.auto.score import ServingLoad

# A round takes 8 ms, 0.5 ms a request, and with a draft 2 ms more and 0.25 ms a drafted token of a request. In the
# first half of the batches the engine warms up and is slower. Nothing that is drafted is accepted.
FAKE_ENGINE = """
import json, sys
job = json.load(open(sys.argv[2]))
settings, timed = job["llm"]["speculative_config"], []
assert job["sampling"]["ignore_eos"]
for place, batch in enumerate(job["timed"]):
    number, length = len(batch), settings["num_speculative_tokens"] if settings else 0
    milliseconds = 8 + 0.5 * number + bool(length) * 2 + 0.25 * number * length
    steps, slow = job["sampling"]["max_tokens"] - 1, 3 if place < len(job["timed"]) / 2 else 1
    timed.append({"num_requests": number, "seconds": slow * steps * milliseconds / 1000, "num_tokens": number * steps,
                  "num_drafts": number * steps * bool(length), "num_accepted_tokens": 0})
json.dump({"version": "vLLM 0", "token_ids": [], "counters": {}, "timed": timed}, open(sys.argv[3], "w"))
"""


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_the_engines_own_times_are_the_costs(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "engine.py").write_text(FAKE_ENGINE)
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/engine.py "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    drafter = load_drafter("ngram", tiny_target) if kind == "ngram" else Eagle3.from_target(Eagle3Config(), tiny_target)
    load = ServingLoad(4, 100)
    costs = EngineTimes(tmp_path, tiny_target, [[1, 2, 3]] * 6, load).costs(kind, drafter, 7)
    for batch, length in ((1, 0), (1, 1), (1, 3), (4, 0), (4, 3), (4, 7), (2, 5)):
        expected = 8 + 0.5 * batch + bool(length) * 2 + 0.25 * batch * length
        assert costs.round(length, batch, 100) == pytest.approx(expected)
    assert "vLLM 0" in costs.device
