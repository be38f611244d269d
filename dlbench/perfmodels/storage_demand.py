"""The demand of an accelerator on storage: samples per second that it can train on, and the bytes of a sample. Figures
are those of MLPerf Storage, which replaces computing by a pause (DLIO; Devarajan et al., CCGrid 2021).
"""

from __future__ import annotations

from dataclasses import dataclass

_STORAGE = "MLPerf Storage, configs/dlio/workload"  # github.com/mlcommons/storage.
_DLIO = "DLIO benchmark, configs/workload"
"""In github.com/argonne-lcf/dlio_benchmark; its files of ResNet-50 have other batches and are not used."""


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
