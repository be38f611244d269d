"""The Slurm cluster in a box: its configuration as text (always), and the real thing (marked `slurm`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from dlbench.errors import RunError, UserError
from tests.slurm_box import config as box_config
from tests.slurm_box import host as box_host
from tests.slurm_box.box import Box
from tests.slurm_box.config import BoxPlan
from tests.slurm_box.host import Process

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("folder", ["/tmp/my box", "/tmp/a#b", "/tmp/%n", "/tmp/a\nb", "/tmp/a'b", "/tmp/" + "x" * 60])
def test_a_folder_slurm_cannot_be_told_of_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match="cannot live in"):
        box_config.absolute_folder(Path(folder))


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


def test_a_free_subnet_overlaps_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = [{"dst": "default"}, {"dst": "198.18.0.0/16"}, {"dst": "198.19.0.0/17"}, {"dst": "198.19.128.5"}]
    monkeypatch.setattr(box_host, "call", lambda _argv: json.dumps(routes))
    subnet = box_host.free_subnet(box_config.SUBNETS, 28)
    assert subnet.subnet_of(IPv4Network("198.19.128.0/17"))
    assert subnet != IPv4Network("198.19.128.0/28")
    monkeypatch.setattr(box_host, "call", lambda _argv: json.dumps([{"dst": "198.18.0.0/15"}]))
    with pytest.raises(RunError, match="in use"):
        box_host.free_subnet(box_config.SUBNETS, 28)


# The state file.


def test_a_state_that_others_could_write_is_not_believed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no box runs in"):
        Box.attach(tmp_path)
    folder = tmp_path / "box"
    box_host.clear_state(folder)
    box_host.save_state(make_plan(folder), [Process("munged", 12, 345)])
    (folder / "box.json").chmod(0o666)
    with pytest.raises(UserError, match=r"box\.json is a link, or others own or may write it"):
        Box.attach(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UserError, match="link is a link"):
        box_host.check_owner(tmp_path / "link")


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


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "precious").write_text("mine")
    with pytest.raises(UserError, match="no box's"):
        box_host.clear_state(tmp_path)
    assert (tmp_path / "log" / "precious").read_text() == "mine"


# The real thing.


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """One of the box's own commands, run to its end."""
    argv = [sys.executable, "-m", "tests.slurm_box", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


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
def test_nodes_see_each_other_by_name_and_the_same_files(slurm_box: Box, tmp_path: Path) -> None:
    output = run(slurm_box, "srun", "-N2", "--ntasks-per-node=2", "hostname")
    assert sorted(output.split()) == ["n1", "n1", "n2", "n2"]
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
    if "pmix" not in run(box, "sh", "-c", "srun --mpi=list 2>&1"):
        pytest.skip("this Slurm has no PMIx plugin: install slurm-wlm-basic-plugins")
    # As many ranks as processors on each node, but more than the machine may have.
    output = run(box, "env", "OMPI_MCA_mpi_yield_when_idle=1", "srun", "--mpi=pmix", "-N2", "-n4", str(program))
    found = re.findall(r"rank (\d) of 4 on (\w+): sum (\S+) in (\S+) s", output)
    return {int(rank): (host, float(total), float(time_s)) for rank, host, total, time_s in found}


@pytest.mark.slurm
def test_mpi_adds_up_across_nodes_over_a_link_that_is_shaped_and_freed(slurm_box: Box, mpi_program: Path) -> None:
    folder = str(slurm_box.plan.folder)
    assert command("shape", folder, "100mbit").returncode == 0
    try:
        ranks = allreduce(slurm_box, mpi_program)
    finally:
        assert command("shape", folder, "none").returncode == 0
    assert sorted(host for host, _, _ in ranks.values()) == ["n1", "n1", "n2", "n2"]
    assert [total for _, total, _ in ranks.values()] == [10.0] * 4
    # 2 MB cross the link at 100 Mbit/s in 0.16 s at best; a burst of 64 KiB is free.
    assert max(time_s for _, _, time_s in ranks.values()) > 0.14
    qdiscs = subprocess.run(["tc", "qdisc"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in qdiscs.splitlines() if " tbf " in line and f" dev {slurm_box.plan.bridge}v" in line]


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


@pytest.mark.slurm
def test_the_commands_start_and_stop_a_box_and_what_a_killed_start_left(slurm_folder: Path) -> None:
    argv = [sys.executable, "-m", "tests.slurm_box", "start", str(slurm_folder), "--nodes=1"]
    for after_s in (0.6, 1.5):
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT) as starting:
            box_host.wait_until(lambda: starting.poll() is not None, time.monotonic() + after_s, pause_s=0.01)
            starting.kill()
        if (slurm_folder / "box.json").exists():
            assert command("stop", str(slurm_folder)).returncode == 0
        # A program that it was just starting, to ask it something, ends by itself.
        wait_for(lambda: not left_of(slurm_folder))
    (slurm_folder / ".box.json.12").write_text("half a sta")
    started = command(*argv[3:])
    assert f"export SLURM_CONF={slurm_folder}/slurm.conf\n" in started.stdout, started.stderr
    status = command("status", str(slurm_folder)).stdout
    assert re.search(r"slurmd\.n1 +pid \d+ +runs", status)
    assert re.search(r"n1 +idle", status)
    for _ in range(2):
        assert command("stop", str(slurm_folder)).returncode == 0
    assert left_of(slurm_folder) == []
    assert command("status", str(slurm_folder)).returncode == 2


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
