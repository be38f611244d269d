"""Finds what a CUDA build of Horovod and torch's compiler need: NCCL, nvcc of torch's CUDA, a C compiler.

torch from PyPI has NCCL in a separate package (`nvidia/nccl`) without the link `libnccl.so` that linkers need. From
CUDA 13 on pip can also install the compiler (`nvidia/cu13`, package nvidia-cuda-nvcc and its parts).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

_LIBRARY_FOLDERS = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_NCCL_LIBRARIES = ("libnccl_static.a", "libnccl.so", "libnccl.so.2")
"""In the order of Horovod's FindNCCL.cmake, which finds the last one only by a link without the number."""

_VERSION_PARTS = ("MAJOR", "MINOR", "PATCH")


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """An NCCL with headers and library."""

    home: Path  # Contains include/nccl.h.
    library: Path
    version: str


@dataclass(frozen=True, kw_only=True)
class Nvcc:
    """A CUDA compiler with the runtime's headers."""

    home: Path  # Contains bin/nvcc.
    version: str
    architectures: tuple[str, ...]
    """Compute capabilities that it supports, e.g. 90; empty if it does not list them."""


def compiler_lacks(
    *, on_gpu: bool, environment: Mapping[str, str] = os.environ, include: Path | None = None
) -> tuple[str, str] | None:
    """Returns what torch.compile lacks here other than a C++ compiler, and a remedy; None if nothing.

    Its code for CPUs needs Python's header (torch, _inductor/cpp_builder.py); on GPUs Triton also compiles a C module
    with CC, else gcc, else clang (triton, runtime/build.py and backends/nvidia/driver.py). `include`: folder of
    Python.h.
    """
    if on_gpu:
        names, problem = ["gcc", "clang"], "there is neither gcc nor clang"
        if "CC" in environment:
            names, problem = [environment["CC"]], f"CC={environment['CC']} is not found"
        if not any(shutil.which(name, path=environment.get("PATH", os.defpath)) for name in names):
            return f"Triton needs a C compiler, and {problem}", "install gcc, or name a compiler in CC"
    # Debian's own scheme changes the folder of packages, not of headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    folder = include or Path(sysconfig.get_path("include", scheme))
    if (folder / "Python.h").is_file():
        return None
    version = sysconfig.get_python_version()
    return (
        f"Python's header is missing ({folder}/Python.h)",
        f"install python{version}-dev (python{version}-devel on Red Hat and SUSE), or use a Python that has it",
    )


def find_cuda_parts(
    cuda: str, packages: Path | None, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> tuple[Nccl, Nvcc] | str:
    """Returns NCCL and nvcc for a torch built for CUDA, or what is missing with a remedy.

    `packages`: the folder of installed packages, torch's and NVIDIA's; None if unknown. `environment`: may name the
    folders, e.g. HOROVOD_NCCL_HOME and CUDA_HOME.
    """
    nccl = _find_nccl(packages, environment, root)
    nvcc = _find_nvcc(cuda, packages, environment, root)
    if isinstance(nccl, Nccl) and isinstance(nvcc, Nvcc):
        return nccl, nvcc
    return "; ".join(missing for missing in (nccl, nvcc) if isinstance(missing, str))


def _find_nccl(packages: Path | None, environment: Mapping[str, str], root: Path) -> Nccl | str:
    variables = [name for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if environment.get(name)]
    homes = [Path(environment[name]) for name in variables]
    searched = ", ".join(f"{name}={environment[name]}" for name in variables)
    if not variables:
        homes = [root / "usr/local/cuda", root / "usr"]
        if packages:
            # torch's own NCCL first: a process with two NCCLs would have two sets of buffers and threads.
            homes.insert(0, packages / "nvidia/nccl")
        searched = ", ".join(map(str, homes))
    problem = ""
    for home in homes:
        header = home / "include" / "nccl.h"
        if not header.is_file():
            continue
        for name, folder in product(_NCCL_LIBRARIES, _LIBRARY_FOLDERS):
            library = home / folder / name
            if library.is_file():
                return Nccl(home=home, library=library, version=_nccl_version(header))
        problem = problem or f"libnccl.so is missing next to {header}"
    return problem or f"nccl.h is missing (searched include/nccl.h in {searched}; set HOROVOD_NCCL_HOME)"


def _nccl_version(header: Path) -> str:
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = [re.search(rf"^#define\s+NCCL_{part}\s+(\d+)", text, re.MULTILINE) for part in _VERSION_PARTS]
    return ".".join(number[1] for number in numbers if number) or "unknown"


def _find_nvcc(cuda: str, packages: Path | None, environment: Mapping[str, str], root: Path) -> Nvcc | str:
    major = cuda.partition(".")[0]
    variables = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
    homes = [Path(environment[name]) for name in variables if environment.get(name)]
    if on_path := shutil.which("nvcc", path=environment.get("PATH", "")):
        # Distributions have only a link on PATH; the compiler's other files are next to its target.
        homes.append(Path(on_path).resolve().parent.parent)
    homes.append(root / "usr/local/cuda")
    if packages is not None:
        homes.append(packages / "nvidia" / f"cu{major}")
    others = []
    for home in homes:
        match = re.search(r"\bV(\d[\d.]*)", _answer((home / "bin" / "nvcc"), "--version"))
        if match is None:
            continue
        version = match[1]
        if version.partition(".")[0] != major:
            others.append(f"nvcc {version} in {home} is not of torch's CUDA {cuda}")
        elif not (home / "include" / "cuda_runtime.h").is_file():
            others.append(f"cuda_runtime.h is missing next to nvcc {version} in {home}")
        else:
            gpu_codes = _answer(home / "bin" / "nvcc", "--list-gpu-code")
            return Nvcc(home=home, version=version, architectures=tuple(re.findall(r"\bsm_(\d+)\b", gpu_codes)))
    if others:
        return others[0]
    remedy = "load its module, or set CUDA_HOME"
    if int(major or 0) >= 13:
        names = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime")
        packages_text = " ".join(f"'nvidia-{name}=={cuda}.*'" for name in names)
        remedy += f", or pip install {packages_text}"
    return f"nvcc of CUDA {cuda} is missing ({remedy})"


def _answer(program: Path, option: str) -> str:
    if not program.is_file():
        return ""
    try:
        done = subprocess.run([program, option], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
