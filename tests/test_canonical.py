"""Canonical JSON, decimals, base64url and key ids."""

from __future__ import annotations

import base64
import json
import unicodedata
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.canonical import (
    b64url_decode,
    b64url_encode,
    decimal_text,
    dumps,
    key_id,
    loads,
    parse_decimal,
)
from chorister.errors import DecodeError, InvalidInput
from chorister.unicode14 import separate_unassigned

TEXT = st.text(max_size=8).map(lambda text: unicodedata.normalize("NFC", separate_unassigned(text)))
JSON = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**53) + 1, 2**53 - 1), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)


@given(JSON)
def test_round_trip(value: Any) -> None:
    data = dumps(value)
    assert loads(data, max_bytes=10**6) == value
    assert json.loads(data) == value
    # Any other layout is the same value, but not canonical.
    loose = json.dumps(value, indent=1).encode()
    assert loads(loose, max_bytes=10**6, canonical=False) == value
    if loose != data:
        with pytest.raises(DecodeError, match="canonical"):
            loads(loose, max_bytes=10**6)


def test_rfc_8785_order_and_escapes() -> None:
    """RFC 8785, section 3.2.3: keys sort by UTF-16 code units, not by code points."""
    value = {
        "\u20ac": "Euro Sign",
        "\r": "Carriage Return",
        "\ufb33": "Hebrew Letter Dalet With Dagesh",
        "1": "One",
        "\U0001f600": "Emoji: Grinning Face",
        "\u0080": "Control",
        "\u00f6": "Latin Small Letter O With Diaeresis",
    }
    del value["\ufb33"]  # not in NFC: refused here
    found = list(json.loads(dumps(value)).values())
    assert found == [
        "Carriage Return",
        "One",
        "Control",
        "Latin Small Letter O With Diaeresis",
        "Euro Sign",
        "Emoji: Grinning Face",
    ]
    assert dumps({"k": '\u000f\n"\\/'}) == b'{"k":"\\u000f\\n\\"\\\\/"}'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a":1,"a":2}', "a: this key occurs twice"),
        (b'{"a":{"b":1.5}}', "a.b: no floats"),
        (b'{"a":[1,1e3]}', "a.1: no floats"),
        (b'{"a":NaN}', "a: no floats"),
        (b'{"a":Infinity}', "a: no floats"),
        (b'{"a":null}', "a: null is not used"),
        (b'{"a":9007199254740992}', "a: integers have at most 53 bits"),
        (b'{"a":"e\xcc\x81"}', "a: strings are in Unicode NFC"),
        (b'{"a":"\\ud800"}', "a: strings have no lone surrogates"),
        (b'{"b":1,"a":2}', "not canonical"),
        (b'{"a": 1}', "not canonical"),
        (b'{"a":"\\u0041"}', "not canonical"),
        (b'{"a":-0}', "not canonical"),
        (b'\xef\xbb\xbf{"a":1}', "not JSON"),
        (b"\xff", "not JSON"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"[" * 18 + b"]" * 18, "nested more than 16"),
        (b"[" * 100_000, "not JSON"),
        (b" " * 200_001, "bytes of JSON"),
    ],
)
def test_refused(data: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        loads(data, max_bytes=200_000)


@given(
    st.one_of(
        st.binary(max_size=60), st.text(alphabet='{}[]",:0123456789.eE-ntf\\u ').map(str.encode)
    )
)
def test_fuzz(data: bytes) -> None:
    try:
        value = loads(data, max_bytes=1000)
    except DecodeError:
        return
    assert dumps(value) == data


@pytest.mark.parametrize("value", [1.5, None, {"a": 1.0}, {1: 2}, b"x", "e\u0301", 2**53, "\ud800"])
def test_no_canonical_form(value: Any) -> None:
    with pytest.raises(InvalidInput):
        dumps(value)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("1E-6", "0.000001"),
        ("1e2", "100"),
        ("0.50", "0.5"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("5.000", "5"),
        ("-1.25", "-1.25"),
    ],
)
def test_decimal_text(number: str, text: str) -> None:
    assert decimal_text(Decimal(number)) == text
    assert parse_decimal(text) == Decimal(number)


@pytest.mark.parametrize("number", ["nan", "inf", "1e999999", "1e-31", "1e21", "0." + "1" * 31])
def test_decimals_out_of_range(number: str) -> None:
    with pytest.raises(InvalidInput):
        decimal_text(Decimal(number))


@pytest.mark.parametrize(
    "text",
    ["", "-0", "01", "1.", ".5", "1.50", "1e3", "+1", " 1", "1\n", "٣", "1_0", "NaN", "1" * 21],
)
def test_decimals_in_another_spelling(text: str) -> None:
    with pytest.raises(DecodeError):
        parse_decimal(text)


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=12, min_value=-(10**9), max_value=10**9
    )
)
def test_decimals_round_trip(number: Decimal) -> None:
    assert parse_decimal(decimal_text(number)) == number


@given(st.binary(max_size=50))
def test_base64url_round_trip(data: bytes) -> None:
    assert b64url_decode(b64url_encode(data)) == data


@pytest.mark.parametrize(
    "text", ["A", "AB", "AA==", "A A", "AA+A", "AA/A", "AAA\n", "é", "AAB\u0660"]
)
def test_base64url_in_another_spelling(text: str) -> None:
    with pytest.raises(DecodeError):
        b64url_decode(text)


@given(st.text(max_size=12))
def test_base64url_fuzz(text: str) -> None:
    try:
        data = b64url_decode(text)
    except DecodeError:
        return
    assert base64.urlsafe_b64encode(data).decode().rstrip("=") == text


def test_key_id_of_rfc_8037() -> None:
    """RFC 8037, appendix A.3."""
    public = b64url_decode("11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo")
    assert key_id(public) == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
