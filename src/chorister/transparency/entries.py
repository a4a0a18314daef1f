"""The entries of the log: recipe, end of a recipe, key revocation, HPKE config, list.

Each has one exact encoding of at most 65,535 bytes, defined in docs/reference/log.md ("Entries").
All but the list end with the signer's key and its Ed25519 signature over a label and everything
before the signature. So every entry contains the key that signed it, and anyone can verify it
without a policy; whether that key *may* sign it is for a policy to say (`trust.Authority`). A list
is not signed: it follows from the entries before it and its time, and only the log adds it.

A recipe's entry says what is asked about whom and until when, and names the **body**: the recipe
itself, a JWS of up to 11 MiB, which lies beside the log under its SHA-256. `Submission` is an entry
together with its body.
"""

from __future__ import annotations

import hmac
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.canonical import b64url_encode, sha256
from chorister.codec import Reader, vector
from chorister.errors import DecodeError, InvalidInput
from chorister.recipe import SignedRecipe
from chorister.transparency.note import check_ed25519, check_key_name

MAX_ENTRY: Final = 65_535
"""Bytes, by c2sp.org/tlog-tiles."""
# The longest recipe of `chorister.recipe`, as a JWS, fits.
MAX_BODY: Final = 11 << 20
"""Bytes."""
MAX_SUBMISSION: Final = 2 + MAX_ENTRY + MAX_BODY
MAX_HPKE_CONFIG: Final = 4096
# The config, and what is around it.
MAX_HPKE_CONFIG_ENTRY: Final = MAX_HPKE_CONFIG + 512
_VERSION: Final = 2
_LABEL: Final = b"chorister log entry v2\n"
_KEY: Final = 32
_SIGNATURE: Final = 64
_MAX_TIME: Final = 2**63 - 1


