"""`record.json`: the result of a run, written once by rank 0 at the end from the `RankSummary` of each rank, which is
gathered as JSON and never stored. Statistics are made by `dlbench.analysis`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dlbench.records.data_path import ReadingResult, ShuffleResult, StagedNode, StagingResult
from dlbench.records.exchange import ExchangeResult, NcclTransport
from dlbench.records.out_of_core import HostUpdate, MemoryResult, RankMemory
from dlbench.records.watch import NodeLoad, NodeWatch, WatchResult
from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, RankNumber, RunName, Spec

Environment = Annotated[dict[str, str], Field(max_length=10_000)]
"""Facts by name. A machine has some hundred; the limit keeps reports of other people's files fast."""

AnyFloat = Annotated[float, Field(allow_inf_nan=True)]


class Check(Spec):
    """One sanity check."""

    name: str = Field(description="Name of the check.")
    passed: Flag = Field(description="Whether it passed.")
    detail: str = Field(description="The evidence, or the problem.")


class Setting(Spec):
    """A requested setting and the value in force."""

    key: str = Field(description="Key of the plan, e.g. engine.horovod.cycle_time_ms, or a similar name.")
    requested: str | int | float | bool | None = Field(description="Value in the plan.")
    effective: str | int | float | bool | None = Field(description="Value in force; null: unknown.")
    evidence: str = Field(description="Source of the effective value.")

    @property
    def is_without_effect(self) -> bool:
        """Returns whether it was requested and certainly not in force; `auto` requests nothing certain."""
        return self.requested not in (None, "auto", self.effective) and self.effective is not None


class RankGpu(Spec):
    """The GPU of one rank."""

    uuid: str = Field(description="GPU-..., or MIG-... for a slice of one.")
    pci_bus_id: str | None = Field(None, description="PCI address, 0000:1b:00.0; null: unknown.")
    numa_node: CountOrZero | None = Field(None, description="Its NUMA node; null: unknown.")
    is_slice: Flag = Field(False, description="Whether it is a MIG slice.")
    visible: Count = Field(description="GPUs that this rank sees.")
    no_peer_access: tuple[int, ...] = Field((), description="GPUs without peer access from this one, by CUDA index.")
    by_mask: Flag = Field(False, description="From earlier versions: whether it was chosen by the bound cores.")


class CollectiveWaits(Spec):
    """Waits of a rank for collectives outside of the exchange phase: seconds of all measured steps, by phase."""

    gather_s: dict[str, NonNegative] = Field(
        default_factory=dict, description="Waits for parameters of other ranks, by phase."
    )
    exchange_s: dict[str, NonNegative] = Field(
        default_factory=dict, description="Waits for sums of gradients or activations, or updated parameters, by phase."
    )
    stages_s: dict[str, NonNegative] = Field(
        default_factory=dict, description="Waits for other stages of a pipeline, by phase."
    )
    evidence: str = Field(description="Source of the figures.")


class StageTimes(Spec):
    """A rank's stage of a pipeline; times are of all measured steps, in seconds."""

    number: CountOrZero = Field(description="The stage, from 0.")
    num_parameters: Count = Field(description="Parameters that it holds.")
    busy_s: NonNegative = Field(description="Computing of its forward and backward passes.")
    passes_s: NonNegative = Field(description="From the begin of the passes until every stage has ended its own.")


class Compiling(Spec):
    """The work of torch's compiler on a rank for `train.compile`, and its cache."""

    seconds: NonNegative | None = Field(
        description="Compiling, with a forward and backward pass, before the first step, seconds; null: during warm-up."
    )
    programs: CountOrZero = Field(description="Programs compiled or loaded, with those of a fused update.")
    from_cache: CountOrZero = Field(description="Programs that were loaded from the cache.")

    @property
    def cache(self) -> str:
        """Returns the state of torch's cache: "warm" (complete), "cold", or "unknown"."""
        if not self.programs:
            return "unknown"
        return "cold" if self.from_cache < self.programs else "warm"


