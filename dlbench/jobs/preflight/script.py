"""A pre-flight becomes the text of its job: first every rank looks, then all exchange, as a run would. Pure."""

from __future__ import annotations

import secrets

from dlbench.jobs.scripts import containers, images, launch
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
    # Stands for the folder of images; nobody's path can hold it.
    unpacked = f"/DLBENCH-{secrets.token_hex(16)}"
    ranks_python = images.python_of(job, plan, unpacked, python)
    look = look_command(plan, folder, ranks_python)
    exchange = launch.launcher_command(plan, folder.run, ranks_python)

    def in_shell(words: list[str]) -> str:
        places = {unpacked: images.FOLDER}
        return " ".join(launch.word_of_shell(word, places | containers.variables_of(word)) for word in words)

    return render(
        "preflight.sbatch.j2",
        plan=plan,
        options=sbatch_options(plan, job_name=job.name, time_limit=job.time_limit),
        seen=folder.seen,
        variables=launch.rank_environment(plan),
        look=in_shell(look),
        exchange=in_shell(exchange),
        **images.values_of(job),
        is_job=True,
    )


def look_command(plan: LaunchPlan, folder: PreflightFolder, python: str) -> list[str]:
    """The command that a run would be started by, with the look in place of a rank.

    What each rank executes is a shell that a broken Python does not end, and in it the look under its supervisor.

    Args:
        plan: of the pre-flight; its launcher is not `local`.
        folder: its folder, absolute.
        python: Python of the ranks.
    """
    before = _before_rank(launch.launcher_command(plan, folder.run, _PYTHON))
    return [*before, "bash", "-c", _LOOK, "dlbench-preflight", str(folder.seen), *_program(folder, python)]


def local_look_command(plan: LaunchPlan, folder: PreflightFolder, python: str, own: str) -> list[str]:
    """The same of one rank of launcher `local`, without a shell; `own` is the Python of this machine."""
    return [*_before_rank(launch.local_command(plan, folder.run, _PYTHON, own)), *_program(folder, python)]


_PYTHON = f"/dlbench-python-{secrets.token_hex(16)}"


def _before_rank(words: list[str]) -> list[str]:
    """What of a command comes before the ranks' Python, for which `_PYTHON` stands."""
    return words[: words.index(_PYTHON)]


def _program(folder: PreflightFolder, python: str) -> list[str]:
    return [python, "-P", "-m", "dlbench.supervisor", "-m", MODULE, str(folder.run.plan)]
