"""A thousand hostile cases, the same ones at every run. What holds for all of them stands in judge.py.

The long form is `python tests/hostile/campaign.py`, which also tries a single case again by its name.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from areas import AREAS
from campaign import case_name, prepare_folder, try_case

CASES = [case_name(number) for number in range(1000)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    folder = tmp_path_factory.mktemp("hostile") / "campaign"
    prepare_folder(folder)
    gc.freeze()  # the collector would look through all libraries again and again
    yield folder
    gc.unfreeze()
    huggingface_hub.constants.HF_HUB_OFFLINE = offline


@pytest.mark.parametrize("area", AREAS)
def test_no_case_breaks_the_rule(area: str, folder: Path) -> None:
    faults = [try_case(name, folder) for name in CASES if name.startswith(f"{area}:")]
    assert not [f"{fault}\n{fault.detail}" for fault in faults if fault]
