"""What two ranks of a machine lose by training together, with dlbench's shared memory, and what no exchange could save.

One rank trains alone, both train without exchanging anything, and both train with the exchange, in turns of a few
steps: ResNet-50 ci, a core each. What the second loses is the memory's: two cores share its bandwidth, which a copy of
as many bytes as the gradients have shows beside it, by one rank and by both at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.bench.figures import Figure, median_interval

ROUNDS, STEPS, COPIES = 9, 2, 3
GOAL = 0.95
LIMIT_S = 280


def figures() -> Iterator[Figure]:
    """Efficiency with the exchange, without it, and what the exchange costs."""
    about: dict[str, Any] = {"unit": "of a step alone", "goal": f"at least {GOAL}"}
    name = "efficiency of 2 ranks, ResNet-50 ci, one core per rank, in turns"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield Figure(name=name, **about, value=None, reason="needs two cores")
        return
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "seconds.json"
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, cores[rank], out)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LIMIT_S)
            rank.kill()  # without effect on one that has ended
        if not out.exists():
            yield Figure(name=name, **about, value=None, reason="a rank failed; its error is above")
            return
        found: dict[str, list[float]] = json.loads(out.read_text())

    def ratio(one: str, over: str) -> dict[str, Any]:
        value, low, high = median_interval([a / b for a, b in zip(found[one], found[over], strict=True)])
        return {"value": value, "low": low, "high": high, "n": len(found[one])}

    both = ratio("alone", "exchanging")
    met = True if both["low"] >= GOAL else False if both["high"] < GOAL else None
    yield Figure(name=f"{name}: shared memory", **about, **both, met=met)
    beside: dict[str, Any] = {"unit": "ratio of times", "goal": "beside it"}
    yield Figure(name=f"{name}: nothing exchanged, the most that there is", **beside, **ratio("alone", "apart"))
    yield Figure(name=f"{name}: a step apart over one with the exchange", **beside, **ratio("apart", "exchanging"))
    yield Figure(name="copying as many bytes: one core over both at once", **beside, **ratio("copy alone", "copy"))
    for way in ("copy alone", "copy"):
        yield Figure.of(
            [found["bytes"][0] / seconds / 1e9 for seconds in found[way]],
            name=f"{way}, a core",
            unit="GB/s",
            goal="beside it",
        )


def _rank(rank: int, core: int, out: Path) -> None:
    """All ways in turns; rank 0 writes the seconds of a step, or of a copy."""
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from dlbench.node.models.build import build_model, loss_for
    from dlbench.node.sync.own.engine import OwnExchange
    from dlbench.node.sync.torch_ranks import TorchRanks
    from dlbench.node.training.activations import sample_batches
    from dlbench.specs.expand import expand
    from dlbench.specs.requests import Request

    torch.set_num_threads(1)
    device = torch.device("cpu")
    dist.init_process_group("gloo", init_method=out.with_name("address").as_uri(), rank=rank, world_size=2)
    (plan,) = expand(
        Request(
            workload="resnet50", preset="ci", engine="ddp", points=(2,), overrides={"sync.inside": "shared-memory"}
        ),
        machine_cores=2,
    )
    plan = plan.model_copy(update={"run_id": f"bench-{os.getppid()}"})
    place: Any = SimpleNamespace(rank=rank, size=2, local_rank=rank, token="bench")
    folder: Any = SimpleNamespace(rendezvous=out.with_name("unused"))
    engine = OwnExchange(TorchRanks(plan, folder, place, device, None), plan, place, device)
    torch.manual_seed(0)
    model = build_model(plan.workload.model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = engine.prepare(model, optimizer, lambda: None)
    loss_of, batch = loss_for(plan.workload.model), sample_batches(plan, device)(plan.workload.train.batch_per_rank)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()))
    copied = torch.empty_like(gradients)

    def step(exchanges: bool) -> None:
        loss: Any = loss_of(model, batch)
        optimizer.zero_grad()
        if exchanges:
            engine.begin_backward()
            loss.backward()
            engine.finish_exchange()
            engine.step(lambda inner: inner.step())
        else:
            with engine.hold_exchange():
                loss.backward()
            optimizer.step()

    def seconds(way: str) -> float:
        dist.barrier()
        began = time.perf_counter()
        if rank == 0 or "alone" not in way:
            for _ in range(COPIES if "copy" in way else STEPS):
                copied.copy_(gradients) if "copy" in way else step(way == "exchanging")
        taken = (time.perf_counter() - began) / (COPIES if "copy" in way else STEPS)
        dist.barrier()
        return taken

    for exchanges in (True, False, True, False):
        step(exchanges)
    ways: Sequence[str] = ("alone", "apart", "exchanging", "copy alone", "copy")
    found: dict[str, list[float]] = {"bytes": [float(gradients.nbytes)], **{way: [] for way in ways}}
    for number in range(ROUNDS):
        for way in ways if number % 2 else ways[::-1]:  # A drift falls on all alike.
            found[way].append(seconds(way))
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    engine.stop()
