"""`dlbench compare`, `check` and `baseline`: their options, the sides of a comparison, and the exit codes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from dlbench.cli import report as reports
from dlbench.cli.options import FILE, OUTPUT, F, decorated, given_options, value_option, write_output
from dlbench.cli.report import (
    check_writable,
    finish,
    format_by_suffix,
    format_option,
    named,
    parse_where,
    render,
    require_modules,
    runs_argument,
    runs_at,
    where_option,
)
from dlbench.errors import ExitCode, IncompleteDataError, UserError, nearest, refused
from dlbench.stats.verdict_words import GATE_TONES

if TYPE_CHECKING:
    from dlbench.gate.baseline import Floor
    from dlbench.gate.report import ComparisonReport
    from dlbench.gate.sides import GateSide
    from dlbench.gate.verdicts import Rule


FormatName = Literal["text", "json", "md", "html", "junit"]

SUFFIXES: dict[str, FormatName] = {
    **{suffix: name for suffix, name in reports.SUFFIXES.items() if name != "csv"},
    ".xml": "junit",
}

EXIT_CODES = {"bad": ExitCode.REGRESSION, "good": ExitCode.OK, "open": ExitCode.INCONCLUSIVE}
"""By the tone of the verdict."""

_MOST = 10.0  # Largest share that --tolerance and --detect take: 1,000 %.


def _share(max_share: float, *, with_zero: bool) -> Callable[[click.Context, click.Parameter, str], float]:
    def convert(ctx: click.Context, param: click.Parameter, text: str) -> float:
        match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,12})?)\s*(%?)\s*", text)
        share = float(match[1]) if match else -1.0
        if match and match[2]:
            share /= 100
        elif share >= 1:
            raise UserError(f"--{param.name} {text}: 1 or more must be given in percent: write {text.strip()}%")
        if not (0 <= share <= max_share and (share > 0 or with_zero)):
            lower_bound = "from 0" if with_zero else "above 0"
            raise UserError(f"--{param.name} {text}: must be a share {lower_bound} to {max_share * 100:g}%, e.g. 2%")
        return share

    return convert


def rule_options(function: F) -> F:
    """Adds the options of `compare` and `check` that decide the verdict and the output."""
    decorators: list[Callable[[F], F]] = [
        value_option(
            "--metric metrics",
            "NAME",
            "Metric that decides the verdict, repeatable; all: every metric of the runs.  [default: step_median_s and "
            "step_mean_s]",
            multiple=True,
        ),
        value_option(
            "--tolerance",
            "SHARE",
            "Tolerated slowdown; only a larger one fails. Also the limit for `equivalent`.",
            "2%",
            callback=_share(_MOST, with_zero=True),
        ),
        value_option(
            "--level",
            "SHARE",
            "Probability of a false alarm, over all metrics and points together.",
            "1%",
            callback=_share(0.5, with_zero=False),
        ),
        value_option(
            "--detect",
            "SHARE",
            "Slowdown to detect; the report says how many repeats this needs.",
            "3%",
            callback=_share(_MOST, with_zero=False),
        ),
        value_option(
            "--history",
            "DIR|RUNS",
            "Earlier runs (history, runs or baseline file) that show how sessions differ, for sides with few of them.",
            type=FILE,
        ),
        value_option("--allow", "KEY[,KEY]", "Key in which sides may differ, repeatable, e.g. system.", multiple=True),
        OUTPUT,
        format_option(*get_args(FormatName), suffixes=": .txt, .json, .md, .html, .xml"),
        click.option("--full", is_flag=True, help="Print the evidence of all comparisons (default: one screen)."),
        value_option("--junit junit_file", None, "Also write JUnit XML to this file.", type=FILE),
        value_option("--summary summary_file", None, "Append Markdown, e.g. to $GITHUB_STEP_SUMMARY.", type=FILE),
    ]
    return decorated(function, decorators)


def prepare(command: str, options: dict[str, Any]) -> None:
    """Checks the options before anything is read."""
    metric_names(options["metrics"])
    for name in ("output", "junit_file", "summary_file"):
        check_writable(options[name])
    chosen_format(options)
    require_modules(command, "numpy")


def chosen_format(options: dict[str, Any]) -> FormatName:
    """Returns the format of the main output."""
    return format_by_suffix(options["output"], options["format_name"], SUFFIXES, "text")


def metric_names(requested: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the metrics that decide the verdict."""
    from dlbench.analysis.metrics import DEFAULT_METRICS, by_name

    for name in requested:
        if name != "all" and name not in by_name():
            raise UserError(f"--metric {name}: no such metric; {nearest(name, [*by_name(), 'all'])}")
    if "all" in requested:
        return tuple(by_name())
    return tuple(dict.fromkeys(requested)) or DEFAULT_METRICS


