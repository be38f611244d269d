"""Files listed by one rank, names of samples, readers that end with their rank."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dlbench.datasets.arrays import packed, unpacked
from dlbench.datasets.images.image_set import JpegTree
from dlbench.datasets.making.image_recipes import PackRecipe
from dlbench.datasets.making.production import produce
from dlbench.errors import PeerLostError, UserError
from dlbench.node.data import node_sharing
from dlbench.node.data.node_sharing import IndexBroadcast
from dlbench.node.data.source import data_set
from dlbench.node.rendezvous import socket_address
from dlbench.node.training.context import RankContext
from dlbench.node.training.input_data import open_training_data, open_validation_data
from dlbench.records.registry import data_title
from dlbench.records.scan import read_run
from dlbench.specs.workload import CosmoFlowModel, DataSpec, DensityData, ImageData, ModelSpec, ResNetModel
from tests.datasets.test_text import BERT, sentences, text_spec
from tests.support.datasets import write_manifest, write_tree, write_volumes
from tests.support.leftovers import Leftovers
from tests.support.paths import ROOT
from tests.support.run_factory import Story, constant, plans, write_run
from tests.support.training_data import data_context

RESNET = ResNetModel(family="resnet", image_size=32, num_classes=3, stage_blocks=(1, 1, 1, 1), base_width=8)
COSMOFLOW = CosmoFlowModel(family="cosmoflow", input_size=32, conv_channels=(4, 4), dense_sizes=(8,))
NAMES = itertools.count()


def listers(size: int, timeout_s: float = 60.0) -> list[IndexBroadcast]:
    name = f"test {os.getpid()} {next(NAMES)}"
    return [
        IndexBroadcast(name=name, first_rank=4, local_rank=rank, local_size=size, timeout_s=timeout_s)
        for rank in range(size)
    ]


def on_ranks(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returns or raises, all at once, each in a thread."""

    def called(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(called, calls))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each thread listed a folder or opened a file by its name."""
    found: Counter[str] = Counter()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            found[threading.current_thread().name] += 1
            return call(*arguments, **options)

        return count

    for name in ("scandir", "listdir", "open"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return found


def data_of(kind: str, folder: Path) -> tuple[ModelSpec, DataSpec]:
    for split, num in (("train", 12), ("validation", 6)):
        below = folder / split
        if kind in ("tree", "tar"):
            write_tree(below)
        elif kind == "density":
            write_volumes(below, num, seed=num)
        else:
            below.mkdir(parents=True)
            (below / "a.txt").write_text(sentences(4 * num))
    if kind == "tar":
        produce(PackRecipe(train=folder / "train", validation=folder / "validation"), folder / "tar")
        for index in (folder / "tar").rglob("index.npz"):
            index.unlink()
    source = str(folder / {"tar": "tar"}.get(kind, ""))
    if kind in ("tree", "tar"):
        return RESNET, ImageData(format="images", source=source)
    if kind == "density":
        return COSMOFLOW, DensityData(format="density", source=source)
    return BERT, text_spec(source)


def batches(source: Iterator[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return list(itertools.islice(source, 2))


@pytest.mark.parametrize("kind", ["tree", "tar", "density", "text"])
def test_one_rank_lists_and_all_read_the_same(kind: str, tmp_path: Path, looked: Counter[str]) -> None:
    if kind == "density":
        pytest.importorskip("h5py")
    model, data = data_of(kind, tmp_path)

    def opened(context: RankContext) -> Any:
        threading.current_thread().name = f"rank {context.place.rank}"
        return open_training_data(context, None, None), open_validation_data(context, None)

    about: dict[str, Any] = {"batch_size": 2, "world_size": 3, "seed": 3}
    alone, evaluated_alone = opened(data_context(model, data, rank=1, **about))
    about["token"] = f"test {os.getpid()} {next(NAMES)}"
    contexts = [data_context(model, data, rank=rank, **about) for rank in range(3)]
    looked.clear()
    ranks = on_ranks([partial(opened, context) for context in contexts])
    assert looked["rank 1"] == looked["rank 2"] == 0
    assert looked["rank 0"] > 0
    source, evaluated = ranks[1]
    assert source.describe() == alone.describe()
    assert all(
        torch.equal(one[key], other[key])
        for one, other in zip(
            [*batches(source), *evaluated.batches()], [*batches(alone), *evaluated_alone.batches()], strict=True
        )
        for key in one
    )
    for one in (alone, evaluated_alone, *itertools.chain(*ranks)):
        one.close()


def test_failures_are_told_by_the_rank_that_lists(tmp_path: Path) -> None:
    data = ImageData(format="images", source=str(tmp_path / "nowhere"))
    token = f"test {os.getpid()} {next(NAMES)}"
    about: dict[str, Any] = {"batch_size": 2, "world_size": 3, "seed": 3, "token": token, "patience_s": 2.0}
    contexts = [data_context(RESNET, data, rank=rank, **about) for rank in range(3)]
    ranks: list[Any] = [partial(open_training_data, context, None, None) for context in contexts]
    first, *others = on_ranks(ranks)
    assert isinstance(first, UserError)
    assert "no such folder" in str(first)
    for other in others:
        assert isinstance(other, PeerLostError)
        assert "nowhere" not in str(other), "told once, by the first"


def test_nobody_is_waited_for_without_end() -> None:
    (first, *_), (_, second, _) = listers(3, 0.2), listers(3, 0.2)
    missed, late = on_ranks([lambda: first.index(lambda: 1, ()), lambda: second.index(lambda: 1, ())])
    assert isinstance(missed, PeerLostError)
    assert "rank 5, 6 did not ask for the index of the data set within" in str(missed)
    assert isinstance(late, PeerLostError)
    assert "rank 4 did not open the data set" in str(late)


def test_a_rank_that_dies_while_it_lists_is_told_at_once() -> None:
    name = f"dying {os.getpid()}"
    about = f"name={name!r}, first_rank=4, local_size=2, timeout_s=60"
    code = (
        "import os, time\nfrom dlbench.node.data.node_sharing import IndexBroadcast\n"
        "from dlbench.node.rendezvous import socket_address\n"
        f"mark = socket_address('index ' + {name!r} + ' 1').decode().replace(chr(0), '@')\n"
        "def dies():\n"
        # One socket that listens, and one more for the other rank that has come.
        "    while open('/proc/net/unix').read().count(mark) < 2:\n        time.sleep(0.01)\n"
        "    os._exit(9)\n"
        f"IndexBroadcast({about}, local_rank=0).index(dies, ())"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT):
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 4 ended while it opened the data set for this node"):
            IndexBroadcast(name=name, first_rank=4, local_rank=1, local_size=2, timeout_s=60).index(lambda: 1, ())
        assert time.monotonic() - began < 50


def test_other_users_get_and_give_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sharing, "is_own_user", lambda _connection: False)
    first, second = listers(2, 5.0)
    given, got = on_ranks([lambda: first.index(lambda: 1, ()), lambda: second.index(lambda: 1, ())])
    assert isinstance(given, PeerLostError), "nobody was given anything"
    assert "another user of this machine listens under the name" in str(got)


def indexes_open() -> list[str]:
    """Descriptors and maps of handed out indexes that this process has."""
    found = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            found.append(str(descriptor.readlink()))
    return [line for line in found if "memfd:dlbench-index" in line]


def test_nothing_stays_and_nobody_can_change_it() -> None:
    ranks = listers(2)
    one, other = on_ranks([lambda lister=lister: lister.index(lambda: np.arange(1000), ()) for lister in ranks])
    assert (one == other).all()
    assert not one.flags.writeable
    assert not other.flags.writeable
    assert indexes_open()
    with pytest.raises(ValueError, match="read-only"):
        other[0] = 1
    name = f"index {ranks[0]._name} 1"
    assert socket_address(name)[1:].decode() not in Path("/proc/net/unix").read_text(encoding="utf-8")
    del one, other
    gc.collect()
    assert not indexes_open()


# The form


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other, equal_nan=True)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)
        )
    return type(one) is type(other) and bool(one == other)


@dataclasses.dataclass(frozen=True)
class Inner:
    text: str
    array: np.ndarray


NUMBERS = arrays.arrays(
    st.sampled_from(["<i4", "<i8", "<u2", "<f4", "?"]), arrays.array_shapes(min_dims=1, max_dims=3, min_side=0)
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(), st.binary(), NUMBERS)
LEAVES |= st.binary(min_size=1).map(lambda name: Path(os.fsdecode(name.replace(b"\0", b"/"))))
LEAVES |= st.builds(Inner, st.text(), NUMBERS)


@given(value=st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=6))
def test_what_is_packed_is_unpacked(value: Any) -> None:
    data = b"".join(packed(value))
    assert same(value, unpacked(memoryview(data), (Inner,)))


def test_only_what_is_expected_is_built() -> None:
    data = memoryview(b"".join(packed(Inner("a", np.arange(2)))))
    with pytest.raises(KeyError, match="Inner"):
        unpacked(data, (JpegTree,))
    with pytest.raises(TypeError, match="object cannot be packed into an index"):
        list(packed(object()))
    with pytest.raises(TypeError, match="cannot be packed into an index"):
        list(packed(np.array([object()])))


IMAGENET = {"num_samples": 1_281_167, "classes": 1000}
PHOTOGRAPHS = {"num_samples": 60, "classes": 3}


def made(folder: Path, train: int) -> Path:
    (folder / "train").mkdir(parents=True)
    (folder / "train/one.jpg").write_bytes(b"picture")
    write_manifest(folder, kind="images", made_with={"seed": 0}, counts={"train": train})
    return folder


@pytest.mark.parametrize(
    ("workload", "described", "manifest", "title"),
    [
        ("resnet50", PHOTOGRAPHS, None, "60 JPEGs"),
        ("resnet50", PHOTOGRAPHS, 60, "60 JPEGs made by dlbench"),
        ("resnet50", PHOTOGRAPHS, 400, "60 JPEGs"),  # not the whole of what the manifest lists
        ("resnet50", IMAGENET, None, "ImageNet-2012 (1,281,167 images)"),
        ("resnet50", IMAGENET, 1_281_167, "1,281,167 JPEGs made by dlbench"),
        ("resnet50", {**IMAGENET, "classes": 999}, None, "1,281,167 JPEGs"),
        ("cosmoflow", {"num_samples": 524_288, "shape": [128, 128, 128, 4]}, None, "cosmoUniverse (524,288 volumes)"),
        ("cosmoflow", {"num_samples": 524_288, "shape": [32, 32, 32, 4]}, None, "524,288 density volumes"),
        ("bert", {"num_samples": 4860, "documents": 341}, 341, "4,860 sequences of text made by dlbench"),
    ],
)
def test_data_is_named_by_what_it_is(
    workload: str, described: dict[str, Any], manifest: int | None, title: str, tmp_path: Path
) -> None:
    source = tmp_path / "set"
    if manifest is None:
        source.mkdir()
    else:
        made(source, manifest)
    (plan,) = plans(workload=workload, points=(1,), repeats=1, data=str(source))
    spec = plan.workload.data
    found = data_set(spec, described)
    assert data_set(spec.model_copy(update={"source": str(source / "train")}), described) == found
    times = constant([5.0, 0.0, 30.0, 45.0, 10.0, 10.0])
    run = read_run(write_run(tmp_path / "runs", plan, times, Story(data={**described, **found})).path)
    assert data_title(run) == title


def test_synthetic_data_and_a_damaged_manifest_have_no_name(tmp_path: Path) -> None:
    (plan,) = plans(workload="resnet50", points=(1,), repeats=1)
    assert data_set(plan.workload.data, {"kind": "synthetic"}) == {}
    (tmp_path / "manifest.json").write_text("{}")
    (real,) = plans(workload="resnet50", points=(1,), repeats=1, data=str(tmp_path))
    assert data_set(real.workload.data, PHOTOGRAPHS) == {}


# As LoadedSource starts them, without torch.
RANK = """
import multiprocessing, os, signal, time
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["dlbench.node.data.end_with_rank"])
os.environ["DLBENCH_LOADERS_OF"] = str(os.getpid())
loaders = [context.Process(target=time.sleep, args=(1000,)) for _ in range(2)]
for loader in loaders:
    loader.start()
    print(loader.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("wait_s", [None, 0.0, 0.01, 0.05, 0.1])
def test_loaders_end_with_a_killed_rank(tmp_path: Path, wait_s: float | None) -> None:
    """Killed after they have started, or at any time while they do."""
    with Leftovers() as leftovers:
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=leftovers.environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert rank.stdout is not None
        if wait_s is None:
            rank.stdout.readline()
            rank.stdout.readline()
            assert len(leftovers.processes()) == 5  # with the fork server and the resource tracker
        else:
            deadline = time.monotonic() + 30
            while len(leftovers.processes()) < 3 and time.monotonic() < deadline:
                pass
            time.sleep(wait_s)
        rank.kill()
        rank.communicate()
        assert leftovers.within(files=False) == []  # its supervisor removes the files
