"""`dlbench compare`, `check` and `baseline`: verdicts and exit codes on runs with known times, and on real ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli as dlbench
from dlbench.errors import DlbenchError, ExitCode, IncompleteDataError, UserError
from dlbench.gate.page import paired_lines
from dlbench.records.scan import scan
from dlbench.specs.plan import RunPlan
from tests.conftest import Cli
from tests.support.run_factory import (
    NOW,
    StepTimes,
    Story,
    Training,
    constant,
    edit_json,
    plans,
    quality_plans,
    write_run,
    write_unfinished,
)

STEADY = (1.000, 1.002, 0.998, 1.001, 0.999, 1.003, 0.997, 1.004, 1.001, 0.996)
PHASES_MS = (5.0, 0.0, 30.0, 45.0, 10.0, 10.0)


def write_side(
    out: Path, factors: Sequence[float], *, days: int = 0, story: Callable[[], Story] = Story, **request: Any
) -> Path:
    """Runs of 100 ms per step times a factor each, one factor for each repeat.

    Each repeat is a command of its own, the night after the one before.
    """
    asked = {"points": (1,), "repeats": len(factors), "series": out.name, **request}
    for planned in plans(**asked):
        plan = in_own_session(planned, days)
        told = story()
        told.finished = NOW + timedelta(days=days + plan.series.repeat, minutes=plan.series.position)
        write_run(out, plan, slowed(factors[plan.series.repeat]), told)
    return out


def planned_at(plan: RunPlan, moment: datetime) -> RunPlan:
    return plan.model_copy(update={"created": moment.strftime("%Y-%m-%dT%H:%M:%SZ")})


def in_own_session(plan: RunPlan, days: int = 0) -> RunPlan:
    """As if each repeat had been planned by a command of its own."""
    return planned_at(plan, NOW + timedelta(days=days + plan.series.repeat))


def slowed(factor: float) -> StepTimes:
    return constant([part * factor for part in PHASES_MS])


def slower(by: float, count: int = 5) -> list[float]:
    return [x * by for x in STEADY[-count:]]


def call(*arguments: str | Path) -> Result:
    """A command as the group runs it, with all evidence; its one-line errors are in `exception`."""
    words = [str(word) for word in arguments]
    if words[0] in ("compare", "check"):
        words.insert(1, "--full")
    return CliRunner().invoke(dlbench, words)


def test_the_verdict_comes_first_on_one_screen(tmp_path: Path) -> None:
    """Then what changed most, a line for each comparison with its interval, and what to do next."""
    a, b = (write_side(tmp_path / name, STEADY[:2], points=(1, 2, 4, 8)) for name in ("a", "b"))
    text = CliRunner().invoke(dlbench, ["compare", str(a), str(b)]).stdout
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[3] == "Verdict: insufficient"
    assert len([line for line in lines if line.startswith("insufficient  1.0000x (")]) == 8
    assert "Next: 2 and 2 of the 5 runs per side that a verdict needs: repeat" in " ".join(text.split())
    assert lines[-1] == "All evidence: the same command with --full."


def refused(*arguments: str | Path) -> DlbenchError:
    result = call(*arguments)
    assert isinstance(result.exception, DlbenchError), (result.output, result.exception)
    assert len(str(result.exception).splitlines()) == 1
    return result.exception


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write_side(tmp_path / "old", STEADY[:5])


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factors", "verdict", "code"),
    [
        (slower(1.05), "regressed", 1),
        (slower(1 / 1.05), "improved", 0),
        (slower(1.0), "equivalent", 0),
        ([0.9, 1.1, 0.95, 1.08, 1.01], "inconclusive", 6),
        (slower(1.05, 4), "insufficient", 6),
    ],
)
@pytest.mark.parametrize("command", ["compare", "check"])
def test_each_verdict_has_its_exit_code(
    tmp_path: Path, old: Path, command: str, factors: list[float], verdict: str, code: int
) -> None:
    new = write_side(tmp_path / "new", factors)
    sides = [old, new] if command == "compare" else ["--baseline", old, "--candidate", new]
    result = call(command, *sides)
    assert result.exit_code == code, result.output
    assert f"Verdict: {verdict}" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_all_formats_hold_the_same_numbers(tmp_path: Path, old: Path) -> None:
    new = write_side(tmp_path / "new", slower(1.05))
    files = [tmp_path / f"out.{suffix}" for suffix in ("txt", "json", "md", "xml")]
    for file in files:
        assert call("compare", old, new, "-o", file).exit_code == 1
    text, content, markdown, junit = (file.read_text(encoding="utf-8") for file in files)
    found = json.loads(content)
    assert (found["format"], found["version"], found["verdict"]) == ("dlbench.comparison", 1, "regressed")
    (point,) = found["points"]
    metric = point["metrics"][0]
    assert (metric["name"], metric["gated"], metric["verdict"]) == ("step_median_s", True, "regressed")
    assert metric["ratio"]["value"] == pytest.approx(1.05, rel=0.005)
    assert metric["a"]["n"] == metric["b"]["n"] == 5
    assert metric["values_a"] == pytest.approx([0.1 * x for x in STEADY[:5]])
    # Two metrics are asked, and both fail: Holm leaves half of 1 % to the one, and all of it to the other.
    levels = [one["tested"]["level_worse"] for one in point["metrics"] if one["gated"]]
    assert sorted(levels) == [0.005, 0.01]
    assert metric["tested"]["p_worse"] <= metric["tested"]["level_worse"]
    assert metric["tested"]["method"] == "Welch's t test of 5 and 5 sessions"
    assert metric["tested"]["method"] in " ".join(text.split())
    # Exit 1 is an interval beyond the tolerance; B / A is that of the columns.
    assert metric["ratio"]["low"] > 1.02
    assert metric["ratio"]["level"] == pytest.approx(1 - levels[0] - 0.005)
    assert metric["b"]["value"] / metric["a"]["value"] == pytest.approx(metric["ratio"]["value"])
    assert [one["verdict"] for one in point["metrics"]] == ["regressed", "regressed", "information"]
    shown = f"{metric['ratio']['value']:.3f}x"
    assert shown in text
    assert shown in markdown
    assert shown in junit
    # Equal runs, equal bytes.
    call("compare", old, new, "-o", tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == content


def test_outputs_for_ci_in_one_call(tmp_path: Path, old: Path) -> None:
    new = write_side(tmp_path / "new", slower(1.05))
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    result = call(
        *("check", "--baseline", old, "--candidate", new, "--junit", tmp_path / "j.xml", "--summary", summary)
    )
    assert result.exit_code == 1
    assert summary.read_text(encoding="utf-8").startswith("before\n# dlbench comparison of B against A: regressed")
    assert "Verdict: regressed" in result.output
    assert "<failure" in (tmp_path / "j.xml").read_text(encoding="utf-8")
    assert call("compare", old, new, "--exit-zero").exit_code == 0


def test_the_tolerance_is_the_persons(tmp_path: Path, old: Path) -> None:
    new = write_side(tmp_path / "new", slower(1.05))
    assert call("check", "--baseline", old, "--candidate", new, "--tolerance", "10%").exit_code == 0
    assert call("check", "--baseline", old, "--candidate", new, "--tolerance", "0.04").exit_code == 1
    assert call("check", "--baseline", old, "--candidate", new, "--tolerance", "4.9%").exit_code == 6


def test_more_points_and_metrics_are_one_family(tmp_path: Path) -> None:
    old = write_side(tmp_path / "old", STEADY, points=(1, 2))
    new = write_side(tmp_path / "new", [x * 1.05 for x in STEADY], points=(1, 2))
    result = call("compare", old, new, "--metric", "all", "--format", "json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    # Energy and time to quality are told by no run and are no comparisons.
    assert found["num_compared"] == 6
    assert [point["ranks"] for point in found["points"]] == [1, 2]
    for point in found["points"]:
        assert [metric["name"] for metric in point["metrics"]] == ["step_median_s", "step_mean_s", "step_p95_s"]
        for metric in point["metrics"]:
            assert metric["tested"]["level_better"] == pytest.approx(0.01 / 6)


@pytest.mark.parametrize(
    ("a", "b", "ratio", "verdict"),
    [
        (None, 2, 0.8, "inconclusive"),
        (None, 2, 1.0, "inconclusive"),
        (None, 2, 1.25, "regressed"),
        (2, None, 1.25, "inconclusive"),
        (2, None, 0.8, "improved"),
        (2, 4, 1.25, "inconclusive"),
        (2, 2, 1.25, "regressed"),
        (2, 2, 0.8, "improved"),
    ],
)
def test_ranks_that_train_apart_are_never_better(
    tmp_path: Path, a: int | None, b: int | None, ratio: float, verdict: str
) -> None:
    """A step of local SGD is not one of replicas: no verdict in its favour, and both losses beside the ratio."""
    for name, every, factor in (("a", a, 1.0), ("b", b, ratio)):
        story = partial(Story, last_loss=1.95 if every else 1.9)
        averaging = {"sync.average_every": every} if every else {}
        write_side(tmp_path / name, slower(factor), points=(2,), engine="ddp", overrides=averaging, story=story)
    allowed = ("--allow", "exchange") if a != b else ()
    output = CliRunner().invoke(dlbench, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), *allowed]).output
    text = " ".join(output.split())
    assert f"Verdict: {verdict}" in text
    word = "slower per step" if ratio >= 1 else "faster per step"
    if a == b:
        assert "quality" not in text
        return
    losses = f"{1.95 if b else 1.9:.5g} against {1.95 if a else 1.9:.5g} with A"
    assert f"% {word}, " in text
    assert text.count(f"quality not compared: loss after equal samples {losses}") == 2  # Headline and remark.
    assert ("Next: its steps do not train the same: train both to a target" in text) == (verdict[:2] == "in")


@pytest.mark.parametrize(("evaluations", "verdict"), [(2, "improved"), (4, "inconclusive")])
def test_ranks_that_train_apart_are_better_where_they_are_sooner_at_the_target(
    tmp_path: Path, evaluations: int, verdict: str
) -> None:
    averaging = {"sync.average_every": 2}
    for name, overrides, count, factor in (("a", {}, 2, 1.0), ("b", averaging, evaluations, 0.8)):
        for plan in quality_plans(points=(2,), series=name, engine="ddp", overrides=overrides):
            told = Story(training=Training(values=[0.1] * (count - 1) + [0.9], eval_s=0.01))
            told.finished = NOW + timedelta(days=plan.series.repeat)
            write_run(tmp_path / name, in_own_session(plan), slowed(factor * STEADY[plan.series.repeat]), told)
    result = call("compare", tmp_path / "a", tmp_path / "b", "--allow", "exchange", "--format", "json")
    assert json.loads(result.output)["verdict"] == verdict, result.output


def test_time_to_quality_decides_where_it_is_asked_for(tmp_path: Path) -> None:
    for name, evaluations in (("old", 2), ("new", 4)):
        for plan in quality_plans(points=(1,), series=name):
            values = [0.1] * (evaluations - 1) + [0.9] * (6 - evaluations)
            story = Story(training=Training(values=values), finished=NOW + timedelta(days=plan.series.repeat))
            write_run(tmp_path / name, in_own_session(plan), constant(PHASES_MS), story)
    result = call("compare", tmp_path / "old", tmp_path / "new", "--metric", "time_to_quality_s", "--format", "json")
    assert result.exit_code == 1, result.output
    metric = next(one for one in json.loads(result.output)["points"][0]["metrics"] if one["gated"])
    assert metric["ratio"]["value"] == pytest.approx(2.0)


# --- what is compared -------------------------------------------------------------------------------------------------


def test_incomparable_runs_are_refused_with_the_differing_keys(tmp_path: Path, old: Path) -> None:
    new = write_side(tmp_path / "new", slower(1.0), overrides={"train.precision": "bf16", "train.seed": 3})
    error = refused("check", "--baseline", old, "--candidate", new)
    assert isinstance(error, UserError)
    assert error.exit_code == ExitCode.USAGE
    for words in ("Precision: fp32 against bf16", "train.seed: 0 against 3", "--allow precision,train.seed"):
        assert words in str(error)
    assert "train.precision" not in str(error)
    result = call("check", "--baseline", old, "--candidate", new, "--allow", "precision,train.seed")
    assert result.exit_code == 0
    assert "Allowed differences: Precision: fp32 against bf16; train.seed: 0 against 3" in result.output


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"overrides": {"fault.step_delay_s": 0.5}}, "Planted fault: none against step_delay_s=0.5"),
        ({"overrides": {"watch.sampler": False}}, "Monitoring: default against"),
        ({"engine": "single"}, "Engine: horovod against single"),
        ({"overrides": {"train.batch_per_rank": 8}}, "Batch per rank: 4 against 8"),
    ],
)
def test_profiled_faulty_and_other_runs_are_refused(
    tmp_path: Path, old: Path, request_: dict[str, Any], words: str
) -> None:
    new = write_side(tmp_path / "new", slower(1.0), **request_)
    assert words in str(refused("compare", old, new))


def test_what_may_differ_between_the_sides_must_not_differ_within_one(tmp_path: Path, old: Path) -> None:
    write_side(old, slower(1.0), series="faulty", overrides={"fault.step_delay_s": 0.05})
    new = write_side(tmp_path / "new", slower(1.0))
    error = refused("compare", old, new, "--allow", "fault")
    assert "differ only in allowed keys (Planted fault: step_delay_s=0.05 against none)" in str(error)
    assert call("compare", old, new, "--allow", "fault", "--where-a", "series=faulty").exit_code == 0


def test_other_sizes_are_refused_or_named(tmp_path: Path, old: Path) -> None:
    two = write_side(tmp_path / "two", slower(1.0), points=(2,))
    assert "Ranks: 1 against 2" in str(refused("compare", old, two))
    both = write_side(tmp_path / "both", slower(1.0), points=(1, 2))
    result = call("compare", old, both)
    assert result.exit_code == 0
    name = "sample, tiny preset, Horovod, fp32, batch 4 per rank, weak scaling, 2 ranks"
    assert f"Only in B, not compared: {name}" in " ".join(result.output.split())
    # What the baseline has and the candidate lacks must not pass.
    result = call("check", "--baseline", both, "--candidate", old)
    assert result.exit_code == 6
    assert "B has no run with figures at this point" in " ".join(result.output.split())


def test_sides_of_one_folder_by_their_properties(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    write_side(out, STEADY[:5], series="first", tags={"commit": "aaa"})
    write_side(out, slower(1.05), series="second", tags={"commit": "bbb"})
    for key, one, two in (("series", "first", "second"), ("tag.commit", "aaa", "bbb")):
        result = call("compare", out, out, "--where-a", f"{key}={one}", "--where-b", f"{key}={two}")
        assert result.exit_code == 1
        assert "commit aaa" in result.output
    assert "are the same 5 runs" in str(refused("compare", out, out, "--where", "ranks=1", "--where", "series=first"))
    assert "existing values: first, second; did you mean first?" in str(
        refused("compare", out, out, "--where-a", "series=firs")
    )
    assert "no such property" in str(refused("compare", out, out, "--where-b", "serie=first"))
    assert "KEY=VALUE" in str(refused("compare", out, out, "--where", "first"))


def test_runs_compared_with_themselves_are_refused_and_a_part_is_told(tmp_path: Path, old: Path) -> None:
    """A gate that compares a folder with itself would pass for ever."""
    error = refused("check", "--baseline", old, "--candidate", old)
    assert (error.exit_code, "are the same 5 runs: nothing to compare" in str(error)) == (2, True)
    assert "each side with --where-baseline and --where-candidate" in str(error)
    assert "each side with --where-a and --where-b" in str(refused("compare", old, old))
    more = write_side(tmp_path / "more", STEADY[:5], series="more")
    for run in old.iterdir():
        shutil.copytree(run, more / run.name)
    assert "5 runs on both sides: a run is compared with itself" in call("compare", old, more).output


def resumed_after(interruption: int) -> Story:
    """Attempt 2 at a run, which went on from a checkpoint."""
    return Story(record={"attempt": 2, "first_step": interruption, "resumed_from": "/runs/x/checkpoints/step-00000007"})


def test_runs_that_went_on_after_an_interruption_are_never_compared(tmp_path: Path, old: Path) -> None:
    new = write_side(tmp_path / "new", STEADY[:5], series="new")
    (late,) = plans(points=(1,), repeats=1, series="late")
    write_run(new, in_own_session(late, 1), slowed(3), resumed_after(7))
    result = call("compare", old, new)
    assert result.exit_code == 0, result.output
    assert f"{late.run_id}: resumed after an interruption" in " ".join(result.output.split())
    assert late.run_id in call("baseline", new, "-o", tmp_path / "baseline.json").output
    assert late.run_id not in (tmp_path / "baseline.json").read_text()
    alone = tmp_path / "alone"
    write_run(alone, late, constant(PHASES_MS), resumed_after(7))
    error = refused("compare", old, alone)
    assert (error.exit_code, "resumed after an interruption" in str(error)) == (ExitCode.INCOMPLETE, True)


def test_times_and_environments_on_both_sides_are_told(tmp_path: Path, old: Path) -> None:
    story = partial(Story, environment={"host": "n7", "python": "3.11.7", "os": "Debian 13"})
    new = write_side(tmp_path / "new", slower(1.05), days=12, story=story)
    words = " ".join(call("compare", old, new).output.split())
    assert "The sides were run 8 days apart: drift of the machine in between counts as a difference" in words
    assert "Environments of A and B differ: os: Debian 12 against Debian 13." in words


# --- sessions ---------------------------------------------------------------------------------------------------------


def nights(out: Path, levels: Sequence[float], *, days: int = 0) -> Path:
    """A command of five repeats every night."""
    for night, level in enumerate(levels):
        for planned in plans(points=(1,), repeats=5, series=f"{out.name}{night}"):
            moment = NOW + timedelta(days=days + night)
            times = slowed(level * STEADY[planned.series.repeat])
            write_run(out, planned_at(planned, moment), times, Story(finished=moment))
    return out


NIGHTS = (1.0, 1.03, 0.98, 1.01, 0.99)


def judged(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    result = call(*arguments, "--format", "json")
    assert not isinstance(result.exception, DlbenchError), result.exception
    return result.exit_code, json.loads(result.output)["points"][0]["metrics"][0]


def test_one_session_a_side_is_inconclusive_and_says_what_helps(tmp_path: Path) -> None:
    old, new = (nights(tmp_path / name, [level]) for name, level in (("old", 1.0), ("new", 1.2)))
    result = call("check", "--baseline", old, "--candidate", new)
    assert result.exit_code == 6
    words = " ".join(result.output.split())
    told_of_it = ("5 of A in 1 session", "% worse, 1.20", "], within one session; tolerance")
    for told in ("one session per side: drift between sessions counts", "(--ab)", *told_of_it):
        assert told in words
    # Few sessions are no help either.
    code, metric = judged("check", "--baseline", nights(tmp_path / "few", NIGHTS[:4]), "--candidate", new)
    assert (code, metric["reason"][:16]) == (6, "4 and 1 sessions")


def test_a_baseline_of_five_nights_finds_a_slowdown_and_not_a_night(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    made = call("baseline", nights(tmp_path / "old", NIGHTS), "-o", file)
    assert "1 rank: 25 runs in 5 sessions" in made.output
    assert "fewer than 5 sessions" not in made.output
    for level, code in ((1.03, 6), (1.25, 1), (0.8, 0)):
        new = nights(tmp_path / f"new{level}", [level], days=6)
        found = judged("check", "--baseline", file, "--candidate", new)
        assert found[0] == code, found
        assert "Student's t test on sessions (4 degrees of freedom" in found[1]["tested"]["method"]
        assert found == judged("check", "--baseline", tmp_path / "old", "--candidate", new)
    # The mirror image: earlier runs of one night against five later ones.
    assert judged("compare", new, file)[1]["verdict"] == "regressed"


def test_a_baseline_of_one_session_says_so_and_a_history_helps(tmp_path: Path) -> None:
    old, new = nights(tmp_path / "old", [1.0]), nights(tmp_path / "new", [1.3], days=6)
    file = tmp_path / "baseline.json"
    assert "fewer than 5 sessions do not show" in call("baseline", old, "-o", file).output
    earlier = nights(tmp_path / "earlier", NIGHTS, days=1)
    store = tmp_path / "history"
    assert call("history", "import", earlier, "--store", store).exit_code == 0
    gate = ("check", "--baseline", file, "--candidate", new)
    assert judged(*gate)[0] == 6
    codes = [judged(*gate, "--history", history) for history in (store, earlier)]
    assert codes[0] == codes[1]
    assert codes[0][0] == 1
    assert "scatter also of 5 sessions of the history" in " ".join(call(*gate, "--history", store).output.split())
    # The history as the baseline itself.
    assert judged("check", "--baseline", store, "--candidate", new)[0] == 1
    assert call("baseline", store, "-o", file).exit_code == 0
    assert judged(*gate)[0] == 1
    assert "no such folder" in str(refused(*gate, "--history", tmp_path / "nowhere"))
    other = write_side(tmp_path / "other", STEADY[:5], points=(2,))
    assert "contains no run of these workloads and sizes" in str(refused(*gate, "--history", other))


def test_both_sides_in_one_job_have_runs_as_the_unit(tmp_path: Path) -> None:
    """Its state falls on both."""
    for number, name in enumerate(("old", "new")):
        for planned in plans(points=(1,), repeats=5, series="s"):
            times = slowed(STEADY[planned.series.repeat] * (1 + 0.1 * number))
            story = Story(environment={"host": "n0", "variable.SLURM_JOB_ID": "7"})
            write_run(tmp_path / name, planned_at(planned, NOW + timedelta(days=number)), times, story)
    code, metric = judged("compare", tmp_path / "old", tmp_path / "new")
    assert (code, metric["tested"]["unit"]) == (1, "run")


# --- stalls -----------------------------------------------------------------------------------------------------------


def test_steps_that_stall_are_found_though_the_median_step_is_as_it_was(tmp_path: Path, old: Path) -> None:
    """One step in ten takes five times as long: the throughput falls by 29 %."""
    for planned in plans(points=(1,), repeats=5, series="new", overrides={"measure.measured_steps": 20}):
        times, late = (slowed(STEADY[planned.series.repeat] * factor) for factor in (1, 5))
        write_run(
            tmp_path / "new",
            in_own_session(planned),
            lambda rank, step, late=late, times=times: (late if step % 10 == 9 else times)(rank, step),
        )
    steady = write_side(tmp_path / "steady", STEADY[:5], overrides={"measure.measured_steps": 20})
    gate = ("check", "--baseline", steady, "--candidate", tmp_path / "new")
    assert judged(*gate, "--metric", "all")[1]["verdict"] == "equivalent"  # the mean step has failed by itself
    assert call(*gate).exit_code == 1
    # By the median alone it does not fail, and is not called equivalent either.
    code, metric = judged(*gate, "--metric", "step_median_s")
    assert (code, metric["verdict"]) == (6, "inconclusive")
    assert metric["ratio"]["value"] == pytest.approx(1.0, abs=0.01)
    assert "B / A of the mean step is 1.4" in metric["reason"]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def checked(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    result = call("check", "--format", "json", *arguments)
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


# --- floors -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs of one command at 1 and 2 ranks: 40 and 80 images/s, with a scatter of 0.16 %."""
    out = tmp_path_factory.mktemp("floors") / "runs"
    for plan in plans(points=(1, 2), repeats=5):
        write_run(out, plan, slowed(STEADY[plan.series.repeat]))
    return out


