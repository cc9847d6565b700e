"""A real vLLM server answers: DRAFTSMITH_VLLM names the folder of its virtual environment."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_process import serving

from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.data.samples.folder import check_same_target, read_prepared, read_samples
from draftsmith.data.samples.sample import Sample, loss_mask
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

pytestmark = pytest.mark.engine
NEAR_TIE = 1e-3  # between the logits of two tokens; engines add up in another order
SETTINGS = PrepareSettings(max_new_tokens=48, samplings=(Sampling(0.0),), batch_size=8)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with serving(str(EMBEDDED_TARGET), log, "--max-model-len", "512", "--max-num-seqs", "8") as url:
        yield url


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    lines = [function_prompt(function).splitlines()[0] for function in stdlib_functions(held_out=True)[::20]]
    path.write_text("".join(line + "\n" for line in lines[:24]))
    return str(path)


def test_greedy_tokens_agree_with_the_decoder(url: str, source: str, tmp_path: Path) -> None:
    """Token for token, up to the first near tie; and the file says that a server wrote it."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32)
    prepare(target, source, tmp_path / "decoder", SETTINGS)
    served = PrepareSettings(**{**vars(SETTINGS), "endpoint": url})
    prepare(Target.without_weights(EMBEDDED_TARGET), source, tmp_path / "endpoint", served)
    ours, theirs = read_samples(tmp_path / "decoder"), read_samples(tmp_path / "endpoint")
    assert len(ours) == len(theirs)
    different = [(own, other) for own, other in zip(ours, theirs, strict=True) if own != other]
    print(f"{len(ours) - len(different)} of {len(ours)} answers are the same to the token")
    for own, other in different:
        assert gap_where_they_part(own, other, target) < NEAR_TIE
    assert {sample.finish_reason for sample in theirs} == {"eos", "length"}
    assert read_prepared(tmp_path / "endpoint")["target_fingerprint"] is None
    check_same_target(tmp_path / "endpoint", target)


def gap_where_they_part(own: Sample, other: Sample, target: Target) -> float:
    """Between the logits of the two tokens that follow the common beginning."""
    pairs = zip(own.token_ids, other.token_ids, strict=False)
    place = next(i for i, (a, b) in enumerate(pairs) if a != b)
    batch = Batch(torch.tensor([own.token_ids[:place]]), loss_mask(own)[None, :place])
    logits = target.logits(target.features(batch).last_hidden[0, -1])
    return float(logits[own.token_ids[place]] - logits[other.token_ids[place]])


def test_sampled_answers_are_told_apart_by_their_requests(url: str) -> None:
    """Temperature, top-p and top-k reach the server; each request has noise of its own, the same one each time."""
    endpoint = Endpoint(url, Target.without_weights(EMBEDDED_TARGET), max_new_tokens=16)
    prompt, sampling = endpoint.target.encode("def __init__(self"), Sampling(1.0, 0.9, 50)
    answers, again = ([endpoint.complete(prompt, sampling, request).new_ids for request in range(8)] for _ in range(2))
    assert answers == again
    assert len({tuple(answer) for answer in answers}) > 4
