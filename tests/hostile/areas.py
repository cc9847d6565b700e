"""The areas of the campaign: each is a function that draws one attempt. A kind of file or call is added here."""

import contextlib
import functools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml
from commands import command_attempt, commanded, cut_short, killed, named, started_badly, two_at_once
from damage import (
    CANARY,
    NUMBERS,
    damage_file,
    damaged_bytes,
    damaged_json,
    hostile_text,
    hostile_value,
    json_text,
    near,
    yaml_bombs,
)
from engines import images, judged_by_engine, states
from hostile_server import HostileServer, quick_client
from judge import Attempt, Place
from kept import kept
from material import KINDS, QUANTISED, TRACES, run_arguments, stored_arguments
from public_checkpoints import PUBLIC

from draftsmith.data.answers.changed_settings import flatten
from draftsmith.data.prompts.checks import check_samples
from draftsmith.data.prompts.prompts import encode_prompts, read_prompts
from draftsmith.data.samples.folder import check_same_target, read_prepared, read_samples
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.schedule import Adaptive, Confident, Schedule, read_schedule
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import DynamicTree, StaticTree
from draftsmith.recipes.bench.trace import read_trace
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.inputs import parse_tree
from draftsmith.recipes.planning.expectations import read_acceptance
from draftsmith.recipes.report_data.reading import read_report_data
from draftsmith.recipes.watching.reference import describe, read_reference
from draftsmith.train.config import contents, dump, resolve
from draftsmith.train.engine.vllm_counters import parse_metrics

PROMPTS = [[1, 5, 9], [2, 4]]
NEW_TOKENS = 6


@functools.cache
def healthy_target(material: Path, name: str) -> Target:
    return Target.from_pretrained(material / name, "cpu", torch.float32)


@functools.cache
def plain_tokens(target: Target) -> list[list[int]]:
    """The answer of a healthy target without a drafter."""
    return SpeculativeDecoder(target, load_drafter("none", target)).generate(PROMPTS, NEW_TOKENS).token_ids


def damaged_copy(place: Place, name: str, share: float = 0.15) -> Path:
    """Return a copy of a healthy file or folder with one damaged file in it, now and then with more."""
    path = place.copy(name)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for number, file in enumerate(place.random.sample(files, len(files))):
        if number == 0 or place.random.random() < share / len(files):
            damage_file(place.random, file)
    return path


# --- configs


def config_fields(place: Place) -> Attempt:
    """Hostile values for the settings of a run: from a file and from the command line."""
    random, name = place.random, place.random.choice(list(RECIPES))
    recipe = RECIPES[name]()
    settings = flatten(contents(recipe))
    healthy = {"target": "t", "data.samples": "s", "run.dir": "d"}
    keys = random.sample(list(settings), random.choice((1, 1, 2, 3)))
    changes = {
        key: near(random, settings[key])
        if random.random() < 0.3 and settings[key] is not None
        else hostile_value(random)
        for key in keys
    }
    if random.random() < 0.1:
        changes[hostile_text(random)] = hostile_value(random)
    overrides = [f"{key}={value}" for key, value in healthy.items()]
    file = None
    if random.random() < 0.5:
        file = place.given / "config.yaml"
        file.write_text(json_text(changes), errors="surrogatepass")
    else:
        overrides += [
            f"{key}={value if isinstance(value, str) else json_text(value)}" for key, value in changes.items()
        ]

    def call() -> None:
        config = resolve(recipe, file, overrides)
        again = place.out / "config.yaml"
        place.out.mkdir()
        again.write_text(dump(config))
        assert dump(resolve(recipe, again)) == dump(config), "a config does not survive its own file"

    return Attempt(f"resolve({name}, {file}, {overrides})", call, (place.out,))


def config_text(place: Place) -> Attempt:
    """A config file or a mixture whose text is damaged."""
    random = place.random
    if random.random() < 0.3:
        path = place.copy("prompts/mixture.yaml")
        text = random.choice(yaml_bombs()).encode() if random.random() < 0.3 else damaged_yaml(random, path)
        path.write_bytes(text)
        return Attempt(f"read_prompts({str(path)!r})", lambda: read_prompts(str(path)))
    path = place.copy("run/config.yaml")
    text = random.choice(yaml_bombs()).encode() if random.random() < 0.3 else damaged_yaml(random, path)
    path.write_bytes(text)
    return Attempt(f"resolve(medusa, {path})", lambda: resolve(RECIPES["medusa"](), path))


