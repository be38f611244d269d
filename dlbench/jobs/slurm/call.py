"""Runs one of Slurm's programs, bounded in time, in a session of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from dlbench.jobs.slurm.environment import client_environment

CALL_TIMEOUT_S = 60


def call(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, keep_open: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a program of Slurm and keeps what it says.

    Args:
        command: the program and its arguments.
        environment: its variables; None: those of this process without what Slurm's programs take for options.
        keep_open: descriptors that it inherits.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: no answer within `CALL_TIMEOUT_S`.
    """
    return subprocess.run(
        command,
        # As this process finds it, whatever PATH it gets.
        executable=shutil.which(command[0]),
        env=client_environment() if environment is None else environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=CALL_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        # Of its own session: neither Ctrl-C nor a terminal that closes may cut off a submission.
        start_new_session=True,
        pass_fds=keep_open,
    )
