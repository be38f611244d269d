"""Columns of a file of rows read at once are those read block by block, and damage is found just as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlbench.errors import IncompleteDataError
from dlbench.records.rows.format import BlockWriter
from dlbench.records.rows.reader import BlockReader, read_alike

FORMAT = {"format": "dlbench.test", "version": 1}
RANGES = {"<i8": (-(2**63), 2**63 - 1), "<u8": (0, 2**64 - 1), "<i4": (-(2**31), 2**31 - 1), "<u2": (0, 2**16 - 1)}

kinds = st.lists(st.sampled_from(["<i8", "<u8", "<i4", "<u2", "<f4", "<f8"]), min_size=1, max_size=6)


def value(kind: str) -> st.SearchStrategy[float]:
    if kind[1] == "f":
        return st.floats(width=32 if kind == "<f4" else 64, allow_nan=False)
    return st.integers(*RANGES[kind])


@st.composite
def files(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[str], list[Any], int]:
    """Fields, those that are differences, rows with notes between them, and rows of a block."""
    fields = [(f"c{number}", kind) for number, kind in enumerate(draw(kinds))]
    exact = [name for name, kind in fields if kind[1] != "f"]
    delta = draw(st.lists(st.sampled_from(exact), unique=True)) if exact else []
    row = st.tuples(*(value(kind) for _, kind in fields))
    content = draw(st.lists(st.one_of(row, st.just({"note": "x"})), max_size=25))
    return fields, delta, content, draw(st.integers(1, 7))


def write(path: Path, fields: list[tuple[str, str]], delta: list[str], content: list[Any], per_block: int) -> None:
    path.unlink(missing_ok=True)
    with BlockWriter(path, FORMAT, fields, delta=delta, rows_per_block=per_block) as writer:
        for item in content:
            if isinstance(item, dict):
                writer.note(item)
            else:
                writer.append(item)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=files(), data=st.data())
def test_columns_at_once_are_those_of_the_blocks(tmp_path: Path, file: tuple[Any, ...], data: st.DataObject) -> None:
    path = tmp_path / "rows"
    write(path, *file)
    fields, _, content, _ = file
    names = data.draw(st.lists(st.sampled_from([name for name, _ in fields]), unique=True))
    reader = BlockReader(path, "dlbench.test")
    found, notes = reader.read(names), [*reader.notes]
    blocks = list(reader.blocks())
    assert found.keys() == set(names)
    for name in names:
        wanted = np.concatenate([block[name] for block in blocks]) if blocks else np.zeros(0)
        assert found[name].tobytes() == wanted.tobytes()
        assert blocks == [] or found[name].dtype == blocks[0].dtype[name]
    assert notes == [item for item in content if isinstance(item, dict)]


def test_many_rows_are_turned_in_several_goes(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = [(number, number * 3, number / 7) for number in range(100_000)]
    write(path, [("a", "<i8"), ("b", "<i4"), ("c", "<f8")], ["a"], rows, 333)
    reader = BlockReader(path, "dlbench.test")
    found = reader.read({"c", "a"})
    assert found["a"].tolist() == [row[0] for row in rows]
    assert found["c"].tolist() == [row[2] for row in rows]
    assert reader.notes == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_found_as_it_is_block_by_block(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "rows"
    content = [*((number, -number) for number in range(20)), {"note": 1}, (5, 5)]
    write(path, [("a", "<i8"), ("b", "<i4")], ["a"], content, 4)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(whole.index(b"\n") + 1, len(whole) - 1)) :]
    else:
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(whole))
    assert outcome(path, at_once=True) == outcome(path, at_once=False)


def outcome(path: Path, *, at_once: bool) -> object:
    try:
        reader = BlockReader(path, "dlbench.test")
        blocks = [reader.read(("a", "b"))] if at_once else list(reader.blocks())
    except IncompleteDataError as error:
        return str(error)
    columns = [[value for block in blocks for value in block[name].tolist()] for name in ("a", "b")]
    return columns, reader.notes, reader.torn_bytes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), count=st.integers(0, 20), per_block=st.integers(1, 7), num_files=st.integers(1, 4))
def test_files_that_are_alike_are_read_together(
    tmp_path: Path, data: st.DataObject, count: int, per_block: int, num_files: int
) -> None:
    fields = [("a", "<i8"), ("b", "<i4"), ("c", "<f8"), ("d", "<i8")]
    readers = []
    for number in range(num_files):
        rows = data.draw(
            st.lists(st.tuples(*(value(kind) for _, kind in fields)), min_size=count, max_size=count)
        )  # fmt: skip
        path = tmp_path / str(number)
        write(path, fields, ["a", "b"], [*rows, {"note": number}], per_block)
        readers.append(BlockReader(path, "dlbench.test"))
    together = read_alike(readers, ("b", "c", "d"))
    assert together is not None
    for number, reader in enumerate(readers):
        alone = reader.read(("b", "c", "d"))
        assert together.keys() == alone.keys()
        assert all(together[name][number].tobytes() == alone[name].tobytes() for name in alone)


@pytest.mark.parametrize("change", ["rows", "blocks", "delta", "columns"])
def test_files_that_differ_are_not_read_together(tmp_path: Path, change: str) -> None:
    rows = [(number, number) for number in range(9)]
    fields, delta = [("a", "<i8"), ("b", "<i4")], ["a"]
    write(tmp_path / "one", fields, delta, rows, 4)
    if change == "columns":
        fields = [("a", "<i8"), ("x", "<i4")]
    write(
        tmp_path / "two",
        fields,
        [] if change == "delta" else delta,
        rows[:-1] if change == "rows" else rows,
        3 if change == "blocks" else 4,
    )
    readers = [BlockReader(tmp_path / name, "dlbench.test") for name in ("one", "two")]
    assert read_alike(readers, ("a",)) is None
