"""Runs one of Slurm's programs, bounded in time, in a session of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

CALL_TIMEOUT_S = 60


def call(command: Sequence[str], *, keep_open: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program of Slurm and keeps what it says.

    Args:
        command: the program and its arguments.
        keep_open: descriptors that it inherits.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: no answer within `CALL_TIMEOUT_S`.
    """
    return subprocess.run(
        command,
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