class EndReason(IntEnum):
    """Why a recipe ended."""

    TARGET_REACHED = 1
    WITHDRAWN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Statement(ABC):
    """An entry whose signature is its last field."""

    TYPE: ClassVar[int]
    signer: bytes
    signature: bytes = bytes(_SIGNATURE)

    def __post_init__(self) -> None:
        _require(len(self.signer) == _KEY, "a signer's key has 32 bytes")
        _require(len(self.signature) == _SIGNATURE, "a signature has 64 bytes")

    @abstractmethod
    def _body(self) -> bytes:
        """Return what is stated, between the prefix and the signer's key."""

    def _unsigned(self) -> bytes:
        return _prefix(self.TYPE) + self._body() + self.signer

    def encode(self) -> bytes:
        return self._unsigned() + self.signature

    def signed(self, key: Ed25519PrivateKey) -> Self:
        """Return this entry, signed; `signer` becomes the public key."""
        unsigned = replace(self, signer=key.public_key().public_bytes_raw())
        return replace(unsigned, signature=key.sign(_LABEL + unsigned._unsigned()))

    def check_signature(self) -> None:
        """Verify the signature with the entry's own key."""
        whose = f"{type(self).__name__} by key {self.signer.hex()}"
        check_ed25519(self.signer, self.signature, _LABEL + self._unsigned(), whose)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeEntry(_Statement):
    """One question, signed by its author. The question itself is the body."""

    TYPE: ClassVar[int] = 1
    recipe_digest: bytes
    # SHA-256 of the body, which is also its address, and its length in bytes.
    body_digest: bytes
    body_size: int
    analysis: str
    # The answer period, POSIX seconds; of a series, from the first window to the last.
    opens: int
    closes: int
    signer: bytes = bytes(_KEY)

    def __post_init__(self) -> None:
        _Statement.__post_init__(self)
        _require(len(self.recipe_digest) == _KEY, "a recipe's digest has 32 bytes")
        _require(len(self.body_digest) == _KEY, "a body's digest has 32 bytes")
        _require(0 < self.body_size <= MAX_BODY, f"a recipe has at most {MAX_BODY} bytes")
        check_key_name(self.analysis)
        _require(0 <= self.opens < self.closes <= _MAX_TIME, "an answer period must not be empty")

    @property
    def author_key(self) -> bytes:
        return self.signer

    def _body(self) -> bytes:
        return (
            self.recipe_digest
            + self.body_digest
            + self.body_size.to_bytes(4)
            + vector(self.analysis.encode(), prefix=1)
            + self.opens.to_bytes(8)
            + self.closes.to_bytes(8)
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(
            recipe_digest=reader.opaque(_KEY),
            body_digest=reader.opaque(_KEY),
            body_size=reader.uint32(),
            analysis=_read_name(reader),
            opens=reader.uint64(),
            closes=reader.uint64(),
            signer=reader.opaque(_KEY),
            signature=reader.opaque(_SIGNATURE),
        )

    @classmethod
    def of(cls, jws: bytes, key: Ed25519PrivateKey) -> Self:
        """Return the entry of a signed recipe, signed with the same key."""
        signed = SignedRecipe.open(jws, [b64url_encode(key.public_key().public_bytes_raw())])
        recipe = signed.recipe
        return cls(
            recipe_digest=signed.digest,
            body_digest=sha256(jws),
            body_size=len(jws),
            analysis=recipe.analysis,
            opens=recipe.window.opens,
            closes=recipe.closes,
        ).signed(key)

    def open_body(self, body: bytes) -> SignedRecipe:
        """Return the question; verifies that it is this entry's, and the author's signature."""
        if len(body) != self.body_size or not hmac.compare_digest(sha256(body), self.body_digest):
            raise DecodeError("this is not the body that the entry names")
        found = open_recipe(RecipeBody(author_key=self.signer, jws=body))
        recipe = found.recipe
        stated = (self.recipe_digest, self.analysis, self.opens, self.closes)
        if stated != (found.digest, recipe.analysis, recipe.window.opens, recipe.closes):
            raise DecodeError("the entry does not match the recipe in its body")
        return found


class RecipeBody(NamedTuple):
    """A recipe's body and the key that signed it."""

    author_key: bytes
    jws: bytes

    @property
    def address(self) -> bytes:
        return sha256(self.jws)


def open_recipe(body: RecipeBody) -> SignedRecipe:
    """Return the question in a body; verifies its signature with the author's key."""
    return SignedRecipe.open(body.jws, [b64url_encode(body.author_key)])


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeEnd(_Statement):
    """The author's statement that a recipe has ended, signed with the recipe's own key."""

    TYPE: ClassVar[int] = 2
    recipe_digest: bytes
    reason: EndReason
    signer: bytes = bytes(_KEY)

    def __post_init__(self) -> None:
        _Statement.__post_init__(self)
        _require(len(self.recipe_digest) == _KEY, "a recipe's digest has 32 bytes")

    def _body(self) -> bytes:
        return self.recipe_digest + bytes([self.reason])

    @classmethod
    def read(cls, reader: Reader) -> Self:
        digest, reason = reader.opaque(32), reader.uint8()
        if reason not in set(EndReason):
            raise DecodeError(f"{reason} is not a reason for the end of a recipe")
        return cls(
            recipe_digest=digest,
            reason=EndReason(reason),
            signer=reader.opaque(_KEY),
            signature=reader.opaque(_SIGNATURE),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRevocation(_Statement):
    """A statement that an author key is no longer valid, forever.

    Signed by the key itself, by another author key of the same analysis, or by the log. None of
    them can do harm with it: a revocation only ever reduces what may be asked.
    """

    TYPE: ClassVar[int] = 3
    key: bytes
    signer: bytes = bytes(_KEY)

    def __post_init__(self) -> None:
        _Statement.__post_init__(self)
        _require(len(self.key) == _KEY, "an author key has 32 bytes")

    def _body(self) -> bytes:
        return self.key

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(
            key=reader.opaque(_KEY), signer=reader.opaque(_KEY), signature=reader.opaque(_SIGNATURE)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HPKEConfigEntry(_Statement):
    """The key to which devices seal their reports, signed by the aggregator's cosigning key."""

    TYPE: ClassVar[int] = 4
    # The aggregator's name: the URL of the policies without its scheme (`note.key_name`).
    aggregator: str
    # Devices may seal to it from `not_before` until just before `not_after`, POSIX seconds.
    not_before: int
    not_after: int
    # A DAP HpkeConfig, encoded.
    config: bytes
    signer: bytes = bytes(_KEY)

    def __post_init__(self) -> None:
        _Statement.__post_init__(self)
        check_key_name(self.aggregator)
        _require(0 <= self.not_before < self.not_after <= _MAX_TIME, "validity must not be empty")
        _require(
            0 < len(self.config) <= MAX_HPKE_CONFIG,
            f"an HPKE config has 1 to {MAX_HPKE_CONFIG} bytes",
        )

    def _body(self) -> bytes:
        return (
            vector(self.aggregator.encode(), prefix=1)
            + self.not_before.to_bytes(8)
            + self.not_after.to_bytes(8)
            + vector(self.config, prefix=2)
        )

    @property
    def address(self) -> bytes:
        """SHA-256 of the entry: devices fetch it under this address, like a body."""
        return sha256(self.encode())

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(
            aggregator=_read_name(reader),
            not_before=reader.uint64(),
            not_after=reader.uint64(),
            config=reader.vector(prefix=2),
            signer=reader.opaque(_KEY),
            signature=reader.opaque(_SIGNATURE),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ListEntry:
    """That a list is current at a time: the last entry of every batch, added by the log itself."""

    TYPE: ClassVar[int] = 5
    # POSIX seconds by the registry's clock.
    time: int
    # SHA-256 of the list.
    digest: bytes

    def __post_init__(self) -> None:
        _require(0 <= self.time <= _MAX_TIME, "a list's time must be between 0 and 2^63 - 1")
        _require(len(self.digest) == _KEY, "a list's digest has 32 bytes")

    def encode(self) -> bytes:
        return _prefix(self.TYPE) + self.time.to_bytes(8) + self.digest

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(time=reader.uint64(), digest=reader.opaque(_KEY))


SignedEntry = RecipeEntry | RecipeEnd | KeyRevocation | HPKEConfigEntry
Entry = SignedEntry | ListEntry
_TYPES: Final[dict[int, type[Entry]]] = {
    kind.TYPE: kind for kind in (RecipeEntry, RecipeEnd, KeyRevocation, HPKEConfigEntry, ListEntry)
}


class Submission(NamedTuple):
    """An entry on its way into the log, and what a cosigner keeps of it."""

    # Encoded.
    entry: bytes
    # A recipe's JWS; empty for other entries.
    body: bytes = b""

    def encode(self) -> bytes:
        """The entry after its length in two bytes, then the body."""
        return vector(self.entry, prefix=2) + self.body

    @classmethod
    def parse(cls, data: bytes) -> Self:
        if len(data) > MAX_SUBMISSION:
            raise DecodeError(f"a submission has at most {MAX_SUBMISSION} bytes, not {len(data)}")
        reader = Reader(data, "submission")
        entry = reader.vector(prefix=2)
        return cls(entry, reader.opaque(reader.remaining))

    @classmethod
    def of(cls, entry: SignedEntry, body: bytes = b"") -> Self:
        return cls(entry.encode(), body)

    def open(self) -> tuple[Entry, SignedRecipe | None]:
        """Parse the entry and verify its body, if it has to have one."""
        entry = parse_entry(self.entry)
        if isinstance(entry, RecipeEntry):
            return entry, entry.open_body(self.body)
        if self.body:
            raise DecodeError("only a recipe has a body")
        return entry, None


def parse_entry(data: bytes) -> Entry:
    """Read one entry; exactly one byte string is accepted for each. Verifies no signature."""
    if len(data) > MAX_ENTRY:
        raise DecodeError(f"an entry has at most {MAX_ENTRY} bytes, this one {len(data)}")
    with Reader(data, "log entry") as reader:
        version, kind = reader.uint8(), reader.uint8()
        if version != _VERSION:
            older = "is of an earlier log" if version < _VERSION else "is unknown; update Chorister"
            raise DecodeError(f"log entry version {version} {older}")
        if kind not in _TYPES:
            raise DecodeError(f"log entry type {kind} is unknown")
        try:
            return _TYPES[kind].read(reader)
        except InvalidInput as error:
            raise DecodeError(f"log entry: {error}") from error


def _read_name(reader: Reader) -> str:
    name = reader.vector(prefix=1)
    if not name.isascii():
        raise reader.error("a name is ASCII")
    return name.decode()


def _prefix(kind: int) -> bytes:
    return bytes([_VERSION, kind])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)
