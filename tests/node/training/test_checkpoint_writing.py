"""Checkpoints that a thread writes while training goes on: killed at any moment, full disks, and ranks that resume."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch._subclasses import FakeTensorMode

from dlbench.errors import IncompleteDataError, MachineError, PeerLostError, UserError
from dlbench.node import page_locked
from dlbench.node.sync.engine import SingleEngine
from dlbench.node.training import checkpoint
from dlbench.node.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Snapshot,
    find_checkpoint,
    snapshot,
    write_snapshot,
)
from dlbench.node.training.loop import TrainingLoop
from dlbench.records.scan import Run
from tests.support.forks import run_ranks
from tests.support.one_rank import progress_at, trained, write_checkpoint

CPU = torch.device("cpu")


# A small training, to be killed


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


LAST, EVERY = 8, 2


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums depend on how many threads make them; the processes that are killed have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, after: Callable[[int], object]) -> list[str]:
    """Trains from a step to the last; `after` is called after each. Losses, bit by bit."""
    losses = []
    for step in range(first, LAST):
        torch.manual_seed(step)
        loss = (model(torch.randn(4, 3)) - 1).pow(4).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        after(step + 1)
    return losses


CALLS = ("open", "pwrite", "fsync", "close", "rename", "unlink")


def killed_at_each_call(arguments: Sequence[str]) -> int:
    """One process after the other trains, each killed `stride` calls later, until one comes to its end."""
    torch.set_num_threads(1)
    for moment in range(0, 200, int(arguments[1])):
        process = os.fork()
        if process == 0:
            train_and_write(Path(arguments[0]) / str(moment), moment)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code != -signal.SIGKILL:
            return code
    return 1


def train_and_write(folder: Path, moment: int) -> None:
    """Trains and writes checkpoints; the process kills itself in the writing thread before that call, from 0."""
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **more: Any) -> Any:
            nonlocal calls
            if threading.current_thread().name == "dlbench-checkpoint":
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
            return call(*given, **more)

        return made

    folder.mkdir()
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    model, optimizer = net()
    writer = CheckpointWriter(keep=1)

    def save(step: int) -> None:
        if step % EVERY == 0:
            while not writer.wait(60):
                pass
            writer.require_well()
            writer.begin(
                folder / "checkpoints" / f"step-{step:08d}.safetensors",
                SingleEngine().whole_state(model, optimizer),
                progress_at(step),
                {},
            )

    steps(model, optimizer, 0, save)
    assert writer.wait(60)
    writer.require_well()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_kill_at_any_call_leaves_the_last_whole_checkpoint_and_training_goes_on_bit_for_bit(
    tmp_path: Path, stride: int
) -> None:
    model, optimizer = net()
    expected = steps(model, optimizer, 0, lambda step: None)
    (tmp_path / "logs").mkdir()
    (tmp_path / "runs").mkdir()
    codes, said = run_ranks(killed_at_each_call, [str(tmp_path / "runs"), str(stride)], [{}], tmp_path / "logs")
    assert codes == [0], said
    found, before = set(), 0
    moments = sorted(int(folder.name) for folder in (tmp_path / "runs").iterdir())
    # Of each of 4 checkpoints: open, 7 tensors and the header, fsync, close, rename, and all but one delete another.
    calls = 4 * 13 - 1
    assert moments == [*range(0, calls, stride), -(-calls // stride) * stride]
    for moment in moments:
        folder = tmp_path / "runs" / str(moment)
        model, optimizer = net()
        first = 0
        with suppress(UserError):  # none was whole yet
            kept = Checkpoint(find_checkpoint(folder))
            first = kept.progress.step
            kept.restore(model, optimizer)
        assert first >= before, "an older one than of a kill before it"
        before = first
        found.add(first)
        assert steps(model, optimizer, first, lambda step: None) == expected[first:], moment
        # What a kill left goes with the next checkpoint.
        path = folder / "checkpoints" / "step-00000009.safetensors"
        write_checkpoint(path, model, optimizer, progress_at(9), {})
        assert not list(path.parent.glob(".*"))
    assert found == {0, 2, 4, 6, 8}


def run_in(out: Path, steps: int, **more: object) -> Run:
    out.mkdir(exist_ok=True)
    return trained(out, steps, **more)


# Beside training


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains, order, opens, update = threading.Event(), list[str](), os.open, TrainingLoop._update

    def opened(*given: Any, **more: Any) -> int:
        if threading.current_thread().name == "dlbench-checkpoint":
            # Would training wait, this would never come; and nothing of the state is written before.
            order.append(f"written after a later step: {trains.wait(60)}")
        return opens(*given, **more)

    def updated(loop: TrainingLoop, step: int) -> None:
        update(loop, step)
        order.append(f"step {step}")
        if step == 8:
            trains.set()

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(TrainingLoop, "_update", updated)
    run = run_in(tmp_path, 8, checkpoint__every_steps=5, checkpoint__keep=9)
    record = run.record
    assert record is not None
    # Three checkpoints, after steps 5, 10 and 12 of 0 to 11, and each waits for the one before.
    written = [place for place, what in enumerate(order) if what == "written after a later step: True"]
    assert len(written) == 3
    assert order.index("step 8") < written[0] < order.index("step 10") < written[2]
    assert [write.step for write in record.checkpoint_writes] == [5, 10, 12]
    assert all(write.memory == "pageable: the state lies on the host" for write in record.checkpoint_writes)
    assert all(0 < write.bytes < path.stat().st_size for write, path in zip(
        record.checkpoint_writes, sorted(run.folder.checkpoints.iterdir()), strict=True
    ))  # fmt: skip
    assert all(write.snapshot_s > 0 and write.write_s > 0 for write in record.checkpoint_writes)
    assert record.checkpoint_writes[0].overlapped_s > 0
    (text,) = [text for text in record.warnings if "a thread of rank 0" in text]
    assert text.startswith("a thread of rank 0 wrote 2 checkpoints of ")
    # The state is that of its step, whatever training did while it was written.
    straight = run_in(tmp_path / "straight", 1, checkpoint__every_steps=5)
    one, two = (load_file(one.folder.checkpoint(5)) for one in (run, straight))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def full_disk(from_file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of checkpoints from one on, counted from 1, have no space behind their first kilobyte."""
    pwrite, opens, number = os.pwrite, os.open, 0

    def opened(path: Any, *given: Any, **more: Any) -> int:
        nonlocal number
        number += ".safetensors." in str(path)
        return opens(path, *given, **more)

    def written(file: int, content: memoryview, place: int) -> int:
        if number >= from_file and place > 1024:
            raise OSError(28, os.strerror(28))
        return pwrite(file, content, place)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)


