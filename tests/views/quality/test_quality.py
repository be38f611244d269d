"""What reports say of training to a quality, of the noise scale and of the hardware's use: answers known beforehand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.scaling import Group, groups
from dlbench.analysis.table import RunTable, tabulate
from dlbench.records.scan import read_run, scan
from dlbench.report.formats import html, markdown
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import mean_estimate
from dlbench.views import model
from dlbench.views.doubts import group_doubts
from dlbench.views.noise import NoisePoint, advice, doubled_batch
from dlbench.views.quality.numbers import GroupQuality, LargeBatch, group_quality, large_batches
from dlbench.views.quality.view import batch_verdict
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.utilisation import peak_of, utilisation
from tests.support.run_factory import Story, Training, constant, edit_json, plans, quality_plans, write_run

MISSED = (0.2, 0.3, 0.4, 0.45)


def rising(count: int) -> tuple[float, ...]:
    """Values that meet the target of 0.5 at the last of `count` evaluations."""
    return (*(0.1 + 0.3 * k / count for k in range(1, count)), 0.55)


def step(milliseconds: float) -> Any:
    return constant([0, 0, 0, milliseconds, 0, 0])


def write_pair(out: Path, *, repeats: int = 5, fails: Sequence[int] = (), state: str = "valid") -> None:
    """One rank: 100 ms steps, 5 evaluations of 80 samples; two ranks: 110 ms steps, 6 evaluations. An evaluation takes
    0.5 s, a checkpoint before it 0.25 s. At two ranks the repeats `fails` miss the target.
    """
    for plan in quality_plans(points=(1, 2), repeats=repeats):
        two = plan.layout.ranks == 2
        missed = two and plan.series.repeat in fails
        values = MISSED if missed else rising(6 if two else 5)
        story = Story(training=Training(values=values, wait_s=0.25), state=state if missed else "valid")
        write_run(out, plan, step((110 if two else 100) * (1 + 0.01 * plan.series.repeat)), story)


def read(out: Path) -> tuple[Group, RunTable, GroupQuality]:
    table = tabulate(scan(out))
    (group,) = groups(table)
    quality = group_quality(group, table)
    assert quality is not None
    return group, table, quality


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of `write_pair`, all of which reach the target."""
    out = tmp_path_factory.mktemp("pair")
    write_pair(out)
    return out


def codes(out: Path) -> set[str]:
    table = tabulate(scan(out))
    return {doubt.code for group in groups(table) for doubt in group_doubts(group, table)}


def one_group(out: Path) -> model.ReportGroup:
    (group,) = assemble(scan(out)).groups
    return group


def markdown_of(out: Path) -> str:
    return markdown.to_markdown(document_of(assemble(scan(out)))).replace("\\", "")


def geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# Figures


def test_time_samples_and_epochs_to_quality_are_those_of_the_runs(pair: Path) -> None:
    _, _, found = read(pair)
    one, two = found.points
    assert [(point.ranks, point.num_reached, point.num_runs) for point in found.points] == [(1, 5, 5), (2, 5, 5)]
    # Repeat k is slowed by k %: 5 x 20 steps of 100 ms and more, or 6 x 10 of 110 ms.
    slow = [1 + repeat / 100 for repeat in range(5)]
    assert one.time.value == pytest.approx(geometric([5 * (20 * 0.1 * k + 0.75) for k in slow]))
    assert two.time.value == pytest.approx(geometric([6 * (10 * 0.11 * k + 0.75) for k in slow]))
    assert one.samples.value == pytest.approx(400)
    assert two.epochs.value == pytest.approx(480 / 160)
    assert one.resolution.value == pytest.approx(20 * 0.102 + 0.75)
    assert one.best.value == 0.55


def test_time_to_quality_stands_inside_and_outside_of_staging(tmp_path: Path, pair: Path) -> None:
    how = {"strategy": "shard", "tier": "local", "method": "copy", "streams": 4}
    staged = {**how, "seconds": 3.0, "nodes": [], "verified": "-", "kept": False}
    for plan in quality_plans(points=(1,), repeats=5):
        story = Story(training=Training(values=rising(5), wait_s=0.25), record={"staging": staged})
        write_run(tmp_path, plan, step(100 * (1 + 0.01 * plan.series.repeat)), story)
    (point,) = read(tmp_path)[2].points
    whole = [5 * (20 * 0.1 * (1 + repeat / 100) + 0.75) for repeat in range(point.num_runs)]
    assert point.time.value == pytest.approx(geometric(whole))
    assert point.unstaged.value == pytest.approx(geometric([seconds - 3.0 for seconds in whole]))
    assert "Without staging" in markdown_of(tmp_path)
    assert "Without staging" not in markdown_of(pair)


