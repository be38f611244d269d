"""The report: all formats print equal numbers, damaged runs are named, foreign text stays text, the page is whole."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from markupsafe import escape

from dlbench.analysis.environments import Doubt
from dlbench.cli import cli
from dlbench.errors import EnvironmentLacksError, RunError, UserError
from dlbench.records.scan import scan
from dlbench.report import wording
from dlbench.report.formats import data, drawing, html, markdown, terminal
from dlbench.report.table import Cell, TextRow, TextTable
from dlbench.stats.estimates import Estimate
from dlbench.views import model
from dlbench.views.causes.numbers import CausePoint, CauseShare, LostPercent
from dlbench.views.scaling_report import assemble, document_of
from tests.support.browser import assert_well_formed, csv_rows
from tests.support.paths import GOLDEN
from tests.support.run_factory import NOW, Story, constant, plans, write_run, write_scaling, write_unfinished

GOLDEN = GOLDEN / "report.md"


def write_sample(out: Path) -> None:
    """Weak and strong scaling, too few repeats, a failed, an invalid and an unfinished run."""
    write_scaling(out, points=(1, 2, 4))
    environment = {"host": "n1", "python": "3.11.7", "os": "Debian 12"}
    for plan in plans(
        points=(1, 2), scaling="strong", repeats=3, series="s2", engine="ddp", overrides={"train.batch_per_rank": 8}
    ):
        share = 1 + plan.series.repeat / 100
        times = constant([4 * share, 0, 60 * share / plan.layout.ranks, 20, 6 if plan.layout.ranks > 1 else 0, 10])
        story = Story(finished=NOW + timedelta(hours=1), pinned=False, environment=environment)
        write_run(out, plan, times, story)
    others = plans(points=(1, 2, 4), repeats=1, series="s3")
    failed = {"name": "finite loss", "passed": False, "detail": "loss not finite on rank 0"}
    write_run(out, others[0], constant([1, 1, 1, 1, 1, 1]), Story(state="invalid", checks=[failed]))
    write_unfinished(out, others[1], "failed", "no memory left", host="gpu0123")
    write_unfinished(out, others[2])


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "runs"
    write_sample(folder)
    return folder


@pytest.fixture(scope="module")
def made(sample: Path) -> model.Report:
    return assemble(scan(sample))


@pytest.fixture(scope="module")
def page(made: model.Report) -> str:
    return html.to_html(document_of(made))


def figures(report: model.Report) -> Iterator[Estimate]:
    for group in report.groups:
        for point in group.points:
            yield from (point.throughput, point.throughput_per_rank, point.step, point.step_p95)
            yield from () if point.is_baseline else (point.speedup, point.efficiency)
            yield from [point.serial_fraction] if point.serial_fraction else []
        for account in accounts_of(group):
            yield from (part.seconds for part in (*account.causes, account.whole) if part.seconds.value)


def accounts_of(group: model.ReportGroup) -> tuple[CausePoint, ...]:
    found = group.of(LostPercent)
    return () if found is None else found.diagnosed.points


def run_cli(*arguments: str | Path) -> Result:
    # Through the group: a command invoked alone would keep its own help option, without -h, for later tests.
    return CliRunner().invoke(cli, ["report", *(str(argument) for argument in arguments)])


# All formats print the same numbers


def test_every_figure_stands_in_markdown_and_html(made: model.Report, page: str) -> None:
    texts = {wording.value_text(figure) for figure in figures(made)}
    assert len(texts) > 20
    plain = page.replace("\N{NO-BREAK SPACE}", " ")
    written = markdown.to_markdown(document_of(made))
    assert [text for text in texts if text not in plain] == []
    assert [text for text in texts if text not in written] == []


def test_json_holds_every_number(made: model.Report) -> None:
    content = json.loads(data.to_json(document_of(made)))
    assert (content["format"], content["version"]) == ("dlbench.report", 1)
    for group, read in zip(made.groups, content["groups"], strict=True):
        for point, back in zip(group.points, read["points"], strict=True):
            assert back["efficiency"]["value"] == point.efficiency.value
            assert back["mean_step"]["value"] == point.mean_step.value


def test_csv_holds_every_number(made: model.Report) -> None:
    points = [point for group in made.groups for point in group.points]
    rows = csv_rows(document_of(made), "points")
    assert [float(row["efficiency"]) for row in rows] == [point.efficiency.value for point in points]
    assert [float(row["throughput_per_s"]) for row in rows] == [point.throughput.value for point in points]
    assert rows[0]["caption"].endswith(f"; {made.groups[0].notice}")
    assert [int(row["runs"]) for row in rows] == [point.throughput.n for point in points]
    parts = csv_rows(document_of(made), "parts")
    accounts = [account for group in made.groups for account in accounts_of(group)]
    found = {(row["part"], row["seconds"]) for row in parts if row["part_of"] in ("", "exchange_phase")}
    for account in accounts:
        for part in (*account.causes, account.exchange_phase, account.whole):
            shown = "" if isinstance(part, CauseShare) and not part.is_measured else str(part.seconds.value)
            assert (part.name, shown) in found
    runs = csv_rows(document_of(made), "runs")
    assert [row["run_id"] for row in runs] == [run.run_id for run in made.runs]
    assert [row["throughput_per_s"] == "" for row in runs] == [run.throughput is None for run in made.runs]


def test_golden_markdown(made: model.Report) -> None:
    found = markdown.to_markdown(document_of(replace(made, dlbench_version="0")))
    if os.environ.get("DLBENCH_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8"), "on purpose? DLBENCH_UPDATE_GOLDEN=1 pytest, then read it"


def test_equal_runs_give_equal_bytes(sample: Path, made: model.Report, page: str) -> None:
    again = assemble(scan(sample))
    assert html.to_html(document_of(again)) == page
    assert data.to_json(document_of(again)) == data.to_json(document_of(made))


def test_verdict_says_what_was_lost_and_to_what(made: model.Report) -> None:
    weak = next(group for group in made.groups if group.scaling == "weak")
    assert weak.verdict == (
        "Scaling efficiency 80.0 % at 4 ranks (1 rank = 100 %; 5 runs, all equal). Main cause: "
        "exchange on the wire, 20.0 points of 20.0 points lost."
    )
    strong = next(group for group in made.groups if group.scaling == "strong")
    assert "range of 3 runs" in strong.verdict
    assert strong.next_step == "Repeat with --repeats 5."
    assert any(doubt.code == "few-repeats" for doubt in strong.doubts)


def verdict_of(folder: Path) -> str:
    (group,) = assemble(scan(folder)).groups
    return group.verdict


def test_verdicts_at_the_edges(tmp_path: Path) -> None:
    write_scaling(tmp_path / "none", exchange_ms=0.1)
    write_scaling(tmp_path / "single", points=(2,))
    for plan in plans():
        write_run(tmp_path / "super", plan, constant([0, 0, 0, 100 - 10 * plan.layout.ranks, 0, 0]))
        write_run(tmp_path / "crowded", plan, constant([0, 0, 0, 50 * plan.layout.ranks, 0, 0]), Story(threads=2))
    assert "No loss worth explaining" in verdict_of(tmp_path / "none")
    assert "needs a second rank count" in verdict_of(tmp_path / "single")
    assert "above 100 %: the baseline ran with a handicap" in verdict_of(tmp_path / "super")
    assert "Ranks shared cores" in verdict_of(tmp_path / "crowded")
    for name in ("none", "single", "super", "crowded"):
        assert "<html" in html.to_html(document_of(assemble(scan(tmp_path / name))))


def test_groups_of_equal_names_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, plans(points=(1,), repeats=1, series="a")[0], constant([1] * 6))
    for series, change in (("b", "layout.cores_per_rank"), ("c", "measure.measured_steps")):
        plan = plans(points=(1,), repeats=1, series=series, overrides={change: 2})[0]
        # As if the workload file had been edited in between.
        write_run(tmp_path, plan.model_copy(update={"overrides": {}}), constant([1] * 6))
    labels = sorted(group.label for group in assemble(scan(tmp_path)).groups)
    assert len(set(labels)) == 3
    assert ["configuration" in label for label in labels] == [True, True, False]
    assert labels[2].endswith("Cores per rank 2")


def test_a_narrow_table_keeps_the_intervals_on_the_left() -> None:
    row = TextRow((Cell("1 rank"), Cell("10 ms", "[9, 11]"), Cell("5", "[4, 6]")))
    table = TextTable(("At", "Time", "Rate"), (row,))
    for width, kept in ((31, ["10 ms [9, 11]", "5 [4, 6]"]), (30, ["10 ms [9, 11]", "5"]), (26, ["10 ms", "5"])):
        assert re.split(r"\s{2,}", terminal.fitted(table, width)[-1]) == ["1 rank", *kept]


def test_a_group_fits_one_screen_of_the_terminal(tmp_path: Path) -> None:
    """Whatever the number of rank counts and of warnings; the full form keeps all."""
    for plan in plans(points=tuple(range(1, 13)), repeats=1):
        ranks = plan.layout.ranks
        write_run(tmp_path, plan, constant([4, 1, 30, 50 + ranks, 0 if ranks == 1 else 3.0 * ranks, 10], other=1))
    whole_scan = scan(tmp_path)
    doubt = Doubt(
        code="busy", severity="serious", text="the cores of this machine were used by others for most of the run " * 3
    )
    for count in (1, 2, 3, 7, 12):
        found = assemble(replace(whole_scan, runs=[run for run in whole_scan.runs if run.plan.layout.ranks <= count]))
        (group,) = found.groups
        for doubts in (group.doubts, (doubt,) * 5):
            document = document_of(replace(found, groups=(replace(group, doubts=doubts),)))
            text = terminal.to_text(document)
            assert len(text.splitlines()) <= 40, text
            assert max(map(len, text.splitlines())) <= 80
            assert f"Next: {group.next_step}" in " ".join(text.split())
            shown = [line for line in text.splitlines() if re.match(r" {3,4}\d+  ", line)]
            assert len(shown) == count or "rows left out" in text
            assert ("more warnings" in text) == (len(doubts) > terminal.MAX_MARKS)
            whole = " ".join(terminal.to_text(document, full=True).split())
            assert whole.count("were used by others") == 3 * doubts.count(doubt)


def test_rich_prints_the_same_rows(made: model.Report) -> None:
    from rich.console import Console

    sink = io.StringIO()
    terminal.show(document_of(made), Console(file=sink, width=80, force_terminal=True))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", sink.getvalue())
    assert max(map(len, shown.splitlines())) <= 80
    for line in terminal.to_text(document_of(made)).splitlines():
        assert " ".join(line.split()) in " ".join(shown.split())


# The page as text


def test_page_is_well_formed_and_its_policy_allows_the_two_scripts_alone(page: str) -> None:
    assert_well_formed(page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    directives = dict(part.strip().split(" ", 1) for part in policy[1].replace("&#39;", "'").split(";"))
    assert directives["default-src"] == "'none'"
    assert "unsafe" not in directives["script-src"]
    assert directives["script-src"].count("'sha256-") == len(re.findall(r"<script>", page)) == 2


def test_ids_of_charts_do_not_meet_and_text_is_left_alone() -> None:
    text = 'a role="x" 3.14159 url(#clip0) id="clip0"'
    spec = {
        "data": {"values": [{"a": 1, "t": text}]},
        "mark": {"type": "text", "clip": True},
        "encoding": {"x": {"field": "a", "type": "quantitative"}, "text": {"field": "t"}},
    }
    svg = drawing.to_svg(spec, "chart-7")
    tags = " ".join(re.findall(r"<[a-z][^<>]*>", svg))
    assert set(re.findall(r'\bid="([^"]*)"', tags)) == {"chart-7-0"}
    assert set(re.findall(r"url\(#([^)]*)\)", tags)) == {"chart-7-0"}
    assert text in svg.replace("&quot;", '"')


def test_a_chart_that_cannot_be_drawn_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)chart-8 cannot be drawn: .*not allowed: http://localhost/x.csv"):
        drawing.to_svg({"mark": "point", "data": {"url": "http://localhost/x.csv"}}, "chart-8")
    process = drawing.start()
    process.kill()
    process.wait()
    with pytest.raises(RunError, match=r"chart-9: the process that draws it died"):
        drawing.to_svg({"mark": "point", "data": {"values": []}}, "chart-9")
    assert drawing.to_svg({"mark": "point", "data": {"values": []}}, "chart-9").startswith("<svg ")


def links_of(page: str) -> dict[str, str]:
    """The files in a page, by name."""
    found = re.findall(r'download="dlbench-([\w-]+)\.csv" href="data:text/csv;charset=utf-8;base64,([^"]*)"', page)
    return {name: base64.b64decode(data).decode() for name, data in found}


def test_downloads_are_the_csv_files(made: model.Report, page: str) -> None:
    """Of every table that has lines, and every table of a view leads to its file."""
    links = links_of(page)
    assert {"points", "parts", "runs"} <= set(links)
    assert links == {name: data.to_csv(document_of(made), name) for name in links}
    assert set(links) == {name for name, table in document_of(made).tables().items() if table.rows}
    linked = set(re.findall(r'class="raw" href="#data-([\w-]+)"', page))
    drawn = {sheet.name for section, _ in document_of(made).walk() for sheet in section.sheets if sheet.is_drawn}
    # Numbers that a chart carries stand under it.
    assert linked <= set(links)
    assert set(links) - linked <= drawn


def test_files_that_the_page_cannot_hold_name_their_command(
    made: model.Report, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "DOWNLOAD_BYTES", 3000)
    drawn = html.to_html(document_of(made))
    every, fitting = links_of(page), links_of(drawn)
    assert fitting
    assert fitting == {name: every[name] for name in fitting}
    told = re.findall(r"too large for the page; dlbench report RUNS --format csv --table ([\w-]+) writes it", drawn)
    assert set(told) == set(every) - set(fitting)


def test_every_sheet_stands_in_every_format(made: model.Report, page: str) -> None:
    plain = page.replace("\N{NO-BREAK SPACE}", " ")
    written = markdown.to_markdown(document_of(made))
    shown = terminal.to_text(document_of(made), full=True)
    assert len(shown.splitlines()) <= 300 * len(made.groups)
    left_out = " ".join(shown.split()).rpartition("Not printed here, or not whole: ")[2]
    for section, _ in document_of(made).walk():
        assert f"# {markdown.escape(section.title)}" in written
        assert escape(section.title) in plain
        for text in section.words:
            assert markdown.escape(text) in written
        for sheet in section.sheets:
            table = sheet.to_display()
            if table.rows:
                assert escape(sheet.title) in plain or sheet.is_drawn
                assert markdown.escape(sheet.caption) in written
            for cell in (str(cell) for row in table.rows for cell in row.cells):
                assert markdown.escape(cell) in written
            if sheet.in_terminal:
                assert str(table.rows[0].cells[0])[:9] in shown
            elif sheet.is_folded or sheet.is_drawn:
                assert sheet.title in left_out or not table.rows
            if sheet.names:
                rows = csv_rows(document_of(made), sheet.name)
                assert len(rows) >= len(list(sheet.records()))
                assert not rows or set(sheet.names) <= set(rows[0])


def test_what_is_missing_stands_in_every_format(made: model.Report, page: str) -> None:
    content = json.loads(data.to_json(document_of(made)))
    written = markdown.to_markdown(document_of(made))
    for group, read in zip(made.groups, content["groups"], strict=True):
        assert {"quality", "exchange", "noise"} <= {one.view for one in group.missing}
        assert [one["view"] for one in read["missing"]] == [one.view for one in group.missing]
        for one in group.missing:
            assert f'<li id="{one.view}-{group.id}">' in page
            assert markdown.escape(one.text) in written
    assert "collectives" in {one.view for one in made.missing}
    for one in made.missing:
        assert markdown.escape(f"{one.title}: {one.text}") in written


# The command


def test_command_writes_what_the_suffix_says(sample: Path, tmp_path: Path, made: model.Report, page: str) -> None:
    for suffix, wanted in (
        (".html", page),
        (".json", data.to_json(document_of(made))),
        (".csv", data.to_csv(document_of(made), "points")),
        (".md", markdown.to_markdown(document_of(made))),
        (".txt", terminal.to_text(document_of(made))),
    ):
        out = tmp_path / f"report{suffix}"
        found = run_cli(sample, "-o", out)
        assert found.exit_code == 0, found.output
        assert out.read_text(encoding="utf-8") == wanted
        assert found.stdout == ""
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".html", ".json", ".md", ".txt"]


def test_damaged_runs_are_named_and_the_rest_is_reported(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    series = write_scaling(runs, repeats=3)
    (runs / series[0].run_id / "record.json").write_text('{"format": "dlbench.rec', encoding="utf-8")
    (runs / series[1].run_id / "node-0000.steps").unlink()
    found = run_cli(runs, "-o", tmp_path / "report.html")
    assert found.exit_code == 4
    for plan in series[:2]:
        assert f"damaged: {runs / plan.run_id}" in found.stderr
    content = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert series[0].run_id in content
    assert f"{series[1].run_id}/node-0000.steps" in content
    (group,) = json.loads(run_cli(runs, "--format", "json").stdout)["groups"]
    assert [point["throughput"]["n"] for point in group["points"]] == [2, 2]


@pytest.mark.parametrize("name", ["html", "json", "csv", "md", "text"])
def test_folder_without_valid_runs_gives_a_report_that_says_so(tmp_path: Path, name: str) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    write_unfinished(broken, plans()[0], "failed", "no memory left")
    for folder in (empty, broken):
        out = tmp_path / f"{folder.name}.{name}"
        found = run_cli(folder, "-o", out, "--format", name)
        assert found.exit_code == 4
        assert "no run has figures" in found.stderr
        if name not in ("csv", "json"):
            content = " ".join(out.read_text(encoding="utf-8").split())
            assert "No run has figures" in content
            assert ("no memory left" in content) is (folder == broken)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUNS/nowhere"], "no such folder of runs"),
        (["RUNS", "-o", "TMP/report.pdf"], "no --format"),
        (["RUNS", "-o", "TMP"], "is a folder"),
        (["RUNS", "-o", "TMP/none/report.html"], "there is no folder"),
        (["RUNS", "--table", "runs"], "has no effect"),
        (
            ["RUNS", "--format", "csv", "--table", "pionts"],
            "--table pionts: no such table in this report; did you mean points",
        ),
    ],
)
def test_wrong_use_is_one_line(sample: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    found = run_cli(*(a.replace("RUNS", str(sample)).replace("TMP", str(tmp_path)) for a in arguments))
    assert isinstance(found.exception, UserError)
    assert found.exception.exit_code == 2
    assert message in str(found.exception)
    assert "\n" not in str(found.exception)
    assert list(tmp_path.iterdir()) == []


def test_missing_libraries_are_named_with_the_remedy(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = run_cli(sample, "--format", "html")
    assert isinstance(found.exception, EnvironmentLacksError)
    assert "numpy, vl_convert not installed" in str(found.exception)
    assert "pip install 'dlbench[analysis]'" in str(found.exception)


def test_a_limit_below_what_charts_need_is_one_line(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it V8 ends the process with its own stack."""
    drawing.start.cache_clear()
    monkeypatch.setattr(drawing.resource, "getrlimit", lambda what: (64_000_000 * 1024, 64_000_000 * 1024))
    found = run_cli(sample, "--format", "html")
    assert isinstance(found.exception, EnvironmentLacksError)
    assert "limits addresses to 61.0 GiB (`ulimit -v`); remedy: `ulimit -v unlimited`" in str(found.exception)
    assert run_cli(sample, "--format", "md").exit_code == 0
