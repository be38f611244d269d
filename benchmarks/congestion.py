"""The factor of a link that two pairs of ranks share, on a shaped cluster: a window of messages takes twice as long."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.shaped_cluster import RATE, lacking, shaped_cluster, submit, wait_for
from dlbench.comm.report import assemble
from dlbench.records.comm import scan_comm

REPEATS = 5
GOAL = 2.0, 0.1


def figures(repeats: int = REPEATS) -> Iterator[Figure]:
    """Mean and 99th percentile of the victim's window, and alpha and beta between the nodes."""
    reason = lacking()
    if reason:
        yield Figure(name="congestion factor", value=None, unit="", goal="2 within 10 %", reason=reason)
        return
    with tempfile.TemporaryDirectory() as temporary, shaped_cluster(nodes=2) as (box, system):
        out = Path(temporary) / "runs"
        asked = ("--victims", "0:2", "--congestors", "1:3", "--sizes", "8,1MiB", "--iterations", "20")
        common = ("comm", "submit", "--system", str(system), "--nodes", "2", "--ranks-per-node", "2")
        submit(box, *common, *asked, "--repeats", str(repeats), "--series", "congestion", "--out", str(out))
        wait_for(lambda: len([run for run in scan_comm(out).runs if run.record]) == repeats, 1800)
        (found,) = assemble(scan_comm(out)).pairs
    for one in found.figures:
        for name, factor in (("mean", one.factor), ("99th percentile", one.factor_p99)):
            if factor is None:
                continue
            is_goal = (one.way, one.num_bytes > 8, name) == ("window", True, "mean")
            yield Figure(
                name=f"beside a congestor, {one.way} of {one.num_bytes} B, {name}, link of {RATE}",
                value=factor.value,
                low=factor.low,
                high=factor.high,
                n=factor.n,
                unit="times as long",
                goal="2 within 10 %" if is_goal else "measured",
                met=abs(factor.value / GOAL[0] - 1) <= GOAL[1] if is_goal else None,
            )
    for cost in found.costs:
        rate = 8e-6 / cost.beta.value
        what = f"alpha {cost.alpha.value * 1e6:.0f} us"
        yield Figure(name=f"pairs, {cost.level}", value=rate, unit="Mbit/s", goal=f"{RATE}, less headers", reason=what)
