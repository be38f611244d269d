"""`*.network.json`: fitted costs of a network, read back."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from dlbench.errors import IncompleteDataError, UserError
from dlbench.opening import parse_json, read_named, why_unreadable
from dlbench.specs.collectives import NetworkModel
from dlbench.specs.problems import problem_of

MAX_BYTES = 1 << 24
"""Of a file at most: it holds some numbers for each carrier and algorithm."""


def read_network(path: Path) -> NetworkModel:
    """The file.

    Raises:
        UserError: there is none, or it holds something else.
        IncompleteDataError: it is damaged.
    """
    try:
        content = parse_json(read_named(path, MAX_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why_unreadable(error)}; `dlbench comm fit` makes one") from None
    except ValueError as error:
        raise IncompleteDataError(f"{path}: damaged: {why_unreadable(error)}") from None
    wanted = NetworkModel.model_fields["format"].default
    if not isinstance(content, dict) or content.get("format") != wanted:
        raise UserError(f"{path}: holds no fitted costs of a network (format {wanted}); `dlbench comm fit` makes one")
    try:
        return NetworkModel.model_validate(content)
    except ValidationError as error:
        raise IncompleteDataError(f"{path}: damaged: {problem_of(NetworkModel, error)}") from None
