"""The campaign of hostile cases, at length:

    python tests/hostile/campaign.py --cases 100000 --seed 0 --processes 2
    python tests/hostile/campaign.py --replay drafter:17

A case has a name, AREA:SEED, and is the same whenever it is tried on the same healthy files, which lie in --folder.
Each distinct fault is told once, with the name of its first case.
"""

import argparse
import faulthandler
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is no folder would be looked up on the Hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # some cases fork
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import huggingface_hub.constants
import torch
from areas import AREAS
from judge import Fault, Place, judged
from material import make_material

from draftsmith.recipes.cli.main import quiet_libraries

# Every area at equal distances.
ROTATION = [
    name for _, name in sorted(((n + 0.5) / share, name) for name, (_, share) in AREAS.items() for n in range(share))
]
WORKER_CASES = 10_000  # of all workers, before fresh ones go on: memory that libraries keep adds up
HUNG_SECONDS = 180  # after which a case that cannot be interrupted ends its process
UNSOUND = 3  # exit code of a worker after a fault: an exception at any place may have left locks taken


def case_name(number: int) -> str:
    return f"{ROTATION[number % len(ROTATION)]}:{number}"


def try_case(name: str, folder: Path) -> Fault | None:
    """Try one case; the healthy files are in FOLDER/material."""
    area, _, _ = name.partition(":")
    place = Place(folder / "cases" / name.replace(":", "-"), folder / "material", Random(name))
    shutil.rmtree(place.folder, ignore_errors=True)
    try:
        return judged(name, place, AREAS[area][0])
    finally:
        shutil.rmtree(place.folder, ignore_errors=True)


def prepare_folder(folder: Path) -> None:
    """Make the healthy files where there are none."""
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # read at import
    torch.set_num_threads(1)
    quiet_libraries()  # as commands do
    if not (folder / "material" / "export").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "material").mkdir(parents=True)
        make_material(folder / "material")


# --- processes


def work(folder: Path, numbers: range) -> int:
    """Try cases up to the first fault, and print lines: each that begins, a fault, and the processor's seconds of each.

    Returns the exit code.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    gc.freeze()  # the collector would look through all libraries again and again
    for number in numbers:
        print(f"case {number}", file=out)
        faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
        start = processor_seconds()
        fault = try_case(case_name(number), folder)
        if fault:
            print("fault " + json.dumps(asdict(fault) | {"key": fault.key}), file=out)
        print(f"done {processor_seconds() - start}", file=out)
        if fault:
            return UNSOUND
    faulthandler.cancel_dump_traceback_later()
    gc.unfreeze()
    return 0


def processor_seconds() -> float:
    """Return the time that this process and those that it waited for have taken."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def watched_worker(folder: Path, numbers: range) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of a worker, with the case; one that dies is a fault. Behind a fault another worker goes on."""
    while numbers:
        command = [sys.executable, __file__, "--folder", str(folder), "--worker"]
        command += map(str, (numbers.start, numbers.stop, numbers.step))
        log, last = folder / f"worker-{numbers.start}.log", numbers.start
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker,
        ):
            assert worker.stdout is not None
            for line in worker.stdout:
                kind, _, rest = line.strip().partition(" ")
                last = int(rest) if kind == "case" else last
                yield kind, case_name(last), rest
        if worker.returncode == 0:
            return
        if worker.returncode != UNSOUND:
            rule, detail = f"the process died: {worker.returncode}", log.read_text(errors="replace")[-3000:]
            name = case_name(last)
            fault = {"case": name, "key": f"{rule} {name}", "rule": rule, "told": "", "where": "", "detail": detail}
            yield "fault", name, json.dumps(fault)
        numbers = range(last + numbers.step, numbers.stop, numbers.step)


class Tally:
    """The distinct faults of a campaign, how often each was met, and the processor's seconds by area."""

    def __init__(self) -> None:
        self.faults: dict[str, dict[str, str]] = {}
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.done, self.start, self.lock = 0, time.monotonic(), threading.Lock()

    def follow(self, lines: Iterator[tuple[str, str, str]]) -> None:
        """Take in what a worker tells; faults that are new are printed."""
        for kind, name, rest in lines:
            with self.lock:
                if kind == "done":
                    self.done += 1
                    self.seconds[name.partition(":")[0]] += float(rest)
                    if self.done % 1000 == 0:
                        seconds = time.monotonic() - self.start
                        print(f"{self.done} cases, {seconds:.0f} s, {len(self.faults)} faults", flush=True)
                elif kind == "fault":
                    fault = json.loads(rest)
                    self.counts[fault["key"]] += 1
                    if self.faults.setdefault(fault["key"], fault) is fault:
                        print(text_of(fault), flush=True)

    def summary(self) -> str:
        lines = [f"{number:6}  {self.faults[key]['case']:28} {key}" for key, number in self.counts.most_common()]
        spent = ", ".join(f"{area} {seconds:.0f}" for area, seconds in self.seconds.most_common())
        lines += [f"seconds of the processor: {spent}", f"{self.done} cases in {time.monotonic() - self.start:.0f} s"]
        return "\n".join([*lines, f"{self.counts.total()} fail, by {len(self.faults)} faults"])


def campaign(folder: Path, numbers: range, processes: int) -> Tally:
    """Try many cases on several processes."""
    tally = Tally()
    blocks = [numbers[start : start + WORKER_CASES] for start in range(0, len(numbers), WORKER_CASES)]

    def follow(number: int) -> None:
        for block in blocks:
            tally.follow(watched_worker(folder, block[number::processes]))

    followers = [threading.Thread(target=follow, args=(number,)) for number in range(processes)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    return tally


def text_of(fault: dict[str, str]) -> str:
    return f"{fault['case']}  {fault['rule']}\n    at {fault['where']}\n    {fault['told'][:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replay", help="AREA:SEED")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "draftsmith-hostile")
    parser.add_argument("--worker", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.replay and not options.worker:
        shutil.rmtree(options.folder, ignore_errors=True)
    prepare_folder(options.folder)
    if options.worker:
        return work(options.folder, range(*options.worker))
    if options.replay:
        fault = try_case(options.replay, options.folder)
        print(f"{text_of(asdict(fault))}\n\n{fault.detail}" if fault else f"{options.replay}: as it should be")
        return int(fault is not None)
    numbers = range(options.seed, options.seed + options.cases)
    tally = campaign(options.folder, numbers, options.processes)
    print(tally.summary())
    (options.folder / "faults.json").write_text(json.dumps(list(tally.faults.values()), indent=1))
    return int(bool(tally.faults))


if __name__ == "__main__":
    sys.exit(main())
