"""Gradient exchange in training: merged messages on slow links, and two ranks of one machine by every way there is.

Runs are those of a user (`dlbench run`, `dlbench submit`), in turns, so that drift falls on all alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.shaped_cluster import OPEN_MPI_AS_ROOT, RATE, lacking, shaped_cluster, submit, wait_for
from dlbench.analysis.measures import measure
from dlbench.records.scan import Run, scan

REPEATS = 5
FUSIONS = ("own:none", "own:single", "own:mgwfbp")

WAYS: Mapping[str, tuple[str, ...]] = {
    "1 rank": ("--ranks", "1", "--engine", "single"),
    "Horovod, Gloo": ("--ranks", "2", "--engine", "horovod"),
    "Horovod, MPI": ("--ranks", "2", "--engine", "horovod", "--launcher", "mpirun"),
    "DDP": ("--ranks", "2", "--engine", "ddp"),
    "dlbench, Gloo": ("--ranks", "2", "--engine", "ddp", "--set", "sync.fusion=own:25MiB"),
}
PLAIN = ("Horovod, Gloo", "Horovod, MPI", "DDP")


def figures() -> Iterator[Figure]:
    """All figures of the exchange in training."""
    yield from _merged()
    yield from _two_ranks()


def _merged() -> Iterator[Figure]:
    name = f"training with mgwfbp over the better of none and single, CosmoFlow ci, 2 x 2 ranks, links at {RATE}"
    about = {"name": name, "unit": "ratio of throughputs", "goal": "at least 1"}
    if reason := lacking():
        yield Figure(**about, value=None, reason=reason)
        return
    with shaped_cluster(nodes=2) as (box, system):
        out = system.parent / "runs"
        submit(
            box,
            *("submit", "cosmoflow", "--preset", "ci", "--system", str(system), "--nodes", "2"),
            *("--ranks-per-node", "2", "--engine", "ddp", "--data", "synthetic", "--repeats", str(REPEATS)),
            *("--sweep", f"sync.fusion={','.join(FUSIONS)}", "--set", "sync.exchange=hierarchical"),
            *("--set", "measure.warmup_steps=6", "--set", "measure.measured_steps=15", "--out", str(out)),
        )
        count = REPEATS * len(FUSIONS)

        def is_done() -> bool:
            runs = scan(out).runs
            return len(runs) == count and all(run.state != "incomplete" for run in runs)

        wait_for(is_done, 1800)
        rates = _rates(scan(out).runs, lambda run: str(run.plan.series.axes["sync.fusion"]))
    rivals = [max(pair) for pair in zip(rates["own:none"], rates["own:single"], strict=True)]
    yield _ratio(about, [own / best for own, best in zip(rates["own:mgwfbp"], rivals, strict=True)], 1.0)
    for other in FUSIONS[:2]:
        shares = [own / value for own, value in zip(rates["own:mgwfbp"], rates[other], strict=True)]
        yield Figure.of(shares, name=f"mgwfbp over {other}", unit="ratio", goal="measured")


def _ratio(about: dict[str, str], values: Sequence[float], goal: float) -> Figure:
    return Figure.of(
        values,
        name=about["name"],
        unit=about["unit"],
        goal=about["goal"],
        met=lambda one: one.value >= goal,
    )


def _rates(runs: Sequence[Run], way: Callable[[Run], str]) -> dict[str, list[float]]:
    """Samples a second by way and repeat.

    Raises:
        RuntimeError: a run has no figure; with its story.
    """
    found: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.plan.series.repeat):
        if run.state != "valid":
            raise RuntimeError(run.detail)
        found.setdefault(way(run), []).append(measure(run).throughput)
    return found


def _two_ranks() -> Iterator[Figure]:
    """ResNet-50, `ci`, one core per rank: every way by turns, and back again in the next repeat."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "runs"
        lost: dict[str, str] = {}
        for repeat in range(REPEATS):
            for number in range(len(WAYS)) if repeat % 2 == 0 else reversed(range(len(WAYS))):
                name = list(WAYS)[number]
                if name in lost:
                    continue
                problem = _train(out, f"way{number}-{repeat}", WAYS[name])
                if problem:
                    lost[name] = problem
        rates: dict[str, list[float]] = {}
        parts: dict[str, list[dict[str, float]]] = {}
        for run in scan(out).runs:
            number, _ = run.plan.series.id.removeprefix("way").split("-")
            if run.state == "valid":
                measured = measure(run)
                rates.setdefault(list(WAYS)[int(number)], []).append(measured.throughput)
                parts.setdefault(list(WAYS)[int(number)], []).append(measured.parts)
    for name, why in lost.items():
        yield Figure(name=f"two ranks: {name}", value=None, unit="images/s", goal="measured", reason=why)
    yield from _efficiencies(rates, parts)
    plain = [name for name in PLAIN if name in rates]
    own = "dlbench, Gloo"
    best = [max(values) for values in zip(*(rates[name] for name in plain), strict=True)]
    about = {
        "name": f"ResNet-50 ci, 2 ranks: {own} over the best of {', '.join(plain)}",
        "unit": "ratio of throughputs",
        "goal": "at least 1",
    }
    yield _ratio(about, [a / b for a, b in zip(rates[own], best, strict=True)], 1.0)
    for name in plain:
        values = [a / b for a, b in zip(rates[own], rates[name], strict=True)]
        yield Figure.of(values, name=f"{own} over {name}", unit="ratio", goal="measured")


def _train(out: Path, series: str, way: Sequence[str]) -> str:
    """Why it failed; empty if it did not."""
    command = [sys.executable, "-m", "dlbench", "run", "resnet50", "--preset", "ci", "--data", "synthetic"]
    command += ["--set", "layout.cores_per_rank=1", "--set", "measure.measured_steps=12", "--no-progress"]
    command += ["--set", "measure.warmup_steps=6", "--series", series, "--out", str(out), *way]
    done = subprocess.run(command, env={**os.environ, **OPEN_MPI_AS_ROOT}, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def _efficiencies(
    rates: Mapping[str, Sequence[float]], parts: Mapping[str, Sequence[Mapping[str, float]]]
) -> Iterator[Figure]:
    base = rates["1 rank"]
    for name, values in rates.items():
        if name == "1 rank":
            continue
        yield Figure.of(
            [v / (2 * b) for v, b in zip(values, base, strict=True)],
            name=f"scaling efficiency of 2 ranks over 1, ResNet-50 ci, one core per rank: {name}",
            unit="",
            goal="measured",
            reason=_lost_to(parts[name], parts["1 rank"]),
        )


def _lost_to(own: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]) -> str:
    """What a step of two ranks takes longer than one of one rank, part by part, in shares of the longer step."""
    step = sum(sum(run.values()) for run in own) / len(own)
    shares = {
        part: (sum(run[part] for run in own) / len(own) - sum(run[part] for run in base) / len(base)) / step
        for part in own[0]
    }
    told = sorted(shares.items(), key=lambda item: -item[1])
    return "lost to " + ", ".join(f"{part} {share:.1%}" for part, share in told if abs(share) >= 0.005)
