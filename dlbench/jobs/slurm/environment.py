"""The environment that Slurm's programs get: not that of the shell which happens to submit.

Options of sbatch, squeue, sacct and srun can be given by variables, too (sbatch(1), INPUT ENVIRONMENT VARIABLES), and
beat what stands in a script; inside of a job, a notebook or a CI runner that is itself a job, the shell has Slurm's
settings for that one. What a client needs to reach its cluster stays.
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
"""Which cluster it is, and who asks; of slurm.conf(5) and of Slurm's authentication."""


def call(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, keep_open: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a program of Slurm and keeps what it says.

    `environment`: its variables; None: those of this process without what Slurm's programs take for options.
    `keep_open`: descriptors that it inherits.
    Raises `OSError`: it cannot be started. subprocess.TimeoutExpired: no answer within `CALL_TIMEOUT_S`.
    """
    return subprocess.run(
        command,
        # As this process finds it, whatever PATH it gets.
        executable=shutil.which(command[0]),
        env=client_environment() if environment is None else environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=CALL_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        # Of its own session: neither Ctrl-C nor a terminal that closes may cut off a submission.
        start_new_session=True,
        pass_fds=keep_open,
    )


def asked(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, name: str = ""
) -> subprocess.CompletedProcess[str] | str:
    """What a program of Slurm says, whatever its exit code; or why it gave no answer at all, in a few words."""
    name = name or command[0]
    try:
        return call(command, environment)
    except subprocess.TimeoutExpired as late:
        return f"{name} gave no answer within {late.timeout:g} s"
    except OSError as error:
        return f"{name} cannot be started: {error.strerror or error}"


def on_cluster(cluster: str) -> list[str]:
    """The option that names a cluster; none for the one here, whose name is empty."""
    return [f"--clusters={cluster}"] if cluster else []


def client_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables without those by which Slurm's programs take options, or learn of a job around them."""
    return {
        name: value
        for name, value in variables.items()
        if not _OPTIONS.fullmatch(name) or _TO_REACH_THE_CLUSTER.fullmatch(name)
    }


def job_environment(plans: Sequence[LaunchPlan], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What sbatch is started with, all of which a job gets: what the plan's system lets through (slurm.export).

    Values that are given by reference (launch.environment) go this way and no other.
    """
    client = client_environment(variables)
    slurm = plans[0].system.slurm
    if slurm.clusters:
        # sbatch prefers it to the script's --clusters.
        client.pop("SLURM_CLUSTERS", None)
    if slurm.exports_all:
        return client
    names = let_through(plans)
    chosen = {name: value for name, value in client.items() if name in names or _TO_REACH_THE_CLUSTER.fullmatch(name)}
    # A plain path, in which Slurm's programs are found where they lie here.
    path = PLAIN_PATH
    sbatch = shutil.which("sbatch", path=client.get("PATH"))
    if sbatch is not None and str(Path(sbatch).parent) not in PLAIN_PATH.split(":"):
        path = f"{Path(sbatch).parent}:{PLAIN_PATH}"
    person = {}
    with suppress(KeyError):  # a user without an entry, as in some containers
        user = pwd.getpwuid(os.getuid())
        person = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    # A variable of the job itself may be referred to; it is not to be had here.
    return {"PATH": path, **person, **chosen}


def exported_names(plans: Sequence[LaunchPlan]) -> tuple[str, ...]:
    """Names of these variables, or `ALL` where nothing is held back."""
    return (ALL_VARIABLES,) if plans[0].system.slurm.exports_all else tuple(sorted(job_environment(plans)))
