"""Runs of the collective benchmark as numbers: rates, intervals, choices, fits against planted costs, bad input."""

from __future__ import annotations

import functools
import itertools
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import cli
from dlbench.comm import measurements, wording
from dlbench.comm.costs import cost
from dlbench.comm.fits import NetworkFit, fit_all, fit_one
from dlbench.comm.measurements import CollectiveGroup, MeasuredSeries, Measurement, SeriesName
from dlbench.comm.prediction_page import layout_text, predictions_document, times_sheet
from dlbench.comm.predictions import PredictionRequest, predict_all
from dlbench.comm.report import assemble, group_doubts
from dlbench.comm.wording import fit_caption
from dlbench.errors import IncompleteDataError, UserError
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout, pipeline_chunks
from dlbench.records.comm import read_network, scan_comm
from dlbench.report.formats import terminal
from dlbench.report.wording import optional
from dlbench.specs.comm import Level, LineCost, NetworkModel, Piece
from dlbench.stats.estimates import Estimate
from tests.support import collectives_factory as factory

RING = "ring over torch-gloo"
LIBRARY = "library of torch-gloo"


def table_of(folder: Path) -> measurements.CollectiveTable:
    return measurements.tabulate(scan_comm(folder))


def only(folder: Path) -> CollectiveGroup:
    (group,) = table_of(folder).groups
    return group


def the_fit(folder: Path, fitted: str = "") -> NetworkFit:
    return fit_one(table_of(folder), system=None, transport=None, dtype=None, fitted=fitted, where="runs")


def doubts(group: CollectiveGroup) -> dict[str, str]:
    return {doubt.code: doubt.text for doubt in group_doubts(group)}


# Medians, intervals, rates


def test_figures_are_medians_over_runs_of_medians_over_iterations(tmp_path: Path) -> None:
    by_repeat: dict[int, float] = {}
    for plan in factory.comm_plans(algorithms="ring", backends="none", sizes="4KiB", repeats=5):
        middle = 0.01 * (plan.series.repeat + 1)
        by_repeat[plan.series.repeat] = middle
        # One iteration in ten is far off: a median within the run does not see it.
        times = [middle] * 9 + [10.0]
        factory.write_comm_run(tmp_path, plan, factory.Story(change=functools.partial(dict, times_s=times)))
    (one,) = only(tmp_path).series[0].rows
    assert sorted(one.by_run.values()) == sorted(by_repeat.values())
    assert (one.time.value, one.time.unit, one.time.kind) == (0.03, "s", "order statistics")
    assert 0.01 <= one.time.low < 0.03 < one.time.high <= 0.05
    assert one.iterations == 10
    # Rates turn the interval over.
    assert one.algbw.unit == "GB/s"
    assert one.algbw.value == 4096 / 0.03 * 1e-9
    assert one.algbw.low == 4096 / one.time.high * 1e-9
    assert one.algbw.high == 4096 / one.time.low * 1e-9


def test_a_single_run_has_the_middle_half_of_its_iterations_and_says_so(tmp_path: Path) -> None:
    (plan,) = factory.comm_plans(algorithms="ring", backends="none", sizes="4KiB", repeats=1, iterations=5)
    change = {"times_s": [1.0, 2.0, 3.0, 4.0, 100.0], "is_cut": True, "operations": 16}
    factory.write_comm_run(tmp_path, plan, factory.Story(change=lambda point: change))
    group = only(tmp_path)
    (one,) = group.series[0].rows
    assert one.time == Estimate(3.0, 2.0, 4.0, 1, "within-run", "s")
    assert "do not show how runs differ" in doubts(group)["few-repeats"]
    assert "noisy-iterations" in doubts(group)
    assert doubts(group)["short-samples"].startswith(f"{RING}, 4 KiB: samples of only 16 operations")


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("allreduce", 1.5), ("reduce-scatter", 0.75), ("all-gather", 0.75), ("broadcast", 1.0), ("all-to-all", 0.75)],
)
def test_rates_are_those_of_nccl_tests(tmp_path: Path, collective: str, factor: float) -> None:
    """At four ranks, by the factors of nccl-tests' doc/PERFORMANCE.md; its size is the whole buffer of a rank."""
    factory.write_comm_series(
        tmp_path, factory.Story(noise=0.0), collective=collective, repeats=1, backends="none", sizes="1MiB"
    )
    for series in only(tmp_path).series:
        (one,) = series.rows
        assert one.algbw.value == pytest.approx(2**20 / one.time.value * 1e-9)
        assert one.busbw.value == pytest.approx(one.algbw.value * factor)


