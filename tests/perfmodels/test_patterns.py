"""Patterns of collectives against a walk of their schedules, and the price of messages over up to three levels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.perfmodels.algorithms import power_below
from dlbench.perfmodels.patterns import Sharing, patterns
from dlbench.perfmodels.predictions import features, predict
from dlbench.perfmodels.schedules import Layout, pipeline_chunks
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, Level, NetworkModel, Piece
from tests.support.closed_forms import closed_form
from tests.support.schedule_walk import walked

NAMES = [(collective, name) for collective, names in ALGORITHMS.items() for name in names]
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
    """Step by step, at any grouping, for vectors with whole parts, ragged ones, and ones shorter than a part."""
    group = data.draw(st.sampled_from([g for g in range(1, ranks + 2) if ranks % g == 0 or g % 3 == 0]), label="group")
    if name[1] in GROUPED_ALGORITHMS and ranks % group:
        group = 1
    leaf = data.draw(st.sampled_from([None, *range(group, ranks + group, group)]), label="leaf")
    shards = data.draw(st.integers(1, ranks) | st.none()) if name[1] == "parameter-server" else None
    chunks = data.draw(st.sampled_from([1, 2, 3, 8])) if name[1] in ("chain", "double-binary-tree") else 1
    whole = 2 * ranks * power_below(ranks) * (shards or 1) * chunks
    elements = data.draw(st.just(whole) | st.integers(0, 3 * ranks), label="elements")
    layout = Layout(ranks=ranks, group_size=group, leaf_size=leaf)
    sharing = Sharing(**dict(zip(("inside", "across", "beyond"), links, strict=True)))
    expected = walked(*name, layout, elements, shards, chunks, sharing)
    found = {}
    for pattern in patterns(*name, layout, elements, shards=shards, chunks=chunks):
        step = pattern.loads(layout, sharing)
        if step.loads:
            found[step] = found.get(step, 0) + pattern.repeat
    assert found == expected


@pytest.mark.parametrize("leaf", [None, 256])
@pytest.mark.parametrize("algorithm", ALGORITHMS["allreduce"])
def test_thousands_of_ranks_have_their_closed_forms(algorithm: str, leaf: int | None) -> None:
    """Where all levels cost the same and ranks have ports of their own, it does not matter where they are."""
    # A rank's messages of one step inside its group and across do not wait for each other: here all are across.
    group, size = 1 if algorithm in ("direct", "parameter-server") else 8, 2**28
    layout = Layout(ranks=4096, group_size=group, leaf_size=leaf)
    chunks = pipeline_chunks("allreduce", algorithm, 4096, size // 4)
    form = closed_form(algorithm, layout, chunks=chunks, shared_link=False)
    expected = (form.alpha + form.alpha_across) * 1e-5 + float(form.beta + form.beta_across) * size * 1e-9
    same = level(1e-5, 1e-9)
    assert predict("allreduce", algorithm, size, layout, network(same, same, same)) == pytest.approx(expected)


def test_a_short_vector_of_many_ranks_costs_its_start_ups() -> None:
    """Beyond 512 ranks parts may be shorter than an element."""
    layout = Layout(ranks=1024, group_size=1024)
    assert predict("allreduce", "ring", 400, layout, network(level(1.0, 0.0))) == 2 * 1023
    found = features("allreduce", "ring", 400, layout, network(level(1.0, 0.0)))
    assert sum(found.num_bytes.values()) == pytest.approx(2 * 1023 / 1024 * 400)
