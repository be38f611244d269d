"""What a shell may complete, by Click's own means: names of workloads, systems, presets and series, and keys.

Click asks the parameter at the cursor. What it is asked for follows from its name, for all commands alike, and is set
only while a shell asks (the variable below), so that no other command pays for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import get_args

import click
from click.shell_completion import CompletionItem

from dlbench.errors import DlbenchError

VARIABLE = "_DLBENCH_COMPLETE"


def _files(*kinds: str) -> list[str]:
    from dlbench.specs.resolve import available

    return [name for kind in kinds for name in available("workloads" if kind == "workloads" else "systems")]


def _given(ctx: click.Context) -> str:
    """The workload that is typed already; empty: none."""
    words = (ctx.params.get(name) for name in ("workload", "subject", "name"))
    # Behind an option that still lacks its value Click leaves arguments unparsed.
    return str(next(filter(None, (*words, *ctx.args)), ""))


def _presets(ctx: click.Context) -> Iterable[str]:
    from dlbench.specs.choices import WorkloadFile
    from dlbench.specs.resolve import find

    return WorkloadFile(find("workloads", _given(ctx))).presets


def _keys(ctx: click.Context) -> list[str]:
    """Of the workload that is given, and of any system; all that there are where none is given."""
    from dlbench.specs.choices import Choices, WorkloadFile
    from dlbench.specs.keys import keys_of
    from dlbench.specs.resolve import find
    from dlbench.specs.system.system import SystemSpec

    given = _given(ctx)
    chosen = WorkloadFile(find("workloads", given)).base if given in _files("workloads") else {}
    own = [key.name for key in keys_of(Choices, chosen)]
    return [f"{name}=" for name in dict.fromkeys([*own, *(f"system.{key.name}" for key in keys_of(SystemSpec, {}))])]


def _series(ctx: click.Context) -> list[str]:
    folder = Path(ctx.params.get("out") or "runs") / ".series"
    return sorted(path.stem for path in folder.glob("*.json"))


def _literal(module: str, name: str) -> list[str]:
    import importlib

    return list(get_args(getattr(importlib.import_module(module), name)))


_OPTIONS: dict[str, Callable[[click.Context], Iterable[str]]] = {
    "system": lambda _: _files("systems"),
    "preset": _presets,
    "engine": lambda _: _literal("dlbench.specs.engine", "EngineName"),
    "launcher": lambda _: _literal("dlbench.specs.system.launch", "LauncherName"),
    "overrides": _keys,
    "sweep": _keys,
}
_ARGUMENTS: dict[str, Callable[[click.Context], Iterable[str]]] = {
    "workload": lambda _: _files("workloads"),
    "subject": lambda _: _files("workloads"),
    "name": lambda _: _files("workloads", "systems"),
    "system": lambda _: _files("systems"),
    "series": _series,
}


def completing(command: click.Command) -> click.Command:
    """The command, whose parameters know what may stand there; as it is where no shell asks."""
    if VARIABLE not in os.environ:
        return command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            completing(inner)
    for param in command.params:
        names = (_OPTIONS if isinstance(param, click.Option) else _ARGUMENTS).get(param.name or "")
        if names is not None:
            param.shell_complete = partial(_complete, names)  # type: ignore[method-assign]
    return command


def _complete(
    names: Callable[[click.Context], Iterable[str]], ctx: click.Context, incomplete: str
) -> list[CompletionItem]:
    try:
        return [CompletionItem(name) for name in names(ctx) if name.startswith(incomplete)]
    except DlbenchError:
        # What is typed so far names nothing, or a file is broken: the command itself will say so.
        return []
