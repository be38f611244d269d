"""Faults of a known size, planted in real runs: is each found and named, and is its share the planted one?"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.shaped_cluster import RATE, RATE_BYTES_PER_S, lacking, shaped_cluster, submit, wait_for
from dlbench.analysis.causes import CAUSES, Causes, causes_of
from dlbench.records.scan import Run, scan

REPEATS = 5
GOAL = "within 0.9 and 1.1"

FAULTS: dict[str, tuple[str, str, int | None, tuple[str, ...]]] = {
    # What is planted: the cause that must hold it, in what a rank is late, which rank, and the settings.
    "rank 1 slowed by 1.5": ("straggler", "compute", 1, ("fault.compute_factor=1.5", "fault.ranks=1")),
    "a reader 120 ms slow on all ranks": ("input", "", None, ("fault.input_delay_s=0.12",)),
    "a reader 150 ms slow on rank 0": ("straggler", "input", 0, ("fault.input_delay_s=0.15", "fault.ranks=0")),
    "hosts 100 ms slow between steps": ("host", "", None, ("fault.step_delay_s=0.1",)),
}
"""Each well above the scatter of a step on a machine of two cores: what is smaller, more repeats would show."""


def figures() -> Iterator[Figure]:
    """Found share over planted share of every fault."""
    yield from _in_processes()
    yield _shaped_link()


def _in_processes() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "runs"
        kinds: list[tuple[str, ...]] = [(), *(settings for *_, settings in FAULTS.values())]
        for repeat in range(REPEATS):
            for number in range(len(kinds)) if repeat % 2 == 0 else reversed(range(len(kinds))):
                _train(out, f"kind{number}-{repeat}", kinds[number])
        found: dict[int, list[Run]] = {}
        for run in sorted(scan(out).runs, key=lambda run: run.plan.series.id):
            found.setdefault(int(run.plan.series.id.removeprefix("kind").split("-")[0]), []).append(run)
        for number, name in enumerate(FAULTS, start=1):
            yield _share(name, found[0], found[number])


def _share(name: str, plain: Sequence[Run], faulty: Sequence[Run]) -> Figure:
    cause, late_by, rank, _ = FAULTS[name]
    about = {
        "name": f"found over planted: {name}; ResNet-50 ci, 2 ranks, ddp, sync.fusion=own:single",
        "unit": "ratio of shares",
        "goal": f"{GOAL}, and named in every run",
    }
    for run in (*plain, *faulty):
        if run.state != "valid":
            return Figure(**about, value=None, reason=run.detail)
    before, after = [causes_of(run) for run in plain], [causes_of(run) for run in faulty]
    # A rank that is late in every step is waited for as long as it is late: the scatter of healthy ranks, of which now
    # the one and now the other is last, is no part of that. What input and host take in healthy runs comes on top.
    usual = 0.0 if cause == "straggler" else statistics.median(one.seconds[cause] for one in before)
    ratios = [
        (one.seconds[cause] - usual) / _planted_s(run, one) for run, one in zip(faulty, after, strict=True)
    ]  # fmt: skip
    named, reason = _named(cause, late_by, rank, before, after)
    return Figure.of(ratios, **about, met=lambda one: 0.9 <= one.value <= 1.1 and named, reason=reason)


def _named(
    cause: str, late_by: str, rank: int | None, before: Sequence[Causes], after: Sequence[Causes]
) -> tuple[bool, str]:
    """Whether the right cause grew most against healthy runs (medians) and the right rank was named, and in words."""

    def grown(key: str) -> float:
        return statistics.median(one.seconds[key] for one in after) - statistics.median(
            one.seconds[key] for one in before
        )

    largest = max(CAUSES, key=grown)
    text = f"largest growth: {largest}{'' if largest == cause else f', NOT {cause}'}"
    if rank is None:
        return largest == cause, text
    right = 0
    for one in after:
        first = one.waiting.ranks[0]
        right += first.rank == rank and max(first.late_ns, key=lambda key: first.late_ns[key]) == late_by
    text += f"; rank {rank} named, late by {late_by}, in {right} of {len(after)} runs"
    return largest == cause and right == len(after), text


def _planted_s(run: Run, causes: Causes) -> float:
    """What the fault really slept, seconds per step, on the ranks that it slowed."""
    assert run.record is not None
    return max(rank.planted_s for rank in run.record.ranks) / causes.steps


def _train(out: Path, series: str, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "dlbench", "run", "resnet50", "--preset", "ci", "--data", "synthetic"]
    command += ["--engine", "ddp", "--ranks", "2", "--set", "layout.cores_per_rank=1", "--no-progress"]
    command += ["--set", "measure.measured_steps=15", "--series", series, "--out", str(out)]
    # One message after the backward pass. Messages that overlap with it wait on the ranks that are in time, and take
    # from the late rank's core when it comes: it is then later than was planted, by as much as they take.
    command += ["--set", "sync.fusion=own:single"]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)


def _shaped_link() -> Figure:
    """A network that is slow: what the wire takes by its rate, beside what attribution calls exchange."""
    about = {
        "name": f"found over planted: links of {RATE}; CosmoFlow ci, 2 x 1 ranks, ddp, sync.fusion=own:single",
        "unit": "ratio",
        "goal": GOAL,
    }
    if reason := lacking():
        return Figure(**about, value=None, reason=reason)
    with shaped_cluster(nodes=2) as (box, system):
        out = system.parent / "runs"
        submit(
            box,
            *("submit", "cosmoflow", "--preset", "ci", "--system", str(system), "--nodes", "2"),
            *("--ranks-per-node", "1", "--engine", "ddp", "--data", "synthetic", "--repeats", str(REPEATS)),
            # One message after the backward pass: nothing of it is hidden, so that its whole time is planted.
            *("--set", "sync.fusion=own:single", "--set", "measure.measured_steps=15", "--out", str(out)),
        )
        wait_for(all_ended(out, REPEATS), 1200)
        runs = scan(out).runs
        ratios = []
        for run in runs:
            if run.state != "valid" or run.record is None:
                return Figure(**about, value=None, reason=run.detail)
            # An all-reduce of two ranks sends the whole vector through each link, both ways at once.
            wire_s = run.record.gradient_bytes / RATE_BYTES_PER_S
            ratios.append(causes_of(run).seconds["exchange"] / wire_s)
    return Figure.of(
        ratios,
        **about,
        met=lambda one: 0.9 <= one.value <= 1.1,
        reason="planted: gradient bytes over the link's rate, headers of packets not counted",
    )


def all_ended(out: Path, count: int) -> Callable[[], bool]:
    """Tells whether so many runs are there, none of them running any more."""

    def is_done() -> bool:
        runs = scan(out).runs
        return len(runs) == count and all(run.state != "incomplete" for run in runs)

    return is_done
