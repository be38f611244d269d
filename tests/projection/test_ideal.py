"""Projections by data sheet: links, leaves, what a device should take for layers; strategies, costs and two systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.errors import UserError
from dlbench.perfmodels.predictions import predict
from dlbench.projection.ideal import IdealCase
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.projected import Projection
from dlbench.projection.spec_machine import elsewhere, ideal_times, layer_rows, layout_of, network_of
from dlbench.projection.step import project
from dlbench.specs.choices import WorkloadFile, choose, choose_system_with_origins
from dlbench.specs.files import find
from dlbench.specs.layers import Layer
from dlbench.specs.system import DeviceSpec, SystemSpec
from dlbench.specs.workload import Workload
from tests.support.training_machine import Machine

LINK = {"alpha_s": 1e-5, "gb_per_s": 10.0, "source": "x"}
LEAVES = {"nodes_per_leaf": 8, "leaf_source": "x"}


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


P40 = "project spec resnet50 --preset full --system p40-roce --to"
BOTH = "project spec resnet50 --preset full --system abci --system p40-roce"


def system_of(name: str) -> SystemSpec:
    return choose_system_with_origins(name, {})[0]


def workload_of(name: str, preset: str = "full") -> Workload:
    return choose(WorkloadFile(find("workloads", name)), preset, {}).workload()


def run(text: str, *more: str) -> Result:
    return CliRunner().invoke(cli, [*text.split(), *more])


def test_computing_is_operations_at_the_peak_and_the_exchange_a_ring_over_stated_links() -> None:
    workload, system = workload_of("resnet50"), system_of("p40-roce")
    (row,) = IdealCase(workload=workload, system=system, strategies=("data",)).rows(64)
    least = 64 * workload.model.training_flops(workload.data) / 12e12
    assert least < row.compute_s < 1.5 * least  # the rest is bytes of layers that compute little
    weights = 4 * sum(layer.weights for layer in workload.model.layer_table(workload.data))
    ring = predict("allreduce", "ring", weights // 4 * 4, layout_of(system, 64), network_of(system))
    assert ring <= row.communication_s < 1.3 * ring  # more start-ups: it goes in buckets
    assert row.step_s == pytest.approx(row.compute_s + row.exposed_s)
    assert (row.fits, row.is_ideal, row.measured_s) == (True, True, None)


def test_flows_share_the_adapters_that_are_stated() -> None:
    bert, system = workload_of("bert"), system_of("abci")
    rows = IdealCase(workload=bert, system=system, strategies=("data+tensor",), global_batch=64).rows(64)
    # Each of the four places in a node has an all-reduce of its own, over the node's two adapters.
    assert {row.phi for row in rows if row.replicas == 16} == {2}


def test_an_ideal_all_reduce_uses_all_links_of_a_node_and_its_leaf() -> None:
    """A ring has one flow out of a node, so that a second adapter would do nothing for it."""
    workload, system = workload_of("resnet50"), system_of("abci")
    assert system.network is not None
    assert system.network.across is not None
    sent = []
    for links, taper in ((1, 1.0), (2, 1.0), (4, 1.0), (4, 30.0)):
        across = system.network.across.model_copy(update={"links": links})
        changed = {"across": across, "beyond": None, "nodes_per_leaf": 4, "leaf_taper": taper}
        other = system.model_copy(update={"network": system.network.model_copy(update=changed)})
        (row,) = IdealCase(workload=workload, system=other, strategies=("data",)).rows(64)
        sent.append(row.communication_s)
    assert sent[0] > 1.05 * sent[1] > 1.05 * sent[2]
    assert sent[3] > 1.05 * sent[2]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--strategy tensor", "no strategy fits: it has no attention heads."),
        ("--memory-limit 1MiB", "no strategy fits: data needs the least memory, 11.42 GiB."),
    ],
)
def test_counts_where_nothing_fits_are_named_and_end_with_4(more: str, why: str) -> None:
    done = run(f"{P40} 8,16 {more}")
    assert done.exit_code == 4
    for ranks in (8, 16):
        assert f"{ranks} ranks: {why}" in done.output
    # Pipelines of the network end at 18 blocks; others are said all the same.
    some = run(f"{P40} 8,64 --strategy pipeline")
    assert some.exit_code == 0
    assert "8 ranks, data+pipeline" in some.output


@pytest.mark.parametrize("form", ["text", "json", "csv", "md"])
def test_the_command_says_that_it_is_ideal_in_every_format(form: str) -> None:
    done = run(f"{P40} 8,64,2048 --format {form}")
    assert done.exit_code == 0, done.output
    assert "deal" in done.output
    if form == "text":
        assert "Modelled by data sheet, not measured." in done.output
        assert "2,048 ranks, data: " in " ".join(done.output.split())
        assert len(done.output.splitlines()) < 45
    if form == "json":
        content = json.loads(done.output)
        assert (content["format"], content["system"]) == ("dlbench.ideal-projection", "p40-roce")
        assert content["global_batch"] == {"8": 512, "64": 4096, "2048": 131072}
        assert all(one["is_ideal"] and one["measured_s"] is None for one in content["rows"])


def test_settings_replace_those_of_the_preset() -> None:
    large = "project spec bert --preset 1.3b --system abci --to 64 --strategy all --format json"
    more = ("--set", "model.num_layers=4", "--set", "data.sequence_length=512", "--set", "train.batch_per_rank=2")
    content, changed = (json.loads(run(large, *words).output) for words in ((), more))
    assert (content["overrides"], content["global_batch"]) == ({}, {"64": 256})
    assert changed["overrides"] == {"model.num_layers": 4, "data.sequence_length": 512, "train.batch_per_rank": 2}
    assert changed["global_batch"] == {"64": 128}
    data, less = (next(row for row in one["rows"] if row["strategy"] == "data") for one in (content, changed))
    assert less["compute_s"] < data["compute_s"] / 20
    # Groups of four neighbours share a layer; of the stages' counts the best is shown.
    rows = [row for row in changed["rows"] if row["strategy"] == "data+pipeline+tensor"]
    assert {row["tensor_ranks"] for row in rows} == {2, 4}
    text = run(large.replace("json", "text"), *more).output
    assert text.count("data+pipeline+tensor ") == 1
    assert "layers=4" in run(large.replace("json", "md"), *more).output


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (f"{P40} 12", "--to 12: does not fill nodes of 8 ranks"),
        ("project spec resnet50 --to 8", "Missing option '--system'"),
        ("project spec --system abci --to 8", "Missing argument 'WORKLOAD'"),
        (f"{P40} 8 --record", "No such option '--record'"),
        (f"{P40} 8 --set train.batch_per_rnk=3", "--set: train.batch_per_rnk: unknown key; did you mean train.batch_"),
        (f"{P40} 8 --set train.batch_per_rank=0", "--set: train.batch_per_rank: must be a whole number of 1 or more"),
        (f"{P40} 8 --set train.seed=3", "--set train.seed: has no effect on a projection by data sheet, which reads "),
        (f"{P40} 8 --set train.batch_per_rank", "must be key=value"),
        (f"{BOTH} --to 8 --system abci", "--system abci p40-roce abci: needs one system, or two with different names"),
        (f"{BOTH} --to 8 --price-per-node-hour 9EUR", "1 prices for 2 systems"),
        (f"{BOTH} --to 8 --price-per-node-hour 9EUR --price-per-node-hour 9CHF", "must have one currency"),
        (f"{BOTH} --to 8 --samples 0", "--samples '0': must be a number above zero"),
        (f"{BOTH} --to 8 --strategy tensor", "none of these strategies fits"),
    ],
)
def test_what_a_data_sheet_cannot_say_is_refused_in_a_line(command: str, why: str) -> None:
    done = run(command)
    assert done.exit_code != 0
    assert why in (str(done.exception) if isinstance(done.exception, UserError) else done.output)


def case_of(system: str, **changes: Any) -> IdealCase:
    asked = {"strategies": ("data",), "node_price": 9.0, **changes}
    return IdealCase(workload=workload_of("resnet50"), system=system_of(system), **asked)


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_nodes_of_equal_time_and_price_are_those_of_a_search_of_all_counts(scaling: str) -> None:
    words = f"{BOTH} --to 8,16,64 --samples 1e6 --scaling {scaling} --format json".split()
    done = CliRunner().invoke(cli, [*words, "--price-per-node-hour", "9 EUR", "--price-per-node-hour", "12 EUR"])
    assert done.exit_code == 0, done.output
    costs = json.loads(done.output)["costs"]
    assert [(row["system"], row["nodes"]) for row in costs] == [
        *(("abci", 2), ("abci", 4), ("abci", 16)),
        *(("p40-roce", 1), ("p40-roce", 2), ("p40-roce", 8)),
    ]
    batch = 512 if scaling == "strong" else None
    other = case_of("p40-roce", global_batch=batch, node_price=12.0)
    on_other = {nodes: other.cost(8 * nodes) for nodes in range(1, 9)}
    own = case_of("abci", global_batch=batch)
    for row in costs[:3]:
        cost = own.cost(row["ranks"])
        assert cost is not None
        assert (row["hours"], row["price"]) == (pytest.approx(cost.hours), pytest.approx(9 * cost.node_hours))
        as_fast = [nodes for nodes, figures in on_other.items() if figures and figures.hours <= cost.hours]
        as_cheap = [nodes for nodes, figures in on_other.items() if figures and figures.price <= cost.price]
        assert row["equal_hours"] == min(as_fast, default=None)
        assert row["equal_price"] == max(as_cheap, default=None)


def test_a_cost_is_nodes_times_steps_and_energy_needs_the_power_of_a_node(tmp_path: Path) -> None:
    watts = tmp_path / "watts.yaml"
    text = find("systems", "p40-roce").read_text().replace("name: p40-roce", "name: watts")
    watts.write_text(text.replace("  name: Tesla P40", "  node_watts: 2500\n  name: Tesla P40"))
    done = run(f"{BOTH.replace('abci', str(watts))} --to 64 --samples 1000000 --format json")
    measured, unknown = json.loads(done.output)["costs"]
    step_s = case_of("p40-roce").rows(64)[0].step_s
    assert measured["hours"] == pytest.approx(1e6 / (64 * 64) * step_s / 3600)
    assert measured["node_hours"] == pytest.approx(8 * measured["hours"])
    assert measured["kwh"] == pytest.approx(2.5 * measured["node_hours"])
    assert (unknown["kwh"], unknown["price"]) == (None, None)
    assert "Energy of p40-roce: device.node_watts is missing" in " ".join(run(f"{BOTH} --to 64 --full").output.split())
    assert "53,809,014 images (the schedule's)" in run(f"{P40} 8").output


def test_runs_are_projected_to_one_system() -> None:
    done = run("project runs . --to 8 --system abci --system p40-roce")
    assert "takes one system here, because computing stays that of the runs" in str(done.exception)


def test_layers_have_their_products_bytes_and_bound() -> None:
    workload, system = workload_of("resnet50"), system_of("p40-roce")
    layers = workload.model.layer_table(workload.data)
    rows = layer_rows(layers, system, workload.train)
    assert sum(row.count for row in rows) == 2 * len(layers)
    assert sum(2 * row.count * row.macs for row in rows) == workload.model.training_flops(workload.data)
    flops_per_byte = 12e12 / 346e9  # of the P40 in fp32
    assert all((row.bound_by == "memory") == (row.flops_per_byte < flops_per_byte) for row in rows)
    assert {row.bound_by for row in rows if row.kind == "norm"} == {"memory"}
    wide = Layer(name="wide", kind="linear", block=0, inputs=10, outputs=20, weights=640, macs=200)
    forward, backward = layer_rows((wide, wide), system, workload.train)
    assert (forward.count, forward.macs, forward.moved_bytes) == (2, 200, 4 * (10 + 20 + 640 / 64))
    assert (backward.count, backward.macs, backward.moved_bytes) == (2, 400, 4 * (20 + 10 + 10 + 2 * 640 / 64))
    content = json.loads(run(f"{P40} 8 --format json").output)
    assert len(content["layers"]) == len(rows)
    assert "Memory bounds " in run(f"{P40} 8 --full").output
