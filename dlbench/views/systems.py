"""The view `systems`, the systems of the runs in the fields of MLPerf's system descriptions, and the view
`environment`, all recorded facts of the environment of the runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, itemgetter

from dlbench.analysis.environments import Difference, compare
from dlbench.analysis.scaling import group_by
from dlbench.analysis.table import RunTable
from dlbench.exports.mllog import NO_ACCELERATOR, NOT_RECORDED, Statement, system_fields
from dlbench.records.record import Record
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Pivot, Sheet, column, columns_of, text_sheet
from dlbench.report.wording import clean, runs_text
from dlbench.specs.system import ContainerSpec
from dlbench.units import counted, first_of, format_seconds, plural
from dlbench.views.model import Environment, Report, ReportSource, ReportView, ranks_of

MAX_HOSTS = 24
MAX_TEXTS = 6  # Different texts of a field that are listed; further ones are counted.
MAX_DESCRIBED = 200  # Runs of a system that are described, evenly spread.
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


def environment_of(runs: Sequence[Run]) -> Environment:
    """Returns the facts that all runs have in common, and those in which they differ."""
    environments = compare(runs)
    return Environment(
        common=tuple((clean(key), clean(value)) for key, value in environments.common.items()),
        differences=tuple(map(_cleaned, environments.differences)),
        num_runs=len(runs),
    )


def _cleaned(item: Difference) -> Difference:
    values = tuple((clean(value), run_ids) for value, run_ids in item.values)
    return replace(item, key=clean(item.key), values=values)


class EnvironmentView(ReportView):
    """The environment of the runs."""

    id = "environment"
    title = "Environment"
    level = "appendix"
    after = "without-figures"

    def sections(self, report: Report) -> tuple[Section, ...]:
        environment = report.environment
        if not environment.num_runs:
            return ()
        rows = []
        unexpected = []
        for item in environment.differences:
            key = item.key
            if not item.expected:
                unexpected.append(item.key[:30])
                key += " (differs)"
            rows += [(key, value, str(len(run_ids))) for value, run_ids in item.values]
        rows += [(key, value, "all") for key, value in environment.common]
        headline = f"the same in all {runs_text(environment.num_runs)}"
        if unexpected:
            headline = f"runs differ in {first_of(unexpected, 2)}"
        title = "All recorded facts of the environment"
        sheet = replace(text_sheet("environment", title, ("Key", "Value", "Runs"), rows), is_folded=True)
        return (Section(id=self.id, title=self.title, headline=headline, sheets=(sheet,)),)


@dataclass(frozen=True, kw_only=True)
class SystemDescription:
    """A system of runs of the report."""

    id: str
    name: str = field(metadata=column(name="system", limit=100))
    title: str = field(metadata=column(limit=300))
    num_runs: int = field(metadata=column(name="runs"))
    hosts: tuple[str, ...]  # Hosts of the records, at most `MAX_HOSTS`.
    num_hosts: int = field(metadata=column(name="hosts"))
    fields: tuple[tuple[str, str], ...]  # Title and text of each recorded field; several texts if runs differ.
    unknown: tuple[str, ...]  # Titles of the fields that no run recorded.


def systems(table: RunTable) -> tuple[SystemDescription, ...]:
    """Returns each system by its name in the plans, the one with most runs first."""
    recorded = [run for run in table.runs.values() if run.record is not None]
    by_name = group_by(recorded, attrgetter("plan.system.name"))
    ordered = sorted(by_name.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(_system(name, runs) for name, runs in ordered)


def _system(name: str, runs: Sequence[Run]) -> SystemDescription:
    described = runs[:: -(-len(runs) // MAX_DESCRIBED)]
    descriptions = [system_fields(run, Statement()) for run in described]
    hosts: dict[str, None] = {}
    for run in described:
        hosts |= dict.fromkeys(rank.host for rank in ranks_of(run))
    fields, unknown = [], []
    for key, title in _TITLES.items():
        texts = [description[key] for description in descriptions]
        if set(texts) <= {NOT_RECORDED}:
            unknown.append(title)
        elif not (key.startswith("accelerator_") and set(texts) <= {NO_ACCELERATOR} and title != "GPU"):
            fields.append((title, _joined(texts)))
    fields += _of_plans(described)
    if len(described) < len(runs):
        fields.append(("Runs read", f"{len(described)} of {len(runs)} runs"))
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
    """Returns the text if all runs agree; else each text with its number of runs."""
    counts = Counter(texts)
    if len(counts) == 1:
        return texts[0]
    if all(text.isdecimal() for text in counts):
        return ", ".join(sorted(counts, key=int))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{text} ({runs_text(count)})" for text, count in ordered[:MAX_TEXTS]]
    if len(ordered) > MAX_TEXTS:
        parts.append(f"and {len(ordered) - MAX_TEXTS} others")
    return "; ".join(parts)


def _of_plans(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Returns how ranks were launched, and their settings: titles and texts."""
    systems = [run.plan.system for run in runs]
    records = [run.record for run in runs if run.record is not None]
    launchers = [f"{system.launch.launcher}, scheduler {system.scheduler}" for system in systems]
    bindings = ["each rank bound to its cores" if system.launch.pin else "not bound" for system in systems]
    fields = [("Launcher", _joined(launchers)), ("Binding", _joined(bindings)), ("Start-up", _start_up(records))]
    for title, texts, missing in (
        ("Container", [_container(system.container) for system in systems], "none"),
        ("Network interface requested", [system.launch.interface or "" for system in systems], "none"),
        ("GPU placement", [_placement(run) for run in runs], "not known"),
        ("NCCL", [_nccl(record) for record in records], "not known"),
        ("Variables", [_set_variables(record.environment) for record in records], "none"),
    ):
        if any(texts):
            fields.append((title, _joined([text or missing for text in texts])))
    return fields


