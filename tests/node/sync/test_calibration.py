"""The cost line that is timed before training, on planted costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dlbench.node.sync.own import route
from dlbench.node.sync.timing import Clock

STARTUP_S, PER_BYTE_S, SKEW_S = 20e-6, 1e-9, 100e-6


class Ranks:
    """Two ranks, of which this one leaves every start too early and waits in the first message for the other."""

    def __init__(self) -> None:
        self.now_s, self.waits_s, self.most_at_once, self.at_once = 0.0, 0.0, 0, 0
        self.index, self.ranks = 0, (0, 1)
        self.seen: list[torch.Tensor] = []

    def sum(self, vector: torch.Tensor) -> None:
        self.waits_s, self.at_once, self.seen = SKEW_S, 0, []

    def exchange(self, number: int, vector: torch.Tensor) -> None:
        assert not any(torch.equal(vector, other) for other in self.seen)
        self.seen.append(vector.clone())
        vector.fill_(float("inf"))  # nobody may go on with what a message left
        self.now_s += self.waits_s + STARTUP_S + PER_BYTE_S * 4 * len(vector)
        self.waits_s = 0.0
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)


@pytest.mark.parametrize("largest_bytes", [2**20, 2**24])
def test_the_start_up_of_a_message_holds_no_wait_for_the_start(
    monkeypatch: pytest.MonkeyPatch, largest_bytes: int
) -> None:
    ranks = Ranks()
    monkeypatch.setattr(route, "time", SimpleNamespace(monotonic=lambda: ranks.now_s))
    counts = route.sizes_up_to(largest_bytes, 1)
    calibration = route.Calibration(
        exchange=ranks.exchange,
        world=cast(Any, ranks),
        clock=Clock(),
        arena=torch.zeros(counts[-1]),
        # The other rank starts last, and waits for nobody.
        gather=lambda value: [value, value - SKEW_S] if isinstance(value, float) else [value],
    )
    line = calibration.measure("planted", counts, budget_s=1000.0)
    assert line.startup_s == pytest.approx(STARTUP_S, rel=0.25)
    assert line.per_byte_s == pytest.approx(PER_BYTE_S, rel=0.1)
    assert 1 < ranks.most_at_once <= counts[-1] // counts[0]
