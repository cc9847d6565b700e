"""report.html of a run, of a folder of runs, or of an evaluation; report.md and report.json with the same beside it."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.progress import notice
from draftsmith.inference.measuring.results import Evaluation
from draftsmith.inference.measuring.sample_texts import SampleRound, SampleText
from draftsmith.inference.planning.costs import Costs
from draftsmith.models.storage.files import real_path, require_writable, write_json, write_whole
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.pages.figures import draw_plots
from draftsmith.recipes.pages.markdown import escaped, fenced
from draftsmith.recipes.pages.rendering import rendered
from draftsmith.recipes.pages.tables import Section, markdown
from draftsmith.recipes.report_data.contents import ReportData
from draftsmith.recipes.report_data.measured import checkpoint_names
from draftsmith.recipes.report_data.reading import as_yaml, read_report_data, report_data_of
from draftsmith.recipes.reports.acceptance import acceptance, calibration, diagnosis
from draftsmith.recipes.reports.comparison_table import compared, traffic
from draftsmith.recipes.reports.history import history
from draftsmith.recipes.reports.lossless import differences
from draftsmith.recipes.reports.serving import choices, judged, load_tests
from draftsmith.recipes.reports.speed import batches, speed
from draftsmith.recipes.reports.studies import planned, replayed
from draftsmith.recipes.reports.verdict import Verdict, verdict_of
from draftsmith.recipes.reports.what_if import Profile, cost_model, profiles_of, what_if

WORDS = {
    "Acceptance length": "Tokens emitted per round (one draft and its verification), the target's own token counted: "
    "1 + accepted / drafts.",
    "Speedup": "Tokens per second over those of plain decoding, both measured in turns in one process on the same "
    "prompts, reading the prompt included. Intervals: paired bootstrap over prompts (over batches above batch size 1), "
    "95 %, of medians over repeats. Of a run the fastest checkpoint is shown; a checkpoint, draft length or drafter "
    "that was chosen by the number that is shown is flattered by it a little.",
    "Plain steps a round": "What a round costs, in steps of plain decoding: tokens a round over speedup. A round pays "
    "where it emits more tokens than that.",
    "Identical outputs": "Outputs that equal plain decoding's token by token. Near tie: the first difference is "
    "between two tokens that the target holds equally likely up to rounding. Lossy: a mode that does not keep the "
    "target's law; its speed is no speedup of lossless decoding. Probabilistic verification keeps the distribution, "
    "not the tokens, so nothing is compared.",
    "Break-even": "The batch size at which the speedup falls to 1, on the line between the two measured sizes around "
    "it, over the logarithm of the batch size.",
}
UNREADABLE = "These files could not be read, and nothing in this report is of them:"


def build_report(folder: Path) -> Path:
    """Write figures/*.png, report.html, report.md and report.json into the folder; return the path of report.html.

    Raises `UserError` where the folder holds nothing that was measured.
    """
    data = read_report_data(folder)
    for line in data.unreadable:
        notice(f"left out of the report: {line}")
    require_writable(folder)
    verdict, profiles, name = verdict_of(data), profiles_of(data), real_path(folder).name
    sections = sections_of(data, profiles)
    figures = draw_plots([plot for section in sections for plot in section.plots], folder / "figures")
    write_json(folder / "report.json", as_json(data, verdict, profiles))
    write_whole(folder / "report.md", as_markdown(f"{name}: draftsmith report", data, verdict, sections, figures))
    path = folder / "report.html"
    write_whole(path, as_page(name, data, verdict, sections, figures, profiles))
    return path


def evaluation_markdown(evaluations: list[Evaluation], costs: list[Costs]) -> str:
    """Return the text of evaluation.md: the report of evaluations and costs, without its figures."""
    data = report_data_of(evaluations)
    data.costs = costs
    return as_markdown("Evaluation", data, verdict_of(data), sections_of(data, profiles_of(data)), {})


def sections_of(data: ReportData, profiles: list[Profile]) -> list[Section]:
    """Return the sections that there is data for, in order."""
    if not data.drafters:
        studies = [judged(data), planned(data), load_tests(data), what_if(profiles), replayed(data)]
        return [section for section in studies if section.has_data]
    sections = [
        compared(data),
        acceptance(data),
        speed(data),
        batches(data),
        choices(data),
        what_if(profiles),
        cost_model(data),
        traffic(data),
        history(data),
        judged(data),
        diagnosis(data),
        calibration(data),
        load_tests(data),
        replayed(data),
        planned(data),
        differences(data),
    ]
    return [section for section in sections if section.has_data]


def as_page(
    name: str,
    data: ReportData,
    verdict: Verdict,
    sections: list[Section],
    figures: dict[str, str],
    profiles: list[Profile],
) -> str:
    """Return one page that needs no other file and no network. `figures`: SVG elements by name."""
    return rendered(
        "report.html.j2",
        name=name,
        verdict=verdict,
        left_out=UNREADABLE,
        unreadable=data.unreadable,
        sections=sections,
        figures=figures,
        profiles=to_json(profiles),
        samples=data.samples,
        sample_source=lambda sample: ", ".join(filter(None, checkpoint_names(sample.drafter))),
        stories=[to_json(story_of(sample, data)) for sample in data.samples],
        words=WORDS,
        settings=settings_of(data),
    )


@dataclass(frozen=True)
class Story:
    """The rounds of a sample text as the page plays them; one time for every round, one for every plain step."""

    rounds: list[SampleRound]
    round_ms: float
    plain_ms: float


def story_of(sample: SampleText, data: ReportData) -> Story | None:
    """Return the rounds of a sample text with the times measured at batch size 1; None where there are none."""
    drafter = data.find(sample.drafter)
    for row in drafter.results if drafter else []:
        setting = row.setting
        if setting.batch_size == 1 and setting.temperature == sample.temperature and row.acceptance.num_drafts:
            return Story(sample.rounds, row.speed.milliseconds_per_round.total, row.plain_step_ms)
    return None


def settings_of(data: ReportData) -> list[tuple[str, str, str, str]]:
    """Return what each run, or the evaluation, was made with: its name, draft vocabulary, environment and config."""
    if not data.runs:
        return [("Measurement", "", as_yaml(to_json(data.environment)), "")]  # of one process
    return [(f"{run.name} ({run.kind})", run.vocabulary, run.environment, run.config) for run in data.runs]


def as_markdown(
    title: str, data: ReportData, verdict: Verdict, sections: list[Section], figures: dict[str, str]
) -> str:
    facts = "\n".join(f"* {fact.name}: {fact.value} ({escaped(fact.note)})" for fact in verdict.facts)
    parts = [f"# {escaped(title)}", f"**{escaped(verdict.title)}**", facts, escaped(verdict.text)]
    if verdict.broken:
        parts.append("Output differs from plain decoding: speculation is broken there, and its speed does not count.")
        parts.append("\n".join(f"* {escaped(line)}" for line in verdict.broken))
    parts += [f"> {escaped(line)}" for line in verdict.caveats]
    if data.unreadable:
        parts += [UNREADABLE, "\n".join(f"* {escaped(line)}" for line in data.unreadable)]
    for section in sections:
        parts += [f"## {section.title}", section.lead, *map(escaped, section.notes)]
        parts += [markdown(table) for table in [*section.tables, *section.folded]]
        parts += [f"![{plot.caption}](figures/{plot.name}.png)" for plot in section.plots if plot.name in figures]
    parts.append("## What the words mean")
    parts += [f"**{word}**: {meaning}" for word, meaning in WORDS.items()]
    parts.append("## Settings")
    for name, vocabulary, environment, config in settings_of(data):
        parts += [f"### {escaped(name)}", escaped(vocabulary), fenced(f"{environment}\n{config}", "yaml")]
    return "\n\n".join(filter(None, parts)) + "\n"


def as_json(data: ReportData, verdict: Verdict, profiles: list[Profile]) -> dict[str, object]:
    """Return what the page says, for programs: the rows are those of evaluation.json."""
    return {
        "target": data.target,
        "environment": to_json(data.environment),
        "verdict": to_json(verdict),
        "leading": to_json(data.leader[1]) if data.drafters else None,
        "drafters": [
            {
                "name": drafter.name,
                "kind": drafter.kind,
                "note": drafter.note,
                "trained": drafter.is_trained,
                "certificate": to_json(drafter.evaluation.certificate),
                "results": to_json(drafter.results),
            }
            for drafter in data.drafters
        ],
        "profiles": to_json(profiles),
        **({"costs": to_json(data.costs)} if data.costs else {}),
        **data.contents,
        **({"unreadable": data.unreadable} if data.unreadable else {}),
    }
