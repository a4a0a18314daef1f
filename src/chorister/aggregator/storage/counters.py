"""Counts of reports by task and outcome, and the state of tasks and jobs.

Counters are named `uploaded`, `verified`, or `WHO:REASON` for rejected reports:
`upload:report_replayed` (by the leader, at upload), `leader:hpke_decrypt_error` (by the leader, in
a job), `helper:vdaf_verify_error` (by the helper; at the leader as the helper reported it),
`disputed:vdaf_verify_error` (by the leader, although the helper accepted the report: an honest
helper never does that, and the batch can no longer be collected). They are written in the
transaction that decides, so they are as exact as the sums.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage.database import Database, Transaction, in_queries
from chorister.aggregator.storage.schema import (
    BatchState,
    aggregation_jobs,
    batches,
    collections,
    counters,
    tasks,
)
from chorister.dap.draft import ReportError

UPLOADED: Final = "uploaded"
VERIFIED: Final = "verified"


def reason_name(code: int) -> str:
    """Return a `ReportError` in words; a later draft's code as its number."""
    try:
        return ReportError(code).name.lower()
    except ValueError:
        return f"code_{code}"


def rejections(who: str, codes: Iterable[int]) -> dict[str, int]:
    """Return counters for the codes that are not 0."""
    found = Counter(code for code in codes if code)
    return {f"{who}:{reason_name(code)}": number for code, number in found.items()}


# --- counters -----------------------------------------------------------------------------------


def _add(insert: Any) -> Any:  # noqa: ANN401 - both dialects' own `Insert`
    return insert.on_conflict_do_update(
        index_elements=["task_id", "name", "shard"],
        set_={"value": counters.c.value + insert.excluded.value},
    )


# By `Database.is_sqlite`. Built once: building a statement takes longer than executing it.
_ADD: Final = {True: _add(sqlite_insert(counters)), False: _add(postgresql_insert(counters))}


def count(database: Database, tx: Transaction, task_id: bytes, names: Mapping[str, int]) -> None:
    """Add to a task's counters, within the transaction that decided."""
    shard = secrets.randbelow(database.shards)
    rows = [
        {"task_id": task_id, "name": name, "shard": shard, "value": value}
        for name, value in sorted(names.items())
        if value
    ]
    if rows:
        tx.execute(_ADD[database.is_sqlite], rows)


def read_counts(tx: Transaction, task_ids: Iterable[bytes]) -> dict[bytes, dict[str, int]]:
    """Read the counters of some tasks."""
    found: dict[bytes, dict[str, int]] = {task_id: {} for task_id in task_ids}
    for some in in_queries(list(found)):
        rows = tx.execute(
            select(counters.c.task_id, counters.c.name, func.sum(counters.c.value).label("total"))
            .where(counters.c.task_id.in_(some))
            .group_by(counters.c.task_id, counters.c.name)
        )
        for task_id, name, total in rows:
            found[bytes(task_id)][name] = int(total)
    return found


def total_counts(tx: Transaction) -> dict[str, int]:
    """Read the counters, summed over all tasks."""
    query = select(counters.c.name, func.sum(counters.c.value)).group_by(counters.c.name)
    return {name: int(value) for name, value in tx.execute(query)}


# --- tasks and jobs -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskStatus:
    """One task with exact figures, for operators."""

    task: KnownTask
    state: BatchState
    counts: Mapping[str, int]
    unfinished_jobs: int
    failures: tuple[str, ...]  # why unfinished jobs failed, and why there is no result

    @property
    def uploaded(self) -> int:
        """Reports stored by the leader."""
        return self.counts.get(UPLOADED, 0)

    @property
    def verified(self) -> int:
        """Reports in the sum."""
        return self.counts.get(VERIFIED, 0)

    def rejected(self, who: str) -> dict[str, int]:
        """Rejected reports by reason; `who` is upload, leader, helper or disputed."""
        return {
            name.removeprefix(f"{who}:"): value
            for name, value in self.counts.items()
            if name.startswith(f"{who}:")
        }


def task_status(database: Database, known: Sequence[KnownTask]) -> list[TaskStatus]:
    """Read the exact figures of some tasks."""
    ids = [task.task_id for task in known]
    states: dict[bytes, int] = {}
    jobs: dict[bytes, list[str | None]] = {task_id: [] for task_id in ids}
    collecting: dict[bytes, list[str | None]] = {task_id: [] for task_id in ids}
    with database.read() as tx:
        counted = read_counts(tx, ids)
        for some in in_queries(ids):
            for task_id, state in tx.execute(
                select(batches.c.task_id, batches.c.state).where(batches.c.task_id.in_(some))
            ):
                states[bytes(task_id)] = state
            for table, failures in ((aggregation_jobs, jobs), (collections, collecting)):
                for task_id, failure in tx.execute(
                    select(table.c.task_id, table.c.failure).where(table.c.task_id.in_(some))
                ):
                    failures[bytes(task_id)].append(failure)
    return [
        TaskStatus(
            task=task,
            state=BatchState(states.get(task.task_id, BatchState.ENDED)),
            counts=counted[task.task_id],
            unfinished_jobs=len(jobs[task.task_id]),
            failures=_distinct(jobs[task.task_id] + collecting[task.task_id]),
        )
        for task in known
    ]


def _distinct(texts: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


def unfinished_summary(tx: Transaction) -> tuple[int, int | None]:
    """Return the number of unfinished aggregation jobs, and when the oldest was created."""
    number, oldest = tx.execute(
        select(func.count(), func.min(aggregation_jobs.c.created)).join(
            tasks, tasks.c.task_id == aggregation_jobs.c.task_id
        )
    ).one()
    return number, oldest
