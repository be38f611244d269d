"""Determines the reduced precisions that this machine's CPU computes in, and whether it has GPUs.

A library that offers bf16 on a CPU without it computes in fp32 and converts before and after, as oneDNN does on every
AVX-512 CPU. The kernel's flags show whether instructions multiply in the precision.
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
"""Flags of /proc/cpuinfo for arithmetic in a precision; any of them is enough.

x86: Linux, arch/x86/include/asm/cpufeatures.h. Conversion alone (f16c, avx_ne_convert) is not arithmetic. ARM: Linux,
Documentation/arch/arm64/elf_hwcaps.rst (`asimdhp`: FEAT_FP16 for vectors).
"""

TF32_NEEDS = "TF32 is arithmetic of NVIDIA GPUs since Ampere"

NVIDIA_FILES = ("dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1")
"""Files of NVIDIA's driver; on WSL2 the driver is that of Windows, and there is only its library (NVIDIA, "CUDA on
WSL")."""
_GPU_FILES = dict.fromkeys(NVIDIA_FILES, ("CUDA_VISIBLE_DEVICES",)) | {
    "dev/kfd": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
}
"""Files of the drivers of NVIDIA and AMD GPUs, with the variables that hide GPUs (ROCm, "GPU isolation techniques")."""
_IN_PROCESSORS = frozenset(
    {0, 70000, 80001, 80100, 90002, 90009, 90012, 100103, 100303, 100305, 100306, 110003, *range(110500, 110600)}
)
"""`gfx_target_version` of GPUs that are part of an AMD processor, gfx90c as 90012; 0: a processor. Source: LLVM, User
Guide for AMDGPU Backend, processors of type APU, which do not include MI300A."""

_FIRST_CORE = 1 << 16
"""Characters that contain the lines of the first core; those of all cores are megabytes on a large machine."""


def native_precisions(root: Path = Path("/")) -> frozenset[str] | None:
    """Returns which of `bf16` and `fp16` the CPU computes in natively; None if its flags are unknown."""
    architecture = _architecture()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _start(root / "proc/cpuinfo"), re.MULTILINE)
    if not architecture or match is None or not match[1].strip():
        return None
    flags = set(match[1].split())
    return frozenset(name for name, by_architecture in INSTRUCTIONS.items() if flags & {*by_architecture[architecture]})


def lacking_arithmetic(precision: str, root: Path = Path("/")) -> str:
    """Returns why this CPU would emulate a precision; empty if it would not, if ranks use a GPU, or if unknown."""
    if precision == "tf32" and not has_gpu(root):
        return TF32_NEEDS
    if precision not in INSTRUCTIONS or has_gpu(root):
        return ""
    native = native_precisions(root)
    if native is None or precision in native:
        return ""
    return no_arithmetic(precision)


def has_gpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether ranks started here would find a GPU: a driver has device files, and no variable hides all GPUs.

    CUDA reads the list up to the first entry that is neither a number nor a UUID: ``""``, ``-1`` and ``NoDevFiles``
    hide all GPUs.
    """

    def shows_gpu(variable: str) -> bool:
        first_entry = environment.get(variable, "0").partition(",")[0].strip()
        return first_entry.isdigit() or first_entry.upper()[:4] in ("GPU-", "MIG-")

    for file, variables in _GPU_FILES.items():
        is_shown = (root / file).exists() and all(map(shows_gpu, variables))
        if is_shown and (file != "dev/kfd" or not is_in_processor(root)):
            return True
    return False


def is_in_processor(root: Path = Path("/")) -> bool:
    """Returns whether AMD's driver shows only a GPU in the processor, which needs a torch that is built for ROCm."""
    versions: list[int] = []
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        versions += map(int, re.findall(r"^gfx_target_version (\d+)$", _start(file), re.MULTILINE))
    if any(version not in _IN_PROCESSORS for version in versions):
        return False
    try:
        return "rocm" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return True


def no_arithmetic(precision: str) -> str:
    """Returns `this CPU has no bf16 arithmetic (/proc/cpuinfo shows no avx512_bf16 or amx_bf16)`."""
    flags = INSTRUCTIONS[precision][_architecture() or "x86"]
    return f"this CPU has no {precision} arithmetic (/proc/cpuinfo shows no {' or '.join(flags)})"


def _architecture() -> str:
    return {"x86_64": "x86", "aarch64": "arm"}.get(platform.machine(), "")


def _start(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_FIRST_CORE)
    except OSError:
        return ""
