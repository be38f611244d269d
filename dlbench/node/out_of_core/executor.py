"""Executes a memory plan in every pass: keeps, swaps or recomputes the activations of each block."""
# Recomputing is `torch.utils.checkpoint` (not reentrant). Swapping is `torch.autograd.graph.saved_tensors_hooks`:
# autograd holds a handle instead of every activation.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dlbench.errors import RunError, UserError
from dlbench.node.out_of_core.cut import BlockFunction, ModuleBlock, UnitModule
from dlbench.node.out_of_core.saved import (
    BlockBytes,
    Checksum,
    Handle,
    MemoryRoom,
    PackedTensor,
    RunningPass,
    UnmovedStorages,
    activation_storage,
    first_tensor,
    weak_reference,
    without_graph,
)
from dlbench.node.out_of_core.tiers import BACKWARD, FORWARD, ComputeLane, LaneSpan, Tier
from dlbench.node.sync.timing import Clock
from dlbench.perfmodels.out_of_core.blocks import BlockCost
from dlbench.specs.out_of_core import PlannedBlock

Prefetch = Literal["room", "one-block", "blocking"]
"""Blocks to swap in ahead: room, as many as fit; one-block, the next one; blocking, none, each tensor is waited for."""
_COUNTED = ("passes", "activation_peak_bytes", "over_budget_bytes", "swapped_out_bytes", "swapped_in_bytes")


