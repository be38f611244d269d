"""On which nodes the repeats of a point run: on the same ones, or on others in turn.

On the same nodes differences between nodes are in no comparison of points, and a slow node is in all figures. In turn,
every node is used alike over the repeats: differences between nodes average out, stand in the scatter of repeats, and
can be told from those of hosts. The nodes are asked for with --nodelist, which is part of each run's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dlbench.errors import UserError
from dlbench.specs.plan import RunPlan
from dlbench.specs.system.hostlist import compressed, expanded

Mode = Literal["same", "rotate"]


def on_node_sets(plans: Sequence[RunPlan], mode: Mode, hosts: str, *, share_one_job: bool) -> list[RunPlan]:
    """The plans, each with the nodes that it runs on.

    Args:
        plans: of a series.
        mode: `same`: every run on the first of the nodes. `rotate`: repeat k of n nodes begins at node k n, counted on
            from the beginning after the end.
        hosts: the nodes to choose from, as Slurm writes them.
        share_one_job: whether points of different sizes share a job: then they share its nodes.

    Raises:
        UserError: there are too few nodes, or none that Slurm could read, or the system names nodes already.
    """
    option = f"--{mode}-nodes {hosts}"
    try:
        names = list(dict.fromkeys(expanded(hosts)))
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    if named := next((plan.system.slurm.nodelist for plan in plans if plan.system.slurm.nodelist), None):
        raise UserError(f"{option}: the system names nodes already: slurm.nodelist is {named}")
    largest = max(plan.layout.nodes for plan in plans)
    wanted = largest + (mode == "rotate")
    if len(names) < wanted:
        why = "there is nothing to rotate over" if len(names) == largest else f"a run takes {largest}"
        raise UserError(f"{option}: names {len(names)} nodes, and {why}; {wanted} or more are needed")
    found = []
    for plan in plans:
        size = largest if share_one_job else plan.layout.nodes
        begin = plan.series.repeat * size if mode == "rotate" else 0
        chosen = [names[(begin + offset) % len(names)] for offset in range(size)]
        slurm = plan.system.slurm.model_copy(update={"nodelist": compressed(chosen)})
        found.append(plan.model_copy(update={"system": plan.system.model_copy(update={"slurm": slurm})}))
    return found
