"""Checkpoints, and the proof that a list is the last entry under one.

A checkpoint (c2sp.org/tlog-checkpoint) is a signed note with three lines:

    registry.example/log                              the log's origin
    42                                                number of entries
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=      RFC 9162 root over them, base64

It has no time and no list of its own: the last entry of the tree is a `ListEntry`, and the times
are those of the cosignatures. `ListProof` (c2sp.org/tlog-proof) is what a device fetches: that
entry, its path to the root, and the checkpoint. docs/reference/log.md has the details.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chorister.clock import Clock
from chorister.errors import (
    CheckpointTime,
    DecodeError,
    InvalidInput,
    LogOutdated,
    LogSignatureInvalid,
    WrongList,
)
from chorister.transparency.entries import ListEntry, parse_entry
from chorister.transparency.note import (
    MAX_NOTE,
    Note,
    SignatureLine,
    check_key_name,
    cosign_note,
    decode_base64,
    sign_note,
)
from chorister.transparency.tree import HASH_SIZE, leaf_hash, verify_inclusion

MAX_SKEW: Final = 300
"""Seconds that a list's time may be ahead of, or behind, the clock of an honest cosigner."""
MAX_PATH: Final = 63
"""Hashes in a proof."""
MAX_PROOF: Final = MAX_NOTE + 8192
"""Bytes, of a proof or a request to a witness."""
_MAX_INTEGER: Final = 2**63 - 1
_TEXT: Final = re.compile(
    r"([!-*,-~]{1,255})\n"
    r"(0|[1-9][0-9]{0,18})\n"
    r"([A-Za-z0-9+/]{43}=)\n"
)  # fmt: skip
_OUTDATED: Final = re.compile(r"[^\n]+\n[0-9]+\n[^\n]+\ntime [0-9]+\nlist [0-9a-f]{64}\n")
_PROOF_HEADER: Final = "c2sp.org/tlog-proof@v1"
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is signed."""

    origin: str
    size: int
    root: bytes

    def __post_init__(self) -> None:
        check_key_name(self.origin)
        if not 0 <= self.size <= _MAX_INTEGER:
            raise InvalidInput("a checkpoint's size must be between 0 and 2^63 - 1")
        if len(self.root) != HASH_SIZE:
            raise InvalidInput(f"a checkpoint's root has {HASH_SIZE} bytes")

    @property
    def text(self) -> str:
        """The three lines that the log and the cosigners sign."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        match = _TEXT.fullmatch(text)
        if match is None:
            if _OUTDATED.fullmatch(text):
                raise LogOutdated(
                    "this is the checkpoint of a log by an earlier version of Chorister, in a "
                    "format that this version can't read: docs/howto/upgrade-the-log.md explains "
                    "how to start the log again"
                )
            raise DecodeError("a checkpoint has three lines: origin, size and root")
        size = int(match[2])
        if size > _MAX_INTEGER:
            raise DecodeError("a checkpoint's size exceeds 2^63 - 1")
        return cls(origin=match[1], size=size, root=decode_base64(match[3], "a checkpoint's root"))

    def sign(self, key: Ed25519PrivateKey) -> SignedCheckpoint:
        """Sign as the log."""
        line = sign_note(self.text, name=self.origin, key=key)
        return SignedCheckpoint(checkpoint=self, note=Note(text=self.text, signatures=(line,)))

    def cosign(self, *, name: str, key: Ed25519PrivateKey, time: int) -> SignatureLine:
        """Create a cosignature. Nothing is checked here: `Cosigner` decides whether to call it."""
        return cosign_note(self.text, name=name, key=key, time=time)


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
        """Add a cosigner's line, in place of any earlier one by its key."""
        rest = tuple(
            old
            for old in self.note.signatures
            if old.name != line.name or old.blob[:4] != line.blob[:4]
        )
        note = Note(text=self.note.text, signatures=(*rest, line))
        return SignedCheckpoint(checkpoint=self.checkpoint, note=note)


