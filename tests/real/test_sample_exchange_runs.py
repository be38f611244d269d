"""Real ranks exchange samples: what the record says of it, going on from a checkpoint, and what may not go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from tests.conftest import Cli
from tests.support.datasets import write_volumes
from tests.support.run_factory import record_of

h5py = pytest.importorskip("h5py")

NUM, RANKS, BATCH = 50, 2, 4
PER_EPOCH = NUM // RANKS // BATCH
"""Batches of a rank: 6 of 4, one sample of each rank is left out."""
PARTIAL = ("--set", "data.staging=shard", "--set", "data.shuffle=partial:0.5", "--set", "data.partition=contiguous")
TWO = ("--engine", "ddp", "--ranks", "2", "--set", "data.loader_workers=1")
ALONE = ("--engine", "single", "--ranks", "1", "--set", "layout.cores_per_rank=1", "--set", "system.launch.pin=false")


@pytest.fixture(scope="module")
def density(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("density") / "volumes"
    write_volumes(folder, NUM, seed=0)
    return folder


def run_of(cli: Cli, out: Path, series: str, density: Path, *arguments: str | Path) -> Run:
    done = cli(
        *("run", "cosmoflow", "--preset", "ci", "--data", density, "--series", series, "--out", out),
        *("--set", f"train.batch_per_rank={BATCH}", *arguments),
    )
    (run,) = [run for run in scan(out).runs if run.plan.series.id == series]
    assert (done.returncode == 0) == (run.state == "valid"), done.stderr
    return run


@pytest.mark.slow
def test_two_ranks_exchange_samples_say_so_and_go_on_bit_for_bit(cli: Cli, tmp_path: Path, density: Path) -> None:
    steps = 2 * PER_EPOCH + 4
    whole = run_of(
        cli,
        tmp_path,
        "whole",
        density,
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
    resumed = run_of(
        cli,
        tmp_path,
        "resumed",
        density,
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
    cli: Cli, tmp_path: Path, density: Path
) -> None:
    local = ("--set", "data.shuffle=local")
    two = run_of(
        cli,
        tmp_path,
        "two",
        density,
        *(*TWO, *local, "--set", f"checkpoint.every_steps={PER_EPOCH // 2}", "--set", "checkpoint.keep=9"),
        *("--set", "measure.warmup_steps=1"),
        *("--set", f"measure.measured_steps={PER_EPOCH}"),
    )
    end = ("--resume", two.folder.checkpoint(PER_EPOCH), "--set", "measure.warmup_steps=0")
    one = run_of(cli, tmp_path, "one", density, *ALONE, *local, *end, "--set", "measure.measured_steps=12")
    assert any(
        "resumed with 1 ranks after 2: samples were distributed again" in text for text in record_of(one).warnings
    )
    middle = ("--resume", two.folder.checkpoint(PER_EPOCH // 2))
    for series, arguments, words in (
        ("middle", (*local, *middle), "written within epoch 0 by 2 ranks"),
        ("global", (), "data.shuffle 'local', the plan has 'global'"),
        ("sorted", (*local, "--set", "data.partition=contiguous"), "data.partition 'shuffled', the plan has 'contig"),
    ):
        refused = run_of(cli, tmp_path, series, density, *ALONE, *end, *arguments)
        assert refused.state == "failed"
        assert words in refused.detail
