"""Figures of a run from its step files: throughput, step times, parts that sum to the step, work for emulated ranks.

Parts are arithmetic means over steps and ranks, because only means sum to the mean of the whole: `sum(parts) ==
measured_s / steps`, to the nanosecond. The exchange phase of a single rank is part of `other`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from dlbench.errors import IncompleteDataError, UserError
from dlbench.lazy import Times, np
from dlbench.records.layer_profile import run_of
from dlbench.records.record import RankResult
from dlbench.records.rows.reader import read_columns
from dlbench.records.rows.shared import RankRows, file_of, read_parts
from dlbench.records.rows.steps import LAUNCH_FIELDS, LAUNCHED, PHASES, StepReader
from dlbench.records.scan import Run
from dlbench.specs.plan import RunPlan
from dlbench.units import counted, format_seconds

PARTS: tuple[str, ...] = (*PHASES, "other", "imbalance")
"""Means over ranks of phases and the time outside of them; `imbalance`: the slowest rank's mean minus that of all."""

# CUDA events resolve about half a microsecond each, and a step has eight of them.
ROUNDING_NS = 10_000
# `measured_s` and the step times are the same clock readings; if they differ by more, one of them is damaged.
TOLERANCE = 0.01
# Ranks that are read together, unless a node has more.
_AT_ONCE = 16
_COLUMNS = ("step", "warmup", "start_ns", "step_ns", *(f"{phase}_ns" for phase in PHASES), "samples")
_TIMES = ("step_ns", *(f"{phase}_ns" for phase in PHASES))
_NARROW: Any = "<i4"  # Type of times if none is longer than 2.1 s.
_BOUNDS = tuple(name for name, _ in LAUNCH_FIELDS)
_KERNELS = tuple(f"kernel_{phase}_ns" for phase in LAUNCHED)
UNKNOWN_NS = -1  # Stands for the time of a phase's kernels if no step shows it.
REFERENCE_STEPS = 3  # Measured steps that show the time of a phase's kernels; with fewer, the last warm-up steps.
MOST_STEPS = 256  # Steps of a rank in a plan, evenly spaced.


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """Figures of a valid run; times in seconds."""

    steps: int  # Measured steps of every rank.
    samples: int  # Samples of all measured steps of all ranks.
    measured_s: float  # Longest measured time of any rank.
    throughput: float  # samples / measured_s, samples per second.
    step_median_s: float  # Median over steps of the slowest rank's time in each step.
    step_p95_s: float  # 95th percentile of those times (linear interpolation).
    step_cv: float  # Coefficient of variation of those times: standard deviation / mean.
    parts: dict[str, float]  # Seconds per step of each of `PARTS`; their sum is measured_s / steps.
    exchange_wait_s: float  # Included in `exchange`: mean excess over the shortest exchange in each step.
    exchange_wait_first_s: float  # That excess of rank 0, whose messages a record has: median over steps.


@dataclass(frozen=True, kw_only=True)
class Launching:
    """Waits of devices for their hosts' calls, see `dlbench.analysis.causes`; by `LAUNCHED`, nanoseconds."""

    bound_ns: dict[str, Times]  # Upper bound of the wait in each measured step; shape (ranks, steps).
    kernel_ns: dict[str, Times]  # Time of the phase's kernels, `UNKNOWN_NS` if no step shows it; shape (ranks,).


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """Times of all measured steps of a run, nanoseconds, of shape (ranks, steps).

    They are 4-byte integers if none is longer than 2.1 s, which takes half of the memory, else 8-byte ones.
    """

    numbers: Times  # Numbers of the steps, warm-up steps counted; shape (steps,).
    begin_ns: Times  # Start of each rank's first measured step on its machine's clock; shape (ranks,).
    end_ns: Times  # End of each rank's last measured step on that clock; shape (ranks,).
    step_ns: Times
    phase_ns: dict[str, Times]  # Times by phase, in the order of `PHASES`.
    unbroken: int  # Number of first steps without a pause (evaluation, checkpoint) between them on any rank.
    launch: Launching | None = None  # None on CPUs.


