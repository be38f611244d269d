"""What a file of weights holds, by its header alone: whether a network can begin with them, before a rank starts.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, JSON: name -> type,
shape and place of each tensor, and what is no tensor under ``__metadata__``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlbench.errors import IncompleteDataError, UserError
from dlbench.opening import open_file, parse_json, why_unreadable
from dlbench.specs.recipes.public_names import Shape, UnfitNamesError, fit_names
from dlbench.specs.workload import BertModel, ModelSpec

KEY = "checkpoint.initialize_from"
MOST_HEADER = 100_000_000
"""Bytes: as much as the library that reads the tensors takes."""


def require_weights(path: Path, model: ModelSpec) -> None:
    """Proves of a file with public names that every tensor of it and of the network has its counterpart.

    Of dlbench's own checkpoints, and of a run's folder, ranks find out by themselves.

    Raises:
        UserError: it is of another network.
        IncompleteDataError: it is no safetensors file.
    """
    if path.is_dir():
        return
    try:
        header = _header(path)
        metadata = header.pop("__metadata__", None) or {}
        there = {name: tuple(int(edge) for edge in entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise IncompleteDataError(f"{KEY} {path}: no readable safetensors file: {why_unreadable(error)}") from None
    if "dlbench" in metadata:
        return
    if not isinstance(model, BertModel):
        raise UserError(f"{KEY} {path}: is no checkpoint of dlbench, and public names are known of BERT alone")
    try:
        fit_names(there, bert_shapes(model))
    except UnfitNamesError as error:
        raise UserError(f"{KEY} {path}: does not fit: {error}") from None


def _header(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MOST_HEADER:
            raise ValueError("it does not begin with the length of a header")
        content = parse_json(file.read(length))
    if not isinstance(content, dict):
        raise TypeError("its header holds no object")
    return content


def bert_shapes(model: BertModel) -> dict[str, Shape]:
    """Name -> shape of every parameter of `dlbench.node.models.bert.BertForPreTraining`."""
    hidden, inner = model.hidden_size, model.intermediate_size
    found: dict[str, Shape] = {
        "word_embedding.weight": (model.vocab_size, hidden),
        "position_embedding.weight": (model.max_positions, hidden),
        "type_embedding.weight": (model.type_vocab_size, hidden),
        "mlm_bias": (model.vocab_size,),
    }
    linears = {"pooler": (hidden, hidden), "mlm_transform": (hidden, hidden), "nsp_classifier": (2, hidden)}
    norms = ["embedding_norm", "mlm_norm"]
    for number in range(model.num_layers):
        layer = f"layers.{number}"
        linears |= {f"{layer}.attention.{part}": (hidden, hidden) for part in ("query", "key", "value", "output")}
        linears |= {f"{layer}.expand": (inner, hidden), f"{layer}.reduce": (hidden, inner)}
        norms += [f"{layer}.attention_norm", f"{layer}.output_norm"]
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        found |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return found
