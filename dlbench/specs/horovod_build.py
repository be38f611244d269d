"""Checks whether an installed Horovod supports a run; used for planning and by the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dlbench.errors import DlbenchError, EnvironmentLacksError, UserError

REMEDY = "run `dlbench setup horovod` in the Python environment of the compute nodes"


@dataclass(frozen=True, kw_only=True)
class HorovodBuild:
    """The features of an installed Horovod, as the functions of `horovod.torch` report them."""

    gloo: bool
    mpi: bool
    nccl: bool

    def refusal(
        self,
        *,
        use_mpi: bool,
        ranks: int,
        nodes: int,
        on_gpu: bool,
        exchange: str = "flat",
        way_to_nccl: Callable[[], str] = lambda: f"for one with it, {REMEDY}",
    ) -> DlbenchError | None:
        """Returns the error with which ranks refuse this build; None if it supports the run.

        `exchange`: flat, or a flag that only NCCL's operations support (nccl_operations.cc and operations.cc of 0.28).
        """
        if exchange != "flat":
            setting = f"sync.exchange {exchange}"
            if not self.nccl:
                return EnvironmentLacksError(
                    f"{setting}: this Horovod was built without NCCL, and such builds silently ignore the flag; "
                    "use sync.exchange=hierarchical, which dlbench implements for any back-end"
                )
            if exchange == "horovod-hierarchical" and not use_mpi:
                return EnvironmentLacksError(
                    f"{setting}: Horovod goes across nodes by MPI here and ignores the flag without it; use an MPI "
                    "launcher, or sync.exchange=hierarchical"
                )
            if nodes == 1 and ranks > 1:
                return UserError(f"{setting}: Horovod ignores the flag on a single node; use more nodes")
        if use_mpi and not self.mpi:
            return EnvironmentLacksError(
                "engine horovod: this Horovod was built without MPI, which launchers mpirun and srun-mpi need; use "
                "--launcher srun-gloo (without Slurm: local) or --engine ddp; for one with MPI, "
                f"{REMEDY}, with Open MPI's mpicxx on the PATH"
            )
        if on_gpu and ranks > 1 and not self.nccl:
            return EnvironmentLacksError(
                f"engine horovod: this Horovod was built without NCCL, which {ranks} ranks on GPUs need; "
                f"{way_to_nccl()}, or use --engine ddp"
            )
        if not use_mpi and not self.gloo:
            return EnvironmentLacksError(f"engine horovod: this Horovod was built without Gloo; {REMEDY}")
        return None
