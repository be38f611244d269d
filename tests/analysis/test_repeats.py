"""Repeats and comparable runs: no figure is made of runs that were asked for, or met, unlike without a word on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dlbench.analysis.comparability import (
    NOT_SHAPING_OPTIONS,
    averaged_id,
    group_id,
    is_shaping,
    planned_id,
)
from dlbench.analysis.repeats import mixed_configurations
from dlbench.cli import cli as dlbench
from dlbench.records.folder import RunFolder
from dlbench.records.scan import Run, scan
from dlbench.specs.plan import RunPlan
from dlbench.specs.system import SystemSpec
from dlbench.views.scaling_report import assemble
from tests.support.run_factory import Story, constant, plans, write_run

PHASES = (5.0, 0.0, 30.0, 45.0, 10.0, 10.0)
SLURM = {"system.scheduler": "slurm", "system.launch.launcher": "srun-gloo", "system.node.cores": 8}

ASKED = {
    "system.modules": "openmpi/5.0",
    "system.slurm.partition": "other",
    "system.slurm.exclusive": False,
    "system.python": "/opt/python/bin/python3",
}


def write_every_second(out: Path, change: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Path:
    """Six runs on a cluster, of which every second was asked for, or met, something else."""
    asked = {**SLURM, **change}
    for plan, other in zip(
        plans(points=(1,), repeats=6, overrides=SLURM), plans(points=(1,), repeats=6, overrides=asked), strict=True
    ):
        odd = plan.series.repeat % 2 == 1
        story = Story(environment={"host": "n0", **(environment or {})} if odd and environment else {"host": "n0"})
        write_run(out, other if odd else plan, constant(PHASES), story)
    return out


@pytest.mark.parametrize("key", ASKED)
def test_what_was_asked_of_the_system_unlike_is_reported_apart(tmp_path: Path, key: str) -> None:
    report = assemble(scan(write_every_second(tmp_path, {key: ASKED[key]})))
    assert [[len(point.run_ids) for point in group.points] for group in report.groups] == [[3], [3]]
    assert len({group.label for group in report.groups}) == 2
    assert {one.value for group in report.groups for one in group.conditions if one.name == key} >= {str(ASKED[key])}


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    out = tmp_path_factory.mktemp("six")
    for plan in plans(points=(1,), repeats=6):
        write_run(out, plan, constant(PHASES))
    return scan(out).runs


def with_attempts(runs: Sequence[Run], attempts: Sequence[tuple[int, int]]) -> list[Run]:
    found = []
    for run, (attempt, first_step) in zip(runs, attempts, strict=True):
        record = run.record.model_copy(update={"attempt": attempt, "first_step": first_step})
        found.append(dataclasses.replace(run, record=record))
    return found


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 5])), min_size=6, max_size=6))
@settings(max_examples=8)  # each makes some thirty digests
def test_runs_that_went_on_after_an_interruption_are_averaged_with_no_clean_one(
    six: list[Run], attempts: list[tuple[int, int]]
) -> None:
    """Those that began anew are clean: nothing of an earlier attempt is in their figures."""
    runs = with_attempts(six, attempts)
    went_on = [attempt > 1 and first_step > 0 for attempt, first_step in attempts]
    assert {(averaged_id(run), gone) for run, gone in zip(runs, went_on, strict=True)} == {
        (averaged_id(with_attempts(six[:1], [(2, 5) if gone else (1, 0)])[0]), gone) for gone in set(went_on)
    }
    assert len({averaged_id(run) for run in runs}) == len(set(went_on))
    assert len({group_id(run) for run in runs}) == len(set(went_on))
    # A run that died is looked for in both.
    assert len({planned_id(run) for run in runs}) == 1


def test_runs_that_went_on_after_an_interruption_are_reported_apart(tmp_path: Path) -> None:
    for plan in plans(points=(1,), repeats=6):
        went_on = {"attempt": 2, "first_step": 7} if plan.series.repeat % 2 else {}
        write_run(tmp_path, plan, constant(PHASES), Story(record=went_on))
    report = assemble(scan(tmp_path))
    assert [[len(point.run_ids) for point in group.points] for group in report.groups] == [[3], [3]]
    assert sorted("after an interruption" in group.label for group in report.groups) == [False, True]
    one, other = scan(tmp_path).runs[:2]
    assert group_id(one) != group_id(other)
    # Begun anew it is a run like any other.
    anew = other.record
    assert group_id(dataclasses.replace(other, record=anew.model_copy(update={"first_step": 0}))) == group_id(one)


def test_doubts_say_whether_runs_are_averaged_or_compared(tmp_path: Path) -> None:
    old, new = {"kernel": "6.1", "host": "n0"}, {"kernel": "6.2", "host": "n1"}
    assert mixed_configurations({"1 rank": {"a": old, "b": old}, "2 ranks": {"c": {**old, "host": "n7"}}}) == []
    (compared,) = mixed_configurations({"1 rank": {"a": old}, "2 ranks": {"b": new}})
    assert compared.text.startswith("compared figures are of different configurations: kernel: 6.1 in 1, 6.2 in 1")
    (averaged,) = mixed_configurations({"1 rank": {"a": old, "b": new}, "2 ranks": {"c": old}})
    assert averaged.text == "runs that are averaged (at 1 rank) are not repeats: kernel: 6.1 in 2, 6.2 in 1"


OWN_VARIABLES = {
    "1 rank": {"HOROVOD_AUTOTUNE": "0", "HOROVOD_CYCLE_TIME": "1.0", "HOROVOD_GLOO_IFACE": "lo"},
    "2 ranks": {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "3", "HOROVOD_GLOO_IFACE": "lo"},
    "16 ranks": {"HOROVOD_AUTOTUNE": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_GLOO_IFACE": "eth0"},
}


def test_what_dlbench_sets_itself_by_the_rank_count_is_no_difference() -> None:
    places = {
        at: {at: {f"variable.{name}": value for name, value in found.items()}} for at, found in OWN_VARIABLES.items()
    }
    assert mixed_configurations(places) == []
    places["16 ranks"]["other"] = {**places["16 ranks"]["16 ranks"], "variable.HOROVOD_GLOO_IFACE": "ib0"}
    (doubt,) = mixed_configurations(places)
    assert doubt.text == (
        "runs that are averaged (at 16 ranks) are not repeats: variable.HOROVOD_GLOO_IFACE: not set in 2, eth0 in 1, "
        "ib0 in 1"
    )


FACTS = st.dictionaries(st.sampled_from(["kernel", "package.torch", "variable.NCCL_ALGO"]), st.sampled_from("ab"))


@given(st.lists(st.lists(FACTS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_unequal_facts_are_named_and_equal_ones_are_not(cells: list[list[dict[str, str]]]) -> None:
    places = {str(i): {f"{i}.{j}": run for j, run in enumerate(runs)} for i, runs in enumerate(cells)}
    texts = " ".join(doubt.text for doubt in mixed_configurations(places))
    for key in ("kernel", "package.torch", "variable.NCCL_ALGO"):
        values = {run.get(key) for runs in cells for run in runs}
        assert (f"{key}:" in texts) is (len(values) > 1)
    is_averaged = any(len({json.dumps(run, sort_keys=True) for run in runs}) > 1 for runs in cells)
    assert ("averaged" in texts) is is_averaged


# The gate


@pytest.mark.parametrize("key", ASKED)
@pytest.mark.parametrize("command", ["compare", "check"])
def test_a_side_of_unlike_runs_is_refused_and_can_be_chosen(tmp_path: Path, key: str, command: str) -> None:
    old = write_every_second(tmp_path / "old", {key: ASKED[key]})
    new = tmp_path / "new"
    for plan in plans(points=(1,), repeats=5, overrides=SLURM):
        write_run(new, plan, constant(PHASES))
    sides = [str(old), str(new)] if command == "compare" else ["--baseline", str(old), "--candidate", str(new)]
    result = CliRunner().invoke(dlbench, [command, *sides])
    assert "are not repeats of each other" in str(result.exception)
    assert f"{key}: " in str(result.exception)
    # Other software between the sides is what a gate is for.
    chosen = CliRunner().invoke(dlbench, ["compare", *map(str, (old, new)), "--where-a", f"{key}={_said(key)}"])
    assert "insufficient" in chosen.output


def _said(key: str) -> str:
    return str(ASKED[key])


def test_a_side_that_met_unlike_software_says_so(tmp_path: Path) -> None:
    old = write_every_second(tmp_path / "old", {}, {"package.torch": "2.9.1"})
    baseline = tmp_path / "baseline.json"
    assert CliRunner().invoke(dlbench, ["baseline", str(old), "--output", str(baseline)]).exit_code == 0
    new = tmp_path / "new"
    for plan in plans(points=(1,), repeats=6, overrides=SLURM, series="new"):
        write_run(new, plan, constant(PHASES))
    for side in (old, baseline):
        words = " ".join(CliRunner().invoke(dlbench, ["compare", str(side), str(new)]).output.split())
        assert "A: runs that are averaged are not repeats: package.torch: 2.9.1 in 3, not set in 3" in words


# Complete by construction


def _leaves(spec: type[BaseModel], path: str) -> Iterator[tuple[str, Any]]:
    for name, field in spec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{path}.{name}")
        else:
            yield f"{path}.{name}", field.annotation


LEAVES = dict(_leaves(SystemSpec, "system"))

# Keys whose values cannot be made from their type alone.
OTHER_VALUES: Mapping[str, Any] = {
    "system.scheduler": "none",
    **dict.fromkeys(("system.slurm.time_limit", "system.slurm.max_time"), "01:00:00"),
    "system.slurm.extra": ["switches=2"],
    "system.slurm.srun_args": ["cpu-freq=high"],
    "system.slurm.export": ["NCCL_ALGO"],
    "system.slurm.mem": "8G",
    "system.slurm.mem_per_gpu": "8G",
    "system.node.peak_tflops": {"fp32": 60.0},
    "system.launch.environment": {"NCCL_ALGO": "Ring"},
    "system.device": {"source": "a data sheet"},
    "system.network": {"across": {"alpha_s": 1e-6, "gb_per_s": 10.0, "source": "a data sheet"}},
    "system.storage.local.path": "/scratch",
    "system.storage.memory.path": "/mnt/ram",
    "system.modules": ["gcc/13"],
    "system.modules_init": [". /etc/profile"],
    "system.setup": ["ulimit -l unlimited"],
    "system.container.kind": "podman",
    "system.container.image": "/other.sif",
    "system.container.sha256": "1" * 64,
    "system.container.as_planned": "1 2",
    "system.container.mounts": ["/data"],
    "system.container.pass_in": ["FI_PROVIDER"],
    "system.container.withhold": ["FI_PROVIDER"],
    "system.container.args": ["--containall"],
}


def _other(key: str, annotation: Any, value: Any) -> Any:
    """Another value than the one that stands there; a new key of a new type needs a line in `OTHER_VALUES`."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    options = [annotation]
    while options:
        one = options.pop()
        origin = get_origin(one)
        if origin is Annotated:
            options.append(get_args(one)[0])
        elif origin in (Union, UnionType):
            options += get_args(one)
        elif origin is Literal:
            return next(each for each in get_args(one) if each != value and each not in ("none", "local"))
        elif one is bool:
            return not value
        elif one is int:
            return (value or 1) + 1
        elif one is str:
            return f"{value or ''}x"
    raise AssertionError(f"{key}: give it another value in OTHER_VALUES")


