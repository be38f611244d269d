"""Every key of every file that people write, with wrong names and values: the line says what would be right."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, create_model

from dlbench.errors import UserError
from dlbench.specs.base import Spec
from dlbench.specs.choices import Choices, WorkloadFile, choose, choose_system
from dlbench.specs.files import find
from dlbench.specs.plan import value_text
from dlbench.specs.problems import keys_of, problem_of
from dlbench.specs.requests import parse_sweep
from dlbench.specs.sync import read_fusion
from dlbench.specs.system import SystemSpec
from tests.conftest import Cli
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


VALIDATOR = re.compile(
    r"should (be|have|match)|input tag|discriminator|valid (tuple|string|integer|number|boolean|list|dict)|instance of"
    r"|[Ii]nput (should|tag)|type=|https?:|validation error|[Pp]ydantic|Field required|Extra inputs|constrained"
    r"|literal\[|function-|\[A-Z|\[\^|\\x|\^\(|\$\]|at least \d+ item|Traceback|typing\."
)
"""Words of the validator, and signs of a regular expression."""

RIGHT = re.compile(
    r"must |is missing|unknown key|exclude|needs? |use |give |set |e\.g\.|did you mean|such as|given twice"
    r"|the plan sets|not supported|multiple of|does not fit|have the same length|contains a character"
    r"|path of a program|above 1|divide|epoch_samples|switched off by|renamed to"
)
"""One of these leads on to what would be right."""

WRONG: tuple[Any, ...] = (
    *(None, True, "no such thing", "", "a\tb", "(", 0, -1, 1.5, -1.5, 2**60, 1e300, {"nosuch": 1}),
    *((), ("no such thing",), (None, -1), (0, 0, 0), (1.5, 2.5, 3.5, 4.5, 5.5)),
)
"""A wrong type, or a value out of range, of another form or of another length: each for most keys."""


def refusals(choose_with: Callable[[Any], object]) -> list[str]:
    told = []
    for value in WRONG:
        try:
            choose_with(value)
        except UserError as error:
            told.append(str(error))
    return told


def keys() -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Every key of workloads and systems as options name it, and what sets it to a value."""
    seen = set()
    for name in ("bert", "cosmoflow", "resnet50"):
        file = WorkloadFile(find("workloads", name))
        for key in keys_of(Choices, choose(file, "ci", {}).model_dump()):
            if key.name not in seen:
                seen.add(key.name)
                yield (
                    key.name,
                    lambda value, file=file, key=key.name: choose(file, "ci", {key: (value, "--set")}),  # type: ignore[misc]
                )
    for key in keys_of(SystemSpec, {}):
        yield (
            f"system.{key.name}",
            lambda value, key=key.name: choose_system("local", {key: (value, "--set")}),  # type: ignore[misc]
        )


@pytest.mark.parametrize("section", ["model", "data", "train", "quality", "measure", "sync", "system", "rest"])
def test_every_key_refuses_in_words_that_lead_on(section: str) -> None:
    known = {name.partition(".")[0] for name, _ in keys()}
    sections = {section} if section in known else known - {"model", "data", "train", "quality", "measure", "system"}
    tried = 0
    for name, choose_with in keys():
        if name.partition(".")[0] not in sections:
            continue
        tried += 1
        told = refusals(choose_with)
        assert told, f"{name}: nothing is refused"
        for line in told:
            assert not VALIDATOR.search(line), line
            assert RIGHT.search(line), line
            # A relation of several keys is told of their section.
            assert line.startswith("--set: ") or name.partition(".")[0] in line, line
            assert name.rpartition(".")[2] in line or name.rpartition(".")[0] in line, line
    assert tried > 4


def _specifications() -> list[type[Spec]]:
    """Of all files: those that people write, and those that dlbench writes and may find damaged."""
    for room in ("gate.baseline", "history.archive", "jobs.campaign.series_file", "jobs.scheduler", "records.scan"):
        importlib.import_module(f"dlbench.{room}")
    importlib.import_module("dlbench.records.preflight")
    found, rest = [], [Spec]
    while rest:
        one = rest.pop()
        rest += one.__subclasses__()
        found.append(one)
    return [one for one in found if one.__module__.startswith("dlbench.") and one.model_fields]


