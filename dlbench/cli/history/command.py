"""`dlbench history`: runs of months in one place; its commands are the other files of this folder."""

from __future__ import annotations

import importlib

import click

# In the order of work: name, module, attribute, one line of help (so that --help imports no command).
COMMANDS: tuple[tuple[str, str, str, str], ...] = (
    ("import", "importing", "import_runs", "Bring runs in: folders of runs, single runs, archives."),
    ("list", "list_runs", "list_runs", "List the runs of a history."),
    ("trends", "trends", "trends", "Find when runs became slower or faster, and what changed then."),
    ("acknowledge", "acknowledge", "acknowledge", "Say that a change of level is known, and why."),
    ("slow-nodes", "trends", "slow_nodes", "Show which nodes were slow, month by month."),
    ("export", "export", "export_runs", "Write runs as an archive that `import` reads."),
    ("prune", "prune", "prune", "Let old runs go, or their traces."),
    ("rebuild", "rebuild", "rebuild", "Make the index anew from the runs."),
)


class LazyGroup(click.Group):
    """Lists commands in the order of work and imports a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, *_ in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for name, module, attribute, _ in COMMANDS:
            if name == cmd_name:
                command = getattr(importlib.import_module(f"dlbench.cli.history.{module}"), attribute)
                assert isinstance(command, click.Command)
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, _, _, text in COMMANDS])


@click.group(cls=LazyGroup)
def history() -> None:
    """Keep runs over months; find when they became slower, and which nodes did.

    A history is a folder: below its `runs` the folders of runs lie as they are, by month, and every command that reads
    a folder of runs reads a month of it. Beside them lies an index, a cache that can be deleted at any time.

    \b
    Example:
      export DLBENCH_HISTORY=$HOME/history
      dlbench history import runs
      dlbench history list --where workload=resnet50
    """
