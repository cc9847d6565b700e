"""The report of a synthetic tree of runs: what it must say, and that it stands alone."""

import html
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from load_tests import load_test, stage
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.layout_engine import ConstrainedLayoutEngine
from reports import (
    ENVIRONMENT,
    TEMPERATURES,
    choice_content,
    plan_content,
    replay_content,
    result,
    write_comparison,
    write_grid,
    write_results,
    write_run,
    write_samples,
)
from rich.console import Console

from draftsmith.inference.measuring.results import Evaluation, upgraded
from draftsmith.inference.planning.costs import Costs, HeldOutErrors, RoundTimes
from draftsmith.models.errors import UserError
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.recipes.pages.figures import DOTS_PER_INCH, HEIGHT, WIDTH, legend, save_plot
from draftsmith.recipes.pages.tables import ratio_text
from draftsmith.recipes.report_data.measured import checkpoint_names
from draftsmith.recipes.report_data.reading import read_report_data
from draftsmith.recipes.reports import report
from draftsmith.recipes.reports.acceptance import acceptance
from draftsmith.recipes.reports.comparison_table import (
    TOO_FEW,
    by_setting,
    comparison_table,
    kinds_of_traffic,
    ranking_table,
    traffic,
)
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.reports.terminal import print_evaluations, print_summary
from draftsmith.recipes.reports.verdict import verdict_of
from draftsmith.recipes.reports.what_if import profiles_of, speedups
from draftsmith.train.run_folder.checkpoint import checkpoint_step
from draftsmith.train.run_folder.run_folder import link_best


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: eagle3 pays, medusa does not quite, draft_model costs more than it brings."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    write_run(folder / "eagle3", keep=0.75, draft_ms=4.0)
    write_run(folder / "medusa", keep=0.4, draft_ms=1.0)
    write_run(folder / "draft_model", keep=0.7, draft_ms=21.0)
    (folder / "samples").mkdir()  # neither a run nor in the way
    write_samples(folder)
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> str:
    return build_report(runs).read_text()


def test_report_stands_alone(runs: Path, page: str) -> None:
    figures = sorted(path.stem for path in (runs / "figures").iterdir())
    assert figures == sorted(re.findall(r'<svg [^>]*data-figure="(\w+)"', page))
    assert len(figures) == 6
    text = re.sub(r"""xmlns(:xlink)?="[^"]*"|"http://www.w3.org/2000/svg"|(url\(|href=")#""", "", page)
    assert not re.search(r"""(src|href)=|url\(|@import|<script [^t]|<link|https?://""", text)


def test_verdict_and_numbers(page: str) -> None:
    best = result(0.75, 4.0)
    low, high = best["speedup_ci95"]
    assert f"<dd>{best['speedup']:.2f}×<small>95 %: {low:.2f} to {high:.2f}</small></dd>" in page
    assert "tiny_target on Abacus 9000" in page
    for drafter in ("eagle3", "medusa", "draft_model", "ngram", "none"):
        assert f">{drafter}<small>" in page
    assert f"<h1>{best['speedup']:.2f}× at batch size 1: use eagle3.</h1>" in page
    assert "Lossless: 15 of 16 compared outputs are identical to plain decoding&#39;s; where they differ" in page
    assert f"{best['mean_acceptance_length']:.2f}</td>" in page
    assert "4.00 / 10.00 / 1.00" in page
    assert "15/16, 1 near tie" in page
    difference = ["3", "17", "71 → 61", "0", "0.0069", "0.0069", "0.28", "near tie"]
    assert difference == re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index("near tie up to") :])[:8]
    assert ">not compared<small>probabilistic</small></td>" in page
    assert "measured beside eagle3, step 400" in page
    assert "abc1234" in page
    assert "No trained drafter is measurably faster" not in page
    assert "speculation is broken" not in page


