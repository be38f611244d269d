"""Fits the costs of a network to the output of nccl-tests and OSU's micro-benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from dlbench.comm.fits import NetworkFit, Scope, fit_of, line_name
from dlbench.comm.tables import IN_PLACE, OUT_OF_PLACE, ROUNDED, OutputSeries, read_output
from dlbench.errors import UserError
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.link_fit import Observation, choose_sharing
from dlbench.perfmodels.predictions import STAND_INS, bus_factor
from dlbench.perfmodels.schedules import Layout
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, LIBRARY, Collective, LevelName, LineCost, NetworkModel

PER_RANK = ("all-gather", "scatter", "gather", "all-to-all")
"""Collectives for which OSU prints the bytes that a rank sends to one other rank, not those of its buffer."""
LABELS = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "": "type not named"}
"""Names of types in dlbench; other types keep the name of the file."""
WIDTHS = dict.fromkeys(("half", "bfloat16"), 2)
WIDTHS |= dict.fromkeys(("double", "int64", "uint64"), 8)
WIDTHS |= dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "MPI_CHAR", ""), 1)
"""Bytes of an element by the type's name in the file; 4 for all others."""
LAYOUTS: dict[LevelName, Layout] = {
    "inside": Layout(ranks=2, group_size=2),
    "across": Layout(ranks=2, group_size=1),
    "beyond": Layout(ranks=2, group_size=1, leaf_size=1),
}
"""Two ranks that exchange messages at each level."""

