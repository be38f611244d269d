"""Views find their place on a page themselves."""

from __future__ import annotations

import pytest

from dlbench.report.views import ReportView, in_order
from dlbench.views.scaling_report import scaling_views


def test_the_order_of_the_scaling_report() -> None:
    views = scaling_views()
    assert [view.id for view in views.opening] == ["summary", "sweep"]
    assert " ".join(view.id for view in views.group) == (
        "quality scaling time-to-train causes forecast stragglers steps ranks exchange data-path staging reading "
        "shuffle-audit memory telemetry energy noise utilisation"
    )
    assert " ".join(view.id for view in views.closing) == (
        "campaign-cost slow-nodes stalls break-even shuffling precision large-batch out-of-core differences systems "
        "history runs without-figures environment"
    )


def _view(name: str, behind: str) -> ReportView:
    kind = type(name, (ReportView,), {"id": name, "title": name, "after": behind})
    made: ReportView = kind()
    return made


def test_a_new_view_stands_directly_behind_the_one_that_it_names() -> None:
    views = [_view("c", "b"), _view("new", "a"), _view("b", "a"), _view("a", "start")]
    assert [[view.id for view in part] for part in in_order(views, "start", "groups")] == [["a", "new", "b", "c"], []]


@pytest.mark.parametrize(
    ("views", "problem"),
    [
        ([_view("a", "start"), _view("b", "nothing")], "view b: stands behind 'nothing', which is not on the page"),
        ([_view("a", "b"), _view("b", "a")], "view a: stands behind 'b'"),
        ([_view("a", "start"), _view("a", "start")], "two have one id"),
    ],
)
def test_a_view_without_a_place_is_an_error(views: list[ReportView], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        in_order(views, "start")
