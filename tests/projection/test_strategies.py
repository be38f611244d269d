"""Each cell of the table of strategies, against counts of schedules, an event simulation, and counting by hand."""

from __future__ import annotations

import heapq
import json
import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import cli as command
from dlbench.errors import UserError
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.predictions import features
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.strategies.layers import CountedMemory, Groups, LayerTimes, as_counted, watched_layers
from dlbench.projection.strategies.table import INNER, STRATEGIES, StrategyCase, best, cut
from dlbench.records.rows.spans import COMPUTE, SpanWriter
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.comm import Collective, Level, NetworkModel, Piece
from dlbench.specs.files import find
from dlbench.specs.layers import Layer, Layers
from dlbench.specs.workload import Model, ResNetModel
from tests.conftest import Cli
from tests.projection.test_gathering import NETWORK, write
from tests.support import collectives_factory as factory
from tests.support.schemas import validator

ALPHA, BETA = 1e-5, 1e-9
BATCH = 720_720  # Every count up to 16 divides it.
PIECE = Piece(alpha_s=ALPHA, beta_s_per_byte=BETA)


def network(*, inside: int | None = None, across: int | None = None) -> NetworkModel:
    slower = Piece(alpha_s=3 * ALPHA, beta_s_per_byte=5 * BETA)
    levels = {"inside": Level(pieces=(PIECE,), links=inside), "across": Level(pieces=(slower,), links=across)}
    return NetworkModel(system="planted", transport="none", **levels)


def layers_of(name: str) -> tuple[Layer, ...]:
    found = choose(WorkloadFile(find("workloads", name)), "ci", {})
    return found.model.layer_table(found.data)


COSMOFLOW, RESNET, BERT = map(layers_of, ("cosmoflow", "resnet50", "bert"))
HEADS = max(layer.heads for layer in BERT)


def rows_of(layers: tuple[Layer, ...], ranks: int, *names: str, node: int | None = None, **given: Any) -> Any:
    given.setdefault("times", LayerTimes.split(layers, forward_s=1e-3, backward_s=2e-3, update_s=0.5))
    layout = Layout(ranks=ranks, group_size=node or ranks)
    given = {"layers": layers, "network": network(), "layout": layout, "batch": BATCH, "slots": 2, **given}
    case = StrategyCase(**given)
    return list(case.table(names or STRATEGIES))


def cost(collective: Collective, ranks: int, elements: float) -> float:
    """By the counts of the ring's schedule: steps in a row, and the bytes of a rank."""
    one = counts(collective, "ring", Layout(ranks=ranks, group_size=ranks), BATCH, 4)[0]
    return one.steps * ALPHA + one.bytes_sent * elements / BATCH * BETA


def blocks_of(layers: tuple[Layer, ...]) -> list[list[int]]:
    return [[n for n, layer in enumerate(layers) if layer.block == block] for block in range(layers[-1].block + 1)]


def stages_of(layers: tuple[Layer, ...], times: LayerTimes, count: int) -> list[list[int]]:
    """The layers of each stage of a pipeline that is cut where stages take equally long."""
    blocks = blocks_of(layers)
    work = [sum(times.forward[n] + times.backward[n] for n in block) for block in blocks]
    return [[n for block in blocks[first:last] for n in block] for first, last in cut(work, count)]


def uneven_times(layers: tuple[Layer, ...], unit_s: float, update_s: float) -> LayerTimes:
    numbers = range(len(layers))
    return LayerTimes(
        forward=tuple(unit_s * (1 + n % 3) for n in numbers),
        backward=tuple(unit_s * (2 + n % 5) for n in numbers),
        update_s=update_s,
    )


