"""Who holds which sample, epoch by epoch: invariants for any sizes, and an oracle that moves samples one by one."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlbench.datasets.shuffling import NOBODY, Digest, Ownership, exchanged_slots, first_parts, released

SHARES = st.one_of(
    st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 1.0]), st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)
)


def ownerships() -> st.SearchStrategy[Ownership]:
    return st.builds(
        Ownership,
        st.integers(1, 80),
        st.integers(1, 9),
        seed=st.integers(0, 2**32),
        partition=st.sampled_from(["shuffled", "contiguous"]),
        share=SHARES,
    )


def held(ownership: Ownership, epoch: int) -> list[list[int]]:
    return [ownership.part(epoch, rank).tolist() for rank in range(ownership.ranks)]


@given(ownerships(), st.integers(0, 6))
def test_together_ranks_hold_every_sample_once_and_none_holds_much_more(ownership: Ownership, epoch: int) -> None:
    parts = held(ownership, epoch)
    assert sorted(sample for part in parts for sample in part) == list(range(ownership.num_samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [len(part) for part in parts] == [ownership.size(rank) for rank in range(ownership.ranks)]
    assert [len(part) for part in held(ownership, 0)] == [len(part) for part in parts]


@given(ownerships(), st.integers(0, 4))
def test_an_exchange_makes_the_next_epochs_parts_of_this_ones_and_is_balanced(ownership: Ownership, epoch: int) -> None:
    # Brute force: every rank sends its samples one by one to whom it says, into sets.
    parts = [set(part) for part in held(ownership, epoch)]
    promised: dict[tuple[int, int], int] = {}
    for rank in range(ownership.ranks):
        mine = ownership.exchange(epoch, rank)
        assert len(mine.samples) == len(mine.awaited) <= ownership.slots
        assert (mine.receivers != rank).all()
        assert (mine.senders != rank).all()
        assert sorted(set(mine.slots.tolist())) == mine.slots.tolist()
        assert set(mine.slots.tolist()) <= set(range(ownership.slots))
        # What leaves in a slot is what is read at that place.
        assert (ownership.order(epoch, rank)[mine.slots] == mine.samples).all()
        for sample, receiver in zip(mine.samples.tolist(), mine.receivers.tolist(), strict=True):
            assert sample in parts[rank]
            promised[sample, receiver] = rank
    for (sample, receiver), rank in promised.items():
        parts[rank].remove(sample)
        parts[receiver].add(sample)
    assert parts == [set(part) for part in held(ownership, epoch + 1)]
    awaited = {
        (int(sample), rank): int(sender)
        for rank in range(ownership.ranks)
        for mine in [ownership.exchange(epoch, rank)]
        for sample, sender in zip(mine.awaited, mine.senders, strict=True)
    }
    assert awaited == promised


@given(ownerships(), st.integers(0, 4))
def test_an_order_is_a_permutation_of_what_is_held_and_new_each_epoch(ownership: Ownership, epoch: int) -> None:
    for rank in range(ownership.ranks):
        order = ownership.order(epoch, rank).tolist()
        assert sorted(order) == sorted(ownership.part(epoch, rank).tolist())
        if len(order) > 12:
            assert order != ownership.order(epoch + 1, rank).tolist()


@given(ownerships(), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_any_epoch_may_be_asked_for_at_any_time_and_by_a_copy(ownership: Ownership, epochs: list[int]) -> None:
    copy = pickle.loads(pickle.dumps(ownership))
    for epoch in epochs:
        assert np.array_equal(ownership.parts(epoch), copy.parts(epoch))
    again = Ownership(
        ownership.num_samples,
        ownership.ranks,
        seed=ownership.seed,
        partition=ownership.partition,
        share=ownership.share,
    )
    assert np.array_equal(again.parts(epochs[0]), ownership.parts(epochs[0]))


@given(st.integers(0, 10**7), st.integers(2, 5000), st.integers(0, 1000))
def test_the_share_is_that_of_its_decimal_digits(num_samples: int, ranks: int, thousandths: int) -> None:
    exact = math.floor(Fraction(thousandths, 1000) * (num_samples // ranks))
    assert exchanged_slots(num_samples, ranks, thousandths / 1000) == exact


def test_nothing_moves_without_a_share_and_at_one_rank() -> None:
    for ownership in (
        Ownership(50, 4, seed=1, partition="shuffled", share=0.0),
        Ownership(50, 1, seed=1, partition="shuffled", share=1.0),
    ):
        assert ownership.slots == 0
        assert len(ownership.exchange(3, 0).samples) == len(ownership.exchange(3, 0).awaited) == 0
        assert np.array_equal(ownership.parts(7), ownership.parts(0))


def test_a_share_of_one_mixes_as_far_as_a_new_draw_would() -> None:
    ranks, num = 4, 4000
    ownership = Ownership(num, ranks, seed=3, partition="contiguous", share=1.0)
    before, after = (set(ownership.part(epoch, 0).tolist()) for epoch in (0, 1))
    stayed = len(before & after) / len(before)
    assert abs(stayed - 1 / ranks) < 0.06  # 1,000 samples stay by lot: a standard deviation is 1.4 %


def test_what_leaves_spreads_over_the_iterations() -> None:
    each = [released(100, done=done, batches=8) for done in range(9)]
    assert each == [0, 12, 25, 37, 50, 62, 75, 87, 100]
    assert released(3, done=9, batches=8) == 3


def test_a_contiguous_partition_is_that_of_storage() -> None:
    parts = first_parts(10, 3, seed=5, partition="contiguous")
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    ownership = Ownership(10, 3, seed=5, partition="contiguous", share=0.5)
    assert [sorted(part) for part in held(ownership, 0)] == [part.tolist() for part in parts]
    assert (ownership.parts(4) == NOBODY).sum() == 2


# Digests


@given(st.lists(st.integers(0, 2**40), max_size=60), st.randoms(use_true_random=False), st.integers(0, 60))
def test_a_digest_does_not_depend_on_order_and_adds_up(samples: list[int], chance: object, cut: int) -> None:
    shuffled = list(samples)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    whole = Digest.of(np.array(samples, np.int64))
    assert whole == Digest.of(np.array(shuffled[:cut], np.int64)) + Digest.of(np.array(shuffled[cut:], np.int64))
    assert whole.count == len(samples)


def test_a_digest_sees_one_sample_taken_for_another() -> None:
    whole = np.arange(1000)
    twice = whole.copy()
    twice[17] = 18
    assert Digest.of(whole) != Digest.of(twice)
    # A plain sum, or a sum of squares, would not see this.
    assert Digest.of(np.array([0, 7, 7, 10])) != Digest.of(np.array([1, 4, 9, 10]))
