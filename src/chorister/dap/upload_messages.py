"""What a leader answers to a device that uploads reports: the one message of DAP that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from chorister.codec import Reader, uint8
from chorister.dap.draft import REPORT_ID_BYTES
from chorister.errors import InvalidInput


class ReportUploadStatus(NamedTuple):
    """What became of one report; a later draft may have more codes than `ReportError`."""

    report_id: bytes
    error: int


@dataclass(frozen=True, slots=True)
class UploadErrors:
    """Section "Upload Request": the reports that were refused, in the request's order."""

    statuses: tuple[ReportUploadStatus, ...]

    def encode(self) -> bytes:
        """struct { ReportUploadStatus status[message_length]; } UploadErrors."""
        return b"".join(
            encode_report_id(each.report_id) + uint8(each.error) for each in self.statuses
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        statuses = []
        with Reader(data, cls.__name__) as reader:
            while reader.remaining:
                statuses.append(ReportUploadStatus(reader.opaque(REPORT_ID_BYTES), reader.uint8()))
        return cls(tuple(statuses))


def encode_report_id(report_id: bytes) -> bytes:
    if len(report_id) != REPORT_ID_BYTES:
        raise InvalidInput(f"a report id must have {REPORT_ID_BYTES} bytes, not {len(report_id)}")
    return report_id
