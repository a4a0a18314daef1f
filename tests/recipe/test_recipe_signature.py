"""Signed recipes: exactly one JWS for a recipe and a key."""

from __future__ import annotations

import gc
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joserfc import jws
from joserfc.jwk import OctKey, OKPKey

from chorister.canonical import WIRE, b64url_decode, b64url_encode, key_id
from chorister.errors import RecipeError, SignatureInvalid
from chorister.recipe import Recipe, SignedRecipe, sign, verify
from tests.keyboard import (
    ANALYSIS,
    AUTHOR,
    EXAMPLE,
    POLICY,
    RECIPE,
    STRANGER,
    changed,
    recipe_tree,
    recipe_with,
)

JWS = sign(RECIPE, AUTHOR)
KEYS = POLICY.analyses[ANALYSIS].author_keys
HEADER, PAYLOAD, SIGNATURE = JWS.decode().split(".")


def assemble(header: bytes | str, payload: str = PAYLOAD, signature: str = SIGNATURE) -> bytes:
    spelled = b64url_encode(header) if isinstance(header, bytes) else header
    return f"{spelled}.{payload}.{signature}".encode()


def test_round_trip() -> None:
    signed = SignedRecipe.parse(JWS)
    verify(signed, KEYS)
    assert signed.recipe == RECIPE
    assert signed.jws == JWS
    assert signed.digest == RECIPE.digest
    assert signed.key_id == key_id(AUTHOR.public_key().public_bytes_raw())
    assert sign(signed.recipe, AUTHOR) == JWS


def test_a_long_recipe_is_not_kept_in_memory() -> None:
    """A few of them would fill it, and an author can publish one after the other."""
    words = tuple(sorted(f"word{number}" for number in range(8000)))
    tree = changed(recipe_tree(), {"features/1/vocabulary": words})
    long = sign(Recipe.model_validate(tree, context=WIRE), AUTHOR)
    before = sys.getrefcount(long)
    verify(SignedRecipe.open(long, KEYS), KEYS)
    gc.collect()
    assert sys.getrefcount(long) == before


def test_the_example_is_signed() -> None:
    assert (EXAMPLE / "recipe.jws").read_bytes().strip() == JWS


def test_any_jose_library_can_check_it() -> None:
    key = OKPKey.import_key({"kty": "OKP", "crv": "Ed25519", "x": KEYS[0]})
    assert jws.deserialize_compact(JWS, key, algorithms=["Ed25519"]).payload == RECIPE.canonical()


def test_any_jose_library_can_make_it() -> None:
    raw = AUTHOR.public_key().public_bytes_raw()
    key = OKPKey.import_key(
        {
            "kty": "OKP",
            "crv": "Ed25519",
            "x": b64url_encode(raw),
            "d": b64url_encode(AUTHOR.private_bytes_raw()),
        }
    )
    header = {"alg": "Ed25519", "kid": key_id(raw), "typ": "chorister-recipe+jws"}
    theirs = jws.serialize_compact(header, RECIPE.canonical(), key, algorithms=["Ed25519"])
    assert theirs.encode() == JWS


def test_opening_checks_the_signature_before_anything_is_parsed() -> None:
    assert SignedRecipe.open(JWS, KEYS) == SignedRecipe.parse(JWS)
    nonsense = assemble(HEADER, b64url_encode(b"not even JSON"))
    with pytest.raises(SignatureInvalid, match="does not match"):
        SignedRecipe.open(nonsense, KEYS)
    with pytest.raises(RecipeError, match="not JSON"):
        SignedRecipe.parse(nonsense)


def test_one_changed_byte() -> None:
    payload = bytearray(b64url_decode(PAYLOAD))
    at = payload.index(b'"min_cohort":1000') + len(b'"min_cohort":')
    payload[at] = ord("2")
    signed = SignedRecipe.parse(assemble(HEADER, b64url_encode(bytes(payload))))
    assert signed.recipe.privacy.min_cohort == 2000
    with pytest.raises(SignatureInvalid, match="does not match"):
        verify(signed, KEYS)


@settings(max_examples=150)
@given(st.integers(0, len(JWS) - 1), st.integers(0, 255))
def test_any_changed_byte(at: int, value: int) -> None:
    data = JWS[:at] + bytes([value]) + JWS[at + 1 :]
    if data == JWS:
        return
    with pytest.raises(RecipeError):
        verify(SignedRecipe.parse(data), KEYS)


def test_another_key() -> None:
    signed = SignedRecipe.parse(sign(RECIPE, STRANGER))
    with pytest.raises(SignatureInvalid, match="not an accepted author key"):
        verify(signed, KEYS)
    with pytest.raises(SignatureInvalid, match="not an accepted author key"):
        verify(signed, [])


