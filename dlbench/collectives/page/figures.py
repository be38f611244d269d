"""Measurements of collectives as figures: times and rates, over runs or within a single one."""

from __future__ import annotations

import dataclasses

from dlbench.collectives.page.wording import WITHIN_RUN
from dlbench.collectives.results.tables import Measurement
from dlbench.stats.estimates import Estimate
from dlbench.stats.figure import figure_of

GIGA = 1e-9
"""GB/s of a byte a second."""


def time_figure(one: Measurement) -> Estimate:
    """A time with the interval over runs, or over the iterations of a single run."""
    figure = figure_of(one.seconds, "s")
    if one.within is None:
        return figure
    return dataclasses.replace(figure, low=one.within[0], high=one.within[1], kind=WITHIN_RUN)


def rate_figure(one: Measurement, estimate: Estimate) -> Estimate:
    """A rate in GB/s; the interval is that of the time, turned over."""
    figure = figure_of(estimate.scaled(GIGA), "GB/s")
    if one.within is None:
        return figure
    moved = estimate.value * one.seconds.value
    low, high = moved / one.within[1], moved / one.within[0]
    return dataclasses.replace(figure, low=low * GIGA, high=high * GIGA, kind=WITHIN_RUN)
