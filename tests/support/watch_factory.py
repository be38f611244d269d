"""What watching leaves behind, with known content, written by the real writers: spans, samples, clocks, large runs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlbench.node.garbage import COLLECT_EVERY
from dlbench.node.watching.agent import sample_bytes, span_bytes, window_ranks
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder, create
from dlbench.records.record import Record
from dlbench.records.rows.format import deflated_json
from dlbench.records.rows.reader import BlockReader
from dlbench.records.rows.samples import sample_writer
from dlbench.records.rows.shared import RankRows, block, file_of, read_parts
from dlbench.records.rows.spans import COMPUTE, EXCHANGE, INPUT, STAGE, SpanWriter
from dlbench.records.rows.steps import PHASES, StepWriter
from dlbench.records.status import NodeStatuses, read_statuses, write_node_statuses, write_status
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import MS, exchange_result, plans, status

Times = npt.NDArray[np.int64]

SPAN_SHARE = 1_000_000
SAMPLE_SHARE = 10_000_000

LAYERS = 150
MESSAGES = 10
LARGE_GRADIENTS = [(9_000_000, 0.0055 * (number + 1)) for number in range(MESSAGES)]
"""Bytes of each message of a large run and the second of the backward pass in which it is ready."""

SLOW_FACTOR = 1.08
"""Forward and backward of a large run's slow rank take this many times as long."""


def write_spans(
    folder: RunFolder, rank: int, spans: Iterable[Mapping[str, Any]], max_bytes: int = SPAN_SHARE
) -> SpanWriter:
    """The spans of one rank; each is the arguments of `SpanWriter.add`. Returns the closed writer."""
    writer = SpanWriter(file_of(folder.spans(rank)), {"rank": rank, "run_id": folder.path.name}, max_bytes)
    for span in spans:
        writer.add(**span)
    writer.close()
    return writer


def write_samples(
    folder: RunFolder,
    node: int,
    columns: Sequence[str],
    rows: Iterable[Sequence[float]],
    *,
    unavailable: Mapping[str, str] | None = None,
    failures: Sequence[Mapping[str, Any]] = (),
    host: str = "n0",
    period_s: float = 1.0,
    end: Mapping[str, Any] | None = None,
    late_ns: int = 0,
    max_bytes: int = SAMPLE_SHARE,
    facts: Mapping[str, str] | None = None,
) -> int:
    """The samples of one node.

    Args:
        folder: the run.
        node: its number.
        columns: names of the fields; counters, bytes and masks become 8-byte floats, all others 4-byte ones.
        rows: time_ns, then a value for each field (NaN: not read).
        unavailable: fields the node does not tell, each with the reason.
        failures: notes of what failed on the way: failed, time_ns, reason; written before the last rows.
        host: name of the node.
        period_s: of the sampler.
        end: the sampler's own account; None: it was killed.
        late_ns: of every sample.
        max_bytes: of the file.
        facts: what does not change while sampling.

    Returns:
        Bytes of the file.
    """
    header = {
        "node_rank": node,
        "host": host,
        "run_id": folder.path.name,
        "period_s": period_s,
        "unavailable": dict(unavailable or {}),
        "facts": dict(facts or {}),
    }
    typed = [(name, "<f8" if is_double(name) else "<f4") for name in columns]
    with sample_writer(folder.samples(node), header, typed, max_bytes) as writer:
        for row in rows:
            writer.append((row[0], late_ns, *row[1:]))
        for failure in failures:
            writer.note(failure)
        if end is not None:
            writer.note({"end": dict(end)})
    return writer.bytes_written


def is_double(name: str) -> bool:
    return name.endswith(
        ("_j", "_bytes", "throttled_s", "clock_reasons", "replays", "ecc_corrected", "ecc_uncorrected")
    )


def clock_line(node_rank: int = 0, host: str = "n0", **changes: Any) -> dict[str, Any]:
    """How a node's clock stands to node 0's; other nodes than 0 need `points`."""
    return {"node_rank": node_rank, "host": host, "points": [], "wall_offset_ns": 0, "problem": "", **changes}


def node_watch(node_rank: int = 0, host: str = "n0", **changes: Any) -> dict[str, Any]:
    return {
        "node_rank": node_rank,
        "host": host,
        "num_samples": 60,
        "dropped_samples": 0,
        "period_s": 1.0,
        "late_median_s": 0.0001,
        "late_max_s": 0.002,
        "cpu_s": 0.2,
        "measured_cpu_s": 0.1,
        "wall_s": 60.0,
        "sources": ["host.cpu.0.busy"],
        "unavailable": {},
        "failures": [],
        "clock": clock_line(node_rank, host),
        **changes,
    }


