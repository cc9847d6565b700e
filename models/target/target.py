"""The target: a frozen Hugging Face decoder, read for its logits and for the hidden states that drafters ask for.

Shapes: B rows, T tokens, H hidden width, V vocabulary, A number of layers asked for.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.batch import Batch
from draftsmith.models.devices import large_products, pick_device, pick_dtype
from draftsmith.models.errors import UserError, library_errors, shown, whole_number
from draftsmith.models.fused.fused_layers import fuse
from draftsmith.models.half_weights import frozen_product
from draftsmith.models.layers import gather_columns
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.forward import context_of, run_causal, run_on_slots
from draftsmith.models.slots.latent_attention import keep_latents
from draftsmith.models.slots.running_states import replace_rules
from draftsmith.models.slots.window import Window
from draftsmith.models.target.loading import (
    device_map,
    load_first_layers,
    load_model,
    model_without_memory,
    num_layers_of,
    whole_of,
)
from draftsmith.models.target.pieces import load_by_first, processes_of_pieces, put_in_pieces, sent
from draftsmith.models.target.scaled_head import scaled_head, with_scaling
from draftsmith.models.target.support import carries_states, check_decodes_exactly, check_trained, read_decoded
from draftsmith.models.target.target_files import (
    read_config,
    read_generation_config,
    read_quantisation,
    read_tokenizer,
)


@dataclass
class Features:
    """Hidden states that the target computed at T positions of B rows."""

    last_hidden: Tensor  # [B, T, H] after the final norm, the input of the target's head
    layers: Tensor | None  # [B, T, A * H] hidden states after the layers asked for, side by side

    def gather(self, columns: Tensor) -> "Features":
        """Return the features at `columns` [B, C] of the T positions."""
        layers = None if self.layers is None else gather_columns(self.layers, columns)
        return Features(gather_columns(self.last_hidden, columns), layers)

    def first(self, count: int) -> "Features":
        """Return a view of the first rows."""
        return Features(self.last_hidden[:count], None if self.layers is None else self.layers[:count])

    def up_to(self, count: int) -> "Features":
        """Return a view of the first positions."""
        return Features(self.last_hidden[:, :count], None if self.layers is None else self.layers[:, :count])

    def where(self, which: Tensor, other: "Features") -> "Features":
        """Return these features in the rows that `which` [B] marks, the other ones elsewhere."""
        mark = which[:, None, None]
        layers = None if other.layers is None else torch.where(mark, cast(Tensor, self.layers), other.layers)
        return Features(torch.where(mark, self.last_hidden, other.last_hidden), layers)

    def put(self, newer: "Features", rows: Tensor | slice = slice(None)) -> None:
        """Write over the first positions of some rows [b] or of all."""
        for own, new in ((self.last_hidden, newer.last_hidden), (self.layers, newer.layers)):
            if own is not None and new is not None:
                own[rows, : new.shape[1]] = new


@dataclass
class FullTarget:
    """Facts about the full target that a model without its layers does not tell."""

    config: PretrainedConfig
    fingerprint: str | None  # None where nobody has seen its weights: a server ran them


@dataclass(frozen=True)
class ChatSettings:
    """The settings that a target's chat template is rendered with, besides messages and tools."""

    kwargs: dict[str, Any] = field(default_factory=dict)  # the template's own, such as enable_thinking
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None  # what it prints as today; None: today


