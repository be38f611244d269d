"""The list of runs of `dlbench history list`, by label for people, with all fields of the index for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import methodcaller
from typing import Any

from dlbench.analysis.metrics import METRICS
from dlbench.history.entry import HistoryEntry
from dlbench.report.document import Document, Section
from dlbench.report.table import Column, Sheet, columns_of
from dlbench.report.wording import place_text, runs_text
from dlbench.units import first_of, format_seconds

MAX_LISTED_HOSTS = 4
MAX_COMMIT = 8  # Characters of a commit that identify it; JSON and CSV have all.
MINUTE = len("2026-03-04T02:06")

COLUMNS: tuple[Column[HistoryEntry], ...] = (
    *columns_of(
        HistoryEntry,
        *("run_id", "state", "finished", "created", "series", "repeat", "side", "variant", "group", "label", "system"),
        *("workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit", "folder", "content_digest"),
        *("why", "hosts", "tags"),
    ),
    *(Column(metric.name, "", methodcaller("figure", metric.name)) for metric in METRICS),
)
"""Columns of a run: hosts with blanks between, tags as JSON, figures in the units of their names."""


def list_document(entries: Sequence[HistoryEntry]) -> Document:
    """Returns the runs by label, in the order in which labels first appear; its table is `runs`."""
    entries_by_label: dict[str, list[HistoryEntry]] = {}
    for entry in entries:
        entries_by_label.setdefault(entry.label, []).append(entry)
    sections = []
    for number, (label, labelled) in enumerate(entries_by_label.items()):
        lines = [f"- {entry.run_id}: {'; '.join(_facts(entry))}" for entry in labelled]
        sections.append(Section(id=f"label-{number}", title=label or "runs that cannot be read", brief=tuple(lines)))
    num_valid = sum(entry.state == "valid" for entry in entries)
    runs: Sheet[Any] = Sheet(name="runs", title="Runs", columns=COLUMNS, rows=entries, is_shown=lambda entry: False)
    total = f"{runs_text(len(entries))}, {num_valid} valid; step: median of the run"
    sections.append(Section(id="runs", title="In all", sheets=(runs,), brief=(total,)))
    return Document(title="dlbench history: runs", sections=tuple(sections), data=entries)


def to_json(entries: Sequence[HistoryEntry]) -> str:
    """Returns all fields of the index for each run; no text is changed."""
    content = {"format": "dlbench.history-list", "version": 1, "runs": [entry.to_dict() for entry in entries]}
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _facts(entry: HistoryEntry) -> Iterator[str]:
    moment = (entry.finished or entry.created)[:MINUTE].replace("T", " ")
    yield f"{moment} UTC" if moment else "date unknown"
    if "step_median_s" in entry.figures:
        yield f"step {format_seconds(entry.figures['step_median_s'])}"
    else:
        yield f"{entry.state}: {entry.why}"
    if entry.ranks:
        text = place_text(entry.ranks, entry.nodes)
        if entry.hosts:
            text += f" ({first_of([host.host for host in entry.hosts], MAX_LISTED_HOSTS)})"
        yield text
    if entry.slurm_job_id:
        yield f"Slurm job {entry.slurm_job_id}"
    if entry.commit:
        yield f"commit {entry.commit[:MAX_COMMIT]}"
