"""What runs tell of their input becomes part of the `Report`: waits, stalls, disks, order, coverage, staging."""

from __future__ import annotations

from dlbench.errors import IncompleteDataError
from dlbench.reading.machine_readings import MAX_NODES_OF_LARGE_RUN, MachineReadings, machine_readings
from dlbench.reading.node_samples import node_course, nodes_of
from dlbench.reading.run_table import RunTable
from dlbench.reading.scaling import Group
from dlbench.records.scan import Run
from dlbench.report.wording import clean, figure_text, number_text, percent, place_text, runs_text
from dlbench.stats.figure import figure_of
from dlbench.units import format_bytes
from dlbench.views.data_path.numbers import MAX_RANKS, DataPoint, data_points, spread
from dlbench.views.machine import model

AT_REST = 1e6
"""Bytes a second of all disks together below which nothing worth words was read from them."""

_FORMATS = {
    "images": "JPEG images",
    "jpeg-tree": "JPEG images",
    "text": "text",
    "density": "density volumes",
    "hdf5-density": "density volumes",
}


def data_path(group: Group, table: RunTable) -> model.DataPath | None:
    """Where samples come from and how long ranks wait for them; every run tells of it."""
    readings = machine_readings(table)
    points = data_points(group, table, readings)
    data = group.sample.plan.workload.data
    return model.DataPath(
        source=clean(data.source),
        format=_FORMATS.get(data.format, data.format),
        is_synthetic=data.is_synthetic,
        points=tuple(map(_point, points)),
        facts=tuple((title, clean(text)) for title, text in _facts(group, readings, points)),
        verdict=_verdict(points, is_synthetic=data.is_synthetic),
        notes=(),
    )


def _point(point: DataPoint) -> model.DataPoint:
    stalls = point.stalls
    return model.DataPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        wait=figure_of(point.wait_s, "s"),
        copy=figure_of(point.copy_s, "s"),
        wait_share=figure_of(point.wait_share, "fraction"),
        utilisation=figure_of(point.utilisation, "fraction"),
        stalled=None if stalls is None else stalls.stalled,
        longest_wait_s=None if stalls is None else stalls.longest_s,
        stall_steps=0 if stalls is None else stalls.num_steps,
        stall_ranks=0 if stalls is None else stalls.num_ranks,
        disk_bytes_per_s=point.disk_bytes_per_s,
        page_cache_bytes=point.page_cache_bytes,
    )


def _verdict(points: tuple[DataPoint, ...], *, is_synthetic: bool) -> str:
    worst = max(points, key=lambda point: point.wait_share.value)
    share = figure_text(figure_of(worst.wait_share, "fraction"))
    wait = figure_text(figure_of(worst.wait_s, "s"))
    where = place_text(worst.ranks, worst.nodes)
    largest = ", the largest share of any rank count" if len(points) > 1 else ""
    start = (
        f"On average over ranks, steps and runs ranks wait for input for {share} of a step ({wait}) at {where}{largest}"
    )
    looked_at = [point.stalls for point in points if point.stalls is not None]
    if looked_at:
        longest = max(stalls.longest_s for stalls in looked_at)
        start += f"; the longest single wait looked at was {number_text(longest, 's')}"
    if is_synthetic:
        return f"{start}. The data is synthetic: made in memory, so that nothing here tells of storage."
    stalled = max((stalls.stalled for stalls in looked_at), default=0.0)
    if stalled > 0:
        start += f"; up to {percent(stalled)} of the steps stall (run in the middle, at most {MAX_RANKS} ranks)"
    return f"{start}."


def _facts(group: Group, readings: MachineReadings, points: tuple[DataPoint, ...]) -> list[tuple[str, str]]:
    last = group.points[-1]
    run = readings.middle[group.id, last.ranks, last.nodes]
    return [
        ("Readers", _readers(run)),
        ("Cold or warm", _temperature(points, is_synthetic=run.plan.workload.data.is_synthetic)),
        ("Order", _order(run)),
        ("Coverage", _coverage(run)),
        ("Equal work", _equal_work(group)),
        ("Unreadable samples", _unreadable(group)),
        ("Staging", _staging(readings, group)),
    ]


def _readers(run: Run) -> str:
    data = run.plan.workload.data
    if data.is_synthetic:
        return "none: batches are made once and used again"
    workers = data.loader_workers
    told = dict(run.record.data) if run.record is not None else {}
    decoder = f"; decoder {told['decoder']}" if "decoder" in told else ""
    if not workers:
        return f"the training process itself reads (data.loader_workers 0){decoder}"
    return f"{workers} reader processes a rank (data.loader_workers){decoder}"


