"""Files of rows in blocks, and what watching keeps in them: everything comes back, damage is told, limits hold."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import zlib
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dlbench.errors import IncompleteDataError
from dlbench.records.clocks import ClockLine
from dlbench.records.folder import RunFolder
from dlbench.records.rows.format import BlockWriter
from dlbench.records.rows.reader import BlockReader, read_columns
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.spans import LANES, SpanReader, SpanWriter
from dlbench.records.rows.steps import FIELDS, LAUNCH_FIELDS, StepReader, StepWriter, read_steps
from tests.support.paths import ROOT
from tests.support.watch_factory import clock_line, write_samples

Row = tuple[float, ...]
Content = list[Row | dict[str, Any]]
"""Rows and notes in the order of a file."""

HEADER = {"format": "dlbench.test", "version": 1}

VALUES = {
    "<i8": st.integers(-(2**63), 2**63 - 1),
    "<u8": st.integers(0, 2**64 - 1),
    "<i4": st.integers(-(2**31), 2**31 - 1),
    "<u4": st.integers(0, 2**32 - 1),
    "<u2": st.integers(0, 2**16 - 1),
    "<u1": st.integers(0, 2**8 - 1),
    "<f4": st.floats(width=32),
    "<f8": st.floats(),
}
NOTES = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20), max_size=3
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[tuple[str, str]], Content]:
    """Columns, and rows with notes between them."""
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=6))
    row = st.tuples(*(VALUES[kind] for kind in kinds))
    return [(f"column {n}", kind) for n, kind in enumerate(kinds)], draw(st.lists(row | NOTES, max_size=25))


def content_of(path: Path) -> Content:
    found: Content = []
    reader = BlockReader(path, "dlbench.test")
    reader.take_note = found.append  # type: ignore[method-assign]
    for block in reader.blocks():
        found += [tuple(row) for row in block.tolist()]
    return found


def write(path: Path, content: Content, fields: list[tuple[str, str]], **options: Any) -> BlockWriter:
    with BlockWriter(path, HEADER, fields, **options) as writer:
        for part in content:
            if isinstance(part, dict):
                writer.note(part)
            else:
                writer.append(part)
    return writer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.rows"


# Round trips


@given(table=tables(), per_block=st.integers(1, 9), data=st.data())
def test_everything_comes_back_in_its_order(
    table: tuple[list[tuple[str, str]], Content], per_block: int, data: st.DataObject
) -> None:
    fields, content = table
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.rows"
        writer = write(path, content, fields, rows_per_block=per_block)
        assert repr(content_of(path)) == repr([sorted_keys(part) for part in content])
        rows = [part for part in content if not isinstance(part, dict)]
        assert (writer.num_rows, writer.dropped, writer.bytes_written) == (len(rows), 0, path.stat().st_size)
        reader = BlockReader(path, "dlbench.test")
        assert [*reader.fields] == fields
        assert {key: reader.header[key] for key in HEADER} == HEADER
        names = data.draw(st.lists(st.sampled_from([name for name, _ in fields]), unique=True))
        table_of_all = np.array(rows, dtype=fields)
        for _ in range(2):  # a second reading says the same
            columns = {name: values[0] for name, values in read_columns([reader], names).items()}
            assert columns.keys() == set(names)
            assert all(column.tobytes() == table_of_all[name].tobytes() for name, column in columns.items())
            assert all(column.dtype == table_of_all[name].dtype for name, column in columns.items())
            assert reader.notes == [part for part in content if isinstance(part, dict)]
        # Any program reads the rows of a file with one rank.
        assert gzip.decompress(path.read_bytes()) == table_of_all.tobytes()


def sorted_keys(part: Row | dict[str, Any]) -> Row | dict[str, Any]:
    return dict(sorted(part.items())) if isinstance(part, dict) else part


@pytest.mark.parametrize("kind", ["<i8", "<u8", "<i4", "<u4", "<u2", "<u1"])
def test_a_value_that_does_not_fit_is_refused_and_harms_no_other(path: Path, kind: str) -> None:
    bits, signed = 8 * int(kind[2]), kind[1] == "i"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    with BlockWriter(path, HEADER, [("a", kind)]) as writer:
        for value in (low, high):
            writer.append((value,))
        for value in (low - 1, high + 1):
            with pytest.raises(struct.error):
                writer.append((value,))
    assert content_of(path) == [(low,), (high,)]


def test_rows_are_seen_while_the_writer_writes(path: Path) -> None:
    writer = BlockWriter(path, HEADER, [("a", "<i8")], rows_per_block=2)
    for number in range(5):
        writer.append((number,))
        assert content_of(path) == [(n,) for n in range((number + 1) // 2 * 2)]
    writer.flush()
    assert len(content_of(path)) == 5
    writer.close()
    writer.close()
    with pytest.raises(FileExistsError):
        BlockWriter(path, HEADER, [("a", "<i8")])


def test_json_that_no_extra_field_holds_is_refused(path: Path) -> None:
    noise = {"names": [f"{random.Random(n).getrandbits(8000):x}" for n in range(100)]}
    with pytest.raises(ValueError, match="but at most 65000 can be read"):
        BlockWriter(path, noise, [("a", "<i8")])
    with pytest.raises(ValueError, match="but at most 65000 can be read"):
        write(path, [noise], [("a", "<i8")])


@given(data=st.data(), count=st.integers(0, 20), per_block=st.integers(1, 7), num_files=st.integers(1, 4))
def test_files_of_equally_many_rows_are_read_together(
    data: st.DataObject, count: int, per_block: int, num_files: int
) -> None:
    fields = [("a", "<i8"), ("b", "<i4"), ("c", "<f8")]
    row = st.tuples(*(VALUES[kind] for _, kind in fields))
    with tempfile.TemporaryDirectory() as folder:
        readers = []
        for number in range(num_files):
            rows = data.draw(st.lists(row, min_size=count, max_size=count))
            write(Path(folder) / str(number), [*rows, {"note": number}], fields, rows_per_block=per_block)
            readers.append(BlockReader(Path(folder) / str(number), "dlbench.test"))
        together = read_columns(readers, ("b", "c"))
        for number, reader in enumerate(readers):
            alone = read_columns([reader], ("b", "c"))
            assert together.keys() == alone.keys()
            assert all(together[name][number].tobytes() == alone[name].tobytes() for name in alone)


@pytest.mark.parametrize("change", ["rows", "columns"])
def test_files_that_differ_are_not_read_together(tmp_path: Path, change: str) -> None:
    rows: Content = [(number, number) for number in range(9)]
    write(tmp_path / "one", rows, [("a", "<i8"), ("b", "<i4")])
    fields = [("a", "<i8"), ("x" if change == "columns" else "b", "<i4")]
    write(tmp_path / "two", rows[:-1] if change == "rows" else rows, fields)
    readers = [BlockReader(tmp_path / name, "dlbench.test") for name in ("one", "two")]
    with pytest.raises(IncompleteDataError, match=r"one: columns or rows differ"):
        read_columns(readers, ("a",))


@given(
    times=st.lists(st.sampled_from([0, 2**32 - 1, 2**32, 2**62, -1]), max_size=20),
    capacity=st.integers(1, 6),
    bounds=st.sampled_from([(), (0, 1, 2), (0, 2**32, 2)]),
    cut=st.integers(0, 300),
)
def test_short_and_long_times_come_back(times: list[int], capacity: int, bounds: tuple[int, ...], cut: int) -> None:
    """Also of a rank that was killed while it wrote: some of its first steps."""
    rows = [(n, 1, 2**62, time, *times[:1] * 6, 4, 0.5, *bounds) for n, time in enumerate(times)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node-0000.steps"
        with StepWriter(path, {"rank": 0}, capacity, launches=bool(bounds)) as writer:
            begin = writer.bytes_written
            for row in rows:
                writer.append(row)
        together = read_columns([StepReader(path), StepReader(path)], ("step_ns", "start_ns"))
        assert together["step_ns"].tolist() == [times, times]
        assert together["start_ns"].tolist() == [[2**62] * len(times)] * 2
        assert read_steps(path).steps.tolist() == rows
        os.truncate(path, max(begin, path.stat().st_size - cut))
        steps = read_steps(path).steps
        assert steps.tolist() == rows[: len(steps)]
        assert len(steps) >= len(rows) - capacity * (1 + cut // 57)
        assert steps.dtype == np.dtype([*FIELDS, *(LAUNCH_FIELDS if bounds else ())])


# Damage


def sample_file(path: Path) -> tuple[list[int], Content]:
    content: Content = [(5, 0.5), (9, 1.5), {"name": "a"}, (9, -1.5), (11, math.inf)]
    sizes = []
    with BlockWriter(path, HEADER, [("a", "<i8"), ("b", "<f4")], rows_per_block=2) as writer:
        sizes.append(writer.bytes_written)
        for part in content:
            if isinstance(part, dict):
                writer.note(part)
            else:
                writer.append(part)
            if sizes[-1] != writer.bytes_written:
                sizes.append(writer.bytes_written)
    return sizes, content


def test_a_file_torn_at_any_byte_keeps_what_was_before(path: Path) -> None:
    sizes, content = sample_file(path)
    assert len(sizes) == 4
    data = path.read_bytes()
    told = [[], content[:2], content[:3], content]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        if cut < sizes[0]:
            with pytest.raises(IncompleteDataError, match="not a file of"):
                content_of(path)
            continue
        whole = max(n for n, size in enumerate(sizes) if size <= cut)
        assert content_of(path) == told[whole]
        reader = BlockReader(path, "dlbench.test")
        assert len([*reader.blocks(), *reader.notes]) == whole
        assert reader.torn_bytes == cut - sizes[whole]
        assert read_columns([reader], "a")["a"][0].tolist() == [
            part[0] for part in told[whole] if not isinstance(part, dict)
        ]
        assert reader.torn_bytes == cut - sizes[whole]


def test_a_few_bytes_of_another_block_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "x.steps"
    with StepWriter(path, {"rank": 0}) as writer:
        writer.append((0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 4, 0.5))
    whole = path.read_bytes()
    for length in range(9):
        path.write_bytes(whole + b"\x1f\x8b torn"[:length])
        assert (len(read_steps(path).steps), read_steps(path).torn_bytes) == (1, min(length, 7))


def test_any_byte_changed_to_anything_is_told(path: Path) -> None:
    """Never other rows, never fewer: a changed length is no torn tail."""
    sizes, _ = sample_file(path)
    data = path.read_bytes()
    changes = random.Random(0)
    for place in range(len(data)):
        for value in {data[place] ^ (1 << bit) for bit in range(8)} | {changes.randrange(256) for _ in range(4)}:
            if value == data[place]:
                continue
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            with pytest.raises(IncompleteDataError) as caught:
                content_of(path)
            told = str(caught.value)
            assert told.startswith(f"{path}: ")
            assert "\n" not in told
            assert place < sizes[0] or "a block is damaged" in told


def test_a_block_of_another_file_is_told(tmp_path: Path) -> None:
    """The same columns and another run: the header belongs to the check of every block."""
    contents = []
    for run in "ab":
        path = tmp_path / f"{run}.steps"
        with StepWriter(path, {"rank": 0, "run_id": run}) as writer:
            begin = writer.bytes_written
            writer.append((0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 4, 0.5))
        contents.append((path.read_bytes()[:begin], path.read_bytes()[begin:]))
    assert len(read_steps(path).steps) == 1
    path.write_bytes(contents[0][0] + contents[1][1])
    with pytest.raises(IncompleteDataError, match="a block is damaged"):
        read_steps(path)


def forged(header: Any, *blocks: tuple[bytes, bytes]) -> bytes:
    """A file of any content whose sums are all right, made by what docs/formats.md says; a block: note and rows."""
    data, seed = b"", 0
    for number, (note, rows) in enumerate([(json.dumps(header).encode(), b""), *blocks]):
        packed = zlib.compress(rows, 9)[2:-4]
        extra, member = 24, packed + struct.pack("<II", zlib.crc32(rows), len(rows))
        if note:
            packed = zlib.compress(note, 9)[2:-4]
            member = b"DJ" + struct.pack("<H", len(packed)) + packed + member
            extra += 4 + len(packed)
        head = b"\x1f\x8b\x08\4\0\0\0\0\0\xff" + struct.pack("<H4s", extra, b"DL\x14\0")
        head += struct.pack("<4I", 0, number, len(member), zlib.crc32(member, seed))
        data += head + struct.pack("<I", zlib.crc32(head)) + member
        if number == 0:
            seed = zlib.crc32(member)
    return data


FORGED = {**HEADER, "fields": [["a", "<i8"], ["b", "<u2"]]}


def test_the_layout_is_the_one_that_is_documented(path: Path) -> None:
    path.write_bytes(forged(FORGED, (b'{"x": 1}', b""), (b'{"x": 2}', struct.pack("<qHqH", 300, 7, 256, 8))))
    assert content_of(path) == [{"x": 1}, {"x": 2}, (300, 7), (256, 8)]


@pytest.mark.parametrize(
    "fields", [None, [], [["a", "<i8", 4]], [["a", "O"]], [["a", "V1000000000"]], [["a", "<i8"], ["a", "<i8"]]], ids=str
)
def test_a_hostile_header_is_told(path: Path, fields: object) -> None:
    path.write_bytes(forged({**FORGED, "fields": fields}, (b"", b"\0" * 10)))
    with pytest.raises(IncompleteDataError, match="`fields` are damaged"):
        content_of(path)


@pytest.mark.parametrize(
    "block",
    [(b"", b"\0" * 11), (b"[]", b""), (b"\xff\xfe", b""), (b"[" * 100_000, b""), (b'{"a": ' + b"9" * 5000 + b"}", b"")],
    ids=lambda block: repr(block)[:30],
)
def test_a_hostile_block_is_told(path: Path, block: tuple[bytes, bytes]) -> None:
    path.write_bytes(forged(FORGED, (b"", b"\0" * 10), block))
    reader = BlockReader(path, "dlbench.test").blocks()
    assert len(next(reader)) == 1
    with pytest.raises(IncompleteDataError, match="a block is damaged"):
        next(reader)


BOMB = """
import resource, sys
from pathlib import Path
from dlbench.errors import IncompleteDataError
from dlbench.records.rows.reader import BlockReader

