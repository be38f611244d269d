"""A diagnosis as JSON: the same numbers as the text, raw; null where a number is not finite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import dlbench
from dlbench.report.model import as_plain
from dlbench.views.causes.diagnosis_model import FORMAT, VERSION, Diagnosis


def to_json(found: Diagnosis, further: Mapping[str, Any]) -> str:
    """`format` and `version` first, then the keys of the dataclasses, then sections that are made elsewhere."""
    content = {"format": FORMAT, "version": VERSION, "dlbench_version": dlbench.__version__, **as_plain(found)}
    return json.dumps({**content, **further}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