def test_the_account_of_the_time_sums(pair: Path) -> None:
    for point in read(pair)[2].points:
        parts = (point.training, point.evaluation, point.other)
        assert sum(part.value for part in parts if part) == pytest.approx(point.whole.value)
        assert point.evaluation.value == pytest.approx(0.5 * (5 if point.ranks == 1 else 6))
        assert point.other.value == pytest.approx(0.25 * (5 if point.ranks == 1 else 6))


def test_what_came_after_the_target_does_not_count(tmp_path: Path) -> None:
    (plan,) = quality_plans(points=(1,), repeats=1)
    write_run(tmp_path, plan, step(100), Story(training=Training(values=[0.1, 0.6, 0.7])))
    (point,) = read(tmp_path)[2].points
    assert point.whole.value == pytest.approx(point.time.value)


def test_three_factors_have_their_closed_forms_and_multiply_exactly(pair: Path) -> None:
    factors = read(pair)[2].points[1].factors
    assert factors.throughput.value == pytest.approx(2 * 100 / 110)
    assert factors.samples.value == pytest.approx(400 / 480)
    drift = [1 + 0.01 * k for k in range(5)]
    ratios = [5 * (2.0 * d + 0.75) / (6 * (1.1 * d + 0.75)) for d in drift]
    assert factors.speedup.value == pytest.approx(geometric(ratios))
    rest = [(1 + 0.75 / (2.0 * d)) / (1 + 0.75 / (1.1 * d)) for d in drift]
    assert factors.rest.value == pytest.approx(geometric(rest))
    product = factors.throughput.value * factors.samples.value * factors.rest.value
    assert product == pytest.approx(factors.speedup.value, rel=1e-12)
    for figure in (factors.speedup, factors.throughput, factors.samples, factors.rest):
        assert figure.kind == "Student t"
        assert figure.low <= figure.value <= figure.high


# Runs that did not get there


@pytest.mark.parametrize(
    ("fails", "state", "invalid"), [((1,), "valid", 0), ((0, 3), "valid", 0), ((2,), "invalid", 1)]
)
def test_a_run_that_did_not_reach_the_target_is_counted_and_forbids_a_speed_up(
    tmp_path: Path, fails: tuple[int, ...], state: str, invalid: int
) -> None:
    write_pair(tmp_path, fails=fails, state=state)
    _, _, found = read(tmp_path)
    point = found.points[1]
    assert (point.num_reached, point.num_runs, point.num_invalid) == (5 - len(fails), 5, invalid)
    assert point.time.n == 5 - len(fails)
    assert point.factors is None
    assert "target-not-reached" in codes(tmp_path)
    group = one_group(tmp_path)
    assert f"{10 - len(fails)} of 10 runs met the target top-1 accuracy of at least 50.0 %" in group.verdict
    assert "no speed-up of the time to accuracy at 2 ranks" in group.verdict
    assert "sooner" not in group.verdict
    assert found.headline[0] == f"{10 - len(fails)} of 10"


def test_runs_that_end_without_a_record_raise_doubt(tmp_path: Path) -> None:
    write_pair(tmp_path)
    last = [run for run in scan(tmp_path).runs if run.plan.layout.ranks == 2][-1]
    last.folder.record.unlink()
    point = read(tmp_path)[2].points[1]
    assert (point.num_reached, point.num_runs, point.num_lost) == (4, 4, 1)
    assert "runs-lost" in codes(tmp_path)


def test_no_run_reached_it(tmp_path: Path) -> None:
    for plan in quality_plans(points=(1, 2), repeats=1):
        write_run(tmp_path, plan, step(100), Story(training=Training(values=(0.2, 0.3, 0.25))))
    _, _, found = read(tmp_path)
    assert [point.time for point in found.points] == [None, None]
    assert (found.points[0].best.value, found.points[0].final and found.points[0].final.value) == (0.3, 0.25)
    wanted = (
        "all 2 runs missed the target top-1 accuracy of at least 50.0 % within 20 epochs: the best they reached is "
    )
    group = one_group(tmp_path)
    assert f"{wanted}30.0 % at 1 rank" in group.verdict
    (missed,) = (doubt.text for doubt in group.doubts if doubt.code == "target-not-reached")
    assert missed == "runs missed the target (1 of 1 at 1 rank, 1 of 1 at 2 ranks): there is no time to accuracy"


