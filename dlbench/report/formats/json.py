"""A report as JSON: the whole structure of `dlbench.report.model`, raw numbers, null where a number is not finite."""

from __future__ import annotations

import json

from dlbench.report.model import Report, as_plain


def to_json(report: Report) -> str:
    """The report, keys in the order of the dataclasses; `format` and `version` come first."""
    return json.dumps(as_plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
