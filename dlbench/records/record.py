"""`record.json`: what happened in one run. Immutable; rank 0 writes it once, at the end.

Statistics are not here: raw values are kept (step files), numbers are made of them by `dlbench.analysis`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dlbench.records.data_path import ReadingResult, ShuffleResult, StagingResult
from dlbench.records.exchange import ExchangeResult, NcclTransport
from dlbench.records.out_of_core import HostUpdate, MemoryResult
from dlbench.records.watch import NodeLoad, WatchResult
from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, RankNumber, RunName, Spec


class Check(Spec):
    """One sanity check."""

    name: str = Field(description="What was checked.")
    passed: Flag = Field(description="Whether it held.")
    detail: str = Field(description="The evidence, or what went wrong.")


Environment = Annotated[dict[str, str], Field(max_length=10_000)]
"""Facts by name. A machine has some hundred; a million of another's file would keep a report busy for minutes."""


class Setting(Spec):
    """A requested setting and what was in force."""

    key: str = Field(
        description="Key of the plan, e.g. engine.horovod.cycle_time_ms, or a name of the same form for what a plan "
        "cannot ask for."
    )
    requested: str | int | float | bool | None = Field(description="What the plan asks for.")
    effective: str | int | float | bool | None = Field(description="What was in force; null where it is not known.")
    evidence: str = Field(description="How the effective value is known.")

    @property
    def is_without_effect(self) -> bool:
        """Whether it was asked for and demonstrably not in force; `auto` asks for whatever is measured to be good."""
        return self.requested not in (None, "auto", self.effective) and self.effective is not None


class RankGpu(Spec):
    """The GPU of one rank."""

    uuid: str = Field(description="GPU-..., or MIG-... for a slice of one.")
    pci_bus_id: str | None = Field(None, description="As /sys has it, 0000:1b:00.0; null where not known.")
    numa_node: CountOrZero | None = Field(None, description="Its NUMA node; null where the machine does not say.")
    is_slice: Flag = Field(False, description="Whether it is a MIG slice, which is no whole GPU.")
    visible: Count = Field(description="GPUs that this rank sees.")
    no_peer_access: tuple[int, ...] = Field(
        (), description="GPUs it sees whose memory its own cannot reach, by CUDA's numbers."
    )
    by_mask: Flag = Field(
        False,
        description="Of earlier versions: whether it was chosen as the nearest to the cores that the launcher bound.",
    )


class CollectiveWaits(Spec):
    """What a rank waited for collectives elsewhere than in the exchange phase: seconds of all measured steps, by phase
    (forward, backward, optimizer).
    """

    gather_s: dict[str, NonNegative] = Field(
        default_factory=dict, description="For parameters that other ranks hold, by phase of the step."
    )
    exchange_s: dict[str, NonNegative] = Field(
        default_factory=dict, description="For sums of gradients or activations, or for updated parameters, by phase."
    )
    evidence: str = Field(description="How that is known.")


class Compiling(Spec):
    """What torch's compiler made on a rank for `train.compile`, and what it found in its cache."""

    seconds: NonNegative | None = Field(
        description="Compiling the network, with a forward and a backward pass, before the first step, seconds; null: "
        "blocks are compiled within the warm-up."
    )
    programs: CountOrZero = Field(description="Programs made or loaded, those of a fused update included.")
    from_cache: CountOrZero = Field(description="Those that an earlier process on the node had made.")

    @property
    def cache(self) -> str:
        """What torch's cache had: "warm" all, "cold" less; "unknown" where torch counted none."""
        return "unknown" if not self.programs else "cold" if self.from_cache < self.programs else "warm"


class HeldMemory(Spec):
    """What a rank's device held at the peak of a step, as one of the warm-up shows it, tensors alone, bytes."""

    weights: CountOrZero = Field(description="Parameters, this rank's share of them.")
    gradients: CountOrZero = Field(description="Gradients, likewise.")
    optimizer: CountOrZero = Field(description="The optimizer's values, likewise.")
    buffers: CountOrZero = Field(description="Buffers of the network and of the exchange.")
    activations: CountOrZero = Field(
        description="The rest at the peak: activations, gathered parameters, what operations take meanwhile."
    )
    peak: CountOrZero = Field(description="All of it.")
    passes_peak: CountOrZero = Field(description="The most that was held in forward and backward pass and exchange.")
    update_peak: CountOrZero = Field(description="The most that was held in the optimizer's update.")
    host: CountOrZero | None = Field(
        None,
        description="Parameters, gradients and optimizer state in the host's memory, where engine.fsdp.offload keeps "
        "them there; null: they lie on the device.",
    )
    retries: CountOrZero | None = Field(
        None, description="How often torch's allocator gave back its cache and tried again, whole run; null on a CPU."
    )
    evidence: str = Field(description="How that is known.")


