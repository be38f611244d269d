"""A ladder: steps on top of each other, planned, refused, left out; what each adds, exactly and with its verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.table import tabulate
from dlbench.errors import UserError
from dlbench.records.scan import scan
from dlbench.specs.plan import RunPlan
from dlbench.stats.pairing import KnownKey
from dlbench.views.sweep.choice import gains_of
from dlbench.views.sweep.numbers import Sweep, sweeps
from tests.support.forked_runs import run_forked
from tests.support.run_factory import WORKLOAD, plans, write_sweep

STEPS = """
ladder:
  - name: baseline
    set: {sync.fusion: "own:none", train.batch_per_rank: 2, data.loader_workers: 0}
  - name: input pipeline
    set: {data.loader_workers: 2}
  - name: tensor fusion
    set: {sync.fusion: "own:64MiB"}
    published: {value: 1.2, unit: gain, what: on a machine, source: Somebody 2018}
  - name: hybrid
    set: {sync.exchange: hybrid, sync.hybrid_threshold_bytes: 64KiB}
  - name: large batch
    set: {train.batch_per_rank: 4}
"""


def workload(folder: Path, steps: str = STEPS, preset: str = "") -> str:
    path = folder / "mine.yaml"
    path.write_text(WORKLOAD.read_text(encoding="utf-8") + preset + steps, encoding="utf-8")
    return str(path)


def ladder(folder: Path, steps: str = STEPS, **request: Any) -> list[RunPlan]:
    asked = {"points": (2,), "repeats": 2, "engine": "ddp", "ladder": True, **request}
    return plans(workload=workload(folder, steps), **asked)


def test_steps_stand_on_each_other_and_repeats_are_interleaved(tmp_path: Path) -> None:
    found = ladder(tmp_path, points=(4,), overrides={"sync.group_size": 2})
    there = [plan.series.step for plan in found if plan.series.repeat == 0]
    assert there == ["baseline", "tensor fusion", "hybrid", "large batch"]
    assert [plan.series.step for plan in found if plan.series.repeat == 1] == there[::-1]
    last = found[3]
    assert (str(last.sync.fusion), last.sync.exchange, last.workload.train.batch_per_rank) == ("own:64MiB", "hybrid", 4)
    assert last.series.axes["sync.hybrid_threshold_bytes"] == 65536
    assert len({plan.job_name for plan in found}) == len({plan.run_id for plan in found}) == 8
    # All steps, and why one is left out, are in every plan.
    for plan in found:
        assert [step.name for step in plan.series.ladder][1] == "input pipeline"
        assert plan.series.ladder[1].skipped == "synthetic data has no reader"
        assert RunPlan.model_validate_json(plan.to_json()) == plan


def test_a_step_that_cannot_act_is_left_out_where_it_cannot(tmp_path: Path) -> None:
    found = ladder(tmp_path, points=(1, 2), repeats=1)
    at = {n: [plan.series.step for plan in found if plan.layout.ranks == n] for n in (1, 2)}
    assert at == {1: ["baseline", "large batch"], 2: ["baseline", "tensor fusion", "large batch"]}
    why = {step.name: step.skipped for step in found[-1].series.ladder}
    assert why["hybrid"].startswith("sync.exchange hybrid: needs two groups of two ranks")
    # What is left out sets nothing for the steps behind it.
    assert found[-1].sync.exchange == "flat"


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ("", "ladder: is missing"),
        (STEPS.replace("train.batch_per_rank: 4", "train.batch_per_rank: 2"), "step large batch): changes nothing"),
        (STEPS.replace("{train.batch_per_rank: 4}", "{}"), "step large batch): changes nothing"),
        (STEPS.replace("train.batch_per_rank: 4", "train.batch_per_rnk: 4"), "did you mean train.batch_per_rank"),
        (STEPS.replace("name: hybrid", "name: large batch"), "two steps have the same name"),
        (STEPS.replace("name: hybrid", "nme: hybrid"), "ladder.3.nme: unknown key"),
        (STEPS.replace("own:64MiB", "own:64Foo"), "step tensor fusion): sync.fusion"),
        (STEPS.replace("unit: gain", "unit: times"), "ladder.2.published.unit"),
        ("\nladder:\n  - {name: baseline, set: {}}\n", "ladder"),
        (
            STEPS[: STEPS.index("  - name: tensor")],
            "no step has an effect (input pipeline: synthetic data has no reader)",
        ),
    ],
)
def test_bad_ladders_are_refused_with_file_and_step(tmp_path: Path, steps: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        ladder(tmp_path, steps)
    assert told in str(caught.value), caught.value
    assert "mine.yaml" in str(caught.value) or told.startswith("no step")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"sweep": {"sync.wire": ("fp32", "fp16")}}, "--ladder: cannot be combined with --sweep"),
        ({"to_accuracy": True}, "--ladder: cannot be combined with --to-accuracy"),
        ({"decompose": True}, "--ladder: cannot be combined with --decompose"),
        ({"sides": {"a": {}, "b": {"sync.wire": "fp16"}}}, "--ab: cannot be combined with --ladder"),
        ({"overrides": {"train.batch_per_rank": 8}}, "train.batch_per_rank: also given to --set"),
    ],
)
def test_what_a_ladder_does_not_go_with(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        ladder(tmp_path, **more)


@pytest.mark.parametrize("name", ["resnet50", "bert", "cosmoflow"])
@pytest.mark.parametrize("preset", ["full", "ci"])
def test_bundled_ladders_act_whole_on_a_cluster_with_data(name: str, preset: str) -> None:
    asked: dict[str, Any] = {"system": "box", "points": (2,), "points_are": "nodes", "ranks_per_node": 2}
    found = plans(workload=name, preset=preset, ladder=True, repeats=1, data="/data/set", **asked)
    assert not [step for step in found[0].series.ladder if step.skipped]
    names = [plan.series.step for plan in found]
    assert names[:2] == ["baseline", "input pipeline"]
    assert {"half precision", "tensor fusion", "hybrid all-reduce"} <= set(names)
    assert names[-1].startswith("large batch")


# What each step adds

RATES = st.lists(st.lists(st.one_of(st.none(), st.floats(0.1, 1000)), min_size=6, max_size=6), min_size=2, max_size=5)


@given(RATES)
def test_gains_of_steps_multiply_to_last_over_first_exactly(table: list[list[float | None]]) -> None:
    """Over the repeats that all steps have; each step keeps all that it shares with the one before it."""
    sides = [{KnownKey.of("", k, "s"): rate for k, rate in enumerate(row) if rate is not None} for row in table]
    keys = set.intersection(*map(set, sides))
    gains = gains_of(sides)
    for place, side in enumerate(sides):
        before = next((one for one in reversed(sides[:place]) if one.keys() & side.keys()), {})
        wanted = {key: math.log(side[key] / before[key]) for key in side.keys() & before.keys()}
        assert gains[place] == pytest.approx(wanted, abs=1e-12)
    for key in keys:
        whole = math.log(sides[-1][key] / sides[0][key])
        assert math.fsum(logs[key] for logs in gains[1:]) == pytest.approx(whole, abs=1e-12)


SPEED = {"baseline": 1.0, "tensor fusion": 1.3, "hybrid": 1.17, "large batch": 1.17}
WOBBLE = (1.08, 0.93, 1.03, 0.96, 1.01)


def planted(plan: RunPlan) -> float:
    """Fusion pays 1.3x, hybrid costs a tenth, nobody can tell of the batch; four ranks lose a tenth."""
    shaken = WOBBLE[plan.series.repeat] if plan.series.step == "large batch" else 1.0
    per_sample = SPEED[plan.series.step] * shaken * 2 / plan.workload.train.batch_per_rank
    return per_sample * (0.9 if plan.layout.ranks == 4 else 1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ladder")
    request: dict[str, Any] = {"points": (2, 4), "repeats": 5, "engine": "ddp", "overrides": {"sync.group_size": 2}}
    steps = STEPS.replace("{sync.exchange: hybrid,", "{sync.group_size: 2, sync.exchange: hybrid,")
    del request["overrides"]
    write_sweep(out / "runs", planted, workload=workload(out, steps), ladder=True, **request)
    return out / "runs"


@pytest.fixture(scope="module")
def found(runs: Path) -> Sweep:
    (sweep,) = sweeps(tabulate(scan(runs), with_causes=True))
    return sweep


def test_each_step_is_judged_by_what_it_adds(found: Sweep) -> None:
    assert [cell.ranks for cell in found.cells] == [2, 4]
    cell = found.cells[1]
    assert {one.label: one.verdict for one in cell.settings} == {
        "baseline": "baseline",
        "tensor fusion": "faster",
        "hybrid": "slower",
        "large batch": "undecided",
    }
    gains = [one.gain.value for one in cell.settings if one.gain]
    assert gains[:2] == pytest.approx([1.3, 0.9], rel=1e-6)
    assert math.prod(gains) == pytest.approx(cell.settings[-1].ratio.value, rel=1e-12)
    assert cell.axes == ()
    assert "At 4 ranks: pays: tensor fusion (1.30x); costs: hybrid (0.90x); undecided: large batch" in cell.verdict
    assert "cannot act here: input pipeline" in cell.verdict
    assert cell.advice == "Run with --set sync.fusion=own:64MiB --set train.batch_per_rank=2."


def test_efficiency_is_of_the_same_step_at_fewer_ranks(found: Sweep) -> None:
    """Where a step could not act at fewer ranks, of what ran there with the steps before it."""
    two, four = found.cells
    assert [one.label for one in two.settings] == ["baseline", "tensor fusion", "large batch"]
    shares = {one.label: one.efficiency.value for one in four.settings}
    assert shares["baseline"] == pytest.approx(0.9, rel=1e-6)
    assert shares["hybrid"] == pytest.approx(0.9 * 0.9, rel=1e-6)
    # At the fewest ranks it would be 100 % by definition.
    assert {one.efficiency for one in two.settings} == {None}


def made(folder: Path, *missing: tuple[str, int], repeats: int = 5) -> Sweep:
    """A ladder of two ranks of which these runs, by step and repeat, are not there."""
    asked: dict[str, Any] = {"workload": workload(folder), "ladder": True, "engine": "ddp", "repeats": repeats}

    def is_missing(plan: RunPlan) -> bool:
        return (plan.series.step, plan.series.repeat) in missing

    write_sweep(folder / "runs", planted, skip=is_missing, **asked)
    (sweep,) = sweeps(tabulate(scan(folder / "runs"), with_causes=True))
    return sweep


def test_a_missing_run_takes_its_repeat_from_its_own_step_alone(tmp_path: Path) -> None:
    (cell,) = made(tmp_path, ("large batch", 0)).cells
    steps = {one.label: one for one in cell.settings}
    assert list(steps) == ["baseline", "tensor fusion", "large batch"]  # though the last step's first run is missing
    assert (steps["tensor fusion"].gain.n, steps["tensor fusion"].verdict) == (5, "faster")
    assert (steps["large batch"].gain.n, steps["large batch"].verdict) == (4, "insufficient")
    assert steps["baseline"].throughput.n == 5
    assert any("only over the 4 of 5 repeats that all steps have" in text for text in cell.notes)


def test_a_real_ladder_of_two_ranks(tmp_path: Path) -> None:
    short = ("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=2", "--set", "watch.sampler=false")
    words = ("cosmoflow", "--preset", "ci", "--ladder", "--engine", "ddp", "--ranks", "2", *short, "--out", tmp_path)
    made = run_forked(*words)
    steps = [run.plan.series.step for run in made]
    assert steps[:2] == ["baseline", "int16 volumes"]
    volumes = [one.effective for run in made[:2] for one in run.record.settings if one.key == "data.volumes"]
    assert volumes == ["float32", "int16"]
    # What travels is another type, what is trained the same to the bit.
    losses = [[rank.last_loss for rank in run.record.ranks] for run in made[:2]]
    assert losses[0] == losses[1]
    (sweep,) = sweeps(tabulate(scan(tmp_path), with_causes=True))
    gains = [one.gain.value for one in sweep.cells[0].settings if one.gain]
    assert math.prod(gains) == pytest.approx(sweep.cells[0].settings[-1].ratio.value, rel=1e-12)
    # The pool of synthetic batches follows the batch.
    assert len({run.record.data["num_samples"] for run in made}) == 2
    assert not any("data.num_samples" in text for text in sweep.cells[0].notes)
