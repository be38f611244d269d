"""Predictions of collectives as a `Document`: times by size and algorithm, the fastest, and the fusion size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from dlbench.comm.predictions import CABLES, LayoutPrediction, Predictions, Price, usable_series
from dlbench.comm.wording import COLLECTIVE_TITLES, RATE_SHARE, largest_text, ranges_text
from dlbench.perfmodels.predictions import PRIOR_SCALE
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Pivot, Sheet
from dlbench.report.wording import optional, percent
from dlbench.units import format_bytes


@dataclass(frozen=True)
class PredictedTime:
    """A predicted time of one size, or of all gradients of a step as one message."""

    size: str
    name: str
    price: Price
    is_best: bool = False


def predictions_document(predictions: Predictions) -> Document:
    """Returns the predictions at each layout."""
    network = predictions.network
    basis = "intervals over runs" if network.draws else "too few runs for intervals"
    title = f"by the fitted costs of {network.system}, {network.transport} ({network.points_text}; {basis})"
    if network.transport == CABLES:
        title = f"by the cables of {network.system}; no figure is measured"
    return Document(
        title=f"Predicted {title}",
        sections=tuple(_layout_section(predictions, prediction) for prediction in predictions.predictions),
        data=predictions,
        command="dlbench comm predict NETWORK --ranks N",
    )


def _layout_section(predictions: Predictions, prediction: LayoutPrediction) -> Section:
    extrapolated, fusion = _extrapolated_text(predictions, prediction), _fusion_text(predictions, prediction)
    advice = ""
    if len(prediction.series) > 1:
        ranges = ranges_text(prediction.ranges, len(prediction.series))
        advice = f"Predicted fastest {COLLECTIVE_TITLES[predictions.collective]}: {ranges}."
    missed = [
        f"{series.name} (up to {percent(series.poor_error, 0)})" for series in prediction.series if series.poor_error
    ]
    poor = ""
    if missed:
        poor = f"Not recommended, because the error of the fit is too large: {', '.join(missed)}."
    every_algorithm = Section(
        id=f"all-{prediction.ranks}",
        title="Every algorithm",
        sheets=(times_sheet(predictions, prediction),),
        notes=(poor,),
    )
    return Section(
        id=f"ranks-{prediction.ranks}",
        title=layout_text(predictions, prediction),
        level="answer",
        about=extrapolated,
        words=(advice, fusion),
        sheets=(fastest_sheet(predictions, prediction),),
        sections=(every_algorithm,),
        brief=(advice, *extrapolated, poor, fusion),
        is_group=True,
    )


def times_sheet(predictions: Predictions, prediction: LayoutPrediction) -> Sheet[PredictedTime]:
    """Returns a line for each size, a column for each algorithm; the fastest of each line has a star."""
    times = []
    for index, size in enumerate(predictions.sizes):
        times += _times(format_bytes(size), prediction, [series.price(index) for series in prediction.series])
    if predictions.workload_bytes is not None:
        gradients = f"gradients, {_about(predictions.workload_bytes)}"
        times += _times(gradients, prediction, [series.workload_price for series in prediction.series])
    caption = ["* fastest"]
    if any(time.price.low is not None for time in times):
        caption[0] += "; in brackets 95 % intervals over runs, widened by the error of the fit"
    caption += _phi_text(times)
    if any(series.is_line for series in prediction.series):
        caption.append("(line): through sizes measured at this rank count")
    return Sheet(
        name="predictions",
        title="Predicted times",
        columns=(),
        rows=times,
        caption="; ".join(caption),
        pivot=Pivot(corner="Size", down=attrgetter("size"), across=attrgetter("name"), cell=_time_cell),
    )


def _times(size: str, prediction: LayoutPrediction, prices: Sequence[Price]) -> list[PredictedTime]:
    usable = usable_series(prediction.series)
    by_series = list(zip(prediction.series, prices, strict=True))
    best = min(price.seconds for series, price in by_series if series in usable)
    times = []
    for series, price in by_series:
        title = series.name
        if series.is_line:
            title += " (line)"
        if series.poor_error is not None:
            title += " (poor fit)"
        times.append(PredictedTime(size, title, price, price.seconds == best and series in usable))
    return times


def fastest_sheet(predictions: Predictions, prediction: LayoutPrediction) -> Sheet[PredictedTime]:
    """Returns only the fastest of each size, for the terminal."""
    by_name = {series.name: series for series in prediction.series}
    times = [
        PredictedTime(format_bytes(size), name, by_name[name].price(index))
        for index, (size, name) in enumerate(zip(predictions.sizes, prediction.best, strict=True))
    ]
    columns: tuple[Column[PredictedTime], ...] = (
        Column("", "Size", attrgetter("size")),
        Column("", "Predicted fastest", attrgetter("name")),
        Column("", "Time", attrgetter("price.seconds"), _time_cell),
    )
    caption = "; ".join(_phi_text(times))
    return Sheet(
        name="fastest", title="Predicted fastest", columns=columns, rows=times, caption=caption, in_terminal=True
    )


def _phi_text(times: Sequence[PredictedTime]) -> list[str]:
    if any((time.price.phi or 0) > 1 for time in times):
        return ["phi: flows that share a link, if more than one"]
    return []


def _time_cell(time: PredictedTime) -> Cell:
    seconds, low, high, phi = time.price
    text = optional(seconds, "s")
    if time.is_best:
        text += " *"
    if phi is not None and phi > 1:
        text += f" (phi {phi:.3g})"
    if low is None:
        return Cell(text, number=seconds)
    return Cell(text, f"[{optional(low, 's')}, {optional(high, 's')}]", number=seconds)


def layout_text(predictions: Predictions, prediction: LayoutPrediction) -> str:
    """Returns the title of a prediction: collective, type and layout."""
    groups = prediction.ranks // prediction.group_size
    where = ""
    if groups > 1:
        where = f" in {groups} groups of {prediction.group_size}"
    if prediction.leaf_size is not None and prediction.leaf_size < prediction.ranks:
        where += f" below {prediction.ranks // prediction.leaf_size} leaf switches"
    return f"{COLLECTIVE_TITLES[predictions.collective]} {predictions.dtype}, {prediction.ranks} ranks{where}"


def _extrapolated_text(predictions: Predictions, prediction: LayoutPrediction) -> tuple[str, ...]:
    lines = [f"{series.name}: {series.beyond}" for series in prediction.series if series.beyond]
    if not prediction.extrapolated and not lines:
        return ()
    sentences = [f"Extrapolated: {'; '.join([*prediction.extrapolated, *lines])}."]
    if prediction.extrapolated and any(not series.is_line for series in prediction.series):
        sentences.append(largest_text(prediction.largest_held_out))
    if prediction.model_error is not None:
        basis = "the error of the fit without the largest rank count"
        if prediction.largest_held_out is None:
            basis = f"experience ({percent(PRIOR_SCALE, 0)} per doubling), as no rank count was held out"
        intervals = "single runs have no intervals"
        if predictions.network.draws:
            intervals = "the intervals include this"
        sentences.append(
            f"At {prediction.ranks:,} ranks the error of the model may be a factor of {prediction.model_error:.2f} in "
            f"either direction (95 %), by {basis}; {intervals}."
        )
    return tuple(sentences)


def _fusion_text(predictions: Predictions, prediction: LayoutPrediction) -> str:
    if prediction.fusion_bytes is None:
        return ""
    size = _about(prediction.fusion_bytes)
    if not (prediction.ranges and prediction.ranges[-1].title):
        return f"No fusion size: no algorithm is clearly the fastest at {format_bytes(predictions.sizes[-1])}."
    if prediction.fusion_limit is not None:
        return (
            f"No fusion size: {size} is above {format_bytes(prediction.fusion_limit)}, the largest measured size; "
            "measure larger sizes."
        )
    basis = "measured" if prediction.fusion_is_measured else "predicted"
    text = (
        f"Recommended fusion size: {size}, the smallest message that reaches {percent(RATE_SHARE, 0)} of the "
        f"asymptotic rate of {prediction.fusion_of} (9 x start-up / time per byte of a line through its {basis} times)"
    )
    if prediction.fusion_messages is None or prediction.fusion_workload_s is None:
        return text + "."
    return (
        f"{text}: {prediction.fusion_messages:,} messages for {_about(predictions.workload_bytes or 0)} of gradients, "
        f"together {optional(prediction.fusion_workload_s, 's')} without overlap."
    )


def _about(num_bytes: float) -> str:
    if not math.isfinite(num_bytes):
        return "no size"
    value, unit = format_bytes(num_bytes).split(" ")
    return f"{float(f'{float(value):.3g}'):g} {unit}"
