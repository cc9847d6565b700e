"""`draftsmith tune-server`: the draft length that a real vLLM is fastest with, found by starting it with a few.

Plain decoding, one drafted token and the longest draft are measured under the user's traffic. From them follows which
lengths in between promise most at some number of clients: these are measured, too. The choice is measured anew,
with other requests, beside plain decoding.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from draftsmith.data.console import shell_path
from draftsmith.data.progress import progress_bar
from draftsmith.inference.decoding.schedule import for_vllm
from draftsmith.models.drafter_configs import NgramConfig
from draftsmith.models.storage.files import made_folder, real_path, whole_folder, write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.bench.arrivals import read_mix
from draftsmith.recipes.bench.results import BenchLoad, BenchStage, Limits
from draftsmith.recipes.bench.runner import Bench
from draftsmith.recipes.bench.server_tuning import (
    Candidate,
    Lookup,
    Measured,
    ServerTuning,
    choose,
    differences,
    fastest_over_all,
    most_promising,
)
from draftsmith.recipes.bench.started_vllm import VllmStarter
from draftsmith.recipes.bench.verdict import Difference, verdict
from draftsmith.recipes.configs.server_settings import TuneServerSettings
from draftsmith.recipes.engine_rules.loader_rules import TRAINING_FREE, VLLM
from draftsmith.recipes.evaluation.inputs import load_head
from draftsmith.recipes.pages.tables import Cell, Table, for_terminal
from draftsmith.recipes.serving.export import Exported, served_names, write_drafter
from draftsmith.recipes.serving.model_card import DYNAMIC_KINDS
from draftsmith.recipes.serving.serve_commands import at_most_drafted, speculative_config, write_script
from draftsmith.recipes.serving.vllm_run import SpeculativeConfig
from draftsmith.train.engine.restarted import ENGINE_LOG

LONGEST, LONGEST_LOOKUP = 6, 8  # draft lengths that are tried where none is given
LOOKUP_LENGTHS = (2, 4, 8)  # no round's time follows from acceptance: lookups draft in some rounds only
LOOKUPS: tuple[Lookup, ...] = ((1, 4), (3, 6))  # tried beside the one that n-grams have by themselves
OTHER_REQUESTS = 1000  # added to the seed for the requests that confirm a choice


def run(settings: TuneServerSettings, console: Console) -> None:
    """Start vLLM with candidates, write the fastest as serve_vllm.sh and all measures as server_tuning.json."""
    mix = read_mix(settings.prompts, settings.trace, settings.max_new_tokens, settings.temperature)
    loads = [BenchLoad("concurrency", float(number)) for number in sorted(set(settings.concurrency))]
    target = load_head(settings.target)
    with made_folder(settings.out), whole_folder(settings.out) as folder, progress_bar() as progress:
        (folder / "drafter").mkdir()
        exported = write_drafter(
            settings.drafter, "vllm", target, served_names(settings.out / "drafter", None), folder / "drafter"
        )
        task = progress.add_task("vLLM", total=None, detail="")
        starter = VllmStarter(settings.python, settings.vllm_options, settings.out / ENGINE_LOG, settings.timeout)
        bench = Bench([], mix, Limits(), settings.requests, settings.repeats, settings.seed)
        servers = Servers(exported, starter, bench, loads, lambda: progress.advance(task))
        tuning = tune(servers, settings)
        write_json(folder / "server_tuning.json", to_json(tuning))
        write_script(folder / "serve_vllm.sh", VLLM, settings.out, tuning.command)
    console.print(for_terminal(candidate_table(tuning)))
    console.print(tuning.verdict, style="bold")
    console.print(f"wrote {settings.out / 'serve_vllm.sh'}: {tuning.command}", soft_wrap=True)


@dataclass
class Servers:
    """Starts a server for each candidate, one after the other, and keeps what was measured."""

    exported: Exported
    starter: VllmStarter
    bench: Bench  # without rivals
    loads: list[BenchLoad]
    on_step: Callable[[], None]
    measured: list[Measured] = field(default_factory=list)

    def measure(self, candidate: Candidate, seed: int | None = None) -> Measured:
        """Return the measures of a candidate at all loads."""
        seed = self.bench.seed if seed is None else seed
        settings = vllm_settings(self.exported, candidate, self.exported.directory)
        model = str(self.exported.directory) if self.is_in_target(candidate) else self.exported.target
        with self.starter.serving(model, settings, self.on_step) as (rival, seconds):
            bench = replace(self.bench, rivals=[rival], seed=seed)
            stages = [bench.stages(load, self.on_step)[0] for load in self.loads]
        return Measured(candidate, seconds, [replace(stage, server=candidate.text) for stage in stages])

    def is_in_target(self, candidate: Candidate) -> bool:
        """Return whether what is served is the copy of the target in which the drafter lies."""
        return bool(candidate.draft_length) and self.exported.in_target

    def tried(self, candidate: Candidate) -> Measured:
        """Measure a candidate and keep it."""
        self.measured.append(self.measure(candidate))
        return self.measured[-1]


def tune(servers: Servers, settings: TuneServerSettings) -> ServerTuning:
    """Measure candidates, choose one, and measure it anew beside plain decoding."""
    exported = servers.exported
    plain = servers.tried(Candidate(0))
    others = tried_lookups(servers, settings) if exported.kind in TRAINING_FREE else tried_lengths(servers, settings)
    clients = [int(load.value) for load in servers.loads]
    chosen = choose(plain, others, clients, exported.kind in DYNAMIC_KINDS and len(clients) > 1)
    confirmed, gains = [], []
    if chosen.draft_length:
        seed = settings.seed + OTHER_REQUESTS
        confirmed = [servers.measure(candidate, seed) for candidate in (Candidate(0), chosen)]
        gains = differences(*confirmed)
    where = real_path(settings.out / "drafter")
    config = vllm_settings(exported, chosen, where)
    served = str(where) if servers.is_in_target(chosen) else exported.target
    return ServerTuning(
        target=exported.target,
        drafter=settings.drafter,
        tried=servers.measured,
        chosen=chosen,
        confirmed=confirmed,
        differences=gains,
        speculative_config=config,
        command=serve_command(served, config, settings.vllm_options),
        verdict=verdict(gains, "plain decoding", chosen.text) if gains else "no draft length is shown to be faster",
    )


def tried_lengths(servers: Servers, settings: TuneServerSettings) -> list[Measured]:
    """Measure the shortest and the longest drafts, and the lengths that promise more; return all of them."""
    most = at_most_drafted(servers.exported, settings.draft_length or LONGEST)
    short = servers.tried(Candidate(1))
    if most == 1:
        return [short]
    long = servers.tried(Candidate(most))
    return [short, long, *(servers.tried(Candidate(length)) for length in most_promising(short, long))]


def tried_lookups(servers: Servers, settings: TuneServerSettings) -> list[Measured]:
    """Measure draft lengths of a drafter without weights, and n-grams of other lengths at the fastest one."""
    is_ngram, plain = servers.exported.kind == "ngram", servers.measured[0]
    usual = (NgramConfig.shortest, NgramConfig.longest) if is_ngram else None
    most = settings.draft_length or LONGEST_LOOKUP
    lengths = sorted({*(length for length in LOOKUP_LENGTHS if length < most), most})
    others = [servers.tried(Candidate(length, usual)) for length in lengths]
    if is_ngram:
        best = fastest_over_all(plain, others).candidate.draft_length
        others += [servers.tried(Candidate(best, lookup)) for lookup in LOOKUPS]
    return others


def vllm_settings(exported: Exported, candidate: Candidate, where: Path) -> SpeculativeConfig | None:
    """Return vLLM's speculative config of a candidate whose drafter lies at `where`; None for plain decoding."""
    if not candidate.draft_length:
        return None
    config = speculative_config(exported.kind, str(where), candidate.draft_length)
    if candidate.lookup:
        config = replace(config, prompt_lookup_min=candidate.lookup[0], prompt_lookup_max=candidate.lookup[1])
    if candidate.schedule:
        config = replace(config, num_speculative_tokens_per_batch_size=for_vllm(candidate.schedule))
    return config


