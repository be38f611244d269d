"""A run as one file that Perfetto opens: ranks and nodes written one after the other, or by several processes.

Memory does not grow with the run. A compressed trace is a row of gzip members, one for some ranks each, so that
several processes can make them.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dlbench import pool
from dlbench.errors import UserError, refused
from dlbench.perfetto.events import dumped, note_event, process_events, thread_events
from dlbench.perfetto.notes import Notes
from dlbench.perfetto.parts import Part, TextSink, node_pid, write_part
from dlbench.perfetto.run import TraceRun
from dlbench.perfetto.spans import COMPUTE_THREAD, thread_id
from dlbench.records.files import TEMPORARY_SUFFIX, is_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

PARALLEL_BYTES = 4_000_000
"""Runs with smaller files are written by this process alone."""
MOST_WORKERS = 4
_RANKS_PER_PART = 8
_NODES_PER_PART = 8


def write_perfetto(run: TraceRun, facts: Mapping[str, Any], notes: Notes, output: Path) -> None:
    """Writes the trace, compressed where the name ends in `.gz`; as a whole or not at all.

    Args:
        run: what to show.
        facts: what the trace says of itself; the notes are added.
        notes: what was met so far; what is met now is added.
        output: the file.

    Raises:
        UserError: it cannot be written.
        RunError: a process that made a part died.
    """
    compress = output.suffix.lower() == ".gz"
    with temporary_beside(output) as temporary:
        partial = temporary / "trace"
        with partial.open("xb") as file:
            _write(run, facts, notes, file, temporary, compress)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(output)


@contextmanager
def temporary_beside(output: Path) -> Iterator[Path]:
    """A folder beside the output for what is not whole yet; gone in the end.

    Raises:
        UserError: the file system refuses, here or within, or the output is a device or a pipe.
    """
    if is_stream(output):
        raise UserError(f"-o {output}: is a device or a pipe; a trace needs a file of its own")
    folder = output.with_name(f".{output.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        folder.mkdir()
        yield folder
    except OSError as error:
        raise refused(error, f"-o {output}: cannot be written: {error.strerror or error}", UserError) from None
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


def _write(
    run: TraceRun, facts: Mapping[str, Any], notes: Notes, file: BinaryIO, temporary: Path, compress: bool
) -> None:
    sink = TextSink(file, compress=compress)
    sink.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    sink.close()
    parts = _parts(run)
    workers = _num_workers(run, len(parts))
    if workers < 2:
        for part in parts:
            write_part(run, part, file, notes, compress=compress)
    else:
        make = partial(_make_part, run, compress=compress)
        items = [(part, temporary / f"part-{number}") for number, part in enumerate(parts)]
        with pool.run(
            make, items, workers, name=lambda item: f"the trace of {item[0]}", verb="made", ahead=2
        ) as results:
            for (_, path), met in zip(items, pool.in_order(results), strict=True):
                with path.open("rb") as written:
                    shutil.copyfileobj(written, file, 1 << 20)
                path.unlink()
                notes.add(met)
    sink = TextSink(file, compress=compress)
    content = {**facts, "events": notes.num_events, "notes": notes.sentences, "problems": list(notes.problems)}
    sink.write(_about(run, content))
    sink.write(f'],"otherData":{dumped(content)}}}\n')
    sink.close()


def _make_part(run: TraceRun, item: tuple[Part, Path], *, compress: bool) -> Notes:
    """Writes one part to a file of its own; returns what was met."""
    part, path = item
    notes = Notes()
    with path.open("xb") as file:
        write_part(run, part, file, notes, compress=compress)
    return notes


def _parts(run: TraceRun) -> list[Part]:
    ranks, nodes = run.selection.ranks, run.nodes
    return [
        *(Part(ranks=ranks[n : n + _RANKS_PER_PART]) for n in range(0, len(ranks), _RANKS_PER_PART)),
        *(Part(nodes=nodes[n : n + _NODES_PER_PART]) for n in range(0, len(nodes), _NODES_PER_PART)),
    ]


def _num_workers(run: TraceRun, num_parts: int) -> int:
    folder = run.folder
    paths = [path for rank in run.selection.ranks for path in (folder.steps(rank), folder.spans(rank))]
    paths += [folder.samples(node) for node in run.nodes]
    size = sum(path.stat().st_size for path in paths if path.exists())
    if size < PARALLEL_BYTES:
        return 1
    return min(num_parts, MOST_WORKERS, len(os.sched_getaffinity(0)))


def _about(run: TraceRun, content: Mapping[str, Any]) -> str:
    """The facts as events, because viewers do not show `otherData`; the last event of the file."""
    pid = node_pid(run, len(run.clocks))
    text = process_events(pid, f"about this trace of {content['run_id']}", -1)
    text += thread_events(pid, thread_id(COMPUTE_THREAD), "notes")
    for line in [*content["problems"], *content["notes"]]:
        text += note_event(pid, line, {})
    return text + note_event(pid, f"run {content['run_id']}", dict(content)).removesuffix(",\n") + "\n"