def load_steps(run: Run) -> RunSteps:
    """Reads and checks the measured steps of all ranks. Raises IncompleteDataError; ValueError: no valid record."""
    if run.record is None or run.state != "valid":
        raise ValueError(f"{run.plan.run_id} is {run.state}: it has no figures")
    ranks = sorted(rank.rank for rank in run.record.ranks)
    if len(ranks) != run.plan.layout.ranks or ranks != list(range(len(ranks))):
        raise IncompleteDataError(
            f"{run.folder.record}: has {len(ranks)} ranks, the plan has {run.plan.layout.ranks}; the run is not used"
        )
    # A few ranks at a time, so that memory never has a large run twice; whole nodes, whose file is read once.
    result: RunSteps | None = None
    entries = sorted(run.record.ranks, key=attrgetter("rank"))
    per_node = run.plan.layout.ranks_per_node
    width = max(1, _AT_ONCE // per_node) * per_node
    for begin in range(0, len(entries), width):
        numbers = None if result is None else result.numbers
        for rank, rank_steps in _groups(run, entries[begin : begin + width], numbers):
            if result is None:
                result = _empty_steps(rank_steps["step"][0].copy(), len(ranks), has_launches=_KERNELS[0] in rank_steps)
            if (result.launch is None) != (_KERNELS[0] not in rank_steps):
                raise IncompleteDataError(f"{run.folder.steps(rank)}: columns differ from those of rank 0")
            result = _filled(result, rank, rank_steps)
    assert result is not None
    return result


def _groups(run: Run, entries: Sequence[RankResult], numbers: Times | None) -> Iterator[tuple[int, dict[str, Times]]]:
    """Yields the first rank and the steps of ranks together; if that fails, of one after the other, up to damage."""
    try:
        steps = _rank_steps(run, entries, numbers)
    except IncompleteDataError:
        for entry in entries:
            steps = _rank_steps(run, [entry], numbers)
            numbers = steps["step"][0]
            yield entry.rank, steps
    else:
        yield entries[0].rank, steps


def measure(run: Run, steps: RunSteps | None = None) -> RunMeasures:
    """Returns the figures of a run with a valid record; `steps` are those of `load_steps`, if loaded already."""
    loaded = steps or load_steps(run)
    assert run.record is not None
    step_ns, phase_ns = loaded.step_ns, loaded.phase_ns
    slowest_s = step_ns.max(axis=0) / 1e9
    samples = sum(rank.samples for rank in run.record.ranks)
    longest_ns = int(step_ns.sum(axis=1).max())
    measured_s = longest_ns / 1e9
    exchange = phase_ns["exchange"]
    # Sums are over integers, so the order of ranks cannot matter.
    total_ns = int(step_ns.sum())
    phase_sums_ns = {phase: int(times.sum()) for phase, times in phase_ns.items()}
    if len(step_ns) == 1:
        phase_sums_ns["exchange"] = 0
    parts = {phase: sum_ns / step_ns.size / 1e9 for phase, sum_ns in phase_sums_ns.items()}
    parts["other"] = (total_ns - sum(phase_sums_ns.values())) / step_ns.size / 1e9
    parts["imbalance"] = longest_ns / step_ns.shape[1] / 1e9 - total_ns / step_ns.size / 1e9
    return RunMeasures(
        steps=step_ns.shape[1],
        samples=samples,
        measured_s=measured_s,
        throughput=samples / measured_s,
        step_median_s=float(np.median(slowest_s)),
        step_p95_s=float(np.percentile(slowest_s, 95)),
        step_cv=float(slowest_s.std() / slowest_s.mean()),
        parts=parts,
        exchange_wait_s=float(exchange.sum() - len(exchange) * exchange.min(axis=0).sum()) / exchange.size / 1e9,
        exchange_wait_first_s=float(np.median(exchange[0] - exchange.min(axis=0))) / 1e9,
    )


def measured_or_why(run: Run) -> tuple[RunMeasures | None, str]:
    """Returns the figures of a run that is compared with its control runs; or None and the reason in a sentence."""
    if run.state != "valid":
        return None, f"{run.plan.run_id} is {run.state}: {run.detail}"
    if run.record is not None and run.record.goes_on:
        return None, f"{run.plan.run_id} was resumed after an interruption: not a repeat of uninterrupted runs"
    try:
        return measure(run), ""
    except IncompleteDataError as error:
        return None, str(error)


def _filled(steps: RunSteps, first: int, rank_steps: dict[str, Times]) -> RunSteps:
    """Returns the steps of a run with those of some ranks, `rank_steps`, from rank `first` on."""
    step_ns, start_ns = rank_steps["step_ns"], rank_steps["start_ns"]
    # No phase is longer than its step and the rounding.
    if steps.step_ns.dtype == _NARROW and step_ns.max() > np.iinfo(_NARROW).max - ROUNDING_NS:
        phases_ns = {phase: times.astype(np.int64) for phase, times in steps.phase_ns.items()}
        steps = replace(steps, step_ns=steps.step_ns.astype(np.int64), phase_ns=phases_ns)
    ranks = slice(first, first + len(step_ns))
    steps.begin_ns[ranks] = start_ns[:, 0]
    steps.end_ns[ranks] = start_ns[:, -1] + step_ns[:, -1]
    steps.step_ns[ranks] = step_ns
    for phase in PHASES:
        steps.phase_ns[phase][ranks] = rank_steps[f"{phase}_ns"]
    if steps.launch is not None:
        for phase, kernels, bound in zip(LAUNCHED, _KERNELS, _BOUNDS, strict=True):
            steps.launch.kernel_ns[phase][ranks] = rank_steps[kernels]
            steps.launch.bound_ns[phase][ranks] = rank_steps[bound]
    # Without a pause a step begins at the end of the one before.
    ends_ns = start_ns[:, :1] + np.cumsum(step_ns[:, :-1], axis=1, dtype=np.int64)
    late = start_ns[:, 1:] - ends_ns > ROUNDING_NS
    if not late.any():
        return steps
    return replace(steps, unbroken=min(steps.unbroken, int(late.any(axis=0).argmax()) + 1))


def _empty_steps(numbers: Times, ranks: int, *, has_launches: bool) -> RunSteps:
    shape = (ranks, len(numbers))
    launch = None
    if has_launches:
        launch = Launching(
            bound_ns={phase: np.empty(shape, np.int64) for phase in LAUNCHED},
            kernel_ns={phase: np.empty(ranks, np.int64) for phase in LAUNCHED},
        )
    return RunSteps(
        numbers=numbers,
        begin_ns=np.empty(ranks, np.int64),
        end_ns=np.empty(ranks, np.int64),
        step_ns=np.empty(shape, _NARROW),
        phase_ns={phase: np.empty(shape, _NARROW) for phase in PHASES},
        unbroken=shape[1],
        launch=launch,
    )


def _readers(run: Run, entries: Sequence[RankResult]) -> list[StepReader]:
    """Returns readers of several ranks; a file of a whole node is opened once."""
    parts: dict[int, RankRows] = {}
    for first in entries[:: run.plan.layout.ranks_per_node]:
        with suppress(OSError):  # The reader of a rank without a part reports why.
            parts |= read_parts(file_of(run.folder.steps(first.rank)))
    return [
        StepReader(run.folder.steps(entry.rank), parts.get(entry.rank), run_id=run.plan.run_id) for entry in entries
    ]


def _rank_steps(run: Run, entries: Sequence[RankResult], numbers: Times | None) -> dict[str, Times]:
    """Reads and checks `_COLUMNS` of the measured steps of some ranks, shape (ranks, steps).

    `numbers`: those of the steps of other ranks. Raises IncompleteDataError: damage; it names the rank if it is one.
    """
    assert run.record is not None
    readers = _readers(run, entries)
    path = readers[0].path
    steps: dict[str, Any] = read_columns(readers, (*_COLUMNS, *_BOUNDS) if readers[0].launches else _COLUMNS)
    torn_bytes = sum(reader.torn_bytes for reader in readers)
    if torn_bytes:
        raise IncompleteDataError(f"{path}: {torn_bytes} bytes after the last complete step: partly copied?")
    for entry, reader in zip(entries, readers, strict=True):
        if reader.header.get("rank", entry.rank) != entry.rank:
            raise IncompleteDataError(f"{path}: belongs to rank {reader.header['rank']!r}, not to {entry.rank}")
    # The number of steps of a run to a quality is not planned: the record has it.
    is_measured = steps["warmup"] == 0
    count = is_measured.shape[1]
    if count != run.record.steps:
        raise IncompleteDataError(f"{path}: {count} steps, record.json has {run.record.steps}; the run is not used")
    chosen: Any = is_measured[0]
    first = count - int(chosen.sum())
    if chosen[first:].all():  # Without a copy, as mostly the warm-up steps are the first.
        chosen = slice(first, None)
    measured: dict[str, Any] = {name: values[:, chosen] for name, values in steps.items()}
    if numbers is None:
        numbers = measured["step"][0]
    count = measured["step"].shape[1]
    is_alike = count == len(numbers) and (is_measured == is_measured[0]).all() and (measured["step"] == numbers).all()
    if count == 0 or not is_alike:
        raise IncompleteDataError(f"{path}: {count} measured steps, not the same as on the other ranks")
    sums = measured["samples"].sum(axis=1).tolist(), measured["step_ns"].sum(axis=1).tolist()
    for entry, samples, step_ns in zip(entries, *sums, strict=True):
        problem = _disagreement(entry, samples, step_ns)
        if problem:
            raise IncompleteDataError(f"{path}: {problem}; the run is not used")
    _refuse_impossible(path, measured)
    if readers[0].launches:
        for name, phase, bound in zip(_KERNELS, LAUNCHED, _BOUNDS, strict=True):
            times = zip(steps[f"{phase}_ns"], steps[bound], steps["warmup"], strict=True)
            measured[name] = [kernel_ns(*of_rank) for of_rank in times]
    return measured


def _refuse_impossible(path: Path, steps: dict[str, Any]) -> None:
    """Raises IncompleteDataError: a step is not longer than 0, or a phase is negative or longer than its step."""
    step_ns, *phases_ns = (steps[name] for name in _TIMES)
    between_ns = step_ns.astype(np.int64)
    is_bad = between_ns <= 0
    for times in phases_ns:
        between_ns -= times
        is_bad |= times < 0
    is_bad |= between_ns < -ROUNDING_NS
    if is_bad.any():
        row, step = (int(x) for x in np.argwhere(is_bad)[0])
        raise IncompleteDataError(
            f"{path}: impossible times at measured step {step}: step {step_ns[row, step]} ns, "
            f"phases {[int(times[row, step]) for times in phases_ns]} ns"
        )


def _disagreement(entry: RankResult, samples: int, step_ns: int) -> str:
    """Returns how samples or time of a rank's measured steps differ from its record; empty if they agree."""
    if samples != entry.samples:
        return f"{samples} samples, record.json has {entry.samples}"
    seconds = step_ns / 1e9
    if entry.samples <= 0 or entry.measured_s <= 0 or abs(seconds / entry.measured_s - 1) > TOLERANCE:
        return (
            f"{seconds:.6g} s of measured steps, record.json has {entry.measured_s:.6g} s for {entry.samples} samples"
        )
    return ""


def kernel_ns(phase_ns: Times, bound_ns: Times, warmup: Times) -> int:
    """Returns the time of the kernels of one phase of one rank, nanoseconds; `UNKNOWN_NS` if no step shows it.

    `phase_ns`: the phase in every step; `bound_ns`: bound of the device's wait; `warmup`: 1 for warm-up steps.
    """
    is_reference = bound_ns == 0
    measured = phase_ns[is_reference & (warmup == 0)]
    if len(measured) >= REFERENCE_STEPS:
        return round(float(np.median(measured)))
    reference = phase_ns[is_reference][-REFERENCE_STEPS:]
    if not len(reference):
        return UNKNOWN_NS
    return round(float(np.median(reference)))


def with_recorded_work(plan: RunPlan) -> tuple[RunPlan, str | None]:
    """Returns the plan with the steps of the run in `engine.emulated.steps_from`, of at most as many ranks as workers.

    The second value is a note. Raises UserError: the run has no steps.
    """
    emulated = plan.engine.emulated
    if emulated.steps_from is None:
        return plan, None
    key = f"engine.emulated.steps_from {emulated.steps_from}"
    run = run_of(key, emulated.steps_from)
    if run.state != "valid":
        raise UserError(f"{key}: its run is {run.state}; name the folder of a valid run")
    steps = load_steps(run)
    ranks, num_steps = steps.step_ns.shape
    exchange_s = float(np.median(steps.phase_ns["exchange"].min(axis=0))) / 1e9 if ranks > 1 else 0.0
    chosen = np.linspace(0, ranks - 1, min(ranks, plan.emulated_workers)).round().astype(int)
    work_s = (steps.step_ns - steps.phase_ns["exchange"])[chosen, :: -(-num_steps // MOST_STEPS)] / 1e9
    note = (
        f"engine.emulated.steps_from: {counted(len(work_s), 'rank')} of {run.plan.run_id}, own work of a step "
        f"{format_seconds(float(np.median(work_s)))} (median), exchange {format_seconds(exchange_s)}"
    )
    recorded = {"work_s": tuple(map(tuple, work_s.tolist())), "exchange_s": exchange_s, "steps_from": run.plan.run_id}
    engine = plan.engine.model_copy(update={"emulated": emulated.model_copy(update=recorded)})
    return plan.model_copy(update={"engine": engine}), note
