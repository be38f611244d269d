"""Names the parallelisation strategy of a training, and checks which settings contradict it.

Names are those of the projection's table (`dlbench.projection.strategies.table`).
"""

from __future__ import annotations

from dlbench.specs.engine import EngineSpec, FsdpSettings
from dlbench.specs.sync import AUTO, ERROR_FEEDBACK, SyncSpec
from dlbench.specs.training import MeasureSpec, TrainSpec
from dlbench.specs.workload import Workload


def ranks_per_replica(engine: EngineSpec) -> int:
    """Returns the number of neighbouring ranks that read the same samples, because they share each layer."""
    return engine.fsdp.tensor_ranks if engine.name == "fsdp" else 1


def strategy_of(train: TrainSpec, engine: EngineSpec, sync: SyncSpec, *, ranks: int) -> str:
    """Returns the strategy: `data`, `serial` for one rank, `fsdp`, `zero-1`, `local-sgd`, `out-of-core`, `tensor` or
    `fsdp+tensor`.
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


def sharing_words(engine: EngineSpec, sync: SyncSpec, *, ranks: int) -> str:
    """Returns e.g. `parameters sharded over all ranks`; empty for replicas that exchange gradients in each step."""
    if engine.name == "fsdp":
        fsdp = engine.fsdp
        sharded = "parameters" if fsdp.shard == "parameters" else "gradients and optimizer state"
        where = "over all ranks" if fsdp.shard_ranks == "all" else "within nodes"
        words = {
            f"{sharded} sharded {where}": not 1 < fsdp.tensor_ranks == ranks,
            f"tensor parallel over {fsdp.tensor_ranks} ranks": fsdp.tensor_ranks > 1,
            "offloaded to the host": fsdp.offload,
        }
        return ", ".join(text for text, applies in words.items() if applies)
    if sync.average_every is not None:
        return f"local SGD, average every {sync.average_every} updates"
    return "optimizer state sharded (ZeRO-1)" if engine.name == "ddp" and engine.ddp.shard_optimizer else ""


def strategy_problem(
    workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec, *, ranks: int, ranks_per_node: int
) -> str | None:
    """Returns why these settings contradict each other, in one sentence with a remedy; None if they do not."""
    if engine.name == "fsdp":
        problem = _fsdp_problem(workload, engine, sync, measure, ranks, ranks_per_node)
        return problem or _tensor_problem(workload, engine, sync, ranks, ranks_per_node)
    if sync.average_every is not None:
        return _averaging_problem(workload, engine, sync, measure)
    if engine.name == "ddp" and engine.ddp.shard_optimizer:
        return _sharded_update_problem(workload, sync)
    return None


def _refused(key: str, reasons: dict[str, tuple[bool, str]], remedy: str = "leave one of them out") -> str | None:
    for setting, (is_asked, why) in reasons.items():
        if is_asked:
            return f"{key}: {setting} does not go with it: {why}; {remedy}"
    return None


def _fsdp_problem(
    workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec, ranks: int, ranks_per_node: int
) -> str | None:
    train, optimizer = workload.train, workload.train.optimizer
    needs_whole, torch_decides = (
        "it needs whole parameters and gradients",
        "FSDP exchanges a block's gradients together",
    )
    refused = {
        "train.compile": (train.compile != "none", "modules gather their parameters between graphs"),
        "train.cuda_graphs": (train.cuda_graphs != "none", "parameters lie elsewhere in each pass"),
        "train.recompute and train.swap": (not train.is_in_core, needs_whole),
        "train.optimizer_state host": (train.optimizer_state == "host", f"{needs_whole}; try engine.fsdp.offload"),
        "measure.noise_scale": (measure.noise_scale, needs_whole),
        f"sync.exchange {sync.exchange}": (
            sync.exchange != "flat",
            "a pass cannot begin without the shares of other ranks"
            if sync.exchange == "none"
            else "dlbench's own exchanges take whole gradients",
        ),
        f"sync.fusion {sync.fusion}": (sync.fusion != AUTO, torch_decides),
        "sync.average_every": (sync.average_every is not None, "no rank has parameters of its own to average"),
        f"sync.wire {sync.wire}": (sync.wire not in ("fp32", "bf16"), "a reduce-scatter sums fp32 or bf16 (torch)"),
        "sync.wire bf16 with train.gradient_accumulation": (
            sync.wire == "bf16" and train.gradient_accumulation > 1,
            "torch then sums the parts of a batch in bf16, too",
        ),
        f"train.optimizer.implementation fused of {optimizer.name}": (
            optimizer.implementation == "fused" and optimizer.name in ("lars", "lamb"),
            "norms of whole tensors need an all-reduce within the compiled update",
        ),
        "train.optimizer.implementation fused of sgd": (
            optimizer.implementation == "fused" and optimizer.name == "sgd",
            "torch has no rule for its kernel on shares of tensors, as it has for AdamW",
        ),
        "engine.fsdp.shard_ranks node": (
            engine.fsdp.shard_ranks == "node" and ranks > ranks_per_node == engine.fsdp.tensor_ranks,
            "a node holds one replica, and nothing is sharded inside it",
        ),
        "train.precision fp16 with engine.fsdp.offload": (
            train.precision == "fp16" and engine.fsdp.offload,
            "ranks agree on overflows by their GPUs, and gradients lie on the host",
        ),
    }
    return _refused("engine fsdp", refused, "leave it out, or use --engine ddp")


def _tensor_problem(
    workload: Workload, engine: EngineSpec, sync: SyncSpec, ranks: int, ranks_per_node: int
) -> str | None:
    shared = engine.fsdp.tensor_ranks
    if shared == 1:
        return None
    key = f"engine.fsdp.tensor_ranks {shared}"
    layers = workload.model.layer_table(workload.data)
    divided = [layer for layer in layers if layer.tensor]
    if not divided:
        rows = "filter, channel or spatial" if any(layer.extents for layer in layers) else "filter or channel"
        priced = (
            f"; `dlbench project runs RUNS --strategy NAME` prices what sharing them by {rows} would take"
            if layers
            else ""
        )
        return f"{key}: {workload.name} has no layers that tensor parallelism divides{priced}"
    if ranks_per_node % shared:
        return (
            f"{key}: neighbouring ranks of one node share each layer, and a node has {ranks_per_node}; set it to a "
            "divisor of that, or change --ranks"
        )
    for layer in divided:
        parts = {"column": layer.filters, "row": layer.channels, "head": layer.heads}
        if (num := parts.get(layer.tensor, 0)) % shared:
            what = {"column": "outputs", "row": "inputs", "head": "heads"}[layer.tensor]
            return (
                f"{key}: {layer.name} has {num} {what}, which {shared} ranks cannot share evenly; set it to a divisor"
            )
    fsdp, is_one = engine.fsdp, shared == ranks
    sharding = ("shard", "shard_ranks", "wrap", "prefetch", "offload")
    alone = {
        f"engine.fsdp.{field}": getattr(fsdp, field) != FsdpSettings.model_fields[field].default for field in sharding
    }
    alone[f"sync.wire {sync.wire}"] = sync.wire != "fp32"
    refused = {
        "data.staging shard": (workload.data.staging == "shard", "ranks of a replica read the same samples"),
        # Its look for overflows takes gradients of one mesh (torch 2.13).
        "train.precision fp16": (workload.train.precision == "fp16", "losses are not scaled here; use bf16"),
        **{
            setting: (is_one and acts, "all ranks are one replica, and shard nothing else")
            for setting, acts in alone.items()
        },
        "engine.fsdp.shard_ranks node": (
            fsdp.shard_ranks == "node" and shared == ranks_per_node,
            "a node is one replica, whose ranks shard nothing else",
        ),
    }
    return _refused(key, refused)


def _averaging_problem(workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec) -> str | None:
    train, is_apart = workload.train, "each rank has gradients of its own"
    refused = {
        f"sync.exchange {sync.exchange}": (
            sync.exchange not in ("flat", "hierarchical"),
            "gradients travel flat or inside groups, if at all",
        ),
        f"sync.fusion {sync.fusion}": (sync.fusion.by == "dlbench", "DDP exchanges the gradients"),
        f"sync.wire {sync.wire}": (
            sync.wire in ERROR_FEEDBACK,
            "what it holds back of gradients would never be sent",
        ),
        "engine.ddp.shard_optimizer": (
            engine.name == "ddp" and engine.ddp.shard_optimizer,
            "each rank updates all parameters",
        ),
        "engine.ddp.static_graph": (engine.ddp.static_graph, "from some update on DDP exchanges nothing"),
        "train.precision fp16": (train.precision == "fp16", f"{is_apart}, and would leave out other updates"),
        "train.optimizer_state host": (train.optimizer_state == "host", "the device holds what is averaged"),
        "measure.noise_scale": (measure.noise_scale, is_apart),
    }
    if problem := _refused("sync.average_every", refused):
        return problem
    if engine.name != "ddp" and sync.exchanges_gradients:
        return (
            f"sync.average_every: engine {engine.name} cannot stop exchanging gradients, nor do it inside groups; use "
            "sync.average_from 0 and sync.exchange flat, or --engine ddp"
        )
    return None


def _sharded_update_problem(workload: Workload, sync: SyncSpec) -> str | None:
    train = workload.train
    refused = {
        f"train.cuda_graphs {train.cuda_graphs}": (
            train.cuda_graphs != "none",
            "graphs hold parameters where they lay before ZeRO packed them into buckets",
        ),
        "train.recompute and train.swap": (not train.is_in_core, "their plan counts the whole state on every rank"),
        "train.optimizer_state host": (train.optimizer_state == "host", "the host's update keeps all of the state"),
        "sync.exchange none": (sync.exchange == "none", "ranks would send each other parameters trained apart"),
        "dlbench's own exchange": (sync.is_own, "it takes DDP's place; leave sync.exchange, fusion and wire"),
    }
    return _refused("engine.ddp.shard_optimizer", refused)
