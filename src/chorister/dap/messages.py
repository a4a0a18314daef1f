"""DAP's messages between servers and with the collector, in the time-interval mode.

`decode` takes bytes from outside and raises `DecodeError` (an aggregator answers `invalidMessage`)
or, for extensions, `ProblemError` with the type that the draft asks for. Whatever decodes, encodes
to the same bytes. Reports, `VerifyInit`s and ciphertexts stay bytes: the native module reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

from chorister.codec import Reader, uint8, uint16, uint64, vector
from chorister.dap.draft import (
    CHECKSUM_BYTES,
    REPORT_ID_BYTES,
    TASK_ID_BYTES,
    VERIFICATION_KEY_ID,
    BatchMode,
    Problem,
    VerifyRespType,
)
from chorister.dap.task import Interval, TaskConfiguration
from chorister.dap.upload_messages import encode_report_id
from chorister.errors import DecodeError, InvalidInput, ProblemError

_Message = TypeVar("_Message")


def _decode(data: bytes, name: str, read: Callable[[Reader], _Message]) -> _Message:
    with Reader(data, name) as reader:
        return read(reader)


class Extension(NamedTuple):
    """An extension of a job. We know none, but a peer may send one."""

    extension_type: int
    extension_data: bytes


def encode_extensions(extensions: tuple[Extension, ...]) -> bytes:
    """Extension extensions<0..2^16-1>."""
    encoded = (
        uint16(each.extension_type) + vector(each.extension_data, prefix=2) for each in extensions
    )
    return vector(b"".join(encoded), prefix=2)


def refuse_extensions(reader: Reader, *, misordered: Problem) -> None:
    """Read a list of extensions and raise `ProblemError` unless it is empty.

    Extensions are mandatory to support, so unknown ones are refused. The two kinds of jobs answer a
    list that is out of order with different problems.
    """
    types = []
    with Reader(reader.vector(prefix=2), "extensions") as extensions:
        while extensions.remaining:
            types.append(extensions.uint16())
            extensions.vector(prefix=2)
    if any(later <= earlier for earlier, later in itertools.pairwise(types)):
        raise ProblemError(misordered, "extensions are not in strictly increasing order")
    if types:
        raise ProblemError(
            Problem.UNSUPPORTED_EXTENSION,
            f"extensions {types} are not supported",
            extra={"unsupported_extensions": types},
        )


# --- HPKE configurations ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HpkeConfigList:
    """Section "HPKE Configuration Request": encoded `HpkeConfig`s, the preferred one first."""

    configs: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.configs):
            raise InvalidInput("two HPKE configurations of the list have the same id")

    @property
    def ids(self) -> bytes:
        return bytes(config[0] for config in self.configs)

    def encode(self) -> bytes:
        """HpkeConfig HpkeConfigList<10..2^16-1>."""
        return vector(b"".join(self.configs), prefix=2, least=10)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Accept algorithms that Chorister does not support as well."""
        with Reader(data, cls.__name__) as reader:
            body = reader.vector(prefix=2, least=10)
        configs = []
        with Reader(body, cls.__name__) as reader:
            while reader.remaining:
                configs.append(
                    reader.opaque(7) + vector(reader.vector(prefix=2, least=1), prefix=2)
                )
        try:
            return cls(tuple(configs))
        except InvalidInput as error:
            raise DecodeError(f"{cls.__name__}: {error}") from None


