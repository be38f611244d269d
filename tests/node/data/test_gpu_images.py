"""Images that nvImageCodec decodes are those of dlbench's own reader; on its CPU decoders, which need no GPU."""

from __future__ import annotations

import io
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.data import images as gpu_images
from dlbench.node.data.images import RegionDecoder, nvimagecodec, open_images
from dlbench.node.data.reader import BatchReader
from dlbench.specs.workload import ImageData, ResNetModel, TextData
from tests.support.paths import ROOT

MODEL = ResNetModel(family="resnet", image_size=32, num_classes=2)
KEYS = [(1, index) for index in (3, 0, 2, 1, 4)]


def tree(folder: Path) -> None:
    """Five images of two classes, among them a grey one, one of four colours and a PNG under the name of a JPEG."""
    rng = np.random.default_rng(0)
    for number, (mode, form) in enumerate(
        [("RGB", "jpeg"), ("L", "jpeg"), ("CMYK", "jpeg"), ("RGB", "png"), ("RGB", "jpeg")]
    ):
        (folder / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        image = coarse.resize((96 + number, 70), Image.Resampling.BICUBIC).convert(mode)
        image.save(folder / "ab"[number % 2] / f"{number}.jpg", form)


@pytest.mark.parametrize("decoding", ["region", "full"])
def test_the_same_samples_crops_flips_and_pixels(tmp_path: Path, decoding: str) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed (extra gpu-input)")
    tree(tmp_path)
    ours = BatchReader(open_images(tmp_path, MODEL, 5, training=True, decoding="full"), "stop")[KEYS].batch
    reader = open_images(tmp_path, MODEL, 5, training=True, decoding=decoding, by_gpu=True)  # type: ignore[arg-type]
    encoded = BatchReader(reader, "stop")[KEYS]
    decode = RegionDecoder(torch.device("cpu"), 32, is_whole=decoding == "full", name=reader.name)
    batch, _kept = decode(encoded.batch)
    assert list(batch) == ["image", "label"]
    assert batch["label"].tolist() == ours["label"].tolist()
    assert batch["image"].dtype == torch.uint8
    # The same decoder beneath: only resizing in floating point rounds otherwise.
    assert (batch["image"].int() - ours["image"].int()).abs().max() <= 1
    assert len(encoded.converted) == 3
    assert str(reader.describe()["decoder"]).startswith("nvImageCodec ")


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed (extra gpu-input)")
    tree(tmp_path)
    whole = (tmp_path / "a" / "0.jpg").read_bytes()
    (tmp_path / "a" / "0.jpg").write_bytes(whole[: len(whole) // 2])
    reader = open_images(tmp_path, MODEL, 5, training=True, decoding="full", by_gpu=True)
    decode = RegionDecoder(torch.device("cpu"), 32, is_whole=True, name=reader.name)
    with pytest.raises(UserError, match=r"0\.jpg.*nvImageCodec cannot decode it"):
        decode(BatchReader(reader, "stop")[[(0, 0), (0, 1)]].batch)


def test_what_a_gpu_decodes_keeps_its_bytes_and_draws_the_crops_of_the_reader(tmp_path: Path) -> None:
    """Without the library: batches of unlike lengths, and the same crop as dlbench decodes."""
    tree(tmp_path)
    reader = open_images(tmp_path, MODEL, 5, training=True, by_gpu=True)
    fetched = BatchReader(reader, "stop")[KEYS]
    ours = BatchReader(open_images(tmp_path, MODEL, 5, training=True, decoding="full"), "stop")[KEYS].batch
    ends = [0, *fetched.batch["ends"].tolist()]
    assert fetched.batch["index"].tolist() == [index for _, index in KEYS]
    for place, (_epoch, index) in enumerate(KEYS):
        data = fetched.batch["encoded"][ends[place] : ends[place + 1]].numpy().tobytes()
        assert data == reader.fetch(index).data
        image = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        left, top, right, bottom = fetched.batch["box"][place].tolist()
        region = torch.from_numpy(image[top:bottom, left:right].copy())
        expected = gpu_images._resized_float(region, 32)
        if fetched.batch["is_mirrored"][place]:
            expected = expected.flip(1)
        assert (expected.int() - ours["image"][place].int()).abs().max() <= 1


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    with pytest.raises(EnvironmentLacksError, match=r"pip install 'dlbench\[gpu-input\]'"):
        gpu_images.nvimagecodec()


def test_only_images_that_are_read_can_be_decoded_by_a_gpu() -> None:
    ImageData(format="images", source="/x", reader="nvimagecodec")
    with pytest.raises(ValueError, match="synthetic data has none"):
        ImageData(format="images", reader="nvimagecodec")
    with pytest.raises(ValueError, match="this format has none"):
        TextData(format="text", source="/x", reader="nvimagecodec")


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "gpu-input"), ("12.6", "gpu-input-cu12")])
def test_the_package_for_torch_s_cuda_is_named(monkeypatch: pytest.MonkeyPatch, cuda: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setattr("torch.version.cuda", cuda)
    with pytest.raises(
        EnvironmentLacksError, match=rf"pip install 'dlbench\[{extra}\]', or set data\.reader to dlbench"
    ):
        nvimagecodec()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert declared[extra][0].startswith(f"nvidia-nvimgcodec-cu{cuda[:2]}[nvjpeg]")