def read_side(path: Path, where: Sequence[str], where_side: Sequence[str], options: tuple[str, str]) -> GateSide:
    """Returns a side of the comparison; `options`: the names of --where for this and for the other side."""
    from dlbench.gate.baseline import read_baseline, side_of_baseline
    from dlbench.gate.sides import TITLES, side_of_runs

    option = options[0] if where_side else "--where"
    chosen = parse_where((*where, *where_side), option)
    if path.is_file():
        for key, value in parse_where(where, "--where").items():
            if key not in TITLES:
                raise UserError(
                    f"--where {key}: {path} is a baseline file, whose points have no {key}; choose the runs of the "
                    f"other side: {options[1]} {key}={value}"
                )
        return side_of_baseline(read_baseline(path), str(path), chosen, option)
    if path.suffix == ".json" and not path.exists():
        raise UserError(f"{path}: no such baseline file; `dlbench baseline RUNS -o {path}` makes one")
    return side_of_runs(runs_at(path), str(path), chosen, option)


def read_history(path: Path, sides: Sequence[GateSide]) -> GateSide:
    """Returns earlier runs of the compared workloads and sizes, on the system of the newest of them."""
    from dlbench.analysis.comparability import system_content
    from dlbench.gate.baseline import read_baseline, side_of_baseline
    from dlbench.gate.sides import side_of_runs

    if path.is_file():
        return side_of_baseline(read_baseline(path), str(path), {}, "--history")
    history = runs_at(path)
    points = [point for side in sides for point in side.points]
    compared = {(point.content.registered["workload"], *point.place) for point in points}
    runs = [
        run
        for run in history.runs
        if (run.plan.workload.name, run.plan.layout.ranks, run.plan.layout.nodes) in compared
    ]
    if not runs:
        raise UserError(f"--history {path}: contains no run of these workloads and sizes")
    # Other modules or nodes make another machine, whose sessions may differ more or less.
    newest_system = system_content(runs[-1].plan)
    history.runs = [run for run in runs if system_content(run.plan) == newest_system]
    return side_of_runs(history, str(path), {}, "--history")


def rule_of(options: dict[str, Any]) -> Rule:
    """Returns the rule that decides what counts as a change."""
    from dlbench.gate.verdicts import Rule

    return Rule(tolerance=options["tolerance"], level=options["level"], wanted=options["detect"])


def comparison(
    a: GateSide, b: GateSide, options: dict[str, Any], where: tuple[str, str], floors: Sequence[Floor] = ()
) -> ComparisonReport:
    """Compares B with A and with floors; `where` names the options that select the runs of each side."""
    from dlbench.gate.comparison import compare_sides
    from dlbench.gate.sides import parse_allowed

    allowed = parse_allowed(options["allow"], (point.content for point in (*a.points, *b.points)))
    history = None if options["history"] is None else read_history(options["history"], (a, b))
    names, rule = metric_names(options["metrics"]), rule_of(options)
    return compare_sides(a, b, metrics=names, rule=rule, allowed=allowed, history=history, options=where, floors=floors)


def paired_comparison(
    path: Path, where: Sequence[str], options: dict[str, Any], floors: Sequence[Floor] = ()
) -> ComparisonReport:
    """Compares side b with side a of the interleaved runs in one folder."""
    from dlbench.gate.comparison import compare_pairs, paired_points

    if options["allow"]:
        raise UserError("--allow: has no effect with --paired; the sides may differ in the settings of run --ab")
    if options["history"] is not None:
        raise UserError("--history: has no effect with --paired; both sides of a pair are in the same session")
    points, both = paired_points(runs_at(path), str(path), parse_where(where, "--where"))
    metrics, rule = metric_names(options["metrics"]), rule_of(options)
    return compare_pairs(points, both=both, metrics=metrics, rule=rule, floors=floors)


def write(report: ComparisonReport, options: dict[str, Any], *, exit_zero: bool, name: str) -> None:
    """Writes all requested outputs, and exits with the code of the verdict."""
    from dlbench.gate.page import document_of, to_junit

    def rendered(form: FormatName, *, full: bool = True) -> bytes:
        if form == "junit":
            return to_junit(report, name).encode("utf-8")
        return render(document_of(report), form, full=full).encode("utf-8")

    if options["junit_file"] is not None:
        write_output(rendered("junit"), options["junit_file"])
    if (summary := options["summary_file"]) is not None:
        try:
            # A CI system may write to the file as well.
            with summary.open("ab") as file:
                file.write(rendered("md"))
        except OSError as error:
            why = error.strerror or error
            raise refused(error, f"--summary {summary}: cannot be written: {why}", UserError) from None
    write_output(rendered(chosen_format(options), full=options["full"]), options["output"])
    if options["output"] is not None:
        click.echo(f"{options['output']}: {report.headline}", err=True)
    finish(report.damaged)
    if not exit_zero:
        sys.exit(int(EXIT_CODES[GATE_TONES[report.verdict]]))


