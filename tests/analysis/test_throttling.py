"""Throttling and what nodes did, against planted clock drops and known samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.telemetry.node_samples import measured_window
from dlbench.analysis.telemetry.readings import read_machine
from dlbench.analysis.telemetry.throttling import nearest_time, throttled_share
from dlbench.records.scan import Run, read_run
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import Story, constant, plans, write_run
from tests.support.watch_factory import write_samples

S = 1_000_000_000
GHZ = 1e9
CLOCKS = ["gpu.0.sm_clock_hz", "gpu.0.clock_reasons"]
IDLE, POWER_CAP, THERMAL = 0x1, 0x4, 0x20

Value = Callable[[float], float]


def every_second(offset: float = 0.5) -> list[float]:
    """From before the first step (second 1) to behind the last (second 16); samples stand in the middle of a second."""
    return [number + offset for number in range(-3, 19)]


def rows_of(*values: Value, times: Iterable[float] | None = None) -> list[tuple[float, ...]]:
    return [(round(t * S), *(value(t) for value in values)) for t in (times or every_second())]


def make_run(
    out: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[float]],
    *,
    device: str = "cuda:0 (NVIDIA A100)",
    unavailable: Mapping[str, str] | None = None,
    facts: Mapping[str, str] | None = None,
    plan: RunPlan | None = None,
    **story: Any,
) -> Run:
    """Steps of a second: warm-up from second 1, measured from second 4 to 16; samples on node 0."""
    plan = plan or plans(points=(1,), repeats=1)[0]
    folder = write_run(out, plan, constant([100, 0, 300, 400, 100, 100]), Story(device=device, **story))
    write_samples(folder, 0, columns, rows, unavailable=unavailable, facts=facts)
    return read_run(folder.path)


def throttled(run: Run) -> tuple[float, str]:
    share, evidence = throttled_share(run)
    assert share is not None, evidence
    return share, evidence


def test_the_measured_window_is_that_of_the_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, CLOCKS, rows_of(lambda t: 1e9, lambda t: 0))
    assert measured_window(run, 0) == (4 * S, 16 * S)


@pytest.mark.parametrize("factor", [0.5, 0.8, 0.95])
def test_a_planted_clock_drop_is_recovered(tmp_path: Path, factor: float) -> None:
    """From second 10 to 13, a quarter of the window, the clock falls by a known factor."""
    rows = rows_of(lambda t: 1.5 * GHZ * (factor if 10 < t < 13 else 1.0), lambda t: THERMAL if 10 < t < 13 else 0)
    share, evidence = throttled(make_run(tmp_path, CLOCKS, rows))
    assert share == pytest.approx((1 - factor) / 4, rel=1e-6)
    assert "throttled 25% of the time (sw_thermal_slowdown)" in evidence
    assert f"most at gpu.0 of n0, {share:.1%}" in evidence


def test_a_low_clock_without_a_throttling_reason_is_no_throttling(tmp_path: Path) -> None:
    rows = rows_of(lambda t: 1.5 * GHZ if t < 10 else 0.2 * GHZ, lambda t: 0 if t < 10 else IDLE)
    assert throttled(make_run(tmp_path, CLOCKS, rows))[0] == 0.0


def test_always_throttled_is_measured_against_the_highest_clock(tmp_path: Path) -> None:
    columns = [*CLOCKS, "gpu.0.sm_clock_max_hz"]

    def maximum(t: float) -> float:
        """Slow fields are read every tenth time."""
        return 2.0 * GHZ if round(t - 0.5) % 10 == 0 else math.nan

    rows = rows_of(lambda t: 1.5 * GHZ, lambda t: POWER_CAP, maximum)
    share, evidence = throttled(make_run(tmp_path / "known", columns, rows))
    assert share == pytest.approx(0.25)
    assert "throttled 100% of the time (sw_power_cap)" in evidence
    unknown, why = throttled_share(
        make_run(tmp_path / "unknown", CLOCKS, rows_of(lambda t: 1.5e9, lambda t: POWER_CAP))
    )
    assert unknown is None
    assert "its highest clock is not known" in why


@pytest.mark.parametrize("reason", [IDLE, 0], ids=["idle", "about to work"])
def test_an_idle_sample_is_no_reference_for_throttled_ones(tmp_path: Path, reason: int) -> None:
    """Throttled throughout, but for one sample at the edge of the window, when the clock was low for want of work."""
    columns = [*CLOCKS, "gpu.0.sm_clock_max_hz"]
    rows = rows_of(
        lambda t: 0.195 * GHZ if t < 5 else 1.5 * GHZ, lambda t: reason if t < 5 else POWER_CAP, lambda t: 2.0 * GHZ
    )
    share, evidence = throttled(make_run(tmp_path / "known", columns, rows))
    assert share == pytest.approx(0.25 * 11 / 12)
    assert evidence == "mean of 1 GPU; most at gpu.0 of n0, 22.9%; throttled 92% of the time (sw_power_cap)"
    unknown, why = throttled_share(make_run(tmp_path / "unknown", CLOCKS, [row[:3] for row in rows]))
    assert unknown is None
    assert "its highest clock is not known" in why


def test_shares_are_averaged_over_the_gpus_of_the_ranks(tmp_path: Path) -> None:
    plan = plans(points=(2,), repeats=1)[0]
    columns = [f"gpu.{gpu}.{name}" for gpu in range(2) for name in ("sm_clock_hz", "clock_reasons")]
    rows = rows_of(
        lambda t: 1.5 * GHZ,
        lambda t: 0,
        lambda t: 0.75 * GHZ if t < 7 else 1.5 * GHZ,
        lambda t: THERMAL | POWER_CAP if t < 7 else 0,
    )
    share, evidence = throttled(make_run(tmp_path, columns, rows, plan=plan))
    assert share == pytest.approx(0.5 / 4 / 2)
    assert evidence.startswith("mean of 2 GPUs; most at gpu.1 of n0, 12.5%")
    assert "(sw_power_cap, sw_thermal_slowdown)" in evidence


def test_gpus_that_no_rank_used_do_not_count(tmp_path: Path) -> None:
    columns = [f"gpu.{gpu}.{name}" for gpu in range(2) for name in ("sm_clock_hz", "clock_reasons")]
    rows = rows_of(lambda t: GHZ, lambda t: 0, lambda t: GHZ if t < 8 else GHZ / 2, lambda t: 0 if t < 8 else THERMAL)
    uuids = {"gpu.0.uuid": "GPU-0", "gpu.1.uuid": "GPU-1"}
    assert throttled(make_run(tmp_path / "0", columns, rows, facts=uuids))[0] == 0.0
    other = make_run(tmp_path / "1", columns, rows, facts=uuids, device="cuda:1 (NVIDIA A100)")
    assert throttled(other)[0] == pytest.approx(0.5 * 8 / 12)


def test_reasons_that_cannot_be_read_are_no_zero(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, ["gpu.0.sm_clock_hz"], rows_of(lambda t: GHZ), unavailable={"gpu.0.clock_reasons": "Not Supported"}
    )
    assert throttled_share(run) == (None, "gpu.0 of n0: Not Supported")
    nans = make_run(tmp_path / "nan", CLOCKS, rows_of(lambda t: GHZ, lambda t: math.nan))
    assert throttled_share(nans) == (None, "gpu.0 of n0: no sample of its clock in the measured window")


def test_a_used_up_quota_is_a_share_of_the_cores(tmp_path: Path) -> None:
    plan = plans(points=(2,), repeats=1)[0]
    # Two ranks of one thread on two cores are held back for 1.5 s a second in all: 0.75 of each core.
    rows = rows_of(lambda t: 7.0 + 1.5 * max(0.0, t - 2))
    share, evidence = throttled(make_run(tmp_path, ["host.cpu.throttled_s"], rows, device="cpu", plan=plan))
    assert share == pytest.approx(0.75)
    assert evidence.startswith("mean of 1 node; most at n0, 75.0%")
    assert "CPU frequency changes are not attributed" in evidence


@given(st.lists(st.integers(1, 4 * S), min_size=1, max_size=40), st.integers(-5 * S, 100 * S), st.integers(0, 100 * S))
def test_every_sampled_moment_belongs_to_the_nearest_sample(gaps: list[int], begin: int, length: int) -> None:
    times = np.cumsum(gaps).astype(np.int64)
    window = (begin, begin + length)
    weight = nearest_time(times, window, 100.0)
    assert (weight >= 0).all()
    inside = max(0, min(window[1], int(times[-1])) - max(window[0], int(times[0])))
    assert weight.sum() <= inside
    if len(set(gaps[1:])) <= 1:
        assert weight.sum() == inside


def test_figures_of_a_node(tmp_path: Path) -> None:
    columns = [
        "gpu.0.power_w",
        "gpu.0.clock_reasons",
        "host.cpu.0.busy",
        "host.cpu.1.busy",
        "host.net.eth0.received_bytes",
        "host.memory_used_bytes",
        "gpu.0.temperature_c",
    ]
    rows = rows_of(
        lambda t: 100 if t < 4 else 200 + t,
        lambda t: THERMAL if 4 < t < 7 else POWER_CAP | THERMAL if 7 < t < 10 else 0,
        lambda t: 1.0,
        lambda t: 0.5,
        lambda t: 1e12 + 2e6 * t,
        lambda t: 3e9,
        lambda t: math.nan,
    )
    reading = read_machine(make_run(tmp_path, columns, rows), all_fields=True)
    (node,) = reading.nodes
    assert reading.why == {}
    assert (node.host, node.window_s, node.num_samples, node.num_gaps, node.missing) == ("n0", 12.0, 12, 0, 0.0)
    power = node.fields["gpu.0.power_w"]
    assert (power.mean, power.median, power.lowest, power.highest) == pytest.approx((210, 210, 204.5, 215.5))
    assert (power.num_samples, power.is_rate) == (12, False)
    assert node.fields["host.cpu.busy"].mean == pytest.approx(0.75)
    received = node.fields["host.net.eth0.received_bytes"]
    assert received.is_rate
    assert (received.mean, received.median) == pytest.approx((2e6, 2e6))
    assert not node.fields["host.memory_used_bytes"].is_rate
    assert "gpu.0.temperature_c" not in node.fields
    assert node.clock_reasons == {"gpu.0": pytest.approx({"sw_thermal_slowdown": 0.5, "sw_power_cap": 0.25})}