class RankResult(Spec):
    """What one rank says of itself at the end."""

    rank: RankNumber = Field(description="The rank, from 0.")
    node_rank: RankNumber = Field(description="Its node, from 0.")
    host: str = Field(description="Host name.")
    switch: str = Field(
        "", description="Switches above its node from the root, root.leaf1, as Slurm reports them; empty: none."
    )
    device: str = Field(description="Where it computed, e.g. cpu or cuda:0 (NVIDIA A100).")
    cores: tuple[int, ...] = Field(description="Cores it was bound to (those it may use, where not bound).")
    threads: Count = Field(description="Compute threads.")
    pinned: Flag = Field(description="Whether it was bound to cores of its own.")
    numa_nodes: tuple[int, ...] = Field((), description="NUMA nodes of its cores; none where the machine has one.")
    gpu: RankGpu | None = Field(None, description="Its GPU; null on a CPU.")
    samples: CountOrZero = Field(description="Samples of all measured steps.")
    measured_s: NonNegative = Field(description="Start of the first to end of the last measured step, seconds.")
    first_loss: float | None = Field(description="Loss of the first step (warm-up included); null if not finite.")
    last_loss: float | None = Field(description="Loss of the last step; null if not finite.")
    losses_finite: Flag = Field(description="Whether every loss was finite.")
    initial_parameters_sha256: str = Field(description="Digest of all parameters before the first step.")
    final_parameters_sha256: str = Field(description="Digest of all parameters after the last step.")
    peak_memory_bytes: CountOrZero = Field(
        description="Peak resident memory (CPU) or peak allocated (GPU) from the first measured step on, bytes; a "
        "warning says where it is that of the whole process."
    )
    peak_reserved_bytes: CountOrZero | None = Field(
        None,
        description="Most that torch held of the GPU's memory since then, its cache included, bytes; null on CPUs.",
    )
    peak_resident_bytes: CountOrZero | None = Field(
        None, description="Peak resident memory of the rank's process, likewise, GPU or not; null where not known."
    )
    startup_peak_bytes: CountOrZero | None = Field(
        None,
        description="What `peak_memory_bytes` was before the first measured step: set-up, cuDNN's search for "
        "algorithms, compiling and warm-up; out of core from the end of planning on. Null where nothing was measured.",
    )
    held: HeldMemory | None = Field(
        None,
        description="What it held at the peak of a step, by kind; null: it had no warm-up, swapped tensors, trained "
        "out of core on a GPU (see memory) or had a torch without its profiler.",
    )
    waits: CollectiveWaits | None = Field(
        None, description="What it waited for collectives within passes and update; null: there are none."
    )
    startup_s: NonNegative = Field(
        description="Start of the process to the first step, less the hashing of parameters for the checks, seconds."
    )
    compiling: Compiling | None = Field(None, description="Its compiler's work; null: train.compile is none.")
    planted_s: NonNegative = Field(
        0.0, description="Time that the plan's injected fault added to this rank's measured steps, seconds."
    )
    garbage_collections: CountOrZero | None = Field(
        None,
        description="How often Python's garbage was collected between measured steps; in them the collector is off. "
        "Null where not known.",
    )
    garbage_s: NonNegative | None = Field(None, description="What that took, seconds; part of no step.")
    clock_error_s: NonNegative = Field(
        0.0,
        description="How far starts of steps may be off the clock of the machine, seconds: a GPU's events are tied to "
        "it between steps.",
    )
    bad_samples: tuple[str, ...] = Field((), description="Unreadable samples, named.")
    bad_sample_count: CountOrZero = Field(0, description="How many samples were unreadable.")


class Event(Spec):
    """A moment of the run, as rank 0 saw it; keys and meaning are MLPerf logging's."""

    key: str = Field(description="init_start, init_stop, run_start, epoch_start, eval_stop, ...")
    time_ms: CountOrZero = Field(description="Milliseconds since 1970, UTC.")
    value: float | int | str | None = Field(None, description="Value of the event, where it has one.")
    epoch: float | None = Field(
        None, description="Epochs trained so far; for epoch_start and epoch_stop the number of the epoch."
    )
    step: int | None = Field(None, description="Optimizer steps done so far, those before a resume included.")
    samples: int | None = Field(None, description="Samples trained so far, over all ranks.")
    status: str | None = Field(None, description="success or aborted, for run_stop.")


