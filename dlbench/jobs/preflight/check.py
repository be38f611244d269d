"""A whole pre-flight: what Slurm says to the job, the job or the look at this machine, the verdict, the file."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import dlbench
from dlbench.errors import ExitCode, RunError, refused
from dlbench.jobs.preflight.verdict import exchange_finding, excluded, judge
from dlbench.jobs.processes import Interruption
from dlbench.jobs.scripts import containers, launch
from dlbench.jobs.scripts.job import Job, limit_seconds, render, time_text
from dlbench.jobs.scripts.launch import sbatch_arguments, told_options
from dlbench.jobs.scripts.words import quoted, words_of
from dlbench.jobs.slurm.environment import asked, call, job_environment, on_cluster
from dlbench.jobs.slurm.scheduler import Slurm
from dlbench.opening import read_end, read_text
from dlbench.records.files import write_atomic, write_json
from dlbench.records.preflight import Finding, PreflightFolder, PreflightReport
from dlbench.specs.comm import CommPlan, CommSeries, CommSpec
from dlbench.specs.plan import LaunchPlan
from dlbench.specs.requests import SeriesRequest
from dlbench.specs.system import SystemSpec
from dlbench.units import format_seconds

JOB_S = 300  # What the job asks for: it takes a minute, and longer where a file system loads libraries slowly.

SIZES = (1024, 1 << 20)  # Bytes of the vectors: one that libraries send at once, and one that they cut up.

_ITERATION_S = 30.0
_STALL_S = 120.0
POLL_S = 1.0
LATE_FILES_S = 10.0  # How long the script's last word is waited for after the job: shared file systems show files late.
_LAST_WORDS = 1 << 14
MODULE = "dlbench.node.site_check"
# Says what it can whatever is missing, and ends with 0: with another code the launcher would end the other ranks.
_LOOK = """\
folder=$1
shift
rank=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${DLBENCH_RANK:-0}}}}
file=$folder/$(printf "rank-%04d" "$rank")
host=${SLURMD_NODENAME:-$(uname -n)}
if ! [ -d "$folder" ] || ! printf "%s\\n" "$host" >"$file.begun"; then
  echo "dlbench preflight: $host: $folder is not there, or cannot be written" >&2
  exit 0
fi
"$@" >"$file.log" 2>&1
code=$?
[ "$code" -eq 0 ] || printf "%s\\n" "$code" >"$file.failed"
exit 0
"""


def plan_of(system: SystemSpec, nodes: int, *, machine_cores: int, now: datetime) -> CommPlan:
    """The plan, which is that of a run of `dlbench comm`.

    `machine_cores`: cores of this machine, where the system leaves a node's cores open. Raises `UserError`: no run can
    be planned on such a system.
    """
    # Somebody waits for it: begun anew on other nodes it would mix what two sets of them said.
    system = system.model_copy(update={"slurm": system.slurm.model_copy(update={"requeue": False})})
    request = SeriesRequest(points=(nodes,), points_are="nodes")
    layout = request.layout(system, nodes, cores_per_rank=None, machine_cores=machine_cores)
    by_mpi = ("mpi",) if system.launch.by_mpi else ()
    name = f"preflight-{system.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return CommPlan(
        run_id=name,
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        dlbench_version=dlbench.__version__,
        layout=layout,
        system=system,
        # By all that a run on this system could exchange by; what is not installed there is said by the ranks.
        comm=CommSpec(
            backends=("nccl" if system.node.gpus else "gloo", *by_mpi),
            sizes=SIZES,
            warmup=1,
            iterations=3,
            timeout_s=_ITERATION_S,
            check=True,
        ),
        series=CommSeries(id=name[-64:], repeat=0, repeats=1, position=0),
        stall_timeout_s=_STALL_S,
    )


class PreflightJob(Job):
    """A job under another name than that of a run."""

    @property
    def name(self) -> str:
        return f"preflight-{self.shape.system.name}"


def job_of(plan: CommPlan) -> Job:
    """The job of a pre-flight: of a few minutes, or of the system's limit where that is shorter."""
    limit = limit_seconds(plan.system.slurm.time_limit) or JOB_S
    return PreflightJob(plans=(plan,), time_limit=time_text(min(limit, JOB_S)))


@dataclass(frozen=True, kw_only=True)
class Waited:
    """How waiting for a job came to its end."""

    end: Literal["ended", "pending", "running"]  # ended, or what it was when the time was over; it is cancelled then.
    seconds: float
    reason: str = ""  # Slurm's word for why it was pending.


