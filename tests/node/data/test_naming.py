"""The data that ran is named by what it is: a public set by its counts, one made by dlbench by its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.node.data.source import data_set
from dlbench.records.registry import data_title
from dlbench.records.scan import read_run
from tests.support.datasets import write_manifest
from tests.support.run_factory import Story, constant, plans, write_run

IMAGENET = {"num_samples": 1_281_167, "classes": 1000}
PHOTOGRAPHS = {"num_samples": 60, "classes": 3}


def made(folder: Path, train: int) -> Path:
    (folder / "train").mkdir(parents=True)
    (folder / "train/one.jpg").write_bytes(b"picture")
    write_manifest(folder, kind="images", made_with={"seed": 0}, counts={"train": train})
    return folder


@pytest.mark.parametrize(
    ("workload", "described", "manifest", "title"),
    [
        ("resnet50", PHOTOGRAPHS, None, "60 JPEGs"),
        ("resnet50", PHOTOGRAPHS, 60, "60 JPEGs made by dlbench"),
        ("resnet50", PHOTOGRAPHS, 400, "60 JPEGs"),  # not the whole of what the manifest lists
        ("resnet50", IMAGENET, None, "ImageNet-2012 (1,281,167 images)"),
        ("resnet50", IMAGENET, 1_281_167, "1,281,167 JPEGs made by dlbench"),
        ("resnet50", {**IMAGENET, "classes": 999}, None, "1,281,167 JPEGs"),
        ("cosmoflow", {"num_samples": 524_288, "shape": [128, 128, 128, 4]}, None, "cosmoUniverse (524,288 volumes)"),
        ("cosmoflow", {"num_samples": 524_288, "shape": [32, 32, 32, 4]}, None, "524,288 density volumes"),
        ("bert", {"num_samples": 4860, "documents": 341}, 341, "4,860 sequences of text made by dlbench"),
    ],
)
def test_data_is_named_by_what_it_is(
    workload: str, described: dict[str, Any], manifest: int | None, title: str, tmp_path: Path
) -> None:
    source = tmp_path / "set"
    if manifest is None:
        source.mkdir()
    else:
        made(source, manifest)
    (plan,) = plans(workload=workload, points=(1,), repeats=1, data=str(source))
    spec = plan.workload.data
    found = data_set(spec, described)
    assert data_set(spec.model_copy(update={"source": str(source / "train")}), described) == found
    times = constant([5.0, 0.0, 30.0, 45.0, 10.0, 10.0])
    run = read_run(write_run(tmp_path / "runs", plan, times, Story(data={**described, **found})).path)
    assert data_title(run) == title


def test_synthetic_data_and_a_damaged_manifest_have_no_name(tmp_path: Path) -> None:
    (plan,) = plans(workload="resnet50", points=(1,), repeats=1)
    assert data_set(plan.workload.data, {"kind": "synthetic"}) == {}
    (tmp_path / "manifest.json").write_text("{}")
    (real,) = plans(workload="resnet50", points=(1,), repeats=1, data=str(tmp_path))
    assert data_set(real.workload.data, PHOTOGRAPHS) == {}
