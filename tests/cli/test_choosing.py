"""Which runs commands read: folders, patterns, folders of folders, and `--where`; control runs are no results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.errors import DlbenchError, UserError
from dlbench.records.scan import MAX_LEVELS, run_folders, scan
from tests.support.run_factory import constant, plans, write_run, write_unfinished

TIMES = constant([5.0, 0.0, 30.0, 50.0, 0.0, 10.0])


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in arguments])


def as_json(*arguments: str | Path) -> Any:
    done = call("report", *arguments, "--format", "json")
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def refused(*arguments: str | Path) -> str:
    error = call(*arguments).exception
    assert isinstance(error, UserError), error
    assert len(str(error).splitlines()) == 1
    return str(error)


def write(out: Path, series: str, **request: Any) -> None:
    for plan in plans(**{"points": (1,), "repeats": 1, "series": series, **request}):
        write_run(out, plan, TIMES)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As after `make demo` and more: runs, and a folder of runs."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs", "one", engine="single")
    write(tmp_path / "runs" / "demo-1", "two", engine="ddp", repeats=2)
    return Path("runs")


def found(*paths: Path) -> list[str]:
    return sorted(folder.path.name.split("-")[0] for folder in run_folders(*paths))


def test_folders_of_folders_are_found_and_other_folders_are_damage(tmp_path: Path, runs: Path) -> None:
    assert found(runs) == ["one", "two", "two"]
    deep = tmp_path / "top"
    write(deep.joinpath(*(["down"] * MAX_LEVELS)), "deep")
    assert found(deep) == ["deep"]
    assert scan(runs).problems == []
    (runs / "notes").mkdir()
    (runs / "copied" / "checkpoints").mkdir(parents=True)
    assert [problem.split(":")[0] for problem in scan(runs).problems] == ["runs/copied", "runs/notes"]
    write(deep.joinpath(*(["down"] * (MAX_LEVELS + 1))), "deeper")
    (problem,) = [line for line in scan(deep).problems if line]
    assert "no plan.json" in problem


def test_links_make_no_second_runs_and_no_circle(tmp_path: Path, runs: Path) -> None:
    (runs / "latest").symlink_to("demo-1")
    (runs / "a-circle").symlink_to(".")
    (runs / "demo-1" / "up").symlink_to("..")
    (tmp_path / "elsewhere").symlink_to(runs.absolute())
    assert found(runs) == ["one", "two", "two"]
    assert found(runs, runs / "demo-1", tmp_path / "elsewhere") == ["one", "two", "two"]
    # A copy is no second measurement, wherever it lies.
    (run,) = run_folders(runs / "demo-1")[:1]
    shutil.copytree(run.path, tmp_path / "copies" / "copy")
    assert call("report", "runs", "copies").exit_code == 4


def test_commands_take_folders_patterns_and_where(runs: Path) -> None:
    assert len(as_json("runs")["runs"]) == 3
    assert len(as_json("runs/demo-1", "runs/one*")["runs"]) == 3
    assert {run["series"] for run in as_json("runs", "--where", "series=two", "--where", "engine=ddp")["runs"]} == {
        "two"
    }
    diagnosed = call("diagnose", "runs", "--where", "series=one", "--format", "json")
    assert [run["series"] for run in json.loads(diagnosed.stdout)["runs"]] == ["one"]
    assert call("baseline", "runs", "--where", "series=two", "-o", "b.json", "--allow-few").exit_code == 0
    assert call("status", "runs", "--where", "state=valid").stdout.endswith("3 runs, 3 valid\n")
    assert call("history", "import", "runs", "--store", "store").exit_code == 0
    assert len(as_json("store", "--where", "series=two")["runs"]) == 2


def test_what_nothing_matches_is_answered_with_what_there_is(runs: Path) -> None:
    (plan,) = plans(points=(1,), repeats=1, series="dead")
    write_unfinished(runs, plan, "failed", "out of memory")
    for command in ("report", "diagnose", "status"):
        assert refused(command, "runs", "--where", "series=three").endswith(
            "--where series=three: no run of runs has it; existing values: dead, one, two"
        )
    assert "engine=ddp: no run of runs with series=one has it" in refused(
        "report", "runs", "--where", "series=one", "--where", "engine=ddp"
    )
    assert "no such property of runs; did you mean engine" in refused("status", "runs", "--where", "engin=ddp")
    assert "matches no folder of runs" in refused("report", "other*")
    failed = call("status", "runs", "--where", "state=failed")
    assert (failed.exit_code, "1 run, 0 valid" in failed.stdout) == (3, True)
    assert isinstance(call("comm", "report", "runs", "--where", "series=one").exception, DlbenchError)


def test_control_runs_are_no_results_but_where_they_are_alone(runs: Path) -> None:
    write(runs, "pairs", engine="single", repeats=2, sides={"a": {}, "b": {"train.seed": 5}})
    write(runs, "parts", engine="ddp", points=(2,), decompose=True)
    report = as_json("runs")
    assert [dict(group["settings"]) for group in report["groups"]] == [{}, {}]
    assert not any("side" in group["label"] or "no-exchange" in group["label"] for group in report["groups"])
    assert len(report["runs"]) == 9
    assert sum(run["side"] != "" for run in report["runs"]) == 4
    assert {one["series"]: one["num_runs"] for one in report["controls"]} == {"pairs": 4, "parts": 1}
    told = " ".join(call("report", "runs").stdout.split())
    assert "4 control runs of sample (side a, side b), series pairs: `dlbench compare RUNS --paired" in told
    alone = as_json("runs", "--where", "series=pairs")
    assert len(alone["groups"]) == 2
    text = " ".join(call("report", "runs", "--where", "series=pairs").stdout.split())
    assert "4 control runs of sample (side a, side b)" in text
