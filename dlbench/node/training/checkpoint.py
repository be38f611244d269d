"""The state of training as one file: safetensors, with everything that is no tensor as JSON in its header.

A file is written under a temporary name by rank 0 and renamed when it is whole, so that a killed job leaves the ones
before. It holds nothing of a rank: parameters, optimizer and averaged batch-norm statistics are the same on all of
them, the sample order goes on from a place that all ranks share, and dropout is seeded by step and rank. So a run may
go on with another number of ranks, nodes or another engine; with the same ones it goes on bit for bit.

Training stands still for a copy of the state on the host alone. A thread digests and writes it, and pickles nothing:
hashing and writing release Python's lock (hashlib from 2,048 bytes on, and pwrite(2)), so that it takes a core and
bandwidth from training, and its lock for the few microseconds between two pieces. When a run resumes, rank 0 reads and
digests the file, and the engine gives the content to the others.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dlbench.errors import EnvironmentLacksError, IncompleteDataError, PeerLostError, UserError, refused
from dlbench.node.background import BackgroundWorker
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.sharding import Position
from dlbench.node.page_locked import PIECE_BYTES, Beat, locked_memory
from dlbench.node.sync.engine import Engine, SingleEngine, WholeState, whole_tensor
from dlbench.opening import parse_json, require_file, why_unreadable
from dlbench.records.files import TEMPORARY_SUFFIX
from dlbench.records.folder import CHECKPOINT_SUFFIX
from dlbench.records.record import CheckpointWrite, Evaluation
from dlbench.specs.base import CountOrZero, NonNegative, Spec
from dlbench.specs.plan import RunPlan
from dlbench.specs.problems import problem_of

FORMAT = {"format": "dlbench.checkpoint", "version": 1}
_MODEL, _OPTIMIZER = "model/", "optimizer/"
_ALIGNMENT = 8  # Bytes that the header's length is a multiple of, as safetensors recommends.
_APART = mmap.PAGESIZE  # Bytes between tensors' beginnings on the host, or a multiple: locked pieces end there.
_PIECE = 4 << 20  # Bytes that are digested and written at a time.
_BUCKET = 64 << 20  # Bytes that ranks give each other at a time.

_WRITE_BACK = 64 << 20
"""Bytes after which the file system is waited for: one fsync(2) behind gigabytes would be minutes in which a slow file
system looks like one that hangs."""
TURN_S = 1.0  # How long ranks wait for a file before they look whether something of it moved.

SHARED_BY = "data.ranks"
"""Key of a checkpoint's `trained`: the ranks, one of each replica, that samples were shared out to. It may change at an
epoch's end."""


