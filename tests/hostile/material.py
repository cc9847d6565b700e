"""Healthy files of every kind, which the cases damage copies of: made once, on the tiny target."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import torch
from chats import CHATML_TOKENS, FAMILIES
from disturbances import disk_full
from drafters import SMALLER
from engines import image_server
from image_server import give_template, image_url
from judge import figures_undrawn
from kept import write_kept
from load_tests import load_test, stage
from public_checkpoints import PUBLIC
from quantised import FORMS, quantise
from reports import choice_content, write_comparison, write_grid, write_run, write_samples
from tiny_target import save_target
from transformers import AutoTokenizer

from draftsmith.models import DRAFTERS, Target, save_drafter
from draftsmith.models.storage.files import write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.cli.main import main

KINDS = (
    *("eagle", "eagle3", "p_eagle", "medusa", "hydra", "mlp_speculator", "draft_model"),
    *("dflash", "dflash2", "dspark", "mtp"),
)
SMALL = {"num_hidden_layers": 3}  # as few as `KINDS` need: cases load and decode all day
TRACES = {  # requests with their times, as docs/bench.md has them
    "requests.jsonl": """\
{"body": {"messages": [{"role": "user", "content": "heat"}], "max_tokens": 5}, "timestamp": 12.5}
{"prompt": "strike the iron", "timestamp": "2026-05-27 20:00:05.25", "max_tokens": 4}
""",
    "lengths.jsonl": """\
{"timestamp": 1000, "input_length": 70, "output_length": 5, "hash_ids": [1]}
""",
    "azure.csv": """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805900,9,1
""",
    "vllm.log": """\
DEBUG 11-22 20:14:45 [request_logger.py:51] Request a details: prompt: 'it\\'s', prompt_token_ids: [5, 6], \
prompt_embeds shape: None.
INFO 11-22 20:14:45 [request_logger.py:66] Received request a: params: SamplingParams(n=1, max_tokens=16), \
lora_request: None.
DEBUG 11-22 20:14:46 [request_logger.py:75] Request N/A JSON body: {"prompt": "heat", "max_tokens": 3}
""",
    "sglang.log": """\
[2026-05-27 20:00:05 TP0] Receive: obj=GenerateReqInput(rid='r', text='hello', input_ids=[4, 5], \
sampling_params={'temperature': 0.7, 'max_new_tokens': 12}, stream=True)
[2026-05-27 20:00:05] Receive OpenAI: obj={'messages': [{'role': 'user', 'content': 'hi'}], 'max_tokens': 4}
{"timestamp": "2026-05-27T20:00:05.5", "event": "request.received", "rid": "r", "obj": {"text": "hello"}}
""",
}
CONVERSATION = [{"role": "user", "content": "heat it"}, {"role": "assistant", "content": "It is hot."}]
QUANTISED = {"fp8": "fp8 in blocks", "int4": "compressed int4, columns in another order"}
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 2000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 900.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 600.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 300.0
"""


def make_material(folder: Path) -> None:
    """Write all healthy files below a folder."""
    save_target(folder / "target", **SMALL)
    save_target(folder / "deep", num_hidden_layers=8)  # as many as the public layouts need
    save_target(folder / "sharded", max_shard_size="30KB", **SMALL)
    save_target(folder / "chat", **SMALL)
    for name, form in QUANTISED.items():
        quantise(folder / "chat", folder / name, folder / f"{name}-unpacked", FORMS[form])
    tokenizer = AutoTokenizer.from_pretrained(folder / "chat")
    tokenizer.add_special_tokens({"additional_special_tokens": CHATML_TOKENS[1:]})
    tokenizer.chat_template = FAMILIES["chatml"].template
    tokenizer.save_pretrained(folder / "chat")
    give_template(save_target(folder / "seeing"))
    write_texts(folder)
    write_drafters(folder)
    write_measurements(folder)
    with figures_undrawn():
        train(folder)
    write_kept(folder)


def write_texts(folder: Path) -> None:
    """Write prompts in every format, and the small files that are given beside them."""
    texts = ["heat the iron", "heats it again, and", "return [iron.hit()", *(f"strike {i}" for i in range(9))]
    rows = [{"prompt": text, "domain": "chat" if i % 2 else "code"} for i, text in enumerate(texts)]
    prompts = folder / "prompts"
    (prompts / "code").mkdir(parents=True)
    (prompts / "p.txt").write_text("\n".join(texts) + "\n")
    (prompts / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (prompts / "p.json").write_text(json.dumps(rows))
    chats = [
        {"messages": CONVERSATION[:1], "tools": [{"type": "function", "function": {"name": "hit"}}]},
        {"messages": CONVERSATION},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"custom_id": "1", "body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}},
    ]
    (prompts / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    images = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": f"look {number} "}, image]}]}
        for number in range(4)
        for image in [{"type": "image_url", "image_url": {"url": image_url(bytes([60 + number, 90, 33]))}}]
    ]
    (prompts / "images.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in images))
    (prompts / "given.jsonl").write_text("".join(json.dumps({"messages": CONVERSATION}) + "\n" for _ in range(3)))
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), prompts / "p.parquet")
    (prompts / "code" / "a.py").write_text("def strike(iron):\n    return iron.hit()\n\n\n" * 12)
    sources = [{"source": str(prompts / "p.txt"), "weight": 2}, {"source": str(prompts / "p.jsonl"), "weight": 1}]
    (prompts / "mixture.yaml").write_text(json.dumps({"num_prompts": 6, "sources": sources}))
    schedules = {
        "schedule": {"draft_lengths": [[1, 4], [8, 2], [24, 0]]},
        "adaptive": {"adaptive": {"candidates": [0, 2, 4], "costs": [[1, [1.0, 2.0, 3.0]]]}},
        "confident": {"confident": {"longest": 8, "least": 0.4}},
        "tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]],
    }
    for name, content in schedules.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "metrics.txt").write_text(METRICS)
    (folder / "traces").mkdir()
    for name, text in TRACES.items():
        (folder / "traces" / name).write_text(text)


