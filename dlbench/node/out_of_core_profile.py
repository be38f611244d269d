"""``python -P -m dlbench.node.out_of_core_profile``: measures the memory and times of a network, without training.
Reads the plan of a run of one rank on stdin, and prints a `MemoryProfile` of `dlbench.records.out_of_core` as one JSON
line, or for a `LayerOrder` its `LayerPartTimes`; or an error on stderr. Nothing heavy is
imported before the process is bound to cores.
"""

from __future__ import annotations

import socket
import sys
import traceback
from collections.abc import Callable

from pydantic import ValidationError

from dlbench.errors import DlbenchError, ExitCode, UserError
from dlbench.node.failures import failure_of
from dlbench.node.ranks import RankCores, RankPlace, bind, check_sharing
from dlbench.records.out_of_core import LayerOrder, LayerPartTimes, MemoryProfile
from dlbench.specs.plan import RunPlan
from dlbench.specs.problems import problem_of
from dlbench.units import counted

_MAX_ORDER = 1 << 22


def main(text: str, output: Callable[[str], object] = print) -> int:
    """Measures as the plan says; returns the exit code."""
    kind: type[RunPlan | LayerOrder] = LayerOrder if '"dlbench.layer-order"' in text else RunPlan
    try:
        try:
            order: RunPlan | LayerOrder = kind.model_validate_json(text)
        except ValidationError as error:
            raise UserError(f"request on stdin: {problem_of(kind, error)}") from None
        output(measure(order).model_dump_json())
    except Exception as error:
        failure = failure_of(error)
        if not isinstance(error, DlbenchError):
            traceback.print_exc()
        print(f"dlbench: error: {failure.reason}", file=sys.stderr, flush=True)
        return int(failure.exit_code)
    return int(ExitCode.OK)


def measure(order: RunPlan | LayerOrder) -> MemoryProfile | LayerPartTimes:
    """Measures the passes of one rank's network, block by block, and its transfers; or one layer in parts."""
    plan = order.plan if isinstance(order, LayerOrder) else order
    place = RankPlace(
        rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, host=socket.gethostname(), token=""
    )
    binding = bind(plan, place)
    threads = plan.layout.cores_per_rank
    rank_cores = RankCores(rank=0, host=place.host, cores=binding.cores, threads=threads, pinned=binding.pinned)
    import torch

    from dlbench.node.devices import device_for
    from dlbench.node.models.build import build_model, loss_for
    from dlbench.node.out_of_core.device_memory import keep_freed
    from dlbench.node.out_of_core.planning import alone
    from dlbench.node.training.activations import trial_passes, workbench
    from dlbench.node.training.layer_parts import time_parts
    from dlbench.node.training.precision import Precision

    workload = plan.workload
    device = device_for(plan, place)
    if device.type == "cpu":
        keep_freed()  # as training does
    name = f"{device}, {counted(binding.threads, 'thread')}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    _, sharing = check_sharing([rank_cores])
    torch.manual_seed(workload.train.seed)
    precision = Precision(workload.train, device)
    if isinstance(order, LayerOrder):
        times = time_parts(order, device, name)
        return times.model_copy(update={"warnings": (*sharing, *precision.early_warnings)})
    model = build_model(workload.model).to(device)
    loss = loss_for(workload.model, workload.train.label_smoothing)
    bench = workbench(plan, place, device, trial_passes(plan, model, device, precision, loss), alone)
    _, chain, rates, warnings = bench.measure()
    return MemoryProfile(
        format="dlbench.memory-profile", device=name, chain=chain, rates=rates, warnings=(*sharing, *warnings)
    )


if __name__ == "__main__":
    sys.exit(main(sys.stdin.read(_MAX_ORDER)))