class Progress(Spec):
    """How far training was."""

    step: CountOrZero  # Optimizer steps done.
    samples: CountOrZero  # Samples trained, over all ranks.
    epoch: NonNegative  # Epochs trained.
    position: Position  # Where the sample order goes on.
    train_s: NonNegative
    wall_s: NonNegative  # Since run_start, seconds.
    loss_scaling: dict[str, float]
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of training after some step, on the host; nothing of it changes any more."""

    header: dict[str, Any]  # What the file's header holds, but for the digest.
    tensors: dict[str, Tensor]  # On the CPU, contiguous, each with memory of its own.

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def snapshot(
    whole: WholeState,
    progress: Progress,
    trained: Mapping[str, Any],
    room_for: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
    beat: Beat = lambda _what: None,
) -> Snapshot:
    """A copy of the state, in the order of the current stream: what is queued on it before is in, what follows is not.
    Where ranks share tensors out, the others call `give_shares` meanwhile.
    """
    found = _tensors_of(whole)
    # A copy each: tied weights share memory, which safetensors refuses.
    tensors = dict(room_for(found)) if room_for else {n: torch.empty(t.shape, dtype=t.dtype) for n, t in found.items()}
    for name, tensor in _gathered(found, beat):
        tensors[name].copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in found.values() if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    header = {**FORMAT, "trained": dict(trained), "group_steps": whole.group_steps}
    return Snapshot(header=header | progress.model_dump(mode="json"), tensors=tensors)


def give_shares(whole: WholeState, beat: Beat) -> None:
    """What the other ranks do while rank 0 makes a `snapshot`: one whole tensor after the other, none is kept."""
    for _ in _gathered(_tensors_of(whole), beat):
        pass


def _tensors_of(whole: WholeState) -> dict[str, Tensor]:
    found = {_MODEL + name: tensor for name, tensor in whole.model.items()}
    for index, state in whole.values.items():
        found |= {f"{_OPTIMIZER}{index}/{name}": t for name, t in state.items() if isinstance(t, Tensor)}
    return found


def _gathered(tensors: Mapping[str, Tensor], beat: Beat) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        beat("putting the tensors of a checkpoint together")
        yield name, whole_tensor(tensor.detach())


def write_snapshot(path: Path, taken: Snapshot, on_piece: Callable[[], object] = lambda: None) -> None:
    """Writes one checkpoint as a whole, or nothing; what killed jobs left of theirs goes.

    The digest is made of the pieces as they are written, and put into the header last. `on_piece`: called after each.
    """
    tensors, entries, end = taken.tensors, dict[str, Any](), 0
    # Larger elements first, so that each lies at a multiple of its size: readers map the file.
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        # As safetensors has it: F32 for torch.float32, BF16, I64, U8, BOOL.
        kind = str(tensor.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i").replace("ui", "u")
        entries[name] = {"dtype": kind.upper(), "shape": list(tensor.shape), "data_offsets": [begin, end]}

    def head(digest: str) -> bytes:
        about = json.dumps({**taken.header, "sha256": digest}, sort_keys=True)
        text = json.dumps({"__metadata__": {"dlbench": about}, **entries}).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    first, unsafe = len(head("0" * 64)), 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(exist_ok=True)
        for left in path.parent.glob(f".*{CHECKPOINT_SUFFIX}.*{TEMPORARY_SUFFIX}"):
            left.unlink(missing_ok=True)
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:

            def put(name: str, place: int, piece: memoryview) -> None:
                nonlocal unsafe
                _write_at(opened, piece, first + entries[name]["data_offsets"][0] + place)
                unsafe += len(piece)
                if unsafe >= _WRITE_BACK:
                    os.fdatasync(opened)
                    unsafe = 0
                on_piece()

            digest = _digest(taken.header, tensors, put)
            _write_at(opened, memoryview(head(digest)), 0)
            os.fsync(opened)
        finally:
            os.close(opened)
        temporary.rename(path)
    except (OSError, MemoryError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise refused(error, f"{path}: the checkpoint cannot be written: {why_unreadable(error)}") from None


def _write_at(opened: int, content: memoryview, place: int) -> None:
    while content:
        num = os.pwrite(opened, content, place)
        content, place = content[num:], place + num


_NICENESS = 10
"""Of the thread that writes: on a CPU training computes on all cores of the rank, and its threads wait for each other.
Linux has a nice value for each thread (sched(7))."""


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread, one at a time."""

    def __init__(self, keep: int, beat: Beat = lambda _what: None) -> None:
        self._keep, self._beat = keep, beat
        self._rooms: dict[str, Tensor] = {}
        self._memory = ""  # What kind the rooms are.
        self._worker: BackgroundWorker | None = None
        self._error: BaseException | None = None
        self._wrote_s = self._waited_s = 0.0
        self._begun: CheckpointWrite | None = None
        self.pieces = 0  # Pieces of files that were written; grows as long as something moves.
        self.writes: list[CheckpointWrite] = []

    def begin(self, path: Path, whole: WholeState, progress: Progress, trained: Mapping[str, Any]) -> None:
        """Copies the state and begins to write it; the one before has been waited for."""
        assert self._worker is None
        start = time.monotonic()
        taken = snapshot(whole, progress, trained, self._room_for, self._beat)
        self._wrote_s = self._waited_s = 0.0
        self._begun = CheckpointWrite(
            step=progress.step,
            bytes=taken.num_bytes,
            memory=self._memory,
            snapshot_s=time.monotonic() - start,
            waited_s=0.0,
            write_s=0.0,
        )
        self._worker = BackgroundWorker("dlbench-checkpoint", daemon=False)
        self._worker.put(partial(self._write, path, taken))
        self._worker.close(0)

    def _room_for(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Memory for the state, kept for later checkpoints: new memory costs page faults, or page-locking."""
        forms, known = ({n: (t.shape, t.dtype) for n, t in one.items()} for one in (found, self._rooms))
        if forms == known:
            return self._rooms
        sizes = [-(-tensor.nbytes // _APART) * _APART for tensor in found.values()]
        firsts = [0, *itertools.accumulate(sizes)]
        memory, self._memory = None, "pageable: the state lies on the host"
        if any(tensor.device.type == "cuda" for tensor in found.values()):
            try:
                borders = [0]
                for first, end in itertools.pairwise(firsts):
                    if end - borders[-1] > PIECE_BYTES:  # a tensor that is larger has a piece of its own
                        borders.append(first)
                what = "the state of a checkpoint"
                memory = locked_memory(firsts[-1], what, borders=borders, beat=self._beat)
                self._memory = "page-locked"
            except EnvironmentLacksError as error:  # recorded, and no reason to end training
                self._memory = f"pageable: {error}"
        memory = torch.empty(firsts[-1], dtype=torch.uint8) if memory is None else memory
        self._rooms = {
            name: memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for first, (name, tensor) in zip(firsts, found.items(), strict=False)
        }
        return self._rooms

    def _write(self, path: Path, taken: Snapshot) -> None:
        start = time.monotonic()

        def moved() -> None:
            self.pieces += 1

        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        write_snapshot(path, taken, moved)
        prune(path.parent, self._keep)
        self._wrote_s = time.monotonic() - start

    def require_well(self) -> None:
        """Raises, once, what a checkpoint could not be written for: a RunError."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; whether nothing is being written any more. An error is left to `require_well`."""
        if self._worker is None:
            return True
        start = time.monotonic()
        is_done = self._worker.wait(seconds)
        self._waited_s += time.monotonic() - start
        if not is_done:
            return False
        self._error = self._worker.error
        self._worker = None
        assert self._begun is not None
        if self._error is None:
            times = {"waited_s": self._waited_s, "write_s": self._wrote_s}
            self.writes.append(self._begun.model_copy(update=times))
        return True


def follow(
    look: Callable[[], tuple[bool, int]], gather: Callable[[Any], list[Any]], beat: Callable[[], object]
) -> None:
    """All ranks wait for a file of rank 0, and are alive as long as something of it moves."""
    seen, is_done = -1, False
    while not is_done:
        is_done, pieces = gather(look())[0]
        if pieces > seen:
            beat()
        seen = pieces


def prune(folder: Path, keep: int) -> None:
    """Deletes all but the newest checkpoints of a folder."""
    for path in sorted(folder.glob(f"step-*{CHECKPOINT_SUFFIX}"))[:-keep]:
        path.unlink(missing_ok=True)


def find_checkpoint(place: Path, key: str = "checkpoint.resume_from") -> Path:
    """The file itself, or the newest checkpoint of a run's folder."""
    if place.is_file():
        return place
    found = sorted([*place.glob(f"checkpoints/step-*{CHECKPOINT_SUFFIX}"), *place.glob(f"step-*{CHECKPOINT_SUFFIX}")])
    if not found:
        raise UserError(f"{key} {str(place)!r}: no checkpoint there; give a file or a run's folder")
    return found[-1]


class Header(Progress):
    """What a checkpoint says besides its tensors."""

    format: Literal["dlbench.checkpoint"]
    version: Literal[1]
    sha256: str
    trained: dict[str, Any]
    group_steps: tuple[CountOrZero | None, ...]


class Checkpoint:
    """A checkpoint that has been read and found whole."""

    def __init__(
        self,
        path: Path,
        received: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
        on_piece: Callable[[], object] = lambda: None,
    ) -> None:
        self.path = path
        self._tensors, content = _read(path) if received is None else received
        self._content = content
        if (form := {key: content.get(key) for key in FORMAT}) != FORMAT:
            raise UserError(f"{path}: a checkpoint of another form ({form}); expected {FORMAT}")
        # The file is mapped: its tensors are read here.
        if received is None and content.get("sha256") != _digest(content, self._tensors, lambda *_piece: on_piece()):
            raise IncompleteDataError(f"{path}: damaged: header and tensors do not have the SHA-256 in the header")
        try:
            header = Header.model_validate(content)
        except ValidationError as error:
            raise IncompleteDataError(f"{path}: damaged: {problem_of(Header, error)}") from None
        self.trained = header.trained
        self._group_steps = header.group_steps
        self.progress = Progress(**{name: getattr(header, name) for name in Progress.model_fields})

    @classmethod
    def on_all_ranks(
        cls,
        place: Path,
        *,
        rank: int,
        gather: Callable[[Any], list[Any]],
        broadcast: Callable[[Tensor], object],
        device: torch.device,
        beat: Callable[[str], object],
    ) -> Checkpoint:
        """The checkpoint that rank 0 finds (`find_checkpoint`) and reads, on every rank; called by all of them."""
        pieces = 0

        def moved() -> None:
            nonlocal pieces
            pieces += 1

        def read() -> Checkpoint:
            return cls(find_checkpoint(place), on_piece=moved)

        def look() -> tuple[bool, int]:
            if reading is None:
                return False, 0
            wait([reading], TURN_S)
            return reading.done(), pieces

        reading = ThreadPoolExecutor(1).submit(read) if rank == 0 else None
        follow(look, gather, lambda: beat("reading the checkpoint to go on from"))
        own, said = None, None
        if reading is not None and reading.exception() is None:
            own = reading.result()
            forms = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own._tensors.items()]
            said = {"path": str(own.path), "header": own._content, "forms": forms}
        everyone = gather(said)
        if reading is not None:
            own = reading.result()  # raises when the others know
        if (said := everyone[0]) is None:
            raise PeerLostError("rank 0 cannot read the checkpoint to go on from")
        if own is None:
            tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in said["forms"]}
            own = cls(Path(said["path"]), (tensors, said["header"]))
        if len(everyone) > 1:
            _share(own._tensors, is_source=rank == 0, broadcast=broadcast, device=device, beat=beat)
        return own

    def require(self, trained: Mapping[str, Any]) -> None:
        for key, value in trained.items():
            if self.trained.get(key) != value:
                raise UserError(
                    f"checkpoint.resume_from {self.path}: was trained with {key} {self.trained.get(key)!r}, the plan "
                    f"has {value!r}"
                )

    def weights(self) -> dict[str, Tensor]:
        return {name.removeprefix(_MODEL): t for name, t in self._tensors.items() if name.startswith(_MODEL)}

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None = None) -> None:
        """Moves the tensors into a network and its optimizer, which the engine prepared, if one did."""
        values: dict[int, dict[str, Tensor]] = {}
        try:
            for name, tensor in self._tensors.items():
                if name.startswith(_OPTIMIZER):
                    index, key = name.removeprefix(_OPTIMIZER).split("/", 1)
                    values.setdefault(int(index), {})[key] = tensor
            whole = WholeState(model=self.weights(), values=values, group_steps=list(self._group_steps))
            (engine or SingleEngine()).load_whole(model, optimizer, whole)
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise IncompleteDataError(f"{self.path}: does not fit what is trained: {why_unreadable(error)}") from None
        self._tensors = {}  # a run keeps its checkpoint, and they take as much memory as its state


