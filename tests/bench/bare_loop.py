"""One rank of the comparison: dlbench's measured loop against a bare loop, in turns, in one process.

Both train the same network with the same optimiser, batches and engine; the bare one is what a user would write by
hand, with Horovod's or DDP's own calls and nothing recorded. Usage: ``python -m tests.bench.bare_loop PLAN OUT``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from dlbench.node.__main__ import load_plan
from dlbench.node.cores import bind
from dlbench.node.ranks import detect
from dlbench.records.folder import RunFolder

PAIRS = 12


def main(plan_file: Path, out: Path) -> None:
    plan = load_plan(plan_file)
    place = detect(plan)
    binding = bind(plan, place)

    import torch

    from dlbench.node.devices import device_for
    from dlbench.node.sync.build_engine import build_engine
    from dlbench.node.training import phases
    from dlbench.node.training.loop import TrainingLoop
    from dlbench.node.training.progress import Progress, Watchdog
    from dlbench.node.training.run import prepare
    from tests.support.one_rank import context_of

    torch.set_num_threads(binding.threads)
    folder = RunFolder(plan_file.parent)
    device = device_for(plan, place)
    engine = build_engine(plan, folder, place, device)
    engine.start()
    timer = phases.timer_for(device, synchronise=False)
    progress = Progress(plan, folder, place)
    watchdog = Watchdog(600, lambda reason: None)
    watchdog.start()
    context = context_of(plan, engine=engine, device=device, place=place, status=progress, watchdog=watchdog)
    state = prepare(context, timer)

    def bare(steps: int) -> None:
        optimizer, clip = state.optimizer, plan.workload.train.optimizer.clip_norm
        for step in range(steps):
            batch = {name: tensor.to(device) for name, tensor in next(state.batches).items()}
            loss = state.loss(state.wrapped, batch)
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = state.rate.at(step)
            if clip is not None and hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(state.wrapped.parameters(), clip)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(state.wrapped.parameters(), clip)
                optimizer.step()
            optimizer.zero_grad()

    def recorded(_: int) -> None:
        TrainingLoop(context, state, timer).run(folder.path / f"block-{place.rank}-{time.monotonic_ns()}.steps")

    def timed(block: object) -> float:
        engine.barrier()
        start = time.perf_counter()
        block(plan.measure.measured_steps)  # type: ignore[operator]
        engine.barrier()
        return time.perf_counter() - start

    bare(3)
    pairs = []
    for pair in range(PAIRS):
        # Which goes first alternates, so that a drift falls on both alike.
        order = (bare, recorded) if pair % 2 == 0 else (recorded, bare)
        times = {block.__name__: timed(block) for block in order}
        pairs.append(times["bare"] / times["recorded"])
    watchdog.stop()
    if place.rank == 0:
        out.write_text(json.dumps(pairs))
    state.source.close()
    engine.barrier()
    engine.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
