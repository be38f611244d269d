"""ZeRO-1 by torch's `ZeroRedundancyOptimizer`: ranks share out the optimizer's state and its work.

Gradients are all-reduced as without it. Each rank then updates the parameters that are its own, whole tensors, and
gives them to the others: a broadcast from every rank, at the end of the update. What that takes is noted in every step:
from the end of this rank's update, so that waiting for a rank with more to update is part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from dlbench.node.sync.engine import settings_of
from dlbench.node.sync.timing import Clock
from dlbench.records.record import CollectiveWaits, Setting
from dlbench.units import format_bytes

_LISTED_RANKS = 8  # Whose bytes of state are told one by one.


class ShardedUpdate(ZeroRedundancyOptimizer):
    """The planned optimizer, shared out. `state` is what this rank keeps of it."""

    _all_state_dicts: list[dict[str, Any]]  # Torch's, by rank, on the rank to which they were consolidated.

    def __init__(self, planned: torch.optim.Optimizer, clock: Clock) -> None:
        layouts = {p: p.stride() for group in planned.param_groups for p in group["params"]}
        # Groups hold every setting, the rate of the step among them: what is written to `param_groups` reaches this
        # rank's own optimizer at the beginning of its step, and LAMB's count of steps comes back at the end.
        groups = [dict(group) for group in planned.param_groups]
        super().__init__(groups, type(planned), parameters_as_bucket_view=True)
        for parameter, strides in layouts.items():
            # Buckets are packed in the order of dimensions, which would end channels-last weights.
            if parameter.stride() != strides:
                kept = parameter.data.clone()
                parameter.data = parameter.data.as_strided(kept.shape, strides).copy_(kept)
        self.state = self.optim.state
        self._clock, self._seconds, self._updated = clock, 0.0, None
        self._pending: deque[tuple[Any, Any]] = deque()
        self.optim.register_step_post_hook(self._note_updated)
        self.register_step_post_hook(self._note_received)

    def _note_updated(self, *_: object) -> None:
        self._updated = self._clock.mark()

    def _note_received(self, *_: object) -> None:
        self._pending.append((self._updated, self._clock.mark()))
        self._settle()

    def _settle(self) -> None:
        """Adds up what the device has come to, so that few events are kept."""
        while self._pending and self._clock.has_passed(self._pending[0][1]):
            moments = self._pending.popleft()
            self._seconds += self._clock.between(*moments)
            self._clock.give_back(moments)

    def restart(self) -> None:
        """Counts the waiting from here on; between steps that the device has ended."""
        self._settle()
        self._seconds = 0.0

    def waits(self) -> CollectiveWaits:
        """What this rank waited for parameters since `restart`; waits for the device."""
        self._clock.settle()
        self._settle()
        how = "from the end of this rank's own update to the end of ZeroRedundancyOptimizer's broadcasts, each step"
        return CollectiveWaits(exchange_s={"optimizer": self._seconds}, evidence=how)

    def share(self) -> tuple[int, int, int]:
        """Of this rank: parameters that it updates and sends, their bytes, and the bytes of state that it keeps."""
        own = [p for group in self.optim.param_groups for p in group["params"]]
        kept = (value for state in self.state.values() for value in state.values())
        state_bytes = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
        return len(own), sum(p.numel() * p.element_size() for p in own), state_bytes

    def whole(self) -> tuple[dict[int, dict[str, torch.Tensor]], list[int | None]]:
        """The values by number of parameter, on the CPU, and each group's `step`; complete on rank 0, called by all."""
        self.consolidate_state_dict(0)
        if self.rank != 0:
            return {}, []
        found = super().state_dict()
        # A rank that has no parameter of a group does not count its steps.
        each = ([group.get("step") for group in own["param_groups"]] for own in self._all_state_dicts)
        steps = [
            max((step for step in by_rank if step is not None), default=None) for by_rank in zip(*each, strict=True)
        ]
        self._all_state_dicts = []  # as large as all of the state
        return found["state"], steps

    def own_values(self, values: Mapping[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
        """Those of the parameters that this rank updates."""
        own = {p for group in self.optim.param_groups for p in group["params"]}
        order = (p for group in self.param_groups for p in group["params"])
        return {number: values[number] for number, p in enumerate(order) if p in own and number in values}

    def adopt(self) -> None:
        """To be called when this rank's own optimizer has loaded a state."""
        self.state = self.optim.state
        for public, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            public.update({key: value for key, value in own.items() if key != "params"})


def sharding_setting(state_bytes: Sequence[int]) -> Setting:
    """Whether the optimizer's state is shared out, by the bytes that each rank keeps; empty: nothing was shared out."""
    whole, most = sum(state_bytes), max(state_bytes, default=0)
    if not state_bytes:
        how = "one rank keeps all of the state"
    elif not whole:
        how = "the optimizer keeps no state"
    else:
        told = " + ".join(map(str, state_bytes)) if len(state_bytes) <= _LISTED_RANKS else f"at most {most}, in all"
        how = (
            f"bytes of state by rank: {told} = {whole} ({format_bytes(whole)}); largest over mean "
            f"{most * len(state_bytes) / whole:.3f}, as whole tensors are dealt out"
        )
    return settings_of(("engine.ddp.shard_optimizer", True, most < whole, how))[0]