def test_runs_are_grouped_by_what_may_be_compared(tmp_path: Path) -> None:
    small: dict[str, Any] = {"algorithms": "ring", "backends": "none", "sizes": "4KiB", "repeats": 2}
    factory.write_comm_series(tmp_path, **small)
    factory.write_comm_series(tmp_path, series="c2", **{**small, "sizes": "8KiB"})
    factory.write_comm_series(tmp_path, series="c3", dtype="fp16", **small)
    factory.write_comm_series(tmp_path, series="c4", collective="broadcast", **{**small, "algorithms": "chain"})
    factory.write_comm_series(tmp_path, series="c5", **{**small, "group_size": 4})
    factory.write_comm_series(tmp_path, series="c6", launcher="mpirun", **small)
    found = {}
    for group in table_of(tmp_path).groups:
        launcher = group.sample.plan.system.launch.launcher
        found[group.collective, group.dtype, group.layout.group_size, launcher] = len(group.runs)
    assert found == {
        ("allreduce", "fp32", 2, "local"): 4,
        ("allreduce", "fp16", 2, "local"): 2,
        ("broadcast", "fp32", 2, "local"): 2,
        ("allreduce", "fp32", 4, "local"): 2,
        ("allreduce", "fp32", 2, "mpirun"): 2,
    }


def test_points_without_a_right_time_are_listed_and_make_no_figure(tmp_path: Path) -> None:
    (plan,) = factory.comm_plans(algorithms="ring", backends="gloo", sizes="4KiB,8KiB", repeats=1)

    def change(point: dict[str, Any]) -> dict[str, Any]:
        if point["algorithm"] == "library":
            return {"times_s": [], "correct": None, "problem": "gathers equal parts only"}
        return {"correct": False, "max_error": 0.5} if point["num_bytes"] == 4096 else {}

    folder = factory.write_comm_run(tmp_path, plan, factory.Story(change=change))
    shutil.copytree(folder.path, tmp_path / "copy")
    (copied,) = table_of(tmp_path).without
    assert copied.why.endswith("the copy is left out")
    group = only(tmp_path)
    assert [(series.title, [one.num_bytes for one in series.rows]) for series in group.series] == [(RING, [8192])]
    assert {(one.title, one.num_bytes, one.why) for one in group.rejected} == {
        (RING, 4096, "wrong result (largest relative error 0.5)"),
        (LIBRARY, 4096, "gathers equal parts only"),
        (LIBRARY, 8192, "gathers equal parts only"),
    }


