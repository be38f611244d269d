"""Launcher, environment variables of the ranks, options of `sbatch` and `srun`, and host lists in Slurm's short form:
`n[1-3,7]` for n1, n2, n3 and n7.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from dlbench.confidential import is_secret_name, is_secret_value
from dlbench.errors import UserError
from dlbench.specs.base import ActsIf, Count, CountOrZero, Flag, Form, FromText, SlurmWord, Spec
from dlbench.specs.engine import key_for_name

_NUMBERED = re.compile(r"(.+?)([0-9]{1,18})", re.DOTALL)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_MOST_NAMES = 1 << 16  # More nodes than any cluster has, so that a typing error cannot fill the memory.
LauncherName = Literal["local", "mpirun", "srun-mpi", "srun-gloo"]
BY_SRUN: tuple[LauncherName, ...] = ("srun-mpi", "srun-gloo")
_ENVIRONMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
VariableName = Annotated[str, Field(pattern=_ENVIRONMENT_NAME), Form("a variable's name, e.g. NCCL_DEBUG")]
# Read-only variables of bash; `export` of one would end a script.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
_BY_INTERFACE = frozenset({"GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"})
"""Variables that `interface` sets for the ranks; NCCL's is not changed if a user sets it."""

_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_OPTION = re.compile(r"[a-z][a-z0-9-]*(=.*)?", re.DOTALL)
_BY_PLAN = "the plan sets it"
_KEY_OF_OPTION = {
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
_NO_JOB = dict.fromkeys(("help", "test-only", "usage", "version"), "it starts no job")
_SAME_NAMES = (
    *("partition", "account", "qos", "reservation", "constraint", "nodelist"),
    *("exclude", "exclusive", "mem", "gres", "export", "requeue"),
)
_SBATCH_KEY_OF_OPTION = {
    **_KEY_OF_OPTION,
    **{name: f"slurm.{name}" for name in _SAME_NAMES},
    "export-file": "slurm.export",
    "no-requeue": "slurm.requeue",
    "time": "slurm.time_limit",
    "signal": "slurm.warn_before_s",
}
_SRUN_KEY_OF_OPTION = {
    **_KEY_OF_OPTION,
    "cpu-bind": "slurm.cpu_bind",
    "gpu-bind": "slurm.gpu_bind",
    "mem-bind": "slurm.mem_bind",
    "distribution": "slurm.distribution",
    "mpi": "launch.mpi_plugin",
}
OF_SBATCH: Mapping[str, str] = {
    **{option: f"use system.{key}" for option, key in _SBATCH_KEY_OF_OPTION.items()},
    **dict.fromkeys((*_SIZE, *_PLACE, "job-name"), _BY_PLAN),
    "array": "it would start several jobs in one run folder",
    "dependency": "dlbench submit sets the dependencies of a series",
    **dict.fromkeys(("open-mode", "parsable", "wait", "wrap"), "dlbench submit sets it"),
    **_NO_JOB,
}
"""Options that `slurm.extra` must not contain, with the reason."""

DENIED_OF_SRUN: Mapping[str, str] = {
    **{option: f"use system.{key}" for option, key in _SRUN_KEY_OF_OPTION.items()},
    **dict.fromkeys((*_SIZE, *_PLACE, "nodelist", "nodefile", "exclude", "relative"), _BY_PLAN),
    **dict.fromkeys(("export", "kill-on-bad-exit", "label", "job-name", "jobid"), "dlbench sets it"),
    **dict.fromkeys(("async", "het-group", "multi-prog", "no-kill", "pack-group", "pty"), "it is not supported"),
    **_NO_JOB,
}
"""Options that `slurm.srun_args` must not contain, with the reason."""

Memory = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^([0-9]+[KMGT]?|site)$"),
    Form("MiB, or a number with K, M, G or T, e.g. 450G; or site"),
]
"""A size in sbatch's format: MiB, or with a letter; `site`: the option is not given."""

OF_SRUN = frozenset({"gpu_bind", "cpu_bind", "mem_bind", "distribution", "srun_args"})
"""Keys that only srun gets, so that runs of one job may differ in them."""

