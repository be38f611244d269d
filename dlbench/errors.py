"""What can go wrong on purpose: errors that end in one clear line and a documented exit code.

Everything raised as a `DlbenchError` is shown to the person as its message alone, without a
traceback, and so is an operating system's error (`dlbench.cli.streams`); any other exception is a defect
of dlbench and keeps its traceback.
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
"""What another path would not mend: the machine lacks space, memory, descriptors, a device that works, a network."""


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
    """The machine lacks something the request needs."""
    INCONCLUSIVE = 6
    """Too noisy, or too few samples to say."""
    DEFECT = 70
    """A defect of dlbench; standard error has its traceback (EX_SOFTWARE of sysexits.h)."""
    REQUEUE = 75
    """Checkpointed, wants to be requeued (EX_TEMPFAIL of sysexits.h)."""
    TIMEOUT = 124
    """Stopped by a time limit or by the watchdog."""
    INTERRUPTED = 130
    """Stopped by the user's Ctrl-C (128 + SIGINT, as shells say it)."""


class DlbenchError(Exception):
    """Base of all errors that are shown as one line; `exit_code` is what the command ends with."""

    exit_code: ExitCode = ExitCode.RUN_FAILED


class UserError(DlbenchError):
    """Wrong input: the message names the file, the key and what would be right."""

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
    """The operating system refused what no other path would mend, e.g. for lack of space: one of `MACHINE_ERRORS`."""


def refused(error: Exception, words: str, otherwise: type[DlbenchError] = RunError) -> DlbenchError:
    """What a file that cannot be made or written is to a person: a `MachineError`, or `otherwise`, with these words."""
    return (MachineError if getattr(error, "errno", None) in MACHINE_ERRORS else otherwise)(words)


class StalledError(DlbenchError):
    """Nothing moved for longer than the allowed time."""

    exit_code = ExitCode.TIMEOUT


def first_line(error: BaseException) -> str:
    """A library's message as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def close_names(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Returns the right names that a wrong one may stand for: by last part, else by its beginning, else by spelling."""
    names = sorted(set(known))
    wanted = _last_part(name)
    if same := [one for one in names if _last_part(one) == wanted]:
        return same[:limit]
    if len(wanted) > 3 and (begun := [one for one in names if _last_part(one).startswith(wanted)]):
        return begun[:limit]
    if alike := difflib.get_close_matches(name, names, n=limit, cutoff=0.5):
        return alike
    parts = difflib.get_close_matches(wanted, {_last_part(one) for one in names}, n=limit, cutoff=0.7)
    return [one for part in parts for one in names if _last_part(one) == part][:limit]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def nearest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Returns e.g. ``did you mean batch_per_rank?`` or, if nothing is near, the list of what is known."""
    names = sorted(set(known))
    if close := close_names(name, names, limit):
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(names)}" if names else "nothing is known here"
