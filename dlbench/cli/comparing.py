"""What `dlbench compare`, `check` and `baseline` share: their options, sides, and how they end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dlbench.cli.choosing import parse_where, runs_at
from dlbench.cli.options import F, decorated, write_output
from dlbench.cli.report import check_writable, format_by_suffix, render, require_modules
from dlbench.errors import ExitCode, UserError, nearest, refused

if TYPE_CHECKING:
    from dlbench.gate.comparison import Comparison
    from dlbench.gate.page.assemble import ComparisonReport
    from dlbench.gate.sides import Side
    from dlbench.gate.verdicts import Rule

FormatName = Literal["text", "json", "md", "junit"]

SUFFIXES: dict[str, FormatName] = {".txt": "text", ".json": "json", ".md": "md", ".xml": "junit"}

EXIT_CODES = {
    "regressed": ExitCode.REGRESSION,
    "improved": ExitCode.OK,
    "equivalent": ExitCode.OK,
    "inconclusive": ExitCode.INCONCLUSIVE,
    "insufficient": ExitCode.INCONCLUSIVE,
}

_MOST = 10.0
"""Largest share that --tolerance and --detect take: 1,000 %."""


def _share(most: float, *, with_zero: bool) -> Callable[[click.Context, click.Parameter, str], float]:
    """Reads an option's share, such as `2%` or `0.02`."""

    def convert(ctx: click.Context, param: click.Parameter, text: str) -> float:
        match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,12})?)\s*(%?)\s*", text)
        share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
        if match and not match[2] and share >= 1:
            raise UserError(f"--{param.name} {text}: 1 or more is taken in percent only: write {text.strip()}%")
        if not (0 <= share <= most and (share > 0 or with_zero)):
            least = "from 0" if with_zero else "above 0"
            raise UserError(f"--{param.name} {text}: is no share {least} to {most * 100:g}%, such as 2% or 0.02")
        return share

    return convert


def rule_options(function: F) -> F:
    """What decides a comparison, and where it is written: options of `compare` and `check`."""
    decorators: list[Callable[[F], F]] = [
        click.option(
            "--metric",
            "metrics",
            multiple=True,
            metavar="NAME",
            help="Metric that decides, repeatable; all: every one that runs tell.  [default: step_median_s and "
            "step_mean_s]",
        ),
        click.option(
            "--tolerance",
            metavar="SHARE",
            callback=_share(_MOST, with_zero=True),
            default="2%",
            show_default=True,
            help="Slowdown that is tolerated: only a larger one fails; equivalence is shown within it.",
        ),
        click.option(
            "--level",
            metavar="SHARE",
            callback=_share(0.5, with_zero=False),
            default="1%",
            show_default=True,
            help="Chance that any metric or point fails though none is slower than tolerated.",
        ),
        click.option(
            "--detect",
            metavar="SHARE",
            callback=_share(_MOST, with_zero=False),
            default="3%",
            show_default=True,
            help="Slowdown for which the number of repeats is told.",
        ),
        click.option(
            "--history",
            type=click.Path(path_type=Path),
            metavar="DIR|RUNS",
            help="Earlier runs (a history, a folder of runs or a baseline file) that tell how far sessions scatter, "
            "where the sides have fewer than five.",
        ),
        click.option(
            "--allow",
            multiple=True,
            metavar="KEY[,KEY]",
            help="Key that may differ between the sides, e.g. system or train.learning_rate.",
        ),
        click.option(
            "-o", "--output", type=click.Path(path_type=Path), help="File to write (default: standard output)."
        ),
        click.option(
            "--format",
            "format_name",
            type=click.Choice(["text", "json", "md", "junit"]),
            help="Default: what the name of the output file says (.txt, .json, .md, .xml), else text.",
        ),
        click.option("--full", is_flag=True, help="Text with the evidence of every comparison; default: one screen."),
        click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write JSON to this file too."),
        click.option(
            "--junit", "junit_file", type=click.Path(path_type=Path), help="Write JUnit XML to this file too."
        ),
        click.option(
            "--summary",
            "summary_file",
            type=click.Path(path_type=Path),
            help="Append Markdown to this file too, such as $GITHUB_STEP_SUMMARY.",
        ),
    ]
    return decorated(function, decorators)


def prepare(command: str, options: dict[str, Any]) -> None:
    """Refuses what cannot end well before anything is read.

    Raises:
        UserError: a metric is not known, or a file cannot be written.
        EnvironmentLacksError: something is not installed.
    """
    metric_names(options["metrics"])
    files = [options[name] for name in ("output", "json_file", "junit_file", "summary_file")]
    for path in filter(None, files):
        check_writable(path)
    chosen_format(options)
    require_modules(command, "numpy", "pandas")


def chosen_format(options: dict[str, Any]) -> FormatName:
    """The format of the main output."""
    return format_by_suffix(options["output"], options["format_name"], SUFFIXES, "text")


def metric_names(asked: Sequence[str]) -> tuple[str, ...]:
    """Names of the metrics that decide.

    Raises:
        UserError: one is not known.
    """
    from dlbench.reading.metrics import DEFAULT_METRICS, by_name

    for name in asked:
        if name != "all" and name not in by_name():
            raise UserError(f"--metric {name}: no such metric; {nearest(name, [*by_name(), 'all'])}")
    if "all" in asked:
        return tuple(by_name())
    return tuple(dict.fromkeys(asked)) or DEFAULT_METRICS


