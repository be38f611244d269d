"""The index of a history: a cache of the entries of its runs, in a file that may be deleted at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from dlbench.history.entry import HistoryEntry
from dlbench.opening import open_file
from dlbench.records.files import write_atomic

INDEX_VERSION = 4  # Of the file's form; what entries mean depends on the version that their maker gives.
SPARE_LINES = 64  # Lines of runs that are gone, or were read anew, that an index may hold beyond as many as its runs.

Row = tuple[int, HistoryEntry]  # Time of the folder's last change (nanoseconds), and the entry.


class Index:
    """The file: a line that says which version made it, then a line for each run, of which a folder's last counts.

    A line is the time of the last change of the run's folder, a blank, and the entry as `HistoryEntry.to_text` has it.
    """

    def __init__(self, path: Path, version: str) -> None:
        self.path = path
        self._head = f"{json.dumps({'format': 'dlbench.history-index', 'version': f'{INDEX_VERSION}: {version}'})}\n"
        self._is_whole = False
        """Whether lines may be appended; else the file is missing, damaged, or of another version."""

    def read(self) -> tuple[dict[str, Row], str]:
        """Returns the rows that can be read, by folder, and what is wrong with the file, empty if nothing."""
        try:
            # No link leads out of a store.
            with open_file(self.path, follow=False) as file:
                head, *lines, end = file.read().decode().split("\n")
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            return {}, error.strerror or str(error)
        except ValueError:
            return {}, "is no index"
        if f"{head}\n" != self._head:
            return {}, "was made by another version of dlbench, or is no index"
        rows: dict[str, Row] = {}
        is_damaged = end != ""
        for line in lines:
            changed_ns, _, entry = line.partition(" ")
            try:
                made = HistoryEntry.from_text(entry)
                rows[made.folder] = (int(changed_ns), made)
            except (ValueError, KeyError, TypeError):
                is_damaged = True
        self._is_whole = not is_damaged and len(lines) <= 2 * len(rows) + SPARE_LINES
        return rows, "is damaged" if is_damaged else ""

    def write(self, new: Mapping[str, Row], every: Mapping[str, Row]) -> None:
        """Appends rows, or writes the file with all of them where it is not whole. Raises `OSError`: it cannot be."""
        if self._is_whole:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_lines(new))
        else:
            write_atomic(self.path, self._head.encode() + _lines(every), follow=False)
            self._is_whole = True


def _lines(rows: Mapping[str, Row]) -> bytes:
    return "".join(f"{changed_ns} {entry.to_text()}\n" for changed_ns, entry in rows.values()).encode()
