"""Quantised targets are loaded as the plain ones that their codes stand for, bit for bit, or refused in a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import MULTIMODAL, SERVED, family_config, plain_model
from quantised import FORMS, e2m1_codes, quantise, random_bytes, set_config
from runs import base_of, final_weights, make_config
from safetensors.torch import load_file, save_file
from tiny_target import tiny_tokenizer
from torch import Tensor

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter
from draftsmith.models.drafter_parts.target_layers import layer_tensors
from draftsmith.models.errors import UserError
from draftsmith.models.fused.fused_layers import fuse
from draftsmith.models.mtp_heads.mtp_layouts import QWEN
from draftsmith.models.mtp_heads.mtp_stitching import write_with_head
from draftsmith.models.target.shape import target_weights
from draftsmith.models.target.target_files import read_config
from draftsmith.train import train
from draftsmith.train.run_folder.checkpoint import checkpoints

SIZES = {"hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 1, "head_dim": 32}  # blocks of 128 are cut
IN_BF16 = ("fp8 in blocks", "compressed nvfp4", "compressed int8")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def source(make_target_dir: Callable[..., Path]) -> Path:
    return make_target_dir(**SIZES)


@pytest.fixture(scope="module")
def pair(make_target_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose layers and head are in blocks of fp8, and the plain one that it stands for."""
    folder, source = tmp_path_factory.mktemp("pair"), make_target_dir(**{**SIZES, "num_hidden_layers": 3})
    chosen = ("_proj.weight", "lm_head.weight")
    quantise(source, folder / "quantised", folder / "plain", FORMS["fp8 in blocks"], lambda name: name.endswith(chosen))
    return folder / "quantised", folder / "plain"


