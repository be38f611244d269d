"""Layer-wise adaptive optimizers, the choice among them, and the learning rate over steps.

Both keep their norms per tensor and in fp32, whatever buffers the gradients were exchanged in. Tensors of at most one
dimension (biases, the scales of norms) are neither decayed nor adapted. torch's foreach kernels do the work, so that a
GPU gets tens of launches per step instead of thousands; only the last operation of LARS and LAMB is a launch a tensor,
because no foreach kernel takes a factor of each tensor from the device. `implementation: fused` compiles the whole
update. The global-norm clip (`clip_norm`) is not here: the training loop clips after gradient synchronisation, before
`step()`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlbench.specs.training import OptimizerSpec, TrainSpec

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
Scalar = float | Tensor  # A tensor in a compiled update, where a number would be part of the program.
Norms = Callable[..., tuple[Tensor, ...]]  # Of lists of tensors: the norms of each list, as `_norms`.


def _norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of each tensor, (len(tensors),), in fp32 or wider."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def _norms_of_each(*lists: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(_norms(tensors) for tensors in lists)


class SharedNorms:
    """Norms of whole tensors of which this rank holds a share each: squares are summed over the ranks that hold the
    others, of all tensors in one all-reduce for each dimension of the mesh that tensors are sharded over.
    """

    def __init__(self, shares: Sequence[Any], all_reduce: Callable[..., object]) -> None:
        """`shares`: DTensors on one mesh, in the order of the lists. `all_reduce`: sums a tensor over a `group`."""
        self._mesh, self._all_reduce = shares[0].device_mesh, all_reduce
        self._sharded = [[not placed.is_replicate() for placed in share.placements] for share in shares]

    def __call__(self, *lists: list[Tensor]) -> tuple[Tensor, ...]:
        squares = torch.stack([_norms(tensors) for tensors in lists]).square_()
        for dimension, is_sharded in enumerate(zip(*self._sharded, strict=True)):
            if any(is_sharded):
                # What is whole on each of these ranks counts once.
                parts = [1.0 if shared else 1.0 / self._mesh.size(dimension) for shared in is_sharded]
                squares *= squares.new_tensor(parts)
                self._all_reduce(squares, group=self._mesh.get_group(dimension))
        return squares.sqrt_().unbind()


class _Foreach(torch.optim.Optimizer):
    """Shared frame: one `_update` for each parameter group."""

    _program: Callable[..., None]  # The update as it runs where a group is not compiled.
    all_reduce: Callable[..., object] = staticmethod(dist.all_reduce)
    """Sums squared norms over a `group` of ranks that hold shares of the same tensors."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params, [p.grad for p in params])

    def _buffers(self, params: list[Tensor], name: str) -> list[Tensor]:
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p][name] for p in params]

    def _run(
        self, group: dict[str, Any], tensors: tuple[list[Tensor], ...], changing: Sequence[float], **fixed: Any
    ) -> None:
        """The update of a group. What is `fixed` may become part of a program, what is `changing` does not. Of tensors
        that ranks share (`DTensor`), each updates its part.
        """
        shares = cast(list[Any], tensors[0])
        if hasattr(shares[0], "device_mesh"):
            tensors = tuple([cast(Any, tensor).to_local() for tensor in one] for one in tensors)
            fixed["norms"] = SharedNorms(shares, self.all_reduce)
        if not group["fused"]:
            type(self)._program(*tensors, *changing, **fixed)
            return
        first = tensors[0][0]
        # Filled on the device: a copy from the host would wait for it.
        dtype = torch.promote_types(first.dtype, torch.float32)
        scalars = [torch.full((), value, dtype=dtype, device=first.device) for value in changing]
        _compiled(type(self)._program)(*tensors, *scalars, **fixed)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError


class _Compiled:
    """An update as a program of torch's compiler, and how many programs it became: one for each set of shapes."""

    def __init__(self, program: Callable[..., None]) -> None:
        self._call: Callable[..., None] = torch.compile(program, fullgraph=True, dynamic=False)
        self.graphs = 0

    def __call__(self, *args: Any, **fixed: Any) -> None:
        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]
        self._call(*args, **fixed)
        self.graphs += counters["stats"]["unique_graphs"] - before


_compiled = functools.cache(_Compiled)


def update_evidence(spec: OptimizerSpec) -> str:
    """What runs the updates of a fused optimizer on this rank, in words."""
    program = {"lars": _lars, "lamb": _lamb}.get(spec.name)
    if program is None:
        return "torch.optim's fused kernel"
    return f"torch.compile of the update: {_compiled(program).graphs} graphs"


