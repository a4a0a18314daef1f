"""Signed notes (c2sp.org/signed-note): a text, a blank line, and signature lines.

    — registry.example/log u9QZ…        the log's signature, Ed25519 over the text
    — leader.example/dap 8TkW…          a cosignature (c2sp.org/tlog-cosignature): a time, and
                                        Ed25519 over "cosignature/v1", that time and the text

The base64 of a line begins with four bytes that identify the key. Lines by unknown keys are kept
with the note and ignored, whatever their names and lengths are: witnesses may add any. If a line
claims to be by a known key and does not verify, the whole note is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from chorister.errors import DecodeError, InvalidInput, LogSignatureInvalid

MAX_NOTE: Final = 131_072
"""Bytes."""
# A log for many pairs of aggregators has many cosigners.
_MAX_SIGNATURES: Final = 256
LOG_SIGNATURE: Final = 0x01
COSIGNATURE: Final = 0x04
_MAX_INTEGER: Final = 2**63 - 1
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f]")
# Names of ours: printable ASCII without space and plus, so that no two of them look alike.
_NAME: Final = re.compile(r"[!-*,-~]{1,255}")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]+={0,2}")


def check_key_name(name: str) -> None:
    """Raise unless this can be the name of a log or a cosigner of ours."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} can't name a log or a cosigner: "
            "use 1 to 255 printable ASCII characters without spaces and plus signs"
        )


def key_name(url: str) -> str:
    """Return the name under which the aggregator at a URL cosigns: the URL without its scheme."""
    return url.partition("://")[2].rstrip("/") or url


@dataclass(frozen=True, kw_only=True, slots=True)
class SignatureLine:
    """One line below a note's text."""

    name: str
    # The first four bytes identify the key; the rest is the signature.
    blob: bytes

    def encode(self) -> str:
        """Return the line, without a newline."""
        return f"— {self.name} {base64.b64encode(self.blob).decode()}"

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read one line, of any signature type."""
        dash, _, rest = line.partition(" ")
        name, separator, encoded = rest.rpartition(" ")
        if dash != "—" or not separator or not name or "+" in name:
            raise DecodeError("a signature line is '— NAME BASE64'")
        if any(character.isspace() for character in name):
            raise DecodeError("the name in a signature line has no spaces")
        if not _BASE64.fullmatch(encoded):
            raise DecodeError("a signature line is '— NAME BASE64'")
        blob = decode_base64(encoded, "a signature line")
        if len(blob) <= 4:
            raise DecodeError("a signature line is too short for a key id and a signature")
        return cls(name=name, blob=blob)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosignature:
    """A cosignature that was verified."""

    name: str
    key: bytes
    # POSIX seconds by the cosigner's own clock when it signed.
    time: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A text with signature lines; parsing does not verify them."""

    # What is signed; ends with a newline.
    text: str
    signatures: tuple[SignatureLine, ...]

    def encode(self) -> bytes:
        lines = "".join(f"{line.encode()}\n" for line in self.signatures)
        return f"{self.text}\n{lines}".encode()

    @classmethod
    def parse(cls, data: bytes) -> Note:
        """Read a note; exactly one byte string is accepted for each."""
        if len(data) > MAX_NOTE:
            raise DecodeError(f"a signed note has at most {MAX_NOTE} bytes, this one {len(data)}")
        try:
            content = data.decode()
        except UnicodeDecodeError as error:
            raise DecodeError("a signed note is UTF-8") from error
        if _CONTROL.search(content):
            raise DecodeError("a signed note has no control characters except newlines")
        head, separator, tail = content.rpartition("\n\n")
        if not separator or not head or not tail.endswith("\n"):
            raise DecodeError("a signed note is a text, a blank line and signature lines")
        return cls(text=f"{head}\n", signatures=tuple(parse_lines(tail)))

    def check_signature(self, name: str, keys: Iterable[bytes]) -> bytes:
        """Require a log's signature by one of `keys` under `name`; return the key."""
        found = None
        for line, key in self._claimed(name, keys, LOG_SIGNATURE):
            check_ed25519(key, line.blob[4:], self.text.encode(), f"the log {name}")
            found = found or key
        if found is None:
            raise LogSignatureInvalid(
                f"there is no signature of the log {name} by a key of the policy"
            )
        return found

    def cosignature(self, name: str, keys: Iterable[bytes]) -> Cosignature | None:
        """Return the latest cosignature by one of `keys` under `name`; all have to verify."""
        found = None
        for line, key in self._claimed(name, keys, COSIGNATURE):
            each = _verified(self.text, line, key)
            if found is None or each.time > found.time:
                found = each
        return found

    def check_cosignature(self, name: str, keys: Iterable[bytes]) -> Cosignature:
        """Require a cosignature by one of `keys` under `name`; return the latest."""
        found = self.cosignature(name, keys)
        if found is None:
            raise LogSignatureInvalid(f"there is no cosignature of {name} by a key of the policy")
        return found

    def _claimed(
        self, name: str, keys: Iterable[bytes], kind: int
    ) -> Iterator[tuple[SignatureLine, bytes]]:
        """The lines that claim to be by one of these keys: not yet verified."""
        return (
            (line, key)
            for key in keys
            for line in self.signatures
            if line.name == name and line.blob[:4] == note_key_id(name, kind, key)
        )


