"""The ways of making the target's features for a training run: hours, memory, disk and network, from shapes alone.

Features are made in the run, beside the drafter (`online`), or once before it and kept on disk (`stored`), or by GPUs
that serve the target while the others train (`streamed`). The target's layers lie whole on each GPU, in pieces on those
of each machine or of all machines, in turn on one after the other, or in a vLLM. All products take the time that
`estimate` gives them; this file adds what moves between GPUs, over the network and to the disk.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PretrainedConfig

from draftsmith.data.features.endpoint import serve_options
from draftsmith.data.features.stored import token_bytes
from draftsmith.inference.planning.gpu_roofline import Machine, TargetTimes
from draftsmith.inference.planning.plans import DataFlow, TrainingPlan, TrainingWay
from draftsmith.models import Drafter
from draftsmith.models.target.shape import TargetShape
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.estimates import UTILISATION, RunEstimate, estimate, num_trained, share_in_pieces

Features = Literal["online", "stored", "streamed"]
Placement = Literal["whole", "in pieces", "in pieces over machines", "in turn", "by a vLLM"]

GPUS_OF_MACHINE = 8
CARRIED = 12.5e9  # bytes a second over 100 Gbit Ethernet; about as much as three NVMe SSDs
LEAST_MICRO_BATCH = 2048  # tokens, so that most samples are read whole
LINK_SHARE = 0.7  # of the link between GPUs that their exchanges reach
TOKEN_ID_BYTES = 4  # of a sample on disk
GRADIENT_BYTES = 4 + 4  # of a trained weight, that each GPU gets in a step: sums of its part, then those of all others
STATE_BYTES = 2  # of a value in bf16, as a server sends it


@dataclass(frozen=True)
class Phase:
    """A part of a run: the seconds of its products, and the bytes that move."""

    products: float
    exchanged: float = 0.0  # into each GPU, while products go on
    gathered: float = 0.0  # of the target's layers into each GPU, while products go on
    summed: float = 0.0  # of tensor parallelism into each GPU, and its products wait
    read: float = 0.0  # of features from the disk, by all GPUs, while products go on
    received: float = 0.0  # of features from servers, by all GPUs, while products go on
    written: float = 0.0  # of features to the disk, and products wait
    sent: float = 0.0  # of features by a server, and its products wait

    def seconds(self, link: float, gathering: float | None = None) -> float:
        """Return what it takes at so many bytes a second from GPU to GPU; `gathering` is that of layers, if another."""
        beside = self.exchanged / link + self.gathered / (gathering or link)
        waiting = self.summed / link + (self.written + self.sent) / CARRIED
        return max(self.products, beside, self.read / CARRIED, self.received / CARRIED) + waiting


@dataclass(frozen=True)
class Training:
    """A training run to be planned: recipe, target, GPUs and samples."""

    recipe: str
    config: TrainConfig
    drafter: Drafter  # of the right shape, without numbers
    target_config: PretrainedConfig
    target: TargetShape
    machine: Machine
    samples: int
    tokens_per_sample: int
    epochs: int
    micro_batch: int | None = None  # its tokens, instead of the recipe's

    @property
    def num_gpus(self) -> int:
        return self.machine.num_gpus

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch or self.config.data.tokens_per_micro_batch

    @property
    def batch_size(self) -> int:
        """Samples of a batch, as many for each GPU."""
        return max(1, self.config.data.batch_size // self.num_gpus) * self.num_gpus

    @property
    def steps(self) -> int:
        return max(1, self.samples * self.epochs // self.batch_size)

    def on(self, num_gpus: int) -> "Training":
        """Return the same training on another number of GPUs."""
        return replace(self, machine=replace(self.machine, num_gpus=num_gpus))

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts and answers."""
        return self.samples * self.tokens_per_sample

    @property
    def link_of_machine(self) -> float:
        """Bytes a second that a GPU gets from the others of its machine."""
        return LINK_SHARE * self.machine.gpu.link

    @property
    def link(self) -> float:
        """Bytes a second that a GPU gets from the others; those of several machines are joined by the network."""
        within = self.link_of_machine
        return within if self.num_gpus <= GPUS_OF_MACHINE else min(within, CARRIED)

    @property
    def of_others(self) -> float:
        """The part of the drafter's gradients that other GPUs sum."""
        return (self.num_gpus - 1) / self.num_gpus

    def num_pieces(self, placement: Placement) -> int:
        """Return the number of GPUs that hold the target's layers together."""
        numbers = {"in pieces": min(self.num_gpus, GPUS_OF_MACHINE), "in pieces over machines": self.num_gpus}
        return numbers.get(placement, 1)

    def gathered(self, placement: Placement, passes: float) -> float:
        """Return the bytes of layers that each GPU gets from the others in so many passes through them."""
        number = self.num_pieces(placement)
        return passes * self.needs("online").layer_bytes * (number - 1) / number

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the features that are kept of a token."""
        hidden_size = self.target_config.get_text_config().hidden_size
        return token_bytes(len(self.drafter.layer_ids) + 1, hidden_size, self.config.data.features_dtype)

    def needs(self, features: Features) -> RunEstimate:
        """Return what training takes by `estimate`."""
        micro_batch = self.tokens_per_micro_batch
        data = replace(
            self.config.data, features=features, batch_size=self.batch_size, tokens_per_micro_batch=micro_batch
        )
        config = replace(self.config, data=data, run=replace(self.config.run, steps=self.steps))
        return estimate(config, self.target_config, self.tokens_per_sample, self.drafter, weights=self.target)


def training_plan(training: Training, price: float | None) -> TrainingPlan:
    """Return what a training takes in every way; the cheapest takes the least GPU hours, then the smaller disk."""
    ways = [fitted_way(training, *way, price) for way in possible_ways(training)]
    return TrainingPlan(
        training.recipe,
        training.samples,
        training.tokens_per_sample,
        training.epochs,
        training.steps,
        TOKEN_ID_BYTES * training.tokens,
        training.tokens * training.bytes_per_token,
        ways,
        cheapest_of(ways),
        cheapest_of([way for way in ways if not way.stored_bytes]),
    )


def cheapest_of(ways: list[TrainingWay]) -> str | None:
    """Return the name of the way that fits with the least GPU hours, of equal ones that with the smallest disk."""
    fitting = [way for way in ways if way.fits]
    return min(fitting, key=lambda way: (way.gpu_hours, way.stored_bytes)).name if fitting else None


def possible_ways(training: Training) -> Iterator[tuple[Features, Placement]]:
    """Yield the ways that draftsmith has for so many GPUs."""
    placements: list[Placement] = ["whole"]
    if training.num_gpus > 1:
        placements.append("in pieces")
    if training.num_gpus > GPUS_OF_MACHINE:
        placements.append("in pieces over machines")
    if 1 < training.num_gpus <= GPUS_OF_MACHINE:
        placements.append("in turn")
    yield from (("online", placement) for placement in placements)
    yield from (("stored", placement) for placement in placements)
    yield "stored", "by a vLLM"
    if possible_splits(training):
        yield "streamed", "by a vLLM"


def fitted_way(training: Training, features: Features, placement: Placement, price: float | None) -> TrainingWay:
    """Return a way with the recipe's micro-batches, or with the largest ones that fit, each half as large."""
    size, least = training.tokens_per_micro_batch, max(LEAST_MICRO_BATCH, training.tokens_per_sample)
    way = training_way(training, features, placement, price)
    while not way.fits and size // 2 >= least:
        size //= 2
        way = training_way(replace(training, micro_batch=size), features, placement, price)
    return way


