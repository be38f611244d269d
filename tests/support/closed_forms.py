"""All-reduces in the closed forms of the literature, written down apart from the schedules that they are held against.

Costs: alpha seconds per message, beta seconds a byte and direction (each rank sends and takes one message at a time),
gamma seconds a byte reduced; n bytes, p ranks in m groups of g.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dlbench.errors import UserError
from dlbench.perfmodels.schedules import Layout, invalid


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """An all-reduce in closed form: seconds = alpha x `alpha` + n beta x `beta` + n gamma x `gamma`, and counts.

    For algorithms without groups, all messages cost the same, wherever ranks are; for hierarchical and leader, `alpha`
    and `beta` are inside a group.
    """

    steps: int
    """Steps."""
    sent: Fraction
    """Bytes that the busiest rank sends, over n."""
    alpha: int
    """Start-ups one after the other."""
    beta: Fraction
    """Bytes one after the other on the busiest port, over n."""
    gamma: Fraction
    """Bytes reduced one after the other, over n."""
    alpha_across: int = 0
    """Start-ups one after the other between groups; hierarchical and leader only."""
    beta_across: Fraction = Fraction(0)
    """Bytes one after the other between groups, over n; hierarchical and leader only."""


def closed_form(
    algorithm: str, layout: Layout, *, shards: int | None = None, chunks: int = 1, shared_link: bool = True
) -> ClosedForm:
    """The closed form of an all-reduce.

    Sources: ring, recursive doubling and halving, Thakur, Rabenseifner & Gropp 2005 (their section 4), a number of
    ranks that is no power of two by folding the surplus: + 2 alpha + 2 n beta + n gamma; leader, Jia et al. 2018;
    hierarchical, Mikami et al. 2018; double-binary-tree, Sanders, Speck & Träff 2009, here with each phase in
    depth + chunks - 1 steps, in which a rank takes two chunks.

    `algorithm`: one of `ALGORITHMS["allreduce"]`. `layout`: ranks and groups; groups matter for hierarchical and leader
    alone. `shards`: servers of parameter-server, beside workers on the first ranks; none: every rank is one. `chunks`:
    of double-binary-tree. `shared_link`: whether the ranks of a group share one link to other groups (phi = group
    size), or have one each. Raises `UserError`: no such algorithm, groups that do not divide the ranks, more servers
    than ranks.
    """
    problem = invalid("allreduce", algorithm, layout.ranks, group_size=layout.group_size, shards=shards)
    if problem:
        raise UserError(problem)
    p = layout.ranks
    if p == 1:
        return ClosedForm(steps=0, sent=Fraction(0), alpha=0, beta=Fraction(0), gamma=Fraction(0))
    if algorithm in ("hierarchical", "leader"):
        return _grouped_form(algorithm, layout, shared_link)
    if algorithm == "double-binary-tree":
        return _double_tree_form(p, chunks)
    share = Fraction(p - 1, p)
    if algorithm == "ring":
        return ClosedForm(steps=2 * (p - 1), sent=2 * share, alpha=2 * (p - 1), beta=2 * share, gamma=share)
    if algorithm == "direct":
        return ClosedForm(steps=2, sent=2 * share, alpha=2 * (p - 1), beta=2 * share, gamma=share)
    if algorithm == "parameter-server":
        k = shards or p
        taken = Fraction(p - 1, k)
        return ClosedForm(steps=2, sent=Fraction(p + k - 2, k), alpha=2 * (p - 1), beta=2 * taken, gamma=taken)
    if algorithm == "binomial-tree":
        depth = (p - 1).bit_length()
        whole = Fraction(depth)
        return ClosedForm(steps=2 * depth, sent=whole, alpha=2 * depth, beta=2 * whole, gamma=whole)
    return _folded_form(algorithm, p)


def _folded_form(algorithm: str, p: int) -> ClosedForm:
    log2 = p.bit_length() - 1
    power = 1 << log2
    fold = int(p != power)
    if algorithm == "recursive-doubling":
        steps, sent, reduced = log2, Fraction(log2), Fraction(log2)
    else:  # both kinds of halving and doubling
        steps, reduced = 2 * log2, Fraction(power - 1, power)
        sent = 2 * reduced
    return ClosedForm(
        steps=steps + 2 * fold, sent=sent + fold, alpha=steps + 2 * fold, beta=sent + 2 * fold, gamma=reduced + fold
    )


def _double_tree_form(p: int, chunks: int) -> ClosedForm:
    depth = p.bit_length() - 1
    phase = depth + chunks - 1
    # Two messages in each step of a phase. In trees of 2^depth ranks the root has one child: its last step has one
    # message, and all steps have one if it is the only child there is.
    messages = chunks if p == 2 else 2 * phase - (p == 1 << depth)
    taken = Fraction(messages, 2 * chunks)
    return ClosedForm(
        steps=2 * phase,
        sent={2: Fraction(1), 3: Fraction(3, 2)}.get(p, Fraction(2)),
        alpha=2 * messages,
        beta=2 * taken,
        gamma=taken,
    )


def _grouped_form(algorithm: str, layout: Layout, shared_link: bool) -> ClosedForm:
    g, m = layout.group_size, layout.num_groups
    inside, across = Fraction(g - 1, g), Fraction(m - 1, m)
    if algorithm == "hierarchical":
        return ClosedForm(
            steps=2 * (g - 1) + 2 * (m - 1),
            sent=2 * inside + 2 * across / g,
            alpha=2 * (g - 1),
            beta=2 * inside,
            gamma=inside + across / g,
            alpha_across=2 * (m - 1),
            beta_across=2 * across * (1 if shared_link else Fraction(1, g)),
        )
    return ClosedForm(
        steps=4 * (g - 1) + 2 * (m - 1),
        sent=3 * inside + 2 * across,
        alpha=4 * (g - 1),
        beta=4 * inside,
        gamma=inside + across,
        alpha_across=2 * (m - 1),
        beta_across=2 * across,
    )


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
