"""dlbench's own exchange of gradients, on real ranks: whatever the exchange, training is that of the mean gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlbench.specs.plan import RunPlan
from tests.support import exchange_ranks
from tests.support.exchange_ranks import SmallNet, reference
from tests.support.forks import run_ranks
from tests.support.run_factory import plans

STEPS = 7
TENSORS = [p.numel() * 4 for p in SmallNet().parameters()]

Told = dict[str, list[dict[str, Any]]]
"""For each scenario what each rank told."""


def plan_of(overrides: dict[str, Any], ranks: int = 4, engine: str = "ddp") -> RunPlan:
    settings = {"measure.warmup_steps": 4, "measure.measured_steps": 3, **overrides}
    return plans(points=(ranks,), repeats=1, engine=engine, overrides=settings)[0]


def start_ranks(folder: Path, scenarios: dict[str, RunPlan], ranks: int, *, parts: int = 1) -> Told:
    """Trains every scenario on as many ranks, in processes of their own."""
    _write(folder, scenarios, parts)
    codes, outputs = run_ranks(
        exchange_ranks.main, [str(folder)], [{"RANK": str(rank), "SIZE": str(ranks)} for rank in range(ranks)], folder
    )
    # The last part is what a log that was cut shows: of those that failed by themselves, not of those killed for it.
    told = sorted(zip(codes, outputs, strict=True), key=lambda one: one[0] == 1)
    assert codes == [0] * ranks, "\n".join(output[-4000:] for _, output in told)
    return _read(folder, list(scenarios), ranks)


def _write(folder: Path, scenarios: dict[str, RunPlan], parts: int = 1) -> None:
    content = [
        {"name": name, "plan": plan.model_dump(mode="json"), "parts": parts, "steps": STEPS}
        for name, plan in scenarios.items()
    ]
    (folder / "scenarios.json").write_text(json.dumps(content))


def _read(folder: Path, names: list[str], ranks: int) -> Told:
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [each[name] for each in seen] for name in names}


def effective(told: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {s["key"]: (s["requested"], s["effective"]) for s in told["settings"]}


GROUPS = {"sync.group_size": 2}
SCENARIOS: dict[str, dict[str, Any]] = {
    "flat none": {"sync.fusion": "own:none"},
    "flat single": {"sync.fusion": "own:single"},
    "flat size": {"sync.fusion": "own:1KiB"},
    "flat mgwfbp": {"sync.fusion": "own:mgwfbp"},
    "hierarchical auto": {**GROUPS, "sync.exchange": "hierarchical"},
    "hierarchical none": {**GROUPS, "sync.exchange": "hierarchical", "sync.fusion": "own:none"},
    "hierarchical size": {**GROUPS, "sync.exchange": "hierarchical", "sync.fusion": "own:1KiB"},
    "hierarchical mgwfbp": {**GROUPS, "sync.exchange": "hierarchical", "sync.fusion": "own:mgwfbp"},
    "leader none": {**GROUPS, "sync.exchange": "leader", "sync.fusion": "own:none"},
    "leader single": {**GROUPS, "sync.exchange": "leader", "sync.fusion": "own:single"},
    "hybrid given": {**GROUPS, "sync.exchange": "hybrid", "sync.fusion": "own:none", "sync.hybrid_threshold_bytes": 60},
    "hybrid found": {**GROUPS, "sync.exchange": "hybrid", "sync.fusion": "own:mgwfbp"},
    "all of top-k": {"sync.wire": "topk", "sync.topk_density": 1.0, "sync.fusion": "own:none"},
    "fp16": {**GROUPS, "sync.exchange": "hierarchical", "sync.wire": "fp16", "sync.fusion": "own:single"},
    "bf16": {"sync.wire": "bf16", "sync.fusion": "own:1KiB"},
    "int8": {"sync.wire": "int8", "sync.fusion": "own:single"},
}
NARROW = {"fp16": 0.05, "bf16": 0.05, "int8": 0.2}  # With the largest deviation of a parameter.
EXACT = [name for name, overrides in SCENARIOS.items() if overrides.get("sync.wire") not in NARROW]

NETWORK: dict[str, Any] = {
    "format": "dlbench.network",
    "version": 1,
    "system": "box",
    "transport": "torch-gloo",
    "inside": {"pieces": [{"up_to_bytes": None, "alpha_s": 1e-4, "beta_s_per_byte": 1e-9}]},
    "across": {"pieces": [{"up_to_bytes": None, "alpha_s": 1e-3, "beta_s_per_byte": 1e-7}]},
    "collectives": [{"name": "gloo flat", "startup_s": 0.5, "per_byte_s": 1e-9, "ranks": 4}],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Every scenario on four gloo ranks in two groups, and one whose costs are those of a file."""
    folder = tmp_path_factory.mktemp("exchange")
    network = folder / "box.network.json"
    network.write_text(json.dumps(NETWORK))
    hybrid = {**GROUPS, "sync.exchange": "hybrid", "sync.fusion": "own:none", "sync.network": str(network)}
    wanted = {**SCENARIOS, "costs of a file": hybrid}
    return start_ranks(folder, {name: plan_of(overrides) for name, overrides in wanted.items()}, 4)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference(4, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_training_is_that_of_the_mean_gradient(trained: Told, expected: list[float], name: str) -> None:
    for told in trained[name]:
        assert told.get("error") is None, told
        assert told["parameters"] == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_end_with_the_same_bits_and_statistics_of_their_own(trained: Told, name: str) -> None:
    assert len({tuple(told["parameters"]) for told in trained[name]}) == 1
    assert len({tuple(told["statistics"]) for told in trained[name]}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_narrow_formats_are_near_and_not_equal(trained: Told, expected: list[float], name: str) -> None:
    parameters = trained[name][0]["parameters"]
    assert parameters == pytest.approx(expected, rel=NARROW[name], abs=NARROW[name])
    assert parameters != pytest.approx(expected, rel=1e-6, abs=1e-7)
    result = trained[name][0]["exchange"]
    assert result["wire"] == name
    assert result["wire_overflows"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_was_asked_for_was_in_force(trained: Told, name: str) -> None:
    found = effective(trained[name][0])
    if name == "hybrid found":  # the lines may cross beyond all messages
        assert found["sync.exchange"][1] in ("hybrid", "flat", "hierarchical")
        del found["sync.exchange"]
    if name == "all of top-k":  # denser than it pays: every message went dense
        assert found.pop("sync.wire") == ("topk", "fp32")
    assert {key: pair for key, pair in found.items() if pair[0] not in (None, pair[1])} == {}


@pytest.mark.slow
def test_messages_are_those_of_the_fusion(trained: Told) -> None:
    def sizes(name: str) -> list[int]:
        return [message["num_bytes"] for message in trained[name][0]["exchange"]["messages"]]

    assert sorted(sizes("flat none")) == sorted(TENSORS)
    assert sizes("flat single") == [sum(TENSORS)]
    assert all(size >= 1024 for size in sizes("flat size")[:-1])
    assert 1 < len(sizes("flat size")) < len(TENSORS)
    for name in SCENARIOS:
        assert sum(sizes(name)) == sum(TENSORS)
    # Gradients come in the order in which the backward pass has them ready, not as the network lists them: that of
    # the last layer is there first, and the one that never is comes last.
    assert sizes("flat none")[-1] == 3 * 4
    assert sizes("flat none")[0] in (41 * 4, 4)


@pytest.mark.slow
def test_times_and_bytes_of_the_exchange(trained: Told) -> None:
    for name in SCENARIOS:
        result = trained[name][0]["exchange"]
        assert result["by"] == "dlbench"
        assert result["window_steps"] == 3
        assert result["communication_s"] == pytest.approx(result["exposed_s"] + result["hidden_s"], rel=1e-6)
        assert 0 <= result["exposed_s"] <= result["communication_s"]
        packed = [result["packing_s"], result["merging_s"]]
        if SCENARIOS[name].get("sync.wire"):
            assert 0 < min(packed) <= max(packed) < result["communication_s"]
        else:
            assert packed == [None, None]
        # Medians of later messages need not be those of one step.
        first = result["messages"][0]
        assert first["start_s"] >= first["ready_s"]
        assert len(result["gradients"]) == len(TENSORS)
        ready = [gradient["ready_s"] for gradient in result["gradients"]]
        assert ready == sorted(ready)
    total = sum(TENSORS)
    flat, leader = (trained[name][0]["exchange"] for name in ("flat single", "leader single"))
    # A ring over 4 ranks: each sends 2 x 3/4 of the vector, every second rank to another group (or all in one node's).
    assert flat["bytes_inside"] + flat["bytes_across"] == pytest.approx(1.5 * total)
    # 2 ranks per group: a reduce and a broadcast of the vector for one of two; leaders send 2 x 1/2 of it.
    assert leader["bytes_inside"] == pytest.approx(total, rel=0.01)
    assert leader["bytes_across"] == pytest.approx(total / 2, rel=0.01)
    grouped = trained["hierarchical auto"][0]["exchange"]
    assert grouped["bytes_inside"] == pytest.approx(total, rel=0.01)
    assert grouped["bytes_across"] == pytest.approx(total / 2, rel=0.01)
    assert trained["fp16"][0]["exchange"]["bytes_inside"] == pytest.approx(total / 2, rel=0.01)
    # 749 values in 4 shares of 188, each a block with a scale of 4 bytes; each is sent to 3 ranks, twice.
    assert total == 4 * 749
    assert trained["int8"][0]["exchange"]["bytes_inside"] == pytest.approx(2 * 3 * (188 + 4))
    # So short a message is one chunk; ways without levels have none.
    chunks = {
        name: {message["chunks"] for message in trained[name][0]["exchange"]["messages"]}
        for name in ("flat single", "leader single", "hierarchical size", "fp16", "hybrid given")
    }
    assert list(chunks.values()) == [{None}, {None}, {1}, {1}, {1, None}]


@pytest.mark.slow
def test_costs_behind_decisions_are_told(trained: Told) -> None:
    assert [line["name"] for line in trained["flat mgwfbp"][0]["exchange"]["costs"]] == ["gloo flat"]
    hybrid = trained["hybrid found"][0]["exchange"]
    assert [line["name"] for line in hybrid["costs"]] == ["gloo flat", "gloo hierarchical", "gloo hybrid"]
    assert hybrid["hybrid_threshold_bytes"] is not None
    given = trained["hybrid given"][0]["exchange"]
    assert given["hybrid_threshold_bytes"] == 60
    ways = {message["num_bytes"]: message["method"] for message in given["messages"]}
    assert ways[13 * 4] == "hierarchical"
    assert ways[7 * 13 * 4] == "flat"


@pytest.mark.slow
def test_accumulated_gradients_are_exchanged_once(tmp_path: Path) -> None:
    scenarios = {name: plan_of(SCENARIOS[name], 2) for name in ("flat none", "flat mgwfbp")}
    seen = start_ranks(tmp_path, scenarios, 2, parts=3)
    for everyone in seen.values():
        assert everyone[0]["parameters"] == pytest.approx(reference(2, STEPS, 3), rel=1e-5, abs=1e-5)
    ways = {s["key"]: s["evidence"] for s in seen["flat none"][0]["settings"]}["sync.exchange"]
    assert ways == f"{3 * len(TENSORS)} messages in measured steps: {3 * len(TENSORS)} flat"


@pytest.mark.slow
def test_costs_may_come_from_a_file(trained: Told) -> None:
    result = trained["costs of a file"][0]["exchange"]
    flat, grouped = result["costs"]
    assert flat["startup_s"] == pytest.approx(0.5)  # as the file has it
    assert grouped["startup_s"] < 0.1  # from the fitted levels
    assert {m["method"] for m in result["messages"]} == {"hierarchical"}


HOROVOD: dict[str, dict[str, Any]] = {
    "hierarchical": {**GROUPS, "sync.exchange": "hierarchical", "sync.fusion": "own:1KiB"},
    "leader": {**GROUPS, "sync.exchange": "leader", "sync.fusion": "own:mgwfbp"},
    "topk": {"sync.wire": "topk", "sync.topk_density": 0.2, "sync.fusion": "own:single"},
    "int8": {"sync.wire": "int8", "sync.fusion": "own:single"},
}


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize(  # Horovod makes process sets in its first start in a process only
    "name", ["hierarchical", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("leader", "int8")), "topk"]
)
def test_over_process_sets_of_horovod_on_gloo(
    tmp_path: Path, expected: list[float], name: str, horovod_installed: None
) -> None:
    seen = start_ranks(tmp_path, {name: plan_of(HOROVOD[name], engine="horovod")}, 4)
    _check_horovod(seen, expected, "gloo")


def _check_horovod(seen: Told, expected: list[float], carrier: str) -> None:
    for name, everyone in seen.items():
        assert everyone[0].get("error") is None, everyone[0]
        assert len({tuple(told["parameters"]) for told in everyone}) == 1
        result = everyone[0]["exchange"]
        assert result["carrier"] == carrier
        assert result["exchange"] == (name if name in ("hierarchical", "leader") else "flat")
        if name == "topk":
            assert {message["method"] for message in result["messages"]} == {"sparse"}
            assert 0.2 <= result["density"] < 1
        else:
            tolerance = NARROW.get(name, 1e-5)
            assert everyone[0]["parameters"] == pytest.approx(expected, rel=tolerance, abs=tolerance)