def _share(
    tensors: Mapping[str, Tensor],
    *,
    is_source: bool,
    broadcast: Callable[[Tensor], object],
    device: torch.device,
    beat: Callable[[str], object],
) -> None:
    """Fills the tensors of all ranks with those of the source, byte for byte, by way of the device."""
    contents = [tensor.flatten().view(torch.uint8) for tensor in tensors.values()]
    pieces = deque(one[place : place + _BUCKET] for one in contents for place in range(0, len(one), _BUCKET))
    while pieces:
        taken, num = [pieces.popleft()], 0
        while pieces and sum(map(len, taken)) + len(pieces[0]) <= _BUCKET:
            taken.append(pieces.popleft())
        total = sum(map(len, taken))
        bucket = torch.cat(taken).to(device) if is_source else torch.empty(total, dtype=torch.uint8, device=device)
        broadcast(bucket)
        for piece in () if is_source else taken:
            piece.copy_(bucket[num : num + len(piece)])
            num += len(piece)
        beat("handing the checkpoint on to all ranks")


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        require_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why_unreadable(error)}") from None
    try:
        with safe_open(path, framework="pt") as file:
            content = parse_json((file.metadata() or {})["dlbench"])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except KeyError:
        raise IncompleteDataError(f"{path}: not a checkpoint of dlbench: its header does not say what it is") from None
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise IncompleteDataError(f"{path}: not a readable checkpoint: {why_unreadable(error)}") from None
    if not isinstance(content, dict):
        raise IncompleteDataError(f"{path}: not a readable checkpoint: its header holds no object")
    return tensors, content


