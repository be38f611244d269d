"""Batches read from files: in the training process, or ahead of it in loader processes.

Loader processes come from a fork server, not from the training process itself: forking a process that has started
MPI, InfiniBand or CUDA is not safe (Horovod's own examples do the same). Epochs follow each other without a gap: the
processes read ahead across their border.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from dlbench.errors import RunError, UserError
from dlbench.node.data.reader import BatchReader, Fetched, SampleReader
from dlbench.node.data.sharding import Key, ShardedOrder

Batch = dict[str, torch.Tensor]
_PREFETCH_BATCHES = 2
"""Batches that each loader process reads ahead."""
_NAMED_CONVERSIONS = 20


class _Batches(Dataset[Fetched]):
    """torch's view of a BatchReader: its "index" is the list of keys of one batch."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __getitem__(self, keys: list[Key]) -> Fetched:
        return self._reader[keys]


class _Order(torch.utils.data.Sampler[list[Key]]):
    def __init__(self, order: ShardedOrder, start_batch: int) -> None:
        self._order, self._start_batch = order, start_batch

    def __iter__(self) -> Iterator[list[Key]]:
        return self._order.batches(self._start_batch)


def _as_it_is(fetched: Any) -> Any:
    return fetched


class _PinWorker:
    """Gives each loader process one thread and, where the rank has several cores, one of them."""

    def __init__(self, cores: list[int]) -> None:
        self._cores = cores

    def __call__(self, worker: int) -> None:
        torch.set_num_threads(1)
        # From the last core down: the training process's main thread tends to sit on the first.
        os.sched_setaffinity(0, {self._cores[-1 - worker % len(self._cores)]})


class LoadedSource:
    """Endless batches of one rank from a SampleReader; see `dlbench.node.data.source.BatchSource`.

    Args:
        reader: the data set.
        order: what this rank reads when.
        loader_workers: loader processes; 0 reads in the calling process when a batch is asked for.
        on_bad_sample: stop the run, or take the next sample of the data set instead.
        start_batch: batches to pass over, for a run that continues another.
        pin_memory: hand out page-locked tensors (needs a GPU).
    """

    def __init__(
        self,
        reader: SampleReader,
        order: ShardedOrder,
        *,
        loader_workers: int,
        on_bad_sample: Literal["stop", "skip"],
        start_batch: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.failures: list[str] = []
        self._reader, self._order, self._loader_workers = reader, order, loader_workers
        self._num_converted = 0
        self._converted: dict[str, None] = {}
        batches = BatchReader(reader, on_bad_sample)
        self._fetched: Iterator[Fetched] | None
        if loader_workers:
            self._fetched = self._start_workers(batches, _Order(order, start_batch), pin_memory)
        else:

            def fetch(keys: list[Key]) -> Fetched:
                return batches[keys].pin_memory() if pin_memory else batches[keys]

            self._fetched = map(fetch, order.batches(start_batch))

    def _start_workers(self, batches: BatchReader, order: _Order, pin_memory: bool) -> Iterator[Fetched]:
        context = multiprocessing.get_context("forkserver")
        # Imports torch once for all loader processes.
        context.set_forkserver_preload([__name__])
        loader: DataLoader[Any] = DataLoader(
            _Batches(batches),
            batch_size=None,
            sampler=order,
            num_workers=self._loader_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=_PinWorker(sorted(os.sched_getaffinity(0))),
            multiprocessing_context=context,
            prefetch_factor=_PREFETCH_BATCHES,
            # torch draws a seed when loader processes start; from its global generator, it would shift dropout.
            generator=torch.Generator(),
        )
        return iter(loader)

    @property
    def num_samples(self) -> int:
        """Samples in the data set, over all ranks."""
        return self._reader.num_samples

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; blocks until it is read.

        Raises:
            UserError: a sample is unreadable and on_bad_sample is stop.
            RunError: a loader process died (out of memory, /dev/shm too small), or the source is closed.
        """
        if self._fetched is None:
            raise RunError("a batch was asked for from a closed data source")
        try:
            fetched = next(self._fetched)
        except (RuntimeError, OSError, EOFError) as error:
            # torch begins what a loader process itself raised with "Caught"; all else is the process's death, seen as
            # a signal, a closed socket or a missing one.
            if self._loader_workers == 0 or str(error).startswith("Caught "):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RunError(f"a loader process of the rank ended: {reason}") from error
        self.failures += fetched.failures
        self._num_converted += len(fetched.converted)
        for text in fetched.converted[: _NAMED_CONVERSIONS - len(self._converted)]:
            self._converted[text] = None
        if fetched.error is not None:
            raise UserError(fetched.error)
        return fetched.batch

    def describe(self) -> dict[str, object]:
        """The reader's description, plus how the data set is dealt out and what went wrong so far; ready for JSON."""
        return {
            **self._reader.describe(),
            "num_samples": self._reader.num_samples,
            "batches_per_epoch": self._order.batches_per_epoch,
            "dropped_per_epoch": self._order.dropped_per_epoch,
            "loader_workers": self._loader_workers,
            "bad_samples": len(self.failures),
            "converted_samples": self._num_converted,
            "converted_names": list(self._converted),
        }

    def close(self) -> None:
        """Ends the loader processes and closes files; twice does no harm."""
        # torch ends the processes when the last reference to its iterator goes, which the traceback of an error may
        # hold; it has no public call for doing so now.
        end = getattr(self._fetched, "_shutdown_workers", None)
        self._fetched = None
        if end is not None:
            end()
        self._reader.close()
