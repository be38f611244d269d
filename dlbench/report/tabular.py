"""Tables of a report as rows of text, header first: what Markdown, the terminal and the HTML page print alike."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.model import Environment, Group, Report
from dlbench.report.wording import (
    DASH,
    PART_TITLES,
    basis_text,
    figure_text,
    lost_text,
    optional,
    percent,
    place_text,
)

Table = list[tuple[str, ...]]


def aligned(rows: Table) -> list[str]:
    """A table as lines of text, columns to the right, for the terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]


def scaling(group: Group) -> Table:
    """Throughput, speed-up and efficiency of every point."""
    unit = group.sample_unit
    with_fraction = any(point.serial_fraction for point in group.points)
    header = ["Ranks", "Nodes", f"Throughput, {unit}/s", f"Each rank, {unit}/s", "Speed-up", "Ideal", "Efficiency"]
    header += ["Step, median", "Step, p95", "Interval", *(["Serial fraction"] if with_fraction else [])]
    rows: Table = [tuple(header)]
    for point in group.points:
        row = [
            str(point.ranks),
            str(point.nodes),
            figure_text(point.throughput),
            figure_text(point.throughput_per_rank),
            figure_text(point.speedup),
            f"{point.ideal_speedup:.4g}",
            figure_text(point.efficiency),
            figure_text(point.step),
            figure_text(point.step_p95),
            basis_text(point.throughput) + (", baseline" if point.is_baseline else ""),
        ]
        if with_fraction:
            row.append(figure_text(point.serial_fraction) if point.serial_fraction else DASH)
        rows.append(tuple(row))
    return rows


def parts(group: Group) -> Table:
    """Seconds a step of each part, a column a point; the last line is the sum."""
    rows: Table = [("Part", *(place_text(point.ranks, point.nodes) for point in group.points))]
    for index, part in enumerate(group.baseline.parts):
        rows.append((PART_TITLES[part.name], *(figure_text(p.parts[index].seconds) for p in group.points)))
        if part.name == "exchange":
            rows.append(("of it waiting for slower ranks", *(figure_text(p.exchange_wait) for p in group.points)))
    rows.append(("sum: mean step", *(figure_text(point.whole.seconds) for point in group.points)))
    return rows


def lost(group: Group) -> Table:
    """Points of the ideal lost to each part, a column a point; only a header for a group of one point."""
    others = group.points[1:]
    rows: Table = [("Part", *(place_text(point.ranks, point.nodes) for point in others))]
    if not others:
        return rows
    for index, part in enumerate(group.baseline.parts):
        rows.append((PART_TITLES[part.name], *(lost_text(point.parts[index].lost) for point in others)))
    rows.append(("sum: lost", *(lost_text(point.whole.lost) for point in others)))
    rows.append(("efficiency (of means)", *(percent(1 - point.whole.lost.value) for point in others)))
    return rows


def overview(groups: Sequence[Group]) -> Table:
    """The largest point of each group, a line a group."""
    rows: Table = [("Group", "At", "Throughput", "Efficiency", "Step, median", "Interval")]
    for group in groups:
        last = group.largest
        rows.append(
            (
                group.label,
                place_text(last.ranks, last.nodes),
                f"{figure_text(last.throughput)} {last.throughput.unit}",
                "baseline" if last.is_baseline else figure_text(last.efficiency),
                figure_text(last.step),
                basis_text(last.throughput),
            )
        )
    return rows


def runs(report: Report) -> Table:
    """All runs, one line each."""
    header = ("Run", "State", "Ranks", "Nodes", "Repeat", "Samples/s", "Step, median", "Step, p95", "Scatter")
    rows: Table = [(*header, "Doubts", "Configuration")]
    rows += [
        (
            run.run_id,
            run.state,
            str(run.ranks),
            str(run.nodes),
            str(run.repeat),
            optional(run.throughput, "ratio"),
            optional(run.step_median_s, "s"),
            optional(run.step_p95_s, "s"),
            optional(run.step_cv, "fraction"),
            str(len(run.warnings)) if run.warnings else "none",
            run.configuration,
        )
        for run in report.runs
    ]
    return rows


def without_figures(report: Report) -> Table:
    """Runs that yield no figure, and why."""
    rows: Table = [("Run", "State", "Ranks", "Why")]
    rows += [(run.run_id, run.state, str(run.ranks), run.story) for run in report.without_figures]
    return rows


def environment(found: Environment) -> Table:
    """What all runs share, and each value where they differ."""
    rows: Table = [("Key", "Value", "Runs")]
    for item in found.differences:
        mark = "" if item.expected else " (differs)"
        rows += [(item.key + mark, value, str(len(ids))) for value, ids in item.values]
    rows += [(key, value, "all") for key, value in found.common]
    return rows
