"""Scaling: the best single rank beside the baseline, efficiency by leaf switches, and what a report says to do next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dlbench.analysis.environments import Doubt
from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.report.document import Document
from dlbench.report.formats.terminal import to_text
from dlbench.specs.plan import RunPlan
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.command_reports import result_of
from dlbench.views.model import ReportGroup
from dlbench.views.next_step import more_ranks, next_step
from dlbench.views.scaling import ScalingView
from dlbench.views.scaling_report import assemble
from dlbench.views.sweep.numbers import sweeps
from tests.support.run_factory import (
    Story,
    Training,
    constant,
    plans,
    quality_plans,
    write_run,
    write_scaling,
    write_sweep,
)


def write_runs(out: Path, made: list[RunPlan], milliseconds: float) -> None:
    for plan in made:
        write_run(out, plan, constant([1, 0, milliseconds - 3, 1, 0, 1]))


def notes(out: Path) -> list[str]:
    return [group.baseline_note for group in assemble(scan(out)).groups if len(group.points) > 1]


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_a_faster_single_rank_is_named_with_the_speed_up_against_it(tmp_path: Path, scaling: str) -> None:
    write_runs(tmp_path, plans(points=(1, 4), scaling=scaling, overrides={"train.batch_per_rank": 8}), 100)
    cores = {"layout.cores_per_rank": 4, "train.batch_per_rank": 8}
    write_runs(tmp_path, plans(points=(1,), series="s2", engine="single", overrides=cores), 50)
    (note,) = notes(tmp_path)
    assert note.startswith("Against the best single-rank run here (single, 4 cores; ")
    # Four ranks have the batch of four at weak scaling, and that of one at strong.
    assert f": {'2.00x' if scaling == 'weak' else '0.50x'} with 4 ranks (" in note
    assert note.endswith("ranks of the baseline have 1 core.")


def test_a_single_rank_that_trains_something_else_is_no_measure(tmp_path: Path) -> None:
    write_runs(tmp_path, plans(points=(1, 2)), 100)
    write_runs(tmp_path, plans(points=(1,), series="s2", overrides={"train.batch_per_rank": 16}), 10)
    (note,) = notes(tmp_path)
    assert note.startswith("Every rank had 1 core, also at the baseline, ")


def test_nodes_of_equally_many_ranks_hold_nothing_back(tmp_path: Path) -> None:
    made = plans(system="box", points=(2, 4), ranks_per_node=2)
    write_runs(tmp_path, made, 100)
    assert notes(tmp_path) == [""]


def write_on_switches(out: Path, switches_of: Callable[[RunPlan], int]) -> None:
    """Writes runs on 1 and 4 nodes, whose steps take 1.25 times as long on two leaf switches."""
    request = {"system": "box", "points_are": "nodes", "ranks_per_node": 1, "launcher": "mpirun"}
    for plan in plans(**request, points=(1, 4)):
        number = switches_of(plan)

        def of_rank(rank: int, number: int = number) -> dict[str, str]:
            return {"switch": f"root.leaf{rank % number}"} if number else {}

        step_ms = (125 if number > 1 else 100) * (1 + 0.001 * plan.series.repeat)
        write_run(out, plan, constant([0, 0, 0, step_ms, 0, 0]), Story(of_rank=of_rank))


def test_runs_of_one_count_are_told_apart_by_leaf_switches(tmp_path: Path) -> None:
    write_on_switches(tmp_path, lambda plan: 2 if plan.layout.nodes == 4 and plan.series.repeat % 2 else 1)
    (group,) = assemble(scan(tmp_path)).groups
    points, by_switches = ScalingView().section(group).sheets
    (column,) = (column for column in points.columns if column.title == "Leaf switches")
    assert [cell.text for cell in column.cells(points.rows)] == ["1", "1 or 2"]
    found = [(row.ranks, row.leaf_switches, row.throughput.n, row.efficiency.value) for row in by_switches.rows]
    assert found == [(4, (1,), 3, pytest.approx(1.0, rel=0.01)), (4, (2,), 2, pytest.approx(0.8, rel=0.01))]
    (doubt,) = [doubt for doubt in group.doubts if doubt.code == "leaf-switches"]
    assert doubt.severity == "serious"
    assert "1 at 1 rank; 1 or 2 at 4 ranks" in doubt.text
    assert "--switches=1" in doubt.text


@pytest.mark.parametrize(("on_four", "severity"), [(2, "note"), (1, None), (0, None)])
def test_points_that_differ_have_a_note(tmp_path: Path, on_four: int, severity: str | None) -> None:
    write_on_switches(tmp_path, lambda plan: on_four if plan.layout.nodes == 4 else 1)
    (group,) = assemble(scan(tmp_path)).groups
    (points,) = ScalingView().section(group).sheets
    assert ("Leaf switches" in [column.title for column in points.columns]) == (severity is not None)
    assert [doubt.severity for doubt in group.doubts if doubt.code == "leaf-switches"] == [severity] * bool(severity)


LOAD = Doubt(
    code="foreign-load",
    severity="serious",
    text="other processes used 1.6 of the 2 cores of node n0 (81 %): repeat on an idle machine",
)


def group_of(folder: Path) -> ReportGroup:
    (group,) = assemble(scan(folder)).groups
    return group


def test_foreign_load_goes_before_more_repeats_and_more_ranks(tmp_path: Path) -> None:
    write_scaling(tmp_path / "both")
    write_scaling(tmp_path / "one", points=(2,))
    for name in ("both", "one"):
        group = group_of(tmp_path / name)
        assert "idle" not in next_step(group)
        loaded = replace(group, doubts=(*group.doubts, LOAD))
        assert (
            next_step(loaded) == "Repeat on an idle machine: other processes used 1.6 of the 2 cores of node n0 (81 %)."
        )


def test_foreign_load_goes_before_the_advice_of_a_sweep(tmp_path: Path) -> None:
    """Two settings that nothing tells apart, beside a process that took a core of two in one of the runs."""
    busy = {"node_rank": 0, "host": "n0", "cores": [0, 1], "window_s": 10.0, "busy_s": 20.0, "own_s": 10.0}

    def story(plan: RunPlan) -> Story:
        is_loaded = plan.series.repeat == 1 and str(plan.sync.fusion) == "own:single"
        return Story(record={"load": [{**busy, "steal_s": 0.0, "pressure_s": 0.0}] if is_loaded else []})

    axes = {"sync.fusion": ("own:none", "own:single")}
    write_sweep(tmp_path, lambda plan: 1.0, engine="ddp", sweep=axes, repeats=2, story=story)
    (sweep,) = sweeps(tabulate(scan(tmp_path)))
    wanted = "Repeat on an idle machine: other processes used 1 of the 2 cores of node n0 (50 %)."
    assert [cell.advice for cell in sweep.cells] == [wanted]


def test_throttling_goes_before_more_repeats_in_words_of_the_device(tmp_path: Path) -> None:
    write_scaling(tmp_path, repeats=2)
    group = group_of(tmp_path)
    assert next_step(group) == "Repeat with --repeats 5."
    found = group.of(LostPercent)
    *others, last = found.diagnosed.points
    slow = replace(last.cause("throttling"), seconds=last.whole.seconds.scaled(0.05, "s"))
    causes = tuple(slow if one.name == "throttling" else one for one in last.causes)
    diagnosed = replace(found.diagnosed, points=(*others, replace(last, causes=causes)))
    throttled = replace(group, views={**group.views, "causes": replace(found, diagnosed=diagnosed)})
    step = next_step(throttled)
    assert step.startswith("Raise the CPU quota ")
    assert step.endswith(": throttling took 5.0 % of a step at 2 ranks.")


def test_pooled_sessions_ask_for_more_sessions(tmp_path: Path) -> None:
    """Two Slurm jobs of five runs each, that scatter: what is too few are the jobs, in every sentence."""
    for plan in plans(repeats=10):
        slow = 1 + 0.01 * plan.series.repeat * plan.layout.ranks
        times = constant([slow * part for part in (5, 0, 30, 45, 20 * (plan.layout.ranks - 1), 10)])
        write_run(tmp_path, plan, times, Story(job=str(plan.series.repeat % 2)))
    group = group_of(tmp_path)
    found = group.of(LostPercent)
    assert next_step(group) == "Repeat in 3 more sessions (other days, or other Slurm jobs)."
    line = found.diagnosed.points[-1].verdict.line
    assert "2 sessions" in line
    assert "10 runs" not in line


@pytest.mark.parametrize(
    ("ranks", "most", "counts"),
    [(1, 2, "1,2"), (1, 8, "1,2,4"), (1, None, "1,2,4"), (2, 2, "1,2"), (1, 1, ""), (4, 4, "1,4")],
)
def test_no_rank_count_is_advised_that_the_machine_does_not_hold(
    tmp_path: Path, ranks: int, most: int | None, counts: str
) -> None:
    write_scaling(tmp_path, points=(ranks,))
    group = replace(group_of(tmp_path), most_ranks=most)
    assert more_ranks(group) == counts
    assert next_step(group) == (
        f"Run the same workload at more rank counts, for example --ranks {counts}." if counts else ""
    )


def document(folder: Path, repeats: dict[int, int]) -> Document:
    """A swept series at one rank count, with so many runs of each setting."""
    for plan in plans(points=(2,), repeats=5, sweep={"train.batch_per_rank": (2, 4, 8)}, series="s"):
        if plan.series.repeat < repeats[plan.workload.train.batch_per_rank]:
            write_run(folder, plan, constant([0, 0, 30, 50, 5, 10]))
    return result_of(scan(folder))[1]


def test_a_warning_of_some_settings_names_them_and_comes_once(tmp_path: Path) -> None:
    words = " ".join(to_text(document(tmp_path, {2: 3, 4: 4, 8: 5})).split())
    assert words.count("too few for") == 1
    assert "train.batch_per_rank=2: too few for a comparison (3 runs at 2 ranks): repeat with --repeats 5" in words
    assert "train.batch_per_rank=4 likewise" in words
    # Each setting is its own baseline: a column of nothing else says nothing.
    assert "Scaling efficiency" not in words


def test_a_missed_target_asks_for_longer_training(tmp_path: Path) -> None:
    for plan in quality_plans(points=(1,), repeats=2):
        write_run(tmp_path, plan, constant([0, 0, 30, 50, 5, 10]), Story(training=Training(values=(0.1, 0.2))))
    step = next_step(group_of(tmp_path))
    assert step == "Train longer (--set quality.max_epochs=40): runs ended after 20 epochs without meeting the target."
