"""The views of the lost percent: what `dlbench diagnose` says, sums exact, forecasts apart, text clean."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlbench.records.scan import scan
from dlbench.report import wording
from dlbench.report.charts import Chart
from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.views import model
from dlbench.views.causes.experiments import CAUSE_TITLES
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.causes.view import CausesView
from dlbench.views.command_reports import diagnosis
from dlbench.views.model import GroupView
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.stragglers import MAX_LISTED, MAX_SHOWN, SlowNodesView, StragglersView
from tests.analysis.test_causes import simulate
from tests.support.run_factory import Story, plans, write_run, write_scaling

VIEWS: dict[str, GroupView] = {view.id: view for view in (CausesView(), StragglersView())}


def write_straggler(out: Path, repeats: int = 5, points: tuple[int, ...] = (2, 4, 8)) -> None:
    """Two ranks per node; with more than one node rank 3, on n1, computes 20 ms longer; the network grows."""
    for plan in plans(system="box", points=points, ranks_per_node=2, repeats=repeats):
        drift = 1 + plan.series.repeat / 1000

        def work(rank: int, step: int, ranks: int = plan.layout.ranks, drift: float = drift) -> dict[str, float]:
            late = 20.0 if rank == 3 else (rank + step) % 5 * 0.1
            return {"backward": (50.0 + late) * drift, "input": 5.0 + 0.1 * ranks}

        times = simulate(plan, work, network_ms=4.0 * plan.layout.nodes)
        job = f"{plan.layout.ranks}{plan.series.repeat}"
        write_run(out, plan, times, Story(host=lambda rank: f"n{rank // 2}", job=job))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("causes") / "runs"
    write_straggler(out)
    return out


@pytest.fixture(scope="module")
def made(folder: Path) -> model.Report:
    return assemble(scan(folder))


@pytest.fixture(scope="module")
def group(made: model.Report) -> model.ReportGroup:
    return made.groups[0]


def lost(group: model.ReportGroup) -> LostPercent:
    return group.of(LostPercent)


def with_diagnosed(group: model.ReportGroup, **changes: Any) -> model.ReportGroup:
    found = lost(group)
    *before, last = found.diagnosed.points
    points = (*before, dataclasses.replace(last, **changes))
    diagnosed = dataclasses.replace(found.diagnosed, points=points)
    return dataclasses.replace(group, views={"causes": dataclasses.replace(found, diagnosed=diagnosed)})


def section(group: model.ReportGroup, view: str) -> Section:
    return VIEWS[view].section(group)


def sheets(group: model.ReportGroup, view: str) -> dict[str, Sheet[Any]]:
    return {sheet.name: sheet for sheet in section(group, view).sheets}


def charts(group: model.ReportGroup, view: str) -> list[Chart]:
    return list(section(group, view).charts())


def rows(sheet: Sheet[Any]) -> list[tuple[str, ...]]:
    return [tuple(map(str, row.cells)) for row in sheet.to_display().rows]


# Equal to the diagnosis


def test_report_and_diagnose_say_the_same(folder: Path, made: model.Report) -> None:
    found, document = diagnosis(scan(folder))
    assert [lost(group) for group in made.groups] == [lost(group) for group in found.groups]
    assert made.views["slow_nodes"] == found.views["slow_nodes"]
    own = {one.id: one for outer in document.sections for one in outer.sections}
    for outer in document_of(made).sections:
        for one in outer.sections:
            if one.id.startswith(("causes-", "stragglers-")):
                assert own[one.id].words == one.words
                assert [sheet.to_display() for sheet in own[one.id].sheets] == [
                    sheet.to_display() for sheet in one.sheets
                ]
    words = " ".join(section(made.groups[0], "causes").words)
    for point in lost(found.groups[0]).diagnosed.points:
        assert point.verdict.line in words


# The account


def drawn_rows(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every row of data in a specification."""
    for part in [spec, *spec.get("layer", [])]:
        yield from (part.get("data") or {}).get("values", [])
    for values in spec.get("datasets", {}).values():
        yield from values


def test_the_waterfall_s_bars_hang_together_and_end_at_the_efficiency(group: model.ReportGroup) -> None:
    waterfall, over_ranks = charts(group, "causes")
    point = lost(group).diagnosed.points[-1]
    bars = list({row["name"]: row for row in drawn_rows(waterfall.spec) if "name" in row}.values())
    drawn = [share for share in point.causes if share.is_measured and round(100 * share.lost.value, 1)]
    ordered = sorted(drawn, key=lambda share: -share.lost.value)
    assert {bar["name"] for bar in bars[1:-1]} == {CAUSE_TITLES[share.name] for share in drawn}
    # Losses first, the largest on top.
    assert [bar["name"] for bar in bars[1:3]] == [CAUSE_TITLES[share.name] for share in ordered[:2]]
    level = 100.0
    for bar in bars[1:-1]:
        share = next(share for share in drawn if CAUSE_TITLES[share.name] == bar["name"])
        ends = (bar["from"], bar["to"])
        assert level == pytest.approx(max(ends) if share.lost.value > 0 else min(ends), abs=0.02)
        level -= 100 * share.lost.value
        assert level == pytest.approx(min(ends) if share.lost.value > 0 else max(ends), abs=0.02)
        assert bar["low"] <= level + 0.02 <= bar["high"] + 0.04
        assert wording.lost_text(share.lost) == bar["shown"]
        assert wording.lost_text(share.lost) in waterfall.alt
    # What is printed as 0.0 is not drawn.
    assert bars[-1]["to"] == pytest.approx(level, abs=0.05 * len(point.causes))
    assert bars[-1]["to"] == pytest.approx(point.efficiency.value * 100, abs=0.01)
    assert wording.figure_text(point.efficiency) in waterfall.alt
    assert {row["place"] for row in drawn_rows(over_ranks.spec) if "place" in row} == {
        "4 ranks on 2 nodes",
        "8 ranks on 4 nodes",
    }


