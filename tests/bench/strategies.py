"""Ways to share a training out over ranks, where they are measured side by side."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlbench.records.scan import Run, scan
from tests.bench.figures import Figure
from tests.bench.planted import all_ended
from tests.bench.shaped_cluster import lacking, shaped_cluster, submit, wait_for

LINK = "100mbit"
EVERY = (None, 4, 16)
"""Updates between two averages; None: DDP."""
LOCAL_REPEATS = 2
UPDATES, LOOK_EVERY, GLOBAL_BATCH = 96, 12, 16


def local_sgd() -> Iterator[Figure]:
    """Time to the same loss over a slow link: DDP against averages, interleaved.

    The loss is that of evaluations, which see the mean of all ranks' parameters; the time is that in training steps.
    """
    about = f"bert ci, 2 x 1 ranks, links of {LINK}"
    goal = "less time to the loss that all reach than DDP"
    if reason := lacking():
        yield Figure(name=about, value=None, unit="", goal=goal, reason=reason)
        return
    with shaped_cluster(nodes=2, rate=LINK) as (box, system):
        out, data = system.parent / "runs", system.parent / "text"
        command = [sys.executable, "-m", "dlbench", "data", "make", "text", str(data), "--size-on-disk", "1.4MB"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        submit(box, *_request(data, system), "--out", str(out))
        count = LOCAL_REPEATS * len(EVERY)
        wait_for(all_ended(out, count), 120.0 * count)
        runs = scan(out).runs
        if bad := [run.detail for run in runs if run.state != "valid"]:
            yield Figure(name=about, value=None, unit="", goal=goal, reason=bad[0])
            return
        by_every = {every: [run for run in runs if run.plan.sync.average_every == every] for every in EVERY}
        yield from _compared(by_every, about, goal)


def _request(data: Path, system: Path) -> Iterator[str]:
    yield from ("submit", "bert", "--preset", "ci", "--system", str(system), "--nodes", "2", "--ranks-per-node", "1")
    yield from ("--engine", "ddp", "--data", str(data), "--to-accuracy", "--repeats", str(LOCAL_REPEATS))
    yield from ("--sweep", f"sync.average_every={','.join('null' if n is None else str(n) for n in EVERY)}")
    settings = {
        "layout.cores_per_rank": 1,
        # Parameters alone, so that bytes are 1 / H of those of gradients.
        "sync.average_momentum": "false",
        "train.schedule.warmup_steps": 10,
        "quality.target": 1.0,
        "quality.max_samples": UPDATES * GLOBAL_BATCH,
        "quality.evaluate_every_samples": LOOK_EVERY * GLOBAL_BATCH,
        "quality.evaluate_samples": 128,
    }
    yield from (word for key, value in settings.items() for word in ("--set", f"{key}={value}"))


def _compared(by_every: dict[int | None, list[Run]], about: str, goal: str) -> Iterator[Figure]:
    losses = {every: [_curve(run)[-1][1] for run in runs] for every, runs in by_every.items()}
    # The loss that each has come to, the worst of them: every run reaches it.
    target = max(loss for found in losses.values() for loss in found)
    times = {every: [_time_to(run, target) for run in runs] for every, runs in by_every.items()}
    for every in EVERY[1:]:
        ratios = sorted(ddp / own for ddp, own in zip(times[None], times[every], strict=True))
        yield Figure(
            name=f"time to the same loss, DDP over averages every {every} updates; {about}",
            value=sum(ratios) / len(ratios),
            low=ratios[0],
            high=ratios[-1],
            n=len(ratios),
            unit="times (range over pairs of repeats)",
            goal=goal,
            met=ratios[0] > 1,
            reason="; ".join(_words(one, times, losses, by_every) for one in (None, every)) + f"; to loss {target:.3f}",
        )


def _words(
    every: int | None,
    times: dict[int | None, list[float]],
    losses: dict[int | None, list[float]],
    by_every: dict[int | None, list[Run]],
) -> str:
    sent = [_bytes_per_sample(run) for run in by_every[every]]
    took = ", ".join(f"{seconds:.1f} s" for seconds in times[every])
    ends = ", ".join(f"{loss:.3f}" for loss in losses[every])
    name = "DDP" if every is None else f"every {every}"
    return f"{name}: {took}, loss {ends} after {UPDATES * GLOBAL_BATCH} samples, {sent[0] / 1e3:.1f} kB a sample sent"


def _curve(run: Run) -> Sequence[tuple[float, float]]:
    """Seconds in training steps and loss, at each evaluation."""
    assert run.record is not None
    assert run.record.quality is not None
    return [(each.train_s, each.loss or 0.0) for each in run.record.quality.evaluations]


def _time_to(run: Run, target: float) -> float:
    """Seconds in training steps until the loss is that low, linear between evaluations."""
    before = (0.0, float("inf"))
    for now in _curve(run):
        if now[1] <= target:
            share = (before[1] - target) / (before[1] - now[1]) if before[1] < float("inf") else 1.0
            return before[0] + share * (now[0] - before[0])
        before = now
    raise RuntimeError(f"{run.plan.run_id} does not reach a loss of {target}")


def _bytes_per_sample(run: Run) -> float:
    """That a rank sends to the other node."""
    assert run.record is not None
    assert run.record.exchange is not None
    return (run.record.exchange.bytes_across or 0.0) / run.plan.workload.train.batch_per_rank
