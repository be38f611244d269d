"""Measured figures: docs/status.md shows what docs/figures.json keeps, and later measurements replace earlier ones."""

import json
from dataclasses import replace

import pytest

from benchmarks import figures, table
from benchmarks.figures import Figure, Measured

FIGURE = Figure(name="a ratio", value=0.98, unit="times", low=0.97, high=0.99, n=12, goal="at least 0.95", met=True)
MEASURED = Measured(
    area="spine.host", figure=FIGURE, date="2026-11-01", machine="2 cores", load=0.1, commit="0123abcd"
)  # fmt: skip


def cells(row: Measured) -> list[str]:
    return [cell.strip() for cell in table.table([row]).splitlines()[-1].strip("|").split("|")]


def test_a_row_has_goal_figure_verdict_date_commit_and_machine() -> None:
    reached = "0.98 [0.97, 0.99], n=12 times"
    assert cells(MEASURED) == ["spine.host", "a ratio", "at least 0.95", reached, "met", "2026-11-01, 0123abcd", "A"]
    assert cells(replace(MEASURED, load=1.5))[6] == "A, load 1.5"
    without_goal = replace(MEASURED, figure=replace(FIGURE, goal="measured", met=None))
    assert "a ratio" not in table.table([without_goal])


def test_the_summary_counts_verdicts_of_an_area_and_names_a_figure_that_fell_short() -> None:
    short = replace(MEASURED, figure=replace(FIGURE, name="another", met=False))
    last = table.summary([MEASURED, short]).splitlines()[-1]
    assert last == "| spine | 1 | 0 | 1 | another: 0.98 [0.97, 0.99], n=12 times (goal: at least 0.95) |"


def test_what_was_measured_later_replaces_what_is_kept(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("bench")
    monkeypatch.setattr(table, "FOLDER", folder)
    monkeypatch.setattr(figures, "FOLDER", folder)
    monkeypatch.setattr(table, "KEPT", folder / "kept" / "figures.json")
    monkeypatch.setattr(table, "STATUS", folder / "status.md")
    (folder / "kept").mkdir()
    empty = "".join(begin + "old\n" + end for begin, end in table.MARKS.values())
    (folder / "status.md").write_text(f"before\n{empty}after\n")
    figures.save("spine.host", [FIGURE], 0.04)
    table.keep()
    figures.save("spine", [replace(FIGURE, value=0.5), replace(FIGURE, name="b", value=None, reason="no GPU")], 0)
    table.keep()
    figures.save("spine", [replace(FIGURE, value=None, reason="no GPU")], 0)
    (folder / "spine.host.json").unlink()
    by_name = {row.figure.name: row for row in table.newest()}
    assert by_name["b"].figure.value is None
    assert by_name["a ratio"].figure.value == 0.5, "a figure that cannot be measured here replaces none"
    assert all(row["commit"] for row in json.loads((folder / "kept" / "figures.json").read_text()))
    text = (folder / "status.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old\n" not in text
    assert "| spine | a ratio | at least 0.95 | 0.5 [0.97, 0.99], n=12 times | met |" in text


def test_status_shows_what_is_kept() -> None:
    text = table.STATUS.read_text(encoding="utf-8")
    for name, part in table.parts(table.load(table.KEPT)).items():
        begin, end = table.MARKS[name]
        assert text.partition(begin)[2].partition(end)[0].strip() == part.strip()
