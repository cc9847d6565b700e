"""`draftsmith convert`."""

import shutil

from rich.console import Console

from draftsmith.data.console import shell_path
from draftsmith.data.processes import locked
from draftsmith.data.prompts.splits import HELD_OUT
from draftsmith.data.samples.folder import INDEX, PREPARED, read_samples, write_samples
from draftsmith.data.samples.images import IMAGES
from draftsmith.data.samples.lines import LINES, check_checksum, line_parts, samples_in, write_lines
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import whole_folder, write_whole
from draftsmith.recipes.configs.data_settings import ConvertSettings


def run(settings: ConvertSettings, console: Console) -> None:
    """Write a folder of samples in the other form. Raises `UserError` for one that holds none, or damaged ones."""
    folder, out = settings.samples, settings.out
    if out.exists():
        raise UserError(f"--out {out} is there already: give a new folder")
    has_lines = (folder / LINES).is_file() and not (folder / INDEX).is_file()
    with locked(out), whole_folder(out) as hidden:
        if has_lines and (folder / PREPARED).is_file():
            check_checksum(folder)
            write_samples(hidden, line_parts(folder / LINES), samples_in)
        else:
            write_lines(hidden, read_samples(folder))
        for name in (PREPARED, HELD_OUT):
            if (folder / name).is_file():
                write_whole(hidden / name, (folder / name).read_bytes())
        if (folder / IMAGES).is_dir():
            shutil.copytree(folder / IMAGES, hidden / IMAGES)
    console.print(f"next: draftsmith train eagle3 target=MODEL data.samples={shell_path(out)} run.dir=runs/NAME")
