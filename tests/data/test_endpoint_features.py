"""Hidden states from a server: the same store as the target's own, and none from a server that gives something else."""

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import DRAFT_LENGTH, FakeEngine
from families import RUN_BY_ENGINES, family_config, plain_model
from quantised import set_config
from runs import make_config
from safetensors.torch import load_file, save_file
from states_server import LAYER_IDS, HiddenStatesServer
from tiny_target import tiny_tokenizer
from transformers import LlamaForCausalLM

from draftsmith.data import http
from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.features.endpoint import wait_until_written
from draftsmith.data.samples.folder import PREPARED, write_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.target.loading import load_model
from draftsmith.models.target.target_files import read_config
from draftsmith.train import train
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.run_folder.tracking import read_metrics

GPTQ = "gptq"  # a form of quantised weights that is not unpacked
RUN = {"steps": 3}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.002)
    monkeypatch.setattr(http, "ATTEMPTS", 3)


@pytest.fixture(scope="module")
def target_dir(make_target_dir: Callable[..., Path]) -> Path:
    """A target whose final norm matters."""
    directory = make_target_dir()
    model = LlamaForCausalLM.from_pretrained(directory)
    model.model.norm.weight.data.uniform_(0.2, 3.0)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.from_pretrained(target_dir, "cpu", torch.float32)


@pytest.fixture(scope="module")
def base(target_dir: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"strike {'the iron ' * (i % 4)}{i}\n" for i in range(12)))
    prepare(target, str(prompts), folder / "samples", PrepareSettings(max_new_tokens=8))
    return {
        "target": target_dir,
        "run.device": "cpu",
        "data.samples": folder / "samples",
        "data.batch_size": 4,
        "data.features": "stored",
        "data.features_dtype": "float32",
        "drafter.layer_ids": LAYER_IDS[:-1],
    }


@pytest.fixture
def server(target: Target, tmp_path: Path) -> Iterator[HiddenStatesServer]:
    (tmp_path / "states").mkdir()
    server = HiddenStatesServer(target, tmp_path / "states")
    yield server
    server.close()


def run(base: dict[str, Any], folder: Path, server: HiddenStatesServer | None) -> Path:
    """A run whose store is in the folder, by the server or by the target in this process."""
    changes = {"data.features_dir": folder / "store"} | ({"data.features_endpoint": server.url} if server else {})
    return train(make_config("eagle3", {**base, **changes}, folder / "run", run=RUN))


