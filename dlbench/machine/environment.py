"""Captures the environment of a run: machine, software, scheduler and settings; and recognises mpirun programs other
than Open MPI's, whose options launcher mpirun uses. Variables are selected by an allow-list, because an environment
contains secrets; values that look like secrets are left out.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

import dlbench
from dlbench import bundled
from dlbench.confidential import is_secret_name, is_secret_value
from dlbench.machine.gpus import adapters, hidden_gpus, nvml_session
from dlbench.units import counted, utf8_text

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
"""Lists of folders, of which only a digest is recorded: equality matters to speed, the names of folders are private."""

# Variables that launchers set for their own processes, which differ between ranks or starts.
INTERNAL = re.compile(
    r"^(OMPI_MCA_((ess|orte|plm|initial|shmem|pmix)_|btl_(vader|sm)_backing_directory$)"
    r"|HOROVOD_(RANK|SIZE|LOCAL_\w+|CROSS_\w+|HOSTNAME|GLOO_RENDEZVOUS_\w+|AUTOTUNE_LOG)$"
    r"|PMIX_(RANK|NAMESPACE|ID|HOSTNAME|SERVER_\w+|DSTORE_\w+|\w*TMPDIR|\w*URI\w*)$|MPICH_INTERFACE_HOSTNAME)"
)
# Set by dlbench itself for several ranks; a run of one rank would seem to have another environment.
_OWN_TIMELINE = ("HOROVOD_TIMELINE", "DYNAMIC")
HOST_NAME_REMEDY = (
    "write the name into /etc/hosts (for a container: --hostname and --add-host), or ask for its entry in DNS"
)
FOREIGN = {"HYDRA": "MPICH's or MVAPICH's", "Intel(R) MPI": "Intel MPI's"}
"""MPI libraries whose mpirun cannot start ranks, by a text in the output of `mpirun --version`."""

REMEDY = "load Open MPI's module or put its mpirun first on PATH, or use another launcher (local, srun-gloo, srun-mpi)"


def capture(
    problems: list[str], variables: Mapping[str, str] = os.environ, *, withheld: Collection[str] = ()
) -> dict[str, str]:
    """Returns facts that influence a run's speed, by name, without unknown ones; errors are appended to `problems`.
    `withheld`: names of other variables that must not be recorded.
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
    # Set by the launch of the rank (dlbench.jobs.scripts.containers).
    names = ("kind", "image", "sha256")
    container = {f"container.{name}": variables.get(f"DLBENCH_CONTAINER_{name.upper()}", "") for name in names}
    yield "container", partial(dict, container)
    yield "package", lambda: {f"package.{name}": package_version(name) for name in PACKAGES}
    allowed = {
        name: value
        for name, value in sorted(variables.items())
        if name not in withheld
        and (name in VARIABLES or name.startswith(VARIABLE_PREFIXES))
        and not INTERNAL.match(name)
        and (name, value) != _OWN_TIMELINE
        and not is_secret_name(name)
        and not is_secret_value(value)
    }
    for name in DIGESTED:
        if variables.get(name) and name not in withheld:
            folders = variables[name]
            digest = hashlib.sha256(folders.encode(errors="surrogateescape")).hexdigest()[:12]
            allowed[name] = f"{counted(folders.count(os.pathsep) + 1, 'folder')}, SHA-256 {digest}"
    yield "variable", partial(dict, {f"variable.{name}": value for name, value in allowed.items()})
    yield "adapter", lambda: {f"adapter.{name}.numa_node": str(node) for name, node in adapters().items()}
    yield "gpu", _gpus


def _fact(name: str, call: Callable[[], str]) -> dict[str, str]:
    return {name: call()}


def differences(mine: Mapping[str, str], reference: Mapping[str, str], ignore: Iterable[str] = ()) -> list[str]:
    """Returns the differences between two environments, each as ``key: VALUE, rank 0 has VALUE``."""
    # The boot and Slurm's topology address differ between nodes.
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
    """Returns the group of a pattern in the first line of a file that matches; empty if none does."""
    match = re.search(rf"^{pattern}", _text(path), re.MULTILINE)
    return match[1].strip() if match else ""


def package_version(package: str) -> str:
    """Returns the installed version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _mpi_library() -> str:
    """Returns the first line of the version of the MPI library in this process; empty if none is loaded. MPI-4.1,
    section 9.1.1: MPI_Get_library_version may be called before MPI_Init and after MPI_Finalize.
    """
    mapped = re.search(r"(/\S*/libmpi(?:ch)?(?:_cray|_gnu_\w+)?\.so\S*)$", _text("/proc/self/maps"), re.MULTILINE)
    if mapped is None:
        return ""
    text = ctypes.create_string_buffer(8192)  # MPICH's MPI_MAX_LIBRARY_VERSION_STRING; Open MPI's is 256.
    ctypes.CDLL(mapped[1]).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return text.value.decode(errors="replace").partition("\n")[0].strip("\0, ")


def _gpus() -> dict[str, str]:
    facts = {}
    if hidden := hidden_gpus():
        facts["gpu.unused"] = hidden.reason
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


def _memory_bytes() -> str:
    kilobytes = _line("/proc/meminfo", r"MemTotal:\s*(\d+) kB")
    return str(int(kilobytes) * 1024) if kilobytes else ""


_SINGLE: dict[str, Callable[[], str]] = {
    "host": platform.node,
    "boot_id": partial(_text, "/proc/sys/kernel/random/boot_id"),
    "os": lambda: _line("/etc/os-release", r'PRETTY_NAME="?([^"\n]+)') or platform.system(),
    "kernel": platform.release,
    "python": platform.python_version,
    "libc": lambda: " ".join(platform.libc_ver()),
    "cpu.model": lambda: _line("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor(),
    "cpu.cores": lambda: str(os.cpu_count() or ""),
    "cpu.governor": partial(_text, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    "cpu.clocksource": partial(_text, "/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    "memory.bytes": _memory_bytes,
    "memory.transparent_hugepages": partial(_line, "/sys/kernel/mm/transparent_hugepage/enabled", r".*\[(\w+)\]"),
    "mpi.library": _mpi_library,
    "dlbench.version": partial(str, dlbench.__version__),
    "dlbench.commit": bundled.commit,
    "dlbench.files": bundled.installed_files,
}
"""Functions for facts of one value each, by name."""


def host_name_problem() -> str:
    """Returns why the host's own name does not resolve to an address, without a remedy; empty if it does."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return f"the host name {utf8_text(name)!r} does not resolve on the machine itself ({reason})"
    return ""


def foreign_owner(answer: str) -> str:
    """Returns whose mpirun printed this for `--version`; empty if it is Open MPI's or unknown."""
    return next((owner for mark, owner in FOREIGN.items() if mark in answer), "")


def refusal_of(mpirun: str) -> str:
    """Returns why this mpirun cannot start ranks, with a remedy; empty if it can, or does not answer."""
    try:
        words = (mpirun, "--version")
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    owner = foreign_owner(done.stdout + done.stderr)
    return f"mpirun is {owner}, and dlbench needs Open MPI's: {REMEDY}" if owner else ""
