"""The Slurm cluster in a box: its configuration as text (always), and the real thing (marked `slurm`)."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import cli
from dlbench.errors import RunError, UserError
from dlbench.jobs.box import config as box_config
from dlbench.jobs.box import host as box_host
from dlbench.jobs.box.box import Box, check_requirements
from dlbench.jobs.box.config import BoxPlan, Equipment
from dlbench.jobs.box.host import Process
from tests.support.slurm import WHOLE

MPI_PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    enum { COUNT = 500000 };  /* 2 MB: well above what is sent without asking the other side first */
    char host[MPI_MAX_PROCESSOR_NAME];
    float *in = malloc(COUNT * sizeof *in), *out = malloc(COUNT * sizeof *out);
    int rank, size, length;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(host, &length);
    for (int i = 0; i < COUNT; i++) in[i] = rank + 1;
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime();
    MPI_Allreduce(in, out, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d on %s: sum %g in %.4f s\n", rank, size, host, out[COUNT - 1], MPI_Wtime() - begin);
    MPI_Finalize();
    return 0;
}
"""


def make_plan(folder: Path, num_nodes: int = 2) -> BoxPlan:
    return BoxPlan(
        folder=folder,
        token="beef",
        num_nodes=num_nodes,
        cpus_per_node=4,
        memory_mb=1000,
        subnet=IPv4Network("198.18.0.16/28"),
        controller_port=23456,
        login_name="login",
    )


# What is only text.


def test_slurm_conf_says_where_everything_is() -> None:
    lines = box_config.render_slurm_conf(make_plan(Path("/tmp/box"), num_nodes=3)).splitlines()
    for wanted in (
        "SlurmctldHost=boxctl(198.18.0.17)",
        "SlurmctldPort=23456",
        "AuthInfo=socket=/tmp/box/munge/socket,cred_expire=10",
        "TmpFS=/tmp/box/tmp.%n",
        "JobCompLoc=/tmp/box/jobcomp.txt",
        "NodeName=n1 NodeAddr=198.18.0.18 CPUs=4 RealMemory=1000 State=UNKNOWN",
        "NodeName=n3 NodeAddr=198.18.0.20 CPUs=4 RealMemory=1000 State=UNKNOWN",
    ):
        assert wanted in lines
    keys = [line.partition("=")[0] for line in lines if line and not line.startswith("#")]
    assert len([key for key in keys if key != "NodeName"]) == len({key for key in keys if key != "NodeName"})
    assert keys.count("NodeName") == 3


def test_every_line_of_slurm_conf_is_a_comment_or_one_setting() -> None:
    text = box_config.render_slurm_conf(make_plan(Path("/tmp/box"), num_nodes=8))
    for line in text.splitlines():
        assert not line or line.startswith("# ") or re.fullmatch(r"[A-Za-z]+=\S+( [A-Za-z]+=\S+)*", line), line


def equipped(**has: Any) -> BoxPlan:
    box_config.check_equipment(Equipment(**has), nodes=4, cpus_per_node=8)
    return dataclasses.replace(make_plan(Path("/tmp/box"), num_nodes=4), cpus_per_node=8, equipment=Equipment(**has))


def test_devices_features_and_partitions_are_lines_of_slurm_s_files() -> None:
    plan = equipped(
        gres=("gpu:a100:2,gpu:h100:1", "n4=nic:2"),
        features=("a100,nvlink", "n2=big"),
        partitions=("batch", "debug Nodes=n1 MaxTime=30 PriorityTier=10"),
        sockets=2,
        memory_mb=16000,
    )
    lines = box_config.render_slurm_conf(plan).splitlines()
    for wanted in (
        "NodeName=n2 NodeAddr=198.18.0.19 CPUs=8 Sockets=2 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000 "
        "Gres=gpu:a100:2,gpu:h100:1 Feature=a100,nvlink,big State=UNKNOWN",
        "PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP",
        "PartitionName=debug Nodes=n1 MaxTime=30 PriorityTier=10 Default=NO State=UP",
        "GresTypes=gpu,nic",
        "SelectTypeParameters=CR_Core_Memory",
    ):
        assert wanted in lines
    devices = box_config.render_gres_conf(plan).splitlines()
    assert "NodeName=n4 Name=gpu Type=h100 File=/tmp/box/dev/gpu[2-2]" in devices
    assert "NodeName=n4 Name=nic File=/tmp/box/dev/nic[0-1]" in devices
    assert [path.name for path in box_config.device_files(plan)] == ["gpu0", "gpu1", "gpu2", "nic0", "nic1"]


