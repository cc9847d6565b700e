"""The target answers prompts: text for training that it really writes."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.data.progress import progress_bar
from draftsmith.data.prompts import check_lengths, encode_prompts, read_prompts
from draftsmith.data.samples import PREPARED, SAMPLES, Sample, read_prepared, sample_line, template_hash
from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError, require_at_least


@dataclass
class PrepareSettings:
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)  # prompt i is answered at temperatures[i % len]
    batch_size: int = 32
    seed: int = 0


def prepare(target: Target, source: str, out: Path, settings: PrepareSettings) -> None:
    """Write the target's answers to the prompts at `source` into the folder `out`.

    Interrupted, it goes on where it stopped: answers are written a batch at a time and a batch is a function of the
    prompts and the settings alone. Raises `UserError` for bad prompts, before anything is written, and for a folder
    that holds the answers of other prompts or settings.
    """
    require_at_least("batch_size", settings.batch_size)
    require_at_least("max_new_tokens", settings.max_new_tokens)
    encoded = encode_prompts(read_prompts(source), target)
    check_lengths(encoded, settings.max_new_tokens, target, source)
    prepared = {
        "target": target.name,
        "target_fingerprint": target.fingerprint(),
        "template_hash": template_hash(target),
        "prompts": source,
        "prompts_hash": hashlib.sha256(json.dumps(encoded).encode()).hexdigest()[:16],
        "num_prompts": len(encoded),
        "settings": json.loads(json.dumps(asdict(settings))),
    }
    done = open_folder(out, prepared)
    batches = answer_order(encoded, settings)
    decoder = SpeculativeDecoder(target, load_drafter("none", target))
    with progress_bar() as progress, open(out / SAMPLES, "a") as file:
        task = progress.add_task("the target writes training text", total=len(encoded), completed=done, detail="")
        num_tokens = 0
        for batch in batches:
            if done >= len(batch):  # written before an interruption; batches are written whole
                done -= len(batch)
                continue
            samples = answer_batch(decoder, encoded, batch, settings)
            file.write("".join(map(sample_line, samples)))
            file.flush()
            num_tokens += sum(len(sample.token_ids) - sample.prompt_length for sample in samples)
            progress.update(task, advance=len(batch), detail=f"{num_tokens} tokens")


def open_folder(out: Path, prepared: dict) -> int:
    """Make the folder, or check that it holds the beginning of the same answers; return how many are there.

    A line cut short by a kill is dropped with the rest of its batch.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / SAMPLES).touch()
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    if not (out / PREPARED).is_file():
        temporary = out / f".{PREPARED}"
        temporary.write_text(json.dumps(prepared, indent=2) + "\n")
        temporary.replace(out / PREPARED)
    elif read_prepared(out) != prepared:
        raise UserError(f"{out} holds samples of another target, prompts or settings: give another folder or remove it")
    lines = (out / SAMPLES).read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    batch_size = prepared["settings"]["batch_size"]
    if len(whole) < prepared["num_prompts"]:
        whole = whole[: len(whole) // batch_size * batch_size]
    if len(whole) < len(lines):
        (out / SAMPLES).write_text("".join(whole))
    return len(whole)


def answer_order(encoded: list[list[int]], settings: PrepareSettings) -> list[list[int]]:
    """Batches of prompt indices. A batch has one temperature and, within it, prompts of similar length.

    Only the last batch may be short, so that whole batches can be counted in the file.
    """
    count = len(settings.temperatures)
    order = sorted(range(len(encoded)), key=lambda i: (i % count, len(encoded[i]), i))
    return [order[start : start + settings.batch_size] for start in range(0, len(order), settings.batch_size)]


def answer_batch(
    decoder: SpeculativeDecoder, encoded: list[list[int]], batch: list[int], settings: PrepareSettings
) -> list[Sample]:
    """Answer the prompts with the given indices; where a batch holds two temperatures, each for itself."""
    samples = []
    count = len(settings.temperatures)
    for remainder in sorted({index % count for index in batch}):
        indices = [index for index in batch if index % count == remainder]
        temperature = settings.temperatures[remainder]
        output = decoder.generate(
            [encoded[index] for index in indices],
            max_new_tokens=settings.max_new_tokens,
            temperature=temperature,
            seed=settings.seed,
            request_ids=indices,
        )
        for index, answer in zip(indices, output.token_ids, strict=True):
            reason = "eos" if answer[-1] in decoder.target.eos_token_ids else "length"
            samples.append(Sample(encoded[index] + answer, len(encoded[index]), reason, temperature, index))
    return samples
