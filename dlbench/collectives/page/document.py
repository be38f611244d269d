"""The report of the collective benchmark, one fit, and predictions, each as a `Document`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import dlbench
from dlbench.collectives.page import tables, words
from dlbench.collectives.page.charts import group_charts
from dlbench.collectives.page.report import CollectivesReport, GroupReport
from dlbench.collectives.results.choice import STAY_WITHIN
from dlbench.collectives.results.fits import Fit
from dlbench.collectives.results.predictions import Prediction, Predictions
from dlbench.report.document import Card, Document, Section, remark
from dlbench.report.runs import without_figures
from dlbench.report.table import text_sheet
from dlbench.report.wording import basis_text, figure_text, interval_text, percent, runs_text, value_text
from dlbench.units import format_bytes


def document_of(report: CollectivesReport) -> Document:
    """The whole report."""
    return Document(
        title=report.title,
        dlbench_version=report.dlbench_version,
        as_of=report.as_of,
        meta=(f"{runs_text(len(report.runs))}, {len(report.without_figures)} without figures.",),
        sections=(
            _summary(report),
            *map(_group, report.groups),
            *(_fit(fit, number) for number, fit in enumerate(report.fits)),
            *_runs(report),
            Section(
                id="methods",
                title="How the numbers are made",
                level="appendix",
                facts=report.methods,
                are_methods=True,
                brief=(),
            ),
        ),
        data=report,
        always=tables.always(),
        file_prefix="comm-",
        command="dlbench comm report RUNS",
    )


def fit_document(fit: Fit) -> Document:
    """One fit alone."""
    return Document(title=words.TITLE, dlbench_version=dlbench.__version__, sections=(_fit(fit, 0),), data=fit)


def predictions_document(found: Predictions) -> Document:
    """What a network expects at each layout."""
    network = found.network
    basis = "intervals over runs" if network.draws else "too few runs for intervals"
    return Document(
        title=f"Predicted by the fitted costs of {network.system}, {network.transport} "
        f"({network.num_points} points; {basis})",
        dlbench_version=dlbench.__version__,
        sections=tuple(_prediction(found, one) for one in found.predictions),
        data=found,
        command="dlbench comm predict NETWORK --ranks N",
    )


def _summary(report: CollectivesReport) -> Section:
    empty: tuple[str, ...] = ()
    if not report.groups:
        more = "Below, each run with the reason." if report.runs else "There are no runs here."
        empty = (f"No run has figures. {more}",)
    return Section(
        id="summary", title="Summary", level="answer", words=empty, cards=tuple(map(_card, report.groups)), brief=empty
    )


def _card(group: GroupReport) -> Card:
    last = group.best[-1]
    rate_name = "busbw" if group.ranks > 1 else "algbw"
    return Card(
        title=group.label,
        link=f"group-{group.id}",
        big=value_text(last.rate),
        small=(
            f"GB/s {rate_name} at {format_bytes(last.num_bytes)}, {last.title}",
            *filter(None, (interval_text(last.rate), basis_text(last.rate))),
        ),
        words=(group.verdict,),
        warnings=tuple(doubt.text for doubt in group.doubts if doubt.severity == "serious"),
        warnings_link=f"marks-group-{group.id}",
        is_clear=True,
    )


def _group(group: GroupReport) -> Section:
    facts = tuple((one.title, one.value) for one in group.conditions)
    last = group.best[-1]
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=f"{group.caption}.",
        facts=facts,
        marks=(
            *(remark(one.severity, one.text, len(one.runs)) for one in group.doubts),
            *(remark("note", f"not measured: {text}") for text in group.not_measured),
        ),
        sections=tuple(_of_group(group)),
        brief=(_conditions_line(group), group.verdict),
        is_group=True,
        overview=(
            ("At", format_bytes(last.num_bytes)),
            ("Fastest", last.title),
            ("Time, median", figure_text(last.time)),
            ("Rate, GB/s", figure_text(last.rate)),
            ("Interval", basis_text(last.time)),
        ),
        where={name: getattr(group, "id" if name == "group" else name) for name in tables.GROUP_COLUMNS},
    )


def _conditions_line(group: GroupReport) -> str:
    """What the label does not say, for the terminal."""
    shown = {one.name: one.value for one in group.conditions}
    cores = f"{shown['cores']} core{'' if shown['cores'] == '1' else 's'} per rank"
    parts = (shown["device"], cores, shown["launcher"], f"hosts {shown['hosts']}", runs_text(group.num_runs))
    return ", ".join(parts)


def _of_group(group: GroupReport) -> Iterator[Section]:
    fusion = words.fusion_text(group.fusion)
    same = tuple(map(words.same_text, group.same_messages))
    least = percent(STAY_WITHIN, 0)
    lead = f"Lead: time of the next over that of the fastest. Clear: beyond scatter, and more than {least}."
    yield Section(
        id=f"choice-{group.id}",
        title="Which algorithm",
        level="answer",
        words=(group.advice, fusion),
        caption=lead,
        sheets=(
            tables.best_sheet(group),
            *((tables.crossovers_sheet(group),) if group.crossovers else ()),
        ),
        notes=same,
        brief=(fusion, *same),
    )
    is_drawn = len(group.best) > 1
    yield Section(
        id=f"sizes-{group.id}",
        title="Over size",
        level="answer",
        caption="In brackets: the interval. Libraries are dashed.",
        words=() if is_drawn else ("One size only: two or more (--sizes 1KiB:64MiB) are drawn over size.",),
        charts=lambda: group_charts(group) if is_drawn else [],
        brief=(),
    )
    kinds = dict.fromkeys(basis_text(row.time) for series in group.series for row in series.rows)
    last = group.best[-1]
    yield Section(
        id=f"times-{group.id}",
        title="Times",
        headline=f"{last.title}: {value_text(last.time)} at {format_bytes(last.num_bytes)}",
        caption=f"Intervals: {', '.join(kinds)}.",
        sheets=(tables.matrix_sheet(group),),
        brief=(),
    )
    yield from _ratios(group)
    yield Section(
        id=f"series-{group.id}",
        title="Every series",
        level="appendix",
        headline=f"{len(group.series)} series: rates, skew, messages, bytes, predictions",
        about=(
            "Rates in GB/s (1e9 bytes per second). Bytes sent: the most of any rank, counted. Predicted: by a fit "
            "without the point.",
        ),
        sheets=tuple(map(tables.series_sheet, group.series)),
        brief=(),
    )
    if group.rejected:
        yield Section(
            id=f"rejected-{group.id}",
            title="Points without figures",
            headline=f"{len(group.rejected)} points",
            sheets=(tables.rejected_sheet(group),),
            brief=(),
        )


def _ratios(group: GroupReport) -> Iterator[Section]:
    own = list(dict.fromkeys(one.own for one in group.ratios))
    if own:
        # Unfolded is ring, or else the first one.
        shown = next((name for name in own if name.startswith("ring ")), own[0])
        yield Section(
            id=f"ratios-{group.id}",
            title="dlbench's algorithms against libraries",
            headline=_against(group),
            caption="Above 1, the algorithm is faster: time of the library over its own.",
            sheets=tuple(tables.ratio_sheet(group, name, is_shown=name == shown) for name in own),
            brief=(),
        )


def _against(group: GroupReport) -> str:
    """At how many sizes the library is the fastest of all."""
    libraries = {series.title for series in group.series if series.is_library}
    won = sum(one.title in libraries for one in group.best)
    return f"a library is the fastest at {won} of {len(group.best)} sizes"


def _fit(fit: Fit, number: int) -> Section:
    return Section(
        id=f"fit-{number}",
        title=fit.label,
        headline=_fit_headline(fit),
        sheets=(tables.costs_sheet(fit), tables.errors_sheet(fit), tables.lines_sheet(fit)),
        brief=(),
        where={name: getattr(fit, name) for name in tables.FIT_COLUMNS},
    )


def _fit_headline(fit: Fit) -> str:
    if not fit.errors:
        return "lines of libraries"
    poor = sum(one.is_poor for one in fit.errors)
    more = f"; {poor} algorithms missed, no advice from them" * bool(poor)
    return f"median error {percent(fit.errors[0].median)}, worst {percent(fit.errors[0].worst)}{more}"


def _runs(report: CollectivesReport) -> Iterator[Section]:
    """What was not fitted, all runs, those without figures, and what they ran in."""
    if report.unfitted:
        marks = tuple(remark("note", text) for text in report.unfitted)
        yield Section(id="not-fitted", title="Not fitted", marks=marks)
    if report.runs:
        yield Section(id="runs", title="Runs", level="appendix", sheets=(tables.runs_sheet(report),))
    yield from without_figures(report.without_figures, report.damaged)
    if report.environment:
        title = "Environment that all runs with figures share"
        sheet = text_sheet("environment", title, ("Key", "Value"), report.environment)
        yield Section(
            id="environment",
            title="Environment",
            level="appendix",
            sheets=(dataclasses.replace(sheet, is_folded=True),),
        )


def _prediction(found: Predictions, one: Prediction) -> Section:
    extrapolated = words.extrapolated_text(found, one)
    advice, fusion = words.prediction_advice(found, one), words.predicted_fusion_text(found, one)
    changes = (f"From {words.about(size)}: {after} instead of {before}." for size, before, after in one.crossovers)
    return Section(
        id=f"ranks-{one.ranks}",
        title=words.layout_text(found, one),
        level="answer",
        about=extrapolated,
        words=(advice, fusion),
        sheets=(tables.fastest_predicted_sheet(found, one),) if one.series else (),
        sections=()
        if not one.series
        else (
            Section(
                id=f"all-{one.ranks}",
                title="Every algorithm",
                sheets=(tables.predictions_sheet(found, one),),
                notes=(*changes, words.poor_text(one)),
            ),
        ),
        brief=(advice, *extrapolated, words.poor_text(one), fusion),
        is_group=True,
    )
