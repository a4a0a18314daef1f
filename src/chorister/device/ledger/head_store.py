"""A second copy of the ledger's newest entry, kept apart from the ledger.

Whoever restores an old copy of the ledger would get back what was spent since. So the whole next
entry is written here *before* the ledger commits it, under the ledger's write lock.
`chorister.device.ledger.ledger` decides what a mismatch means. Restoring both together can't be
noticed.

The entry is sealed (AES-256-GCM, with a key derived from the device's): whoever can read it does
not learn what was asked, and nobody else can put an entry there.
"""

from __future__ import annotations

import os
import secrets
import stat
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from chorister.canonical import b64url_decode, b64url_encode
from chorister.device.files import CREATE, READ, is_inside, sync_folder
from chorister.device.keys import SecretKey
from chorister.device.ledger.ledger_entries import MAX_BYTES
from chorister.errors import DecodeError, HeadUnavailable

if TYPE_CHECKING:
    from keyring.backend import KeyringBackend

_MAGIC: Final = b"chorister-head-1\n"
_NONCE: Final = 12
_MAX_SEALED: Final = len(_MAGIC) + _NONCE + MAX_BYTES + 16


class HeadStore(ABC):
    """Keeps one entry. If it can't be read or written, `HeadUnavailable` silences the device."""

    kind: str
    """`file` or `keyring`, for `chorister device status`; a device without one says `none`."""

    def __init__(self, key: SecretKey) -> None:
        self._cipher = AESGCM(key.derive("head").reveal())

    def load(self) -> bytes | None:
        """Return the entry last saved; None if there never was one, or if somebody removed it."""
        self._check_place()
        sealed = self._read()
        if sealed is None:
            return None
        nonce, text = sealed[len(_MAGIC) :][:_NONCE], sealed[len(_MAGIC) + _NONCE :]
        try:
            # The magic is authenticated too, so data with another one does not open.
            return self._cipher.decrypt(nonce, text, sealed[: len(_MAGIC)])
        except (InvalidTag, ValueError):
            raise HeadUnavailable(
                f"the ledger's head in {self} does not open with this device's key: it is damaged "
                "or another device's. Restore it; or remove it, and wait as for a new ledger"
            ) from None

    def save(self, entry: bytes) -> None:
        """Replace the entry. When this returns, it is durable and was read back."""
        self._check_place()
        nonce = secrets.token_bytes(_NONCE)
        sealed = _MAGIC + nonce + self._cipher.encrypt(nonce, entry, _MAGIC)
        self._write(sealed)
        # A place that loses data would look as if somebody removed the head again and again.
        if self._read() != sealed:
            raise HeadUnavailable(
                f"{self} does not keep what is written there: keep the ledger's head elsewhere"
            )

    def _check_place(self) -> None:  # noqa: B027 (few places can be wrong)
        """Raise if a backup of the device would include this place."""

    @abstractmethod
    def _read(self) -> bytes | None: ...

    @abstractmethod
    def _write(self, sealed: bytes) -> None: ...


class FileHeadStore(HeadStore):
    """A file outside the store's folder: inside, it would be restored together with the store.

    Its folder must exist: a missing folder means an unmounted disk, not a missing head.
    """

    kind = "file"

    def __init__(
        self, path: str | os.PathLike[str], *, key: SecretKey, store: str | os.PathLike[str]
    ) -> None:
        super().__init__(key)
        self.path = Path(path)
        self.store = Path(store)

    def _read(self) -> bytes | None:
        try:
            if not self.path.parent.is_dir():
                raise HeadUnavailable(f"{self.path.parent}, where the ledger's head is, is missing")
            descriptor = os.open(self.path, READ)
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
        draft = self.path.with_name(f".{self.path.name}.draft")
        try:
            # There is one writer, under the ledger's lock; a draft left by a crash is replaced.
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, CREATE, 0o600), "wb") as file:
                file.write(sealed)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._unavailable(error) from None

    def _check_place(self) -> None:
        if is_inside(self.path, self.store):
            raise HeadUnavailable(
                f"{self}, the ledger's head, is in the store's folder: move it elsewhere"
            )

    def _unavailable(self, error: OSError) -> HeadUnavailable:
        return HeadUnavailable(
            f"the ledger's head {self} can't be used ({error.strerror}): make its folder writable, "
            "and the file readable, for this user"
        )

    def __str__(self) -> str:
        return os.fspath(self.path)


class KeyringHeadStore(HeadStore):
    """An entry in the system's keyring, which backups of files do not include."""

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
        # Imported here: looking for keyrings is slow, and most devices have no use for them.
        import keyring

        backend = keyring.get_keyring()
        # A priority below 1 means that it stores nothing, or uses a file that backups include.
        if backend.priority < 1:
            raise HeadUnavailable(
                f"this system's keyring ({backend.name}) can't keep the ledger's head: keep it in "
                "a file"
            )
        return backend

    def _unavailable(self, error: Exception) -> HeadUnavailable:
        return HeadUnavailable(
            f"{self} can't be read or written ({type(error).__name__}): unlock the keyring, then "
            "try again; or keep the ledger's head in a file"
        )

    def __str__(self) -> str:
        return f"the keyring's {self.service} {self.name}"


# --- Which one a device uses ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadFile:
    """Keep the ledger's head in a file outside the device's folder."""

    path: str | os.PathLike[str]

    def open(self, key: SecretKey, folder: Path) -> HeadStore:
        return FileHeadStore(self.path, key=key, store=folder)


@dataclass(frozen=True, slots=True)
class HeadKeyring:
    """Keep the ledger's head in the system's keyring."""

    name: str

    def open(self, key: SecretKey, folder: Path) -> HeadStore:  # noqa: ARG002 (as HeadFile's)
        return KeyringHeadStore(self.name, key=key)
