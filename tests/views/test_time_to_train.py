"""How many GPUs: figures by hand, the chosen rank count by brute force, how sure it is, and the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.cli import cli
from dlbench.errors import UserError
from dlbench.records.scan import scan
from dlbench.report.formats.markdown import to_markdown
from dlbench.stats.estimates import by_definition, geometric_mean_estimate
from dlbench.views.command_reports import estimate
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.time_to_train import (
    TimeToTrain,
    TimeToTrainView,
    TrainingAnswer,
    TrainingPoint,
    TrainingQuestion,
    answers,
    held_by,
)
from tests.support.browser import csv_rows
from tests.support.run_factory import (
    QUALITY_WORKLOAD,
    Story,
    Training,
    constant,
    plans,
    quality_plans,
    write_run,
    write_scaling,
)
from tests.views.causes.test_page import drawn_rows

START_S = 3.5
"""What the factory's ranks take from the start of the process to the first step."""


def found_in(folder: Path, asked: TrainingQuestion | None = None) -> TimeToTrain:
    (group,) = estimate(scan(folder), asked or TrainingQuestion())[0].groups
    return group.of(TimeToTrain)


def estimated(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and output of `dlbench estimate`; a UserError is raised."""
    words = ["estimate", *map(str, arguments)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)
    return done.exit_code, done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 ms at one rank, 125 ms at two and four, of 4 images per rank; repeat k is slower by k / 1000."""
    folder = tmp_path_factory.mktemp("runs")
    write_scaling(folder, points=(1, 2, 4))
    return folder


# Figures


def test_times_are_samples_over_throughput_and_the_start_and_hours_are_of_all_ranks(runs: Path) -> None:
    report = assemble(scan(runs))
    (group,) = report.groups
    found = group.of(TimeToTrain)
    assert found.held == "rank"
    # The recipe's 100 steps are of 4 images at one rank; all rank counts train as many.
    assert found.amount == "400 images (train.schedule.total_steps)."
    for point, one in zip(group.points, found.points, strict=True):
        steps = [100 / point.ranks * (0.100 if point.ranks == 1 else 0.125) * (1 + k / 1000) for k in range(5)]
        by_hand = math.prod(step + START_S for step in steps) ** (1 / 5)
        assert one.time.value == pytest.approx(by_hand)
        assert (one.time.n, one.time.kind) == (point.throughput.n, point.throughput.kind)
        assert one.hours.value == pytest.approx(point.ranks * by_hand / 3600)
        assert one.efficiency == point.efficiency
    rows = csv_rows(document_of(report), "time-to-train")
    assert [float(row["time_s"]) for row in rows] == [one.time.value for one in found.points]
    assert {row["hours_of"] for row in rows} == {"rank"}
    text = to_markdown(document_of(report)).replace("\\", "")
    assert "4 ranks: 6.631 seconds [6.625, 6.637] for 0.007368 rank-hours [0.007361, 0.007375]: fastest." in text


def test_time_to_train_is_drawn_over_ranks_next_to_the_ideal(runs: Path, tmp_path: Path) -> None:
    (group,) = assemble(scan(runs)).groups
    found = group.of(TimeToTrain)
    (chart,) = TimeToTrainView().section(group).charts()
    drawn = [row for row in drawn_rows(chart.spec) if "ideal" in row]
    for one in found.points:
        (row,) = {tuple(sorted(row.items())) for row in drawn if row["ranks"] == one.ranks}
        shown = dict(row)
        assert (shown["value"], shown["low"], shown["high"]) == (one.time.value, one.time.low, one.time.high)
        assert shown["ideal"] == pytest.approx(found.points[0].time.value / one.ranks)
        assert f"{one.ranks} rank" in chart.alt
    # Of two rank counts the table says as much.
    write_scaling(tmp_path, points=(1, 2))
    (group,) = assemble(scan(tmp_path)).groups
    section = TimeToTrainView().section(group)
    assert section.charts() == []
    assert not any("Ideal" in title for title in section.sheets[0].to_display().header)


def test_without_a_length_figures_are_of_a_million_samples_and_their_interval_is_the_throughputs(
    tmp_path: Path,
) -> None:
    for plan in plans(points=(1, 2)):
        schedule = plan.workload.train.schedule.model_copy(update={"total_steps": None})
        train = plan.workload.train.model_copy(update={"schedule": schedule})
        workload = plan.workload.model_copy(update={"train": train})
        milliseconds = (100 if plan.layout.ranks == 1 else 125) * (1 + plan.series.repeat / 100)
        plan = plan.model_copy(update={"workload": workload})
        write_run(tmp_path, plan, constant([0, 0, 0, milliseconds, 0, 0]))
    (group,) = assemble(scan(tmp_path)).groups
    found = group.of(TimeToTrain)
    assert [one.samples for one in found.points] == [1e6, 1e6]
    assert found.amount.startswith("Of a million images: no length of a training is known")
    for point, one in zip(group.points, found.points, strict=True):
        thr = point.throughput
        ends = [one.time.value, one.time.low, one.time.high]
        assert ends == pytest.approx([1e6 / thr.value, 1e6 / thr.high, 1e6 / thr.low])
    cost = [one.hours.value for one in found.points]
    # Efficiency is 100 / 125: an hour of a rank does so much less.
    assert cost[1] / cost[0] == pytest.approx(1.25)
    with pytest.raises(UserError, match="--deadline: sample, tiny preset names no length of a training; add --epochs"):
        estimated(tmp_path, "--deadline", "3d")


@pytest.mark.parametrize(
    ("schedule", "quality", "amount"),
    [
        ({}, {}, "10 epochs (train.schedule.total_epochs) of 160 images."),
        (
            {"total_epochs": None, "decay": "constant"},
            {},
            "At most 20 epochs (quality.max_epochs) of 160 images: runs that meet their target take less.",
        ),
        (
            {"total_epochs": None, "decay": "constant"},
            {"max_epochs": None, "max_samples": 999},
            "At most 999 images (quality.max_samples): runs that meet their target take less.",
        ),
        ({"total_epochs": None, "decay": "constant", "epoch_samples": None}, {}, "Of a million images: no length"),
    ],
)
def test_the_length_of_a_training_is_the_recipes_else_the_limits(
    tmp_path: Path, schedule: dict[str, Any], quality: dict[str, Any], amount: str
) -> None:
    (plan,) = plans(workload=str(QUALITY_WORKLOAD), points=(1,), repeats=1)
    workload = plan.workload
    train = workload.train.model_copy(update={"schedule": workload.train.schedule.model_copy(update=schedule)})
    changed = {"train": train, "quality": workload.quality.model_copy(update=quality)}
    plan = plan.model_copy(update={"workload": workload.model_copy(update=changed)})
    write_run(tmp_path, plan, constant([0, 0, 0, 100, 0, 0]))
    found = found_in(tmp_path)
    assert found.amount.startswith(amount)
    samples = {"10": 1600, "At most 20": 3200, "At most 999": 999}
    expected = next((count / 40 + START_S for head, count in samples.items() if amount.startswith(head)), 1e6 / 40)
    assert found.points[0].time.value == pytest.approx(expected)


def test_runs_to_a_target_tell_their_own_time_and_none_where_one_missed_it(tmp_path: Path) -> None:
    for plan in quality_plans(points=(1, 2)):
        missed = plan.layout.ranks == 2 and plan.series.repeat == 3
        training = Training(values=[0.1, 0.2, 0.3 if missed else 0.6])
        write_run(tmp_path, plan, constant([0, 0, 0, 100, 0, 0]), Story(training=training))
    found = found_in(tmp_path, TrainingQuestion(deadline_s=60))
    (one,) = found.points
    assert found.amount == "Trained to a top-1 accuracy of at least 50.0 %, as measured."
    # 3 evaluations of 0.5 s, one behind 20 steps of 0.1 s each.
    assert one.time.value == pytest.approx(3 * (20 * 0.1 + 0.5))
    assert found.notes[0] == "2 ranks: no time, because 4 of 5 runs met the target."
    assert [answer.ranks for answer in found.answers] == [1]
    assert found.answers[0].remarks == (
        "The whole interval of the mean is under 60 seconds, without start-up and queue.",
    )
    asked = found_in(tmp_path, TrainingQuestion(epochs=2))
    # An epoch of 160 images at 80 images a second.
    assert asked.points[1].time.value == pytest.approx(2 * 160 / 80 + START_S)


@pytest.mark.parametrize(
    ("changes", "ranks", "held"),
    [
        # Exclusive jobs hold all four GPUs of a node, used or not.
        ({}, 2, {"GPU": 4, "node": 1, "core": 64, "rank": 2}),
        ({}, 8, {"GPU": 8, "node": 2, "core": 128, "rank": 8}),
        ({"system.slurm.exclusive": False}, 2, {"GPU": 2, "node": 1, "core": 32, "rank": 2}),
        ({"system.slurm.exclusive": False, "system.slurm.gpu_count": "node"}, 2, {"GPU": 4, "rank": 2}),
    ],
)
def test_what_jobs_hold_is_what_is_billed(
    tmp_path: Path, changes: dict[str, Any], ranks: int, held: dict[Any, int]
) -> None:
    asked = {"system": "example-gpu", "engine": "ddp", "launcher": "srun-gloo", "ranks_per_node": min(ranks, 4)}
    (plan,) = plans(points=(ranks,), repeats=1, overrides={**changes, "layout.cores_per_rank": 16}, **asked)
    story = Story(device="cuda:0 (NVIDIA A100)", host=lambda rank: f"n{rank // plan.layout.ranks_per_node}")
    write_run(tmp_path, plan, constant([0, 0, 0, 100, 0, 0]), story)
    (run,) = scan(tmp_path).runs
    assert {what: held_by(run, what) for what in held} == held
    found = found_in(tmp_path, TrainingQuestion(samples=3600 * 40 * ranks, price=2.5, currency="EUR"))
    (point,) = found.points
    assert found.held == "GPU"
    assert point.price.value == pytest.approx(held["GPU"] * 2.5 * (1 + START_S / 3600))
    assert point.place == {2: "2 ranks (4 GPUs held)", 8: "8 GPUs on 2 nodes"}[ranks] if held["GPU"] != 2 else "2 GPUs"


# The chosen rank count


def point_of(ranks: int, seconds: Sequence[float], price: float | None = None) -> TrainingPoint:
    by_run = {("s", repeat): value for repeat, value in enumerate(seconds)}
    time = geometric_mean_estimate(by_run, "s")
    hours = time.scaled(ranks / 3600, "GPU-hours")
    return TrainingPoint(
        ranks=ranks,
        nodes=1,
        held=ranks,
        place=f"{ranks} GPUs",
        global_batch=ranks,
        throughput=time.inverted("images/s"),
        efficiency=by_definition(1.0, len(seconds)),
        is_baseline=ranks == 1,
        samples=1,
        time=time,
        hours=hours,
        price=hours.scaled(price, "EUR") if price else None,
        seconds=by_run,
    )


times = st.lists(st.floats(1e3, 1e6), min_size=1, max_size=7)
several = st.lists(times, min_size=1, max_size=5).map(
    lambda many: tuple(point_of(2**place, values, 2.0) for place, values in enumerate(many))
)
limits = st.floats(5e2, 2e6)


def chosen(answer: TrainingAnswer, points: Sequence[TrainingPoint]) -> TrainingPoint:
    return next(point for point in points if point.ranks == answer.ranks)


def hours_of(point: TrainingPoint) -> float:
    return point.hours.value


def time_of(point: TrainingPoint) -> float:
    return point.time.value


@given(several, limits, st.none() | limits, st.booleans())
def test_the_answer_is_the_cheapest_or_fastest_of_all_that_meet_the_limits(
    points: tuple[TrainingPoint, ...], limit: float, other: float | None, is_deadline: bool
) -> None:
    hours = limit * 4 / 3600
    asked = TrainingQuestion(deadline_s=limit if is_deadline else other, budget=None if is_deadline else hours)
    (answer,) = answers(points, asked, "GPU")

    def meets(point: TrainingPoint) -> bool:
        return time_of(point) <= (asked.deadline_s or math.inf) and hours_of(point) <= (asked.budget or math.inf)

    able = [point for point in points if meets(point)]
    cost = hours_of if asked.deadline_s else time_of
    assert answer.is_met == bool(able)
    if able:
        best = chosen(answer, points)
        assert best in able
        assert cost(best) == min(map(cost, able))
    else:
        assert answer.text.startswith("None of the measured rank counts is ")


def sure(points: Sequence[TrainingPoint], deadline: float) -> TrainingAnswer:
    (found,) = answers(points, TrainingQuestion(deadline_s=deadline), "GPU")
    return found


def test_an_answer_says_how_sure_it_is() -> None:
    quiet = point_of(4, [7000, 7010, 7020, 7030, 7040])
    clear = sure([point_of(1, [20000, 20010, 20020, 20030, 20040]), quiet], 7200)
    assert clear.text.endswith("GPU-hours [7.778, 7.822]: cheapest under 2 hours")
    assert clear.remarks == (
        "The whole interval of the mean is under 2 hours, without evaluations, checkpoints and queue.",
    )
    wide = point_of(2, [6000, 6500, 7000, 7500, 8000])
    unsure = sure([wide, quiet], 7200)
    assert unsure.ranks == 2
    assert unsure.remarks == (
        "Not sure to be under 2 hours: the interval of the mean reaches over it; that of 4 GPUs does not.",
    )
    # By its value it misses the deadline, but it may meet it, and would be cheaper.
    late = sure([point_of(2, [6600, 7000, 7300, 7600, 8000]), quiet], 7200)
    assert late.ranks == 4
    assert late.remarks[1].startswith("2 GPUs may do as well: 2.02 hours [1.85, 2.22] for 4.0 GPU-hours")
    few = sure([point_of(2, [7000, 7010]), quiet], 7200)
    assert few.remarks == (
        "Not sure to be under 2 hours: 2 runs cannot decide that; repeat with --repeats 5.",
        "Chosen by values alone: 2 runs cannot distinguish rank counts; repeat with --repeats 5.",
    )
    missed = sure([wide], 6500)
    assert not missed.is_met
    assert missed.remarks[0].startswith("2 GPUs may do as well: 116 minutes [101, 134]")
    assert missed.remarks[1:] == ("More than 2 GPUs were not tried.",)
    assert sure([quiet], 6500).remarks == ("More than 4 GPUs were not tried.",)


def test_rank_counts_of_overlapping_ratios_are_not_told_apart() -> None:
    """Two GPUs take half the time of one: their hours differ by 0.1 %, which runs that scatter by 2 % do not tell."""
    one = point_of(1, [7000, 7100, 7200, 7300, 7400])
    two = point_of(2, [3650, 3700, 3500, 3550, 3620])
    told = sure([one, two], 9000)
    assert told.ranks == 1
    assert told.remarks[1].startswith("2 GPUs cannot be distinguished from 1 GPUs: 1.00")
    assert re.search(r" \[0\.9\d+, 1\.0\d+\] the hours\.$", told.remarks[1])
    # Pairs of one repeat drift together: what is common to both sides cancels.
    drift = [1.0, 1.05, 1.1, 1.15, 1.2]
    apart = sure([point_of(1, [7000 * d for d in drift]), point_of(2, [3600 * d for d in drift])], 9000)
    assert not any("distinguished" in text for text in apart.remarks)


# The command


def test_the_command_prints_table_and_answer_and_ends_with_its_code(runs: Path) -> None:
    code, text = estimated(runs, "--samples", "1000000", "--price", "2.50 EUR", "--deadline", "3h")
    assert code == 0
    assert "4 ranks: 2.175 hours [2.171, 2.180] for 8.702 rank-hours [8.685, 8.719], 21.75\nEUR" in text
    assert "cheapest under 3 hours." in text
    assert "Measured rank counts only: nothing is extrapolated." in text
    assert "synthetic data: storage and decoding are not part of these figures" in text
    assert max(map(len, text.splitlines())) <= 80
    code, text = estimated(runs, "--samples", "1000000", "--deadline", "30min")
    assert code == 1
    assert "None of the measured rank counts is under 30 minutes; the fastest, 4 ranks," in text
    code, text = estimated(runs, "--samples", "1000000", "--budget", "20 EUR", "--price", "2.5 EUR/rank-hour")
    assert (code, "1 rank: 6.959 hours" in text, "fastest within 20 EUR." in text) == (0, True, True)
    code, text = estimated(runs, "--where", "ranks=2", "--samples", "1000000", "--price", "1/core-hour", "--json")
    assert code == 0
    (group,) = json.loads(text)["groups"]
    assert [point["ranks"] for point in group["time_to_train"]["points"]] == [2]
    assert group["time_to_train"]["held"] == "core"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--price", "$2.50"], "Price, $"),
        (["--price", "EUR 2.50", "--budget", "900 eur"], "fastest within 900 EUR."),
        (["--price", "EUR2.50", "--budget", "EUR900"], "fastest within 900 EUR."),
        (["--price", "2.5 per core hour", "--budget", "500 core hours"], "fastest within 500 core-hours."),
        (["--budget", "500 NODEh"], "fastest within 500 node-hours."),
        (["--budget", "9 rank-hrs"], "fastest within 9 rank-hours."),
    ],
)
def test_prices_and_budgets_in_the_forms_that_people_write(runs: Path, arguments: list[str], told: str) -> None:
    code, text = estimated(runs, "--samples", "1e6", *arguments)
    assert code == 0
    assert "1,000,000 images (--samples)." in text
    assert told in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere"], "nowhere: is not a folder of runs; for a workload, --throughput NUMBER is missing"),
        (["RUNS", "--throughput", "5"], "leave it out for runs (RUNS)"),
        (["RUNS", "--ranks", "4"], "--ranks: only for WORKLOAD --throughput"),
        (["resnet50", "--throughput", "5", "--epochs", "1", "--deadline", "3d"], "--deadline: only for RUNS"),
        (["RUNS", "--samples", "5", "--epochs", "3"], "--epochs 3: --samples 5"),
        (["RUNS", "--epoch-samples", "5"], "--epoch-samples 5: has no effect without --epochs"),
        (["RUNS", "--epochs", "5"], "data of sample, tiny preset names no size; add --epoch-samples"),
        (["RUNS", "--price", "cheap"], "--price 'cheap': must be an amount above zero, e.g. '2.50 EUR' or"),
        (
            ["RUNS", "--price", "2.5 EUR/hour"],
            "--price '2.5 EUR/hour': the resource of the hours is missing, e.g. '2.50 EUR' or '9 EUR/node",
        ),
        (["RUNS", "--price", "500 GPU-hours"], "--price '500 GPU-hours': must be the price of an hour, e.g. '2.50 E"),
        (["RUNS", "--budget", "much"], "--budget 'much': must be an amount above zero, e.g. '500 GPU-hours'"),
        (
            ["RUNS", "--budget", "500 hours"],
            "--budget '500 hours': the resource of the hours is missing, e.g. '500 GPU-hours' or, with --price",
        ),
        (["RUNS", "--price", "2.5", "--budget", "10"], "--budget '10': must be hours or money, e.g. '500 GPU-hours'"),
        (
            ["RUNS", "--price", "2 EUR", "--budget", "9 EUR/node-hour"],
            "--budget '9 EUR/node-hour': must be hours or mo",
        ),
        (["RUNS", "--budget", "9 EUR node-hours"], "--budget '9 EUR node-hours': must be hours or money"),
        (["RUNS", "--samples", "1.5"], "--samples '1.5': must be a whole number, e.g. 2500000 or 2.5e6"),
        (["RUNS", "--samples", "1,000"], "--samples '1,000': must be a number above zero"),
        (["RUNS", "--deadline", "3days"], "'3days' is not a duration above zero with its unit (ms, s, m, min, h, d)"),
        (["RUNS", "--budget", "500 EUR"], "--budget 500 EUR: needs --price in EUR; an amount of hours is"),
        (["RUNS", "--budget", "500 EUR", "--price", "2 CHF"], "--budget 500 EUR: --price is in CHF"),
        (
            ["RUNS", "--budget", "5 rank-hours", "--price", "2 CHF/node-hour"],
            "is in rank-hours, but --price is per node-hour",
        ),
        (["RUNS", "--budget", "5 GPU-hours"], "its runs had no GPU"),
        (["RUNS", "--where", "ranks=3"], "--where ranks=3: no run"),
    ],
)
def test_wrong_usage_names_the_option(runs: Path, arguments: list[str], named: str) -> None:
    with pytest.raises(UserError) as error:
        estimated(*[str(runs) if word == "RUNS" else word for word in arguments])
    assert named.replace("RUNS)", f"{runs})") in str(error.value)
    assert "\n" not in str(error.value)


def test_no_figure_is_incomplete_data(tmp_path: Path) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    write_run(tmp_path, plan, constant([0, 0, 0, 100, 0, 0]), Story(state="invalid"))
    assert estimated(tmp_path)[0] == 4
    assert groups(tabulate(scan(tmp_path))) == []