def damaged_yaml(random: Random, path: Path) -> bytes:
    content = path.read_bytes()
    if random.random() < 0.5:
        return damaged_bytes(random, content)
    damaged = json_text(damaged_json(random, yaml.safe_load(content)))  # JSON is YAML
    return damaged.encode("utf-8", "surrogatepass")


# --- texts


def prompts(place: Place) -> Attempt:
    """Damaged prompts in every format, read and encoded."""
    random = place.random
    name = random.choice(("p.txt", "p.jsonl", "p.jsonl", "p.json", "chats.jsonl", "chats.jsonl", "p.parquet", "code"))
    path = damaged_copy(place, f"prompts/{name}")
    source = str(path) + (
        f":{random.choice(('prompt', 'domain', hostile_text(random)))}" if random.random() < 0.2 else ""
    )
    target = healthy_target(place.material, "chat")
    return Attempt(f"encode_prompts(read_prompts({source!r}))", lambda: encode_prompts(read_prompts(source), target))


def traces(place: Place) -> Attempt:
    """A damaged trace of requests, or log of a server."""
    path = damaged_copy(place, f"traces/{place.random.choice(list(TRACES))}")
    return Attempt(f"read_trace({str(path)!r})", lambda: read_trace(path))


def samples(place: Place) -> Attempt:
    """Damaged samples: read, or trained on. Whatever was changed is refused."""
    path = place.copy("samples")
    file = path / place.random.choice(("samples-00000.arrow", "index.json", "prepared.json"))
    healthy = file.read_bytes()
    damage_file(place.random, file)
    changed = not file.is_file() or file.read_bytes() != healthy
    if place.random.random() < 0.2:
        command = f"train medusa target={place.material}/target data.samples={path} run.dir={place.out} run.steps=1"
        attempt = command_attempt(place, [*command.split(), "run.device=cpu", "data.batch_size=2"])
        attempt.must_refuse = changed and file.name == "samples-00000.arrow"
        return attempt

    def call() -> None:
        target = healthy_target(place.material, "target")
        check_samples(read_samples(path), target, 64, str(path))
        check_same_target(path, target)
        read_prepared(path)

    return Attempt(f"check_samples(read_samples({path}))", call)


# --- checkpoints and targets


def decoded(drafter: Drafter, target: Target) -> None:
    """Decode with a drafter that was loaded: whatever its weights are, the text is the target's."""
    for name, parameter in drafter.named_parameters():
        assert parameter.isfinite().all(), f"a weight that is not finite was taken: {name}"
    output = SpeculativeDecoder(target, drafter).generate(PROMPTS, NEW_TOKENS)
    assert output.token_ids == plain_tokens(target), "another text than the target's"


def drafter(place: Place) -> Attempt:
    """A damaged checkpoint of each family."""
    path = damaged_copy(place, f"drafters/{place.random.choice(KINDS)}")
    target = healthy_target(place.material, "target")
    return Attempt(f"load_drafter({str(path)!r})", lambda: decoded(load_drafter(path, target), target))


def foreign_drafter(place: Place) -> Attempt:
    """A damaged checkpoint in the layout of another project."""
    path = damaged_copy(place, f"foreign/{place.random.randrange(len(PUBLIC))}")
    target = healthy_target(place.material, "deep")
    return Attempt(f"load_drafter({str(path)!r})", lambda: decoded(load_drafter(path, target), target))