def by_counts(strategy: str, ranks: int) -> float:
    """Communication of a step of a CosmoFlow: what table 3 of the publication sums up."""
    weights = sum(layer.weights for layer in COSMOFLOW)
    blocks = [sum(COSMOFLOW[n].weights for n in block) for block in blocks_of(COSMOFLOW)]
    products = [layer for layer in COSMOFLOW if layer.is_product]
    if strategy == "serial":
        return 0.0
    if strategy in ("data", "zero-1", "local-sgd"):
        # Local SGD averages two values of the optimizer along with each weight.
        summed = cost("allreduce", ranks, weights * (3 if strategy == "local-sgd" else 1))
        gathered = cost("all-gather", ranks, weights) if strategy == "zero-1" else 0.0
        return summed / 8 if strategy == "local-sgd" else summed + gathered
    if strategy == "fsdp":
        own, root = blocks[1:-1], blocks[0] + blocks[-1]  # The root is gathered once.
        inner = sum(2 * cost("all-gather", ranks, one) + cost("reduce-scatter", ranks, one) for one in own)
        return inner + cost("all-gather", ranks, root) + cost("reduce-scatter", ranks, root)
    if strategy == "filter":
        wide = [layer for layer in products if layer.filters >= ranks]
        out = sum(cost("all-gather", ranks, BATCH * layer.outputs) for layer in wide if layer is not products[-1])
        return out + sum(cost("allreduce", ranks, BATCH * layer.inputs) for layer in wide if layer is not products[0])
    wide = [layer for layer in products[1:] if layer.channels >= ranks]
    out = sum(cost("allreduce", ranks, BATCH * layer.outputs) for layer in wide)
    return out + sum(cost("all-gather", ranks, BATCH * layer.inputs) for layer in wide)


@pytest.mark.parametrize("ranks", range(2, 17))
@pytest.mark.parametrize("strategy", ["serial", "data", "zero-1", "fsdp", "local-sgd", "filter", "channel"])
def test_communication_is_that_of_the_schedules_counts(strategy: str, ranks: int) -> None:
    (row,) = rows_of(COSMOFLOW, ranks, strategy)
    assert not row.refused
    assert row.communication_s == pytest.approx(by_counts(strategy, ranks), rel=1e-6)
    assert 0 <= row.exposed_s <= row.communication_s * (1 + 1e-9)


def test_a_tensor_parallel_layer_sums_four_times_what_enters_it() -> None:
    length, hidden = BERT[3].inputs // BERT[4].channels, BERT[4].channels
    for ranks in range(2, HEADS + 1):
        (row,) = rows_of(BERT, ranks, "tensor")
        encoders = sum(layer.name.endswith("output_norm") for layer in BERT)
        by_hand = 4 * encoders * cost("allreduce", ranks, BATCH * length * hidden)
        assert row.communication_s == pytest.approx(by_hand, rel=1e-6)


@given(edge=st.integers(8, 20), kernel=st.sampled_from([1, 2, 3, 5]), stride=st.integers(1, 2), ranks=st.integers(2, 4))
def test_a_halo_is_what_the_windows_of_a_rank_reach_beyond_its_part(
    edge: int, kernel: int, stride: int, ranks: int
) -> None:
    """Of the rank with most neighbours; one dimension is cut, whose length the ranks divide."""
    length, others = edge * ranks * stride, (1, 1)
    net = Layers()
    net.conv("first", 2, 3, (length, *others), kernel, stride)
    net.linear("last", 3 * edge * ranks, 1)
    (row,) = rows_of(tuple(net), ranks, "spatial")
    summed = cost("allreduce", ranks, sum(layer.weights for layer in net))
    gathered = cost("all-gather", ranks, BATCH * net[1].inputs)
    padding = (kernel - 1) // 2
    both_sides = []
    for rank in range(ranks):
        own = range(rank * edge * stride, (rank + 1) * edge * stride)
        reached = {place - padding + at for place in own[::stride] for at in range(kernel)}
        below = len([x for x in reached if 0 <= x < own.start])
        above = len([x for x in reached if own.stop <= x < length])
        both_sides.append(sum(ALPHA + BATCH * 2 * one * 4 * BETA for one in (below, above) if one))
    assert row.communication_s == pytest.approx(summed + gathered + max(both_sides), rel=1e-6)


