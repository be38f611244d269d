"""An image of the environment in a job's script, run by bash with stubs for Slurm's programs."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from dlbench.records.folder import RunFolder
from tests.jobs.test_jobs import plan_of, render_script, with_system

# Both start here what they are to start on nodes: one process, as this plan has one node.
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SBCAST = """#!/bin/bash
cp -- "$2" "$3"
"""
PYTHON = """#!/bin/sh
case $* in
  *dlbench.node*) echo "ranks start"; ls -d "$0" "${0%/env/*}.unpacked"; [ -z "$HOLD" ] || exec sleep 60 ;;
esac
"""


class Node:
    """A machine with Slurm's programs, an image, and a script that needs it."""

    def __init__(self, root: Path, transfer: str = "sbcast", kind: str = "tar") -> None:
        self.root, self.local = root, root / "local"
        self.run_folder = root / "run 1"
        for folder in (self.local, self.run_folder, root / "bin"):
            folder.mkdir()
        for name, text in (("srun", SRUN), ("sbcast", SBCAST)):
            (root / "bin" / name).write_text(text)
            (root / "bin" / name).chmod(0o755)
        self.image = root / "my image.tar"
        _pack(self.image, kind)
        digest = hashlib.sha256(self.image.read_bytes()).hexdigest()
        image = {"file": str(self.image), "sha256": digest, "folder": "$LOCAL", "transfer": transfer}
        plan = with_system(plan_of(points=(1,)), launch={"launcher": "srun-gloo"}, image=image)
        self.script = root / "job.sbatch"
        self.script.write_text(render_script(plan, RunFolder(self.run_folder), "/nowhere/python"))

    def start(self, **variables: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            "LOCAL": str(self.local),
            "SLURM_JOB_ID": "7",
            "DLBENCH_SUBMITTED": "1",
            "SLURM_JOB_NUM_NODES": "1",
            **variables,
        }
        return subprocess.Popen(
            ["bash", str(self.script)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, **variables: str) -> tuple[int, str]:
        process = self.start(**variables)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    @property
    def left(self) -> list[str]:
        return [path.name for path in self.local.iterdir()]


def _pack(file: Path, kind: str) -> None:
    with tarfile.open(file, "w") as tar:
        info = tarfile.TarInfo("env/bin/python")
        info.size, info.mode = len(PYTHON), 0o755
        tar.addfile(info, io.BytesIO(PYTHON.encode()))
    if kind == "squashfs":
        plain = file.with_suffix(".plain")
        file.rename(plain)
        with plain.open("rb") as source:
            words = ["mksquashfs", "-", str(file), "-tar", "-quiet", "-no-progress"]
            subprocess.run(words, stdin=source, check=True, capture_output=True)


@pytest.mark.parametrize(("transfer", "kind"), [("sbcast", "tar"), ("read", "tar"), ("sbcast", "squashfs")])
def test_the_ranks_python_is_the_unpacked_one_and_nothing_stays(tmp_path: Path, transfer: str, kind: str) -> None:
    if kind == "squashfs" and not (shutil.which("mksquashfs") and shutil.which("unsquashfs")):
        pytest.skip("squashfs-tools are not installed")
    node = Node(tmp_path, transfer, kind)
    left_over = node.local / "dlb-image-5"
    left_over.mkdir()
    (left_over / ".held").write_text("")
    code, said = node.run()
    assert code == 0, said
    unpacked = node.local / "dlb-image-7" / "1"
    assert said.splitlines() == ["ranks start", f"{unpacked}.unpacked", f"{unpacked}/env/bin/python"]
    assert node.left == []


@pytest.mark.parametrize("what", ["other bytes", "no file", "no room", "other machine"])
def test_an_image_that_cannot_be_used_ends_the_job_before_the_ranks(tmp_path: Path, what: str) -> None:
    node = Node(tmp_path)
    if what == "other bytes":
        node.image.write_bytes(node.image.read_bytes().replace(b"ranks", b"RANKS"))
    elif what == "no file":
        node.image.unlink()
    elif what == "no room":
        (tmp_path / "bin" / "tar").write_text("#!/bin/sh\necho 'tar: No space left on device' >&2\nexit 2\n")
        (tmp_path / "bin" / "tar").chmod(0o755)
    else:
        digest = hashlib.sha256(node.image.read_bytes()).hexdigest()
        node.image.write_bytes(node.image.read_bytes().replace(b"#!/bin/sh\n", b"\x7fELF\x01\xff\xff\xff\xff\n"))
        text = node.script.read_text()
        node.script.write_text(text.replace(digest, hashlib.sha256(node.image.read_bytes()).hexdigest()))
    code, said = node.run()
    assert code == 5, said
    assert "ranks start" not in said
    assert (
        said.splitlines()[-1]
        == f"dlbench: error: the image cannot be unpacked in {node.local}/dlb-image-7 on every node"
    )
    reason = {
        "other bytes": "its SHA-256 is another",
        "no file": "No such file",
        "no room": "No space left",
        "other machine": "xec format error",
    }[what]
    assert reason in said
    assert node.left == []


def test_a_cancelled_job_leaves_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    process = node.start(HOLD="1")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(node.local.glob("*/1.unpacked")):
        time.sleep(0.02)
    assert node.left == ["dlb-image-7"]
    os.killpg(process.pid, signal.SIGTERM)  # as Slurm does to every process of every step
    process.communicate(timeout=60)
    while time.monotonic() < deadline and node.left:
        time.sleep(0.02)
    assert node.left == []


def test_a_folder_that_another_job_holds_stays(tmp_path: Path) -> None:
    node = Node(tmp_path)
    other = node.local / "dlb-image-5"
    other.mkdir()
    with (other / ".held").open("w") as held:
        subprocess.run(["flock", "--nonblock", str(held.fileno())], pass_fds=[held.fileno()], check=True)
        assert node.run()[0] == 0
        assert node.left == ["dlb-image-5"]


def test_a_folder_of_this_job_that_somebody_holds_is_not_taken_away(tmp_path: Path) -> None:
    """As where image.folder is one that nodes share."""
    node = Node(tmp_path)
    other = node.local / "dlb-image-7"
    other.mkdir()
    (other / "1").mkdir()
    with (other / ".held").open("w") as held:
        subprocess.run(["flock", "--nonblock", str(held.fileno())], pass_fds=[held.fileno()], check=True)
        code, said = node.run()
    assert (code, node.left) == (5, ["dlb-image-7"])
    assert "ranks start" not in said
    assert sorted(path.name for path in other.iterdir()) == [".held", "1"]


def test_a_folder_that_another_job_took_for_abandoned_is_made_anew(tmp_path: Path) -> None:
    """Two jobs that begin on one node: one cleans up in the instant in which the other's folder has no holder yet."""
    node = Node(tmp_path)
    flock = tmp_path / "bin" / "flock"
    flock.write_text(
        "#!/bin/bash\n"
        'if [ "${@: -1}" = 9 ] && mkdir "$LOCAL/../once" 2>/dev/null; then rm -rf "$LOCAL"/dlb-image-7; fi\n'
        f'exec {shutil.which("flock")} "$@"\n'
    )
    flock.chmod(0o755)
    code, said = node.run()
    assert (code, said.splitlines()[:1]) == (0, ["ranks start"]), said
    assert (tmp_path / "once").exists()
    assert node.left == []


@pytest.mark.parametrize("when", ["while it is copied", "before"])
def test_a_node_that_is_lost_while_it_unpacks_is_one_line(tmp_path: Path, when: str) -> None:
    """srun ends then: nobody reads what the script says to it."""
    node = Node(tmp_path)
    ready = "echo ready\n" if when != "before" else ""
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/bash\n{ready}exit 1\n")
    (tmp_path / "bin" / "sbcast").write_text("#!/bin/bash\nsleep 0.5\n")
    code, said = node.run()
    assert code == 5, said
    assert said == f"dlbench: error: the image cannot be unpacked in {node.local}/dlb-image-7 on every node\n"
