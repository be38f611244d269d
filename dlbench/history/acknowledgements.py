"""Changes of level that somebody knows of: who said so, when, and why; a file each in the history, next to its runs.

An acknowledged change is no longer a reason to fail a gate or to call a level worse. It is one again when the level
gets worse still; a further change is another one, with a later date.
"""

from __future__ import annotations

import errno
import os
from typing import Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError, UserError
from dlbench.history.store import Store
from dlbench.opening import folder_below
from dlbench.records.files import sync_folder, write_json
from dlbench.records.scan import load_file
from dlbench.specs.base import Count, Name, Positive, Spec

FOLDER = "acknowledged"
MAX_REASON = 500


class Acknowledgement(Spec):
    """One file of `acknowledged`: a change of level that somebody knows of."""

    format: Literal["dlbench.acknowledgement"] = Field("dlbench.acknowledgement", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    group: Name = Field(description="Configuration, as runs of the history have it.")
    ranks: Count = Field(description="Ranks of the series.")
    nodes: Count = Field(description="Nodes of the series.")
    metric: Name = Field(description="Metric of the series.")
    time: str = Field(max_length=40, description="First night after the change, or of the drift; UTC, ISO 8601.")
    through: str = Field(max_length=40, description="First night that lay after it for certain, or last of the drift.")
    level: Positive = Field(description="The level after the change, in the metric's unit.")
    ratio: Positive = Field(description="Level after over level before (1).")
    reason: str = Field(min_length=1, max_length=MAX_REASON, description="Why it is no reason to act.")
    by: str = Field(max_length=200, description="Who acknowledged it.")
    written: str = Field(max_length=40, description="When; UTC, ISO 8601.")

    @property
    def series(self) -> tuple[str, int, int, str]:
        """Configuration, ranks, nodes, metric."""
        return self.group, self.ranks, self.nodes, self.metric


def read_acknowledged(store: Store) -> list[Acknowledgement]:
    """All of a history, the newest first."""
    try:
        with folder_below(store.path, FOLDER) as folder, os.scandir(folder) as entries:
            kinds = {one.name: one.is_file(follow_symlinks=False) for one in entries if one.name.endswith(".json")}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{store.path / FOLDER}: cannot be read: {error.strerror or error}") from None
    found = []
    for name, is_plain in kinds.items():
        path = store.path / FOLDER / name
        if not is_plain:
            raise IncompleteDataError(f"{path}: is no plain file; take it away")
        one = load_file(path, Acknowledgement)
        if one is not None:
            found.append(one)
    return sorted(found, key=lambda one: (one.written, one.through), reverse=True)


def acknowledge(store: Store, made: Acknowledgement) -> None:
    """Writes it into the history. Raises `UserError`: the store cannot be written."""
    stamp = "".join(letter for letter in made.written if letter.isalnum())
    series = f"{made.group}-{made.ranks}-{made.nodes}-{made.metric}"
    path = store.path / FOLDER / f"{series}.{made.time[:10]}.{stamp}.json"
    try:
        with folder_below(store.path, FOLDER, create=True):
            write_json(path, made.model_dump(mode="json"))
        sync_folder(path.parent)
    except OSError as error:
        why = "is a link or no folder" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror or error
        raise UserError(f"{path.parent}: cannot be written: {why}") from None