def training_way(training: Training, features: Features, placement: Placement, price: float | None) -> TrainingWay:
    link, num_gpus = training.link, training.num_gpus
    gathering = training.link_of_machine if placement == "in pieces" else link
    if features == "streamed":
        phases = [streamed(*split_of(training))]
    elif features == "stored":
        phases = [stored(training, placement), trained(training, features, placement)]
    else:
        phases = [trained(training, features, placement)]
    memory = memory_of(training, features, placement)
    seconds = [phase.seconds(link, gathering) for phase in phases]
    hours = sum(seconds) / 3600
    links = [phase.exchanged + phase.gathered + phase.summed for phase in phases]
    disks = [phase.read + phase.written for phase in phases]
    servers = [phase.sent + phase.received for phase in phases]
    times: dict[Literal["products", "disk", "network", "link"], float] = {
        "products": sum(phase.products for phase in phases),
        "disk": sum(disks) / CARRIED,
        "network": sum(servers) / CARRIED,
        "link": sum((phase.exchanged + phase.summed) / link + phase.gathered / gathering for phase in phases),
    }
    return TrainingWay(
        f"{features}, {placement}",
        training.tokens_per_micro_batch,
        memory,
        memory <= training.machine.assumptions.memory_share * training.machine.gpu.memory,
        hours,
        sum(seconds[:-1]) / 3600,
        num_gpus * hours,
        None if price is None else price * num_gpus * hours,
        training.tokens * training.bytes_per_token if features == "stored" else 0,
        traffic(disks, phases),
        traffic(servers, phases),
        traffic(links, phases),
        max(times, key=lambda name: times[name]),
        command_of(training, features, placement),
        server_command(training, features) if placement == "by a vLLM" else None,
    )


