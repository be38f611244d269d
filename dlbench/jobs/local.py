"""Starts the ranks of a run on this machine, and tells what became of them. One rank's death ends the others."""

from __future__ import annotations

import os
import secrets
import sys

from dlbench.errors import EnvironmentLacksError
from dlbench.jobs import launch
from dlbench.jobs.processes import OnProgress, RankProcesses
from dlbench.jobs.variables import resolve
from dlbench.jobs.verdict import Outcome, killed_under_mpirun, verdict
from dlbench.records.folder import RunFolder
from dlbench.records.status import write_failure
from dlbench.specs.plan import LaunchPlan


def run(plan: LaunchPlan, folder: RunFolder, on_progress: OnProgress) -> Outcome:
    """Runs a plan on this machine with launcher `local` or `mpirun`, or with srun inside an allocation.

    Raises:
        EnvironmentLacksError: the launcher's program is not installed.
        UserError: the value of a variable is not where the plan says.
        KeyboardInterrupt: passed on, after the ranks were ended and the folder says so.
    """
    ranks = RankProcesses(on_progress)
    token = secrets.token_hex(8)
    base = {**os.environ, "DLBENCH_PROGRESS": "launcher"}
    python = plan.system.python or sys.executable
    try:
        if plan.system.launch.launcher == "local":
            for rank, variables in enumerate(launch.local_environments(plan, token)):
                ranks.start(launch.node_command(folder.plan, python), {**base, **resolve(variables)}, folder.log(rank))
        else:
            variables = {**launch.rank_environment(plan), launch.TOKEN: token}
            ranks.start(_launcher_command(plan, folder, python), {**base, **resolve(variables)}, folder.launch_log)
        ranks.wait()
    except FileNotFoundError as error:
        ranks.end()
        raise EnvironmentLacksError(
            f"launcher {plan.system.launch.launcher}: {error.filename} is not on PATH"
        ) from None
    except KeyboardInterrupt:
        ranks.end()
        write_failure(folder, "interrupted by the user or by a signal to dlbench")
        raise
    except BaseException:
        ranks.end()
        raise
    finally:
        ranks.close()
    return verdict(folder, killed_under_mpirun(folder) or ranks.first_ending())


def _launcher_command(plan: LaunchPlan, folder: RunFolder, python: str) -> list[str]:
    if plan.system.launch.launcher == "mpirun":
        return launch.mpirun_command(plan, folder, python)
    return launch.srun_command(plan, folder, python)
