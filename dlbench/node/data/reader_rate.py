"""``python -P -m dlbench.node.data.reader_rate``: reads a data set as training does, and does not train.

One JSON object on stdin, a `RateOrder`. One JSON line on stdout, when all is done: a `ReadingRate` of
`dlbench.records.data_path`, with `set_bytes` of the set's files, the trials of readers, and in each repeat also
`processes`, the rate of each. In `together` samples, bytes, rates and seconds of fetching and preparing are sums over
the processes, `seconds` and `passes` are means. Files are opened, looked up and listed before each repeat.

staging, shuffle and partition of the data are not acted upon: what is read is `source`, shuffled. What the queues of
readers held when the clock started is not counted. With cache `cold` the data set is evicted before each repeat, and a
repeat ends with its first pass. The exit code is that of a `dlbench.errors.DlbenchError`, whose line is on stderr after
``dlbench: error:``; stdout is empty then.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from pydantic import Field, ValidationError

from dlbench.datasets.splits import train_folder
from dlbench.errors import DlbenchError, ExitCode, RunError, UserError
from dlbench.machine.page_cache import files_bytes
from dlbench.machine.storage import call_rates, counts_reads
from dlbench.node.data.rank_reader import CacheState, NodeCache
from dlbench.node.data.reader_trials import Choice, Readers, Throughput, TrialContext, choose, reading, throughput
from dlbench.node.data.sharding import Key, ShardedOrder
from dlbench.node.data.source import open_reader
from dlbench.process_tree import end_with_parent
from dlbench.specs.base import Count, CountOrZero, Positive, Spec
from dlbench.specs.problems import problem_of
from dlbench.specs.workload import DataSpec, ModelSpec

_MAX_ORDER = 1 << 20


class RateOrder(Spec):
    """An order to read a data set."""

    model: ModelSpec = Field(description="workload.model of a plan.")
    data: DataSpec = Field(description="workload.data of a plan; not synthetic.")
    seed: CountOrZero = Field(0, description="Of order and augmentation.")
    batch: Count = Field(description="Samples of one batch of one process.")
    processes: Count = Field(description="Processes that read their shares at the same time.")
    cores_per_process: Count | None = Field(None, description="Cores of each; null: those that may be used, evenly.")
    seconds: Positive = Field(description="That each repeat reads for at least.")
    repeats: Count = Field(description="Repeats.")


class _Peers:
    """The processes as one of them sees them: all values go to the first, which sends back the list of all."""

    def __init__(self, place: int, lines: Sequence[Connection]) -> None:
        self.place, self._lines = place, lines

    def gather(self, value: Any) -> list[Any]:
        try:
            if self.place:
                (line,) = self._lines
                line.send(value)
                everyone: list[Any] = line.recv()
                return everyone
            everyone = [value, *(line.recv() for line in self._lines)]
            for line in self._lines:
                line.send(everyone)
        except (EOFError, OSError):
            raise RunError("another reading process ended") from None
        return everyone

    def barrier(self) -> None:
        self.gather(None)


def measure(order: RateOrder) -> dict[str, Any]:
    """Reads as ordered; this process is the first of those that read."""
    if order.data.is_synthetic:
        raise UserError("data.source: synthetic data is not read")
    # Nothing that forking would break has begun here: no thread, no MPI, no device.
    context = multiprocessing.get_context("fork")
    allowed = sorted(os.sched_getaffinity(0))
    share = order.cores_per_process or max(1, len(allowed) // order.processes)
    cores = [[allowed[(place * share + n) % len(allowed)] for n in range(share)] for place in range(order.processes)]
    lines: list[Connection] = []
    others: list[BaseProcess] = []
    try:
        for place in range(1, order.processes):
            own_end, child_end = context.Pipe()
            other = context.Process(
                target=_share, args=(order, place, child_end, [own_end, *lines], cores[place], os.getpid())
            )
            other.start()
            child_end.close()
            lines.append(own_end)
            others.append(other)
        os.sched_setaffinity(0, set(cores[0]))
        return ReadingProcess(order, _Peers(0, lines)).run()
    finally:
        os.sched_setaffinity(0, set(allowed))
        for line in lines:
            line.close()
        for process in others:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _share(
    order: RateOrder, place: int, line: Connection, foreign: Sequence[Connection], cores: list[int], parent: int
) -> None:
    end_with_parent(signal.SIGKILL, parent)
    for connection in foreign:  # held by two, a line would not close with the one whose it is
        connection.close()
    os.sched_setaffinity(0, set(cores))
    # What goes wrong here goes wrong in the first process, too, or shows by the closed line.
    with suppress(DlbenchError):
        ReadingProcess(order, _Peers(place, [line])).run()


class ReadingProcess:
    """Reads the share of one process."""

    def __init__(self, order: RateOrder, peers: _Peers) -> None:
        self._order, self._peers = order, peers
        torch.set_num_threads(1)
        data = order.data
        begun = monotonic()
        self._reader = open_reader(train_folder(Path(data.source)), order.model, data, order.seed, training=True)
        self._open_s = monotonic() - begun
        self._sharded = ShardedOrder(
            self._reader.num_samples,
            batch_size=order.batch,
            rank=peers.place,
            world_size=order.processes,
            seed=order.seed,
        )
        self._files = self._reader.files()
        self._cache = NodeCache(self._files, data.cache, acts=peers.place == 0, ranks=peers, beat=lambda _what: None)

    def run(self) -> dict[str, Any]:
        """All repeats; what the first process returns is the answer."""
        order, data = self._order, self._order.data
        state = self._cache.settle()
        choice = self._choice()
        readers = choice.readers
        repeats, states = [], []
        for number in range(order.repeats):
            if number or choice.trials:
                state = self._cache.settle()
            states.append(state)
            self._peers.barrier()
            seed = number * order.processes + self._peers.place
            calls = call_rates(self._files, order.seconds / 20, seed) if self._files else {}
            rate = self._repeat(number, readers) | calls
            everyone = self._peers.gather(rate)
            repeats.append(
                {
                    "cached_share": state.share,
                    "cache_in_force": state.in_force,
                    "together": _together(everyone),
                    "processes": everyone,
                }
            )
        self._reader.close()
        bad = [state for state in states if not state.in_force]
        described = self._reader.describe()
        return {
            "format": "dlbench.reading-rate",
            "kind": described["kind"],
            "num_samples": self._reader.num_samples,
            "num_files": len(self._files),
            "names_from": described.get("names_from"),
            "open_s": self._open_s,
            "set_bytes": files_bytes(self._files),
            "processes": order.processes,
            "cores_per_process": len(os.sched_getaffinity(0)),
            "batch": order.batch,
            "seconds": order.seconds,
            "loader_workers": readers.loader_workers,
            "prefetch_batches": readers.prefetch_batches,
            "trials": [trial.model_dump(mode="json") for trial in choice.trials],
            "cache": data.cache,
            "cache_told": (bad or states)[0].summary,
            "cache_in_force": not bad,
            "warnings": _warnings(data.cache, bad, repeats),
            "repeats": repeats,
        }

    def _choice(self) -> Choice:
        data = self._order.data
        cores = len(os.sched_getaffinity(0))
        context = TrialContext(
            reader=self._reader,
            # Of an epoch that is not measured.
            keys=[
                keys for keys, _ in zip(self._sharded.batches(), range(self._sharded.batches_per_epoch), strict=False)
            ],
            most_readers=cores,
            ranks=self._peers,
            device=torch.device("cpu"),
            on_bad_sample=data.on_bad_sample,
            beat=lambda _what: None,
            empty_cache=self._cache.settle if data.cache == "cold" else None,
        )
        return choose(context, data.loader_workers, data.prefetch_batches)

    def _repeat(self, number: int, readers: Readers) -> dict[str, Any]:
        """A rate; cold, it ends with the first pass."""
        order, is_cold = self._order, self._order.data.cache == "cold"
        keys = partial(_passes, self._sharded, order.batch, number + 1, 1 if is_cold else None)
        with reading(self._reader, keys, readers, on_bad_sample=order.data.on_bad_sample) as take:
            measured = throughput(
                take, readers, seconds=order.seconds, beat=lambda: None, ready=self._peers.barrier, longest=None
            )
        counts = not self._files or counts_reads(self._files[0])
        return _rate(measured, order, counts, self._sharded.batches_per_epoch * order.batch)


def _passes(sharded: ShardedOrder, batch: int, epoch: int, passes: int | None) -> Iterator[list[Key]]:
    """The batches of `passes` epochs, from one on; without end for None."""
    while passes is None or passes > 0:
        mine = [int(index) for index in sharded.epoch(epoch)]
        for start in range(0, len(mine), batch):
            yield [(epoch, index) for index in mine[start : start + batch]]
        epoch, passes = epoch + 1, None if passes is None else passes - 1


def _rate(measured: Throughput, order: RateOrder, counts: bool, part: int) -> dict[str, Any]:
    raw = sum(measured.tier_bytes.values())
    is_counted = measured.storage_bytes is not None and (counts or measured.storage_bytes > 0)
    return {
        "samples": measured.samples,
        "seconds": measured.seconds,
        "samples_per_s": measured.samples_per_s,
        "raw_bytes": raw,
        "bytes_per_s": raw / measured.seconds if measured.seconds else 0.0,
        "tier_bytes": measured.tier_bytes,
        "storage_bytes": measured.storage_bytes if is_counted else None,
        "fetch_s": measured.fetch_ns / 1e9,
        "prepare_s": measured.prepare_ns / 1e9,
        "passes": measured.samples / part,
        "is_short": measured.ended and measured.seconds < order.seconds,
    }


def _together(rates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the processes of a repeat: sums, except mean seconds and passes."""

    def total(key: str) -> Any:
        return sum(rate[key] for rate in rates)

    tiers: dict[str, int] = {}
    for rate in rates:
        for tier, num in rate["tier_bytes"].items():
            tiers[tier] = tiers.get(tier, 0) + num
    is_counted = all(rate["storage_bytes"] is not None for rate in rates)
    return {
        **{key: total(key) for key in ("samples", "samples_per_s", "raw_bytes", "bytes_per_s", "fetch_s", "prepare_s")},
        **{key: total(key) for key in rates[0] if key in ("opens_per_s", "stats_per_s", "names_per_s")},
        **{key: total(key) / len(rates) for key in ("seconds", "passes")},
        "tier_bytes": tiers,
        "storage_bytes": total("storage_bytes") if is_counted else None,
        "is_short": any(rate["is_short"] for rate in rates),
    }


