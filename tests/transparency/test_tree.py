"""RFC 9162, section 2.1: published vectors, and a naive transcription of the RFC's recursions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from chorister.errors import InvalidInput, LogError, LogForked, ProofInvalid
from chorister.transparency.tree import (
    EMPTY_ROOT,
    Frontier,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    root_hash,
    verify_consistency,
    verify_inclusion,
)

# The leaves, roots and proofs of the certificate-transparency test suite, which every
# implementation of RFC 6962 and RFC 9162 shares.
CT_ENTRIES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
CT_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
CT_INCLUSION = {
    (0, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (5, 8): [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 3): ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"],
    (0, 1): [],
}
CT_CONSISTENCY = {
    (1, 1): [],
    (1, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
SIZES = range(65)


# --- The RFC's definitions, word for word and without any of the code under test -----------------


def mth(entries: Sequence[bytes]) -> bytes:
    if not entries:
        return hashlib.sha256().digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    k = k_of(len(entries))
    return hashlib.sha256(b"\x01" + mth(entries[:k]) + mth(entries[k:])).digest()


def path(m: int, entries: Sequence[bytes]) -> list[bytes]:
    if len(entries) == 1:
        return []
    k = k_of(len(entries))
    if m < k:
        return [*path(m, entries[:k]), mth(entries[k:])]
    return [*path(m - k, entries[k:]), mth(entries[:k])]


def subproof(m: int, entries: Sequence[bytes], whole: bool) -> list[bytes]:
    if m == len(entries):
        return [] if whole else [mth(entries)]
    k = k_of(len(entries))
    if m <= k:
        return [*subproof(m, entries[:k], whole), mth(entries[k:])]
    return [*subproof(m - k, entries[k:], False), mth(entries[:k])]


def k_of(n: int) -> int:
    k = 1
    while 2 * k < n:
        k *= 2
    return k


# --- Published vectors ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(9))
def test_published_roots(size: int) -> None:
    leaves = [leaf_hash(entry) for entry in CT_ENTRIES[:size]]
    assert root_hash(leaves).hex() == CT_ROOTS[size]


@pytest.mark.parametrize("case", CT_INCLUSION)
def test_published_inclusion_proofs(case: tuple[int, int]) -> None:
    index, size = case
    leaves = [leaf_hash(entry) for entry in CT_ENTRIES[:size]]
    proof = inclusion_proof(index, leaves)
    assert [node.hex() for node in proof] == CT_INCLUSION[case]
    root = bytes.fromhex(CT_ROOTS[size])
    verify_inclusion(leaf=leaves[index], index=index, size=size, proof=proof, root=root)


@pytest.mark.parametrize("case", CT_CONSISTENCY)
def test_published_consistency_proofs(case: tuple[int, int]) -> None:
    old, size = case
    leaves = [leaf_hash(entry) for entry in CT_ENTRIES[:size]]
    proof = consistency_proof(old, leaves)
    assert [node.hex() for node in proof] == CT_CONSISTENCY[case]
    verify_consistency(
        old_size=old,
        old_root=bytes.fromhex(CT_ROOTS[old]),
        size=size,
        root=bytes.fromhex(CT_ROOTS[size]),
        proof=proof,
    )


# --- Every size to 64, against the naive transcription -------------------------------------------

ENTRIES = [bytes([n]) * (n % 5) + b"entry" for n in range(64)]
LEAVES = [leaf_hash(entry) for entry in ENTRIES]
ROOTS = [mth(ENTRIES[:n]) for n in SIZES]


def test_roots_of_every_size() -> None:
    frontier = Frontier()
    assert frontier.root == EMPTY_ROOT == ROOTS[0]
    for size, leaf in enumerate(LEAVES, start=1):
        frontier = frontier.extend([leaf])
        assert frontier.root == root_hash(LEAVES[:size]) == ROOTS[size]
        assert len(frontier.peaks) == size.bit_count()
    assert Frontier().extend(LEAVES[:37]).extend(LEAVES[37:]) == frontier


def test_inclusion_proofs_of_every_size() -> None:
    for size in SIZES[1:]:
        for index in range(size):
            proof = inclusion_proof(index, LEAVES[:size])
            assert list(proof) == path(index, ENTRIES[:size])
            verify_inclusion(
                leaf=LEAVES[index], index=index, size=size, proof=proof, root=ROOTS[size]
            )
            for wrong in (index - 1, index + 1):
                with pytest.raises(ProofInvalid):
                    verify_inclusion(
                        leaf=LEAVES[index], index=wrong, size=size, proof=proof, root=ROOTS[size]
                    )


def test_consistency_proofs_of_every_pair_of_sizes() -> None:
    for size in SIZES[1:]:
        for old in range(1, size + 1):
            proof = consistency_proof(old, LEAVES[:size])
            assert list(proof) == subproof(old, ENTRIES[:size], True)
            verify_consistency(
                old_size=old, old_root=ROOTS[old], size=size, root=ROOTS[size], proof=proof
            )
            with pytest.raises(LogError):
                verify_consistency(
                    old_size=old, old_root=ROOTS[old - 1], size=size, root=ROOTS[size], proof=proof
                )


def test_altered_proofs_are_refused() -> None:
    for size in (2, 3, 7, 8, 33):
        for old in range(1, size):
            proof = consistency_proof(old, LEAVES[:size])
            roots = {"old_root": ROOTS[old], "root": ROOTS[size]}
            for at in range(len(proof)):
                flipped = bytes([proof[at][0] ^ 1]) + proof[at][1:]
                altered = [*proof[:at], flipped, *proof[at + 1 :]]
                with pytest.raises(LogForked):
                    verify_consistency(old_size=old, size=size, proof=altered, **roots)
            for altered in ([*proof, EMPTY_ROOT], list(proof[:-1])):
                with pytest.raises(LogError):
                    verify_consistency(old_size=old, size=size, proof=altered, **roots)
        for index in range(size):
            siblings = inclusion_proof(index, LEAVES[:size])
            for altered in ([*siblings, EMPTY_ROOT], list(siblings[:-1]), list(siblings)[::-1]):
                if altered != list(siblings):
                    with pytest.raises(ProofInvalid):
                        verify_inclusion(
                            leaf=LEAVES[index],
                            index=index,
                            size=size,
                            proof=altered,
                            root=ROOTS[size],
                        )


def test_every_log_extends_the_empty_one() -> None:
    verify_consistency(old_size=0, old_root=EMPTY_ROOT, size=5, root=ROOTS[5], proof=[])
    with pytest.raises(LogForked):
        verify_consistency(old_size=0, old_root=ROOTS[1], size=5, root=ROOTS[5], proof=[])
    with pytest.raises(ProofInvalid):
        verify_consistency(old_size=0, old_root=EMPTY_ROOT, size=5, root=ROOTS[5], proof=[ROOTS[1]])


def test_an_inner_node_is_not_a_leaf() -> None:
    pair = LEAVES[0] + LEAVES[1]
    assert leaf_hash(pair) != root_hash(LEAVES[:2])


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(InvalidInput):
        inclusion_proof(3, LEAVES[:3])
    with pytest.raises(InvalidInput):
        consistency_proof(0, LEAVES[:3])
    with pytest.raises(ProofInvalid):
        verify_consistency(old_size=3, old_root=ROOTS[3], size=2, root=ROOTS[2], proof=[])
    with pytest.raises(ProofInvalid):
        verify_inclusion(leaf=b"short", index=0, size=1, proof=[], root=ROOTS[1])


def test_an_empty_tree_has_one_root() -> None:
    empty = {"old_size": 0, "old_root": EMPTY_ROOT, "size": 0, "proof": ()}
    verify_consistency(**empty, root=EMPTY_ROOT)  # type: ignore[arg-type]
    with pytest.raises(LogForked):
        verify_consistency(**empty, root=bytes(32))  # type: ignore[arg-type]
    # It says nothing about the root of a longer one.
    verify_consistency(**{**empty, "size": 1}, root=bytes(32))  # type: ignore[arg-type]
