"""Exports a run as MLPerf logging (a line `:::MLLOG {...}` per event), and its machine as a system description."""
# Keys and checks are those of mlperf-logging 4.1.68. Facts that only a person can know are stated or logged as unknown.
# The 33 fields of a system description are those that mlperf_logging.system_desc_checker (4.1.68) requires; texts,
# because it joins them; unrecorded ones are marked.

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from dlbench.errors import IncompleteDataError, UserError
from dlbench.records.record import Event, Record
from dlbench.records.scan import Run
from dlbench.specs.plan import RunPlan
from dlbench.specs.training import OptimizerSpec, ScheduleSpec
from dlbench.specs.workload import MlperfRules
from dlbench.units import format_bytes

NOTICE = "MLPerf-derived workload, not an MLPerf result"
NOT_STATED = "not stated"
TOKEN = ":::MLLOG "  # noqa: S105  # the prefix of a line, no password
Status = Literal["research", "preview", "onprem", "cloud"]
Value = str | int | float | bool | list[float] | dict[str, float] | None
Row = tuple[str, Value, dict[str, Value]]  # Key, value, metadata.
_FILES = dict.fromkeys(("train_samples", "eval_samples", "accelerators_per_node"), "record.json")
"""Files of settings that the run recorded; all others are in its plan."""

NOT_RECORDED = "not recorded"
NO_ACCELERATOR = "none: ranks computed on the CPU"
STATUS_WORDS = {  # Words of MLPerf's system descriptions by those of its logs.
    "research": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
}
_ACCELERATOR_FIELDS = (
    "accelerator_model_name",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_memory_capacity",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
)
_NEVER_RECORDED = (  # Fields that `dlbench.machine.environment` does not read: a person may fill them in.
    "host_processors_per_node",
    "host_processor_core_count",
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "host_storage_type",
    "host_storage_capacity",
    "host_networking",
    "host_networking_topology",
    "host_memory_configuration",
    "cooling",
)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Facts that only the person who exports can know."""

    org: str = NOT_STATED
    platform: str | None = None  # None: the title of the plan's system.
    status: Status = "research"  # Availability of the system, in MLPerf's words; research claims least.
    cache_cleared: bool = False  # Whether caches were cleared before the run; dlbench clears none.


def rules_of(run: Run) -> MlperfRules:
    """Returns the rule set of the run's network; raises `UserError` if MLPerf has none for it."""
    rules = run.plan.workload.model.mlperf
    if rules is None:
        raise UserError(f"{run.plan.workload.name}: no rule set of MLPerf has this network")
    return rules


def to_mllog(run: Run, statement: Statement, throughput: float | None) -> str:
    """Returns the log of a run with a record, in ASCII; `throughput`: samples per second of all ranks, if known."""
    # Facts of the whole run come first, at the time of the first event, then the events in their order.
    assert run.record is not None
    events = run.record.events
    if events:
        begin_ms, end_ms = events[0].time_ms, events[-1].time_ms
    else:
        begin_ms, end_ms = _milliseconds(run.record.started), _milliseconds(run.record.finished)
    rows = [*_heading(run, run.record, statement), *_settings(run.plan, run.record)]
    lines = [_line(begin_ms, key, value, metadata) for key, value, metadata in rows]
    lines += [_event(event, run.record) for event in events]
    if throughput is not None:
        metadata: dict[str, Value] = {"unit": f"{run.plan.workload.sample_unit}/s", "file": "node-*.steps"}
        lines.append(_line(end_ms, "tracked_stats", {"throughput": throughput}, metadata))
    return "".join(f"{TOKEN}{line}\n" for line in lines)


