"""Words of a command in a shell script: literal text, which is quoted, and variables of the script."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from dlbench.records.folder import RunFolder


class Shell(str):
    """Shell code, which is not quoted; any other text is."""

    __slots__ = ()


def variable(name: str) -> Shell:
    """Returns the value of a variable of the script, such as ``HOME`` or ``{job1%%;*}``."""
    return Shell(f'"${name}"')


def joined(*parts: str, by: str = "") -> str:
    """Returns parts joined to one word by the separator `by`, which must need no quotes."""
    if not any(isinstance(part, Shell) for part in parts):
        return by.join(parts)
    return Shell(by.join(in_shell(part) if part else "" for part in parts))


def in_shell(word: str) -> str:
    """Returns a word as shell code."""
    return word if isinstance(word, Shell) else shlex.quote(word)


def quoted(words: list[str]) -> str:
    """Returns a command as one line of shell code."""
    return " ".join(in_shell(word) for word in words)


class RunWords(NamedTuple):
    """The folder and the id of a run, as words of the commands that start it."""

    folder: str  # Absolute path.
    run_id: str

    @property
    def plan(self) -> str:
        return joined(self.folder, "/plan.json")


IN_SCRIPT = RunWords(variable("dlbench_run"), variable("{dlbench_run##*/}"))
"""The run whose folder is in the script's variable `dlbench_run`."""


def words_of(folder: RunFolder) -> RunWords:
    """Returns the words of a known folder."""
    return RunWords(str(folder.path), folder.path.name)
