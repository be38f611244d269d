"""Charts as static SVG, drawn in another process: vl-convert holds the interpreter's lock while it draws, and half a
second while V8 and the fonts start, which happens while runs are read.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
import resource
import subprocess
import sys
from typing import Any

from dlbench.errors import EnvironmentLacksError, RunError

VEGALITE_VERSION = "6.4"  # The language in which charts are written; vl-convert 1.9 carries it.
V8_ADDRESS_BYTES = 65 << 30  # What V8 (of vl-convert 1.9) reserves when it starts; measured.
_OTHER_ADDRESS_BYTES = 1 << 30  # Of the rest of a process that draws.
_COMMAND = (sys.executable, "-P", "-m", "dlbench.report.formats.drawing")
_TAG = re.compile(r"<[a-z][^<>]*>")
# Attributes that Vega writes for its own use, defaults, and the font, which the page gives to the outermost element.
_NEEDLESS = re.compile(
    r' (?:class="[^"]*"|role="[^"]*"|aria-[a-z]+="[^"]*"|pointer-events="none"|opacity="1"|font-family="[^"]*"'
    r'|xmlns:xlink="[^"]*"|version="[^"]*")'
)
_LONG_NUMBER = re.compile(r"\d+\.\d{3,}")
_ID = re.compile(r'(\bid="|url\(#|href="#)([A-Za-z][\w-]*)')


def require_address_space() -> None:
    """Raises `EnvironmentLacksError` if V8, which draws the charts, cannot reserve its addresses and would abort."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    if limit < V8_ADDRESS_BYTES + _OTHER_ADDRESS_BYTES:
        raise EnvironmentLacksError(
            f"charts: V8, which draws them, reserves {V8_ADDRESS_BYTES >> 30} GiB of addresses (hardly any memory), "
            f"but this shell limits addresses to {limit / 2**30:.1f} GiB (`ulimit -v`); remedy: `ulimit -v unlimited`, "
            "another machine, or a format without charts (text, md, csv, json)"
        )


@functools.cache
def start() -> subprocess.Popen[bytes]:
    """Starts the process that draws, of some 140 MB, once; it ends with this process.

    Raises EnvironmentLacksError: V8 cannot start under the limit of addresses.
    """
    require_address_space()
    # In a process group of its own, so that Ctrl-C of a terminal ends this process alone.
    process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # Closes the pipes.


def to_svg(spec: dict[str, Any], prefix: str) -> str:
    """Returns a static SVG of Vega-Lite with its data inside; `prefix` makes its ids unique in a page, and names the
    chart in errors. Charts are drawn one after the other: only one thread at a time may call it.

    Raises RunError: the process that draws died; RuntimeError: Vega cannot draw the chart.
    """
    process = start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(spec, allow_nan=False).encode("ascii") + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = b""
    if not answer.endswith(b"\n"):
        start.cache_clear()  # The next chart has a new process.
        raise RunError(f"{prefix}: the process that draws it died (out of memory?)")
    result = json.loads(answer)
    if "error" in result:
        raise RuntimeError(f"{prefix} cannot be drawn: {result['error']}")
    # Vega counts its ids on over all charts of a process; here they count from 0 in each.
    ids: dict[str, str] = {}

    def shortened(match: re.Match[str]) -> str:
        tag = _NEEDLESS.sub("", match[0])
        tag = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag)
        return _ID.sub(lambda name: name[1] + ids.setdefault(name[2], f"{prefix}-{len(ids)}"), tag)

    # About half the size, without anything that is visible; text is never changed.
    return _TAG.sub(shortened, result["svg"])


def _draw_all() -> None:
    """Draws a specification per line of standard input, and prints a line per SVG, or the reason why there is none.
    The end of the input, which comes with that of the process that wants the charts, ends it.
    """
    import vl_convert

    # V8, Vega and the fonts are loaded with the first chart.
    vl_convert.vegalite_to_svg({"mark": "text", "data": {"values": [{}]}}, vl_version=VEGALITE_VERSION)
    for spec in sys.stdin:
        try:
            answer = {"svg": vl_convert.vegalite_to_svg(spec, vl_version=VEGALITE_VERSION, allowed_base_urls=[])}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _draw_all()
