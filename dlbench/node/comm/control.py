"""How ranks agree on what comes next: a channel of its own, apart from the messages that are measured.

A rank whose library waits for ever is ended: MPI's blocking calls and NCCL's know no deadline.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dlbench.errors import ExitCode, PeerLostError, first_line
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.groups import gather_over_torch
from dlbench.node.sync.run_store import meet
from dlbench.records.folder import RunFolder

LATE_S = 5.0  # How much later than a call's own deadline, so that calls that have one end by themselves.
_LOOK_S = 0.5  # Between two looks at the call under way.


class Control:
    """A gloo group over all ranks. Every call names what it is for, for the error where a rank is gone."""

    def __init__(self, place: RankPlace, timeout_s: float, meeting_s: float) -> None:
        """`meeting_s` is the longest wait until all ranks have met, `timeout_s` any later one, seconds."""
        self._place = place
        self._meeting_s = meeting_s
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def start(self, folder: RunFolder, interface: str | None) -> None:
        """Meets the other ranks through the run's folder, which all see. `interface`: for gloo; None: the one that
        routes to rank 0.
        """
        place = self._place
        patience = datetime.timedelta(seconds=self._meeting_s)
        self._store = store = meet(folder.rendezvous, place, interface, patience)
        try:
            # Ranks may start minutes apart; from here on the short timeout holds.
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=self._timeout)
        except RuntimeError as error:
            raise PeerLostError(f"rank {place.rank}: not all {place.size} ranks met: {first_line(error)}") from None

    def new_group(self, backend: str, what: str) -> dist.ProcessGroup:
        """Another group of all ranks, for messages that are measured."""
        try:
            group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=self._timeout)
        except RuntimeError as error:
            raise passed_on(f"rank {self._place.rank}, {what}: {first_line(error)}", error) from None
        return group

    def gather(self, what: str, value: Any) -> list[Any]:
        """`value` (JSON-like) of every rank, by rank, on every rank. Raises `RunError`: a rank is gone or stuck."""
        try:
            return gather_over_torch(value, self._place.size)
        except RuntimeError as error:
            raise self._lost(what, error) from None

    def barrier(self, what: str) -> None:
        try:
            dist.barrier()
        except RuntimeError as error:
            raise self._lost(what, error) from None

    def stop(self) -> None:
        """Leaves all groups; only after success, since ranks that are gone would be waited for."""
        dist.destroy_process_group()

    def _lost(self, what: str, error: BaseException) -> PeerLostError:
        return PeerLostError(f"rank {self._place.rank}, {what}: another rank is gone or stuck: {first_line(error)}")


class Deadline:
    """A thread that looks whether the call under way has gone on for too long."""

    def __init__(self, rank: int, timeout_s: float, on_expiry: Callable[[str], None] | None = None) -> None:
        """`on_expiry` gets the reason in one line; afterwards the process ends with exit code 124."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._on_expiry = on_expiry
        self._call: tuple[str, float] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlbench-deadline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, what: str) -> None:
        self._call = (what, time.monotonic())

    def end(self) -> None:
        self._call = None

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            call = self._call
            if call is None or time.monotonic() - call[1] < self._timeout_s + LATE_S:
                continue
            reason = (
                f"rank {self._rank}, {call[0]}: not done within {self._timeout_s:g} s; another rank is gone or stuck"
            )
            print(f"dlbench: error: {reason}", file=sys.stderr, flush=True)
            try:
                if self._on_expiry is not None:
                    self._on_expiry(reason)
            finally:
                os._exit(int(ExitCode.TIMEOUT))
