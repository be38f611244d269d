"""What `sbatch` is asked for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dlbench.specs.base import Flag, SlurmWord, Spec

TIME = r"^([0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?|[0-9]+-[0-9]+(:[0-9]{2}){0,2})$"
"""A time limit as Slurm writes it (sbatch(1), --time)."""


class SlurmSpec(Spec):
    """What `sbatch` is asked for. Words are checked, because `#SBATCH` lines cannot be quoted."""

    partition: SlurmWord | None = Field(None, description="--partition.")
    account: SlurmWord | None = Field(None, description="--account.")
    qos: SlurmWord | None = Field(None, description="--qos.")
    reservation: SlurmWord | None = Field(None, description="--reservation.")
    constraint: SlurmWord | None = Field(None, description="--constraint.")
    nodelist: SlurmWord | None = Field(None, description="--nodelist.")
    exclude: SlurmWord | None = Field(None, description="--exclude.")
    time_limit: Annotated[str, Field(pattern=TIME)] = Field(
        "00:30:00", description="--time of a run without earlier ones, as Slurm writes it, e.g. 00:30:00."
    )
    max_time: Annotated[str, Field(pattern=TIME)] = Field(
        "1-00:00:00", description="Longest --time of a job of several runs, which is split to stay below; 0: no bound."
    )
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
