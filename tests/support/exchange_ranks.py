"""One rank of a small training by an engine, without the rest of a run: `python -m tests.support.exchange_ranks DIR`.

DIR holds `scenarios.json`; the rank writes what it saw to `rank-N.json`. `reference` computes the same training in
one process, from the mean of all ranks' gradients.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlbench.errors import DlbenchError
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.build_engine import build_engine
from dlbench.node.sync.engine import Engine
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import RunPlan

BATCH = 4


class SmallNet(nn.Module):
    """Tensors of odd sizes, one that the loss never depends on, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.BatchNorm1d(13)
        self.unused = nn.Parameter(torch.ones(3))
        self.wide = nn.Linear(13, 41)
        self.last = nn.Linear(41, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.wide(torch.relu(self.norm(self.first(inputs))))))
        return result


def _net(seed: int) -> tuple[SmallNet, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = SmallNet()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _batch(rank: int, step: int, part: int) -> torch.Tensor:
    return torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + part))


def _loss(model: nn.Module, inputs: torch.Tensor, parts: int) -> torch.Tensor:
    difference: torch.Tensor = model(inputs) - inputs.sum(1, keepdim=True)
    return difference.square().mean() / parts


def _values(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def reference(ranks: int, steps: int, parts: int = 1) -> list[float]:
    """All parameters after training with the mean of the gradients of `ranks` ranks."""
    model, optimizer = _net(seed=0)
    # Batch normalisation is local to a rank, but its running statistics do not enter gradients.
    for step in range(steps):
        for rank in range(ranks):
            for part in range(parts):
                (_loss(model, _batch(rank, step, part), parts) / ranks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return _values(model)


def _train(plan: RunPlan, folder: Path, place: RankPlace, steps: int, parts: int) -> dict[str, Any]:
    # Every rank begins elsewhere: the engine has to make them equal.
    model, optimizer = _net(seed=place.rank)
    engine = build_engine(plan, RunFolder(folder), place, torch.device("cpu"))
    engine.start()
    try:
        return _told(engine, model, optimizer, place, steps, parts, plan.measure.warmup_steps)
    finally:
        engine.stop()


def _told(
    engine: Engine,
    model: SmallNet,
    optimizer: torch.optim.Optimizer,
    place: RankPlace,
    steps: int,
    parts: int,
    warmup: int,
) -> dict[str, Any]:
    wrapped, optimizer = engine.prepare(model, optimizer, lambda: None, accumulation=parts)
    for step in range(steps):
        if step == warmup:
            engine.watch(False)  # as the loop does where measuring begins
        for part in range(parts):
            with nullcontext() if part == parts - 1 else engine.hold_exchange():
                loss = _loss(wrapped, _batch(place.rank, step, part), parts)
                if part == parts - 1:
                    engine.begin_backward()
                loss.backward()  # type: ignore[no-untyped-call]
        engine.finish_exchange()
        engine.step(lambda optimizer: optimizer.step())
        optimizer.zero_grad()
    result = engine.exchange_result()
    told = {
        "parameters": _values(model),
        "statistics": model.norm.running_mean.tolist() if model.norm.running_mean is not None else [],
        "exchange": None if result is None else result.model_dump(mode="json"),
        "settings": [setting.model_dump(mode="json") for setting in engine.settings()],
    }
    engine.barrier()
    return told


def _scenarios(folder: Path, place: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, scenario in enumerate(json.loads((folder / "scenarios.json").read_text())):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        plan = RunPlan.model_validate(scenario["plan"])
        try:
            # Shared memory is found by this name on the whole machine, where other tests may run as well.
            where = RankPlace(**place, token=f"scenario-{number}-{folder}")
            yield scenario["name"], _train(plan, own, where, scenario["steps"], scenario["parts"])
        except DlbenchError as error:
            yield scenario["name"], {"error": str(error), "kind": type(error).__name__}


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    rank, size = (int(os.environ.get(f"OMPI_COMM_WORLD_{n}", os.environ.get(n, ""))) for n in ("RANK", "SIZE"))
    place = {
        "rank": rank,
        "size": size,
        "local_rank": rank,
        "local_size": size,
        "node_rank": 0,
        "num_nodes": 1,
        "host": "here",
    }
    torch.set_num_threads(1)
    seen = dict(_scenarios(folder, place))
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