@pytest.fixture
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take two seconds."""
    monkeypatch.setattr(report, "draw_plots", lambda plots, folder: {})


@pytest.mark.usefixtures("_no_figures")
def test_says_when_nothing_is_faster(tmp_path: Path) -> None:
    page = build_report(write_run(tmp_path / "medusa", keep=0.3, draft_ms=6.0)).read_text()
    assert "No trained drafter is measurably faster than plain decoding here: no 95 % interval lies above 1.0." in page
    assert "At 2 of 2 settings no trained drafter beats plain decoding and the drafters that need no training." in page
    assert f"<h1>{result(0.25, 0.3)['speedup']:.2f}× at batch size 1: use ngram.</h1>" in page


@pytest.mark.usefixtures("_no_figures")
def test_divergence_stands_out_and_is_no_headline(tmp_path: Path) -> None:
    write_run(tmp_path / "eagle3", keep=0.9, draft_ms=4.0, divergences=3)
    write_run(tmp_path / "medusa", keep=0.6, draft_ms=1.0)
    page = build_report(tmp_path).read_text()
    assert "speculation is broken" in page
    assert 'alarm">12/16, 1 near tie, 3 DIVERGED<small>greedy</small></td>' in page
    assert f"<h1>{result(0.6, 1.0)['speedup']:.2f}× at batch size 1: use medusa.</h1>" in page
    assert "1: use ngram.</h1>" in build_report(tmp_path / "eagle3").read_text()  # the run's other drafter is broken


@pytest.mark.usefixtures("_no_figures")
def test_a_lossy_mode_is_labelled_and_no_headline(tmp_path: Path) -> None:
    write_run(tmp_path / "eagle3", keep=0.9, draft_ms=1.0)
    check = {"checked": 0, "identical": 0, "near_tie_divergences": 0, "divergences": 0, "first_differences": []}
    write_comparison(tmp_path, 1, result={"verification_mode": "typical", "lossless": check})
    page = build_report(tmp_path).read_text()
    assert 'alarm">LOSSY (typical)<small>' in page
    assert 'good">' not in page[page.index("<main>") : page.index('id="history"')]
    assert "There is no speedup to report" in page
    console = Console(width=120, record=True, file=io.StringIO())
    print_summary(tmp_path, console)
    assert "LOSSY" in console.export_text()
    assert acceptance(read_report_data(tmp_path)).plots == []  # which show sound results, and there are none


@pytest.mark.usefixtures("_no_figures")
@pytest.mark.parametrize("flagged", [False, True])
def test_what_training_predicts_stands_beside_the_decoder(flagged: bool, tmp_path: Path) -> None:
    write_run(tmp_path / "eagle3", keep=0.9, draft_ms=1.0)
    rates = [0.97, 0.888, 0.777, None]
    predicted = {"mean_acceptance_length": 4.567, "conditional_acceptance_rates": rates}
    predicted["per_position_acceptance_rates"] = [0.97, 0.86, 0.67, 0.0]
    gap = {"difference": -0.47, "ci95": [-0.6, -0.3], "flagged": flagged}
    write_comparison(tmp_path, 1, result={"teacher_forced": predicted, "teacher_forced_gap": gap})
    page = build_report(tmp_path).read_text()
    cells = ["4.10 / 4.57", "90.0 % / 97.0 %", "90.0 % / 88.8 %", "90.0 % / 77.7 %", "90.0 % / –"]
    assert cells == re.findall(r"<td[^>]*>([^<]* / [^<]*)</td>", page[page.index("as training predicts") :])[:5]
    assert page.count("-0.47 [-0.60, -0.30]") == 1
    assert ('alarm">-0.47' in page) == flagged
    console = Console(width=120, record=True, file=io.StringIO())
    print_summary(tmp_path, console)
    for text in (page, console.export_text()):
        assert text.count("that training predicts on the same texts") == flagged


@pytest.mark.usefixtures("_no_figures")
def test_domains_stand_below_their_setting(tmp_path: Path) -> None:
    counters = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"), 9)
    counters["draft_acceptance_rate"] = 1.0
    domains = {
        "code": {
            **{
                **counters,
                "num_prompts": 12,
                "mean_acceptance_length": 3.456,
                "mean_acceptance_length_ci95": [3.111, 3.777],
            },
            **{"speedup": 2.344, "speedup_ci95": [2.111, 2.555]},
        },
        "": {**counters, "num_prompts": 1, "mean_acceptance_length": 1.234, "mean_acceptance_length_ci95": None},
    }
    write_run(tmp_path / "eagle3", keep=0.9, draft_ms=1.0)
    spans = {"tool_call": {**domains[""], "num_emitted_tokens": 77}, "answer": {**domains[""]}}
    write_comparison(tmp_path, 1, result={"domains": domains, "spans": spans})
    page = build_report(tmp_path).read_text()
    assert ">code (12 prompts)</th>" in page
    assert ">3.46 [3.11, 3.78], 2.34× [2.11, 2.56]</td>" in page
    console = Console(width=120, record=True, file=io.StringIO())
    print_summary(tmp_path, console)
    printed = console.export_text()
    assert "domain (1 prompt)" in printed
    assert ">tool call</th>" in page
    assert "77 tokens" in page
    assert printed.count("1.23") == 3  # once by domain, twice by kind of span; not in the row of plain decoding


def kind(accepted: int, interval: list[float] | None, rounds: int = 100, **speedup: Any) -> dict[str, Any]:
    """The counters of a kind of text with 100 drafts of 4 tokens, of which each time the first ones were accepted."""
    histogram = [100 if number == accepted else 0 for number in range(5)]
    return {
        "num_prompts": 7, "num_drafts": 100, "num_draft_tokens": 400, "num_accepted_tokens": 100 * accepted,
        "num_emitted_tokens": 100 + 100 * accepted, "mean_acceptance_length": 1 + accepted,
        "mean_acceptance_length_ci95": interval, "draft_acceptance_rate": accepted / 4, "num_rounds": rounds,
        "acceptance_histogram": histogram, **speedup,
    }  # fmt: skip


@pytest.mark.usefixtures("_no_figures")
def test_where_speculation_pays(tmp_path: Path) -> None:
    """A round costs (1 + 10 + 1) / 10 = 1.2 plain steps here, which a kind's tokens a round must exceed for sure."""
    write_run(tmp_path / "eagle3", keep=0.9, draft_ms=1.0)
    domains = {"chat": kind(2, [2.9, 3.1], speedup=1.9, speedup_ci95=[0.9, 2.9])}
    spans = {
        "code": kind(4, [4.8, 5.2]),
        "answer": kind(0, [1.0, 1.1]),
        "thinking": kind(4, None),
        "tool_call": kind(2, [2.8, 3.2], rounds=200),
    }
    write_comparison(tmp_path, 1, result={"domains": domains, "spans": spans})
    data = read_report_data(tmp_path)
    kinds = {one.name: one for one in kinds_of_traffic(data)}
    assert [one.verdict for one in kinds.values()] == [TOO_FEW, "pays", "does not pay", TOO_FEW, "pays"]
    assert (kinds["chat"].measured, kinds["chat"].speedup) == (True, 1.9)
    code = kinds["code (span)"]
    assert code.speedup == pytest.approx(5 / 1.2)
    assert code.speedup_ci95 == pytest.approx((4.8 / 1.2, 5.2 / 1.2))
    tool_call = kinds["tool call (span)"]  # half of its rounds had no draft
    assert tool_call.tokens_a_round == 2.0
    assert tool_call.speedup_ci95 == pytest.approx((1.9 / 1.2, 2.1 / 1.2))
    section = traffic(data)
    assert section.tables[0].column("best draft length") == ["–", "4", "off", "–", "2"]
    assert section.notes == [
        "Speculation pays in code (span), tool call (span). It does not pay in answer (span). "
        "Too little was measured of chat, thinking (span)."
    ]
    assert "Speculation pays in code (span)" in build_report(tmp_path).read_text()


