"""`watch-cost.json`: what watching cost a run, measured against unwatched runs of the same series."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.watch import WatchOverhead
from dlbench.specs.base import RunName, Spec


class WatchCost(Spec):
    """What `dlbench run --watch-cost` found, in the folder of every watched run of the series."""

    format: Literal["dlbench.watch-cost"] = Field("dlbench.watch-cost", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run that it belongs to.")
    overhead: WatchOverhead = Field(description="What watching cost, over all pairs of the scaling point.")


def write_watch_cost(folder: RunFolder, run_id: str, overhead: WatchOverhead) -> None:
    """Writes the file of one run, as a whole.

    Raises:
        RunError: it cannot be written.
    """
    content = WatchCost(run_id=run_id, overhead=overhead)
    write_json(folder.watch_cost, content.model_dump(mode="json"))