def test_an_error_is_to_fall_below_its_target(tmp_path: Path) -> None:
    for plan in quality_plans(points=(1, 2), repeats=5):
        values = (0.9, None, 0.7, 0.45) if plan.layout.ranks == 2 else (0.8, 0.5)
        training = Training(values=values, metric="mae", predictor_value=0.95)
        write_run(tmp_path, plan, step(100), Story(training=training))
    _, _, found = read(tmp_path)
    assert [point.num_reached for point in found.points] == [5, 5]
    assert found.points[1].best.value == 0.45
    assert found.points[1].factors.samples.value == pytest.approx(0.5)
    verdict = one_group(tmp_path).verdict
    assert "all 10 runs met the target mean absolute error of at most 0.5000" in verdict
    # 4 x (10 x 0.1 s + 0.5 s) against 2 x (20 x 0.1 s + 0.5 s).
    assert "2 ranks need 1.20x as long as 1 rank" in verdict
    assert codes(tmp_path) == set()


# Steps, and what may be compared


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("quality.target", 0.6), ("checkpoint.every_steps", 10)),
        *(("train.gradient_accumulation", 2), ("model.memory_format", "channels-last")),
    ],
)
def test_other_goals_and_work_are_groups_of_their_own(tmp_path: Path, key: str, value: object) -> None:
    (one,) = quality_plans(points=(1,), repeats=1)
    (other,) = quality_plans(points=(1,), repeats=1, series="s2", overrides={key: value})
    for plan in (one, other):
        write_run(tmp_path, plan, step(100), Story(training=Training(values=rising(5))))
    assert len(groups(tabulate(scan(tmp_path)))) == 2
    assert len({group.label for group in assemble(scan(tmp_path)).groups}) == 2


# Doubts


def write_one(out: Path, story: Story, ranks: int = 2, **request: Any) -> RunPlan:
    (plan,) = quality_plans(points=(ranks,), repeats=1, **request)
    write_run(out, plan, step(100), story)
    return plan


@pytest.mark.parametrize(
    ("training", "record", "overrides", "code"),
    [
        (Training(values=(0.6,)), {}, {}, "first-evaluation"),
        (Training(values=rising(3), predictor_value=0.7), {}, {}, "target-without-skill"),
        (Training(values=(0.05, 0.08)), {}, {}, "no-skill"),
        (Training(values=rising(3), eval_samples=50), {}, {"quality.evaluate_samples": 50}, "part-evaluated"),
        (Training(values=rising(3)), {"overflow_steps": 2}, {}, "overflow-steps"),
        (Training(values=rising(3)), {"first_step": 20, "resumed_from": "step-20"}, {}, "resumed"),
        (Training(values=rising(3)), {}, {"measure.noise_scale": True}, "noise-scale"),
        (Training(values=rising(3), train_samples=200), {}, {}, "contradiction"),
        (Training(values=()), {"steps": 6}, {}, "no-evaluation"),
    ],
)
def test_doubts_of_training_are_told(
    tmp_path: Path, training: Training, record: dict[str, Any], overrides: dict[str, Any], code: str
) -> None:
    if code == "no-evaluation":
        (plan,) = quality_plans(points=(2,), repeats=1)
        (other,) = plans(points=(2,), repeats=1)
        folder = write_run(tmp_path, plan, step(100), Story(training=Training(values=rising(1))))
        content = json.loads(folder.record.read_text())
        empty = {**content["quality"], "evaluations": [], "reached": False}
        folder.record.write_text(json.dumps({**content, "quality": empty}))
        assert other.measure.until == "steps"
    else:
        write_one(tmp_path, Story(training=training, record=record), overrides=overrides)
    assert code in codes(tmp_path)
    assert "<html" in html.to_html(document_of(assemble(scan(tmp_path))))


AT_20 = "resumed after interruption (attempt 2) at step 20"
ADDED = "times add up over the attempts, from checkpoint to checkpoint, without the time between them"
ANEW = "started again after interruption (attempt 2): nothing of earlier attempts is in its figures"
BEFORE = {"attempt": 1, "step": 23, "checkpoint": "step-20", "at": "2026-03-01T11:50:00Z"}


