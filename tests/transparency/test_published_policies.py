"""The policies that a log publishes: whatever it serves, a typed error or policies come back."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.errors import ChoristerError, DecodeError, InvalidInput, LogWithheld
from chorister.transparency.auditor import read_policies
from chorister.transparency.client import ABOUT, policy_path
from tests.logworld import ORIGIN, policy, policy_text

DOCUMENT = policy_text().encode()


class Files:
    """A source out of a dictionary."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def read(self, path: str, *, limit: int) -> bytes:
        try:
            return self.files[path][: limit + 1]
        except KeyError:
            raise LogWithheld(f"{path} is missing", path=path) from None


def publishing(document: bytes, *, at: bytes | None = None) -> Files:
    digest = hashlib.sha256(document).digest() if at is None else at
    about = {"policies": [digest.hex()], "earlier_policies": [digest.hex()]}
    return Files({ABOUT: json.dumps(about).encode(), policy_path(digest): document})


def reads(source: Files) -> bool:
    """Whether there is something to trust; any error but ours fails the test."""
    try:
        read_policies(source).authority  # noqa: B018 (it can refuse too)
    except ChoristerError:
        return False
    return True


def test_published_policies_are_read() -> None:
    published = read_policies(publishing(DOCUMENT))
    assert published.policies == published.earlier == (policy(),)
    assert published.authority.origin == ORIGIN


def test_an_exchanged_policy_is_refused() -> None:
    with pytest.raises(LogWithheld, match="not the policy with that digest"):
        read_policies(publishing(DOCUMENT, at=bytes(32)))


def test_no_policy_is_nothing_to_trust() -> None:
    empty = Files({ABOUT: b'{"policies": [], "earlier_policies": []}'})
    with pytest.raises(InvalidInput, match="at least one policy"):
        read_policies(empty).authority  # noqa: B018


@pytest.mark.parametrize("digest", ["", " ", "00" * 31, "00" * 33])
def test_a_policy_is_named_by_32_bytes(digest: str) -> None:
    about = json.dumps({"policies": [], "earlier_policies": [digest]}).encode()
    with pytest.raises(DecodeError, match="SHA-256"):
        read_policies(Files({ABOUT: about}))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_as_about(data: bytes) -> None:
    assert not reads(Files({ABOUT: data}))


def test_deep_nesting_as_about() -> None:
    assert not reads(Files({ABOUT: b"[" * 60_000}))
    assert not reads(Files({ABOUT: b'{"policies":' * 5_000}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(JSON, JSON)
def test_arbitrary_values_in_about(today: object, before: object) -> None:
    about = json.dumps({"policies": today, "earlier_policies": before}).encode()
    assert not reads(Files({ABOUT: about}))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_as_a_policy(data: bytes) -> None:
    assert not reads(publishing(data))


@given(st.integers(0, len(DOCUMENT)), st.integers(0, 12), st.binary(max_size=6))
def test_damaged_policies(at: int, cut: int, insert: bytes) -> None:
    reads(publishing(DOCUMENT[:at] + insert + DOCUMENT[at + cut :]))
