"""PyTorch's FSDP2 (`fully_shard`): each rank keeps a share of every parameter, its gradient and its optimizer state.

Blocks of the network (its `blocks`) are gathered before they compute and freed behind. The optimizer, made before with
whole parameters, is pointed at the shares by name, so that training keeps its order.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlbench.errors import EnvironmentLacksError
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import MessageSpan, settings_of
from dlbench.node.sync.fsdp.tensor import SharedLayers, by_mesh
from dlbench.node.sync.fsdp.watched_comm import ACTIVATIONS, GATHER, REDUCE, SCATTER, CommWatch, of_gradients
from dlbench.node.sync.timing import layout, messages_of, ring_bytes
from dlbench.node.sync.torch_ranks import TorchRanks
from dlbench.records.exchange import ExchangeResult
from dlbench.records.folder import RunFolder
from dlbench.records.record import CollectiveWaits, RankGpu, Setting
from dlbench.specs.plan import RunPlan


class FsdpEngine(TorchRanks):
    """Sharded parameters, gradients and optimizer state."""

    marks_backward = True

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        super().__init__(plan, folder, place, device, gpu)
        self._plan, self._settings = plan, plan.engine.fsdp
        self._tensor: SharedLayers | None = None  # Where ranks share each layer's work.
        self._modules: dict[str, nn.Module] = {}
        """Sharded ones by name, blocks in the order of computing, the root (of no name) last; none where ranks share
        nothing but layers."""
        self._planned: list[list[str]] = []  # Names of the parameters in each group, before any was shared out.
        self._nodes = place.num_nodes if self._settings.shard_ranks == "node" else 1
        self._sharers = place.size // self._nodes // self._settings.tensor_ranks  # Ranks that share a copy.
        self._accumulation = 1

    def start(self) -> None:
        if self._settings.offload and self._device.type != "cuda":
            raise EnvironmentLacksError(
                "engine.fsdp.offload: on a CPU parameters lie in the host's memory; leave it out"
            )
        super().start()

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcasts rank 0's parameters, shards blocks and the rest, and points the optimizer at the shares."""
        self.communicators().broadcast_parameters(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._whole = {name: parameter.numel() for parameter, name in names.items()}
        self._watch = CommWatch(self._device, mark_backward, self.beat, self._backend)
        # Ranks by what they share, the innermost dimension that of neighbours; what only one rank would share is left
        # out, but for one rank alone.
        tensor, size = self._settings.tensor_ranks, self._place.size
        shape = {"replicate": self._nodes, "shard": self._sharers, "tensor": tensor}
        shares = [name for name in shape if shape[name] > 1 or (name == "shard" and (tensor < size or size == 1))]
        lengths = tuple(shape[name] for name in shares)
        mesh = init_device_mesh(self._device.type, lengths, mesh_dim_names=tuple(shares))
        if "tensor" in (dimensions := mesh.mesh_dim_names or ()):
            self._tensor = SharedLayers(mesh["tensor"], self._device, self._watch, self._plan)
            self._tensor.divide(model)
            dimensions = dimensions[:-1]
        self._shapes = {name: _local(parameter).shape for name, parameter in model.named_parameters()}
        self._accumulation = accumulation
        if dimensions:
            self._shard(model, mesh[dimensions])
        self._planned = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        self._shares = dict(model.named_parameters())
        groups = [
            group | {"params": [self._shares[name] for name in of_group]}
            for group, of_group in zip(optimizer.param_groups, self._planned, strict=True)
        ]
        optimizer.param_groups[:] = [part for group in groups for part in by_mesh(group)]
        if hasattr(optimizer, "all_reduce"):
            optimizer.all_reduce = self._sum
        self._optimizer = optimizer
        return model, optimizer

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if self._wire == "bf16" else None)
        offload = CPUOffloadPolicy() if self._settings.offload else OffloadPolicy()
        called = {module: name for name, module in model.named_modules()}
        blocks = blocks_of(model) if self._settings.wrap == "blocks" else []
        self._modules = {called[module]: module for module in (*blocks, model)}
        for name, module in self._modules.items():
            frees = self._frees(name)
            fully_shard(module, mesh=mesh, reshard_after_forward=frees, mp_policy=policy, offload_policy=offload)
            self._watch.attach(cast(FSDPModule, module), name, len(self._own(name)))
            if self._nodes > 1:
                hook = self._watch.all_reduced(name, len(self._own(name)), self._nodes)
                cast(FSDPModule, module).set_all_reduce_hook(hook)
        sharded, ahead = cast(list[FSDPModule], blocks), self._settings.prefetch
        for number, block in enumerate(sharded) if self._device.type == "cuda" else ():
            block.set_modules_to_forward_prefetch(sharded[number + 1 : number + 1 + ahead])
            block.set_modules_to_backward_prefetch(sharded[max(0, number - ahead) : number][::-1])

    def _frees(self, name: str) -> bool:
        """Whether a module's parameters are freed between the passes. Those in no block are not, as torch's own default
        has it: the backward pass begins with them.
        """
        return self._settings.shard == "parameters" and (bool(name) or len(self._modules) == 1)

    def planned_groups(self, model: nn.Module, optimizer: Optimizer) -> list[list[torch.Tensor]]:
        return [[self._shares[name] for name in group] for group in self._planned]

    @contextmanager
    def hold_exchange(self) -> Iterator[None]:
        root = cast(FSDPModule | None, self._modules.get(""))
        if root is not None:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if root is not None:
                root.set_requires_gradient_sync(True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        modules = {name: cast(FSDPModule, module) for name, module in self._modules.items()}
        with self._watch.paused():
            for module in modules.values():
                # Else its first forward pass would free it, and the second gather it.
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
            try:
                yield
            finally:
                for name, module in modules.items():
                    module.reshard()
                    module.set_reshard_after_forward(self._frees(name), recurse=False)

    def begin_backward(self) -> None:
        self._watch.begin_backward()

    def finish_exchange(self) -> None:
        self._watch.end_backward()

    def step(self, update: Callable[[Optimizer], object]) -> None:
        super().step(update)
        self._watch.end_step()

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        """As torch's, which takes one mesh: squares of shares are summed over the ranks that hold the others."""
        shares: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
        for gradient in (parameter.grad for parameter in parameters):
            if isinstance(gradient, DTensor):
                sharded = [number for number, placed in enumerate(gradient.placements) if not placed.is_replicate()]
                groups = tuple(gradient.device_mesh.get_group(number) for number in sharded)
                shares.setdefault(groups, []).append(gradient.to_local())
            elif gradient is not None:
                shares.setdefault((), []).append(gradient)
        total = torch.zeros((), device=self._device)
        for groups, gradients in shares.items():
            square = nn.utils.get_total_norm(gradients).to(total).square_()
            for group in groups:
                self._sum(square, group)
            total += square
        factor = (norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for gradients in shares.values():
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def _sum(self, tensor: torch.Tensor, group: Any) -> None:
        there = tensor.to(self._device)  # NCCL takes none of the host, where offloaded gradients lie.
        what = {"method": REDUCE, "phase": "optimizer", "module": "", "num_tensors": 1}
        self._watch.carry(lambda: dist.all_reduce(there, group=group), there, group, **what)
        if there is not tensor:
            tensor.copy_(there)

    def watch(self, on: bool) -> None:
        if on:
            self._watch.open(self._modules)
        else:
            self._watch.close()

    def watch_memory(self, on: bool) -> None:
        self._watch.awaits_release = on and self._device.type == "cpu"

    def message_spans(self) -> list[MessageSpan]:
        return self._watch.spans()

    def waits(self) -> CollectiveWaits | None:
        if self._place.size == 1:
            return None
        waited: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # By whether it was for parameters.
        for (method, phase), seconds in self._watch.seconds().items():
            if phase != "exchange":
                waited[method == GATHER][phase] += seconds  # type: ignore[assignment]
        how = "each collective of the measured steps timed; on a CPU a rank waits for all of it"
        if self._device.type == "cuda":
            how = (
                f"by events of {len(self._watch.steps)} watched warm-up steps, for as many as were measured: from "
                "where the computing stream came to a module until its parameters were there, or the gradients before "
                "had left"
            )
        return CollectiveWaits(gather_s=waited[True], exchange_s=waited[False], evidence=how)

    def exchange_result(self) -> ExchangeResult | None:
        if self._place.size == 1:
            return None
        watch, place = self._watch, self._place
        calls, everyone = of_gradients(watch.last), self.gather(watch.times())
        inside, across = 0.0, 0.0
        for one in calls:
            # A replica that shares layers lies on one node, as ranks that share a copy do where nodes have their own.
            is_inside = one.method == ACTIVATIONS or (self._nodes > 1 and one.method != REDUCE)
            groups = 1 if is_inside else place.num_nodes
            here, there = ring_bytes(one.num_bytes * one.rounds / 2, ranks=one.ranks, groups=groups)
            inside, across = inside + here, across + there
        known = [times for times in everyone if times]
        steps = [(step.backward, of_gradients(step.calls)) for step in watch.steps]
        alike = [(begin, sent) for begin, sent in steps if layout(sent) == layout(calls)]
        self._shared = self._shares_text()
        layers = self._tensor.evidence()[1] if self._tensor is not None else ""
        how = "exposed is what the computing stream waited, by events; bytes as a ring has them, NCCL chooses by itself"
        if self._backend == "gloo":
            how = "each collective ends before its call returns, so all of it is exposed; bytes by Gloo's rings"
            how += ", of which a reduce-scatter is an all-reduce" if self._modules else ""
        told = [how, self._shared[1], self._bytes_text()[1] if self._modules else "", layers]
        return ExchangeResult(
            carrier=self._backend,
            by="backend",
            exchange="hierarchical" if self._nodes > 1 else "flat",
            fusion=f"by {self._wrapped}",
            wire=self._wire_seen,
            group_size=place.local_size,
            num_groups=place.num_nodes,
            messages=messages_of(calls, alike, watch.clock),
            bytes_inside=inside,
            bytes_across=across,
            **{key: statistics.fmean(times[key] for times in known) for key in (known[0] if known else ())},
            window_steps=len(watch.steps),
            evidence="; ".join(filter(None, told)),
        )

    def _own(self, name: str) -> list[torch.Size]:
        others = [f"{other}." for other in self._modules if other and other != name]
        prefix = f"{name}." if name else ""
        return [
            shape
            for parameter, shape in self._shapes.items()
            if parameter.startswith(prefix) and not parameter.startswith(tuple(others))
        ]

    def _shares_text(self) -> tuple[bool, str]:
        """Whether the shares of all ranks together are the parameters, each once in every copy; and how that is known.
        Called by all ranks.
        """
        total = sum(self.gather(sum(_local(share).numel() for share in self._shares.values())))
        wanted = padding = 0
        for name, shape in self._shapes.items():
            copies = self._nodes * (1 if shape.numel() < self._whole[name] else self._settings.tensor_ranks)
            wanted += copies * self._whole[name]
            padding += self._padded(shape) - shape.numel()
        text = f"{total} elements lie on all ranks, {wanted} are wanted of a network with {sum(self._whole.values())}"
        return total == wanted, f"{text}, and a copy has {padding} more on its way, which are padding"

    def _padded(self, shape: torch.Size) -> int:
        """Elements of a parameter on the way: its first dimension is cut into parts of equal length."""
        rows = shape[0] if shape else 1
        return shape.numel() // max(1, rows) * -(-rows // self._sharers) * self._sharers

    def _bytes_text(self) -> tuple[bool, str]:
        """Whether the bytes that were counted in every step are those of the formula, and both in words."""
        wanted, ranks = 0.0, self._sharers
        for name in self._modules:
            elements = sum(map(self._padded, self._own(name)))
            gathered = (2 if self._frees(name) else 1) * self._accumulation * torch.float32.itemsize
            width = torch.bfloat16.itemsize if self._wire == "bf16" else torch.float32.itemsize
            scattered = (2 if self._backend == "gloo" else 1) * width  # Gloo sums the whole vector on every rank.
            wanted += (ranks - 1) / ranks * elements * (gathered + scattered)
            wanted += 2 * (self._nodes - 1) / self._nodes * elements / ranks * width
        counted = sorted(self._watch.bytes_of_steps)
        text = f"{' or '.join(map(str, counted))} bytes that a rank sends were counted in a step, {wanted:.0f} expected"
        return counted == [round(wanted)], text

    @property
    def _wrapped(self) -> str:
        return "layers" if not self._modules else "blocks" if len(self._modules) > 1 else "network"

    @property
    def _wire_seen(self) -> str:
        """The format in which gradients were summed, by the bytes of it; that of gradients where none is sent."""
        if not self._modules:
            return "fp32"
        scattered = sum(one.num_bytes for one in self._watch.last if one.method == SCATTER)
        elements = sum(map(self._padded, self._shapes.values()))
        return {2: "bf16", 4: "fp32"}.get(scattered // max(1, elements), "unknown")

    def settings(self) -> list[Setting]:
        """What is sharded is in force only if the shares make a whole and the bytes are those that sharding sends;
        after `exchange_result`.
        """
        asked, found = self._settings, super().settings()
        if asked.offload:
            where = sorted({_local(share).device.type for share in self._shares.values()})
            how = f"{sum(_local(share).nbytes for share in self._shares.values())} bytes of parameters lie there"
            found += settings_of(("engine.fsdp.offload", True, where == ["cpu"], f"{', '.join(where)}: {how}"))
        if self._tensor is not None:
            is_shared, how = self._tensor.evidence()
            in_force = asked.tensor_ranks if is_shared else 1
            found += settings_of(("engine.fsdp.tensor_ranks", asked.tensor_ranks, in_force, how))
        if not self._modules or self._place.size == 1:
            return found
        (is_shared, shares), (is_sent, sent) = self._shared, self._bytes_text()
        again = any(one.method == GATHER and one.phase == "backward" for one in self._watch.last)
        shard = "none" if not is_shared else "parameters" if again else "gradients"
        ranks = "node" if self._nodes > 1 else "all"
        blocks = f"{len(self._modules)} modules are gathered at a time"
        if asked.wrap == "blocks" and len(self._modules) == 1:
            blocks = "this network names no blocks"
        found += settings_of(
            ("engine.fsdp.shard", asked.shard, shard if is_sent else f"{shard}, other bytes", f"{shares}; {sent}"),
            ("engine.fsdp.shard_ranks", asked.shard_ranks, ranks, f"{self._sharers} ranks share a copy"),
            ("engine.fsdp.wrap", asked.wrap, self._wrapped, blocks),
            ("sync.wire", self._wire, self._wire_seen, "bytes of the reduce-scatters"),
        )
        if asked.prefetch != 1:
            ahead = min(asked.prefetch, max(0, len(self._modules) - 2)) if self._device.type == "cuda" else 0
            how = "blocks ahead, as told to torch" if ahead else "a CPU's gather ends before its call returns"
            found += settings_of(("engine.fsdp.prefetch", asked.prefetch, ahead, how))
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one at a time, in the order in which they compute."""
    return list(getattr(model, "blocks", ()))
