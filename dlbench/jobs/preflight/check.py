"""Runs a pre-flight: sbatch --test-only, a short job that checks its nodes, and the report, which judges each node by
the reports of its ranks: usable, doubtful, or to be excluded.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import dlbench
from dlbench.errors import ExitCode, IncompleteDataError, RunError, refused
from dlbench.jobs.processes import Interruption
from dlbench.jobs.scripts import containers, launch
from dlbench.jobs.scripts.containers import quoted, words_of
from dlbench.jobs.scripts.job import Job, limit_seconds, render, time_text
from dlbench.jobs.scripts.launch import sbatch_arguments, script_options
from dlbench.jobs.slurm.environment import asked, call, job_environment, on_cluster
from dlbench.jobs.slurm.scheduler import Slurm
from dlbench.opening import read_bytes, read_end, read_json, why_unreadable
from dlbench.records.comm import read_comm_run
from dlbench.records.files import write_atomic, write_json
from dlbench.records.folder import MAX_JSON
from dlbench.records.preflight import Finding, PreflightFolder, PreflightNode, PreflightReport, SeenRank
from dlbench.specs.comm import CommPlan, CommSeries, CommSpec
from dlbench.specs.launch import compressed
from dlbench.specs.plan import LaunchPlan
from dlbench.specs.requests import SeriesRequest
from dlbench.specs.system import SystemSpec
from dlbench.units import counted, format_seconds, plural

_RANK_LOG_END_BYTES = 4096
_REQUIRED = ("torch", "numpy")  # Packages without which no run can start.
JOB_S = 300  # Time limit of the job in seconds: it takes a minute, or longer if a file system loads libraries slowly.
SIZES = (1024, 1 << 20)  # Bytes of the vectors: libraries send the first at once, and the second in pieces.
_ITERATION_S = 30.0
_STALL_S = 120.0
POLL_S = 1.0
LATE_FILES_S = 10.0  # Seconds to wait for the script's last file after the job: shared file systems show files late.
_LOG_END_BYTES = 1 << 14
MODULE = "dlbench.node.site_check"
# Writes what it can, and always ends with 0: after another exit code the launcher would end the other ranks.
_CHECK_SCRIPT = """\
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


def judge(plan: CommPlan, folder: PreflightFolder, hosts: Sequence[str]) -> tuple[PreflightNode, ...]:
    """Returns the nodes in the order of their ranks; `hosts`: their names, as far as they are known."""
    per_node = plan.layout.ranks_per_node
    reports = [_rank_report(folder, rank) for rank in range(plan.layout.ranks)]
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # Ranks by package and version.
    for report in reports:
        if isinstance(report, SeenRank):
            for package, version in report.versions.items():
                counts[package][version] += 1
    common_versions = {package: versions.most_common(1)[0][0] for package, versions in counts.items()}
    nodes = []
    for number in range(plan.layout.nodes):
        ranks = range(number * per_node, (number + 1) * per_node)
        node_reports = [reports[rank] for rank in ranks]
        seen_ranks = [report for report in node_reports if isinstance(report, SeenRank)]
        problems = [report for report in node_reports if isinstance(report, str)]
        problems += _problems(plan, seen_ranks, common_versions)
        nodes.append(
            PreflightNode(
                host=_host(folder, ranks, reports) or next(iter(hosts[number:]), f"node {number + 1}"),
                ranks=tuple(seen_ranks),
                problems=tuple(dict.fromkeys(problems)),
                doubts=tuple(dict.fromkeys(_doubts(plan, seen_ranks))),
            )
        )
    return tuple(nodes)


