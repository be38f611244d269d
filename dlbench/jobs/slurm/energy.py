"""What Slurm's accounting says a job's nodes consumed: one call of sacct for all jobs.

Slurm counts whole nodes by the plugin of `AcctGatherEnergyType` (RAPL, IPMI, XCC, pm_counters), from the start of the
job to its end; that is the job's own energy only where it has its nodes to itself (sacct(1), ConsumedEnergy).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlbench.errors import IncompleteDataError
from dlbench.jobs.slurm.call import call
from dlbench.jobs.submission import read_submission
from dlbench.records.scan import LaunchedRun

# sacct shortens ConsumedEnergy in steps of 1,000.
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
# What Slurm keeps for "no value" in 64 bits, printed by some versions, is near 2^64.
_NO_VALUE = 2.0**63


@dataclass(frozen=True, kw_only=True)
class ConsumedEnergy:
    """One job's energy."""

    joules: float | None
    """None where Slurm does not tell."""
    why: str = ""
    """Why there is none; empty where there is one."""


def consumed_energy(job_ids: Sequence[str]) -> dict[str, ConsumedEnergy]:
    """The energy of each job, by job id.

    A job's own line counts; where it is empty, the largest of its steps, because steps of one job (`.batch`, `.extern`,
    `.0`) count the same nodes. Nought means that no plugin counts: it is told as unknown.
    """
    jobs = list(dict.fromkeys(job_ids))
    if not jobs:
        return {}
    if shutil.which("sacct") is None:
        return _unknown(jobs, "sacct is not on PATH")
    command = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--format=JobID,ConsumedEnergyRaw,ConsumedEnergy",
        f"--jobs={','.join(jobs)}",
    ]
    try:
        done = call(command)
    except subprocess.TimeoutExpired as late:
        return _unknown(jobs, f"sacct gave no answer within {late.timeout:g} s")
    except OSError as error:
        return _unknown(jobs, f"sacct cannot be started: {error.strerror or error}")
    if done.returncode != 0:
        why = " ".join(done.stderr.split())[:200] or f"it ended with {done.returncode}"
        return _unknown(jobs, f"sacct refused: {why}")
    return {job: _of_job(job, done.stdout) for job in jobs}


def job_energies(runs: Iterable[LaunchedRun]) -> tuple[dict[str, float], dict[str, str]]:
    """Joules of the job of each run that was submitted, by run id, and why there are none, by run id.

    A job of several runs has one counter for all of them, of which no run's share can be told.
    """
    jobs: dict[str, str] = {}
    why: dict[str, str] = {}
    for run in runs:
        try:
            submission = read_submission(run.folder)
        except IncompleteDataError as error:
            why[run.plan.run_id] = str(error)
            continue
        if submission is not None and submission.runs:
            why[run.plan.run_id] = f"job {submission.job_id} holds {len(submission.runs)} runs, counted together"
        elif submission is not None:
            jobs[run.plan.run_id] = submission.job_id
    told = consumed_energy(list(jobs.values()))
    joules: dict[str, float] = {}
    for run_id, job in jobs.items():
        found = told[job]
        if found.joules is None:
            why[run_id] = found.why
        else:
            joules[run_id] = found.joules
    return joules, why


def _unknown(jobs: Sequence[str], why: str) -> dict[str, ConsumedEnergy]:
    return {job: ConsumedEnergy(joules=None, why=why) for job in jobs}


def _of_job(job: str, output: str) -> ConsumedEnergy:
    rows = [line.strip().split("|") for line in output.splitlines() if line.count("|") == 2]
    own = [_joules(row[1]) or _joules(row[2]) for row in rows if row[0] == job]
    steps = [_joules(row[1]) or _joules(row[2]) for row in rows if row[0].startswith(f"{job}.")]
    if not own and not steps:
        return ConsumedEnergy(joules=None, why=f"Slurm's accounting no longer knows job {job}")
    best = max((value for value in own if value), default=None) or max(
        (value for value in steps if value), default=None
    )
    if best is None:
        return ConsumedEnergy(
            joules=None,
            why=f"Slurm counted no energy for job {job}: AcctGatherEnergyType is not set, or cannot read it",
        )
    return ConsumedEnergy(joules=best)


def _joules(text: str) -> float | None:
    """`1234567` or `1.23M` as joules; None for nothing, nought, and what Slurm prints for no value."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text.strip())
    if match is None:
        return None
    value = float(match[1]) * _PREFIXES[match[2]]
    return value if 0 < value < _NO_VALUE else None
