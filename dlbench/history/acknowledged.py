"""Changes of level that somebody knows of: who said so, when, and why; a file each in the history, beside its runs.

An acknowledged change is no longer a reason to fail a gate or to call a level worse. It is one again when the level
gets worse still; a further change is another one, with a later date.
"""

from __future__ import annotations

import errno
import getpass
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError, UserError
from dlbench.history.files import Store, sync_folder
from dlbench.history.trends.change_points import MIN_EFFECT
from dlbench.opening import folder_below
from dlbench.records.files import write_json
from dlbench.records.scan import load_file
from dlbench.specs.base import Count, Name, Positive, Spec
from dlbench.units import utc_now

if TYPE_CHECKING:
    from dlbench.history.trends.series import Change, Trend

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

    def covers(self, time: str, level: float, higher_is_worse: bool) -> bool:
        """Whether it is about a change with this first night, and the level after it is still the acknowledged one."""
        worse = math.log(level / self.level) * (1 if higher_is_worse else -1)
        return time <= self.through and worse < math.log1p(MIN_EFFECT)


def read_acknowledged(store: Store) -> list[Acknowledgement]:
    """All of a history, the newest first.

    Raises:
        IncompleteDataError: one is damaged, or no plain file.
        RunError: the folder cannot be read, or is a link.
    """
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


def acknowledge(store: Store, series: Sequence[Trend], series_id: str, day: str, reason: str) -> Acknowledgement:
    """Writes down that a change is known.

    Args:
        store: the history.
        series: all of them, as they stand now.
        series_id: `Trend.id`.
        day: of the change's first night, or the first of the drift, as `dlbench history trends` shows it.
        reason: why it is no reason to act.

    Raises:
        UserError: there is no such series or change, it is acknowledged, the reason is empty or too long, or the store
            cannot be written.
    """
    if not reason.strip() or len(reason) > MAX_REASON:
        raise UserError(f"--reason: must say why, in 1 to {MAX_REASON} characters")
    trend = next((one for one in series if one.id == series_id), None)
    if trend is None:
        known = ", ".join(one.id for one in series if one.changes) or "none has changes"
        raise UserError(f"{series_id}: is no series of this history; with changes: {known}")
    change = next((one for one in trend.changes if one.time.startswith(day) and len(day) >= len("2026-01-01")), None)
    if change is None:
        days = ", ".join(one.time[:10] for one in trend.changes) or "none"
        raise UserError(f"{day}: {series_id} has no change of that day; it has: {days}")
    if change.acknowledged is not None:
        known = change.acknowledged
        raise UserError(f"{day}: is acknowledged by {known.by} on {known.written[:10]}: {known.reason}")
    return _write(store, trend, change, reason.strip())


def _write(store: Store, trend: Trend, change: Change, reason: str) -> Acknowledgement:
    made = Acknowledgement(
        group=trend.group,
        ranks=trend.ranks,
        nodes=trend.nodes,
        metric=trend.metric,
        time=change.time,
        through=change.first_after,
        level=change.after.value,
        ratio=change.ratio.value,
        reason=reason,
        by=getpass.getuser(),
        written=utc_now(),
    )
    stamp = "".join(letter for letter in made.written if letter.isalnum())
    path = store.path / FOLDER / f"{trend.id}.{change.time[:10]}.{stamp}.json"
    try:
        with folder_below(store.path, FOLDER, create=True):
            write_json(path, made.model_dump(mode="json"))
        sync_folder(path.parent)
    except OSError as error:
        why = "is a link or no folder" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror or error
        raise UserError(f"{path.parent}: cannot be written: {why}") from None
    return made
