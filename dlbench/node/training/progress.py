"""Progress of a rank: status files, progress lines of rank 0, and the watchdog that ends a rank that hangs. The first
rank of each node writes one file for the node, to spare the metadata server, and never in measured steps.
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
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import is_own_user, socket_address
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

PLAIN_PERIOD_S = 10.0  # Seconds between two progress lines for a person.
LAUNCHER_PERIOD_S = 0.5  # Seconds between two progress lines for the launcher.
_TICK_S = 1.0
_STEP_PLACEHOLDER = -9_007_199_254_740_991  # Replaced in the text by the step that the supervisor reads from memory.
LAST_RESORT_S = 30  # Seconds that the status of a stalled rank may take to write.
_MESSAGE_BYTES = 1 << 16
_POLL_S = 0.002
# Seconds that a node's first rank waits for statuses of stages that all ranks enter together, outside of measured time.
_MEET_S = {"measuring": 0.5, "done": 2.0}
ALONE_AFTER_S = 5.0  # Seconds until a rank that cannot reach its node's first rank (containers) writes its own file.
ENDED = ("done", "failed")


class ProgressReporter:
    """Reports the step of training, or the point of the collective benchmark, and the stage."""

    def __init__(self, plan: LaunchPlan, folder: RunFolder, place: RankPlace) -> None:
        self._run_id = plan.run_id
        self._folder = folder
        self._place = place
        if isinstance(plan, RunPlan):
            self._counted, self._warmup = "step", plan.measure.warmup_steps
            self._total = self._warmup + plan.measure.measured_steps
        else:
            assert isinstance(plan, CommPlan)
            self._counted, self._warmup = "point", 0
            self._total = (len(plan.comm.algorithms) + len(plan.comm.backends)) * len(plan.comm.sizes)
        self._for_launcher = os.environ.get("DLBENCH_PROGRESS") == "launcher"
        self._logged_at = 0.0
        self._text = ""
        self._lock = threading.Lock()
        self._final = FinalStatus.inherited(os.environ)
        self._node = NodeStatus(folder, place)
        self.step = -1
        self.stage: Stage = "starting"
        # Not in the watchdog's thread, which a hung file system must not stop.
        threading.Thread(target=self._ticks, name="dlbench-tick", daemon=True).start()

    def expect(self, steps: int, warmup: int) -> None:
        """Sets the largest number of steps, which not every plan has, and the number of steps of the warm-up."""
        self._total, self._warmup = steps, warmup
        if self.stage == "measuring" and self.step < warmup:  # the warm-up was lengthened at its end
            with self._lock:
                self.stage = "warm-up"
                self._note()

    def enter(self, stage: Stage, exit_code: int | None = None) -> None:
        """Begins a stage; on the first rank of a node, its file says so when this returns."""
        with self._lock:
            self.stage = stage
            self._note()
            self._node.report(self._status(exit_code=exit_code))
            if stage == "done":
                self._node.close()
                if self._final is not None:
                    self._final.clear()
        self._log(stage)

    def fail(self, reason: str, exit_code: int, kind: FailureKind) -> None:
        failed_at = utc_now()  # before the lock, which another thread may hold while it writes to a slow disk
        with self._lock:
            if self.stage == "failed":
                return
            self.stage = "failed"
            failure: dict[str, Any] = {"reason": reason, "exit_code": exit_code, "failed_at": failed_at}
            failure["failure"] = kind
            self._note(**failure)
            write_status(self._folder, self._status(**failure))
            if self._final is not None:
                self._final.clear()
        self._log(f"failed: {reason}")

    def on_step(self, step: int) -> None:
        """Reports the begin of a step; writes a file only at the first step of a stage, before a barrier."""
        self.step = step
        if self._final is not None:
            self._final.step(step)
        if step == self._warmup:
            self.enter("measuring")
            return
        if step == 0:
            self.enter("warm-up")
            return
        self._log_periodically(self.stage)

    def on_staging(self, staged: int, total: int) -> None:
        """Reports the staged bytes and the total over all nodes; 0 of 0 at the start."""
        if self.stage != "staging":
            self.enter("staging")
            return
        text = "staging"
        if total:
            text = f"staging, {format_bytes(staged)} of {format_bytes(total)}"
        self._log_periodically(text)

    def on_point(self, number: int, total: int, text: str) -> None:
        self.step, self._total = number, total
        if self._final is not None:
            self._final.step(number)
        if self.stage != "measuring":
            self.enter("measuring")
            return
        self._log_periodically(text)

    def _ticks(self) -> None:
        """Notes once a second that this rank is alive, and logs it periodically; writes no file in measured steps."""
        while True:
            time.sleep(_TICK_S)
            if self._final is not None:
                self._final.touch()
            if self._for_launcher and time.monotonic() - self._logged_at > SIGN_PERIOD_S:
                self._log(self._text)
            if self.stage == "measuring":
                continue
            with self._lock, suppress(RunError):  # a full disk is reported by the training thread, which needs it
                if self.stage not in ("measuring", "done", "failed"):
                    self._node.tick()

    def _status(self, **fields: Any) -> RankStatus:
        place = self._place
        status: dict[str, Any] = {"rank": place.rank, "host": place.host, "pid": os.getpid(), "stage": self.stage}
        return RankStatus(**(status | {"step": self.step, "updated": utc_now()} | fields))

    def _note(self, **fields: Any) -> None:
        """Notes the status that the supervisor writes if this rank ends without reporting."""
        if self._final is None:
            return
        self._final.step(self.step)
        fields = fields or {"step": _STEP_PLACEHOLDER, "updated": TIME.decode(), "source": "supervisor"}
        text = json_text(self._status(**fields).model_dump(mode="json"))
        path = os.fsencode(self._folder.status(self._place.rank))
        self._final.set_file(path, utf8_text(text).encode().replace(str(_STEP_PLACEHOLDER).encode(), STEP))

    def _log_periodically(self, text: str) -> None:
        self._text = text
        period_s = LAUNCHER_PERIOD_S if self._for_launcher else PLAIN_PERIOD_S
        if time.monotonic() - self._logged_at > period_s:
            self._log(text)

    def _log(self, text: str) -> None:
        self._text = text
        if self._place.rank != 0:
            return
        self._logged_at = time.monotonic()
        if self._for_launcher:
            line = PROGRESS_MARK + json.dumps({"step": self.step + 1, "of": self._total, "stage": text})
        else:
            line = f"dlbench {self._run_id}: {text}, {self._counted} {self.step + 1} of {self._total}"
        # In one call, because two threads write.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


class Watchdog:
    """Ends the process if `beat` was not called within `timeout_s`; checks once a second, in a thread."""

    def __init__(self, timeout_s: float, on_stall: Callable[[str], None]) -> None:
        """`on_stall` is called with the reason in one line, before the process ends with exit code 124."""
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
                # Needs neither lock nor Python, so it ends the process even if its status cannot be written.
                faulthandler.dump_traceback_later(LAST_RESORT_S, exit=True)
                try:
                    self.give_up(f"no progress for {silent:.0f} s after {self._where} (stall_timeout_s)")
                finally:
                    os._exit(int(ExitCode.TIMEOUT))


class NodeStatus:
    """The status file of a node: local rank 0 writes it, the others send it their status."""

    def __init__(self, folder: RunFolder, place: RankPlace) -> None:
        self._folder, self._place = folder, place
        self._is_first = place.local_rank == 0
        self._statuses: dict[int, RankStatus] = {}
        self._unsent: tuple[float, RankStatus] | None = None
        self._connection: socket.socket | None = None
        self._others: list[socket.socket] = []
        self._listener: socket.socket | None = None
        if self._is_first and place.local_size > 1:
            self._listener = self._listen()

    def report(self, status: RankStatus) -> None:
        """Writes the status of the node on its first rank; the others send theirs, or write their own file."""
        if self._is_first:
            self._statuses[status.rank] = status
            deadline = time.monotonic() + _MEET_S.get(status.stage, 0.0)
            self._collect()
            while self._listener is not None and time.monotonic() < deadline:
                stages = [reported.stage for reported in self._statuses.values()]
                if sum(stage in (status.stage, *ENDED) for stage in stages) >= self._place.local_size:
                    break
                time.sleep(_POLL_S)
                self._collect()
            self._write()
        elif not self._send(status):
            self._unsent = (time.monotonic(), status)
            if status.stage in _MEET_S:
                self._write_alone()

    def tick(self) -> None:
        """Writes or sends pending statuses; called about once a second outside of measured steps."""
        if self._is_first:
            if self._collect():
                self._write()
        elif self._unsent is not None:
            since, status = self._unsent
            if self._send(status):
                self._unsent = None
            elif time.monotonic() - since > ALONE_AFTER_S:
                self._write_alone()

    def close(self) -> None:
        for opened in (self._listener, self._connection, *self._others):
            if opened is not None:
                opened.close()
        self._listener, self._connection, self._others = None, None, []

    def _write(self) -> None:
        ranks = tuple(self._statuses[rank] for rank in sorted(self._statuses))
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
        except OSError:  # then the others cannot connect, and write their own files
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
        return sum(self._receive(connection) for connection in tuple(self._others)) > 0

    def _receive(self, connection: socket.socket) -> bool:
        is_new = False
        while True:
            try:
                message = connection.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return is_new
            except OSError:
                message = b""
            if not message:  # the other rank has ended
                self._others.remove(connection)
                connection.close()
                return is_new
            with suppress(ValueError):
                status = RankStatus.model_validate_json(message)
                self._statuses[status.rank] = status
                is_new = True

    def _send(self, status: RankStatus) -> bool:
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
