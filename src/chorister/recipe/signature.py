"""Signed recipes: a compact JWS (RFC 7515) with Ed25519 (RFC 8037, RFC 9864).

There is exactly one JWS for a recipe and a key: the header is fixed to the byte, the payload is
canonical JSON, base64url has one spelling, and Ed25519 is deterministic with S < L. So the digests
of the JWS and of the recipe identify the same thing, and nobody can publish "another" recipe by
spelling one differently. With a header that is fixed to the byte, little of JOSE is left: tests
check both directions against joserfc, which a device need not carry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from chorister.canonical import b64url_decode, b64url_encode, dumps, key_id
from chorister.errors import DecodeError, InvalidInput, RecipeError, SignatureInvalid
from chorister.recipe.model import MAX_RECIPE_BYTES, Recipe

ALGORITHM: Final = "Ed25519"
TYPE: Final = "chorister-recipe+jws"
# The order of Ed25519's group. A signature with a larger S is another spelling of one below it.
_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
KEPT_JWS_BYTES: Final = 1 << 16
"""Nothing longer is kept in a cache: with a few recipes, an author could fill an app's memory."""
_MAX_JWS_BYTES: Final = MAX_RECIPE_BYTES * 4 // 3 + 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedRecipe:
    """A recipe with its JWS. `parse` checks the form, `verify` the signature."""

    recipe: Recipe
    jws: bytes
    key_id: str  # RFC 7638 thumbprint of the author's key, from the header

    @property
    def digest(self) -> bytes:
        return self.recipe.digest

    @classmethod
    def parse(cls, data: bytes) -> SignedRecipe:
        """Parse a JWS from outside; raise `RecipeError` unless it is canonical."""
        author, payload = _split(data)
        return cls(recipe=Recipe.parse(payload), jws=data, key_id=author)

    @classmethod
    def open(cls, data: bytes, public_keys: Iterable[str]) -> SignedRecipe:
        """Verify, then parse: what no accepted key signed never reaches the JSON parser."""
        author, payload = _split(data)
        _verify(data, author, public_keys)
        return cls(recipe=Recipe.parse(payload), jws=data, key_id=author)


def _split(data: bytes) -> tuple[str, bytes]:
    """Split a canonical JWS into the author's key id and the payload."""
    if len(data) > _MAX_JWS_BYTES:
        raise RecipeError(f"{len(data)} bytes, but a signed recipe has at most {_MAX_JWS_BYTES}")
    try:
        header, payload, signature = data.decode("ascii").split(".", 3)
    except ValueError:
        raise RecipeError("a signed recipe has three base64url parts, joined by dots") from None
    try:
        author = _author(b64url_decode(header))
        raw = b64url_decode(signature)
        body = b64url_decode(payload)
    except RecipeError:
        raise
    except DecodeError as error:
        raise RecipeError(error.why) from None
    if len(raw) != 64 or int.from_bytes(raw[32:], "little") >= _ORDER:
        raise SignatureInvalid("not a canonical Ed25519 signature", field="signature")
    return author, body


def sign(recipe: Recipe, private_key: Ed25519PrivateKey) -> bytes:
    """Sign a recipe with the author's key; return the JWS."""
    payload = recipe.canonical()
    if len(payload) > MAX_RECIPE_BYTES:
        raise InvalidInput(
            f"a recipe has at most {MAX_RECIPE_BYTES} bytes, this one has {len(payload)}"
        )
    author = key_id(private_key.public_key().public_bytes_raw())
    signed = f"{b64url_encode(dumps(_header(author)))}.{b64url_encode(payload)}".encode()
    return signed + b"." + b64url_encode(private_key.sign(signed)).encode()


def verify(signed: SignedRecipe, public_keys: Iterable[str]) -> None:
    """Raise `SignatureInvalid` unless one of `public_keys` (base64url) made the signature."""
    _verify(signed.jws, signed.key_id, public_keys)


def _verify(data: bytes, author: str, public_keys: Iterable[str]) -> None:
    for public_key in public_keys:
        if key_id(b64url_decode(public_key)) != author:
            continue
        (_verify_short if len(data) <= KEPT_JWS_BYTES else _verify_under)(data, public_key)
        return
    why = f"made by key {author}, which is not an accepted author key"
    raise SignatureInvalid(why, field="signature")


def _verify_under(data: bytes, public_key: str) -> None:
    signed, _, signature = data.rpartition(b".")
    try:
        key = Ed25519PublicKey.from_public_bytes(b64url_decode(public_key))
        key.verify(b64url_decode(signature.decode("ascii")), signed)
    except (InvalidSignature, ValueError):
        raise SignatureInvalid("does not match the recipe", field="signature") from None


# Remembers what verified; failures raise each time. It keeps the recipes themselves in memory.
_verify_short = lru_cache(maxsize=16)(_verify_under)


def _header(author: str) -> dict[str, str]:
    return {"alg": ALGORITHM, "kid": author, "typ": TYPE}


def _author(header: bytes) -> str:
    """Return the key id in a protected header; raise unless the rest is as expected."""
    start = dumps(_header("")).partition(b'"kid":"')
    author = header.removeprefix(start[0] + start[1]).removesuffix(start[2])
    try:
        text = author.decode("ascii")
        canonical = len(b64url_decode(text)) == 32 and dumps(_header(text)) == header
    except ValueError:
        canonical = False
    if not canonical:
        why = f'not {{"alg":"{ALGORITHM}","kid":<key id>,"typ":"{TYPE}"}}, to the byte'
        raise SignatureInvalid(why, field="protected header")
    return text
