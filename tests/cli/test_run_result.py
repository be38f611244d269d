"""`dlbench run` while it goes on and when it ends: lines of finished runs, the live line, the figures of the series."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.cli.progress import Bar, ProgressLines, SeriesProgress
from dlbench.errors import ExitCode
from dlbench.jobs import local
from dlbench.jobs.local import RunOutcome, verdict
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import WORKLOAD, Story, Training, constant, plans, write_run, write_unfinished

pytestmark = pytest.mark.usefixtures("signals_as_before")

Train = Callable[..., Result]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`dlbench run` of a workload in whose place runs are written: two ranks lose a fifth, batch 2 is slower."""

    def trained(plan: RunPlan, folder: RunFolder, on_progress: object) -> RunOutcome:
        shutil.rmtree(folder.path)
        if plan.tags.get("fate") == "dead":
            write_unfinished(folder.path.parent, plan, "failed", "out of memory")
            return RunOutcome(exit_code=ExitCode.RUN_FAILED, detail="out of memory")
        factor = (1 + plan.series.repeat / 100) * (1.5 if plan.workload.train.batch_per_rank == 2 else 1.0)
        exchange = 25.0 if plan.layout.ranks > 1 and plan.series.variant != "no-exchange" else 0.0
        story = Story(training=Training(values=(0.2, 0.55))) if plan.measure.until == "quality" else Story()
        times = constant([part * factor for part in (5.0, 0.0, 30.0, 50.0, exchange, 10.0)], other=5.0 * factor)
        return verdict(write_run(folder.path.parent, plan, times, story), None)

    monkeypatch.setattr(local, "run", trained)
    monkeypatch.setattr("dlbench.cli.options.require_data", lambda plans: None)
    monkeypatch.chdir(tmp_path)

    def run(*options: str, workload: Path = WORKLOAD) -> Result:
        return CliRunner().invoke(cli, ["run", str(workload), "--engine", "ddp", "--series", "s", *options])

    return run


def as_json(*arguments: str) -> Any:
    done = CliRunner().invoke(cli, ["report", *arguments, "--format", "json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_series_ends_with_the_figures_that_its_report_has(train: Train) -> None:
    done = train("--ranks", "1,2", "--repeats", "3")
    assert done.exit_code == 0, done.output
    first, *lines = done.stderr.splitlines()
    assert first == "6 runs of sample (tiny), ddp, series s"
    assert lines[0].startswith("[1/6] 1 rank, repeat 1: 40.0 images/s, ")
    assert "; about 1 s left" in lines[0]
    assert lines[5].startswith("[6/6] 2 ranks, repeat 3: ")
    assert "left" not in lines[5]
    *_, where, last = lines
    assert where == f"6 of 6 runs valid, in {Path.cwd() / 'runs'}"
    assert last == "next: dlbench report runs --where series=s"
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = [line.split() for line in done.stdout.splitlines() if line.lstrip()[:6] in ("1 rank", "2 rank")]
    (group,) = as_json(*last.split()[3:])["groups"]
    for row, point in zip(rows, group["points"], strict=True):
        assert float(row[2]) == pytest.approx(point["throughput"]["value"], rel=5e-4)
        assert (row[3][0], row[4], row[5][-1]) == ("(", "to", ")")  # a range, no interval
        assert row[-1] == "3"
    assert rows[0][-2] == "baseline"
    assert float(rows[1][6]) == pytest.approx(100 * group["points"][1]["efficiency"]["value"], abs=0.05)
    told = " ".join(done.stdout.split())
    assert " ".join(group["verdict"].split()) in told
    assert "exchange on the wire" in group["verdict"]
    assert "1 warning and 1 note: ! " in told


def test_control_runs_are_compared_and_are_no_rows(train: Train) -> None:
    done = train("--ranks", "2", "--repeats", "2", "--decompose")
    assert done.exit_code == 0, done.output
    assert sum(line.lstrip().startswith("2 ranks") for line in done.stdout.splitlines()) == 1
    assert "2 control runs of sample (no-exchange), series s: `dlbench diagnose RUNS`" in " ".join(
        CliRunner().invoke(cli, ["report", "runs"]).stdout.split()
    )
    assert max(map(len, done.stdout.splitlines())) <= 80
    sides = train("--ranks", "1", "--repeats", "2", "--series", "t", "--ab", "plain", "train.seed=5")
    assert "Verdict: insufficient" in sides.stdout
    assert "Result" not in sides.stdout
    assert sides.stderr.splitlines()[-1] == "next: dlbench compare runs --paired --where series=t"


def test_a_series_without_a_valid_run_ends_without_figures(train: Train) -> None:
    done = train("--ranks", "1", "--tag", "fate=dead")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "[1/1] 1 rank: FAILED after " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("0 of 1 runs valid, in ")


# The live line


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_live_line_tells_the_rate_and_what_is_left() -> None:
    made = plans(points=(1, 2), repeats=2)
    clock = Clock()
    course = SeriesProgress(made, clock)
    course.begin()
    assert course.now(made[0]) == "starting"
    clock.now = 5
    course.report(1, 100, "warm-up")
    assert course.now(made[0]) == "warm-up"
    for second in range(6, 17):
        clock.now = second
        course.report(10 * (second - 5), 210, "measuring")
    # Ten steps of four samples a second; 100 steps are left, and three runs of 26 s each.
    assert course.now(made[0]) == "step 110 of 210, 40.0 images/s, 10 s left; all: 88 s"
    clock.now = 30
    assert course.end() == 30
    course.begin()
    assert course.now(made[1]) == "starting, 30 s left; all: 90 s"
    clock.now = 80
    course.end()
    course.begin()
    # The same again: 50 s at two ranks, 30 s at one.
    assert course.now(made[2]) == "starting, 50 s left; all: 80 s"
    course.end()
    course.begin()
    assert course.now(made[3]) == "starting, 30 s left"


def test_the_bar_draws_what_the_lines_say_and_nothing_foreign() -> None:
    class Console:
        width = 80

        def __init__(self) -> None:
            self.printed: list[str] = []

        def print(self, text: object, **more: object) -> None:
            self.printed.append(str(text))

    class Drawn:
        console = Console()
        description = ""

        def add_task(self, *rest: object, **more: object) -> int:
            return 0

        def update(self, task: int, description: str = "", **more: object) -> None:
            self.description = description or self.description

    made = plans(points=(1,), repeats=1)
    drawn = Drawn()
    bar = Bar(made, drawn)
    bar.begin(made[0])(3, 9, "evaluating\x1b[31m")
    assert drawn.description == "[1/1] 1 rank: evaluating[31m"
    bar.end(made[0], RunOutcome(exit_code=ExitCode.OK, detail="", throughput=12.5))
    assert drawn.console.printed[-1].startswith("[1/1] 1 rank: 12.5 images/s, ")
    assert isinstance(bar, ProgressLines)
