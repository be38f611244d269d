"""Runs of a history as a list for the terminal (80 columns), as CSV, as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dlbench.reading.run_metrics import METRICS
from dlbench.report.formats.csv import write_table
from dlbench.report.wording import clean
from dlbench.stats.figure import Cell
from dlbench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dlbench.history.entry import HistoryEntry
    from dlbench.history.prune import Removal

WIDTH = 80
MAX_HOSTS = 4

_PLAIN = (
    *("run_id", "state", "finished", "created", "series", "repeat", "side", "variant", "group", "label", "system"),
    *("workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit", "folder", "content_digest", "why"),
)
_FIGURES = tuple(metric.name for metric in METRICS)
COLUMNS: tuple[str, ...] = (*_PLAIN, "hosts", "dropped", "tags", *_FIGURES)
"""Of the CSV: hosts and dropped kinds with blanks between, tags as JSON, figures in the units of their names."""


def to_text(entries: Sequence[HistoryEntry]) -> str:
    """Each run with two lines, under what is compared; names longer than a line stay whole."""
    lines: list[str] = []
    # Labels in the order in which they are first met, not anew at every change between workloads.
    for label in dict.fromkeys(entry.label for entry in entries):
        runs = [entry for entry in entries if entry.label == label]
        lines += [*textwrap.wrap(clean(label) or "runs that cannot be read", WIDTH), ""]
        for entry in runs:
            lines += [f"  {clean(entry.run_id)}", *_wrapped("; ".join(map(clean, _facts(entry)))), ""]
    valid = sum(entry.state == "valid" for entry in entries)
    lines.append(f"{len(entries)} run{'' if len(entries) == 1 else 's'}, {valid} valid")
    return "\n".join(lines) + "\n"


def _facts(entry: HistoryEntry) -> Iterator[str]:
    yield (entry.finished or entry.created).replace("T", " ").replace("Z", " UTC") or "date unknown"
    if "step_median_s" in entry.figures:
        yield f"step {format_seconds(entry.figures['step_median_s'])} (median, single run)"
    else:
        yield f"{entry.state}: {entry.why}"
    if entry.ranks:
        ranks = "1 rank" if entry.ranks == 1 else f"{entry.ranks} ranks"
        nodes = "1 node" if entry.nodes == 1 else f"{entry.nodes} nodes"
        hosts = [host.host for host in entry.hosts]
        named = ", ".join(hosts[:MAX_HOSTS]) + (f" and {len(hosts) - MAX_HOSTS} more" if hosts[MAX_HOSTS:] else "")
        yield f"{ranks} on {nodes}" + (f" ({named})" if named else "")
    if entry.slurm_job_id:
        yield f"Slurm job {entry.slurm_job_id}"
    if entry.commit:
        yield f"commit {entry.commit}"
    if entry.dropped:
        yield f"without {', '.join(entry.dropped)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def to_csv(entries: Sequence[HistoryEntry]) -> str:
    """A line a run, columns `COLUMNS`."""
    return write_table(COLUMNS, map(_row, entries))


def _row(entry: HistoryEntry) -> dict[str, Cell]:
    row: dict[str, Cell] = {}
    for name in _PLAIN:
        value = getattr(entry, name)
        row[name] = clean(value) if isinstance(value, str) else value
    row |= {name: entry.figures.get(name) for name in _FIGURES}
    row["hosts"] = " ".join(clean(host.host) for host in entry.hosts)
    row["dropped"] = " ".join(entry.dropped)
    row["tags"] = json.dumps(dict(entry.tags), sort_keys=True)
    return row


def to_json(entries: Sequence[HistoryEntry]) -> str:
    """All that the index knows of each run; no text is changed."""
    content = {"format": "dlbench.history-list", "version": 1, "runs": [entry.to_dict() for entry in entries]}
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def removal_lines(chosen: Sequence[Removal], *, dry_run: bool, num_runs: int) -> Iterator[str]:
    """What went, or would go, run by run, and the sum."""
    verb = "would remove" if dry_run else "removed"
    for removal in chosen:
        files = len(removal.files)
        what = f"{files} file{'' if files == 1 else 's'} of " if files else ""
        yield f"{verb} {what}{clean(removal.entry.run_id)}: {format_bytes(removal.num_bytes)}"
    total = format_bytes(sum(removal.num_bytes for removal in chosen))
    yield f"{verb} {total} of {len(chosen)} of {num_runs} run{'' if num_runs == 1 else 's'}"
