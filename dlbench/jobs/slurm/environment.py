"""Runs Slurm's programs with an environment that does not depend on the submitting shell. Variables set options of
sbatch, squeue, sacct and srun (sbatch(1), INPUT ENVIRONMENT VARIABLES), with precedence over the script, and a shell
inside a job has those of its own job. Only variables that a client needs to reach its cluster are kept.
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

from dlbench.jobs.scripts.job import PLAIN_PATH, let_through
from dlbench.specs.launch import ALL_VARIABLES
from dlbench.specs.plan import LaunchPlan

CALL_TIMEOUT_S = 60

_OPTIONS = re.compile(r"(SBATCH|SLURM|SLURMD|SQUEUE|SACCT|SALLOC|SRUN|SCANCEL|SINFO|SPRIO|SCONTROL)_.*")
_TO_REACH_THE_CLUSTER = re.compile(r"SLURM_(CONF|CONF_SERVER|CLUSTERS|JWT|SACK_\w+)")
"""Select the cluster and authenticate the user (slurm.conf(5) and Slurm's authentication)."""


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
