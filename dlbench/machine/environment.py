"""Captures the environment a run had: machine, software, scheduler, settings. Reads only; never the whole environment.

Variables are taken by an allow-list, because an environment holds secrets; of these, what looks like one is left out.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

import dlbench
from dlbench import bundled
from dlbench.confidential import is_secret_name, is_secret_value
from dlbench.machine.gpus import adapters, hidden_gpus, nvml_session
from dlbench.units import utf8_text

PACKAGES = (
    *("torch", "horovod", "mpi4py", "numpy", "h5py", "simplejpeg", "pillow", "tokenizers"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)

VARIABLE_PREFIXES = (
    *("HOROVOD_", "NCCL_", "OMP_", "MKL_", "GLOO_", "OMPI_MCA_", "UCX_", "KMP_", "TORCH_NCCL_"),
    *("ONEDNN_", "DNNL_", "MALLOC_"),
    *("CUDNN_", "CUBLAS_", "FI_", "OFI_", "SHARP_", "UCC_", "MPICH_", "PMIX_", "RCCL_", "SLURM_CPU_BIND", "SLURM_GPU"),
    *("APPTAINER_", "SINGULARITY_", "SLURM_MEM_", "SLURM_TOPOLOGY_", "SLURM_TRES_"),
)
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "LOADEDMODULES"),
    *("SLURM_DISTRIBUTION", "SLURM_EXPORT_ENV", "SLURM_HINT", "SLURM_JOB_ACCOUNT", "SLURM_JOB_QOS"),
    *("SLURM_JOB_RESERVATION", "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"),
    *("SLURM_JOB_PARTITION", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_THREADS_PER_CORE"),
    *("SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_MPI_TYPE"),
    *("ATEN_CPU_CAPABILITY", "LD_PRELOAD", "GLIBC_TUNABLES"),
)
DIGESTED = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH")
"""Lists of folders: whether two are equal matters to speed, which folders of a person they name is private."""

# What launchers tell their own processes of their place: different on every rank or at every start, set by nobody.
INTERNAL = re.compile(
    r"^(OMPI_MCA_((ess|orte|plm|initial|shmem|pmix)_|btl_(vader|sm)_backing_directory$)"
    r"|HOROVOD_(RANK|SIZE|LOCAL_\w+|CROSS_\w+|HOSTNAME|GLOO_RENDEZVOUS_\w+|AUTOTUNE_LOG)$"
    r"|PMIX_(RANK|NAMESPACE|ID|HOSTNAME|SERVER_\w+|DSTORE_\w+|\w*TMPDIR|\w*URI\w*)$|MPICH_INTERFACE_HOSTNAME)"
)

# Set by dlbench where it watches an exchange; a run of one rank has none, and would seem to run elsewhere.
_OWN_TIMELINE = ("HOROVOD_TIMELINE", "DYNAMIC")

HOST_NAME_REMEDY = (
    "write the name into /etc/hosts (for a container: --hostname and --add-host), or ask for its entry in DNS"
)


def capture(
    problems: list[str], variables: Mapping[str, str] = os.environ, *, withheld: Collection[str] = ()
) -> dict[str, str]:
    """Returns what shapes a run's speed, by name; what is not known is left out, what cannot be asked is in `problems`.

    `withheld`: names of variables that are not to be written down, besides those that look like secrets.
    """
    facts: dict[str, str] = {}
    for name, call in _facts(variables, withheld):
        try:
            facts |= call()
        except Exception as error:
            problems.append(f"environment: {name} is not known: {type(error).__name__}: {error}"[:300])
    return {key: utf8_text(value) for key, value in facts.items() if value}


def _facts(
    variables: Mapping[str, str], withheld: Collection[str]
) -> Iterable[tuple[str, Callable[[], Mapping[str, str]]]]:
    for name, call in _SINGLE.items():
        yield name, partial(_fact, name, call)
    # What the rank runs in, as its launch says it (dlbench.jobs.scripts.containers).
    names = ("kind", "image", "sha256")
    container = {f"container.{name}": variables.get(f"DLBENCH_CONTAINER_{name.upper()}", "") for name in names}
    yield "container", lambda: container
    yield "package", lambda: {f"package.{name}": package_version(name) for name in PACKAGES}
    allowed = {
        k: v
        for k, v in sorted(variables.items())
        if k not in withheld
        and (k in VARIABLES or k.startswith(VARIABLE_PREFIXES))
        and not INTERNAL.match(k)
        and (k, v) != _OWN_TIMELINE
        and not is_secret_name(k)
        and not is_secret_value(v)
    }
    yield "variable", lambda: {f"variable.{k}": v for k, v in allowed.items()}
    lists = {k: variables[k] for k in DIGESTED if variables.get(k) and k not in withheld}
    yield "list of folders", lambda: {f"variable.{k}": _list_digest(v) for k, v in lists.items()}
    yield "adapter", lambda: {f"adapter.{name}.numa_node": str(node) for name, node in adapters().items()}
    yield "gpu", _gpus


def _fact(name: str, call: Callable[[], str]) -> dict[str, str]:
    return {name: call()}


def differences(mine: Mapping[str, str], reference: Mapping[str, str], ignore: Iterable[str] = ()) -> list[str]:
    """Where one environment differs from another, each as ``key: mine, reference has ...``."""
    # A boot, and Slurm's address of a node in its network, name the node.
    skipped = {"host", "boot_id", "variable.SLURM_TOPOLOGY_ADDR", *ignore}
    keys = sorted((mine.keys() | reference.keys()) - skipped)
    return [
        f"{key}: {mine.get(key, 'not set')}, rank 0 has {reference.get(key, 'not set')}"
        for key in keys
        if mine.get(key) != reference.get(key)
    ]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _line(path: str, pattern: str) -> str:
    """The group of a pattern in the first line of a file that begins so; empty where there is none."""
    match = re.search(rf"^{pattern}", _text(path), re.MULTILINE)
    return match[1].strip() if match else ""


def package_version(package: str) -> str:
    """Returns the installed version of a package; empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _list_digest(folders: str) -> str:
    digest = hashlib.sha256(folders.encode(errors="surrogateescape")).hexdigest()[:12]
    count = folders.count(os.pathsep) + 1
    return f"{count} folder{'s' * (count > 1)}, SHA-256 {digest}"


