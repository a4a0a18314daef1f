"""One byte string per value: canonical JSON, decimals, base64url, Ed25519 keys.

What is signed or hashed must have exactly one encoding, or else two parties can disagree about what
was signed. The rules, all checked when reading:

- **JSON** is the subset of RFC 8785 without floats and null: UTF-8 without a byte-order mark, no
  white space, keys sorted by UTF-16 code units and unique, strings in Unicode NFC, with
  characters of Unicode 14.0 only (see `chorister.unicode14`), integers of at most 53 bits. Absent
  values are left out, never `null`.
- **Decimals** are strings: an optional `-`, digits without leading zeros, then optionally a point
  and digits that do not end in 0. Never `-0`, an exponent, or a JSON number.
- **base64url** has no padding and no stray bits in its last character.
"""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Final, NoReturn, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    Strict,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails

from chorister.errors import DecodeError, InvalidInput
from chorister.unicode14 import VERSION as UNICODE
from chorister.unicode14 import find_unassigned

MAX_INT: Final = 2**53 - 1
MAX_DEPTH: Final = 16
# Long enough for every budget and coordinate, short enough that arithmetic stays exact and quick.
_DECIMAL: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{0,29}[1-9])?")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_HEX32: Final = re.compile(r"[0-9a-f]{64}")
WIRE: Final = {"wire": True}
"""Validation context for values from outside: decimals must then be canonical strings."""


