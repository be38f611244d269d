"""Commands agree on one value for one quantity: report, project, comm predict and diagnose of the same runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dlbench.cli import cli
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout
from tests.support.collectives_factory import Story as CommStory
from tests.support.collectives_factory import network, write_comm_series
from tests.support.run_factory import MS, Story, exchange_result, plans, write_run


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 1 to 8 nodes of two ranks whose messages cost what a planted network says, and runs that measured it."""
    out = tmp_path_factory.mktemp("machine")
    nodes = {"system": "box", "points_are": "nodes", "ranks_per_node": 2, "launcher": "mpirun"}
    for plan in plans(**nodes, points=(1, 2, 4, 8), repeats=5):
        costs, end = planted_exchange(plan.layout.ranks)
        drift = 1 + 0.002 * plan.series.repeat
        rest = round(3 * drift * MS)
        phases = [round(one * drift * MS) for one in (5.0, 1.0, 30.0, 50.0, 1e3 * end - 50.0, 8.0)]
        gradients = exchange_result(plan, gradients=MESSAGES, alpha_s=0.0, beta_s_per_byte=0.0)
        story = Story(
            exchange={**gradients, "communication_s": sum(costs)},
            host=lambda rank: f"n{rank // 2}",
            cores=lambda rank: (rank % 2,),
        )
        write_run(out, plan, lambda rank, step, phases=phases, rest=rest: (phases, rest), story)
    own = {"backends": "none", "algorithms": "ring,hierarchical", "sizes": "64KiB:16MiB", "repeats": 3}
    write_comm_series(out, CommStory(network=PLANTED, noise=0.005), **nodes, **own, points=(2, 4))
    said("comm", "fit", out, "-o", out / "box.network.json")
    return out


MESSAGES = ((4_000_000, 0.02), (1_000_000, 0.05))
PLANTED = network(across=(100e-6, 4e-9))


def planted_exchange(ranks: int) -> tuple[list[float], float]:
    """Seconds of each message at so many ranks, and when the last is through."""
    layout, end = Layout(ranks=ranks, group_size=2), 0.0
    costs = [predict("allreduce", "ring", size, layout, PLANTED) for size, _ in MESSAGES]
    for (_, ready), cost in zip(MESSAGES, costs, strict=True):
        end = max(end, ready) + cost
    return costs, end


def said(*words: object) -> Any:
    """What a command prints, as JSON if it is any."""
    found = CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout) if "json" in words else None


def test_all_commands_say_the_same_of_ranks_that_were_not_measured(machine: Path) -> None:
    costs = ("--network", machine / "box.network.json", "--format", "json")
    (group,) = said("project", "runs", machine, "--to", "16,32,64", *costs)["groups"]
    told = {one["ranks"]: one for one in group["projection"]["targets"]}
    # The report shows the numbers of the command.
    forecast = said("report", machine, *costs)["groups"][0]["forecast"]["projection"]["targets"]
    assert forecast == [told[32], told[64]]
    for ranks in (32, 64):
        step = told[ranks]["step"]["quantiles"]
        assert step[2] < 0.047 + planted_exchange(ranks)[1] < step[6]
