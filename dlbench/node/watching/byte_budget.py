"""Who may write how much of `watch.max_bytes`, and which ranks are watched closely."""

from __future__ import annotations

from itertools import pairwise

from dlbench.specs.plan import RunPlan

STAGE_BYTES = 2_000
"""Room of a rank outside of the window: its stages, and nothing else."""


def window_ranks(plan: RunPlan) -> tuple[int, ...]:
    """Ranks whose layers and messages are watched, ascending; none without a window.

    They are spread evenly over the run, rank 0 among them, and over the places of a node: with a fixed stride they
    would often all be first on their node, beside its sampler.
    """
    watch, ranks = plan.watch, plan.layout.ranks
    if watch is None or watch.window_steps == 0:
        return ()
    number = min(watch.window_ranks, ranks)
    edges = [part * ranks // number for part in range(number + 1)]
    return tuple(first + part % (end - first) for part, (first, end) in enumerate(pairwise(edges)))


def sample_bytes(plan: RunPlan) -> int:
    """Bytes of one node's samples: a third of the limit, shared evenly over the nodes; 0 where nothing is watched."""
    return _third(plan) // plan.layout.nodes


def span_bytes(plan: RunPlan, rank: int) -> int:
    """Bytes of one rank's spans: two thirds of the limit; ranks outside of the window have room for stages only.

    0 where nothing is watched.
    """
    total, ranks = 2 * _third(plan), plan.layout.ranks
    window = window_ranks(plan)
    if not window:
        return total // ranks
    outside = min(STAGE_BYTES, total // ranks)
    if rank not in window:
        return outside
    return (total - outside * (ranks - len(window))) // len(window)


def _third(plan: RunPlan) -> int:
    return plan.watch.max_bytes // 3 if plan.watch is not None else 0
