"""Values of all ranks as JSON: what comes back, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dlbench.errors import RunError
from dlbench.node.sync.groups import MAX_BYTES, gather_json


class Ranks:
    """Stands for the other ranks: they send the same lengths and then these bytes."""

    def __init__(self, *others: bytes, sizes: list[int] | None = None) -> None:
        self._others = others
        self._sizes = sizes or [len(other) for other in others]
        self._calls = 0

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls == 1:
            return torch.cat([own, torch.tensor(self._sizes, dtype=torch.int64)])
        width = own.numel()
        rows = [torch.frombuffer(bytearray(other.ljust(width)[:width]), dtype=torch.uint8) for other in self._others]
        return torch.cat([own, *rows])


@pytest.mark.parametrize("value", [None, 0, "", "é\udcff", [1, 2.5], {"a": {"b": [True, None]}}, 10**30, "x" * 100_000])
def test_values_come_back_as_they_were(value: Any) -> None:
    other = json.dumps(["the other's"]).encode()
    assert gather_json(value, 2, Ranks(other).all_gather) == [value, ["the other's"]]


def test_numbers_that_are_not_finite_and_tuples() -> None:
    (own, other) = gather_json((math.inf, math.nan), 2, Ranks(b"[-Infinity]").all_gather)
    assert own[0] == math.inf
    assert math.isnan(own[1])
    assert other == [-math.inf]


def test_nothing_that_a_rank_sends_is_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return canary.touch, ()

    with pytest.raises(RunError, match="a rank sent bytes that are not JSON"):
        gather_json("x" * 200, 2, Ranks(pickle.dumps(Touch())).all_gather)
    assert not canary.exists()


@pytest.mark.parametrize("size", [0, -1, MAX_BYTES + 1, 2**62])
def test_a_size_that_cannot_be_is_refused_before_memory_is_taken(size: int) -> None:
    with pytest.raises(RunError, match="ranks sent values of"):
        gather_json("x", 2, Ranks(b"1", sizes=[size]).all_gather)


def test_what_json_cannot_hold_is_a_defect() -> None:
    with pytest.raises(TypeError):
        gather_json(object(), 2, Ranks(b"1").all_gather)