def _rank_report(folder: PreflightFolder, rank: int) -> SeenRank | str:
    try:
        return SeenRank.model_validate(read_json(folder.rank(rank), MAX_JSON))
    except FileNotFoundError:
        code = _text(folder.failed(rank))
        message = ""
        with suppress(OSError):
            log_end = read_end(folder.log(rank), _RANK_LOG_END_BYTES).decode("utf-8", "replace").strip()
            message = next(reversed(log_end.splitlines()), "").removeprefix("dlbench: error: ")[:300]
        if code or message:
            return f"the ranks' Python ended with {code or 'an error'}: {message or 'no message'}"
        if not folder.begun(rank).exists():
            return f"nothing was written to {folder.seen}: the folder does not exist there, or the rank did not start"
        return "its rank was ended during the check"
    except (OSError, ValueError) as error:
        return f"{folder.rank(rank).name}: damaged: {why_unreadable(error)}"


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return read_bytes(path, 1 << 20).decode("utf-8", "replace").strip()
    return ""


def _host(folder: PreflightFolder, ranks: range, reports: Sequence[SeenRank | str]) -> str:
    for rank in ranks:
        report = reports[rank]
        if isinstance(report, SeenRank):
            return report.host
        if host := _text(folder.begun(rank)):
            return host
    return ""


def _problems(plan: CommPlan, ranks: Sequence[SeenRank], common_versions: Mapping[str, str]) -> Iterator[str]:
    for rank in ranks:
        yield from rank.problems
        for package, error in rank.broken.items():
            if package in _REQUIRED:
                yield f"{package} does not import: {error}"
        dlbench_version = rank.versions.get("dlbench", "")
        if dlbench_version != plan.dlbench_version:
            yield f"dlbench {dlbench_version} there, {plan.dlbench_version} here: install the same ({rank.python})"
        for package, common_version in common_versions.items():
            version = rank.versions.get(package)
            if package != "dlbench" and version != common_version:
                yield f"{package} {version or 'is not installed'}, other nodes have {common_version}"
        yield from (tier.problem for tier in rank.scratch if tier.problem)
    ranks_by_gpu = Counter(rank.gpu for rank in ranks if rank.gpu is not None)
    yield from (f"{count} ranks share GPU {uuid}" for uuid, count in ranks_by_gpu.items() if count > 1)
    visible_gpus = {uuid for rank in ranks for uuid in rank.node_gpus}
    num_gpus = max(len(visible_gpus), len(ranks_by_gpu))
    num_needed = plan.system.node.gpus
    if plan.system.slurm.gpu_count == "ranks":  # the job requests only one GPU per rank
        num_needed = min(num_needed, len(ranks))
    if ranks and num_gpus < num_needed:
        yield f"{num_gpus} of {num_needed} GPUs"


def _doubts(plan: CommPlan, ranks: Sequence[SeenRank]) -> Iterator[str]:
    ranks_by_core: Counter[int] = Counter(core for rank in ranks for core in rank.cores)
    num_needed = plan.layout.cores_per_rank
    num_shared = sum(count > 1 for count in ranks_by_core.values())
    least_cores = min((len(rank.cores) for rank in ranks), default=num_needed)
    if plan.system.launch.pin and num_shared:
        yield f"ranks share {counted(num_shared, 'core')}"
    elif least_cores < num_needed:
        yield f"{counted(least_cores, 'core')} of the {num_needed} that each rank should have"
    if remote := [str(rank.local_rank) for rank in ranks if rank.near_gpu is False]:
        local_ranks = f"{plural('local rank', len(remote))} {', '.join(remote)}"
        yield f"cores of {local_ranks} are not on the NUMA node of the GPU: see slurm.cpu_bind"
    for rank in ranks:
        for package, error in rank.broken.items():
            if package not in _REQUIRED:
                yield f"{package} does not import: {error}"
        if rank.compiler:
            yield f"train.compile and fused LAMB and LARS fail there: {rank.compiler}"


