"""The command line: parse, call one function, print. One file a command; heavy imports inside the commands."""

from __future__ import annotations

import importlib
import signal
import sys
from contextlib import suppress
from typing import Any

import click

import dlbench
from dlbench.cli.streams import Streams
from dlbench.errors import EnvironmentLacksError, ExitCode

# In workflow order: name, module, attribute, one line of help (so that --help imports no command).
COMMANDS: tuple[tuple[str, str, str, str], ...] = (
    ("doctor", "doctor", "doctor", "Tell what is installed here, what is missing, and the remedy."),
    ("setup", "setup", "setup", "Make this machine ready: build Horovod."),
    ("data", "data.command", "data", "Make, pack, check and describe data sets."),
    ("ls", "ls", "ls", "List workloads, presets and systems."),
    ("show", "show", "show", "Print a workload or a system with every key decided."),
    ("run", "run", "run", "Train and measure on this machine, or inside an allocation."),
    ("submit", "submit", "submit", "Write batch scripts and submit them to Slurm."),
    ("complete", "complete", "complete", "Submit what is left of a series whose submission was cut off."),
    ("status", "status", "status", "Tell how far runs are, and why some failed."),
    ("io", "io", "io", "Tell what storage and readers give, what accelerators need, and what input costs."),
    ("memory", "memory", "memory", "Plan which activations stay, are swapped or recomputed, for a capacity."),
    ("comm", "comm.command", "comm", "Measure collectives message by message, fit and predict them."),
    ("report", "report", "report", "Turn runs into a scaling report."),
    ("trace", "trace", "trace", "Write what a run did when as a file for Perfetto, or as tables."),
    (
        "diagnose",
        "diagnose",
        "diagnose",
        "Say where the lost percent goes, which nodes are slow, and what to try next.",
    ),
    ("compare", "compare", "compare", "Say whether B is slower than A, by how much, and how sure that is."),
    ("check", "check", "check", "Gate a candidate against a baseline: exit code, JUnit, summary for CI."),
    ("baseline", "baseline", "baseline", "Write the baseline that check compares with."),
    (
        "history",
        "history.command",
        "history",
        "Keep runs over months; find when they became slower, and which nodes did.",
    ),
    ("estimate", "estimate", "estimate", "Time to train at a rate; tell whether a claimed time is possible."),
    ("export", "export", "export", "Write a run as MLPerf log lines or a system description."),
    ("box", "box", "box", "Start or stop a Slurm cluster in one box (root; for tests)."),
)


class WorkflowGroup(click.Group):
    """Lists commands in workflow order and imports a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, *_ in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for name, module, attribute, _ in COMMANDS:
            if name == cmd_name:
                command = getattr(importlib.import_module(f"dlbench.cli.{module}"), attribute)
                assert isinstance(command, click.Command)
                return command
        return None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # Of standard output and error none comes here; click would end with 1, as a failed check does.
            from dlbench.cli.ending import os_error_words

            raise EnvironmentLacksError(os_error_words(error)) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            from dlbench.errors import nearest

            ctx.fail(f"unknown command {args[0]!r}: {nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands, in the order of work"):
            formatter.write_dl([(name, text) for name, _, _, text in COMMANDS])


@click.group(cls=WorkflowGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(dlbench.__version__, prog_name="dlbench")
def cli() -> None:
    """Measure how well a machine trains deep networks, where the time goes, and what limits it.

    \b
    Try:  dlbench doctor
          dlbench run resnet50 --preset ci --ranks 1,2 --repeats 3 --data synthetic
          dlbench report runs -o report.html

    Exit codes: 0 fine, 1 failed check, 2 wrong usage, 3 a run failed, 4 incomplete data, 5 the machine lacks
    something, 6 inconclusive, 70 a defect of dlbench, 124 timeout, 130 interrupted.
    """


def main() -> None:
    """Entry point: runs the command; whatever happens becomes a line and an exit code (`dlbench.cli.ending`)."""
    streams = Streams()
    code = _run()
    lost = streams.lost_output()
    if lost is not None:
        _say(f"dlbench: error: standard output: {lost.strerror or lost}; not all results could be written there")
        if code in (ExitCode.OK, ExitCode.REGRESSION, ExitCode.INCONCLUSIVE):
            # No verdict: who reads the results has none.
            code = int(ExitCode.ENVIRONMENT)
    sys.exit(code)


def _run() -> int:
    """Runs the command and says how it ended, if there is something to say; returns the exit code."""
    try:
        # Not click's standalone mode, in which Ctrl-C would end with 1, the code of a failed check.
        returned = cli(standalone_mode=False)
    except BaseException as error:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # It ends already: a second Ctrl-C must not change how it is said to have ended.
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)
        from dlbench.cli.ending import ending_of

        ending = ending_of(error)
        if ending.line:
            _say(ending.line)
        return ending.code
    return returned if isinstance(returned, int) else int(ExitCode.OK)


def _say(text: str) -> None:
    """The last words of a command; nothing that hinders them changes its exit code."""
    with suppress(Exception):
        click.echo(text, err=True)


if __name__ == "__main__":
    main()
