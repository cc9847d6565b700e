"""A target whose layers lie in pieces on several processes, by PyTorch's FSDP2.

The first process alone reads the weights. It sends them to the others layer by layer, so that no other process ever
holds more than its pieces and one whole layer.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.errors import UserError
from draftsmith.models.target.loading import load_model, model_without_memory, whole_of
from draftsmith.models.target.support import read_decoded
from draftsmith.models.target.target_files import read_generation_config, read_tokenizer

LAYERS_AT_ONCE = 3  # that are whole for the use of one: it, the buffer that it was gathered in, and that of the next


def processes_of_pieces(num_processes: int, over_machines: bool) -> int:
    """Return the number of processes that hold the layers together: those of a machine, or of all machines.

    They are all processes, too, where each machine has one, and where machines have unequal numbers.
    """
    of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    return num_processes if over_machines or of_machine == 1 or num_processes % of_machine else of_machine


def load_by_first(
    name: str | Path, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a target's model, on the first process with its weights and on others without memory, and the tokenizer.

    All processes raise the `UserError` of the first.
    """
    config = read_decoded(name)
    if torch.distributed.get_rank() > 0:
        answer = sent(None, device)
        if isinstance(answer, UserError):
            raise answer
        model = model_without_memory(answer, f"target {str(name)!r}")
        model.generation_config = read_generation_config(name) or model.generation_config
        return model.eval().requires_grad_(False), read_tokenizer(name)
    try:
        model, tokenizer = load_model(name, config, torch.device("cpu"), dtype)
    except UserError as error:
        sent(error, device)
        raise
    sent(whole_of(model).config, device)
    return model, tokenizer


def sent(value: Any, device: torch.device) -> Any:
    """Return what the first process gives."""
    values = [value]
    torch.distributed.broadcast_object_list(values, device=device)
    return values[0]


def put_in_pieces(model: PreTrainedModel, layers: nn.ModuleList, device: torch.device, num_pieces: int) -> None:
    """Send a model's weights to all processes, and leave on each its pieces of the layers, and all else whole.

    So embedding, norm and head take memory on each device, and no gathering: drafters read them outside of the model's
    passes, several times a step.
    """
    mesh = mesh_of(device, num_pieces)
    places = sent(places_of(model), device)
    names = {module: name for name, module in model.named_modules()}
    for layer in layers:
        inside = {names[module] for module in layer.modules()}
        send(model, [place for place in places if place.module in inside], device)
        places = [place for place in places if place.module not in inside]
        fully_shard(layer, mesh=mesh)
    send(model, places, device)
    of_ends = set(model.parameters()) - {weight for layer in layers for weight in layer.parameters()}
    root = model.base_model
    known_as = type(root).__module__, type(root).__qualname__  # by which transformers looks up what a pass can record
    fully_shard(root, mesh=mesh, ignored_params=of_ends)  # one root, so that layers share their streams
    type(root).__module__, type(root).__qualname__ = known_as
    for layer, following in pairwise(layers):  # gathered while this one computes, also where that waits for the device
        cast(FSDPModule, layer).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def mesh_of(device: torch.device, num_pieces: int) -> DeviceMesh:
    """Return the processes in rows of those that hold the layers together: several rows hold the same."""
    rows = torch.distributed.get_world_size() // num_pieces
    if rows == 1:
        return init_device_mesh(device.type, (num_pieces,))
    return init_device_mesh(device.type, (rows, num_pieces), mesh_dim_names=("machines", "pieces"))


@dataclass(frozen=True)
class Place:
    """A place in a model for a tensor."""

    module: str  # its path
    kind: str  # the table of the module that it stands in: _parameters or _buffers
    name: str
    shape: torch.Size
    dtype: torch.dtype
    number: int  # the same in all places of one tensor


def places_of(model: nn.Module) -> list[Place]:
    """Return the places of all tensors of a model; numbers are theirs alone on the process that has the weights."""
    return [
        Place(path, kind, name, tensor.shape, tensor.dtype, id(tensor))
        for path, module in model.named_modules()
        for kind in ("_parameters", "_buffers")
        for name, tensor in getattr(module, kind).items()
        if tensor is not None
    ]


def send(model: nn.Module, places: Iterable[Place], device: torch.device) -> None:
    """Put the first process's tensors into these places on all processes."""
    arrived: dict[int, Tensor] = {}
    for place in places:
        tensors = getattr(model.get_submodule(place.module), place.kind)
        if place.number not in arrived:
            if torch.distributed.get_rank() == 0:
                tensor = tensors[place.name].detach().to(device).contiguous()
            else:
                tensor = torch.empty(place.shape, dtype=place.dtype, device=device)
            torch.distributed.broadcast(tensor.view(-1).view(torch.uint8), 0)  # as bytes: gloo does not take all types
            is_weight = place.kind == "_parameters"
            arrived[place.number] = nn.Parameter(tensor, requires_grad=False) if is_weight else tensor
        tensors[place.name] = arrived[place.number]
