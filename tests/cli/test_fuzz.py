"""Whole commands under hostile words: each ends in time, without a traceback, with a code that is no verdict."""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dlbench.errors import ExitCode
from tests.support.forks import call_dlbench
from tests.support.hostile import NOT_TRIED, Case, leaves, leftovers, make_world, random_case

LIMIT_S = 60.0

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")

"""A hundred commands each; the variables choose others, to look further or to see one again."""

MAY_SAY_IMPOSSIBLE = "estimate"
"""Its 1 is a verdict on numbers that were given."""


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    # Not pytest's folder: the name of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        root = Path(folder)
        make_world(root)
        yield root
        (root / "private").chmod(0o700)


def problem(case: Case, world: Path) -> str:
    """What a command did that it must not; empty if it ended well, or in one line."""
    try:
        done = call_dlbench(*case.words, cwd=world, timeout=LIMIT_S, surroundings=case.surroundings, **case.variables)
    except subprocess.TimeoutExpired:
        return f"hangs: {case}"
    told = ""
    if "Traceback (most recent call last)" in done.stderr + done.stdout:
        told = "a traceback: " + done.stderr[-1500:]
    elif done.returncode not in set(ExitCode) - {ExitCode.DEFECT, ExitCode.REGRESSION}:
        if not (case.words[0] == MAY_SAY_IMPOSSIBLE and done.returncode == ExitCode.REGRESSION):
            told = f"exit code {done.returncode}: {done.stderr[-300:]}"
    elif CONTROL.search(done.stderr):
        told = f"raw characters on standard error: {done.stderr[-300:]!a}"
    elif max(map(len, done.stderr.split("\n"))) > 2100:
        told = f"an endless line: {done.stderr[:200]!a}"
    elif done.returncode and not (done.stderr or 2 in case.surroundings.full):
        told = f"exit code {done.returncode} without a word" if not done.stdout else ""
    elif found := leftovers(world):
        told = f"half-written: {found}"
    return told and f"{told}\n  of: {case}"


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.nightly] if part else []) for part in range(4)])
def test_every_command_ends_as_documented(world: Path, part: int) -> None:
    """One case of every command, the same each time; the first part of them by day."""
    names = sorted(set(leaves()) - NOT_TRIED)[part::4]
    _require_none(problem(random_case(random.Random(f"{name} 1"), name), world) for name in names)


def _require_none(problems: Iterable[str]) -> None:
    found = list(filter(None, problems))
    assert not found, "\n\n".join(found)
