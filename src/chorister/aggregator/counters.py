"""What became of reports, by task and reason: for operators, and in tenths for analysts.

Names are `uploaded`, `verified`, and `WHO:REASON` for what was turned down:
`upload:report_replayed` (the leader, when it was uploaded), `leader:hpke_decrypt_error` (the
leader, in a job), `helper:vdaf_verify_error` (the helper; at the leader as the helper told it),
`disputed:vdaf_verify_error` (the leader, though the helper says that it took the report: with an
honest helper that does not happen, and the batch can no longer be collected).
They are written in the transaction that decides, so they are as exact as the sums.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Connection, func, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from chorister.aggregator.database import Database
from chorister.aggregator.schema import counters
from chorister.dap.draft import ReportError

__all__ = ["UPLOADED", "VERIFIED", "count", "counts", "reason", "rejections"]

UPLOADED: Final = "uploaded"
VERIFIED: Final = "verified"


def _add(insert: Any) -> Any:  # noqa: ANN401 - both dialects' own `Insert`
    return insert.on_conflict_do_update(
        index_elements=["task_id", "name", "shard"],
        set_={"value": counters.c.value + insert.excluded.value},
    )


# By `Database.is_sqlite`; made once, for to put it together takes longer than to execute it.
_ADD: Final = {True: _add(sqlite_insert(counters)), False: _add(postgresql_insert(counters))}


def reason(code: int) -> str:
    """A `ReportError` in words; a later draft's code as its number."""
    try:
        return ReportError(code).name.lower()
    except ValueError:
        return f"code_{code}"


def rejections(who: str, codes: Iterable[int]) -> dict[str, int]:
    """Counter names of the codes that are not 0."""
    found = Counter(code for code in codes if code)
    return {f"{who}:{reason(code)}": number for code, number in found.items()}


def count(
    database: Database, connection: Connection, task_id: bytes, names: Mapping[str, int]
) -> None:
    """Add to a task's counters, within the transaction that decided."""
    shard = secrets.randbelow(database.shards)
    rows = [
        {"task_id": task_id, "name": name, "shard": shard, "value": value}
        for name, value in sorted(names.items())
        if value
    ]
    if not rows:
        return
    connection.execute(_ADD[database.is_sqlite], rows)


def counts(connection: Connection, task_ids: Iterable[bytes]) -> dict[bytes, dict[str, int]]:
    """The counters of some tasks."""
    found: dict[bytes, dict[str, int]] = {task_id: {} for task_id in task_ids}
    ids = list(found)
    for start in range(0, len(ids), 500):
        rows = connection.execute(
            select(counters.c.task_id, counters.c.name, func.sum(counters.c.value).label("total"))
            .where(counters.c.task_id.in_(ids[start : start + 500]))
            .group_by(counters.c.task_id, counters.c.name)
        )
        for task_id, name, total in rows:
            found[bytes(task_id)][name] = int(total)
    return found
