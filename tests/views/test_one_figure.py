"""One report, one figure for a quantity of a point: whatever table has it, it is the geometric mean over the runs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlbench.records.scan import scan
from dlbench.report.document import Document, Section
from dlbench.report.table import Sheet
from dlbench.views.decomposition import decompositions
from dlbench.views.model import Report
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.stalls import stalls
from tests.support.out_of_core_factory import REAL, reading_result
from tests.support.run_factory import Story, constant, plans, write_run

RATES = {"throughput_per_s", "samples_per_s", "baseline_throughput_per_s"}
STEPS = {"step_s", "p50_s", "p95_s", "step_p95_s"}
RATIOS = {"ratio", "speedup", "factor", "effect", "throughput_ratio"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Swept settings, two precisions, tiers of storage, and twins without input: two noisy runs of each."""
    out = tmp_path_factory.mktemp("runs")
    noise = random.Random(26)
    for plan in (
        *plans(repeats=2, engine="ddp", sweep={"sync.fusion": ("auto", "own:single")}, series="fusion"),
        *plans(points=(2,), repeats=2, sweep={"train.precision": ("fp32", "bf16")}, series="precision"),
        *plans(points=(2,), repeats=2, data=REAL, tiers=True, series="tiers"),
        *plans(points=(2,), repeats=2, data="/data/others", decompose=True, series="apart"),
    ):
        phases = [value * noise.lognormvariate(0, 0.3) for value in (5.0, 1.0, 30.0, 45.0, 10.0, 10.0)]
        reading = {"reading": reading_result()} if plan.workload.data.source == REAL else {}
        write_run(out, plan, constant(phases), Story(record=reading))
    return out


@pytest.fixture(scope="module")
def made(folder: Path) -> tuple[Report, Document]:
    report = assemble(scan(folder))
    return report, document_of(report)


def sheets(document: Document) -> Iterator[tuple[Section, Sheet[Any]]]:
    def of(sections: tuple[Section, ...]) -> Iterator[tuple[Section, Sheet[Any]]]:
        for section in sections:
            yield from ((section, sheet) for sheet in section.sheets if sheet.name != "runs")
            yield from of(section.sections)

    yield from of(document.sections)


def near(value: float, known: list[float]) -> bool:
    return any(math.isclose(value, one, rel_tol=1e-9) for one in known)


def test_tables_have_no_second_figure_of_a_point(made: tuple[Report, Document]) -> None:
    """Two runs of a setting had 10.53 in one table (their median) and 9.802 in the next (their geometric mean)."""
    report, document = made
    runs: dict[str, list[float]] = {}
    for run in report.runs:
        assert run.throughput is not None
        assert run.step_median_s is not None
        key = f"{run.group} {run.series} {run.variant} {run.ranks}"
        runs.setdefault(f"{key} rate", []).append(run.throughput)
        # Steps of a run are equal here: its mean step is its median, and its 95th percentile.
        runs.setdefault(f"{key} step", []).append(run.step_median_s)
    means = {name: math.exp(sum(map(math.log, values)) / len(values)) for name, values in runs.items()}
    rates = [value for name, value in means.items() if name.endswith("rate")]
    steps = [value for name, value in means.items() if name.endswith("step")]
    ratios = [a / b for a in rates for b in rates]
    seen: dict[str, set[str]] = {"rates": set(), "steps": set(), "ratios": set()}
    for section, sheet in sheets(document):
        for record in sheet.records():
            for names, kind, known in ((RATES, "rates", rates), (STEPS, "steps", steps), (RATIOS, "ratios", ratios)):
                for name in names & record.keys():
                    value = record[name]
                    if isinstance(value, float):
                        seen[kind].add(sheet.name)
                        assert near(value, known), f"{section.id}, {sheet.name}, {name}: {value} is no mean over runs"
    assert seen["rates"] >= {"points", "sweep", "time-to-train", "stall-runs"}
    assert seen["ratios"] >= {"points", "sweep", "sweep-axes", "precision"}
    assert seen["steps"] >= {"points", "steps", "stall-runs"}


def test_input_takes_the_same_time_in_the_account_and_in_the_data_path(made: tuple[Report, Document]) -> None:
    """Shares of the geometric mean step, whatever the table."""
    _, document = made
    found: dict[tuple[str, object], dict[str, float]] = {}
    for section, sheet in sheets(document):
        for record in sheet.records():
            row = found.setdefault((section.id.rpartition("-")[2], record.get("ranks")), {})
            if sheet.name == "parts" and record["part"] == "input" and isinstance(record["seconds"], float):
                row["account"] = record["seconds"]
            if sheet.name == "data-path":
                row["data path"] = sum(float(str(record[name])) for name in ("input_wait_s", "copy_s"))
    both = [row for row in found.values() if len(row) == 2]
    assert both
    for row in both:
        assert row["account"] == pytest.approx(row["data path"], rel=1e-9)


def test_parts_that_were_taken_away_sum_to_the_mean_step(folder: Path, made: tuple[Report, Document]) -> None:
    report, _ = made
    found = scan(folder)
    steps = [point.mean_step.value for group in report.groups for point in group.points]
    (point,) = decompositions(found.runs)
    assert near(point.step_s.value, steps)
    for one in point.differences:
        assert one.share.value == pytest.approx(one.seconds.value / point.step_s.value)
        assert one.gap_s.value == pytest.approx(one.seconds.value - one.phase_s.value)
    (tiers,) = stalls(found.runs)
    assert near(tiers.whole_s.value, steps)
    seconds = [part.seconds.value for part in tiers.parts if part.seconds is not None]
    assert sum(seconds) == pytest.approx(tiers.whole_s.value)
    assert seconds[0] == pytest.approx(next(one.step_s.value for one in tiers.tiers if one.tier == "synthetic"))
