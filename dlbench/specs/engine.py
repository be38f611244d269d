"""How gradients are exchanged: the engine and its settings, by Horovod's and PyTorch's own names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.specs.base import Count, CountOrZero, NonNegative, Spec

EngineName = Literal["horovod", "ddp", "single"]


class HorovodSettings(Spec):
    """Settings of Horovod 0.28; the defaults are Horovod's own (operations.cc)."""

    fusion_threshold_bytes: CountOrZero = Field(
        128 * 1024 * 1024, description="HOROVOD_FUSION_THRESHOLD, bytes; 0 switches tensor fusion off."
    )
    cycle_time_ms: NonNegative = Field(1.0, description="HOROVOD_CYCLE_TIME, milliseconds.")
    compression: Literal["none", "fp16"] = Field("none", description="Compression of gradients on the wire.")


class DdpSettings(Spec):
    """Settings of torch.nn.parallel.DistributedDataParallel; the defaults are PyTorch's own."""

    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl on GPUs, gloo otherwise.")
    bucket_cap_bytes: Count = Field(
        25 * 1024 * 1024,
        description="Size of a gradient bucket, bytes; at the default the first one is 1 MiB, as in PyTorch.",
    )


class EngineSpec(Spec):
    """The engine of a run; settings of the engines not chosen are kept at their defaults."""

    name: EngineName = Field(
        "horovod", description="horovod, ddp (torch.distributed), or single (one rank, no exchange)."
    )
    horovod: HorovodSettings = Field(HorovodSettings(), description="Settings of engine horovod.")
    ddp: DdpSettings = Field(DdpSettings(), description="Settings of engine ddp.")
