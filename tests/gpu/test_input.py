"""Input on a real GPU: the same batches, copies beside computation, no waiting of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlbench.node.data.loader import LoadedSource
from dlbench.node.data.reader import BatchReader
from dlbench.node.data.sharding import ShardedOrder
from dlbench.node.data.synthetic import BatchCopier
from dlbench.node.models.cosmoflow import network_volume
from dlbench.specs.workload import CosmoFlowModel, DensityData, ResNetModel
from tests.node.data.test_loader_transport import Numbers
from tests.support.training_data import training_data

pytestmark = pytest.mark.gpu

VOLUMES = CosmoFlowModel(family="cosmoflow", input_size=32)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def numbers(*, workers: int, pin_memory: bool) -> LoadedSource:
    order = ShardedOrder(64, batch_size=8, rank=0, world_size=1, seed=1)
    reader: Any = Numbers(64)
    return LoadedSource(reader, order, loader_workers=workers, on_bad_sample="stop", pin_memory=pin_memory)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_slots_are_page_locked_and_batches_arrive_as_they_were_read(device: torch.device, prefetch: int) -> None:
    """Many more batches than slots, the host far ahead of the device, so that a slot used too early would show."""
    plain, source = numbers(workers=0, pin_memory=False), numbers(workers=2, pin_memory=True)
    batch_copier = BatchCopier(source, source.ahead, device, prefetch)
    busy = torch.ones(2048, 2048, device=device)
    arrived, expected = [], []
    try:
        for _ in range(60):
            batch_copier.fetch()
            batch = batch_copier.deliver()
            for _ in range(4):
                busy = busy @ busy.clamp(max=1e-3)
            arrived.append(batch["x"].clone())
            expected.append(next(plain)["x"])
            batch_copier.look_ahead()
        torch.cuda.synchronize()
        assert all(torch.equal(one.cpu(), other) for one, other in zip(arrived, expected, strict=True))
        assert next(source)["x"].is_pinned()
    finally:
        source.close()
        plain.close()


class Large:
    """Page-locked batches of 64 MiB."""

    def __init__(self) -> None:
        self._batch = {"image": torch.ones(1 << 26, dtype=torch.uint8).pin_memory()}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        return self._batch

    def ahead(self) -> dict[str, torch.Tensor]:
        return self._batch


def exposed_ms(device: torch.device, prefetch: int) -> float:
    """Median time between two steps' work on the device, after a warm-up."""
    source = Large()
    batch_copier = BatchCopier(source, source.ahead, device, prefetch)
    operand = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16)
    gaps = []
    before: Any = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):
            batch_copier.fetch()
            batch_copier.deliver()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(8):
                torch.mm(operand, operand)
            end.record()
            if before is not None:
                gaps.append((before, start))
            before = end
            batch_copier.look_ahead()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return float(np.median([one.elapsed_time(other) for one, other in gaps[4:]]))


def test_a_copy_is_hidden_behind_the_step_before_it_without_waiting(device: torch.device) -> None:
    """64 MiB take a millisecond and more over PCIe; `set_sync_debug_mode` proves that the host waits for nothing."""
    in_step, ahead = exposed_ms(device, 0), exposed_ms(device, 1)
    assert ahead < 0.3 * in_step, f"{ahead:.3f} ms exposed with a copy stream, {in_step:.3f} ms without"


def test_the_logarithm_of_counts_on_the_gpu_is_that_of_the_host_to_the_bit(device: torch.device) -> None:
    every = torch.arange(32768, dtype=torch.int16).reshape(1, 32, 16, 16, 4)
    for channels_last in (False, True):
        host = network_volume(every, channels_last=channels_last)
        there = network_volume(every.to(device), channels_last=channels_last)
        assert there.stride() == host.stride()
        assert torch.equal(there.cpu(), host)


def test_synthetic_volumes_reach_the_gpu_as_counts(device: torch.device) -> None:
    data = DensityData(format="density")
    plain = training_data(VOLUMES, data, seed=1)
    counted = training_data(VOLUMES, data, seed=1, device=device)
    batch_copier = BatchCopier(counted, counted.ahead, device, 1)
    for _ in range(5):
        batch_copier.fetch()
        batch = batch_copier.deliver()
        assert batch["volume"].dtype == torch.int16
        assert torch.equal(network_volume(batch["volume"], channels_last=False).cpu(), next(plain)["volume"])
        batch_copier.look_ahead()


def test_images_decoded_by_the_gpu_are_near_those_of_the_host(device: torch.device, tmp_path: Path) -> None:
    """nvJPEG's inverse transform and colours round otherwise than libjpeg's: levels, not bits."""
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed (extra gpu-input)")
    image = pytest.importorskip("PIL.Image")
    from dlbench.node.data.images import RegionDecoder, open_images

    model = ResNetModel(family="resnet", image_size=64, num_classes=2)
    rng = np.random.default_rng(0)
    for number in range(8):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        coarse = image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
        coarse.resize((180 + number, 140), image.Resampling.BICUBIC).save(
            tmp_path / "ab"[number % 2] / f"{number}.jpg", quality=92
        )
    keys = [(0, index) for index in range(8)]
    ours = BatchReader(open_images(tmp_path, model, 1, training=True, decoding="full"), "stop")[keys].batch
    reader = open_images(tmp_path, model, 1, training=True, by_gpu=True)
    decode = RegionDecoder(device, 64, is_whole=False, name=reader.name)
    batch, _kept = decode(BatchReader(reader, "stop")[keys].batch)
    assert batch["image"].device == device
    difference = (batch["image"].cpu().int() - ours["image"].int()).abs().float()
    assert difference.mean() < 1.5
    assert batch["label"].tolist() == ours["label"].tolist()
