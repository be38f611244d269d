"""The verdict of a sweep: planted effects are found, drift cancels, nothing is claimed from noise or too few runs."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.table import tabulate
from dlbench.records.folder import create
from dlbench.records.record import HeldMemory
from dlbench.records.scan import scan
from dlbench.report.wording import DASH, times_value
from dlbench.specs.plan import RunPlan
from dlbench.stats.multiplicity import LEVEL, holm, paired_p, repeats_for, student_p
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.sweep.numbers import Sweep, SweepCell, sweeps
from dlbench.views.sweep.settings import SweptSetting
from dlbench.views.sweep.view import settings_charts, settings_sheet
from tests.support.run_factory import (
    Story,
    Training,
    autotune_result,
    constant,
    exchange_result,
    quality_plans,
    write_run,
    write_sweep,
)

GRADIENTS = ((40_000, 0.004), (2_000_000, 0.012), (400_000, 0.02), (8_000_000, 0.045))

WOBBLE = (1.05, 0.95, 1.03, 0.96, 1.0)
"""What noise does in each repeat; about 1 in the middle, and a little less on average."""

SINGLE: dict[str, Any] = {"engine": "ddp", "sweep": {"sync.fusion": ("auto", "own:single")}}


def single_by(factor: float) -> Callable[[RunPlan], float]:
    """One message is so many times as fast."""
    return lambda plan: factor if str(plan.sync.fusion) == "own:single" else 1.0


def found_in(out: Path) -> Sweep:
    (sweep,) = sweeps(tabulate(scan(out), with_causes=True))
    return sweep


def swept(out: Path, speed: Callable[[RunPlan], float], **request: Any) -> SweepCell:
    write_sweep(out, speed, **request)
    (cell,) = found_in(out).cells
    return cell


def setting(cell: SweepCell, **values: Any) -> SweptSetting:
    (found,) = [s for s in cell.settings if all(v == values[n] for k, v in s.values for n in values if k.endswith(n))]
    return found


# Planted effects


def planted(plan: RunPlan) -> float:
    axes = plan.series.axes
    fast = 1.1 if axes["sync.fusion"] == "own:single" else 1.0
    return fast * (WOBBLE[plan.series.repeat] if axes["sync.wire"] == "fp16" else 1.0)


@pytest.fixture(scope="module")
def planted_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("planted") / "runs"
    write_sweep(
        out,
        planted,
        points=(1, 4),
        engine="ddp",
        overrides={"sync.group_size": 2},
        sweep={
            "sync.fusion": ("own:none", "own:single"),
            "sync.exchange": ("flat", "hierarchical"),
            "sync.wire": ("fp32", "fp16"),
        },
        story=lambda plan: Story(last_loss=1.95 if plan.sync.wire == "fp16" else 1.9),
    )
    return out


def test_axes_are_told_apart(planted_runs: Path) -> None:
    cell = found_in(planted_runs).cells[0]
    assert {axis.key: axis.verdict for axis in cell.axes} == {
        "sync.fusion": "matters",
        "sync.exchange": "no effect",
        "sync.wire": "undecided",
    }
    effects = {axis.key: axis.levels[1].effect for axis in cell.axes}
    assert effects["sync.fusion"].value == pytest.approx(1.1, rel=1e-6)
    assert cell.axes[1].words.startswith("matters: own:single over own:none is 1.10x")


def test_best_setting_keeps_the_arithmetic_unless_said(planted_runs: Path) -> None:
    cell = found_in(planted_runs).cells[0]
    best = cell.best_setting
    values = dict(best.values)
    assert (values["sync.fusion"], values["sync.wire"]) == ("own:single", "fp32")
    assert "changes the arithmetic" not in cell.verdict
    assert best.ratio.value == pytest.approx(1.1, rel=1e-6)
    half = setting(cell, fusion="own:none", exchange="flat", wire="fp16")
    assert half.changes == ("wire fp16",)
    assert half.verdict == "undecided"
    assert half.losses.difference.value == pytest.approx(0.05)
    assert half.losses.reference_label == "flat, own:none, fp32"
    assert setting(cell, fusion="own:single", exchange="flat", wire="fp32").losses is None


def test_one_rank_is_scatter_not_effect(planted_runs: Path) -> None:
    sweep = found_in(planted_runs)
    assert [cell.ranks for cell in sweep.cells] == [4]
    (text,) = sweep.idle
    assert text.startswith("At 1 rank no swept key acts")
    spread = re.search(r"differ by up to ([0-9.]+) %", text)
    assert float(spread[1]) > 10  # the factory slows one rank as well


def test_an_axis_counts_only_where_it_acts(tmp_path: Path) -> None:
    """Horovod's cycle time does nothing under DDP; that must not dilute its effect."""

    def speed(plan: RunPlan) -> float:
        if plan.engine.name == "ddp":
            return 1.2
        return 0.8 if plan.engine.horovod.cycle_time_ms > 1 else 1.0

    sweep = {"engine.name": ("horovod", "ddp"), "engine.horovod.cycle_time_ms": (1.0, 5.0)}
    cell = swept(tmp_path, speed, sweep=sweep)
    cycle = next(axis for axis in cell.axes if axis.key == "engine.horovod.cycle_time_ms")
    assert cycle.levels[1].effect.value == pytest.approx(0.8, rel=1e-6)
    assert cell.has_default
    assert cell.best_setting.options == "--set engine.name=ddp"
    assert cell.advice == "Run with --set engine.name=ddp."


