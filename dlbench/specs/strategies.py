"""Names the parallelisation strategy of a training, and checks which settings contradict it."""

from __future__ import annotations

from dlbench.specs.engine import MAX_MICROBATCHES, EmulatedSettings, EngineSpec, FsdpSettings, PipelineSettings
from dlbench.specs.layers import cut_layers
from dlbench.specs.sync import AUTO, ERROR_FEEDBACK, SyncSpec
from dlbench.specs.training import MeasureSpec, TrainSpec
from dlbench.specs.workload import Workload


def ranks_per_replica(engine: EngineSpec) -> int:
    """Returns the number of neighbouring ranks that read the same samples, because they share one network."""
    if engine.name == "pipeline":
        return engine.pipeline.stages
    return engine.fsdp.tensor_ranks if engine.name == "fsdp" else engine.spatial_ranks


def strategy_of(train: TrainSpec, engine: EngineSpec, sync: SyncSpec, *, ranks: int) -> str:
    """Returns the strategy, e.g. `data`, `serial`, `fsdp`, `zero-1`, `local-sgd`, `fsdp+tensor`, `data+pipeline`."""
    if engine.name == "fsdp" and engine.fsdp.tensor_ranks == 1:
        return "fsdp"
    if engine.name == "fsdp":
        return "tensor" if engine.fsdp.tensor_ranks == ranks else "fsdp+tensor"
    if engine.name == "emulated":
        return "asynchronous"
    if engine.name == "pipeline":
        return "pipeline" if engine.pipeline.stages == ranks else "data+pipeline"
    if engine.spatial_ranks > 1:
        return "spatial" if engine.spatial_ranks == ranks else "data+spatial"
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
    if engine.name == "emulated":
        return engine.emulated.words
    if engine.name == "pipeline":
        pipeline = engine.pipeline
        return f"{pipeline.stages} stages and {pipeline.microbatches} microbatches ({pipeline.schedule})"
    if engine.spatial_ranks > 1:
        return f"volumes cut over {engine.spatial_ranks} ranks"
    if sync.average_every is not None:
        return f"local SGD, average every {sync.average_every} updates"
    if engine.name == "ddp" and engine.ddp.shard_optimizer:
        return "optimizer state sharded (ZeRO-1)"
    return ""


def strategy_problem(
    workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec, *, ranks: int, ranks_per_node: int
) -> str | None:
    """Returns why these settings contradict each other, in one sentence with a remedy; None if they do not."""
    if engine.name == "fsdp":
        problem = _fsdp_problem(workload, engine, sync, measure, ranks, ranks_per_node)
        return problem or _tensor_problem(workload, engine, sync, ranks, ranks_per_node)
    if engine.name == "emulated":
        return _emulated_problem(workload.train, engine.emulated, measure)
    if engine.name == "pipeline":
        problem = _pipeline_problem(workload, engine.pipeline, ranks)
        return problem or _pipeline_combination_problem(workload, sync, measure)
    if engine.spatial_ranks > 1:
        return _spatial_problem(workload, engine, sync, measure, ranks_per_node)
    if sync.average_every is not None:
        return _averaging_problem(workload, engine, sync, measure)
    if engine.name == "ddp" and engine.ddp.shard_optimizer:
        return _sharded_update_problem(workload, sync)
    return None


def _refused(key: str, reasons: dict[str, tuple[bool, str]], remedy: str = "leave one of them out") -> str | None:
    for setting, (is_asked, why) in reasons.items():
        if is_asked:
            return f"{key}: cannot be combined with {setting}: {why}; {remedy}"
    return None


def _uneven_node(key: str, what: str, ranks_per_node: int) -> str:
    return (
        f"{key}: neighbouring ranks of one node share each {what}, and a node has {ranks_per_node}; set it to a "
        "divisor of that, or change --ranks"
    )


