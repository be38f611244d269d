"""The variables of `launch.environment` with their values, taken at the last moment from where the plan says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dlbench.errors import UserError
from dlbench.opening import read_bytes, why_unreadable
from dlbench.specs.system.launch import VariableSource

MAX_BYTES = 64 * 1024
"""Of a value from a file; Linux itself refuses a variable of 128 KiB."""


def resolve(given: Mapping[str, str | VariableSource], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Every variable with its value.

    Args:
        given: texts, and references to where the text is.
        variables: the environment of dlbench itself.

    Raises:
        UserError: a variable that is referred to is not set, or a file cannot be read; the line holds no value.
    """
    return {name: _value(name, source, variables) for name, source in given.items()}


def _value(name: str, source: str | VariableSource, variables: Mapping[str, str]) -> str:
    if isinstance(source, str):
        return source
    where = f"launch.environment.{name}"
    if source.file is not None:
        return _from_file(where, Path(source.file).expanduser())
    assert source.variable is not None
    if source.variable not in variables:
        raise UserError(f"{where}: {source.variable} is not set where dlbench runs; export it, then run again")
    return variables[source.variable]


def _from_file(where: str, path: Path) -> str:
    try:
        content = read_bytes(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{where}: {path} {why_unreadable(error)}; it cannot be read") from None
    if b"\0" in content:
        raise UserError(f"{where}: {path} holds no value of a variable, but a NUL character")
    return os.fsdecode(content).rstrip("\n")
