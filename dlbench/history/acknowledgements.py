"""Acknowledged changes of level, a file each: they fail no gate until the level gets worse again."""

from __future__ import annotations

import errno
import os
from operator import attrgetter
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
    """One file of `acknowledged`: an acknowledged change of level."""

    format: Literal["dlbench.acknowledgement"] = Field("dlbench.acknowledgement", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    group: Name = Field(description="Configuration, as runs of the history have it.")
    ranks: Count = Field(description="Ranks of the series.")
    nodes: Count = Field(description="Nodes of the series.")
    metric: Name = Field(description="Metric of the series.")
    time: str = Field(max_length=40, description="First night after the change, or of the drift; UTC, ISO 8601.")
    through: str = Field(max_length=40, description="First night certainly after the change, or last of the drift.")
    level: Positive = Field(description="The level after the change, in the metric's unit.")
    ratio: Positive = Field(description="Level after over level before (1).")
    reason: str = Field(min_length=1, max_length=MAX_REASON, description="Why no action is needed.")
    by: str = Field(max_length=200, description="Who acknowledged it.")
    written: str = Field(max_length=40, description="When; UTC, ISO 8601.")

    @property
    def series(self) -> tuple[str, int, int, str]:
        return self.group, self.ranks, self.nodes, self.metric


def read_acknowledged(store: Store) -> list[Acknowledgement]:
    """Returns all acknowledgements of a history, the newest first."""
    try:
        with folder_below(store.path, FOLDER) as folder, os.scandir(folder) as entries:
            kinds = {
                entry.name: entry.is_file(follow_symlinks=False) for entry in entries if entry.name.endswith(".json")
            }
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{store.path / FOLDER}: cannot be read: {error.strerror or error}") from None
    acknowledgements = []
    for name, is_plain in kinds.items():
        path = store.path / FOLDER / name
        if not is_plain:
            raise IncompleteDataError(f"{path}: is not a regular file; remove it")
        acknowledgement = load_file(path, Acknowledgement)
        if acknowledgement is not None:
            acknowledgements.append(acknowledgement)
    return sorted(acknowledgements, key=attrgetter("written", "through"), reverse=True)


def acknowledge(store: Store, acknowledgement: Acknowledgement) -> None:
    """Writes an acknowledgement. Raises `UserError`: the store cannot be written."""
    stamp = "".join(letter for letter in acknowledgement.written if letter.isalnum())
    series = f"{acknowledgement.group}-{acknowledgement.ranks}-{acknowledgement.nodes}-{acknowledgement.metric}"
    path = store.path / FOLDER / f"{series}.{acknowledgement.time[:10]}.{stamp}.json"
    try:
        with folder_below(store.path, FOLDER, create=True):
            write_json(path, acknowledgement.model_dump(mode="json"))
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            reason = "is a link or not a folder"
        raise UserError(f"{path.parent}: cannot be written: {reason}") from None
