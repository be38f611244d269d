"""Figures of nccl-tests and OSU's micro-benchmarks become costs of a network, as runs of `dlbench comm` do.

A library's collective becomes a line per rank count. Where there are several rank counts, costs of messages are fitted
to the same times for the algorithm that explains them best, as a library does not say which one it uses. `osu_latency`
is one message: a broadcast between two ranks. `osu_bw` has the rate of large messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dlbench.comm.fits import NetworkFit, Scope, fit_of
from dlbench.comm.tables import IN_PLACE, OUT_OF_PLACE, ROUNDED, OutputSeries, read_output
from dlbench.errors import UserError
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.link_fit import Observation, choose_sharing
from dlbench.perfmodels.predictions import STAND_INS, bus_factor
from dlbench.perfmodels.schedules import Layout
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, Collective, LevelName, LineCost, NetworkModel

PER_RANK = ("all-gather", "scatter", "gather", "all-to-all")
"""Sizes that OSU gives are of what a rank sends another, not of its buffer."""
LABELS = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "": "type not named"}
"""What dlbench calls a type; others keep the file's name."""
WIDTHS = dict.fromkeys(("half", "bfloat16"), 2)
WIDTHS |= dict.fromkeys(("double", "int64", "uint64"), 8)
WIDTHS |= dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "MPI_CHAR", ""), 1)
"""Bytes of an element by the file's name of the type; all others have 4."""
LAYOUTS: dict[LevelName, Layout] = {
    "inside": Layout(ranks=2, group_size=2),
    "across": Layout(ranks=2, group_size=1),
    "beyond": Layout(ranks=2, group_size=1, leaf_size=1),
}
"""Two ranks whose messages belong to a level."""

Measured = Sequence[tuple[OutputSeries, Layout]]


def import_tables(
    paths: Sequence[Path],
    *,
    system: str,
    ranks: Sequence[int] = (),
    group_size: int | None = None,
    levels: Sequence[LevelName] = (),
    collective: Collective | None = None,
    dtype: str | None = None,
    op: str | None = None,
    fitted: str,
) -> NetworkFit:
    """Returns the costs of a network by the outputs in some files.

    `system`: what to call it. `fitted`: when, UTC, ISO 8601. `dtype` and `op`: the type and operation to take of
    several. The others are for outputs that do not say it, in their order or one for all: `ranks` of a collective,
    `group_size` of a node, `levels` of the two ranks of osu_latency and osu_bw, `collective` of nccl-tests.
    """
    all_series, left_out = _chosen(paths, collective, dtype, op)
    pairs = _each("--level", levels, [series for series in all_series if series.measures not in ALGORITHMS])
    whole = [series for series in all_series if series not in pairs]
    for series, count in _each("--ranks", ranks, [series for series in whole if not series.ranks]).items():
        series.ranks = count
    groups = _each("--group-size", [group_size] if group_size else [], [series for series in whole if not series.nodes])
    placed: dict[str, list[tuple[OutputSeries, Layout]]] = {}
    for series in all_series:
        layout = LAYOUTS[pairs[series]] if series in pairs else _layout(series, groups.get(series))
        placed.setdefault(series.measures, []).append((series, layout))
    if "beyond" in pairs.values() and "across" not in pairs.values():
        raise UserError("--level beyond: such messages pass the links of nodes as well; give osu_latency of across too")
    if "bandwidth" in placed and "latency" not in placed:
        raise UserError(f"{placed['bandwidth'][0][0].where}: says nothing of start-ups; give osu_latency as well")
    lines: list[LineCost] = []
    sources: list[str] = []
    observed: list[tuple[Observation, dict[str, float]]] = []
    for kind, measured in placed.items():
        assumed = ""
        if kind == "latency":
            observed += _seen("broadcast", "binomial-tree", measured)
        elif kind != "bandwidth":
            lines += _lines(cast("Collective", kind), measured, left_out)
            if len({layout.ranks for _, layout in measured}) > 1:
                assumed = _assumed(cast("Collective", kind), measured)
                observed += _seen(cast("Collective", kind), assumed, measured)
        sources += [_source(series, layout, assumed) for series, layout in measured]
    labels = dict.fromkeys(LABELS.get(series.dtype, series.dtype) for series in all_series)
    carrier = all_series[0].carrier
    scope = Scope(system=system, carrier="torch-nccl" if carrier == "nccl" else carrier, dtype=" and ".join(labels))
    about: dict[str, Any] = {"sources": (*sources, *(f"left out: {text}" for text in left_out)), "fitted": fitted}
    if not observed:
        network = NetworkModel(system=system, transport=scope.carrier, collectives=tuple(lines), **about)
        return NetworkFit(**vars(scope), network=network, left_out=tuple(left_out))
    points, by_run = zip(*observed, strict=True)
    try:
        fit = fit_of(scope, points, by_run, lines=tuple(lines), **about)
    except UserError as error:
        raise UserError(f"{all_series[0].where}: {error}") from None
    network = _with_bandwidth(fit.network, placed.get("bandwidth", []), pairs)
    return replace(fit, network=network, left_out=tuple(left_out))