class HeldMemory(Spec):
    """Tensors on a rank's device at the peak of a step of the warm-up, bytes."""

    weights: CountOrZero = Field(description="Parameters of this rank.")
    gradients: CountOrZero = Field(description="Gradients of this rank.")
    optimizer: CountOrZero = Field(description="Optimizer state of this rank.")
    buffers: CountOrZero = Field(description="Buffers of the network and of the exchange.")
    activations: CountOrZero = Field(description="All else: activations, gathered parameters, temporary memory.")
    peak: CountOrZero = Field(description="Sum at the peak.")
    passes_peak: CountOrZero = Field(description="Peak of forward pass, backward pass and exchange.")
    update_peak: CountOrZero = Field(description="Peak of the optimizer's update.")
    host: CountOrZero | None = Field(
        None,
        description="Parameters, gradients, optimizer state on the host (engine.fsdp.offload); null: on the device.",
    )
    retries: CountOrZero | None = Field(
        None, description="Retries of torch's allocator in the whole run; null on a CPU."
    )
    evidence: str = Field(description="Source of the figures.")


class RankResult(Spec):
    """The result of a rank."""

    rank: RankNumber = Field(description="The rank, from 0.")
    node_rank: RankNumber = Field(description="Its node, from 0.")
    host: str = Field(description="Host name.")
    switch: str = Field("", description="Switches above its node from the root, root.leaf1, by Slurm; empty: none.")
    device: str = Field(description="Device, e.g. cpu or cuda:0 (NVIDIA A100).")
    cores: tuple[int, ...] = Field(description="Bound cores, or cores it may use.")
    threads: Count = Field(description="Compute threads.")
    pinned: Flag = Field(description="Whether it was bound to cores of its own.")
    numa_nodes: tuple[int, ...] = Field((), description="NUMA nodes of its cores; none if the machine has one.")
    gpu: RankGpu | None = Field(None, description="Its GPU; null on a CPU.")
    samples: CountOrZero = Field(description="Samples of all measured steps.")
    measured_s: NonNegative = Field(description="Start of the first to end of the last measured step, seconds.")
    first_loss: float | None = Field(description="Loss of the first step (warm-up included); null if not finite.")
    last_loss: float | None = Field(description="Loss of the last step; null if not finite.")
    losses_finite: Flag = Field(description="Whether every loss was finite.")
    initial_parameters_sha256: str = Field(description="Digest of all parameters before the first step.")
    final_parameters_sha256: str = Field(description="Digest of all parameters after the last step.")
    peak_memory_bytes: CountOrZero = Field(
        description="Peak resident memory (CPU; a warning if of the whole process) or allocated (GPU), from the first "
        "measured step on, bytes."
    )
    peak_reserved_bytes: CountOrZero | None = Field(
        None, description="Peak memory reserved by torch's allocator, with its cache, since then, bytes; null on CPUs."
    )
    peak_resident_bytes: CountOrZero | None = Field(
        None, description="Peak resident memory of the rank's process since then, also with a GPU; null: unknown."
    )
    startup_peak_bytes: CountOrZero | None = Field(
        None,
        description="`peak_memory_bytes` before the first measured step: set-up, cuDNN's search for algorithms, "
        "compiling, warm-up; out of core from the end of planning; null: not measured.",
    )
    held: HeldMemory | None = Field(
        None,
        description="Memory at the peak of a step by kind; null: no warm-up, swapping, out of core on a GPU (see "
        "memory), or no profiler in torch.",
    )
    waits: CollectiveWaits | None = Field(
        None, description="Waits for collectives within passes and update; null: none."
    )
    stage: StageTimes | None = Field(None, description="Its stage (engine pipeline); null: it trains all layers.")
    startup_s: NonNegative = Field(description="Process start to first step without hashing of parameters, seconds.")
    compiling: Compiling | None = Field(None, description="Work of the compiler; null: train.compile is none.")
    planted_s: NonNegative = Field(
        0.0, description="Time of the injected fault in this rank's measured steps, seconds."
    )
    garbage_collections: CountOrZero | None = Field(
        None, description="Garbage collections between measured steps, in which they are off; null: unknown."
    )
    garbage_s: NonNegative | None = Field(None, description="Time of these collections, seconds; not part of steps.")
    clock_error_s: NonNegative = Field(
        0.0, description="Largest error of the starts of steps against the machine's clock, seconds."
    )
    bad_samples: tuple[str, ...] = Field((), description="Names of unreadable samples.")
    bad_sample_count: CountOrZero = Field(0, description="Number of unreadable samples.")


