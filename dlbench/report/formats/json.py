"""A report as JSON: its dataclasses as they are, raw numbers, null where a number is not finite.

What each report holds is said by its JSON schema, made from the same dataclasses (`schema_of`); the schemas stand under
a golden file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dlbench.report.document import Document
from dlbench.report.wording import clean

INLINE = "inline"
"""Key of the metadata of a field whose mapping stands among the fields of its owner."""
HIDDEN = "json"
"""Key of the metadata of a field: False leaves it out."""


def to_json(document: Document) -> str:
    """The report, keys in the order of the dataclasses; `format` and `version` come first."""
    return dumped(document.data)


def dumped(data: object) -> str:
    """Dataclasses as JSON text that ends with a newline."""
    return json.dumps(as_plain(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_plain(value: Any) -> Any:
    """Dataclasses, records, tuples and numbers as JSON has them; a number that is not finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, BaseModel):
        return {name: as_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {clean(str(key)): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return clean(value) if isinstance(value, str) else value


def _fields(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        if field.metadata.get(HIDDEN, True):
            plain = as_plain(getattr(value, field.name))
            found |= plain if field.metadata.get(INLINE) else {field.name: plain}
    return found
