"""Collectives in the closed forms of the literature, an oracle of counts and prices; written down apart from schedules.

Sources: Thakur, Rabenseifner & Gropp 2005 (section 4), a number of ranks that is no power of two by folding the
surplus; double binary tree, Sanders, Speck & Träff 2009, here with each phase in L + c - 1 steps in which a rank takes
two chunks; hierarchical, Mikami et al. 2018, the sum of its levels; leader, Jia et al. 2018.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from dlbench.perfmodels.schedules import Layout, power_below
from dlbench.specs.comm import Collective

Number = int | Fraction


class Form(NamedTuple):
    """Steps, and what they cost; bytes in lengths of the vector. Without groups all messages are inside."""

    steps: Number
    sent: Number  # By the busiest rank.
    starts: Number
    along: Number  # Bytes one after the other.
    added: Number = 0
    starts_across: Number = 0
    along_across: Number = 0  # Of hierarchical times the flows of a link.


def closed_form(
    collective: Collective, algorithm: str, layout: Layout, *, shards: int | None = None, chunks: int = 1
) -> Form | None:
    """Between two ranks or more, whose parts are whole; None of a reduce-scatter or all-gather by halving or doubling
    of ranks that are no power of two.

    `shards`: servers of parameter-server, beside workers on the first ranks. `chunks`: of the vector.
    """
    p, g, m, k, c = layout.ranks, layout.group_size, layout.num_groups, shards or layout.ranks, chunks
    q, dedicated = power_below(p), shards or 1
    log, up = q.bit_length() - 1, (p - 1).bit_length()
    share, of_group, of_groups = Fraction(p - 1, p), Fraction(g - 1, g), Fraction(m - 1, m)
    # Of a double tree, messages that a rank takes in a phase: two in each step. In trees of 2^L ranks the root has one
    # child: its last step has one message, and all steps have one if it is the only child there is.
    taken = c if p == 2 else 2 * (log + c - 1) - (p == q)
    # Of hierarchical: chunk c is at its step s - c in step s, between two ranks with one message for all chunks.
    across = 2 * (m - 1) + c - 1 if m > 1 else 0
    inside = 2 * (g - 1) + 2 * (m - 1) + c - 1
    if c == 1:
        inside = 2 * (g - 1)
    elif c <= 2 * (m - 1):
        inside = 2 * (g + c - 2)
    # In a binomial gather the member there sends most, or the one before it.
    middle = 1 << up >> 1
    gathered = Fraction(max(p - middle, middle // 2), p)
    halving = Form(2 * log, 2 * Fraction(q - 1, q), 2 * log, 2 * Fraction(q - 1, q), Fraction(q - 1, q))
    ring = Form(2 * (p - 1), 2 * share, 2 * (p - 1), 2 * share, share)
    half, tree = Form(p - 1, share, p - 1, share), Form(up, share, up, share)
    forms = {
        "allreduce naive": Form(1, p - 1, p - 1, p - 1, p - 1),
        "allreduce ring": ring,
        "allreduce direct": ring._replace(steps=2),
        "allreduce parameter-server": Form(
            2, Fraction(p + k - 2, k), 2 * (p - 1), Fraction(2 * (p - 1), k), Fraction(p - 1, k)
        ),
        # Workers on the first ranks; the busiest rank is a server, or a worker that has more servers.
        "allreduce dedicated-servers": Form(
            2,
            max(Fraction(p - dedicated, dedicated), 1),
            2 * max(p - dedicated, dedicated),
            2 * max(Fraction(p - dedicated, dedicated), 1),
            Fraction(p - dedicated, dedicated),
        ),
        "allreduce binomial-tree": Form(2 * up, up, 2 * up, 2 * up, up),
        "allreduce double-binary-tree": Form(
            2 * (log + c - 1),
            {2: 1, 3: Fraction(3, 2)}.get(p, 2),
            2 * taken,
            Fraction(taken, c),
            Fraction(taken, 2 * c),
        ),
        "allreduce recursive-doubling": Form(log, log, log, log, log),
        "allreduce recursive-halving-doubling": halving,
        "allreduce shifted-halving-doubling": halving,
        "allreduce hierarchical": Form(
            2 * (g - 1) + 2 * (m - 1) + c - 1,
            2 * of_group + Fraction(2 * (m - 1), p),
            inside if g > 1 else 0,
            2 * of_group,
            share,
            across,
            Fraction(2 * (m - 1), p),
        ),
        "allreduce leader": Form(
            4 * (g - 1) + 2 * (m - 1),
            3 * of_group + 2 * of_groups,
            4 * (g - 1),
            4 * of_group,
            of_group + of_groups,
            2 * (m - 1),
            2 * of_groups,
        ),
        "reduce-scatter ring": half._replace(added=share),
        "reduce-scatter direct": half._replace(steps=1, added=share),
        "reduce-scatter recursive-halving": Form(log, share, log, share, share),
        "all-gather ring": half,
        "all-gather direct": half._replace(steps=1),
        "all-gather recursive-doubling": Form(log, share, log, share),
        "broadcast binomial-tree": Form(up, up, up, up),
        "broadcast chain": Form(p + c - 2, 1, p + c - 2, Fraction(p + c - 2, c)),
        "broadcast scatter-all-gather": Form(up + p - 1, 2 * share, up + p - 1, 2 * share),
        "reduce binomial-tree": Form(up, 1, up, up, up),
        "reduce scatter-gather": Form(p - 1 + up, share + gathered, p - 1 + up, 2 * share, share),
        "scatter binomial-tree": tree,
        "gather binomial-tree": tree._replace(sent=gathered),
        "scatter linear": half,
        "gather linear": half._replace(sent=Fraction(1, p)),
        "all-to-all pairwise": half,
        "all-to-all direct": half._replace(steps=1),
    }
    form = forms[f"{collective} {algorithm}"]
    if p == q or not algorithm.startswith(("recursive", "shifted")):
        return form
    if collective != "allreduce":
        return None
    # Surplus ranks give their vectors, and get the result.
    return Form(form.steps + 2, form.sent + 1, form.starts + 2, form.along + 2, form.added + 1)
