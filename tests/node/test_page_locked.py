"""Page-locked memory: unlocked while it is still mapped, by who locked it; a refusal leaves CUDA as it was."""

from __future__ import annotations

import _ctypes
import ctypes
import mmap
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.node.page_locked import locked_memory, page_lock, page_unlock

SIZE = 1 << 24
CUDART = """
static _Thread_local int last;
static const void *held;
int cudaHostRegister(const void *address, unsigned long size, unsigned flags) {
    if (!size || flags != 1) return last = 1;
    if (held == address) return last = 712;
    held = address;
    return 0;
}
int cudaHostUnregister(const void *address) {
    if (held != address) return last = 713;
    held = 0;
    return 0;
}
int cudaGetLastError(void) {
    int was = last;
    last = 0;
    return was;
}
"""
TORCH = "int cudaGetLastError(void);\nint check_after_kernel(void) { return cudaGetLastError(); }\n"


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(first <= address < last for first, last in ranges)


def test_memory_is_unlocked_while_it_is_mapped_and_nothing_else_lies_there() -> None:
    unlocked: list[tuple[int, bool, int]] = []

    def unlock(address: int) -> None:
        was_mapped = is_mapped(address)
        with mmap.mmap(-1, SIZE) as other:  # takes the place, had the memory gone
            there = ctypes.c_char.from_buffer(other)
            unlocked.append((address, was_mapped, ctypes.addressof(there)))
            del there

    memory = locked_memory(SIZE, "test", lock=lambda _first, _size: 0, unlock=unlock)
    address, view = memory.data_ptr(), memory[4096:].view(torch.float32)
    view.fill_(3)
    del memory
    assert not unlocked
    assert float(view[-1]) == 3
    del view
    ((first, was_mapped, other),) = unlocked
    assert (first, was_mapped) == (address, True)
    assert abs(other - address) >= SIZE
    assert not is_mapped(address)


@pytest.fixture
def check_after_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A made CUDA runtime, which keeps each thread's last error, and a made torch that is linked with it."""
    for name, text in {"cudart": CUDART, "torch": TORCH}.items():
        (tmp_path / f"{name}.c").write_text(text, encoding="ascii")
        linked = ["-L", str(tmp_path), "-lcudart", f"-Wl,-rpath,{tmp_path}"] if name == "torch" else []
        command = ["gcc", "-shared", "-fPIC", "-o", tmp_path / f"lib{name}.so", tmp_path / f"{name}.c", *linked]
        subprocess.run(command, check=True, timeout=120)
    made = ctypes.CDLL(str(tmp_path / "libtorch.so"))
    for call in (made.cudaHostRegister, made.cudaHostUnregister):
        call.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint][: 3 if call is made.cudaHostRegister else 1]
    calls = SimpleNamespace(cudaHostRegister=made.cudaHostRegister, cudaHostUnregister=made.cudaHostUnregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch._C, "__file__", str(tmp_path / "libtorch.so"))
    return lambda: int(made.check_after_kernel())


def test_a_refusal_does_not_end_the_next_kernel(check_after_kernel: Callable[[], int]) -> None:
    assert page_lock(4096, 4096) == 0
    assert page_lock(4096, 4096) == 712
    assert check_after_kernel() == 0
    page_unlock(4096)
    page_unlock(4096)
    assert check_after_kernel() == 0
    with pytest.raises(EnvironmentLacksError, match=r"cannot page-lock .*\(CUDA error 7\)"):
        locked_memory(4096, "test", lock=lambda first, size: page_lock(first, 0) and 7, unlock=page_unlock)
    assert check_after_kernel() == 0


def test_nothing_is_locked_where_a_refusal_could_not_be_cleared(
    check_after_kernel: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "__file__", _ctypes.__file__)
    with pytest.raises(EnvironmentLacksError, match="does not offer cudaGetLastError"):
        page_lock(4096, 4096)
    assert torch.cuda.cudart().cudaHostRegister(4096, 4096, 1) == 0  # type: ignore[no-untyped-call]
