"""Standard streams that are closed, full or without a reader, as real processes meet them."""

from __future__ import annotations

import errno
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import run as run_module
from dlbench.cli.streams import CommandEnding, cleaned, ending_of
from dlbench.errors import (
    MACHINE_ERRORS,
    DlbenchError,
    EnvironmentLacksError,
    ExitCode,
    IncompleteDataError,
    RunError,
    UserError,
)
from dlbench.jobs import local
from dlbench.jobs.local import RunOutcome, verdict
from dlbench.records.folder import RunFolder
from tests.conftest import Cli
from tests.support.forks import Surroundings
from tests.support.run_factory import constant, edit_json, plans, write_run, write_unfinished

LS = "import sys; from dlbench.cli import main; sys.argv = ['dlbench', 'ls']; main()"

# Three runs whose ranks are not started, and what the command was about to say.
SERIES = """
import sys
from pathlib import Path
from dlbench.cli import main
from dlbench.errors import ExitCode
from dlbench.jobs import local
from dlbench.jobs.local import RunOutcome

def run(plan, folder, tell):
    with open("started", "a") as file:
        file.write("1")
    print("a word of a library", file=sys.stderr)
    return RunOutcome(exit_code=ExitCode.OK, detail="")

local.run = run
sys.argv = ["dlbench", "run", "cosmoflow", "--preset", "ci", "--engine", "single", "--data", "synthetic"]
sys.argv += ["--repeats", "3", "--out", "runs"]
main()
"""


def shell(code: str, redirection: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = f"{shlex.join([sys.executable, '-c', code])} {redirection}"
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", ["ls", "compare", "--help"])
def test_results_that_cannot_be_written_are_no_success(cli: Cli, tmp_path: Path, command: str) -> None:
    for plan in plans(points=(1,), repeats=1):
        write_run(tmp_path / "runs", plan, constant([1, 0, 3, 5, 0, 1]))
        write_run(tmp_path / "more", plan, constant([1, 0, 3, 6, 0, 1]))
    arguments = ("runs", "more") if command == "compare" else ()
    done = cli(command, *arguments, surroundings=Surroundings(full=(1,)))
    assert (done.returncode, done.stdout) == (5, "")
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("dlbench: error: standard output: ")
    assert "No space left" in line


def test_a_reader_who_has_enough_is_no_failure(tmp_path: Path) -> None:
    done = shell(LS, "| head -c 5 >/dev/null; echo ${PIPESTATUS[0]}", tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&1 >/dev/null | head -1 >/dev/null; exit ${PIPESTATUS[0]}"])
def test_a_series_goes_on_without_standard_error(tmp_path: Path, redirection: str) -> None:
    done = shell(SERIES, redirection, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "started").read_text() == "111"
    assert len(list((tmp_path / "runs").glob("*/plan.json"))) == 3


def test_what_an_encoding_lacks_is_written_out(tmp_path: Path) -> None:
    code = "import sys; from dlbench.cli.streams import Streams; Streams()\n"
    code += "print('µ ≥ \\udcff'); print('≥ \\udcff', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True, check=True
    )
    assert done.stdout == b"\xb5 \\u2265 \xff\n"
    assert done.stderr == b"\\u2265 \n"


@given(text=st.text(max_size=300) | st.text(alphabet="\x1b\u202e\n\tab]", max_size=300), limit=st.integers(8, 200))
def test_a_cleaned_text_moves_no_cursor(text: str, limit: int) -> None:
    lines = cleaned(text, limit).split("\n")
    assert len(lines) == text.count("\n") + 1
    for line in lines:
        assert not set(line) & set("\x1b\x07\x08\r\u202e\u2066\u200f\x9b")
        assert len(line) <= limit + 40
    "".join(lines).encode()  # no half of a surrogate pair


# A series of runs


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExitCode]:
    """Runs three plans, of which `fate` decides; ranks are not started."""

    def run_series(fate: Callable[[int, Path], RunOutcome], *, bar: bool = False) -> ExitCode:
        numbers = itertools.count()
        monkeypatch.setattr(local, "run", lambda plan, folder, tell: fate(next(numbers), folder.path))
        monkeypatch.setattr(run_module.signal, "signal", lambda number, action: None)
        monkeypatch.setenv("COLUMNS", "1000")
        made = plans(points=(1,), repeats=3)
        return run_module.run_all(made, tmp_path / "runs", fail_fast=False, bar=bar, next_command="dlbench report runs")

    return run_series


GOOD = RunOutcome(exit_code=ExitCode.OK, detail="")


def test_a_run_whose_folder_is_gone_does_not_stop_the_series(
    series: Callable[..., ExitCode], capsys: pytest.CaptureFixture[str]
) -> None:
    def fate(number: int, folder: Path) -> RunOutcome:
        if number == 0:
            shutil.rmtree(folder)
            return verdict(RunFolder(folder), "")
        if number == 1:
            raise PermissionError(errno.EACCES, "Permission denied", "/usr/bin/mpirun")
        return GOOD

    assert series(fate) == ExitCode.RUN_FAILED
    told = capsys.readouterr().err
    assert "[1/3] 1 rank, repeat 1: FAILED" in told
    assert "was removed" in told
    assert "[2/3] 1 rank, repeat 2: FAILED" in told
    assert "/usr/bin/mpirun: cannot be used: Permission denied" in told
    assert "[3/3] 1 rank, repeat 3: " in told
    assert "1 of 3 runs valid" in told.splitlines()[-1]


