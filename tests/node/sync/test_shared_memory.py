"""The group over shared memory, with real processes: its sums against NumPy, and ranks that die, are late or leave."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlbench.errors import RunError
from dlbench.node.sync.shared_memory import SharedMemoryGroup, socket_address

PATIENCE_S = 60.0
"""How long a test waits for an answer: far more than needed, so that only a hang is one."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
SIZES = (0, 1, 5, 999, 12289)

GROUP: list[SharedMemoryGroup] = []
"""The group of a worker process."""


def member(connection: Connection) -> None:
    """A worker process: does what it is asked, and says what came of it."""
    torch.set_num_threads(1)
    while True:
        try:
            work, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", work(*arguments)))
        except RunError as error:
            connection.send(("RunError", str(error)))
        except Exception:
            connection.send(("defect", traceback.format_exc()))


class Team:
    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "dlbench.node.sync.shared_memory", "tests.node.sync.test_shared_memory"]
        )
        self.connections, self.processes = [], []
        for _ in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=member, args=(there,))
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def ask(self, rank: int, work: Callable[..., Any], *arguments: Any) -> None:
        self.connections[rank].send((work, arguments))

    def answer(self, rank: int) -> tuple[str, Any]:
        assert self.connections[rank].poll(PATIENCE_S), f"rank {rank} hangs"
        answer: tuple[str, Any] = self.connections[rank].recv()
        return answer

    def all(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What every rank makes of it; its rank comes first among the arguments."""
        for rank in range(len(self.processes)):
            self.ask(rank, work, rank, *arguments)
        answers = [self.answer(rank) for rank in range(len(self.processes))]
        assert [kind for kind, _ in answers] == ["ok"] * len(answers), answers
        return [result for _, result in answers]

    def join(self, name: str, capacity_bytes: int = 4096, timeout_s: float = PATIENCE_S) -> None:
        self.all(join, len(self.processes), name, capacity_bytes, timeout_s)

    def stop(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    yield
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"test-{os.getpid()}-{request.node.name}"


@pytest.fixture
def team() -> Iterator[Callable[[int], Team]]:
    teams: list[Team] = []

    def start(num_ranks: int) -> Team:
        teams.append(Team(num_ranks))
        return teams[-1]

    yield start
    for started in teams:
        started.stop()


# What workers do.


def join(index: int, num_ranks: int, name: str, capacity_bytes: int, timeout_s: float) -> None:
    # Ranks of the run need not begin at 0.
    GROUP[:] = [SharedMemoryGroup(tuple(range(10, 10 + num_ranks)), index, name, capacity_bytes, timeout_s)]


def leave(index: int) -> None:
    GROUP[0].close()
    GROUP[0].close()  # a second time does nothing


def numbers(rank: int, size: int, dtype: str, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng((rank, size, seed))
    return torch.from_numpy(random.standard_normal(size) * 100).to(DTYPES[dtype])


def plain(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def expected_sum(num_ranks: int, size: int, dtype: str, seed: int = 0) -> np.ndarray:
    """In the order of ranks; 16-bit types in fp32, rounded once. Bit by bit what the group must give."""
    rows = [numbers(rank, size, dtype, seed) for rank in range(num_ranks)]
    wide = np.float64 if dtype == "fp64" else np.float32
    total = rows[0].double().numpy().astype(wide)
    for row in rows[1:]:
        total = total + row.double().numpy().astype(wide)
    return plain(torch.from_numpy(total).to(DTYPES[dtype]))


def call(index: int, what: str, size: int, dtype: str, root: int, allocated: bool, seed: int) -> Any:
    """One call of the group; `size` is that of the vector, made to divide where it must."""
    group = GROUP[0]
    num_ranks = len(group.ranks)
    if what in ("reduce_scatter", "all_gather"):
        size *= num_ranks
    vector = numbers(index, size, dtype, seed)
    if allocated:
        room = group.allocate(size + 7, DTYPES[dtype])
        assert not room.any()
        room[3 : size + 3] = vector
        vector = room[3 : size + 3]
    if what == "reduce_scatter":
        before = vector.clone()
        share = group.reduce_scatter(vector)
        assert torch.equal(vector, before)
        vector.zero_()  # the caller's again, though others may still be at it
        return plain(share)
    if what == "all_gather":
        share = vector.view(num_ranks, -1)[index].clone()
        vector.zero_()
        group.all_gather(share, vector)
        result = plain(vector.clone())
        vector.zero_()
        return result
    if what == "gather_all":
        return [plain(other) for other in group.gather_all(vector[: size * (index + 1) // num_ranks])]
    if what in ("reduce", "broadcast"):
        getattr(group, what)(vector, root)
        return plain(vector)
    group.sum(vector)
    if allocated:
        assert not room[:3].any()
        assert not room[size + 3 :].any()
    return plain(vector)


def check(results: list[Any], what: str, size: int, dtype: str, root: int, seed: int) -> None:
    """The oracle of `call`."""
    num_ranks = len(results)
    if what in ("reduce_scatter", "all_gather"):
        size *= num_ranks
    total = expected_sum(num_ranks, size, dtype, seed)
    rows = [plain(numbers(rank, size, dtype, seed)) for rank in range(num_ranks)]
    if what == "sum":
        assert all(np.array_equal(result, total) for result in results)
    elif what == "reduce":
        assert np.array_equal(results[root], total)
    elif what == "broadcast":
        assert all(np.array_equal(result, rows[root]) for result in results)
    elif what == "reduce_scatter":
        assert np.array_equal(np.concatenate(results), total)
    elif what == "all_gather":
        gathered = np.concatenate([row.reshape(num_ranks, -1)[rank] for rank, row in enumerate(rows)])
        assert all(np.array_equal(result, gathered) for result in results)
    else:
        assert what == "gather_all"
        expected = [row[: size * (rank + 1) // num_ranks] for rank, row in enumerate(rows)]
        for result in results:
            assert len(result) == num_ranks
            assert all(np.array_equal(a, b) for a, b in zip(result, expected, strict=True))


CALLS = ("sum", "reduce", "broadcast", "reduce_scatter", "all_gather", "gather_all")


def many(index: int, plan: list[tuple[Any, ...]], pauses_seed: int) -> list[Any]:
    """A series of calls. Each rank dawdles at its own places, so that others run ahead as far as they can."""
    random = np.random.default_rng((pauses_seed, index))
    results = []
    for arguments in plan:
        if random.random() < 0.2:
            time.sleep(random.random() * 3e-3)
        results.append(call(index, *arguments))
    return results


def run_and_check(team: Team, plan: list[tuple[Any, ...]]) -> None:
    for arguments, results in zip(plan, zip(*team.all(many, plan, 1), strict=True), strict=True):
        what, size, dtype, root, _, seed = arguments
        check(list(results), what, size, dtype, root, seed)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_call_is_what_numpy_makes_of_it(team: Callable[[int], Team], name: str, num_ranks: int) -> None:
    started = team(num_ranks)
    for capacity, sizes in ((1 << 20, (5, 12289)), (20_000, SIZES)):  # one chunk, several chunks
        started.join(f"{name}-{capacity}", capacity)
        plan = [(what, size, dtype, size % num_ranks, False, 0) for what in CALLS for size in sizes for dtype in DTYPES]
        run_and_check(started, plan)
        started.all(leave)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_vectors_in_allocated_memory(team: Callable[[int], Team], name: str, num_ranks: int) -> None:
    started = team(num_ranks)
    started.join(name)
    plan = [
        (what, size, dtype, num_ranks - 1, True, 0)
        for what in CALLS
        for size in (5, 100_003)
        for dtype in ("fp32", "fp16")
    ]
    run_and_check(started, plan)
    started.all(leave)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_calls_in_any_order_with_ranks_that_run_ahead(team: Callable[[int], Team], name: str, num_ranks: int) -> None:
    """Halves of a slot are used again two chunks later: whoever writes too early spoils another rank's sum."""
    started = team(num_ranks)
    started.join(name, 4096)
    random = np.random.default_rng(num_ranks)
    plan = [
        (
            str(random.choice(CALLS)),
            int(random.choice([1, 100, 600, 2500])),
            str(random.choice(list(DTYPES))),
            int(random.integers(num_ranks)),
            bool(random.random() < 0.1),
            seed,
        )
        for seed in range(150)
    ]
    run_and_check(started, plan)
    started.all(leave)


def test_a_group_of_one_rank(name: str) -> None:
    group = SharedMemoryGroup((3,), 0, name, 64)
    vector = torch.arange(1000, dtype=torch.float32)
    group.sum(vector)
    group.reduce(vector, 0)
    group.broadcast(vector, 0)
    group.all_gather(vector.clone(), vector)
    assert torch.equal(group.reduce_scatter(vector), torch.arange(1000, dtype=torch.float32))
    assert [list(other) for other in group.gather_all(vector[:2])] == [[0.0, 1.0]]
    assert (group.ranks, group.index, group.carrier) == ((3,), 0, "shared memory")
    group.close()
    with pytest.raises(RunError, match="this rank has left"):
        group.sum(vector)


def test_what_is_no_vector_of_a_cpu_is_refused(name: str) -> None:
    group = SharedMemoryGroup((0,), 0, name, 64)
    for wrong in (
        torch.zeros(2, 2),
        torch.zeros(10)[::2],
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(1, device="meta"),
    ):
        with pytest.raises(ValueError, match="contiguous vectors on the CPU"):
            group.sum(wrong)
    with pytest.raises(ValueError, match="do not make"):
        group.all_gather(torch.zeros(2), torch.zeros(3))
    group.close()


def sum_of(index: int, size: int) -> list[float]:
    vector = torch.ones(size)
    GROUP[0].sum(vector)
    return vector.tolist()


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_killed_rank_is_named_at_once(team: Callable[[int], Team], name: str, size: int) -> None:
    started = team(3)
    started.join(name, timeout_s=10 * PATIENCE_S)
    assert started.all(sum_of, 1) == [[3.0]] * 3
    for rank in (0, 2):
        started.ask(rank, sum_of, rank, size)
    pid = started.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for rank in (0, 2):
        kind, text = started.answer(rank)  # within PATIENCE_S: the group's own limit is ten times that
        assert kind == "RunError"
        assert text.startswith("shared memory: rank 11 has died")
        assert f"rank {10 + rank} waited since" in text
        assert f"sum of {size} float32" in text


def test_a_late_rank_is_named_and_learns_of_it(team: Callable[[int], Team], name: str) -> None:
    started = team(3)
    started.join(name, timeout_s=10.0)
    for rank in (0, 2):
        started.ask(rank, sum_of, rank, 100_000)
    for rank in (0, 2):
        kind, text = started.answer(rank)
        assert kind == "RunError"
        assert text.startswith("shared memory: rank 11 did not come in time (10 s)")
    started.ask(1, sum_of, 1, 100_000)
    kind, text = started.answer(1)
    assert kind == "RunError"
    assert text.startswith("shared memory: rank 11 did not come in time (10 s), as rank 10 found")
    started.ask(0, sum_of, 0, 1)
    assert started.answer(0)[0] == "RunError"  # nothing more goes through a broken group


def test_a_rank_that_left_is_named(team: Callable[[int], Team], name: str) -> None:
    started = team(2)
    started.join(name)
    started.ask(1, leave, 1)
    assert started.answer(1)[0] == "ok"
    started.ask(0, sum_of, 0, 5)
    kind, text = started.answer(0)
    assert kind == "RunError"
    assert text.startswith("shared memory: rank 11 has left the group; rank 10 waited since")


def test_a_rank_may_leave_while_others_still_read(team: Callable[[int], Team], name: str) -> None:
    started = team(3)
    started.join(name)
    for _ in range(5):
        for rank in range(3):
            started.ask(rank, sum_of, rank, 3000)
            if rank:
                started.ask(rank, leave, rank)
        assert [started.answer(rank) for rank in range(3)] == [("ok", [3.0] * 3000)] * 3
        started.ask(0, leave, 0)
        assert {started.answer(rank)[0] for rank in range(3)} == {"ok"}
        started.join(name)


@pytest.mark.parametrize("allocated", [False, True])
def test_ranks_that_disagree_are_named(team: Callable[[int], Team], name: str, allocated: bool) -> None:
    started = team(2)
    started.join(name)
    for rank in range(2):
        started.ask(rank, call, rank, "sum", 10 if allocated else 10 + rank, "fp32", 0, allocated and rank == 1, 0)
    expected = ("allocate of 17" if allocated else "sum of 11") + " float32"
    for rank in range(2):
        kind, text = started.answer(rank)
        assert kind == "RunError"
        assert "ranks disagree" in text
        assert "rank 10" in text
        assert f"rank 11 calls {expected}" in text


def test_ranks_that_do_not_start_are_named(team: Callable[[int], Team], name: str) -> None:
    started = team(2)
    for index in (0, 1):  # the third never comes
        started.ask(index, join, index, 3, name, 4096, 6.0)
    for index in (0, 1):
        kind, text = started.answer(index)
        assert kind == "RunError"
        assert text == "shared memory: rank 12 did not come to share it within 6 s"
    started.ask(1, join, 1, 2, name, 4096, 0.5)  # nor does the first
    kind, text = started.answer(1)
    assert (kind, text) == ("RunError", "shared memory: rank 10 did not open it within 500 ms")


def test_different_capacities_are_refused(team: Callable[[int], Team], name: str) -> None:
    started = team(2)
    for index in (0, 1):
        started.ask(index, join, index, 2, name, 4096 * (1 + 9 * index), 5.0)
    assert started.answer(1) == (
        "RunError",
        "shared memory: ranks ask for different capacities, or their groups differ",
    )
    assert started.answer(0)[0] == "RunError"


def traces(name: str) -> list[str]:
    """What could stay of a group: files in memory, listening sockets."""
    files = [str(path) for path in Path("/dev/shm").iterdir() if name in path.name]
    address = socket_address(name).decode().replace("\0", "@")
    sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(address)]
    return files + sockets


def test_a_group_leaves_nothing_behind_however_it_ends(team: Callable[[int], Team], name: str) -> None:
    started = team(2)
    assert traces(name) == []
    started.join(name)
    pid = started.processes[0].pid
    assert pid is not None
    assert f"/memfd:dlbench-{name}" in Path(f"/proc/{pid}/maps").read_text()
    assert traces(name) == []  # nor while it works
    started.all(leave)
    started.join(name)  # the name is free again
    for rank in range(2):
        started.ask(rank, sum_of, rank, 2_000_000)
    for process in started.processes:
        process.kill()
        process.join()
    assert traces(name) == []

    starting = team(2)
    starting.ask(0, join, 0, 2, name, 4096, PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while not traces(name):  # until it listens for the second rank
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(RunError, match="is in use on this machine"):
        SharedMemoryGroup((0, 1), 0, name, 4096, 1.0)
    starting.processes[0].kill()
    starting.processes[0].join()
    assert traces(name) == []
