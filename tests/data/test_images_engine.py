"""A real vLLM reads images: DRAFTSMITH_VLLM names the folder of its virtual environment, which needs torchvision, too.

The target is a tiny random Qwen2.5-VL. The witness of what vLLM computes is the whole model in transformers, towers
included.

Shapes: T tokens, P patches, A number of layers asked for, H hidden width.
"""

import base64
import json
import os
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from image_target import CONTEXT, IDS, MERGED, PATCH, save_image_target
from runs import make_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from vllm_process import extraction_options, serving

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.answers.with_images import OPTION
from draftsmith.data.samples.folder import read_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.models import Target
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.train import train
from draftsmith.train.run_folder.checkpoint import checkpoints

pytestmark = pytest.mark.engine
LAYER_IDS = [1, 2, 3]
NUM_LAYERS = 4
SIZES = [(2, 2), (2, 4), (4, 4)]  # height and width of images in patches


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_target(tmp_path_factory.mktemp("target") / "vl")


@pytest.fixture(scope="module")
def url(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = Path(os.environ.get("DRAFTSMITH_VLLM", "")) / "bin" / "python"
    if python.is_file() and subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        pytest.skip("vLLM reads images with torchvision: install it beside vLLM")
    folder = tmp_path_factory.mktemp("vllm")
    options = [*extraction_options([*LAYER_IDS, NUM_LAYERS], folder), OPTION]
    options += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "8"]
    helpers = str(Path(__file__).parents[1] / "helpers")
    with serving(str(target_dir), folder / "log.txt", *options, PYTHONPATH=helpers) as url:
        yield url


def pixels_of(number: int, height: int, width: int) -> Tensor:
    """The pixels of an image, random bytes [height, width, 3]."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (height * PATCH, width * PATCH, 3), generator=generator, dtype=torch.uint8)


def png(pixels: Tensor) -> str:
    """The file of an image as a data: URL."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.numpy().tobytes() for row in pixels)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def patches(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """An image as the tower reads it, [P, 3 * 2 * PATCH^2], and its size in patches, [1, 3].

    Patches of one token stand together, and each holds its pixels twice, as a film of two equal pictures would.
    """
    values = (pixels.float() / 255 - 0.5) / 0.5
    height, width = (size // PATCH for size in pixels.shape[:2])
    tokens = values.reshape(height // MERGED, MERGED, PATCH, width // MERGED, MERGED, PATCH, 3)
    rows = tokens.permute(0, 3, 1, 4, 6, 2, 5).reshape(height * width, 3, 1, PATCH, PATCH)
    return rows.expand(-1, -1, 2, -1, -1).flatten(1), torch.tensor([[1, height, width]])


def image_part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": png(pixels_of(number, *SIZES[number]))}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CHATS = [
    [{"role": "user", "content": [text_part("describe "), image_part(0), text_part(" it")]}],
    [{"role": "user", "content": [image_part(1), text_part(" and "), image_part(2)]}],
    [{"role": "user", "content": [text_part("describe "), image_part(2), text_part(" it")]}],
    [{"role": "user", "content": "no image here"}],
]
IMAGES = [[0], [1, 2], [2], []]  # numbers of the images in each chat


@torch.no_grad()
def whole_model_states(model: Any, sample: Sample, numbers: list[int]) -> Tensor:
    """What transformers computes on a sample, images included: the layers and the last state after its norm.

    [T, A + 1, H].
    """
    ids = torch.tensor([sample.token_ids])
    asked: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if numbers:
        rows, sizes = zip(*(patches(pixels_of(number, *SIZES[number])) for number in numbers), strict=True)
        asked |= {"pixel_values": torch.cat(rows), "image_grid_thw": torch.cat(sizes)}
        asked["mm_token_type_ids"] = (ids == IDS["image_token_id"]).int()
    states = model(**asked, output_hidden_states=True).hidden_states
    return torch.stack([states[layer_id][0] for layer_id in [*LAYER_IDS, NUM_LAYERS]], 1)


def test_a_drafter_is_trained_on_images_that_vllm_reads(url: str, target_dir: Path, tmp_path: Path) -> None:
    """Answers, token ids and states of all positions, also behind images, are those of the whole model."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    settings = PrepareSettings(max_new_tokens=12, samplings=(Sampling(0.0),), endpoint=url)
    prepare(Target.without_weights(target_dir), str(tmp_path / "chats.jsonl"), tmp_path / "samples", settings)
    run = train(
        make_config(
            "eagle3",
            {
                "target": target_dir,
                "run.device": "cpu",
                "data.samples": tmp_path / "samples",
                "data.batch_size": 2,
                "data.features": "stored",
                "data.features_dtype": "float32",
                "data.features_endpoint": url,
                "drafter.layer_ids": LAYER_IDS,
            },
            tmp_path / "run",
            run={"steps": 3},
        )
    )
    assert checkpoints(run)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(target_dir, attn_implementation="eager").eval()
    samples = list(read_samples(tmp_path / "samples"))
    (shard,) = (tmp_path / "samples").glob("features-*/shard-*")
    stored = load_file(shard)["hidden"].split([len(sample.token_ids) for sample in samples])
    for sample, numbers, found in zip(samples, IMAGES, stored, strict=True):
        num_image_tokens = sum(height * width // MERGED**2 for height, width in (SIZES[number] for number in numbers))
        assert sample.token_ids.count(IDS["image_token_id"]) == num_image_tokens
        expected = whole_model_states(model, sample, numbers)
        difference = (found - expected).abs().amax((0, 2)) / expected.abs().amax((0, 2))
        print(f"{len(numbers)} images, {len(found)} tokens: relative difference at most {float(difference.max()):.1e}")
        assert (difference < 1e-4).all()