@click.command()
@click.argument("paths", nargs=-1, type=FILE, metavar="A B | RUNS --paired")
@click.option("--paired", is_flag=True, help="Compare sides a and b of interleaved runs (`run --ab`) in one folder.")
@where_option("--where", "runs of both sides")
@where_option("--where-a", "runs of A")
@where_option("--where-b", "runs of B")
@rule_options
@click.option("--exit-zero", is_flag=True, help="Exit with 0, whatever the verdict is.")
def compare(
    paths: tuple[Path, ...],
    paired: bool,
    where: tuple[str, ...],
    where_a: tuple[str, ...],
    where_b: tuple[str, ...],
    exit_zero: bool,
    **options: Any,
) -> None:
    """Compare the runs of B with the runs of A: is B slower, by how much, and how certain is that?

    A and B are run folders, folders of runs, histories, or baseline files (`dlbench baseline`). Points are matched by
    settings, ranks and nodes. Runs that differ in a key that --allow does not name are refused.

    A verdict needs five runs per side, and interleaved pairs (`run --ab`) or five sessions (runs of different days or
    nights) of A, of B or of --history: one session does not show how much sessions differ.

    \b
    Verdicts and exit codes:
      regressed     1  significantly slower, by more than the tolerance
      equivalent    0  shown to be within the tolerance
      improved      0  significantly faster, by more than the tolerance
      inconclusive  6  none of these is shown, or too few sessions
      insufficient  6  fewer than five runs on a side
    Also: 2 wrong usage, identical sides or runs that are not comparable;
    4 damaged data, or a side without figures.

    \b
    Examples:
      dlbench compare runs-old runs-new --allow system -o comparison.md
      dlbench compare runs runs --where-a series=old --where-b series=new
      dlbench compare runs --paired
    """
    if paired and len(paths) != 1:
        raise UserError(f"compare: needs one folder of runs with --paired, not {len(paths)}")
    if not paired and len(paths) != 2:
        raise UserError(f"compare: needs two sides, A and B (or one folder with --paired), not {len(paths)}")
    if paired and (where_a or where_b):
        raise UserError("--where-a, --where-b: have no effect with --paired; use --where")
    prepare("compare", options)
    if paired:
        report = paired_comparison(paths[0], where, options)
    else:
        a = read_side(paths[0], where, where_a, ("--where-a", "--where-b"))
        b = read_side(paths[1], where, where_b, ("--where-b", "--where-a"))
        report = comparison(a, b, options, ("--where-a", "--where-b"))
    write(report, options, exit_zero=exit_zero, name="dlbench compare")


