"""The systems that runs ran on, in the fields of MLPerf's system descriptions, and which fields were not recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.exports.mllog import Statement
from dlbench.exports.system_description import NO_ACCELERATOR, NOT_RECORDED, system_fields
from dlbench.reading.table import RunTable
from dlbench.records.scan import Run
from dlbench.report.wording import runs_text
from dlbench.specs.system.container import ContainerSpec
from dlbench.units import format_seconds

MAX_HOSTS = 24
MAX_TEXTS = 6
"""Texts of a field where runs differ; the rest are counted."""
MAX_DESCRIBED = 200
"""Runs of a system that are looked at, evenly spread."""

_TITLES = {
    "number_of_nodes": "Nodes",
    "host_processor_model_name": "Processor",
    "host_processor_vcpu_count": "Processor threads per node",
    "host_processor_core_count": "Processor cores",
    "host_processors_per_node": "Processors per node",
    "host_memory_capacity": "Memory per node",
    "accelerators_per_node": "GPUs in use per node",
    "accelerator_model_name": "GPU",
    "accelerator_memory_capacity": "GPU memory",
    "accelerator_interconnect": "GPU interconnect",
    "host_networking": "Node interconnect",
    "host_storage_type": "Storage",
    "cooling": "Cooling",
    "operating_system": "Operating system",
    "framework": "Framework",
    "other_software_stack": "Other software",
}
"""Fields of a system description that are shown, in order."""

_VARIABLES = ("NCCL_", "GLOO_", "UCX_", "HOROVOD_", "OMP_", "KMP_")
"""Variables that say how the system was used."""


@dataclass(frozen=True, kw_only=True)
class SystemDescription:
    """One system that runs of the report ran on."""

    id: str
    name: str
    title: str
    num_runs: int
    hosts: tuple[str, ...]
    """Hosts of the records, at most `MAX_HOSTS`."""
    num_hosts: int
    fields: tuple[tuple[str, str], ...]
    """Title and text of each known field; several texts where runs differ."""
    unknown: tuple[str, ...]
    """Titles of the fields that no run recorded."""


def systems(table: RunTable) -> tuple[SystemDescription, ...]:
    """Each system by its name in the plans, most runs first."""
    found: dict[str, list[Run]] = {}
    for run in table.runs.values():
        if run.record is not None:
            found.setdefault(run.plan.system.name, []).append(run)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(_system(name, runs) for name, runs in ordered)


def _system(name: str, runs: Sequence[Run]) -> SystemDescription:
    looked_at = runs[:: -(-len(runs) // MAX_DESCRIBED)]
    descriptions = [system_fields(run, Statement()) for run in looked_at]
    hosts = dict.fromkeys(rank.host for run in looked_at if run.record for rank in run.record.ranks)
    fields, unknown = [], []
    for key, title in _TITLES.items():
        texts = [description[key] for description in descriptions]
        if set(texts) <= {NOT_RECORDED}:
            unknown.append(title)
        elif not (key.startswith("accelerator_") and set(texts) <= {NO_ACCELERATOR} and title != "GPU"):
            fields.append((title, _joined(texts)))
    fields += _of_plans(looked_at)
    if len(looked_at) < len(runs):
        fields.append(("Runs read", f"{len(looked_at)} of {len(runs)} runs"))
    return SystemDescription(
        id=name,
        name=name,
        title=runs[0].plan.system.title,
        num_runs=len(runs),
        hosts=tuple(hosts)[:MAX_HOSTS],
        num_hosts=len(hosts),
        fields=tuple(fields),
        unknown=tuple(unknown),
    )


def _joined(texts: Sequence[str]) -> str:
    """One text where all runs agree; else each text with its number of runs."""
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    if len(counts) == 1:
        return texts[0]
    if all(text.isdecimal() for text in counts):
        return ", ".join(sorted(counts, key=int))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{text} ({runs_text(count)})" for text, count in ordered[:MAX_TEXTS]]
    more = [f"and {len(ordered) - MAX_TEXTS} others"] if len(ordered) > MAX_TEXTS else []
    return "; ".join([*shown, *more])


def _of_plans(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """How ranks were started and what was set for them."""
    launchers = [f"{run.plan.system.launch.launcher}, scheduler {run.plan.system.scheduler}" for run in runs]
    interfaces = [run.plan.system.launch.interface or "" for run in runs]
    pinned = ["each rank on cores of its own" if run.plan.system.launch.pin else "not bound" for run in runs]
    found = [("Launcher", _joined(launchers)), ("Binding", _joined(pinned)), ("Start-up", _start_up(runs))]
    containers = [run.plan.system.container for run in runs]
    if any(container.is_used for container in containers):
        found.append(("Container", _joined([_container(container) for container in containers])))
    if any(interfaces):
        found.append(("Network interface requested", _joined([text or "none" for text in interfaces])))
    for title, texts in (("GPU placement", [_placement(run) for run in runs]), ("NCCL", [_nccl(run) for run in runs])):
        if any(texts):
            found.append((title, _joined([text or "not known" for text in texts])))
    variables = [_set_variables(run) for run in runs]
    if any(variables):
        found.append(("Variables", _joined([text or "none" for text in variables])))
    return found


def _container(container: ContainerSpec) -> str:
    """What ranks ran in, and which image; a name without a digest may mean another image tomorrow."""
    if not container.is_used:
        return "none"
    which = f"SHA-256 {container.digest[:12]}" if container.digest else "its digest is not known"
    return f"{container.kind}, {container.image}, {which}"


def _start_up(runs: Sequence[Run]) -> str:
    """How long the slowest rank of a run took to its first step, and where there was one, the image before that."""
    ranks = [run.record.ranks for run in runs if run.record is not None]
    text = f"{_range([max(rank.startup_s for rank in some) for some in ranks])} to the first step"
    spent = [[rank.unpacking_s for rank in some if rank.unpacking_s is not None] for some in ranks]
    unpacking = [max(some) for some in spent if some]
    if not unpacking:
        return text
    images = {run.plan.system.image.sha256 or "" for run in runs} - {""}
    names = ", ".join(f"image {name[:12]}" for name in sorted(images))
    return f"{text}; before that {_range(unpacking)} to fetch and unpack {names} on each node"


def _range(seconds: Sequence[float]) -> str:
    low, high = format_seconds(min(seconds)), format_seconds(max(seconds))
    return low if low == high else f"{low} to {high}"


def _placement(run: Run) -> str:
    """Where ranks and GPUs stood on their nodes; empty without GPUs, or where the machine tells nothing."""
    ranks = [rank for rank in run.record.ranks if rank.gpu is not None] if run.record is not None else []
    known = [rank for rank in ranks if rank.gpu is not None and rank.gpu.numa_node is not None and rank.numa_nodes]
    near = [rank for rank in known if rank.gpu is not None and set(rank.numa_nodes) == {rank.gpu.numa_node}]
    parts = []
    if ranks:
        slices = sum(rank.gpu.is_slice for rank in ranks if rank.gpu is not None)
        parts.append(
            f"{slices} ranks on MIG slices, which are no whole GPUs" if slices else "a whole GPU for each rank"
        )
    if known:
        parts.append(f"{len(near)} of {len(known)} ranks on cores of their GPU's NUMA node alone")
    return ", ".join(parts)


def _nccl(run: Run) -> str:
    """What NCCL chose; empty where it did not say."""
    told = run.record.nccl if run.record is not None else None
    if told is None:
        return ""
    ways = ", ".join(f"{way} ({count})" for way, count in sorted(told.channels.items(), key=lambda item: -item[1]))
    parts = [
        told.version or "version not known",
        f"network {told.network}" if told.network else "",
        f"plugin {told.plugin}" if told.plugin else "",
        f"connections {ways}" if ways else "",
        f"{told.collective_channels} channels" if told.collective_channels else "",
        f"{told.nvls_channels} channels of NVLink SHARP" if told.nvls_channels else "",
        f"{told.rings} rings, {told.trees} trees" if told.rings or told.trees else "",
    ]
    return "; ".join(part for part in parts if part)


def _set_variables(run: Run) -> str:
    environment = run.record.environment if run.record is not None else {}
    names = sorted(key for key in environment if key.startswith(tuple(f"variable.{start}" for start in _VARIABLES)))
    return ", ".join(f"{name.removeprefix('variable.')}={environment[name]}" for name in names)
