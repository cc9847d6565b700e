"""Runs whose features come from servers in the process of the test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from runs import make_config
from states_server import LAYER_IDS, HiddenStatesServer

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.models import Target, devices
from draftsmith.train.config import TrainConfig
from draftsmith.train.run_folder.tracking import read_metrics

NUM_SAMPLES = 12


def write_settings(target: Target, folder: Path) -> dict[str, Any]:
    """Write samples of several lengths, a few tokens of each micro-batch, and return the settings of a run on them."""
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"strike {'the iron ' * (i % 4)}{i}\n" for i in range(NUM_SAMPLES)))
    prepare(target, str(prompts), folder / "samples", PrepareSettings(max_new_tokens=8))
    return {
        "target": target.name,
        "run.device": "cpu",
        "data.samples": folder / "samples",
        "data.batch_size": 4,
        "data.tokens_per_micro_batch": 64,
        "data.max_length": 64,
        "drafter.layer_ids": LAYER_IDS[:-1],
    }


@contextmanager
def two_servers(target: Target, folder: Path) -> Iterator[list[HiddenStatesServer]]:
    """Serve in threads of this process. Training leaves their products alone, as it does those of another process."""
    folders = [folder / f"states{number}" for number in range(2)]
    for path in folders:
        path.mkdir()
    servers = [HiddenStatesServer(Target.from_pretrained(target.name, "cpu", torch.float32), path) for path in folders]
    with patch.object(devices, "mkl_misses_avx512", lambda: False):
        yield servers
    for server in servers:
        server.close()


def config_of(settings: dict[str, Any], folder: Path, *urls: str, steps: int = 4, **changes: Any) -> TrainConfig:
    """The config of a run whose features come from these servers; without any, from the target beside the drafter."""
    streamed = {"data.features": "streamed", "data.features_endpoint": list(urls)} if urls else {}
    run = {"steps": steps, "log_every": 1, "checkpoint_every": 2}
    return make_config("eagle3", {**settings, **streamed, **changes}, folder, run=run)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder)]