def test_hierarchical_is_counted_and_priced_by_its_recorded_chunks(tmp_path: Path) -> None:
    layout, size = Layout(ranks=8, group_size=4), 4 * 2**20
    factory.write_comm_series(tmp_path, points=(8,), group_size=4, algorithms="hierarchical", sizes="1MiB,4MiB")
    group = only(tmp_path)
    assert not [doubt for doubt in group_doubts(group) if doubt.code == "counters"]
    row = group.series[0].rows[-1]
    assert row.chunks == pipeline_chunks("allreduce", "hierarchical", layout, size // 4)
    priced = cost("allreduce", "hierarchical", layout, size, "fp32", factory.network(), measured=row)
    assert (priced.steps, priced.algorithm) == (row.steps, f"hierarchical, c = {row.chunks}")


def test_counters_must_equal_the_formulas(tmp_path: Path) -> None:
    def change(point: dict[str, Any]) -> dict[str, Any]:
        if point["algorithm"] != "ring":
            return {}
        return {"steps": 7, "bytes_sent": [*point["bytes_sent"][:2], 1, point["bytes_sent"][3]], "messages": ()}

    factory.write_comm_series(
        tmp_path, factory.Story(change=change), algorithms="ring,direct", backends="gloo", sizes="4KiB"
    )
    (found,) = [one for one in group_doubts(only(tmp_path)) if one.code == "counters"]
    assert found.severity == "serious"
    assert len(found.runs) == 5
    assert found.text == (
        "ring over torch-gloo, 4 KiB: counters differ from the formulas: steps: 7 counted, 6 by the formula; "
        "messages: counted on 0 of 4 ranks; bytes sent of rank 2: 1 counted, 6,144 by the formula"
    )


def test_unchecked_results_other_environments_and_warnings_are_doubts(tmp_path: Path) -> None:
    for plan in factory.comm_plans(algorithms="ring", backends="none", sizes="4KiB,8KiB"):
        story = factory.Story(
            change=lambda point: {"correct": None, "max_error": None},
            warnings=["ranks share cores"],
            environment={"host": f"n{plan.series.repeat}", "kernel": "6.1" if plan.series.repeat else "5.10"},
        )
        factory.write_comm_run(tmp_path, plan, story)
    found = doubts(only(tmp_path))
    assert found["unchecked"].startswith("results of 2 points were not checked")
    assert found["recorded"] == "ranks share cores"
    assert found["unlike-runs"] == "runs that are averaged are not repeats: kernel: 6.1 in 4, 5.10 in 1"
    assert found["pretended-groups"].startswith("all groups are on one host")


def test_times_in_which_the_gpu_may_have_waited_for_calls_are_a_serious_warning(tmp_path: Path) -> None:
    late = {4096: 3, 8192: 0, 16384: None}  # None: the stream was not held back
    for plan in factory.comm_plans(algorithms="none", backends="gloo", sizes="4KiB,8KiB,16KiB"):
        found = factory.Story(change=lambda point: {"timing": "in-stream", "launch_bound": late[point["num_bytes"]]})
        factory.write_comm_run(tmp_path, plan, found)
    (one,) = [one for one in group_doubts(only(tmp_path)) if one.code == "launch-bound"]
    assert (one.severity, len(one.runs)) == ("serious", 5)
    assert one.text.startswith("library of torch-gloo, 4 KiB: in 3 of 10 iterations the GPU reached the operations")


def test_the_network_benchmark_says_first_that_nccl_went_over_sockets(tmp_path: Path) -> None:
    nccl = {"channels": {"NET/Socket": 8}, "adapters": {"mlx5_0": "InfiniBand"}}
    for plan in factory.comm_plans(algorithms="none", backends="gloo", sizes="4KiB"):
        story = factory.Story(nccl=nccl, environment={"variable.NCCL_IB_DISABLE": "1"})
        factory.write_comm_run(tmp_path, plan, story)
    (one,) = [one for one in group_doubts(only(tmp_path)) if one.code == "nccl-socket"]
    assert (one.severity, len(one.runs)) == ("serious", 5)
    assert one.text.endswith("although they have mlx5_0 (InfiniBand): NCCL_IB_DISABLE=1 was set")


def test_runs_that_were_asked_for_unlike_are_groups_of_their_own(tmp_path: Path) -> None:
    for modules in ("openmpi/4.1", "openmpi/5.0"):
        asked = {"algorithms": "ring", "backends": "none", "sizes": "4KiB", "overrides": {"system.modules": modules}}
        for plan in factory.comm_plans(series=modules.replace("/", "-"), **{**asked, "sizes": "4KiB:4MiB"}):
            factory.write_comm_run(tmp_path, plan)
    report = assemble(scan_comm(tmp_path))
    assert [group.num_runs for group in report.groups] == [5, 5]
    assert ["system.modules openmpi/4.1" in group.label for group in report.groups].count(True) == 1
    # One model of both would be an average, too.
    assert report.fits == ()
    assert "system.modules: openmpi/4.1 in 1, openmpi/5.0 in 1" in report.unfitted[0]


def group_with(times: dict[str, list[float]]) -> CollectiveGroup:
    """A group of five equal runs whose series have these times at 1, 2, 4, ... KiB."""
    series = []
    for algorithm, values in times.items():
        name = SeriesName(carrier="mpi", algorithm=algorithm)
        rows = tuple(
            Measurement(
                series=name,
                num_bytes=1024 * 2**index,
                time=Estimate(value, value, value, 1, "within-run", "s"),
                minimum_s=value,
                algbw=Estimate(1.0, None, None, 1, "single run", "GB/s"),
                busbw=None,
                by_run={("r", repeat): value for repeat in range(5)},
                iterations=1,
            )
            for index, value in enumerate(values)
        )
        series.append(MeasuredSeries(title=name.title, carrier="mpi", algorithm=algorithm, is_library=False, rows=rows))
    return CollectiveGroup(id="g", collective="allreduce", dtype="fp32", runs=(), series=tuple(series), rejected=())


@given(
    st.integers(1, 8).flatmap(
        lambda count: st.lists(st.lists(st.floats(1e-6, 10.0), min_size=count, max_size=count), min_size=1, max_size=4)
    )
)
def test_recommendations_cover_all_sizes_and_lose_little(times: list[list[float]]) -> None:
    group = group_with({f"a{index}": values for index, values in enumerate(times)})
    ranges = wording.ranges_of(wording.best(group))
    seconds = {(row.series.title, row.num_bytes): row.time.value for s in group.series for row in s.rows}
    covered = [size for one in ranges for size in group.sizes if one.low <= size <= one.high]
    assert covered == list(group.sizes)
    assert all(not left.title or left.title != right.title for left, right in itertools.pairwise(ranges))
    for one in ranges:
        assert bool(one.title) != bool(one.tied)
        for size in (size for size in group.sizes if one.low <= size <= one.high):
            least = min(value for (_, num_bytes), value in seconds.items() if num_bytes == size)
            for name in (one.title,) if one.title else one.tied:
                assert seconds[name, size] <= least * (1 + wording.STAY_WITHIN) * (1 + 1e-9)


def test_a_gain_of_a_few_percent_is_no_reason_to_change() -> None:
    group = group_with({"ring": [1.0, 2.0, 4.0, 8.0], "direct": [2.0, 1.95, 4.1, 6.0]})
    assert [(one.low, one.high, one.title, one.tied) for one in wording.ranges_of(wording.best(group))] == [
        (1024, 1024, "ring over mpi", ()),
        (2048, 4096, "", ("direct over mpi", "ring over mpi")),
        (8192, 8192, "direct over mpi", ()),
    ]


def test_few_runs_have_no_winner_and_scatter_hides_one(tmp_path: Path) -> None:
    """Four runs are too few for any; of five that scatter by more than the lead no algorithm is recommended."""
    asked: dict[str, Any] = {"algorithms": "ring,recursive-doubling", "backends": "none", "sizes": "1KiB,64MiB"}
    factory.write_comm_series(tmp_path / "four", factory.Story(noise=0.001), repeats=4, **asked)
    assert {one.title for one in wording.ranges_of(wording.best(only(tmp_path / "four")))} == {""}
    factory.write_comm_series(tmp_path / "five", factory.Story(noise=0.001), repeats=5, **asked)
    assert [one.title for one in wording.ranges_of(wording.best(only(tmp_path / "five")))] == [
        "recursive-doubling over torch-gloo",
        "ring over torch-gloo",
    ]


def test_an_algorithm_that_the_fit_misses_gives_no_advice(tmp_path: Path) -> None:
    """Ring takes a thirtieth of what is planted at one size: the fit cannot know."""

    def change(point: dict[str, Any]) -> dict[str, Any]:
        is_odd = point["algorithm"] == "ring" and point["num_bytes"] == 2**20
        return {"times_s": [seconds / 30 for seconds in point["times_s"]]} if is_odd else {}

    asked: dict[str, Any] = {"points": (4, 8), "group_size": None, "algorithms": "ring,direct,recursive-doubling"}
    factory.write_comm_series(tmp_path, factory.Story(change=change), backends="none", repeats=1, **asked)
    table = table_of(tmp_path)
    (fit,) = fit_all(table).fits
    poor = {one.algorithm: one.worst for one in fit.network.errors if one.is_poor}
    assert set(poor) == {"ring"}
    predictions = predict_all(fit.network, (16,), PredictionRequest(sizes=SIZES))
    (found,) = predictions.predictions
    assert {one.name for one in found.series if one.poor_error is not None} == {"ring"}
    assert not [time for time in times_sheet(predictions, found).rows if time.is_best and "poor fit" in time.name]
    assert "ring" not in found.best
    assert all("ring" not in (one.title, *one.tied) for one in found.ranges)


BOX: dict[str, Any] = {
    "system": "box",
    "points": (2, 4),
    "points_are": "nodes",
    "ranks_per_node": 2,
    "group_size": None,
    "repeats": 1,
    "sizes": "1KiB:4MiB",
    "algorithms": "ring,recursive-doubling,leader",
    "backends": "gloo,mpi",
}
INSIDE, ACROSS = (20e-6, 0.5e-9), (100e-6, 8e-9)


@pytest.fixture(scope="module", params=[True, False], ids=["one link a node", "a link a rank"])
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[NetworkFit, bool]:
    """A fit to two rank counts with planted costs; and whether the nodes' ranks shared a link."""
    folder = tmp_path_factory.mktemp("fitted")
    planted = factory.network(inside=INSIDE, across=ACROSS, shared_link=request.param)
    factory.write_comm_series(folder, factory.Story(network=planted), **BOX)
    return the_fit(folder, "now"), request.param


def test_fit_recovers_planted_costs(fitted: tuple[NetworkFit, bool]) -> None:
    fit, shared = fitted
    network = fit.network
    assert (network.system, network.transport, network.fitted) == ("box", "torch-gloo", "now")
    assert network.across.links == (1 if shared else None)
    assert network.num_points == 3 * 7 * 2
    for level, (alpha, beta) in ((network.inside, INSIDE), (network.across, ACROSS)):
        (piece,) = level.pieces
        assert piece.alpha_s == pytest.approx(alpha, rel=0.1)
        assert piece.beta_s_per_byte == pytest.approx(beta, rel=0.2)
    assert network.across.pieces[0].beta_s_per_byte == pytest.approx(ACROSS[1], rel=0.02)


def test_a_fit_to_the_minimum_leaves_out_congestion(tmp_path: Path) -> None:
    """Two of three iterations of every point take four or ten times as long as planted."""

    def change(point: dict[str, Any]) -> dict[str, Any]:
        return {"times_s": [s * factor for s, factor in zip(point["times_s"], itertools.cycle((1, 4, 10)))]}

    planted = factory.network(inside=INSIDE, across=ACROSS, shared_link=True)
    story = factory.Story(network=planted, noise=0.0, change=change)
    asked = {**BOX, "points": (2,), "sizes": "16KiB:4MiB", "algorithms": "ring,leader", "backends": "none"}
    factory.write_comm_series(tmp_path, story, **asked)
    path = tmp_path / "least.network.json"
    done = CliRunner().invoke(cli, ["comm", "fit", str(tmp_path), "--of", "minimum", "-o", str(path)])
    assert "each the fastest of all iterations, which leaves out congestion" in " ".join(done.output.split())
    least = read_network(path)
    assert (least.fitted_to, least.draws, least.num_points) == ("minimum", (), 2 * 5)
    assert least.across.pieces[0].beta_s_per_byte == pytest.approx(ACROSS[1], rel=0.02)
    lines = {series.title: series.startup_s for series in only(tmp_path).series}
    (ring,) = [line for line in least.collectives if line.name == "gloo ring"]
    assert ring.startup_s == pytest.approx(lines[RING] / 4, rel=0.05)
    predicted = predictions_document(predict_all(least, (4,), PredictionRequest(sizes=(2**20,))))
    assert "minimum times of 10 points" in predicted.title


def test_every_series_is_a_line_as_well(fitted: tuple[NetworkFit, bool]) -> None:
    fit, _ = fitted
    lines = {(line.name, line.ranks): line for line in fit.network.collectives}
    assert {name for name, _ in lines} == {
        *("gloo ring", "gloo recursive-doubling", "gloo leader"),
        *("gloo flat", "mpi flat", "mpi library-out-of-place"),
    }
    for ranks in (4, 8):
        assert lines["gloo flat", ranks].startup_s == pytest.approx(50e-6, rel=0.05)
        assert lines["mpi flat", ranks].per_byte_s == pytest.approx(2e-9, rel=0.05)
    # 2 (p - 1) steps, each across.
    assert lines["gloo ring", 8].startup_s == pytest.approx(14 * ACROSS[0], rel=0.05)


def test_leaf_switches_are_a_third_level(tmp_path: Path) -> None:
    """Two nodes below each: runs on two span one switch, on four two, on eight four."""
    asked: dict[str, Any] = {"points": (2, 4, 8), "backends": "none", "sizes": "1KiB:16MiB"}
    planted = factory.network(inside=INSIDE, across=ACROSS, beyond=(300e-6, 24e-9))
    factory.write_comm_series(tmp_path / "even", factory.Story(network=planted, leaf_nodes=2), **{**BOX, **asked})
    (fit,) = fit_all(table_of(tmp_path / "even")).fits
    assert [(name, level.links) for name, level in fit.network.levels.items()] == [
        ("inside", None),
        ("across", 1),
        ("beyond", 1),
    ]
    (beyond,) = fit.network.beyond.pieces
    assert beyond.alpha_s == pytest.approx(300e-6, rel=0.1)
    assert beyond.beta_s_per_byte == pytest.approx(24e-9, rel=0.1)
    assert "Ranks below one leaf switch share one link to other leaf switches." in fit_caption(fit.network)
    # Three nodes below one and one below the other are no blocks.
    factory.write_comm_series(
        tmp_path / "odd",
        factory.Story(network=planted, leaf_nodes=3),
        **{**BOX, **asked, "points": (2, 4), "sizes": "1KiB:1MiB"},
    )
    found = fit_all(table_of(tmp_path / "odd"))
    assert set(found.fits[0].network.levels) == {"inside", "across"}
    assert "leaf switches have unequal numbers of ranks" in found.unfitted[0]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({}, "a file contains one of box, local; choose with --system"),
        ({"system": "bx"}, "--system bx: not among the runs in runs: did you mean box"),
        ({"system": "local"}, "a file contains one of torch-gloo, mpi; choose with --transport"),
        ({"system": "local", "transport": "nccl"}, "--transport nccl: not among the runs"),
        ({"system": "box", "dtype": "bf16"}, "--dtype bf16: not among the runs in runs: did you mean fp16"),
    ],
)
def test_one_file_holds_one_network(tmp_path: Path, chosen: dict[str, str], message: str) -> None:
    small: dict[str, Any] = {"algorithms": "ring", "backends": "none", "sizes": "4KiB", "repeats": 1}
    factory.write_comm_series(tmp_path, **small)
    factory.write_comm_series(tmp_path, series="c2", launcher="mpirun", transport="mpi", **small)
    for series, dtype in (("c3", "fp32"), ("c4", "fp16")):
        factory.write_comm_series(tmp_path, series=series, dtype=dtype, **{**BOX, **small})
    wanted: dict[str, Any] = {"system": None, "transport": None, "dtype": None, **chosen}
    with pytest.raises(UserError, match=message):
        fit_one(table_of(tmp_path), fitted="", where="runs", **wanted)