def read_side(path: Path, where: Sequence[str], option: str) -> Side:
    """One side: a folder of runs, one run, a history, or a baseline file.

    Raises:
        UserError: there is nothing there, or no run with these properties.
        IncompleteDataError: a file is damaged, or no run has figures.
    """
    from dlbench.gate.baseline import read_baseline, side_of_baseline
    from dlbench.gate.sides import side_of_runs

    chosen = parse_where(where, option)
    if path.is_file():
        return side_of_baseline(read_baseline(path), str(path), chosen, option)
    if path.suffix == ".json" and not path.exists():
        raise UserError(f"{path}: no such baseline file; `dlbench baseline RUNS -o {path}` makes one")
    return side_of_runs(runs_at(path), str(path), chosen, option)


def read_history(path: Path, sides: Sequence[Side]) -> Side:
    """Earlier runs of the workloads and sizes that are compared, on the system as the newest of them had it.

    Raises:
        UserError: there are none.
        IncompleteDataError: a file is damaged, or no run has figures.
    """
    from dlbench.gate.baseline import read_baseline, side_of_baseline
    from dlbench.gate.sides import side_of_runs
    from dlbench.reading.comparability import system_content

    if path.is_file():
        return side_of_baseline(read_baseline(path), str(path), {}, "--history")
    found = runs_at(path)
    wanted = {(point.content.registered["workload"], *point.place) for side in sides for point in side.points}
    like = [
        run for run in found.runs if (run.plan.workload.name, run.plan.layout.ranks, run.plan.layout.nodes) in wanted
    ]
    if not like:
        raise UserError(f"--history {path}: holds no run of these workloads and sizes")
    # Other modules or nodes are another machine: its nights may scatter otherwise.
    asked = system_content(like[-1].plan)
    found.runs = [run for run in like if system_content(run.plan) == asked]
    return side_of_runs(found, str(path), {}, "--history")


def rule_of(options: dict[str, Any]) -> Rule:
    """What counts as a change."""
    from dlbench.gate.verdicts import Rule

    return Rule(tolerance=options["tolerance"], level=options["level"], wanted=options["detect"])


def comparison(a: Side, b: Side, options: dict[str, Any], where: tuple[str, str]) -> Comparison:
    """B against A; `where` names the options that choose the runs of each side.

    Raises:
        UserError: the sides are not comparable.
    """
    from dlbench.gate.comparison import compare_sides
    from dlbench.gate.content import parse_allowed

    allowed = parse_allowed(options["allow"], (point.content for side in (a, b) for point in side.points))
    history = None if options["history"] is None else read_history(options["history"], (a, b))
    return compare_sides(
        a,
        b,
        metrics=metric_names(options["metrics"]),
        rule=rule_of(options),
        allowed=allowed,
        history=history,
        options=where,
    )


def paired_comparison(path: Path, where: Sequence[str], options: dict[str, Any]) -> Comparison:
    """Side b against side a of the interleaved runs of one folder.

    Raises:
        UserError: there are no such runs, or the sides differ in more than was set on them.
        IncompleteDataError: no run has figures.
    """
    from dlbench.gate.comparison import compare_pairs
    from dlbench.gate.pairs import paired_points

    if options["allow"]:
        raise UserError("--allow: has no effect with --paired; the sides may differ in what run --ab set on them")
    if options["history"] is not None:
        raise UserError("--history: has no effect with --paired; a session falls on both sides of a pair alike")
    points, both = paired_points(runs_at(path), str(path), parse_where(where, "--where"), "--where")
    return compare_pairs(points, both=both, metrics=metric_names(options["metrics"]), rule=rule_of(options))


def finish(found: Comparison, options: dict[str, Any], *, exit_zero: bool, name: str) -> None:
    """Writes every output that was asked for, and ends with the verdict's exit code."""
    from dlbench.gate.page.assemble import assemble

    report = assemble(found)
    formats: list[tuple[Path | None, FormatName]] = [(options["json_file"], "json"), (options["junit_file"], "junit")]
    for path, format_name in formats:
        if path is not None:
            write_output(_render(report, format_name, name), path)
    if options["summary_file"] is not None:
        _append(options["summary_file"], _render(report, "md", name))
    write_output(_render(report, chosen_format(options), name, full=options["full"]), options["output"])
    if options["output"] is not None:
        click.echo(f"{options['output']}: {report.headline}", err=True)
    for line in report.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    if report.damaged:
        sys.exit(int(ExitCode.INCOMPLETE))
    if not exit_zero:
        sys.exit(int(EXIT_CODES[report.verdict]))


def _render(report: ComparisonReport, format_name: FormatName, name: str, *, full: bool = True) -> bytes:
    if format_name == "junit":
        from dlbench.gate.page.document import to_junit

        return to_junit(report, name).encode("utf-8")
    from dlbench.gate.page.document import document_of

    return render(document_of(report), format_name, full=full).encode("utf-8")


def _append(path: Path, content: bytes) -> None:
    """Adds to a file that others write to as well: a CI step's summary."""
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError as error:
        raise refused(error, f"--summary {path}: cannot be written: {error.strerror or error}", UserError) from None
