"""Offsets of clocks: the estimate and its bound for any clocks and delays, the exchange over TCP, noise on its port."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlbench.node.watching import clocks
from dlbench.node.watching.clocks import MAX_DRIFT_PPM, ClockFollower, ClockServer, Exchange, OffsetEstimate
from dlbench.perfetto.rows import make_axis
from dlbench.records.clocks import ClockLine, ClockPoint
from tests.support import skewed_clocks

SECOND = 1_000_000_000


class OtherClock:
    """A clock that is `offset_ns` ahead at the own time 0 and gains `ppm` millionths."""

    def __init__(self, offset_ns: int, ppm: Fraction) -> None:
        self._offset_ns = offset_ns
        self._drift = ppm / 1_000_000

    def offset(self, own_ns: int) -> Fraction:
        return self._offset_ns + self._drift * own_ns

    def read(self, own_ns: int) -> int:
        return int((own_ns + self.offset(own_ns)) // 1)


CLOCKS = st.builds(
    OtherClock, st.integers(-(10**18), 10**18), st.fractions(-MAX_DRIFT_PPM, MAX_DRIFT_PPM, max_denominator=1000)
)
MOMENTS = st.integers(0, 10**15)
DELAYS = st.integers(0, 10**10)


def exchange(other: OtherClock, begin: int, there: int, work: int, back: int) -> Exchange:
    """What both sides note of one exchange, by the moments of the own clock."""
    return Exchange(
        sent_ns=begin,
        received_ns=other.read(begin + there),
        answered_ns=other.read(begin + there + work),
        returned_ns=begin + there + work + back,
    )


@given(CLOCKS, MOMENTS, DELAYS, DELAYS, DELAYS, st.fractions(0, 1))
def test_no_delay_and_no_drift_makes_the_error_exceed_the_bound(
    other: OtherClock, begin: int, there: int, work: int, back: int, share: Fraction
) -> None:
    seen = exchange(other, begin, there, work, back)
    for moment in (begin, begin + there, seen.returned_ns, begin + int(share * (there + work + back))):
        assert abs(seen.offset_ns - other.offset(moment)) <= seen.bound_ns


@given(CLOCKS, MOMENTS, st.lists(st.tuples(DELAYS, DELAYS, DELAYS), min_size=1, max_size=20))
def test_of_many_exchanges_the_best_is_taken(other: OtherClock, begin: int, delays: list[tuple[int, int, int]]) -> None:
    seen = []
    for there, work, back in delays:
        seen.append(exchange(other, begin, there, work, back))
        begin = seen[-1].returned_ns + 1
    found = clocks.estimate(seen)
    assert found.num_exchanges == len(seen)
    assert found.bound_ns == min(one.bound_ns for one in seen)
    assert abs(found.offset_ns - other.offset(found.local_ns)) <= found.bound_ns


def point(one: OffsetEstimate) -> ClockPoint:
    return ClockPoint(
        local_ns=one.local_ns, offset_ns=one.offset_ns, bound_ns=one.bound_ns, num_exchanges=one.num_exchanges
    )


@given(
    st.fractions(-100, 100, max_denominator=100),
    st.integers(-(10**17), 10**17),
    st.lists(
        st.tuples(st.integers(0, 10**14), st.integers(0, 10**8), st.fractions(-1, 1, max_denominator=20)),
        min_size=1,
        max_size=6,
        unique_by=lambda item: item[0],
    ),
    st.lists(st.integers(-(10**14), 2 * 10**14), min_size=1, max_size=4),
)
@example(Fraction(0), 0, [(60 * SECOND, 90_000, Fraction(1)), (62 * SECOND, 90_000, Fraction(-1))], [0, 3600 * SECOND])
@example(Fraction(100), 7, [(0, 10**8, Fraction(-1)), (1, 20, Fraction(1)), (10**13, 10**8, Fraction(1))], [5, 10**14])
def test_no_points_make_a_line_worse_than_it_says(
    ppm: Fraction, offset: int, points: list[tuple[int, int, Fraction]], moments: list[int]
) -> None:
    other = OtherClock(offset, ppm)
    told = []
    for local, bound, share in sorted(points):
        error = math.floor(abs(share) * bound) * (1 if share > 0 else -1)
        # The nearest whole number is within the bound wherever the bound leaves room for it.
        seen = math.floor(other.offset(local) + error) if error > 0 else math.ceil(other.offset(local) + error)
        told.append(ClockPoint(local_ns=local, offset_ns=seen, bound_ns=bound + 1, num_exchanges=1))
    found = ClockLine(node_rank=1, host="n1", points=tuple(told), wall_offset_ns=0)
    axis = make_axis({1: found}, {0: "n0", 1: "n1"}, {0: 0, 1: moments[0]})
    clock = axis.clocks[1]
    for moment in (*moments, *(point.local_ns for point in told)):
        bound_ns = found.bound_at(moment)
        assert bound_ns is not None
        offset = int(found.offsets_at(np.array([moment]))[0])
        assert abs(offset - other.offset(moment)) <= bound_ns
        aligned = int(clock.align(np.array([moment]))[0]) + axis.zero_ns
        assert abs(aligned - moment - offset) <= 1
        if moment == moments[0] or found.used_points[0].local_ns <= moment <= found.used_points[-1].local_ns:
            assert clock.bound_ns is not None
            assert bound_ns <= clock.bound_ns


def test_a_run_of_one_comparison_has_one_point(serve: Serve, tmp_path: Path) -> None:
    """`clock.json` came when the run ended: a second burst directly behind the first would tell nothing."""
    path = tmp_path / "clock.json"
    clocks.publish(path, serve(), "t")
    follower = ClockFollower(path, "t")
    follower._ending.set()
    follower.start()
    points, problem = follower.finish()
    assert len(points) == 1
    assert problem == "clocks were compared only once"


def test_points_made_in_a_busy_network_are_left_out() -> None:
    def one(minute: int, bound: int) -> OffsetEstimate:
        return OffsetEstimate(local_ns=minute * 60 * SECOND, offset_ns=0, bound_ns=bound, num_exchanges=20)

    seen = [one(0, 20_000), one(1, 5_000_000), one(2, 200_000), one(3, 200_001), one(4, 900_000)]
    assert clocks.worth_keeping(seen) == (seen[0], seen[2], seen[4])
    assert clocks.worth_keeping(seen[:2]) == tuple(seen[:2])
    assert clocks.worth_keeping([]) == ()


Serve = Callable[..., ClockServer]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts servers of the token `t` on the loopback, and ends them. They serve one for long: a core may be taken."""
    monkeypatch.setattr(clocks, "BURST_S", 60.0)
    servers: list[ClockServer] = []

    def start(clock: Callable[[], int] = time.monotonic_ns) -> ClockServer:
        servers.append(ClockServer("127.0.0.1", "t", clock=clock))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("skew_ns", [0, 12_345_678_901, -(10**15)])
