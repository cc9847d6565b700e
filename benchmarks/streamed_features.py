"""How long a drafter waits for features that servers compute while it trains.

    python benchmarks/streamed_features.py [--steps 24] [--factors 2 1 0.5] [--kills 20] [--seed N]

Two stand-ins for vLLM in processes of their own know the states of all samples, and give them at a rate that is set.
The first run has servers without a limit, and shows what the drafter takes by itself. In the others both together
deliver a multiple of that. In the last one, where they deliver four times as much, SIGKILL comes to one of them or to
both at so many random moments, and each is started again within a second. Fewer steps than by default are fetched
ahead, so that so short a run asks until its end. Each line has the share of its time that the drafter waits; the losses
of all steps and the weights are those of the first run, bit for bit.
"""

import argparse
import fcntl
import json
import multiprocessing
import os
import platform
import random
import tempfile
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
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
from draftsmith.recipes.bench.started_vllm import free_port
from draftsmith.recipes.configs.recipes import quickstart_eagle3
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train import TrainConfig, train
from draftsmith.train.run_folder.checkpoint import WEIGHTS, checkpoints
from draftsmith.train.run_folder.tracking import read_metrics

LENGTH, BATCH_SIZE = 256, 16
NO_LIMIT = 1e12  # tokens a second
READ_PER_TRAINED = 4 / 3  # tokens: the first quarter of a sample of data_plane.py is its prompt
STEPS_AHEAD = 4
KILLED_FACTOR = 4.0
CONTEXT = 512
FORK = multiprocessing.get_context("fork")


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

    def __init__(self, texts: dict[tuple[int, ...], Text], folder: Path, rate: float, port: int) -> None:
        super().__init__(("127.0.0.1", port), Answers)
        self.texts, self.folder, self.rate = texts, folder, rate
        self._turn, self._free_at, self._count = threading.Lock(), time.monotonic(), 0

    def answer(self, body: dict) -> dict:
        """Return the answer to a completion; a text that it does not know is the check of the tokenizer."""
        if isinstance(body["prompt"], str):
            ids = Target.without_weights(EMBEDDED_TARGET).encode(body["prompt"])
            return {"choices": [{"finish_reason": "length", "token_ids": [1], "prompt_token_ids": ids}]}
        text = self.texts[tuple(body["prompt"])]
        with self._turn:
            self._count += 1
            path = self.folder / f"{os.getpid()}-{self._count}.safetensors"
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
        self.reply({"data": [{"id": "served", "max_model_len": CONTEXT}]})

    def do_POST(self) -> None:
        self.reply(self.server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def reply(self, answer: dict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(texts: dict[tuple[int, ...], Text], folder: Path, rate: float, port: int) -> None:
    """Serve until the process is killed."""
    torch.set_num_threads(1)
    StandIn(texts, folder, rate, port).serve_forever()


@dataclass
class Servers:
    """Two stand-ins that deliver `rate` tokens a second together, and the kills that they have to survive."""

    texts: dict[tuple[int, ...], Text]
    rate: float
    kill_steps: list[int]  # of the run, behind each of which a kill comes
    seed: int = 0

    def start(self, number: int, folder: Path, port: int) -> BaseProcess:
        process = FORK.Process(target=serve, args=(self.texts, folder / f"states-{number}", self.rate / 2, port))
        process.start()
        return process

    def keep(self, folder: Path, ports: list[int], stop: Event) -> None:
        """Keep both running until `stop`, but for the kills. A process of its own does so, which has no threads."""
        chance = random.Random(self.seed)
        processes = [self.start(number, folder, port) for number, port in enumerate(ports)]
        try:
            for step in self.kill_steps:
                while max((line["step"] for line in read_metrics(folder / "run")), default=0) < step:
                    assert not stop.wait(0.05), "the run ended before the last kill: give more --steps"
                time.sleep(chance.uniform(0, 1))
                killed = chance.choice([[0], [1], [0, 1]])
                for number in killed:
                    processes[number].kill()
                print(f"killed {killed} after step {step}", flush=True)
                for number in killed:
                    processes[number].join()
                    time.sleep(chance.uniform(0, 0.5))
                    processes[number] = self.start(number, folder, ports[number])
            stop.wait()
        finally:
            for process in processes:
                process.kill()


@dataclass
class Waited:
    """What a run with servers of some rate gave."""

    drafter_rate: float  # tokens that the drafter reads in a second while it does not wait
    share: float  # of the time in which it waits
    losses: list[float]  # of all steps
    weights: bytes


def run(config: TrainConfig, folder: Path, servers: Servers) -> Waited:
    """Train with features of these servers."""
    ports, stop = [free_port(), free_port()], FORK.Event()
    for number in range(2):
        (folder / f"states-{number}").mkdir(parents=True)
    keeper = FORK.Process(target=servers.keep, args=(folder, ports, stop))
    keeper.start()
    config.run.dir, config.data.features_endpoint = str(folder / "run"), [f"http://127.0.0.1:{port}" for port in ports]
    try:
        lines = read_metrics(train(config))
    finally:
        stop.set()
        keeper.join()
    assert keeper.exitcode == 0
    losses, lines = [line["loss"] for line in lines], lines[STEPS_AHEAD:]  # the first ones wait for the first features
    rates = [READ_PER_TRAINED * line["tokens_per_second"] for line in lines]
    share = sum(line["time_share_data"] for line in lines) / len(lines)
    weights = (checkpoints(folder / "run")[-1] / WEIGHTS).read_bytes()
    return Waited(sum(rates) / len(rates) / (1 - share), share, losses, weights)


def make_config(samples: Path, steps: int) -> TrainConfig:
    config = quickstart_eagle3()
    config.target, config.data.samples, config.data.features = str(EMBEDDED_TARGET), str(samples), "streamed"
    config.data.batch_size, config.data.batch_unit, config.data.max_length = BATCH_SIZE, "samples", 511
    config.data.held_out_prompts = 0
    config.run.steps = config.run.checkpoint_every = steps
    config.run.log_every, config.run.device = 1, "cpu"
    config.evaluation.prompts = None
    config.drafter.layer_ids = (2, 6, 9)  # type: ignore[attr-defined]
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--factors", type=float, nargs="*", default=[2.0, 1.0, 0.5])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    args = parser.parse_args()
    torch.set_num_threads(1)
    streamed.MOST_STEPS_AHEAD = STEPS_AHEAD
    print(
        f"{platform.machine()}, one thread, torch {torch.__version__}, commit {git_commit()}, seed {args.seed}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        out = Path(name)
        make(out / "samples", args.steps * BATCH_SIZE, LENGTH)
        config = make_config(out / "samples", args.steps)
        texts = compute_texts(out / "samples", config.drafter.layer_ids)  # type: ignore[attr-defined]
        free = run(config, out / "free", Servers(texts, NO_LIMIT, []))
        print(f"no limit: {free.drafter_rate:.0f} tokens a second, waits {free.share:.1%}", flush=True)
        for factor in args.factors:
            found = run(config, out / f"times-{factor:g}", Servers(texts, factor * free.drafter_rate, []))
            tell(f"servers of {factor:g} times that", found, free)
        steps = range(STEPS_AHEAD, args.steps - 2 * STEPS_AHEAD)  # the last ones ask for nothing
        kill_steps = sorted(random.Random(args.seed).choices(steps, k=args.kills))
        found = run(config, out / "killed", Servers(texts, KILLED_FACTOR * free.drafter_rate, kill_steps, args.seed))
        tell(f"{args.kills} kills", found, free)


def tell(name: str, found: Waited, free: Waited) -> None:
    """Print what a run gave, which is to be the weights of the first one."""
    assert (found.losses, found.weights) == (free.losses, free.weights), f"{name}: another run"
    print(f"{name}: waits {found.share:.1%}; losses and weights are the same", flush=True)


if __name__ == "__main__":
    main()