@click.command()
@value_option("--baseline", "FILE|RUNS", "Baseline file (`dlbench baseline`), folder of runs, or history.", type=FILE)
@value_option("--candidate", "RUNS", "Folder of the runs to check.", type=FILE)
@value_option("--paired", "RUNS", "Folder of interleaved runs (`run --ab`); check side b against side a.", type=FILE)
@value_option(
    "--at-least",
    "[KEY=VALUE,..:] RATE",
    "Minimum throughput of the candidate, repeatable, e.g. '2500 images/s' or 'ranks=4: 600 images/s/rank'; needs no "
    "baseline.",
    multiple=True,
)
@where_option("--where", "runs of both sides")
@where_option("--where-baseline", "runs of the baseline")
@where_option("--where-candidate", "runs of the candidate")
@rule_options
def check(
    baseline: Path | None,
    candidate: Path | None,
    paired: Path | None,
    at_least: tuple[str, ...],
    where: tuple[str, ...],
    where_baseline: tuple[str, ...],
    where_candidate: tuple[str, ...],
    **options: Any,
) -> None:
    """Compare candidate runs with a baseline, for CI: exit with 1 if they are significantly slower.

    This is the comparison of `dlbench compare`. A point of the baseline without runs of the candidate is insufficient.
    For a verdict, make the baseline from runs of five nights or more, or check interleaved runs (`run --ab`).

    --at-least needs no baseline, but five or more runs of one session: a floor is missed if the whole interval is below
    it, and met if it is above. Runs of two to four sessions are inconclusive: choose one by --where-candidate.

    \b
    Exit codes:
      0  equivalent, improved or met
      1  regressed or missed
      2  wrong usage, or runs that are not comparable; the keys are named
      4  damaged data, or a side without figures
      6  inconclusive (too noisy, few sessions), or insufficient (few runs)

    In JUnit, exit code 1 is a failure and 6 an error; while the baseline has too few sessions, cases are skipped.

    \b
    Examples:
      dlbench check --candidate runs --at-least "2500 images/s"
      dlbench check --baseline baseline.json --candidate runs --junit dlbench.xml
      dlbench check --paired runs --tolerance 1%
    """
    _refuse_sides(baseline, candidate, paired, at_least, (*where_baseline, *where_candidate))
    prepare("check", options)
    from dlbench.gate.baseline import parse_floor
    from dlbench.gate.comparison import compare_floors

    floors = [parse_floor(text) for text in at_least]
    if floors and options["detect"] >= 1:
        raise UserError("--detect: no throughput is short of --at-least by 100 % or more; ask for less")
    if paired is not None:
        report = paired_comparison(paired, where, options, floors)
    else:
        assert candidate is not None
        if candidate.is_file() and floors:
            raise UserError("--at-least: needs runs; a baseline file holds no throughput")
        b = read_side(candidate, where, where_candidate, ("--where-candidate", "--where-baseline"))
        if baseline is None:
            report = compare_floors(b, rule=rule_of(options), floors=floors)
        else:
            a = read_side(baseline, where, where_baseline, ("--where-baseline", "--where-candidate"))
            report = comparison(a, b, options, ("--where-baseline", "--where-candidate"), floors)
    write(report, options, exit_zero=False, name="dlbench check")


def _refuse_sides(
    baseline: Path | None, candidate: Path | None, paired: Path | None, at_least: Sequence[str], where: Sequence[str]
) -> None:
    if paired is not None:
        if baseline is not None or candidate is not None:
            raise UserError("--paired: holds both sides; leave out --baseline and --candidate")
        if where:
            raise UserError("--where-baseline, --where-candidate: have no effect with --paired; use --where")
    elif candidate is None or not (baseline or at_least):
        raise UserError("check: give --baseline and --candidate, --candidate and --at-least, or --paired")
    elif baseline is None:
        for option in given_options("metrics", "tolerance", "history", "allow", "where_baseline"):
            raise UserError(f"{option}: has no effect without --baseline")


@click.command()
@runs_argument()
@value_option("-o --output", None, "File to write, e.g. baseline.json.", type=FILE, required=True)
@where_option("--where", "runs")
@click.option("--allow-few", is_flag=True, help="Accept points with fewer than five runs; they give no verdict.")
def baseline(runs: tuple[Path, ...], output: Path, where: tuple[str, ...], allow_few: bool) -> None:
    """Write a baseline file from RUNS (run folders, folders of runs, histories), for `dlbench check`.

    It is a small JSON file for a repository, with the metrics of every run and the settings that decide which runs are
    comparable. Use runs of five nights or more: fewer do not show how much nights differ. The same runs give the same
    bytes. Points with fewer than five runs, and damaged data, are refused.

    \b
    Example:
      dlbench baseline "$DLBENCH_HISTORY" --where workload=bert -o baseline.json
    """
    check_writable(output)
    chosen = parse_where(where, "--where")
    require_modules("baseline", "numpy")
    from dlbench.analysis.repeats import MIN_SESSIONS
    from dlbench.gate.baseline import baseline_of, write_baseline
    from dlbench.gate.sides import point_label, sessions_at, side_of_runs
    from dlbench.report.wording import runs_text, sessions_text

    name = named(runs)
    side = side_of_runs(runs_at(*runs), name, chosen, "--where")
    if side.damaged:
        raise IncompleteDataError(f"{name}: a baseline cannot be made from damaged data: {'; '.join(side.damaged[:3])}")
    write_baseline(output, baseline_of(side, allow_few=allow_few))
    for line in side.left_out:
        click.echo(f"dlbench: left out: {line}", err=True)
    session_by_run = sessions_at(side.points)
    has_few_sessions = False
    for point in side.points:
        count = len({session_by_run[run.run_id] for run in point.runs})
        has_few_sessions |= count < MIN_SESSIONS
        click.echo(f"{output}: {point_label(point)}: {runs_text(len(point.runs))} in {sessions_text(count)}", err=True)
    if has_few_sessions:
        click.echo(
            f"dlbench: fewer than {MIN_SESSIONS} sessions do not show how much sessions differ: dlbench check will be "
            "inconclusive without --history; add runs of other nights, or compare with run --ab",
            err=True,
        )
