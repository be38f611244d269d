"""From a network to a plan for its activations: found, measured on all ranks at once, and planned alike on each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.costs.memory.blocks import block_starts
from dlbench.costs.memory.planner import fixed_plan, plan_blocks
from dlbench.costs.memory.smallest import DoesNotFitError
from dlbench.costs.memory.tradeoff import in_core_bytes, scaled
from dlbench.datasets.staging.place import tier_path
from dlbench.errors import EnvironmentLacksError
from dlbench.node.memory.cut import Cut, find_units
from dlbench.node.memory.profile import ChainProfile, undisturbed, update_growth
from dlbench.node.memory.rates import measure_rates, sizes_of
from dlbench.node.memory.tiers.disk import DiskTier
from dlbench.node.memory.tiers.tier import Tier
from dlbench.specs.base import Spec
from dlbench.specs.memory.chain import Chain, TransferRates, Unit
from dlbench.specs.memory.plan import BlockPlan
from dlbench.specs.system import StorageSpec, TierSpec
from dlbench.specs.training import OptimizerSpec, TrainSpec

Batch = dict[str, Tensor]
Gather = Callable[[Any], list[Any]]
"""What JSON can hold, of every rank, by rank; on every rank."""


def alone(value: Any) -> list[Any]:
    """A `Gather` of one rank."""
    return [value]


_CUT_BATCH = 2
"""Samples of the passes in which units are found."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What was found, measured and planned; the same on every rank but for the time that it took."""

    cut: Cut
    chain: Chain
    rates: TransferRates | None
    plan: BlockPlan
    in_core_bytes: int
    profile_s: float
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """What a network's memory is measured with.

    Args:
        model: in training mode, on its device.
        train: how it will be trained.
        device: where.
        loss_of: a forward pass over a batch in the precision of training, and its loss.
        batch_of: so many samples of the shapes that training will have, on the device.
        open_tier: the far tier with room for so many bytes.
        beat: told what moves.
        gather: of all ranks; alone by default.
    """

    model: nn.Module
    train: TrainSpec
    device: torch.device
    loss_of: Callable[[Batch], Tensor]
    batch_of: Callable[[int], Batch]
    open_tier: Callable[[int], Tier]
    beat: Callable[[str], None]
    gather: Gather = alone

    def measure(self) -> tuple[Cut, Chain, TransferRates | None, list[str]]:
        """Units, chain and transfer rates, and what a person should know of them.

        Raises:
            UserError: the network is no chain.
            EnvironmentLacksError: memory cannot be measured, or nothing can be swapped to.
        """
        self.beat("the network's units")
        small = self.batch_of(min(_CUT_BATCH, self.train.batch_per_rank))
        cut = find_units(self.model, lambda: self.loss_of(small))
        self.gather(None)  # all ranks measure at the same time, as they will train
        own, warnings = self._chain(cut)
        chain = slowest_chain([Chain.model_validate(each) for each in self.gather(own.model_dump(mode="json"))])
        rates = None
        if self.train.swap != "none":
            found = self._rates(chain)
            rates = slowest_rates([TransferRates.model_validate(each) for each in self.gather(found)])
        return cut, chain, rates, warnings

    def _chain(self, cut: Cut) -> tuple[Chain, list[str]]:
        wanted = self.train.batch_per_rank // self.train.gradient_accumulation
        profile = ChainProfile(
            model=self.model,
            units=cut.units,
            device=self.device,
            parts=self.train.gradient_accumulation,
            beat=self.beat,
        )
        samples, update, told = wanted, 0, list[str]()
        # The host updates group by group, beside the next forward pass.
        if self.train.optimizer_state != "host":
            self.beat("the optimizer's update")
            try:
                update = update_growth(self.model, self.train.optimizer, self.device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                told.append(
                    "what the optimizer's update works with was not measured, as no copy of the parameters fits beside "
                    "them: the plan leaves no room for it"
                )
        # Gradients to which several passes add outlast each of them.
        state = state_bytes(self.model, self.train, gradients=self.train.gradient_accumulation > 1)
        while True:
            try:
                batch = self.batch_of(samples)
                chain = profile.measure(self.loss_of, batch, state_bytes=state, update_bytes=update)
                break
            except torch.OutOfMemoryError:
                if samples == 1:
                    raise EnvironmentLacksError(
                        "a pass over one sample does not fit on the device, even unit by unit"
                    ) from None
                samples //= 2
                torch.cuda.empty_cache()
        if samples == wanted:
            return chain, told
        told.append(
            f"the network was measured with {samples} samples, as {wanted} do not fit, and its figures were scaled"
        )
        return scaled(chain, wanted), told

    def _rates(self, chain: Chain) -> dict[str, Any]:
        batch = self.batch_of(chain.batch)

        def compute() -> None:
            with torch.no_grad():
                self.loss_of(batch)

        tier = self.open_tier(2 * max(sizes_of(chain)))
        try:
            with undisturbed(self.model, self.device):
                rates = measure_rates(tier, self.device, chain, compute, self.beat)
        finally:
            tier.close()
        return rates.model_dump(mode="json")


def planned(chain: Chain, rates: TransferRates | None, train: TrainSpec) -> tuple[BlockPlan, int]:
    """The plan of a chain by `train.recompute` and `train.swap`, and what training would hold in core, bytes.

    Raises:
        UserError: train.memory.blocks names what is no unit.
        EnvironmentLacksError: no plan fits train.memory.capacity; names the smallest that would do.
    """
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
    train: TrainSpec, storage: StorageSpec, device: torch.device, *, host: str, rank: int, variables: Mapping[str, str]
) -> Callable[[int], Tier]:
    """Opens the far tier of a rank, with room for so many bytes.

    Args:
        train: names the folder of the swap file.
        storage: or the system's, where it does not.
        device: of the rank.
        host: of the rank.
        rank: for messages.
        variables: of the rank's environment.
    """

    def on_cpu(reserve_bytes: int) -> Tier:
        own = train.memory.swap_folder
        if own is None:
            folder = tier_path(storage.local, "local", variables, host)
        else:
            folder = tier_path(TierSpec(path=own), "local", variables, host, where="train.memory.swap_folder")
        return DiskTier(folder, reserve_bytes, rank)

    def on_gpu(reserve_bytes: int) -> Tier:
        from dlbench.node.memory.tiers.cuda import PinnedTier

        return PinnedTier(device, reserve_bytes, rank)

    return on_gpu if device.type == "cuda" else on_cpu


