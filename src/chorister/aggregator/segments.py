"""Sealed reports on their way to the disk: many to a row, and on SQLite with few copies on the way.

A row bound as one parameter is copied four times before it reaches the pages of the file: joined,
bound, made a record of, cut into pages. For uploads that would be most of the work. So on SQLite
the row is made with room for its reports, which are then written to their places in it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final, NamedTuple

from sqlalchemy import Connection, insert
from sqlalchemy.exc import OperationalError

from chorister.aggregator.database import Database
from chorister.aggregator.schema import report_blobs, segments
from chorister.errors import InternalError

__all__ = ["Segment", "write"]

_MAKE_ROOM: Final = (
    "INSERT INTO report_blobs (task_id, segment_id, reports) VALUES (?, ?, zeroblob(?))"
)
# Each write lets go of the interpreter, and a busy event loop gives it back when it pleases: so not
# report by report; but what is joined should still be in the processor's cache when it is written.
_AT_ONCE: Final = 8


_ADD_SEGMENTS: Final = insert(segments)


class Segment(NamedTuple):
    """Some reports of one task."""

    segment_id: bytes
    reports: Sequence[bytes]


def write(
    database: Database, connection: Connection, task_id: bytes, found: Sequence[Segment]
) -> None:
    """Add segments, which wait for a job from then on."""
    if not found:
        return
    connection.execute(
        _ADD_SEGMENTS,
        [
            {"task_id": task_id, "segment_id": segment_id, "reports": len(reports)}
            for segment_id, reports in found
        ],
    )
    if database.is_sqlite:
        _write_in_place(connection, task_id, found)
        return
    connection.execute(
        insert(report_blobs),
        [
            {"task_id": task_id, "segment_id": segment_id, "reports": b"".join(reports)}
            for segment_id, reports in found
        ],
    )


def _write_in_place(connection: Connection, task_id: bytes, found: Sequence[Segment]) -> None:
    raw = connection.connection.dbapi_connection
    if not isinstance(raw, sqlite3.Connection):
        raise InternalError("SQLite without its driver")
    try:
        for segment_id, reports in found:
            room = (task_id, segment_id, sum(map(len, reports)))
            row = raw.execute(_MAKE_ROOM, room).lastrowid
            if row is None:
                raise InternalError("SQLite does not tell where it put a row")
            with raw.blobopen("report_blobs", "reports", row) as blob:
                for start in range(0, len(reports), _AT_ONCE):
                    blob.write(b"".join(reports[start : start + _AT_ONCE]))
    except sqlite3.Error as error:  # as any other statement's would look
        raise OperationalError(_MAKE_ROOM, None, error) from error
