"""How long a drafter waits for features that servers compute while it trains.

    python benchmarks/streamed_features.py [--steps 24] [--factors 2 1 0.5]

Two stand-ins for vLLM in processes of their own know the states of all samples, and give them at a rate that is set.
The first run has servers without a limit, and shows what the drafter takes by itself. In the others both together
deliver a multiple of that; in the last one, where they deliver four times as much, one of them is killed after half of
the steps. Fewer steps than by default are fetched ahead, so that so short a run asks until its end. Each line has the
share of its time that the drafter waits, and the loss of the last step, which is to be the same.
"""

import argparse
import fcntl
import json
import multiprocessing
import platform
import tempfile
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from data_plane import make
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.features import streamed
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.recipes.configs.recipes import quickstart_eagle3
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train import TrainConfig, train
from draftsmith.train.run_folder.tracking import read_metrics

LENGTH, BATCH_SIZE = 256, 16
NO_LIMIT = 1e12  # tokens a second
READ_PER_TRAINED = 4 / 3  # tokens: the first quarter of a sample of data_plane.py is its prompt
LOGGED = STEPS_AHEAD = 4
KILLED_FACTOR = 4.0


@dataclass
class Text:
    """What a server computes on a text."""

    states: Tensor  # [T, A + 1, H]
    token: int  # the likeliest to follow
    logprob: float


def compute_texts(folder: Path, layer_ids: tuple[int, ...]) -> dict[tuple[int, ...], Text]:
    """Return what a vLLM would give for each sample, by its token ids."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32)
    ids, texts = (*layer_ids, target.num_layers), {}
    for sample in read_samples(folder):
        row = torch.tensor([sample.token_ids])
        features = target.features(Batch(row, torch.ones_like(row, dtype=torch.bool)), ids)
        assert features.layers is not None
        chances = target.logits(features.last_hidden[0, -1]).log_softmax(-1)
        token = int(chances.argmax())
        states = features.layers[0].unflatten(-1, (len(ids), -1)).contiguous()
        texts[tuple(sample.token_ids)] = Text(states, token, float(chances[token]))
    return texts


class StandIn(ThreadingHTTPServer):
    """A vLLM that gives the states of texts that it knows, so many tokens a second."""

    def __init__(self, texts: dict[tuple[int, ...], Text], folder: Path, rate: float, context: int) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.texts, self.folder, self.rate, self.context = texts, folder, rate, context
        self._turn, self._free_at, self._count = threading.Lock(), time.monotonic(), 0

    def answer(self, body: dict) -> dict:
        """Return the answer to a completion; a text that it does not know is the check of the tokenizer."""
        if isinstance(body["prompt"], str):
            ids = Target.without_weights(EMBEDDED_TARGET).encode(body["prompt"])
            return {"choices": [{"finish_reason": "length", "token_ids": [1], "prompt_token_ids": ids}]}
        text = self.texts[tuple(body["prompt"])]
        with self._turn:
            self._count += 1
            path = self.folder / f"{self._count}.safetensors"
            self._free_at = max(self._free_at, time.monotonic()) + len(text.states) / self.rate
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save_file({"hidden_states": text.states, "token_ids": torch.tensor(body["prompt"])}, path)
        choice = {"token_ids": [text.token], "logprobs": {"token_logprobs": [text.logprob]}}
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}


class Answers(BaseHTTPRequestHandler):
    """The requests to a stand-in."""

    server: StandIn

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "served", "max_model_len": self.server.context}]})

    def do_POST(self) -> None:
        self.reply(self.server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def reply(self, answer: dict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(texts: dict[tuple[int, ...], Text], folder: Path, rate: float, port: Connection) -> None:
    """Serve until the process is killed; the port is sent when it is known."""
    torch.set_num_threads(1)
    server = StandIn(texts, folder, rate, 512)
    port.send(server.server_port)
    server.serve_forever()


@dataclass
class Waited:
    """What a run with servers of some rate gave."""

    drafter_rate: float  # tokens that it reads in a second while it does not wait
    share: float  # of the time in which it waits
    loss: float  # of the last step


def kill_in_the_middle(process: multiprocessing.process.BaseProcess, run: Path, num_steps: int) -> None:
    """Kill a server when a run has taken half of its steps."""
    while process.is_alive():
        if any(2 * line["step"] >= num_steps for line in read_metrics(run)):
            process.kill()
        time.sleep(0.1)


def run(config: TrainConfig, texts: dict[tuple[int, ...], Text], out: Path, rate: float, kills: bool = False) -> Waited:
    """Train with two stand-ins that deliver `rate` tokens a second together; one may be killed in the middle."""
    processes, urls = [], []
    for number in range(2):
        folder = out / f"states-{number}"
        folder.mkdir(parents=True)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=serve, args=(texts, folder, rate / 2, theirs))
        process.start()
        processes.append(process)
        urls.append(f"http://127.0.0.1:{ours.recv()}")
    if kills:
        arguments = (processes[0], out / "run", config.run.steps)
        threading.Thread(target=kill_in_the_middle, args=arguments, daemon=True).start()
    config.run.dir, config.data.features_endpoint = str(out / "run"), list[str](urls)
    try:
        lines = read_metrics(train(config))
        assert processes[0].is_alive() != kills
    finally:
        for process in processes:
            process.kill()
    lines = lines[1:]  # the first steps wait for the first features
    rates = [READ_PER_TRAINED * line["tokens_per_second"] for line in lines]
    share = sum(line["time_share_data"] for line in lines) / len(lines)
    return Waited(sum(rates) / len(rates) / (1 - share), share, lines[-1]["loss"])


def make_config(samples: Path, steps: int) -> TrainConfig:
    config = quickstart_eagle3()
    config.target, config.data.samples, config.data.features = str(EMBEDDED_TARGET), str(samples), "streamed"
    config.data.batch_size, config.data.batch_unit, config.data.max_length = BATCH_SIZE, "samples", 511
    config.data.held_out_prompts = 0
    config.run.steps = config.run.checkpoint_every = steps
    config.run.log_every, config.run.device = LOGGED, "cpu"
    config.evaluation.prompts = None
    config.drafter.layer_ids = (2, 6, 9)  # type: ignore[attr-defined]
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="a multiple of 8")
    parser.add_argument("--factors", type=float, nargs="*", default=[2.0, 1.0, 0.5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    streamed.MOST_STEPS_AHEAD = STEPS_AHEAD
    print(f"{platform.machine()}, one thread, torch {torch.__version__}, commit {git_commit()}", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        out = Path(name)
        make(out / "samples", args.steps * BATCH_SIZE, LENGTH)
        config = make_config(out / "samples", args.steps)
        texts = compute_texts(out / "samples", config.drafter.layer_ids)  # type: ignore[attr-defined]
        free = run(config, texts, out / "free", NO_LIMIT)
        print(f"no limit: {free.drafter_rate:.0f} tokens a second, waits {free.share:.1%}, loss {free.loss:.6f}")
        for factor in args.factors:
            found = run(config, texts, out / f"times-{factor:g}", factor * free.drafter_rate)
            print(f"servers of {factor:g} times that: waits {found.share:.1%}, loss {found.loss:.6f}", flush=True)
        found = run(config, texts, out / "killed", KILLED_FACTOR * free.drafter_rate, kills=True)
        print(f"one of two killed in the middle: waits {found.share:.1%}, loss {found.loss:.6f}")


if __name__ == "__main__":
    main()
