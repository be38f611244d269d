"""Own work and epochs over the batch, and what a training then costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import cli
from dlbench.projection.cost import costs, epochs, own_work, why_no_epochs
from dlbench.projection.ingredients import BatchFigures, Ingredients, QualityFigures, QualityRun
from dlbench.projection.projected import Target
from tests.projection import hand_made
from tests.support.training_machine import Machine

DRAWS = 1000


def measured(*batches: int, start: float = 0.02, each: float = 0.005, noise: float = 0.0) -> list[BatchFigures]:
    rng = np.random.default_rng(1)
    return [
        BatchFigures(
            batch_per_rank=batch, own_work_s=tuple((start + each * batch) * np.exp(noise * rng.standard_normal(5)))
        )
        for batch in batches
    ]


@given(
    start=st.floats(0, 1),
    each=st.floats(1e-4, 1),
    batches=st.lists(st.integers(1, 512), min_size=2, max_size=6, unique=True),
    asked=st.integers(1, 1024),
)
def test_a_line_is_found_again_at_every_batch(start: float, each: float, batches: list[int], asked: int) -> None:
    work = own_work(measured(*sorted(batches), start=start, each=each), asked, DRAWS, (7,))
    assert np.median(work) == pytest.approx(start + each * asked, rel=0.01)
    if min(batches) <= asked <= max(batches):
        assert np.ptp(work) <= 1e-9 * (start + each * asked)


def test_the_band_grows_with_each_halving_below_the_smallest_batch() -> None:
    line, bent = measured(16, 32, 64), measured(16, 32, 64)
    bent[0] = BatchFigures(batch_per_rank=16, own_work_s=(0.15,))  # the line of the others says 0.1

    def width(batches: list[BatchFigures], batch: int) -> float:
        low, high = np.quantile(np.log(own_work(batches, batch, DRAWS, (7,))), (0.1, 0.9))
        return float(high - low)

    assert width(line, 16) < 1e-9 < 0.02 < width(line, 8) < width(line, 4) < width(line, 2)
    assert width(bent, 8) > 3 * width(line, 8)  # a batch that the others did not foretell


def target(runs: Mapping[int, tuple[float, ...]], noise_scale: float | None = None) -> QualityFigures:
    met = tuple(QualityRun(global_batch=batch, epochs=one) for batch, many in runs.items() for one in many)
    return QualityFigures(target="accuracy 0.759", samples_per_epoch=1_281_167, runs=met, noise_scale=noise_scale)


@pytest.mark.parametrize("critical", [500.0, 8000.0])
def test_epochs_by_three_batches_or_by_one_and_the_noise_scale(critical: float) -> None:
    law = {batch: (40 * (1 + batch / critical),) for batch in (256, 1024, 4096)}
    by_scale = target({256: law[256]}, noise_scale=critical)
    for quality in (target(law), by_scale):
        found = epochs(quality, 2048, DRAWS, (7,))
        assert np.median(found) == pytest.approx(40 * (1 + 2048 / critical), rel=0.02)
        assert (found > 0).all()
    far, near = (np.log(epochs(target(law), batch, DRAWS, (7,))).std() for batch in (65536, 1024))
    assert far > near


def test_fewer_than_three_batches_without_a_noise_scale_are_refused_with_the_command() -> None:
    few = target({256: (40.0, 41.0), 512: (44.0,)})
    why = why_no_epochs(few)
    assert why is not None
    assert (why.code, why.text.split(" needed)")[0]) == ("R10", "runs to the target at 2 global batches (at least 3")
    assert "measure.noise_scale=true" in why.remedy
    assert why_no_epochs(target({256: (40.0,)}, noise_scale=100.0)) is None
    assert why_no_epochs(target({}, noise_scale=100.0)) is not None


COST_DRAWS = 500


def targets(*steps: tuple[int, float], noise: float = 1e-3) -> list[Target]:
    rng = np.random.default_rng(3)
    drawn = [step * np.exp(noise * rng.standard_normal(COST_DRAWS)) for _, step in steps]
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