def test_a_server_stores_what_the_target_does(
    base: dict[str, Any], server: HiddenStatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All states, so one loss curve, with the ends alone in this process; then the server is not asked again."""
    own = run(base, tmp_path / "own", None)
    monkeypatch.delattr(Target, "from_pretrained")
    served = run(base, tmp_path / "served", server)
    found, expected = (load_file(tmp_path / name / "store" / "shard-00000.safetensors") for name in ("served", "own"))
    torch.testing.assert_close(found, expected)
    losses = [[line["loss"] for line in read_metrics(folder)] for folder in (served, own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not list(server.folder.iterdir())
    server.asked.clear()
    (tmp_path / "served" / "run").rename(tmp_path / "served" / "before")
    run(base, tmp_path / "served", server)
    assert not server.asked


def test_samples_and_features_of_a_server(
    base: dict[str, Any], server: HiddenStatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target that was never in this process, whose fingerprint nobody knows. Later runs need no server."""
    samples = Path(base["data.samples"])
    (tmp_path / "samples").mkdir()
    for file in filter(Path.is_file, samples.iterdir()):
        (tmp_path / "samples" / file.name).write_bytes(file.read_bytes())
    prepared = json.loads((samples / PREPARED).read_text())
    (tmp_path / "samples" / PREPARED).write_text(json.dumps({**prepared, "target_fingerprint": None}))
    monkeypatch.delattr(Target, "from_pretrained")
    done = run({**base, "data.samples": tmp_path / "samples"}, tmp_path, server)
    environment = json.loads((done / "environment.json").read_text())
    assert environment["target_fingerprint"] is None
    server.asked.clear()
    given = {**base, "data.samples": tmp_path / "samples", "data.features_dir": tmp_path / "store"}
    again = train(make_config("eagle3", given, tmp_path / "again", run=RUN))
    assert [line["loss"] for line in read_metrics(again)] == [line["loss"] for line in read_metrics(done)]
    assert not server.asked


def target_of_an_engine(kind: str, folder: Path) -> Target:
    """Write a target that is not decoded here, and return it as an engine has it: in its own attention."""
    sizes = {"vocab_size": len(tiny_tokenizer()), "max_position_embeddings": 128}
    config = family_config("llama" if kind == GPTQ else kind, {**RUN_BY_ENGINES.get(kind, {}), **sizes})
    plain_model(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    model, tokenizer = load_model(folder, read_config(folder), torch.device("cpu"), torch.float32)
    model.set_attn_implementation("eager")
    if kind == GPTQ:
        pack_layers(folder)
    return Target(model, tokenizer, str(folder), fuse_layers=False, decodes=False)


def pack_layers(folder: Path) -> None:
    """Put tensors of GPTQ in the place of a target's layers; their values are not read by anybody here."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name.replace("weight", "qweight")] = tensors.pop(name).int()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, quantization_config={"quant_method": GPTQ, "bits": 4})


@torch.no_grad()
def write_greedy_samples(target: Target, folder: Path) -> Path:
    """What the target writes behind eight prompts of four tokens, as an engine wrote it."""
    texts = torch.arange(3, 35).view(8, 4)
    for _ in range(8):
        logits = target.model(input_ids=texts, use_cache=False).logits[:, -1]
        texts = torch.cat([texts, logits.argmax(-1, keepdim=True)], 1)
    folder.mkdir()
    samples = [Sample(text, [Span(4, 12)]) for text in texts.tolist()]
    write_samples(folder, [samples], iter)
    prepared = {"target": target.name, "target_fingerprint": None, "written_by": "vllm"}
    (folder / PREPARED).write_text(json.dumps(prepared))
    return folder


class EagerEngine(FakeEngine):
    """An engine that runs a target in its own attention; one token of every draft is accepted, whatever the drafter."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.decoder = self
        self.drafts, self.stats = True, Stats(DRAFT_LENGTH)

    def take(self, folder: str) -> None:
        assert load_file(Path(folder) / "model.safetensors")

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], limit: int) -> Any:
        text = torch.tensor(prompts)
        for _ in range(limit):
            text = torch.cat([text, self.target.model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        self.stats += Stats(DRAFT_LENGTH, 1, DRAFT_LENGTH, 1, limit, 1, [0, 1, 0, 0, 0])
        return SimpleNamespace(token_ids=text[:, -limit:].tolist())


@pytest.mark.parametrize("kind", ["jamba", pytest.param("minimax", marks=pytest.mark.long), GPTQ])
def test_a_target_that_only_an_engine_runs_is_trained_for(kind: str, tmp_path: Path) -> None:
    """Its ends are here, and its layers are not to be had or not on our cache. To decode it in the run is refused.

    An engine that serves it measures every checkpoint.
    """
    target = target_of_an_engine(kind, tmp_path / "target")
    (tmp_path / "states").mkdir()
    server, engine = HiddenStatesServer(target, tmp_path / "states"), EagerEngine(target)
    server.layer_ids = [1, 2, 3]
    base: dict[str, Any] = {
        "target": tmp_path / "target",
        "run.device": "cpu",
        "data.samples": write_greedy_samples(target, tmp_path / "samples"),
        "data.batch_size": 8,
        "data.features": "stored",
        "data.features_dtype": "float32",
        "drafter.layer_ids": [1, 2],
    }
    try:
        losses = [line["loss"] for line in read_metrics(run(base, tmp_path / "done", server))]
        (tmp_path / "prompts.txt").write_text("strike\n")
        with pytest.raises(UserError, match=r"cannot be decoded here.*without evaluation\.prompts"):
            run({**base, "evaluation.prompts": tmp_path / "prompts.txt"}, tmp_path / "decoded", server)
        changes = {"prompts": tmp_path / "prompts.txt", "engine": engine.url, "max_new_tokens": 4, "repeats": 1}
        judged = run({**base, **{f"evaluation.{key}": value for key, value in changes.items()}}, tmp_path, server)
    finally:
        server.close()
        engine.close()
    rows = [read_evaluation(path / "evaluation.json").first for path in checkpoints(judged)]
    assert [row.acceptance.mean_acceptance_length for row in rows] == [2.0, 2.0]
    assert all(map(math.isfinite, losses))
    online = {key: value for key, value in base.items() if not key.startswith("data.features")}
    with pytest.raises(UserError, match=r"cannot be decoded here.*features_endpoint"):
        train(make_config("eagle3", online, tmp_path / "online", run=RUN))


def without_states(answer: dict) -> dict:
    return {**answer, "kv_transfer_params": None}


def at(path: object) -> Callable[[dict], dict]:
    return lambda answer: {**answer, "kv_transfer_params": {"hidden_states_path": path}}


def changed_file(change: Callable[[Path], object]) -> Callable[[dict], None]:
    """Let the server change the file that it wrote before it answers."""

    def changed(answer: dict) -> None:
        time.sleep(0.1)
        change(Path(answer["kv_transfer_params"]["hidden_states_path"]))

    return changed


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def without_numbers(path: Path) -> None:
    tensors = load_file(path)
    save_file({**tensors, "hidden_states": tensors["hidden_states"] * torch.nan}, path)


def pipe(path: Path) -> None:
    lock = Path(f"{path}.lock")
    lock.unlink()
    os.mkfifo(lock)


def choosing(**changes: Any) -> Callable[[dict], dict]:
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **changes}]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_ids": [2, 3, 4]}, "layer 1 is not what comes out of that layer"),
        ({"layer_ids": [2, 3, 4], "error": 0.2}, "layer 1 is not what comes out of that layer"),
        ({"error": 0.7}, "layer 1 is not what comes out of that layer"),
        ({"layer_ids": [1, 2, 3, 4]}, r"shape \[\d+, 4, 32\] and not \[\d+, 3, 32\].*layer_ids\W+\[1, 2, 4\]"),
        ({"layer_ids": [1, 2, 3]}, "makes other probabilities"),
        ({"post_norm": True}, "makes other probabilities"),
        ({"change": without_states}, "gives no hidden states: start it as `vllm serve .*extract_hidden_states"),
        ({"change": at("/nowhere/1.safetensors")}, "/nowhere/1.safetensors.lock is not there"),
        ({"change": at("\0")}, "null byte"),
        ({"change": at("x" * 900)}, "too long"),
        ({"change": at("x" * 5000)}, "gives no hidden states"),
        ({"change": at(5)}, "gives no hidden states"),
        ({"change": changed_file(linked)}, "is no regular file"),
        ({"change": changed_file(pipe)}, "is no regular file"),
        ({"change": changed_file(without_numbers)}, "are no finite numbers"),
        ({"change": changed_file(lambda path: path.write_bytes(b"\xff" * 100))}, "cannot be read"),
        ({"change": choosing(token_ids=[10**6])}, "writes token 1000000, which .* has not"),
        ({"change": choosing(token_ids=["5"])}, "gives no hidden states"),
        ({"change": choosing(logprobs=None)}, "gives no hidden states"),
        ({"models": [{"id": "served", "max_model_len": 20}]}, "serve with --max-model-len"),
    ],
)
def test_other_servers_are_refused(
    changes: dict[str, Any], reason: str, base: dict[str, Any], server: HiddenStatesServer, tmp_path: Path
) -> None:
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(UserError, match=reason):
        run(base, tmp_path, server)
    assert not list(tmp_path.glob("store/shard-*"))


