"""`*.network.json`: fitted costs of a network, read back."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from dlbench.errors import IncompleteDataError, UserError
from dlbench.specs.collectives.network import NetworkModel


def read_network(path: Path) -> NetworkModel:
    """The file.

    Raises:
        UserError: there is none, or it holds something else.
        IncompleteDataError: it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}; `dlbench comm fit` makes one") from None
    except (ValueError, RecursionError) as error:
        raise IncompleteDataError(f"{path}: damaged: {str(error).splitlines()[0]}") from None
    wanted = NetworkModel.model_fields["format"].default
    if not isinstance(content, dict) or content.get("format") != wanted:
        raise UserError(f"{path}: holds no fitted costs of a network (format {wanted}); `dlbench comm fit` makes one")
    try:
        return NetworkModel.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise IncompleteDataError(f"{path}: damaged: {what}") from None