def trial(job: Job, folder: PreflightFolder, environment: Mapping[str, str]) -> Finding:
    """What `sbatch --test-only` says to the arguments of the submission itself."""
    program, *arguments = sbatch_arguments(job, folder.run)
    subject = "sbatch --test-only"
    done = asked([program, "--test-only", *arguments], environment)
    if isinstance(done, str):
        return Finding(subject=subject, state="unknown", found=done)
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    if done.returncode != 0:
        why = re.sub(r"(sbatch|allocation failure): (error: )?", "", said)[:300] or f"ended with {done.returncode}"
        return Finding(subject=subject, state="wrong", found=why, remedy="change what it names")
    start = re.search(r"to start at (\S+) using", said)
    return Finding(subject=subject, state="ok", found=f"would start at {start[1]}" if start else "accepts the job")


def wait(
    job_id: str, folder: PreflightFolder, timeout_s: float, check: Callable[[], None], notify: Callable[[str], None]
) -> Waited:
    """Waits until the job has ended; cancels it after `timeout_s`, and where `check` raises.

    `folder`: of the pre-flight; its script says there when it ends. `timeout_s`: for all of it, in the queue and on the
    nodes. `check`: called while it waits; what it raises is passed on. `notify`: gets the state with its reason when it
    changes.
    """
    begun = time.monotonic()
    state = ""
    try:
        while not folder.ended.exists():
            check()
            queue = Slurm().query([job_id])
            active = queue.active(job_id)
            if not active and not queue.unanswered:
                deadline = time.monotonic() + LATE_FILES_S
                while time.monotonic() < deadline and not folder.ended.exists():
                    time.sleep(POLL_S / 5)
                break
            before = state
            if active:
                state = f"{active[0].state} ({active[0].reason})" if active[0].reason else active[0].state
            if state != before:
                notify(state)
            if time.monotonic() - begun > timeout_s:
                Slurm().cancel([job_id])
                is_pending = bool(active) and active[0].phase == "waiting"
                reason = active[0].reason if active else ""
                return Waited(end="pending" if is_pending else "running", seconds=timeout_s, reason=reason)
            time.sleep(POLL_S)
    except BaseException:
        Slurm().cancel([job_id])
        raise
    return Waited(end="ended", seconds=time.monotonic() - begun)


def render_preflight(job: Job, folder: PreflightFolder, python: str) -> str:
    """The exact text of `job.sbatch`; arguments as `dlbench.jobs.scripts.launch.render_job`."""
    plan = job.shape
    ranks_python = containers.python_of(plan, python)
    return render(
        "preflight.sbatch.j2",
        plan=plan,
        **told_options(job, folder.run),
        seen=folder.seen,
        variables=launch.rank_environment(plan),
        look=quoted(look_command(plan, folder, ranks_python)),
        exchange=quoted(launch.launcher_command(plan, words_of(folder.run), ranks_python)),
        is_job=True,
    )


def look_command(plan: LaunchPlan, folder: PreflightFolder, python: str) -> list[str]:
    """The command that a run would be started by, with the look in place of a rank.

    What each rank executes is a shell that a broken Python does not end, and in it the look under its supervisor.

    `plan`: of the pre-flight; its launcher is not `local`.
    """
    before = launch.before_rank(plan, words_of(folder.run))
    program = [python, "-P", "-m", "dlbench.supervisor", "-m", MODULE, str(folder.run.plan)]
    return [*before, "bash", "-c", _LOOK, "dlbench-preflight", str(folder.seen), *program]


def preflight(
    plan: CommPlan, folder: PreflightFolder, timeout_s: float, notify: Callable[[str], None], *, starts_job: bool = True
) -> PreflightReport:
    """Looks, and writes what it found into the folder, which is made.

    `folder`: absolute; not there yet. `timeout_s`: for the job, in the queue and on the nodes. `notify`: hears what
    happens now, a line each. `starts_job`: off: nothing is submitted or started.
    Raises `EnvironmentLacksError`: sbatch is not on PATH. `RunError`: the folder cannot be written.
    `KeyboardInterrupt`: on a signal; the job is cancelled.
    """
    Slurm().require()
    try:
        folder.seen.mkdir(parents=True)
    except OSError as error:
        raise refused(error, f"{folder.path}: cannot be made: {error.strerror or error}") from None
    write_atomic(folder.run.plan, plan.to_json())
    report = _looked(plan, folder, timeout_s, notify, starts_job=starts_job)
    write_json(folder.report, report.model_dump(mode="json"))
    return report


def _report(plan: CommPlan, **content: object) -> PreflightReport:
    head = {"id": plan.run_id, "system": plan.system.name, "created": plan.created}
    return PreflightReport.model_validate({**head, "dlbench_version": plan.dlbench_version, "exit_code": 0, **content})


