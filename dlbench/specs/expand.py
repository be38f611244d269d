"""A request becomes the ordered list of runs: axes x points x repeats x sides or variants, interleaved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import ValidationError

import dlbench
from dlbench import bundled
from dlbench.errors import UserError
from dlbench.specs.choices import Choices, WorkloadFile, choose, choose_system, read_sizes
from dlbench.specs.engine import EngineSpec
from dlbench.specs.files import find
from dlbench.specs.inert import refuse_absent_ranks, refuse_inert
from dlbench.specs.plan import AxisValue, RunPlan, SeriesSpec
from dlbench.specs.problems import problem_of
from dlbench.specs.requests import Request
from dlbench.specs.series import (
    Counts,
    apart_problem,
    arranged,
    in_order,
    interleaved,
    option_of,
    refuse_equal,
    refuse_other_options,
    refuse_too_many,
    refuse_uneven,
    series_name,
    shown_count,
)
from dlbench.specs.system import SystemSpec
from dlbench.specs.workload import Workload


def expand(request: Request, *, machine_cores: int, now: datetime | None = None) -> list[RunPlan]:
    """All runs of a request, in the order in which they should run.

    `machine_cores`: cores of this machine, used where the system YAML leaves a node's cores open and no scheduler is
    involved. `now`: time stamp of the plans (default: now).
    Raises `UserError`: anything wrong with the request, in one line.
    """
    option_of(request)
    refuse_other_options(request)
    request = _with_sizes(request)
    moment = now or datetime.now(UTC)
    series = series_name(request.series, moment)
    file = WorkloadFile(find("workloads", request.workload))
    swept = math.prod(len(values) for values in request.sweep.values()) * len(request.points)
    refuse_too_many(swept, "--sweep")
    refuse_too_many(swept * request.repeats * (len(request.sides) or 1), f"--repeats {shown_count(request.repeats)}")
    combinations = list(_combinations(request))
    points = [(axes, count) for axes in combinations for count in request.points]
    chosen = _Chosen(request, file)
    plans: list[RunPlan] = []
    for repeat, index, (axes, count) in interleaved(points, request.repeats):
        for side in in_order(request, repeat):
            place = SeriesSpec(
                id=series,
                scaling=request.scaling,
                repeat=repeat,
                repeats=request.repeats,
                position=len(plans),
                axes=axes,
                side=side,
                sides=request.sides,
            )
            plans.append(_plan(request, chosen, place, (index, count), machine_cores, moment))
    _refuse(request, plans)
    return arranged(request, plans)


def _with_sizes(request: Request) -> Request:
    """The same with sizes in bytes, whatever unit they were given in."""
    sweep = {}
    for key, values in request.sweep.items():
        sweep[key] = tuple(read_sizes({key: value}, "--sweep")[key] for value in values)
        if len(set(map(repr, sweep[key]))) != len(values):
            raise UserError(f"--sweep {key}: a value is given twice")
    return replace(
        request,
        overrides=read_sizes(request.overrides, "--set"),
        sweep=sweep,
        sides={side: read_sizes(found, f"--ab (side {side})") for side, found in request.sides.items()},
    )


def _counts(request: Request) -> Counts:
    return Counts(values=request.points, are=request.points_are, ranks_per_node=request.ranks_per_node)


def _combinations(request: Request) -> Iterator[dict[str, AxisValue]]:
    keys = list(request.sweep)
    for values in itertools.product(*(request.sweep[key] for key in keys)):
        yield dict(zip(keys, values, strict=True))


def _refuse(request: Request, plans: list[RunPlan]) -> None:
    """A setting that acts in no run of the series is a mistake, not a wish."""
    _counts(request).refuse_without_effect(plans[0].system)
    refuse_inert([*((key, "--set") for key in request.overrides), *((key, "--sweep") for key in request.sweep)], plans)
    for side, settings in request.sides.items():
        own = [plan for plan in plans if plan.series.side == side]
        refuse_inert([(key, f"--ab (side {side})") for key in settings], own)
    if request.sides:
        refuse_uneven(plans)
        refuse_equal(request, plans)
    refuse_absent_ranks(plans)
    for problem in filter(None, map(apart_problem, plans)):
        raise UserError(problem)


class _Chosen:
    """Choices and system of the runs of a request: files are read, and settings checked, once for all repeats."""

    def __init__(self, request: Request, file: WorkloadFile) -> None:
        self._request, self.file = request, file
        self._choices: dict[str, Choices] = {}
        self._systems: dict[str, SystemSpec] = {}

    def of(self, place: SeriesSpec) -> tuple[Choices, SystemSpec]:
        """Raises UserError: a wrong key or value."""
        settings, of_system = _split_overrides(self._request, place)
        system = self._systems.get(repr(of_system))
        if system is None:
            system = self._systems[repr(of_system)] = choose_system(self._request.system, of_system)
        preset = self._request.preset or self.file.preset_on(system)
        choices = self._choices.get(repr((preset, settings)))
        if choices is None:
            choices = self._choices[repr((preset, settings))] = choose(self.file, preset, settings)
        return choices, system


def _plan(
    request: Request, chosen: _Chosen, place: SeriesSpec, point: tuple[int, int], machine_cores: int, moment: datetime
) -> RunPlan:
    index, count = point
    choices, system = chosen.of(place)
    layout = _counts(request).layout(
        system, count, cores_per_rank=choices.layout.cores_per_rank, machine_cores=machine_cores
    )
    workload = choices.workload()
    if workload.train.global_batch is not None:
        workload = _accumulated(workload, request, layout.ranks)
    elif request.scaling == "strong":
        workload = _share_out(workload, request, system, layout.ranks)
    engine = choices.engine
    name = f"{place.id}-{workload.name}-{workload.preset}-p{index:02d}-n{layout.ranks:04d}-k{place.repeat:02d}"
    name += f"-{place.side}" if place.side else ""
    try:
        return RunPlan(
            run_id=name,
            created=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            dlbench_version=dlbench.__version__,
            dlbench_code=bundled.code(),
            workload=workload,
            engine=EngineSpec.model_validate(engine.model_dump()),
            sync=choices.sync,
            measure=choices.measure,
            checkpoint=choices.checkpoint,
            watch=choices.watch,
            fault=choices.fault,
            layout=layout,
            series=place,
            system=system,
            overrides={**request.overrides},
            tags=request.tags,
        )
    except ValidationError as error:
        side = f" (side {place.side} of --ab)" if place.side else ""
        problem = problem_of(RunPlan, error)
        raise UserError(f"{chosen.file.path.name} on {system.name}{side}: {problem}") from None


def _split_overrides(
    request: Request, place: SeriesSpec
) -> tuple[dict[str, tuple[AxisValue, str]], dict[str, tuple[AxisValue, str]]]:
    """Dedicated options first, then --set, then the axis values or those of a side; those of the system apart."""
    merged: dict[str, tuple[AxisValue, str]] = {}
    if request.engine is not None:
        merged["engine.name"] = (request.engine, "--engine")
    if request.data is not None:
        merged["data.source"] = (request.data, "--data")
    if request.to_accuracy:
        merged["measure.until"] = ("quality", "--to-accuracy")
    if request.resume is not None:
        merged["checkpoint.resume_from"] = (request.resume, "--resume")
    if request.launcher is not None:
        merged["system.launch.launcher"] = (request.launcher, "--launcher")
    if request.tiers:
        merged["data.cache"] = ("cold", "--tiers")
    layers = [("--set", request.overrides), ("--sweep", place.axes)]
    if place.side:
        layers.append((f"--ab (side {place.side})", request.sides[place.side]))
    for option, values in layers:
        for key, value in values.items():
            if option != "--set" and key in request.overrides:
                raise UserError(f"{option} {key}: also given to --set")
            if key in ("preset", "name"):
                raise UserError(f"{option} {key}: is chosen by its own option or argument, not here")
            merged[key] = (value, option)
    system = {k.removeprefix("system."): v for k, v in merged.items() if k.startswith("system.")}
    return {k: v for k, v in merged.items() if not k.startswith("system.")}, system


def _accumulated(workload: Workload, request: Request, ranks: int) -> Workload:
    """The global batch that the recipe asks for, over these ranks, in parts of the preset's batch."""
    train = workload.train
    total, part = train.global_batch or 0, train.batch_per_rank
    if request.scaling == "weak" and len(request.points) > 1:
        raise UserError(
            f"--scaling weak: train.global_batch is {total:,} at every rank count; use --scaling strong, or set "
            "train.global_batch=null"
        )
    if train.gradient_accumulation != 1:
        raise UserError("train.global_batch decides train.gradient_accumulation: leave one of them out")
    if total % (ranks * part):
        raise UserError(
            f"train.global_batch {total:,} over {ranks} rank{'s' * (ranks > 1)} is no number of parts of "
            f"{part} (train.batch_per_rank); choose them so that it is"
        )
    share = total // ranks
    update = {"batch_per_rank": share, "gradient_accumulation": share // part}
    return workload.model_copy(update={"train": train.model_copy(update=update)})


def _share_out(workload: Workload, request: Request, system: SystemSpec, ranks: int) -> Workload:
    """Strong scaling: the global batch is the preset's batch times the smallest rank count, at every point."""
    smallest = _counts(request).ranks(system, min(request.points))
    total = workload.train.batch_per_rank * smallest
    if total % ranks:
        raise UserError(
            f"--scaling strong: the global batch {total} ({workload.train.batch_per_rank} x {smallest} ranks) does "
            f"not divide by {ranks} ranks; choose train.batch_per_rank so that it does"
        )
    share, parts = total // ranks, workload.train.gradient_accumulation
    if share % parts:
        raise UserError(
            f"--scaling strong: {share} samples a rank at {ranks} ranks do not divide into "
            f"train.gradient_accumulation {parts} parts"
        )
    train = workload.train.model_copy(update={"batch_per_rank": share})
    return workload.model_copy(update={"train": train})
