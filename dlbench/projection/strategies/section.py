"""The table of strategies as a section of a report: rows by the model, next to measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

from dlbench.errors import UserError, nearest
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.ingredients import Ingredients, PointFigures
from dlbench.projection.projected import Target
from dlbench.projection.strategies.layers import (
    ELEMENT_BYTES,
    LayerTimes,
    counted,
    gamma,
    limit,
    scaled,
    watched_layers,
)
from dlbench.projection.strategies.table import AVERAGE_EVERY, STRATEGIES, StrategyCase, StrategyRow, best
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Column, Pivot, Sheet, columns_of
from dlbench.report.wording import percent, ranks_text
from dlbench.specs.comm import NetworkModel
from dlbench.specs.system import SystemSpec
from dlbench.units import format_bytes, format_seconds

_CONSEQUENCE = (
    "Rows without an accuracy are by the model only: steps consist of computing, exposed communication, and the other "
    "parts of the runs' steps (input, host, waiting for others), unchanged."
)
LEAST_ACCURACY = 0.8  # Accuracy for data at measured points needed to name the fastest strategy.
PROJECTED = "the step is the projection's"
FIGURES = ("step_s", "compute_s", "communication_s", "exposed_s", "memory_bytes", "sent_bytes", "phi", "fits")
STAGES = ("bubble", "imbalance")


def chosen(name_or_all: str) -> tuple[str, ...]:
    """Returns the strategies of `--strategy`: all, or one, also combined with data."""
    if name_or_all not in ("all", *STRATEGIES):
        raise UserError(f"--strategy {name_or_all}: {nearest(name_or_all, ('all', *STRATEGIES))}")
    return tuple(name for name in STRATEGIES if name_or_all in ("all", name, name.removeprefix("data+")))


def case_of(
    ingredients: Ingredients,
    run: Run,
    cost_scale: float,
    *,
    memory_limit: int | None = None,
    system: SystemSpec | None = None,
) -> tuple[StrategyCase, tuple[str, ...]]:
    """Returns the training of the anchor for the strategies, and its basis in sentences. `cost_scale`: factor on
    network costs at the anchor. `memory_limit`: bytes of a rank; None: of a device of `system`, or of the run's system.
    """
    plan, record, network, anchor = run.plan, run.record, ingredients.network, ingredients.anchor
    train = plan.workload.train
    layers = plan.workload.model.layer_table(plan.workload.data)
    if not layers:
        raise UserError(
            f"--strategy: layers of {plan.workload.name} are not known; a network of DLBENCH_PATH can give them by "
            "layer_table (docs/architecture.md)"
        )
    if network is None or record is None:
        raise UserError("--strategy needs costs of messages: give --network FILE, or runs of dlbench comm next to RUNS")
    parts = _mean_parts(anchor)
    if parts is None or anchor.batch_per_rank is None:
        raise UserError("--strategy needs times of forward, backward and update, which these runs did not record")
    gathered_s, per_node, per_leaf = parts.pop("gather"), ingredients.per_node, ingredients.nodes_per_leaf
    watched = watched_layers(layers, run.folder.spans(0), plan.run_id)
    held_share, held_from = gamma(layers, plan, record)
    limit_bytes, most_from = limit(memory_limit, system or plan.system)
    case = StrategyCase(
        layers=layers,
        times=LayerTimes.split(
            layers,
            forward_s=parts["forward"] / anchor.batch_per_rank,
            backward_s=parts["backward"] / anchor.batch_per_rank,
            update_s=parts["optimizer"],
            watched=watched,
        ),
        network=scaled(network, cost_scale),
        layout=Layout(ranks=anchor.ranks, group_size=per_node, leaf_size=per_leaf and per_leaf * per_node),
        batch=anchor.ranks * anchor.batch_per_rank,
        slots=train.optimizer.slots,
        activation_bytes=ELEMENT_BYTES[train.precision],
        gamma=held_share,
        counted=counted(layers, plan, record),
        memory_limit=limit_bytes,
        rest_s=max(0.0, statistics.fmean(run.step_s for run in anchor.runs) - sum(parts.values()) - gathered_s),
        average_every=plan.sync.average_every or AVERAGE_EVERY,
    )
    if record.memory is not None:
        case = replace(case, chain=record.memory.chain, rates=record.memory.rates)
    if record.exchange is not None and record.exchange.carrier == "gloo":
        case = replace(case, scatter="allreduce")
    division = "by multiply-adds" if watched is None else "by times measured in warm-up"
    return case, (
        f"Computing: forward, backward and update of {ranks_text(anchor.ranks)}, divided over {len(layers)} layers "
        f"{division}.",
        f"Activations in memory over all inputs and outputs of layers (gamma): {held_from}.",
        f"Memory: {most_from}.",
        f"Messages: the network's costs times {cost_scale:.3g}, as in the projection, which gives the step of data.",
    )


def _mean_parts(anchor: PointFigures) -> dict[str, float] | None:
    needed = ("forward", "backward", "optimizer", "exchange")
    recorded = [run.parts for run in anchor.runs if all(name in run.parts for name in needed)]
    if not recorded:
        return None
    means = dict.fromkeys((*needed, "gather"), 0.0)
    for name in means:
        means[name] = statistics.fmean(parts.get(name, 0.0) for parts in recorded)
    return means


def measured_rows(
    case: StrategyCase, ingredients: Ingredients, others: Sequence[Ingredients] = ()
) -> tuple[StrategyRow, ...]:
    """Returns the model's rows with measured figures for each measured point, also of `others` of other strategies."""
    rows: list[StrategyRow] = []
    same = [group for group in others if group.training == ingredients.training != "" and group is not ingredients]
    for group in (ingredients, *same):
        case_of_group = replace(case, average_every=group.average_every or case.average_every)
        for point in group.points:
            name = point.strategy or ("data" if point.ranks > 1 else "serial")
            is_repeated = group is not ingredients and name in ("serial", ingredients.anchor.strategy)
            if point.batch_per_rank is not None and not is_repeated:
                rows += _point_rows(case_of_group, point, name, point.ranks * point.batch_per_rank)
    return tuple(sorted(rows, key=attrgetter("ranks")))


