"""Peak rates of devices and of their memory by the names that drivers give, and the samples per second that an
accelerator can train on with the bytes of a sample; the tables and their sources are in `reports/devices.yaml`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from dlbench import bundled
from dlbench.specs.files import read_yaml

TERA = 1e12
_UNCHECKED = "; not checked against the maker's own copy"


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


@functools.cache
def _tables() -> dict[str, Any]:
    return read_yaml(bundled.folder("reports") / "devices.yaml")


@functools.cache
def sheets() -> tuple[DataSheet, ...]:
    """Returns all data sheets."""
    return tuple(DataSheet(**sheet) for sheet in _tables()["sheets"])


def sheet_of(device: str) -> DataSheet | None:
    """Returns the data sheet of a GPU by the name that NVML or torch gives, e.g. NVIDIA A100-SXM4-40GB; None: unknown
    name.
    """
    name = _plain(device)
    return next((sheet for sheet in sheets() if re.fullmatch(sheet.names, name)), None)


def why_no_peak(device: str, precision: str) -> str:
    """Returns in a few words why no data sheet gives the peak of a GPU at a precision."""
    sheet = sheet_of(device)
    if sheet is None:
        return why_no_sheet(device)
    return f"the {sheet.product} has no {precision} units"


def why_no_sheet(device: str) -> str:
    """Returns in a few words why `sheet_of` has no sheet of a GPU."""
    name = _plain(device)
    for ambiguous in _tables()["ambiguous"]:
        if re.fullmatch(ambiguous["names"], name):
            return str(ambiguous["reason"])
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


def published_demands(family: str) -> tuple[Demand, ...]:
    """Returns the published demands of a family of models, the fastest first: the batch over the time of a step."""
    return tuple(
        Demand(
            accelerator=entry["accelerator"],
            samples_per_s=entry["batch"] / entry["step_s"],
            sample_bytes=entry["sample_bytes"],
            source=f"{entry['file']}: batch {entry['batch']} per {entry['step_s']:g} s, "
            f"samples of {entry['sample_bytes']:,.0f} bytes",
        )
        for entry in _tables()["demands"].get(family, ())
    )
