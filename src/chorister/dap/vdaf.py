"""Which VDAF a recipe uses, and how DAP encodes its configuration.

Bounded reports use Prio3MultihotCountVec, plain ones Prio3SumVec with max_measurement 1. The
encodings are those of DAP's section "VDAF Configuration Encodings".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from chorister.dap.codec import Reader, uint32, uint64
from chorister.dap.draft import VDAFType
from chorister.errors import DecodeError

__all__ = [
    "VDAF",
    "Prio3MultihotCountVec",
    "Prio3SumVec",
    "decode_vdaf",
    "optimal_chunk_length",
]


def optimal_chunk_length(measurement_length: int) -> int:
    """The chunk length with the shortest proof, computed as crate `prio` 0.18.1 does.

    It is part of the task's configuration, so device, aggregators and analyst must agree on it:
    this function and `prio::vdaf::prio3::optimal_chunk_length`, which the native module calls,
    return the same for every length. Of two choices with equally long proofs the shorter chunk
    wins.
    """
    if measurement_length <= 1:
        return 1
    best, best_length = 0, 0
    for log2 in range((measurement_length + 1).bit_length() - 1, 0, -1):
        calls = 2**log2 - 1
        chunk = -(-measurement_length // calls)
        # In field elements: two wires a chunk element, and the gadget polynomial.
        proof = 2 * chunk + 2 * (2**log2 - 1)
        if not best or proof < best_length:
            best, best_length = chunk, proof
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Prio3SumVec:
    """Sums of vectors whose entries are 0..max_measurement."""

    TYPE: ClassVar = VDAFType.PRIO3_SUM_VEC
    length: int
    max_measurement: int
    chunk_length: int

    @classmethod
    def plain(cls, length: int) -> Prio3SumVec:
        """For plain reports: bits. The measurement has `length` elements of one bit."""
        return cls(length=length, max_measurement=1, chunk_length=optimal_chunk_length(length))

    def encode(self) -> bytes:
        """Prio3SumVecConfig."""
        return uint32(self.length) + uint64(self.max_measurement) + uint32(self.chunk_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prio3MultihotCountVec:
    """Sums of bit vectors of which at most max_weight bits are set."""

    TYPE: ClassVar = VDAFType.PRIO3_MULTIHOT_COUNT_VEC
    length: int
    chunk_length: int
    max_weight: int

    @classmethod
    def bounded(cls, length: int, max_weight: int) -> Prio3MultihotCountVec:
        """For bounded reports. The measurement has the bits of the claimed weight appended."""
        measured = length + max_weight.bit_length()
        return cls(
            length=length, chunk_length=optimal_chunk_length(measured), max_weight=max_weight
        )

    def encode(self) -> bytes:
        """Prio3MultihotCountVecConfig."""
        return uint32(self.length) + uint32(self.chunk_length) + uint64(self.max_weight)


VDAF: TypeAlias = Prio3SumVec | Prio3MultihotCountVec


def decode_vdaf(vdaf_type: int, configuration: bytes) -> VDAF:
    """The VDAF of a task configuration; raises for one that Chorister does not run."""
    with Reader(configuration, "vdaf_configuration") as reader:
        match vdaf_type:
            case VDAFType.PRIO3_SUM_VEC:
                return Prio3SumVec(
                    length=reader.uint32(),
                    max_measurement=reader.uint64(),
                    chunk_length=reader.uint32(),
                )
            case VDAFType.PRIO3_MULTIHOT_COUNT_VEC:
                return Prio3MultihotCountVec(
                    length=reader.uint32(),
                    chunk_length=reader.uint32(),
                    max_weight=reader.uint64(),
                )
        raise DecodeError(f"VDAF type {vdaf_type:#010x} is not one that Chorister runs")
