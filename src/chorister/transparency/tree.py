"""The Merkle tree of RFC 9162, section 2.1, with SHA-256.

The log is an ordered list of entries. `leaf_hash` domain-separates an entry (0x00) from an inner
node (0x01), so no entry can be passed off as a subtree. Everything here works on leaf hashes.

`Frontier` appends in O(log n); the registry, cosigners and auditors recompute roots with it. Proofs
are for those who do not want all entries: an inclusion proof shows that an entry is in the tree, a
consistency proof that one tree begins with another.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chorister.errors import InvalidInput, LogForked, ProofInvalid

HASH_SIZE = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(entry: bytes) -> bytes:
    """MTH({d}) = SHA-256(0x00 || d), section 2.1.1."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 || left || right), section 2.1.1."""
    return hashlib.sha256(b"\x01" + left + right).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """The roots of the perfect subtrees of a tree, largest first: all that appending needs.

    A tree of `size` leaves splits into perfect subtrees as `size` splits into powers of two.
    A frontier that was extended to a new root therefore proves consistency by construction.
    """

    size: int = 0
    peaks: tuple[bytes, ...] = ()

    def extend(self, leaves: Iterable[bytes]) -> Frontier:
        """Return the frontier after these leaf hashes."""
        size, peaks = self.size, list(self.peaks)
        for leaf in leaves:
            # For each trailing one of the size, two equal subtrees merge (a binary carry).
            node, carry = leaf, size
            while carry & 1:
                node = node_hash(peaks.pop(), node)
                carry >>= 1
            peaks.append(node)
            size += 1
        return Frontier(size=size, peaks=tuple(peaks))

    @property
    def next_path(self) -> tuple[bytes, ...]:
        """The inclusion proof of the next leaf in the tree that ends with it."""
        return self.peaks[::-1]

    @property
    def root(self) -> bytes:
        """MTH of the leaves so far."""
        if not self.peaks:
            return EMPTY_ROOT
        node = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            node = node_hash(peak, node)
        return node


def root_hash(leaves: Sequence[bytes]) -> bytes:
    """MTH(D_n) of these leaf hashes."""
    return Frontier().extend(leaves).root


def inclusion_proof(index: int, leaves: Sequence[bytes]) -> tuple[bytes, ...]:
    """PATH(m, D_n), section 2.1.3.1: the siblings from leaf `index` up to the root."""
    if not 0 <= index < len(leaves):
        raise InvalidInput(f"entry {index} is not in a log of {len(leaves)} entries")
    proof: list[bytes] = []
    low, high = 0, len(leaves)
    while high - low > 1:
        middle = low + _split(high - low)
        if index < middle:
            proof.append(root_hash(leaves[middle:high]))
            high = middle
        else:
            proof.append(root_hash(leaves[low:middle]))
            low = middle
    return tuple(reversed(proof))


def consistency_proof(old_size: int, leaves: Sequence[bytes]) -> tuple[bytes, ...]:
    """PROOF(m, D_n), section 2.1.4.1: that the first `old_size` leaves are an earlier log."""
    if not 0 < old_size <= len(leaves):
        raise InvalidInput(f"a proof starts from 1 to {len(leaves)} entries, not from {old_size}")
    proof: list[bytes] = []
    low, high, whole = 0, len(leaves), True
    while high - low != old_size - low:
        middle = low + _split(high - low)
        if old_size <= middle:
            proof.append(root_hash(leaves[middle:high]))
            high = middle
        else:
            proof.append(root_hash(leaves[low:middle]))
            low, whole = middle, False
    if not whole:
        proof.append(root_hash(leaves[low:high]))
    return tuple(reversed(proof))


def verify_inclusion(
    *, leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes
) -> None:
    """Check an inclusion proof as in section 2.1.3.2; raises `ProofInvalid`."""
    _require_hashes((leaf, root, *proof))
    if not 0 <= index < size:
        raise ProofInvalid(f"entry {index} can't be in a log of {size} entries")
    first, last, node = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            raise ProofInvalid("the inclusion proof is longer than the tree is high")
        if first & 1 or first == last:
            node = node_hash(sibling, node)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            node = node_hash(node, sibling)
        first, last = first >> 1, last >> 1
    if last:
        raise ProofInvalid("the inclusion proof is shorter than the tree is high")
    if not hmac.compare_digest(node, root):
        raise ProofInvalid(f"entry {index} is not in the tree with root {root.hex()}")


def verify_consistency(
    *, old_size: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """Check a consistency proof as in section 2.1.4.2; raises `ProofInvalid` or `LogForked`.

    The RFC leaves an empty old tree undefined; every log extends it, and its proof is empty.
    """
    _require_hashes((old_root, root, *proof))
    if not 0 <= old_size <= size:
        raise ProofInvalid(f"a log of {size} entries does not extend one of {old_size}")
    if old_size in (0, size):
        if proof:
            raise ProofInvalid("this consistency proof has to be empty")
        expected = EMPTY_ROOT if old_size == 0 else root
        roots = [old_root, root] if size == 0 else [old_root]
        if not all(hmac.compare_digest(each, expected) for each in roots):
            raise LogForked(f"two roots for the same {old_size} entries")
        return
    path = list(proof)
    if old_size & (old_size - 1) == 0:
        path.insert(0, old_root)
    if not path:
        raise ProofInvalid("the consistency proof is empty")
    first, last = old_size - 1, size - 1
    while first & 1:
        first, last = first >> 1, last >> 1
    old_node = node = path[0]
    for sibling in path[1:]:
        if last == 0:
            raise ProofInvalid("the consistency proof is longer than the tree is high")
        if first & 1 or first == last:
            old_node, node = node_hash(sibling, old_node), node_hash(sibling, node)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            node = node_hash(node, sibling)
        first, last = first >> 1, last >> 1
    if last:
        raise ProofInvalid("the consistency proof is shorter than the tree is high")
    if not (hmac.compare_digest(old_node, old_root) and hmac.compare_digest(node, root)):
        raise LogForked(f"the log of {size} entries does not begin with the {old_size} seen before")


def _split(size: int) -> int:
    """The largest power of two smaller than `size`."""
    return 1 << (size - 1).bit_length() - 1


def _require_hashes(hashes: Iterable[bytes]) -> None:
    if any(len(value) != HASH_SIZE for value in hashes):
        raise ProofInvalid(f"every hash in a proof has {HASH_SIZE} bytes")
