"""Images that prompts hold: read from where a prompt names them, and kept once each in the folder of the samples."""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_whole
from draftsmith.models.storage.reading import open_regular

IMAGES = "images"  # folder beside the samples
LARGEST_IMAGE = 1 << 24  # bytes of its file
FORMS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}  # by a file's first bytes


@dataclass(frozen=True)
class Image:
    """The file of an image, and its form: png, jpeg, gif or webp."""

    content: bytes
    form: str

    @property
    def name(self) -> str:
        """The name under which it is kept: the SHA-256 of its content, and its form."""
        return f"{hashlib.sha256(self.content).hexdigest()}.{self.form}"

    @property
    def url(self) -> str:
        """The image itself as a URL, as servers take it."""
        return f"data:image/{self.form};base64,{base64.b64encode(self.content).decode()}"


def read_image(url: str, where: str) -> Image:
    """Return the image at a data: URL, a file: URL or a path. Raises `UserError` for others, and for no image."""
    shown, (scheme, colon, rest) = f"{where}: the image {url[:60]!r}", url.partition(":")
    if scheme == "data":
        content = _decoded(url, shown)
    elif scheme == "file" and colon:
        content = _read_file(Path("/" + unquote(rest.lstrip("/"))), shown)
    elif "://" not in url:
        content = _read_file(Path(url), shown)
    else:
        raise UserError(f"{shown} is not here: download it, and give its path or a data: URL")
    form = next((form for beginning, form in FORMS.items() if content.startswith(beginning)), None)
    if form is None:
        raise UserError(f"{shown} is no PNG, JPEG, GIF or WebP: convert it")
    return Image(content, form)


def _decoded(url: str, shown: str) -> bytes:
    head, _, written = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("its data are not in base64")
        return base64.b64decode(written, validate=True)
    except ValueError as error:
        raise UserError(f"{shown} cannot be read: {error}") from None


def _read_file(path: Path, shown: str) -> bytes:
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST_IMAGE + 1)
    except (OSError, ValueError) as error:  # `ValueError`: a path that holds a null byte
        raise UserError(f"{shown} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > LARGEST_IMAGE:
        raise UserError(f"{shown} has more than {LARGEST_IMAGE:,} bytes: make it smaller")
    return content


def with_data_urls(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form with each image as a data: URL: a server need not see the files."""

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        if "text" in part:
            return part
        return {**part, "image_url": {"url": read_image(part["image_url"]["url"], where).url}}

    return [
        {**message, "content": list(map(sent, message["content"]))}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def keep_image(folder: Path, image: Image) -> None:
    """Write an image into a folder of samples, where it is not there already."""
    path = folder / IMAGES / image.name
    if not path.is_file():
        write_whole(path, image.content)


def kept_image(folder: Path, name: str) -> Image:
    """Return an image of a folder of samples. Raises `UserError` where it is gone or was changed."""
    path = folder / IMAGES / name
    image = read_image(str(path), str(folder))
    if image.name != name:
        raise UserError(f"{path} was changed since `draftsmith prepare` wrote it: prepare the samples again")
    return image