@given(switches=st.integers(1, 8), nodes=st.integers(1, 8))
def test_every_node_hangs_on_one_leaf(switches: int, nodes: int) -> None:
    names = tuple(f"n{index}" for index in range(1, nodes + 1))
    leaves = Equipment(switches=min(switches, nodes)).leaves(names)
    assert [name for leaf in leaves for name in leaf] == list(names)
    assert max(map(len, leaves)) - min(map(len, leaves)) <= 1
    assert min(map(len, leaves)) >= 1


@pytest.mark.parametrize(
    "has",
    [
        {"gres": ("gpu",)},
        {"gres": ("gpu:0",)},
        {"gres": ("gpu:4\nSlurmUser=x",)},
        {"features": ("a b",)},
        {"partitions": ("debug\nSlurmUser=x",)},
        {"partitions": ("debug MaxTime",)},
        {"switches": 5},
        {"sockets": 3},
        {"sockets": 2, "threads_per_core": 3},
    ],
)
def test_equipment_that_no_box_has_is_refused(has: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"is no|are no|leaf switches"):
        equipped(**has)


def test_cgroup_conf_follows_the_version() -> None:
    assert "IgnoreSystemd=yes" in box_config.render_cgroup_conf((22, 5))
    assert "CgroupPlugin=disabled" in box_config.render_cgroup_conf((24, 5))


def test_hosts_name_nodes_login_and_controller() -> None:
    assert box_config.render_hosts(make_plan(Path("/tmp/box"))) == (
        "127.0.0.1 localhost\n::1 localhost\n198.18.0.17 boxctl login\n198.18.0.18 n1\n198.18.0.19 n2\n"
    )


def test_names_in_the_kernel_are_short_and_carry_the_token() -> None:
    plan = make_plan(Path("/tmp/box"), num_nodes=box_config.MAX_NODES)
    names = [plan.bridge, *(node.veth for node in plan.nodes)]
    assert all(len(name) <= 15 and "beef" in name for name in names)
    assert len(set(names)) == 1 + box_config.MAX_NODES
    addresses = {node.address for node in plan.nodes} | {plan.bridge_address}
    assert len(addresses) == 1 + box_config.MAX_NODES
    assert addresses <= set(plan.subnet.hosts())


@pytest.mark.parametrize("folder", ["/tmp/my box", "/tmp/a#b", "/tmp/%n", "/tmp/a\nb", "/tmp/a'b", "/tmp/" + "x" * 60])
def test_a_folder_slurm_cannot_be_told_of_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match="cannot live in"):
        box_config.absolute_folder(Path(folder))


@pytest.mark.parametrize(("nodes", "cpus"), [(0, 2), (9, 2), (2, 0), (2, 513)])
def test_impossible_sizes_are_refused(nodes: int, cpus: int) -> None:
    with pytest.raises(UserError, match=r"a box has|a node of a box has"):
        box_config.check_size(nodes, cpus)


def test_both_ends_of_every_link_are_shaped() -> None:
    commands = box_config.shape(make_plan(Path("/tmp/box")), "200mbit")
    assert [command[: command.index("root")] for command in commands] == [
        ["tc", "qdisc", "replace", "dev", "dlbbeefv1"],
        ["tc", "qdisc", "replace", "dev", "dlbbeefv2"],
        ["tc", "-n", "dlbbeefn1", "qdisc", "replace", "dev", "eth0"],
        ["tc", "-n", "dlbbeefn2", "qdisc", "replace", "dev", "eth0"],
    ]
    assert all(command[-6:] == ["rate", "200mbit", "burst", "64kb", "latency", "50ms"] for command in commands)


