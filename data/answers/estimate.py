"""Estimates of what `prepare` will take, measured on some of the prompts before anything is written."""

import math
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch
from rich.table import Table

from draftsmith.data.answers.prepare import AnswerJob
from draftsmith.data.progress import size_text
from draftsmith.data.samples.sample import Sample, sample_line
from draftsmith.data.samples.samples import pieces

SAMPLED_BATCHES = 2  # of prompts that are answered to measure on
CAPTURED_LAYERS = (0, 1, 3)  # layers beside the last hidden state, for the size of stored features
BYTES_PER_VALUE = {"bf16": 2, "fp8": 1}
NORMAL_95 = 1.96


@dataclass
class Spread:
    """A total over all prompts, and how far it may be off: a 95 % interval from the spread over the sampled ones."""

    total: float
    margin: float

    @classmethod
    def over(cls, values: list[float], count: int) -> "Spread":
        """Return the total over `count` prompts from the values of those that were sampled."""
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        unseen = (count - len(values)) / count  # what is sampled is known
        margin = NORMAL_95 * deviation / math.sqrt(len(values)) * count * unseen**0.5
        return cls(statistics.fmean(values) * count, margin)

    def scaled(self, factor: float) -> "Spread":
        """Return the total in another unit."""
        return Spread(self.total * factor, self.margin * factor)


@dataclass
class Estimate:
    """The tokens, time and disk that all prompts will take."""

    num_answers: int
    num_sampled: int
    generated: Spread  # tokens
    stored: Spread  # tokens, prompts among them
    disk: Spread  # bytes of the samples, and of the journals that they are in until all are written
    tokens_per_second: float
    finish_reasons: Counter[str]  # of the sampled samples
    memory: dict[str, float]  # bytes, by where
    hidden_size: int

    @property
    def hours(self) -> Spread:
        """Time that the answers take."""
        return self.generated.scaled(1 / self.tokens_per_second / 3600)

    def feature_bytes(self, num_layers: int, bytes_per_value: int) -> Spread:
        """Return the size of stored features: the last hidden state and so many layers of every token."""
        return self.stored.scaled((1 + num_layers) * self.hidden_size * bytes_per_value)

    def table(self) -> Table:
        """Return the estimate as a table with its margins."""
        title = f"{self.num_answers} answers, measured on {self.num_sampled} of them"
        table = Table("", "estimate", "95 %", title=title)
        table.columns[1].justify = table.columns[2].justify = "right"
        rows = [
            ("tokens generated", self.generated, "{:,.0f}".format),
            ("tokens stored, prompts among them", self.stored, "{:,.0f}".format),
            (f"time at {self.tokens_per_second:.0f} tokens/s, one process", self.hours, hours_text),
            ("disk: samples, and their journals at first", self.disk, size_text),
        ]
        for num_layers in CAPTURED_LAYERS:
            layers = f"last hidden + {num_layers} layers" if num_layers else "last hidden"
            for dtype, size in BYTES_PER_VALUE.items():
                rows.append((f"features: {layers}, {dtype}", self.feature_bytes(num_layers, size), size_text))
        for name, spread, text in rows:
            table.add_row(name, text(spread.total), f"± {text(spread.margin)}")
        for where, num_bytes in self.memory.items():
            table.add_row(where, size_text(num_bytes), "measured")
        cut = self.finish_reasons["length"] / max(1, self.finish_reasons.total())
        table.add_row("samples cut by --max-new-tokens", f"{cut:.0%}", "")
        return table


def disk_bytes(samples: list[Sample]) -> int:
    """Return the size of samples on disk, as columns and as lines of a journal."""
    return sum(piece.nbytes for piece in pieces(samples)) + sum(len(sample_line(sample)) for sample in samples)


def hours_text(hours: float) -> str:
    """Return a time in hours, or in minutes where it is shorter than one."""
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def estimate(job: AnswerJob) -> Estimate:
    """Answer prompts drawn at random as `prepare` would, and scale up.

    The time is that of the sampled prompts with their batch running empty at the end, so rather too long. Its interval
    is that of the tokens; how fast the machine is at another hour is not in it.
    """
    count, device = len(job.kept), job.target.device
    chosen = job.sampled_share(SAMPLED_BATCHES * job.settings.batch_size)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    dialogues = list(job.answers([chosen]))
    seconds = time.perf_counter() - start

    generated = [float(dialogue.num_tokens) for dialogue in dialogues]
    stored = [float(sum(len(sample.token_ids) for sample in dialogue.samples)) for dialogue in dialogues]
    disk = [float(disk_bytes(dialogue.samples)) for dialogue in dialogues]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    memory = {"memory: host, peak so far": float(peak)}
    if device.type == "cuda":
        memory["memory: GPU, peak"] = float(torch.cuda.max_memory_reserved(device))
    return Estimate(
        count,
        len(chosen),
        Spread.over(generated, count),
        Spread.over(stored, count),
        Spread.over(disk, count),
        sum(generated) / seconds,
        Counter(sample.finish_reason for dialogue in dialogues for sample in dialogue.samples),
        memory,
        job.target.hidden_size,
    )