@pytest.mark.parametrize(
    ("floors", "verdicts", "code"),
    [
        (["39 images/s"], ["met", "met"], 0),
        (["41 images/s"], ["missed", "met"], 1),
        (["40 images/s/rank"], ["inconclusive", "inconclusive"], 6),
        (["ranks=2,workload=sample: 79images/s"], ["met"], 0),
        # Where several are for a point, the highest counts.
        (["39 images/s", "ranks=2: 90.5 images/s"], ["met", "missed"], 1),
    ],
)
def test_a_floor_is_decided_on_the_first_night(
    one_night: Path, floors: list[str], verdicts: list[str], code: int
) -> None:
    asked = [word for floor in floors for word in ("--at-least", floor)]
    done, found = checked("--candidate", one_night, *asked)
    assert done == code
    metrics = [metric for point in found["points"] for metric in point["metrics"]]
    assert [metric["verdict"] for metric in metrics] == verdicts
    for metric in metrics:
        a, b = metric["a"], metric["b"]
        assert a["unit"] == b["unit"] == "images/s"
        # The interval that is shown is the one that decides.
        placed = "missed" if b["high"] < a["value"] else "met" if b["low"] > a["value"] else "inconclusive"
        assert placed == metric["verdict"]
        assert metric["ratio"]["value"] == pytest.approx(b["value"] / a["value"])
        assert metric["tested"]["equivalence"][0] < metric["ratio"]["value"] < metric["tested"]["equivalence"][1]


