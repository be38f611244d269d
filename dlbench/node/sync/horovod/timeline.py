"""Horovod's timeline to messages: which operation ran, on which tensors together, when.

The file is a Chrome trace. Each tensor is a process of its own (`pid`); its spans nest: `ALLREDUCE` around
`MEMCPY_IN_FUSION_BUFFER`, the operation itself (`GLOO_ALLREDUCE`, `MPI_ALLREDUCE`, `NCCL_...`) and
`MEMCPY_OUT_FUSION_BUFFER`; the end of `ALLREDUCE` tells type and shape of what travelled. Times are
microseconds of the steady clock since Horovod's start (timeline.cc of Horovod 0.28). A dying process leaves the
array open and may tear the last entry.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

_SIZES = {
    **dict.fromkeys(("uint8", "int8", "bool"), 1),
    **dict.fromkeys(("uint16", "int16", "float16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}
"""Bytes of an element, by Horovod's names (common.cc, DataType_Name)."""

_OPERATION = re.compile(r"^(GLOO|MPI|NCCL|CCL|DDL|ADASUM)_(?!INIT)[A-Z_]+$")

_PREFIX = "allreduce."
"""What Horovod puts before a parameter's name."""


@dataclass(frozen=True, kw_only=True)
class FusedMessage:
    """One operation on some tensors that travelled together."""

    tensors: tuple[str, ...]
    """Names of the parameters, in the order in the buffer."""
    step: int
    """How often these tensors had travelled before, in this file."""
    method: str
    """The operations in their order, e.g. GLOO_ALLREDUCE."""
    types: tuple[str, ...]
    """Types of the elements that travelled, each once; empty where the file does not tell."""
    wire_bytes: int | None
    """Bytes of the vector; None where the file does not tell."""
    begin_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a timeline says of all-reduces."""

    epoch_us: int | None
    """Microseconds since 1970 at which its times begin."""
    messages: tuple[FusedMessage, ...]
    """Complete ones, in the order of their beginning."""
    cycle_us: float | None
    """Median time between two cycles of Horovod's background thread; None without marks."""
    is_torn: bool
    """Whether the file ended within an entry or held something that is no entry."""

    def step(self, number: int) -> tuple[FusedMessage, ...]:
        """The messages of one step."""
        return tuple(message for message in self.messages if message.step == number)

    @property
    def methods(self) -> dict[str, int]:
        """How many messages went by which operations."""
        return dict(Counter(message.method for message in self.messages))

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the elements that travelled."""
        return tuple(sorted({name for message in self.messages for name in message.types}))


@dataclass(kw_only=True)
class _Span:
    """One tensor's all-reduce while it is read."""

    tensor: str
    step: int
    operations: list[tuple[str, float]] = field(default_factory=list)
    end_us: float | None = None
    element: str | None = None
    num_bytes: int | None = None


@dataclass(kw_only=True)
class _Group:
    """Tensors whose operations began one after the other, before any of them ended."""

    spans: list[_Span] = field(default_factory=list)
    is_closing: bool = False


