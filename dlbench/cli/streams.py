"""The standard streams of a command, robust against full disks, missing readers and odd encodings.

A command runs to its end even if its results cannot be written; its exit code says so. Messages have no control
characters and a limited length.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO, TypeGuard

import click

from dlbench.errors import MACHINE_ERRORS, DlbenchError, ExitCode
from dlbench.units import printable

if TYPE_CHECKING:
    from rich.console import Console


MAX_LINE = 2000  # Characters of a line on standard error; the middle of longer lines is left out.

_KEPT_END = 400  # Characters kept at the end of a longer line.

_REPLACED_BY_SPACE = "\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"
_REMOVED_CATEGORIES = {"Cc", "Cf", "Cs"}  # Unicode categories: control, format and surrogate characters.

_ESCAPING = "dlbench-escaped"


def cleaned(text: str, limit: int = MAX_LINE) -> str:
    """Removes control and bidirectional characters (not newlines, tabs) and cuts lines at about `limit`."""
    if text.isascii() and len(text) <= limit and text.replace("\n", "").isprintable():
        return text
    return "\n".join(_cleaned_line(line, limit) for line in text.split("\n"))


def _cleaned_line(line: str, limit: int) -> str:
    spaced = line.translate(dict.fromkeys(map(ord, _REPLACED_BY_SPACE), " "))
    text = "".join(c for c in spaced if c == "\t" or unicodedata.category(c) not in _REMOVED_CATEGORIES)
    if len(text) <= limit:
        return text
    end = min(_KEPT_END, limit // 4)
    return f"{text[: limit - end]} [{len(text) - limit:,} characters left out] {text[len(text) - end :]}"


class _Stream(io.TextIOWrapper):
    """A standard stream that drops and remembers what cannot be written, and never raises an error."""

    lost: OSError | None = None
    """The first error of a write; a `BrokenPipeError` means that the reader stopped early, as `head` does."""

    def write(self, text: str, /) -> int:
        with self._remembering():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._remembering():
            super().flush()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.lost is None:
                # The rest of the buffer is discarded, also at the end of the process.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
                self.lost = error


class _CleanedStream(_Stream):
    """Standard error with every line cleaned, except for a progress bar, which draws on `bare`."""

    bare: io.TextIOWrapper

    def write(self, text: str, /) -> int:
        super().write(cleaned(text))
        return len(text)


class Streams:
    """Replaces standard output and error of this process until its end."""

    def __init__(self) -> None:
        codecs.register_error(_ESCAPING, _escaped)
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # The caller closed it.
                setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        if _is_own(sys.stdout, 1):
            name = sys.stdout.encoding
            encoding = "utf-8" if codecs.lookup(name).name == "ascii" else name
            by_lines = sys.stdout.line_buffering or sys.stdout.write_through
            sys.stdout = _Stream(sys.stdout.detach(), encoding, _ESCAPING, line_buffering=by_lines)
        if _is_own(sys.stderr, 2):
            encoding = sys.stderr.encoding
            stderr = _CleanedStream(sys.stderr.detach(), encoding, "backslashreplace", line_buffering=True)
            stderr.bare = _Stream(stderr.buffer, encoding, "backslashreplace", line_buffering=True)
            sys.stderr = stderr

    def lost_output(self) -> OSError | None:
        """Returns why standard output is incomplete; None if it is complete, or if its reader stopped early."""
        lost = None
        try:
            sys.stdout.flush()
            lost = getattr(sys.stdout, "lost", None)
        except OSError as error:  # Another stream than `_Stream`.
            lost = error
        if isinstance(lost, BrokenPipeError):
            return None
        return lost


def terminal() -> Console:
    """Returns a console on standard error for progress bars; text given to it must be `cleaned`."""
    from rich.console import Console

    if isinstance(sys.stderr, _CleanedStream):
        return Console(file=sys.stderr.bare)
    return Console(stderr=True)


def _is_own(stream: TextIO, descriptor: int) -> TypeGuard[io.TextIOWrapper]:
    """Returns whether this is the stream of the process, and not a replacement by a caller."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encodes text; undecodable bytes of paths stay unchanged, characters missing in the encoding become `\u2265`."""
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    if all("\udc80" <= c <= "\udcff" for c in part):
        return part.encode("ascii", "surrogateescape"), error.end
    return part.encode("ascii", "backslashreplace").decode("ascii"), error.end