@pytest.mark.parametrize(
    ("to_quality", "first_step", "before", "severity", "words"),
    [
        (True, 20, BEFORE, "serious", f"{AT_20} of 23 done: {ADDED}, which took 10 min 00 s and is in no figure"),
        (True, 20, None, "serious", f"{AT_20}: {ADDED}"),  # it was killed
        (False, 20, BEFORE, "note", f"{AT_20} of 23 done: all measured steps are of this attempt"),
        (False, 0, {**BEFORE, "checkpoint": None}, "note", ANEW),
    ],
)
def test_a_run_of_several_attempts_says_what_of_them_is_in_its_figures(
    tmp_path: Path, to_quality: bool, first_step: int, before: dict[str, Any] | None, severity: str, words: str
) -> None:
    record = {"attempt": 2, "first_step": first_step, "started": "2026-03-01T12:00:00Z"}
    made = (quality_plans if to_quality else plans)(points=(1,), repeats=1)
    training = Training(values=rising(3)) if to_quality else None
    folder = write_run(tmp_path, made[0], step(100), Story(record=record, training=training))
    aside = folder.path / "attempt-0001"
    aside.mkdir()
    if before is not None:
        content = {"format": "dlbench.interrupted", "version": 1, **before}
        (aside / "interrupted.json").write_text(json.dumps(content))
    code = "resumed" if first_step else "attempt"
    (doubt,) = [doubt for doubt in one_group(tmp_path).doubts if doubt.code == code]
    assert (doubt.text, doubt.severity, list(doubt.runs)) == (words, severity, [made[0].run_id])


