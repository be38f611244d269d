"""Few HDF5 files open at a time, for reading, in one process and its children."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import h5py

OPEN_AT_MOST = 32
"""Files kept open by one process."""


def open_hdf5(path: Path) -> h5py.File:
    """A file, for reading.

    Raises:
        OSError: it is missing, damaged or truncated; the message is HDF5's.
    """
    import h5py

    # Nobody writes a data set during a run, and network file systems often lack locks.
    return h5py.File(path, "r", locking=False)


class OpenFiles:
    """Opens files at first use in each process, so that its owner may be pickled or forked."""

    def __init__(self) -> None:
        self._handles: dict[Path, Any] = {}
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"_handles": {}, "_owner": -1}

    def get(self, path: Path) -> h5py.File:
        """The open file; the one opened first gives way when there are too many.

        Raises:
            OSError: as `open_hdf5`.
        """
        if self._owner != os.getpid():  # handles of a parent must not be used, nor closed, in its child
            self._handles, self._owner = {}, os.getpid()
        if path not in self._handles:
            if len(self._handles) >= OPEN_AT_MOST:
                self._handles.pop(next(iter(self._handles))).close()
            self._handles[path] = open_hdf5(path)
        return self._handles[path]

    def close(self) -> None:
        """Closes all files; getting one opens it again."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
