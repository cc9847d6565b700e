"""The target's answers: the very tokens it decoded, and the same file after an interruption."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftsmith.data import prepare as prepare_module
from draftsmith.data.prepare import PrepareSettings, prepare
from draftsmith.data.prompts import encode_prompts, read_prompts
from draftsmith.data.samples import SAMPLES, Sample, check_same_target, read_samples
from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError

SETTINGS = PrepareSettings(max_new_tokens=12, temperatures=(0.0, 1.5), batch_size=2)
NUM_PROMPTS = 10  # two whole shares of 4 and a short one; the middle one holds both temperatures


@pytest.fixture(scope="module", autouse=True)
def _shares_of_two_batches() -> Iterator[None]:
    before, prepare_module.BATCHES_A_SHARE = prepare_module.BATCHES_A_SHARE, 2
    yield
    prepare_module.BATCHES_A_SHARE = before


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"strike {'the iron ' * (i % 4)}{i}\n" for i in range(NUM_PROMPTS)))
    return str(path)


@pytest.fixture(scope="module")
def folder(source: str, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("samples")
    prepare(tiny_target, source, out, SETTINGS)
    return out


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    return sorted(read_samples(folder), key=lambda sample: sample.prompt_index)


@pytest.fixture(scope="module")
def encoded(source: str, tiny_target: Target) -> list[list[int]]:
    return encode_prompts(read_prompts(source), tiny_target)


def test_every_prompt_is_answered_once(samples: list[Sample], encoded: list[list[int]]) -> None:
    assert [sample.prompt_index for sample in samples] == list(range(NUM_PROMPTS))
    for sample, prompt in zip(samples, encoded, strict=True):
        assert sample.prompt_length == len(prompt)
        assert sample.token_ids[: len(prompt)] == prompt
        assert 1 <= len(sample.token_ids) - len(prompt) <= SETTINGS.max_new_tokens


def test_temperatures_alternate_by_prompt(samples: list[Sample]) -> None:
    """By place in the prompts file, not by the order of answering, which sorts by length."""
    assert [sample.temperature for sample in samples] == [0.0, 1.5] * (NUM_PROMPTS // 2)


@pytest.mark.parametrize("temperature", SETTINGS.temperatures)
def test_answers_are_what_the_target_decodes(
    temperature: float, samples: list[Sample], encoded: list[list[int]], tiny_target: Target
) -> None:
    """Each alone, with the noise of its place in the file: neither batch nor neighbours may show in an answer."""
    decoder = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    for sample in samples:
        if sample.temperature == temperature:
            index = sample.prompt_index
            output = decoder.generate([encoded[index]], 12, temperature, request_ids=[index])
            assert sample.token_ids[sample.prompt_length :] == output.token_ids[0]


def test_finish_reason(source: str, tiny_target: Target, samples: list[Sample], tmp_path: Path) -> None:
    """The tiny target rarely ends a text by itself, so a token that one answer holds in its middle ends it, too."""
    eos = samples[0].token_ids[samples[0].prompt_length + 3]
    generation_config = tiny_target.model.generation_config
    before = generation_config.eos_token_id
    generation_config.eos_token_id = [before, eos]
    try:
        prepare(tiny_target, source, tmp_path, SETTINGS)
    finally:
        generation_config.eos_token_id = before
    found = read_samples(tmp_path)
    for sample in found:
        answer = sample.token_ids[sample.prompt_length :]
        assert not {before, eos} & set(answer[:-1])  # nothing follows the end of a text
        ended = answer[-1] in (before, eos)
        assert sample.finish_reason == ("eos" if ended else "length")
        assert ended or len(answer) == SETTINGS.max_new_tokens
    assert {sample.finish_reason for sample in found} == {"eos", "length"}


@pytest.mark.parametrize("kept", [0, 0.05, 0.35, 0.5, 0.75, 0.97, 1])
def test_interrupted_anywhere_the_file_is_the_same(
    kept: float, folder: Path, source: str, tiny_target: Target, tmp_path: Path
) -> None:
    """A kill leaves part of a line and part of a share. Both are answered again, whole shares are not."""
    whole = (folder / SAMPLES).read_bytes()
    (tmp_path / "prepared.json").write_bytes((folder / "prepared.json").read_bytes())
    (tmp_path / SAMPLES).write_bytes(whole[: int(len(whole) * kept)])
    prepare(tiny_target, source, tmp_path, SETTINGS)
    assert (tmp_path / SAMPLES).read_bytes() == whole


@pytest.mark.parametrize(
    "settings",
    [
        PrepareSettings(max_new_tokens=13, temperatures=(0.0, 1.5), batch_size=2),
        PrepareSettings(max_new_tokens=12, temperatures=(0.0,), batch_size=2),
        PrepareSettings(max_new_tokens=12, temperatures=(0.0, 1.5), batch_size=2, seed=1),
    ],
)
def test_folder_of_other_settings_is_refused(
    settings: PrepareSettings, folder: Path, source: str, tiny_target: Target
) -> None:
    """Going on would mix answers that were asked for differently."""
    before = (folder / SAMPLES).read_bytes()
    with pytest.raises(UserError, match="another target, prompts or settings"):
        prepare(tiny_target, source, folder, settings)
    assert (folder / SAMPLES).read_bytes() == before


def test_edited_prompts_are_refused(source: str, tiny_target: Target, tmp_path: Path) -> None:
    """The same path with other prompts of the same number: the answers there belong to the old ones."""
    copy = tmp_path / "prompts.txt"
    copy.write_text(Path(source).read_text())
    prepare(tiny_target, str(copy), tmp_path / "out", SETTINGS)
    copy.write_text(Path(source).read_text().replace("iron", "gold"))
    with pytest.raises(UserError, match="another target, prompts or settings"):
        prepare(tiny_target, str(copy), tmp_path / "out", SETTINGS)


def test_samples_of_another_target_are_refused(
    folder: Path, tiny_target: Target, make_target_dir: Callable[..., Path]
) -> None:
    """Same shapes and tokenizer, other weights: nothing but the fingerprint tells them apart."""
    check_same_target(folder, tiny_target)
    other = Target.from_pretrained(make_target_dir(initializer_range=0.1), "cpu")
    with pytest.raises(UserError, match="prepare them again"):
        check_same_target(folder, other)


def test_folder_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prepared samples"):
        read_samples(tmp_path)


def test_bad_prompts_leave_no_folder(tiny_target: Target, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("iron " * tiny_target.context)
    with pytest.raises(UserError, match="exceeds the target's context"):
        prepare(tiny_target, str(tmp_path / "prompts.txt"), tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()


def test_what_wrote_the_samples_is_kept(folder: Path, source: str, tiny_target: Target) -> None:
    prepared = json.loads((folder / "prepared.json").read_text())
    assert prepared["target_fingerprint"] == tiny_target.fingerprint()
    assert (prepared["prompts"], prepared["num_prompts"]) == (source, NUM_PROMPTS)
    assert prepared["settings"]["temperatures"] == [0.0, 1.5]
