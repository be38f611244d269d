"""Horovod's shared library on this rank: what dlbench's build adds to it, and why it cannot serve GPUs."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch

from dlbench.errors import DlbenchError, EnvironmentLacksError
from dlbench.machine.cuda_parts import find_cuda_parts
from dlbench.node.ranks import RankPlace
from dlbench.specs.horovod_build import REMEDY, HorovodBuild

TRACES_ALWAYS = (
    "not measured here: with its timeline at hand this Horovod waits for the GPU on the host of rank 0 in every step, "
    "so it was left out; `dlbench setup horovod` builds one that does so only while it is open"
)
"""Why there are no messages of a Horovod on GPUs without dlbench's patch."""


def loaded_library() -> ctypes.CDLL | None:
    """Horovod's own shared library, already in memory."""
    try:
        from horovod.torch import mpi_lib_v2

        return ctypes.CDLL(mpi_lib_v2.__file__)
    except (ImportError, OSError, AttributeError):
        return None


def closed_timeline_is_free() -> bool:
    """Whether a timeline that can be opened, but is not, leaves operations on GPUs as they are without it."""
    function = getattr(loaded_library(), "horovod_closed_timeline_is_free", None)
    if function is None:
        return False
    function.restype, function.argtypes = ctypes.c_bool, []
    return bool(function())


def require_import(error: ImportError) -> EnvironmentLacksError:
    """The error of a Horovod that cannot be imported; it names the library that it lacks, where it is one."""
    said = " ".join(str(error).split())
    if missing := re.search(r"(\S+\.so[.\d]*): cannot open shared object file", said):
        return EnvironmentLacksError(
            f"engine horovod: Horovod was built with {missing[1]}, which the loader does not find here; load the "
            f"module that brings it, or {REMEDY}; or use --engine ddp"
        )
    return EnvironmentLacksError(f"engine horovod: Horovod cannot be imported ({said}); {REMEDY}, or use --engine ddp")


def base_variables(exchange: str, *, is_watched: bool) -> dict[str, str]:
    """Variables of every run, so that those of the caller's shell do not act.

    Args:
        exchange: flat, horovod-hierarchical or horovod-torus.
        is_watched: whether the timeline can be opened later. All ranks must agree, because what they negotiate in
            depends on it.
    """
    found = {
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(int(exchange == "horovod-hierarchical")),
        "HOROVOD_TORUS_ALLREDUCE": str(int(exchange == "horovod-torus")),
    }
    return {**found, "HOROVOD_TIMELINE": "DYNAMIC"} if is_watched else found


def refusal(hvd: Any, place: RankPlace, *, use_mpi: bool, on_gpu: bool, **words: str) -> DlbenchError | None:
    """Why this rank refuses the imported `horovod.torch`; `words`: see `HorovodBuild.refusal`."""
    build = HorovodBuild(gloo=bool(hvd.gloo_built()), mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()))
    ranks, nodes = place.size, place.num_nodes
    return build.refusal(use_mpi=use_mpi, ranks=ranks, nodes=nodes, on_gpu=on_gpu, way_to_nccl=way_to_nccl, **words)


def way_to_nccl() -> str:
    """What leads to a Horovod with NCCL here, in a clause: what such a build lacks, or how to make one."""
    cuda = torch.version.cuda
    if cuda is None:
        return "this torch is not built for CUDA, the only GPUs that `dlbench setup horovod` builds for"
    lacks = find_cuda_parts(cuda, Path(torch.__file__).parent.parent)
    return f"a build with it lacks this here: {lacks}" if isinstance(lacks, str) else f"for one with it, {REMEDY}"
