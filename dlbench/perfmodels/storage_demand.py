"""What an accelerator asks of storage: samples per second that it can train on, and the bytes of a sample.

The published figures are those of MLPerf Storage, which replays training with the computing of a step replaced by a
pause of the measured length (DLIO; Devarajan et al., CCGrid 2021). Here they say what a reader must give; nothing is
replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

_STORAGE = "MLPerf Storage, configs/dlio/workload"  # github.com/mlcommons/storage.
_DLIO = "DLIO benchmark, configs/workload"
"""github.com/argonne-lcf/dlio_benchmark, whose own files of ResNet-50 are of other batches."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one accelerator takes of one workload."""

    accelerator: str
    samples_per_s: float
    sample_bytes: float | None = None  # Stored bytes of a sample of the published data set; None where there is none.
    source: str  # Where the figures are from, in words.

    @property
    def bytes_per_s(self) -> float | None:
        """With samples of the published size."""
        return None if self.sample_bytes is None else self.samples_per_s * self.sample_bytes


def _published(
    accelerator: str, *, sample_bytes: float, batch: int, step_s: float, file: str, of: str = _STORAGE
) -> Demand:
    """Batch / step time, of `reader.batch_size` and `train.computation_time`."""
    return Demand(
        accelerator=accelerator,
        samples_per_s=batch / step_s,
        sample_bytes=sample_bytes,
        source=f"{of}/{file}: batch {batch} per {step_s:g} s, samples of {sample_bytes:,.0f} bytes",
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
    "bert": (_published("V100", sample_bytes=2_500, batch=48, step_s=0.968, file="bert_v100.yaml", of=_DLIO),),
}
"""By model family, the fastest first."""
