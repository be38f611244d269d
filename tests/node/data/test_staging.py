"""Staging on one node: what is copied, what is found again, what is refused, and what stays where things go wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.datasets.shuffling import ownership_for
from dlbench.datasets.staging import copying
from dlbench.datasets.staging.copying import tier_path
from dlbench.datasets.staging.samples import STORE_BYTES, choose_kept
from dlbench.errors import DlbenchError, EnvironmentLacksError, ExitCode, IncompleteDataError, PeerLostError, UserError
from dlbench.node.data import staging
from dlbench.node.data.reader import BadSampleError, DataReader
from dlbench.node.data.source import open_training
from dlbench.node.data.staging import NodeStaging, Parts, StagedData
from dlbench.node.sync.engine import Engine
from dlbench.node.training.input_data import Staging, open_training_data, stage_data
from dlbench.process_tree import HeldFolder
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from dlbench.specs.system import TierSpec
from tests.support.datasets import write_manifest, write_tree
from tests.support.leftovers import Leftovers
from tests.support.one_rank import context_of
from tests.support.training_data import data_context, rank_place

pytest.importorskip("PIL.Image")

RANKS = 2
Tree = dict[str, bytes]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tree(tmp_path / "set" / "train")
    write_tree(tmp_path / "set" / "validation")
    return tmp_path / "set"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def plan_of(data: Path, place: Path, strategy: str, **overrides: Any) -> RunPlan:
    """A plan of two ranks on one node; `overrides` with `__` for a dot."""
    wanted = {
        "data.staging": strategy,
        "data.shuffle": "local" if strategy == "shard" else "global",
        "system.storage.local.path": str(place),
        "train.batch_per_rank": 1,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    request = Request(workload="resnet50", preset="ci", engine="ddp", data=str(data), points=(RANKS,), overrides=wanted)
    return expand(request, machine_cores=RANKS)[0]


def parts_of(plan: RunPlan) -> Callable[[int], Parts]:
    def parts(num: int) -> Parts:
        ownership = ownership_for(plan.workload.data, num, RANKS, seed=plan.workload.train.seed)
        assert ownership is not None
        return {rank: ownership.part(0, rank).tolist() for rank in range(RANKS)}

    return parts


def opened(plan: RunPlan) -> DataReader:
    return open_training(plan.workload.model, plan.workload.data, plan.workload.train.seed)


def begun(plan: RunPlan) -> NodeStaging:
    work = NodeStaging(plan, 0, "n1", open_reader=lambda: opened(plan), parts=parts_of(plan))
    work.start()
    assert work.wait(60)
    return work


def staged(plan: RunPlan) -> tuple[NodeStaging, StagedData]:
    work = begun(plan)
    if work.error is not None:
        raise work.error
    folder = Path(work.status()["folder"])
    return work, StagedData(plan=plan, folder=folder, evaluates=plan.measure.until == "quality")


def refused(plan: RunPlan) -> DlbenchError:
    error = begun(plan).error
    assert isinstance(error, DlbenchError), error
    return error


def contents(folder: Path) -> Tree:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def own_reader(plan: RunPlan, data: StagedData, rank: int = 0) -> DataReader:
    source = data.train_source()
    spec = plan.workload.data.model_copy(update={"source": str(source)})
    return data.reader(open_training(plan.workload.model, spec, 0), rank)


# What is brought


def test_replicate_copies_the_split_and_leaves_nothing(data: Path, place: Path) -> None:
    plan = plan_of(data, place, "replicate")
    work, held = staged(plan)
    assert held.folder.stat().st_mode & 0o777 == 0o700
    assert contents(held.folder / "data" / "train") == contents(data / "train")
    assert not (held.folder / "data" / "validation").exists()  # nothing evaluates
    reader = own_reader(plan, held)
    raw = reader.fetch(3)
    assert (raw.data, raw.tier) == (opened(plan).fetch(3).data, "local")
    assert reader.describe() == opened(plan).describe()
    node, warnings = work.finished()
    assert (node.items, node.copied_bytes, warnings) == (15, sum(map(len, contents(data / "train").values())), [])
    work.close()
    assert list(place.iterdir()) == []


def test_replicate_brings_the_validation_data_of_a_run_that_evaluates(data: Path, place: Path) -> None:
    plan = plan_of(data, place, "replicate", measure__until="quality")
    work, held = staged(plan)
    copied = held.validation_source()
    assert copied is not None
    assert contents(copied) == contents(data / "validation")
    assert held.train_source() == copied.parent / "train"
    work.close()


@pytest.mark.parametrize("strategy", ["replicate", "shard", "lazy"])
def test_batches_are_those_of_the_source(data: Path, place: Path, strategy: str) -> None:
    plan = plan_of(data, place, strategy)
    work, held = staged(plan)
    spec, model = plan.workload.data, plan.workload.model
    batches = []
    for which in (None, cast(Any, SimpleNamespace(data=held))):
        seed = plan.workload.train.seed
        source = open_training_data(data_context(model, spec, rank=1, world_size=RANKS, seed=seed), None, which)
        batches.append([next(source) for _ in range(8)])
        source.close()
    assert all((a[name] == b[name]).all() for a, b in zip(*batches, strict=True) for name in a)
    work.close()
    assert list(place.iterdir()) == []


def test_shard_holds_each_sample_at_its_rank_and_reads_no_source(data: Path, place: Path) -> None:
    plan = plan_of(data, place, "shard")
    work, held = staged(plan)
    parts = parts_of(plan)(15)
    assert {rank: sorted(held.store(rank).indices()) for rank in parts} == {r: sorted(p) for r, p in parts.items()}
    whole = opened(plan)
    reader = own_reader(plan, held, rank=1)
    first, other = parts[1][0], parts[0][0]
    expected = whole.fetch(first).data
    for path in (data / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    assert reader.fetch(first).data == expected
    with pytest.raises(BadSampleError, match="missing"):
        reader.fetch(other)
    work.close()


def test_lazy_keeps_what_is_read_and_never_asks_again(data: Path, place: Path) -> None:
    plan = plan_of(data, place, "lazy")
    work, held = staged(plan)
    reader = own_reader(plan, held)
    assert reader.fetch(4).tier == "shared"
    again = reader.fetch(4)
    assert (again.tier, again.data) == ("local", opened(plan).fetch(4).data)
    node, _ = work.finished()
    assert (node.items, node.copied_bytes) == (1, len(again.data))
    work.close()
    assert list(place.iterdir()) == []


@given(st.lists(st.integers(0, 9000), max_size=60), st.integers(0, 200_000), st.integers(0, 2**31))
def test_what_lazy_keeps_fits_and_is_the_same_everywhere(sizes: list[int], capacity: int, seed: int) -> None:
    block = 512
    known = np.asarray(sizes, dtype=np.int64)
    kept = choose_kept(known, capacity, seed=seed, block=block)
    taken = -(-(known + STORE_BYTES) // block) * block
    assert taken[kept].sum() <= capacity
    assert (kept == choose_kept(known, capacity, seed=seed, block=block)).all()
    if taken.sum() <= capacity:
        assert kept.all()
    more = choose_kept(known, capacity + 10_000, seed=seed, block=block)
    assert (more | ~kept).all()  # with more room nothing is put out


def test_lazy_keeps_part_where_capacity_is_short_and_says_so(data: Path, place: Path) -> None:
    plan = plan_of(data, place, "lazy", system__storage__local__capacity_bytes=5 * 4096)
    work, held = staged(plan)
    reader = own_reader(plan, held)
    tiers = [[reader.fetch(index).tier for index in range(15)] for _ in range(2)]
    assert tiers[0] == ["shared"] * 15
    assert 0 < tiers[1].count("local") <= 5
    assert "5 of 15 samples" in work.status()["warnings"][0] or tiers[1].count("local") < 5
    work.close()


def test_lazy_goes_on_without_a_disk_that_is_full(data: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(data, place, "lazy")
    work, held = staged(plan)
    reader = own_reader(plan, held)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dlbench.datasets.staging.samples.SampleStore.put", full)
    assert [reader.fetch(1).tier for _ in range(2)] == ["shared", "shared"]
    _, warnings = work.finished()
    assert len(warnings) == 1
    assert "is full" in warnings[0]
    work.close()


# Kept, and found again


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_kept_samples_are_not_copied_again_unless_they_differ(data: Path, place: Path, strategy: str) -> None:
    write_manifest(data, kind="images", made_with={}, counts={"train": 15})
    plan = plan_of(data, place, strategy, data__keep_staged=True)
    first, held = staged(plan)
    whole = contents(held.folder)
    first.close()
    (kept,) = place.iterdir()
    inside = [p for p in kept.rglob("*") if p.is_file() and (p.suffix == ".jpg" or p.name.isdigit())]
    inside[0].write_bytes(inside[0].read_bytes()[:-1])
    before = inside[1].stat()
    inside[1].write_bytes(b"x" + inside[1].read_bytes()[1:])
    os.utime(inside[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    inside[2].unlink()
    second, _ = staged(plan)
    node, _ = second.finished()
    second.close()
    assert node.items == 15
    assert 0 < node.copied_bytes < node.needed_bytes == node.copied_bytes + node.reused_bytes
    assert {k: v for k, v in contents(kept).items() if "jpg" in k or k[-1].isdigit()} == {
        k: v for k, v in whole.items() if "jpg" in k or k[-1].isdigit()
    }


@pytest.mark.parametrize("strategy", ["replicate", "shard", "lazy"])
def test_a_changed_source_is_staged_anew(data: Path, place: Path, strategy: str) -> None:
    plan = plan_of(data, place, strategy, data__keep_staged=True)
    for change in (False, True):
        work, held = staged(plan)
        if change:
            node, _ = work.finished()
            assert node.reused_bytes < node.needed_bytes
        reader = own_reader(plan, held)
        wanted = parts_of(plan_of(data, place, "shard"))(15)[0][0]
        assert reader.fetch(wanted).data == opened(plan).fetch(wanted).data
        work.close()
        path = sorted((data / "train").rglob("*.jpg"))[wanted]
        path.write_bytes(path.read_bytes() + b"more")


def test_a_kill_in_the_middle_is_taken_up_where_it_was(
    data: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(data, place, "replicate", data__keep_staged=True, data__staging_streams=1)
    pid = os.fork()
    if pid == 0:
        copied: list[object] = []
        copy = copying.copy_file

        def dies(*given: Any, **options: Any) -> Any:
            if len(copied) == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            copied.append(copy(*given, **options))
            return copied[-1]

        monkeypatch.setattr(copying, "copy_file", dies)
        begun(plan)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (kept,) = place.iterdir()
    (kept / ".partial-7").write_bytes(b"torn")
    work, held = staged(plan)
    node, _ = work.finished()
    assert node.reused_bytes == sum(p.stat().st_size for p in sorted((data / "train").rglob("*.jpg"))[:6])
    assert contents(held.folder / "data" / "train") == contents(data / "train")
    assert not list(held.folder.glob(".partial*"))
    work.close()


def test_two_jobs_never_mix(data: Path, place: Path) -> None:
    plan = plan_of(data, place, "shard", data__keep_staged=True)
    one, first = staged(plan)
    two, second = staged(plan)
    assert first.folder != second.folder
    assert "another job" in two.status()["warnings"][0]
    two.close()
    one.close()
    assert list(place.iterdir()) == [first.folder]


# What is refused before a byte is copied


def test_what_does_not_fit_is_told_before_anything_is_copied(
    data: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = refused(plan_of(data, place, "replicate", system__storage__local__capacity_bytes=1000))
    assert small.exit_code == ExitCode.ENVIRONMENT
    assert "capacity_bytes is 1000 B" in str(small)
    assert list(place.iterdir()) == []
    monkeypatch.setattr(staging, "lies_in_memory", lambda _: True)
    monkeypatch.setattr(staging, "available_bytes", lambda: 5000)
    short = refused(plan_of(data, place, "shard"))
    assert "needs 60 KiB; 4.883 KiB are free within the job's limit of memory" in str(short)
    assert list(place.iterdir()) == []


def test_a_tier_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    def why(path: str) -> str:
        with pytest.raises(EnvironmentLacksError) as found:
            tier_path(TierSpec(path=path), "local", {"EMPTY": "", "REL": "a"}, "n7")
        return str(found.value)

    assert "$SCRATCH is not set on n7" in why("$SCRATCH/x")
    assert "$EMPTY is not set" in why("$EMPTY")
    assert "does not begin with /" in why("$REL")
    assert "No such file" in why(str(tmp_path / "{host}"))
    assert "n7" in why(str(tmp_path / "{host}"))
    assert "is not a folder" in why(str(tmp_path / "file"))
    assert "not sticky" in why(str(tmp_path / "open"))
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "not writable" in why(str(tmp_path))
    monkeypatch.undo()
    (tmp_path / "n7").mkdir()
    found = tier_path(TierSpec(path="$ROOT/{host}"), "local", {"ROOT": str(tmp_path)}, "n7")
    assert found == tmp_path / "n7"
    private = {"TMPDIR": str(tmp_path / "dlb-0")}  # what a supervisor gives its rank, and removes
    (tmp_path / "dlb-0").mkdir()
    (tmp_path / "dlb-0" / ".held").touch()
    assert tier_path(TierSpec(path="$TMPDIR"), "local", private, "n7") == tmp_path


def test_a_folder_that_somebody_else_made_is_not_used(data: Path, place: Path) -> None:
    plan = plan_of(data, place, "lazy", data__keep_staged=True)
    work, held = staged(plan)
    work.close()
    held.folder.chmod(0o755)
    assert "not a private folder of this user" in str(refused(plan))
    moved = held.folder.rename(place / "aside")
    held.folder.symlink_to(moved)
    assert "not a private folder of this user" in str(refused(plan))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda train: (train / "class 0" / "x.jpg").symlink_to("/etc/hostname"), "is a link out of the data set"),
        (
            lambda train: (train / "class 0" / "x.jpg").symlink_to("../../../secret.jpg"),
            "is a link out of the data set",
        ),
        (lambda train: (train / "class 0" / "x.jpg").symlink_to("nowhere"), "is a broken link"),
        (lambda train: (train / "class 9").symlink_to("class 0"), "link to a folder"),
        (lambda train: os.mkfifo(train / "class 0" / "x.jpg"), "a named pipe"),
    ],
)
def test_links_out_of_the_data_set_are_not_copied(
    data: Path, place: Path, make: Callable[[Path], None], why: str
) -> None:
    (data.parent / "secret.jpg").write_bytes(b"secret")
    make(data / "train")
    error = refused(plan_of(data, place, "replicate"))
    assert isinstance(error, UserError)
    assert why in str(error)
    assert list(place.iterdir()) == []


def test_a_link_within_the_data_set_becomes_a_file(data: Path, place: Path) -> None:
    target = sorted((data / "validation").rglob("*.jpg"))[0]
    (data / "train" / "class 0" / "link.jpg").symlink_to(target)
    work, held = staged(plan_of(data, place, "replicate"))
    copied = held.folder / "data" / "train" / "class 0" / "link.jpg"
    assert not copied.is_symlink()
    assert copied.read_bytes() == target.read_bytes()
    work.close()


# What goes wrong on the way


def test_a_file_that_is_not_what_the_manifest_says(data: Path, place: Path) -> None:
    write_manifest(data, kind="images", made_with={}, counts={"train": 15})
    staged(plan_of(data, place, "replicate"))[0].close()
    path = sorted((data / "train").rglob("*.jpg"))[7]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    error = refused(plan_of(data, place, "replicate"))
    assert isinstance(error, IncompleteDataError)
    assert path.name in str(error)
    assert list(place.iterdir()) == []


def test_a_file_that_changes_while_it_is_copied(data: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = copying.open_file

    def grows(path: Path) -> Any:
        path.write_bytes(path.read_bytes() + b"more")
        return opening(path)

    monkeypatch.setattr(copying, "open_file", grows)
    assert "changed while it was staged" in str(refused(plan_of(data, place, "replicate")))
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_disk_that_fills_is_left_as_it_was(
    data: Path, place: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, keep: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = plan_of(data, place, strategy, data__keep_staged=keep)
    name = "copying.copy_file" if strategy == "replicate" else "samples.SampleStore.put"
    monkeypatch.setattr(f"dlbench.datasets.staging.{name}", full)
    error = refused(plan)
    assert error.exit_code == ExitCode.ENVIRONMENT
    assert "No space left on device after 0 B of" in str(error)
    assert "were free before" in str(error)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("strategy", ["shard", "lazy"])
@pytest.mark.parametrize("harm", ["missing", "cut off", "changed"])
def test_a_staged_sample_that_is_harmed_is_bad_by_name(data: Path, place: Path, strategy: str, harm: str) -> None:
    plan = plan_of(data, place, strategy)
    work, held = staged(plan)
    index = parts_of(plan_of(data, place, "shard"))(15)[0][0]
    reader = own_reader(plan, held)
    reader.fetch(index)
    path = held.store(0).path(index)
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if harm == "cut off" else b"\0" + content[1:])
    if strategy == "lazy" and harm == "missing":
        assert reader.fetch(index).tier == "shared"  # never kept is no harm
    else:
        with pytest.raises(BadSampleError, match=str(path)) as found:
            reader.fetch(index)
        assert ".jpg" in str(found.value)
    work.close()


def test_a_replica_changed_while_it_was_used_is_told(data: Path, place: Path) -> None:
    work, held = staged(plan_of(data, place, "replicate"))
    files = sorted((held.folder / "data").rglob("*.jpg"))
    files[0].write_bytes(b"")
    files[1].unlink()
    _, warnings = work.finished()
    assert "2 staged files" in warnings[0]
    work.close()


def test_a_cancelled_staging_leaves_nothing(data: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(data, place, "replicate", data__staging_streams=1)
    slow = copying.copy_file
    monkeypatch.setattr(copying, "copy_file", lambda *a, **k: (time.sleep(0.05), slow(*a, **k))[1])
    work = NodeStaging(plan, 0, "n1", open_reader=lambda: opened(plan), parts=parts_of(plan))
    work.start()
    time.sleep(0.1)
    work.cancel()
    assert list(place.iterdir()) == []


# However the process ends


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_however_the_rank_ends(leftovers: Leftovers, data: Path, place: Path, number: int) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom dlbench.datasets.staging.copying import StagingFolder\n"
        "held = StagingFolder(Path(sys.argv[1]), 'local', 'x', keep=False, host='n1')\n"
        "(held.path / 'sample').write_bytes(b'1')\n"
        f"os.kill(os.getpid() if {int(number)} == 9 else os.getppid(), {int(number)})\nsignal.pause()\n"
    )
    words = [sys.executable, "-P", "-m", "dlbench.supervisor", sys.executable, "-c", code, str(place)]
    subprocess.run(words, env=leftovers.environment, timeout=60, check=False, capture_output=True)
    assert list(place.iterdir()) == []
    assert leftovers.within() == []


def test_what_a_killed_node_left_is_removed_by_the_next(data: Path, place: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom dlbench.datasets.staging.copying import StagingFolder\n"
        "held = StagingFolder(Path(sys.argv[1]), 'local', 'x', keep=False, host='n1')\n"
        "(held.path / 'sample').write_bytes(b'1')\nos.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, place], check=False)
    assert len(list(place.iterdir())) == 1
    work, held = staged(plan_of(data, place, "replicate"))
    assert list(place.iterdir()) == [held.folder]
    work.close()


def test_who_still_keeps_samples_makes_nothing_anew(data: Path, place: Path) -> None:
    """Another rank of the node may read on for a moment when the one that staged is killed."""
    plan = plan_of(data, place, "lazy")
    work, held = staged(plan)
    reader = own_reader(plan, held)
    reader.fetch(1)
    work.close()
    assert reader.fetch(2).tier == "shared"
    assert list(place.iterdir()) == []


# Over several nodes


class Meeting:
    """Two ranks as threads; what `stage` needs of an engine."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._values: list[Any] = [None] * RANKS

    def of(self, rank: int) -> Engine:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = json.loads(json.dumps(value))
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return cast("Engine", SimpleNamespace(gather=gather))