def test_the_last_layer_alone_needs_no_layers_of_the_target(
    base: dict[str, Any], server: HiddenStatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MTP head reads what the target's own head does, and that head's probabilities show it."""
    monkeypatch.delattr(Target, "first_layers_from_pretrained")
    server.layer_ids = [LAYER_IDS[-1]] * 2
    changes = {"data.features_dir": tmp_path / "store", "data.features_endpoint": server.url}
    given = {name: value for name, value in base.items() if name != "drafter.layer_ids"}
    folder = train(make_config("mtp", {**given, **changes}, tmp_path / "run", run=RUN))
    assert read_metrics(folder)[-1]["step"] == RUN["steps"]


def test_a_server_of_few_bits(base: dict[str, Any], server: HiddenStatesServer, tmp_path: Path) -> None:
    """Its states are not exact, but nearest to those of the layer that was asked for."""
    server.error = 0.3
    folder = run(base, tmp_path, server)
    assert read_metrics(folder)[-1]["step"] == RUN["steps"]


def test_a_file_of_the_users_is_not_removed(base: dict[str, Any], server: HiddenStatesServer, tmp_path: Path) -> None:
    """A server may name any file that a safetensors reader understands; what is not its own answer stays."""
    own = tmp_path / "weights.safetensors"
    save_file({"hidden_states": torch.zeros(3, 3, 32)}, own)
    Path(f"{own}.lock").touch()
    server.change = at(str(own))
    with pytest.raises(UserError, match="holds hidden states of another text"):
        run(base, tmp_path, server)
    assert own.is_file()


def test_a_lock_that_is_never_given_up(tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(http.PassingError, match="still being written after 0.05 s"):
            wait_until_written(path, 0.05)


def test_another_target_is_refused(base: dict[str, Any], make_target_dir: Callable[..., Path], tmp_path: Path) -> None:
    other = HiddenStatesServer(Target.from_pretrained(make_target_dir(rms_norm_eps=0.5), "cpu"), tmp_path)
    with pytest.raises(UserError, match="makes other probabilities"):
        run(base, tmp_path, other)
    other.close()


def test_a_file_of_another_text_is_asked_for_again(
    base: dict[str, Any], server: HiddenStatesServer, tmp_path: Path
) -> None:
    def swapped(answer: dict) -> dict | None:
        if len(server.asked) == 2:
            time.sleep(0.05)
            path = answer["kv_transfer_params"]["hidden_states_path"]
            tensors = load_file(path)
            save_file({**tensors, "token_ids": tensors["token_ids"] + 1}, path)
        return None

    server.change = swapped
    run(base, tmp_path, server)
    assert len({tuple(body["prompt"]) for body in server.asked}) < len(server.asked)
