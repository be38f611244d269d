"""Faults of a known size, planted in real runs: is each found and named, and is its share the planted one?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dlbench.analysis.causes import Causes, causes_of
from dlbench.records.scan import Run, scan
from tests.bench.figures import Figure, median_interval
from tests.bench.shaped_cluster import RATE, RATE_BYTES_PER_S, lacking, shaped_cluster, submit, wait_for

REPEATS = 5
GOAL = "within 0.9 and 1.1"

FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    # What is planted: the cause that must hold it, and the settings.
    "rank 1 slowed by 1.3": ("straggler", ("fault.compute_factor=1.3", "fault.ranks=1")),
    "a reader 40 ms slow on all ranks": ("input", ("fault.input_delay_s=0.04",)),
    "a reader 60 ms slow on rank 0": ("straggler", ("fault.input_delay_s=0.06", "fault.ranks=0")),
    "a host 30 ms slow between steps": ("host", ("fault.step_delay_s=0.03",)),
}


def figures() -> Iterator[Figure]:
    """Found share over planted share of every fault."""
    yield from _in_processes()
    yield _shaped_link()


def _in_processes() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "runs"
        kinds: list[tuple[str, ...]] = [(), *(settings for _, settings in FAULTS.values())]
        for repeat in range(REPEATS):
            for number in range(len(kinds)) if repeat % 2 == 0 else reversed(range(len(kinds))):
                _train(out, f"kind{number}-{repeat}", kinds[number])
        found: dict[int, list[Run]] = {}
        for run in sorted(scan(out).runs, key=lambda run: run.plan.series.id):
            found.setdefault(int(run.plan.series.id.removeprefix("kind").split("-")[0]), []).append(run)
        for number, (name, (cause, _)) in enumerate(FAULTS.items(), start=1):
            yield _share(name, cause, found[0], found[number])


def _share(name: str, cause: str, plain: Sequence[Run], faulty: Sequence[Run]) -> Figure:
    about = {"name": f"found over planted: {name}", "unit": "ratio of shares", "goal": GOAL}
    ratios, largest = [], []
    for one, other in zip(plain, faulty, strict=True):
        if one.state != "valid" or other.state != "valid":
            return Figure(**about, value=None, reason=one.story or other.story)
        before, after = causes_of(one), causes_of(other)
        planted = _planted_s(other, after)
        ratios.append((after.seconds[cause] - before.seconds[cause]) / planted)
        grown = {key: after.seconds[key] - before.seconds[key] for key in after.seconds}
        largest.append(max(grown, key=lambda key: grown[key]))
    value, low, high = median_interval(ratios)
    named = sum(key == cause for key in largest)
    return Figure(
        **about, value=value, low=low, high=high, n=len(ratios), met=0.9 <= value <= 1.1,
        reason=f"named {cause} in {named} of {len(ratios)} runs",
    )  # fmt: skip


def _planted_s(run: Run, causes: Causes) -> float:
    """What the fault really slept, seconds a step, on the ranks that it slowed."""
    assert run.record is not None
    return max(rank.planted_s for rank in run.record.ranks) / causes.steps


def _train(out: Path, series: str, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "dlbench", "run", "resnet50", "--preset", "ci", "--data", "synthetic"]
    command += ["--engine", "ddp", "--ranks", "2", "--set", "layout.cores_per_rank=1", "--no-progress"]
    command += ["--set", "measure.measured_steps=20", "--series", series, "--out", str(out)]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)


def _shaped_link() -> Figure:
    """A network that is slow: what the wire takes by its rate, beside what attribution calls exchange."""
    about = {"name": f"found over planted: links of {RATE}, CosmoFlow ci, 2 x 1 ranks", "unit": "ratio", "goal": GOAL}
    if reason := lacking():
        return Figure(**about, value=None, reason=reason)
    with shaped_cluster(nodes=2) as (box, system):
        out = system.parent / "runs"
        submit(
            box,
            *("submit", "cosmoflow", "--preset", "ci", "--system", str(system), "--nodes", "2"),
            *("--ranks-per-node", "1", "--engine", "ddp", "--data", "synthetic", "--repeats", str(REPEATS)),
            # One message after the backward pass: nothing of it is hidden, so that its whole time is planted.
            *("--set", "sync.fusion=single", "--set", "measure.measured_steps=15", "--out", str(out)),
        )
        wait_for(_all_ended(out, REPEATS), 1200)
        runs = scan(out).runs
        ratios = []
        for run in runs:
            if run.state != "valid" or run.record is None:
                return Figure(**about, value=None, reason=run.story)
            # An all-reduce of two ranks sends the whole vector through each link, both ways at once.
            wire_s = run.record.gradient_bytes / RATE_BYTES_PER_S
            ratios.append(causes_of(run).seconds["exchange"] / wire_s)
    value, low, high = median_interval(ratios)
    return Figure(
        **about, value=value, low=low, high=high, n=len(ratios), met=0.9 <= value <= 1.1,
        reason="planted: gradient bytes over the link's rate, headers of packets not counted",
    )  # fmt: skip


def _all_ended(out: Path, count: int) -> Callable[[], bool]:
    def is_done() -> bool:
        runs = scan(out).runs
        return len(runs) == count and all(run.state != "incomplete" for run in runs)

    return is_done
