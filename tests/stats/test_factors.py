"""Effects of keys, all else equal."""

from __future__ import annotations

import math

import pytest

from dlbench.stats.estimates import Estimate
from dlbench.stats.factors import Combination, contrasts, key_effect, levels_of
from dlbench.stats.verdict import Verdict

FACTORS = {(1, "x"): 1.0, (2, "x"): 1.1, (1, "y"): 2.0, (2, "y"): 2.2}


def test_a_repeat_that_lacks_a_combination_would_compare_something_else() -> None:
    combinations = [
        Combination(
            values={"a": a, "b": b},
            acting=frozenset("ab"),
            rates={("", repeat): rate for repeat in range(1 if (a, b) == (2, "y") else 2)},
        )
        for (a, b), rate in FACTORS.items()
    ]
    levels = levels_of(combinations, {"a": 2, "b": "x"})
    assert levels == {"a": [2, 1], "b": ["x", "y"]}
    logs = contrasts(combinations, levels)
    assert logs["a", 2, 1] == {("", 0): pytest.approx(-math.log(1.1))}


def test_a_key_has_no_effect_only_where_all_its_values_could_be_compared() -> None:
    equal = Verdict(outcome="equal", estimate=Estimate(1.0, 0.99, 1.01, 5, "Student t"), margin=0.02)
    pairs = [("a", 1, 2), ("a", 1, 3), ("a", 2, 3)]
    assert key_effect("a", [1, 2, 3], dict.fromkeys(pairs, equal)).outcome == "equal"
    assert key_effect("a", [1, 2, 3], {**dict.fromkeys(pairs, equal), pairs[2]: None}).outcome == "undecided"
    assert key_effect("a", [1, 2, 3], dict.fromkeys(pairs)).outcome == "insufficient"
