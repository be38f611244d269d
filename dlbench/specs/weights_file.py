"""Checks by the header of a weights file, before a rank starts, whether a network can start from it.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header in JSON: type, shape
and offsets of each tensor by name, and other data under ``__metadata__``.

BERT's public names (Devlin et al.'s release, as in PyTorch libraries) may have the prefixes ``bert.`` and ``module.``.
The decoder of the masked-LM head is tied to the word embeddings: a copy of it must be equal to them. Vocabularies and
position tables may be padded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlbench.errors import IncompleteDataError, UserError
from dlbench.opening import open_file, parse_json, why_unreadable
from dlbench.specs.workload import ModelSpec, Shape

WORDS, POSITIONS, BIAS = "word_embedding.weight", "position_embedding.weight", "mlm_bias"
MAX_PADDING = 127  # Largest number of rows that padding to a multiple of 128 adds to a vocabulary.

_LAYER = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "expand",
    "output.dense": "reduce",
    "output.LayerNorm": "output_norm",
}
_OUTSIDE = {
    "embeddings.word_embeddings": "word_embedding",
    "embeddings.position_embeddings": "position_embedding",
    "embeddings.token_type_embeddings": "type_embedding",
    "embeddings.LayerNorm": "embedding_norm",
    "pooler.dense": "pooler",
    "cls.predictions.transform.dense": "mlm_transform",
    "cls.predictions.transform.LayerNorm": "mlm_norm",
    "cls.seq_relationship": "nsp_classifier",
}
_SAME_AS = {"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": BIAS}
"""Public names of tensors that repeat another one; the bias may also be present only under this name."""
_CONSTANTS = ("embeddings.position_ids", "embeddings.token_type_ids")
"""Names that some libraries save: constants, not weights."""
_LAYER_NAME = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")

KEY = "checkpoint.initialize_from"
MOST_HEADER = 100_000_000  # Bytes: the limit of the safetensors library.


class UnfitNamesError(ValueError):
    """The tensors of a file do not fit the network; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The mapping from tensors of a file to those of the network."""

    source: Mapping[str, str]  # dlbench's name of every tensor of the network -> the file's name.
    copies: Mapping[str, str]  # The file's name of a repeated tensor -> dlbench's name of the equal tensor.
    constants: tuple[str, ...]  # The file's names of tensors that are not weights.
    cut: Mapping[str, tuple[int, int]]  # dlbench's name -> rows in the file and rows used, if they differ.


def own_name(public: str) -> str | None:
    """Returns dlbench's name for a public name; None if the network has no such tensor."""
    name = public.removeprefix("module.").removeprefix("bert.")
    name = name.replace(".dense_act.", ".dense.")
    name = re.sub(r"\.LayerNorm\.gamma$", ".LayerNorm.weight", name)
    name = re.sub(r"\.LayerNorm\.beta$", ".LayerNorm.bias", name)
    if name == "cls.predictions.bias":
        return BIAS
    if name in _SAME_AS:
        return _SAME_AS[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is not None:
        if match[2] not in _LAYER:
            return None
        return f"layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    if stem not in _OUTSIDE or kind not in ("weight", "bias"):
        return None
    return f"{_OUTSIDE[stem]}.{kind}"


def fit_names(file_shapes: Mapping[str, Shape], model_shapes: Mapping[str, Shape]) -> Fit:
    """Maps every tensor of a file to one of the network, and raises an error for those that do not fit."""
    source: dict[str, str] = {}
    copies: dict[str, str] = {}
    constants, unknown, twice = [], [], []
    for name in sorted(file_shapes):
        plain = name.removeprefix("module.").removeprefix("bert.")
        ours = own_name(name)
        if plain in _CONSTANTS:
            constants.append(name)
        elif ours is None or ours not in model_shapes:
            unknown.append(name)
        elif plain in _SAME_AS:
            copies[name] = ours
        elif ours in source:
            twice.append(f"{source[ours]} and {name}")
        else:
            source[ours] = name
    for name, ours in list(copies.items()):
        if ours == BIAS and ours not in source:
            source[ours] = name
            del copies[name]
    _refuse("is not a tensor of this network", unknown)
    _refuse("are the same tensor", twice)
    _refuse("of this network is missing", sorted(model_shapes.keys() - source.keys()))
    cut = _cut(file_shapes, model_shapes, source)
    for name, ours in copies.items():
        if file_shapes[name] != file_shapes[source[ours]]:
            raise UnfitNamesError(f"{name} repeats {source[ours]}, but has another shape")
    return Fit(source=source, copies=copies, constants=tuple(constants), cut=cut)


def _cut(
    file_shapes: Mapping[str, Shape], model_shapes: Mapping[str, Shape], source: Mapping[str, str]
) -> dict[str, tuple[int, int]]:
    """Returns the extra rows of vocabulary and positions to cut; all other shapes must be equal."""
    cut, wrong = {}, []
    for ours, shape in model_shapes.items():
        file_shape = file_shapes[source[ours]]
        if file_shape == shape:
            continue
        extra_rows = 0
        if len(file_shape) == len(shape) and file_shape[1:] == shape[1:]:
            extra_rows = file_shape[0] - shape[0]
        if extra_rows > 0 and (ours == POSITIONS or (ours in (WORDS, BIAS) and extra_rows <= MAX_PADDING)):
            cut[ours] = (file_shape[0], shape[0])
        else:
            wrong.append(f"{source[ours]} has shape {list(file_shape)}, this network's {ours} {list(shape)}")
    _refuse("", wrong)
    if (WORDS in cut) != (BIAS in cut):
        raise UnfitNamesError("word embeddings and the bias of the masked-LM head have different vocabularies")
    return cut


def _refuse(problem: str, names: list[str]) -> None:
    if names:
        message = f"{names[0]} {problem}".rstrip()
        if len(names) > 1:
            message += f" (and {len(names) - 1} more)"
        raise UnfitNamesError(message)


def require_weights(path: Path, model: ModelSpec) -> None:
    """Checks that a file with public names fits a network; ranks check dlbench's own checkpoints."""
    if path.is_dir():
        return
    try:
        header = _header(path)
        metadata = header.pop("__metadata__", None) or {}
        file_shapes = {name: tuple(int(edge) for edge in entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise IncompleteDataError(f"{KEY} {path}: not a readable safetensors file: {why_unreadable(error)}") from None
    if "dlbench" in metadata:
        return
    shapes = model.public_shapes()
    if shapes is None:
        raise UserError(f"{KEY} {path}: is not a checkpoint of dlbench, and public names are only known for BERT")
    try:
        fit_names(file_shapes, shapes)
    except UnfitNamesError as error:
        raise UserError(f"{KEY} {path}: does not fit: {error}") from None


def _header(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MOST_HEADER:
            raise ValueError("it does not begin with the length of a header")
        content = parse_json(file.read(length))
    if not isinstance(content, dict):
        raise TypeError("its header is not a JSON object")
    return content