Measured = Sequence[tuple[OutputSeries, Layout]]


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The facts that outputs may leave open. `ranks` and `levels` have one value for all such outputs, or one each."""

    ranks: Sequence[int] = ()  # Ranks of a collective.
    group_size: int | None = None  # Ranks of a node.
    levels: Sequence[LevelName] = ()  # Where the two ranks of osu_latency and osu_bw were.
    collective: Collective | None = None  # The collective of nccl-tests.
    dtype: str | None = None  # The type to take of several.
    op: str | None = None  # The operation to take of several.


def import_tables(paths: Sequence[Path], *, system: str, fitted: str, options: ImportOptions) -> NetworkFit:
    """Returns the costs of a network fitted to the outputs in some files. `fitted`: the time now, UTC, ISO 8601."""
    all_series, left_out = _chosen(paths, options)
    pair_series = [series for series in all_series if series.measures not in ALGORITHMS]
    levels = _option_values("--level", options.levels, pair_series)
    placed: dict[str, list[tuple[OutputSeries, Layout]]] = {}
    layouts = _layouts(all_series, options)
    layouts |= {series: LAYOUTS[levels[series]] for series in pair_series}
    for series in all_series:
        placed.setdefault(series.measures, []).append((series, layouts[series]))
    if "beyond" in levels.values() and "across" not in levels.values():
        raise UserError("--level beyond: such messages also use the links of nodes; give osu_latency of across too")
    if "bandwidth" in placed and "latency" not in placed:
        raise UserError(f"{placed['bandwidth'][0][0].where}: does not show start-up times; give osu_latency as well")
    lines: list[LineCost] = []
    sources: list[str] = []
    observed: list[tuple[Observation, dict[str, float]]] = []
    for kind, measured in placed.items():
        assumed = ""
        if kind == "latency":
            observed += _observations("broadcast", "binomial-tree", measured)
        elif kind != "bandwidth":
            lines += _lines(cast("Collective", kind), measured, left_out)
            if len({layout.ranks for _, layout in measured}) > 1:
                assumed = _assumed(cast("Collective", kind), measured)
                observed += _observations(cast("Collective", kind), assumed, measured)
        sources += [_source(series, layout, assumed) for series, layout in measured]
    labels = dict.fromkeys(LABELS.get(series.dtype, series.dtype) for series in all_series)
    carrier = all_series[0].carrier.replace("nccl", "torch-nccl")
    scope = Scope(system=system, carrier=carrier, dtype=" and ".join(labels))
    origin: dict[str, Any] = {"sources": (*sources, *(f"left out: {text}" for text in left_out)), "fitted": fitted}
    if not observed:
        network = NetworkModel(system=system, transport=scope.carrier, collectives=tuple(lines), **origin)
        return NetworkFit(**vars(scope), network=network, left_out=tuple(left_out))
    points, by_run = zip(*observed, strict=True)
    try:
        fit = fit_of(scope, points, by_run, lines=tuple(lines), **origin)
    except UserError as error:
        raise UserError(f"{all_series[0].where}: {error}") from None
    network = _with_bandwidth(fit.network, placed.get("bandwidth", []), levels)
    return replace(fit, network=network, left_out=tuple(left_out))


def _layouts(all_series: Sequence[OutputSeries], options: ImportOptions) -> dict[OutputSeries, Layout]:
    collectives = [series for series in all_series if series.measures in ALGORITHMS]
    without_ranks = [series for series in collectives if not series.ranks]
    for series, count in _option_values("--ranks", options.ranks, without_ranks).items():
        series.ranks = count
    without_nodes = [series for series in collectives if not series.nodes]
    sizes = _option_values("--group-size", list(filter(None, [options.group_size])), without_nodes)
    return {series: _layout(series, sizes.get(series)) for series in collectives}


def _chosen(paths: Sequence[Path], options: ImportOptions) -> tuple[list[OutputSeries], list[str]]:
    all_series: list[OutputSeries] = []
    left_out: list[str] = []
    for path in paths:
        output = read_output(path)
        all_series += output.series
        left_out += [f"{path.name}: {text}" for text in output.left_out]
    for series in all_series:
        if series.carrier != all_series[0].carrier:
            raise UserError(
                f"{series.where}: {series.title} is of another library than {all_series[0].where}; import it separately"
            )
    unnamed = [series for series in all_series if not series.measures]
    collective = list(filter(None, [options.collective]))
    for series, kind in _option_values("--collective", collective, unnamed).items():
        series.measures = kind
    all_series = _only("--type", "dtype", options.dtype, all_series, left_out)
    all_series = _only("--op", "op", options.op, all_series, left_out)
    all_series = _one_root_and_side(all_series, left_out)
    by_content: dict[str, OutputSeries] = {}
    for series in all_series:
        content = f"{series.title} {series.measures} {series.ranks} {series.nodes} {series.seconds}"
        same = by_content.setdefault(content, series)
        if same is not series:
            raise UserError(f"{series.where}: is a copy of {same.where}; a repeat must be measured again")
    return all_series, left_out


def _only(
    option: str, attribute: str, choice: str | None, all_series: Sequence[OutputSeries], left_out: list[str]
) -> list[OutputSeries]:
    chosen = []
    for kind in dict.fromkeys(series.measures for series in all_series):
        names = {series: getattr(series, attribute) for series in all_series if series.measures == kind}
        several = list(dict.fromkeys(name for name in names.values() if name not in ("", "none")))
        matching = [name for name in several if choice is not None and choice in (name, LABELS.get(name))]
        # Messages between two ranks are bytes, whatever their one type is called.
        is_unclear = len(several) > 1 or (choice is not None and bool(several) and kind in ALGORITHMS)
        if is_unclear and not matching:
            where = next(series.where for series in names if names[series] == several[0])
            raise UserError(
                f"{where}: {kind} was measured with {', '.join(several)}; choose one by {option}, e.g. "
                f"{option} {several[0]}"
            )
        chosen += [series for series, name in names.items() if not matching or name in ("", "none", *matching)]
        others = [name for name in several if name not in matching]
        if matching and others:
            left_out.append(f"{kind} of {', '.join(others)} ({option} {choice})")
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
    return replace(series, path=Path(series.path.name)).where


def _source(series: OutputSeries, layout: Layout, assumed: str) -> str:
    words = [f"{layout.ranks} ranks", LABELS.get(series.dtype, series.dtype), series.op, series.side]
    if not series.is_checked:
        words.append("results not compared")
    if series.cycles > 1:
        words.append(f"{series.cycles} cycles")
    if assumed:
        words.append(f"costs as of {assumed}")
    return f"{series.path.name}: {series.title} {series.measures}, {', '.join(filter(None, words))}"


def _lines(collective: Collective, measured: Measured, left_out: list[str]) -> Iterator[LineCost]:
    name = line_name(measured[0][0].carrier, collective, LIBRARY)
    for count in sorted({layout.ranks for _, layout in measured}):
        group_size = min(layout.group_size for _, layout in measured if layout.ranks == count)
        chosen = Layout(ranks=count, group_size=group_size)
        most_nodes = [(series, layout) for series, layout in measured if layout == chosen]
        for series, layout in measured:
            if layout.ranks == count and layout.group_size > group_size:
                left_out.append(f"{_short(series)}: not in the line of {count} ranks, which uses the most nodes")
        seconds = {point.num_bytes: point.seconds for point, _ in _observations(collective, "", most_nodes)}
        if len(seconds) < 2:
            raise UserError(f"{most_nodes[0][0].where}: {len(seconds)} size above 0; a line needs two sizes or more")
        line = fit_line(name, count, list(seconds), list(seconds.values()))
        yield line.model_copy(update={"sizes": (min(seconds), max(seconds))})


def _with_bandwidth(
    network: NetworkModel, measured: Measured, levels: Mapping[OutputSeries, LevelName]
) -> NetworkModel:
    for series, _ in measured:
        name = levels[series]
        level = network.levels.get(name)
        if level is None:
            raise UserError(f"{series.where}: does not show start-up times; give osu_latency of {name} as well")
        rate = min(min(times) / size for size, times in series.seconds.items())
        last = level.pieces[-1].model_copy(update={"beta_s_per_byte": rate, "beta_interval_s_per_byte": None})
        level = level.model_copy(update={"pieces": (*level.pieces[:-1], last)})
        # The draws hold the rate of osu_latency.
        network = network.model_copy(update={name: level, "draws": ()})
    return network


def _option_values(option: str, values: Sequence[Any], tables: Sequence[OutputSeries]) -> dict[OutputSeries, Any]:
    """Returns the value of an option for each table that needs it: one value for all, or one for each."""
    if values and not tables:
        raise UserError(f"{option}: none of these outputs needs it; leave it out")
    if tables and len(values) not in (1, len(tables)):
        text = f"{tables[0].where}: does not contain its {option[2:]}; give {option} once"
        if len(tables) > 1:
            text += f", or once for each of {len(tables)} such outputs"
        raise UserError(f"{text}, here {len(values)}")
    if len(values) == 1:
        return dict.fromkeys(tables, values[0])
    return dict(zip(tables, values, strict=True))


def _layout(series: OutputSeries, group_size: int | None) -> Layout:
    kind, count = cast("Collective", series.measures), series.ranks or 0
    group = min(group_size or count, count)
    nodes_text = f"nodes of {group}"
    if series.nodes:
        group = max(1, count // series.nodes)
        nodes_text = f"{series.nodes} nodes"
    if count < 2 or count % group or (series.nodes and group * series.nodes != count):
        raise UserError(
            f"{series.where}: {count} ranks on {nodes_text}: need two ranks or more, equally many on each node"
        )
    expected = bus_factor(kind, count)
    if series.bus is not None and abs(series.bus / expected - 1) > ROUNDED:
        raise UserError(
            f"{series.where}: busbw is {series.bus:.3g} x algbw; {kind} over {count} ranks has {expected:.3g}"
        )
    if series.title.startswith("OSU") and kind in PER_RANK:
        series.seconds = {size * count: times for size, times in series.seconds.items()}
    return Layout(ranks=count, group_size=group)


def _observations(
    collective: Collective, algorithm: str, measured: Measured
) -> Iterator[tuple[Observation, dict[str, float]]]:
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
    """Returns the algorithm that predicts held-out points best; the first if none can be held out."""
    median_errors: dict[str, float] = {}
    has_groups = all(1 < layout.group_size < layout.ranks for _, layout in measured)
    for name in {"allreduce": STAND_INS}.get(collective, ALGORITHMS[collective]):
        if has_groups or name not in GROUPED_ALGORITHMS:
            _, predictions = choose_sharing([point for point, _ in _observations(collective, name, measured)])
            errors = [abs(seconds / point.seconds - 1) for point, seconds in predictions]
            median_errors[name] = statistics.median(errors or [float("inf")])
    return min(median_errors, key=median_errors.__getitem__)
