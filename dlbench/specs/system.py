"""Where it runs: one system YAML, written by a site's admin."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from dlbench.confidential import is_secret_name, is_secret_value
from dlbench.specs.base import Bytes, Count, CountOrZero, Flag, Name, Positive, Precision, SlurmWord, Spec

LauncherName = Literal["local", "mpirun", "srun-mpi", "srun-gloo"]

_ENVIRONMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"


# Variables that bash does not let a script set; `export` of one would end it.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})


class SlurmSpec(Spec):
    """What `sbatch` is asked for. Words are checked, because `#SBATCH` lines cannot be quoted."""

    partition: SlurmWord | None = Field(None, description="--partition.")
    account: SlurmWord | None = Field(None, description="--account.")
    qos: SlurmWord | None = Field(None, description="--qos.")
    reservation: SlurmWord | None = Field(None, description="--reservation.")
    constraint: SlurmWord | None = Field(None, description="--constraint.")
    nodelist: SlurmWord | None = Field(None, description="--nodelist.")
    exclude: SlurmWord | None = Field(None, description="--exclude.")
    time_limit: Annotated[
        str, Field(pattern=r"^([0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?|[0-9]+-[0-9]+(:[0-9]{2}){0,2})$")
    ] = Field("00:30:00", description="--time, as Slurm writes it, e.g. 00:30:00.")
    exclusive: Flag = Field(True, description="--exclusive; off, neighbours' load is part of the figures.")
    gpu_request: Literal["none", "gres", "gpus-per-node", "gpus-per-task"] = Field(
        "none", description="How this site wants GPUs asked for."
    )
    gpu_type: SlurmWord | None = Field(None, description="GPU type in the request, e.g. a100.")
    gpu_bind: SlurmWord = Field(
        "none", description="srun --gpu-bind; none: ranks reach all GPUs of their node; site: not given."
    )
    cpus_per_task: Flag = Field(True, description="Whether --cpus-per-task may be given.")
    extra: tuple[SlurmWord, ...] = Field((), description="Further options, e.g. --switches=1, as they are.")

    @field_validator("extra", mode="before")
    @classmethod
    def _strip_dashes(cls, value: object) -> object:
        """`--switches=1` and `switches=1` mean the same; the dashes are the template's."""
        return tuple(str(v).removeprefix("--") for v in value) if isinstance(value, list | tuple) else value


class NodeSpec(Spec):
    """One node of the system."""

    cores: Count | None = Field(
        None, description="Cores a job may use on a node; required with a scheduler; none: all that this machine has."
    )
    gpus: CountOrZero = Field(0, description="GPUs of a node.")
    ranks: Count | None = Field(None, description="Ranks per node; none: one per GPU, or one per node without GPUs.")

    peak_tflops: dict[Precision, Positive] = Field(
        default_factory=dict,
        description="Peak rate of one GPU, or without GPUs of one core, by precision, TFLOP/s; dense, not sparse.",
    )
    peak_source: str | None = Field(None, min_length=1, description="Where peak_tflops is from; printed with each MFU.")

    @model_validator(mode="after")
    def _peak_has_source(self) -> Self:
        if self.peak_tflops and self.peak_source is None:
            raise ValueError("peak_tflops needs peak_source: the data sheet or the measurement it is from")
        return self

    @property
    def default_ranks(self) -> int:
        """Ranks per node when nobody says otherwise."""
        return self.ranks or self.gpus or 1


class VariableSource(Spec):
    """Where the value of a variable is taken from when the ranks start: nothing but this stands in a plan."""

    variable: Annotated[str, Field(pattern=_ENVIRONMENT_NAME)] | None = Field(
        None, description="A variable of the environment in which dlbench, or the batch job, runs."
    )
    file: Annotated[str, Field(pattern=r"^(/|~/)[^\x00-\x1f]*$")] | None = Field(
        None, description="A file that holds the value; its path from / or ~/, read where the ranks are started."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.variable is None) == (self.file is None):
            raise ValueError("give one of the two: variable: NAME or file: PATH")
        return self


def _form_of_variable(value: object) -> str:
    return "source" if isinstance(value, dict | VariableSource) else "text"


Variable = Annotated[
    Annotated[str, Tag("text")] | Annotated[VariableSource, Tag("source")], Discriminator(_form_of_variable)
]


