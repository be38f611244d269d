"""Which reduced precisions this machine's processor computes in, by the flags that the kernel shows.

A library that offers bf16 on a processor without it computes in fp32 and converts before and after: oneDNN does so on
every AVX-512 CPU. The kernel's flags say whether instructions exist that multiply in the precision.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

INSTRUCTIONS = {
    "bf16": {"x86": ("avx512_bf16", "amx_bf16"), "arm": ("bf16",)},
    "fp16": {"x86": ("avx512_fp16", "amx_fp16"), "arm": ("asimdhp",)},
}
"""Flags of /proc/cpuinfo that stand for arithmetic in a precision; any of them is enough.

x86: Linux, arch/x86/include/asm/cpufeatures.h. Conversion alone (f16c, avx_ne_convert) is not arithmetic. ARM: Linux,
Documentation/arch/arm64/elf_hwcaps.rst (`asimdhp`: FEAT_FP16 for vectors).
"""

TF32_NEEDS = "TF32 is arithmetic of NVIDIA GPUs since Ampere"

NVIDIA_FILES = ("dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1")
"""What NVIDIA's driver makes; on WSL2 it is Windows' own, and there is its library instead (NVIDIA, "CUDA on WSL")."""
_GPU_FILES = dict.fromkeys(NVIDIA_FILES, ("CUDA_VISIBLE_DEVICES",)) | {
    "dev/kfd": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
}
"""Files of the drivers of NVIDIA and AMD GPUs, and what hides GPUs (ROCm, "GPU isolation techniques")."""
_IN_PROCESSORS = frozenset(
    {0, 70000, 80001, 80100, 90002, 90009, 90012, 100103, 100303, 100305, 100306, 110003, *range(110500, 110600)}
)
"""`gfx_target_version` of GPUs that are part of an AMD processor, gfx90c as 90012; 0: a processor. Source: LLVM, User
Guide for AMDGPU Backend, processors of type APU; MI300A is none of them there."""

_FIRST_CORE = 1 << 16
"""Characters that hold the lines of the first core; those of all cores are megabytes on a large machine."""


def native_precisions(root: Path = Path("/")) -> frozenset[str] | None:
    """Returns those of `bf16` and `fp16` that the CPU computes in natively; None where its flags do not say."""
    architecture = _architecture()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _start(root / "proc/cpuinfo"), re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    if not architecture or not flags:
        return None
    return frozenset(name for name, of in INSTRUCTIONS.items() if flags & set(of[architecture]))


def lacking_arithmetic(precision: str, root: Path = Path("/")) -> str:
    """Returns why this CPU would emulate a precision; empty where it would not, ranks use a GPU, or if unknown."""
    if precision == "tf32" and not has_gpu(root):
        return TF32_NEEDS
    if precision not in INSTRUCTIONS or has_gpu(root):
        return ""
    native = native_precisions(root)
    return "" if native is None or precision in native else no_arithmetic(precision)


def has_gpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks started here would find a GPU: a driver made its device files, and no variable hides all.

    CUDA reads that list up to the first entry that is neither number nor UUID: ``""``, ``-1`` and ``NoDevFiles`` hide
    all.
    """

    def names_one(variable: str) -> bool:
        first = environment.get(variable, "0").partition(",")[0].strip()
        return first.isdigit() or first.upper()[:4] in ("GPU-", "MIG-")

    shown = [file for file, by in _GPU_FILES.items() if (root / file).exists() and all(map(names_one, by))]
    return any(file != "dev/kfd" or not is_in_processor(root) for file in shown)


def is_in_processor(root: Path = Path("/")) -> bool:
    """Whether AMD's driver shows no GPU but one in the processor, which computes only where torch is built for ROCm."""
    nodes = [_start(file) for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")]
    versions = [int(number) for node in nodes for number in re.findall(r"^gfx_target_version (\d+)$", node, re.M)]
    if any(version not in _IN_PROCESSORS for version in versions):
        return False
    try:
        return "rocm" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return True


def no_arithmetic(precision: str) -> str:
    """`this CPU has no bf16 arithmetic (/proc/cpuinfo shows no avx512_bf16 or amx_bf16)`."""
    wanted = INSTRUCTIONS[precision][_architecture() or "x86"]
    return f"this CPU has no {precision} arithmetic (/proc/cpuinfo shows no {' or '.join(wanted)})"


def _architecture() -> str:
    machine = platform.machine()
    return "x86" if machine == "x86_64" else "arm" if machine == "aarch64" else ""


def _start(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_FIRST_CORE)
    except OSError:
        return ""
