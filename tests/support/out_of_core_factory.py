"""Made runs whose figures are known: out of core with a known chain and waits, and what runs say of their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlbench.perfmodels.out_of_core.planner import fixed_plan, plan_blocks
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.records.out_of_core import MemoryResult, RankMemory, TransferSpan
from dlbench.specs.out_of_core import BlockPlan, Chain, Recompute, Swap, TransferRates, Unit
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import MS, StepTimes, Story, constant, plans, write_run

MIB = 1 << 20
RATES = TransferRates(tier="a file on node-local disk", out_bytes_per_s=2e9, in_bytes_per_s=2e9, latency_s=1e-4)
OTHER_MS = {"input": 2.0, "h2d": 0.0, "exchange": 1.0, "optimizer": 5.0, "other": 2.0}
"""Beside the passes; 10 ms."""

Setting = tuple[Recompute, Swap]
METHODS: tuple[Setting, ...] = (
    ("none", "none"),
    ("blocks", "none"),
    ("none", "offload"),
    ("none", "streamed"),
    ("blocks", "streamed"),
    ("planned", "planned"),
)
REAL = "/data/pictures"
NUM_SAMPLES = 4096
MB = 1_000_000


def a_chain(batch: int = 8, units: int = 8) -> Chain:
    """Equal units: per sample 1 MiB saved, 1/8 MiB of input, 1 ms forward and 2 ms backward over all units."""
    return Chain(
        units=tuple(
            Unit(
                name=f"layers.{number}",
                forward_s=1e-3 * batch / units,
                backward_s=2e-3 * batch / units,
                saved_bytes=MIB * batch // units,
                input_bytes=0 if number == 0 else MIB * batch // (8 * units),
                input_saved=number > 0,
            )
            for number in range(units)
        ),
        batch=batch,
        output_bytes=MIB * batch // (8 * units),
        turn_s=1e-3,
        state_bytes=4 * MIB,
        outside_bytes=MIB,
    )


def in_core_bytes(chain: Chain) -> int:
    return fixed_plan(chain, None, "none", "none").predicted.peak_bytes


def plan_for(chain: Chain, recompute: Recompute, swap: Swap, capacity: int | None) -> BlockPlan:
    if "planned" not in (recompute, swap):
        return fixed_plan(chain, RATES, recompute, swap)
    assert capacity is not None
    return plan_blocks(chain, RATES, capacity, recompute=recompute == "planned", swap=swap == "planned")


def memory_result(plan: RunPlan) -> MemoryResult:
    """What a run says of its activations: each rank recomputed and waited as predicted, steps without a scatter."""
    train = plan.workload.train
    parts = train.gradient_accumulation
    chain = a_chain(train.batch_per_rank // parts)
    whole = in_core_bytes(chain)
    made = plan_for(chain, train.recompute, train.swap, train.memory.capacity_bytes(whole))
    steps = plan.measure.measured_steps
    times = steps * parts
    schedule = simulate(chain, made.blocks, RATES, made.capacity_bytes)
    return MemoryResult(
        recompute=train.recompute,
        swap=train.swap,
        tier=None if train.swap == "none" else RATES.tier,
        parts=parts,
        chain=chain,
        rates=None if train.swap == "none" else RATES,
        plan=made,
        in_core_bytes=whole,
        profile_s=0.5,
        ranks=tuple(
            RankMemory(
                rank=rank,
                steps=steps,
                activation_peak_bytes=made.predicted.peak_bytes - chain.fixed_bytes,
                over_budget_bytes=0,
                device_peak_bytes=made.predicted.peak_bytes + MIB,
                swapped_out_bytes=made.predicted.swapped_bytes * times,
                swapped_in_bytes=made.predicted.swapped_bytes * times,
                room_wait_s=schedule.room_wait_s * times,
                swap_wait_s=schedule.swap_wait_s * times,
                recompute_s=made.predicted.recompute_s * times,
            )
            for rank in range(plan.layout.ranks)
        ),
        timeline=tuple(
            TransferSpan(lane=one.lane, kind=one.kind, block=one.block, start_s=one.start_s, end_s=1.05 * one.end_s)
            for one in schedule.operations
            if one.block is not None
        ),
    )


def pass_times(told: MemoryResult, slower: float = 1.0) -> StepTimes:
    """Steps as predicted, `slower` times as long in the passes."""
    whole = told.plan.predicted.pass_s * told.parts * 1e3 * slower
    phases = [OTHER_MS["input"], OTHER_MS["h2d"], whole / 3, whole * 2 / 3, OTHER_MS["exchange"], OTHER_MS["optimizer"]]
    return lambda rank, step: ([round(ms * MS) for ms in phases], round(OTHER_MS["other"] * MS))


def write_memory_run(
    out: Path,
    plan: RunPlan,
    slower: float = 1.0,
    change: Callable[[MemoryResult], MemoryResult] = lambda told: told,
    settings: Sequence[dict[str, Any]] = (),
) -> MemoryResult:
    """A run of the plan's method; in core it says nothing of its activations."""
    told = change(memory_result(plan))
    record = {} if plan.workload.train.is_in_core else {"memory": told.model_dump(mode="json")}
    write_run(out, plan, pass_times(told, slower), Story(record=record, settings=settings))
    return told