ALL_VARIABLES = "ALL"
TIME = r"^([0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?|[0-9]+-[0-9]+(:[0-9]{2}){0,2})$"
"""A time limit as Slurm writes it (sbatch(1), --time)."""

TimeLimit = Annotated[
    str, Field(pattern=TIME), Form('a time limit as Slurm writes it, in quotes: "00:30:00" or "1-12:00:00"')
]
WARNING_S = 120
"""Default seconds of warning: Slurm may send the signal a minute early or late (sbatch(1), --signal); a step and a
checkpoint need the rest."""

EARLY_S = 60  # Largest time by which Slurm may send the signal too early, seconds.


def compressed(hosts: Iterable[str]) -> str:
    """Returns hosts in Slurm's short form; only trailing numbers are folded, which every version of Slurm can read."""
    numbers: dict[tuple[str, int], set[int]] = {}
    words: dict[str, None] = {}
    for host in hosts:
        match = None if "[" in host else _NUMBERED.fullmatch(host)
        if match is None:
            words[host] = None
            continue
        digits = match[2]
        # n09 and n9 are different hosts; numbers without leading zeros (n9, n10) have width 0.
        width = len(digits) if len(digits) > 1 and digits.startswith("0") else 0
        numbers.setdefault((match[1], width), set()).add(int(digits))
    for prefix, width in [key for key in numbers if key[1]]:
        # n100 belongs to n[099-100], although it has no leading zero.
        wide = numbers.get((prefix, 0), set())
        same = {number for number in wide if len(str(number)) == width}
        numbers[prefix, width] |= same
        wide -= same
    texts = [
        _folded(prefix, width, sorted(host_numbers))
        for (prefix, width), host_numbers in sorted(numbers.items())
        if host_numbers
    ]
    return ",".join([*texts, *words])


def _folded(prefix: str, width: int, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}d}"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = []
    for first, last in ranges:
        text = f"{first:0{width}d}"
        if last > first:
            text += f"-{last:0{width}d}"
        texts.append(text)
    return f"{prefix}[{','.join(texts)}]"


def split_hosts(text: str) -> list[str]:
    """Returns the parts of a host list, split at commas outside of brackets."""
    parts = re.split(r",(?![^\[\]]*\])", text)
    return [part.strip() for part in parts if part.strip()]


def expanded(text: str) -> Iterator[str]:
    """Yields every host name of a host list in Slurm's order; brackets may be anywhere in a name."""
    for part in split_hosts(text):
        pieces = _BRACKETS.split(part)  # text, content of brackets, text, ...
        names = [""]
        for number, piece in enumerate(pieces):
            ends = [piece] if number % 2 == 0 else _numbers(piece, part)
            if len(names) * len(ends) > _MOST_NAMES:
                raise UserError(f"{part!r}: stands for more than {_MOST_NAMES:,} hosts")
            names = list(map("".join, itertools.product(names, ends)))
        if any(character in "".join(pieces[::2]) for character in "[]"):
            raise UserError(f"{part!r}: has an unmatched bracket")
        yield from names


def _numbers(inside: str, part: str) -> list[str]:
    numbers: list[str] = []
    for word in inside.split(","):
        ends = _RANGE.fullmatch(word.strip())
        first, last = (ends[1], ends[2] or ends[1]) if ends else ("1", "0")
        if int(last) < int(first):
            raise UserError(f"{part!r}: {word.strip()!r} is neither a number nor a range, e.g. n[1-3,7]")
        if int(last) - int(first) + len(numbers) >= _MOST_NAMES:
            raise UserError(f"{part!r}: stands for more than {_MOST_NAMES:,} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


class VariableSource(Spec):
    """The source of a variable's value, which is read when the ranks start; plans contain only the source."""

    variable: VariableName | None = Field(None, description="Variable in the environment of dlbench or of the job.")
    file: Annotated[str, Field(pattern=r"^(/|~/)[^\x00-\x1f]*$"), Form("a path from / or ~/")] | None = Field(
        None, description="A file that contains the value; a path from / or ~/, read on the host that starts the ranks."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.variable is None) == (self.file is None):
            raise ValueError("give one of the two: variable: NAME or file: PATH")
        return self


def _referenced(value: object) -> object:
    if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)):
        return {"variable": match[1]}
    return value