def obstacles(run: Run) -> list[str]:
    """Returns the reasons why the checker will not accept the log; empty if none is known."""
    record = run.record
    assert record is not None
    rules = rules_of(run)
    if record.quality is None and not any(event.key == rules.quality_key for event in record.events):
        return ["the run measured speed and evaluated nothing (measure.until: steps)"]
    reasons = []
    keys = {event.key for event in record.events}
    required = ("init_start", "init_stop", "run_start", "epoch_start", "epoch_stop", "eval_start", "eval_stop")
    missing = [key for key in (*required, rules.quality_key, "run_stop") if key not in keys]
    if missing:
        reasons.append(f"events are missing: {', '.join(missing)}")
    first_times_ms = {event.key: event.time_ms for event in reversed(record.events)}
    init_min = (first_times_ms.get("init_stop", 0) - first_times_ms.get("init_start", 0)) / 60_000
    if not missing and init_min >= rules.init_min:
        reasons.append(f"init_start to init_stop took {init_min:.1f} min, {rules.init_min} are allowed")
    if rules.most_error is not None:
        errors = [e.value for e in record.events if e.key == rules.quality_key and isinstance(e.value, int | float)]
        if not any(0 < error <= rules.most_error for error in errors):
            best = f"{min(errors):.4g}" if errors else "none"
            reasons.append(f"no eval_error is at most {rules.most_error}; the best is {best}")
    if _train_samples(record) is None:
        reasons.append("the number of training samples is not recorded")
    return reasons


def _heading(run: Run, record: Record, statement: Statement) -> Iterator[Row]:
    workload, rules = run.plan.workload, rules_of(run)
    about: dict[str, Value] = {
        "workload": workload.name,
        "preset": workload.preset,
        "about": workload.about,
        "run_id": run.plan.run_id,
        "dlbench_version": run.plan.dlbench_version,
        "resumed_from": record.resumed_from,
    }
    yield "notice", NOTICE, about
    stated: dict[str, Value] = {"note": "stated by the person who exported this log"}
    yield "submission_benchmark", rules.benchmark, {"note": NOTICE}
    # Never "closed": the networks are dlbench's own implementations, and presets may change them.
    yield "submission_division", "open", {"note": NOTICE}
    if statement.org == NOT_STATED:
        yield "submission_org", statement.org, {}
    else:
        yield "submission_org", statement.org, stated
    if statement.platform is None:
        yield "submission_platform", run.plan.system.title, {"file": "plan.json"}
    else:
        yield "submission_platform", statement.platform, stated
    if statement.status == "research":
        yield "submission_status", statement.status, {"note": "the default; no status was stated"}
    else:
        yield "submission_status", statement.status, stated
    if statement.cache_cleared:
        yield "cache_clear", True, stated
    else:
        yield "cache_clear", False, {"note": "dlbench clears no cache; none was stated to be cleared"}


