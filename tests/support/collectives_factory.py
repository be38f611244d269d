"""Run folders of the collective benchmark with planted costs, written by the real writers: oracles for readers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from dlbench.comm.measurements import layout_of
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import pipeline_chunks
from dlbench.records.comm import CommPoint, CommRecord, CommRun
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder, create
from dlbench.records.status import write_status
from dlbench.specs.comm import ELEMENT_BYTES, IN_PLACE, LIBRARY, OUT_OF_PLACE, CommPlan, Level, NetworkModel, Piece
from dlbench.specs.expand import expand_comm
from dlbench.specs.requests import CommRequest
from tests.support.run_factory import NOW, status

LIBRARY_CARRIERS = {"gloo": "torch-gloo", "mpi": "mpi", "nccl": "torch-nccl", "horovod": "horovod-gloo"}

Change = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A point as a mapping -> the keys that are different from what was planted."""


def network(
    *,
    inside: tuple[float, float] = (20e-6, 0.5e-9),
    across: tuple[float, float] = (100e-6, 8e-9),
    beyond: tuple[float, float] | None = None,
    gamma: float = 0.0,
    shared_link: bool = True,
) -> NetworkModel:
    """Planted costs: alpha in seconds and beta in seconds per byte of each level."""

    def level(costs: tuple[float, float], links: int | None = None) -> Level:
        return Level(pieces=(Piece(alpha_s=costs[0], beta_s_per_byte=costs[1]),), links=links)

    return NetworkModel(
        system="planted",
        transport="planted",
        inside=level(inside),
        across=level(across, 1 if shared_link else None),
        beyond=None if beyond is None else level(beyond, 1),
        gamma_s_per_byte=gamma,
    )


@dataclass(kw_only=True)
class Story:
    """What a run measured; the defaults make a healthy one."""

    network: NetworkModel = field(default_factory=network)
    library: tuple[float, float] = (50e-6, 2e-9)
    """Start-up and seconds per byte of every library's collective."""
    noise: float = 0.02
    """Standard deviation of the logarithm of an iteration's time."""
    drift: float = 0.0
    """Repeat k is slower by this share times k, all series alike."""
    change: Change = lambda point: {}
    state: str = "valid"
    warnings: Sequence[str] = ()
    not_measured: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"host": "n0", "os": "Debian 12"})
    finished: datetime = NOW
    host: Callable[[int], str] = lambda node: f"n{node}"
    leaf_nodes: int | None = None
    """Nodes below a leaf switch; none: no switches are reported."""
    device: str = "cpu"
    nccl: Mapping[str, Any] | None = None


def comm_plans(**request: Any) -> list[CommPlan]:
    """Plans of a series on this machine, unless said otherwise; five repeats at four ranks in groups of two."""
    asked = {"points": (4,), "group_size": 2, "repeats": 5, "series": "c1", "sizes": "1KiB:16MiB", **request}
    return expand_comm(CommRequest(**asked), machine_cores=8, installed=("mpi4py",), now=NOW).plans


