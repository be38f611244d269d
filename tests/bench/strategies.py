"""Ways to share a training out over ranks, where they are measured side by side."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dlbench.projection.strategies.layers import as_counted, counted
from dlbench.records.scan import Run, scan
from dlbench.units import format_bytes
from tests.bench.figures import Figure
from tests.bench.planted import all_ended
from tests.bench.shaped_cluster import lacking, shaped_cluster, submit, wait_for
from tests.support.forked_runs import run_forked

LINK = "100mbit"
EVERY = (4, 16)
"""Updates between two averages; DDP beside them."""
LOCAL_REPEATS = 2
UPDATES, LOOK_EVERY, GLOBAL_BATCH = 96, 12, 16


def sharded_memory() -> Iterator[Figure]:
    """Memory of a rank under FSDP over that under DDP: as the projection has it from the DDP run, and measured."""
    for name in ("bert", "resnet50"):
        found: dict[str, Run] = {}
        with tempfile.TemporaryDirectory() as out:
            for engine in ("ddp", "fsdp"):
                words = ("--preset", "ci", "--ranks", "2", "--repeats", "1", "--engine", engine, "--out", out)
                settings = ("--set", "measure.warmup_steps=6", "--set", "measure.measured_steps=1")
                (found[engine],) = run_forked(name, *words, *settings)
        plan, record = found["ddp"].plan, found["ddp"].record
        assert record is not None
        train, layers = plan.workload.train, plan.workload.model.layer_table(plan.workload.data)
        seen = counted(layers, plan, record)
        assert seen is not None
        alike = {"slots": train.optimizer.slots, "batch": train.batch_per_rank, "ranks": 2}
        predicted = {one: as_counted(layers, seen, one, **alike) for one in ("data", "fsdp")}
        measured = {engine: _most_held(run) for engine, run in found.items()}
        ratio = predicted["fsdp"] / predicted["data"]
        yield Figure(
            name=f"FSDP over DDP, memory of a rank, predicted over measured; {name} ci, 2 ranks",
            value=ratio / (measured["fsdp"] / measured["ddp"]),
            unit="times",
            goal="within 10 %",
            met=abs(ratio * measured["ddp"] / measured["fsdp"] - 1) <= 0.1,
            reason=f"measured {' over '.join(format_bytes(measured[one]) for one in ('fsdp', 'ddp'))}, "
            f"predicted {ratio:.3f}",
        )


def _most_held(run: Run) -> int:
    assert run.record is not None
    return max(rank.held.peak for rank in run.record.ranks if rank.held is not None)


def local_sgd() -> Iterator[Figure]:
    """Time to the same loss over a slow link: DDP against averages, interleaved.

    The loss is that of evaluations, which see the mean of all ranks' parameters; the time is that in training steps.
    """
    goal = "less time to the loss that all reach than DDP"
    name = f"time to the same loss, DDP over averages; bert ci, 2 x 1 ranks, links of {LINK}"
    if reason := lacking():
        yield Figure(name=name, value=None, unit="", goal=goal, reason=reason)
        return
    with shaped_cluster(nodes=2, rate=LINK) as (box, system):
        out, data = system.parent / "runs", system.parent / "text"
        command = [sys.executable, "-m", "dlbench", "data", "make", "text", str(data), "--size-on-disk", "1.4MB"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        submit(box, *_request(data, system), "--out", str(out))
        count = LOCAL_REPEATS * (1 + len(EVERY))
        wait_for(all_ended(out, count), 120.0 * count)
        runs = scan(out).runs
    if bad := [run.detail for run in runs if run.state != "valid"]:
        yield Figure(name=name, value=None, unit="", goal=goal, reason=bad[0])
        return
    sides = {every: [run for run in runs if run.plan.sync.average_every == every] for every in (None, *EVERY)}
    # The loss that each has come to, the worst of them: every run reaches it.
    target = max(_curve(run)[-1][1] for run in runs)
    for every in EVERY:
        pairs = zip(sides[None], sides[every], strict=True)
        ratios = sorted(_time_to(ddp, target) / _time_to(own, target) for ddp, own in pairs)
        said = "; ".join(_words(run, target) for run in (*sides[None], *sides[every]))
        yield Figure(
            name=name.replace("averages", f"averages every {every} updates"),
            value=sum(ratios) / len(ratios),
            low=ratios[0],
            high=ratios[-1],
            n=len(ratios),
            unit="times (range over pairs of repeats)",
            goal=goal,
            met=ratios[0] > 1,
            reason=f"to loss {target:.3f}: {said}",
        )


def _request(data: Path, system: Path) -> Iterator[str]:
    yield from ("submit", "bert", "--preset", "ci", "--system", str(system), "--nodes", "2", "--ranks-per-node", "1")
    yield from ("--engine", "ddp", "--data", str(data), "--to-accuracy", "--repeats", str(LOCAL_REPEATS))
    yield from ("--sweep", f"sync.average_every=null,{','.join(map(str, EVERY))}")
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


def _words(run: Run, target: float) -> str:
    assert run.record is not None
    assert run.record.exchange is not None
    every, sent = run.plan.sync.average_every, run.record.exchange.bytes_across or 0.0
    per_sample = sent / run.plan.workload.train.batch_per_rank / 1e3
    return (
        f"{'DDP' if every is None else f'every {every}'} {_time_to(run, target):.1f} s, {per_sample:.1f} kB a sample, "
        f"loss {_curve(run)[-1][1]:.3f} after {UPDATES * GLOBAL_BATCH} samples"
    )


def _curve(run: Run) -> list[tuple[float, float]]:
    """Seconds in training steps and loss, at each evaluation."""
    assert run.record is not None
    assert run.record.quality is not None
    return [(each.train_s, each.loss or 0.0) for each in run.record.quality.evaluations]


def _time_to(run: Run, target: float) -> float:
    """Seconds in training steps until the loss is that low, linear between evaluations."""
    curve = _curve(run)
    at = next(number for number, (_, loss) in enumerate(curve) if loss <= target)
    (begin, high), (end, low) = curve[max(at - 1, 0)], curve[at]
    return end if at == 0 else begin + (high - target) / (high - low) * (end - begin)