def test_a_floor_is_in_every_format(one_night: Path, tmp_path: Path) -> None:
    asked = ["check", "--candidate", one_night, "--at-least", "41 images/s"]
    files = [tmp_path / name for name in ("a.xml", "a.html", "a.md")]
    for file in files:
        assert call(*asked, "-o", file).exit_code == 1
        text = file.read_text(encoding="utf-8")
        assert "missed" in text
        assert "40.00" in text
        assert "41.00 images/s" in text
        assert "comparison of B" not in text
        assert "B / A" not in text
    xml = files[0].read_text(encoding="utf-8")
    assert 'tests="2" failures="1" errors="0"' in xml
    brief = CliRunner().invoke(dlbench, [str(word) for word in asked]).stdout
    assert "40.00 [39." in brief
    assert "Throughput / floor 0.9756x [" in xml
    assert max(map(len, brief.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "sides", "wanted"),
    [
        ("check", ("--baseline", "--candidate"), "--where-candidate series=night1"),
        ("compare", ("", ""), "--where-b series=night1"),
    ],
)
def test_a_property_that_a_baseline_file_lacks_is_asked_of_the_runs(
    tmp_path: Path, old: Path, command: str, sides: tuple[str, str], wanted: str
) -> None:
    new = write_side(tmp_path / "new", slower(1.0), series="night1")
    file = tmp_path / "baseline.json"
    assert call("baseline", old, "-o", file).exit_code == 0
    given = [word for pair in zip(sides, (file, new), strict=True) for word in pair if word]
    error = refused(command, *given, "--where", "series=night1")
    assert str(error).endswith(
        f"a baseline file, whose points have no series; choose the runs of the other side: {wanted}"
    )
    asked, _, value = wanted.partition(" ")
    assert call(command, *given, asked, value).exit_code != 2