def _chosen(
    paths: Sequence[Path], collective: Collective | None, dtype: str | None, op: str | None
) -> tuple[list[OutputSeries], list[str]]:
    """Returns one series of each table of the files, and in words what else they hold."""
    outputs = [(path, read_output(path)) for path in paths]
    left_out = [f"{path.name}: {text}" for path, output in outputs for text in output.left_out]
    all_series = [series for _, output in outputs for series in output.series]
    for series in all_series:
        if series.carrier != all_series[0].carrier:
            raise UserError(
                f"{series.where}: {series.title} is of another library than {all_series[0].where}; import it apart"
            )
    unnamed = [series for series in all_series if not series.measures]
    for series, kind in _each("--collective", [collective] if collective else [], unnamed).items():
        series.measures = kind
    all_series = _only("--type", "dtype", dtype, all_series, left_out)
    all_series = _only("--op", "op", op, all_series, left_out)
    all_series = _one_root_and_side(all_series, left_out)
    by_content: dict[str, OutputSeries] = {}
    for series in all_series:
        content = f"{series.title} {series.measures} {series.ranks} {series.nodes} {series.seconds}"
        same = by_content.setdefault(content, series)
        if same is not series:
            raise UserError(f"{series.where}: is the output of {same.where} once more; a repeat is measured anew")
    return all_series, left_out


def _only(
    option: str, attribute: str, asked: str | None, all_series: Sequence[OutputSeries], left_out: list[str]
) -> list[OutputSeries]:
    """Returns the series of the type or operation that is asked for, and notes the others in `left_out`."""
    chosen = []
    for kind in dict.fromkeys(series.measures for series in all_series):
        names = {series: getattr(series, attribute) for series in all_series if series.measures == kind}
        several = list(dict.fromkeys(name for name in names.values() if name not in ("", "none")))
        wanted = [name for name in several if asked is not None and asked in (name, LABELS.get(name))]
        # Messages between two ranks are bytes, whatever their one type is called.
        is_unclear = len(several) > 1 or (asked is not None and bool(several) and kind in ALGORITHMS)
        if is_unclear and not wanted:
            where = next(series.where for series in names if names[series] == several[0])
            raise UserError(
                f"{where}: {kind} was measured with {', '.join(several)}; choose one by {option}, e.g. "
                f"{option} {several[0]}"
            )
        chosen += [series for series, name in names.items() if not wanted or name in ("", "none", *wanted)]
        if others := [name for name in several if wanted and name not in wanted]:
            left_out.append(f"{kind} of {', '.join(others)} ({option} {asked})")
    return chosen


def _one_root_and_side(all_series: Sequence[OutputSeries], left_out: list[str]) -> list[OutputSeries]:
    """Returns one series of each table: of its lowest root, in place where the collective has such a form."""
    tables: dict[tuple[Path, int], list[OutputSeries]] = {}
    for series in all_series:
        tables.setdefault((series.path, series.line), []).append(series)
    chosen = []
    for of_table in tables.values():
        roots = sorted({series.root for series in of_table}, key=lambda root: (len(root), root))
        if len(roots) > 1:
            left_out.append(f"{_short(of_table[0])}: roots {', '.join(roots[1:])}: the lowest, {roots[0]}, is taken")
        sides = {series.side: series for series in of_table if series.root == roots[0]}
        used = sides.get(IN_PLACE) or of_table[0]
        unused = sides.get(OUT_OF_PLACE)
        why = "in place is taken, as training calls it"
        if unused and (used.measures == "all-to-all" or (unused.is_checked and not used.is_checked)):
            used, unused = unused, used
            why = f"{used.measures} has no checked form in place"
        if unused and unused is not used:
            left_out.append(f"{_short(used)}: {unused.side}: {why}")
        chosen.append(used)
    return chosen


def _short(series: OutputSeries) -> str:
    return f"{series.path.name}: line {series.line}" if series.line else series.path.name


def _source(series: OutputSeries, layout: Layout, assumed: str) -> str:
    words = [f"{layout.ranks} ranks", LABELS.get(series.dtype, series.dtype), series.op, series.side]
    words.append("" if series.is_checked else "results not compared")
    words.append(f"{series.cycles} cycles" if series.cycles > 1 else "")
    words.append(f"costs as of {assumed}" if assumed else "")
    return f"{series.path.name}: {series.title} {series.measures}, {', '.join(filter(None, words))}"


