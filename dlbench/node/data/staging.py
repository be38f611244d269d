"""Staging on one node: its first rank copies data to a folder of a storage tier, in a thread."""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.splits import train_folder, validation_folder
from dlbench.datasets.staging.copying import (
    Room,
    SourceFile,
    StagingFolder,
    Tally,
    block_of,
    changed_files,
    disk_full_error,
    replicate,
    staging_identity,
    tier_path,
)
from dlbench.datasets.staging.samples import (
    DamagedSampleError,
    Fetch,
    Keeping,
    SampleStore,
    choose_kept,
    fill,
    find_whole,
    sample_sizes,
    stored_bytes,
)
from dlbench.errors import UserError
from dlbench.machine.cgroup import available_bytes, lies_in_memory
from dlbench.node.data.reader import Arrays, BadSampleError, DataReader, Raw, WrappedReader, path_text
from dlbench.node.failures import BackgroundWorker
from dlbench.opening import read_bytes
from dlbench.records.data_path import StagedNode
from dlbench.specs.plan import RunPlan
from dlbench.specs.system import StagingTier
from dlbench.units import counted, first_of

_SAMPLES = "samples"
_CHOICE = "kept.npy"
_BY_CRC = "CRC-32 of each sample, computed when it was read first and compared whenever it is read again"
Parts = Mapping[int, Sequence[int]]  # sample numbers by rank


class _Staged(WrappedReader):
    """Base of readers whose `fetch` reads staged samples."""

    def __init__(self, reader: DataReader, tier: StagingTier) -> None:
        super().__init__(reader)
        self._tier = tier

    def _from(self, store: SampleStore, index: int) -> bytes | None:
        try:
            return store.get(index)
        except DamagedSampleError as error:
            raise BadSampleError(f"{self.name(index)}, staged to {error}") from None
        except OSError as error:
            raise self._lost(store, index, error.strerror or str(error)) from None

    def _lost(self, store: SampleStore, index: int, why: str) -> BadSampleError:
        return BadSampleError(f"{self.name(index)}, staged to {str(store.path(index))!r}: {why}")


class HeldReader(_Staged):
    """Reads the samples of a rank from its node (shard), never from the source."""

    def __init__(self, reader: DataReader, store: SampleStore, tier: StagingTier) -> None:
        super().__init__(reader, tier)
        self._store = store

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        data = self._from(self._store, index)
        if data is None:
            raise self._lost(self._store, index, "missing")
        return Raw(data, self._tier)

    def files(self) -> list[Path]:
        return [self._store.path(index) for index in self._store.indices()]


class KeepingReader(_Staged):
    """Keeps samples, those of `kept` (num_samples,), when they are first read (lazy), until the disk is full."""

    def __init__(
        self, reader: DataReader, store: SampleStore, tier: StagingTier, kept: NDArray[np.bool_] | None
    ) -> None:
        super().__init__(reader, tier)
        self._store, self._kept = store, kept
        self._keeping = Keeping(store.folder.parent)
        self._is_on = True

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        may_be_kept = self._kept is None or bool(self._kept[index])
        if may_be_kept and (data := self._from(self._store, index)) is not None:
            return Raw(data, self._tier)
        raw = self._reader.fetch(index)
        if may_be_kept and self._is_on and raw.data:
            try:
                self._store.put(index, raw.data)
            except OSError:
                # With a full disk or another error the source is read, and the record says that keeping ended.
                self._is_on = False
                self._keeping.stop()
        return raw

    def files(self) -> list[Path]:
        return [*self._reader.files(), *(self._store.path(index) for index in self._store.indices())]


class ReplicaReader(_Staged):
    """Reads a copy of the data set on the node."""

    def __init__(self, reader: DataReader, tier: StagingTier, source: Path) -> None:
        super().__init__(reader, tier)
        self._source = source

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        return replace(self._reader.fetch(index, out), tier=self._tier)

    def describe(self) -> dict[str, object]:
        return {**self._reader.describe(), "path": path_text(self._source)}


