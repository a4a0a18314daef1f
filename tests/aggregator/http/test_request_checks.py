"""Bearer tokens and upload credentials: digests only, nothing but the right one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorister.aggregator.http.request_checks import BearerTokens, upload_credential_checks
from chorister.canonical import sha256
from chorister.errors import ServiceError

BOOK = BearerTokens({sha256(b"one"): "first", sha256(b"two"): "second"})


@pytest.mark.parametrize(
    ("header", "owner"),
    [
        (b"Bearer one", "first"),
        (b"bearer two", "second"),
        (b"BEARER  two ", "second"),
        (b"Bearer three", None),
        (b"Bearer ", None),
        (b"Bearer one two", None),
        (b"Basic one", None),
        (b"one", None),
        (b"", None),
        (None, None),
        (b"Bearer " + sha256(b"one"), None),
    ],
)
def test_whose_token(header: bytes | None, owner: str | None) -> None:
    assert BOOK.owner(header) == owner


@given(st.binary(max_size=100))
def test_no_other_token_is_anybodys(data: bytes) -> None:
    known = data.strip() in (b"one", b"two")
    assert (BOOK.owner(b"Bearer " + data) is not None) == known


def test_a_book_does_not_print_its_digests() -> None:
    assert repr(BOOK) == "BearerTokens(2 tokens)"


def test_credentials_by_digest() -> None:
    at_once, in_thread = upload_credential_checks(None, [sha256(b"good").hex()])
    assert in_thread is None
    assert at_once is not None
    assert at_once("good")
    assert not at_once("bad")
    assert upload_credential_checks(None, []) == (None, None)


def test_credentials_by_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("host_app")
    module.__dict__.update(check=lambda text: text == "good", forgot=lambda _text: "yes", number=7)
    monkeypatch.setitem(sys.modules, "host_app", module)
    _, check = upload_credential_checks("host_app:check", [])
    assert check is not None
    assert check("good")
    assert not check("bad")
    _, forgot = upload_credential_checks("host_app:forgot", [])
    assert forgot is not None
    assert not forgot("good")  # only True is yes
    for hook in ("host_app:none", "no_such_module:check", "host_app:number"):
        with pytest.raises(ServiceError, match="upload_credential"):
            upload_credential_checks(hook, [])
