"""A job becomes a batch script and the sbatch command that submits it. Both pure.

Quoting happens at the border: whatever stands in the script goes through one filter, `sh`; options that stand in its
`#SBATCH` lines, through `directive`. What such a line cannot hold is an argument of sbatch, and a comment tells it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlbench.jobs.scripts import containers, launch
from dlbench.jobs.scripts.job import IMAGES_FOLDER, Job, image_values, python_of, render, shell_values
from dlbench.jobs.scripts.launch import sbatch_options
from dlbench.records.folder import RunFolder
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan, value_text
from dlbench.specs.series import side_words


def render_job(job: Job, folders: Sequence[RunFolder], python: str, comment: str = "") -> str:
    """The exact text of `job.sbatch`, for one run or several.

    `job`: the runs; their system must have a scheduler. `folders`: where each run lives, absolute, in the same order.
    `python`: Python of the compute nodes, unless the system names another. `comment`: by which the job is found again;
    empty: none.
    """
    plan = job.shape
    assert isinstance(plan, RunPlan | CommPlan)
    ways = _ways(job, python)
    record = folders[0].record if isinstance(plan, RunPlan) else folders[0].comm
    return render(
        "job.sbatch.j2",
        plan=plan,
        slurm=plan.system.slurm,
        **told_options(job, folders[0], comment),
        **shell_values(job),
        what=_what(job),
        place={"series": plan.series.id, "swept": _swept(job)},
        sides=_sides(job),
        configurations=list({way["name"]: way for way in ways}.values()),
        runs=[{"configuration": way["name"], "folder": folder.path} for way, folder in zip(ways, folders, strict=True)],
        record=record.name,
        **image_values(job),
        is_array=job.is_array,
        passes_warning_on=job.passes_warning_on,
        is_job=True,
    )


def _what(job: Job) -> str:
    """What a job runs, in words."""
    plan = job.shape
    assert isinstance(plan, RunPlan | CommPlan)
    if len(job.plans) == 1:
        return f"repeat {plan.series.repeat + 1} of {plan.series.repeats}: {plan.title}"
    name = f"{plan.workload.name} ({plan.workload.preset})" if isinstance(plan, RunPlan) else plan.title
    how = "one in each job of an array" if job.is_array else "one after the other on the same nodes"
    return f"{len(job.plans)} runs of {name}, {how}"


def _swept(job: Job) -> str:
    """Keys that are swept, with their values in this job; empty where none is."""
    values: dict[str, list[str]] = {}
    for plan in job.plans:
        for key, value in plan.series.axes.items() if isinstance(plan, RunPlan) else ():
            values.setdefault(key, []).append(value_text(key, value))
    return ", ".join(f"{key}={','.join(dict.fromkeys(found))}" for key, found in values.items())


def _sides(job: Job) -> list[dict[str, str]]:
    """Sides of a comparison, with what they set."""
    words = {plan.series.side: side_words(plan) for plan in job.plans if isinstance(plan, RunPlan) and plan.series.side}
    return [{"name": side, "words": words[side]} for side in sorted(words)]


def _ways(job: Job, python: str) -> list[dict[str, object]]:
    """How each run is started; runs that are started alike share one, with one function of the script."""
    folder, hosts, unpacked = _place_holder(), _place_holder(), _place_holder()
    # The folder's name is the run's.
    variables = {
        f"/{folder}": "dlbench_run",
        folder: "{dlbench_run##*/}",
        hosts: "dlbench_hosts",
        f"/{unpacked}": IMAGES_FOLDER,
    }
    named: dict[str, dict[str, object]] = {}
    ways = []
    for plan in job.plans:
        is_part = not job.is_array and plan.layout.nodes < job.shape.layout.nodes
        words = launch.launcher_command(
            plan, RunFolder(Path(f"/{folder}")), python_of(job, plan, f"/{unpacked}", python), hosts if is_part else ""
        )
        way = {
            "plan": plan,
            "is_part": is_part,
            "variables": launch.rank_environment(plan),
            # In place of the shell: the process that the script tells is the launcher.
            "command": ("exec " if job.passes_warning_on else "")
            + " ".join(launch.word_of_shell(word, variables | containers.variables_of(word)) for word in words),
        }
        # Whatever of a plan reaches its part of the script.
        text = f"{is_part} {plan.layout.nodes} {render('environment.j2', is_job=True, **way)}"
        if text not in named:
            named[text] = {**way, "name": _name(plan, [*named.values()]), "whose": _whose(job, plan)}
        ways.append(named[text])
    if len(named) == 1:
        ways[0] |= {"name": "start", "whose": ""}
    return ways


def _name(plan: LaunchPlan, others: Sequence[Mapping[str, object]]) -> str:
    """A function's: by the side of a comparison, else by a number."""
    name = f"start_{plan.series.side}" if isinstance(plan, RunPlan) and plan.series.side else ""
    return name if name and all(name != other["name"] for other in others) else f"start_{len(others) + 1}"


