"""Which precisions a CPU computes in: by the kernel's flags, of which a library's offer says nothing."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from dlbench.machine.arithmetic import lacking_arithmetic, native_precisions

AVX512 = "fpu avx2 f16c avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"


def machine(folder: Path, flags: str, key: str = "flags\t\t") -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Some CPU\n{key}: {flags}\nbugs\t\t: none\n\n")
    return folder


@pytest.mark.parametrize(
    ("architecture", "flags", "found"),
    [
        ("x86_64", AVX512, set()),
        ("x86_64", f"{AVX512} avx512_bf16", {"bf16"}),
        ("x86_64", f"{AVX512} amx_bf16 amx_tile amx_int8", {"bf16"}),
        ("x86_64", f"{AVX512} avx512_bf16 avx512_fp16", {"bf16", "fp16"}),
        ("x86_64", "fpu avx2 avx_ne_convert", set()),
        ("aarch64", "fp asimd fphp asimdhp", {"fp16"}),
        ("aarch64", "fp asimd fphp asimdhp sve bf16 i8mm", {"bf16", "fp16"}),
        ("aarch64", "fp asimd", set()),
    ],
)
def test_arithmetic_is_what_the_flags_show(
    architecture: str, flags: str, found: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: architecture)
    root = machine(tmp_path, flags, "Features\t" if architecture == "aarch64" else "flags\t\t")
    assert native_precisions(root) == found
    for precision in ("bf16", "fp16"):
        assert (lacking_arithmetic(precision, root) == "") == (precision in found)
    assert lacking_arithmetic("fp32", root) == ""


def test_what_the_flags_do_not_show_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "ppc64le")
    assert native_precisions(machine(tmp_path, AVX512)) is None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert native_precisions(tmp_path / "none") is None
    assert lacking_arithmetic("bf16", tmp_path / "none") == ""


def test_the_reason_names_the_flags_and_a_gpu_is_asked_by_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    root = machine(tmp_path, AVX512)
    assert lacking_arithmetic("bf16", root) == (
        "this CPU has no bf16 arithmetic (/proc/cpuinfo shows no avx512_bf16 or amx_bf16)"
    )
    (root / "dev").mkdir()
    (root / "dev/nvidiactl").touch()
    # Hidden, it computes nothing.
    assert lacking_arithmetic("bf16", root) != ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert lacking_arithmetic("bf16", root) == ""
