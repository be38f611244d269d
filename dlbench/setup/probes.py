"""Checks what is installed here and works, with remedies, for `dlbench doctor`; changes nothing. Heavy libraries are
imported in separate processes, so that a broken one does not affect the others.

Before a job is submitted, the ranks' Python is checked for missing packages, if this machine can execute it. Modules,
setup lines, a container or variables of the loader may change what ranks load; then they report errors themselves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dlbench.bundled import cached
from dlbench.errors import DlbenchError, EnvironmentLacksError
from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.cuda_parts import compiler_lacks, find_cuda_parts
from dlbench.machine.environment import HOST_NAME_REMEDY, REMEDY, foreign_owner, host_name_problem, package_version
from dlbench.machine.gpus import AMD_LOST, HIDES, LOST, hidden_gpus, is_given_gpu, nvml_remedy, unusable
from dlbench.specs.comm import CommPlan
from dlbench.specs.engine import HorovodBuild
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.system import SystemSpec
from dlbench.units import format_bytes, utf8_text

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
State = Literal["ok", "absent", "problem"]
"""absent: not installed, and needed only for `needed_for`. problem: installed, but broken or unsuitable."""

ASK_HOROVOD = """
import ctypes, json, torch
import horovod, horovod.torch as hvd
from horovod.torch import mpi_lib_v2
library = ctypes.CDLL(mpi_lib_v2.__file__)
print(json.dumps({"version": horovod.__version__, "gloo": hvd.gloo_built(), "mpi": hvd.mpi_built(),
    "nccl": bool(hvd.nccl_built()), "cuda": hvd.cuda_built(),
    "readback": hasattr(library, "horovod_effective_cycle_time_ms"),
    "free_timeline": hasattr(library, "horovod_closed_timeline_is_free"),
    "torch_cuda": torch.version.cuda, "torch_hip": torch.version.hip, "torch_file": torch.__file__}))
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
    for package, name, alternative in _needed_packages(plan):
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
    build = _horovod_build(python)
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


def _needed_packages(plan: LaunchPlan) -> Iterator[tuple[str, str, str]]:
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
def _horovod_build(python: str) -> dict[str, Any] | None:
    """Returns how Horovod was built; None if it does not load here, e.g. on a login node without a driver. The answer
    is cached until another torch or Horovod is installed, because importing torch takes seconds.
    """

    def find() -> str | None:
        answer = ask(ASK_HOROVOD, python=python)
        return None if isinstance(answer, str) else json.dumps(answer)

    text = cached("asked", python, json.dumps([_where(python), ASK_HOROVOD]), find)
    return None if text is None else json.loads(text)


@dataclass(frozen=True)
class Probe:
    """The result of one check."""

    name: str
    state: State
    detail: str
    remedy: str = ""
    needed_for: str = ""

    def as_dict(self) -> dict[str, str]:
        """Returns the object of ``dlbench doctor --json``."""
        return {name: getattr(self, name) for name in ("name", "state", "detail", "needed_for", "remedy")}


def examine() -> list[Probe]:
    """Runs all checks, in the order in which a machine is set up."""
    gunzip = _packages("Fast gunzip", ("isal",), "compressed TFRecord files at full speed", "data")
    if gunzip.state != "ok":
        gunzip = replace(gunzip, detail=f"{gunzip.detail}; zlib is used instead, slower")
    return [
        Probe("Python", "ok", f"{sys.version.split()[0]} in {sys.prefix}"),
        _cores(),
        _host_name(),
        *_torch(),
        _compiler(),
        *_horovod(),
        _mpi(),
        _slurm(),
        _nvml(),
        _packages("Analysis", ("numpy", "pandas", "vl-convert-python"), "dlbench report", "analysis"),
        _packages("Data", ("h5py", "simplejpeg", "pillow", "tokenizers"), "training on files", "data"),
        _crops(),
        _packages("TFRecord", ("google-crc32c",), "data sets in TFRecord files", "data"),
        gunzip,
        _packages("Checkpoints", ("safetensors",), "training and its checkpoints (compute nodes)", "node"),
        *_scratch(),
    ]


