"""Holds a file of trace events against what viewers demand of it; of dlbench it uses nothing."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_NEEDS = {
    "X": {"pid", "tid", "name", "ts", "dur"},
    "B": {"pid", "tid", "name", "ts"},
    "E": {"pid", "tid", "ts"},
    "b": {"pid", "tid", "name", "ts", "cat", "id2"},
    "e": {"pid", "tid", "name", "ts", "cat", "id2"},
    "C": {"pid", "name", "ts", "args"},
    "M": {"pid", "name", "args"},
    "i": {"pid", "tid", "name", "ts", "s"},
}


def nanoseconds(microseconds: Any) -> int:
    value = Decimal(microseconds) * 1000
    whole = int(value)
    assert whole == value, f"{microseconds} has more decimals than nanoseconds have"
    return whole


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A file as read; times stay decimal texts, so that nothing is rounded."""

    content: dict[str, Any]

    @property
    def events(self) -> list[Event]:
        return list(self.content["traceEvents"])

    @property
    def about(self) -> dict[str, Any]:
        return dict(self.content["otherData"])

    def of(self, kind: str, **keys: Any) -> list[Event]:
        """Events of a kind whose keys have these values."""
        return [e for e in self.events if e["ph"] == kind and all(e.get(key) == value for key, value in keys.items())]

    def processes(self) -> dict[int, str]:
        return {e["pid"]: e["args"]["name"] for e in self.of("M", name="process_name")}

    def threads(self) -> dict[tuple[int, int], str]:
        return {(e["pid"], e["tid"]): e["args"]["name"] for e in self.of("M", name="thread_name")}

    def slices(self, thread: str, pid: int | None = None) -> list[Event]:
        """Slices on threads of that name, with `start` and `end` in nanoseconds, in order."""
        threads = {key for key, name in self.threads().items() if name == thread and pid in (None, key[0])}
        found = [
            {**e, "start": nanoseconds(e["ts"]), "end": nanoseconds(e["ts"]) + nanoseconds(e["dur"])}
            for e in self.of("X")
            if (e["pid"], e["tid"]) in threads
        ]
        return sorted(found, key=lambda e: (e["start"], -e["end"]))

    def messages(self, pid: int) -> list[Event]:
        """Asynchronous slices that are neither waits nor the whole: name, start, end."""
        begun = {(e["id2"]["local"], e["name"]): e for e in self.of("b", pid=pid)}
        ended = {(e["id2"]["local"], e["name"]): e for e in self.of("e", pid=pid)}
        found = [
            {**event, "start": nanoseconds(event["ts"]), "end": nanoseconds(ended[key]["ts"])}
            for key, event in begun.items()
            if key[1] not in ("exchange", "queued")
        ]
        return sorted(found, key=lambda e: e["start"])


def read_trace(path: Path) -> Trace:
    """The file, compressed or not; numbers with decimals stay exact."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return Trace(content=json.loads(text, parse_float=Decimal, parse_constant=refuse))


def checked(path: Path) -> Trace:
    """The file, proved to have nothing that viewers would drop."""
    trace = read_trace(path)
    assert problems(trace) == []
    return trace


def problems(trace: Trace) -> list[str]:
    found = [line for n, event in enumerate(trace.events) for line in _wrong_event(n, event)]
    if found:
        return found
    return [*_unnamed(trace), *_crossing(trace), *_unpaired(trace)]


def _wrong_event(number: int, event: Event) -> list[str]:
    kind = event.get("ph")
    if kind not in _NEEDS:
        return [f"event {number}: kind {kind!r}"]
    missing = _NEEDS[kind] - set(event)
    if missing:
        return [f"event {number} ({kind}): lacks {sorted(missing)}"]
    found = []
    for key in ("ts", "dur"):
        if key in event and (not _is_number(event[key]) or event[key] < 0):
            found.append(f"event {number} ({kind}): {key} {event[key]!r}")
    for key in ("pid", "tid"):
        if key in event and type(event[key]) is not int:
            found.append(f"event {number} ({kind}): {key} {event[key]!r}")
    if not isinstance(event.get("name", ""), str) or not str(event.get("name", "")).isprintable():
        found.append(f"event {number} ({kind}): name {event.get('name')!r}")
    if kind == "C" and not (event["args"] and all(_is_number(value) for value in event["args"].values())):
        found.append(f"event {number} (C): args {event['args']!r}")
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, Decimal) and math.isfinite(value)


def _unnamed(trace: Trace) -> list[str]:
    processes, threads = trace.processes(), trace.threads()
    used = {event["pid"] for event in trace.events}
    drawn = {(event["pid"], event["tid"]) for event in trace.events if event["ph"] in "XBEbei"}
    names = list(processes.values())
    return [
        *(f"process {pid} has no name" for pid in sorted(used - set(processes))),
        *(f"thread {tid} of process {pid} has no name" for pid, tid in sorted(drawn - set(threads))),
        *(f"two processes are called {name!r}" for name in sorted(set(names)) if names.count(name) > 1),
    ]


def _crossing(trace: Trace) -> list[str]:
    """Slices of a thread that overlap in part; in a file's order a slice comes before what lies within it."""
    lanes: dict[tuple[int, int], list[tuple[int, int, int, str]]] = defaultdict(list)
    for number, event in enumerate(trace.events):
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            lanes[event["pid"], event["tid"]].append(
                (start, -(start + nanoseconds(event["dur"])), number, event["name"])
            )
    found = []
    for key, slices in lanes.items():
        stack: list[tuple[int, str]] = []
        for start, minus_end, _, name in sorted(slices):
            while stack and stack[-1][0] <= start:
                stack.pop()
            if stack and -minus_end > stack[-1][0]:
                found.append(f"thread {key}: {name!r} begins within {stack[-1][1]!r} and ends behind it")
            stack.append((-minus_end, name))
    return found


def _unpaired(trace: Trace) -> list[str]:
    tracks: dict[tuple[int, str, str], list[tuple[int, int, Event]]] = defaultdict(list)
    for number, event in enumerate(trace.events):
        if event["ph"] in "be":
            tracks[event["pid"], event["cat"], event["id2"]["local"]].append((nanoseconds(event["ts"]), number, event))
    found = []
    for key, events in tracks.items():
        stack: list[str] = []
        for _, _, event in sorted(events, key=lambda item: item[:2]):
            if event["ph"] == "b":
                stack.append(event["name"])
            elif not stack or stack.pop() != event["name"]:
                found.append(f"{key}: {event['name']!r} ends and has not begun")
        found += [f"{key}: {name!r} never ends" for name in stack]
    return found
