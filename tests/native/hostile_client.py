"""A client that knows Prio3 as well as the aggregators do, and shards as it likes.

It needs the XOF of RFC 9861 in Python, which is slow and used for nothing else.
"""

from __future__ import annotations

from chorister._native import Prio3

FIELD128 = 2**66 * 4611686018427387897 + 1
_ELEMENT = 16
_SEED = 32
_RATE = 168
_LANES = _RATE // 8
_WORD = (1 << 64) - 1
_MEASUREMENT_SHARE, _PROOF_SHARE = 1, 2
_VDAF_VERSION = 18
# The last 12 of Keccak's 24 rounds.
_ROUNDS = (
    0x000000008000808B, 0x800000000000008B, 0x8000000000008089, 0x8000000000008003,
    0x8000000000008002, 0x8000000000000080, 0x000000000000800A, 0x800000008000000A,
    0x8000000080008081, 0x8000000000008080, 0x0000000080000001, 0x8000000080008008,
)  # fmt: skip


def _rotated(word: int, by: int) -> int:
    by %= 64
    return ((word << by) | (word >> (64 - by))) & _WORD


def _permuted(lanes: list[int]) -> list[int]:
    for constant in _ROUNDS:
        columns = [lanes[x] ^ lanes[x + 5] ^ lanes[x + 10] ^ lanes[x + 15] ^ lanes[x + 20]
                   for x in range(5)]  # fmt: skip
        mixed = [columns[(x - 1) % 5] ^ _rotated(columns[(x + 1) % 5], 1) for x in range(5)]
        lanes = [lane ^ mixed[place % 5] for place, lane in enumerate(lanes)]
        moved = [0] * 25
        moved[0] = lanes[0]
        x, y = 1, 0
        for step in range(24):
            to = (y, (2 * x + 3 * y) % 5)
            moved[to[0] + 5 * to[1]] = _rotated(lanes[x + 5 * y], (step + 1) * (step + 2) // 2)
            x, y = to
        lanes = [
            moved[at] ^ (~moved[(at + 1) % 5 + at // 5 * 5] & moved[(at + 2) % 5 + at // 5 * 5])
            for at in range(25)
        ]
        lanes[0] ^= constant
    return lanes


def _turboshake128(message: bytes, length: int) -> bytes:
    message += b"\x01"
    message += bytes(-len(message) % _RATE)
    message = message[:-1] + bytes([message[-1] ^ 0x80])
    lanes = [0] * 25
    for start in range(0, len(message), _RATE):
        for lane in range(_LANES):
            at = start + 8 * lane
            lanes[lane] ^= int.from_bytes(message[at : at + 8], "little")
        lanes = _permuted(lanes)
    out = b""
    while len(out) < length:
        out += b"".join(lane.to_bytes(8, "little") for lane in lanes[:_LANES])
        lanes = _permuted(lanes)
    return out[:length]


def _stream(seed: bytes, tag: bytes, binder: bytes, elements: int) -> list[int]:
    """As many field elements; one too large for the field would come once in 2^60."""
    prefix = len(tag).to_bytes(2, "little") + tag + bytes([len(seed)]) + seed
    raw = _turboshake128(prefix + binder, _ELEMENT * elements)
    return _elements(raw)


def _elements(raw: bytes) -> list[int]:
    return [
        int.from_bytes(raw[at : at + _ELEMENT], "little") for at in range(0, len(raw), _ELEMENT)
    ]


def all_ones_without_a_proof(
    vdaf: Prio3, context: bytes, nonce: bytes, *, elements: int
) -> tuple[bytes, bytes, bytes]:
    """The shares of a vector of ones whose proof is 0 throughout.

    Every bit is 1, so what a proof shows to be 0 is 0 whatever the joint randomness is: the only
    proof that passes under all of it. `elements` is the length of an encoded measurement.
    """
    public, leader, helper = vdaf.shard(context, bytes([1]) * vdaf.length, nonce)

    def tag(usage: int) -> bytes:
        head = bytes([_VDAF_VERSION, 0]) + vdaf.algorithm_id.to_bytes(4, "big")
        return head + usage.to_bytes(2, "big") + context

    seed = helper[:_SEED]
    ones = [
        (mine + other) % FIELD128
        for mine, other in zip(
            _stream(seed, tag(_MEASUREMENT_SHARE), b"\x01", elements),
            _elements(leader[: _ELEMENT * elements]),
            strict=True,
        )
    ]
    if ones[: vdaf.length] != [1] * vdaf.length:
        raise AssertionError("this is not the XOF that the shares were made with")
    proof = (len(leader) - _SEED) // _ELEMENT - elements
    helpers = _stream(seed, tag(_PROOF_SHARE), b"\x01\x01", proof)
    cancelled = b"".join((-each % FIELD128).to_bytes(_ELEMENT, "little") for each in helpers)
    return public, leader[: _ELEMENT * elements] + cancelled + leader[-_SEED:], helper
