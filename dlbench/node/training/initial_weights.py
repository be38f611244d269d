"""Weights to begin with: of dlbench's own checkpoint, or of a file in BERT's public layout, without an optimizer.

Rank 0 reads, and the engine gives its weights to all ranks. Only safetensors are read, which hold numbers and names: a
pickle runs what its author wrote.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dlbench.errors import IncompleteDataError, UserError
from dlbench.node.training.checkpoint import Checkpoint, find_checkpoint
from dlbench.opening import file_sha256, require_file, why_unreadable
from dlbench.records.record import Setting
from dlbench.specs.weights_file import KEY, POSITIONS, UnfitNamesError, fit_names
from dlbench.specs.workload import ModelSpec

_FLOATS = {"F64", "F32", "F16", "BF16"}


def load_initial(asked: str, model: nn.Module, spec: ModelSpec) -> Setting:
    """Puts the weights of a file into a network, in place; returns what was read, for the record."""
    path = find_checkpoint(Path(asked), KEY)
    try:
        require_file(path)
        with safe_open(path, framework="pt") as file:
            is_own = "dlbench" in (file.metadata() or {})
    except OSError as error:
        raise UserError(f"{KEY} {path}: cannot be read: {why_unreadable(error)}") from None
    except SafetensorError as error:
        raise IncompleteDataError(f"{KEY} {path}: no readable safetensors file: {why_unreadable(error)}") from None
    said = _from_own(path, model) if is_own else _from_public(path, model, spec)
    evidence = f"rank 0 read {said}; SHA-256 {file_sha256(path)}"
    return Setting(key=KEY, requested=asked, effective=asked, evidence=evidence)


def _from_own(path: Path, model: nn.Module) -> str:
    """Weights and statistics of one of our own checkpoints; its sequences may have been of another length."""
    checkpoint = Checkpoint(path)
    tensors, state = checkpoint.weights(), model.state_dict()
    for name in sorted(tensors.keys() | state.keys()):
        theirs, ours = (found[name].shape if name in found else None for found in (tensors, state))
        if theirs is None or ours is None:
            where = "the checkpoint" if theirs is None else "this network"
            raise UserError(f"{KEY} {path}: does not fit: {where} has no {name}")
        is_longer = name == POSITIONS and theirs[1:] == ours[1:] and theirs[0] > ours[0]
        if theirs != ours and not is_longer:
            raise UserError(f"{KEY} {path}: does not fit: {name} has shape {list(theirs)}, this network's {list(ours)}")
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(tensors[name][: len(tensor)] if tensor.ndim else tensors[name])
    step = checkpoint.progress.step
    return f"{len(state)} tensors of dlbench's checkpoint of step {step}, without its optimizer"


def _from_public(path: Path, model: nn.Module, spec: ModelSpec) -> str:
    if spec.public_shapes() is None:
        raise UserError(f"{KEY} {path}: is no checkpoint of dlbench, and public names are known of BERT alone")
    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            there = {}
            for name in file.keys():  # noqa: SIM118
                piece = file.get_slice(name)
                there[name] = tuple(piece.get_shape())
                if piece.get_dtype() not in _FLOATS and not name.endswith("_ids"):
                    raise UserError(f"{KEY} {path}: {name} holds {piece.get_dtype()}, not floating-point numbers")
            fit = fit_names(there, {name: tuple(p.shape) for name, p in parameters.items()})
            read = {theirs: file.get_tensor(theirs) for theirs in (*fit.source.values(), *fit.copies)}
    except UnfitNamesError as error:
        raise UserError(f"{KEY} {path}: does not fit: {error}") from None
    except (OSError, SafetensorError) as error:
        raise IncompleteDataError(f"{KEY} {path}: no readable safetensors file: {why_unreadable(error)}") from None
    for name, tied in fit.copies.items():
        if not torch.equal(read[name], read[fit.source[tied]]):
            raise UserError(
                f"{KEY} {path}: does not fit: {name} differs from {fit.source[tied]}; this network ties the two"
            )
    broken = [name for name, tensor in sorted(read.items()) if not torch.isfinite(tensor).all()]
    if broken:
        raise IncompleteDataError(f"{KEY} {path}: damaged: {broken[0]} holds numbers that are not finite")
    with torch.no_grad():
        for ours, theirs in fit.source.items():
            parameters[ours].copy_(read[theirs][: len(parameters[ours])])
    cut = [f"{ours} cut from {rows:,} to {kept:,} rows" for ours, (rows, kept) in fit.cut.items()]
    copies = f"{len(fit.copies)} tied" if fit.copies else ""
    constants = f"{len(fit.constants)} constant" if fit.constants else ""
    return ", ".join(filter(None, (f"{len(fit.source)} tensors with BERT's public names", copies, constants, *cut)))
