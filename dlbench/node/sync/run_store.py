"""Keys and values by which ranks find each other, served by rank 0 over HTTP to those who know the run's secret.

Horovod's Gloo client knows GET, PUT and DELETE of a path and nothing else, so the secret is the first part of the path:
`/SECRET/scope/key`. It is looked at before anything but the request's first line is read. torch's store asks by POST
with JSON (`RunStore`). torch's own TCPStore and Horovod's own server, which this one stands in for, listen on every
interface and serve whoever comes. Nothing is encrypted: who can read the packets of the network reads the secret.
"""

from __future__ import annotations

import base64
import datetime
import hmac
import http.client
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dlbench.errors import RunError
from dlbench.node import rendezvous
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import Endpoint
from dlbench.records.record import Setting

MAX_BODY_BYTES = 16 * 2**20  # Of one request: addresses of some ten thousand ranks.
PATIENCE_S = 30.0  # How long a connection may take to say what it wants.
_REMEMBERED = 1 << 16  # Changes known again when a client that lost the connection asks for them a second time.
LONGEST_WAIT_S = 20.0  # How long one request waits for keys; who wants to wait longer asks again.


class KeyServer:
    """Serves on threads of its own, until `close` or the end of the process. `address`: IPv4 address to listen at.
    Raises `OSError`: cannot listen at this address.
    """

    def __init__(self, address: str) -> None:
        self.secret = secrets.token_hex(16)
        self._listener = _Listener(address, self.secret)
        self.port = int(self._listener.server_address[1])
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="key server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self._listener.server_close()

    def _serve(self) -> None:
        # Not serve_forever: that wakes twice a second, on the cores that are measured.
        while not self._is_closed:
            try:
                connection, peer = self._listener.socket.accept()
            except OSError:
                # The caller is gone again, or this process has no descriptors left: later, and not in a busy loop.
                time.sleep(0.01)
                continue
            self._listener.process_request(connection, peer)