def exchange_finding(plan: CommPlan, folder: PreflightFolder) -> tuple[Finding, dict[str, str]]:
    """Returns the result of the all-reduce, and the problems of single hosts in it."""
    subject = "all-reduce"
    if plan.layout.ranks == 1:
        return Finding(subject=subject, state="unknown", found="not possible with one rank"), {}
    try:
        run = read_comm_run(folder.path)
    except IncompleteDataError as error:
        return Finding(subject=subject, state="wrong", found=str(error)), {}
    if run.record is None:
        reasons = {status.host: status.reason for status in run.statuses if status.failure == "own" and status.reason}
        if len(reasons) == run.plan.layout.nodes:  # all nodes fail, so that no single one is to blame
            reasons = {}
        return Finding(subject=subject, state="wrong", found=run.detail), reasons
    if run.record.state != "valid":
        return Finding(subject=subject, state="wrong", found=run.detail), {}
    carriers = ", ".join(dict.fromkeys(point.carrier for point in run.record.points if point.times_s))
    text = f"correct sums over {plan.layout.ranks} ranks by {carriers}"
    if run.record.not_measured:
        text += f"; not measured here: {'; '.join(run.record.not_measured)}"
    return Finding(subject=subject, state="ok", found=text), {}


def excluded(nodes: Sequence[PreflightNode]) -> str:
    """Returns the nodes to exclude as a host list; empty if all failed, because then the nodes are not the cause."""
    failed = [node.host for node in nodes if node.problems]
    return compressed(failed) if len(failed) < len(nodes) else ""


def plan_of(system: SystemSpec, nodes: int, *, machine_cores: int, now: datetime) -> CommPlan:
    """Returns the plan of the job's all-reduce. Raises `UserError`: no run can be planned on such a system."""
    # After a requeue the files of two sets of nodes would be mixed, and the user waits anyway.
    system = system.model_copy(update={"slurm": system.slurm.model_copy(update={"requeue": False})})
    request = SeriesRequest(points=(nodes,), points_are="nodes")
    layout = request.layout(system, nodes, cores_per_rank=None, machine_cores=machine_cores)
    # All backends that a run on this system could use; the ranks report those that are not installed.
    backends: list[Literal["gloo", "mpi", "nccl"]] = ["nccl" if system.node.gpus else "gloo"]
    if system.launch.by_mpi:
        backends.append("mpi")
    name = f"preflight-{system.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return CommPlan(
        run_id=name,
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        dlbench_version=dlbench.__version__,
        layout=layout,
        system=system,
        comm=CommSpec(
            backends=tuple(backends), sizes=SIZES, warmup=1, iterations=3, timeout_s=_ITERATION_S, check=True
        ),
        series=CommSeries(id=name[-64:], repeat=0, repeats=1, position=0),
        stall_timeout_s=_STALL_S,
    )


class PreflightJob(Job):
    """A job whose name says that it is a pre-flight."""

    @property
    def name(self) -> str:
        return f"preflight-{self.shape.system.name}"


def job_of(plan: CommPlan) -> Job:
    """Returns the job of a pre-flight, with the system's time limit if that is shorter than `JOB_S`."""
    limit = limit_seconds(plan.system.slurm.time_limit) or JOB_S
    return PreflightJob(plans=(plan,), time_limit=time_text(min(limit, JOB_S)))


@dataclass(frozen=True, kw_only=True)
class Waited:
    """The result of waiting for a job."""

    end: Literal["ended", "pending", "running"]  # ended, or its state at the timeout, after which it was cancelled.
    seconds: float  # Time spent waiting.
    reason: str = ""  # Slurm's word for why it was pending.


def trial(job: Job, folder: PreflightFolder, environment: Mapping[str, str]) -> Finding:
    """Runs `sbatch --test-only` with the arguments of the submission."""
    program, *arguments = sbatch_arguments(job, folder.run)
    subject = "sbatch --test-only"
    done = asked([program, "--test-only", *arguments], environment)
    if isinstance(done, str):
        return Finding(subject=subject, state="unknown", found=done)
    output = " ".join(f"{done.stdout} {done.stderr}".split())
    if done.returncode != 0:
        message = re.sub(r"(sbatch|allocation failure): (error: )?", "", output)[:300]
        problem = message or f"ended with {done.returncode}"
        return Finding(subject=subject, state="wrong", found=problem, remedy="change the option that it names")
    start = re.search(r"to start at (\S+) using", output)
    if start is None:
        return Finding(subject=subject, state="ok", found="accepts the job")
    return Finding(subject=subject, state="ok", found=f"would start at {start[1]}")


