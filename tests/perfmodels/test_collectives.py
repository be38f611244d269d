"""Counts, closed forms, predictions and fits of collectives; the oracles are formulas and planted costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.comm.costs import ideal_seconds
from dlbench.errors import UserError
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.link_fit import Observation, choose_sharing, fit_network, held_out
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout, pipeline_chunks
from dlbench.perfmodels.topology import Sharing
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, Collective, Level, NetworkModel, Piece
from tests.perfmodels.closed_forms import closed_form

NAMES = [(collective, name) for collective, names in ALGORITHMS.items() for name in names]
COUNTED_NAMES: list[tuple[Collective, str]] = [*NAMES, ("allreduce", "dedicated-servers")]
KIB, MIB = 2**10, 2**20


def level(*pieces: tuple[int | None, float, float]) -> Level:
    return Level(pieces=tuple(Piece(up_to_bytes=u, alpha_s=a, beta_s_per_byte=b) for u, a, b in pieces))


def network(
    inside: Level | None, across: Level | None, gamma: float = 0.0, shared_link: bool = True, memory: bool = False
) -> NetworkModel:
    inside = inside and inside.model_copy(update={"links": 1 if memory else None})
    across = across and across.model_copy(update={"links": 1 if shared_link else None})
    return NetworkModel(system="test", transport="none", inside=inside, across=across, gamma_s_per_byte=gamma)


SHAPED = network(level((None, 2e-5, 3e-10)), level((None, 1e-4, 4e-8)))
"""Four ranks per node behind 200 Mbit/s, as in the one-box cluster."""


# --- counts and closed forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTED_NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8, 12, 17])
def test_counters_equal_the_closed_forms(name: tuple[Collective, str], ranks: int) -> None:
    """Steps and bytes, exactly."""
    counts_of_servers = {"parameter-server": range(1, ranks + 1), "dedicated-servers": range(1, ranks)}
    several = counts_of_servers.get(name[1], (None,))
    for group_size, shards in [(g, k) for g in range(1, ranks + 1) if ranks % g == 0 for k in several]:
        layout = Layout(ranks=ranks, group_size=group_size)
        elements = 2 * ranks * 2 ** (ranks.bit_length() - 1) * (shards or 1)  # every algorithm's parts are whole
        form, counted = closed_form(*name, layout, shards=shards), counts(*name, layout, elements, 4, shards=shards)
        if form is None:
            assert name[1].startswith("recursive")
            assert ranks & (ranks - 1)
            continue
        assert {c.steps for c in counted} == {form.steps}
        assert max(c.bytes_sent for c in counted) == 4 * elements * form.sent


# --- predictions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTED_NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 6, 8, 13])
@pytest.mark.parametrize("shared_link", [True, False])
def test_predictions_are_the_closed_forms(name: tuple[Collective, str], ranks: int, shared_link: bool) -> None:
    """Start-ups, bytes and bytes added, each priced alone, on one level and, for grouped ones, on both."""
    num_bytes, servers = 64 * MIB, {"parameter-server": {2}, "dedicated-servers": {1, min(2, ranks - 1), ranks - 1}}
    divisors = [g for g in range(1, ranks + 1) if ranks % g == 0]
    for group_size, shards in product(divisors, servers.get(name[1], {None})):
        if name[1] not in GROUPED_ALGORITHMS and group_size != ranks:
            continue
        layout = Layout(ranks=ranks, group_size=group_size)
        chunks = pipeline_chunks(*name, layout, num_bytes // 4)
        form = closed_form(*name, layout, shards=shards, chunks=chunks)
        if form is None:
            continue
        one, byte, free = (level((None, alpha, beta)) for alpha, beta in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0)))
        flows = group_size if shared_link and name[1] == "hierarchical" else 1
        for priced, expected in (
            (network(one, free), form.starts),
            (network(byte, free), form.along * num_bytes),
            (network(free, one, shared_link=shared_link), form.starts_across),
            (network(free, byte, shared_link=shared_link), form.along_across * num_bytes * flows),
            (network(free, free, gamma=1.0), form.added * num_bytes),
        ):
            assert predict(*name, num_bytes, layout, priced, shards=shards) == pytest.approx(float(expected))


def test_one_dedicated_server_costs_what_one_beside_a_worker_does() -> None:
    """With p workers 2 p n beta, which a server beside a worker does with p - 1."""
    layout, byte = Layout(ranks=5, group_size=5), network(level((None, 0.0, 1.0)), None)
    beside = predict("allreduce", "parameter-server", 1200, layout, byte, shards=1)
    assert predict("allreduce", "dedicated-servers", 1200, layout, byte) == pytest.approx(beside)


@given(
    name=st.sampled_from(NAMES),
    groups=st.integers(1, 9),
    group_size=st.integers(1, 5),
    shared_link=st.booleans(),
    shards=st.none() | st.just(1),
    chunks=st.none() | st.integers(1, 16),
    gamma=st.sampled_from([1e-10, 4e-9, 1e-7]),
    beta=st.sampled_from([3e-10, 1e-9, 4e-9]),
)
def test_nothing_is_faster_than_the_ideal(
    name: tuple[Collective, str],
    groups: int,
    group_size: int,
    shared_link: bool,
    shards: int | None,
    chunks: int | None,
    gamma: float,
    beta: float,
) -> None:
    """Wherever ranks are, with pieces of costs, and with levels that overlap, be they alike."""
    if groups * group_size > 1:
        layout = Layout(ranks=groups * group_size, group_size=group_size)
        pieces = level((65536, 2e-5, 3e-9), (None, 5e-5, 3e-10)), level((None, 1e-4, beta))
        priced = network(*pieces, gamma=gamma, shared_link=shared_link)
        seconds = predict(*name, 4 * 720720, layout, priced, shards=shards, chunks=chunks)
        assert seconds >= ideal_seconds(name[0], layout, 4 * 720720, priced) * (1 - 1e-9)


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("memory", [True, False])
def test_what_a_group_shares_is_found(link: bool, memory: bool) -> None:
    planted = network(level((None, 2e-5, 2e-9)), level((None, 1e-4, 6e-9)), shared_link=link, memory=memory)
    layouts = Layout(ranks=4, group_size=2), Layout(ranks=6, group_size=3), Layout(ranks=8, group_size=4)
    names: list[tuple[Collective, str]] = [
        ("allreduce", name) for name in ("ring", "hierarchical", "leader", "direct", "recursive-doubling")
    ]
    observations = measured(planted, layouts=layouts, names=names, sizes=FEW_SIZES)
    sharing, predictions = choose_sharing(observations)
    assert sharing == Sharing(inside=1 if memory else None, across=1 if link else None)
    assert max(abs(seconds / seen.seconds - 1) for seen, seconds in predictions) < 0.01


def test_what_was_never_measured_is_not_predicted() -> None:
    layout = Layout(ranks=8, group_size=4)
    with pytest.raises(UserError, match="across groups were never measured"):
        predict("allreduce", "ring", 4096, layout, network(SHAPED.inside, None))
    with pytest.raises(UserError, match="inside a group were never measured"):
        predict("allreduce", "hierarchical", 4096, layout, network(None, SHAPED.across))
    with pytest.raises(UserError, match="no whole number of elements of 4 bytes"):
        predict("allreduce", "ring", 4097, layout, SHAPED)


# --- fits --------------------------------------------------------------------------------------------------------

LAYOUTS = (Layout(ranks=4, group_size=2), Layout(ranks=8, group_size=4))
SIZES = tuple(2**k for k in range(10, 27, 2))
FEW_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
SOME: tuple[tuple[Collective, str], ...] = (
    ("allreduce", "ring"),
    ("allreduce", "recursive-doubling"),
    ("allreduce", "hierarchical"),
    ("allreduce", "leader"),
    ("all-gather", "ring"),
    ("broadcast", "binomial-tree"),
)


def measured(
    planted: NetworkModel,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    noise: float = 0.0,
    outliers: float = 0.0,
    names: Sequence[tuple[Collective, str]] = SOME,
    sizes: Sequence[int] = SIZES,
) -> list[Observation]:
    rng = np.random.default_rng(7)
    points = []
    for layout in layouts:
        for collective, algorithm in names:
            for size in sizes:
                seconds = predict(collective, algorithm, size, layout, planted) * math.exp(rng.normal(0, noise))
                if rng.random() < outliers:
                    seconds *= rng.uniform(2, 10)
                points.append(
                    Observation(
                        collective=collective,
                        algorithm=algorithm,
                        layout=layout,
                        num_bytes=size,
                        element_bytes=4,
                        shards=None,
                        seconds=seconds,
                    )
                )
    return points


def fitted(points: Sequence[Observation]) -> NetworkModel:
    return fit_network(points, system="test", transport="none", sources=("a-run",), fitted="2026-01-01T00:00:00Z")


def same_level(found: Level | None, planted: Level | None, rel: float) -> None:
    assert (found is None) == (planted is None)
    if found is None or planted is None:
        return
    assert len(found.pieces) == len(planted.pieces)
    for one, other in zip(found.pieces, planted.pieces, strict=True):
        assert one.alpha_s == pytest.approx(other.alpha_s, rel=rel)
        assert one.beta_s_per_byte == pytest.approx(other.beta_s_per_byte, rel=rel)


def test_planted_gamma_is_told_from_beta() -> None:
    planted = network(level((None, 2e-5, 3e-10)), level((None, 1e-4, 1e-9)), gamma=5e-10)
    found = fitted(measured(planted, noise=0.02))
    assert found.gamma_s_per_byte == pytest.approx(5e-10, rel=0.1)
    same_level(found.across, planted.across, 0.1)


def test_noise_and_outliers_move_little_and_intervals_say_how_much() -> None:
    points = measured(SHAPED, noise=0.05, outliers=0.1)
    rng = np.random.default_rng(1)
    resampled = np.array([point.seconds for point in points]) * np.exp(rng.normal(0, 0.05, (50, 1)))
    found = fit_network(points, system="test", transport="none", sources=(), fitted="", resampled=resampled, runs=5)
    assert len(found.draws) == 50
    assert fitted(points).across.pieces[0].alpha_interval_s is None  # type: ignore[union-attr]  # nothing was resampled
    piece = found.across.pieces[0]
    assert piece.alpha_s == pytest.approx(1e-4, rel=0.1)
    assert piece.beta_s_per_byte == pytest.approx(4e-8, rel=0.05)
    assert piece.alpha_interval_s[0] <= piece.alpha_s <= piece.alpha_interval_s[1]
    assert piece.beta_interval_s_per_byte[0] <= piece.beta_s_per_byte <= piece.beta_interval_s_per_byte[1]
    assert 0.01 < found.median_error < 0.1


def test_residuals_are_those_of_fits_without_the_point() -> None:
    """One algorithm is slower than the model has it: a fit that saw its points would bend towards them."""
    points = [
        replace(one, seconds=one.seconds * (1.3 if one.algorithm == "leader" else 1.0))
        for one in measured(SHAPED, noise=0.02)
    ]
    apart = held_out(points)
    low, high = np.quantile([one.seconds / seconds for one, seconds in apart], [0.025, 0.975])
    for found in fitted(points).residuals:
        of = (found.collective, found.algorithm, found.ranks)
        missed = [
            one.seconds / seconds for one, seconds in apart if (one.collective, one.algorithm, one.layout.ranks) == of
        ]
        assert len(missed) == len(SIZES)
        assert (found.least, found.most) == (min(low, *missed), max(high, *missed))


def test_a_planted_break_is_found_and_no_other() -> None:
    planted = network(level((None, 1e-5, 2e-10)), level((65536, 5e-5, 4e-9), (None, 3e-4, 1e-9)))
    found = fitted(measured(planted, noise=0.02))
    assert len(found.inside.pieces) == 1
    limit = found.across.pieces[0].up_to_bytes
    assert 65536 <= limit < 4 * 65536  # where messages lie on both sides
    same_level(found.across, planted.across, 0.15)


def test_a_level_that_never_decides_is_only_bounded() -> None:
    """A flat ring over two nodes waits for the link in every step: inside is anything up to that."""
    found = fitted(measured(SHAPED, names=[("allreduce", "ring")]))
    piece = found.inside.pieces[0]
    assert (piece.alpha_s, piece.beta_s_per_byte) == (0.0, 0.0)
    assert piece.alpha_interval_s == pytest.approx((0.0, 1e-4))
    same_level(found.across, SHAPED.across, 1e-6)


def test_held_out_points_are_not_seen() -> None:
    """All times of one size and rank count are doubled: their predictions stay what the others say."""
    points = measured(SHAPED)
    odd = [p.num_bytes == MIB and p.layout.ranks == 8 for p in points]
    changed = [
        Observation(**{**vars(p), "seconds": 2 * p.seconds}) if is_odd else p
        for p, is_odd in zip(points, odd, strict=True)
    ]
    predicted = dict(held_out(changed))
    assert list(predicted) == changed
    for point, is_odd in zip(changed, odd, strict=True):
        if is_odd:
            assert predicted[point] == pytest.approx(point.seconds / 2, rel=1e-4)


def test_what_the_others_do_not_determine_is_not_held_out() -> None:
    """Without the runs on two nodes nothing is known across groups; one rank count is held out by size."""
    names = [name for name in SOME if name[1] not in GROUPED_ALGORITHMS]
    points = measured(SHAPED, layouts=(Layout(ranks=4, group_size=4), Layout(ranks=8, group_size=4)), names=names)
    assert {point.layout.ranks for point, _ in held_out(points)} <= {4}
    alone = measured(SHAPED, layouts=(Layout(ranks=8, group_size=4),))
    assert [point for point, _ in held_out(alone)] == alone


def test_a_line_where_least_squares_fails() -> None:
    """1 kB to 100 MB with 10 % noise: ordinary least squares misses the start-up by far, relative errors do not."""
    startup, per_byte = 5e-5, 1e-9
    rng = np.random.default_rng(3)
    sizes = [int(size) for size in np.geomspace(1e3, 1e8, 40)]
    ordinary, ours = [], []
    for _ in range(20):
        seconds = [(startup + per_byte * size) * math.exp(rng.normal(0, 0.1)) for size in sizes]
        seconds[int(rng.integers(0, 40))] *= 5  # one slow point
        ordinary.append(float(np.polyfit(sizes, seconds, 1)[1]))
        ours.append(fit_line("test", 4, sizes, seconds))
    assert all(line.startup_s == pytest.approx(startup, rel=0.15) for line in ours)
    assert all(line.per_byte_s == pytest.approx(per_byte, rel=0.15) for line in ours)
    assert sum(abs(alpha - startup) > 2 * startup for alpha in ordinary) >= 15
    assert any(alpha < 0 for alpha in ordinary)


def test_a_line_is_never_negative() -> None:
    line = fit_line("test", 2, [1000, 2000, 4000], [1.0, 2.5, 6.0])
    assert line.startup_s == 0.0
    assert line.per_byte_s > 0
    flat = fit_line("test", 2, [1000, 2000, 4000], [3.0, 2.0, 1.0])
    assert flat.startup_s == pytest.approx(1.0, rel=1e-3)  # the median with weights 1 / time
    assert flat.per_byte_s == 0.0


def test_too_little_is_refused() -> None:
    points = measured(SHAPED)
    with pytest.raises(UserError, match="needs at least 5 points of at least two sizes; got 3 points of 3"):
        fitted(points[:3])
    with pytest.raises(UserError, match="of at least two sizes; got 12 points of 1"):
        fitted([point for point in points if point.num_bytes == MIB])
    with pytest.raises(UserError, match="are no measurement"):
        fitted([Observation(**{**vars(points[0]), "seconds": 0.0}), *points])
    alone = {"collective": "allreduce", "algorithm": "ring", "layout": Layout(ranks=1, group_size=1)}
    with pytest.raises(UserError, match="of a single rank"):
        fitted([Observation(**{**vars(point), **alone}) for point in points])
    with pytest.raises(UserError, match="at least two sizes; got 1"):
        fit_line("test", 2, [8, 8], [1.0, 1.0])
    with pytest.raises(UserError, match="must be positive"):
        fit_line("test", 2, [8, 16], [1.0, 0.0])