def test_a_speedup_without_interval_decides_nothing(tmp_path: Path) -> None:
    """Too little was timed for one: the page, its figures and the console say the ratio, and no more."""
    write_run(tmp_path / "eagle3", keep=0.9, draft_ms=1.0)
    for path in tmp_path.glob("eagle3/checkpoints/*/evaluation*.json"):
        content = json.loads(path.read_text())
        rows = [{**row, "speedup_ci95": None, "mean_acceptance_length_ci95": None} for row in content["results"]]
        path.write_text(json.dumps({**content, "results": rows}))
    page = build_report(tmp_path).read_text()
    assert "Too little was timed to tell at batch size 1: the best drafter, eagle3, reaches" in page
    assert "too few batches or repeats for an interval" in page
    assert 'good">' not in page
    assert 'bad">' not in page
    console = Console(width=120, record=True, file=io.StringIO())
    print_summary(tmp_path, console)
    assert "eagle3" in console.export_text()


@pytest.mark.usefixtures("_no_figures")
def test_a_certificate_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "eagle3", keep=0.9, draft_ms=1.0)
    check = {"checked": 4, "identical": 4, "near_tie_divergences": 0, "divergences": 0, "first_differences": []}
    test = {"num_tokens": 500, "chi_square": 9.0, "degrees": 8}
    sampled = {"block": {**test, "p_value": 0.31}, "typical": {**test, "p_value": 1e-9}}
    certificate = {"greedy": {"batch_size_8": check}, "sampled": sampled, "passed": True, "control_found": True}
    write_comparison(tmp_path, 1, certificate=certificate)
    page = build_report(tmp_path).read_text()
    expected = "(greedy batch size 8: 4/4; sampled block p = 0.31, typical (lossy, the control) p = 1e-09)"
    assert f"Certificate of losslessness, eagle3: output is the target&#39;s {expected}" in page


def test_sample_text_is_escaped_and_coloured(page: str) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\ndef f(a):\n</span>" in page
    assert '<span class="accepted">    if a &lt;b&gt;&amp;</span> 1:\n</span>' in page
    assert "eagle3, step 400, temperature 0.0,\n12 tokens in 3 rounds" in page


@pytest.mark.parametrize(("divergences", "best"), [(0, "step 200"), (1, "step 400")])
def test_best_checkpoint_is_the_fastest_that_is_sound(divergences: int, best: str, tmp_path: Path) -> None:
    """As the run's own link has it."""
    run = write_run(tmp_path / "eagle3", keep=0.75, draft_ms=4.0)
    write_results(run / "checkpoints/step-000200/evaluation.json", [result(0.95, 4.0, divergences=divergences)])
    link = link_best(run)
    assert link is not None
    assert checkpoint_step(link) == int(best.split()[1])
    assert read_report_data(run).all_drafters[0].note == best


