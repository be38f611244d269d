"""Rows of a run as events of the Trace Event Format, which Perfetto and chrome://tracing open.

Times are microseconds with nanosecond decimals. One process for each rank and each node; phases of a step nest within
it; messages overlap and are asynchronous events (`b`, `e`) with a number of their own in their process; samples are
counters (`C`). The format is described in the Trace Event Format document of the Chromium project; that slices of a
thread must nest, and what else Perfetto drops, in its documentation ("other formats").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dlbench.perfetto.counters import Counter, reason_title
from dlbench.perfetto.notes import clean
from dlbench.perfetto.spans import (
    COMPUTE_THREAD,
    EXCHANGE_THREAD,
    SpanRows,
    thread_id,
    thread_name,
)
from dlbench.perfetto.steps import StepRows
from dlbench.records.rows.spans import LANES
from dlbench.records.rows.steps import LAUNCHED, PHASES

if TYPE_CHECKING:
    import numpy as np

    from dlbench.perfetto.clocks import Times
    from dlbench.perfetto.counters import Values

_COMPUTE = thread_id(COMPUTE_THREAD)
LATE = "waited_for_launches_us_at_most"
"""Argument of a phase of a GPU: how long the device may have waited for the host's kernel launches in it."""
PHASE_NAMES = tuple("exchange after backward" if phase == "exchange" else phase for phase in PHASES)
"""What the phases of a step are called in a trace."""
_PARTED = ("input", "h2d", "forward", "backward")


def quoted(text: str) -> str:
    """A name as JSON text; no escapes beyond those of quotes and backslashes, which Perfetto would show as they are."""
    return json.dumps(clean(text), ensure_ascii=False)


