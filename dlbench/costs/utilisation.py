"""Model FLOPs utilisation: what share of the hardware's peak a training turns into the model's own arithmetic.

MFU = FLOPs of training on one sample x samples per second / (peak of one rank x ranks), Chowdhery et al., "PaLM"
(2022), appendix B. Only FLOPs that the model needs are counted, none that are computed again (see
`dlbench.node.models.flops`), so MFU cannot be raised by doing work twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlbench.costs.data_sheets import TERA, sheet_of, why_no_sheet

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

    Args:
        device: name as torch or NVML tells it, e.g. NVIDIA A100-SXM4-40GB.
        precision: fp32, tf32, bf16 or fp16.
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
