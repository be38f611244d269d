"""A program of the compute side that answers one order: JSON goes in, JSON comes out.

It loads torch, and front ends do not; so it is named, and runs as a process of its own, under a supervisor, as ranks
do, so that nothing of it is left whatever ends this process.
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
"""Programs; each says what its order is."""
S = TypeVar("S", bound=Spec)
_PREFIX = "dlbench: error: "
_KINDS: Mapping[int, type[DlbenchError]] = {
    ExitCode.USAGE: UserError,
    ExitCode.INCOMPLETE: IncompleteDataError,
    ExitCode.ENVIRONMENT: EnvironmentLacksError,
    ExitCode.TIMEOUT: StalledError,
}


def supervised(python: str, module: str) -> list[str]:
    """A module of the compute side under its supervisor."""
    return [python, "-P", "-m", "dlbench.supervisor", "-m", module]


def answer_of(command: Sequence[str], order: Mapping[str, Any], kind: type[S], who: str) -> S:
    """Gives a program its order; returns its answer when it has ended.

    `command`: the program, as `supervised` makes it. `order`: ready for JSON; its standard input. `kind`: what the last
    line that it prints holds. `who`: whose process it is, for messages.
    Raises `UserError`: the program refuses the order; likewise its other `DlbenchError`s, by their exit codes.
    `EnvironmentLacksError`: the program cannot be started, or the machine lacks something. `RunError`: it died, or its
    answer is none. `KeyboardInterrupt`: after everything that it started has ended.
    """
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
        code = process.returncode
        errors = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
        own_words = next((line for line in reversed(errors) if line.startswith(_PREFIX)), "")
        if own_words:
            raise _KINDS.get(code, RunError)(own_words.removeprefix(_PREFIX))
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        last = f": {errors[-1][:300]}" if errors else ""
        raise RunError(f"{who} {how}{last}")
    lines = answer.decode("utf-8", "replace").strip().splitlines()
    try:
        return kind.model_validate_json(lines[-1] if lines else "")
    except ValidationError as error:
        raise RunError(f"{who} answered nothing that can be read: {problem_of(kind, error)}") from None


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
