"""The scalar types of policies and recipes: names, durations, budgets, URLs, fractions."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from ipaddress import ip_address
from typing import Annotated, Final, TypeAlias

from pydantic import (
    AfterValidator,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)

from chorister.canonical import WIRE, Number, decimal_text
from chorister.privacy.decimals import UP
from chorister.privacy.randomizers import MAX_LOCAL_EPSILON, Mechanism

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"([1-9][0-9]{0,8})([smhdw])")
_FRACTION: Final = re.compile(r"[1-9][0-9]{0,8}/[1-9][0-9]{0,8}")
_LABEL: Final = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_URL: Final = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:]+\])"
    r"(?::(?P<port>[1-9][0-9]{0,4}))?(?P<path>/(?:[A-Za-z0-9._~!$&'()*,;=:@/-]*/)?)"
)
_USUAL_PORTS: Final = {"https": "443", "http": "80"}
_MAX_DURATION: Final = 100 * 366 * 86_400

Name: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$", strict=True)
]
Identifier: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$", strict=True)
]
LogName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[!-*,-~]{1,255}$", strict=True)]
"""A name under which checkpoints can be signed: printable ASCII without space and plus."""


def _sql_name(name: str) -> str:
    if name.startswith("sqlite_"):
        raise ValueError("choose another name: SQLite reserves names that begin with sqlite_")
    return name


SQLName: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$", strict=True),
    AfterValidator(_sql_name),
]
"""A table, field or function; in lower case, because SQLite ignores case."""

_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline
    "\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # lines, directions
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u2060-\u2065\u206a-\u206f"
    "\u3164\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"
    "\ue000-\uf8ff\U000f0000-\U0010ffff]"  # for private use: they can look like anything
)
"""Characters that are invisible or appear elsewhere: code points, the same on every Python.

