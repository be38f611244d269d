"""Model FLOPs utilisation: what share of the hardware's peak a training turns into the model's own arithmetic.

MFU = FLOPs of training on one sample x samples per second / (peak of one rank x ranks), Chowdhery et al., "PaLM"
(2022), appendix B. Only FLOPs that the model needs are counted, none that are computed again (see
`dlbench.node.models.flops`), so MFU cannot be raised by doing work twice.

Peaks of GPUs are those that their makers state. Makers print figures with structured sparsity, which no training here
uses; where a sheet has only those, half is taken, as its footnote says. fp32 is IEEE arithmetic (on AMD's cards the
matrix cores' own); tf32 is NVIDIA's and AMD's TF32 in matrix products. Most figures were known from copies by others
alone: their source says so.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["TERA", "Peak", "datasheet_peak", "model_flops_utilisation", "why_no_peak"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of one device, as its maker states it."""

    flops_per_s: float
    """Dense, without sparsity, floating-point operations a second."""
    memory_bytes_per_s: float | None
    """Of its memory, bytes a second; None where cards of that name differ."""
    source: str
    """Where the number is from."""


def datasheet_peak(device: str, precision: str) -> Peak | None:
    """The stated peak of a GPU, or None where no data sheet tells one: then it must be given.

    `device`: name as torch or NVML tells it, e.g. NVIDIA A100-SXM4-40GB. `precision`: fp32, tf32, bf16 or fp16.
    """
    sheet = sheet_of(device)
    if sheet is None or precision not in sheet.tflops:
        return None
    return Peak(
        flops_per_s=sheet.tflops[precision] * TERA,
        memory_bytes_per_s=None if sheet.memory_tb_per_s is None else sheet.memory_tb_per_s * TERA,
        source=sheet.source,
    )


def why_no_peak(device: str, precision: str) -> str:
    """Why `datasheet_peak` has none, in a few words."""
    sheet = sheet_of(device)
    return why_no_sheet(device) if sheet is None else f"the {sheet.product} has no {precision} of its own"


def model_flops_utilisation(
    training_flops_per_sample: float, samples_per_s: float, peak_flops_per_s: float, ranks: int
) -> float:
    """MFU as a fraction; above 1, one of the numbers is wrong.

    `training_flops_per_sample`: forward and backward of the model, operations (not multiply-adds). `samples_per_s`:
    throughput of all ranks. `peak_flops_per_s`: peak of the device, or the cores, of one rank, for the precision in
    force. `ranks`: how many. Raises `ValueError`: a number is not positive or not finite.
    """
    numbers = {
        "training_flops_per_sample": training_flops_per_sample,
        "samples_per_s": samples_per_s,
        "peak_flops_per_s": peak_flops_per_s,
        "ranks": ranks,
    }
    for name, value in numbers.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} {value} is not a positive, finite number")
    return training_flops_per_sample * samples_per_s / (peak_flops_per_s * ranks)


TERA = 1e12
_UNCHECKED = "; not checked against the maker's own copy"


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One product."""

    product: str
    names: str
    """Regular expression of the whole name that NVML or torch tells, without NVIDIA, Tesla and AMD."""
    tflops: dict[str, float]
    """Dense, 1e12 operations a second, by precision."""
    memory_tb_per_s: float | None
    """1e12 bytes a second; None where cards of one name differ."""
    document: str
    """The maker's, that states these figures."""
    is_checked: bool = False
    """Whether the figures were held against that document itself."""

    @property
    def source(self) -> str:
        """The document, and whether the figures were not held against it."""
        return self.document if self.is_checked else f"{self.document}{_UNCHECKED}"


def _tensor(fp32: float, tf32: float | None, half: float | None) -> dict[str, float]:
    """fp32, tf32 where there is one, and bf16 and fp16 where both are alike."""
    found = {"fp32": fp32}
    if tf32 is not None:
        found["tf32"] = tf32
    if half is not None:
        found |= {"bf16": half, "fp16": half}
    return found


_HOPPER_SXM = _tensor(66.9, 494.7, 989.4)
_HOPPER_NVL = _tensor(60.0, 417.5, 835.5)
_HOPPER_PAPER = "NVIDIA H100 Tensor Core GPU Architecture, white paper, table 2 (dense)"
_A100 = _tensor(19.5, 156.0, 312.0)
_A100_SHEET = "NVIDIA A100 Tensor Core GPU, data sheet (dense)"
_V100_SHEET = "NVIDIA V100 Tensor Core GPU, data sheet"

