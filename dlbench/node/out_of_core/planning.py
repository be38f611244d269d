"""From a network to a plan for its activations: found, measured on all ranks at once, and planned alike on each.

Rates are measured before training on the far tier that will be used, with blocks' sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.datasets.staging.place import tier_path
from dlbench.errors import EnvironmentLacksError
from dlbench.node.models.build import Batch
from dlbench.node.out_of_core.cut import UnitModule, find_units, undisturbed
from dlbench.node.out_of_core.disk_tier import DiskTier
from dlbench.node.out_of_core.profile import ChainProfile, update_growth
from dlbench.node.out_of_core.tiers import ALIGNMENT, Calls, PinnedTier, Tier, aligned
from dlbench.perfmodels.out_of_core.blocks import block_starts
from dlbench.perfmodels.out_of_core.planner import fixed_plan, in_core_bytes, plan_blocks, scaled
from dlbench.perfmodels.out_of_core.search import DoesNotFitError
from dlbench.specs.base import Spec
from dlbench.specs.out_of_core import BlockPlan, Chain, TransferRates, Unit
from dlbench.specs.plan import RunPlan
from dlbench.specs.system import StorageSpec, TierSpec
from dlbench.specs.training import TrainSpec

REPEATS = 3
IN_A_ROW = 8  # of small transfers
LEAST_BYTES = 1 << 20
MOST_BYTES = 256 << 20  # largest transfer that is tried: the far tier must not be filled for a measurement
_PART_BYTES = 32 << 20  # of one transfer alongside computation, at most: several are under way
_ALONGSIDE_S = 0.25  # computation alongside transfers lasts at most about so long

Gather = Callable[[Any], list[Any]]  # what JSON can hold, of every rank, by rank; on every rank

_CUT_BATCH = 2  # samples of the passes in which units are found


def sizes_of(chain: Chain) -> tuple[int, int]:
    """A small and a large transfer as a plan may ask for: of storages of the chain's median and largest unit, bytes."""
    sizes = sorted(max(1, unit.saved_bytes // (unit.saved_count or 1), unit.input_bytes) for unit in chain.units)
    large = min(MOST_BYTES, max(LEAST_BYTES, sizes[-1]))
    small = min(large // 4, max(LEAST_BYTES // 4, sizes[len(sizes) // 2]))
    return small, large


def trial_bytes(chain: Chain) -> int:
    """What `measure_rates` has in a tier at most, bytes: transfers of each size, and those alongside computation."""
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
    """Measures a tier, both ways: two sizes show what a transfer takes by itself and for each byte.

    How much transfers slow computing down comes from `compute` with and without transfers alongside it. `tier`: with
    room for `trial_bytes`; nothing else uses it meanwhile. `calls`: torch's CUDA interface, where the device is a GPU.
    """
    beat("the measurement of transfers")
    small, large = sizes_of(chain)
    trials = TransferTrials(tier, device, calls or (Calls() if device.type == "cuda" else None))
    trials.both_ways(large, 1)  # the first transfer sets things up
    few, many = [], []
    for _ in range(REPEATS):  # in turns
        few.append(trials.both_ways(small, IN_A_ROW))
        many.append(trials.both_ways(large, 1))
    small_out, small_in = map(statistics.median, zip(*few, strict=True))
    large_out, large_in = map(statistics.median, zip(*many, strict=True))
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
    """Transfers of a storage of the device's, timed on the host with the device idle before and after."""

    def __init__(self, tier: Tier, device: torch.device, calls: Calls | None) -> None:
        self._tier, self._device, self._calls = tier, device, calls

    def both_ways(self, num_bytes: int, times: int) -> tuple[float, float]:
        """Seconds of a transfer out and in, means of so many in a row: a pass waits for the slow ones, too.

        A storage is filled before each, as training computes before each: threads that only wait for each other wake up
        sooner.
        """
        out_s, in_s, away = 0.0, 0.0, []
        for _ in range(times):
            storage = self._storage(num_bytes)
            begin = self._now()
            away.append(self._tier.swap_out(storage, 0))
            del storage
            self._tier.wait_out(away[-1])
            out_s += self._now() - begin
        while away:
            ticket = away.pop()
            self._storage(num_bytes)
            begin = self._now()
            self._tier.swap_in(ticket, 0)
            self._tier.take(ticket)
            in_s += self._now() - begin
            self._tier.discard(ticket)
        return out_s / times, in_s / times

    def drag(self, num_bytes: int, pair_s: float, compute: Callable[[], object]) -> float:
        """Seconds by which a second of transfers alongside it lengthens computing."""
        begin = self._now()
        compute()
        once = self._now_of_compute() - begin
        lasts = max(once, _ALONGSIDE_S)
        # Enough to last, but no more memory than two of the largest units take, which training holds as well.
        most = min(MOST_BYTES, 2 * num_bytes)
        part = min(num_bytes, _PART_BYTES) // ALIGNMENT * ALIGNMENT
        pair_s *= part / num_bytes
        pairs = max(1, min(most // part, round(lasts / max(pair_s, 1e-6))))
        # As long as the transfers, where these cannot last: what computing scatters by would hide what they do to it.
        times = max(1, min(1000, round(min(lasts, pairs * pair_s) / max(once, 1e-6))))
        return statistics.median(self._one_drag(part, pairs, compute, times) for _ in range(REPEATS))

    def _one_drag(self, num_bytes: int, pairs: int, compute: Callable[[], object], times: int) -> float:
        storage = self._storage(num_bytes)
        # What comes back has left before, and what leaves does not come back: else computing would wait for copies.
        away = [self._tier.swap_out(storage, 0) for _ in range(pairs)]
        for ticket in away:
            self._tier.wait_out(ticket)
        begin = self._now()
        for _ in range(times):
            compute()
        alone = self._now_of_compute() - begin
        self._tier.watch(True)
        begin, begin_ns, leaving = self._now(), time.monotonic_ns(), []
        for ticket in away:
            leaving.append(self._tier.swap_out(storage, 0))
            self._tier.swap_in(ticket, 0)
        for _ in range(times):
            compute()
        together = self._now_of_compute() - begin
        end_ns = time.monotonic_ns()
        for ticket in away:
            self._tier.take(ticket)
        for ticket in (*leaving, *away):
            self._tier.wait_out(ticket)
            self._tier.discard(ticket)
        self._now()
        self._tier.watch(False)
        moving = [(one.start_ns, min(one.end_ns, end_ns)) for one in self._tier.take_transfers()]
        moving_ns, reach_ns = 0, begin_ns  # of the union of these times
        for start_ns, stop_ns in sorted(moving):
            moving_ns += max(0, stop_ns - max(start_ns, reach_ns))
            reach_ns = max(reach_ns, stop_ns)
        return max(0.0, (together - alone) / (moving_ns / 1e9)) if moving_ns > 0 else 0.0

    def _storage(self, num_bytes: int) -> torch.UntypedStorage:
        # Written to, so that a CPU really gives the memory.
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
    """Bytes per second and fixed seconds of a straight line through two points (bytes, seconds)."""
    (few, few_s), (many, many_s) = small, large
    if many_s > few_s:
        rate = (many - few) / (many_s - few_s)
        latency = few_s - few / rate
        if latency >= 0:
            return rate, latency
    return many / max(many_s, 1e-9), 0.0


def alone(value: Any) -> list[Any]:
    """A `Gather` of one rank."""
    return [value]


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What was found, measured and planned; the same on every rank but for the time that it took."""

    units: tuple[UnitModule, ...]
    chain: Chain
    rates: TransferRates | None
    plan: BlockPlan
    in_core_bytes: int
    profile_s: float
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """What a network's memory is measured with.

    `loss_of`: a forward pass over a batch in the precision of training, and its loss. `open_tier`: the far tier with
    room for a number of bytes. `exchange_bytes`, `gradients_stay`: as `exchange_memory` has them of a plan.
    """

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
        """Returns units, chain and transfer rates, and what a person should know of them."""
        self.beat("the network's units")
        small = self.batch_of(min(_CUT_BATCH, self.train.batch_per_rank))
        units = find_units(self.model, lambda: self.loss_of(small))
        self.gather(None)  # all ranks measure at the same time, as they will train
        own, warnings = self._chain(units)
        chain = slowest_chain([Chain.model_validate(each) for each in self.gather(own.model_dump(mode="json"))])
        rates = None
        if self.train.swap != "none":
            found = self._rates(chain)
            rates = slowest_rates([TransferRates.model_validate(each) for each in self.gather(found)])
        return units, chain, rates, warnings

    def _chain(self, units: tuple[UnitModule, ...]) -> tuple[Chain, list[str]]:
        wanted = self.train.batch_per_rank // self.train.gradient_accumulation
        # Gradients to which several passes add outlast each of them.
        keeps = self.train.gradient_accumulation > 1 or self.gradients_stay
        profile = ChainProfile(model=self.model, units=units, device=self.device, keeps_gradients=keeps, beat=self.beat)
        samples, update, warnings = wanted, 0, list[str]()
        # The host updates group by group, alongside the next forward pass.
        if self.train.optimizer_state != "host":
            self.beat("the optimizer's update")
            try:
                update = update_growth(self.model, self.train.optimizer, self.device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                warnings.append(
                    "what the optimizer's update works with was not measured, as no copy of the parameters fits next "
                    "to them: the plan leaves no room for it"
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
        if samples == wanted:
            return chain, warnings
        warnings.append(
            f"the network was measured with {samples} samples, as {wanted} do not fit, and its figures were scaled"
        )
        return scaled(chain, wanted), warnings

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
    beat: Callable[[str], None] = lambda _what: None,
) -> Callable[[int], Tier]:
    """Returns what opens the far tier of a rank, in `train`'s folder or the system's, for a number of bytes."""

    def opened(reserve_bytes: int) -> Tier:
        if device.type == "cuda":
            return PinnedTier(device, reserve_bytes, rank, beat=beat)
        own = train.memory.swap_folder
        if own is None:
            folder = tier_path(storage.local, "local", variables, host)
        else:
            folder = tier_path(TierSpec(path=own), "local", variables, host, where="train.memory.swap_folder")
        return DiskTier(folder, reserve_bytes, rank)

    return opened


def state_bytes(model: nn.Module, train: TrainSpec, *, gradients: bool) -> int:
    """Parameters, buffers and optimizer state on the device; and gradients, where asked for."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    # On a CPU the host's memory is the device's, wherever the state is said to lie.
    on_host = train.optimizer_state == "host" and any(p.device.type != "cpu" for p in model.parameters())
    copies = 0 if on_host else train.optimizer.slots
    return parameters + buffers + trained * (copies + gradients)


def checkpoint_bytes(plan: RunPlan, rank: int, model: nn.Module) -> int:
    """Returns the host's memory that a rank keeps for checkpoints, tied tensors each; 0 where it writes none."""
    if rank != 0 or not plan.checkpoint.is_on:
        return 0
    spec = plan.workload.train.at_batch(plan.global_batch).optimizer
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    present: int = sum(tensor.nbytes for tensor in model.state_dict().values())
    return present + trained * spec.slots


def slowest_chain(chains: Sequence[Chain]) -> Chain:
    """Of each figure the largest of all ranks, unit by unit: what all of them can keep to."""
    first = chains[0]
    units = tuple(
        Unit(name=alike[0].name, joins=all(unit.joins for unit in alike), **_largest(alike, {"name", "joins"}))
        for alike in zip(*(chain.units for chain in chains), strict=True)
    )
    return Chain(units=units, batch=first.batch, **_largest(chains, {"units", "batch"}))


def _largest(alike: Sequence[Spec], but: set[str]) -> dict[str, Any]:
    """Of every field but some the largest; of flags whether any is set."""
    return {name: max(getattr(one, name) for one in alike) for name in type(alike[0]).model_fields if name not in but}


def slowest_rates(rates: Sequence[TransferRates]) -> TransferRates:
    """Of each figure the worst of all ranks."""
    return TransferRates(
        tier=rates[0].tier,
        out_bytes_per_s=min(each.out_bytes_per_s for each in rates),
        in_bytes_per_s=min(each.in_bytes_per_s for each in rates),
        latency_s=max(each.latency_s for each in rates),
        drag=max(each.drag for each in rates),
    )


def plan_memory(bench: Workbench) -> MemoryPlan:
    """Measures and plans; the same plan on every rank."""
    begin = time.monotonic()
    units, chain, rates, warnings = bench.measure()
    bench.beat("the plan for memory")
    found, in_core = planned(chain, rates, bench.train)
    return MemoryPlan(
        units=units,
        chain=chain,
        rates=rates,
        plan=found,
        in_core_bytes=in_core,
        profile_s=time.monotonic() - begin,
        warnings=tuple(warnings),
    )
