"""Batches that cannot be sent: the reason comes in their place."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import pytest

from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.loader import Ledger
from dlbench.node.data.loader_transport import LoaderContext
from dlbench.node.data.reader import Fetched

FULL = "unable to allocate shared memory(shm) for file </torch_7_8_0>: No space left on device (28)"


class Unsendable:
    """As a tensor where shared memory is full."""

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(FULL)


def test_a_batch_without_room_in_shared_memory_ends_the_rank_and_not_its_patience(
    capfd: pytest.CaptureFixture[str],
) -> None:
    queue: Any = LoaderContext().Queue()
    batch: dict[str, Any] = {"image": Unsendable()}
    queue.put((3, Fetched(batch=batch)))
    queue.put((4, Fetched(failures=["x"])))
    received = dict([queue.get(timeout=30), queue.get(timeout=30)])
    queue.close()
    queue.join_thread()
    assert received[4].lacks is None
    with pytest.raises(EnvironmentLacksError) as caught:
        Ledger(loader_workers=1).next(iter([received[3]]))
    assert FULL in str(caught.value)
    assert "--shm-size" in str(caught.value)
    assert FULL in capfd.readouterr().err  # all of it, for the log


def put_two(queue: Any) -> None:
    queue.put("small")
    queue.put(b"x" * (1 << 24))
    time.sleep(1000)


def test_a_loader_process_killed_while_it_writes_holds_up_nobody() -> None:
    context = LoaderContext()
    queue: Any = context.Queue()
    loaders = [context.Process(target=put_two, args=(queue,), daemon=True) for _ in range(2)]
    for loader in loaders:
        loader.start()
    assert queue.get(timeout=60) == "small"
    # Nobody reads what is longer than a pipe is: it is half written until it is got.
    loaders[0].kill()
    loaders[0].join()
    with pytest.raises(EOFError):
        [queue.get(timeout=60) for _ in range(4)]
    loaders[1].kill()
    loaders[1].join()
