"""Collectives on a shaped cluster against their cost model, and dlbench's ring against the libraries' own.

Layouts of 2 x 2, 2 x 3, 2 x 4 and 4 x 2 ranks, links of 200 Mbit/s between nodes. What is predicted for a size and a
rank count comes from a fit to other sizes and other rank counts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.figures import FOLDER, Figure, median_interval, share_interval
from benchmarks.shaped_cluster import RATE, RATE_BYTES_PER_S, lacking, shaped_cluster, submit, wait_for
from dlbench.comm.fits import Scope, fit_of
from dlbench.comm.predictions import PredictionRequest, predict_all
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.link_fit import Observation, choose_sharing, fit_network
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout
from dlbench.perfmodels.topology import Sharing
from dlbench.records.comm import CommRun, scan_comm
from tests.slurm_box.box import Box

LAYOUTS = ((2, 2), (2, 3), (2, 4), (4, 2))
"""Nodes and ranks per node."""
FIT_SIZES = "1MiB,2MiB,4MiB"
LARGE_SIZES = "20MB,50MB,100MB"
REPEATS = 3
BARE_BYTES, BARE_FLOWS = 20_000_000, 4  # As hierarchical of 20 MB on 2 x 4 ranks sends from node to node.
BARE = """
import socket, sys, threading, time
host, port, is_client, count = sys.argv[1], 47100 + int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
if is_client:
    while True:
        try:
            end = socket.create_connection((host, port))
            break
        except OSError:
            time.sleep(0.05)
else:
    end = socket.create_server((host, port)).accept()[0]
print("ready", flush=True)
sys.stdin.readline()
sender = threading.Thread(target=end.sendall, args=(bytes(count),))
sender.start()
room, left = bytearray(2**20), count
while left:
    left -= end.recv_into(room, min(len(room), left))
