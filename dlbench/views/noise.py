"""The gradient noise scale against the global batch: whether a larger batch would still save steps. McCandlish et al.,
"An Empirical Model of Large-Batch Training" (2018): with B the batch and B_n the noise scale, training takes S = S_min
(1 + B_n/B) steps and E = E_min (1 + B/B_n) samples, for learning rates tuned to each batch. Measured is their simple
noise scale, tr(Sigma)/|G|^2, over the run. Estimates are averaged over the runs before their ratio is taken (appendix
A.1): a run that is left out because its own ratio has no meaning would bias it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.records.record import NoiseScale
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet, column, columns_of
from dlbench.report.wording import figure_text, percent, repeat_text, runs_text, times_value
from dlbench.specs.workload import Workload
from dlbench.stats.estimates import Estimate, mean_estimate, placed
from dlbench.stats.pairing import RunKey
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup, place_columns, place_of

Advice = Literal["pays", "balanced", "wasteful", "undecided", "insufficient", "unknown"]

PAYS_BELOW = 0.5  # Share of the noise scale below which a doubled batch saves a third of the steps or more.
WASTEFUL_ABOVE = 2.0  # Share above which it saves less than a sixth of them.


@dataclass(frozen=True, kw_only=True)
class NoisePoint(AtPlace):
    """The noise scale at one scaling point."""

    global_batch: int = field(metadata=column("Global batch", unit="samples"))
    noise_scale: Estimate | None = field(metadata=column("Noise scale, samples", "noise_scale_samples"))
    """Samples: the global batch over `share`; None if that is not known to be above 0."""
    share: Estimate | None = field(metadata=column("Batch / noise scale", "batch_over_noise_scale"))
    """Global batch over noise scale (ratio of means over runs); None if it is not above 0."""
    advice: str  # The consequence for a larger batch, or why it is unknown, in words.
    basis: str = field(metadata=column("From", ""))
    """Batch sizes behind the estimate, and the fewest steps behind that of a run, in words."""


def _point(point: Point, by_run: Mapping[RunKey, NoiseScale], batch: int) -> NoisePoint:
    share, measured = noise_share(by_run, batch), list(by_run.values())
    noise_scale = None
    if share is not None and (share.low is None or share.low > 0):
        noise_scale = share.mapped(lambda batches: batch / batches, "samples")
    first, fewest_steps = measured[0], min(noise.steps for noise in measured)
    return NoisePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        global_batch=batch,
        noise_scale=noise_scale,
        share=share,
        advice=_advice_text(share, len(measured)),
        basis=f"batches of {first.small_batch:,} and {first.large_batch:,} samples, {fewest_steps:,} steps per run",
    )


def noise_share(measured: Mapping[RunKey, NoiseScale], batch: int) -> Estimate | None:
    """Returns batch over noise scale: batch x mean |G|^2 / mean tr(Sigma); None if one of the means is not above 0. A
    run moves it by (batch x |G|^2 - share x tr) / mean tr (delta method).
    """
    norms2, traces = {}, {}
    for key, noise in measured.items():
        if noise.gradient_norm2 is not None and noise.covariance_trace is not None:
            norms2[key], traces[key] = batch * noise.gradient_norm2, noise.covariance_trace
    norm2, trace = sum(norms2.values()), sum(traces.values())
    if norm2 <= 0 or trace <= 0:
        return None
    share = norm2 / trace
    moved = {key: share + (norms2[key] - share * traces[key]) * len(traces) / trace for key in traces}
    return mean_estimate(moved, "ratio")


def model_noise_share(workload: Workload, table: RunTable) -> Estimate | None:
    """Returns 1 over the noise scale of a network, by all runs that recorded it: these are slower, in other groups."""
    same = (workload.name, workload.model)
    runs = [run for run in table.runs.values() if (run.plan.workload.name, run.plan.workload.model) == same]
    return noise_share(_measured(runs, table), 1)


def _measured(runs: Sequence[Run], table: RunTable) -> dict[RunKey, NoiseScale]:
    with_record = [(table.keys[run.plan.run_id], run.record) for run in runs if run.record]
    return {key: record.noise_scale for key, record in with_record if record.noise_scale}


def samples_over(share: Estimate, large: int, small: int) -> Estimate:
    """Returns samples to a quality at one batch over those at another: E = E_min (1 + B / B_n). `share` is 1 / B_n."""

    def ratio(inverse_noise: float) -> float:
        inverse_noise = max(0.0, inverse_noise)
        return (1 + large * inverse_noise) / (1 + small * inverse_noise)

    return share.mapped(ratio, "ratio")


def _advice_text(share: Estimate | None, num_runs: int) -> str:
    if share is None:
        return (
            f"unknown: the mean estimate of the squared gradient or of its variance is not positive in "
            f"{runs_text(num_runs)}; more steps, or batches further apart, may give one"
        )
    text = f"the global batch is {figure_text(share)} of the noise scale"
    unknown = ""
    if num_runs > share.n:
        unknown = f"; {num_runs - share.n} of {num_runs} runs made no estimate"
    answer = advice(share)
    if answer == "insufficient":
        return f"{text}: {repeat_text(share)} to see whether larger batches pay{unknown}"
    if answer == "undecided":
        return f"{text}: whether larger batches pay is undecided{unknown}"
    word = {
        "pays": "larger batches still pay",
        "balanced": "a larger batch trades samples for steps about evenly",
        "wasteful": "larger batches mostly cost samples",
    }[answer]
    low, high = (doubled_batch(max(0.0, end or 0.0)) for end in (share.low, share.high))
    fewer = _span([1 - low[0], 1 - high[0]])
    extra_samples = _span([low[1] - 1, high[1] - 1])
    effect = f"{fewer} fewer steps, {extra_samples} more samples to the same quality"
    return f"{text}: {word} (twice the batch: {effect}){unknown}"


def _span(fractions: Sequence[float]) -> str:
    low, high = (percent(end, 0) for end in sorted(fractions))
    return high if low == high else f"{low.removesuffix(' %')} to {high}"


def advice(share: Estimate | None) -> Advice:
    """Returns whether a larger batch than one of `share` noise scales pays, if the interval decides it."""
    if share is None:
        return "unknown"
    position = placed(share, PAYS_BELOW, WASTEFUL_ABOVE)
    if position in ("undecided", "insufficient"):
        return position
    answers: dict[str, Advice] = {"below": "pays", "within": "balanced", "above": "wasteful"}
    return answers[position]


def doubled_batch(share: float) -> tuple[float, float]:
    """Returns steps and samples to the same quality with twice the batch of `share` noise scales, as ratios: S = S_min
    (1 + 1/share), E = E_min (1 + share).
    """
    return (share + 0.5) / (share + 1), (1 + 2 * share) / (1 + share)


class NoiseView(GroupView):
    """The gradient noise scale: it says whether a larger batch would still save steps."""

    id = "noise"
    title = "Gradient noise scale"
    key = "noise"
    after = "energy"
    lack = "--set measure.noise_scale=true estimates it, at the cost of speed."

    def numbers(self, source: GroupSource) -> tuple[NoisePoint, ...]:
        points = []
        for point in source.group.points:
            runs = [source.table.runs[run_id] for run_id in point.run_ids]
            measured = _measured(runs, source.table)
            if measured:
                points.append(_point(point, measured, runs[0].plan.global_batch))
        return tuple(points)

    def shown(self, group: ReportGroup, points: tuple[NoisePoint, ...]) -> Section:
        sheet = Sheet(
            name="noise",
            title="Noise scale and global batch",
            columns=(*place_columns(), *columns_of(NoisePoint), Column("", "Consequence", "advice")),
            rows=points,
            caption="A guide: it assumes a learning rate tuned to each batch.",
        )
        last = points[-1]
        headline = f"unknown at {place_of(last)}"
        if last.share is not None:
            headline = f"global batch is {times_value(last.share)} the noise scale at {place_of(last)}"
        return Section(headline=headline, sheets=(sheet,))
