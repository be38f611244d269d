"""What `dlbench run` executes: where modules or setup lines come first, a script made of the same text as a job's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dlbench.errors import UserError
from dlbench.jobs.scripts import containers, launch
from dlbench.jobs.scripts.job import render
from dlbench.opening import read_bytes, why_unreadable
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import LaunchPlan
from dlbench.specs.system.launch import VariableSource

MAX_BYTES = 64 * 1024
"""Of a value from a file; Linux itself refuses a variable of 128 KiB."""


def resolve(given: Mapping[str, str | VariableSource], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Every variable with its value.

    Args:
        given: texts, and references to where the text is.
        variables: the environment of dlbench itself.

    Raises:
        UserError: a variable that is referred to is not set, or a file cannot be read; the line holds no value.
    """
    return {name: _value(name, source, variables) for name, source in given.items()}


def _value(name: str, source: str | VariableSource, variables: Mapping[str, str]) -> str:
    if isinstance(source, str):
        return source
    where = f"launch.environment.{name}"
    if source.file is not None:
        return _from_file(where, Path(source.file).expanduser())
    assert source.variable is not None
    if source.variable not in variables:
        raise UserError(f"{where}: {source.variable} is not set where dlbench runs; export it, then run again")
    return variables[source.variable]


def _from_file(where: str, path: Path) -> str:
    try:
        content = read_bytes(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{where}: {path} {why_unreadable(error)}; it cannot be read") from None
    if b"\0" in content:
        raise UserError(f"{where}: {path} holds no value of a variable, but a NUL character")
    return os.fsdecode(content).rstrip("\n")


def has_script(plan: LaunchPlan) -> bool:
    """Whether a shell must come before the ranks."""
    system = plan.system
    return bool(system.modules or system.setup or system.slurm.login_shell or system.container.is_used)


def shell_command(plan: LaunchPlan, script: Path) -> list[str]:
    """What runs the script; the shell of a job."""
    return ["bash", *(["-l"] if plan.system.slurm.login_shell else []), str(script)]


def render_run_script(plan: LaunchPlan, folder: RunFolder, python: str) -> str:
    """The exact text of `launch.sh`, which becomes what it starts last: a rank of launcher local, else the launcher.

    Args:
        plan: of the run.
        folder: where it lives, absolute.
        python: Python of the ranks, unless the system names another.
    """
    return render(
        "launch.sh.j2",
        plan=plan,
        variables=launch.rank_environment(plan),
        command=f"exec {launch.quoted(start_command(plan, folder, python))}",
        is_rank=plan.system.launch.launcher == "local",
        is_job=False,
    )


def start_command(plan: LaunchPlan, folder: RunFolder, python: str) -> list[str]:
    """What starts one rank under launcher local, else all of them; arguments as `render_run_script`."""
    own = plan.system.python or python
    of_ranks = containers.python_of(plan, own)
    if plan.system.launch.launcher == "local":
        return launch.local_command(plan, folder, of_ranks, own)
    return launch.launcher_command(plan, folder, of_ranks)
