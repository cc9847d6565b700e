"""The files of a target, in a directory or on the Hub: config.json, tokenizer, generation config, weights by name.

Anybody may have written them: they are checked before transformers reads them, and no code that comes with them runs.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from draftsmith.models.errors import UserError, library_errors
from draftsmith.models.storage.model_files import find_file, target_config_file
from draftsmith.models.storage.reading import read_json_object
from draftsmith.models.storage.typed_json import from_json
from draftsmith.models.storage.weights import check_counts, files_of_index, read_weights
from draftsmith.models.target.quantised import Packed, Quantisation, unpacked

MOST_PARTS = 2000  # layers or experts of one model; the largest have some hundreds
QUANTISATION = "quantization_config"  # a field of config.json
OTHER_FILES = ("transformers_weights", "fusion_config")  # fields of config.json that change what transformers loads


def library_errors_of(name: str | Path) -> Any:
    """Return the context in which errors of transformers become those of a target's files."""
    return library_errors(f"target {str(name)!r} does not load", "give a whole copy of a model that transformers has")


def read_config(name: str | Path) -> PretrainedConfig:
    """Return the config of a target, without a quantisation of its weights: they are unpacked where they are read.

    Raises `UserError` where there is none that transformers knows.
    """
    path = target_config_file(name)
    content = read_json_object(path)
    check_counts(content, MOST_PARTS, str(path))
    if other := [field for field in OTHER_FILES if field in content]:
        raise UserError(f"{path} has {other[0]}, which is not read: take it out, and check that it is not needed")
    own = content.get("draftsmith")
    if isinstance(own, dict) and own.get("kind") != "draft_model":  # which is a causal language model itself
        raise UserError(f"target {str(name)!r} is a drafter: give the target that it was trained for")
    with library_errors_of(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        text: Any = config.get_text_config(decoder=True)
        if not isinstance(text, PretrainedConfig):  # transformers takes any value for it
            raise UserError(
                f"{path} has {str(text)[:50]!r} where the language model's config belongs: give a whole copy"
            )
        alone: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
        if text is not config and alone is not None:
            text.architectures = [alone.__name__]  # as in a copy of the language model alone: fingerprints cover it
    quantisation = read_quantisation(name)
    if quantisation is not None and not quantisation.is_computed:
        for part in (config, text):
            vars(part).pop(QUANTISATION, None)
    if config.is_encoder_decoder:
        raise UserError(
            f"target {str(name)!r} is an encoder-decoder, and drafters are made for decoders alone: give another target"
        )
    return config


def common_field(config: PretrainedConfig, name: str) -> Any:
    """Return a field of a config, None where it has none; where layers differ in it (Gemma 4's), that of most layers.

    transformers refuses such fields as ambiguous.
    """
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def read_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    mend = "give a model whose tokenizer files, such as tokenizer.json, are whole"
    with library_errors(f"the tokenizer of {str(name)!r} does not load", mend):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def read_generation_config(name: str | Path) -> GenerationConfig | None:
    """Return what a target says of its generation, such as the tokens that end a text; None where it says nothing."""
    path = find_file(name, GENERATION_CONFIG_NAME)
    if path is None:
        return None
    with library_errors_of(name):
        return GenerationConfig.from_dict(read_json_object(path))


def read_quantisation(name: str | Path) -> Quantisation | None:
    """Return how a target's weights are quantised by its config.json; None where they are plain."""
    path = target_config_file(name)
    content = read_json_object(path)
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]  # Kimi K2.5: in its text_config
    found = next((part[QUANTISATION] for part in parts if part.get(QUANTISATION) is not None), None)
    return None if found is None else from_json(Quantisation, found, f"{path}: {QUANTISATION}")


def why_not_read(name: str | Path) -> str | None:
    """Return why a target's quantised weights cannot be read, in a clause; None where they can be, or are plain."""
    quantisation = read_quantisation(name)
    return None if quantisation is None else quantisation.why_not_read()


def read_tensors(name: str | Path, wanted: Callable[[str], bool], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors whose names are wanted, those that are quantised unpacked to a dtype.

    `name`: a directory or a Hub name. Raises `UserError` naming a file that is not there or damaged.
    """
    tensors = stored_tensors(name, wanted)
    return {key: tensor[...] for key, tensor in plain_tensors(name, tensors, dtype).items()}


def plain_tensors(name: str | Path, stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor | Packed]:
    """Return the stored tensors of a target as plain parameters, each of a dtype that is unpacked when it is read."""
    quantisation = read_quantisation(name)
    return {**stored} if quantisation is None else unpacked(stored, quantisation, dtype, f"target {str(name)!r}")


def stored_tensors(
    name: str | Path, wanted: Callable[[str], bool], device: str = "cpu", mapped: bool = False
) -> dict[str, Tensor]:
    """Return the tensors whose names are wanted, as the files have them; on `meta` their sizes and types alone.

    `mapped`: they get into memory when they are used. `name`: a directory or a Hub name. Raises `UserError` naming a
    file that is not there or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(name, wanted):
        tensors |= read_weights(path, device, wanted, mapped)
    return tensors


def _weight_files(name: str | Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files that hold wanted tensors, by the index where there is one, in transformers' order of choice."""
    for whole, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if path := find_file(name, whole):
            yield path
            return
        if path := find_file(name, index):
            for file in dict.fromkeys(file for key, file in files_of_index(path).items() if wanted(key)):
                part = find_file(name, file)
                if part is None:
                    raise UserError(f"target {str(name)!r} lacks {file}, which its index names: get it whole")
                yield part
            return
    raise UserError(f"target {str(name)!r} has neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}: get it whole")