def wait(
    job_id: str, folder: PreflightFolder, timeout_s: float, check: Callable[[], None], notify: Callable[[str], None]
) -> Waited:
    """Waits until the job has ended; cancels it after `timeout_s`, pending and running, or if `check` raises."""
    begin = time.monotonic()
    state_text = ""
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
            end: Literal["pending", "running"] = "running"
            reason = ""
            if active:
                job = active[0]
                reason = job.reason
                if job.phase == "waiting":
                    end = "pending"
                last_text = state_text
                state_text = f"{job.state} ({reason})" if reason else job.state
                if state_text != last_text:
                    notify(state_text)
            if time.monotonic() - begin > timeout_s:
                Slurm().cancel([job_id])
                return Waited(end=end, seconds=timeout_s, reason=reason)
            time.sleep(POLL_S)
    except BaseException:
        Slurm().cancel([job_id])
        raise
    return Waited(end="ended", seconds=time.monotonic() - begin)


def render_preflight(job: Job, folder: PreflightFolder, python: str) -> str:
    """Returns the text of `job.sbatch`; arguments as `dlbench.jobs.scripts.launch.render_job`."""
    plan = job.shape
    ranks_python = containers.python_of(plan, python)
    return render(
        "preflight.sbatch.j2",
        plan=plan,
        **script_options(job, folder.run),
        seen=folder.seen,
        variables=launch.rank_environment(plan),
        look=quoted(check_command(plan, folder, ranks_python)),
        exchange=quoted(launch.launcher_command(plan, words_of(folder.run), ranks_python)),
        is_job=True,
    )


def check_command(plan: LaunchPlan, folder: PreflightFolder, python: str) -> list[str]:
    """Returns the command that checks the nodes: each rank executes a shell, which also works if Python is broken."""
    before = launch.before_rank(plan, words_of(folder.run))
    program = [python, "-P", "-m", "dlbench.supervisor", "-m", MODULE, str(folder.run.plan)]
    return [*before, "bash", "-c", _CHECK_SCRIPT, "dlbench-preflight", str(folder.seen), *program]


def preflight(
    plan: CommPlan, folder: PreflightFolder, timeout_s: float, notify: Callable[[str], None], *, starts_job: bool = True
) -> PreflightReport:
    """Runs the pre-flight and writes its report into the folder. Raises `EnvironmentLacksError`: sbatch is not on PATH.
    `RunError`: the folder cannot be written. `KeyboardInterrupt`: on a signal; the job is cancelled.
    """
    Slurm().require()
    try:
        folder.seen.mkdir(parents=True)
    except OSError as error:
        raise refused(error, f"{folder.path}: cannot be made: {error.strerror or error}") from None
    write_atomic(folder.run.plan, plan.to_json())
    report = _checked(plan, folder, timeout_s, notify, starts_job=starts_job)
    write_json(folder.report, report.model_dump(mode="json"))
    return report


def _report(plan: CommPlan, **content: object) -> PreflightReport:
    head = {"id": plan.run_id, "system": plan.system.name, "created": plan.created}
    return PreflightReport.model_validate({**head, "dlbench_version": plan.dlbench_version, "exit_code": 0, **content})


