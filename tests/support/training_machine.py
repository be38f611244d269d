"""A simulated machine that trains: what its runs would record at any node count, by a truth that is planted.

Ranks compute with scatter of hosts and moments, messages follow each other as soon as the slowest rank has their
gradients, and hidden messages slow computing down. What it says is the account of a run, as `dlbench.analysis.causes`
defines it, so that `Ingredients` can be made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.ingredients import Ingredients, NodeScatter, PointFigures, RunFigures
from dlbench.projection.nodes import scatter_of
from dlbench.records.exchange import ExchangeResult
from dlbench.specs.comm import Level, NetworkModel, Piece

Array = np.ndarray
REFERENCE = 8  # Nodes at which costs are those of `Machine.network`: congestion is over these.


def network_of(
    inside: tuple[float, float] = (5e-6, 1e-10), across: tuple[float, float] = (2e-5, 1e-9), **changes: object
) -> NetworkModel:
    """Alpha and beta inside a node and between nodes, of which each has one adapter."""
    levels = [
        Level(pieces=(Piece(alpha_s=alpha, beta_s_per_byte=beta),), links=links)
        for (alpha, beta), links in ((inside, None), (across, 1))
    ]
    return NetworkModel(system="simulated", transport="none", inside=levels[0], across=levels[1]).model_copy(
        update=changes
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The truth. Seconds, bytes."""

    ranks_per_node: int = 4
    input_s: float = 0.002
    forward_s: float = 0.03
    backward_s: float = 0.06
    optimizer_s: float = 0.005
    host_s: float = 0.003
    sizes: tuple[int, ...] = (25_000_000,) * 4
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)  # When messages are ready, of the backward pass.
    network: NetworkModel = field(default_factory=network_of)
    algorithm: str = "ring"
    tree_bias: float | None = None
    """What the library takes a double binary tree to cost, over its true cost: it takes that instead where it seems
    cheaper than `algorithm`; None: it knows none."""
    carrier: str = "gloo"
    congestion: float = 0.0  # By which messages take longer with each doubling of the nodes (1).
    slowed: float = 0.0  # Seconds that computing takes longer per second of hidden exchange.
    # Logarithms of what hosts take longer.
    hosts: Callable[[np.random.Generator, int], Array] = lambda generator, nodes: np.zeros(nodes)
    jitter: float = 0.0  # Standard deviation of what a node takes longer in a step, as logarithm.
    spikes: float = 0.0  # Share of steps in which a node takes `spike_ratio` times as long.
    spike_ratio: float = 1.2
    session_sd: float = 0.0
    run_sd: float = 0.0
    delay_s: float = 0.0  # Between the last gradient of a message and its start: not in what runs record of messages.
    unmodelled: float = 0.0  # What the host does more with each doubling of the nodes, of a step's computing (1).
    leaf_nodes: int | None = None  # Nodes below a leaf switch; None: all are below one.
    taper: float = 1.0  # Links of the nodes of a leaf over its uplinks.
    placement: Literal["sorted", "shuffled"] = "sorted"  # Order of the nodes of a run: by leaf switch, or random.
    placement_seed: int = 1  # Of the random order, which is one for all runs of the machine.
    records_switches: bool = True  # Whether runs say below which leaf switch their nodes are.
    steps: int = 40

    def leaves(self, nodes: int) -> tuple[int, ...]:
        """The leaf switch of each node of a run, in the order of ranks: a run takes no more leaves than it needs."""
        order = np.arange(nodes)
        if self.placement == "shuffled":
            order = np.argsort(np.random.default_rng(self.placement_seed).random(nodes))
        return tuple((order // (self.leaf_nodes or nodes)).tolist())

    def price(self, names: Sequence[str], size: int, layout: Layout, network: NetworkModel) -> float:
        """Seconds of a message of so many bytes, by the one of the algorithms that the library takes."""
        costs = [predict("allreduce", name, size, layout, network) for name in names]
        if self.tree_bias is not None and costs[0] > costs[1] * self.tree_bias:
            return costs[1]
        return costs[0]

    def prices(self, nodes: int) -> Array:
        group, network = self.ranks_per_node, self.network
        layout = Layout(ranks=nodes * group, group_size=group)
        if self.leaf_nodes is not None and network.across is not None:
            layout = replace(layout, leaves=self.leaves(nodes))
            uplinks = max(1, round((network.across.links or group) * self.leaf_nodes / self.taper))
            beyond = network.across.model_copy(update={"links": uplinks})
            network = network.model_copy(update={"beyond": beyond})
        names = [self.algorithm]
        if self.tree_bias is not None:
            names.append("double-binary-tree")
        known = {size: self.price(names, size, layout, network) for size in set(self.sizes)}
        more = (1 + self.congestion) ** math.log2(nodes / REFERENCE) if nodes > 1 else 1.0
        return np.array([known[size] * more for size in self.sizes])

    def run(
        self, generator: np.random.Generator, nodes: int, hosts: Array, name: str, session: str, drift: float = 1.0
    ) -> tuple[RunFigures, Array]:
        """A run on nodes of these effects, and the own work of its ranks, shape (ranks, steps)."""
        g = self.ranks_per_node
        noise = self.jitter * generator.standard_normal((nodes, self.steps))
        noise += math.log(self.spike_ratio) * (generator.random(noise.shape) < self.spikes)
        factors = np.exp(np.repeat(hosts[:, None] + noise, g, axis=0))
        speed = drift * math.exp(self.run_sd * generator.standard_normal())
        costs = self.prices(nodes) * speed if nodes * g > 1 else np.zeros(len(self.sizes))
        middle, slowest = np.median(factors, axis=0), factors.max(axis=0)
        before, backward = (self.input_s + self.forward_s) * speed, np.full(self.steps, self.backward_s * speed)
        for _ in range(3):  # Until what is hidden and what it slows down agree.
            end = np.zeros(self.steps)
            for share, cost in zip(self.shares, costs, strict=True):
                end = np.maximum(end, (before + share * backward) * slowest + self.delay_s) + cost
            shown = np.maximum(0.0, end - (before + backward) * slowest)
            hidden = np.maximum(0.0, costs.sum() - shown)
            backward = self.backward_s * speed + self.slowed * hidden
        parts = {
            "input": self.input_s * speed * middle.mean(),
            "forward": self.forward_s * speed * middle.mean(),
            "backward": float((backward * middle).mean()),
            "optimizer": self.optimizer_s * speed,
            "host": (self.host_s + self.unmodelled * math.log2(nodes) * (self.forward_s + self.backward_s)) * speed,
            "straggler": float(((before + backward) * (slowest - middle)).mean()),
            "exchange": float(shown.mean()),
        }
        parts["compute"] = parts["forward"] + parts["backward"] + parts["optimizer"]
        rest = parts["optimizer"] + parts["host"]
        work = (before + backward) * factors + rest
        causes = ("compute", "exchange", "straggler", "input", "host")
        figures = RunFigures(
            run_id=name,
            session=session,
            step_s=sum(parts[cause] for cause in causes),
            parts={key: float(value) for key, value in parts.items()},
            own_work_s=float(np.median(work)),
            communication_s=float(costs.sum()),
        )
        return figures, work

    def point(
        self, generator: np.random.Generator, nodes: int, *, runs: int = 5, hosts: Array | None = None
    ) -> tuple[PointFigures, NodeScatter | None]:
        """Runs of one session on the same nodes."""
        session = f"s{nodes}" if self.session_sd else "s"
        drift = math.exp(self.session_sd * generator.standard_normal())
        effects = self.hosts(generator, nodes) if hosts is None else hosts
        done = [self.run(generator, nodes, effects, f"{nodes}-{n}", session, drift) for n in range(runs)]
        names = [f"n{rank // self.ranks_per_node}" for rank in range(nodes * self.ranks_per_node)]
        point = PointFigures(
            ranks=nodes * self.ranks_per_node,
            nodes=nodes,
            batch_per_rank=32,
            leaves=None if self.leaf_nodes is None or not self.records_switches else self.leaves(nodes),
            runs=tuple(one for one, _ in done),
        )
        return point, scatter_of([(work, names) for _, work in done])

    def exchange(self) -> ExchangeResult:
        ready = [
            {"num_bytes": size, "ready_s": share * self.backward_s}
            for size, share in zip(self.sizes, self.shares, strict=True)
        ]
        found = {
            "carrier": self.carrier,
            "by": "backend",
            "exchange": "flat",
            "fusion": "auto",
            "wire": "fp32",
            "group_size": self.ranks_per_node,
            "num_groups": REFERENCE,
            "messages": [{**one, "num_tensors": 1, "method": "flat"} for one in ready],
            "gradients": [{**one, "name": f"g{number}"} for number, one in enumerate(ready)],
            "backward_s": self.backward_s,
            "evidence": "simulated",
        }
        return ExchangeResult.model_validate(found)

    def ingredients(
        self,
        generator: np.random.Generator,
        nodes: Sequence[int] = (1, 2, 4, 8),
        *,
        network: NetworkModel | None = None,
        runs: int = 5,
        **changes: object,
    ) -> Ingredients:
        """Points on some node counts, each on the nodes of the smaller ones too. `network`: fitted; None: the truth."""
        effects = self.hosts(generator, nodes[-1])
        points = [self.point(generator, count, runs=runs, hosts=effects[:count]) for count in nodes]
        return Ingredients(
            title="simulated",
            source="tests",
            system="simulated",
            ranks_per_node=self.ranks_per_node,
            points=tuple(point for point, _ in points),
            exchange=self.exchange(),
            engine="ddp",
            network=self.network if network is None else network,
            nodes_per_leaf=self.leaf_nodes,
            leaf_taper=None if self.leaf_nodes is None else self.taper,
            nodes=points[-1][1],
        ).model_copy(update=changes)
