"""What Slurm's accounting says of runs: queue wait, node-hours, memory, energy. One call of sacct for a cluster's jobs.

Where there is no accounting, squeue still knows a job's times for some minutes after its end (slurm.conf(5),
MinJobAge). What was told once is kept beside the run, in `accounting.json`.

Slurm counts the energy of whole nodes by the plugin of `AcctGatherEnergyType` (RAPL, IPMI, XCC, pm_counters); that is
the job's own only where it has its nodes to itself (sacct(1), ConsumedEnergy).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal, TypeVar

from dlbench.errors import IncompleteDataError, RunError
from dlbench.jobs.scripts.images import STEP as IMAGE_STEP
from dlbench.jobs.slurm.environment import call
from dlbench.jobs.slurm.queue import MAX_IDS, elements_of
from dlbench.jobs.submission import Submission, read_submission
from dlbench.records.job.accounting import Attempt, RunAccounting, Step, write_accounting
from dlbench.records.scan import LaunchedRun
from dlbench.units import utc_now

RunT = TypeVar("RunT", bound=LaunchedRun)

# Slurm shortens numbers in steps of 1,024 (memory) or 1,000 (energy).
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_NO_VALUE = 2.0**63
"""What Slurm keeps for "no value" in 64 bits, printed by some versions, is near 2^64."""
_SKEW_S = 300
"""A job id is given again after MaxJobId: a job that ended so long before the run was submitted is another one. Clocks
of the login node and of slurmctld may differ."""

_FIELDS = (
    "JobID,State,ExitCode,Eligible,Start,End,NNodes,NodeList,TimelimitRaw,Partition,Account,QOS,MaxRSS,"
    "ConsumedEnergyRaw,ConsumedEnergy,JobName"
)
_QUEUE_FIELDS = {
    "JobID": "JobArrayID",
    "State": "State",
    "Eligible": "EligibleTime",
    "Start": "StartTime",
    "End": "EndTime",
    "NNodes": "NumNodes",
    "Timelimit": "TimeLimit",
    "Partition": "Partition",
    "Account": "Account",
    "QOS": "QOS",
    "NodeList": "NodeList",
}
"""What sacct calls so, and what squeue does."""
_WIDTH = 2000
"""Of a column of squeue, which cuts what is longer: lists of nodes."""
_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REQUEUED", "REVOKED", "TIMEOUT"}
)
_NOT_ENDED = "has not ended"
SETTLING_S = (0.0, 2.0, 5.0, 10.0)
"""Pauses before Slurm is asked for jobs that have written their last record, seconds."""

_MAY_COME_BACK = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"})
"""Of a job that is started again, sacct knows for some seconds no more than that it ended so."""
_COMES_BACK_S = 120
"""How long such an end is not believed; slurmctld tells slurmdbd of jobs that wait every 5 s."""
_NO_ENERGY = "Slurm counted no energy: AcctGatherEnergyType is not set, or cannot read it"

_PART_OF_ENERGY = "Slurm counted the energy of a part of the job's attempts or steps only"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What Slurm says of some runs."""

    accounting: dict[str, RunAccounting] = field(default_factory=dict)
    """By run id."""
    why_not: dict[str, str] = field(default_factory=dict)
    """Of runs that were submitted, why there is nothing, by run id."""


def accounting_of(runs: Iterable[LaunchedRun]) -> Told:
    """What Slurm says of the jobs of runs that were submitted, and have ended; what is kept is not asked again."""
    kept: dict[str, RunAccounting] = {}
    jobs: dict[str, Submission] = {}
    why: dict[str, str] = {}
    for run in runs:
        if run.accounting is not None:
            kept[run.plan.run_id] = run.accounting
            continue
        try:
            submission = read_submission(run.folder)
        except IncompleteDataError as error:
            why[run.plan.run_id] = str(error)
            continue
        if submission is not None:
            jobs[run.plan.run_id] = submission
    by_cluster: dict[str, list[str]] = {}
    for submission in jobs.values():
        # Of an array all: elements that never started have no row of their own.
        by_cluster.setdefault(submission.cluster, []).append(submission.job_id.partition("_")[0])
    answers = {cluster: _ask_all(list(dict.fromkeys(ids)), cluster) for cluster, ids in by_cluster.items()}
    for run_id, submission in jobs.items():
        found = _of_run(run_id, submission, answers[submission.cluster])
        if isinstance(found, str):
            why[run_id] = found
        else:
            kept[run_id] = found
    return Told(accounting=kept, why_not=why)


