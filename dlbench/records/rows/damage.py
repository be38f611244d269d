"""Finds damaged files of spans and samples in a run's folder, which no main figure needs."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

from dlbench.errors import IncompleteDataError
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.shared import parts_of
from dlbench.records.rows.spans import SpanReader

_TRACES = re.compile(r"node-\d{4,}\.(spans|samples)")


def damaged_traces(folder: Path, run_id: str, *, every_block: bool) -> tuple[str, ...]:
    """Returns a line for each file of spans or samples that is damaged or another run's, by its start or all of it."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if _TRACES.fullmatch(entry.name))
    except OSError as error:
        return (f"{folder}: cannot be read: {error.strerror or error}",)
    problems = []
    for name in names:
        try:
            has_spans = name.endswith(".spans")
            parts = parts_of(folder / name).values() if every_block and has_spans else ()
            for part in sorted(parts) or [folder / name]:
                reader = (SpanReader if has_spans else SamplesReader)(path=part, run_id=run_id)
                if every_block:
                    deque(reader.blocks(), maxlen=0)
        except IncompleteDataError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{folder / name}: cannot be read: {error.strerror or error}")
    return tuple(problems)
