"""PyTorch's FSDP2 (`fully_shard`): each rank keeps a shard of every parameter, its gradient and its optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
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
from dlbench.node.sync.fsdp.shared_layers import SharedLayers, by_mesh
from dlbench.node.sync.fsdp.watched_comm import ACTIVATIONS, GATHER, REDUCE, SCATTER, CommWatch, of_gradients
from dlbench.node.sync.run_store import TorchRanks
from dlbench.node.sync.timing import layout, mean_over_ranks, messages_of, ring_bytes
from dlbench.records.exchange import ExchangeResult
from dlbench.records.folder import RunFolder
from dlbench.records.record import CollectiveWaits, RankGpu, Setting
from dlbench.specs.plan import RunPlan


class FsdpEngine(TorchRanks):
    """Exchanges gradients by FSDP2, optionally with tensor parallelism inside a replica."""

    marks_backward = True

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        super().__init__(plan, folder, place, device, gpu)
        self._plan, self._settings = plan, plan.engine.fsdp
        self._tensor: SharedLayers | None = None  # Layers divided between ranks; None without tensor parallelism.
        self._modules: dict[str, nn.Module] = {}
        """Sharded modules by name, in the order of computing, root ("") last; none with tensor parallelism alone."""
        self._planned: list[list[torch.Tensor]] = []  # Shards of the parameters in each group of the planned optimizer.
        self._replicas = place.num_nodes if self._settings.shard_ranks == "node" else 1
        self._shard_ranks = place.size // self._replicas // self._settings.tensor_ranks  # Ranks that share one copy.
        self._accumulation = 1

    def start(self) -> None:
        if self._settings.offload and self._device.type != "cuda":
            raise EnvironmentLacksError(
                "engine.fsdp.offload: on a CPU parameters are in the host's memory already; leave it out"
            )
        super().start()

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcasts rank 0's parameters, shards blocks and the root, and points the optimizer at the shards."""
        self.communicators().broadcast_parameters(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._num_elements = {name: parameter.numel() for parameter, name in names.items()}
        self._watch = CommWatch(self._device, mark_backward, self.beat, self._backend)
        # The mesh of replicas, shards and tensor-parallel neighbours, without dimensions of one rank.
        tensor_ranks, size = self._settings.tensor_ranks, self._place.size
        lengths = {"replicate": self._replicas, "shard": self._shard_ranks, "tensor": tensor_ranks}
        is_sharded = tensor_ranks < size or size == 1
        dimensions = tuple(name for name in lengths if lengths[name] > 1 or (name == "shard" and is_sharded))
        shape = tuple(map(lengths.__getitem__, dimensions))
        mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=dimensions)
        if "tensor" in dimensions:
            self._tensor = SharedLayers(mesh["tensor"], self._device, self._watch, self._plan)
            self._tensor.divide(model)
            dimensions = dimensions[:-1]
        self._shapes = {name: _local(parameter).shape for name, parameter in model.named_parameters()}
        self._accumulation = accumulation
        if dimensions:
            self._shard(model, mesh[dimensions])
        self._shards = dict(model.named_parameters())
        sharded_groups = []
        for group in optimizer.param_groups:
            shards: list[torch.Tensor] = [self._shards[names[parameter]] for parameter in group["params"]]
            self._planned.append(shards)
            sharded_groups += by_mesh(group | {"params": shards})
        optimizer.param_groups[:] = sharded_groups
        if hasattr(optimizer, "all_reduce"):
            optimizer.all_reduce = self._sum
        self._optimizer = optimizer
        return model, optimizer

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if self._wire == "bf16" else None)
        offload = CPUOffloadPolicy() if self._settings.offload else OffloadPolicy()
        name_of = {module: name for name, module in model.named_modules()}
        blocks = blocks_of(model) if self._settings.wrap == "blocks" else []
        self._modules = {name_of[module]: module for module in (*blocks, model)}
        for name, module in self._modules.items():
            frees = self._frees(name)
            num_tensors = len(self._own_shapes(name))
            fully_shard(module, mesh=mesh, reshard_after_forward=frees, mp_policy=policy, offload_policy=offload)
            self._watch.attach(cast(FSDPModule, module), name, num_tensors)
            if self._replicas > 1:
                hook = self._watch.all_reduced(name, num_tensors, self._replicas)
                cast(FSDPModule, module).set_all_reduce_hook(hook)
        if self._device.type != "cuda":
            return
        sharded, ahead = cast(list[FSDPModule], blocks), self._settings.prefetch
        for number, block in enumerate(sharded):
            block.set_modules_to_forward_prefetch(sharded[number + 1 : number + 1 + ahead])
            block.set_modules_to_backward_prefetch(sharded[max(0, number - ahead) : number][::-1])

    def _frees(self, name: str) -> bool:
        """Returns whether a module is freed between the passes; not the root, as the backward pass begins with it."""
        return self._settings.shard == "parameters" and (bool(name) or len(self._modules) == 1)

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
                # Otherwise its first forward pass would free it, and the second gather it again.
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
        """Clips as `clip_grad_norm_`, which accepts one mesh only: sums squares over the ranks with other shards."""
        shards: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
        for gradient in (parameter.grad for parameter in parameters):
            if isinstance(gradient, DTensor):
                sharded = [number for number, placed in enumerate(gradient.placements) if not placed.is_replicate()]
                groups = tuple(gradient.device_mesh.get_group(number) for number in sharded)
                shards.setdefault(groups, []).append(gradient.to_local())
            elif gradient is not None:
                shards.setdefault((), []).append(gradient)
        total = torch.zeros((), device=self._device)
        for groups, gradients in shards.items():
            square = nn.utils.get_total_norm(gradients).to(total).square_()
            for group in groups:
                self._sum(square, group)
            total += square
        factor = (norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for gradients in shards.values():
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def _sum(self, tensor: torch.Tensor, group: Any) -> None:
        on_device = tensor.to(self._device)  # NCCL takes no tensors in host memory, where offloaded gradients are.
        call = partial(dist.all_reduce, on_device, group=group)
        self._watch.run_collective(call, on_device, group, method=REDUCE, phase="optimizer", module="", num_tensors=1)
        if on_device is not tensor:
            tensor.copy_(on_device)

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
        return self._watch.waits(
            "each collective of the measured steps timed; on a CPU a rank waits for all of it",
            ": from when the computing stream reached a module until its parameters had arrived, or until the "
            "gradients before it were sent",
        )

    def exchange_result(self) -> ExchangeResult | None:
        if self._place.size == 1:
            return None
        watch, place = self._watch, self._place
        calls = of_gradients(watch.last)
        inside, across = 0.0, 0.0
        for call in calls:
            # Ranks of a tensor-parallel replica are on one node, as are the ranks of a copy if each node has its own.
            is_inside = call.method == ACTIVATIONS or (self._replicas > 1 and call.method != REDUCE)
            groups = 1 if is_inside else place.num_nodes
            inside_call, across_call = ring_bytes(call.num_bytes * call.rounds / 2, ranks=call.ranks, groups=groups)
            inside += inside_call
            across += across_call
        equal_steps = []  # watched steps with the same collectives as the last step
        for step in watch.steps:
            step_calls = of_gradients(step.calls)
            if layout(step_calls) == layout(calls):
                equal_steps.append((step.backward, step_calls))
        times = mean_over_ranks(self.gather(watch.times()))
        self._shards_evidence = self._check_shards()
        evidence = [
            "exposed is the waiting of the computing stream, by CUDA events; bytes by the formula of a ring, NCCL "
            "chooses the algorithm"
        ]
        if self._backend == "gloo":
            evidence = ["each collective ends before its call returns, so all of it is exposed; bytes by Gloo's rings"]
            if self._modules:
                evidence[0] += ", of which a reduce-scatter is an all-reduce"
        evidence.append(self._shards_evidence[1])
        if self._modules:
            evidence.append(self._check_bytes()[1])
        if self._tensor is not None:
            evidence.append(self._tensor.evidence()[1])
        return ExchangeResult(
            carrier=self._backend,
            by="backend",
            exchange="hierarchical" if self._replicas > 1 else "flat",
            fusion=f"by {self._wrapped}",
            wire=self._wire_in_force,
            group_size=place.local_size,
            num_groups=place.num_nodes,
            messages=tuple(messages_of(calls, equal_steps, watch.clock)),
            bytes_inside=inside,
            bytes_across=across,
            **times,
            window_steps=len(watch.steps),
            evidence="; ".join(evidence),
        )

    def _own_shapes(self, name: str) -> list[torch.Size]:
        """Returns the shapes of a module's parameters without those of other sharded modules inside it."""
        others = [f"{other}." for other in self._modules if other and other != name]
        prefix = f"{name}." if name else ""
        return [
            shape
            for parameter, shape in self._shapes.items()
            if parameter.startswith(prefix) and not parameter.startswith(tuple(others))
        ]

    def _check_shards(self) -> tuple[bool, str]:
        """Returns whether all ranks' shards hold each parameter once per copy, and counts; called by all ranks."""
        total = sum(self.gather(sum(_local(shard).numel() for shard in self._shards.values())))
        expected = padding = 0
        for name, shape in self._shapes.items():
            copies = self._replicas
            if shape.numel() == self._num_elements[name]:  # not divided by tensor parallelism
                copies *= self._settings.tensor_ranks
            expected += copies * self._num_elements[name]
            padding += self._padded(shape) - shape.numel()
        elements = sum(self._num_elements.values())
        text = f"all ranks hold {total} elements, expected are {expected} for a network with {elements}"
        return total == expected, f"{text}; a copy is sent with {padding} elements of padding"

    def _padded(self, shape: torch.Size) -> int:
        """Returns the sent elements of a parameter: its first dimension is padded to shards of equal length."""
        rows = shape[0] if shape else 1
        return shape.numel() // max(1, rows) * -(-rows // self._shard_ranks) * self._shard_ranks

    def _check_bytes(self) -> tuple[bool, str]:
        """Returns whether the bytes counted in every step are those of the formula, and both in words."""
        ranks = self._shard_ranks
        width = torch.bfloat16.itemsize if self._wire == "bf16" else torch.float32.itemsize
        scatter_rounds = self._watch.rounds[SCATTER]
        expected = 0.0
        for name in self._modules:
            elements = sum(map(self._padded, self._own_shapes(name)))
            gathers = self._accumulation
            if self._frees(name):
                gathers *= 2  # again in the backward pass
            expected += (ranks - 1) / ranks * elements * (gathers * torch.float32.itemsize + scatter_rounds * width)
            expected += 2 * (self._replicas - 1) / self._replicas * elements / ranks * width
        counted = sorted(self._watch.bytes_of_steps)
        text = f"a rank sent {' or '.join(map(str, counted))} bytes in a step by count, {expected:.0f} expected"
        return counted == [round(expected)], text

    @property
    def _wrapped(self) -> str:
        if not self._modules:
            return "layers"
        return "blocks" if len(self._modules) > 1 else "network"

    @property
    def _wire_in_force(self) -> str:
        """The format in which gradients were summed, by the bytes of reduce-scatters; fp32 without any."""
        if not self._modules:
            return "fp32"
        scattered_bytes = sum(call.num_bytes for call in self._watch.last if call.method == SCATTER)
        elements = sum(map(self._padded, self._shapes.values()))
        return {2: "bf16", 4: "fp32"}.get(scattered_bytes // max(1, elements), "unknown")

    def settings(self) -> list[Setting]:
        """Returns settings, after `exchange_result`; sharding is in force only if shards and sent bytes agree."""
        requested, settings = self._settings, super().settings()
        if requested.offload:
            shards = [_local(shard) for shard in self._shards.values()]
            devices = sorted({shard.device.type for shard in shards})
            how = f"{', '.join(devices)}: {sum(shard.nbytes for shard in shards)} bytes of parameters"
            settings += settings_of(("engine.fsdp.offload", True, devices == ["cpu"], how))
        if self._tensor is not None:
            is_divided, how = self._tensor.evidence()
            tensor_ranks = requested.tensor_ranks if is_divided else 1
            settings += settings_of(("engine.fsdp.tensor_ranks", requested.tensor_ranks, tensor_ranks, how))
        if not self._modules or self._place.size == 1:
            return settings
        (is_sharded, shards_text), (is_as_expected, bytes_text) = self._shards_evidence, self._check_bytes()
        shard = "gradients"
        if not is_sharded:
            shard = "none"
        elif any(call.method == GATHER and call.phase == "backward" for call in self._watch.last):
            shard = "parameters"
        if not is_as_expected:
            shard += ", other bytes"
        shard_ranks = "node" if self._replicas > 1 else "all"
        modules_text = f"{len(self._modules)} modules are gathered separately"
        if requested.wrap == "blocks" and len(self._modules) == 1:
            modules_text = "this network names no blocks"
        settings += settings_of(
            ("engine.fsdp.shard", requested.shard, shard, f"{shards_text}; {bytes_text}"),
            ("engine.fsdp.shard_ranks", requested.shard_ranks, shard_ranks, f"{self._shard_ranks} ranks share a copy"),
            ("engine.fsdp.wrap", requested.wrap, self._wrapped, modules_text),
            ("sync.wire", self._wire, self._wire_in_force, "bytes of the reduce-scatters"),
        )
        if requested.prefetch != 1:
            ahead, how = min(requested.prefetch, max(0, len(self._modules) - 2)), "blocks ahead, as given to torch"
            if self._device.type != "cuda" or ahead == 0:
                ahead, how = 0, "a CPU's gather ends before its call returns"
            settings += settings_of(("engine.fsdp.prefetch", requested.prefetch, ahead, how))
        return settings


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that are gathered one at a time, in the order in which they compute."""
    return list(getattr(model, "blocks", ()))
