"""The steps that all comparisons share: sets, partners, ratios in pairs, the best at the largest rank count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

import pytest

from dlbench.analysis.side_by_side import alike, at_last_place, best_at_last, compared, matched
from dlbench.stats.estimates import Estimate, by_definition


def test_sets_come_in_the_order_of_their_first_member() -> None:
    assert alike(["b1", "a1", "b2"], lambda text: text[0]) == {"b": ["b1", "b2"], "a": ["a1"]}


def test_partners_stand_together_and_two_of_a_kind_on_one_side_are_refused() -> None:
    def refuse(number: int, one: str, other: str) -> NoReturn:
        raise ValueError(f"{number}: {one}, {other}")

    assert matched((["a1", "b1"], ["b2", "c2"]), lambda text: text[0], refuse) == [
        ("a1", None),
        ("b1", "b2"),
        (None, "c2"),
    ]
    with pytest.raises(ValueError, match="1: b2, b3"):
        matched((["b1"], ["b2", "b3"]), lambda text: text[0], refuse)


def test_a_ratio_is_in_pairs_where_repeats_are_shared_and_none_where_a_side_has_no_positive_value() -> None:
    base = {("s", repeat): 1.0 + repeat for repeat in range(5)}
    own = {key: 2 * value for key, value in base.items()}
    ratio, is_paired = compared(own, base)
    assert (ratio.value, ratio.low, is_paired) == (pytest.approx(2), pytest.approx(2), True)
    assert compared({("t", 0): 2.0}, base)[1] is False
    assert compared({}, base) == (None, False)
    assert compared({("s", 0): 0.0}, base)[0] is None


def test_the_best_is_looked_for_at_the_largest_rank_count_alone() -> None:
    def row(ranks: int, ratio: float | None) -> SimpleNamespace:
        return SimpleNamespace(ranks=ranks, nodes=1, ratio=None if ratio is None else by_definition(ratio, 5))

    rows = [row(1, 9.0), row(4, None), row(4, 1.5), row(4, 1.2)]

    def ratio_of(one: SimpleNamespace) -> Estimate | None:
        found: Estimate | None = one.ratio
        return found

    assert at_last_place(rows) == rows[1:]
    assert best_at_last(rows, ratio_of)[1] is rows[2]
    assert best_at_last(rows[1:2], ratio_of) is None
