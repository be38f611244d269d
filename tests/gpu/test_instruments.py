"""dlbench's own instruments on a GPU: what they find is right, and what they cost is little."""

from __future__ import annotations

import statistics
from typing import Any, cast

import pytest
import torch
from torch import nn

from dlbench.machine.nvml import METRICS, open_nvml
from dlbench.node.comm.contestants import HostSampleClock, StreamSampleClock
from dlbench.node.models.resnet import MEAN, STD, normalised
from dlbench.node.sync.own import buckets
from dlbench.node.sync.timing import MOST_QUEUED, CudaClock
from dlbench.node.sync.wire import OverflowCount, magnitudes

pytestmark = pytest.mark.gpu

INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("place", [0, 12345, 999_999])
def test_one_bad_entry_among_many_is_found_wherever_it_is(place: int, device: torch.device) -> None:
    """An infinity or NaN must go through the maximum of magnitudes in both kernels that are used."""
    for bad, own_is_bad, counted in ((INFINITY, False, 1), (-INFINITY, False, 1), (NAN, False, 1), (NAN, True, 0)):
        own = torch.ones(1_000_000, device=device)
        result = torch.ones(1_000_000, dtype=torch.float16, device=device)
        result[place] = bad
        if own_is_bad:
            own[place] = bad
        count = OverflowCount()
        count.end(count.begin(own), result, list)
        good = torch.ones(7, device=device)
        count.end(count.begin(good), good.half(), list)
        assert count.total == counted
        count.count_all(magnitudes(list(torch.split(own, 1000))), magnitudes(list(torch.split(result.float(), 1000))))
        assert count.total == 2 * counted


def test_a_search_launches_one_kernel(device: torch.device) -> None:
    """By torch's profiler: of a message of any length, before and after it."""
    own = torch.ones(10_000_000, device=device)
    result = own.half()
    count = OverflowCount()
    count.end(count.begin(own), result, list)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        count.end(count.begin(own), result, list)
        torch.cuda.synchronize(device)
    kernels = [event.name for event in seen.events() or [] if "memset" not in event.name.lower()]
    kernels = [name for name in kernels if "reduce" in name.lower()]
    assert 1 <= len(kernels) <= 4, kernels


def test_a_bucket_that_is_taken_at_once_is_the_same_bits(device: torch.device) -> None:
    def taken(together: bool) -> torch.Tensor:
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in ((300, 5), (7,), (64, 3, 7, 7))]
        bucket = buckets.Bucket(parameters, 1, torch.zeros(20_000, device=device))
        assert bucket.takes_together
        bucket.takes_together = together
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for place in range(3):
            bucket.take(place, 1 / 3)
        return bucket.vector

    assert torch.equal(taken(False), taken(True))


@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_are_normalised_as_by_hand(channels_last: bool, device: torch.device) -> None:
    image = torch.randint(256, (4, 33, 31, 3), dtype=torch.uint8, device=device)
    mean, deviation = (torch.tensor(values, dtype=torch.float64, device=device) for values in (MEAN, STD))
    expected = ((image.double() / 255 - mean) / deviation).permute(0, 3, 1, 2)
    found = normalised(image, channels_last=channels_last)
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    # Two roundings of numbers below 3.
    assert (found.double() - expected).abs().max() < 1e-6
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(normalised(image, channels_last=channels_last), found.bfloat16())


class Kernel:
    """A stand-in for a collective: one kernel of known length."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(1 << 20, device=device)

    waits = False

    def line_up(self) -> None: ...

    def run(self, times: int) -> None:
        for _ in range(times):
            self._values.add_(1.0)


def test_a_time_in_the_stream_leaves_out_what_the_host_adds(device: torch.device) -> None:
    kernel = cast(Any, Kernel(device))
    flag = torch.zeros(1, device=device)
    stream = StreamSampleClock(lambda: cast(None, flag.add_(0.0)), CudaClock(device))
    host = HostSampleClock(device)
    for clock in (stream, host):
        clock.time(kernel, 1, 10)
    stream.time(kernel, 1, MOST_QUEUED)  # learns how long this host takes to queue them
    samples = [stream.time(kernel, 1, MOST_QUEUED) for _ in range(5)]
    many = statistics.median(sample.duration_ns / MOST_QUEUED for sample in samples)
    alone = statistics.median(host.time(kernel, 1, 1).duration_ns for _ in range(20))
    assert sum(bool(sample.is_late) for sample in samples) < len(samples), "the stream was never held long enough"
    assert 500 < many < 100_000  # 4 MiB read and written: some microseconds
    assert alone > many


def test_moments_that_were_given_back_are_recorded_again(device: torch.device) -> None:
    clock = CudaClock(device)
    first = clock.mark()
    clock.give_back([first])
    clock.anchor()
    again = clock.mark()
    last = clock.mark()
    clock.settle()
    assert 0 <= clock.between(again, last) < 1
    assert clock.monotonic_ns(last) >= clock.monotonic_ns(again)


def test_gpm_answers_where_the_gpu_has_it(device: torch.device) -> None:
    """Hopper and newer (compute capability 9.0); elsewhere each field says why it is missing."""
    source = open_nvml()
    try:
        names = [f"gpu.0.{name}" for name, _, _, _ in METRICS]
        fields = [field.name for field in source.fields]
        assert all((name in fields) != (name in source.unavailable) for name in names)
        if "gpu.0.sm_active" not in fields:
            pytest.skip(source.unavailable["gpu.0.sm_active"])
        matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
        source.read(slow=True)
        for _ in range(2000):
            matrix @ matrix
        torch.cuda.synchronize(device)
        found = dict(zip(fields, source.read(slow=True), strict=True))
        # Whichever of the GPUs this is, and whatever else runs: the busiest one worked.
        busiest = max(value for name, value in found.items() if name.endswith(".tensor_active"))
        assert 0.05 < busiest <= 1.0
    finally:
        source.close()
