"""TLS presentation language."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.codec import Reader, uint8, uint16, uint32, uint64, vector
from chorister.errors import DecodeError, InvalidInput


def test_integers_are_big_endian() -> None:
    data = uint8(1) + uint16(2) + uint32(3) + uint64(4)
    assert data.hex() == "01000200000003" + "0000000000000004"
    with Reader(data, "numbers") as reader:
        assert (reader.uint8(), reader.uint16(), reader.uint32(), reader.uint64()) == (1, 2, 3, 4)


@pytest.mark.parametrize(("write", "bits"), [(uint8, 8), (uint16, 16), (uint32, 32), (uint64, 64)])
def test_integers_out_of_range(write: object, bits: int) -> None:
    assert callable(write)
    write(2**bits - 1)
    for value in (-1, 2**bits):
        with pytest.raises(InvalidInput, match=f"uint{bits}"):
            write(value)


@given(st.binary(max_size=300))
def test_vectors_round_trip(data: bytes) -> None:
    for prefix in (2, 4):
        with Reader(vector(data, prefix=prefix), "vector") as reader:
            assert reader.vector(prefix=prefix) == data


def test_vectors_out_of_range() -> None:
    with pytest.raises(InvalidInput, match="256 bytes"):
        vector(bytes(256), prefix=1)
    with pytest.raises(InvalidInput, match="0 bytes"):
        vector(b"", prefix=1, least=1)
    with pytest.raises(DecodeError, match="at least 1"):
        Reader(b"\x00", "vector").vector(prefix=1, least=1)


def test_complaints_name_the_place() -> None:
    reader = Reader(b"\x01\x02", "Thing")
    reader.uint8()
    with pytest.raises(DecodeError, match="Thing at byte 1: 2 bytes expected, 1 left"):
        reader.uint16()
    with (
        pytest.raises(DecodeError, match="Thing at byte 1: 1 bytes too many"),
        Reader(b"\x01\x02", "Thing") as reader,
    ):
        reader.uint8()


def test_an_error_inside_is_not_covered_up_by_trailing_bytes() -> None:
    with pytest.raises(KeyError), Reader(b"\x01\x02", "Thing"):
        raise KeyError