def test_comparison_tables(runs: Path) -> None:
    blocks = by_setting(read_report_data(runs).all_drafters)
    assert len(blocks) == len(TEMPERATURES)
    for setting, block in blocks.items():
        table = comparison_table(setting, block)
        assert table.column("drafter") == ["eagle3", "medusa", "draft_model", "ngram", "none"]
        plain = [table.column(heading)[4] for heading in ("acceptance length", "speedup", "tokens/s")]
        assert plain == ["1.00", "1.00×", "100.0"]


def test_a_comparison_takes_the_place_of_single_evaluations(tmp_path: Path) -> None:
    """Measured in one process on other prompts, it may turn the order of the runs around."""
    for kind in ("eagle3", "medusa"):
        write_run(tmp_path / kind, keep=0.75, draft_ms=4.0)
    measured = {"eagle3": result(0.3, 4.0), "medusa": result(0.7, 1.0), "ngram": result(0.2, 0.3)}
    for number, (kind, row) in enumerate(measured.items(), 1):
        name = kind if kind == "ngram" else str(tmp_path / kind / "checkpoints/step-000200")
        folder = tmp_path / f"comparison/{number}-{Path(name).name}"
        folder.mkdir(parents=True)
        write_results(folder / "evaluation.json", [row], name, kind)
    drafters = read_report_data(tmp_path).all_drafters
    assert [(drafter.name, drafter.note) for drafter in drafters] == [
        ("medusa", "step 200"),
        ("eagle3", "step 200"),
        ("ngram", ""),
    ]
    page = build_report(tmp_path).read_text()
    assert f"<h1>{measured['medusa']['speedup']:.2f}× at batch size 1: use medusa.</h1>" in page


def test_what_an_engine_measured_later_takes_no_comparisons_place(tmp_path: Path) -> None:
    """Its folder holds no rows of draftsmith's decoder; so the newest comparison that does stays, without runs too."""
    for number, (kind, keep) in enumerate((("ngram", 0.7), ("suffix", 0.2)), 1):
        folder = tmp_path / f"final/{number}-{kind}"
        folder.mkdir(parents=True)
        write_results(folder / "evaluation.json", [result(keep, 0.3)], kind, kind)
    (tmp_path / "final/evaluation.md").write_text("")
    (tmp_path / "judged").mkdir()
    (tmp_path / "judged/evaluation.md").write_text("newer")
    (tmp_path / "config.yaml").write_text("drafter: {kind: medusa}")
    assert [drafter.name for drafter in read_report_data(tmp_path).all_drafters] == ["ngram", "suffix"]


def test_an_export_takes_no_comparisons_place(tmp_path: Path) -> None:
    """It lies in a quickstart's folder, with the evaluation of its drafter, and is newer than the comparison."""
    for folder, kind in (("comparison/1-ngram", "ngram"), ("export", "eagle3")):
        (tmp_path / folder).mkdir(parents=True)
        write_results(tmp_path / folder / "evaluation.json", [result(0.7, 0.3)], kind, kind)
    (tmp_path / "comparison/evaluation.md").write_text("")
    (tmp_path / "export/config.json").write_text("{}")
    (tmp_path / "export/evaluation.md").write_text("newer")
    (tmp_path / "config.yaml").write_text("drafter: {kind: eagle3}")
    assert [drafter.name for drafter in read_report_data(tmp_path).all_drafters] == ["ngram"]


def test_sections_are_of_the_row_that_leads(tmp_path: Path) -> None:
    """A schedule leads, and the chains of its longest length stand before it: its own figures are shown."""
    rows = [result(0.5, 1.0), result(0.8, 1.0) | {"schedule": {"draft_lengths": [[1, 4], [8, 0]]}}]
    write_results(tmp_path / "evaluation.json", rows, "ngram", "ngram")
    data = read_report_data(tmp_path)
    ((_, shown),) = data.at_leading_setting()
    assert shown is data.leader[1]
    assert shown.setting.schedule


def test_what_was_measured_elsewhere_stands_apart(tmp_path: Path) -> None:
    """No table, and no figure, holds speeds of two machines: each has blocks with a plain row of its own."""
    write_run(tmp_path / "eagle3", keep=0.75, draft_ms=4.0)
    run = write_run(tmp_path / "medusa", keep=0.4, draft_ms=1.0)
    assert len(by_setting(read_report_data(tmp_path).all_drafters)) == len(TEMPERATURES)
    for path in run.glob("checkpoints/*/evaluation.json"):
        content = json.loads(path.read_text())
        content["environment"]["device"] = "Slide rule"
        path.write_text(json.dumps(content))
    blocks = by_setting(read_report_data(tmp_path).all_drafters)
    tables = [comparison_table(setting, block) for setting, block in blocks.items()]
    names = [["eagle3", "ngram", "none"]] * 2 + [["medusa", "none"]] * 2
    assert [table.column("drafter") for table in tables] == names
    assert [next(name for name in ("Abacus", "Slide rule") if name in block) for block in blocks] == [
        *["Abacus"] * 2,
        *["Slide rule"] * 2,
    ]
    assert "medusa was measured elsewhere (Slide rule" in build_report(tmp_path).read_text()


