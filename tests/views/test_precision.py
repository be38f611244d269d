"""The report on runs beside each other: precision against brute force, what differs, which systems."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.comparability import averaged_id
from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.report.document import Section
from dlbench.report.table import Sheet, TextTable
from dlbench.specs.plan import RunPlan
from dlbench.views import model
from dlbench.views.differences import DifferencesView, RunDifference, run_differences
from dlbench.views.model import ReportView
from dlbench.views.precision import PrecisionComparison, PrecisionView
from dlbench.views.scaling_report import assemble
from dlbench.views.systems import SystemDescription, SystemsView
from tests.support.run_factory import Story, constant, edit_json, plans, write_run, write_scaling, write_sweep

VIEWS: tuple[ReportView, ...] = (PrecisionView(), DifferencesView(), SystemsView())

SWEEP = {"train.precision": ["fp32", "bf16"]}


def section(view: ReportView, report: model.Report) -> Section:
    (found,) = view.sections(report)
    return found


def sheet(report: model.Report, name: str) -> Sheet[Any]:
    found = [section for view in VIEWS for section in view.sections(report)]
    return next(sheet for one in found for sheet in one.sheets if sheet.name == name)


WARM = {"seconds": 4.0, "programs": 2, "from_cache": 2}


def texts(table: TextTable) -> list[list[str]]:
    return [[str(cell) for cell in row.cells] for row in table.rows]


def write_precisions(out: Path, repeats: int = 5) -> list[RunPlan]:
    """bf16 is 1.6 times as fast, each repeat by a little more, and holds 300 of 500 MiB."""

    def speed(plan: RunPlan) -> float:
        return 1.6 + plan.series.repeat / 100 if plan.workload.train.precision == "bf16" else 1.0

    made = write_sweep(out, speed, points=(1, 2), repeats=repeats, sweep=SWEEP)
    for plan in made:
        record = out / plan.run_id / "record.json"
        content = json.loads(record.read_text())
        is_low = plan.workload.train.precision == "bf16"
        own = {"peak_memory_bytes": (300 if is_low else 500) * 2**20}
        ranks = [{**rank, **own, "last_loss": 1.5 + rank["rank"]} for rank in content["ranks"]]
        edit_json(record, ranks=ranks, precision="bf16 by autocast" if is_low else "fp32 without TF32")
    return made


def test_precisions_beside_each_other(tmp_path: Path) -> None:
    write_precisions(tmp_path)
    report = assemble(scan(tmp_path))
    (found,) = report.all_of(PrecisionComparison)
    assert found.reference == "fp32"
    assert [(row.ranks, row.precision) for row in found.rows] == [(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")]
    for reference, row in zip(found.rows[::2], found.rows[1::2], strict=True):
        assert reference.ratio is None
        # Both share the drift of a repeat, which cancels in the geometric mean of the ratios of pairs.
        fast = statistics.geometric_mean(1.6 + k / 100 for k in range(5))
        assert row.ratio.value == pytest.approx(fast, rel=1e-6)
        assert row.is_paired
        assert row.ratio.kind == "Student t"
        assert row.ratio.low > 1.5
        assert row.memory_ratio.value == pytest.approx(0.6)
        assert row.in_force == "bf16 by autocast"
        assert row.loss.value == pytest.approx(1.5 + (row.ranks - 1) / 2)
    assert "bf16 is faster than fp32" in found.verdict
    rows = {(row["ranks"], row["precision"]): row for row in sheet(report, "precision").records()}
    assert rows[2, "bf16"]["throughput_ratio"] == found.rows[3].ratio.value


def test_runs_apart_are_not_called_interleaved(tmp_path: Path) -> None:
    write_scaling(tmp_path, points=(1,), series="a")
    write_scaling(tmp_path, points=(1,), series="b", base_ms=50, overrides={"train.precision": "bf16"})
    (found,) = assemble(scan(tmp_path)).all_of(PrecisionComparison)
    assert not any(row.is_paired for row in found.rows)
    assert any("--sweep train.precision=fp32,bf16" in note for note in found.notes)


def test_groups_that_differ_in_more_are_no_pair(tmp_path: Path) -> None:
    write_scaling(tmp_path, points=(1,), series="a", repeats=1)
    changed = {"train.precision": "bf16", "train.batch_per_rank": 8}
    write_scaling(tmp_path, points=(1,), series="b", repeats=1, overrides=changed)
    report = assemble(scan(tmp_path))
    assert report.views["precisions"] == ()
    assert "--sweep train.precision=fp32,bf16" in PrecisionView().remedy(report)


def test_few_repeats_carry_no_verdict_and_losses_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    made = write_precisions(tmp_path, repeats=2)
    bad = next(plan for plan in made if plan.workload.train.precision == "bf16" and plan.layout.ranks == 2)
    record = tmp_path / bad.run_id / "record.json"
    content = json.loads(record.read_text())
    edit_json(record, ranks=[content["ranks"][0], {**content["ranks"][1], "last_loss": None}])
    report = assemble(scan(tmp_path))
    (found,) = report.all_of(PrecisionComparison)
    assert "has too few runs for a verdict against" in found.verdict
    row = found.rows[3]
    assert (row.num_not_finite, row.loss.n if row.loss else None) == (1, 1)
    assert "not finite in 1 run" in " ".join(texts(sheet(report, "precision").to_display())[3])


# Differences


def test_what_differs_is_told_with_its_runs_and_groups(tmp_path: Path) -> None:
    environments = [{"host": "n0", "package.torch": "2.1"}, {"host": "n1", "package.torch": "2.2"}]
    for plan in plans(points=(1, 2), repeats=2, tags={"commit": "abc"}):
        write_run(tmp_path, plan, constant([1] * 6), Story(environment=environments[plan.series.repeat]))
    changed = {"train.optimizer.learning_rate": 0.5, "train.label_smoothing": 0.1}
    for plan in plans(points=(1,), repeats=1, series="s2", engine="ddp", overrides=changed, tags={"commit": "def"}):
        write_run(tmp_path, plan, constant([1] * 6), Story(environment=environments[1]))
    report = assemble(scan(tmp_path))
    found = {item.key: item for item in report.all_of(RunDifference)}
    counts = {key: [(value.value, value.num_runs, len(value.groups)) for value in found[key].values] for key in found}
    assert counts["engine"] == [("horovod", 4, 1), ("ddp", 1, 1)]
    assert counts["commit"] == [("abc", 4, 1), ("def", 1, 1)]
    assert counts["package.torch"] == [("2.2", 3, 2), ("2.1", 2, 1)]
    assert counts["train.label_smoothing"] == [("0.0", 4, 1), ("0.1", 1, 1)]
    assert found["train.optimizer.learning_rate"].kind == "setting"
    assert found["engine"].keeps_apart
    assert found["train.optimizer.learning_rate"].keeps_apart
    assert not found["package.torch"].keeps_apart
    assert not found["commit"].keeps_apart
    # What differs by nature comes last.
    expected = [item.expected for item in report.all_of(RunDifference)]
    assert expected == sorted(expected)
    assert {item.key for item in report.all_of(RunDifference) if item.expected} == {"host", "ranks"}
    # A value stands for exactly the runs that have it.
    for item in report.all_of(RunDifference):
        assert sum(value.num_runs for value in item.values) == 5
    assert section(DifferencesView(), report).headline == "runs of one group differ in package.torch"


def test_differences_know_every_setting_of_a_plan(tmp_path: Path) -> None:
    """Whatever `--set` can change is told."""
    changes: dict[str, Any] = {"train.seed": 7, "model.base_width": 8, "measure.warmup_steps": 1}
    changes |= {"system.launch.environment": {"A": "1"}, "sync.fusion": "own:none"}
    base = plans(points=(2,), repeats=1, series="base")[0]
    write_run(tmp_path, base, constant([1] * 6))
    for number, (key, value) in enumerate(changes.items()):
        if key == "system.launch.environment":
            launch = base.system.launch.model_copy(update={"environment": value})
            system = base.system.model_copy(update={"launch": launch})
            plan = base.model_copy(update={"run_id": "e-r0", "system": system})
        else:
            plan = plans(points=(2,), repeats=1, series=f"s{number}", overrides={key: value})[0]
        write_run(tmp_path, plan, constant([1] * 6))
    found = {item.key for item in run_differences(list(tabulate(scan(tmp_path)).runs.values()))}
    assert {"train.seed", "model.base_width", "measure.warmup_steps", "system.launch.environment.A"} <= found


def test_what_keeps_runs_apart_is_what_groups_are_made_by(tmp_path: Path) -> None:
    """Against the groups themselves: one setting at a time."""
    base = plans(points=(2,), repeats=1, series="base")[0]
    write_run(tmp_path / "base", base, constant([1] * 6))
    system = base.system.model_copy(update={"title": "Another name", "setup": ("true",)})
    changed = {
        "system": base.model_copy(update={"run_id": "x-r0", "system": system}),
        "stall": plans(points=(2,), repeats=1, series="st", overrides={"measure.stall_timeout_s": 10.0})[0],
        "keep": plans(points=(2,), repeats=1, series="k", overrides={"train.seed": 9})[0],
        "steps": plans(points=(2,), repeats=1, series="m", overrides={"measure.measured_steps": 3})[0],
    }
    (reference,) = tabulate(scan(tmp_path / "base")).runs.values()
    for name, plan in changed.items():
        write_run(tmp_path / name, plan, constant([1] * 6))
        (other,) = tabulate(scan(tmp_path / name)).runs.values()
        found = [item for item in run_differences([reference, other]) if item.kind == "setting"]
        assert found, name
        is_apart = averaged_id(reference) != averaged_id(other)
        assert any(item.keeps_apart for item in found) == is_apart, name


def test_a_shared_out_batch_keeps_no_runs_apart(tmp_path: Path) -> None:
    """Under strong scaling a rank's batch follows from the rank count; the global batch keeps groups apart."""
    write_scaling(tmp_path, points=(1, 2), repeats=1, series="a", scaling="strong")
    report = assemble(scan(tmp_path))
    (group,) = report.groups
    assert [point.batch_per_rank for point in group.points] == [4, 2]
    found = {item.key: item for item in report.all_of(RunDifference)}
    assert found.keys() == {"batch_per_rank", "ranks"}
    assert (found["batch_per_rank"].expected, found["batch_per_rank"].keeps_apart) == (True, False)
    doubled = {"train.batch_per_rank": 8}
    write_scaling(tmp_path, points=(1, 2), repeats=1, series="b", scaling="strong", overrides=doubled)
    report = assemble(scan(tmp_path))
    found = {item.key: item for item in report.all_of(RunDifference)}
    assert len(report.groups) == 2
    assert (found["global_batch"].expected, found["global_batch"].keeps_apart) == (False, True)
    assert not found["batch_per_rank"].keeps_apart