def test_a_floor_stands_beside_a_baseline_in_one_family(tmp_path: Path, old: Path) -> None:
    new = write_side(tmp_path / "new", slower(1.0), points=(1, 2))
    asked = ["--baseline", old, "--candidate", new]
    code, found = checked(*asked, "--at-least", "41 images/s")
    assert (code, found["verdict"], found["num_compared"]) == (1, "missed", 4)
    # A point that the baseline lacks is held to its floor all the same.
    assert [[metric["verdict"] for metric in point["metrics"] if metric["gated"]] for point in found["points"]] == [
        ["equivalent", "equivalent", "missed"],
        ["met"],
    ]
    assert found["points_only_in_b"] == []
    code, found = checked(*asked, "--at-least", "39 images/s")
    assert (code, found["verdict"]) == (0, "equivalent")
    assert found["headline"].startswith("2 of 2 comparisons equivalent; ")
    assert found["headline"].endswith(" 1 rank, 2 ranks: met.")


def test_a_floor_is_of_side_b_of_pairs(tmp_path: Path) -> None:
    out = write_pairs(tmp_path / "pairs", 1.0, drift=0.0)
    code, found = checked("--paired", out, "--at-least", "41 images/s")
    assert (code, found["verdict"], found["paired"]) == (1, "missed", True)
    assert [metric["verdict"] for metric in found["points"][0]["metrics"] if metric["gated"]][-1] == "missed"
    # What both sides took: eight runs each, of a minute.
    assert found["points"][0]["wall_s"] == 16 * 60


