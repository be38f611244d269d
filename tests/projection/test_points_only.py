"""The second opinion gives back the curve that made the points, knows its own error, and reads anybody's series."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dlbench.errors import UserError
from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures
from dlbench.projection.points_only import points_only, read_points
from dlbench.projection.projected import Band
from dlbench.projection.step import project

Scaling = Literal["weak", "strong"]


def by_points(ingredients: Ingredients, ranks: int) -> Band | None:
    found = points_only(ingredients, ranks)
    return None if found is None else Band.of(found.step_s)


def series(
    step: Callable[[int], float],
    counts: Sequence[int] = (1, 2, 4, 8),
    *,
    scaling: Scaling = "weak",
    noise: float = 0.01,
    per_node: int = 1,
) -> Ingredients:
    scatter = random.Random(7)
    return Ingredients(
        title="t",
        source="s",
        scaling=scaling,
        ranks_per_node=per_node,
        points=tuple(
            PointFigures(
                ranks=count,
                nodes=-(-count // per_node),
                runs=tuple(
                    RunFigures(run_id=f"{count}-{run}", step_s=step(count) * (1 + scatter.gauss(0, noise)))
                    for run in range(5)
                ),
            )
            for count in counts
        ),
    )


CURVES: dict[str, tuple[Scaling, str, Callable[[int], float]]] = {
    "slowest of p": ("weak", "a logarithm", lambda p: 0.1 + 0.004 * math.log2(p)),
    "bytes of a ring": ("weak", "a saturation", lambda p: 0.1 + 0.03 * (1 - 1 / p)),
    "Amdahl": ("strong", "a saturation", lambda p: 1 / p + 0.05 * (1 - 1 / p)),
    "trees": ("strong", "a logarithm", lambda p: 1 / p + 0.01 * math.log2(p)),
    "start-ups of a ring": ("weak", "a straight line", lambda p: 0.1 + 0.002 * (p - 1)),
    "a central server": ("weak", "a square", lambda p: 0.1 + 0.0005 * (p - 1) ** 2),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("factor", [2, 4])
def test_points_of_a_law_foretell_it(name: str, factor: int) -> None:
    scaling, law, step = CURVES[name]
    given = series(step, (2, 4, 8, 16), scaling=scaling, noise=0.002)
    found = points_only(given, 16 * factor)
    assert found is not None
    assert found.law == law
    assert float(np.median(found.step_s)) == pytest.approx(step(16 * factor), rel=0.05)
    low, high = np.quantile(found.step_s, [0.1, 0.9])
    assert low < step(16 * factor) < high
    (target,) = project(given, [16 * factor]).targets
    flags = {flag.code: flag.text for flag in target.flags}
    assert f" only, as {law}, because" in flags["F7"]
    assert ("F13" in flags) == (law in ("a straight line", "a square"))


def test_what_holds_inside_a_node_says_nothing_of_more_nodes() -> None:
    """Fast points inside a node of four do not talk a curve beyond it down."""

    def step(ranks: int) -> float:
        return 0.1 if ranks <= 4 else 0.15 + 0.002 * math.log2(ranks / 4)

    found = by_points(series(step, (1, 2, 4, 8, 16, 32), per_node=4, noise=0.002), 64)
    assert found is not None
    low, high = found.middle(80)
    assert low < step(64) < high
    assert by_points(series(step, (1, 2, 4), per_node=4), 8) is None


HEADER = "ranks,nodes,step_s,run"
ROWS = [(ranks, ranks // 256, 0.12 + 1e-3 * run + 1e-5 * ranks, run) for ranks in (256, 512, 1024) for run in range(3)]
PLAIN = "\n".join([HEADER, *(",".join(map(str, row)) for row in ROWS)])


def read_text(tmp_path: Path, text: str, scaling: Any = "weak") -> Ingredients:
    path = tmp_path / "series.csv"
    path.write_text(text, encoding="utf-8")
    return read_points(path, scaling)


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        (PLAIN.replace(",", ", "), ""),
        (PLAIN.replace(",", ";"), ""),
        (PLAIN.replace(",", "\t"), ""),
        ("# my cluster\n\n" + PLAIN.replace("\n", "\n\n  # a night\n"), ""),
        ("\n".join(f"{n or ''},{line},x" for n, line in enumerate(PLAIN.split("\n"))), "a column without a name, x"),
        (PLAIN.replace("1024,4,", '"1,024",4.0,'), ""),
        (PLAIN.replace("step_s", "step_s,samples_per_s").replace(",0.1", ",0.1,0.1"), "samples_per_s"),
    ],
)
def test_a_series_is_read_as_people_keep_it(tmp_path: Path, text: str, left_out: str) -> None:
    found = read_text(tmp_path, text)
    assert [[run.run_id for run in point.runs] for point in found.points] == [["0", "1", "2"]] * 3
    assert [(point.ranks, point.nodes) for point in found.points] == [(256, 1), (512, 2), (1024, 4)]
    if "samples" not in left_out:
        assert [run.step_s for point in found.points for run in point.runs] == [row[2] for row in ROWS]
    assert found.notes == ((f"Columns that were left out: {left_out}.",) if left_out else ())


def test_throughput_is_a_step_time_of_a_known_batch(tmp_path: Path) -> None:
    rows = [f"{p},{p},64,{p * 64 / (0.1 + 1e-3 * n)},{n}" for p in (1, 2, 4) for n in range(3)]
    table = "\n".join(["ranks,nodes,batch_per_rank,samples_per_s,run", *rows])
    found = read_text(tmp_path, table)
    assert [run.step_s for run in found.points[2].runs] == pytest.approx([0.1, 0.101, 0.102])
    (target,) = project(found, [8]).targets
    assert target.throughput is not None
    assert target.throughput.median == pytest.approx(8 * 64 / target.step.median, rel=1e-3)
    halved = table.replace("2,2,64", "2,2,32").replace("4,4,64", "4,4,16")
    assert read_text(tmp_path, halved, "strong").batch_at(8) == 8
    for text, scaling in ((table, "strong"), (halved, "weak")):
        with pytest.raises(UserError, match="batch_per_rank differs between rank counts"):
            read_text(tmp_path, text, scaling)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["gpus,images_per_s", "1,2"], "line 1: columns 'gpus', 'images_per_s': ranks, nodes, run, step_s must appear"),
        (["ranks,nodes,samples_per_s,run", "1,1,9,a"], "line 1: .*: batch_per_rank must appear once"),
        (["ranks nodes step_s run", "1 1 1 a"], "line 1: columns 'ranks nodes step_s run': ranks, nodes"),
        (["ranks," + HEADER, "1,1,1,0.1,a"], "line 1: .*: ranks must appear once"),
        ([HEADER], "contains no runs"),
        ([HEADER, "1,1,-0.1,a"], "line 2: step_s '-0.1': must be a number above 0"),
        ([HEADER, "1,1,1e9,a"], "line 2: step_s '1e9': .* from 1e-09 to 1,000,000"),
        # A German 0.119, which is no 119.
        ([HEADER.replace(",", ";"), "1;1;0,119;a"], "line 2: step_s '0,119': .* with a decimal point"),
        ([HEADER, "1,1,0.1,a", "", "two,1,0.1,b"], "line 4: ranks 'two': must be a whole number"),
        ([HEADER, "0,1,0.1,a"], "line 2: ranks '0': must be a whole number from 1 to"),
        ([HEADER, "1,1,0.1"], "line 2: has 3 values, but the header has 4 columns"),
        ([HEADER, "1,024,128,0.1,a"], "line 2: has 5 values, .* in double quotes"),
        ([HEADER, '1,1,0.1,"a'], "line 2: unexpected end of data"),
        ([HEADER, "8,1,0.1,a", "8,2,0.1,b"], "line 3: nodes 2: earlier rows have 1 at 8 ranks"),
        ([HEADER, "8,1,0.1,a", "8,1,0.1,a"], "line 3: run 'a': appears twice at 8 ranks"),
        ([HEADER, "8,3,0.1,a", "16,4,0.1,b"], "nodes: the point of 8 ranks does not fill nodes of 4 ranks"),
    ],
)
def test_a_wrong_row_is_named_with_its_line_and_column(tmp_path: Path, rows: list[str], told: str) -> None:
    with pytest.raises(UserError, match=f"series.csv: {told}"):
        read_text(tmp_path, "\n".join(rows))


@pytest.mark.parametrize(
    ("counts", "runs", "per_node", "ranks", "told"),
    [
        ((4, 8, 16, 32), 1, 4, 64, {"R1": "fewer than 3 runs at 8, 16 and 32 ranks, .* a row per run"}),
        ((1, 2, 4, 8, 16), 3, 8, 32, {"R7": r"3 counts of full nodes \(8 ranks each\), .* 2: 8 and 16 ranks.* 1 more"}),
        (
            (1, 2, 4),
            3,
            4,
            8,
            {"R2": "all measured points are on one node, .* rows for at least 3 counts of full nodes"},
        ),
        ((1, 2), 3, 4, 4, {"R7": "3 rank counts, and there are 2: 1 and 2 ranks.* measure 1 more"}),
        ((1, 2, 4), 1, 1, 64, {"R7": "more than 4 times .* measure 16 ranks or more", "R1": "fewer than 3 runs"}),
    ],
)
def test_a_series_is_refused_with_what_its_file_lacks(
    counts: Sequence[int], runs: int, per_node: int, ranks: int, told: dict[str, str]
) -> None:
    """All at once, and never with a command that measures what a file cannot hold."""
    made = series(lambda p: 0.1, counts, per_node=per_node)
    points = tuple(point.model_copy(update={"runs": point.runs[:runs]}) for point in made.points)
    found = project(made.model_copy(update={"points": points}), [ranks])
    assert found.targets == ()
    assert [one.code for one in found.refused] == list(told)
    for one in found.refused:
        assert re.search(told[one.code], f"{one.text}. {one.remedy}")
        assert "dlbench" not in one.remedy
        assert "--" not in one.remedy