def _emulated_problem(train: TrainSpec, emulated: EmulatedSettings, measure: MeasureSpec) -> str | None:
    workers, own_updates = train.gradient_accumulation, "workers make updates within a step"
    refused = {
        "train.precision fp16": (train.precision == "fp16", f"{own_updates}, in which the loss scale would change"),
        "train.recompute and train.swap": (not train.is_in_core, own_updates),
        "train.optimizer_state host": (train.optimizer_state == "host", own_updates),
        "measure.noise_scale": (measure.noise_scale, "parts have gradients at other weights"),
    }
    problem = _refused("engine emulated", refused)
    if emulated.steps_from is None and not (emulated.work_s and all(emulated.work_s)):
        problem = "engine emulated: set engine.emulated.steps_from to the folder of a run, for times of workers"
    elif workers == 1:
        problem = (
            "engine emulated: set train.gradient_accumulation to the number of workers, 2 or more, and "
            "train.batch_per_rank to the batch of all of them"
        )
    elif emulated.policy == "groups" and (workers % emulated.group_size or emulated.group_size in (1, workers)):
        problem = (
            f"engine.emulated.group_size {emulated.group_size}: does not divide {workers} workers "
            "(train.gradient_accumulation) into two groups of two or more"
        )
    elif emulated.policy == "backup" and emulated.quorum(workers) == workers:
        problem = (
            f"engine.emulated.wait_share {emulated.wait_share:g}: is all of {workers} workers "
            f"(train.gradient_accumulation); set it to {(workers - 1) / workers:.4g} or less"
        )
    return problem


