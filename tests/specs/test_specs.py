"""Choices in YAML become plans: names resolve, wrong input gets one line, runs are interleaved, plans are frozen."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench import bundled
from dlbench.errors import UserError
from dlbench.specs.choices import Choices, WorkloadFile, choose, choose_system
from dlbench.specs.expand import expand
from dlbench.specs.files import MAX_DEPTH, available, find, parse_yaml, read_yaml
from dlbench.specs.plan import AxisValue, RunPlan, value_text
from dlbench.specs.requests import Request, parse_counts, parse_set, parse_sides, parse_sweep
from dlbench.specs.workload import BertModel, CosmoFlowModel, ResNetModel, TextData

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
WORKLOADS = {
    "resnet50": {"full", "sgd90", "gpu", "gpu-compiled", "ci"},
    "bert": {"full", "gpu", "gpu-compiled", "1.3b", "13b", "175b", "phase1", "phase2", "base", "ci"},
    "cosmoflow": {"full", "gpu", "gpu-compiled", "large", "ci"},
}


@pytest.fixture(autouse=True)
def bundled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLBENCH_PATH", raising=False)


def plans(**request: Any) -> list[RunPlan]:
    asked = {"workload": "cosmoflow", "preset": "ci", "series": "s", **request}
    return expand(Request(**asked), machine_cores=8, now=NOW)


def refusal(**request: Any) -> str:
    with pytest.raises(UserError) as caught:
        plans(**request)
    return one_line(caught.value)


def one_line(error: UserError) -> str:
    text = str(error)
    assert len(text.splitlines()) == 1, repr(text)
    return text


def choices(workload: str, preset: str | None = None) -> Choices:
    return choose(WorkloadFile(find("workloads", workload)), preset, {})


def text_of(kind: Any, name: str) -> str:
    return (bundled.folder(kind) / f"{name}.yaml").read_text(encoding="utf-8")


def workload_file(folder: Path, text: str) -> str:
    path = folder / "w.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def system_file(folder: Path, old: str, new: str, name: str = "box") -> str:
    text = text_of("systems", name)
    assert old in text
    path = folder / "s.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return str(path)


# Names


def titled(folder: Path, title: str, name: str = "cosmoflow") -> None:
    (folder / "workloads").mkdir(parents=True, exist_ok=True)
    old = f"title: {yaml_title(name)}"
    text = text_of("workloads", name)
    assert old in text
    (folder / "workloads" / f"{name}.yaml").write_text(text.replace(old, f"title: {title}"))


def yaml_title(name: str) -> str:
    return str(read_yaml(bundled.folder("workloads") / f"{name}.yaml")["title"])


def title_of(workload: str) -> str:
    return plans(workload=workload)[0].workload.title


def test_a_name_is_looked_up_in_dlbench_path_before_the_bundled_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titled(tmp_path / "first", "mine")
    titled(tmp_path / "second", "theirs")
    titled(tmp_path / "second", "their BERT", "bert")
    assert title_of("cosmoflow") == yaml_title("cosmoflow")
    monkeypatch.setenv("DLBENCH_PATH", os.pathsep.join(["", str(tmp_path / "no"), str(tmp_path / "second")]))
    assert title_of("cosmoflow") == "theirs"
    monkeypatch.setenv("DLBENCH_PATH", os.pathsep.join(str(tmp_path / name) for name in ("first", "second")))
    assert title_of("cosmoflow") == "mine"
    assert title_of("bert") == "their BERT"
    assert title_of("resnet50") == yaml_title("resnet50")
    assert available("workloads")["cosmoflow"] == tmp_path / "first" / "workloads" / "cosmoflow.yaml"
    assert set(available("systems")) >= {"local", "box", "example-gpu"}


def test_a_system_may_be_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "systems").mkdir()
    text = text_of("systems", "box").replace("name: box", "name: mine")
    (tmp_path / "systems" / "mine.yaml").write_text(text)
    monkeypatch.setenv("DLBENCH_PATH", str(tmp_path))
    assert plans(system="mine")[0].system.name == "mine"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"workload": "resnet"}, ["workload 'resnet'", "resnet50"]),
        ({"workload": "qqqq"}, ["workload 'qqqq'", "bert", "cosmoflow", "resnet50"]),
        ({"workload": "./cosmoflow.yaml"}, ["./cosmoflow.yaml", "no such workload file"]),
        ({"system": "bax"}, ["system 'bax'", "box"]),
        ({"system": "none.yaml"}, ["none.yaml", "no such system file"]),
        ({"preset": "fll"}, ["cosmoflow.yaml", "preset 'fll'", "full"]),
        ({"engine": "horovd"}, ["--engine", "engine.name", "horovod", "'horovd'"]),
        ({"launcher": "srun"}, ["--launcher", "launch.launcher", "srun-mpi", "srun-gloo"]),
        ({"overrides": {"train.batch": 3}}, ["--set", "train.batch: unknown key", "batch_per_rank"]),
        ({"overrides": {"model.conv_chanels": 1}}, ["--set", "model.conv_chanels", "conv_channels"]),
        ({"overrides": {"engine.horovod.fusion": 1}}, ["--set", "engine.horovod.fusion", "did you mean sync.fusion?"]),
        ({"overrides": {"system.launch.pinn": True}}, ["--set", "system.launch.pinn: unknown key", "pin"]),
        ({"sweep": {"train.precison": ("fp32",)}}, ["--sweep", "train.precison: unknown key", "precision"]),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(request_: dict[str, Any], words: list[str]) -> None:
    text = refusal(**request_)
    assert [word for word in words if word not in text] == [], text


def test_a_wrong_key_in_a_file_names_the_file_and_the_preset(tmp_path: Path) -> None:
    text = text_of("workloads", "cosmoflow")
    path = workload_file(tmp_path, text.replace("train:\n", "train:\n  sead: 3\n", 1))
    told = refusal(workload=path)
    assert told.startswith(f"{path}: train.sead: unknown key")
    assert "seed" in told
    path = workload_file(tmp_path, text.replace("input_size: 32", "input_sise: 32"))
    told = refusal(workload=path)
    assert told.startswith(f"{path} (preset ci): model.input_sise: unknown key")
    assert "input_size" in told
    path = system_file(tmp_path, "partition: box", "partitoin: box")
    told = refusal(system=path)
    assert told.startswith(f"{path}: slurm.partitoin: unknown key")
    assert "partition" in told


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    head = "format: dlbench.workload\nversion: 1\npresets: {full: {}}\n"
    told = refusal(workload=workload_file(tmp_path, head + "model: {family: resnet, depth: 101}\n"), preset="full")
    assert "model.depth: unknown key; use model.stage_blocks, e.g. [3, 4, 23, 3]" in told
    assert "; data.format: is missing: must be images, " in told
    assert "; train.batch_per_rank: is missing: must be a whole number" in told
    assert "; train.optimizer.name: is missing: must be sgd, " in told
    assert "; model.family: is missing: must be resnet, " in refusal(
        workload=workload_file(tmp_path, f"{head}sead: 3\n"), preset="full"
    )
    assert "did you mean resnet50? With --set model.stage_blocks=[3,4,23,3]" in refusal(workload="resnet101")


# The published configurations


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_preset_is_valid_and_says_what_it_is(workload: str) -> None:
    file = WorkloadFile(find("workloads", workload))
    assert set(file.presets) == WORKLOADS[workload]
    assert file.default_preset == "full"
    for preset in file.presets:
        made = choices(workload, preset)
        assert (made.name, made.preset) == (workload, preset)
        assert made.workload().name == workload
        assert made.notice == "MLPerf-derived workload, not an MLPerf result"
        assert len(made.about) > 20
        assert made.data.source == "synthetic"  # real data is a choice, never a default
    assert choices(workload) == choices(workload, "full")


def test_resnet50_is_the_published_one() -> None:
    made = choices("resnet50", "full")
    model, train = made.model, made.train
    assert isinstance(model, ResNetModel)
    assert (model.image_size, model.num_classes) == (224, 1000)
    assert (model.stage_blocks, model.base_width) == ((3, 4, 6, 3), 64)
    assert made.data.format == "images"
    # The reference point of a global batch of 4,096: LR 10, 5 warm-up epochs, 2e-4, 39 to 42 epochs.
    assert (train.optimizer.learning_rate_scaling, train.optimizer.reference_batch) == ("table", 4096)
    assert train.schedule.epoch_samples == 1_281_167
    assert train.optimizer.name == "lars"
    assert train.optimizer.learning_rate == 10
    assert (train.optimizer.trust_coefficient, train.optimizer.epsilon) == (0.001, 0)
    assert (train.optimizer.momentum, train.optimizer.weight_decay) == (0.9, 2e-4)
    assert train.schedule.warmup_epochs == 5
    assert train.schedule.total_epochs is not None
    assert 39 <= train.schedule.total_epochs <= 42
    assert (made.quality.target, made.quality.evaluate_every_epochs) == (0.759, 4)
    assert (train.schedule.decay, train.schedule.power, train.schedule.end_learning_rate) == ("polynomial", 2, 1e-4)
    assert train.label_smoothing in (0, 0.1)


def test_bert_is_the_published_one() -> None:
    made = choices("bert", "full")
    model, data, train = made.model, made.data, made.train
    assert isinstance(model, BertModel)
    assert isinstance(data, TextData)
    assert (model.num_layers, model.hidden_size, model.num_heads, model.intermediate_size) == (24, 1024, 16, 4096)
    assert (model.vocab_size, model.max_positions, model.type_vocab_size) == (30522, 512, 2)
    assert (data.sequence_length, data.max_predictions, data.masked_lm_probability) == (512, 76, 0.15)
    # The reference point of a global batch of 256: LR 3.5e-4, 13,700 steps, 2.2 to 2.9 million samples to the target.
    assert train.optimizer.reference_batch == 256
    assert train.optimizer.name == "lamb"
    assert train.optimizer.learning_rate == 3.5e-4
    assert (train.optimizer.weight_decay, train.optimizer.epsilon, train.optimizer.clip_norm) == (0.01, 1e-6, 1.0)
    assert (train.schedule.decay, train.schedule.end_learning_rate) == ("linear", 0)
    assert (train.schedule.total_epochs, train.schedule.epoch_samples) == (1, 13_700 * 256)
    assert (made.quality.target, made.quality.evaluate_samples) == (0.72, 10_000)
    assert made.quality.starts_from == "checkpoint"


def test_cosmoflow_is_the_published_one() -> None:
    made = choices("cosmoflow", "full")
    model, train = made.model, made.train
    assert isinstance(model, CosmoFlowModel)
    assert (model.input_size, model.input_channels, model.num_targets) == (128, 4, 4)
    assert (model.conv_channels, model.dense_sizes) == ((32, 64, 128, 256, 512), (128, 64))
    assert model.dropout == 0.5
    assert (model.input_size // 2 ** len(model.conv_channels)) ** 3 * model.conv_channels[-1] == 32_768
    assert made.data.format == "density"
    # SGD 0.9, 0.001 at a global batch of 64, 4 warm-up epochs, x0.25 after epoch 32, x0.125 after 64.
    assert (train.optimizer.learning_rate_scaling, train.optimizer.reference_batch) == ("linear", 64)
    assert train.schedule.epoch_samples == 524_288
    assert (train.optimizer.name, train.optimizer.momentum, train.optimizer.learning_rate) == ("sgd", 0.9, 0.001)
    assert (train.schedule.warmup_epochs, train.schedule.warmup_from) == (4, "unscaled")
    assert train.schedule.decay == "step"
    assert train.schedule.epoch_boundaries == (32, 64)
    assert train.schedule.step_factors == (0.25, 0.125)
    assert made.quality.target == 0.124


@pytest.mark.parametrize("system", ["local", "box", "example-gpu"])
def test_every_bundled_system_is_valid(system: str) -> None:
    made = choose_system(system, {})
    assert made.name == system
    assert (made.scheduler == "none") == (system == "local")


# Wrong values


def test_relations_between_parts() -> None:
    told = refusal(workload="bert", overrides={"data.sequence_length": 129})
    assert "data.sequence_length 129" in told
    assert "model.max_positions 64" in told
    assert "data.format 'text' does not fit" in refusal(overrides={"data.format": "text"})
    assert "train.label_smoothing has no effect" in refusal(overrides={"train.label_smoothing": 0.1})


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("partition: box", 'partition: "box\\n#SBATCH --wrap=id"', "slurm.partition"),
        ("partition: box", "partition: ''", "slurm.partition"),
        ("partition: box", "partition: box\n  extra: ['-N 5']", "slurm.extra"),
        ("partition: box", "partition: box\n  extra: --array=1-4", "slurm.extra"),
        ("partition: box", "partition: box\n  extra: --arr=1-4", "slurm.extra"),
        ("partition: box", "partition: box\n  account: 5", "slurm.account"),
        ('time_limit: "00:10:00"', "time_limit: 30", "slurm.time_limit"),
        ('time_limit: "00:10:00"', 'time_limit: "00:10:00\\n"', "slurm.time_limit"),
        ("mpi_plugin: pmix", "mpi_plugin: pmix\n  environment: {'A B': x}", "launch.environment"),
        ("mpi_plugin: pmix", "mpi_plugin: pmix\n  environment: {'A;id;B': x}", "launch.environment"),
        ("title:", "modules: ['gcc; id']\ntitle:", "modules"),
        ("title:", "setup: [5]\ntitle:", "setup"),
        ("version: 1", "version: 2", "version 1"),
        ("format: dlbench.system", "format: dlbench.workload", "dlbench.system"),
    ],
)
def test_a_system_file_that_would_break_a_script(tmp_path: Path, old: str, new: str, key: str) -> None:
    path = system_file(tmp_path, old, new)
    told = refusal(system=path)
    assert told.startswith(f"{path}: ")
    assert key in told


# YAML


def yaml_refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "the origin")
    told = one_line(caught.value)
    assert told.startswith("the origin")
    return told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", ":2: "),
        ("a: {b: 1, b: 2}", "duplicate"),
        ("a: &x 1\nb: 2\n", "anchors"),
        ("a: &a [1]\nb: &b [*a,*a]\nc: [*b,*b]\n", "anchors"),
        ("[" * 20_000, "nested"),
        ("{a: " * (MAX_DEPTH + 2) + "1" + "}" * (MAX_DEPTH + 2), "nested deeper"),
        ("a: !!python/object:os.system x", ":1: "),
        ("!!python/object/apply:os.system ['true']", ":1: "),
        ("!mine x", ":1: "),
        ("a: b: c", ":1: "),
        ("a: [1, 2", ""),
        ("a\0b", ""),
        ("'open", ""),
        ("---\na: 1\n---\nb: 2\n", ""),
    ],
)
def test_yaml_that_is_refused(text: str, words: str) -> None:
    assert words in yaml_refusal(text)


def test_what_yaml_1_2_reads(tmp_path: Path) -> None:
    assert parse_yaml("12:30:00", "o") == "12:30:00"
    assert parse_yaml("1-12:30:00", "o") == "1-12:30:00"
    assert parse_yaml("[yes, no, on, off, y, n]", "o") == ["yes", "no", "on", "off", "y", "n"]
    assert parse_yaml("a: {b: [true, 1, 1.5, null, 1e-6]}", "o") == {"a": {"b": [True, 1, 1.5, None, 1e-6]}}
    assert parse_yaml("a*b & c", "o") == "a*b & c"
    deep = "{a: " * (MAX_DEPTH - 1) + "1" + "}" * (MAX_DEPTH - 1)
    assert parse_yaml(deep, "o")
    made = choose_system(system_file(tmp_path, '"00:10:00"', "12:30:00"), {})
    assert made.slurm.time_limit == "12:30:00"


def test_workload_files_that_are_none(tmp_path: Path) -> None:
    text = text_of("workloads", "cosmoflow")
    head = text.split("presets:")[0]
    for wrong, word in (
        (text.replace("format: dlbench.workload", "format: dlbench.system"), "format"),
        (text.replace("version: 1", "version: 2"), "version 1"),
        (head, "presets"),
        (head + "presets: [ci]\n", "presets"),
        (head + "presets: {ci: 3}\n", "presets.ci"),
        (text + "\n1: x\n", "1: "),
        (text.replace("name: cosmoflow", "name: ../cosmo"), "name"),
        (text.replace("batch_per_rank:", "gradient_accumulation:"), "train.batch_per_rank: is missing"),
        (text.replace("family: cosmoflow", "family: cosmo"), "model.family"),
        (text.replace("  family: cosmoflow\n", ""), "model.family"),
    ):
        assert wrong != text
        path = workload_file(tmp_path, wrong)
        told = refusal(workload=path)
        assert told.startswith(path)
        assert word in told


# Options as text


def test_a_list_in_brackets_is_taken_wherever_values_are_given() -> None:
    """Commas in brackets divide nothing, and what is printed for `--set` is read back as it was."""
    key, small, wide = "model.conv_channels", (2, 2), (4, 8)
    overrides = parse_set((f"{key}=[2,2]", "train.optimizer.betas=[0.9, 0.95]"))
    assert overrides == {key: small, "train.optimizer.betas": (0.9, 0.95)}
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(1,), repeats=1, overrides={key: small})
    read = RunPlan.model_validate_json(plan.to_json())
    assert read.overrides == {key: small}
    assert read.workload.model == plan.workload.model
    assert isinstance(plan.workload.model, CosmoFlowModel)
    assert plan.workload.model.conv_channels == small
    assert parse_set((f"{key}={value_text(key, small)}",)) == {key: small}
    sweep = parse_sweep((f"{key}=[2,2],[4,8]",))
    assert sweep == {key: (small, wide)}
    asked = plans(workload="cosmoflow", preset="ci", points=(1,), repeats=1, sweep=sweep)
    assert [one.workload.model.conv_channels for one in asked] == [small, wide]  # type: ignore[union-attr]
    assert len({one.job_name for one in asked}) == 2
    sides = parse_sides((f"{key}=[2,2],train.seed=1", "plain"))
    assert sides["a"] == {key: small, "train.seed": 1}


@pytest.mark.parametrize(
    "item",
    [
        "a",
        "=1",
        "a=",
        "a= ",
        "a..b=1",
        ".a=1",
        "a.=1",
        "a b=1",
        "é=1",
        "a=[[1]]",
        "a=[{b: 1}]",
        "a={b: 1}",
        "a=b: c",
        "a=2024-01-01",
    ],
)
def test_set_that_is_refused(item: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_set((item,))
    assert one_line(caught.value).startswith("--set")
    with pytest.raises(UserError) as caught:
        parse_sweep((item,))
    assert one_line(caught.value).startswith("--sweep")


@pytest.mark.parametrize("text", ["", "0", "-1", "1,1", "a", "1.5", "1,", "٣", "9" * 5000])
def test_counts_that_are_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_counts(text, "--ranks")
    assert one_line(caught.value).startswith("--ranks")


# Data


def test_a_data_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on another node starts in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    def source(**request: Any) -> str:
        return plans(**request)[0].workload.data.source

    assert source(data="density") == str(tmp_path / "density")
    assert source(data="./synthetic") == str(tmp_path / "synthetic")
    assert source(data="~/density") == "/home/somebody/density"
    assert source(data="/a/b") == "/a/b"
    assert source(data="synthetic") == "synthetic"
    assert source() == "synthetic"
    assert source(overrides={"data.source": "density"}) == str(tmp_path / "density")
    assert [p.workload.data.source for p in plans(sweep={"data.source": ("synthetic", "a")})] == [
        "synthetic",
        str(tmp_path / "a"),
    ]


def test_a_path_in_a_file_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.chdir(tmp_path)
    text = text_of("workloads", "bert")
    assert text.count("source: synthetic\n") == 1
    text = text.replace("source: synthetic\n", "source: corpus\n  vocabulary: words/mine.txt\n")
    (plan,) = plans(workload=workload_file(site, text))
    assert isinstance(plan.workload.data, TextData)
    assert plan.workload.data.source == str(site / "corpus")
    assert plan.workload.data.vocabulary == str(site / "words" / "mine.txt")
    (plan,) = plans(workload=workload_file(site, text), data="other", overrides={"data.vocabulary": "english-4096"})
    assert isinstance(plan.workload.data, TextData)
    assert plan.workload.data.source == str(tmp_path / "other")
    assert plan.workload.data.vocabulary == "english-4096"  # the name of a bundled one


# Settings that would do nothing


@pytest.mark.parametrize(
    ("key", "value", "request_"),
    [
        ("engine.horovod.cycle_time_ms", 2.0, {"engine": "ddp"}),
        ("sync.fusion", "none", {"engine": "single"}),
        ("engine.ddp.static_graph", True, {"engine": "horovod"}),
        ("sync.wire", "fp16", {"points": (1,)}),
        ("system.launch.interface", "eth0", {"points": (2,), "launcher": "mpirun"}),
        ("system.launch.oversubscribe_yield", False, {"points": (2,)}),
        ("data.loader_workers", 2, {}),
        ("data.on_bad_sample", "skip", {"data": "synthetic"}),
        ("data.synthetic_on", "device", {"data": "/data/pictures"}),
        ("data.vocabulary", "mine", {"workload": "bert"}),
        ("system.slurm.partition", "gpu", {}),
        ("system.launch.mpi_plugin", "pmi2", {"system": "box", "launcher": "srun-gloo"}),
        ("train.optimizer.trust_coefficient", 0.01, {}),
        ("train.optimizer.epsilon", 0.01, {}),
        ("train.optimizer.momentum", 0.5, {"workload": "bert"}),
        ("train.schedule.power", 3.0, {}),
    ],
)
def test_a_setting_that_acts_in_no_run_is_refused(key: str, value: AxisValue, request_: dict[str, Any]) -> None:
    told = refusal(**request_, overrides={key: value})
    assert told.startswith(f"--set {key}: has no effect")
    told = refusal(**request_, sweep={key: (value,)})
    assert told.startswith(f"--sweep {key}: has no effect")


def test_ranks_per_node_acts_only_where_there_are_nodes_to_fill() -> None:
    assert "--ranks-per-node" in refusal(ranks_per_node=2, points=(1, 2))
    (plan,) = plans(system="box", points=(4,), ranks_per_node=2)
    assert (plan.layout.nodes, plan.layout.ranks_per_node) == (2, 2)


@pytest.mark.parametrize(
    ("asked", "on_gpu", "on_cpu"),
    [(None, True, False), ("auto", True, False), (True, True, True), (False, False, False)],
)
def test_gradients_are_views_of_ddps_buckets_on_gpus_unless_the_plan_says_so(
    asked: str | bool | None, on_gpu: bool, on_cpu: bool
) -> None:
    key = "engine.ddp.gradient_as_bucket_view"
    (plan,) = plans(engine="ddp", points=(2,), overrides={} if asked is None else {key: asked})
    assert [plan.engine.ddp.views_buckets(on_gpu=one) for one in (True, False)] == [on_gpu, on_cpu]


# Ranks, nodes, cores


def test_nodes_and_ranks() -> None:
    (plan,) = plans(system="example-gpu", points=(3,), points_are="nodes")
    assert (plan.layout.nodes, plan.layout.ranks, plan.layout.ranks_per_node) == (3, 12, 4)
    assert plan.layout.cores_per_rank == 16
    (plan,) = plans(system="example-gpu", points=(3,), points_are="nodes", ranks_per_node=2)
    assert (plan.layout.ranks, plan.layout.cores_per_rank) == (6, 32)
    made = plans(system="example-gpu", points=(1, 4, 8))
    assert [(p.layout.nodes, p.layout.ranks) for p in made] == [(1, 1), (1, 4), (2, 8)]
    # The same cores a rank at every point, or the points could not be compared.
    assert {p.layout.cores_per_rank for p in made} == {16}


@given(points=st.sets(st.integers(1, 8), min_size=1, max_size=4), batch=st.integers(1, 30))
def test_strong_scaling_keeps_the_global_batch_or_says_no(points: set[int], batch: int) -> None:
    request = {"points": tuple(sorted(points)), "scaling": "strong", "overrides": {"train.batch_per_rank": batch}}
    total = batch * min(points)
    if any(total % ranks for ranks in points):
        assert "--scaling strong" in refusal(**request)
        return
    assert {plan.global_batch for plan in plans(**request)} == {total}
    assert {plan.global_batch // plan.layout.ranks for plan in plans(**{**request, "scaling": "weak"})} == {batch}


# The order of runs

AXES: dict[str, tuple[AxisValue, ...]] = {
    "train.seed": (3, 1, 2),
    "train.precision": ("fp32", "bf16"),
    "train.optimizer.clip_norm": (None, 1.5),
    "system.launch.pin": (True, False),
}
REQUESTS = st.fixed_dictionaries(
    {
        "points": st.sets(st.integers(1, 12), min_size=1, max_size=3).map(lambda s: tuple(sorted(s))),
        "repeats": st.integers(1, 4),
        "sweep": st.sets(st.sampled_from(sorted(AXES)), max_size=2).map(
            lambda keys: {k: AXES[k] for k in sorted(keys)}
        ),
    }
)


@given(request_=REQUESTS)
def test_repeats_are_interleaved_there_and_back(request_: dict[str, Any]) -> None:
    made = plans(**request_)
    combinations = 1
    for values in request_["sweep"].values():
        combinations *= len(values)
    size = combinations * len(request_["points"])
    assert len(made) == size * request_["repeats"]
    assert [plan.series.position for plan in made] == list(range(len(made)))
    assert len({plan.run_id for plan in made}) == len(made)
    rounds = [made[start : start + size] for start in range(0, len(made), size)]
    points = [[(json.dumps(p.series.axes), p.layout.ranks) for p in runs] for runs in rounds]
    for repeat, runs in enumerate(rounds):
        assert {plan.series.repeat for plan in runs} == {repeat}
        assert set(Counter(points[repeat]).values()) == {1}  # every point once
        # A drift of the machine falls on all points alike: A B B A.
        assert points[repeat] == (points[0] if repeat % 2 == 0 else points[0][::-1])
    # The product of the axes, the last one turning fastest, ranks fastest of all.
    assert [ranks for _, ranks in points[0]] == list(request_["points"]) * combinations
    assert len({axes for axes, _ in points[0]}) == combinations


# Plans


@given(request_=REQUESTS, workload=st.sampled_from(sorted(WORKLOADS)), engine=st.sampled_from(["horovod", "ddp"]))
def test_a_plan_survives_its_file(request_: dict[str, Any], workload: str, engine: str) -> None:
    for plan in plans(workload=workload, engine=engine, **request_)[:4]:
        text = plan.to_json()
        again = RunPlan.model_validate(json.loads(text))
        assert again == plan
        assert again.to_json() == text
        assert again.configuration_digest() == plan.configuration_digest()
        values = [type(value) for value in plan.series.axes.values()]
        assert [type(value) for value in again.series.axes.values()] == values


DIFFERENT: list[dict[str, Any]] = [
    {},
    {"workload": "resnet50"},
    {"points": (2,)},
    {"points": (2,), "scaling": "strong"},
    {"engine": "ddp"},
    {"engine": "single"},
    {"data": "/somewhere"},
    {"points": (2,), "overrides": {"engine.horovod.cycle_time_ms": 2.5}},
    {"points": (2,), "overrides": {"sync.wire": "fp16"}},
    {"overrides": {"train.seed": 1}},
    {"overrides": {"train.batch_per_rank": 3}},
    {"overrides": {"train.optimizer.learning_rate": 0.5}},
    {"overrides": {"model.input_size": 64}},
    {"overrides": {"measure.measured_steps": 13}},
    {"overrides": {"layout.cores_per_rank": 3}},
    {"overrides": {"system.launch.environment.OMP_PROC_BIND": "true"}},
    {"launcher": "mpirun"},
    {"system": "box"},
]


def test_the_digest_tells_every_two_configurations_apart() -> None:
    digests = [plans(**request)[0].configuration_digest() for request in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)


def test_the_digest_forgets_names_times_and_places() -> None:
    (plan,) = plans()
    later = expand(
        Request(workload="cosmoflow", preset="ci", series="another", repeats=3),
        machine_cores=8,
        now=NOW + timedelta(days=1),
    )
    # What is said twice, or said as it would be anyway, computes the same.
    spelt = plans(
        engine="horovod",
        data="synthetic",
        launcher="local",
        overrides={"train.batch_per_rank": plan.workload.train.batch_per_rank, "train.optimizer.learning_rate": 5e-3},
    )
    swept = plans(sweep={"train.seed": (0,)})
    digests = {p.configuration_digest() for p in (plan, *later, *spelt, *swept)}
    assert digests == {plan.configuration_digest()}
    assert len({p.run_id for p in (plan, *later)}) == 4
