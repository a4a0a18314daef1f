"""Who may do what: bearer tokens by their digests, and the host app's upload credential.

Only SHA-256 digests are configured, so a settings file gives nobody access. A token that comes in
is hashed and compared with every digest, in constant time, and then forgotten: it is neither
stored nor logged.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from chorister.errors import ServiceError

__all__ = ["CREDENTIAL_HEADER", "Bearers", "UploadCredential", "credential_of"]

T = TypeVar("T")

CREDENTIAL_HEADER: Final = b"chorister-upload-credential"
"""Names the host app's credential in an upload; in lower case, as ASGI has it."""

UploadCredential = Callable[[str], bool]
"""Says whether a credential is good; may take its time, for it runs in a thread."""

_SCHEME: Final = b"bearer "
_LONGEST: Final = 4096


class Bearers(Generic[T]):
    """Tokens that are accepted, and whose they are."""

    def __init__(self, owners: Mapping[bytes, T]) -> None:
        """`owners` by SHA-256 digest of the token."""
        self._owners = tuple(owners.items())

    def __repr__(self) -> str:
        return f"Bearers({len(self._owners)} tokens)"

    def owner(self, authorization: bytes | None) -> T | None:
        """Whose token an `Authorization` header carries; None if it is nobody's."""
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        digest = hashlib.sha256(authorization[len(_SCHEME) :].strip()).digest()
        found = None
        for known, owner in self._owners:  # all of them: how long it takes says nothing
            if hmac.compare_digest(known, digest):
                found = owner
        return found


def credential_of(
    hook: str | None, digests: Iterable[str]
) -> tuple[UploadCredential | None, UploadCredential | None]:
    """What checks upload credentials, if they are required: (at once, in a thread)."""
    if hook is not None:
        return None, _load(hook)
    accepted = Bearers({bytes.fromhex(digest): True for digest in digests})
    if not accepted._owners:
        return None, None
    return lambda text: bool(accepted.owner(_SCHEME + text.encode("latin-1"))), None


def _load(hook: str) -> UploadCredential:
    module, _, name = hook.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ServiceError(f"upload_credential: can't load {hook}: {error}") from error
    if not callable(function):
        raise ServiceError(f"upload_credential: {hook} is no function")

    def check(text: str) -> bool:
        # Only True lets an upload through: a coroutine or a forgotten return does not.
        return function(text[:_LONGEST]) is True

    return check
