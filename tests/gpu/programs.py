"""Steps of a preset's network on the GPU, built as a run builds them: what tests of compiling and capturing share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlbench.node.models.build import build_model, loss_for
from dlbench.node.training.activations import trial_passes
from dlbench.node.training.precision import Precision
from dlbench.node.training.programs import Compilation, NetworkGraphs
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request, parse_set

RATE = 0.01
FIRST = 3
"""Steps that may wait, as a run's warm-up may: allocators and libraries set themselves up."""


def plan_of(workload: str, *settings: str) -> RunPlan:
    request = Request(workload=workload, preset="ci", engine="single", points=(1,), overrides=parse_set(settings))
    (plan,) = expand(request, machine_cores=2)
    return plan


@dataclass(kw_only=True)
class Trained:
    """A network after some steps of plain SGD."""

    losses: list[float]
    model: nn.Module
    compilation: Compilation | None
    graphs: NetworkGraphs | None
    kernels: int
    """Launches by the host in the last step: kernels and graphs; 0 if they were not counted."""


def trained(plan: RunPlan, steps: int, *, forbids_waits: bool = False, counts: bool = False) -> Trained:
    """Steps on one batch, seeded step by step as the measured loop does.

    Args:
        plan: gives network, precision, compile and cuda_graphs.
        steps: how many.
        forbids_waits: torch raises where the host would wait for the device, after the first steps.
        counts: the profiler counts launches in the last step.
    """
    train, device = plan.workload.train, torch.device("cuda", torch.cuda.current_device())
    precision = Precision(train, device)
    torch.manual_seed(train.seed)
    model = build_model(plan.workload.model).to(device)
    passes = trial_passes(plan, model, device, precision, loss_for(plan.workload.model))
    loss_of, batch = passes.loss_of, passes.batch_of(train.batch_per_rank)
    compilation = Compilation(plan, device) if train.compile != "none" else None
    graphs = NetworkGraphs(plan, device, precision) if train.cuda_graphs != "none" else None
    if graphs is not None:
        graphs.before_wrap(passes)
    if compilation is not None:
        compilation.after_wrap(passes, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[Tensor] = []

    def step(number: int) -> None:
        torch.manual_seed(number)
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())

    for number in range(FIRST):
        step(number)
    if compilation is not None:
        compilation.begin_measuring()
    torch.cuda.synchronize()
    if forbids_waits:
        torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(FIRST, steps - 1):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    launches = 0
    if counts:
        launches = _launches(lambda: step(steps - 1))
    else:
        step(steps - 1)
    return Trained(
        losses=[loss.item() for loss in losses], model=model, compilation=compilation, graphs=graphs, kernels=launches
    )


def _launches(step: Callable[[], None]) -> int:
    """Calls of the CUDA runtime that launch a kernel or a graph, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    return sum("LaunchKernel" in name or "GraphLaunch" in name for name in names)
