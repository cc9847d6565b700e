"""Prompts with images: a server reads them, and what its target read is kept; without one they are refused."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from fake_server import FakeServer
from image_server import PNG, ImageServer, give_template, image_url
from runs import make_config
from safetensors.torch import load_file
from states_server import LAYER_IDS

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.prompts.conversations import encode_conversation
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import encode_prompts, read_prompts
from draftsmith.data.prompts.splits import deduplicate
from draftsmith.data.samples.folder import INDEX, Index, read_samples, shard_file
from draftsmith.data.samples.images import IMAGES, kept_image, read_image
from draftsmith.data.samples.sample import Sample
from draftsmith.data.samples.samples import OLDER_SCHEMA
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.files import file_hash, write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.train import train
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.run_folder.tracking import read_metrics

SETTINGS = PrepareSettings(max_new_tokens=6, samplings=(Sampling(0.0),), batch_size=2)
FIRST, SECOND = bytes([40, 90, 60]), bytes([200, 33, 70, 80])


@pytest.fixture(scope="module")
def target_dir(make_target_dir: Callable[..., Path]) -> Path:
    return give_template(make_target_dir())


@pytest.fixture(scope="module")
def served(target_dir: Path) -> Target:
    return Target.without_weights(target_dir)


@pytest.fixture
def server(target_dir: Path, tmp_path: Path) -> Iterator[ImageServer]:
    (tmp_path / "states").mkdir()
    server = ImageServer(Target.from_pretrained(target_dir, "cpu", torch.float32), tmp_path / "states")
    yield server
    server.close()


def part(value: str | bytes) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    return {"type": "image_url", "image_url": {"url": image_url(value)}}


def user(*values: str | bytes) -> dict[str, Any]:
    return {"role": "user", "content": [part(value) for value in values]}


def write_chats(folder: Path, *chats: list[dict[str, Any]]) -> str:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return str(path)


def answered(server: ImageServer, target: Target, folder: Path, *chats: list[dict[str, Any]]) -> Path:
    prepare(target, write_chats(folder, *chats), folder / "out", replace(SETTINGS, endpoint=server.url))
    return folder / "out"


def check_sample(sample: Sample, server: ImageServer, folder: Path) -> None:
    """What is kept beside a sample brings the same text again, and each answer follows what the target saw."""
    parts = [{"url": kept_image(folder, name).url} for name in sample.images]
    read_ids, _, seen_ids = server.expanded({"token_ids": sample.sent_ids, "content_parts": parts})
    assert sample.token_ids == read_ids
    for start, end, _ in sample.spans:
        assert sample.token_ids[start:end] == server.written(seen_ids[:start])


def test_samples_hold_what_the_target_read(server: ImageServer, served: Target, tmp_path: Path) -> None:
    """Placeholder tokens stand in the text and are not trained on; each image is kept once."""
    chat = [user("what is ", FIRST, " and ", SECOND, "?")]
    out = answered(server, served, tmp_path, chat, [user("no image")], [user("again ", FIRST)])
    samples = read_samples(out)
    assert samples.has_images.tolist() == [True, False, True]
    assert samples[0].token_ids.count(server.placeholder) == len(FIRST + SECOND)
    assert [kept_image(out, name).content for name in samples[0].images] == [PNG + FIRST, PNG + SECOND]
    assert len(list((out / IMAGES).iterdir())) == 2
    for index in (0, 2):
        assert len(samples[index].spans) == 1
        check_sample(samples[index], server, out)
    assert samples[1].sent_ids == samples[1].images == []


def test_every_turn_is_sent_with_the_images_so_far(server: ImageServer, served: Target, tmp_path: Path) -> None:
    """Answers of all turns lie in one sample, each behind the placeholder tokens of all images before it."""
    out = answered(server, served, tmp_path, [user("a ", FIRST), {"role": "assistant", "content": "x"}, user(SECOND)])
    assert [len(body["content_parts"]) for body in server.asked_with_images[1:]] == [1, 2]
    (sample,) = read_samples(out)
    assert len(sample.spans) == 2
    check_sample(sample, server, out)


def test_a_server_that_reads_the_history_otherwise_ends_the_sample(
    server: ImageServer, served: Target, tmp_path: Path
) -> None:
    """Some processors join the tokens around images anew: then the first answer is no part of the second text."""
    expanded = server.expanded

    def joined(body: dict) -> tuple[list[int], list[int], list[int]]:
        read_ids, places, seen_ids = expanded(body)
        first = [5] * (len(places) == 2)
        return first + read_ids, places, first + seen_ids

    server.expanded = joined  # type: ignore[method-assign]
    out = answered(server, served, tmp_path, [user("a ", FIRST), {"role": "assistant", "content": "x"}, user(SECOND)])
    samples = read_samples(out)
    assert [len(sample.images) for sample in samples] == [1, 2]
    for sample in samples:
        assert len(sample.spans) == 1
        check_sample(sample, server, out)


def test_too_many_tokens_of_an_image(
    server: ImageServer, served: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many they are only the server knows: the turn stays without an answer, and the user is told."""
    long = bytes(range(100))
    chats = [[user(FIRST), {"role": "assistant", "content": "x"}, user(long)], [user("much ", long)]]
    samples = read_samples(answered(server, served, tmp_path, *chats))
    assert [(sample.prompt_index, sample.unanswered_turns) for sample in samples] == [(0, 1)]
    assert "1 prompts have no answer" in capsys.readouterr().err