def test_a_skewed_clock_is_recovered_within_the_bound(serve: Serve, skew_ns: int) -> None:
    server = serve(lambda: time.monotonic_ns() + skew_ns)
    found = clocks.estimate(clocks.compare(server.address, server.port, "t", 200, timeout_s=60))
    assert found.num_exchanges == 200
    assert abs(found.offset_ns - skew_ns) <= found.bound_ns


def test_a_wrong_token_is_refused(serve: Serve) -> None:
    server = serve()
    with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
        clocks.compare(server.address, server.port, "another", 5, timeout_s=60)
    assert len(clocks.compare(server.address, server.port, "t", 5, timeout_s=60)) == 5


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100_000, b"", clocks.greeting("t")[:39], clocks.greeting("t") + b"abc"],
)
def test_garbage_on_the_port_leaves_the_others_alone(serve: Serve, noise: bytes) -> None:
    server = serve()
    with socket.create_connection((server.address, server.port)) as other:
        with suppress(OSError):  # closed while it was still talking
            other.sendall(noise)
            other.shutdown(socket.SHUT_WR)
        assert len(clocks.compare(server.address, server.port, "t", 20, timeout_s=60)) == 20
        other.settimeout(60)
        with suppress(ConnectionResetError):  # what it sent was not all read: as good as closed
            assert other.recv(1) == b""
    assert server.problem == ""


@pytest.mark.parametrize("said", [b"", clocks.greeting("t")])
def test_a_silent_connection_is_closed_in_time(serve: Serve, said: bytes) -> None:
    server = serve()
    with socket.create_connection((server.address, server.port)) as silent:
        silent.sendall(said)
        assert len(clocks.compare(server.address, server.port, "t", 5, timeout_s=60)) == 5
        silent.settimeout(60)
        assert silent.recv(1) == b""


def test_no_connection_is_answered_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "MAX_ROUNDS", 30)
    server = serve()
    assert len(clocks.compare(server.address, server.port, "t", 1000, timeout_s=60)) == 30


def test_nodes_that_ask_at_once_are_served_in_turn(serve: Serve) -> None:
    server = serve()
    with ThreadPoolExecutor(8) as pool:
        bursts = list(pool.map(lambda _: clocks.compare(server.address, server.port, "t", 50, timeout_s=60), range(8)))
    assert [len(one) for one in bursts] == [50] * 8
    spans = sorted((one[0].received_ns, one[-1].answered_ns) for one in bursts)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_a_follower_compares_at_the_start_and_at_the_end(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    follower = ClockFollower(path, "t")
    follower.start()
    path.write_text("{", encoding="utf-8")  # as a reader may find it on a shared file system
    server = serve(lambda: time.monotonic_ns() + 3 * SECOND)
    clocks.publish(path, server, "t")
    until = time.monotonic() + 60
    while not follower._estimates and time.monotonic() < until:
        time.sleep(0.01)
    points, problem = follower.finish()
    assert problem == ""
    assert [one.num_exchanges for one in points] == [200, 200]
    assert points[0].local_ns < points[1].local_ns
    for one in points:
        assert abs(one.offset_ns - 3 * SECOND) <= one.bound_ns


def test_a_follower_says_why_it_has_no_point(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    follower = ClockFollower(path, "t")
    clocks.publish(path, serve(), "of the start before")
    follower.start()
    assert follower.finish() == ((), "node 0 did not write the address of its clock server to clock.json")

    gone = serve()
    clocks.publish(path, gone, "t")
    gone.close()
    follower = ClockFollower(path, "t")
    follower.start()
    points, problem = follower.finish()
    assert points == ()
    assert f"node 0's clock at 127.0.0.1 port {gone.port}: " in problem


def test_samplers_of_two_namespaces_find_how_their_clocks_differ() -> None:
    """Two real samplers, each with network and clock of its own; how far the clocks differ is known exactly."""
    if reason := skewed_clocks.lacking():
        pytest.skip(reason)
    ((error_ns, bound_ns),) = skewed_clocks.measure(1)
    assert abs(error_ns) <= bound_ns
