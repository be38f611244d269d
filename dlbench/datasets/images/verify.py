"""Every image of a set is decoded, every shard's checksum compared: which files are bad, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from dlbench.datasets.images.image_set import ImageSet, open_image_set
from dlbench.datasets.images.jpeg_decode import decode
from dlbench.datasets.images.shards import ImageShards
from dlbench.datasets.making.manifest import NAME, read_files
from dlbench.datasets.splits import NAMES as SPLITS
from dlbench.datasets.splits import has_splits
from dlbench.errors import UserError
from dlbench.opening import file_sha256

_AT_A_TIME = 64
"""Images that one task decodes."""

Found = tuple[int, list[str], list[str]]
"""Images seen, lines about bad files, lines about odd ones."""


def verify_images(
    folder: Path,
    on_progress: Callable[[int, int], None] | None = None,
    workers: int = 1,
    on_odd: Callable[[str], None] | None = None,
) -> list[str]:
    """Decodes every image of a tree or of shards wholly, in all splits of the folder.

    Shards are also compared with the checksums in the manifest of the folder or of the one above, if there is one;
    TFRecords carry checksums of their own. For other files there is `verify_manifest`.

    Args:
        folder: an image set, or a folder of the splits `train` and `validation`.
        on_progress: told the number of images seen, and of all.
        workers: threads; decoding and checksums do not hold Python's lock.
        on_odd: told one line for each image that is usable but not a plain RGB JPEG: grey, CMYK, a PNG named .jpg;
            and one for what was passed over.

    Returns:
        One line for each bad file or sample, with its place and the reason, in the order of the set; none if all is
        well. A set that cannot be opened is one line.
    """
    try:
        sets = [open_image_set(path) for path in _splits(folder)]
        checksums = [_checksums(images) for images in sets]
    except UserError as error:
        return [str(error)]
    total, seen = sum(images.num_samples for images in sets), 0
    bad: list[str] = []
    tell = on_odd or (lambda _line: None)
    with ThreadPoolExecutor(workers) as pool:
        for images, known in zip(sets, checksums, strict=True):
            for remark in images.remarks:
                tell(f"{str(images.root)!r}: {remark}")
            for count, lines, odd in _in_order(pool, _tasks(images, known), 2 * workers):
                seen += count
                bad += lines
                for line in odd:
                    tell(line)
                if on_progress is not None and count:
                    on_progress(seen, total)
            images.close()
    return bad


def _splits(folder: Path) -> list[Path]:
    if not has_splits(folder):
        return [folder]
    return [folder / name for names in SPLITS.values() for name in names if (folder / name).is_dir()]


def _tasks(images: ImageSet, checksums: Mapping[str, str]) -> Iterator[Callable[[], Found]]:
    for name, expected in checksums.items():
        yield partial(_digest, images.root / name, expected)
    for first in range(0, images.num_samples, _AT_A_TIME):
        yield partial(_decode, images, range(first, min(first + _AT_A_TIME, images.num_samples)))


def _checksums(images: ImageSet) -> dict[str, str]:
    """SHA-256 of each shard, as the manifest of its folder or of the one above says; none without a manifest."""
    if not isinstance(images, ImageShards):
        return {}
    for folder, prefix in ((images.root, ""), (images.root.parent, f"{images.root.name}/")):
        if (folder / NAME).is_file():
            wanted = {prefix + name: name for name in images.index.shards}
            return {wanted[entry.path]: entry.sha256 for entry in read_files(folder) if entry.path in wanted}
    return {}


def _digest(path: Path, expected: str) -> Found:
    try:
        found = file_sha256(path)
    except OSError as error:
        return 0, [f"{str(path)!r}: {error.strerror}"], []
    return 0, [] if found == expected else [f"{str(path)!r}: altered (SHA-256 differs from the manifest)"], []


def _decode(images: ImageSet, span: range) -> Found:
    bad, odd = [], []
    for index in span:
        try:
            _pixels, remark = decode(images.read(index))
        except OSError as error:
            bad.append(f"{images.name(index)}: {error.strerror}")
        except ValueError as error:
            bad.append(f"{images.name(index)}: {error}")
        else:
            if remark is not None:
                odd.append(f"{images.name(index)}: {remark}")
    return len(span), bad, odd


def _in_order(pool: ThreadPoolExecutor, tasks: Iterator[Callable[[], Found]], at_once: int) -> Iterator[Found]:
    """The results of tasks in their order; no more than `at_once` are waiting, however many there are."""
    waiting: list[Future[Found]] = []
    for task in tasks:
        waiting.append(pool.submit(task))
        if len(waiting) > at_once:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()