def _container(container: ContainerSpec) -> str:
    if not container.is_used:
        return ""
    # The same name without a digest may be another image tomorrow.
    digest = f"SHA-256 {container.digest[:12]}" if container.digest else "its digest is not known"
    return f"{container.kind}, {container.image}, {digest}"


def _start_up(records: Sequence[Record]) -> str:
    """Returns the time until the first step of a run's slowest rank, and the part of it that compiling took."""
    ranks_of_runs = [record.ranks for record in records]
    startup_s = [max(rank.startup_s for rank in ranks) for ranks in ranks_of_runs]
    text = f"{_range(startup_s)} to the first step"
    # The slowest rank counts. A run is cold if any rank compiled: "cold" sorts before "unknown" and "warm".
    seconds_by_cache: dict[str, list[float]] = {}
    for ranks in ranks_of_runs:
        compiling = [rank.compiling for rank in ranks if rank.compiling is not None]
        if compiling:
            cache = min(result.cache for result in compiling)
            seconds_by_cache.setdefault(cache, []).append(max(result.seconds or 0.0 for result in compiling))
    for title, cache in (
        ("compiling", "cold"),
        ("compiling (not known whether from a cache)", "unknown"),
        ("loading compiled code from a cache", "warm"),
    ):
        seconds = seconds_by_cache.get(cache, [])
        if any(seconds):
            text += f"; {title} took {_range(seconds)} of it in {len(seconds)} of {len(ranks_of_runs)} runs"
    return text


def _range(seconds: Sequence[float]) -> str:
    low, high = format_seconds(min(seconds)), format_seconds(max(seconds))
    return low if low == high else f"{low} to {high}"


def _placement(run: Run) -> str:
    """Returns the placement of ranks on GPUs and NUMA nodes; empty without GPUs."""
    ranks = [rank for rank in ranks_of(run) if rank.gpu is not None]
    if not ranks:
        return ""
    text = "a whole GPU for each rank"
    gpus = [rank.gpu for rank in ranks if rank.gpu is not None]
    num_slices = sum(gpu.is_slice for gpu in gpus)
    if num_slices:
        text = f"{num_slices} ranks on MIG slices, which are no whole GPUs"
    if any(gpu.by_mask for gpu in gpus):
        text += ", chosen by the launcher's core masks"
    is_local = [
        set(rank.numa_nodes) == {gpu.numa_node}
        for rank, gpu in zip(ranks, gpus, strict=True)
        if gpu.numa_node is not None and rank.numa_nodes
    ]
    if is_local:
        text += f", {sum(is_local)} of {len(is_local)} ranks only on cores of their GPU's NUMA node"
    return text


