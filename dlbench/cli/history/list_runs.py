"""`dlbench history list`: what a history holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import click

import dlbench
from dlbench.cli.history.store import open_store, store_options, where_option
from dlbench.cli.options import write_output
from dlbench.cli.report import emit
from dlbench.history.entry import HistoryEntry
from dlbench.reading.metrics import METRICS
from dlbench.report.document import Document, Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import place_text, runs_text
from dlbench.units import format_seconds

MAX_HOSTS = 4
MAX_COMMIT = 8
"""Characters of a commit that tell it from others; JSON and CSV hold all."""
MINUTE = len("2026-03-04T02:06")


def _plain(name: str) -> Column[HistoryEntry]:
    return Column(name, "", lambda entry: getattr(entry, name))


def _figure(name: str) -> Column[HistoryEntry]:
    return Column(name, "", lambda entry: entry.figures.get(name))


_NAMES = (
    *("run_id", "state", "finished", "created", "series", "repeat", "side", "variant", "group", "label", "system"),
    *("workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit", "folder", "content_digest", "why"),
)

COLUMNS: tuple[Column[HistoryEntry], ...] = (
    *map(_plain, _NAMES),
    Column("hosts", "", lambda entry: " ".join(host.host for host in entry.hosts)),
    Column("dropped", "", lambda entry: " ".join(entry.dropped)),
    Column("tags", "", lambda entry: json.dumps(dict(entry.tags), sort_keys=True)),
    *(_figure(metric.name) for metric in METRICS),
)
"""Hosts and dropped kinds with blanks between, tags as JSON, figures in the units of their names."""


def list_document(entries: Sequence[HistoryEntry]) -> Document:
    """Each run under what is compared; its table is `runs`."""
    # Labels in the order in which they first come, not anew at every change between workloads.
    labels = list(dict.fromkeys(entry.label for entry in entries))
    valid = sum(entry.state == "valid" for entry in entries)
    runs: Sheet[Any] = Sheet(name="runs", title="Runs", columns=COLUMNS, rows=entries, is_shown=lambda entry: False)
    return Document(
        title="dlbench history: runs",
        dlbench_version=dlbench.__version__,
        sections=(
            *(
                Section(
                    id=f"label-{number}",
                    title=label or "runs that cannot be read",
                    brief=tuple(_line(entry) for entry in entries if entry.label == label),
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


def _line(entry: HistoryEntry) -> str:
    return f"- {entry.run_id}: {'; '.join(_facts(entry))}"


def _facts(entry: HistoryEntry) -> Iterator[str]:
    moment = (entry.finished or entry.created)[:MINUTE].replace("T", " ")
    yield f"{moment} UTC" if moment else "date unknown"
    if "step_median_s" in entry.figures:
        yield f"step {format_seconds(entry.figures['step_median_s'])}"
    else:
        yield f"{entry.state}: {entry.why}"
    if entry.ranks:
        hosts = [host.host for host in entry.hosts]
        named = ", ".join(hosts[:MAX_HOSTS]) + (f" and {len(hosts) - MAX_HOSTS} more" if hosts[MAX_HOSTS:] else "")
        yield place_text(entry.ranks, entry.nodes) + (f" ({named})" if named else "")
    if entry.slurm_job_id:
        yield f"Slurm job {entry.slurm_job_id}"
    if entry.commit:
        yield f"commit {entry.commit[:MAX_COMMIT]}"
    if entry.dropped:
        yield f"without {', '.join(entry.dropped)}"


FormatName = Literal["text", "csv", "json"]


@click.command("list")
@store_options
@where_option
@click.option(
    "--format",
    "form",
    type=click.Choice(get_args(FormatName)),
    default="text",
    show_default=True,
    help="text: 80 columns; csv: one line per run; json: all that the index knows.",
)
def list_runs(store: Path | None, index: Path | None, where: tuple[str, ...], form: FormatName) -> None:
    """List runs by the time they ended, with step time, hosts, Slurm job and commit.

    \b
    Example:
      dlbench history list --where workload=resnet50 --where host=n17
    """
    from dlbench.history.entry import parse_where

    entries = open_store(store, index).entries(parse_where(where))
    if form == "json":
        write_output(to_json(entries).encode("utf-8"), None)
    else:
        emit(list_document(entries), form, None, "runs")