def test_a_floor_needs_five_runs_and_one_session_or_five(tmp_path: Path) -> None:
    few = write_side(tmp_path / "few", STEADY[:3])
    code, found = checked("--candidate", few, "--at-least", "41 images/s")
    assert (code, found["verdict"]) == (6, "insufficient")
    three = nights(tmp_path / "three", [1.0, 1.0, 1.0])
    code, found = checked("--candidate", three, "--at-least", "41 images/s")
    assert (code, found["verdict"]) == (6, "inconclusive")
    assert "3 sessions" in found["points"][0]["metrics"][0]["reason"]
    five = nights(tmp_path / "five", [1.0, 1.001, 0.999, 1.002, 0.998])
    code, found = checked("--candidate", five, "--at-least", "41 images/s")
    assert (code, found["verdict"]) == (1, "missed")
    assert found["points"][0]["metrics"][0]["tested"]["unit"] == "session"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--at-least", "41"], "is not a throughput; write it as '2500 images/s'"),
        (["--at-least", "0 images/s"], "is not a throughput"),
        (["--at-least", "ranks: 41 images/s"], "is not a throughput"),
        # None of these is answered with the number that was read of it: 2 images/s would pass for ever.
        (["--at-least", "2,500 images/s"], "is not a throughput; write it as '2500 images/s' (no ','"),
        (["--at-least", "2 500 images/s"], "is not a throughput"),
        (["--at-least", "1e3 images/s"], "is not a throughput"),
        (["--at-least", "2.5k images/s"], "is not a throughput"),
        (["--at-least", "2 k images/s"], "sample counts images, not k images: write NUMBER images/s"),
        (["--at-least", "41 volumes/s/rank"], "sample counts images, not volumes: write NUMBER images/s/rank"),
        (["--at-least", "ranks=3: 41 images/s"], "--at-least ranks=3: no point of"),
        (["--at-least", "rank=2: 41 images/s"], "--at-least rank: points have no such property; did you mean ranks"),
        (["--at-least", "41 images/s", "--tolerance", "1%"], "--tolerance: has no effect without --baseline"),
        (["--at-least", "41 images/s", "--where-baseline", "ranks=1"], "--where-baseline: has no effect"),
        ([], "give --baseline and --candidate, --candidate and --at-least, or --paired"),
    ],
)
def test_a_floor_that_makes_no_sense_is_one_line_and_2(one_night: Path, arguments: list[str], words: str) -> None:
    error = refused("check", "--candidate", one_night, *arguments)
    assert isinstance(error, UserError)
    assert words in str(error)