Variable = Annotated[
    Annotated[str, Tag("text")] | Annotated[VariableSource, Tag("source")],
    Discriminator(lambda value: "source" if isinstance(value, dict | VariableSource) else "text"),
    BeforeValidator(_referenced),
]


class LaunchSpec(Spec):
    """Launcher and environment of the ranks."""

    acting = (
        ActsIf("interface", "uses_interface", why="ranks of one node meet on loopback, and MPI chooses its own"),
        ActsIf("oversubscribe_yield", "system.launch.by_mpi", why="only MPI launchers read it"),
        ActsIf("mpi_plugin", "system.launch.launcher", "srun-mpi", why="only launcher srun-mpi reads it"),
    )

    launcher: LauncherName = Field("local", description="local, mpirun, srun-mpi (PMIx) or srun-gloo (no MPI).")
    mpi_plugin: SlurmWord = Field("pmix", description="Plugin for srun --mpi; checked against srun --mpi=list.")
    interface: SlurmWord | None = Field(None, description="Interface of Gloo and NCCL's start-up; none: default route.")
    pin: Flag = Field(True, description="Bind every rank to its own cores.")
    oversubscribe_yield: Flag | None = Field(
        None,
        description="Let Open MPI yield the core while it waits; none: only if a node's ranks need more cores than it "
        "has.",
    )
    environment: dict[str, Variable] = Field(
        default_factory=dict,
        description="Variables set for the ranks. A secret is given by where its value is: env:NAME, {variable: NAME} "
        "or {file: PATH}.",
    )

    @property
    def by_mpi(self) -> bool:
        return self.launcher in ("mpirun", "srun-mpi")

    @property
    def referenced(self) -> frozenset[str]:
        """Names of the variables that are given by reference, and of the variables they refer to."""
        references = {name: source for name, source in self.environment.items() if isinstance(source, VariableSource)}
        return frozenset(references) | {source.variable for source in references.values() if source.variable}

    @field_validator("environment", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        # Names come before values, so that the answer to `HOROVOD_FUSION_THRESHOLD=1` is the right key.
        if not isinstance(value, dict):
            return value
        for key in map(str, value):
            if not re.fullmatch(_ENVIRONMENT_NAME, key):
                raise ValueError(f"{key!r} is not a name of an environment variable")
            if key in _BY_INTERFACE:
                raise ValueError(f"variable {key} is set by dlbench; use launch.interface")
            if key.startswith("HOROVOD_") and (setting := key_for_name(key)):
                raise ValueError(f"variable {key} is set by dlbench; use {setting}")
            if key.startswith("DLBENCH_"):
                raise ValueError(f"variable {key} cannot be set: dlbench uses such names for the ranks")
            if key in _READ_ONLY:
                raise ValueError(f"variable {key} cannot be set: it belongs to bash")
        return value

    @field_validator("environment", mode="after")
    @classmethod
    def _values(cls, value: dict[str, Variable]) -> dict[str, Variable]:
        for key, text in value.items():
            if isinstance(text, str) and "\0" in text:
                raise ValueError(f"the value of {key} contains a NUL character")
            if isinstance(text, str) and text and (is_secret_name(key) or is_secret_value(text)):
                raise ValueError(
                    f"variable {key} looks like a secret, and plan.json shows it to everyone who can read the run; "
                    f"give the source of its value: {key}: {{variable: {key}}}, or {key}: {{file: PATH}}"
                )
        return value


def words_of(value: object) -> object:
    """Splits a text into words like a shell, without leading dashes; a list is only cleaned of them."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not a list of words: {error}") from None
    if not isinstance(value, list | tuple):
        return value
    return tuple(str(word).removeprefix("--") for word in value)


def refuse(words: tuple[str, ...], denied: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the words (`name` or `name=value`); raises `ValueError` if one is in `denied`, which has the reasons."""
    for word in words:
        name = word.partition("=")[0]
        if not _OPTION.fullmatch(word):
            raise ValueError(f"{word!r} is not a long option: write --name or --name=value, e.g. --switches=1")
        if name in denied:
            raise ValueError(f"--{name} is not allowed: {denied[name]}")
        for option in denied:
            if option.startswith(name):
                raise ValueError(f"--{name}, which is short for --{option}, is not allowed: {denied[option]}")
        _printable(word)
    return words


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} contains a character that cannot be printed")
    return text


