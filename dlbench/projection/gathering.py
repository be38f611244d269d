"""Collects the ingredients of a projection from one comparable group of runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter

from dlbench.analysis.causes import CAUSES, COMPUTE_PARTS, WAIT_PARTS
from dlbench.analysis.comparability import averaged_id
from dlbench.analysis.environments import crowded_hosts
from dlbench.analysis.measures import load_steps
from dlbench.analysis.scaling import Group, Point, with_train
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.energy import KINDS
from dlbench.analysis.telemetry.readings import read_machine
from dlbench.errors import IncompleteDataError, UserError
from dlbench.projection.ingredients import (
    BatchFigures,
    Ingredients,
    NodeScatter,
    PointFigures,
    QualityFigures,
    QualityRun,
    RunFigures,
    StorageSupply,
)
from dlbench.projection.nodes import scatter_of
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Record
from dlbench.records.registry import data_title, goal
from dlbench.records.scan import Run
from dlbench.report.wording import clean, place_text
from dlbench.specs.comm import NetworkModel
from dlbench.specs.engine import EngineSpec
from dlbench.specs.out_of_core import MemorySpec
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import AUTO, SyncSpec
from dlbench.specs.system import NetworkSpec
from dlbench.specs.training import TrainSpec

WAITED = 0.01  # Share of a step that waits for input above which storage was at its limit.
SHARED = 0.1
"""Share of the CPU time of ranks on other nodes, used on a node's own cores, above which nodes share cores. It is not
1, as interrupts are counted on one side only."""
MORE_DEMAND, NO_MORE_RATE = 1.5, 1.05
"""Storage is saturated if demand rose by at least the first factor and the rate by at most the second."""


def gathered(
    group: Group, table: RunTable, *, groups: Sequence[Group] = (), source: str = "", is_whole: bool = True
) -> Ingredients:
    """Returns the ingredients of a group, without costs of its network. `groups`: all groups, for other batches.
    `source`: in words. `is_whole`: include scatter of nodes and power, which points only do not need.
    """
    plan, record = group.sample.plan, group.sample.record
    assert record is not None
    per_node, points, left_out = _points(group)
    anchor = points[-1]
    runs = [table.runs[run_id] for run_id in anchor.run_ids]
    # The exchange of the median run by communication time (the lower one of an even number).
    records = _records(anchor, table)
    exchanges = [record.exchange for record in records if record.exchange is not None]
    timed = [
        exchange for exchange in exchanges if exchange.communication_s is not None and exchange.of_gradients
    ] or exchanges
    timed.sort(key=lambda exchange: exchange.communication_s or 0.0)
    exchange = timed[(len(timed) - 1) // 2] if timed else None
    ranks = chain.from_iterable(record.ranks for record in records)
    leaves = {rank.switch for rank in ranks if rank.switch}
    notes = []
    if left_out:
        notes.append(f"Left out, because their nodes are not full: {', '.join(left_out)}.")
    if len(leaves) > 1:
        notes.append(f"The runs at {anchor.ranks} ranks used {len(leaves)} leaf switches.")
    elif anchor.nodes > 1:
        notes.append(f"Leaf switches of more than {anchor.nodes} nodes were not recorded.")
    network, workload = plan.system.network or NetworkSpec(), plan.workload
    return Ingredients(
        title=f"{clean(workload.title)}, {workload.preset} preset, {plan.engine_title}, {plan.system.name}",
        source=source,
        configuration=group.id,
        system=plan.system.name,
        sample_unit=clean(workload.sample_unit, 40),
        scaling=group.scaling,
        ranks_per_node=per_node,
        points=tuple(_figures(point, points, table) for point in points),
        shared_cores=_shared_cores(runs),
        is_crowded=any(crowded_hosts(run.record) for run in group.runs if run.record is not None),
        exchange=exchange,
        engine=plan.engine.name,
        training=averaged_id(without_strategy(group.sample)),
        average_every=plan.sync.average_every,
        data=clean(data_title(group.sample)),
        **_fusion(plan, exchange),
        nodes_per_leaf=network.nodes_per_leaf,
        leaf_taper=network.leaf_taper,
        nodes=_scatter(runs) if is_whole and anchor.ranks > 1 else None,
        supply=_supply(points, table),
        batches=_batches(group, points, groups, table),
        quality=_quality(group, groups),
        node_watts=_watts(runs, anchor.nodes) if is_whole else None,
        notes=tuple(notes),
    )


def _fusion(plan: RunPlan, exchange: ExchangeResult | None) -> dict[str, float]:
    if plan.engine.name != "horovod":
        return {}
    tuned = None if exchange is None else exchange.autotune
    fused = plan.engine.kind.fusion if plan.sync.library_fusion == AUTO else plan.sync.library_fusion
    threshold = (tuned and tuned.fusion_threshold_bytes) or fused.bytes or 0
    cycle_ms = plan.engine.horovod.cycle_time_ms
    if tuned is not None and tuned.cycle_time_ms is not None:
        cycle_ms = tuned.cycle_time_ms
    return {"fusion_threshold_bytes": int(threshold), "cycle_s": cycle_ms / 1e3}


def with_network(ingredients: Ingredients, network: NetworkModel | None) -> Ingredients:
    """Returns the ingredients with these costs of messages."""
    if network is not None and ingredients.system not in ("", network.system):
        raise UserError(
            f"the network's costs are of system {network.system}, the runs are of {ingredients.system}: measure its "
            f"network (dlbench comm submit --system {ingredients.system}), or leave the costs out"
        )
    return ingredients.model_copy(update={"network": network})


def _points(group: Group) -> tuple[int, list[Point], list[str]]:
    last = group.points[-1]
    per_node = -(-last.ranks // last.nodes)
    if last.nodes == 1:
        # Ranks of a node by its system file.
        node, cores = group.sample.plan.system.node, group.sample.plan.layout.cores_per_rank
        per_node = max(per_node, node.ranks or node.gpus or (node.cores or 0) // cores)
    full_points = {
        point.ranks: point
        for point in group.points
        if point.ranks == point.nodes * per_node or (point.nodes == 1 and point.ranks < per_node)
    }
    left_out = [place_text(point.ranks, point.nodes) for point in group.points if point not in full_points.values()]
    return per_node, list(full_points.values()), left_out


def _figures(point: Point, points: Sequence[Point], table: RunTable) -> PointFigures:
    unknown: set[str] = set()
    for other_point in points:
        for run_id in other_point.run_ids:
            if run_id in table.causes:
                unknown |= set(table.causes[run_id].not_measured)
    runs = []
    for run_id in point.run_ids:
        record, causes = table.runs[run_id].record, table.causes.get(run_id)
        parts = causes.seconds_without(unknown) if causes is not None else {}
        if parts:
            # Rounding may make a part slightly negative.
            parts = {name: max(0.0, parts[name]) for name in (*CAUSES, *COMPUTE_PARTS, *WAIT_PARTS)}
        communication_s = None
        if record is not None and record.exchange is not None and record.exchange.communication_s is not None:
            waited_s = table.parts[run_id]["exchange_wait_first"]
            communication_s = max(0.0, record.exchange.communication_s - waited_s)
        figures = RunFigures(
            run_id=run_id,
            session=table.sessions[run_id],
            step_s=table.figures[run_id]["measured_s"] / table.figures[run_id]["steps"],
            parts=parts,
            own_work_s=_own_work(run_id, table),
            communication_s=communication_s,
        )
        runs.append(figures)
    middle = sorted(runs, key=lambda run: run.step_s)[(len(runs) - 1) // 2]
    records = _records(point, table)
    loads = chain.from_iterable(record.load for record in records)
    busy = [load for load in loads if load.busy_s is not None and load.window_s > 0]
    core_use = [(load.busy_s or 0.0) / (load.window_s * len(load.cores)) for load in busy]
    plan = table.runs[point.run_ids[0]].plan
    cpu_s = None
    if busy:
        cpu_s = sum(load.own_s for load in busy) / (len(records) * point.ranks * plan.measure.measured_steps)
    exchanges = [record.exchange for record in records if record.exchange is not None]
    return PointFigures(
        ranks=point.ranks,
        nodes=point.nodes,
        batch_per_rank=point.batch_per_rank,
        strategy=plan.strategy,
        replicas=plan.replicas,
        memory_bytes=_median([record.held_bytes for record in records]),
        sent_bytes=_median([exchange.sent_bytes for exchange in exchanges]),
        cpu_s=cpu_s,
        core_use=statistics.fmean(core_use) if core_use else None,
        leaves=_leaves(table.runs[middle.run_id].record, point.nodes),
        runs=tuple(runs),
    )


def _records(point: Point, table: RunTable) -> list[Record]:
    records = [table.runs[run_id].record for run_id in point.run_ids]
    return [record for record in records if record is not None]


def _median(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def _leaves(record: Record | None, nodes: int) -> tuple[int, ...] | None:
    if record is None:
        return None
    switches = {rank.node_rank: rank.switch for rank in record.ranks}
    in_order = [switches.get(node, "") for node in range(nodes)]
    if "" in in_order:
        return None
    indexes = {switch: index for index, switch in enumerate(sorted(set(in_order)))}
    return tuple(indexes[switch] for switch in in_order)


def without_strategy(run: Run) -> Run:
    """Returns a run as if its ranks were DDP replicas without out-of-core training, whatever they share."""
    train = TrainSpec.model_fields
    plain = with_train(
        run, {"recompute": train["recompute"].default, "swap": train["swap"].default, "memory": MemorySpec()}
    )
    return replace(plain, plan=plain.plan.model_copy(update={"engine": EngineSpec(name="ddp"), "sync": SyncSpec()}))


def _shared_cores(runs: Sequence[Run]) -> int | None:
    """Returns the number of cores that all nodes share, as in a one-box cluster; None: separate cores, or unknown."""
    loads = list(chain.from_iterable(run.record.load for run in runs if run.record is not None))
    nodes = len(loads) / max(1, len(runs))
    if nodes < 2 or any(load.others_s is None for load in loads):
        return None
    elsewhere_s = (nodes - 1) * sum(load.own_s for load in loads)
    others_s = sum(load.others_s or 0.0 for load in loads)
    if others_s < SHARED * elsewhere_s:
        return None
    return max(len(load.cores) for load in loads)


def _own_work(run_id: str, table: RunTable) -> float | None:
    causes = table.causes.get(run_id)
    if causes is None:
        return None
    return statistics.median(causes.work_ns) / causes.steps / 1e9 or None


def _batches(
    group: Group, points: Sequence[Point], groups: Sequence[Group], table: RunTable
) -> tuple[BatchFigures, ...]:
    """Returns own work by batch per rank: of points of strong series, and of groups that only differ in the batch."""

    def without_batch(run: Run) -> str:
        return averaged_id(with_train(run, {"batch_per_rank": 1}))

    configuration = without_batch(group.sample)
    like = [
        other.points[-1] for other in groups if other.id != group.id and without_batch(other.sample) == configuration
    ]
    works_by_batch: dict[int, list[float]] = {}
    for point in (*(points if group.scaling == "strong" else points[-1:]), *like):
        works = (_own_work(run_id, table) for run_id in point.run_ids)
        works_by_batch.setdefault(point.batch_per_rank, []).extend(filter(None, works))
    measured = sorted((batch, tuple(works)) for batch, works in works_by_batch.items() if works)
    return tuple(BatchFigures(batch_per_rank=batch, own_work_s=works) for batch, works in measured)


def _scatter(runs: Iterable[Run]) -> NodeScatter | None:
    own_works = []
    for run in runs:
        steps = load_steps(run)
        work = (steps.step_ns - steps.phase_ns["exchange"]) / 1e9
        if run.record is not None and (work > 0).all():
            own_works.append((work, [rank.host for rank in sorted(run.record.ranks, key=lambda rank: rank.rank)]))
    return scatter_of(own_works)


def _supply(points: Sequence[Point], table: RunTable) -> StorageSupply | None:
    rates: list[tuple[float, float, float, Point]] = []  # Rate and demand, bytes/s; stored bytes of a sample.
    for point in points:
        records = _records(point, table)
        sizes: list[float] = []
        for epochs in (record.reading.epochs for record in records if record.reading is not None):
            samples = sum(epoch.samples for epoch in epochs)
            num_bytes = sum(sum(epoch.tier_bytes.values()) for epoch in epochs)
            if samples:
                sizes.append(num_bytes / samples)
        if sizes and min(sizes) > 0:
            size, step = statistics.median(sizes), point.mean_step.value
            waits = [table.causes[run_id].seconds["input"] for run_id in point.run_ids if run_id in table.causes]
            waited = statistics.median(waits or [0.0])
            rate = point.throughput.value * size
            rates.append((rate, rate * step / max(step - waited, 1e-3 * step), size, point))
    if not rates:
        return None
    record = table.runs[points[-1].run_ids[0]].record
    rate, _, size, best = max(rates, key=itemgetter(0))
    rate_at_most, most_demand, *_ = max(rates, key=itemgetter(1))
    is_flat = any(
        most_demand >= MORE_DEMAND * demand and rate_at_most <= NO_MORE_RATE * lower for lower, demand, *_ in rates
    )
    return StorageSupply(
        sample_bytes=size,
        bytes_per_s=rate,
        nodes=best.nodes,
        is_saturated=most_demand >= (1 + WAITED) * rate_at_most and is_flat,
        is_per_node=record is not None and record.staging is not None,
        source=f"reads of the runs at {place_text(best.ranks, best.nodes)}",
    )


def _quality(group: Group, groups: Sequence[Group]) -> QualityFigures | None:
    """Returns the runs of the same network and data to the same target at any batch, and their noise scale."""
    plan = group.sample.plan

    def subject(run: Run) -> tuple[str, str, str, str]:
        return run.plan.workload.name, run.plan.workload.preset, run.plan.workload.data.source, goal(run)

    all_runs = chain.from_iterable(other.runs for other in groups or [group])
    runs = [run for run in all_runs if subject(run) == subject(group.sample)]
    records = [(run, run.record) for run in runs if run.record is not None]
    noise = [record.noise_scale.noise_scale for _, record in records if record.noise_scale is not None]
    results = [(run, record.quality) for run, record in records if record.quality is not None]
    samples = [quality.train_samples for _, quality in results]
    evaluation_s = []  # Evaluation time per epoch, of the runs at the anchor.
    for run, quality in results:
        evaluations = quality.evaluations
        if run.plan.layout.ranks == group.points[-1].ranks and evaluations and evaluations[-1].epoch:
            evaluation_s.append(sum(evaluation.eval_s for evaluation in evaluations) / evaluations[-1].epoch)
    if plan.goal is None or not samples:
        return None
    return QualityFigures(
        target=goal(group.sample),
        samples_per_epoch=samples[0],
        runs=tuple(
            QualityRun(global_batch=run.plan.global_batch, epochs=quality.epochs_to_quality)
            for run, quality in results
            if quality.reached and quality.epochs_to_quality
        ),
        evaluation_s=statistics.median(evaluation_s or [0.0]),
        noise_scale=_median(list(filter(None, noise))),
    )


def _watts(runs: Iterable[Run], nodes: int) -> float | None:
    """Returns the mean power of GPUs and processors of a node in the measured steps, watts, over runs with samples."""
    node_watts = []
    for run in runs:
        try:
            energy = read_machine(run).energy
        except IncompleteDataError:
            continue  # The report names damaged samples.
        if energy is None:
            continue
        powers = (energy.mean_power_w(kind, "measured") for kind in KINDS)
        watts = [power for power in powers if power is not None]
        if watts:
            node_watts.append(sum(watts) / nodes)
    return _median(node_watts) or None
