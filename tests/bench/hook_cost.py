"""What dlbench's communication hook costs DDP: the same training with it and without any, in turns, at two ranks.

Usage, one rank: ``python -m tests.bench.hook_cost RANK ADDRESS_FILE OUT``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import Figure, median_interval

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
PAIRS = 9
STEPS = 10
WARMUP_STEPS = 5
LIMIT_S = 600
NAME = "DDP with dlbench's hook, nothing watched, over DDP without any hook, bert ci, 2 ranks"


def figures() -> Iterator[Figure]:
    """Throughput with the hook over that without."""
    about = {"name": NAME, "unit": "ratio of throughputs", "goal": "at least 0.99"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        out = folder / "ratios.json"
        command = [sys.executable, "-W", "ignore", "-m", "tests.bench.hook_cost"]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, str(rank), str(folder / "address"), str(out)], cwd=ROOT, env=hidden)
            for rank in range(RANKS)
        ]
        try:
            codes = [process.wait(timeout=LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()  # without effect on those that have ended
        if any(codes):
            yield Figure(**about, value=None, reason="a rank failed; its error is above")
            return
        value, low, high = median_interval(found := json.loads(out.read_text()))
    # Where the interval holds the goal, the benchmark cannot tell.
    met = True if low >= 0.99 else False if high < 0.99 else None
    yield Figure(**about, value=value, low=low, high=high, n=len(found), met=met)


def main(rank: int, address_file: Path, out: Path) -> None:
    """Both modules of one rank in turns; rank 0 writes the ratios."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from dlbench.node.models.build import build_model, loss_for
    from dlbench.node.sync.ddp import WatchedHook, hook_for_ddp
    from dlbench.node.sync.timing import BackwardWatch
    from dlbench.node.training.activations import sample_batches
    from dlbench.specs.expand import expand
    from dlbench.specs.requests import Request

    torch.set_num_threads(1)
    device = torch.device("cpu")
    dist.init_process_group("gloo", init_method=address_file.absolute().as_uri(), rank=rank, world_size=RANKS)
    (plan,) = expand(Request(workload="bert", preset="ci", engine="single", points=(1,)), machine_cores=1)
    loss_of, batch = loss_for(plan.workload.model), sample_batches(plan, device)(plan.workload.train.batch_per_rank)

    def module(is_hooked: bool) -> nn.Module:
        torch.manual_seed(0)
        wrapped = nn.parallel.DistributedDataParallel(build_model(plan.workload.model), broadcast_buffers=False)
        if is_hooked:
            hook = WatchedHook("fp32", 1, "gloo", BackwardWatch(device), lambda: None)
            wrapped.register_comm_hook(None, hook_for_ddp(hook))
        return wrapped

    modules = {is_hooked: module(is_hooked) for is_hooked in (True, False)}

    def seconds(is_hooked: bool, steps: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            modules[is_hooked].zero_grad()
            loss_of(modules[is_hooked], batch).backward()
        return time.perf_counter() - began

    for is_hooked in modules:
        seconds(is_hooked, WARMUP_STEPS)
    ratios = []
    for pair in range(PAIRS):
        # Which goes first alternates, so that a drift falls on both alike.
        times = {is_hooked: seconds(is_hooked, STEPS) for is_hooked in ((True, False) if pair % 2 else (False, True))}
        ratios.append(times[False] / times[True])
    if rank == 0:
        out.write_text(json.dumps(ratios))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