def write_comm_run(out: Path, plan: CommPlan, story: Story | None = None) -> RunFolder:
    """A finished run, as compute nodes leave it; equal plans and stories give equal times."""
    story = story or Story()
    out.mkdir(parents=True, exist_ok=True)
    folder = create(out, plan)
    for rank in range(plan.layout.ranks):
        write_status(folder, status(rank, story.host(rank // plan.layout.ranks_per_node), "done"))
    record = CommRecord.model_validate(
        {
            "run_id": plan.run_id,
            "state": story.state,
            "started": _utc(story.finished - timedelta(minutes=1)),
            "finished": _utc(story.finished),
            "hosts": [story.host(rank // plan.layout.ranks_per_node) for rank in range(plan.layout.ranks)],
            "switches": [
                f"root.leaf{rank // plan.layout.ranks_per_node // story.leaf_nodes}"
                for rank in range(plan.layout.ranks if story.leaf_nodes else 0)
            ],
            "device": story.device,
            "group_size": plan.group_size,
            "points": _points(plan, story),
            "nccl": story.nccl,
            "not_measured": list(story.not_measured),
            "warnings": list(story.warnings),
            "environment": dict(story.environment),
        }
    )
    write_json(folder.comm, record.model_dump(mode="json"))
    return folder


def _points(plan: CommPlan, story: Story) -> list[dict[str, Any]]:
    noise, apart = random.Random(plan.run_id), random.Random(f"{plan.run_id} {OUT_OF_PLACE}")
    series = [("torch-gloo" if plan.comm.transport == "torch" else "mpi", name) for name in plan.comm.algorithms]
    for name in plan.comm.backends:
        ways = (IN_PLACE, OUT_OF_PLACE) if (name, plan.comm.collective) == ("mpi", "allreduce") else (LIBRARY,)
        series += [(LIBRARY_CARRIERS[name], way) for way in ways]
    made = []
    for size in () if plan.comm.pairs else plan.comm.sizes:
        for carrier, algorithm in series:
            seconds = planted_seconds(plan, story, algorithm, size) * (1 + story.drift * plan.series.repeat)
            point: dict[str, Any] = {
                "collective": plan.comm.collective,
                "algorithm": algorithm,
                "carrier": carrier,
                "num_bytes": size,
                "dtype": plan.comm.dtype,
                "times_s": [
                    seconds * (apart if algorithm == OUT_OF_PLACE else noise).lognormvariate(0, story.noise)
                    for _ in range(plan.comm.iterations)
                ],
                "correct": True,
                "max_error": 1e-7,
                **_counters(plan, algorithm, size),
            }
            made.append(CommPoint.model_validate({**point, **story.change(point)}).model_dump(mode="json"))
    return made


def planted_seconds(plan: CommPlan, story: Story, algorithm: str, num_bytes: int) -> float:
    """Seconds of one point without noise."""
    if algorithm.startswith(LIBRARY):
        return story.library[0] + num_bytes * story.library[1]
    leaf = None if story.leaf_nodes is None else story.leaf_nodes * plan.layout.ranks_per_node
    return predict(
        plan.comm.collective,
        algorithm,
        num_bytes,
        replace(_layout(plan), leaf_size=leaf),
        story.network,
        element_bytes=ELEMENT_BYTES[plan.comm.dtype],
        shards=plan.comm.shards,
    )


def _layout(plan: CommPlan) -> Any:
    return layout_of(CommRun(folder=RunFolder(Path()), plan=plan, record=None, statuses=[]))


def _counters(plan: CommPlan, algorithm: str, num_bytes: int) -> dict[str, Any]:
    if algorithm.startswith(LIBRARY):
        return {}
    width = ELEMENT_BYTES[plan.comm.dtype]
    ranks = counts(plan.comm.collective, algorithm, _layout(plan), num_bytes // width, width, shards=plan.comm.shards)
    return {
        "chunks": pipeline_chunks(plan.comm.collective, algorithm, _layout(plan), num_bytes // width),
        "steps": max(rank.steps for rank in ranks),
        "messages": [rank.messages for rank in ranks],
        "bytes_sent": [rank.bytes_sent for rank in ranks],
        "bytes_across": [rank.bytes_across for rank in ranks],
    }


def write_comm_series(out: Path, story: Story | None = None, **request: Any) -> list[CommPlan]:
    """All runs of a series, alike but for their noise."""
    made = comm_plans(**request)
    for plan in made:
        write_comm_run(out, plan, story)
    return made


def write_unfinished_comm(out: Path, plan: CommPlan, stage: str = "measuring", reason: str = "") -> RunFolder:
    """A run without a record: killed (`measuring`) or failed (`failed`, with a reason)."""
    out.mkdir(parents=True, exist_ok=True)
    folder = create(out, plan)
    for rank in range(plan.layout.ranks):
        write_status(folder, status(rank, "n0", stage, reason))
    return folder


def _utc(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
