"""How samples are read: readers chosen by measurement, epochs that begin cold, sums per epoch, pure rates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import UserError
from dlbench.machine.page_cache import cached_pages
from dlbench.node.data import rank_reader as cache
from dlbench.node.data import reader_rate as rate
from dlbench.node.data import reader_trials as trials
from dlbench.node.data.loader import EpochReads, LoadedSource, read_epochs
from dlbench.node.data.rank_reader import NodeCache, RankReading
from dlbench.node.data.reader import Key, PreparedSample, Raw
from dlbench.node.data.reader_trials import Readers, TrialContext, choose, chosen
from dlbench.node.data.sharding import Position, ShardedOrder
from dlbench.specs.workload import ImageData
from tests.support.datasets import write_volumes
from tests.support.training_data import NumberReader

CPU = torch.device("cpu")
SAMPLES, BYTES = 20, 4096
FEW = 0.05
"""Pages that a core held in a list of its own are not evicted at once."""


class Alone:
    """All ranks, of which this is the only one."""

    def __init__(self, answer: Callable[[Any], list[Any]] = lambda value: [value]) -> None:
        self._answer = answer

    def barrier(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return self._answer(value)


class Files(NumberReader):
    """Samples of 4 KiB, a file each; each takes `delay_s` to fetch."""

    def __init__(self, folder: Path, delay_s: float = 0.0, num: int = SAMPLES) -> None:
        super().__init__(num)
        self._folder, self._delay_s = folder, delay_s
        folder.mkdir(exist_ok=True)
        for path in self.files():
            path.write_bytes(os.urandom(BYTES))

    def files(self) -> list[Path]:
        return [self._folder / str(index) for index in range(self.num_samples)]

    def fetch(self, index: int, out: object = None) -> Raw:
        time.sleep(self._delay_s)
        return Raw((self._folder / str(index)).read_bytes(), "shared" if index % 2 else "local")

    def prepare(self, key: Key, data: bytes, out: object = None) -> PreparedSample:
        return PreparedSample({"key": np.array(key), "data": np.frombuffer(data, np.uint8)})

    def num_bytes(self, index: int) -> int:
        return BYTES


def order_of(start: Position | None = None) -> ShardedOrder:
    """Two batches of 4 an epoch for each of two ranks; 4 samples are left out."""
    return ShardedOrder(SAMPLES, batch_size=4, rank=0, world_size=2, seed=0, start=start)


def keys_of(batches: Sequence[dict[str, torch.Tensor]]) -> list[list[list[int]]]:
    return [batch["key"].tolist() for batch in batches]


# Sums


@pytest.mark.parametrize("workers", [0, 2])
def test_sums_of_epochs_are_what_was_read(tmp_path: Path, workers: int) -> None:
    begun = time.monotonic_ns()
    order = order_of(start=Position(epoch=3, place=8))
    source = LoadedSource(Files(tmp_path, 0.002), order, loader_workers=workers, on_bad_sample="stop")
    batches = [next(source) for _ in range(4)]
    told = [asdict(epoch) for epoch in source.epoch_reads()]
    source.close()
    spent = time.monotonic_ns() - begun
    assert [(one["epoch"], one["batches"], one["samples"]) for one in told] == [(3, 1, 4), (4, 2, 8), (5, 1, 4)]
    for one in told:
        seen = [index for batch in batches for epoch, index in batch["key"].tolist() if epoch == one["epoch"]]
        odd = sum(index % 2 for index in seen)
        expected = {"shared": odd * BYTES, "local": (len(seen) - odd) * BYTES}
        assert one["tier_bytes"] == {tier: num for tier, num in expected.items() if num}
        assert one["fetch_ns"] >= 0.002e9 * len(seen)
        assert one["prepare_ns"] > 0
    assert 0 < sum(one["wait_ns"] for one in told) < spent
    other = [{**one, "storage_bytes": 8192} for one in told]
    steps = [0.5, 0.25, 0.25, 1.0]
    result = read_epochs([told, other], steps, batches_per_epoch=2, counts_storage=True, cached_shares={3: 0.25})
    assert [epoch.is_whole for epoch in result] == [False, True, False]
    assert [epoch.samples for epoch in result] == [8, 16, 8]
    assert [epoch.seconds for epoch in result] == [0.5, 0.5, 1.0]
    assert [epoch.cached_share for epoch in result] == [0.25, None, None]
    assert sum(result[1].tier_bytes.values()) == 16 * BYTES
    assert result[0].wait_s == pytest.approx(told[0]["wait_ns"] / 1e9)  # the mean, not the sum
    assert result[0].fetch_s == pytest.approx(2 * told[0]["fetch_ns"] / 1e9)


@pytest.mark.parametrize(
    ("one", "other", "counts", "expected"),
    [(0, 0, True, 0), (0, 0, False, None), (4096, 0, False, 4096), (None, 4096, True, None), (None, None, True, None)],
)
def test_what_the_kernel_does_not_count_is_null(
    one: int | None, other: int | None, counts: bool, expected: int | None
) -> None:
    told = [[asdict(EpochReads(0, batches=1, samples=1, storage_bytes=num))] for num in (one, other)]
    (epoch,) = read_epochs(told, [1.0], batches_per_epoch=1, counts_storage=counts, cached_shares={})
    assert epoch.storage_bytes == expected


# Readers


@given(st.lists(st.lists(st.floats(0.5, 2), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_first_is_taken_that_is_not_clearly_slower(rates: list[list[float]]) -> None:
    place = chosen(rates)
    medians = [sorted(values)[1] for values in rates]
    best = medians.index(max(medians))
    assert place <= best
    # What was passed over was slower than the best in every round, and by more than a twentieth in the middle.
    for values in rates[:place]:
        assert all(value < most for value, most in zip(values, rates[best], strict=True))


def test_a_slow_reader_gets_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SECONDS", 0.1)
    beats: list[str] = []
    # What another rank, the slowest, told of each trial: every round begins with another candidate.
    rates = iter([25.0, 26.0, 50.0, 26.0, 51.0, 25.0, 49.0, 25.0, 26.0])
    slower = Alone(lambda value: [value + 60, next(rates)] if isinstance(value, float) else [value])
    around = TrialContext(
        reader=Files(tmp_path, 0.02, num=400),
        keys=[[(0, 4 * batch + place) for place in range(4)] for batch in range(100)],
        most_readers=2,
        ranks=slower,
        device=CPU,
        on_bad_sample="stop",
        beat=beats.append,
    )
    choice = choose(around, "auto", 1)
    assert choice.readers == Readers(2, 1)
    assert [(trial.loader_workers, trial.prefetch_batches) for trial in choice.trials] == [(0, 0), (1, 1), (2, 1)]
    assert [trial.samples_per_s for trial in choice.trials] == [25.0, 26.0, 50.0]
    assert len(beats) >= 9  # of three rounds of three
    assert not choice.of_prefetch


def test_a_fast_reader_is_tried_beside_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SECONDS", 0.05)
    monkeypatch.setattr(trials, "ROUNDS", 1)
    emptied: list[int] = []
    rates = iter([90.0, 60.0, 40.0, 80.0, *[70.0] * 8])
    around = TrialContext(
        reader=Files(tmp_path),
        keys=[[(0, 4 * batch + place) for place in range(4)] for batch in range(5)],
        most_readers=1,
        ranks=Alone(lambda value: [next(rates)] if isinstance(value, float) else [value]),
        device=CPU,
        on_bad_sample="stop",
        beat=lambda _what: None,
        empty_cache=lambda: emptied.append(1),
    )
    choice = choose(around, "auto", "auto")
    assert [trial.computing for trial in choice.trials][:4] == [False, False, True, True]
    assert choice.of_prefetch
    assert choice.readers == Readers(1, 1)
    assert choice.again
    assert emptied


def tried(cores: int, ranks: int, device: str, workers: int | str, tmp_path: Path) -> tuple[list[int], RankReading]:
    """What is tried where more readers read more, and the reading that comes of it."""
    spec = ImageData.model_validate({"format": "images", "source": "x", "loader_workers": workers})
    everyone = Alone(lambda value: [value] * ranks)
    reading = RankReading(spec, cores=cores, is_node_first=True, ranks=everyone, device=torch.device(device))
    reading.prepare(Files(tmp_path / "set"), order_of(), 4)
    return [trial.loader_workers for trial in reading.result([[]], []).trials], reading


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("cores", "ranks", "device", "numbers", "kept"),
    [
        (4, 2, "cpu", [0, 1, 2, 4], None),  # computing and readers share all cores
        (8, 1, "cuda", [0, 1, 2, 4, 6], 2),
        (8, 2, "cuda", [0, 1, 2, 4], 4),
        (6, 2, "cuda", [0, 1, 2], 4),
        (2, 1, "cuda", [0, 1], 1),  # one reader at least
        (3, 2, "cuda", [0, 1], 2),
        (1, 1, "cuda", [0, 1], 0),
    ],
)
def test_training_on_a_gpu_keeps_cores_for_its_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cores: int,
    ranks: int,
    device: str,
    numbers: list[int],
    kept: int | None,
) -> None:
    monkeypatch.setattr(trials.Trials, "_rate", lambda _self, readers, _stand_in: 100.0 + 50 * readers.loader_workers)
    found, reading = tried(cores, ranks, device, "auto", tmp_path)
    assert found == numbers
    result = reading.result([[]], [])
    assert (result.loader_workers, result.training_cores) == (numbers[-1], kept)
    assert result.limited_by_cores == (device == "cuda")
    (setting,) = [one for one in reading.settings() if one.key == "data.loader_workers"]
    words = f"; at most {numbers[-1]}: training keeps {kept} of the rank's {cores} cores"
    assert setting.evidence.endswith(words if device == "cuda" else "than the best")
    assert setting.effective == numbers[-1]
    is_short = kept is not None and kept < (4 if ranks > 1 else 2)
    assert [("leaves training" in text, "or lower" in text) for text in reading.warnings()] == [
        (True, False)
    ] * is_short


@pytest.mark.usefixtures("own_cache")
def test_a_number_of_readers_that_is_given_is_used_and_doubted_where_training_lacks_cores(tmp_path: Path) -> None:
    found, reading = tried(8, 2, "cuda", 7, tmp_path)
    assert found == []
    result = reading.result([[]], [])
    assert (result.loader_workers, result.training_cores, result.limited_by_cores) == (7, 1, False)
    (text,) = reading.warnings()
    assert text.startswith("data.loader_workers 7 leaves training 1 of a rank's 8 cores, but its threads need 4")
    assert text.endswith("give each rank 11 cores (layout.cores_per_rank), or lower data.loader_workers")
    for workers in (0, 4):
        assert tried(8, 2, "cuda", workers, tmp_path)[1].warnings() == []
    assert tried(2, 2, "cpu", 8, tmp_path)[1].warnings() == []


# The page cache


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the whole machine's."""
    monkeypatch.setattr(cache, "DROP_CACHES", tmp_path / "not there" / "drop_caches")