def test_without_a_server_they_are_refused(target_dir: Path, served: Target, tmp_path: Path) -> None:
    """By the decoder, for given answers, and in an evaluation: nobody here knows what the target reads."""
    source = write_chats(tmp_path, [user("a ", FIRST)])
    with pytest.raises(UserError, match=r"1 of 1 prompts hold images.*give --endpoint URL.*--enable-scale-out"):
        prepare(Target.from_pretrained(target_dir, "cpu"), source, tmp_path / "out", SETTINGS)
    with pytest.raises(UserError, match="line 1 holds images"):
        encode_prompts(read_prompts(source), served)
    given = read_prompts(write_chats(tmp_path, [user("a ", FIRST), {"role": "assistant", "content": "x"}]))
    with pytest.raises(UserError, match="let it answer anew, with --endpoint and without --as-given"):
        encode_conversation(given[0], served)


def test_a_template_without_images_is_refused(server: ImageServer, target_dir: Path, tmp_path: Path) -> None:
    """Text alone would reach the server, which then says only that something in it went wrong."""
    target = Target.without_weights(target_dir)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = str(target.tokenizer.chat_template).replace("\x01", "")
    with pytest.raises(UserError, match=r"line 1.* holds images, for which the chat template .* writes nothing"):
        answered(server, target, tmp_path, [user("a ", FIRST, " b")])