class Evaluation(Spec):
    """One look at the quality."""

    step: CountOrZero = Field(description="Optimizer steps done so far, those before a resume included.")
    epoch: NonNegative = Field(description="Epochs trained so far.")
    samples: CountOrZero = Field(description="Samples trained so far, over all ranks.")
    train_s: NonNegative = Field(description="Time in training steps so far, rank 0, seconds; evaluations left out.")
    wall_s: NonNegative = Field(
        description="From run_start to this evaluation's end, seconds; what was resumed adds up."
    )
    value: float | None = Field(description="The metric; null if not finite.")
    loss: float | None = Field(description="Mean loss over the evaluated samples; null if not finite.")
    eval_s: NonNegative = Field(description="What the evaluation took, seconds.")
    eval_samples: Count = Field(description="Samples evaluated, over all ranks, each once.")


def meets(value: float | None, target: float, *, higher_is_better: bool) -> bool:
    """Whether a quality meets its target: at least or, where lower is better, at most; what is not finite does not."""
    if value is None:
        return False
    return value >= target if higher_is_better else value <= target


class QualityResult(Spec):
    """How training to a quality went."""

    metric: Literal["top1", "masked_lm_accuracy", "mae"] = Field(description="What was evaluated.")
    higher_is_better: Flag = Field(description="Whether a higher value is a better one.")
    target: NonNegative = Field(description="The wanted value.")
    reached: Flag = Field(description="Whether an evaluation met the target.")
    predictor: str = Field(description="A predictor that has learnt nothing but frequencies, in words.")
    predictor_value: float = Field(description="Its metric on the evaluated samples.")
    evaluations: tuple[Evaluation, ...] = Field((), description="Every evaluation, in order; resumed ones included.")
    train_samples: Count = Field(description="Samples of the training data.")
    time_to_quality_s: NonNegative | None = Field(
        None, description="run_start to the end of the first evaluation that met the target, seconds."
    )
    samples_to_quality: CountOrZero | None = Field(None, description="Samples trained until then, over all ranks.")
    epochs_to_quality: NonNegative | None = Field(None, description="Epochs trained until then.")


class NoiseScale(Spec):
    """Gradient noise scale (McCandlish et al. 2018), from gradients of two batch sizes."""

    small_batch: Count = Field(description="Samples behind a local gradient.")
    large_batch: Count = Field(description="Samples behind the exchanged gradient.")
    steps: CountOrZero = Field(description="Steps it was estimated from.")
    gradient_norm2: float | None = Field(description="Estimate of the true gradient's squared norm; null if unknown.")
    covariance_trace: float | None = Field(description="Estimate of the trace of a sample's covariance.")
    noise_scale: NonNegative | None = Field(
        description="Trace over squared norm, samples; null where an estimate is not positive."
    )
    history: tuple[tuple[int, float, float], ...] = Field(
        (), description="Step, squared norm of local (mean over ranks) and of exchanged gradients; thinned to 1,000."
    )


class LayerMacs(Spec):
    """Multiply-accumulates of one layer."""

    name: str = Field(description="Name of the layer in the network.")
    kind: str = Field(description="What it computes: conv2d, linear, attention, ...")
    macs: CountOrZero = Field(description="Multiply-accumulates of one sample's forward pass.")


class CheckpointWrite(Spec):
    """One checkpoint that was written: training stood still for `snapshot_s` and `waited_s`."""

    step: CountOrZero = Field(description="Optimizer steps done, as in its name.")
    bytes: CountOrZero = Field(description="Bytes of its tensors.")
    memory: str = Field(description="Where the state was copied to on the host: page-locked, or pageable: why.")
    snapshot_s: NonNegative = Field(description="What copying the state to the host took, seconds.")
    waited_s: NonNegative = Field(
        description="How long training waited until it was written, seconds: before the next one, and at the end."
    )
    write_s: NonNegative = Field(
        description="What digesting and writing took in a thread, seconds; what exceeds waited_s overlapped training."
    )

    @property
    def overlapped_s(self) -> float:
        """Of the writing, while training went on, seconds."""
        return max(0.0, self.write_s - self.waited_s)


