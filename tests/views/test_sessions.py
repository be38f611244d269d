"""A report over several sessions: every interval over runs, of every table, is one of sessions and says so."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.report.wording import basis_text
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import Estimate
from dlbench.views.decomposition import decompositions
from dlbench.views.model import Report
from dlbench.views.scaling_report import assemble
from dlbench.views.sweep.numbers import sweeps
from tests.support.out_of_core_factory import REAL, reading_result, shuffle_result, staging_result
from tests.support.run_factory import MS, Story, Training, exchange_result, plans, quality_plans, write_run, write_sweep
from tests.support.watch_factory import write_samples

NOISE_SCALE = {
    "small_batch": 4,
    "large_batch": 8,
    "steps": 50,
    "gradient_norm2": 1.0,
    "covariance_trace": 32.0,
    "noise_scale": 32.0,
}

RANGES = {"quantiles"}
"""Bands from the smallest to the largest of all runs, by definition."""

MESSAGES: Mapping[str, Any] = {
    "gradients": ((4_000_000, 0.02), (2_000_000, 0.03), (500_000, 0.05)),
    "alpha_s": 1e-4,
    "beta_s_per_byte": 1e-10,
}


def write_session(out: Path, runs: int, of_session: int) -> None:
    """Series with something for many views, whose repeats ran in jobs of `of_session` repeats each."""
    noise = random.Random(26)
    both = {"repeats": runs, "engine": "ddp"}
    series = [
        *plans(**both, points=(1, 2), data=REAL, series="in-place"),
        *plans(**both, points=(1, 2), data=REAL, series="copied", overrides={"data.staging": "replicate"}),
        *plans(**both, points=(2,), sweep={"train.precision": ("fp32", "bf16")}, series="precision"),
        *plans(**both, points=(1, 2), sweep={"sync.fusion": ("auto", "own:single")}, series="fusion"),
        *plans(**both, points=(2,), data="/data/others", tiers=True, series="tiers"),
        *plans(**both, points=(2,), data="/data/apart", decompose=True, series="apart"),
        *quality_plans(points=(2,), repeats=runs, overrides={"measure.noise_scale": True}, series="learning"),
    ]
    for plan in series:
        data, is_learning = plan.workload.data, plan.series.id == "learning"
        record: dict[str, Any] = {} if data.is_synthetic else {"reading": reading_result(), "shuffle": shuffle_result()}
        record |= {"staging": staging_result()} if data.staging == "replicate" else {}
        record |= {"noise_scale": NOISE_SCALE} if is_learning else {}
        exchanges = plan.layout.ranks > 1 and plan.sync.exchange != "none"
        story = Story(
            job=str(plan.series.repeat // of_session),
            record=record,
            data={"kind": "jpeg-tree", "num_samples": 4000},
            training=Training(values=(0.2, 0.4, 0.55)) if is_learning else None,
            exchange=exchange_result(plan, **MESSAGES) if exchanges else None,
        )
        slow = noise.lognormvariate(0, 0.05)
        phases = [round(value * slow * MS) for value in (5.0, 1.0, 30.0, 45.0, 10.0, 10.0)]
        folder = write_run(out, plan, lambda rank, step, phases=phases: (phases, 2 * MS), story)
        if plan.series.id == "in-place":
            seconds = range(-4, 18)
            rows = [(t * 1_000_000_000, 1e6 + 300 * slow * t) for t in seconds]
            write_samples(folder, 0, ["host.energy.package-0_j"], rows)


def estimates(value: object, where: str = "") -> Iterator[tuple[str, Estimate]]:
    """Every estimate within plain data, with the names that lead to it."""
    if isinstance(value, Estimate):
        yield where, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from estimates(getattr(value, field.name), f"{where}.{type(value).__name__}.{field.name}")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from estimates(one, f"{where}.{key}")
    elif isinstance(value, tuple | list):
        for one in value:
            yield from estimates(one, where)


@pytest.fixture(scope="module", params=[(6, 3), (5, 1)], ids=["2 sessions x 3 runs", "5 sessions x 1 run"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, Report]:
    runs, of_session = request.param
    out = tmp_path_factory.mktemp("runs")
    write_session(out, runs, of_session)
    return runs // of_session, out, assemble(scan(out))


def test_every_interval_over_runs_counts_sessions(made: tuple[int, Path, Report]) -> None:
    count, out, report = made
    found = list(estimates([(group.points, dict(group.views)) for group in report.groups]))
    found += list(estimates({**report.views, "decomposition": decompositions(scan(out).runs)}))
    over_runs = [
        (where, one)
        for where, one in found
        if one.low is not None and one.kind not in ("fit", "within-run") and RANGES.isdisjoint(where.split("."))
    ]
    subjects = {where.split(".")[1] for where, _ in over_runs}
    assert {"Point", "data_path", "reading", "staging", "energy", "noise", "time_to_train"} <= subjects
    assert {"precisions", "stalls", "decomposition", "break_even"} <= subjects
    wrong = {
        where: f"{one.kind}, {one.sessions} sessions of {one.n}" for where, one in over_runs if one.sessions != count
    }
    assert wrong == {}
    assert {one.is_confident for _, one in over_runs} == {count >= 5}
    assert all("sessions" in basis_text(one) for _, one in over_runs)


def test_two_sessions_of_a_sweep_decide_nothing(tmp_path: Path) -> None:
    """Ten repeats of two jobs: however alike they are within a job, of how jobs differ there are two cases."""

    def faster(plan: RunPlan) -> float:
        wobble = 1 + 0.002 * (plan.series.repeat % 3)
        return wobble * (1.2 if str(plan.sync.fusion) == "own:single" else 1.0)

    axes = {"sync.fusion": ("own:none", "own:single"), "sync.wire": ("fp32", "fp16")}

    def story(plan: RunPlan) -> Story:
        return Story(job=str(plan.series.repeat // 5), last_loss=1.9 + 0.01 * plan.series.repeat)

    write_sweep(tmp_path, faster, engine="ddp", sweep=axes, repeats=10, story=story)
    (found,) = sweeps(tabulate(scan(tmp_path)))
    assert {one.sessions for _, one in estimates(found) if one.low is not None and one.low != one.high} == {2}
    (cell,) = found.cells
    assert {axis.verdict for axis in cell.axes} == {"insufficient"}
    assert {setting.verdict for setting in cell.settings} == {"baseline", "insufficient"}
    assert cell.best == ""