def test_ranks_that_decode_unlike_are_told(tmp_path: Path) -> None:
    unlike = Alone(lambda value: [value, [True, "Pillow"] if len(value) == 2 else value])
    spec = ImageData(format="images", source=str(tmp_path), loader_workers=0)
    reading = RankReading(spec, cores=1, is_node_first=True, ranks=unlike, device=CPU)
    reading.prepare(Files(tmp_path / "set"), order_of(), 4)
    assert [told.rpartition(": rank")[2] for told in reading.warnings()] == [" 0: None; rank 1: Pillow"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("own_cache")
def test_each_epoch_begins_cold_and_the_samples_are_the_same(tmp_path: Path, workers: int) -> None:
    data = Files(tmp_path / "set")
    order = order_of()
    reference = keys_of([batch for batch, _ in zip(order_batches(data), range(7), strict=False)])
    spec = ImageData(format="images", source=str(tmp_path), cache="cold", loader_workers=workers)
    reading = RankReading(spec, cores=1, is_node_first=True, ranks=Alone(), device=CPU)
    readers = reading.prepare(data, order, 4)
    assert (cached_pages(data.files()).share or 0) <= FEW
    source = LoadedSource(data, order, loader_workers=readers.loader_workers, on_bad_sample="stop", epoch_by_epoch=True)
    taken, shares = [], []
    for number in range(7):
        assert source.is_between_epochs == (number > 0 and number % 2 == 0)
        if source.is_between_epochs and number < 6:  # the last time nobody rests, and it goes on all the same
            reading.between_epochs()
            source.begin_epoch()
        if number in (2, 4) and not workers:
            shares.append(cached_pages(data.files()).share)
        taken.append(next(source))
    told = [asdict(epoch) for epoch in source.epoch_reads()]
    source.close()
    assert keys_of(taken) == reference
    if cached_pages(data.files()[:1]).share is None:
        pytest.skip("the kernel does not tell")
    assert max(shares, default=0) <= FEW
    result = reading.result([told], [0.1] * 7)
    assert [(epoch.epoch, epoch.is_whole) for epoch in result.epochs] == [(0, True), (1, True), (2, True), (3, False)]
    assert max(epoch.cached_share or 0 for epoch in result.epochs[:3]) <= FEW
    assert result.epochs[3].cached_share is None
    assert result.cache_in_force
    assert result.cached_share is not None
    assert result.cached_share <= FEW
    assert result.cache.startswith("emptied of these files by posix_fadvise; ")
    (setting,) = reading.settings()
    assert (setting.key, setting.requested, setting.effective) == ("data.cache", "cold", "cold")
    assert all(
        (epoch.storage_bytes or BYTES) >= 8 * BYTES for epoch in result.epochs[:3] if epoch.storage_bytes is not None
    )


def order_batches(data: Files) -> Iterator[dict[str, torch.Tensor]]:
    source = LoadedSource(data, order_of(), loader_workers=0, on_bad_sample="stop")
    assert not source.is_between_epochs
    return iter(source)


@pytest.mark.usefixtures("own_cache")
def test_a_cache_that_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, order = Files(tmp_path / "set"), order_of()

    def told(wanted: str) -> RankReading:
        spec = ImageData.model_validate({"format": "images", "source": "x", "cache": wanted})
        reading = RankReading(spec, cores=1, is_node_first=True, ranks=Alone(), device=CPU)
        reading.prepare(data, order, 4)
        return reading

    monkeypatch.setattr(os, "posix_fadvise", lambda *_arguments: None)
    for path in data.files():
        path.read_bytes()
    reading = told("cold")
    (setting,) = reading.settings()
    assert (setting.requested, setting.effective, setting.is_without_effect) == ("cold", "any", True)
    assert "100.0 % of its pages were cached" in setting.evidence
    assert reading.warnings() == []
    assert not reading.result([[]], []).cache_in_force
    assert told("any").settings() == []
    # A kernel that does not tell: neither yes nor no.
    monkeypatch.setattr(cache, "cached_pages", lambda _files: cached_pages([]))
    reading = told("warm")
    (setting,) = reading.settings()
    assert (setting.effective, setting.is_without_effect) == (None, False)
    assert len(reading.warnings()) == 1
    assert reading.result([[]], []).cached_share is None


def test_the_node_that_is_farthest_decides(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(BYTES))

    def answer(value: Any) -> list[Any]:
        return [value, None, [0.75, "there", "filled"]] if isinstance(value, list) else [value]

    node = NodeCache([path], "warm", acts=True, ranks=Alone(answer), beat=lambda _what: None)
    state = node.prepare()
    assert (state.share, state.in_force) == (0.75, False)
    assert state.summary == "filled; 75.0 % of its pages were cached (there), the worst of 2 nodes"


# Rates


def rate_order(source: Path, **changes: Any) -> str:
    data = {"format": "density", "source": str(source), "loader_workers": 0, "cache": "warm"}
    model = {"family": "cosmoflow", "input_size": 32, "conv_channels": [4, 4]}
    order = {"model": model, "data": data, "batch": 2, "processes": 1, "seconds": 0.1, "repeats": 2}
    return json.dumps({**order, **changes})


def test_rates_of_two_processes_add_up(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    write_volumes(tmp_path / "train", 16, seed=0)
    command = [sys.executable, "-P", "-m", "dlbench.node.data.reader_rate"]
    done = subprocess.run(
        command,
        input=rate_order(tmp_path / "train", processes=2),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert (answer["kind"], answer["num_samples"], answer["loader_workers"]) == ("hdf5-density", 16, 0)
    assert answer["cache_in_force"] or answer["repeats"][0]["cached_share"] is None
    assert len(answer["repeats"]) == 2
    assert (answer["num_files"], answer["names_from"]) == (1, "its folders")
    for repeat in answer["repeats"]:
        together, one, two = repeat["together"], *repeat["processes"]
        calls = ("opens_per_s", "stats_per_s", "names_per_s")
        for key in ("samples", "raw_bytes", "samples_per_s", "bytes_per_s", "fetch_s", *calls):
            assert together[key] == pytest.approx(one[key] + two[key])
        for each in (one, two):
            assert each["samples"] >= 2
            assert each["raw_bytes"] == each["tier_bytes"]["shared"] == each["samples"] * (32**3 * 8 + 16)
            assert each["samples_per_s"] == pytest.approx(each["samples"] / each["seconds"])
            assert each["fetch_s"] + each["prepare_s"] <= each["seconds"] * 1.01


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch": 0}, "order on stdin: batch: "),
        ({"seconds": "long"}, "order on stdin: seconds: "),
        ({"more": 1}, "order on stdin: more: "),
        ({"data": {"format": "density"}}, "data.source: synthetic data is not read"),
        ({}, "no such folder"),
    ],
)
def test_a_bad_order_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], told: str
) -> None:
    assert rate.main(rate_order(tmp_path / "not there", **changes)) == UserError.exit_code
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("dlbench: error: ")
    assert told in seen.err
    assert seen.err.count("\n") == 1