def _fsdp_problem(
    workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec, ranks: int, ranks_per_node: int
) -> str | None:
    train, optimizer = workload.train, workload.train.optimizer
    needs_whole = "it needs whole parameters and gradients"
    exchange_reason = "dlbench's own exchanges need whole gradients"
    if sync.exchange == "none":
        exchange_reason = "a pass cannot begin without the shards of other ranks"
    refused = {
        "train.compile": (train.compile != "none", "modules gather their parameters between graphs"),
        "train.cuda_graphs": (train.cuda_graphs != "none", "parameters have other addresses in each pass"),
        "train.recompute and train.swap": (not train.is_in_core, needs_whole),
        "train.optimizer_state host": (train.optimizer_state == "host", f"{needs_whole}; try engine.fsdp.offload"),
        "measure.noise_scale": (measure.noise_scale, needs_whole),
        f"sync.exchange {sync.exchange}": (sync.exchange != "flat", exchange_reason),
        f"sync.fusion {sync.fusion}": (sync.fusion != AUTO, "FSDP exchanges the gradients of a block together"),
        "sync.average_every": (sync.average_every is not None, "no rank has its own parameters to average"),
        f"sync.wire {sync.wire}": (sync.wire not in ("fp32", "bf16"), "a reduce-scatter sums fp32 or bf16 (torch)"),
        "sync.wire bf16 with train.gradient_accumulation": (
            sync.wire == "bf16" and train.gradient_accumulation > 1,
            "torch then also sums the parts of a batch in bf16",
        ),
        f"train.optimizer.implementation fused of {optimizer.name}": (
            optimizer.implementation == "fused" and optimizer.name in ("lars", "lamb"),
            "norms of whole tensors need an all-reduce within the compiled update",
        ),
        "train.optimizer.implementation fused of sgd": (
            optimizer.implementation == "fused" and optimizer.name == "sgd",
            "torch supports this kernel on sharded tensors only for AdamW",
        ),
        "engine.fsdp.shard_ranks node": (
            engine.fsdp.shard_ranks == "node" and ranks > ranks_per_node == engine.fsdp.tensor_ranks,
            "each node has one replica, so that nothing is sharded inside it",
        ),
        "train.precision fp16 with engine.fsdp.offload": (
            train.precision == "fp16" and engine.fsdp.offload,
            "ranks agree on overflows on their GPUs, but gradients are on the host",
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
        problem = f"{key}: {workload.name} has no layers that tensor parallelism divides"
        if layers:
            dimensions = "filter, channel or spatial" if any(layer.extents for layer in layers) else "filter or channel"
            problem += f"; `dlbench project runs RUNS --strategy NAME` predicts the cost of a division by {dimensions}"
        return problem
    if ranks_per_node % shared:
        return _uneven_node(key, "layer", ranks_per_node)
    for layer in divided:
        divisible = {"column": layer.filters, "row": layer.channels, "head": layer.heads}
        if (num := divisible.get(layer.tensor, 0)) % shared:
            noun = {"column": "outputs", "row": "inputs", "head": "heads"}[layer.tensor]
            return f"{key}: {layer.name} has {num} {noun}, which {shared} ranks cannot divide; set it to a divisor"
    fsdp, train = engine.fsdp, workload.train
    refused = {
        "data.staging shard": (workload.data.staging == "shard", "ranks of a replica read the same samples"),
        # torch 2.13 checks for overflows only in gradients of one mesh.
        "train.precision fp16": (train.precision == "fp16", "losses are not scaled with tensor parallelism; use bf16"),
    }
    if shared == ranks:
        reason = "all ranks are one replica, so that nothing else is sharded"
        for name in ("shard", "shard_ranks", "wrap", "prefetch", "offload"):
            is_set = getattr(fsdp, name) != FsdpSettings.model_fields[name].default
            refused[f"engine.fsdp.{name}"] = (is_set, reason)
        refused[f"sync.wire {sync.wire}"] = (sync.wire != "fp32", reason)
    refused["engine.fsdp.shard_ranks node"] = (
        fsdp.shard_ranks == "node" and shared == ranks_per_node,
        "each node is one replica, so that nothing else is sharded",
    )
    return _refused(key, refused)


def _spatial_problem(
    workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec, ranks_per_node: int
) -> str | None:
    shared, train, layers = engine.spatial_ranks, workload.train, workload.model.layer_table(workload.data)
    key = f"engine.ddp.spatial_ranks {shared}"
    if not workload.model.has_slabs:
        reason = "only CosmoFlow's volumes are cut"
        if any(layer.kind == "norm" and layer.extents for layer in layers):
            reason = "batch norm would take its statistics from a part of each sample"
        return f"{key}: {workload.name} cannot be cut into slabs: {reason}; leave it out"
    if ranks_per_node % shared:
        return _uneven_node(key, "volume", ranks_per_node)
    if not cut_layers(layers, shared):
        depth = layers[0].extents[0]
        fitting = [ranks for ranks in range(1, shared) if ranks_per_node % ranks == 0 and cut_layers(layers, ranks)]
        return (
            f"{key}: a depth of {depth} planes cannot be cut into {shared} slabs that are pooled by 2; at most "
            f"{fitting[-1]} of {ranks_per_node} ranks of a node can share it"
        )
    whole_gradients = "a rank has the gradients of its slab only"
    refused = {
        "train.compile": (train.compile != "none", "graphs would have to be split at each convolution"),
        "train.cuda_graphs": (train.cuda_graphs != "none", "planes are sent within the passes"),
        "train.recompute and train.swap": (not train.is_in_core, "recomputing would send planes again"),
        "data.staging shard": (workload.data.staging == "shard", "ranks of a replica read the same samples"),
        "engine.ddp.shard_optimizer": (engine.ddp.shard_optimizer, "both together were never compared with one rank"),
        "sync.average_every": (sync.average_every is not None, whole_gradients),
        "sync.exchange none": (sync.exchange == "none", whole_gradients),
        "dlbench's own exchange": (sync.is_own, "it replaces DDP's; leave out sync.exchange, fusion and wire"),
        "measure.noise_scale": (measure.noise_scale, whole_gradients),
    }
    return _refused(key, refused)


def _pipeline_problem(workload: Workload, pipeline: PipelineSettings, ranks: int) -> str | None:
    stages, microbatches, num_units = pipeline.stages, pipeline.microbatches, workload.model.num_units
    key = f"engine.pipeline.stages {stages}"
    if not num_units:
        return f"engine pipeline: {workload.name} cannot be cut into stages (BERT can); use --engine ddp or fsdp"
    if stages == 1:
        return f"{key}: one stage is no pipeline; set it to 2 or more, or use --engine ddp"
    if stages > num_units:
        return f"{key}: the network has {num_units} parts (embedding, layers, heads); set it to {num_units} or less"
    if ranks % stages:
        return f"{key}: each stage needs a rank of every replica, and there are {ranks}; change it or --ranks"
    batch = workload.train.batch_per_rank * stages
    if batch % microbatches:
        # torch 2.13 keeps receive buffers of the first microbatch's shape: it fails, or computes with old contents.
        divisors = [num for num in range(1, MAX_MICROBATCHES + 1) if batch % num == 0]
        nearest = [max(num for num in divisors if num < microbatches)]
        nearest += [num for num in divisors if num > microbatches][:1]
        return (
            f"engine.pipeline.microbatches {microbatches}: they must be of equal size, and {batch} samples "
            f"(train.batch_per_rank x stages) cannot be divided; set it to {' or '.join(map(str, nearest))}"
        )
    if pipeline.schedule == "1f1b" and microbatches < stages:
        return (
            f"engine.pipeline.microbatches {microbatches}: schedule 1f1b needs as many as stages ({stages}); set it to "
            "that or more, or engine.pipeline.schedule to gpipe"
        )
    return None


def _pipeline_combination_problem(workload: Workload, sync: SyncSpec, measure: MeasureSpec) -> str | None:
    train, part_of_network = workload.train, "a rank has a part of the network only"
    one_exchange = "gradients of a stage are summed in one message after the passes"
    refused = {
        "train.compile": (train.compile != "none", part_of_network),
        "train.cuda_graphs": (train.cuda_graphs != "none", "a pass waits for other ranks"),
        "train.recompute and train.swap": (not train.is_in_core, part_of_network),
        "train.optimizer_state host": (train.optimizer_state == "host", part_of_network),
        "train.precision fp16": (train.precision == "fp16", "stages would skip different updates; use bf16"),
        "train.gradient_accumulation": (
            train.gradient_accumulation > 1,
            "microbatches accumulate gradients already; set engine.pipeline.microbatches",
        ),
        "measure.noise_scale": (measure.noise_scale, part_of_network),
        "model.attention unpadded": (workload.model.padding == "unpadded", "stages receive tensors of one shape"),
        "data.staging shard": (workload.data.staging == "shard", "ranks of a replica read the same samples"),
        f"sync.exchange {sync.exchange}": (sync.exchange != "flat", one_exchange),
        f"sync.fusion {sync.fusion}": (sync.fusion != AUTO, one_exchange),
        f"sync.wire {sync.wire}": (sync.wire != "fp32", "stages send and sum fp32"),
        "sync.average_every": (sync.average_every is not None, "no rank has its own parameters to average"),
    }
    return _refused("engine pipeline", refused, "leave it out, or use --engine ddp")


def _averaging_problem(workload: Workload, engine: EngineSpec, sync: SyncSpec, measure: MeasureSpec) -> str | None:
    train, own_gradients = workload.train, "each rank has its own gradients"
    refused = {
        f"sync.exchange {sync.exchange}": (
            sync.exchange not in ("flat", "hierarchical"),
            "gradients are exchanged flat or inside groups, if at all",
        ),
        f"sync.fusion {sync.fusion}": (sync.fusion.by == "dlbench", "DDP exchanges the gradients"),
        f"sync.wire {sync.wire}": (sync.wire in ERROR_FEEDBACK, "withheld parts of gradients would never be sent"),
        "engine.ddp.shard_optimizer": (
            engine.name == "ddp" and engine.ddp.shard_optimizer,
            "each rank updates all parameters",
        ),
        "engine.ddp.static_graph": (engine.ddp.static_graph, "DDP stops exchanging after some update"),
        "train.precision fp16": (train.precision == "fp16", f"{own_gradients}, and would skip other updates"),
        "train.optimizer_state host": (train.optimizer_state == "host", "averaging needs the state on the device"),
        "measure.noise_scale": (measure.noise_scale, own_gradients),
    }
    if problem := _refused("sync.average_every", refused):
        return problem
    if engine.name != "ddp" and sync.exchanges_gradients:
        return (
            f"sync.average_every: engine {engine.name} cannot stop exchanging gradients or exchange them in groups; "
            "use sync.average_from 0 and sync.exchange flat, or --engine ddp"
        )
    return None


def _sharded_update_problem(workload: Workload, sync: SyncSpec) -> str | None:
    train = workload.train
    refused = {
        f"train.cuda_graphs {train.cuda_graphs}": (
            train.cuda_graphs != "none",
            "graphs use the addresses that parameters had before ZeRO packed them into buckets",
        ),
        "train.recompute and train.swap": (not train.is_in_core, "their plan assumes the whole state on every rank"),
        "train.optimizer_state host": (
            train.optimizer_state == "host",
            "the update on the host stores the whole state",
        ),
        "sync.exchange none": (sync.exchange == "none", "ranks would exchange parameters that have diverged"),
        "dlbench's own exchange": (sync.is_own, "it replaces DDP's; leave out sync.exchange, fusion and wire"),
    }
    return _refused("engine.ddp.shard_optimizer", refused)
