"""NCCL's log of one rank, which shows how it connected the GPUs; in the formats of NCCL 2.18 to 2.28 (init.cc, net.cc).
The log is read after all steps, since NCCL connects a ring or tree when it first uses it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlbench.machine.gpus import fabric_adapters
from dlbench.opening import read_end
from dlbench.records.exchange import NcclTransport

SUBSYSTEMS = "INIT,ENV,NET,GRAPH"  # Without TUNING, which writes a line for each collective of each step.
MAX_BYTES = 16 * 2**20  # Most bytes of a rank's log that are read, from its end.
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
        """Sets NCCL's variables for a log, before anything starts NCCL; not if the user has set NCCL_DEBUG."""
        self._variables = variables
        self._folder: str | None = None
        self.why = ""  # Reason why there is no log.
        if variables.get(_DEBUG):
            self.why = "NCCL_DEBUG is set, so that dlbench does not redirect NCCL's log"
            return
        self._folder = tempfile.mkdtemp(prefix="dlbench-nccl-")
        self._before = {name: variables.get(name) for name in _VARIABLES}
        self._file = Path(self._folder) / "nccl.log"
        variables.update({_DEBUG: "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, "NCCL_DEBUG_FILE": str(self._file)})

    def read(self) -> dict[str, Any] | None:
        """Returns the content of this rank's log, None without one, and restores the user's variables."""
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
        """Deletes the log; if the rank failed, prints NCCL's warnings first."""
        if self._folder is None:
            return
        if failed and (transport := self.read()):
            for line in transport["warnings"]:
                print(f"NCCL WARN {line}", file=sys.stderr, flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


@dataclass(slots=True)
class _Parser:
    """Collects the facts of one rank's log, message by message."""

    fields: dict[str, Any] = field(default_factory=dict)  # Version, network, plugin and nvls of `NcclTransport`.
    channels: Counter[str] = field(default_factory=Counter)  # Connections by transport.
    collective_channels: list[int] = field(default_factory=list)  # Channels of each communicator.
    nvls_channels: list[int] = field(default_factory=list)  # NVLS channels of communicators that have some.
    rings: int = 0
    trees: int = 0
    warnings: dict[str, None] = field(default_factory=dict)  # Texts, each once, in order.

    def add_line(self, line: str) -> None:
        if version := _VERSION.search(line):
            self.fields.setdefault("version", version[1])
        marked = _MARK.search(line)
        if marked is None:
            return
        if marked[1] == "WARN":
            self.warnings[marked[2].strip()] = None
        else:
            self.add_message(marked[2].strip())

    def add_message(self, message: str) -> None:
        if connection := _CONNECTION.match(message):
            # A log has both ends of a connection over the network; only the sending one counts.
            if connection[1] != "receive":
                self.channels[transport_of(connection[2])] += 1
        elif ring := _RING.match(message):
            self.rings = max(self.rings, int(ring[2]))
        elif trees := _TREES.match(message):
            self.trees = max(self.trees, trees[1].count("["))
        elif count := _COUNTS.match(message):
            self.collective_channels.append(int(count[1]))
            self.nvls_channels += map(int, re.findall(r"(\d+) nvls channels", message)[:1])
        elif network := _NETWORK.match(message):
            self.fields["network"] = network[1]
        elif plugin := _PLUGIN.match(message):
            self.fields["plugin"] = plugin[1]
        elif _NVLS.match(message):
            self.fields["nvls"] = True


def parsed(lines: Iterable[str]) -> NcclTransport:
    """Parses the lines of one rank's log; unknown lines are ignored."""
    parser = _Parser()
    for line in lines:
        parser.add_line(line)
    return NcclTransport(
        **parser.fields,
        channels=dict(sorted(parser.channels.items())),
        collective_channels=max(parser.collective_channels, default=None),
        nvls_channels=max(parser.nvls_channels, default=None),
        rings=parser.rings,
        trees=parser.trees,
        warnings=tuple(parser.warnings)[:_MAX_WARNINGS],
    )


def transport_of(text: str) -> str:
    """Returns a transport without adapter numbers: ``NET/IB/GDRDMA`` for ``NET/IB/2(0)/GDRDMA``."""
    return "/".join(part for part in text.strip().split("/") if not re.fullmatch(r"\d+(\(\d+\))?", part))


def joined_transport(ranks: Sequence[NcclTransport | dict[str, Any] | None]) -> NcclTransport | None:
    """Merges the logs of all ranks; None if no rank has one. Numbers of connections are added up."""
    logs = [NcclTransport.model_validate(rank) for rank in ranks if rank is not None]
    if not logs:
        return None
    channels: Counter[str] = Counter()
    warnings: dict[str, None] = {}
    adapters: dict[str, Any] = {}
    for log in logs:
        channels.update(log.channels)
        warnings |= dict.fromkeys(log.warnings)
        adapters |= log.adapters
    fields: dict[str, Any] = {}
    for name in ("version", "network", "plugin"):  # one text if ranks agree, else all texts
        texts = [getattr(log, name) for log in logs]
        fields[name] = ", ".join(dict.fromkeys(filter(None, texts))) or None
    for name in ("collective_channels", "nvls_channels", "nvls", "rings", "trees"):
        counts = [getattr(log, name) for log in logs]
        fields[name] = max((count for count in counts if count is not None), default=None)
    return NcclTransport(
        **fields,
        channels=dict(sorted(channels.items())),
        warnings=tuple(warnings)[:_MAX_WARNINGS],
        adapters=adapters,
    )
