"""The campaign of hostile cases, at length:

    python tests/hostile/campaign.py --cases 100000 --seed 0 --processes 2
    python tests/hostile/campaign.py --replay drafter:17

A case has a name, AREA:SEED, and is the same whenever it is tried on the same healthy files, which lie in --folder.
Each distinct fault is told once, with the name of its first case.
"""

import argparse
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is no folder would be looked up on the Hub
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import huggingface_hub.constants
import torch
from areas import AREAS
from judge import Fault, Place, judged
from material import make_material

ROTATION = [name for turn in range(100) for name, (_, share) in AREAS.items() if turn < share]
HUNG_SECONDS = 180  # after which a case that cannot be interrupted ends its process


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
    if not (folder / "material" / "export").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "material").mkdir(parents=True)
        make_material(folder / "material")


# --- processes


def work(folder: Path, numbers: range) -> None:
    """Try cases, and print a line for each that begins and for each fault."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    for number in numbers:
        print(f"case {case_name(number)}", file=out)
        faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
        if fault := try_case(case_name(number), folder):
            print("fault " + json.dumps(asdict(fault) | {"key": fault.key}), file=out)
    faulthandler.cancel_dump_traceback_later()


def watched_worker(folder: Path, numbers: range) -> Iterator[dict[str, str]]:
    """Yield the faults of a worker; one that dies is a fault of its last case, and another goes on behind it."""
    while numbers:
        command = [sys.executable, __file__, "--folder", str(folder), "--worker"]
        command += map(str, (numbers.start, numbers.stop, numbers.step))
        log = folder / f"worker-{numbers.start}.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker,
        ):
            assert worker.stdout is not None
            last = numbers.start
            for line in worker.stdout:
                kind, _, rest = line.strip().partition(" ")
                if kind == "case":
                    last = int(rest.partition(":")[2])
                    yield {}
                elif kind == "fault":
                    yield json.loads(rest)
        if worker.returncode == 0:
            return
        detail = log.read_text(errors="replace")[-3000:]
        rule = f"the process died: {worker.returncode}"
        yield {
            "case": case_name(last),
            "key": f"{rule} {last}",
            "rule": rule,
            "told": "",
            "where": "",
            "detail": detail,
        }
        numbers = range(last + numbers.step, numbers.stop, numbers.step)


def campaign(folder: Path, first: int, count: int, processes: int) -> list[dict[str, str]]:
    """Try many cases on several processes; print and return the distinct faults."""
    import threading

    found: dict[str, dict[str, str]] = {}
    counts: dict[str, int] = {}
    done, start, lock = [0], time.monotonic(), threading.Lock()

    def follow(number: int) -> None:
        for fault in watched_worker(folder, range(first + number, first + count, processes)):
            with lock:
                if not fault:
                    done[0] += 1
                    if done[0] % 1000 == 0:
                        print(f"{done[0]} cases, {time.monotonic() - start:.0f} s, {len(found)} faults", flush=True)
                    continue
                counts[fault["key"]] = counts.get(fault["key"], 0) + 1
                if fault["key"] not in found:
                    found[fault["key"]] = fault
                    print(text_of(fault), flush=True)

    followers = [threading.Thread(target=follow, args=(number,)) for number in range(processes)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    print(f"{done[0]} cases in {time.monotonic() - start:.0f} s: {sum(counts.values())} fail, by {len(found)} faults")
    for key, number in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{number:6}  {found[key]['case']:28} {key}")
    return list(found.values())


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
        work(options.folder, range(*options.worker))
        return 0
    if options.replay:
        fault = try_case(options.replay, options.folder)
        print(f"{text_of(asdict(fault))}\n\n{fault.detail}" if fault else f"{options.replay}: as it should be")
        return int(fault is not None)
    faults = campaign(options.folder, options.seed, options.cases, options.processes)
    (options.folder / "faults.json").write_text(json.dumps(faults, indent=1))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
