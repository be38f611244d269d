"""Two samplers whose clocks differ by a known time: each in network and time namespaces of its own, on this machine.

A time namespace (time_namespaces(7)) adds a constant to CLOCK_MONOTONIC, so below both clocks are the same one and the
true difference is known to the nanosecond.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dlbench.node.watching.agent import COMMAND, SamplerProcess
from dlbench.node.watching.sampler import SamplerOrder
from dlbench.records.clocks import ClockLine
from dlbench.records.watch import NodeWatch

SKEW_S = 86_400 * 3 + 5
"""Seconds by which the second node's clock is ahead."""

_ADDRESSES = ("10.213.7.1/30", "10.213.7.2/30")
_SKEWED = ("unshare", "--time", "--monotonic", str(SKEW_S), "--fork", "--")
_WAIT_S = 60.0


def lacking() -> str:
    """Why this machine cannot do it; empty if it can."""
    if os.geteuid() != 0:
        return "namespaces of clocks and networks need root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"no program {program}"
    for command in ([*_SKEWED, "true"], ["unshare", "--net", "ip", "link", "add", "a0", "type", "veth"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()}"
    return ""


def measure(rounds: int) -> list[tuple[int, int]]:
    """Error of the second node's line of clocks and its bound, nanoseconds; one pair of samplers a round."""
    with _two_networks() as networks, tempfile.TemporaryDirectory() as temporary:
        return [_round(networks, Path(temporary) / str(number)) for number in range(rounds)]


def _round(networks: Sequence[str], folder: Path) -> tuple[int, int]:
    folder.mkdir()
    first = _sampler(networks, folder, node=0)
    second = _sampler(networks, folder, node=1)
    try:
        first.start()
        _wait_for(folder / "clock.json")
        second.start()
        _wait_for(folder / "1.samples")
        assert second.pid is not None
        assert first.pid is not None
        true_ns = _ahead_ns(first.pid) - _ahead_ns(_child(second.pid))
        time.sleep(0.5)  # so that the two comparisons are not one directly behind the other
        watch = _account(second)
        _account(first)
    finally:
        second.stop()
        first.stop()
    line = watch.clock
    bound_ns = line.bound_at(_middle(line))
    assert line.points, line.problem
    assert bound_ns is not None
    return int(line.offsets_at(np.array([_middle(line)]))[0]) - true_ns, bound_ns


def _account(sampler: SamplerProcess) -> NodeWatch:
    found = sampler.finish()
    assert found is not None, sampler.problem
    return found


def _middle(line: ClockLine) -> int:
    return (line.points[0].local_ns + line.points[-1].local_ns) // 2


def _sampler(networks: Sequence[str], folder: Path, node: int) -> SamplerProcess:
    order = SamplerOrder(
        run_id="skewed",
        samples=str(folder / f"{node}.samples"),
        clock=str(folder / "clock.json"),
        node_rank=node,
        num_nodes=2,
        host=f"n{node}",
        token=folder.name,
        period_s=1.0,
        max_bytes=100_000,
        cores=(),
        interface="eth0",
    )
    skewed = _SKEWED if node else ()
    return SamplerProcess(order, ("ip", "netns", "exec", networks[node], *skewed, *COMMAND))


def _wait_for(path: Path) -> None:
    until = time.monotonic() + _WAIT_S
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.02)


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _ahead_ns(pid: int) -> int:
    """How far CLOCK_MONOTONIC of a process is ahead of the machine's."""
    for line in Path(f"/proc/{pid}/timens_offsets").read_text().splitlines():
        name, seconds, nanoseconds = line.split()
        if name in ("monotonic", "1"):
            return int(seconds) * 1_000_000_000 + int(nanoseconds)
    raise AssertionError(f"process {pid} tells no offset of its clock")


@contextmanager
def _two_networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link `eth0` between them."""
    mark = f"dlbench-{secrets.token_hex(4)}"
    names = (f"{mark}-0", f"{mark}-1")
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        peer = ("peer", "name", "eth0", "netns", names[1])
        _ip("link", "add", "name", "eth0", "netns", names[0], "type", "veth", *peer)
        for name, address in zip(names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", address, "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


if __name__ == "__main__":
    for error_ns, bound_ns in measure(int(sys.argv[1])):
        print(f"error {error_ns / 1e3:9.2f} us, bound {bound_ns / 1e3:9.2f} us")
