"""Training engines, their settings under the names that Horovod and PyTorch use, and what a Horovod build supports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from dlbench.errors import DlbenchError, EnvironmentLacksError, UserError
from dlbench.specs.base import ActsIf, Count, CountOrZero, Flag, Fraction, NonNegative, Positive, Ranks, Spec
from dlbench.specs.sync import UNEXCHANGED, UNFUSED, Fusion, read_fusion

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
"""Keys that set Horovod's variables, by the variable in lower case without ``HOROVOD_``."""

MAX_MICROBATCHES = 4096  # More than bring anything: with 64 stages the bubble is then 1.5 %.
_OTHER_NAMES = {
    **dict.fromkeys(
        ("fusion_threshold_bytes", "fusion_threshold_mb", "bucket_cap_mb", "bucket_cap_bytes"), "sync.fusion"
    ),
    "compression": "sync.wire",
}
SETTING_OF_POLICY = {"ssp": "staleness", "groups": "group_size", "backup": "wait_share"}
REMEDY = "run `dlbench setup horovod` in the Python environment of the compute nodes"


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """Properties of an engine that are known without importing its library."""

    title: str  # Name in reports.
    on_ranks: str  # `module:class` that ranks import, a `dlbench.node.sync.engine.Engine`.
    synchronises: bool = True  # Whether it supports two ranks or more.
    fusion: Fusion = UNFUSED  # Default fusion of its library.
    package: str = ""  # Package that ranks import besides torch.
    overlaps_compiled: bool = False
    """Whether gradients leave a compiled backward pass before its end, as torch.compile splits graphs for DDP."""
    capture_passes: int = 3  # Passes before a CUDA graph is captured, see `make_graphed_callables`.
    contiguous_only: bool = False  # Whether it supports only contiguous tensors, also to broadcast weights.


ENGINES = {
    "horovod": EngineKind(
        title="Horovod",
        on_ranks="dlbench.node.sync.horovod.engine:HorovodEngine",
        fusion=read_fusion("128MiB"),  # operations.cc of Horovod 0.28
        package="horovod",
        contiguous_only=True,  # mpi_ops.py of Horovod 0.28.1, `_check_function`
    ),
    "ddp": EngineKind(
        title="PyTorch DDP",
        on_ranks="dlbench.node.sync.ddp:DdpEngine",
        fusion=read_fusion("25MiB"),
        overlaps_compiled=True,
        capture_passes=11,
    ),
    "fsdp": EngineKind(
        title="PyTorch FSDP",
        on_ranks="dlbench.node.sync.fsdp.engine:FsdpEngine",
        contiguous_only=True,  # _fsdp_param.py of torch 2.13, `_init_sharded_param`
    ),
    "pipeline": EngineKind(title="PyTorch pipeline", on_ranks="dlbench.node.sync.pipeline:PipelineEngine"),
    "emulated": EngineKind(
        title="asynchronous training, emulated",
        on_ranks="dlbench.node.sync.emulated:EmulatedEngine",
        synchronises=False,
    ),
    "single": EngineKind(title="single process", on_ranks="dlbench.node.sync.engine:SingleEngine", synchronises=False),
}
"""Every engine by its name; a new engine is registered here."""


def engine_title(name: str) -> str:
    """Returns an engine's title for reports; an unknown name is returned unchanged."""
    if name not in ENGINES:
        return name
    return ENGINES[name].title


def _known_engine(value: object) -> str:
    if isinstance(value, str) and value in ENGINES:
        return value
    *names, last = ENGINES
    raise ValueError(f"must be {', '.join(names)} or {last}, got {value!r}")


EngineName = Annotated[str, BeforeValidator(_known_engine), WithJsonSchema({"enum": list(ENGINES), "type": "string"})]


def key_for_name(name: str) -> str | None:
    """Returns the key for a name such as ``HOROVOD_FUSION_THRESHOLD`` or ``bucket_cap_mb``; None: unknown name."""
    key = (HOROVOD_VARIABLES | _OTHER_NAMES).get(name.lower().removeprefix("horovod_"))
    if key == "sync.fusion":
        return f"{key}, e.g. {key}=25MiB"
    return key


