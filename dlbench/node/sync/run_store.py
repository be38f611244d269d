"""torch.distributed's store for the ranks of one run: a client of rank 0's `KeyServer`."""

from __future__ import annotations

import base64
import datetime
import http.client
import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dlbench.errors import RunError
from dlbench.node import rendezvous
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import MeetingPlace
from dlbench.node.sync.key_server import LONGEST_WAIT_S, KeyServer

_ARRIVED, _COMPLETE = "dlbench/arrived", "dlbench/complete"

_PAUSES_S = (0.05, 0.5, 2.0)
"""Before a question is asked once more."""
_SLACK_S = 60.0
"""How long rank 0 may take to answer, beside the time it was asked to wait."""


def open_meeting(path: Path, place: RankPlace, interface: str | None, wait_s: float) -> MeetingPlace:
    """Where all ranks meet: on rank 0 made and published, on the others waited for.

    Args:
        path: `rendezvous.json` of the run.
        place: this rank.
        interface: the planned network interface; None: the one the host name stands for.
        wait_s: the longest wait for rank 0, whose node may be minutes behind in importing.

    Raises:
        RunError: rank 0 has not published, or cannot listen.
    """
    if place.rank != 0:
        return rendezvous.await_address(path, place, wait_s)
    address = rendezvous.own_address(place.num_nodes == 1, interface)
    try:
        server = KeyServer(address)  # its thread keeps it
    except OSError as error:
        raise RunError(f"rank 0 cannot listen at {address}: {error.strerror or error}") from None
    meeting = MeetingPlace(address=address, port=server.port, secret=server.secret)
    rendezvous.publish(path, place, meeting)
    return meeting


def meet(path: Path, place: RankPlace, interface: str | None, timeout: datetime.timedelta) -> RunStore:
    """The store of this run, once all ranks are there; Gloo and NCCL are told what goes with it.

    Args:
        path: as `open_meeting`.
        place: this rank.
        interface: as `open_meeting`.
        timeout: the longest wait for the other ranks, and for a key later on.

    Raises:
        RunError: as `open_meeting`, or not all ranks came.
    """
    meeting = open_meeting(path, place, interface, timeout.total_seconds())
    store = RunStore(meeting, timeout)
    try:
        if store.add(_ARRIVED, 1) == place.size:
            store.set(_COMPLETE, "1")
        store.wait([_COMPLETE])
    except RuntimeError as error:
        raise RunError(f"rank {place.rank}: not all {place.size} ranks met: {error}") from None
    if place.rank == 0:
        rendezvous.conceal(path, place, meeting)
    # For Gloo alone: NCCL finds the fast network itself, under DDP as under Horovod.
    os.environ["GLOO_SOCKET_IFNAME"] = rendezvous.gloo_interface(place.num_nodes == 1, interface, meeting)
    if torch.cuda.is_available():
        # NCCL's monitor would ask the store every second from every rank whether to write its flight recorder: work for
        # rank 0 while it is measured. dlbench's own watchdog ends runs that hang.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    return store


class RunStore(Store):
    """Keys and values that all ranks of the run share.

    A connection for each call: torch calls from several threads, and one may wait while another asks. The names are
    those by which torch calls a store from Python and (getNumKeys, deleteKey) from C++.
    """

    timeout: datetime.timedelta

    def __init__(self, meeting: MeetingPlace, timeout: datetime.timedelta) -> None:
        """`timeout` is the longest wait for a key."""
        super().__init__()
        self._meeting = meeting
        self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(op="set", values={key: _text(value)})

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(op="set", values={key: _text(value) for key, value in zip(keys, values, strict=True)})

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(op="append", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._await(keys, self.timeout.total_seconds())

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._await(keys, (timeout or self.timeout).total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self._ask(op="get", keys=list(keys), wait_s=0) is not None

    def add(self, key: str, value: int) -> int:
        return int(self._ask(op="add", key=key, amount=value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        words = {"expected": _text(expected_value), "desired": _text(desired_value)}
        return base64.b64decode(self._ask(op="compare_set", key=key, **words))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(op="delete", key=key))

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        return [str(name) for name in self._ask(op="names")]

    def of_node(self, name: str, value: Any, place: RankPlace) -> list[Any]:
        """`value` (what JSON can hold) of every rank of this rank's node, by rank; before there is a group to ask."""
        self.set(f"dlbench/{name}/{place.rank}", json.dumps(value))
        first = place.rank - place.local_rank
        keys = [f"dlbench/{name}/{rank}" for rank in range(first, first + place.local_size)]
        return [json.loads(found) for found in self.multi_get(keys)]

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RunStore:
        return self

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _await(self, keys: Sequence[str], wait_s: float) -> list[bytes]:
        deadline = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            found = self._ask(op="get", keys=list(keys), wait_s=left_s)
            if found is not None:
                return [base64.b64decode(value) for value in found]
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"wait timeout after {wait_s:g} s, keys: {', '.join(keys)}")

    def _ask(self, **order: Any) -> Any:
        """Asks rank 0, again where the connection is lost: a machine that stood still for a while breaks some."""
        order["request"] = secrets.token_hex(8)
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._ask_once(order)
            except (OSError, http.client.HTTPException) as error:
                # Nobody listens there any more: rank 0 is gone, and its launcher sees that sooner than a retry would.
                if pause_s is None or isinstance(error, ConnectionRefusedError):
                    raise dist.DistNetworkError(f"rank 0 does not answer: {error or type(error).__name__}") from None
                time.sleep(pause_s)
        raise AssertionError

    def _ask_once(self, order: dict[str, Any]) -> Any:
        meeting = self._meeting
        connection = http.client.HTTPConnection(meeting.address, meeting.port, timeout=LONGEST_WAIT_S + _SLACK_S)
        try:
            connection.request("POST", f"/{meeting.secret}/", json.dumps(order))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise dist.DistNetworkError(f"rank 0 refuses {order['op']} with HTTP status {answer.status}")
        return json.loads(content)


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()
