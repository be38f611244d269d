"""Tables of the figures of a scan of `runs/`, digests of step times, and the reasons of runs without figures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Generic

from dlbench import pool
from dlbench.analysis.causes import Causes, causes_of
from dlbench.analysis.comparability import averaged_id
from dlbench.analysis.measures import RunMeasures, RunSteps, load_steps, measure
from dlbench.analysis.repeats import allocations_of
from dlbench.analysis.telemetry.readings import MachineReading, Samples, read_machines
from dlbench.errors import IncompleteDataError
from dlbench.lazy import Array, Times, np
from dlbench.records.registry import describe
from dlbench.records.rows.damage import damaged_traces
from dlbench.records.scan import LaunchedRun, R, Run, Scan
from dlbench.stats.pairing import KnownKey, RunKey

QUANTILES = 101  # Quantiles kept of a run's step times: 0 %, 1 %, ..., 100 %.
MAX_MAP_ROWS = 64
MAX_MAP_COLUMNS = 100
MAX_OUTLIERS = 20
FENCE = 3.0  # Interquartile ranges above the third quartile (Tukey 1977, Exploratory Data Analysis: "far out").
MIN_CORRELATED = 10  # Fewest steps with an autocorrelation.
MAX_PROCESSES = 6  # Maximum processes: each holds the steps of a run, a fifth of a gigabyte for a million of them.
WORTH_A_PROCESS = 32 << 20
"""Bytes of step files, plus `FILE_BYTES` for each, that take longer to read than a process takes to start."""

FILE_BYTES = 16 << 10  # Bytes that are read in the time of opening a step file and reading its header.
_MEASURES = ("steps", "samples", "measured_s", "throughput", "step_median_s", "step_p95_s", "step_cv")  # In this order.
FigureRow = dict[str, Any]  # By name of column.
PointKey = tuple[str, int, int]  # Group, ranks, nodes.


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

    A cell is the largest mean of any of its ranks over its steps, so that one slow rank among many is visible. The last
    row and the last column may have fewer ranks or steps. The median counts as at least a nanosecond.
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
    hosts = [rank.host for rank in sorted(run.record.ranks, key=attrgetter("rank"))]
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
    largest_means = []
    widths = np.diff([*columns, steps])
    for begin, end in zip(rows, [*rows[1:], ranks], strict=True):
        names = list(dict.fromkeys(hosts[begin:end]))
        row_hosts.append(" to ".join(dict.fromkeys((names[0], names[-1]))))
        # Sums of integers are not rounded before the mean.
        sums_ns = np.add.reduceat(own_work_ns[begin:end], columns, axis=1, dtype=np.int64)
        largest_means.append((sums_ns / widths).max(axis=0))
    cells = np.array(largest_means) / max(1.0, float(np.median(own_work_ns, overwrite_input=True)))
    return RankStepMap(
        rank_starts=tuple(rows),
        num_ranks=ranks,
        step_starts=tuple(int(numbers[column]) for column in columns),
        last_step=int(numbers[-1]),
        cells=tuple(tuple(row) for row in cells.tolist()),
        row_hosts=tuple(row_hosts),
    )


@dataclass(frozen=True, kw_only=True)
class WithoutFigures(Generic[R]):
    """A run without figures, and the reason."""

    run: R
    state: str
    """A run's state, `damaged` (also a copy), or `empty` (a run of the collective benchmark without any figure)."""
    why: str


