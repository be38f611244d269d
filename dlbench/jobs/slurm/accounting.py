"""What Slurm says of jobs: squeue of those it still lists, sacct of those it has forgotten, and of what they cost.

Slurm counts the energy of whole nodes by the plugin of `AcctGatherEnergyType` (RAPL, IPMI, XCC, pm_counters); that is
the job's own only where it has its nodes to itself (sacct(1), ConsumedEnergy).

The reasons for which a job waits (`squeue`, %r) are those of Slurm's page of job reason codes and of `slurm.h`.
"""

from __future__ import annotations

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

from dlbench.errors import IncompleteDataError, RunError
from dlbench.jobs.scheduler import Phase, Queue, QueuedJob, Submission, cluster_of, read_submission
from dlbench.jobs.slurm.environment import asked, on_cluster
from dlbench.records.accounting import Attempt, RunAccounting, Step
from dlbench.records.files import write_json
from dlbench.records.scan import LaunchedRun
from dlbench.units import utc_now

_NEVER = (
    (r"DependencyNeverSatisfied", "the job that it waits for ended otherwise than asked"),
    (r"BadConstraints", "no node is as it asks for"),
    (r"PartitionNodeLimit", "it asks for more nodes than its partition allows"),
    (r"PartitionTimeLimit", "it asks for more time than its partition allows"),
    (r"(QOS|Assoc)Max(Wall|Node|Cpu|Mem|GRES|Billing|Energy|BB|Unknown)\w*Per(Job|Node|User)\w*", ""),
    (r"(QOS|Assoc)MaxWall\w*", ""),
    (r"QOSMin\w+|QOSTimeLimit|QOSUsageThreshold", ""),
    (r"InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|\w*NotAllowed", "it may not run where it asks to"),
    (r"ReservationDeleted", "its reservation is gone"),
    (r"JobHoldMaxRequeue|JobLaunchFailure|launch_failed_requeued_held|LaunchFailedRequeuedHeld", "it failed to start"),
)
_HELD = (
    (r"JobHeldUser", "it is held: `scontrol release {id}` lets it start"),
    (r"JobHeldAdmin", "an administrator holds it: ask them"),
)
_LATER = (
    (r"PartitionDown|PartitionInactive", "its partition takes no jobs: ask the administrators, or cancel"),
    (r"(ReqNodeNotAvail|Nodes[ _]required).*", "nodes that it asks for are down, drained or reserved"),
    (r"(QOS|Assoc)(Max|Grp)\w*|AssociationJobLimit|QOSResourceLimit", "a limit of the account or QOS: others must end"),
)
_STUCK = "it never starts so: cancel it, and submit with another request"

_GONE = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
FINAL = frozenset(_GONE | {"TIMEOUT"})  # Slurm's states after which nothing more will come.
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
_ELSEWHERE = "it runs on another cluster of the federation"
_FORMAT = "--format=%i|%T|%S|%r|%k|%Z"
_ELEMENTS = re.compile(r"(\d+)_\[([0-9,:-]+)(?:%\d+)?\]")
"""Elements of an array that have not been started, as sacct and squeue list them together."""

_NO_ACCOUNTING = "accounting storage is disabled"
MAX_IDS = 100_000  # Characters of ids in one argument: Linux takes 131,072 (MAX_ARG_STRLEN).

# Slurm shortens numbers in steps of 1,024 (memory) or 1,000 (energy).
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}

_NO_VALUE = 2.0**63  # What Slurm keeps for "no value" in 64 bits, printed by some versions, is near 2^64.
_SKEW_S = 300
"""A job id is given again after MaxJobId: a job that ended so long before the run was submitted is another one. Clocks
of the login node and of slurmctld may differ."""

_FIELDS = (
    "JobID,State,ExitCode,Eligible,Start,End,NNodes,NodeList,TimelimitRaw,Partition,Account,QOS,MaxRSS,"
    "ConsumedEnergyRaw,ConsumedEnergy,JobName"
)

_ENDED = FINAL | {"REQUEUED", "REVOKED"}
_NOT_ENDED = "has not ended"
SETTLING_S = (0.0, 2.0, 5.0, 10.0)  # Pauses before Slurm is asked for jobs that wrote their last record, seconds.

