"""dlbench's own exchange on two real ranks: training is that of the mean gradient; the record says what was asked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlbench.node.part import WATCHED_STEPS
from dlbench.node.training import checks
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Record, Setting
from dlbench.records.scan import Run
from dlbench.specs.comm import LineCost
from dlbench.specs.plan import RunPlan
from dlbench.units import parse_bytes
from tests.support import exchange_ranks
from tests.support.exchange_ranks import SmallNet, reference
from tests.support.forked_runs import run_forked
from tests.support.forks import call_dlbench, run_ranks
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


PARAMETERS, NUM_TENSORS = 1218676, 16
"""Of CosmoFlow `ci`."""

COMMON = (
    *("run", "cosmoflow", "--preset", "ci", "--data", "synthetic", "--ranks", "2"),
    *("--set", "train.batch_per_rank=1", "--set", "measure.measured_steps=2"),
)

AUTOTUNE = (
    *("engine.horovod.autotune=true", "engine.horovod.autotune_warmup_samples=1"),
    *("engine.horovod.autotune_steps_per_sample=1", "engine.horovod.autotune_max_samples=3"),
    "measure.warmup_steps=33",
)

REQUESTS: dict[str, tuple[str, ...]] = {
    "unfused": ("horovod", "sync.fusion=none", "engine.horovod.cycle_time_ms=0.1"),
    "fused-fp16": ("horovod", "sync.fusion=64MiB", "sync.wire=fp16", "engine.horovod.cycle_time_ms=50.0"),
    "autotune": ("horovod", *AUTOTUNE),
    "views": ("ddp", "sync.fusion=none", "engine.ddp.gradient_as_bucket_view=true", "engine.ddp.static_graph=true"),
    "bf16": ("ddp", "sync.wire=bf16"),
    "powersgd": ("ddp", "sync.wire=powersgd", "sync.powersgd_rank=2", "sync.fusion=64KiB"),
    "own": ("horovod", "sync.fusion=own:1MiB"),
    "too-short": ("ddp", "sync.wire=powersgd", "measure.warmup_steps=0"),
}

Records = Callable[[str], Record]


def words(out: Path, series: str, engine: str, *settings: str) -> list[str | Path]:
    """One run, as a user asks for it."""
    flags = [word for setting in settings for word in ("--set", setting)]
    return [*COMMON, "--engine", engine, *flags, "--series", series, "--out", out]


def launch(out: Path, series: str, engine: str, *settings: str) -> subprocess.CompletedProcess[str]:
    return call_dlbench(*words(out, series, engine, *settings), cwd=out)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """The record of a request, run when it is first asked for."""
    out = tmp_path_factory.mktemp("runs")
    kept: dict[str, Record] = {}

    def record(name: str) -> Record:
        if name not in kept:
            (run,) = run_forked(*words(out, name, *REQUESTS[name])[1:])
            kept[name] = valid(run)
        return kept[name]

    return record


def valid(run: Run) -> Record:
    assert run.state == "valid", run.detail
    assert run.record is not None
    return run.record


def exchange_of(record: Record) -> ExchangeResult:
    assert record.exchange.by == "backend"
    return record.exchange


def in_force(record: Record) -> dict[str, object]:
    return {setting.key: setting.effective for setting in record.settings}


def whole(exchange: ExchangeResult) -> None:
    """What holds for every watched exchange: nothing lost, nothing twice, times in order."""
    assert sum(message.num_bytes for message in exchange.messages) == 4 * PARAMETERS
    assert sum(message.num_tensors for message in exchange.messages) == NUM_TENSORS
    assert len(exchange.gradients) == NUM_TENSORS
    assert sum(gradient.num_bytes for gradient in exchange.gradients) == 4 * PARAMETERS
    ready = [gradient.ready_s for gradient in exchange.gradients]
    assert ready == sorted(ready)
    assert exchange.communication_s is not None
    assert exchange.exposed_s is not None
    assert exchange.hidden_s is not None
    assert exchange.backward_s is not None
    assert exchange.communication_s > 0
    assert max(exchange.exposed_s, exchange.hidden_s) <= exchange.communication_s * (1 + 1e-9)
    for message in exchange.messages:
        assert message.ready_s is not None
        assert message.start_s is not None
        assert message.start_s >= message.ready_s - 1e-3


@pytest.mark.slow
@pytest.mark.horovod
def test_ddps_bucket_views_and_static_graph_act_and_change_no_bit(records: Records, horovod_installed: None) -> None:
    found, plain = records("views"), records("unfused")
    settings = {setting.key: setting for setting in found.settings}
    assert settings["engine.ddp.static_graph"].effective is True
    assert settings["engine.ddp.gradient_as_bucket_view"].effective is True
    evidence = settings["engine.ddp.gradient_as_bucket_view"].evidence
    assert evidence == f"{NUM_TENSORS} of {NUM_TENSORS} gradients were inside their buckets"
    # Halves of two ranks are summed, in whatever order: no engine rounds otherwise.
    assert {one.final_parameters_sha256 for one in found.ranks} == {one.final_parameters_sha256 for one in plain.ranks}


@pytest.mark.slow
@pytest.mark.horovod
def test_horovods_fusion_acts(records: Records, horovod_installed: None) -> None:
    one_each, fused = exchange_of(records("unfused")), exchange_of(records("fused-fp16"))
    for exchange in (one_each, fused):
        whole(exchange)
        assert exchange.window_steps == WATCHED_STEPS
        assert {message.method for message in exchange.messages} == {"GLOO_ALLREDUCE"}
        assert (exchange.carrier, exchange.exchange, exchange.bytes_across) == ("gloo", "flat", 0)
    assert len(one_each.messages) == NUM_TENSORS
    assert len(fused.messages) < NUM_TENSORS
    assert records("unfused").inert == ()
    assert one_each.fusion == in_force(records("unfused"))["sync.fusion"] == "none"
    assert fused.fusion == in_force(records("fused-fp16"))["sync.fusion"] == "64MiB"
    # A 32-bit number to Horovod, and still what was asked for.
    assert in_force(records("unfused"))["engine.horovod.cycle_time_ms"] == 0.1
    assert all(s.evidence.startswith("read back") for s in records("unfused").settings[:2])


@pytest.mark.slow
@pytest.mark.horovod
def test_fp16_halves_the_bytes_on_the_wire(records: Records, horovod_installed: None) -> None:
    wide, narrow = exchange_of(records("unfused")), exchange_of(records("fused-fp16"))
    # A ring of two ranks sends each vector once.
    assert wide.bytes_inside == 4 * PARAMETERS
    assert narrow.bytes_inside == 2 * PARAMETERS
    assert (wide.wire, narrow.wire) == ("fp32", "fp16")
    record = records("fused-fp16")
    assert in_force(record)["sync.wire"] == "fp16"
    assert (record.inert, narrow.wire_overflows) == ((), 0)
    assert [check.passed for check in record.checks if check.name == "wire"] == [True]
    assert not [check for check in records("unfused").checks if check.name == "wire"]


@pytest.mark.slow
@pytest.mark.horovod
def test_the_autotuner_is_one_contestant_with_its_cost(records: Records, horovod_installed: None) -> None:
    record = records("autotune")
    tuned = exchange_of(record).autotune
    assert (tuned.evaluations, tuned.planned_steps, tuned.finished) == (4, 30, True)
    assert tuned.settled_step is not None
    # Five samples of one step for each of five scores, and not more than one step more for each.
    assert 25 <= tuned.settled_step <= tuned.planned_steps
    assert tuned.cost_s is not None
    settings = {setting.key: setting for setting in record.settings}
    cycle, fusion = settings["engine.horovod.cycle_time_ms"], settings["sync.fusion"]
    assert (cycle.requested, fusion.requested) == (None, None)
    assert cycle.effective is None or cycle.effective == pytest.approx(tuned.cycle_time_ms, rel=1e-3)
    found = parse_bytes(str(fusion.effective).replace("none", "0"))
    assert found == pytest.approx(tuned.fusion_threshold_bytes, rel=1e-3)
    assert settings["engine.horovod.autotune"].effective is True
    assert record.inert == ()


@pytest.mark.slow
def test_ddps_buckets_act(records: Records) -> None:
    one_each, small, normal = (exchange_of(records(name)) for name in ("views", "powersgd", "bf16"))
    assert [in_force(records(name))["sync.fusion"] for name in ("views", "powersgd", "bf16")] == [
        "none",
        "64KiB",
        "25MiB",
    ]
    assert [exchange.fusion for exchange in (one_each, small, normal)] == ["none", "64KiB", "25MiB"]
    assert len(one_each.messages) == NUM_TENSORS
    for exchange in (small, normal):
        whole(exchange)
        assert exchange.window_steps == WATCHED_STEPS
    # A bucket is handed over when it holds 64 KiB or more; six gradients of CosmoFlow `ci` do so alone.
    assert len(small.messages) >= 5
    assert len(normal.messages) == 2
    assert normal.bytes_inside == 2 * PARAMETERS
    assert in_force(records("bf16"))["sync.wire"] == "bf16"
    # What was left to dlbench is read back too: on CPUs gradients are none of the buckets'.
    (views,) = (s for s in records("bf16").settings if s.key == "engine.ddp.gradient_as_bucket_view")
    assert (views.requested, views.effective) == ("auto", False)
    assert views.evidence == f"0 of {NUM_TENSORS} gradients were inside their buckets"
    assert records("bf16").inert == ()


@pytest.mark.slow
def test_powersgd_trains_and_counts(records: Records) -> None:
    record = records("powersgd")
    exchange = exchange_of(record)
    whole(exchange)
    assert record.inert == ()
    assert exchange.wire == "powersgd"
    assert exchange.bytes_inside is not None
    assert 0 < exchange.bytes_inside < PARAMETERS / 10
    assert "by its own count" in exchange.evidence
    assert len({rank.final_parameters_sha256 for rank in record.ranks}) == 1


@pytest.mark.slow
def test_what_was_inert_is_an_error_in_the_record(records: Records) -> None:
    """PowerSGD begins after two steps; a run of two never comes to it."""
    record = records("too-short")
    (text,) = record.inert
    assert text.startswith("sync.wire: powersgd was requested, but fp32 was used (")
    exchange = exchange_of(record)
    assert exchange.wire == "fp32"
    # Nothing could be watched either, and the record says what would help.
    assert (exchange.window_steps, exchange.messages, exchange.communication_s) == (0, (), None)
    assert "set measure.warmup_steps to 1 or more" in exchange.evidence


@pytest.mark.slow
@pytest.mark.horovod
def test_flags_that_this_build_ignores_are_refused(tmp_path: Path, horovod_installed: None) -> None:
    import horovod.torch as hvd

    if hvd.nccl_built():
        pytest.skip("this Horovod was built with NCCL, which obeys them")
    done = launch(tmp_path, "hierarchical", "horovod", "sync.exchange=horovod-hierarchical")
    assert done.returncode == 5
    assert "sync.exchange horovod-hierarchical: this Horovod was built without NCCL" in done.stderr
    assert "use sync.exchange=hierarchical" in done.stderr
    assert not list(tmp_path.rglob("record.json"))


# --- what follows from what was seen


def row(requested: str | float | None, effective: str | float | None) -> Setting:
    return Setting(key="sync.wire", requested=requested, effective=effective, evidence="seen")


def test_only_what_demonstrably_did_not_act_is_inert() -> None:
    acted = [row("fp16", "fp16"), row(None, "fp16"), row("fp16", None), row(1.0, 1.0)]
    assert checks.inert(acted, ranks=2) == ()
    assert checks.inert([*acted, row("fp16", "fp32")], ranks=2) == (
        "sync.wire: fp16 was requested, but fp32 was used (seen)",
    )
    assert checks.inert([row("fp16", "fp32")], ranks=1) == ()


def exchanged(overflows: int, wire: str = "fp16") -> ExchangeResult:
    return ExchangeResult(
        carrier="gloo",
        by="backend",
        exchange="flat",
        fusion="128MiB",
        wire=wire,
        group_size=2,
        num_groups=1,
        wire_overflows=overflows,
        evidence="counted",
    )


def test_an_overflow_on_the_wire_fails_the_run_unless_its_step_was_left_out() -> None:
    check = checks.wire_check(exchanged(3), is_scaled=False)
    assert not check.passed
    assert check.detail.startswith("3 sums of gradients overflowed fp16")
    assert "set sync.wire to fp32 or bf16" in check.detail
    assert checks.exchange_warnings(exchanged(3), is_scaled=False) == []
    scaled = checks.wire_check(exchanged(3), is_scaled=True)
    assert scaled.passed
    (doubt,) = checks.exchange_warnings(exchanged(3), is_scaled=True)
    assert "loss scaling skipped those steps" in doubt
    clean = checks.wire_check(exchanged(0), is_scaled=False)
    assert clean.passed
    assert checks.wire_check(exchanged(0, "fp32"), is_scaled=False) is None
    assert checks.wire_check(None, is_scaled=False) is None
    assert checks.exchange_warnings(None, is_scaled=True) == []


def test_costs_that_may_be_the_host_s_rate_of_calls_are_a_warning() -> None:
    line = LineCost(name="nccl flat", startup_s=1e-5, per_byte_s=1e-9, ranks=2, launch_bound=(4096, 16384))
    found = exchanged(0).model_copy(update={"costs": (line,)})
    (said,) = checks.exchange_warnings(found, is_scaled=False)
    assert said.startswith("calibration of nccl flat: at 4 KiB, 16 KiB the GPU waited for the host to launch messages")
