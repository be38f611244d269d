"""How far a rank is: status files, rank 0's lines for whoever watches, and the watchdog that ends one that hangs.

One status file for a node: its first rank collects what the others say at an abstract Unix socket, and writes it. Files
are written between stages of a run and never in measured steps: a thousand ranks that each renew a file are hundreds of
operations a second on one metadata server, next to the very steps that are measured. What a rank was doing when it
ended without a word is written by its supervisor (`dlbench.final_status`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dlbench.errors import ExitCode, RunError
from dlbench.final_status import STEP, TIME, FinalStatus
from dlbench.node.local_sockets import is_own_user, socket_address
from dlbench.node.ranks import RankPlace
from dlbench.records.files import json_text
from dlbench.records.folder import RunFolder
from dlbench.records.status import (
    PROGRESS_MARK,
    SIGN_PERIOD_S,
    FailureKind,
    NodeStatuses,
    RankStatus,
    Stage,
    write_node_statuses,
    write_status,
)
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.units import format_bytes, utc_now, utf8_text

PLAIN_PERIOD_S = 10.0
LAUNCHER_PERIOD_S = 0.5
_TICK_S = 1.0
_SOME_STEP = -9_007_199_254_740_991  # Stands for the step in a text that is filled in later.
LAST_RESORT_S = 30  # How long the status of a stalled rank may take to write.
_MESSAGE_BYTES = 1 << 16
_LOOK_S = 0.002
_MEET_S = {"measuring": 0.5, "done": 2.0}
"""How long the first rank waits for the others' word of a stage into which all go together. None of it is measured: a
barrier follows the one, the other is the end."""
ALONE_AFTER_S = 5.0  # When a rank that does not reach its node's first writes its own file: containers part networks.
ENDED = ("done", "failed")


class ProgressReporter:
    """Counts steps of training, or points of the collective benchmark.

    Files are written where a stage begins, by one rank of the node; how far the rank is within a stage it notes in
    memory (`dlbench.final_status`).
    """

    def __init__(self, plan: LaunchPlan, folder: RunFolder, place: RankPlace) -> None:
        self._run_id = plan.run_id
        self._folder = folder
        self._place = place
        # What is counted, how many of them are warm-up, and how many there are, as far as the plan says.
        if isinstance(plan, RunPlan):
            self._counted, self._warmup = "step", plan.measure.warmup_steps
            self._total = self._warmup + plan.measure.measured_steps
        else:
            assert isinstance(plan, CommPlan)
            self._counted, self._warmup = "point", 0
            self._total = (len(plan.comm.algorithms) + len(plan.comm.backends)) * len(plan.comm.sizes)
        self._for_launcher = os.environ.get("DLBENCH_PROGRESS") == "launcher"
        self._told = 0.0
        self._text = ""
        self._lock = threading.Lock()
        self._final = FinalStatus.found(os.environ)
        self._node = NodeStatus(folder, place)
        self.step = -1
        self.stage: Stage = "starting"
        # Of its own: a hung file system must not disarm the watchdog.
        threading.Thread(target=self._ticks, name="dlbench-tick", daemon=True).start()

    def expect(self, steps: int, warmup: int) -> None:
        """Notes how many steps there will be at most, which not every plan says, and how many are warm-up."""
        self._total, self._warmup = steps, warmup
        if self.stage == "measuring" and self.step < warmup:  # it was lengthened at its end
            with self._lock:
                self.stage = "warm-up"
                self._note()

    def enter(self, stage: Stage, exit_code: int | None = None) -> None:
        """A new stage begins; the first rank of a node has that on disk when this returns."""
        with self._lock:
            self.stage = stage
            self._note()
            self._node.say(self._status(exit_code=exit_code))
            if stage == "done":
                self._node.close()
                if self._final is not None:
                    self._final.clear()
        self._tell(stage)

    def fail(self, reason: str, exit_code: int, kind: FailureKind) -> None:
        """This rank has failed; that is on disk when this returns. What it said first stands."""
        failed_at = utc_now()  # before the lock, for which a slow disk may have it wait
        with self._lock:
            if self.stage == "failed":
                return
            self.stage = "failed"
            more: dict[str, Any] = {"reason": reason, "exit_code": exit_code, "failed_at": failed_at, "failure": kind}
            self._note(**more)
            write_status(self._folder, self._status(**more))
            if self._final is not None:
                self._final.clear()
        self._tell(f"failed: {reason}")

    def on_step(self, step: int) -> None:
        """A step of training begins. Files are written only where a barrier follows: at the first of a stage."""
        self.step = step
        if self._final is not None:
            self._final.step(step)
        if step == 0 or step == self._warmup:
            self.enter("warm-up" if step < self._warmup else "measuring")
            return
        self._tell_now_and_then(self.stage)

    def on_staging(self, there: int, needed: int) -> None:
        """Notes the bytes staged of those that are needed, over all nodes; 0 of 0 at the start."""
        text = f"staging, {format_bytes(there)} of {format_bytes(needed)}" if needed else "staging"
        if self.stage != "staging":
            self.enter("staging")
            return
        self._tell_now_and_then(text)

    def on_point(self, number: int, of: int, text: str) -> None:
        """Point `number`, from 0, of N of the collective benchmark begins; `text` says which."""
        self.step, self._total = number, of
        if self._final is not None:
            self._final.step(number)
        if self.stage != "measuring":
            self.enter("measuring")
            return
        self._tell_now_and_then(text)

    def _ticks(self) -> None:
        """Notes once a second that this rank lives, and reports that now and then; no file in measured steps."""
        while True:
            time.sleep(_TICK_S)
            if self._final is not None:
                self._final.lives()
            if self._for_launcher and time.monotonic() - self._told > SIGN_PERIOD_S:
                self._tell(self._text)
            if self.stage == "measuring":
                continue
            with self._lock, suppress(RunError):  # a full disk is reported by the training thread, which needs it
                if self.stage not in ("measuring", "done", "failed"):
                    self._node.tick()

    def _status(self, **more: Any) -> RankStatus:
        place = self._place
        own: dict[str, Any] = {"rank": place.rank, "host": place.host, "pid": os.getpid(), "stage": self.stage}
        return RankStatus(**{**own, "step": self.step, "updated": utc_now(), **more})

    def _note(self, **more: Any) -> None:
        """What the supervisor is to write if this rank ends without a word."""
        if self._final is None:
            return
        self._final.step(self.step)
        by_supervisor = {"step": _SOME_STEP, "updated": TIME.decode(), "source": "supervisor"}
        status = self._status(**by_supervisor, **more) if not more else self._status(**more)
        text = json_text(status.model_dump(mode="json"))
        path = os.fsencode(self._folder.status(self._place.rank))
        self._final.say(path, utf8_text(text).encode().replace(str(_SOME_STEP).encode(), STEP))

    def _tell_now_and_then(self, text: str) -> None:
        self._text = text
        if time.monotonic() - self._told > (LAUNCHER_PERIOD_S if self._for_launcher else PLAIN_PERIOD_S):
            self._tell(text)

    def _tell(self, text: str) -> None:
        self._text = text
        if self._place.rank != 0:
            return
        self._told = time.monotonic()
        if self._for_launcher:
            line = PROGRESS_MARK + json.dumps({"step": self.step + 1, "of": self._total, "stage": text})
        else:
            line = f"dlbench {self._run_id}: {text}, {self._counted} {self.step + 1} of {self._total}"
        # In one piece: two threads write.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


class Watchdog:
    """A thread that looks once a second whether `beat` was called within `timeout_s`."""

    def __init__(self, timeout_s: float, on_stall: Callable[[str], None]) -> None:
        """`on_stall` gets the reason in one line; afterwards the process ends with exit code 124."""
        self._timeout_s = timeout_s
        self.give_up = on_stall
        self._last = time.monotonic()
        self._where = "start"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlbench-watchdog", daemon=True)

    def start(self) -> None:
        self._last = time.monotonic()
        self._thread.start()

    def beat(self, where: str) -> None:
        self._last = time.monotonic()
        self._where = where

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout_s / 4)):
            silent = time.monotonic() - self._last
            if silent > self._timeout_s:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                # Needs no lock and no Python: ends the process even if its status cannot be written.
                faulthandler.dump_traceback_later(LAST_RESORT_S, exit=True)
                try:
                    self.give_up(f"no progress for {silent:.0f} s after {self._where} (stall_timeout_s)")
                finally:
                    os._exit(int(ExitCode.TIMEOUT))


class NodeStatus:
    """What one rank says of itself. `place`: this rank; the one with local rank 0 writes."""

    def __init__(self, folder: RunFolder, place: RankPlace) -> None:
        self._folder, self._place = folder, place
        self._is_first = place.local_rank == 0
        self._known: dict[int, RankStatus] = {}
        self._unsent: tuple[float, RankStatus] | None = None
        self._connection: socket.socket | None = None
        self._others: list[socket.socket] = []
        self._listener = self._listen() if self._is_first and place.local_size > 1 else None

    def say(self, status: RankStatus) -> None:
        """The first rank writes; others report to it, and write a file of their own if they cannot and it counts."""
        if self._is_first:
            self._known[status.rank] = status
            # Where all enter a stage together the others are waited for.
            deadline = time.monotonic() + _MEET_S.get(status.stage, 0.0)
            self._collect()
            while self._listener is not None and time.monotonic() < deadline:
                said = [one for one in self._known.values() if one.stage == status.stage or one.stage in ENDED]
                if len(said) >= self._place.local_size:
                    break
                time.sleep(_LOOK_S)
                self._collect()
            self._write()
        elif not self._sent(status):
            self._unsent = (time.monotonic(), status)
            if status.stage in _MEET_S:
                self._write_alone()

    def tick(self) -> None:
        """What was left undone, outside of measured steps; about once a second."""
        if self._is_first:
            if self._collect():
                self._write()
        elif self._unsent is not None:
            since, status = self._unsent
            if self._sent(status):
                self._unsent = None
            elif time.monotonic() - since > ALONE_AFTER_S:
                self._write_alone()

    def close(self) -> None:
        for one in (self._listener, self._connection, *self._others):
            if one is not None:
                one.close()
        self._listener, self._connection, self._others = None, None, []

    def _write(self) -> None:
        ranks = tuple(self._known[rank] for rank in sorted(self._known))
        write_node_statuses(self._folder, NodeStatuses(node=self._place.node_rank, ranks=ranks))

    def _write_alone(self) -> None:
        assert self._unsent is not None
        write_status(self._folder, self._unsent[1])
        self._unsent = None

    def _address(self) -> bytes:
        place = self._place
        return socket_address(f"status {os.geteuid()} {place.token} {self._folder.path} {place.node_rank}")

    def _listen(self) -> socket.socket | None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self._address())
            listener.listen(self._place.local_size)
        except OSError:  # then the others reach nobody, and write by themselves
            listener.close()
            return None
        listener.setblocking(False)
        return listener

    def _collect(self) -> bool:
        if self._listener is None:
            return False
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                if is_own_user(connection):
                    self._others.append(connection)
                else:
                    connection.close()
        return sum(self._hear(connection) for connection in tuple(self._others)) > 0

    def _hear(self, connection: socket.socket) -> bool:
        is_new = False
        while True:
            try:
                message = connection.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return is_new
            except OSError:
                message = b""
            if not message:  # it has ended
                self._others.remove(connection)
                connection.close()
                return is_new
            with suppress(ValueError):
                status = RankStatus.model_validate_json(message)
                self._known[status.rank] = status
                is_new = True

    def _sent(self, status: RankStatus) -> bool:
        message = json.dumps(status.model_dump(mode="json")).encode()
        if self._connection is None:
            self._connection = self._connect()
        if self._connection is None:
            return False
        try:
            self._connection.send(message)
        except OSError:  # the first rank has ended, or hangs
            self._connection.close()
            self._connection = None
            return False
        return True

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            connection.connect(self._address())
            if is_own_user(connection):
                return connection
        except OSError:  # not there yet, or never
            pass
        connection.close()
        return None
