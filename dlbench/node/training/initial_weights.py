"""Initial weights, from a checkpoint of dlbench or from a file in BERT's public layout, read by rank 0.

Only safetensors are read: a pickle can run code of its author.
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
        theirs, ours = tensors[name].shape, state[name].shape
        is_longer = name == POSITIONS and theirs[1:] == ours[1:] and theirs[0] > ours[0]
        if theirs != ours and not is_longer:
            raise UserError(f"{KEY} {path}: does not fit: {name} has shape {list(theirs)}, this network's {list(ours)}")
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