def copy_problem(run: LaunchedRun, first: LaunchedRun) -> str:
    """Returns the reason why a copy of a run has no figures."""
    return f"{run.folder.path}: run {run.plan.run_id} is also in {first.folder.path}; the copy is left out"


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """All runs of a scan."""

    figures: dict[str, FigureRow]  # Figures by run id, in the order of the scan; see `tabulate`.
    parts: dict[str, dict[str, float]]  # Seconds per step of `PARTS` and both exchange waits, by run id.
    runs: dict[str, Run]  # Runs with figures, by run id.
    without: tuple[WithoutFigures[Run], ...]
    damaged: tuple[str, ...]  # Damaged files, a line each; only with damaged spans or samples a run has figures.
    causes: dict[str, Causes] = field(default_factory=dict)  # Causes by run id; empty unless requested.
    digests: dict[str, StepDigest] = field(default_factory=dict)  # Digests by run id; empty unless requested.
    samples: Samples = "some"  # How many samples of its runs may be read.

    @cached_property
    def points(self) -> dict[PointKey, list[Run]]:
        """The runs of every scaling point, those with median throughput first; points with most ranks first."""
        runs: dict[PointKey, list[Run]] = {}
        for run_id, row in self.figures.items():
            runs.setdefault((row["group"], row["ranks"], row["nodes"]), []).append(self.runs[run_id])
        keys = sorted(runs, key=lambda key: (-key[1], -key[2], key[0]))
        return {key: _from_the_middle(runs[key], self.rates) for key in keys}

    @cached_property
    def readings(self) -> dict[str, MachineReading]:
        """The samples of the nodes of runs with figures that were read, by run id; read once, at the first use."""
        return read_machines(self.points.values(), self.samples)

    @cached_property
    def sessions(self) -> dict[str, str]:
        """The session of each run with figures, by run id; see `allocations_of`."""
        return allocations_of(self.runs.values())

    @cached_property
    def rates(self) -> dict[str, float]:
        return {run_id: row["throughput"] for run_id, row in self.figures.items()}

    @cached_property
    def keys(self) -> dict[str, RunKey]:
        """The block and repeat of the runs with figures, with their sessions, by run id."""
        return {
            run_id: KnownKey.of(row["block"], row["repeat"], self.sessions[run_id])
            for run_id, row in self.figures.items()
        }

    def rates_of(self, run_ids: Iterable[str]) -> dict[RunKey, float]:
        """Returns the throughput of runs with figures in samples/s, by their keys."""
        return {self.keys[run_id]: float(self.rates[run_id]) for run_id in run_ids}

    def repeat_key(self, run: Run) -> RunKey:
        """Returns the repeat of a run with figures, which pairs it with runs of its series, and its session."""
        return KnownKey.of("", run.plan.series.repeat, self.sessions[run.plan.run_id])


def _from_the_middle(runs: Sequence[Run], rates: Mapping[str, float]) -> list[Run]:
    by_rate = sorted(runs, key=lambda run: (rates[run.plan.run_id], run.plan.run_id))
    middle = (len(runs) - 1) // 2
    order = sorted(range(len(runs)), key=lambda number: (abs(number - middle), number))
    return [by_rate[number] for number in order]


def without_resumed(table: RunTable) -> RunTable:
    """Returns a table without resumed runs, which are no repeats of uninterrupted ones."""
    reason = "resumed after an interruption, so not a repeat of uninterrupted runs"
    resumed = [run for run in table.runs.values() if run.record is not None and run.record.goes_on]
    if not resumed:
        return table
    left_out = tuple(WithoutFigures(run=run, state=run.state, why=reason) for run in resumed)
    uninterrupted = {run_id: run for run_id, run in table.runs.items() if run not in resumed}
    return replace(table, runs=uninterrupted, without=(*table.without, *left_out))


def tabulate(
    scan: Scan, *, with_causes: bool = False, with_digests: bool = False, samples: Samples = "some"
) -> RunTable:
    """Returns the figures of every valid run, with the causes and the digest of its steps if requested.

    Columns of `figures`: every name of the registry (text; `ranks` and `nodes` are integers), then `run_id`, `group`
    (equal for comparable runs), `series`, `repeat`, `block` (series and swept values: runs of one block and repeat ran
    interleaved), `position`, `side`, `finished` (UTC), `batch` (samples per rank), `sample_unit`, `steps`, `samples`,
    `measured_s`, `throughput` (samples/s), `step_median_s`, `step_p95_s`, `step_cv` (1), `warnings` (their number).

    Damaged runs are listed, not raised, so that one bad file does not hide the others. Raises RunError: a process that
    read runs was killed.
    """
    valid = [run for run in scan.runs if run.state == "valid"]
    loaded = iter(load_runs(valid, with_causes=with_causes, with_digests=with_digests))
    loaded_by_run: dict[str, LoadedRun] = {}
    runs: dict[str, Run] = {}
    without: list[WithoutFigures[Run]] = []
    damaged = list(scan.problems)
    for run in scan.runs:
        if run.state != "valid":
            without.append(WithoutFigures(run=run, state=run.state, why=run.detail))
            continue
        result = next(loaded)
        first = runs.get(run.plan.run_id)
        if first is None and isinstance(result, LoadedRun):
            runs[run.plan.run_id] = run
            loaded_by_run[run.plan.run_id] = result
            damaged += result.damaged
            continue
        reason = str(result) if first is None else copy_problem(run, first)
        damaged.append(reason)
        without.append(WithoutFigures(run=run, state="damaged", why=reason))
    return RunTable(
        figures={run_id: loaded_run.row for run_id, loaded_run in loaded_by_run.items()},
        parts={run_id: loaded_run.parts for run_id, loaded_run in loaded_by_run.items()},
        runs=runs,
        without=tuple(without),
        damaged=tuple(damaged),
        causes={
            run_id: loaded_run.causes for run_id, loaded_run in loaded_by_run.items() if loaded_run.causes is not None
        },
        digests={
            run_id: loaded_run.digest for run_id, loaded_run in loaded_by_run.items() if loaded_run.digest is not None
        },
        samples=samples,
    )


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """The figures of one run."""

    row: FigureRow  # Its row of `RunTable.figures`.
    parts: dict[str, float]  # Seconds per step of each of `measures.PARTS`, `exchange_wait`, `exchange_wait_first`.
    causes: Causes | None  # None unless requested.
    digest: StepDigest | None  # None unless requested.
    damaged: tuple[str, ...] = ()  # Damaged spans and samples, one line each, which do not affect the figures.


