"""Batches that cannot be sent: the reason comes in their place."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.loader import Ledger
from dlbench.node.data.loader_queue import LoaderContext
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
        Ledger(loader_workers=1).take(iter([received[3]]))
    assert FULL in str(caught.value)
    assert "--shm-size" in str(caught.value)
    assert FULL in capfd.readouterr().err  # all of it, for the log
