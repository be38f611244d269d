"""How ranks are started, and the variables they get."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from dlbench.confidential import is_secret_name, is_secret_value
from dlbench.specs.base import Flag, Form, SlurmWord, Spec
from dlbench.specs.engine import key_for_name

LauncherName = Literal["local", "mpirun", "srun-mpi", "srun-gloo"]

_ENVIRONMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
VariableName = Annotated[str, Field(pattern=_ENVIRONMENT_NAME), Form("a variable's name, e.g. NCCL_DEBUG")]


# Variables that bash does not let a script set; `export` of one would end it.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})


class VariableSource(Spec):
    """Where the value of a variable is taken from when the ranks start: nothing but this stands in a plan."""

    variable: VariableName | None = Field(
        None, description="A variable of the environment in which dlbench, or the batch job, runs."
    )
    file: Annotated[str, Field(pattern=r"^(/|~/)[^\x00-\x1f]*$"), Form("a path from / or ~/")] | None = Field(
        None, description="A file that holds the value; its path from / or ~/, read where the ranks are started."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.variable is None) == (self.file is None):
            raise ValueError("give one of the two: variable: NAME or file: PATH")
        return self


_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")


def _referenced(value: object) -> object:
    """`env:NAME` as `{variable: NAME}`."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return {"variable": found[1]} if found else value


def _form_of_variable(value: object) -> str:
    return "source" if isinstance(value, dict | VariableSource) else "text"


Variable = Annotated[
    Annotated[str, Tag("text")] | Annotated[VariableSource, Tag("source")],
    Discriminator(_form_of_variable),
    BeforeValidator(_referenced),
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
        description="Variables set for the ranks; a secret as env:NAME, {variable: NAME} or {file: PATH}, where its "
        "value is.",
    )

    @property
    def by_mpi(self) -> bool:
        """Whether MPI starts the ranks."""
        return self.launcher in ("mpirun", "srun-mpi")

    @property
    def referenced(self) -> frozenset[str]:
        """Names of the variables whose values are given by reference, and of those that they are taken from."""
        given = {name: one for name, one in self.environment.items() if isinstance(one, VariableSource)}
        return frozenset(given) | {one.variable for one in given.values() if one.variable is not None}

    @field_validator("environment", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        # Before the values: `HOROVOD_FUSION_THRESHOLD=1` is answered with the key, not with the form of a value.
        for key in map(str, value) if isinstance(value, dict) else ():
            if not re.fullmatch(_ENVIRONMENT_NAME, key):
                raise ValueError(f"{key!r} is not a name of an environment variable")
            if key.startswith("HOROVOD_") and (own := key_for_name(key)):
                raise ValueError(f"variable {key} is set by dlbench; use {own}")
            if key.startswith("DLBENCH_") or key in _READ_ONLY:
                raise ValueError(
                    f"variable {key} is not a site's to set: "
                    + ("bash's own" if key in _READ_ONLY else "dlbench tells ranks their place by such names")
                )
        return value

    @field_validator("environment", mode="after")
    @classmethod
    def _values(cls, value: dict[str, Variable]) -> dict[str, Variable]:
        for key, given in value.items():
            if isinstance(given, str) and "\0" in given:
                raise ValueError(f"the value of {key} holds a NUL character")
            if isinstance(given, str) and given and (is_secret_name(key) or is_secret_value(given)):
                raise ValueError(
                    f"variable {key} looks like a secret, and plan.json would show it to all who may read the run; say "
                    f"where its value is: {key}: {{variable: {key}}}, or {key}: {{file: PATH}}"
                )
        return value