def test_tables_in_the_terminal(runs: Path) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    print_summary(runs, console)
    content = {"target": "t", "drafter": "runs/[x]/best", "drafter_kind": "eagle3", "environment": ENVIRONMENT}
    content |= {"results": [result(0.75, 4.0, divergences=2)]}
    print_evaluations([from_json(Evaluation, upgraded(content))], console)
    text = console.export_text()
    assert f"{result(0.75, 4.0)['speedup']:.2f}×" in text
    assert "reference" in text
    assert "[x], best" in text
    assert "2 DIVERGED" in text


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        build_report(tmp_path / "missing")
    with pytest.raises(UserError, match="holds no run"):
        build_report(tmp_path)
    run = write_run(tmp_path / "eagle3", keep=0.5, draft_ms=1.0)
    for path in run.glob("checkpoints/*/evaluation.json"):
        path.unlink()
    with pytest.raises(UserError, match="evaluated yet"):
        build_report(run)
    assert not (run / "report.html").exists()


def test_a_folder_with_a_page_of_its_own_names_it(tmp_path: Path) -> None:
    (tmp_path / "plan.html").write_text("a plan for a GPU")
    with pytest.raises(UserError, match="holds a page already, plan.html"):
        build_report(tmp_path)


@pytest.mark.usefixtures("_no_figures")
def test_an_evaluation_is_reported_without_a_run(tmp_path: Path) -> None:
    write_grid(tmp_path)
    page = build_report(tmp_path).read_text()
    best = max(json.loads((tmp_path / "report.json").read_text())["drafters"][0]["results"], key=lambda r: r["speedup"])
    title = f"{best['speedup']:.2f}× at batch size 1, break-even near batch size 9: use eagle3 with draft length 2."
    assert f"<h1>{title}</h1>" in page
    written = (tmp_path / "report.md").read_text()
    assert f"**{title}**" in written
    assert f"| eagle3 | draft length 2 | {ratio_text(best['speedup'], best['speedup_ci95'])} |" in written
    assert "Predicted speedup of eagle3" in written


def test_what_other_commands_left_is_shown(tmp_path: Path) -> None:
    """A choice beside the speedup measured for it, and a load test with its figure."""
    write_grid(tmp_path)
    predicted = {"batch_size": 1, "draft_length": 2, "tree_nodes": None, "acceptance_length": 1.9, "speedup": 1.55}
    predicted["fixed_batch_speedup"] = 1.48
    choice = choice_content("eagle3/checkpoints/step-000400", 2, predicted)
    stages = [stage(2, name, 90.0, 1.0, within_sla=name != "on") for name in ("off", "on", "scheduled")]
    load = to_json(load_test(choice["drafter"], stages, "no clear gain", tpot_limit=2.5))
    (tmp_path / "1-eagle3/choice.json").write_text(json.dumps(choice))
    (tmp_path / "load.json").write_text(json.dumps(load))
    page = build_report(tmp_path).read_text()
    section = page[page.index('id="choice"') :]
    row = json.loads((tmp_path / "1-eagle3/evaluation.json").read_text())["results"][1]
    cells = ["eagle3", "1", "draft length 2", "1.90", "1.55×", "1.48×", ratio_text(row["speedup"], row["speedup_ci95"])]
    assert cells == re.findall(r"<td[^>]*>([^<]*)</td>", section)[: len(cells)]
    assert "2 tokens from 1 on, no tokens from 8 on" in section
    assert 'data-figure="load"' in page
    assert "1.00 (SLA missed)" in page
    assert "1.0/2.0/–" in page  # 48 requests tell no p99
    assert (tmp_path / "figures/load.png").is_file()


@pytest.mark.parametrize("drafts", [1000, 250])
def test_rounds_without_a_draft_are_told_of(drafts: int, tmp_path: Path) -> None:
    row = {**result(0.6, 1.0), "num_drafts": drafts, "num_rounds": 1000}
    write_results(tmp_path / "evaluation.json", [row], "ngram", "ngram")
    page = build_report(tmp_path).read_text()
    assert ("ngram drafted in 25 % of its rounds" in page) == (drafts < 1000)
    speed = page[page.index("A round, phase by phase") :]
    assert f"{1 + row['num_accepted_tokens'] / 1000:.2f}" in speed[: speed.index("</table>")]
    assert "none drafted in" not in page