class _NotCanonicalError(Exception):
    """A value has no canonical form; `path` is the dotted path of the part that has none."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path


class _Float:
    """Stands for a JSON float until the check of the document can name its path."""


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# --- JSON ---------------------------------------------------------------------------------------


_UNSORTED_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_JSON: Final = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, sort_keys=True
)


def dumps(value: Any) -> bytes:  # noqa: ANN401 (any JSON value)
    """Return the canonical encoding; refuse floats, null, and strings not in NFC."""
    try:
        _check(value, "")
    except _NotCanonicalError as error:
        raise InvalidInput(f"{error.path or 'value'}: {error}") from None
    return _encode(value)


def _encode(value: Any) -> bytes:  # noqa: ANN401 (any JSON value that was checked)
    text = _JSON.encode(value)
    if not text.isascii():
        # RFC 8785 sorts keys by UTF-16 code units, json by characters: the same for ASCII.
        text = _UNSORTED_JSON.encode(_sorted(value))
    return text.encode("utf-8")


def loads(data: bytes, *, max_bytes: int, canonical: bool = True) -> Any:  # noqa: ANN401
    """Parse untrusted JSON. `canonical=False` allows white space and any order of keys.

    Duplicate keys, floats, null and oversized or deeply nested documents are always refused.
    """
    if len(data) > max_bytes:
        raise DecodeError(f"{len(data)} bytes of JSON, where at most {max_bytes} are allowed")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_float,
            parse_constant=_float,
        )
    except DecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not JSON: {error}") from None
    try:
        _check(value, "")
    except _NotCanonicalError as error:
        raise DecodeError(str(error), field=error.path or None) from None
    if canonical and _encode(value) != data:
        raise DecodeError("not canonical JSON: white space, key order or an escape differs")
    return value


def find_noncanonical(value: Any) -> tuple[str, str] | None:  # noqa: ANN401
    """Return where (a dotted path) and why a value has no canonical encoding, if it has none."""
    try:
        _check(value, "")
    except _NotCanonicalError as error:
        return error.path, str(error)
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DecodeError("this key occurs twice", field=key)
            seen.add(key)
    return result


def _float(_: str) -> _Float:
    return _Float()


def _check(value: Any, path: str, depth: int = 0) -> None:  # noqa: ANN401
    """Raise at the first part that has no canonical form."""
    if depth > MAX_DEPTH:
        raise _NotCanonicalError(path, f"nested more than {MAX_DEPTH} deep")
    match value:
        case bool():
            return
        case int():
            if abs(value) > MAX_INT:
                raise _NotCanonicalError(path, "integers have at most 53 bits")
        case str():
            _check_text(value, path)
        case list() | tuple():
            for i, item in enumerate(value):
                if not _is_plain(item):
                    _check(item, f"{path}.{i}" if path else str(i), depth + 1)
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise _NotCanonicalError(path, "keys are strings")
                if not key.isascii():
                    _check_text(key, path)
                if not _is_plain(item):
                    _check(item, f"{path}.{key}" if path else key, depth + 1)
        case float() | _Float():
            raise _NotCanonicalError(path, 'no floats: a decimal is a string such as "0.3"')
        case None:
            raise _NotCanonicalError(path, "null is not used; leave the key out")
        case _:
            raise _NotCanonicalError(path, f"{type(value).__name__} has no canonical form")


def _is_plain(value: object) -> bool:
    """Return whether a part needs no further check: the most common case, in lists of thousands."""
    return type(value) is str and value.isascii()


def _check_text(text: str, path: str) -> None:
    if text.isascii():
        return
    if _SURROGATE.search(text):
        raise _NotCanonicalError(path, "strings have no lone surrogates")
    if unknown := find_unassigned(text):
        why = f"U+{ord(unknown):04X} is not a character of Unicode {UNICODE}"
        raise _NotCanonicalError(path, why)
    if not unicodedata.is_normalized("NFC", text):
        raise _NotCanonicalError(path, "strings are in Unicode NFC")


def _sorted(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return {key: _sorted(value[key]) for key in keys}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


# --- Decimals -----------------------------------------------------------------------------------


def decimal_text(value: Decimal) -> str:
    """Return the only spelling of a decimal: `Decimal("1E-6")` is "0.000001"."""
    if not value.is_finite():
        raise InvalidInput(f"{value} is not a finite decimal")
    # Checked first: spelling out Decimal("1E+999999") would fill the memory.
    if value and not -30 <= value.adjusted() <= 19:
        raise InvalidInput(f"{value} is outside the range of decimals, 1e-30 to 1e20")
    text = format(value, "f") if value else "0"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    if not _DECIMAL.fullmatch(text):
        raise InvalidInput(f"{text} has more than 20 digits before the point or 30 after it")
    return text


def parse_decimal(text: str) -> Decimal:
    """Parse a decimal in its canonical spelling."""
    if not _DECIMAL.fullmatch(text) or text == "-0":
        raise DecodeError(f'a decimal is a string such as "0.3", not {text[:40]!r}')
    return Decimal(text)


def _validate_number(value: object, info: ValidationInfo) -> Decimal:
    if isinstance(value, str):
        return parse_decimal(value)
    if info.context is WIRE:
        raise ValueError('a decimal is a string such as "0.3", not a JSON number')
    if isinstance(value, Decimal):
        return parse_decimal(decimal_text(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return parse_decimal(decimal_text(Decimal(value)))
    raise ValueError(f"a decimal is an integer, a Decimal or a string, not {value!r}")


Number = Annotated[
    Decimal,
    PlainValidator(_validate_number),
    PlainSerializer(decimal_text, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^-?(0|[1-9][0-9]{0,19})(\.[0-9]{0,29}[1-9])?$"}),
]
"""A decimal in a model: exact, never a float."""

Int = Annotated[int, Strict()]
Bool = Annotated[bool, Strict()]


# --- base64url, digests, keys -------------------------------------------------------------------


def b64url_encode(data: bytes) -> str:
    """Encode as base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def b64url_decode(text: str) -> bytes:
    """Decode base64url strictly: every byte string has one spelling."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise DecodeError(f"not base64url: {text[:40]!r}") from None
    if b64url_encode(data) != text:
        raise DecodeError(f"not canonical base64url: {text[:40]!r}")
    return data


def key_id(public_key: bytes) -> str:
    """Return the RFC 7638 thumbprint of an Ed25519 public key (see RFC 8037, appendix A.3)."""
    jwk = {"crv": "Ed25519", "kty": "OKP", "x": b64url_encode(public_key)}
    return b64url_encode(sha256(dumps(jwk)))


def _validate_public_key(value: object) -> str:
    if not isinstance(value, str) or len(b64url_decode(value)) != 32:
        raise ValueError("an Ed25519 public key is 43 characters of base64url (32 bytes)")
    return value


def _validate_hex32(value: object) -> str:
    if not isinstance(value, str) or not _HEX32.fullmatch(value):
        raise ValueError("a digest is 64 lower-case hexadecimal digits (32 bytes)")
    return value


PublicKey = Annotated[
    str,
    PlainValidator(_validate_public_key),
    WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9_-]{43}$"}),
]
"""An Ed25519 public key as base64url, the `x` of its JWK."""

Hex32 = Annotated[
    str,
    PlainValidator(_validate_hex32),
    WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"}),
]
"""A SHA-256 digest in hexadecimal."""


# --- Models -------------------------------------------------------------------------------------


_K = TypeVar("_K")
_V = TypeVar("_V")


class FrozenDict(dict[_K, _V]):
    """A dictionary that can't change, so values computed from a model can be cached."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("part of a frozen model: copy the model with model_copy(update=...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict[_K, _V]], tuple[dict[_K, _V]]]:
        return type(self), (dict(self),)  # copying and pickling would set items one by one


