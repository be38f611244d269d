"""The command line. Each module holds the commands of one subject; heavy imports are inside the commands.

Parameters get completions only if a shell asks, so that other commands stay fast.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

import dlbench
from dlbench.cli.streams import Streams, ending_of, os_error_words
from dlbench.errors import DlbenchError, EnvironmentLacksError, ExitCode, UserError, nearest

if TYPE_CHECKING:
    from dlbench.specs.files import Kind

VARIABLE = "_DLBENCH_COMPLETE"
ALLOCATIONS = 100_000
"""Allocations between two searches for reference cycles: Python's 700 take 6 % of a short command, most of it while
modules, which live to the end, are imported."""
GROUPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Start": (
        ("doctor", "setup", "Check what is installed, what is missing, and how to install it."),
        ("ls", "show", "List workloads, presets and systems."),
        ("show", "show", "Show every key of a workload or system: value, unit, meaning."),
        ("run", "run", "Train and measure on this machine or inside an allocation."),
        ("report", "report", "Write a scaling report of runs."),
    ),
    "Cluster": (
        ("preflight", "setup", "Check a system before its first run: system file, Slurm, every node."),
        ("submit", "run", "Submit runs to Slurm; --dry-run lists the jobs and their cost."),
        ("status", "status", "Show the state of runs, and why runs failed."),
        ("wait", "status", "Wait until all jobs of a series have finished."),
        ("logs", "status", "Print the logs of a run: job, launcher, ranks."),
        ("cancel", "status", "Cancel the jobs of a series or a run."),
        ("cost", "estimate", "Report what jobs cost: node-hours, queue wait, memory, energy."),
    ),
    "Compare": (
        ("compare", "comparing", "Compare two sets of runs: is B slower, by how much, how certain."),
        ("baseline", "comparing", "Write a baseline file for `dlbench check`."),
        ("check", "comparing", "Compare runs with a baseline in CI: exit code, JUnit, summary."),
        ("history", "history", "Store runs for months; find regressions and slow nodes."),
    ),
    "Understand": (
        ("diagnose", "report", "Show where efficiency is lost, and what to try next."),
        ("trace", "export", "Write the timeline of a run for Perfetto."),
        ("comm", "comm", "Measure collectives, fit a network model, predict."),
        ("io", "io", "Measure storage and data loading, and what input costs."),
        ("layer", "out_of_core", "Time a layer whole and at 1/p of its filters, channels and extent."),
        ("memory", "out_of_core", "Plan which activations to keep, swap or recompute."),
        ("project", "project", "Project runs to rank counts that were not measured."),
        ("estimate", "estimate", "Estimate time to train, GPU-hours and price, from runs."),
    ),
    "Data and export": (
        ("data", "io", "Make, pack and verify data sets."),
        ("export", "export", "Export runs as metrics, MLPerf log or system description."),
        ("setup", "setup", "Build Horovod and the image decoder for this machine."),
    ),
}
"""Commands by purpose: name, module, one line of help (so that --help imports no command)."""

COMMANDS: tuple[tuple[str, str, str], ...] = tuple(itertools.chain.from_iterable(GROUPS.values()))


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


class CommandGroups(click.Group):
    """A group that lists commands by purpose, and imports a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, *_ in COMMANDS]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes command names without importing the commands, which Click would do for their help."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=text) for name, _, text in COMMANDS if name.startswith(incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses control characters in arguments of every command: they would end up in scripts and on pages."""
        for before, word in zip(["", *args], args, strict=False):
            if not word.isprintable():
                from dlbench.specs.files import control_character

                if problem := control_character(word):
                    if before.startswith("-") and "=" not in before:
                        raise UserError(f"{before} {word[:80]!a}: {problem}")
                    raise UserError(f"{word[:80]!a}: {problem}")
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for name, module, _ in COMMANDS:
            if name == cmd_name:
                command = getattr(importlib.import_module(f"dlbench.cli.{module}"), name)
                assert isinstance(command, click.Command)
                return completing(command)
        return None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # It does not come from standard output or error; click would exit with 1, the code of a failed check.
            raise EnvironmentLacksError(os_error_words(error)) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"unknown command {args[0]!r}: {nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name, *_ in COMMANDS)
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, _, text in commands])


@click.group(cls=CommandGroups, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(dlbench.__version__, prog_name="dlbench")
def cli() -> None:
    """Measure how well a machine trains deep networks, where the time goes, and what limits it.

    \b
    Try:  dlbench run resnet50 --preset ci --ranks 1,2 --repeats 5
          dlbench report runs -o report.html

    Exit codes: 0 success, 1 failed check, 2 wrong usage, 3 a run failed, 4 incomplete data, 5 the machine lacks
    something, 6 inconclusive, 70 bug in dlbench, 75 stopped on request, 124 timeout, 130 interrupted.
    """


def main() -> None:
    """Runs the command; every exception becomes a line and an exit code (`dlbench.cli.streams`)."""
    gc.set_threshold(ALLOCATIONS)
    streams = Streams()
    code = _run()
    lost = streams.lost_output()
    if lost is not None:
        _say(f"dlbench: error: standard output: {lost.strerror or lost}; not all results could be written there")
        if code in (ExitCode.OK, ExitCode.REGRESSION, ExitCode.INCONCLUSIVE):
            # Without the results a reader has no verdict.
            code = int(ExitCode.ENVIRONMENT)
    sys.exit(code)


def _run() -> int:
    try:
        # Not click's standalone mode, in which Ctrl-C would end with 1, the code of a failed check.
        returned = cli(standalone_mode=False)
    except BaseException as error:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # The command is ending: a second Ctrl-C must not change the reported cause.
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)
        ending = ending_of(error)
        if ending.line:
            _say(ending.line)
        return ending.code
    return returned if isinstance(returned, int) else int(ExitCode.OK)


def _say(text: str) -> None:
    """Prints the last line of a command; a failure here does not change the exit code."""
    with suppress(Exception):
        click.echo(text, err=True)


if __name__ == "__main__":
    main()
