"""The gains of the steps of a ladder against what its last step has over its first: one of short runs of two ranks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator

from benchmarks.figures import Figure
from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.views.sweep.numbers import sweeps
from tests.support.forked_runs import run_forked


def figures() -> Iterator[Figure]:
    """The difference of the logarithms, which is rounding or an error."""
    with tempfile.TemporaryDirectory() as out:
        words = ("--preset", "ci", "--ladder", "--engine", "ddp", "--ranks", "2", "--repeats", "5")
        run_forked("resnet50", *words, "--data", "synthetic", "--out", out)
        (sweep,) = sweeps(tabulate(scan(out), with_causes=True))
    (cell,) = sweep.cells
    gains = [math.log(one.gain.value) for one in cell.settings if one.gain]
    ratio = cell.settings[-1].ratio
    assert ratio is not None
    gap = abs(math.fsum(gains) - math.log(ratio.value))
    yield Figure(
        name="sum of the log gains of a ladder's steps less log of last over first",
        value=gap,
        unit="(logarithm)",
        n=len(gains),
        goal="below 1e-12",
        met=gap < 1e-12,
        reason=cell.verdict,
    )
