"""Model FLOPs utilisation: what share of the hardware's peak a training turns into the model's own arithmetic.

MFU = FLOPs of training on one sample x samples per second / (peak of one rank x ranks), Chowdhery et al., "PaLM"
(2022), appendix B. Only FLOPs that the model needs are counted, none that are computed again (see
`dlbench.node.models.flops`), so MFU cannot be raised by doing work twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of one device, as its maker states it."""

    flops_per_s: float
    """Dense, without sparsity, floating-point operations a second."""
    source: str
    """Where the number is from."""


_HOPPER_SXM = {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}
# How a name begins that NVML tells (without NVIDIA or Tesla), TFLOP/s without sparsity by precision, document. fp32 is
# without TF32; tf32 is that of the tensor cores. An H200 is matched as a whole: the slower H200 NVL begins alike.
_DATASHEETS: tuple[tuple[str, dict[str, float], str], ...] = (
    ("V100-SXM2", {"fp32": 15.7, "fp16": 125.0}, "NVIDIA V100 data sheet"),
    ("V100-PCIE", {"fp32": 14.0, "fp16": 112.0}, "NVIDIA V100 data sheet"),
    ("A100", {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}, "NVIDIA A100 data sheet"),
    ("H100 80GB HBM3", _HOPPER_SXM, "NVIDIA H100 architecture paper, SXM5"),
    ("H200", _HOPPER_SXM, "NVIDIA H100 architecture paper, SXM5: the H200 has the same chip"),
)
_WHOLE_NAMES = frozenset({"H200"})


def datasheet_peak(device: str, precision: str) -> Peak | None:
    """The stated peak of a GPU, or None where this table has none: then it must be given.

    Args:
        device: name as NVML tells it, e.g. NVIDIA A100-SXM4-40GB.
        precision: fp32, tf32, bf16 or fp16.
    """
    name = device.removeprefix("NVIDIA ").removeprefix("Tesla ")
    for beginning, rates, source in _DATASHEETS:
        if name == beginning or (name.startswith(beginning) and beginning not in _WHOLE_NAMES):
            return Peak(flops_per_s=rates[precision] * TERA, source=source) if precision in rates else None
    return None


def model_flops_utilisation(
    training_flops_per_sample: float, samples_per_s: float, peak_flops_per_s: float, ranks: int
) -> float:
    """MFU as a fraction; above 1, one of the numbers is wrong.

    Args:
        training_flops_per_sample: forward and backward of the model, operations (not multiply-adds).
        samples_per_s: throughput of all ranks.
        peak_flops_per_s: peak of the device, or the cores, of one rank, for the precision in force.
        ranks: how many.

    Raises:
        ValueError: a number is not positive or not finite.
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
