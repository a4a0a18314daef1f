"""Where the ledger's newest entry is kept a second time, apart from the ledger.

Whoever restores an old copy of the ledger would get back what was spent since. So the whole next
entry is written here *before* the ledger commits it, under the ledger's write lock. What a mismatch
means is decided in :mod:`chorister.device.ledger`. Restoring both together can't be noticed.

The entry is sealed (AES-256-GCM, with a key derived from the device's): the place it is kept in
tells nobody what was asked, and nobody else can put an entry there.
"""

from __future__ import annotations

import os
import secrets
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from chorister.canonical import b64url_decode, b64url_encode
from chorister.device.keys import SecretKey
from chorister.device.ledger.entries import MAX_BYTES
from chorister.errors import DecodeError, HeadUnavailable

if TYPE_CHECKING:
    from keyring.backend import KeyringBackend

__all__ = ["FileHeadStore", "HeadStore", "KeyringHeadStore"]

_MAGIC: Final = b"chorister-head-1\n"
_NONCE: Final = 12
_MAX_SEALED: Final = len(_MAGIC) + _NONCE + MAX_BYTES + 16


class HeadStore(ABC):
    """Keeps one entry. What can't be read or written raises `HeadUnavailable`: silence."""

    kind: str
    """`file` or `keyring`, for `chorister device status`; a device without one says `none`."""

    def __init__(self, key: SecretKey) -> None:
        self._cipher = AESGCM(key.derive("head").reveal())

    def load(self) -> bytes | None:
        """The entry last saved, or None if there never was one (or somebody took it away)."""
        sealed = self._read()
        if sealed is None:
            return None
        nonce, text = sealed[len(_MAGIC) :][:_NONCE], sealed[len(_MAGIC) + _NONCE :]
        try:
            # The magic is part of what is authenticated, so another one does not open either.
            return self._cipher.decrypt(nonce, text, sealed[: len(_MAGIC)])
        except (InvalidTag, ValueError):
            raise HeadUnavailable(
                f"the ledger's head in {self} does not open with this device's key: it is damaged "
                "or another device's. Restore it; or remove it, and wait as for a new ledger"
            ) from None

    def save(self, entry: bytes) -> None:
        """Keep this entry instead; when this returns, it is durable and was read back."""
        nonce = secrets.token_bytes(_NONCE)
        sealed = _MAGIC + nonce + self._cipher.encrypt(nonce, entry, _MAGIC)
        self._write(sealed)
        # A place that forgets would look like a head that was taken away, again and again.
        if self._read() != sealed:
            raise HeadUnavailable(
                f"{self} does not keep the ledger's head that is written there: keep it elsewhere"
            )

    @abstractmethod
    def _read(self) -> bytes | None: ...

    @abstractmethod
    def _write(self, sealed: bytes) -> None: ...


class FileHeadStore(HeadStore):
    """In a file, outside the store's folder: inside, it would be restored together with it.

    Its folder must exist: one that is missing is an unmounted disk, not a missing head.
    """

    kind = "file"

    def __init__(
        self, path: str | os.PathLike[str], *, key: SecretKey, store: str | os.PathLike[str]
    ) -> None:
        super().__init__(key)
        self.path = Path(path)
        self.store = Path(store)

    def _read(self) -> bytes | None:
        self._check_place()
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            if not self.path.parent.is_dir():
                raise HeadUnavailable(f"{self.path.parent}, with the ledger's head, is not there")
            descriptor = os.open(self.path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable(error) from None
        try:
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise HeadUnavailable(f"{self}, the ledger's head, is not a regular file")
                return file.read(_MAX_SEALED)
        except OSError as error:
            raise self._unavailable(error) from None

    def _write(self, sealed: bytes) -> None:
        self._check_place()
        draft = self.path.with_name(f".{self.path.name}.draft")
        try:
            # One writer at a time, under the ledger's lock; a draft left by a crash is replaced.
            draft.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
                file.write(sealed)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._unavailable(error) from None

    def _check_place(self) -> None:
        # Resolved each time: a link may have been put in the way since.
        path, store = os.path.realpath(self.path), os.path.realpath(self.store)
        if os.path.commonpath([path, store]) == store:
            raise HeadUnavailable(
                f"{self}, the ledger's head, lies in the store's folder: put it elsewhere"
            )

    def _unavailable(self, error: OSError) -> HeadUnavailable:
        return HeadUnavailable(
            f"the ledger's head {self} can't be used ({error.strerror}): make its folder writable, "
            "and the file readable, for this user"
        )

    def __str__(self) -> str:
        return os.fspath(self.path)


class KeyringHeadStore(HeadStore):
    """In the system's keyring, which backups of files do not reach."""

    kind = "keyring"

    def __init__(self, name: str, *, key: SecretKey, service: str = "chorister-head") -> None:
        super().__init__(key)
        self.name = name
        self.service = service

    def _read(self) -> bytes | None:
        from keyring.errors import KeyringError

        try:
            found = self._backend().get_password(self.service, self.name)
            return None if found is None else b64url_decode(found)
        except (KeyringError, RuntimeError, OSError) as error:
            raise self._unavailable(error) from None
        except DecodeError as error:
            raise HeadUnavailable(
                f"{self} is not what was stored there ({error.why}): restore it; or remove it, "
                "and wait as for a new ledger"
            ) from None

    def _write(self, sealed: bytes) -> None:
        from keyring.errors import KeyringError

        try:
            self._backend().set_password(self.service, self.name, b64url_encode(sealed))
        except (KeyringError, RuntimeError, OSError) as error:
            raise self._unavailable(error) from None

    def _backend(self) -> KeyringBackend:
        # Looking for keyrings takes long, and most devices never do.
        import keyring

        backend = keyring.get_keyring()
        # Below 1 are the ones that store nothing, or in a file that backups reach.
        if backend.priority < 1:
            raise HeadUnavailable(
                f"this system's keyring ({backend.name}) can't keep the ledger's head: keep it in "
                "a file"
            )
        return backend

    def _unavailable(self, error: Exception) -> HeadUnavailable:
        return HeadUnavailable(
            f"the keyring does not give or take {self} ({type(error).__name__}): unlock it, then "
            "try again; or keep the ledger's head in a file"
        )

    def __str__(self) -> str:
        return f"the keyring's {self.service} {self.name}"
