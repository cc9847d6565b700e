"""The language model of a multimodal checkpoint is what a copy of it alone would be, and its towers are not loaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import build
from families import MULTIMODAL, VOCABULARY, family_config, plain_model
from tiny_target import tiny_tokenizer
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter
from draftsmith.models.drafter_parts.target_layers import layer_tensors
from draftsmith.models.errors import UserError
from draftsmith.models.target import loading
from draftsmith.models.target.shape import target_weights

TOWERS = ("vision", "visual", "audio", "projector", "connector", "aligner")  # in the names of their tensors
COPIED = ("exaone4_5", "gemma3", "gemma4", "gemma4_unified", "internvl", "llava", "llava_next", "mistral3", "voxtral")
DECODED = ("gemma3", "gemma4", "glm4v", "internvl", "mistral3", "qwen2_5_vl", "qwen3_vl_moe")


def save(whole: PreTrainedModel, folder: Path) -> Path:
    whole.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def whole_model(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return plain_model(family_config(model_type, MULTIMODAL[model_type]))


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY - 8, (rows, length))  # the last ones stand for images


@torch.no_grad()
@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_logits_are_those_of_the_whole_model_to_the_bit(model_type: str, tmp_path: Path) -> None:
    """The towers of the tests have as many layers as the decoder, and still its layers are found."""
    whole = whole_model(model_type)
    target = Target.from_pretrained(save(whole, tmp_path), "cpu", fuse_layers=False)
    assert not [name for name, _ in target.model.whole.named_parameters() if any(part in name for part in TOWERS)]
    target.model.set_attn_implementation("eager")
    hidden = target.model.base_model(input_ids=(token_ids := tokens()), use_cache=False).last_hidden_state
    assert torch.equal(target.logits(hidden), whole(input_ids=token_ids, use_cache=False).logits)
    assert list(target.decoder_layers) == list(target.model.base_model.layers)


@pytest.mark.parametrize("model_type", COPIED)
def test_a_copy_of_the_language_model_alone_is_the_same_target(model_type: str, tmp_path: Path) -> None:
    """Samples and drafters made with one are taken with the other."""
    whole = whole_model(model_type)
    text_config = whole.config.get_text_config()
    copy = AutoModelForCausalLM.from_config(text_config, dtype=whole.dtype)
    assert MODEL_FOR_CAUSAL_LM_MAPPING[type(text_config)] is type(copy)
    copy.base_model.load_state_dict(whole.get_decoder().state_dict())
    copy.lm_head.load_state_dict(whole.get_output_embeddings().state_dict())
    taken = Target.from_pretrained(save(whole, tmp_path / "whole"), "cpu")
    alone = Target.from_pretrained(save(copy, tmp_path / "alone"), "cpu")
    ends = Target.head_from_pretrained(tmp_path / "whole", None, "cpu")
    assert taken.fingerprint() == alone.fingerprint()
    assert taken.head_fingerprint() == alone.head_fingerprint() == ends.head_fingerprint()
    assert taken.fused == alone.fused
    assert taken.config.architectures == whole.config.architectures != alone.config.architectures


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "qwen3_vl"])
def test_towers_get_no_memory(model_type: str, tmp_path: Path) -> None:
    """A config whose towers would take terabytes, with weights that have none of it."""
    save(whole_model(model_type), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["intermediate_size"] = 10**10
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (Target.from_pretrained, lambda name, device: Target.head_from_pretrained(name, None, device)):
        target = load(tmp_path, "cpu")
        assert sum(parameter.numel() for parameter in target.model.parameters()) < 10**6


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["gemma3", "idefics3", "llava", "qwen2_5_vl", "voxtral"])
def test_first_layers_are_read_without_towers(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a tower has the same number in its name as one of the decoder.

    What lies beside the layers of a tower may be read, where it has other names on disk than in the model.
    """
    read: list[str] = []
    stored_tensors = loading.stored_tensors

    def noted(name: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        tensors = stored_tensors(name, wanted)
        read.extend(tensors)
        return tensors

    whole = whole_model(model_type)
    save(whole, tmp_path)
    monkeypatch.setattr(loading, "stored_tensors", noted)
    target = Target.first_layers_from_pretrained(tmp_path, 2, torch.device("cpu"), torch.float32)
    token_ids = tokens()
    target.model.set_attn_implementation("eager")
    states: list[Tensor] = []
    for layers in (whole.get_decoder().layers, target.decoder_layers):
        layers[1].register_forward_hook(
            lambda *call: states.append(call[2] if torch.is_tensor(call[2]) else call[2][0])
        )
    whole(input_ids=token_ids, use_cache=False)
    target.model.base_model(input_ids=token_ids, use_cache=False)
    assert torch.equal(*states)
    assert read
    assert not [name for name in read if any(part in name for part in TOWERS) and re.search(r"\.\d+\.", name)]


@pytest.mark.parametrize("model_type", ["llava", "voxtral"])
def test_layers_to_copy_are_the_decoders(model_type: str, tmp_path: Path) -> None:
    """From the files, too, in which a layer of a tower has the same number."""
    save(whole_model(model_type), tmp_path)
    whole, ends = Target.from_pretrained(tmp_path, "cpu"), Target.head_from_pretrained(tmp_path, None, "cpu")
    expected = layer_tensors(whole, 2)
    found = layer_tensors(ends, 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model_type", DECODED)
def test_greedy_text_is_that_of_generate(model_type: str, tmp_path: Path) -> None:
    """Ragged prompts in one batch, and whatever drafts, against the whole model's own `generate`, one by one."""
    whole = whole_model(model_type)
    target = Target.from_pretrained(save(whole, tmp_path), "cpu")
    prompts = [tokens(1, length)[0].tolist() for length in (2, 9, 23)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        written = whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        expected.append(written[0, len(prompt) :].tolist())
    for drafter in (load_drafter("ngram", target), build("eagle3", target)):
        output = SpeculativeDecoder(target, drafter).generate(prompts, max_new_tokens=20)
        assert output.token_ids == expected
        assert output.stats.total.num_drafts


def test_the_changed_target_of_medusa_2_is_refused(tmp_path: Path) -> None:
    """The language model alone would be written, without the towers that are served with it."""
    target = Target.from_pretrained(save(whole_model("llava"), tmp_path), "cpu")
    with pytest.raises(UserError, match="adapt_target=no"):
        build("medusa", target, adapt_target="full")


@pytest.mark.parametrize("model_type", ["gemma3", "paddleocr_vl", "qwen3_vl"])
def test_the_size_of_the_language_model_is_counted(model_type: str, tmp_path: Path) -> None:
    """Without towers, from which a run's needs are estimated; transformers has no causal class for two of them."""
    whole = whole_model(model_type)
    weights = target_weights(Target.without_weights(save(whole, tmp_path)).config, model_type)
    norm = whole.config.get_text_config().hidden_size
    layers = sum(weight.numel() for weight in whole.get_decoder().layers.parameters())
    assert weights.weights_of_layers == layers + norm
