"""A pre-flight becomes the text of its job: first every rank looks, then all exchange, as a run would. Pure."""

from __future__ import annotations

import secrets

from dlbench.jobs.scripts import images, launch
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.scripts.sbatch_options import sbatch_options
from dlbench.jobs.scripts.templates import render
from dlbench.records.answers.preflight import PreflightFolder
from dlbench.specs.plan import LaunchPlan

MODULE = "dlbench.node.site_check"

# Says what it can whatever is missing, and ends with 0: with another code the launcher would end the other ranks.
_LOOK = """\
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


def render_preflight(job: Job, folder: PreflightFolder, python: str) -> str:
    """The exact text of `job.sbatch`; arguments as `dlbench.jobs.scripts.batch.render_job`."""
    plan = job.shape
    # Stands for the folder of images; nobody's path can hold it, and it needs no quotes.
    unpacked = f"/DLBENCH-{secrets.token_hex(16)}"
    ranks_python = images.python_of(job, plan, unpacked, python)
    look = look_command(plan, folder, ranks_python)
    exchange = launch.launcher_command(plan, folder.run, ranks_python)
    return render(
        "preflight.sbatch.j2",
        plan=plan,
        options=sbatch_options(plan, job_name=job.name, time_limit=job.time_limit),
        seen=folder.seen,
        variables=launch.rank_environment(plan),
        look=launch.quoted(look).replace(unpacked, f'"${images.FOLDER}"'),
        exchange=launch.quoted(exchange).replace(unpacked, f'"${images.FOLDER}"'),
        **images.values_of(job),
        is_job=True,
    )


def look_command(plan: LaunchPlan, folder: PreflightFolder, python: str) -> list[str]:
    """The command that a run would be started by, with the look in place of a rank.

    Args:
        plan: of the pre-flight; its launcher is not `local`.
        folder: its folder, absolute.
        python: Python of the ranks.
    """
    mark = f"/dlbench-python-{secrets.token_hex(8)}"
    words = launch.launcher_command(plan, folder.run, mark)
    return [*words[: words.index(mark)], *rank_command(folder, python)]


def rank_command(folder: PreflightFolder, python: str) -> list[str]:
    """What each rank executes: a shell that a broken Python does not end, and in it the look under its supervisor."""
    program = [python, "-P", "-m", "dlbench.supervisor", "-m", MODULE, str(folder.run.plan)]
    return ["bash", "-c", _LOOK, "dlbench-preflight", str(folder.seen), *program]