def test_too_little_for_a_fit_is_incomplete_data(tmp_path: Path) -> None:
    small: dict[str, Any] = {"backends": "none", "sizes": "4KiB", "repeats": 1, "group_size": None}
    factory.write_comm_series(tmp_path / "a", algorithms="ring", **small)
    with pytest.raises(IncompleteDataError, match="local, torch-gloo, fp32: fit: needs"):
        the_fit(tmp_path / "a")
    factory.write_comm_series(tmp_path / "b", algorithms="none", **{**small, "backends": "gloo"})
    with pytest.raises(IncompleteDataError, match="one size only"):
        the_fit(tmp_path / "b")
    (plan,) = factory.comm_plans(algorithms="ring", **small)
    factory.write_unfinished_comm(tmp_path / "c", plan, "failed", "no memory left")
    with pytest.raises(IncompleteDataError, match="no memory left"):
        the_fit(tmp_path / "c")
    (tmp_path / "d").mkdir()
    with pytest.raises(IncompleteDataError, match="has figures; there are no runs"):
        the_fit(tmp_path / "d")


# Predictions

SIZES = (1024, 65536, 4 * 2**20)


def planted_with_lines() -> NetworkModel:
    lines = tuple(LineCost(name="mpi flat", startup_s=1e-3, per_byte_s=1e-9, ranks=ranks) for ranks in (4, 8))
    return factory.network().model_copy(update={"collectives": lines})


