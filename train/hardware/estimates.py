"""Estimates of what a training run takes, from shapes alone: floating-point operations, hours, memory.

The formulae count matrix products (2 operations a weight and token forward, 4 backward) and leave out attention scores,
which are small below some 10,000 tokens. tests/train/test_scale.py compares them with what a step of each family
takes. Processes that take a text together divide what the drafter's layers keep of it. The share of a device's peak
that a run reaches is an assumption here; training measures it.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from draftsmith.inference.planning.gpus import GPUS, Gpu, gpu_of_device
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.drafter_configs import with_random_layers
from draftsmith.models.losses.chain_loss import CHUNK_ELEMENTS, GPU_ROWS
from draftsmith.models.target.loading import drop_layers, model_without_memory
from draftsmith.models.target.pieces import LAYERS_AT_ONCE
from draftsmith.models.target.shape import TargetWeights, target_weights
from draftsmith.models.target.target import FullTarget
from draftsmith.train.config import TrainConfig
from draftsmith.train.optimizer import inner_matrices, operations_of_direction

TRAINED_BYTES = 4 + 4 + 8  # fp32 weight, gradient and AdamW's two moments
MUON_SPARES = 4  # of these bytes in each inner matrix: Muon has one moment
VALUES_KEPT = 8  # values that a pass keeps a token for the gradients, in units of a layer's widths; as measured
LOGIT_COPIES = 4  # of a chunk of logits at once on a CPU: the target's, p and log p of them, the drafter's
UTILISATION = 0.35  # share of the device's dense bf16 peak that a run is assumed to reach


H100 = GPUS["H100"]


def peak_of(device: torch.device) -> float | None:
    """Return a device's dense bf16 operations a second; None for a CPU, and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.bf16


def meta_target(config: PretrainedConfig, name: str) -> Target:
    """Return a target of only embedding and head, without numbers in them: enough to build a drafter of its shape."""
    without_layers = copy.deepcopy(config)
    drop_layers(without_layers.get_text_config(), [])
    model = model_without_memory(without_layers, f"target {name!r}")
    return Target(model, None, name, full=FullTarget(config, fingerprint=""))


def share_in_pieces(num_pieces: int, num_layers: int) -> float:
    """Return the part of the target's layers on a device that shares them: its pieces, and what is whole at once."""
    return 1 / num_pieces + LAYERS_AT_ONCE / num_layers


@dataclass(frozen=True)
class RunEstimate:
    """The needs of one run, its target and drafter whole on each device."""

    operations: float  # of the whole run
    ends_bytes: float  # of the target: embedding, head, and the head's rows of a draft vocabulary
    layer_bytes: float  # of the target
    drafter_bytes: float  # weights, gradients, optimiser
    gathered_bytes: float  # of a drafter in pieces besides: its weights and gradients, whole for a pass
    working_bytes: float  # of one micro-batch

    @property
    def total_bytes(self) -> float:
        return self.ends_bytes + self.layer_bytes + self.drafter_bytes + self.working_bytes

    def hours(self, device: Gpu, num_devices: int = 1) -> float:
        """Return the hours that the run takes at `UTILISATION` of the devices' peak."""
        return self.operations / (device.bf16 * UTILISATION * num_devices) / 3600