def gpipe_seconds(forward: list[float], backward: list[float], links: list[float], parts: int) -> float:
    """Stages and links between them, each does one thing at a time, what is ready first comes first."""
    num = len(forward)
    route = [("stage", n, 0) if half == 0 else ("link", n, 0) for n in range(num) for half in (0, 1)][:-1]
    route += [(kind, n, 1) for kind, n, _ in reversed(route)]
    length = {("stage", 0): forward, ("stage", 1): backward, ("link", 0): links, ("link", 1): links}
    busy: set[tuple[str, int]] = set()
    waiting: dict[tuple[str, int], list[tuple[int, int]]] = {}
    events: list[tuple[float, int, int]] = []
    done = [0] * len(route)

    def begin(now: float, place: tuple[str, int]) -> None:
        able = [one for one in sorted(waiting.get(place, [])) if one[0] != num * 2 - 1 or done[num * 2 - 2] == parts]
        if place not in busy and able:
            at, part = able[0]
            waiting[place].remove(able[0])
            busy.add(place)
            kind, number, half = route[at]
            heapq.heappush(events, (now + length[kind, half][number], at, part))

    for part in range(parts):
        waiting.setdefault(("stage", 0), []).append((0, part))
    begin(0.0, ("stage", 0))
    now = 0.0
    while events:
        now, at, part = heapq.heappop(events)
        done[at] += 1
        place = route[at][:2]
        busy.discard(place)
        if at + 1 < len(route):
            following = route[at + 1][:2]
            waiting.setdefault(following, []).append((at + 1, part))
            begin(now, following)
        begin(now, place)
    return now


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [1, 6, 32])
@pytest.mark.parametrize("slow", [1.0, 1e3])
def test_a_pipeline_takes_what_an_event_simulation_of_gpipe_takes(ranks: int, batch: int, slow: float) -> None:
    piece = Piece(alpha_s=ALPHA * slow, beta_s_per_byte=BETA * slow)
    used = network().model_copy(update={"inside": Level(pieces=(piece,))})
    layers = COSMOFLOW
    times = uneven_times(layers, 1e-3, 0.0)
    (row,) = rows_of(layers, ranks, "pipeline", times=times, network=used, batch=batch, slots=0)
    parts = int(row.notes[0].split()[0])
    stages = stages_of(layers, times, ranks)
    share = batch / parts
    sends = [ALPHA * slow + share * layers[stage[-1]].outputs * 4 * BETA * slow for stage in stages[:-1]]
    forward, backward = (
        [share * sum(half[n] for n in stage) for stage in stages] for half in (times.forward, times.backward)
    )
    step_s = gpipe_seconds(forward, backward, [*sends, 0.0], parts)
    assert row.step_s == pytest.approx(step_s, rel=1e-9)
    busy_s = [parts * (there + back) for there, back in zip(forward, backward, strict=True)]
    assert row.bubble == pytest.approx(1 - sum(busy_s) / (ranks * step_s), abs=1e-12)
    assert row.imbalance == pytest.approx(max(busy_s) * ranks / sum(busy_s))


