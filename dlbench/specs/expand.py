"""Expands a request into the ordered list of runs: axes x points x repeats x sides or variants, interleaved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

import dlbench
from dlbench import bundled
from dlbench.errors import UserError, nearest
from dlbench.specs.choices import Choices, WorkloadFile, choose, choose_system, read_sizes, refuse_inert, why_inert
from dlbench.specs.comm import (
    ALGORITHMS,
    BACKENDS,
    ELEMENT_BYTES,
    GROUPED_ALGORITHMS,
    PAIR_WAYS,
    PAIRS,
    CommPlan,
    CommSeries,
    CommSpec,
    group_problem,
)
from dlbench.specs.files import find
from dlbench.specs.plan import AxisValue, LadderStep, LayoutSpec, RunPlan, SeriesSpec
from dlbench.specs.problems import problem_of
from dlbench.specs.requests import KEY_OF, CommRequest, Request, SeriesRequest, parse_pairs, parse_sizes, shown_count
from dlbench.specs.series import (
    acting_part,
    arranged,
    in_order,
    interleaved,
    option_of,
    refuse_equal,
    refuse_other_options,
    refuse_too_many,
    refuse_uneven,
    series_name,
    unexchanged_problem,
)
from dlbench.specs.system import SystemSpec
from dlbench.specs.workload import Workload
from dlbench.units import counted


def expand(
    request: Request,
    *,
    machine_cores: int,
    now: datetime | None = None,
    lacking: Callable[[RunPlan], str] = lambda _plan: "",
) -> list[RunPlan]:
    """Returns all runs of a request in order; `lacking` returns why this machine cannot run a ladder step, or ""."""
    option_of(request)
    refuse_other_options(request)
    sweep = {}
    for key, values in request.sweep.items():
        sweep[key] = tuple(read_sizes({key: value}, "--sweep")[key] for value in values)
        if len(set(map(repr, sweep[key]))) != len(values):
            raise UserError(f"--sweep {key}: a value is given twice")
    request = replace(
        request,
        overrides=read_sizes(request.overrides, "--set"),
        sweep=sweep,
        sides={side: read_sizes(settings, f"--ab (side {side})") for side, settings in request.sides.items()},
    )
    moment = now or datetime.now(UTC)
    series = series_name(request.series, moment)
    file = WorkloadFile(find("workloads", request.workload))
    swept = math.prod(len(values) for values in request.sweep.values()) * len(request.points)
    refuse_too_many(swept, "--sweep")
    refuse_too_many(swept * request.repeats * (len(request.sides) or 1), f"--repeats {shown_count(request.repeats)}")
    combinations = [dict(zip(request.sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    chosen = _Chosen(request, file)
    base = SeriesSpec(
        id=series, scaling=request.scaling, repeat=0, repeats=request.repeats, position=0, sides=request.sides
    )
    places = [base.model_copy(update={"axes": axes}) for axes in combinations]
    points = list(itertools.product(places, request.points))
    if request.ladder:

        def plan_of(place: SeriesSpec, count: int) -> RunPlan:
            return _plan(request, chosen, place, (0, count), machine_cores, moment)

        points = _ladder_points(request, file, base, plan_of, lacking)
        refuse_too_many(len(points) * request.repeats, f"--repeats {shown_count(request.repeats)}")
    plans: list[RunPlan] = []
    for repeat, index, (point, count) in interleaved(points, request.repeats):
        for side in in_order(request, repeat):
            place = point.model_copy(update={"repeat": repeat, "position": len(plans), "side": side})
            plans.append(_plan(request, chosen, place, (index, count), machine_cores, moment))
    _refuse(request, plans)
    return arranged(request, plans)


def _ladder_points(
    request: Request,
    file: WorkloadFile,
    base: SeriesSpec,
    plan_of: Callable[[SeriesSpec, int], RunPlan],
    lacking: Callable[[RunPlan], str],
) -> list[tuple[SeriesSpec, int]]:
    """Returns the points of a ladder: at each rank or node count, each step added to those before it."""
    points: list[tuple[SeriesSpec, int]] = []
    steps = file.ladder(request.preset or file.preset_on(choose_system(request.system, {})))
    for count in request.points:
        acting_steps: list[SeriesSpec] = []
        planned: list[LadderStep] = []
        before: RunPlan | None = None
        axes_before: dict[str, AxisValue] = {}
        for step in steps:
            axes = {**axes_before, **step.set}
            place = base.model_copy(update={"step": step.name, "axes": axes})
            reason = ""
            try:
                plan = plan_of(place, count)
            except UserError as error:
                if before is None or not isinstance(error.__cause__, ValidationError):
                    raise
                reason = str(problem_of(RunPlan, error.__cause__))
            else:
                if plan.measure.until == "quality":
                    raise UserError("--ladder: compares throughput; leave out measure.until quality")
                if before is not None and acting_part(plan) == acting_part(before):
                    raise UserError(f"{file.origin(step.name)}: changes nothing: its settings are in force before it")
                if before is not None:
                    # All settings of a step must have an effect, except for those of the baseline.
                    reasons = [lacking(plan), *(why_inert(key, plan) for key in step.set)]
                    reason = next(filter(None, reasons), "")
            planned.append(step.model_copy(update={"skipped": reason}))
            if not reason:
                acting_steps.append(place)
                before, axes_before = plan, axes
        points += [(place.model_copy(update={"ladder": tuple(planned)}), count) for place in acting_steps]
    if len(points) == len(request.points):
        skipped = "; ".join(f"{step.name}: {step.skipped}" for step in points[0][0].ladder if step.skipped)
        raise UserError(f"--ladder: no step has an effect ({skipped})")
    return points


def _refuse(request: Request, plans: list[RunPlan]) -> None:
    """Raises `UserError` for settings that have no effect in any run, and for faults on ranks that do not exist."""
    request.refuse_without_effect(plans[0].system)
    refuse_inert([*((key, "--set") for key in request.overrides), *((key, "--sweep") for key in request.sweep)], plans)
    for side, settings in request.sides.items():
        side_plans = [plan for plan in plans if plan.series.side == side]
        refuse_inert([(key, f"--ab (side {side})") for key in settings], side_plans)
    if request.sides:
        refuse_uneven(plans)
        refuse_equal(request, plans)
    for fault in [plan.fault for plan in plans if plan.fault is not None]:
        largest = max(plan.layout.ranks for plan in plans if plan.fault == fault)
        absent = [rank for rank in fault.ranks or () if rank >= largest]
        if absent:
            raise UserError(f"fault.ranks: rank {absent[0]} is in no run: the largest has {largest} ranks, from 0")
    for problem in filter(None, map(unexchanged_problem, plans)):
        raise UserError(problem)


class _Chosen:
    """Choices and systems of the runs of a request; files are read and settings checked once for all repeats."""

    def __init__(self, request: Request, file: WorkloadFile) -> None:
        self._request, self.file = request, file
        self._choices: dict[str, Choices] = {}
        self._systems: dict[str, SystemSpec] = {}

    def choices_and_system(self, place: SeriesSpec) -> tuple[Choices, SystemSpec]:
        settings, of_system = _split_overrides(self._request, place, self.file.origin(place.step))
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
    choices, system = chosen.choices_and_system(place)
    layout = request.layout(system, count, cores_per_rank=choices.layout.cores_per_rank, machine_cores=machine_cores)
    workload = choices.workload()
    if workload.train.global_batch is not None:
        workload = _accumulated(workload, request, layout.ranks)
    elif request.scaling == "strong":
        workload = _share_out(workload, request, system, layout.ranks)
    name = f"{place.id}-{workload.name}-{workload.preset}-p{index:02d}-n{layout.ranks:04d}-k{place.repeat:02d}"
    if place.side:
        name += f"-{place.side}"
    try:
        return RunPlan(
            **_common(request, name, moment, layout, system),
            workload=workload,
            series=place,
            tags=request.tags,
            **{name: getattr(choices, name) for name in ("engine", "sync", "measure", "checkpoint", "watch", "fault")},
        )
    except ValidationError as error:
        origin = f"{chosen.file.path.name} on {system.name}"
        if place.side:
            origin += f" (side {place.side} of --ab)"
        raise UserError(f"{origin}: {problem_of(RunPlan, error)}") from error


def _common(
    request: SeriesRequest, run_id: str, moment: datetime, layout: LayoutSpec, system: SystemSpec
) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "created": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "dlbench_version": dlbench.__version__,
        "dlbench_code": bundled.code(),
        "layout": layout,
        "system": system,
        "overrides": {**request.overrides},
    }


def _split_overrides(
    request: Request, place: SeriesSpec, step: str
) -> tuple[dict[str, tuple[AxisValue, str]], dict[str, tuple[AxisValue, str]]]:
    """Returns the settings of a run and those of its system, each with the option that set it; later options win."""
    merged: dict[str, tuple[AxisValue, str]] = {}
    for field, key in KEY_OF.items():
        if (field_value := getattr(request, field)) is not None:
            merged[key] = (field_value, f"--{field}")
    if request.to_accuracy:
        merged["measure.until"] = ("quality", "--to-accuracy")
    if request.tiers:
        merged["data.cache"] = ("cold", "--tiers")
    axes_origin = step if place.step else "--sweep"
    layers = [("--set", request.overrides), (axes_origin, place.axes)]
    if place.side:
        layers.append((f"--ab (side {place.side})", request.sides[place.side]))
    for option, values in layers:
        for key, value in values.items():
            if option != "--set" and (key in request.overrides or (place.step and key in merged)):
                raise UserError(f"{option} {key}: also given to {merged[key][1]}")
            if key in ("preset", "name"):
                raise UserError(f"{option} {key}: has its own option or argument")
            merged[key] = (value, option)
    system = {k.removeprefix("system."): v for k, v in merged.items() if k.startswith("system.")}
    return {k: v for k, v in merged.items() if not k.startswith("system.")}, system


def _accumulated(workload: Workload, request: Request, ranks: int) -> Workload:
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
            f"train.global_batch {total:,} over {counted(ranks, 'rank')} is not a multiple of {part} "
            "(train.batch_per_rank) per rank; change one of them"
        )
    share = total // ranks
    update = {"batch_per_rank": share, "gradient_accumulation": share // part}
    return workload.model_copy(update={"train": train.model_copy(update=update)})


def _share_out(workload: Workload, request: Request, system: SystemSpec, ranks: int) -> Workload:
    """Divides the global batch of strong scaling over the ranks: the preset's batch times the smallest rank count."""
    smallest = request.ranks(system, min(request.points))
    total = workload.train.batch_per_rank * smallest
    if total % ranks:
        raise UserError(
            f"--scaling strong: the global batch {total} ({workload.train.batch_per_rank} x {smallest} ranks) does "
            f"not divide by {ranks} ranks; choose train.batch_per_rank so that it does"
        )
    share, parts = total // ranks, workload.train.gradient_accumulation
    if share % parts:
        raise UserError(
            f"--scaling strong: {share} samples per rank at {ranks} ranks do not divide into "
            f"train.gradient_accumulation {parts} parts"
        )
    train = workload.train.model_copy(update={"batch_per_rank": share})
    return workload.model_copy(update={"train": train})


