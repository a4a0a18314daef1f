"""The device's key: 32 random bytes from the system's keyring, a file elsewhere, or the host app.

Each database has its own key, derived from that one and the database's name.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final, NoReturn, Protocol

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from chorister.device.files import CREATE, READ, is_inside, is_private, sync_folder
from chorister.errors import DecodeError, InvalidInput, KeyUnavailable

KEY_BYTES: Final = 32
_PREFIX: Final = "chorister-device-key-1:"
_TEXT_LENGTH: Final = len(_PREFIX) + 2 * KEY_BYTES
_LABEL: Final = b"chorister device database 1: "


class SecretKey:
    """32 bytes that are never printed or pickled, and compare in constant time."""

    __slots__ = ("_material",)

    def __init__(self, material: bytes) -> None:
        if len(material) != KEY_BYTES:
            raise InvalidInput(f"a device's key is {KEY_BYTES} bytes of good randomness")
        self._material = material

    @classmethod
    def generate(cls) -> SecretKey:
        """Return a new key from the operating system's generator."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> SecretKey:
        """Parse a key in one line of text, as `text` returns it."""
        digits = text.removeprefix(_PREFIX)
        hexadecimal = len(text) == _TEXT_LENGTH and not digits.strip("0123456789abcdef")
        if not text.startswith(_PREFIX) or not hexadecimal:
            raise DecodeError(f"a device's key is {_PREFIX} and {2 * KEY_BYTES} hexadecimal digits")
        return cls(bytes.fromhex(digits))

    def text(self) -> str:
        """Return the key as one line of text, for key files and keyrings only."""
        return f"{_PREFIX}{self._material.hex()}"

    def reveal(self) -> bytes:
        """Return the bytes, for the one call that needs them."""
        return self._material

    def derive(self, label: str) -> SecretKey:
        """Derive the key of one database, `events` or `ledger` (HKDF-SHA256)."""
        hkdf = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=_LABEL + label.encode())
        return SecretKey(hkdf.derive(self._material))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretKey):
            return NotImplemented
        return hmac.compare_digest(self._material, other._material)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "SecretKey(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretKey can't be pickled: pass the KeySource instead")


class KeySource(Protocol):
    """Where the device's key lives."""

    def obtain(self, *, create: bool) -> SecretKey:
        """Return the key. If there is none, `create` one or raise `KeyUnavailable`."""
        ...


class GivenKey:
    """A key that the host app keeps, in a secure enclave for example."""

    def __init__(self, material: bytes) -> None:
        self._key = SecretKey(material)

    def obtain(self, *, create: bool) -> SecretKey:  # noqa: ARG002 (there always is one)
        return self._key

    def __repr__(self) -> str:
        return "GivenKey(…)"


class KeyFile:
    """A key in a file that only its owner can read, outside the store's folder.

    Next to the database it would be part of every backup and copy of it, and protect nothing.
    """

    def __init__(self, path: str | os.PathLike[str], *, store: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.store = Path(store)

    def obtain(self, *, create: bool) -> SecretKey:
        """Return the key in the file, which `create` writes if there is none."""
        self._check_place()
        try:
            if create and not os.path.lexists(self.path):
                self._write(SecretKey.generate())
            return self._read()
        except OSError as error:
            raise KeyUnavailable(
                f"the key file {self.path} can't be used ({error.strerror}): "
                "restore it, or create a new store with `chorister device init`"
            ) from None

    def _check_place(self) -> None:
        if is_inside(self.path, self.store):
            raise KeyUnavailable(
                f"the key file is in the store's folder {self.store}: move it elsewhere"
            )

    def _write(self, key: SecretKey) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, CREATE, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(key.text() + "\n")
                file.flush()
                os.fsync(file.fileno())
            # A link, not a rename: if two processes create a key at once, the second must not
            # replace the first one's.
            try:
                os.link(draft, self.path)
            except FileExistsError:
                return
            sync_folder(self.path.parent)
        finally:
            draft.unlink()

    def _read(self) -> SecretKey:
        descriptor = os.open(self.path, READ)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyUnavailable(f"{self.path} is not a regular file")
            if not is_private(status):
                raise KeyUnavailable(
                    f"others can read or own the key file: run `chmod 600 {self.path}` as its owner"
                )
            data = file.read(_TEXT_LENGTH + 2)
        return _parse(data.removesuffix(b"\n"), f"the key file {self.path}")

    def __repr__(self) -> str:
        return f"KeyFile({str(self.path)!r})"


class KeyringKey:
    """A key in the system's keyring (Secret Service, macOS Keychain, Windows Credential Locker)."""

    def __init__(self, name: str, *, service: str = "chorister") -> None:
        self.service = service
        self.name = name

    def obtain(self, *, create: bool) -> SecretKey:
        """Return the key in the keyring, which `create` stores if there is none."""
        # Imported here: looking for keyrings is slow, and most devices have no use for them.
        import keyring
        from keyring.errors import KeyringError

        backend = keyring.get_keyring()
        # A priority below 1 means that it stores nothing, or plain text.
        if backend.priority < 1:
            raise KeyUnavailable(
                f"this system's keyring ({backend.name}) is not safe: use a key file, or pass a key"
            )
        try:
            found = backend.get_password(self.service, self.name)
            if found is None and create:
                backend.set_password(self.service, self.name, SecretKey.generate().text())
                found = backend.get_password(self.service, self.name)
        except (KeyringError, RuntimeError, OSError) as error:
            raise KeyUnavailable(
                f"the system's keyring does not answer ({type(error).__name__}): unlock it, then "
                "try again"
            ) from None
        if found is None:
            raise KeyUnavailable(
                f"the keyring has no {self.service} key {self.name}: `chorister device init` "
                "creates one, together with a new store"
            )
        return _parse(found.encode(), f"the keyring's {self.service} key {self.name}")

    def __repr__(self) -> str:
        return f"KeyringKey({self.name!r}, service={self.service!r})"


def _parse(data: bytes, where: str) -> SecretKey:
    try:
        return SecretKey.parse(data.decode("ascii"))
    except (UnicodeDecodeError, DecodeError):
        # Without the bytes and the codec's message: both quote the secret.
        raise KeyUnavailable(f"{where} has no key: restore it from a backup") from None
