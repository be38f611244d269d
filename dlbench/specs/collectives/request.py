"""What a person asks of the collective benchmark, as text, becomes the ordered list of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ValidationError

import dlbench
from dlbench import bundled
from dlbench.errors import UserError, nearest
from dlbench.specs.choices import choose_system
from dlbench.specs.collectives.plan import (
    ALGORITHMS,
    BACKENDS,
    ELEMENT_BYTES,
    GROUPED_ALGORITHMS,
    CommPlan,
    CommSeries,
    CommSpec,
    group_problem,
)
from dlbench.specs.collectives.sizes import parse_sizes
from dlbench.specs.plan import AxisValue, LayoutSpec
from dlbench.specs.problems import problem_of
from dlbench.specs.series import Counts, interleaved, refuse_too_many, series_name, shown_count
from dlbench.specs.system import SystemSpec
from dlbench.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class CommRequest:
    """Everything that makes a series of the collective benchmark, before anything is resolved; options as text."""

    collective: str = "allreduce"
    algorithms: str = "all"
    backends: str = "auto"
    sizes: str = "1KiB:64MiB"
    dtype: str = "fp32"
    transport: str = "torch"
    iterations: int = 10
    warmup: int = 2
    group_size: int | None = None
    shards: int | None = None
    timeout_s: float = 60.0
    system: str = "local"
    launcher: str | None = None
    points: tuple[int, ...] = (2,)
    """Rank counts, or node counts if `points_are` says so."""
    points_are: Literal["ranks", "nodes"] = "ranks"
    ranks_per_node: int | None = None
    repeats: int = 1
    overrides: dict[str, AxisValue] = field(default_factory=dict)
    series: str | None = None


@dataclass(frozen=True, kw_only=True)
class CommRuns:
    """What a request became."""

    plans: list[CommPlan]
    notes: tuple[str, ...]
    """What was chosen for the person, or left out, and why; a line each."""


def expand_comm(
    request: CommRequest, *, machine_cores: int, installed: Iterable[str], now: datetime | None = None
) -> CommRuns:
    """All runs of a request, in the order in which they should run; repeats are interleaved over rank counts.

    Args:
        request: what a person asked for.
        machine_cores: cores of this machine, used where the system leaves a node's cores open.
        installed: those of `horovod` and `mpi4py` that this Python has; `--backends auto` takes no other.
        now: time stamp of the plans (default: now).

    Raises:
        UserError: anything wrong with the request, in one line.
    """
    moment = now or datetime.now(UTC)
    series = series_name(request.series, moment)
    system = choose_system(request.system, _system_settings(request))
    # What another Python has is not known here.
    spec, notes = _what(request, system, frozenset(installed if system.python is None else ()))
    counts = Counts(values=request.points, are=request.points_are, ranks_per_node=request.ranks_per_node)
    counts.refuse_without_effect(system)
    _refuse_inert(request, spec, system)
    refuse_too_many(len(request.points) * request.repeats, f"--repeats {shown_count(request.repeats)}")
    plans: list[CommPlan] = []
    for repeat, index, count in interleaved(request.points, request.repeats):
        layout = counts.layout(system, count, cores_per_rank=None, machine_cores=machine_cores)
        _refuse_layout(request, layout)
        chosen, note = _for_layout(request, spec, layout)
        if note is not None and note not in notes:
            notes.append(note)
        place = CommSeries(id=series, repeat=repeat, repeats=request.repeats, position=len(plans))
        plans.append(_plan(request, chosen, layout, system, place, index, moment))
    return CommRuns(plans=plans, notes=tuple(notes))


# Options that are text


def _one_of(option: str, name: str, known: Iterable[str]) -> str:
    names = tuple(known)
    if name not in names:
        raise UserError(f"{option}: unknown name {name!r}: {nearest(name, names)}")
    return name


def _some_of(option: str, text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Names separated by commas, in the given order; `none` for no name."""
    if text == "none":
        return ()
    names = text.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"{option}: {name!r} is no {what}: {nearest(name, known)}")
    if len(set(names)) != len(names):
        raise UserError(f"{option} {text[:80]!r}: a name is given twice")
    return tuple(names)


# What is measured


def _what(request: CommRequest, system: SystemSpec, installed: frozenset[str]) -> tuple[dict[str, Any], list[str]]:
    """The keys of `CommSpec`, algorithms not yet fitted to a layout; and what was chosen for the person."""
    collective: Any = _one_of("--collective", request.collective, ALGORITHMS)
    dtype: Any = _one_of("--dtype", request.dtype, ELEMENT_BYTES)
    transport = _one_of("--transport", request.transport, ("torch", "mpi"))
    known = ALGORITHMS[collective]
    asked = ",".join(known) if request.algorithms == "all" else request.algorithms
    algorithms = _some_of("--algorithms", asked, known, f"algorithm of {collective}")
    notes: list[str] = []
    if request.backends == "auto":
        backends, notes = _usual_backends(transport, system, installed)
    else:
        backends = _some_of("--backends", request.backends, BACKENDS, "back-end")
    if not algorithms and not backends:
        raise UserError("--algorithms none --backends none: nothing is left to measure; name one or more of either")
    return {
        "collective": collective,
        "algorithms": algorithms,
        "backends": backends,
        "sizes": parse_sizes(request.sizes, dtype),
        "dtype": dtype,
        "transport": transport,
        "iterations": request.iterations,
        "warmup": request.warmup,
        "group_size": request.group_size,
        "shards": request.shards,
        "timeout_s": request.timeout_s,
    }, notes


