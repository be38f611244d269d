"""`dlbench diagnose`: the right name for a known loss, the next experiment under its conditions, and honest doubt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dlbench.analysis.attribution import attribute
from dlbench.analysis.causes import CAUSES
from dlbench.cli import cli
from dlbench.records.scan import scan
from dlbench.report.formats.terminal import whole_table
from dlbench.report.table import Cell, TextRow, TextTable
from dlbench.report.wording import DASH
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import FaultSpec
from dlbench.views.causes.numbers import adjusted_p, stands_out
from dlbench.views.command_reports import result_of
from dlbench.views.scaling_report import assemble, document_of
from tests.support.out_of_core_factory import reading_result
from tests.support.run_factory import Story, constant, edit_json, exchange_result, plans, write_run, write_unfinished
from tests.support.watch_factory import watch_result, write_samples

BASE = (5.0, 0.0, 30.0, 50.0, 0.0, 10.0)
"""Milliseconds of the phases at one rank; with 5 ms between steps 100 in all."""

GRADIENTS = [(4_000_000, 0.02), (2_000_000, 0.03), (1_000_000, 0.05)]
"""Bytes and second of readiness."""


def diagnose(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli, ["diagnose", "--full", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    return json.loads(diagnose(folder, "--format", "json", *arguments))


def diagnosed(group: dict[str, Any]) -> dict[str, Any]:
    """The causes of a group, without the factors."""
    return group["causes"]["diagnosed"]


def verdict(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    (group,) = as_json(folder, *arguments)["groups"]
    return diagnosed(group)["points"][-1]["verdict"]


def write_series(
    out: Path,
    slower: Mapping[str, float],
    *,
    repeats: int = 5,
    drift: Callable[[int, int], float] = lambda ranks, repeat: 1 + repeat / 1000,
    story: Callable[[RunPlan], Story] = lambda plan: Story(),
    fault: FaultSpec | None = None,
    **request: Any,
) -> None:
    """A series whose phases take so many milliseconds longer wherever there is more than one rank."""
    names = ("input", "h2d", "forward", "backward", "exchange", "optimizer", "other")
    for plan in plans(**{"points": (1, 2), "repeats": repeats, **request}):
        times = [*BASE, 5.0]
        if plan.layout.ranks > 1:
            times = [value + slower.get(name, 0.0) for name, value in zip(names, times, strict=True)]
        factor = drift(plan.layout.ranks, plan.series.repeat)
        times = [value * factor for value in times]
        planted = plan.model_copy(update={"fault": fault})
        write_run(out, planted, constant(times[:6], other=times[6]), story(plan))


def over_nodes(**more: Any) -> dict[str, Any]:
    """A request of one node of two ranks, then two of them."""
    return {"system": "box", "points": (2, 4), "ranks_per_node": 2, **more}


def told(plan: RunPlan) -> Story:
    result = exchange_result(plan, gradients=GRADIENTS, alpha_s=1e-4, beta_s_per_byte=5e-9)
    return Story(exchange=result if plan.layout.ranks > 1 else None)


def write_over_nodes(out: Path) -> None:
    """Five runs of each: 8 ms of exchange inside a node, 58 ms over two."""
    for plan in plans(**over_nodes(repeats=5)):
        times = [*BASE[:4], 8.0 if plan.layout.nodes == 1 else 58.0, BASE[5]]
        write_run(out, plan, constant(times, other=5.0), told(plan))


@pytest.mark.parametrize(
    ("phase", "cause", "name", "title"),
    [
        ("exchange", "exchange", "network-bound", "exchange on the wire"),
        ("input", "input", "input-bound", "input"),
        ("h2d", "input", "input-bound", "input"),
        ("backward", "compute", "compute-bound", "compute"),
        ("other", "host", "host-bound", "host between phases"),
    ],
)
def test_what_all_ranks_wait_for_is_named(tmp_path: Path, phase: str, cause: str, name: str, title: str) -> None:
    write_series(tmp_path, {phase: 25.0})
    found = verdict(tmp_path)
    assert (found["finding"], found["cause"], found["name"]) == ("found", cause, name)
    # 25 of 125 ms, equal in all runs: the interval is a point.
    assert found["line"].startswith(f"main cause: {title}, 20.0 points of 20.0 points lost")
    assert found["next"] == found["experiments"][0]["text"]
    assert found["bound"] == pytest.approx(0.25)


def write_late(out: Path, ranks: int, late: set[int], phase: int) -> None:
    """One rank, and several on two nodes of which some take 25 ms longer in a phase, a session each."""
    for plan in plans(points=(1, ranks), repeats=5):

        def times(rank: int, step: int, plan: RunPlan = plan) -> tuple[list[int], int]:
            phases = [round(value * 1e6) for value in BASE]
            if plan.layout.ranks > 1:
                phases[4] = 8_000_000 if rank in late else 33_000_000
                phases[phase] += 25_000_000 if rank in late else 0
            return phases, 5_000_000

        job = f"{plan.layout.ranks}{plan.series.repeat}"
        write_run(out, plan, times, Story(host=lambda rank: f"n{rank * 2 // ranks}", job=job))


def test_a_late_rank_is_named_with_what_holds_it_up(tmp_path: Path) -> None:
    write_late(tmp_path, 4, {3}, 0)
    text = diagnose(tmp_path)
    assert (
        "4 ranks: main cause: waiting for stragglers, 18.8 points of 24.8 points lost, 100 % for rank 3 on n1, late by "
        "its input; also exchange on the wire, 6.0 points. Next: "
    ) in " ".join(text.split())
    # 25 of 133 ms, and its row in the table: last in every step.
    assert "   3    n1    100 %           25 ms           100 %  input 25 ms\n" in text
    assert "--exclude=n1\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_late_host_is_named_where_all_its_ranks_are_late(tmp_path: Path) -> None:
    write_late(tmp_path, 8, {4, 5, 6, 7}, 3)
    text = diagnose(tmp_path)
    words = " ".join(text.split())
    assert (
        "8 ranks: main cause: waiting for stragglers, 18.8 points of 24.8 points lost, 100 % for the "
        "ranks of n1, late by their computing"
    ) in words
    assert "in turns" not in words
    found = verdict(tmp_path)
    assert [one["text"] for one in found["experiments"]] == [
        "run without the slow nodes (n1)",
        "look at n1: its ranks' computing (clocks, temperature, other work on its cores)",
    ]
    (group,) = as_json(tmp_path)["groups"]
    assert [host["host"] for host in diagnosed(group)["points"][-1]["waiting_hosts"]] == ["n1"]
    assert max(map(len, text.splitlines())) <= 80


def test_text_and_json_hold_the_same_numbers(tmp_path: Path) -> None:
    write_series(tmp_path, {"exchange": 25.0})
    found, text = as_json(tmp_path), diagnose(tmp_path)
    assert (found["format"], found["version"]) == ("dlbench.diagnosis", 1)
    (group,) = found["groups"]
    point = diagnosed(group)["points"][-1]
    shares = {one["name"]: one["lost"]["value"] for one in point["causes"]}
    assert sum(shares.values()) == pytest.approx(point["whole"]["lost"]["value"], abs=1e-12)
    assert shares["exchange"] == pytest.approx(0.2)
    assert re.search(r"of it on the wire +0 s +25\.05 ms +20\.0 points\n", text)
    assert re.search(r"sum: mean step  100\.20 ms  125\.2\d ms +20\.0 points\n", text)
    assert "clock throttling: not measured: node 0 has no samples" in text
    assert "nothing recomputes or swaps" not in text
    seconds = {one["name"]: one["seconds"]["value"] for one in point["causes"]}
    assert sum(seconds.values()) == pytest.approx(point["whole"]["seconds"]["value"])
    assert set(found) >= {"groups", "slow_nodes", "decomposition", "runs", "damaged"}


def test_full_text_leaves_nothing_out() -> None:
    header = ("cause", "1 rank", "2 ranks")
    cells = (("exchange", "1 ms [0.9, 1.1]", "2 ms"), ("input", "3 ms", DASH))
    table = TextTable(header, tuple(TextRow(tuple(map(Cell, row))) for row in cells))
    assert whole_table(table, 40) == [
        "   cause           1 rank  2 ranks",
        "exchange  1 ms [0.9, 1.1]     2 ms",
        f"   input             3 ms        {DASH}",
    ]
    # Side by side they do not fit: one below the other, each with the first column.
    assert [line.split()[0] for line in whole_table(table, 30) if line] == ["cause", "exchange", "input"] * 2
    # One column alone does not fit either: names and values, without what is missing.
    named = " ".join(" ".join(whole_table(table, 22)).split())
    assert named == "cause exchange 1 rank 1 ms [0.9, 1.1] 2 ranks 2 ms cause input 1 rank 3 ms"


def test_throttling_is_called_not_measured_where_some_run_does_not_tell(tmp_path: Path) -> None:
    for plan in plans(points=(1, 2, 3), repeats=2):
        folder = write_run(tmp_path, plan, constant(BASE, other=5.0), Story(record={"watch": watch_result()}))
        if (plan.layout.ranks, plan.series.repeat) != (2, 1):
            write_samples(folder, 0, ("host.cpu.throttled_s",), [(s * 10**9, 0.0) for s in range(6)])
    words = " ".join(diagnose(tmp_path).split())
    assert (
        "- clock throttling: not measured at 2 ranks: n0 has no samples: the file is gone; compute includes it."
        in words
    )
    (group,) = as_json(tmp_path)["groups"]
    assert [point["causes"][CAUSES.index("throttling")]["is_measured"] for point in diagnosed(group)["points"]] == [
        True,
        False,
        True,
    ]


# Doubt


def test_four_runs_that_all_lose_have_a_likely_cause(tmp_path: Path) -> None:
    write_series(tmp_path, {"exchange": 25.0}, repeats=4)
    found = verdict(tmp_path)
    assert (found["finding"], found["name"], found["cause"]) == ("likely", "network-bound", "exchange")
    assert found["line"] == "likely cause: exchange on the wire, 20.0 points of 20.0 points lost; only 4 runs"
    assert found["next"] == f"repeat with --repeats 5; then {found['experiments'][0]['text']}"
    (group,) = assemble(scan(tmp_path)).groups
    assert group.next_step.startswith("Repeat with --repeats 5; then ")


@pytest.mark.parametrize("repeats", [2, 3])
def test_two_or_three_runs_name_no_cause_and_claim_no_loss(tmp_path: Path, repeats: int) -> None:
    """Two equal runs a side named a "likely cause" in a fifth of the reports, and called a loss of 3 % none in 12 %."""
    write_series(tmp_path / "lost", {"exchange": 25.0}, repeats=repeats)
    write_series(tmp_path / "kept", {}, repeats=repeats)
    for folder, line in (("lost", "a loss of 20.0 points"), ("kept", "")):
        found = verdict(tmp_path / folder)
        assert (found["finding"], found["name"], found["next"]) == ("too few runs", "", "repeat with --repeats 5")
        assert found["line"].startswith(line)
        (group,) = assemble(scan(tmp_path / folder)).groups
        assert "no loss" not in group.verdict.lower()
        assert group.verdict.endswith(f"{found['line'][1:]}.")


def test_a_gain_within_the_noise_blames_nobody(tmp_path: Path) -> None:
    """All parts are faster by chance: no part lost, and still the interval is asked first."""

    def drift(ranks: int, repeat: int) -> float:
        return 1.0 if ranks == 1 else (0.9, 1.08, 0.85, 1.05, 0.97)[repeat]

    write_series(tmp_path, {}, drift=drift)
    found = verdict(tmp_path)
    assert (found["finding"], found["cause"]) == ("within noise", "")
    assert found["line"].startswith("the gain of ")
    assert "handicap" not in found["line"]


def test_a_loss_within_the_noise_is_not_explained(tmp_path: Path) -> None:
    """At two ranks half of the runs are 20 % slower, half of them 15 % faster than the baseline."""

    def drift(ranks: int, repeat: int) -> float:
        return 1.0 if ranks == 1 else (1.2 if repeat % 2 else 0.85)

    write_series(tmp_path, {}, drift=drift, repeats=6)
    found = verdict(tmp_path)
    assert found["finding"] == "within noise"
    assert re.match(r"the loss of 1 points \[-\d+, \d+\] is within the noise of 6 runs; ", found["line"])
    assert found["next"] == "repeat with --repeats 12"


@pytest.mark.parametrize(
    ("slower", "finding", "line"),
    [
        ({"exchange": 0.5}, "small loss", "no loss worth explaining (0.5 points lost)"),
        ({}, "no loss", "nothing is lost"),
        (
            {"backward": -20.0},
            "above ideal",
            "25.0 points above 100 %: the baseline ran with a handicap, or its runs drifted",
        ),
    ],
)
def test_nothing_lost_is_said_so(tmp_path: Path, slower: dict[str, float], finding: str, line: str) -> None:
    write_series(tmp_path, slower, drift=lambda ranks, repeat: 1.0)
    found = verdict(tmp_path)
    assert (found["finding"], found["line"], found["cause"]) == (finding, line, "")


# The next experiment


def experiments(folder: Path, *arguments: str | Path) -> list[str]:
    return [one["text"] for one in verdict(folder, *arguments)["experiments"]]


def test_flat_exchange_over_nodes_may_be_hierarchical(tmp_path: Path) -> None:
    write_over_nodes(tmp_path)
    texts = experiments(tmp_path)
    assert texts[0] == "use the hierarchical exchange (--set sync.exchange=hierarchical)"
    assert all("fp16" not in text for text in texts)  # Gloo on a CPU
    assert verdict(tmp_path)["next"].startswith("use the hierarchical exchange")


def test_on_one_node_there_is_no_hierarchy(tmp_path: Path) -> None:
    write_series(tmp_path, {"exchange": 25.0}, story=told)
    texts = experiments(tmp_path)
    assert all("hierarchical" not in text for text in texts)
    # One message a tensor: what `exchange_result` says that ran.
    assert texts[0].startswith("merge messages by their costs (--set sync.fusion=own:mgwfbp")
    assert "--set measure.warmup_steps=4" in texts[0]
    assert texts[1] == "send one message (--set sync.fusion=own:single)"


@pytest.mark.parametrize("phase", ["exchange", "other"])
def test_a_larger_batch_is_no_advice_where_the_batch_of_all_ranks_is_fixed(tmp_path: Path, phase: str) -> None:
    for scaling in ("weak", "strong"):
        # Half the samples per rank: half of every phase, and what is lost beside.
        times = {1: [*BASE, 5.0], 2: [value / (2 if scaling == "strong" else 1) for value in (*BASE, 5.0)]}
        times[2][4 if phase == "exchange" else 6] += 25.0
        for plan in plans(scaling=scaling, repeats=5):
            own = times[plan.layout.ranks]
            write_run(tmp_path / scaling, plan, constant(own[:6], other=own[6]))
    assert any("a larger batch" in text for text in experiments(tmp_path / "weak"))
    assert verdict(tmp_path / "strong")["finding"] == "found"
    assert not any("a larger batch" in text for text in experiments(tmp_path / "strong"))


def test_fixed_work_under_strong_scaling_is_no_slower_computing(tmp_path: Path) -> None:
    """The optimizer takes as long at two ranks as at one; that is no matter of where ranks are placed."""
    for plan in plans(scaling="strong", repeats=5, overrides={"train.batch_per_rank": 8}):
        half = 1 / plan.layout.ranks
        write_run(tmp_path / "strong", plan, constant([0.0, 0.0, 30 * half, 50 * half, 0.0, 20.0]))
    found = verdict(tmp_path / "strong")
    assert found["line"] == "main cause: compute, 16.7 points of 16.7 points lost"
    assert found["next"].startswith(
        "use a larger global batch (--set train.batch_per_rank=16, that of the smallest rank count) or weak scaling "
        "(--scaling weak)"
    )
    first, *others = experiments(tmp_path / "strong")
    assert first.endswith(": the largest part is the optimizer")
    assert others
    assert not any("--ranks-per-node" in text for text in others)
    write_series(tmp_path / "weak", {"optimizer": 20.0})
    # One machine without a scheduler has no other node to place ranks on.
    assert not any("--ranks-per-node" in text for text in experiments(tmp_path / "weak"))
    for plan in plans(**over_nodes(repeats=5)):
        slower = 20.0 * (plan.layout.nodes > 1)
        write_run(tmp_path / "nodes", plan, constant([0.0, 0.0, 30.0, 50.0 + slower, 0.0, 20.0]))
    assert "--ranks-per-node" in experiments(tmp_path / "nodes")[0]


def test_half_the_bytes_are_worth_a_try_where_the_carrier_adds_them_fast(tmp_path: Path) -> None:
    def story(plan: RunPlan) -> Story:
        if plan.layout.ranks == 1:
            return Story(device="cuda:0 (NVIDIA H200)")
        result = exchange_result(plan, gradients=GRADIENTS, alpha_s=1e-4, beta_s_per_byte=5e-9, carrier="nccl")
        return Story(device="cuda:0 (NVIDIA H200)", exchange=result)

    write_series(tmp_path, {"exchange": 25.0}, story=story)
    assert any("--set sync.wire=fp16" in text for text in experiments(tmp_path))


def test_input_of_files_has_experiments_of_its_own(tmp_path: Path) -> None:
    def story(plan: RunPlan) -> Story:
        return Story(data={"kind": "jpeg-tree"})

    more = {"data": "/data/pictures", "overrides": {"layout.cores_per_rank": 4, "data.loader_workers": 1}}
    write_series(tmp_path, {"input": 25.0}, story=story, **more)
    assert experiments(tmp_path) == [
        "use more readers (--set data.loader_workers=auto measures how many of those that 4 cores per rank allow)",
        "prepare the data once (dlbench data pack: shards)",
        "separate storage from preparing with synthetic, cached and cold data: dlbench io "
        "sample --preset tiny --data /data/pictures --ranks 2 --tiers --repeats 5",
    ]


def test_readers_that_training_left_no_cores_for_ask_for_more_of_them(tmp_path: Path) -> None:
    found = reading_result(loader_workers=4, training_cores=4, limited_by_cores=True)
    more = {"data": "/data/pictures", "overrides": {"layout.cores_per_rank": 8, "data.loader_workers": "auto"}}
    write_series(
        tmp_path, {"input": 25.0}, story=lambda plan: Story(data={"kind": "x"}, record={"reading": found}), **more
    )
    texts = experiments(tmp_path)
    assert (
        "give each rank more cores (--set layout.cores_per_rank=16; training keeps 4 of 8, which left 4 to readers)"
        in texts
    )
    assert not any(text.startswith("use more readers") for text in texts)


# What the reader must know beside the figures


def test_planted_faults_and_the_cost_of_watching_are_told(tmp_path: Path) -> None:
    overhead = {"value": 0.004, "low": 0.001, "high": 0.007, "evidence": "5"}

    def story(plan: RunPlan) -> Story:
        return Story(record={"watch": watch_result(overhead=overhead)})

    write_series(
        tmp_path, {"input": 25.0}, story=story, fault=FaultSpec(input_delay_s=0.025), overrides={"watch.period_s": 2.0}
    )
    for path in tmp_path.glob("*/record.json"):
        ranks = json.loads(path.read_text())["ranks"]
        if len(ranks) > 1:
            edit_json(path, ranks=[{**rank, "planted_s": 0.3} for rank in ranks])
    text = diagnose(tmp_path)
    assert "\nA fault was injected on purpose: input_delay_s=0.025.\n" in text
    assert "- Planted at 2 ranks, per step: rank 0 25 ms, rank 1 25 ms.\n" in text
    words = " ".join(text.split())
    assert "- Monitoring (period_s=2.0) cost 0.40 % [0.10, 0.70] of a step (accounted, 10 runs)." in words
    assert "10 runs with an injected fault left out." in words


def test_variants_of_a_decomposition_are_not_diagnosed_by_themselves(tmp_path: Path) -> None:
    write_series(tmp_path / "all", {"exchange": 25.0}, repeats=1)
    for plan in plans(points=(2,), repeats=1, series="other", overrides={"sync.exchange": "none"}):
        series = plan.series.model_copy(update={"variant": "no-exchange"})
        write_run(tmp_path / "all", plan.model_copy(update={"series": series}), constant(BASE, 5.0))
        write_run(tmp_path / "alone", plan.model_copy(update={"series": series}), constant(BASE, 5.0))
    (plain,) = as_json(tmp_path / "all")["groups"]
    assert plain["causes"]["diagnosed"]["points"]
    assert [one["kinds"] for one in plain["controls"]] == [["no-exchange"]]
    (variant,) = as_json(tmp_path / "alone")["groups"]
    assert variant["causes"] is None
    assert "no-exchange" in variant["label"]
    assert "Where the time goes: not shown: in these runs something was taken away" in diagnose(tmp_path / "alone")


# The command


def test_damaged_and_empty_folders_end_with_four(tmp_path: Path) -> None:
    write_series(tmp_path, {"exchange": 25.0}, repeats=1)
    (victim,) = tmp_path.glob("*n0002*/node-0000.steps")
    victim.write_bytes(victim.read_bytes()[:-1])
    result = CliRunner().invoke(cli, ["diagnose", "--full", str(tmp_path)])
    assert result.exit_code == 4
    assert "baseline: 90.0 % of a step is compute" in result.stdout
    assert str(victim) in result.stderr
    write_unfinished(tmp_path / "dead", plans(points=(2,), repeats=1)[0])
    result = CliRunner().invoke(cli, ["diagnose", "--full", str(tmp_path / "dead")])
    assert result.exit_code == 4
    assert "No run has figures." in result.stdout
    assert "incomplete" in result.stdout


SHARES = MappingProxyType(
    dict(zip(CAUSES, (0.76, 0.10, 0.03, 0.0, 0.05, 0.02, 0.0, 0.01, 0.01, 0.02, 0.0), strict=True))
)
Runs = dict[tuple[str, int], dict[str, float]]


def runs(generator: np.random.Generator, scatter: float, repeats: int = 5) -> Runs:
    """Causes of equal runs: half of the scatter is of whole runs, half of each cause."""
    whole = generator.lognormal(0, scatter, repeats)
    return {
        ("", k): {name: share * whole[k] * generator.lognormal(0, scatter) for name, share in SHARES.items()}
        for k in range(repeats)
    }


@pytest.mark.parametrize("scatter", [0.01, 0.03])
def test_equal_runs_have_no_cause(scatter: float) -> None:
    """The largest of eight causes had an interval above 0 in 5 to 14 % of such reports."""
    generator = np.random.default_rng(5)
    trials, found = 150, 0
    for _ in range(trials):
        parts = attribute(runs(generator, scatter), runs(generator, scatter), work=1, names=CAUSES).parts
        (adjusted,) = adjusted_p([parts])
        found += any(stands_out(part, adjusted[part.name]) for part in parts if part.name in adjusted)
    assert found <= 0.05 * trials


def test_all_rank_counts_and_groups_count() -> None:
    generator = np.random.default_rng(6)
    base = runs(generator, 0.02)
    parts = attribute(runs(generator, 0.02), base, work=1, names=CAUSES).parts
    at_base = attribute(base, base, work=1, is_baseline=True, names=CAUSES).parts
    (alone,) = adjusted_p([parts])
    nothing, more, _ = adjusted_p([at_base, parts, parts], num_groups=3)
    least = min(alone, key=lambda name: alone[name].value)
    assert nothing == {}
    assert more[least].value == pytest.approx(min(1.0, 6 * alone[least].value))


def test_a_cause_larger_than_the_loss_is_set_beside_what_others_gain(tmp_path: Path) -> None:
    """25 ms of exchange more, 20 ms of backward less, in a step of 100 ms."""
    for plan in plans(points=(1, 2), repeats=5):
        is_base = plan.layout.ranks == 1
        times = [5.0, 0.0, 30.0, 60.0 if is_base else 40.0, 0.0 if is_base else 25.0, 0.0]
        write_run(tmp_path, plan, constant(times, other=5.0))
    found = verdict(tmp_path)
    assert found["cause"] == "exchange"
    # Lost is one number, 1 - efficiency; a part that is larger is no part "of" it.
    assert found["line"] == (
        "main cause: exchange on the wire, 23.8 points; 4.8 points lost in all, as other parts gain 19.0 points"
    )


def test_a_small_certain_part_of_a_large_loss_is_no_main_cause(tmp_path: Path) -> None:
    """4 ms of exchange in every run, and 10 to 70 ms of backward more in a step of 100 ms."""
    for plan in plans(points=(1, 2), repeats=5):
        times = [5.0, 0.0, 30.0, 60.0, 0.0, 0.0]
        if plan.layout.ranks == 2:
            times[3] += (70.0, 10.0, 60.0, 11.0, 30.0)[plan.series.repeat]
            times[4] = 4.0
        write_run(tmp_path, plan, constant(times, other=5.0))
    found = verdict(tmp_path)
    assert (found["finding"], found["cause"], found["name"]) == ("partial", "exchange", "")
    assert (found["experiments"], found["next"]) == ([], "repeat with --repeats 10")
    sure = "certain: exchange on the wire, 2.9 points"
    rest = "of 28 points lost; the rest (compute 25 points) is too uncertain in 5 runs to name"
    assert found["line"] == f"{sure} [2.2, 3.6] {rest}"
    # The card, the report's verdict, the table of experiments and the end of a run say the same.
    report = assemble(scan(tmp_path))
    (card,) = document_of(report).sections[0].cards
    (group,) = report.groups
    assert dict(card.facts)["Loss"] == f"{sure} of 28 points; larger parts are too uncertain to name"
    assert "Certain: exchange on the wire" in group.verdict
    (screen,) = result_of(scan(tmp_path))[1].sections
    assert group.verdict in screen.brief
    assert "network-bound" not in diagnose(tmp_path)


def test_runs_are_bound_by_nothing_that_is_less_than_a_third_of_the_loss(tmp_path: Path) -> None:
    write_series(tmp_path, {"exchange": 6.0, "input": 5.0, "backward": 5.0, "other": 5.0})
    found = verdict(tmp_path)
    assert (found["finding"], found["cause"], found["name"]) == ("found", "exchange", "")
    assert found["line"].startswith("main cause: exchange on the wire, 5.0 points of 17.4 points lost; also ")