class Record(Spec):
    """`record.json`."""

    format: Literal["dlbench.record"] = Field("dlbench.record", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run, as in its plan.")
    configuration: str = Field(description="Digest of the plan's configuration.")
    state: Literal["valid", "invalid"] = Field(description="invalid: a sanity check failed; no figure may be made.")
    started: str = Field(description="UTC, ISO 8601, of rank 0's start.")
    finished: str = Field(description="UTC, ISO 8601.")
    clock: Literal["monotonic", "cuda-events"] = Field(description="What measured the phases.")
    phases: Literal["overlapped", "synchronised"] = Field(description="The phase mode that was in force.")
    num_parameters: Count = Field(description="Trained parameters of the network.")
    gradient_bytes: Count = Field(description="Bytes of gradients exchanged in one step, before compression.")
    ranks: tuple[RankResult, ...] = Field(min_length=1, description="What every rank says of itself, by rank.")
    checks: tuple[Check, ...] = Field(min_length=1, description="The sanity checks.")
    settings: tuple[Setting, ...] = Field((), description="Settings of the engine, as asked for and as in force.")
    warnings: tuple[str, ...] = Field((), description="Reasons for doubt, each a sentence.")
    data: dict[str, Any] = Field(description="What the data source says of itself.")
    staging: StagingResult | None = Field(None, description="How samples were staged; null: they were not.")
    reading: ReadingResult | None = Field(None, description="How samples were read; null for synthetic data.")
    shuffle: ShuffleResult | None = Field(None, description="How they were shuffled; null for synthetic data.")
    memory: MemoryResult | None = Field(None, description="How activations were treated; null: left to autograd.")
    host_update: HostUpdate | None = Field(None, description="The update by the host; null: the device updates.")
    steps: Count = Field(description="Steps of this run, warm-up included.")
    first_step: CountOrZero = Field(0, description="Optimizer steps done before this run, by what it resumes.")
    resumed_from: str | None = Field(None, description="The checkpoint it went on from.")
    attempt: Count = Field(1, description="Which attempt at the run this is, from 1: others were interrupted.")
    checkpoints: tuple[str, ...] = Field((), description="Checkpoints in the run's folder when it ended.")
    checkpoint_writes: tuple[CheckpointWrite, ...] = Field((), description="Every checkpoint that it wrote, in order.")
    precision: str | None = Field(None, description="The precision in force, in words; null where not known.")
    emulates_precision: Flag = Field(
        False, description="Whether a rank's device lacks that arithmetic and emulated it; its speed says nothing then."
    )
    overflow_steps: CountOrZero | None = Field(
        None, description="Measured and warm-up steps left out because a gradient overflowed; fp16 only."
    )
    final_loss_scale: NonNegative | None = Field(None, description="Loss scale at the end; fp16 only.")
    layers: tuple[LayerMacs, ...] = Field((), description="Forward multiply-accumulates of a sample, layer by layer.")
    training_flops_per_sample: CountOrZero | None = Field(
        None,
        description="Model FLOPs of a sample's training: forward, and twice that backward less the gradient of the "
        "input, no recomputation.",
    )
    quality: QualityResult | None = Field(None, description="Training to a quality; null for a run of speed.")
    noise_scale: NoiseScale | None = Field(None, description="Gradient noise scale, if it was asked for.")
    events: tuple[Event, ...] = Field((), description="Moments of the run, in order.")
    exchange: ExchangeResult | None = Field(None, description="The gradient exchange; null at one rank.")
    nccl: NcclTransport | None = Field(None, description="How NCCL joined the GPUs; null where it does not say.")
    watch: WatchResult | None = Field(None, description="What monitoring saw and cost; null where there was none.")
    load: tuple[NodeLoad, ...] = Field((), description="Who computed on the cores of each node's ranks.")
    inert: tuple[str, ...] = Field(
        (), description="Errors: settings that were asked for and had no effect, each a sentence with the evidence."
    )
    environment: Environment = Field(description="Environment of rank 0, by name.")
    environment_differences: tuple[str, ...] = Field((), description="Where other ranks' environment differs.")

    @property
    def goes_on(self) -> bool:
        """Whether it went on from an earlier attempt at the same run."""
        return self.attempt > 1 and self.first_step > 0

    @property
    def throughput(self) -> float | None:
        """Samples per second of all ranks, over the longest measured time of any; None where nothing was measured."""
        measured_s = max((rank.measured_s for rank in self.ranks), default=0.0)
        return sum(rank.samples for rank in self.ranks) / measured_s if measured_s else None

    @property
    def held_bytes(self) -> int | None:
        """What the rank with most held at the peak of a step: tensors as they were counted, else by its GPU's
        allocator; None where not every rank knows.
        """
        by_allocator = [one.peak_memory_bytes if one.device.startswith("cuda") else None for one in self.ranks]
        held = [one.held.peak if one.held else peak for one, peak in zip(self.ranks, by_allocator, strict=True)]
        known = [one for one in held if one is not None]
        return max(known) if known and len(known) == len(held) else None

    @property
    def held_nodes(self) -> int:
        """Nodes that its Slurm job held besides the run's own: idle, because a job's runs go one after the other."""
        allocated = self.environment.get("variable.SLURM_JOB_NUM_NODES", "")
        used = len({rank.node_rank for rank in self.ranks})
        return max(0, int(allocated) - used) if allocated.isdecimal() else 0
