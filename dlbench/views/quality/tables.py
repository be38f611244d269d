"""Tables on quality, noise scale and the use of the hardware as rows of text, header first; see `tabular`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.wording import (
    DASH,
    basis_text,
    figure_text,
    number_text,
    optional_figure,
    percent,
    place_text,
    reached_text,
    times_text,
)
from dlbench.stats.estimates import Estimate
from dlbench.units import format_number
from dlbench.views.exchange import tables as exchange_tables
from dlbench.views.noise.numbers import NoisePoint
from dlbench.views.quality.numbers import Quality, QualityPoint
from dlbench.views.utilisation.numbers import Utilisation


def quality(found: Quality) -> Table:
    """What the runs at each rank count reached, and how soon."""
    rows: Table = [
        (
            *("At", "Global batch", "Reached", "Time to quality", "Of it, last interval", "Epochs", "Samples"),
            *(f"Best {found.metric_title}", "Final", "Interval"),
        )
    ]
    for point in found.points:
        rows.append(
            (
                place_text(point.ranks, point.nodes),
                f"{point.global_batch:,}",
                _reached(point),
                optional_figure(point.time),
                optional_figure(point.resolution),
                optional_figure(point.epochs),
                optional_figure(point.samples),
                optional_figure(point.best),
                optional_figure(point.final),
                basis_text(point.time) if point.time else DASH,
            )
        )
    return rows


def _reached(point: QualityPoint) -> str:
    invalid = f", {point.num_invalid} invalid" if point.num_invalid else ""
    return reached_text(point.num_reached, point.num_runs) + invalid


def factors(found: Quality) -> Table:
    """Why the time to quality differs from the baseline's; only a header unless all runs reached the target."""
    rows: Table = [("At", "Sooner by", "= throughput", "x samples needed", "x rest", "Interval")]
    for point in found.points[1:]:
        if point.factors is None:
            continue
        parts = (point.factors.speedup, point.factors.throughput, point.factors.samples, point.factors.rest)
        basis = basis_text(point.factors.speedup)
        rows.append((place_text(point.ranks, point.nodes), *map(times_text, parts), basis))
    return rows


def account(found: Quality) -> Table:
    """What the time until the target (or the end) went to, means over runs; and what was trained in all."""
    rows: Table = [("Mean time", *(place_text(point.ranks, point.nodes) for point in found.points))]
    lines: tuple[tuple[str, Callable[[QualityPoint], Estimate | None]], ...] = (
        ("training steps", lambda point: point.training),
        ("evaluation", lambda point: point.evaluation),
        ("checkpoints, waits", lambda point: point.other),
        ("sum: until the target or the end", lambda point: point.whole),
    )
    rows += [(title, *(_share(pick(point), point.whole) for point in found.points)) for title, pick in lines]
    return rows


def _share(figure: Estimate | None, whole: Estimate | None) -> str:
    if figure is None or whole is None or figure is whole or not whole.value:
        return optional_figure(figure)
    return f"{figure_text(figure)}, {percent(figure.value / whole.value)}"


def trained(group: Group) -> Table:
    """Throughput, epochs and time in training steps: each row is one equation that was checked."""
    rows: Table = [("At", f"Throughput, {group.sample_unit}/s", "Epochs trained", "Time in training steps")]
    rates = {(point.ranks, point.nodes): point.throughput for point in group.points}
    for point in group.quality.points if group.quality else ():
        if point.trained_epochs is None or point.trained is None:
            rows.append(
                (place_text(point.ranks, point.nodes), "they contradict each other, see the doubts", DASH, DASH)
            )
            continue
        rate = rates.get((point.ranks, point.nodes))
        cells = map(optional_figure, (rate, point.trained_epochs, point.trained))
        rows.append((place_text(point.ranks, point.nodes), *cells))
    return rows


def batches(found: Quality) -> Table:
    """Statistical efficiency: what each global batch needs."""
    rows: Table = [
        ("Global batch", "Reached", "Epochs to quality", "Samples to quality", "Samples, against the smallest")
    ]
    rows += [
        (
            f"{batch.global_batch:,}",
            reached_text(batch.num_reached, batch.num_runs),
            optional_figure(batch.epochs),
            optional_figure(batch.samples),
            DASH if batch.against_smallest is None else f"{batch.against_smallest:.2f}x",
        )
        for batch in found.batches
    ]
    return rows


