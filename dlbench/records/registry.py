"""The metadata registry: what every figure must name, and which keys must match before two runs are compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from dlbench.records.scan import Run
from dlbench.specs.sync import AUTO

THROUGHPUT = "throughput"  # Goal of runs that measure a number of steps.

_THINGS = {
    **dict.fromkeys(("images", "jpeg-tree"), "JPEGs"),
    "text": "sequences of text",
    **dict.fromkeys(("density", "hdf5-density"), "density volumes"),
}


@dataclass(frozen=True, kw_only=True)
class RunProperty:
    """One property of a run; its value is empty where the property is at its default and not worth words."""

    name: str
    title: str
    value: Callable[[Run], str]
    comparable: bool = True  # Whether two runs must agree here before their figures may be compared or averaged.


def data_source(run: Run) -> str:
    """`synthetic`, `synthetic, on the device`, or `real: PATH`."""
    data = run.plan.workload.data
    if data.is_synthetic:
        return "synthetic" if data.synthetic_on == "host" else "synthetic, on the device"
    return f"real: {data.source}"


def data_title(run: Run) -> str:
    """The data that ran: `400 JPEGs made by dlbench`, `ImageNet-2012 (1,281,167 images)`, `synthetic data`."""
    spec, record = run.plan.workload.data, run.record
    if spec.is_synthetic:
        return "synthetic data" if spec.synthetic_on == "host" else "synthetic data on the device"
    things = _THINGS[spec.format]
    if record is None or "num_samples" not in record.data:
        return things
    count = f"{record.data['num_samples']:,}"
    if public := record.data.get("public_set"):
        return f"{public} ({count} {run.plan.workload.sample_unit})"
    return f"{count} {things}{' made by dlbench' * (record.data.get('made_by') == 'dlbench')}"


def _engine_settings(run: Run) -> str:
    engine = run.plan.engine
    settings = engine.settings
    if settings is None:
        return ""
    # The autotuner's settings are worth words only where it is on, DDP's switches where they are.
    return ", ".join(
        f"{key}={value}"
        for key, value in settings.model_dump(mode="json").items()
        if value is not False and (engine.autotunes or not key.startswith("autotune"))
    )


def _sync(run: Run) -> str:
    kind, sync = run.plan.engine.kind, run.plan.sync
    if not kind.synchronises:
        return ""
    chosen = sync.model_dump(mode="json", exclude_defaults=True)
    if sync.exchange != "none":
        fusion = sync.fusion_in_force
        chosen["fusion"] = f"auto ({kind.fusion})" if fusion == AUTO and kind.fusion.bytes else str(fusion)
    return ", ".join(f"{key}={value}" for key, value in chosen.items())


def data_path(run: Run) -> str:
    """Staging, shuffling and page cache, where they are not the defaults."""
    data = run.plan.workload.data
    if data.is_synthetic:
        return ""
    staging = f"staging={data.staging} to {data.staging_tier}" if data.staging != "none" else ""
    partition = f"partition={data.partition}" if data.shuffle != "global" and data.partition != "shuffled" else ""
    shuffle = f"shuffle={data.shuffle}" if data.shuffle != "global" else ""
    cache = f"cache={data.cache}" if data.cache != "any" else ""
    return ", ".join(filter(None, (staging, shuffle, partition, cache)))


def goal(run: Run) -> str:
    """`throughput`, or `time to accuracy` with the target: the two are never put into one ratio."""
    quality = run.plan.workload.quality
    if run.plan.measure.until == "steps" or quality is None:
        return THROUGHPUT
    suffix = "" if quality.stop_at_target else ", trains on"
    return f"time to accuracy {quality.target:g}{suffix}"


def _accumulation(run: Run) -> str:
    parts = run.plan.workload.train.gradient_accumulation
    return "" if parts == 1 else f"{parts} parts per batch"


def activations(run: Run) -> str:
    """How activations are treated, where they are not left to autograd; see `dlbench.specs.out_of_core`."""
    train = run.plan.workload.train
    if train.is_in_core:
        return ""
    recompute = "" if train.recompute == "none" else f"recompute {train.recompute}"
    swap = "" if train.swap == "none" else f"swap {train.swap}"
    capacity = f"within {train.memory.capacity}" if train.is_planned else ""
    blocks = f"blocks from {', '.join(train.memory.blocks)}" if train.memory.blocks else ""
    return ", ".join(filter(None, (recompute, swap, capacity, blocks)))


def _optimizer_state(run: Run) -> str:
    where = run.plan.workload.train.optimizer_state
    return "" if where == "device" else f"on the {where}"


def _compile(run: Run) -> str:
    train = run.plan.workload.train
    if train.compile == "none":
        return ""
    budget = "" if train.activation_budget is None else f", {train.activation_budget:g} of the activations kept"
    mode = "" if train.compile == "default" else f" {train.compile}"
    return f"torch.compile{mode}{budget}"


def _cuda_graphs(run: Run) -> str:
    graphs = run.plan.workload.train.cuda_graphs
    return "" if graphs == "none" else f"of the {graphs}"


def _memory_format(run: Run) -> str:
    """As planned, and that of the weights where the record has another one (`dlbench.node.training.precision`)."""
    planned = str(getattr(run.plan.workload.model, "memory_format", "contiguous"))
    settings = run.record.settings if run.record is not None else ()
    weights = {str(setting.effective) for setting in settings if setting.key == "model.memory_format.weights"} - {
        planned
    }
    return "" if planned == "contiguous" else ", weights ".join([planned, *sorted(weights)])


def _checkpoints(run: Run) -> str:
    every = run.plan.checkpoint
    if every.every_steps is not None:
        return f"every {every.every_steps} steps"
    return "" if every.every_epochs is None else f"every {every.every_epochs:g} epochs"


def watching(run: Run) -> str:
    """`none`, `default`, or what differs from it: watched and unwatched runs are never put into one ratio.

    A run on some of whose nodes no sampler ran to the end is one that was watched differently.
    """
    watch = run.plan.watch
    if watch is None or not watch.is_on:
        return "none"
    chosen = watch.model_dump(mode="json", exclude_defaults=True)
    parts = [f"{key}={value}" for key, value in chosen.items()] or ["default"]
    recorded = None if run.record is None else run.record.watch
    if watch.sampler and recorded is not None:
        nodes = run.plan.layout.nodes
        missing = nodes - len(recorded.nodes)
        if missing:
            parts.append(f"not sampled on {missing} of {nodes} node{'s' if nodes > 1 else ''}")
    return ", ".join(parts)


def _fault(run: Run) -> str:
    fault = run.plan.fault
    if fault is None:
        return ""
    return ", ".join(f"{key}={value}" for key, value in fault.model_dump(mode="json", exclude_defaults=True).items())


def precision(run: Run) -> str:
    """`fp32`, `bf16`, `fp16`, or `bf16 emulated`: emulated arithmetic is never put into one ratio with native."""
    emulated = run.record is not None and run.record.emulates_precision
    return f"{run.plan.workload.train.precision}{' emulated' * emulated}"


def _device(run: Run) -> str:
    if run.record is None:
        return "unknown"
    # "cuda:0 (NVIDIA A100)" on one rank and "cuda:1 (NVIDIA A100)" on the next are the same device for a comparison.
    devices = {rank.device for rank in run.record.ranks}
    return ", ".join(sorted({re.sub(r"^cuda:\d+", "cuda", device) for device in devices}))


KEYS: tuple[RunProperty, ...] = (
    RunProperty(name="workload", title="Workload", value=attrgetter("plan.workload.name")),
    RunProperty(name="preset", title="Preset", value=attrgetter("plan.workload.preset")),
    RunProperty(name="engine", title="Engine", value=attrgetter("plan.engine.name")),
    RunProperty(name="engine_settings", title="Engine settings", value=_engine_settings),
    RunProperty(name="exchange", title="Gradient exchange", value=_sync),
    RunProperty(name="precision", title="Precision", value=precision),
    RunProperty(name="data", title="Data source", value=data_source),
    RunProperty(name="data_path", title="Staging, shuffling, cache", value=data_path),
    RunProperty(
        name="batch_per_rank", title="Batch per rank", value=lambda r: str(r.plan.workload.train.batch_per_rank)
    ),
    RunProperty(name="gradient_accumulation", title="Gradient accumulation", value=_accumulation),
    RunProperty(name="activations", title="Activations", value=activations),
    RunProperty(name="optimizer_state", title="Optimizer state", value=_optimizer_state),
    RunProperty(name="compile", title="Compiled", value=_compile),
    RunProperty(name="cuda_graphs", title="CUDA graphs", value=_cuda_graphs),
    RunProperty(name="memory_format", title="Memory format", value=_memory_format),
    RunProperty(name="goal", title="Goal", value=goal),
    RunProperty(name="checkpoints", title="Checkpoints", value=_checkpoints),
    RunProperty(name="scaling", title="Scaling", value=attrgetter("plan.series.scaling")),
    RunProperty(name="launcher", title="Launcher", value=attrgetter("plan.system.launch.launcher")),
    RunProperty(name="system", title="System", value=attrgetter("plan.system.name")),
    RunProperty(name="cores_per_rank", title="Cores per rank", value=lambda r: str(r.plan.layout.cores_per_rank)),
    RunProperty(name="watching", title="Monitoring", value=watching),
    RunProperty(name="fault", title="Planted fault", value=_fault),
    RunProperty(name="phases", title="Phase mode", value=attrgetter("plan.measure.phases")),
    RunProperty(name="ranks", title="Ranks", value=lambda r: str(r.plan.layout.ranks), comparable=False),
    RunProperty(name="nodes", title="Nodes", value=lambda r: str(r.plan.layout.nodes), comparable=False),
    RunProperty(name="device", title="Device", value=_device),
)


def describe(run: Run) -> dict[str, str]:
    """All registered properties of a run, by name."""
    return {key.name: key.value(run) for key in KEYS}
