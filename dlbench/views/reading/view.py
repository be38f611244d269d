"""The view `reading`: which readers, what they read from where, cold and warm epochs apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import percent, place_text
from dlbench.units import format_bytes
from dlbench.views.columns import telling
from dlbench.views.model import Group
from dlbench.views.reading.numbers import (
    COLD_SHARE,
    WARM_SHARE,
    EpochReads,
    ReaderChoice,
    Reading,
    ReadingPoint,
    complement,
    reading,
)
from dlbench.views.view import GroupSource, GroupView, place_columns

NOT_COUNTED = "not counted"

READERS_CAPTION = "Fetching: getting the stored bytes of a sample (I/O); the rest is preparing (decode, augment)."
STORAGE_CAPTION = (
    " From storage: bytes fetched from devices or the network, read-ahead included, over bytes of samples read."
)
EPOCHS_CAPTION = (
    f"Cold: at least {COLD_SHARE * 100:.0f} % of the data set was not in the page cache when the epoch began; warm: at "
    f"most {WARM_SHARE * 100:.0f} %. Fetching and preparing: sums over all readers."
)
CHOICES_CAPTION = "Samples per second of one rank while all ranks read, before training."


class ReadingView(GroupView):
    """What readers did."""

    id = "reading"
    title = "Reading"
    key = "reading"

    def numbers(self, source: GroupSource) -> Reading | None:
        """By rank count and epoch; None for synthetic data."""
        return reading(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """Readers, epochs, and what the automatic choice tried."""
        found = group.of(Reading)
        if found is None:
            return None
        return Section(
            id=self.id,
            title=self.title,
            headline=_finding(found.points[-1]),
            sheets=(
                _readers_sheet(found),
                *((_epochs_sheet(found.epochs),) if found.epochs else ()),
                *((_choices_sheet(found.choices),) if found.choices else ()),
            ),
            notes=tuple(_notes(found)),
        )


def _finding(point: ReadingPoint) -> str:
    if point.fetch_share is None:
        return "unknown what readers spent their time on"
    share = point.fetch_share.value
    text = (
        f"fetching (I/O) takes {percent(share)} of the readers' time"
        if share >= 0.5
        else f"preparing (CPU) takes {percent(1 - share)} of the readers' time"
    )
    if point.storage_share is None:
        return text
    return f"{text}; {percent(min(1.0, point.storage_share))} of the bytes from storage"


def _notes(found: Reading) -> Iterator[str]:
    if found.asked_cache != "any":
        for point in found.points:
            if not point.cache_in_force:
                where = place_text(point.ranks, point.nodes)
                yield f"Warning: data.cache {found.asked_cache} was not in force at {where}: {' | '.join(point.cache)}."
    in_force = (point for point in found.points if point.cache_in_force and point.cached_share is None)
    kept = dict.fromkeys(text for point in in_force for text in point.cache if text)
    yield from (f"Page cache: {text}." for text in kept)


def _readers_sheet(found: Reading) -> Sheet[ReadingPoint]:
    points = found.points
    stored = any(point.storage_share is not None for point in points)
    prefetch = any(point.loader_workers != (0,) for point in points)
    columns: tuple[Column[ReadingPoint], ...] = (
        *place_columns(),
        Column(
            "loader_workers", "Readers per rank", lambda point: _several(point.loader_workers), _workers, is_brief=True
        ),
        Column(
            "prefetch_batches",
            "Batches read ahead, each" if prefetch else "",
            lambda point: _several(point.prefetch_batches),
            lambda point: "none" if point.loader_workers == (0,) else _several(point.prefetch_batches),
        ),
        Column("fetch_share", "Fetching", lambda point: point.fetch_share, has_interval=True, is_brief=True),
        Column(
            "prepare_share",
            "",
            lambda point: None if point.fetch_share is None else complement(point.fetch_share),
            has_interval=True,
        ),
        Column(
            "storage_share",
            "From storage",
            lambda point: point.storage_share,
            lambda point: Cell(NOT_COUNTED) if point.storage_share is None else _share_cell(point.storage_share),
            is_brief=True,
        ),
        Column(
            "cached_share",
            "Data set cached at the start",
            lambda point: point.cached_share,
            lambda point: Cell("unknown") if point.cached_share is None else _share_cell(point.cached_share),
        ),
        Column(
            "cache_in_force",
            "Page cache as asked" if found.asked_cache != "any" else "",
            lambda point: point.cache_in_force,
        ),
        Column("runs", "", lambda point: point.num_runs),
    )
    return Sheet(
        name="readers",
        title="Readers by rank count",
        columns=telling(columns, points),
        rows=points,
        caption=READERS_CAPTION + (STORAGE_CAPTION if stored else ""),
    )


def _several(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _workers(point: ReadingPoint) -> str:
    return "none (training process)" if point.loader_workers == (0,) else _several(point.loader_workers)


def _share_cell(share: float) -> Cell:
    # Above 1, what was fetched beyond the samples: read-ahead, and the programs' own files.
    return Cell(percent(min(1.0, share)), number=share)


def _epochs_sheet(epochs: Sequence[EpochReads]) -> Sheet[EpochReads]:
    is_known = any(one.temperature in ("cold", "warm", "mixed") for one in epochs)

    def tier(name: str, title: str) -> Column[EpochReads]:
        has_any = any(getattr(one, f"{name}_bytes") for one in epochs)
        return Column(
            f"{name}_bytes", title if has_any else "", lambda one: getattr(one, f"{name}_bytes"), unit="bytes"
        )

    columns: tuple[Column[EpochReads], ...] = (
        *place_columns(),
        Column("epoch", "Epoch", lambda one: one.epoch, _epoch_text, is_brief=True),
        Column("is_whole", "", lambda one: one.is_whole),
        Column("temperature", "Cold or warm" if is_known else "", lambda one: one.temperature, is_brief=True),
        tier("shared", "From the shared file system"),
        tier("local", "From node-local disk"),
        tier("memory", "From memory of the node"),
        Column("storage_bytes", "Of it from storage", lambda one: one.storage_bytes, _storage, is_brief=True),
        Column("page_cache_bytes", "From the page cache", lambda one: one.cached_bytes, _cached, is_brief=True),
        Column("fetch_s", "Fetching", lambda one: one.fetch_s, has_interval=True),
        Column("prepare_s", "Preparing", lambda one: one.prepare_s, has_interval=True),
        Column("wait_s", "Wait of a rank", lambda one: one.wait_s, has_interval=True),
        Column("epoch_s", "Length", lambda one: one.seconds, has_interval=True, is_brief=True),
        Column("bytes_per_s", "Rate", lambda one: one.bytes_per_s, _rate),
        Column("samples", "", lambda one: one.samples),
        Column("runs", "", lambda one: one.num_runs),
    )
    return Sheet(
        name="reads",
        title="What was read, epoch by epoch",
        columns=telling(columns, epochs, keep=("epoch",)),
        rows=epochs,
        caption=EPOCHS_CAPTION if is_known else "",
        is_folded=not (is_known and any(one.is_whole for one in epochs)),
    )


def _epoch_text(one: EpochReads) -> Cell:
    return Cell(str(one.epoch) + ("" if one.is_whole else " (a part)"), number=one.epoch)


def _storage(one: EpochReads) -> Cell:
    if one.storage_bytes is None:
        return Cell(NOT_COUNTED)
    return Cell(format_bytes(one.storage_bytes), number=one.storage_bytes)


def _cached(one: EpochReads) -> Cell:
    if one.cached_bytes is None:
        return Cell(NOT_COUNTED)
    return Cell(format_bytes(one.cached_bytes), number=one.cached_bytes)


def _rate(one: EpochReads) -> Cell | None:
    return None if one.bytes_per_s is None else Cell(f"{format_bytes(one.bytes_per_s)}/s", number=one.bytes_per_s)


def _choices_sheet(choices: Sequence[ReaderChoice]) -> Sheet[ReaderChoice]:
    columns: tuple[Column[ReaderChoice], ...] = (
        *place_columns(),
        Column("loader_workers", "Readers per rank", lambda one: one.loader_workers),
        Column("prefetch_batches", "Batches read ahead, each", lambda one: one.prefetch_batches),
        Column("computing", "Beside computing", lambda one: one.computing),
        Column("samples_per_s", "Samples/s of a rank", lambda one: one.samples_per_s, unit="samples/s"),
        Column("is_chosen", "Chosen", lambda one: one.is_chosen),
    )
    return Sheet(
        name="reader-trials",
        title="Automatic choice of readers",
        columns=columns,
        rows=choices,
        caption=CHOICES_CAPTION,
    )
