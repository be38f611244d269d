"""Which runs commands read: folders, patterns, folders of folders, `--where`; completion of names in real shells."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


BIN = Path(sys.executable).parent
LONGEST_S = 120.0
"""The machine may be busy; a shell answers within a second."""

SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        'bind "set bell-style none"; eval "$(_DLBENCH_COMPLETE=bash_source dlbench)"',
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        'autoload -Uz compinit; compinit -u -D; bindkey -e; eval "$(_DLBENCH_COMPLETE=zsh_source dlbench)"',
    ),
    "fish": (["fish", "--no-config", "-i"], "_DLBENCH_COMPLETE=fish_source dlbench | source"),
}


class Terminal:
    """A shell at a terminal of its own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.seen = ""

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.descriptor, text.encode())

    def wait_for(self, words: str) -> None:
        """Reads until the words are there."""
        end = time.monotonic() + LONGEST_S
        while words not in self.seen:
            left = end - time.monotonic()
            assert left > 0, f"no {words!r} in {self.seen!r}"
            if select.select([self.descriptor], [], [], min(left, 1.0))[0]:
                self.seen += os.read(self.descriptor, 65536).decode("utf-8", "replace")


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[Terminal]:
    leader, follower = pty.openpty()
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "PS1": "$ ",
    }
    shell = subprocess.Popen(
        # Fish wants to be in charge of its terminal.
        ["setsid", "--ctty", *command],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=folder,
        env=environment,
    )
    os.close(follower)
    try:
        yield Terminal(leader)
    finally:
        shell.kill()
        shell.wait()
        os.close(leader)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_completes_at_a_terminal(name: str, tmp_path: Path) -> None:
    command, setup = SHELLS[name]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    (tmp_path / "runs" / ".series").mkdir(parents=True)
    (tmp_path / "runs" / ".series" / "nightly-2026.json").touch()
    with terminal(command, tmp_path) as shell:
        shell.type(f"{setup}; echo re''ady\n")
        shell.wait_for("ready")
        for typed, completed in (
            ("dlbench histo", "dlbench history"),
            ("dlbench run cosm", "dlbench run cosmoflow"),
            ("dlbench run cosmoflow --preset c", "dlbench run cosmoflow --preset ci"),
            ("dlbench submit bert --system example-gp", "dlbench submit bert --system example-gpu"),
            ("dlbench run bert --set train.batch_per_r", "dlbench run bert --set train.batch_per_rank="),
            ("dlbench wait night", "dlbench wait nightly-2026"),
        ):
            # To the start of the line and to its end: what was completed is printed, and nothing else is run.
            shell.type(f"{typed}\t\x01echo @\x05@\n")
            shell.wait_for(f"\n@{completed}")
