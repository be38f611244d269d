"""A whole pre-flight: static findings, the job or the look at this machine, the verdict, the file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dlbench.errors import ExitCode, StalledError, refused
from dlbench.jobs.interruption import Interruption
from dlbench.jobs.preflight import job as jobs
from dlbench.jobs.preflight.here import exchange_here, look_here
from dlbench.jobs.preflight.plan import job_of
from dlbench.jobs.preflight.static import static_findings
from dlbench.jobs.preflight.verdict import exchange_finding, excluded, judge
from dlbench.jobs.slurm.environment import job_environment
from dlbench.jobs.slurm.sbatch import require_slurm
from dlbench.opening import read_end, read_text
from dlbench.records.answers.preflight import Finding, PreflightFolder, PreflightNode, PreflightReport
from dlbench.records.files import write_atomic, write_json
from dlbench.specs.collectives.plan import CommPlan
from dlbench.units import format_seconds

_LAST_WORDS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a person asks of a pre-flight."""

    timeout_s: float
    """For the job, in the queue and on the nodes."""
    starts_job: bool = True
    """Off: nothing is submitted or started."""


def preflight(plan: CommPlan, folder: PreflightFolder, asked: Asked, tell: Callable[[str], None]) -> PreflightReport:
    """Looks, and writes what it found into the folder, which is made.

    Args:
        plan: of the pre-flight.
        folder: absolute; not there yet.
        asked: by the person.
        tell: told what happens now, a line each.

    Raises:
        EnvironmentLacksError: sbatch is not on PATH.
        RunError: the folder cannot be written.
        KeyboardInterrupt: on a signal; the job is cancelled.
    """
    on_slurm = plan.system.scheduler == "slurm"
    if on_slurm:
        require_slurm()
    try:
        folder.seen.mkdir(parents=True)
    except OSError as error:
        raise refused(error, f"{folder.path}: cannot be made: {error.strerror or error}") from None
    write_atomic(folder.run.plan, plan.to_json())
    report = _on_slurm(plan, folder, asked, tell) if on_slurm else _here(plan, folder, asked, tell)
    write_json(folder.report, report.model_dump(mode="json"))
    return report


def _report(plan: CommPlan, **found: object) -> PreflightReport:
    content = {"id": plan.run_id, "system": plan.system.name, "created": plan.created}
    return PreflightReport.model_validate({**content, "dlbench_version": plan.dlbench_version, "exit_code": 0, **found})


def _on_slurm(plan: CommPlan, folder: PreflightFolder, asked: Asked, tell: Callable[[str], None]) -> PreflightReport:
    environment = job_environment([plan])
    job = job_of(plan)
    jobs.write_script(job, folder, sys.executable)
    static = (*static_findings(plan), jobs.trial(job, folder, environment))
    lacks = any(one.state == "wrong" for one in static)
    if not asked.starts_job or static[-1].state == "wrong":
        return _report(plan, static=static, exit_code=int(ExitCode.ENVIRONMENT if lacks else ExitCode.OK))
    job_id = jobs.submit_preflight(job, folder, environment)
    with Interruption() as interruption:
        waited = jobs.wait(
            job_id, folder, asked.timeout_s, interruption.check, lambda state: tell(f"job {job_id}: {state}")
        )
    if waited.end != "ended":
        finding, code = _given_up(job_id, waited, folder)
        nodes = judge(plan, folder, _hosts(folder)) if waited.end == "running" else ()
        return _report(
            plan,
            static=static,
            job_id=job_id,
            job=(finding,),
            nodes=nodes,
            exclude=excluded(nodes),
            exit_code=int(code),
        )
    ran = Finding(subject="job", state="ok", found=f"{job_id} ended after {format_seconds(waited.seconds)}")
    # The look never ends badly by itself: what the script ended with is that of the part before it, or of the exchange.
    told = _script_failed(folder)
    if told and not any(folder.begun(rank).exists() for rank in range(plan.layout.ranks)):
        ran = Finding(subject="job", state="wrong", found=f"{job_id} reached no node's rank: {told}")
        return _report(plan, static=static, job_id=job_id, job=(ran,), exit_code=int(ExitCode.ENVIRONMENT))
    return _judged(plan, folder, static=static, job_id=job_id, before=(ran,), hosts=_hosts(folder))


def _given_up(job_id: str, waited: jobs.Waited, folder: PreflightFolder) -> tuple[Finding, ExitCode]:
    after = format_seconds(waited.seconds)
    if waited.end == "pending":
        why = f" ({waited.reason})" if waited.reason else ""
        found = f"{job_id} was pending{why} for {after} and was cancelled: nothing is known of the nodes"
        remedy = "--timeout with more seconds, another partition, or fewer --nodes"
        return Finding(subject="job", state="unknown", found=found, remedy=remedy), ExitCode.INCONCLUSIVE
    found = f"{job_id} had not ended after {after} and was cancelled: see {folder.path}/slurm-{job_id}.out"
    return Finding(subject="job", state="wrong", found=found), ExitCode.TIMEOUT


def _script_failed(folder: PreflightFolder) -> str:
    """The last word of a script that ended badly; empty where it did not."""
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


def _here(plan: CommPlan, folder: PreflightFolder, asked: Asked, tell: Callable[[str], None]) -> PreflightReport:
    if not asked.starts_job:
        return _report(plan)
    for rank in range(plan.layout.ranks):
        folder.begun(rank).touch()
    tell(f"{plan.layout.ranks} rank{'s' * (plan.layout.ranks > 1)} on this machine")
    before: tuple[Finding, ...] = ()
    try:
        look_here(plan, folder, asked.timeout_s)
    except StalledError as error:
        before = (Finding(subject="look", state="wrong", found=str(error)),)
    if not before and plan.layout.ranks > 1 and all(folder.rank(one).exists() for one in range(plan.layout.ranks)):
        exchange_here(plan, folder)
    return _judged(plan, folder, static=(), job_id="", before=before, hosts=[os.uname().nodename])


def _judged(
    plan: CommPlan,
    folder: PreflightFolder,
    *,
    static: tuple[Finding, ...],
    job_id: str,
    before: tuple[Finding, ...],
    hosts: list[str],
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
    findings = (*before, exchange, *_without_gpus(plan, nodes))
    code = _exit_code(nodes, [*static, *findings])
    return _report(
        plan, static=static, job_id=job_id, job=findings, nodes=nodes, exclude=excluded(nodes), exit_code=int(code)
    )


def _without_gpus(plan: CommPlan, nodes: tuple[PreflightNode, ...]) -> tuple[Finding, ...]:
    """That nothing is known of GPUs, where there are none."""
    if plan.system.node.gpus or any(rank.node_gpus or rank.gpu for node in nodes for rank in node.ranks):
        return ()
    return (Finding(subject="GPUs", state="unknown", found="not measured here: no node has one"),)


def _exit_code(nodes: tuple[PreflightNode, ...], findings: list[Finding]) -> ExitCode:
    """3: some nodes failed, and others did not, or they cannot exchange. 5: the same lacks everywhere."""
    failed = [node for node in nodes if node.problems]
    if 0 < len(failed) < len(nodes):
        return ExitCode.RUN_FAILED
    if failed or any(one.state == "wrong" and one.subject not in ("all-reduce", "look") for one in findings):
        return ExitCode.ENVIRONMENT
    return ExitCode.RUN_FAILED if any(one.state == "wrong" for one in findings) else ExitCode.OK
