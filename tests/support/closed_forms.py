"""Closed forms that schedules and predictions are held against."""

from __future__ import annotations

from fractions import Fraction

from dlbench.costs.collectives import Layout, closed_form


def closed_form_steps(algorithm: str, layout: Layout, *, chunks: int = 1) -> int:
    """Steps of an all-reduce by its closed form; arguments as `closed_form`."""
    return closed_form(algorithm, layout, chunks=chunks).steps


def closed_form_bytes(algorithm: str, layout: Layout, num_bytes: int, *, shards: int | None = None) -> Fraction:
    """Bytes that the busiest rank of an all-reduce sends, by its closed form; arguments as `closed_form`."""
    return closed_form(algorithm, layout, shards=shards).sent * num_bytes


def ring_doubling_crossover(alpha_s: float, beta_s_per_byte: float, ranks: int) -> float | None:
    """Size from which a ring beats recursive doubling, bytes; None for two ranks, where it never does.

    n* = alpha (2 (p - 1) - log2 p) / (beta (log2 p - 2 (p - 1) / p)), for a power of two of ranks and without gamma,
    from the closed forms of both.

    Raises `ValueError`: the ranks are no power of two above 1, or beta is not positive.
    """
    log2 = ranks.bit_length() - 1
    if ranks < 2 or ranks != 1 << log2 or beta_s_per_byte <= 0:
        raise ValueError(f"no closed form for {ranks} ranks and {beta_s_per_byte} s/byte")
    if ranks == 2:
        return None
    return alpha_s * (2 * (ranks - 1) - log2) / (beta_s_per_byte * (log2 - 2 * (ranks - 1) / ranks))
