"""Exports a run's machine as the 33 fields of an MLPerf system description; unrecorded ones are marked."""
# The fields are those that mlperf_logging.system_desc_checker (4.1.68) requires; texts, because it joins them.

from __future__ import annotations

import json
import re

from dlbench.exports.mllog import NOTICE, Statement, accelerators_per_node
from dlbench.records.record import Record
from dlbench.records.scan import Run
from dlbench.units import format_bytes

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
