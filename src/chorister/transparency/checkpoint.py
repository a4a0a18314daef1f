"""A checkpoint: what the log promises at one moment, in one exact form of bytes.

    registry.example/log                              the log's origin
    42                                                entries
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=      RFC 9162 root over them, base64
    time 1767225600                                   POSIX seconds
    list 5dc9da79…                                    SHA-256 of the current list, hex

The first three lines are those of c2sp.org/tlog-checkpoint. The two after them are its extension
lines; nothing in them is on trust: every cosigner and auditor computes both anew.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.errors import DecodeError, InvalidInput, LogSignatureInvalid
from chorister.transparency.note import (
    Note,
    SignatureLine,
    check_key_name,
    cosign_text,
    decode_base64,
    sign_text,
)
from chorister.transparency.tree import HASH_SIZE

__all__ = ["Checkpoint", "SignedCheckpoint"]

_MAX_INTEGER = 2**63 - 1
_TEXT = re.compile(
    r"([!-*,-~]{1,255})\n"
    r"(0|[1-9][0-9]{0,18})\n"
    r"([A-Za-z0-9+/]{43}=)\n"
    r"time (0|[1-9][0-9]{0,18})\n"
    r"list ([0-9a-f]{64})\n"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is signed."""

    origin: str
    size: int
    root: bytes
    # POSIX seconds by the registry's clock, within five minutes of each cosigner's.
    time: int
    # SHA-256 of the current list's bytes.
    list_digest: bytes

    def __post_init__(self) -> None:
        check_key_name(self.origin)
        if not (0 <= self.size <= _MAX_INTEGER and 0 <= self.time <= _MAX_INTEGER):
            raise InvalidInput("a checkpoint's size and time lie between 0 and 2^63 - 1")
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
        """Read the five lines."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise DecodeError("a checkpoint has five lines: origin, size, root, 'time', 'list'")
        size, time = int(match[2]), int(match[4])
        if size > _MAX_INTEGER or time > _MAX_INTEGER:
            raise DecodeError("a checkpoint's size or time exceeds 2^63 - 1")
        return cls(
            origin=match[1],
            size=size,
            root=decode_base64(match[3], "a checkpoint's root"),
            time=time,
            list_digest=bytes.fromhex(match[5]),
        )

    def sign(self, key: Ed25519PrivateKey) -> SignedCheckpoint:
        """The checkpoint as the log publishes it for its cosigners."""
        line = sign_text(self.text, name=self.origin, key=key)
        return SignedCheckpoint(checkpoint=self, note=Note(text=self.text, signatures=(line,)))

    def cosign(self, *, name: str, key: Ed25519PrivateKey, time: int) -> SignatureLine:
        """A cosignature. Nothing is checked here: `Cosigner` is what decides to call this."""
        return cosign_text(self.text, name=name, key=key, time=time)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedCheckpoint:
    """A checkpoint with the signatures that came with it; parsing verifies none of them."""

    checkpoint: Checkpoint
    note: Note

    def encode(self) -> bytes:
        """The published file."""
        return self.note.encode()

    @classmethod
    def parse(cls, data: bytes) -> SignedCheckpoint:
        """Read a published file."""
        note = Note.parse(data)
        return cls(checkpoint=Checkpoint.parse(note.text), note=note)

    def check_log(self, origin: str, keys: Collection[bytes]) -> None:
        """Require that this is a checkpoint of the log `origin`, signed by it.

        The name is compared, not taken from the checkpoint: one key may sign for several logs.
        """
        if self.checkpoint.origin != origin:
            raise LogSignatureInvalid(f"this is the log {self.checkpoint.origin}, not {origin}")
        self.note.check_signature(origin, keys)

    def with_cosigner(self, line: SignatureLine) -> SignedCheckpoint:
        """This checkpoint with a cosigner's line, in place of any earlier one under its name."""
        rest = tuple(
            old
            for old in self.note.signatures
            if old.name != line.name or old.name == self.checkpoint.origin
        )
        note = Note(text=self.note.text, signatures=(*rest, line))
        return SignedCheckpoint(checkpoint=self.checkpoint, note=note)
