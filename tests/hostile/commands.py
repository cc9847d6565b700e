"""Attempts by command: the flags of every command, with hostile values and hostile names."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from damage import NUMBERS, hostile_text
from judge import Attempt, Place

from draftsmith.recipes.cli.main import COMMANDS, main

LASTING = ("repeats", "requests", "minutes", "readings", "interval")  # a large number rightly takes as long


def command_attempt(place: Place, argv: list[str], *may_write: Path) -> Attempt:
    """Return an attempt at a command, which may write its `out` and what else is named."""
    told = " ".join(f"'{word}'" if " " in word else word for word in argv)
    return Attempt(f"draftsmith {told}", lambda: main(argv), (place.out, *may_write))


def healthy_flags(place: Place) -> dict[str, dict[str, list[str]]]:
    """Return arguments with which each command works in a moment, by flag; those of no flag are positional."""
    made, out = place.material, ["--out", str(place.out)]
    target = ["--target", str(made / "target")]
    own = ["--drafter", str(made / "drafters" / "medusa")]
    few = [
        *target,
        *own,
        "--prompts",
        str(made / "prompts" / "p.txt"),
        "--num-prompts",
        "2",
        "--max-new-tokens",
        "3",
        *out,
    ]
    words = {
        "prepare": [*target, "--prompts", str(made / "prompts" / "p.txt"), "--max-new-tokens", "3", *out],
        "train": ["medusa", f"target={made / 'target'}", f"data.samples={made / 'samples'}", f"run.dir={place.out}",
                  "run.steps=1", "run.device=cpu", "data.batch_size=2"],
        "evaluate": [*few, "--repeats", "1"],
        "tune": [*few[:-4], "--max-new-tokens", "2", *out, "--repeats", "1"],
        "load-test": [*few, "--repeats", "1", "--concurrency", "1", "--requests", "10"],
        "replay": [*few, "--draft-length", "2"],
        "plan": [*target, "--drafter", "medusa", "--batch-size", "1", "--draft-length", "1", *out],
        "export": [str(made / "drafters" / "medusa"), "--engine", "vllm", *target, *out],
        "generate": ["heat", *target, "--drafter", "ngram", "--max-new-tokens", "3"],
        "report": [str(made / "nowhere")],
        "watch": ["http://127.0.0.1:9", "--readings", "1"],
        "quickstart": ["--target", str(made / "nowhere"), *out],
    }  # fmt: skip
    found: dict[str, dict[str, list[str]]] = {}
    for name, values in words.items():
        flags: dict[str, list[str]] = {"": []}
        flag = ""
        for word in values:
            if word.startswith("--"):
                flag = word
                flags[flag] = []
            else:
                flags[flag].append(word)
        found[name] = flags
    return found


def commanded(place: Place) -> Attempt:
    """A command that works, with some of its arguments replaced, left out, or given twice."""
    random = place.random
    flags = healthy_flags(place)
    name = random.choice(list(flags))
    chosen = flags[name]
    settings = {setting.name: setting for setting in fields(COMMANDS[name][1])}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        setting = settings[random.choice(list(settings))]
        flag = "" if setting.metadata["positional"] else f"--{setting.name.replace('_', '-')}"
        values = [value_for(place, setting) for _ in range(random.choice((1, 1, 1, 2)))]
        if not flag and chosen[""]:
            chosen[""][random.randrange(len(chosen[""]))] = values[0]
        elif random.random() < 0.06:
            chosen.pop(flag, None)
        else:
            chosen[flag] = [] if setting.type is bool and random.random() < 0.9 else values
    argv = [name, *chosen.pop("")]
    for flag, values in chosen.items():
        argv += [flag, *values]
    attempt = command_attempt(place, argv)
    attempt.may_write += tuple(place.folder / "cwd" / word for word in written_by(argv))
    return attempt


def written_by(argv: list[str]) -> list[str]:
    """Return the folders that a command was told to write, below the working directory."""
    told = [following for word, following in zip(argv, argv[1:], strict=False) if word == "--out"]
    told += [word.removeprefix("run.dir=") for word in argv if word.startswith("run.dir=")]
    return [*told, "runs"] if argv[0] == "quickstart" else told


def value_for(place: Place, setting: Any) -> str:
    """Return a hostile value of a setting, as it would be typed."""
    random = place.random
    draw = random.random()
    if setting.name in LASTING:
        return str(random.choice((-1, 0, 1, 2, "nan", "inf", "x", "", "1e999", "0.1", "9" * 5000, -0.0)))
    if draw < 0.4:
        return str(random.choice(NUMBERS))
    if draw < 0.5:
        return str(
            place.material
            / random.choice(
                (
                    "target",
                    "prompts/p.txt",
                    "prompts/chats.jsonl",
                    "drafters/eagle3",
                    "run",
                    "tree.json",
                    "schedule.json",
                    "samples",
                    "grid",
                    "metrics.txt",
                )
            )
        )
    if draw < 0.6:
        return random.choice(
            ("cpu", "cuda", "cuda:9", "meta", "0,0,0", "2,2,2", "4,2,1", "greedy", "typical", "vllm", "sglang")
        )
    return hostile_text(random).replace("\0", "\x01")  # no argument of a process can hold NUL