class HorovodSettings(Spec):
    """Settings of Horovod 0.28; the defaults are Horovod's own (operations.cc)."""

    acting = (
        ActsIf("cycle_time_ms", "engine.autotunes", False, why="engine.horovod.autotune tunes fusion and cycle time"),
        ActsIf(
            "autotune_warmup_samples autotune_steps_per_sample autotune_max_samples",
            "engine.horovod.autotune",
            why="only engine.horovod.autotune reads it",
        ),
    )

    cycle_time_ms: NonNegative = Field(1.0, description="HOROVOD_CYCLE_TIME, milliseconds.")
    autotune: Flag = Field(False, description="HOROVOD_AUTOTUNE: tunes fusion and cycle time during the warm-up.")
    autotune_warmup_samples: Count = Field(3, description="HOROVOD_AUTOTUNE_WARMUP_SAMPLES.")
    autotune_steps_per_sample: Count = Field(10, description="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE.")
    autotune_max_samples: Count = Field(20, description="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES.")

    @property
    def autotune_steps(self) -> int:
        """Steps that the autotuner needs with fixed categorical parameters (parameter_manager.cc of Horovod 0.28)."""
        # Each score is the median of five samples.
        scores = self.autotune_warmup_samples + self.autotune_max_samples + 1
        return scores * (5 * self.autotune_steps_per_sample + 1)


class DdpSettings(Spec):
    """Settings of torch.nn.parallel.DistributedDataParallel; except for `auto`, the defaults are PyTorch's."""

    acting = (
        ActsIf("shard_optimizer", "layout.is_one_rank", False, why="one rank keeps all of the optimizer's state"),
        ActsIf("gradient_as_bucket_view static_graph", "sync.is_own", False, why="only DDP's exchange uses buckets"),
        ActsIf("gradient_as_bucket_view static_graph", "sync.exchanges_gradients", why=UNEXCHANGED),
    )

    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl on GPUs, gloo otherwise.")
    gradient_as_bucket_view: Literal["auto"] | Flag = Field(
        "auto", description="Gradients are views of the buckets, which saves a copy and memory; auto: true on GPUs."
    )
    static_graph: Flag = Field(False, description="Assume that every step uses the same parameters in the same order.")
    shard_optimizer: Flag = Field(
        False,
        description="ZeRO-1: each rank stores the optimizer state of some parameters, updates these and sends them to "
        "the others (torch's ZeroRedundancyOptimizer).",
    )
    spatial_ranks: Ranks = Field(
        1,
        description="Neighbouring ranks that share each volume, cut along its depth (spatial parallelism; CosmoFlow "
        "only). They read the same samples, send each other the planes at the cuts before each convolution, and gather "
        "the slabs where they become too thin.",
    )

    def views_buckets(self, *, on_gpu: bool) -> bool:
        """Returns whether gradients are views of the buckets on ranks that compute on GPUs, or on CPUs."""
        is_view = self.gradient_as_bucket_view
        return on_gpu if is_view == "auto" else is_view


class FsdpSettings(Spec):
    """Settings of torch.distributed.fsdp.fully_shard (FSDP2)."""

    acting = (
        ActsIf("shard shard_ranks wrap prefetch", "shares_parameters", why="ranks of one replica gather no parameters"),
        ActsIf("shard_ranks", "layout.is_one_node", False, why="the ranks of one node are all ranks"),
        ActsIf("prefetch", "engine.fsdp.wrap", "blocks", why="engine.fsdp.wrap network has no blocks"),
    )

    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl on GPUs, gloo otherwise.")
    shard: Literal["parameters", "gradients"] = Field(
        "parameters",
        description="State that stays sharded between forward and backward pass. parameters: ZeRO-3, parameters are "
        "gathered again for the backward pass. gradients: ZeRO-2, only gradients and optimizer state are sharded.",
    )
    shard_ranks: Literal["all", "node"] = Field(
        "all",
        description="Ranks over which the state is sharded: all, or those of a node, with gradients all-reduced across "
        "nodes (HSDP).",
    )
    wrap: Literal["blocks", "network"] = Field("blocks", description="Unit of a gather: a block, or the whole network.")
    prefetch: Count = Field(1, description="Number of blocks gathered ahead, if gathers overlap with computing (GPUs).")
    tensor_ranks: Ranks = Field(
        1,
        description="Neighbouring ranks that share each layer (tensor parallelism; BERT only). They read the same "
        "samples and use the same dropout masks, except in attention, where each draws the masks of its heads.",
    )
    offload: Flag = Field(False, description="Store parameters, gradients and optimizer state on the host (GPUs only).")


class PipelineSettings(Spec):
    """Settings of torch.distributed.pipelining."""

    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl on GPUs, gloo otherwise.")
    stages: Ranks = Field(
        2,
        description="Neighbouring ranks that each train some consecutive layers (BERT only) and read the same samples.",
    )
    microbatches: Annotated[int, Field(strict=True, gt=0, le=MAX_MICROBATCHES)] = Field(
        4, description="Equal parts of the stages' batch (train.batch_per_rank x stages) that follow one another."
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        "1f1b",
        description="gpipe: all forward passes, then all backward passes. 1f1b: backward passes begin as soon as they "
        "can, so that a stage stores the activations of at most `stages` microbatches.",
    )

    def bubble(self, imbalance: float = 1.0) -> float:
        """Returns the share of the passes in which stages wait, (p-1)/(m+p-1) for stages of equal length.

        `imbalance` is the longest stage over the mean: m passes of a mean stage take p - 1 + m of them if all are
        equal, else the sum of all stages and m - 1 times the longest (Huang et al., "GPipe", 2019, section 2.3).
        """
        return 1 - self.microbatches / (self.stages + (self.microbatches - 1) * imbalance)


