"""Hidden states of a real vLLM are those of the target: DRAFTSMITH_VLLM names the folder of its virtual environment."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from feature_stores import make_store, source_of
from safetensors.torch import load_file
from vllm_process import extraction_options, serving

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.features.endpoint import FeatureServer
from draftsmith.data.features.streamed import StreamedFeatures
from draftsmith.data.features.writer import write_shards
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import read_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.data.samples.samples import Samples
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

pytestmark = pytest.mark.engine
LAYER_IDS = (2, 7, 11)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32)


@pytest.fixture(scope="module")
def url(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Long texts are read in parts, and beginnings that two texts share are read once."""
    folder = tmp_path_factory.mktemp("vllm")
    options = extraction_options([*LAYER_IDS, target.num_layers], folder)
    options += ["--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"]
    with serving(
        str(EMBEDDED_TARGET), folder / "log.txt", *options, PYTHONPATH=str(Path(__file__).parents[1] / "helpers")
    ) as url:
        yield url


@pytest.fixture(scope="module")
def samples(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Short ones, and two that are longer than vLLM's blocks and what it reads at a time and begin alike."""
    folder = tmp_path_factory.mktemp("samples")
    functions = [function_prompt(function) for function in stdlib_functions(held_out=True)[::20]]
    lines = [text.splitlines()[0] for text in functions[:20]]
    long = target.encode("\n".join(functions))[:300]
    (folder / "prompts.txt").write_text("".join(line + "\n" for line in lines))
    prepare(target, str(folder / "prompts.txt"), folder / "out", PrepareSettings(max_new_tokens=32))
    short = list(read_samples(folder / "out"))
    return [*short, *(Sample([*long, *short[i].token_ids], short[i].spans, "given") for i in (0, 1))]


def make_plan(samples: list[Sample]) -> BatchPlan:
    return BatchPlan(Samples.of(samples), 4, max_length=400, tokens_per_micro_batch=2000, seed=0)


def test_stored_states_are_those_of_the_target(url: str, target: Target, samples: list[Sample], tmp_path: Path) -> None:
    plan = BatchPlan(Samples.of(samples), 4, max_length=400, tokens_per_micro_batch=2000, seed=0)
    ends = Target.head_from_pretrained(EMBEDDED_TARGET, target.fingerprint(), "cpu", torch.float32)
    stores = [make_store(tmp_path / name, target, plan, layer_ids=LAYER_IDS) for name in ("served", "own")]
    served = StreamedFeatures([FeatureServer(url, ends, LAYER_IDS, plan, tmp_path)], ends)
    for store, source in zip(stores, (served, source_of(stores[1], target)), strict=True):
        write_shards(store, store.missing(), source)
    for shard in stores[0].shards:
        found, expected = (load_file(store.folder / shard.file)["hidden"] for store in stores)
        for number, name in enumerate([*LAYER_IDS, "last"]):
            difference = (found - expected)[:, number].abs().max() / expected[:, number].abs().max()
            print(f"{name}: relative difference of {len(found)} tokens at most {float(difference):.1e}")
            assert difference < 1e-5


def test_a_server_with_other_layers_is_refused(url: str, samples: list[Sample], tmp_path: Path) -> None:
    ends = Target.head_from_pretrained(EMBEDDED_TARGET, None, "cpu")
    with pytest.raises(UserError, match="layer 3 is not what comes out of that layer"):
        StreamedFeatures([FeatureServer(url, ends, (3, 7, 11), make_plan(samples), tmp_path)], ends)
