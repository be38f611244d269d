"""One node of a system."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dlbench.specs.base import CountOrZero, Positive, Precision, Ranks, Spec


class NodeSpec(Spec):
    """One node of the system."""

    cores: Ranks | None = Field(
        None, description="Cores a job may use on a node; required with a scheduler; none: all that this machine has."
    )
    gpus: CountOrZero = Field(0, description="GPUs of a node.")
    ranks: Ranks | None = Field(None, description="Ranks per node; none: one per GPU, or one per node without GPUs.")

    peak_tflops: dict[Precision, Positive] = Field(
        default_factory=dict,
        description="Peak rate of one GPU, or without GPUs of one core, by precision, TFLOP/s; dense, not sparse.",
    )
    peak_source: str | None = Field(None, min_length=1, description="Where peak_tflops is from; printed with each MFU.")

    @model_validator(mode="after")
    def _peak_has_source(self) -> Self:
        if self.peak_tflops and self.peak_source is None:
            raise ValueError("peak_tflops needs peak_source: the data sheet or the measurement it is from")
        return self

    @property
    def default_ranks(self) -> int:
        """Ranks per node when nobody says otherwise."""
        return self.ranks or self.gpus or 1
