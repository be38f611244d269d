"""Converts an exception that ends a rank into one line, an exit code, and whether the rank only lost another one; and
works in a background thread, whose exception the training thread raises.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from dlbench.errors import MACHINE_ERRORS, DlbenchError, ExitCode, PeerLostError, RunError
from dlbench.machine.gpus import Gpu, gpu_trouble, restricted_mode
from dlbench.node.ranks import RankPlace
from dlbench.records.status import FailureKind

MAX_CHARACTERS = 200  # Most characters of a library's message.
_MAX_OWN_CHARACTERS = 500  # Most characters of a message of dlbench.
_WRAPPING = (
    r"Got the following error when running the callback: ",
    r"\[(?:rank|Rank) ?\d+\]:? ?",
    # A source location: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]
    r"\[?(?:/|\.\./)[\w./+-]+\.(?:cc|cpp|cu|h|hpp):\d+\]?:? ?",
    r"\[enforce fail at [^\]]*\]\.? ?",
    r"^(?:RuntimeError: )+(?=RuntimeError: )",
)
_TAILS = (
    r"\.? This is typically caused by a remote worker crashing.*",
    r" GLHF!.*",
    r" At: /.*",
    r" ?\(?Exception raised from .*",
    r" frame #\d+: .*",
    r" This was caused by an exception on one of the ranks or an attempt to .*",
    r" ?If reserved but unallocated memory is large .*",
    r" ?To change the (?:timeout|shared memory).*",
    r"\.? Details are lost due to multiprocessing.*",
)
_PEER = re.compile(
    r"Connection (?:reset|closed|refused|was likely closed)|Broken pipe|connection was closed|Socket Timeout"
    r"|[Tt]imed out waiting|Read error \[|Write error \[|Horovod has been shut down|ncclRemoteError|remote process exit"
    r"|another rank is gone|Application timeout caused pair closure|Stop_waiting response is expected"
    r"|failed to recv, got 0 bytes|[Cc]onnectFullMesh failed|Wait timeout|aborted because .* peer"
)
_UNLOADABLE = re.compile(r"(\S+\.so[.\d]*): cannot open shared object file")
_DEVICE_FAULT = re.compile(
    r"CUDA (?:driver )?error: (?!out of memory)|CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)"
    r"|CUBLAS_STATUS_EXECUTION_FAILED|ncclUnhandledCudaError|device-side assert|GPU is lost"
)
_BUSY = "busy or unavailable"  # cudaErrorDevicesUnavailable: the compute mode does not admit this process.
# Faults of a program or an installation; others are of the device, its driver or its bus.
_OWN_CHECK = re.compile(r"device-side assert|illegal memory access|misaligned address|no kernel image|invalid ")
_TORCH_ADVICE = re.compile(r" (?:CUDA kernel errors might|Search for `|For debugging consider|Compile with)")
_NO_MEMORY = re.compile(r"can't allocate memory|^\[Errno 12\]")  # torch's allocator on the host; the kernel.
# Not other resources that are temporarily unavailable, such as the lock of an HDF5 file.
_NO_THREAD = re.compile(r"can't start new thread|(\[Errno 11\] |pthread_create.*: )?Resource temporarily unavailable$")


class BackgroundWorker:
    """Runs functions in a thread, one after another, and keeps the exception of the first that fails, which ends it. By
    default the thread is a daemon, so that a rank that fails elsewhere does not wait for it.
    """

    def __init__(self, name: str, *, changed: threading.Condition | None = None, daemon: bool = True) -> None:
        """Starts the thread. `changed` is notified after each function; several workers may share one."""
        self.error: BaseException | None = None
        self.changed = changed or threading.Condition()
        self._num_waiting = 0
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        with self.changed:
            self._num_waiting += 1
        self._queue.put(work)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits at most so long until all functions have run or one has failed; returns False after a timeout."""
        with self.changed:
            return self.changed.wait_for(lambda: self._num_waiting == 0 or self.error is not None, seconds)

    def require_well(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self, seconds: float | None = None) -> None:
        """Ends the thread after all functions have run, and waits for it at most so long; may be called again."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            error = None
            try:
                if self.error is None:
                    work()
            except BaseException as raised:  # whatever it is, it belongs to the caller
                error = raised
            del work  # it may hold memory
            with self.changed:
                self.error = self.error or error
                self._num_waiting -= 1
                self.changed.notify_all()


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The reason why a rank ends."""

    reason: str  # One line.
    exit_code: ExitCode
    kind: FailureKind
    full_text: str = ""  # The library's full message, if the reason is shorter.


