"""A comparison as JSON: the same numbers as the text, raw; null where a number is not known."""

from __future__ import annotations

import json

from dlbench.gate.page.model import ComparisonReport
from dlbench.report.model import as_plain


def to_json(report: ComparisonReport) -> str:
    """The report, keys in the order of the dataclasses; `format` and `version` come first."""
    return json.dumps(as_plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
