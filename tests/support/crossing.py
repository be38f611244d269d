"""Where all-reduces cross, from the closed forms of the literature."""

from __future__ import annotations


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