def watch_result(**changes: Any) -> dict[str, Any]:
    """The watching of a run on one node, without a window."""
    return {
        "nodes": [node_watch()],
        "window_ranks": [],
        "window_first_step": None,
        "window_num_steps": 0,
        "num_spans": 0,
        "dropped_spans": 0,
        "trace_bytes": 0,
        "overhead": {
            "value": 0.002,
            "low": 0.0,
            "high": 0.004,
            "num_pairs": 0,
            "method": "accounted",
            "evidence": "CPU time of samplers and spans during the measured steps",
        },
        **changes,
    }


# Large runs


@dataclass(frozen=True, kw_only=True)
class Course:
    """When everything happened in a large run; nanoseconds."""

    boundaries: Times
    """(ranks, steps + 1): starts of the steps and the end of the last, by each node's own clock."""
    phases: Times
    """(ranks, steps, phases), in the order of `PHASES`."""
    true_s: float
    """From the first to the last boundary."""
    bases: Times
    """(nodes,): each node's clock at the first boundary."""
    drifts: npt.NDArray[np.float64]
    """(nodes,): how much faster than node 0's it goes (1)."""


def slow_rank(ranks: int) -> int:
    """The rank of a large run that computes `SLOW_FACTOR` times as long as the others."""
    return ranks // 3


def large_run(
    out: Path, *, ranks: int, steps: int, ranks_per_node: int = 8, seed: int = 0, repeat: int = 0, repeats: int = 1
) -> RunFolder:
    """A valid run of a weak series "large": noisy, one rank slow, every file that watching leaves.

    Runs of other rank counts into the same `out` are further points of the series.
    """
    out.mkdir(parents=True, exist_ok=True)
    plan = _large_plan(ranks, steps, ranks_per_node, repeat, repeats)
    nodes = plan.layout.nodes
    rng = np.random.default_rng((seed, ranks, repeat))
    course = _course(plan, steps, rng)
    folder = create(out, plan)
    for rank in range(ranks):
        _write_steps(folder, plan, course, rank, rng)
    window = window_ranks(plan)
    first = max(0, plan.measure.warmup_steps - plan.watch.window_steps)
    num_steps = plan.measure.warmup_steps - first
    writers = []
    for rank in range(ranks):
        spans = _spans(plan, course, rank, range(first, first + num_steps * (rank in window)), rng)
        writers.append(write_spans(folder, rank, spans, span_bytes(plan, rank)))
    sizes = [_write_node(folder, plan, course, node, rng) for node in range(nodes)]
    num_samples = len(_sample_times(plan, course))
    watch = watch_result(
        nodes=[
            node_watch(
                node,
                _host(node),
                num_samples=num_samples,
                period_s=_period_s(plan, course),
                wall_s=course.true_s + 20,
                sources=_columns(plan.layout.ranks_per_node),
                clock=_clock(course, node, rng),
            )
            for node in range(nodes)
        ],
        window_ranks=window,
        window_first_step=first,
        window_num_steps=num_steps,
        num_spans=sum(writer.num_rows for writer in writers),
        dropped_spans=sum(writer.dropped for writer in writers),
        trace_bytes=sum(sizes) + sum(writer.bytes_written for writer in writers),
    )
    record = Record.model_validate(_record(plan, steps, course, watch))
    write_json(folder.record, record.model_dump(mode="json"))
    return folder


def large_runs(out: Path, *, ranks: int, steps: int, runs: int, ranks_per_node: int = 8) -> list[RunFolder]:
    """A large run and further repeats of it with the same times: copied, which is much quicker than made."""
    first = large_run(out, ranks=ranks, steps=steps, ranks_per_node=ranks_per_node, repeats=runs)
    record = json.loads(first.record.read_text(encoding="utf-8"))
    made = [first]
    for repeat in range(1, runs):
        plan = _large_plan(ranks, steps, ranks_per_node, repeat, runs)
        folder = create(out, plan)
        for path in first.path.iterdir():
            if path.suffix in (".steps", ".spans", ".samples"):
                (folder.path / path.name).write_bytes(_renamed(path, run_id=plan.run_id))
            elif path not in (first.plan, first.record):
                (folder.path / path.name).write_bytes(path.read_bytes())
        finished = f"2026-03-01T12:{10 + repeat % 50:02d}:00Z"
        changes = {"run_id": plan.run_id, "configuration": plan.configuration_digest(), "finished": finished}
        write_json(folder.record, {**record, **changes})
        made.append(folder)
    return [gathered(folder, ranks_per_node) for folder in made]


