"""Collectives on a shaped cluster against their cost model, and dlbench's ring against the libraries' own.

Layouts of 2 x 2, 2 x 3, 2 x 4 and 4 x 2 ranks, links of 200 Mbit/s between nodes. What is predicted for a size and a
rank count comes from a fit to other sizes and other rank counts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlbench.jobs.box.box import Box
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.link_fit import Observation, choose_sharing, fit_network
from dlbench.perfmodels.patterns import Sharing
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout
from dlbench.records.comm import CommRun, scan_comm
from dlbench.specs.comm import IN_PLACE, LIBRARY
from tests.bench.figures import FOLDER, Figure, median_interval
from tests.bench.shaped_cluster import (
    OPEN_MPI_AS_ROOT,
    RATE,
    RATE_BYTES_PER_S,
    lacking,
    shaped_cluster,
    submit,
    wait_for,
)

LAYOUTS = ((2, 2), (2, 3), (2, 4), (4, 2))
"""Nodes and ranks per node."""
FIT_SIZES = "1MiB,2MiB,4MiB"
LARGE_SIZES = "20MB,50MB,100MB"
REPEATS = 3


def figures() -> Iterator[Figure]:
    """All figures of the collectives."""
    yield from _shaped()
    yield from ring()


def _shaped() -> Iterator[Figure]:
    about = f"nodes linked at {RATE}"
    reason = lacking()
    if reason:
        yield Figure(name=f"collectives, {about}", value=None, unit="", goal="measured", reason=reason)
        return
    with shaped_cluster() as (box, system):
        out = _kept()
        common = ("comm", "submit", "--system", str(system), "--out", str(out), "--backends", "none")
        for nodes, ranks in LAYOUTS:
            submit(
                box,
                *common,
                *("--algorithms", "all", "--sizes", FIT_SIZES, "--iterations", "3", "--warmup", "1"),
                *("--nodes", str(nodes), "--ranks-per-node", str(ranks), "--series", f"fit-{nodes}x{ranks}"),
            )
            _await(box, out)
        submit(
            box,
            *common,
            *("--algorithms", "ring,hierarchical", "--sizes", LARGE_SIZES, "--iterations", "2", "--warmup", "1"),
            *("--nodes", "2", "--ranks-per-node", "4", "--repeats", str(REPEATS), "--series", "large"),
        )
        _await(box, out)
        runs = [run for run in scan_comm(out).runs if run.record is not None]
    fit = [run for run in runs if run.plan.series.id.startswith("fit-")]
    large = [run for run in runs if run.plan.series.id == "large"]
    yield from _accuracy(fit)
    yield from _hierarchical_gain(fit, large)


def _kept() -> Path:
    """A new folder for the raw runs; those of the last time go."""
    out = FOLDER / "collectives"
    shutil.rmtree(out, ignore_errors=True)
    return out


def _await(box: Box, out: Path) -> None:
    def is_done() -> bool:
        runs = scan_comm(out).runs
        return bool(runs) and all(run.state != "incomplete" for run in runs)

    wait_for(is_done, 1500)
    failed = [run.detail for run in scan_comm(out).runs if run.state != "valid"]
    if failed:
        raise RuntimeError(failed[0])


def _layout(run: CommRun) -> Layout:
    return Layout(ranks=run.plan.layout.ranks, group_size=run.plan.group_size)


def _observations(runs: Sequence[CommRun]) -> list[Observation]:
    return [
        Observation(
            collective=point.collective,
            algorithm=point.algorithm,
            layout=_layout(run),
            num_bytes=point.num_bytes,
            element_bytes=4,
            shards=run.plan.comm.shards,
            seconds=float(np.median(point.times_s)),
        )
        for run in runs
        if run.record is not None
        for point in run.record.points
        if point.times_s
    ]


def _accuracy(runs: Sequence[CommRun]) -> Iterator[Figure]:
    sharing, pairs = choose_sharing(_observations(runs))
    errors = np.array([abs(predicted / seen.seconds - 1) for seen, predicted in pairs])
    value, low, high = median_interval(errors.tolist())
    yield Figure(
        name=f"|predicted / measured - 1|, all algorithms, sizes of 1 MiB and more, links at {RATE}",
        value=value,
        low=low,
        high=high,
        n=len(errors),
        unit="median; fit from other sizes and rank counts",
        reason=f"in the model ranks of a node share {_shared(sharing)}",
        goal="at most 0.1",
        met=value <= 0.1,
    )
    for name in sorted({seen.algorithm for seen, _ in pairs}):
        own = [abs(p / seen.seconds - 1) for seen, p in pairs if seen.algorithm == name]
        median = float(np.median(own))
        yield Figure(
            name=f"the same, {name}", value=median, n=len(own), unit="median", goal="at most 0.1", met=median <= 0.1
        )


def _shared(sharing: Sharing) -> str:
    names = ["the link"] * (sharing.across is not None) + ["processors or memory"] * (sharing.inside is not None)
    return " and ".join(names) or "nothing"


def _hierarchical_gain(fit: Sequence[CommRun], large: Sequence[CommRun]) -> Iterator[Figure]:
    observations = _observations(fit)
    sharing, _ = choose_sharing(observations)
    network = fit_network(
        observations, system="shaped-box", transport="torch-gloo", sources=(), fitted="", sharing=sharing
    )
    layout = _layout(large[0])
    times: dict[tuple[str, int], list[float]] = {}
    for run in large:
        for point in run.record.points if run.record else ():
            times.setdefault((point.algorithm, point.num_bytes), []).append(float(np.median(point.times_s)))
    for size in sorted({size for _, size in times}):
        gains = [flat / two for flat, two in zip(times["ring", size], times["hierarchical", size], strict=True)]
        expected = predict("allreduce", "ring", size, layout, network) / predict(
            "allreduce", "hierarchical", size, layout, network
        )
        value, low, high = median_interval(gains)
        yield Figure(
            name=f"hierarchical over flat ring, 2 x 4 ranks, links at {RATE}, {size / 1e6:.0f} MB",
            value=value,
            low=low,
            high=high,
            n=len(gains),
            unit="ratio of rates",
            goal=f"at least 90 % of the predicted {expected:.3f}",
            met=value >= 0.9 * expected,
        )
        yield from _rates(size, layout, {name: seconds for (name, n), seconds in times.items() if n == size})


def _rates(size: int, layout: Layout, times: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    """What of the link each algorithm fills: the bytes that one node sends, over time and rate of the link."""
    for name, seconds in times.items():
        across = sum(c.bytes_across for c in counts("allreduce", name, layout, size // 4, 4))
        sent = across / layout.num_groups
        value, low, high = median_interval([sent / one / RATE_BYTES_PER_S for one in seconds])
        yield Figure(
            name=f"rate between nodes, {name}, {size / 1e6:.0f} MB",
            value=value,
            low=low,
            high=high,
            n=len(seconds),
            unit=f"of {RATE}",
            goal="at least 0.85",
            met=value >= 0.85,
        )


RING_SIZES = "64KiB,1MiB"  # Of 16 MiB and more both are as fast as memory.
RING_REPEATS, RING_GOAL = 7, 0.9


def ring() -> Iterator[Figure]:
    """Our ring over the library's own all-reduce, both in place over the same transport, same ranks, in turns."""
    for transport, launcher, library, theirs in (
        ("torch", "local", "gloo", LIBRARY),
        ("mpi", "mpirun", "mpi", IN_PLACE),
    ):
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "dlbench", "comm", "run", "--ranks", "2", "--algorithms", "ring"]
            command += ["--backends", library, "--transport", transport, "--launcher", launcher, "--no-progress"]
            command += ["--sizes", RING_SIZES, "--iterations", "15", "--repeats", str(RING_REPEATS), "--out", temporary]
            environment = {**os.environ, **OPEN_MPI_AS_ROOT}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            about: dict[str, Any] = {
                "name": f"our ring over {library}'s all-reduce, 2 ranks on one machine, transport {transport}",
                "unit": "ratio of rates",
                "goal": f"at least {RING_GOAL}",
            }
            if done.returncode != 0:
                yield Figure(**about, value=None, reason=done.stderr.strip().splitlines()[-1])
                continue
            ratios: dict[int, list[float]] = {}
            for run in scan_comm(Path(temporary)).runs:
                points = run.record.points if run.record else ()
                median = {(p.algorithm, p.num_bytes): float(np.median(p.times_s)) for p in points if p.times_s}
                for size in sorted({p.num_bytes for p in points}):
                    ratios.setdefault(size, []).append(median[theirs, size] / median["ring", size])
            for size, values in ratios.items():
                value, low, high = median_interval(values)
                met = True if low >= RING_GOAL else False if high < RING_GOAL else None
                sized = {**about, "name": f"{about['name']}, {size // 1024} KiB"}
                yield Figure(**sized, value=value, low=low, high=high, n=len(values), met=met)
