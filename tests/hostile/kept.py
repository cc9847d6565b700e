"""What commands keep for their next call: the folders of `refresh` and `auto`, and the history of `watch`."""

import contextlib
import io
import math
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from damage import damage_file, hostile_text
from judge import Attempt, Place, figures_undrawn

from draftsmith.models.errors import UserError
from draftsmith.recipes.auto import budget
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.evaluation import comparison
from draftsmith.recipes.refreshing import refresh, traffic
from draftsmith.recipes.refreshing.champions import Champions
from draftsmith.recipes.refreshing.state import read_state
from draftsmith.recipes.refreshing.traffic_shift import fall_in_history
from draftsmith.recipes.watching.history import History
from draftsmith.recipes.watching.readings import Latency, Reading
from draftsmith.train.engine.vllm_counters import Counters

SERVER = "http://127.0.0.1:9"
PATCHED = (  # of healthy settings, which only make measurements long
    *((traffic, "NOISE_BITS", math.inf), (budget, "COST_SECONDS", (0.05, 0.05))),
    *((comparison, "with_certificates", lambda evaluations, *_: evaluations),),
    *((budget, "fastest_num_threads", lambda plain, prompts: (1, 0.01)),),
)


@contextlib.contextmanager
def quick_rounds() -> Iterator[None]:
    """Leave out what takes long and reads nothing that was kept."""
    with contextlib.ExitStack() as stack:
        for module, name, value in PATCHED:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(figures_undrawn())
        yield


# --- healthy folders


def refresh_arguments(material: Path, out: Path) -> list[str]:
    """Return the arguments of a round; its prompts are in two files, one for each of the first rounds."""
    few = ["--steps", "2", "--max-new-tokens", "2", "--batch-size", "8", "--device", "cpu"]
    return ["refresh", "--target", str(material / "target"), *few, "--out", str(out)]


def auto_arguments(material: Path, out: Path) -> list[str]:
    few = ["--drafters", "medusa,hydra", "--budget", "0.001", "--max-new-tokens", "4", "--device", "cpu"]
    given = ["--target", str(material / "target"), "--traffic", str(material / "traffic" / "1.txt")]
    return ["auto", *given, *few, "--out", str(out)]


def write_kept(material: Path) -> None:
    """Write what the commands keep. The second round of the refresh is open, so that the next call goes on with it."""
    (material / "traffic").mkdir()
    for number in (1, 2):
        lines = [f"strike {'the iron ' * (i % 4)}{number}-{i}" for i in range(90)]
        (material / "traffic" / f"{number}.txt").write_text("".join(f"{line}\n" for line in lines))
    out = material / "refreshed"
    drafter = ["--drafter", str(material / "drafters" / "medusa")]
    first, second = (["--traffic", str(material / "traffic" / f"{number}.txt")] for number in (1, 2))
    with quick_rounds(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main([*refresh_arguments(material, out), *first, *drafter]) == 0
        Champions(out).promote(1, material / "drafters" / "medusa", 0)
        killed = mock.patch.object(refresh, "train", mock.Mock(side_effect=UserError("a kill")))
        with killed, mock.patch.object(refresh, "why_moved", return_value="it moved"):
            main([*refresh_arguments(material, out), *second])
        assert main(auto_arguments(material, material / "searched")) == 0
    assert read_state(out).open, "the healthy refresh has no open round"
    for report in ("figures", "report.md", "report.json"):  # which nobody reads again
        path = material / "searched" / "comparison" / report
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    history = History(material / "watch.db")
    for minute in range(40):
        counters = Counters(1000, 2000, 900, (600, 300))
        history.add(SERVER, Reading(60.0 * minute, counters, None, Latency(1.0, 10), Latency(), 0.0))


# --- damaged ones


def kept(place: Place) -> Attempt:
    """A damaged folder or history, gone on with."""
    draw = place.random.random()
    if draw < 0.4:
        return refreshed(place)
    return searched(place) if draw < 0.6 else watched(place)


def refreshed(place: Place) -> Attempt:
    """A damaged folder of `refresh`: whatever is damaged, a champion that served goes on serving."""
    path, random = place.copy("refreshed"), place.random
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    champion = path / "champion"
    if random.random() < 0.8:
        damage_file(random, random.choice(files))
    if random.random() < 0.2:
        champion.unlink()
        champion.symlink_to(random.choice(("champions/0", "champions/7", "champions", "/", "x", "champion", "../x/1")))
    if random.random() < 0.1:
        name = hostile_text(random).replace("\0", "").replace("/", "")[:100]
        with contextlib.suppress(OSError, ValueError, UnicodeError):
            (path / random.choice(("champions", "prompts", "rounds")) / (name or "1x")).mkdir(exist_ok=True)
    arguments = [*refresh_arguments(place.material, path), "--traffic", str(place.material / "traffic" / "2.txt")]
    rolls_back = random.random() < 0.3
    argv = ["refresh", "--rollback", "--out", str(path)] if rolls_back else arguments
    serving = champion.exists()

    def call() -> object:
        with quick_rounds():
            code = main(argv)
        assert not serving or champion.exists(), "no champion serves any more"
        return code

    return Attempt(f"draftsmith {' '.join(argv)}", call, (path,))


def searched(place: Place) -> Attempt:
    """A damaged folder of `auto`."""
    path = place.copy("searched")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    own = [file for file in files if file.parent in (path, path / "prompts", path / "costs", path / "comparison")]
    damage_file(place.random, place.random.choice(own if place.random.random() < 0.7 else files))
    argv = [*auto_arguments(place.material, path), *(["--dry-run"] if place.random.random() < 0.3 else [])]

    def call() -> object:
        with quick_rounds():
            return main(argv)

    return Attempt(f"draftsmith {' '.join(argv)}", call, (path,))


def watched(place: Place) -> Attempt:
    """A damaged history of `watch`."""
    path, random = place.copy("watch.db"), place.random
    if random.random() < 0.5:
        damage_file(random, path)
    else:
        value = random.choice((None, -1, 1e308, b"\xff", hostile_text(random), '{"time": 1}', "[" * 5000))
        column = random.choice(("server", "time", "reading"))
        with contextlib.suppress(sqlite3.Error, UnicodeError, OverflowError), sqlite3.connect(path) as database:
            database.execute(f"UPDATE readings SET {column} = ? WHERE time = 600.0", (value,))

    def call() -> object:
        if path.is_file():
            fall_in_history(path, 0.0)
            History(path).newest(SERVER, 10)
        return None

    return Attempt(f"fall_in_history({str(path)!r}, 0.0)", call, (path.parent,))
