"""The state of training as one safetensors file, with everything that is no tensor as JSON in its header. It holds
nothing of a single rank, so that a run may resume with other ranks, nodes or engines. Training waits only for a copy on
the host, which a thread writes without Python's lock.
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
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.sharding import Position
from dlbench.node.failures import BackgroundWorker
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
_ALIGNMENT = 8  # The header's length is a multiple of these bytes, as safetensors recommends.
_PAGE_BYTES = mmap.PAGESIZE  # Tensors begin at multiples of these bytes on the host: page-locked pieces end there.
_PIECE = 4 << 20  # Bytes that are hashed and written at a time.
_BUCKET = 64 << 20  # Bytes of one broadcast between ranks.

# Bytes after which the writer waits for the file system: one fsync(2) after gigabytes would look like a hang.
_WRITE_BACK = 64 << 20
_NICENESS = 10  # Nice value of the writing thread (sched(7)), since training on a CPU uses all cores of the rank.
TURN_S = 1.0  # Seconds that ranks wait for a file before they compare its progress.
# Key of a checkpoint's `trained`: the number of replicas that divided the samples. It may change at an epoch's end.
SHARED_BY = "data.ranks"


class Progress(Spec):
    """The state of training that is no tensor."""

    step: CountOrZero  # Optimizer steps done.
    samples: CountOrZero  # Samples trained, over all ranks.
    epoch: NonNegative  # Epochs trained.
    position: Position  # Position in the sample order at which training resumes.
    train_s: NonNegative
    wall_s: NonNegative  # Since run_start, seconds.
    loss_scaling: dict[str, float]
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy of the state of training after a step, on the host."""

    header: dict[str, Any]  # Content of the file's header, without the digest.
    tensors: dict[str, Tensor]  # On the CPU, contiguous; no two share memory.

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def snapshot(
    state: WholeState,
    progress: Progress,
    trained: Mapping[str, Any],
    buffers_for: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
    beat: Beat = lambda _what: None,
) -> Snapshot:
    """Returns a copy of the state; if it is sharded, the other ranks must call `give_shares` meanwhile."""
    sources = _tensors_of(state)
    # Each is copied: tied weights share memory, which safetensors refuses.
    if buffers_for:
        tensors = dict(buffers_for(sources))
    else:
        tensors = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in sources.items()}
    for name, tensor in _gathered(sources, beat):
        tensors[name].copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in sources.values() if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    header = {**FORMAT, "trained": dict(trained), "group_steps": state.group_steps}
    return Snapshot(header=header | progress.model_dump(mode="json"), tensors=tensors)


def give_shares(state: WholeState, beat: Beat) -> None:
    """Takes part in gathering sharded tensors while rank 0 makes a `snapshot`; keeps none."""
    for _ in _gathered(_tensors_of(state), beat):
        pass


def _tensors_of(whole: WholeState) -> dict[str, Tensor]:
    tensors = {_MODEL + name: tensor for name, tensor in whole.model.items()}
    for index, state in whole.values.items():
        tensors |= {f"{_OPTIMIZER}{index}/{name}": t for name, t in state.items() if isinstance(t, Tensor)}
    return tensors


def _gathered(tensors: Mapping[str, Tensor], beat: Beat) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        beat("putting the tensors of a checkpoint together")
        yield name, whole_tensor(tensor.detach())


