"""One figure for a quantity of a point, whatever table or command has it; over sessions every interval is one of
sessions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dlbench.analysis.table import tabulate
from dlbench.cli import cli
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout
from dlbench.records.scan import scan
from dlbench.report.document import Document, Section
from dlbench.report.table import Sheet
from dlbench.report.wording import basis_text
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import Estimate
from dlbench.views.decomposition import decompositions
from dlbench.views.model import Report
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.stalls import stalls
from dlbench.views.sweep.numbers import sweeps
from tests.support.collectives_factory import Story as CommStory
from tests.support.collectives_factory import network, write_comm_series
from tests.support.out_of_core_factory import REAL, reading_result, shuffle_result, staging_result
from tests.support.run_factory import (
    MS,
    Story,
    Training,
    constant,
    exchange_result,
    plans,
    quality_plans,
    write_run,
    write_sweep,
)
from tests.support.watch_factory import write_samples

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


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 1 to 8 nodes of two ranks whose messages cost what a planted network says, and runs that measured it."""
    out = tmp_path_factory.mktemp("machine")
    nodes = {"system": "box", "points_are": "nodes", "ranks_per_node": 2, "launcher": "mpirun"}
    for plan in plans(**nodes, points=(1, 2, 4, 8), repeats=5):
        costs, end = planted_exchange(plan.layout.ranks)
        drift = 1 + 0.002 * plan.series.repeat
        rest = round(3 * drift * MS)
        phases = [round(one * drift * MS) for one in (5.0, 1.0, 30.0, 50.0, 1e3 * end - 50.0, 8.0)]
        gradients = exchange_result(plan, gradients=PLANTED_MESSAGES, alpha_s=0.0, beta_s_per_byte=0.0)
        story = Story(
            exchange={**gradients, "communication_s": sum(costs)},
            host=lambda rank: f"n{rank // 2}",
            cores=lambda rank: (rank % 2,),
        )
        write_run(out, plan, lambda rank, step, phases=phases, rest=rest: (phases, rest), story)
    own = {"backends": "none", "algorithms": "ring,hierarchical", "sizes": "64KiB:16MiB", "repeats": 3}
    write_comm_series(out, CommStory(network=PLANTED, noise=0.005), **nodes, **own, points=(2, 4))
    said("comm", "fit", out, "-o", out / "box.network.json")
    return out


PLANTED_MESSAGES = ((4_000_000, 0.02), (1_000_000, 0.05))
PLANTED = network(across=(100e-6, 4e-9))


def planted_exchange(ranks: int) -> tuple[list[float], float]:
    """Seconds of each message at so many ranks, and when the last is through."""
    layout, end = Layout(ranks=ranks, group_size=2), 0.0
    costs = [predict("allreduce", "ring", size, layout, PLANTED) for size, _ in PLANTED_MESSAGES]
    for (_, ready), cost in zip(PLANTED_MESSAGES, costs, strict=True):
        end = max(end, ready) + cost
    return costs, end


def said(*words: object) -> Any:
    """What a command prints, as JSON if it is any."""
    found = CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout) if "json" in words else None


def test_all_commands_say_the_same_of_ranks_that_were_not_measured(machine: Path) -> None:
    costs = ("--network", machine / "box.network.json", "--format", "json")
    (group,) = said("project", "runs", machine, "--to", "16,32,64", *costs)["groups"]
    told = {one["ranks"]: one for one in group["projection"]["targets"]}
    # The report shows the numbers of the command.
    forecast = said("report", machine, *costs)["groups"][0]["forecast"]["projection"]["targets"]
    assert forecast == [told[32], told[64]]
    for ranks in (32, 64):
        step = told[ranks]["step"]["quantiles"]
        assert step[2] < 0.047 + planted_exchange(ranks)[1] < step[6]


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
def of_sessions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, Report]:
    runs, of_session = request.param
    out = tmp_path_factory.mktemp("runs")
    write_session(out, runs, of_session)
    return runs // of_session, out, assemble(scan(out))


def test_every_interval_over_runs_counts_sessions(of_sessions: tuple[int, Path, Report]) -> None:
    count, out, report = of_sessions
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
