"""The interface to Slurm's commands (sbatch, squeue, sacct, scontrol and scancel), which run with an environment that
does not depend on the submitting shell. Variables set options of sbatch, squeue, sacct and srun (sbatch(1), INPUT
ENVIRONMENT VARIABLES), with precedence over the script, and a shell inside a job has those of its own job. Only
variables that a client needs to reach its cluster are kept.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dlbench.errors import EnvironmentLacksError
from dlbench.jobs.scheduler import Answer, Queue, cluster_of
from dlbench.jobs.scripts.job import PLAIN_PATH, SUBMITTED, Job, let_through
from dlbench.jobs.scripts.launch import render_job, sbatch_arguments
from dlbench.jobs.slurm.accounting import ask
from dlbench.records.folder import RunFolder
from dlbench.specs.launch import ALL_VARIABLES
from dlbench.specs.plan import LaunchPlan

CALL_TIMEOUT_S = 60
_OPTIONS = re.compile(r"(SBATCH|SLURM|SLURMD|SQUEUE|SACCT|SALLOC|SRUN|SCANCEL|SINFO|SPRIO|SCONTROL)_.*")
_TO_REACH_THE_CLUSTER = re.compile(r"SLURM_(CONF|CONF_SERVER|CLUSTERS|JWT|SACK_\w+)")
"""Select the cluster and authenticate the user (slurm.conf(5) and Slurm's authentication)."""

# Messages of the controller (slurm_errno.c of Slurm) and of sbatch for a job that was refused. After any other failure,
# such as a timeout, the job may be queued.
_REFUSALS = (
    *("invalid partition", "no partition specified", "invalid account", "invalid qos", "invalid wckey"),
    *("access/permission denied", "access denied to requested reservation", "requested reservation is invalid"),
    *("user's group not permitted", "invalid feature specification", "invalid generic resource", "invalid license"),
    *("invalid node name", "node count specification invalid", "job size specification needs"),
    *("more processors requested than permitted", "memory required by task is not available"),
    *("requested nodes not in this partition", "requested node configuration is not available"),
    *("requested partition configuration not available", "required node not available"),
    *("required partition not available", "requested time limit is invalid", "job violates accounting/qos policy"),
    *("job dependency problem", "invalid job id", "invalid job array", "pathname of a file, directory"),
    *("could not establish a configuration source", "unable to process configuration file"),
    *("unrecognized option", "unable to open file", "does not look like a batch script", "batch script is empty"),
)
_IDS_PER_SCANCEL = 5_000  # Stays far below Linux's limit on the length of arguments.


def call(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, keep_open: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a program of Slurm and captures its output. Raises OSError, or subprocess.TimeoutExpired."""
    if environment is None:
        environment = client_environment()
    return subprocess.run(
        command,
        # Found by the PATH of this process, whatever PATH the program gets.
        executable=shutil.which(command[0]),
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=CALL_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        # In a new session, because neither Ctrl-C nor a closing terminal may interrupt a submission.
        start_new_session=True,
        pass_fds=keep_open,
    )


def asked(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, name: str = ""
) -> subprocess.CompletedProcess[str] | str:
    """Runs a program of Slurm; returns the finished process, whatever its exit code, or why it gave no answer."""
    name = name or command[0]
    try:
        return call(command, environment)
    except subprocess.TimeoutExpired as late:
        return f"{name} gave no answer within {late.timeout:g} s"
    except OSError as error:
        return f"{name} cannot be started: {error.strerror or error}"


def on_cluster(cluster: str) -> list[str]:
    """Returns the option that selects a cluster; none for the local cluster, whose name is empty."""
    return [f"--clusters={cluster}"] if cluster else []


def client_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables without those that set options of Slurm's programs or describe a surrounding job."""
    return {
        name: value
        for name, value in variables.items()
        if not _OPTIONS.fullmatch(name) or _TO_REACH_THE_CLUSTER.fullmatch(name)
    }


def job_environment(plans: Sequence[LaunchPlan], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment of sbatch, which a job inherits: the variables that slurm.export names."""
    client = client_environment(variables)
    slurm = plans[0].system.slurm
    if slurm.clusters:
        # sbatch would prefer it to --clusters in the script.
        client.pop("SLURM_CLUSTERS", None)
    if slurm.exports_all:
        return client
    names = let_through(plans)
    chosen = {name: value for name, value in client.items() if name in names or _TO_REACH_THE_CLUSTER.fullmatch(name)}
    # A plain PATH, extended by the folder of Slurm's programs.
    path = PLAIN_PATH
    sbatch = shutil.which("sbatch", path=client.get("PATH"))
    if sbatch is not None and str(Path(sbatch).parent) not in PLAIN_PATH.split(":"):
        path = f"{Path(sbatch).parent}:{PLAIN_PATH}"
    user_variables = {}
    with suppress(KeyError):  # a user without an entry, as in some containers
        user = pwd.getpwuid(os.getuid())
        user_variables = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    # A referenced variable that is not set here may still be set in the job.
    return {"PATH": path, **user_variables, **chosen}


def exported_names(plans: Sequence[LaunchPlan]) -> tuple[str, ...]:
    """Returns the names of the variables of `job_environment`, or `ALL` if slurm.export passes all on."""
    if plans[0].system.slurm.exports_all:
        return (ALL_VARIABLES,)
    return tuple(sorted(job_environment(plans)))


class Slurm:
    """Submits, lists and cancels jobs; tests use a substitute."""

    def require(self) -> None:
        """Raises `EnvironmentLacksError` if sbatch is not on PATH."""
        if shutil.which("sbatch") is None:
            raise EnvironmentLacksError(
                "sbatch is not on PATH; submit from a login node of the cluster, or use --dry-run"
            )

    def render(self, job: Job, folders: Sequence[RunFolder], python: str, comment: str) -> str:
        """Returns the batch script of a job; `comment`: identifies it in the queue."""
        return render_job(job, folders, python, comment)

    def command(self, job: Job, folder: RunFolder, after: str | None, comment: str) -> list[str]:
        """Returns the command that submits a script; `after`: id of the job that must have ended before, or None."""
        if after is not None:
            after = after.partition(";")[0]
        return sbatch_arguments(job, folder, after, comment)

    def variables(self, job: Job) -> Sequence[str]:
        """Returns the names of the environment variables that a job is given."""
        return exported_names(job.plans)

    def clusters(self, job: Job) -> Sequence[str]:
        """Returns the names of the clusters that a job may run on; an empty name is the local cluster."""
        return job.shape.system.slurm.clusters or ("",)

    def submit(self, job: Job, command: Sequence[str], keep_open: Sequence[int] = ()) -> Answer:
        """Runs the submission command; returns the job id, or why the job was refused or may be queued. `keep_open`:
        file descriptors that sbatch inherits: it holds the lock of the series even if dlbench is killed.
        """
        try:
            done = call(command, {**job_environment(job.plans), SUBMITTED: "1"}, keep_open=keep_open)
        except subprocess.TimeoutExpired as late:
            return Answer(doubt=f"sbatch gave no answer within {late.timeout:g} s")
        except OSError as error:
            return Answer(refusal=f"it cannot be started: {error.strerror or error}")
        # A wrapper of the site named sbatch may print more than the id, even other numbers: then the queue decides.
        lines = [line.strip() for line in done.stdout.splitlines()]
        job_ids = {line for line in lines if re.fullmatch(r"\d+(;\S+)?", line)}
        if done.returncode == 0:
            if len(job_ids) == 1:
                return Answer(job_id=job_ids.pop())
            return Answer(doubt=f"sbatch gave an unexpected answer ({done.stdout.strip()!r:.200})")
        message = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
        reason = message.lower().rpartition("batch job submission failed:")[2]
        if not job_ids and "timed out" not in reason and any(refusal in reason for refusal in _REFUSALS):
            return Answer(refusal=message, is_full="job submit limit" in reason or "maxsubmitjob" in message.lower())
        return Answer(doubt=f"sbatch failed: {message:.300}")

    def query(self, job_ids: Sequence[str] = (), users: Sequence[str] = (), clusters: Sequence[str] = ()) -> Queue:
        """Returns this user's jobs and those of `users`; `job_ids`: to ask sacct for if squeue lacks them."""
        return ask(job_ids, users, clusters)

    def script(self, job_id: str) -> str:
        """Returns the batch script of a job, or of the array of an element, from scontrol; empty if it fails."""
        bare_id, _, cluster = job_id.partition(";")
        array_id = bare_id.partition("_")[0]
        done = asked(["scontrol", *on_cluster(cluster), "write", "batch_script", array_id, "-"])
        if isinstance(done, str) or done.returncode:
            return ""
        return done.stdout

    def cancel(self, job_ids: Sequence[str]) -> str:
        """Cancels jobs; returns the errors of scancel, empty if there were none."""
        ids_by_cluster: dict[str, list[str]] = {}
        for job_id in job_ids:
            ids_by_cluster.setdefault(cluster_of(job_id), []).append(job_id.partition(";")[0])
        problems = []
        for cluster, ids in ids_by_cluster.items():
            for start in range(0, len(ids), _IDS_PER_SCANCEL):
                done = asked(["scancel", *on_cluster(cluster), *ids[start : start + _IDS_PER_SCANCEL]])
                if isinstance(done, str):
                    problems.append(done)
                elif done.returncode != 0:
                    problems.append(" ".join(done.stderr.split())[:300] or f"scancel ended with {done.returncode}")
        return "; ".join(filter(None, problems))
