"""The step files of one run become its figures: throughput, step times, and parts that sum to the step.

Parts are arithmetic means over steps and ranks, because means of parts sum to the mean of the
whole and medians do not: `sum(parts) == measured_s / steps`, to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.errors import IncompleteDataError
from dlbench.records.scan import Run
from dlbench.records.steps import PHASES, StepFile, read_steps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PARTS: tuple[str, ...] = (*PHASES, "other", "imbalance")
"""What a step's time consists of: the phases; what no phase holds; how far the slowest rank's mean exceeds the mean."""

# CUDA events resolve about half a microsecond each, and a step has eight of them.
ROUNDING_NS = 10_000
# `measured_s` and the step times are the same clock readings; more apart than this, one of them is damaged.
TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """Figures of one valid run; times in seconds."""

    steps: int
    """Measured steps of every rank."""
    samples: int
    """Samples of all measured steps of all ranks."""
    measured_s: float
    """Longest measured time of any rank."""
    throughput: float
    """samples / measured_s, samples a second."""
    step_median_s: float
    """Median over steps of the slowest rank's time in each step."""
    step_p95_s: float
    """95th percentile of the same (linear interpolation)."""
    step_cv: float
    """Coefficient of variation of the same: standard deviation / mean."""
    parts: dict[str, float]
    """Seconds a step of each of `PARTS`; their sum is measured_s / steps."""
    exchange_wait_s: float
    """Part of `exchange`, not to be added: mean excess over the rank that waited least in each step."""


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """Times of all measured steps of one run, nanoseconds; every array has shape (ranks, steps)."""

    step_ns: npt.NDArray[np.int64]
    phase_ns: dict[str, npt.NDArray[np.int64]]
    """By phase, in the order of `PHASES`."""

    @property
    def other_ns(self) -> npt.NDArray[np.int64]:
        """What no phase holds; it lies between the last phase of a step and the start of the next step."""
        other = self.step_ns.copy()
        for times in self.phase_ns.values():
            other -= times
        return other


def load_steps(run: Run) -> RunSteps:
    """Measured steps of all ranks of a run with a valid record, checked.

    Raises:
        IncompleteDataError: step files are missing, torn, or disagree with the record or each other.
        ValueError: the run has no valid record and so no figures.
    """
    if run.record is None or run.state != "valid":
        raise ValueError(f"{run.plan.run_id} is {run.state}: it has no figures")
    steps = _all_ranks(run)
    _refuse_impossible(run, steps.step_ns, steps.phase_ns)
    return steps


def measure(run: Run, steps: RunSteps | None = None) -> RunMeasures:
    """The figures of a run with a valid record.

    Args:
        run: the run.
        steps: what `load_steps` gave for it, if that is at hand; read otherwise.

    Raises:
        IncompleteDataError: step files are missing, torn, or disagree with the record or each other.
        ValueError: the run has no valid record and so no figures.
    """
    import numpy as np

    loaded = steps or load_steps(run)
    assert run.record is not None
    step_ns, phase_ns = loaded.step_ns, loaded.phase_ns
    slowest_s = step_ns.max(axis=0) / 1e9
    samples = sum(rank.samples for rank in run.record.ranks)
    measured_s = max(rank.measured_s for rank in run.record.ranks)
    exchange = phase_ns["exchange"]
    return RunMeasures(
        steps=step_ns.shape[1],
        samples=samples,
        measured_s=measured_s,
        throughput=samples / measured_s,
        step_median_s=float(np.median(slowest_s)),
        step_p95_s=float(np.percentile(slowest_s, 95)),
        step_cv=float(slowest_s.std() / slowest_s.mean()),
        parts=_parts(step_ns, phase_ns),
        exchange_wait_s=float((exchange - exchange.min(axis=0)).sum()) / exchange.size / 1e9,
    )