def test_a_resumed_run_is_checked_by_what_it_trained_itself(tmp_path: Path) -> None:
    """The first epoch took 100 s more in another run: 80 samples of every evaluation are not this run's."""
    plan = write_one(tmp_path, Story(training=Training(values=rising(5))))
    folder = tmp_path / plan.run_id / "record.json"
    quality = json.loads(folder.read_text())["quality"]
    later = [{**one, "train_s": one["train_s"] + 100, "wall_s": one["wall_s"] + 100} for one in quality["evaluations"]]
    slow = {**quality, "evaluations": later, "time_to_quality_s": later[-1]["wall_s"]}
    edit_json(folder, quality=slow)
    # Why the figures may not be the run's stands first, that they are few last.
    (group,) = assemble(scan(tmp_path)).groups
    serious = [doubt.code for doubt in group.doubts if doubt.severity == "serious"]
    assert (serious[0], serious[-1]) == ("contradiction", "few-repeats")
    edit_json(folder, first_step=quality["evaluations"][0]["samples"] // plan.global_batch)
    assert {"resumed"} <= codes(tmp_path)
    assert "contradiction" not in codes(tmp_path)


def test_time_that_warm_up_steps_may_have_taken_is_no_contradiction(tmp_path: Path) -> None:
    """Steps of 100 ms: 0.9 s more for each warm-up step are no contradiction, a minute is one."""
    plan = write_one(tmp_path, Story(training=Training(values=rising(3))))
    folder = tmp_path / plan.run_id / "record.json"
    quality = json.loads(folder.read_text())["quality"]
    assert plan.measure.warmup_steps > 0
    for extra, is_told in ((0.9 * plan.measure.warmup_steps, False), (60.0, True)):
        seen = [{**one, "train_s": one["train_s"] + extra} for one in quality["evaluations"]]
        assert extra > 0.05 * seen[-1]["train_s"]
        edit_json(folder, quality={**quality, "evaluations": seen})
        assert ("contradiction" in codes(tmp_path)) is is_told


# Hardware


def with_system(plan: RunPlan, *, cores: int = 1, **node: Any) -> RunPlan:
    made = plan.system.node.model_copy(update=node)
    layout = plan.layout.model_copy(update={"cores_per_rank": cores})
    return plan.model_copy(update={"layout": layout, "system": plan.system.model_copy(update={"node": made})})


def test_mfu_is_flops_times_throughput_over_the_peak_of_all_cores(tmp_path: Path) -> None:
    """1 GFLOP a sample, 4 samples in 100 ms at each rank: 40 GFLOP/s of 2 x 3 cores of 0.1 TFLOP/s."""
    for plan in plans(points=(1, 2), repeats=5):
        plan = with_system(plan, cores=3, peak_tflops={"fp32": 0.1}, peak_source="a benchmark")
        write_run(tmp_path, plan, step(100), Story(record={"training_flops_per_sample": 10**9}))
    (group,) = groups(tabulate(scan(tmp_path)))
    found = utilisation(group)
    assert len(found.points) == 2
    for point in found.points:
        assert point.mfu.value == pytest.approx(40e9 / 0.3e12)
        assert point.achieved.value == pytest.approx(0.04)
    text = markdown_of(tmp_path)
    assert "| 2 ranks | 40.00 | 300.0 | 13.3 % |" in text
    assert "0.1000 TFLOP/s per core at fp32, 3 cores per rank (a benchmark)" in text


@pytest.mark.parametrize(
    ("device", "node", "peak", "declared"),
    [
        ("cpu", {}, None, None),
        ("cpu", {"gpus": 2, "peak_tflops": {"fp32": 10.0}, "peak_source": "x"}, None, None),
        ("cpu", {"peak_tflops": {"bf16": 10.0}, "peak_source": "x"}, None, None),
        ("cuda:0 (NVIDIA A100-SXM4-40GB)", {"gpus": 2}, 19.5e12, False),
        ("cuda:0 (NVIDIA A100-SXM4-40GB)", {"gpus": 1}, 19.5e12 / 2, False),
        ("cuda:0 (Some GPU)", {"gpus": 2, "peak_tflops": {"fp32": 10.0}, "peak_source": "x"}, 10e12, True),
        ("cuda:0 (Some GPU)", {"gpus": 2}, None, None),
    ],
)
def test_the_peak_is_that_of_the_device_in_use(
    tmp_path: Path, device: str, node: dict[str, Any], peak: float | None, declared: bool | None
) -> None:
    plan = with_system(plans(points=(2,), repeats=1)[0], **node)
    found = peak_of(read_run(write_run(tmp_path, plan, step(100), Story(device=device)).path))
    assert (found and found.flops_per_s) == (peak and pytest.approx(peak))
    assert (found and found.is_declared) == declared


# Noise scale


def noise(norm2: float | None, trace: float | None = 32.0) -> dict[str, Any]:
    content = {"small_batch": 4, "large_batch": 8, "steps": 50, "gradient_norm2": norm2, "covariance_trace": trace}
    return {"noise_scale": {**content, "noise_scale": trace / norm2 if norm2 and trace and norm2 > 0 else None}}


def noise_point(folder: Path, norms: Sequence[float]) -> tuple[NoisePoint, model.ReportGroup]:
    """Of runs with these squared gradients beside a variance of 32, at a batch of 8."""
    for plan in quality_plans(points=(2,), repeats=len(norms), overrides={"measure.noise_scale": True}):
        story = Story(training=Training(values=rising(4)), record=noise(norms[plan.series.repeat]))
        write_run(folder, plan, step(100), story)
    group = one_group(folder)
    (point,) = group.all_of(NoisePoint)
    return point, group


def test_noise_scale_stands_beside_the_batch_with_advice(tmp_path: Path) -> None:
    point, group = noise_point(tmp_path, (0.9, 1.1, 1.0, 0.8, 1.2))
    assert point.share.value == pytest.approx(8 / 32)
    assert point.noise_scale.value == pytest.approx(32)
    assert re.search(r"is 0\.25 \[0\.\d+, 0\.\d+\] of the noise scale: larger batches still pay", point.advice)
    assert re.search(r"3\d to 4\d % fewer steps, 1\d to 2\d % more samples", point.advice)
    assert "reading every gradient" in " ".join(doubt.text for doubt in group.doubts)


def test_too_few_runs_give_no_advice_on_the_batch(tmp_path: Path) -> None:
    point, _ = noise_point(tmp_path, (1.0, 1.0))
    assert "repeat with --repeats 5 to see whether larger batches pay" in point.advice
    assert "fewer steps" not in point.advice


def test_advice_follows_mccandlish() -> None:
    wanted = {0.1: "pays", 0.5: "undecided", 1.0: "balanced", 2.0: "undecided", 5.0: "wasteful"}
    shares = [mean_estimate([share * factor for factor in (0.98, 1, 1, 1, 1.02)]) for share in wanted]
    assert [advice(share) for share in (None, *shares)] == ["unknown", *wanted.values()]
    for share in (0.01, 1.0, 100.0):
        steps, samples = doubled_batch(share)
        # Twice the batch: half as many steps make as many samples.
        assert samples == pytest.approx(2 * steps)
    assert doubled_batch(1.0) == pytest.approx((0.75, 1.5))


# Formats


BATCHES = {"train.batch_per_rank": (4, 8, 16), "train.optimizer.learning_rate": (0.1, 0.8)}
EVALUATIONS = {(4, 0.1): 4, (8, 0.1): 5, (8, 0.8): 6, (16, 0.1): 8, (16, 0.8): 6}
"""Until the target, 80 samples apart, half an epoch; the greatest rate diverges at the smallest batch."""


def write(out: Path, ends: dict[tuple[int, float], int] = EVALUATIONS, **request: Any) -> None:
    for plan in quality_plans(**{"points": (1,), "sweep": BATCHES, **request}):
        train = plan.workload.train
        count = ends.get((plan.global_batch, train.optimizer.learning_rate))
        values = (0.1, None) if count is None else (*[0.1] * (count - 1), 0.9)
        drift = 1 + 0.01 * plan.series.repeat
        story = Story(training=Training(values=values), state="invalid" if count is None else "valid")
        story.of_rank = lambda rank, count=count: {"losses_finite": count is not None}
        write_run(out, plan, constant([0, 0, 0, 20 * train.batch_per_rank * drift, 0, 0]), story)


def found_in(out: Path) -> LargeBatch:
    (found,) = large_batches(tabulate(scan(out)))
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("batches")
    write(out)
    return out


def test_epochs_and_time_stand_over_the_batch_across_groups(swept: Path) -> None:
    points = found_in(swept).points
    assert [(one.global_batch, one.learning_rate) for one in points] == [(b, r) for b in (4, 8, 16) for r in (0.1, 0.8)]
    assert [one.epochs and round(one.epochs.value, 6) for one in points] == [2, None, 2.5, 3, 4, 3]
    # Of several rates the one that needed fewest epochs stands for its batch.
    assert [one.is_best for one in points] == [True, False, True, False, False, True]
    assert [one.ratio and round(one.ratio.value, 6) for one in points] == [None, None, 1.25, 1.5, 2, 1.5]
    by_hand = 1.0
    for repeat in range(5):
        by_hand *= (5 * (80 * 0.02 * (1 + 0.01 * repeat) + 0.5)) ** 0.2
    assert points[2].time is not None
    assert points[2].time.value == pytest.approx(by_hand)
    assert points[2].ratio is not None
    assert points[2].ratio.n == 5
    assert "of several rates the best by these same runs: the interval is not corrected, certainty is" in batch_verdict(
        found_in(swept)
    )
    assert "for certain" not in batch_verdict(found_in(swept))


def test_the_critical_batch_of_the_noise_scale_stands_beside(tmp_path: Path) -> None:
    """With B_n = 8 samples: E(16) / E(4) = (1 + 2) / (1 + 1/2) = 2."""
    write(tmp_path)
    noise = {"gradient_norm2": 1.0, "covariance_trace": 8.0, "small_batch": 4, "large_batch": 8, "steps": 10}
    for plan in quality_plans(points=(2,), overrides={"measure.noise_scale": True}, series="noise"):
        record = {"noise_scale": {**noise, "noise_scale": 8.0}}
        write_run(tmp_path, plan, constant([0, 0, 0, 10, 0, 0]), Story(training=Training(values=(0.9,)), record=record))
    found = found_in(tmp_path)
    assert found.critical is not None
    assert found.critical.value == pytest.approx(8)
    assert found.points[-1].expected is not None
    assert found.points[-1].expected.value == pytest.approx(2)
    assert "critical batch by the gradient noise scale: 8" in batch_verdict(found)


def test_ranks_that_share_a_batch_and_ranks_that_enlarge_it_are_one_set(tmp_path: Path) -> None:
    """Weak scaling from 4 to 8, and 8 on one rank in another series."""

    def ends(plan: RunPlan) -> int:
        return 4 if plan.global_batch == 4 else 6

    for request in ({"points": (1, 2)}, {"points": (1,), "sweep": {"train.batch_per_rank": (8,)}, "series": "s2"}):
        for plan in quality_plans(repeats=3, **request):
            story = Story(training=Training(values=(*[0.1] * (ends(plan) - 1), 0.9)))
            write_run(tmp_path, plan, constant([0, 0, 0, 50, 0, 0]), story)
    points = found_in(tmp_path).points
    assert [(one.global_batch, one.ranks) for one in points] == [(4, 1), (8, 1), (8, 2)]
    assert [one.ratio and one.ratio.value for one in points] == [None, pytest.approx(1.5), pytest.approx(1.5)]