@pytest.mark.parametrize(("ranks", "batch"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(ranks: int, batch: int) -> None:
    free = Piece(alpha_s=0.0, beta_s_per_byte=0.0)
    used = network().model_copy(update={"inside": Level(pieces=(free,))})
    layers = tuple(
        Layer(name=f"layer{n}", kind="linear", block=n, inputs=8, outputs=8, weights=64, macs=64) for n in range(8)
    )
    times = LayerTimes(forward=(1.0,) * 8, backward=(2.0,) * 8, update_s=0.0)
    (row,) = rows_of(layers, ranks, "pipeline", times=times, network=used, batch=batch)
    assert row.bubble == pytest.approx((ranks - 1) / (batch + ranks - 1))
    assert row.imbalance == pytest.approx(1.0)
    assert "GPipe: activations of all parts" in row.notes[-1]


def tensor_share(layer: Layer) -> float:
    return 0.5 if layer.tensor else 1.0


def test_three_factors_are_a_pipeline_of_tensor_parallel_stages_and_an_exchange_between_replicas() -> None:
    times, batch, stages_count, replicas = uneven_times(BERT, 1e-9, 0.5), 32, 2, 2
    rows = rows_of(BERT, 8, "data+pipeline+tensor", times=times, batch=batch * replicas)
    (row,) = (row for row in rows if (row.replicas, row.tensor_ranks) == (replicas, 2))
    parts = int(row.notes[0].split()[0])
    samples = batch / parts
    stages = stages_of(BERT, times, stages_count)
    halves = []
    for half in (times.forward, times.backward):
        computed = [samples * sum(half[n] * tensor_share(BERT[n]) for n in stage) for stage in stages]
        summed = [
            sum(cost("allreduce", 2, samples * BERT[n].outputs) for n in stage if BERT[n].tensor == "row")
            for stage in stages
        ]
        halves.append([own + messages for own, messages in zip(computed, summed, strict=True)])
    sends = [ALPHA + samples * BERT[stages[0][-1]].outputs * 4 * BETA, 0.0]
    passes_s = gpipe_seconds(*halves, sends, parts)
    tied = sum(layer.shared_weights for layer in BERT)
    held = [sum(BERT[n].weights * tensor_share(BERT[n]) for n in stage) for stage in stages]
    held[-1] += tied
    exchanged_s = cost("allreduce", replicas, max(held)) + 2 * (ALPHA + tied / 2 * 4 * BETA)
    update_s = times.update_s * max(held) / sum(layer.weights for layer in BERT)
    assert row.step_s == pytest.approx(passes_s + exchanged_s + update_s, rel=1e-6)
    assert row.bubble == pytest.approx(1 - parts * sum(map(sum, halves)) / (stages_count * passes_s))
    # By 1F1B the first stage holds two parts, the last one.
    elements = [
        samples
        * sum(
            BERT[n].inputs * (1.0 if BERT[n].tensor == "column" else tensor_share(BERT[n]))
            + BERT[n].outputs * (1.0 if BERT[n].tensor == "row" else tensor_share(BERT[n]))
            for n in stage
        )
        for stage in stages
    ]
    needed = max(4 * (4 * held[n] + (2 - n) * elements[n]) for n in (0, 1))
    assert row.memory_bytes == pytest.approx(needed)
    assert row.notes[-1] == "memory by 1F1B: activations of at most 2 parts"


def test_fsdp_over_tensor_gathers_the_shares_of_layers_and_sums_their_outputs() -> None:
    (row,) = rows_of(BERT, 8, "fsdp+tensor", times=uneven_times(BERT, 1e-9, 0.5), batch=64)
    assert (row.replicas, row.tensor_ranks) == (4, 2)
    blocks = [sum(BERT[n].weights * tensor_share(BERT[n]) for n in block) for block in blocks_of(BERT)]
    inner, root = blocks[1:-1], blocks[0] + blocks[-1]
    gathers = sum(2 * cost("all-gather", 4, block) + cost("reduce-scatter", 4, block) for block in inner)
    gathers += cost("all-gather", 4, root) + cost("reduce-scatter", 4, root)
    sums = sum(2 * cost("allreduce", 2, 16 * layer.outputs) for layer in BERT if layer.tensor == "row")
    assert row.communication_s == pytest.approx(gathers + sums, rel=1e-6)
    state = 4 * 4 * sum(blocks) / 4
    (tensor,) = (row for row in rows_of(BERT, 8, "data+tensor", batch=64) if row.replicas == 4)
    assert row.memory_bytes == pytest.approx(tensor.memory_bytes - 3 * state + 2 * 4 * max(blocks))


@pytest.mark.parametrize(("node", "hidden"), [(4, False), (2, True)])
def test_gradients_and_activations_on_one_link_add_up_their_bytes(node: int, hidden: bool) -> None:
    """Computing takes no time and messages no start-up, so that a step takes what its links carry."""
    width, samples = 4096, 512
    layers = [Layer(name="scores", kind="attention", block=0, inputs=1, outputs=0, macs=1, heads=2, tensor="head")]
    for number in range(2):
        for name, divided in (("expand", "column"), ("reduce", "row")):
            sizes: dict[str, Any] = {"inputs": width, "outputs": width, "weights": width**2, "macs": 1}
            shape: dict[str, Any] = {"channels": width, "filters": width, "tensor": divided}
            layers.append(Layer(name=f"{name}{number}", kind="linear", block=number, **sizes, **shape))
    level = Level(pieces=(Piece(alpha_s=0.0, beta_s_per_byte=BETA),))
    used = network().model_copy(update={"inside": level, "across": level})
    times = LayerTimes(forward=(0.0,) * 5, backward=(0.0,) * 5, update_s=0.0)
    given: dict[str, Any] = {"times": times, "network": used, "node": node, "batch": 2 * samples}
    (row,) = rows_of(tuple(layers), 4, "data+tensor", **given)
    activation_bytes = samples * width * 4  # A ring of two sends as many bytes as it sums.
    gradient_bytes = 4 * width**2 // 2 * 4
    assert row.communication_s == pytest.approx((4 * activation_bytes + gradient_bytes) * BETA)
    # Gradients of the last layers travel while the first sums its activations: for nothing if on other links.
    link_bytes = 4 * activation_bytes + gradient_bytes - hidden * activation_bytes
    assert row.step_s == pytest.approx(link_bytes * BETA)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.data())
def test_a_cut_has_the_least_largest_part(work: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(work)))
    every = [[0, *inner, len(work)] for inner in combinations(range(1, len(work)), parts - 1)]
    least = min(max(sum(work[a:b]) for a, b in pairwise(ends)) for ends in every)
    found = cut(work, parts)
    assert max(sum(work[a:b]) for a, b in found) == pytest.approx(least)
    assert [found[0][0], *(end for _, end in found)] in every