@pytest.mark.parametrize(("every", "kept"), [(4, ["step-00000004.safetensors"]), (9, [])])
def test_a_full_disk_ends_the_run_with_one_line_and_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, kept: list[str]
) -> None:
    full_disk(1 + len(kept), monkeypatch)
    with pytest.raises(MachineError) as told:
        run_in(tmp_path, 8 if kept else 5, checkpoint__every_steps=every)
    step = 2 * every if kept else every
    assert str(told.value).endswith(f"step-{step:08d}.safetensors: the checkpoint cannot be written: {os.strerror(28)}")
    assert "\n" not in str(told.value)
    (folder,) = tmp_path.glob("*/checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == kept


def test_what_ends_training_waits_for_the_checkpoint_and_says_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = TrainingLoop._update

    failing = threading.Event()

    def fails(loop: TrainingLoop, step: int) -> None:
        if step == 5:
            failing.set()
            raise ValueError("a defect")
        update(loop, step)

    monkeypatch.setattr(TrainingLoop, "_update", fails)
    with pytest.raises(ValueError, match="a defect"):
        run_in(tmp_path / "1", 8, checkpoint__every_steps=5)
    (path,) = (tmp_path / "1").glob("*/checkpoints/*")
    assert Checkpoint(path).progress.step == 5
    fsync = os.fsync
    refused: tuple[tuple[Exception, str], ...] = (
        (OSError(5, os.strerror(5)), f"the checkpoint cannot be written: {os.strerror(5)}"),
        (MemoryError(), "the checkpoint cannot be written: MemoryError"),
        (LookupError("a defect of the thread"), "LookupError: a defect of the thread"),
    )
    for number, (error, said) in enumerate(refused):

        def slow(opened: int, error: Exception = error) -> None:
            if threading.current_thread().name == "dlbench-checkpoint":
                failing.wait(60)  # the step that fails comes first
                threading.main_thread().join(0.2)
                raise error
            fsync(opened)

        monkeypatch.setattr(os, "fsync", slow)
        with pytest.raises(ValueError, match="a defect"):
            run_in(tmp_path / f"refused {number}", 8, checkpoint__every_steps=5)
        assert said in capsys.readouterr().err
        assert not list((tmp_path / f"refused {number}").glob("*/checkpoints/step-*"))


# Of a GPU


def on_gpu() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network whose tensors say that they lie on a GPU."""
    model = nn.ParameterDict({"weight": nn.Parameter(torch.empty(256, 1024, device="cuda"))})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_copy_of_a_gpus_state_is_waited_for_on_the_stream_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    copy = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        done.append(f"{other.device.type} to {self.device.type}, {'queued' if non_blocking else 'waited for'}")
        return copy(self, other, non_blocking)

    stream = SimpleNamespace(synchronize=lambda: done.append("synchronised"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with FakeTensorMode():
        model, optimizer = on_gpu()
        monkeypatch.setattr(torch.Tensor, "copy_", copied)
        taken = snapshot(SingleEngine().whole_state(model, optimizer), progress_at(1), {})
    assert done == ["cuda to cpu, queued", "synchronised"]
    assert [tensor.device for tensor in taken.tensors.values()] == [CPU]


@pytest.mark.parametrize(
    ("room", "error", "said"),
    [
        (None, 0, "page-locked"),
        (
            None,
            2,
            "pageable: the state of a checkpoint: cannot page-lock 1.004 MiB of host memory, only 0 B (CUDA error 2)",
        ),
        (
            1 << 19,
            0,
            "pageable: the state of a checkpoint: 1.004 MiB of host memory would be page-locked, but only 512 KiB",
        ),
    ],
)
def test_a_gpus_state_goes_to_page_locked_memory_or_the_record_says_why_not(
    monkeypatch: pytest.MonkeyPatch, room: int | None, error: int, said: str
) -> None:
    lock = partial(page_locked.locked_memory, lock=lambda _first, _size: error, unlock=lambda _first: None)
    monkeypatch.setattr(checkpoint, "locked_memory", lock)
    monkeypatch.setattr(page_locked, "available_bytes", lambda: room)
    with FakeTensorMode():
        model, _ = on_gpu()
        state = {"model/weight": next(model.parameters()).detach(), "model/step": torch.tensor(3)}
    writer = CheckpointWriter(keep=1)
    buffers = writer._buffers_for(state)
    assert writer._memory.startswith(said)
    for name, tensor in state.items():
        assert (buffers[name].shape, buffers[name].dtype, buffers[name].device) == (tensor.shape, tensor.dtype, CPU)
        buffers[name].fill_(7)
    assert writer._buffers_for(state) is buffers
    assert all(bool((one == 7).all()) for one in buffers.values())


# Files


TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
TENSORS = st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=8)


def made(forms: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.randint(0, 2, shape).to(dtype) + n % 2 for n, (dtype, shape) in enumerate(forms)}


@given(TENSORS)
def test_files_are_safetensors_for_everybody(tmp_path_factory: pytest.TempPathFactory, forms: Any) -> None:
    tensors = made(forms)
    path = tmp_path_factory.mktemp("x") / "step-00000001.safetensors"
    write_snapshot(path, Snapshot(header={"a": 1}, tensors=tensors))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0
    about = json.loads(header["__metadata__"]["dlbench"])
    assert about["sha256"] == checkpoint._digest(about, found)


# Ranks that resume


class Ranks:
    """Ranks in threads of one process; what they gather and broadcast crosses a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._values: list[Any] = [None] * size
        self.broadcasts = 0

    def on_each(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank returns or raises."""
        found: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            try:
                found[rank] = work(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        everyone = list(self._values)
        self._barrier.wait()
        return everyone

    def gather(self, rank: int, value: Any) -> list[Any]:
        return list(map(json.loads, self.exchange(rank, json.dumps(value))))

    def broadcast(self, rank: int, tensor: torch.Tensor) -> None:
        self.broadcasts += rank == 0
        tensor.copy_(self.exchange(rank, tensor.clone())[0])

    def resume(self, rank: int, place: Path, beat: Callable[[str], object] = lambda what: None) -> Checkpoint:
        return Checkpoint.on_all_ranks(
            place if rank == 0 else Path("/nowhere"),
            rank=rank,
            gather=lambda value: self.gather(rank, value),
            broadcast=lambda tensor: self.broadcast(rank, tensor),
            device=CPU,
            beat=beat,
        )


@pytest.mark.parametrize("bucket", [8, 40, 1 << 20])
def test_rank_0_alone_reads_and_all_ranks_go_on_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    monkeypatch.setattr(checkpoint, "_BUCKET", bucket)
    model, optimizer = net()
    steps(model, optimizer, 4, lambda step: None)
    write_checkpoint(tmp_path / "step-00000008.safetensors", model, optimizer, progress_at(8), {"train.seed": 0})
    ranks = Ranks(3)
    found = ranks.on_each(lambda rank: ranks.resume(rank, tmp_path))
    total = sum(t.nbytes for t in load_file(tmp_path / "step-00000008.safetensors").values())
    assert -(-total // bucket) <= ranks.broadcasts <= total
    for one in found:
        assert one.path == tmp_path / "step-00000008.safetensors"
        assert one.progress == progress_at(8)
        other, fresh = net()
        one.restore(other, fresh)
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        )
        mine, theirs = optimizer.state_dict()["state"], fresh.state_dict()["state"]
        assert all(torch.equal(mine[n]["momentum_buffer"], theirs[n]["momentum_buffer"]) for n in mine)


def test_what_rank_0_cannot_read_ends_all_ranks_and_one_says_why(tmp_path: Path) -> None:
    ranks = Ranks(2)
    found = ranks.on_each(lambda rank: ranks.resume(rank, tmp_path / "not there"))
    assert [type(error) for error in found] == [UserError, PeerLostError]
    (tmp_path / "step-00000001.safetensors").write_bytes(b"no checkpoint")
    found = ranks.on_each(lambda rank: ranks.resume(rank, tmp_path))
    assert [type(error) for error in found] == [IncompleteDataError, PeerLostError]


def test_ranks_are_alive_while_rank_0_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "TURN_S", 0.01)
    monkeypatch.setattr(checkpoint, "_PIECE", 8)
    write_checkpoint(tmp_path / "step-00000001.safetensors", *net(), progress_at(1), {})
    digest, heard, waited = checkpoint._digest, [threading.Semaphore(0) for _ in range(2)], list[bool]()

    def slow(header: Any, tensors: Any, visit: Callable[[str, int, memoryview], object]) -> str:
        def visited(*piece: Any) -> None:
            visit(*piece)
            # The next piece comes when every rank has heard of this one.
            waited.extend(one.acquire(timeout=60) for one in heard)

        return digest(header, tensors, visited)

    monkeypatch.setattr(checkpoint, "_digest", slow)
    ranks = Ranks(2)
    found = ranks.on_each(lambda rank: ranks.resume(rank, tmp_path, lambda what: heard[rank].release()))
    assert [one.progress.step for one in found] == [1, 1]
    assert len(waited) > 8
    assert all(waited)