# Systems


def test_systems_say_what_is_known_and_what_is_not(tmp_path: Path) -> None:
    machine = {"host": "n0", "cpu.model": "EPYC 7763", "cpu.cores": "128", "memory.bytes": str(512 * 2**30)}
    software = {"os": "Debian 12", "kernel": "6.1", "package.torch": "2.5", "package.horovod": "0.28.1"}
    for plan in plans(points=(1, 2), repeats=2):
        own = {"gpu.driver": f"55{plan.series.repeat}.1", "variable.NCCL_ALGO": "Ring"}
        environment = {**machine, **software, **own}
        story = Story(environment=environment, device="cuda:0 (NVIDIA A100)", host=lambda rank: f"n{rank}")
        write_run(tmp_path, plan, constant([1] * 6), story)
    report = assemble(scan(tmp_path))
    (found,) = report.all_of(SystemDescription)
    fields = dict(found.fields)
    wanted = {"Processor": "EPYC 7763", "Memory per node": "512 GiB", "GPU": "NVIDIA A100"}
    wanted |= {"Framework": "PyTorch 2.5", "Variables": "NCCL_ALGO=Ring"}
    assert {name: fields[name] for name in wanted} == wanted
    assert "GPU driver 550.1" in fields["Other software"]
    assert "(2 runs); " in fields["Other software"]
    assert {"Node interconnect", "Storage", "Cooling"} <= set(found.unknown)
    assert (found.num_runs, found.hosts) == (4, ("n0", "n1"))
    rows = {row["what"]: row["value"] for row in sheet(report, "systems").records()}
    assert rows["Processor"] == "EPYC 7763"
    assert rows["Storage"] == "not recorded"
    assert section(SystemsView(), report).headline == "1 system, 2 hosts"


def test_the_start_up_of_runs_that_compiled_is_told_from_that_of_runs_that_loaded(tmp_path: Path) -> None:
    uncounted = {"seconds": 50.0, "programs": 0, "from_cache": 0}
    first = [{"seconds": 41.0, "programs": 2, "from_cache": 0}, uncounted]
    compiling = itertools.chain(first, itertools.repeat(WARM))
    for plan in plans(points=(1,), repeats=4):
        folder = write_run(tmp_path, plan, constant([1] * 6))
        record = json.loads(folder.record.read_text())
        record["ranks"][0]["compiling"] = next(compiling)
        edit_json(folder.record, ranks=record["ranks"])
    fields = dict(assemble(scan(tmp_path)).all_of(SystemDescription)[0].fields)
    assert "; compiling took 41 s of it in 1 of 4 runs" in fields["Start-up"]
    assert "; loading compiled code from a cache took 4 s of it in 2 of 4 runs" in fields["Start-up"]
    assert "; compiling (not known whether from a cache) took 50 s of it in 1 of 4 runs" in fields["Start-up"]