OPTIONS_OF_OTHER_TOOLS = (
    ("--gpus --num-gpus --nproc --nproc-per-node --np --num-proc --world-size", "--ranks N (one rank per GPU)"),
    ("--nodes --num-nodes --nnodes", "--ranks N on this machine, or `dlbench submit` with --nodes N"),
    ("--batch-size --batch --per-device-batch-size", "--set train.batch_per_rank=N"),
    (
        "--epochs --max-epochs",
        "--to-accuracy and --set quality.max_epochs=N; throughput runs count measure.measured_steps",
    ),
    ("--steps --iterations --num-steps", "--set measure.measured_steps=N"),
    ("--lr --learning-rate", "--set train.optimizer.learning_rate=X"),
    ("--workers --num-workers", "--set data.loader_workers=N"),
    ("--amp --fp16 --bf16 --fp32 --tf32 --precision --dtype", "--set train.precision=bf16 (fp32, tf32, bf16, fp16)"),
)
"""Options of other tools, and their counterparts in `run` and `submit`."""


@dataclass(frozen=True, kw_only=True)
class CommandEnding:
    """The last line and exit code of a command."""

    code: int
    line: str = ""  # Printed on standard error, which cleans it; empty: nothing is printed.


def ending_of(error: BaseException) -> CommandEnding:
    """Returns the line and the exit code for an exception that reached the end of a command."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return CommandEnding(code=ExitCode.OK)
        if isinstance(error.code, int):
            return CommandEnding(code=int(error.code))
        return CommandEnding(code=ExitCode.DEFECT, line=str(error.code))
    if isinstance(error, click.ClickException):
        # Click uses other codes for some errors.
        return CommandEnding(code=ExitCode.USAGE, line=_words_of_click(error))
    # Click turns every EOFError into an abort like Ctrl-C; dlbench never prompts, so an EOFError comes from code that
    # reads a file.
    is_abort = isinstance(error, click.Abort) and not isinstance(error.__cause__, EOFError)
    if isinstance(error, KeyboardInterrupt) or is_abort:
        return CommandEnding(code=ExitCode.INTERRUPTED, line="dlbench: interrupted")
    if isinstance(error, DlbenchError):
        return CommandEnding(code=error.exit_code, line=_one_line(str(error)))
    if isinstance(error, OSError) and error.errno is not None:
        # The numbers of e.g. socket.gaierror are below zero.
        is_machine = error.errno in MACHINE_ERRORS or error.errno < 0
        code = ExitCode.ENVIRONMENT if is_machine else ExitCode.USAGE
        return CommandEnding(code=code, line=_one_line(os_error_words(error)))
    if isinstance(error, MemoryError):
        line = _one_line(f"not enough memory{_place(error)}; see also `ulimit -v`")
        return CommandEnding(code=ExitCode.ENVIRONMENT, line=line)
    if isinstance(error, RecursionError):
        return CommandEnding(code=ExitCode.INCOMPLETE, line=_one_line(f"data is nested too deeply{_place(error)}"))
    trace = "".join(traceback.format_exception(error))
    return CommandEnding(code=ExitCode.DEFECT, line=f"{trace}dlbench: this is a bug in dlbench")


def os_error_words(error: OSError) -> str:
    """Returns an operating system's error as text: the path or the place in dlbench, and the problem."""
    reason = error.strerror or str(error)
    path = error.filename
    if isinstance(path, bytes | str | os.PathLike):
        path_text = os.fsdecode(path) or "''"
        if isinstance(error.filename2, bytes | str):
            path_text += f" -> {os.fsdecode(error.filename2)}"
        return f"{path_text}: cannot be used: {reason}"
    if isinstance(error, FileNotFoundError) and not _has_working_directory():
        return "the working directory was deleted: change into a folder that exists"
    return f"{reason}{_place(error)}"


def _words_of_click(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        option_names = {name for param in error.ctx.command.params for name in param.opts}
        use = next((use for names, use in OPTIONS_OF_OTHER_TOOLS if error.option_name in names.split()), "")
        suggested_options = {word for word in use.split() if word.startswith("--")} - {error.option_name}
        # Only if this command has all options that the advice names.
        if use and option_names >= suggested_options:
            error = click.UsageError(f"No such option {error.option_name!r}: use {use}.", error.ctx)
    message = io.StringIO()
    error.show(file=message)
    return message.getvalue().rstrip("\n")


def _one_line(text: str) -> str:
    return f"dlbench: error: {printable(text)}"


def _place(error: BaseException) -> str:
    """Returns the innermost function of dlbench in a traceback, e.g. `, in dlbench.records.scan.run_folders`."""
    hint = ""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        module = step.tb_frame.f_globals.get("__name__", "")
        if module.startswith("dlbench.") and not module.startswith("dlbench.cli.streams"):
            hint = f", in {module}.{step.tb_frame.f_code.co_name}"
        step = step.tb_next
    return hint


def _has_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109  # only the error is of interest
    except OSError:
        return False
    return True