EDGES = [
    (COSMOFLOW, "data", 24, "batch"),
    (COSMOFLOW, "zero-1", 24, "batch"),
    (COSMOFLOW, "fsdp", 24, "batch"),
    (COSMOFLOW, "pipeline", 8, "blocks"),
    (COSMOFLOW, "filter", 16, "filters"),
    (COSMOFLOW, "channel", 16, "channels"),
    (COSMOFLOW, "spatial", 1, "extents"),
    (BERT, "tensor", HEADS, "heads"),
    (COSMOFLOW, "data+pipeline", 24 * 8, "batch x blocks"),
    (COSMOFLOW, "data+filter", 24 * 16, "batch x filters"),
    (COSMOFLOW, "data+channel", 24 * 16, "batch x channels"),
    (BERT, "data+tensor", 24 * HEADS, "batch x heads"),
]


@pytest.mark.parametrize(("layers", "name", "limit", "word"), EDGES)
def test_beyond_a_limit_a_strategy_is_refused_with_its_name(
    layers: tuple[Layer, ...], name: str, limit: int, word: str
) -> None:
    """One rank beyond it, or next to data one group of the largest size, which leaves the batch too small."""
    size = limit // 24 if "+" in name else 1
    at, above = (rows_of(layers, ranks, name, batch=24, node=size) for ranks in (limit, limit + size))
    assert [row.replicas for row in at if not row.refused] == [1 if name in INNER else 24]
    assert {(row.limit, row.bound_by) for row in at} == {(limit, at[0].bound_by)}
    assert word in at[0].bound_by
    for row in above:
        assert ("batch" if size > 1 else word) in row.refused
        assert str(24 if size > 1 else limit) in row.refused
        assert (row.step_s, row.fits, row.accuracy) == (0.0, None, None)


@pytest.mark.parametrize(("links", "phi"), [(1, 4.0), (2, 2.0), (4, 1.0), (None, 1.0)])
def test_phi_of_rings_at_once_is_that_of_the_hierarchical_all_reduce(links: int | None, phi: float) -> None:
    """Four rings of one rank of each node leave a node at once, as its second phase does."""
    layout, used = Layout(ranks=8, group_size=4), network(across=links)
    together = Groups(layout, used, 2, 4)
    assert together.phi == phi
    assert features("allreduce", "hierarchical", 2**22, layout, used).phi["across"] == phi
    alone = features("allreduce", "ring", 2**20, Layout(ranks=2, group_size=1), used).seconds(used)
    assert together.seconds("allreduce", 2**20, 4) == pytest.approx((alone - 6 * ALPHA) * phi + 6 * ALPHA)
    rows = rows_of(COSMOFLOW, 8, "data+filter", node=4, network=used)
    assert {row.replicas: row.phi for row in rows} == {4: max(1.0, 2 / (links or 2)), 2: phi}


def test_memory_as_counted_is_that_of_the_moment_that_holds_most() -> None:
    layers = tuple(
        Layer(name=f"layer{n}", kind="linear", block=n, inputs=0, outputs=10, weights=weights)
        for n, weights in enumerate((30, 100, 100, 30))
    )
    sizes = {"gamma": 1.0, "scratch": 0.0, "buckets": 1.0, "clones": 1.0}
    alike = {"slots": 2, "batch": 4, "ranks": 2}

    def held(name: str, **other: float) -> float:
        return as_counted(layers, CountedMemory(**sizes | other), name, **alike) / 4

    # Before the first block's backward pass: its activations, and all gradients but its own.
    assert held("serial") == 3 * 260 + 40 + 230
    assert held("data") == 4 * 260 + 40 + 230
    assert held("zero-1", scratch=2.0) == 3 * 260 + (1 + 1) * 260
    # Half of all; then, as the third block's gradients leave: two blocks' activations, the root and its gradients of
    # the last block, the block before ahead, and the message with its copy and what comes of it.
    assert held("fsdp") == 3 * 130 + 2 * 40 + 60 + 30 + 100 + 2.5 * 100
    assert held("fsdp", clones=0.0) == held("fsdp") - 100
    assert held("fsdp", gamma=20.0) == 3 * 130 + 20 * 160 + 60 + 100  # all activations, and a block ahead