# What it is measured against


def test_default_is_found_wherever_it_stands(tmp_path: Path) -> None:
    sweep = {"sync.fusion": ("own:none", "auto"), "sync.wire": ("fp16", "fp32")}
    cell = swept(tmp_path, lambda plan: 1.0, engine="ddp", sweep=sweep)
    assert cell.has_default
    (baseline,) = [one for one in cell.settings if one.is_baseline]
    assert dict(baseline.values) == {"sync.fusion": "auto", "sync.wire": "fp32"}
    assert "the default (auto, fp32)" in cell.verdict


def test_without_the_default_the_first_setting_is_named(tmp_path: Path) -> None:
    cell = swept(tmp_path, lambda plan: 1.0, engine="ddp", sweep={"sync.fusion": ("own:single", "own:none")})
    assert not cell.has_default
    assert setting(cell, fusion="own:single").is_baseline
    assert cell.baseline == "own:single, the first setting with figures: the default is not in the sweep, or has none"
    assert cell.advice == "Keep --set sync.fusion=own:single: nothing that was swept is worth setting."


def test_missing_repeats_leave_the_others_paired(tmp_path: Path) -> None:
    """A run that is lost takes its pair along, and no other."""

    def is_lost(plan: RunPlan) -> bool:
        return str(plan.sync.fusion) == "own:single" and plan.series.repeat == 5

    cell = swept(tmp_path, single_by(1.1), skip=is_lost, drift=0.3, repeats=6, **SINGLE)
    fast = setting(cell, fusion="own:single")
    assert fast.ratio.n == 5
    assert fast.ratio.value == pytest.approx(1.1, rel=1e-6)


# What cannot be decided


@pytest.mark.parametrize("repeats", [1, 3])
def test_few_repeats_decide_nothing(tmp_path: Path, repeats: int) -> None:
    cell = swept(tmp_path, single_by(1.5), repeats=repeats, **SINGLE)
    fast = setting(cell, fusion="own:single")
    assert fast.verdict == "insufficient"
    assert fast.ratio.kind == ("single run" if repeats == 1 else "range")
    assert cell.best == ""
    assert cell.axes[0].verdict == "insufficient"
    assert f"nothing is decided in {repeats} run" in cell.verdict
    assert cell.needed_repeats is None
    assert cell.advice.startswith("Repeat with --repeats 5: ")


def test_noise_is_undecided_and_the_repeats_are_counted(tmp_path: Path) -> None:
    cell = swept(
        tmp_path, lambda plan: WOBBLE[plan.series.repeat] if str(plan.sync.fusion) == "own:single" else 1.0, **SINGLE
    )
    assert setting(cell, fusion="own:single").verdict == "undecided"
    logs = [math.log(factor) for factor in WOBBLE]
    mean = sum(logs) / 5
    scatter = math.sqrt(sum((value - mean) ** 2 for value in logs) / 4)
    assert cell.needed_repeats == repeats_for(scatter, 0.02, 1, freedom=4)
    assert f"--repeats {cell.needed_repeats}" in cell.advice
    assert "distinguishable" in cell.advice


def test_equal_settings_keep_the_default(tmp_path: Path) -> None:
    cell = swept(tmp_path, single_by(1.005), **SINGLE)
    assert setting(cell, fusion="own:single").verdict == "equal"
    assert cell.best == ""
    assert cell.advice == "Keep the default: nothing that was swept is worth setting."
    assert cell.axes[0].verdict == "no effect"


