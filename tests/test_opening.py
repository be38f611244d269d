"""Files that somebody else may have put there: none is waited for, none read without an end, none hidden."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench import opening
from dlbench.opening import UnfitFileError, delete_below, folder_below, read_json


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


INSTEAD: list[tuple[Callable[[Path], None], str]] = [
    (pipe, "is a named pipe, not a regular file"),
    (device, "is a device, not a regular file"),
    (listening, "is a socket or a device, not a regular file"),
    (Path.mkdir, "is a folder, not a regular file"),
]
READERS: list[Callable[[Path], object]] = [
    lambda path: opening.read_bytes(path, 10),
    lambda path: opening.read_text(path, 10),
    lambda path: opening.read_json(path, 10, follow=True),
    opening.open_file,
    opening.descriptor,
    opening.require_file,
]
OF_A_RUN: list[Callable[[Path], object]] = [
    lambda path: opening.read_json(path, 10),
    lambda path: opening.read_end(path, 10),
    lambda path: opening.open_inside(path.absolute()),
]
"""They follow no link."""


@pytest.mark.parametrize(("put", "why"), INSTEAD, ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_no_file_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path], None], why: str
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    path = Path("x")
    put(path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for read in (*READERS, *OF_A_RUN):
        with pytest.raises(UnfitFileError) as told:
            read(path)
        if read in OF_A_RUN and path.is_symlink():
            why = "is a link, not a regular file"
        assert (told.value.strerror, Path(told.value.filename).name) == (why, "x")
        assert opening.why_unreadable(told.value) == why
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_links_lead_to_files_unless_none_may_be(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"data")
    (tmp_path / "x").symlink_to("there")
    assert opening.read_bytes(tmp_path / "x", 10) == b"data"
    with pytest.raises(UnfitFileError, match="is a link, not a regular file"):
        opening.read_bytes(tmp_path / "x", 10, follow=False)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        opening.read_bytes(tmp_path / "loop", 10)
    with pytest.raises(FileNotFoundError):
        opening.read_bytes(tmp_path / "gone", 10)


def test_a_file_of_a_run_is_reached_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "launch.log").write_bytes(b"said")
    (tmp_path / "run" / "linked.log").symlink_to("launch.log")
    (tmp_path / "named").symlink_to(tmp_path)
    (tmp_path / "swapped").symlink_to("run")
    # What is above the run, a person names.
    with opening.open_inside(tmp_path / "named" / "run" / "launch.log") as file:
        assert file.read() == b"said"
    with pytest.raises(UnfitFileError, match="is a link, not a regular file"):
        opening.open_inside(tmp_path / "run" / "linked.log")
    with pytest.raises(UnfitFileError, match="is a link or a file, not a folder"):
        opening.open_inside(tmp_path / "swapped" / "launch.log")


@given(number=st.integers() | st.sampled_from([sign * 2**63 + off for sign in (-1, 1) for off in (-1, 0)]))
def test_whole_numbers_have_64_bits(number: int) -> None:
    if -(2**63) <= number < 2**63:
        assert opening.parse_json(f"[{number}]") == [number]
    else:
        with pytest.raises(ValueError, match=r"has a number of \d+ digits, more than 64 bits"):
            opening.parse_json(f'{{"a": [1, {number}]}}')


def test_a_pipe_that_a_person_names_is_read(tmp_path: Path) -> None:
    read, write = os.pipe()
    writer = threading.Timer(0.2, lambda: (os.write(write, b"late"), os.close(write)))
    os.write(write, b"data, ")
    writer.start()
    assert opening.read_named(Path(f"/dev/fd/{read}"), 100) == b"data, late"
    writer.join()
    os.close(read)
    pipe(tmp_path / "nobody")
    assert opening.read_named(tmp_path / "nobody", 100) == b""
    read, write = os.pipe()
    os.write(write, b"x" * 101)
    with pytest.raises(UnfitFileError, match="larger than 100 bytes"):
        opening.read_named(Path(f"/dev/fd/{read}"), 100)
    os.close(read)
    os.close(write)


def test_no_folder_is_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim" / "inner").mkdir(parents=True)
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "b").symlink_to(tmp_path / "victim")
    (tmp_path / "named").symlink_to(tmp_path / "root")
    with folder_below(tmp_path / "named", "a", "new", create=True) as opened:
        os.mkdir("deep", dir_fd=opened)
    assert (tmp_path / "root" / "a" / "new" / "deep").is_dir()
    with pytest.raises(NotADirectoryError), folder_below(tmp_path / "root", "a", "b"):
        pass
    delete_below(tmp_path / "root", "a", "b", "inner")
    delete_below(tmp_path / "root", "a", "b")
    delete_below(tmp_path / "root", "nothing", "there")
    assert (tmp_path / "victim" / "inner").is_dir()
    delete_below(tmp_path / "named", "a")
    assert (tmp_path / "victim" / "inner").is_dir()
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"a": ["\uDC00x"]}', r'{"\udead": 1}'])
def test_a_file_with_half_a_character_is_no_json(tmp_path: Path, text: str) -> None:
    """Python reads it, but no file can be written with it."""
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match="half a character"):
        read_json(tmp_path / "x", 100)