def _run(plan: RunPlan, change: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Run:
    content = plan.model_dump(mode="json")
    for key, value in change.items():
        *path, name = key.split(".")
        place = content
        for part in path:
            place = place[part]
        place[name] = value
    return Run(folder=RunFolder(Path("x")), plan=RunPlan.model_validate(content), statuses=[], record=None)


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_of_a_system_shapes_repeats_or_is_listed(key: str) -> None:
    tier = "memory" if key.startswith("system.storage.memory") else "local"
    (plan,) = plans(
        points=(1,),
        repeats=1,
        data="/data/pictures",
        overrides={
            **SLURM,
            "data.staging": "replicate",
            "data.staging_tier": tier,
            "system.slurm.partition": "p",
            "system.slurm.gpu_request": "gres",
        },
    )
    # With a source for peak rates, so that only one key changes below.
    others = {"system.node.peak_source": "data sheet"}
    if key.startswith("system.container."):
        others |= {"system.container.kind": "apptainer", "system.container.image": "/a.sif"}
    before = _run(plan, others)
    place = before.plan.model_dump(mode="json")
    for part in key.split("."):
        place = place[part]
    value = _other(key, LEAVES[key], place)
    after = _run(before.plan, {key: value})
    assert (averaged_id(after) != averaged_id(before)) is is_shaping(key)
    if key != "system.name" and not key.startswith("system.launch."):
        assert group_id(after) == group_id(before)


@pytest.mark.parametrize(("option", "apart"), [("switches=1", True), ("comment=x", False), ("mail-user=me", False)])
def test_further_options_of_slurm_count_where_they_shape_speed(option: str, apart: bool) -> None:
    (plan,) = plans(points=(1,), repeats=1, overrides=SLURM)
    other = _run(plan, {"system.slurm.extra": [option]})
    assert (averaged_id(other) != averaged_id(_run(plan, {}))) is apart
    assert (option.partition("=")[0] in NOT_SHAPING_OPTIONS) is not apart


# Products of their own