class Target:
    """A frozen decoder with its tokenizer, on one device unless it is loaded otherwise.

    `run` decodes on a `SlotCache`, `features` reads whole rows for training; both take the layer ids whose hidden
    states are wanted (N means after N layers, Hugging Face's `hidden_states[N]`). One loaded by `head_from_pretrained`
    has neither.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        fuse_layers: bool = True,
        full: "FullTarget | None" = None,
        decodes: bool = True,
    ) -> None:
        """`full`: facts that a `model` without layers does not tell of the target.

        `decodes`: whether it will be asked for more than `features`; else that is not checked.
        """
        if model.base_model is model:  # Llama4ForCausalLM names its decoder as the multimodal model does
            model.base_model_prefix = "model"
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.chat = ChatSettings()
        self.quantisation: str | None = None  # in which its files hold the weights that were unpacked
        self.text_config = (full.config if full else model.config).get_text_config()
        self.head_module: nn.Module = model.get_output_embeddings()
        self.head = scaled_head(model)  # what makes logits: the same module where nothing is scaled
        self.decoding_head: Callable[[Tensor], Tensor] = self.head
        self.embedding: nn.Module = model.get_input_embeddings()
        self._lock = threading.RLock()
        self._full = full
        self._fingerprint = full.fingerprint if full else None
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise UserError(
                    f"target {name!r} names {shown(token_id)} as the token that ends a text, which is no id below "
                    f"{self.vocab_size}: mend eos_token_id in its generation_config.json or config.json"
                )
        if full is None:
            self.decoder_layers = find_decoder_layers(model)
            keep_latents(model)
            replace_rules(model)
            # What `run` and `logits` take instead of stock modelling.
            self.fused_decoder = fuse(model, frozen=True) if fuse_layers else None
            if self.fused_decoder is not None:
                self.decoding_head = with_scaling(frozen_product(self.head_module), self.text_config)
            if decodes and model.device.type != "meta":
                check_decodes_exactly(model, self.fused_decoder, self._last_hidden, self.logits)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        fuse_layers: bool = True,
    ) -> "Target":
        """Load from a Hub name or a directory. By default: the GPU in bfloat16 if there is one, else the CPU in fp32.

        Raises `UserError` where there is no such target or device, or the model cannot be decoded here.
        """
        device = pick_device(device)
        config = read_decoded(name)
        model, tokenizer = load_model(name, config, device, pick_dtype(dtype, device))
        target = cls(model, tokenizer, str(name), fuse_layers)
        if (quantisation := read_quantisation(name)) is not None:
            target.quantisation = str(quantisation)
        return target

    @classmethod
    def sharded_from_pretrained(
        cls,
        name: str | Path,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        over_machines: bool = False,
    ) -> "Target":
        """Load a target whose layers lie in pieces on the processes of each machine, or by `over_machines` on all.

        All processes only call `features`, together. The first one alone reads the weights, into the CPU's memory.
        Defaults and errors as those of `from_pretrained`.
        """
        device = pick_device(device)
        model, tokenizer = load_by_first(name, device, pick_dtype(dtype, device))
        target = cls(model, tokenizer, str(name), fuse_layers=False, decodes=False)
        target._fingerprint = sent(None if model.device.type == "meta" else target.fingerprint(), device)
        num_pieces = processes_of_pieces(torch.distributed.get_world_size(), over_machines)
        put_in_pieces(model, target.decoder_layers, device, num_pieces)
        return target

    @classmethod
    def spread_from_pretrained(
        cls, name: str | Path, device: torch.device, of_layers: list[torch.device], dtype: torch.dtype | None = None
    ) -> "Target":
        """Load a target whose layers lie on devices of their own, one named for each; it is asked for `features` alone.

        Embedding, norm and head are on `device`, where all features arrive. Defaults and errors as those of
        `from_pretrained`.
        """
        config = read_decoded(name)
        shape = model_without_memory(config, f"target {str(name)!r}")
        places = device_map(whole_of(shape), find_decoder_layers(shape), of_layers, of_ends=device)
        model, tokenizer = load_model(name, config, places, pick_dtype(dtype, device))
        return cls(model, tokenizer, str(name), fuse_layers=False, decodes=False)

    @classmethod
    def head_from_pretrained(
        cls,
        name: str | Path,
        fingerprint: str | None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "Target":
        """Load embedding, head and sizes of a target without its layers: enough to train on stored features.

        They alone get into memory, and of a Hub name the files that hold them are downloaded (but for a target that is
        not kept as safetensors). `fingerprint` is that of the whole target. Defaults and errors as those of
        `from_pretrained`, but for targets that only an engine decodes: these are taken, too.
        """
        device = pick_device(device)
        config = read_config(name)
        check_trained(config, str(name))
        model, tokenizer = load_first_layers(name, config, 0, device, pick_dtype(dtype, device))
        return cls(model, tokenizer, str(name), full=FullTarget(config, fingerprint))

    @classmethod
    def first_layers_from_pretrained(
        cls, name: str | Path, num_layers: int, device: torch.device, dtype: torch.dtype
    ) -> "Target":
        """Load a target that ends after its first layers, whose output its `features` have. Others are never read."""
        model, tokenizer = load_first_layers(name, read_config(name), num_layers, device, dtype)
        model.set_attn_implementation("eager")  # for layers that read transformers' masks, such as sparse attention
        return cls(model, tokenizer, str(name), fuse_layers=False, decodes=False)

    @property
    def has_layers(self) -> bool:
        return self._full is None

    @property
    def carries_states(self) -> bool:
        """Whether layers carry a running state along a text: then no two texts may lie in one row."""
        return carries_states(self.text_config)

    @classmethod
    def without_weights(cls, name: str | Path) -> "Target":
        """Load config and tokenizer only, with the model on the `meta` device: for a target that a server runs."""
        config = read_config(name)
        model = model_without_memory(config, f"target {str(name)!r}")
        model.generation_config = read_generation_config(name) or model.generation_config
        return cls(model, read_tokenizer(name), str(name), fuse_layers=False)

    @property
    def fused(self) -> bool:
        """Whether `run` goes through fused layers rather than stock modelling."""
        return self.fused_decoder is not None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def config(self) -> PretrainedConfig:
        """The config of the full target: of a multimodal one with that of its towers."""
        return self._full.config if self._full else whole_of(self.model).config

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the head; may exceed the tokenizer's length by padding."""
        return self.text_config.vocab_size

    @property
    def num_layers(self) -> int:
        return num_layers_of(self.text_config)

    @property
    def context(self) -> int:
        """Largest number of tokens of prompt and output together."""
        return context_of(self.text_config)

    @property
    def eos_token_ids(self) -> list[int]:
        """The ids that end a text, by the generation config, else the config, else the tokenizer."""
        tokenizer_eos = self.tokenizer.eos_token_id if self.tokenizer else None
        for ids in (
            self.model.generation_config.eos_token_id,
            getattr(self.text_config, "eos_token_id", None),
            tokenizer_eos,
        ):
            if ids is not None:
                ids = ids if isinstance(ids, list | tuple) else [ids]
                return [whole_number(f"{self.name}: eos_token_id", token_id) for token_id in ids]
        return []

    def logits(self, last_hidden: Tensor) -> Tensor:
        """Return the target's head with its family's scaling: [..., H] -> [..., V]."""
        return self.decoding_head(last_hidden)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread at a time compute with the target and its drafters, with the target's GPU as the current one.

        The thread that has its turn may ask for it again.
        """
        on_gpu = self.device.type == "cuda" and torch.cuda.is_initialized()  # there are fake tensors, too
        with self._lock, torch.cuda.device(self.device) if on_gpu else nullcontext():
            yield

    @torch.no_grad()
    def run(self, token_ids: Tensor, window: Window, cache: SlotCache, layer_ids: tuple[int, ...] = ()) -> Features:
        """Decode the new tokens [B, T] of a window on the cache."""
        if self.fused_decoder is not None:
            return Features(*self.fused_decoder.run(token_ids, window, cache, layer_ids))
        with self.turn(), _Capture(self.decoder_layers, layer_ids) as capture:
            last_hidden = run_on_slots(self.model, token_ids, window, cache)
        return Features(last_hidden, capture.side_by_side(last_hidden.device))

    def _last_hidden(self, token_ids: Tensor, window: Window, cache: SlotCache) -> Tensor:
        return self.run(token_ids, window, cache).last_hidden

    @torch.no_grad()  # not inference_mode: the drafter's backward pass keeps the features
    def features(self, batch: Batch, layer_ids: tuple[int, ...] = ()) -> Features:
        """Read whole rows of text at once."""
        with self.turn(), large_products(), _Capture(self.decoder_layers, layer_ids) as capture:
            last_hidden = run_causal(self.model, batch.token_ids, batch.positions, batch.attention_mask())
        return Features(last_hidden, capture.side_by_side(last_hidden.device))

    @cached_property
    def final_norm(self) -> nn.Module:
        """The norm between the last layer's output and the last hidden state."""
        outputs: list[tuple[nn.Module, Tensor]] = []  # kept, so that no two lie at one place in memory
        hooks = [
            module.register_forward_hook(lambda module, _, output: outputs.append((module, output)))
            for module in self.model.base_model.modules()
            if module is not self.model.base_model
        ]
        last = run_causal(self.model, torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        for hook in hooks:
            hook.remove()
        return next(m for m, output in outputs if isinstance(output, Tensor) and output.data_ptr() == last.data_ptr())

    def head_weight(self) -> Tensor:
        """Return the matrix of the head, [V, H]."""
        return cast(Tensor, self.head_module.weight)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the special tokens that stand before a raw prompt.

        Raises `UserError` where the tokenizer's files are not right.
        """
        assert self.tokenizer is not None
        with library_errors(f"the tokenizer of {self.name} does not encode a text", "give a model with a whole one"):
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def fingerprint(self) -> str | None:
        """Return 16 hex digits over the config and a sample of every weight: the same target gives the same digits.

        None of a target without its layers where nobody has seen them.
        """
        if self._fingerprint is not None or not self.has_layers:
            return self._fingerprint
        return self._digest(self.model.named_parameters())

    def head_fingerprint(self) -> str:
        """Return such digits over config, embedding and head alone, which a target without its layers gives too."""
        return self._digest([("embedding", cast(Tensor, self.embedding.weight)), ("head", self.head_weight())])

    def _digest(self, parameters: Iterable[tuple[str, Tensor]]) -> str:
        digest = hashlib.sha256(json.dumps(self.text_config.to_diff_dict(), sort_keys=True, default=str).encode())
        for name, parameter in parameters:
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 256)].float().cpu()
            digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:16]


class _Capture:
    """Hooks that keep the outputs of some decoder layers during one forward pass."""

    def __init__(self, decoder_layers: nn.ModuleList, layer_ids: tuple[int, ...]) -> None:
        self._layers = [decoder_layers[layer_id - 1] for layer_id in layer_ids]
        self._outputs: list[Tensor] = []
        self._hooks: list = []

    def __enter__(self) -> "_Capture":
        self._hooks = [layer.register_forward_hook(self._keep) for layer in self._layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._outputs.append(output if isinstance(output, Tensor) else output[0])

    def side_by_side(self, device: torch.device) -> Tensor | None:
        """Return [B, T, A * H] in ascending layer order, the order of execution; None where nothing was asked for."""
        return torch.cat([output.to(device) for output in self._outputs], -1) if self._outputs else None


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers, whatever the family calls it."""
    num_layers = num_layers_of(model.config.get_text_config())
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise UserError(
            f"{type(model).__name__} cannot be decoded: its layers are not a list of {num_layers}; give another target"
        )
    return lists[0]


def check_layer_ids(layer_ids: Iterable[int], target: Target) -> tuple[int, ...]:
    """Return layer ids if distinct, ascending and in 1..num_layers - 1, as engines capture them, or refuse them.

    Layers of some targets give several residual streams: no engine lets a drafter read them.
    """
    ids = tuple(layer_ids)
    if ids and (streams := getattr(target.text_config, "hc_mult", 1)) > 1:
        raise UserError(
            f"layers of {target.name} give {streams} residual streams and no hidden state that a drafter could read: "
            "train one that reads the last hidden state alone, such as eagle, medusa or draft_model"
        )
    if list(ids) != sorted(set(ids)) or not all(1 <= layer_id < target.num_layers for layer_id in ids):
        raise UserError(
            f"layer_ids {list(ids)}: give distinct ascending ids from 1 to {target.num_layers - 1}, "
            f"the target has {target.num_layers} layers"
        )
    return ids


def spread_layer_ids(num_layers: int) -> list[int]:
    """Return the ids of a low, a middle and a high layer, as EAGLE-3 reads them; a shallow target's are spread out."""
    ids = [2, num_layers // 2, num_layers - 3]
    return ids if ids == sorted(set(ids)) else sorted({1, max(1, num_layers // 2), max(1, num_layers - 1)})