def _call(words: tuple[str, ...], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def ask(code: str, timeout_s: float = 120, python: str | None = None) -> dict[str, Any] | str:
    """Runs Python code in a separate process; returns the JSON object that it prints, or the error as text."""
    try:
        done = _call((python or sys.executable, "-P", "-W", "ignore", "-c", code), timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    except OSError as error:
        return f"{python or sys.executable}: {error.strerror}"
    if done.returncode != 0:
        return done.stderr.strip().rpartition("\n")[2] or f"ended with {done.returncode}"
    with suppress(IndexError, ValueError):
        answer = json.loads(done.stdout.splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    return "gave no answer"


def _command(*words: str) -> str | None:
    try:
        done = _call(words, 20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return (done.stdout + done.stderr).strip() or "no output"


def _cores() -> Probe:
    num_usable = len(os.sched_getaffinity(0))
    detail = f"{num_usable} of {os.cpu_count() or 1} usable"
    limit: float | None = None
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            limit = int(quota) / int(period)
    if limit is None:
        return Probe("Cores", "ok", detail)
    detail += f", cgroup limit {limit:g}"
    if limit < num_usable:
        remedy = "raise the container's CPU limit, or pin with taskset: throttling makes step times vary"
        return Probe("Cores", "problem", detail, remedy)
    return Probe("Cores", "ok", detail)


def _host_name() -> Probe:
    problem = host_name_problem()
    if problem:
        return Probe("Host name", "problem", f"{problem}; Horovod over Gloo ends by SIGSEGV", HOST_NAME_REMEDY)
    return Probe("Host name", "ok", f"{utf8_text(socket.gethostname())} resolves")


def _torch() -> Iterable[Probe]:
    if not package_version("torch"):
        yield Probe("PyTorch", "absent", "not installed", "pip install 'dlbench[node]'", "training (compute nodes)")
        return
    answer = ask(
        "import json, torch; print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda,"
        " 'hip': torch.version.hip, 'gpus': torch.cuda.device_count() if torch.cuda.is_available() else 0,"
        " 'nccl': torch.distributed.is_nccl_available()}))"
    )
    if isinstance(answer, str):
        yield Probe("PyTorch", "problem", f"does not import: {answer}", "reinstall torch in this environment")
        return
    build = "CPU build"
    if answer["cuda"]:
        build = f"CUDA {answer['cuda']}, {answer['gpus']} GPUs"
    elif answer.get("hip"):
        build = f"ROCm {answer['hip']}, {answer['gpus']} GPUs"
    nccl = "with NCCL" if answer["nccl"] else "without NCCL"
    detail = f"{answer['version']}, {build}, {nccl}"
    if answer["gpus"] or not is_given_gpu():
        yield Probe("PyTorch", "ok", detail)
    else:
        default_remedy = AMD_LOST if answer.get("hip") else LOST
        reason, remedy = unusable(answer["version"], answer["cuda"], answer.get("hip")) or (detail, default_remedy)
        yield Probe("PyTorch", "problem", f"cannot use the GPU of this machine: {reason}", f"{remedy}, or {HIDES}")
    if hidden := hidden_gpus():
        yield Probe("GPUs", "absent", *hidden, "training on GPUs")


def _compiler() -> Probe:
    """Checks torch.compile also for GPUs, even if this machine has none: it may be a login node."""
    needed_for = "train.compile, and fused LAMB and LARS on GPUs (else train.optimizer.implementation=foreach)"
    lacks = compiler_lacks(on_gpu=True)
    if lacks is None and shutil.which(os.environ.get("CXX", "g++")) is None:
        lacks = "there is no C++ compiler", "install g++, or name one in CXX"
    if lacks is not None:
        return Probe("torch.compile", "absent", *lacks, needed_for)
    return Probe("torch.compile", "ok", "a C and a C++ compiler, and Python's header")


def _horovod() -> Iterable[Probe]:
    remedy = "dlbench setup horovod (compiles it once for this Python and torch; needs g++, make, cmake)"
    if importlib.util.find_spec("horovod") is None:
        yield Probe("Horovod", "absent", "not installed", remedy, "engine horovod")
        return
    answer = ask(ASK_HOROVOD)
    if isinstance(answer, str):
        yield Probe("Horovod", "problem", f"does not load: {answer}", f"{remedy} --rebuild")
        return
    operations = [name for name in ("gloo", "mpi", "nccl", "cuda") if answer[name]]
    missing = [name for name in ("gloo", "mpi", "nccl", "cuda") if not answer[name]]
    detail = f"{answer['version']}, built with {', '.join(operations)}"
    if missing:
        detail += f"; without {', '.join(missing)}"
    if not answer["readback"]:
        detail += "; not built by dlbench: effective settings cannot be read back"
        yield Probe("Horovod", "problem", detail, remedy)
        return
    yield Probe("Horovod", "ok", detail)
    if not answer["mpi"] and shutil.which("mpicxx"):
        yield Probe(
            "Horovod with MPI",
            "problem",
            "Horovod was built without MPI, and MPI is installed now",
            "dlbench setup horovod (builds it again, with MPI)",
            "engine horovod with launchers mpirun and srun-mpi",
        )
    if answer["torch_cuda"]:
        yield from _horovod_on_gpus(answer)


def _horovod_on_gpus(answer: dict[str, Any]) -> Iterable[Probe]:
    if not answer["nccl"]:
        parts = find_cuda_parts(answer["torch_cuda"], Path(answer["torch_file"]).parent.parent)
        state: State = "problem"
        detail = "Horovod was built without NCCL, and NCCL and nvcc are installed now"
        if isinstance(parts, str):
            state, detail = "absent", f"Horovod was built without NCCL; {parts}"
        remedy = "dlbench setup horovod (builds it again, with NCCL if nothing is missing)"
        needed_for = "engine horovod on two or more GPUs (ddp needs nothing else)"
        yield Probe("Horovod with NCCL", state, detail, remedy, needed_for)
    elif not answer["free_timeline"]:
        yield Probe(
            "Horovod's timeline",
            "absent",
            "this build would trace every step on GPUs, so its timeline is not used there",
            "dlbench setup horovod",
            "messages of engine horovod on GPUs",
        )


def _mpi() -> Probe:
    answer = _command("mpirun", "--version")
    if answer is None:
        remedy = "install Open MPI with its headers (Debian: openmpi-bin libopenmpi-dev) or load its module, "
        remedy += "then dlbench setup horovod"
        needed_for = "launchers mpirun and srun-mpi with Horovod"
        return Probe("MPI", "absent", "mpirun is not on PATH", remedy, needed_for)
    owner = foreign_owner(answer)
    if owner:
        return Probe("MPI", "problem", f"mpirun is {owner}, and dlbench needs Open MPI's", REMEDY, "launcher mpirun")
    compiler = "with mpicxx" if shutil.which("mpicxx") else "without mpicxx: Horovod cannot be built for it"
    return Probe("MPI", "ok", f"{answer.splitlines()[0]}, {compiler}")


def _slurm() -> Probe:
    if shutil.which("sbatch") is None:
        return Probe(
            "Slurm", "absent", "sbatch is not on PATH", "submit from a login node of the cluster", "dlbench submit"
        )
    answer = _command("sbatch", "--version")
    if answer is None:
        # Without a configuration Slurm's programs do not even print their version.
        remedy = "set SLURM_CONF to the cluster's slurm.conf"
        if "SLURM_CONF" in os.environ:
            detail = "sbatch is installed, but finds no cluster by SLURM_CONF"
            return Probe("Slurm", "problem", detail, remedy, "dlbench submit")
        detail = "sbatch is installed, but finds no configuration"
        return Probe("Slurm", "absent", detail, remedy, "dlbench submit")
    partitions = _command("sinfo", "--noheader", "--format=%R %D")
    if partitions is None:
        remedy = "set SLURM_CONF, or ask the cluster's admin"
        return Probe("Slurm", "problem", f"{answer}; no controller answers", remedy, "dlbench submit")
    plugin_list = _command("srun", "--mpi=list") or ""
    plugins = sorted(set(re.findall(r"\b(pmix(?:_v\d)?|pmi2|cray_shasta)\b", plugin_list)))
    detail = f"{answer}; partitions {', '.join(partitions.splitlines())}; srun --mpi: {', '.join(plugins) or 'none'}"
    return Probe("Slurm", "ok", detail)


def _nvml() -> Probe:
    if not package_version("nvidia-ml-py"):
        return Probe("NVML", "absent", "nvidia-ml-py is not installed", "pip install nvidia-ml-py", "GPU telemetry")
    code = (
        "import json, pynvml as n; n.nvmlInit(); print(json.dumps({'driver': n.nvmlSystemGetDriverVersion(),"
        " 'gpus': [n.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())]}))"
    )
    answer = ask(code)
    if isinstance(answer, str):
        if remedy := nvml_remedy(answer):
            return Probe("NVML", "problem", answer, remedy, "GPU telemetry")
        remedy = "install NVIDIA's driver if the machine has a GPU; otherwise nothing is missing"
        return Probe("NVML", "absent", answer, remedy, "GPU telemetry")
    return Probe("NVML", "ok", f"driver {answer['driver']}; {', '.join(answer['gpus']) or 'no GPU'}")


def _packages(name: str, packages: tuple[str, ...], needed_for: str, extra: str) -> Probe:
    missing = [package for package in packages if not package_version(package)]
    if missing:
        return Probe(name, "absent", f"missing: {', '.join(missing)}", f"pip install 'dlbench[{extra}]'", needed_for)
    return Probe(name, "ok", ", ".join(f"{p} {package_version(p)}" for p in packages))


def _crops() -> Probe:
    answer = ask(
        "import json, sys; from dlbench.datasets.images.jpeg_decode import region_function; decode, name ="
        " region_function(); print(json.dumps({'name': name})) if decode else sys.exit(name)"
    )
    if isinstance(answer, str):
        return Probe("Crops of JPEGs", "absent", answer, "dlbench setup images", "training on images at full speed")
    return Probe("Crops of JPEGs", "ok", answer["name"])


def _scratch() -> Iterable[Probe]:
    for name, place in (
        ("SLURM_TMPDIR", os.environ.get("SLURM_TMPDIR")),
        ("TMPDIR", os.environ.get("TMPDIR", "/tmp")),  # noqa: S108  (checked, not written to)
        ("shared memory", "/dev/shm"),  # noqa: S108  (as above)
    ):
        if place is None:
            continue
        title = f"Scratch {name}"
        try:
            detail = f"{place}, {format_bytes(shutil.disk_usage(place).free)} free"
        except OSError as error:
            yield Probe(title, "problem", f"{place}: {error.strerror}", f"set {name} to an existing folder")
            continue
        if os.access(place, os.W_OK):
            yield Probe(title, "ok", detail)
        else:
            yield Probe(title, "problem", f"{detail}, not writable", "ask for write permission")