class Event(Spec):
    """An event of the run on rank 0, with the keys of MLPerf logging."""

    key: str = Field(description="init_start, init_stop, run_start, epoch_start, eval_stop, ...")
    time_ms: CountOrZero = Field(description="Milliseconds since 1970, UTC.")
    value: float | int | str | None = Field(None, description="Value of the event, if any.")
    epoch: float | None = Field(
        None, description="Epochs so far; for epoch_start and epoch_stop the number of the epoch."
    )
    step: int | None = Field(None, description="Optimizer steps so far, with those before a resume.")
    samples: int | None = Field(None, description="Samples so far, over all ranks.")
    status: str | None = Field(None, description="success or aborted, for run_stop.")


class Evaluation(Spec):
    """One evaluation of the quality."""

    step: CountOrZero = Field(description="Optimizer steps so far, with those before a resume.")
    epoch: NonNegative = Field(description="Epochs so far.")
    samples: CountOrZero = Field(description="Samples so far, over all ranks.")
    train_s: NonNegative = Field(description="Time in training steps so far, rank 0, without evaluations, seconds.")
    wall_s: NonNegative = Field(
        description="Time from run_start to the evaluation's end, seconds; resumed runs add up."
    )
    value: float | None = Field(description="The metric; null if not finite.")
    loss: float | None = Field(description="Mean loss over the evaluated samples; null if not finite.")
    eval_s: NonNegative = Field(description="Time of the evaluation, seconds.")
    eval_samples: Count = Field(description="Samples evaluated, over all ranks, each once.")


def meets(value: float | None, target: float, *, higher_is_better: bool) -> bool:
    """Returns whether a quality meets its target; a value that is not finite does not."""
    if value is None:
        return False
    return value >= target if higher_is_better else value <= target


class QualityResult(Spec):
    """The result of training to a quality."""

    metric: Literal["top1", "masked_lm_accuracy", "mae"] = Field(description="Evaluated metric.")
    higher_is_better: Flag = Field(description="Whether higher values are better.")
    target: NonNegative = Field(description="Target value.")
    reached: Flag = Field(description="Whether an evaluation met the target.")
    predictor: str = Field(description="Description of a trivial predictor (frequencies only).")
    predictor_value: float = Field(description="Its metric on the evaluated samples.")
    evaluations: tuple[Evaluation, ...] = Field((), description="All evaluations in order, with resumed ones.")
    train_samples: Count = Field(description="Samples of the training data.")
    time_to_quality_s: NonNegative | None = Field(
        None, description="run_start to the end of the first evaluation at the target, seconds."
    )
    samples_to_quality: CountOrZero | None = Field(None, description="Samples until then, over all ranks.")
    epochs_to_quality: NonNegative | None = Field(None, description="Epochs until then.")


class NoiseScale(Spec):
    """Gradient noise scale (McCandlish et al. 2018), from gradients of two batch sizes."""

    small_batch: Count = Field(description="Samples of a local gradient.")
    large_batch: Count = Field(description="Samples of the exchanged gradient.")
    steps: CountOrZero = Field(description="Number of steps.")
    gradient_norm2: float | None = Field(description="Estimated squared norm of the true gradient; null: unknown.")
    covariance_trace: float | None = Field(description="Estimated trace of a sample's covariance.")
    noise_scale: NonNegative | None = Field(
        description="Trace over squared norm, samples; null: an estimate is not positive."
    )
    history: tuple[tuple[int, float, float], ...] = Field(
        (), description="Step, squared norm of local (mean over ranks) and exchanged gradients; thinned to 1,000."
    )


class LayerMacs(Spec):
    """Multiply-accumulates of one layer."""

    name: str = Field(description="Name of the layer in the network.")
    kind: str = Field(description="Kind: conv2d, linear, attention, ...")
    macs: CountOrZero = Field(description="Multiply-accumulates of a forward pass of one sample.")


class CheckpointWrite(Spec):
    """A written checkpoint; training stopped for `snapshot_s` and `waited_s`."""

    step: CountOrZero = Field(description="Optimizer steps done, as in its name.")
    bytes: CountOrZero = Field(description="Bytes of its tensors.")
    memory: str = Field(description="Host memory of the copy: page-locked, or pageable with the reason.")
    snapshot_s: NonNegative = Field(description="Time to copy the state to the host, seconds.")
    waited_s: NonNegative = Field(description="Waits of training for it, before the next one and at the end, seconds.")
    write_s: NonNegative = Field(description="Time of digest and writing in a thread, seconds.")

    @property
    def overlapped_s(self) -> float:
        return max(0.0, self.write_s - self.waited_s)


