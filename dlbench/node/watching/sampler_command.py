"""What the sampler of a node is told: at its start, the first line on its standard input, JSON; later; and to end."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

GRACE_S = 5.0
"""How long a call that hangs may keep the sampler alive after SIGTERM: it must not outlive its rank."""

_TERMINATED = 128 + signal.SIGTERM
_MAX_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SamplerOrder:
    """One node's sampler."""

    run_id: str
    samples: str
    """Path of the file of samples, which does not exist yet."""
    clock: str
    """Path of `clock.json`."""
    node_rank: int
    num_nodes: int
    host: str
    token: str
    """The same on all nodes of one start of the run."""
    period_s: float
    max_bytes: int
    """Limit of the file of samples."""
    cores: tuple[int, ...]
    """Cores the sampler binds itself to; none: those it has."""
    interface: str | None
    """Network interface at which node 0 answers about its clock; none: the one that routes."""
    parent: int = 0
    """Number of the process that starts it and without which it ends; 0: it is not started directly."""

    def to_line(self) -> bytes:
        """The order as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> SamplerOrder:
        """The order of a line.

        Raises:
            ValueError: not a line of `to_line`.
        """
        try:
            content: dict[str, Any] = json.loads(line)
            return cls(**{**content, "cores": tuple(content["cores"])})
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"not a sampler's order: {error}") from None


def await_termination() -> int:
    """A pipe that is readable from the first SIGTERM on; whoever waits at it can end in order.

    An exception out of a signal's handler could come at any place, in the middle of writing too.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    def end() -> None:
        select.select([told], [], [])
        time.sleep(GRACE_S)
        os._exit(_TERMINATED)

    threading.Thread(target=end, name="termination", daemon=True).start()
    return told


class Commands:
    """Lines of a pipe, without a thread that would wake for each.

    Args:
        descriptor: of the pipe.
        termination: becomes readable when the process is to end.
    """

    def __init__(self, descriptor: int, termination: int) -> None:
        self._descriptor = descriptor
        self._termination = termination
        self._rest = b""

    def line(self, wait_s: float | None) -> bytes | None:
        """The next line, after waiting so long for it at most (None: without end); None if there is none yet.

        Raises:
            EOFError: the writer is gone.
            SystemExit: the process is to end.
        """
        if b"\n" not in self._rest:
            ready, _, _ = select.select([self._descriptor, self._termination], [], [], wait_s)
            if self._termination in ready:
                raise SystemExit(_TERMINATED)
            if not ready:
                return None
            more = os.read(self._descriptor, 65536)
            if not more or len(self._rest) > _MAX_LINE:
                raise EOFError
            self._rest += more
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        return line