class OutOfCore:
    """Keeps, swaps or recomputes the blocks of a network; `install` comes before an engine wraps the network."""

    def __init__(  # noqa: PLR0913  (independent options by keyword, most of which only tests set)
        self,
        model: nn.Module,
        units: Sequence[UnitModule],
        blocks: Sequence[PlannedBlock],  # Every unit of `find_units` is in one of them.
        *,
        tier: Tier | None = None,  # None if no block swaps, and for `blocking` on a GPU, which is `save_on_cpu`.
        budget_bytes: int | None = None,
        costs: Sequence[BlockCost] | None = None,  # None: the bytes of the last counted pass are used.
        turn_bytes: int = 0,  # Memory for head and loss.
        prefetch: Prefetch = "room",
        leaving: Collection[int] | None = None,  # Blocks that are swapped out; None: all that swap something.
        verify: bool = False,
        rank: int = 0,
        clock: Clock | None = None,
        wrap_block: Callable[[BlockFunction], BlockFunction] | None = None,
        count: bool = False,  # Whether bytes are counted in every pass, not only in the first.
    ) -> None:
        self._blocks = [
            ModuleBlock(number, units[block.first : block.last + 1], self._forward, wrap_block)
            for number, block in enumerate(blocks)
        ]
        self._decisions = [block.decision for block in blocks]
        for block in blocks:
            alone = [unit.name for unit in units[block.first + 1 : block.last + 1] if not unit.joins]
            if alone:
                raise UserError(f"{alone[0]} must begin a block: its input is used elsewhere as well")
        self._shared_inputs = {n for n, block in enumerate(blocks) if units[block.first].shared}
        self._is_wrapped = wrap_block is not None
        self._tier = tier
        self._prefetch: Prefetch = prefetch
        self._leaving = range(len(blocks)) if leaving is None else leaving
        self._verifies = verify
        self._rank = rank
        self._unmoved = UnmovedStorages(model)
        self._room = MemoryRoom(self._decisions, budget_bytes, costs, self._shared_inputs)
        self._turn_bytes = turn_bytes
        self._saves_output = [True] * len(blocks)
        """Whether each block saves its output, by the last counted pass."""
        self._counts_always = count
        self._counts_next = True
        self._pass: RunningPass | None = None
        self._installed = False
        self._lane = ComputeLane(clock or Clock(), tier)
        self._counts = dict.fromkeys(_COUNTED, 0)  # Totals and peaks since `begin_measuring`.

    @property
    def warnings(self) -> tuple[str, ...]:
        if self._tier is None or not any("swap" in decision for decision in self._decisions):
            return ()
        return self._tier.warnings

    def install(self) -> None:
        is_in_core = all(decision == "keep" for decision in self._decisions)
        if self._installed or (is_in_core and not self._is_wrapped and not self._counts_always):
            return
        for block in self._blocks:
            block.install()
        self._installed = True

    def remove(self) -> None:
        if self._installed:
            for block in self._blocks:
                block.remove()
        self._installed = False
        self._pass = None

    def computes(self, module: nn.Module) -> bool:
        """Returns whether a call of a module computes it now: some only begin a block or return their input."""
        if not self._installed:
            return True
        for block in self._blocks:
            if any(member is module for member in block.modules):
                return block.is_running
        return True

    def begin_measuring(self) -> None:
        self._unmoved.read_model()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._lane.reset()

    def summary(self) -> dict[str, int | float]:
        """Returns bytes and seconds since `begin_measuring`; waits for the device."""
        return {**self._counts, **self._lane.seconds()}

    def watch(self, watching: bool) -> None:
        self._lane.watch(watching)

    def take_spans(self) -> list[LaneSpan]:
        return self._lane.take()

    def close(self) -> None:
        self.remove()
        if self._tier is not None:
            self._tier.close()

    def _forward(self, block: ModuleBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return block.function(*args, **kwargs)
        running = self._enter(block, args, kwargs)
        with self._hooks(running, block.number):
            if self._room.recomputes(block.number):
                contexts = partial(self._checkpoint_contexts, running, block)
                output = checkpoint(block.function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
            else:
                output = block.function(*args, **kwargs)
        self._leave(running, block, output)
        return output

    def _enter(self, block: ModuleBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunningPass:
        number = block.number
        if number == 0:
            self._pass = RunningPass(len(self._blocks))
            self._unmoved.begin_pass()
            self._lane.begin_pass()
            if 0 in self._shared_inputs:
                self._unmoved.add_arguments(args[:1])
            else:
                self._pass.begin_block(0, args[0].untyped_storage())
                self._pass.charge_input(0, self._pass.boundary_bytes[0])
        running = self._pass
        if running is None or running.last_forward != number - 1 or running.has_turned:
            raise RunError(
                f"{block.name}: called out of the order in which the network was cut into blocks; use train.recompute "
                "none and train.swap none for this network"
            )
        running.last_forward = number
        self._unmoved.add_arguments((*args[1:], *kwargs.values()))
        if number == 0 and args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            _on_gradient(args[0], partial(self._end_of_first, running))
        needed = self._room.needs(number).forward_bytes
        if self._prefetch == "one-block":
            # Buffers of two blocks are enough: the one that is swapped out, and the one that is computed.
            while len({handle.block for handle in running.leaving if handle.ticket is not None}) > 1:
                self._wait_for_oldest(running)
        self._make_room(running, needed)
        running.charge_block(number, needed)
        self._note_peak(running)
        self._lane.switch(FORWARD, number)
        return running

    def _make_room(self, running: RunningPass, num_bytes: int) -> None:
        self._end_finished_transfers(running)
        while running.leaving and running.resident + num_bytes > self._room.budget:
            self._wait_for_oldest(running)

    def _wait_for_oldest(self, running: RunningPass) -> None:
        oldest = running.leaving[0]
        if oldest.ticket is not None and self._tier is not None and not self._tier.is_out(oldest.ticket):
            with self._lane.wait("swap_wait_s" if running.has_turned else "room_wait_s"):
                self._tier.wait_out(oldest.ticket)
        self._end_oldest_transfer(running)

    def _end_finished_transfers(self, running: RunningPass) -> None:
        while running.leaving:
            oldest = running.leaving[0]
            if self._tier is not None and oldest.ticket is not None and not self._tier.is_out(oldest.ticket):
                return
            self._end_oldest_transfer(running)

    def _end_oldest_transfer(self, running: RunningPass) -> None:
        handle = running.leaving.popleft()
        if handle.ticket is not None:
            running.charge(handle, -handle.num_bytes)

    def _note_peak(self, running: RunningPass) -> None:
        counts = self._counts
        if running.resident > counts["activation_peak_bytes"]:
            counts["activation_peak_bytes"] = running.resident
            if running.resident > self._room.budget:
                over = running.resident - int(self._room.budget)
                counts["over_budget_bytes"] = max(counts["over_budget_bytes"], over)

    def _hooks(self, running: RunningPass, number: int) -> AbstractContextManager[object]:
        """Returns the hooks around a block; of a recomputed block they see only the input, which may be swapped."""
        if self._decisions[number] == "swap" and self._tier is None:
            return save_on_cpu(pin_memory=True)
        saves_next = self._saves_output[number] and self._room.moves(number + 1) and not self._room.recomputes(number)
        if not (self._decisions[number] == "swap" or self._room.moves(number) or saves_next or self._counts_now):
            return nullcontext()
        return saved_tensors_hooks(partial(self._pack, running, number), partial(self._unpack, running))

    @property
    def _counts_now(self) -> bool:
        return self._counts_always or self._counts_next

    def _checkpoint_contexts(
        self, running: RunningPass, block: ModuleBlock
    ) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        counting: AbstractContextManager[object] = nullcontext()
        if self._counts_now:
            counting = _counting_saved(partial(self._count, running))
        return counting, _Recomputing(block, self._lane)

    def _count(self, running: RunningPass, tensor: torch.Tensor) -> None:
        storage = activation_storage(tensor, self._unmoved)
        if storage is not None:
            running.counted[storage._cdata] = (weak_reference(storage), storage.nbytes())

    def _pack(self, running: RunningPass, number: int, tensor: torch.Tensor) -> Any:
        storage = activation_storage(tensor, self._unmoved)
        if storage is None:
            return without_graph(tensor)
        handle = running.table.find(storage)
        if handle is None:
            handle = running.table.add(tensor, storage, number)
            boundary = running.boundaries[number]
            if boundary is not None and boundary.cdata == storage._cdata:
                handle.is_input = True
                running.inputs[number] = handle
            else:
                running.owned[number].append(handle)
        if handle.storage is None and handle.ticket is None:  # autograd had released it
            handle.storage = storage
        moves = self._decisions[number] == "swap"
        if handle.is_input:
            moves = self._room.moves(number)
        if self._prefetch == "blocking" and self._tier is not None and handle.ticket is None and moves:
            self._start_swap_out(running, handle)
            with self._lane.wait("room_wait_s"):
                self._tier.wait_out(handle.ticket)
        return PackedTensor(handle, tensor)

    def _leave(self, running: RunningPass, block: ModuleBlock, output: Any) -> None:
        number = block.number
        self._lane.switch(None, number)
        tensor = first_tensor(output)
        if tensor is None:
            raise RunError(f"{block.name}: returned no tensor, but did when the network was divided into blocks")
        storage = tensor.untyped_storage()
        running.begin_block(number + 1, storage)
        saves_output = self._assign_output(running, number, storage)
        if self._counts_now:
            self._count_block(running, number, saves_output)
        self._charge_after_forward(running, number)
        if tensor.requires_grad:
            _on_gradient(tensor, partial(self._reached, running, number))
        if self._tier is not None and self._prefetch != "blocking" and number in self._leaving:
            for handle in self._moving(running, number):
                if handle.storage is not None:
                    self._start_swap_out(running, handle)
        if number == len(self._blocks) - 1:
            self._make_room(running, self._turn_bytes)
            running.charge_other(self._turn_bytes)
            self._note_peak(running)

    def _moving(self, running: RunningPass, number: int) -> list[Handle]:
        handles = []
        input_handle = running.inputs[number]
        if input_handle is not None and self._room.moves(number):
            handles.append(input_handle)
        if self._decisions[number] == "swap":
            handles += running.owned[number]
        return handles

    def _assign_output(self, running: RunningPass, number: int, storage: torch.UntypedStorage) -> bool:
        is_counted = running.counted.pop(storage._cdata, None) is not None
        handle = running.table.find(storage)
        if handle is None or handle.block != number or handle.is_input:
            return is_counted
        running.owned[number].remove(handle)
        handle.block, handle.is_input = number + 1, True
        running.inputs[number + 1] = handle
        return True

    def _count_block(self, running: RunningPass, number: int, saves_output: bool) -> None:
        boundary = running.boundaries[number]
        saves_input = boundary is not None and running.counted.pop(boundary.cdata, None) is not None
        if self._room.recomputes(number):
            saved_bytes = sum(num_bytes for _, num_bytes in running.counted.values())
        else:
            saved_bytes = sum(handle.num_bytes for handle in running.owned[number])
            saves_input = running.inputs[number] is not None
        running.counted.clear()
        is_saved_before = number > 0 and self._saves_output[number - 1]
        self._saves_output[number] = saves_output
        self._room.counted[number] = BlockBytes(
            saved_bytes=saved_bytes,
            input_bytes=running.boundary_bytes[number],
            input_saved=saves_input or is_saved_before,
            output_bytes=running.boundary_bytes[number + 1],
        )

    def _charge_after_forward(self, running: RunningPass, number: int) -> None:
        needs = self._room.needs(number)
        block_bytes, input_bytes = needs.own_bytes, needs.kept_bytes
        if self._decisions[number] == "swap" and self._tier is not None:
            block_bytes = sum(handle.num_bytes for handle in running.owned[number] if handle.ticket is None)
        running.charge_block(number, block_bytes)
        input_handle = running.inputs[number]
        if input_handle is not None:
            input_bytes = input_handle.resident_bytes
        running.charge_input(number, input_bytes)
        output_bytes = running.boundary_bytes[number + 1]
        output_handle = running.inputs[number + 1]
        if output_handle is not None and output_handle.ticket is not None:
            output_bytes = 0
        running.charge_input(number + 1, output_bytes)
        self._note_peak(running)

    def _start_swap_out(self, running: RunningPass, handle: Handle) -> None:
        assert self._tier is not None
        assert handle.storage is not None
        if self._verifies:
            handle.check = Checksum.of(handle.storage, handle.num_bytes, handle.dtype)
        handle.ticket = self._tier.swap_out(handle.storage, handle.block)
        handle.discard = self._tier.discard
        handle.storage = None
        self._counts["swapped_out_bytes"] += handle.num_bytes
        if self._prefetch != "blocking":
            running.leaving.append(handle)

    def _reached(self, running: RunningPass, number: int, gradient: torch.Tensor) -> None:
        """Is called with the gradient of a block's output: later blocks have ended, its backward pass begins."""
        if number >= running.last_backward:
            return
        if not running.has_turned:
            running.has_turned = True
            self._counts_next = False
            self._room.turn()
            running.charge_input(len(self._blocks), 0)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, running))
        self._end_blocks(running, number)
        running.last_backward = number
        needs = self._room.needs(number)
        running.charge_other(needs.gradients_before_bytes)
        self._swap_in_ahead(running, number)
        self._room.start(number)
        self._make_room(running, needs.backward_bytes)
        running.charge_block(number, running.charged[number] + needs.backward_bytes)
        self._note_peak(running)
        self._lane.switch(BACKWARD, number)

    def _end_of_first(self, running: RunningPass, gradient: torch.Tensor) -> None:
        if running.has_turned:
            self._end_blocks(running, -1)
            running.last_backward = -1
            self._lane.switch(None, 0)

    def _end_blocks(self, running: RunningPass, number: int) -> None:
        for block in range(min(running.last_backward, len(self._blocks) - 1), number, -1):
            for handle in running.owned[block]:
                handle.drop()
            running.owned[block].clear()
            input_handle = running.inputs[block + 1]
            if input_handle is not None:
                input_handle.drop()
                running.inputs[block + 1] = None
            running.charge_block(block, 0)
            running.charge_input(block, 0)

    def _swap_in_ahead(self, running: RunningPass, number: int) -> None:
        """Starts to swap in blocks in backward order while they fit; block `number`, needed now, in any case."""
        running.next_in = min(running.next_in, number)
        if self._prefetch == "blocking":
            return
        furthest = max(number - 1, 0) if self._prefetch == "one-block" else 0
        while True:
            self._end_finished_transfers(running)
            while running.next_in >= furthest and self._start_block_in(running, running.next_in, forced=False):
                pass
            if running.next_in < number:
                return
            if running.leaving:
                self._wait_for_oldest(running)
            else:
                self._start_block_in(running, running.next_in, forced=True)

    def _start_block_in(self, running: RunningPass, number: int, *, forced: bool) -> bool:
        """Starts to swap in a block, the next one in backward order; returns False if it does not fit."""
        moving = self._moving(running, number)
        to_fetch = [handle for handle in moving if handle.ticket is not None and not handle.coming]
        missing_bytes = sum(handle.num_bytes for handle in to_fetch if handle not in running.leaving)
        # Memory is reserved for all of them, whether they are out or not.
        reserved = to_fetch if number in self._leaving else moving
        reserved_bytes = sum(handle.num_bytes for handle in reserved)
        fits = self._room.leaves_enough(reserved_bytes) and running.resident + missing_bytes <= self._room.budget
        if reserved_bytes and not fits and not forced:
            return False
        for handle in reversed(to_fetch):
            if not self._recall(running, handle):
                if handle in running.leaving:  # it is out by now, queued after one that is not
                    running.leaving.remove(handle)
                    running.charge(handle, -handle.num_bytes)
                self._start_swap_in(running, handle, number)
        self._room.issue(number, reserved_bytes)
        running.next_in -= 1
        self._note_peak(running)
        return True

    def _recall(self, running: RunningPass, handle: Handle) -> bool:
        assert self._tier is not None
        handle.storage = self._tier.recall(handle.ticket)
        if handle.storage is None:
            return False
        handle.ticket, handle.recalled_ticket, handle.check = None, handle.ticket, None
        if self._tier.takes_back:
            self._counts["swapped_out_bytes"] -= handle.num_bytes
        if handle in running.leaving:
            running.leaving.remove(handle)
        return True

    def _start_swap_in(self, running: RunningPass, handle: Handle, block: int) -> None:
        assert self._tier is not None
        handle.coming = True
        self._tier.swap_in(handle.ticket, block)
        running.charge(handle, handle.num_bytes)
        self._counts["swapped_in_bytes"] += handle.num_bytes

    def _unpack(self, running: RunningPass, packed: Any) -> torch.Tensor:
        if not isinstance(packed, PackedTensor):
            return packed  # type: ignore[no-any-return]
        storage = packed.handle.storage
        if storage is None:
            storage = self._fetch(running, packed.handle)
        return packed.tensor(storage)

    def _fetch(self, running: RunningPass, handle: Handle) -> torch.UntypedStorage:
        tier = self._tier
        if handle.ticket is None or tier is None:
            raise RunError(
                f"rank {self._rank}: a tensor of block {handle.block} was needed after its backward pass had ended; "
                "swapped tensors serve one backward pass"
            )
        if not handle.coming:
            if self._recall(running, handle):
                assert handle.storage is not None
                return handle.storage
            self._start_swap_in(running, handle, handle.block)
            self._note_peak(running)
        if tier.is_in(handle.ticket):
            storage = tier.take(handle.ticket)
        else:
            with self._lane.wait("swap_wait_s"):
                storage = tier.take(handle.ticket)
        if handle.check is not None:
            difference = handle.check.difference(storage, handle.num_bytes, handle.dtype)
            if difference is not None:
                raise RunError(
                    f"rank {self._rank}: a swapped tensor of block {handle.block} ({handle.text}) changed while it was "
                    f"swapped: {difference}"
                )
        handle.storage = storage
        ticket, handle.ticket = handle.ticket, None
        tier.discard(ticket)
        return storage

    def _end(self, running: RunningPass) -> None:
        self._end_blocks(running, -1)
        running.last_backward = -1
        self._lane.switch(None, 0)
        self._lane.end_pass()
        self._counts["passes"] += 1
        if self._pass is running:
            self._pass = None


@contextmanager
def _counting_saved(count: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Calls `count` with each tensor that is saved in this context, inside of `torch.utils.checkpoint`."""
    # Hooks do not stack: only the innermost are called. So these call those of the checkpoint.
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert top is not None
    pack, unpack = top

    def count_and_pack(tensor: torch.Tensor) -> Any:
        count(tensor)
        return pack(tensor)

    torch._C._autograd._push_saved_tensors_default_hooks(count_and_pack, unpack)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class _Recomputing:
    def __init__(self, block: ModuleBlock, lane: ComputeLane) -> None:
        self._block = block
        self._lane = lane
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._lane.begin_recompute(self._block.number)
        self._before = [(buffer, buffer.clone()) for buffer in self._block.buffers()]

    def __exit__(self, *raised: object) -> None:
        with torch.no_grad():
            for buffer, before in self._before:
                buffer.copy_(before)
        self._before = []
        self._lane.end_recompute(self._block.number)


def _on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
