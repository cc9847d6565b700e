"""Loading a target's model with all of its weights, or with its first layers' alone.

Transformers maps every file of a target privately, so that a limit on memory counts all of them, and downloads all.
Where layers are left out, a file is fetched only for a wanted tensor in it, and no more of it gets into memory.
Quantised weights are unpacked one by one while transformers loads them as plain ones.

Of a multimodal model, a `LanguageModel` is made: its *towers*, the modules that read images, video and sound, get no
memory.
"""

import copy
from collections.abc import Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.models.errors import UserError, library_errors
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.storage.weights import check_finite
from draftsmith.models.target.quantised import CODES, MEND, Packed
from draftsmith.models.target.target_files import (
    library_errors_of,
    plain_tensors,
    read_generation_config,
    read_quantisation,
    read_tokenizer,
    stored_tensors,
    why_not_read,
)

MOST_CLAIMED = 3  # values that a config may claim for each that the files hold: constants are in no file
TWO_ATTENTIONS = "longcat_flash"  # type of models whose num_hidden_layers counts attentions, two of each layer
OF_LAYERS = "per_layer"  # in names of Gemma 4's second embedding, for its layers alone and larger than the first

DeviceMap = dict[str, torch.device]  # of modules by their names
Weights = Mapping[str, Tensor | Packed]  # by their names on disk


class LanguageModel(PreTrainedModel, GenerationMixin):
    """The language model of a multimodal one, `whole`, through whose own code its passes go.

    Config and names of weights are those of a copy of the language model alone.
    """

    base_model_prefix = "model"
    _can_compile_fullgraph = True  # as far as its decoder can
    whole: PreTrainedModel

    def __init__(self, whole: PreTrainedModel) -> None:
        decoder, head = decoder_and_head(whole)
        super().__init__(decoder.config)
        self.model, self.lm_head = decoder, head
        self.__dict__["whole"] = whole  # not as a module, which would be the decoder again under another name
        self.generation_config = whole.generation_config

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for it in the text of a class's file

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> Any:
        return self.whole(input_ids=input_ids, **inputs)

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        self.model.set_attn_implementation(*args, **kwargs)


def whole_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the multimodal model that a language model is of, without its towers; others are whole themselves."""
    return model.whole if isinstance(model, LanguageModel) else model


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return whether a config is of a language model among towers, which has a config of its own in it."""
    return config.get_text_config(decoder=True) is not config