def _mpi_library() -> str:
    """What the MPI library in this process says of itself, its first line; empty where none is loaded.

    MPI-4.1, section 9.1.1: MPI_Get_library_version may be called before MPI_Init and after MPI_Finalize.
    """
    mapped = re.search(r"(/\S*/libmpi(?:ch)?(?:_cray|_gnu_\w+)?\.so\S*)$", _text("/proc/self/maps"), re.MULTILINE)
    if mapped is None:
        return ""
    text = ctypes.create_string_buffer(8192)  # MPICH's MPI_MAX_LIBRARY_VERSION_STRING; Open MPI's is 256.
    ctypes.CDLL(mapped[1]).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return text.value.decode(errors="replace").partition("\n")[0].strip("\0, ")


def _gpus() -> dict[str, str]:
    hidden = hidden_gpus()
    facts = {"gpu.unused": hidden.reason} if hidden else {}
    with nvml_session() as nvml:
        if nvml is None:
            return facts
        try:
            facts["gpu.driver"] = str(nvml.nvmlSystemGetDriverVersion())
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                facts[f"gpu.{index}"] = str(nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError as error:
            facts["gpu.error"] = str(error)
    return facts


_SINGLE: dict[str, Callable[[], str]] = {
    "host": platform.node,
    "boot_id": lambda: _text("/proc/sys/kernel/random/boot_id"),
    "os": lambda: _line("/etc/os-release", r'PRETTY_NAME="?([^"\n]+)') or platform.system(),
    "kernel": platform.release,
    "python": platform.python_version,
    "libc": lambda: " ".join(platform.libc_ver()),
    "cpu.model": lambda: _line("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor(),
    "cpu.cores": lambda: str(os.cpu_count() or ""),
    "cpu.governor": lambda: _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    "cpu.clocksource": lambda: _text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    "memory.bytes": lambda: str(int(_line("/proc/meminfo", r"MemTotal:\s*(\d+) kB") or 0) * 1024 or ""),
    "memory.transparent_hugepages": lambda: _line("/sys/kernel/mm/transparent_hugepage/enabled", r".*\[(\w+)\]"),
    "mpi.library": _mpi_library,
    "dlbench.version": lambda: dlbench.__version__,
    "dlbench.commit": bundled.commit,
    "dlbench.files": bundled.installed_files,
}
"""Facts that are one text each, by their names."""


def host_name_problem() -> str:
    """Why the host's own name leads to no address, one line without the remedy; empty if it does."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return f"the host name {utf8_text(name)!r} does not resolve on the machine itself ({reason})"
    return ""