import numpy  # before the limit: its libraries reserve room
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 150 * 2**20,) * 2)
for name in sys.argv[1:]:
    try:
        list(BlockReader(Path(name), "dlbench.test").blocks())
    except IncompleteDataError as error:
        print("told")
"""


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    """Much that is little on disk, in rows, in a note and in the header: within 150 MB more than Python has."""
    names = []
    zeros = b"\0" * (300 * 2**20)
    for name, content in (
        ("rows", forged(FORGED, (b"", zeros))),
        ("note", forged(FORGED, (zeros[: 60 * 2**20], b""))),
        ("header", forged({"format": " " * (60 * 2**20)})),
    ):
        (tmp_path / name).write_bytes(content)
        names.append(str(tmp_path / name))
    del zeros
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BOMB, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "told\n" * 3), done.stderr


def test_rows_that_a_full_disk_refused_are_counted(path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = BlockWriter(path, {"format": "dlbench.test"}, [("a", "<i8")], rows_per_block=4)
    for number in range(4):
        writer.append((number,))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        for number in range(4, 12):
            with suppress(OSError):
                writer.append((number,))
        assert (writer.num_rows, writer.dropped) == (4, 8)
        writer.append((12,))
        with pytest.raises(OSError, match="large"):
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (writer.num_rows, writer.dropped) == (4, 9)
    reader = BlockReader(path, "dlbench.test")
    assert [len(block) for block in reader.blocks()] == [4]


# Spans

SPAN = st.fixed_dictionaries(
    {
        "lane": st.integers(0, len(LANES) - 1),
        "name": st.text(max_size=12),
        "start_ns": st.integers(0, 2**62),
        "end_ns": st.integers(0, 2**62),
        "step": st.integers(-1, 2**31 - 1),
        "track": st.integers(0, 2**16 - 1),
        "num_bytes": st.integers(-1, 2**62),
        "queued_ns": st.integers(0, 2**62),
    }
)


def spans_of(path: Path) -> list[dict[str, Any]]:
    reader = SpanReader(path=path)
    found = []
    list(reader.blocks())  # a second reading says the same
    for block in reader.blocks():
        for row in block:
            span = {key: int(row[key]) for key in ("lane", "start_ns", "step", "track", "num_bytes", "queued_ns")}
            end = span["start_ns"] + int(row["duration_ns"])
            found.append({**span, "end_ns": end, "name": reader.names[int(row["name"])]})
    return found


@given(spans=st.lists(SPAN, max_size=30), flushed=st.sets(st.integers(0, 29)), room=st.integers(0, 3000))
def test_spans_come_back_with_their_names(spans: list[dict[str, Any]], flushed: set[int], room: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for limit in (10**6, 900 + room):
            path = Path(folder) / f"{limit}.spans"
            writer = SpanWriter(path, {"rank": 3, "run_id": "r"}, limit)
            blocks: list[list[dict[str, Any]]] = [[]]
            for number, span in enumerate(spans):
                writer.add(**span)
                blocks[-1].append(span)
                if number in flushed:
                    writer.flush()
                    blocks.append([])
            writer.close()
            found = spans_of(path)
            assert writer.bytes_written == path.stat().st_size <= limit
            assert (writer.num_rows, writer.dropped) == (len(found), len(spans) - len(found))
            assert limit < 10**6 or found == spans
            # Under a small limit whole blocks are missing; the rest is right, its names too.
            for block in blocks:
                if found[: len(block)] == block:
                    found = found[len(block) :]
            assert found == []


def test_spans_whose_names_no_block_holds_are_counted(path: Path) -> None:
    letters = random.Random(0)
    with SpanWriter(path, {"rank": 0}, 10**7) as writer:
        for _ in range(256):
            writer.add(0, "".join(chr(letters.randrange(0x1000, 0x9000)) for _ in range(200)), 0, 1)
    assert (writer.num_rows, writer.dropped) == (0, 256)
    assert spans_of(path) == []


def span_header() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        SpanWriter(Path(folder) / "x.spans", {"rank": 0}, 10**6).close()
        return SpanReader(Path(folder) / "x.spans").header


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ({"first": 1, "names": ["a"]}, "names of spans are damaged"),
        ({"first": "0", "names": ["a"]}, "names of spans are damaged"),
        ({"first": 0, "names": "a"}, "names of spans are damaged"),
        ({}, "names of spans are damaged"),
        ({"first": 0, "names": ["a"] * 65_537}, "more names"),
        ({"first": 0, "names": []}, "an unknown lane or name"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_names_of_spans_are_told(path: Path, note: dict[str, Any], words: str) -> None:
    path.write_bytes(forged(span_header(), (json.dumps(note).encode(), b"\0" * 44)))
    with pytest.raises(IncompleteDataError, match=words):
        list(SpanReader(path=path).blocks())


# Samples


def test_samples_come_back_with_what_failed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    columns = ["gpu.0.power_w", "gpu.0.energy_j", "host.net.eth0.received_bytes"]
    rows = [(10**18 + n, 250.5 + n, 2.0**40 + n, math.nan if n % 10 else 2.0**53 - n) for n in range(40)]
    failures = [{"failed": "gpu.0.energy_j", "time_ns": 10**18, "reason": "GPU is lost"}]
    size = write_samples(
        folder,
        3,
        columns,
        rows,
        unavailable={"gpu.0.ecc": "Not Supported"},
        failures=failures,
        host="node-b",
        end={"num_samples": 40},
        late_ns=7,
    )
    path = folder.samples(3)
    assert path.stat().st_size == size
    reader = SamplesReader(path=path)
    assert reader.columns == columns
    assert (reader.header["node_rank"], reader.header["host"], reader.header["period_s"]) == (3, "node-b", 1.0)
    assert reader.header["unavailable"] == {"gpu.0.ecc": "Not Supported"}
    for _ in range(2):  # a second reading says the same
        found = np.concatenate(list(reader.blocks()))
        assert np.array_equal(found["time_ns"], [row[0] for row in rows])
        assert set(found["late_ns"]) == {7}
        for number, column in enumerate(columns, start=1):
            assert np.array_equal(found[column], [row[number] for row in rows], equal_nan=True)
        assert reader.failures == failures
        assert reader.end == {"num_samples": 40}
        assert reader.torn_bytes == 0


def test_a_killed_sampler_says_no_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_samples(folder, 0, ["host.load_1min"], [(n, 0.5) for n in range(20)])
    path = folder.samples(0)
    path.write_bytes(path.read_bytes()[:-1])
    reader = SamplesReader(path=path)
    assert [len(block) for block in reader.blocks()] == [16]
    assert (reader.end, reader.failures) == (None, [])
    assert reader.torn_bytes > 0


SAMPLES = {
    "format": "dlbench.samples",
    "version": 1,
    "node_rank": 0,
    "host": "n0",
    "period_s": 1.0,
    "unavailable": {},
    "fields": [["time_ns", "<i8"], ["late_ns", "<i8"], ["host.load_1min", "<f4"]],
}


STEPS = {"format": "dlbench.steps", "version": 1, "fields": [list(field) for field in FIELDS]}
READERS: dict[str, tuple[type[BlockReader], dict[str, Any]]] = {
    "steps": (StepReader, STEPS),
    "spans": (SpanReader, span_header()),
    "samples": (SamplesReader, SAMPLES),
}


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("steps", {"format": "other"}, "not a file of step times"),
        ("steps", {"format": None}, "not a file of step times"),
        ("steps", {"version": 2}, "unknown version (2)"),
        ("steps", {"version": None}, "unknown version (None)"),
        ("steps", {"fields": []}, "unknown version"),
        ("steps", {"fields": [["step", "<i8"]]}, "unknown version"),
        ("spans", {"format": "dlbench.samples"}, "not a file of spans"),
        ("spans", {"version": 2}, "spans of an unknown version"),
        ("spans", {"version": None}, "spans of an unknown version"),
        ("spans", {"fields": []}, "spans of an unknown version"),
        ("spans", {"fields": [["start_ns", "<i8"]]}, "spans of an unknown version"),
        ("spans", {"lanes": ["compute"]}, "spans of an unknown version"),
        ("samples", {"format": "dlbench.spans"}, "not a file of samples"),
        ("samples", {"version": 2}, "samples of an unknown version"),
        ("samples", {"node_rank": "0"}, "`node_rank` is damaged"),
        ("samples", {"host": 5}, "`host` is damaged"),
        ("samples", {"period_s": 0}, "`period_s` is damaged"),
        ("samples", {"period_s": math.inf}, "`period_s` is damaged"),
        ("samples", {"period_s": math.nan}, "`period_s` is damaged"),
        ("samples", {"period_s": None}, "`period_s` is damaged"),
        ("samples", {"unavailable": []}, "`unavailable` is damaged"),
        ("samples", {"fields": [["time_ns", "<i8"]]}, "`fields` are damaged"),
        ("samples", {"fields": [["late_ns", "<i8"], ["time_ns", "<i8"]]}, "`fields` are damaged"),
        ("samples", {"fields": [*SAMPLES["fields"], ["x", "<i8"]]}, "`fields` are damaged"),  # type: ignore[misc]
        ("samples", {"fields": 5}, "`fields` are damaged"),
    ],
    ids=str,
)
def test_another_header_is_refused(path: Path, kind: str, change: dict[str, Any], words: str) -> None:
    reader, header = READERS[kind]
    path.write_bytes(forged(header))
    assert list(reader(path=path).blocks()) == []  # type: ignore[call-arg]
    path.write_bytes(forged({**header, **change}))
    with pytest.raises(IncompleteDataError) as caught:
        reader(path=path)  # type: ignore[call-arg]
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


# Clocks


def point(local_ns: int, offset_ns: int, bound_ns: int = 10) -> dict[str, int]:
    return {"local_ns": local_ns, "offset_ns": offset_ns, "bound_ns": bound_ns, "num_exchanges": 8}


def line(*points: dict[str, int], node_rank: int = 1) -> ClockLine:
    return ClockLine.model_validate(clock_line(node_rank, "n1", points=points))


def test_a_clock_between_its_points_and_outside_of_them() -> None:
    clock = line(point(10**9, 50_000), point(2 * 10**9, 70_000), point(4 * 10**9, 10_000, bound_ns=25))
    times = np.array([1, 1.5, 2, 3, 4, 0, 5]) * 1e9
    # Outside, the nearest of the two lines goes on.
    assert clock.offsets_at(times.astype(int)).tolist() == [50_000, 60_000, 70_000, 40_000, 10_000, 30_000, -20_000]
    assert [clock.bound_at(t) for t in (0, 15 * 10**8, 3 * 10**9, 5 * 10**9)] == [500_011, 11, 26, 500_026]
    assert clock.is_known


@given(
    start=st.integers(-(10**17), 10**17),
    offset=st.integers(-(10**17), 10**17),
    length=st.integers(10**6, 10**15),
    drift_ppb=st.integers(-500_000, 500_000),
    at=st.fractions(-1, 2),
)
def test_a_constant_drift_is_taken_up(start: int, offset: int, length: int, drift_ppb: int, at: Fraction) -> None:
    """Against exact arithmetic: the offset of a clock that goes `drift_ppb` wrong, within 10 ns of rounding."""

    def exact(local: int) -> int:
        return offset + round(Fraction(drift_ppb * (local - start), 10**9))

    clock = line(point(start, exact(start)), point(start + length, exact(start + length)))
    local = start + round(at * length)
    assert abs(int(clock.offsets_at(np.array([local]))[0]) - exact(local)) <= 10


@pytest.mark.parametrize("times", [(5, 5), (6, 5), (1, 3, 2), (1, 2**63), (-(2**63) - 1, 0)])
def test_points_that_no_clock_has(times: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError):
        line(*(point(time, 0) for time in times))


# The documents


def test_the_documents_say_how_to_read_a_file_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    code = text.split("## Files of rows")[1].split("```python\n")[1].split("```")[0]
    with StepWriter(tmp_path / "node-0000.steps", {"rank": 0}, capacity=4) as writer:
        for step in range(10):
            # The last block has a long time.
            step_ns = 2**32 if step == 9 else 10**6 * step
            writer.append((step, int(step < 2), 10**12 + step, step_ns, 0, 0, 0, 0, 0, 0, 4, 0.5))
    with (tmp_path / "node-0000.steps").open("ab") as file:
        file.write(b"R torn")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "formats.md", "exec"), names)
    assert capsys.readouterr().out == "541.245912 ms\n"
    assert np.array_equal(names["steps"], read_steps(tmp_path / "node-0000.steps").steps)


# Large runs