def model_class_of(config: PretrainedConfig) -> Any:
    """Return the class of transformers' that writes text with a model of this config; None where there is none."""
    mapping: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING if is_multimodal(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping.get(type(config), None)


def without_towers(model_class: Any) -> Any:
    """Return a class of models like a multimodal one whose towers are dropped before they get memory."""

    def make(self: Any, config: PretrainedConfig) -> None:
        model_class.__init__(self, config)
        drop_towers(self)

    own = {"__init__": make, "__module__": model_class.__module__}  # by which transformers knows classes of its own
    return type(model_class.__name__, (model_class,), own)


def decoder_and_head(whole: Any) -> tuple[Any, Any]:
    """Return the parts of a multimodal model that write text. Raises `UserError` where there are none."""
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    if (own_head := decoder.get_output_embeddings()) is not None:  # Llama 4, whose decoder is a causal language model
        return decoder.model, own_head
    if head is None or decoder is whole:
        raise UserError(f"no language model can be taken out of {type(whole).__name__}: give a target of text alone")
    return decoder, head


def drop_towers(whole: Any) -> None:
    """Take all modules but decoder and head out of a multimodal model; `towers` keeps their names."""
    (decoder, head), whole.towers = decoder_and_head(whole), []
    for holder in [module for module in whole.modules() if module is not decoder and holds(module, decoder)]:
        for name, child in list(holder.named_children()):
            if child is not head and not holds(child, decoder):
                delattr(holder, name)
                whole.towers.append(name)
    whole._keys_to_ignore_on_load_unexpected.update(whole.towers)


def holds(module: nn.Module, part: nn.Module) -> bool:
    return any(inner is part for inner in module.modules())


def load_model(
    name: str | Path,
    config: PretrainedConfig,
    device: torch.device | DeviceMap,
    dtype: torch.dtype,
    tensors: Weights | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load all weights of a model of this config (transformers would make up missing ones), and the tokenizer.

    `device`: one, or by a map several, between which accelerate then moves what modules are called with. `tensors`: the
    weights by their names on disk, where they have been read already.
    """
    what, is_whole = f"target {str(name)!r}", tensors is None
    if is_whole and read_quantisation(name) is not None:
        if reason := why_not_read(name):
            raise UserError(f"{what} is not read: {reason}")
        tensors = plain_tensors(name, stored_tensors(name, lambda key: True, mapped=True), dtype)
    check_sizes(config, stored_tensors(name, lambda key: True, "meta") if tensors is None else tensors, what)
    tokenizer, generation_config = read_tokenizer(name), read_generation_config(name)
    options: Any = {"dtype": dtype, "attn_implementation": ATTENTION, "output_loading_info": True}
    if isinstance(device, dict):
        options["device_map"] = device
    model_class = model_class_of(config)
    with library_errors_of(name):
        model, report = (without_towers(model_class) if is_multimodal(config) else model_class).from_pretrained(
            name if tensors is None else None, config=config, state_dict=tensors, trust_remote_code=False, **options
        )
        if is_multimodal(config):
            model = LanguageModel(model)
        if isinstance(device, torch.device):
            model.to(device)
    if missing := sorted(key for key in report["missing_keys"] if is_whole or OF_LAYERS not in key):
        raise UserError(
            f"{what} lacks {len(missing)} of its weights, {missing[0]} among them: give a whole causal language model"
        )
    check_finite(model.named_parameters(), what)
    if generation_config is not None:
        model.generation_config = generation_config
    return model.eval().requires_grad_(False), tokenizer


def check_sizes(config: PretrainedConfig, stored: Weights, what: str) -> None:
    """Refuse a config.json that describes another model than the weights are of, before memory is taken for it."""
    num_layers = num_layers_of(config.get_text_config())
    if num_layers > len(stored):
        raise UserError(f"{what}: its config.json has {num_layers} layers, and its weights are {len(stored)} tensors")
    model = model_without_memory(config, what)
    expected = model.state_dict()
    for name in sorted(expected.keys() & stored.keys()):
        if expected[name].is_floating_point() and stored[name].dtype in CODES:
            raise UserError(
                f"{what}: {name} is stored as {str(stored[name].dtype)[6:]}, quantised in a form that its config.json "
                f"does not tell or draftsmith does not unpack: {MEND}"
            )
        if sorted(expected[name].shape) != sorted(stored[name].shape):  # transformers turns some while it loads them
            raise UserError(
                f"{what}: {name} has the shape {list(stored[name].shape)}, and {list(expected[name].shape)} by its "
                "config.json: these files are not of one model, take another copy"
            )
    all_tensors = chain(model.named_parameters(), model.named_buffers())  # the latter also of what no file holds
    claimed = sum(tensor.numel() for name, tensor in all_tensors if OF_LAYERS not in name)
    held = sum(tensor.numel() for tensor in stored.values())
    if claimed > MOST_CLAIMED * held:
        raise UserError(
            f"{what}: its config.json is of a model of {claimed:,} values, and its weights hold {held:,}: these files "
            "are not of one model, take another copy"
        )


def model_without_memory(config: PretrainedConfig, what: str) -> PreTrainedModel:
    """Return a model of a config whose tensors have sizes and no values."""
    auto_class = AutoModelForMultimodalLM if is_multimodal(config) else AutoModelForCausalLM
    with library_errors(f"{what} has a config.json of no model", "take another copy"), torch.device("meta"):
        model = auto_class.from_config(config, attn_implementation=ATTENTION, trust_remote_code=False)
        if is_multimodal(config):
            drop_towers(model)
            return LanguageModel(model)
        return model


def load_first_layers(
    name: str | Path,
    config: PretrainedConfig,
    num_layers: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model of a target's first layers alone, its embedding, final norm and head, and the tokenizer."""
    shortened = copy.deepcopy(config)
    drop_layers(shortened.get_text_config(), kept=list(range(num_layers)))
    towers = getattr(whole_of(model_without_memory(shortened, f"target {str(name)!r}")), "towers", [])

    def wanted(key: str) -> bool:
        return _layer_of(key) < num_layers and OF_LAYERS not in key and not set(key.split(".")) & set(towers)

    tensors = plain_tensors(name, stored_tensors(name, wanted), dtype)
    return load_model(name, shortened, device, dtype, tensors)


def device_map(
    model: PreTrainedModel, decoder_layers: nn.ModuleList, of_layers: list[torch.device], of_ends: torch.device
) -> DeviceMap:
    """Return a map of each layer to its device, and of all else to that of the ends; `model` needs no weights."""
    path = next(name for name, module in model.named_modules() if module is decoder_layers)
    holders = ["", *accumulate(path.split("."), "{}.{}".format)]  # from the model to the layers' list
    beside = [name for name, _ in model.named_modules() if name.rpartition(".")[0] in holders[:-1]]
    places = {name: of_ends for name in beside if name not in holders}
    return places | {f"{path}.{layer}": device for layer, device in enumerate(of_layers)}


def _layer_of(tensor: str) -> int:
    """Return the layer of a tensor by its name, counted from 0; -1 outside of all layers."""
    return next((int(part) for part in tensor.split(".") if part.isdigit()), -1)


def num_layers_of(text_config: PretrainedConfig) -> int:
    """Return the number of decoder layers, each of which has a hidden state behind it."""
    if text_config.model_type == TWO_ATTENTIONS:
        return text_config.num_layers
    return text_config.num_hidden_layers


def drop_layers(text_config: PretrainedConfig, kept: list[int]) -> None:
    """Make it the config of a model of only the kept layers."""
    if shared := getattr(text_config, "num_kv_shared_layers", 0):  # at the end, and so they stay
        first_shared = num_layers_of(text_config) - shared
        text_config.num_kv_shared_layers = sum(layer >= first_shared for layer in kept)
    setattr(text_config, "num_layers" if text_config.model_type == TWO_ATTENTIONS else "num_hidden_layers", len(kept))
    for name in ("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers"):
        of_each = getattr(text_config, name, None)
        if of_each and len(of_each) != len(kept):  # some follow from the number of layers
            setattr(text_config, name, [of_each[layer] for layer in kept])