def test_no_field_of_any_file_is_told_of_in_the_validators_words() -> None:
    models = _specifications()
    assert len(models) > 60
    tried = 0
    for model in models:
        for name, field in model.model_fields.items():
            alone: type[BaseModel] = create_model("Alone", __base__=Spec, **{name: (field.annotation, field)})  # type: ignore[call-overload]
            for value in (*WRONG, {"family": "nosuch"}, {"format": "nosuch"}, {"family": "resnet", "nosuch": 1}):
                for content in ({name: value}, {name: value, "nosuch": 1}):
                    try:
                        alone.model_validate(content)
                    except ValidationError as error:
                        told = str(problem_of(alone, error))
                        assert not VALIDATOR.search(told), f"{model.__name__}: {told}"
                        assert told.startswith((name, "nosuch: ")), told
                        tried += 1
    assert tried > 5000


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ("family: cosmoflow", "family: resnet50", "must be resnet, bert, cosmoflow or paced, got 'resnet50'"),
        ("family: cosmoflow, ", "", "model.family: is missing: must be resnet, bert, cosmoflow or paced"),
        ("model: {family: cosmoflow, input_size: 64}", "model: 5", "model: must be keys and values: family, "),
        ("input_size: 64", "input_size: 64.0", "model.input_size: must be a whole number of 1 or more, got 64.0"),
        ("name: sgd", "name: adam", "train.optimizer.name: must be sgd, adamw, lars or lamb, got 'adam'"),
        ("batch_per_rank: 4", "{}", "train.batch_per_rank: is missing: must be a whole number of 1 or more"),
        ("20MB", "[20]", "watch.max_bytes: must be a number of bytes such as 67108864 or 64MiB, got [20]"),
        ("presets:\n  gpu: {}\n  bf16: {train: {precision: bf16}}\n", "", "presets: must contain at least one, e.g."),
        ("presets:", "default_preset: full\npresets:", "unknown preset 'full': known: bf16, gpu"),
        ("gpu: {}", "gpu: 3", "presets.gpu: must be keys and values, or empty, got 3"),
    ],
)
def test_a_wrong_file_is_answered_with_file_key_and_what_would_be_right(
    cli: Cli, tmp_path: Path, wrong: str, right: str, said: str
) -> None:
    assert wrong in SHORT
    file = tmp_path / "mine.yaml"
    text = SHORT.replace(wrong, right) if right != "{}" else SHORT.replace(f"  {wrong}\n", "")
    file.write_text(text)
    done = cli("show", str(file))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dlbench: error: {file}: ")
    assert said in line


def test_a_file_with_one_preset_needs_neither_its_content_nor_a_default(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(SHORT.partition("presets:")[0] + "presets:\n  mine:\n")
    done = cli("show", str(file), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["preset"] == "mine"


def test_a_system_of_another_form_is_answered_with_an_example(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = find("systems", "example-gpu").read_text()
    for wrong, right, said in (
        (
            '"01:00:00"',
            '"one hour"',
            """must be a time limit as Slurm writes it, in quotes: "00:30:00" or "1-12:00:00",""",
        ),
        ("path: $SLURM_TMPDIR", "path: tmp", "must be a path from / or ~/, or from a variable, e.g. $TMPDIR/dlbench,"),
        ("modules: []", "modules: [gcc 12]", "modules.0: must be one word, e.g. gcc/12.2, got 'gcc"),
        ("gpus: 4", "gpus: four", "node.gpus: must be a whole number of 0 or more, got 'four'"),
    ):
        assert wrong in text
        file.write_text(text.replace(wrong, right))
        with pytest.raises(UserError) as raised:
            choose_system(str(file), {})
        assert str(raised.value).startswith(f"{file}: ")
        assert said in str(raised.value)