def wide_run(out: Path, first: RunFolder, ranks: int) -> RunFolder:
    """A large run whose ranks and nodes have the times, spans and samples of those of another one, over and over."""
    record = json.loads(first.record.read_text(encoding="utf-8"))
    own, nodes = record["ranks"], record["watch"]["nodes"]
    plan = _large_plan(ranks, record["steps"], 8, 0, 1)
    folder = create(out, plan)
    for kind in ("steps", "spans"):
        parts = [part for path in sorted(first.path.glob(f"node-*.{kind}")) for part in read_parts(path).values()]
        for rank in range(ranks):
            content = with_header(parts[rank % len(own)], f".{kind}", rank, rank=rank, run_id=plan.run_id)
            with (folder.path / f"node-{rank // 8:04d}.{kind}").open("ab") as file:
                file.write(content)
    clock = nodes[1]["clock"]  # node 0's has no points
    places = [{"node_rank": node, "host": _host(node)} for node in range(plan.layout.nodes)]
    for at in places:
        content = _renamed(first.samples(at["node_rank"] % len(nodes)), run_id=plan.run_id, **at)
        folder.samples(at["node_rank"]).write_bytes(content)
    record["watch"]["nodes"] = [
        {**nodes[node % len(nodes)], **at, "clock": {**clock, **at} if node else clock_line()}
        for node, at in enumerate(places)
    ]
    record["ranks"] = [{**own[rank % len(own)], "rank": rank, **places[rank // 8]} for rank in range(ranks)]
    write_json(folder.record, {**record, "run_id": plan.run_id, "configuration": plan.configuration_digest()})
    return gathered(folder, 8)


def _renamed(path: Path, **changes: Any) -> bytes:
    """A file of rows as that of another run."""
    return b"".join(with_header(part, path.suffix, rank, **changes) for rank, part in sorted(read_parts(path).items()))


def with_header(part: RankRows, suffix: str, rank: int, /, **changes: Any) -> bytes:
    """The rows of a rank with another header, which every block's checksum holds."""
    header, *others = part.blocks
    first = deflated_json({**BlockReader(Path("x"), f"dlbench{suffix}", part=part).header, **changes})
    seed = zlib.crc32(first + header.rows)
    written = block(rank, 0, first, header.rows, 0)
    return written + b"".join(block(rank, n, one.json, one.rows, seed) for n, one in enumerate(others, 1))


def leave_out(rows: Path) -> None:
    """Removes the rows of a rank from its node's file; `rows`: `folder.steps(rank)` or `folder.spans(rank)`."""
    file, rank = file_of(rows), int(rows.name[5:])
    others = sorted(other for other in read_parts(file).items() if other[0] != rank)
    file.write_bytes(b"".join(with_header(part, file.suffix, other) for other, part in others))


def gathered(folder: RunFolder, ranks_per_node: int) -> RunFolder:
    """The same run with the statuses of a node's ranks in one file, as ranks write them."""
    statuses = read_statuses(folder)
    for node in {one.rank // ranks_per_node for one in statuses}:
        own = tuple(one for one in statuses if one.rank // ranks_per_node == node)
        write_node_statuses(folder, NodeStatuses(node=node, ranks=own))
        for one in own:
            folder.status(one.rank).unlink()
    return folder


def _large_plan(ranks: int, steps: int, ranks_per_node: int, repeat: int, repeats: int) -> RunPlan:
    dense = min(ranks, ranks_per_node)
    warmup = max(1, min(20, steps // 10))
    made = plans(
        system="example-gpu",
        points=(ranks,),
        ranks_per_node=dense,
        repeats=repeats,
        series="large",
        overrides={
            "layout.cores_per_rank": 8,
            "system.node.gpus": dense,
            "measure.warmup_steps": warmup,
            "measure.measured_steps": steps - warmup,
        },
    )
    return made[repeat]


def _course(plan: RunPlan, steps: int, rng: np.random.Generator) -> Course:
    ranks, nodes = plan.layout.ranks, plan.layout.nodes
    means = {"input": 4.0, "h2d": 1.0, "forward": 30.0, "backward": 55.0, "exchange": 0.0, "optimizer": 6.0}
    phases = np.stack(
        [means[phase] * MS * rng.lognormal(0.0, 0.02, (ranks, steps)) for phase in PHASES], axis=2
    ) * rng.lognormal(0.0, 0.003, (ranks, 1, 1))
    if ranks > 1:
        phases[slow_rank(ranks), :, 2:4] *= SLOW_FACTOR
    own = phases.sum(axis=2) + 2 * MS * rng.lognormal(0.0, 0.1, (ranks, steps))
    exchange = 3 * MS * np.log2(ranks) * rng.lognormal(0.0, 0.05, steps) if ranks > 1 else np.zeros(steps)
    ends = np.concatenate([[0.0], np.cumsum(own.max(axis=0) + exchange)])
    # Ranks leave an exchange some microseconds apart.
    skew = rng.uniform(0, 40_000, (ranks, steps + 1)) if ranks > 1 else 0.0
    bases = rng.integers(10**12, 10**15, nodes)
    drifts = rng.normal(0.0, 5e-6, nodes)
    drifts[0] = 0.0
    node = np.arange(ranks) // plan.layout.ranks_per_node
    boundaries = bases[node][:, None] + np.rint((ends + skew) * (1 + drifts[node])[:, None]).astype(np.int64)
    whole = np.rint(phases).astype(np.int64)
    if ranks > 1:
        whole[:, :, PHASES.index("exchange")] = np.diff(boundaries, axis=1) - np.rint(own).astype(np.int64)
        assert whole.min() >= 0
    return Course(boundaries=boundaries, phases=whole, true_s=float(ends[-1]) / 1e9, bases=bases, drifts=drifts)


def _write_steps(folder: RunFolder, plan: RunPlan, course: Course, rank: int, rng: np.random.Generator) -> None:
    batch, warmup = plan.workload.train.batch_per_rank, plan.measure.warmup_steps
    starts = course.boundaries[rank, :-1].tolist()
    times = np.diff(course.boundaries[rank]).tolist()
    phases = course.phases[rank].tolist()
    losses = (2.5 * np.exp(-np.arange(len(starts)) / 400) + rng.normal(0, 0.05, len(starts))).tolist()
    header = {"rank": rank, "clock": "monotonic", "device": f"cuda:{rank % 8}", "run_id": plan.run_id}
    with StepWriter(file_of(folder.steps(rank)), header) as writer:
        for step, (start, took, parts, loss) in enumerate(zip(starts, times, phases, losses, strict=True)):
            if step >= warmup and (step - warmup) % COLLECT_EVERY == 0:  # as ranks do when training stands still
                writer.flush()
            writer.append((step, int(step < warmup), start, took, *parts, batch, loss))
    write_status(folder, status(rank, _host(rank // plan.layout.ranks_per_node), "done"))


def _spans(
    plan: RunPlan, course: Course, rank: int, window: range, rng: np.random.Generator
) -> Iterable[dict[str, Any]]:
    begin, end = int(course.boundaries[rank, 0]), int(course.boundaries[rank, -1])
    measured = int(course.boundaries[rank, plan.measure.warmup_steps])
    for name, start, stop in (
        ("starting", begin - 9000 * MS, begin - 6000 * MS),
        ("building", begin - 6000 * MS, begin),
        ("warm-up", begin, measured),
        ("measuring", measured, end),
        ("finishing", end, end + 800 * MS),
    ):
        yield {"lane": STAGE, "name": name, "start_ns": start, "end_ns": stop}
    for step in window:
        at = int(course.boundaries[rank, step])
        part = dict(zip(PHASES, course.phases[rank, step].tolist(), strict=True))
        read = {"start_ns": at, "end_ns": at + part["input"], "step": step, "track": 1}
        yield {"lane": INPUT, "name": "read batch", **read}
        forward = at + part["input"] + part["h2d"]
        backward = forward + part["forward"]
        for begins, took, what in ((forward, part["forward"], "forward"), (backward, part["backward"], "backward")):
            edges = _edges(begins, took, LAYERS, rng)
            names = [f"{what} layer{n:03d}" for n in range(LAYERS)]
            for n, name in enumerate(names if what == "forward" else reversed(names)):
                yield {"lane": COMPUTE, "name": name, "start_ns": edges[n], "end_ns": edges[n + 1], "step": step}
        if plan.layout.ranks > 1:
            yield from _messages(backward, part["backward"], part["exchange"], step)


def _edges(begin: int, took: int, parts: int, rng: np.random.Generator) -> list[int]:
    shares = np.cumsum(rng.lognormal(0.0, 0.5, parts))
    return [begin, *(begin + np.rint(took * shares / shares[-1]).astype(np.int64)).tolist()]


def _messages(backward: int, backward_ns: int, exchange_ns: int, step: int) -> Iterable[dict[str, Any]]:
    """Messages one after the other; the last ends with the exposed exchange."""
    each = (backward_ns + exchange_ns) // (MESSAGES + 1)
    for number in range(MESSAGES):
        ready = backward + backward_ns * (number + 1) // MESSAGES
        end = backward + backward_ns + exchange_ns - each * (MESSAGES - 1 - number)
        start = max(end - each, ready)
        yield {
            "lane": EXCHANGE,
            "name": "flat, 15 gradients",
            "start_ns": start,
            "end_ns": end,
            "step": step,
            "track": number,
            "num_bytes": LARGE_GRADIENTS[number][0],
            "queued_ns": start - ready,
        }


def _host(node: int) -> str:
    return f"n{node}"


def _columns(gpus: int) -> list[str]:
    fields = (
        *("power_w", "energy_j", "sm_clock_hz", "sm_clock_max_hz", "memory_clock_hz", "utilization"),
        *("memory_utilization", "memory_used_bytes", "temperature_c", "clock_reasons"),
        *("pcie_received_bytes_per_s", "pcie_sent_bytes_per_s"),
    )
    host = (
        *(f"host.cpu.{core}.busy" for core in range(16)),
        *(f"host.{name}" for name in ("cpu.frequency_hz", "load_1min", "memory_used_bytes", "page_cache_bytes")),
        "host.net.ib0.received_bytes",
        "host.net.ib0.sent_bytes",
        "host.energy.package-0_j",
    )
    return [*(f"gpu.{gpu}.{name}" for gpu in range(gpus) for name in fields), *host]


def _period_s(plan: RunPlan, course: Course) -> float:
    """A second, or so much longer that all samples fit into the node's share."""
    row_bytes, period_s = 3.0 * len(_columns(plan.layout.ranks_per_node)), 1.0
    while (course.true_s + 20) / period_s * row_bytes > sample_bytes(plan):
        period_s *= 2
    return period_s


def _sample_times(plan: RunPlan, course: Course) -> npt.NDArray[np.float64]:
    """Seconds after the first step's start: from ten seconds before to ten behind the last one's end."""
    return np.arange(-10.0, course.true_s + 10.0, _period_s(plan, course))


def _write_node(folder: RunFolder, plan: RunPlan, course: Course, node: int, rng: np.random.Generator) -> int:
    seconds = _sample_times(plan, course)
    count = len(seconds)
    busy = ((seconds >= 0) & (seconds < course.true_s)).astype(float)
    slow_fields = np.where(np.arange(count) % 10 == 0, 1.0, np.nan)
    per_node = plan.layout.ranks_per_node
    values: list[npt.NDArray[np.float64]] = []
    for gpu in range(per_node):
        is_slow = plan.layout.ranks > 1 and node * per_node + gpu == slow_rank(plan.layout.ranks)
        power = 60 + 320 * busy * rng.lognormal(0, 0.03, count)
        clock = np.where(busy > 0, 1.41e9 / (SLOW_FACTOR if is_slow else 1.0), 0.21e9)
        values += [
            power,
            # A counter that agrees with the power, from anywhere.
            rng.uniform(1e6, 1e8) + np.concatenate([[0.0], np.cumsum((power[1:] + power[:-1]) / 2 * np.diff(seconds))]),
            clock + 15e6 * rng.integers(-1, 2, count),
            np.full(count, 1.41e9) * slow_fields,
            np.full(count, 1.215e9) * slow_fields,
            busy * rng.uniform(0.9, 1.0, count),
            busy * rng.uniform(0.5, 0.7, count),
            2e9 + 30e9 * busy,
            (35 + np.rint(30 * busy * rng.uniform(0.95, 1.05, count))) * slow_fields,
            # Bit 5: software thermal slowdown; bit 0: idle.
            np.where(busy > 0, 0x20 if is_slow else 0, 1).astype(float),
            busy * rng.uniform(1e9, 2e9, count) * slow_fields,
            busy * rng.uniform(1e9, 2e9, count) * slow_fields,
        ]
    values += [0.02 + 0.9 * busy * rng.uniform(0.8, 1.0, count) for _ in range(16)]
    values += [
        (2.45e9 + 1e8 * rng.normal(size=count)) * slow_fields,
        16 * busy,
        2e10 + 3e10 * busy,
        np.full(count, 1e11),
    ]
    period_s = _period_s(plan, course)
    values += [np.cumsum(busy * rng.uniform(5e8, 6e8, count)) * period_s for _ in range(2)]
    values += [np.cumsum(80 + 120 * busy) * period_s]
    times = course.bases[node] + np.rint(seconds * 1e9 * (1 + course.drifts[node])).astype(np.int64)
    late = rng.exponential(2e5, count).astype(np.int64)
    rows = [(t, *row) for t, row in zip((times + late).tolist(), np.stack(values, axis=1).tolist(), strict=True)]
    end = {"num_samples": count, "cpu_s": 0.4, "wall_s": course.true_s + 20}
    return write_samples(
        folder,
        node,
        _columns(per_node),
        rows,
        host=_host(node),
        end=end,
        late_ns=200_000,
        max_bytes=sample_bytes(plan),
        facts={f"gpu.{gpu}.uuid": f"GPU-{node:04d}-{gpu}" for gpu in range(per_node)},
    )


def _clock(course: Course, node: int, rng: np.random.Generator) -> dict[str, Any]:
    points = []
    for true_ns in (-8_000 * MS, round(course.true_s * 1e9) + 5_000 * MS):
        local = int(course.bases[node]) + round(true_ns * (1 + float(course.drifts[node])))
        offset = int(course.bases[0]) + true_ns - local + int(rng.integers(-10_000, 10_001))
        points.append({"local_ns": local, "offset_ns": offset, "bound_ns": 15_000, "num_exchanges": 16})
    wall = 1_772_366_400 * 10**9 - int(course.bases[node])
    return clock_line(node, _host(node), points=points if node else [], wall_offset_ns=wall)


def _record(plan: RunPlan, steps: int, course: Course, watch: dict[str, Any]) -> dict[str, Any]:
    measured = plan.measure.measured_steps
    times = (course.boundaries[:, -1] - course.boundaries[:, plan.measure.warmup_steps]).tolist()
    samples = measured * plan.workload.train.batch_per_rank
    gradients = exchange_result(plan, gradients=LARGE_GRADIENTS, alpha_s=1e-4, beta_s_per_byte=6e-10)
    ranks = [
        {
            "rank": rank,
            "node_rank": rank // plan.layout.ranks_per_node,
            "host": _host(rank // plan.layout.ranks_per_node),
            "device": f"cuda:{rank % plan.layout.ranks_per_node} (NVIDIA A100)",
            "gpu": {
                "uuid": f"GPU-{rank // plan.layout.ranks_per_node:04d}-{rank % plan.layout.ranks_per_node}",
                "visible": plan.layout.ranks_per_node,
            },
            "cores": list(range(8 * (rank % plan.layout.ranks_per_node), 8 * (rank % plan.layout.ranks_per_node) + 8)),
            "threads": 8,
            "pinned": True,
            "samples": samples,
            "measured_s": times[rank] / 1e9,
            "first_loss": 2.5,
            "last_loss": 0.3,
            "losses_finite": True,
            "initial_parameters_sha256": "0" * 64,
            "final_parameters_sha256": "1" * 64,
            "peak_memory_bytes": 30 * 1024**3,
            "startup_s": 9.0,
        }
        for rank in range(plan.layout.ranks)
    ]
    return {
        "run_id": plan.run_id,
        "configuration": plan.configuration_digest(),
        "state": "valid",
        "started": "2026-03-01T12:00:00Z",
        "finished": "2026-03-01T12:10:00Z",
        "clock": "monotonic",
        "phases": plan.measure.phases,
        "num_parameters": 22_500_000,
        "gradient_bytes": 90_000_000,
        "ranks": ranks,
        "checks": [{"name": "finite loss", "passed": True, "detail": "every loss is finite"}],
        "data": {"kind": "synthetic"},
        "environment": {"host": "n0", "python": "3.11.7", "os": "Debian 12"},
        "steps": steps,
        "exchange": gradients if plan.layout.ranks > 1 else None,
        "watch": watch,
    }
