"""Signed notes (c2sp.org/signed-note) with Ed25519: text, a blank line, lines of signatures.

Chorister's checkpoints are such notes, so that tools for signed notes read them and verify their
signatures. That is said of checkpoints alone: entries and lists have formats of their own, and of
the tree only the leaves are served. Two kinds of signature exist here, told apart by the key id
and by what is signed:

- type 0x01, the log's: over the text itself;
- type 0x04, a cosigner's (c2sp.org/tlog-cosignature): over `cosignature/v1`, the time, the text.

A signature line from a key that nobody asked about is carried along and never believed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from chorister.errors import DecodeError, InvalidInput, LogSignatureInvalid

__all__ = [
    "MAX_NOTE",
    "Cosignature",
    "Note",
    "SignatureLine",
    "check_ed25519",
    "check_key_name",
    "cosign_text",
    "sign_text",
]

MAX_NOTE: Final = 131_072
# A log of many pairs of aggregators has many cosigners.
MAX_SIGNATURES: Final = 256
LOG_SIGNATURE: Final = 0x01
COSIGNATURE: Final = 0x04
_MAX_TIME: Final = 2**63 - 1
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f]")
# Printable ASCII without space and plus: narrower than the note format, and free of look-alikes.
_NAME = re.compile(r"[!-*,-~]{1,255}")
_LINE = re.compile(r"— ([!-*,-~]{1,255}) ([A-Za-z0-9+/]+={0,2})")


def check_key_name(name: str) -> None:
    """Refuse a key name or origin that could not stand in a signature line."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} can't name a log or a cosigner: "
            "use 1 to 255 printable ASCII characters without spaces and plus signs"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SignatureLine:
    """One line below a note's text."""

    name: str
    # The first four bytes identify the key; the rest is the signature.
    blob: bytes

    def encode(self) -> str:
        """The line, without its newline."""
        return f"— {self.name} {base64.b64encode(self.blob).decode()}"

    @classmethod
    def parse(cls, line: str) -> SignatureLine:
        """Read one line; exactly one spelling is accepted."""
        match = _LINE.fullmatch(line)
        if match is None:
            raise DecodeError(
                "a signature line is '— NAME BASE64' with printable ASCII and no more"
            )
        blob = decode_base64(match[2], "a signature line")
        if len(blob) <= 4:
            raise DecodeError("a signature line is too short to hold a key id and a signature")
        return cls(name=match[1], blob=blob)

    def is_from(self, *, kind: int, key: bytes) -> bool:
        """Whether this line claims to be by that key (a claim: not yet a verified one)."""
        return self.blob[:4] == _key_id(self.name, kind, key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosignature:
    """A cosignature that verified."""

    name: str
    key: bytes
    # POSIX seconds by the cosigner's own clock when it signed.
    time: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A text with the signature lines that came with it; nothing is verified by parsing."""

    # Ends with a newline; what is signed.
    text: str
    signatures: tuple[SignatureLine, ...]

    def encode(self) -> bytes:
        """The note's bytes."""
        lines = "".join(f"{line.encode()}\n" for line in self.signatures)
        return f"{self.text}\n{lines}".encode()

    @classmethod
    def parse(cls, data: bytes) -> Note:
        """Split a note; exactly one byte string is accepted for each note."""
        if len(data) > MAX_NOTE:
            raise DecodeError(f"a signed note has at most {MAX_NOTE} bytes, this one {len(data)}")
        try:
            content = data.decode()
        except UnicodeDecodeError as error:
            raise DecodeError("a signed note is UTF-8") from error
        if _CONTROL.search(content):
            raise DecodeError("a signed note has no control characters but newlines")
        head, separator, tail = content.rpartition("\n\n")
        if not separator or not head or not tail.endswith("\n"):
            raise DecodeError("a signed note is a text, a blank line and lines of signatures")
        lines = tail[:-1].split("\n")
        if len(lines) > MAX_SIGNATURES:
            raise DecodeError(f"a signed note has at most {MAX_SIGNATURES} signatures")
        signatures = tuple(SignatureLine.parse(line) for line in lines)
        if len({(line.name, line.blob[:4]) for line in signatures}) != len(signatures):
            raise DecodeError("a signed note has at most one signature of each key")
        return cls(text=f"{head}\n", signatures=signatures)

    def check_signature(self, name: str, keys: Iterable[bytes]) -> bytes:
        """Require a signature of type 0x01 by one of `keys` under `name`; returns the key."""
        for key in keys:
            for line in self.signatures:
                if line.name == name and line.is_from(kind=LOG_SIGNATURE, key=key):
                    check_ed25519(key, line.blob[4:], self.text.encode(), f"the log {name}")
                    return key
        raise LogSignatureInvalid(f"there is no signature of the log {name} by a key of the policy")

    def check_cosignature(self, name: str, keys: Iterable[bytes]) -> Cosignature:
        """Require a signature of type 0x04 by one of `keys` under `name`."""
        for key in keys:
            for line in self.signatures:
                if line.name == name and line.is_from(kind=COSIGNATURE, key=key):
                    return self._open_cosignature(line, key)
        raise LogSignatureInvalid(f"there is no cosignature of {name} by a key of the policy")

    def _open_cosignature(self, line: SignatureLine, key: bytes) -> Cosignature:
        if len(line.blob) != 4 + 8 + 64:
            raise LogSignatureInvalid(f"the cosignature of {line.name} does not have 76 bytes")
        time = int.from_bytes(line.blob[4:12])
        if time > _MAX_TIME:
            raise LogSignatureInvalid(f"the cosignature of {line.name} has an impossible time")
        message = _cosigned_message(self.text, time)
        check_ed25519(key, line.blob[12:], message, f"the cosigner {line.name}")
        return Cosignature(name=line.name, key=key, time=time)


def sign_text(text: str, *, name: str, key: Ed25519PrivateKey) -> SignatureLine:
    """The log's own signature line."""
    check_key_name(name)
    identifier = _key_id(name, LOG_SIGNATURE, key.public_key().public_bytes_raw())
    return SignatureLine(name=name, blob=identifier + key.sign(text.encode()))


def cosign_text(text: str, *, name: str, key: Ed25519PrivateKey, time: int) -> SignatureLine:
    """A cosigner's signature line, made at `time`."""
    check_key_name(name)
    identifier = _key_id(name, COSIGNATURE, key.public_key().public_bytes_raw())
    signature = key.sign(_cosigned_message(text, time))
    return SignatureLine(name=name, blob=identifier + time.to_bytes(8) + signature)


# One checkpoint is shown to many devices: what verified is remembered, what did not is not.
@lru_cache(maxsize=64)
def check_ed25519(key: bytes, signature: bytes, message: bytes, whose: str) -> None:
    """Verify one Ed25519 signature; raises `LogSignatureInvalid` naming the signer."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise LogSignatureInvalid(f"the signature of {whose} does not verify") from error


def decode_base64(text: str, where: str) -> bytes:
    """Standard base64 in its one canonical spelling."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DecodeError(f"{where} is not base64") from error
    if base64.b64encode(data).decode() != text:
        raise DecodeError(f"{where} is not canonical base64")
    return data


def _key_id(name: str, kind: int, key: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + bytes([kind]) + key).digest()[:4]


def _cosigned_message(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()