def test_a_leaf_switch_is_a_bridge_with_an_uplink_of_its_own_rate() -> None:
    plan = equipped(switches=2)
    up = " ".join(word for command in box_config.network_up(plan) for word in command)
    masters = re.findall(r"set dlbbeef(\w\d) master dlbbeef(\S*) up", up)
    wanted = ["u1:", "d1:s1", "v1:s1", "v2:s1", "u2:", "d2:s2", "v3:s2", "v4:s2"]
    assert sorted(":".join(pair) for pair in masters) == sorted(wanted)
    rates = {c[c.index("dev") + 1]: c[c.index("rate") + 1] for c in box_config.shape(plan, "200mbit", "100mbit")}
    assert {name: rate for name, rate in rates.items() if rate == "100mbit"}.keys() == {
        *("dlbbeefu1", "dlbbeefd1", "dlbbeefu2", "dlbbeefd2")
    }
    assert all("del" in command for command in box_config.shape(plan, None))
    with pytest.raises(UserError, match="--switches"):
        box_config.shape(make_plan(Path("/tmp/box")), "200mbit", "100mbit")


@pytest.mark.parametrize("rate", ["", "fast", "200", "0mbit", "-1mbit", "200mbit burst 1", "200Mbit/s"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    for rates in ((rate, None), (None, rate)):
        with pytest.raises(UserError, match="rate of a link"):
            box_config.shape(equipped(switches=2), *rates)


# The machine below, without Slurm.


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


def test_a_process_is_known_by_its_start_time_too(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = box_host.start_ticks(sleeper.pid)
    assert ticks is not None
    assert Process("sleep", sleeper.pid, ticks).is_alive()
    stranger = Process("of an earlier box", sleeper.pid, ticks - 1)
    assert not stranger.is_alive()
    box_host.end([stranger], grace_s=0)
    assert sleeper.poll() is None
    box_host.end([Process("sleep", sleeper.pid, ticks)], grace_s=2)
    assert box_host.start_ticks(sleeper.pid) is None


def test_a_process_that_ignores_the_request_is_ended(tmp_path: Path) -> None:
    process = box_host.spawn("stubborn", ["sh", "-c", "trap '' TERM; echo deaf; sleep 100"], tmp_path / "log")
    assert box_host.wait_until(lambda: (tmp_path / "log").read_text() == "deaf\n", time.monotonic() + 10)
    # Its child has inherited the deaf ear; it is a process of its own for whoever ends processes by pid.
    child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    box_host.end([process], grace_s=0.1)
    assert not process.is_alive()
    box_host.end([Process("sleep", child, box_host.start_ticks(child) or 0)], grace_s=0)
    box_host.reap([process])


def test_a_free_subnet_overlaps_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = [{"dst": "default"}, {"dst": "198.18.0.0/16"}, {"dst": "198.19.0.0/17"}, {"dst": "198.19.128.5"}]
    monkeypatch.setattr(box_host, "call", lambda _argv: json.dumps(routes))
    subnet = box_host.free_subnet(box_config.SUBNETS, 28)
    assert subnet.subnet_of(IPv4Network("198.19.128.0/17"))
    assert subnet != IPv4Network("198.19.128.0/28")
    monkeypatch.setattr(box_host, "call", lambda _argv: json.dumps([{"dst": "198.18.0.0/15"}]))
    with pytest.raises(RunError, match="in use"):
        box_host.free_subnet(box_config.SUBNETS, 28)


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(box_host, "SEARCH_PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    missing = check_requirements()
    assert any(line.startswith("not root") for line in missing)
    for name in ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare"):
        assert any(f"no program {name}:" in line and "apt install" in line for line in missing)
    assert all("\n" not in line for line in missing)


# The state file.


def test_the_state_survives_the_file(tmp_path: Path) -> None:
    plan, processes = make_plan(tmp_path), [Process("munged", 12, 345)]
    box_host.save_state(plan, processes, first=True)
    assert box_host.load_state(tmp_path) == (plan, processes)
    with pytest.raises(UserError, match="another process"):
        box_host.save_state(plan, processes, first=True)
    box_host.mark_stopped(tmp_path)
    assert box_host.is_stopped(tmp_path)


def test_after_a_reboot_no_process_is_ours(tmp_path: Path) -> None:
    box_host.save_state(make_plan(tmp_path), [Process("munged", 12, 345)])
    path = tmp_path / "box.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))
    assert box_host.load_state(tmp_path)[1] == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": "dlbench-box"}', '{"format": "dlbench-box", "version": 1}']
)
def test_a_damaged_state_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "box.json").write_text(text)
    with pytest.raises(UserError, match=r"box\.json"):
        Box.attach(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "precious").write_text("mine")
    with pytest.raises(UserError, match="no box's"):
        box_host.clear_state(tmp_path)
    assert (tmp_path / "log" / "precious").read_text() == "mine"


def test_no_box_is_no_traceback(tmp_path: Path) -> None:
    for command, *more in (["stop"], ["status"], ["shape", "200mbit"]):
        result = CliRunner().invoke(cli, ["box", command, str(tmp_path), *more])
        assert isinstance(result.exception, UserError)
        assert "no box runs in" in str(result.exception)


# Who else could have written there. 65534 stands for another user.


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def box_of(folder: Path, process: Process | None = None) -> Path:
    """A folder with the state of a box that is none."""
    folder.mkdir(exist_ok=True)
    box_host.save_state(make_plan(folder), [process or Process("munged", 12, 345)])
    return folder


@needs_root
def test_a_state_file_of_another_user_ends_no_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as victim:
        ticks = box_host.start_ticks(victim.pid)
        assert ticks is not None
        folder = box_of(tmp_path / "box", Process("slurmd.n1", victim.pid, ticks))
        os.chown(folder, 65534, 65534)
        for owner in (0, 65534):
            os.chown(folder / "box.json", owner, owner)
            done = CliRunner().invoke(cli, ["box", "stop", str(folder)])
            assert isinstance(done.exception, UserError)
            assert f"{folder} belongs to user 65534" in str(done.exception)
        os.chown(folder, 0, 0)
        done = CliRunner().invoke(cli, ["box", "stop", str(folder)])
        assert "box.json belongs to user 65534" in str(done.exception)
        assert victim.poll() is None
        victim.kill()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short enough for Slurm's sockets, as pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="box-") as folder:
        yield Path(folder)


def start_in(folder: Path) -> str:
    """Why no box starts there."""
    with pytest.raises(UserError) as told:
        Box.start(folder)
    return str(told.value)


def test_a_folder_that_others_may_write_is_refused(short_path: Path) -> None:
    folder = short_path / "box"
    folder.mkdir()
    for mode in (0o777, 0o1777, 0o775, 0o757):
        folder.chmod(mode)
        words = f"others may write {folder} (mode {mode:04o})"
        assert words in start_in(folder)
        if mode != 0o1777:  # as /tmp: nobody takes away there what is not theirs
            assert words in start_in(folder / "in" / "it")
    folder.chmod(0o1777)
    box_host.check_folder(folder / "in" / "it")


@needs_root
def test_a_folder_below_another_user_s_is_refused(short_path: Path) -> None:
    (short_path / "home" / "box").mkdir(parents=True)
    os.chown(short_path / "home", 65534, 65534)
    for folder in (short_path / "home" / "box", short_path / "home" / "new"):
        assert f"{short_path / 'home'} belongs to user 65534" in start_in(folder)
    assert not (short_path / "home" / "new").exists()


def test_a_link_is_no_folder_and_one_on_the_way_is_followed_to_where_it_leads(short_path: Path) -> None:
    (short_path / "open" / "box").mkdir(parents=True)
    (short_path / "open").chmod(0o777)
    (short_path / "link").symlink_to(short_path / "open" / "box")
    (short_path / "way").symlink_to(short_path / "open")
    assert "is a symbolic link" in start_in(short_path / "link")
    assert f"others may write {short_path / 'open'} (mode 0777)" in start_in(short_path / "way" / "box")


def test_what_was_left_in_a_stopped_box_is_looked_at_before_it_is_cleared(tmp_path: Path) -> None:
    folder = box_of(tmp_path / "box")
    box_host.mark_stopped(folder)
    (tmp_path / "target").write_text("precious")
    (folder / "slurm.conf").symlink_to(tmp_path / "target")
    with pytest.raises(UserError, match=r"slurm\.conf is a symbolic link, which no box makes"):
        box_host.clear_state(folder)
    (folder / "slurm.conf").unlink()
    (folder / "slurm.conf").touch()
    (folder / "slurm.conf").chmod(0o666)
    with pytest.raises(UserError, match=r"others may write .*slurm\.conf \(mode 0666\)"):
        box_host.clear_state(folder)
    assert (tmp_path / "target").read_text() == "precious"


def test_files_of_a_box_are_its_owner_s_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        box_host.make_folder(tmp_path / "a" / "b")
        box_host.write_new(tmp_path / "a" / "b" / "slurm.conf", "x")
        box_of(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for path in (tmp_path / "a", *(tmp_path / "a").rglob("*")):
        assert path.stat().st_mode & 0o022 == 0, path


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "long"])
def test_a_state_that_is_no_plain_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "box.json"
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b" " * (box_host.MAX_STATE_BYTES + 1))
    with pytest.raises(UserError, match=r"box\.json"):
        Box.attach(tmp_path)


