"""The benchmark of predictions in small: forecasts hold what is true, and none crosses the edge of a node."""

from __future__ import annotations

from tests.bench.truth import predictions


def test_forecasts_hold_the_truth_of_every_law() -> None:
    found = list(predictions.scaling_forecasts(trials=2, overheads=predictions.LAWS))
    assert [one.name for one in found if one.met is False] == []
    assert sum(one.value is not None for one in found) >= 3 * len(predictions.LAWS)


def test_no_forecast_from_inside_a_node() -> None:
    assert predictions.node_edge(trials=3).met


def test_gains_do_not_depend_on_the_scale_of_the_network() -> None:
    assert predictions.gains().met
