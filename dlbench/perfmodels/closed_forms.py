"""Collectives in the closed forms of the literature, written down apart from the schedules that they are held against.

Costs: α seconds a message, β seconds a byte and direction (each rank sends and takes one message at a time), γ seconds
a byte reduced, A and B those of messages between groups, φ of which are on a link at once; n bytes, p ranks in m groups
of g, k servers, c chunks, L = ⌊log2 p⌋, D = ⌈log2 p⌉, q = 2^L.

Sources: Thakur, Rabenseifner & Gropp 2005 (section 4), a number of ranks that is no power of two by folding the
surplus; double binary tree, Sanders, Speck & Träff 2009, here with each phase in L + c - 1 steps in which a rank takes
two chunks; hierarchical, Mikami et al. 2018, the sum of its levels, which overlap where there are chunks; leader, Jia
et al. 2018; the ideal, Chan, Heimlich, Purkayastha & van de Geijn 2007 (the largest of their lower bounds of each
cost).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from dlbench.perfmodels.schedules import Layout, power_below
from dlbench.specs.comm import Collective, Level, NetworkModel

_RING = "2 * (p - 1) * α + 2 * (p - 1) / p * n * β + (p - 1) / p * n * γ"
_HALF = "(p - 1) * α + (p - 1) / p * n * β"  # Of a ring: one of its two phases.
_LOG, _TREE = "L * α + (p - 1) / p * n * β", "D * α + (p - 1) / p * n * β"
_HALVING = ("2 * L", "2 * (q - 1) / q * n", "2 * L * α + 2 * (q - 1) / q * n * β + (q - 1) / q * n * γ")

FORMS: dict[str, tuple[str, str, str]] = {
    "allreduce naive": ("1", "(p - 1) * n", "(p - 1) * (α + n * β + n * γ)"),
    "allreduce ring": ("2 * (p - 1)", "2 * (p - 1) / p * n", _RING),
    "allreduce direct": ("2", "2 * (p - 1) / p * n", _RING),
    "allreduce parameter-server": (
        "2", "(p + k - 2) / k * n", "2 * (p - 1) * α + 2 * (p - 1) / k * n * β + (p - 1) / k * n * γ",
    ),
    "allreduce binomial-tree": ("2 * D", "D * n", "2 * D * (α + n * β) + D * n * γ"),
    "allreduce double-binary-tree": ("2 * (L + c - 1)", "S * n", "2 * T * α + T / c * n * β + T / (2 * c) * n * γ"),
    "allreduce recursive-doubling": ("L", "L * n", "L * (α + n * β + n * γ)"),
    "allreduce recursive-halving-doubling": _HALVING,
    "allreduce shifted-halving-doubling": _HALVING,
    "allreduce hierarchical": (
        "2 * (g - 1) + 2 * (m - 1) + c - 1", "2 * (g - 1) / g * n + 2 * (m - 1) / p * n",
        "I * α + 2 * (g - 1) / g * n * β + V * A + 2 * (m - 1) / p * φ * n * B"
        " + (p - 1) / p * n * γ",
    ),
    "allreduce leader": (
        "4 * (g - 1) + 2 * (m - 1)", "3 * (g - 1) / g * n + 2 * (m - 1) / m * n",
        "4 * (g - 1) * α + 4 * (g - 1) / g * n * β + 2 * (m - 1) * A + 2 * (m - 1) / m * n * B"
        " + ((g - 1) / g + (m - 1) / m) * n * γ",
    ),
    "reduce-scatter ring": ("p - 1", "(p - 1) / p * n", f"{_HALF} + (p - 1) / p * n * γ"),
    "reduce-scatter direct": ("1", "(p - 1) / p * n", f"{_HALF} + (p - 1) / p * n * γ"),
    "reduce-scatter recursive-halving": ("L", "(p - 1) / p * n", f"{_LOG} + (p - 1) / p * n * γ"),
    "all-gather ring": ("p - 1", "(p - 1) / p * n", _HALF),
    "all-gather direct": ("1", "(p - 1) / p * n", _HALF),
    "all-gather recursive-doubling": ("L", "(p - 1) / p * n", _LOG),
    "broadcast binomial-tree": ("D", "D * n", "D * (α + n * β)"),
    "broadcast chain": ("p + c - 2", "n", "(p + c - 2) * (α + n / c * β)"),
    "broadcast scatter-all-gather": ("D + p - 1", "2 * (p - 1) / p * n", f"{_TREE} + {_HALF}"),
    "reduce binomial-tree": ("D", "n", "D * (α + n * β + n * γ)"),
    "reduce scatter-gather": ("p - 1 + D", "(p - 1 + H) / p * n", f"{_HALF} + (p - 1) / p * n * γ + {_TREE}"),
    "scatter binomial-tree": ("D", "(p - 1) / p * n", _TREE),
    "gather binomial-tree": ("D", "H / p * n", _TREE),
    "scatter linear": ("p - 1", "(p - 1) / p * n", _HALF),
    "gather linear": ("p - 1", "n / p", _HALF),
    "all-to-all pairwise": ("p - 1", "(p - 1) / p * n", _HALF),
    "all-to-all direct": ("1", "(p - 1) / p * n", _HALF),
}  # fmt: skip
"""Steps, bytes that the busiest rank sends, seconds: by collective and algorithm."""

_FOLD = (" + 2", " + n", " + 2 * α + 2 * n * β + n * γ")  # Surplus ranks give their vectors, and get the result.


@dataclass(frozen=True)
class Formula:
    """An expression and what its letters stand for."""

    expression: str
    letters: Mapping[str, Fraction]

    def __call__(self, **costs: float | Fraction) -> Any:
        """Its value where n and the costs are these: exact for fractions."""
        # Expressions of this module alone, so that what is printed is what is computed.
        return eval(self.expression, {"__builtins__": {}}, {**self.letters, **costs})  # noqa: S307

    def __str__(self) -> str:
        """As the literature writes it."""
        text = re.sub(r" ?(\*|/) ?", lambda sign: {"*": " ", "/": "/"}[sign[1]], self.expression)
        is_power = self.letters["p"] == self.letters["q"]
        for letter, shown in {"L": "log2 p", "D": "log2 p", "q": "p"}.items() if is_power else ():
            text = re.sub(rf"\b{letter}\b", shown, text)
        return text


class ClosedForm(NamedTuple):
    """A collective in closed form; without groups all messages cost the same (α, β), wherever ranks are."""

    steps: Formula
    sent: Formula  # Bytes that the busiest rank sends.
    seconds: Formula


def closed_form(
    collective: Collective, algorithm: str, layout: Layout, *, shards: int | None = None, chunks: int = 1
) -> ClosedForm | None:
    """The closed form between two ranks or more, whose parts are whole; None of a reduce-scatter or all-gather by
    halving or doubling of ranks that are no power of two.

    `layout`: ranks and groups; groups matter for hierarchical and leader alone. `shards`: servers of parameter-server,
    beside workers on the first ranks; none: every rank is one. `chunks`: of the vector, which levels and trees overlap.
    """
    found: Sequence[str] | None = FORMS.get(f"{collective} {algorithm}")
    p, power = layout.ranks, power_below(layout.ranks)
    is_folded = p != power and algorithm.startswith(("recursive", "shifted"))
    if found is None or (is_folded and collective != "allreduce"):
        return None
    if is_folded:
        found = [one + folded for one, folded in zip(found, _FOLD, strict=True)]
    # Of a double tree, messages that a rank takes in a phase: two in each step. In trees of 2^L ranks the root has one
    # child: its last step has one message, and all steps have one if it is the only child there is.
    taken = "c" if p == 2 else "(2 * (L + c - 1) - 1)" if p == power else "(2 * (L + c - 1))"
    half = 1 << (p - 1).bit_length() >> 1  # In a binomial gather the member there sends most, or the one before it.
    # Of hierarchical: chunk c is at its step s - c in step s, between two ranks with one message for all chunks.
    g, m, later = layout.group_size, layout.num_groups, " + c - 1" if chunks > 1 else ""
    inside = "2 * (g - 1)" if chunks == 1 else "2 * (g + c - 2)" if chunks <= 2 * (m - 1) else ""
    words = {"I": "0" if g == 1 else inside or f"(2 * (g - 1) + 2 * (m - 1){later})"}
    words["V"] = "0" if m == 1 else f"(2 * (m - 1){later})" if later else "2 * (m - 1)"
    words |= {"T": taken, "S": {2: "1", 3: "3 / 2"}.get(p, "2"), "H": str(max(p - half, half // 2))}
    letters = _letters(layout, shards or p, chunks)
    return ClosedForm(*(Formula(re.sub(r"\b[TSHIV]\b", lambda one: words[one[0]], text), letters) for text in found))


def ideal_seconds(collective: Collective, layout: Layout, num_bytes: int, network: NetworkModel) -> float:
    """The longest of the least costs of any algorithm, each by itself: start-ups, a rank's bytes (over all levels at
    once) and bytes reduced by the cheapest messages of a network, and start-ups and bytes between nodes. Sums of them
    are no bound: transfers, additions and levels may be under way at once.
    """

    def least(ranks: int, levels: Sequence[Level], flows: int) -> float:
        alpha_s = min(piece.alpha_s for level in levels for piece in level.pieces)
        betas = [min(piece.beta_s_per_byte for piece in level.pieces) for level in levels]
        beta = 1 / sum(1 / one for one in betas) if all(betas) else 0.0
        sent = 1.0 if collective in ("broadcast", "reduce") else (ranks - 1) / ranks
        sent *= 2 if collective == "allreduce" else 1
        return max((ranks - 1).bit_length() * alpha_s, sent * num_bytes * beta / flows)

    inside, between = network.levels.get("inside"), network.levels.get("across")
    ranks, nodes = layout.ranks, -(-layout.ranks // layout.node_size)
    used = [one for one, is_used in ((inside, layout.node_size > 1), (between, nodes > 1)) if one and is_used]
    is_summed = collective in ("allreduce", "reduce-scatter", "reduce")
    found = max(least(ranks, used, 1), is_summed * (ranks - 1) / ranks * num_bytes * network.gamma_s_per_byte)
    if between is None or not 1 < nodes < ranks:
        return found
    return max(found, least(nodes, [between], between.links or layout.node_size))


def _letters(layout: Layout, shards: int = 1, chunks: int = 1) -> dict[str, Fraction]:
    p, power = layout.ranks, power_below(layout.ranks)
    values = {"p": p, "g": layout.group_size, "m": layout.num_groups, "k": shards, "c": chunks, "q": power}
    values |= {"L": power.bit_length() - 1, "D": (p - 1).bit_length()}
    return {letter: Fraction(value) for letter, value in values.items()}
