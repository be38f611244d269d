"""Two real ranks: what the record says of the engine's own exchange is what was asked for, or an error in it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dlbench.node.part import WATCHED_STEPS
from dlbench.node.training import checks
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Record, Setting
from dlbench.records.scan import Run
from dlbench.specs.comm import LineCost
from dlbench.units import parse_bytes
from tests.support.forked_runs import run_forked
from tests.support.forks import call_dlbench

PARAMETERS, TENSORS = 1218676, 16
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
    assert sum(message.num_tensors for message in exchange.messages) == TENSORS
    assert len(exchange.gradients) == TENSORS
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
    assert evidence == f"{TENSORS} of {TENSORS} gradients were inside their buckets"
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
    assert len(one_each.messages) == TENSORS
    assert len(fused.messages) < TENSORS
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
    assert len(one_each.messages) == TENSORS
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
    assert views.evidence == f"0 of {TENSORS} gradients were inside their buckets"
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