def test_predictions_are_those_of_the_cost_model() -> None:
    network = planted_with_lines()
    wanted = PredictionRequest(sizes=SIZES, group_size=4, workload_bytes=94_000_000)
    small, large = predict_all(network, (8, 64), wanted).predictions
    for found in (small, large):
        layout = Layout(ranks=found.ranks, group_size=4)
        for series in found.series:
            if series.is_line:
                continue
            assert list(series.seconds) == [predict("allreduce", series.name, size, layout, network) for size in SIZES]
            assert series.workload_s == predict("allreduce", series.name, 94_000_000, layout, network)
        for index, name in enumerate(found.best):
            chosen = next(series for series in found.series if series.name == name)
            assert chosen.seconds[index] == min(series.seconds[index] for series in found.series)
    # A line holds for the rank counts it was measured at.
    assert [series.name for series in small.series if series.is_line] == ["mpi flat"]
    assert not any(series.is_line for series in large.series)


def write_runs(
    folder: Path, *, repeats: int, sd: float, congestion: float = 0.0, nodes: tuple[int, ...] = (2, 4)
) -> None:
    """Runs on several nodes that scatter; links between nodes lose a share of their rate with each doubling."""
    noise = random.Random(3)
    for count in nodes:
        slow = (1 + congestion) ** math.log2(count / nodes[0])
        for plan in factory.comm_plans(**{**BOX, "points": (count,), "repeats": repeats, "backends": "none"}):
            network = factory.network(inside=INSIDE, across=(ACROSS[0], ACROSS[1] * slow))
            effect = noise.lognormvariate(0, sd)
            story = factory.Story(
                network=network, change=lambda p, by=effect: {"times_s": [t * by for t in p["times_s"]]}
            )
            factory.write_comm_run(folder, plan, story)


