"""A run that failed takes its partner along and nothing else: no figure moves by more than its own paired interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import RunTable, tabulate
from dlbench.records.scan import scan
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.numbers import CausePoint, lost_percent
from dlbench.views.doubts import group_doubts
from tests.support.run_factory import constant, plans, write_run

DRIFT = 0.2
"""The machine slows down by so much over the ten repeats, by far more than runs of one repeat differ."""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> RunTable:
    """Ten interleaved repeats at two rank counts."""
    out = tmp_path_factory.mktemp("scaled")
    noise = np.random.default_rng(0)
    for plan in plans(points=(1, 2), repeats=10):
        slow = (1 + DRIFT * plan.series.repeat / 9) * noise.lognormal(0, 0.005)
        phases = [5.0, 0.0, 30.0, 50.0, 25.0 * (plan.layout.ranks > 1), 10.0]
        write_run(out, plan, constant([part * slow for part in phases], other=5.0 * slow))
    return tabulate(scan(out), with_causes=True)


def without(table: RunTable, run_id: str) -> RunTable:
    """As if this run had failed."""
    return replace(
        table,
        figures={name: row for name, row in table.figures.items() if name != run_id},
        parts={name: row for name, row in table.parts.items() if name != run_id},
        runs={name: run for name, run in table.runs.items() if name != run_id},
    )


def figures(table: RunTable) -> Iterator[tuple[tuple[int, str], Estimate]]:
    """Every figure of every point that is held against the baseline: what laws and forecasts take, too."""
    (group,) = groups(table)
    for point in group.points[1:]:
        yield (point.ranks, "speed-up"), point.speedup
        yield (point.ranks, "efficiency"), point.efficiency
    for account in accounts(table)[1:]:
        for part in (*account.causes, account.exchange_phase, account.whole):
            yield (account.ranks, f"lost in {part.name}"), part.lost


def accounts(table: RunTable) -> tuple[CausePoint, ...]:
    (group,) = groups(table)
    return lost_percent(group, table).diagnosed.points


def holds(whole: Estimate, found: Estimate) -> bool:
    # Figures without any scatter (a part that no run has) are rounding.
    return whole.low - 1e-9 <= found.value <= whole.high + 1e-9


def test_losing_any_run_moves_no_figure_of_a_point_by_more_than_its_interval(scaled: RunTable) -> None:
    whole = dict(figures(scaled))
    assert {estimate.unpaired for estimate in whole.values()} == {0}
    for run_id, run in scaled.runs.items():
        lost = run.plan.layout.ranks
        for (ranks, name), found in figures(without(scaled, run_id)):
            assert holds(whole[ranks, name], found), (run_id, ranks, name)
            is_missing = lost in (1, ranks)
            assert (found.n, found.unpaired) == ((9, 1) if is_missing else (10, 0)), (run_id, ranks, name)


def test_parts_still_sum_to_the_headline(scaled: RunTable) -> None:
    table = without(scaled, next(iter(scaled.runs)))
    (group,) = groups(table)
    for point, account in zip(group.points, accounts(table), strict=True):
        assert sum(part.lost.value for part in account.causes) == pytest.approx(1 - point.efficiency.value, abs=1e-9)
        whole = account.whole
        if not point.is_baseline:
            assert whole.lost.value == pytest.approx(1 - whole.ideal_seconds / whole.seconds.value)
    assert "not-interleaved" not in {doubt.code for doubt in group_doubts(group, table)}
