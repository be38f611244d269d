"""Any exception becomes a line and a documented exit code; 1 is left to verdicts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import CommandGroups
from dlbench.cli.streams import Ending, ending_of
from dlbench.errors import (
    MACHINE_ERRORS,
    DlbenchError,
    EnvironmentLacksError,
    ExitCode,
    IncompleteDataError,
    RunError,
    UserError,
)


def caught(error: BaseException) -> Ending:
    try:
        raise error
    except BaseException as met:
        return ending_of(met)


@pytest.mark.parametrize("kind", [UserError, RunError, IncompleteDataError, EnvironmentLacksError])
def test_an_error_of_dlbench_is_its_line_and_code(kind: type[DlbenchError]) -> None:
    ending = caught(kind("no such\nfolder\x1b[2J"))
    assert ending == Ending(code=kind.exit_code, line="dlbench: error: no such folder [2J")


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


def test_a_renaming_names_both_paths() -> None:
    assert (
        "a -> b: cannot be used: Invalid cross-device link" in caught(OSError(18, os.strerror(18), "a", None, "b")).line
    )


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
        assert caught(error) == Ending(code=130, line="dlbench: interrupted")


def test_a_reader_that_met_the_end_is_no_interruption() -> None:
    """Click makes the same exception of both."""

    def read() -> None:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")

    with pytest.raises(click.Abort) as raised:
        click.Command("read", callback=read).main([], standalone_mode=False)
    assert ending_of(raised.value).code == 70


def test_a_pipe_that_broke_is_no_verdict() -> None:
    """Click ends with 1 for any of them."""

    def send() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    group = CommandGroups(callback=send, invoke_without_command=True)
    with pytest.raises(EnvironmentLacksError, match="Broken pipe") as raised:
        group.main([], standalone_mode=False)
    assert ending_of(raised.value).code == 5


@pytest.mark.parametrize(
    "error", [click.ClickException("no"), click.UsageError("no"), click.BadParameter("no"), click.FileError("x", "no")]
)
def test_what_click_refuses_is_wrong_usage(error: click.ClickException) -> None:
    assert caught(error).code == 2
    assert caught(error).line.startswith("Error: ")


def test_an_exit_keeps_its_code() -> None:
    assert [caught(SystemExit(code)).code for code in (None, 0, 1, 6, 124)] == [0, 0, 1, 6, 124]
    assert caught(SystemExit("words")) == Ending(code=70, line="words")


def test_memory_and_depth() -> None:
    assert caught(MemoryError()).code == 5
    assert "ulimit -v" in caught(MemoryError()).line
    assert caught(RecursionError("maximum recursion depth exceeded")).code == 4


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), AssertionError(), OSError("of a library"), SystemError()]
)
def test_a_defect_keeps_its_traceback_and_is_no_verdict(error: BaseException) -> None:
    ending = caught(error)
    assert ending.code == ExitCode.DEFECT == 70
    assert ending.line.startswith("Traceback (most recent call last)")
    assert ending.line.endswith("dlbench: this is a defect of dlbench")


@pytest.mark.nightly
def test_a_process_with_a_defect_ends_with_70() -> None:
    code = "import dlbench.cli as c; c.cli.callback = lambda: 1 / 0; import sys; sys.argv = ['dlbench', 'ls']; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (70, "")
    assert "ZeroDivisionError" in done.stderr
