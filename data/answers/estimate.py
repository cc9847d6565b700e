"""What `prepare` will take, measured on some of the prompts before anything is written."""

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.filesize import decimal
from rich.table import Table

from draftsmith.data.answers.prepare import Work
from draftsmith.data.samples.samples import sample_line

SAMPLED_BATCHES = 2  # of prompts that are answered to measure on
CAPTURED_LAYERS = (0, 1, 3)  # layers beside the last hidden state, for the size of stored features
NORMAL_95 = 1.96


@dataclass
class Spread:
    """A total over all prompts, and how far it may be off: a 95 % interval from the spread over the sampled ones."""

    total: float
    margin: float

    @classmethod
    def over(cls, values: list[float], count: int) -> "Spread":
        """`values`: of the sampled prompts, out of `count`."""
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        unseen = (count - len(values)) / count  # what is sampled is known
        return cls(
            statistics.fmean(values) * count, NORMAL_95 * deviation / math.sqrt(len(values)) * count * unseen**0.5
        )

    def scaled(self, factor: float) -> "Spread":
        return Spread(self.total * factor, self.margin * factor)


@dataclass
class Estimate:
    num_prompts: int
    num_sampled: int
    generated: Spread  # tokens
    stored: Spread  # tokens, prompts among them
    disk: Spread  # bytes of samples.jsonl
    tokens_per_second: float
    finish_reasons: dict[str, int]  # of the sampled samples
    memory: dict[str, float]  # bytes, by where
    hidden_size: int

    @property
    def hours(self) -> Spread:
        return self.generated.scaled(1 / self.tokens_per_second / 3600)

    def feature_bytes(self, num_layers: int, bytes_a_value: int) -> Spread:
        """Stored features: the last hidden state and so many layers of every token."""
        return self.stored.scaled((1 + num_layers) * self.hidden_size * bytes_a_value)

    def table(self) -> Table:
        table = Table(
            "", "estimate", "95 %", title=f"{self.num_prompts} prompts, measured on {self.num_sampled} of them"
        )
        table.columns[1].justify = table.columns[2].justify = "right"

        def add(name: str, spread: Spread, shown: Callable[[float], str]) -> None:
            table.add_row(name, shown(spread.total), f"± {shown(spread.margin)}")

        add("tokens generated", self.generated, in_tokens)
        add("tokens stored, prompts among them", self.stored, in_tokens)
        add(f"time at {self.tokens_per_second:.0f} tokens/s, one process", self.hours, in_hours)
        add("disk: samples", self.disk, in_bytes)
        for num_layers in CAPTURED_LAYERS:
            for name, size in (("bf16", 2), ("fp8", 1)):
                layers = f"last hidden + {num_layers} layers" if num_layers else "last hidden"
                add(f"features: {layers}, {name}", self.feature_bytes(num_layers, size), in_bytes)
        for where, num_bytes in self.memory.items():
            table.add_row(where, in_bytes(num_bytes), "measured")
        cut = self.finish_reasons.get("length", 0) / max(1, sum(self.finish_reasons.values()))
        table.add_row("samples cut by --max-new-tokens", f"{cut:.0%}", "")
        return table


def in_tokens(count: float) -> str:
    return f"{round(count):,}"


def in_bytes(count: float) -> str:
    return decimal(round(count))


def in_hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def estimate(work: Work) -> Estimate:
    """Answer prompts drawn at random as `prepare` would, and scale up.

    The time is that of the sampled prompts with their batch running empty at the end, so rather too long. Its interval
    is that of the tokens; how fast the machine is at another hour is not in it.
    """
    count, settings = len(work.kept), work.settings
    chosen = work.sampled_share(SAMPLED_BATCHES * settings.batch_size)
    on_gpu = work.target.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(work.target.device)
    start = time.perf_counter()
    dialogues = list(work.answers([chosen]))
    seconds = time.perf_counter() - start

    samples = [dialogue.samples for dialogue in dialogues]
    generated = [float(dialogue.num_tokens) for dialogue in dialogues]
    stored = [float(sum(len(sample.token_ids) for sample in own)) for own in samples]
    disk = [float(sum(len(sample_line(sample)) for sample in own)) for own in samples]
    reasons = [sample.finish_reason for own in samples for sample in own]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    memory = {"memory: host, peak so far": float(peak)}
    if on_gpu:
        memory["memory: GPU, peak"] = float(torch.cuda.max_memory_reserved(work.target.device))
    return Estimate(
        count,
        len(chosen),
        Spread.over(generated, count),
        Spread.over(stored, count),
        Spread.over(disk, count),
        sum(generated) / seconds,
        {reason: reasons.count(reason) for reason in set(reasons)},
        memory,
        work.target.hidden_size,
    )
