"""How gradients are exchanged: the engine and its settings, by Horovod's and PyTorch's own names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.specs.base import Count, Flag, NonNegative, Spec

EngineName = Literal["horovod", "ddp", "single"]

HOROVOD_VARIABLES = {
    "fusion_threshold": "sync.fusion",
    "cycle_time": "engine.horovod.cycle_time_ms",
    "hierarchical_allreduce": "sync.exchange=horovod-hierarchical",
    "torus_allreduce": "sync.exchange=horovod-torus",
    "autotune": "engine.horovod.autotune",
    "autotune_warmup_samples": "engine.horovod.autotune_warmup_samples",
    "autotune_steps_per_sample": "engine.horovod.autotune_steps_per_sample",
    "autotune_bayes_opt_max_samples": "engine.horovod.autotune_max_samples",
}
"""Horovod's variables that dlbench sets, in small letters and without ``HOROVOD_``, and the key that says to what."""

_OTHER_NAMES = {
    **dict.fromkeys(
        ("fusion_threshold_bytes", "fusion_threshold_mb", "bucket_cap_mb", "bucket_cap_bytes"), "sync.fusion"
    ),
    "compression": "sync.wire",
}


def key_for_name(name: str) -> str | None:
    """The key, of sizes with an example, for ``HOROVOD_FUSION_THRESHOLD`` or ``bucket_cap_mb``; None: no such name."""
    key = (HOROVOD_VARIABLES | _OTHER_NAMES).get(name.lower().removeprefix("horovod_"))
    return f"{key}, e.g. {key}=25MiB" if key == "sync.fusion" else key


class HorovodSettings(Spec):
    """Settings of Horovod 0.28; the defaults are Horovod's own (operations.cc)."""

    cycle_time_ms: NonNegative = Field(1.0, description="HOROVOD_CYCLE_TIME, milliseconds.")
    autotune: Flag = Field(
        False, description="HOROVOD_AUTOTUNE: Horovod searches threshold and cycle time during the warm-up steps."
    )
    autotune_warmup_samples: Count = Field(3, description="HOROVOD_AUTOTUNE_WARMUP_SAMPLES.")
    autotune_steps_per_sample: Count = Field(10, description="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE.")
    autotune_max_samples: Count = Field(20, description="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES.")

    @property
    def autotune_steps(self) -> int:
        """Steps of the autotuner's search with its categorical parameters pinned, as dlbench pins them.

        Each of (warm-up + maximum + 1) scores is the median of five samples of `steps_per_sample` steps
        (parameter_manager.cc of Horovod 0.28).
        """
        scores = self.autotune_warmup_samples + self.autotune_max_samples + 1
        return scores * (5 * self.autotune_steps_per_sample + 1)


class DdpSettings(Spec):
    """Settings of torch.nn.parallel.DistributedDataParallel; the defaults are PyTorch's own."""

    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl on GPUs, gloo otherwise.")
    gradient_as_bucket_view: Flag = Field(
        False, description="Gradients are views of the buckets, which saves a copy and its memory."
    )
    static_graph: Flag = Field(False, description="Every step uses the same parameters, in the same order.")


class EngineSpec(Spec):
    """The engine of a run; settings of the engines not chosen are kept at their defaults."""

    name: EngineName = Field(
        "horovod", description="horovod, ddp (torch.distributed), or single (one rank, no exchange)."
    )
    horovod: HorovodSettings = Field(HorovodSettings(), description="Settings of engine horovod.")
    ddp: DdpSettings = Field(DdpSettings(), description="Settings of engine ddp.")
