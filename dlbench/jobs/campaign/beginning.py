"""A series is written down before anything of it is submitted."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlbench.errors import RunError, UserError, refused
from dlbench.jobs.campaign.file import (
    FOLDER,
    SeriesFile,
    SeriesJob,
    append,
    held,
    owner_of_other,
    read_series,
    series_path,
    write_series,
)
from dlbench.jobs.campaign.packing import Packing
from dlbench.jobs.scripts.job import Job
from dlbench.sharing import make_shared, user_name
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import RunPlan
from dlbench.units import utc_now

OTHER_NAME = "choose another --series, runs are never overwritten"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a person allows a series."""

    pack: Packing = "points"
    max_jobs: int | None = None
    max_node_hours: float | None = None


_NO_LIMITS = Limits()


def begin(
    root: Path, jobs: Sequence[Job], *, chain: bool, python: str, request: str, limits: Limits = _NO_LIMITS
) -> str:
    """Writes down what a series shall hold, before anything is submitted; returns its name.

    A series of this user that is there already gets more jobs.

    Args:
        root: folder of all runs, absolute.
        jobs: the plans, in the order of submission.
        chain: as in `SeriesFile`.
        python: as in `SeriesFile`.
        request: the command that asks for them.
        limits: as in `SeriesFile`.

    Raises:
        UserError: a run of that name exists, the series is another user's, or another process submits it.
        RunError: the files cannot be written.
    """
    series_id = _series_of(jobs[0])
    if owner := owner_of_other(root, series_id):
        raise UserError(f"{root}: series {series_id} is of user {owner}; choose another --series")
    for run_id in (run_id for job in jobs for run_id in job.run_ids):
        if (root / run_id).exists():
            raise UserError(f"{root / run_id}: exists already; {OTHER_NAME}")
    try:
        make_shared(root, root / FOLDER)
    except OSError as error:
        raise refused(error, f"{root / FOLDER}: cannot be made: {error.strerror or error}") from None
    with held(root, series_id):
        before = read_series(root, series_id) if series_path(root, series_id, "json").exists() else None
        if before is not None:
            _refuse_twice(before, jobs)
        lines = "".join(plan.model_dump_json() + "\n" for job in jobs for plan in job.plans)
        series = SeriesFile(
            id=series_id,
            owner=user_name(),
            created=before.created if before else utc_now(),
            requests=(*(before.requests if before else ()), request),
            scheduler=jobs[0].shape.system.scheduler,
            pack=limits.pack,
            chain=chain,
            max_jobs=limits.max_jobs,
            max_node_hours=limits.max_node_hours,
            python=python,
            jobs=(*(before.jobs if before else ()), *map(entry_of, jobs)),
        )
        try:
            append(series_path(root, series_id, "plans"), lines)
            write_series(root, series)
        except RunError:
            if before is None:
                forget(root, series_id)
            raise
    return series_id


def entry_of(job: Job) -> SeriesJob:
    """A job as a series lists it, with a mark of its own."""
    return SeriesJob(
        runs=job.run_ids,
        time_limit=job.time_limit,
        array_limit=job.array_limit,
        comment=f"{job.run_ids[0]}/{secrets.token_hex(4)}",
    )


def _series_of(job: Job) -> str:
    plan = job.plans[0]
    assert isinstance(plan, RunPlan | CommPlan)
    return plan.series.id


def _refuse_twice(before: SeriesFile, jobs: Sequence[Job]) -> None:
    """Raises UserError: the series is to have one of these runs already."""
    there = {run_id for job in before.jobs for run_id in job.runs}
    for run_id in (run_id for job in jobs for run_id in job.run_ids if run_id in there):
        raise UserError(
            f"{run_id}: is in series {before.id} already: `dlbench submit --resume {before.id}` goes on with it; or "
            f"{OTHER_NAME}"
        )


def forget(root: Path, series_id: str) -> None:
    """Removes the files of a series of which no job was taken."""
    for suffix in ("json", "plans", "jobs"):
        with suppress(OSError):
            series_path(root, series_id, suffix).unlink(missing_ok=True)
    with suppress(OSError):  # other series
        (root / FOLDER).rmdir()