def test_first_nights_are_skipped_cases_and_real_faults_are_not(tmp_path: Path, old: Path) -> None:
    """A reference of one night, or of too few runs, is nothing to mend; a candidate of too few runs is."""
    first, second = nights(tmp_path / "first", [1.0]), nights(tmp_path / "second", [1.0], days=1)
    file = tmp_path / "out.xml"

    def counts(a: Path, b: Path) -> tuple[int, str]:
        code = call("check", "--baseline", a, "--candidate", b, "--junit", file).exit_code
        suite = next(ElementTree.parse(file).iter("testsuite"))
        return code, " ".join(suite.get(name, "") for name in ("tests", "failures", "errors", "skipped"))

    assert counts(first, second) == (6, "2 0 0 2")
    few = write_side(tmp_path / "few", STEADY[:3], days=9)
    assert counts(few, second) == (6, "2 0 0 2")
    assert counts(old, few) == (6, "2 0 2 0")
    # Wall time: each run of the factory takes this long, and two cases share it.
    case = next(ElementTree.parse(file).iter("testcase"))
    began, ended = (datetime.fromisoformat(getattr(scan(few).runs[0].record, name)) for name in ("started", "finished"))
    assert float(case.get("time", "0")) == pytest.approx(3 * (ended - began).total_seconds() / 2)


