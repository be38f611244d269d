"""Vega-Lite specifications become static SVG, and the scripts that make them interactive become one bundle. Offline."""

from __future__ import annotations

import contextlib
import functools
import re
import resource
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import psutil

from dlbench.cache import kept
from dlbench.errors import EnvironmentLacksError
from dlbench.report.charts.style import CONFIG, FONT

V8_ADDRESS_BYTES = 65 << 30
"""What V8 (of vl-convert 1.9) reserves when it starts: 64 GiB for its heap's cage, some for threads; measured."""

_TAG = re.compile(r"<[a-z][^<>]*>")
# What Vega writes for its own use, defaults, and the font, which the outermost element hands down.
_NEEDLESS = re.compile(
    r' (?:class="[^"]*"|role="[^"]*"|aria-[a-z]+="[^"]*"|pointer-events="none"|opacity="1"|font-family="[^"]*"'
    r'|xmlns:xlink="[^"]*"|version="[^"]*")'
)
_LONG_NUMBER = re.compile(r"\d+\.\d{3,}")
_ID = re.compile(r'(\bid="|url\(#|href="#)([A-Za-z][\w-]*)')


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Charts made within are not checked against Vega-Lite's schema: that takes longer than drawing them.

    Tests make every chart outside of it.
    """
    from altair.utils import schemapi

    with schemapi.debug_mode(False):
        yield


@functools.cache
def require_address_space() -> None:
    """Proves, before it starts, that V8, which draws the charts, can reserve its addresses: else it ends the process.

    Raises `EnvironmentLacksError`: a limit on address space is below what it reserves.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    used = psutil.Process().memory_info().vms
    if limit < used + V8_ADDRESS_BYTES:
        raise EnvironmentLacksError(
            f"charts: V8, which draws them, reserves {V8_ADDRESS_BYTES >> 30} GiB of addresses, hardly any memory, and "
            f"this shell's limit on addresses is {limit / 2**30:.1f} GiB (`ulimit -v`); remedy: `ulimit -v unlimited`, "
            "another machine, or a format without charts (text, md, csv, json)"
        )


def vegalite_version() -> str:
    """The Vega-Lite version (`6.4`) that altair writes, if vl-convert carries it, else vl-convert's newest."""
    import altair
    import vl_convert

    known = vl_convert.get_vegalite_versions()
    wanted = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return wanted if wanted in known else str(known[-1])


def to_svg(spec: dict[str, Any], prefix: str) -> str:
    """A static SVG to stand inside a page.

    `spec`: Vega-Lite with its data inside; nothing is loaded from anywhere. `prefix`: put before every id, because
    several charts share one page.
    """
    import vl_convert

    require_address_space()
    svg = vl_convert.vegalite_to_svg({**spec, "config": CONFIG}, vl_version=vegalite_version(), allowed_base_urls=[])
    # Vega counts its ids on over all charts of a process; here they count from 0 in each.
    ids: dict[str, str] = {}
    svg = _TAG.sub(lambda match: _lighter(match[0], ids, prefix), svg)
    return svg.replace("<svg ", f'<svg font-family="{FONT}" ', 1)


def _lighter(tag: str, ids: dict[str, str], prefix: str) -> str:
    """A tag with its ids made unique and without what nobody sees: about half the size. Text is never touched."""
    tag = _NEEDLESS.sub("", tag)
    tag = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag)
    return _ID.sub(lambda match: match[1] + ids.setdefault(match[2], f"{prefix}-{len(ids)}"), tag)


@functools.cache
def script_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that loads nothing; sets `window.vegaEmbed`.

    Vega-Embed brings Vega's expression interpreter, so charts run under a content security policy
    without `unsafe-eval` (option `ast`). Kept between reports: making it takes longer than drawing all charts.
    """
    import vl_convert

    require_address_space()
    script, version = "window.vegaEmbed = vegaEmbed;", vegalite_version()

    def bundle() -> str:
        return str(vl_convert.javascript_bundle(script, vl_version=version))

    return kept("scripts", script, f"{metadata.version('vl-convert-python')}, {version}", bundle) or ""
