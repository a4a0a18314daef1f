"""The witness protocol, c2sp.org/tlog-witness: `add-checkpoint`, as a client and as a server.

    old 20852014                                      the size that the witness cosigned last
    PlRNCrwHpqhGrupue0L7gxbjbMiKA9temvuZZDDpkaw=      the consistency proof, one hash per line
    …

    example.com/log                                   a checkpoint, signed by the log
    20852163
    …

The answer to a checkpoint that extends what the witness saw is its cosignature. `Witness` asks one;
an aggregator answers with `check_request` and its own further checks (`Cosigner`).
"""

from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple, Self

import httpx2

from chorister.canonical import sha256
from chorister.closing import Closing
from chorister.errors import (
    DecodeError,
    LogForked,
    LogSignatureInvalid,
    ProofInvalid,
    ServiceError,
    Unreachable,
)
from chorister.http_client import WebClient, printable
from chorister.policy.witnesses import WitnessKey
from chorister.transparency.checkpoint import (
    Checkpoint,
    SignedCheckpoint,
    encode_hashes,
    lines_and_checkpoint,
    parse_hashes,
)
from chorister.transparency.note import Note, SignatureLine, parse_lines
from chorister.transparency.tree import verify_consistency

SIZE_TYPE: Final = "text/x.tlog.size"
_MAX_ANSWER_BYTES: Final = 65_536
_OLD: Final = re.compile(r"old (0|[1-9][0-9]{0,18})")
_SIZE: Final = re.compile(r"(0|[1-9][0-9]{0,18})\n")


class WitnessRequest(NamedTuple):
    """A checkpoint, and the proof that it extends what the witness cosigned last."""

    old_size: int
    proof: tuple[bytes, ...]
    signed: SignedCheckpoint

    def encode(self) -> bytes:
        return f"old {self.old_size}\n{encode_hashes(self.proof)}\n".encode() + self.signed.encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a request; exactly one byte string is accepted for each."""
        (first, *lines), signed = lines_and_checkpoint(data, "a request")
        match = _OLD.fullmatch(first)
        if match is None:
            raise DecodeError("a request begins with 'old' and a size")
        return cls(int(match[1]), parse_hashes(lines), signed)


def check_request(request: WitnessRequest, last: Checkpoint) -> None:
    """Require a proof that a checkpoint extends the last one; raises `ProofInvalid`, `LogForked`.

    The caller has compared the sizes, which is another answer.
    """
    checkpoint = request.signed.checkpoint
    if request.old_size != last.size:
        raise ProofInvalid(f"the request starts from {request.old_size} entries, not {last.size}")
    verify_consistency(
        old_size=last.size,
        old_root=last.root,
        size=checkpoint.size,
        root=checkpoint.root,
        proof=request.proof,
    )


def named_origin(data: bytes) -> str | None:
    """Return the log that a request is about, even if that log's checkpoints are unlike ours."""
    _, _, note = data.partition(b"\n\n")
    try:
        return Note.parse(note).text.partition("\n")[0]
    except DecodeError:
        return None


def origin_hash(origin: str) -> str:
    """Return the folder under which a witness serves its newest checkpoint of a log."""
    return sha256(origin.encode()).hex()


class Conflict(NamedTuple):
    """The witness cosigned another size last."""

    size: int


class Witness(Closing):
    """A witness at a URL."""

    def __init__(
        self,
        key: WitnessKey,
        url: str,
        *,
        timeout: float = 30.0,
        ca_bundle: Path | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.key = key
        self._url = f"{url.rstrip('/')}/add-checkpoint"
        self._web = WebClient(timeout=timeout, ca_bundle=ca_bundle, transport=transport)

    def close(self) -> None:
        self._web.close()

    def add_checkpoint(self, request: WitnessRequest) -> SignatureLine | Conflict:
        """Return the witness's cosignature, verified, or the size that it cosigned last.

        Raises `LogForked` if the witness finds that the checkpoint does not extend its own.
        """
        try:
            answer = self._web.exchange(
                "POST", self._url, body=request.encode(), limit=_MAX_ANSWER_BYTES
            )
        except Unreachable as error:
            raise ServiceError(str(error)) from error
        detail = printable(answer.body.decode(errors="replace"))
        if answer.status == HTTPStatus.CONFLICT:
            match = _SIZE.fullmatch(answer.body.decode(errors="replace"))
            if match is not None and int(match[1]) != request.old_size:
                return Conflict(int(match[1]))
            # Some answer so, without a size, if they know another root of this size.
            forked = request.old_size == request.signed.checkpoint.size
            if not forked:
                raise ServiceError(f"the witness {self.key.name} does not name its size")
        else:
            forked = answer.status == HTTPStatus.UNPROCESSABLE_ENTITY
        if forked:
            raise LogForked(
                f"the witness {self.key.name} refuses the checkpoint: {detail or answer.status}",
                evidence=(request.signed.encode(),),
            )
        if answer.status != HTTPStatus.OK:
            raise ServiceError(f"the witness {self.key.name} answers {answer.status}: {detail}")
        return self._own_line(request.signed, answer.body)

    def _own_line(self, signed: SignedCheckpoint, body: bytes) -> SignatureLine:
        """Return the latest of the witness's lines; others are ignored."""
        try:
            lines = list(parse_lines(body.decode()))
        except (UnicodeDecodeError, DecodeError) as error:
            raise ServiceError(f"{self._url} does not answer like a witness") from error
        for line in reversed(lines):
            note = Note(text=signed.note.text, signatures=(line,))
            if note.cosignature(self.key.name, [self.key.key]) is not None:
                return line
        raise LogSignatureInvalid(f"the answer of {self.key.name} has no cosignature by its key")
