"""Peak rates of devices and of their memory, as their makers state them, by the names that drivers give (figures with
structured sparsity count half; fp32 is IEEE arithmetic; tf32 is TF32 in matrix products); and the samples per second
that an accelerator can train on, with the bytes of a sample: those of MLPerf Storage, which replaces computing by a
pause (DLIO; Devarajan et al., CCGrid 2021).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TERA = 1e12
_UNCHECKED = "; not checked against the maker's own copy"
_HOPPER_SXM = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}
_HOPPER_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}
_HOPPER_PAPER = "NVIDIA H100 Tensor Core GPU Architecture, white paper, table 2 (dense)"
_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_HALVED = "(half of its figures with sparsity)"
_SAME_CHIP = f"{_HOPPER_PAPER}: the {{}} has the same chip"
_A100_SHEET = "NVIDIA A100 Tensor Core GPU, data sheet (dense)"
_V100_SHEET = "NVIDIA V100 Tensor Core GPU, data sheet"
_B200_BRIEF = "NVIDIA Blackwell Architecture, technical brief, HGX B200 (dense)"
_MI250X_SHEET = "AMD Instinct MI250X accelerator, data sheet, matrix (half: torch sees each of its two dies as a GPU)"
_MI300X_PAGE = "AMD Instinct MI300 series microarchitecture, ROCm documentation, MI300X, matrix"
_MI300A_SHEET = "AMD Instinct MI300A APU, data sheet, matrix (dense)"
_AMBIGUOUS: tuple[tuple[str, str], ...] = (
    (r".*\bMIG\b.*", "a MIG slice has a part of its card's peak, which the name does not say"),
    (r"(?i:INSTINCT) MI250X */.*", "the name is that of MI250X and MI250 alike, whose peaks differ"),
    (r"Graphics Device|Radeon Graphics|\s*", "the driver does not name the product"),
    (r"A100|A100-SXM4|H100|GH200", "the name does not say which variant of the product it is"),
    (r"GRID .*", "a share of a card (vGPU) has a part of its peak"),
)
_STORAGE = "MLPerf Storage, configs/dlio/workload"  # github.com/mlcommons/storage.
_DLIO = "DLIO benchmark, configs/workload"
"""In github.com/argonne-lcf/dlio_benchmark; its files of ResNet-50 have other batches and are not used."""


@dataclass(frozen=True)
class DataSheet:
    """The data sheet of one product."""

    product: str
    names: str  # Regular expression of the whole name that NVML or torch gives, without NVIDIA, Tesla and AMD.
    tflops: dict[str, float]  # Dense, 1e12 operations per second, by precision.
    memory_tb_per_s: float | None  # 1e12 bytes per second; None if cards of one name differ.
    document: str  # Document of the maker that states these figures.
    is_checked: bool = False  # Whether the figures were compared with that document itself.

    @property
    def memory_bytes_per_s(self) -> float | None:
        if self.memory_tb_per_s is None:
            return None
        return self.memory_tb_per_s * TERA

    @property
    def source(self) -> str:
        if self.is_checked:
            return self.document
        return f"{self.document}{_UNCHECKED}"


def _tensor(fp32: float, tf32: float | None, half: float) -> dict[str, float]:
    """Returns TFLOPS by precision, for products whose bf16 and fp16 are equal; tf32 may be missing."""
    tflops = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}
    return {precision: value for precision, value in tflops.items() if value is not None}


SHEETS: tuple[DataSheet, ...] = (
    DataSheet("P40", r"P40", {"fp32": 12.0}, 0.346, "NVIDIA Tesla P40, data sheet"),
    DataSheet("V100 SXM2", r"V100-SXM[23](-\d+GB(-LS)?)?", {"fp32": 15.7, "fp16": 125.0}, 0.9, _V100_SHEET),
    DataSheet("V100 PCIe", r"V100-PCIE-\d+GB", {"fp32": 14.0, "fp16": 112.0}, 0.9, _V100_SHEET),
    DataSheet("V100S PCIe", r"V100S-PCIE-32GB", {"fp32": 16.4, "fp16": 130.0}, 1.134, _V100_SHEET),
    DataSheet("A100 SXM 40 GB", r"A100-SXM4-40GB", _A100, 1.555, _A100_SHEET),
    DataSheet("A100 SXM 80 GB", r"A100-SXM4-80GB", _A100, 2.039, _A100_SHEET),
    DataSheet("A100 PCIe 40 GB", r"A100-PCI[Ee]-40GB", _A100, 1.555, _A100_SHEET),
    DataSheet("A100 PCIe 80 GB", r"A100 80GB PCIe", _A100, 1.935, _A100_SHEET),
    DataSheet("A30", r"A30", _tensor(10.3, 82.0, 165.0), 0.933, "NVIDIA A30 Tensor Core GPU, data sheet (dense)"),
    DataSheet("A40", r"A40", _tensor(37.4, 74.8, 149.7), 0.696, "NVIDIA A40, data sheet (dense)"),
    DataSheet("L4", r"L4", _tensor(30.3, 60.0, 121.0), 0.3, f"NVIDIA L4 Tensor Core GPU, data sheet {_HALVED}"),
    DataSheet("L40S", r"L40S", _tensor(91.6, 183.0, 362.05), 0.864, "NVIDIA L40S, data sheet (dense)"),
    DataSheet("H100 SXM", r"H100 80GB HBM3", _HOPPER_SXM, 3.35, _HOPPER_PAPER),
    DataSheet("H100 PCIe", r"H100 PCIe", _tensor(51.2, 378.0, 756.0), 2.0, _HOPPER_PAPER),
    DataSheet(
        "H100 NVL", r"H100 NVL", _HOPPER_NVL, 3.9, f"NVIDIA H100 Tensor Core GPU, data sheet, H100 NVL {_HALVED}"
    ),
    DataSheet("H200 SXM", r"H200", _HOPPER_SXM, 4.8, f"{_SAME_CHIP.format('H200')}; memory: NVIDIA H200, data sheet"),
    DataSheet(
        "H200 NVL", r"H200 NVL", _HOPPER_NVL, 4.8, f"NVIDIA H200 Tensor Core GPU, data sheet, H200 NVL {_HALVED}"
    ),
    # 4 with HBM3, 4.9 with HBM3e
    DataSheet("GH200", r"GH200 (480GB|120GB|144G HBM3e)", _HOPPER_SXM, None, _SAME_CHIP.format("GH200")),
    # 7.7 in an HGX, 8 in a DGX
    DataSheet("B200", r"B200", _tensor(80.0, 1100.0, 2250.0), None, _B200_BRIEF),
    DataSheet(
        "MI250X (one of its two dies)", r"(?i:INSTINCT) MI250X", _tensor(47.85, None, 191.5), 1.6384, _MI250X_SHEET
    ),
    DataSheet(
        "MI300X", r"(?i:INSTINCT) MI300X( OAM)?", _tensor(163.4, 653.7, 1307.4), 5.3, _MI300X_PAGE, is_checked=True
    ),
    DataSheet("MI300A", r"(?i:INSTINCT) MI300A", _tensor(122.6, 490.3, 980.6), 5.3, _MI300A_SHEET),
)


def sheet_of(device: str) -> DataSheet | None:
    """Returns the data sheet of a GPU by the name that NVML or torch gives, e.g. NVIDIA A100-SXM4-40GB; None: unknown
    name.
    """
    name = _plain(device)
    return next((sheet for sheet in SHEETS if re.fullmatch(sheet.names, name)), None)


def why_no_peak(device: str, precision: str) -> str:
    """Returns in a few words why no data sheet gives the peak of a GPU at a precision."""
    sheet = sheet_of(device)
    if sheet is None:
        return why_no_sheet(device)
    return f"the {sheet.product} has no {precision} units"


def why_no_sheet(device: str) -> str:
    """Returns in a few words why `sheet_of` has no sheet of a GPU."""
    name = _plain(device)
    for pattern, reason in _AMBIGUOUS:
        if re.fullmatch(pattern, name):
            return reason
    return "dlbench has no data sheet of that name"


def _plain(device: str) -> str:
    name = " ".join(device.split())
    for maker in ("NVIDIA ", "Tesla ", "AMD "):
        name = name.removeprefix(maker)
    return name


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The samples and bytes per second that one accelerator needs for one workload."""

    accelerator: str
    samples_per_s: float
    sample_bytes: float | None = None  # Stored bytes of a sample of the published data set; None without one.
    source: str  # Source of the figures, in words.

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second with samples of the published size."""
        if self.sample_bytes is None:
            return None
        return self.samples_per_s * self.sample_bytes


def _published(
    accelerator: str, *, sample_bytes: float, batch: int, step_s: float, file: str, folder: str = _STORAGE
) -> Demand:
    """Returns a demand of batch / step time: `reader.batch_size` over `train.computation_time` of the file."""
    return Demand(
        accelerator=accelerator,
        samples_per_s=batch / step_s,
        sample_bytes=sample_bytes,
        source=f"{folder}/{file}: batch {batch} per {step_s:g} s, samples of {sample_bytes:,.0f} bytes",
    )


PUBLISHED: dict[str, tuple[Demand, ...]] = {
    "resnet": (
        _published("H100", sample_bytes=114_660.07, batch=400, step_s=0.224, file="resnet50_h100.yaml"),
        _published("A100", sample_bytes=114_660.07, batch=400, step_s=0.435, file="resnet50_a100.yaml"),
    ),
    "cosmoflow": (
        _published("H100", sample_bytes=2_828_486, batch=1, step_s=0.00350, file="cosmoflow_h100.yaml"),
        _published("A100", sample_bytes=2_828_486, batch=1, step_s=0.00551, file="cosmoflow_a100.yaml"),
        _published("V100", sample_bytes=2_828_486, batch=1, step_s=0.00936, file="cosmoflow_v100.yaml"),
    ),
    "bert": (_published("V100", sample_bytes=2_500, batch=48, step_s=0.968, file="bert_v100.yaml", folder=_DLIO),),
}
"""By model family, the fastest first."""