def write_drafters(folder: Path) -> None:
    """Write a checkpoint of every family, and those of other projects."""
    target, deep = (Target.from_pretrained(folder / name, "cpu", torch.float32) for name in ("target", "deep"))
    for kind in KINDS:
        drafter_class = DRAFTERS[kind]
        fields = {"draft_vocab_size": 64} if kind in ("eagle3", "p_eagle") else {}
        config = drafter_class.config_class(kind=kind, **SMALLER.get(kind, {}), **fields)
        drafter = drafter_class.from_target(config, target)
        save_drafter(drafter, folder / "drafters" / kind)
    (folder / "foreign").mkdir()
    for number, write in enumerate(PUBLIC.values()):
        write(deep, folder / "foreign" / str(number))


def write_measurements(folder: Path) -> None:
    """Write the files that a report is made from, with plain numbers."""
    runs, grid = folder / "runs", folder / "grid"
    write_run(runs / "eagle3", 0.7, 1.0)
    write_run(runs / "medusa", 0.5, 0.5)
    write_samples(runs)
    write_comparison(runs, 1)
    write_grid(grid)
    write_json(grid / "choice.json", choice_content("ngram", 2))
    stages = [stage(1, "off", 100, 10), stage(1, "on", 150, 7), stage(1, "scheduled", 150, 7)]
    write_json(grid / "load.json", to_json(load_test("ngram", stages, "pays")))


def train(folder: Path) -> None:
    """Prepare samples, train on them, online and with stored features, and measure: by the commands themselves."""
    target, prompts = folder / "target", folder / "prompts" / "p.txt"
    run = [*run_arguments(folder), f"run.dir={folder / 'run'}"]
    measured = ["--target", str(target), "--prompts", str(prompts), "--num-prompts", "2", "--max-new-tokens", "4"]
    drafter = ["--drafter", str(folder / "drafters" / "medusa"), "--device", "cpu"]
    seeing = ["--target", str(folder / "seeing"), "--prompts", str(folder / "prompts" / "images.jsonl")]
    commands = [
        ["prepare", *seeing, "--out", str(folder / "image_samples"), "--max-new-tokens", "4",
         "--endpoint", image_server(folder / "seeing").url],
        ["prepare", *measured[:4], "--out", str(folder / "samples"), "--max-new-tokens", "8", "--device", "cpu"],
        ["train", "medusa", *run],
        ["train", "medusa", *stored_arguments(folder), f"run.dir={folder / 'stored_run'}",
         f"data.features_dir={folder / 'features'}"],
        ["evaluate", *measured, *drafter, "--repeats", "1", "--out", str(folder / "evaluation")],
        ["export", drafter[1], "--engine", "vllm", "--target", str(target), "--out", str(folder / "export")],
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        for argv in commands:
            if main(argv) != 0:
                raise AssertionError(f"the healthy command fails: {' '.join(argv)}: {errors.getvalue()}")
        with disk_full(1500):
            main([*commands[1][:5], "--out", str(folder / "half_prepared"), *commands[1][7:]])
    for measured_folder in (folder / "run", folder / "evaluation"):  # of what nobody reads, damage finds nothing
        shutil.rmtree(measured_folder / "figures")
        (measured_folder / "report.md").unlink()
        (measured_folder / "report.json").unlink()


def run_arguments(folder: Path) -> list[str]:
    """Return the arguments of the healthy run, but for its folder."""
    prompts = folder / "prompts" / "p.txt"
    base = [f"target={folder / 'target'}", f"data.samples={folder / 'samples'}", "run.device=cpu", "data.batch_size=2"]
    evaluation = (
        f"evaluation.prompts={prompts} evaluation.num_prompts=1 evaluation.repeats=1 evaluation.max_new_tokens=4"
    )
    return [*base, *evaluation.split(), "run.steps=2", "run.checkpoint_every=1"]


def stored_arguments(folder: Path) -> list[str]:
    """Return the arguments of the healthy run on stored features, but for its folder and theirs."""
    return [*run_arguments(folder)[:4], "run.steps=2", "run.checkpoint_every=1", "data.features=stored"]
