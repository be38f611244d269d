"""The pure reader benchmark, run as a process of its own: an order goes in, rates come out.

It runs under a supervisor, as ranks do, so that nothing of it is left whatever ends this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from dlbench.errors import (
    DlbenchError,
    EnvironmentLacksError,
    ExitCode,
    IncompleteDataError,
    RunError,
    StalledError,
    UserError,
)
from dlbench.jobs.processes import END_S, cannot_start
from dlbench.records.reading_rate import ReadingRate

MODULE = "dlbench.node.data.reading.rate"
"""The program, by name: it loads torch, and the desk does not."""

_PREFIX = "dlbench: error: "
_KINDS: Mapping[int, type[DlbenchError]] = {
    ExitCode.USAGE: UserError,
    ExitCode.INCOMPLETE: IncompleteDataError,
    ExitCode.ENVIRONMENT: EnvironmentLacksError,
    ExitCode.TIMEOUT: StalledError,
}


def reader_command(python: str) -> list[str]:
    """The program under its supervisor."""
    return [python, "-P", "-m", "dlbench.supervisor", "-m", MODULE]


def reading_rate(order: Mapping[str, Any], python: str) -> ReadingRate:
    """Reads as the order says; returns when all its repeats are done.

    Args:
        order: as `dlbench.node.data.reading.rate` wants it, ready for JSON.
        python: the interpreter of the compute side.

    Raises:
        UserError: the data set is missing or does not fit the model.
        IncompleteDataError: samples are damaged.
        EnvironmentLacksError: the program cannot be started, or the machine lacks something.
        RunError: it died, or its answer is none.
        KeyboardInterrupt: after everything that it started has ended.
    """
    command = reader_command(python)
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, "DLBENCH_PARENT": str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Of its own session, so that Ctrl-C reaches this process alone.
            start_new_session=True,
        )
    except OSError as error:
        raise cannot_start(command[0], error) from None
    try:
        answer, said = process.communicate(json.dumps(order).encode())
    finally:
        _end(process)
    if process.returncode != 0:
        raise _failed(process.returncode, said)
    return _read(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the supervisor, which ends all that it started; at once where it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _failed(code: int, said: bytes) -> DlbenchError:
    """The error that the program ended with."""
    lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if line.startswith(_PREFIX)), "")
    if told:
        return _KINDS.get(code, RunError)(told.removeprefix(_PREFIX))
    how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    last = f": {lines[-1][:300]}" if lines else ""
    return RunError(f"the readers' process {how}{last}")


def _read(answer: bytes) -> ReadingRate:
    lines = answer.decode("utf-8", "replace").strip().splitlines()
    try:
        return ReadingRate.model_validate_json(lines[-1] if lines else "")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its answer"
        raise RunError(f"the readers' process answered nothing that can be read: {where}: {first['msg']}") from None
