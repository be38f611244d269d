"""Exceptions of ranks, as torch, Gloo, NCCL and Horovod raise them: what is left in the line, and who is the cause.
One status file for a node, whichever of its ranks live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from dlbench.errors import ExitCode, PeerLostError, RunError, UserError
from dlbench.machine.gpus import Gpu
from dlbench.node import failures
from dlbench.node.failures import MAX_CHARACTERS, condensed, failure_of, is_device_fault, passed_on
from dlbench.node.ranks import RankPlace
from dlbench.node.training import progress as node_status
from dlbench.node.training.progress import NodeStatus
from dlbench.records.folder import RunFolder
from dlbench.records.status import read_statuses, write_status
from tests.support.run_factory import status
from tests.support.training_data import rank_place

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:21430. This is typically caused by a remote worker crashing. Check the logs of the remote worker "
    "before reporting an error. GLHF! 🏖️"
)
CALLBACK = (
    f"Got the following error when running the callback: RuntimeError: {CLOSED}\nAt:\n  "
    "/venv/lib/python3.11/site-packages/torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py(31): <lambda>"
)
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an "
    "exception, you should see the exception in the log before the first shutdown message."
)
STORE = (
    "[2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by store->get"
    "('0'), but store->get('0') got error: Connection reset by peer\nException raised from recvBytes at "
    "/pytorch/torch/csrc/distributed/c10d/Utils.hpp:667 (most recent call first):\nframe #0: c10::Error::Error(c10::"
    "SourceLocation, std::string) + 0x96 (0x7f in /x/libc10.so)\nframe #1: <unknown function> + 0x5ba (0x7f in /x.so)"
)
GLOO_WAIT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation"
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, remote process exited or there was "
    "a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 10.0.0.2<41000> failed"
)
MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 GiB is free. "
    "Including non-PyTorch memory, this process has 77.9 GiB memory in use. If reserved but unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CPU_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "400000000000 bytes. Error code 12 (Cannot allocate memory)"
)


class HorovodInternalError(RuntimeError):
    """As horovod.common.exceptions has it."""


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(CALLBACK), "RuntimeError: Connection closed by peer [127.0.0.1]:21430"),
        (RuntimeError(f"[Rank 0] {CLOSED}"), "RuntimeError: Connection closed by peer [127.0.0.1]:21430"),
        (HorovodInternalError(SHUT_DOWN), "HorovodInternalError: Horovod has been shut down"),
        (HorovodInternalError(CLOSED), "HorovodInternalError: Connection closed by peer [127.0.0.1]:21430"),
        (RuntimeError(STORE), "got error: Connection reset by peer"),
        (RuntimeError(GLOO_WAIT), "RuntimeError: Timed out waiting 1000ms for recv operation"),
        (RuntimeError(NCCL), "remote process exited or there was a network error"),
        (PeerLostError("rank 1, ring: another rank is gone or stuck"), "another rank is gone or stuck"),
        (passed_on(f"the exchange of bucket 3 failed: {CLOSED}", RuntimeError(CLOSED)), "Connection closed by peer"),
        (BrokenPipeError(32, "Broken pipe"), "Broken pipe"),
    ],
)
def test_a_rank_that_lost_another_one_is_no_cause(error: Exception, reason: str) -> None:
    failure = failure_of(error)
    assert failure.kind == "peer"
    assert reason in failure.reason
    assert failure.exit_code is ExitCode.RUN_FAILED
    for noise in ("GLHF", "remote worker", "callback", "frame #", "pair.cc", "allgather", "\n"):
        assert noise not in failure.reason
    assert len(failure.reason) <= MAX_CHARACTERS + len("HorovodInternalError: ")


def test_what_was_raised_for_a_lost_peer_is_of_a_peer_and_all_of_it_is_kept_for_the_log() -> None:
    error = ValueError("in a hook")
    error.__cause__ = RuntimeError(CALLBACK)
    assert failure_of(error).kind == "peer"
    # A loader process is lost by a closed connection, too, and is the rank's own.
    loader = RunError("a loader process of the rank ended: Connection reset by peer")
    loader.__cause__ = ConnectionResetError(104, "Connection reset by peer")
    assert failure_of(loader).kind == "own"
    assert type(passed_on("x", ValueError("y"))) is RunError
    assert failure_of(RuntimeError(CALLBACK)).full_text == CALLBACK
    assert failure_of(UserError("plain")).full_text == ""


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (UserError("'a.jpg': damaged"), ExitCode.USAGE, "'a.jpg': damaged"),
        (OutOfMemoryError(MEMORY), ExitCode.RUN_FAILED, "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"),
        (RuntimeError(CPU_MEMORY), ExitCode.ENVIRONMENT, "DefaultCPUAllocator: can't allocate memory: you tried to"),
        (MemoryError(), ExitCode.ENVIRONMENT, "MemoryError; reduce train.batch_per_rank, or use fewer ranks per node"),
        (OSError(12, "Cannot allocate memory"), ExitCode.ENVIRONMENT, "allocate memory; reduce train.batch_per_rank"),
        (RuntimeError("can't start new thread"), ExitCode.ENVIRONMENT, "can't start new thread; raise the limit of"),
        (
            BlockingIOError(11, "Resource temporarily unavailable"),
            ExitCode.ENVIRONMENT,
            "unavailable; raise the limit of",
        ),
        (
            BlockingIOError("unable to lock file, error message = 'Resource temporarily unavailable'"),
            ExitCode.RUN_FAILED,
            "temporarily unavailable'",
        ),
        (RuntimeError("CUDA error: out of memory"), ExitCode.RUN_FAILED, "CUDA error: out of memory"),
        (
            ModuleNotFoundError("x", name="torch"),
            ExitCode.ENVIRONMENT,
            "has no module torch: pip install 'dlbench[node]'",
        ),
        (OSError(28, "No space left on device", "r.steps"), ExitCode.ENVIRONMENT, "r.steps: No space left on device"),
        (KeyError("x"), ExitCode.RUN_FAILED, "KeyError: 'x'"),
        (AssertionError(), ExitCode.RUN_FAILED, "AssertionError"),
        (ValueError("two\nlines"), ExitCode.RUN_FAILED, "ValueError: two lines"),
    ],
)
def test_what_a_rank_does_by_itself_is_its_own(error: Exception, code: ExitCode, reason: str) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.exit_code) == ("own", code)
    assert reason in failure.reason


@pytest.mark.parametrize("text", ["", "x" * 5000, "word " * 1000, CLOSED * 50, "GLHF!", "\n\n", "[Rank 0] "])
def test_any_text_becomes_one_short_line(text: str) -> None:
    assert len(condensed(text)) <= MAX_CHARACTERS
    assert "\n" not in condensed(text)


class AcceleratorError(RuntimeError):
    """As torch 2.8 and newer raise it."""


LAUNCH = (
    "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in https://docs.nvidia.com/x for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
PLACE = RankPlace(rank=3, size=4, local_rank=3, local_size=4, node_rank=0, num_nodes=1, host="n07", token="t")
WHERE = (PLACE, Gpu(uuid="GPU-ab", pci_bus_id="0000:81:00.0", numa_node=None, cores=frozenset()))


@pytest.mark.parametrize("kind", [AcceleratorError, RuntimeError])
@pytest.mark.parametrize("trouble", ["", "GPU is lost"])
def test_a_gpu_that_fails_is_named_with_rank_host_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError], trouble: str
) -> None:
    monkeypatch.setattr(failures, "gpu_trouble", lambda uuid: trouble)
    failure = failure_of(kind(LAUNCH), *WHERE)
    assert (failure.kind, failure.exit_code) == ("own", ExitCode.RUN_FAILED)
    said = f"; NVML reports: {trouble}" if trouble else ""
    assert failure.reason == (
        f"rank 3 on n07, GPU GPU-ab (0000:81:00.0): CUDA error: unspecified launch failure{said}; search the "
        "kernel's log of n07 for Xid (dmesg), exclude the node (slurm.exclude) and run again"
    )
    assert failure.full_text, "the rank's log has all of it"


def test_a_kernel_that_refuses_its_input_is_no_broken_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "gpu_trouble", lambda uuid: "")
    reason = failure_of(AcceleratorError("CUDA error: device-side assert triggered\nCompile with X"), *WHERE).reason
    assert reason == (
        "rank 3 on n07, GPU GPU-ab (0000:81:00.0): CUDA error: device-side assert triggered; a kernel refused its "
        "input: set CUDA_LAUNCH_BLOCKING=1 to find which"
    )


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for `cudaErrorDevicesUnavailable' in x."


def test_a_gpu_that_another_process_has_is_named_with_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "restricted_mode", lambda uuid: "exclusive process mode, used by process 4711")
    monkeypatch.setattr(failures, "gpu_trouble", lambda uuid: "")
    failure = failure_of(AcceleratorError(BUSY), *WHERE)
    assert (failure.kind, failure.exit_code) == ("own", ExitCode.ENVIRONMENT)
    assert failure.reason == (
        "rank 3 on n07, GPU GPU-ab (0000:81:00.0): CUDA error: CUDA-capable device(s) is/are busy or unavailable; the "
        "GPU is in exclusive process mode, used by process 4711: give each rank its own GPU, end other processes "
        "there, or let the administrator set the default mode (nvidia-smi --compute-mode=0)"
    )
    # Two ranks on the only GPU: which one it is, is not known before they meet.
    assert "rank 3 on n07, its GPU: CUDA error" in failure_of(RuntimeError(BUSY), PLACE).reason
    monkeypatch.setattr(failures, "restricted_mode", lambda uuid: "")
    failure = failure_of(AcceleratorError(BUSY), *WHERE)
    assert failure.exit_code == ExitCode.RUN_FAILED
    assert "for Xid" in failure.reason


def test_no_other_failure_is_taken_for_one_of_the_gpu() -> None:
    for error in (
        OutOfMemoryError(MEMORY),
        RuntimeError(CALLBACK),
        RunError("CUDA error: as told"),
        ValueError(LAUNCH),
    ):
        assert not is_device_fault(error)
    assert is_device_fault(AcceleratorError("CUDA error: the launch timed out and was terminated"))
    assert "rank 3 on n07, its GPU: CUDA error" in failure_of(AcceleratorError(LAUNCH), PLACE).reason


def place(rank: int, local_size: int = 2) -> RankPlace:
    return rank_place(rank, 4, local_size, token="start-1")


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Callable[..., NodeStatus]]:
    """Makes what ranks of a node say of themselves, into one folder."""
    with ExitStack() as stack:

        def make(rank: int, local_size: int = 2) -> NodeStatus:
            return stack.enter_context(closing(NodeStatus(RunFolder(tmp_path), place(rank, local_size))))

        yield make


def stages(folder: RunFolder) -> list[tuple[int, str]]:
    return [(one.rank, one.stage) for one in read_statuses(folder)]


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_the_first_rank_of_a_node_writes_for_all(tmp_path: Path, said: Callable[..., NodeStatus]) -> None:
    folder = RunFolder(tmp_path)
    first, second = (said(rank) for rank in (2, 3))
    second.report(status(3, "n1", "measuring"))
    assert names(folder) == []
    first.report(status(2, "n1", "measuring"))
    assert names(folder) == ["node-0001.status.json"]
    assert stages(folder) == [(2, "measuring"), (3, "measuring")]


def test_a_rank_that_begins_before_the_first_is_heard_later(tmp_path: Path, said: Callable[..., NodeStatus]) -> None:
    folder = RunFolder(tmp_path)
    second = said(1)
    second.report(status(1, "n0", "starting"))
    first = said(0)
    first.report(status(0, "n0", "starting"))
    assert stages(folder) == [(0, "starting")]
    second.tick()
    first.tick()
    assert stages(folder) == [(0, "starting"), (1, "starting")]
    assert names(folder) == ["node-0000.status.json"]


def test_a_rank_without_its_first_one_writes_a_file_of_its_own(
    tmp_path: Path, said: Callable[..., NodeStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    second = said(1)
    second.report(status(1, "n0", "starting"))
    second.tick()
    assert names(folder) == []
    monkeypatch.setattr(node_status, "ALONE_AFTER_S", -1.0)
    second.tick()
    assert stages(folder) == [(1, "starting")]
    second.report(status(1, "n0", "done"))
    assert stages(folder) == [(1, "done")]


def test_the_newest_word_of_a_rank_counts(tmp_path: Path, said: Callable[..., NodeStatus]) -> None:
    folder = RunFolder(tmp_path)
    only = said(0, 1)
    only.report(status(0, "n0", "measuring", updated="2026-03-01T12:00:00Z"))
    write_status(folder, status(0, "n0", "failed", updated="2026-03-01T12:00:01Z"))
    assert stages(folder) == [(0, "failed")]
    only.report(status(0, "n0", "starting", updated="2026-03-01T12:00:02Z"))  # another attempt in the same folder
    assert stages(folder) == [(0, "starting")]