@dataclass(frozen=True, kw_only=True)
class StagedData:
    """The staged data of a node, for its ranks."""

    plan: RunPlan
    folder: Path
    evaluates: bool  # True if the copy has validation data, too.

    def train_source(self) -> Path:
        """Returns the folder or file from which training data is read."""
        source = Path(self.plan.workload.data.source)
        if self.plan.workload.data.staging != "replicate":
            return train_folder(source)
        name = next(iter(replicated_parts(self.plan)))
        if not name and source.is_file():
            name = source.resolve().name
        return self.folder / "data" / name

    def validation_source(self) -> Path | None:
        """Returns the folder of the copied validation data; None if it is read from the source."""
        if self.plan.workload.data.staging != "replicate" or not self.evaluates:
            return None
        if len(parts := replicated_parts(self.plan)) < 2:
            return None
        return self.folder / "data" / list(parts)[1]

    def reader(self, reader: DataReader, rank: int) -> DataReader:
        """Converts a reader of `train_source` to one of the staged data, for one rank."""
        data = self.plan.workload.data
        if data.staging == "replicate":
            return ReplicaReader(reader, data.staging_tier, train_folder(Path(data.source)))
        if data.staging == "shard":
            return HeldReader(reader, self.store(rank), data.staging_tier)
        path, num, is_kept = self.folder / _CHOICE, reader.num_samples, None
        if path.exists():
            is_kept = np.unpackbits(np.frombuffer(read_bytes(path, num + 8), np.uint8), count=num).astype(bool)
        return KeepingReader(reader, self.store(rank), data.staging_tier, is_kept)

    def store(self, rank: int) -> SampleStore:
        """Returns the store of a rank's samples: its own for shard, that of the node for lazy."""
        if self.plan.workload.data.staging == "shard":
            return SampleStore(self.folder / f"rank-{rank:04d}")
        return SampleStore(self.folder / _SAMPLES)


def replicated_parts(plan: RunPlan) -> dict[str, Path]:
    """Returns the folders that `replicate` copies, by their names in the copy."""
    data = plan.workload.data
    source = Path(data.source)
    train = train_folder(source)
    if train == source:
        return {"": source}
    validation = validation_folder(source)
    parts = {train.name: train}
    if validation is not None and data.validation is None and plan.measure.until == "quality":
        parts[validation.name] = validation
    return parts


