"""What a CUDA build of Horovod and torch's compiler need and where it is: NCCL, nvcc of torch's CUDA, a C compiler.

torch from PyPI brings NCCL in a package of its own (`nvidia/nccl`) without the link `libnccl.so` that linkers look for,
and from CUDA 13 on the compiler can be had the same way (`nvidia/cu13`, package nvidia-cuda-nvcc and its parts).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LIBRARY_FOLDERS = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_NCCL_LIBRARIES = ("libnccl_static.a", "libnccl.so", "libnccl.so.2")
"""As Horovod's FindNCCL.cmake prefers them; the last one it finds only by a link without the number."""

_VERSION_PARTS = ("MAJOR", "MINOR", "PATCH")


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """An NCCL that can be linked with."""

    home: Path  # Holds include/nccl.h.
    library: Path
    version: str


@dataclass(frozen=True, kw_only=True)
class Nvcc:
    """A CUDA compiler with the runtime's headers."""

    home: Path  # Holds bin/nvcc.
    version: str
    architectures: tuple[str, ...]
    """Compute capabilities that it builds for, e.g. 90; empty where it does not list them."""


def compiler_lacks(
    *, on_gpu: bool, environment: Mapping[str, str] = os.environ, include: Path | None = None
) -> tuple[str, str] | None:
    """Returns what torch.compile lacks here besides a C++ compiler, and how to get it; None: nothing.

    Its programs for CPUs need Python's header (torch, _inductor/cpp_builder.py); on GPUs Triton builds a C module with
    it by CC, else gcc, else clang (triton, runtime/build.py and backends/nvidia/driver.py). `include`: where Python.h
    should be.
    """
    if on_gpu:
        named = environment.get("CC")
        names = [named] if named is not None else ["gcc", "clang"]
        if not any(shutil.which(name, path=environment.get("PATH", os.defpath)) for name in names):
            lacks = f"CC={named} is not found" if named is not None else "there is neither gcc nor clang"
            return f"Triton needs a C compiler, and {lacks}", "install gcc, or name a compiler in CC"
    # Debian's own scheme puts packages elsewhere, not headers.
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
    """Returns NCCL and nvcc for a torch built for CUDA, or what is missing and how to get it.

    `packages`: the folder that torch is installed in, where pip puts NVIDIA's packages as well; None if not known.
    `environment`: may name the places, e.g. HOROVOD_NCCL_HOME and CUDA_HOME.
    """
    nccl = _find_nccl(packages, environment, root)
    nvcc = _find_nvcc(cuda, packages, environment, root)
    if isinstance(nccl, Nccl) and isinstance(nvcc, Nvcc):
        return nccl, nvcc
    return "; ".join(missing for missing in (nccl, nvcc) if isinstance(missing, str))


def _find_nccl(packages: Path | None, environment: Mapping[str, str], root: Path) -> Nccl | str:
    named = [f"{name}={environment[name]}" for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if environment.get(name)]
    places = [Path(place.partition("=")[2]) for place in named]
    if not named:
        # torch's own first: a process with two NCCLs would have two sets of buffers and of threads.
        places = [*([packages / "nvidia/nccl"] if packages else []), root / "usr/local/cuda", root / "usr"]
    headless = ""
    for home in places:
        header = home / "include" / "nccl.h"
        if not header.is_file():
            continue
        found = (home / folder / name for name in _NCCL_LIBRARIES for folder in _LIBRARY_FOLDERS)
        if library := next((path for path in found if path.is_file()), None):
            text = header.read_text(encoding="utf-8", errors="replace")
            numbers = [re.search(rf"^#define\s+NCCL_{part}\s+(\d+)", text, re.MULTILINE) for part in _VERSION_PARTS]
            return Nccl(
                home=home, library=library, version=".".join(number[1] for number in numbers if number) or "unknown"
            )
        headless = headless or f"libnccl.so is missing beside {header}"
    looked = ", ".join(named) or ", ".join(map(str, places))
    return headless or f"nccl.h is missing (looked for include/nccl.h in {looked}; HOROVOD_NCCL_HOME names another)"


def _find_nvcc(cuda: str, packages: Path | None, environment: Mapping[str, str], root: Path) -> Nvcc | str:
    major = cuda.partition(".")[0]
    variables = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
    homes = [Path(environment[name]) for name in variables if environment.get(name)]
    if on_path := shutil.which("nvcc", path=environment.get("PATH", "")):
        # Distributions put a link there; what belongs to the compiler lies next to the file itself.
        homes.append(Path(on_path).resolve().parent.parent)
    homes.append(root / "usr/local/cuda")
    if packages is not None:
        homes.append(packages / "nvidia" / f"cu{major}")
    others = []
    for home in homes:
        match = re.search(r"\bV(\d[\d.]*)", _answer((home / "bin" / "nvcc"), "--version"))
        version = match[1] if match else None
        if version is None:
            continue
        if version.partition(".")[0] != major:
            others.append(f"nvcc {version} in {home} is not of torch's CUDA {cuda}")
        elif not (home / "include" / "cuda_runtime.h").is_file():
            others.append(f"cuda_runtime.h is missing beside nvcc {version} in {home}")
        else:
            listed = _answer(home / "bin" / "nvcc", "--list-gpu-code")
            return Nvcc(home=home, version=version, architectures=tuple(re.findall(r"\bsm_(\d+)\b", listed)))
    if others:
        return others[0]
    parts = " ".join(
        f"'nvidia-{part}=={cuda}.*'" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime")
    )
    by_pip = f", or pip install {parts}" if int(major or 0) >= 13 else ""
    return f"nvcc of CUDA {cuda} is missing (load its module, or set CUDA_HOME{by_pip})"


def _answer(program: Path, question: str) -> str:
    """What a program prints; nothing where it is not there or fails."""
    if not program.is_file():
        return ""
    try:
        done = subprocess.run([program, question], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
