"""report.html of a run, of a folder of runs, or of an evaluation; report.md and report.json with the same beside it."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FunctionLoader, StrictUndefined

from draftsmith.models.files import require_writable
from draftsmith.recipes.reports.contents import Measured, checkpoint_names, measured_of, read_measured
from draftsmith.recipes.reports.drawing import Drawn, draw_figures
from draftsmith.recipes.reports.panel import Profile, profiles
from draftsmith.recipes.reports.sections import Section, sections
from draftsmith.recipes.reports.tables import markdown
from draftsmith.recipes.reports.verdict import Verdict, verdict

WORDS = {
    "Acceptance length": "Tokens emitted per round (one draft and its verification), the target's own token counted: "
    "1 + accepted / drafts.",
    "Speedup": "Tokens per second over those of plain decoding, both measured in turns in one process on the same "
    "prompts, reading the prompt included. Intervals: paired bootstrap over prompts (over batches above batch size 1), "
    "95 %, of medians over repeats. Of a run the fastest checkpoint is shown; a checkpoint, draft length or drafter "
    "that was chosen by the number that is shown is flattered by it a little.",
    "Step cost ratio": "Acceptance length over speedup: what a round costs, in steps of plain decoding. The acceptance "
    "length has to exceed it.",
    "Identical outputs": "Outputs that equal plain decoding's token by token. Near tie: the first difference is "
    "between two tokens that the target holds equally likely up to rounding. Lossy: a mode that does not keep the "
    "target's law; its speed is no speedup of lossless decoding. Probabilistic verification keeps the distribution, "
    "not the tokens, so nothing is compared.",
    "Break-even": "The batch size at which the speedup falls to 1, on the line between the two measured sizes around "
    "it, over the logarithm of the batch size.",
}


def build_report(folder: Path) -> Path:
    """Write figures/*.png, report.html, report.md and report.json into the folder.

    Raises `UserError` where the folder holds nothing that was evaluated.
    """
    measured = read_measured(folder)
    require_writable(folder)
    figures = draw_figures(measured, folder / "figures")
    found, shapes = verdict(measured), profiles(measured)
    with_data = [one for one in sections(measured, shapes) if one.has_data(set(figures))]
    (folder / "report.json").write_text(json.dumps(as_json(measured, found, shapes), indent=2) + "\n")
    (folder / "report.md").write_text(
        as_markdown(f"{folder.resolve().name}: draftsmith report", measured, found, with_data, figures),
        encoding="utf-8",
    )
    path = folder / "report.html"
    path.write_text(as_page(folder.resolve().name, measured, found, with_data, figures, shapes), encoding="utf-8")
    return path


def evaluation_markdown(contents: list[dict[str, Any]], costs: list[dict[str, Any]]) -> str:
    """evaluation.md: the report of contents of evaluation.json and costs.json files, without its figures."""
    measured = measured_of(contents)
    measured.extras = {"costs": costs} if costs else {}
    with_data = [one for one in sections(measured, profiles(measured)) if one.has_data(set())]
    return as_markdown("Evaluation", measured, verdict(measured), with_data, {})


def as_page(
    name: str,
    measured: Measured,
    found: Verdict,
    with_data: list[Section],
    figures: dict[str, Drawn],
    shapes: list[Profile],
) -> str:
    """One page that needs no other file and no network."""
    environment = Environment(
        loader=FunctionLoader(page_file),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        name=name,
        verdict=found,
        sections=with_data,
        figures=figures,
        profiles=[profile.to_json() for profile in shapes],
        samples=measured.samples,
        sample_source=lambda sample: ", ".join(filter(None, checkpoint_names(sample["drafter"]))),
        words=WORDS,
        settings=settings_of(measured),
        style=page_file("report.css"),
        script=page_file("panel.js"),
    )


def page_file(name: str) -> str:
    return resources.files("draftsmith.recipes.reports").joinpath("page", name).read_text(encoding="utf-8")


def settings_of(measured: Measured) -> list[dict[str, str]]:
    """What each run, or each evaluation, was made with."""
    if not measured.runs:
        first = measured.contenders[0]  # all were measured in one process
        return [{"name": "Evaluation", "vocabulary": "", "environment": as_yaml(first.environment), "config": ""}]
    return [
        {
            "name": f"{run.name} ({run.kind})",
            "vocabulary": run.vocabulary and f"{run.vocabulary[0].upper()}{run.vocabulary[1:]}.",
            "environment": as_yaml(run.environment),
            "config": run.config,
        }
        for run in measured.runs
    ]


def as_yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False)


def as_markdown(
    title: str, measured: Measured, found: Verdict, with_data: list[Section], figures: dict[str, Drawn]
) -> str:
    parts = [f"# {title}", f"**{found.title}**", found.text]
    if found.broken:
        parts.append("Output differs from plain decoding: speculation is broken there, and its speed does not count.")
        parts.append("\n".join(f"* {line}" for line in found.broken))
    parts += [f"> {line}" for line in found.caveats]
    for section in with_data:
        parts += [f"## {section.title}", section.lead, *section.notes]
        parts += [markdown(table).strip() for table in [*section.tables, *section.folded]]
        parts += [
            f"![{figures[name].caption}](figures/{figures[name].path.name})"
            for name in section.figures
            if name in figures
        ]
    parts.append("## What the words mean")
    parts += [f"**{word}**: {meaning}" for word, meaning in WORDS.items()]
    parts.append("## Settings")
    for one in settings_of(measured):
        parts += [f"### {one['name']}", one["vocabulary"], f"```yaml\n{one['environment']}\n{one['config']}```"]
    return "\n\n".join(filter(None, parts)) + "\n"


def as_json(measured: Measured, found: Verdict, shapes: list[Profile]) -> dict[str, Any]:
    """What the page says, for programs: the rows are those of evaluation.json."""
    return {
        "target": measured.target,
        "environment": measured.contenders[0].environment,
        "verdict": found.to_json(),
        "leading": measured.leading,
        "drafters": [
            {
                "name": one.name,
                "kind": one.kind,
                "note": one.note,
                "trained": one.trained,
                "certificate": one.certificate,
                "results": one.results,
            }
            for one in measured.contenders
        ],
        "profiles": [profile.to_json() for profile in shapes],
        **measured.extras,
    }
