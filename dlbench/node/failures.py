"""An exception that ends a rank becomes one line, an exit code, and whether the rank is a cause or lost another one.

torch, Gloo, NCCL and Horovod wrap a cause into frames, places in their sources and advice. The line holds the cause;
the whole text belongs into the rank's log.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from dlbench.errors import MACHINE_ERRORS, DlbenchError, ExitCode, PeerLostError, RunError
from dlbench.machine.gpus import Gpu, gpu_trouble, restricted_mode
from dlbench.node.ranks import RankPlace
from dlbench.records.status import FailureKind

MAX_CHARACTERS = 200  # Of a library's words; what dlbench says itself may be longer.
_MAX_OWN_CHARACTERS = 500

_WRAPPING = (
    r"Got the following error when running the callback: ",
    r"\[(?:rank|Rank) ?\d+\]:? ?",
    # A place in a source: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]
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
_BUSY = "busy or unavailable"
"""Of cudaErrorDevicesUnavailable: a GPU whose compute mode keeps this process off it, or one that is lost."""
_OWN_CHECK = re.compile(r"device-side assert|illegal memory access|misaligned address|no kernel image|invalid ")
"""What a defect of a program or an installation shows as; other faults are the device's, its driver's or its bus's."""
_TORCH_ADVICE = re.compile(r" (?:CUDA kernel errors might|Search for `|For debugging consider|Compile with)")
_NO_MEMORY = re.compile(r"can't allocate memory|^\[Errno 12\]")  # torch's allocator on the host; the kernel.
_NO_THREAD = re.compile(r"can't start new thread|(\[Errno 11\] |pthread_create.*: )?Resource temporarily unavailable$")
"""Not what else the kernel has no room for now, such as the lock of an HDF5 file that another process writes."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why a rank ends."""

    reason: str  # One line.
    exit_code: ExitCode
    kind: FailureKind
    whole: str = ""  # All that the library said, where the reason is less.


def failure_of(error: BaseException, place: RankPlace | None = None, gpu: Gpu | None = None) -> RankFailure:
    """What a rank says of the exception that ends it."""
    kind: FailureKind = "peer" if is_of_peer(error) else "own"
    said = " ".join(str(error).split())
    code = error.exit_code if isinstance(error, DlbenchError) else ExitCode.RUN_FAILED
    if isinstance(error, DlbenchError):
        reason = condensed(said, _MAX_OWN_CHARACTERS)
    elif isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("dlbench"):
        code = ExitCode.ENVIRONMENT
        reason = (
            f"{sys.executable} has no module {error.name}: pip install 'dlbench[node]' there, or name the Python that "
            "has it with `python` in the system file"
        )
    elif isinstance(error, ImportError | OSError) and (library := _UNLOADABLE.search(said)):
        code = ExitCode.ENVIRONMENT
        reason = f"{library[1]} is not found at run time: load the module that brings it, or install it again"
    elif place is not None and is_device_fault(error):
        kind = "own"  # others lose this rank, whatever NCCL says of them
        mode = restricted_mode(gpu.uuid if gpu is not None else None) if _BUSY in said else ""
        code = ExitCode.ENVIRONMENT if mode else code
        reason = _device_fault(condensed(said), place, gpu, mode)
    elif isinstance(error, OSError) and error.strerror and error.filename is not None:
        code = ExitCode.ENVIRONMENT if error.errno in MACHINE_ERRORS else code
        reason = f"{error.filename}: {error.strerror}"
    else:
        name = type(error).__name__
        words = condensed(said)
        reason = f"{name}: {words}" if words else name
        if name == "OutOfMemoryError":  # A GPU's: the batch is too large, and smaller ones run.
            reason += "; a smaller train.batch_per_rank needs less"
        elif kind == "own" and (remedy := _remedy_on_host(error, said)):
            code = ExitCode.ENVIRONMENT
            reason += f"; {remedy}"
    return RankFailure(reason=reason, exit_code=code, kind=kind, whole="" if said in reason else str(error))


def _remedy_on_host(error: BaseException, said: str) -> str:
    """Returns what to do where the host gave no memory, process or thread; empty where it did not fail so."""
    if isinstance(error, MemoryError) or _NO_MEMORY.search(said):
        return "a smaller train.batch_per_rank or fewer ranks per node need less"
    if _NO_THREAD.match(said):
        return (
            "raise the limit of processes and threads (ulimit -u, pids.max of the cgroup), or use fewer ranks per node"
        )
    return ""


def is_device_fault(error: BaseException) -> bool:
    """Whether a GPU failed: it fell off the bus, a kernel could not end, or one of its own checks failed.

    torch raises `torch.AcceleratorError` from 2.8 on, and before that a RuntimeError of the same words.
    """
    if isinstance(error, DlbenchError) or not isinstance(error, RuntimeError):
        return False
    if type(error).__name__ == "OutOfMemoryError":
        return False
    return type(error).__name__ == "AcceleratorError" or _DEVICE_FAULT.search(str(error)) is not None


def _device_fault(words: str, place: RankPlace, gpu: Gpu | None, mode: str) -> str:
    named = "its GPU" if gpu is None else f"GPU {gpu.uuid} ({gpu.pci_bus_id})"
    # Of several sentences the first is the cause; torch's advice on debugging follows it.
    words = _TORCH_ADVICE.split(words)[0].strip()
    reason = f"rank {place.rank} on {place.host}, {named}: {words}"
    if mode:
        return (
            f"{reason}; the GPU is in {mode}: give each rank a GPU of its own, end other processes there, or let the "
            "administrator set the default mode (nvidia-smi --compute-mode=0)"
        )
    state = gpu_trouble(gpu.uuid) if gpu is not None else ""
    if state:
        reason += f"; NVML says of it: {state}"
    if _OWN_CHECK.search(words) and not state:
        return f"{reason}; a kernel refused its input: set CUDA_LAUNCH_BLOCKING=1 to find which"
    return (
        f"{reason}; look for Xid in the kernel's log of {place.host} (dmesg), leave the node out (slurm.exclude) and "
        "run again"
    )


def passed_on(text: str, error: BaseException) -> RunError:
    """The error that passes a library's words on: a `PeerLostError` where they say that another rank is gone."""
    return (PeerLostError if is_of_peer(error) else RunError)(text)


def condensed(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The cause in a library's words, one line of at most `limit` characters."""
    words = " ".join(text.split())
    for pattern in _TAILS:
        words = re.sub(pattern, "", words)
    for pattern in _WRAPPING:
        words = re.sub(pattern, "", words)
    words = re.sub(r"^RuntimeError: ", "", words).strip(" .") or " ".join(text.split())
    return words if len(words) <= limit else words[: limit - 4].rpartition(" ")[0] + " ..."


def is_of_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone, so that this one is no cause."""
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        if isinstance(step, DlbenchError):
            # It knows: a loader process that is lost is lost by a closed connection, too.
            return isinstance(step, PeerLostError)
        if isinstance(step, ConnectionError) or (isinstance(step, RuntimeError) and _PEER.search(str(step))):
            return True
        seen.add(id(step))
        step = step.__cause__ or step.__context__
    return False
