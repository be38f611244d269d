"""Models the scatter of nodes and their steps, and the lateness of the slowest of more nodes.

In logarithms, the own work of a node's slowest rank is the median of all ranks plus h_n (its median over steps) and
y_nt; a step is late by max exp(h_n + y_nt) - 1. h of other nodes is a mixture of normal and slower hosts (importance
resampling; Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, section 10.4). y is drawn from measured values,
the largest of n nodes as the quantile U^(1/n) (David and Nagaraja, Order Statistics, 3rd edition, 2003, section 2.1):
with spikes in 1 % of the steps, a fitted generalised Pareto tail was off by 41 % for 64 nodes, this by 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.lazy import Array, np
from dlbench.projection.ingredients import QUANTILES_OF_MAXIMA, NodeScatter, SlowHosts
from dlbench.projection.projected import LEAST_HOSTS
from dlbench.stats.multiplicity import SEED

SLOW_SHARE = (0.15, 8.0)
"""Assumed prior (beta distribution) of the share of slower hosts: half of all sites have almost none, one in ten has
more than 6 %. With a larger share, bands of clean machines are wider (`make bench AREA=truth.projection`)."""
SLOWER = (0.08, 0.7)
"""Prior median and standard deviation (of the logarithm) of the additional time of a slower host. Sinha
et al. (SC'22, arXiv 2208.11035) found GPUs of one model 8 % apart on average over applications and clusters, at most
22 %, and single ones 1.5 times slower than the median."""
_UNEQUAL = 0.3  # Standard deviation of the slowness of slower hosts of one site, over its mean.
_LEAST_SCATTER = 1e-3  # Least scatter of hosts, by the resolution of clocks.
_WIDER = 1.5  # Scatter of the proposals over that of the estimates.
_PROPOSALS = 8  # Weighted proposals of centre, scatter, share and slowness for each draw.
_NEVER = 1e-300  # Least likelihood, for its logarithm.
STEPS = 32  # Simulated steps of a mean lateness.
_SINGLE = 64  # Slowest nodes that are drawn one by one, the others in groups of growing size.


def _levels(count: int) -> Array:
    """Returns the levels of the quantiles of `NodeScatter.maxima`, which are closer at the upper end."""
    levels: Array = 1 - np.linspace(1, 0, count) ** 3
    return levels


def scatter_of(runs: Sequence[tuple[Array, Sequence[str]]]) -> NodeScatter | None:
    """Returns the scatter of nodes in runs of one rank count; None if no run has two ranks. `runs`: own work, seconds,
    shape (ranks, steps), and each rank's host. A host of several runs counts once, with its mean.
    """
    hosts: dict[str, list[float]] = {}
    residuals = []
    for work, names in runs:
        if len(work) < 2:
            continue
        logs = np.log(work)
        middle = np.median(logs, axis=0)
        ranks_by_host: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            ranks_by_host.setdefault(name, []).append(rank)
        slowest = np.stack([logs[ranks].max(axis=0) for ranks in ranks_by_host.values()]) - middle
        effect = np.median(slowest, axis=1)
        for name, value in zip(ranks_by_host, effect, strict=True):
            hosts.setdefault(name, []).append(float(value))
        # The median of few ranks follows each of them, so distances from it are too short by this factor.
        residuals.append((slowest - effect[:, None]).ravel() * (len(work) / (len(work) - 1)) ** 0.5)
    if not hosts:
        return None
    y = np.concatenate(residuals)
    return NodeScatter(
        hosts=tuple(float(np.mean(values)) for values in hosts.values()),
        maxima=tuple(float(quantile) for quantile in np.quantile(y, _levels(QUANTILES_OF_MAXIMA))),
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
    """Returns the lateness of the slowest of `nodes` nodes behind a median rank (a share), mean over steps, by draw.
    `is_measured`: of the measured hosts, not of others; `slow_hosts`: of the history.
    """
    if scatter is None or not scatter.hosts:
        return np.zeros(draws)
    rng = np.random.default_rng([SEED, 11])
    measured = np.array(scatter.hosts)
    k = len(measured)
    if is_measured and k >= nodes:
        hosts = measured[rng.permuted(np.broadcast_to(np.arange(k), (draws, k)), axis=1)[:, :nodes]]
    elif is_measured or k < LEAST_HOSTS:
        hosts = measured[rng.integers(0, k, (nodes, draws)).T]
    else:
        hosts = _unseen(measured, nodes, draws, rng, slow_hosts)
    # Nodes that are treated as equally slow: the slowest alone, the others in groups.
    starts = list(range(min(nodes, _SINGLE)))
    while (after := starts[-1] + max(1, starts[-1] // 2)) < nodes:
        starts.append(after)
    sizes = np.diff([*starts, nodes])
    sums = np.add.reduceat(-np.sort(-hosts, axis=1), starts, axis=1) / sizes
    maxima = scatter.maxima or (0.0,)
    levels = _levels(len(maxima))
    late = np.zeros(draws)
    for _ in range(STEPS):
        noise = np.interp(rng.random(sums.shape) ** (1 / sizes), levels, maxima)
        late += np.maximum(0.0, np.expm1((sums + noise).max(axis=1)))
    return late / STEPS


def _unseen(hosts: Array, nodes: int, draws: int, rng: np.random.Generator, slow_hosts: SlowHosts | None) -> Array:
    """Returns effects of hosts that were not measured, as logarithms, shape (draws, nodes)."""
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
    # Logarithms of prior over proposal; the prior of centre and log of the scatter is uniform.
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
