"""One launch a folder: a second one is told who writes there, and a lock ends with its process."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

from draftsmith.data.processes import locked, rank_and_num_ranks
from draftsmith.models.errors import UserError

HOLDS = """
import sys, time
from pathlib import Path
from draftsmith.data.processes import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process, which holds the folder `out`."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_is_there_until_that_one_is_killed(
    other: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    for _ in range(2):  # the first refusal does not wipe out who holds it
        told = f"is being written by process {other.pid} on {socket.gethostname()}: wait until it ends"
        with pytest.raises(UserError, match=told), locked(tmp_path / "out"):
            pytest.fail("two processes on one folder")
    other.kill()
    other.wait()
    with locked(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


def test_each_rank_of_a_launch_has_its_own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every rank of a second launch is refused, also before its first one has ended it."""
    with locked(tmp_path / "out"):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with (
            locked(tmp_path / "out"),
            pytest.raises(UserError, match=f"process {os.getpid()}"),
            locked(tmp_path / "out"),
        ):
            pytest.fail("two second ranks on one folder")


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(filelock.FileLock, "acquire", none)
    with locked(tmp_path / "out"):
        assert "out cannot be locked (No locks available)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("RANK", "abc", "RANK='abc': give a whole number"),
        ("RANK", "-1", "RANK='-1': give at least 0"),
        ("RANK", "1", "RANK=1 is not below WORLD_SIZE=1"),
        ("WORLD_SIZE", "", "WORLD_SIZE='': give a whole number"),
        ("WORLD_SIZE", "0", "WORLD_SIZE='0': give at least 1"),
    ],
)
def test_variables_of_no_launcher_are_named(name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        rank_and_num_ranks()
