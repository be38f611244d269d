"""What is kept of the single steps of a run once the steps themselves are let go.

A run of 1,024 ranks and 1,000 steps is a million step times; a report shows their distribution, the outliers and a map
of ranks by steps, which are made here, once, while the steps are at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.analysis.measures import RunSteps
from dlbench.lazy import Array, Times, np
from dlbench.records.scan import Run

QUANTILES = 101  # Quantiles kept of a run's step times: 0 %, 1 %, ..., 100 %.
MAX_MAP_ROWS = 64
MAX_MAP_COLUMNS = 100
MAX_OUTLIERS = 20
FENCE = 3.0  # Interquartile ranges above the third quartile (Tukey 1977, Exploratory Data Analysis: "far out").
MIN_CORRELATED = 10  # Fewest steps with an autocorrelation.


@dataclass(frozen=True, kw_only=True)
class OutlierStep:
    """A step that took far longer than the run's median step."""

    run_id: str
    step: int  # Number of the step, warm-up steps counted.
    seconds: float  # Of its slowest rank.
    ratio: float  # Over the run's median step (1).
    rank: int  # Rank whose own work (step without exchange) was longest.
    host: str
    phase: str  # What grew most against that rank's median, one of `dlbench.analysis.measures.PARTS` but `imbalance`.


@dataclass(frozen=True, kw_only=True)
class RankStepMap:
    """Own work (step without exchange) of ranks by steps, relative to its median over all ranks and steps.

    A cell holds the largest mean of any of its ranks over its steps, so that one slow rank among many stays visible.
    All rows but the last are equally high, all columns but the last equally wide. The median counts as at least a
    nanosecond.
    """

    rank_starts: tuple[int, ...]  # First rank of each row; the last row ends with the last rank.
    num_ranks: int
    step_starts: tuple[int, ...]  # Number of the first step of each column, warm-up steps counted.
    last_step: int
    cells: tuple[tuple[float, ...], ...]  # By row, then column (1).
    row_hosts: tuple[str, ...]  # Hosts of each row's ranks, `n0` or `n0 to n3`.


@dataclass(frozen=True, kw_only=True)
class StepDigest:
    """The steps of one run."""

    quantiles_s: tuple[float, ...]
    """`QUANTILES` quantiles of the slowest rank's time in each measured step, seconds, linear interpolation."""
    num_steps: int
    num_outliers: int  # Steps beyond the third quartile + 3 times the interquartile range (Tukey's far-out fence).
    fence_s: float
    outliers: tuple[OutlierStep, ...]  # The longest of them, longest first, at most `MAX_OUTLIERS`.
    autocorrelation: float | None  # Of successive step times (lag 1); None for fewer than 10 steps or equal times.
    map: RankStepMap


def digest_of(run: Run, steps: RunSteps) -> StepDigest:
    """The steps of a run in short. Raises ValueError: the run has no record."""
    if run.record is None:
        raise ValueError(f"{run.plan.run_id} has no record: its hosts are not known")
    hosts = [rank.host for rank in sorted(run.record.ranks, key=lambda rank: rank.rank)]
    slowest_s = steps.step_ns.max(axis=0) / 1e9
    own: Times = steps.step_ns - steps.phase_ns["exchange"]
    quantiles = np.quantile(slowest_s, np.linspace(0, 1, QUANTILES))
    lower, upper = (float(value) for value in np.quantile(slowest_s, (0.25, 0.75)))
    fence_s = upper + FENCE * (upper - lower)
    autocorrelation = None
    if len(slowest_s) >= MIN_CORRELATED and slowest_s.min() != slowest_s.max():
        # At lag 1, around the mean of all (Box and Jenkins 1970, section 2.1.5).
        centred = slowest_s - slowest_s.mean()
        autocorrelation = float((centred[1:] * centred[:-1]).sum() / (centred * centred).sum())
    return StepDigest(
        quantiles_s=tuple(quantiles.tolist()),
        num_steps=len(slowest_s),
        num_outliers=int((slowest_s > fence_s).sum()),
        fence_s=fence_s,
        outliers=_outliers(run.plan.run_id, steps, own, slowest_s, fence_s, hosts),
        autocorrelation=autocorrelation,
        map=_map(own, steps.numbers, hosts),  # which sorts `own`
    )


def _outliers(
    run_id: str, steps: RunSteps, own: Times, slowest_s: Array, fence_s: float, hosts: Sequence[str]
) -> tuple[OutlierStep, ...]:
    found = np.flatnonzero(slowest_s > fence_s)
    # Of equally long ones the first: a stable sort of the negatives.
    found = found[np.argsort(-slowest_s[found], kind="stable")][:MAX_OUTLIERS]
    median_s = float(np.median(slowest_s))
    made = []
    for column in found.tolist():
        rank = int(own[:, column].argmax())
        # What exceeds its median over the rank's steps most; of equal ones the first.
        times = {name: phase[rank] for name, phase in steps.phase_ns.items()}
        times["other"] = steps.step_ns[rank] - sum(times.values())
        grown = {name: float(values[column] - np.median(values)) for name, values in times.items()}
        made.append(
            OutlierStep(
                run_id=run_id,
                step=int(steps.numbers[column]),
                seconds=float(slowest_s[column]),
                ratio=float(slowest_s[column]) / median_s,
                rank=rank,
                host=hosts[rank],
                phase=max(grown, key=lambda name: grown[name]),
            )
        )
    return tuple(made)


def _map(own: Times, numbers: Times, hosts: Sequence[str]) -> RankStepMap:
    ranks, steps = own.shape
    # Where equal pieces begin, the last one perhaps shorter.
    rows = list(range(0, ranks, -(-ranks // MAX_MAP_ROWS)))
    columns = list(range(0, steps, -(-steps // MAX_MAP_COLUMNS)))
    row_hosts = []
    for begin, end in zip(rows, [*rows[1:], ranks], strict=True):
        names = list(dict.fromkeys(hosts[begin:end]))
        row_hosts.append(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")
    widths = np.diff([*columns, steps])
    # Sums of whole nanoseconds, so that nothing is rounded before the mean.
    means = np.add.reduceat(own, columns, axis=1) / widths
    cells = np.maximum.reduceat(means, rows, axis=0) / max(1.0, float(np.median(own, overwrite_input=True)))
    return RankStepMap(
        rank_starts=tuple(rows),
        num_ranks=ranks,
        step_starts=tuple(int(numbers[column]) for column in columns),
        last_step=int(numbers[-1]),
        cells=tuple(tuple(row) for row in cells.tolist()),
        row_hosts=tuple(row_hosts),
    )
