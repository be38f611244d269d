"""``python -P -m dlbench.node.data.reader_rate``: reads a data set like training, without training. Reads a `RateOrder`
as JSON on stdin, and prints a `ReadingRate` of `dlbench.records.data_path` as one JSON line, or an error on stderr.
With cache `cold` the data set is evicted before each repeat, which ends with its first pass.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
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
from dlbench.node.data.reader import Key
from dlbench.node.data.reader_trials import Choice, Readers, Throughput, TrialContext, choose, reading, throughput
from dlbench.node.data.sharding import ShardedOrder, keys_of
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
    """The reading processes, as one of them sees them: the first one receives all values and sends back their list."""

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
    """Carries out an order; this process is the first of the reading ones."""
    if order.data.is_synthetic:
        raise UserError("data.source: synthetic data is not read")
    # Forking is safe here: no thread, MPI or device has been started.
    context = multiprocessing.get_context("fork")
    allowed = sorted(os.sched_getaffinity(0))
    share = order.cores_per_process or max(1, len(allowed) // order.processes)
    cycle = itertools.cycle(allowed)  # processes share cores if there are too few
    cores = [list(itertools.islice(cycle, share)) for _ in range(order.processes)]
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
    for connection in foreign:  # open here, they would not close when their process ends
        connection.close()
    os.sched_setaffinity(0, set(cores))
    # The first process has the same error, or sees the closed connection.
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
        order, data = self._order, self._order.data
        state = self._cache.prepare()
        choice = self._choice()
        readers = choice.readers
        repeats, states = [], []
        for number in range(order.repeats):
            if number or choice.trials:
                state = self._cache.prepare()
            states.append(state)
            self._peers.barrier()
            seed = number * order.processes + self._peers.place
            calls: dict[str, Any] = {}
            if self._files:
                calls |= call_rates(self._files, order.seconds / 20, seed)
            everyone = self._peers.gather(self._repeat(number, readers) | calls)
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
            "cache_state": (bad or states)[0].summary,
            "cache_in_force": not bad,
            "warnings": _warnings(data.cache, bad, repeats),
            "repeats": repeats,
        }

    def _choice(self) -> Choice:
        data = self._order.data
        cores = len(os.sched_getaffinity(0))
        context = TrialContext(
            reader=self._reader,
            # Batches of epoch 0, which is not measured.
            keys=list(itertools.islice(self._sharded.batches(), self._sharded.batches_per_epoch)),
            most_readers=cores,
            ranks=self._peers,
            device=torch.device("cpu"),
            on_bad_sample=data.on_bad_sample,
            beat=lambda _what: None,
            empty_cache=self._cache.prepare if data.cache == "cold" else None,
        )
        return choose(context, data.loader_workers, data.prefetch_batches)

    def _repeat(self, number: int, readers: Readers) -> dict[str, Any]:
        """Measures one rate; with a cold cache it ends with the first pass."""
        order = self._order
        num_passes = 1 if order.data.cache == "cold" else None
        keys = partial(_passes, self._sharded, order.batch, number + 1, num_passes)
        with reading(self._reader, keys, readers, on_bad_sample=order.data.on_bad_sample) as take:
            measured = throughput(
                take, readers, seconds=order.seconds, beat=lambda: None, ready=self._peers.barrier, longest=None
            )
        counts = not self._files or counts_reads(self._files[0])
        return _rate(measured, order, counts, self._sharded.batches_per_epoch * order.batch)


def _passes(sharded: ShardedOrder, batch: int, epoch: int, passes: int | None) -> Iterator[list[Key]]:
    """Yields the batches of `passes` epochs, from one on; without end for None."""
    for number in itertools.count():
        if number == passes:
            return
        samples = sharded.epoch(epoch + number)
        for start in range(0, len(samples), batch):
            yield keys_of(epoch + number, samples[start : start + batch])


def _rate(measured: Throughput, order: RateOrder, counts: bool, part: int) -> dict[str, Any]:
    raw_bytes = sum(measured.tier_bytes.values())
    bytes_per_s = raw_bytes / measured.seconds if measured.seconds else 0.0
    is_counted = measured.storage_bytes is not None and (counts or measured.storage_bytes > 0)
    storage_bytes = measured.storage_bytes if is_counted else None
    return {
        "samples": measured.samples,
        "seconds": measured.seconds,
        "samples_per_s": measured.samples_per_s,
        "raw_bytes": raw_bytes,
        "bytes_per_s": bytes_per_s,
        "tier_bytes": measured.tier_bytes,
        "storage_bytes": storage_bytes,
        "fetch_s": measured.fetch_ns / 1e9,
        "prepare_s": measured.prepare_ns / 1e9,
        "passes": measured.samples / part,
        "is_short": measured.ended and measured.seconds < order.seconds,
    }


def _together(rates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the processes of a repeat: sums, except mean seconds and passes."""

    def total(key: str) -> Any:
        return sum(rate[key] for rate in rates)

    tiers: Counter[str] = Counter()
    for rate in rates:
        tiers.update(rate["tier_bytes"])
    storage_bytes = None
    if all(rate["storage_bytes"] is not None for rate in rates):
        storage_bytes = total("storage_bytes")
    return {
        **{key: total(key) for key in ("samples", "samples_per_s", "raw_bytes", "bytes_per_s", "fetch_s", "prepare_s")},
        **{key: total(key) for key in rates[0] if key in ("opens_per_s", "stats_per_s", "names_per_s")},
        **{key: total(key) / len(rates) for key in ("seconds", "passes")},
        "tier_bytes": tiers,
        "storage_bytes": storage_bytes,
        "is_short": any(rate["is_short"] for rate in rates),
    }


def _warnings(cache: str, bad: Sequence[CacheState], repeats: Sequence[dict[str, Any]]) -> list[str]:
    warnings = []
    if bad:
        warnings.append(f"data.cache {cache} was not reached in {len(bad)} of {len(repeats)} repeats: {bad[0].summary}")
    short = [repeat for repeat in repeats if repeat["together"]["is_short"]]
    if short:
        warnings.append(
            f"{len(short)} of {len(repeats)} repeats are short: with a cold cache they end after the first pass over "
            "the data set"
        )
    if any(not repeat["together"]["samples"] for repeat in repeats):
        warnings.append(
            "a repeat read nothing: the queues of the readers hold the whole data set; use fewer or more data"
        )
    return warnings


def main(text: str, output: Callable[[str], object] = print) -> int:
    """Carries out an order in JSON; returns the exit code."""
    try:
        try:
            order = RateOrder.model_validate_json(text)
        except ValidationError as error:
            raise UserError(f"order on stdin: {problem_of(RateOrder, error)}") from None
        output(json.dumps(measure(order)))
    except DlbenchError as error:
        print(f"dlbench: error: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except OSError as error:
        print(f"dlbench: error: {error}", file=sys.stderr, flush=True)
        return int(ExitCode.ENVIRONMENT)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(sys.stdin.read(_MAX_ORDER)))
