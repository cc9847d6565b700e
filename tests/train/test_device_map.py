"""A target whose layers lie on several devices of one process.

Here is no GPU: fake tensors, which have a device and no values, tell whether a tensor was left on another device, and
weights that are kept on disk, brought for their layer's computation by the same hooks, whether the values are right.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from families import SERVED, family_config
from tiny_target import save_target
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.target.loading import DeviceMap, device_map
from draftsmith.models.target.target import find_decoder_layers

GPUS = [torch.device("cuda", index) for index in range(2)]
# Without CUDA fake tensors of a GPU cannot be sorted to experts, nor some constants be made there.
NOT_FAKED = {"afmoe", "apertus", "dots1", "ernie4_5_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text"}
NOT_FAKED |= {"glm4_moe", "gpt_oss", "granitemoe", "granitemoehybrid", "jetmoe", "minimax_m2", "mixtral", "olmoe"}
NOT_FAKED |= {"qwen2_moe", "qwen3_moe", "vaultgemma", "cohere2_moe", "exaone_moe", "gemma4_unified_text"}
NOT_FAKED |= {"granite_swa", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "laguna", "mellum"}
NOT_FAKED |= {"solar_open"}
NOT_FAKED |= {"axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu"}
NOT_FAKED |= {"hy_v4", "longcat_flash", "mimo_v2_flash", "minicpm3"}


class Indexing(TorchFunctionMode):
    """Takes parts of tensors by calls that need no GPU, which Python's brackets do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return taken(*args) if func is Tensor.__getitem__ else func(*args, **(kwargs or {}))


def taken(x: Tensor, index: Any) -> Tensor:
    """x[index] for an index of slices, numbers, None and an ellipsis, or of tensors."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in index if not isinstance(part, Tensor)]:
        place = [part is Ellipsis for part in index].index(True)
        index[place : place + 1] = [slice(None)] * (x.dim() + 1 - sum(part is not None for part in index))
    dim, tensors = 0, []
    for part in index:
        if isinstance(part, int):
            x = x.select(dim, part)
            continue
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
        tensors.append(part if isinstance(part, Tensor) else None)
        dim += 1
    return torch.ops.aten.index(x, tensors) if any(t is not None for t in tensors) else x


def put(model: nn.Module, places: DeviceMap) -> None:
    """Give each module's tensors, without their values, the device of the map."""
    for name, module in model.named_modules():
        device = next((places[key] for key in places if f"{name}.".startswith(f"{key}.")), GPUS[0])
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    moved = torch.empty_like(tensor, device=device)
                    tensors[key] = nn.Parameter(moved, False) if isinstance(tensor, nn.Parameter) else moved


def fake_target(model_type: str) -> tuple[PreTrainedModel, DeviceMap]:
    """On the two GPUs."""
    config = family_config(model_type, SERVED[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().requires_grad_(False)
    places = device_map(model, find_decoder_layers(model), [GPUS[0], *GPUS[1:] * 2], of_ends=GPUS[0])
    put(model, places)
    return model, places


def fake_batch() -> Batch:
    token_ids = torch.zeros(2, 5, dtype=torch.int64, device=GPUS[0])
    return Batch(token_ids, torch.ones_like(token_ids, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("model_type", sorted(SERVED.keys() - NOT_FAKED))
def test_nothing_is_left_on_another_device(model_type: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Indexing():
        model, places = fake_target(model_type)
        dispatch_model(model, places, skip_keys=model._skip_keys_device_placement)
        target = Target(model, None, model_type, fuse_layers=False, decodes=False)
        assert {weight.device for weight in target.decoder_layers.parameters()} == {*GPUS}
        read = target.features(fake_batch(), (1, 2))
        assert read.layers is not None
        assert {read.layers.device, read.last_hidden.device, target.logits(read.last_hidden).device} == {GPUS[0]}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_tensors_tell_of_a_missed_move() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Indexing():
        model, _ = fake_target("llama")
        target = Target(model, None, "llama", fuse_layers=False, decodes=False)
        with pytest.raises(RuntimeError, match="two devices"):
            target.features(fake_batch())


def test_features_are_those_of_a_whole_target(tmp_path: Path) -> None:
    """To the bit. Transformers takes "disk" for a device, and both by their names."""
    directory = save_target(tmp_path, num_hidden_layers=5)
    whole = Target.from_pretrained(directory, "cpu")
    cpu: Any = "cpu"
    spread = Target.spread_from_pretrained(directory, cpu, [cpu] * 3 + ["disk"] * 2, torch.float32)
    assert [next(layer.parameters()).device.type for layer in spread.decoder_layers] == ["cpu"] * 3 + ["meta"] * 2
    token_ids = torch.arange(5, 17).view(2, 6)
    batch = Batch(token_ids, torch.ones_like(token_ids, dtype=torch.bool))
    found, wanted = (target.features(batch, (1, 3, 4)) for target in (spread, whole))
    assert found.layers is not None
    assert wanted.layers is not None
    assert torch.equal(found.last_hidden, wanted.last_hidden)
    assert torch.equal(found.layers, wanted.layers)
