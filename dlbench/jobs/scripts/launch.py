"""A plan becomes the command that starts its ranks. Pure: nothing is run, nothing is looked up."""

from __future__ import annotations

import shlex
from pathlib import Path

from dlbench.records.folder import RunFolder
from dlbench.specs.plan import YIELD, LaunchPlan
from dlbench.specs.system.launch import VariableSource

TOKEN = "DLBENCH_LAUNCH_TOKEN"  # noqa: S105 (a variable's name)
"""Tells the ranks of one start from those of another."""


def node_command(plan_file: Path, python: str) -> list[str]:
    """What every rank executes: a supervisor, which runs the rank and ends all that it started (dlbench.supervisor).

    With -P no module is taken from the working directory.
    """
    return [python, "-P", "-m", "dlbench.supervisor", "-m", "dlbench.node", str(plan_file)]


def supervised(launcher_command: list[str], python: str) -> list[str]:
    """The command of mpirun or srun under a supervisor, as `dlbench run` starts it."""
    return [python, "-P", "-m", "dlbench.supervisor", "--launcher", *launcher_command]


def rank_environment(plan: LaunchPlan) -> dict[str, str | VariableSource]:
    """Variables that every rank gets, whatever starts it; of those given by reference, where their values are."""
    # A rank's output must be in its log when it dies.
    variables: dict[str, str | VariableSource] = {"PYTHONUNBUFFERED": "1"}
    if plan.yields:
        # Open MPI spins while it waits; with more ranks than cores that starves the one it waits for.
        variables[YIELD] = "1"
    # What the site says has the last word.
    return {**variables, **plan.system.launch.environment}


def local_environments(plan: LaunchPlan, token: str) -> list[dict[str, str | VariableSource]]:
    """For each rank of launcher `local`, the variables by which it knows its place."""
    return [
        {
            **rank_environment(plan),
            "DLBENCH_RANK": str(rank),
            "DLBENCH_WORLD_SIZE": str(plan.layout.ranks),
            "DLBENCH_LOCAL_RANK": str(rank),
            TOKEN: token,
        }
        for rank in range(plan.layout.ranks)
    ]


def mpirun_command(plan: LaunchPlan, folder: RunFolder, python: str, hosts: str = "") -> list[str]:
    """Open MPI's mpirun; ranks pin themselves, so it must not.

    Variables are named and their values left to mpirun's own environment: everybody may read a command line.
    Arguments as `launcher_command`.
    """
    exports = [part for name in sorted([*rank_environment(plan), TOKEN]) for part in ("-x", name)]
    mapping = f"ppr:{plan.layout.ranks_per_node}:node:OVERSUBSCRIBE"
    return [
        *("mpirun", "-np", str(plan.layout.ranks), "--map-by", mapping, "--bind-to", "none"),
        *(("--host", hosts) if hosts else ()),
        *exports,
        *node_command(folder.plan, python),
    ]


def srun_command(plan: LaunchPlan, folder: RunFolder, python: str, hosts: str = "") -> list[str]:
    """Srun inside an allocation; a dead rank ends the job, which srun does not do by itself.

    Ranks go in blocks over nodes and over the sockets of a node (srun(1), --distribution): neighbours share a socket,
    as the GPUs of neighbouring numbers mostly do. Slurm alone would deal them out over the sockets in turn.

    GPUs are not bound to ranks: a bound rank, as under gpus-per-task (srun(1), --tres-bind), cannot open the others',
    and NCCL goes by the host's memory. Each rank takes its own by its place on the node. Arguments as
    `launcher_command`.
    """
    layout, launch = plan.layout, plan.system.launch
    words = [
        "srun",
        # What Slurm's accounting says of this step is found by its name.
        f"--job-name={plan.run_id}",
        f"--mpi={launch.mpi_plugin if launch.launcher == 'srun-mpi' else 'none'}",
        "--kill-on-bad-exit=1",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.ranks}",
        f"--ntasks-per-node={layout.ranks_per_node}",
        "--distribution=block:block",
    ]
    if hosts:
        words.append(f"--nodelist={hosts}")
    slurm = plan.system.slurm
    if slurm.gpu_request != "none" and slurm.gpu_bind != "site":
        words.append(f"--gpu-bind={slurm.gpu_bind}")
    if slurm.cpus_per_task:
        words.append(f"--cpus-per-task={layout.cores_per_rank}")
    return [*words, *node_command(folder.plan, python)]


def launcher_command(plan: LaunchPlan, folder: RunFolder, python: str, hosts: str = "") -> list[str]:
    """The command of the plan's launcher, which is not `local`.

    Args:
        plan: of the run.
        folder: where it lives, absolute.
        python: Python of the ranks.
        hosts: names of its nodes with commas between them; empty: all nodes of the allocation.
    """
    if plan.system.launch.launcher == "mpirun":
        return mpirun_command(plan, folder, python, hosts)
    return srun_command(plan, folder, python, hosts)


def quoted(words: list[str]) -> str:
    """A command as one line of shell."""
    return shlex.join(words)
