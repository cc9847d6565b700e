"""The model card beside exported weights (model_card.md.j2), and what is served by what was measured from them."""

from dataclasses import dataclass
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from draftsmith.data.progress import notice
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.results import Evaluation, Result
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import file_hash, real_path, write_whole
from draftsmith.models.storage.reading import read_typed
from draftsmith.models.storage.typed_json import optional, to_json
from draftsmith.recipes.pages.markdown import code, fenced, finalized
from draftsmith.recipes.serving.engine_check import EngineReport
from draftsmith.recipes.serving.export import WEIGHT_FILES, Exported
from draftsmith.train.run_folder.stored_run import read_config

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    finalize=finalized,
)
TEMPLATES.filters |= {"code": code, "fenced": fenced}
WEIGHTS = ("model.safetensors", *WEIGHT_FILES.values())
WRITTEN_BY = {  # by what prepared.json says; a run of an older draftsmith did not keep it
    None: "by whom it was written is not recorded",
    "decoder": "written by the target itself",
    "endpoint": "written by the target itself, which a server ran",
    "given": "given, not written by the target (off-policy)",
}
DYNAMIC_KINDS = ("eagle", "eagle3", "draft_model")  # whose draft length vLLM can change from step to step


def served_result(evaluation: Evaluation) -> Result:
    """Return the row whose draft length is served: the best greedy one at the smallest batch size, or else of any.

    An export is served with chains of one length, so rows of these go before those of trees and of schedules.
    """
    smallest = min(result.setting.batch_size for result in evaluation.results)
    results = [result for result in evaluation.results if result.setting.batch_size == smallest]
    results = [result for result in results if result.setting.is_chain] or results
    greedy = [result for result in results if result.setting.temperature == 0]
    return max(greedy or results, key=lambda result: result.rank_key)


def schedule_of(kind: str, evaluation: Evaluation) -> Schedule | None:
    """Return the best draft length from each measured batch size on, 0 where none is shown to pay.

    None where `as_schedule` returns it.
    """
    draft_lengths = {}
    for size in {result.setting.batch_size for result in evaluation.results}:
        paying = [result for result in evaluation.results if result.setting.batch_size == size and result.pays]
        best = max(paying, key=lambda result: result.rank_key, default=None)
        draft_lengths[size] = best.setting.draft_length if best else 0
    return as_schedule(kind, draft_lengths)


def as_schedule(kind: str, draft_lengths: dict[int, int]) -> Schedule | None:
    """Return draft lengths by batch size as a schedule, in which the smallest size stands for those below it.

    None where there is one batch size, or vLLM cannot change the draft length of that kind.
    """
    if len(draft_lengths) < 2 or kind not in DYNAMIC_KINDS:
        return None
    (_, first), *others = sorted(draft_lengths.items())
    return Schedule(((1, first), *others))


def write_card(
    exported: Exported,
    source: Path,
    commands: dict[str, str],
    evaluation: Evaluation | None,
    report: EngineReport | None,
) -> None:
    """Write README.md of an exported directory; `source` is the checkpoint that it was made of."""
    files = [path for name in ("config.json", *WEIGHTS) if (path := exported.directory / name).is_file()]
    text = TEMPLATES.get_template("model_card.md.j2").render(
        metadata=Markup(yaml.safe_dump(to_json(metadata(exported, evaluation)), sort_keys=False)),
        exported=exported,
        commands=commands,
        evaluation=evaluation,
        report=report,
        training=training_facts(source),
        digests={path.name: file_hash(path) for path in files},
    )
    write_whole(exported.directory / "README.md", text)


@dataclass(frozen=True)
class ServedFigures:
    """The figures that were measured at the draft length that is served."""

    target: str
    draft_length: int
    mean_acceptance_length: float
    speedup: float


@dataclass(frozen=True)
class CardMetadata:
    """The fields that the Hub reads at the top of a card."""

    tags: list[str]
    base_model: str | None = optional()
    base_model_relation: str | None = optional()
    draftsmith: ServedFigures | None = optional()


def metadata(exported: Exported, evaluation: Evaluation | None) -> CardMetadata:
    """Return the metadata of a card. A target that is a local path is no base model there."""
    figures = None
    if evaluation:
        result = served_result(evaluation)
        length, speedup = result.acceptance.mean_acceptance_length, result.speed.speedup
        figures = ServedFigures(exported.target, result.setting.draft_length, round(length, 3), round(speedup, 3))
    on_hub = not Path(exported.target).exists()
    return CardMetadata(
        ["speculative-decoding", "draftsmith", exported.kind],
        exported.target if on_hub else None,
        "adapter" if on_hub else None,
        figures,
    )


@dataclass(frozen=True)
class StoredEnvironment:
    """The part of a run's environment.json that a card tells."""

    data_hash: str
    git_commit: str | None
    template_hash: str | None
    data_written_by: str | None = None


def training_facts(source: Path) -> dict[str, str]:
    """Return what the run that a checkpoint stands in tells of its training; nothing where there is no run.

    A run whose files cannot be read is mentioned, and tells nothing.
    """
    run = real_path(source).parent.parent
    config, environment = run / "config.yaml", run / "environment.json"
    if not (config.is_file() and environment.is_file()):
        return {}
    try:
        settings, facts = read_config(config), read_typed(StoredEnvironment, environment)
    except UserError as error:
        notice(f"the card says nothing of the training: {run}: {error}")
        return {}
    return {
        "text": f"{settings.data.samples}, hash {facts.data_hash}, "
        + WRITTEN_BY.get(facts.data_written_by, WRITTEN_BY[None]),
        "steps": f"{real_path(source).name} of {settings.run.steps}",
        "seed": str(settings.run.seed),
        "commit": str(facts.git_commit),
        "chat template hash": str(facts.template_hash),
    }
