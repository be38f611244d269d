"""An exception that ends a rank becomes one line, an exit code, and whether the rank is a cause or lost another one.

torch, Gloo, NCCL and Horovod wrap a cause into frames, places in their sources and advice. The line holds the cause;
the whole text belongs into the rank's log.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from dlbench.errors import DlbenchError, ExitCode, PeerLostError
from dlbench.records.status import FailureKind

MAX_CHARACTERS = 200
"""Of a library's words; what dlbench says itself may be longer."""
_MAX_OWN_CHARACTERS = 500

_WRAPPING = (
    r"Got the following error when running the callback: ",
    r"\[(?:rank|Rank) ?\d+\]:? ?",
    # A place in a source: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]
    r"\[?(?:/|\.\./)[\w./+-]+\.(?:cc|cpp|cu|h|hpp):\d+\]?:? ?",
    r"\[enforce fail at [^\]]*\]\.? ?",
    r"^(?:RuntimeError: )+(?=RuntimeError: )",
)
_TAILS = (
    r"\.? This is typically caused by a remote worker crashing.*",
    r" GLHF!.*",
    r" At: /.*",
    r" ?\(?Exception raised from .*",
    r" frame #\d+: .*",
    r" This was caused by an exception on one of the ranks or an attempt to .*",
    r" ?If reserved but unallocated memory is large .*",
    r" ?To change the (?:timeout|shared memory).*",
    r"\.? Details are lost due to multiprocessing.*",
)
_PEER = re.compile(
    r"Connection (?:reset|closed|refused|was likely closed)|Broken pipe|connection was closed|Socket Timeout"
    r"|[Tt]imed out waiting|Read error \[|Write error \[|Horovod has been shut down|ncclRemoteError|remote process exit"
    r"|another rank is gone|Application timeout caused pair closure|Stop_waiting response is expected"
    r"|failed to recv, got 0 bytes|[Cc]onnectFullMesh failed|Wait timeout|aborted because .* peer",
)
_ADVICE = {
    "OutOfMemoryError": "a smaller train.batch_per_rank needs less",
    "MemoryError": "a smaller train.batch_per_rank or fewer ranks per node need less",
}


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why a rank ends."""

    reason: str
    """One line."""
    exit_code: ExitCode
    kind: FailureKind
    whole: str = ""
    """All that the library said, where the reason is less."""


def failure_of(error: BaseException) -> RankFailure:
    """What a rank says of the exception that ends it."""
    kind: FailureKind = "peer" if any(_is_of_peer(each) for each in _chain(error)) else "own"
    said = " ".join(str(error).split())
    code = error.exit_code if isinstance(error, DlbenchError) else ExitCode.RUN_FAILED
    if isinstance(error, DlbenchError):
        reason = condensed(said) if kind == "peer" else _cut(said, _MAX_OWN_CHARACTERS)
    elif isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("dlbench"):
        code = ExitCode.ENVIRONMENT
        reason = (
            f"{sys.executable} has no module {error.name}: pip install 'dlbench[node]' there, or name the Python that "
            "has it with `python` in the system file"
        )
    elif isinstance(error, OSError) and error.strerror and error.filename is not None:
        reason = f"{error.filename}: {error.strerror}"
    else:
        name = type(error).__name__
        words = condensed(said)
        reason = f"{name}: {words}" if words else name
        if name in _ADVICE:
            reason += f"; {_ADVICE[name]}"
    return RankFailure(reason=reason, exit_code=code, kind=kind, whole="" if said in reason else str(error))


def condensed(text: str) -> str:
    """The cause in a library's words, one line of at most `MAX_CHARACTERS`."""
    words = " ".join(text.split())
    for pattern in _TAILS:
        words = re.sub(pattern, "", words)
    for pattern in _WRAPPING:
        words = re.sub(pattern, "", words)
    return _cut(re.sub(r"^RuntimeError: ", "", words).strip(" .") or " ".join(text.split()), MAX_CHARACTERS)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 4].rpartition(" ")[0] + " ..."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from or for."""
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        yield step
        seen.add(id(step))
        step = step.__cause__ or step.__context__


def _is_of_peer(error: BaseException) -> bool:
    if isinstance(error, (PeerLostError, ConnectionError)):
        return True
    # A library's own words, or a RunError that passes them on.
    return isinstance(error, RuntimeError | DlbenchError) and _PEER.search(str(error)) is not None
