"""A standalone draft model (arXiv 2211.17192), distilled from the target (DistillSpec, arXiv 2310.08461).

It is any small causal language model; one of another tokenizer takes the target's vocabulary before training starts. By
default it is a copy of a few evenly spaced layers of the target. In decoding it shares nothing with the target and
keeps a cache of its own.

Shapes: B rows, T tokens, H hidden width, V vocabulary.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.models.batch import Batch, send
from draftsmith.models.drafter_configs import DraftModelConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import loaded
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.drafter_parts.tree_drafting import DrafterCache, LevelWindows, grow
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.fused.fused_layers import fuse
from draftsmith.models.layers import gather_columns, shift_left
from draftsmith.models.losses.chain_loss import (
    ChainLoss,
    Depth,
    LossSums,
    RowLosses,
    divergence_over_rows,
    marked_rows,
    teacher_rows,
)
from draftsmith.models.sampling.trees import Chain, Shape
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.slots.forward import context_of, run_causal, run_on_slots
from draftsmith.models.slots.window import Window, chain_window
from draftsmith.models.target.loading import LanguageModel, drop_layers, load_model
from draftsmith.models.target.other_tokenizer import OtherTokenizer, take_vocabulary
from draftsmith.models.target.scaled_head import scaled_head
from draftsmith.models.target.support import carries_states
from draftsmith.models.target.target import Features, Target, find_decoder_layers
from draftsmith.models.target.target_files import common_field, read_config

SIMULATED_DEPTH = 4  # drafted tokens a round, of the acceptance length that the loss tells


class DraftModel(Drafter):
    kind = "draft_model"
    config_class = DraftModelConfig
    can_branch = True
    prefills_from_tokens = True
    head: nn.Module  # of the model, with its family's scaling of logits
    common_tokens: Tensor | None = None  # bool [V] those that a model of another tokenizer had as they are

    def __init__(self, config: DraftModelConfig, model: PreTrainedModel, target: Target) -> None:
        super().__init__(config)
        self.target = target
        self.model = model
        self.__dict__["head"] = scaled_head(model)  # not as a module, which would be the model's again by another name
        vocab_size = model.config.get_text_config().vocab_size
        if vocab_size != target.vocab_size:
            raise UserError(
                f"this draft model has a vocabulary of {vocab_size}, but {target.name} has {target.vocab_size}: "
                "a draft model must share the target's vocabulary"
            )
        if carries_states(model.config):  # it reads again what the target has corrected, and a state cannot go back
            raise UserError(
                f"a draft model of {model.config.model_type} is not built: its layers carry a running state; give "
                "another drafter.model, or train another kind of drafter"
            )

    @classmethod
    def from_target(cls, config: DraftModelConfig, target: Target) -> "DraftModel":
        """Return an existing model, or the target without most of its layers, or a narrower model like it."""
        if config.model is not None:
            return cls.from_model(config, config.model, target)
        num_layers = config.num_layers or 2
        if not 1 <= num_layers < target.num_layers:
            raise UserError(f"num_layers {num_layers}: give 1 to {target.num_layers - 1}, the target has more")
        if not target.has_layers:
            raise UserError("a draft model starts from the target's layers: train it with data.features=online")
        kept = [round(i * (target.num_layers - 1) / max(1, num_layers - 1)) for i in range(num_layers)]
        if config.hidden_size in (None, target.hidden_size):
            return cls(config, model_of_layers(target, kept), target)
        model_config = copy.deepcopy(target.text_config)
        drop_layers(model_config, kept)
        model = new_model(narrower(model_config, config.hidden_size))
        project_vocabulary(target, model)
        return cls(config, model, target)

    @classmethod
    def from_model(cls, config: DraftModelConfig, name: str, target: Target) -> "DraftModel":
        """Return an existing causal language model as a draft model.

        Families pad the vocabulary to different sizes at different widths. Engines want equal sizes: the padding is cut
        or filled up to the target's.
        """
        try:
            model, tokenizer = load_model(name, read_config(name), torch.device("cpu"), torch.float32)
        except UserError as error:
            raise UserError(f"drafter.model={name}: {error}") from None
        if isinstance(model, LanguageModel):  # of a multimodal one: engines load the causal model of its text
            weights, model = model.state_dict(), new_model(model.config)
            model.load_state_dict(weights)
        model.requires_grad_(True)
        if target.tokenizer is None or tokenizer.get_vocab() == target.tokenizer.get_vocab():
            if model.get_input_embeddings().num_embeddings != target.vocab_size:
                model.resize_token_embeddings(target.vocab_size, mean_resizing=False)
            return cls(config, model, target)
        other = OtherTokenizer(tokenizer, target.tokenizer, f"drafter.model={name}")
        take_vocabulary(model, other, target.text_config)
        drafter = cls(config, model, target)
        drafter.common_tokens = other.common(target.vocab_size)
        return drafter

    def starting_note(self, counts: Tensor) -> str | None:
        if self.common_tokens is None:
            return None
        share = counts[self.common_tokens].sum() / counts.sum()
        return (
            f"drafter.model={self.config.model} has another tokenizer than {self.target.name}: it has "
            f"{int(self.common_tokens.sum())} of {self.target.vocab_size} tokens as they are, {share:.0%} of what the "
            "target wrote; the others start as the mean of their parts"
        )

    @property
    def simulated_depth(self) -> int:
        return SIMULATED_DEPTH

    def loss(self, batch: Batch, features: Features) -> LossSums:
        """Return the divergence from the target at every token that the target wrote."""
        counted = shift_left(batch.on_host.loss_mask, 1)
        hidden = run_causal(self.model, batch.token_ids, batch.positions, batch.attention_mask())
        rows = divergence_over_rows(
            marked_rows(hidden, counted),
            self.head,
            marked_rows(features.last_hidden, counted),
            self.target.head,
            self.config.divergence,
            compiled=self.compile_loss,
        )
        num_counted = torch.full((), int(counted.sum()), device=hidden.device)
        return {
            "loss": (rows.loss, batch.loss_mask.sum()),
            "simulated_acceptance_length": self.simulated_length(batch, counted, rows.correct),
            "accuracy_0": (rows.correct.sum(), num_counted),
            "sampled_acceptance_0": (rows.acceptance.sum(), num_counted),
        }

    def simulated_length(self, batch: Batch, counted: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum and the number of acceptance lengths in chains of `SIMULATED_DEPTH` from each slot.

        `correct` [R] is 1 where the next token is the model's likeliest, at the R places that `counted` bool [B, T]
        marks.
        """
        marked = send(counted.flatten(), correct.device)
        right = torch.zeros_like(marked).masked_scatter(marked, correct)
        chain_loss = self.new_chain_loss(batch)
        nothing = torch.zeros((), device=correct.device)
        for depth in range(SIMULATED_DEPTH):
            places = teacher_rows(chain_loss.next_depth(), depth)
            chain_loss.add(RowLosses(nothing, right.index_select(0, send(places, correct.device)), nothing))
        return chain_loss.sums()["simulated_acceptance_length"]

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the model's own predictions: at places t + 1, t + 2, ... they are what it would draft after x_{t+1}."""
        hidden = run_causal(self.model, batch.token_ids, batch.positions, batch.attention_mask()).flatten(0, 1)
        for i in range(depth):
            places = teacher_rows(chain_loss.next_depth(), i)
            yield Depth(hidden.index_select(0, send(places, hidden.device)), self.head, places)

    def as_target(self) -> Target:
        """Return the model as a target, whose texts end as those of the target that it drafts for."""
        self.model.generation_config.eos_token_id = self.target.eos_token_ids
        return Target(self.model, self.target.tokenizer, "the draft model", fuse_layers=False)

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> "DraftModelCache":
        return DraftModelCache(self.model, num_rows, num_slots, shape)

    def prefill(self, cache: "DraftModelCache", token_ids: Tensor, features: Features, window: Window) -> None:
        self.read(token_ids.gather(1, window.slots), window, cache)

    def read(self, token_ids: Tensor, window: Window, cache: "DraftModelCache") -> Tensor:
        """Return the last hidden states [B, T, H] of the tokens [B, T] of a window, and keep their keys and values."""
        if cache.fused_decoder is not None:
            return cache.fused_decoder.run(token_ids, window, cache.kv)[0]
        return run_on_slots(self.model, token_ids, window, cache.kv)

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Read what is new, then draft level by level.

        After a chain the cache lacks the newest committed token, and the one before it when the whole draft was
        accepted; both are read each round, so that all rows are treated alike. After a tree, whose nodes do not stand
        where their text went, and after another drafter's draft everything is read that the last round committed.
        """
        cache = state.cache
        if isinstance(shape, Chain) and state.own_drafts:
            slots = state.lengths[:, None] + cache.last_two
            hidden = self.read(state.token_ids.gather(1, slots), Window(slots, slots, slots[:, 0]), cache)[:, 1:]
        else:
            window = chain_window(state.positions[:, 0] + 1, state.positions.shape[1])
            hidden = self.read(state.token_ids.gather(1, window.slots), window, cache)
            column = (state.lengths - 1 - window.prefix).clamp(min=0)  # a finished row committed nothing
            hidden = gather_columns(hidden, column[:, None])  # [B, 1, H]
        windows = LevelWindows(state.lengths, cache)

        def read(tokens: Tensor, parents: Tensor | None) -> Tensor:
            return self.head(self.read(tokens, windows.next(tokens.shape[1], parents), cache))

        return grow(shape, cache.tree, self.head(hidden), read, state)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the config of an ordinary Hugging Face directory."""
        return {**self.model.config.to_diff_dict(), "architectures": [type(self.model).__name__]}

    def engine_tensors(self) -> dict[str, Tensor]:
        return untied(self.model)

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "DraftModel":
        own = DraftModelConfig.of_checkpoint(config)
        if config.get("model_type") not in CONFIG_MAPPING:
            raise UserError(f"config.json names model_type {config.get('model_type')!r}: give a causal language model")
        plain = {key: value for key, value in config.items() if key != "draftsmith"}
        model_config = CONFIG_MAPPING[config["model_type"]].from_dict(plain)
        if (context := context_of(model_config.get_text_config())) < 1:
            raise UserError(f"config.json gives texts {context} tokens (max_position_embeddings): give at least 1")
        with torch.device("meta"):
            tied = new_model(model_config).all_tied_weights_keys
        shared = {name: tensors[source] for name, source in tied.items() if source in tensors}
        model = loaded(lambda: new_model(model_config), {**shared, **tensors}, "this draft model")
        model.tie_weights()
        return cls(own, model, target)