def test_what_had_no_effect_is_never_the_best(tmp_path: Path) -> None:
    inert = "sync.fusion: own:single was asked for, own:none ran (counters)"
    cell = swept(
        tmp_path,
        single_by(1.2),
        story=lambda plan: Story(inert=(inert,) if str(plan.sync.fusion) == "own:single" else ()),
        **SINGLE,
    )
    assert setting(cell, fusion="own:single").inert == (inert,)
    assert cell.best == ""
    assert cell.axes == ()
    assert any("left out of the axes" in note for note in cell.notes)
    assert "faster but not what was asked for" in cell.verdict


LOCAL: dict[str, Any] = {"engine": "ddp", "sweep": {"sync.average_every": (None, 8)}}


def local(plan: RunPlan, **changes: Any) -> Story:
    return Story(last_loss=1.95 if plan.sync.average_every else 1.9, **changes)


def test_ranks_that_train_apart_are_never_the_best(tmp_path: Path) -> None:
    cell = swept(tmp_path, lambda plan: 1.5 if plan.sync.average_every else 1.0, story=local, **LOCAL)
    apart = setting(cell, average_every="8")
    assert (apart.verdict, cell.best) == ("faster per step", "")
    assert apart.losses.difference.value == pytest.approx(0.05)
    assert "1 faster per step, quality not compared" in cell.verdict
    assert cell.advice.startswith("Train to a target (--to-accuracy) with --set sync.average_every=8")


TOPK: dict[str, Any] = {"engine": "ddp", "sweep": {"sync.wire": ("fp32", "topk")}}
MISSED, DIVERGED = (0.1, 0.2), (0.1, None)


def trained_to_target(
    out: Path, values: Callable[[RunPlan], tuple[float | None, ...]], speed: float = 1.5, **request: Any
) -> SweepCell:
    """The second setting's steps are `speed` times as fast; runs end as their values say."""
    for plan in quality_plans(**{"points": (2,), **TOPK, **request}):
        is_second = plan.sync.wire == "topk" or plan.sync.average_every is not None
        factor = (1 + 0.02 * plan.series.repeat) / (speed if is_second else 1.0)
        found = values(plan) if is_second or plan.series.repeat == 3 else (0.1, 0.3, 0.9)
        if not found:  # killed
            create(out, plan)
            continue
        packed = {"packing_s": 0.004, "merging_s": 0.001, "communication_s": 0.02} if plan.sync.wire == "topk" else {}
        exchange = exchange_result(plan, gradients=GRADIENTS, alpha_s=1e-4, beta_s_per_byte=1e-9) | packed
        state = "invalid" if None in found else "valid"
        story = Story(training=Training(values=found, eval_s=0.0), exchange=exchange, state=state)
        write_run(out, plan, constant([part * factor for part in (5.0, 0.0, 30.0, 45.0, 10.0, 10.0)]), story)
    (cell,) = found_in(out).cells
    return cell


@pytest.mark.parametrize(
    ("evaluations", "speed", "verdict", "advice"),
    [
        (3, 1.5, "faster to the target", "Run with --set sync.wire=topk."),
        (6, 1.5, "faster per step, slower to the target", "Keep the default: nothing that was swept is worth setting."),
        (4, 4 / 3, "undecided", "Keep the default: nothing that was swept is worth setting."),
        (4, 0.8, "slower to the target", "Keep the default: nothing that was swept is worth setting."),
    ],
)
def test_a_sweep_to_a_target_is_decided_by_the_time_to_it(
    tmp_path: Path, evaluations: int, speed: float, verdict: str, advice: str
) -> None:
    def values(plan: RunPlan) -> tuple[float, ...]:
        return (0.1, 0.3, 0.9) if plan.sync.wire == "fp32" else (*(0.1 for _ in range(evaluations - 1)), 0.9)

    cell = trained_to_target(tmp_path, values, speed)
    sparse, plain = setting(cell, wire="topk"), setting(cell, wire="fp32")
    assert sparse.verdict_title == verdict
    # Whatever the drift of a repeat, which both have.
    assert sparse.sooner.value == pytest.approx(3 / evaluations * speed)
    assert plain.time.value / sparse.time.value == pytest.approx(sparse.sooner.value)
    assert sparse.ratio.value == pytest.approx(speed)
    assert (sparse.packing_s, sparse.merging_s, sparse.carried_s) == (0.004, 0.001, pytest.approx(0.015))
    assert (plain.packing_s, plain.merging_s) == (None, None)
    assert cell.advice == advice
    assert (cell.best == "topk") == (verdict == "faster to the target")
    charts = settings_charts(found_in(tmp_path), cell, settings_sheet(found_in(tmp_path), cell))
    assert [chart.title.split(" over")[0] for chart in charts] == ["Speed to the target", "Throughput"]


