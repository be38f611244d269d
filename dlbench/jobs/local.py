"""Starts the ranks of a run on this machine, and tells what became of them. One rank's death ends the others."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import replace

from dlbench.errors import EnvironmentLacksError
from dlbench.jobs import launch
from dlbench.jobs.ending import Ending
from dlbench.jobs.processes import OnProgress, RankProcesses
from dlbench.jobs.verdict import Outcome, folder_is_gone, killed_under_mpirun, verdict
from dlbench.machine.memory_kills import MemoryKills
from dlbench.records.folder import RunFolder
from dlbench.records.status import room_for_failure, write_failure
from dlbench.specs.plan import LaunchPlan


def run(plan: LaunchPlan, folder: RunFolder, on_progress: OnProgress) -> Outcome:
    """Runs a plan on this machine with launcher `local` or `mpirun`, or with srun inside an allocation.

    Raises:
        EnvironmentLacksError: the launcher's program is not installed.
        KeyboardInterrupt: passed on, after the ranks were ended and the folder says so.
    """
    is_local = plan.system.launch.launcher == "local"
    ranks = RankProcesses(on_progress, are_ranks=is_local)
    token = secrets.token_hex(8)
    base = {**os.environ, "DLBENCH_PROGRESS": "launcher"}
    python = plan.system.python or sys.executable
    memory = MemoryKills()
    with room_for_failure(folder):
        try:
            if is_local:
                for rank, variables in enumerate(launch.local_environments(plan, token)):
                    ranks.start(launch.node_command(folder.plan, python), {**base, **variables}, folder.log(rank))
            else:
                variables = {**launch.rank_environment(plan), "DLBENCH_LAUNCH_TOKEN": token}
                ranks.start(_launcher_command(plan, folder, python, token), {**base, **variables}, folder.launch_log)
            ranks.wait(lambda: not folder_is_gone(folder))
        except FileNotFoundError as error:
            ranks.end()
            if not folder_is_gone(folder):
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
        return verdict(folder, _first_ending(folder, ranks, memory, is_local=is_local), ranks.stopped)


def _first_ending(folder: RunFolder, ranks: RankProcesses, memory: MemoryKills, *, is_local: bool) -> Ending | None:
    ending = ranks.first_ending(folder.log if is_local else lambda _: folder.launch_log)
    if ending is None:
        return None
    if not is_local and (killed := killed_under_mpirun(folder)) is not None:
        ending = ending.killed(*killed)
    return replace(ending, out_of_memory=memory.since())


def _launcher_command(plan: LaunchPlan, folder: RunFolder, python: str, token: str) -> list[str]:
    if plan.system.launch.launcher == "mpirun":
        return launch.mpirun_command(plan, folder, python, token)
    return launch.srun_command(plan, folder, python)
