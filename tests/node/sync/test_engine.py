"""An engine is one module: a subclass of `Engine` and its entry in `ENGINES`, and it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlbench.errors import UserError
from dlbench.node.sync.engine import Engine
from dlbench.records.record import Setting
from dlbench.specs.engine import ENGINES, EngineKind
from tests.support.one_rank import trained
from tests.support.run_factory import plans


class CountingEngine(Engine):
    """Synchronises nothing, and counts what it was told of: what an engine needs beside the defaults."""

    def __init__(self, *of_plan: object) -> None:
        super().__init__(*of_plan)
        self.steps = 0

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        self.steps += 1
        super().step(update)

    def settings(self) -> list[Setting]:
        return [Setting(key="engine.counting.steps", requested=None, effective=self.steps, evidence="counted")]


@pytest.fixture
def _counting(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = EngineKind(title="Counting steps", on_ranks=f"{__name__}:CountingEngine")
    monkeypatch.setitem(ENGINES, "counting", kind)


@pytest.mark.usefixtures("_counting")
def test_an_engine_of_one_module_trains_and_its_proof_is_in_the_record(tmp_path: Path) -> None:
    run = trained(tmp_path, 3, engine="counting")
    assert (run.record.state, run.plan.engine.name) == ("valid", "counting")
    (proof,) = [one for one in run.record.settings if one.key == "engine.counting.steps"]
    assert proof.effective == 4 + 3
    assert run.plan.engine_title == "Counting steps"


def test_an_engine_that_is_not_entered_is_refused_with_those_that_are() -> None:
    names = "horovod, ddp, fsdp, emulated or single"
    with pytest.raises(UserError, match=rf"engine\.name: must be {names}, got 'counting'"):
        plans(workload="cosmoflow", preset="ci", engine="counting")


@pytest.mark.usefixtures("_counting")
def test_it_takes_ranks_settings_of_sync_and_groups_like_the_others() -> None:
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(4,), repeats=1, engine="counting")
    assert (plan.engine.settings, plan.engine_words) == (None, "counting")