def traffic(num_bytes: list[float], phases: list[Phase]) -> DataFlow:
    """Return the bytes of all phases, and the highest rate that keeps the products of any of them going."""
    rates = (moved / phase.products for moved, phase in zip(num_bytes, phases, strict=True))
    return DataFlow(sum(num_bytes), max(rates))


def trained(training: Training, features: Features, placement: Placement) -> Phase:
    """Return the steps of the training."""
    needs = training.needs(features)
    working = 1 if placement == "in turn" else training.num_gpus
    tokens_of_gpu = training.batch_size * training.tokens_per_sample / training.num_gpus
    passes = training.steps * max(1.0, tokens_of_gpu / training.tokens_per_micro_batch)
    return Phase(
        3600 * needs.hours(training.machine.gpu, working),
        exchanged=training.steps * GRADIENT_BYTES * num_trained(training.drafter) * training.of_others * (working > 1),
        gathered=training.gathered(placement, passes) if features == "online" else 0.0,
        read=training.epochs * training.tokens * training.bytes_per_token if features == "stored" else 0.0,
    )


def stored(training: Training, placement: Placement) -> Phase:
    """Return the pass that stores the features of all samples, each once."""
    written = float(training.tokens * training.bytes_per_token)
    if placement == "by a vLLM":
        return replace(served(training, tensor_parallel(training)), written=written)
    operations, own_peak = operations_of_layers(training), training.machine.gpu.bf16 * UTILISATION
    working = 1 if placement == "in turn" else training.num_gpus
    passes = training.tokens / training.num_gpus / training.tokens_per_micro_batch
    gathered = training.gathered(placement, passes)
    return Phase(operations / (own_peak * working), gathered=gathered, written=written)


def operations_of_layers(training: Training) -> float:
    """Return the operations of a pass of all samples through the target's layers."""
    return 2.0 * training.target.active_weights_of_layers * training.tokens


def served(training: Training, parallel: int) -> Phase:
    """Return a pass of all samples through vLLMs, each on so many of the GPUs."""
    text = training.target_config.get_text_config()
    peak = training.machine.flops / training.machine.assumptions.flops_share * UTILISATION
    sums = 2 * training.target.layers * text.hidden_size * STATE_BYTES  # of a token, after attention and after MLP
    tokens_of_gpu = training.tokens * parallel / training.num_gpus
    states = token_bytes(len(training.drafter.layer_ids) + 1, text.hidden_size, "bfloat16")
    return Phase(
        operations_of_layers(training) / peak,
        summed=tokens_of_gpu * sums * 2 * (parallel - 1) / parallel,
        sent=float(training.tokens * states),
    )


# --- features that are streamed


def streamed(trainers: Training, servers: Training) -> Phase:
    """Return the steps of a training on some GPUs, for which others serve the features of every epoch."""
    steps, epoch = trained(trainers, "streamed", "whole"), served(servers, gpus_of_server(servers))
    serving = servers.epochs * (epoch.products + epoch.summed / servers.link)
    return Phase(
        max(steps.products, serving),
        exchanged=steps.exchanged,
        received=servers.epochs * epoch.sent,
    )


def split_of(training: Training) -> tuple[Training, Training]:
    """Return the training on the GPUs that train and on those that serve, so divided that it ends first."""
    splits = [(training.on(training.num_gpus - number), training.on(number)) for number in possible_splits(training)]
    return min(splits, key=lambda split: streamed(*split).products)


def possible_splits(training: Training) -> list[int]:
    """Return the numbers of GPUs that may serve: whole servers, and whole machines where there are several."""
    unit = GPUS_OF_MACHINE if training.num_gpus > GPUS_OF_MACHINE else gpus_of_server(training)
    return list(range(unit, training.num_gpus, unit))


def gpus_of_server(training: Training) -> int:
    """Return the number of GPUs of a server that has them alone: the least power of two that holds the target."""
    room = training.machine.assumptions.memory_share * training.machine.gpu.memory
    parallel = 1
    while parallel < GPUS_OF_MACHINE and served_bytes(training, parallel) > room:
        parallel *= 2
    return parallel