def _hosts(value: object) -> object:
    if isinstance(value, str):
        value = split_hosts(value)
    if isinstance(value, list | tuple) and all(isinstance(host, str) for host in value):
        return compressed(value) or None
    return value


def _bare_type(value: str) -> str:
    parts = re.split("[:/,=]", value)
    if len(parts) == 1 and value != "gpu":
        return value
    types = [part for part in parts if part not in ("gres", "gpu") and not part.isdecimal()]
    example = next(iter(types), "the type alone, e.g. a100")
    raise ValueError(f"{value!r} is not only a GPU type: write {example}; gpu_request and gpu_count set the rest")


Argument = Annotated[str, Field(min_length=1), AfterValidator(_printable)]
"""A value of an option, passed to sbatch and srun as one word; any printable character is allowed."""


Hosts = Annotated[Argument | None, BeforeValidator(_hosts)]
"""Hosts in Slurm's short form, given as a list or as text with commas; None: no hosts."""


SbatchWords = Annotated[
    tuple[str, ...],
    BeforeValidator(words_of),
    AfterValidator(lambda words: refuse(words, OF_SBATCH)),
    Form("options by their long names, e.g. [--switches=1]"),
]


SrunWords = Annotated[
    tuple[str, ...],
    BeforeValidator(words_of),
    AfterValidator(lambda words: refuse(words, DENIED_OF_SRUN)),
    Form("options by their long names, e.g. [--network=sharp]"),
]


