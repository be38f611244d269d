"""Keys by name: what a wrong one is answered with, sizes with units, and keys that a workload file may leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlbench.errors import UserError
from dlbench.specs.choices import Choices
from dlbench.specs.plan import value_text
from dlbench.specs.problems import keys_of
from dlbench.specs.requests import parse_sweep
from dlbench.specs.sync import read_fusion
from dlbench.specs.system import SystemSpec
from tests.support.run_factory import plans

MIB = 1024**2
SIZE = "watch.max_bytes"

SHORT = """
format: dlbench.workload
version: 1
model: {family: cosmoflow, input_size: 64}
data: {format: density}
train:
  batch_per_rank: 4
  optimizer: {name: sgd, learning_rate: 0.001}
measure: {warmup_steps: 20, measured_steps: 200}
watch: {max_bytes: 20MB}
presets:
  gpu: {}
  bf16: {train: {precision: bf16}}
"""


def refused(**request: Any) -> str:
    with pytest.raises(UserError) as raised:
        plans(**{"workload": "cosmoflow", "preset": "ci", **request})
    return str(raised.value)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"overrides": {"batch_per_rank": 16}}, "train.batch_per_rank"),
        ({"sweep": {"batch_per_rank": (1, 2)}}, "train.batch_per_rank"),
        ({"sides": {"a": {}, "b": {"seed": 1}}}, "train.seed"),
        ({"overrides": {"time_limit": "1:00:00"}}, "system.slurm.time_limit"),
        ({"overrides": {"system.batch_per_rank": 1}}, "train.batch_per_rank"),
        ({"overrides": {"learning_rte": 1.0}}, "train.optimizer.learning_rate"),
        ({"overrides": {"system.node.staging.folder": "/x"}}, "data.staging"),
    ],
)
def test_a_key_without_its_section_is_answered_with_the_whole_key(asked: dict[str, Any], meant: str) -> None:
    said = refused(**asked)
    assert "unknown key; did you mean " in said
    names = said.partition("did you mean ")[2].rstrip("?").split(" or ")
    assert meant in names
    assert len(set(names)) == len(names)


def test_every_size_takes_a_unit_wherever_it_is_given() -> None:
    sizes = [key.name for key in (*keys_of(Choices, {}), *keys_of(SystemSpec, {})) if key.name.endswith("_bytes")]
    assert len(sizes) == 5
    assert all(key.is_size for key in keys_of(Choices, {}) if key.name in sizes)
    tier = {"data.source": "/data", "data.staging": "lazy", "system.storage.local.path": "/tmp/x"}
    asked = {**tier, "watch.max_bytes": "64MB", "system.storage.local.capacity_bytes": "1GiB"}
    (plan,) = plans(workload="cosmoflow", preset="ci", overrides=asked, points=(1,), repeats=1)
    assert plan.watch.max_bytes == plan.overrides["watch.max_bytes"] == 64 * 1000**2
    assert plan.system.storage.local.capacity_bytes == 1024**3


@pytest.mark.parametrize(("key", "first", "second"), [(SIZE, 64 * MIB, 128 * MIB), ("sync.fusion", "64MiB", "128MiB")])
def test_swept_sizes_are_one_setting_whatever_their_unit(key: str, first: object, second: object) -> None:
    def swept(text: str) -> list[Any]:
        asked = {"engine": "horovod", "points": (2,), "repeats": 1}
        return plans(workload="cosmoflow", preset="ci", sweep=parse_sweep((f"{key}={text}",)), **asked)

    one, two = swept("64MiB,128M")
    assert (one.series.axes, two.series.axes) == ({key: first}, {key: second})
    assert swept(str(64 * MIB))[0].configuration_digest() == one.configuration_digest()
    sizes = (64 * MIB, 1025, 800 * 10**9, 0)
    assert [value_text(SIZE, size) for size in sizes] == ["64MiB", "1025", "800GB", "0"]
    with pytest.raises(UserError, match="given twice"):
        swept(f"64MiB,{64 * MIB}")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "sync.fusion"),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "sync.exchange=horovod-hierarchical"),
        ("bucket_cap_mb", "sync.fusion"),
        ("engine.horovod.fusion_threshold_bytes", "sync.fusion"),
        ("engine.ddp.bucket_cap_bytes", "sync.fusion"),
        ("sync.compression", "sync.wire"),
    ],
)
def test_a_name_of_the_library_is_answered_with_the_key(name: str, key: str, tmp_path: Path) -> None:
    key += ", e.g. sync.fusion=25MiB" if key == "sync.fusion" else ""
    assert refused(overrides={name: 1}) == f"--set: {name}: unknown key; use {key}"
    *sections, last = name.split(".")
    nested = "".join(f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections))
    file = tmp_path / "mine.yaml"
    file.write_text(f"{SHORT}{nested}{'  ' * len(sections)}{last}: 1\n")
    assert refused(workload=str(file), preset="gpu") == f"{file}: {name}: unknown key; use {key}"
    if name.startswith("HOROVOD_"):
        for value in (1, "1"):
            said = refused(overrides={f"system.launch.environment.{name}": value})
            assert said.endswith(f"variable {name} is set by dlbench; use {key}")


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"])
def test_a_variable_that_ranks_are_given_by_launch_interface_is_refused(name: str) -> None:
    """NCCL's is not: ranks leave it as it is."""
    asked: dict[str, Any] = {"overrides": {f"system.launch.environment.{name}": "eth7"}}
    if name == "NCCL_SOCKET_IFNAME":
        (plan,) = plans(points=(1,), repeats=1, **asked)
        assert plan.system.launch.environment[name] == "eth7"
    else:
        assert refused(**asked).endswith(f"variable {name} is set by dlbench; use launch.interface")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("backend", "backend was renamed to auto"),
        ("single", "single was renamed to own:single"),
        ("mgwfbp", "mgwfbp was renamed to own:mgwfbp"),
        ("size:64MiB", "own:64MiB; 64MiB is the fusion of Horovod or DDP"),
        (0, "switched off by none, not by 0"),
        ("own:0", "switched off by own:none, not by own:0"),
        (25, "25 is 25 bytes: write 25MiB"),
        (1023, "minimum: 1KiB"),
        *(
            (other, "must be auto, none, or a size such as 64MiB")
            for other in ("64Mi", 1.5, True, -1, None, "own:", "")
        ),
    ],
)
def test_a_fusion_that_is_none_is_answered_with_what_would_be_right(value: object, words: str, tmp_path: Path) -> None:
    said = refused(engine="horovod", points=(2,), overrides={"sync.fusion": value})
    assert said.startswith("--set: sync.fusion: ")
    assert words in said
    file = tmp_path / "mine.yaml"
    file.write_text(f"{SHORT}sync: {json.dumps({'fusion': value})}\n")
    in_file = refused(workload=str(file), preset="gpu", points=(2,))
    assert in_file.startswith(f"{file}: sync.fusion: ")
    assert words in in_file


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"sync.wire": "topk"}, "own buckets of 25 MiB"),
        ({"sync.wire": "int8"}, "own buckets of 25 MiB"),
        ({"sync.fusion": "own:64MiB"}, "own buckets of 64 MiB"),
        ({"sync.fusion": "64MiB"}, ""),
        ({"sync.fusion": "none"}, ""),
        ({}, ""),
    ],
)
def test_dlbenchs_own_buckets_are_never_silent(settings: dict[str, Any], own: str) -> None:
    one, two = plans(engine="horovod", points=(1, 2), repeats=1, overrides=settings)
    assert two.title.endswith(f"engine horovod{' with ' * bool(own)}{own}")
    assert one.title.endswith("engine horovod")


