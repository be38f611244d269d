"""Errors that end a command with one line and a documented exit code.

A `DlbenchError` and an operating system's error (`dlbench.cli.streams`) are printed without a traceback; any other
exception is a defect of dlbench and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from enum import IntEnum

MACHINE_ERRORS = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOLCK"),
        *("ENOSYS", "ETXTBSY", "EBUSY", "EREMOTEIO", "ENOTCONN", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED"),
        *("EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EADDRINUSE", "EADDRNOTAVAIL", "ETIMEDOUT", "EPIPE"),
    )
)
"""Errors that another path does not avoid: no space, memory, descriptors, working device or network."""


class ExitCode(IntEnum):
    """Exit codes of every dlbench command. Never a count."""

    OK = 0
    """Success."""
    REGRESSION = 1
    """A regression or a failed check."""
    USAGE = 2
    """Wrong usage or configuration."""
    RUN_FAILED = 3
    """A run failed, or failed its sanity check."""
    INCOMPLETE = 4
    """Incomplete or corrupted data."""
    ENVIRONMENT = 5
    """The machine lacks something that the request needs."""
    INCONCLUSIVE = 6
    """Inconclusive: too noisy, or too few samples."""
    DEFECT = 70
    """A defect of dlbench; standard error has its traceback (EX_SOFTWARE of sysexits.h)."""
    REQUEUE = 75
    """Checkpointed, to be requeued (EX_TEMPFAIL of sysexits.h)."""
    TIMEOUT = 124
    """Stopped by a time limit or by the watchdog."""
    INTERRUPTED = 130
    """Stopped by the user's Ctrl-C (128 + SIGINT, as in shells)."""


class DlbenchError(Exception):
    """Base of all errors that are printed as one line; `exit_code` is that of the command."""

    exit_code: ExitCode = ExitCode.RUN_FAILED


class UserError(DlbenchError):
    """Wrong input: the message names the file, the key and the remedy."""

    exit_code = ExitCode.USAGE


class RunError(DlbenchError):
    """A run failed, or its result did not pass the sanity check."""

    exit_code = ExitCode.RUN_FAILED


class PeerLostError(RunError):
    """This rank lost another rank, or waited for it too long: a consequence, not the cause."""


class IncompleteDataError(DlbenchError):
    """A record is missing, truncated or unreadable."""

    exit_code = ExitCode.INCOMPLETE


class EnvironmentLacksError(DlbenchError):
    """The machine lacks a program, a library or a device; the message names the remedy."""

    exit_code = ExitCode.ENVIRONMENT


class MachineError(EnvironmentLacksError, RunError):
    """The operating system refused with one of `MACHINE_ERRORS`, which another path does not avoid."""


def refused(error: Exception, words: str, otherwise: type[DlbenchError] = RunError) -> DlbenchError:
    """Returns the error for a file that cannot be written: a `MachineError`, or `otherwise`, with these words."""
    if getattr(error, "errno", None) in MACHINE_ERRORS:
        return MachineError(words)
    return otherwise(words)


class StalledError(DlbenchError):
    """Nothing moved for longer than the allowed time."""

    exit_code = ExitCode.TIMEOUT


def first_line(error: BaseException) -> str:
    """Returns the first line of a library's message, or the name of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def close_names(name: str, existing: Iterable[str], limit: int = 3) -> list[str]:
    """Returns the existing names that a wrong one may mean: by its last part, its beginning, or its spelling."""
    names = sorted(set(existing))
    last_part = _last_part(name)
    matches = [candidate for candidate in names if _last_part(candidate) == last_part]
    if not matches and len(last_part) > 3:
        matches = [candidate for candidate in names if _last_part(candidate).startswith(last_part)]
    if not matches:
        matches = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    if not matches:
        for part in difflib.get_close_matches(last_part, set(map(_last_part, names)), n=limit, cutoff=0.7):
            matches += [candidate for candidate in names if _last_part(candidate) == part]
    return matches[:limit]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def nearest(name: str, existing: Iterable[str], limit: int = 3) -> str:
    """Returns e.g. ``did you mean batch_per_rank?`` or, without a similar name, the list of existing names."""
    names = sorted(set(existing))
    close = close_names(name, names, limit)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(names)}" if names else "there are none"
