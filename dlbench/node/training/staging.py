"""Staging over all nodes: the first rank of each stages it, all wait, and all know how far each node is.

Ranks gather about twice a second. Thus a long staging is no stall, a hung one is, and the error of one node ends the
others at once, which then are no cause.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlbench.datasets.shuffling import ownership_for
from dlbench.errors import PeerLostError
from dlbench.node.data.source import open_training
from dlbench.node.data.staging import NodeStaging, Parts, StagedData
from dlbench.node.part import TrainingPart
from dlbench.node.ranks import RankPlace
from dlbench.node.training.checkpoint import Progress
from dlbench.node.training.context import RankContext
from dlbench.records.data_path import StagingResult
from dlbench.records.rank_summary import RankSummary, StagingSummary
from dlbench.records.record import RankResult
from dlbench.specs.plan import RunPlan

_PERIOD_S = 0.5


@dataclass(kw_only=True)
class Staging(TrainingPart):
    """Staging of a run, as one rank knows it."""

    plan: RunPlan
    data: StagedData
    seconds: float  # Until all nodes were ready.
    verified: str
    node: NodeStaging | None  # On the first rank of each node.
    problems: list[str] = field(default_factory=list)  # What went wrong, on the first rank of each node.

    @property
    def doubts(self) -> list[str]:
        return self.problems

    def summary(self, result: RankResult) -> dict[str, Any]:
        if self.node is None:
            return {}
        node, warnings = self.node.finished()
        return {"staging": StagingSummary(node=node, warnings=tuple(warnings))}

    def record(self, everyone: Sequence[RankSummary]) -> dict[str, Any]:
        data = self.plan.workload.data
        nodes = [rank.staging.node for rank in everyone if rank.staging is not None and rank.staging.node is not None]
        result = StagingResult(
            strategy=data.staging,
            tier=data.staging_tier,
            method="on first read" if data.staging == "lazy" else "copy",
            streams=data.staging_streams,
            seconds=self.seconds,
            nodes=tuple(nodes),
            verified=self.verified,
            kept=data.keep_staged and not any("not kept" in text for rank in everyone for text in rank.warnings),
        )
        return {"staging": result}

    def remove(self) -> None:
        """Removes what was staged on this node, unless it is kept; after the last rank has read."""
        if self.node is not None:
            self.node.close()


def stage_data(context: RankContext, progress: Progress | None) -> Staging | None:
    """Stages what the plan asks for; None where it asks for nothing."""
    plan, place, data = context.plan, context.place, context.plan.workload.data
    if data.is_synthetic or data.staging == "none":
        return None
    context.watch.stage("staging")
    context.events.add("staging_start")
    context.status.on_staging(0, 0)
    begun = time.monotonic()
    work = None
    if place.local_rank == 0:
        work = NodeStaging(
            plan,
            place.node_rank,
            place.host,
            open_reader=lambda: open_training(plan.workload.model, data, plan.workload.train.seed),
            parts=lambda num: held_first(plan, place, num, progress),
        )
        work.start()
    try:
        everyone = _all_done(context, work)
    except BaseException:
        if work is not None:
            work.cancel()
        raise
    own = everyone[place.rank - place.local_rank]
    staging = Staging(
        plan=plan,
        data=StagedData(plan=plan, folder=Path(own["folder"]), evaluates=plan.measure.until == "quality"),
        seconds=time.monotonic() - begun,
        verified=own["verified"],
        node=work,
        problems=own["warnings"] if place.local_rank == 0 else [],
    )
    context.events.add("staging_stop")
    if work is not None:
        context.watch.staged(work.tally.moved)
    context.watch.stage("building")
    return staging


def _all_done(context: RankContext, work: NodeStaging | None) -> list[Any]:
    moved = -1
    while True:
        if work is not None:
            work.wait(_PERIOD_S)
        everyone = context.engine.gather(work.status() if work is not None else None)
        nodes = [one for one in everyone if one is not None]
        for rank, one in enumerate(everyone):
            if one is None or one["error"] is None:
                continue
            if rank == context.place.rank and work is not None and work.error is not None:
                raise work.error
            raise PeerLostError(f"rank {rank} could not stage its node: {one['error']}")
        if all(one["done"] for one in nodes):
            context.beat("staging")
            return everyone
        now = sum(one["beats"] for one in nodes)
        if now != moved:
            moved = now
            context.beat("staging moved")
        context.status.on_staging(sum(one["copied"] for one in nodes), sum(one["needed"] for one in nodes))


def held_first(plan: RunPlan, place: RankPlace, num_samples: int, progress: Progress | None) -> Parts:
    """The samples that each rank of this node holds when this run begins."""
    ownership = ownership_for(plan.workload.data, num_samples, place.size, seed=plan.workload.train.seed)
    assert ownership is not None  # a plan with staging shard does not shuffle globally
    epoch = progress.position.epoch if progress is not None else 0
    first = place.rank - place.local_rank
    return {rank: ownership.part(epoch, rank).tolist() for rank in range(first, first + place.local_size)}