def accuracy_steps(case: StrategyCase, group: Ingredients, networks: Mapping[str, NetworkModel]) -> tuple[str, ...]:
    """Returns a sentence with the accuracy of the model for data at the largest measured point, by network costs."""
    steps = []
    for title, network in networks.items():
        rows = measured_rows(replace(case, network=network), group)
        steps += [f"{title} {percent(row.accuracy)}" for row in rows if row.strategy == "data" and row.accuracy][-1:]
    if not steps:
        return ()
    return (f"Accuracy for data at the largest measured point, step by step: {', '.join(steps)}.",)


def _point_rows(case: StrategyCase, point: PointFigures, name: str, batch: int) -> Iterator[StrategyRow]:
    """Yields the rows of a strategy at a measured point. `batch`: samples of a step of all ranks."""
    refusal = "points do not say how their ranks are grouped, by which the model has several rows"
    modelled: Sequence[StrategyRow] = [
        StrategyRow(strategy=name, ranks=point.ranks, replicas=1, limit=point.ranks, bound_by="", refused=refusal)
    ]
    if name in STRATEGIES:
        rows = replace(case.at(point.ranks, batch), cuts_depth=True).table((name,))
        modelled = [row for row in rows if len(rows) == 1 or row.replicas == point.replicas][:1] or modelled
    measured_s = statistics.fmean(run.step_s for run in point.runs)
    for row in modelled:
        yield replace(
            row, measured_s=measured_s, measured_memory_bytes=point.memory_bytes, measured_sent_bytes=point.sent_bytes
        )


