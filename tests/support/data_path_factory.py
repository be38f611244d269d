"""What runs say of their samples, made: staging, reading and shuffling, as records have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlbench.specs.plan import RunPlan
from tests.support.run_factory import Story, constant, plans, write_run

REAL = "/data/pictures"
NUM_SAMPLES = 4096
MB = 1_000_000


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
