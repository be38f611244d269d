"""The server at which ranks meet: what strangers get from it, and what torch and Horovod do."""

from __future__ import annotations

import datetime
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.node.rendezvous import LOOPBACK, Endpoint
from dlbench.node.sync.run_store import MAX_BODY_BYTES, PATIENCE_S, KeyServer, RunStore

SOON = datetime.timedelta(seconds=0.2)


@pytest.fixture(scope="module")
def server() -> Iterator[KeyServer]:
    server = KeyServer(LOOPBACK)
    yield server
    server.close()


def store_of(server: KeyServer, secret: str | None = None) -> RunStore:
    endpoint = Endpoint(address=LOOPBACK, port=server.port, secret=secret or server.secret)
    return RunStore(endpoint, datetime.timedelta(seconds=60))


@pytest.fixture
def store(server: KeyServer) -> RunStore:
    store = store_of(server)
    for key in store.list_keys():
        store.delete_key(key)
    return store


def ask(server: KeyServer, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def say(server: KeyServer, data: bytes) -> bytes:
    """What the server answers to bytes, until it closes the connection."""
    with socket.create_connection((LOOPBACK, server.port), timeout=60) as connection:
        connection.sendall(data)
        said = b""
        try:
            while more := connection.recv(4096):
                said += more
        except ConnectionResetError:  # it closed with bytes of ours unread
            pass
        return said


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/global_/0", "//global_/0", "/{almost}/global_/0", "/{secret}", "{secret}/x/y"])
def test_who_does_not_know_the_secret_gets_nothing(server: KeyServer, store: RunStore, method: str, path: str) -> None:
    store.set("global_/0", "mine")
    told = path.format(secret=server.secret, almost=server.secret[:-1] + "x")
    assert ask(server, method, told, b"theirs")[0] == 403
    assert (store.list_keys(), store.get("global_/0")) == (["global_/0"], b"mine")


def test_a_stranger_s_headers_and_body_are_not_read(server: KeyServer) -> None:
    """The answer comes after the first line, whatever the length that is announced."""
    start = time.monotonic()
    assert say(server, b"PUT /global_/0 HTTP/1.1\r\n").startswith(b"HTTP/1.0 403 ")
    assert say(server, b"PUT /global_/0 HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n").startswith(b"HTTP/1.0 403 ")
    assert time.monotonic() - start < PATIENCE_S - 5  # how long the server waits for what was announced


@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=200))
def test_nonsense_neither_enters_nor_ends_the_server(server: KeyServer, data: bytes) -> None:
    assert b"200" not in say(server, data + b"\r\n\r\n")[:20]
    assert store_of(server).check([]) is True


def test_it_listens_where_it_is_told_and_ends_when_it_is_told() -> None:
    server = KeyServer(LOOPBACK)
    assert server._listener.server_address[0] == LOOPBACK
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, server.port), timeout=1)


def test_a_value_has_a_limit(server: KeyServer) -> None:
    for length in (str(MAX_BODY_BYTES + 1), "99999999999999", "-1", "x", ""):
        head = f"PUT /{server.secret}/a/b HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
        assert b" 413 " in say(server, head.encode()).splitlines()[0]


def test_horovod_s_requests(server: KeyServer, store: RunStore) -> None:
    """As its HTTP client makes them of HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT (`HorovodEngine._meet`)."""
    key = f"/{server.secret}/horovod:0/global_/1"
    assert ask(server, "GET", key)[0] == 404
    assert ask(server, "PUT", key, b"\0address")[0] == 200
    assert ask(server, "GET", key) == (200, b"\0address")
    assert ask(server, "DELETE", key)[0] == 200
    assert ask(server, "GET", key)[0] == 404


def test_torch_s_own_test_of_a_store_in_python(store: RunStore) -> None:
    dist._test_python_store(store)  # type: ignore[attr-defined]


def test_a_wait_ends_when_the_key_comes_and_when_it_does_not(store: RunStore) -> None:
    prefixed = dist.PrefixStore("group", store)
    with pytest.raises(dist.DistStoreError, match="timeout"):
        prefixed.wait(["late"], SOON)
    later = threading.Timer(0.1, store.set, ("group/late", "x"))
    later.start()
    prefixed.wait(["late"], datetime.timedelta(seconds=60))
    later.join()


def test_a_rank_0_that_is_gone_is_said_at_once() -> None:
    server = KeyServer(LOOPBACK)
    server.close()
    with pytest.raises(dist.DistNetworkError, match="rank 0 does not answer"):
        store_of(server).get("x")
