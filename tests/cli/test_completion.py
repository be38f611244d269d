"""Completion in real shells, at a terminal, as a person asks for it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
LONGEST_S = 120.0
"""The machine may be busy; a shell answers within a second."""

SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        'bind "set bell-style none"; eval "$(_DLBENCH_COMPLETE=bash_source dlbench)"',
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        'autoload -Uz compinit; compinit -u -D; bindkey -e; eval "$(_DLBENCH_COMPLETE=zsh_source dlbench)"',
    ),
    "fish": (["fish", "--no-config", "-i"], "_DLBENCH_COMPLETE=fish_source dlbench | source"),
}


class Terminal:
    """A shell at a terminal of its own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.seen = ""

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.descriptor, text.encode())

    def wait_for(self, words: str) -> None:
        """Reads until the words are there."""
        end = time.monotonic() + LONGEST_S
        while words not in self.seen:
            left = end - time.monotonic()
            assert left > 0, f"no {words!r} in {self.seen!r}"
            if select.select([self.descriptor], [], [], min(left, 1.0))[0]:
                self.seen += os.read(self.descriptor, 65536).decode("utf-8", "replace")


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[Terminal]:
    leader, follower = pty.openpty()
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "PS1": "$ ",
    }
    shell = subprocess.Popen(
        # Fish wants to be in charge of its terminal.
        ["setsid", "--ctty", *command],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=folder,
        env=environment,
    )
    os.close(follower)
    try:
        yield Terminal(leader)
    finally:
        shell.kill()
        shell.wait()
        os.close(leader)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_completes_at_a_terminal(name: str, tmp_path: Path) -> None:
    command, setup = SHELLS[name]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    (tmp_path / "runs" / ".series").mkdir(parents=True)
    (tmp_path / "runs" / ".series" / "nightly-2026.json").touch()
    with terminal(command, tmp_path) as shell:
        shell.type(f"{setup}; echo re''ady\n")
        shell.wait_for("ready")
        for typed, completed in (
            ("dlbench histo", "dlbench history"),
            ("dlbench run cosm", "dlbench run cosmoflow"),
            ("dlbench run cosmoflow --preset c", "dlbench run cosmoflow --preset ci"),
            ("dlbench submit bert --system example-gp", "dlbench submit bert --system example-gpu"),
            ("dlbench run bert --set train.batch_per_r", "dlbench run bert --set train.batch_per_rank="),
            ("dlbench wait night", "dlbench wait nightly-2026"),
        ):
            # To the start of the line and to its end: what was completed is printed, and nothing else is run.
            shell.type(f"{typed}\t\x01echo @\x05@\n")
            shell.wait_for(f"\n@{completed}")
