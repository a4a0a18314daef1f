"""Deletes what is older than its retention, in small steps.

How long that takes depends on data. So a device deletes only in time that it reserves whether there
is anything to delete or not (`chorister.device.schedule`). Rows are found and deleted in small
transactions, limited in rows and bytes, so that apps can donate in between. Queries never see what
has expired, deleted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import apsw

from chorister.clock import Clock, uptime
from chorister.device.schema import TableSchema, quoted

_MAX_ROWS: Final = 2_000
"""Rows that are read in one transaction."""
_MAX_BYTES: Final = 2**20
"""Bytes that are deleted in one transaction, unless a single row is larger."""


class Retention:
    """Finds and deletes expired rows; remembers where it stopped, and when to look again."""

    def __init__(
        self,
        connection: apsw.Connection,
        writing: Callable[[float], AbstractContextManager[None]],
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._writing = writing
        self._clock = clock
        self._places: dict[str, int] = {}  # by table: the id up to which rows were read
        self._oldest: dict[str, int] = {}  # of the rows read so far: the oldest that stays
        self._due: dict[str, int] = {}  # by table: before this time nothing can expire

    def expire(self, tables: Iterator[TableSchema], seconds: float) -> int:
        """Delete for at most `seconds`; return the number of rows deleted."""
        until = uptime() + seconds
        return sum(self._expire(table, until) for table in tables)

    def _expire(self, table: TableSchema, until: float) -> int:
        deleted, now = 0, self._clock.now()
        # If the clock was set back, times noted before are wrong: look again.
        if now < self._due.get(table.name, 0) <= now + table.retention:
            return 0
        more = True
        while more and uptime() < until:
            with self._writing(until - uptime()):
                count, more = self._delete_some(table, now)
            deleted += count
        if not more:
            oldest = self._oldest.pop(table.name, now)
            self._due[table.name] = oldest + table.retention
            self._places.pop(table.name, None)
        return deleted

    def _delete_some(self, table: TableSchema, now: int) -> tuple[int, bool]:
        """Continue where the last call stopped; return the rows deleted, and if there is more."""
        name = quoted(table.table)
        size = "+".join(f"ifnull(octet_length({quoted(column)}), 0)" for column in table.columns)
        rows: list[tuple[Any, ...]] = self._connection.execute(
            f"SELECT id, donated, {size} FROM {name} WHERE id > ? ORDER BY id LIMIT {_MAX_ROWS}",
            (self._places.get(table.name, -(2**63)),),
        ).fetchall()
        expired: list[tuple[int]] = []
        wrong: list[tuple[int, int]] = []
        room, last = _MAX_BYTES, None
        oldest = self._oldest.get(table.name, now)
        for id_, donated, length in rows:
            if donated > now:
                # The clock was wrong then or is wrong now; either way the row is not kept longer.
                wrong.append((now, id_))
            elif donated > now - table.retention:
                oldest = min(oldest, donated)
            else:
                room -= length
                if room < 0 and expired:
                    break
                expired.append((id_,))
            last = id_
        self._connection.executemany(f"UPDATE {name} SET donated = ? WHERE id = ?", wrong)
        self._connection.executemany(f"DELETE FROM {name} WHERE id = ?", expired)
        self._oldest[table.name] = oldest
        if last is not None:
            self._places[table.name] = last
        return len(expired), len(rows) == _MAX_ROWS or room < 0
