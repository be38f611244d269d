"""Own work over the batch of a rank, and epochs to a target over the global batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.projection.batch import epochs, own_work, why_no_epochs
from dlbench.projection.ingredients import BatchFigures, QualityFigures, QualityRun

DRAWS = 1000


def measured(*batches: int, start: float = 0.02, each: float = 0.005, noise: float = 0.0) -> list[BatchFigures]:
    rng = np.random.default_rng(1)
    return [
        BatchFigures(
            batch_per_rank=batch,
            own_work_s=tuple((start + each * batch) * np.exp(noise * rng.standard_normal(5))),
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