def target(place: Place) -> Attempt:
    """A damaged target, loaded whole, without weights, or in part."""
    random = place.random
    path = place.copy(random.choice(("target", "sharded", "chat", *QUANTISED)))
    file = random.choice(
        [file for file in sorted(path.rglob("*")) if file.suffix != ".safetensors" or random.random() < 0.3]
    )
    draw = random.random()
    if draw < 0.1 and (path / "config.json").is_file():
        spoil_with_code(path, place)
    elif draw < 0.2 and (path / "chat_template.jinja").is_file():
        (path / "chat_template.jinja").write_text(hostile_text(random).encode("utf-8", "replace").decode())
    else:
        damage_file(random, file)
    loaders: dict[str, Callable[[], Target]] = {
        "from_pretrained": lambda: Target.from_pretrained(path, "cpu", torch.float32),
        "without_weights": lambda: Target.without_weights(str(path)),
        "head_from_pretrained": lambda: Target.head_from_pretrained(str(path), None, "cpu"),
        "first_layers_from_pretrained": lambda: Target.first_layers_from_pretrained(
            str(path), 1, torch.device("cpu"), torch.float32
        ),
    }
    name = random.choice([*loaders, "from_pretrained", "from_pretrained"])

    def call() -> None:
        loaded = loaders[name]()
        if name == "from_pretrained":
            for weight, parameter in loaded.model.named_parameters():
                assert parameter.isfinite().all(), f"a weight that is not finite was taken: {weight}"
            SpeculativeDecoder(loaded, load_drafter("ngram", loaded)).generate(["heat", [1, 2]], 3)
            encode_prompts(read_prompts(str(place.material / "prompts" / "chats.jsonl")), loaded)

    return Attempt(f"Target.{name}({str(path)!r})  # {file.name} damaged", call)


def spoil_with_code(path: Path, place: Place) -> None:
    """Give a target code of its own, which must not run."""
    config = json.loads((path / "config.json").read_text())
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", None]}
    config["auto_map"] = auto_map
    if place.random.random() < 0.6:
        config["model_type"] = place.random.choice(("hostile", "", "../x"))
    (path / "config.json").write_text(json.dumps(config))
    (path / "code.py").write_text(f"open({str(place.folder / CANARY)!r}, 'w')\n")


# --- results and small files


def results(place: Place) -> Attempt:
    """Damaged measurements, read for a report, for `watch` and for `plan`."""
    draw = place.random.random()
    if draw < 0.3:
        path = damaged_copy(place, "evaluation/evaluation.json")
        return Attempt(f"read_evaluation({str(path)!r})", lambda: read_evaluation(path))
    if draw < 0.4:
        path = damaged_copy(place, "evaluation/evaluation.json")
        return Attempt(f"read_acceptance({str(path)!r})", lambda: read_acceptance(str(path), 8))
    if draw < 0.5:
        path = damaged_copy(place, "evaluation/evaluation.json")
        length = place.random.randrange(1, 5)
        return Attempt(f"read_reference({str(path.parent)!r}, {length})", lambda: read_reference(path.parent, length))
    path = damaged_copy(place, place.random.choice(("runs", "grid", "evaluation", "run")))
    return Attempt(f"read_report_data({str(path)!r})", lambda: read_report_data(path))


def report(place: Place) -> Attempt:
    """The whole report of damaged measurements."""
    path = damaged_copy(place, place.random.choice(("runs", "grid", "evaluation")))
    return command_attempt(place, ["report", str(path)], path)


def schedules(place: Place) -> Attempt:
    """Damaged schedules and trees."""
    name = place.random.choice(("schedule", "adaptive", "confident", "tree"))
    path = damaged_copy(place, f"{name}.json")
    if place.random.random() < 0.3:
        path.write_text(json_text(hostile_value(place.random)), errors="surrogatepass") if path.is_file() else None
    if name == "tree":
        return Attempt(f"parse_tree({str(path)!r})", lambda: parse_tree(str(path)))

    def call() -> None:
        schedule = read_schedule(path)
        target = healthy_target(place.material, "target")
        decoder = SpeculativeDecoder(target, load_drafter("ngram", target))
        if not isinstance(schedule, Confident):
            decoder.generate(PROMPTS, NEW_TOKENS, schedule=schedule)

    return Attempt(f"read_schedule({str(path)!r})", call)


def metrics_page(place: Place) -> Attempt:
    """A page of counters as a server may write it."""
    random = place.random
    text = (place.material / "metrics.txt").read_text()
    for _ in range(random.choice((1, 1, 2, 4))):
        value = random.choice((*NUMBERS, "NaN", "+Inf", "9" * 400, hostile_text(random)))
        old = random.choice(("1000.0", "2000.0", "900.0", "600.0", '"0"', '"1"', "engine", "\n", "_total", "position"))
        text = text.replace(old, f'"{value}"' if old.startswith('"') else str(value), 1)
    if random.random() < 0.3:
        text = damaged_bytes(random, text.encode("utf-8", "replace")).decode("utf-8", "replace")

    def call() -> None:
        counters = parse_metrics(text)
        describe(counters - parse_metrics((place.material / "metrics.txt").read_text()), None)
        print(describe(counters, None))

    return Attempt(f"describe(parse_metrics({text!r}))", call)


