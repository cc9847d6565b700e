"""One of several processes that hold a target in pieces: it writes what it saw of loading and of a pass.

    RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... tests/helpers/in_pieces.py TARGET OUT

OUT gets RANK.json, a list of what was seen with pieces on those of a machine, then of all machines, and
RANK.safetensors with the features of the latter.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.target import pieces

TOKEN_IDS = torch.arange(3, 40)[None]
GATHER = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"  # torch < 2.13

T = TypeVar("T")


def most_allocated(act: Callable[[], T]) -> tuple[int, T]:
    """Return the most bytes that an action had allocated at once by torch's allocator, and its value."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        value = act()
    with NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(change for _, change in changes)), value


def is_whole(layer: nn.Module) -> bool:
    return not any(isinstance(weight, DTensor) for weight in layer.parameters())


def seen_of(name: str, over_machines: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load a target and read a text with it. Return what was seen on the way, and the features."""
    loads: list[str] = []
    events: list[str] = []
    load, gather = pieces.load_model, getattr(distributed, GATHER)
    pieces.load_model = lambda *arguments: loads.append(name) or load(*arguments)
    try:
        most_in_loading, target = most_allocated(
            lambda: Target.sharded_from_pretrained(name, "cpu", torch.float32, over_machines)
        )
    finally:
        pieces.load_model = load
    few = Batch(TOKEN_IDS[:, :4], torch.ones(1, 4, dtype=torch.bool))  # whose own values take next to nothing
    # On a busy machine gloo lets go of a copy late in some passes. Too many whole layers would be there in each.
    most_in_pass = min(most_allocated(lambda: target.features(few, (1, 2)))[0] for _ in range(3))

    def tell_gather(*arguments: Any, **named: Any) -> Any:
        events.append("gather")
        return gather(*arguments, **named)

    def tell_layer(layer: nn.Module, _: object) -> None:
        whole = [number for number, other in enumerate(target.decoder_layers) if is_whole(other)]
        events.append(f"whole: {whole}")

    for layer in target.decoder_layers:
        layer.register_forward_pre_hook(tell_layer)
    setattr(distributed, GATHER, tell_gather)
    try:
        features = target.features(Batch(TOKEN_IDS, torch.ones_like(TOKEN_IDS, dtype=torch.bool)), (1, 2))
    finally:
        setattr(distributed, GATHER, gather)
    seen = {
        "loads": len(loads),
        "events": events,
        "whole_after": [number for number, layer in enumerate(target.decoder_layers) if is_whole(layer)],
        "most_in_loading": most_in_loading,
        "most_in_pass": most_in_pass,
        "own": sum(weight.to_local().numel() for layer in target.decoder_layers for weight in layer.parameters()),
        "all": sum(weight.numel() for layer in target.decoder_layers for weight in layer.parameters()),
        "fingerprints": [target.fingerprint(), target.head_fingerprint()],
    }
    return seen, {"last_hidden": features.last_hidden, "layers": features.layers}


if __name__ == "__main__":
    name, out = sys.argv[1:]
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    try:
        seen, tensors = zip(*(seen_of(name, over_machines) for over_machines in (False, True)), strict=True)
        for tensor, other in zip(tensors[0].values(), tensors[1].values(), strict=True):
            assert torch.equal(tensor, other)
        Path(out, f"{rank}.json").write_text(json.dumps(seen))
        save_file(tensors[1], Path(out, f"{rank}.safetensors"))
    except UserError as error:
        Path(out, f"{rank}.json").write_text(json.dumps(str(error)))
    distributed.destroy_process_group()
