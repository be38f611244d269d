"""The report's plain data on the machine while it trained: telemetry, energy, data path, memory; see `model`."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.stats.estimates import Estimate


@dataclass(frozen=True, kw_only=True)
class NodeMeans:
    """One node in the measured window of one run; None: not told."""

    ranks: int
    nodes: int
    run_id: str
    node_rank: int
    host: str
    num_gpus: int
    """Sampled ones that ranks computed on, as far as that can be told."""
    gpu_power_w: float | None
    """Of all its GPUs together, mean; None where not all of them tell."""
    num_power: int
    """GPUs that tell their power."""
    sm_clock_hz: float | None
    """Mean over its GPUs."""
    gpu_utilisation: float | None
    """Share of the time in which a kernel ran (1), mean over its GPUs."""
    gpu_memory_bytes: float | None
    """Highest sample of any of its GPUs."""
    gpu_temperature_c: float | None
    """Highest sample of any of its GPUs."""
    throttled: float | None
    """Share of the time (1) in which the commonest reason held down the clock of its most throttled GPU."""
    throttled_by: str
    """GPU and reason; empty where none was."""
    cpu_busy: float | None
    """Mean over its cores (1)."""
    host_memory_bytes: float | None
    """Mean."""
    network_received: float | None
    """Bytes a second, all interfaces together."""
    network_sent: float | None
    disk_read: float | None
    """Bytes a second, all disks together."""
    num_samples: int
    num_gaps: int
    missing: float
    """Share of the window without samples (1)."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel."""

    lane: str
    points: tuple[tuple[float, float | None], ...]
    """Seconds from the begin of the measured window, and a value in the panel's unit; None within a gap."""
    mean: float | None
    """Over the measured window, in the panel's unit; None where nothing tells."""
    lowest: float | None
    highest: float | None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One quantity over time."""

    name: str
    title: str
    unit: str
    """`W`, `MHz`, `%`, `GiB`, `MiB/s`."""
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A time in which a lane was at a stage, or throttled."""

    lane: str
    begin_s: float
    end_s: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Course:
    """One run over time, on the clock of each node; second 0 is the begin of the measured window."""

    run_id: str
    ranks: int
    nodes: int
    window_s: float
    lanes: tuple[str, ...]
    """`gpu.0 of n0`, `n0`."""
    panels: tuple[Panel, ...]
    stages: tuple[Stretch, ...]
    throttled: tuple[Stretch, ...]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How often, and how late, samples were taken, over all nodes of the run that is drawn."""

    period_s: float
    """Longest period of any node."""
    late_median_s: float
    """Of the node with the largest."""
    late_max_s: float
    dropped: int
    """Samples that did not fit into a node's share of bytes."""


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """What nodes do not tell."""

    what: str
    reason: str
    num_nodes: int


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What the samplers of the nodes saw."""

    nodes: tuple[NodeMeans, ...]
    """Of the runs that were read, by rank count, run and node."""
    course: Course | None
    """Of the run in the middle of the point with most ranks; None where none of its nodes tells."""
    sampling: Sampling | None
    unavailable: tuple[Unavailable, ...]
    num_runs: int
    """Runs of the group."""
    num_read: int
    """Runs whose samples were read."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KindEnergy:
    """GPUs, or processors, at one rank count; medians over the runs that tell."""

    kind: str
    """`gpu` or `host`."""
    joules_per_sample: Estimate | None
    """None where too little was sampled."""
    samples_per_joule: Estimate | None
    efficiency: Estimate | None
    """Joules of a sample at the baseline over those here (ratio); None where the baseline does not tell."""
    power: Estimate | None
    """Mean power of the measured window, all sources together, watts."""
    whole: Estimate
    """Joules from the start of the processes to their end."""
    stages: tuple[tuple[str, Estimate], ...]
    """Joules by stage."""
    num_sources: tuple[int, ...]
    methods: tuple[str, ...]
    coverage: float
    """Sampled share of the measured window (1), of the run with the least."""


@dataclass(frozen=True, kw_only=True)
class EnergyPoint:
    """One rank count."""

    ranks: int
    nodes: int
    kinds: tuple[KindEnergy, ...]
    why: tuple[tuple[str, str], ...]
    """Kind, and why runs tell nothing of it."""
    doubts: tuple[str, ...]
    num_unread: int
    """Runs whose samples were not read."""


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of the runs."""

    points: tuple[EnergyPoint, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DataPoint:
    """Input at one rank count."""

    ranks: int
    nodes: int
    wait: Estimate
    """Seconds a step, mean over ranks and steps."""
    copy: Estimate
    """Host-to-device, likewise."""
    wait_share: Estimate
    utilisation: Estimate
    """1 - wait_share: accelerator utilisation as MLPerf Storage has it."""
    stalled: float | None
    """Share of steps (of ranks) that wait for more than a tenth of their time (1); None: not looked at."""
    longest_wait_s: float | None
    stall_steps: int
    """Steps of ranks that were looked at."""
    stall_ranks: int
    disk_bytes_per_s: float | None
    page_cache_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """Where samples come from and how long the ranks wait for them."""

    source: str
    format: str
    is_synthetic: bool
    points: tuple[DataPoint, ...]
    facts: tuple[tuple[str, str], ...]
    """What is known of reading, order, coverage and staging: title and text."""
    verdict: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Memory at one rank count."""

    ranks: int
    nodes: int
    peak: Estimate
    """Bytes of the rank that held most: allocated on its GPU, or resident on a CPU."""
    resident: Estimate | None
    """Resident bytes of a rank's process beside a GPU; None on a CPU, and where not known."""
    gpu_used_bytes: float | None
    host_used_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class BatchMemory:
    """Runs of the same network, preset, engine and system with one batch and precision."""

    batch: int
    parts: int
    precision: str
    peak_bytes: int | None
    num_runs: int
    num_without_memory: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of ranks, and what limits the batch."""

    on_gpu: bool
    points: tuple[MemoryPoint, ...]
    model_bytes: int
    """Parameters in fp32."""
    gradient_bytes: int
    host_bytes: int | None
    """Memory of rank 0's node; None where not recorded."""
    batches: tuple[BatchMemory, ...]
    limit: str
    """What is known of the largest batch, in a sentence."""
    notes: tuple[str, ...]
