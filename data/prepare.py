"""The target answers prompts: text for training that it really writes."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.data.progress import progress_bar
from draftsmith.data.prompts import check_lengths, encode_prompts, read_prompts
from draftsmith.data.samples import PREPARED, SAMPLES, Sample, read_prepared, sample_line, template_hash
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoder import resolve_settings
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.sampling import Sampling

BATCHES_A_SHARE = 8  # more keep the batch full for longer, fewer lose less to an interruption


@dataclass
class PrepareSettings:
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)  # prompt i is answered at temperatures[i % len]
    batch_size: int = 32  # prompts decoded at a time
    seed: int = 0

    @property
    def share(self) -> int:
        """Prompts whose answers are written together."""
        return BATCHES_A_SHARE * self.batch_size


def prepare(target: Target, source: str, out: Path, settings: PrepareSettings) -> None:
    """Write the target's answers to the prompts at `source` into the folder `out`.

    Interrupted, it goes on where it stopped: answers are written a share at a time and a share is a function of the
    prompts and the settings alone. Raises `UserError` for bad prompts, before anything is written, and for a folder
    that holds the answers of other prompts or settings.
    """
    require_at_least("batch_size", settings.batch_size)
    require_at_least("max_new_tokens", settings.max_new_tokens)
    prompts = read_prompts(source)
    encoded = encode_prompts(prompts, target)
    check_lengths(prompts, encoded, settings.max_new_tokens, target)
    prepared = {
        "target": target.name,
        "target_fingerprint": target.fingerprint(),
        "template_hash": template_hash(target),
        "prompts": source,
        "prompts_hash": hashlib.sha256(json.dumps(encoded).encode()).hexdigest()[:16],
        "num_prompts": len(encoded),
        "settings": json.loads(json.dumps(asdict(settings))),
    }
    done = open_folder(out, prepared, settings.share)
    shares = answer_order(encoded, settings)
    decoder = SpeculativeDecoder(target, load_drafter("none", target))
    with progress_bar() as progress, open(out / SAMPLES, "a") as file:
        task = progress.add_task("the target writes training text", total=len(encoded), completed=done, detail="")
        num_tokens = 0
        for share in shares:
            if done >= len(share):  # written before an interruption; shares are written whole
                done -= len(share)
                continue
            samples = {}
            for sample in answers(decoder, encoded, share, settings):
                samples[sample.prompt_index] = sample
                num_tokens += len(sample.token_ids) - sample.prompt_length
                progress.update(task, advance=1, detail=f"{num_tokens} tokens")
            file.write("".join(sample_line(samples[index]) for index in share))
            file.flush()


def open_folder(out: Path, prepared: dict, share: int) -> int:
    """Make the folder, or check that it holds the beginning of the same answers; return how many are there.

    A line cut short by a kill is dropped with the rest of its share.
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
    if len(whole) < prepared["num_prompts"]:
        whole = whole[: len(whole) // share * share]
    if len(whole) < len(lines):
        (out / SAMPLES).write_text("".join(whole))
    return len(whole)


def answer_order(encoded: list[list[int]], settings: PrepareSettings) -> list[list[int]]:
    """Shares of prompt indices. A share has one temperature, or two, and prompts of similar length.

    Only the last share may be short, so that whole shares can be counted in the file.
    """
    count = len(settings.temperatures)
    order = sorted(range(len(encoded)), key=lambda i: (i % count, len(encoded[i]), i))
    return [order[start : start + settings.share] for start in range(0, len(order), settings.share)]


def answers(
    decoder: SpeculativeDecoder, encoded: list[list[int]], share: list[int], settings: PrepareSettings
) -> Iterator[Sample]:
    """Answer the prompts with the given indices; samples come as they are finished."""
    count = len(settings.temperatures)
    for remainder in sorted({index % count for index in share}):
        indices = [index for index in share if index % count == remainder]
        temperature = settings.temperatures[remainder]
        how = resolve_settings(decoder.drafter, Sampling(temperature), settings.max_new_tokens, seed=settings.seed)
        generation = decoder.start([encoded[index] for index in indices], how, indices, settings.batch_size)
        while generation.running():
            for emission in generation.step():
                request, index = generation.requests[emission.request], indices[emission.request]
                if request.finished:
                    reason = "eos" if request.token_ids[-1] in decoder.target.eos_token_ids else "length"
                    prompt = encoded[index]
                    yield Sample(prompt + request.token_ids, len(prompt), reason, temperature, index)
