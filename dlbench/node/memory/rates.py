"""How fast activations can be moved, measured before training on the far tier that will be used, with blocks' sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from dlbench.node.memory.tiers.tier import Tier
from dlbench.specs.memory.chain import Chain, TransferRates

REPEATS = 3
LEAST_BYTES = 1 << 20
MOST_BYTES = 256 << 20
"""Largest transfer that is tried: the far tier must not be filled for a measurement."""
_PART_BYTES = 32 << 20
"""Of one transfer beside computation, at most: several are under way."""
_BESIDE_S = 0.25
"""Computation beside transfers lasts at most about so long."""


def sizes_of(chain: Chain) -> tuple[int, int]:
    """A small and a large transfer as a plan may ask for: of the chain's median and of its largest unit, bytes."""
    sizes = sorted(max(1, unit.saved_bytes, unit.input_bytes) for unit in chain.units)
    large = min(MOST_BYTES, max(LEAST_BYTES, sizes[-1]))
    small = min(large // 4, max(LEAST_BYTES // 4, sizes[len(sizes) // 2]))
    return small, large


def measure_rates(
    tier: Tier, device: torch.device, chain: Chain, compute: Callable[[], object], beat: Callable[[str], None]
) -> TransferRates:
    """Rates of a tier, both ways.

    A transfer takes a fixed time and one for each byte: both come from two sizes. How much transfers slow computing
    down comes from `compute` with and without transfers beside it.

    Args:
        tier: nothing else uses it meanwhile.
        device: between which and the tier bytes move.
        chain: says which sizes will be moved.
        compute: something that training computes, e.g. a forward pass.
        beat: told what is measured.

    Raises:
        RunError: the tier cannot be used.
    """
    beat("the measurement of transfers")
    small, large = sizes_of(chain)
    trials = _Trials(tier, device)
    trials.both_ways(large)  # the first transfer sets things up
    few = [trials.both_ways(small) for _ in range(REPEATS)]
    many = [trials.both_ways(large) for _ in range(REPEATS)]
    (small_out, small_in), (large_out, large_in) = _medians(few), _medians(many)
    out_rate, out_latency = _line((small, small_out), (large, large_out))
    in_rate, in_latency = _line((small, small_in), (large, large_in))
    beat("the measurement of transfers beside computation")
    return TransferRates(
        tier=tier.words,
        out_bytes_per_s=out_rate,
        in_bytes_per_s=in_rate,
        latency_s=(out_latency + in_latency) / 2,
        drag=trials.drag(large, large_out + large_in, compute),
    )


class _Trials:
    """Transfers of a storage of the device's, timed on the host with the device idle before and after."""

    def __init__(self, tier: Tier, device: torch.device) -> None:
        self._tier, self._device = tier, device

    def both_ways(self, num_bytes: int) -> tuple[float, float]:
        """Seconds out and in of one storage."""
        storage = self._storage(num_bytes)
        begin = self._now()
        ticket = self._tier.swap_out(storage, 0)
        del storage
        self._tier.wait_out(ticket)
        middle = self._now()
        self._tier.swap_in(ticket, 0)
        back = self._tier.take(ticket)
        end = self._now()
        self._tier.discard(ticket)
        del back
        return middle - begin, end - middle

    def drag(self, num_bytes: int, pair_s: float, compute: Callable[[], object]) -> float:
        """Seconds by which a second of transfers beside it lengthens computing."""
        once = self._timed(compute)
        times = max(1, min(1000, round(_BESIDE_S / max(once, 1e-6))))
        # Enough to last, but no more memory than two of the largest units take, which training holds as well.
        most = min(MOST_BYTES, 2 * num_bytes)
        num_bytes, pair_s = min(num_bytes, _PART_BYTES), pair_s * min(1.0, _PART_BYTES / num_bytes)
        pairs = max(1, min(most // num_bytes, round(once * times / max(pair_s, 1e-6))))
        return statistics.median(self._one_drag(num_bytes, pairs, compute, times) for _ in range(REPEATS))

    def _one_drag(self, num_bytes: int, pairs: int, compute: Callable[[], object], times: int) -> float:
        begin = self._now()
        for _ in range(times):
            compute()
        alone = self._now_of_compute() - begin
        self._tier.watch(True)
        begin, begin_ns, tickets = self._now(), time.monotonic_ns(), []
        for _ in range(pairs):
            ticket = self._tier.swap_out(self._storage(num_bytes), 0)
            self._tier.swap_in(ticket, 0)
            tickets.append(ticket)
        for _ in range(times):
            compute()
        beside = self._now_of_compute() - begin
        end_ns = time.monotonic_ns()
        for ticket in tickets:
            self._tier.take(ticket)
            self._tier.discard(ticket)
        self._now()
        self._tier.watch(False)
        moving = [(one.start_ns, min(one.end_ns, end_ns)) for one in self._tier.take_transfers()]
        beside_s = _covered(moving, begin_ns) / 1e9
        return max(0.0, (beside - alone) / beside_s) if beside_s > 0 else 0.0

    def _storage(self, num_bytes: int) -> torch.UntypedStorage:
        # Written to, so that a CPU really gives the memory.
        return torch.full((num_bytes,), 1, dtype=torch.uint8, device=self._device).untyped_storage()

    def _timed(self, compute: Callable[[], object]) -> float:
        begin = self._now()
        compute()
        return self._now_of_compute() - begin

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _now_of_compute(self) -> float:
        """When what was computed is done, whatever the transfers' streams still do."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(out for out, _ in pairs), statistics.median(back for _, back in pairs)


def _line(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Bytes per second and fixed seconds of a straight line through two points (bytes, seconds)."""
    (few, few_s), (many, many_s) = small, large
    if many_s > few_s:
        rate = (many - few) / (many_s - few_s)
        latency = few_s - few / rate
        if latency >= 0:
            return rate, latency
    return many / max(many_s, 1e-9), 0.0


def _covered(intervals: Sequence[tuple[int, int]], begin: int) -> int:
    """Length of the union of intervals from `begin` on."""
    total, reach = 0, begin
    for first, last in sorted(intervals):
        total += max(0, last - max(first, reach))
        reach = max(reach, last)
    return total
