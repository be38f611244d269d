"""The view of efficiency as a product of factors."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.report.wording import figure_text, percent, place_text
from dlbench.views.causes.tables import account_of
from dlbench.views.causes.view import why_no_causes
from dlbench.views.rerun import rerun
from dlbench.views.waterfall.charts import waterfall_charts
from dlbench.views.waterfall.tables import FACTOR_TITLES, waterfall_sheets


def _has_factors(group: Group) -> bool:
    found = group.causes
    return found is not None and found.has_loss and any(point.factors for point in found.waterfall)


def _no_factors(group: Group) -> str:
    found = group.causes
    if found is None:
        return why_no_causes(group)
    if not found.has_loss:
        ranks = group.baseline.ranks
        return f"one rank count only: {rerun(group, f'--ranks {ranks},{2 * ranks} --repeats 5')} adds another."
    return "not known: these runs computed nothing, and factors need a step that computes."


def _waterfall_words(group: Group) -> tuple[str, ...]:
    told = []
    for point in reversed(account_of(group).waterfall):
        if point.is_baseline or not point.factors:
            continue
        product = " x ".join(f"{FACTOR_TITLES[one.name]} {percent(one.relative.value)}" for one in point.factors)
        least = min(point.factors, key=lambda one: one.relative.value)
        text = f"{place_text(point.ranks, point.nodes)}: {product} = {figure_text(point.efficiency)} of the ideal"
        if least.relative.value < 1:
            text += f"; the smallest factor is {FACTOR_TITLES[least.name]}"
        told.append(f"{text}.")
    return tuple(told)


VIEW = View(
    id="waterfall",
    title="Efficiency, factor by factor",
    place="group",
    is_for=_has_factors,
    remedy=_no_factors,
    words=_waterfall_words,
    charts=waterfall_charts,
    sheets=waterfall_sheets,
    template="sheets.html.j2",
)
