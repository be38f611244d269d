"""A real run of one rank in the process of the test."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from dlbench.node.cores import CoreBinding
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.build_engine import build_engine
from dlbench.node.training.instruments import RankWatch
from dlbench.node.training.run import RankRun
from dlbench.records.folder import create
from dlbench.records.scan import Run, read_run
from tests.support.run_factory import plans

SMALL: dict[str, Any] = {"conv_channels": (2, 3, 4, 5, 6), "dense_sizes": (8, 4), "dropout": 0.1}


def trained(out: Path, steps: int, engine: str = "single", **more: object) -> Run:
    """A run of one rank in this process; `more` are settings of the plan, with two underscores for each point."""
    settings: dict[str, Any] = {"measure.warmup_steps": 4, "measure.measured_steps": steps, "watch.sampler": False}
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(1,), repeats=1, engine=engine, overrides=settings)
    model = {"model": plan.workload.model.model_copy(update=SMALL)}
    plan = plan.model_copy(update={"workload": plan.workload.model_copy(update=model)})
    folder = create(out, plan)
    place = RankPlace(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, host="here", token="t")
    cpu, started = torch.device("cpu"), time.monotonic()
    watch = RankWatch(plan, folder, place, None, started=started)
    try:
        RankRun(
            *(plan, folder, place, CoreBinding(cores=(0,), pinned=False, threads=1, warnings=())),
            *(build_engine(plan, folder, place, cpu), cpu, watch),
            on_step=lambda step: None,
            on_course=lambda *_: None,
            on_staging=lambda copied, needed: None,
            beat=lambda where: None,
            started=started,
        ).run()
    finally:
        watch.close()
    return read_run(folder.path)
