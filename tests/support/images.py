"""An image of an environment that is packed in no time: it leads to the environment of the tests."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import sys
import sysconfig
import tarfile
from pathlib import Path

import dlbench
from dlbench.specs.container import ImageDescription, description_of
from tests.support.paths import ROOT


def write_tiny_image(file: Path) -> str:
    """Writes an image whose Python is a virtual environment of the tests' own interpreter; returns its SHA-256."""
    site = f"env/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    interpreter = os.path.realpath(sys.executable)
    packages = sysconfig.get_path("purelib")
    texts = {
        "env/pyvenv.cfg": f"home = {Path(interpreter).parent}\ninclude-system-site-packages = false\n",
        f"{site}/tests.pth": f"{ROOT}\nimport site; site.addsitedir({packages!r})\n",
    }
    with tarfile.open(file, "w") as tar:
        for name, text in texts.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("env/bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, interpreter
        tar.addfile(link)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    described = ImageDescription(
        sha256=sha256,
        bytes=file.stat().st_size,
        unpacked_bytes=0,
        files=3,
        created="2026-03-01T12:00:00Z",
        python=sys.executable,
        python_version=platform.python_version(),
        machine=platform.machine(),
        libc=" ".join(platform.libc_ver()),
        dlbench=dlbench.__version__,
        holds_interpreter=False,
    )
    description_of(file).write_text(described.model_dump_json())
    return sha256
