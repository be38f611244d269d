"""What is installed here, whether it works, and what to do if not. Looks only; changes nothing.

Heavy libraries are asked in processes of their own, so that a broken one cannot take the others' answers along.
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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dlbench.machine.cuda_parts import compiler_lacks, find_cuda_parts
from dlbench.machine.environment import HOST_NAME_REMEDY, host_name_problem, package_version
from dlbench.machine.gpus import AMD_LOST, HIDES, LOST, hidden_gpus, is_given_gpu, nvml_remedy, unusable
from dlbench.machine.mpi import REMEDY, foreign_owner
from dlbench.units import format_bytes, utf8_text

State = Literal["ok", "absent", "problem"]
"""absent: not here, needed only for what `needed_for` says. problem: here, but broken or unfit."""
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


@dataclass(frozen=True)
class Probe:
    """The answer of one probe."""

    name: str
    state: State
    detail: str
    remedy: str = ""
    needed_for: str = ""

    def as_dict(self) -> dict[str, str]:
        """For ``dlbench doctor --json``."""
        return {name: getattr(self, name) for name in ("name", "state", "detail", "needed_for", "remedy")}


def examine() -> list[Probe]:
    """All probes, in the order in which a person sets a machine up."""
    fast = _packages("Fast gunzip", ("isal",), "compressed TFRecord files at full speed", "data")
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
        _packages("Analysis", ("numpy", "pandas", "altair", "vl-convert-python"), "dlbench report", "analysis"),
        _packages("Data", ("h5py", "simplejpeg", "pillow", "tokenizers"), "training on files", "data"),
        _crops(),
        _packages("TFRecord", ("google-crc32c",), "data sets in TFRecord files", "data"),
        fast if fast.state == "ok" else replace(fast, detail=f"{fast.detail}; zlib is used instead, slower"),
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
    """Runs a few lines of Python in a process of its own; their JSON, or the last line of their error."""
    try:
        done = _call((python or sys.executable, "-P", "-W", "ignore", "-c", code), timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    except OSError as error:
        return f"{python or sys.executable}: {error.strerror}"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"ended with {done.returncode}"
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    return answer if isinstance(answer, dict) else "gave no answer"


def _command(*words: str) -> str | None:
    """First lines of a program's answer (either stream); None if it is missing, fails or hangs."""
    try:
        done = _call(words, 20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout + done.stderr).strip() or "no words" if done.returncode == 0 else None


def _cores() -> Probe:
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    limit = None
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            limit = int(quota) / int(period)
    detail = f"{allowed} of {present} usable" + (f", cgroup limit {limit:g}" if limit is not None else "")
    if limit is not None and limit < allowed:
        remedy = "raise the container's CPU limit, or pin with taskset: throttled cores make step times jump"
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
    built = f"CUDA {answer['cuda']}" if answer["cuda"] else f"ROCm {answer['hip']}" if answer.get("hip") else ""
    cuda = f"{built}, {answer['gpus']} GPUs" if built else "CPU build"
    nccl = "with NCCL" if answer["nccl"] else "without NCCL"
    detail = f"{answer['version']}, {cuda}, {nccl}"
    if answer["gpus"] or not is_given_gpu():
        yield Probe("PyTorch", "ok", detail)
    else:
        lost = AMD_LOST if answer.get("hip") else LOST
        reason, remedy = unusable(answer["version"], answer["cuda"], answer.get("hip")) or (detail, lost)
        yield Probe("PyTorch", "problem", f"cannot use the GPU of this machine: {reason}", f"{remedy}, or {HIDES}")
    if hidden := hidden_gpus():
        yield Probe("GPUs", "absent", *hidden, "training on GPUs")


def _compiler() -> Probe:
    """For torch.compile, of which GPUs need more: what they lack is said on any machine, as it is the login node's."""
    needed_for = "train.compile, and fused LAMB and LARS on GPUs (else train.optimizer.implementation=foreach)"
    lacks = compiler_lacks(on_gpu=True)
    if lacks is None and shutil.which(os.environ.get("CXX", "g++")) is None:
        lacks = "there is no C++ compiler", "install g++, or name one in CXX"
    if lacks is not None:
        return Probe("torch.compile", "absent", *lacks, needed_for)
    return Probe("torch.compile", "ok", "a C and a C++ compiler, and Python's header")


