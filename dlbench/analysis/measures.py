"""The step files of one run become its figures: throughput, step times, and parts that sum to the step.

Parts are arithmetic means over steps and ranks, because means of parts sum to the mean of the
whole and medians do not: `sum(parts) == measured_s / steps`, to the nanosecond. Throughput is of the same clock
readings. One rank exchanges nothing: what its exchange phase holds is the engine's own work, and part of `other`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlbench.errors import IncompleteDataError
from dlbench.lazy import Times, np
from dlbench.records.record import RankResult
from dlbench.records.rows.reader import read_alike
from dlbench.records.rows.shared import Opened, file_of, opened_at_once
from dlbench.records.rows.steps import LAUNCH_FIELDS, LAUNCHED, PHASES, StepReader
from dlbench.records.scan import Run

PARTS: tuple[str, ...] = (*PHASES, "other", "imbalance")
"""What a step's time consists of, as the mean of all ranks sees it: the phases; what no phase holds; how far the
slowest rank's mean exceeds it. `dlbench.analysis.causes` makes the account of the lost percent of them."""

# CUDA events resolve about half a microsecond each, and a step has eight of them.
ROUNDING_NS = 10_000
# `measured_s` and the step times are the same clock readings; more apart than this, one of them is damaged.
TOLERANCE = 0.01

# Ranks that are read together, where no node has more.
_AT_ONCE = 16
_COLUMNS = ("step", "warmup", "start_ns", "step_ns", *(f"{phase}_ns" for phase in PHASES), "samples")
_BOUNDS = tuple(name for name, _ in LAUNCH_FIELDS)
_KERNELS = tuple(f"kernel_{phase}_ns" for phase in LAUNCHED)


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """Figures of one valid run; times in seconds."""

    steps: int  # Measured steps of every rank.
    samples: int  # Samples of all measured steps of all ranks.
    measured_s: float  # Longest measured time of any rank.
    throughput: float  # samples / measured_s, samples per second.
    step_median_s: float  # Median over steps of the slowest rank's time in each step.
    step_p95_s: float  # 95th percentile of the same (linear interpolation).
    step_cv: float  # Coefficient of variation of the same: standard deviation / mean.
    parts: dict[str, float]  # Seconds per step of each of `PARTS`; their sum is measured_s / steps.
    exchange_wait_s: float  # Part of `exchange`, not to be added: mean excess over the least wait in each step.
    exchange_wait_first_s: float  # The same of rank 0, whose messages a record holds: median over steps.


@dataclass(frozen=True, kw_only=True)
class Launching:
    """How long devices waited for their hosts' calls, see `dlbench.analysis.launching`; by `LAUNCHED`, nanoseconds."""

    bound_ns: dict[str, Times]  # At most, of all measured steps; shape (ranks, steps).
    kernel_ns: dict[str, Times]  # What the phase's kernels take, `UNKNOWN_NS` where no step shows it; shape (ranks,).


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """Times of all measured steps of one run, nanoseconds; times have shape (ranks, steps)."""

    numbers: Times  # Of the steps, warm-up steps counted; shape (steps,).
    begin_ns: Times  # Start of each rank's first measured step on its machine's clock; shape (ranks,).
    end_ns: Times  # End of each rank's last measured step, likewise.
    step_ns: Times
    phase_ns: dict[str, Times]  # By phase, in the order of `PHASES`.
    unbroken: int  # First steps that follow each other without a pause (evaluation, checkpoint) on every rank.
    launch: Launching | None = None  # None on CPUs.

    @property
    def other_ns(self) -> Times:
        """What no phase holds; it lies between the last phase of a step and the start of the next step."""
        other = self.step_ns.copy()
        for times in self.phase_ns.values():
            other -= times
        return other


def load_steps(run: Run) -> RunSteps:
    """Measured steps of all ranks of a run with a valid record, checked.

    Raises IncompleteDataError: step files are missing, torn, or disagree with the record or each other; or ValueError:
    the run has no valid record and so no figures.
    """
    if run.record is None or run.state != "valid":
        raise ValueError(f"{run.plan.run_id} is {run.state}: it has no figures")
    steps = _all_ranks(run)
    # No step takes no time, and no phase is negative or longer than its step.
    step_ns, phases_ns = steps.step_ns, list(steps.phase_ns.values())
    rest = step_ns.copy()
    for times in phases_ns:
        rest -= times
    lowest = min(int(times.min()) for times in phases_ns)
    if step_ns.min() > 0 and lowest >= 0 and rest.min() >= -ROUNDING_NS:
        return steps
    negative = np.logical_or.reduce([times < 0 for times in phases_ns])
    bad = np.argwhere((step_ns <= 0) | negative | (rest < -ROUNDING_NS))
    rank, step = (int(x) for x in bad[0])
    raise IncompleteDataError(
        f"{run.folder.steps(rank)}: impossible times at measured step {step}: step {step_ns[rank, step]} ns, "
        f"phases {[int(times[rank, step]) for times in phases_ns]} ns"
    )