# --- aggregation jobs ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregationJobInitReq:
    """Section "Leader Initialization"."""

    verification_key_id: int = VERIFICATION_KEY_ID
    agg_param: bytes = b""
    extensions: tuple[Extension, ...] = ()
    verify_inits: bytes  # `scan_verify_inits` reads them

    def encode(self) -> bytes:
        """The header, then the `VerifyInit`s up to the end."""
        return b"".join(
            (
                uint8(self.verification_key_id),
                vector(self.agg_param, prefix=4),
                encode_extensions(self.extensions),
                self.verify_inits,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse the header. Extensions out of order are `invalidMessage` here."""
        with Reader(data, cls.__name__) as reader:
            key_id = reader.uint8()
            agg_param = reader.vector(prefix=4)
            refuse_extensions(reader, misordered=Problem.INVALID_MESSAGE)
            return cls(
                verification_key_id=key_id,
                agg_param=agg_param,
                verify_inits=reader.opaque(reader.remaining),
            )


class VerifyResp(NamedTuple):
    """Section "Helper Initialization": the helper's verdict on one report."""

    report_id: bytes
    kind: VerifyRespType
    payload: bytes = b""  # if it continues
    error: int = 0  # if it is rejected: a `ReportError`, or a later draft's code


@dataclass(frozen=True, slots=True)
class AggregationJobResp:
    """Section "Helper Initialization": encoded `VerifyResp`s; a leader's native job reads them."""

    verify_resps: bytes

    def encode(self) -> bytes:
        """struct { VerifyResp verify_resps[message_length]; } AggregationJobResp."""
        return self.verify_resps

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Check the framing of each response."""
        message = cls(data)
        for _ in message.responses():
            pass
        return message

    def responses(self) -> Iterator[VerifyResp]:
        """Iterate over the responses; raise `DecodeError` at a malformed one."""
        with Reader(self.verify_resps, type(self).__name__) as reader:
            while reader.remaining:
                report_id = reader.opaque(REPORT_ID_BYTES)
                match reader.uint8():
                    case VerifyRespType.CONTINUE:
                        payload = reader.vector(prefix=4, least=1)
                        yield VerifyResp(report_id, VerifyRespType.CONTINUE, payload=payload)
                    case VerifyRespType.FINISH:
                        yield VerifyResp(report_id, VerifyRespType.FINISH)
                    case VerifyRespType.REJECT:
                        yield VerifyResp(report_id, VerifyRespType.REJECT, error=reader.uint8())
                    case unknown:
                        raise reader.error(f"{unknown} is not a type of VerifyResp")


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregationJobContinueReq:
    """Section "Leader Continuation". Prio3 has one round, so it is never needed."""

    step: int
    continues: tuple[tuple[bytes, bytes], ...]  # report id, payload

    def encode(self) -> bytes:
        """struct { uint16 step; VerifyContinue verify_continues[...]; }."""
        return uint16(self.step) + b"".join(
            encode_report_id(report_id) + vector(payload, prefix=4, least=1)
            for report_id, payload in self.continues
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        continues = []
        with Reader(data, cls.__name__) as reader:
            step = reader.uint16()
            while reader.remaining:
                report_id = reader.opaque(REPORT_ID_BYTES)
                continues.append((report_id, reader.vector(prefix=4, least=1)))
        return cls(step=step, continues=tuple(continues))


# --- collection ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BatchChoice:
    """A batch mode and its parameters: which batch is meant."""

    batch_mode: BatchMode
    config: bytes

    @classmethod
    def of(cls, interval: Interval) -> Self:
        """Choose an interval, in the time-interval mode."""
        return cls(BatchMode.TIME_INTERVAL, interval.encode())

    @property
    def batch_interval(self) -> Interval:
        """The chosen interval, perhaps empty; raises `DecodeError` in another mode."""
        if self.batch_mode is not BatchMode.TIME_INTERVAL:
            raise DecodeError(f"{type(self).__name__}: {self.batch_mode.name} has no interval")
        return _decode(self.config, f"{type(self).__name__}.config", Interval.read)

    def encode(self) -> bytes:
        """struct { BatchMode batch_mode; opaque config<0..2^16-1>; }."""
        return uint8(self.batch_mode) + vector(self.config, prefix=2)

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """Read it as part of a message; the config must fit the mode."""
        try:
            mode = BatchMode(reader.uint8())
        except ValueError:
            raise reader.error("unknown batch mode") from None
        choice = cls(mode, reader.vector(prefix=2))
        if mode is BatchMode.TIME_INTERVAL:
            _ = choice.batch_interval
        return choice

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return _decode(data, cls.__name__, cls.read)


class Query(_BatchChoice):
    """Section "Collection Job Initialization": what a collector asks for."""

    __slots__ = ()


class BatchSelector(_BatchChoice):
    """Section "Obtaining Aggregate Shares": what the leader asks the helper for."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionJobReq:
    """Section "Collection Job Initialization"."""

    query: Query
    agg_param: bytes = b""
    extensions: tuple[Extension, ...] = ()

    def encode(self) -> bytes:
        """struct { Query; opaque agg_param<0..2^32-1>; CollectionJobExtension<0..2^16-1>; }."""
        return (
            self.query.encode()
            + vector(self.agg_param, prefix=4)
            + encode_extensions(self.extensions)
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """Read it as part of a message. Extensions out of order are `invalidExtension` here."""
        query = Query.read(reader)
        agg_param = reader.vector(prefix=4)
        refuse_extensions(reader, misordered=Problem.INVALID_EXTENSION)
        return cls(query=query, agg_param=agg_param)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return _decode(data, cls.__name__, cls.read)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionJobResp:
    """Section "Collection Job Initialization": the result, sealed to the collector."""

    report_count: int
    interval: Interval
    leader_encrypted_agg_share: bytes  # an encoded HpkeCiphertext
    helper_encrypted_agg_share: bytes

    def encode(self) -> bytes:
        """struct { uint64; Interval; HpkeCiphertext; HpkeCiphertext; }."""
        return b"".join(
            (
                uint64(self.report_count),
                self.interval.encode(),
                self.leader_encrypted_agg_share,
                self.helper_encrypted_agg_share,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        with Reader(data, cls.__name__) as reader:
            return cls(
                report_count=reader.uint64(),
                interval=Interval.read(reader),
                leader_encrypted_agg_share=_read_ciphertext(reader),
                helper_encrypted_agg_share=_read_ciphertext(reader),
            )


def _read_ciphertext(reader: Reader) -> bytes:
    config_id = reader.uint8()
    enc = reader.vector(prefix=2, least=1)
    payload = reader.vector(prefix=4, least=1)
    return uint8(config_id) + vector(enc, prefix=2) + vector(payload, prefix=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregateShareReq:
    """Section "Obtaining Aggregate Shares"."""

    collection_job_req: CollectionJobReq
    batch_selector: BatchSelector
    report_count: int
    checksum: bytes

    def encode(self) -> bytes:
        """struct { CollectionJobReq; BatchSelector; uint64; opaque checksum[32]; }."""
        if len(self.checksum) != CHECKSUM_BYTES:
            raise InvalidInput(
                f"a checksum must have {CHECKSUM_BYTES} bytes, not {len(self.checksum)}"
            )
        return b"".join(
            (
                self.collection_job_req.encode(),
                self.batch_selector.encode(),
                uint64(self.report_count),
                self.checksum,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Parse a leader's request; the collector's own is in it, byte for byte."""
        with Reader(data, cls.__name__) as reader:
            return cls(
                collection_job_req=CollectionJobReq.read(reader),
                batch_selector=BatchSelector.read(reader),
                report_count=reader.uint64(),
                checksum=reader.opaque(CHECKSUM_BYTES),
            )


@dataclass(frozen=True, slots=True)
class AggregateShare:
    """Section "Obtaining Aggregate Shares": the helper's share, sealed to the collector."""

    encrypted_aggregate_share: bytes  # an encoded HpkeCiphertext

    def encode(self) -> bytes:
        """struct { HpkeCiphertext encrypted_aggregate_share; } AggregateShare."""
        return self.encrypted_aggregate_share

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(_decode(data, cls.__name__, _read_ciphertext))


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregateShareAad:
    """Section "Aggregate Share Encryption": what a sealed aggregate share is bound to."""

    task_id: bytes
    task_configuration: TaskConfiguration
    collection_job_req: CollectionJobReq

    def encode(self) -> bytes:
        """struct { TaskID; TaskConfiguration; CollectionJobReq; }; it is never sent."""
        if len(self.task_id) != TASK_ID_BYTES:
            raise InvalidInput(
                f"a task id must have {TASK_ID_BYTES} bytes, not {len(self.task_id)}"
            )
        return self.task_id + self.task_configuration.encode() + self.collection_job_req.encode()
