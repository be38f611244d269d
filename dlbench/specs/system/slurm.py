"""What `sbatch` and `srun` are asked for."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dlbench.specs.base import Count, CountOrZero, Flag, Form, FromText, SlurmWord, Spec
from dlbench.specs.system.launch import VariableName
from dlbench.specs.system.options import Argument, Hosts, Memory, SbatchWords, SrunWords

OF_SRUN = frozenset({"gpu_bind", "cpu_bind", "mem_bind", "distribution", "srun_args"})
"""Keys that sbatch never sees: runs of one job may differ in them."""

ALL_VARIABLES = "ALL"


TIME = r"^([0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?|[0-9]+-[0-9]+(:[0-9]{2}){0,2})$"
"""A time limit as Slurm writes it (sbatch(1), --time)."""
TimeLimit = Annotated[
    str, Field(pattern=TIME), Form('a time limit as Slurm writes it, in quotes: "00:30:00" or "1-12:00:00"')
]


WARNING_S = 120
"""Slurm may send the signal a minute early or late (sbatch(1), --signal); the rest is for a step and a checkpoint."""


class SlurmSpec(Spec):
    """What `sbatch` and `srun` are asked for."""

    partition: Argument | None = Field(None, description="--partition.")
    account: Argument | None = Field(None, description="--account.")
    qos: Argument | None = Field(None, description="--qos.")
    reservation: Argument | None = Field(None, description="--reservation.")
    constraint: Argument | None = Field(None, description="--constraint, e.g. a100|h100 or [rack1|rack2].")
    nodelist: Hosts = Field(None, description="--nodelist; a list, or text.")
    exclude: Hosts = Field(None, description="--exclude; a list, or text, of any length.")
    time_limit: TimeLimit = Field(
        "00:30:00", description="--time of a run without earlier ones, as Slurm writes it, e.g. 00:30:00."
    )
    max_time: TimeLimit = Field(
        "1-00:00:00", description="Longest --time of a job of several runs, which is split to stay below; 0: no bound."
    )
    exclusive: Flag = Field(True, description="--exclusive; off, neighbours' load is part of the figures.")
    mem: Memory | None = Field(
        None, description="--mem; 0: all of a node's; none: 0 on exclusive nodes, else not given; site: not given."
    )
    gpu_request: Literal["none", "gres", "gpus-per-node", "gpus-per-task"] = Field(
        "none", description="How this site wants GPUs asked for."
    )
    gpu_type: SlurmWord | None = Field(None, description="GPU type in the request, e.g. a100.")
    gpu_count: Literal["ranks", "node"] = Field(
        "ranks", description="GPUs asked for on a node: one per rank, or all of node.gpus."
    )
    gres: Argument | None = Field(None, description="--gres beside the GPUs, e.g. craynetwork:1.")
    mem_per_gpu: Memory | None = Field(None, description="--mem-per-gpu, in place of mem.")
    cpus_per_gpu: Count | None = Field(None, description="--cpus-per-gpu, in place of --cpus-per-task.")
    cpus_per_task: Flag = Field(True, description="Whether --cpus-per-task may be given.")
    hint: Literal["compute_bound", "memory_bound", "multithread", "nomultithread"] | None = Field(
        None, description="--hint of sbatch and srun."
    )
    threads_per_core: Count | None = Field(None, description="--threads-per-core of sbatch and srun.")
    warn_before_s: CountOrZero | None = Field(
        None,
        description="Seconds before the end of its time, or of its grace where the site preempts with a user's signal, "
        "at which a job's ranks are told to stop in good order; 0: they are ended; none: 120 with requeue, else 0.",
    )
    requeue: Flag = Field(
        False, description="Whether Slurm may start an interrupted, preempted or failed-node job again, which goes on."
    )
    max_requeues: Count = Field(3, description="How often a job asks to be started again after an interruption.")
    extra: SbatchWords = Field(
        (), description="Further options of sbatch, e.g. --switches=1; a list, or text with blanks between them."
    )
    export: Annotated[tuple[VariableName, ...], FromText] = Field(
        (),
        description="Variables of the submitting shell that a job gets beside HOME, USER, LOGNAME, SHELL, a plain PATH "
        "and what launch.environment refers to; [ALL]: all of them.",
    )
    login_shell: Flag = Field(False, description="Whether the job's script runs in a login shell (bash -l).")
    cpu_bind: Argument | None = Field(None, description="srun --cpu-bind, e.g. cores; none: not given.")
    gpu_bind: Argument = Field(
        "none", description="srun --gpu-bind; none: ranks reach all GPUs of their node; site: not given."
    )
    mem_bind: Argument | None = Field(None, description="srun --mem-bind, e.g. local; none: not given.")
    distribution: Argument = Field("block:block", description="srun --distribution; site: not given.")
    srun_args: SrunWords = Field((), description="Further options of srun, as extra.")

    @property
    def clusters(self) -> tuple[str, ...]:
        """What `extra` names by --clusters, where a site has several; empty: the one that answers."""
        named = [word.partition("=")[2] for word in self.extra if word.startswith("clusters=")]
        return tuple(named[-1].split(",")) if named else ()

    @property
    def exports_all(self) -> bool:
        """Whether a job gets all variables of the submitting shell."""
        return ALL_VARIABLES in self.export

    @property
    def warning_s(self) -> int:
        """Seconds before the end of a job's time at which its ranks are told; 0: they are not."""
        if self.warn_before_s is not None:
            return self.warn_before_s
        return WARNING_S if self.requeue else 0

    @property
    def memory(self) -> str | None:
        """What --mem is given; None for nothing."""
        if self.mem is not None:
            return None if self.mem == "site" else self.mem
        return "0" if self.exclusive and not (self.mem_per_gpu or self._per_cpu) else None

    @property
    def _per_cpu(self) -> bool:
        return any(word.startswith("mem-per-cpu=") for word in self.extra)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        """sbatch(1), srun(1): which options exclude each other."""
        if self.mem not in (None, "site") and self.mem_per_gpu is not None:
            raise ValueError("mem and mem_per_gpu exclude each other")
        if self._per_cpu and (self.mem not in (None, "site") or self.mem_per_gpu is not None):
            raise ValueError("mem-per-cpu in extra excludes mem and mem_per_gpu")
        if any(word.partition(":")[0] in ("gpu", "gres/gpu") for word in (self.gres or "").split(",")):
            raise ValueError(f"gres {self.gres!r} asks for GPUs: gpu_request, gpu_type and gpu_count are for them")
        if self.mem_per_gpu == "site":
            raise ValueError("mem_per_gpu is a size, or not given")
        if self.hint is not None and (self.threads_per_core is not None or self.cpu_bind is not None):
            raise ValueError("hint excludes threads_per_core and cpu_bind")
        if self.gpu_request == "none" and (self.cpus_per_gpu is not None or self.mem_per_gpu is not None):
            raise ValueError("cpus_per_gpu and mem_per_gpu need a gpu_request")
        if self.gpu_count == "node" and self.gpu_request == "gpus-per-task":
            raise ValueError("gpu_count node needs gpu_request gres or gpus-per-node")
        return self