# --- commands


def run_folder(place: Place) -> Attempt:
    """A damaged run, or damaged features of it, gone on with: it ends with the weights that it would have had."""
    stored, made = place.random.random() < 0.8, place.material
    name = "stored_run" if stored else "run"
    path = damaged_copy(place, name) if not stored or place.random.random() < 0.5 else place.copy(name)
    last = path / "checkpoints" / "step-000002"
    if place.random.random() < 0.5 and last.is_dir():
        shutil.rmtree(last)
    arguments = run_arguments(made)
    features = made / "features"
    if stored:
        features = damaged_copy(place, "features") if place.random.random() < 0.7 else place.copy("features")
        arguments = [*stored_arguments(made), f"data.features_dir={features}"]
    attempt = command_attempt(place, ["train", "medusa", *arguments, f"run.dir={path}"], path, features)
    run = attempt.call

    def call() -> object:
        code = run()
        weights = [folder / "checkpoints/step-000002/model.safetensors" for folder in (path, made / name)]
        if code == 0 and all(file.is_file() for file in weights):
            assert weights[0].read_bytes() == weights[1].read_bytes(), "other weights than without the damage"
        return code

    attempt.call = call
    return attempt


def journal(place: Place) -> Attempt:
    """Damaged answers of an interrupted `prepare`, gone on with: the samples are those that they would have been."""
    path, made = damaged_copy(place, "half_prepared"), place.material
    argv = [
        "prepare",
        "--target",
        str(made / "target"),
        "--prompts",
        str(made / "prompts" / "p.txt"),
        "--out",
        str(path),
    ]
    attempt = command_attempt(place, [*argv, "--max-new-tokens", "8", "--device", "cpu"], path)
    run = attempt.call

    def call() -> object:
        code = run()
        if code == 0:
            found, expected = path / "index.json", made / "samples" / "index.json"
            assert found.read_bytes() == expected.read_bytes(), "other samples than without the damage"
        return code

    attempt.call = call
    return attempt


def server(place: Place) -> Attempt:
    """A server that lies, breaks off, drips or redirects."""
    random = place.random
    server = HostileServer.shared()
    told = server.behave(random, place)
    draw, target, prompts = random.random(), place.material / "target", place.material / "prompts" / "p.txt"
    if draw < 0.4:
        argv = ["watch", server.url, "--interval", "0.1", "--readings", "1"]
        if random.random() < 0.3:
            argv += ["--history", str(place.out / "watch.db"), "--page", str(place.out / "watch.html")]
    elif draw < 0.6:
        argv = ["bench", server.url, "--prompts", str(prompts), "--concurrency", "2", "--requests", "10"]
        argv += ["--repeats", "1", "--timeout", "0.5", "--out", str(place.out)]
    else:
        argv = ["prepare", "--target", str(target), "--prompts", str(prompts), "--out", str(place.out)]
        argv += ["--endpoint", server.url, "--max-new-tokens", "4"]
    attempt = command_attempt(place, argv, place.out)
    run = attempt.call

    def call() -> object:
        with quick_client():
            code = run()
        assert not server.leaked, "the key reached another server"
        return code

    attempt.call, attempt.told = call, f"{attempt.told}  # the server: {told}"
    return attempt


# --- the Python interface

THINGS: tuple[Any, ...] = (
    *(None, True, b"x", object(), (), set(), {"a": 1}, 1j, lambda: 0, int, range(3), iter([1, 2]), Path("x")),
    *(np.int64(3), np.float32(0.5), np.array([1, 2]), torch.tensor(1), torch.zeros(2, 3), torch.tensor([1, 2])),
    *([[]], [[-1]], [[10**6]], [["a"]], [[1.5]], [None], ["heat", [1]], [[1] * 200], "heat", [""], ["\ud800"], ["\0"]),
    *([[True]], [[2**70]], (prompt for prompt in ["heat"]), [[1, 2], "heat"], ["heat"] * 40),
)


