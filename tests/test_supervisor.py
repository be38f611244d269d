"""A program under dlbench.supervisor: whatever ends it, nothing of what it started stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dlbench import process_tree
from dlbench.final_status import TIME, FinalStatus
from dlbench.machine.environment import capture
from tests.support.leftovers import SHARED_MEMORY, Leftovers

SUPERVISOR = (sys.executable, "-P", "-m", "dlbench.supervisor")
READY_S = 60.0

# What a program may have started: in a session of its own, orphaned, stopped, deaf to SIGTERM, by a fork server.
STARTS = {
    "nothing": "",
    "orphan": "subprocess.Popen(['sh', '-c', 'setsid sleep 1000 & exit 0']).wait()",
    "stopped": "os.kill(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, signal.SIGSTOP)",
    "deaf": "subprocess.Popen(['sh', '-c', 'trap \"\" TERM HUP INT; while :; do sleep 1; done'], process_group=0)",
    "fork server": "fork = multiprocessing.get_context('forkserver'); "
    "fork.Process(target=time.sleep, args=(1000,), daemon=False).start()",
    "files": "os.makedirs(tempfile.mkdtemp() + '/a/b'); os.symlink('/etc', tempfile.gettempdir() + '/link'); "
    "tempfile.NamedTemporaryFile(delete=False)",
}
_LOADS = "import multiprocessing, os, signal, subprocess, sys, tempfile, time\n"


def program(*kinds: str, then: str = "time.sleep(1000)") -> list[str]:
    """A program that starts all this, writes a file `ready` into its working directory, and goes on."""
    code = "\n".join([*(STARTS[kind] for kind in kinds), "open('ready', 'w').write(str(os.getpid()))", then])
    return [sys.executable, "-c", _LOADS + code]


def started(leftovers: Leftovers, folder: Path, command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The supervisor of a program, and the number of the program, when it is ready."""
    process = subprocess.Popen(
        [*SUPERVISOR, *command],
        env=leftovers.environment,
        cwd=folder,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return process, int(content_of(folder / "ready"))


def content_of(file: Path) -> str:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if text := file.read_text():
                return text
        time.sleep(0.01)
    pytest.fail(f"{file.name} never came")


@pytest.mark.parametrize(
    "command", ["exit 0", "exit 7", "kill -SEGV $$", "kill -KILL $$", "kill -TERM $$", "kill -INT $$"]
)
def test_it_ends_as_the_program_ended(leftovers: Leftovers, command: str) -> None:
    plain = subprocess.run(["sh", "-c", command], check=False).returncode
    assert (
        subprocess.run([*SUPERVISOR, "sh", "-c", command], env=leftovers.environment, check=False).returncode == plain
    )
    assert leftovers.within() == []


def test_a_program_that_is_none(leftovers: Leftovers) -> None:
    done = subprocess.run(
        [*SUPERVISOR, "/etc/passwd"], env=leftovers.environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        127,
        "dlbench: error: /etc/passwd: cannot be started: Permission denied\n",
    )
    assert subprocess.run(SUPERVISOR, capture_output=True, check=False).returncode == 2
    assert leftovers.within() == []


@pytest.mark.parametrize("is_deaf", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("end", ["program killed", "program exits", "told to end", "told while it is stopped"])
def test_nothing_stays_of_what_the_program_started(
    leftovers: Leftovers, tmp_path: Path, end: str, is_deaf: bool
) -> None:
    then = "os._exit(3)" if end == "program exits" else "time.sleep(1000)"
    kinds = [kind for kind in STARTS if is_deaf or kind != "deaf"]
    process, pid = started(leftovers, tmp_path, program(*kinds, then=then))
    if end == "program killed":
        os.kill(pid, signal.SIGKILL)
    elif end == "told while it is stopped":
        os.kill(pid, signal.SIGSTOP)
    if end.startswith("told"):
        process.terminate()
    code = process.wait(timeout=60)
    assert leftovers.processes() == {}  # at once: whoever waits for it may look
    assert code == {"program killed": -signal.SIGKILL, "program exits": 3}.get(end, -signal.SIGTERM)
    assert leftovers.within() == []


def test_a_killed_supervisor_takes_the_program_along(leftovers: Leftovers, tmp_path: Path) -> None:
    process, _ = started(leftovers, tmp_path, program("nothing"))
    process.kill()
    process.wait()
    assert leftovers.within(files=False) == []
    # Its folder is nobody's now: the next run removes it.
    subprocess.run([*SUPERVISOR, "true"], env=leftovers.environment, check=True)
    assert leftovers.within() == []


PARENT = """
import os, subprocess, sys, time
subprocess.Popen(sys.argv[1:], env={**os.environ, "DLBENCH_PARENT": str(os.getpid())})
print(flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.003, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3])
def test_a_parent_killed_at_any_time_takes_all_along(leftovers: Leftovers, tmp_path: Path, wait_s: float) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *SUPERVISOR, *program("orphan")],
        env=leftovers.environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    time.sleep(wait_s)
    parent.kill()
    parent.communicate()
    assert leftovers.within() == []


def test_a_thread_of_the_parent_may_end(leftovers: Leftovers, tmp_path: Path) -> None:
    """mpirun starts many ranks from threads that it ends, and the kernel tells of those as of a parent."""
    code = "import subprocess, sys, threading; made = []; "
    code += "thread = threading.Thread(target=lambda: made.append(subprocess.Popen(sys.argv[1:]))); "
    code += "thread.start(); thread.join(); sys.exit(made[0].wait())"
    command = [sys.executable, "-c", code, *SUPERVISOR, "sh", "-c", "sleep 0.3; exit 7"]
    assert subprocess.run(command, env=leftovers.environment, check=False).returncode == 7
    assert leftovers.within() == []


def test_signals_reach_the_program(leftovers: Leftovers, tmp_path: Path) -> None:
    heard = "\n".join(
        (
            "for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):",
            "    signal.signal(number, lambda number, frame: open(f'heard-{number}', 'w').write('yes'))",
            "open('deaf no more', 'w').write('yes')",
            "time.sleep(1000)",
        )
    )
    process, _ = started(leftovers, tmp_path, program("nothing", then=heard))
    content_of(tmp_path / "deaf no more")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
        assert content_of(tmp_path / f"heard-{number.value}") == "yes"
    process.terminate()
    process.wait(timeout=60)
    assert leftovers.within() == []


def test_it_sleeps_while_the_program_runs(leftovers: Leftovers, tmp_path: Path) -> None:
    process, _ = started(leftovers, tmp_path, program("nothing"))

    def switches() -> list[str]:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("voluntary_ctxt", "nonvoluntary_ctxt", "Threads"))]

    for _ in range(20):  # It may still be on its way to sleep.
        before = switches()
        time.sleep(0.5)
        if switches() == before:
            break
    time.sleep(1.5)
    assert switches() == before
    assert "Threads:\t1" in before
    process.terminate()
    process.wait(timeout=60)


def test_what_open_mpi_makes_lies_in_folders_of_the_run(leftovers: Leftovers) -> None:
    shown = "import json, os; names = ('OMPI_MCA_', 'PRTE_MCA_', 'TMPDIR'); "
    shown += "places = {k: v for k, v in os.environ.items() if k.startswith(names)}; "
    shown += "print(json.dumps({k: [v, oct(os.stat(v).st_mode)[-3:]] for k, v in places.items()}))"

    def places(*options: str, **variables: str) -> dict[str, list[str]]:
        command = [*SUPERVISOR, *options, sys.executable, "-c", shown]
        environment = {**leftovers.environment, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert leftovers.within() == []
        found: dict[str, list[str]] = json.loads(done.stdout)
        return found

    rank = places(OMPI_COMM_WORLD_RANK="0", OMPI_MCA_orte_local_tmpdir_base="/tmp")
    memory = rank["OMPI_MCA_btl_vader_backing_directory"]
    assert memory == rank["OMPI_MCA_btl_sm_backing_directory"]
    assert memory[0].startswith("/dev/shm/dlb-")
    assert memory[1] == rank["TMPDIR"][1] == "700"
    assert "OMPI_MCA_orte_local_tmpdir_base" not in rank
    # Different on every rank, and set by nobody.
    assert not [name for name in capture({key: value for key, (value, _) in rank.items()}) if "OMPI" in name]

    chosen = places(OMPI_COMM_WORLD_RANK="0", OMPI_MCA_btl_vader_backing_directory="/dev/shm")
    assert chosen["OMPI_MCA_btl_vader_backing_directory"][0] == "/dev/shm"

    mpirun = places("--launcher")
    assert mpirun["TMPDIR"][0] == str(leftovers.folder)
    assert mpirun["OMPI_MCA_orte_local_tmpdir_base"][0].startswith(f"{leftovers.folder}/dlb-")
    assert list(places()) == ["TMPDIR"]


def test_modules_never_come_from_the_working_directory(leftovers: Leftovers, tmp_path: Path) -> None:
    for name in ("signal", "platform", "profile", "statistics", "json", "ctypes", "mine"):
        (tmp_path / f"{name}.py").write_text(f"open('canary-{name}', 'w')")
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import profile, platform, statistics'])"
    done = subprocess.run(
        [*SUPERVISOR, sys.executable, "-c", inner], env=leftovers.environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    done = subprocess.run(
        [*SUPERVISOR, "-m", "mine"], env=leftovers.environment, cwd=tmp_path, capture_output=True, check=False
    )
    assert b"No module named mine" in done.stderr
    assert list(tmp_path.glob("canary-*")) == []


def test_shared_memory_of_others_stays(leftovers: Leftovers, tmp_path: Path) -> None:
    """Data sets are staged into /dev/shm, and ranks map them."""
    data = SHARED_MEMORY / f"{leftovers.folder.name}-data"
    data.write_bytes(b"x" * 4096)
    try:
        maps = f"import mmap; held = mmap.mmap(os.open({str(data)!r}, os.O_RDONLY), 4096, prot=mmap.PROT_READ)"
        process, pid = started(leftovers, tmp_path, program("fork server", then=f"{maps}\ntime.sleep(1000)"))
        os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)
        assert data.read_bytes() == b"x" * 4096
    finally:
        data.unlink()
    assert leftovers.within() == []


# Folders that nobody holds


def test_only_abandoned_folders_are_removed(tmp_path: Path) -> None:
    held = process_tree.HeldFolder(["/nonexistent", str(tmp_path)])
    assert Path(held.path).stat().st_mode & 0o777 == 0o700
    foreign = tmp_path / "dlb-00000000"  # of that name, but never locked
    foreign.mkdir()
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "thesis").write_text("kept")
    (aside / ".held").write_text("")
    (tmp_path / "dlb-11111111").symlink_to(aside)
    code = "import os, sys; from dlbench.process_tree import HeldFolder; f = HeldFolder(sys.argv[1:]); "
    code += "os.makedirs(f.path + '/a/b'); os.symlink(sys.argv[1] + '/aside', f.path + '/a/link'); print(f.path)"
    abandoned = Path(
        subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    assert abandoned.is_dir()
    process_tree.remove_abandoned([str(tmp_path)])
    assert not abandoned.exists()
    assert Path(held.path).is_dir()
    assert foreign.is_dir()
    assert (aside / "thesis").read_text() == "kept"
    held.remove()
    assert not Path(held.path).exists()


def test_a_removal_that_was_killed_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever of its calls: a second Ctrl-C kills supervisors that are removing their folders."""

    def killed_at(call: int) -> bool:
        """Whether the removal of a folder came to this call."""
        left = call

        def counted(function: Callable[..., None]) -> Callable[..., None]:
            def do(*arguments: object, **options: object) -> None:
                nonlocal left
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
                function(*arguments, **options)

            return do

        held = process_tree.HeldFolder([str(tmp_path)])
        (Path(held.path) / "pymp-1" / "b").mkdir(parents=True)
        (Path(held.path) / "file").touch()
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for name in ("rename", "unlink", "rmdir"):
                patch.setattr(process_tree.os, name, counted(getattr(os, name)))
            held.remove()
            return False
        os.close(held._lock)  # as the kernel does when the process ends
        return True

    calls = 0
    while killed_at(calls):
        process_tree.remove_abandoned([str(tmp_path)])
        assert list(tmp_path.iterdir()) == [], f"killed at call {calls}"
        calls += 1
    assert calls == 6  # the name, two files, three folders


# A program that notes how far it is, as a rank does, and then does what stands at the end.
RANK = """
import os, signal, sys
from dlbench.final_status import STEP, TIME, FinalStatus
final = FinalStatus.inherited(os.environ)
assert final is not None
path = os.fsencode(sys.argv[2])
final.set_file(path, b'{"step": ' + STEP + b', "updated": "' + TIME + b'"}')
for step in range(8):
    final.step(step)
"""


def end(folder: Path, how: str) -> int:
    """Exit code of a supervisor whose rank ends like this."""
    words = [sys.executable, "-P", "-m", "dlbench.supervisor", sys.executable, "-c", RANK + how, "dlbench.node"]
    return subprocess.run([*words, str(folder / "status.json")], check=False, timeout=60).returncode


@pytest.mark.parametrize(
    "how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "os.abort()", "os.environ.clear(); sys.exit(3)"]
)
def test_the_supervisor_says_what_its_rank_could_not(tmp_path: Path, how: str) -> None:
    end(tmp_path, how)
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["step"] == 7
    assert told["updated"].endswith("Z")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_rank_that_said_all_itself_is_left_alone(tmp_path: Path) -> None:
    assert end(tmp_path, "final.clear()") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    assert end(tmp_path / "gone", "os.rmdir(os.path.dirname(sys.argv[2])); os._exit(5)") == 5
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_folder_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "status.json").write_text("another's")
    swap = "run = os.path.dirname(sys.argv[2]); os.rename(run, run + '-moved'); os.symlink('victim', run); os._exit(5)"
    assert end(tmp_path / "run", swap) == 5
    assert {path.name: path.read_text() for path in (tmp_path / "victim").iterdir()} == {"status.json": "another's"}
    assert json.loads((tmp_path / "run-moved" / "status.json").read_text())["step"] == 7


def test_no_word_of_a_rank_is_older_than_its_last_though_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    final = FinalStatus.make()
    final.set_file(b"/nowhere/status.json", TIME)
    told = []
    for seconds in (0, -3600, 86_400, -86_400):
        now = time.time() + seconds
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            final.touch()
        left = final.missing_file()
        assert left is not None
        told.append(left[1])
    assert told == sorted(told)