class Keys:
    """The keys themselves; all calls may come from any thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._done: OrderedDict[str, bytes | None] = OrderedDict()

    def put(self, values: Mapping[str, bytes]) -> None:
        with self._changed:
            self._values |= values
            self._changed.notify_all()

    def change(self, key: str, update: Callable[[bytes | None], bytes | None], *, request: str = "") -> bytes | None:
        """Replaces a key's value by what `update` makes of it (None: no such key), and returns that. `request` is a
        name that no other change has: asked for again, it is answered again and done once.
        """
        with self._changed:
            if request and request in self._done:
                return self._done[request]
            new = update(self._values.get(key))
            if request:
                self._done[request] = new
                while len(self._done) > _REMEMBERED:
                    self._done.popitem(last=False)
            if new is None:
                self._values.pop(key, None)
            else:
                self._values[key] = new
            self._changed.notify_all()
            return new

    def get(self, keys: list[str], wait_s: float) -> list[bytes] | None:
        """The values of keys once all are there; None if they are not within `wait_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), wait_s):
                return None
            return [self._values[key] for key in keys]

    def names(self) -> list[str]:
        with self._changed:
            return list(self._values)


class _Listener(ThreadingHTTPServer):
    request_queue_size = 1024  # all ranks come at once
    daemon_threads = True

    def __init__(self, address: str, secret: str) -> None:
        self.secret = secret.encode()
        self.keys = Keys()
        super().__init__((address, 0), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for the name of the address.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away or talks nonsense is no failure of the run."""
        if not isinstance(sys.exc_info()[1], (OSError, ValueError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE_S
    server: _Listener
    raw_requestline: bytes

    def parse_request(self) -> bool:
        """Refuses who does not know the secret, before the request's headers are read."""
        words = self.raw_requestline.split(b" ")
        said = words[1].split(b"/", 2) if len(words) == 3 else []
        if len(said) != 3 or not hmac.compare_digest(said[1], self.server.secret):
            self.close_connection = True
            with suppress(OSError):
                self.wfile.write(b"HTTP/1.0 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return False
        return super().parse_request()

    def log_message(self, *args: object) -> None:
        """Nothing is logged: the line would hold the secret."""

    def do_GET(self) -> None:
        """Horovod's Gloo: the value, or 404."""
        found = self.server.keys.get([self._key], 0)
        self._answer(200 if found else 404, found[0] if found else b"")

    def do_PUT(self) -> None:
        """Horovod's Gloo: sets a value."""
        body = self._body()
        if body is not None:
            self.server.keys.put({self._key: body})
            self._answer(200, b"")

    def do_DELETE(self) -> None:
        """Horovod's Gloo: a rank has read all it wants."""
        self.server.keys.change(self._key, lambda _: None)
        self._answer(200, b"")

    def do_POST(self) -> None:
        body = self._body()
        if body is not None:
            try:
                result = operate(self.server.keys, json.loads(body))
            except (KeyError, TypeError, ValueError):
                self._answer(400, b"")
                return
            self._answer(200, json.dumps(result).encode())

    @property
    def _key(self) -> str:
        return self.path.split("/", 2)[2]

    def _body(self) -> bytes | None:
        said = self.headers.get("Content-Length", "")
        if not said.isascii() or not said.isdigit() or len(said) > 9 or int(said) > MAX_BODY_BYTES:
            self._answer(413, b"")
            return None
        return self.rfile.read(int(said))

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def operate(keys: Keys, order: Mapping[str, Any]) -> Any:
    """Does one operation of torch's store; values are base64. Raises `KeyError, TypeError, ValueError`: it is none."""
    name = order["op"]
    if name == "set":
        keys.put({str(key): base64.b64decode(value) for key, value in order["values"].items()})
        return None
    if name == "get":
        found = keys.get([str(key) for key in order["keys"]], min(float(order["wait_s"]), LONGEST_WAIT_S))
        return None if found is None else [base64.b64encode(value).decode() for value in found]
    if name == "names":
        return keys.names()
    key, request = str(order["key"]), str(order.get("request", ""))
    if name == "add":
        amount = int(order["amount"])
        return int(keys.change(key, lambda old: str(int(old or b"0") + amount).encode(), request=request) or b"0")
    if name == "append":
        more = base64.b64decode(order["value"])
        keys.change(key, lambda old: (old or b"") + more, request=request)
        return None
    if name == "delete":
        was_there = keys.get([key], 0) is not None
        keys.change(key, lambda _: None)
        return was_there
    if name == "compare_set":
        expected, desired = base64.b64decode(order["expected"]), base64.b64decode(order["desired"])
        # As torch's stores: a key that is not there counts as an empty one, and is then reported as what was expected.
        new = keys.change(key, lambda old: desired if (old or b"") == expected else old, request=request)
        return base64.b64encode(expected if new is None else new).decode()
    raise ValueError(f"no operation {name!r}")


_ARRIVED, _COMPLETE = "dlbench/arrived", "dlbench/complete"

_PAUSES_S = (0.05, 0.5, 2.0)  # Before a question is asked once more.
_SLACK_S = 60.0  # How long rank 0 may take to answer, besides the time it was asked to wait.


def open_endpoint(path: Path, place: RankPlace, interface: str | None, wait_s: float) -> Endpoint:
    """Where all ranks meet: on rank 0 made and published, on the others waited for.

    `path`: `rendezvous.json` of the run. `interface`: the planned network interface; None: the one the host name stands
    for. `wait_s`: the longest wait for rank 0, whose node may be minutes behind in importing. Raises `RunError`: rank 0
    has not published, or cannot listen.
    """
    if interface is not None and place.num_nodes > 1 and torch.cuda.is_available():
        # NCCL starts over it, and sends over it what no faster network takes. `=`: this name, not all that begin so
        # (NCCL's documentation, environment variables).
        os.environ.setdefault(_OF_NCCL, f"={interface}")
    if place.rank != 0:
        return rendezvous.await_address(path, place, wait_s)
    address = rendezvous.own_address(place.num_nodes == 1, interface)
    try:
        server = KeyServer(address)  # its thread keeps it
    except OSError as error:
        raise RunError(f"rank 0 cannot listen at {address}: {error.strerror or error}") from None
    endpoint = Endpoint(address=address, port=server.port, secret=server.secret)
    rendezvous.publish(path, place, endpoint)
    return endpoint


def meet(path: Path, place: RankPlace, interface: str | None, timeout: datetime.timedelta) -> RunStore:
    """The store of this run, once all ranks are there; Gloo and NCCL learn it what goes with it. `path`: as
    `open_endpoint`. `interface`: as `open_endpoint`. `timeout`: the longest wait for the other ranks, and for a key
    later on. Raises `RunError`: as `open_endpoint`, or not all ranks came.
    """
    endpoint = open_endpoint(path, place, interface, timeout.total_seconds())
    store = RunStore(endpoint, timeout)
    try:
        if store.add(_ARRIVED, 1) == place.size:
            store.set(_COMPLETE, "1")
        store.wait([_COMPLETE])
    except RuntimeError as error:
        raise RunError(f"rank {place.rank}: not all {place.size} ranks met: {error}") from None
    if place.rank == 0:
        rendezvous.conceal(path, place, endpoint)
    os.environ["GLOO_SOCKET_IFNAME"] = rendezvous.gloo_interface(place.num_nodes == 1, interface, endpoint)
    if torch.cuda.is_available():
        # NCCL's monitor would ask the store every second from every rank whether to write its flight recorder: work for
        # rank 0 while it is measured. dlbench's own watchdog ends runs that hang.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    return store


_OF_NCCL = "NCCL_SOCKET_IFNAME"


def interface_settings(interface: str | None, place: RankPlace) -> list[Setting]:
    """What became of `launch.interface`, by the variables that Gloo and NCCL read; nothing where none was asked for."""
    if interface is None or place.num_nodes == 1:
        return []
    names = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", _OF_NCCL)
    found = {name: os.environ[name] for name in names if name in os.environ}
    how = ", ".join(f"{name}={value}" for name, value in found.items()) or "no library that reads a variable was used"
    by_user = found.get(_OF_NCCL, f"={interface}") != f"={interface}"
    how += "; NCCL's was set before, and dlbench left it" * by_user
    gloo = [value for name, value in found.items() if name != _OF_NCCL]
    effective = gloo[0] if gloo else None
    return [Setting(key="system.launch.interface", requested=interface, effective=effective, evidence=how)]


class RunStore(Store):
    """Keys and values that all ranks of the run share.

    A connection for each call: torch calls from several threads, and one may wait while another asks. The names are
    those by which torch calls a store from Python and (getNumKeys, deleteKey) from C++.
    """

    timeout: datetime.timedelta

    def __init__(self, endpoint: Endpoint, timeout: datetime.timedelta) -> None:
        """`timeout` is the longest wait for a key."""
        super().__init__()
        self._endpoint = endpoint
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
        endpoint = self._endpoint
        connection = http.client.HTTPConnection(endpoint.address, endpoint.port, timeout=LONGEST_WAIT_S + _SLACK_S)
        try:
            connection.request("POST", f"/{endpoint.secret}/", json.dumps(order))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise dist.DistNetworkError(f"rank 0 refuses {order['op']} with HTTP status {answer.status}")
        return json.loads(content)


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()