def test_other_servers_are_refused(server: ImageServer, served: Target, tmp_path: Path) -> None:
    server.takes_images = False
    with pytest.raises(UserError, match=r"does not take token ids with images.*404.*vLLM 0.32 or later and --enable"):
        answered(server, served, tmp_path, [user(FIRST)])
    sglang = FakeServer(server.target, "sglang")
    try:
        with pytest.raises(UserError, match="is an SGLang, which does not tell the tokens"):
            prepare(
                served, write_chats(tmp_path, [user(FIRST)]), tmp_path / "out", replace(SETTINGS, endpoint=sglang.url)
            )
    finally:
        sglang.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/a.png", "is not here: download it"),
        ("http://[", "is not here: download it"),
        ("//[", "cannot be read"),
        ("data:image/png;base64,????", "cannot be read"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,aGVsbG8=", "no PNG, JPEG, GIF or WebP"),
        ("nowhere.png", "cannot be read: No such file"),
        ("\0", "null byte"),
    ],
)
def test_images_that_cannot_be_had(url: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_image(url, "line 1")


def test_files_and_their_urls_are_images(tmp_path: Path) -> None:
    path = tmp_path / "an image.png"
    path.write_bytes(PNG + FIRST)
    urls = [str(path), path.as_uri(), image_url(FIRST)]
    assert {read_image(url, "line 1").url for url in urls} == {image_url(FIRST)}


def test_a_changed_image_is_refused(server: ImageServer, served: Target, tmp_path: Path) -> None:
    out = answered(server, served, tmp_path, [user(FIRST)])
    (name,) = read_samples(out)[0].images
    (out / IMAGES / name).write_bytes(PNG + SECOND)
    with pytest.raises(UserError, match="was changed since"):
        kept_image(out, name)


def test_prompts_differ_by_their_images() -> None:
    """Or one of them would be left out as a duplicate."""
    prompts = [Prompt(messages=[user("what is this? ", image)]) for image in (FIRST, SECOND, FIRST)]
    assert len(deduplicate(prompts)) == 2


def test_samples_of_an_older_draftsmith_are_read(server: ImageServer, served: Target, tmp_path: Path) -> None:
    """Their shards lack the columns of images."""
    out = answered(server, served, tmp_path, [user("no image")])
    expected = list(read_samples(out))
    table = pa.ipc.open_file(out / shard_file(0)).read_all().select(OLDER_SCHEMA.names)
    with pa.ipc.new_file(str(out / shard_file(0)), OLDER_SCHEMA) as writer:
        writer.write_table(table)
    write_json(out / INDEX, to_json(Index([file_hash(out / shard_file(0))])))
    assert list(read_samples(out)) == expected


def trained(server: ImageServer, samples: Path, folder: Path, **changes: Any) -> Path:
    settings = {
        "target": server.target.name,
        "run.device": "cpu",
        "data.samples": samples,
        "data.batch_size": 2,
        "data.features": "stored",
        "data.features_dtype": "float32",
        "data.features_endpoint": server.url,
        "drafter.layer_ids": LAYER_IDS[:-1],
    }
    return train(make_config("eagle3", settings | changes, folder / "run", run={"steps": 2}))


def chats_with_images() -> list[list[dict[str, Any]]]:
    """Six chats, half of them with an image, whose texts begin alike."""
    return [[user(f"look {index} ", *[bytes([60 + index, 90, 33])] * (index % 2), "?")] for index in range(6)]


def test_a_drafter_trains_on_what_the_server_saw(
    server: ImageServer, served: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stored are the states of the images themselves, at the places of their placeholder tokens."""
    server.ends = False
    out = answered(server, served, tmp_path, *chats_with_images())
    run = trained(server, out, tmp_path)
    assert all(math.isfinite(line["loss"]) for line in read_metrics(run))
    assert checkpoints(run)
    (shard,) = out.glob("features-*/shard-*")
    hidden, first = load_file(shard)["hidden"], 0
    for sample in read_samples(out):
        parts = [{"url": kept_image(out, name).url} for name in sample.images]
        _, _, seen_ids = server.expanded({"token_ids": sample.sent_ids or sample.token_ids, "content_parts": parts})
        states, _ = server.compute(seen_ids)
        own = hidden[first : first + len(seen_ids)]
        torch.testing.assert_close(own[:, :-1], states[:, :-1], rtol=1e-4, atol=1e-5)
        first += len(seen_ids)
    assert first == len(hidden)
    assert "3 of 6 samples hold images. The drafter learns with the embedding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data.features_endpoint": None}, r"3 of 6 samples .* hold images, which only a server reads: give"),
        (
            {"data.features_endpoint": None, "data.features": "online", "data.features_dtype": "bfloat16"},
            "only a server",
        ),
    ],
)
def test_training_without_the_server_is_refused(
    changes: dict[str, Any], reason: str, server: ImageServer, served: Target, tmp_path: Path
) -> None:
    out = answered(server, served, tmp_path, *chats_with_images())
    with pytest.raises(UserError, match=reason):
        trained(server, out, tmp_path, **changes)


def test_a_server_that_reads_other_tokens_is_refused(server: ImageServer, served: Target, tmp_path: Path) -> None:
    """Another processor, such as one with another size of images: its states would stand at wrong places."""
    server.ends = False
    out = answered(server, served, tmp_path, *chats_with_images())
    expanded = server.expanded

    def shorter(body: dict) -> tuple[list[int], list[int], list[int]]:
        read_ids, places, seen_ids = expanded(body)
        for place in places:
            del read_ids[place], seen_ids[place]
        return read_ids, places, seen_ids

    server.expanded = shorter  # type: ignore[method-assign]
    with pytest.raises(UserError, match="reads other tokens for the images of prompt 2 than the server that answered"):
        trained(server, out, tmp_path)


def test_the_layer_is_checked_before_the_first_image(server: ImageServer, served: Target, tmp_path: Path) -> None:
    """Behind it, the target's own first layer would see placeholder tokens in place of the image."""
    server.ends = False
    out = answered(server, served, tmp_path, *[[user(f"{n} ", bytes([60 + n, 90, 33]), "?")] for n in range(4)])
    server.layer_ids = [2, 3, 4]
    with pytest.raises(UserError, match="layer 1 is not what comes out of that layer"):
        trained(server, out, tmp_path)
    server.layer_ids = LAYER_IDS
    trained(server, out, tmp_path)