def with_accounting(runs: Sequence[RunT]) -> tuple[list[RunT], dict[str, str]]:
    """The runs with what Slurm says of them, which is kept in their folders; and why there is nothing, by run id."""
    told = accounting_of(runs)
    found = []
    for run in runs:
        new = told.accounting.get(run.plan.run_id)
        if run.accounting is None and new is not None:
            with suppress(RunError):  # somebody else's runs, or a full disk: it is asked again
                write_accounting(run.folder, new)
            run = replace(run, accounting=new)
        found.append(run)
    return found, told.why_not


def settled_accounting(runs: Sequence[RunT], pause: Callable[[float], None]) -> dict[str, str]:
    """Keeps what Slurm says of runs whose jobs are ending; returns why there is nothing, by run id.

    slurmctld tells accounting of an end with a delay: for some seconds it is asked again.

    Args:
        runs: of one series, say.
        pause: waits so many seconds.
    """
    for wait_s in SETTLING_S:
        if wait_s:
            pause(wait_s)
        runs, why_not = with_accounting(runs)
        if not any(why.endswith(_NOT_ENDED) for why in why_not.values()):
            break
    return why_not


def job_energies(runs: Iterable[LaunchedRun]) -> tuple[dict[str, float], dict[str, str]]:
    """Joules of the last attempt at each run that was submitted, by run id, and why there are none, by run id.

    What a rank or a sampler counted is of that attempt.
    """
    told = accounting_of(runs)
    joules: dict[str, float] = {}
    why = dict(told.why_not)
    for run_id, one in told.accounting.items():
        is_alone = len(one.attempts) == 1
        energy = one.energy_j if is_alone else one.steps[-1].energy_j if one.steps else None
        if energy is not None:
            joules[run_id] = energy
        elif one.energy_j is not None:
            why[run_id] = f"Slurm counted the {len(one.attempts)} attempts of job {one.job_id} together"
        else:
            why[run_id] = one.not_measured.get("energy_j", _NO_ENERGY)
    return joules, why


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Rows of sacct or squeue, by job id: of the job, and of its steps."""

    source: Literal["sacct", "squeue"] = "sacct"
    rows: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)
    why_not: str = ""
    """Why sacct did not say; empty where it did."""


def _ask_all(jobs: Sequence[str], cluster: str) -> _Answer:
    """One call, where an argument can hold all ids."""
    size = MAX_IDS // (1 + max(map(len, jobs)))
    parts = [_ask(jobs[start : start + size], cluster) for start in range(0, len(jobs), size)]
    rows = {job: lines for part in parts for job, lines in part.rows.items()}
    return replace(next((part for part in parts if part.why_not), parts[0]), rows=rows)


def _ask(jobs: Sequence[str], cluster: str) -> _Answer:
    where = [f"--clusters={cluster}"] if cluster else []
    sacct = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--format={_FIELDS}", f"--jobs={','.join(jobs)}"]
    lines, why = _lines([*sacct, *where])
    if not why:
        return _Answer(rows=_by_job(lines, _FIELDS.split(",")))
    columns = ",".join(f"{name}:{_WIDTH}|" for name in _QUEUE_FIELDS.values())
    queue = ["squeue", "--noheader", "--array", "--states=all", f"--Format={columns}", f"--jobs={','.join(jobs)}"]
    lines, _ = _lines([*queue, *where])
    return _Answer(source="squeue", rows=_by_job(lines, list(_QUEUE_FIELDS)), why_not=why)


def _lines(command: list[str]) -> tuple[list[str], str]:
    """What a program of Slurm says, and why it says nothing."""
    name = command[0]
    if shutil.which(name) is None:
        return [], f"{name} is not on PATH"
    try:
        # Times as seconds since 1970, whatever time zone and format the user has chosen.
        done = call(["env", "SLURM_TIME_FORMAT=%s", *command])
    except subprocess.TimeoutExpired as late:
        return [], f"{name} gave no answer within {late.timeout:g} s"
    except OSError as error:
        return [], f"{name} cannot be started: {error.strerror or error}"
    if done.returncode != 0:
        return [], f"{name} refused: {' '.join(done.stderr.split())[:200] or f'it ended with {done.returncode}'}"
    if "accounting storage is disabled" in done.stderr.lower():
        return [], f"{name}: {' '.join(done.stderr.split())[:200]}"
    return done.stdout.splitlines(), ""


def _by_job(lines: Iterable[str], names: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        # The last is a name, which may hold anything.
        cells = line.rstrip().removesuffix("|").split("|", len(names) - 1)
        if len(cells) == len(names):
            row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
            job = row["JobID"].partition(".")[0]
            for one in elements_of(job):
                found.setdefault(one, []).append({**row, "JobID": row["JobID"].replace(job, one, 1)})
    return found


def _of_run(run_id: str, submission: Submission, answer: _Answer) -> RunAccounting | str:
    """What is known of a run, or why nothing is."""
    begin = _since_1970(submission.submitted) - _SKEW_S
    rows = [row for row in answer.rows.get(submission.job_id, []) if (_seconds(row["End"]) or begin) >= begin]
    own = [row for row in rows if row["JobID"] == submission.job_id]
    if not own:
        gone = f"Slurm no longer knows job {submission.job_id}"
        return f"no accounting ({answer.why_not}), and {gone}" if answer.why_not else gone
    # sacct writes "CANCELLED by 1000".
    last = _word(own[-1])
    if last == "REQUEUED" or any(_word(row) not in _ENDED for row in rows):
        return f"job {submission.job_id} {_NOT_ENDED}"
    if last in _MAY_COME_BACK and time.time() - (_seconds(own[-1]["End"]) or 0.0) < _COMES_BACK_S:
        return f"job {submission.job_id} was ended just now ({last}), and may be started again"
    job_runs = submission.runs or (run_id,)
    numbered = [row for row in rows if re.fullmatch(r"\d+", row["JobID"].partition(".")[2])]
    # A step is called like its run. Those of mpirun are not: in a job of one run they are its own.
    mine = [row for row in numbered if row["JobName"] == run_id]
    if not mine and len(job_runs) == 1:
        mine = [row for row in numbered if row["JobName"] != IMAGE_STEP]
    accounting = RunAccounting(
        run_id=run_id,
        source=answer.source,
        asked=utc_now(),
        job_id=submission.job_id,
        job_runs=job_runs,
        attempts=tuple(_attempt(row) for row in own),
        steps=tuple(_step(row) for row in mine),
        job_energy_j=_job_energy(own, rows),
        not_measured={},
    )
    no_energy = _PART_OF_ENERGY if any(_energy(row) is not None for row in rows) else _NO_ENERGY
    return accounting.model_copy(update={"not_measured": _not_measured(accounting, answer, no_energy)})


def _job_energy(own: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, str]]) -> float | None:
    """Joules of all attempts of a job; None where that of one is missing.

    Args:
        own: rows of the job itself, one an attempt.
        rows: these, and those of its steps.
    """
    ran = [row for row in own if _started(row) is not None and _started(row) != _seconds(row["End"])]
    told = [joules for row in ran if (joules := _energy(row)) is not None]
    if told:
        return sum(told) if len(told) == len(ran) else None
    # Steps of one job count the same nodes.
    most = max((joules for row in rows if (joules := _energy(row)) is not None), default=None)
    return most if len(ran) == 1 else None


def _not_measured(accounting: RunAccounting, answer: _Answer, no_energy: str) -> dict[str, str]:
    """Why a figure is not there, by its name."""
    if accounting.never_started:
        no_start = f"job {accounting.job_id} ended before it was started"
        return dict.fromkeys(("waited_s", "max_rss_bytes", "energy_j"), no_start)
    no_steps = (
        f"no accounting: {answer.why_not}" if answer.why_not else f"job {accounting.job_id} has no srun step of it"
    )
    reasons = {
        "waited_s": "Slurm does not tell when the job could have started",
        "run_s": no_steps,
        "max_rss_bytes": no_steps if not accounting.steps else "Slurm gathers none (JobAcctGatherType)",
        "energy_j": no_steps if answer.why_not else no_energy,
    }
    return {name: why for name, why in reasons.items() if getattr(accounting, name) is None}


def _attempt(row: Mapping[str, str]) -> Attempt:
    started, ended = _started(row), _seconds(row["End"])
    limit = row.get("TimelimitRaw", "")  # minutes
    return Attempt(
        state=_word(row),
        exit_code=row.get("ExitCode") or None,
        eligible=_seconds(row["Eligible"]),
        started=started,
        ended=ended if ended is not None else started or 0.0,
        nodes=_count(row["NNodes"]),
        node_list=_nodes(row),
        time_limit_s=60.0 * int(limit) if limit.isdigit() and int(limit) else _limit(row.get("Timelimit", "")),
        partition=row["Partition"],
        account=row["Account"],
        qos=row["QOS"],
    )


def _step(row: Mapping[str, str]) -> Step:
    started, ended = _seconds(row["Start"]) or 0.0, _seconds(row["End"]) or 0.0
    return Step(
        id=row["JobID"],
        state=_word(row),
        exit_code=row["ExitCode"],
        started=started,
        elapsed_s=max(0.0, ended - started),
        nodes=_count(row["NNodes"]),
        node_list=row["NodeList"],
        max_rss_bytes=_amount(row["MaxRSS"], 1024.0),
        energy_j=_energy(row),
    )


def _started(row: Mapping[str, str]) -> float | None:
    """When the job was given nodes; of one that was cancelled before, squeue says its end."""
    return _seconds(row["Start"]) if _nodes(row) else None


def _nodes(row: Mapping[str, str]) -> str:
    return "" if row["NodeList"] in ("None assigned", "(null)") else row["NodeList"]


def _word(row: Mapping[str, str]) -> str:
    return (row["State"].split() or [""])[0]


def _energy(row: Mapping[str, str]) -> float | None:
    if "ConsumedEnergy" not in row:
        return None
    return _amount(row["ConsumedEnergyRaw"], 1000.0) or _amount(row["ConsumedEnergy"], 1000.0)


def _amount(text: str, step: float) -> float | None:
    """`1234567` or `1.23M`; None for nothing, nought, and what Slurm prints for no value."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    if match is None:
        return None
    value = float(match[1]) * step ** _PREFIXES[match[2]]
    return value if 0 < value < _NO_VALUE else None


def _count(text: str) -> int:
    """`12`; Slurm writes 1024 as `1K`."""
    return int(_amount(text, 1024.0) or 0)


def _seconds(text: str) -> float | None:
    """Seconds since 1970, or None for `Unknown`, `None` and `N/A`."""
    return float(text) if re.fullmatch(r"\d{1,12}", text) and int(text) else None


def _limit(text: str) -> float | None:
    """Seconds of `[DAYS-]HOURS:MINUTES:SECONDS` or `MINUTES:SECONDS`; None for UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds) or None


def _since_1970(utc: str) -> float:
    return datetime.fromisoformat(utc).timestamp()
