"""A scan of `runs/` becomes tables: figures of the runs that have any, and the story of those that have none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from dlbench.errors import IncompleteDataError
from dlbench.reading.causes import Causes
from dlbench.reading.digest import StepDigest
from dlbench.reading.loading import LoadedRun, Wanted, load_runs
from dlbench.reading.measures import PARTS
from dlbench.reading.sessions import allocations_of
from dlbench.records.scan import Run, Scan
from dlbench.stats.pairing import KnownKey, RunKey

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class WithoutFigures:
    """A run that yields no figure, and why."""

    run: Run
    state: str
    """invalid, failed, incomplete, or damaged (a valid record whose step files are not whole)."""
    why: str


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """All runs of a scan."""

    figures: pd.DataFrame
    """One row for each run with figures, in the order of the scan; columns see `tabulate`."""
    parts: pd.DataFrame
    """The same runs by `run_id`: seconds a step of each of `PARTS` (they sum to the step), `exchange_wait` and
    `exchange_wait_first`."""
    runs: dict[str, Run]
    """Runs with figures, by run id."""
    without: tuple[WithoutFigures, ...]
    damaged: tuple[str, ...]
    """Damaged files, one line each; their runs yield no figure, unless it is spans or samples that are damaged."""
    causes: dict[str, Causes] = field(default_factory=dict)
    """Of the runs with figures, by run id; empty unless they were asked for."""
    digests: dict[str, StepDigest] = field(default_factory=dict)
    """Of the runs with figures, by run id; empty unless they were asked for."""

    @cached_property
    def sessions(self) -> dict[str, str]:
        """What is one look at a machine, of the runs with figures, by run id."""
        return allocations_of(self.runs.values())

    @cached_property
    def keys(self) -> dict[str, RunKey]:
        """Block and repeat of the runs with figures, with their sessions, by run id."""
        if self.figures.empty:
            return {}
        rows = zip(self.figures["run_id"], self.figures["block"], self.figures["repeat"], strict=True)
        return {
            str(run_id): KnownKey.of(str(block), int(repeat), self.sessions[str(run_id)])
            for run_id, block, repeat in rows
        }


def without_resumed(table: RunTable) -> RunTable:
    """The same, where runs that went on after an interruption yield no figure: for repeats that must be alike."""
    why = "resumed after an interruption, so no repeat of runs that ran through"
    resumed = [run for run in table.runs.values() if run.record is not None and run.record.goes_on]
    left_out = tuple(WithoutFigures(run=run, state=run.state, why=why) for run in resumed)
    kept = {run_id: run for run_id, run in table.runs.items() if run not in resumed}
    return replace(table, runs=kept, without=(*table.without, *left_out)) if resumed else table


def tabulate(scan: Scan, *, with_causes: bool = False, with_digests: bool = False) -> RunTable:
    """Figures of every valid run, if `with_causes` the causes of its step, and if `with_digests` its steps in short.

    Columns of `figures`: every name of the registry (text; `ranks` and `nodes` are integers), then
    `run_id`, `group` (equal for comparable runs), `series`, `repeat`, `block` (series and swept
    values: runs of one block and repeat ran interleaved), `position`, `side`,
    `finished` (UTC), `batch`
    (samples per rank, integer), `sample_unit`, `steps`, `samples`, `measured_s`, `throughput`
    (samples/s), `step_median_s`, `step_p95_s`, `step_cv` (1), `warnings` (number of recorded ones).

    Damaged runs are not raised but listed, so that one bad file does not hide the rest. Where there is much to read,
    several processes read; the table is the same.

    Raises:
        RunError: one of these processes was killed.
    """
    import pandas as pd

    valid = [run for run in scan.runs if run.state == "valid"]
    loaded = iter(load_runs(valid, Wanted(causes=with_causes, digest=with_digests)))
    found: dict[str, LoadedRun] = {}
    runs: dict[str, Run] = {}
    without: list[WithoutFigures] = []
    damaged = list(scan.problems)
    for run in scan.runs:
        if run.state != "valid":
            without.append(WithoutFigures(run=run, state=run.state, why=run.story))
            continue
        one = next(loaded)
        copied = _copied(run, runs)
        if copied or isinstance(one, IncompleteDataError):
            why = copied or str(one)
            damaged.append(why)
            without.append(WithoutFigures(run=run, state="damaged", why=why))
            continue
        runs[run.plan.run_id] = run
        found[run.plan.run_id] = one
        damaged += one.damaged
    return RunTable(
        figures=pd.DataFrame([one.row for one in found.values()]),
        parts=pd.DataFrame.from_dict(
            {run_id: one.parts for run_id, one in found.items()},
            orient="index",
            columns=[*PARTS, "exchange_wait", "exchange_wait_first"],
        ),
        runs=runs,
        without=tuple(without),
        damaged=tuple(damaged),
        causes={run_id: one.causes for run_id, one in found.items() if one.causes is not None},
        digests={run_id: one.digest for run_id, one in found.items() if one.digest is not None},
    )


def _copied(run: Run, seen: dict[str, Run]) -> str:
    """Why a copied folder is not a second measurement; empty for one that is no copy."""
    if run.plan.run_id not in seen:
        return ""
    return (
        f"{run.folder.path}: holds run {run.plan.run_id} once more, like {seen[run.plan.run_id].folder.path}; "
        "a copy is no repeat and is left out"
    )
