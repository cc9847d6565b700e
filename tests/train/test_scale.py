"""docs/scale.md says what the formulae give, and these are those that the start of a run prints."""

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_without_values import GPU, gpu_without_values, without_values
from recipe_table import public_weights
from scale_table import TARGETS, bytes_on_each, features_bytes, published_table, table, training_of, ways
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.losses import chain_loss
from draftsmith.models.losses.chain_loss import CHUNK_ELEMENTS
from draftsmith.models.target.shape import target_weights
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train.hardware import estimates, placement
from draftsmith.train.hardware.estimates import LOGIT_COPIES, estimate, num_logits, num_trained
from draftsmith.train.hardware.ways import memory_of
from draftsmith.train.optimizer import inner_matrices, optimizer_of


def test_the_documented_tables_are_what_the_formulae_give() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    for documented in (table(), ways(), published_table()):
        assert documented in page


@pytest.mark.parametrize("name", TARGETS)
def test_pieces_add_up_to_the_whole(name: str) -> None:
    """Sharding on n devices spares each (n - 1) / n of the layers, but those whole at once; stored features all.

    Two machines hold the layers twice.
    """
    layers = 2 * public_weights(name).weights_of_layers
    at_once = 3 / PUBLIC_TARGETS[name].config.num_hidden_layers
    whole = bytes_on_each(name, 8, "DDP", "replicated")
    for count in (8, 16):
        assert whole - bytes_on_each(name, count, "DDP", "sharded") == pytest.approx(layers * (7 / 8 - at_once))
    assert whole - bytes_on_each(name, 8, "DDP", "stored") == pytest.approx(layers)


