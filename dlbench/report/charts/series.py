"""Which series a reader may switch off in a chart: those that its legend names.

The page draws a button for each (a legend inside an SVG takes no keyboard focus), and a click into the legend itself
fades the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_SERIES = 16
"""More of them would be a wall of buttons."""

_SELECTION = "legend"


def switchable(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The field that tells series apart, and its values; None for a chart without a legend of two or more series.

    Binds the legend of that chart to a selection in passing, so that a click into it fades the other series.
    """
    for unit in _units(spec):
        colour = unit.get("encoding", {}).get("color", {})
        if colour.get("type") not in ("nominal", "ordinal") or "field" not in colour:
            continue
        # Without a legend or a scale (the data are colours) nothing names the series.
        if colour.get("legend", {}) is None or colour.get("scale", {}) is None:
            continue
        values = _values(spec, unit, colour)
        if 2 <= len(values) <= MAX_SERIES:
            _bind(unit, colour["field"])
            return {"field": colour["field"], "values": values}
    return None


def _units(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The drawn layers of a chart, in order."""
    if "layer" in spec:
        for layer in spec["layer"]:
            yield from _units(layer)
    elif "mark" in spec:
        yield spec


def _values(spec: dict[str, Any], unit: dict[str, Any], colour: dict[str, Any]) -> list[Any]:
    domain = (colour.get("scale") or {}).get("domain")
    if isinstance(domain, list):
        return domain
    data = unit.get("data") or spec.get("data") or {}
    rows = data.get("values") or spec.get("datasets", {}).get(data.get("name"), [])
    field = colour["field"]
    return list(dict.fromkeys(row[field] for row in rows if row.get(field) is not None))


def _bind(unit: dict[str, Any], field: str) -> None:
    """A click into the legend fades the other series; nothing changes before."""
    if "opacity" in unit["encoding"] or unit.get("params"):
        return
    mark = unit["mark"]
    full = mark.get("opacity", 1) if isinstance(mark, dict) else 1
    unit["params"] = [{"name": _SELECTION, "select": {"type": "point", "fields": [field]}, "bind": "legend"}]
    unit["encoding"]["opacity"] = {"condition": {"param": _SELECTION, "value": full}, "value": full * 0.15}