def failure_of(error: BaseException, place: RankPlace | None = None, gpu: Gpu | None = None) -> RankFailure:
    """Returns the reason, exit code and kind of the exception that ends a rank."""
    kind: FailureKind = "peer" if is_of_peer(error) else "own"
    message = " ".join(str(error).split())
    if isinstance(error, DlbenchError):
        code, reason = error.exit_code, condensed(message, _MAX_OWN_CHARACTERS)
    elif place is not None and is_device_fault(error):
        kind = "own"  # the other ranks lose this one, even if NCCL's message blames them
        code, reason = _device_failure(message, place, gpu)
    else:
        code, reason = _host_failure(error, message)
        if kind == "own" and (remedy := _remedy_on_host(error, message)):
            code, reason = ExitCode.ENVIRONMENT, f"{reason}; {remedy}"
    full_text = str(error) if message not in reason else ""
    return RankFailure(reason=reason, exit_code=code, kind=kind, full_text=full_text)


def _host_failure(error: BaseException, message: str) -> tuple[ExitCode, str]:
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("dlbench"):
        return ExitCode.ENVIRONMENT, (
            f"{sys.executable} has no module {error.name}: pip install 'dlbench[node]' there, or name the Python that "
            "has it with `python` in the system file"
        )
    if isinstance(error, ImportError | OSError) and (library := _UNLOADABLE.search(message)):
        return (
            ExitCode.ENVIRONMENT,
            f"{library[1]} is not found at run time: load the module that provides it, or install it again",
        )
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        code = ExitCode.ENVIRONMENT if error.errno in MACHINE_ERRORS else ExitCode.RUN_FAILED
        return code, f"{error.filename}: {error.strerror}"
    name = type(error).__name__
    reason = ": ".join(filter(None, (name, condensed(message))))
    if name == "OutOfMemoryError":  # on a GPU, where a smaller batch may fit
        reason += "; reduce train.batch_per_rank"
    return ExitCode.RUN_FAILED, reason


def _remedy_on_host(error: BaseException, message: str) -> str:
    """Returns the remedy if the host had no memory, process or thread left; else an empty text."""
    if isinstance(error, MemoryError) or _NO_MEMORY.search(message):
        return "reduce train.batch_per_rank, or use fewer ranks per node"
    if _NO_THREAD.match(message):
        return (
            "raise the limit of processes and threads (ulimit -u, pids.max of the cgroup), or use fewer ranks per node"
        )
    return ""


def is_device_fault(error: BaseException) -> bool:
    """Tells whether a GPU failed; torch raises AcceleratorError since 2.8, and RuntimeError before."""
    if isinstance(error, DlbenchError) or not isinstance(error, RuntimeError):
        return False
    if type(error).__name__ == "OutOfMemoryError":
        return False
    return type(error).__name__ == "AcceleratorError" or _DEVICE_FAULT.search(str(error)) is not None


def _device_failure(message: str, place: RankPlace, gpu: Gpu | None) -> tuple[ExitCode, str]:
    device, uuid, state = "its GPU", None, ""
    if gpu is not None:
        device, uuid, state = f"GPU {gpu.uuid} ({gpu.pci_bus_id})", gpu.uuid, gpu_trouble(gpu.uuid)
    # The first sentence is the cause; torch's advice on debugging follows it.
    cause = _TORCH_ADVICE.split(condensed(message))[0].strip()
    reason = f"rank {place.rank} on {place.host}, {device}: {cause}"
    if _BUSY in message and (mode := restricted_mode(uuid)):
        return ExitCode.ENVIRONMENT, (
            f"{reason}; the GPU is in {mode}: give each rank its own GPU, end other processes there, or let the "
            "administrator set the default mode (nvidia-smi --compute-mode=0)"
        )
    if state:
        reason += f"; NVML reports: {state}"
    elif _OWN_CHECK.search(cause):
        reason += "; a kernel refused its input: set CUDA_LAUNCH_BLOCKING=1 to find which"
        return ExitCode.RUN_FAILED, reason
    return ExitCode.RUN_FAILED, (
        f"{reason}; search the kernel's log of {place.host} for Xid (dmesg), exclude the node (slurm.exclude) and run "
        "again"
    )


def passed_on(text: str, error: BaseException) -> RunError:
    """Returns an error with this text: a `PeerLostError` if a library's error means that another rank is gone."""
    return PeerLostError(text) if is_of_peer(error) else RunError(text)


def condensed(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Returns the cause from a library's message, one line of at most `limit` characters."""
    words = " ".join(text.split())
    for pattern in _TAILS:
        words = re.sub(pattern, "", words)
    for pattern in _WRAPPING:
        words = re.sub(pattern, "", words)
    words = re.sub(r"^RuntimeError: ", "", words).strip(" .") or " ".join(text.split())
    if len(words) > limit:
        words = words[: limit - 4].rpartition(" ")[0] + " ..."
    return words


def is_of_peer(error: BaseException) -> bool:
    """Tells whether an error, or one that led to it, means that another rank is gone."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        if isinstance(cause, DlbenchError):
            # Its type decides: behind a lost loader process, too, there is a closed connection.
            return isinstance(cause, PeerLostError)
        if isinstance(cause, ConnectionError) or (isinstance(cause, RuntimeError) and _PEER.search(str(cause))):
            return True
        visited.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False