def test_a_stolen_key_id() -> None:
    """The stranger's signature under the author's name."""
    header = b64url_decode(HEADER)
    strangers = sign(RECIPE, STRANGER).decode().split(".")[2]
    signed = SignedRecipe.parse(assemble(header, PAYLOAD, strangers))
    with pytest.raises(SignatureInvalid, match="does not match"):
        verify(signed, KEYS)


KID = json.loads(b64url_decode(HEADER))["kid"]


@pytest.mark.parametrize(
    "header",
    [
        b'{"alg":"none","kid":"%s","typ":"chorister-recipe+jws"}',
        b'{"alg":"HS256","kid":"%s","typ":"chorister-recipe+jws"}',
        b'{"alg":"EdDSA","kid":"%s","typ":"chorister-recipe+jws"}',
        b'{"alg":"Ed25519","kid":"%s"}',
        b'{"alg":"Ed25519","kid":"%s","typ":"JWT"}',
        b'{"alg":"Ed25519","crit":["b64"],"b64":false,"kid":"%s","typ":"chorister-recipe+jws"}',
        b'{"alg":"Ed25519","jwk":{},"kid":"%s","typ":"chorister-recipe+jws"}',
        b'{"kid":"%s","alg":"Ed25519","typ":"chorister-recipe+jws"}',
        b'{"alg":"Ed25519", "kid":"%s","typ":"chorister-recipe+jws"}',
        b'{"alg":"Ed25519","kid":"%s","typ":"chorister-recipe+jws","typ":"chorister-recipe+jws"}',
        b"[%s]",
        b"%s",
    ],
)
def test_other_headers(header: bytes) -> None:
    with pytest.raises(SignatureInvalid, match="protected header"):
        SignedRecipe.parse(assemble(header % KID.encode()))


@pytest.mark.parametrize("kid", ["", "short", "A" * 42 + "B", 'x","y":"z', "\u00e9" * 43])
def test_other_key_ids(kid: str) -> None:
    header = f'{{"alg":"Ed25519","kid":"{kid}","typ":"chorister-recipe+jws"}}'.encode()
    with pytest.raises(SignatureInvalid, match="protected header"):
        SignedRecipe.parse(assemble(header))


def test_hmac_under_the_public_key_is_no_signature() -> None:
    """The old confusion of algorithms, for good measure."""
    key = OctKey.import_key(KEYS[0])
    forged = jws.serialize_compact(
        {"alg": "HS256", "kid": KID, "typ": "chorister-recipe+jws"},
        RECIPE.canonical(),
        key,
        algorithms=["HS256"],
    )
    with pytest.raises(SignatureInvalid):
        SignedRecipe.parse(forged.encode())


def test_a_malleable_signature() -> None:
    """S + L verifies under lax rules and would be a second spelling of the same signature."""
    raw = b64url_decode(SIGNATURE)
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(raw[32:], "little") + order
    other = b64url_encode(raw[:32] + s.to_bytes(32, "little"))
    with pytest.raises(SignatureInvalid, match="canonical"):
        SignedRecipe.parse(assemble(HEADER, signature=other))


def test_other_spellings_of_base64() -> None:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = SIGNATURE[-1]
    stray = SIGNATURE[:-1] + alphabet[alphabet.index(last) + 1]
    for data in (
        assemble(HEADER, signature=stray),
        assemble(HEADER, signature=SIGNATURE + "=="),
        JWS + b"\n",
        b" " + JWS,
        JWS + b".",
        JWS.replace(b".", b"..", 1),
        assemble(HEADER, signature=""),
        assemble(HEADER, payload=""),
        b"",
        b"\xff.\xff.\xff",
        b"." * 20_000_000,
    ):
        with pytest.raises(RecipeError):
            SignedRecipe.parse(data)


@settings(max_examples=100)
@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_fuzz(header: bytes, payload: bytes, signature: bytes) -> None:
    parts = (b64url_encode(part).encode() for part in (header, payload, signature))
    for data in (b".".join(parts), header + b"." + payload + b"." + signature):
        with pytest.raises(RecipeError):
            SignedRecipe.parse(data)


def test_different_recipes_have_different_digests() -> None:
    assert recipe_with(id="another").digest != RECIPE.digest


def test_recipes_of_many_candidates_can_be_signed() -> None:
    """20,000 candidates are half a megabyte: more than a JOSE library takes by itself."""
    column = {"kind": "categories", "column": "ngram"}
    many = [f"a candidate phrase {i:06d}" for i in range(20_000)]
    large = recipe_with(features=[column | {"values": many}])
    assert len(large.canonical()) > 400_000
    signed = SignedRecipe.open(sign(large, AUTHOR), KEYS)
    assert signed.recipe == large