def parse_lines(text: str) -> Iterator[SignatureLine]:
    """Read signature lines, each with a newline at its end."""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > _MAX_SIGNATURES:
        raise DecodeError(f"a signed note has at most {_MAX_SIGNATURES} signatures")
    return (SignatureLine.parse(line) for line in lines)


def sign_note(text: str, *, name: str, key: Ed25519PrivateKey) -> SignatureLine:
    """Sign a text as the log `name`."""
    blob = note_key_id(name, LOG_SIGNATURE, key.public_key().public_bytes_raw())
    return SignatureLine(name=name, blob=blob + key.sign(text.encode()))


def cosign_note(text: str, *, name: str, key: Ed25519PrivateKey, time: int) -> SignatureLine:
    """Create a cosignature. Nothing is checked here: `Cosigner` decides whether to call it."""
    check_key_name(name)
    blob = note_key_id(name, COSIGNATURE, key.public_key().public_bytes_raw()) + time.to_bytes(8)
    return SignatureLine(name=name, blob=blob + key.sign(_cosigned_message(text, time)))


def _verified(text: str, line: SignatureLine, key: bytes) -> Cosignature:
    if len(line.blob) != 4 + 8 + 64:
        raise LogSignatureInvalid(f"the cosignature of {line.name} does not have 76 bytes")
    time = int.from_bytes(line.blob[4:12])
    if time > _MAX_INTEGER:
        raise LogSignatureInvalid(f"the cosignature of {line.name} has an impossible time")
    message = _cosigned_message(text, time)
    check_ed25519(key, line.blob[12:], message, f"the cosigner {line.name}")
    return Cosignature(name=line.name, key=key, time=time)


# Many devices see the same checkpoint, so what verified is remembered; failures are not.
@lru_cache(maxsize=64)
def check_ed25519(key: bytes, signature: bytes, message: bytes, whose: str) -> None:
    """Verify one Ed25519 signature; the error names the signer."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise LogSignatureInvalid(f"the signature of {whose} does not verify") from error


def decode_base64(text: str, where: str) -> bytes:
    """Decode standard base64 in its one canonical spelling."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DecodeError(f"{where} is not base64") from error
    if base64.b64encode(data).decode() != text:
        raise DecodeError(f"{where} is not canonical base64")
    return data


def verifier_key(name: str, kind: int, key: bytes) -> str:
    """Return a key as standard tools take it, NAME+HASH+BASE64."""
    encoded = base64.b64encode(bytes([kind]) + key).decode()
    return f"{name}+{note_key_id(name, kind, key).hex()}+{encoded}"


def note_key_id(name: str, kind: int, key: bytes) -> bytes:
    """Return the four bytes that identify a key in a signature line."""
    return hashlib.sha256(name.encode() + b"\n" + bytes([kind]) + key).digest()[:4]


def _cosigned_message(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()