def test_the_best_is_the_fastest_that_fits_and_trains_the_same() -> None:
    rows = rows_of(COSMOFLOW, 4, batch=64)
    fastest = best(rows)
    assert fastest is not None
    assert fastest.strategy not in ("local-sgd", "serial")
    limited = rows_of(COSMOFLOW, 4, batch=64, memory_limit=int(fastest.memory_bytes) - 1)
    within = best(limited)
    assert within is None or within.memory_bytes < fastest.memory_bytes
    assert next(row for row in limited if row.strategy == fastest.strategy).bound_by == "memory"
    assert all(row.memory_bytes < fastest.memory_bytes for row in limited if row.fits)
    assert best(rows_of(COSMOFLOW, 4, batch=64, memory_limit=1)) is None


def test_gradients_are_hidden_by_the_backward_pass_but_for_the_last_message() -> None:
    net = Layers()
    for number in range(3):
        net.block = number
        net.linear(f"layer{number}", 4096, 4096)
    layers = tuple(net)
    times = LayerTimes(forward=(1e3,) * 3, backward=(1e3,) * 3, update_s=0.0)
    (row,) = rows_of(layers, 4, "data", times=times, batch=4, slots=0)
    one = cost("allreduce", 4, 4096 * 4097)  # 64 MiB: each layer travels alone
    assert row.communication_s == pytest.approx(3 * one)
    assert row.exposed_s == pytest.approx(one)
    (row,) = rows_of(layers, 4, "fsdp", times=times, batch=4, slots=0)  # the first gather, and the last scatter
    ends = cost("all-gather", 4, 2 * 4096 * 4097), cost("reduce-scatter", 4, 2 * 4096 * 4097)
    assert row.exposed_s == pytest.approx(sum(ends))


def test_out_of_core_plans_for_the_limit_and_pays_by_recomputing() -> None:
    (within,) = rows_of(COSMOFLOW, 4, "out-of-core", batch=64, memory_limit=2**40)
    (data,) = rows_of(COSMOFLOW, 4, "data", batch=64)
    assert within.compute_s == pytest.approx(data.compute_s)
    assert within.memory_bytes <= data.memory_bytes * (1 + 1e-6)
    (less,) = rows_of(COSMOFLOW, 4, "out-of-core", batch=64, memory_limit=int(0.8 * data.memory_bytes))
    assert less.fits
    assert data.compute_s < less.compute_s < data.compute_s + 64 / 4 * 1e-3 * (1 + 1e-9)  # at most a forward pass
    assert "recompute" in less.notes[0]
    (none,) = rows_of(COSMOFLOW, 4, "out-of-core", batch=64, memory_limit=1000)
    assert "fit" in none.refused or "least" in none.refused
    (unknown,) = rows_of(COSMOFLOW, 4, "out-of-core", batch=64)
    assert "limit" in unknown.refused


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("strategies") / "runs"
    write(out)
    inside = NETWORK.model_copy(update={"inside": NETWORK.across})
    (out.parent / "box.network.json").write_text(inside.model_dump_json())
    return out


def asked(runs: Path, *words: object) -> tuple[object, ...]:
    return "project", "runs", runs, "--network", runs.parent / "box.network.json", *words


