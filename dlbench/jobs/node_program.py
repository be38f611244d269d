"""Runs a program of `dlbench.node` for one request: JSON on its standard input, JSON on its standard output.

Such a program imports torch, which the command line does not. It runs under a supervisor, so that none of its processes
survives the end of this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

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
from dlbench.specs.base import Spec
from dlbench.specs.problems import problem_of

READING = "dlbench.node.data.reader_rate"
PROFILE = "dlbench.node.out_of_core_profile"
"""Modules of such programs; each documents its request."""
S = TypeVar("S", bound=Spec)
_PREFIX = "dlbench: error: "
_KINDS: Mapping[int, type[DlbenchError]] = {
    ExitCode.USAGE: UserError,
    ExitCode.INCOMPLETE: IncompleteDataError,
    ExitCode.ENVIRONMENT: EnvironmentLacksError,
    ExitCode.TIMEOUT: StalledError,
}


def supervised(python: str, module: str) -> list[str]:
    """Returns the command that runs a module of `dlbench.node` under a supervisor."""
    return [python, "-P", "-m", "dlbench.supervisor", "-m", module]


def answer_of(command: Sequence[str], order: Mapping[str, Any], kind: type[S], who: str) -> S:
    """Sends a request to a program; returns its answer when it has ended.

    `command`: the program, from `supervised`. `order`: the request, which becomes JSON. `kind`: type of the answer,
    which is the last line that it prints. `who`: name of the process in messages.
    Raises `UserError`: the program refuses the request; also its other `DlbenchError`s, by their exit codes.
    `EnvironmentLacksError`: the program cannot be started, or the machine lacks something. `RunError`: it died, or its
    answer cannot be read. `KeyboardInterrupt`: after all its processes have ended.
    """
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, "DLBENCH_PARENT": str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # In a new session, so that Ctrl-C reaches only this process.
            start_new_session=True,
        )
    except OSError as error:
        raise cannot_start(command[0], error) from None
    try:
        stdout, stderr = process.communicate(json.dumps(order).encode())
    finally:
        _end(process)
    if process.returncode != 0:
        raise _error(process.returncode, stderr.decode("utf-8", "replace").splitlines(), who)
    last_line = stdout.decode("utf-8", "replace").strip().rpartition("\n")[2]
    try:
        return kind.model_validate_json(last_line)
    except ValidationError as error:
        raise RunError(f"{who} gave an answer that cannot be read: {problem_of(kind, error)}") from None


def _error(code: int, lines: Sequence[str], who: str) -> DlbenchError:
    for line in reversed(lines):
        if line.startswith(_PREFIX):
            return _KINDS.get(code, RunError)(line.removeprefix(_PREFIX))
    text = f"{who} ended with {code}"
    if code < 0:
        text = f"{who} was ended by signal {signal.Signals(-code).name}"
    messages = [line for line in lines if line.strip()]
    if messages:
        text = f"{text}: {messages[-1][:300]}"
    return RunError(text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the supervisor, which ends all its processes; does nothing if it has ended."""
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