def _nccl(record: Record) -> str:
    nccl = record.nccl
    if nccl is None:
        return ""
    adapters = sorted(Counter(nccl.adapters.values()).items())
    channels = sorted(nccl.channels.items(), key=itemgetter(1), reverse=True)
    parts = [nccl.version or "version not known"]
    for value, text in (
        (nccl.network, f"network {nccl.network}"),
        (nccl.plugin, f"plugin {nccl.plugin}"),
        (adapters, f"adapters {', '.join(f'{kind} ({count})' for kind, count in adapters)}"),
        (channels, f"connections {', '.join(f'{kind} ({count})' for kind, count in channels)}"),
        (nccl.collective_channels, f"{nccl.collective_channels} channels"),
        (nccl.nvls_channels, f"{nccl.nvls_channels} channels of NVLink SHARP"),
        (nccl.rings or nccl.trees, f"{nccl.rings} rings, {nccl.trees} trees"),
    ):
        if value:
            parts.append(text)
    return "; ".join(parts)


def _set_variables(environment: Mapping[str, str]) -> str:
    names = sorted(key for key in environment if key.startswith(_VARIABLES))
    return ", ".join(f"{name.removeprefix('variable.')}={environment[name]}" for name in names)


@dataclass(frozen=True)
class SystemProperty:
    """One property of one system: a row of the table of systems."""

    system: SystemDescription
    what: str = field(metadata=column())
    text: str = field(metadata=column(name="value", limit=1000))
    is_data: bool = True  # Whether it is a field of the description; others are counts and lists for people only.


class SystemsView(ReportView):
    """The systems of the runs."""

    id = "systems"
    title = "Systems"
    level = "appendix"
    key = "systems"
    after = "differences"

    def numbers(self, source: ReportSource) -> tuple[SystemDescription, ...]:
        return systems(source.table)

    def shown(self, report: Report, systems: tuple[SystemDescription, ...]) -> Section:
        num_hosts = sum(system.num_hosts for system in systems)
        headline = f"{counted(len(systems), 'system')}, {num_hosts} {plural('host', num_hosts)}"
        return Section(headline=headline, sheets=(_sheet(systems),))


def _sheet(systems: Sequence[SystemDescription]) -> Sheet[SystemProperty]:
    fields = chain.from_iterable(system.fields for system in systems)
    lines = ["Runs", "Hosts", *dict.fromkeys(title for title, _ in fields), "Not recorded"]
    system_columns = columns_of(SystemDescription, "name", "title", "num_runs", "num_hosts", of="system")
    return Sheet(
        name="systems",
        title="Systems",
        columns=(*system_columns, *columns_of(SystemProperty)),
        rows=list(chain.from_iterable(map(_rows, systems))),
        pivot=Pivot(
            corner="Property", down="what", across=lambda row: f"{row.system.name}: {row.system.title}", cell="text"
        ),
        is_data=attrgetter("is_data"),
        is_shown=lambda row: row.what in lines,
        order=lambda row: lines.index(row.what),
        caption="Fields as in MLPerf's system descriptions; dlbench export system RUN writes them.",
    )


def _rows(system: SystemDescription) -> list[SystemProperty]:
    hosts = f"{system.num_hosts}: {', '.join(system.hosts)}"
    if system.num_hosts > len(system.hosts):
        hosts += f" and {system.num_hosts - len(system.hosts)} more"
    return [
        SystemProperty(system, "Runs", str(system.num_runs), is_data=False),
        SystemProperty(system, "Hosts", hosts, is_data=False),
        *(SystemProperty(system, title, text) for title, text in system.fields),
        *(SystemProperty(system, title, NOT_RECORDED) for title in system.unknown),
        SystemProperty(system, "Not recorded", ", ".join(system.unknown) or "nothing", is_data=False),
    ]
