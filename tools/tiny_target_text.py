"""Collect what the embedded target learns from: functions of the standard library and of installed packages.

    python tools/tiny_target_text.py --out TEXT.jsonl

Each line is a document: a function as it stands in its file, or a dialogue in which a user asks for functions. No
document resembles a function of the standard library's held-out files, on which the target is judged.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from draftsmith.data.prompts.code_dialogues import Message, code_dialogues
from draftsmith.data.prompts.standard_library import EXCLUDED_FOLDERS, function_groups, stdlib_functions, stdlib_groups
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_whole

STANDARD_LIBRARY = "standard library"
# Packages of Python code that draftsmith needs, directly or through others, and that PERMISSIVE allows to learn from.
PACKAGES = (
    *("accelerate", "anyio", "click", "datasets", "deepspeed", "dill", "filelock", "fonttools", "fsspec", "httpcore"),
    *("httpx", "huggingface_hub", "idna", "jinja2", "markdown-it-py", "matplotlib", "mpmath", "multiprocess", "mypy"),
    *("networkx", "numpy", "packaging", "pandas", "pluggy", "prometheus_client", "protobuf", "pyarrow", "pydantic"),
    *("pygments", "pyparsing", "pytest", "pytest-xdist", "python-dateutil", "pyyaml", "requests", "rich", "scipy"),
    *("setuptools", "sympy", "tokenizers", "torch", "transformers", "triton", "typer", "urllib3", "wandb"),
)
PERMISSIVE = re.compile(r"\b(MIT|Apache|BSD|Python Software Foundation|PSF)\b")
COPYLEFT = re.compile(r"GPL|MPL|Mozilla|EPL|CDDL")
MOST_CHARACTERS = 12_000_000  # of one package, so that none fills half of the text
DIALOGUE_SHARE = 0.2  # of all characters
SHINGLE = 8  # words
MOST_SHARED = 0.3  # of a function's shingles that may stand in held-out functions


@dataclass
class Document:
    """A function as `text`, or a dialogue as `messages`."""

    source: str  # the package and its version
    text: str | None = None
    messages: list[Message] | None = None

    def __len__(self) -> int:
        """Number of characters."""
        return len(self.text or "") + sum(len(message["content"]) for message in self.messages or [])


def collect() -> list[Document]:
    """Return all documents, functions first; dialogues are `DIALOGUE_SHARE` of the characters."""
    held_out = {shingle for function in stdlib_functions(held_out=True) for shingle in shingles(words_of(function))}
    sources = {STANDARD_LIBRARY: stdlib_groups(held_out=False)}
    for name in PACKAGES:
        package = metadata.distribution(name)
        sources[f"{name} {package.version} ({licence_of(package)})"] = package_groups(package)
    seen: set[int] = set()
    functions, dialogues = [], []
    for source, groups in sources.items():
        groups = new_groups(groups, seen, held_out)
        functions += [Document(source, text=function) for group in groups for function in group]
        dialogues += [Document(source, messages=messages) for messages in code_dialogues(groups)]
    most = DIALOGUE_SHARE / (1 - DIALOGUE_SHARE) * sum(map(len, functions))
    return functions + first_documents(shuffled(dialogues), most)


def package_groups(package: metadata.Distribution) -> list[list[str]]:
    """Return functions of a package, in groups as of `function_groups`: all, or a random part that is large enough."""
    paths = [
        path
        for path in package.files or []
        if path.suffix == ".py" and not EXCLUDED_FOLDERS.intersection(path.parts[:-1])
    ]
    groups, size = [], 0
    for path in shuffled(sorted(paths)):
        if size < MOST_CHARACTERS:
            found = function_groups(Path(str(package.locate_file(path))))
            size += sum(len(function) for group in found for function in group)
            groups += found
    return groups


def licence_of(package: metadata.Distribution) -> str:
    """Return the licence that a package states; `UserError` where it is not one of those that we learn from."""
    classifiers = [line for line in package.metadata.get_all("Classifier", []) if line.startswith("License")]
    named = ", ".join(line.split(" :: ")[-1] for line in classifiers)
    [expression], [text] = (package.metadata.get_all(field, [""]) for field in ("License-Expression", "License"))
    stated = expression or named or text.split("\n")[0]
    if not PERMISSIVE.search(stated) or COPYLEFT.search(stated):
        raise UserError(f"{package.name} is under {stated or 'an unknown licence'}: leave it out of PACKAGES")
    return stated


def new_groups(groups: list[list[str]], seen: set[int], held_out: set[int]) -> list[list[str]]:
    """Return the groups without functions that repeat one of `seen` or resemble a held-out one; `seen` grows."""
    kept = []
    for group in groups:
        new = []
        for function in group:
            words = words_of(function)
            key, parts = hash(words[1:]), shingles(words)
            if key not in seen and len(parts & held_out) <= MOST_SHARED * len(parts):
                seen.add(key)
                new.append(function)
        kept += [new] if new else []
    return kept


def words_of(function: str) -> tuple[str, ...]:
    """Return a function's names and numbers in order, its own name first; layout and punctuation do not count."""
    return tuple(re.findall(r"\w+", function.split("def ", 1)[1]))


def shingles(words: tuple[str, ...]) -> set[int]:
    """Return hashes of all runs of `SHINGLE` words behind the function's name; of all words where they are fewer."""
    body = words[1:]
    return {hash(body[start : start + SHINGLE]) for start in range(max(1, len(body) - SHINGLE + 1))}


def shuffled(items: list) -> list:
    """Return the items in an order that is the same every time."""
    return random.Random(0).sample(items, len(items))


def first_documents(documents: list[Document], most: float) -> list[Document]:
    """Return as many of the first documents as have at most so many characters together."""
    size, kept = 0, []
    for document in documents:
        size += len(document)
        if size > most:
            break
        kept.append(document)
    return kept


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file that this command wrote."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Document(**json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    documents = collect()
    write_whole(args.out, "".join(json.dumps(asdict(document)) + "\n" for document in documents))
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[document.source if document.messages is None else "dialogues"] += len(document)
    for source, size in sizes.most_common():
        print(f"{size / 1e6:8.2f} million characters: {source}", file=sys.stderr)


if __name__ == "__main__":
    main()