def serve_command(served: str, config: SpeculativeConfig | None, options: list[str]) -> str:
    """Return the shell command that serves a model so."""
    words = ["vllm", "serve", shell_path(served), *options]
    return shlex.join(words if config is None else [*words, "--speculative-config", config.text])


def candidate_table(tuning: ServerTuning) -> Table:
    """Return the table of what was measured first: a row for each candidate and load."""
    plain, *others = tuning.tried
    rows = [row_of("plain decoding", stage, "") for stage in plain.stages]
    for measured in others:
        gains = [gain_text(gain) for gain in differences(plain, measured)]
        rows += [row_of(measured.candidate.text, *pair) for pair in zip(measured.stages, gains, strict=True)]
    headings = ["settings", "load", "tokens/s", "a token ms", "acceptance length", "beside plain decoding"]
    return Table("", headings, rows, "", words=("settings", "load", "beside plain decoding"))


def gain_text(gain: Difference) -> str:
    """Return a gain with its interval, short enough for a table."""
    return f"{gain.ratio:.2f}x" + (f" ({gain.interval[0]:.2f} to {gain.interval[1]:.2f})" if gain.interval else "")


def row_of(name: str, stage: BenchStage, gain: str) -> list[Cell]:
    length = f"{stage.acceptance.mean_acceptance_length:.2f}" if stage.acceptance else "-"
    tokens, tpot = stage.mean(lambda run: run.output_tokens_per_second), stage.mean(lambda run: run.mean_tpot_ms)
    return [Cell(text) for text in (name, stage.load.text, f"{tokens:.1f}", f"{tpot:.1f}", length, gain)]
