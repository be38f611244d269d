"""Which processors a rank gets on machines with hyper-threads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlbench.node.cores import by_physical_core


def test_hyper_threads_stay_together_in_both_common_numberings() -> None:
    apart = by_physical_core(range(8), lambda cpu: f"{cpu % 4},{cpu % 4 + 4}\n")
    assert apart == [0, 4, 1, 5, 2, 6, 3, 7]
    beside = by_physical_core(range(8), lambda cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    assert beside == list(range(8))


def test_without_topology_the_numbers_decide() -> None:
    assert by_physical_core({3, 1, 2}, lambda cpu: "") == [1, 2, 3]


@given(cores=st.integers(1, 32), threads=st.sampled_from([1, 2, 4]), ranks=st.sampled_from([1, 2, 4]))
def test_an_even_share_holds_whole_cores(cores: int, threads: int, ranks: int) -> None:
    cores *= ranks
    total = cores * threads
    order = by_physical_core(range(total), lambda cpu: ",".join(str(cpu % cores + cores * i) for i in range(threads)))
    share = total // ranks
    used = [{cpu % cores for cpu in order[rank * share : (rank + 1) * share]} for rank in range(ranks)]
    assert sum(len(part) for part in used) == cores