SHEETS: tuple[Sheet, ...] = (
    Sheet(
        product="V100 SXM2",
        names=r"V100-SXM[23](-\d+GB(-LS)?)?",
        tflops={"fp32": 15.7, "fp16": 125.0},
        memory_tb_per_s=0.9,
        document=_V100_SHEET,
    ),
    Sheet(
        product="V100 PCIe",
        names=r"V100-PCIE-\d+GB",
        tflops={"fp32": 14.0, "fp16": 112.0},
        memory_tb_per_s=0.9,
        document=_V100_SHEET,
    ),
    Sheet(
        product="V100S PCIe",
        names=r"V100S-PCIE-32GB",
        tflops={"fp32": 16.4, "fp16": 130.0},
        memory_tb_per_s=1.134,
        document=_V100_SHEET,
    ),
    Sheet(product="A100 SXM 40 GB", names=r"A100-SXM4-40GB", tflops=_A100, memory_tb_per_s=1.555, document=_A100_SHEET),
    Sheet(product="A100 SXM 80 GB", names=r"A100-SXM4-80GB", tflops=_A100, memory_tb_per_s=2.039, document=_A100_SHEET),
    Sheet(
        product="A100 PCIe 40 GB", names=r"A100-PCI[Ee]-40GB", tflops=_A100, memory_tb_per_s=1.555, document=_A100_SHEET
    ),
    Sheet(
        product="A100 PCIe 80 GB", names=r"A100 80GB PCIe", tflops=_A100, memory_tb_per_s=1.935, document=_A100_SHEET
    ),
    Sheet(
        product="A30",
        names=r"A30",
        tflops=_tensor(10.3, 82.0, 165.0),
        memory_tb_per_s=0.933,
        document="NVIDIA A30 Tensor Core GPU, data sheet (dense)",
    ),
    Sheet(
        product="A40",
        names=r"A40",
        tflops=_tensor(37.4, 74.8, 149.7),
        memory_tb_per_s=0.696,
        document="NVIDIA A40, data sheet (dense)",
    ),
    Sheet(
        product="L4",
        names=r"L4",
        tflops=_tensor(30.3, 60.0, 121.0),
        memory_tb_per_s=0.3,
        document="NVIDIA L4 Tensor Core GPU, data sheet (half of its figures with sparsity)",
    ),
    Sheet(
        product="L40S",
        names=r"L40S",
        tflops=_tensor(91.6, 183.0, 362.05),
        memory_tb_per_s=0.864,
        document="NVIDIA L40S, data sheet (dense)",
    ),
    Sheet(
        product="H100 SXM", names=r"H100 80GB HBM3", tflops=_HOPPER_SXM, memory_tb_per_s=3.35, document=_HOPPER_PAPER
    ),
    Sheet(
        product="H100 PCIe",
        names=r"H100 PCIe",
        tflops=_tensor(51.2, 378.0, 756.0),
        memory_tb_per_s=2.0,
        document=_HOPPER_PAPER,
    ),
    Sheet(
        product="H100 NVL",
        names=r"H100 NVL",
        tflops=_HOPPER_NVL,
        memory_tb_per_s=3.9,
        document="NVIDIA H100 Tensor Core GPU, data sheet, H100 NVL (half of its figures with sparsity)",
    ),
    Sheet(
        product="H200 SXM",
        names=r"H200",
        tflops=_HOPPER_SXM,
        memory_tb_per_s=4.8,
        document=f"{_HOPPER_PAPER}: the H200 has the same chip; memory: NVIDIA H200, data sheet",
    ),
    Sheet(
        product="H200 NVL",
        names=r"H200 NVL",
        tflops=_HOPPER_NVL,
        memory_tb_per_s=4.8,
        document="NVIDIA H200 Tensor Core GPU, data sheet, H200 NVL (half of its figures with sparsity)",
    ),
    Sheet(
        product="GH200",
        names=r"GH200 (480GB|120GB|144G HBM3e)",
        tflops=_HOPPER_SXM,
        memory_tb_per_s=None,  # 4 with HBM3, 4.9 with HBM3e
        document=f"{_HOPPER_PAPER}: the GH200 has the same chip",
    ),
    Sheet(
        product="B200",
        names=r"B200",
        tflops=_tensor(80.0, 1100.0, 2250.0),
        memory_tb_per_s=None,  # 7.7 in an HGX, 8 in a DGX
        document="NVIDIA Blackwell Architecture, technical brief, HGX B200 (dense)",
    ),
    Sheet(
        product="MI250X (one of its two dies)",
        names=r"(?i:INSTINCT) MI250X",
        tflops=_tensor(47.85, None, 191.5),
        memory_tb_per_s=1.6384,
        document="AMD Instinct MI250X accelerator, data sheet, matrix (half: torch sees each of its two dies as a GPU)",
    ),
    Sheet(
        product="MI300X",
        names=r"(?i:INSTINCT) MI300X( OAM)?",
        tflops=_tensor(163.4, 653.7, 1307.4),
        memory_tb_per_s=5.3,
        document="AMD Instinct MI300 series microarchitecture, ROCm documentation, MI300X, matrix",
        is_checked=True,
    ),
    Sheet(
        product="MI300A",
        names=r"(?i:INSTINCT) MI300A",
        tflops=_tensor(122.6, 490.3, 980.6),
        memory_tb_per_s=5.3,
        document="AMD Instinct MI300A APU, data sheet, matrix (dense)",
    ),
)

_AMBIGUOUS: tuple[tuple[str, str], ...] = (
    (r".*\bMIG\b.*", "a MIG slice has a part of its card's peak, which the name does not tell"),
    (r"(?i:INSTINCT) MI250X */.*", "the name is that of MI250X and MI250 alike, whose peaks differ"),
    (r"Graphics Device|Radeon Graphics|\s*", "the driver tells no product"),
    (r"A100|A100-SXM4|H100|GH200", "the name does not tell which variant of the product it is"),
    (r"GRID .*", "a share of a card (vGPU) has a part of its peak"),
)


def sheet_of(device: str) -> Sheet | None:
    """The product of a GPU, by the name that NVML or torch tells; None where the table has none of that name.

    `device`: e.g. NVIDIA A100-SXM4-40GB, Tesla V100-SXM2-16GB, AMD Instinct MI250X.
    """
    name = _plain(device)
    return next((sheet for sheet in SHEETS if re.fullmatch(sheet.names, name)), None)


def why_no_sheet(device: str) -> str:
    """Why `sheet_of` has none, in a few words."""
    name = _plain(device)
    for pattern, reason in _AMBIGUOUS:
        if re.fullmatch(pattern, name):
            return reason
    return "no data sheet of that name is on file"


def _plain(device: str) -> str:
    name = " ".join(device.split())
    for maker in ("NVIDIA ", "Tesla ", "AMD "):
        name = name.removeprefix(maker)
    return name