def dumped(content: Any) -> str:
    """Facts as JSON text that can be written as UTF-8, whatever a host or a path is called."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode("utf-8")


def process_events(pid: int, name: str, order: int) -> str:
    """Name and place of a process."""
    return (
        f'{{"ph":"M","pid":{pid},"name":"process_name","args":{{"name":{quoted(name)}}}}},\n'
        f'{{"ph":"M","pid":{pid},"name":"process_sort_index","args":{{"sort_index":{order}}}}},\n'
    )


def thread_events(pid: int, tid: int, name: str | None = None) -> str:
    """Name and place of a thread."""
    text = quoted(thread_name(tid) if name is None else name)
    return (
        f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_name","args":{{"name":{text}}}}},\n'
        f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_sort_index","args":{{"sort_index":{tid}}}}},\n'
    )


class StepEvents:
    """Steps and phases of one rank as text.

    Args:
        pid: the rank's process.
        parts: forward and backward passes of a step.
    """

    def __init__(self, pid: int, parts: int) -> None:
        head = f'{{"ph":"X","pid":{pid},"tid":{_COMPUTE},'
        tail = '"ts":%.3f,"dur":%.3f,"args":{"step":%d'
        self._step = [
            f'{head}"cat":"step","name":"step %d",{tail}}}}},\n',
            f'{head}"cat":"step","name":"step %d (warm-up)",{tail},"warm-up":true}}}},\n',
        ]
        self._phases = [
            f'{head}"cat":"phase","name":"{name}",{tail}'
            + (f',"is":"sum of {parts} parts"' if parts > 1 and phase in _PARTED else "")
            + "}},\n"
            for name, phase in zip(PHASE_NAMES, PHASES, strict=True)
        ]
        self._late = [
            text.removesuffix("}},\n") + f',"{LATE}":%.3f}}}},\n' if phase in LAUNCHED else text
            for text, phase in zip(self._phases, PHASES, strict=True)
        ]
        self._templates: dict[tuple[int, bool], tuple[str, list[int]]] = {}

    def text(self, rows: StepRows) -> tuple[str, int]:
        """Events of these steps, and how many; a phase without time is none."""
        import numpy as np

        took = np.diff(rows.edges, axis=1)
        bits = 1 << np.arange(len(PHASES))
        patterns = ((took[:, :-1] > 0) * bits).sum(axis=1) * 2 + rows.warmup
        changes = np.flatnonzero(np.diff(patterns)) + 1
        texts, count = [], 0
        for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(patterns)], strict=True):
            if begin == end:
                continue
            template, places = self._template(int(patterns[begin]), has_launches=rows.launch is not None)
            count += (end - begin) * (1 + len(places))
            numbers = _columns(rows, took, begin, end, places)
            texts.append(template * (end - begin) % tuple(numbers.ravel().tolist()))
        return "".join(texts), count

    def _template(self, pattern: int, *, has_launches: bool) -> tuple[str, list[int]]:
        key = pattern, has_launches
        if key not in self._templates:
            places = [n for n in range(len(PHASES)) if pattern >> (n + 1) & 1]
            phases = self._late if has_launches else self._phases
            self._templates[key] = self._step[pattern & 1] + "".join(phases[n] for n in places), places
        return self._templates[key]


def _columns(rows: StepRows, took: Times, begin: int, end: int, places: list[int]) -> Values:
    """The numbers of a template, one step a row."""
    import numpy as np

    steps = rows.steps[begin:end]
    edges = rows.edges[begin:end] / 1000
    columns = [steps, edges[:, 0], (rows.edges[begin:end, -1] - rows.edges[begin:end, 0]) / 1000, steps]
    for place in places:
        columns += [edges[:, place], took[begin:end, place] / 1000, steps]
        if rows.launch is not None and PHASES[place] in LAUNCHED:
            columns.append(rows.launch[begin:end, LAUNCHED.index(PHASES[place])] / 1000)
    numbers: Values = np.stack(columns, axis=1)
    return numbers


def span_events(pid: int, spans: SpanRows, kept: np.ndarray[Any, Any]) -> Iterator[tuple[str, int, int]]:
    """Events of the spans that are kept: text, how many, thread."""
    names = [quoted(name) for name in spans.names]
    where = kept.nonzero()[0]
    fields = spans.rows[where]
    for tid, lane, start, end, ready, number, name, step, num_bytes, track in zip(
        spans.threads[where].tolist(),
        fields["lane"].tolist(),
        spans.start[where].tolist(),
        spans.end[where].tolist(),
        spans.ready[where].tolist(),
        (where + spans.number).tolist(),
        fields["name"].tolist(),
        fields["step"].tolist(),
        fields["num_bytes"].tolist(),
        fields["track"].tolist(),
        strict=True,
    ):
        told = [f'"step":{step}'] if step >= 0 else []
        if num_bytes >= 0:
            told.append(f'"bytes":{num_bytes}')
        if tid >> 24 == EXCHANGE_THREAD:
            told += [f'"message":{track}', f'"queued_us":{(start - ready) / 1000:.3f}']
            text, count = _message(pid, number, names[name], (ready, start, end), ",".join(told))
            yield text, count, thread_id(EXCHANGE_THREAD)
            continue
        yield (
            f'{{"ph":"X","pid":{pid},"tid":{tid},"cat":"{LANES[lane]}","name":{names[name]},"ts":{start / 1000:.3f},'
            f'"dur":{(end - start) / 1000:.3f},"args":{{{",".join(told)}}}}},\n',
            1,
            tid,
        )


def _message(pid: int, number: int, name: str, times: tuple[int, int, int], told: str) -> tuple[str, int]:
    """A message: from its readiness to its end, within that its wait and itself.

    All are called "exchange" outside, so that Perfetto draws them in one row.
    """
    ready, start, end = (time / 1000 for time in times)
    head = f'"cat":"exchange","id2":{{"local":"0x{number:x}"}},"pid":{pid},"tid":{thread_id(EXCHANGE_THREAD)}'
    text = f'{{"ph":"b",{head},"name":"exchange","ts":{ready:.3f},"args":{{{told}}}}},\n'
    count = 4
    if start > ready:
        text += f'{{"ph":"b",{head},"name":"queued","ts":{ready:.3f}}},\n'
        text += f'{{"ph":"e",{head},"name":"queued","ts":{start:.3f}}},\n'
        count = 6
    text += f'{{"ph":"b",{head},"name":{name},"ts":{start:.3f},"args":{{{told}}}}},\n'
    text += f'{{"ph":"e",{head},"name":{name},"ts":{end:.3f}}},\n'
    return text + f'{{"ph":"e",{head},"name":"exchange","ts":{end:.3f}}},\n', count


def counter_events(pid: int, counter: Counter, time: Times, value: Values) -> str:
    """Events of one counter."""
    import numpy as np

    name, unit = (quoted(text).replace("%", "%%") for text in (counter.name, counter.unit))
    template = f'{{"ph":"C","pid":{pid},"name":{name},"ts":%.3f,"args":{{{unit}:%.6g}}}},\n'
    numbers = np.stack([time / 1000, value], axis=1)
    return template * len(time) % tuple(numbers.ravel().tolist())


def reason_event(pid: int, gpu: int, begin: int, end: int, mask: int, samples: int) -> str:
    """An interval in which the same reasons held a GPU's clock."""
    return (
        f'{{"ph":"X","pid":{pid},"tid":{reason_thread(gpu)},"cat":"clock reasons","name":{quoted(reason_title(mask))},'
        f'"ts":{begin / 1000:.3f},"dur":{(end - begin) / 1000:.3f},'
        f'"args":{{"mask":"0x{mask:x}","samples":{samples}}}}},\n'
    )


def reason_thread(gpu: int) -> int:
    """The thread of a node on which a GPU's clock reasons are drawn."""
    return thread_id(COMPUTE_THREAD, gpu)


def note_event(pid: int, name: str, args: dict[str, Any]) -> str:
    """Something to read at the beginning of the trace."""
    tid = thread_id(COMPUTE_THREAD)
    return f'{{"ph":"i","s":"t","pid":{pid},"tid":{tid},"ts":0,"name":{quoted(name)},"args":{dumped(args)}}},\n'
