"""The journal of a data set that is being made, and the lock that keeps two makers apart.

`.production.jsonl`: the first line is `{"format": "dlbench.production", "version": 1, "kind", "made_with"}`, every
other one `{"part": name, "samples": count, "files": [{"path", "sha256", "bytes"}]}`. A torn last line is cut off.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.datasets.making.manifest import FileEntry
from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.datasets.making.recipe import Part

FORMAT = "dlbench.production"
VERSION = 1
PARTIAL = ".partial"
"""The folder of parts that are being written."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What file systems answer that have no locks, such as Lustre mounted without them."""


class Journal:
    """The journal of one folder, locked while it is open (a context manager).

    Raises:
        UserError: another process holds it, or it is damaged, or of another form.
        OSError: the disk refuses.
    """

    NAME = ".production.jsonl"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.recipe: tuple[str, Mapping[str, str | int | float | bool]] | None = None
        """Kind and `made_with`; none before `begin`."""
        self.done: dict[str, list[FileEntry]] = {}
        """The files of every finished part."""
        self._is_ours = False
        try:
            self._lock()
            self._load()
            self._is_ours = True
        except BaseException:
            self.close()
            raise

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether a folder is the beginning of a data set."""
        return (folder / cls.NAME).is_file()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes and unlocks it; one that was never begun is removed."""
        if self._is_ours and self.recipe is None:
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def begin(self, kind: str, made_with: Mapping[str, str | int | float | bool]) -> None:
        """Writes the first line."""
        self.recipe = (kind, made_with)
        self._append({"format": FORMAT, "version": VERSION, "kind": kind, "made_with": dict(made_with)})

    def add(self, part: Part, files: list[FileEntry]) -> None:
        """Says that a part is in its place; on disk when this returns."""
        self._append({"part": part.name, "samples": part.count, "files": [f.as_json() for f in files]})

    def _append(self, content: Mapping[str, object]) -> None:
        # One write: a line is there or torn at the end, never mixed.
        os.write(self._file, (json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n").encode("ascii"))
        os.fdatasync(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{str(self._path.parent)!r} is being made by another process; wait for it") from None
        except OSError as error:
            # Without locks a second maker is the user's to avoid; refusing to make data there would help nobody.
            if error.errno not in _NO_LOCKS:
                raise
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise UserError(f"{self._path}: is no regular file; remove it")
        if os.fstat(self._file).st_nlink == 0:  # removed since it was opened
            raise UserError(f"{str(self._path.parent)!r} was being made by another process; try again")

    def _load(self) -> None:
        good = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # torn by a kill
                try:
                    self._take(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{self._path}: line {number} is damaged ({error}); remove the folder") from None
                good += len(line)
        os.ftruncate(self._file, good)

    def _take(self, content: Mapping[str, object]) -> None:
        if self.recipe is not None:
            files = content["files"]
            if not isinstance(files, list):
                raise TypeError("files is no list")
            self.done[str(content["part"])] = [FileEntry.from_json(f) for f in files]
            return
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        made_with = content["made_with"]
        if not isinstance(made_with, dict):
            raise TypeError("made_with is no mapping")
        self.recipe = (str(content["kind"]), made_with)