def _whose(job: Job, plan: LaunchPlan) -> str:
    """By what a way of starting differs from others of its job, in words."""
    layout = plan.layout
    parts = []
    if len({(one.layout.nodes, one.layout.ranks) for one in job.plans}) > 1:
        parts.append(f"{layout.nodes} node{'s' * (layout.nodes > 1)}, {layout.ranks} rank{'s' * (layout.ranks > 1)}")
    if isinstance(plan, RunPlan) and plan.series.side:
        parts.append(f"Side {plan.series.side}")
    elif isinstance(plan, RunPlan):
        of_system = {key: value for key, value in plan.series.axes.items() if key.startswith("system.")}
        parts += [f"{key}={value_text(key, value)}" for key, value in of_system.items()]
    return f"{', '.join(parts)}. " if parts else ""


def _place_holder() -> str:
    """Random, so that no path or variable of a user can hold it."""
    return f"DLBENCH-{secrets.token_hex(16)}"


def _options(job: Job, folder: RunFolder, comment: str) -> list[str]:
    """Every option of a job, each once, by its long name."""
    # In the path of --output Slurm expands percent signs.
    output = f"{str(folder.path).replace('%', '%%')}/slurm-{'%A_%a' if job.is_array else '%j'}.out"
    options = sbatch_options(job.shape, job_name=job.name, time_limit=job.time_limit, warn_script=job.passes_warning_on)
    options += [f"--chdir={folder.path}", f"--output={output}"]
    if job.array_limit is not None:
        options.append(f"--array=1-{len(job.plans)}{f'%{job.array_limit}' if job.array_limit else ''}")
    # A comment of the site's, of the system file, is not replaced.
    is_free = not any(option.startswith("comment=") for option in job.shape.system.slurm.extra)
    return [*options, *([f"--comment={comment}"] if comment and is_free else [])]


_PLAIN = re.compile(r"[A-Za-z0-9._:,/@=+%&|*^\[\]()-]*")
_NEVER_A_LINE = re.compile(r"(?i)hetjob|packjob|--(quiet|verbose|ignore-pbs)\b")
"""sbatch takes the first two, anywhere in such a line, for the beginning of another job; the others it reads as
arguments alone (src/sbatch/opt.c of Slurm)."""


def directive(option: str) -> str:
    """An option as it stands after `#SBATCH`; empty where it cannot.

    Inside of double quotes sbatch takes all as it is but a backslash, which escapes (`_get_argument` of its opt.c).
    """
    if not option.isprintable() or _NEVER_A_LINE.search(option):
        return ""
    name, equals, value = option.partition("=")
    if _PLAIN.fullmatch(value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def told_options(job: Job, folder: RunFolder, comment: str = "") -> dict[str, list[str]]:
    """What the script says of a job's options: `directives`, and `arguments` that no directive can hold.

    Arguments as of `sbatch_arguments`.
    """
    told = [(option, directive(option)) for option in _options(job, folder, comment)]
    return {
        "directives": [line for _, line in told if line],
        "arguments": [option for option, line in told if not line],
    }


def sbatch_arguments(job: Job, folder: RunFolder, after: str | None = None, comment: str = "") -> list[str]:
    """The command that submits a job's script, which holds all options but these.

    `folder`: that of its first run, absolute. `after`: id of the job that must have ended before this one begins; runs
    of a series would disturb each other on shared switches and file systems.
    """
    arguments = ["sbatch", "--parsable", *told_options(job, folder, comment)["arguments"]]
    if after is not None:
        arguments.append(f"--dependency=afterany:{after}")
    return [*arguments, str(folder.script)]
