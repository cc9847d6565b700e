"""Attempts beside servers that are right but for some of their answers: images, hidden states, and judged drafters.

What is wrong with an answer depends on its request alone, so that a case is the same in whatever order they come.
"""

import atexit
import base64
import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import states_server
import torch
from commands import command_attempt
from damage import damage_file, damaged_bytes, damaged_json, hostile_text, hostile_value, json_text
from fake_engine import FakeEngine
from fake_server import FakeServer
from hostile_server import WAITS, quick_client
from image_server import PNG, ImageServer
from judge import Attempt, Place
from safetensors.torch import save_file
from states_server import LAYER_IDS
from torch import Tensor

from draftsmith.data.samples.folder import read_samples
from draftsmith.data.samples.images import IMAGES, kept_image
from draftsmith.models import Target

STATUSES = (200, 204, 301, 400, 404, 429, 500, 503)


@functools.cache
def image_server(target: Path) -> ImageServer:
    """The server of a process, which reads images and writes hidden states."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    server = ImageServer(Target.from_pretrained(target, "cpu", torch.float32), folder)
    server.ends = False
    return server


@functools.cache
def judging_engine(target: Path) -> FakeEngine:
    """The engine of a process, in which drafters are swapped."""
    return FakeEngine(Target.from_pretrained(target, "cpu", torch.float32), "ngram")


@contextlib.contextmanager
def sometimes_wrong(server: FakeServer, share: float, seed: int) -> Iterator[None]:
    """Damage a share of the answers of a server, and of the files of states that it writes."""
    post, get = server.post, server.get

    def wrong_post(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        random = Random(f"{seed} {path} {json.dumps(body)}")
        try:
            status, answer = post(path, body)
        except Exception as error:  # a right server's answer to a request that it cannot follow
            return 500, {"error": str(error)}
        if random.random() >= share:
            return status, answer
        status = status if random.random() < 0.8 else random.choice(STATUSES)
        return status, json_text(damaged_json(random, answer) if random.random() < 0.9 else hostile_value(random))

    def wrong_get(path: str) -> dict[str, Any] | str:
        answer, random = get(path), Random(f"{seed} {path}")
        if random.random() >= share:
            return answer
        if isinstance(answer, str):
            return damaged_bytes(random, answer.encode()).decode("utf-8", "replace")
        return json_text(damaged_json(random, answer))

    def wrong_file(tensors: dict[str, Tensor], path: Path) -> None:
        save_file(tensors, path)
        random = Random(f"{seed} {tensors['token_ids'].tolist()}")
        if random.random() < share:
            damage_file(random, path)

    with (
        mock.patch.object(server, "post", wrong_post),
        mock.patch.object(server, "get", wrong_get),
        mock.patch.object(states_server, "save_file", wrong_file),
        mock.patch.object(server._server, "handle_error"),  # of a client that has left
        quick_client(WAITS),
    ):
        yield


def beside(place: Place, server: FakeServer, share: float, argv: list[str]) -> Attempt:
    """Return an attempt at a command that talks to a server, of whose answers a share is damaged."""
    attempt, seed = command_attempt(place, argv, place.given), place.random.randrange(1 << 30)
    run = attempt.call

    def call() -> object:
        with sometimes_wrong(server, share, seed):
            return run()

    attempt.call, attempt.told = call, f"{attempt.told}  # {share:.0%} of the answers are wrong, {seed}"
    return attempt


def damage_chats(place: Place, chats: Path) -> None:
    """Damage dialogues with images: their lines, the URLs in them, or the file of an image that a URL names."""
    random, image = place.random, place.given / "image.png"
    image.write_bytes(PNG + bytes([40, 90, 60]))
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    draw = random.random()
    if draw < 0.4:
        chats.write_text("".join(json_text(damaged_json(random, row)) + "\n" for row in rows))
        return
    url: Any = random.choice((str(image), image.as_uri(), "data:image/png;base64,", hostile_text(random)))
    if draw < 0.6:
        image.write_bytes(damaged_bytes(random, image.read_bytes()))
    elif draw < 0.7:
        damage_file(random, image)
    elif draw < 0.85:
        written = base64.b64encode(PNG + random.randbytes(random.choice((0, 1, 3, 90, 5000))))
        url = "data:image/png;base64," + damaged_bytes(random, written).decode("latin-1")
    part = rows[0]["messages"][0]["content"][1]["image_url"]
    part["url"] = url if random.random() < 0.9 else hostile_value(random)
    chats.write_text("".join(json_text(row) + "\n" for row in rows))


def images(place: Place) -> Attempt:
    """Prompts with images, answered by a server: the prompts, the images or the server's answers are damaged."""
    made, random = place.material, place.random
    chats = place.copy("prompts/images.jsonl")
    share = random.choice((0.2, 1.0))
    if random.random() < 0.6:
        share = 0.0
        damage_chats(place, chats)
    server = image_server(made / "seeing")
    argv = ["prepare", "--target", str(made / "seeing"), "--prompts", str(chats), "--out", str(place.out)]
    attempt = beside(place, server, share, [*argv, "--endpoint", server.url, "--max-new-tokens", "4"])
    run = attempt.call

    def call() -> object:
        code = run()
        if code == 0:
            for sample in read_samples(place.out):
                assert all(kept_image(place.out, name).content for name in sample.images)
        return code

    attempt.call = call
    return attempt


def states(place: Place) -> Attempt:
    """A run on features from a server: its answers, the files that it writes or the samples' images are damaged."""
    made, random = place.material, place.random
    samples = place.copy("image_samples")
    damaged = random.random() < 0.25
    share = 0.0 if damaged else random.choice((0.1, 0.5, 1.0))
    if damaged:
        image = random.choice(sorted((samples / IMAGES).iterdir()))
        healthy = image.read_bytes()
        damage_file(random, image)
        damaged = not image.is_file() or image.read_bytes() != healthy
    server = image_server(made / "seeing")
    words = f"train eagle3 target={made / 'seeing'} data.samples={samples} run.dir={place.out} run.steps=1 "
    words += f"run.device=cpu data.batch_size=2 data.features_endpoint={server.url} "
    words += random.choice(("data.features=streamed ", "data.features=stored data.features_dtype=float32 "))
    words += f"drafter.draft_vocab_size=null drafter.layer_ids={LAYER_IDS[:-1]}"
    attempt = beside(place, server, share, words.replace(", ", ",").split())
    attempt.must_refuse = damaged
    return attempt


def judged_by_engine(place: Place) -> Attempt:
    """A drafter that an engine judges, whose counters, texts or reports of a swap are damaged."""
    made, random = place.material, place.random
    engine = judging_engine(made / "target")
    drafter = made / "drafters" / random.choice(("eagle3", "draft_model", "medusa"))
    words = f"evaluate --engine {engine.url} --target {made / 'target'} --drafter {drafter} "
    words += f"--prompts {made / 'prompts' / 'p.txt'} --num-prompts 2 --max-new-tokens 4 --repeats 1 --out {place.out}"
    return beside(place, engine, random.choice((0.1, 0.3, 1.0)), words.split())
