"""A machine by data sheet: links, leaves, and what a device should take for the layers of a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlbench.errors import UserError
from dlbench.perfmodels.predictions import predict
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.projected import Projection
from dlbench.projection.spec_machine import elsewhere, ideal_times, layout_of, network_of
from dlbench.projection.step import project
from dlbench.specs.choices import choose_system_with_origins
from dlbench.specs.layers import Layer
from dlbench.specs.system import DeviceSpec, SystemSpec
from tests.support.training_machine import Machine

LINK = {"alpha_s": 1e-5, "gb_per_s": 10.0, "source": "x"}
LEAVES = {"nodes_per_leaf": 8, "leaf_source": "x"}


def system_of(name: str) -> SystemSpec:
    return choose_system_with_origins(name, {})[0]


def made(**sections: Any) -> SystemSpec:
    return SystemSpec.model_validate({"name": "made", "title": "Made", "node": {"gpus": 4}, **sections})


def test_a_ring_on_p40_nodes_costs_what_its_links_say() -> None:
    system, size = system_of("p40-roce"), 64 * 2**20
    network = network_of(system)
    assert (network.system, network.transport, network.num_points) == ("p40-roce", "data sheet", 0)
    assert any("one adapter per node is an assumption" in source for source in network.sources)
    inside = predict("allreduce", "ring", size, layout_of(system, 8), network)
    assert inside == pytest.approx(2 * 7 * (5.7e-6 + size / 8 / 15.75e9))
    across = predict("allreduce", "ring", size, layout_of(system, 64), network)
    assert across == pytest.approx(2 * 63 * (9.6e-6 + size / 64 / 12.5e9))


def test_uplinks_of_a_leaf_are_those_of_its_nodes_over_the_taper() -> None:
    abci = network_of(system_of("abci"))
    assert (abci.across.links, abci.beyond.links) == (2, 24)  # 34 nodes with two ports each
    assert abci.beyond.pieces == abci.across.pieces
    layout = layout_of(system_of("abci"), 34 * 4 * 2)
    assert (layout.group_size, layout.leaf_size, layout.num_leaves) == (4, 136, 2)
    full = network_of(made(network={"across": {**LINK, "links": 2}, **LEAVES}))
    assert full.beyond.links == 16
    own = {"across": LINK, "beyond": {**LINK, "links": 3, "gb_per_s": 50.0}, **LEAVES}
    assert network_of(made(network=own)).beyond.links == 3
    assert network_of(made(network=own)).beyond.pieces[0].beta_s_per_byte == pytest.approx(2e-11)
    assert network_of(made(network={"across": LINK})).beyond is None


def test_a_layer_takes_its_operations_at_peak_or_its_bytes_whichever_is_longer() -> None:
    layers = (
        Layer(name="conv", kind="conv2d", block=0, inputs=1000, outputs=2000, weights=100, macs=10**9),
        Layer(name="pool", kind="pool", block=0, inputs=10**9, outputs=10**8),
    )
    device = DeviceSpec(memory_gb_per_s=100.0, source="x")
    system = made(device=device.model_dump(), node={"peak_tflops": {"fp32": 2.0}, "peak_source": "x"})
    times = ideal_times(layers, system, "fp32", batch=8, optimizer_slots=1)
    assert times.forward == pytest.approx([2e9 / 2e12, 1.1e9 * 4 / 100e9])
    assert times.backward == pytest.approx([4e9 / 2e12, 2.1e9 * 4 / 100e9])
    assert times.update_s == pytest.approx(100 * 5 * 4 / 100e9)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({}, r"made: node.peak_tflops has no fp32"),
        ({"device": {"name": "Tesla P40", "source": "x"}}, None),
        (
            {"device": {"name": "Tesla P41", "source": "x"}},
            r"there is no data sheet with it \(dlbench has no data sheet of that name\)",
        ),
        ({"node": {"peak_tflops": {"fp32": 1.0}, "peak_source": "x"}}, "device.memory_gb_per_s is missing"),
    ],
)
def test_what_no_data_sheet_states_is_asked_for(sections: dict[str, Any], why: str | None) -> None:
    layers = (Layer(name="conv", kind="conv2d", block=0, inputs=1, outputs=1, weights=1, macs=1),)
    if why is None:
        assert ideal_times(layers, made(**sections), "fp32", batch=1, optimizer_slots=0).forward[0] > 0
        return
    with pytest.raises(UserError, match=why):
        ideal_times(layers, made(**sections), "fp32", batch=1, optimizer_slots=0)


MACHINE = Machine(hosts=lambda rng, nodes: 0.01 * rng.standard_normal(nodes), run_sd=0.005)


def measured(**changes: Any) -> Ingredients:
    return MACHINE.ingredients(np.random.default_rng(1), (1, 2, 4)).model_copy(update=changes)


def step_at(given: Ingredients, ranks: int, there: Ingredients | None = None) -> Projection:
    return project(given, [ranks], other_system=there, draws=200)


def test_another_system_with_the_same_nodes_and_costs_projects_the_same() -> None:
    given, system = measured(), made()
    there = elsewhere(given, system, given.network)
    (same,), (own,) = (step_at(given, 64, one).targets for one in (there, None))
    assert same.step == own.step
    assert same.parts == own.parts


def test_another_system_has_its_nodes_leaves_and_prices_and_the_computing_of_the_runs() -> None:
    given = measured()
    there = elsewhere(given, system_of("p40-roce"), None)
    found = step_at(given, 64, there)
    (one,), (own,) = found.targets, step_at(given, 64).targets
    assert (one.nodes, own.nodes) == (8, 16)  # of 8 ranks and of 4
    of = {part.name: part.seconds for part in one.parts}
    compute = next(part.seconds for part in own.parts if part.name == "compute")
    assert of["compute"].median == pytest.approx(compute.median, rel=0.01)
    assert of["exchange"].median < 0.2 * {part.name: part.seconds for part in own.parts}["exchange"].median
    assert found.flags[0].code == "F8"
    assert "priced for p40-roce by data sheet" in found.flags[0].text
    assert found.changes == ("nodes, leaves and network of p40-roce; computing as measured on simulated",)
    tapered = elsewhere(given, system_of("abci"), None)
    assert (tapered.nodes_per_leaf, tapered.per_node) == (34, 4)
    # Its runs lie below other switches.
    points = tuple(point.model_copy(update={"leaves": (0,) * point.nodes}) for point in given.points)
    there = elsewhere(given.model_copy(update={"points": points}), system_of("abci"), None)
    assert {point.leaves for point in there.points} == {None}