def _looked(
    plan: CommPlan, folder: PreflightFolder, timeout_s: float, notify: Callable[[str], None], *, starts_job: bool
) -> PreflightReport:
    job = job_of(plan)
    write_atomic(folder.run.script, render_preflight(job, folder, sys.executable))
    tried = trial(job, folder, job_environment([plan]))
    if not starts_job or tried.state == "wrong":
        code = ExitCode.ENVIRONMENT if tried.state == "wrong" else ExitCode.OK
        return _report(plan, job=(tried,), exit_code=int(code))
    answer = Slurm().submit(job, sbatch_arguments(job, folder.run))
    if answer.doubt:
        with suppress(OSError, subprocess.TimeoutExpired):
            for cluster in job.shape.system.slurm.clusters or ("",):
                call(["scancel", *on_cluster(cluster), f"--name={job.name}", "--me"])
    if not answer.job_id:
        raise RunError(f"sbatch of {job.plans[0].run_id}: {answer.refusal or answer.doubt}")
    job_id = answer.job_id
    with Interruption() as interruption:
        waited = wait(job_id, folder, timeout_s, interruption.check, lambda state: notify(f"job {job_id}: {state}"))
    if waited.end != "ended":
        after = format_seconds(waited.seconds)
        if waited.end == "pending":
            why = f" ({waited.reason})" if waited.reason else ""
            found = f"{job_id} was pending{why} for {after} and was cancelled: nothing is known of the nodes"
            remedy = "--timeout with more seconds, another partition, or fewer --nodes"
            finding = Finding(subject="job", state="unknown", found=found, remedy=remedy)
            code = ExitCode.INCONCLUSIVE
        else:
            found = f"{job_id} had not ended after {after} and was cancelled: see {folder.path}/slurm-{job_id}.out"
            finding = Finding(subject="job", state="wrong", found=found)
            code = ExitCode.TIMEOUT
        nodes = judge(plan, folder, _hosts(folder)) if waited.end == "running" else ()
        content = {"job": (tried, finding), "nodes": nodes, "exclude": excluded(nodes)}
        return _report(plan, job_id=job_id, exit_code=int(code), **content)
    ran = Finding(subject="job", state="ok", found=f"{job_id} ended after {format_seconds(waited.seconds)}")
    # The look never ends badly by itself: what the script ended with is that of the part before it, or of the exchange.
    why = _script_failed(folder)
    if why and not any(folder.begun(rank).exists() for rank in range(plan.layout.ranks)):
        ran = Finding(subject="job", state="wrong", found=f"{job_id} reached no node's rank: {why}")
        return _report(plan, job_id=job_id, job=(tried, ran), exit_code=int(ExitCode.ENVIRONMENT))
    return _judged(plan, folder, (tried, ran), _hosts(folder), job_id)


def _script_failed(folder: PreflightFolder) -> str:
    code = ""
    with suppress(OSError, ValueError):
        code = read_text(folder.ended, 64).strip()
    if code == "0":
        return ""
    lines: list[str] = []
    for path in folder.path.glob("slurm-*.out"):
        with suppress(OSError):
            lines += read_end(path, _LAST_WORDS).decode("utf-8", "replace").splitlines()
    own = [line for line in lines if "dlbench: error:" in line or "dlbench preflight:" in line]
    last = next(reversed(own or [line for line in lines if line.strip()]), "")
    said = last.rpartition("dlbench: error: ")[2].strip()[:300]
    return f"its script ended with {code or 'no word of it'}" + (f": {said}" if said else "")


def _hosts(folder: PreflightFolder) -> list[str]:
    with suppress(OSError, ValueError):
        return read_text(folder.hosts, 1 << 20).split()
    return []


def _judged(
    plan: CommPlan, folder: PreflightFolder, before: tuple[Finding, ...], hosts: list[str], job_id: str
) -> PreflightReport:
    nodes = judge(plan, folder, hosts)
    silent = [node.host for node in nodes if len(node.ranks) < plan.layout.ranks_per_node]
    if silent:
        found = f"not tried, because {', '.join(silent[:3])}{' and others' * (len(silent) > 3)} could not look"
        exchange = Finding(subject="all-reduce", state="unknown", found=found)
        blamed: dict[str, str] = {}
    else:
        exchange, blamed = exchange_finding(plan, folder)
    nodes = tuple(
        node.model_copy(update={"problems": (*node.problems, f"all-reduce: {blamed[node.host]}")})
        if node.host in blamed
        else node
        for node in nodes
    )
    findings = (*before, exchange)
    num_failed = sum(bool(node.problems) for node in nodes)
    wrong = {finding.subject for finding in findings if finding.state == "wrong"}
    code = ExitCode.RUN_FAILED if num_failed or wrong else ExitCode.OK
    if num_failed == len(nodes) or (not num_failed and wrong - {"all-reduce", "look"}):
        code = ExitCode.ENVIRONMENT  # the same is lacking everywhere
    return _report(plan, job_id=job_id, job=findings, nodes=nodes, exclude=excluded(nodes), exit_code=int(code))