@pytest.mark.parametrize("fusion", ["64MiB", "none"])
def test_the_librarys_fusion_is_refused_where_dlbench_exchanges(fusion: str) -> None:
    said = refused(engine="horovod", points=(2,), overrides={"sync.fusion": fusion, "sync.wire": "topk"})
    assert said.endswith(f"dlbench exchanges here; use own:{fusion}")


@pytest.mark.parametrize("wire", ["int8", "topk"])
def test_formats_without_dense_sums_need_the_flat_exchange(wire: str) -> None:
    grouped = {"sync.wire": wire, "sync.exchange": "hierarchical", "sync.group_size": 2}
    assert refused(engine="ddp", points=(4,), overrides=grouped).endswith("use sync.exchange flat")


@pytest.mark.parametrize(("value", "kept"), [(1024, "1KiB"), ("67108864", "64MiB"), ("own:1KiB", "own:1KiB")])
def test_a_plain_number_is_bytes_as_horovods_own(value: object, kept: str) -> None:
    assert str(read_fusion(value)) == kept


def test_powersgd_goes_with_buckets_of_ddp_of_any_size() -> None:
    wanted = {"sync.wire": "powersgd", "sync.fusion": "64MiB"}
    assert str(plans(engine="ddp", points=(2,), repeats=1, overrides=wanted)[0].sync.fusion) == "64MiB"
    said = refused(engine="ddp", points=(2,), overrides={**wanted, "sync.fusion": "own:64MiB"})
    assert said.endswith("sync.exchange flat and no sync.fusion own:...")


@pytest.mark.parametrize("key", ["sync.fusion", "engine.horovod.cycle_time_ms"])
def test_what_the_autotuner_chooses_is_refused_unless_a_run_is_without_it(key: str) -> None:
    tuned, value = "engine.horovod.autotune", {"sync.fusion": "16MiB"}.get(key, 2.0)
    asked: dict[str, Any] = {"engine": "horovod", "points": (2,), "repeats": 1}
    said = refused(**asked, overrides={tuned: True, "measure.warmup_steps": 1300, key: value})
    assert "autotune tunes fusion and cycle time" in said
    made = plans(**asked, sweep={tuned: (False, True)}, overrides={"measure.warmup_steps": 1300, key: value})
    assert len(made) == 2
