"""Further options for sbatch and srun, as words: what a plan decides by itself is not a site's to give again.

A program of Slurm reads an option also by the beginning of its name, and of two equal ones the last wins; so neither
an option of the plan, nor its beginning, nor one by a single letter is taken.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from dlbench.specs.base import Form
from dlbench.specs.system.hostlist import compressed, split_hosts

_OPTION = re.compile(r"[a-z][a-z0-9-]*(=.*)?", re.DOTALL)

_BY_PLAN = "the plan decides it"
_TOLD_BY_KEY = {
    "hint": "slurm.hint",
    "threads-per-core": "slurm.threads_per_core",
    "gpus": "slurm.gpu_request",
    "gpus-per-node": "slurm.gpu_request",
    "gpus-per-task": "slurm.gpu_request",
    "gpus-per-socket": "slurm.gpu_request",
    "cpus-per-gpu": "slurm.cpus_per_gpu",
    "mem-per-gpu": "slurm.mem_per_gpu",
}
_SIZE = (
    *("nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket"),
    *("tasks-per-node", "cpus-per-task"),
)
_PLACE = ("chdir", "output", "error", "input")
_NO_JOB = dict.fromkeys(("help", "test-only", "usage", "version"), "it starts nothing")

OF_SBATCH: Mapping[str, str] = {
    **{option: f"system.{key} is for it" for option, key in _TOLD_BY_KEY.items()},
    **{
        option: f"system.slurm.{key} is for it"
        for option, key in {
            **{name: name for name in ("partition", "account", "qos", "reservation", "constraint", "nodelist")},
            **{name: name for name in ("exclude", "exclusive", "mem", "gres", "export")},
            "time": "time_limit",
            "signal": "warn_before_s",
        }.items()
    },
    **dict.fromkeys((*_SIZE, *_PLACE, "job-name"), _BY_PLAN),
    "array": "it would start several jobs into one run's folder",
    "dependency": "runs of a series wait for each other by dlbench submit",
    "export-file": "system.slurm.export is for it",
    **dict.fromkeys(("open-mode", "parsable", "wait", "wrap"), "dlbench submit needs its own"),
    **dict.fromkeys(("requeue", "no-requeue"), "system.slurm.requeue is for it"),
    **_NO_JOB,
}
"""Options that `slurm.extra` may not hold, with the reason."""

OF_SRUN: Mapping[str, str] = {
    **{option: f"system.{key} is for it" for option, key in _TOLD_BY_KEY.items()},
    "cpu-bind": "system.slurm.cpu_bind is for it",
    "gpu-bind": "system.slurm.gpu_bind is for it",
    "mem-bind": "system.slurm.mem_bind is for it",
    "distribution": "system.slurm.distribution is for it",
    "mpi": "system.launch.mpi_plugin is for it",
    **dict.fromkeys((*_SIZE, *_PLACE, "nodelist", "nodefile", "exclude", "relative"), _BY_PLAN),
    **dict.fromkeys(("export", "kill-on-bad-exit", "label", "job-name", "jobid"), "dlbench needs its own"),
    **dict.fromkeys(("async", "het-group", "multi-prog", "no-kill", "pack-group", "pty"), "ranks are not started so"),
    **_NO_JOB,
}
"""The same of `slurm.srun_args`."""


def words_of(value: object) -> object:
    """A list as it is; a text as its words, as a shell would divide it; dashes before a name are left away."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is no list of words: {error}") from None
    return tuple(str(word).removeprefix("--") for word in value) if isinstance(value, list | tuple) else value


def refuse(words: tuple[str, ...], denied: Mapping[str, str]) -> tuple[str, ...]:
    """The words, if a plan can stand with each of them.

    `words`: options, `name` or `name=value`. `denied`: those that must not be among them, with the reason.
    Raises `ValueError`: one line for the first that cannot be taken.
    """
    for word in words:
        name = word.partition("=")[0]
        if not _OPTION.fullmatch(word):
            raise ValueError(
                f"{word!r} is no option by its long name: write --name, or --name=value as one word, e.g. --switches=1"
            )
        found = name if name in denied else next((option for option in denied if option.startswith(name)), None)
        if found is not None:
            short = "" if found == name else f", which is short for --{found},"
            raise ValueError(f"--{name}{short} is not taken: {denied[found]}")
        _printable(word)
    return words


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} holds a character that cannot be printed")
    return text


def _hosts(value: object) -> object:
    """A list, or a text with commas, of any length, as Slurm's short form of it."""
    if isinstance(value, str):
        value = split_hosts(value)
    if isinstance(value, list | tuple) and all(isinstance(host, str) for host in value):
        return compressed(value) or None
    return value


Argument = Annotated[str, Field(min_length=1), AfterValidator(_printable)]
"""A value of an option: it goes to sbatch and srun as one word, so that it may hold any character that is printed."""

Hosts = Annotated[Argument | None, BeforeValidator(_hosts)]
"""Hosts as one text in Slurm's short form; given as a list or with commas; None for none."""

Memory = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^([0-9]+[KMGT]?|site)$"),
    Form("MiB, or a number with K, M, G or T, e.g. 450G; or site"),
]
"""Bytes as sbatch takes them: MiB, or with a letter; `site` for not given."""

SbatchWords = Annotated[
    tuple[str, ...],
    BeforeValidator(words_of),
    AfterValidator(lambda words: refuse(words, OF_SBATCH)),
    Form("options by their long names, e.g. [--switches=1]"),
]
SrunWords = Annotated[
    tuple[str, ...],
    BeforeValidator(words_of),
    AfterValidator(lambda words: refuse(words, OF_SRUN)),
    Form("options by their long names, e.g. [--network=sharp]"),
]