def test_one_table_says_what_is_not_measured(group: model.ReportGroup) -> None:
    sheet = sheets(group, "causes")["parts"]
    shown = [row[0] for row in rows(sheet)]
    assert "clock throttling" not in shown
    assert "recompute and swap" not in shown
    assert "No time: recompute and swap" in sheet.caption
    # Nothing else can be told apart on synthetic data, so the wait is not said twice.
    assert not any("waiting for batches" in title for title in shown)
    silent = [row for row in sheet.records() if not row["is_measured"]]
    assert {row["part"] for row in silent} == {"throttling"}
    for row in silent:
        assert row["seconds"] is row["lost_fraction"] is None
        assert row["why_not_measured"]
    assert any(text.startswith("clock throttling: not measured: ") for text in section(group, "causes").notes)


def test_rows_sum_to_the_loss_of_the_headline(group: model.ReportGroup) -> None:
    records = list(sheets(group, "causes")["parts"].records())
    for point in group.points[1:]:
        own = [row for row in records if row["ranks"] == point.ranks and not row["part_of"]]
        lost_to = {row["part"]: float(row["lost_fraction"] or 0) for row in own}
        assert lost_to.pop("step") == 1 - point.efficiency.value
        assert math.fsum(lost_to.values()) == pytest.approx(1 - point.efficiency.value, abs=1e-9)
        for name in ("compute", "exchange_phase"):
            children = [row for row in records if row["ranks"] == point.ranks and row["part_of"] == name]
            assert math.fsum(float(row["seconds"] or 0) for row in children) == pytest.approx(
                next(float(row["seconds"] or 0) for row in own if row["part"] == name)
            )


# Stragglers


def test_stragglers_are_ranked_with_what_makes_them_late(group: model.ReportGroup) -> None:
    assert section(group, "stragglers").headline.endswith(" of all waiting is for rank 3 on n1, late by compute")
    found = sheets(group, "stragglers")
    assert rows(found["stragglers"])[0][:2] == ("3", "n1")
    largest = lost(group).diagnosed.points[-1]
    late = [row for row in found["stragglers"].records() if row["ranks"] == 8]
    assert [(row["rank"], row["waited_s_per_step"]) for row in late] == [
        (one.rank, one.waited_s) for one in largest.waiting_ranks
    ]
    assert math.fsum(float(row["waited_share_fraction"] or 0) for row in late) == pytest.approx(1.0)


def test_many_stragglers_are_cut_and_counted(group: model.ReportGroup) -> None:
    late = lost(group).diagnosed.points[-1].waiting_ranks[0]
    many = tuple(dataclasses.replace(late, rank=rank, waited_s=1.0 / (rank + 1)) for rank in range(100))
    sheet = sheets(with_diagnosed(group, waiting_ranks=many), "stragglers")["stragglers"]
    assert len(rows(sheet)) == MAX_SHOWN
    assert "90 more ranks were late in some steps" in sheet.caption
    assert len([row for row in sheet.records() if row["ranks"] == 8]) == MAX_LISTED


def test_slow_nodes_are_told_once_and_with_the_option(made: model.Report) -> None:
    (found,) = SlowNodesView().sections(made)
    assert found.words[0] == "--exclude=n1"
    (sheet,) = found.sheets
    slow = [row for row in sheet.records() if row["verdict"] == "slow"]
    assert [row["host"] for row in slow] == ["n1"]
    # 10 runs on several hosts, the largest with 4.
    assert [row["runs"] for row in slow] == [10]
    assert {row["host"] for row in sheet.records()} == {"n0", "n1", "n2", "n3"}


# What is missing


def test_one_rank_count_has_parts_but_no_waterfall(tmp_path: Path) -> None:
    write_scaling(tmp_path, points=(1,), repeats=2)
    (found,) = assemble(scan(tmp_path)).groups
    (sheet,) = section(found, "causes").sheets
    assert {row["lost_fraction"] for row in sheet.records() if row["is_measured"]} == {0.0}
    assert charts(found, "causes") == []
    assert VIEWS["stragglers"].section(found) is None
    assert VIEWS["stragglers"].remedy(found)


def test_nobody_waiting_is_said(tmp_path: Path) -> None:
    write_scaling(tmp_path, points=(1, 2), repeats=1)
    made = assemble(scan(tmp_path))
    (found,) = made.groups
    assert section(found, "stragglers").headline == "No rank waited for another one"
    assert section(found, "stragglers").sheets == ()
    assert charts(found, "stragglers") == []
    assert SlowNodesView().sections(made) == ()
    assert SlowNodesView().remedy(made)


# Any format
