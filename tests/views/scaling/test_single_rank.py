"""The baseline has the cores that the fullest point leaves a rank; the best single rank stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlbench.records.scan import scan
from dlbench.specs.plan import RunPlan
from dlbench.views.scaling_report import assemble
from tests.support.run_factory import constant, plans, write_run


def write(out: Path, made: list[RunPlan], milliseconds: float) -> None:
    for plan in made:
        write_run(out, plan, constant([1, 0, milliseconds - 3, 1, 0, 1]))


def notes(out: Path) -> list[str]:
    return [group.baseline_note for group in assemble(scan(out)).groups if len(group.points) > 1]


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_a_faster_single_rank_is_named_with_the_speed_up_against_it(tmp_path: Path, scaling: str) -> None:
    write(tmp_path, plans(points=(1, 4), scaling=scaling, overrides={"train.batch_per_rank": 8}), 100)
    cores = {"layout.cores_per_rank": 4, "train.batch_per_rank": 8}
    write(tmp_path, plans(points=(1,), series="s2", engine="single", overrides=cores), 50)
    (note,) = notes(tmp_path)
    assert note.startswith("Against the best single-rank run here (single, 4 cores; ")
    # Four ranks have the batch of four at weak scaling, and that of one at strong.
    assert f": {'2.00x' if scaling == 'weak' else '0.50x'} with 4 ranks (" in note
    assert note.endswith("ranks of the baseline have 1 core.")


def test_a_single_rank_that_trains_something_else_is_no_measure(tmp_path: Path) -> None:
    write(tmp_path, plans(points=(1, 2)), 100)
    write(tmp_path, plans(points=(1,), series="s2", overrides={"train.batch_per_rank": 16}), 10)
    (note,) = notes(tmp_path)
    assert note.startswith("Every rank had 1 core, also at the baseline, ")


def test_nodes_of_equally_many_ranks_hold_nothing_back(tmp_path: Path) -> None:
    made = plans(system="box", points=(2, 4), ranks_per_node=2)
    write(tmp_path, made, 100)
    assert notes(tmp_path) == [""]