class EmulatedSettings(Spec):
    """Settings of emulated workers, each with a part of the batch (train.gradient_accumulation)."""

    acting = tuple(
        ActsIf(name, "engine.emulated.policy", policy, why=f"only policy {policy} reads it")
        for policy, name in SETTING_OF_POLICY.items()
    )

    policy: Literal["bsp", "asp", "ssp", "groups", "backup"] = Field(
        "bsp",
        description="bsp: synchronous. asp: asynchronous. ssp: with bounded staleness. groups: synchronous inside "
        "groups of workers. backup: synchronous, without the latest gradients.",
    )
    staleness: CountOrZero = Field(1, description="Clocks that a worker may be ahead of the slowest; 0 is bsp.")
    group_size: Count = Field(2, description="Neighbouring workers of a group.")
    wait_share: Fraction = Field(0.95, gt=0, description="Share of workers whose gradients are waited for.")
    steps_from: str | None = Field(
        None, min_length=1, description="Run folder whose recorded steps are the workers' compute times."
    )
    work_s: tuple[tuple[Positive, ...], ...] = Field(
        (), description="In plans: steps of that run without their exchange, by rank, seconds."
    )
    exchange_s: NonNegative = Field(
        0.0, description="In plans: exchange of a step on the rank that waits least for others, median, seconds."
    )

    @property
    def bound(self) -> int | None:
        """Clocks that a worker may be ahead of the slowest one; None: any number."""
        bounds = {"ssp": self.staleness, "asp": None, "groups": None}
        return bounds.get(self.policy, 0)

    @property
    def words(self) -> str:
        """The policy with the setting that it reads, e.g. `ssp, staleness 2`."""
        name = SETTING_OF_POLICY.get(self.policy)
        return self.policy if name is None else f"{self.policy}, {name} {getattr(self, name)}"

    def quorum(self, workers: int) -> int:
        """Returns the number of gradients of an update."""
        if self.policy == "groups":
            return self.group_size
        if self.policy == "backup":
            return math.ceil(self.wait_share * workers - 1e-9)  # 0.55 * 100 is a little more than 55
        return workers if self.bound == 0 else 1


class EngineSpec(Spec):
    """The engine of a run; settings of the other engines stay at their defaults."""

    acting = (
        ActsIf("horovod", "exchanges_by", "horovod", why="only engine horovod with two ranks or more reads it"),
        ActsIf("horovod", "sync.exchanges_gradients", why=UNEXCHANGED),
        ActsIf("ddp", "engine.name", "ddp", why="only engine ddp reads it"),
        ActsIf("fsdp", "engine.name", "fsdp", why="only engine fsdp reads it"),
        ActsIf("pipeline", "engine.name", "pipeline", why="only engine pipeline reads it"),
        ActsIf("emulated", "engine.name", "emulated", why="only engine emulated reads it"),
    )

    name: EngineName = Field(
        "horovod",
        description="Training engine: horovod, ddp (torch.distributed), fsdp (torch.distributed, sharded), pipeline "
        "(torch.distributed, layers on different ranks), emulated (one rank, asynchronous workers), or single (one "
        "rank, no exchange).",
    )
    horovod: HorovodSettings = Field(HorovodSettings(), description="Settings of engine horovod.")
    ddp: DdpSettings = Field(DdpSettings(), description="Settings of engine ddp.")
    fsdp: FsdpSettings = Field(FsdpSettings(), description="Settings of engine fsdp.")
    pipeline: PipelineSettings = Field(PipelineSettings(), description="Settings of engine pipeline.")
    emulated: EmulatedSettings = Field(EmulatedSettings(), description="Settings of engine emulated.")

    @property
    def kind(self) -> EngineKind:
        return ENGINES[self.name]

    @property
    def settings(self) -> Spec | None:
        return getattr(self, self.name, None)

    @property
    def spatial_ranks(self) -> int:
        """The ranks that share each volume; 1 with other engines than ddp."""
        return self.ddp.spatial_ranks if self.name == "ddp" else 1

    @property
    def autotunes(self) -> bool:
        return self.name == "horovod" and self.horovod.autotune


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
