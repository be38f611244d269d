"""`dlbench project`: what it is made from, how it ends, and one line for what makes no sense."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.errors import DlbenchError
from dlbench.projection.ingredients import Ingredients
from tests.projection.test_gathering import NETWORK, NODES, write
from tests.support.history_factory import write_history
from tests.support.training_machine import Machine

SERIES = "\n".join(
    [
        "ranks,nodes,step_s,run",
        *(f"{p},{p},{0.1 + 0.004 * math.log2(p) + 1e-4 * r},{r}" for p in (1, 2, 4) for r in range(3)),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 1, 2 and 4 nodes of two ranks, a network of theirs and one of another system, and a series."""
    out = tmp_path_factory.mktemp("project")
    write(out / "given")
    write(out / "single", repeats=1, series="s2", overrides={"train.batch_per_rank": 16})
    inside = NETWORK.model_copy(update={"inside": NETWORK.across})
    (out / "box.json").write_text(inside.model_dump_json())
    for name in ("elsewhere", "p40-roce"):
        (out / f"{name}.json").write_text(inside.model_copy(update={"system": name}).model_dump_json())
    (out / "series.csv").write_text(SERIES)
    fours = Machine(run_sd=0.005).ingredients(np.random.default_rng(1), (1, 2, 4))  # Nodes of four ranks.
    (out / "fours.json").write_text(fours.model_dump_json())
    assert ask(out, "runs", "given", "--to", "16", "--ingredients", "made.json").exit_code == 0
    return out


def ask(folder: Path, *words: str) -> Result:
    """The command; words that name a file of the folder are it."""
    own = [str(folder / one) if (folder / one).exists() or one in ("made.json", "new.json") else one for one in words]
    return CliRunner().invoke(cli, ["project", *own])


def problem(result: Result) -> str:
    """The one line of an error, with its exit code in front."""
    assert isinstance(result.exception, DlbenchError), result.output
    return f"{int(result.exception.exit_code)} {result.exception}"


def targets(result: Result) -> list[Any]:
    assert result.exit_code == 0, result.output
    (group,) = json.loads(result.stdout)["groups"]
    found: list[Any] = group["projection"]["targets"]
    return found


def test_ingredients_project_as_the_runs_that_they_are_of(folder: Path) -> None:
    costs = ("--to", "16,64", "--network", "box.json", "--format", "json")
    assert targets(ask(folder, "runs", "given", *costs)) == targets(ask(folder, "ingredients", "made.json", *costs))
    made = Ingredients.model_validate_json((folder / "made.json").read_text())
    assert made.anchor.ranks == 8


def test_without_a_network_the_points_reach_four_times_as_far(folder: Path) -> None:
    result = ask(folder, "runs", "given", "--to", "32,64", "--format", "json")
    assert [one["ranks"] for one in targets(result)] == [32]
    (group,) = json.loads(result.stdout)["groups"]
    assert [(one["code"], one["ranks"]) for one in group["projection"]["refused"]] == [("R3", 64)]


GROUPED = ("sync.exchange=hierarchical",)
TOPK = ("sync.wire=topk",)


@pytest.mark.parametrize(
    ("asked", "before"),
    [
        (("sync.exchange=leader",), GROUPED),
        (("sync.fusion=own:single",), ()),
        (("sync.wire=fp16",), ()),
        ((*GROUPED, "sync.group_size=2"), GROUPED),
        ((*TOPK, "sync.topk_density=0.001"), TOPK),
    ],
)
def test_every_setting_changes_the_exchange_and_hardly_what_it_hides_in(
    folder: Path, asked: tuple[str, ...], before: tuple[str, ...]
) -> None:
    parts = []
    for keys in (asked, before):
        words = [word for key in keys for word in ("--set", key)]
        (one,) = targets(ask(folder, "ingredients", "fours.json", "--to", "128", "--format", "json", *words))
        parts.append({part["name"]: part["seconds"]["quantiles"][4] for part in one["parts"]})
    assert parts[0].pop("exchange") != pytest.approx(parts[1].pop("exchange"), rel=0.01)
    assert parts[0] == pytest.approx(parts[1], rel=0.02)