def test_costs_and_predictions_have_intervals_over_runs(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs", repeats=5, sd=0.1)
    fit = the_fit(tmp_path / "runs")
    low, high = fit.network.across.pieces[0].beta_interval_s_per_byte
    assert low < ACROSS[1] < high
    assert (high - low) / ACROSS[1] > 0.05  # with the run effect: points alone would say 1 %
    (found,) = predict_all(fit.network, (16,), PredictionRequest(sizes=SIZES, group_size=2)).predictions
    planted = factory.network(inside=INSIDE, across=ACROSS)
    for series in found.series:
        truth = [predict("allreduce", series.name, size, Layout(ranks=16, group_size=2), planted) for size in SIZES]
        for least, value, most, true in zip(series.low, series.seconds, series.high, truth, strict=True):
            assert least <= value <= most
            assert least * 0.95 <= true <= most * 1.05


def test_the_largest_rank_count_is_held_out(tmp_path: Path) -> None:
    """Links that congest by 15 % a doubling: what the fit misses widens intervals beyond, and they hold the truth."""
    write_runs(tmp_path / "even", repeats=3, sd=0.0)
    write_runs(tmp_path / "congested", repeats=3, sd=0.0, congestion=0.15, nodes=(2, 4, 8))
    even, congested = (the_fit(tmp_path / name).network for name in ("even", "congested"))
    assert (even.largest_held_out.ranks, even.largest_held_out.fitted_ranks) == (8, (4,))
    assert even.largest_held_out.median_error < 0.02
    told = congested.largest_held_out
    assert (told.ranks, told.fitted_ranks) == (16, (4, 8))
    assert 1 / 1.15**2 < told.by_size[-1].ratio < 1 / 1.15**0.5
    wanted = PredictionRequest(sizes=(4 * 2**20,), group_size=2, algorithms=("ring",))
    errors = []
    for network in (even, congested):
        found = predict_all(network, (4, 8, 16, 32, 64), wanted).predictions
        errors.append([1.0 if one.model_error is None else one.model_error for one in found])
    assert errors[0][2] < 1.15
    assert errors[1][:3] == [1, 1, 1]
    assert all(least < most for least, most in zip(errors[0][3:], errors[1][3:], strict=True))
    assert math.log(errors[1][4]) == pytest.approx(math.sqrt(2) * math.log(errors[1][3]))
    for one in found:
        slow = factory.network(inside=INSIDE, across=(ACROSS[0], ACROSS[1] * 1.15 ** math.log2(one.ranks / 4)))
        truth = predict("allreduce", "ring", 4 * 2**20, Layout(ranks=one.ranks, group_size=2), slow)
        (ring,) = one.series
        assert ring.low[0] <= truth * 1.01
        assert truth <= ring.high[0] * 1.01


def test_fusion_splits_gradients_into_whole_messages() -> None:
    network = factory.network()
    wanted = PredictionRequest(sizes=SIZES, algorithms=("ring",), workload_bytes=94_000_000)
    (found,) = predict_all(network, (8,), wanted).predictions
    assert found.fusion_of == "ring"
    assert (found.fusion_messages - 1) * found.fusion_bytes < 94_000_000 <= found.fusion_messages * found.fusion_bytes
    # Ring: 2 (p - 1) alpha and 2 (p - 1) / p beta, all inside the one group.
    assert found.fusion_bytes == pytest.approx(9 * 14 * 20e-6 / (14 / 8 * 0.5e-9), rel=0.01)
    assert found.fusion_workload_s > found.series[0].workload_s


@pytest.mark.parametrize(
    ("ranks", "wanted", "message"),
    [
        (1, {}, "two ranks or more"),
        (8, {"group_size": 3}, "--group-size 3: does not divide 8 ranks"),
        (8, {"group_size": 2, "leaf_size": 3}, "--leaf-size 3: must be whole groups of 2 ranks, and divide 8"),
        (8, {"group_size": 2, "leaf_size": 6}, "--leaf-size 6: must be whole groups of 2 ranks, and divide 8"),
        (8, {"algorithms": ("rings",)}, "no algorithm of allreduce: did you mean ring"),
        (8, {"algorithms": ("hierarchical",)}, "needs two groups of two ranks or more"),
    ],
)
def test_impossible_predictions_are_refused(ranks: int, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        predict_all(factory.network(), (ranks,), PredictionRequest(sizes=SIZES, **wanted))


def test_leaf_switches_are_priced_by_their_level() -> None:
    network = factory.network()
    slow = Level(pieces=(Piece(alpha_s=5e-4, beta_s_per_byte=1e-7),), links=1)
    sloped = network.model_copy(update={"beyond": slow})
    requests = [PredictionRequest(sizes=SIZES, group_size=2, leaf_size=leaf) for leaf in (8, 4)]
    one, two = (predict_all(sloped, (8,), request) for request in requests)
    assert layout_text(two, two.predictions[0]).endswith("8 ranks in 4 groups of 2 below 2 leaf switches")
    for within, beyond in zip(one.predictions[0].series, two.predictions[0].series, strict=True):
        assert all(less < more for less, more in zip(within.seconds, beyond.seconds, strict=True))
    # All four ranks below a switch send to the other one at once, over its one uplink.
    (halving,) = (one for one in two.predictions[0].series if one.name == "recursive-halving-doubling")
    assert set(halving.phi) == {4.0}
    text = terminal.to_text(predictions_document(two), full=True)
    assert f"{optional(halving.seconds[0], 's')} (phi 4)" in " ".join(text.split())
    assert "phi: flows that share a link" in " ".join(text.split())
    with pytest.raises(UserError, match="between leaf switches were never measured"):
        predict_all(network, (8,), PredictionRequest(sizes=SIZES, group_size=2, leaf_size=4))
