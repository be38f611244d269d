"""One comparable group of runs becomes the ingredients of its projection."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dlbench.analysis.causes import CAUSES, COMPUTE_PARTS, WAIT_PARTS
from dlbench.analysis.comparability import averaged_id
from dlbench.analysis.core_load import crowded_hosts
from dlbench.analysis.measures import load_steps
from dlbench.analysis.scaling import Group, Point
from dlbench.analysis.side_by_side import with_train
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
from dlbench.records.registry import data_title, goal
from dlbench.records.scan import Run
from dlbench.report.wording import clean, place_text
from dlbench.specs.comm import NetworkModel
from dlbench.specs.engine import EngineSpec
from dlbench.specs.out_of_core import MemorySpec
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import AUTO, SyncSpec
from dlbench.specs.training import TrainSpec

WAITED = 0.01  # Share of a step that waits for input from which on storage gave all it could.
SHARED = 0.1
"""Share of the CPU time of ranks on other nodes that a node sees on its own cores, from which on these are the same
cores. It is no more, as interrupts are in the one figure and not in the other."""
MORE_DEMAND, NO_MORE_RATE = 1.5, 1.05
"""Storage is saturated where demand rose by this factor or more, and the rate by no more than that one."""


def gathered(
    group: Group,
    table: RunTable,
    *,
    groups: Sequence[Group] = (),
    source: str = "",
    is_whole: bool = True,
) -> Ingredients:
    """What a projection of a group is made of, without costs of its network. `groups`: all groups of the table, for
    batches that differ. `source`: where the runs are from, in words. `is_whole`: also what takes to read step files and
    samples again, which points alone do not need: scatter of nodes, and power.
    """
    plan, record = group.sample.plan, group.sample.record
    assert record is not None
    per_node, points, left_out = _points(group)
    anchor = points[-1]
    runs = [table.runs[run_id] for run_id in anchor.run_ids]
    # Of the run in the middle by communication time (the lower middle of an even number).
    known = [run.record.exchange for run in runs if run.record is not None and run.record.exchange is not None]
    timed = [one for one in known if one.communication_s is not None and one.of_gradients] or known
    timed.sort(key=lambda one: one.communication_s or 0.0)
    exchange = timed[(len(timed) - 1) // 2] if timed else None
    leaves = {rank.switch for run in runs if run.record for rank in run.record.ranks if rank.switch}
    notes = [f"Left out, as nodes are not full there: {', '.join(left_out)}."] if left_out else []
    if len(leaves) > 1:
        notes.append(f"The runs at {anchor.ranks} ranks lay below {len(leaves)} leaf switches.")
    elif anchor.nodes > 1:
        notes.append(f"Leaf switches of more than {anchor.nodes} nodes were not recorded.")
    if exchange is not None and exchange.chunks_are_guessed:
        notes.append("Chunks of hierarchical messages were not recorded, and are priced as this dlbench cuts them.")
    leaf, workload = plan.system.network, plan.workload
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
        nodes_per_leaf=None if leaf is None else leaf.nodes_per_leaf,
        leaf_taper=None if leaf is None else leaf.leaf_taper,
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
    """The same with these costs of messages."""
    if network is not None and ingredients.system not in ("", network.system):
        raise UserError(
            f"the network's costs are of system {network.system}, the runs are of {ingredients.system}: measure theirs "
            f"(dlbench comm submit --system {ingredients.system}), or leave them out"
        )
    return ingredients.model_copy(update={"network": network})


def _points(group: Group) -> tuple[int, list[Point], list[str]]:
    """Ranks of a full node, the points that one projection may hold, and those left out, in words."""
    last = group.points[-1]
    per_node = -(-last.ranks // last.nodes)
    if last.nodes == 1:
        # What a node holds, as its system declares it.
        node, cores = group.sample.plan.system.node, group.sample.plan.layout.cores_per_rank
        per_node = max(per_node, node.ranks or node.gpus or (node.cores or 0) // cores)
    kept = {
        point.ranks: point
        for point in group.points
        if point.ranks == point.nodes * per_node or (point.nodes == 1 and point.ranks < per_node)
    }
    left = [place_text(point.ranks, point.nodes) for point in group.points if point not in kept.values()]
    return per_node, list(kept.values()), left


def _figures(point: Point, points: Sequence[Point], table: RunTable) -> PointFigures:
    every = [table.causes[run_id] for one in points for run_id in one.run_ids if run_id in table.causes]
    unknown = {name for causes in every for name in causes.not_measured}
    found = []
    for run_id in point.run_ids:
        record, causes = table.runs[run_id].record, table.causes.get(run_id)
        exchange = None if record is None else record.exchange
        parts = {} if causes is None else causes.seconds_without(unknown)
        waited = table.parts[run_id]["exchange_wait_first"]
        taken = None if exchange is None else exchange.communication_s
        found.append(
            RunFigures(
                run_id=run_id,
                session=table.sessions[run_id],
                step_s=table.figures[run_id]["measured_s"] / table.figures[run_id]["steps"],
                # Rounding may take a part a nanosecond below nothing.
                parts={name: max(0.0, parts[name]) for name in (*CAUSES, *COMPUTE_PARTS, *WAIT_PARTS) if parts},
                own_work_s=_own_work(run_id, table),
                communication_s=None if taken is None else max(0.0, taken - waited),
            )
        )
    middle = sorted(found, key=lambda run: run.step_s)[(len(found) - 1) // 2]
    middle_record = table.runs[middle.run_id].record
    switches = {} if middle_record is None else {rank.node_rank: rank.switch for rank in middle_record.ranks}
    in_order = [switches.get(node, "") for node in range(point.nodes)]
    numbers = {switch: number for number, switch in enumerate(sorted(set(in_order)))}
    records = [record for run_id in point.run_ids if (record := table.runs[run_id].record) is not None]
    busy = [load for record in records for load in record.load if load.busy_s is not None and load.window_s > 0]
    steps = table.runs[point.run_ids[0]].plan.measure.measured_steps
    cpu_s = sum(load.own_s for load in busy) / (len(records) * point.ranks * steps) if busy else None
    core_use = [(load.busy_s or 0.0) / (load.window_s * len(load.cores)) for load in busy]
    held = [one.held_bytes for one in records if one.held_bytes is not None]
    sent = [one.exchange.sent_bytes for one in records if one.exchange and one.exchange.sent_bytes is not None]
    return PointFigures(
        ranks=point.ranks,
        nodes=point.nodes,
        batch_per_rank=point.batch_per_rank,
        strategy=table.runs[point.run_ids[0]].plan.strategy,
        memory_bytes=statistics.median(held) if held else None,
        sent_bytes=statistics.median(sent) if sent else None,
        cpu_s=cpu_s,
        core_use=statistics.fmean(core_use) if core_use else None,
        leaves=None if "" in in_order else tuple(numbers[switch] for switch in in_order),
        runs=tuple(found),
    )


def without_strategy(run: Run) -> Run:
    """A run as if its ranks were replicas of DDP that keep all in core, whatever they share."""
    train = TrainSpec.model_fields
    found = with_train(
        run, {"recompute": train["recompute"].default, "swap": train["swap"].default, "memory": MemorySpec()}
    )
    return replace(found, plan=found.plan.model_copy(update={"engine": EngineSpec(name="ddp"), "sync": SyncSpec()}))


def _shared_cores(runs: Sequence[Run]) -> int | None:
    """Returns how many cores all nodes of the runs share, as those of a one-box cluster do; None where each node has
    cores of its own, or nobody measured whose processes used them.
    """
    loads = [load for run in runs if run.record is not None for load in run.record.load]
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
    return None if causes is None else statistics.median(causes.work_ns) / causes.steps / 1e9 or None


def _batches(
    group: Group, points: Sequence[Point], groups: Sequence[Group], table: RunTable
) -> tuple[BatchFigures, ...]:
    """Own work at every batch per rank: of points of strong series, and of groups that differ in the batch alone."""

    def without_batch(run: Run) -> str:
        return averaged_id(with_train(run, {"batch_per_rank": 1}))

    wanted = without_batch(group.sample)
    like = [one.points[-1] for one in groups if one.id != group.id and without_batch(one.sample) == wanted]
    found: dict[int, list[float]] = {}
    for point in (*(points if group.scaling == "strong" else points[-1:]), *like):
        works = (_own_work(run_id, table) for run_id in point.run_ids)
        found.setdefault(point.batch_per_rank, []).extend(filter(None, works))
    return tuple(
        BatchFigures(batch_per_rank=batch, own_work_s=tuple(works)) for batch, works in sorted(found.items()) if works
    )


def _scatter(runs: Iterable[Run]) -> NodeScatter | None:
    found = []
    for run in runs:
        steps = load_steps(run)
        work = (steps.step_ns - steps.phase_ns["exchange"]) / 1e9
        if run.record is not None and (work > 0).all():
            found.append((work, [rank.host for rank in sorted(run.record.ranks, key=lambda rank: rank.rank)]))
    return scatter_of(found)


def _supply(points: Sequence[Point], table: RunTable) -> StorageSupply | None:
    seen: list[tuple[float, float, float, Point]] = []  # Rate, demand, stored bytes of a sample.
    for point in points:
        records = [record for run_id in point.run_ids if (record := table.runs[run_id].record)]
        sizes: list[float] = []
        for epochs in (record.reading.epochs for record in records if record.reading is not None):
            samples = sum(epoch.samples for epoch in epochs)
            if samples:
                sizes.append(sum(sum(epoch.tier_bytes.values()) for epoch in epochs) / samples)
        if sizes and min(sizes) > 0:
            size, step = statistics.median(sizes), point.mean_step.value
            waits = [table.causes[run_id].seconds["input"] for run_id in point.run_ids if run_id in table.causes]
            waited = statistics.median(waits or [0.0])
            rate = point.throughput.value * size
            seen.append((rate, rate * step / max(step - waited, 1e-3 * step), size, point))
    if not seen:
        return None
    record = table.runs[points[-1].run_ids[0]].record
    rate, _, size, best = max(seen, key=lambda one: one[0])
    most, demand, *_ = max(seen, key=lambda one: one[1])
    return StorageSupply(
        sample_bytes=size,
        bytes_per_s=rate,
        nodes=best.nodes,
        is_saturated=demand >= (1 + WAITED) * most
        and any(demand >= MORE_DEMAND * other and most <= NO_MORE_RATE * less for less, other, *_ in seen),
        is_per_node=record is not None and record.staging is not None,
        source=f"what the runs at {place_text(best.ranks, best.nodes)} read",
    )


def _quality(group: Group, groups: Sequence[Group]) -> QualityFigures | None:
    """Runs of the same network and data to the same target, whatever their batch; and the noise scale of any."""
    plan = group.sample.plan

    def subject(run: Run) -> tuple[str, str, str, str]:
        return run.plan.workload.name, run.plan.workload.preset, run.plan.workload.data.source, goal(run)

    runs = [run for one in groups or [group] for run in one.runs if subject(run) == subject(group.sample)]
    records = [(run, run.record) for run in runs if run.record is not None]
    scales = [one.noise_scale.noise_scale for _, one in records if one.noise_scale and one.noise_scale.noise_scale]
    results = [(run, one.quality) for run, one in records if one.quality is not None]
    samples = [one.train_samples for _, one in results]
    looks = [one.evaluations for run, one in results if run.plan.layout.ranks == group.points[-1].ranks]
    spent = [sum(look.eval_s for look in one) / one[-1].epoch for one in looks if one and one[-1].epoch]
    if plan.goal is None or not samples:
        return None
    return QualityFigures(
        target=goal(group.sample),
        samples_per_epoch=samples[0],
        runs=tuple(
            QualityRun(global_batch=run.plan.global_batch, epochs=one.epochs_to_quality)
            for run, one in results
            if one.reached and one.epochs_to_quality
        ),
        evaluation_s=statistics.median(spent) if spent else 0.0,
        noise_scale=statistics.median(scales) if scales else None,
    )


def _watts(runs: Iterable[Run], nodes: int) -> float | None:
    """Mean power of a node in the measured steps, over runs whose samples hold it; GPUs and processors."""
    found = []
    for run in runs:
        try:
            energy = read_machine(run).energy
        except IncompleteDataError:
            continue  # The report names damaged samples; here they only leave out a figure.
        powers = [] if energy is None else [energy.mean_power_w(kind, "measured") for kind in KINDS]
        watts = [power for power in powers if power is not None]
        found += [sum(watts) / nodes] if watts else []
    return statistics.median(found) or None if found else None
