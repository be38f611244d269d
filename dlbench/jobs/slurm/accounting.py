"""Asks squeue for current jobs, and sacct for ended ones and for what they used. Slurm counts the energy of whole nodes
with the plugin of `AcctGatherEnergyType`; that is the energy of the job only if it has its nodes exclusively (sacct(1),
ConsumedEnergy). Reasons of pending jobs are in `slurm/pending.yaml`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from dlbench import bundled
from dlbench.errors import IncompleteDataError, RunError
from dlbench.jobs.scheduler import Phase, Queue, QueuedJob, Submission, cluster_of, read_submission
from dlbench.jobs.slurm.environment import asked, on_cluster
from dlbench.records.accounting import Attempt, RunAccounting, Step
from dlbench.records.files import write_json
from dlbench.records.scan import LaunchedRun
from dlbench.specs.files import read_yaml
from dlbench.units import utc_now

_STUCK = "it will never start: cancel it, and submit with another request"

_GONE = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
FINAL = frozenset(_GONE | {"TIMEOUT"})  # Slurm's states of ended jobs.
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
_ELSEWHERE = "it runs on another cluster of the federation"
_FORMAT = "--format=%i|%T|%S|%r|%k|%Z"
_ELEMENTS = re.compile(r"(\d+)_\[([0-9,:-]+)(?:%\d+)?\]")
"""Pending elements of an array, which sacct and squeue list on one line."""

_NO_ACCOUNTING = "accounting storage is disabled"
MAX_IDS = 100_000  # Characters of ids in one argument: Linux allows 131,072 (MAX_ARG_STRLEN).

# Slurm shortens numbers in steps of 1,024 (memory) or 1,000 (energy).
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}

_NO_VALUE = 2.0**63  # Some versions print Slurm's 64-bit "no value", which is near 2^64.
_SKEW_S = 300
"""Slurm reuses job ids after MaxJobId. A job that ended this many seconds before the run was submitted is another job;
the margin allows for different clocks of the login node and slurmctld."""

_FIELDS = (
    "JobID,State,ExitCode,Eligible,Start,End,NNodes,NodeList,TimelimitRaw,Partition,Account,QOS,MaxRSS,"
    "ConsumedEnergyRaw,ConsumedEnergy,JobName"
)

_ENDED = FINAL | {"REQUEUED", "REVOKED"}
_NOT_ENDED = "has not ended"
SETTLING_S = (0.0, 2.0, 5.0, 10.0)  # Pauses before each query for jobs that have just written their record, seconds.

_MAY_RESTART = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"})
"""States that sacct may show for some seconds although the job is requeued."""

_RESTART_S = 120  # Seconds for which such a state is not trusted; slurmctld informs slurmdbd of pending jobs every 5 s.
_NO_ENERGY = "Slurm counted no energy: AcctGatherEnergyType is not set, or its plugin reads none"
_PART_OF_ENERGY = "Slurm counted the energy of only some of the job's attempts or steps"


@functools.cache
def _pending_reasons() -> list[tuple[str, dict[str, str]]]:
    """Returns the entries of `slurm/pending.yaml` with their kind: held, never or later."""
    tables = read_yaml(bundled.folder("slurm") / "pending.yaml")
    return [(kind, entry) for kind, entries in tables.items() for entry in entries]


def advice_on(reason: str, job_id: str) -> tuple[str, bool]:
    """Returns the meaning of a pending reason, empty for a normal wait, and whether the job can never start."""
    for kind, entry in _pending_reasons():
        if not re.fullmatch(entry["reasons"], reason):
            continue
        if kind != "never":
            return entry["advice"].format(id=job_id), False
        # A limit per user no longer holds when the user's other jobs end, unless this job alone exceeds it.
        if "PerUser" in reason and "Wall" not in reason:
            return "a limit per user: it starts when others end, or never if it alone exceeds the limit", False
        return f"{entry['advice'] or 'it exceeds a limit of its QOS or account'}; {_STUCK}", True
    return "", False


def ask(job_ids: Sequence[str], users: Sequence[str], clusters: Sequence[str] = ()) -> Queue:
    """Returns the jobs of this user and of the given users, and the given jobs from sacct if squeue lacks them. squeue
    is asked by user, because the controller looks up a list of ids one by one, and an argument has a maximum length.
    `--states=all` includes jobs that ended in the last minutes (MinJobAge). `job_ids`: with `;CLUSTER` where sbatch
    named one. `users`: names or numbers. `clusters`: asked in addition to those of the ids.
    """
    owners = ",".join(dict.fromkeys([str(os.getuid()), *users]))
    all_clusters = {*clusters, *map(cluster_of, job_ids)} or {""}
    queued = _queued_on(all_clusters, owners)
    missing: dict[str, list[str]] = {}
    for job_id in job_ids:
        if not queued.of(job_id):
            missing.setdefault(cluster_of(job_id), []).append(job_id)
    if not missing or shutil.which("sacct") is None:
        return queued
    ended: dict[str, QueuedJob] = {}
    problems: list[str] = []
    for cluster, missing_ids in missing.items():
        jobs, problem = _sacct(missing_ids, cluster, owners)
        ended |= jobs
        if problem:
            problems.append(problem)
    return Queue(jobs={**ended, **queued.jobs}, unanswered=queued.unanswered, no_history="; ".join(problems))


def _queued_on(clusters: set[str], owners: str) -> Queue:
    if shutil.which("squeue") is None:
        return Queue(unanswered="squeue is not on PATH")
    remote = ",".join(sorted(clusters - {""}))
    arguments = ["--noheader", "--array", "--states=all", f"--user={owners}"]
    answers = []
    if "" in clusters:
        answers.append(_squeue([*arguments, _FORMAT]))
    if remote:
        answers.append(_squeue([*arguments, f"--clusters={remote}", _FORMAT]))
    jobs: dict[str, QueuedJob] = {}
    for answer in answers:
        jobs |= answer.jobs
    return Queue(jobs=jobs, unanswered="; ".join(answer.unanswered for answer in answers if answer.unanswered))


def _squeue(arguments: Sequence[str]) -> Queue:
    done, problem = _run("squeue", arguments)
    if done is None:
        return Queue(unanswered=problem)
    jobs: dict[str, QueuedJob] = {}
    cluster = ""
    for line in done.stdout.splitlines():
        # With several clusters this line comes before the jobs of each.
        if line.startswith("CLUSTER: "):
            cluster = f";{line.removeprefix('CLUSTER: ').strip()}"
            continue
        job = _queued_job(line, cluster)
        if job is not None:
            jobs[job.job_id] = job
    return Queue(jobs=jobs, unanswered=problem)


def _queued_job(line: str, cluster_suffix: str) -> QueuedJob | None:
    """Parses a line of squeue in format `_FORMAT`; returns None for any other line."""
    if "|" not in line:
        return None
    cells = [cell.strip() for cell in line.split("|", 4)]
    bare_id, states, starts, reason, comment_and_folder = [*cells, "", "", "", "", ""][:5]
    if not bare_id or not states:
        return None
    # COMMENT|FOLDER: both may contain the separator, but a folder begins with a slash.
    comment, _, folder = comment_and_folder.rpartition("|")
    if "|/" in comment_and_folder:
        comment, _, folder = comment_and_folder.partition("|/")
        folder = f"/{folder}"
    if comment == "(null)":
        comment = ""
    state = states.split()[0]
    job = QueuedJob(
        job_id=f"{bare_id}{cluster_suffix}", state=state, phase=_phase(state), comment=comment, folder=folder
    )
    if job.phase == "waiting":
        advice, is_stuck = advice_on(reason, bare_id)
        job = replace(job, advice=advice, is_stuck=is_stuck)
        if reason not in ("None", "(null)"):
            job = replace(job, reason=reason)
        if starts not in ("N/A", "Unknown"):
            job = replace(job, starts=starts)
    if state == "REVOKED":
        job = replace(job, advice=_ELSEWHERE)
    return job


def _sacct(job_ids: Sequence[str], cluster: str, owners: str) -> tuple[dict[str, QueuedJob], str]:
    """Returns what accounting lists of jobs on one cluster (empty: the local one), and why it does not answer."""
    bare_ids = {job_id.partition(";")[0] for job_id in job_ids}
    # Whole arrays: elements that never started have no row of their own.
    array_ids = ",".join(dict.fromkeys(job_id.partition(";")[0].partition("_")[0] for job_id in job_ids))
    selection = [f"--jobs={array_ids}"]
    if len(array_ids) >= MAX_IDS:
        selection = [f"--user={owners}", "--starttime=now-30days"]
    # DerivedExitCode is the highest exit code of the steps: Slurm reports 0:125 for a step that ran out of memory.
    columns = "--format=JobID,State,DerivedExitCode"
    done, problem = _run("sacct", ["--noheader", "--parsable2", "-X", columns, *on_cluster(cluster), *selection])
    if _NO_ACCOUNTING in problem.lower():
        problem = ""
    jobs: dict[str, QueuedJob] = {}
    if done is None:
        return jobs, problem
    suffix = f";{cluster}" if cluster else ""
    for line in done.stdout.splitlines():
        row_id, states, exit_code = [*(cell.strip() for cell in line.split("|")), "", "", ""][:3]
        if not states:
            continue
        # sacct prints "CANCELLED by 1000".
        state = "OUT_OF_MEMORY" if exit_code == "0:125" else states.split()[0]
        for element_id in elements_of(row_id):
            if element_id in bare_ids or element_id.partition("_")[0] in bare_ids:
                job_id = f"{element_id}{suffix}"
                jobs[job_id] = QueuedJob(job_id=job_id, state=state, phase=_phase(state))
    return jobs, problem


def elements_of(job: str) -> Iterator[str]:
    """Yields the ids of all elements of `ARRAY_[1,3-5,7-11:2%4]`; any other id itself."""
    match = _ELEMENTS.fullmatch(job)
    if match is None:
        yield job
        return
    for part in match[2].split(","):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1, int(step or 1)):
            yield f"{match[1]}_{number}"


def _phase(state: str) -> Phase:
    if state in FINAL:
        return "over"
    return "waiting" if state in _WAITING else "running"


def _run(program: str, arguments: Sequence[str]) -> tuple[subprocess.CompletedProcess[str] | None, str]:
    """Runs a program of Slurm; returns its output or None, and the problem or "". Partial output comes with both."""
    done = asked([program, *arguments])
    if isinstance(done, str):
        return None, done
    if done.returncode == 0:
        return done, ""
    message = " ".join(done.stderr.split())
    problem = f"{program} failed: {message[:200] or f'it ended with {done.returncode}'}"
    if "|" in done.stdout:
        return done, problem
    return None, problem


RunT = TypeVar("RunT", bound=LaunchedRun)


def accounting_of(runs: Iterable[LaunchedRun]) -> tuple[dict[str, RunAccounting], dict[str, str]]:
    """Returns stored or new accounting of runs whose jobs have ended, and why others have none, by run id."""
    accounting: dict[str, RunAccounting] = {}
    submissions: dict[str, Submission] = {}
    problems: dict[str, str] = {}
    for run in runs:
        if run.accounting is not None:
            accounting[run.plan.run_id] = run.accounting
            continue
        try:
            submission = read_submission(run.folder)
        except IncompleteDataError as error:
            problems[run.plan.run_id] = str(error)
            continue
        if submission is not None:
            submissions[run.plan.run_id] = submission
    ids_by_cluster: dict[str, list[str]] = {}
    for submission in submissions.values():
        # Whole arrays: elements that never started have no row of their own.
        ids_by_cluster.setdefault(submission.cluster, []).append(submission.job_id.partition("_")[0])
    answers = {cluster: _ask_all(list(dict.fromkeys(ids)), cluster) for cluster, ids in ids_by_cluster.items()}
    for run_id, submission in submissions.items():
        answer = _of_run(run_id, submission, *answers[submission.cluster])
        if isinstance(answer, str):
            problems[run_id] = answer
        else:
            accounting[run_id] = answer
    return accounting, problems


def with_accounting(runs: Sequence[RunT]) -> tuple[list[RunT], dict[str, str]]:
    """Returns the runs with their accounting, which is stored in their folders, and why others have none, by run id."""
    accounting, problems = accounting_of(runs)
    runs_with_accounting = []
    for run in runs:
        run_accounting = accounting.get(run.plan.run_id)
        if run.accounting is None and run_accounting is not None:
            with suppress(RunError):  # another user's runs, or a full disk: the next call asks again
                write_json(run.folder.accounting, run_accounting.model_dump(mode="json"))
            run = replace(run, accounting=run_accounting)
        runs_with_accounting.append(run)
    return runs_with_accounting, problems


def settled_accounting(runs: Sequence[RunT], pause: Callable[[float], None]) -> dict[str, str]:
    """Stores the accounting of runs whose jobs are ending; returns why others have none, by run id."""
    # slurmctld informs the accounting database with a delay.
    for wait_s in SETTLING_S:
        if wait_s:
            pause(wait_s)
        runs, problems = with_accounting(runs)
        if not any(problem.endswith(_NOT_ENDED) for problem in problems.values()):
            break
    return problems


def _ask_all(jobs: Sequence[str], cluster: str) -> tuple[dict[str, list[dict[str, str]]], str]:
    ids_per_call = MAX_IDS // (1 + max(map(len, jobs)))
    rows: dict[str, list[dict[str, str]]] = {}
    for start in range(0, len(jobs), ids_per_call):
        selection = f"--jobs={','.join(jobs[start : start + ids_per_call])}"
        sacct = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--format={_FIELDS}", selection]
        lines, problem = _lines([*sacct, *on_cluster(cluster)])
        if problem:
            return {}, problem
        rows |= _by_job(lines, _FIELDS.split(","))
    return rows, ""


def _lines(command: list[str]) -> tuple[list[str], str]:
    name = command[0]
    if shutil.which(name) is None:
        return [], f"{name} is not on PATH"
    # Prints times as seconds since 1970, whatever time zone and format the user has set.
    done = asked(["env", "SLURM_TIME_FORMAT=%s", *command], name=name)
    if isinstance(done, str):
        return [], done
    if done.returncode != 0:
        return [], f"{name} refused: {' '.join(done.stderr.split())[:200] or f'it ended with {done.returncode}'}"
    if _NO_ACCOUNTING in done.stderr.lower():
        return [], f"{name}: {' '.join(done.stderr.split())[:200]}"
    return done.stdout.splitlines(), ""


def _by_job(lines: Iterable[str], names: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    rows: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        # The last column is a job's name, which may contain the separator.
        cells = line.rstrip().removesuffix("|").split("|", len(names) - 1)
        if len(cells) == len(names):
            row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
            job_id = row["JobID"].partition(".")[0]
            for element_id in elements_of(job_id):
                rows.setdefault(element_id, []).append({**row, "JobID": row["JobID"].replace(job_id, element_id, 1)})
    return rows


def _of_run(
    run_id: str, submission: Submission, by_job: Mapping[str, list[dict[str, str]]], problem: str
) -> RunAccounting | str:
    """Returns the accounting of a run, or why there is none. `by_job`: rows of sacct."""
    if problem:
        return f"no accounting: {problem}"
    begin = datetime.fromisoformat(submission.submitted).timestamp() - _SKEW_S
    rows = [row for row in by_job.get(submission.job_id, []) if (_seconds(row["End"]) or begin) >= begin]
    attempts = [row for row in rows if row["JobID"] == submission.job_id]
    if not attempts:
        return f"Slurm no longer knows job {submission.job_id}"
    last_state = _state(attempts[-1])
    if last_state == "REQUEUED" or any(_state(row) not in _ENDED for row in rows):
        return f"job {submission.job_id} {_NOT_ENDED}"
    if last_state in _MAY_RESTART and time.time() - (_seconds(attempts[-1]["End"]) or 0.0) < _RESTART_S:
        return f"job {submission.job_id} ended just now ({last_state}), and may be restarted"
    job_runs = submission.runs or (run_id,)
    all_steps = [row for row in rows if re.fullmatch(r"\d+", row["JobID"].partition(".")[2])]
    # A step of srun has the name of its run. Steps of mpirun do not, but belong to the run if it is the job's only one.
    steps = [row for row in all_steps if row["JobName"] == run_id]
    if not steps and len(job_runs) == 1:
        steps = all_steps
    accounting = RunAccounting(
        run_id=run_id,
        source="sacct",
        asked=utc_now(),
        job_id=submission.job_id,
        job_runs=job_runs,
        attempts=tuple(_attempt(row) for row in attempts),
        steps=tuple(_step(row) for row in steps),
        job_energy_j=_job_energy(attempts, rows),
        not_measured={},
    )
    no_energy = _PART_OF_ENERGY if any(_energy(row) is not None for row in rows) else _NO_ENERGY
    return accounting.model_copy(update={"not_measured": _not_measured(accounting, no_energy)})


def _job_energy(attempts: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, str]]) -> float | None:
    """Returns joules of all attempts of a job, or None; `attempts`: rows of the job, `rows`: with its steps."""
    started = [row for row in attempts if _started(row) is not None and _started(row) != _seconds(row["End"])]
    attempt_energies_j = [energy_j for row in started if (energy_j := _energy(row)) is not None]
    if attempt_energies_j:
        return sum(attempt_energies_j) if len(attempt_energies_j) == len(started) else None
    if len(started) != 1:
        return None
    # Each step counts the energy of whole nodes, so that the steps of a job must not be added.
    return max((energy_j for row in rows if (energy_j := _energy(row)) is not None), default=None)


def _not_measured(accounting: RunAccounting, no_energy: str) -> dict[str, str]:
    if accounting.never_started:
        no_start = f"job {accounting.job_id} ended before it started"
        return dict.fromkeys(("waited_s", "max_rss_bytes", "energy_j"), no_start)
    no_steps = f"job {accounting.job_id} has no srun step of this run"
    reasons = {
        "waited_s": "Slurm does not report when the job became eligible",
        "run_s": no_steps,
        "max_rss_bytes": no_steps,
        "energy_j": no_energy,
    }
    if accounting.steps:
        reasons["max_rss_bytes"] = "Slurm does not collect it (JobAcctGatherType)"
    return {name: reason for name, reason in reasons.items() if getattr(accounting, name) is None}


def _attempt(row: Mapping[str, str]) -> Attempt:
    started, ended = _started(row), _seconds(row["End"])
    if ended is None:
        ended = started or 0.0
    limit_min = row.get("TimelimitRaw", "")
    limit_s = 60.0 * int(limit_min) if limit_min.isdigit() and int(limit_min) else None
    return Attempt(
        state=_state(row),
        exit_code=row.get("ExitCode") or None,
        eligible=_seconds(row["Eligible"]),
        started=started,
        ended=ended,
        nodes=_count(row["NNodes"]),
        node_list=_nodes(row),
        time_limit_s=limit_s,
        partition=row["Partition"],
        account=row["Account"],
        qos=row["QOS"],
    )


def _step(row: Mapping[str, str]) -> Step:
    started, ended = _seconds(row["Start"]) or 0.0, _seconds(row["End"]) or 0.0
    return Step(
        id=row["JobID"],
        state=_state(row),
        exit_code=row["ExitCode"],
        started=started,
        elapsed_s=max(0.0, ended - started),
        nodes=_count(row["NNodes"]),
        node_list=row["NodeList"],
        max_rss_bytes=_amount(row["MaxRSS"], 1024.0),
        energy_j=_energy(row),
    )


def _started(row: Mapping[str, str]) -> float | None:
    """Returns when the job got its nodes, in seconds since 1970; None if it was cancelled before."""
    return _seconds(row["Start"]) if _nodes(row) else None


def _nodes(row: Mapping[str, str]) -> str:
    return "" if row["NodeList"] in ("None assigned", "(null)") else row["NodeList"]


def _state(row: Mapping[str, str]) -> str:
    """Returns the state without the user: sacct prints "CANCELLED by 1000"."""
    return row["State"].partition(" ")[0]


def _energy(row: Mapping[str, str]) -> float | None:
    return _amount(row["ConsumedEnergyRaw"], 1000.0) or _amount(row["ConsumedEnergy"], 1000.0)


def _amount(text: str, step: float) -> float | None:
    """Parses `1234567` or `1.23M`; returns None for an empty text, 0, and Slurm's "no value"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    if match is None:
        return None
    value = float(match[1]) * step ** _PREFIXES[match[2]]
    return value if 0 < value < _NO_VALUE else None


def _count(text: str) -> int:
    """Parses `12` or `1K`, which is 1024."""
    return int(_amount(text, 1024.0) or 0)


def _seconds(text: str) -> float | None:
    """Parses seconds since 1970; returns None for `Unknown`, `None` and `N/A`."""
    return float(text) if re.fullmatch(r"\d{1,12}", text) and int(text) else None
