"""ZeRO-1 by torch's `ZeroRedundancyOptimizer`: the optimizer's state and its work are divided between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from dlbench.node.sync.engine import settings_of
from dlbench.node.sync.timing import Clock, IntervalSums
from dlbench.records.record import CollectiveWaits, Setting
from dlbench.units import format_bytes

_LISTED_RANKS = 8  # Largest number of ranks whose bytes of state are listed.


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))


class ShardedUpdate(ZeroRedundancyOptimizer):
    """The planned optimizer, divided between ranks; `state` is this rank's part."""

    _all_state_dicts: list[dict[str, Any]]  # torch's, by rank, on the rank to which they were consolidated.

    def __init__(self, planned: torch.optim.Optimizer, clock: Clock) -> None:
        strides_before = {parameter: parameter.stride() for parameter in _parameters_of(planned)}
        # Groups hold every setting, also the learning rate of the step: values written to `param_groups` reach this
        # rank's local optimizer at the beginning of its step, and LAMB's count of steps comes back at the end.
        groups = [dict(group) for group in planned.param_groups]
        super().__init__(groups, type(planned), parameters_as_bucket_view=True)
        for parameter, strides in strides_before.items():
            # Buckets are packed in the order of dimensions, which would undo channels-last weights.
            if parameter.stride() != strides:
                values = parameter.data.clone()
                parameter.data = parameter.data.as_strided(values.shape, strides).copy_(values)
        self.state = self.optim.state
        self._clock, self.times, self._updated = clock, IntervalSums(clock), None
        self.optim.register_step_post_hook(self._note_updated)
        self.register_step_post_hook(self._note_received)

    def _note_updated(self, *_: object) -> None:
        self._updated = self._clock.mark()

    def _note_received(self, *_: object) -> None:
        self.times.add(["optimizer"], [self._updated, self._clock.mark()])

    def waits(self) -> CollectiveWaits:
        """Returns how long this rank waited for parameters since `times.restart`; waits for the device."""
        self.times.settle()
        how = "from the end of this rank's own update to the end of ZeroRedundancyOptimizer's broadcasts, each step"
        return CollectiveWaits(exchange_s={"optimizer": self.times.seconds["optimizer"]}, evidence=how)

    def share(self) -> tuple[int, int, int]:
        """Returns the number of parameters that this rank updates and sends, their bytes, and its bytes of state."""
        parameters = _parameters_of(self.optim)
        values = itertools.chain.from_iterable(state.values() for state in self.state.values())
        state_bytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        return len(parameters), sum(p.numel() * p.element_size() for p in parameters), state_bytes

    def whole(self) -> tuple[dict[int, dict[str, torch.Tensor]], list[int | None]]:
        """Returns state by parameter number, on the CPU, and each group's `step`; complete on rank 0, called by all."""
        self.consolidate_state_dict(0)
        if self.rank != 0:
            return {}, []
        state_dict = super().state_dict()
        steps: list[int | None] = []
        for rank_groups in zip(*(rank_state["param_groups"] for rank_state in self._all_state_dicts), strict=True):
            counted_steps = [group["step"] for group in rank_groups if group.get("step") is not None]
            steps.append(max(counted_steps, default=None))
        self._all_state_dicts = []  # as large as all of the state
        return state_dict["state"], steps

    def local_values(self, values: Mapping[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
        """Returns the values of the parameters that this rank updates."""
        local_parameters = set(_parameters_of(self.optim))
        return {
            number: values[number]
            for number, parameter in enumerate(_parameters_of(self))
            if parameter in local_parameters and number in values
        }

    def adopt(self) -> None:
        """Is called when this rank's local optimizer has loaded a state: takes over state and settings."""
        self.state = self.optim.state
        for public_group, local_group in zip(self.param_groups, self.optim.param_groups, strict=True):
            public_group.update({key: value for key, value in local_group.items() if key != "params"})


def sharding_setting(state_bytes: Sequence[int]) -> Setting:
    """Returns whether the optimizer's state is divided, by the bytes of each rank; empty: nothing was divided."""
    total, largest = sum(state_bytes), max(state_bytes, default=0)
    if not state_bytes:
        how = "one rank keeps all of the state"
    elif not total:
        how = "the optimizer keeps no state"
    else:
        by_rank = f"at most {largest}, in all"
        if len(state_bytes) <= _LISTED_RANKS:
            by_rank = " + ".join(map(str, state_bytes))
        how = (
            f"bytes of state by rank: {by_rank} = {total} ({format_bytes(total)}); largest over mean "
            f"{largest * len(state_bytes) / total:.3f}, as whole tensors are distributed"
        )
    return settings_of(("engine.ddp.shard_optimizer", True, largest < total, how))[0]
