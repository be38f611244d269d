"""What torch.profiler wrote of a rank's window, moved onto the axis of the trace.

Its file is a Chrome trace with a zero of its own. An anchor ties the two: the profile has a `record_function` of the
name `ANCHOR`, the rank's spans have one of the same name and beginning. The file may be large and in no order; it is
read twice, event by event, and of the first reading only times and threads are kept.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from dlbench.errors import IncompleteDataError
from dlbench.opening import open_file
from dlbench.perfetto.events import quoted, thread_events
from dlbench.perfetto.rows import DEEPEST, PROFILER_THREAD, Notes, Times, Tracks, thread_id

ANCHOR = "dlbench profiler anchor"

_PIECE = 1 << 20
_LONGEST_EVENT = 1 << 24
_LONGEST_HEAD = 1 << 26
_LARGEST_US = 1e16
_MOST_THREADS = 1 << 16

_LEFT_OUT = "events of torch.profiler are left out"

# torch may write NaN, which JSON does not have.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def trace_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace, one at a time; the file may be larger than memory. Raises IncompleteDataError: it
    cannot be read, or ends or breaks within an event; what came before has been given.
    """
    try:
        with TextIOWrapper(open_file(path, follow=False), encoding="utf-8", errors="replace") as file:
            buffer = _head(path, file)
            at = 0
            while True:
                while at < len(buffer) and buffer[at] in ", \t\r\n":
                    at += 1
                if at < len(buffer) and buffer[at] == "]":
                    return
                try:
                    entry, at = _DECODER.raw_decode(buffer, at)
                except (ValueError, RecursionError):
                    piece = file.read(_PIECE)
                    buffer, at = buffer[at:] + piece, 0
                    if not piece or len(buffer) > _LONGEST_EVENT:
                        raise IncompleteDataError(f"{path}: ends or breaks within an event") from None
                    continue
                if isinstance(entry, dict):
                    yield entry
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _head(path: Path, file: TextIO) -> str:
    """What was read, from behind the bracket that opens the events."""
    buffer = ""
    while piece := file.read(_PIECE):
        buffer += piece
        if buffer.lstrip().startswith("["):
            return buffer[buffer.index("[") + 1 :]
        key = buffer.find('"traceEvents"')
        start = buffer.find("[", key) if key >= 0 else -1
        if start >= 0:
            return buffer[start + 1 :]
        if len(buffer) > _LONGEST_HEAD:
            break
    raise IncompleteDataError(f"{path}: holds no traceEvents")


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """What the first reading leaves: where each complete event lies."""

    threads: dict[tuple[str, str], int]  # Number of each process and thread, in the order in which they were met.
    names: dict[tuple[str, str], str]
    keys: Times  # (n,): number of the thread, of all complete events in the order of the file.
    start: Times  # (n,): on the axis, nanoseconds.
    end: Times


class Profile:
    """One rank's profile; `anchor_ns`: when the anchor began, on the axis; None where the rank's spans have none."""

    def __init__(self, path: Path, anchor_ns: int | None, notes: Notes) -> None:
        self._path, self._anchor_ns, self._notes = path, anchor_ns, notes

    def events(self, pid: int, window: tuple[int, int] | None) -> Iterator[tuple[str, int]]:
        """Texts of events and how many; those within the window where there is one."""
        if self._anchor_ns is None:
            self._notes.problem(f"{self._path}: left out: the rank's spans have no anchor to set its times by")
            return
        survey = self._survey(self._anchor_ns, Notes())
        if survey is None:
            self._notes.problem(f"{self._path}: left out: it has no event {ANCHOR!r} to set its times by")
            return
        subs = Tracks().place(survey.keys, survey.start, survey.end).tolist()
        starts, ends, keys = survey.start.tolist(), survey.end.tolist(), survey.keys.tolist()
        self._notes.count(f"{_LEFT_OUT}: they overlap more than {DEEPEST} others", subs.count(-1))
        self._notes.count(f"{_LEFT_OUT}: they come before everything else", sum(start < 0 for start in starts))
        seen: set[int] = set()
        entries = (entry for entry in self._notes.guarded(trace_entries(self._path)) if _is_complete(entry))
        for n, entry in enumerate(entries):
            if subs[n] < 0 or starts[n] < 0:
                continue
            if window is not None and (ends[n] < window[0] or starts[n] > window[1]):
                continue
            tid = thread_id(PROFILER_THREAD, keys[n], subs[n])
            seen.add(tid)
            yield _text(pid, tid, entry, starts[n], ends[n]), 1
        named = {number: survey.names.get(key, "/".join(key)) for key, number in survey.threads.items()}
        for tid in sorted(seen):
            sub = f" ({(tid & 0xFF) + 1})" if tid & 0xFF else ""
            yield thread_events(pid, tid, f"profiler: {named[tid >> 8 & 0xFFFF]}{sub}"), 0

    def _survey(self, anchor_ns: int, notes: Notes) -> _Survey | None:
        threads: dict[tuple[str, str], int] = {}
        names: dict[tuple[str, str], str] = {}
        start, took, keys = array("d"), array("d"), array("q")
        anchor: float | None = None
        for entry in notes.guarded(trace_entries(self._path)):
            key = (str(entry.get("pid")), str(entry.get("tid")))
            args = entry.get("args")
            if entry.get("ph") == "M" and entry.get("name") == "thread_name" and isinstance(args, dict):
                names[key] = str(args.get("name"))
            if not _is_complete(entry):
                continue
            if anchor is None and entry.get("name") == ANCHOR and entry.get("cat") != "gpu_user_annotation":
                anchor = entry["ts"]
            keys.append(threads.setdefault(key, len(threads) % _MOST_THREADS))
            start.append(entry["ts"])
            took.append(entry["dur"])
        if anchor is None:
            return None
        # The difference first: an event's own time may have too many digits for nanoseconds.
        begins = anchor_ns + np.rint((np.array(start) - anchor) * 1000).astype(np.int64)
        ends = anchor_ns + np.rint((np.array(start) - anchor + np.array(took)) * 1000).astype(np.int64)
        return _Survey(threads=threads, names=names, keys=np.array(keys, dtype=np.int64), start=begins, end=ends)


def _is_complete(entry: dict[str, Any]) -> bool:
    times: tuple[Any, Any] = (entry.get("ts"), entry.get("dur"))
    return entry.get("ph") == "X" and all(type(at) in (int, float) and 0 <= at < _LARGEST_US for at in times)


def _text(pid: int, tid: int, entry: dict[str, Any], start: int, end: int) -> str:
    args = entry.get("args")
    return (
        f'{{"ph":"X","pid":{pid},"tid":{tid},"cat":{quoted(str(entry.get("cat", "profiler")))},'
        f'"name":{quoted(str(entry.get("name", "")))},"ts":{start / 1000:.3f},"dur":{(end - start) / 1000:.3f},'
        f'"args":{_args_text(args if isinstance(args, dict) else {})}}},\n'
    )


def _args_text(args: dict[str, Any]) -> str:
    """Arguments as text: plain values as they are, others as the text of their JSON."""
    texts = []
    for key, value in args.items():
        if isinstance(value, float) and not math.isfinite(value):
            value = None
        if isinstance(value, (bool, int, float)) or value is None:
            texts.append(f"{quoted(key)}:{json.dumps(value)}")
        else:
            texts.append(f"{quoted(key)}:{quoted(value if isinstance(value, str) else json.dumps(value))}")
    return "{" + ",".join(texts) + "}"
