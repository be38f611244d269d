"""Where rank 0 listens, and who may know it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dlbench.errors import RunError
from dlbench.node import rendezvous
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import MeetingPlace

MEETING = MeetingPlace(address="127.0.0.1", port=4711, secret="s3cret")


def place(rank: int, token: str = "start-1") -> RankPlace:
    return RankPlace(
        rank=rank, size=2, local_rank=rank, local_size=2, node_rank=0, num_nodes=1, host="n0", token=token
    )  # fmt: skip


def test_the_meeting_place_is_its_owner_s_alone_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.json"
    before = os.umask(0)
    try:
        rendezvous.publish(path, place(0), MEETING)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert rendezvous.await_address(path, place(1), wait_s=9) == MEETING


def test_once_all_have_met_the_secret_is_gone_and_the_file_as_the_others(tmp_path: Path) -> None:
    """So that a group can copy each other's runs."""
    path = tmp_path / "rendezvous.json"
    rendezvous.publish(path, place(0), MEETING)
    (tmp_path / "other").touch()
    rendezvous.conceal(path, place(0), MEETING)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert MEETING.secret not in path.read_text()
    with pytest.raises(RunError, match="waited"):
        rendezvous.await_address(path, place(1), wait_s=0.1)


def test_the_meeting_place_of_an_earlier_start_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.json"
    rendezvous.publish(path, place(0, "start-0"), MEETING)
    with pytest.raises(RunError, match=r"waited 0 s for rank 0's address in rendezvous\.json"):
        rendezvous.await_address(path, place(1), wait_s=0.1)


def test_one_machine_needs_no_address_but_loopback() -> None:
    assert rendezvous.own_address(True) == rendezvous.own_address(True, "eth7") == "127.0.0.1"
    assert rendezvous.gloo_interface(True, "eth7", MEETING) == "lo"


def test_several_machines_meet_at_the_planned_interface() -> None:
    assert rendezvous.own_address(False, "lo") == "127.0.0.1"
    assert rendezvous.gloo_interface(False, "eth7", MEETING) == "eth7"
    with pytest.raises(RunError, match=r"launch\.interface nosuch0: this node has no such interface"):
        rendezvous.own_address(False, "nosuch0")
