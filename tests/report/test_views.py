"""Views find their place on a page themselves."""

from __future__ import annotations

import pytest

from dlbench.report.views import ReportView, in_order
from dlbench.views.scaling_report import scaling_views

ORDER = (
    "summary sweep quality scaling time-to-train causes forecast stragglers steps ranks exchange data-path staging "
    "reading shuffle-audit memory telemetry energy noise utilisation campaign-cost slow-nodes stalls break-even "
    "shuffling precision large-batch out-of-core differences systems history runs without-figures environment"
)


def test_the_order_of_the_scaling_report() -> None:
    views = scaling_views()
    assert " ".join(view.id for view in (*views.opening, *views.group, *views.closing)) == ORDER


def _views(**after: str) -> list[ReportView]:
    return [type(name, (ReportView,), {"id": name, "after": behind})() for name, behind in after.items()]


def test_a_new_view_stands_directly_behind_the_one_that_it_names() -> None:
    (ordered,) = in_order(_views(c="b", new="a", b="a", a="start"), "start")
    assert [view.id for view in ordered] == ["a", "new", "b", "c"]


@pytest.mark.parametrize("views", [_views(a="start", b="no"), _views(a="b", b="a"), 2 * _views(a="start")])
def test_a_view_without_a_place_is_an_error(views: list[ReportView]) -> None:
    with pytest.raises(ValueError, match="view"):
        in_order(views, "start")