def _horovod() -> Iterable[Probe]:
    remedy = "dlbench setup horovod (builds it once for this Python and torch; needs g++, make, cmake)"
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
        detail += "; not dlbench's build: settings in force cannot be read back"
        yield Probe("Horovod", "problem", detail, remedy)
        return
    yield Probe("Horovod", "ok", detail)
    if not answer["mpi"] and shutil.which("mpicxx"):
        yield Probe(
            "Horovod with MPI",
            "problem",
            "Horovod was built without MPI, and MPI is here now",
            "dlbench setup horovod (builds it anew, with MPI)",
            "engine horovod with launchers mpirun and srun-mpi",
        )
    if answer["torch_cuda"]:
        yield from _horovod_on_gpus(answer)


def _horovod_on_gpus(answer: dict[str, Any]) -> Iterable[Probe]:
    if not answer["nccl"]:
        lacks = find_cuda_parts(answer["torch_cuda"], Path(answer["torch_file"]).parent.parent)
        state: State = "absent" if isinstance(lacks, str) else "problem"
        why = f"; {lacks}" if isinstance(lacks, str) else ", and NCCL and nvcc are here now"
        remedy = "dlbench setup horovod (builds it anew, with NCCL, where nothing lacks)"
        needed_for = "engine horovod on two and more GPUs (ddp needs nothing more)"
        yield Probe("Horovod with NCCL", state, f"Horovod was built without NCCL{why}", remedy, needed_for)
    elif not answer["free_timeline"]:
        yield Probe(
            "Horovod's timeline",
            "absent",
            "this build would trace every step on GPUs, so its timeline stays off there",
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
        # Slurm's programs answer nothing, not even their version, without a configuration.
        configured = "SLURM_CONF" in os.environ
        detail = "sbatch is installed, but finds no " + ("cluster by SLURM_CONF" if configured else "configuration")
        remedy = "set SLURM_CONF to the cluster's slurm.conf"
        return Probe("Slurm", "problem" if configured else "absent", detail, remedy, "dlbench submit")
    partitions = _command("sinfo", "--noheader", "--format=%R %D")
    if partitions is None:
        remedy = "set SLURM_CONF, or ask the cluster's admin"
        return Probe("Slurm", "problem", f"{answer}; no controller answers", remedy, "dlbench submit")
    listed = _command("srun", "--mpi=list") or ""
    plugins = sorted(set(re.findall(r"\b(pmix(?:_v\d)?|pmi2|cray_shasta)\b", listed)))
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
        remedy = "install NVIDIA's driver where there is a GPU; without one nothing is missing"
        return Probe("NVML", "absent", answer, remedy, "GPU telemetry")
    return Probe("NVML", "ok", f"driver {answer['driver']}; {', '.join(answer['gpus']) or 'no GPU'}")


def _packages(name: str, packages: tuple[str, ...], needed_for: str, extra: str) -> Probe:
    missing = [package for package in packages if not package_version(package)]
    if missing:
        return Probe(name, "absent", f"missing: {', '.join(missing)}", f"pip install 'dlbench[{extra}]'", needed_for)
    return Probe(name, "ok", ", ".join(f"{p} {package_version(p)}" for p in packages))


def _crops() -> Probe:
    answer = ask(
        "import json, sys; from dlbench.datasets.images.jpeg_decode import region_function; decode, told ="
        " region_function(); print(json.dumps({'told': told})) if decode else sys.exit(told)"
    )
    if isinstance(answer, str):
        return Probe("Crops of JPEGs", "absent", answer, "dlbench setup images", "training on images at full speed")
    return Probe("Crops of JPEGs", "ok", answer["told"])


def _scratch() -> Iterable[Probe]:
    for name, place in (
        ("SLURM_TMPDIR", os.environ.get("SLURM_TMPDIR")),
        ("TMPDIR", os.environ.get("TMPDIR", "/tmp")),  # noqa: S108  (looked at, not written to)
        ("shared memory", "/dev/shm"),  # noqa: S108  (as above)
    ):
        if place is None:
            continue
        title = f"Scratch {name}"
        try:
            detail = f"{place}, {format_bytes(shutil.disk_usage(place).free)} free"
        except OSError as error:
            yield Probe(title, "problem", f"{place}: {error.strerror}", f"point {name} to a folder that exists")
            continue
        if os.access(place, os.W_OK):
            yield Probe(title, "ok", detail)
        else:
            yield Probe(title, "problem", f"{detail}, not writable", "ask for write permission")