def _warnings(wanted: str, bad: Sequence[CacheState], repeats: Sequence[dict[str, Any]]) -> list[str]:
    warnings = []
    if bad:
        warnings.append(
            f"data.cache {wanted} was not in force in {len(bad)} of {len(repeats)} repeats: {bad[0].summary}"
        )
    short = [repeat for repeat in repeats if repeat["together"]["is_short"]]
    if short:
        warnings.append(
            f"{len(short)} of {len(repeats)} repeats are short: reading cold ends with the first pass over the data set"
        )
    if any(not repeat["together"]["samples"] for repeat in repeats):
        warnings.append(
            "a repeat read nothing: the queues of the readers hold the whole data set; use fewer or more data"
        )
    return warnings


def main(text: str, say: Callable[[str], object] = print) -> int:
    """Reads as the order says; returns the exit code."""
    try:
        try:
            order = RateOrder.model_validate_json(text)
        except ValidationError as error:
            raise UserError(f"order on stdin: {problem_of(RateOrder, error)}") from None
        say(json.dumps(measure(order)))
    except DlbenchError as error:
        print(f"dlbench: error: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except OSError as error:
        print(f"dlbench: error: {error}", file=sys.stderr, flush=True)
        return int(ExitCode.ENVIRONMENT)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(sys.stdin.read(_MAX_ORDER)))