def test_a_setting_whose_runs_failed_has_missed_no_target(tmp_path: Path) -> None:
    cell = trained_to_target(tmp_path, lambda plan: ())
    assert setting(cell, wire="topk").verdict == "no figure"


@pytest.mark.parametrize("ending", [MISSED, DIVERGED])
def test_a_setting_of_which_a_run_missed_the_target_is_never_faster(
    tmp_path: Path, ending: tuple[float | None, ...]
) -> None:
    def values(plan: RunPlan) -> tuple[float | None, ...]:
        return ending if plan.series.repeat == 1 and plan.sync.wire == "topk" else (0.1, 0.3, 0.9)

    cell = trained_to_target(tmp_path, values)
    sparse = setting(cell, wire="topk")
    assert (sparse.num_reached, sparse.time, sparse.sooner) == (4, None, None)
    assert sparse.verdict_title == "faster per step, " * (ending is MISSED) + "target missed"
    assert (cell.best, "target missed" in cell.verdict) == ("", True)


@pytest.mark.parametrize(
    ("late", "verdict"), [(1, "faster to the target"), (5, "faster per step, slower to the target")]
)
def test_faster_is_said_of_ranks_apart_where_they_reach_the_target_sooner(
    tmp_path: Path, late: int, verdict: str
) -> None:
    """Their steps are 1.5 times as fast, and they need two evaluations more where they are not sooner."""
    cell = trained_to_target(tmp_path, lambda plan: (*[0.1] * (late if plan.sync.average_every else 2), 0.9), **LOCAL)
    assert setting(cell, average_every="8").verdict_title == verdict
    assert (cell.best == "8") == (verdict == "faster to the target")


def sharded(plan: RunPlan) -> Story:
    """Half the memory for half as many bytes again, and 5 ms of waiting for parameters."""
    is_sharded = plan.engine.name == "fsdp"
    peak = 2**29 if is_sharded else 2**30
    held = {**dict.fromkeys(HeldMemory.model_fields, 0), "activations": peak, "peak": peak}
    waits = {"gather_s": {"forward": 0.005 * plan.measure.measured_steps}, "evidence": "timed"}
    more = {"waits": waits} if is_sharded else {}
    sent = exchange_result(plan, gradients=GRADIENTS, alpha_s=1e-4, beta_s_per_byte=1e-10)
    return Story(
        last_loss=1.9 + 1.9e-7 * is_sharded,
        exchange={**sent, "bytes_inside": 1.5e6 if is_sharded else 1e6},
        of_rank=lambda rank: {"held": {**held, "evidence": "counted"}, **more},
    )


def test_strategies_of_equal_mathematics_are_told_by_memory_bytes_and_waiting(tmp_path: Path) -> None:
    sweep = {"engine.name": ("ddp", "fsdp"), "engine.fsdp.shard": ("parameters",)}
    cell = swept(tmp_path, lambda plan: 1.1 if plan.engine.name == "fsdp" else 1.0, story=sharded, sweep=sweep)
    shares = setting(cell, name="fsdp")
    assert (cell.has_default, cell.best, shares.changes) == (True, shares.label, ())
    assert (shares.memory_bytes, shares.step_bytes, shares.gather_s) == (2**29, 1.5e6, pytest.approx(0.005))
    words = "The same mathematics (strategy fsdp), 0.50 times the memory per rank; loss after equal samples"
    assert words in cell.verdict
    assert "relative difference 1e-07" in cell.verdict
    columns = {column.name: column.title for column in settings_sheet(found_in(tmp_path), cell).columns}
    assert (columns["memory_bytes"], columns["gather_s"]) == ("Memory per rank", "Waiting for parameters")
    # Where settings do not differ in them people are not shown them.
    same = swept(tmp_path / "same", single_by(1.1), **SINGLE)
    columns = {column.name: column.title for column in settings_sheet(found_in(tmp_path / "same"), same).columns}
    assert {columns[name] for name in ("memory_bytes", "step_bytes", "gather_s")} == {""}


# Horovod's autotuner

SMALL_SEARCH = {
    "engine.horovod.autotune_warmup_samples": 1,
    "engine.horovod.autotune_max_samples": 1,
    "engine.horovod.autotune_steps_per_sample": 1,
    "measure.warmup_steps": 20,
}