def _usual_backends(transport: str, system: SystemSpec, installed: frozenset[str]) -> tuple[tuple[str, ...], list[str]]:
    """The references that this launcher, these nodes and this installation allow."""
    chosen, notes = [], []
    if transport == "torch":
        chosen.append("nccl" if system.node.gpus else "gloo")
    for name, library, is_wanted in (("mpi", "mpi4py", system.launch.by_mpi), ("horovod", "horovod", True)):
        if is_wanted and library in installed:
            chosen.append(name)
        elif is_wanted:
            notes.append(f"back-end {name} left out: {library} is not known to be installed where the ranks run")
    return tuple(chosen), [f"back-ends as references: {', '.join(chosen) or 'none'}", *notes]


def _for_layout(request: CommRequest, spec: dict[str, Any], layout: LayoutSpec) -> tuple[dict[str, Any], str | None]:
    """Of `all` algorithms those that the layout permits, and what was left out; named ones stay, right or wrong."""
    problem = group_problem(request.group_size, layout)
    left = [name for name in spec["algorithms"] if name in GROUPED_ALGORITHMS]
    if request.algorithms != "all" or problem is None or not left:
        return spec, None
    kept = tuple(name for name in spec["algorithms"] if name not in left)
    note = f"{', '.join(left)} left out at {layout.ranks} ranks: {problem}; see --group-size"
    return {**spec, "algorithms": kept}, note


def _refuse_layout(request: CommRequest, layout: LayoutSpec) -> None:
    """What this number of ranks rules out, in the words of the options."""
    ranks = layout.ranks
    if ranks == 1:
        raise UserError("1 rank: a collective needs two ranks or more")
    if request.group_size is not None and ranks % request.group_size:
        raise UserError(f"--group-size {request.group_size}: does not divide {ranks} ranks into groups")
    if request.shards is not None and request.shards > ranks:
        raise UserError(f"--shards {request.shards}: needs as many ranks, here are {ranks}")


# Plans


def _system_settings(request: CommRequest) -> dict[str, tuple[AxisValue, str]]:
    settings: dict[str, tuple[AxisValue, str]] = {}
    if request.launcher is not None:
        settings["launch.launcher"] = (request.launcher, "--launcher")
    for key, value in request.overrides.items():
        if not key.startswith("system."):
            raise UserError(f"--set {key}: this benchmark has options of its own; --set changes keys of system. only")
        settings[key.removeprefix("system.")] = (value, "--set")
    return settings


Acts = Callable[[dict[str, Any], SystemSpec], bool]

INERT: tuple[tuple[str, Acts, str], ...] = (
    ("system.slurm.", lambda spec, system: system.scheduler == "slurm", "only scheduler slurm reads it"),
    (
        "system.launch.mpi_plugin",
        lambda spec, system: system.launch.launcher == "srun-mpi",
        "only launcher srun-mpi reads it",
    ),
    ("system.launch.oversubscribe_yield", lambda spec, system: system.launch.by_mpi, "only MPI launchers read it"),
    (
        "system.launch.interface",
        lambda spec, system: spec["transport"] == "torch" or bool({"gloo", "nccl", "horovod"} & set(spec["backends"])),
        "MPI chooses its own",
    ),
)
"""Keys of the system that act only under a condition: key or prefix, the condition, why not."""


def _refuse_inert(request: CommRequest, spec: dict[str, Any], system: SystemSpec) -> None:
    """A setting that acts in no run of the series is a mistake, not a wish."""
    if request.shards is not None and "parameter-server" not in spec["algorithms"]:
        raise UserError("--shards: has no effect in any run of this request: only parameter-server has them")
    if request.transport != "torch" and not spec["algorithms"]:
        raise UserError("--transport: has no effect in any run of this request: only dlbench's own algorithms use it")
    for key in request.overrides:
        for prefix, acts, why in INERT:
            if key.startswith(prefix) and not acts(spec, system):
                raise UserError(f"--set {key}: has no effect in any run of this request: {why}")


def _plan(
    request: CommRequest,
    spec: dict[str, Any],
    layout: LayoutSpec,
    system: SystemSpec,
    place: CommSeries,
    index: int,
    moment: datetime,
) -> CommPlan:
    name = f"{place.id}-comm-{spec['collective']}-p{index:02d}-n{layout.ranks:04d}-k{place.repeat:02d}"
    try:
        return CommPlan(
            run_id=name,
            created=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            dlbench_version=dlbench.__version__,
            dlbench_code=bundled.code(),
            layout=layout,
            system=system,
            overrides={**request.overrides},
            comm=CommSpec.model_validate(spec),
            series=place,
            # A single iteration may take its whole timeout without a sign of life.
            stall_timeout_s=max(600.0, 2 * request.timeout_s),
        )
    except ValidationError as error:
        kind = CommSpec if error.title == CommSpec.__name__ else CommPlan
        raise UserError(f"{layout.ranks} ranks on {system.name}: {problem_of(kind, error)}") from None


def describe(spec: CommSpec) -> str:
    """The sizes of a run in a few words."""
    low, high = format_bytes(spec.sizes[0]), format_bytes(spec.sizes[-1])
    return f"{len(spec.sizes)} sizes from {low} to {high}" if len(spec.sizes) > 1 else low
