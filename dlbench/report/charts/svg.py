"""Makes static SVG of Vega-Lite specifications, and the one script that makes charts interactive. Offline."""

from __future__ import annotations

import contextlib
import functools
import re
import resource
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import psutil

from dlbench import cache
from dlbench.errors import EnvironmentLacksError
from dlbench.report.charts.style import CONFIG, FONT

V8_ADDRESS_BYTES = 65 << 30
"""What V8 (of vl-convert 1.9) reserves when it starts: 64 GiB for its heap's cage, some for threads; measured."""

_TAG = re.compile(r"<[a-z][^<>]*>")
# Attributes that Vega writes for its own use, defaults, and the font, which the outermost element hands down.
_NEEDLESS = re.compile(
    r' (?:class="[^"]*"|role="[^"]*"|aria-[a-z]+="[^"]*"|pointer-events="none"|opacity="1"|font-family="[^"]*"'
    r'|xmlns:xlink="[^"]*"|version="[^"]*")'
)
_LONG_NUMBER = re.compile(r"\d+\.\d{3,}")
_ID = re.compile(r'(\bid="|url\(#|href="#)([A-Za-z][\w-]*)')


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Makes charts without checking them against Vega-Lite's schema, which takes longer than drawing them.

    Tests make every chart outside of it.
    """
    from altair.utils import schemapi

    with schemapi.debug_mode(False):
        yield


@functools.cache
def require_address_space() -> None:
    """Checks that V8, which draws the charts, can reserve its addresses; without them it ends the process.

    Raises `EnvironmentLacksError`: a limit on address space is below what it reserves.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    used = psutil.Process().memory_info().vms
    if limit < used + V8_ADDRESS_BYTES:
        raise EnvironmentLacksError(
            f"charts: V8, which draws them, reserves {V8_ADDRESS_BYTES >> 30} GiB of addresses (hardly any memory), "
            f"but this shell limits addresses to {limit / 2**30:.1f} GiB (`ulimit -v`); remedy: `ulimit -v unlimited`, "
            "another machine, or a format without charts (text, md, csv, json)"
        )


def vegalite_version() -> str:
    """Returns the Vega-Lite version (`6.4`) that altair writes, if vl-convert carries it, else vl-convert's newest."""
    import altair
    import vl_convert

    carried = vl_convert.get_vegalite_versions()
    written = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    if written in carried:
        return written
    return str(carried[-1])


def to_svg(spec: dict[str, Any], prefix: str) -> str:
    """Returns a static SVG of Vega-Lite with its data inside; `prefix` makes its ids unique in a page."""
    import vl_convert

    require_address_space()
    svg = vl_convert.vegalite_to_svg({**spec, "config": CONFIG}, vl_version=vegalite_version(), allowed_base_urls=[])
    # Vega counts its ids on over all charts of a process; here they count from 0 in each.
    ids: dict[str, str] = {}

    def shortened(match: re.Match[str]) -> str:
        tag = _LONG_NUMBER.sub(_rounded, _NEEDLESS.sub("", match[0]))
        return _ID.sub(with_prefix, tag)

    def with_prefix(match: re.Match[str]) -> str:
        return match[1] + ids.setdefault(match[2], f"{prefix}-{len(ids)}")

    # About half the size, without anything that is visible; text is never changed.
    svg = _TAG.sub(shortened, svg)
    return svg.replace("<svg ", f'<svg font-family="{FONT}" ', 1)


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


@functools.cache
def script_bundle() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as one script that loads nothing; it sets `window.vegaEmbed`.

    Vega-Embed has Vega's expression interpreter, so charts run under a content security policy without `unsafe-eval`
    (option `ast`). The script is cached on disk: making it takes longer than drawing all charts.
    """
    import vl_convert

    require_address_space()
    script, version = "window.vegaEmbed = vegaEmbed;", vegalite_version()

    def bundle() -> str:
        return str(vl_convert.javascript_bundle(script, vl_version=version))

    return cache.kept("scripts", script, f"{metadata.version('vl-convert-python')}, {version}", bundle) or ""