class DraftModelCache(DrafterCache):
    """Keys and values of the whole model, and its layers in few operations where they can be fused."""

    def __init__(self, model: PreTrainedModel, num_rows: int, num_slots: int, shape: Shape) -> None:
        super().__init__(num_rows, num_slots, shape, model.device)
        self.fused_decoder = fuse(model)  # None where the model has no shape for it
        self.last_two = torch.arange(-2, 0, device=model.device)  # slots, counted from a row's length


def untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict with each shared tensor under its first name only, as safetensors wants it."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor
            seen.add(tensor.data_ptr())
    return tensors


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a causal language model of a config, with random weights.

    Raises `UserError` where transformers has none of the kind, as for the text of some multimodal models.
    """
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in causal:
        raise UserError(
            f"a draft model of {config.model_type} is not built: transformers has no causal language model of it "
            "that an engine could load; give another drafter.model, or train another kind of drafter"
        )
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)


def model_of_layers(target: Target, kept: list[int]) -> PreTrainedModel:
    """Return the target without its other layers. Raises `UserError` where a layer changes with its place."""
    what = f"a draft model cannot be made of layers {', '.join(map(str, kept))} of {target.name}"
    mend = "choose another drafter.num_layers, or give drafter.model instead"
    model_config = copy.deepcopy(target.text_config)
    try:
        drop_layers(model_config, kept)
        model = new_model(model_config)
        model.load_state_dict(layers_of(target.model.state_dict(), kept))
    except UserError:
        raise
    except ValueError as error:  # of the family's own rules for its config
        raise UserError(f"{what} ({first_line(error)}): {mend}") from None
    except RuntimeError:  # of shapes
        raise UserError(
            f"{what} (their tensors do not fit a smaller {target.text_config.model_type}): {mend}"
        ) from None
    for index, layer in zip(kept, find_decoder_layers(model), strict=True):
        before, after = (constants(either) for either in (target.decoder_layers[index], layer))
        if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            raise UserError(f"{what}: {changed[0]} of layer {index} depends on its place: {mend}")
    return model


def constants(layer: nn.Module) -> dict[str, Any]:
    """Return the plain values that a layer's modules hold beside its tensors, except for its number."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and name not in ("layer_idx", "training") and not name.startswith("_")
    }