class ClockJumps:
    """Notices a clock that is set ahead while this process runs.

    Neither lists nor a cosigner's times go back. So whoever signs one time of the future by mistake
    can't go on before that time has come.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By how much it is ahead of a clock that nobody can set; None before the first time that
        # may be right: a machine may start with a clock that is far behind.
        self._ahead: float | None = None

    def begin(self, now: int) -> None:
        """Take the first time that is not behind what was signed before as right."""
        if self._ahead is None:
            self._ahead = now - self._clock.uptime()

    def check(self, now: int) -> None:
        """Require that time has passed until `now`, give or take `MAX_SKEW`."""
        ahead = now - self._clock.uptime()
        before = ahead if self._ahead is None else self._ahead
        jump = ahead - before
        if jump > MAX_SKEW:
            raise CheckpointTime(
                f"the clock was set ahead by {jump:.0f} s while this server was running: set it "
                "back, or restart the server if it is right now",
                time=now,
                now=now - round(jump),
            )
        self._ahead = max(ahead, before)


# --- The list under a checkpoint ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ListProof:
    """That a list is the last entry of a checkpoint's tree; parsing verifies nothing."""

    entry: ListEntry
    index: int
    # The siblings from the leaf up to the root.
    path: tuple[bytes, ...]
    signed: SignedCheckpoint

    def encode(self) -> bytes:
        head = f"{_PROOF_HEADER}\nextra {_base64(self.entry.encode())}\nindex {self.index}\n"
        return f"{head}{encode_hashes(self.path)}\n".encode() + self.signed.encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a proof; exactly one byte string is accepted for each."""
        lines, signed = lines_and_checkpoint(data, "a proof")
        if len(lines) < 3 or lines[0] != _PROOF_HEADER:
            raise DecodeError(f"a proof begins with {_PROOF_HEADER!r}, 'extra' and 'index'")
        extra, index = _after(lines[1], "extra "), _after(lines[2], "index ")
        if not _NUMBER.fullmatch(index):
            raise DecodeError("the index in a proof is a decimal number")
        entry = parse_entry(decode_base64(extra, "the entry in a proof"))
        if not isinstance(entry, ListEntry):
            raise DecodeError("the entry in this proof is not a list")
        return cls(
            entry=entry,
            index=int(index),
            path=parse_hashes(lines[3:]),
            signed=signed,
        )

    def check_last(self) -> None:
        """Require that the list is the last entry of the checkpoint's tree.

        That it is *in* the tree would not do: an old list is, too.
        """
        checkpoint = self.signed.checkpoint
        if self.index != checkpoint.size - 1:
            raise WrongList(
                f"the list is entry {self.index} of {checkpoint.size}, not the last one: "
                "it may be an old list"
            )
        verify_inclusion(
            leaf=leaf_hash(self.entry.encode()),
            index=self.index,
            size=checkpoint.size,
            proof=self.path,
            root=checkpoint.root,
        )


def lines_and_checkpoint(data: bytes, what: str) -> tuple[list[str], SignedCheckpoint]:
    """Read what proofs and requests to witnesses have in common: lines, and a checkpoint below."""
    if len(data) > MAX_PROOF:
        raise DecodeError(f"{what} has at most {MAX_PROOF} bytes, this one {len(data)}")
    head, separator, note = data.partition(b"\n\n")
    if not separator or not head.isascii():
        raise DecodeError(f"{what} is a few lines of ASCII, a blank line and a checkpoint")
    return head.decode().split("\n"), SignedCheckpoint.parse(note)


def encode_hashes(hashes: Iterable[bytes]) -> str:
    """Return hashes in base64, one per line, as proofs and witnesses have them."""
    return "".join(f"{_base64(node)}\n" for node in hashes)


def parse_hashes(lines: Collection[str]) -> tuple[bytes, ...]:
    """Read the hashes of a proof, one per line."""
    if len(lines) > MAX_PATH:
        raise DecodeError(f"a proof has at most {MAX_PATH} hashes")
    hashes = tuple(decode_base64(line, "a hash in a proof") for line in lines)
    if any(len(each) != HASH_SIZE for each in hashes):
        raise DecodeError(f"every hash in a proof has {HASH_SIZE} bytes")
    return hashes


def _after(line: str, prefix: str) -> str:
    if not line.startswith(prefix):
        raise DecodeError(f"a proof has a line {prefix.strip()!r} here")
    return line.removeprefix(prefix)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
