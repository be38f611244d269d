"""Shell completion by Click; parameters get completions only if a shell asks, so that other commands stay fast."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from dlbench.errors import DlbenchError

if TYPE_CHECKING:
    from dlbench.specs.files import Kind

VARIABLE = "_DLBENCH_COMPLETE"


def _files(*kinds: Kind) -> list[str]:
    from dlbench.specs.files import available

    return list(itertools.chain.from_iterable(map(available, kinds)))


def _given(ctx: click.Context) -> str:
    words = (ctx.params.get(name) for name in ("workload", "subject", "name"))
    # Click leaves arguments after an option without value unparsed.
    return str(next(filter(None, (*words, *ctx.args)), ""))


def _presets(ctx: click.Context) -> Iterable[str]:
    from dlbench.specs.choices import WorkloadFile
    from dlbench.specs.files import find

    return WorkloadFile(find("workloads", _given(ctx))).presets


def _keys(ctx: click.Context) -> list[str]:
    """Completes keys of the given workload (of all, if none is given) and of any system."""
    from dlbench.specs.choices import Choices, WorkloadFile
    from dlbench.specs.files import find
    from dlbench.specs.problems import keys_of
    from dlbench.specs.system import SystemSpec

    workload = _given(ctx)
    base: Mapping[str, Any] = {}
    if workload in _files("workloads"):
        base = WorkloadFile(find("workloads", workload)).base
    names = [key.name for key in keys_of(Choices, base)]
    names += [f"system.{key.name}" for key in keys_of(SystemSpec, {})]
    return [f"{name}=" for name in dict.fromkeys(names)]


def _series(ctx: click.Context) -> list[str]:
    folder = Path(ctx.params.get("out") or "runs") / ".series"
    return sorted(path.stem for path in folder.glob("*.json"))


_NAMES: dict[str, Callable[[click.Context], Iterable[str]]] = {
    "WORKLOAD": lambda _: _files("workloads"),
    "SUBJECT": lambda _: _files("workloads"),
    "NAME": lambda _: _files("workloads", "systems"),
    "SYSTEM": lambda _: _files("systems"),
    "SERIES": _series,
    "--system": lambda _: _files("systems"),
    "--preset": _presets,
    "--set": _keys,
    "--sweep": _keys,
}
"""Functions that list completions, by option, or by an argument's name in capitals."""


def completing(command: click.Command) -> click.Command:
    """Adds completion to the parameters of a command; does nothing unless a shell asks for completions."""
    if VARIABLE not in os.environ:
        return command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            completing(inner)
    for param in command.params:
        key = param.opts[0] if isinstance(param, click.Option) else str(param.name).upper()
        if (names := _NAMES.get(key)) is not None:
            param.shell_complete = partial(_complete, names)  # type: ignore[method-assign]
    return command


def _complete(
    names: Callable[[click.Context], Iterable[str]], ctx: click.Context, incomplete: str
) -> list[CompletionItem]:
    try:
        return [CompletionItem(name) for name in names(ctx) if name.startswith(incomplete)]
    except DlbenchError:
        # An incomplete word, or a broken file; the command itself reports the error.
        return []
