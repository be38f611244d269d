"""Patterns of collectives against a walk of their schedules, and the price of messages over up to three levels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.perfmodels.algorithms import patterns
from dlbench.perfmodels.link_fit import choose_sharing
from dlbench.perfmodels.predictions import features, predict
from dlbench.perfmodels.schedules import Layout, pipeline_chunks, power_below
from dlbench.perfmodels.topology import Sharing, StepLoads, loads_of
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, Level, NetworkModel, Piece
from tests.perfmodels.closed_forms import closed_form
from tests.perfmodels.test_collectives import FEW_SIZES, NAMES, measured
from tests.support.schedule_walk import walked

CHUNKED = ("hierarchical", "chain", "double-binary-tree")
LINKS = st.sampled_from([None, 1, 2, 3])


def level(alpha: float, beta: float, links: int | None = None) -> Level:
    return Level(pieces=(Piece(alpha_s=alpha, beta_s_per_byte=beta),), links=links)


def network(*levels: Level, **other: object) -> NetworkModel:
    named = dict(zip(("inside", "across", "beyond"), levels, strict=False))
    return NetworkModel.model_validate({"system": "test", "transport": "none", **named, **other})


@given(data=st.data(), name=st.sampled_from(NAMES), ranks=st.integers(1, 33), links=st.tuples(LINKS, LINKS, LINKS))
def test_patterns_load_a_network_as_the_schedules_do(
    data: st.DataObject, name: tuple, ranks: int, links: tuple
) -> None:
    """Step by step, at any grouping and order of nodes, for vectors with whole parts, ragged and very short ones."""
    group = data.draw(st.sampled_from([g for g in range(1, ranks + 2) if ranks % g == 0 or g % 3 == 0]), label="group")
    if name[1] in GROUPED_ALGORITHMS and ranks % group:
        group = 1
    node = group * data.draw(st.integers(1, 3), label="groups of a node")
    leaf = data.draw(st.sampled_from([None, *range(node, ranks + node, node)]), label="leaf")
    shards = data.draw(st.integers(1, ranks) | st.none()) if name[1] == "parameter-server" else None
    chunks = data.draw(st.sampled_from([1, 2, 3, 8])) if name[1] in CHUNKED else 1
    whole = 2 * ranks * power_below(ranks) * (shards or 1) * chunks
    elements = data.draw(st.just(whole) | st.integers(0, 3 * ranks), label="elements")
    nodes, per_leaf = -(-ranks // node), data.draw(st.integers(1, 4), label="nodes of a leaf")
    orders = st.permutations(range(nodes)).map(lambda order: tuple(number // per_leaf for number in order))
    leaves = data.draw(st.none() | orders, label="leaf of each node")
    layout = Layout(ranks=ranks, group_size=group, leaf_size=leaf, node_size=node, leaves=leaves)
    sharing = Sharing(**dict(zip(("inside", "across", "beyond"), links, strict=True)))
    assert lumped(name, layout, elements, shards, chunks, sharing) == walked(
        *name, layout, elements, shards, chunks, sharing
    )


@pytest.mark.parametrize("leaves", [(1, 0, 2, 0, 2, 1), (0, 1, 1, 0, 1, 2)])  # Two nodes below each, or not.
@pytest.mark.parametrize("name", NAMES)
def test_every_collective_loads_leaf_switches_as_its_schedule_does_in_any_order(name: tuple, leaves: tuple) -> None:
    layout = Layout(ranks=12, group_size=2, leaves=leaves)
    for elements in (2 * 12 * 8, 41):
        for sharing in (Sharing(), Sharing(across=2, beyond=3)):
            expected = walked(*name, layout, elements, None, 2, sharing)
            assert lumped(name, layout, elements, None, 2, sharing) == expected


def lumped(
    name: tuple, layout: Layout, elements: int, shards: int | None, chunks: int, sharing: Sharing
) -> dict[StepLoads, int]:
    """Kinds of steps by the patterns, each with how many there are."""
    kinds: dict[StepLoads, int] = {}
    for pattern in patterns(*name, layout, elements, shards=shards, chunks=chunks, lumped=True):
        step = loads_of(pattern, layout, sharing)
        if step.loads:
            kinds[step] = kinds.get(step, 0) + pattern.repeat
    return kinds


@pytest.mark.parametrize("leaf", [None, 256])
@pytest.mark.parametrize("algorithm", ALGORITHMS["allreduce"])
def test_thousands_of_ranks_have_their_closed_forms(algorithm: str, leaf: int | None) -> None:
    """Where all levels cost the same and ranks have ports of their own, it does not matter where they are."""
    # A rank's messages of one step inside its group and across do not wait for each other: here all are across.
    group, size = 1 if algorithm in ("naive", "direct", "parameter-server") else 8, 2**28
    layout = Layout(ranks=4096, group_size=group, leaf_size=leaf)
    chunks = pipeline_chunks("allreduce", algorithm, layout, size // 4)
    form = closed_form("allreduce", algorithm, layout, chunks=chunks)
    assert form is not None
    expected = float((form.starts + form.starts_across) * 1e-5 + (form.along + form.along_across) * size * 1e-9)
    same = level(1e-5, 1e-9)
    found = predict("allreduce", algorithm, size, layout, network(same, same, same))
    if algorithm == "hierarchical":  # the level of fewer bytes is hidden, but while the pipeline fills and empties
        assert expected - 2 * 511 / 4096 * size * 1e-9 < found < expected
    else:
        assert found == pytest.approx(expected)


def test_a_short_vector_of_many_ranks_costs_its_start_ups() -> None:
    """Beyond 512 ranks parts may be shorter than an element."""
    layout = Layout(ranks=1024, group_size=1024)
    assert predict("allreduce", "ring", 400, layout, network(level(1.0, 0.0))) == 2 * 1023
    found = features("allreduce", "ring", 400, layout, network(level(1.0, 0.0)))
    assert sum(found.num_bytes.values()) == pytest.approx(2 * 1023 / 1024 * 400)


# --- levels ------------------------------------------------------------------------------------------------------

LEAVES = Layout(ranks=8, group_size=2, leaf_size=4)
"""Two leaf switches of two nodes of two ranks."""


def test_a_message_beyond_a_leaf_loads_its_node_and_the_uplinks() -> None:
    """All-to-all: each rank sends an eighth to one rank inside its node, two below its switch and four beyond."""
    free, size = level(0.0, 0.0), 8000
    by_node = network(free, level(2.0, 1.0, 1), level(3.0, 0.0, 1))
    assert predict("all-to-all", "direct", size, LEAVES, by_node) == pytest.approx(2 * 2 + 4 * 3 + 2 * 6 * 1000)
    by_uplink = network(free, level(2.0, 0.0, 1), level(3.0, 1.0, 1))
    assert predict("all-to-all", "direct", size, LEAVES, by_uplink) == pytest.approx(4 * 3 + 4 * 4 * 1000)
    two_uplinks = network(free, level(2.0, 0.0, 1), level(3.0, 1.0, 2))
    assert predict("all-to-all", "direct", size, LEAVES, two_uplinks) == pytest.approx(4 * 3 + 4 * 4 * 1000 / 2)
    # A ring puts one flow on each of them: the start-up is that of the way, the slower link decides.
    ring = network(free, level(2.0, 1.0, 1), level(3.0, 0.5, 1))
    assert predict("allreduce", "ring", size, LEAVES, ring) == pytest.approx(14 * (3 + 1000))
    # Where neighbours of the ring lie below different switches, each uplink carries the flows of both of its nodes.
    shared = network(free, level(2.0, 1.0, 1), level(3.0, 1.0, 1))
    num_bytes = {(0, 0, 1, 1): 1000, (1, 1, 0, 0): 1000, (0, 1, 0, 1): 2000, (0, 1, 1, 0): 1000}
    for leaves, of_a_link in num_bytes.items():
        placed = replace(LEAVES, leaves=leaves)
        assert predict("allreduce", "ring", size, placed, shared) == pytest.approx(14 * (3 + of_a_link))


@pytest.mark.parametrize(("links", "phi"), [(None, 1.0), (1, 4.0), (2, 2.0), (3, 4 / 3), (8, 1.0)])
def test_phi_is_flows_over_links(links: int | None, phi: float) -> None:
    """Four ranks of a node send to the next node at once; no flow is faster than its own port."""
    layout, size = Layout(ranks=8, group_size=4), 2**20
    priced = network(level(0.0, 0.0), level(0.0, 1.0, links))
    found = features("allreduce", "hierarchical", size, layout, priced)
    assert found.phi["across"] == pytest.approx(phi)
    assert found.seconds(priced) == pytest.approx(size / 4 * phi)  # 2 steps of half of a rank's quarter


def test_draws_price_with_the_links_that_decide() -> None:
    levels = (level(1e-5, 1e-9), level(1e-4, 4e-9, 1), level(2e-4, 8e-9, 1))
    draws = ((1e-5, 1e-9, 1e-4, 4e-9, 2e-4, 8e-9, 0.0), (2e-5, 3e-9, 2e-4, 5e-9, 5e-4, 9e-9, 1e-10))
    drawn = network(*levels, draws=draws)
    found = features("allreduce", "recursive-halving-doubling", 2**20, LEAVES, drawn)
    other = network(level(2e-5, 3e-9), level(2e-4, 5e-9, 1), level(5e-4, 9e-9, 1), gamma_s_per_byte=1e-10)
    assert found.drawn(drawn) == pytest.approx([found.seconds(drawn), found.seconds(other)])
    assert len(found.drawn(network(*levels))) == 0


# --- fits --------------------------------------------------------------------------------------------------------


def test_two_adapters_of_four_ranks_are_found() -> None:
    planted = network(level(1e-5, 2e-10), level(5e-5, 4e-9, 2))
    layouts = (Layout(ranks=8, group_size=4), Layout(ranks=16, group_size=4))
    names = [("allreduce", name) for name in ("ring", "hierarchical", "direct", "recursive-doubling")]
    points = measured(planted, layouts=layouts, names=names, sizes=FEW_SIZES)
    assert choose_sharing(points)[0] == Sharing(across=2)