def _lines(collective: Collective, measured: Measured, left_out: list[str]) -> Iterator[LineCost]:
    """Yields the times of each rank count as a line, of the layout with most nodes."""
    carrier = measured[0][0].carrier
    name = f"{carrier} flat" if collective == "allreduce" else f"{carrier} {collective} library"
    for count in sorted({layout.ranks for _, layout in measured}):
        least = min(layout.group_size for _, layout in measured if layout.ranks == count)
        used = [(series, at) for series, at in measured if at == Layout(ranks=count, group_size=least)]
        for series, layout in measured:
            if layout.ranks == count and layout.group_size > least:
                left_out.append(f"{_short(series)}: not in the line of {count} ranks, which is of most nodes")
        rows = {seen.num_bytes: seen.seconds for seen, _ in _seen(collective, "", used)}
        if len(rows) < 2:
            raise UserError(f"{used[0][0].where}: {len(rows)} size above 0; a line needs two sizes or more")
        line = fit_line(name, count, list(rows), list(rows.values()))
        yield line.model_copy(update={"sizes": (min(rows), max(rows))})


def _with_bandwidth(network: NetworkModel, measured: Measured, pairs: Mapping[OutputSeries, LevelName]) -> NetworkModel:
    """Returns the network with the rates of osu_bw for large messages."""
    for series, _ in measured:
        level = network.levels.get(pairs[series])
        if level is None:
            raise UserError(f"{series.where}: says nothing of start-ups; give osu_latency of {pairs[series]} as well")
        rate = min(min(times) / size for size, times in series.seconds.items())
        last = level.pieces[-1].model_copy(update={"beta_s_per_byte": rate, "beta_interval_s_per_byte": None})
        level = level.model_copy(update={"pieces": (*level.pieces[:-1], last)})
        network = network.model_copy(update={pairs[series]: level, "draws": ()})  # Draws hold the rate of latencies.
    return network


def _each(option: str, given: Sequence[Any], tables: Sequence[OutputSeries]) -> dict[OutputSeries, Any]:
    """By table what an option says of those that do not say it: one value for all, or one for each."""
    if given and not tables:
        raise UserError(f"{option}: none of these outputs needs it; leave it out")
    if tables and len(given) not in (1, len(tables)):
        text = f"{tables[0].where}: does not say its {option[2:]}; give {option} once"
        if len(tables) > 1:
            text += f", or once for each of {len(tables)} such outputs"
        raise UserError(f"{text}, here {len(given)}")
    return dict(zip(tables, list(given) * (len(tables) if len(given) == 1 else 1), strict=True))


def _layout(series: OutputSeries, group_size: int | None) -> Layout:
    kind, count = cast("Collective", series.measures), series.ranks or 0
    group = max(1, count // series.nodes) if series.nodes else min(group_size or count, count)
    if count < 2 or count % group or (series.nodes and group * series.nodes != count):
        where = f"{series.nodes} nodes" if series.nodes else f"nodes of {group}"
        raise UserError(f"{series.where}: {count} ranks on {where}: want two ranks or more, equally many on each node")
    expected = bus_factor(kind, count)
    if series.bus is not None and abs(series.bus / expected - 1) > ROUNDED:
        raise UserError(
            f"{series.where}: busbw is {series.bus:.3g} x algbw; {kind} over {count} ranks has {expected:.3g}"
        )
    if series.title.startswith("OSU") and kind in PER_RANK:
        series.seconds = {size * count: times for size, times in series.seconds.items()}
    return Layout(ranks=count, group_size=group)


def _seen(collective: Collective, algorithm: str, measured: Measured) -> Iterator[tuple[Observation, dict[str, float]]]:
    """Yields points, and their seconds by run: outputs of one layout, and their cycles, are its runs."""
    runs: dict[tuple[Layout, int, int], dict[str, float]] = {}
    for series, layout in measured:
        for size, times in series.seconds.items():
            by_run = runs.setdefault((layout, size, WIDTHS.get(series.dtype, 4)), {})
            by_run |= {str(len(by_run) + cycle): seconds for cycle, seconds in enumerate(times)}
    kind: dict[str, Any] = {"collective": collective, "algorithm": algorithm, "shards": None}
    for (layout, size, width), by_run in runs.items():
        seconds = statistics.median(by_run.values())
        yield Observation(layout=layout, num_bytes=size, element_bytes=width, seconds=seconds, **kind), by_run


def _assumed(collective: Collective, measured: Measured) -> str:
    """The algorithm by which points held out are predicted best; the first where none can be held out."""
    errors: dict[str, float] = {}
    has_groups = all(1 < layout.group_size < layout.ranks for _, layout in measured)
    for name in STAND_INS if collective == "allreduce" else ALGORITHMS[collective]:
        if has_groups or name not in GROUPED_ALGORITHMS:
            _, predictions = choose_sharing([seen for seen, _ in _seen(collective, name, measured)])
            missed = [abs(seconds / seen.seconds - 1) for seen, seconds in predictions]
            errors[name] = statistics.median(missed) if missed else float("inf")
    return min(errors, key=lambda name: errors[name])
