"""Checkpoints: what the log promises at one moment, and the signatures under that promise.

    registry.example/log                              the log's origin
    42                                                number of entries
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=      RFC 9162 root over them, base64
    time 1767225600                                   POSIX seconds
    list 5dc9da79…                                    SHA-256 of the current list, hex

    — registry.example/log u9QZ…                      the log's signature
    — https://leader.example/ 8TkW…                   a cosignature

This is a signed note (c2sp.org/signed-note) with the text of c2sp.org/tlog-checkpoint and two
extension lines, which every cosigner and auditor recomputes. docs/reference/log.md has the details.
Signatures by unknown keys are kept with the note, and ignored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from chorister.errors import DecodeError, InvalidInput, LogSignatureInvalid
from chorister.transparency.tree import HASH_SIZE

MAX_NOTE: Final = 131_072
"""Bytes."""
MAX_SKEW: Final = 300
"""Seconds that a checkpoint's time may differ from the clock of an honest cosigner."""
# A log for many pairs of aggregators has many cosigners.
_MAX_SIGNATURES: Final = 256
_LOG_SIGNATURE: Final = 0x01
_COSIGNATURE: Final = 0x04
_MAX_INTEGER: Final = 2**63 - 1
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f]")
# Printable ASCII without space and plus: stricter than the note format, without look-alikes.
_NAME: Final = re.compile(r"[!-*,-~]{1,255}")
_SIGNATURE_LINE: Final = re.compile(r"— ([!-*,-~]{1,255}) ([A-Za-z0-9+/]+={0,2})")
_TEXT: Final = re.compile(
    r"([!-*,-~]{1,255})\n"
    r"(0|[1-9][0-9]{0,18})\n"
    r"([A-Za-z0-9+/]{43}=)\n"
    r"time (0|[1-9][0-9]{0,18})\n"
    r"list ([0-9a-f]{64})\n"
)


def check_key_name(name: str) -> None:
    """Raise unless this name or origin can appear in a signature line."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} can't name a log or a cosigner: "
            "use 1 to 255 printable ASCII characters without spaces and plus signs"
        )


# --- Signed notes -------------------------------------------------------------------------------


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
    def parse(cls, line: str) -> SignatureLine:
        """Read one line; exactly one spelling is accepted."""
        match = _SIGNATURE_LINE.fullmatch(line)
        if match is None:
            raise DecodeError("a signature line is '— NAME BASE64', all in printable ASCII")
        blob = _decode_base64(match[2], "a signature line")
        if len(blob) <= 4:
            raise DecodeError("a signature line is too short for a key id and a signature")
        return cls(name=match[1], blob=blob)


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
        lines = tail[:-1].split("\n")
        if len(lines) > _MAX_SIGNATURES:
            raise DecodeError(f"a signed note has at most {_MAX_SIGNATURES} signatures")
        signatures = tuple(SignatureLine.parse(line) for line in lines)
        if len({(line.name, line.blob[:4]) for line in signatures}) != len(signatures):
            raise DecodeError("a signed note has at most one signature per key")
        return cls(text=f"{head}\n", signatures=signatures)

    def check_signature(self, name: str, keys: Iterable[bytes]) -> bytes:
        """Require a log's signature by one of `keys` under `name`; return the key."""
        for line, key in self._claimed(name, keys, _LOG_SIGNATURE):
            check_ed25519(key, line.blob[4:], self.text.encode(), f"the log {name}")
            return key
        raise LogSignatureInvalid(f"there is no signature of the log {name} by a key of the policy")

    def check_cosignature(self, name: str, keys: Iterable[bytes]) -> Cosignature:
        """Require a cosignature by one of `keys` under `name`."""
        for line, key in self._claimed(name, keys, _COSIGNATURE):
            if len(line.blob) != 4 + 8 + 64:
                raise LogSignatureInvalid(f"the cosignature of {name} does not have 76 bytes")
            time = int.from_bytes(line.blob[4:12])
            if time > _MAX_INTEGER:
                raise LogSignatureInvalid(f"the cosignature of {name} has an impossible time")
            message = _cosigned_message(self.text, time)
            check_ed25519(key, line.blob[12:], message, f"the cosigner {name}")
            return Cosignature(name=name, key=key, time=time)
        raise LogSignatureInvalid(f"there is no cosignature of {name} by a key of the policy")

    def _claimed(
        self, name: str, keys: Iterable[bytes], kind: int
    ) -> Iterable[tuple[SignatureLine, bytes]]:
        """The lines that claim to be by one of these keys: not yet verified."""
        return (
            (line, key)
            for key in keys
            for line in self.signatures
            if line.name == name and line.blob[:4] == _key_id(name, kind, key)
        )


