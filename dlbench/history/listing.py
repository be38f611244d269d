"""The runs of a history as a list: for people each under what is compared, for programs all that the index knows."""

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
MAX_COMMIT = 8  # Characters of a commit that are enough to know it; JSON and CSV hold all.
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
"""Hosts with blanks between, tags as JSON, figures in the units of their names."""


def list_document(entries: Sequence[HistoryEntry]) -> Document:
    """Each run under what is compared; its table is `runs`."""
    # Labels in the order in which they first come, not anew at every change between workloads.
    labels = list(dict.fromkeys(entry.label for entry in entries))
    valid = sum(entry.state == "valid" for entry in entries)
    runs: Sheet[Any] = Sheet(name="runs", title="Runs", columns=COLUMNS, rows=entries, is_shown=lambda entry: False)
    return Document(
        title="dlbench history: runs",
        sections=(
            *(
                Section(
                    id=f"label-{number}",
                    title=label or "runs that cannot be read",
                    brief=tuple(f"- {one.run_id}: {'; '.join(_facts(one))}" for one in entries if one.label == label),
                )
                for number, label in enumerate(labels)
            ),
            Section(
                id="runs",
                title="In all",
                sheets=(runs,),
                brief=(f"{runs_text(len(entries))}, {valid} valid; step: median of the run",),
            ),
        ),
        data=entries,
    )


def to_json(entries: Sequence[HistoryEntry]) -> str:
    """All that the index knows of each run; no text is changed."""
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
        hosts = first_of([host.host for host in entry.hosts], MAX_LISTED_HOSTS)
        place = place_text(entry.ranks, entry.nodes)
        yield f"{place} ({hosts})" if hosts else place
    if entry.slurm_job_id:
        yield f"Slurm job {entry.slurm_job_id}"
    if entry.commit:
        yield f"commit {entry.commit[:MAX_COMMIT]}"