class NodeStaging:
    """Stages one node in a thread. `parts` returns, for a number of samples, those of each rank of the node (shard)."""

    def __init__(
        self,
        plan: RunPlan,
        node_rank: int,
        host: str,
        *,
        open_reader: Callable[[], DataReader],
        parts: Callable[[int], Parts],
    ) -> None:
        self._plan, self._node_rank, self._host = plan, node_rank, host
        self._open_reader, self._parts = open_reader, parts
        self._data = plan.workload.data
        self._tier = plan.system.storage.tier(self._data.staging_tier)
        self._folder: StagingFolder | None = None
        self._room = Room(0)
        self._copied: Sequence[SourceFile] = ()
        self._node: StagedNode | None = None
        self._verification_text = ""
        self._warnings: list[str] = []
        self._worker: BackgroundWorker | None = None
        self._begun = time.monotonic()
        self.tally = Tally()

    def start(self) -> None:
        self._begun = time.monotonic()
        self._worker = BackgroundWorker("dlbench-staging")
        self._worker.put(self._run)

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds`; returns whether staging is done."""
        return self._worker is not None and self._worker.wait(seconds)

    @property
    def error(self) -> BaseException | None:
        return None if self._worker is None else self._worker.error

    def cancel(self) -> None:
        """Ends staging because another node failed, and removes its data unless it is kept."""
        self.tally.cancelled.set()
        # If the file system hangs, the supervisor removes the folder when this process has ended.
        if self.wait(5.0):
            self.close()

    def status(self) -> dict[str, Any]:
        tally = self.tally
        is_done = self.wait(0)
        error = node = None
        folder = ""
        if is_done:
            if self.error:
                error = str(self.error) or type(self.error).__name__
            if self._folder is not None:
                folder = str(self._folder.path)
            if self._node is not None:
                node = self._node.model_dump(mode="json")
        return {
            "done": is_done,
            "copied": tally.copied + tally.reused,
            "needed": tally.needed,
            "beats": tally.copied + tally.reused + tally.looked,
            "error": error,
            "folder": folder,
            "verification_text": self._verification_text,
            "warnings": self._warnings,
            "node": node,
        }

    def finished(self) -> tuple[StagedNode | None, list[str]]:
        """Returns the result of this node after training, with the counts of lazy staging, and warnings."""
        node, folder = self._node, self._folder
        if node is None or folder is None:
            return None, []
        warnings: list[str] = []
        if self._data.staging == "lazy":
            if Keeping(folder.path).has_stopped():
                warnings.append(
                    f"data.staging lazy: the disk of {str(folder.path)!r} on {self._host} is full or cannot be "
                    "written; other samples were read from the source each time"
                )
            store = SampleStore(folder.path / _SAMPLES)
            sizes = [store.path(index).stat().st_size for index in store.indices()]
            node = node.model_copy(
                update={"items": len(sizes), "copied_bytes": max(0, sum(sizes) - 4 * len(sizes) - node.reused_bytes)}
            )
        if self._data.staging == "replicate":
            changed = changed_files(self._copied, folder.path)
            if changed:
                warnings.append(
                    f"{counted(len(changed), 'staged file')} of {self._host} changed or disappeared while the run read "
                    f"them: {first_of(changed, 3)}"
                )
        return node, warnings

    def close(self) -> None:
        """Removes staged data unless it is kept; a second call does nothing."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _run(self) -> None:
        try:
            self._stage()
        except BaseException as error:
            explained, is_full = self._explained(error)
            folder, self._folder = self._folder, None
            if folder is not None:
                # On a full disk everything is removed; otherwise the next run continues with a kept folder.
                folder.close(keep=not is_full)
            raise explained from None

    def _explained(self, error: BaseException) -> tuple[BaseException, bool]:
        """Returns the error to be reported, and whether it is that of a full disk."""
        if isinstance(error, OSError):
            path = self._folder.path if self._folder else self._tier.path
            full = disk_full_error(error, f"{str(path)!r} on {self._host}", self.tally, self._room.free)
            return full or error, full is not None
        if isinstance(error, BadSampleError):
            return UserError(f"{error}; repair it, or set data.on_bad_sample to skip"), False
        return error, False

    def _stage(self) -> None:
        data, train = self._data, self._plan.workload.train
        parts: dict[str, object] = {"strategy": data.staging, "source": str(Path(data.source).resolve())}
        if data.staging == "shard":
            layout = self._plan.layout
            parts |= {"ranks": layout.ranks, "node": self._node_rank, "seed": train.seed, "rule": data.partition}
        identity = staging_identity(**parts)
        place = tier_path(self._tier, data.staging_tier, os.environ, self._host)
        folder = StagingFolder(place, data.staging_tier, identity, keep=data.keep_staged, host=self._host)
        self._folder = folder
        if folder.warning:
            self._warnings.append(folder.warning)
        kinds = {"replicate": self._replicate, "shard": self._shard, "lazy": self._lazy}
        kinds[data.staging](folder)
        tally = self.tally
        self._node = StagedNode(
            node_rank=self._node_rank,
            host=self._host,
            path=str(folder.path),
            needed_bytes=tally.needed,
            free_bytes=self._room.free,
            copied_bytes=tally.copied,
            reused_bytes=tally.reused,
            items=tally.items,
            seconds=time.monotonic() - self._begun,
        )

    def _require(self, folder: StagingFolder, needed: int, files: int) -> None:
        available_in_memory = available_bytes() if lies_in_memory(folder.path) else None
        self._room = folder.require(needed, files, self._tier.capacity_bytes, available_in_memory)

    def _require_stored(self, sizes: Collection[int]) -> None:
        if sizes and not any(sizes):
            raise UserError(
                f"data.staging {self._data.staging}: samples of this data are in the memory of each rank, so "
                "that there is nothing to stage; set it to none"
            )

    def _replicate(self, folder: StagingFolder) -> None:
        self._copied, self._verification_text = replicate(
            replicated_parts(self._plan),
            Path(self._data.source),
            folder,
            streams=self._data.staging_streams,
            tally=self.tally,
            require=partial(self._require, folder),
        )

    def _shard(self, folder: StagingFolder) -> None:
        tally, streams = self.tally, self._data.staging_streams
        reader = self._open_reader()
        try:
            parts = {rank: list(map(int, indices)) for rank, indices in self._parts(reader.num_samples).items()}
            stores = {rank: SampleStore(folder.path / f"rank-{rank:04d}") for rank in parts}
            _forget_changed(folder, reader, Path(self._data.source))
            present = find_whole(stores, parts, tally)
            all_samples = sorted(set().union(*parts.values()))
            sizes = dict(zip(all_samples, sample_sizes(_size_of(reader), all_samples, streams, tally), strict=True))
            self._require_stored(sizes.values())
            missing: dict[int, list[int]] = {}
            for rank, indices in parts.items():
                missing[rank] = [index for index in indices if index not in present[rank]]
            tally.needed = sum(sizes[index] for index in chain.from_iterable(parts.values()))
            written = [sizes[index] for index in chain.from_iterable(missing.values())]
            to_write = stored_bytes(written, folder.path)
            # Partial shuffling: samples arrive before sent ones are deleted (Nguyen et al.: (1 + Q) N / M).
            exchanged_bytes = int(self._data.exchanged_share * stored_bytes(list(sizes.values()), folder.path))
            self._require(folder, to_write + exchanged_bytes, len(written))
            copy = pickle.dumps(reader)
            readers: list[DataReader] = []

            def open_fetch() -> Fetch:
                # A copy for each thread, because readers are not thread-safe; the pickle is of this process.
                readers.append(pickle.loads(copy))  # noqa: S301
                copied_reader = readers[-1]
                return lambda index: copied_reader.fetch(index).data

            try:
                fill(
                    stores,
                    missing,
                    open_fetch,
                    streams=streams,
                    tally=tally,
                    on_bad=lambda error: isinstance(error, BadSampleError) and self._data.on_bad_sample == "skip",
                )
            finally:
                for copied_reader in readers:
                    copied_reader.close()
        finally:
            reader.close()
        self._verification_text = _BY_CRC

    def _lazy(self, folder: StagingFolder) -> None:
        tally = self.tally
        store = SampleStore(folder.path / _SAMPLES)
        reader = self._open_reader()
        try:
            _forget_changed(folder, reader, Path(self._data.source))
            indices = range(reader.num_samples)
            sizes = sample_sizes(_size_of(reader), indices, self._data.staging_streams, tally)
            self._require_stored(sizes)
        finally:
            reader.close()
        store.remove_partial()
        tally.reused = sum(sizes[index] for index in store.indices() if index < len(sizes))
        tally.needed = sum(sizes)
        self._room = folder.room(available_bytes() if lies_in_memory(folder.path) else None)
        capacity = self._tier.capacity_bytes
        if capacity is not None and stored_bytes(sizes, folder.path) > capacity:
            is_kept = choose_kept(
                np.asarray(sizes, dtype=np.int64),
                capacity,
                seed=self._plan.workload.train.seed,
                block=block_of(folder.path),
            )
            (folder.path / _CHOICE).write_bytes(np.packbits(is_kept).tobytes())
            self._warnings.append(
                f"data.staging lazy: storage.{self._data.staging_tier}.capacity_bytes is enough for "
                f"{int(is_kept.sum()):,} of {len(is_kept):,} samples per node; others are read from the source"
            )
        else:
            with suppress(FileNotFoundError):
                (folder.path / _CHOICE).unlink()
        store.folder.mkdir(exist_ok=True)
        Keeping(folder.path).begin()
        self._verification_text = _BY_CRC


def _forget_changed(folder: StagingFolder, reader: DataReader, source: Path) -> None:
    """Empties a kept folder if the source has changed since it was filled."""
    if not folder.kept:
        return
    index = reader.describe().get("index_sha256")
    now = staging_identity(index=index, num=reader.num_samples, files=_fingerprint(source))
    note = folder.path / "source.txt"
    try:
        recorded = read_bytes(note, 100, follow=False).decode(errors="replace")
    except OSError:
        recorded = ""
    if recorded != now:
        folder.empty()
        note.write_text(now)


def _fingerprint(source: Path) -> str:
    """Returns a digest of names, sizes and times of all files below a folder, or size and time of one file."""
    digest = hashlib.sha256()
    if source.is_file():
        status = source.stat()
        return f"{status.st_size} {status.st_mtime_ns}"
    for folder, folders, files in os.walk(source):
        folders.sort()
        for name in sorted(files):
            with suppress(OSError):
                status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118
                digest.update(os.fsencode(name) + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _size_of(reader: DataReader) -> Callable[[int], int]:
    def ask(index: int) -> int:
        try:
            return reader.num_bytes(index)
        except BadSampleError:
            return 0  # reported when the sample is read

    return ask
