"""Host counters: on this machine, and on made trees of `proc` and `sys`, hostile ones among them."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.machine.host import MAX_CORES, open_host, open_sources
from dlbench.machine.sources import Field, MonotonicCounter, Reading, Source, field_parts

NAME = re.compile(r"[A-Za-z0-9_.:-]+")
STAT = "cpu{n}  {user} 0 0 {idle} 0 0 0 0 0 0\n"
DEV = "Inter-| Receive | Transmit\n face |bytes packets | bytes packets\n"
State = namedtuple("State", "isup")

Write = Callable[[str, object], Path]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files of a made machine, on which psutil looks too: two cores, one network, one disk."""
    root = tmp_path / "machine"

    def write(path: str, content: object) -> Path:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n" if not isinstance(content, str) else content, encoding="utf-8")
        return root

    write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nCached: 250 kB\n")
    write("sys/devices/system/cpu/online", "0-1\n")
    for name in ("vda", "loop0", "ram0"):
        write(f"sys/block/{name}/size", 1)
    write("proc/diskstats", disk("vda", 10, 20) + disk("vda1", 10, 20) + disk("loop0", 1, 1) + disk("ram0", 1, 1))
    busy(write, (0, 0), (0, 0))
    network(write, eth0=(5, 7), lo=(1, 1), docker0=(3, 3))
    write("proc/self/cgroup", "0::/\n")
    write("proc/self/mountinfo", "")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(root / "proc"))
    for counters in (psutil.net_io_counters, psutil.disk_io_counters):
        counters.cache_clear()  # what they had on another machine
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": State(True), "lo": State(True), "docker0": State(0)})
    return write


def busy(write: Write, *cores: tuple[int, int]) -> None:
    """`/proc/stat`: of each core the ticks it worked and those it was idle."""
    lines = [STAT.format(n=n, user=user, idle=idle) for n, (user, idle) in enumerate(cores)]
    write("proc/stat", STAT.format(n="", user=0, idle=0) + "".join(lines) + "intr 1\n")


def network(write: Write, **interfaces: tuple[int, int]) -> Path:
    return write(
        "proc/net/dev",
        DEV
        + "".join(f"{name}: {got} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n" for name, (got, sent) in interfaces.items()),
    )


def disk(name: str, read: int, written: int) -> str:
    return f"   8 0 {name} 1 0 {read} 0 1 0 {written} 0 0 0 0\n"


def infiniband(write: Write, port: str = "mlx5_0/ports/1", state: str = "4: ACTIVE\n", got: object = 10) -> Path:
    write(f"sys/class/infiniband/{port}/state", state)
    write(f"sys/class/infiniband/{port}/rate", "200 Gb/sec (4X HDR)\n")
    write(f"sys/class/infiniband/{port}/counters/port_xmit_data", 20)
    return write(f"sys/class/infiniband/{port}/counters/port_rcv_data", got)


def rapl(write: Write, zone: str, name: str, energy: object, limit: object = 1000) -> Path:
    write(f"sys/class/powercap/{zone}/name", f"{name}\n")
    write(f"sys/class/powercap/{zone}/max_energy_range_uj", limit)
    return write(f"sys/class/powercap/{zone}/energy_uj", energy)


def mount(root: str, point: str, kind: str, options: str) -> str:
    return f"31 23 0:28 {root} {point} rw,relatime shared:9 - {kind} {kind} rw,{options}\n"


def read(source: Source, *, slow: bool = True) -> dict[str, float]:
    values = source.read(slow=slow)
    return dict(zip([field.name for field in source.fields], values, strict=True))