class EmulationResult(Spec):
    """The work of emulated workers: all steps of the run, warm-up included, in emulated time."""

    end_s: tuple[NonNegative, ...] = Field(description="Emulated time at the end of each step, seconds.")
    updates: tuple[CountOrZero, ...] = Field(description="Updates until the end of each step.")
    staleness: tuple[CountOrZero, ...] = Field(
        description="Applied gradients by clocks that their worker was ahead of the slowest, from 0."
    )
    dropped: CountOrZero = Field(description="Gradients that came after their update and were not applied.")


class Record(Spec):
    """`record.json`."""

    format: Literal["dlbench.record"] = Field("dlbench.record", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run, as in its plan.")
    configuration: str = Field(description="Digest of the plan's configuration.")
    state: Literal["valid", "invalid"] = Field(description="invalid: a sanity check failed; no figure may be made.")
    started: str = Field(description="Start of rank 0, UTC, ISO 8601.")
    finished: str = Field(description="End, UTC, ISO 8601.")
    clock: Literal["monotonic", "cuda-events"] = Field(description="Clock of the phases.")
    phases: Literal["overlapped", "synchronised"] = Field(description="Phase mode in force.")
    num_parameters: Count = Field(description="Trained parameters of the network.")
    gradient_bytes: Count = Field(description="Bytes of gradients exchanged in one step, before compression.")
    ranks: tuple[RankResult, ...] = Field(min_length=1, description="Results of all ranks, by rank.")
    checks: tuple[Check, ...] = Field(min_length=1, description="Sanity checks.")
    settings: tuple[Setting, ...] = Field((), description="Settings of the engine, requested and in force.")
    warnings: tuple[str, ...] = Field((), description="Warnings, each a sentence.")
    data: dict[str, Any] = Field(description="Report of the data source.")
    staging: StagingResult | None = Field(None, description="Staging of samples; null: none.")
    reading: ReadingResult | None = Field(None, description="Reading of samples; null for synthetic data.")
    shuffle: ShuffleResult | None = Field(None, description="Shuffling of samples; null for synthetic data.")
    memory: MemoryResult | None = Field(None, description="Treatment of activations; null: left to autograd.")
    host_update: HostUpdate | None = Field(None, description="Update on the host; null: the device updates.")
    steps: Count = Field(description="Steps of this run, warm-up included.")
    first_step: CountOrZero = Field(0, description="Optimizer steps before this run, if it was resumed.")
    resumed_from: str | None = Field(None, description="Checkpoint from which it was resumed.")
    attempt: Count = Field(1, description="Number of the attempt, from 1.")
    checkpoints: tuple[str, ...] = Field((), description="Checkpoints in the run's folder at the end.")
    checkpoint_writes: tuple[CheckpointWrite, ...] = Field((), description="All checkpoints written, in order.")
    precision: str | None = Field(None, description="Precision in force, in words; null: unknown.")
    emulates_precision: Flag = Field(
        False, description="Whether a device emulated this precision, so that its speed does not count."
    )
    overflow_steps: CountOrZero | None = Field(
        None, description="Measured and warm-up steps skipped because a gradient overflowed; fp16 only."
    )
    final_loss_scale: NonNegative | None = Field(None, description="Loss scale at the end; fp16 only.")
    layers: tuple[LayerMacs, ...] = Field((), description="Forward multiply-accumulates of a sample by layer.")
    training_flops_per_sample: CountOrZero | None = Field(
        None,
        description="Model FLOPs of a sample: forward, twice that backward but the input's gradient, no recomputation.",
    )
    quality: QualityResult | None = Field(None, description="Training to a quality; null for throughput runs.")
    noise_scale: NoiseScale | None = Field(None, description="Gradient noise scale, if requested.")
    events: tuple[Event, ...] = Field((), description="Events of the run, in order.")
    exchange: ExchangeResult | None = Field(None, description="Gradient exchange; null for one rank.")
    emulation: EmulationResult | None = Field(None, description="Emulated workers; null: none.")
    nccl: NcclTransport | None = Field(None, description="NCCL's transports; null: not reported.")
    watch: WatchResult | None = Field(None, description="Monitoring; null: none.")
    load: tuple[NodeLoad, ...] = Field((), description="Use of the cores of each node's ranks.")
    inert: tuple[str, ...] = Field((), description="Errors: requested settings without effect, each with the evidence.")
    environment: Environment = Field(description="Environment of rank 0, by name.")
    environment_differences: tuple[str, ...] = Field((), description="Differences of other ranks' environment.")

    @property
    def goes_on(self) -> bool:
        """Returns whether it continued an earlier attempt at the same run."""
        return self.attempt > 1 and self.first_step > 0

    @property
    def throughput(self) -> float | None:
        """Returns samples per second of all ranks, over the longest measured time of a rank; None: not measured."""
        measured_s = max((rank.measured_s for rank in self.ranks), default=0.0)
        return sum(rank.samples for rank in self.ranks) / measured_s if measured_s else None

    @property
    def held_bytes(self) -> int | None:
        """Returns the peak memory of a step on the rank with the most, bytes; None if not known for every rank."""
        peaks = []
        for rank in self.ranks:
            if rank.held is not None:
                peaks.append(rank.held.peak)
            elif rank.device.startswith("cuda"):
                peaks.append(rank.peak_memory_bytes)
        return max(peaks) if peaks and len(peaks) == len(self.ranks) else None

    @property
    def bubble(self) -> float | None:
        """Returns the share of the passes in which stages of a pipeline wait, all ranks together; None: no pipeline."""
        stages = [rank.stage for rank in self.ranks if rank.stage is not None]
        passes_s = sum(stage.passes_s for stage in stages)
        return 1 - sum(stage.busy_s for stage in stages) / passes_s if passes_s else None

    @property
    def stage_imbalance(self) -> float | None:
        """Returns the computing of the longest stage of a pipeline over the mean; None: no pipeline."""
        busy_s: dict[int, float] = {}
        for rank in self.ranks:
            if rank.stage is not None:
                busy_s[rank.stage.number] = busy_s.get(rank.stage.number, 0.0) + rank.stage.busy_s
        total_s = sum(busy_s.values())
        return max(busy_s.values()) * len(busy_s) / total_s if total_s else None

    @property
    def held_nodes(self) -> int:
        """Returns the nodes of its Slurm job that were idle during the run; runs of a job are executed one by one."""
        allocated = self.environment.get("variable.SLURM_JOB_NUM_NODES", "")
        used = len({rank.node_rank for rank in self.ranks})
        return max(0, int(allocated) - used) if allocated.isdecimal() else 0


class SpanCounts(Spec):
    """The spans of one rank's file."""

    num: CountOrZero
    dropped: CountOrZero  # Spans beyond the share of bytes.
    bytes: CountOrZero


class WatchSummary(Spec):
    """The monitoring of a rank."""

    node: NodeWatch | None = None  # Summary of the node's sampler, on its first rank.
    spans: SpanCounts | None = None  # None: no spans.
    sample_bytes: CountOrZero  # Bytes of the node's samples, on its first rank.
    problems: tuple[str, ...]  # Problems of monitoring, each a sentence.
    load: dict[str, Any]  # CPU time by `CoreLoad.summary`.


class StagingSummary(Spec):
    """The staging of the samples of a node."""

    node: StagedNode | None  # None: nothing was copied.
    warnings: tuple[str, ...]


class RankSummary(Spec):
    """The summary of a rank at the end; each part of training fills in its own fields."""

    result: RankResult
    environment: Environment
    nccl: NcclTransport | None = None  # None: there is no log.
    warnings: tuple[str, ...]
    emulates_precision: Flag
    reads: tuple[dict[str, Any], ...]  # Reads by epoch, see `EpochReads`.
    samples: dict[str, Any] | None = None  # See `ReadAudit.summary`; None: nothing is read.
    norms: tuple[tuple[AnyFloat, AnyFloat], ...] = ()  # Squared norms of local and exchanged gradients.
    memory: RankMemory | None = None  # None: activations are left to autograd.
    watch: WatchSummary
    staging: StagingSummary | None = None  # On the first rank of a node.
