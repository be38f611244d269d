"""The systems that runs ran on, in the fields of MLPerf's system descriptions, and which fields were not recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlbench.analysis.table import RunTable
from dlbench.exports.mllog import Statement
from dlbench.exports.system_description import NO_ACCELERATOR, NOT_RECORDED, system_fields
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Pivot, Sheet, column, columns_of
from dlbench.report.wording import runs_text
from dlbench.units import format_seconds
from dlbench.views.model import Report
from dlbench.views.view import ReportSource, ReportView

MAX_HOSTS = 24
MAX_TEXTS = 6  # Texts of a field where runs differ; the rest are counted.
MAX_DESCRIBED = 200  # Runs of a system that are looked at, evenly spread.

_TITLES = {  # Fields of a system description that are shown, in order.
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

_VARIABLES = tuple(f"variable.{start}_" for start in ("NCCL", "GLOO", "UCX", "HOROVOD", "OMP", "KMP"))
"""Variables that say how the system was used."""


@dataclass(frozen=True, kw_only=True)
class SystemDescription:
    """One system that runs of the report ran on."""

    id: str
    name: str = field(metadata=column(name="system", limit=100))
    title: str = field(metadata=column(limit=300))
    num_runs: int = field(metadata=column(name="runs"))
    hosts: tuple[str, ...]  # Hosts of the records, at most `MAX_HOSTS`.
    num_hosts: int = field(metadata=column(name="hosts"))
    fields: tuple[tuple[str, str], ...]  # Title and text of each known field; several texts where runs differ.
    unknown: tuple[str, ...]  # Titles of the fields that no run recorded.


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
    counts = Counter(texts)
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
    systems = [run.plan.system for run in runs]
    launchers = [f"{system.launch.launcher}, scheduler {system.scheduler}" for system in systems]
    pinned = ["each rank on cores of its own" if system.launch.pin else "not bound" for system in systems]
    found = [("Launcher", _joined(launchers)), ("Binding", _joined(pinned)), ("Start-up", _start_up(runs))]
    containers = []  # A name without a digest may mean another image tomorrow.
    for container in (system.container for system in systems):
        which = f"SHA-256 {container.digest[:12]}" if container.digest else "its digest is not known"
        containers.append(f"{container.kind}, {container.image}, {which}" if container.is_used else "")
    for title, texts, missing in (
        ("Container", containers, "none"),
        ("Network interface requested", [system.launch.interface or "" for system in systems], "none"),
        ("GPU placement", [_placement(run) for run in runs], "not known"),
        ("NCCL", [_nccl(run) for run in runs], "not known"),
        ("Variables", [_set_variables(run) for run in runs], "none"),
    ):
        if any(texts):
            found.append((title, _joined([text or missing for text in texts])))
    return found


def _start_up(runs: Sequence[Run]) -> str:
    """How long the slowest rank of a run took to its first step, and where there was one, the image before that."""
    ranks = [run.record.ranks for run in runs if run.record is not None]
    text = f"{_range([max(rank.startup_s for rank in some) for some in ranks])} to the first step"
    compiled = [[one for rank in some if (one := rank.compiling) is not None] for some in ranks]
    for what, cache in (
        ("compiling", "cold"),
        ("compiling (whether from a cache is not known)", "unknown"),
        ("loading what was compiled before", "warm"),
    ):
        # The slowest rank counts, and a run is cold where any rank compiled: of these words the least.
        chosen = [some for some in compiled if some and min(one.cache for one in some) == cache]
        if any(spent := [max(one.seconds or 0.0 for one in some) for some in chosen]):
            text += f"; {what} took {_range(spent)} of it in {len(spent)} of {len(ranks)} runs"
    return text


def _range(seconds: Sequence[float]) -> str:
    low, high = format_seconds(min(seconds)), format_seconds(max(seconds))
    return low if low == high else f"{low} to {high}"


def _placement(run: Run) -> str:
    """Where ranks and GPUs stood on their nodes; empty without GPUs, or where the machine reports nothing."""
    ranks = run.record.ranks if run.record is not None else ()
    gpus = [(rank.gpu, set(rank.numa_nodes)) for rank in ranks if rank.gpu is not None]
    known = [nodes == {gpu.numa_node} for gpu, nodes in gpus if gpu.numa_node is not None and nodes]
    if not gpus:
        return ""
    slices = sum(gpu.is_slice for gpu, _ in gpus)
    text = f"{slices} ranks on MIG slices, which are no whole GPUs" if slices else "a whole GPU for each rank"
    text += ", chosen by the launcher's core masks" * any(gpu.by_mask for gpu, _ in gpus)
    return text + (f", {sum(known)} of {len(known)} ranks on cores of their GPU's NUMA node alone" if known else "")


def _nccl(run: Run) -> str:
    """What NCCL chose; empty where it did not say."""
    nccl = run.record.nccl if run.record is not None else None
    if nccl is None:
        return ""
    ways = ", ".join(f"{way} ({count})" for way, count in sorted(nccl.channels.items(), key=lambda item: -item[1]))
    counted = sorted(Counter(nccl.adapters.values()).items())
    parts = [
        nccl.version or "version not known",
        f"network {nccl.network}" if nccl.network else "",
        f"plugin {nccl.plugin}" if nccl.plugin else "",
        f"adapters {kinds}" if (kinds := ", ".join(f"{kind} ({n})" for kind, n in counted)) else "",
        f"connections {ways}" if ways else "",
        f"{nccl.collective_channels} channels" if nccl.collective_channels else "",
        f"{nccl.nvls_channels} channels of NVLink SHARP" if nccl.nvls_channels else "",
        f"{nccl.rings} rings, {nccl.trees} trees" if nccl.rings or nccl.trees else "",
    ]
    return "; ".join(part for part in parts if part)


def _set_variables(run: Run) -> str:
    environment = run.record.environment if run.record is not None else {}
    names = sorted(key for key in environment if key.startswith(_VARIABLES))
    return ", ".join(f"{name.removeprefix('variable.')}={environment[name]}" for name in names)


@dataclass(frozen=True)
class SystemProperty:
    """One property of one system: a row of the table of systems."""

    system: SystemDescription
    what: str = field(metadata=column())
    text: str = field(metadata=column(name="value", limit=1000))
    is_data: bool = True  # Whether it is a field of the description; others are counts and lists, for people only.


class SystemsView(ReportView):
    """What the runs ran on."""

    id = "systems"
    title = "Systems"
    level = "appendix"
    key = "systems"
    after = "differences"

    def numbers(self, source: ReportSource) -> tuple[SystemDescription, ...]:
        return systems(source.table)

    def shown(self, report: Report, found: tuple[SystemDescription, ...]) -> Section:
        hosts = sum(system.num_hosts for system in found)
        headline = f"{len(found)} system{'s' * (len(found) != 1)}, {hosts} host{'s' * (hosts != 1)}"
        return Section(headline=headline, sheets=(_sheet(found),))


def _sheet(found: Sequence[SystemDescription]) -> Sheet[SystemProperty]:
    known = list(dict.fromkeys(title for system in found for title, _ in system.fields))
    lines = ["Runs", "Hosts", *known, "Not recorded"]
    system_columns = columns_of(SystemDescription, "name", "title", "num_runs", "num_hosts", of="system")
    return Sheet(
        name="systems",
        title="Systems",
        columns=(*system_columns, *columns_of(SystemProperty)),
        rows=[row for system in found for row in _rows(system)],
        pivot=Pivot(
            corner="What",
            down="what",
            across=lambda row: f"{row.system.name}: {row.system.title}",
            cell="text",
        ),
        is_data=lambda row: row.is_data,
        is_shown=lambda row: row.what in lines,
        order=lambda row: lines.index(row.what),
        caption="Fields as in MLPerf's system descriptions; dlbench export system RUN writes them.",
    )


def _rows(system: SystemDescription) -> list[SystemProperty]:
    more = f" and {system.num_hosts - len(system.hosts)} more" if system.num_hosts > len(system.hosts) else ""
    hosts = f"{system.num_hosts}: {', '.join(system.hosts)}{more}"
    return [
        SystemProperty(system, "Runs", str(system.num_runs), is_data=False),
        SystemProperty(system, "Hosts", hosts, is_data=False),
        *(SystemProperty(system, title, text) for title, text in system.fields),
        *(SystemProperty(system, title, NOT_RECORDED) for title in system.unknown),
        SystemProperty(system, "Not recorded", ", ".join(system.unknown) or "nothing", is_data=False),
    ]