def state_bytes(model: nn.Module, train: TrainSpec, *, gradients: bool) -> int:
    """Parameters, buffers and optimizer state on the device; and gradients, where asked for."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    # On a CPU the host's memory is the device's, wherever the state is said to lie.
    on_host = train.optimizer_state == "host" and any(p.device.type != "cpu" for p in model.parameters())
    copies = 0 if on_host else optimizer_copies(train.optimizer)
    return parameters + buffers + trained * (copies + gradients)


def optimizer_copies(spec: OptimizerSpec) -> int:
    """How many numbers an optimizer keeps for each trained one: two moments, momentum one, SGD without it none."""
    if spec.name in ("adamw", "lamb"):
        return 2
    return 1 if spec.name == "lars" or spec.momentum > 0 else 0


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
    """Measures and plans; the same plan on every rank.

    Raises:
        UserError: the network is no chain, or train.memory.blocks names what is no unit.
        EnvironmentLacksError: memory cannot be measured, nothing can be swapped to, or no plan fits.
    """
    begin = time.monotonic()
    cut, chain, rates, warnings = bench.measure()
    bench.beat("the plan for memory")
    found, in_core = planned(chain, rates, bench.train)
    return MemoryPlan(
        cut=cut,
        chain=chain,
        rates=rates,
        plan=found,
        in_core_bytes=in_core,
        profile_s=time.monotonic() - begin,
        warnings=tuple(warnings),
    )