def staged_on_two_nodes(plan: RunPlan) -> list[Staging | BaseException | None]:
    meeting = Meeting()

    def rank(number: int) -> Staging | BaseException | None:
        try:
            return stage_data(context_of(plan, engine=meeting.of(number), place=rank_place(number, 2, 1)), None)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def test_each_node_stages_its_own_ranks_samples(data: Path, place: Path) -> None:
    for name in ("n0", "n1"):
        (place / name).mkdir()
    plan = plan_of(data, place / "{host}", "shard")
    found = [one for one in staged_on_two_nodes(plan) if isinstance(one, Staging)]
    parts = parts_of(plan)(15)
    assert [one.data.folder.parent.name for one in found] == ["n0", "n1"]
    for rank, one in enumerate(found):
        assert sorted(one.data.store(rank).indices()) == sorted(parts[rank])
        assert not one.data.store(1 - rank).folder.exists()
    told: list[Any] = [SimpleNamespace(**one.summary(cast(Any, None)), warnings=()) for one in found]
    result = found[0].record(told)["staging"]
    assert [(node.host, node.items) for node in result.nodes] == [("n0", len(parts[0])), ("n1", len(parts[1]))]
    for one in found:
        one.remove()
    assert [list((place / name).iterdir()) for name in ("n0", "n1")] == [[], []]


def test_the_error_of_one_node_ends_all_and_is_the_cause(data: Path, place: Path) -> None:
    (place / "n0").mkdir()
    there, missing = staged_on_two_nodes(plan_of(data, place / "{host}", "replicate"))
    assert isinstance(missing, EnvironmentLacksError)
    assert "n1" in str(missing)
    assert isinstance(there, PeerLostError)  # no cause
    assert str(missing) in str(there)
    assert list((place / "n0").iterdir()) == []


def test_a_rank_that_hangs_in_a_read_does_not_keep_its_folder(
    tmp_path: Path, data: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL waits for a read from a slow file system to end; the supervisor does not, and the lock is still held."""
    (tmp_path / "tmp").mkdir()
    supervisors = HeldFolder([str(tmp_path / "tmp")])
    monkeypatch.setenv("TMPDIR", supervisors.path)
    work, _ = staged(plan_of(data, place, "shard"))
    supervisors.remove()
    assert [list(place.iterdir()), list((tmp_path / "tmp").iterdir())] == [[], []]
    work.close()
