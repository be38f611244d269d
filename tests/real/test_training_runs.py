"""Real ranks train: parity over rank counts, resume bit for bit, a quality, accumulation, fp16, exchanged samples."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dlbench.datasets.text.corpus import load_vocabulary
from dlbench.records.record import Record
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from tests.conftest import Cli
from tests.support.datasets import write_volumes
from tests.support.forked_runs import run_forked
from tests.support.run_factory import record_of

h5py = pytest.importorskip("h5py")

NO_DROPOUT = ("--set", "model.dropout=0.0")
# Threads that wait for each other waste the cores of other processes.
ALONE = (
    *("--engine", "single", "--ranks", "1"),
    *("--set", "layout.cores_per_rank=1", "--set", "system.launch.pin=false"),
)
SIX = ("--set", "measure.warmup_steps=2", "--set", "measure.measured_steps=4")


@pytest.fixture(scope="module")
def density(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("density")
    write_volumes(folder / "train", 48, seed=0)
    write_volumes(folder / "validation", 11, seed=1)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one sentence longer than a sample, so that every sample is full."""
    generator = np.random.default_rng(0)
    words = [w for w in load_vocabulary("english-4096").entries if w.isalpha() and len(w) > 3]
    lines = [" ".join(generator.choice(words, 140)) + "." for _ in range(200)]
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n\n".join(lines) + "\n")
    return path


def run_of(out: Path, series: str, *arguments: str | Path) -> Run:
    (found,) = run_forked(*arguments, "--series", series, "--out", out, "--preset", "ci")
    return found


def curve(run: Run) -> np.ndarray:
    """Loss of each step, mean over ranks."""
    ranks = range(run.plan.layout.ranks)
    return np.mean([read_steps(run.folder.steps(rank)).steps["loss"] for rank in ranks], axis=0)