def narrower(config: PretrainedConfig, width: int) -> PretrainedConfig:
    """Return the config of a narrower model: heads are as wide as they were, and the rest is in proportion.

    Raises `UserError` for a width that does not fit the heads, and for a family without such sizes.
    """
    if not hasattr(config, "num_key_value_heads") or not hasattr(config, "intermediate_size"):
        raise UserError(f"drafter.hidden_size: {config.model_type} has no width to scale; give drafter.model instead")
    head_width = common_field(config, "head_dim") or config.hidden_size // config.num_attention_heads
    if not 0 < width < config.hidden_size or width % head_width:
        raise UserError(
            f"drafter.hidden_size {width}: give a multiple of the target's head width {head_width} "
            f"below its hidden_size {config.hidden_size}"
        )
    heads = width // head_width
    key_value_heads = math.gcd(heads, config.num_key_value_heads)
    share = width / config.hidden_size
    config = copy.deepcopy(config)
    config.intermediate_size = max(1, round(config.intermediate_size * share))
    config.hidden_size, config.num_attention_heads, config.head_dim = width, heads, head_width
    config.num_key_value_heads = key_value_heads
    return config


@torch.no_grad()
def project_vocabulary(target: Target, model: PreTrainedModel) -> None:
    """Start embedding and head of a narrower model as the target's, on the main directions of its embedding."""
    embedding = cast(Tensor, target.embedding.weight).float()  # [V, H]
    own, head = cast(Tensor, model.get_input_embeddings().weight), cast(Tensor, model.get_output_embeddings().weight)
    directions = torch.linalg.eigh(embedding.T @ embedding).eigenvectors[:, -own.shape[1] :]  # [H, width]
    head.copy_(target.head_weight().float() @ directions)
    own.copy_(embedding @ directions)  # after the head, which may be the same
    model.tie_weights()


def layers_of(tensors: dict[str, Tensor], kept: list[int]) -> dict[str, Tensor]:
    """Return the state dict of only the kept layers, renumbered; everything outside the layers stays."""
    renumbered = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            if int(parts[number]) not in kept:
                continue
            parts[number] = str(kept.index(int(parts[number])))
        renumbered[".".join(parts)] = tensor.float()
    return renumbered
