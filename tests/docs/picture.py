"""Draws the README's picture, the first screen of a report: ``python -m tests.docs.picture runs/demo-TIME``.

The picture is of runs really made, as Chromium shows their page; it says nothing that the page does not.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner
from PIL import Image, ImageChops
from playwright import sync_api

from dlbench.cli import cli
from tests.support.browser import FLAGS
from tests.support.paths import ROOT

PICTURE = ROOT / "docs" / "report.png"
WIDTH, HEIGHT = 1400, 900
MARGIN = 12
"""Pixels below what the screen shows last."""
# As many as keep text legible; 24 bits of colour take three times the bytes.
COLOURS = 64


def screen_of(page: Path) -> bytes:
    """The first screen of a page as PNG, in light colours."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_timeout(500)
        return tab.screenshot()


def draw(runs: Path, picture: Path = PICTURE) -> None:
    """Writes the first screen of the report of `runs`.

    Raises:
        RuntimeError: there is no report of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        result = CliRunner().invoke(cli, ["report", str(runs), "-o", str(page)])
        if result.exit_code != 0:
            raise RuntimeError(result.output)
        image = Image.open(io.BytesIO(screen_of(page))).convert("RGB")
    *_, bottom = ImageChops.difference(
        image, Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    ).getbbox()
    image = image.crop((0, 0, image.width, min(bottom + MARGIN, image.height)))
    image.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