@pytest.mark.parametrize(
    ("drafter", "named"),
    [
        ("suffix+runs/eagle3/best", ("suffix+eagle3", "best")),
        ("runs/small/best+runs/large/checkpoints/step-000040", ("small+large", "step 40")),
        ("/data/c++/runs/eagle3/best", ("eagle3", "best")),  # no cascade
        ("ngram", ("ngram", "")),
    ],
)
def test_drafters_have_short_names(drafter: str, named: tuple[str, str]) -> None:
    assert checkpoint_names(drafter) == named


@pytest.mark.usefixtures("_no_figures")
def test_a_cascade_beside_its_trained_half_has_its_own_name(tmp_path: Path) -> None:
    half = str(tmp_path / "hydra/checkpoints/step-000454")
    earlier = str(tmp_path / "hydra/checkpoints/step-000227")
    for number, (drafter, keep) in enumerate({half: 0.6, earlier: 0.3, f"suffix+{half}": 0.8}.items(), 1):
        path = tmp_path / f"{number}-x/evaluation.json"
        path.parent.mkdir()
        write_results(path, [result(keep, 1.0)], drafter, "cascade" if "+" in drafter else "hydra")
        (path.parent / "choice.json").write_text(json.dumps(choice_content(drafter, 4)))
    data = read_report_data(tmp_path)
    names = ["suffix+hydra", "hydra, step 454", "hydra, step 227"]
    assert [drafter.name for drafter in data.drafters] == names
    choices = [data.choice_for(drafter) for drafter in data.drafters]
    assert [choice.drafter for choice in choices if choice] == [f"suffix+{half}", half, earlier]
    assert verdict_of(data).title.endswith("use suffix+hydra.")
    assert [profile.name for profile in profiles_of(data)] == names


@pytest.mark.usefixtures("_no_figures")
def test_low_acceptance_is_explained_wherever_it_was_measured(tmp_path: Path) -> None:
    """Not only at the setting that the report leads with; and where nothing is found, that is said."""
    finding = {"cause": "decay with depth", "measured": {"rate": 0.25}, "evidence": "it falls", "mend": "unroll"}
    behind = [
        {**result(0.3, 4.0, length=length), "diagnosis": [{**finding, "cost": cost, "evidence": f"costs {cost}"}]}
        for length, cost in ((4, 0.5), (5, 0.7))
    ]
    unexplained = {**result(0.2, 1.0, length=2), "diagnosis": []}
    for number, (name, rows) in enumerate({"a": [result(0.9, 1.0), *behind], "b": [unexplained]}.items()):
        (tmp_path / f"{number}-{name}").mkdir()
        write_results(tmp_path / f"{number}-{name}/evaluation.json", rows, f"{name}/best", "eagle3")
    page = build_report(tmp_path).read_text()
    section = page[page.index('id="diagnosis"') :]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section)[:5]
    where = "<small>temperature 0, draft length 4, held_out and 1 other setting</small>"
    assert cells == [f"a{where}", "decay with depth", "rate 0.25", "costs 0.7", "unroll"]
    assert "b, at temperature 0, draft length 2, held_out: acceptance is low, and nothing wrong was found" in section


@pytest.mark.usefixtures("_no_figures")
def test_a_report_without_costs_says_what_measures_them(tmp_path: Path) -> None:
    """And a run shows the texts of its best checkpoint where nothing else has left some."""
    run = write_run(tmp_path / "eagle3", keep=0.75, draft_ms=4.0)
    write_samples(tmp_path)
    (tmp_path / "samples.json").rename(run / "checkpoints/step-000400/samples.json")
    page = build_report(run).read_text()
    checkpoint = run / "checkpoints/step-000400"
    assert f"draftsmith plan --target models/tiny_target --drafter {checkpoint} --out FOLDER/plan" in page
    assert 'id="samples"' in page
    costs = Costs("", "", str(run / "best"), "eagle3", {"first: pass": 1.0}, {"pass": 10.0}, host=0.0)
    costs = replace(costs, held_out=HeldOutErrors(settings=1), fitted_on=[RoundTimes(4, 1, 64, 4, False, 1, 10, 11)])
    (run / "costs.json").write_text(json.dumps(to_json(costs)))
    page = build_report(run).read_text()
    assert "draftsmith plan --target" not in page
    assert "the median error is" in page[page.index('id="cost-model"') :]