def test_the_other_scaling_has_its_own_curve_and_needs_its_batches(folder: Path) -> None:
    weak, strong = (
        targets(ask(folder, "points", "series.csv", "--to", "8", "--scaling", kind, "--format", "json"))[0]
        for kind in ("weak", "strong")
    )
    assert weak["flags"][0]["code"] == "F7"
    assert weak["efficiency"]["quantiles"][4] > 4 * strong["efficiency"]["quantiles"][4]
    refused = ask(folder, "ingredients", "fours.json", "--to", "32", "--scaling", "strong")
    assert (refused.exit_code, "Refused, R9" in refused.stdout) == (4, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["runs", "--to", "8"], "2 .*project runs: RUNS is missing; add the folders of the runs"),
        (["ingredients", "series.csv", "--to", "16"], "4 .*series.csv: damaged"),
        (["runs", "given", "single", "--to", "16", "--ingredients", "new.json"], "2 --ingredients takes one group"),
        *(
            (["runs", "given", "--to", "16", *more.split()], told)
            for more, told in (
                ("--network elsewhere.json", "2 the network's costs are of system elsewhere"),
                ("--set train.batch_per_rank=8", "2 --set train.batch_per_rank: a projection can only change"),
                ("--set sync.fusion=12", "2 --set sync.fusion: 12 is 12 bytes"),
                ("--set sync.group_size=2", "2 --set sync.group_size has no effect on exchange flat"),
                ("--set sync.topk_density=0.1", "2 --set sync.topk_density has no effect on .* fp32"),
                ("--set sync.wire=bf16", "2 --set: sync.wire bf16: Horovod has no bfloat16"),
                ("--record --set sync.wire=fp16", "2 --record cannot be combined with"),
                ("--record --system p40-roce", "2 --record cannot be combined with"),
                ("--record --scaling strong", "2 --record cannot be combined with"),
                ("--price-per-node-hour cheap", "2 .* must be an amount above zero, e.g. '9 EUR'"),
                ("--price-per-node-hour 9/GPU-hour", "2 .* must be the price of a node-hour"),
                ("--memory-limit 1GiB", "2 --memory-limit has no effect without"),
                ("--where engine=ddp", "2 --where engine=ddp: no run of"),
            )
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(folder: Path, words: list[str], told: str) -> None:
    line = problem(ask(folder, *words))
    assert re.match(told, line), line
    assert "\n" not in line


def test_costs_of_the_other_system_are_priced_there(folder: Path) -> None:
    words = ("--to", "64", "--system", "p40-roce", "--network", "p40-roce.json", "--full")
    assert "by torch-gloo" in " ".join(ask(folder, "ingredients", "fours.json", *words).stdout.split())


def test_a_history_says_how_many_hosts_are_slow(folder: Path, tmp_path: Path) -> None:
    """One of four hosts computes 10 % longer in each of six nights; a history of another system says nothing."""
    store, made = tmp_path / "store", tmp_path / "made.json"
    nights = [(float(night), 1.0) for night in range(6)]
    write_history(
        store,
        nights,
        host=lambda number, rank: f"n{rank}",
        slow_rank=lambda number, rank: (1.0 + number / 1000) * (1.1 if rank == 2 else 1.0),
        **{**NODES, "repeats": 1},
    )
    words = ("runs", "given", "--to", "16", "--history", str(store), "--ingredients", str(made))
    assert ask(folder, *words).exit_code == 0
    slow_hosts = Ingredients.model_validate_json(made.read_text()).slow_hosts
    assert slow_hosts.hosts == 4
    assert slow_hosts.ratios == pytest.approx([math.log(1.1)], abs=1e-6)
    assert slow_hosts.source == str(store)
    content = json.loads(made.read_text()) | {"system": "elsewhere"}
    made.write_text(json.dumps(content))
    assert "no host of system elsewhere" in problem(
        ask(folder, "ingredients", str(made), "--to", "16", "--history", str(store))
    )


@pytest.mark.parametrize(
    ("words", "code"), [(["runs", "single", "--to", "16"], "R1"), (["runs", "given", "--to", "9,1"], "R7")]
)
def test_no_target_ends_with_4_and_the_remedy(folder: Path, words: list[str], code: str) -> None:
    result = ask(folder, *words)
    assert result.exit_code == 4
    assert f"Refused, {code}" in result.stdout
    assert "Remedy: " in " ".join(result.stdout.split())
