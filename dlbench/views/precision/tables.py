"""Sheets on runs beside each other: precision, differences, systems."""

from __future__ import annotations

from dlbench.report.model import Report
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import (
    DASH,
    basis_text,
    figure_text,
    number_text,
    optional_figure,
    place_text,
    runs_text,
    times_text,
)
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views.precision.model import PrecisionComparison, PrecisionRow, RunDifference

MAX_GROUPS = 10
"""Columns of the matrix; further groups are in the table for programs."""
MAX_SHOWN = 60
"""Keys that are printed."""

KIND_TITLES = {"registered": "setting", "setting": "setting", "tag": "tag", "environment": "environment"}


def group_names(report: Report) -> dict[str, str]:
    """A letter or two for each group, by id: A, B, ..., Z, AA, AB."""
    return {group.id: _letters(place) for place, group in enumerate(report.groups)}


def _letters(place: int) -> str:
    head, last = divmod(place, 26)
    return (_letters(head - 1) if head else "") + chr(ord("A") + last)


# Precision


def precision_sheets(report: Report) -> list[Sheet]:
    """Each comparison, and all of them for programs."""
    rows = [_precision_row(found, row) for found in report.precisions for row in found.rows]
    return [
        Sheet(
            name="precision" if not place else f"precision-{_letters(place).lower()}",
            title=found.label,
            text=_precision(found),
            caption=found.caption,
            columns=tuple(rows[0]) if not place else (),
            rows=tuple(rows) if not place else (),
            in_terminal=True,
        )
        for place, found in enumerate(report.precisions)
    ]


def _precision(found: PrecisionComparison) -> Table:
    with_joules = any(row.energy_per_sample for row in found.rows)
    with_quality = any(row.quality or row.num_reached is not None for row in found.rows)
    header = ["At", "Precision", f"Throughput, {found.sample_unit}/s", f"Over {found.reference}", "Interval"]
    header += ["Peak memory of a rank", f"Over {found.reference}"]
    header += ["J per sample", f"Over {found.reference}"] * with_joules
    header += ["Loss of the last step"] + ["Quality at the end"] * with_quality
    rows: Table = [tuple(header)]
    for row in found.rows:
        cells = [
            place_text(row.ranks, row.nodes),
            row.precision,
            figure_text(row.throughput),
            DASH if row.ratio is None else times_text(row.ratio),
            (basis_text(row.ratio) + (", interleaved" if row.is_paired else ""))
            if row.ratio is not None
            else f"reference, {runs_text(row.num_runs)}",
            figure_text(row.peak),
            DASH if row.memory_ratio is None else times_text(row.memory_ratio),
        ]
        if with_joules:
            joules = row.energy_per_sample
            cells.append("not measured" if joules is None else f"{figure_text(joules)} ({row.energy_of})")
            cells.append(DASH if row.energy_ratio is None else times_text(row.energy_ratio))
        cells.append(_loss(row))
        if with_quality:
            reached = "" if row.num_reached is None else f"; {row.num_reached} of {runs_text(row.num_runs)} reached"
            cells.append(optional_figure(row.quality) + reached)
        rows.append(tuple(cells))
    return rows


def _loss(row: PrecisionRow) -> str:
    bad = f"not finite in {runs_text(row.num_not_finite)}" if row.num_not_finite else ""
    overflow = ""
    if row.overflow_steps is not None and row.overflow_steps.value > 0:
        overflow = f"{number_text(row.overflow_steps.value, 'messages')} steps left out for overflow"
    told = figure_text(row.loss) if row.loss is not None else ""
    return "; ".join(filter(None, [told, bad, overflow])) or "not known"


def _precision_row(found: PrecisionComparison, row: PrecisionRow) -> dict[str, Cell]:
    return {
        "comparison": found.id,
        "reference": found.reference,
        "precision": row.precision,
        "in_force": row.in_force,
        "ranks": row.ranks,
        "nodes": row.nodes,
        **figure_columns("throughput", row.throughput),
        **figure_columns("throughput_ratio", row.ratio),
        "runs": row.num_runs,
        "interleaved": row.is_paired,
        **figure_columns("peak_bytes", row.peak),
        **figure_columns("peak_ratio", row.memory_ratio),
        **figure_columns("energy_per_sample_j", row.energy_per_sample),
        "energy_of": row.energy_of,
        **figure_columns("energy_ratio", row.energy_ratio),
        **figure_columns("last_loss", row.loss),
        "runs_not_finite": row.num_not_finite,
        **figure_columns("last_quality", row.quality),
        "runs_reached": row.num_reached,
    }


# Differences


