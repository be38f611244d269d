"""The pure reader benchmark, run as a process of its own: an order goes in, rates come out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlbench.jobs.node_program import answer_of, supervised
from dlbench.records.answers.reading_rate import ReadingRate

MODULE = "dlbench.node.data.reading.rate"


def reader_command(python: str) -> list[str]:
    """The program under its supervisor."""
    return supervised(python, MODULE)


def reading_rate(order: Mapping[str, Any], python: str) -> ReadingRate:
    """Reads as the order says; returns when all its repeats are done.

    Args:
        order: as `dlbench.node.data.reading.rate` wants it, ready for JSON.
        python: the interpreter of the compute side.

    Raises:
        UserError: the data set is missing or does not fit the model.
        IncompleteDataError: samples are damaged.
        EnvironmentLacksError, RunError, KeyboardInterrupt: as `answer_of`.
    """
    return answer_of(reader_command(python), order, ReadingRate, "the readers' process")