def _parts(step_ns: npt.NDArray[np.int64], phase_ns: dict[str, npt.NDArray[np.int64]]) -> dict[str, float]:
    """Mean seconds a step of each part. Sums are taken over integers, so the order of ranks cannot matter."""
    count = step_ns.size
    steps = step_ns.shape[1]
    total = int(step_ns.sum())
    sums = {phase: int(times.sum()) for phase, times in phase_ns.items()}
    parts = {phase: value / count / 1e9 for phase, value in sums.items()}
    parts["other"] = (total - sum(sums.values())) / count / 1e9
    parts["imbalance"] = int(step_ns.sum(axis=1).max()) / steps / 1e9 - total / count / 1e9
    return parts


def _all_ranks(run: Run) -> RunSteps:
    """Measured steps of every rank, checked against the record."""
    import numpy as np

    assert run.record is not None
    ranks = sorted(rank.rank for rank in run.record.ranks)
    if ranks != list(range(run.plan.layout.ranks)):
        raise IncompleteDataError(
            f"{run.folder.record}: holds {len(ranks)} ranks, the plan has {run.plan.layout.ranks}; no figure is made"
        )
    # One file at a time, so that a run of many ranks is never held twice.
    result: RunSteps | None = None
    numbers: list[int] = []
    for entry in sorted(run.record.ranks, key=lambda rank: rank.rank):
        path = run.folder.steps(entry.rank)
        file = read_steps(path)
        if file.torn_bytes:
            raise IncompleteDataError(f"{path}: {file.torn_bytes} bytes behind the last whole step: copied in part?")
        _refuse_foreign(run, file, entry.rank)
        # How many steps a run to a quality takes is not planned: the record tells it.
        if run.record.steps is not None and len(file.steps) != run.record.steps:
            raise IncompleteDataError(
                f"{path}: {len(file.steps)} steps, record.json says {run.record.steps}; no figure is made"
            )
        steps = file.measured
        if len(steps) == 0 or (result is not None and steps["step"].tolist() != numbers):
            raise IncompleteDataError(f"{path}: {len(steps)} measured steps, not the same as on the other ranks")
        if int(steps["samples"].sum()) != entry.samples:
            raise IncompleteDataError(
                f"{path}: {int(steps['samples'].sum())} samples, record.json says {entry.samples}; no figure is made"
            )
        seconds = int(steps["step_ns"].sum()) / 1e9
        if entry.samples <= 0 or entry.measured_s <= 0 or abs(seconds / entry.measured_s - 1) > TOLERANCE:
            raise IncompleteDataError(
                f"{path}: {seconds:.6g} s of measured steps, record.json says {entry.measured_s:.6g} s for "
                f"{entry.samples} samples; no figure is made"
            )
        if result is None:
            numbers = steps["step"].tolist()
            shape = len(ranks), len(numbers)
            result = RunSteps(
                step_ns=np.empty(shape, np.int64), phase_ns={phase: np.empty(shape, np.int64) for phase in PHASES}
            )
        result.step_ns[entry.rank] = steps["step_ns"]
        for phase in PHASES:
            result.phase_ns[phase][entry.rank] = steps[f"{phase}_ns"]
    assert result is not None
    return result


def _refuse_foreign(run: Run, file: StepFile, rank: int) -> None:
    """A file copied from another run or rank is no repeat of this one."""
    for key, wanted in (("rank", rank), ("run_id", run.plan.run_id)):
        if file.header.get(key, wanted) != wanted:
            raise IncompleteDataError(
                f"{run.folder.steps(rank)}: belongs to {key} {str(file.header[key])[:80]!r}, not to {wanted!r}"
            )


def _refuse_impossible(run: Run, step_ns: npt.NDArray[np.int64], phase_ns: dict[str, npt.NDArray[np.int64]]) -> None:
    """No step takes no time, and no phase is negative or longer than its step."""
    import numpy as np

    rest = step_ns - sum(phase_ns.values())
    lowest = np.minimum.reduce([*phase_ns.values()])
    bad = np.argwhere((step_ns <= 0) | (lowest < 0) | (rest < -ROUNDING_NS))
    if len(bad):
        rank, step = (int(x) for x in bad[0])
        raise IncompleteDataError(
            f"{run.folder.steps(rank)}: impossible times at measured step {step}: step {step_ns[rank, step]} ns, "
            f"phases {[int(times[rank, step]) for times in phase_ns.values()]} ns"
        )