def whole(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    return Target.from_pretrained(folder, "cpu", dtype)


def assert_same(own: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert own.keys() == expected.keys()
    assert not [name for name in own if own[name].dtype != expected[name].dtype or not own[name].equal(expected[name])]


def parameters(target: Target) -> dict[str, Tensor]:
    return dict(target.model.named_parameters())


@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, torch.float32) for form in FORMS), *((form, torch.bfloat16) for form in IN_BF16)]
)
def test_weights_are_the_products_to_the_bit(form: str, dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    """One product is left plain, as the fields `ignore` and `modules_to_not_convert` have it."""
    quantise(
        source, tmp_path / "own", tmp_path / "plain", FORMS[form], lambda name: "_proj" in name and "up" not in name
    )
    target = whole(tmp_path / "own", dtype)
    assert_same(
        parameters(target), {name: part.to(dtype) for name, part in load_file(tmp_path / "plain" / WEIGHTS).items()}
    )
    assert target.fused == (dtype == torch.float32)
    assert FORMS[form].config["quant_method"] in str(target.quantisation)


def test_forms_may_be_mixed(source: Path, tmp_path: Path) -> None:
    """In one checkpoint of compressed-tensors: fp8 in attention, NVFP4 in the MLP."""
    quantise(source, tmp_path / "own", tmp_path / "half", FORMS["compressed fp8"], lambda name: "attn." in name)
    quantise(
        tmp_path / "half", tmp_path / "mlp", tmp_path / "plain", FORMS["compressed nvfp4"], lambda name: "mlp." in name
    )
    attention, mlp = (load_file(tmp_path / name / WEIGHTS) for name in ("own", "mlp"))
    both = {name: part for name, part in attention.items() if "mlp." not in name}
    both |= {name: part for name, part in mlp.items() if "mlp." in name}
    save_file(both, tmp_path / "own" / WEIGHTS, {"format": "pt"})
    assert_same(parameters(whole(tmp_path / "own")), load_file(tmp_path / "plain" / WEIGHTS))


@torch.no_grad()
def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Their codes are those of the transposed matrices."""
    config = family_config("gpt_oss", {**SERVED["gpt_oss"], "hidden_size": 64, "intermediate_size": 96})
    plain_model(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tensors = expected = load_file(tmp_path / WEIGHTS)
    for name in [name for name in expected if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = expected[name].shape
        codes, values = e2m1_codes(experts, columns, rows)
        exponents = random_bytes(experts, columns, rows // 32) % 4 + 121
        values = values.reshape(*exponents.shape, 32) * 2.0 ** (exponents[..., None] - 127)
        expected = {
            **expected,
            name: torch.tensor(values.reshape(codes.shape[:2] + (rows,)).transpose(0, 2, 1).copy()).float(),
        }
        scales = torch.tensor(exponents.astype(np.uint8))
        tensors = {**tensors, f"{name}_blocks": codes.view(*scales.shape, 16), f"{name}_scales": scales}
        del tensors[name]
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    set_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert_same(parameters(whole(tmp_path)), expected)


def test_a_multimodal_target_whose_text_is_quantised(tmp_path: Path) -> None:
    """As Kimi K2.5 has it: the quantisation stands in the config of the text. The tower is neither read nor counted."""
    torch.manual_seed(0)
    wide = {**MULTIMODAL["internvl"]["text_config"], "hidden_size": 64, "intermediate_size": 64}
    plain_model(family_config("internvl", {**MULTIMODAL["internvl"], "text_config": wide})).save_pretrained(
        tmp_path / "source"
    )
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    quantise(
        tmp_path / "source",
        tmp_path / "own",
        tmp_path / "plain",
        FORMS["compressed int4"],
        lambda name: "language_model" in name and name.endswith("_proj.weight"),
    )
    content = json.loads((tmp_path / "own" / "config.json").read_text())
    content["text_config"]["quantization_config"] = content.pop("quantization_config")
    (tmp_path / "own" / "config.json").write_text(json.dumps(content))
    target, plain = whole(tmp_path / "own"), whole(tmp_path / "plain")
    assert_same(parameters(target), parameters(plain))
    assert target.fingerprint() == plain.fingerprint()


# --- what follows from it


def test_it_is_the_plain_target_for_samples_and_drafters(pair: tuple[Path, Path]) -> None:
    """Whole, by its ends alone, in layers on several devices, and by its size: in bytes of the unpacked weights."""
    target, plain = map(whole, pair)
    assert target.fingerprint() == plain.fingerprint()
    ends, plain_ends = (Target.head_from_pretrained(folder, None, "cpu", torch.float32) for folder in pair)
    assert ends.head_fingerprint() == plain_ends.head_fingerprint() == target.head_fingerprint()
    assert ends.head_weight().equal(target.head_weight())
    assert_same(*(layer_tensors(part, 1) for part in (ends, plain_ends)))
    spread = Target.spread_from_pretrained(pair[0], torch.device("cpu"), [torch.device("cpu")] * 3, torch.float32)
    assert_same(parameters(spread), parameters(plain))
    weights = target_weights(read_config(pair[0]), "quantised")
    assert weights == target_weights(read_config(pair[1]), "plain")
    assert weights.num_weights == sum(part.numel() for part in parameters(target).values())


def test_greedy_text_and_training_are_those_of_the_plain_target(pair: tuple[Path, Path], tmp_path: Path) -> None:
    texts, drafters, base = [], [], base_of(pair[1], whole(pair[1]), tmp_path)
    for folder in pair:
        run = train(make_config("eagle3", {**base, "target": folder}, tmp_path / folder.name, run={"steps": 2}))
        drafters.append(final_weights(run))
        target = whole(folder)
        decoder = SpeculativeDecoder(target, load_drafter(checkpoints(run)[-1], target))
        texts.append(decoder.generate(["strike", "heat the iron"], max_new_tokens=16).token_ids)
    assert texts[0] == texts[1]
    assert_same(*drafters)


class RoundingLinear(torch.nn.Linear):
    """A product of transformers that rounds what it multiplies, such as BitNet's."""


def test_linears_that_round_are_not_fused(source: Path) -> None:
    model = whole(source).model
    assert fuse(model) is not None
    model.base_model.layers[0].mlp.down_proj.__class__ = RoundingLinear
    assert fuse(model) is None


# --- refused


def with_tensors(**changes: Callable[[Tensor], Tensor] | Tensor) -> Callable[[Path], None]:
    """Change the stored tensors of a product by the endings of their names, or add tensors."""

    def change(folder: Path) -> None:
        path, place = folder / WEIGHTS, "model.layers.0.mlp.up_proj."
        tensors = load_file(path)
        for ending, value in changes.items():
            tensors[place + ending] = value if isinstance(value, Tensor) else value(tensors[place + ending])
        save_file({name: part.contiguous() for name, part in tensors.items()}, path, {"format": "pt"})

    return change


def with_quantisation(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())["quantization_config"]
        set_config(folder, quantization_config={**content, **changes})

    return change


def without_quantisation(folder: Path) -> None:
    set_config(folder, quantization_config=None)


SIBLING = "give the BF16 model that .* its model card names"
NOT_KNOWN = f"up_proj.weight is quantised in a form that draftsmith does not unpack.*{SIBLING}"
FP8, INT4, OTHER_ORDER = "fp8 in blocks", "compressed int4", "compressed int4, columns in another order"
REFUSED = {
    "awq": (FP8, with_quantisation(quant_method="awq"), f"quantised by 'awq', .*{SIBLING}.*--endpoint URL"),
    "gptq": (FP8, with_quantisation(quant_method="gptq"), f"quantised by 'gptq', .*{SIBLING}"),
    "bitsandbytes": (FP8, with_quantisation(quant_method="bitsandbytes"), f"'bitsandbytes'.*{SIBLING}"),
    "no method": (FP8, with_quantisation(quant_method=None), f"quantised by None.*{SIBLING}"),
    "a transform": (INT4, with_quantisation(transform_config={"a": {}}), f"transform.*{SIBLING}"),
    "blocks of words": (FP8, with_quantisation(weight_block_size=["a", 1]), r"weight_block_size\.0='a'"),
    "no config": (FP8, without_quantisation, f"_proj.weight is stored as float8_e4m3fn.*{SIBLING}"),
    "a factor of the inputs": (
        "modelopt nvfp4",
        with_tensors(pre_quant_scale=torch.ones(160)),
        f"pre_quant_scale is of a quantised layer.*{SIBLING}",
    ),
    "too few scales": ("compressed fp8", with_tensors(weight_scale=lambda scale: scale[:7]), NOT_KNOWN),
    "scales of a vector": ("compressed fp8", with_tensors(weight_scale=lambda scale: scale[:, 0]), NOT_KNOWN),
    "three bits": (INT4, with_tensors(weight_packed=lambda codes: codes[:, :15]), NOT_KNOWN),
    "columns of no group": (OTHER_ORDER, with_tensors(weight_g_idx=lambda order: order + 1), NOT_KNOWN),
    "too few zeros": ("compressed int8", with_tensors(weight_zero_point=lambda zero: zero[:1]), NOT_KNOWN),
    "plain values and a scale": ("fp8 of one scale", with_tensors(weight=lambda codes: codes.float()), NOT_KNOWN),
    "torchao in 4 bits": (
        "torchao int8",
        with_tensors(_weight_qdata=lambda codes: codes[:, :80].contiguous().view(torch.uint8)),
        NOT_KNOWN,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_forms_are_refused_in_a_line(case: str, source: Path, tmp_path: Path) -> None:
    form, change, message = REFUSED[case]
    quantise(source, tmp_path / "own", tmp_path / "plain", FORMS[form], lambda name: "mlp." in name)
    change(tmp_path / "own")
    with pytest.raises(UserError, match=message):
        whole(tmp_path / "own")


def test_a_plain_head_is_not_put_among_quantised_weights(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="engines take no plain head among such"):
        write_with_head(str(pair[0]), read_config(pair[0]), {"mtp.fc.weight": torch.ones(2, 2)}, QWEN, tmp_path)
