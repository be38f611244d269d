"""What Slurm says of many jobs: one call of squeue, and one of sacct for those that it has forgotten."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from dlbench.jobs.scheduler import Phase, Queue, QueuedJob
from dlbench.jobs.slurm.call import call
from dlbench.jobs.slurm.reasons import advice_on

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
_MAX_IDS = 100_000
"""Characters of ids in one argument: Linux takes 131,072 (MAX_ARG_STRLEN)."""


def ask(job_ids: Sequence[str], users: Sequence[str]) -> Queue:
    """This user's jobs, those of other users that are named, and of these ids what sacct knows besides.

    squeue is asked by user: a list of a thousand ids would be asked for one by one by the controller, and an argument
    has an end. `--states=all` lists those, too, that ended in the last minutes (MinJobAge).

    Args:
        job_ids: ids, with `;CLUSTER` where sbatch named one.
        users: names or numbers.
    """
    clusters = sorted({cluster for job in job_ids if (cluster := job.partition(";")[2])})
    owners = ",".join(dict.fromkeys([str(os.getuid()), *users]))
    named = [f"--clusters={','.join(clusters)}"] if clusters else []
    if shutil.which("squeue") is None:
        queued = Queue(unanswered="squeue is not on PATH")
    else:
        queued = _squeue(["--noheader", "--array", "--states=all", f"--user={owners}", *named, _FORMAT])
    known = {job.partition("_")[0] for job in queued.jobs}
    missing = [job for job in job_ids if job not in queued.jobs and job not in known]
    if not missing or shutil.which("sacct") is None:
        return queued
    # Highest exit code of the steps: 0:125 is Slurm's own for a step that ran out of memory.
    form = "--format=JobID,State,DerivedExitCode"
    wanted = ",".join(dict.fromkeys(job.partition(";")[0] for job in missing))
    which = [f"--jobs={wanted}"] if len(wanted) < _MAX_IDS else [f"--user={owners}", "--starttime=now-30days"]
    ended = _sacct(["--noheader", "--parsable2", "-X", form, *named, *which], missing)
    return Queue(jobs={**ended, **queued.jobs}, unanswered=queued.unanswered)


def _squeue(arguments: Sequence[str]) -> Queue:
    done, why = _said("squeue", arguments)
    if done is None:
        return Queue(unanswered=why)
    jobs: dict[str, QueuedJob] = {}
    for cluster, line in _by_cluster(done.stdout):
        job, state, starts, reason, rest = [*(part.strip() for part in line.split("|", 4)), "", "", "", "", ""][:5]
        comment, _, folder = rest.rpartition("|")  # a comment may hold anything
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


def _by_cluster(text: str) -> Iterator[tuple[str, str]]:
    """Lines of squeue, each with `;CLUSTER` where it lists several."""
    cluster = ""
    for line in text.splitlines():
        if line.startswith("CLUSTER: "):
            cluster = f";{line.removeprefix('CLUSTER: ').strip()}"
        elif "|" in line:
            yield cluster, line


def _sacct(arguments: Sequence[str], wanted: Sequence[str]) -> dict[str, QueuedJob]:
    done, _ = _said("sacct", arguments)
    refs = {job.partition(";")[0]: job for job in wanted}
    arrays = {job: ref for job, ref in refs.items() if "_" not in job}
    jobs: dict[str, QueuedJob] = {}
    for line in [] if done is None else done.stdout.splitlines():
        job, state, code = [*(part.strip() for part in line.split("|")), "", "", ""][:3]
        array, mark, number = job.partition("_")
        ref = refs.get(job) or (f"{array}_{number}" if mark and array in arrays else "")
        if not ref or not state:
            continue
        # sacct writes "CANCELLED by 1000".
        word = "OUT_OF_MEMORY" if code == "0:125" else state.split()[0]
        jobs[ref] = QueuedJob(job_id=ref, state=word, phase=_phase(word))
    return jobs


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
