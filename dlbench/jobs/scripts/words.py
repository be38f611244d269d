"""Words of a command that stands in a script: texts, which are quoted there, and variables of the script in them."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from dlbench.records.folder import RunFolder


class Shell(str):
    """Text of the shell as it stands in a script; any other text is quoted there."""

    __slots__ = ()


def variable(name: str) -> Shell:
    """The value of a variable of the script, such as ``HOME`` or ``{job1%%;*}``."""
    return Shell(f'"${name}"')


def joined(*parts: str, by: str = "") -> str:
    """Parts as one word, with `by` between them, which needs no quotes."""
    if not any(isinstance(part, Shell) for part in parts):
        return by.join(parts)
    return Shell(by.join(in_shell(part) if part else "" for part in parts))


def in_shell(word: str) -> str:
    """A word as it stands in a script."""
    return word if isinstance(word, Shell) else shlex.quote(word)


def quoted(words: list[str]) -> str:
    """A command as one line of shell."""
    return " ".join(in_shell(word) for word in words)


class RunWords(NamedTuple):
    """Where a run lives, as words of the commands that start it."""

    folder: str  # Absolute.
    run_id: str

    @property
    def plan(self) -> str:
        return joined(self.folder, "/plan.json")


IN_SCRIPT = RunWords(variable("dlbench_run"), variable("{dlbench_run##*/}"))
"""The run of which a script holds the folder in a variable."""


def words_of(folder: RunFolder) -> RunWords:
    """A run's folder as words."""
    return RunWords(str(folder.path), folder.path.name)