def write_snapshot(path: Path, snapshot: Snapshot, on_piece: Callable[[], object] = lambda: None) -> None:
    """Writes a complete checkpoint or none; calls `on_piece` after each piece."""
    tensors, entries, end = snapshot.tensors, dict[str, Any](), 0
    # Larger elements first, so that each lies at a multiple of its size: readers map the file.
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        # As safetensors has it: F32 for torch.float32, BF16, I64, U8, BOOL.
        kind = str(tensor.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i").replace("ui", "u")
        entries[name] = {"dtype": kind.upper(), "shape": list(tensor.shape), "data_offsets": [begin, end]}

    def head(digest: str) -> bytes:
        content = json.dumps({**snapshot.header, "sha256": digest}, sort_keys=True)
        text = json.dumps({"__metadata__": {"dlbench": content}, **entries}).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    first, unsafe = len(head("0" * 64)), 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(exist_ok=True)
        for leftover in path.parent.glob(f".*{CHECKPOINT_SUFFIX}.*{TEMPORARY_SUFFIX}"):
            leftover.unlink(missing_ok=True)
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:

            def put(name: str, offset: int, piece: memoryview) -> None:
                nonlocal unsafe
                _write_at(opened, piece, first + entries[name]["data_offsets"][0] + offset)
                unsafe += len(piece)
                if unsafe >= _WRITE_BACK:
                    os.fdatasync(opened)
                    unsafe = 0
                on_piece()

            digest = _digest(snapshot.header, tensors, put)
            _write_at(opened, memoryview(head(digest)), 0)
            os.fsync(opened)
        finally:
            os.close(opened)
        temporary.rename(path)
    except (OSError, MemoryError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise refused(error, f"{path}: the checkpoint cannot be written: {why_unreadable(error)}") from None


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _write_at(opened: int, content: memoryview, offset: int) -> None:
    while content:
        num = os.pwrite(opened, content, offset)
        content, offset = content[num:], offset + num


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread, one at a time."""

    def __init__(self, keep: int, beat: Beat = lambda _what: None) -> None:
        self._keep, self._beat = keep, beat
        self._buffers: dict[str, Tensor] = {}
        self._memory = ""  # Kind of memory that the copies lie in, for the record.
        self._worker: BackgroundWorker | None = None
        self._error: BaseException | None = None
        self._wrote_s = self._waited_s = 0.0
        self._begun: CheckpointWrite | None = None
        self.pieces = 0  # Pieces of files that were written; grows as long as something moves.
        self.writes: list[CheckpointWrite] = []

    def begin(self, path: Path, state: WholeState, progress: Progress, trained: Mapping[str, Any]) -> None:
        """Copies the state and starts to write it; the checkpoint before must have been written."""
        assert self._worker is None
        start = time.monotonic()
        copied = snapshot(state, progress, trained, self._buffers_for, self._beat)
        self._wrote_s = self._waited_s = 0.0
        self._begun = CheckpointWrite(
            step=progress.step,
            bytes=copied.num_bytes,
            memory=self._memory,
            snapshot_s=time.monotonic() - start,
            waited_s=0.0,
            write_s=0.0,
        )
        self._worker = BackgroundWorker("dlbench-checkpoint", daemon=False)
        self._worker.put(partial(self._write, path, copied))
        self._worker.close(0)

    def _buffers_for(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns memory for the state, reused by later checkpoints: new memory costs page faults, or page-locking."""
        if _forms(tensors) == _forms(self._buffers):
            return self._buffers
        sizes = [-(-tensor.nbytes // _PAGE_BYTES) * _PAGE_BYTES for tensor in tensors.values()]
        firsts = [0, *itertools.accumulate(sizes)]
        memory, self._memory = torch.empty(0), "pageable: the state lies on the host"
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            try:
                borders = [0]
                for first, end in itertools.pairwise(firsts):
                    if end - borders[-1] > PIECE_BYTES:  # a tensor that is larger has a piece of its own
                        borders.append(first)
                memory = locked_memory(firsts[-1], "the state of a checkpoint", borders=borders, beat=self._beat)
                self._memory = "page-locked"
            except EnvironmentLacksError as error:  # recorded, and no reason to end training
                self._memory = f"pageable: {error}"
        if self._memory != "page-locked":
            memory = torch.empty(firsts[-1], dtype=torch.uint8)
        self._buffers = {
            name: memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for first, (name, tensor) in zip(firsts, tensors.items(), strict=False)
        }
        return self._buffers

    def _write(self, path: Path, copied: Snapshot) -> None:
        start = time.monotonic()

        def moved() -> None:
            self.pieces += 1

        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        write_snapshot(path, copied, moved)
        for older in sorted(path.parent.glob(f"step-*{CHECKPOINT_SUFFIX}"))[: -self._keep]:
            older.unlink(missing_ok=True)
        self._wrote_s = time.monotonic() - start

    def require_well(self) -> None:
        """Raises the RunError of a checkpoint that could not be written, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` for the writer; returns whether it is done. `require_well` raises its error."""
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
            self.writes.append(self._begun.model_copy(update={"waited_s": self._waited_s, "write_s": self._wrote_s}))
        return True


def follow(
    poll: Callable[[], tuple[bool, int]], gather: Callable[[Any], list[Any]], beat: Callable[[], object]
) -> None:
    """Makes all ranks wait for a file of rank 0, whose `poll` returns whether it is done and how many pieces are."""
    pieces_before, is_done = -1, False
    while not is_done:
        is_done, pieces = gather(poll())[0]
        if pieces > pieces_before:
            beat()
        pieces_before = pieces


def find_checkpoint(place: Path, key: str = "checkpoint.resume_from") -> Path:
    """Returns `place` if it is a file, else the newest checkpoint of this run's folder."""
    if place.is_file():
        return place
    checkpoints = sorted(
        [*place.glob(f"checkpoints/step-*{CHECKPOINT_SUFFIX}"), *place.glob(f"step-*{CHECKPOINT_SUFFIX}")]
    )
    if not checkpoints:
        raise UserError(f"{key} {str(place)!r}: no checkpoint there; give a file or a run's folder")
    return checkpoints[-1]


class Header(Progress):
    """The content of a checkpoint's header."""

    format: Literal["dlbench.checkpoint"]
    version: Literal[1]
    sha256: str
    trained: dict[str, Any]
    group_steps: tuple[CountOrZero | None, ...]


class Checkpoint:
    """A checkpoint that was read and whose digest was right."""

    def __init__(
        self,
        path: Path,
        received: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
        on_piece: Callable[[], object] = lambda: None,
    ) -> None:
        self.path = path
        self._tensors, content = received or _read(path)
        self._content = content
        if (form := {key: content.get(key) for key in FORMAT}) != FORMAT:
            raise UserError(f"{path}: a checkpoint of another format ({form}); expected {FORMAT}")
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
        """Reads the checkpoint at `place` (`find_checkpoint`) on rank 0 and returns it on every rank."""
        pieces = 0

        def moved() -> None:
            nonlocal pieces
            pieces += 1

        def read() -> Checkpoint:
            return cls(find_checkpoint(place), on_piece=moved)

        def poll() -> tuple[bool, int]:
            if reading is None:
                return False, 0
            wait([reading], TURN_S)
            return reading.done(), pieces

        reading = ThreadPoolExecutor(1).submit(read) if rank == 0 else None
        follow(poll, gather, partial(beat, "reading the checkpoint to resume from"))
        checkpoint, description = None, None
        if reading is not None and reading.exception() is None:
            checkpoint = reading.result()
            tensors = checkpoint._tensors
            forms = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
            description = {"path": str(checkpoint.path), "header": checkpoint._content, "forms": forms}
        everyone = gather(description)
        if reading is not None:
            checkpoint = reading.result()  # raises when the others know
        if (description := everyone[0]) is None:
            raise PeerLostError("rank 0 cannot read the checkpoint to resume from")
        if checkpoint is None:
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in description["forms"]
            }
            checkpoint = cls(Path(description["path"]), (tensors, description["header"]))
        if len(everyone) > 1:
            _share(checkpoint._tensors, is_source=rank == 0, broadcast=broadcast, device=device, beat=beat)
        return checkpoint

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
        """Copies the tensors into a network and its optimizer, through the engine that prepared them; drops them."""
        values: dict[int, dict[str, Tensor]] = {}
        try:
            for name, tensor in self._tensors.items():
                if name.startswith(_OPTIMIZER):
                    index, key = name.removeprefix(_OPTIMIZER).split("/", 1)
                    values.setdefault(int(index), {})[key] = tensor
            state = WholeState(model=self.weights(), values=values, group_steps=list(self._group_steps))
            (engine or SingleEngine()).load_whole(model, optimizer, state)
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise IncompleteDataError(f"{self.path}: does not fit what is trained: {why_unreadable(error)}") from None
        self._tensors = {}  # the checkpoint lives as long as the run, and they are as large as its state


def _share(
    tensors: Mapping[str, Tensor],
    *,
    is_source: bool,
    broadcast: Callable[[Tensor], object],
    device: torch.device,
    beat: Callable[[str], object],
) -> None:
    """Fills the tensors of all ranks with those of the source, byte for byte, by way of the device."""
    pieces: deque[Tensor] = deque()
    for tensor in tensors.values():
        pieces += torch.split(tensor.flatten().view(torch.uint8), _BUCKET)
    while pieces:
        sent = [pieces.popleft()]
        while pieces and sum(map(len, sent)) + len(pieces[0]) <= _BUCKET:
            sent.append(pieces.popleft())
        total = sum(map(len, sent))
        if is_source:
            bucket = torch.cat(sent).to(device)
        else:
            bucket = torch.empty(total, dtype=torch.uint8, device=device)
        broadcast(bucket)
        if not is_source:
            for piece, received in zip(sent, torch.split(bucket, [len(piece) for piece in sent]), strict=True):
                piece.copy_(received)
        beat("sending the checkpoint to all ranks")


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
        raise IncompleteDataError(f"{path}: not a checkpoint of dlbench: its header has no entry dlbench") from None
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise IncompleteDataError(f"{path}: not a readable checkpoint: {why_unreadable(error)}") from None
    if not isinstance(content, dict):
        raise IncompleteDataError(f"{path}: not a readable checkpoint: its header holds no object")
    return tensors, content


def _digest(
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    visit: Callable[[str, int, memoryview], object] = lambda _name, _offset, _piece: None,
) -> str:
    """Returns the SHA-256 over the header without its digest, and over name, type, shape and bytes of every tensor."""
    signed = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(signed, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        content = tensor.flatten().view(torch.uint8).numpy().data
        for offset in range(0, len(content), _PIECE):
            piece = content[offset : offset + _PIECE]
            digest.update(piece)
            visit(name, offset, piece)
    return digest.hexdigest()


def trained_identity(plan: RunPlan) -> dict[str, Any]:
    """Returns the settings that a resumed run must have in common with its checkpoint, by key."""
    workload, data = plan.workload, plan.workload.data
    model = workload.model.model_dump(mode="json", exclude={"memory_format", "attention"})
    identity = {
        **{f"model.{key}": value for key, value in model.items()},
        "train.optimizer.name": workload.train.optimizer.name,
        "train.seed": workload.train.seed,
        "data.is_synthetic": data.is_synthetic,
    }
    if data.is_synthetic:
        return identity
    if data.shuffle == "global":
        return identity | {"data.shuffle": "global"}
    shuffle = f"partial:{data.exchanged_share:g}" if data.exchanged_share else "local"
    return identity | {"data.shuffle": shuffle, "data.partition": data.partition}


def data_identity(source: BatchSource) -> dict[str, Any]:
    """Returns the facts of a data set that decide the sample order and its contents; none for synthetic data."""
    if source.order is None:
        return {}
    described = source.describe()
    return {f"data.{key}": described[key] for key in ("kind", "num_samples", "index_sha256")}


def ranks_before(plan: RunPlan, checkpoint: Checkpoint) -> int:
    """Returns the number of replicas that samples were divided among when the checkpoint was written."""
    data = plan.workload.data
    if data.is_synthetic or data.shuffle == "global":
        return plan.replicas
    return int(checkpoint.trained.get(SHARED_BY, plan.replicas))


def require_same_holders(plan: RunPlan, checkpoint: Checkpoint) -> None:
    """Raises UserError if ranks would hold other samples than before in the middle of an epoch."""
    before, progress = ranks_before(plan, checkpoint), checkpoint.progress
    if before != plan.replicas and progress.position.place:
        raise UserError(
            f"checkpoint.resume_from {checkpoint.path}: written within epoch {progress.position.epoch} by {before} "
            f"ranks, each of which has read a part of its own samples (data.shuffle {plan.workload.data.shuffle}); "
            f"{plan.replicas} can only resume at the end of an epoch (checkpoint.every_epochs)"
        )
