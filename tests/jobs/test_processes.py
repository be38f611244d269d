"""The processes of a run, as the launcher sees them: gone at the end, the first failure named, Ctrl-C at any time."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlbench.errors import EnvironmentLacksError
from dlbench.jobs import local, processes
from dlbench.jobs.processes import Interruption, RankProcesses
from dlbench.jobs.scripts import launch
from dlbench.records.folder import RunFolder, create, prepare_output
from dlbench.records.status import PEER_MARK
from dlbench.specs.plan import RunPlan
from tests.conftest import Cli
from tests.jobs.test_jobs import plan_of
from tests.support.leftovers import Leftovers

SUPERVISOR = [sys.executable, "-P", "-m", "dlbench.supervisor"]
TOKEN = secrets.token_hex(8)
NEVER_S = 300.0
DEAF = "trap '' TERM HUP INT; while :; do sleep 1; done"


def ranks_of(leftovers: Leftovers, folder: Path, *commands: Sequence[str]) -> RankProcesses:
    ranks = RankProcesses(lambda *told: None, TOKEN)
    for rank, command in enumerate(commands):
        variables = {**leftovers.environment, "DLBENCH_RANK": str(rank), "DLBENCH_PROGRESS": "launcher"}
        ranks.start([*SUPERVISOR, *command], variables, folder / f"{rank}.log")
    return ranks


def supervisors(leftovers: Leftovers, count: int) -> list[int]:
    """Numbers of the supervisors, as soon as so many programs run beside them.

    Between fork and exec a program still has the command line of its supervisor: only a child of this process is one.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = leftovers.processes()
        programs = [pid for pid, words in found.items() if "-m dlbench.supervisor" not in words]
        if len(programs) >= count:
            return [child.pid for child in psutil.Process().children() if child.pid in found]
        time.sleep(0.01)
    pytest.fail(f"they never started: {found}")


def ending_of(ranks: RankProcesses, folder: Path, told: tuple[int, int] | None = None) -> str:
    ending = ranks.first_ending(told)
    return ending.text


def never() -> None:
    """Nobody interrupts."""


def test_the_first_failure_is_named_though_its_end_takes_longer(leftovers: Leftovers, tmp_path: Path) -> None:
    """A supervisor ends only after all that its rank started has ended, which here takes long."""
    dies = tmp_path / "dies"
    slow = f"sh -c 'trap \"sleep 2; exit\" TERM; while :; do sleep 0.1; done' & sleep 0.2; touch {dies}; kill -KILL $$"
    later = f"while ! [ -e {dies} ]; do sleep 0.01; done; sleep 1; exit 3"
    ranks = ranks_of(leftovers, tmp_path, ["sh", "-c", later], ["sh", "-c", slow])
    ranks.wait(never)
    ranks.close([str(leftovers.folder)])
    assert ending_of(ranks, tmp_path, told=(0, 9)) == "rank 1 was the first to end, by signal SIGKILL"
    assert "DLBENCH" not in (tmp_path / "1.log").read_text()
    assert leftovers.within() == []


