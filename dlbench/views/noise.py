"""The gradient noise scale against the global batch: whether a larger batch would still save steps.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018): with B the global batch and B_n the noise scale,
training to a quality takes S = S_min (1 + B_n/B) steps and E = E_min (1 + B/B_n) samples. At B = B_n both are twice
their least. What is measured is their simple noise scale, tr(Sigma)/|G|^2, which equals B_n only where
all directions curve alike; it grows during training, and is a mean over the run here. The law holds for learning rates
that are tuned to each batch.

Both estimates of a run are unbiased, and either may come out below 0; so they are averaged over the runs before their
ratio is taken (appendix A.1 there). A run that is left out because its own ratio has no meaning would bias it low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.records.record import NoiseScale
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet, column, columns_of
from dlbench.report.wording import figure_text, percent, repeat_text, runs_text, times_value
from dlbench.specs.workload import Workload
from dlbench.stats.estimates import Estimate, mean_estimate, placed
from dlbench.stats.pairing import RunKey
from dlbench.views.model import ReportGroup
from dlbench.views.view import GroupSource, GroupView, place_columns, place_of

Advice = Literal["pays", "balanced", "wasteful", "undecided", "insufficient", "unknown"]

PAYS_BELOW = 0.5  # Share of the noise scale below which a doubled batch saves a third of the steps or more.
WASTEFUL_ABOVE = 2.0  # Share above which it saves less than a sixth of them.


@dataclass(frozen=True, kw_only=True)
class NoisePoint:
    """The noise scale at one scaling point."""

    ranks: int
    nodes: int
    global_batch: int = field(metadata=column("Global batch", unit="samples"))
    noise_scale: Estimate | None = field(metadata=column("Noise scale, samples", "noise_scale_samples"))
    """Samples: the global batch over `share`; None where that is not known to be above 0."""
    share: Estimate | None = field(metadata=column("Batch / noise scale", "batch_over_noise_scale"))
    """Global batch over noise scale (ratio of means over runs); None where it is not above 0."""
    advice: str  # What that means for a larger batch, or why it is not known, in words.
    basis: str = field(metadata=column("From", ""))
    """Batch sizes behind the estimate, and the fewest steps behind that of a run, in words."""


def _point(point: Point, by_run: Mapping[RunKey, NoiseScale], batch: int) -> NoisePoint:
    share, measured = noise_share(by_run, batch), list(by_run.values())
    is_bounded = share is not None and (share.low is None or share.low > 0)
    first, steps = measured[0], min(found.steps for found in measured)
    return NoisePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        global_batch=batch,
        noise_scale=share.mapped(lambda value: batch / value, "samples") if share and is_bounded else None,
        share=share,
        advice=_advice_text(share, len(measured)),
        basis=f"batches of {first.small_batch:,} and {first.large_batch:,} samples, {steps:,} steps per run",
    )


def noise_share(measured: Mapping[RunKey, NoiseScale], batch: int) -> Estimate | None:
    """Batch over noise scale: batch x mean |G|^2 / mean tr(Sigma); None where one of the means is not above 0.

    A run moves it by (batch x |G|^2 - share x tr) / mean tr (delta method).
    """
    known = {
        key: (batch * found.gradient_norm2, found.covariance_trace)
        for key, found in measured.items()
        if found.gradient_norm2 is not None and found.covariance_trace is not None
    }
    norm2, trace = (sum(one[place] for one in known.values()) for place in (0, 1))
    if norm2 <= 0 or trace <= 0:
        return None
    share = norm2 / trace
    moved = {key: share + (top - share * below) * len(known) / trace for key, (top, below) in known.items()}
    return mean_estimate(moved, "ratio")


def model_noise_share(workload: Workload, table: RunTable) -> Estimate | None:
    """1 over the noise scale of a network, by all runs that recorded it: these are slower, and of other groups."""
    records = {
        table.keys[name]: run.record.noise_scale
        for name, run in table.runs.items()
        if run.record and (run.plan.workload.name, run.plan.workload.model) == (workload.name, workload.model)
    }
    return noise_share({key: found for key, found in records.items() if found}, 1)


def samples_over(share: Estimate, large: int, small: int) -> Estimate:
    """Samples to a quality at one batch over those at another: E = E_min (1 + B / B_n). `share`: 1 / B_n."""
    return share.mapped(lambda one: (1 + large * max(0.0, one)) / (1 + small * max(0.0, one)), "ratio")


def _advice_text(share: Estimate | None, num_runs: int) -> str:
    """`num_runs`: those that looked for the noise scale."""
    found = advice(share)
    if share is None:
        return (
            f"unknown: the mean estimate of the squared gradient or of its variance is not positive in "
            f"{runs_text(num_runs)}; more steps, or batches further apart, may give one"
        )
    unknown = f"; {num_runs - share.n} of {num_runs} runs made no estimate" if num_runs > share.n else ""
    text = f"the global batch is {figure_text(share)} of the noise scale"
    if found == "insufficient":
        return f"{text}: {repeat_text(share)} to see whether larger batches pay{unknown}"
    if found == "undecided":
        return f"{text}: whether larger batches pay is undecided{unknown}"
    word = {
        "pays": "larger batches still pay",
        "balanced": "a larger batch trades samples for steps about evenly",
        "wasteful": "larger batches mostly cost samples",
    }[found]
    ends = [doubled_batch(max(0.0, end)) for end in (share.low or 0.0, share.high or 0.0)]
    fewer = _span([1 - steps for steps, _ in ends])
    more = _span([samples - 1 for _, samples in ends])
    return f"{text}: {word} (twice the batch: {fewer} fewer steps, {more} more samples to the same quality){unknown}"


def _span(fractions: Sequence[float]) -> str:
    low, high = (percent(end, 0) for end in sorted(fractions))
    return high if low == high else f"{low.removesuffix(' %')} to {high}"


def advice(share: Estimate | None) -> Advice:
    """What a global batch of `share` noise scales means for a larger one, where its interval decides that."""
    if share is None:
        return "unknown"
    where = placed(share, PAYS_BELOW, WASTEFUL_ABOVE)
    found: dict[str, Advice] = {"below": "pays", "within": "balanced", "above": "wasteful"}
    return where if where in ("undecided", "insufficient") else found[where]


def doubled_batch(share: float) -> tuple[float, float]:
    """What twice the batch does at `share` noise scales: steps and samples to the same quality, as ratios.

    From S = S_min (1 + 1/share) and E = E_min (1 + share).
    """
    return (share + 0.5) / (share + 1), (1 + 2 * share) / (1 + share)


class NoiseView(GroupView):
    """Whether a larger batch would still save steps."""

    id = "noise"
    title = "Gradient noise scale"
    key = "noise"
    after = "energy"

    def numbers(self, source: GroupSource) -> tuple[NoisePoint, ...]:
        made = []
        for point in source.group.points:
            runs = {source.table.keys[run_id]: source.table.runs[run_id] for run_id in point.run_ids}
            records = ((key, run.record) for key, run in runs.items())
            found = {key: record.noise_scale for key, record in records if record and record.noise_scale}
            if found:
                made.append(_point(point, found, next(iter(runs.values())).plan.global_batch))
        return tuple(made)

    def shown(self, group: ReportGroup, points: tuple[NoisePoint, ...]) -> Section:
        sheet = Sheet(
            name="noise",
            title="Noise scale and global batch",
            columns=(
                *place_columns(),
                *columns_of(NoisePoint),
                Column("", "What that means", lambda point: point.advice),
            ),
            rows=points,
            caption="A guide: it supposes a learning rate tuned to each batch.",
        )
        last = points[-1]
        headline = f"unknown at {place_of(last)}"
        if last.share is not None:
            headline = f"global batch is {times_value(last.share)} the noise scale at {place_of(last)}"
        return Section(headline=headline, sheets=(sheet,))

    def remedy(self, group: ReportGroup) -> str:
        return "--set measure.noise_scale=true estimates it, at the cost of speed."
