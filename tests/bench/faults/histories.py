"""Histories that somebody else had a hand in: nothing foreign is deleted, nothing of the history is lost."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.bench.faults.catalogue import Fault
from tests.bench.faults.files import MUTATIONS, copy_store, require_whole
from tests.bench.faults.workshop import DidNotHoldError, Workshop

LONG_AGO_S = 3 * 86_400.0


def faults() -> Iterator[Fault]:
    """Everything of this family."""
    for command in ("import", "list"):
        name = f"history {command}: `partial` is a link to a folder of others"
        yield Fault(family="histories", name=name, replay=partial(_linked_partial, name, command))
    yield Fault(family="histories", name="folders of others in `partial`", replay=_strangers_in_partial)
    for kind in ("a file", "a named pipe", "a link to a folder of others", "a link to nothing"):
        name = f"history import: the month is {kind}"
        yield Fault(family="histories", name=name, replay=partial(_month, name, kind))
    for mutation in MUTATIONS:
        name = f"history.json: {mutation}"
        yield Fault(family="histories", name=name, replay=partial(_marker, name, mutation))
        name = f"the index: {mutation}"
        yield Fault(family="histories", name=name, replay=partial(_index, name, mutation))
    for kind in _MEMBERS:
        name = f"history import: an archive with {kind}"
        yield Fault(family="histories", name=name, replay=partial(_archive, name, kind))


def _thesis(folder: Path) -> Path:
    victim = folder / "others" / "thesis"
    victim.mkdir(parents=True)
    (victim / "chapter.txt").write_text("years of work", encoding="utf-8")
    old = time.time() - LONG_AGO_S
    for path in (victim / "chapter.txt", victim, victim.parent):
        os.utime(path, (old, old))
    return victim


def _call(shop: Workshop, store: Path, command: str) -> None:
    words: dict[str, tuple[str | Path, ...]] = {
        "import": ("history", "import", shop.finished, "--store", store),
        "list": ("history", "list", "--store", store),
    }
    shop.call(*words[command]).require((0, 2, 3, 4))


def _linked_partial(name: str, command: str, shop: Workshop) -> None:
    store = copy_store(shop, name)
    thesis = _thesis(store.parent)
    shutil.rmtree(store / "partial")
    (store / "partial").symlink_to(thesis.parent)
    _call(shop, store, command)
    require_whole(thesis, 1)


def _strangers_in_partial(shop: Workshop) -> None:
    store = copy_store(shop, "strangers")
    thesis = _thesis(store.parent)
    shutil.copytree(thesis, store / "partial" / "thesis", copy_function=shutil.copy2)
    (store / "partial" / "link").symlink_to(thesis)
    old = time.time() - LONG_AGO_S
    os.utime(store / "partial" / "thesis", (old, old))
    _call(shop, store, "import")
    require_whole(thesis, 1)
    require_whole(store / "partial" / "thesis", 1)


def _month(name: str, kind: str, shop: Workshop) -> None:
    store = copy_store(shop, name)
    thesis = _thesis(store.parent)
    (month,) = (store / "runs").iterdir()
    shutil.rmtree(month)
    make: dict[str, Callable[[], object]] = {
        "a file": lambda: month.write_text("not a folder", encoding="utf-8"),
        "a named pipe": lambda: os.mkfifo(month),
        "a link to a folder of others": lambda: month.symlink_to(thesis.parent),
        "a link to nothing": lambda: month.symlink_to("nowhere"),
    }
    make[kind]()
    shop.call("history", "import", shop.finished, "--store", store).require((2, 3, 4), month.name)
    require_whole(thesis, 1)
    if len(list(thesis.parent.iterdir())) != 1:
        raise DidNotHoldError("a run was put outside of the history")


def _marker(name: str, mutation: str, shop: Workshop) -> None:
    store = copy_store(shop, name)
    MUTATIONS[mutation](store / "history.json")
    shop.call("history", "list", "--store", store).require((2, 4), "history")


def _index(name: str, mutation: str, shop: Workshop) -> None:
    store = copy_store(shop, name)
    shop.call("history", "list", "--store", store).require((0,), "resnet50")
    MUTATIONS[mutation](store / "index.sqlite")
    shop.call("history", "list", "--store", store).require((0,), "resnet50")


def _link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def _typed(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    return info


_MEMBERS: dict[str, Callable[[], tarfile.TarInfo]] = {
    "a path upwards": lambda: tarfile.TarInfo("../../escaped"),
    "an absolute path": lambda: tarfile.TarInfo("/escaped"),
    "a link out of it": lambda: _link("runs/link", "/etc"),
    "a hard link out of it": lambda: _link("runs/link", "/etc/passwd", tarfile.LNKTYPE),
    "a named pipe": lambda: _typed("runs/pipe", tarfile.FIFOTYPE),
    "a device": lambda: _typed("runs/device", tarfile.CHRTYPE),
    "a name with an escape sequence": lambda: tarfile.TarInfo("runs/\x1b]0;pwn\a/plan.json"),
}


def _archive(name: str, kind: str, shop: Workshop) -> None:
    folder = shop.folder(name)
    archive = folder / "runs.tar"
    with tarfile.open(archive, "w") as tar:
        member = _MEMBERS[kind]()
        content = b"hostile" if member.isreg() else b""
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    store = folder / "inside" / "store"
    shop.call("history", "import", archive, "--store", store).require((2, 4))
    if list(folder.rglob("escaped")):
        raise DidNotHoldError("a file was written outside of the history")
