"""Choosing runs of a history by what their entries say: KEY=VALUE, all of which must hold.

Keys are the plain fields of `HistoryEntry` (`workload`, `ranks`, `state`, `commit`, ...), `host` for a host of the run,
`tag.NAME` and `environment.NAME`. Values are compared as text, whole; an empty one means that there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dlbench.errors import UserError, nearest
from dlbench.history.entry import HistoryEntry

PLAIN = (
    *("run_id", "folder", "state", "created", "finished", "series", "repeat", "side", "variant", "group", "label"),
    *("system", "workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit"),
)

_EXAMPLES = {"tag": "commit", "environment": "host"}


def parse_where(texts: Iterable[str]) -> dict[str, str]:
    """Options `--where KEY=VALUE` by key.

    Raises:
        UserError: a text of another form, an unknown key, or a key given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark:
            raise UserError(f"--where {text}: must be KEY=VALUE, e.g. workload=resnet50")
        _require_key(key)
        if key in found:
            raise UserError(f"--where {key}: given twice; a run has one value of it")
        found[key] = value
    return found


def matches(entry: HistoryEntry, where: Mapping[str, str]) -> bool:
    """Whether a run has all these values.

    Raises:
        UserError: an unknown key.
    """
    return all(_holds(entry, key, value) for key, value in where.items())


def _holds(entry: HistoryEntry, key: str, value: str) -> bool:
    _require_key(key)
    if key == "host":
        return any(host.host == value for host in entry.hosts) or (not value and not entry.hosts)
    if key.startswith("tag."):
        return entry.tags.get(key.removeprefix("tag."), "") == value
    if key.startswith("environment."):
        return entry.environment.get(key.removeprefix("environment."), "") == value
    return str(getattr(entry, key)) == value


def _require_key(key: str) -> None:
    if key in PLAIN or key == "host":
        return
    kind, mark, name = key.partition(".")
    if mark and kind in ("tag", "environment"):
        if not name:
            raise UserError(f"--where {key}: must be {kind}.NAME, e.g. {kind}.{_EXAMPLES[kind]}")
        return
    names = [*PLAIN, "host", "tag.NAME", "environment.NAME"]
    raise UserError(f"--where {key}: runs have no such key: {nearest(key, names)}")
