"""The report: all formats print equal numbers, damaged runs are named, foreign text stays text, the page is whole."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.doubts import Doubt
from dlbench.cli import cli
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.records.folder import RunFolder
from dlbench.records.scan import scan
from dlbench.report import wording
from dlbench.report.charts import svg as drawing
from dlbench.report.document import Document, Section
from dlbench.report.formats import csv as delimited
from dlbench.report.formats import html, markdown, terminal
from dlbench.report.formats import json as json_tables
from dlbench.report.table import Cell, TextRow, TextTable, text_sheet
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import Estimate
from dlbench.views import model
from dlbench.views.causes.numbers import CausePoint, CauseShare, LostPercent
from dlbench.views.scaling_report import assemble, document_of
from tests.support.paths import GOLDEN
from tests.support.printed import assert_well_formed, csv_rows
from tests.support.run_factory import (
    NOW,
    WORKLOAD,
    Story,
    constant,
    edit_json,
    exchange_result,
    plans,
    write_run,
    write_scaling,
    write_unfinished,
)
from tests.support.watch_factory import clock_line, node_watch, watch_result, write_samples

GOLDEN = GOLDEN / "report.md"

PAYLOAD = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
MARKUP = f"{PAYLOAD} \"'><svg onload=window.pwned=1> | `*[x](javascript:window.pwned=1)* {{{{ 7*7 }}}}"


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
            yield from (point.speedup, point.efficiency)
            yield from [point.serial_fraction] if point.serial_fraction else []
        for account in accounts_of(group):
            yield from (part.seconds for part in (*account.causes, account.whole) if part.seconds.value)


def accounts_of(group: model.Group) -> tuple[CausePoint, ...]:
    found = group.of(LostPercent)
    return () if found is None else found.diagnosed.points


def run_cli(*arguments: str | Path) -> Result:
    # Through the group: a command invoked alone would keep its own help option, without -h, for later tests.
    return CliRunner().invoke(cli, ["report", *(str(argument) for argument in arguments)])


# All formats print the same numbers


def test_every_figure_stands_in_markdown_and_html(made: model.Report, page: str) -> None:
    texts = {wording.value_text(figure) for figure in figures(made)}
    assert len(texts) > 25
    plain = page.replace("\N{NO-BREAK SPACE}", " ")
    written = markdown.to_markdown(document_of(made))
    assert [text for text in texts if text not in plain] == []
    assert [text for text in texts if text not in written] == []


def test_terminal_prints_the_figures_of_markdown(made: model.Report) -> None:
    text = " ".join(terminal.to_text(document_of(made)).split())
    for group in made.groups:
        assert group.verdict in text
        for point in group.points:
            assert wording.figure_text(point.throughput) in text
            assert point.is_baseline or wording.figure_text(point.efficiency) in text


def test_json_holds_every_number(made: model.Report) -> None:
    content = json.loads(json_tables.to_json(document_of(made)))
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


def test_no_figure_stands_alone(made: model.Report) -> None:
    """Conditions, baseline, number of runs and the notice stand in every caption."""
    for group in made.groups:
        for caption in (group.caption, group.parts_caption):
            for wanted in ("tiny preset", "fp32", "synthetic data", "baseline 1 rank", "runs per point", group.notice):
                assert wanted in caption
        assert ("Horovod" in group.caption) or ("PyTorch DDP" in group.caption)
        assert ("4 images per rank" in group.caption) or ("8 images in all" in group.caption)


def test_golden_markdown(made: model.Report) -> None:
    found = markdown.to_markdown(document_of(replace(made, dlbench_version="0")))
    if os.environ.get("DLBENCH_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8"), "on purpose? DLBENCH_UPDATE_GOLDEN=1 pytest, then read it"


def test_equal_runs_give_equal_bytes(sample: Path, made: model.Report, page: str) -> None:
    again = assemble(scan(sample))
    assert html.to_html(document_of(again)) == page
    assert json_tables.to_json(document_of(again)) == json_tables.to_json(document_of(made))


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


def test_verdict_tells_waiting_from_exchange(tmp_path: Path) -> None:
    """One rank computes 20 ms longer, the others wait in the exchange: of 105 ms, 20 are waiting and 5 are exchange."""
    for plan in plans(points=(1, 4), repeats=5):

        def times(rank: int, step: int, ranks: int = plan.layout.ranks) -> tuple[list[int], int]:
            late = 0 if rank < 3 else 20_000_000
            return [0, 0, 0, 80_000_000 + late, 0 if ranks == 1 else 25_000_000 - late, 0], 0

        write_run(tmp_path, plan, times)
    assert verdict_of(tmp_path).endswith(
        "Main cause: waiting for stragglers, 19.0 points of 23.8 points lost, 100 % for rank 3 on n0, late by its "
        "computing; also exchange on the wire, 4.8 points."
    )


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


# Foreign text


def test_not_finite_is_null() -> None:
    assert json_tables.as_plain((1.0, math.nan, -math.inf, {"x": 1} and "t")) == [1.0, None, None, "t"]


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_csv_cells_are_no_formulas(made: model.Report, start: str) -> None:
    text = f"{start}HYPERLINK(1)"
    changed = replace(made, runs=(replace(made.runs[0], failure_reason=text, step_cv=-0.5),))
    (row,) = csv_rows(document_of(changed), "runs")
    assert row["failure_reason"] == "'" + text
    assert row["step_cv"] == "-0.5"


@given(st.text())
def test_cleaned_text_is_one_harmless_line(text: str) -> None:
    found = wording.clean(text)
    assert not {unicodedata.category(c) for c in found} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert len(found.splitlines()) <= 1
    found.encode("utf-8")
    assert wording.clean(found) == found


def test_writers_clean_what_came_in_another_way() -> None:
    """Sections clean what enters them; here texts are put behind their back, as a new kind of field would be."""
    bad = "a\x1b]0;owned\x07\u202eb\x9bc\ud800"
    section = Section(id="one", title="One", words=("a",), facts=(("name", "value"),), notes=("small",))
    sheet = text_sheet("t", "T", ("head",), (("cell",),))
    for name, value in {"words": (bad,), "facts": ((bad, bad),), "notes": (bad,), "title": bad}.items():
        object.__setattr__(section, name, value)
    object.__setattr__(sheet, "title", bad)
    object.__setattr__(section, "sheets", (sheet,))
    document = Document(title=bad, dlbench_version="1", sections=(section,), data={"key": bad})
    texts = {
        "text": terminal.to_text(document, full=True),
        "md": markdown.to_markdown(document),
        "json": json_tables.to_json(document),
        "csv": delimited.write_table(("x",), [{"x": bad}]),
        "html": html._environment().from_string("{{ bad }}").render(bad=bad),
    }
    for name, text in texts.items():
        assert [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")] == [], name
        assert "a]0;ownedbc" in text.replace("\\", ""), name


@given(st.text())
def test_no_text_breaks_a_markdown_table(text: str) -> None:
    assert not re.search(r"(?<!\\)(\\\\)*[|<>`*]", markdown.escape(wording.clean(text)))


def write_hostile(out: Path) -> None:
    """Markup and control characters in every text that a person or a machine can put into a run."""
    hostile = MARKUP + "\x1b]0;title\x07\x1b[2J\u202e\r\n=1+1"
    source = WORKLOAD.read_text(encoding="utf-8")
    source = re.sub(r"^(title|sample_unit|notice|    about): .*$", r"\1: HOSTILE", source, flags=re.M)
    out.mkdir(parents=True)
    workload = out.parent / "hostile.yaml"
    workload.write_text(source, encoding="utf-8")
    made = [
        hostile_plan(plan, hostile)
        for plan in plans(
            workload=str(workload),
            points=(1, 2, 4),
            repeats=2,
            overrides={"data.source": "HOSTILE"},
            tags={"note": "HOSTILE", "branch": PAYLOAD},
        )
    ]
    story = Story(
        warnings=[hostile],
        settings=[{"key": hostile, "requested": hostile, "effective": 1, "evidence": hostile}],
        environment={hostile: hostile, "kernel": hostile},
        environment_differences=[hostile],
        data={hostile: hostile, "decoder": hostile},
        host=lambda rank: hostile,
        threads=2,
        pinned=False,
        bad_sample_count=1,
    )
    for plan in made[:4]:
        told = replace(story, exchange=hostile_exchange(plan, hostile), record={"watch": hostile_watch(hostile)})
        folder = write_run(out, plan, constant([5, 0, 30, 50, 20 * (plan.layout.ranks - 1), 10]), told)
        write_hostile_samples(folder, hostile)
        ranks = json.loads(folder.record.read_text())["ranks"]
        edit_json(folder.record, ranks=[{**rank, "device": f"cuda:0 ({hostile})"} for rank in ranks], finished=hostile)
    kernel = {**story.environment, "kernel": "other"}
    checks = [{"name": hostile, "passed": False, "detail": hostile}]
    write_run(out, made[4], constant([5, 0, 30, 50, 0, 10]), replace(story, environment=kernel))
    folder = write_run(out, made[5], constant([5, 0, 30, 50, 0, 10]), replace(story, checks=checks, state="invalid"))
    edit_json(folder.record, finished=hostile)
    for plan in plans(workload=str(workload), points=(1, 2), repeats=1, series="s2"):
        write_unfinished(out, hostile_plan(plan, hostile), "failed", hostile, host=hostile)
    broken = out / PAYLOAD.replace("/", "_")
    broken.mkdir()
    (broken / "plan.json").write_text("{}", encoding="utf-8")


def hostile_plan(plan: RunPlan, hostile: str) -> RunPlan:
    """The plan as somebody may have written it by hand: dlbench itself takes no control characters into one."""
    content = plan.to_json().replace('"HOSTILE"', json.dumps(hostile[:200]))
    return RunPlan.model_validate(json.loads(content))


def hostile_exchange(plan: RunPlan, hostile: str) -> dict[str, Any] | None:
    if plan.layout.ranks == 1:
        return None
    gradients = [(1_000_000, 0.01), (2_000_000, 0.03), (4_000_000, 0.05)]
    names = dict.fromkeys(("carrier", "fusion", "exchange", "wire", "evidence"), hostile)
    made = exchange_result(plan, gradients=gradients, alpha_s=1e-4, beta_s_per_byte=1e-9, **names)
    for message in made["messages"]:
        message["method"] = hostile
    for gradient in made["gradients"]:
        gradient["name"] = hostile
    return made


def hostile_watch(hostile: str) -> dict[str, Any]:
    node = node_watch(
        host=hostile,
        unavailable={hostile: hostile, "gpu.0.energy_j": hostile},
        failures=[hostile],
        clock=clock_line(host=hostile, problem=hostile),
    )
    overhead = {**watch_result()["overhead"], "evidence": hostile}
    return watch_result(nodes=[node], overhead=overhead)


def write_hostile_samples(folder: RunFolder, hostile: str) -> None:
    columns = ["host.cpu.0.busy", "gpu.0.power_w", "gpu.0.sm_clock_hz", "host.memory_used_bytes"]
    rows = [(1_000_000_000 * second, 0.5, 200.0, 1.4e9, 1e9) for second in range(10)]
    write_samples(
        folder,
        0,
        columns,
        rows,
        unavailable={"gpu.0.energy_j": hostile},
        failures=[{"failed": hostile, "time_ns": 3_000_000_000, "reason": hostile}],
        host=hostile,
        facts={"gpu.0.name": hostile, hostile: hostile},
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "runs"
    write_hostile(folder)
    return folder


def test_terminal_gets_no_control_characters(hostile: Path) -> None:
    text = terminal.to_text(document_of(assemble(scan(hostile))))
    assert "pwned" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_rich_reads_no_markup_and_passes_no_escapes(made: model.Report) -> None:
    from rich.console import Console

    sink = io.StringIO()
    group = replace(made.groups[0], verdict="[bold]x[/nonsense] [link=file:///]y[/link]", label="[red]z")
    terminal.show(document_of(replace(made, groups=(group,))), Console(file=sink, width=80, force_terminal=False))
    assert "[bold]x[/nonsense] [link=file:///]y[/link]" in sink.getvalue()
    assert "\x1b" not in sink.getvalue()


def test_a_narrow_table_keeps_the_intervals_on_the_left() -> None:
    row = TextRow((Cell("1 rank"), Cell("10 ms", "[9, 11]"), Cell("5", "[4, 6]")))
    table = TextTable(("At", "Time", "Rate"), (row,))
    for width, kept in ((31, ["10 ms [9, 11]", "5 [4, 6]"]), (30, ["10 ms [9, 11]", "5"]), (26, ["10 ms", "5"])):
        assert re.split(r"\s{2,}", terminal.fitted(table, width)[-1]) == ["1 rank", *kept]


@pytest.mark.parametrize("folder_name", ["sample", "hostile"])
def test_terminal_fits_eighty_columns(folder_name: str, request: pytest.FixtureRequest) -> None:
    found = assemble(scan(request.getfixturevalue(folder_name)))
    assert max(map(len, terminal.to_text(document_of(found)).splitlines())) <= 80


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


@pytest.mark.parametrize("folder_name", ["sample", "hostile"])
def test_page_is_well_formed_and_loads_nothing(folder_name: str, request: pytest.FixtureRequest) -> None:
    assert_well_formed(html.to_html(document_of(assemble(scan(request.getfixturevalue(folder_name))))))


def test_policy_allows_the_two_scripts_alone(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    directives = dict(part.strip().split(" ", 1) for part in policy[1].replace("&#39;", "'").split(";"))
    assert directives["default-src"] == "'none'"
    assert "unsafe" not in directives["script-src"]
    assert directives["script-src"].count("'sha256-") == len(re.findall(r"<script>", page)) == 2


def test_specifications_cannot_end_their_element(hostile: Path) -> None:
    page = html.to_html(document_of(assemble(scan(hostile))))
    block = page.partition('<script type="application/json" id="chart-specs">')[2].partition("</script>")[0]
    assert not set(block) & set("<>&")
    titles = [spec["title"]["subtitle"] for spec in json.loads(block)["charts"].values()]
    assert any("<script>" in " ".join(title) for title in titles)


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


def links_of(page: str) -> dict[str, str]:
    """The files in a page, by name."""
    found = re.findall(r'download="dlbench-([\w-]+)\.csv" href="data:text/csv;charset=utf-8;base64,([^"]*)"', page)
    return {name: base64.b64decode(data).decode() for name, data in found}


def test_downloads_are_the_csv_files(made: model.Report, page: str) -> None:
    """Of every table that has lines, and every table of a view leads to its file."""
    links = links_of(page)
    assert {"points", "parts", "runs"} <= set(links)
    assert links == {name: delimited.to_csv(document_of(made), name) for name in links}
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
    for section, _ in document_of(made).walk():
        assert f"# {markdown.escape(section.title)}" in written
        assert html_text(section.title) in plain
        for text in section.words:
            assert markdown.escape(text) in written
        for sheet in section.sheets:
            table = sheet.to_display()
            if table.rows:
                assert html_text(sheet.title) in plain or sheet.is_drawn
                assert markdown.escape(sheet.caption) in written
            for cell in (str(cell) for row in table.rows for cell in row.cells):
                assert markdown.escape(cell) in written
            if sheet.in_terminal:
                assert str(table.rows[0].cells[0])[:9] in shown
            if sheet.names:
                rows = csv_rows(document_of(made), sheet.name)
                assert len(rows) >= len(sheet.records())
                assert not rows or set(sheet.names) <= set(rows[0])


def html_text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;")


def test_what_is_missing_stands_in_every_format(made: model.Report, page: str) -> None:
    content = json.loads(json_tables.to_json(document_of(made)))
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


@pytest.mark.slow
def test_many_runs_and_groups_stay_small(made: model.Report) -> None:
    runs = tuple(replace(run, run_id=f"{run.run_id}-{k}") for k in range(100) for run in made.runs)
    groups = tuple(replace(group, id=f"{group.id}{k:03d}") for k in range(25) for group in made.groups)
    found = html.to_html(document_of(replace(made, runs=runs, groups=groups)))
    assert len(found.encode("utf-8")) < 5_000_000
    assert "further rows stand in the CSV alone" in found
    assert "Charts are drawn for the first" in found
    assert "first 25 of 50 groups stand on this page in full" in found
    # A file that does not fit is left to the command, by its name.
    assert "dlbench report RUNS --format csv --table runs writes it" in found


# The command


def test_command_writes_what_the_suffix_says(sample: Path, tmp_path: Path, made: model.Report, page: str) -> None:
    for suffix, wanted in (
        (".html", page),
        (".json", json_tables.to_json(document_of(made))),
        (".csv", delimited.to_csv(document_of(made), "points")),
        (".md", markdown.to_markdown(document_of(made))),
        (".txt", terminal.to_text(document_of(made))),
    ):
        out = tmp_path / f"report{suffix}"
        found = run_cli(sample, "-o", out)
        assert found.exit_code == 0, found.output
        assert out.read_text(encoding="utf-8") == wanted
        assert found.stdout == ""
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".html", ".json", ".md", ".txt"]


def test_command_prints(sample: Path, made: model.Report) -> None:
    assert run_cli(sample).stdout == terminal.to_text(document_of(made))
    assert run_cli(sample, "--format", "md").stdout == markdown.to_markdown(document_of(made))
    assert run_cli(sample, "--format", "csv", "--table", "runs").stdout == delimited.to_csv(document_of(made), "runs")


@pytest.mark.slow
def test_command_lists_the_tables(sample: Path, made: model.Report) -> None:
    found = run_cli(sample, "--table", "?")
    assert found.exit_code == 0
    names = [line.split("  ")[0] for line in found.stdout.splitlines()]
    assert {"points", "parts", "runs"} <= set(names)
    for name in names:
        assert run_cli(sample, "--format", "csv", "--table", name).stdout == delimited.to_csv(document_of(made), name)


def test_damaged_runs_are_named_and_the_rest_is_reported(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    series = write_scaling(runs, repeats=3)
    (runs / series[0].run_id / "record.json").write_text('{"format": "dlbench.rec', encoding="utf-8")
    (runs / series[1].run_id / "rank-0001.steps").unlink()
    found = run_cli(runs, "-o", tmp_path / "report.html")
    assert found.exit_code == 4
    for plan in series[:2]:
        assert f"damaged: {runs / plan.run_id}" in found.stderr
    content = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert series[0].run_id in content
    assert f"{series[1].run_id}/rank-0001.steps" in content
    assert "2 valid" not in found.stderr
    assert [point["throughput"]["n"] for point in json_points(runs)] == [2, 2]


def json_points(runs: Path) -> list[dict[str, Any]]:
    (group,) = json.loads(run_cli(runs, "--format", "json").stdout)["groups"]
    points: list[dict[str, Any]] = group["points"]
    return points


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
        (["RUNS", "-o", "TMP/report.pdf"], "--format is missing"),
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


def test_unwritable_output_is_one_line(sample: Path) -> None:
    found = run_cli(sample, "-o", "/proc/report.md")
    assert isinstance(found.exception, UserError)
    assert "cannot be written" in str(found.exception)


def test_missing_libraries_are_named_with_the_remedy(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = run_cli(sample, "--format", "html")
    assert isinstance(found.exception, EnvironmentLacksError)
    assert "numpy, altair, vl_convert not installed" in str(found.exception)
    assert "pip install 'dlbench[analysis]'" in str(found.exception)


def test_a_limit_below_what_charts_need_is_one_line(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it V8 ends the process with its own stack."""
    drawing.require_address_space.cache_clear()
    monkeypatch.setattr(drawing.resource, "getrlimit", lambda what: (64_000_000 * 1024, 64_000_000 * 1024))
    found = run_cli(sample, "--format", "html")
    assert isinstance(found.exception, EnvironmentLacksError)
    assert "limit on addresses is 61.0 GiB (`ulimit -v`); remedy: `ulimit -v unlimited`" in str(found.exception)
    assert run_cli(sample, "--format", "md").exit_code == 0


@pytest.mark.nightly
def test_charts_are_drawn_under_a_limit_that_is_just_enough(sample: Path, tmp_path: Path) -> None:
    def limited(gibibytes: int) -> subprocess.CompletedProcess[str]:
        words = shlex.join([sys.executable, "-m", "dlbench", "report", str(sample), "-o", str(tmp_path / "x.html")])
        script = f"ulimit -c 0; ulimit -v {gibibytes << 20}; {words}"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)

    # Numeric libraries reserve some for each core, too.
    assert limited(100).returncode == 0
    assert limited(40).returncode == 5


def test_whole_command_line(cli: Any, sample: Path, tmp_path: Path) -> None:
    """A process of its own, in a locale that knows no µ."""
    found = cli("report", sample, "--format", "md", LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert found.returncode == 0, found.stderr
    missing = cli("report", tmp_path / "nowhere")
    assert missing.returncode == 2
    assert missing.stderr.startswith("dlbench: error: ")
    assert len(missing.stderr.splitlines()) == 1
