"""Bytes and seconds as text and back."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.units import parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6.6min", 396.0),
        ("90s", 90.0),
        ("90 s", 90.0),
        (" 2h ", 7200.0),
        ("1d", 86400.0),
        ("250ms", 0.25),
        ("0.5s", 0.5),
        ("007min", 420.0),
    ],
)
def test_durations_with_their_unit_become_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        *("", "s", "90", "0s", "0.0min", "-1s", "+1s", "1e3s", "nan", "inf s", "1,5min", ".5s", "5.s", "1 min 30 s"),
        *("3H", "3 minutes", "9999999999s", "\u0663s", "1s\n2s"),
    ],
)
def test_what_is_no_duration_is_answered_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a duration above zero with its unit \(ms, s, m, min, h, d\)") as raised:
        parse_seconds(text)
    assert "\n" not in str(raised.value)


def test_endless_text_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="not a duration") as raised:
        parse_seconds("9" * 100_000)
    assert len(str(raised.value)) < 300


@given(st.text(max_size=30))
def test_any_text_is_above_zero_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse_seconds(text) > 0