def load_run(run: Run, *, with_causes: bool, with_digests: bool) -> LoadedRun | IncompleteDataError:
    """Reads the step files of a run; returns the error if they are damaged. Raises ValueError: it is not valid."""
    try:
        steps = load_steps(run)
        measures = measure(run, steps)
        return LoadedRun(
            row=_row(run, measures),
            parts={
                **measures.parts,
                "exchange_wait": measures.exchange_wait_s,
                "exchange_wait_first": measures.exchange_wait_first_s,
            },
            causes=causes_of(run, steps) if with_causes else None,
            digest=digest_of(run, steps) if with_digests else None,
            damaged=damaged_traces(run.folder.path, run.plan.run_id, every_block=False),
        )
    except IncompleteDataError as error:
        return error


def _row(run: Run, measures: RunMeasures) -> FigureRow:
    assert run.record is not None
    plan = run.plan
    axes = (f"{key}={value}" for key, value in sorted(plan.series.axes.items()))
    return {
        **describe(run),
        "ranks": plan.layout.ranks,
        "nodes": plan.layout.nodes,
        "run_id": plan.run_id,
        "group": averaged_id(run),
        "series": plan.series.id,
        "repeat": plan.series.repeat,
        "block": " ".join([plan.series.id, plan.created, *axes]),
        "side": plan.series.side,
        "position": plan.series.position,
        "finished": run.record.finished,
        "batch": plan.workload.train.batch_per_rank,
        "sample_unit": plan.workload.sample_unit,
        **{name: getattr(measures, name) for name in _MEASURES},
        "warnings": len(run.record.warnings),
    }


def load_runs(
    runs: Sequence[Run], *, with_causes: bool = False, with_digests: bool = False, processes: int | None = None
) -> list[LoadedRun | IncompleteDataError]:
    """Returns the figures or the error of each run, in order; `processes`: None for as many as save time.

    Raises RunError: a process was killed; or RuntimeError: a defect, with its traceback.
    """
    weights = [_weight(run) for run in runs]
    if processes is None:
        cores = len(os.sched_getaffinity(0))
        processes = min(cores, MAX_PROCESSES, sum(weights) // WORTH_A_PROCESS)
    # The largest first, so that none of them is read alone at the end.
    order = sorted(range(len(runs)), key=weights.__getitem__, reverse=True)
    items = [runs[number] for number in order]
    work = partial(load_run, with_causes=with_causes, with_digests=with_digests)
    with pool.run(work, items, processes, name=lambda run: str(run.folder.path), verb="read", helps=True) as results:
        result_by_index = {order[place]: result for place, result in results}
    return [result_by_index[number] for number in range(len(runs))]


def _weight(run: Run) -> int:
    """Returns the bytes of a run's step files, estimated from the first, plus `FILE_BYTES` for each."""
    layout = run.plan.layout
    try:
        size = run.folder.node_steps(0).stat().st_size // layout.ranks_per_node
    except (OSError, IncompleteDataError):
        size = 0
    return layout.ranks * (size + FILE_BYTES)
