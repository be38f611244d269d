"""The index of a history: a cache of its entries, in a file that may be deleted at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from dlbench.history.entry import HistoryEntry
from dlbench.opening import open_file
from dlbench.records.files import write_atomic

INDEX_VERSION = 4  # Version of the file format; entries have a version of their own.
SPARE_LINES = 64  # Obsolete lines that an index may have, in addition to as many as it has runs.

Row = tuple[int, HistoryEntry]  # Time of the folder's last change (nanoseconds), and the entry.


class Index:
    """The file: its version, then lines of runs (change time of the folder, entry), the last of each folder counts."""

    def __init__(self, path: Path, version: str) -> None:
        self.path = path
        self._head = f"{json.dumps({'format': 'dlbench.history-index', 'version': f'{INDEX_VERSION}: {version}'})}\n"
        self._is_whole = False
        """Whether lines may be appended; otherwise the file is missing, damaged, or of another version."""

    def read(self) -> tuple[dict[str, Row], str]:
        """Returns the readable rows, by folder, and the problem of the file, empty if it has none."""
        try:
            # A link could lead out of the store.
            with open_file(self.path, follow=False) as file:
                head, *lines, end = file.read().decode().split("\n")
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            return {}, error.strerror or str(error)
        except ValueError:
            return {}, "is not an index"
        if f"{head}\n" != self._head:
            return {}, "was made by another version of dlbench, or is not an index"
        rows: dict[str, Row] = {}
        is_damaged = end != ""
        for line in lines:
            changed_ns, _, entry = line.partition(" ")
            try:
                parsed = HistoryEntry.from_text(entry)
                rows[parsed.folder] = (int(changed_ns), parsed)
            except (ValueError, KeyError, TypeError):
                is_damaged = True
        self._is_whole = not is_damaged and len(lines) <= 2 * len(rows) + SPARE_LINES
        return rows, "is damaged" if is_damaged else ""

    def write(self, new: Mapping[str, Row], every: Mapping[str, Row]) -> None:
        """Appends the new rows, or writes a missing or damaged file with every row. Raises `OSError`."""
        if self._is_whole:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_lines(new))
        else:
            write_atomic(self.path, self._head.encode() + _lines(every), follow=False)
            self._is_whole = True


def _lines(rows: Mapping[str, Row]) -> bytes:
    return "".join(f"{changed_ns} {entry.to_text()}\n" for changed_ns, entry in rows.values()).encode()