class _Reader:
    """Entry by entry through a file."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.epoch_us: int | None = None
        self.cycles: list[float] = []
        self.groups: list[_Group] = []
        self._names: dict[int, str] = {}
        self._open: dict[int, list[str]] = {}
        self._spans: dict[int, _Span] = {}
        self._group_of: dict[int, _Group] = {}
        self._times: Counter[int] = Counter()

    def read(self, entry: dict[str, Any]) -> None:
        """One entry of the array.

        Raises:
            KeyError, TypeError: it lacks what entries of its kind have.
        """
        kind = entry["ph"]
        if kind == "M":
            self._describe(entry)
        elif kind == "i" and entry["name"] == "CYCLE_START":
            self.cycles.append(float(entry["ts"]))
        elif kind == "B":
            self._begin(int(entry["pid"]), str(entry["name"]), float(entry["ts"]))
        elif kind == "E":
            self._end(int(entry["pid"]), float(entry["ts"]), entry.get("args") or {})

    def _describe(self, entry: dict[str, Any]) -> None:
        arguments = entry.get("args") or {}
        if "start_time_since_epoch_in_micros" in arguments:
            self.epoch_us = int(arguments["start_time_since_epoch_in_micros"])
        elif entry["name"] == "process_name" and "name" in arguments:
            self._names[int(entry["pid"])] = str(arguments["name"])

    def _begin(self, pid: int, name: str, moment: float) -> None:
        stack = self._open.setdefault(pid, [])
        stack.append(name)
        tensor = self._names.get(pid, "")
        if name == "ALLREDUCE" and tensor.startswith(self._prefix):
            self._spans[pid] = _Span(tensor=tensor.removeprefix(self._prefix), step=self._times[pid])
            self._times[pid] += 1
        span = self._spans.get(pid)
        if span is None or not _OPERATION.match(name):
            return
        if not span.operations:
            # Horovod notes the beginning for all tensors of a buffer before anything else happens to one of them.
            if not self.groups or self.groups[-1].is_closing:
                self.groups.append(_Group())
            self.groups[-1].spans.append(span)
            self._group_of[pid] = self.groups[-1]
        span.operations.append((name, moment))

    def _end(self, pid: int, moment: float, arguments: dict[str, Any]) -> None:
        stack = self._open.get(pid)
        if not stack:  # it began before the file did
            return
        name = stack.pop()
        span = self._spans.get(pid)
        if span is None:
            return
        if _OPERATION.match(name):
            span.end_us = moment
            self._group_of[pid].is_closing = True
        elif name == "ALLREDUCE":
            del self._spans[pid]
            shape = re.findall(r"\d+", str(arguments.get("shape", "")))
            if arguments.get("dtype") in _SIZES and "shape" in arguments:
                span.element = str(arguments["dtype"])
                span.num_bytes = prod(map(int, shape)) * _SIZES[span.element]


def parse_timeline(text: str, *, prefix: str = _PREFIX) -> Timeline:
    """A timeline's content.

    Args:
        text: the file, whole or torn anywhere.
        prefix: only tensors whose name begins so count; it is taken off.
    """
    reader = _Reader(prefix)
    torn = False
    for entry in _entries(text):
        if entry is None:
            torn = True
            continue
        try:
            reader.read(entry)
        except (KeyError, TypeError, ValueError):
            torn = True
    messages = [_message(group) for group in reader.groups]
    gaps = [later - sooner for sooner, later in zip(reader.cycles, reader.cycles[1:], strict=False)]
    return Timeline(
        epoch_us=reader.epoch_us,
        messages=tuple(message for message in messages if message is not None),
        cycle_us=statistics.median(gaps) if gaps else None,
        is_torn=torn,
    )


def _entries(text: str) -> Iterator[dict[str, Any] | None]:
    """The objects of an array that may lack its end; None for what is none, after which nothing more is read."""
    decoder = json.JSONDecoder()
    place = re.compile(r"[\s,\[\]]*")
    position = 0
    while True:
        skipped = place.match(text, position)
        position = skipped.end() if skipped else position
        if position == len(text):
            return
        try:
            entry, position = decoder.raw_decode(text, position)
        except ValueError:
            yield None
            return
        yield entry if isinstance(entry, dict) else None


def _message(group: _Group) -> FusedMessage | None:
    """A group's message, if all of its operations ended."""
    spans = group.spans
    ends = [span.end_us for span in spans if span.end_us is not None]
    if len(ends) < len(spans):
        return None
    sizes = [span.num_bytes for span in spans if span.num_bytes is not None]
    return FusedMessage(
        tensors=tuple(span.tensor for span in spans),
        step=min(span.step for span in spans),
        method="+".join(name for name, _ in spans[0].operations),
        types=tuple(dict.fromkeys(span.element for span in spans if span.element is not None)),
        wire_bytes=sum(sizes) if len(sizes) == len(spans) else None,
        begin_us=min(span.operations[0][1] for span in spans),
        end_us=max(ends),
    )