@pytest.mark.parametrize(
    ("layout", "offloaded", "expected"),
    [("FSDP2", False, 6), ("ZeRO-3", False, 6), ("ZeRO-3", True, 4), ("ZeRO-2", True, 4), ("DDP", False, 16)],
)
def test_a_drafter_takes_what_its_layout_leaves(
    layout: str, offloaded: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes a weight on eight GPUs: in pieces, what is whole for a pass, too, at the start of a run as in a plan."""
    monkeypatch.setattr(placement, "layout_of", lambda _: layout)
    monkeypatch.setattr(placement, "is_offloaded", lambda _: offloaded)
    accelerator: Any = SimpleNamespace(num_processes=8)
    training = training_of("llama_3_1_8b", "H100", 8, 70_000, 800, 3)
    needed = replace(training.needs("online"), drafter_bytes=16.0 * num_trained(training.drafter))  # as by AdamW
    found = placement.drafter_bytes(accelerator, needed)
    assert found == pytest.approx(expected * num_trained(training.drafter))
    if layout == "FSDP2":
        needed = training.needs("online")
        layers = needed.layer_bytes * (1 / 8 + 3 / 32)
        run = needed.ends_bytes + layers + placement.drafter_bytes(accelerator, needed) + needed.working_bytes
        assert run == pytest.approx(memory_of(training, "online", "in pieces"))


def test_features_of_a_sample() -> None:
    """Three layers and the last hidden state: 32,768 bytes a token of an 8B, as in docs/data.md."""
    assert features_bytes("llama_3_1_8b") == 800 * 32_768


def test_operations_of_a_target_are_those_counted() -> None:
    """2 a weight of the layers and token, norms in it; attention scores are left out on both sides."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32)
    tokens = torch.arange(32)[None]
    with FlopCounterMode(display=False) as counter:
        target.model.model(input_ids=tokens, use_cache=False)
    predicted = 2 * target_weights(target.model.config, target.name).active_weights_of_layers * tokens.numel()
    assert counter.get_total_flops() == pytest.approx(predicted, rel=0.005)


SHAPE = LlamaConfig(  # of the target whose steps are measured
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=14,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


aten = torch.ops.aten
PRODUCTS = {aten.mm: aten.mm, aten.addmm: aten.addmm, aten.addmm_: aten.addmm}  # operator -> whose operations it takes


class Meter(TorchDispatchMode):
    """Operations of matrix products, without those of attention, and the most bytes of new tensors at once."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.most = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if product := PRODUCTS.get(func._overloadpacket):
            self.operations += flop_registry[product](*args, **(kwargs or {}), out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self._live.values()))
        return result


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if DRAFTERS[kind].depths is not Drafter.depths])
def test_a_training_step_takes_what_is_predicted(kind: str) -> None:
    """Operations within a tenth, memory of a micro-batch within a half; weights, gradients and moments to the byte."""
    rows, length = 4, 128
    config = RECIPES[f"quickstart_{kind}"]()
    config.drafter = config.drafter.for_overfitting()  # in which all steps are alike
    config.data.batch_size, config.data.tokens_per_micro_batch, config.run.steps = rows, rows * length, 1
    target = Target(LlamaForCausalLM(SHAPE).requires_grad_(False), None, "random")
    drafter = DRAFTERS[kind].from_target(config.drafter, target).train()
    token_ids = torch.randint(3, target.vocab_size, (rows, length))
    batch = Batch(token_ids, torch.arange(length).expand(rows, -1) > 0)
    optimizer = optimizer_of(drafter, config.optimizer)

    def step(batch: Batch) -> None:
        total, count = drafter.loss(batch, target.features(batch, drafter.layer_ids))["loss"]
        (total / count).backward()

    step(Batch(token_ids[:1, :16], batch.loss_mask[:1, :16]))  # any gradients make the moments
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    held = sum(tensor.nbytes for tensor in [*trained, *(p.grad for p in trained if p.grad is not None), *states])
    for parameter in trained:
        assert parameter.grad is not None
        parameter.grad.zero_()
    with Meter() as meter:
        step(batch)
    with Meter() as of_optimizer:
        optimizer.step()
    found = estimate(config, target.model.config, length, drafter, on_gpu=False)
    by_muon = inner_matrices(drafter) if config.optimizer.matrices == "muon" else {}  # Muon has one moment, AdamW two
    moments = 2 * num_trained(drafter) - sum(matrix.numel() for matrix in by_muon)
    assert held == found.drafter_bytes == 4 * (2 * num_trained(drafter) + moments)
    assert meter.operations + of_optimizer.operations == pytest.approx(found.operations, rel=0.1)
    logits = LOGIT_COPIES * CHUNK_ELEMENTS * 4
    in_fp32 = 2 * (found.working_bytes - logits) + logits
    assert in_fp32 / 1.5 < meter.most < 1.5 * in_fp32


@pytest.mark.parametrize("num_heads", [1, 4])
def test_logits_that_exist_at_once_on_a_gpu(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four depths on a GPU without values, through one head side by side or each through its own, within a third."""
    pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
    for module in (chain_loss, estimates):
        monkeypatch.setattr(module, "GPU_ROWS", 512)
    num_tokens, vocab_size, draft_vocab_size = 640, 3000, 1000
    with gpu_without_values():
        heads = [nn.Linear(4, draft_vocab_size, bias=False) for _ in range(num_heads)]
        target_head = nn.Linear(4, vocab_size, bias=False).requires_grad_(False)
        for head in (*heads, target_head):
            without_values(head)
        depths = [
            chain_loss.Depth(
                torch.empty(num_tokens - k, 4, device=GPU, requires_grad=True),
                heads[k % num_heads],
                torch.arange(k, num_tokens),
            )
            for k in range(4)
        ]
        ids, hidden = (
            torch.empty(draft_vocab_size, dtype=torch.int64, device=GPU),
            torch.empty(num_tokens, 4, device=GPU),
        )
        with Meter() as meter:
            chain_loss.divergence_over_depths(depths, hidden, target_head, "forward_kl", ids)
    expected = 4 * num_logits(vocab_size, draft_vocab_size, 4 / num_heads, num_tokens)
    assert meter.most == pytest.approx(expected, rel=1 / 3)
