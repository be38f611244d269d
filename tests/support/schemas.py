"""Validators of the schemas that `dlbench show --schema` prints (tests/docs/test_module_names.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema

from dlbench.cli.show import schema


@cache
def validator(name: str, part: str = "") -> Any:
    """Of a whole schema, or of a part among its `$defs`; `jsonschema.validate` would check the schema each time."""
    whole = schema(name)
    kept = {key: whole[key] for key in ("$defs", "$schema") if key in whole} | {"$ref": f"#/$defs/{part}"}
    return jsonschema.Draft202012Validator(kept if part else whole)