def method_plans(
    methods: Sequence[Setting] = METHODS,
    batches: Sequence[int] = (8, 16, 32),
    capacity: str = "20MiB",
    repeats: int = 5,
    **request: Any,
) -> list[RunPlan]:
    """Plans of every method with every batch, a series each."""
    found = []
    for recompute, swap in methods:
        chosen = {"train.recompute": recompute, "train.swap": swap}
        if "planned" in (recompute, swap):
            chosen["train.memory.capacity"] = capacity
        asked = {"points": (1,), "repeats": repeats, "series": f"{recompute}-{swap}", **request}
        overrides = {**chosen, **asked.pop("overrides", {})}
        sweep = {"train.batch_per_rank": tuple(batches)}
        found += plans(overrides=overrides, sweep=sweep, **asked)
    return found


def staging_result(
    strategy: str = "replicate", *, seconds: float = 20.0, nodes: int = 1, **changes: Any
) -> dict[str, Any]:
    """Staging that copied 100 MB to each node."""
    return {
        "strategy": strategy,
        "tier": "local",
        "method": "copy",
        "streams": 4,
        "seconds": seconds,
        "nodes": [
            {
                "node_rank": node,
                "host": f"n{node}",
                "path": "/local/dlbench/set",
                "needed_bytes": 100 * MB,
                "free_bytes": 900 * MB,
                "copied_bytes": 100 * MB,
                "reused_bytes": 0,
                "items": 400,
                "seconds": seconds,
            }
            for node in range(nodes)
        ],
        "verified": "CRC-32 of every file",
        "kept": False,
        **changes,
    }


def read_epoch(
    epoch: int = 0, *, fetch_s: float = 3.0, prepare_s: float = 1.0, storage: float | None = 1.0, **changes: Any
) -> dict[str, Any]:
    """An epoch of 50 MB; `storage`: share of it from storage, None: not counted."""
    return {
        "epoch": epoch,
        "is_whole": True,
        "samples": NUM_SAMPLES,
        "tier_bytes": {"shared": 50 * MB},
        "storage_bytes": None if storage is None else round(storage * 50 * MB),
        "fetch_s": fetch_s,
        "prepare_s": prepare_s,
        "wait_s": 0.5,
        "seconds": 10.0,
        **changes,
    }


def reading_result(epochs: Sequence[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """Two readers, and one cold epoch unless said otherwise."""
    return {
        "loader_workers": 2,
        "prefetch_batches": 4,
        "trials": [],
        "cache": "emptied, by the book",
        "cache_in_force": True,
        "cached_share": 0.0,
        "epochs": [read_epoch()] if epochs is None else list(epochs),
        **changes,
    }


def audit_epoch(epoch: int = 0, **changes: Any) -> dict[str, Any]:
    """An epoch in which everything was read once."""
    return {
        "epoch": epoch,
        "is_whole": True,
        "visits": NUM_SAMPLES,
        "left_out": 0,
        "twice": 0,
        "never": 0,
        "sent": 0,
        "received": 0,
        "sent_bytes": 0,
        "novelty": 0.0 if epoch else None,
        "label_distance": 0.25,
        **changes,
    }


def shuffle_result(
    shuffle: str = "local", epochs: Sequence[dict[str, Any]] | None = None, **changes: Any
) -> dict[str, Any]:
    """Two epochs without errors, unless said otherwise."""
    return {
        "shuffle": shuffle,
        "partition": None if shuffle == "global" else "contiguous",
        "exchanged_share": float(shuffle.partition(":")[2] or (shuffle == "global")),
        "errors": [],
        "held_samples_peak": None if shuffle == "global" else NUM_SAMPLES // 2,
        "exchange_wait_s": 0.0,
        "audit_s": 0.004,
        "epochs": [audit_epoch(0), audit_epoch(1)] if epochs is None else list(epochs),
        **changes,
    }


def data_story(**record: Any) -> Story:
    """A run that read real data; `record`: parts of the record."""
    return Story(data={"kind": "jpeg-tree", "num_samples": NUM_SAMPLES}, record=record)


def write_tiers(
    out: Path,
    *,
    prepare_ms: float = 20.0,
    fetch_ms: float = 50.0,
    reading: dict[str, Any] | None = None,
    **request: Any,
) -> list[RunPlan]:
    """A series of `dlbench io --tiers`: 100 ms with synthetic data, `prepare_ms` more cached, `fetch_ms` more cold.

    Args:
        out: the folder of runs.
        prepare_ms: what preparing costs, milliseconds per step.
        fetch_ms: what fetching costs.
        reading: changes of what cold runs say of their reading.
        request: the series.
    """
    made = plans(**{"data": REAL, "tiers": True, "points": (2,), **request})
    for plan in made:
        drift = 1 + plan.series.repeat / 1000
        variant = plan.series.variant
        wait = {"plain": prepare_ms + fetch_ms, "cached-input": prepare_ms, "synthetic-input": 0.0}[variant]
        told: dict[str, Any] = {"reading": None}
        if variant == "plain":
            told = {"reading": reading_result(**(reading or {}))}
        if variant == "cached-input":
            told = {
                "reading": reading_result(
                    [read_epoch(fetch_s=0.1, storage=0.0)], cache="filled, by the book", cached_share=1.0
                )
            }
        write_run(
            out,
            plan,
            constant([part * drift for part in (wait, 0.0, 30.0, 50.0, 10.0, 10.0)]),
            data_story(**told) if variant != "synthetic-input" else Story(),
        )
    return made
