"""Warnings on a figure, found in the runs behind it; printed beside the figure, never left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dlbench.reading.doubts import Doubt, Severity, merged
from dlbench.reading.environments import environment_doubts, facts
from dlbench.reading.hosts.core_load import load_doubts, loads_of
from dlbench.reading.repeats import shared_nodes, unlike_runs
from dlbench.reading.scaling import Group
from dlbench.reading.table import RunTable
from dlbench.records.record import Record
from dlbench.records.scan import Run
from dlbench.report.wording import percent, ranks_text, repeat_text, units_text
from dlbench.stats.estimates import MIN_RUNS, between_and_within
from dlbench.views.quality import doubts as quality_doubts
from dlbench.views.quality.numbers import group_quality
from dlbench.views.systems import place_doubts

# A run whose steps scatter more than this has a median, but hardly a typical step.
NOISY_CV = 0.25


def run_doubts(run: Run) -> list[Doubt]:
    """What one run with a record gives reason to doubt, by itself."""
    return [*load_doubts(loads_of([run])), *_run_doubts(run)]


def _run_doubts(run: Run) -> list[Doubt]:
    """The same but for what is told once for all runs of a group."""
    record = run.record
    if record is None:
        return []
    ids = (run.plan.run_id,)
    found = [
        Doubt(code="inert", severity="serious", text=f"a requested setting had no effect: {text}", runs=ids)
        for text in record.inert
    ]
    found += [Doubt(code="recorded", severity="serious", text=text, runs=ids) for text in record.warnings]
    found += [
        Doubt(code=code, severity=severity, text=text, runs=ids) for code, severity, text in _derived(run, record)
    ]
    return found


def _derived(run: Run, record: Record) -> Iterator[tuple[str, Severity, str]]:
    if run.plan.workload.data.is_synthetic:
        yield (
            "synthetic-data",
            "note",
            "synthetic data: storage and decoding are not part of these figures"
            + ("; nor is the copy to the device" * (run.plan.workload.data.synthetic_on == "device")),
        )
    shared = shared_nodes(run.plan)
    if shared:
        yield "shared-nodes", "serious", shared
    on_gpu = any(rank.device.startswith("cuda") for rank in record.ranks)
    for code, text in environment_doubts(run.plan, record.environment, on_gpu=on_gpu):
        yield code, "serious", text
    yield from place_doubts(record)
    crowded = _crowded_hosts(record)
    if crowded:
        yield (
            "oversubscribed",
            "serious",
            f"more compute threads than cores ({'; '.join(crowded)}): use fewer ranks per node",
        )
    unpinned = [rank.rank for rank in record.ranks if not rank.pinned]
    if unpinned:
        why = "" if run.plan.system.launch.pin else "; turn system.launch.pin on"
        yield "not-pinned", "serious", f"ranks not bound to cores of their own{why}"
    for setting in record.settings:
        told = any(text.startswith(f"{setting.key}:") for text in (*record.warnings, *record.inert))
        # At one rank nothing is exchanged: no setting of the exchange can act.
        if len(record.ranks) > 1 and not told and setting.is_without_effect:
            yield (
                "inert",
                "serious",
                f"{setting.key}: {setting.requested} was asked for, {setting.effective} was in force "
                f"({setting.evidence})",
            )
    yield from _exchange(record)
    if record.held_nodes:
        many = record.held_nodes > 1
        yield (
            "held-nodes",
            "note",
            f"its Slurm job held {record.held_nodes} node{'s' * many} more than it used, which cost node-hours too",
        )
    bad = sum(rank.bad_sample_count for rank in record.ranks)
    if bad:
        yield "bad-samples", "serious", f"{bad} unreadable sample{'s' * (bad > 1)} skipped: see dlbench data verify"
    for text in record.environment_differences:
        yield "rank-environment", "serious", f"ranks of one run differ: {text}"
    measured_s = max(rank.measured_s for rank in record.ranks)
    if measured_s:
        throughput = sum(rank.samples for rank in record.ranks) / measured_s
        yield from quality_doubts.run_doubts(run, record, throughput)


def _exchange(record: Record) -> Iterator[tuple[str, Severity, str]]:
    result = record.exchange
    if result is None:
        return
    if result.wire_overflows:
        count = result.wire_overflows
        yield (
            "wire-overflow",
            "serious",
            f"{count} all-reduce sum{'s' * (count > 1)} overflowed in {result.wire}: use another sync.wire",
        )
    if result.wire != "fp32":
        yield (
            "wire",
            "note",
            f"gradients travelled as {result.wire}, which changes the arithmetic: compare the loss too",
        )
    if result.autotune is not None and not result.autotune.finished:
        yield (
            "autotune-unfinished",
            "serious",
            "Horovod's autotuner was still searching in the measured steps: set measure.warmup_steps to "
            f"{result.autotune.planned_steps} or more",
        )


def _crowded_hosts(record: Record) -> list[str]:
    hosts: dict[str, tuple[int, int, set[int]]] = {}
    for rank in record.ranks:
        threads, count, cores = hosts.get(rank.host, (0, 0, set()))
        hosts[rank.host] = (threads + rank.threads, count + 1, cores | set(rank.cores))
    return [
        f"{threads} threads of {count} rank{'s' * (count > 1)} on {len(cores)} core{'s' * (len(cores) > 1)} of {host}"
        for host, (threads, count, cores) in sorted(hosts.items())
        if cores and threads > len(cores)
    ]


def group_doubts(group: Group, table: RunTable) -> list[Doubt]:
    """All reasons to doubt the figures of a group, serious ones first; equal texts once, with their runs."""
    found = [*_few_repeats(group), *_cores(group.runs), *_unlike(group), *_series(group), *_sessions(group, table)]
    found += _noise(group, table)
    found += [
        Doubt(code=code, severity=severity, text=text)
        for code, severity, text in quality_doubts.group_doubts(group, group_quality(group, table))
    ]
    found += load_doubts(loads_of(group.runs))
    found += merged(doubt for run in group.runs for doubt in _run_doubts(run))
    # What did not act comes first: then the figures are not those of what was asked for.
    return sorted(found, key=lambda doubt: (doubt.severity != "serious", doubt.code != "inert"))


def _few_repeats(group: Group) -> Iterator[Doubt]:
    few = [point for point in group.points if len(point.run_ids) < MIN_RUNS]
    if few:
        counts = ", ".join(f"{units_text(point.throughput)} at {ranks_text(point.ranks)}" for point in few)
        remedy = repeat_text(min((point.throughput for point in few), key=lambda figure: figure.units))
        yield Doubt(code="few-repeats", severity="serious", text=f"too few for a comparison ({counts}): {remedy}")


def _cores(runs: Sequence[Run]) -> Iterator[Doubt]:
    """Ranks of one series must compute with the same cores, or the series measures that too."""
    cores: dict[str, set[int]] = {}
    threads: dict[str, set[int]] = {}
    for run in runs:
        for rank in run.record.ranks if run.record else ():
            cores.setdefault(run.plan.series.id, set()).add(len(rank.cores))
            threads.setdefault(run.plan.series.id, set()).add(rank.threads)
    for what, seen in (("cores", cores), ("threads", threads)):
        for series, counts in seen.items():
            if len(counts) > 1:
                yield Doubt(
                    code="cores-differ",
                    severity="serious",
                    text=f"ranks of series {series} had {' or '.join(map(str, sorted(counts)))} {what}: part of the "
                    "loss is that difference",
                )


def _unlike(group: Group) -> list[Doubt]:
    """What the records of averaged runs, and of compared points, show to be unequal."""
    met = {run.plan.run_id: facts(run.record) for run in group.runs if run.record is not None}
    return unlike_runs(
        {ranks_text(point.ranks): {run_id: met[run_id] for run_id in point.run_ids} for point in group.points}
    )


def _series(group: Group) -> Iterator[Doubt]:
    apart = [point for point in group.points[1:] if not point.paired_with_baseline]
    if apart and len({run.plan.series.id for run in group.runs}) > 1:
        counts = ", ".join(ranks_text(point.ranks) for point in apart)
        yield Doubt(
            code="not-interleaved",
            severity="note",
            text=f"runs at {counts} and at the baseline did not run interleaved: drift of the machine is part of the "
            "ratio",
        )


def _sessions(group: Group, table: RunTable) -> Iterator[Doubt]:
    """Intervals hold within a session; of several they are made of sessions, which are few."""
    found = []
    rates = table.figures.set_index("run_id")["throughput"]
    for point in group.points:
        logs: dict[str, list[float]] = {}
        for run_id in point.run_ids:
            logs.setdefault(table.sessions[run_id], []).append(math.log(rates[run_id]))
        if len(logs) > 1:
            found.append((len(logs), point.ranks, between_and_within(list(logs.values()))))
    if found:
        count, ranks, parts = min(found, key=lambda one: one[0])
        scatter = (
            f": throughput scatters by {percent(parts[0])} between and {percent(parts[1])} within them" if parts else ""
        )
        few = f"; until there are {MIN_RUNS}, intervals are their range: choose one by --where series=NAME"
        yield Doubt(
            code="pooled-sessions",
            severity="note",
            text=f"{count} sessions are pooled at {ranks_text(ranks)}{scatter}{few * (count < MIN_RUNS)}",
        )


def _noise(group: Group, table: RunTable) -> Iterator[Doubt]:
    frame = table.figures[table.figures["group"] == group.id]
    noisy = frame[frame["step_cv"] > NOISY_CV]
    if len(noisy):
        yield Doubt(
            code="noisy-steps",
            severity="serious",
            text=f"step times scatter by up to {noisy['step_cv'].max() * 100:.0f} % within a run: look for other load",
            runs=tuple(str(run_id) for run_id in noisy["run_id"]),
        )
