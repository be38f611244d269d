"""A side as the file that later runs are compared with, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dlbench
from dlbench.errors import UserError, nearest
from dlbench.gate.baseline import Baseline, BaselinePoint, BaselineRun
from dlbench.gate.content import TITLES, Content
from dlbench.gate.labels import counts_text, settings_of
from dlbench.gate.sides import Side, SidePoint, SideRun
from dlbench.reading.sessions import Circumstances
from dlbench.stats.estimates import MIN_RUNS

MAX_SETTINGS = 6
"""Settings with too few runs that an error names."""


def baseline_of(side: Side, *, allow_few: bool) -> Baseline:
    """The file of a side; equal runs give an equal file.

    Raises:
        UserError: a point has fewer than five runs and `allow_few` is not set.
    """
    few = [point for point in side.points if len(point.runs) < MIN_RUNS]
    if few and not allow_few:
        raise UserError(
            f"{side.name}: a baseline needs {MIN_RUNS} runs per point; too few: {_named(few)}; "
            f"{_enough(side.points)}run with --repeats {MIN_RUNS} or more (10 find smaller slowdowns), or give "
            "--allow-few: no verdict will come of it"
        )
    points = [_point(point) for point in side.points]
    points.sort(key=lambda point: (sorted(point.registered.items()), point.ranks, point.nodes, point.runs[0].run_id))
    return Baseline(dlbench_version=dlbench.__version__, points=tuple(points))


def _named(points: Sequence[SidePoint]) -> str:
    """Each setting once, with its runs at every rank count."""
    found = [f"{label} ({counts_text(own)})" for label, own in settings_of(points).items()]
    more = f"; and {len(found) - MAX_SETTINGS} settings more" if len(found) > MAX_SETTINGS else ""
    return "; ".join(found[:MAX_SETTINGS]) + more


def _enough(points: Sequence[SidePoint]) -> str:
    """How to choose points that have enough runs; empty where no single key does."""
    for key in ("workload", "engine", "preset", "precision", "data", "goal", "scaling"):
        values: dict[str, bool] = {}
        for point in points:
            value = point.content.registered.get(key, "")
            values[value] = values.get(value, True) and len(point.runs) >= MIN_RUNS
        for value, is_enough in values.items():
            if value and is_enough:
                return f"--where {key}={value} chooses those with enough; or "
    return "choose others with --where, "


def _point(point: SidePoint) -> BaselinePoint:
    runs = sorted(point.runs, key=lambda run: run.run_id)
    return BaselinePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        registered=dict(point.content.registered),
        plan=dict(point.content.plan),
        sample_unit=point.sample_unit,
        notice=point.notice,
        tags=dict(point.tags),
        environment=dict(point.environment),
        doubts=point.doubts,
        runs=tuple(
            BaselineRun(run_id=run.run_id, **vars(run.circumstances), figures=dict(run.figures)) for run in runs
        ),
    )


def side_of_baseline(baseline: Baseline, name: str, where: Mapping[str, str], option: str) -> Side:
    """The side that a file is.

    Args:
        baseline: the file.
        name: what to call the side.
        where: registered properties that a point must have.
        option: the option that chose them, for errors.

    Raises:
        UserError: no point has them, or a file does not know such a property.
    """
    points = [_side_point(point) for point in baseline.points]
    for key, wanted in where.items():
        if key not in TITLES:
            raise UserError(f"{option} {key}: a baseline file does not know it; {nearest(key, TITLES)}")
        values = [_property(point, key) for point in points]
        if wanted not in values:
            raise UserError(
                f"{option} {key}={wanted}: no point of {name} has it; {nearest(wanted, filter(None, values))}"
            )
        points = [point for point, value in zip(points, values, strict=True) if value == wanted]
    return Side(name=name, points=tuple(points), left_out=(), damaged=())


def _property(point: SidePoint, key: str) -> str:
    places = {"ranks": str(point.ranks), "nodes": str(point.nodes)}
    return places.get(key, point.content.registered.get(key, ""))


def _side_point(point: BaselinePoint) -> SidePoint:
    return SidePoint(
        content=Content(registered=point.registered, plan=point.plan),
        ranks=point.ranks,
        nodes=point.nodes,
        sample_unit=point.sample_unit,
        notice=point.notice,
        runs=tuple(
            SideRun(
                run_id=run.run_id,
                figures=run.figures,
                circumstances=Circumstances(finished=run.finished, job=run.job, boot=run.boot),
                command="",
                pair=("", number),
            )
            for number, run in enumerate(point.runs)
        ),
        environment=point.environment,
        tags=point.tags,
        doubts=point.doubts,
    )
