"""What `make gpu-check` would run on machines that nobody here has: dlbench's own command line plans each command."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import AREAS, PARTS
from dlbench.cli import cli, options
from dlbench.machine import arithmetic
from tests.gpu.steps import DLBENCH, FIRST, GIB, LAST, TESTS, Machine, Step, seconds, steps

H100 = Machine(gpus=1, name="NVIDIA H100 80GB HBM3", uuids=("GPU-0",), memory_bytes=79 * GIB, capability=(9, 0))


def machine(
    gpus: int, *, memory: int = 79, capability: tuple[int, int] = (9, 0), nccl_tests: str = "/opt/perf"
) -> Machine:
    if not gpus:
        return Machine(why="torch sees no GPU")
    return Machine(
        gpus=gpus,
        name="made card",
        uuids=tuple(f"GPU-{number}" for number in range(gpus)),
        memory_bytes=memory * GIB,
        capability=capability,
        nccl_tests=nccl_tests,
    )


def of_dlbench(step: Step) -> list[str]:
    """What follows `dlbench`; empty for other programs."""
    return list(step.words[len(DLBENCH) :]) if step.words[: len(DLBENCH)] == DLBENCH else []


@pytest.mark.parametrize("found", [machine(1, memory=15, capability=(7, 5)), machine(8)], ids=["one T4", "eight H100"])
def test_every_command_of_dlbench_is_planned_by_dlbench_itself(
    found: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine with the device file of a driver: presets for GPUs are planned.
    monkeypatch.setattr(arithmetic, "_GPU_FILES", {"dev/null": ()})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # An earlier step makes the data, in seconds; `tests/real` trains with them.
    monkeypatch.setattr(options, "require_data", lambda plans: None)
    seen: set[str] = set()
    for step in steps(found, tmp_path, figures=True):
        words = of_dlbench(step)
        if not words or step.why:
            continue
        if step.needs is not None:
            step.needs.mkdir(exist_ok=True, parents=True)
        if words[0] == "run" or words[:2] == ["comm", "run"]:
            if not step.environment:  # by UUID: the same again
                done = CliRunner().invoke(cli, [*words, "--dry-run"])
                ends = {0, 5} if step.may_lack else {0}
                assert done.exit_code in ends, f"{step.name}: {' '.join(words)}\n{done.output}\n{done.exception!r}"
            # Two steps of one folder must not have one series: their runs would be taken for each other's.
            series = words[words.index("--out") + 1] + "/" + words[words.index("--series") + 1]
            assert series not in seen, series
            seen.add(series)
        else:
            _parsed(words)
    assert len(seen) > 15


def _parsed(words: list[str]) -> None:
    """Raises click's usage error."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        command, words = found, words[1:]
    command.make_context("dlbench", list(words))


def test_without_a_gpu_only_doctor_is_asked(tmp_path: Path) -> None:
    found = steps(machine(0), tmp_path, figures=True)
    assert [one.name for one in found if not one.why] == ["doctor"]
    assert {one.why for one in found[1:]} == {"torch sees no GPU"}


def test_what_needs_more_gpus_says_so(tmp_path: Path) -> None:
    one, two, eight = (steps(machine(count), tmp_path, figures=False) for count in (1, 2, 8))
    several = [step for step in one if "GPUs" in step.name and "by UUID" not in step.name]
    assert len(several) > 20
    assert {step.why for step in several} == {"one GPU"}
    assert {step.why for step in two if step.why} == {"two groups of two ranks need 4 GPUs, here are 2"}
    assert [step.name for step in eight if step.why] == []
    for step in eight:
        if "two groups" in step.name:
            assert {"sync.exchange=hierarchical", "sync.group_size=4", "8"} <= set(step.words)
        elif "8 GPUs" in step.name and of_dlbench(step):
            assert step.words[step.words.index("--ranks") + 1] == "8"
    engines = " ".join(step.name for step in eight)
    for wanted in (
        "ddp",
        "horovod",
        "fsdp",
        "fsdp, tensor parallel",
        "own exchange,",
        "own exchange in two groups",
        "fp16 on the wire",
        "timeline",
        "comm",
    ):
        assert f"{wanted}" in engines


