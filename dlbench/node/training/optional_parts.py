"""Parts that a plan can ask for: weights to begin with, sleeps injected into steps, and the gradient noise scale.

Only rank 0 reads weights to begin with, and only safetensors, since a pickle can run code of its author.

The noise scale: McCandlish, Kaplan, Amodei, "An Empirical Model of Large-Batch Training" (2018), appendix A.1.
With the squared norm of a gradient over b samples, E|G_b|^2 = |G|^2 + tr(S) / b, batch sizes b (one backward pass) and
B (global) give both::

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

and the noise scale is tr(S) / |G|^2. Both are averaged over steps before they are divided.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dlbench.errors import IncompleteDataError, UserError
from dlbench.node.part import Batch, Loss, TrainingPart, TrialPasses
from dlbench.node.training.checkpoint import Checkpoint, find_checkpoint
from dlbench.opening import file_sha256, require_file, why_unreadable
from dlbench.records.record import NoiseScale, RankResult, RankSummary, Setting
from dlbench.specs.watch import FaultSpec
from dlbench.specs.weights_file import KEY, POSITIONS, UnfitNamesError, fit_names
from dlbench.specs.workload import ModelSpec

_FLOATS = {"F64", "F32", "F16", "BF16"}
BACKWARD_PER_FORWARD = 2  # A backward pass counts as two forward passes, as for FLOPs: gradients of inputs and weights.
DECAY = 0.95  # Decay of the running means per step, so that about the last 20 steps count.
_HISTORY = 1000  # Steps kept in a record, at most.


def load_initial(source: str, model: nn.Module, spec: ModelSpec) -> Setting:
    """Copies the weights of a file into a network; returns a description of the file for the record."""
    path = find_checkpoint(Path(source), KEY)
    try:
        require_file(path)
        with safe_open(path, framework="pt") as file:
            is_own = "dlbench" in (file.metadata() or {})
    except OSError as error:
        raise UserError(f"{KEY} {path}: cannot be read: {why_unreadable(error)}") from None
    except SafetensorError as error:
        raise IncompleteDataError(f"{KEY} {path}: not a readable safetensors file: {why_unreadable(error)}") from None
    contents = _from_own(path, model) if is_own else _from_public(path, model, spec)
    evidence = f"rank 0 read {contents}; SHA-256 {file_sha256(path)}"
    return Setting(key=KEY, requested=source, effective=source, evidence=evidence)


def _from_own(path: Path, model: nn.Module) -> str:
    """Copies weights and batch-norm statistics of a checkpoint of dlbench; cuts longer position embeddings."""
    checkpoint = Checkpoint(path)
    tensors, state = checkpoint.weights(), model.state_dict()
    for name in sorted(tensors.keys() | state.keys()):
        if name not in tensors:
            raise UserError(f"{KEY} {path}: does not fit: the checkpoint has no {name}")
        if name not in state:
            raise UserError(f"{KEY} {path}: does not fit: this network has no {name}")
        file_shape, network_shape = tensors[name].shape, state[name].shape
        is_longer = name == POSITIONS and file_shape[1:] == network_shape[1:] and file_shape[0] > network_shape[0]
        if file_shape != network_shape and not is_longer:
            raise UserError(
                f"{KEY} {path}: does not fit: {name} has shape {list(file_shape)}, this network's {list(network_shape)}"
            )
    with torch.no_grad():
        for name, tensor in state.items():
            if name == POSITIONS:
                tensor.copy_(tensors[name][: len(tensor)])
            else:
                tensor.copy_(tensors[name])
    step = checkpoint.progress.step
    return f"{len(state)} tensors of dlbench's checkpoint of step {step}, without its optimizer"


def _from_public(path: Path, model: nn.Module, spec: ModelSpec) -> str:
    if spec.public_shapes() is None:
        raise UserError(f"{KEY} {path}: is not a checkpoint of dlbench, and public names are only known for BERT")
    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {}
            for name in file.keys():  # noqa: SIM118
                piece = file.get_slice(name)
                shapes[name] = tuple(piece.get_shape())
                if piece.get_dtype() not in _FLOATS and not name.endswith("_ids"):
                    raise UserError(f"{KEY} {path}: {name} holds {piece.get_dtype()}, not floating-point numbers")
            fit = fit_names(shapes, {name: tuple(p.shape) for name, p in parameters.items()})
            read = {theirs: file.get_tensor(theirs) for theirs in (*fit.source.values(), *fit.copies)}
    except UnfitNamesError as error:
        raise UserError(f"{KEY} {path}: does not fit: {error}") from None
    except (OSError, SafetensorError) as error:
        raise IncompleteDataError(f"{KEY} {path}: not a readable safetensors file: {why_unreadable(error)}") from None
    for name, tied in fit.copies.items():
        if not torch.equal(read[name], read[fit.source[tied]]):
            raise UserError(
                f"{KEY} {path}: does not fit: {name} differs from {fit.source[tied]}, but this network ties them"
            )
    broken = [name for name, tensor in sorted(read.items()) if not torch.isfinite(tensor).all()]
    if broken:
        raise IncompleteDataError(f"{KEY} {path}: damaged: {broken[0]} holds numbers that are not finite")
    with torch.no_grad():
        for ours, theirs in fit.source.items():
            parameters[ours].copy_(read[theirs][: len(parameters[ours])])
    contents = [f"{len(fit.source)} tensors with BERT's public names"]
    if fit.copies:
        contents.append(f"{len(fit.copies)} tied")
    if fit.constants:
        contents.append(f"{len(fit.constants)} constant")
    contents += [f"{ours} cut from {rows:,} to {needed:,} rows" for ours, (rows, needed) in fit.cut.items()]
    return ", ".join(contents)


class InjectedFault(TrainingPart):
    """Sleeps in the steps of one rank, and measures how long."""

    def __init__(self, spec: FaultSpec, rank: int) -> None:
        self._spec = spec
        self._acts = spec.acts_on(rank)
        self._counts = False
        self._injected_ns = 0

    @property
    def injected_s(self) -> float:
        return self._injected_ns / 1e9

    def begin_measuring(self) -> None:
        self._counts = True

    def rank_result(self) -> dict[str, Any]:
        return {"planted_s": self.injected_s}

    def around_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._sleep(self._spec.input_delay_s)
            yield batch

    def around_loss(self, loss: Loss) -> Loss:
        """Returns a loss that sleeps (compute_factor - 1) x 3 x its time, for which it synchronises a GPU."""
        if not self._acts or self._spec.compute_factor == 1.0:
            return loss

        def slow(model: nn.Module, batch: Batch) -> torch.Tensor:
            _synchronise(batch)
            start = time.monotonic_ns()
            batch_loss = loss(model, batch)
            _synchronise(batch)
            forward_s = (time.monotonic_ns() - start) / 1e9
            self._sleep((self._spec.compute_factor - 1) * (1 + BACKWARD_PER_FORWARD) * forward_s)
            return batch_loss

        return slow

    def end_step(self) -> None:
        self._sleep(self._spec.step_delay_s)

    def _sleep(self, seconds: float) -> None:
        if not self._acts or seconds <= 0:
            return
        start = time.monotonic_ns()
        time.sleep(seconds)
        if self._counts:
            self._injected_ns += time.monotonic_ns() - start


def _synchronise(batch: Batch) -> None:
    device = next(iter(batch.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class NoiseProbe(TrainingPart):
    """Collects squared gradient norms of one rank, without waiting for the device before the end."""

    def __init__(self, accumulation: int, *, small_batch: int, large_batch: int) -> None:
        self._accumulation, self._small_batch, self._large_batch = accumulation, small_batch, large_batch
        self._parameters: list[nn.Parameter] = []
        self._local: list[torch.Tensor] = []
        self.small: list[torch.Tensor] = []
        self.large: list[torch.Tensor] = []

    def before_wrap(self, passes: TrialPasses) -> None:
        """Hooks itself to the gradients, before the engine's own hooks, which start the exchange."""
        self._parameters = [parameter for parameter in passes.model.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            parameter.register_hook(self._add_norm)  # type: ignore[no-untyped-call]

    def _add_norm(self, gradient: torch.Tensor) -> None:
        self._local.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square())

    def after_wrap(self, passes: TrialPasses, wrapped: nn.Module) -> None:
        self._local.clear()  # gradients that a compilation computed

    def before_update(self, loss_scale: torch.Tensor | None) -> None:
        # The mean over passes of |k g|^2 / k^2 summed k times: one factor k is left.
        local = torch.stack(self._local).sum() * self._accumulation
        if loss_scale is not None:
            local = local / loss_scale / loss_scale  # the square of a scale may leave fp32
        self._local.clear()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.small.append(local)
        self.large.append(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum())

    def squared_norms(self) -> list[list[float]]:
        """Returns a pair of squared norms per step, for the small and the large batch; waits for the device."""
        if not self.small:
            return []
        pairs: list[list[float]] = torch.stack([torch.stack(self.small), torch.stack(self.large)], 1).cpu().tolist()
        return pairs

    def summary(self, result: RankResult) -> dict[str, Any]:
        return {"norms": self.squared_norms()}

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        norms = [rank.norms for rank in summaries]
        return {
            "noise_scale": estimate_noise_scale(norms, small_batch=self._small_batch, large_batch=self._large_batch)
        }


