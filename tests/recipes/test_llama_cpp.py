"""A real llama.cpp serves what export writes, and counts what draftsmith counts.

    DRAFTSMITH_LLAMA_CPP=FOLDER pytest -m engine -s tests/recipes/test_llama_cpp.py

FOLDER is its source, with build/bin/llama-server. One of released source packages is in llama-cpp-python's:
vendor/llama.cpp of version 0.3.36, which `cmake -B build && cmake --build build --target llama-server` builds.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.decoder import Output
from draftsmith.models import DRAFTERS, Target, load_drafter, save_drafter
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.training_free.ngram import Ngram, NgramConfig
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for, write_jsonl
from draftsmith.recipes.serving.export import export_checkpoint
from draftsmith.recipes.serving.serve_commands import write_scripts
from draftsmith.train import train

pytestmark = pytest.mark.engine
DRAFT_LENGTH, NEW_TOKENS, NUM_PROMPTS = 4, 48, 10
EXACT = ["--no-warmup", "-t", "1", "-td", "1", "-np", "1", "-c", "2048", "-fa", "off"]
EXACT += [word for cache in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (cache, "f32")]
# The converter knows tokenizers by hashes, and not that of tiny_python; prompts are sent as token ids here.
CONVERTER = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
from conversion import base
def no_sentencepiece(self): raise FileNotFoundError
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
base.TextModel._set_vocab_sentencepiece = no_sentencepiece
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def llama_cpp() -> Path:
    path = os.environ.get("DRAFTSMITH_LLAMA_CPP")
    if not path:
        pytest.skip("DRAFTSMITH_LLAMA_CPP names no folder of llama.cpp")
    return Path(path)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(EMBEDDED_TARGET.resolve(), "cpu", torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, llama_cpp: Path, target: Target) -> Path:
    """Holds the target's GGUF, and samples to train on."""
    folder = tmp_path_factory.mktemp("llama")
    convert(llama_cpp, target.name, "--outtype", "f32", "--outfile", folder / "target.gguf")
    write_jsonl(folder / "training.jsonl", prompts_for(target, held_out=False)[:64])
    settings = PrepareSettings(max_new_tokens=64, samplings=(Sampling(0.0),), batch_size=64)
    prepare(target, str(folder / "training.jsonl"), folder / "samples", settings)
    return folder


def convert(llama_cpp: Path, *words: object) -> None:
    command = [sys.executable, "-c", CONVERTER, str(llama_cpp), *map(str, words)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def checkpoint_for(kind: str, target: Target, folder: Path) -> Path:
    """The target's first layers, or a drafter of 30 steps: agreement must not hang on how good it is."""
    if kind == "draft_model":
        drafter_class = DRAFTERS[kind]
        save_drafter(drafter_class.from_target(drafter_class.config_class(kind=kind, num_layers=6), target), folder)
        return folder
    config = RECIPES[f"quickstart_{kind}"]()
    config.target, config.data.samples = target.name, str(folder.parent / "samples")
    config.run.dir, config.run.steps, config.run.checkpoint_every, config.run.device = str(folder), 30, 30, "cpu"
    train(config)
    return folder / "best"


@contextmanager
def served(llama_cpp: Path, words: list[str], log: Path) -> Iterator[str]:
    """Start a server with the words of an export's script, on a port of its own; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [str(llama_cpp / "build" / "bin" / words[0]), *words[1:], *EXACT, "--port", str(port)]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            for _ in range(240):
                assert server.poll() is None, log.read_text()[-2000:]
                try:
                    if httpx.get(f"{address}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.25)
            yield address
        finally:
            server.terminate()


def ask(address: str, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 0, "top_k": 1}
    body |= {"cache_prompt": False, "return_tokens": True}
    return httpx.post(f"{address}/completion", json=body, timeout=120).raise_for_status().json()


def as_llama_cpp_counts(output: Output, eos: list[int]) -> tuple[int, int]:
    """Drafted and accepted tokens of our rounds, by its rules: no more than an answer may have.

    The end of a text is accepted where it is the last drafted token only (`common_sampler_sample_and_accept_n`).
    """
    drafted = accepted = 0
    for answer, rounds in zip(output.token_ids, output.rounds, strict=True):
        for played in rounds:
            room = NEW_TOKENS - played.start - 1
            num_drafted, until_end = min(played.num_drafted, room), len(answer) - played.start
            ended = answer[-1] in eos and played.num_accepted >= until_end and until_end < num_drafted
            drafted += num_drafted
            accepted += min(played.num_accepted, until_end - 1 if ended else room)
    return drafted, accepted


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "dflash", "dspark", "ngram"])
def test_llama_cpp_accepts_what_we_accept(kind: str, llama_cpp: Path, target: Target, folder: Path) -> None:
    """Token for token. Its n-grams are others than ours: there the texts alone are equal."""
    checkpoint = "ngram" if kind == "ngram" else checkpoint_for(kind, target, folder / kind)
    out = folder / f"served-{kind}"
    exported = export_checkpoint(checkpoint, "llama_cpp", target, out)
    words = write_scripts(exported, out, DRAFT_LENGTH)["llama_cpp"].split()
    (out / "target.gguf").symlink_to(folder / "target.gguf")
    if kind != "ngram":
        convert(
            llama_cpp, out, "--target-model-dir", target.name, "--outtype", "f32", "--outfile", out / "drafter.gguf"
        )
    prompts = encode_prompts(prompts_for(target, held_out=True)[:NUM_PROMPTS], target)
    with served(llama_cpp, words, folder / f"{kind}.log") as address:
        answers = [ask(address, prompt) for prompt in prompts]
    drafter = Ngram(NgramConfig()) if kind == "ngram" else load_drafter(out, target)
    ours = SpeculativeDecoder(target, drafter).generate(prompts, max_new_tokens=NEW_TOKENS, draft_length=DRAFT_LENGTH)
    assert [answer["tokens"] for answer in answers] == ours.token_ids
    timings = [answer["timings"] for answer in answers]
    theirs = tuple(sum(timing.get(key, 0) for timing in timings) for key in ("draft_n", "draft_n_accepted"))
    counted = as_llama_cpp_counts(ours, target.eos_token_ids)
    print(f"\n| {kind} | {theirs[0]} / {counted[0]} | {theirs[1]} / {counted[1]} | {len(answers)}/{NUM_PROMPTS} |")
    assert theirs[1] > 0
    if kind != "ngram":
        assert theirs == counted
