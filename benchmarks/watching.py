"""What watching costs, and whether what it says is true: clocks that differ, runs of 1,024 ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import overhead
from benchmarks.figures import Figure, timed
from dlbench.node.ranks import RankPlace
from dlbench.node.watching.spans import RankSpans
from dlbench.records.folder import create, prepare_output
from dlbench.records.rows.spans import COMPUTE, SPAN_FIELDS
from tests.support.run_factory import plans
from tests.support.skewed_clocks import lacking as no_skewed_clocks
from tests.support.skewed_clocks import measure as skewed_clocks
from tests.support.watch_factory import large_run

LARGE_RANKS, LARGE_STEPS = 1024, 1000
CLOCK_ROUNDS = 20


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    yield from span_cost()
    yield from clock_error()
    yield from large()
    yield from overhead.figures()


def span_cost() -> Iterator[Figure]:
    """Time and bytes of one span."""
    count, rounds = 20_000, 11
    (plan,) = plans(points=(1,), repeats=1, overrides={"watch.max_bytes": 1 << 30})
    place = RankPlace(
        rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, host="n0", token="bench"
    )  # fmt: skip
    spent, sizes = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(rounds):
            folder = create(prepare_output(Path(temporary) / str(number)), plan)
            spans = RankSpans(plan, folder, place)
            # Times that scatter as real ones do: regular ones would shrink to nothing on disk.
            times = np.cumsum(np.random.default_rng(number).lognormal(11, 0.3, count)).astype(int).tolist()
            names = [f"forward layer{span % 100}" for span in range(count)]
            moment = time.monotonic_ns()
            for span, start in enumerate(times):
                spans.add(COMPUTE, names[span], start, start + (start & 0xFFFF), step=3)
            spent.append((time.monotonic_ns() - moment) / count)
            totals = spans.close()
            sizes.append(totals["bytes"] / totals["num"])
    yield Figure.of(spent[1:], name="one span", unit="ns", goal="measured")
    yield Figure(name=f"one span on disk ({len(SPAN_FIELDS)} columns)", value=sizes[-1], unit="bytes", goal="measured")


def clock_error() -> Iterator[Figure]:
    """Error of the offset between two nodes whose clocks differ by a known number of seconds."""
    about = {"name": "error of the clocks' offset, two namespaces", "unit": "us", "goal": "below 100"}
    if reason := no_skewed_clocks():
        yield Figure(**about, value=None, reason=reason)
        return
    found = skewed_clocks(CLOCK_ROUNDS)
    errors = [abs(error) / 1e3 for error, _ in found]
    bound = max(bound for _, bound in found) / 1e3
    yield Figure.of(
        errors,
        **about,
        met=max(errors) < 100,
        reason=f"largest {max(errors):.3g} us, largest error bound {bound:.3g} us",
    )


def large() -> Iterator[Figure]:
    """Export and attribution of a large run, each in a process of its own."""
    size = f"{LARGE_RANKS:,} ranks x {LARGE_STEPS:,} steps"
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary) / "runs"
        large_run(runs, ranks=8, steps=LARGE_STEPS)
        folder = large_run(runs, ranks=LARGE_RANKS, steps=LARGE_STEPS)
        whole = sum(path.stat().st_size for path in folder.path.iterdir()) / 1e6
        yield Figure(name=f"folder of {size}", value=whole, unit="MB", goal="below 50", met=whole < 50)
        export = ("trace", str(folder.path), "-o", str(Path(temporary) / "trace.json.gz"))
        for name, command in {"export": export, "attribution": ("diagnose", str(runs))}.items():
            seconds, peak, _ = timed(*command)
            yield Figure(
                name=f"{name} of {size}", value=seconds, unit="s", goal="below 60 s and 1 GB",
                met=seconds < 60 and peak < 1e9, reason=f"peak memory {peak / 1e6:.0f} MB, all processes together",
            )  # fmt: skip
