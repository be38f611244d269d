"""Below which leaf switch each node of a run is: nodes in the order of switches, or out of it.

Ranks in the order of switches send one flow of a ring over a leaf's uplinks, ranks in another order several. How far a
launcher's order is from that of switches is told by the largest measured point on several leaf switches; where none was
recorded, it is drawn between sorted and shuffled.
"""

from __future__ import annotations

from dlbench.lazy import Array, Times, np
from dlbench.projection.ingredients import Ingredients
from dlbench.stats.resampling import SEED

Order = tuple[float, int]  # Share of the nodes that are in random order among themselves, and its seed.

_SORTED: Order = (0.0, 0)
_NUM_ORDERS = 8  # That stand for a launcher's; a price is made of each.
_SHARES = (0.0, 0.5, 1.0)  # Sorted, half shuffled, shuffled: as likely as each other before anything was recorded.
_NEVER = 1e-300  # A chance by which another is divided.
_SEEDS = 100  # Random orders of each share that are held against a recorded one.


def orders_of(ingredients: Ingredients) -> tuple[Order, ...]:
    """Returns orders of nodes that may be the launcher's, equally likely, from sorted to shuffled: those that cross
    leaf switches as often as the recorded one.
    """
    if ingredients.nodes_per_leaf is None:
        return (_SORTED,)
    orders = [(share, seed) for share in _SHARES for seed in range(_SEEDS)]
    off = np.zeros(len(orders))
    recorded = [np.array(point.leaves) for point in ingredients.points if len(set(point.leaves or ())) > 1]
    if recorded:
        leaves = recorded[-1]
        crossings = np.array([_crossings(_reordered(np.sort(leaves), order)) for order in orders])
        off = np.abs(crossings - _crossings(leaves))
    likely = np.flatnonzero(off == off.min())
    middles = (np.arange(_NUM_ORDERS) + 0.5) / _NUM_ORDERS * len(likely)
    return tuple(orders[index] for index in likely[middles.astype(int)])


def leaves_at(ingredients: Ingredients, ranks: int, order: Order) -> tuple[int, ...] | None:
    """Returns the number of the leaf switch above each node of a run, as recorded at a measured rank count; None: nodes
    lie in the order of switches.
    """
    for point in ingredients.points:
        if point.ranks == ranks and point.leaves is not None:
            return point.leaves
    nodes, leaf = ingredients.nodes_of(ranks), ingredients.nodes_per_leaf
    if leaf is None or nodes <= leaf or not order[0]:
        return None
    return tuple(_reordered(np.arange(nodes) // leaf, order).tolist())


def levelled(orders: tuple[Order, ...], chances: Array) -> Array:
    """Returns chances of orders of nodes, the first axis, alike within a share: the launcher's own is none of them."""
    shares = np.array([share for share, _ in orders])
    of_order = chances.reshape(len(orders), -1).sum(axis=1)
    of_share = np.array([of_order[shares == share].mean() for share in shares])
    levels: Array = chances * (of_share / np.maximum(of_order, _NEVER))[:, None, None]
    return levels


def _reordered(by_switch: Times, order: Order) -> Times:
    """Returns leaf numbers of nodes in an order, given those in the order of switches."""
    share, seed = order
    rng = np.random.default_rng([SEED, 23, seed])
    moved = rng.permutation(len(by_switch))[: round(share * len(by_switch))]
    leaves = by_switch.copy()
    leaves[moved] = by_switch[rng.permutation(moved)]
    return leaves


def _crossings(leaves: Times) -> int:
    """Returns how many nodes of a ring have their next one below another leaf switch."""
    return int(np.count_nonzero(leaves != np.roll(leaves, -1)))
