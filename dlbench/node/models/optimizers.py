"""Layer-wise adaptive optimizers, and the choice among them.

Both keep their norms per tensor and in fp32, whatever buffers the gradients were exchanged in. Tensors of at most one
dimension (biases, the scales of norms) are neither decayed nor adapted. torch's foreach kernels do the work, so that a
GPU gets tens of launches per step instead of thousands. The global-norm clip (`clip_norm`) is not here: the training
loop clips after the gradient exchange and before `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from dlbench.specs.training import OptimizerSpec

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


def _with_gradients(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    params = [p for p in group["params"] if p.grad is not None]
    return params, [cast(Tensor, p.grad) for p in params]


def _norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of each tensor, (len(tensors),), in fp32 or wider."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


class _Foreach(torch.optim.Optimizer):
    """Shared frame: the closure, then one `_update` for each parameter group."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        Args:
            closure: evaluated first with gradients on, if given; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params, grads = _with_gradients(group)
            if params:
                self._update(group, params, grads)
        return loss

    def _buffers(self, params: list[Tensor], name: str) -> list[Tensor]:
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p][name] for p in params]

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError


class Lars(_Foreach):
    """LARS (You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017, algorithm 1).

    For each tensor, with eta the trust coefficient::

        ratio = eta |w| / (|g| + weight_decay |w| + epsilon)      1 if |w| or |g| is 0, or `adapt` is off
        v = momentum v + lr ratio (g + weight_decay w)
        w = w - v

    Groups may set `lr`, `momentum`, `weight_decay`, `trust_coefficient`, `epsilon` and `adapt` (bool).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,  # Horovod builds its wrapper from parameter groups alone
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        adapt: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "epsilon": epsilon,
                "adapt": adapt,
            },
        )

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        decay = group["weight_decay"]
        update = list(torch._foreach_add(grads, params, alpha=decay)) if decay else [g.clone() for g in grads]
        if group["adapt"]:
            w, g = _norms(params), _norms(grads)
            ratio = group["trust_coefficient"] * w / (g + decay * w + group["epsilon"])
            ratio = torch.where((w > 0) & (g > 0), ratio, torch.ones_like(ratio))
            torch._foreach_mul_(update, list(ratio.unbind()))
        velocity = self._buffers(params, "velocity")
        torch._foreach_mul_(velocity, group["momentum"])
        torch._foreach_add_(velocity, update, alpha=group["lr"])
        torch._foreach_sub_(params, velocity)


class Lamb(_Foreach):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019, algorithm 2).

    For each tensor at its group's step t, counted from 1, with phi the identity::

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay w
        w = w - lr (|w| / |r|) r             ratio 1 if |w| or |r| is 0, or `adapt` is off

    Groups may set `lr`, `betas`, `epsilon`, `weight_decay` and `adapt` (bool).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,  # Horovod builds its wrapper from parameter groups alone
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "epsilon": epsilon, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, {**defaults, "step": 0})

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        group["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = self._buffers(params, "first_moment"), self._buffers(params, "second_moment")
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)

        update = list(torch._foreach_sqrt(second))
        torch._foreach_div_(update, (1 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(update, group["epsilon"])
        torch._foreach_reciprocal_(update)
        torch._foreach_mul_(update, first)
        torch._foreach_div_(update, 1 - beta1 ** group["step"])
        if group["weight_decay"]:
            torch._foreach_add_(update, params, alpha=group["weight_decay"])
        if group["adapt"]:
            w, r = _norms(params), _norms(update)
            ratio = torch.where((w > 0) & (r > 0), w / r, torch.ones_like(w))
            torch._foreach_mul_(update, list(ratio.unbind()))
        torch._foreach_add_(params, update, alpha=-group["lr"])


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """The optimizer of a specification over the trainable parameters of a model.

    Two groups: tensors of two dimensions or more, decayed (and adapted by LARS and LAMB), and the rest (biases,
    scales of norms), neither. The training loop writes the rate of each step into `group["lr"]` of both.
    `spec.clip_norm` is left to the training loop.
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
    if spec.name == "sgd":
        return torch.optim.SGD([decayed, plain], lr=spec.learning_rate, momentum=spec.momentum, foreach=True)
    groups = [{**decayed, "adapt": True}, {**plain, "adapt": False}]
    if spec.name == "lars":
        return Lars(
            groups,
            lr=spec.learning_rate,
            momentum=spec.momentum,
            trust_coefficient=spec.trust_coefficient,
            epsilon=spec.epsilon,
        )
    return Lamb(groups, lr=spec.learning_rate, betas=spec.betas, epsilon=spec.epsilon)