_MAY_COME_BACK = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"})
"""Of a job that is started again, sacct knows for some seconds no more than that it ended so."""

_COMES_BACK_S = 120  # How long such an end is not believed; slurmctld informs slurmdbd of jobs that wait every 5 s.
_NO_ENERGY = "Slurm counted no energy: AcctGatherEnergyType is not set, or cannot read it"
_PART_OF_ENERGY = "Slurm counted the energy of a part of the job's attempts or steps only"


def advice_on(reason: str, job_id: str) -> tuple[str, bool]:
    """What a reason means and what to do, and whether the job never starts as it is; empty where it just waits."""
    for pattern, meaning in (*_HELD, *_NEVER, *_LATER):
        if not re.fullmatch(pattern, reason):
            continue
        if (pattern, meaning) not in _NEVER:
            return meaning.format(id=job_id), False
        # A limit per user is left when the user's other jobs end, unless this one alone is above it.
        if "PerUser" in reason and "Wall" not in reason:
            return "a limit of the user: it starts when others end, or never if it alone is above it", False
        return f"{meaning or 'it is above a limit of its QOS or account'}; {_STUCK}", True
    return "", False


def ask(job_ids: Sequence[str], users: Sequence[str], clusters: Sequence[str] = ()) -> Queue:
    """This user's jobs, those of other users that are named, and of these ids what sacct knows besides.

    squeue is asked by user: a list of a thousand ids would be asked for one by one by the controller, and an argument
    has an end. `--states=all` lists those, too, that ended in the last minutes (MinJobAge).

    `job_ids`: ids, with `;CLUSTER` where sbatch named one. `users`: names or numbers. `clusters`: asked
    besides those of the ids.
    """
    places = {*clusters, *map(cluster_of, job_ids)} or {""}
    named = ",".join(sorted(places - {""}))
    owners = ",".join(dict.fromkeys([str(os.getuid()), *users]))
    if shutil.which("squeue") is None:
        queued = Queue(unanswered="squeue is not on PATH")
    else:
        wheres: list[list[str]] = [[]] * ("" in places) + [[f"--clusters={named}"]] * bool(named)
        asked = ["--noheader", "--array", "--states=all", f"--user={owners}"]
        answers = [_squeue([*asked, *where, _FORMAT]) for where in wheres]
        queued = Queue(
            jobs={job_id: job for one in answers for job_id, job in one.jobs.items()},
            unanswered="; ".join(one.unanswered for one in answers if one.unanswered),
        )
    missing: dict[str, list[str]] = {}
    for job in job_ids:
        if not queued.of(job):
            missing.setdefault(cluster_of(job), []).append(job)
    if not missing or shutil.which("sacct") is None:
        return queued
    ended: dict[str, QueuedJob] = {}
    why: list[str] = []
    for cluster, jobs in missing.items():
        found, problem = _sacct(jobs, cluster, owners)
        ended |= found
        why += [problem] * bool(problem)
    return Queue(jobs={**ended, **queued.jobs}, unanswered=queued.unanswered, no_history="; ".join(why))


def _squeue(arguments: Sequence[str]) -> Queue:
    done, why = _said("squeue", arguments)
    if done is None:
        return Queue(unanswered=why)
    jobs: dict[str, QueuedJob] = {}
    cluster = ""
    for line in done.stdout.splitlines():
        # Written before the jobs of each cluster, where it lists those of several.
        if line.startswith("CLUSTER: "):
            cluster = f";{line.removeprefix('CLUSTER: ').strip()}"
            continue
        if "|" not in line:
            continue
        job, state, starts, reason, rest = [*(part.strip() for part in line.split("|", 4)), "", "", "", "", ""][:5]
        # COMMENT|FOLDER: both may hold the sign between them; a folder begins with a slash.
        comment, _, folder = rest.rpartition("|")
        if "|/" in rest:
            comment, _, folder = rest.partition("|/")
            folder = f"/{folder}"
        if not job or not state:
            continue
        job_id, state = f"{job}{cluster}", state.split()[0]
        phase = _phase(state)
        advice, is_stuck = advice_on(reason, job) if phase == "waiting" else ("", False)
        jobs[job_id] = QueuedJob(
            job_id=job_id,
            state=state,
            phase=phase,
            reason=reason if phase == "waiting" and reason not in ("None", "(null)") else "",
            advice=_ELSEWHERE if state == "REVOKED" else advice,
            is_stuck=is_stuck,
            starts=starts if phase == "waiting" and starts not in ("N/A", "Unknown") else "",
            comment="" if comment == "(null)" else comment,
            folder=folder,
        )
    return Queue(jobs=jobs, unanswered=why)