def estimate(
    config: TrainConfig,
    target_config: PretrainedConfig,
    tokens_per_sample: int,
    drafter: Drafter | None = None,
    bytes_per_value: int = 2,
    on_gpu: bool = True,
    weights: TargetWeights | None = None,
) -> RunEstimate:
    """Return what a recipe takes for a target of this shape.

    `tokens_per_sample` counts prompt and answer. `drafter` was built by the recipe; without it, one is built without
    its numbers. `bytes_per_value` is that of the target's weights, 2 in bf16.
    `on_gpu`: more logits exist at once there. `weights` are those of the target, where they have been counted.
    """
    weights = weights or target_weights(target_config, config.target)
    drafter = drafter or meta_drafter(config, target_config)
    tokens = config.run.steps * config.data.batch_size
    if config.data.batch_unit == "samples":  # else only answers are counted: how much prompt is with them is unknown
        tokens *= tokens_per_sample

    text = target_config.get_text_config()
    width, inner = text.hidden_size, int(getattr(text, "intermediate_size", 4 * text.hidden_size))
    states = (len(drafter.layer_ids) + 1) * width
    of_layers = drafter.layer_passes * VALUES_KEPT * (3 * width + inner)
    kept = states + of_layers / config.run.processes_per_text  # values a token
    logits = LOGIT_COPIES * CHUNK_ELEMENTS * 4.0
    if on_gpu:
        ids, passes = drafter.draft_to_target(), max(1.0, drafter.training_passes)
        draft_vocab_size = None if ids is None else len(ids)
        tokens_at_once = config.data.tokens_per_micro_batch
        logits = bytes_per_value * num_logits(text.vocab_size, draft_vocab_size, passes, tokens_at_once)
    by_muon = inner_matrices(drafter) if config.optimizer.matrices == "muon" else {}
    spared = MUON_SPARES * sum(matrix.numel() for matrix in by_muon)
    share = compared_share(drafter)
    of_heads = weights.head_weights * (1 if share == 1 else 1 + share)
    return RunEstimate(
        operations=tokens * operations_per_token(config, weights, drafter)
        + config.run.steps * sum(operations_of_direction(*of_one) for of_one in by_muon.items()),
        ends_bytes=bytes_per_value * (of_heads + weights.other_weights),
        layer_bytes=bytes_per_value * weights.weights_of_layers,
        drafter_bytes=TRAINED_BYTES * num_trained(drafter) - spared,
        gathered_bytes=2 * bytes_per_value * num_trained(drafter),
        working_bytes=bytes_per_value * kept * config.data.tokens_per_micro_batch + logits,
    )


def num_logits(vocab_size: int, draft_vocab_size: int | None, passes: float, num_tokens: int) -> float:
    """Return how many logits exist at once on a GPU, in a micro-batch of `num_tokens`.

    They are those of `GPU_ROWS` rows of the drafter, which gradients overwrite, and of the target's rows that teach
    them. With a draft vocabulary, else None, the target's exist a second time, cut to it. `passes` is the number of
    depths that go through one head together.
    """
    drafted = draft_vocab_size or vocab_size
    own_rows = min(GPU_ROWS, passes * num_tokens)
    return own_rows * drafted + own_rows / passes * (vocab_size + (draft_vocab_size or 0))


def meta_drafter(config: TrainConfig, target_config: PretrainedConfig) -> Drafter:
    """Return a drafter of the right shape for a target, without numbers in it."""
    shape = with_random_layers(config.drafter)
    with torch.device("meta"):
        return DRAFTERS[shape.kind].from_target(shape, meta_target(target_config, config.target))


def num_trained(drafter: Drafter) -> int:
    """Count the parameters that are trained."""
    return sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)


def num_multiplied(drafter: Drafter) -> int:
    """Count the trained parameters without those that are only looked up: embeddings that no head shares."""
    matrices = {id(module.weight) for module in drafter.modules() if isinstance(module, nn.Linear)}
    tables = {id(module.weight): module.weight for module in drafter.modules() if isinstance(module, nn.Embedding)}
    looked_up = (weight.numel() for key, weight in tables.items() if weight.requires_grad and key not in matrices)
    return num_trained(drafter) - sum(looked_up)


def compared_share(drafter: Drafter) -> float:
    """Return the share of the target's head that teaches in a step that is not logged.

    It is all, or the rows of a reduced draft vocabulary, which are a copy beside the head.
    """
    ids = drafter.draft_to_target()
    return 1.0 if ids is None or drafter.learns_acceptance else len(ids) / drafter.target.vocab_size


def operations_per_token(config: TrainConfig, target: TargetWeights, drafter: Drafter) -> float:
    """Return the operations of target and drafter together; stored features need no layers.

    A token passes once through the target's layers and head, whose distribution teaches all depths, of the head through
    the rows of the draft vocabulary alone (logged steps take all), and `training_passes` times through what the drafter
    trains. Where a drafter's logits come from the target's own head,
    each of its `head_passes` takes 2 operations a weight forward and 2 backward, for the head stays frozen.
    """
    layers = target.active_weights_of_layers if config.data.features == "online" else 0
    own_logits = 4 * target.head_weights * drafter.head_passes if drafter.drafts_by_target_head else 0
    of_teacher = 2 * target.head_weights * compared_share(drafter)
    return 2 * layers + of_teacher + own_logits + 6 * drafter.training_passes * num_multiplied(drafter)