@pytest.mark.usefixtures("_no_figures")
@pytest.mark.parametrize(
    ("name", "title", "shown"),
    [
        ("load", "Under load: no clear gain.", "goodput requests/s"),
        ("plan", "Planned, not measured. medusa.", "acceptance length to break even"),
        ("replay", "Replayed, not timed: medusa emits up to 2.00 tokens a round, with draft length 4.", "No time was"),
    ],
)
def test_a_study_alone_has_a_report(name: str, title: str, shown: str, tmp_path: Path) -> None:
    """It was refused: the folder holds no run and no evaluation."""
    stages = [stage(1, contender, 10.0, 5.0) for contender in ("off", "on", "scheduled")]
    load = to_json(load_test("medusa", stages, "no clear gain"))
    content = {"load": load, "plan": plan_content("medusa"), "replay": replay_content("medusa")}[name]
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    page = build_report(tmp_path).read_text()
    assert f"<h1>{title}</h1>" in page
    assert shown in page
    assert title.split(".")[0] in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["verdict"]["title"] == title


@pytest.mark.usefixtures("_no_figures")
def test_the_panel_of_a_plan_shows_what_the_plan_expects(tmp_path: Path) -> None:
    costs = Costs("", "", "medusa", "medusa", {"first: pass": 2.0}, {"pass": 10.0}, host=0.0)
    costs = replace(
        costs,
        held_out=HeldOutErrors(settings=1),
        fitted_on=[RoundTimes(4, size, 64, 4, False, 1, 10, 11) for size in (1, 6)],
    )
    (tmp_path / "costs.json").write_text(json.dumps(to_json(costs)))
    (tmp_path / "plan.json").write_text(json.dumps(plan_content("medusa")))
    (profile,) = profiles_of(read_report_data(tmp_path))
    assert profile.known == 4
    assert {1, 2, 4, 6, 8} <= {costs.batch_size for costs in profile.costs}
    assert speedups(profile, profile.costs[0])[3] == pytest.approx((1 + 0.5 + 0.25 + 0.125 + 0.0625) / 1.2)
    assert 'id="panel"' in build_report(tmp_path).read_text()


def test_drafts_that_a_schedule_shortens_are_no_chains(tmp_path: Path) -> None:
    """What a chain that ends by confidence does not draft says nothing of its later tokens."""
    confident = {**result(0.7, 1.0, length=8), "schedule": {"confident": {"longest": 8, "least": 0.4}}}
    write_results(tmp_path / "evaluation.json", [result(0.7, 1.0), confident])
    (profile,) = profiles_of(read_report_data(tmp_path))
    assert profile.known == 4


def test_the_winner_stands_first(tmp_path: Path) -> None:
    """Whether it was trained or not, with plain decoding where it belongs, and broken output at the end."""
    speeds = {"eagle3": (1.1, 0), "medusa": (0.9, 0), "ngram": (1.3, 0), "hydra": (2.0, 3)}
    for number, (name, (speedup, divergences)) in enumerate(speeds.items()):
        (tmp_path / f"{number}-{name}").mkdir()
        row = result(0.6, 1.0, divergences=divergences) | {"speedup": speedup, "speedup_ci95": [0.8, 2.6]}
        drafter = name if name == "ngram" else f"{name}/best"
        write_results(tmp_path / f"{number}-{name}/evaluation.json", [row], drafter, name)
    (block,) = by_setting(read_report_data(tmp_path).all_drafters).values()
    table = ranking_table("s", block)
    names = table.column("drafter")
    assert [name.partition("/")[0] for name in names] == ["ngram", "eagle3", "plain decoding", "medusa", "hydra"]
    assert table.headings == ["drafter", "speedup", "tokens a round", "output"]
    bars = [cell.bar for cell in (row[1] for row in table.rows) if cell.bar]
    assert [bar.value * 2.6 for bar in bars] == pytest.approx([1.3, 1.1, 1.0, 0.9, 2.0])
    assert all(bar.one == pytest.approx(1 / 2.6) for bar in bars)


def test_different_drafts_that_took_turns_stand_in_one_table(tmp_path: Path) -> None:
    """Each with its draft, and plain decoding once."""
    rows = [result(0.6, 1.0, length=length) | {"speedup": 1 + length / 10} for length in (2, 4)]
    write_results(tmp_path / "evaluation.json", rows)
    (drafter,) = read_report_data(tmp_path).all_drafters
    table = ranking_table("s", [(drafter, row) for row in drafter.results])
    assert table.headings == ["drafter", "draft", "speedup", "tokens a round", "output"]
    assert table.column("draft") == ["draft length 4", "draft length 2", "–"]