@contextmanager
def without_root() -> Iterator[None]:
    """This process as `nobody`, where it is root: to root no file is forbidden."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_this_machine() -> None:
    source = open_sources()
    try:
        told = read(source)
        assert all(NAME.fullmatch(name) for name in told)
        assert told["host.memory_used_bytes"] > 1e7
        assert told["host.load_1min"] >= 0
        assert source.drain_failures() == []
        assert all(reason and "\n" not in reason for reason in source.unavailable.values())
        assert json.loads(json.dumps(source.describe())) == source.describe()
        assert not set(told) & set(source.unavailable)
        assert {field.name for field in source.fields if field.is_slow} >= {
            name for name, value in read(source, slow=False).items() if math.isnan(value) and "busy" not in name
        }
    finally:
        source.close()


def test_counters_of_a_made_machine(tree: Write) -> None:
    root = tree("proc/loadavg", "")
    source = open_host(root)
    assert {name.rpartition(".")[0] for name in read(source) if name.startswith("host.net.")} == {"host.net.eth0"}
    busy(tree, (30, 10), (0, 50))
    told = read(source)
    assert told["host.cpu.0.busy"] == pytest.approx(0.75)
    assert told["host.cpu.1.busy"] == 0
    assert told["host.memory_used_bytes"] == 600 * 1024
    assert told["host.page_cache_bytes"] == 250 * 1024
    assert told["host.net.eth0.received_bytes"] == 5
    assert told["host.net.eth0.sent_bytes"] == 7
    assert told["host.disk.vda.read_bytes"] == 10 * 512
    assert told["host.disk.vda.written_bytes"] == 20 * 512
    assert {name.split(".")[2] for name in told if name.startswith("host.disk.")} == {"vda"}
    assert source.describe()["host.net.left_out"] == "docker0, lo"
    kinds = {field.name: field.kind for field in source.fields}
    assert kinds["host.net.eth0.received_bytes"] == kinds["host.disk.vda.read_bytes"] == "<f8"
    assert source.unavailable["host.infiniband"] == "no InfiniBand device"
    assert source.unavailable["host.energy"] == "the kernel offers no RAPL counters"
    # No time has passed since: nobody knows how busy the cores are.
    assert math.isnan(read(source)["host.cpu.0.busy"])


def test_busy_stays_a_share_where_the_kernel_counts_back(tree: Write) -> None:
    busy(tree, (100, 100), (100, 100))
    source = open_host(tree("proc/loadavg", ""))
    busy(tree, (150, 90), (90, 150))
    told = read(source)
    assert (told["host.cpu.0.busy"], told["host.cpu.1.busy"]) == (1, 0)


def test_cores_keep_the_kernels_numbers(tree: Write) -> None:
    source = open_host(tree("sys/devices/system/cpu/online", "0,4\n"))
    assert [field.name for field in source.fields][:2] == ["host.cpu.0.busy", "host.cpu.4.busy"]
    for online in ("0-7\n", "x\n", "", "0,0\n"):
        source = open_host(tree("sys/devices/system/cpu/online", online))
        assert [field.name for field in source.fields][:2] == ["host.cpu.0.busy", "host.cpu.1.busy"]


def test_many_cores_keep_their_mean_and_maximum(tree: Write) -> None:
    count = MAX_CORES + 4
    busy(tree, *[(0, 0)] * count)
    source = open_host(tree("proc/loadavg", ""))
    busy(tree, (10, 0), (5, 5), *[(0, 10)] * (count - 2))
    told = read(source)
    assert {name for name in told if name.endswith(".busy")} == {"host.cpu.mean.busy", "host.cpu.max.busy"}
    assert told["host.cpu.mean.busy"] == pytest.approx(1.5 / count)
    assert told["host.cpu.max.busy"] == 1
    assert str(MAX_CORES) in source.describe()["host.about.cores"]


def test_a_core_that_goes_ends_all_of_them_once(tree: Write) -> None:
    source = open_host(tree("proc/loadavg", ""))
    busy(tree, (30, 10))
    told = read(source)
    assert math.isnan(told["host.cpu.0.busy"])
    assert math.isfinite(told["host.memory_used_bytes"])
    reason = "the number of cores changed from 2 to 1"
    assert source.drain_failures() == [("host.cpu.0.busy", reason), ("host.cpu.1.busy", reason)]
    busy(tree, (30, 10), (30, 10))
    assert math.isnan(read(source)["host.cpu.0.busy"])
    assert source.drain_failures() == []


def test_an_interface_that_goes_ends_alone(tree: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": State(True), "ib0": State(True)})
    source = open_host(network(tree, eth0=(1, 2), ib0=(3, 4)))
    network(tree, eth0=(10, 20))
    told = read(source)
    assert told["host.net.eth0.received_bytes"] == 10
    assert math.isnan(told["host.net.ib0.sent_bytes"])
    assert source.drain_failures() == [(f"host.net.ib0.{way}_bytes", "ib0 is gone") for way in ("received", "sent")]


def test_counters_that_fall_go_on(tree: Write) -> None:
    infiniband(tree, got=1000)
    source = open_host(network(tree, eth0=(100, 200)))
    infiniband(tree, got=30)
    network(tree, eth0=(10, 250))
    told = read(source)
    assert told["host.net.eth0.received_bytes"] == 110
    assert told["host.net.eth0.sent_bytes"] == 250
    assert told["host.infiniband.mlx5_0.1.received_bytes"] == 4 * 1030
    assert source.drain_failures() == []


def test_infiniband(tree: Write) -> None:
    infiniband(tree, port="mlx5_1/ports/2", state="1: DOWN\n")
    infiniband(tree, port="mlx5_2/ports/1", got="garbage\n")
    infiniband(tree, port="mlx5_3/ports/1", got=2**32 - 1)
    root = infiniband(tree)
    (root / "sys/class/infiniband/empty/ports/1").mkdir(parents=True)
    source = open_host(root)
    told = {k: v for k, v in read(source).items() if k.startswith("host.infiniband.mlx5_0")}
    assert told == {"host.infiniband.mlx5_0.1.received_bytes": 40, "host.infiniband.mlx5_0.1.sent_bytes": 80}
    missing = source.unavailable
    assert missing["host.infiniband.mlx5_1.2"] == "the port is not active (1: DOWN)"
    assert missing["host.infiniband.mlx5_2.1.received_bytes"].endswith("port_rcv_data: 'garbage' is not a whole number")
    assert "32 bits" in missing["host.infiniband.mlx5_3.1.received_bytes"]
    assert missing["host.infiniband.empty.1"].endswith("state: No such file or directory")
    assert read(source)["host.infiniband.mlx5_2.1.sent_bytes"] == 80
    assert source.describe()["host.infiniband.mlx5_0.1.rate"] == "200 Gb/sec (4X HDR)"
    tree("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "-5\n")
    assert math.isnan(read(source)["host.infiniband.mlx5_0.1.received_bytes"])
    assert [name for name, _ in source.drain_failures()] == ["host.infiniband.mlx5_0.1.received_bytes"]


def test_energy_wraps_and_parts_of_parts_are_left_out(tree: Write) -> None:
    rapl(tree, "intel-rapl:0", "package-0", 900)
    rapl(tree, "intel-rapl:0:0", "core", 1)
    rapl(tree, "intel-rapl:0:1", "dram", 50)
    rapl(tree, "intel-rapl:1", "package-1", 5)
    rapl(tree, "intel-rapl:2", "psys", 7)
    root = rapl(tree, "intel-rapl-mmio:0", "package-0", 900)
    source = open_host(root)
    first = {name: value for name, value in read(source).items() if name.startswith("host.energy.")}
    assert first == {
        "host.energy.package-0_j": pytest.approx(900e-6),
        "host.energy.package-0.dram_j": pytest.approx(50e-6),
        "host.energy.package-1_j": pytest.approx(5e-6),
    }
    for energy, joules in ((100, 1100e-6), (1000, 2000e-6), (0, 2000e-6), (1, 2001e-6)):
        rapl(tree, "intel-rapl:0", "package-0", energy)
        assert read(source)["host.energy.package-0_j"] == pytest.approx(joules)
    assert source.drain_failures() == []


def test_energy_that_only_root_may_read() -> None:
    # Not pytest's folder, which only its owner may enter.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def write(path: str, content: object) -> Path:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(str(content))
            return root

        rapl(write, "intel-rapl:0", "package-0", 5)
        root.chmod(0o755)
        (root / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
        with without_root():
            reason = open_host(root).unavailable["host.energy.package-0_j"]
    assert reason.endswith("energy_uj: Permission denied; since CVE-2020-8694 most systems let only root read it")


def test_cgroup_of_version_2(tree: Write) -> None:
    tree("proc/self/mountinfo", mount("/", "/sys/fs/cgroup", "cgroup2", "nsdelegate"))
    tree("proc/self/cgroup", "0::/slurm/job_7/step_0/task_0\n")
    top = "sys/fs/cgroup"
    for folder in ("slurm/job_7/step_0/task_0", "slurm/job_7/step_0", "slurm/job_7", "slurm"):
        tree(f"{top}/{folder}/cpu.max", "max 100000\n")
        tree(f"{top}/{folder}/memory.max", "max\n")
        tree(f"{top}/{folder}/memory.current", len(folder))
        tree(f"{top}/{folder}/cpu.stat", f"usage_usec 5\nthrottled_usec {len(folder)}\n")
    source = open_host(tree("proc/loadavg", ""))
    own = len("slurm/job_7/step_0/task_0")
    assert read(source)["host.cgroup.memory_bytes"] == own
    assert read(source)["host.cpu.throttled_s"] == pytest.approx(own * 1e-6)
    assert source.describe()["host.cgroup.cpu_limit_cores"] == "none"
    assert source.describe()["host.cgroup.memory_limit_bytes"] == "none"

    tree(f"{top}/slurm/job_7/cpu.max", "250000 100000\n")
    tree(f"{top}/slurm/cpu.max", "1600000 100000\n")
    tree(f"{top}/slurm/job_7/step_0/memory.max", 2**33)
    source = open_host(tree("proc/loadavg", ""))
    facts = source.describe()
    assert facts["host.cgroup.cpu_limit_cores"] == "2.5"
    assert facts["host.cgroup.cpu_group"] == "/slurm/job_7 (version 2)"
    assert facts["host.cgroup.memory_limit_bytes"] == str(2**33)
    assert facts["host.cgroup.memory_group"] == "/slurm/job_7/step_0 (version 2)"
    told = read(source)
    assert told["host.cpu.throttled_s"] == pytest.approx(len("slurm/job_7") * 1e-6)
    assert told["host.cgroup.memory_bytes"] == len("slurm/job_7/step_0")


def test_cgroup_of_version_1(tree: Write) -> None:
    tree(
        "proc/self/mountinfo",
        mount("/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct")
        # In a container: the path is the host's, and what is mounted is the container's own group.
        + mount("/docker/a b".replace(" ", "\\040"), "/sys/fs/cgroup/memory", "cgroup", "memory")
        + mount("/", "/sys/fs/cgroup/unified", "cgroup2", "x"),
    )
    tree("proc/self/cgroup", "4:memory:/docker/a b\n1:cpu,cpuacct:/job\n0::/\n")
    tree("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n")
    tree("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    tree("sys/fs/cgroup/cpu,cpuacct/job/cpu.stat", "nr_periods 4\nnr_throttled 2\nthrottled_time 3000000000\n")
    tree("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    tree("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    tree("sys/fs/cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    source = open_host(tree("sys/fs/cgroup/memory/memory.usage_in_bytes", 12345))
    told, facts = read(source), source.describe()
    assert told["host.cpu.throttled_s"] == pytest.approx(3)
    assert told["host.cgroup.memory_bytes"] == 12345
    assert facts["host.cgroup.cpu_limit_cores"] == "1.5"
    assert facts["host.cgroup.cpu_group"] == "/job (version 1)"
    assert facts["host.cgroup.memory_limit_bytes"] == "none"
    assert facts["host.cgroup.memory_group"] == "/ (version 1)"
    tree("sys/fs/cgroup/cpu,cpuacct/job/cpu.stat", "throttled_time ?\n")
    assert math.isnan(read(source)["host.cpu.throttled_s"])
    assert [name for name, _ in source.drain_failures()] == ["host.cpu.throttled_s"]


@pytest.mark.parametrize(
    ("path", "mounts", "files", "reason", "limit"),
    [
        ("/", "", {}, "no cgroup of the controller cpu is mounted", "unknown: no cgroup"),
        ("/../x", "/", {}, "the cgroup /../x is outside of the mounted hierarchy", "unknown: the cgroup"),
        ("/a", "/b", {}, "the cgroup /a is not below /b, which is mounted", "unknown: the cgroup"),
        ("/", "/", {}, "cpu.stat: No such file or directory", "none"),
        ("/", "/", {"cpu.stat": "usage_usec 1\n"}, "no line throttled_usec, as in a group without a CPU limit", "none"),
        ("/", "/", {"cpu.max": "1 0\n", "cpu.stat": ""}, "no line throttled_usec", "unknown: "),
    ],
)
def test_hostile_cgroups(tree: Write, path: str, mounts: str, files: dict[str, str], reason: str, limit: str) -> None:
    tree("proc/self/mountinfo", "garbage - cgroup2\n - \n" + mount(mounts, "/cg", "cgroup2", "x") if mounts else "")
    tree("proc/self/cgroup", f"garbage\n0::{path}\n")
    for name, content in files.items():
        tree(f"cg/{name}", content)
    root = tree("cg/other", "")
    source = open_host(root)
    assert reason in source.unavailable["host.cpu.throttled_s"]
    assert source.describe()["host.cgroup.cpu_limit_cores"].startswith(limit)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (TypeError("an integer is required"), "TypeError: an integer is required"),
        (["x"], "ValueError: could not convert"),
        ([], "ValueError: 0 values instead of 1"),
    ],
)
def test_what_a_library_did_not_expect_ends_its_field_alone(answer: Any, why: str) -> None:
    def call() -> Any:
        calls.append(1)
        if len(calls) < 2:
            return [1.0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    calls: list[int] = []
    good = Reading(fields=(Field(name="good"),), call=lambda: [7])
    source = Source([Reading(fields=(Field(name="bad"),), call=call), good])
    assert [field.name for field in source.fields] == ["bad", "good"]
    for _ in range(2):
        bad, fine = source.read(slow=True)
        assert math.isnan(bad)
        assert fine == 7
    ((name, reason),) = source.drain_failures()
    assert name == "bad"
    assert reason.startswith(why)
    calls.append(1)
    never = Source([Reading(fields=(Field(name="bad"),), call=call), good])
    assert list(never.unavailable) == ["bad"]
    assert [field.name for field in never.fields] == ["good"]


def test_counters_that_start_again_are_kept_up_with(tree: Write) -> None:
    """Three times around between two samples, and looked at in time."""
    root = rapl(tree, "intel-rapl:0", "package-0", 900)
    source = open_host(root)
    assert source.keep_up_s == 60
    for energy in (100, 800, 300, 900, 200):
        rapl(tree, "intel-rapl:0", "package-0", energy)
        source.keep_up()
    assert read(source)["host.energy.package-0_j"] == pytest.approx(3200e-6)
    tree("sys/class/powercap/intel-rapl:0/energy_uj", "lost\n")
    source.keep_up()
    assert [name for name, _ in source.drain_failures()] == ["host.energy.package-0_j"]
    assert source.keep_up_s == math.inf


@given(st.lists(st.integers(min_value=0, max_value=2**63), min_size=1), st.none() | st.integers(2**63, 2**64))
def test_a_rising_counter_never_falls_and_counts_every_rise(steps: list[int], wraps_at: int | None) -> None:
    counter = MonotonicCounter(wraps_at)
    found = [counter.at(step) for step in steps]
    assert found == sorted(found)
    assert found[0] == steps[0]
    for before, after, was, now in zip(found, found[1:], steps, steps[1:], strict=False):
        rise = now - was if now >= was else now if wraps_at is None else wraps_at - was + now
        assert after - before == rise


@given(st.lists(st.text(max_size=80), unique=True, max_size=20))
def test_parts_of_names_are_plain_and_differ(names: list[str]) -> None:
    parts = field_parts(names)
    assert list(parts) == names
    assert len(set(parts.values())) == len(names)
    assert all(NAME.fullmatch(part) and len(part) <= 70 for part in parts.values())
