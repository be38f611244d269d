"""Time to quality, node-hours, energy and price of projected rank counts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dlbench.cli import cli
from dlbench.projection.cost import costs
from dlbench.projection.ingredients import Ingredients, QualityFigures, QualityRun
from dlbench.projection.projected import Target
from tests.projection import hand_made
from tests.support.training_machine import Machine

DRAWS = 500


def targets(*steps: tuple[int, float], noise: float = 1e-3) -> list[Target]:
    rng = np.random.default_rng(3)
    drawn = [step * np.exp(noise * rng.standard_normal(DRAWS)) for _, step in steps]
    return [
        replace(hand_made.target(ranks, step), drawn={"step": one})
        for (ranks, step), one in zip(steps, drawn, strict=True)
    ]


def given(**changes: Any) -> Ingredients:
    return hand_made.ingredients(**changes)


def quality(*batches: int, per_epoch: int = 10**6, **more: Any) -> QualityFigures:
    runs = tuple(QualityRun(global_batch=batch, epochs=10 * (1 + batch / 2048)) for batch in batches)
    return QualityFigures(target="top-1 of 0.759", samples_per_epoch=per_epoch, runs=runs, **more)


def test_costs_are_nodes_times_steps_times_the_step() -> None:
    (one, two) = costs(given(node_watts=500.0), targets((16, 0.1), (32, 0.11)), 2.0, "EUR")
    hours = 1e6 / (16 * 32) * 0.1 / 3600
    assert one.hours.value == pytest.approx(hours, rel=1e-3)
    assert one.node_hours.value == pytest.approx(16 * hours, rel=1e-3)
    assert one.kwh.value == pytest.approx(16 * hours * 0.5, rel=1e-3)
    assert (one.price.value, one.price.unit) == (pytest.approx(32 * hours, rel=1e-3), "EUR")
    assert one.marginal is None
    more, less = two.node_hours.value - one.node_hours.value, one.hours.value - two.hours.value
    assert two.marginal.value == pytest.approx(more / less, rel=0.05)


def test_a_doubling_that_may_save_no_time_has_no_price() -> None:
    rows = costs(given(), targets((16, 0.1), (32, 0.2), noise=0.02), None, "")
    assert rows[1].marginal is None


def test_time_to_quality_grows_with_epochs_and_holds_evaluations() -> None:
    asked = targets((16, 0.1), (64, 0.1))
    plain = costs(given(quality=quality(256, 512, 1024)), asked, None, "")
    assert [row.epochs.value for row in plain] == pytest.approx([10 * 1.25, 10 * 2.0], rel=0.05)
    steps = 1e6 / 512
    assert plain[0].hours.value == pytest.approx(plain[0].epochs.value * steps * 0.1 / 3600, rel=0.01)
    evaluated = costs(given(quality=quality(256, 512, 1024, evaluation_s=60.0)), asked, None, "")
    more = [(one.hours.value - two.hours.value) / two.epochs.value for one, two in zip(evaluated, plain, strict=True)]
    assert more == pytest.approx([60 / 3600] * 2, rel=0.01)


def test_the_command_prints_what_more_ranks_cost(tmp_path: Path) -> None:
    machine = Machine(hosts=lambda rng, nodes: 0.01 * rng.standard_normal(nodes), run_sd=0.005)
    file = tmp_path / "given.json"
    file.write_text(machine.ingredients(np.random.default_rng(1), (1, 2, 4)).model_dump_json())
    command = ["project", "ingredients", str(file), "--to", "32,64", "--price-per-node-hour", "9 EUR", "--format"]
    text = CliRunner().invoke(cli, [*command, "text"]).output
    assert "How many GPUs? For a million" in text
    assert " EUR" in text
    plain = CliRunner().invoke(cli, [*command[:-2], "9", "--format", "text"]).output
    assert re.search(r", price [0-9.]+ \[[^\]]*\](;|\.)", " ".join(plain.split()))
    table = CliRunner().invoke(cli, [*command, "md"]).output
    assert "Price, EUR" in table
    assert "Energy" not in table