def measure(run: Run, steps: RunSteps | None = None) -> RunMeasures:
    """The figures of a run with a valid record.

    `steps`: what `load_steps` gave for it, if that is at hand. Raises as that does.
    """
    loaded = steps or load_steps(run)
    assert run.record is not None
    step_ns, phase_ns = loaded.step_ns, loaded.phase_ns
    slowest_s = step_ns.max(axis=0) / 1e9
    samples = sum(rank.samples for rank in run.record.ranks)
    longest_ns = int(step_ns.sum(axis=1).max())
    measured_s = longest_ns / 1e9
    exchange = phase_ns["exchange"]
    # Mean seconds per step of each part. Sums are taken over integers, so the order of ranks cannot matter.
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
    """The figures of a run that is subtracted from others of its series; or, in a sentence, why it cannot be."""
    if run.state != "valid":
        return None, f"{run.plan.run_id} is {run.state}: {run.detail}"
    if run.record is not None and run.record.goes_on:
        return None, f"{run.plan.run_id} was resumed after an interruption: no repeat of runs that ran through"
    try:
        return measure(run), ""
    except IncompleteDataError as error:
        return None, str(error)


def _all_ranks(run: Run) -> RunSteps:
    """Measured steps of every rank, checked against the record."""
    assert run.record is not None
    ranks = sorted(rank.rank for rank in run.record.ranks)
    if len(ranks) != run.plan.layout.ranks or ranks != list(range(len(ranks))):
        raise IncompleteDataError(
            f"{run.folder.record}: holds {len(ranks)} ranks, the plan has {run.plan.layout.ranks}; no figure is made"
        )
    # Few ranks at a time, so that a run of many is never held twice: those of whole nodes, whose file is read once.
    result: RunSteps | None = None
    numbers: Times | None = None
    entries = sorted(run.record.ranks, key=lambda rank: rank.rank)
    per_node = run.plan.layout.ranks_per_node
    width, alike = max(1, _AT_ONCE // per_node) * per_node, True
    for begin in range(0, len(entries), width):
        some = entries[begin : begin + width]
        steps = _ranks_alike(run, some, numbers) if alike else None
        # Files that differ are read one by one, which also finds what is wrong where something is.
        alike = steps is not None
        for first in [begin] if steps is not None else [entry.rank for entry in some]:
            own = steps or _one_rank(run, entries[first], numbers)
            step_ns, start_ns = own["step_ns"], own["start_ns"]
            if result is None:
                numbers, shape = own["step"][0].copy(), (len(ranks), step_ns.shape[1])
                result = RunSteps(
                    numbers=numbers,
                    begin_ns=np.empty(len(ranks), np.int64),
                    end_ns=np.empty(len(ranks), np.int64),
                    step_ns=np.empty(shape, np.int64),
                    phase_ns={phase: np.empty(shape, np.int64) for phase in PHASES},
                    unbroken=shape[1],
                    launch=Launching(
                        bound_ns={phase: np.empty(shape, np.int64) for phase in LAUNCHED},
                        kernel_ns={phase: np.empty(shape[0], np.int64) for phase in LAUNCHED},
                    )
                    if _KERNELS[0] in own
                    else None,
                )
            place = slice(first, first + len(step_ns))
            result.begin_ns[place] = start_ns[:, 0]
            result.end_ns[place] = start_ns[:, -1] + step_ns[:, -1]
            result.step_ns[place] = step_ns
            for phase in PHASES:
                result.phase_ns[phase][place] = own[f"{phase}_ns"]
            if (result.launch is None) != (_KERNELS[0] not in own):
                raise IncompleteDataError(f"{run.folder.steps(first)}: other columns than on rank 0")
            if result.launch is not None:
                for phase, kernels, bound in zip(LAUNCHED, _KERNELS, _BOUNDS, strict=True):
                    result.launch.kernel_ns[phase][place] = own[kernels]
                    result.launch.bound_ns[phase][place] = own[bound]
            # Without a pause a step begins where the one before ends.
            late = start_ns[:, 1:] - start_ns[:, :1] - np.cumsum(step_ns[:, :-1], axis=1) > ROUNDING_NS
            if late.any():
                result = replace(result, unbroken=min(result.unbroken, int(late.any(axis=0).argmax()) + 1))
    assert result is not None
    return result


def _columns(reader: StepReader) -> tuple[str, ...]:
    return (*_COLUMNS, *_BOUNDS) if reader.launches else _COLUMNS


def _with_kernels(steps: dict[str, Any]) -> dict[str, Any]:
    """What the kernels of each phase take, of all steps of one rank, as columns of one value."""
    if _BOUNDS[0] not in steps:
        return {}
    return {
        name: kernel_ns(steps[f"{phase}_ns"], steps[bound], steps["warmup"])
        for name, phase, bound in zip(_KERNELS, LAUNCHED, _BOUNDS, strict=True)
    }


def _ranks_alike(run: Run, entries: Sequence[RankResult], numbers: Times | None) -> dict[str, Times] | None:
    """As `_one_rank` of several ranks, shape (ranks, steps); None where their files differ, or one is damaged."""
    assert run.record is not None
    try:
        rows: dict[int, tuple[Path, Opened]] = {}
        for first in entries[:: run.plan.layout.ranks_per_node]:
            if (file := file_of(path := run.folder.steps(first.rank))) != path:
                rows |= {rank: (file / f"rank-{rank:04d}", own) for rank, own in opened_at_once(file).items()}
        parts = [rows[one.rank] if rows else (run.folder.steps(one.rank), None) for one in entries]
        readers = [StepReader(path, part, run_id=run.plan.run_id) for path, part in parts]
        steps = read_alike(readers, _columns(readers[0]))
    except (IncompleteDataError, OSError, KeyError):
        return None
    if steps is None or any(reader.torn_bytes for reader in readers):
        return None
    if any(reader.header.get("rank", entry.rank) != entry.rank for reader, entry in zip(readers, entries, strict=True)):
        return None
    is_measured = steps["warmup"] == 0
    count = is_measured.shape[1]
    begin = count - int(np.count_nonzero(is_measured[0]))
    if begin == count or run.record.steps != count:
        return None
    if is_measured[:, :begin].any() or not is_measured[:, begin:].all():
        return None
    chosen: dict[str, Any] = {name: values[:, begin:] for name, values in steps.items()}
    kernels = [_with_kernels({name: values[row] for name, values in steps.items()}) for row in range(len(entries))]
    chosen |= {name: [one[name] for one in kernels] for name in kernels[0]}
    if (chosen["step"] != (chosen["step"][0] if numbers is None else numbers)).any():
        return None
    sums = zip(entries, chosen["samples"].sum(axis=1).tolist(), chosen["step_ns"].sum(axis=1).tolist(), strict=True)
    return None if any(_other_sums(entry, samples, ns) for entry, samples, ns in sums) else chosen


def _one_rank(run: Run, entry: RankResult, numbers: Times | None) -> dict[str, Times]:
    """`_COLUMNS` of the measured steps of a rank, shape (1, steps), checked; `numbers`: those of the ranks before."""
    assert run.record is not None
    path = run.folder.steps(entry.rank)
    reader = StepReader(path, run_id=run.plan.run_id)
    steps: dict[str, Any] = reader.read(_columns(reader))
    if reader.torn_bytes:
        raise IncompleteDataError(f"{path}: {reader.torn_bytes} bytes behind the last whole step: copied in part?")
    if reader.header.get("rank", entry.rank) != entry.rank:  # copied: it is no repeat of this one
        raise IncompleteDataError(f"{path}: belongs to rank {reader.header['rank']!r}, not to {entry.rank}")
    # How many steps a run to a quality takes is not planned: the record has it.
    count = len(steps["step"])
    if count != run.record.steps:
        raise IncompleteDataError(f"{path}: {count} steps, record.json says {run.record.steps}; no figure is made")
    is_measured = steps["warmup"] == 0
    found: dict[str, Any] = {name: values[is_measured] for name, values in steps.items()}
    count = len(found["step"])
    if count == 0 or (numbers is not None and not np.array_equal(found["step"], numbers)):
        raise IncompleteDataError(f"{path}: {count} measured steps, not the same as on the other ranks")
    if other := _other_sums(entry, int(found["samples"].sum()), int(found["step_ns"].sum())):
        raise IncompleteDataError(f"{path}: {other}; no figure is made")
    return {name: np.asarray(values)[None] for name, values in (found | _with_kernels(steps)).items()}


def _other_sums(entry: RankResult, samples: int, step_ns: int) -> str:
    """How samples or time of a rank's measured steps differ from its record; empty where they do not."""
    if samples != entry.samples:
        return f"{samples} samples, record.json says {entry.samples}"
    seconds = step_ns / 1e9
    if entry.samples <= 0 or entry.measured_s <= 0 or abs(seconds / entry.measured_s - 1) > TOLERANCE:
        return (
            f"{seconds:.6g} s of measured steps, record.json says {entry.measured_s:.6g} s for {entry.samples} samples"
        )
    return ""


UNKNOWN_NS = -1  # Instead of the time of a phase's kernels, where no step shows it.

REFERENCE_STEPS = 3
"""Steps that show what the kernels of a phase take, where as many are found among the measured ones; otherwise the last
ones of the warm-up, for which as many are held back."""


def kernel_ns(took: Times, bound: Times, warmup: Times) -> int:
    """What the kernels of one phase of one rank take, nanoseconds; `UNKNOWN_NS` where no step shows it.

    `took`: the phase in every step, nanoseconds; `bound`: how long the device waited for the host in it, at most;
    `warmup`: 1 where a step is warm-up; each of shape (steps,).
    """
    shows = bound == 0
    measured = took[shows & (warmup == 0)]
    if len(measured) >= REFERENCE_STEPS:
        return round(float(np.median(measured)))
    found = took[shows][-REFERENCE_STEPS:]
    return round(float(np.median(found))) if len(found) else UNKNOWN_NS