sender.join()
print(time.time())
"""


def figures() -> Iterator[Figure]:
    """All figures of the collectives."""
    yield from levels()
    yield from predictions()


def levels() -> Iterator[Figure]:
    """Hierarchical over flat ring on 2 x 4 ranks, and what of the link between nodes each fills."""
    yield from _shaped("levels", ((2, 2), (2, 4)), "ring,hierarchical,recursive-halving-doubling")


def predictions() -> Iterator[Figure]:
    """Predicted against measured."""
    yield from _shaped("predictions", LAYOUTS, "all")


def _shaped(part: str, layouts: Sequence[tuple[int, int]], algorithms: str) -> Iterator[Figure]:
    about = f"nodes linked at {RATE}"
    reason = lacking()
    if reason:
        yield Figure(name=f"collectives, {about}", value=None, unit="", goal="measured", reason=reason)
        return
    with shaped_cluster(max(nodes for nodes, _ in layouts)) as (box, system):
        out = _kept(part)
        common = ("comm", "submit", "--system", str(system), "--out", str(out), "--backends", "none")
        common += ("--iterations", "1", "--warmup", "1", "--repeats", str(REPEATS))
        for nodes, ranks in layouts:
            submit(
                box,
                *common,
                *("--algorithms", algorithms, "--sizes", FIT_SIZES, "--series", f"fit-{nodes}x{ranks}"),
                *_placed(nodes, ranks),
            )
            _await(box, out)
        if part == "levels":
            submit(
                box,
                *common,
                *("--algorithms", "ring,hierarchical", "--sizes", LARGE_SIZES, "--series", "large"),
                *_placed(2, 4),
            )
            _await(box, out)
            bare = [_bare_senders(box) for _ in range(REPEATS)]
        runs = [run for run in scan_comm(out).runs if run.record is not None]
    fit = [run for run in runs if run.plan.series.id.startswith("fit-")]
    if part == "predictions":
        yield from _accuracy(fit)
        yield from _in_band(fit)
        return
    yield from _hierarchical_gain(fit, [run for run in runs if run.plan.series.id == "large"])
    name = f"rate between nodes, {BARE_FLOWS} bare sockets each way, {BARE_BYTES / 1e6:.0f} MB: what the link carries"
    yield Figure.of(bare, name=name, unit=f"of {RATE}", goal="none")


def _placed(nodes: int, ranks: int) -> tuple[str, ...]:
    """A thread for each rank in every layout: with the two of 2 x 2 and 4 x 2, ranks would spin in OpenMP's barriers on
    processors that all nodes of the box share (4 MiB ring on 4 x 2: 0.72 s with two, 0.34 s with one).
    """
    return ("--nodes", str(nodes), "--ranks-per-node", str(ranks), "--set", f"system.node.cores={ranks}")


def _kept(part: str) -> Path:
    """A new folder for the raw runs; those of the last time go."""
    out = FOLDER / "collectives" / part
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
    observations = _observations(runs)
    sharing, pairs = choose_sharing(observations)
    repeats: dict[tuple[str, Layout, int], list[float]] = {}
    for one in observations:
        repeats.setdefault((one.algorithm, one.layout, one.num_bytes), []).append(one.seconds)
    scatter = [abs(float(np.median(took)) / one - 1) for took in repeats.values() for one in took]
    name = f"|median of its repeats / measured - 1|, the same points, links at {RATE}: no prediction is better"
    yield _error(name, scatter, None)
    yield _error(
        f"|predicted / measured - 1|, all algorithms, sizes of 1 MiB and more, links at {RATE}",
        [abs(predicted / seen.seconds - 1) for seen, predicted in pairs],
        0.06,
        unit="median; fit from other sizes and rank counts",
        reason=f"in the model ranks of a node share {_shared(sharing)}",
    )
    for name in sorted({seen.algorithm for seen, _ in pairs}):
        own = [abs(predicted / seen.seconds - 1) for seen, predicted in pairs if seen.algorithm == name]
        yield _error(f"the same, {name}", own, 0.1)


def _error(name: str, errors: Sequence[float], most: float | None, *, unit: str = "median", reason: str = "") -> Figure:
    """The median of relative errors; `most`: its goal, None where there is none."""
    value, low, high = median_interval(errors)
    goal, met = ("none", None) if most is None else (f"at most {most:g}", _at_most(low, high, most))
    return Figure(
        name=name, value=value, low=low, high=high, n=len(errors), unit=unit, reason=reason, goal=goal, met=met
    )


def _in_band(runs: Sequence[CommRun]) -> Iterator[Figure]:
    """Of the points of each size and rank count, those in the band that other sizes and rank counts print for them."""
    points: dict[tuple[Layout, str, int], dict[str, float]] = {}
    for run in runs:
        for seen in _observations([run]):
            found = points.setdefault((seen.layout, seen.algorithm, seen.num_bytes), {})
            found[f"{run.plan.series.id}/{run.plan.series.repeat}"] = seen.seconds
    seen = [
        Observation(collective="allreduce", algorithm=name, layout=layout, num_bytes=size, element_bytes=4, shards=None,
                    seconds=float(np.median([*took.values()])))
        for (layout, name, size), took in points.items()
    ]  # fmt: skip
    held: list[bool] = []
    widths: list[float] = []
    for size, ranks in sorted({(one.num_bytes, one.layout.ranks) for one in seen}):
        others = [one for one in seen if one.num_bytes != size and one.layout.ranks != ranks]
        fit = fit_of(
            Scope(system="shaped-box", carrier="torch-gloo", dtype="fp32"),
            others,
            [points[one.layout, one.algorithm, one.num_bytes] for one in others],
            sources=(),
            lines=(),
            fitted="",
        )
        for one in seen:
            if (one.num_bytes, one.layout.ranks) == (size, ranks):
                wanted = PredictionRequest(sizes=(size,), algorithms=(one.algorithm,), group_size=one.layout.group_size)
                series = predict_all(fit.network, [ranks], wanted).predictions[0].series[0]
                if series.low is not None and series.high is not None:
                    held.append(series.low[0] <= one.seconds <= series.high[0])
                    widths.append((series.high[0] - series.low[0]) / series.seconds[0])
    share = float(np.mean(held)) if held else None
    reason = f"{sum(held)} of {len(held)} points; those of a rank count beyond the fitted ones among them"
    name = f"points in the printed band of other sizes and rank counts, links at {RATE}"
    # The interval of a share is Wilson's: points of one fit are not independent, so that it is at least so wide.
    low, high = share_interval(sum(held), len(held)) if held else (None, None)
    yield Figure(
        name=name,
        value=share,
        low=low,
        high=high,
        n=len(held),
        unit="share",
        goal="at least 0.9",
        met=None if low is None or high is None else _verdict(low, high, 0.9),
        reason=reason,
    )
    yield Figure(
        name="width of these bands over the prediction",
        value=float(np.median(widths)) if widths else None,
        n=len(widths),
        unit="median",
        goal="none",
        reason="a band that is wide enough holds every point",
    )


def _shared(sharing: Sharing) -> str:
    names = ["the link"] * (sharing.across is not None) + ["processors or memory"] * (sharing.inside is not None)
    return " and ".join(names) or "nothing"


def _verdict(low: float, high: float, goal: float) -> bool | None:
    """Whether it is at least the goal; None where the interval holds this."""
    return True if low >= goal else False if high < goal else None


def _at_most(low: float, high: float, goal: float) -> bool | None:
    return _verdict(-high, -low, -goal)


def _bare_senders(box: Box) -> float:
    """What of the link as many connections fill as hierarchical has, both ways at once, without dlbench."""
    nodes = box.plan.nodes
    ends = [
        subprocess.Popen(
            ["ip", "netns", "exec", node.namespace, sys.executable, "-c", BARE, str(nodes[0].address), str(flow),
             str(number), str(BARE_BYTES // BARE_FLOWS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number, node in enumerate(nodes[:2])
        for flow in range(BARE_FLOWS)
    ]  # fmt: skip
    for end in ends:
        assert end.stdout is not None
        if end.stdout.readline() != b"ready\n":
            raise RuntimeError("bare sockets: a side ended before it was connected")
    began = time.time()
    for end in ends:
        assert end.stdin is not None
        end.stdin.write(b"\n")
        end.stdin.flush()
    last = max(float(end.communicate(timeout=60)[0]) for end in ends)
    return BARE_BYTES / (last - began) / RATE_BYTES_PER_S


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
        yield Figure.of(
            gains,
            name=f"hierarchical over flat ring, 2 x 4 ranks, links at {RATE}, {size / 1e6:.0f} MB",
            unit="ratio of rates",
            goal=f"at least 95 % of the predicted {expected:.3f}",
            met=lambda one, least=0.95 * expected: _verdict(one.low, one.high, least),
        )
        yield from _rates(size, layout, {name: seconds for (name, n), seconds in times.items() if n == size})


def _rates(size: int, layout: Layout, times: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    """What of the link each algorithm fills: the bytes that one node sends, over time and rate of the link."""
    for name, seconds in times.items():
        across = sum(c.bytes_across for c in counts("allreduce", name, layout, size // 4, 4))
        sent = across / layout.num_groups
        yield Figure.of(
            [sent / one / RATE_BYTES_PER_S for one in seconds],
            name=f"rate between nodes, {name}, {size / 1e6:.0f} MB",
            unit=f"of {RATE}",
            goal="at least 0.9",
            met=lambda one: _verdict(one.low, one.high, 0.9),
        )
