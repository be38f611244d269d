"""The control channel by which ranks agree on the next step, and a deadline for libraries that hang."""

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

LATE_S = 5.0  # Added to the timeout, so that calls that have one end by themselves.
_POLL_S = 0.5  # Polling interval of the deadline.


class Control:
    """A gloo group over all ranks. Every call takes its purpose, which the error names if a rank is gone."""

    def __init__(self, place: RankPlace, timeout_s: float, rendezvous_s: float) -> None:
        """Takes timeouts in seconds: `rendezvous_s` until all ranks are connected, `timeout_s` for any later wait."""
        self._place = place
        self._patience = datetime.timedelta(seconds=rendezvous_s)
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def start(self, folder: RunFolder, interface: str | None) -> None:
        """Connects to the other ranks by the run's shared folder; `interface` None: gloo uses the one to rank 0."""
        place = self._place
        self._store = store = meet(folder.rendezvous, place, interface, self._patience)
        try:
            # Ranks may start minutes apart; from here on the short timeout is used.
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=self._timeout)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {place.rank}: not all {place.size} ranks connected: {first_line(error)}"
            ) from None

    def new_group(self, backend: str, purpose: str) -> dist.ProcessGroup:
        try:
            group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=self._timeout)
        except RuntimeError as error:
            raise passed_on(f"rank {self._place.rank}, {purpose}: {first_line(error)}", error) from None
        return group

    def gather(self, purpose: str, value: Any) -> list[Any]:
        """Returns the JSON-serialisable `value` of every rank, by rank; raises `RunError` if a rank is gone."""
        try:
            return gather_over_torch(value, self._place.size)
        except RuntimeError as error:
            raise self._lost(purpose, error) from None

    def barrier(self, purpose: str) -> None:
        try:
            dist.barrier()
        except RuntimeError as error:
            raise self._lost(purpose, error) from None

    def stop(self) -> None:
        """Leaves all groups; only after success, because it waits for all ranks."""
        dist.destroy_process_group()

    def _lost(self, purpose: str, error: BaseException) -> PeerLostError:
        return PeerLostError(f"rank {self._place.rank}, {purpose}: another rank is gone or stuck: {first_line(error)}")


class Deadline:
    """A thread that ends the process if the current call takes too long."""

    def __init__(self, rank: int, timeout_s: float, on_expiry: Callable[[str], None] | None = None) -> None:
        """Takes the timeout; `on_expiry` gets the reason in one line before the process ends with exit code 124."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._on_expiry = on_expiry
        self._call: tuple[str, float] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlbench-deadline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, purpose: str) -> None:
        self._call = (purpose, time.monotonic())

    def end(self) -> None:
        self._call = None

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            call = self._call
            if call is None:
                continue
            purpose, began = call
            if time.monotonic() - began < self._timeout_s + LATE_S:
                continue
            reason = (
                f"rank {self._rank}, {purpose}: not done within {self._timeout_s:g} s; another rank is gone or stuck"
            )
            print(f"dlbench: error: {reason}", file=sys.stderr, flush=True)
            try:
                if self._on_expiry is not None:
                    self._on_expiry(reason)
            finally:
                os._exit(int(ExitCode.TIMEOUT))
