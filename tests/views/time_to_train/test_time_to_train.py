"""Allocated time: from the throughput, in every format, and one over the efficiency of the baseline's."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from dlbench.records.scan import scan
from dlbench.report.formats.csv import to_csv
from dlbench.report.formats.markdown import to_markdown
from dlbench.report.wording import figure_text
from dlbench.views.assemble import assemble
from dlbench.views.cost import Cost
from dlbench.views.document import document_of
from tests.support.run_factory import write_scaling


def test_rank_hours_follow_from_the_throughput(tmp_path: Path) -> None:
    write_scaling(tmp_path, points=(1, 2, 4))
    report = assemble(scan(tmp_path))
    (group,) = report.groups
    found = group.of(Cost)
    assert found is not None
    for point, cost in zip(group.points, found.points, strict=True):
        hours = point.ranks * 1e6 / point.throughput.value / 3600
        assert cost.rank_hours.value == pytest.approx(hours)
        assert cost.rank_hours.low == pytest.approx(point.ranks * 1e6 / point.throughput.high / 3600)  # type: ignore[operator]
        assert (cost.rank_hours.n, cost.rank_hours.kind) == (point.throughput.n, point.throughput.kind)
        assert cost.node_hours.value == pytest.approx(point.nodes * 1e6 / point.throughput.value / 3600)
        ratio = cost.rank_hours.value / found.points[0].rank_hours.value
        assert ratio == pytest.approx(1 / point.efficiency.value)
    rows = list(csv.DictReader(io.StringIO(to_csv(document_of(report), "cost"))))
    assert [float(row["rank_hours_per_million_samples"]) for row in rows] == [
        point.rank_hours.value for point in found.points
    ]
    assert figure_text(found.points[-1].rank_hours).partition(" ")[0] in to_markdown(document_of(report))