def projected_rows(
    case: StrategyCase,
    targets: Sequence[Target],
    *,
    is_strong: bool,
    strategies: Sequence[str],
    own_strategy: str = "data",
) -> tuple[StrategyRow, ...]:
    """Returns the strategies at the targets; that of the runs has the projected step. `case`: that of the anchor."""
    rows: list[StrategyRow] = []
    names = [name for name in STRATEGIES if name in ("data", own_strategy) or name in strategies]
    for target in targets:
        batch = case.batch if is_strong else case.batch // case.layout.ranks * target.ranks
        parts = {part.name: part.seconds.median for part in target.parts}
        rest_s = case.rest_s
        if parts:
            rest_s = parts["input"] + parts["host"] + parts["straggler"]
        table = replace(case.at(target.ranks, batch), rest_s=rest_s).table(names)
        is_one_row = [row.strategy for row in table].count(own_strategy) == 1
        for row in table:
            if row.strategy == own_strategy and not row.refused and is_one_row:
                row = replace(row, step_s=target.step.median, notes=(PROJECTED,))
                if parts:
                    row = replace(row, compute_s=parts["compute"] + parts["optimizer"], exposed_s=parts["exchange"])
            rows.append(row)
    return tuple(rows)


def section(rows: Sequence[StrategyRow], basis: Sequence[str], *, anchor: str = "strategies") -> Section:
    """Returns the section. `basis`: sentences on all rows. `anchor`: id, unique in a document."""
    modelled = [row for row in rows if row.measured_s is None]
    verdicts = tuple(_verdict(ranks, list(group)) for ranks, group in groupby(modelled, key=attrgetter("ranks")))
    headline = next(reversed(verdicts), "").split(", ")[0]
    accuracies = [(row.accuracy, row) for row in rows if row.accuracy is not None and row.strategy == "data"]
    if accuracies:
        lowest, worst = min(accuracies, key=itemgetter(0))
        if lowest < LEAST_ACCURACY:
            headline = f"No fastest strategy: the accuracy of the model is below {percent(LEAST_ACCURACY, 0)}"
            verdicts = (f"{headline} at measured points.",)
        accuracy = (
            f"Accuracy for data is {percent(lowest)} at {ranks_text(worst.ranks)}: {format_seconds(worst.step_s)}, and "
            f"{format_seconds(worst.measured_s or 0.0)} measured"
        )
        if len(accuracies) > 1:
            accuracy += "; it is not lower at other counts"
        verdicts += (f"{accuracy}.",)
    verdicts += tuple(
        _measured_text(row) for row in rows if row.measured_s is not None and row.strategy not in ("data", "serial")
    )
    kind, notes = "model only", (*basis, _CONSEQUENCE)
    if all(row.is_ideal for row in rows):
        kind, notes = "ideal", tuple(basis)
    if kind != "ideal" and not accuracies:
        verdicts += ("No run shows the accuracy of the model.",)
    if kind != "ideal" and len({row.strategy for row in modelled} - {"data"}) <= 2:  # One was chosen, not all.
        verdicts += tuple(dict.fromkeys(f"{row.strategy}: {row.refused}." for row in modelled if row.limit is None))
    return Section(
        id=anchor,
        title="Strategies: computing, communication and memory",
        short_title="Strategies",
        level="answer",
        headline=headline,
        words=verdicts,
        brief=verdicts,
        sheets=_sheets(rows, kind),
        notes=notes,
    )


def _sheets(rows: Sequence[StrategyRow], kind: str) -> tuple[Sheet[Any], Sheet[Any]]:
    shown_rows = list(_best_groupings(rows))
    steps = Sheet(
        name="strategies-by-ranks",
        title="Step by strategy",
        columns=(),
        rows=[
            (row.strategy, ranks_text(row.ranks), "no fit" if row.fits is False else format_seconds(row.step_s))
            for row in shown_rows
            if row.measured_s is None and not row.refused
        ],
        caption="No fit: more memory than the limit of a rank.",
        pivot=Pivot(corner=f"Step, {kind}", down=itemgetter(0), across=itemgetter(1), cell=itemgetter(2)),
        in_terminal=True,
    )
    strategies = Sheet(
        name="strategies",
        title="Strategies",
        columns=COLUMNS,
        rows=rows,
        is_shown=lambda row: any(row is shown_row for shown_row in shown_rows),
    )
    return steps, strategies


