"""Vega-Lite specifications become static SVG, and the scripts that make them interactive become one bundle. Offline."""

from __future__ import annotations

import functools
import re
from typing import Any

_ID = re.compile(r'(\bid="|url\(#|href="#)([A-Za-z][\w-]*)')


def vegalite_version() -> str:
    """The Vega-Lite version (`6.4`) that altair writes, if vl-convert carries it, else vl-convert's newest."""
    import altair
    import vl_convert

    known = vl_convert.get_vegalite_versions()
    wanted = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return wanted if wanted in known else str(known[-1])


def to_svg(spec: dict[str, Any], prefix: str) -> str:
    """A static SVG to stand inside a page.

    Args:
        spec: Vega-Lite with its data inside; nothing is loaded from anywhere.
        prefix: put before every id, because several charts share one page.
    """
    import vl_convert

    svg = vl_convert.vegalite_to_svg(spec, vl_version=vegalite_version(), allowed_base_urls=[])
    return _ID.sub(lambda match: f"{match[1]}{prefix}-{match[2]}", svg)


@functools.cache
def script_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that loads nothing; sets `window.vegaEmbed`.

    Vega-Embed brings Vega's expression interpreter, so charts run under a content security policy
    without `unsafe-eval` (option `ast`).
    """
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=vegalite_version()))
