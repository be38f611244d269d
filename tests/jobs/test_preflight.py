"""Pre-flights: a system file against what stub programs of Slurm say, the job's script, and what ranks saw judged."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli.setup import lines_of
from dlbench.jobs.preflight.check import (
    check_command,
    exchange_finding,
    excluded,
    job_of,
    judge,
    plan_of,
    render_preflight,
    trial,
    wait,
)
from dlbench.jobs.scripts import launch
from dlbench.jobs.scripts.containers import quoted, words_of
from dlbench.jobs.slurm.scheduler import Slurm
from dlbench.records.files import write_json
from dlbench.records.preflight import PreflightFolder, PreflightNode, PreflightReport, SeenRank
from dlbench.specs.choices import choose_system
from dlbench.specs.comm import CommPlan
from dlbench.specs.system import SystemSpec
from tests.jobs.test_jobs import Cluster, cluster
from tests.support.programs import Program, calls

__all__ = ["cluster"]

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def plan(system: str = "box", nodes: int = 2, **changes: Any) -> CommPlan:
    """Of a pre-flight of a system of some other settings; sections are merged."""
    content = choose_system(system, {}).model_dump(mode="json")
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    return plan_of(SystemSpec.model_validate(content), nodes, machine_cores=4, now=NOW)


# What Slurm says


def test_the_cluster_that_is_named_is_the_one_that_is_asked(program: Program, tmp_path: Path) -> None:
    once = '[ -e "$CALLS.once" ] || printf "7|RUNNING|N/A|None|(null)|/x\\n"; : >"$CALLS.once"'
    program("squeue", f'printf "CLUSTER: beta\\n"; {once}')
    program("scancel", "")
    states: list[str] = []
    folder = PreflightFolder(tmp_path / "preflight")
    folder.path.mkdir()
    assert wait("7;beta", folder, 60.0, lambda: None, states.append).end == "ended"
    assert states == ["RUNNING"]
    assert wait("7;beta", folder, 0.0, lambda: None, states.append).end == "ended"
    Slurm().cancel(["7;beta"])
    assert ["scancel", "--clusters=beta", "7"] in calls(tmp_path)
    assert all("--clusters=beta" in words for words in calls(tmp_path))


@pytest.mark.parametrize(
    ("body", "state", "words"),
    [
        ("echo 'sbatch: Job 7 to start at 2026-03-01T12:00:00 using 2 processors' >&2", "ok", "start at 2026-03-01T12"),
        ("echo 'allocation failure: Invalid qos specification' >&2; exit 1", "wrong", "Invalid qos specification"),
    ],
)
def test_what_sbatch_says_to_the_job_is_a_finding(
    program: Program, tmp_path: Path, body: str, state: str, words: str
) -> None:
    program("sbatch", body)
    finding = trial(job_of(plan()), PreflightFolder(tmp_path), dict(os.environ))
    assert (finding.state, words in finding.found) == (state, True)
    assert calls(tmp_path)[0][:2] == ["sbatch", "--test-only"]


# The job


PYXIS = {"kind": "pyxis", "image": "registry#group/image:1", "python": "/opt/python"}
PODMAN = {**PYXIS, "kind": "podman"}


@pytest.mark.parametrize(
    ("launcher", "container"),
    [("srun-gloo", {}), ("srun-mpi", {}), ("mpirun", {}), ("srun-gloo", PYXIS), ("srun-gloo", PODMAN)],
)
def test_ranks_look_by_the_command_that_would_start_them(launcher: str, container: dict[str, Any]) -> None:
    one = plan(launch={"launcher": launcher}, container=container)
    folder = PreflightFolder(Path("/scratch/pre flight"))
    run = launch.launcher_command(one, words_of(folder.run), "/opt/python")
    look = check_command(one, folder, "/opt/python")
    begin = run.index("/opt/python")
    assert look[:begin] == run[:begin]
    assert look[begin : begin + 2] == ["bash", "-c"]
    assert look[begin + 4 :][1:2] == ["/opt/python"]
    assert ("--container-image=registry#group/image:1" in look) == (container.get("kind") == "pyxis")


@pytest.mark.parametrize(
    "system", ["box", "example-gpu", "example-dgx-h100", "example-perlmutter", "example-alps", "example-lab"]
)
def test_bash_and_shellcheck_accept_the_script(system: str) -> None:
    one = plan(system, python="/opt/my python; $(id)", slurm={"requeue": True})
    script = render_preflight(job_of(one), PreflightFolder(Path("/scratch/it's $HOME")), "/usr/bin/python3")
    assert "--job-name=preflight-" in script
    assert "--no-requeue" in script
    for command in (["bash", "-n"], ["shellcheck", "--shell=bash", "--exclude=SC2016", "-"]):
        if shutil.which(command[0]) is not None:
            done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(("looked", "code"), [((0, 1), 0), ((1,), 3)])
def test_ranks_exchange_where_all_could_look(
    cluster: Cluster, tmp_path: Path, looked: tuple[int, ...], code: int
) -> None:
    folder = PreflightFolder(tmp_path / "it's [a] folder")
    folder.seen.mkdir(parents=True)
    writing = "".join(f"  touch {shlex.quote(str(folder.rank(rank)))}\n" for rank in looked)
    (cluster.bin / "srun").write_text(
        f'#!/bin/bash\necho >>"$DUMP/srun"\nif [[ " $* " == *" dlbench-preflight "* ]]; then\n{writing}  :\nfi\n'
    )
    (cluster.bin / "scontrol").write_text("#!/bin/bash\nprintf 'n1\\nn2\\n'\n")
    (cluster.bin / "scontrol").chmod(0o755)
    one = plan("box", launch={"launcher": "srun-gloo"})
    done = cluster.run(render_preflight(job_of(one), folder, "/usr/bin/python3"), SLURM_JOB_NODELIST="n[1-2]")
    assert (done.returncode, folder.ended.read_text()) == (code, f"{code}\n")
    assert len((cluster.dump / "srun").read_text().splitlines()) == (2 if code == 0 else 1)
    assert (f"{len(looked)} of 2 ranks could look" in done.stderr) is (code != 0)


@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/\n"), min_size=1, max_size=20))
def test_no_path_runs_as_a_command(name: str) -> None:
    one = plan(launch={"launcher": "srun-gloo"})
    look = check_command(one, PreflightFolder(Path("/scratch") / f"x{name}"), "/opt/python")
    assert shlex.split(quoted(look)) == look
    assert look[-1] == f"/scratch/x{name}/plan.json"


# What ranks saw


def seen(rank: int, host: str, **changes: Any) -> dict[str, Any]:
    usual = {
        "rank": rank,
        "local_rank": 0,
        "host": host,
        "python": "/opt/python",
        "versions": {"python": "3.12.1", "dlbench": plan().dlbench_version, "torch": "2.9.0"},
        "cores": (0,),
        "pinned": False,
        "scratch": [{"key": "local", "path": "/tmp", "file_system": "xfs", "free_bytes": 1 << 30}],
    }
    return SeenRank.model_validate({**usual, **changes}).model_dump(mode="json")


def judged(tmp_path: Path, ranks: list[dict[str, Any] | None], **changes: Any) -> tuple[PreflightNode, ...]:
    folder = PreflightFolder(tmp_path)
    folder.seen.mkdir()
    for number, one in enumerate(ranks):
        if one is not None:
            folder.begun(number).write_text(f"{one['host']}\n")
            write_json(folder.rank(number), one)
    return judge(plan(nodes=len(ranks), **changes), folder, [f"n{number + 1}" for number in range(len(ranks))])


SCRATCH = {"key": "local", "path": "/x", "problem": "storage.local.path '/x': is not writable"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"problems": ("3 GPUs",)}, "3 GPUs"),
        ({"scratch": [SCRATCH]}, "storage.local.path '/x': is not writable"),
        ({"versions": {"python": "3.12.1", "dlbench": "0.0.9", "torch": "2.9.0"}}, "dlbench 0.0.9 there, "),
        (
            {"versions": {"dlbench": plan().dlbench_version, "python": "3.12.1"}},
            "torch is not installed, other nodes have 2.9.0",
        ),
        ({"broken": {"torch": "ImportError: libcudart"}}, "torch does not import: ImportError"),
    ],
)
def test_a_node_that_fails_is_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    nodes = judged(tmp_path, [seen(0, "n1"), seen(1, "n2", **change), seen(2, "n3")])
    assert [bool(node.problems) for node in nodes] == [False, True, False]
    assert problem in nodes[1].problems[0]
    assert excluded(nodes) == "n2"


def test_a_rank_that_says_nothing_fails_its_node(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    folder = PreflightFolder(tmp_path)
    for rank, host in enumerate(["n1", "n2", "n3", "n4"]):
        if rank != 2:  # whose node does not see the folder
            folder.begun(rank).write_text(f"{host}\n")
    write_json(folder.rank(0), seen(0, "n1"))
    folder.failed(1).write_text("127\n")
    folder.log(1).write_text("bash: line 1: /opt/python: No such file or directory\n")
    folder.rank(3).write_text("{")
    nodes = judge(plan(nodes=4), folder, ["n1", "n2", "n3", "n4"])
    assert [node.host for node in nodes] == ["n1", "n2", "n3", "n4"]
    assert nodes[1].problems == (
        "the ranks' Python ended with 127: bash: line 1: /opt/python: No such file or directory",
    )
    assert "does not exist there, or the rank did not start" in nodes[2].problems[0]
    assert "damaged" in nodes[3].problems[0]
    assert excluded(nodes) == "n[2-4]"


def test_where_all_nodes_fail_none_is_left_out(tmp_path: Path) -> None:
    bad = {"scratch": [SCRATCH]}
    assert excluded(judged(tmp_path, [seen(0, "n1", **bad), seen(1, "n2", **bad)])) == ""


def test_gpus_are_counted_and_not_shared(tmp_path: Path) -> None:
    folder = PreflightFolder(tmp_path)
    folder.seen.mkdir()
    one = plan("example-gpu", nodes=2)
    for rank in range(8):
        uuids = [f"GPU-{rank // 4}-{local}" for local in range(4 if rank < 4 else 3)]
        own = uuids[rank % 4] if rank < 4 else uuids[min(rank % 4, 2)]
        content = seen(rank, f"n{rank // 4 + 1}", local_rank=rank % 4, node_gpus=uuids, gpu=own, cores=(rank % 4,))
        content["near_gpu"] = rank != 2
        content["compiler"] = "" if rank < 4 else "there is no gcc; install it"
        write_json(folder.rank(rank), content)
    first, second = judge(one, folder, [])
    assert first.problems == ()
    assert first.doubts[-1] == "cores of local rank 2 are not on the NUMA node of the GPU: see slurm.cpu_bind"
    assert second.problems == ("2 ranks share GPU GPU-1-2", "3 of 4 GPUs")
    assert second.doubts[-1] == "train.compile and fused LAMB and LARS fail there: there is no gcc; install it"


def test_one_rank_has_nobody_to_exchange_with(tmp_path: Path) -> None:
    finding, blamed = exchange_finding(plan(nodes=1), PreflightFolder(tmp_path))
    assert (finding.state, blamed) == ("unknown", {})


def test_a_report_of_many_nodes_fits_on_a_screen(tmp_path: Path) -> None:
    bad = PreflightNode(host="n0099", problems=("its scratch is full",))
    content = {
        "id": "preflight-x",
        "system": "x",
        "created": "2026-03-01T12:00:00Z",
        "dlbench_version": "0",
        "job": [{"subject": f"key {n}", "state": "ok", "found": "as it should be"} for n in range(4)],
        "nodes": [*(PreflightNode(host=f"n{n:04d}", ranks=[seen(n, f"n{n:04d}")]) for n in range(99)), bad],
        "exclude": "n0099",
        "exit_code": 3,
    }
    lines = list(
        lines_of(
            PreflightReport.model_validate(json.loads(json.dumps(content, default=lambda m: m.model_dump(mode="json"))))
        )
    )
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "n0099: FAILED: its scratch is full" in lines
    assert "to exclude the failed nodes: --exclude=n0099 (slurm.exclude in the system file)" in lines