These are Unicode's default ignorable characters except those that words and emoji need: the
joiner, the non-joiner (U+200C, U+200D) and the variation selectors (U+FE00 to U+FE0F).
"""
_UNSEEN: Final = re.compile(
    rf"{_HIDDEN.pattern}|[\u200c\u200d\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]"
)


def find_hidden(text: str) -> str | None:
    """Return the first character that would hide or reverse part of a text."""
    found = _HIDDEN.search(text)
    return found[0] if found else None


def visible(text: str) -> str:
    """Make a text reviewable: what is invisible or looks like a space becomes \\u{202e}."""
    return _UNSEEN.sub(_escape, text)


def legible(text: str) -> str:
    """Make a word or sentence safe to read: as `visible`, except what scripts and emoji need."""
    return _HIDDEN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{{{ord(found[0]):x}}}"


def _reviewable(query: str) -> str:
    if hidden := find_hidden(query):
        raise ValueError(
            f"remove U+{ord(hidden):04X}, a character that is invisible or reverses text: "
            "what people review must be what devices run"
        )
    if not query.strip():
        raise ValueError("a query must not be blank")
    return query


Query: TypeAlias = Annotated[
    str,
    StringConstraints(min_length=1, max_length=20_000, strict=True),
    AfterValidator(_reviewable),
]
"""SQL that people review."""

FieldRef: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}\.[a-z][a-z0-9_]{0,62}$", strict=True)
]
"""A field of a stream or profile: "stream.field"."""


def parse_duration(value: object) -> int:
    """Read seconds, or text such as "12h"; raises `ValueError` for anything else."""
    if isinstance(value, str) and (found := _DURATION.fullmatch(value)):
        value = int(found[1]) * _UNITS[found[2]]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_DURATION:
        raise ValueError('a duration is a string such as "90s", "15m", "12h", "30d" or "2w"')
    return value


def number_text(value: Decimal) -> str:
    """Write a decimal for people: tiny ones as powers of ten."""
    if value == 0 or value >= Decimal("0.0001"):
        return decimal_text(value)
    return f"{value.normalize(UP):e}"


def duration_text(seconds: int) -> str:
    """Write a duration in at most two units: "30 days", "1 hour 5 minutes"."""
    parts = []
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count:,} {unit}{'' if count == 1 else 's'}")
    return " ".join(parts[:2]) or "0 seconds"


Duration: TypeAlias = Annotated[
    int, PlainValidator(parse_duration), WithJsonSchema({"type": "integer", "minimum": 1})
]
"""Seconds; in TOML also a string such as "30d"."""


def _between(low: Decimal, high: Decimal) -> AfterValidator:
    def check(value: Decimal) -> Decimal:
        if not low < value <= high:
            raise ValueError(f"must be above {low} and at most {high}, not {value}")
        return value

    return AfterValidator(check)


Epsilon: TypeAlias = Annotated[Number, _between(Decimal(0), Decimal(100))]
_MAX_REPLACEMENT: Final = max(each.replacement_epsilon(MAX_LOCAL_EPSILON) for each in Mechanism)
LocalEpsilon: TypeAlias = Annotated[Number, _between(Decimal(0), _MAX_REPLACEMENT)]
"""A limit on the local epsilon in the replacement model."""
Delta: TypeAlias = Annotated[Number, _between(Decimal(0), Decimal("0.1"))]


def _url(value: str) -> str:
    """Accept an endpoint in one spelling only, which goes into task configurations.

    An aggregator cosigns under its URL, so it is a `LogName` too. Two spellings of one place could
    pass for leader and helper. Therefore percent signs, upper case in the host, default ports, and
    empty or dotted steps of the path are refused.
    """
    found = _URL.fullmatch(value)
    if found is None:
        raise ValueError(
            "a URL is https://host/path/, in ASCII: the host in lower case, then a port if it is "
            "not the default; it ends with / and has no user, query, fragment, percent or plus"
        )
    scheme, host, port = found["scheme"], found["host"], found["port"]
    if scheme == "http" and host not in ("localhost", "127.0.0.1", "[::1]"):
        raise ValueError("a URL starts with https:// (http:// for this machine only)")
    if port is not None and (int(port) > 65_535 or port == _USUAL_PORTS[scheme]):
        raise ValueError(f"port {port} is the default, which must be left out, or does not exist")
    if not _one_spelling(host):
        raise ValueError(f"{host} is not the canonical spelling of an IP address")
    if {"", ".", ".."} & set(found["path"].split("/")[1:-1]):
        raise ValueError("the path of a URL must not have empty steps, . or ..")
    return value


def _one_spelling(host: str) -> bool:
    """Return whether a host is a name, or an address in canonical form (not 127.1, not ::0:1)."""
    if not host.startswith("[") and not host.rpartition(".")[2][0].isdigit():
        return True
    try:
        return str(ip_address(host.strip("[]"))) == host.strip("[]")
    except ValueError:
        return False


URL: TypeAlias = Annotated[
    str, StringConstraints(max_length=255, strict=True), AfterValidator(_url)
]


def _honest_fraction(value: object, info: ValidationInfo) -> Fraction:
    if isinstance(value, Fraction) and info.context is not WIRE:
        value = f"{value.numerator}/{value.denominator}"
    if not isinstance(value, str) or not _FRACTION.fullmatch(value):
        raise ValueError('an honest fraction is a string such as "9/10"')
    fraction = Fraction(value)
    if not 0 < fraction <= 1 or value != f"{fraction.numerator}/{fraction.denominator}":
        raise ValueError('an honest fraction is above 0, at most 1, and in lowest terms: "9/10"')
    return fraction


HonestFraction: TypeAlias = Annotated[
    Fraction,
    PlainValidator(_honest_fraction),
    PlainSerializer(lambda f: f"{f.numerator}/{f.denominator}", return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^[1-9][0-9]{0,8}/[1-9][0-9]{0,8}$"}),
]
"""An exact rational, because float division could be off by a device."""
