"""Parts of a layer do 1/p of its work in both passes; the table of `dlbench layer` has the ratios of equal repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from dlbench.cli import cli
from dlbench.node.training import layer_parts
from dlbench.records.out_of_core import LayerOrder, LayerPartTimes, PartTimes
from tests.support.programs import answer_with, one_line
from tests.support.run_factory import plans


class CountedWork:
    """Takes the place of torch's timer; a sample is the number of FLOPs of a call."""

    def __init__(self, _statement: str, **settings: Any) -> None:
        self._call = settings["globals"]["call"]

    def blocked_autorange(self, min_run_time: float) -> CountedWork:
        with FlopCounterMode(display=False) as counter:
            self._call()
        self.mean = float(counter.get_total_flops())
        return self


ALL = {"filters", "channels", "extent"}
LAST: dict[str, Any] = {"model.memory_format": "channels-last"}


@pytest.mark.parametrize(
    ("workload", "layer", "cuts", "overrides"),
    [
        ("cosmoflow", "features.3", ALL, {"model.input_size": 32}),
        ("resnet50", "stages.1.0.conv2", ALL, {}),  # stride 2
        ("resnet50", "stem_conv", {"filters", "extent"}, LAST),  # 3 channels; no gradient of the input
        ("bert", "layers.0.expand", ALL, {}),  # as many vectors a sample as words
        ("resnet50", "classifier", {"channels"}, {"model.num_classes": 10}),  # one vector a sample
    ],
)
def test_each_part_does_its_share_of_the_work(
    monkeypatch: pytest.MonkeyPatch, workload: str, layer: str, cuts: set[str], overrides: dict[str, Any]
) -> None:
    monkeypatch.setattr(layer_parts, "Timer", CountedWork)
    small = {"train.batch_per_rank": 1, **overrides}
    (plan,) = plans(workload=workload, preset="ci", points=(1,), repeats=1, engine="single", overrides=small)
    order = LayerOrder(plan=plan, layer=layer, counts=(4,), repeats=2)
    whole, *parts = layer_parts.time_parts(order, torch.device("cpu"), "cpu").parts
    assert whole.cut == "whole"
    assert whole.seconds.keys() == {"forward", "backward"}
    assert {part.cut for part in parts} == cuts
    for part in parts:
        assert part.seconds["split"] == part.seconds["join"] == (0, 0)
        for phase in ("forward", "backward"):
            first, second = part.seconds[phase]
            assert 4 * first == 4 * second == whole.seconds[phase][0] > 0


def test_a_table_and_a_json_of_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = {"forward": (1.0,) * 4 + (3.0,), "backward": (2.0,) * 4 + (6.0,)}
    part = {"forward": (0.5,) * 4 + (1.5,), "backward": (1.5,) * 4 + (4.5,), "split": (0.1,) * 5, "join": (0.2,) * 5}
    answer = LayerPartTimes(
        device="cpu, 1 thread",
        parts=(
            PartTimes.model_validate({"cut": "whole", "count": 1, "seconds": seconds}),
            PartTimes.model_validate({"cut": "filters", "count": 2, "seconds": part}),
        ),
        warnings=("cores are shared",),
    )
    answer_with(monkeypatch, tmp_path / "layer.py", f"print({answer.model_dump_json()!r})")
    words = ["layer", "resnet50", "--preset", "ci", "--layer", "classifier", "--parts", "2"]
    shown = CliRunner().invoke(cli, words).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "75.0 %" in shown
    assert "cores are shared" in shown
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    (whole, half) = found["parts"]
    assert whole["efficiency"] is None
    assert half["speedup"]["value"] == pytest.approx(1.5)  # of each repeat, also of the slow one
    assert half["efficiency"]["value"] == half["efficiency"]["low"] == pytest.approx(0.75)
    assert found["measured"]["parts"][1]["seconds"]["join"] == [0.2] * 5


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("resnet50", "--preset", "ci", "--layer", "stages.1.0.conv9"), "did you mean stages.1.0.conv"),
        (("paced",), "no convolution or dense layer of paced; there are none"),
    ],
)
def test_what_cannot_be_timed_is_refused(words: tuple[str, ...], reason: str) -> None:
    assert reason in one_line(CliRunner().invoke(cli, ["layer", *words]))
