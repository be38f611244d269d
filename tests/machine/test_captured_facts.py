"""What is captured of the machine around a run: nothing of it is worth the run."""

from __future__ import annotations

import pytest

from dlbench.machine import environment


def test_a_variable_that_is_not_utf8_is_shown_with_escapes() -> None:
    problems: list[str] = []
    facts = environment.capture(problems, {"OMP_WEIRD": "a\udcff", "OMP_PLAIN": "ä"})
    assert facts["variable.OMP_WEIRD"] == r"a\xff"
    assert facts["variable.OMP_PLAIN"] == "ä"
    assert problems == []


def test_a_fact_that_cannot_be_asked_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = environment.capture([], {})

    def fail() -> str:
        raise RuntimeError("the driver is out of order")

    monkeypatch.setattr(environment, "_memory_bytes", fail)
    problems: list[str] = []
    facts = environment.capture(problems, {})
    assert facts == {key: value for key, value in whole.items() if key != "memory.bytes"}
    assert problems == ["environment: memory.bytes is not known: RuntimeError: the driver is out of order"]