@dataclass(frozen=True, kw_only=True)
class CommRuns:
    """The runs of a request of the collective benchmark."""

    plans: list[CommPlan]
    notes: tuple[str, ...]  # Lines on what was chosen by default or left out, with reasons.


def expand_comm(
    request: CommRequest, *, machine_cores: int, installed: Iterable[str], now: datetime | None = None
) -> CommRuns:
    """Returns all runs of a request in order; `installed` contains `mpi4py` if this Python has it."""
    moment = now or datetime.now(UTC)
    series = series_name(request.series, moment)
    system = _comm_system(request)
    if system.python is not None:
        # The packages of another Python are not known.
        installed = ()
    spec, notes = _comm_settings(request, system, frozenset(installed))
    request.refuse_without_effect(system)
    if request.shards is not None and "parameter-server" not in spec["algorithms"]:
        raise UserError("--shards: has no effect in any run of this request: only parameter-server has shards")
    if request.transport != "torch" and not spec["algorithms"]:
        raise UserError("--transport: has no effect in any run of this request: only dlbench's own algorithms use it")
    refuse_too_many(len(request.points) * request.repeats, f"--repeats {shown_count(request.repeats)}")
    plans: list[CommPlan] = []
    for repeat, index, count in interleaved(request.points, request.repeats):
        layout = request.layout(system, count, cores_per_rank=None, machine_cores=machine_cores)
        _refuse_layout(request, layout)
        point_spec = dict(spec)
        if spec["collective"] == PAIRS:
            point_spec |= _pairs(request, layout)
        problem = group_problem(request.group_size, layout)
        grouped = [name for name in spec["algorithms"] if name in GROUPED_ALGORITHMS]
        if request.algorithms == "all" and problem is not None and grouped:
            # An algorithm that --algorithms names stays, and its plan is refused.
            point_spec["algorithms"] = tuple(name for name in spec["algorithms"] if name not in grouped)
            note = f"{', '.join(grouped)} left out at {layout.ranks} ranks: {problem}; see --group-size"
            if note not in notes:
                notes.append(note)
        name = f"{series}-comm-{spec['collective']}-p{index:02d}-n{layout.ranks:04d}-k{repeat:02d}"
        place = CommSeries(id=series, repeat=repeat, repeats=request.repeats, position=len(plans))
        plans.append(_comm_plan(point_spec, _common(request, name, moment, layout, system), place))
    refuse_inert(((key, "--set") for key in request.overrides), plans)
    return CommRuns(plans=plans, notes=tuple(notes))


