"""The table of measured figures: what is kept in docs/figures.json is what docs/status.md shows."""

from dataclasses import replace

import pytest

from benchmarks import figures, table
from benchmarks.__main__ import AREAS, PARTS
from benchmarks.figures import ROOT, Figure, Measured

FIGURE = Figure(name="a ratio", value=0.98, unit="times", low=0.97, high=0.99, n=12, goal="at least 0.95", met=True)
MEASURED = Measured(
    area="spine.host",
    figure=FIGURE,
    date="2026-11-01",
    machine="2 cores",
    load=0.1,
    code=figures.digest(table.places("spine.host")),
)


def cells(one: Measured) -> list[str]:
    return [cell.strip() for cell in table.table([one]).splitlines()[-1].strip("|").split("|")]


@pytest.mark.parametrize("area", sorted(AREAS | PARTS))
def test_every_area_tells_the_code_it_measures(area: str) -> None:
    for place in table.places(area):
        assert (ROOT / place).exists()


def test_a_figure_says_when_it_is_older_than_the_code_and_when_it_has_no_goal() -> None:
    reached = "0.98 [0.97, 0.99], n=12 times"
    assert cells(MEASURED) == ["spine.host", "a ratio", "at least 0.95", reached, "met", "2026-11-01", "A"]
    assert cells(replace(MEASURED, code="other"))[5] == "2026-11-01, older than the code"
    assert cells(replace(MEASURED, code=""))[5] == "2026-11-01, older than the code"
    assert cells(replace(MEASURED, load=1.5))[6] == "A, load 1.5"
    none = cells(replace(MEASURED, figure=replace(FIGURE, goal="measured", met=None)))
    assert (none[2], none[4]) == ("no goal", "")


def test_what_falls_short_is_counted_and_named_before_the_table() -> None:
    short = replace(MEASURED, figure=replace(FIGURE, name="another", met=False))
    lines = table.table([MEASURED, short]).splitlines()
    assert lines[0] == "2 figures with a goal: 1 met, 1 NOT met."
    assert lines[4] == "- spine.host: another: 0.98 [0.97, 0.99], n=12 times (goal: at least 0.95)"


def test_what_was_measured_later_replaces_what_is_kept(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("bench")
    monkeypatch.setattr(table, "FOLDER", folder)
    monkeypatch.setattr(figures, "FOLDER", folder)
    monkeypatch.setattr(table, "KEPT", folder / "kept" / "figures.json")
    monkeypatch.setattr(table, "STATUS", folder / "status.md")
    (folder / "kept").mkdir()
    (folder / "status.md").write_text(f"before\n{table.BEGIN}old\n{table.END}after\n")
    figures.save("spine.host", [FIGURE], table.places("spine.host"), 0.04)
    table.keep()
    figures.save("spine", [replace(FIGURE, value=0.5), replace(FIGURE, name="b", value=None, reason="no GPU")], (), 0)
    table.keep()
    figures.save("spine", [replace(FIGURE, value=None, reason="no GPU")], (), 0)
    (folder / "spine.host.json").unlink()
    found = {one.figure.name: one for one in table.newest()}
    assert found["b"].figure.value is None
    assert found["a ratio"].figure.value == 0.5, "a figure that cannot be measured here replaces none"
    text = (folder / "status.md").read_text()
    assert text.startswith(f"before\n{table.BEGIN}")
    assert text.endswith(f"{table.END}after\n")
    assert "old\n" not in text
    assert "not measured here: no GPU" in text


def test_status_shows_what_is_kept() -> None:
    """But for which figures are older than the code: that changes with the code."""
    shown = table.STATUS.read_text().partition(table.BEGIN)[2].partition(table.END)[0].strip()
    wanted = table.table(table.load(table.KEPT)).strip()
    assert shown.replace(", older than the code", "") == wanted.replace(", older than the code", "")
