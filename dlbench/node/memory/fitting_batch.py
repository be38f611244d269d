"""Out of memory: which batch would have fitted, tried on the rank that failed, with what else training keeps."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dlbench.errors import RunError
from dlbench.node.models.build import Batch
from dlbench.specs.training import OptimizerSpec

MAX_TRIALS = 12
"""Halvings of the batch sizes that are still in question: 4,096 of them are told apart."""
MAX_S = 60.0

_SLOTS = {"sgd": 1, "lars": 1, "lamb": 2, "adamw": 2}
"""Values of fp32 that an optimizer keeps for each parameter: momentum, or two moments."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The largest batch that passed."""

    batch: int
    """Samples of one backward pass; 0: not even one."""
    is_largest: bool
    """Whether the next larger one failed; otherwise time was up before that was known."""
    trials: int


def largest_batch(passes: Callable[[int], bool], below: int, clock: Callable[[], float] = time.monotonic) -> Fit:
    """The largest batch that passes, by halving; at most `MAX_TRIALS` trials, and none begun after `MAX_S` seconds.

    Args:
        passes: whether a batch of so many samples fits; what fits in a batch fits in a smaller one.
        below: a batch that does not.
        clock: seconds.
    """
    until = clock() + MAX_S
    fits, fails, trials = 0, below, 0
    while fails - fits > 1 and trials < MAX_TRIALS and clock() < until:
        # Small ones first while none has passed: each is quick, and the answer is often a power of two.
        batch = (fits + fails) // 2
        trials += 1
        if passes(batch):
            fits = batch
        else:
            fails = batch
    return Fit(batch=fits, is_largest=fails - fits == 1, trials=trials)


def fits_in_memory(
    model: nn.Module,
    loss_of: Callable[[Batch], torch.Tensor],
    batch_of: Callable[[int], Batch],
    device: torch.device,
    kept_bytes: int,
    beat: Callable[[str], None] = lambda _what: None,
) -> Callable[[int], bool]:
    """Whether forward and backward pass of a batch fit beside what training keeps.

    Gradients are asked for and not accumulated: no hook of an engine acts, no other rank is needed.

    Args:
        model: the network itself.
        loss_of: forward pass and loss.
        batch_of: makes a batch on the device.
        device: where.
        kept_bytes: what training will hold beside parameters and gradients, and does not hold yet.
        beat: told of each trial.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def passes(batch: int) -> bool:
        beat(f"trying a batch of {batch} in memory")
        try:
            _trial(batch)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the activations
            return False
        finally:
            _free(device)
        return True

    def _trial(batch: int) -> None:
        model.zero_grad(set_to_none=True)
        kept = torch.empty(kept_bytes, dtype=torch.uint8, device=device)
        torch.autograd.grad(loss_of(batch_of(batch)), parameters, allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        del kept

    return passes


def missing_state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> int:
    """Bytes that the optimizer will keep from its first update on; 0 once it has them."""
    if optimizer.state:
        return 0
    slots = _SLOTS.get(spec.name, 2)
    if spec.name == "sgd" and not spec.momentum:
        slots = 0
    return slots * 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def out_of_memory(words: str, fit: Fit | None, *, rank: int, batch: int, accumulation: int) -> RunError:
    """The one line of a rank that ran out of memory.

    Args:
        words: of torch, condensed.
        fit: of the backward passes' batches; None where none was tried.
        rank: this one.
        batch: samples of a rank and step, as planned.
        accumulation: backward passes of a step.
    """
    start = f"rank {rank} is out of memory at train.batch_per_rank {batch}: {words}"
    if fit is None:
        return RunError(f"{start}; a smaller batch, or train.recompute, needs less")
    if not fit.batch:
        return RunError(f"{start}; not even one sample fits: use train.recompute or a lower train.precision")
    most = "" if fit.is_largest else "at least "
    return RunError(
        f"{start}; {most}{fit.batch * accumulation} fits (by {fit.trials} trials of forward and backward passes on "
        "this rank): set train.batch_per_rank to that, or to a little less, as fragments and the exchange take some"
    )


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
