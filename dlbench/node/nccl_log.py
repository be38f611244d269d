"""NCCL's own log of one rank: how it joined the GPUs.

NCCL writes the log from the first communicator on, and a ring or tree is connected when it is first used: it is read
when all steps are done. Subsystem TUNING is left out: NCCL writes a line of it for each collective of each step.
Lines have the forms of NCCL 2.18 to 2.28 (init.cc, transport/*.cc, net.cc).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from dlbench.machine.gpus import fabric_adapters
from dlbench.opening import read_end
from dlbench.records.exchange import NcclTransport

SUBSYSTEMS = "INIT,ENV,NET,GRAPH"
MAX_BYTES = 16 * 2**20  # Of a rank's log: the end of a longer one is read.
_MAX_WARNINGS = 5

_DEBUG = "NCCL_DEBUG"
_VARIABLES = (_DEBUG, "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")

_MARK = re.compile(r"NCCL (INFO|WARN) (.*)$")
_VERSION = re.compile(r"NCCL version (\d[\w.+-]*)")
_NETWORK = re.compile(r"^Using network (.+)$")
_PLUGIN = re.compile(r"^(?:P2P plugin (?:v\d+ )?|NET/Plugin: Loaded net plugin )(\S.*?)(?: \(v\d+\))?$")
_CONNECTION = re.compile(
    r"^Channel \d+(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[(send|receive)\])? via (\S.*?)(?: comm .*)?$"
)
_RING = re.compile(r"^Channel (\d+)/(\d+) ?:(?: +\d+)+ *$")
_TREES = re.compile(r"^Trees ((?:\[\d+\] \S+ ?)+)")
_COUNTS = re.compile(r"^(?:comm 0x\w+ ?,? ?)?(\d+) coll channels,.*?(?:(\d+) nvls channels)?(?:,|$)")
_NVLS = re.compile(r"^NVLS multicast support is available")


class NcclLog:
    """The log of NCCL in this process."""

    def __init__(self, variables: MutableMapping[str, str] = os.environ) -> None:
        """Asks NCCL for a log; before anything has started it. Not where the user has asked for one himself."""
        self._variables = variables
        self._folder: str | None = None
        self.why = ""  # Why there is no log.
        if variables.get(_DEBUG):
            self.why = "NCCL_DEBUG is set: dlbench leaves NCCL's log alone"
            return
        self._folder = tempfile.mkdtemp(prefix="dlbench-nccl-")
        self._before = {name: variables.get(name) for name in _VARIABLES}
        self._file = Path(self._folder) / "nccl.log"
        variables.update({_DEBUG: "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, "NCCL_DEBUG_FILE": str(self._file)})

    def read(self) -> dict[str, Any] | None:
        """What this rank's NCCL said; None where there is no log. The variables are the user's again after that."""
        if self._folder is None:
            return None
        for name, value in self._before.items():
            if value is None:
                self._variables.pop(name, None)
            else:
                self._variables[name] = value
        try:
            text = read_end(self._file, MAX_BYTES).decode(errors="replace")
        except OSError:
            self.why = "NCCL wrote no log: it was not started"
            return None
        return {**parsed(text.splitlines()).model_dump(mode="json"), "adapters": fabric_adapters()}

    def close(self, *, failed: bool = False) -> None:
        """Deletes the log; of a rank that fails, NCCL's warnings go to its own log before."""
        if self._folder is None:
            return
        if failed and (found := self.read()):
            for line in found["warnings"]:
                print(f"NCCL WARN {line}", file=sys.stderr, flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def parsed(lines: Iterable[str]) -> NcclTransport:
    """What the lines of one rank's log say; lines that say nothing of interest are passed over."""
    found: dict[str, Any] = {}
    ways: Counter[str] = Counter()
    counts: list[tuple[int, int | None]] = []
    rings = trees = 0
    warnings: dict[str, None] = {}
    for line in lines:
        if version := _VERSION.search(line):
            found.setdefault("version", version[1])
        marked = _MARK.search(line)
        if marked is None:
            continue
        words = marked[2].strip()
        if marked[1] == "WARN":
            warnings[words] = None
        elif connection := _CONNECTION.match(words):
            # Both ends of a connection over the network are in a log; what is sent counts.
            if connection[1] != "receive":
                ways[way_of(connection[2])] += 1
        elif ring := _RING.match(words):
            rings = max(rings, int(ring[2]))
        elif several := _TREES.match(words):
            trees = max(trees, several[1].count("["))
        elif count := _COUNTS.match(words):
            nvls = re.search(r"(\d+) nvls channels", words)
            counts.append((int(count[1]), int(nvls[1]) if nvls else None))
        elif network := _NETWORK.match(words):
            found["network"] = network[1]
        elif plugin := _PLUGIN.match(words):
            found["plugin"] = plugin[1]
        elif _NVLS.match(words):
            found["nvls"] = True
    return NcclTransport(
        **found,
        channels=dict(sorted(ways.items())),
        collective_channels=max((count for count, _ in counts), default=None),
        nvls_channels=max((nvls for _, nvls in counts if nvls is not None), default=None),
        rings=rings,
        trees=trees,
        warnings=tuple(warnings)[:_MAX_WARNINGS],
    )


def way_of(text: str) -> str:
    """A way without the number of its adapter: ``NET/IB/3/GDRDMA`` and ``NET/IB/2(0)/GDRDMA`` are one way."""
    return "/".join(part for part in text.strip().split("/") if not re.fullmatch(r"\d+(\(\d+\))?", part))


def joined_transport(ranks: Sequence[NcclTransport | dict[str, Any] | None]) -> NcclTransport | None:
    """Returns what the logs of all ranks say; None where no rank has one. Numbers of connections add up."""
    logs = [NcclTransport.model_validate(one) for one in ranks if one is not None]
    if not logs:
        return None
    ways: Counter[str] = Counter()
    for log in logs:
        ways.update(log.channels)
    fields: dict[str, Any] = {}
    for name in ("version", "network", "plugin"):  # One text where ranks agree, else all of them.
        texts = [getattr(log, name) for log in logs]
        fields[name] = ", ".join(dict.fromkeys(filter(None, texts))) or None
    for name in ("collective_channels", "nvls_channels", "nvls", "rings", "trees"):
        counts = [getattr(log, name) for log in logs]
        fields[name] = max((count for count in counts if count is not None), default=None)
    return NcclTransport(
        **fields,
        channels=dict(sorted(ways.items())),
        warnings=tuple(dict.fromkeys(line for log in logs for line in log.warnings))[:_MAX_WARNINGS],
        adapters={name: kind for log in logs for name, kind in log.adapters.items()},
    )