def parity(workload: str, data: Path) -> tuple[str | Path, ...]:
    # CosmoFlow's published rate for a batch of 8. A large one makes rounding grow from step to step, whoever computes.
    rate = {"cosmoflow": 0.000125, "bert": 0.001}[workload]
    calm = ("--set", f"train.optimizer.learning_rate={rate}", "--set", "train.optimizer.learning_rate_scaling=none")
    return (workload, "--data", data, *NO_DROPOUT, *SIX, *calm)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, density: Path, text: Path) -> Callable[[str], Run]:
    """1 rank that trains with the batch of two, made when it is first asked for."""
    kept: dict[str, Run] = {}

    def run(workload: str) -> Run:
        if workload not in kept:
            words = parity(workload, density if workload == "cosmoflow" else text)
            out = tmp_path_factory.mktemp("alone")
            kept[workload] = run_of(out, "one", *words, *ALONE, "--set", "train.batch_per_rank=8")
        return kept[workload]

    return run


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        pytest.param("horovod", 1, marks=pytest.mark.nightly),
        ("horovod", 2),
        ("ddp", 2),
        # What a run with another number of ranks goes on with, below.
        pytest.param("ddp", 1, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("workload", ["cosmoflow", pytest.param("bert", marks=pytest.mark.nightly)])
def test_ranks_and_batch_trade_places(
    tmp_path: Path,
    alone: Callable[[str], Run],
    density: Path,
    text: Path,
    workload: str,
    engine: str,
    parts: int,
    horovod_installed: None,
) -> None:
    """1 rank x batch 2b, 2 ranks x batch b, and 2 ranks in two parts: one loss curve over 6 fp32 steps.

    ResNet is left out: its batch norm normalises over a rank's own samples, in every engine.
    """
    one = alone(workload)
    reference = curve(one)
    assert len(reference) == 6
    assert np.ptp(reference) > 0.01
    two = run_of(
        tmp_path,
        "two",
        *parity(workload, density if workload == "cosmoflow" else text),
        *("--engine", engine, "--ranks", "2", "--set", "train.batch_per_rank=4"),
        *("--set", f"train.gradient_accumulation={parts}"),
    )
    assert two.plan.global_batch == one.plan.global_batch
    assert record_of(two).num_parameters == record_of(one).num_parameters
    assert sum(r.samples for r in record_of(two).ranks) == record_of(one).ranks[0].samples
    assert len({r.final_parameters_sha256 for r in record_of(two).ranks}) == 1
    np.testing.assert_allclose(curve(two), reference, rtol=1e-4)


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "engine", "ranks"),
    [
        ("cosmoflow", "horovod", 2),
        pytest.param("bert", "ddp", 2, marks=pytest.mark.nightly),
        pytest.param("resnet50", "horovod", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, density: Path, text: Path, workload: str, engine: str, ranks: int, horovod_installed: None
) -> None:
    """Dropout, momentum, batch norm, sample order and augmentation go on as if nothing had happened."""
    source = {"cosmoflow": density, "bert": text, "resnet50": "synthetic"}[workload]
    dropout = ("--set", "model.dropout=0.2") if workload != "resnet50" else ()
    common = (workload, "--data", source, "--engine", engine, "--ranks", str(ranks), *dropout)
    whole = run_of(
        tmp_path, "whole", *common, *("--set", "measure.measured_steps=9", "--set", "checkpoint.every_steps=5")
    )
    names = record_of(whole).checkpoints
    assert names == ("step-00000010.safetensors", "step-00000012.safetensors")
    resumed = run_of(
        tmp_path,
        "resumed",
        *common,
        *("--resume", whole.folder.checkpoints / names[0]),
        *("--set", "measure.warmup_steps=0", "--set", "measure.measured_steps=2"),
    )
    record = record_of(resumed)
    assert (record.first_step, record.steps) == (10, 2)
    assert record.resumed_from is not None
    ends = {r.final_parameters_sha256 for run in (whole, resumed) for r in record_of(run).ranks}
    assert len(ends) == 1
    for rank in range(ranks):
        before, after = (read_steps(run.folder.steps(rank)).steps["loss"] for run in (whole, resumed))
        assert list(before[10:]) == list(after)


@pytest.mark.slow
def test_training_to_a_quality_stops_at_the_target_and_says_what_it_took(tmp_path: Path, density: Path) -> None:
    node = tmp_path / "node"
    node.mkdir()
    run = run_of(
        tmp_path,
        "met",
        *("cosmoflow", "--data", density, "--engine", "ddp", "--ranks", "2", "--to-accuracy"),
        *("--set", "quality.target=0.9", "--set", "quality.evaluate_every_epochs=0.5", "--set", "model.dropout=0.0"),
        *("--set", "data.loader_workers=auto", "--set", "data.cache=warm"),
        *("--set", "data.staging=replicate", "--set", f"system.storage.local.path={node}"),
    )
    record = record_of(run)
    tells_its_reading(record, density)
    staging = record.staging
    assert (staging.strategy, staging.nodes[0].items) == ("replicate", 2)  # a file of each split
    assert staging.nodes[0].copied_bytes == sum(path.stat().st_size for path in density.rglob("*.h5"))
    assert 0 < staging.nodes[0].seconds <= staging.seconds
    assert list(node.iterdir()) == []
    assert record.data["path"] == str(density / "train")
    quality = record.quality
    assert quality.reached
    assert quality.metric == "mae"
    # 48 volumes at a global batch of 8: six steps per epoch.
    assert record.steps == quality.evaluations[-1].step
    assert [e.step for e in quality.evaluations] == list(range(3, record.steps + 1, 3))
    last = quality.evaluations[-1]
    assert last.value is not None
    assert last.value <= 0.9
    assert all(e.value is None or e.value > 0.9 for e in quality.evaluations[:-1])
    assert {e.eval_samples for e in quality.evaluations} == {11}
    assert (last.samples, last.epoch) == (last.step * 8, last.step / 6)
    assert (quality.samples_to_quality, quality.epochs_to_quality) == (last.samples, last.epoch)
    assert quality.time_to_quality_s == last.wall_s
    # In steps at most the time since the start, and never less than the steps themselves.
    spent = read_steps(run.folder.steps(0)).steps["step_ns"].sum() / 1e9
    assert last.train_s == pytest.approx(spent, rel=1e-6)
    assert last.wall_s >= last.train_s + sum(e.eval_s for e in quality.evaluations) - 0.05
    targets = h5py.File(density / "validation" / "density-0.h5")["y"][:].astype(float)
    assert quality.predictor_value == pytest.approx(np.abs(targets - targets.mean(0)).mean(), rel=1e-5)
    keys = [event.key for event in record.events]
    assert keys[:6] == ["init_start", "init_stop", "run_start", "staging_start", "staging_stop", "epoch_start"]
    moments = {event.key: event.time_ms for event in record.events}
    # Taken between the two moments, which are told in whole milliseconds.
    assert 0 < staging.seconds <= (moments["staging_stop"] - moments["staging_start"]) / 1e3 + 0.01
    spent_s = quality.time_to_quality_s
    assert spent_s is not None
    assert spent_s > staging.seconds  # inside of the timed window
    assert keys[-1] == "run_stop"
    assert record.events[-1].status == "success"
    assert keys.count("eval_start") == keys.count("eval_stop") == keys.count("eval_error") == len(quality.evaluations)
    times = [event.time_ms for event in record.events]
    assert all(a <= b for a, b in itertools.pairwise(times))


def tells_its_reading(record: Record, density: Path) -> None:
    """Of 48 volumes, in batches of 4 on two ranks."""
    reading = record.reading
    assert reading is not None
    (readers,) = [setting for setting in record.settings if setting.key == "data.loader_workers"]
    assert (readers.requested, readers.effective) == ("auto", reading.loader_workers)
    assert [trial.loader_workers for trial in reading.trials][:2] == [0, 1]
    assert all(trial.samples_per_s > 0 for trial in reading.trials)
    assert record.inert == ()
    assert f"filled by reading {(density / 'train/density-0.h5').stat().st_size:,} bytes" in reading.cache
    assert reading.cached_share is None or (reading.cached_share > 0.99 and reading.cache_in_force)
    assert sum(epoch.samples for epoch in reading.epochs) == record.steps * 8
    assert [epoch.epoch for epoch in reading.epochs] == list(range(len(reading.epochs)))
    assert [epoch.is_whole for epoch in reading.epochs][:-1] == [True] * (len(reading.epochs) - 1)
    for epoch in reading.epochs:
        assert epoch.tier_bytes == {"local": epoch.samples * (32**3 * 4 * 2 + 4 * 4)}
        assert 0 < epoch.wait_s < epoch.seconds
        assert epoch.fetch_s > 0


OUT_OF_REACH = (
    *("cosmoflow", *ALONE, "--to-accuracy", "--set", "quality.target=0.0001"),
    *("--set", "quality.evaluate_every_epochs=1.0", "--set", "checkpoint.every_epochs=1.0"),
)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps per epoch."""
    folder = tmp_path_factory.mktemp("few")
    write_volumes(folder / "train", 12, seed=2)
    write_volumes(folder / "validation", 5, seed=3)
    return folder


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory, few: Path) -> Run:
    """A run that ended without its quality, with a checkpoint for each epoch."""
    out = tmp_path_factory.mktemp("runs")
    words = (*OUT_OF_REACH, "--data", few, "--set", "quality.max_epochs=2.0")
    return run_of(out, "first", *words)


def test_a_target_out_of_reach_ends_with_the_epochs_and_resumes(tmp_path: Path, few: Path, two_epochs: Run) -> None:
    three = (*OUT_OF_REACH, "--data", few, "--set", "quality.max_epochs=3.0")
    whole = run_of(tmp_path, "whole", *three)
    rest = run_of(tmp_path, "rest", *three, "--resume", two_epochs.folder.path)
    records = [record_of(run) for run in (whole, rest)]
    values = []
    for record in records:
        assert not record.quality.reached
        assert record.quality.time_to_quality_s is None
        assert [e.epoch for e in record.quality.evaluations] == [1, 2, 3]
        assert record.events[-1].status == "aborted"
        values.append([e.value for e in record.quality.evaluations])
    assert values[0] == values[1]
    assert records[0].ranks[0].final_parameters_sha256 == records[1].ranks[0].final_parameters_sha256
    assert records[1].quality.evaluations[1].wall_s < records[1].quality.evaluations[2].wall_s


@pytest.mark.slow
def test_a_checkpoint_of_another_data_set_is_refused(cli: Cli, tmp_path: Path, two_epochs: Run) -> None:
    other = tmp_path / "other"
    write_volumes(other / "train", 16, seed=5)
    write_volumes(other / "validation", 5, seed=3)
    words = (*OUT_OF_REACH, "--preset", "ci", "--data", other, "--set", "quality.max_epochs=3.0")
    done = cli("run", *words, "--resume", two_epochs.folder.path, "--series", "second")
    assert done.returncode == 2, done.stderr
    status = json.loads((tmp_path / "runs" / "second-cosmoflow-ci-p00-n0001-k00" / "rank-0000.status.json").read_text())
    assert "was trained with data." in status["reason"]


NUM, RANKS, BATCH = 50, 2, 4
PER_EPOCH = NUM // RANKS // BATCH
"""Batches of a rank: 6 of 4, one sample of each rank is left out."""
PARTIAL = ("--set", "data.staging=shard", "--set", "data.shuffle=partial:0.5", "--set", "data.partition=contiguous")
TWO = ("--engine", "ddp", "--ranks", "2", "--set", "data.loader_workers=1")


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("density") / "volumes"
    write_volumes(folder, NUM, seed=0)
    return folder


def run_that_shuffles(cli: Cli, out: Path, series: str, volumes: Path, *arguments: str | Path) -> Run:
    done = cli(
        *("run", "cosmoflow", "--preset", "ci", "--data", volumes, "--series", series, "--out", out),
        *("--set", f"train.batch_per_rank={BATCH}", *arguments),
    )
    (run,) = [run for run in scan(out).runs if run.plan.series.id == series]
    assert (done.returncode == 0) == (run.state == "valid"), done.stderr
    return run


@pytest.mark.slow
def test_two_ranks_exchange_samples_say_so_and_go_on_bit_for_bit(cli: Cli, tmp_path: Path, volumes: Path) -> None:
    steps = 2 * PER_EPOCH + 4
    whole = run_that_shuffles(
        cli,
        tmp_path,
        "whole",
        volumes,
        *(*PARTIAL, *TWO, "--set", "checkpoint.every_steps=3", "--set", "checkpoint.keep=9"),
        *("--set", "measure.warmup_steps=1", "--set", f"measure.measured_steps={steps - 1}"),
    )
    record = record_of(whole)
    shuffle = record.shuffle
    assert shuffle is not None
    slots = NUM // RANKS // 2
    assert (shuffle.shuffle, shuffle.partition, shuffle.errors) == ("partial:0.5", "contiguous", ())
    assert shuffle.exchanged_share == slots / (NUM // RANKS)
    assert [(e.epoch, e.is_whole, e.visits, e.left_out) for e in shuffle.epochs] == [
        *((epoch, True, PER_EPOCH * BATCH * RANKS, NUM - PER_EPOCH * BATCH * RANKS) for epoch in (0, 1)),
        (2, False, 4 * BATCH * RANKS, NUM - PER_EPOCH * BATCH * RANKS),
    ]
    for epoch in shuffle.epochs[:2]:
        # At two ranks every other draw falls to oneself.
        assert 0 < epoch.sent == epoch.received < RANKS * slots
        assert epoch.sent_bytes == epoch.sent * (2 * 4 * 32**3 + 16)
    assert shuffle.epochs[1].novelty is not None
    assert 0.1 < shuffle.epochs[1].novelty < 0.9
    assert shuffle.held_samples_peak is not None
    assert NUM // RANKS < shuffle.held_samples_peak <= NUM // RANKS + slots + BATCH
    (check,) = [check for check in record.checks if check.name == "every sample once per epoch"]
    assert check.passed
    assert check.detail == "2 complete epochs, in each 48 samples read and 2 left out"
    (setting,) = [setting for setting in record.settings if setting.key == "data.shuffle"]
    assert setting.requested == setting.effective == "partial:0.5"
    assert record.inert == ()
    staging = record.staging
    assert not Path(staging.nodes[0].path).exists()

    # Within the second epoch: what the first exchanged is there, what the second has begun to exchange begins anew.
    middle = whole.folder.checkpoint(PER_EPOCH + 3)
    resumed = run_that_shuffles(
        cli,
        tmp_path,
        "resumed",
        volumes,
        *(*PARTIAL, *TWO, "--resume", middle),
        *("--set", "measure.warmup_steps=0", "--set", f"measure.measured_steps={steps - PER_EPOCH - 3}"),
    )
    went_on = record_of(resumed).shuffle
    assert went_on.errors == ()
    assert [(e.epoch, e.is_whole) for e in went_on.epochs] == [(1, False), (2, False)]
    for rank in range(RANKS):
        before, after = (read_steps(run.folder.steps(rank)).steps["loss"] for run in (whole, resumed))
        assert list(before[PER_EPOCH + 3 :]) == list(after)
    ends = {rank.final_parameters_sha256 for run in (whole, resumed) for rank in record_of(run).ranks}
    assert len(ends) == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_a_resume_with_other_ranks_or_another_shuffle_at_the_end_of_an_epoch(
    cli: Cli, tmp_path: Path, volumes: Path
) -> None:
    local = ("--set", "data.shuffle=local")
    two = run_that_shuffles(
        cli,
        tmp_path,
        "two",
        volumes,
        *(*TWO, *local, "--set", f"checkpoint.every_steps={PER_EPOCH // 2}", "--set", "checkpoint.keep=9"),
        *("--set", "measure.warmup_steps=1"),
        *("--set", f"measure.measured_steps={PER_EPOCH}"),
    )
    end = ("--resume", two.folder.checkpoint(PER_EPOCH), "--set", "measure.warmup_steps=0")
    one = run_that_shuffles(cli, tmp_path, "one", volumes, *ALONE, *local, *end, "--set", "measure.measured_steps=12")
    assert any(
        "resumed with 1 ranks after 2: samples were distributed again" in text for text in record_of(one).warnings
    )
    middle = ("--resume", two.folder.checkpoint(PER_EPOCH // 2))
    for series, arguments, words in (
        ("middle", (*local, *middle), "written within epoch 0 by 2 ranks"),
        ("global", (), "data.shuffle 'local', the plan has 'global'"),
        ("sorted", (*local, "--set", "data.partition=contiguous"), "data.partition 'shuffled', the plan has 'contig"),
    ):
        refused = run_that_shuffles(cli, tmp_path, series, volumes, *ALONE, *end, *arguments)
        assert refused.state == "failed"
        assert words in refused.detail
