"""Faults of every kind that was ever found or feared, planted one after the other: how many hold?

`make bench AREA=faults` replays all of them, `AREA=faults.<family>` one family. Each is a real command, and
what it left behind is looked for. A kind that this machine cannot plant is named and counts as neither.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.bench.faults import (
    clocks,
    contents,
    files,
    histories,
    paths,
    processes,
    samples,
    strangers,
    streams,
    surroundings,
)
from tests.bench.faults.catalogue import Fault
from tests.bench.faults.workshop import CannotPlantError, DidNotHoldError, Workshop, own_shared_memory
from tests.bench.figures import Figure

FAMILIES: dict[str, Callable[[], Iterator[Fault]]] = {
    "processes": processes.faults,
    "samples": samples.faults,
    "clocks": clocks.faults,
    "files": files.faults,
    "streams": streams.faults,
    "paths": paths.faults,
    "histories": histories.faults,
    "surroundings": surroundings.faults,
    "strangers": strangers.faults,
    "contents": contents.faults,
}


def figures() -> Iterator[Figure]:
    """How many faults of every family held."""
    for family in FAMILIES:
        yield from family_figures(family)


def family_figures(family: str) -> Iterator[Figure]:
    """How many faults of one family held, and which did not."""
    own_shared_memory()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        shop = Workshop(Path(folder))
        shop.prepare()
        start = time.monotonic()
        kinds = list(FAMILIES[family]())
        stories = [_replayed(fault, shop) for fault in kinds]
        held = stories.count("")
        not_planted = sum(story.startswith("not planted") for story in stories)
        planted = len(kinds) - not_planted
        yield Figure(
            name=f"faults that held: {family}",
            value=held,
            unit=f"of {planted} kinds",
            n=planted,
            goal="all",
            met=held == planted,
            reason=f"{not_planted} more cannot be planted here; {time.monotonic() - start:.0f} s",
        )


def _replayed(fault: Fault, shop: Workshop) -> str:
    """Empty if it held, else why not; printed at once."""
    try:
        fault.replay(shop)
        return ""
    except DidNotHoldError as error:
        story = str(error)
    except CannotPlantError as error:
        story = f"not planted: {error}"
    except Exception as error:  # the fault's own code must not end the replay; it has not held until it says so
        story = f"the replay itself failed: {type(error).__name__}: {error}"
    print(f"  {fault.family}: {fault.name}: {story}", flush=True)
    return story


PARTS = {f"faults.{family}": partial(family_figures, family) for family in FAMILIES}
