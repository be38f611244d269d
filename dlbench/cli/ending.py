"""How a command ends: any exception becomes a line and a documented exit code.

A mistake, a full disk and a machine that lacks something end in one line. 1 is a verdict (a regression) and comes from
a command that says so, never from an exception. A defect of dlbench keeps its traceback and ends with 70.
"""

from __future__ import annotations

import io
import os
import traceback
from dataclasses import dataclass
from types import TracebackType

import click

from dlbench.errors import MACHINE_ERRORS, DlbenchError, ExitCode

GUESSES = (
    ("--gpus --num-gpus --nproc --nproc-per-node --np --num-proc --world-size", "--ranks N (a rank a GPU)"),
    ("--batch-size --batch --per-device-batch-size", "--set train.batch_per_rank=N"),
    (
        "--epochs --max-epochs",
        "--to-accuracy and --set quality.max_epochs=N; a run of speed counts measure.measured_steps",
    ),
    ("--steps --iterations --num-steps", "--set measure.measured_steps=N"),
    ("--lr --learning-rate", "--set train.optimizer.learning_rate=X"),
    ("--workers --num-workers", "--set data.loader_workers=N"),
    ("--amp --fp16 --bf16 --fp32 --tf32 --precision --dtype", "--set train.precision=bf16 (fp32, tf32, bf16, fp16)"),
)
"""Options that people know from elsewhere, and what `run` and `submit` have for them."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a command ends with."""

    code: int
    line: str = ""
    """What is said on standard error; empty: nothing. Not cleaned: standard error does that."""


def ending_of(error: BaseException) -> Ending:
    """The line and the exit code of an exception that reached the end of a command."""
    if isinstance(error, SystemExit):
        return _of_exit(error)
    if isinstance(error, click.ClickException):
        # Wrong usage, whatever code click has for it.
        return Ending(code=ExitCode.USAGE, line=_words_of_click(error))
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, click.Abort) and not _is_end_of_file(error)):
        return Ending(code=ExitCode.INTERRUPTED, line="dlbench: interrupted")
    if isinstance(error, DlbenchError):
        return Ending(code=error.exit_code, line=_one_line(str(error)))
    if isinstance(error, OSError) and error.errno is not None:
        return Ending(code=_code_of(error), line=_one_line(os_error_words(error)))
    if isinstance(error, MemoryError):
        return Ending(
            code=ExitCode.ENVIRONMENT, line=_one_line(f"not enough memory{_place(error)}; see also `ulimit -v`")
        )
    if isinstance(error, RecursionError):
        return Ending(code=ExitCode.INCOMPLETE, line=_one_line(f"something is nested too deeply{_place(error)}"))
    told = "".join(traceback.format_exception(error))
    return Ending(code=ExitCode.DEFECT, line=f"{told}dlbench: this is a defect of dlbench")


def os_error_words(error: OSError) -> str:
    """An operating system's error for a person: the path, else where it happened, and what is wrong."""
    what = error.strerror or str(error)
    path = error.filename
    if isinstance(path, bytes | str | os.PathLike):
        named = os.fsdecode(path) or "''"
        if isinstance(error.filename2, bytes | str):
            named += f" -> {os.fsdecode(error.filename2)}"
        return f"{named}: cannot be used: {what}"
    if isinstance(error, FileNotFoundError) and not _has_working_directory():
        return "the working directory is gone: change into a folder that exists"
    return f"{what}{_place(error)}"


def _of_exit(error: SystemExit) -> Ending:
    if error.code is None:
        return Ending(code=ExitCode.OK)
    if isinstance(error.code, int):
        return Ending(code=int(error.code))
    return Ending(code=ExitCode.DEFECT, line=str(error.code))


def _words_of_click(error: click.ClickException) -> str:
    """Usage, hint and error, as click shows them."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        known = {name for param in error.ctx.command.params for name in param.opts}
        use = next((use for names, use in GUESSES if error.option_name in names.split()), "")
        if use and known.issuperset(word for word in use.split() if word.startswith("--")):
            error = click.UsageError(f"No such option {error.option_name!r}: use {use}.", error.ctx)
    said = io.StringIO()
    error.show(file=said)
    return said.getvalue().rstrip("\n")


def _is_end_of_file(error: click.Abort) -> bool:
    """Click makes Ctrl-C of every EOFError; dlbench asks nothing, so that one is a reader's."""
    return isinstance(error.__cause__, EOFError)


def _code_of(error: OSError) -> ExitCode:
    # socket.gaierror and the like have numbers of their own, below zero.
    is_machine = error.errno in MACHINE_ERRORS or error.errno is None or error.errno < 0
    return ExitCode.ENVIRONMENT if is_machine else ExitCode.USAGE


def _one_line(text: str) -> str:
    return "dlbench: error: " + "".join(c if c.isprintable() else " " for c in text)


def _place(error: BaseException) -> str:
    """The innermost function of dlbench on the way to an error, e.g. `, in dlbench.records.scan.run_folders`."""
    found = ""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        module = step.tb_frame.f_globals.get("__name__", "")
        if module.startswith("dlbench.") and not module.startswith("dlbench.cli.streams"):
            found = f", in {module}.{step.tb_frame.f_code.co_name}"
        step = step.tb_next
    return found


def _has_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109  # of Path.cwd() nothing else is wanted
    except OSError:
        return False
    return True
