"""torch's library is loaded while a rank's front is imported, with the threads that the rank will have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlbench.node.__main__ import load_library

CODE = """
import sys
from pathlib import Path
from dlbench.node.__main__ import load_library
loading = load_library(Path(sys.argv[1]))
if loading is not None:
    loading.join()
print(any("libtorch_cpu" in line for line in open("/proc/self/maps")), "torch" in sys.modules)
import torch
print(torch.get_num_threads())
"""

# Says what comes with a library of its own once a thread has begun.
WATCHED = """
import importlib._bootstrap_external as bootstrap, runpy, sys, threading
create, start, begun = bootstrap.ExtensionFileLoader.create_module, threading.Thread.start, []

def created(loader, spec):
    if begun:
        print(spec.name)
    return create(loader, spec)

def started(thread):
    print("thread")
    begun.append(thread)
    start(thread)

bootstrap.ExtensionFileLoader.create_module, threading.Thread.start = created, started
sys.argv = ["dlbench.node", sys.argv[1]]
runpy.run_module("dlbench.node", run_name="__main__")
"""


def test_no_import_waits_for_the_library(tmp_path: Path) -> None:
    """libc's loader takes one library at a time."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"layout": {"cores_per_rank": 1}}))
    done = subprocess.run([sys.executable, "-c", WATCHED, str(plan)], capture_output=True, text=True, check=False)
    assert "not a readable plan" in done.stderr
    assert done.stdout.split() == ["thread"]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("binds", [False, True])
def test_the_library_has_the_rank_s_threads(cores: int, binds: bool, tmp_path: Path) -> None:
    """One that is told to bind its threads is not loaded before the rank is bound."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"layout": {"cores_per_rank": cores}}))
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(plan)],
        env=variables | ({"OMP_PROC_BIND": "true"} if binds else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(not binds), "False", str(cores)]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"layout": null}'])
def test_a_damaged_plan_is_left_to_its_reader(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "plan.json").write_text(content)
    assert load_library(tmp_path / "plan.json") is None
    assert load_library(tmp_path / "none") is None