def test_a_bar_shows_no_terminal_sequences(series: Callable[..., ExitCode], capsys: pytest.CaptureFixture[str]) -> None:
    failed = RunOutcome(exit_code=ExitCode.RUN_FAILED, detail="ev\x1b]0;pwn\x07[/red]\u202e")
    series(lambda number, folder: failed, bar=True)
    told = capsys.readouterr().err
    assert told.count("ev]0;pwn[/red]") == 3
    assert not set("\x07\u202e") & set(told)


# What status knows of runs that nobody can finish any more


@pytest.mark.parametrize(("lives", "code"), [(False, 3), (True, 0)])
def test_status_knows_a_run_whose_processes_are_gone(cli: Cli, tmp_path: Path, lives: bool, code: int) -> None:
    """As after a full disk, on which nobody could say why the run was given up."""
    (plan,) = plans(points=(1,), repeats=1)
    folder = write_unfinished(tmp_path / "runs", plan, host=platform.node())
    pid = os.getpid()
    if not lives:
        with subprocess.Popen(["true"]) as process:
            pid = process.pid
    edit_json(folder.status(0), pid=pid, updated=datetime.now(UTC).isoformat())
    done = cli("status", "runs")
    assert (done.returncode, done.stderr) == (code, "")
    assert ("none of its processes runs on" in done.stdout) is not lives
    state = "incomplete" if lives else "failed"
    assert f"0 of 1 run valid, 1 {state}\n" in done.stdout


def caught(error: BaseException) -> CommandEnding:
    try:
        raise error
    except BaseException as met:
        return ending_of(met)


@pytest.mark.parametrize("kind", [UserError, RunError, IncompleteDataError, EnvironmentLacksError])
def test_an_error_of_dlbench_is_its_line_and_code(kind: type[DlbenchError]) -> None:
    ending = caught(kind("no such\nfolder\x1b[2J"))
    assert ending == CommandEnding(code=kind.exit_code, line="dlbench: error: no such folder [2J")


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.EACCES, 2, "Permission denied"),
        (errno.ENAMETOOLONG, 2, "File name too long"),
        (errno.ELOOP, 2, "Too many levels of symbolic links"),
        (errno.ENOTDIR, 2, "Not a directory"),
        (errno.ENOENT, 2, "No such file or directory"),
        (errno.EISDIR, 2, "Is a directory"),
        (errno.ENOSPC, 5, "No space left on device"),
        (errno.EDQUOT, 5, "quota"),
        (errno.EIO, 5, "Input/output error"),
        (errno.EROFS, 5, "Read-only file system"),
        (errno.EMFILE, 5, "Too many open files"),
        (errno.ESTALE, 5, "Stale file handle"),
    ],
)
def test_an_operating_systems_error_names_the_path(number: int, code: int, words: str) -> None:
    ending = caught(OSError(number, os.strerror(number), "/data/a\x1bb"))
    assert ending.code == code
    assert ending.line.startswith("dlbench: error: /data/a b: cannot be used: ")
    assert words in ending.line


@given(
    number=st.sampled_from(sorted(errno.errorcode)) | st.integers(-20, 500), path=st.none() | st.binary() | st.text()
)
def test_no_operating_systems_error_is_a_verdict(number: int, path: str | bytes | None) -> None:
    ending = caught(OSError(number, "broken", path))
    assert ending.code in (ExitCode.USAGE, ExitCode.ENVIRONMENT)
    assert ending.line.startswith("dlbench: error: ")
    assert "\n" not in ending.line
    assert ending.code == ExitCode.ENVIRONMENT or number not in MACHINE_ERRORS


def test_without_a_path_the_function_is_named() -> None:
    from dlbench.records.files import write_json

    class Full(dict[str, int]):
        def items(self) -> NoReturn:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output") as raised:
        write_json(Path("x"), Full(a=1))
    assert "Input/output error, in dlbench.records.files." in ending_of(raised.value).line


def test_interruptions_end_with_130() -> None:
    for error in (KeyboardInterrupt(), click.Abort()):
        assert caught(error) == CommandEnding(code=130, line="dlbench: interrupted")


def test_a_reader_that_met_the_end_is_no_interruption() -> None:
    """Click makes the same exception of both."""

    def read() -> None:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")

    with pytest.raises(click.Abort) as raised:
        click.Command("read", callback=read).main([], standalone_mode=False)
    assert ending_of(raised.value).code == 70


@pytest.mark.parametrize(
    "error", [click.ClickException("no"), click.UsageError("no"), click.BadParameter("no"), click.FileError("x", "no")]
)
def test_what_click_refuses_is_wrong_usage(error: click.ClickException) -> None:
    assert caught(error).code == 2
    assert caught(error).line.startswith("Error: ")


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), AssertionError(), OSError("of a library"), SystemError()]
)
def test_a_defect_keeps_its_traceback_and_is_no_verdict(error: BaseException) -> None:
    ending = caught(error)
    assert ending.code == ExitCode.DEFECT == 70
    assert ending.line.startswith("Traceback (most recent call last)")
    assert ending.line.endswith("dlbench: this is a bug in dlbench")


def test_an_exit_keeps_its_code() -> None:
    assert [caught(SystemExit(code)).code for code in (None, 0, 1, 6, 124)] == [0, 0, 1, 6, 124]
    assert caught(SystemExit("words")) == CommandEnding(code=70, line="words")


def test_memory_and_depth() -> None:
    assert caught(MemoryError()).code == 5
    assert "ulimit -v" in caught(MemoryError()).line
    assert caught(RecursionError("maximum recursion depth exceeded")).code == 4
