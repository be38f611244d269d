"""Where rank 0 listens, and who may know it."""

from __future__ import annotations

import datetime
import http.client
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist

from dlbench.errors import RunError
from dlbench.node import rendezvous
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import Endpoint
from dlbench.node.sync.run_store import interface_settings, meet, of_node, open_endpoint, serve_horovod
from tests.support.training_data import rank_place

ENDPOINT = Endpoint(address="127.0.0.1", port=4711)


def place(rank: int, token: str = "start-1") -> RankPlace:
    return rank_place(rank, 2, token=token)


def test_others_read_where_the_first_rank_listens(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.json"
    rendezvous.publish(path, place(0), ENDPOINT)
    assert rendezvous.await_address(path, place(1), wait_s=9) == ENDPOINT


def test_the_meeting_place_of_an_earlier_start_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.json"
    rendezvous.publish(path, place(0, "start-0"), ENDPOINT)
    with pytest.raises(RunError, match=r"waited 0 s for rank 0's address in rendezvous\.json"):
        rendezvous.await_address(path, place(1), wait_s=0.1)


def test_one_machine_needs_no_address_but_loopback() -> None:
    assert rendezvous.own_address(True) == rendezvous.own_address(True, "eth7") == "127.0.0.1"
    assert rendezvous.gloo_interface(True, "eth7", ENDPOINT) == "lo"


def test_several_machines_meet_at_the_planned_interface() -> None:
    assert rendezvous.own_address(False, "lo") == "127.0.0.1"
    assert rendezvous.gloo_interface(False, "eth7", ENDPOINT) == "eth7"
    with pytest.raises(RunError, match=r"launch\.interface nosuch0: this node has no such interface"):
        rendezvous.own_address(False, "nosuch0")


class Interface(NamedTuple):
    address: str
    isup: bool = True


@pytest.mark.parametrize(
    ("name_stands_for", "routed", "expected"),
    [
        ("10.0.0.7", "10.0.0.7", "10.0.0.7"),
        ("127.0.1.1", "10.0.0.7", "10.0.0.7"),
        ("172.17.0.1", "10.0.0.7", "10.0.0.7"),  # docker0
        ("127.0.1.1", None, "10.0.0.7"),  # no route to anywhere: the first interface to the outside
        ("127.0.1.1", "192.168.122.1", "10.0.0.7"),  # virbr0
    ],
)
def test_a_bridge_of_the_node_s_own_is_no_address_for_others(
    monkeypatch: pytest.MonkeyPatch, name_stands_for: str, routed: str | None, expected: str
) -> None:
    import psutil

    made = {
        "docker0": Interface("172.17.0.1"),
        "down0": Interface("10.9.9.9", isup=False),
        "eth0": Interface("10.0.0.7"),
        "lo": Interface("127.0.0.1"),
        "veth12": Interface("10.1.1.1"),
        "virbr0": Interface("192.168.122.1"),
    }
    told = {name: [SimpleNamespace(family=socket.AF_INET, address=one.address)] for name, one in made.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: told)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: made)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", (name_stands_for, 0))])

    class Probe:
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, _: object) -> None:
            if routed is None:
                raise OSError(101, "Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return str(routed), 0

    monkeypatch.setattr(socket, "socket", lambda *_: Probe())
    assert rendezvous.own_address(False) == expected


@pytest.mark.parametrize(
    ("nodes", "on_gpus", "before", "expected", "said"),
    [
        (2, True, None, "=lo", "GLOO_SOCKET_IFNAME=lo, NCCL_SOCKET_IFNAME==lo"),
        (
            *(2, True, "ib0", "ib0"),
            "GLOO_SOCKET_IFNAME=lo, NCCL_SOCKET_IFNAME=ib0; NCCL's was set before, and dlbench did not change it",
        ),
        (2, False, None, None, "GLOO_SOCKET_IFNAME=lo"),
        (1, True, None, None, None),  # one node meets on loopback
    ],
)
def test_the_planned_interface_is_nccl_s_too_unless_its_variable_is_set(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    on_gpus: bool,
    before: str | None,
    expected: str | None,
    said: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpus)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    for name, value in (("NCCL_SOCKET_IFNAME", before), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    first = rank_place(0, 2, per_node=2 // nodes)
    open_endpoint(tmp_path / "rendezvous.json", first, "lo", 9, lambda address: 1)
    assert os.environ.get("NCCL_SOCKET_IFNAME") == expected
    settings = interface_settings("lo", first)
    assert [(one.requested, one.effective, one.evidence) for one in settings] == ([("lo", "lo", said)] if said else [])
    assert interface_settings(None, first) == []


def test_ranks_meet_at_one_interface_and_those_of_a_node_hear_each_other(tmp_path: Path) -> None:
    """Threads: the first serves torch's store, on loopback alone."""
    found: list[object] = [None] * 4

    def rank(number: int) -> None:
        own = rank_place(number, 4, 2, token="start-1")
        store = meet(tmp_path / "rendezvous.json", own, "lo", datetime.timedelta(seconds=60))
        found[number] = of_node(store, "gpu", [number], place=own)
        if number == 0:
            listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
            assert ("127.0.0.1", store.port) in listening
            assert not [one for one in listening if one.port == store.port and one.ip != "127.0.0.1"]
        with pytest.raises(dist.DistStoreError):
            store.wait(["no such key"], datetime.timedelta(milliseconds=10))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(rank, range(4)))
    assert found == [[[0], [1]], [[0], [1]], [[2], [3]], [[2], [3]]]


@pytest.mark.horovod
def test_horovods_requests_are_served_at_one_address(horovod_installed: None) -> None:
    """As its HTTP client makes them of HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT; files are not served."""
    port = serve_horovod("127.0.0.1")

    def ask(method: str, path: str = "/global_/1", body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()

    assert ask("GET")[0] == 404
    assert ask("PUT", body=b"\0address")[0] == 200
    assert ask("GET") == (200, b"\0address")
    assert ask("DELETE")[0] == 200
    assert ask("GET")[0] == 404
    assert ask("HEAD", "/pyproject.toml")[0] == 405