def _digest(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    visit: Callable[[str, int, memoryview], object] = lambda _name, _place, _piece: None,
) -> str:
    """SHA-256 over the header, but for the digest itself, and over name, type, shape and bytes of every tensor."""
    rest = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        content = tensor.flatten().view(torch.uint8).numpy().data
        for place in range(0, len(content), _PIECE):
            piece = content[place : place + _PIECE]
            digest.update(piece)
            visit(name, place, piece)
    return digest.hexdigest()


def trained_identity(plan: RunPlan) -> dict[str, Any]:
    """What a checkpoint must have been trained with, by key; batch, ranks, rates and precision may change."""
    workload, data = plan.workload, plan.workload.data
    model = workload.model.model_dump(mode="json", exclude={"memory_format", "attention"})
    found = {
        **{f"model.{key}": value for key, value in model.items()},
        "train.optimizer.name": workload.train.optimizer.name,
        "train.seed": workload.train.seed,
        "data.is_synthetic": data.is_synthetic,
    }
    if data.is_synthetic:
        return found
    if data.shuffle == "global":
        return found | {"data.shuffle": "global"}
    shuffle = f"partial:{data.exchanged_share:g}" if data.exchanged_share else "local"
    return found | {"data.shuffle": shuffle, "data.partition": data.partition}