def _lars(
    params: list[Tensor],
    grads: list[Tensor],
    velocity: list[Tensor],
    rate: Scalar,
    *,
    momentum: float,
    decay: float,
    trust_coefficient: float,
    epsilon: float,
    adapt: bool,
    norms: Norms = _norms_of_each,
) -> None:
    update = list(torch._foreach_add(grads, params, alpha=decay)) if decay else grads
    torch._foreach_mul_(velocity, momentum)
    if adapt:
        w, g = norms(params, grads)
        ratio = trust_coefficient * w / (g + decay * w + epsilon)
        scale = rate * torch.where((w > 0) & (g > 0), ratio, torch.ones_like(ratio))
        torch._foreach_addcmul_(velocity, update, scale.unbind())
    else:
        torch._foreach_add_(velocity, torch._foreach_mul(update, rate))
    torch._foreach_sub_(params, velocity)


class Lars(_Foreach):
    """LARS (You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017, algorithm 1).

    For each tensor, with eta the trust coefficient::

        ratio = eta |w| / (|g| + weight_decay |w| + epsilon)      1 if |w| or |g| is 0, or `adapt` is off
        v = momentum v + lr ratio (g + weight_decay w)
        w = w - v

    Groups may set every argument; `fused` compiles the update.
    """

    _program = staticmethod(_lars)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,  # Horovod builds its wrapper from parameter groups alone
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        adapt: bool = True,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"trust_coefficient": trust_coefficient, "epsilon": epsilon, "adapt": adapt, "fused": fused}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        fixed = {key: group[key] for key in ("momentum", "trust_coefficient", "epsilon", "adapt")}
        tensors = params, grads, self._buffers(params, "velocity")
        self._run(group, tensors, [group["lr"]], decay=group["weight_decay"], **fixed)


def _lamb(
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    rate: Scalar,
    slope: Scalar,
    offset: Scalar,
    *,
    betas: tuple[float, float],
    decay: float,
    adapt: bool,
    norms: Norms = _norms_of_each,
) -> None:
    """One update; see `Lamb._update` for `slope` and `offset`. u below is r / weight_decay, or r without a decay."""
    torch._foreach_lerp_(first, grads, 1 - betas[0])
    torch._foreach_mul_(second, betas[1])
    torch._foreach_addcmul_(second, grads, grads, 1 - betas[1])
    divisor = torch._foreach_sqrt(second)
    torch._foreach_mul_(divisor, slope)
    torch._foreach_add_(divisor, offset)
    update = list(torch._foreach_addcdiv(params, first, divisor) if decay else torch._foreach_div(first, divisor))
    size = decay or 1.0
    if adapt:
        w, u = norms(params, update)
        scale = rate * torch.where((w > 0) & (u > 0), w / u, torch.full_like(w, size))
        torch._foreach_addcmul_(params, update, (-scale).unbind())
    else:
        torch._foreach_sub_(params, torch._foreach_mul(update, rate * size))


