"""What a Python says of itself: where its environment, its interpreter and dlbench lie."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlbench.errors import EnvironmentLacksError, UserError

_LONG_S = 120
"""A Python on a file system of a cluster is slow at first."""

# -P: modules come from where they are installed, not from the folder in which this is called.
_QUESTION = """
import json, os, platform, sys, sysconfig
import dlbench
from dlbench import bundled
print(json.dumps({
    "executable": sys.executable, "prefix": sys.prefix, "base_prefix": sys.base_prefix,
    "base_executable": os.path.realpath(sys._base_executable), "stdlib": sysconfig.get_path("stdlib"),
    "site": sysconfig.get_path("purelib"), "version": platform.python_version(), "machine": platform.machine(),
    "libc": " ".join(platform.libc_ver()), "dlbench": os.path.dirname(os.path.realpath(dlbench.__file__)),
    "dlbench_version": dlbench.__version__, "commit": bundled.commit(),
}))
"""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """One Python."""

    executable: Path
    prefix: Path
    """Its environment."""
    base_prefix: Path
    """Where the interpreter was installed; the prefix, where it is no virtual environment (conda)."""
    base_executable: Path
    stdlib: Path
    site: Path
    """Its installed packages."""
    version: str
    machine: str
    libc: str
    dlbench: Path
    """The package that it imports, which is elsewhere where dlbench is installed editable."""
    dlbench_version: str
    commit: str

    @property
    def is_virtual(self) -> bool:
        """Whether the interpreter lies elsewhere."""
        return self.prefix != self.base_prefix

    @property
    def holds_interpreter(self) -> bool:
        """Whether an image must hold the interpreter: that of the operating system is on each node."""
        return self.base_prefix != Path("/usr")


def survey(python: str) -> Survey:
    """Asks a Python.

    Raises `EnvironmentLacksError`: it cannot be executed, or has no dlbench. `UserError`: it has no environment of its
    own.
    """
    try:
        done = subprocess.run(
            [python, "-P", "-c", _QUESTION], capture_output=True, text=True, timeout=_LONG_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentLacksError(f"--python {python}: cannot be executed: {error}") from None
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise EnvironmentLacksError(f"--python {python}: cannot load dlbench (Python 3.11 or later is needed): {last}")
    told = json.loads(done.stdout.strip().rpartition("\n")[2])
    texts = {key: told.pop(key) for key in ("version", "machine", "libc", "dlbench_version", "commit")}
    fields: dict[str, Any] = {key: Path(value) for key, value in told.items()} | texts
    found = Survey(**fields)
    if not found.is_virtual and not found.holds_interpreter:
        raise UserError(
            f"--python {python}: is the operating system's own, with its packages among the system's; make a virtual "
            "environment (python3 -m venv) and install dlbench there"
        )
    return found