def test_the_command_prints_the_best_and_marks_what_was_measured(cli: Cli, runs: Path) -> None:
    done = cli(*asked(runs, "--to", "64", "--strategy", "all", "--memory-limit", "1GiB", "--format", "json"))
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    validator("projection").validate(content)
    rows = content["groups"][0]["strategies"]
    measured = [row for row in rows if row["measured_s"] is not None]
    assert [(row["strategy"], row["ranks"]) for row in measured] == [("data", 2), ("data", 4), ("data", 8)]
    # By the plan: half of the batch's samples per rank of the sum of forward, backward and update of 85 ms.
    assert all(row["compute_s"] == pytest.approx(0.085, rel=0.01) for row in measured)
    assert {row["strategy"] for row in rows if row["ranks"] == 64} == set(STRATEGIES)
    # What was projected and what the table has of it is one number; others have its network's costs.
    targets = {one["ranks"]: one["step"]["quantiles"][4] for one in content["groups"][0]["projection"]["targets"]}
    (data,) = [row for row in rows if row["strategy"] == "data" and row["ranks"] == 64]
    assert data["step_s"] == targets[64]
    # The network of this workload has 20 times the gradients that were exchanged, so the table cannot be right of it.
    words = " ".join(cli(*asked(runs, "--to", "64", "--strategy", "pipeline")).stdout.split())
    assert "No fastest strategy: the accuracy of the model is below 80 %" in words
    assert "fastest," not in words
    assert "tensor: it has no attention heads." in cli(*asked(runs, "--to", "64", "--strategy", "tensor")).stdout
    full = cli(*asked(runs, "--to", "64", "--strategy", "pipeline", "--full")).stdout
    assert "model only" in full
    assert "by multiply-adds" in " ".join(full.split())


def test_accuracy_has_a_step_without_congestion_with_comm_runs(runs: Path, tmp_path: Path) -> None:
    def change(point: dict[str, Any]) -> dict[str, Any]:
        return {"times_s": [point["times_s"][0], *[10 * seconds for seconds in point["times_s"][1:]]]}

    asked_for: dict[str, Any] = {"points_are": "nodes", "ranks_per_node": 2, "group_size": None, "backends": "none"}
    story = factory.Story(noise=0.0, change=change)
    factory.write_comm_series(
        tmp_path, story, system="box", points=(2, 4), repeats=1, algorithms="ring", sizes="64KiB:1MiB", **asked_for
    )
    words = ["project", "runs", str(runs), str(tmp_path), "--to", "16", "--strategy", "data", "--full"]
    steps = r"medians of the network's costs (\S+) %, minima, without congestion (\S+) %, scaled to the anchor \S+ %"
    found = re.search(f"step by step: {steps}", " ".join(CliRunner().invoke(command, words).output.split()))
    assert found is not None
    assert found[1] != found[2]


def test_what_is_not_known_of_the_network_is_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of messages; and layers, of a network of DLBENCH_PATH that does not say them."""
    words = ["project", "runs", str(runs), "--to", "16", "--strategy", "all"]
    without = CliRunner().invoke(command, words).exception
    assert str(without).startswith("--strategy needs costs of messages")
    monkeypatch.setattr(ResNetModel, "layer_table", Model.layer_table)
    ideal = ["project", "spec", "resnet50", "--system", "p40-roce", "--to", "8"]
    for line in (words, ideal):
        error = CliRunner().invoke(command, line).exception
        assert isinstance(error, UserError)
        assert re.match(r"(--strategy|project spec): layers of \w+ are not known.*layer_table.*\)$", str(error))


def test_layers_take_what_was_watched_of_them(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.spans"
    writer = SpanWriter(path, {"rank": 0, "run_id": "planted"}, 2**20)
    layers = [layer for layer in BERT if layer.kind not in ("attention", "embedding") and not layer.shared_weights]
    for number, layer in enumerate(layers):
        for step in (3, 4):
            writer.add(COMPUTE, f"forward {layer.name}", 0, 1000 * (number + 1), step=step)
            writer.add(COMPUTE, f"backward {layer.name}", 0, 3000 * (number + 1), step=step)
    writer.close()
    found = watched_layers(BERT, path, "planted")
    assert found is not None
    times = LayerTimes.split(BERT, forward_s=1.0, backward_s=2.0, update_s=0.0, watched=found)
    assert (sum(times.forward), sum(times.backward)) == (pytest.approx(1.0), pytest.approx(2.0))
    by_name = {layer.name: seconds for layer, seconds in zip(BERT, times.forward, strict=True)}
    names = [layer.name for layer in layers]
    assert by_name[names[5]] / by_name[names[1]] == pytest.approx(3.0)
    assert by_name["mlm_decoder"] > 0
    path = tmp_path / "rank-0001.spans"
    writer = SpanWriter(path, {"rank": 1, "run_id": "planted"}, 2**20)
    writer.add(COMPUTE, "forward pooler", 0, 1000, step=3)
    writer.close()
    assert watched_layers(BERT, path, "planted") is None
    assert watched_layers(BERT, tmp_path / "none.spans", "planted") is None
