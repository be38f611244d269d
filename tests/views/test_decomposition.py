"""`dlbench run --decompose`: variants of every run, and what their differences say beside the phases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.errors import UserError
from dlbench.records.record import Record
from dlbench.records.registry import describe
from dlbench.records.rows.steps import PHASES, read_steps
from dlbench.records.scan import Run, scan
from dlbench.report.formats.data import as_plain
from dlbench.specs.plan import RunPlan, Variant
from dlbench.specs.sync import SyncSpec
from dlbench.views.decomposition import (
    MARGIN,
    OWN_PARTS,
    Decomposition,
    DecompositionView,
    PhaseRemoval,
    decomposition_lines,
    decompositions,
)
from dlbench.views.sweep.numbers import sweeps
from tests.conftest import Cli
from tests.support.datasets import write_volumes
from tests.support.forked_runs import run_forked
from tests.support.run_factory import constant, edit_json, plans, write_run, write_unfinished

DATA = "/data/pictures"
REAL: Mapping[str, float] = dict(zip(PHASES, (10.0, 0.0, 30.0, 50.0, 20.0, 5.0), strict=True))

VARIANTS: tuple[Variant, ...] = ("plain", "synthetic-input", "no-exchange")
NOTHING: Mapping[str, float] = dict.fromkeys(OWN_PARTS, 0.0)


def decomposed(**request: object) -> list[RunPlan]:
    return plans(**{"data": DATA, "decompose": True, "points": (2,), **request})


def parts_of(plan: RunPlan, **changes: float) -> dict[str, float]:
    """Milliseconds of the phases of a run: what its variant goes without is gone, and `changes` on top."""
    gone = {"synthetic-input": {"input": 0.0}, "no-exchange": {"exchange": 0.0}}.get(plan.series.variant, {})
    return {**REAL, **gone, **changes}


def write_series(
    out: Path, made: list[RunPlan], parts: Callable[[RunPlan], Mapping[str, float]] = parts_of, other: float = 3.0
) -> None:
    for plan in made:
        drift = 1 + plan.series.repeat / 100
        found = parts(plan)
        write_run(out, plan, constant([found[phase] * drift for phase in PHASES], other=other * drift))


def write_changed(out: Path, variant: str, **changes: float) -> None:
    """Five repeats; runs of one variant have these phases, milliseconds."""
    write_series(
        out, decomposed(repeats=5), lambda plan: parts_of(plan, **(changes if plan.series.variant == variant else {}))
    )


def only_point(out: Path) -> Decomposition:
    (point,) = decompositions(scan(out).runs)
    return point


def lines_of(out: Path) -> list[str]:
    return decomposition_lines(decompositions(scan(out).runs))


def both(point: Decomposition) -> tuple[PhaseRemoval, PhaseRemoval]:
    one, other = point.differences
    assert (one.what, other.what) == ("input", "exchange")
    return one, other


# --- plans ------------------------------------------------------------------------------------------------------------


def test_each_run_stands_beside_its_variants_and_every_second_repeat_goes_backwards() -> None:
    made = decomposed(points=(1, 2), repeats=2)
    there = [*((1, name) for name in VARIANTS[:2]), *((2, name) for name in VARIANTS)]
    assert [(p.layout.ranks, p.series.variant) for p in made] == [*there, *reversed(there)]
    assert [p.series.position for p in made] == list(range(10))
    assert len({p.run_id for p in made}) == 10
    assert {p.series.id for p in made} == {"s1"}


def test_a_plain_run_is_the_one_without_the_option_and_a_variant_differs_in_one_thing() -> None:
    alone = plans(data=DATA, points=(2,), repeats=1)
    plain, synthetic, apart = decomposed(repeats=1)
    assert plain == alone[0]
    changed = {"run_id", "series"}
    assert synthetic.workload.data.is_synthetic
    assert synthetic.model_dump(exclude={*changed, "workload"}) == plain.model_dump(exclude={*changed, "workload"})
    assert synthetic.workload.model_copy(update={"data": plain.workload.data}) == plain.workload
    assert apart.sync == SyncSpec(exchange="none")
    assert apart.model_dump(exclude={*changed, "sync"}) == plain.model_dump(exclude={*changed, "sync"})
    assert (synthetic.run_id, apart.run_id) == (f"{plain.run_id}-synthetic", f"{plain.run_id}-apart")
    for plan in (plain, synthetic, apart):
        assert RunPlan.model_validate_json(plan.to_json()) == plan


def test_a_delay_planted_into_the_reader_goes_with_it_and_other_faults_stay() -> None:
    both_faults = {"fault.input_delay_s": 0.1, "fault.step_delay_s": 0.2}
    plain, synthetic, apart = decomposed(repeats=1, overrides=both_faults)
    assert plain.fault is not None
    assert apart.fault == plain.fault
    assert (synthetic.fault.input_delay_s, synthetic.fault.step_delay_s) == (0.0, 0.2)
    assert decomposed(repeats=1, overrides={"fault.input_delay_s": 0.1})[1].fault is None


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"data": "synthetic", "points": (1,)}, "nothing can be left out"),
        ({"to_accuracy": True}, "leave out --to-accuracy"),
        ({"sweep": {"train.batch_per_rank": (2, 4)}}, "cannot be combined with --sweep"),
        ({"overrides": {"checkpoint.every_steps": 3}}, "cannot be combined with checkpoints"),
        ({"overrides": {"sync.exchange": "none"}}, "has no exchange that could be left out"),
        ({"overrides": {"measure.noise_scale": True}}, "variant no-exchange is not possible: sync.exchange none"),
        (
            {"overrides": {"train.schedule.warmup_epochs": 2.0}},
            "variant synthetic-input is not possible: train.schedule is in epochs",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_line(request_: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        decomposed(**request_)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_difference_that_the_phase_holds_agrees_with_it(tmp_path: Path) -> None:
    write_series(tmp_path, decomposed(repeats=5))
    point = only_point(tmp_path)
    reading, exchange = both(point)
    assert point.step_s.value == pytest.approx(118e-3 * MEAN_DRIFT)
    assert [reading.seconds.value, reading.phase_s.value] == pytest.approx([10e-3 * MEAN_DRIFT] * 2)
    assert [exchange.seconds.value, exchange.phase_s.value] == pytest.approx([20e-3 * MEAN_DRIFT] * 2)
    assert reading.share.value == pytest.approx(10 / 118)
    assert exchange.share.value == pytest.approx(20 / 118)
    assert (reading.verdict, exchange.verdict) == ("agree", "agree")
    assert reading.seconds.kind == "Student t"
    assert point.missing == ()


MEAN_DRIFT = statistics.geometric_mean(1 + repeat / 100 for repeat in range(5))
"""Of the repeats of `write_series`."""


def test_a_gap_of_no_account_is_no_disagreement(tmp_path: Path) -> None:
    small = MARGIN * 118 / 2
    write_changed(tmp_path, "no-exchange", h2d=small)
    _, exchange = both(only_point(tmp_path))
    assert exchange.gap_s.high < 0  # for certain, but small
    assert exchange.verdict == "agree"


@pytest.mark.parametrize(("repeats", "kind"), [(1, "single run"), (4, "range")])
def test_few_pairs_tell_numbers_and_no_verdict(tmp_path: Path, repeats: int, kind: str) -> None:
    write_series(tmp_path, decomposed(repeats=repeats))
    reading, exchange = both(only_point(tmp_path))
    assert {reading.verdict, exchange.verdict} == {"insufficient"}
    assert reading.seconds.kind == kind
    assert f"{repeats} of 5 pairs" in "\n".join(lines_of(tmp_path))


times = st.integers(min_value=1_000, max_value=100_000_000)


@settings(max_examples=15)
@given(data=st.data())
def test_differences_and_gaps_add_up_whatever_the_ranks_do(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    out = tmp_path_factory.mktemp("runs")
    made = decomposed(repeats=2, overrides={"measure.warmup_steps": 1, "measure.measured_steps": 2})
    mean_step: dict[tuple[str, int], float] = {}
    phase: dict[tuple[str, int], dict[str, float]] = {}
    for plan in made:
        drawn = {(rank, step): [data.draw(times) for _ in range(7)] for rank in range(2) for step in range(3)}
        write_run(out, plan, lambda rank, step, drawn=drawn: (drawn[rank, step][:6], drawn[rank, step][6]))
        measured = [found for (_, step), found in drawn.items() if step > 0]
        key = plan.series.variant, plan.series.repeat
        mean_step[key] = sum(map(sum, measured)) / len(measured) / 1e9
        phase[key] = {name: sum(found[i] for found in measured) / len(measured) / 1e9 for i, name in enumerate(PHASES)}
    for one in only_point(out).differences:
        variant = {"input": "synthetic-input", "exchange": "no-exchange"}[one.what]
        spared = [mean_step["plain", k] - mean_step[variant, k] for k in range(2)]
        step, without = (math.sqrt(mean_step[kind, 0] * mean_step[kind, 1]) for kind in ("plain", variant))
        held = [phase["plain", k][one.what] / mean_step["plain", k] for k in range(2)]
        assert one.seconds.value == pytest.approx(step - without, abs=1e-12)
        moved = one.seconds.value - sum(spared) / 2
        ends = (min(spared) + moved, max(spared) + moved)
        assert (one.seconds.low, one.seconds.high) == pytest.approx(ends, abs=1e-12)
        assert one.share.value == pytest.approx((step - without) / step, abs=1e-12)
        assert one.phase_s.value == pytest.approx(step * sum(held) / 2, abs=1e-12)
        assert one.gap_s.value == pytest.approx(one.seconds.value - one.phase_s.value, abs=1e-12)


def test_only_repeats_with_both_runs_count_and_the_rest_is_told(tmp_path: Path) -> None:
    made = decomposed(repeats=5)
    dead = {("no-exchange", 1), ("plain", 3)}
    write_series(tmp_path, [p for p in made if (p.series.variant, p.series.repeat) not in dead])
    for plan in made:
        if (plan.series.variant, plan.series.repeat) in dead:
            write_unfinished(tmp_path, plan, "failed", "out of memory")
    point = only_point(tmp_path)
    reading, exchange = both(point)
    assert (reading.seconds.n, exchange.seconds.n) == (4, 3)
    assert len(point.missing) == 2
    assert all("out of memory" in line for line in point.missing)


def test_a_run_that_went_on_after_an_interruption_is_subtracted_from_none(tmp_path: Path) -> None:
    write_series(tmp_path, decomposed(repeats=5))
    for run in scan(tmp_path).runs:
        if (run.plan.series.variant, run.plan.series.repeat) == ("plain", 3):
            edit_json(run.folder.record, attempt=2, first_step=7)
    point = only_point(tmp_path)
    assert {what.seconds.n for what in both(point)} == {4}
    assert [line.partition(" ")[2] for line in point.missing] == [
        "was resumed after an interruption: not a repeat of uninterrupted runs"
    ]


def test_each_point_of_each_series_stands_alone(tmp_path: Path) -> None:
    write_series(tmp_path, decomposed(points=(1, 2), repeats=2))
    write_series(tmp_path, decomposed(points=(2,), repeats=2, series="s2"))
    found = decompositions(scan(tmp_path).runs)
    assert [(one.series, one.ranks, [d.what for d in one.differences]) for one in found] == [
        ("s1", 1, ["input"]),
        ("s1", 2, ["input", "exchange"]),
        ("s2", 2, ["input", "exchange"]),
    ]
    plain = as_plain(found)
    assert [(one["series"], one["ranks"]) for one in plain] == [("s1", 1), ("s1", 2), ("s2", 2)]
    assert plain[1]["differences"][1]["what"] == "exchange"
    assert plain[1]["differences"][1]["seconds"]["value"] == pytest.approx(20e-3 * math.sqrt(1.01))
    section = DecompositionView().shown(None, found)
    (sheet,) = section.sheets
    assert [(row["series"], row["ranks"], row["what"], row["shorter_s"]) for row in sheet.records()] == [
        (one.series, one.ranks, part.what, part.seconds.value) for one in found for part in one.differences
    ]


def test_variants_are_never_averaged_with_plain_runs(tmp_path: Path) -> None:
    write_series(tmp_path, decomposed(points=(1, 2), repeats=2))
    found = scan(tmp_path)
    table = tabulate(found)
    by_variant = {}
    for group in groups(table):
        (variant,) = {run.plan.series.variant for run in group.runs}
        by_variant[variant] = sorted(point.ranks for point in group.points)
    assert by_variant == {"plain": [1, 2], "synthetic-input": [1, 2], "no-exchange": [2]}
    assert sweeps(table) == ()
    apart = next(run for run in found.runs if run.plan.series.variant == "no-exchange")
    assert describe(apart)["exchange"] == "exchange=none"


# --- real ranks -------------------------------------------------------------------------------------------------------


def record_of(run: Run) -> Record:
    assert run.record is not None, run.detail
    assert run.state == "valid", run.detail
    return run.record


@pytest.fixture(scope="module")
def small_density(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("density") / "train"
    write_volumes(folder, 24, seed=0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("points", [(2,), pytest.param((1, 2), marks=pytest.mark.nightly)])
def test_real_runs_with_and_without_input_and_exchange(
    cli: Cli, tmp_path: Path, small_density: Path, points: tuple[int, ...]
) -> None:
    words = (
        *("cosmoflow", "--preset", "ci", "--engine", "ddp", "--data", small_density, "--out", tmp_path / "runs"),
        *("--ranks", ",".join(map(str, points)), "--set", "layout.cores_per_rank=1", "--decompose"),
        *("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=2", "--set", "train.batch_per_rank=2"),
    )
    if 1 in points:
        done = cli("run", *words)
        assert done.returncode == 0, done.stderr
        assert "a run of one rank has no exchange" in done.stderr
        told = done.stdout.splitlines()
    else:
        told = decomposition_lines(decompositions(run_forked(*words)))
    runs = {(run.plan.layout.ranks, run.plan.series.variant): run for run in scan(tmp_path / "runs").runs}
    assert set(runs) == {(ranks, variant) for ranks in points for variant in VARIANTS[: 1 + ranks]}
    for (_, variant), run in runs.items():
        assert (record_of(run).data["kind"] == "synthetic") is (variant == "synthetic-input")
    plain, apart = record_of(runs[2, "plain"]), record_of(runs[2, "no-exchange"])
    assert len({rank.initial_parameters_sha256 for rank in apart.ranks}) == 1
    assert len({rank.final_parameters_sha256 for rank in apart.ranks}) == 2
    assert len({rank.final_parameters_sha256 for rank in plain.ranks}) == 1
    assert plain.exchange is not None
    assert apart.exchange is None
    assert any("gradients are not exchanged" in text for text in apart.warnings)
    # The first step is the same everywhere: equal parameters, equal samples.
    for rank in range(2):
        steps = (read_steps(runs[2, variant].folder.steps(rank)).steps for variant in ("plain", "no-exchange"))
        one, other = (found["loss"][0] for found in steps)
        assert one == pytest.approx(other, rel=1e-5)
    assert told[0].startswith(f"cosmoflow, ci preset, PyTorch DDP, weak scaling, {points[0]} rank")
    assert "without exchange a step is" in "\n".join(told)