def data_identity(source: BatchSource) -> dict[str, Any]:
    """What of a data set decides the sample order and its contents, for checkpoints; nothing for synthetic data."""
    if source.order is None:
        return {}
    described = source.describe()
    return {f"data.{key}": described[key] for key in ("kind", "num_samples", "index_sha256")}


def ranks_before(plan: RunPlan, checkpoint: Checkpoint) -> int:
    """Among how many samples were shared out when the checkpoint was written; as now, where nobody holds any."""
    data = plan.workload.data
    if data.is_synthetic or data.shuffle == "global":
        return plan.replicas
    return int(checkpoint.trained.get(SHARED_BY, plan.replicas))


def require_same_holders(plan: RunPlan, checkpoint: Checkpoint) -> None:
    """Proves that the samples which each rank holds are those that it went on with, or that an epoch begins."""
    before, progress = ranks_before(plan, checkpoint), checkpoint.progress
    if before != plan.replicas and progress.position.place:
        raise UserError(
            f"checkpoint.resume_from {checkpoint.path}: written within epoch {progress.position.epoch} by {before} "
            f"ranks, each of which has read a part of its own samples (data.shuffle {plan.workload.data.shuffle}); "
            f"{plan.replicas} can only go on from the end of an epoch (checkpoint.every_epochs)"
        )