def _sacct(wanted: Sequence[str], cluster: str, owners: str) -> tuple[dict[str, QueuedJob], str]:
    """What accounting says of jobs of one cluster (empty: the one here), and why it says nothing."""
    asked = {job.partition(";")[0] for job in wanted}
    # Of an array all: elements that never started have no row of their own.
    text = ",".join(dict.fromkeys(job.partition(";")[0].partition("_")[0] for job in wanted))
    which = [f"--jobs={text}"] if len(text) < MAX_IDS else [f"--user={owners}", "--starttime=now-30days"]
    # Highest exit code of the steps: 0:125 is Slurm's own for a step that ran out of memory.
    form = "--format=JobID,State,DerivedExitCode"
    done, why = _said("sacct", ["--noheader", "--parsable2", "-X", form, *on_cluster(cluster), *which])
    if _NO_ACCOUNTING in why.lower():
        why = ""
    suffix = f";{cluster}" if cluster else ""
    jobs: dict[str, QueuedJob] = {}
    for line in [] if done is None else done.stdout.splitlines():
        job, state, code = [*(part.strip() for part in line.split("|")), "", "", ""][:3]
        if not state:
            continue
        # sacct writes "CANCELLED by 1000".
        word = "OUT_OF_MEMORY" if code == "0:125" else state.split()[0]
        for one in elements_of(job):
            if one in asked or one.partition("_")[0] in asked:
                jobs[f"{one}{suffix}"] = QueuedJob(job_id=f"{one}{suffix}", state=word, phase=_phase(word))
    return jobs, why


def elements_of(job: str) -> Iterator[str]:
    """Ids of all elements that `ARRAY_[1,3-5,7-11:2%4]` stands for; any other id itself."""
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


def _said(program: str, arguments: Sequence[str]) -> tuple[subprocess.CompletedProcess[str] | None, str]:
    """What a program of Slurm wrote; None, and why, where that is no answer."""
    done = asked([program, *arguments])
    if isinstance(done, str):
        return None, done
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        why = f"{program} failed: {said[:200] or f'it ended with {done.returncode}'}"
        return (done, why) if "|" in done.stdout else (None, why)
    return done, ""


RunT = TypeVar("RunT", bound=LaunchedRun)


def accounting_of(runs: Iterable[LaunchedRun]) -> tuple[dict[str, RunAccounting], dict[str, str]]:
    """What Slurm says of the jobs of runs that were submitted, and have ended; what is kept is not asked again.

    Returns it, and of submitted runs without it why there is nothing, both by run id.
    """
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
        found = _of_run(run_id, submission, *answers[submission.cluster])
        if isinstance(found, str):
            why[run_id] = found
        else:
            kept[run_id] = found
    return kept, why


def with_accounting(runs: Sequence[RunT]) -> tuple[list[RunT], dict[str, str]]:
    """The runs with what Slurm says of them, which is kept in their folders; and why there is nothing, by run id."""
    accounting, why_not = accounting_of(runs)
    found = []
    for run in runs:
        new = accounting.get(run.plan.run_id)
        if run.accounting is None and new is not None:
            with suppress(RunError):  # somebody else's runs, or a full disk: it is asked again
                write_json(run.folder.accounting, new.model_dump(mode="json"))
            run = replace(run, accounting=new)
        found.append(run)
    return found, why_not


def settled_accounting(runs: Sequence[RunT], pause: Callable[[float], None]) -> dict[str, str]:
    """Keeps what Slurm says of runs whose jobs are ending; returns why there is nothing, by run id.

    slurmctld informs accounting of an end with a delay: for some seconds it is asked again.

    `pause`: waits that many seconds.
    """
    for wait_s in SETTLING_S:
        if wait_s:
            pause(wait_s)
        runs, why_not = with_accounting(runs)
        if not any(why.endswith(_NOT_ENDED) for why in why_not.values()):
            break
    return why_not


