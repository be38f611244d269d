"""`dlbench data`: makes, converts and verifies data sets."""

from __future__ import annotations

import click

from dlbench.cli.data.convert import pack, samples, vocab
from dlbench.cli.data.make import demo, make
from dlbench.cli.data.verify import verify


class InOrder(click.Group):
    """Lists commands in the order of work."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder)
def data() -> None:
    """Prepare data sets: make, convert, verify."""


for command in (demo, make, pack, vocab, samples, verify):
    data.add_command(command)
