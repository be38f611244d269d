"""Readers of staged samples: of what ranks hold, of what is kept when it is read, of a copy of the data set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.datasets.staging.samples import DamagedSampleError, Keeping, SampleStore
from dlbench.node.data.reader import Around, BadSampleError, Raw, SampleReader, path_text
from dlbench.specs.system import StagingTier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class _Staged(Around):
    """Another reader, with `fetch` changed."""

    def __init__(self, reader: SampleReader, tier: StagingTier) -> None:
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
    """Samples that a rank holds on its node (shard); the source is not read.

    Args:
        reader: of the source.
        store: of this rank.
        tier: where it is.
    """

    def __init__(self, reader: SampleReader, store: SampleStore, tier: StagingTier) -> None:
        super().__init__(reader, tier)
        self._store = store

    def fetch(self, index: int) -> Raw:
        """A sample of the store.

        Raises:
            BadSampleError: it is not there, or changed or cut off since it was staged.
        """
        data = self._from(self._store, index)
        if data is None:
            raise self._lost(self._store, index, "missing")
        return Raw(data, self._tier)

    def files(self) -> list[Path]:
        """Those of the store."""
        return [self._store.path(index) for index in self._store.indices()]


class KeepingReader(_Staged):
    """Samples kept on the node when they are first read (lazy), and never removed.

    A full disk ends the keeping, not the run.

    Args:
        reader: of the source.
        store: of this node.
        tier: where it is.
        kept: (num_samples,) which samples may be kept; None: all.
    """

    def __init__(
        self, reader: SampleReader, store: SampleStore, tier: StagingTier, kept: NDArray[np.bool_] | None
    ) -> None:
        super().__init__(reader, tier)
        self._store, self._kept = store, kept
        self._keeping = Keeping(store.folder.parent)
        self._is_on = True

    def fetch(self, index: int) -> Raw:
        """A sample of the store, or else of the source, which is kept where it may be.

        Raises:
            BadSampleError: it cannot be read, or changed or was cut off since it was kept.
        """
        may_be_kept = self._kept is None or bool(self._kept[index])
        data = self._from(self._store, index) if may_be_kept else None
        if data is not None:
            return Raw(data, self._tier)
        raw = self._reader.fetch(index)
        if may_be_kept and self._is_on and raw.data:
            self._keep(index, raw.data)
        return raw

    def files(self) -> list[Path]:
        """Those of the source, and what is kept by now."""
        return [*self._reader.files(), *(self._store.path(index) for index in self._store.indices())]

    def _keep(self, index: int, data: bytes) -> None:
        try:
            self._store.put(index, data)
        except OSError:
            # A full disk or another one: the source serves in any case, and the record says that keeping ended.
            self._is_on = False
            self._keeping.stop()


class ReplicaReader(_Staged):
    """A copy of the data set on the node.

    Args:
        reader: of the copy.
        tier: where it is.
        source: what it is a copy of.
    """

    def __init__(self, reader: SampleReader, tier: StagingTier, source: Path) -> None:
        super().__init__(reader, tier)
        self._source = source

    def fetch(self, index: int) -> Raw:
        """A sample of the copy; BadSampleError as of the reader."""
        return replace(self._reader.fetch(index), tier=self._tier)

    def describe(self) -> dict[str, object]:
        """Of the copy, with the path of the source."""
        return {**self._reader.describe(), "path": path_text(self._source)}
