"""The account of the lost percent against its definition, read out run by run."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.attribution import Attribution, attribute
from dlbench.stats.estimates import interval_of_difference, interval_of_mean, ratio_estimate
from dlbench.stats.pairing import KnownKey, RunKey

NAMES = ("compute", "wire", "wait")

one_run = st.fixed_dictionaries({name: st.integers(1 if name == "compute" else 0, 10**9) for name in NAMES})
some_runs = st.lists(one_run, min_size=1, max_size=7)

Run = Mapping[str, float]


def seconds(runs: Sequence[Mapping[str, int]], block: str, sessions: str = "") -> dict[RunKey, Run]:
    """Runs by their keys; where sessions are told, a letter for each, they take turns."""
    keys = [KnownKey.of(block, k, sessions[k % len(sessions)]) if sessions else (block, k) for k in range(len(runs))]
    return {key: {name: ns / 1e9 for name, ns in run.items()} | both(run) for key, run in zip(keys, runs, strict=True)}


def both(run: Mapping[str, int]) -> dict[str, float]:
    return {"phase": (run["wire"] + run["wait"]) / 1e9}


def whole(run: Run) -> float:
    return math.fsum(run[name] for name in NAMES)


def account(own: Mapping[RunKey, Run], base: Mapping[RunKey, Run], work: float = 1.0) -> Attribution:
    return attribute(own, base, work=work, names=NAMES, more=("phase",))


def share(runs: Sequence[Run], name: str) -> float:
    return statistics.fmean(run[name] / whole(run) for run in runs)


@given(
    own=some_runs,
    base=some_runs,
    work=st.sampled_from([1.0, 0.25, 3.0]),
    paired=st.booleans(),
    sessions=st.sampled_from(["", "a", "ab", "abcdef"]),
)
def test_parts_are_what_the_definition_says_and_sum_to_the_headline(
    own: list[dict[str, int]], base: list[dict[str, int]], work: float, paired: bool, sessions: str
) -> None:
    top, bottom = seconds(own, "a", sessions), seconds(base, "a" if paired else "b", sessions)
    found = account(top, bottom, work)
    count = min(len(own), len(base))
    is_paired = paired and (count >= 5 or count >= 0.8 * count)
    a, b = list(top.values()), list(bottom.values())
    if is_paired:
        a, b = a[:count], b[:count]
    mean, ideal = (statistics.geometric_mean(map(whole, runs)) for runs in (a, b))
    efficiency = ideal * work / mean
    assert found.whole.lost.value == pytest.approx(1 - efficiency, abs=1e-12 * max(1, efficiency))
    # The throughput of a run is samples over the same time.
    rates = ({key: n / whole(run) for key, run in runs.items()} for n, runs in ((work, top), (1.0, bottom)))
    headline = ratio_estimate(*rates)
    assert {part.lost.sessions for part in (*found.parts, found.whole)} == {headline.sessions}
    for mine, theirs in ((found.whole.lost.low, headline.high), (found.whole.lost.high, headline.low)):
        assert (mine is None) is (theirs is None)
        assert mine is None or theirs is None or mine == pytest.approx(1 - theirs, abs=1e-9 * max(1.0, theirs))
    assert found.whole.seconds.value == pytest.approx(mean, rel=1e-12)
    assert math.fsum(part.lost.value for part in found.parts) == pytest.approx(1 - efficiency, abs=1e-9)
    assert math.fsum(part.seconds.value for part in found.parts) == pytest.approx(mean, rel=1e-12)
    for part in (*found.parts, found.more["phase"]):
        q, q0 = mean * share(a, part.name), work * ideal * share(b, part.name)
        assert part.seconds.value == pytest.approx(q, rel=1e-9, abs=1e-15)
        assert part.ideal_seconds == pytest.approx(q0, rel=1e-9, abs=1e-15)
        assert part.lost.value == pytest.approx((q - q0) / mean, abs=1e-9 * max(1, efficiency))
        if part.lost.low is not None and part.lost.high is not None:
            assert part.lost.low <= part.lost.value <= part.lost.high
    phase = found.more["phase"]
    assert phase.lost.value == pytest.approx(found.parts[1].lost.value + found.parts[2].lost.value, abs=1e-9)


@given(own=st.lists(one_run, min_size=2, max_size=4), base=st.lists(one_run, min_size=2, max_size=4))
def test_few_runs_have_the_range_of_what_single_ones_lose(
    own: list[dict[str, int]], base: list[dict[str, int]]
) -> None:
    top, bottom = seconds(own, "a"), seconds(base, "b")
    found = account(top, bottom)
    for part in found.parts:
        single = [
            a[part.name] / whole(a) - b[part.name] / whole(a)
            for a, b in itertools.product(top.values(), bottom.values())
        ]
        assert part.lost.kind == "range"
        assert part.lost.low == pytest.approx(min(*single, part.lost.value), abs=1e-9)
        assert part.lost.high == pytest.approx(max(*single, part.lost.value), abs=1e-9)


@pytest.mark.parametrize("block", ["a", "b"])
def test_the_interval_is_that_of_how_single_runs_move_the_figure(block: str) -> None:
    """Moves by numerical derivatives: what the share lost becomes when one run weighs a little more."""
    rng = np.random.default_rng(3)

    def drawn(block: str, wire: float) -> dict[RunKey, Run]:
        rows = rng.lognormal(0, 0.05, (8, 3)) * (0.08, wire, 0.01)
        return {
            (block, k): dict(zip(NAMES, row, strict=True)) | {"phase": row[1] + row[2]} for k, row in enumerate(rows)
        }

    top, bottom = drawn("a", 0.02), drawn(block, 0.005)

    def lost(name: str, weights: Sequence[float], of_base: Sequence[float]) -> float:
        means = []
        for runs, each in ((list(top.values()), weights), (list(bottom.values()), of_base)):
            total = math.fsum(each)
            step = math.exp(math.fsum(w * math.log(whole(r)) for w, r in zip(each, runs, strict=True)) / total)
            means.append((step, math.fsum(w * r[name] / whole(r) for w, r in zip(each, runs, strict=True)) / total))
        (t, s), (t0, s0) = means
        return s - t0 / t * s0

    found = account(top, bottom)
    even, tiny = [1.0] * 8, 1e-6
    for part in found.parts:
        value = lost(part.name, even, even)

        def moved(place: int, is_own: bool, name: str = part.name, value: float = value) -> float:
            weights = [1.0 + tiny * (k == place) for k in range(8)]
            return 8 / tiny * (lost(name, *((weights, even) if is_own else (even, weights))) - value)

        own, base = (np.array([moved(k, is_own) for k in range(8)]) for is_own in (True, False))
        ends = interval_of_mean(own + base) if block == "a" else interval_of_difference(own, -base)
        assert part.lost.low == pytest.approx(value + float(ends[0]), abs=1e-5)
        assert part.lost.high == pytest.approx(value + float(ends[1]), abs=1e-5)
