"""Programs that answer in the place of what dlbench starts on a node, and the line that a refusal ends with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from dlbench.cli.streams import ending_of
from dlbench.errors import ExitCode
from dlbench.jobs import node_program

Answering = Callable[[str], None]
"""Takes the text of the program, in Python."""


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