def tuned_story(plan: RunPlan, **changes: Any) -> Story:
    told = {"autotune": autotune_result(**changes)} if plan.engine.horovod.autotune else {}
    return Story(exchange=exchange_result(plan, gradients=GRADIENTS, alpha_s=1e-3, beta_s_per_byte=2e-9, **told))


def tuned(out: Path, speed: float, **changes: Any) -> SweepCell:
    return swept(
        out,
        lambda plan: speed if plan.engine.horovod.autotune else 1.0,
        drift=0.0,
        sweep={"engine.horovod.autotune": (False, True)},
        overrides=SMALL_SEARCH,
        story=lambda plan: tuned_story(plan, **changes),
    )


def test_autotuner_is_paid_back_after_cost_over_gain(tmp_path: Path) -> None:
    cell = tuned(tmp_path, 1.25)
    found = setting(cell, autotune="on").autotune
    assert found.gain_s == pytest.approx(0.1 - 0.08, rel=1e-6)
    assert found.break_even_steps == pytest.approx(60 / 0.02, rel=1e-6)
    assert "paid back after 3,000 steps (20 ms per step)" in found.words
    assert "chose 16 MiB and 2.5 ms" in found.words
    assert "settled at step 1,230" in found.words
    assert setting(cell, autotune="off").autotune is None


def test_slower_autotuner_is_never_paid_back(tmp_path: Path) -> None:
    found = setting(tuned(tmp_path, 0.9, finished=False, settled_step=None), autotune="on").autotune
    assert found.break_even_steps is None
    assert "never paid back" in found.words
    assert "had not settled before the measured steps in 5 of 5 runs" in found.words


# Many comparisons


@pytest.mark.parametrize(
    ("freedom", "critical"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (5, 2.57058), (9, 2.26216), (30, 2.04227)]
)
def test_student_p_at_the_tabled_five_percent(freedom: int, critical: float) -> None:
    assert student_p(critical, freedom) == pytest.approx(0.05, abs=1e-5)
    assert student_p(0.0, freedom) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_bonferroni_closed(p_values: list[float]) -> None:
    """Holm rejects what every intersection of hypotheses with it rejects by Bonferroni: the closure, by brute force."""
    every = range(len(p_values))
    subsets = [s for size in range(1, len(p_values) + 1) for s in itertools.combinations(every, size)]
    wanted = [max(min(1.0, len(s) * min(p_values[i] for i in s)) for s in subsets if one in s) for one in every]
    assert holm(p_values) == pytest.approx(wanted)


def test_families_without_a_difference_rarely_claim_one() -> None:
    rng = random.Random(7)
    families = [[paired_p([rng.gauss(0, 0.03) for _ in range(5)]) for _ in range(11)] for _ in range(400)]
    alone = sum(min(family) < LEVEL for family in families) / len(families)
    adjusted = sum(min(holm(family)) < LEVEL for family in families) / len(families)
    assert alone > 0.3
    assert adjusted < 0.08


def test_all_rank_counts_of_a_report_are_one_family(tmp_path: Path) -> None:
    """What stands alone at one rank count may be the luck of one of four."""
    lucky = (1.01, 1.008, 1.045, 1.03, 1.022)

    def speed(plan: RunPlan) -> float:
        return lucky[plan.series.repeat] if str(plan.sync.fusion) == "own:single" and plan.layout.ranks == 2 else 1.0

    alone = swept(tmp_path / "alone", speed, **SINGLE)
    assert setting(alone, fusion="own:single").verdict == "faster"
    wobble = {ranks: random.Random(ranks) for ranks in (3, 4, 5)}
    write_sweep(
        tmp_path / "all",
        lambda plan: speed(plan) * (wobble[plan.layout.ranks].gauss(1, 0.02) if plan.layout.ranks > 2 else 1.0),
        points=(2, 3, 4, 5),
        **SINGLE,
    )
    cells = found_in(tmp_path / "all").cells
    p_values = [setting(cell, fusion="own:single").adjusted_p for cell in cells]
    assert p_values[0] == pytest.approx(4 * (setting(alone, fusion="own:single").adjusted_p or 0))
    assert {setting(cell, fusion="own:single").verdict for cell in cells} == {"undecided"}
    assert {cell.best_ratio for cell in cells} == {None}