def _temperature(points: tuple[DataPoint, ...], *, is_synthetic: bool) -> str:
    if is_synthetic:
        return "no file is read"
    told = [(point.disk_bytes_per_s, point) for point in points if point.disk_bytes_per_s is not None]
    if not told:
        return (
            "not known: no sample tells what disks read in the measured steps (watch.sampler, and disks that the "
            "kernel counts)"
        )
    rate, point = max(told, key=lambda item: item[0])
    cache = f"; page cache {format_bytes(point.page_cache_bytes)} a node" if point.page_cache_bytes else ""
    where = place_text(point.ranks, point.nodes)
    if rate < AT_REST:
        return (
            f"warm, or over the network: local disks read less than {format_bytes(AT_REST)}/s in the measured steps, "
            f"so samples came from the page cache or from a network file system, which these counters do not see{cache}"
        )
    return (
        f"cold at least in part: local disks read {format_bytes(rate)}/s in the measured steps at {where}, whatever "
        f"read them{cache}"
    )


def _order(run: Run) -> str:
    if run.plan.workload.data.is_synthetic:
        return "a pool of batches in turn, the same all over the run; no shuffling"
    return (
        f"one permutation an epoch of the whole data set, of seed {run.plan.workload.train.seed}, the same on all "
        "ranks and dealt out to them: global shuffling, no sample twice in an epoch. Which samples were read is not "
        "recorded one by one; it follows from the seed"
    )


def _coverage(run: Run) -> str:
    assert run.record is not None
    data = run.record.data
    seen = run.record.steps * run.plan.global_batch
    size = data.get("num_samples")
    if run.plan.workload.data.is_synthetic:
        pool = f" of {size:,} samples" if isinstance(size, int) else ""
        return f"a pool{pool} a rank, used again and again"
    if not isinstance(size, int) or size <= 0:
        return "not known: the record names no size of the data set"
    text = f"{seen:,} samples of a set of {size:,}: {number_text(seen / size, 'epochs')} epochs, warm-up steps counted"
    dropped = data.get("dropped_per_epoch")
    if isinstance(dropped, int) and dropped:
        text += f"; {dropped:,} samples an epoch are left out, others each time, because they fill no batch"
    if seen < size:
        text += f"; at most {percent(seen / size)} of the set was read, so that its rest was never cached by this run"
    return text


def _equal_work(group: Group) -> str:
    details = dict.fromkeys(
        check.detail
        for run in group.runs
        if run.record is not None
        for check in run.record.checks
        if check.name == "equal work"
    )
    if not details:
        return "not checked"
    first, *others = details
    return first + (f"; said otherwise at other rank counts ({len(others)})" if others else "")


def _unreadable(group: Group) -> str:
    counts = [sum(rank.bad_sample_count for rank in run.record.ranks) for run in group.runs if run.record is not None]
    bad = sum(count > 0 for count in counts)
    if not bad:
        return "none"
    return f"up to {max(counts):,} in a run, left out (data.on_bad_sample skip); {bad} of {len(counts)} runs had some"


def _staging(readings: MachineReadings, group: Group) -> str:
    """Of the run in the middle of each point: spans tell of staging whether or not the node was sampled."""
    if group.sample.plan.workload.data.is_synthetic:
        return "no file is read"
    told = [
        seconds
        for point in group.points
        if (seconds := _staged_s(readings.middle[group.id, point.ranks, point.nodes])) is not None
    ]
    if not told:
        return "not known: no node's spans were read"
    whose = f"by the spans of {runs_text(len(told))}, the middle one of each rank count"
    if not max(told):
        return f"not done by these runs: ranks read the data source where it lies ({whose})"
    return f"up to {number_text(max(told), 's')} on a node ({whose})"


def _staged_s(run: Run) -> float | None:
    """Seconds of staging on the node with most of it; None where no node that is looked at has spans."""
    found = []
    for node in spread(nodes_of(run), MAX_NODES_OF_LARGE_RUN):
        try:
            course = node_course(run, node)
        except IncompleteDataError:
            # Damage is told by the views of telemetry and steps.
            continue
        if course.has_spans:
            found.append(sum(end - begin for stage, begin, end in course.pieces if stage == "staging") / 1e9)
    return max(found, default=None)
