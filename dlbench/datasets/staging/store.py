"""Samples kept on a node, one file each, that several processes write and read at the same time.

`<folder>/<index // 4096>/<index>` holds a sample's bytes and then their CRC-32 (4 bytes, little-endian). A file appears
whole or not at all (written under another name, then renamed), so that its being there means that the sample has
arrived. It is not synced: a node that loses power loses the job, too, and a damaged file is found by its checksum.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dlbench.opening import descriptor

_PER_FOLDER = 4096
"""Samples of a folder: a million in one would be slow on most file systems."""
_CRC_BYTES = 4
MAX_BYTES = 1 << 32
"""Of a sample at most."""


class DamagedSampleError(Exception):
    """A sample is there, and is not what was put; `str` says the file and the reason."""


class SampleStore:
    """Samples by their number in the data set. Survives pickling.

    Args:
        folder: where they are; made when the first is put, if the folder above it is there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, index: int) -> Path:
        """The file of a sample, there or not."""
        return self.folder / str(index // _PER_FOLDER) / str(index)

    def put(self, index: int, data: bytes) -> None:
        """Keeps a sample; one that is there is replaced.

        Raises:
            OSError: the disk refuses; nothing of the sample is left.
        """
        # Texts and plain calls: a million samples are put, and objects for their paths would take half of the time.
        folder = f"{self.folder}/{index // _PER_FOLDER}"
        temporary = f"{folder}/.{index}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            self._make(folder)
            opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                _write(opened, data)
            finally:
                os.close(opened)
            os.rename(temporary, f"{folder}/{index}")  # noqa: PTH104
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise

    def _make(self, folder: str) -> None:
        """Makes a folder of samples, but nothing above the store: where that is gone, the run is over."""
        for path in (self.folder, folder):
            with suppress(FileExistsError):
                os.mkdir(path)  # noqa: PTH102

    def remove_partial(self) -> None:
        """Removes what processes that were killed had begun to write; while nobody writes."""
        for group in self._groups():
            for entry in os.scandir(group.path):
                if entry.name.startswith("."):
                    with suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108

    def get(self, index: int) -> bytes | None:
        """The bytes of a sample; None if it is not there.

        Raises:
            DamagedSampleError: they are not what was put.
            OSError: they cannot be read.
        """
        path = self.path(index)
        try:
            opened = descriptor(path, follow=False)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(opened).st_size
            content = b"" if size > MAX_BYTES else os.read(opened, size)
            while 0 < len(content) < size and (more := os.read(opened, size - len(content))):
                content += more
        finally:
            os.close(opened)
        data, crc = content[:-_CRC_BYTES], content[-_CRC_BYTES:]
        if len(crc) < _CRC_BYTES or zlib.crc32(data) != int.from_bytes(crc, "little"):
            raise DamagedSampleError(f"{str(path)!r}: changed or cut off since it was staged")
        return data

    def has(self, index: int) -> bool:
        """Whether a sample is there."""
        return self.path(index).exists()

    def remove(self, index: int) -> None:
        """Forgets a sample; one that is not there is none to forget."""
        with suppress(FileNotFoundError):
            self.path(index).unlink()

    def indices(self) -> Iterator[int]:
        """The samples that are there, in no order."""
        for group in self._groups():
            yield from (int(entry.name) for entry in os.scandir(group.path) if entry.name.isdigit())

    def _groups(self) -> Iterator[os.DirEntry[str]]:
        if self.folder.is_dir():
            for group in os.scandir(self.folder):
                if group.name.isdigit() and group.is_dir(follow_symlinks=False):
                    yield group


def _write(opened: int, data: bytes) -> None:
    """A sample and its checksum, in one call as a rule."""
    crc = zlib.crc32(data).to_bytes(_CRC_BYTES, "little")
    done = os.writev(opened, [data, crc])
    if done < len(data) + _CRC_BYTES:
        rest = memoryview(b"".join((data, crc)))[done:]
        while rest:
            rest = rest[os.write(opened, rest) :]
