"""Whatever a client sends, both sides count the same reports: or a batch is lost for good."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorister._native import Aggregated, Prio3, ReportError, hpke_seal
from tests.native.hostile_client import all_ones_without_a_proof
from tests.native.pair import (
    HELPER_INFO,
    LEADER_INFO,
    NativePair,
    header,
    one_hots,
    opaque16,
    opaque32,
)

LENGTH = 7
# The encoded measurement of `bounded 7` has three bits of the weight too, all ones.
# Chunks are full, for what pads a chunk is no one, and then 0 is no proof.
KINDS = {
    "plain": (NativePair(Prio3.sum_vec(LENGTH, 1, chunk_length=7)), LENGTH),
    "bounded": (NativePair(Prio3.multihot_count_vec(LENGTH, LENGTH, chunk_length=5)), LENGTH + 3),
}
Shares = tuple[bytes, bytes, bytes]


def crafted(kind: str, nonce: bytes) -> Shares:
    pair, elements = KINDS[kind]
    return all_ones_without_a_proof(pair.vdaf, pair.context, nonce, elements=elements)


def honest(kind: str, nonce: bytes) -> Shares:
    pair, _ = KINDS[kind]
    return pair.vdaf.shard(pair.context, bytes([1]) + bytes(LENGTH - 1), nonce)


def sealed(pair: NativePair, nonce: bytes, shares: Shares) -> bytes:
    """A report that opens, whatever its shares are."""
    head = header(nonce, shares[0])
    ciphertexts = [
        hpke_seal(keys.config, info, pair.aad + head, opaque16(b"") + opaque32(share))
        for keys, info, share in (
            (pair.leader, LEADER_INFO, shares[1]),
            (pair.helper, HELPER_INFO, shares[2]),
        )
    ]
    return head + b"".join(ciphertexts)


def counted(kind: str, nonce: bytes, shares: Shares) -> tuple[Aggregated, Aggregated]:
    """A job of the report and an honest one."""
    pair, _ = KINDS[kind]
    other = pair.reports(one_hots(LENGTH, 1))[0]
    return pair.run(sealed(pair, nonce, shares) + other)


def flipped(data: bytes, place: int, mask: int) -> bytes:
    return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_proof_for_every_randomness_is_a_proof(kind: str) -> None:
    """The attack's report is valid before its public share is altered."""
    nonce = os.urandom(16)
    led, helped = counted(kind, nonce, crafted(kind, nonce))
    assert (led.count, led.checksum) == (helped.count, helped.checksum)
    assert led.count == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 31, 32, 63])
def test_an_altered_part_of_the_joint_randomness_is_noticed_by_both(kind: str, place: int) -> None:
    nonce = os.urandom(16)
    public, leader, helper = crafted(kind, nonce)
    led, helped = counted(kind, nonce, (flipped(public, place, 1), leader, helper))
    assert led.errors == helped.errors == bytes([ReportError.VDAF_VERIFY_ERROR, 0])
    assert led.count == helped.count == 1
    assert led.checksum == helped.checksum


@pytest.mark.parametrize("make", [honest, crafted])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_both_count_the_same_whatever_byte_is_wrong(
    kind: str, make: Callable[[str, bytes], Shares], data: st.DataObject
) -> None:
    nonce = os.urandom(16)
    public, leader, helper = make(kind, nonce)
    shares = [public, leader, helper]
    which = data.draw(st.sampled_from([0, 0, 1, 2]), label="public, leader's, helper's")
    place = data.draw(st.integers(0, len(shares[which]) - 1), label="place")
    mask = data.draw(st.integers(1, 255), label="mask")
    shares[which] = flipped(shares[which], place, mask)
    led, helped = counted(kind, nonce, (shares[0], shares[1], shares[2]))
    assert (led.count, led.checksum) == (helped.count, helped.checksum)
    assert led.errors[1] == 0
