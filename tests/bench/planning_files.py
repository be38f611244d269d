"""A million made empty files: how long planning and opening them takes from their index, and how long listing would.

What is timed begins in a process that has imported everything: the look while a run is planned, opening as a rank does
it, and the look at which pages are cached. The files were just made, so that their names are in memory: a file server
gives them more slowly, which is what the index is for.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dlbench.datasets.recognition import keep_indexes
from tests.bench.figures import Figure, median_interval

CLASSES, FILES = 1000, 1_000_000
ROUNDS, GOAL_S = 5, 5.0

_PLANNED = """
import sys, time
from dlbench.datasets.file_index import NAME
from dlbench.datasets.images.image_set import index_jpeg_tree
from dlbench.datasets.recognition import require_fitting
from dlbench.machine.page_cache import cached_pages
from dlbench.machine.storage import call_rates
from dlbench.node.data.source import open_training
from dlbench.specs.expand import expand
from dlbench.specs.requests import Request
request = Request(workload="resnet50", system="local", points=(1,), repeats=1, data=sys.argv[1])
train = expand(request, machine_cores=4)[0].workload
begun = time.monotonic()
assert require_fitting(train, ranks=1)
reader = open_training(train.model, train.data, seed=1)
files = reader.files()
cached_pages(files)
planned = time.monotonic() - begun
assert reader.describe()["names_from"] == NAME and len(files) == int(sys.argv[2])
begun = time.monotonic()
index_jpeg_tree(files[0].parents[1])
listed = time.monotonic() - begun
print(planned, listed, len(files) / call_rates(files, 1.0, seed=1)["names_per_s"])
"""


def figures() -> Iterator[Figure]:
    """Seconds of planning from the index, beside those of listing, measured and as `dlbench io` says them."""
    with tempfile.TemporaryDirectory(prefix="dlbench-million-") as temporary:
        folder = Path(temporary)
        for number in range(CLASSES):
            place = folder / f"n{number:08}"
            place.mkdir()
            for file in range(FILES // CLASSES):
                (place / f"n{number:08}_{file}.JPEG").touch()
        keep_indexes(folder)
        command = [sys.executable, "-P", "-c", _PLANNED, str(folder), str(FILES)]
        answers = [
            [float(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
            for _ in range(ROUNDS)
        ]
    planned, listed, said = (median_interval(values) for values in zip(*answers, strict=True))
    yield Figure(
        name=f"planning and opening {FILES:,} empty files from their index",
        value=planned[0],
        low=planned[1],
        high=planned[2],
        unit="s",
        n=ROUNDS,
        goal=f"under {GOAL_S:g}",
        met=planned[2] < GOAL_S,
        reason=f"listing and sorting them takes {listed[0]:.3g} s [{listed[1]:.3g}, {listed[2]:.3g}], `dlbench io` "
        f"says {said[0]:.3g} s [{said[1]:.3g}, {said[2]:.3g}] and more; names were in memory",
    )
