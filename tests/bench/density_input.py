"""CosmoFlow's input: how fast volumes of 128^3 become float32 tensors, against taking their gzip files apart alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dlbench.datasets.making.density_recipe import density_sample
from dlbench.datasets.tfrecord import RecordWriter, decompressor
from dlbench.datasets.volumes import encode_volume, index_density
from dlbench.node.data.density import VolumeReader
from dlbench.node.data.reader import BatchReader
from tests.bench.figures import Figure, median_interval

SIZE = 128
FILES = 4
ROUNDS = 9
GZIP_LEVEL = 6
"""That of the public files, as far as their size tells."""


def figures() -> Iterator[Figure]:
    """All figures of the area, on one core."""
    import numpy as np

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for number in range(FILES):
                generator = np.random.default_rng([0, number])
                targets = generator.uniform(-1, 1, 4).astype(np.float32)
                with RecordWriter(folder / f"{number}.tfrecord", gzip=True, level=GZIP_LEVEL) as writer:
                    writer.write(encode_volume(density_sample(targets, SIZE, generator), targets))
            yield from _against_gunzip(folder)
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def _against_gunzip(folder: Path) -> Iterator[Figure]:
    index = index_density(folder)
    batches = BatchReader(VolumeReader(index), "stop")
    paths = [folder / name for name in index.files]

    def ours(number: int) -> None:
        fetched = batches[[(0, number)]]
        assert fetched.error is None

    def python(number: int) -> None:
        zlib.decompress(paths[number].read_bytes(), 31)

    def program(number: int) -> None:
        subprocess.run(["gzip", "-dc", paths[number]], check=True, stdout=subprocess.DEVNULL)

    ways: dict[str, Callable[[int], None]] = {"ours": ours, "Python's zlib": python}
    if shutil.which("gzip"):
        ways["gzip -dc"] = program
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            for number in range(FILES):
                way(number)
            if turn:  # the first round warms up
                spent[name].append(time.perf_counter() - start)
    megabytes = FILES * SIZE**3 * 4 * 2 / 1e6
    files = sum(path.stat().st_size for path in paths) / FILES / 1e6
    rates = {name: [megabytes / s for s in times] for name, times in spent.items()}
    for name, values in rates.items():
        what = f"files to network input, {decompressor()}" if name == "ours" else f"gunzip alone, {name}"
        value, low, high = median_interval(values)
        yield Figure(
            name=f"CosmoFlow TFRecord: {what}",
            value=value,
            low=low,
            high=high,
            n=len(values),
            unit="MB/s of int16",
            goal="told",
            reason=f"{files:.2f} MB a file of gzip -{GZIP_LEVEL}, one core, page cache",
        )
    for name in list(ways)[1:]:
        value, low, high = median_interval([a / b for a, b in zip(rates["ours"], rates[name], strict=True)])
        yield Figure(
            name=f"CosmoFlow TFRecord MB/s against gunzip alone ({name})",
            value=value,
            low=low,
            high=high,
            n=ROUNDS,
            unit="ratio of throughputs",
            goal="at least 0.8",
            met=True if low >= 0.8 else False if high < 0.8 else None,
        )
