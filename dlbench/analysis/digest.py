"""A digest of the step times of a run: distribution, outliers and a map of ranks by steps.

It replaces the steps in memory: a run of 1,024 ranks and 1,000 steps has a million step times.
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
    seconds: float  # Time of its slowest rank.
    ratio: float  # That time over the run's median step (1).
    rank: int  # Rank whose own work (step without exchange) was longest.
    host: str
    phase: str  # Part that exceeds the rank's median most: one of `dlbench.analysis.measures.PARTS` except `imbalance`.


@dataclass(frozen=True, kw_only=True)
class RankStepMap:
    """Own work (step without exchange) of ranks by steps, relative to its median over all ranks and steps.

    A cell has the largest mean of any of its ranks over its steps, so that one slow rank among many is visible. All
    rows except the last have equally many ranks, all columns except the last equally many steps. The median counts as
    at least a nanosecond.
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
    outliers: tuple[OutlierStep, ...]  # The longest outliers, longest first, at most `MAX_OUTLIERS`.
    autocorrelation: float | None  # Autocorrelation of step times at lag 1; None for fewer than 10 or equal times.
    map: RankStepMap


def digest_of(run: Run, steps: RunSteps) -> StepDigest:
    """Returns the digest of a run's steps. Raises ValueError: the run has no record."""
    if run.record is None:
        raise ValueError(f"{run.plan.run_id} has no record: its hosts are not known")
    hosts = [rank.host for rank in sorted(run.record.ranks, key=lambda rank: rank.rank)]
    slowest_s = steps.step_ns.max(axis=0) / 1e9
    own_work_ns: Times = steps.step_ns - steps.phase_ns["exchange"]
    quantiles = np.quantile(slowest_s, np.linspace(0, 1, QUANTILES))
    lower, upper = (float(value) for value in np.quantile(slowest_s, (0.25, 0.75)))
    fence_s = upper + FENCE * (upper - lower)
    autocorrelation = None
    if len(slowest_s) >= MIN_CORRELATED and slowest_s.min() != slowest_s.max():
        # Box and Jenkins 1970, section 2.1.5.
        centred = slowest_s - slowest_s.mean()
        autocorrelation = float((centred[1:] * centred[:-1]).sum() / (centred * centred).sum())
    return StepDigest(
        quantiles_s=tuple(quantiles.tolist()),
        num_steps=len(slowest_s),
        num_outliers=int((slowest_s > fence_s).sum()),
        fence_s=fence_s,
        outliers=_outliers(run.plan.run_id, steps, own_work_ns, slowest_s, fence_s, hosts),
        autocorrelation=autocorrelation,
        map=_map(own_work_ns, steps.numbers, hosts),  # which sorts `own`
    )


def _outliers(
    run_id: str, steps: RunSteps, own_work_ns: Times, slowest_s: Array, fence_s: float, hosts: Sequence[str]
) -> tuple[OutlierStep, ...]:
    columns = np.flatnonzero(slowest_s > fence_s)
    # A stable sort of the negatives has the first of equally long steps first.
    columns = columns[np.argsort(-slowest_s[columns], kind="stable")][:MAX_OUTLIERS]
    median_s = float(np.median(slowest_s))
    outliers = []
    for column in columns.tolist():
        rank = int(own_work_ns[:, column].argmax())
        times = {name: phase[rank] for name, phase in steps.phase_ns.items()}
        times["other"] = steps.step_ns[rank] - sum(times.values())
        grown = {name: float(values[column] - np.median(values)) for name, values in times.items()}
        outliers.append(
            OutlierStep(
                run_id=run_id,
                step=int(steps.numbers[column]),
                seconds=float(slowest_s[column]),
                ratio=float(slowest_s[column]) / median_s,
                rank=rank,
                host=hosts[rank],
                phase=max(grown, key=grown.__getitem__),
            )
        )
    return tuple(outliers)


def _map(own_work_ns: Times, numbers: Times, hosts: Sequence[str]) -> RankStepMap:
    ranks, steps = own_work_ns.shape
    # Starts of equal pieces, of which the last may be shorter.
    rows = list(range(0, ranks, -(-ranks // MAX_MAP_ROWS)))
    columns = list(range(0, steps, -(-steps // MAX_MAP_COLUMNS)))
    row_hosts = []
    for begin, end in zip(rows, [*rows[1:], ranks], strict=True):
        names = list(dict.fromkeys(hosts[begin:end]))
        row_hosts.append(" to ".join(dict.fromkeys((names[0], names[-1]))))
    widths = np.diff([*columns, steps])
    # Sums of integers are not rounded before the mean.
    means = np.add.reduceat(own_work_ns, columns, axis=1) / widths
    cells = np.maximum.reduceat(means, rows, axis=0) / max(1.0, float(np.median(own_work_ns, overwrite_input=True)))
    return RankStepMap(
        rank_starts=tuple(rows),
        num_ranks=ranks,
        step_starts=tuple(int(numbers[column]) for column in columns),
        last_step=int(numbers[-1]),
        cells=tuple(tuple(row) for row in cells.tolist()),
        row_hosts=tuple(row_hosts),
    )
