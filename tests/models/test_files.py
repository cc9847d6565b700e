"""Files and folders are written whole or not at all, whatever happens meanwhile, and the mistake costs one line."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
from disk_faults import Killed, failing_disk, largest_file
from safetensors.torch import save_file

from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import (
    COMPLETE,
    PARTIAL,
    finish_moving,
    point_link,
    require_writable,
    whole_folder,
    write_whole,
    writing,
)

OLD, NEW = {"a.txt": "old"}, {"a.txt": "new", "below/b.txt": "b", "config.json": "{}"}


def content(folder: Path) -> dict[str, str] | None:
    """What lies in a folder by path, hidden folders left out; None where there is no folder."""
    if not folder.is_dir():
        return None
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if not {PARTIAL, COMPLETE} & set(path.relative_to(folder).parts)]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def write_new(folder: Path) -> None:
    with whole_folder(folder) as partial:
        for name, text in NEW.items():
            write_whole(partial / name, text)


@pytest.mark.parametrize("kills", [False, True])
def test_a_new_folder_is_absent_or_whole_after_a_fault_at_any_change(tmp_path: Path, kills: bool) -> None:
    for number in range(1, 100):
        told = ""
        with failing_disk(tmp_path, number, kills) as disk:
            try:
                write_new(tmp_path / f"{number}")
            except Killed:
                told = "killed"
            except UserError as error:
                told = str(error)
        assert kills or not told or "No space left" in told
        assert content(tmp_path / f"{number}") in (None, NEW)
        write_new(tmp_path / f"{number}")  # the same again
        assert content(tmp_path / f"{number}") == NEW
        if not disk.has_failed:
            break
    assert number > 10
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("old", [OLD, {**OLD, "config.json": "old"}])
def test_a_folder_that_exists_ends_with_all_files_or_none(old: dict[str, str], tmp_path: Path, kills: bool) -> None:
    """Its files are replaced one by one. What a kill leaves to be moved is found.

    config.json is the last, and an older one is gone before: it never stands beside some new files.
    """
    for number in range(1, 100):
        out = tmp_path / f"{number}"
        out.mkdir()
        for name, text in old.items():
            (out / name).write_text(text)
        with failing_disk(tmp_path, number, kills) as disk:
            try:
                write_new(out)
            except (Killed, UserError):
                assert disk.has_failed
        assert not (out / "config.json").is_file() or content(out) in (old, NEW)
        finish_moving(out)
        assert content(out) in (old, NEW)
        write_new(out)
        assert content(out) == NEW
        assert not list(out.glob(".*"))
        if not disk.has_failed:
            break
    assert number > 10


@pytest.mark.parametrize("num_bytes", [0, 3, 5000])
def test_a_cut_write_leaves_nothing(tmp_path: Path, num_bytes: int) -> None:
    """As on a full disk, in Python's own writing and in safetensors', which has an error of its own."""

    def write_text(path: Path) -> None:
        write_whole(path, "text" * 2000)

    def write_safetensors(path: Path) -> None:
        save_file({"a": torch.zeros(2000)}, path)

    for write in (write_text, write_safetensors):
        with (
            largest_file(num_bytes),
            pytest.raises(UserError, match=rf"cannot write to {tmp_path}/out(/file)?: File too large; ") as error,
            whole_folder(tmp_path / "out") as partial,
        ):
            write(partial / "file")
        assert "\n" not in str(error.value)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", range(1, 5))
def test_a_link_leads_somewhere_after_a_kill_at_any_change(tmp_path: Path, number: int) -> None:
    """Where a server finds its drafter: at the old place or at the new one."""
    point_link(tmp_path / "link", Path("old"))
    with contextlib.suppress(Killed), failing_disk(tmp_path, number, kills=True):
        point_link(tmp_path / "link", Path("new"))
    assert (tmp_path / "link").readlink() in (Path("old"), Path("new"))
    point_link(tmp_path / "link", Path("new"))
    assert [(path.name, path.readlink()) for path in tmp_path.iterdir()] == [("link", Path("new"))]


def test_any_text_can_be_written(tmp_path: Path) -> None:
    """Names of files may hold bytes that are no text, and scraped chats lone surrogates."""
    write_whole(tmp_path / "file", "h\u00e9 \udc80")
    assert (tmp_path / "file").read_text("utf-8") == "h\u00e9 \\udc80"


def test_what_is_no_fault_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    for error in (RuntimeError("shapes differ"), ConnectionResetError("the server is gone"), UserError("a mistake")):
        with pytest.raises(type(error)) as raised, writing(tmp_path):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("file", "/file is a file"),
        ("file/below", "/file is a file"),
        ("nowhere", "/nowhere is a link to nothing"),
        ("nowhere/below", "/nowhere is a link to nothing"),
        ("itself", "/itself is a link to nothing"),
        ("n" * 300, "names of at most 235 bytes"),
        ("new/" + "n" * 250, "names of at most 235 bytes"),
        ("new/" * 2000, "File name too long"),
        ("nu\0ll", "no name of a folder"),
        ("/", "/ is the root of the file system: give a folder in it"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_and_not_made(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=told) as error:
        require_writable(tmp_path / name)
    assert "\n" not in str(error.value)
    assert set(tmp_path.rglob("*")) == before


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    require_writable(tmp_path / "new/below")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        require_writable(tmp_path / "new")
