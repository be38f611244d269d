"""A projected step: the account at its anchor, the planted truth beyond it, and what changes with each ingredient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.causes import CAUSES
from dlbench.perfmodels.predictions import Miss
from dlbench.projection.costs import LIBRARY
from dlbench.projection.exchange import Cycle, ExchangeMethod, messages_of
from dlbench.projection.ingredients import BatchFigures, Ingredients, NodeScatter, SlowHosts, StorageSupply
from dlbench.projection.nodes import lateness, scatter_of
from dlbench.projection.projected import PARTS, Projection, Target
from dlbench.projection.step import StepAt, _held_out, anchored, project
from dlbench.specs.sync import Fusion, read_fusion
from tests.support.training_machine import Machine, network_of

DRAWS = 200


def generator(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def spread(sd: float) -> Any:
    return lambda rng, nodes: sd * rng.standard_normal(nodes)


MACHINE = Machine(hosts=spread(0.02), jitter=0.02, run_sd=0.005, slowed=0.1)


def target(ingredients: Ingredients, ranks: int, **more: Any) -> Target:
    found = project(ingredients, [ranks], **{"draws": DRAWS, **more})
    assert len(found.targets) == 1, found.refused
    return found.targets[0]


def drawn(ingredients: Ingredients, ranks: int, **more: Any) -> Any:
    return target(ingredients, ranks, **more).drawn


machines = st.builds(
    Machine,
    ranks_per_node=st.sampled_from([1, 2, 4]),
    forward_s=st.floats(0.001, 0.1),
    backward_s=st.floats(0.001, 0.2),
    input_s=st.floats(0, 0.05),
    sizes=st.tuples(*[st.integers(250, 12_000_000).map(lambda elements: 4 * elements)] * 3),
    shares=st.lists(st.floats(0, 1), min_size=3, max_size=3).map(lambda found: tuple(sorted(found))),
    algorithm=st.sampled_from(["ring", "recursive-halving-doubling"]),
    slowed=st.floats(0, 0.3),
    hosts=st.floats(0, 0.1).map(spread),
    jitter=st.floats(0, 0.1),
    run_sd=st.floats(0, 0.02),
)


@given(machine=machines, seed=st.integers(0, 100))
def test_at_the_anchor_all_parts_are_the_accounts_and_beyond_it_they_sum(machine: Machine, seed: int) -> None:
    ingredients = machine.ingredients(generator(seed), (1, 2, 4), runs=3)
    anchor = ingredients.anchor
    if refused := project(ingredients, [anchor.ranks], draws=DRAWS).refused:
        assert refused[0].code in ("R5", "R6")
        return
    at_anchor, beyond = project(ingredients, [anchor.ranks, 2 * anchor.ranks], draws=DRAWS).targets
    if not beyond.parts:  # R5: by the points alone.
        return
    mean = {name: np.mean([run.parts.get(name, 0.0) for run in anchor.runs]) for name in (*CAUSES, "optimizer")}
    account = {
        "compute": mean["compute"] - mean["optimizer"],
        "host": sum(mean[name] for name in ("host", "launch", "throttling", "memory", "rest")),
        **{name: mean[name] for name in ("optimizer", "input", "straggler", "exchange")},
    }
    for name in PARTS:
        # Draws are symmetric about the mean of the runs; none goes below 0.
        assert at_anchor.drawn[name].mean() == pytest.approx(account[name], rel=0.05, abs=1e-4)
    assert np.all(at_anchor.drawn["error"] == 1)
    for one in (at_anchor, beyond):
        by_draw = one.drawn
        assert sum(by_draw[name] for name in PARTS) * by_draw["error"] == pytest.approx(by_draw["step"])
        assert all(np.all(by_draw[name] >= 0) for name in PARTS)
        assert np.all(by_draw["step"] >= (by_draw["compute"] + by_draw["optimizer"]) * (1 - 1e-12))
    base = np.mean([run.step_s for run in ingredients.points[0].runs])
    most = max(base / np.mean([run.step_s for run in point.runs]) for point in ingredients.points)
    assert beyond.efficiency is not None
    assert beyond.efficiency.quantiles[-1] <= max(1.0, most) * (1 + 1e-12)
    assert beyond == target(ingredients, 2 * anchor.ranks)  # equal ingredients, equal answer


def test_the_truth_is_projected_where_the_model_holds() -> None:
    """Whatever a machine is made of, its own costs at its own rank counts give its steps at four times the nodes."""
    for sizes in ((4_000_000,) * 4, (25_000_000,) * 4):
        machine = Machine(hosts=spread(0.02), jitter=0.01, sizes=sizes)
        ingredients = machine.ingredients(generator(), (1, 2, 4, 8))
        truth = np.mean([machine.point(generator(seed), 32)[0].runs[0].step_s for seed in range(20)])
        found = target(ingredients, 128)
        assert np.median(sum(found.drawn[name] for name in PARTS)) == pytest.approx(truth, rel=0.02)


def test_costs_that_are_off_by_a_factor_are_mended_at_the_anchor() -> None:
    right, off = (
        MACHINE.ingredients(generator(), (1, 2, 4), network=network_of(across=(2e-5 * by, 1e-9 * by), inside=inside))
        for by, inside in ((1, (5e-6, 1e-10)), (1.5, (7.5e-6, 1.5e-10)))
    )
    assert drawn(off, 64)["step"] == pytest.approx(drawn(right, 64)["step"], rel=1e-6)
    other = MACHINE.ingredients(generator(), (1, 2, 4), network=network_of(across=(2e-4, 1e-8)))
    found = project(other, [64, 128, 256], draws=DRAWS)
    assert [(one.code, one.ranks) for one in found.refused] == [("R5", None)]
    # Up to four times the ranks the points speak for themselves.
    assert "its costs must be multiplied by 0.1" in found.targets[0].flags[0].text


def test_where_runs_do_not_say_how_long_messages_took_costs_are_scaled_to_the_measured_exchange() -> None:
    ingredients = MACHINE.ingredients(generator(), (1, 2, 4))
    anchor = ingredients.anchor
    silent = anchor.model_copy(
        update={"runs": tuple(run.model_copy(update={"communication_s": None}) for run in anchor.runs)}
    )
    other = ingredients.model_copy(update={"points": (*ingredients.points[:-1], silent)})
    assert np.median(drawn(other, 64)["step"]) == pytest.approx(np.median(drawn(ingredients, 64)["step"]), rel=0.02)


def test_the_algorithm_of_a_library_is_one_that_fits_the_measured_rank_counts() -> None:
    """Start-ups count, so that a tree is told from a ring by how its times grow with the nodes."""
    for algorithm in ("ring", "double-binary-tree"):
        slow = network_of(across=(1e-4, 1e-9))
        machine = Machine(carrier="nccl", algorithm=algorithm, sizes=(400_000,) * 4, network=slow)
        ingredients = machine.ingredients(generator(), (1, 2, 4, 8))
        found = target(ingredients, 256)
        assert algorithm in found.algorithms
        assert len(found.algorithms) < 3
        truth = machine.point(generator(), 64, runs=1)[0].runs[0].step_s
        low, high = np.quantile(found.drawn["step"], [0.05, 0.95])
        assert 0.99 * low <= truth <= 1.01 * high
    # Where one rank count of several nodes is all there is, none is ruled out.
    assert set(target(machine.ingredients(generator(), (1, 2)), 64).algorithms) == set(LIBRARY)


def test_costs_that_grew_from_point_to_point_go_on_growing() -> None:
    """Congestion of 10 % a doubling, which no schedule has: at eight times the nodes most of it is foreseen."""
    machine = Machine(congestion=0.1, run_sd=0.002)
    truth = machine.point(generator(), 64, runs=1)[0].runs[0].parts["exchange"]
    found = drawn(machine.ingredients(generator(), (1, 2, 4, 8)), 256)["exchange"]
    steady = drawn(Machine(run_sd=0.002).ingredients(generator(), (1, 2, 4, 8)), 256)["exchange"]
    assert np.median(found) - np.median(steady) > 0.5 * (truth - np.median(steady)) > 0.01
    assert np.quantile(found, 0.95) > truth


def test_computing_grows_with_the_exchange_that_hides_in_it() -> None:
    """Messages that take longer at more ranks hide in the backward pass, and slow it down by 40 % of their time."""
    machine = Machine(slowed=0.4, congestion=0.15, run_sd=0.002, jitter=0.01, sizes=(4_000_000,) * 4)
    ingredients = machine.ingredients(generator(), (2, 4, 8, 16))
    truth = machine.point(generator(), 64, runs=1)[0].runs[0]
    found = drawn(ingredients, 256)
    low, high = np.quantile(found["compute"], [0.05, 0.95])
    computing = truth.parts["forward"] + truth.parts["backward"]
    assert low <= computing <= high
    anchor = ingredients.anchor.runs[0].parts
    assert np.median(found["compute"]) > 1.02 * (anchor["forward"] + anchor["backward"])
    # Points that do not tell leave open that it costs something, so that the band reaches upwards.
    few = drawn(machine.ingredients(generator(), (1, 2)), 64)["compute"]
    assert np.quantile(few, 0.95) - np.median(few) > 0.005


@pytest.mark.parametrize("placement", ["sorted", "shuffled"])
def test_ranks_lie_below_leaf_switches_as_recorded_or_are_drawn_between_sorted_and_shuffled(placement: Any) -> None:
    machine = Machine(leaf_nodes=8, taper=4.0, placement=placement, run_sd=0.002, carrier="gloo")
    truth = machine.point(generator(), 64, runs=1)[0].runs[0].step_s

    def projected(nodes: tuple[int, ...], **changes: Any) -> Target:
        return target(replace(machine, **changes).ingredients(generator(), nodes), 256)

    recorded = projected((1, 2, 4, 8, 16, 32))
    assert recorded.step.median == pytest.approx(truth, rel=0.05)
    unknown = projected((1, 2, 4, 8))
    low, high = unknown.step.middle(90)
    assert low <= truth <= high
    width = recorded.step.middle(90)[1] / recorded.step.middle(90)[0]
    assert high / low > 1.5 * width
    # Where records name no switches, the times of points on several leaf switches tell nearly as much.
    silent = projected((1, 2, 4, 8, 16, 32), records_switches=False)
    assert silent.step.median == pytest.approx(truth, rel=0.12)
    assert silent.step.middle(90)[0] <= truth <= silent.step.middle(90)[1]
    flagged = [{flag.code for flag in one.flags} & {"F9", "F12"} for one in (recorded, unknown, silent)]
    assert flagged == [{"F9"}, {"F9", "F12"}, {"F9"}]


def test_held_out_points_and_the_ledger_make_the_error_of_the_model() -> None:
    def width(found: Target) -> float:
        low, high = found.model_error.middle(90)
        return high - low

    ingredients = MACHINE.ingredients(generator(), (1, 2, 4, 8))
    # At the anchor everything takes a tenth longer, for no reason that the account has.
    runs = []
    for run in ingredients.anchor.runs:
        parts = {name: 1.1 * seconds for name, seconds in run.parts.items()}
        runs.append(run.model_copy(update={"step_s": 1.1 * run.step_s, "parts": parts}))
    anchor = ingredients.anchor.model_copy(update={"runs": tuple(runs)})
    slower = ingredients.model_copy(update={"points": (*ingredients.points[:-1], anchor)})
    one, other = (project(given, [64], draws=DRAWS) for given in (ingredients, slower))
    assert [(held.ranks, held.anchor_ranks, held.doublings) for held in one.held_out] == [(16, 8, 1.0), (32, 16, 1.0)]
    assert max(abs(held.error) for held in one.held_out) < 0.025
    assert min(held.error for held in other.held_out) < -0.05
    assert width(other.targets[0]) > 1.5 * width(one.targets[0])
    good, poor = ([Miss(error=error, doublings=1.0)] * 20 for error in (0.0005, 0.1))
    assert (
        width(target(ingredients, 64, misses=good))
        < width(one.targets[0])
        < width(target(ingredients, 64, misses=poor))
    )
    # What runs scatter is drawn by itself, so a miss that it explains is none of the model.
    noisy = project(replace(MACHINE, run_sd=0.04).ingredients(generator(3), (1, 2, 4, 8)), [64], draws=DRAWS)
    assert max(abs(held.error) for held in noisy.held_out) > 0.025
    assert width(noisy.targets[0]) < 2 * width(one.targets[0])
    # Farther away it grows, and nothing is off where nothing is extrapolated.
    assert width(target(ingredients, 128)) > 1.05 * width(one.targets[0])
    assert width(target(ingredients, 32)) == 0


def test_what_runs_scatter_is_in_a_miss_and_hidden_exchange_in_the_wait_for_a_late_node() -> None:
    ingredients = MACHINE.ingredients(generator(), (1, 2, 4))
    runs, shares = ingredients.anchor.runs, np.linspace(0.9, 1.1, len(ingredients.anchor.runs))
    apart = [run.model_copy(update={"step_s": 0.1 * share}) for run, share in zip(runs, shares, strict=True)]
    anchor = ingredients.anchor.model_copy(update={"runs": tuple(apart)})
    model = anchored(ingredients, DRAWS)
    wide = ingredients.model_copy(update={"points": (*ingredients.points[:-1], anchor)})
    (miss,) = _held_out(replace(model, ingredients=wide))[1]
    assert miss.scatter**2 > shares.var(ddof=1) / len(shares)
    at = StepAt(model=model, ranks=64, method=None)
    begun = at.computing["input"] + at.computing["forward"] + at.backward_alone + model.slowed * sum(at.costs[:-1])
    assert at.straggler() == pytest.approx(np.maximum(0.0, model.figures["straggler"] + begun * at.late))


def test_strong_scaling_has_the_work_of_the_smaller_batch() -> None:
    ingredients = Machine(sizes=(1000,) * 4).ingredients(generator(), (1, 2, 4), scaling="strong")
    points = tuple(point.model_copy(update={"batch_per_rank": 128 // point.nodes}) for point in ingredients.points)
    work = tuple(BatchFigures(batch_per_rank=b, own_work_s=(0.036 + b * 0.002,) * 3) for b in (32, 64, 128))
    strong = ingredients.model_copy(update={"points": points, "batches": work})
    found = drawn(strong, 32)
    assert np.median(found["compute"] + found["input"]) == pytest.approx(0.092 - 0.032, rel=0.02)
    assert found["optimizer"] == pytest.approx(0.005)
    told = target(strong, 32)
    assert told.batch_per_rank == 16
    assert told.throughput is not None
    assert told.throughput.median == pytest.approx(512 / told.step.median, rel=1e-3)
    one_batch = strong.model_copy(update={"batches": work[:1]})
    weak = one_batch.model_copy(update={"points": ingredients.points})
    assert [one.code for one in project(weak, [4, 8], draws=DRAWS).refused] == ["R9", "R9"]
    assert [one.code for one in project(one_batch, [128], draws=DRAWS).refused] == ["R9"]


def test_what_storage_gave_limits_more_ranks_only_where_more_demand_gave_no_more() -> None:
    ingredients = MACHINE.ingredients(generator(), (1, 2, 4))

    def fed(**changes: Any) -> Projection:
        supply = StorageSupply(sample_bytes=1e6, bytes_per_s=3e9, nodes=4, **changes)
        return project(ingredients.model_copy(update={"supply": supply}), [16, 256], draws=DRAWS)

    without = project(ingredients, [16, 256], draws=DRAWS)
    at_anchor, beyond = fed(is_saturated=True).targets
    assert at_anchor.step == without.targets[0].step
    waiting = {part.name: part.seconds.median for part in beyond.parts}["input"]
    assert waiting > 0.5
    assert sum(part.seconds.median for part in beyond.parts) == pytest.approx(256 * 32 * 1e6 / 3e9, rel=0.02)
    (_, unproven) = fed().targets
    assert unproven.step == without.targets[1].step
    assert [flag.code for flag in unproven.flags if flag.code == "F5"] == ["F5"]
    # What only the largest point showed of storage is not known to those below it.
    assert fed(is_saturated=True).held_out == without.held_out
    assert fed(is_per_node=True).targets[1].flags == without.targets[1].flags


def test_points_alone_speak_where_there_is_no_network() -> None:
    ingredients = MACHINE.ingredients(generator(), (1, 2, 4, 8)).model_copy(update={"network": None})
    near, far = project(ingredients, [64, 256], draws=DRAWS), project(ingredients, [256], draws=DRAWS)
    assert near.targets[0].flags[0].code == "F7"
    assert near.targets[0].parts == ()
    assert (far.targets, [one.code for one in far.refused]) == ((), ["R3"])
    # The error of one curve is one error: far targets miss as near ones do.
    draws = [np.log(project(ingredients, [ranks], draws=DRAWS).targets[0].drawn["step"]) for ranks in (64, 128)]
    assert np.corrcoef(*draws)[0, 1] > 0.9


# Exchange


def test_another_way_is_what_it_changes() -> None:
    ingredients = MACHINE.ingredients(generator(), (1, 2, 4))

    def exchange(ranks: int = 64, **changes: Any) -> float:
        way = ExchangeMethod(**{"exchange": "flat", "fusion": None, "wire": "fp32", "group_size": 4, **changes})
        return float(np.median(drawn(ingredients, ranks, method=way)["exchange"]))

    same = float(np.median(drawn(ingredients, 64)["exchange"]))
    assert exchange() == same
    assert exchange(wire="fp16") < 0.6 * same
    assert exchange(fusion=read_fusion("own:single")) > same
    assert exchange(exchange="hierarchical") < same
    # Levels that follow each other have no chunks, and take longer.
    one_thread = exchange(exchange="hierarchical", by=("horovod", "gloo"))
    assert one_thread == exchange(exchange="hierarchical", by=("ddp", "nccl"))
    assert one_thread > exchange(exchange="hierarchical", by=("ddp", "gloo"))
    # Of each rank's 1 %, 64 ranks send 0.64 numbers and as many places; dense is 2: less than half of the bytes.
    assert exchange(wire="topk", topk_density=0.01) < 0.6 * same
    assert exchange(wire="int8") < exchange(wire="fp16") < same
    # A measured count is what was measured there, beside its own runs without an error of the model.
    for point in ingredients.points:
        measured = target(ingredients, point.ranks)
        assert measured.step.median == pytest.approx(np.mean([run.step_s for run in point.runs]), rel=1e-3)
        assert sum(part.seconds.median for part in measured.parts) == pytest.approx(measured.step.median, rel=0.01)
    first = target(ingredients, ingredients.points[0].ranks).efficiency
    assert first is not None
    assert first.quantiles == pytest.approx((1.0,) * 9)
    assert exchange(wire="topk", topk_density=0.1) == pytest.approx(same, rel=1e-9)
    way = ExchangeMethod(exchange="hybrid", fusion=None, wire="fp32", group_size=4)
    for other, why in (
        (way, "exchange hybrid"),
        (replace(way, exchange="flat", wire="powersgd"), "wire powersgd"),
        (replace(way, exchange="hierarchical", group_size=3), "groups of 3 ranks do not divide the 4 ranks of a node"),
        (replace(way, exchange="hierarchical", group_size=100), "groups of 100 ranks"),
    ):
        (refused,) = project(ingredients, [64], method=other, draws=DRAWS).refused
        assert (refused.code, why in refused.text) == ("R8", True)
    # Groups of half a node: the other half is reached inside the node, all others by its adapter.
    halves = replace(way, exchange="hierarchical", group_size=2)
    assert exchange(exchange="hierarchical", group_size=2) > exchange(exchange="hierarchical")
    leaves = ingredients.model_copy(update={"nodes_per_leaf": 3, "leaf_taper": 2.0})
    assert drawn(leaves, 64, method=halves)["exchange"].mean() >= exchange(exchange="hierarchical", group_size=2)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    gaps=st.lists(st.floats(0, 0.01), min_size=30, max_size=30),
    threshold=st.integers(1, 300),
    cycle=st.sampled_from([0.0, 0.001, 0.005]),
    least=st.integers(1024, 3000),
)
def test_fused_messages_hold_all_gradients_in_order(
    sizes: list[int], gaps: list[float], threshold: int, cycle: float, least: int
) -> None:
    ready = np.cumsum(gaps[: len(sizes)])
    result = MACHINE.exchange().model_copy(update={"messages": (), "gradients": (), "backward_s": float(ready[-1])})
    gradients = [
        {"name": str(n), "num_bytes": s, "ready_s": r} for n, (s, r) in enumerate(zip(sizes, ready, strict=True))
    ]
    result = type(result).model_validate({**result.model_dump(), "gradients": gradients})

    def seconds(size: float) -> float:
        return 0.001 + size * 1e-5

    found = messages_of(result, None, seconds, 8, cycle=Cycle(threshold_bytes=threshold, cycle_s=cycle))
    assert found.ready_s is not None
    left, free = list(zip(sizes, ready, strict=True)), 0.0
    for size, start in zip(found.sizes, found.ready_s, strict=True):
        assert start >= free - 1e-12
        taken = 0
        while taken < size:
            num_bytes, there = left.pop(0)
            taken += num_bytes
            assert there <= start + 1e-9
        assert taken == size
        assert size <= threshold or size in sizes
        free = start + max(seconds(size), cycle)
    assert left == []
    buckets = messages_of(result, Fusion(by="library", rule="size", bytes=least), seconds, 8).sizes
    assert sum(buckets) == sum(sizes)
    assert all(size >= least for size in buckets[:-1])
    assert messages_of(result, read_fusion("own:single"), seconds, 8).sizes == (sum(sizes),)


# Nodes


def test_effects_of_hosts_and_moments_are_taken_apart() -> None:
    rng = generator()
    hosts, common, noise = np.array([0.0, 0.1, -0.05, 0.02]), rng.normal(0, 0.2, 400), rng.normal(0, 0.01, (4, 400))
    work = np.exp(np.repeat(hosts[:, None] + noise + common, 4, axis=0))
    found = scatter_of([(work, [f"n{rank // 4}" for rank in range(16)])] * 2)
    assert found is not None
    assert found.num_maxima == 2 * 4 * 400
    effects = np.array(found.hosts)
    assert effects - effects.mean() == pytest.approx(hosts - hosts.mean(), abs=5e-3)
    # The largest of 64 nodes by quantiles of few: 2.4 standard deviations of a normal noise above its middle.
    alike = NodeScatter(hosts=(0.0,) * 4, maxima=found.maxima, num_maxima=1600)
    none_slow = SlowHosts(hosts=100_000, source="the history of a large site")
    late = lateness(alike, 64, 1000, slow_hosts=none_slow)
    assert late.mean() == pytest.approx(0.01 * 2.38, rel=0.15)
    # Four hosts that are alike do not promise 64 of them; what the site knows of slow ones is drawn.
    unknown = lateness(alike, 64, 1000)
    assert np.quantile(unknown, 0.95) > 0.1
    some_slow = SlowHosts(hosts=100, ratios=(0.2,) * 10, source="the history of a site")
    assert np.median(lateness(alike, 64, 1000, slow_hosts=some_slow)) == pytest.approx(math.expm1(0.3), abs=0.12)
    assert scatter_of([(work[:1], ["n0"])]) is None


def test_the_slowest_of_more_nodes_is_as_late_as_simulated() -> None:
    """Half of 90 % bands' misses at either end: hosts of a normal distribution of which eight are known."""
    hits = []
    for seed in range(100):
        rng = generator(seed)
        known = NodeScatter(hosts=tuple(0.03 * rng.standard_normal(8)))
        low, high = np.quantile(lateness(known, 256, 400), [0.05, 0.95])
        hits.append(low <= math.expm1(0.03 * rng.standard_normal(256).max()) <= high)
    assert 82 <= sum(hits) <= 97
    # Groups of nodes stand for many: against every node by itself.
    spiky = np.quantile(np.where(np.arange(10_000) < 100, 0.2, 0.0), 1 - np.linspace(1, 0, 257) ** 3)
    scatter = NodeScatter(hosts=tuple(0.03 * generator().standard_normal(16)), maxima=tuple(spiky), num_maxima=10_000)
    each = lateness(scatter, 512, 200)
    sigma = np.std(scatter.hosts, ddof=1)
    one_by_one = [
        np.expm1((np.mean(scatter.hosts) + sigma * rng.standard_normal(512) + 0.2 * (rng.random(512) < 0.01)).max())
        for rng in map(generator, range(400))
    ]
    assert np.median(each) == pytest.approx(np.median(one_by_one), rel=0.05)