def thing(random: Random) -> Any:
    draw = random.random()
    return random.choice(THINGS) if draw < 0.6 else random.choice(NUMBERS) if draw < 0.85 else hostile_text(random)


def python(place: Place) -> Attempt:
    """Wrong types and values in the Python interface."""
    random, loaded = place.random, healthy_target(place.material, "target")
    arguments: dict[str, Any] = {"prompts": ["heat", [1, 2]], "max_new_tokens": 3}
    names = (
        "prompts max_new_tokens temperature top_p top_k draft_length tree verification_mode seed request_ids batch_size"
    )
    for name in random.sample([*names.split(), "schedule", "stop_at_eos"], random.choice((1, 1, 2))):
        arguments[name] = thing(random)
    value, other = thing(random), thing(random)
    drafted = SpeculativeDecoder(loaded, load_drafter(random.choice(("ngram", "suffix", "lookahead", "none")), loaded))
    makers: dict[str, Callable[[], object]] = {
        "generate": lambda: drafted.generate(**arguments),
        "load_drafter": lambda: load_drafter(value, loaded),
        "from_pretrained": lambda: Target.from_pretrained(value, "cpu"),
        "device": lambda: Target.from_pretrained(place.material / "target", value),
        "dtype": lambda: Target.from_pretrained(place.material / "target", "cpu", value),
        "read_prompts": lambda: read_prompts(value),
        "stream": lambda: list(drafted.stream(value, 3, Sampling(0.0), other, 0)),
        "Schedule": lambda: Schedule(value).draft_length(1),
        "Adaptive": lambda: Adaptive(value, other),
        "Confident": lambda: Confident(value, other),
        "StaticTree": lambda: drafted.generate([[1, 2]], 3, tree=StaticTree(value)),
        "DynamicTree": lambda: drafted.generate([[1, 2]], 3, tree=DynamicTree(value, other, 2)),
        "threads": lambda: both_alike(drafted, random.randrange(1000)),
    }
    name = random.choice([*makers, *["generate"] * 12])
    told = f"generate(**{arguments!r})" if name == "generate" else f"{name}({value!r}, {other!r})"
    return Attempt(told, makers[name])


def both_alike(decoder: SpeculativeDecoder, seed: int) -> None:
    """Decode from two threads at once: each gets what it would have got alone.

    A drafter that remembers texts drafts otherwise each time, so that other windows round otherwise. Where that is less
    than what parts two tokens in greedy decoding, a coin may still lie between.
    """
    drawn = {"temperature": 0.0 if decoder.drafter.kind == "suffix" else 1.0}
    settings = [{**drawn, "seed": seed}, {"temperature": 0.0}]
    alone = [decoder.generate(PROMPTS, 12, **kind).token_ids for kind in settings]
    found: list[Any] = [None, None]

    def decode(number: int) -> None:
        with contextlib.suppress(Exception):
            found[number] = decoder.generate(PROMPTS, 12, **settings[number]).token_ids

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone, "two threads got other texts than one"


Area = Callable[[Place], Attempt]
AREAS: dict[str, tuple[Area, int]] = {  # with the cases of a thousand: by what they find and by what they take
    "config_fields": (config_fields, 80),
    "config_text": (config_text, 70),
    "prompts": (prompts, 90),
    "traces": (traces, 20),
    "samples": (samples, 65),
    "drafter": (drafter, 110),
    "foreign_drafter": (foreign_drafter, 70),
    "target": (target, 90),
    "results": (results, 80),
    "report": (report, 4),
    "schedules": (schedules, 40),
    "journal": (journal, 10),
    "kept": (kept, 15),
    "metrics_page": (metrics_page, 20),
    "run_folder": (run_folder, 5),
    "server": (server, 20),
    "images": (images, 10),
    "states": (states, 5),
    "judged_by_engine": (judged_by_engine, 5),
    "python": (python, 80),
    "commands": (commanded, 86),
    "names": (named, 5),
    "cut_short": (cut_short, 5),
    "two_at_once": (two_at_once, 5),
    "started_badly": (started_badly, 5),
    "killed": (killed, 5),
}
assert sum(share for _, share in AREAS.values()) == 1000
