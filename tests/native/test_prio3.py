"""Prio3 instances: parameters, sizes, aggregate shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister._native import Prio3
from chorister.errors import DecodeError, InvalidInput
from tests.native.pair import NativePair, one_hots

NONCE = bytes(16)


@pytest.mark.parametrize(
    ("length", "public", "leader", "helper"),
    [(100, 64, 2352, 64), (1_000, 64, 18096, 64), (10_000, 64, 166640, 64)],
)
def test_plain_shares_have_the_known_sizes(
    length: int, public: int, leader: int, helper: int
) -> None:
    shares = Prio3.sum_vec(length, 1).shard(b"", np.zeros(length, np.uint8), NONCE)
    assert [len(share) for share in shares] == [public, leader, helper]


def test_the_chunk_length_is_the_crates_optimum_for_the_encoded_measurement() -> None:
    def proof(chunk: int, elements: int) -> int:
        calls = -(-elements // chunk)
        return 2 * chunk + 2 * ((1 << calls.bit_length()) - 1)

    for length, weight in [(1, 1), (20, 5), (272, 40), (1000, 130)]:
        elements = length + weight.bit_length()
        chunk = Prio3.multihot_count_vec(length, weight).chunk_length
        assert proof(chunk, elements) == min(proof(c, elements) for c in range(1, elements + 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prio3.multihot_count_vec(0, 1),
        lambda: Prio3.multihot_count_vec(10, 0),
        lambda: Prio3.multihot_count_vec(10, 11),
        lambda: Prio3.multihot_count_vec(2**20, 1),
        lambda: Prio3.multihot_count_vec(2**60, 1),
        lambda: Prio3.sum_vec(0, 1),
        lambda: Prio3.sum_vec(5, 0),
        lambda: Prio3.sum_vec(2**20, 2),
        lambda: Prio3.sum_vec(2**62, 2**62),
        lambda: Prio3.sum(0),
        lambda: Prio3.histogram(0),
        lambda: Prio3.histogram(10, chunk_length=0),
        lambda: Prio3.histogram(10, chunk_length=11),
    ],
)
def test_absurd_parameters_are_refused(make: Any) -> None:
    with pytest.raises(InvalidInput, match=r"must be|at least"):
        make()


def test_the_largest_vector_works() -> None:
    vdaf = Prio3.sum_vec(2**20, 1)
    assert len(vdaf.zero()) == 16 * 2**20


@pytest.mark.parametrize(
    "measurement", [b"", bytes(9), bytes(11), b"\2" + bytes(9), np.zeros(10), [0] * 10, "0" * 10]
)
def test_measurements_of_another_kind_are_refused(measurement: Any) -> None:
    with pytest.raises(InvalidInput):
        Prio3.multihot_count_vec(10, 3).shard(b"", measurement, NONCE)


def test_nonces_have_sixteen_bytes() -> None:
    with pytest.raises(InvalidInput, match="nonce must have 16 bytes, got 15"):
        Prio3.multihot_count_vec(10, 3).shard(b"", bytes(10), bytes(15))


@given(st.lists(st.integers(0, 2**32), min_size=5, max_size=5))
def test_counts_are_added_and_merged_exactly(counts: list[int]) -> None:
    vdaf = Prio3.sum_vec(5, 1)
    noise = np.array(counts, dtype=np.uint64)
    noised = vdaf.add_counts(vdaf.zero(), noise)
    merged = vdaf.merge([noised, noised, vdaf.zero()])
    result = vdaf.unshard(merged, noised, count=0, noise_trials=3 * 2**32)
    assert np.frombuffer(result, np.uint64).tolist() == [3 * count for count in counts]


def test_shares_of_different_batches_are_noticed() -> None:
    pair = NativePair(Prio3.multihot_count_vec(20, 5))
    led, helped = pair.run(b"".join(pair.reports(one_hots(20, 3))))
    other, _ = pair.run(b"".join(pair.reports(one_hots(20, 3))))
    assert pair.result(led, helped).sum() == 3
    with pytest.raises(DecodeError, match="do not belong together"):
        pair.vdaf.unshard(other.share, helped.share, count=3)
    with pytest.raises(DecodeError, match="exceeds 0"):
        pair.vdaf.unshard(led.share, helped.share, count=0)


@pytest.mark.parametrize("share", [b"", bytes(79), bytes(81), b"\xff" * 80])
def test_aggregate_shares_are_decoded_strictly(share: bytes) -> None:
    vdaf = Prio3.sum_vec(5, 1)
    with pytest.raises(DecodeError, match="aggregate share"):
        vdaf.merge([vdaf.zero(), share])


def test_noise_for_another_length_is_refused() -> None:
    vdaf = Prio3.sum_vec(5, 1)
    with pytest.raises(InvalidInput, match="5 counts are needed"):
        vdaf.add_counts(vdaf.zero(), np.zeros(4, np.uint64))
