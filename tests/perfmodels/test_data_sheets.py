"""Stated peaks: dense, each with its source, found by the names that drivers really tell, and by no other."""

from __future__ import annotations

import pytest

from dlbench.perfmodels.data_sheets import SHEETS, DataSheet, sheet_of, why_no_peak


@pytest.mark.parametrize(
    ("device", "product", "tflops"),
    [
        ("NVIDIA H200", "H200 SXM", {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", {"bf16": 989.4, "fp16": 989.4}),
        ("NVIDIA GH200 480GB", "GH200", {"bf16": 989.4}),
        ("NVIDIA B200", "B200", {"bf16": 2250}),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB", {"bf16": 312, "tf32": 156, "fp32": 19.5}),
        ("A100-SXM4-40GB", "A100 SXM 40 GB", {"fp16": 312}),  # drivers before 455
        ("NVIDIA A40", "A40", {"tf32": 74.8, "bf16": 149.7}),
        ("NVIDIA L40S", "L40S", {"bf16": 362.05, "tf32": 183}),
        ("Tesla P40", "P40", {"fp32": 12.0}),
        ("Tesla V100-SXM2-16GB", "V100 SXM2", {"fp16": 125, "fp32": 15.7}),
        ("Tesla V100-PCIE-16GB", "V100 PCIe", {"fp16": 112}),
        ("AMD Instinct MI250X", "MI250X (one of its two dies)", {"bf16": 191.5, "fp32": 47.85}),
        ("AMD Instinct MI300X", "MI300X", {"bf16": 1307.4, "tf32": 653.7}),
    ],
)
def test_names_of_drivers_are_products(device: str, product: str, tflops: dict[str, float]) -> None:
    sheet = sheet_of(device)
    assert sheet.product == product
    assert {precision: sheet.tflops[precision] for precision in tflops} == tflops
    assert len([one for one in SHEETS if one is sheet or one.product == product]) == 1


@pytest.mark.parametrize(
    ("device", "precision", "reason"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", "MIG slice"),
        ("AMD Instinct MI250X / MI250", "bf16", "MI250X and MI250 alike"),
        ("AMD Radeon Graphics", "bf16", "does not name the product"),
        ("GRID A100X-40C", "bf16", "vGPU"),
        ("NVIDIA H2000", "bf16", "no data sheet of that name"),
        ("AMD EPYC 7763", "fp32", "no data sheet of that name"),
        ("Tesla V100-SXM2-16GB", "bf16", "the V100 SXM2 has no bf16 units"),
        ("AMD Instinct MI250X", "tf32", "has no tf32 units"),
    ],
)
def test_what_a_name_does_not_tell_has_no_peak_and_a_reason(device: str, precision: str, reason: str) -> None:
    assert reason in why_no_peak(device, precision)


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.product)
def test_every_sheet_is_dense_and_names_its_source(sheet: object) -> None:
    """A figure with sparsity would be twice its dense one: tf32 is half of bf16 on tensor cores, as printed."""
    assert isinstance(sheet, DataSheet)
    assert sheet.source.startswith(("NVIDIA", "AMD"))
    assert "fp32" in sheet.tflops
    if "bf16" in sheet.tflops:
        assert sheet.tflops["bf16"] == sheet.tflops["fp16"]
        if "tf32" in sheet.tflops:
            assert sheet.tflops["bf16"] / sheet.tflops["tf32"] == pytest.approx(2, rel=0.03)
    assert sheet.memory_tb_per_s is None or 0.1 < sheet.memory_tb_per_s < 10