def test_damaged_data_ends_with_4_and_the_rest_is_told(tmp_path: Path, old: Path) -> None:
    new = write_side(tmp_path / "new", slower(1.0, 6))
    (new / sorted(path.name for path in new.iterdir())[0] / "node-0000.steps").write_bytes(b"nothing")
    result = call("check", "--baseline", old, "--candidate", new, "--junit", tmp_path / "j.xml")
    assert result.exit_code == ExitCode.INCOMPLETE
    assert "damaged" in result.output
    assert "Verdict: equivalent" in result.output
    assert 'type="damaged"' in (tmp_path / "j.xml").read_text(encoding="utf-8")


def test_a_side_without_figures_ends_with_4(tmp_path: Path, old: Path) -> None:
    for plan in plans(points=(1,), repeats=5, series="dead"):
        write_unfinished(tmp_path / "dead", plan, stage="failed", reason="out of memory")
    error = refused("check", "--baseline", old, "--candidate", tmp_path / "dead")
    assert isinstance(error, IncompleteDataError)
    assert "no run has figures" in str(error)
    assert "out of memory" in str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "OLD"], "two sides"),
        (["compare", "OLD", "OLD", "--paired"], "one folder"),
        (["compare", "OLD", "--paired", "--where-a", "series=old"], "have no effect"),
        (["compare", "OLD", "--paired"], "no run belongs to a paired comparison"),
        (["compare", "OLD", "nowhere"], "no such folder of runs"),
        (["check", "--baseline", "b.json", "--candidate", "OLD"], "`dlbench baseline RUNS -o b.json` makes one"),
        (["compare", "OLD", "OLD", "--metric", "speed"], "no such metric"),
        (["compare", "OLD", "OLD", "--tolerance", "two"], "must be a share"),
        (["compare", "OLD", "OLD", "--level", "0"], "must be a share above 0"),
        (["compare", "OLD", "OLD", "--allow", "sistem"], "did you mean system"),
        (["compare", "OLD", "OLD", "-o", "x.pdf"], "suffix '.pdf'"),
        (["compare", "OLD", "OLD", "--junit", "no/where.xml"], "there is no folder"),
        (["check", "--baseline", "OLD"], "give --baseline and --candidate"),
        (["check", "--paired", "OLD", "--baseline", "OLD"], "holds both sides"),
        (["check", "--paired", "OLD", "--history", "OLD"], "has no effect"),
        (["baseline", "OLD", "-o", "no/where.json"], "there is no folder"),
    ],
)
def test_wrong_use_is_one_line_and_2(old: Path, arguments: list[str], words: str) -> None:
    error = refused(*(old if word == "OLD" else word for word in arguments))
    assert words in str(error)
    assert error.exit_code == ExitCode.USAGE


# --- pairs ------------------------------------------------------------------------------------------------------------


def write_pairs(out: Path, by: float, *, repeats: int = 8, drift: float = 0.03, **more: Any) -> Path:
    """Interleaved runs of two seeds; both sides of a pair share a drift that is larger than the change."""
    sides = {"a": {"train.seed": 1}, "b": {"train.seed": 2}}
    for plan in plans(**{"points": (1,), "repeats": repeats, "series": "ab", "sides": sides, **more}):
        factor = STEADY[plan.series.repeat % 10] * (1 + drift * plan.series.repeat)
        factor *= by if plan.series.side == "b" else 1.0
        write_run(out, plan, slowed(factor))
    return out