def test_gpus_by_uuid_stand_in_another_order_than_by_number(tmp_path: Path) -> None:
    by_uuid = [step for step in steps(machine(4), tmp_path, figures=False) if step.environment]
    assert len(by_uuid) >= 8
    for step in by_uuid:
        assert step.environment["CUDA_VISIBLE_DEVICES"] == "GPU-3,GPU-2,GPU-1,GPU-0"
    unknown = steps(Machine(gpus=2, memory_bytes=79 * GIB, capability=(9, 0)), tmp_path, figures=False)
    assert {step.why for step in unknown if "by UUID" in step.name} >= {"NVML and torch do not say the GPUs' UUIDs"}


def test_breakage_stands_before_long_presets_and_each_file_of_tests_once(tmp_path: Path) -> None:
    names = [step.name for step in steps(H100, tmp_path, figures=False)]
    assert len(names) == len(set(names))
    first = names.index("tests of no synchronisation")
    assert names[0] == "doctor"
    assert first < names.index("bert gpu, single")
    assert names.index("tests of presets") < names.index("resnet50 gpu, single")
    own = {"test_steps", "test_check"}
    files = {path.stem for path in TESTS.glob("test_*.py")} - own
    assert {f"test_{name}" for name in (*FIRST, *LAST)} - files <= {"test_out_of_core"}
    asked = [
        word for step in steps(H100, tmp_path, figures=False) for word in step.words if word.startswith("tests/gpu/")
    ]
    assert sorted(asked) == sorted(f"tests/gpu/{name}.py" for name in files)


def test_what_a_step_needs_is_made_by_one_before_it(tmp_path: Path) -> None:
    made: list[Step] = []
    for step in steps(H100, tmp_path, figures=False):
        if step.needs is not None:
            assert any(step.needs.is_relative_to(maker.makes) for maker in made if maker.makes), step.name
        made.append(step)
    (checkpoints,) = (step for step in made if step.name == "bert ci, checkpoints")
    assert checkpoints.makes is not None
    series = checkpoints.words[checkpoints.words.index("--series") + 1]
    assert checkpoints.makes.name == f"{series}-bert-ci-p00-n0001-k00"


def test_one_gpu_takes_some_twenty_minutes_and_no_step_is_without_an_end(tmp_path: Path) -> None:
    """By arithmetic; what a first time compiles comes on top."""
    found = steps(H100, tmp_path, figures=False)
    assert seconds(found) <= 24 * 60
    assert all(step.about_s < step.limit_s for step in steps(machine(8), tmp_path, figures=True))


def test_small_and_old_cards_get_batches_and_a_precision_that_they_have(tmp_path: Path) -> None:
    def settings(found: Machine, workload: str) -> set[str]:
        (step,) = (one for one in steps(found, tmp_path, figures=False) if one.name == f"{workload} gpu, single")
        return {word for word in step.words if word.startswith("train.")}

    assert settings(H100, "bert") == settings(H100, "resnet50") == set()
    assert settings(machine(1, memory=39), "bert") == {"train.batch_per_rank=28"}
    assert settings(machine(1, memory=39), "resnet50") == set()
    assert settings(machine(1, memory=15, capability=(7, 5)), "bert") == {
        "train.batch_per_rank=4",
        "train.precision=fp16",
    }


def test_every_area_of_figures_is_one_of_the_benchmarks(tmp_path: Path) -> None:
    asked = [step.words[-1] for step in steps(H100, tmp_path, figures=True) if "benchmarks" in step.words]
    assert asked
    assert set(asked) <= AREAS.keys() | PARTS.keys()
