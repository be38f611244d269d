"""Data that is spoilt while ranks read it: the sample and its file are named, the code is 2, nothing is left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.bench.faults.catalogue import Fault
from tests.bench.faults.processes import END_S, await_measuring, end_by_force, require_nothing_left
from tests.bench.faults.workshop import RUN_S, DidNotHoldError, Workshop, finish, short
from tests.support.leftovers import Leftovers

_MADE: dict[str, tuple[str, ...]] = {
    "JPEG": ("images", "--size", "64", "--classes", "2"),
    "JPEG in TFRecord": ("images", "--size", "64", "--classes", "2", "--container", "tfrecord"),
    "JPEG in tar": ("images", "--size", "64", "--classes", "2", "--container", "tar"),
    "HDF5": ("density", "--size", "32", "--samples-per-file", "8"),
    "TFRecord": ("density", "--size", "32", "--samples-per-file", "8", "--container", "tfrecord"),
}
_ENDINGS = (".jpg", ".tar", ".tfrecord", ".hdf5", ".h5", ".tfrecords")


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)


def _zeros(path: Path) -> None:
    """From the first kB on, so that what tells the kind of file stays."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(min(1024, size // 4))
        file.write(bytes(size - file.tell()))


def _removed(path: Path) -> None:
    path.unlink()


_SPOIL: dict[str, Callable[[Path], None]] = {"cut": _cut, "zeros from the first kB on": _zeros, "removed": _removed}
_STAYS_READABLE = ("HDF5", "TFRecord", "JPEG in TFRecord", "JPEG in tar")
"""A file that a rank holds open is there for it, though removed, until it closes it."""


def faults() -> Iterator[Fault]:
    """Every kind of file in every form, read by the ranks themselves and by loader processes."""
    for kind in _MADE:
        for spoil in _SPOIL:
            name = f"data verify: {kind}: {spoil}"
            yield Fault(family="samples", name=name, replay=partial(_verified, name, kind, spoil))
            for loaders in (0, 1):
                if spoil == "removed" and kind in _STAYS_READABLE:
                    continue
                name = f"{kind}, {loaders} loaders: {spoil} while it is read"
                yield Fault(family="samples", name=name, replay=partial(_spoilt, name, kind, spoil, loaders))


def _verified(name: str, kind: str, spoil: str, shop: Workshop) -> None:
    data = shop.folder(name) / "data"
    shutil.copytree(_source(shop, kind), data)
    path = next(path for path in sorted((data / "train").rglob("*")) if path.suffix in _ENDINGS)
    _SPOIL[spoil](path)
    shop.call("data", "verify", data, limit_s=RUN_S).require((4,), path.name)


def _spoilt(name: str, kind: str, spoil: str, loaders: int, shop: Workshop) -> None:
    data = shop.folder(name) / "data"
    shutil.copytree(_source(shop, kind), data)
    out = data.parent / "runs"
    workload = "resnet50" if kind.startswith("JPEG") else "cosmoflow"
    words = ["run", workload, "--preset", "ci", "--engine", "ddp", "--ranks", "2", "--no-progress", *short(100_000)]
    words += ["--data", str(data), "--set", f"data.loader_workers={loaders}", "--set", "fault.step_delay_s=0.05"]
    with Leftovers(shop.environment) as leftovers:
        process = shop.start(*words, "--out", out, variables=leftovers.environment)
        try:
            await_measuring(process, out)
            files = [path for path in (data / "train").rglob("*") if path.suffix in _ENDINGS]
            for path in files:
                _SPOIL[spoil](path)
            done = finish(process, ["run"], END_S)
        finally:
            end_by_force(process)
        require_nothing_left(leftovers)
    done.require((2,), "0 of 1 runs valid")
    if not any(path.name in done.text for path in files):
        raise DidNotHoldError(f"no file is named: {done.text.strip()[-300:]!r}")


def _source(shop: Workshop, kind: str) -> Path:
    made = shop.root / "samples" / kind.replace(" ", "-")
    if not made.exists():
        what, *more = _MADE[kind]
        shop.call("data", "make", what, made, "--samples", "32", "--workers", "1", *more, limit_s=300).require((0,))
    return made
