"""Plans a network's memory: measures its units and transfer rates on all ranks at once; each makes the same plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.datasets.staging.copying import tier_path
from dlbench.errors import EnvironmentLacksError
from dlbench.node.models.build import Batch
from dlbench.node.out_of_core.cut import UnitModule, find_units, undisturbed
from dlbench.node.out_of_core.disk_tier import DiskTier
from dlbench.node.out_of_core.profile import ChainProfile, update_growth
from dlbench.node.out_of_core.tiers import ALIGNMENT, Calls, PinnedTier, Tier, aligned
from dlbench.node.sync.timing import covered
from dlbench.perfmodels.out_of_core.blocks import block_starts
from dlbench.perfmodels.out_of_core.planner import fixed_plan, in_core_bytes, plan_blocks, scaled
from dlbench.perfmodels.out_of_core.search import DoesNotFitError
from dlbench.specs.base import Spec
from dlbench.specs.out_of_core import BlockPlan, Chain, TransferRates, Unit
from dlbench.specs.plan import RunPlan
from dlbench.specs.system import StorageSpec, TierSpec
from dlbench.specs.training import TrainSpec

REPEATS = 3
IN_A_ROW = 8  # Number of consecutive small transfers.
LEAST_BYTES = 1 << 20
MOST_BYTES = 256 << 20  # Largest transfer that is timed: a measurement must not fill the far tier.
_PART_BYTES = 32 << 20  # Largest transfer alongside computation, so that several are in flight.
_ALONGSIDE_S = 0.25  # Approximate limit of the time of computation alongside transfers.

Gather = Callable[[Any], list[Any]]  # Returns the JSON-serialisable value of every rank, by rank, on every rank.

_CUT_BATCH = 2  # Samples of the passes that find the units.


def sizes_of(chain: Chain) -> tuple[int, int]:
    """Returns a small and a large transfer of a plan, in bytes: storages of the chain's median and largest unit."""
    sizes = sorted(max(1, unit.saved_bytes // (unit.saved_count or 1), unit.input_bytes) for unit in chain.units)
    large = min(MOST_BYTES, max(LEAST_BYTES, sizes[-1]))
    small = min(large // 4, max(LEAST_BYTES // 4, sizes[len(sizes) // 2]))
    return small, large


def trial_bytes(chain: Chain) -> int:
    """Returns the most bytes that `measure_rates` has in a tier, for all sizes and alongside computing."""
    small, large = sizes_of(chain)
    return IN_A_ROW * aligned(small) + aligned(large) + 2 * min(MOST_BYTES, 2 * large)


def measure_rates(
    tier: Tier,
    device: torch.device,
    chain: Chain,
    compute: Callable[[], object],
    beat: Callable[[str], None],
    calls: Calls | None = None,
) -> TransferRates:
    """Measures transfers out and in by two sizes, and how they slow `compute`; needs `trial_bytes` free in the tier."""
    beat("the measurement of transfers")
    small, large = sizes_of(chain)
    if calls is None and device.type == "cuda":
        calls = Calls()
    trials = TransferTrials(tier, device, calls)
    trials.both_ways(large, 1)  # warm-up
    small_times, large_times = [], []
    for _ in range(REPEATS):  # alternating
        small_times.append(trials.both_ways(small, IN_A_ROW))
        large_times.append(trials.both_ways(large, 1))
    small_out, small_in = map(statistics.median, zip(*small_times, strict=True))
    large_out, large_in = map(statistics.median, zip(*large_times, strict=True))
    out_rate, out_latency = _line((small, small_out), (large, large_out))
    in_rate, in_latency = _line((small, small_in), (large, large_in))
    beat("the measurement of transfers alongside computation")
    return TransferRates(
        tier=tier.words,
        out_bytes_per_s=out_rate,
        in_bytes_per_s=in_rate,
        latency_s=(out_latency + in_latency) / 2,
        drag=trials.drag(large, large_out + large_in, compute),
    )


class TransferTrials:
    """Times transfers of a storage of the device, on the host, with the device idle before and after."""

    def __init__(self, tier: Tier, device: torch.device, calls: Calls | None) -> None:
        self._tier, self._device, self._calls = tier, device, calls

    def both_ways(self, num_bytes: int, times: int) -> tuple[float, float]:
        """Returns the mean seconds of a transfer out and in, of `times` in a row: a pass waits for slow ones, too."""
        # A storage is filled before each: threads that only wait for each other would wake up sooner than in training.
        out_s, in_s, tickets = 0.0, 0.0, []
        for _ in range(times):
            storage = self._storage(num_bytes)
            begin = self._now()
            tickets.append(self._tier.swap_out(storage, 0))
            del storage
            self._tier.wait_out(tickets[-1])
            out_s += self._now() - begin
        while tickets:
            ticket = tickets.pop()
            self._storage(num_bytes)
            begin = self._now()
            self._tier.swap_in(ticket, 0)
            self._tier.take(ticket)
            in_s += self._now() - begin
            self._tier.discard(ticket)
        return out_s / times, in_s / times

    def drag(self, num_bytes: int, pair_s: float, compute: Callable[[], object]) -> float:
        """Returns the seconds by which a second of transfers alongside it lengthens computing."""
        begin = self._now()
        compute()
        compute_s = self._now_of_compute() - begin
        target_s = max(compute_s, _ALONGSIDE_S)
        # Enough transfers for this time, but no more memory than two of the largest units, which training holds, too.
        most_bytes = min(MOST_BYTES, 2 * num_bytes)
        part_bytes = min(num_bytes, _PART_BYTES) // ALIGNMENT * ALIGNMENT
        pair_s *= part_bytes / num_bytes
        pairs = max(1, min(most_bytes // part_bytes, round(target_s / max(pair_s, 1e-6))))
        # Computation no longer than the transfers: otherwise its scatter would hide their effect.
        times = max(1, min(1000, round(min(target_s, pairs * pair_s) / max(compute_s, 1e-6))))
        return statistics.median(self._one_drag(part_bytes, pairs, compute, times) for _ in range(REPEATS))

    def _one_drag(self, num_bytes: int, pairs: int, compute: Callable[[], object], times: int) -> float:
        storage = self._storage(num_bytes)
        # Bytes that come in were sent out before, and bytes that go out stay out: computing does not wait for copies.
        incoming = [self._tier.swap_out(storage, 0) for _ in range(pairs)]
        for ticket in incoming:
            self._tier.wait_out(ticket)
        begin = self._now()
        for _ in range(times):
            compute()
        alone_s = self._now_of_compute() - begin
        self._tier.watch(True)
        begin, begin_ns, outgoing = self._now(), time.monotonic_ns(), []
        for ticket in incoming:
            outgoing.append(self._tier.swap_out(storage, 0))
            self._tier.swap_in(ticket, 0)
        for _ in range(times):
            compute()
        together_s = self._now_of_compute() - begin
        end_ns = time.monotonic_ns()
        for ticket in incoming:
            self._tier.take(ticket)
        for ticket in (*outgoing, *incoming):
            self._tier.wait_out(ticket)
            self._tier.discard(ticket)
        self._now()
        self._tier.watch(False)
        intervals = [(transfer.start_ns, transfer.end_ns) for transfer in self._tier.take_transfers()]
        transfer_ns = covered(intervals, begin=begin_ns, end=end_ns)
        if transfer_ns <= 0:
            return 0.0
        return max(0.0, (together_s - alone_s) / (transfer_ns / 1e9))

    def _storage(self, num_bytes: int) -> torch.UntypedStorage:
        # Filled, so that a CPU really allocates the memory.
        return torch.full((num_bytes,), 1, dtype=torch.uint8, device=self._device).untyped_storage()

    def _now(self) -> float:
        if self._calls is not None:
            self._calls.synchronize(self._device)
        return time.perf_counter()

    def _now_of_compute(self) -> float:
        if self._calls is not None:
            self._calls.current_stream(self._device).synchronize()
        return time.perf_counter()


def _line(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Returns bytes per second and fixed seconds of a straight line through two points (bytes, seconds)."""
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    if large_s > small_s:
        rate = (large_bytes - small_bytes) / (large_s - small_s)
        latency = small_s - small_bytes / rate
        if latency >= 0:
            return rate, latency
    return large_bytes / max(large_s, 1e-9), 0.0


def alone(value: Any) -> list[Any]:
    """Gathers the value of a single rank."""
    return [value]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The units of a network, their measured costs and the plan; only `profile_s` differs between ranks."""

    units: tuple[UnitModule, ...]
    chain: Chain
    rates: TransferRates | None
    plan: BlockPlan
    in_core_bytes: int
    profile_s: float
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """Measures a network's memory by passes whose loss `loss_of` returns in the precision of training."""

    model: nn.Module
    train: TrainSpec
    device: torch.device
    loss_of: Callable[[Batch], Tensor]
    batch_of: Callable[[int], Batch]
    open_tier: Callable[[int], Tier]
    beat: Callable[[str], None]
    gather: Gather = alone
    exchange_bytes: int = 0
    gradients_stay: bool = False

    def measure(self) -> tuple[tuple[UnitModule, ...], Chain, TransferRates | None, list[str]]:
        self.beat("the network's units")
        small_batch = self.batch_of(min(_CUT_BATCH, self.train.batch_per_rank))
        units = find_units(self.model, partial(self.loss_of, small_batch))
        self.gather(None)  # all ranks measure at the same time, as they will train
        local_chain, warnings = self._chain(units)
        chains = self.gather(local_chain.model_dump(mode="json"))
        chain = slowest_chain([Chain.model_validate(rank_chain) for rank_chain in chains])
        rates = None
        if self.train.swap != "none":
            rates_by_rank = self.gather(self._rates(chain))
            rates = slowest_rates([TransferRates.model_validate(rank_rates) for rank_rates in rates_by_rank])
        return units, chain, rates, warnings

    def _chain(self, units: tuple[UnitModule, ...]) -> tuple[Chain, list[str]]:
        batch_size = self.train.batch_per_rank // self.train.gradient_accumulation
        # Gradients to which several passes add stay between them.
        keeps = self.train.gradient_accumulation > 1 or self.gradients_stay
        profile = ChainProfile(model=self.model, units=units, device=self.device, keeps_gradients=keeps, beat=self.beat)
        samples, update, warnings = batch_size, 0, list[str]()
        # The host updates group by group, alongside the next forward pass.
        if self.train.optimizer_state != "host":
            self.beat("the optimizer's update")
            try:
                update = update_growth(self.model, self.train.optimizer, self.device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                warnings.append(
                    "the temporary memory of the optimizer's update was not measured, because a second copy of the "
                    "parameters does not fit: the plan reserves none"
                )
        state = state_bytes(self.model, self.train, gradients=keeps)
        while True:
            try:
                batch = self.batch_of(samples)
                chain = profile.measure(self.loss_of, batch, state_bytes=state, update_bytes=update)
                chain = chain.model_copy(update={"exchange_bytes": self.exchange_bytes})
                break
            except torch.OutOfMemoryError:
                if samples == 1:
                    raise EnvironmentLacksError(
                        "a pass over one sample does not fit on the device, even unit by unit"
                    ) from None
                samples //= 2
                torch.cuda.empty_cache()
        if samples == batch_size:
            return chain, warnings
        warnings.append(
            f"the network was measured with {samples} samples, as {batch_size} do not fit, and its figures were scaled"
        )
        return scaled(chain, batch_size), warnings

    def _rates(self, chain: Chain) -> dict[str, Any]:
        batch = self.batch_of(chain.batch)

        def compute() -> None:
            with torch.no_grad():
                self.loss_of(batch)

        tier = self.open_tier(trial_bytes(chain))
        try:
            with undisturbed(self.model):
                rates = measure_rates(tier, self.device, chain, compute, self.beat)
        finally:
            tier.close()
        return rates.model_dump(mode="json")


def planned(chain: Chain, rates: TransferRates | None, train: TrainSpec) -> tuple[BlockPlan, int]:
    """Returns the plan of a chain by `train.recompute` and `train.swap`, and the bytes of training in core."""
    in_core = in_core_bytes(chain)
    starts = block_starts(train.memory.blocks, [unit.name for unit in chain.units])
    if not train.is_planned:
        return fixed_plan(chain, rates, train.recompute, train.swap, starts=starts), in_core
    capacity = train.memory.capacity_bytes(in_core)
    assert capacity is not None  # the plan's validator holds this
    recompute, swap = train.recompute == "planned", train.swap == "planned"
    try:
        return plan_blocks(chain, rates, capacity, recompute=recompute, swap=swap, starts=starts), in_core
    except DoesNotFitError as error:
        raise EnvironmentLacksError(f"train.memory.capacity {train.memory.capacity}: {error}") from None


def far_tier(
    train: TrainSpec,
    storage: StorageSpec,
    device: torch.device,
    *,
    host: str,
    rank: int,
    variables: Mapping[str, str],
    beat: Callable[[str], None] = lambda _progress: None,
) -> Callable[[int], Tier]:
    """Returns a function that opens a rank's far tier for a number of bytes, in `train`'s or the system's folder."""

    def open_tier(reserve_bytes: int) -> Tier:
        if device.type == "cuda":
            return PinnedTier(device, reserve_bytes, rank, beat=beat)
        swap_folder = train.memory.swap_folder
        if swap_folder is None:
            folder = tier_path(storage.local, "local", variables, host)
        else:
            folder = tier_path(TierSpec(path=swap_folder), "local", variables, host, where="train.memory.swap_folder")
        return DiskTier(folder, reserve_bytes, rank)

    return open_tier


def state_bytes(model: nn.Module, train: TrainSpec, *, gradients: bool) -> int:
    """Returns bytes of parameters, buffers and optimizer state on the device, and of `gradients` if they stay."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    copies = train.optimizer.slots
    # On a CPU the host's memory is the device's, whatever `optimizer_state` is.
    if train.optimizer_state == "host" and any(p.device.type != "cpu" for p in model.parameters()):
        copies = 0
    if gradients:
        copies += 1
    return parameters + buffers + trained * copies


def checkpoint_bytes(plan: RunPlan, rank: int, model: nn.Module) -> int:
    """Returns the host memory of a rank for checkpoints, tied tensors counted separately; 0 if it writes none."""
    if rank != 0 or not plan.checkpoint.is_on:
        return 0
    spec = plan.workload.train.at_batch(plan.global_batch).optimizer
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    model_bytes: int = sum(tensor.nbytes for tensor in model.state_dict().values())
    return model_bytes + trained * spec.slots


def slowest_chain(chains: Sequence[Chain]) -> Chain:
    """Returns the largest of each figure over all ranks, unit by unit, so that a plan for it fits on every rank."""
    units = []
    for rank_units in zip(*(chain.units for chain in chains), strict=True):
        joins = all(unit.joins for unit in rank_units)
        units.append(Unit(name=rank_units[0].name, joins=joins, **_largest(rank_units, {"name", "joins"})))
    return Chain(units=tuple(units), batch=chains[0].batch, **_largest(chains, {"units", "batch"}))


def _largest(specs: Sequence[Spec], skipped: set[str]) -> dict[str, Any]:
    names = type(specs[0]).model_fields.keys() - skipped
    return {name: max(map(attrgetter(name), specs)) for name in names}


def slowest_rates(rates: Sequence[TransferRates]) -> TransferRates:
    """Returns the worst of each figure over all ranks."""
    return TransferRates(
        tier=rates[0].tier,
        out_bytes_per_s=min(rank_rates.out_bytes_per_s for rank_rates in rates),
        in_bytes_per_s=min(rank_rates.in_bytes_per_s for rank_rates in rates),
        latency_s=max(rank_rates.latency_s for rank_rates in rates),
        drag=max(rank_rates.drag for rank_rates in rates),
    )


def plan_memory(bench: Workbench) -> MemoryPlan:
    """Measures and plans; returns the same plan on every rank."""
    begin = time.monotonic()
    units, chain, rates, warnings = bench.measure()
    bench.beat("the plan for memory")
    plan, in_core = planned(chain, rates, bench.train)
    return MemoryPlan(
        units=units,
        chain=chain,
        rates=rates,
        plan=plan,
        in_core_bytes=in_core,
        profile_s=time.monotonic() - begin,
        warnings=tuple(warnings),
    )
