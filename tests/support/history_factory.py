"""Histories of runs with known times, brought in by the real importer."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlbench.history.history import History
from dlbench.history.importing import Candidate, ImportOutcome, import_runs, open_history
from dlbench.records.scan import run_folders
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import NOW, Story, constant, plans, write_run


def import_folder(history: History, runs: Path) -> list[ImportOutcome]:
    folders = run_folders(runs)
    candidates = [Candidate(folder=folder, name=folder.path.name) for folder in folders]
    with history.store.room() as room:
        return list(import_runs(history, candidates, room))


def history_plan(number: int, days: float, tags: Mapping[str, str] | None = None, **request: Any) -> RunPlan:
    """The plan of one run that was made so many days after `NOW`."""
    made = plans(**{"points": (2,), "repeats": 1, "series": f"h{number:04d}", **request})[0]
    created = (NOW + timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return made.model_copy(update={"created": created, "tags": dict(tags or {})})


def write_history(
    store: Path,
    points: Sequence[tuple[float, float]],
    *,
    commit: Callable[[int], str] = lambda number: "",
    environment: Callable[[int], Mapping[str, str]] = lambda number: {},
    host: Callable[[int, int], str] = lambda number, rank: "n0",
    slow_rank: Callable[[int, int], float] = lambda number, rank: 1.0,
    **request: Any,
) -> History:
    """A history with one run a point, whose step takes 100 ms times a factor.

    Args:
        store: where it is made; more runs may be added to one that is there.
        points: days after `NOW` at which a run ended, and how many times as long its steps took.
        commit: tag `commit` of a run, by its number; empty for none.
        environment: what a run's rank 0 recorded beside the usual, by its number.
        host: host of a rank, by number of the run and rank.
        slow_rank: how many times as long a rank's own work takes, by number of the run and rank; who is done first
            waits in the exchange.
        request: the series, as for `tests.support.run_factory.plans`; two ranks on one node unless it says otherwise.
    """
    base = Story()
    history = open_history(store, create=True)
    with tempfile.TemporaryDirectory(prefix="dlbench-history-") as scratch:
        for number, (days, factor) in enumerate(points):
            word = commit(number)
            plan = history_plan(number, days, {"commit": word} if word else None, **request)
            own = [100 * factor * slow_rank(number, rank) for rank in range(plan.layout.ranks)]
            longest = max(own)
            # An array of phases for each rank: input, h2d, forward, backward, exchange, optimizer.
            times = {
                rank: constant([work * 0.05, 0, work * 0.3, work * 0.6, longest - work, work * 0.05])(rank, 0)
                for rank, work in enumerate(own)
            }
            write_run(
                Path(scratch),
                plan,
                lambda rank, step, times=times: times[rank],  # type: ignore[misc]
                dataclasses.replace(
                    base,
                    environment={**base.environment, **environment(number)},
                    host=lambda rank, number=number: host(number, rank),
                    finished=NOW + timedelta(days=days),
                ),
            )
        outcomes = import_folder(history, Path(scratch))
    assert [one for one in outcomes if one.verdict != "imported"] == []
    return history


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
