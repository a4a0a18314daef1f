"""The entries of the log: recipe, end of a recipe, key revocation, HPKE config.

Each has one exact encoding, defined in docs/reference/log.md ("Entries"). A recipe is signed by its
own JWS; the others end with the signer's key and its Ed25519 signature over a label and everything
before the signature. So every entry contains the key that signed it, and anyone can verify it
without a policy; whether that key *may* sign it is for a policy to say (`trust.Authority`). An
entry's leaf hash is the address of its body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar, Final, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.canonical import b64url_encode
from chorister.codec import Reader, vector
from chorister.errors import DecodeError, InvalidInput
from chorister.recipe import SignedRecipe
from chorister.transparency.checkpoint import check_ed25519, check_key_name
from chorister.transparency.tree import leaf_hash

# The longest recipe of `chorister.recipe`, as a JWS, fits.
MAX_ENTRY: Final = 11 << 20
# The config of at most 2^16 - 1 bytes, and what is around it.
MAX_HPKE_CONFIG_ENTRY: Final = (1 << 16) + 512
_VERSION: Final = 1
_LABEL: Final = b"chorister log entry v1\n"
_KEY: Final = 32
_SIGNATURE: Final = 64
_MAX_TIME: Final = 2**63 - 1


class EndReason(IntEnum):
    """Why a recipe ended."""

    TARGET_REACHED = 1
    WITHDRAWN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeEntry:
    """One signed question. `open_recipe` verifies the signature."""

    TYPE: ClassVar[int] = 1
    # The Ed25519 key under which the JWS verifies.
    author_key: bytes
    jws: bytes

    def __post_init__(self) -> None:
        _require(len(self.author_key) == _KEY, "an author key has 32 bytes")
        _require(
            0 < len(self.jws) <= MAX_ENTRY - 64, f"a recipe has at most {MAX_ENTRY - 64} bytes"
        )

    def encode(self) -> bytes:
        return _prefix(self.TYPE) + self.author_key + vector(self.jws, prefix=3)

    @property
    def address(self) -> bytes:
        """The leaf hash, which is also the body's address."""
        return leaf_hash(self.encode())

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(author_key=reader.opaque(_KEY), jws=reader.vector(prefix=3))


def open_recipe(entry: RecipeEntry) -> SignedRecipe:
    """Return the question in an entry; verifies its signature with the entry's own key."""
    return SignedRecipe.open(entry.jws, [b64url_encode(entry.author_key)])


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

    @property
    def address(self) -> bytes:
        """The leaf hash, which is also the body's address."""
        return leaf_hash(self.encode())

    def signed(self, key: Ed25519PrivateKey) -> Self:
        """Return this entry, signed; `signer` becomes the public key."""
        unsigned = replace(self, signer=key.public_key().public_bytes_raw())
        return replace(unsigned, signature=key.sign(_LABEL + unsigned._unsigned()))

    def check_signature(self) -> None:
        """Verify the signature with the entry's own key."""
        whose = f"{type(self).__name__} by key {self.signer.hex()}"
        check_ed25519(self.signer, self.signature, _LABEL + self._unsigned(), whose)


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
    # The aggregator's name: its URL as policies spell it.
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
        _require(0 < len(self.config) < 1 << 16, "an HPKE config has 1 to 65535 bytes")

    def _body(self) -> bytes:
        return (
            vector(self.aggregator.encode(), prefix=1)
            + self.not_before.to_bytes(8)
            + self.not_after.to_bytes(8)
            + vector(self.config, prefix=2)
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        name = reader.vector(prefix=1)
        if not name.isascii():
            raise DecodeError("an aggregator's name is ASCII")
        return cls(
            aggregator=name.decode(),
            not_before=reader.uint64(),
            not_after=reader.uint64(),
            config=reader.vector(prefix=2),
            signer=reader.opaque(_KEY),
            signature=reader.opaque(_SIGNATURE),
        )


Entry = RecipeEntry | RecipeEnd | KeyRevocation | HPKEConfigEntry
_TYPES: Final[dict[int, type[Entry]]] = {
    kind.TYPE: kind for kind in (RecipeEntry, RecipeEnd, KeyRevocation, HPKEConfigEntry)
}


def parse_entry(data: bytes) -> Entry:
    """Read one entry; exactly one byte string is accepted for each. Verifies no signature."""
    if len(data) > MAX_ENTRY:
        raise DecodeError(f"an entry has at most {MAX_ENTRY} bytes, this one {len(data)}")
    with Reader(data, "log entry") as reader:
        version, kind = reader.uint8(), reader.uint8()
        if version != _VERSION:
            raise DecodeError(f"log entry version {version} is unknown; update Chorister")
        if kind not in _TYPES:
            raise DecodeError(f"log entry type {kind} is unknown")
        try:
            return _TYPES[kind].read(reader)
        except InvalidInput as error:
            raise DecodeError(f"log entry: {error}") from error


def _prefix(kind: int) -> bytes:
    return bytes([_VERSION, kind])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)