def _settings(plan: RunPlan, record: Record) -> Iterator[Row]:
    train = plan.workload.train
    eval_samples: int | None = None
    if record.quality is not None and record.quality.evaluations:
        eval_samples = record.quality.evaluations[-1].eval_samples
    samples = _train_samples(record)
    values: dict[str, Value] = {
        "seed": train.seed,
        "global_batch_size": plan.global_batch,
        "gradient_accumulation_steps": train.gradient_accumulation,
        "number_of_nodes": plan.layout.nodes,
        "accelerators_per_node": accelerators_per_node(plan, record),
        "number_of_ranks": plan.layout.ranks,
        "train_samples": samples,
        "eval_samples": eval_samples,
    }
    values["dropout"] = getattr(plan.workload.model, "dropout", None)
    # As training counted them: the schedule's samples, or the whole batches of the data.
    steps_per_epoch, batches = None, record.data.get("batches_per_epoch")
    if train.schedule.epoch_samples is not None:
        steps_per_epoch = train.schedule.epoch_samples / plan.global_batch
    elif isinstance(batches, int) and batches > 0:
        steps_per_epoch = float(batches)
    elif samples is not None:
        steps_per_epoch = float(max(1, samples // plan.global_batch))
    recipe = train.at_batch(plan.global_batch)
    values |= _optimizer(recipe.optimizer, plan.global_batch)
    values |= _schedule(recipe.optimizer, recipe.schedule, plan.global_batch, steps_per_epoch)
    for key, value in values.items():
        if value is not None:  # unknown settings are left out
            yield key, value, {"file": _FILES.get(key, "plan.json")}


def _optimizer(spec: OptimizerSpec, global_batch: int) -> dict[str, Value]:
    values: dict[str, Value] = {
        "opt_name": spec.name,
        "opt_base_learning_rate": spec.peak(global_batch),
        "opt_weight_decay": spec.weight_decay,
        "opt_gradient_clip_norm": spec.clip_norm,
    }
    decay_keys = {"adamw": "opt_adamw_weight_decay", "lamb": "opt_lamb_weight_decay_rate"}
    if spec.name in decay_keys:
        key = f"opt_{spec.name}"
        first, second = spec.betas
        values |= {f"{key}_beta_1": first, f"{key}_beta_2": second, f"{key}_epsilon": spec.epsilon}
        values[decay_keys[spec.name]] = spec.weight_decay
    elif spec.name == "lars":
        values |= {"lars_epsilon": spec.epsilon, "lars_opt_momentum": spec.momentum}
        values |= {"lars_opt_base_learning_rate": values["opt_base_learning_rate"]}
        values |= {"lars_opt_weight_decay": spec.weight_decay}
    else:
        values["sgd_opt_momentum"] = spec.momentum
    return values


def _schedule(
    optimizer: OptimizerSpec, schedule: ScheduleSpec, global_batch: int, steps_per_epoch: float | None
) -> dict[str, Value]:
    """Returns warm-up and decay in the keys of CosmoFlow's reference; the warm-up factor is peak over first rate."""
    peak = optimizer.peak(global_batch)
    epochs = schedule.warmup_epochs
    if epochs is None and (steps_per_epoch is not None or schedule.warmup_steps == 0):
        epochs = schedule.warmup_steps / (steps_per_epoch or 1.0)
    values: dict[str, Value] = {"opt_learning_rate_warmup_epochs": epochs}
    if epochs == 0:
        values["opt_learning_rate_warmup_factor"] = 1.0
    elif schedule.warmup_from == "unscaled":
        values["opt_learning_rate_warmup_factor"] = peak / optimizer.learning_rate
    elif epochs is not None and steps_per_epoch is not None:
        # From zero: the first of W steps takes peak / W.
        values["opt_learning_rate_warmup_factor"] = max(1.0, epochs * steps_per_epoch)
    if schedule.decay not in ("step", "constant"):
        values["opt_learning_rate_decay_schedule"] = schedule.decay
        return values
    # The reference logs the largest of its factors, 1 without any.
    values["opt_learning_rate_decay_factor"] = max(schedule.step_factors, default=1.0)
    if schedule.epoch_boundaries or not schedule.step_boundaries:
        values["opt_learning_rate_decay_boundary_epochs"] = list(schedule.epoch_boundaries)
    elif steps_per_epoch is not None:
        values["opt_learning_rate_decay_boundary_epochs"] = [s / steps_per_epoch for s in schedule.step_boundaries]
    return values


def accelerators_per_node(plan: RunPlan, record: Record) -> int:
    """Returns the GPUs per node that ranks computed on: every rank has its own, or no rank has one."""
    on_gpu = sum(rank.device.startswith("cuda") for rank in record.ranks)
    return on_gpu // plan.layout.nodes


def _train_samples(record: Record) -> int | None:
    if record.quality is not None:
        return record.quality.train_samples
    num_samples = record.data.get("num_samples")
    return num_samples if isinstance(num_samples, int) else None


def _event(event: Event, record: Record) -> str:
    metadata: dict[str, Value] = {"file": "record.json"}
    epoch = event.epoch
    samples = _train_samples(record)
    if epoch is None and event.samples is not None and samples and event.key.startswith(("epoch_", "eval_")):
        epoch = event.samples / samples
    if epoch is not None:
        if epoch == int(epoch):
            epoch = int(epoch)
        metadata["epoch_num"] = epoch
    metadata |= {"samples_count": event.samples, "step_num": event.step, "status": event.status}
    return _line(event.time_ms, event.key, event.value, metadata)


def _line(time_ms: int, key: str, value: Value, metadata: Mapping[str, Value]) -> str:
    kind = "POINT_IN_TIME"
    if key.endswith("_start"):
        kind = "INTERVAL_START"
    elif key.endswith("_stop"):
        kind = "INTERVAL_END"
    content = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": kind,
        "key": key,
        "value": value,
        "metadata": {name: entry for name, entry in metadata.items() if entry is not None},
    }
    return json.dumps(content, allow_nan=False)


def _milliseconds(utc: str) -> int:
    try:
        return round(datetime.fromisoformat(utc.replace("Z", "+00:00")).timestamp() * 1000)
    except ValueError:
        raise IncompleteDataError(f"record.json: damaged: {utc[:80]!r} is not a time in ISO 8601") from None


def to_system_description(run: Run, statement: Statement) -> str:
    """Returns the description of the machine of a run with a record as JSON, sorted by field."""
    return json.dumps(system_fields(run, statement), indent=2) + "\n"


def system_fields(run: Run, statement: Statement) -> dict[str, str]:
    """Returns the text of every field by name, for a run with a record."""
    assert run.record is not None
    plan, record = run.plan, run.record
    environment = record.environment
    gpus = accelerators_per_node(plan, record)
    fields = dict.fromkeys(_NEVER_RECORDED, NOT_RECORDED)
    fields |= dict.fromkeys(_ACCELERATOR_FIELDS, NO_ACCELERATOR)
    if gpus:
        fields |= dict.fromkeys(_ACCELERATOR_FIELDS, NOT_RECORDED)
        # `cuda:0 (NVIDIA A100)` on one rank and `cuda:1 (NVIDIA A100)` on another -> `NVIDIA A100`.
        devices = {rank.device for rank in record.ranks}
        names = {re.sub(r"^cuda(:\d+)?\s*\((.*)\)$", r"\2", device) for device in devices}
        fields["accelerator_model_name"] = ", ".join(sorted(names))
    differences = "all ranks recorded the same environment"
    if record.environment_differences:
        differences = f"other ranks recorded differences: {'; '.join(record.environment_differences)}"
    memory = NOT_RECORDED
    if environment.get("memory.bytes", "").isdecimal():
        memory = format_bytes(int(environment["memory.bytes"]))
    fields |= {
        "submitter": statement.org,
        "division": "open",
        "status": STATUS_WORDS[statement.status],
        "system_name": statement.platform if statement.platform is not None else plan.system.title,
        "number_of_nodes": str(plan.layout.nodes),
        "accelerators_per_node": str(gpus),
        "host_processor_model_name": environment.get("cpu.model", NOT_RECORDED),
        # The operating system counts hardware threads, like the CPUs of a virtual machine.
        "host_processor_vcpu_count": environment.get("cpu.cores", NOT_RECORDED),
        "host_memory_capacity": memory,
        "framework": _named("PyTorch", environment.get("package.torch")) or "PyTorch, version not recorded",
        "other_software_stack": _software(run, record),
        "operating_system": _joined((environment.get("os"), _named("kernel", environment.get("kernel")))),
        "hw_notes": f"host fields are those of rank 0's node; {differences}",
        "sw_notes": f"{NOTICE}; run {plan.run_id}, workload {plan.workload.name}, preset {plan.workload.preset}",
    }
    return dict(sorted(fields.items()))


def _software(run: Run, record: Record) -> str:
    environment = record.environment
    packages = [
        _named(key.removeprefix("package."), version)
        for key, version in sorted(environment.items())
        if key.startswith("package.") and key != "package.torch"
    ]
    return _joined(
        (
            _named("dlbench", run.plan.dlbench_version),
            _named("Python", environment.get("python")),
            environment.get("libc"),
            _named("GPU driver", environment.get("gpu.driver")),
            *packages,
        )
    )


def _named(name: str, value: str | None) -> str | None:
    if not value:
        return None
    return f"{name} {value}"


def _joined(parts: tuple[str | None, ...]) -> str:
    return ", ".join(part for part in parts if part) or NOT_RECORDED
