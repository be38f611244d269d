"""Where rank 0 listens, and who may know it."""

from __future__ import annotations

import os
import random
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from dlbench.errors import PeerLostError, RunError
from dlbench.node import rendezvous
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import Endpoint
from dlbench.node.sync.run_store import interface_settings, open_endpoint
from tests.support.rank_places import rank_place

ENDPOINT = Endpoint(address="127.0.0.1", port=4711, secret="s3cret")


def place(rank: int, token: str = "start-1") -> RankPlace:
    return rank_place(rank, 2, token=token)


def test_the_meeting_place_is_its_owner_s_alone_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.json"
    before = os.umask(0)
    try:
        rendezvous.publish(path, place(0), ENDPOINT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert rendezvous.await_address(path, place(1), wait_s=9) == ENDPOINT


def test_once_all_have_met_the_secret_is_gone_and_the_file_as_the_others(tmp_path: Path) -> None:
    """So that a group can copy each other's runs."""
    path = tmp_path / "rendezvous.json"
    rendezvous.publish(path, place(0), ENDPOINT)
    (tmp_path / "other").touch()
    rendezvous.conceal(path, place(0), ENDPOINT)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert ENDPOINT.secret not in path.read_text()
    with pytest.raises(RunError, match="waited"):
        rendezvous.await_address(path, place(1), wait_s=0.1)


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


def test_a_waiting_rank_opens_the_file_once_a_second_and_not_in_step_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: 1,000 ranks wait five minutes for a node that is slow to import."""
    opened: list[int] = []
    clock = [0.0]
    monkeypatch.setattr(rendezvous, "read_json", lambda path, limit: opened.append(1))
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: clock[0])

    def pause(seconds: float) -> None:
        clock[0] += seconds

    counts, ends = [], set()
    for rank in range(1, 1001):
        opened.clear()
        clock[0] = 0.0
        with pytest.raises(PeerLostError, match="waited 300 s"):
            rendezvous.await_address(tmp_path / "rendezvous.json", place(rank), 300.0, pause)
        counts.append(len(opened))
        ends.add(round(clock[0], 3))
    assert max(counts) <= 2.0 * 300
    assert min(counts) >= 300
    assert len(ends) > 500
    first = [next(rendezvous.pauses_s(random.Random(rank))) for rank in range(100)]
    assert max(first) <= rendezvous.FIRST_PAUSE_S, "who comes last does not wait long"


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
            "GLOO_SOCKET_IFNAME=lo, NCCL_SOCKET_IFNAME=ib0; NCCL's was set before, and dlbench left it",
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
    open_endpoint(tmp_path / "rendezvous.json", first, "lo", wait_s=9)
    assert os.environ.get("NCCL_SOCKET_IFNAME") == expected
    settings = interface_settings("lo", first)
    assert [(one.requested, one.effective, one.evidence) for one in settings] == ([("lo", "lo", said)] if said else [])
    assert interface_settings(None, first) == []