def _comm_system(request: CommRequest) -> SystemSpec:
    settings: dict[str, tuple[AxisValue, str]] = {}
    if request.launcher is not None:
        settings["launch.launcher"] = (request.launcher, "--launcher")
    for key, value in request.overrides.items():
        if not key.startswith("system."):
            raise UserError(f"--set {key}: this benchmark has its own options; --set only changes keys of system.")
        settings[key.removeprefix("system.")] = (value, "--set")
    return choose_system(request.system, settings)


def _refuse_layout(request: CommRequest, layout: LayoutSpec) -> None:
    ranks = layout.ranks
    if ranks == 1:
        raise UserError("1 rank: a collective needs two ranks or more")
    if request.group_size is not None and ranks % request.group_size:
        raise UserError(f"--group-size {request.group_size}: does not divide {ranks} ranks into groups")
    if request.shards is not None and request.shards > ranks:
        raise UserError(f"--shards {request.shards}: needs at least as many ranks, but there are {ranks}")


def _one_of(option: str, name: str, valid_names: Iterable[str]) -> str:
    names = tuple(valid_names)
    if name not in names:
        raise UserError(f"{option}: unknown name {name!r}: {nearest(name, names)}")
    return name


def _some_of(option: str, text: str, valid_names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Returns comma-separated names; ``none`` is no name. Raises `UserError`: an unknown or repeated name."""
    if text == "none":
        return ()
    names = text.split(",")
    for name in names:
        if name not in valid_names:
            raise UserError(f"{option}: {name!r} is not a {kind}: {nearest(name, valid_names)}")
    if len(set(names)) != len(names):
        raise UserError(f"{option} {text[:80]!r}: a name is given twice")
    return tuple(names)


def _comm_settings(
    request: CommRequest, system: SystemSpec, installed: frozenset[str]
) -> tuple[dict[str, Any], list[str]]:
    collective: Any = _one_of("--collective", request.collective, (*ALGORITHMS, PAIRS))
    dtype: Any = _one_of("--dtype", request.dtype, ELEMENT_BYTES)
    transport = _one_of("--transport", request.transport, ("torch", "mpi"))
    valid_names = PAIR_WAYS if collective == PAIRS else ALGORITHMS[collective]
    names = request.algorithms
    if names == "all":
        names = ",".join(valid_names)
    algorithms = _some_of("--algorithms", names, valid_names, f"known algorithm of {collective}")
    notes: list[str] = []
    for option, text in (("--victims", request.victims), ("--congestors", request.congestors)):
        if text is not None and collective != PAIRS:
            raise UserError(f"{option}: has no effect on {collective}: only --collective p2p measures pairs of ranks")
    if collective == PAIRS:
        if request.backends not in ("auto", "none") or not algorithms:
            raise UserError("--collective p2p: uses ping-pong and window over --transport, but no --backends")
        backends: tuple[str, ...] = ()
    elif request.backends == "auto":
        backends, notes = _usual_backends(transport, system, installed)
    else:
        backends = _some_of("--backends", request.backends, BACKENDS, "known back-end")
        if "horovod" in backends:  # Read in plans of earlier checkouts.
            raise UserError("--backends horovod has been removed: `dlbench run --engine horovod` times its exchange")
    if not algorithms and not backends:
        raise UserError("--algorithms none --backends none: there is nothing to measure; name at least one of either")
    return {
        "collective": collective,
        "algorithms": algorithms,
        "backends": backends,
        "sizes": parse_sizes(request.sizes, dtype),
        "dtype": dtype,
        "transport": transport,
        **{name: getattr(request, name) for name in ("iterations", "warmup", "group_size", "shards", "timeout_s")},
    }, notes


def _usual_backends(transport: str, system: SystemSpec, installed: frozenset[str]) -> tuple[tuple[str, ...], list[str]]:
    chosen, notes = [], []
    if transport == "torch":
        chosen.append("nccl" if system.node.gpus else "gloo")
    if system.launch.by_mpi and "mpi4py" in installed:
        chosen.append("mpi")
    elif system.launch.by_mpi:
        notes.append("back-end mpi left out: mpi4py is not installed, or in another Python")
    return tuple(chosen), [f"libraries for comparison: {', '.join(chosen) or 'none'}", *notes]


def _pairs(request: CommRequest, layout: LayoutSpec) -> dict[str, Any]:
    """Returns the default pairs: inside and across groups; with congestors, which are all other ranks, only across."""
    ranks, group = layout.ranks, request.group_size or layout.ranks_per_node
    firsts = range(0, ranks, group)
    default_pairs: list[tuple[int, int]] = []
    if group > 1 and not (request.congestors and len(firsts) > 1):
        default_pairs += [(first, first + 1) for first in firsts]
    default_pairs += zip(firsts[::2], firsts[1::2], strict=False)
    if len(firsts) > 2:
        default_pairs.append((0, firsts[-1]))
    victims = parse_pairs(request.victims, "--victims", tuple(default_pairs))
    free = sorted(set(range(ranks)).difference(*victims))
    half = len(free) // 2
    if request.congestors == "auto" and not half:
        raise UserError(f"--congestors: the victims leave {len(free)} of {ranks} ranks: give each node more ranks")
    congestors: tuple[tuple[int, int], ...] = ()
    if request.congestors is not None:
        others = tuple(zip(free[:half], free[half:], strict=False))
        congestors = parse_pairs(request.congestors, "--congestors", others)
    return {"pairs": victims, "congestors": congestors}


def _comm_plan(spec: dict[str, Any], common: dict[str, Any], place: CommSeries) -> CommPlan:
    # A single iteration may use its whole timeout without reporting progress.
    stall_timeout_s = max(600.0, 2 * spec["timeout_s"])
    try:
        return CommPlan(**common, comm=CommSpec.model_validate(spec), series=place, stall_timeout_s=stall_timeout_s)
    except ValidationError as error:
        kind = CommSpec if error.title == CommSpec.__name__ else CommPlan
        where = f"{common['layout'].ranks} ranks on {common['system'].name}"
        raise UserError(f"{where}: {problem_of(kind, error)}") from None
