"""Shell completion of workloads, systems, presets, series and keys, by Click's own mechanism.

Click asks the parameter at the cursor. What it is asked for follows from its name, for all commands alike, and is set
only while a shell asks (the variable below), so that no other command pays for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from dlbench.errors import DlbenchError

if TYPE_CHECKING:
    from dlbench.specs.files import Kind

VARIABLE = "_DLBENCH_COMPLETE"


def _files(*kinds: Kind) -> list[str]:
    from dlbench.specs.files import available

    return [name for kind in kinds for name in available(kind)]


def _given(ctx: click.Context) -> str:
    words = (ctx.params.get(name) for name in ("workload", "subject", "name"))
    # Behind an option that still lacks its value Click leaves arguments unparsed.
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

    arguments = _given(ctx)
    chosen = WorkloadFile(find("workloads", arguments)).base if arguments in _files("workloads") else {}
    workload_keys = [key.name for key in keys_of(Choices, chosen)]
    return [
        f"{name}="
        for name in dict.fromkeys([*workload_keys, *(f"system.{key.name}" for key in keys_of(SystemSpec, {}))])
    ]


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
"""What may stand there, by an option, or by an argument's name in capitals."""


def completing(command: click.Command) -> click.Command:
    """Adds completion to the parameters of a command; does nothing unless a shell asks for completions."""
    if VARIABLE not in os.environ:
        return command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            completing(inner)
    for param in command.params:
        names = _NAMES.get(param.opts[0] if isinstance(param, click.Option) else (param.name or "").upper())
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