def _checked(
    plan: CommPlan, folder: PreflightFolder, timeout_s: float, notify: Callable[[str], None], *, starts_job: bool
) -> PreflightReport:
    job = job_of(plan)
    write_atomic(folder.run.script, render_preflight(job, folder, sys.executable))
    test_finding = trial(job, folder, job_environment([plan]))
    if test_finding.state == "wrong":
        return _report(plan, job=(test_finding,), exit_code=int(ExitCode.ENVIRONMENT))
    if not starts_job:
        return _report(plan, job=(test_finding,), exit_code=int(ExitCode.OK))
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
    duration = format_seconds(waited.seconds)
    if waited.end == "pending":
        reason = f" ({waited.reason})" if waited.reason else ""
        job_finding = Finding(
            subject="job",
            state="unknown",
            found=f"{job_id} was pending{reason} for {duration} and was cancelled: no node was checked",
            remedy="--timeout with more seconds, another partition, or fewer --nodes",
        )
        job_findings = (test_finding, job_finding)
        return _report(plan, job_id=job_id, exit_code=int(ExitCode.INCONCLUSIVE), job=job_findings)
    if waited.end == "running":
        problem = f"{job_id} had not ended after {duration} and was cancelled: see {folder.path}/slurm-{job_id}.out"
        job_findings = (test_finding, Finding(subject="job", state="wrong", found=problem))
        nodes = judge(plan, folder, _text(folder.hosts).split())
        content = {"job": job_findings, "nodes": nodes, "exclude": excluded(nodes)}
        return _report(plan, job_id=job_id, exit_code=int(ExitCode.TIMEOUT), **content)
    # The check of a node always ends with 0, so that a failure comes from the part before it or from the all-reduce.
    problem = _script_problem(folder)
    if problem and not any(folder.begun(rank).exists() for rank in range(plan.layout.ranks)):
        problem = f"{job_id} started no rank: {problem}"
        job_findings = (test_finding, Finding(subject="job", state="wrong", found=problem))
        return _report(plan, job_id=job_id, job=job_findings, exit_code=int(ExitCode.ENVIRONMENT))
    job_finding = Finding(subject="job", state="ok", found=f"{job_id} ended after {duration}")
    return _judged(plan, folder, (test_finding, job_finding), job_id)


def _script_problem(folder: PreflightFolder) -> str:
    code = _text(folder.ended)
    if code == "0":
        return ""
    lines: list[str] = []
    for path in folder.path.glob("slurm-*.out"):
        with suppress(OSError):
            lines += read_end(path, _LOG_END_BYTES).decode("utf-8", "replace").splitlines()
    problem = f"its script ended with {code}" if code else "its script did not write its exit code"
    own_errors = [line for line in lines if "dlbench: error:" in line or "dlbench preflight:" in line]
    last_line = next(reversed(own_errors or [line for line in lines if line.strip()]), "")
    message = last_line.rpartition("dlbench: error: ")[2].strip()[:300]
    return f"{problem}: {message}" if message else problem


def _judged(plan: CommPlan, folder: PreflightFolder, before: tuple[Finding, ...], job_id: str) -> PreflightReport:
    nodes = []
    all_reduce_problems: dict[str, str] = {}  # By host.
    judged = judge(plan, folder, _text(folder.hosts).split())
    unchecked = [node.host for node in judged if len(node.ranks) < plan.layout.ranks_per_node]
    if unchecked:
        names = ", ".join(unchecked[:3])
        if len(unchecked) > 3:
            names += " and others"
        problem = f"not tried, because the check of {names} failed"
        all_reduce = Finding(subject="all-reduce", state="unknown", found=problem)
    else:
        all_reduce, all_reduce_problems = exchange_finding(plan, folder)
    for node in judged:
        if node.host in all_reduce_problems:
            problems = (*node.problems, f"all-reduce: {all_reduce_problems[node.host]}")
            node = node.model_copy(update={"problems": problems})
        nodes.append(node)
    findings = (*before, all_reduce)
    num_failed = sum(bool(node.problems) for node in nodes)
    wrong = {finding.subject for finding in findings if finding.state == "wrong"}
    code = ExitCode.OK
    if num_failed == len(nodes) or (not num_failed and wrong - {"all-reduce"}):
        code = ExitCode.ENVIRONMENT  # the same problem on all nodes
    elif num_failed or wrong:
        code = ExitCode.RUN_FAILED
    return _report(plan, job_id=job_id, job=findings, nodes=tuple(nodes), exclude=excluded(nodes), exit_code=int(code))
