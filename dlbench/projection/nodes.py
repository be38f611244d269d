"""How unequal nodes and their steps are, and how late the slowest of more nodes is.

In logarithms, the own work of rank r in step t is W + c_t, the middle of all ranks, plus what its node and the moment
add. Of each node its slowest rank counts: h_n is the median over steps of how much longer than the median rank it
works, y_nt what is left. With m nodes a step is late by L = max over n of exp(h_n + y_nt) - 1; what all nodes have in
common (c_t) makes no node wait and is part of every mean.

* h of nodes that were not measured is of a mixture: most hosts are normal about their middle, a share of them is
  slower. Middle, scatter, share and how much slower are drawn from a prior and weighted by how likely they make the
  hosts that were measured (importance resampling; Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, section
  10.4). So k hosts that are alike still leave a share of some 1 / k of slower ones. Of fewer than `LEAST_HOSTS` hosts
  these are drawn again.
* y is drawn as it was seen, the largest of n equal nodes as the quantile U^(1/n) (David and Nagaraja, Order Statistics,
  3rd edition, 2003, section 2.1). No tail is fitted: where 1 % of the steps are spikes of one size, a fitted tail of a
  generalised Pareto distribution was off by 41 % for 64 nodes, and this by 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.lazy import Array, np
from dlbench.projection.ingredients import QUANTILES_OF_MAXIMA, NodeScatter, SlowHosts
from dlbench.projection.refusals import LEAST_HOSTS
from dlbench.stats.resampling import SEED

SLOW_SHARE = (0.15, 8.0)
"""Beta distribution of the share of slower hosts before any was seen, assumed: half of all sites have next to none, one
in ten has more than 6 %. With more of them, bands of clean machines are wider (`make bench AREA=truth.projection`)."""
SLOWER = (0.08, 0.7)
"""Median and standard deviation (of the logarithm) of how much longer a slower host works, before any was seen. Sinha
et al. (SC'22, arXiv 2208.11035) found GPUs of one model 8 % apart on average over applications and clusters, at most
22 %, and single ones 1.5 times slower than the median."""
_UNEQUAL = 0.3  # Standard deviation of how much longer slower hosts of one site work, over its mean.
_LEAST_SCATTER = 1e-3  # Of hosts: less is not known of a clock.
_WIDER = 1.5  # By how much values that are weighted scatter more than hosts leave them open.
_PROPOSALS = 8  # Sets of middle, scatter, share and slowness that are weighted, for each draw.
_NEVER = 1e-300  # A likelihood of which a logarithm is taken.
STEPS = 32  # Simulated steps that a lateness is the mean of.
_APART = 64  # So many of the slowest nodes are drawn one by one, those behind them in groups of doubling size.


def _levels(count: int) -> Array:
    """Of the quantiles of `NodeScatter.maxima`: closer together at the upper end, where the slowest are."""
    levels: Array = 1 - np.linspace(1, 0, count) ** 3
    return levels


def scatter_of(runs: Sequence[tuple[Array, Sequence[str]]]) -> NodeScatter | None:
    """How unequal nodes were in some runs of one rank count; None where no run has two ranks or more.

    `runs`: of each run the own work of its ranks, seconds above 0, shape (ranks, steps), and the host of each rank. A
    host of several runs counts once, with the mean of what it was in them.
    """
    hosts: dict[str, list[float]] = {}
    left = []
    for work, names in runs:
        if len(work) < 2:
            continue
        logs = np.log(work)
        middle = np.median(logs, axis=0)
        places = {name: [rank for rank, one in enumerate(names) if one == name] for name in dict.fromkeys(names)}
        slowest = np.stack([logs[ranks].max(axis=0) for ranks in places.values()]) - middle
        effect = np.median(slowest, axis=1)
        for name, value in zip(places, effect, strict=True):
            hosts.setdefault(name, []).append(float(value))
        # The middle of few ranks follows each of them, so that distances from it are too short by this factor.
        left.append((slowest - effect[:, None]).ravel() * (len(work) / (len(work) - 1)) ** 0.5)
    if not hosts:
        return None
    y = np.concatenate(left)
    return NodeScatter(
        hosts=tuple(float(np.mean(values)) for values in hosts.values()),
        maxima=tuple(float(one) for one in np.quantile(y, _levels(QUANTILES_OF_MAXIMA))),
        num_maxima=len(y),
    )


def lateness(
    scatter: NodeScatter | None,
    nodes: int,
    draws: int,
    *,
    is_measured: bool = False,
    slow_hosts: SlowHosts | None = None,
) -> Array:
    """Returns by how much the slowest of `nodes` nodes takes longer than a median rank (a share), mean over steps, by
    draw; 0 where nothing is known of nodes. `is_measured`: of the hosts that were measured themselves, not of any;
    `slow_hosts`: of the site's history.
    """
    if scatter is None or not scatter.hosts:
        return np.zeros(draws)
    rng = np.random.default_rng([SEED, 11])
    known = np.array(scatter.hosts)
    k = len(known)
    if is_measured and k >= nodes:
        hosts = known[rng.permuted(np.broadcast_to(np.arange(k), (draws, k)), axis=1)[:, :nodes]]
    elif is_measured or k < LEAST_HOSTS:
        hosts = known[rng.integers(0, k, (nodes, draws)).T]
    else:
        hosts = _unseen(known, nodes, draws, rng, slow_hosts)
    # Columns of nodes that are taken as equally slow: the slowest by themselves, the others in groups.
    starts = list(range(min(nodes, _APART)))
    while (after := starts[-1] + max(1, starts[-1] // 2)) < nodes:
        starts.append(after)
    sizes = np.diff([*starts, nodes])
    sums = np.add.reduceat(-np.sort(-hosts, axis=1), starts, axis=1) / sizes
    maxima = scatter.maxima or (0.0,)
    levels = _levels(len(maxima))
    late = np.zeros(draws)
    for _ in range(STEPS):
        left = np.interp(rng.random(sums.shape) ** (1 / sizes), levels, maxima)
        late += np.maximum(0.0, np.expm1((sums + left).max(axis=1)))
    return late / STEPS


def _unseen(hosts: Array, nodes: int, draws: int, rng: np.random.Generator, slow_hosts: SlowHosts | None) -> Array:
    """Returns effects of hosts that nobody measured, given those that were: logarithms, shape (draws, nodes)."""
    count, size = len(hosts), draws * _PROPOSALS
    low, middle, high = np.quantile(hosts, (0.16, 0.5, 0.84))  # One standard deviation of a normal one to either side.
    width = max((high - low) / 2, _LEAST_SCATTER)
    centre_noise, scatter_noise = rng.standard_normal((2, size))
    centre = middle + _WIDER * width / count**0.5 * centre_noise
    scatter = width * np.exp(_WIDER / count**0.5 * scatter_noise)
    alike, unlike = SLOW_SHARE[1], SLOW_SHARE[0]
    slower = SLOWER[0] * np.exp(SLOWER[1] * rng.standard_normal(size))
    if slow_hosts is not None:
        alike, unlike = alike + slow_hosts.hosts - len(slow_hosts.ratios), unlike + len(slow_hosts.ratios)
        if slow_hosts.ratios:
            slower = rng.choice(np.array(slow_hosts.ratios), size)
    share = rng.beta(unlike, alike, size)
    slower_scatter = np.hypot(scatter, _UNEQUAL * slower)
    # Logarithms of prior over proposal: centre and log of the scatter are equally likely everywhere beforehand.
    weight = (centre_noise**2 + scatter_noise**2) / 2
    for host in hosts:
        normal = (1 - share) / scatter * np.exp(-(((host - centre) / scatter) ** 2) / 2)
        slow = share / slower_scatter * np.exp(-(((host - centre - slower) / slower_scatter) ** 2) / 2)
        weight += np.log(normal + slow + _NEVER)
    chance = np.exp(weight - weight.max())
    picks = rng.choice(size, draws, p=chance / chance.sum())
    noise, chance_of_slow = rng.standard_normal((nodes, draws)).T, rng.random((nodes, draws)).T
    centre, scatter, share = centre[picks, None], scatter[picks, None], share[picks, None]
    slower, slower_scatter = slower[picks, None], slower_scatter[picks, None]
    is_slow = chance_of_slow < share
    effects: Array = centre + np.where(is_slow, slower + slower_scatter * noise, scatter * noise)
    return effects