# --- damaged files


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "of another type": lambda content: b"[[1]]",
    "not UTF-8": lambda content: b"\xff\xfe" + content,
    "with NaN": lambda content: b'{"a": NaN}',
    "nested without end": lambda content: b"[" * 100_000,
    "of a newer format": lambda content: b'{"format": 9, "results": {"held_out": 1}, "drafter": {"name": "x"}}',
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a file of each kind."""
    run = write_run(tmp_path_factory.mktemp("whole") / "eagle3", keep=0.75, draft_ms=4.0)
    write_samples(run)
    checkpoint = run / "checkpoints/step-000400"
    draft = {"batch_size": 1, "draft_length": 4, "tree_nodes": None, "acceptance_length": 2.0, "speedup": 1.5}
    choice = choice_content(str(checkpoint), 4, {**draft, "fixed_batch_speedup": None})
    stages = [stage(1, contender, 10.0, 5.0) for contender in ("off", "on", "scheduled")]
    contents = {
        "choice.json": choice,
        "load.json": to_json(load_test(str(checkpoint), stages, "it pays")),
        "plan.json": plan_content("it will pay"),
        "replay.json": replay_content("medusa"),
        "costs.json": to_json(Costs("cpu", "t", str(checkpoint), "eagle3", {"step: pass": 1.0}, {"pass": 9.0}, 1.0)),
        "vocabulary.json": {"size": 9, "target_size": 99, "hash": "h", "domains": {"": {"greedy": 0.5}}},
    }
    for name, content in contents.items():
        (run / name).write_text(json.dumps(content))
    return run


def test_a_whole_folder_is_read_whole(whole: Path) -> None:
    data = read_report_data(whole)
    assert not data.unreadable
    assert set(data.extras) == {"choice", "load", "plan", "replay"}
    assert data.costs
    assert data.samples
    assert data.runs[0].vocabulary


def test_damaged_lines_of_metrics_leave_the_others(whole: Path, tmp_path: Path) -> None:
    """One line is no reason to lose the history of a training, and how many are left out is said."""
    shutil.copytree(whole, run := tmp_path / "eagle3")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[3], lines[7] = '{"step": 40, "loss": NaN}', '{"step": 80, "loss": -1}'
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    data = read_report_data(run)
    kept = [step.step for step in data.runs[0].metrics]
    assert kept == [step.step for step in read_report_data(whole).runs[0].metrics if step.step not in (40, 80)]
    (told,) = data.unreadable
    assert "metrics.jsonl line 4 " in told
    assert f"2 of {len(lines)} lines are left out" in told


@pytest.mark.usefixtures("_no_figures")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_rest_reported(
    damage: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page, in report.md, in report.json and in the terminal; whichever file it is."""
    names = [
        path.relative_to(whole) for path in sorted(whole.rglob("*.*")) if path.suffix in (".json", ".jsonl", ".yaml")
    ]
    assert len(names) == 14
    for number, name in enumerate(names):
        run = tmp_path / str(number) / "eagle3"
        shutil.copytree(whole, run)
        end = b"\n" if name.suffix == ".jsonl" else b""  # without it a line is one that is still being written
        (run / name).write_bytes(DAMAGES[damage]((run / name).read_bytes()) + end)
        if name.name == "config.yaml":
            with pytest.raises(UserError, match="config.yaml"):
                build_report(run)
            continue
        page = build_report(run).read_text()
        unreadable = json.loads((run / "report.json").read_text()).get("unreadable", [])
        if damage == "of a newer format" and name.name == "environment.json":  # shown as it is, whatever it holds
            continue
        (line,) = unreadable
        assert str(run / name) in line
        assert line in html.unescape(page)
        assert "eagle3" in page[page.index("<main>") :]
        assert str(run / name) in (run / "report.md").read_text().replace("\\", "")
        assert str(run / name) in capsys.readouterr().err


@pytest.mark.usefixtures("_no_figures")
def test_an_evaluation_that_is_a_link_to_itself_is_named(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "eagle3"
    shutil.copytree(whole, run)
    evaluation = next(run.glob("checkpoints/*/evaluation.json")).with_name("evaluation.ngram.json")
    evaluation.unlink(missing_ok=True)
    evaluation.symlink_to(evaluation)
    assert any(str(evaluation) in line for line in read_report_data(run).unreadable)


def test_a_figure_of_nothing_has_no_legend() -> None:
    """Such as one of an evaluation whose rows could not be read."""
    figure = Figure()
    figure.subplots(1, 2)
    legend(figure)
    assert not figure.legends


def test_a_figure_is_laid_out_once_for_both_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laying it out takes longer than drawing it."""
    laid_out, lay_out = [], ConstrainedLayoutEngine.execute
    monkeypatch.setattr(
        ConstrainedLayoutEngine, "execute", lambda engine, figure: laid_out.append(lay_out(engine, figure))
    )

    def draw(figure: Figure) -> None:
        figure.subplots().plot([1, 2], label="eagle3")
        legend(figure)

    svg = save_plot(tmp_path / "speed.png", draw)
    assert len(laid_out) == 1
    assert "eagle3" in svg
    assert imread(tmp_path / "speed.png").shape[:2] == tuple(
        round(DOTS_PER_INCH * inches) for inches in (HEIGHT, WIDTH)
    )