def noise(points: Sequence[NoisePoint]) -> Table:
    """The gradient noise scale beside the global batch."""
    rows: Table = [("At", "Global batch", "Noise scale, samples", "Batch / noise scale", "From", "What that means")]
    rows += [
        (
            place_text(point.ranks, point.nodes),
            f"{point.global_batch:,}",
            optional_figure(point.noise_scale),
            DASH if point.share is None else f"{point.share:.2g}",
            point.basis,
            point.advice,
        )
        for point in points
    ]
    return rows


def utilisation(group: Group, found: Utilisation) -> Table:
    """Achieved rate, MFU and estimated time to train of every point; columns without a value are left out."""
    points = found.points
    columns: list[tuple[str, list[str]]] = [
        ("At", [place_text(point.ranks, point.nodes) for point in points]),
        (f"Throughput, {group.sample_unit}/s", [figure_text(point.throughput) for point in points]),
    ]
    if found.training_flops_per_sample:
        columns.append(("Model TFLOP/s a rank", [optional_figure(point.achieved) for point in points]))
    if any(point.mfu for point in points):
        peaks = [DASH if point.peak_tflops is None else format_number(point.peak_tflops) for point in points]
        columns.append(("Peak TFLOP/s a rank", peaks))
        columns.append(("MFU", [optional_figure(point.mfu) for point in points]))
    if found.recipe:
        columns.append(("Time to train, estimate", [optional_figure(point.training_time) for point in points]))
    columns.append(("Interval", [basis_text(point.throughput) for point in points]))
    return [tuple(title for title, _ in columns), *zip(*(cells for _, cells in columns), strict=True)]


def value(found: Quality, number: float) -> str:
    """A value of the metric as text."""
    return number_text(number, found.unit)


_PREDICTION = exchange_tables.PREDICTION_CAPTION

Section = tuple[str, Table, str]
"""Title, table, and a line on what it holds."""


def sections(group: Group) -> list[Section]:
    """All tables of a group on the exchange, quality, noise scale and the hardware, for formats without views."""
    found: list[Section] = []
    if group.exchange:
        found.append(("Gradient exchange", exchange_tables.what_ran(group), group.caption))
        found.append(("Communication", exchange_tables.times(group), group.caption))
        found.append(("Exposed communication and the best possible", exchange_tables.predicted(group), _PREDICTION))
    if group.quality is not None:
        found.append(("Quality", quality(group.quality), quality_caption(group, group.quality)))
        found.append(("Faster steps, more samples", factors(group.quality), FACTORS_CAPTION))
        found.append(("Where the time to quality goes", account(group.quality), group.parts_caption))
        found.append(("Throughput, epochs and time", trained(group), TRAINED_CAPTION))
        found.append(("What each global batch needs", batches(group.quality), BATCHES_CAPTION))
    if group.noise:
        found.append(("Gradient noise scale", noise(group.noise), NOISE_CAPTION))
    if group.utilisation is not None:
        title = "Utilisation and time to train"
        found.append((title, utilisation(group, group.utilisation), utilisation_caption(group.utilisation)))
    return [section for section in found if len(section[1]) > 1]


def quality_caption(group: Group, found: Quality) -> str:
    """Target, limit and the predictor without skill, and the conditions."""
    return f"{quality_goal(found)}; {group.caption}"


def quality_goal(found: Quality) -> str:
    """What was wanted, until when, and what no skill reaches."""
    bound = "at least" if found.higher_is_better else "at most"
    return (
        f"Target: {found.metric_title} {bound} {value(found, found.target)}, within {found.limit}; without skill: "
        f"{value(found, found.predictor_value)} ({found.predictor})"
    )


FACTORS_CAPTION = (
    "Ratios of geometric means over runs, so that the three multiply to the first exactly. Samples needed: those of "
    "the baseline over those here, below 1 where more were needed. Rest: evaluation, checkpoints, warm-up steps, waits."
)
TRAINED_CAPTION = (
    "Medians over runs, until each run's last evaluation. Throughput x time = samples was checked in each run, "
    "within 5 %."
)
BATCHES_CAPTION = (
    "Epochs do not depend on the machine, but on batch, learning rate and schedule. Medians over the runs that "
    "reached the target."
)
NOISE_CAPTION = (
    "A guide, not a measurement of what another batch needs: it supposes a learning rate tuned to each batch, and a "
    "noise scale that does not change; it usually grows during training."
)


def utilisation_caption(found: Utilisation) -> str:
    """Where FLOPs, peak and the length of the training are from."""
    parts = []
    if found.training_flops_per_sample:
        flops = format_number(found.training_flops_per_sample / 1e9)
        parts.append(f"Model FLOPs of training on a sample: {flops} GFLOP. Peak: {found.peak}.")
    if found.recipe:
        parts.append(f"Time to train: {found.recipe}")
    return " ".join(parts)
