"""Checks the ranks' Python for missing packages before a job is submitted, if this machine can execute it. Modules,
setup lines, a container or variables of the loader may change what ranks load; then they report errors themselves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from dlbench.bundled import cached
from dlbench.errors import DlbenchError, EnvironmentLacksError
from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.gpus import HIDES, is_given_gpu, unusable
from dlbench.setup.probes import ASK_HOROVOD, ask
from dlbench.specs.comm import CommPlan
from dlbench.specs.engine import HorovodBuild
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.system import SystemSpec

_REMEDIES = {
    "torch": "pip install 'dlbench[node]'",
    "mpi4py": "pip install 'dlbench[mpi]'",
    "horovod": "dlbench setup horovod",
}

_LOADERS_OWN = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD")

_WHERE = """
import glob, importlib.util, json, os, runpy, sys
found = {name: importlib.util.find_spec(name) for name in ("torch", "mpi4py", "horovod")}
folders = {name: os.path.dirname(spec.origin or "") for name, spec in found.items() if spec}
files = [os.path.join(folders["torch"], "version.py")] if "torch" in folders else []
files += sorted(glob.glob(os.path.join(folders["horovod"], "torch", "mpi_lib_v2*"))) if "horovod" in folders else []
torch = runpy.run_path(files[0]) if "torch" in folders and os.path.exists(files[0]) else {}
print(json.dumps({"prefix": sys.prefix, "installed": sorted(folders),
    "torch": [torch.get(name) for name in ("__version__", "cuda", "hip")],
    "files": [[file, os.stat(file).st_mtime_ns] for file in files]}))
"""


def is_sure(system: SystemSpec) -> bool:
    """Returns whether the result also holds on the nodes: with another Python or a login shell it may not."""
    is_this_python = system.python in (None, sys.executable) and not system.slurm.login_shell
    return is_this_python or system.scheduler == "none"


def refusal(plan: LaunchPlan) -> DlbenchError | None:
    """Returns the error that ranks of this plan would end with, if it can be known here, else None."""
    on_gpu = has_gpu() if plan.system.scheduler == "none" else plan.system.node.gpus > 0
    may_have_gpu = on_gpu or plan.system.slurm.gpu_request != "none"
    if isinstance(plan, RunPlan) and plan.engine.name == "fsdp" and plan.engine.fsdp.offload and not may_have_gpu:
        return EnvironmentLacksError(
            f"engine.fsdp.offload: system {plan.system.name} has no GPU, and on a CPU parameters are in host memory "
            "anyway; leave it out"
        )
    python = _python_of(plan.system)
    installed = _where(python) if python else None
    if python is None or installed is None:
        return None
    for package, name, alternative in _packages(plan):
        if package not in installed["installed"]:
            remedy = _REMEDIES.get(package, f"pip install {package}")
            return EnvironmentLacksError(
                f"{name} is not installed in {installed['prefix']}; remedy: {remedy}{alternative}"
            )
    version, cuda, hip = installed["torch"]
    variables = {name: value for name, value in plan.system.launch.environment.items() if isinstance(value, str)}
    if plan.system.scheduler == "none" and version and is_given_gpu(environment={**os.environ, **variables}):
        problem = unusable(version, cuda, hip)
        if problem is not None and not _sees_gpu(python):
            return EnvironmentLacksError(
                f"this machine has a GPU that torch cannot use: {problem.reason}; {problem.remedy}, or {HIDES}"
            )
    if isinstance(plan, RunPlan) and plan.engine.name == "horovod":
        return _horovod_refusal(plan, python, on_gpu=on_gpu)
    return None


def _horovod_refusal(plan: RunPlan, python: str, *, on_gpu: bool) -> DlbenchError | None:
    build = _horovod(python)
    if build is None:
        return None
    exchange = plan.sync.exchange if plan.sync.exchange.startswith("horovod-") else "flat"
    return HorovodBuild(gloo=build["gloo"], mpi=build["mpi"], nccl=build["nccl"]).refusal(
        use_mpi=plan.system.launch.by_mpi,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        on_gpu=on_gpu and bool(build["torch_cuda"] or build["torch_hip"]),
        exchange=exchange,
    )


def _python_of(system: SystemSpec) -> str | None:
    """Returns the ranks' Python if this machine can execute it as they would, else None."""
    if system.modules or system.modules_init or system.setup or system.container.kind != "none":
        return None
    if any(name in system.launch.environment for name in _LOADERS_OWN):
        return None
    python = system.python or sys.executable
    is_executable = Path(python).is_absolute() and os.access(python, os.X_OK)
    return python if is_executable else None


def _packages(plan: LaunchPlan) -> Iterator[tuple[str, str, str]]:
    """Yields the packages that ranks import, with a name for messages and an alternative that does not need it."""
    yield "torch", "torch", ""
    if isinstance(plan, RunPlan) and (package := plan.engine.kind.package):
        yield package, f"engine {plan.engine.name}", ", or choose --engine ddp"
    if isinstance(plan, CommPlan):
        # Back-ends were chosen for this Python; ranks with another one skip and report those that it lacks.
        backends = () if plan.system.python else plan.comm.backends
        if plan.comm.transport == "mpi" or "mpi" in backends:
            yield "mpi4py", "mpi4py, which carries MPI,", ""
        if "horovod" in backends:
            yield "horovod", "back-end horovod", ", or choose other --backends"


@cache
def _where(python: str) -> dict[str, Any] | None:
    answer = ask(_WHERE, python=python)
    return None if isinstance(answer, str) else answer


@cache
def _sees_gpu(python: str) -> bool:
    """Returns whether CUDA itself works: libraries for forward compatibility run a newer CUDA on an old driver."""
    answer = ask("import json, torch; print(json.dumps({'sees': torch.cuda.is_available()}))", python=python)
    return isinstance(answer, dict) and bool(answer["sees"])


@cache
def _horovod(python: str) -> dict[str, Any] | None:
    """Returns how Horovod was built; None if it does not load here, e.g. on a login node without a driver. The answer
    is cached until another torch or Horovod is installed, because importing torch takes seconds.
    """

    def find() -> str | None:
        answer = ask(ASK_HOROVOD, python=python)
        return None if isinstance(answer, str) else json.dumps(answer)

    text = cached("asked", python, json.dumps([_where(python), ASK_HOROVOD]), find)
    return None if text is None else json.loads(text)