def _verdict(ranks: int, rows: Sequence[StrategyRow]) -> str:
    fastest = best(rows)
    if fastest is None:
        large = [row for row in rows if row.fits is False]
        smallest = min(large, key=attrgetter("memory_bytes"), default=None)
        why = "; ".join(dict.fromkeys(row.refused for row in rows if row.refused)) or "local-sgd trains differently"
        if smallest is not None:
            why = f"{_named(smallest)} needs the least memory, {format_bytes(smallest.memory_bytes)}"
        return f"{ranks_text(ranks)}: no strategy fits: {why}."
    where = "fits" if fastest.fits else "is fastest, memory not considered"
    data = (row for row in rows if row.strategy == "data" and not row.refused and row is not fastest)
    others = "".join(f" (data: {format_seconds(row.step_s)})" for row in data)
    step = f"{format_seconds(fastest.step_s)} a step{others}"
    text = f"{ranks_text(ranks)}: {_named(fastest)} {where}, {step}"
    if fastest.limit is None:
        return f"{text}."
    return f"{text}; at most {ranks_text(fastest.limit)} ({fastest.bound_by})."


def _measured_text(row: StrategyRow) -> str:
    step = f"{row.strategy} at {ranks_text(row.ranks)}: {format_seconds(row.measured_s or 0.0)} measured"
    if row.accuracy is None:
        return f"{step}; {row.refused}."
    details = [f"{format_seconds(row.step_s)} by the model, accuracy {percent(row.accuracy)}"]
    if row.measured_memory_bytes and row.memory_bytes:
        details.append(f"memory {row.measured_memory_bytes / row.memory_bytes:.2f} times the model's")
    if row.measured_sent_bytes and row.sent_bytes:
        details.append(f"bytes sent {row.measured_sent_bytes / row.sent_bytes:.2f} times the model's")
    return f"{step}; {', '.join(details)}."


def _best_groupings(rows: Sequence[StrategyRow]) -> Iterator[StrategyRow]:
    for _, group in groupby(rows, key=lambda row: (row.ranks, row.strategy, row.measured_s is None)):
        candidates = list(group)
        chosen_row = best(candidates) or min(candidates, key=lambda row: (bool(row.refused), row.memory_bytes))
        if chosen_row.limit is not None:
            yield chosen_row


def _named(row: StrategyRow) -> str:
    """Returns the name with its groups: `data+tensor 4 x 8` is four groups of eight ranks."""
    if "+" not in row.strategy or row.refused:
        return row.strategy
    sizes = [row.replicas, row.ranks // row.replicas]
    if row.strategy == "data+pipeline+tensor":
        sizes = [row.replicas, sizes[1] // row.tensor_ranks, row.tensor_ranks]
    return f"{row.strategy} {' x '.join(map(str, sizes))}"


def _basis(row: StrategyRow) -> str:
    if row.refused and row.measured_s is not None:
        return "measured, no model"
    if row.refused:
        return "refused"
    if row.accuracy is not None:
        return f"measured, accuracy {percent(row.accuracy)}"
    if PROJECTED in row.notes:
        return "projected"
    return "ideal" if row.is_ideal else "model only"


COLUMNS: tuple[Column[StrategyRow], ...] = (
    Column("ranks", "Ranks", "ranks"),
    Column("strategy", "Strategy", "strategy", text=_named),
    Column("replicas", "", "replicas"),
    Column("tensor_ranks", "", "tensor_ranks"),
    *columns_of(StrategyRow, *FIGURES, *STAGES, of=lambda row: None if row.refused else row),
    *columns_of(
        StrategyRow, "limit", "bound_by", "measured_s", "measured_memory_bytes", "measured_sent_bytes", "accuracy"
    ),
    Column("basis", "Basis", _basis),
    Column("remarks", "Remarks", lambda row: row.refused or "; ".join(row.notes)),
)
