"""What Slurm says of many jobs: one call of squeue, and one of sacct for those that it has forgotten.

Why a job waits, by Slurm's word for it (`squeue`, %r), and what to do where it will not start by itself.

The words are those of Slurm's page of job reason codes and of `slurm.h`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from dlbench.jobs.scheduler import Phase, Queue, QueuedJob, cluster_of
from dlbench.jobs.slurm.environment import call

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
_LATER = (
    (r"JobHeldUser", "it is held: `scontrol release {id}` lets it start"),
    (r"JobHeldAdmin", "an administrator holds it: ask them"),
    (r"PartitionDown|PartitionInactive", "its partition takes no jobs: ask the administrators, or cancel"),
    (r"(ReqNodeNotAvail|Nodes[ _]required).*", "nodes that it asks for are down, drained or reserved"),
    (r"(QOS|Assoc)(Max|Grp)\w*|AssociationJobLimit|QOSResourceLimit", "a limit of the account or QOS: others must end"),
)
_STUCK = "it never starts so: cancel it, and submit with another request"


def advice_on(reason: str, job_id: str) -> tuple[str, bool]:
    """What a reason means and what to do, and whether the job never starts as it is; empty where it just waits."""
    for pattern, meaning in _LATER[:2]:
        if re.fullmatch(pattern, reason):
            return meaning.format(id=job_id), False
    for pattern, meaning in _NEVER:
        if re.fullmatch(pattern, reason):
            # A limit per user is left when the user's other jobs end, unless this one alone is above it.
            if "PerUser" in reason and "Wall" not in reason:
                return "a limit of the user: it starts when others end, or never if it alone is above it", False
            return f"{meaning or 'it is above a limit of its QOS or account'}; {_STUCK}", True
    for pattern, meaning in _LATER[2:]:
        if re.fullmatch(pattern, reason):
            return meaning, False
    return "", False


FINAL = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        "TIMEOUT",
    }
)
"""Slurm's states after which nothing more will come."""

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
_ELSEWHERE = "it runs on another cluster of the federation"
_FORMAT = "--format=%i|%T|%S|%r|%k|%Z"
_ELEMENTS = re.compile(r"(\d+)_\[([0-9,:-]+)(?:%\d+)?\]")
"""Elements of an array that have not been started, as sacct and squeue list them together."""
_NO_ACCOUNTING = "accounting storage is disabled"
MAX_IDS = 100_000
"""Characters of ids in one argument: Linux takes 131,072 (MAX_ARG_STRLEN)."""


def ask(job_ids: Sequence[str], users: Sequence[str], clusters: Sequence[str] = ()) -> Queue:
    """This user's jobs, those of other users that are named, and of these ids what sacct knows besides.

    squeue is asked by user: a list of a thousand ids would be asked for one by one by the controller, and an argument
    has an end. `--states=all` lists those, too, that ended in the last minutes (MinJobAge).

    Args:
        job_ids: ids, with `;CLUSTER` where sbatch named one.
        users: names or numbers.
        clusters: as of `dlbench.jobs.scheduler.Scheduler.query`.
    """
    places = {*clusters, *map(cluster_of, job_ids)} or {""}
    named = ",".join(sorted(places - {""}))
    owners = ",".join(dict.fromkeys([str(os.getuid()), *users]))
    if shutil.which("squeue") is None:
        queued = Queue(unanswered="squeue is not on PATH")
    else:
        wheres: list[list[str]] = [[]] * ("" in places) + [[f"--clusters={named}"]] * bool(named)
        asked = ["--noheader", "--array", "--states=all", f"--user={owners}"]
        told = [_squeue([*asked, *where, _FORMAT]) for where in wheres]
        queued = Queue(
            jobs={job_id: job for one in told for job_id, job in one.jobs.items()},
            unanswered="; ".join(one.unanswered for one in told if one.unanswered),
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
    for cluster, line in _by_cluster(done.stdout):
        job, state, starts, reason, rest = [*(part.strip() for part in line.split("|", 4)), "", "", "", "", ""][:5]
        comment, folder = _comment_and_folder(rest)
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


def _comment_and_folder(text: str) -> tuple[str, str]:
    """`COMMENT|FOLDER`, both of which may hold the sign between them; a folder begins with a slash."""
    comment, mark, folder = text.partition("|/")
    if mark:
        return comment, f"/{folder}"
    comment, _, folder = text.rpartition("|")
    return comment, folder


def _by_cluster(text: str) -> Iterator[tuple[str, str]]:
    """Lines of squeue, each with `;CLUSTER` where it lists several."""
    cluster = ""
    for line in text.splitlines():
        if line.startswith("CLUSTER: "):
            cluster = f";{line.removeprefix('CLUSTER: ').strip()}"
        elif "|" in line:
            yield cluster, line


def _sacct(wanted: Sequence[str], cluster: str, owners: str) -> tuple[dict[str, QueuedJob], str]:
    """What accounting says of jobs of one cluster (empty: the one here), and why it says nothing."""
    asked = {job.partition(";")[0] for job in wanted}
    # Of an array all: elements that never started have no row of their own.
    text = ",".join(dict.fromkeys(job.partition(";")[0].partition("_")[0] for job in wanted))
    which = [f"--jobs={text}"] if len(text) < MAX_IDS else [f"--user={owners}", "--starttime=now-30days"]
    where = [f"--clusters={cluster}"] if cluster else []
    # Highest exit code of the steps: 0:125 is Slurm's own for a step that ran out of memory.
    form = "--format=JobID,State,DerivedExitCode"
    done, why = _said("sacct", ["--noheader", "--parsable2", "-X", form, *where, *which])
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
    try:
        done = call([program, *arguments])
    except subprocess.TimeoutExpired as late:
        return None, f"{program} gave no answer within {late.timeout:g} s"
    except OSError as error:
        return None, f"{program} cannot be started: {error.strerror or error}"
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        why = f"{program} failed: {said[:200] or f'it ended with {done.returncode}'}"
        return (done, why) if "|" in done.stdout else (None, why)
    return done, ""
