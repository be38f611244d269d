"""LARS and LAMB, the choice of an optimizer, and the learning rate over steps.

LARS and LAMB compute norms per tensor in fp32, for any format of the exchange. Tensors of at most one dimension
(biases, scales of norms) are neither decayed nor adapted. torch's foreach kernels need tens of launches per step
instead of thousands; only the last operation is a launch per tensor, because no foreach kernel reads a factor per
tensor from the device. `implementation: fused` compiles the whole update. The loop clips gradients before `step()`.
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
Scalar = float | Tensor  # A tensor in a compiled update, where a number would be a constant of the program.
Norms = Callable[..., tuple[Tensor, ...]]  # Maps lists of tensors to the norms of each list, like `_norms`.


def _norms(tensors: list[Tensor]) -> Tensor:
    """Returns the Euclidean norm of each tensor, (len(tensors),), in fp32 or wider."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def _norms_of_each(*lists: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(_norms(tensors) for tensors in lists)


class SharedNorms:
    """Computes norms of sharded tensors: one all-reduce per mesh dimension sums the squares of all shards."""

    def __init__(self, shares: Sequence[Any], all_reduce: Callable[..., object]) -> None:
        """`shares` are DTensors on one mesh, in the order of the lists; `all_reduce` sums a tensor over a `group`."""
        self._mesh, self._all_reduce = shares[0].device_mesh, all_reduce
        self._sharded = [[not placed.is_replicate() for placed in share.placements] for share in shares]

    def __call__(self, *lists: list[Tensor]) -> tuple[Tensor, ...]:
        squares = torch.stack([_norms(tensors) for tensors in lists]).square_()
        for dimension, is_sharded in enumerate(zip(*self._sharded, strict=True)):
            if any(is_sharded):
                # Tensors that are replicated over these ranks count once.
                factors = [1.0] * len(is_sharded)
                for position, sharded in enumerate(is_sharded):
                    if not sharded:
                        factors[position] /= self._mesh.size(dimension)
                squares *= squares.new_tensor(factors)
                self._all_reduce(squares, group=self._mesh.get_group(dimension))
        return squares.sqrt_().unbind()


class _Foreach(torch.optim.Optimizer):
    """Base of LARS and LAMB: calls `_update` for each parameter group."""

    _program: Callable[..., None]  # The update of a group, eager or to be compiled.
    all_reduce: Callable[..., object] = staticmethod(dist.all_reduce)
    """Sums squared norms over a `group` of ranks that hold shards of the same tensors."""

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
        """Updates a group or its local shards; a compiled program gets `changing` numbers as tensors."""
        shares = cast(list[Any], tensors[0])
        if hasattr(shares[0], "device_mesh"):
            tensors = tuple(_shards(sharded) for sharded in tensors)
            fixed["norms"] = SharedNorms(shares, self.all_reduce)
        if not group["fused"]:
            type(self)._program(*tensors, *changing, **fixed)
            return
        first = tensors[0][0]
        # Filled on the device: the host would wait for a copy.
        dtype = torch.promote_types(first.dtype, torch.float32)
        scalars = [torch.full((), number, dtype=dtype, device=first.device) for number in changing]
        _compiled(type(self)._program)(*tensors, *scalars, **fixed)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError


def _shards(tensors: list[Any]) -> list[Tensor]:
    return [tensor.to_local() for tensor in tensors]


class _Compiled:
    """An update as compiled by torch; counts its programs, one for each set of shapes."""

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
    """Returns a text that names the implementation of a fused optimizer on this rank."""
    program = {"lars": _lars, "lamb": _lamb}.get(spec.name)
    if program is None:
        return "torch.optim's fused kernel"
    return f"torch.compile of the update: {_compiled(program).graphs} graphs"


