"""Programs in the place of Slurm's on PATH, and of what dlbench starts on a node; the line that a refusal ends with."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from dlbench.cli.streams import ending_of
from dlbench.errors import ExitCode
from dlbench.jobs import node_program

Program = Callable[[str, str], None]
"""Makes a program of a name that executes some lines of bash."""

Answering = Callable[[str], None]
"""Takes the text of the program, in Python."""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Puts a stub of a program of Slurm on PATH, which holds bash and nothing of Slurm otherwise."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("bash", "cat", "sleep", "wc", "grep"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))
    interpreter = folder / "bash"

    def make(name: str, body: str) -> None:
        # Of the shell's variables sbatch gets none.
        known = f"export CALLS={tmp_path / 'calls'}\n"
        record = f'printf "%s\\0" {name} "$@" >> "$CALLS"; printf "\\n" >> "$CALLS"\n'
        (folder / name).write_text(f"#!{interpreter}\n{known}{record}{body}\n")
        (folder / name).chmod(0o755)

    return make


def on_path(folder: Path, **bodies: str) -> str:
    """Makes programs of lines of bash in a folder, by their names; returns a PATH that begins with it."""
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def calls(tmp_path: Path) -> list[list[str]]:
    """What the stubs were called with, one after the other."""
    file = tmp_path / "calls"
    return [line.split("\0")[:-1] for line in file.read_text().splitlines()] if file.exists() else []


def as_shown(script: Path) -> str:
    """A job's script as a dry run shows it: the mark by which the job is found again is made with its series."""
    return re.sub(r"^(#SBATCH --comment=\S+/)[0-9a-f]{8}$", r"\1TOKEN", script.read_text(), flags=re.MULTILINE)


def answer_with(monkeypatch: pytest.MonkeyPatch, program: Path, text: str) -> None:
    program.write_text(text, encoding="utf-8")
    words = [sys.executable, "-P", "-m", "dlbench.supervisor", sys.executable, str(program)]
    monkeypatch.setattr(node_program, "supervised", lambda python, module: words)


def one_line(result: Result, code: ExitCode = ExitCode.USAGE) -> str:
    """What a wrong request is answered with."""
    ending = ending_of(result.exception)
    assert ending.code == code
    assert "\n" not in ending.line
    return ending.line
