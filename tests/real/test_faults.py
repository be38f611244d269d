"""Faults planted on purpose, and ranks that exchange nothing: what they do, and that nobody can overlook them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from dlbench.errors import UserError
from dlbench.node.training import checks
from dlbench.node.training import fault as fault_module
from dlbench.node.training.fault import InjectedFault
from dlbench.records.record import RankResult, Record
from dlbench.records.registry import describe
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import FaultSpec
from tests.conftest import Cli
from tests.support.forked_runs import run_forked
from tests.support.run_factory import constant, differences, plans, write_run

COSMO = ("run", "cosmoflow", "--preset", "ci", "--data", "synthetic", "--set", "train.batch_per_rank=2")
SHORT = ("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=3", "--set", "layout.cores_per_rank=1")

DELAY_S = 0.01


def slept_at_least(fault: InjectedFault, seconds: float) -> bool:
    # time.sleep never ends early by the monotonic clock (PEP 475, and its documentation).
    return fault.injected_s >= seconds


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "ranks"), [(1, (1,)), ("1", (1,)), ("3,0", (0, 3)), ([2, 1], (1, 2)), ((5,), (5,)), (None, None)]
)
def test_ranks_are_numbers_or_text_with_commas(said: object, ranks: tuple[int, ...] | None) -> None:
    spec = FaultSpec.model_validate({"ranks": said, "step_delay_s": 0.1})
    assert spec.ranks == ranks
    assert FaultSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert [rank for rank in range(6) if spec.acts_on(rank)] == list(range(6) if ranks is None else ranks)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"ranks": "1;2", "step_delay_s": 0.1}, "separated by commas"),
        ({"ranks": "-1", "step_delay_s": 0.1}, "separated by commas"),
        ({"ranks": -1, "step_delay_s": 0.1}, "greater than or equal to 0"),
        ({"ranks": True, "step_delay_s": 0.1}, "tuple"),
        ({"ranks": "1,1", "step_delay_s": 0.1}, "twice"),
        ({"ranks": [], "step_delay_s": 0.1}, "at least 1"),
        ({"compute_factor": 0.9}, "greater than or equal to 1"),
        ({"ranks": 1}, "sets no fault"),
        ({}, "sets no fault"),
    ],
)
def test_a_fault_that_is_none_is_refused(said: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        FaultSpec.model_validate(said)


def test_a_fault_on_a_rank_that_no_run_has_is_refused_and_one_that_some_have_is_not() -> None:
    on_rank_1 = {"fault.step_delay_s": 0.1, "fault.ranks": 1}
    assert [plan.fault for plan in plans(points=(1, 2), repeats=1, overrides=on_rank_1)] == [
        FaultSpec(ranks=(1,), step_delay_s=0.1)
    ] * 2
    with pytest.raises(UserError) as caught:
        plans(points=(1, 2), repeats=1, overrides={**on_rank_1, "fault.ranks": "1,2"})
    assert str(caught.value).startswith("fault.ranks: rank 2 is in no run")
    assert len(str(caught.value).splitlines()) == 1


def one(**overrides: Any) -> RunPlan:
    (plan,) = plans(points=(2,), repeats=1, overrides=overrides)
    return plan


def test_a_fault_is_told_with_every_figure(tmp_path: Path) -> None:
    plan = one(**{"fault.compute_factor": 1.3, "fault.ranks": 1, "fault.input_delay_s": 0.04})
    (text,) = checks.planned_warnings(plan)
    for words in ("a fault is injected on purpose on rank 1:", "1.3 times as long", "delayed by 40 ms"):
        assert words in text
    assert checks.planned_warnings(one()) == []
    (alone,) = plans(points=(1, 2), repeats=1, overrides={"fault.ranks": 1, "fault.step_delay_s": 0.1})[:1]
    assert "on none of the ranks of this run" in checks.planned_warnings(alone)[0]
    write_run(tmp_path, plan, constant([1.0] * 6))
    (healthy,) = plans(points=(2,), repeats=1, series="s2")
    write_run(tmp_path, healthy, constant([1.0] * 6))
    faulty, sound = sorted(scan(tmp_path).runs, key=lambda run: run.plan.fault is None)
    assert describe(sound)["fault"] == ""
    assert [line for line in differences(faulty, sound) if line.startswith("Planted fault: ranks=[1]")] != []


# --- what it does -----------------------------------------------------------------------------------------------------


def batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(count):
        yield {"x": torch.full((1, 2), float(number))}


def test_batches_come_later_and_only_measured_ones_count() -> None:
    fault = InjectedFault(FaultSpec(input_delay_s=DELAY_S), rank=0)
    delayed = fault.around_batches(batches(5))
    seen = [next(delayed), next(delayed)]
    assert fault.injected_s == 0
    fault.begin_measuring()
    seen += list(delayed)
    assert [int(batch["x"][0, 0]) for batch in seen] == [0, 1, 2, 3, 4]
    assert slept_at_least(fault, 3 * DELAY_S)


def test_steps_end_later() -> None:
    fault = InjectedFault(FaultSpec(step_delay_s=DELAY_S), rank=0)
    fault.end_step()
    fault.begin_measuring()
    for _ in range(4):
        fault.end_step()
    assert slept_at_least(fault, 4 * DELAY_S)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    value: torch.Tensor = model(batch["x"]).sum()
    return value


@given(factor=st.floats(1.001, 5), forward_ns=st.integers(1, 10**9))
def test_computation_takes_the_factor_as_long_backward_counted_as_two_forwards(factor: float, forward_ns: int) -> None:
    """With a clock of its own: a forward pass takes `forward_ns`, sleeping takes what it is told."""
    now, slept = [0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += round(seconds * 1e9)

    def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        now[0] += forward_ns
        return loss(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_module.time, "sleep", sleep)
        patch.setattr(fault_module.time, "monotonic_ns", lambda: now[0])
        fault = InjectedFault(FaultSpec(compute_factor=factor), rank=0)
        fault.begin_measuring()
        model, batch = nn.Linear(2, 1), next(batches(1))
        slow = fault.around_loss(forward)
        assert torch.equal(slow(model, batch), loss(model, batch))
        # (forward + sleep + backward) / (forward + backward) with a backward pass of two forward ones.
        assert (3 * forward_ns / 1e9 + slept[0]) / (3 * forward_ns / 1e9) == pytest.approx(factor)
        assert fault.injected_s == pytest.approx(slept[0], abs=1e-9)


def never(seconds: float) -> None:
    raise AssertionError(f"slept {seconds} s")


def test_other_ranks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_module.time, "sleep", never)
    spec = FaultSpec(ranks=(1,), compute_factor=2.0, input_delay_s=1.0, step_delay_s=1.0)
    fault = InjectedFault(spec, rank=0)
    fault.begin_measuring()
    assert fault.around_loss(loss) is loss
    assert len(list(fault.around_batches(batches(3)))) == 3
    fault.end_step()
    assert fault.injected_s == 0


# --- ranks that train apart -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"sync.wire": "fp16"}, "sync.wire has no effect"),
        ({"sync.fusion": "own:single"}, "sync.fusion has no effect"),
        ({"sync.fusion": "auto"}, "--set sync.fusion: has no effect"),
        ({"engine.horovod.cycle_time_ms": 2.0}, "--set engine.horovod.cycle_time_ms: has no effect"),
        ({"checkpoint.every_steps": 2}, "leave out checkpoints"),
        ({"measure.noise_scale": True}, "needs averaged gradients"),
    ],
)
def test_what_has_no_meaning_without_exchange_is_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        plans(points=(2,), repeats=1, engine="horovod", overrides={"sync.exchange": "none", **overrides})
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_one_rank_has_nothing_to_go_without() -> None:
    with pytest.raises(UserError, match="has no effect in any run"):
        plans(points=(1,), repeats=1, overrides={"sync.exchange": "none"})
    assert len(plans(points=(1, 2), repeats=1, overrides={"sync.exchange": "none"})) == 2


def result(rank: int, final: str) -> RankResult:
    return RankResult.model_validate(
        {
            "rank": rank,
            "node_rank": 0,
            "host": "n0",
            "device": "cpu",
            "cores": [rank],
            "threads": 1,
            "pinned": True,
            "samples": 48,
            "measured_s": 1.0,
            "first_loss": 2.0,
            "last_loss": 1.0,
            "losses_finite": True,
            "initial_parameters_sha256": "0" * 64,
            "final_parameters_sha256": final * 64,
            "peak_memory_bytes": 1,
            "startup_s": 1.0,
            "bad_sample_count": 0,
        }
    )


@pytest.mark.parametrize(
    ("exchange", "finals", "name", "passed"),
    [
        ("none", "12", "parameters apart", True),
        ("none", "11", "parameters apart", False),
        ("flat", "11", "identical parameters", True),
        ("flat", "12", "identical parameters", False),
    ],
)
def test_ranks_end_apart_exactly_where_they_exchange_nothing(
    exchange: str, finals: str, name: str, passed: bool
) -> None:
    plan = one(**({"sync.exchange": "none"} if exchange == "none" else {}))
    made = checks.check(plan, [result(rank, final) for rank, final in enumerate(finals)], measured_steps=12)
    found = {check.name: check.passed for check in made}
    assert found.pop(name) is passed
    assert all(found.values())
    assert any("not exchanged" in text for text in checks.planned_warnings(plan)) is (exchange == "none")


# --- real ranks -------------------------------------------------------------------------------------------------------


def only_record(folder: Path) -> tuple[Run, Record]:
    (run,) = scan(folder).runs
    assert run.record is not None, run.detail
    assert run.state == "valid", run.detail
    return run, run.record


def measured_s(run: Run, rank: int, column: Callable[[Any], Any]) -> float:
    return float(column(read_steps(run.folder.steps(rank)).measured).sum()) / 1e9


@pytest.mark.slow
def test_a_fault_on_one_of_two_ranks_adds_what_it_says(tmp_path: Path) -> None:
    delays = ("--set", "fault.input_delay_s=0.05", "--set", "fault.step_delay_s=0.03")
    factor = ("--set", "fault.compute_factor=1.5", "--set", "fault.ranks=1")
    run_forked(*COSMO[1:], "--out", tmp_path, "--engine", "ddp", "--ranks", "2", *SHORT, *delays, *factor)
    run, record = only_record(tmp_path)
    sound, slow = record.ranks
    assert sound.planted_s == 0
    waited = measured_s(run, 1, lambda steps: steps["input_ns"])
    assert waited >= 3 * 0.05
    forward = measured_s(run, 1, lambda steps: steps["forward_ns"])
    between = measured_s(run, 1, lambda steps: steps["step_ns"]) - sum(
        measured_s(run, 1, lambda steps, phase=phase: steps[f"{phase}_ns"])
        for phase in ("input", "h2d", "forward", "backward", "exchange", "optimizer")
    )
    assert between >= 3 * 0.03
    # Slept a little longer than asked for, and half of three forward passes besides; all of it within these phases.
    assert 3 * (0.05 + 0.03) < slow.planted_s <= waited + forward + between
    assert any(text.startswith("a fault is injected on purpose on rank 1:") for text in record.warnings)


def assert_trained_apart(run: Run, record: Record) -> None:
    assert len({rank.initial_parameters_sha256 for rank in record.ranks}) == 1
    assert len({rank.final_parameters_sha256 for rank in record.ranks}) == 2
    assert record.exchange is None
    assert record.inert == ()
    assert {s.key: (s.requested, s.effective) for s in record.settings}["sync.exchange"] == ("none", "none")
    assert describe(run)["exchange"] == "exchange=none"
    assert any("gradients are not exchanged" in text for text in record.warnings)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_of_ddp_train_apart(cli: Cli, tmp_path: Path) -> None:
    done = cli(*COSMO, "--engine", "ddp", "--ranks", "2", *SHORT, "--set", "sync.exchange=none")
    assert done.returncode == 0, done.stderr
    assert_trained_apart(*only_record(tmp_path / "runs"))


@pytest.mark.horovod
@pytest.mark.slow
def test_two_ranks_of_horovod_train_apart(tmp_path: Path, horovod_installed: None) -> None:
    parts = ("--set", "train.gradient_accumulation=2")
    apart = ("--set", "sync.exchange=none")
    run_forked(*COSMO[1:], "--out", tmp_path, "--engine", "horovod", "--ranks", "2", *SHORT, *parts, *apart)
    assert_trained_apart(*only_record(tmp_path))