def test_the_best_of_many_is_said_to_be_chosen(tmp_path: Path) -> None:
    """Seven settings that are all 10 % faster than the default: what is printed of the luckiest holds that."""
    sizes = tuple(f"{2**power}MiB" for power in range(8))
    draw = random.Random(4)

    def speed(plan: RunPlan) -> float:
        faster = 1.1 if str(plan.sync.fusion) != sizes[0] else 1.0
        return faster * math.exp(draw.gauss(0, 0.008))

    sweep = {"sync.fusion": sizes}
    cell = swept(tmp_path, speed, engine="ddp", sweep=sweep)
    best, ratio = cell.best_setting, cell.best_ratio
    assert ratio.low < 1.1 < ratio.high
    assert ratio.value < best.ratio.value
    assert f"corrected for the choice among 7; {times_value(best.ratio)} as measured" in cell.verdict
    assert f"{times_value(ratio)}" in found_in(tmp_path).headline[0]


def test_a_run_that_went_on_after_an_interruption_is_in_no_mean(tmp_path: Path) -> None:
    def speed(plan: RunPlan) -> float:
        return 0.5 if plan.series.axes["sync.fusion"] == "own:single" and plan.series.repeat == 1 else 1.0

    def story(plan: RunPlan) -> Story:
        return Story(record={"attempt": 2, "first_step": 7}) if speed(plan) < 1 else Story()

    found = setting(swept(tmp_path, speed, story=story, **SINGLE), fusion="own:single")
    assert (found.num_runs, found.num_planned) == (4, 5)
    assert found.why == "valid: resumed after an interruption, so not a repeat of uninterrupted runs"


# The update by optimizer, replicated against sharded


def updating(rank: int, plan: RunPlan) -> dict[str, Any]:
    """Two thirds of the state on rank 0 where it is shared out, and 2 ms of each step's update waited for."""
    is_shared = plan.strategy == "zero-1"
    kept = 3000 if not is_shared else (2000, 1000)[rank]
    others = dict.fromkeys(HeldMemory.model_fields, 0)
    held = {"held": {**others, "optimizer": kept, "evidence": "planted"}}
    if not is_shared:
        return held
    seconds = (0.001, 0.003)[rank] * plan.measure.measured_steps
    return {**held, "waits": {"exchange_s": {"optimizer": seconds}, "evidence": "planted"}}


def test_the_updates_share_is_one_table_by_optimizer_and_sharding(tmp_path: Path) -> None:
    def story(plan: RunPlan) -> Story:
        ineffective = {"key": "engine.ddp.shard_optimizer", "requested": True, "effective": False, "evidence": ""}
        is_stateless = plan.strategy == "zero-1" and plan.workload.train.optimizer.name == "sgd"
        return Story(of_rank=lambda rank: updating(rank, plan), settings=(ineffective,) if is_stateless else ())

    optimizers = {"train.optimizer.name": ("sgd", "adamw"), "engine.ddp.shard_optimizer": (False, True)}
    write_sweep(tmp_path / "runs", lambda _: 1.0, points=(2,), engine="ddp", sweep=optimizers, story=story)
    report = assemble(scan(tmp_path / "runs"))
    # The table of people, of all repeats: their mean update is 10.4 ms of 104 ms.
    sheets = (sheet for section, _ in document_of(report).walk() for sheet in section.sheets)
    (shown,) = [sheet for sheet in sheets if sheet.name == "sweep-updates"]
    cells = [[cell.text for cell in row.cells] for row in shown.to_display().rows]
    time = ["10.4 ms", "10.0 %"]
    assert sorted(cells) == [
        ["off, adamw", "adamw", "replicated", *time, DASH, "2.93 KiB", "1.000"],
        ["off, sgd", "sgd", "replicated", *time, DASH, "2.93 KiB", "1.000"],
        ["on, adamw", "adamw", "sharded (ZeRO-1)", *time, "2 ms", "1.953 KiB", "1.333"],
        ["on, sgd", "sgd", "replicated", *time, "2 ms", "1.953 KiB", "1.333"],
    ]
    # One bar for each setting, of all parts of the step.
    charts = [chart for section, _ in document_of(report).walk() for chart in section.charts()]
    (chart,) = [chart for chart in charts if chart.title.startswith("A step by optimizer")]
    (bars,) = chart.spec["datasets"].values()
    settings = dict.fromkeys(bar["place"] for bar in bars)
    assert list(settings) == [row.setting for row in shown.rows]
    for name in settings:
        by_part = {bar["part"]: bar["value"] for bar in bars if bar["place"] == name}
        assert by_part["optimizer"] == pytest.approx(0.0104)
        assert sum(by_part.values()) == pytest.approx(0.104)
