"""What is read from NCCL's own log. Lines have the forms that NCCL 2.18 to 2.27 writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlbench.node.devices.nccl_log import SUBSYSTEMS, NcclLog, parsed, together, way_of

NVLINK = """\
n01:7614:7614 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib0
n01:7614:7614 [0] NCCL INFO Bootstrap : Using ib0:10.1.94.2<0>
n01:7614:7614 [0] NCCL INFO cudaDriverVersion 12080
n01:7614:7614 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
n01:7614:7691 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_2:1/IB [RO]; OOB ib0:10.1.94.2<0>
n01:7614:7691 [0] NCCL INFO P2P plugin v9 IBext_v9
n01:7614:7691 [0] NCCL INFO Using network IBext_v9
n01:7614:7691 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
n01:7614:7691 [0] NCCL INFO comm 0x573f9cb382e0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
n01:7614:7691 [0] NCCL INFO Channel 00/16 : 0 1 2 3 4 5 6 7 8
n01:7614:7691 [0] NCCL INFO Channel 01/16 :    0   1   2
n01:7614:7691 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1
n01:7614:7691 [0] NCCL INFO 16 coll channels, 16 collnet channels, 12 nvls channels, 16 p2p channels
n01:7614:7694 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n01:7614:7694 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n01:7614:7694 [0] NCCL INFO Channel 07/0 : 8[0] -> 0[0] [receive] via NET/IBext_v9/3/GDRDMA
n01:7614:7694 [0] NCCL INFO Channel 07/0 : 0[0] -> 8[0] [send] via NET/IBext_v9/2(0)/GDRDMA
n01:7614:7694 [0] NCCL INFO Connected all rings
"""
SHARED = """\
ruijie:1122:1663 [1] NCCL INFO Channel 32 : 1[c3000] -> 0[3000] via SHM/direct/direct comm 0x557519a97630 nRanks 02
ruijie:1122:1663 [1] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct
[2026-04-28 14:14:47] ruijie:1122:1663 [1] NCCL INFO Using network Socket
ruijie:1122:1663 [1] NCCL INFO 2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer
ruijie:1122:1663 [1] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error
"""


def test_ways_network_and_channels_are_read() -> None:
    told = parsed(NVLINK.splitlines())
    assert told.version == "2.27.3+cuda12.9"
    assert (told.network, told.plugin) == ("IBext_v9", "IBext_v9")
    assert told.channels == {"NET/IBext_v9/GDRDMA": 1, "P2P/CUMEM": 1, "P2P/CUMEM/read": 1}
    assert (told.collective_channels, told.nvls_channels, told.nvls) == (16, 12, True)
    assert (told.rings, told.trees) == (16, 2)
    assert told.has_peer_access


def test_older_forms_and_warnings_are_read() -> None:
    told = parsed(SHARED.splitlines())
    assert told.channels == {"SHM/direct/direct": 2}
    assert (told.network, told.collective_channels, told.nvls_channels) == ("Socket", 2, 0)
    assert told.warnings == ("NET/IB : Got async event : port error",)
    assert not told.has_peer_access


def test_nothing_is_read_into_what_says_nothing() -> None:
    assert parsed(["", "NCCL INFO", "x" * 1000, "Channel 00 : 0 -> 1"]).channels == {}


def test_adapters_are_no_ways_of_their_own() -> None:
    assert way_of("NET/IB/3/GDRDMA") == way_of("NET/IB/2(0)/GDRDMA") == "NET/IB/GDRDMA"
    assert way_of("NET/AWS Libfabric/0") == "NET/AWS Libfabric"


def test_ranks_add_up_and_a_rank_without_a_log_takes_nothing_away() -> None:
    one, other = (parsed(text.splitlines()).model_dump(mode="json") for text in (NVLINK, SHARED))
    both = together([one, None, other, other])
    assert both is not None
    assert both.channels["SHM/direct/direct"] == 4
    assert (both.network, both.rings, both.nvls, both.collective_channels) == ("IBext_v9, Socket", 16, True, 16)
    assert together([None, None]) is None


def test_the_log_is_asked_for_read_and_the_variables_are_the_user_s_again() -> None:
    variables = {"NCCL_DEBUG_SUBSYS": "COLL"}
    log = NcclLog(variables)
    file = Path(variables["NCCL_DEBUG_FILE"])
    assert variables == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, "NCCL_DEBUG_FILE": str(file)}
    assert "TUNING" not in SUBSYSTEMS, "it writes a line for each collective of each step"
    file.write_text(NVLINK)
    told = log.read()
    assert told is not None
    assert told["rings"] == 16
    assert variables == {"NCCL_DEBUG_SUBSYS": "COLL"}
    log.close()
    assert not file.parent.exists()


def test_who_asked_for_a_log_has_it_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    variables = {"NCCL_DEBUG": "WARN"}
    log = NcclLog(variables)
    assert log.read() is None
    assert variables == {"NCCL_DEBUG": "WARN"}
    log.close(failed=True)
    assert capfd.readouterr().err == ""


def test_warnings_of_a_rank_that_fails_are_in_its_own_log(capfd: pytest.CaptureFixture[str]) -> None:
    variables = dict[str, str]()
    log = NcclLog(variables)
    Path(variables["NCCL_DEBUG_FILE"]).write_text(SHARED)
    log.close(failed=True)
    assert capfd.readouterr().err == "NCCL WARN NET/IB : Got async event : port error\n"
    assert "NCCL_DEBUG" not in os.environ
