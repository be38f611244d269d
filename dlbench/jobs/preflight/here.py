"""A pre-flight without a scheduler: the same looks on this machine, and the same exchange."""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path

from dlbench import process_tree
from dlbench.errors import StalledError
from dlbench.jobs import local, variables
from dlbench.jobs.interruption import Interruption
from dlbench.jobs.preflight.script import local_look_command, look_command
from dlbench.jobs.processes import RankProcesses
from dlbench.jobs.scripts import containers, launch
from dlbench.jobs.scripts.run_script import has_script, shell_command
from dlbench.jobs.scripts.templates import render
from dlbench.jobs.verdict import Outcome
from dlbench.records.answers.preflight import PreflightFolder
from dlbench.records.files import write_atomic
from dlbench.specs.collectives.plan import CommPlan


def look_here(plan: CommPlan, folder: PreflightFolder, timeout_s: float) -> None:
    """Every rank looks, on this machine; what they saw lies in `folder` then, or their logs.

    Raises:
        EnvironmentLacksError: the launcher, or the ranks' Python, cannot be executed.
        UserError: the value of a variable is not where the plan says.
        StalledError: they took longer than `timeout_s`.
        KeyboardInterrupt: passed on, after they were ended.
    """
    token = secrets.token_hex(8)
    is_local = plan.system.launch.launcher == "local"
    own = plan.system.python or sys.executable
    python = containers.python_of(plan, own)
    environment = {**os.environ, **variables.resolve(launch.rank_environment(plan))}
    if is_local:
        words = local_look_command(plan, folder, python, own)
    else:
        words = launch.supervised(look_command(plan, folder, python), sys.executable)
    if has_script(plan):
        words = shell_command(plan, _script(plan, folder, words))
    ranks = RankProcesses(lambda *_: None, token, launcher="" if is_local else plan.system.launch.launcher)
    deadline = time.monotonic() + timeout_s
    with Interruption() as interruption:

        def check() -> None:
            interruption.check()
            if time.monotonic() > deadline:
                raise StalledError(f"the ranks of {plan.run_id} did not look at this machine within {timeout_s:g} s")

        try:
            if is_local:
                for rank, given in enumerate(launch.local_environments(plan, token)):
                    ranks.start(words, {**environment, **variables.resolve(given)}, folder.log(rank))
            else:
                ranks.start(words, environment, folder.run.launch_log)
            ranks.wait(check)
        except BaseException:
            ranks.end(interruption.is_repeated)
            raise
        finally:
            ranks.close(process_tree.temporary_places(environment))


def _script(plan: CommPlan, folder: PreflightFolder, words: list[str]) -> Path:
    """Modules and setup lines before the look, in the words of a run's own script."""
    path = folder.path / "look.sh"
    text = render(
        "launch.sh.j2",
        plan=plan,
        variables=launch.rank_environment(plan),
        command=f"exec {launch.quoted(words)}",
        is_rank=plan.system.launch.launcher == "local",
        is_job=False,
    )
    write_atomic(path, text)
    return path


def exchange_here(plan: CommPlan, folder: PreflightFolder) -> Outcome:
    """The all-reduce on this machine, as `dlbench comm run` starts it; errors as of `dlbench.jobs.local.run`."""
    return local.run(plan, folder.run, lambda *_: None)