class SlurmSpec(Spec):
    """Options of `sbatch` and `srun`."""

    acting = (
        ActsIf(
            "cpu_bind mem_bind distribution srun_args", "system.launch.launcher", *BY_SRUN, why="only srun reads it"
        ),
        ActsIf("gpu_type gpu_count", "system.slurm.asks_for_gpus", why="slurm.gpu_request is none"),
        ActsIf("gpu_bind", "system.binds_gpus", why="only srun with a slurm.gpu_request reads it"),
    )

    partition: Argument | None = Field(None, description="--partition.")
    account: Argument | None = Field(None, description="--account.")
    qos: Argument | None = Field(None, description="--qos.")
    reservation: Argument | None = Field(None, description="--reservation.")
    constraint: Argument | None = Field(None, description="--constraint, e.g. a100|h100 or [rack1|rack2].")
    nodelist: Hosts = Field(None, description="--nodelist; a list, or text with commas.")
    exclude: Hosts = Field(None, description="--exclude; a list, or text with commas.")
    time_limit: TimeLimit = Field("00:30:00", description="--time per run without earlier runs, e.g. 00:30:00.")
    max_time: TimeLimit = Field("1-00:00:00", description="Maximum --time of a job, else it is split; 0: no limit.")
    exclusive: Flag = Field(True, description="--exclusive; if off, jobs of others on the node affect the figures.")
    mem: Memory | None = Field(None, description="--mem; 0: all; none: 0 if exclusive else not given; site: not given.")
    gpu_request: Literal["none", "gres", "gpus-per-node", "gpus-per-task"] = Field(
        "none", description="Slurm option with which GPUs are requested."
    )
    gpu_type: Annotated[SlurmWord, AfterValidator(_bare_type)] | None = Field(None, description="GPU type, e.g. a100.")
    gpu_count: Literal["ranks", "node"] = Field("ranks", description="GPUs per node: one per rank, or node.gpus.")
    gres: Argument | None = Field(None, description="--gres besides the GPUs, e.g. craynetwork:1.")
    mem_per_gpu: Memory | None = Field(None, description="--mem-per-gpu, instead of mem.")
    cpus_per_gpu: Count | None = Field(None, description="--cpus-per-gpu, instead of --cpus-per-task.")
    cpus_per_task: Flag = Field(True, description="Pass --cpus-per-task; off for sites that forbid it.")
    hint: Literal["compute_bound", "memory_bound", "multithread", "nomultithread"] | None = Field(
        None, description="--hint of sbatch and srun."
    )
    threads_per_core: Count | None = Field(None, description="--threads-per-core of sbatch and srun.")
    warn_before_s: CountOrZero | None = Field(
        None,
        description="Seconds before the time limit (or before the end of the grace time after a preemption signal) at "
        "which ranks are asked to stop and write a checkpoint; 0: no warning; none: 120 with requeue, else 0.",
    )
    requeue: Flag = Field(False, description="Let Slurm requeue interrupted jobs, which continue from checkpoints.")
    max_requeues: Count = Field(3, description="Maximum number of requeues of a job after interruptions.")
    extra: SbatchWords = Field((), description="Additional options of sbatch, e.g. --switches=1; a list, or text.")
    export: Annotated[tuple[VariableName, ...], FromText] = Field(
        (),
        description="Variables of the submitting shell that are passed to a job, besides HOME, USER, LOGNAME, SHELL, a "
        "plain PATH and the variables named in launch.environment; [ALL]: all variables.",
    )
    login_shell: Flag = Field(False, description="Run the job script in a login shell (bash -l).")
    cpu_bind: Argument | None = Field(None, description="srun --cpu-bind, e.g. cores; none: not given.")
    gpu_bind: Argument = Field(
        "none",
        description="srun --gpu-bind, e.g. single:1; none: ranks see all GPUs of the job on their node; site: Slurm's "
        "default, which binds with gpus-per-task.",
    )
    mem_bind: Argument | None = Field(None, description="srun --mem-bind, e.g. local; none: not given.")
    distribution: Argument = Field("block:block", description="srun --distribution; site: not given.")
    srun_args: SrunWords = Field((), description="Additional options of srun; a list, or text.")

    @property
    def asks_for_gpus(self) -> bool:
        return self.gpu_request != "none"

    @property
    def clusters(self) -> tuple[str, ...]:
        """The clusters that `extra` names by --clusters; empty: Slurm's default."""
        for word in reversed(self.extra):
            if word.startswith("clusters="):
                return tuple(word.partition("=")[2].split(","))
        return ()

    @property
    def exports_all(self) -> bool:
        return ALL_VARIABLES in self.export

    @property
    def warning_s(self) -> int:
        """Seconds before the end of a job at which its ranks are warned; 0: no warning."""
        if self.warn_before_s is not None:
            return self.warn_before_s
        return WARNING_S if self.requeue else 0

    @property
    def memory(self) -> str | None:
        if self.mem == "site":
            return None
        if self.mem is None and self.exclusive and not (self.mem_per_gpu or self._per_cpu):
            return "0"
        return self.mem

    @property
    def _per_cpu(self) -> bool:
        return any(word.startswith("mem-per-cpu=") for word in self.extra)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.mem not in (None, "site") and self.mem_per_gpu is not None:
            raise ValueError("mem and mem_per_gpu exclude each other")
        if self._per_cpu and (self.mem not in (None, "site") or self.mem_per_gpu is not None):
            raise ValueError("mem-per-cpu in extra excludes mem and mem_per_gpu")
        if any(word.partition(":")[0] in ("gpu", "gres/gpu") for word in (self.gres or "").split(",")):
            raise ValueError(f"gres {self.gres!r} requests GPUs: use gpu_request, gpu_type and gpu_count")
        if self.mem_per_gpu == "site":
            raise ValueError("mem_per_gpu must be a size, or left out")
        if self.hint is not None and (self.threads_per_core is not None or self.cpu_bind is not None):
            raise ValueError("hint excludes threads_per_core and cpu_bind")
        if self.gpu_request == "none" and (self.cpus_per_gpu is not None or self.mem_per_gpu is not None):
            raise ValueError("cpus_per_gpu and mem_per_gpu need a gpu_request")
        if self.gpu_count == "node" and self.gpu_request == "gpus-per-task":
            raise ValueError("gpu_count node needs gpu_request gres or gpus-per-node")
        return self