# The real thing.


def run(box: Box, *argv: str, cwd: Path | None = None, timeout_s: float = 180) -> str:
    done = subprocess.run(
        argv,
        env={**os.environ, **box.environment},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    assert box_host.wait_until(condition, time.monotonic() + timeout_s, pause_s=0.1)


def names_of(prefix: str) -> list[tuple[str, str]]:
    return list(box_host.kernel_names(prefix))


def job_state(box: Box, job: str) -> str:
    return run(box, "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


@pytest.mark.slurm
def test_ranks_run_on_nodes_with_names_of_their_own(slurm_box: Box) -> None:
    assert slurm_box.node_names == ("n1", "n2")
    output = run(slurm_box, "srun", "-N2", "--ntasks-per-node=2", "hostname")
    assert sorted(output.split()) == ["n1", "n1", "n2", "n2"]


@pytest.mark.slurm
def test_nodes_see_each_other_by_name_and_the_same_files(slurm_box: Box, tmp_path: Path) -> None:
    script = "getent ahostsv4 n2 boxctl | cut -d' ' -f1 | sort -u; ls -L /sys/class/net; touch $SLURMD_NODENAME"
    lines = run(slurm_box, "srun", "-N1", "-w", "n1", "sh", "-c", script, cwd=tmp_path).split()
    plan = slurm_box.plan
    assert set(lines[:2]) == {str(plan.bridge_address), str(plan.nodes[1].address)}
    # bonding_masters is a file of the driver, not an interface.
    assert [name for name in lines[2:] if name != "bonding_masters"] == [box_config.NODE_INTERFACE, "lo"]
    assert (tmp_path / "n1").exists()


@pytest.mark.slurm
def test_chained_jobs_follow_each_other(slurm_box: Box, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nset -e\nsrun --ntasks-per-node=1 hostname\n")
    job = run(slurm_box, "sbatch", "--parsable", "-N2", "-o%j", str(script), cwd=tmp_path).strip()
    chain = ["sbatch", "--parsable", "-N2", "-o%j", f"--dependency=afterany:{job}"]
    last = run(slurm_box, *chain, str(script), cwd=tmp_path).strip()
    wait_for(lambda: job_state(slurm_box, last) == "COMPLETED")
    assert sorted((tmp_path / last).read_text().split()) == ["n1", "n2"]
    # Known by both: the controller's memory and the list of finished jobs.
    assert "JobState=COMPLETED" in run(slurm_box, "scontrol", "show", "job", job)
    assert re.search(
        rf"^JobId={job} .*JobState=COMPLETED", (slurm_box.plan.folder / "jobcomp.txt").read_text(), re.MULTILINE
    )


@pytest.mark.slurm
def test_a_cancelled_job_ends_everywhere(slurm_box: Box, tmp_path: Path) -> None:
    wrap = "srun --ntasks-per-node=1 sh -c 'touch $SLURMD_NODENAME; sleep 300'"
    job = run(slurm_box, "sbatch", "--parsable", "-N2", "-o%j", f"--wrap={wrap}", cwd=tmp_path).strip()
    wait_for(lambda: (tmp_path / "n1").exists() and (tmp_path / "n2").exists())
    run(slurm_box, "scancel", job)
    wait_for(lambda: job_state(slurm_box, job) == "CANCELLED")
    wait_for(lambda: set(slurm_box.node_states().values()) == {"idle"})


@pytest.fixture(scope="session")
def mpi_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("mpicc") is None:
        pytest.skip("no mpicc: install libopenmpi-dev")
    folder = tmp_path_factory.mktemp("mpi")
    (folder / "sum.c").write_text(MPI_PROGRAM)
    subprocess.run(["mpicc", "-O1", "-std=c99", "-o", "sum", "sum.c"], cwd=folder, check=True, timeout=120)
    return folder / "sum"


def allreduce(box: Box, program: Path) -> dict[int, tuple[str, float, float]]:
    """Each rank's host, result and time in seconds; two ranks per node, started through PMIx."""
    # As many ranks as processors on each node, but more than the machine may have.
    output = run(box, "env", "OMPI_MCA_mpi_yield_when_idle=1", "srun", "--mpi=pmix", "-N2", "-n4", str(program))
    found = re.findall(r"rank (\d) of 4 on (\w+): sum (\S+) in (\S+) s", output)
    return {int(rank): (host, float(total), float(time_s)) for rank, host, total, time_s in found}


@pytest.fixture
def with_pmix(slurm_box: Box) -> Box:
    done = subprocess.run(
        ["srun", "--mpi=list"], check=False, env={**os.environ, **slurm_box.environment}, capture_output=True
    )
    if b"pmix" not in done.stdout + done.stderr:
        pytest.skip("this Slurm has no PMIx plugin: install slurm-wlm-basic-plugins")
    return slurm_box


@pytest.mark.slurm
def test_mpi_adds_up_across_nodes(with_pmix: Box, mpi_program: Path) -> None:
    ranks = allreduce(with_pmix, mpi_program)
    assert sorted(host for host, _, _ in ranks.values()) == ["n1", "n1", "n2", "n2"]
    assert [total for _, total, _ in ranks.values()] == [10.0] * 4


@pytest.mark.slurm
def test_a_shaped_link_is_slow_and_can_be_freed(with_pmix: Box, mpi_program: Path) -> None:
    with_pmix.shape(None)
    try:
        with_pmix.shape("100mbit")
        slow = max(time_s for _, _, time_s in allreduce(with_pmix, mpi_program).values())
    finally:
        with_pmix.shape(None)
    # 2 MB cross the link at 100 Mbit/s in 0.16 s at best; a burst of 64 KiB is free.
    assert slow > 0.14
    left = subprocess.run(["tc", "qdisc"], capture_output=True, text=True, check=True).stdout
    assert f" dev {with_pmix.plan.bridge}v" not in "".join(line for line in left.splitlines() if " tbf " in line)


@pytest.mark.slurm
def test_two_boxes_coexist_and_stop_leaves_nothing(slurm_box: Box, slurm_folder: Path) -> None:
    with Box.start(slurm_folder, nodes=1, cpus_per_node=8) as other:
        assert other.plan.token != slurm_box.plan.token
        assert len(names_of(other.plan.bridge)) == 3
        run(other, "srun", "-n8", "true")
        assert run(slurm_box, "srun", "-N2", "hostname").split()
        with pytest.raises(UserError, match="already runs"):
            Box.start(slurm_folder)
        # A process that left its job and its session is the box's all the same.
        run(other, "srun", "-N1", "sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $! > left", cwd=slurm_folder)
        Box.attach(slurm_folder).stop()
        other.stop()
    assert names_of(other.plan.bridge) == []
    assert box_host.start_ticks(int((slurm_folder / "left").read_text())) is None
    assert not any(process.is_alive() for process in other.processes)
    assert slurm_box.is_alive()
    assert set(slurm_box.node_states().values()) == {"idle"}


@pytest.mark.slurm
def test_the_commands_start_and_stop_a_box_again_and_again(slurm_folder: Path) -> None:
    runner = CliRunner()
    for _ in range(2):
        result = runner.invoke(cli, ["box", "start", str(slurm_folder), "--nodes", "1"])
        assert result.exit_code == 0, result.output
        assert f"export SLURM_CONF={slurm_folder}/slurm.conf\n" in result.output
        result = runner.invoke(cli, ["box", "status", str(slurm_folder)])
        assert re.search(r"slurmd\.n1 +pid \d+ +runs", result.output)
        assert re.search(r"n1 +idle", result.output)
        for rate, words in (("50mbit", "limited to 50mbit"), ("none", "are free"), ("none", "are free")):
            assert words in runner.invoke(cli, ["box", "shape", str(slurm_folder), rate]).output
        assert isinstance(runner.invoke(cli, ["box", "shape", str(slurm_folder), "fast"]).exception, UserError)
        for words in ("is gone", "no box runs"):
            result = runner.invoke(cli, ["box", "stop", str(slurm_folder)])
            assert result.exit_code == 0
            assert words in result.output


def left_of(folder: Path) -> list[str]:
    """All that a box in a folder has outside it: processes, networks, mounts, loop devices, cgroups, each one line."""
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        if str(folder).encode() in _read(path / "cmdline") + _read(path / "environ"):
            left.append(f"{path}: {_read(path / 'cmdline').decode()}")
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    left += [
        str(path) for path in Path("/sys/block").glob("loop*/loop/backing_file") if str(folder) in path.read_text()
    ]
    for state in folder.glob("box*.json"):
        token = json.loads(state.read_text())["plan"]["token"]
        left += [name for _, name in names_of(f"dlb{token}")]
        left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/dlb{token}")]
    return left


def cycle(folder: Path, options: Sequence[str]) -> None:
    with Box.start(folder, nodes=1, has=WHOLE if options else Equipment()) as box:
        assert run(box, "srun", "hostname").split() == ["n1"]
    assert left_of(folder) == []


def kill_a_start(folder: Path, options: Sequence[str], after_s: float) -> bool:
    """Start in a process that is killed so many seconds later; `stop` ends what is left. Whether it was in time."""
    command = [sys.executable, "-P", "-m", "dlbench", "box", "start", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/") as starting:
        box_host.wait_until(lambda: starting.poll() is not None, time.monotonic() + after_s, pause_s=0.01)
        was_in_time = starting.poll() is None
        starting.kill()
    if (folder / "box.json").exists():
        Box.attach(folder).stop()
    # A program that it was just starting, to ask it something, ends by itself.
    box_host.wait_until(lambda: not left_of(folder), time.monotonic() + 60, pause_s=0.1)
    assert left_of(folder) == []
    return was_in_time


OPTIONS = ("--nodes=1", "--accounting", "--switches=1", "--gres=gpu:4", "--pfs=10MB/s")


@pytest.fixture
def can_keep_books() -> None:
    if lacks := check_requirements(WHOLE):
        pytest.skip("; ".join(lacks))


@pytest.mark.slurm
def test_a_start_that_is_killed_leaves_nothing(can_keep_books: None, slurm_folder: Path) -> None:
    # A start takes 4 s; the last of these moments is that of slurmdbd or later.
    for after_s in (0.6, 1.0, 2.0):
        kill_a_start(slurm_folder, OPTIONS, after_s)
    # The next start clears what a killed one left, without `stop`.
    (slurm_folder / ".box.json.12").write_text("half a sta")
    cycle(slurm_folder, ())


@pytest.mark.slurm
@pytest.mark.nightly
def test_twenty_cycles_and_twenty_killed_starts_leave_nothing(can_keep_books: None, slurm_folder: Path) -> None:
    for _ in range(20):
        cycle(slurm_folder, OPTIONS)
    chance = random.Random(18)
    assert sum(kill_a_start(slurm_folder, OPTIONS, chance.uniform(0.2, 5)) for _ in range(20)) >= 5


@pytest.mark.slurm
def test_books_are_kept_and_a_better_qos_takes_the_nodes(whole_box: Box) -> None:
    folder = whole_box.plan.folder.parent / "jobs"
    folder.mkdir()
    folder.chmod(0o777)
    batch = ("sbatch", "--parsable", "-N2", "--exclusive", "-o%j")
    stranger = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    low = run(whole_box, *stranger, *batch, "-qlow", "--wrap=srun sleep 60; id -u", cwd=folder).strip()
    wait_for(lambda: job_state(whole_box, low) == "RUNNING")
    high = run(whole_box, *batch, "-qhigh", "-Alab", "--gres=gpu:a100:4", "--wrap=srun hostname", cwd=folder).strip()
    wait_for(lambda: job_state(whole_box, high) == "COMPLETED")
    assert job_state(whole_box, low) == "PENDING"
    run(whole_box, "scancel", low)
    query = ("sacct", "-nPX", "--duplicates", f"--jobs={low},{high}", "--format=jobid,user,account,qos,state,nnodes")
    wanted = {f"{low}|nobody|lab|low|PREEMPTED|2", f"{high}|root|lab|high|COMPLETED|2"}
    # slurmctld tells slurmdbd with a delay, and a job's QOS after its state.
    wait_for(lambda: wanted <= set(run(whole_box, *query).splitlines()), timeout_s=120)


@pytest.mark.slurm
def test_switches_devices_features_and_memory_are_there(whole_box: Box) -> None:
    script = "echo $SLURM_TOPOLOGY_ADDR $CUDA_VISIBLE_DEVICES"
    told = run(whole_box, "srun", "-N2", "--gres=gpu:2", "-Ca100&nvlink", "--mem=100", "sh", "-c", script)
    assert sorted(told.splitlines()) == ["root.leaf1.n1 0,1", "root.leaf2.n2 0,1"]
    for refused in (["--gres=gpu:5"], ["--mem=8001"], ["-Cv100"], ["-pdebug", "-t60"], ["-Anone"], ["-qnone"]):
        command = ["sbatch", "--test-only", *refused, "--wrap=true"]
        done = subprocess.run(command, env={**os.environ, **whole_box.environment}, capture_output=True, check=False)
        assert done.returncode, refused


@pytest.mark.slurm
def test_an_uplink_is_slow_for_nodes_of_two_leaves(whole_box: Box) -> None:
    first, last = whole_box.plan.nodes
    code = "import socket, sys; s = socket.create_server(('', 7)); print('up', flush=True); c = s.accept()[0]\n"
    code += "n = 0\nwhile n < 1500000: n += len(c.recv(65536))\nc.send(b'.')"
    server = ["nsenter", f"--net=/run/netns/{last.namespace}", sys.executable, "-c", code]
    send = (
        f"import socket; s = socket.create_connection(({str(last.address)!r}, 7)); s.sendall(bytes(1500000)); s.recv(1)"
    )
    whole_box.shape(None, "40mbit")
    try:
        with subprocess.Popen(server, stdout=subprocess.PIPE) as receiving:
            assert receiving.stdout is not None
            assert receiving.stdout.readline() == b"up\n"
            begin = time.monotonic()
            box_host.call(["nsenter", f"--net=/run/netns/{first.namespace}", sys.executable, "-c", send])
            # At best 0.3 s at 40 Mbit/s; bursts of 64 KiB are free.
            assert time.monotonic() - begin > 0.25
    finally:
        whole_box.shape(None)


@pytest.mark.slurm
def test_the_shared_file_system_is_slow_for_all_nodes_together(whole_box: Box) -> None:
    if not whole_box.plan.equipment.pfs:
        pytest.skip(str(box_host.why_no_storage()))
    shared = whole_box.plan.folder / "pfs"
    # 6 MB at 10 MB/s, direct so that no cache helps; a node's own disk writes them in milliseconds.
    write = f"dd if=/dev/zero of={shared}/$SLURMD_NODENAME bs=1M count=3 oflag=direct 2>&1"
    begin = time.monotonic()
    run(whole_box, "srun", "-N2", "sh", "-c", write)
    assert time.monotonic() - begin > 0.5
    assert {path.name for path in shared.iterdir()} >= {"n1", "n2"}


@pytest.mark.slurm
def test_a_start_that_fails_names_the_log_and_leaves_nothing(
    slurm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "slurmd"
    fake.write_text('#!/bin/sh\n[ "$1" = -V ] && echo slurm-wlm 22.05.8 && exit\necho "fatal: planted" >&2\nexit 1\n')
    fake.chmod(0o755)
    search = f"{tmp_path}:{box_host.SEARCH_PATH}"
    monkeypatch.setattr(box_host, "DAEMON_ENVIRONMENT", {**box_host.DAEMON_ENVIRONMENT, "PATH": search})
    with pytest.raises(RunError, match=r"slurmd\.n\d ended at once; .*slurmd\.n\d\.out: fatal: planted"):
        Box.start(slurm_folder)
    assert Box.was_stopped(slurm_folder)
    plan = json.loads((slurm_folder / "box.stopped.json").read_text())["plan"]
    assert not names_of(f"dlb{plan['token']}")
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(slurm_folder).encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