def test_pairs_are_compared_pair_by_pair(tmp_path: Path) -> None:
    out = write_pairs(tmp_path / "runs", 1.04)
    result = call("compare", out, "--paired", "--format", "json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.output)
    (point,) = found["points"]
    assert found["paired"] is True
    assert point["metrics"][0]["tested"]["method"].startswith("Student's paired t test of")
    assert point["metrics"][0]["ratio"]["value"] == pytest.approx(1.04, rel=1e-3)
    assert [(one["key"], one["a"], one["b"]) for one in point["allowed"]] == [("train.seed", "1", "2")]
    assert call("check", "--paired", out).exit_code == 1
    # The same runs as two separate sides: the drift hides it.
    separate = call("compare", out, out, "--where-a", "side=a", "--where-b", "side=b", "--allow", "side,train.seed")
    assert separate.exit_code == 6
    lines = paired_lines(scan(out))
    assert "Verdict: regressed" in lines
    assert max(map(len, lines)) <= 80


def test_sides_that_differ_in_more_than_was_set_are_refused(tmp_path: Path) -> None:
    sides = {"a": {}, "b": {"train.label_smoothing": 0.1}}
    for side, overrides in (("a", {}), ("b", {"train.seed": 9})):
        for plan in plans(points=(1,), series="ab", sides=sides, overrides=overrides):
            if plan.series.side == side:
                write_run(tmp_path / "runs", plan, constant(PHASES_MS))
    error = refused("compare", tmp_path / "runs", "--paired")
    assert "differ in more than the settings of --ab: train.seed: 0 against 9" in str(error)
    assert "label_smoothing" not in str(error)


def test_paired_comparisons_of_equal_sides_and_other_settings_are_never_dropped(tmp_path: Path) -> None:
    sides = {"a": {}, "b": {"sync.fusion": "own:single"}}
    out = write_pairs(tmp_path / "runs", 2.0, series="one", sides=sides, points=(2,))
    write_pairs(out, 1.0, series="two", sides=sides, points=(2,), overrides={"sync.wire": "fp16"})
    error = refused("check", "--paired", out)
    assert "holds runs of different comparisons" in str(error)
    assert "--where series=NAME" in str(error)
    assert call("check", "--paired", out, "--where", "series=one").exit_code == 1


def test_pairs_without_their_partner_are_left_out(tmp_path: Path) -> None:
    out = write_pairs(tmp_path / "runs", 1.0, repeats=6)
    victim = next(run for run in scan(out).runs if run.plan.series.side == "b")
    edit_json(victim.folder.record, state="invalid")
    result = call("check", "--paired", out)
    words = " ".join(result.output.split())
    assert "1 run left out: no partner on the other side" in words
    assert "Student's paired t test of 5 pairs" in words
    assert result.exit_code == 0


# --- baseline file ----------------------------------------------------------------------------------------------------


def test_a_baseline_file_stands_for_its_runs(tmp_path: Path, old: Path) -> None:
    file = tmp_path / "baseline.json"
    assert call("baseline", old, "-o", file).exit_code == 0
    again = tmp_path / "again.json"
    assert call("baseline", old, "-o", again).exit_code == 0
    assert file.read_bytes() == again.read_bytes()
    for factors in (slower(1.05), slower(1.0), slower(1 / 1.05)):
        new = write_side(tmp_path / f"new{factors[0]:.3f}", factors)
        (code, found), (code2, found2) = (checked("--baseline", side, "--candidate", new) for side in (old, file))
        assert (code, found["verdict"]) == (code2, found2["verdict"])
        # The order of the runs is another one, and the figures of all formats are not.
        for one, two in zip(found["points"][0]["metrics"], found2["points"][0]["metrics"], strict=True):
            assert (one["ratio"], one["tested"]) == (two["ratio"], two["tested"])


def test_a_baseline_needs_five_runs_and_whole_data(tmp_path: Path, old: Path) -> None:
    few = write_side(tmp_path / "few", STEADY[:3])
    file = tmp_path / "baseline.json"
    error = str(refused("baseline", few, "-o", file))
    assert "5 runs per point; too few: sample, tiny preset, Horovod, fp32, batch 4 per rank, weak scaling" in error
    assert "scaling, 1 rank (3 runs); choose others with --where, run with --repeats 5" in error
    assert not file.exists()
    assert call("baseline", few, "-o", file, "--allow-few").exit_code == 0
    assert call("check", "--baseline", file, "--candidate", old).exit_code == 6
    (old / sorted(path.name for path in old.iterdir())[0] / "node-0000.steps").write_bytes(b"")
    file.unlink()
    assert isinstance(refused("baseline", old, "-o", file), IncompleteDataError)
    assert not file.exists()


# --- real runs --------------------------------------------------------------------------------------------------------

REAL = ("cosmoflow", "--preset", "ci", "--data", "synthetic", "--engine", "single", "--no-progress")
SHORT = ("--set", "train.batch_per_rank=1", "--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=3")
PLANTED = ("--set", "fault.step_delay_s=1.5")
# A machine that others use scatters by a third; the delay is ten steps long, far beyond what is tolerated.
GATE = ("check", "--baseline", "baseline.json", "--tolerance", "250%")


def measured(cli: Cli, name: str, repeats: int, *more: str) -> None:
    made = ("--repeats", str(repeats), "--series", name, "--out", name, "--set", "layout.cores_per_rank=1")
    made += ("--set", "system.launch.pin=false")
    done = cli("run", *REAL, *SHORT, *made, *more, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_a_planted_slowdown_fails_the_gate_by_both_recipes_and_equal_runs_pass(cli: Cli, tmp_path: Path) -> None:
    for night in range(5):
        measured(cli, f"old{night}", 1, "--out", "old")
    for night, run in enumerate(scan(tmp_path / "old").runs):
        edit_json(run.folder.record, finished=(NOW + timedelta(days=night)).strftime("%Y-%m-%dT%H:%M:%SZ"))
    written = cli("baseline", "old", "-o", "baseline.json")
    assert written.returncode == 0, written.stderr
    assert "5 runs in 5 sessions" in written.stderr
    measured(cli, "new", 5, "--ab", "plain", PLANTED[1])
    beside = cli("check", "--paired", "new", "--tolerance", "250%", "--junit", "beside.xml")
    assert beside.returncode == 1, beside.stdout + beside.stderr
    assert 'type="regressed"' in (tmp_path / "beside.xml").read_text(encoding="utf-8")
    # Five nights of one run each tell less than five pairs do: the last tolerance is the one that counts.
    slow = cli(
        *(*GATE, "--tolerance", "50%", "--candidate", "new", "--where-candidate", "side=b", "--allow", "fault,side")
    )
    assert slow.returncode == 1, slow.stdout + slow.stderr
    same = cli(*GATE, "--candidate", "new", "--where-candidate", "side=a", "--allow", "side", "--junit", "same.xml")
    assert same.returncode == 0, same.stdout + same.stderr
    assert "<failure" not in (tmp_path / "same.xml").read_text(encoding="utf-8")
