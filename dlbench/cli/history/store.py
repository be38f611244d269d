"""Options by which commands find a history and choose runs of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.history.store import History

F = TypeVar("F", bound=Callable[..., Any])


def store_options(function: F) -> F:
    """`--store` and `--index`, which `open_store` takes."""
    decorators = (
        click.option(
            "--store",
            type=click.Path(path_type=Path),
            envvar="DLBENCH_HISTORY",
            metavar="DIR",
            help="Folder of the history (default: what DLBENCH_HISTORY names).",
        ),
        click.option(
            "--index",
            type=click.Path(path_type=Path, dir_okay=False),
            envvar="DLBENCH_HISTORY_INDEX",
            metavar="FILE",
            help="Its index, where that lies elsewhere (default: what DLBENCH_HISTORY_INDEX names, else index.sqlite "
            "in the folder).",
        ),
    )
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def where_option(function: F) -> F:
    """`--where`, which `dlbench.history.entry.parse_where` takes."""
    return click.option(
        "--where",
        multiple=True,
        metavar="KEY=VALUE",
        help="Only runs with this value, e.g. workload=resnet50, ranks=8, state=valid, host=n17, tag.commit=1a2b3c; "
        "may be given several times, and all must hold.",
    )(function)


def open_store(store: Path | None, index: Path | None, *, create: bool = False) -> History:
    """The history that was asked for, its index brought up to date; what happens to the index is said on stderr.

    Raises:
        UserError: none was named, or it is none.
    """
    from dlbench.history.reading import open_history

    if store is None:
        raise UserError("no history was named: give --store DIR, or set DLBENCH_HISTORY")
    return open_history(store, index=index, create=create, notify=note)


def note(line: str) -> None:
    """One line on stderr, without control characters."""
    click.echo("dlbench: history: " + "".join(c if c.isprintable() else " " for c in line), err=True)