# --- Checkpoints --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is signed."""

    origin: str
    size: int
    root: bytes
    # POSIX seconds by the registry's clock, at most `MAX_SKEW` from each cosigner's.
    time: int
    # SHA-256 of the current list's bytes.
    list_digest: bytes

    def __post_init__(self) -> None:
        check_key_name(self.origin)
        if not (0 <= self.size <= _MAX_INTEGER and 0 <= self.time <= _MAX_INTEGER):
            raise InvalidInput("a checkpoint's size and time must be between 0 and 2^63 - 1")
        if len(self.root) != HASH_SIZE or len(self.list_digest) != HASH_SIZE:
            raise InvalidInput(f"a checkpoint's root and list digest have {HASH_SIZE} bytes")

    @property
    def text(self) -> str:
        """The five lines that the log and the cosigners sign."""
        return (
            f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"
            f"time {self.time}\nlist {self.list_digest.hex()}\n"
        )

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        match = _TEXT.fullmatch(text)
        if match is None:
            raise DecodeError("a checkpoint has five lines: origin, size, root, 'time', 'list'")
        size, time = int(match[2]), int(match[4])
        if size > _MAX_INTEGER or time > _MAX_INTEGER:
            raise DecodeError("a checkpoint's size or time exceeds 2^63 - 1")
        return cls(
            origin=match[1],
            size=size,
            root=_decode_base64(match[3], "a checkpoint's root"),
            time=time,
            list_digest=bytes.fromhex(match[5]),
        )

    def sign(self, key: Ed25519PrivateKey) -> SignedCheckpoint:
        """Sign as the log."""
        blob = _key_id(self.origin, _LOG_SIGNATURE, key.public_key().public_bytes_raw())
        line = SignatureLine(name=self.origin, blob=blob + key.sign(self.text.encode()))
        return SignedCheckpoint(checkpoint=self, note=Note(text=self.text, signatures=(line,)))

    def cosign(self, *, name: str, key: Ed25519PrivateKey, time: int) -> SignatureLine:
        """Create a cosignature. Nothing is checked here: `Cosigner` decides whether to call it."""
        check_key_name(name)
        blob = _key_id(name, _COSIGNATURE, key.public_key().public_bytes_raw()) + time.to_bytes(8)
        return SignatureLine(name=name, blob=blob + key.sign(_cosigned_message(self.text, time)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedCheckpoint:
    """A checkpoint with its signatures; parsing does not verify them."""

    checkpoint: Checkpoint
    note: Note

    def encode(self) -> bytes:
        return self.note.encode()

    @classmethod
    def parse(cls, data: bytes) -> SignedCheckpoint:
        note = Note.parse(data)
        return cls(checkpoint=Checkpoint.parse(note.text), note=note)

    def check_log(self, origin: str, keys: Collection[bytes]) -> None:
        """Require that this is a checkpoint of the log `origin`, signed by it.

        The caller says which log it expects, because one key may sign for several.
        """
        if self.checkpoint.origin != origin:
            raise LogSignatureInvalid(f"this is the log {self.checkpoint.origin}, not {origin}")
        self.note.check_signature(origin, keys)

    def with_cosigner(self, line: SignatureLine) -> SignedCheckpoint:
        """Add a cosigner's line, in place of any earlier one under its name."""
        rest = tuple(
            old
            for old in self.note.signatures
            if old.name != line.name or old.name == self.checkpoint.origin
        )
        note = Note(text=self.note.text, signatures=(*rest, line))
        return SignedCheckpoint(checkpoint=self.checkpoint, note=note)


# Many devices see the same checkpoint, so what verified is remembered; failures are not.
@lru_cache(maxsize=64)
def check_ed25519(key: bytes, signature: bytes, message: bytes, whose: str) -> None:
    """Verify one Ed25519 signature; the error names the signer."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise LogSignatureInvalid(f"the signature of {whose} does not verify") from error


def _decode_base64(text: str, where: str) -> bytes:
    """Decode standard base64 in its one canonical spelling."""
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