def memory_of(training: Training, features: Features, placement: Placement) -> float:
    """Return the bytes on each GPU, at the time when they are most."""
    if features == "streamed":
        trainers, servers = split_of(training)
        needs = trainers.needs(features)
        own = needs.ends_bytes + needs.drafter_bytes + needs.working_bytes
        return max(own, served_bytes(servers, gpus_of_server(servers)))
    needs, count = training.needs("online"), training.num_gpus
    drafter = needs.drafter_bytes
    pieces = needs.layer_bytes * share_in_pieces(training.num_pieces(placement), training.target.layers)
    if placement.startswith("in pieces"):  # the drafter, too
        drafter = drafter / count + needs.gathered_bytes
    own = needs.ends_bytes + drafter
    beside = own + (needs.working_bytes if features == "online" else 0.0)
    with_layers = {
        "whole": beside + needs.layer_bytes,
        "in pieces": beside + pieces,
        "in pieces over machines": beside + pieces,
        "in turn": max(beside, (beside + needs.layer_bytes) / count),
        "by a vLLM": beside + served_bytes(training, tensor_parallel(training)),
    }[placement]
    return max(with_layers, own + needs.working_bytes)


def served_bytes(training: Training, parallel: int) -> float:
    """Return the bytes of a vLLM on each of so many GPUs that share the target, with the cache of one text."""
    times = TargetTimes(training.target, training.machine)
    return (times.stored_bytes() + times.kept_bytes(training.tokens_per_sample)) / parallel


def tensor_parallel(training: Training) -> int:
    """Return the least number of GPUs that hold a target's server beside the run; the others hold as many of it."""
    needs, machine = training.needs("stored"), training.machine
    room = machine.assumptions.memory_share * machine.gpu.memory - needs.ends_bytes - needs.drafter_bytes
    divisors = (number for number in range(1, machine.num_gpus + 1) if machine.num_gpus % number == 0)
    return next((number for number in divisors if served_bytes(training, number) <= room), machine.num_gpus)


# --- what starts it


def settings_of(training: Training, features: Features, placement: Placement, servers: str) -> list[str]:
    """Return the settings of a run in this way, over its recipe."""
    settings = [f"target={training.target.name}", "data.samples=data/my", "run.dir=runs/my"]
    settings.append(f"run.steps={training.steps}")
    if training.batch_size != training.config.data.batch_size:
        settings.append(f"data.batch_size={training.batch_size}")
    if training.micro_batch is not None:
        settings.append(f"data.tokens_per_micro_batch={training.micro_batch}")
    if features != "online":
        settings.append(f"data.features={features}")
    where = {
        "in pieces": "run.target_placement=sharded",
        "in pieces over machines": "run.target_placement=sharded_over_machines",
        "in turn": "run.target_placement=device_map",
        "by a vLLM": f"data.features_endpoint={servers}",
    }
    return [*settings, *([where[placement]] if placement in where else [])]


def addresses(training: Training, features: Features) -> str:
    """Return the addresses of the servers of a run: of those on machines of their own, one each."""
    if features == "stored" or training.num_gpus <= GPUS_OF_MACHINE:
        return "http://localhost:8000"
    machines = split_of(training)[1].num_gpus // GPUS_OF_MACHINE
    return "[" + ",".join(f"http://SERVER{number}:8000" for number in range(1, machines + 1)) + "]"


def command_of(training: Training, features: Features, placement: Placement) -> str:
    """Return the command that starts a run in this way; on several machines, that of the first."""
    servers = addresses(training, features)
    if features == "streamed":
        training, _ = split_of(training)
    count, machines = training.num_gpus, -(-training.num_gpus // GPUS_OF_MACHINE)
    launcher, options = "one_gpu", []
    if count > 1 and placement != "in turn":
        launcher = "fsdp2" if placement.startswith("in pieces") else "ddp" if machines == 1 else "two_machines"
        options = ["--num_processes", str(count)]
        if machines > 1:
            options += ["--num_machines", str(machines), "--machine_rank", "0", "--main_process_ip", "ADDRESS"]
    start = ["accelerate", "launch", "--config_file", f"recipes/launch/{launcher}.yaml", *options]
    settings = settings_of(training, features, placement, servers)
    return shlex.join([*start, "-m", "draftsmith.train", training.recipe, *settings])


def server_command(training: Training, features: Features) -> str:
    """Return the command of a vLLM that gives the features, on the GPUs of the run or on some that serve alone.

    Where machines serve alone, it is that of each of them.
    """
    count, parallel, visible, folder = training.num_gpus, tensor_parallel(training), "", "/dev/shm/hidden_states"
    if features == "streamed":
        trainers, servers = split_of(training)
        count, parallel = min(servers.num_gpus, GPUS_OF_MACHINE), gpus_of_server(servers)
        if training.num_gpus > GPUS_OF_MACHINE:
            folder = "/SHARED/hidden_states"
        else:
            visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(trainers.num_gpus, training.num_gpus)))} "
    layer_ids = [*training.drafter.layer_ids, training.target.layers]
    options = ["--tensor-parallel-size", str(parallel), "--data-parallel-size", str(count // parallel)]
    return visible + shlex.join(["vllm", "serve", training.target.name, *options, *serve_options(layer_ids, folder)])