def test_who_lost_another_rank_is_not_the_cause_though_it_ended_earlier_by_its_clock(
    leftovers: Leftovers, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    killed = f"touch {ready}; sleep 0.3; kill -KILL $$"
    lost = f"while ! [ -e {ready} ]; do sleep 0.01; done; echo '{PEER_MARK}'; exit 3"
    ranks = ranks_of(leftovers, tmp_path, ["sh", "-c", killed], ["sh", "-c", lost])
    ranks.wait(never)
    ranks.close([str(leftovers.folder)])
    assert ending_of(ranks, tmp_path) == "rank 0 was the first to end, by signal SIGKILL"
    assert leftovers.within() == []


def test_a_killed_supervisor_is_the_first_to_end_and_nothing_stays(leftovers: Leftovers, tmp_path: Path) -> None:
    daemon = f'setsid sh -c "{DEAF}" & exec sleep 1000'
    ranks = ranks_of(leftovers, tmp_path, ["sh", "-c", daemon])
    (supervisor,) = supervisors(leftovers, 3)
    os.kill(supervisor, signal.SIGKILL)
    ranks.wait(never)
    ranks.close([str(leftovers.folder)])
    assert ending_of(ranks, tmp_path) == "rank 0 was the first to end, by signal SIGKILL"
    assert leftovers.within() == []


@pytest.mark.parametrize(("victim", "culprit"), [("program", "mpirun"), ("supervisor", "the supervisor of mpirun")])
def test_a_launcher_is_named_and_told_from_its_supervisor(
    leftovers: Leftovers, tmp_path: Path, victim: str, culprit: str
) -> None:
    ranks = RankProcesses(lambda *told: None, TOKEN, launcher="mpirun")
    script = "kill -KILL $$" if victim == "program" else "kill -KILL $PPID; sleep 60"
    variables = {**leftovers.environment, "DLBENCH_PROGRESS": "launcher"}
    ranks.start([*SUPERVISOR, "--launcher", "sh", "-c", script], variables, tmp_path / "0.log")
    ranks.wait(never)
    ranks.close([str(leftovers.folder)])
    assert ending_of(ranks, tmp_path) == f"{culprit} was the first to end, by signal SIGKILL"
    assert leftovers.within() == []


def test_what_cannot_be_told_to_end_is_killed(
    leftovers: Leftovers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped supervisor, and one that is told by an impatient user."""
    monkeypatch.setattr(processes, "END_S", NEVER_S)
    ranks = ranks_of(leftovers, tmp_path, ["sleep", "1000"], ["sh", "-c", DEAF])
    first, _ = sorted(supervisors(leftovers, 2))
    os.kill(first, signal.SIGSTOP)
    began = time.monotonic()
    ranks.end(lambda: time.monotonic() > began + 0.2)
    ranks.close([str(leftovers.folder)])
    assert time.monotonic() - began < NEVER_S / 2
    assert leftovers.within() == []


# Interruptions


class Stubbed:
    """A run of one local rank that is any program."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, leftovers: Leftovers, program: list[str]) -> None:
        for name, value in leftovers.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(launch, "node_command", lambda plan_file, python: [*SUPERVISOR, *program])
        self.plan: RunPlan = plan_of(system="local", points_are="ranks", points=(1,))
        self.folder: RunFolder = create(prepare_output(root / "runs"), self.plan)

    def run(self) -> Any:
        return local.run(self.plan, self.folder, lambda *told: None)

    def failure(self) -> str:
        return str(json.loads(self.folder.failure.read_text())["reason"])


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back what an interruption leaves in force."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.nightly), 2, 5])
def test_no_number_of_signals_interrupts_the_cleaning_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftovers: Leftovers, times: int
) -> None:
    stubbed = Stubbed(tmp_path, monkeypatch, leftovers, ["sh", "-c", DEAF])
    if times > 1:  # the second says: at once
        monkeypatch.setattr(processes, "END_S", NEVER_S)

    def press() -> None:
        supervisors(leftovers, 1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGINT)[:times]:
            os.kill(os.getpid(), number)
            time.sleep(0.15)

    thread = threading.Thread(target=press)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stubbed.run()
    thread.join()
    assert time.monotonic() - began < NEVER_S / 2
    assert "interrupted" in stubbed.failure()
    assert leftovers.within() == []


@pytest.mark.usefixtures("handlers")
def test_a_signal_of_the_last_moment_still_counts() -> None:
    interruption = Interruption()
    interruption.__enter__()
    interruption.check()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interruption.__exit__(None, None, None)
    os.kill(os.getpid(), signal.SIGTERM)  # the command ends as it began to


def test_signals_mean_what_they_meant_when_nobody_interrupted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            interruption.check()
    finally:
        signal.signal(signal.SIGHUP, before)


# A Python that is none


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("text", "Permission denied"),
        ("folder", "Permission denied"),
        ("empty", "Exec format error"),
        ("missing", "No such file or directory"),
        ("no python", "cannot import dlbench"),
    ],
)
def test_a_python_that_cannot_be_executed_is_one_line(cli: Cli, tmp_path: Path, kind: str, reason: str) -> None:
    python = tmp_path / "python"
    if kind == "folder":
        python.mkdir()
    elif kind != "missing":
        python.write_text("#!/bin/sh\necho 'no module' >&2; exit 1\n" if kind == "no python" else "")
        python.chmod(0o644 if kind == "text" else 0o755)
    words = ("run", "cosmoflow", "--preset", "ci", "--engine", "single", "--data", "synthetic")
    done = cli(*words, "--set", f"system.python={python}")
    assert done.returncode == 5, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dlbench: error: python: {python}: ")
    assert reason in line
    assert not (tmp_path / "runs").exists()


def test_a_python_that_is_gone_at_the_start_is_told_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftovers: Leftovers
) -> None:
    stubbed = Stubbed(tmp_path, monkeypatch, leftovers, [])
    monkeypatch.setattr(launch, "node_command", lambda plan_file, python: ["/etc/passwd"])
    with pytest.raises(EnvironmentLacksError, match=r"^python: /etc/passwd: cannot be executed: Permission denied$"):
        stubbed.run()
    assert stubbed.failure() == "python: /etc/passwd: cannot be executed: Permission denied"