FROZEN: Final = AfterValidator(FrozenDict)
"""Annotates the dictionaries of models."""


class Model(BaseModel):
    """A frozen value that refuses unknown fields and has one canonical encoding."""

    # Validators are built when they are first used: an app that imports a device does not wait for
    # those of recipes.
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True
    )

    def canonical(self) -> bytes:
        """Return the canonical JSON, without fields that are None."""
        return dumps(self.model_dump(mode="json", exclude_none=True))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a validated copy. Pydantic's own would keep the original's cached values."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        if deep:
            values = copy.deepcopy(values)
        return type(self).model_validate({**values, **(update or {})})


class FieldError(ValueError):
    """Raised by the validator of a whole model about one of its fields."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


class FieldErrors(ValueError):
    """Raised by the validator of a whole model about several of its fields."""

    def __init__(self, found: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field}: {why}" for field, why in found))
        self.found = tuple(found)


def first_error(error: ValidationError) -> tuple[str | None, str]:
    """Return the dotted path and the message of the first error in a validation error."""
    return all_errors(error)[0]


_UNION_MEMBER: Final = re.compile(r"constrained-[a-z]+|function-.*", re.DOTALL)
"""How pydantic names the types that a value may have; nobody wrote that into a document."""


def all_errors(error: ValidationError) -> list[tuple[str | None, str]]:
    """Return the dotted path and the message of every error, in the order of the fields."""
    found: list[tuple[str | None, str]] = []
    errors = error.errors(include_url=False, include_input=False)
    for each in errors:
        if each["type"] == "too_short" and any(_is_inside(other, each) for other in errors):
            continue  # it is too short only without the entries that are wrong themselves
        path = [str(part) for part in each["loc"] if not _UNION_MEMBER.fullmatch(str(part))]
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, FieldErrors):
            found.extend((".".join([*path, field]) or None, why) for field, why in cause.found)
            continue
        if isinstance(cause, FieldError):
            path.append(cause.field)
        words = _in_words(each["type"], each["msg"], each.get("ctx", {}))
        found.append((".".join(path) or None, words))
    return found


def _is_inside(inner: ErrorDetails, outer: ErrorDetails) -> bool:
    place = outer["loc"]
    return len(inner["loc"]) > len(place) and inner["loc"][: len(place)] == place


_WORDS: Final[Mapping[str, str]] = {
    "extra_forbidden": "unknown field",
    "missing": "this field is missing",
    "too_short": "at least {min_length} {entries} needed",
    "too_long": "at most {max_length} entries are allowed",
    "string_too_short": "must not be empty",
    "string_too_long": "at most {max_length} characters are allowed",
    "string_pattern_mismatch": "must have the form {pattern}",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "float_type": "must be a number",
    "dict_type": "must be a table of names and values",
    "mapping_type": "must be a table of names and values",
    "model_type": "must be a table of names and values",
    "model_attributes_type": "must be a table of names and values",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "enum": "must be one of {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "union_tag_invalid": "must have the kind {expected_tags}",
    "union_tag_not_found": "must have a kind",
    "none_required": "must be left out",
}
"""What pydantic finds, in the words of a person who writes the document."""


def _in_words(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind not in _WORDS:
        return message.removeprefix("Value error, ").replace("Input should be", "must be")
    entries = "entry is" if context.get("min_length") == 1 else "entries are"
    return _WORDS[kind].format_map({"entries": entries, **context})
