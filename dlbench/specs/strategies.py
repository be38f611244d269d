"""How a training is shared out over ranks, as one name, and which settings of it cannot go together.

Names are those of the projection's table (`dlbench.projection.strategies.table`).
"""

from __future__ import annotations

from dlbench.specs.engine import EngineSpec
from dlbench.specs.sync import SyncSpec
from dlbench.specs.training import MeasureSpec, TrainSpec
from dlbench.specs.workload import Workload


def ranks_per_replica(engine: EngineSpec) -> int:
    """Neighbouring ranks that read the same samples, because they share each layer's work."""
    return engine.fsdp.tensor_ranks if engine.name == "fsdp" else 1


def strategy_of(train: TrainSpec, engine: EngineSpec, sync: SyncSpec, *, ranks: int) -> str:
    """What ranks share: `data` for replicated data parallelism, `serial` for one rank, `fsdp`, `zero-1`, `local-sgd`,
    `out-of-core`; `tensor` and `fsdp+tensor` where layers are shared as well.
    """
    if engine.name == "fsdp":
        tensor = engine.fsdp.tensor_ranks
        return "fsdp" if tensor == 1 else "tensor" if tensor == ranks else "fsdp+tensor"
    if sync.average_every is not None and ranks > 1:
        return "local-sgd"
    if engine.name == "ddp" and engine.ddp.shard_optimizer and ranks > 1:
        return "zero-1"
    if not train.is_in_core:
        return "out-of-core"
    return "data" if ranks > 1 else "serial"


def strategy_problem(
    workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec, *, ranks: int, ranks_per_node: int
) -> str | None:
    """Why these settings cannot go together, in one sentence with what would be right; None if they can."""
    if engine.name == "fsdp":
        return _fsdp_problem(workload, engine, sync, measure) or _tensor_problem(workload, engine, ranks_per_node)
    if engine.name == "ddp" and engine.ddp.shard_optimizer and ranks > 1:
        return _sharded_update_problem(workload, sync)
    if sync.average_every is not None:
        return _averaging_problem(workload, engine, sync)
    return None


def _fsdp_problem(workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec) -> str | None:
    train = workload.train
    refused = {
        "train.compile": train.compile != "none",
        "train.cuda_graphs": train.cuda_graphs != "none",
        "train.recompute and train.swap": not train.is_in_core,
        "train.optimizer_state host": train.optimizer_state == "host",
        "measure.noise_scale": measure.noise_scale,
        f"sync.exchange {sync.exchange}": sync.exchange != "flat",
        f"sync.fusion {sync.fusion}": sync.fusion != "auto",
        f"sync.inside {sync.inside}": sync.inside != "backend",
        "sync.average_every": sync.average_every is not None,
        f"sync.wire {sync.wire}": sync.wire not in ("fp32", "bf16"),
    }
    for key, is_asked in refused.items():
        if is_asked:
            return f"engine fsdp: {key} does not go with sharded parameters; leave it out, or use --engine ddp"
    return None


def _tensor_problem(workload: Workload, engine: EngineSpec, ranks_per_node: int) -> str | None:
    return None


def _averaging_problem(workload: Workload, engine: EngineSpec, sync: SyncSpec) -> str | None:
    return None


def _sharded_update_problem(workload: Workload, sync: SyncSpec) -> str | None:
    train = workload.train
    refused = {
        # They compute with the parameters where they lay before ZeRO packed them into its buckets.
        f"train.cuda_graphs {train.cuda_graphs}": train.cuda_graphs != "none",
        # The plan of memory counts all of the optimizer's state on every rank.
        "train.recompute and train.swap": not train.is_in_core,
        # The host's update keeps all of it, too.
        "train.optimizer_state host": train.optimizer_state == "host",
        "sync.exchange none": sync.exchange == "none",
        "sync.average_every": sync.average_every is not None,
        "dlbench's own exchange (sync.exchange, sync.fusion, sync.wire, sync.inside)": sync.is_own,
    }
    for key, is_asked in refused.items():
        if is_asked:
            return f"engine.ddp.shard_optimizer: {key} does not go with it; leave one of them out"
    return None
