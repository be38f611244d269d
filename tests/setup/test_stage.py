"""`.ci/stage`, of which make's targets are made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

STAGE = ROOT / ".ci" / "stage"
NOISE = "WARNING: Location 'file:///no/such/folder/{}/' is ignored: it is neither a file nor a directory."


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MAKE_STAGES"} | {"TMPDIR": str(folder)}
    return subprocess.run(
        [STAGE, *arguments], capture_output=True, text=True, check=False, timeout=60, env=environment, cwd=folder
    )


def test_a_stage_shows_its_command_its_output_and_its_time(tmp_path: Path) -> None:
    done = run("demo: data", "sh", "-c", "echo one; echo two >&2; sleep 1", folder=tmp_path)
    assert done.returncode == 0
    assert re.fullmatch(r"\+ sh -c .*\none\ndemo: data \.\.\. [1-9]\d* s\n", done.stdout)
    assert done.stderr == "two\n"


def test_a_quiet_stage_counts_missing_folders_and_shows_other_warnings(tmp_path: Path) -> None:
    lines = [NOISE.format("torch"), "WARNING: torch 2.99 is yanked", NOISE.format("numpy")]
    command = ("sh", "-c", 'echo Collecting torch; printf "%s\\n" "$@" >&2', "sh", *lines)
    done = run("--log", "pip.log", "set-up: torch", *command, folder=tmp_path)
    assert done.returncode == 0
    assert re.fullmatch(
        r"set-up: torch \.\.\. \d+ s \(pip looked into 2 missing folders, see pip\.log\)\n", done.stdout
    )
    assert done.stderr == "WARNING: torch 2.99 is yanked\n"
    assert (tmp_path / "pip.log").read_text().splitlines()[-4:] == ["Collecting torch", *lines]
    assert re.fullmatch(r"quiet \.\.\. \d+ s\n", run("--log", "pip.log", "quiet", "true", folder=tmp_path).stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["pip.log"]


@pytest.mark.parametrize("log", [(), ("--log", "pip.log")], ids=["shown", "quiet"])
def test_a_failed_stage_shows_its_error_and_ends_with_its_code(tmp_path: Path, log: tuple[str, ...]) -> None:
    script = "echo Collecting x; echo \"$1\" >&2; echo 'ERROR: no matching distribution' >&2; exit 7"
    done = run(*log, "set-up: x", "sh", "-c", script, "sh", NOISE.format("x"), folder=tmp_path)
    assert done.returncode == 7
    assert re.search(r"^set-up: x \.\.\. failed with 7 after \d+ s$", done.stdout, re.MULTILINE)
    assert "ERROR: no matching distribution" in done.stderr
    assert "Collecting x" in (done.stderr if log else done.stdout)
    assert ("the whole log is pip.log" in done.stderr) == bool(log)
    assert (NOISE.format("x") in done.stderr.splitlines()) != bool(log)


def test_the_last_line_names_all_stages_and_their_total(tmp_path: Path) -> None:
    both = f"{STAGE} 'set-up: torch>=2,<3' true && {STAGE} --log x.log 'demo: data' true"
    done = run("--all", "sh", "-c", both, folder=tmp_path)
    assert done.returncode == 0
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"all stages: torch>=2,<3 \d+ s, data \d+ s; \d+ s in all", last)
    failed = run("--all", "sh", "-c", f"{both} && {STAGE} last sh -c 'exit 3'", folder=tmp_path)
    assert failed.returncode == 3
    assert "all stages" not in failed.stdout
    assert run("--all", "true", folder=tmp_path).stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["x.log"]


@pytest.mark.parametrize("target", ["demo", "test", "setup"])
def test_make_asks_for_horovod_s_build_though_nothing_else_has_changed(tmp_path: Path, target: str) -> None:
    """MPI that came after the build touches no file that make knows."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(STAGE, tmp_path / ".ci")
    shutil.copy(ROOT / "Makefile", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    for name in ("python", "dlbench", "ruff", "mypy"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/called\n')
        (programs / name).chmod(0o755)
    for stamp in (".ready-torch", ".ready-demo", ".ready-bytecode", ".ready-dev"):
        (tmp_path / ".venv" / stamp).touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for _ in range(2):
        done = subprocess.run(
            ["make", target], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        called = (tmp_path / "called").read_text().splitlines()
        (tmp_path / "called").unlink()
        assert "dlbench setup horovod" in called[:3]  # crops of JPEGs and the demo's data at the same time
        assert not any(line.startswith("python -m pip") for line in called)
