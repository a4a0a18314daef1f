"""Deleting what is older than its retention: a little at a time, and never for long.

How long it takes depends on data. So a device deletes only in time that it reserved whatever there
is to delete (`chorister.device.schedule`), rows are found and deleted in small pieces, by bytes as
well as by number, and apps donate in between. Queries do not see what has expired, deleted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import apsw

from chorister.clock import Clock, uptime
from chorister.device.schema import TableSchema, quoted

__all__ = ["Retention"]

_ROWS: Final = 2_000
"""Looked at between two looks at the clock."""
_BYTES: Final = 2**20
"""Deleted in one transaction, but for one row that is larger by itself."""


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
        self._places: dict[str, int] = {}  # by table: the id up to which all was looked at
        self._oldest: dict[str, int] = {}  # of what was looked at: the oldest that stays
        self._due: dict[str, int] = {}  # by table: before that nothing can expire

    def expire(self, tables: Iterator[TableSchema], seconds: float) -> int:
        """Delete for at most so many seconds. Returns the number of rows deleted."""
        until = uptime() + seconds
        return sum(self._expire(table, until) for table in tables)

    def _expire(self, table: TableSchema, until: float) -> int:
        deleted, now = 0, self._clock.now()
        # A clock that was set back makes times wrong that were noted before: look again.
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
        """Go on where the last call stopped: how many rows were deleted, whether there is more."""
        name = quoted(table.table)
        size = "+".join(f"ifnull(octet_length({quoted(column)}), 0)" for column in table.columns)
        rows: list[tuple[Any, ...]] = self._connection.execute(
            f"SELECT id, donated, {size} FROM {name} WHERE id > ? ORDER BY id LIMIT {_ROWS}",
            (self._places.get(table.name, -(2**63)),),
        ).fetchall()
        expired: list[tuple[int]] = []
        wrong: list[tuple[int, int]] = []
        room, last = _BYTES, None
        oldest = self._oldest.get(table.name, now)
        for id_, donated, length in rows:
            if donated > now:
                # The clock was wrong then or is wrong now; either way it is not kept for longer.
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
        return len(expired), len(rows) == _ROWS or room < 0