def _ask_all(jobs: Sequence[str], cluster: str) -> tuple[dict[str, list[dict[str, str]]], str]:
    """Returns the rows of sacct by job id, of the job and of its steps; and why there is none, or empty."""
    size = MAX_IDS // (1 + max(map(len, jobs)))
    rows: dict[str, list[dict[str, str]]] = {}
    for start in range(0, len(jobs), size):
        which = f"--jobs={','.join(jobs[start : start + size])}"
        sacct = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--format={_FIELDS}", which]
        lines, why = _lines([*sacct, *on_cluster(cluster)])
        if why:
            return {}, why
        rows |= _by_job(lines, _FIELDS.split(","))
    return rows, ""


def _lines(command: list[str]) -> tuple[list[str], str]:
    name = command[0]
    if shutil.which(name) is None:
        return [], f"{name} is not on PATH"
    # Times as seconds since 1970, whatever time zone and format the user has chosen.
    done = asked(["env", "SLURM_TIME_FORMAT=%s", *command], name=name)
    if isinstance(done, str):
        return [], done
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


def _of_run(
    run_id: str, submission: Submission, by_job: Mapping[str, list[dict[str, str]]], why_not: str
) -> RunAccounting | str:
    if why_not:
        return f"no accounting: {why_not}"
    begin = datetime.fromisoformat(submission.submitted).timestamp() - _SKEW_S
    rows = [row for row in by_job.get(submission.job_id, []) if (_seconds(row["End"]) or begin) >= begin]
    own = [row for row in rows if row["JobID"] == submission.job_id]
    if not own:
        return f"Slurm no longer knows job {submission.job_id}"
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
        mine = numbered
    accounting = RunAccounting(
        run_id=run_id,
        source="sacct",
        asked=utc_now(),
        job_id=submission.job_id,
        job_runs=job_runs,
        attempts=tuple(_attempt(row) for row in own),
        steps=tuple(_step(row) for row in mine),
        job_energy_j=_job_energy(own, rows),
        not_measured={},
    )
    no_energy = _PART_OF_ENERGY if any(_energy(row) is not None for row in rows) else _NO_ENERGY
    return accounting.model_copy(update={"not_measured": _not_measured(accounting, no_energy)})


def _job_energy(own: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, str]]) -> float | None:
    """Joules of all attempts of a job; None where that of one is missing.

    `own`: rows of the job itself, one an attempt.
    """
    ran = [row for row in own if _started(row) is not None and _started(row) != _seconds(row["End"])]
    counted = [joules for row in ran if (joules := _energy(row)) is not None]
    if counted:
        return sum(counted) if len(counted) == len(ran) else None
    # Steps of one job count the same nodes.
    most = max((joules for row in rows if (joules := _energy(row)) is not None), default=None)
    return most if len(ran) == 1 else None


def _not_measured(accounting: RunAccounting, no_energy: str) -> dict[str, str]:
    if accounting.never_started:
        no_start = f"job {accounting.job_id} ended before it was started"
        return dict.fromkeys(("waited_s", "max_rss_bytes", "energy_j"), no_start)
    no_steps = f"job {accounting.job_id} has no srun step of it"
    reasons = {
        "waited_s": "Slurm does not say when the job could have started",
        "run_s": no_steps,
        "max_rss_bytes": no_steps if not accounting.steps else "Slurm gathers none (JobAcctGatherType)",
        "energy_j": no_energy,
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
        time_limit_s=60.0 * int(limit) if limit.isdigit() and int(limit) else None,
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
    """When the job was given nodes; None for one that was cancelled before."""
    return _seconds(row["Start"]) if _nodes(row) else None


def _nodes(row: Mapping[str, str]) -> str:
    return "" if row["NodeList"] in ("None assigned", "(null)") else row["NodeList"]


def _word(row: Mapping[str, str]) -> str:
    return (row["State"].split() or [""])[0]


def _energy(row: Mapping[str, str]) -> float | None:
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