class LaunchSpec(Spec):
    """How ranks are started."""

    launcher: LauncherName = Field("local", description="local, mpirun, srun-mpi (PMIx) or srun-gloo (no MPI).")
    mpi_plugin: SlurmWord = Field("pmix", description="Plugin for srun --mpi; checked against srun --mpi=list.")
    interface: SlurmWord | None = Field(None, description="Network interface for Gloo; none: the one that routes.")
    pin: Flag = Field(True, description="Bind every rank to cores of its own.")
    oversubscribe_yield: Flag | None = Field(
        None,
        description="Whether Open MPI yields the core while it waits, instead of spinning; none: only where the ranks "
        "of a node need more cores than it has.",
    )
    environment: dict[str, Variable] = Field(
        default_factory=dict,
        description="Variables set for the ranks; a secret as {variable: NAME} or {file: PATH}, where its value is.",
    )

    @property
    def referenced(self) -> frozenset[str]:
        """Names of the variables whose values are given by reference."""
        return frozenset(name for name, given in self.environment.items() if isinstance(given, VariableSource))

    @field_validator("environment", mode="after")
    @classmethod
    def _names(cls, value: dict[str, Variable]) -> dict[str, Variable]:
        for key, given in value.items():
            if not re.fullmatch(_ENVIRONMENT_NAME, key):
                raise ValueError(f"{key!r} is not a name of an environment variable")
            if isinstance(given, str) and "\0" in given:
                raise ValueError(f"the value of {key} holds a NUL character")
            if isinstance(given, str) and given and (is_secret_name(key) or is_secret_value(given)):
                raise ValueError(
                    f"variable {key} looks like a secret, and plan.json would show it to all who may read the run; say "
                    f"where its value is: {key}: {{variable: {key}}}, or {key}: {{file: PATH}}"
                )
            if key.startswith("DLBENCH_") or key in _READ_ONLY:
                raise ValueError(
                    f"variable {key} is not a site's to set: "
                    + ("bash's own" if key in _READ_ONLY else "dlbench tells ranks their place by such names")
                )
        return value


Tier = Literal["shared", "local", "memory"]
"""Where samples may lie: the shared file system, a disk of the node's own, memory of the node (tmpfs)."""
StagingTier = Literal["local", "memory"]


class TierSpec(Spec):
    """A place of the node's own that samples may be staged to."""

    path: Annotated[str, Field(pattern=r"^(/|\$[A-Za-z_][A-Za-z0-9_]*|~/)[^\x00-\x1f]*$")] = Field(
        description="A folder of the node: a path from / or ~/, or one that begins with a variable of the job, e.g. "
        "$SLURM_TMPDIR or $TMPDIR/dlbench. {host} stands for the node's name."
    )
    capacity_bytes: Bytes | None = Field(
        None, description="Bytes that samples may take there on each node; none: what the file system has free."
    )


class StorageSpec(Spec):
    """Tiers of storage. The shared file system is wherever the data set lies."""

    shared_title: str | None = Field(
        None, min_length=1, description="What the shared file system is, in words, e.g. Lustre, 40 OSTs; for reports."
    )
    local: TierSpec = Field(TierSpec(path="$TMPDIR"), description="A disk of the node's own.")
    memory: TierSpec = Field(TierSpec(path="/dev/shm"), description="Memory of the node: a tmpfs.")  # noqa: S108  (a folder of the user's own is made there)

    def tier(self, name: StagingTier) -> TierSpec:
        """One of the two tiers of a node."""
        return self.local if name == "local" else self.memory


class SystemSpec(Spec):
    """One system YAML, validated."""

    name: Name = Field(description="Name of the system, as in its file name.")
    title: str = Field(description="The system, in words.")
    scheduler: Literal["none", "slurm"] = Field("none", description="none: this machine; slurm: sbatch.")
    slurm: SlurmSpec = Field(SlurmSpec(), description="What sbatch is asked for.")
    node: NodeSpec = Field(NodeSpec(), description="One node.")
    launch: LaunchSpec = Field(LaunchSpec(), description="How ranks are started.")
    storage: StorageSpec = Field(StorageSpec(), description="Where samples may be staged to.")
    modules: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]*$")], ...] = Field(
        (), description="Environment modules to load, in order; as a list, or as text: gcc/12.2,openmpi/4.1."
    )
    setup: tuple[str, ...] = Field(
        (), description="Shell lines run before the ranks start, as they are; as a list, or as text: one line."
    )
    python: str | None = Field(None, description="Python of the compute nodes; none: the one that submits.")

    @field_validator("modules", mode="before")
    @classmethod
    def _modules_from_text(cls, value: object) -> object:
        """`--set` and `--ab` take one value: names with commas between them, or an empty text for none."""
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()

    @field_validator("setup", mode="before")
    @classmethod
    def _setup_from_text(cls, value: object) -> object:
        """The same: one line, or an empty text for none."""
        if not isinstance(value, str):
            return value
        return (value,) if value.strip() else ()

    @field_validator("python", mode="after")
    @classmethod
    def _python_is_one_path(cls, value: str | None) -> str | None:
        """It is started as one word, so that its path may hold blanks."""
        first, *further = (value or "").split(" ")
        if further and ("/" not in first or any(word.startswith("-") for word in further)):
            raise ValueError(
                f"{value!r} is a command with arguments, and python is the path of one program; write a script that "
                'ends in such a line (exec apptainer exec --nv image.sif python3 "$@"), and give the path of the script'
            )
        return value

    @model_validator(mode="after")
    def _launcher_fits(self) -> Self:
        if self.scheduler == "slurm" and self.launch.launcher == "local":
            raise ValueError(
                "launch.launcher 'local' starts ranks on one machine only; with scheduler 'slurm' use "
                "srun-mpi, srun-gloo or mpirun"
            )
        return self
