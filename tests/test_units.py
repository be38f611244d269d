"""Bytes and seconds as text and back, and measured figures: docs/status.md shows what docs/figures.json keeps."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import figures, table
from benchmarks.figures import Figure, Measured
from dlbench.units import parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6.6min", 396.0),
        ("90s", 90.0),
        ("90 s", 90.0),
        (" 2h ", 7200.0),
        ("1d", 86400.0),
        ("250ms", 0.25),
        ("0.5s", 0.5),
        ("007min", 420.0),
    ],
)
def test_durations_with_their_unit_become_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        *("", "s", "90", "0s", "0.0min", "-1s", "+1s", "1e3s", "nan", "inf s", "1,5min", ".5s", "5.s", "1 min 30 s"),
        *("3H", "3 minutes", "9999999999s", "\u0663s", "1s\n2s"),
    ],
)
def test_what_is_no_duration_is_answered_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a duration above zero with its unit \(ms, s, m, min, h, d\)") as raised:
        parse_seconds(text)
    assert "\n" not in str(raised.value)


def test_endless_text_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="not a duration") as raised:
        parse_seconds("9" * 100_000)
    assert len(str(raised.value)) < 300


@given(st.text(max_size=30))
def test_any_text_is_above_zero_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse_seconds(text) > 0


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