def _lars(  # noqa: PLR0913  (a compiled program gets every number as an argument)
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
    update = grads
    if decay:
        update = list(torch._foreach_add(grads, params, alpha=decay))
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

    def __init__(  # noqa: PLR0913  (torch's optimizers take each option as an argument)
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


def _lamb(  # noqa: PLR0913  (a compiled program gets every number as an argument)
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
    """Updates parameters and moments; `update` is r / weight_decay, or r without decay (see `Lamb._update`)."""
    torch._foreach_lerp_(first, grads, 1 - betas[0])
    torch._foreach_mul_(second, betas[1])
    torch._foreach_addcmul_(second, grads, grads, 1 - betas[1])
    divisor = torch._foreach_sqrt(second)
    torch._foreach_mul_(divisor, slope)
    torch._foreach_add_(divisor, offset)
    if decay:
        update = list(torch._foreach_addcdiv(params, first, divisor))
    else:
        update = list(torch._foreach_div(first, divisor))
    factor = decay or 1.0  # r = factor * update
    if adapt:
        w, u = norms(params, update)
        scale = rate * torch.where((w > 0) & (u > 0), w / u, torch.full_like(w, factor))
        torch._foreach_addcmul_(params, update, (-scale).unbind())
    else:
        torch._foreach_sub_(params, torch._foreach_mul(update, rate * factor))


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
        # A linear function of sqrt(v) combines both bias corrections, epsilon and the decay:
        # r / weight_decay = m / (slope sqrt(v) + offset) + w.
        factor = group["weight_decay"] or 1.0
        first_correction, second_correction = 1 - beta1 ** group["step"], (1 - beta2 ** group["step"]) ** 0.5
        slope = factor * first_correction / second_correction
        offset = factor * first_correction * group["epsilon"]
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
    """torch's SGD, whose original `step` imports the compiler (2 s of CPU)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose original `step` imports the compiler (2 s of CPU)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Builds the optimizer of a specification over the trainable parameters of a model.

    It has two groups: tensors of two dimensions or more, decayed (and adapted by LARS and LAMB), and others (biases,
    scales of norms), neither. The training loop writes the rate of each step into `group["lr"]` of both.
    """
    return optimizer_of([p for p in model.parameters() if p.requires_grad], spec)


def optimizer_of(parameters: Sequence[Tensor], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Builds an optimizer over some parameters; updates do not depend on how a model's parameters are divided."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    decayed: dict[str, Any] = {"params": matrices, "weight_decay": spec.weight_decay}
    plain: dict[str, Any] = {"params": vectors, "weight_decay": 0.0}
    fused = spec.implementation == "fused"
    # torch disables compiling of these methods, and the first call imports the compiler for it: 700 modules, a third of
    # a rank's start-up. No compiled function calls them, so the mark is removed (torch/_compile.py; else no effect).
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

    The peak is `optimizer.learning_rate`, scaled with the global batch if the plan says so (`OptimizerSpec.peak`); the
    schedule is that of the recipe at this batch (`TrainSpec.at_batch`).

    Warm-up is linear over W steps: step 0 takes 1 / W of the way from its start (zero, or the unscaled rate) to the
    peak, step W - 1 all of it (Goyal et al. 2017, section 2.2, but no step has rate 0). Afterwards, with p the share of
    the steps from W (`decay_from: start`: from 0) to T that has passed:

    - constant: the peak;
    - linear, polynomial: end + (peak - end) (1 - p) ** power, power 1 for linear; `end_learning_rate` from T on (You et
      al. 2017 for power 2);
    - cosine: end + (peak - end) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, equation 5, without restarts);
    - step: the peak times the factor of the last boundary reached, boundaries counted from step 0.

    Epochs are converted to steps by `steps_per_epoch`, without rounding; it may be None if the schedule has no epochs.
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
        steps_per_unit = epoch if schedule.epoch_boundaries else 1.0
        self._boundaries = [boundary * steps_per_unit for boundary in schedule.boundaries]

    def at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
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
        decay_start = self._warmup if schedule.decay_from == "warmup" else 0.0
        remaining = (self._total - step) / (self._total - decay_start)  # 1 - p
        if schedule.decay == "cosine":
            return end + (peak - end) * (1 - math.cos(math.pi * remaining)) / 2
        power = schedule.power if schedule.decay == "polynomial" else 1.0
        return float(end + (peak - end) * remaining**power)
