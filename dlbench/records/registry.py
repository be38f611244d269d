"""The properties of a run that every figure names, and those that must match before two runs are compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from dlbench.records.scan import Run
from dlbench.specs.sync import AUTO
from dlbench.units import counted

THROUGHPUT = "throughput"  # Goal of runs that measure a number of steps.

_THINGS = {
    **dict.fromkeys(("images", "jpeg-tree"), "JPEGs"),
    "text": "sequences of text",
    **dict.fromkeys(("density", "hdf5-density"), "density volumes"),
}


@dataclass(frozen=True, kw_only=True)
class RunProperty:
    """A property of a run; its value is empty if it is the default and is not printed."""

    name: str
    title: str
    value: Callable[[Run], str]
    comparable: bool = True  # Whether two runs must agree here before their figures may be compared or averaged.


def data_source(run: Run) -> str:
    """Returns `synthetic`, `synthetic, on the device`, or `real: PATH`."""
    data = run.plan.workload.data
    if data.is_synthetic:
        return "synthetic" if data.synthetic_on == "host" else "synthetic, on the device"
    return f"real: {data.source}"


def data_title(run: Run) -> str:
    """Returns the data: `400 JPEGs made by dlbench`, `ImageNet-2012 (1,281,167 images)`, `synthetic data`."""
    spec, record = run.plan.workload.data, run.record
    if spec.is_synthetic:
        return "synthetic data" if spec.synthetic_on == "host" else "synthetic data on the device"
    things = _THINGS[spec.format]
    if record is None or "num_samples" not in record.data:
        return things
    count = f"{record.data['num_samples']:,}"
    if public := record.data.get("public_set"):
        return f"{public} ({count} {run.plan.workload.sample_unit})"
    if record.data.get("made_by") == "dlbench":
        return f"{count} {things} made by dlbench"
    return f"{count} {things}"


def _engine_settings(run: Run) -> str:
    engine = run.plan.engine
    settings = engine.settings
    if settings is None:
        return ""
    # The autotuner's settings are printed only if it is on, DDP's switches and divided samples if they are.
    hidden = {"work_s", "exchange_s"}
    if engine.spatial_ranks == 1:
        hidden.add("spatial_ranks")
    return ", ".join(
        f"{key}={value}"
        for key, value in settings.model_dump(mode="json").items()
        if value is not False and key not in hidden and (engine.autotunes or not key.startswith("autotune"))
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
    """Returns staging, shuffling and page cache that are not the defaults."""
    data = run.plan.workload.data
    if data.is_synthetic:
        return ""
    parts = []
    if data.staging != "none":
        parts.append(f"staging={data.staging} to {data.staging_tier}")
    if data.shuffle != "global":
        parts.append(f"shuffle={data.shuffle}")
        if data.partition != "shuffled":
            parts.append(f"partition={data.partition}")
    if data.cache != "any":
        parts.append(f"cache={data.cache}")
    return ", ".join(parts)


def goal(run: Run) -> str:
    """Returns `throughput`, or `time to accuracy` with the target; the two are not compared."""
    quality = run.plan.workload.quality
    if run.plan.measure.until == "steps" or quality is None:
        return THROUGHPUT
    suffix = "" if quality.stop_at_target else ", trains on"
    return f"time to accuracy {quality.target:g}{suffix}"


def _accumulation(run: Run) -> str:
    parts = run.plan.workload.train.gradient_accumulation
    return "" if parts == 1 else f"{parts} parts per batch"


def activations(run: Run) -> str:
    """Returns the treatment of activations if it is not left to autograd; see `dlbench.specs.out_of_core`."""
    train = run.plan.workload.train
    if train.is_in_core:
        return ""
    parts = []
    if train.recompute != "none":
        parts.append(f"recompute {train.recompute}")
    if train.swap != "none":
        parts.append(f"swap {train.swap}")
    if train.is_planned:
        parts.append(f"within {train.memory.capacity}")
    if train.memory.blocks:
        parts.append(f"blocks from {', '.join(train.memory.blocks)}")
    return ", ".join(parts)


def _optimizer_state(run: Run) -> str:
    where = run.plan.workload.train.optimizer_state
    return "" if where == "device" else f"on the {where}"


def _compile(run: Run) -> str:
    train = run.plan.workload.train
    if train.compile == "none":
        return ""
    text = "torch.compile"
    if train.compile != "default":
        text += f" {train.compile}"
    if train.activation_budget is not None:
        text += f", {train.activation_budget:g} of the activations kept"
    return text


def _cuda_graphs(run: Run) -> str:
    graphs = run.plan.workload.train.cuda_graphs
    return "" if graphs == "none" else f"of the {graphs}"


def _memory_format(run: Run) -> str:
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
    """Returns `none`, `default`, or the differences from it, also nodes whose sampler did not run to the end."""
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
            parts.append(f"not sampled on {missing} of {counted(nodes, 'node')}")
    return ", ".join(parts)


def _fault(run: Run) -> str:
    fault = run.plan.fault
    if fault is None:
        return ""
    return ", ".join(f"{key}={value}" for key, value in fault.model_dump(mode="json", exclude_defaults=True).items())


def precision(run: Run) -> str:
    """Returns `fp32`, `bf16`, `fp16`, or `bf16 emulated`; emulated and native arithmetic are not compared."""
    planned = run.plan.workload.train.precision
    if run.record is not None and run.record.emulates_precision:
        return f"{planned} emulated"
    return planned


def _device(run: Run) -> str:
    if run.record is None:
        return "unknown"
    # For a comparison "cuda:0 (NVIDIA A100)" on one rank and "cuda:1 (NVIDIA A100)" on the next are the same device.
    return ", ".join(sorted({re.sub(r"^cuda:\d+", "cuda", rank.device) for rank in run.record.ranks}))


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
    """Returns all properties of a run, by name."""
    return {key.name: key.value(run) for key in KEYS}