class Lamb(_Foreach):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019, algorithm 2).

    For each tensor at its group's step t, counted from 1, with phi the identity::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay w
        w = w - lr (|w| / |r|) r             ratio 1 if |w| or |r| is 0, or `adapt` is off

    Groups may set every argument; `fused` compiles the update.
    """

    _program = staticmethod(_lamb)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,  # Horovod builds its wrapper from parameter groups alone
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "epsilon": epsilon, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, {**defaults, "fused": fused, "step": 0})

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        group["step"] += 1
        beta1, beta2 = group["betas"]
        # Both bias corrections, epsilon and the decay in one linear function of sqrt(v), so that
        # r / weight_decay = m / (slope sqrt(v) + offset) + w.
        size = group["weight_decay"] or 1.0
        first_correction, second_correction = 1 - beta1 ** group["step"], (1 - beta2 ** group["step"]) ** 0.5
        slope = size * first_correction / second_correction
        offset = size * first_correction * group["epsilon"]
        moments = self._buffers(params, "first_moment"), self._buffers(params, "second_moment")
        self._run(
            group,
            (params, grads, *moments),
            [group["lr"], slope, offset],
            betas=(beta1, beta2),
            decay=group["weight_decay"],
            adapt=group["adapt"],
        )


class Sgd(torch.optim.SGD):
    """torch's, whose own `step` imports the compiler (2 s of CPU) to part graphs where somebody compiles the update."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class AdamW(torch.optim.AdamW):
    """torch's, likewise."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """The optimizer of a specification over the trainable parameters of a model.

    Two groups: tensors of two dimensions or more, decayed (and adapted by LARS and LAMB), and the rest (biases,
    scales of norms), neither. The training loop writes the rate of each step into `group["lr"]` of both.
    """
    return optimizer_of([p for p in model.parameters() if p.requires_grad], spec)


def optimizer_of(parameters: Sequence[Tensor], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """The same over these parameters alone; each of the two groups may be empty.

    Updates are the same bit for bit however the parameters of a model are shared out among such optimizers: norms are
    those of single tensors, and the rest is done entry by entry.
    """
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    decayed: dict[str, Any] = {"params": matrices, "weight_decay": spec.weight_decay}
    plain: dict[str, Any] = {"params": vectors, "weight_decay": 0.0}
    fused = spec.implementation == "fused"
    # torch marks these "never to be compiled", and the mark's first use imports the compiler: 700 modules, a third of a
    # rank's start. Here they are plain, as no compiled function calls them (torch/_compile.py; elsewhere this is idle).
    for method in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        if (unmarked := getattr(getattr(torch.optim.Optimizer, method), "__wrapped__", None)) is not None:
            vars(unmarked).setdefault("__dynamo_disable", unmarked)
    kernels: dict[str, Any] = {"foreach": not fused, "fused": fused}
    if spec.name == "sgd":
        return Sgd([decayed, plain], lr=spec.learning_rate, momentum=spec.momentum, **kernels)
    if spec.name == "adamw":
        # Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2: decay times the rate.
        return AdamW([decayed, plain], lr=spec.learning_rate, betas=spec.betas, eps=spec.epsilon, **kernels)
    groups = [{**decayed, "adapt": True, "fused": fused}, {**plain, "adapt": False, "fused": fused}]
    if spec.name == "lars":
        return Lars(
            groups,
            lr=spec.learning_rate,
            momentum=spec.momentum,
            trust_coefficient=spec.trust_coefficient,
            epsilon=spec.epsilon,
        )
    return Lamb(groups, lr=spec.learning_rate, betas=spec.betas, epsilon=spec.epsilon)


class LearningRate:
    """The learning rate of each optimizer step.

    The peak is `optimizer.learning_rate`, scaled with the global batch where the plan says so (`OptimizerSpec.peak`);
    the rest is what the recipe has at that batch (`TrainSpec.at_batch`).

    Warm-up is linear over W steps: step 0 takes 1 / W of the way from its start (zero, or the unscaled rate) to the
    peak, step W - 1 all of it (Goyal et al. 2017, section 2.2, begun at one step's share so that no step is lost at 0).
    Afterwards, with p the share of the steps from W (`decay_from: start`: from 0) to T that has passed:

    - constant: the peak;
    - linear, polynomial: end + (peak - end) (1 - p) ** power, power 1 for linear; `end_learning_rate` from T on (You et
      al. 2017 for power 2);
    - cosine: end + (peak - end) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, equation 5, without restarts);
    - step: the peak times the factor of the last boundary reached, boundaries counted from step 0.

    What is given in epochs is turned into steps by `steps_per_epoch`, fractions kept.

    `global_batch`: samples of one step over all ranks. `steps_per_epoch`: None where the schedule does not count in
    epochs.
    """

    def __init__(self, spec: TrainSpec, *, global_batch: int, steps_per_epoch: float | None) -> None:
        schedule, base = spec.at_batch(global_batch).schedule, spec.optimizer.learning_rate
        if schedule.counts_epochs and steps_per_epoch is None:
            raise ValueError("a schedule in epochs needs steps_per_epoch")
        epoch = steps_per_epoch or 1.0
        self._schedule = schedule
        self.peak = spec.optimizer.peak(global_batch)
        self._start = base if schedule.warmup_from == "unscaled" else 0.0
        self._warmup = float(schedule.warmup_steps)
        if schedule.warmup_epochs is not None:
            self._warmup = schedule.warmup_epochs * epoch
        self._total = float(schedule.total_steps or 0)
        if schedule.total_epochs is not None:
            self._total = schedule.total_epochs * epoch
        unit = epoch if schedule.epoch_boundaries else 1.0
        self._boundaries = [boundary * unit for boundary in schedule.boundaries]

    def at(self, step: int) -> float:
        """The rate of one step, 0 for the first."""
        if step < self._warmup:
            share = min(1.0, (step + 1) / self._warmup)
            return self._start + (self.peak - self._start) * share
        schedule, peak = self._schedule, self.peak
        if schedule.decay == "constant":
            return peak
        if schedule.decay == "step":
            factor = 1.0
            for boundary, share in zip(self._boundaries, schedule.step_factors, strict=True):
                if step >= boundary:
                    factor = share
            return peak * factor
        end = schedule.end_learning_rate
        if step >= self._total:
            return end
        began = self._warmup if schedule.decay_from == "warmup" else 0.0
        rest = (self._total - step) / (self._total - began)
        if schedule.decay == "cosine":
            return end + (peak - end) * (1 - math.cos(math.pi * rest)) / 2
        power = schedule.power if schedule.decay == "polynomial" else 1.0
        return float(end + (peak - end) * rest**power)