def estimate_noise_scale(
    ranks: Sequence[Sequence[Sequence[float]]], *, small_batch: int, large_batch: int
) -> NoiseScale:
    """Returns the noise scale. `ranks` holds, for each rank, the pairs of `NoiseProbe.squared_norms`."""
    steps = []
    for number, rows in enumerate(zip(*ranks, strict=True)):
        norms = np.array(rows)  # shape (ranks, 2)
        if np.isfinite(norms).all():  # steps whose gradients overflowed hold no information
            steps.append((number, sum(row[0] for row in rows) / len(rows), rows[0][1]))
    norm2 = trace = weight = 0.0
    for _, small, large in steps:
        norm2 = DECAY * norm2 + (1 - DECAY) * (large_batch * large - small_batch * small) / (large_batch - small_batch)
        trace = DECAY * trace + (1 - DECAY) * (small - large) / (1 / small_batch - 1 / large_batch)
        weight = DECAY * weight + (1 - DECAY)
    stride = -(-len(steps) // _HISTORY) or 1
    fields: dict[str, Any] = {"gradient_norm2": None, "covariance_trace": None, "noise_scale": None}
    if steps:
        fields |= {"gradient_norm2": norm2 / weight, "covariance_trace": trace / weight}
        if norm2 > 0 and trace > 0:
            fields["noise_scale"] = trace / norm2
    return NoiseScale(
        small_batch=small_batch, large_batch=large_batch, steps=len(steps), history=tuple(steps[::stride]), **fields
    )