def difference_sheets(report: Report) -> list[Sheet]:
    """What differs, and which group has what."""
    names = group_names(report)
    sheets = [
        Sheet(
            name="differences",
            title="What differs",
            text=_differences(report, names),
            caption="The most telling first: settings, tags, environment, and last what differs by nature (hosts, "
            "jobs, rank counts). Groups by letter; their names stand in the next table. For two runs or two sets of "
            "runs: dlbench compare A B.",
            columns=("kind", "key", "value", "runs", "groups", "expected", "keeps_apart"),
            rows=tuple(
                {
                    "kind": item.kind,
                    "key": item.key,
                    "value": value.value,
                    "runs": value.num_runs,
                    "groups": " ".join(value.groups),
                    "expected": item.expected,
                    "keeps_apart": item.keeps_apart,
                }
                for item in report.differences
                for value in item.values
            ),
        )
    ]
    if len(report.groups) > 1:
        sheets.append(_matrix(report, names))
    return sheets


def _differences(report: Report, names: dict[str, str]) -> Table:
    rows: Table = [("Key", "Kind", "Value", "Runs", "Groups", "Runs are compared")]
    for item in report.differences[:MAX_SHOWN]:
        kind = KIND_TITLES[item.kind] + (", differs by nature" if item.expected else "")
        compared = "not across it" if item.keeps_apart else "across it"
        for value in item.values:
            groups = ", ".join(sorted(names.get(group, "?") for group in value.groups)[:MAX_GROUPS])
            more = f" and {len(value.groups) - MAX_GROUPS} more" if len(value.groups) > MAX_GROUPS else ""
            rows.append((item.key, kind, value.value or "empty", str(value.num_runs), groups + more, compared))
        if item.num_values > len(item.values):
            more_values = f"and {item.num_values - len(item.values)} values more"
            rows.append((item.key, kind, more_values, DASH, DASH, compared))
    if len(report.differences) > MAX_SHOWN:
        rows.append((f"and {len(report.differences) - MAX_SHOWN} keys more", *([DASH] * 5)))
    return rows


def _matrix(report: Report, names: dict[str, str]) -> Sheet:
    groups = report.groups[:MAX_GROUPS]
    rows: Table = [("Key", *(f"{names[group.id]}: {group.label}" for group in groups))]
    for item in report.differences[:MAX_SHOWN]:
        rows.append((item.key, *(_of_group(item, group.id) for group in groups)))
    hidden = len(report.groups) - len(groups)
    more = f" {hidden} groups more have no column; the table of what differs names them." if hidden else ""
    return Sheet(
        name="differences-matrix",
        title="Which group has what",
        text=rows,
        caption=f"A cell names the values of the group's runs, the most frequent of all runs first.{more}",
    )


def _of_group(item: RunDifference, group: str) -> str:
    values = [value.value or "empty" for value in item.values if group in value.groups]
    if len(values) > 3:
        return f"{len(values)} values"
    return "; ".join(values) if values else DASH


# Systems


def system_sheets(report: Report) -> list[Sheet]:
    """All systems in one table, a column each."""
    if not report.systems:
        return []
    titles = list(dict.fromkeys(title for system in report.systems for title, _ in system.fields))
    told = [dict(system.fields) for system in report.systems]
    rows: Table = [("What", *(f"{system.name}: {system.title}" for system in report.systems))]
    rows.append(("Runs", *(str(system.num_runs) for system in report.systems)))
    rows.append(("Hosts", *(_hosts(system.hosts, system.num_hosts) for system in report.systems)))
    rows += [(title, *(own.get(title, "not recorded") for own in told)) for title in titles]
    rows.append(("Not recorded", *(", ".join(system.unknown) or "nothing" for system in report.systems)))
    return [
        Sheet(
            name="systems",
            title="Systems",
            text=rows,
            caption="In the fields of MLPerf's system descriptions, from plans and records; figures of a node are "
            "those of rank 0's node. What nobody recorded is named, and a person may fill it in: dlbench export "
            "system RUN writes all fields.",
            columns=("system", "title", "runs", "hosts", "what", "value"),
            rows=tuple(
                {
                    "system": system.name,
                    "title": system.title,
                    "runs": system.num_runs,
                    "hosts": system.num_hosts,
                    "what": title,
                    "value": text,
                }
                for system in report.systems
                for title, text in (*system.fields, *((name, "not recorded") for name in system.unknown))
            ),
        )
    ]


def _hosts(hosts: tuple[str, ...], count: int) -> str:
    more = f" and {count - len(hosts)} more" if count > len(hosts) else ""
    return f"{count}: {', '.join(hosts)}{more}"
