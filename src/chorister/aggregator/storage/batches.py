"""A task's only batch: its state, and the sum so far.

The row in `batches` is where everything meets. A transaction that adds to a batch (an upload, a
job) holds it shared; one that changes its state holds it exclusively; both until they commit. So no
report slips into a batch that is being frozen or collected, and once the state has changed,
everything added before is visible. SQLite has one writer at a time, and needs no row locks.

Locks are always taken in the same order (batch, ids ascending, sum, counters), so transactions
never deadlock.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, delete, func, select, update

from chorister._native import Aggregated
from chorister.aggregator.storage.database import Database, Transaction
from chorister.aggregator.storage.schema import BatchState, accumulators, batches
from chorister.aggregator.task import KnownTask
from chorister.dap.draft import CHECKSUM_BYTES

# Built once: building these statements takes longer than executing them.
_STATE: Final = select(batches.c.state).where(batches.c.task_id == bindparam("task"))
_LOCK_EXCLUSIVE: Final = _STATE.with_for_update()
_LOCK_SHARED: Final = _STATE.with_for_update(read=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """What one aggregator has added up. `share` is secret and never printed."""

    reports: int
    checksum: bytes
    share: bytes

    def __repr__(self) -> str:
        return f"Total(reports={self.reports}, checksum={self.checksum.hex()})"


def lock_batch(tx: Transaction, task_id: bytes, *, exclusive: bool) -> BatchState | None:
    """Return the batch's state and keep it until the transaction ends; None once it is deleted."""
    state = tx.scalar(_LOCK_EXCLUSIVE if exclusive else _LOCK_SHARED, {"task": task_id})
    return None if state is None else BatchState(state)


def batch_state(tx: Transaction, task_id: bytes) -> BatchState | None:
    """Return the batch's state at this moment."""
    state = tx.scalar(_STATE, {"task": task_id})
    return None if state is None else BatchState(state)


def set_batch_state(tx: Transaction, task_id: bytes, state: BatchState) -> None:
    """Change the state. The caller holds the exclusive lock."""
    tx.execute(update(batches).where(batches.c.task_id == task_id).values(state=state))


def accumulate(database: Database, tx: Transaction, task: KnownTask, job: Aggregated) -> None:
    """Add a job's verified reports to the sum."""
    if not job.count:
        return
    shard = secrets.randbelow(database.shards)
    place = ("accumulators", task.task_id, bytes([shard]))
    key = {"task_id": task.task_id, "shard": shard}
    current = select(accumulators).filter_by(**key).with_for_update()
    row = tx.execute(current).one_or_none()
    if row is None:
        sealed = database.sealer.seal(job.share, *place)
        first = key | {"reports": job.count, "checksum": job.checksum, "share": sealed}
        if database.insert_new(tx, accumulators, [first]):
            return
        # Another transaction created the row in between, and has committed.
        row = tx.execute(current).one()
    merged = task.vdaf.merge([database.sealer.open(bytes(row.share), *place), job.share])
    tx.execute(
        update(accumulators)
        .filter_by(**key)
        .values(
            reports=row.reports + job.count,
            checksum=_xor(bytes(row.checksum), job.checksum),
            share=database.sealer.seal(merged, *place),
        )
    )


def verified_reports(tx: Transaction, task_id: bytes) -> int:
    """Return the number of reports in the sum."""
    query = select(func.sum(accumulators.c.reports)).where(accumulators.c.task_id == task_id)
    return int(tx.scalar(query) or 0)


def batch_total(database: Database, tx: Transaction, task: KnownTask) -> Total:
    """Return the sum over all shards."""
    reports, checksum, shares = 0, bytes(CHECKSUM_BYTES), [task.vdaf.zero()]
    rows = tx.execute(
        select(accumulators)
        .where(accumulators.c.task_id == task.task_id)
        .order_by(accumulators.c.shard)
    )
    for row in rows:
        place = ("accumulators", task.task_id, bytes([row.shard]))
        reports += row.reports
        checksum = _xor(checksum, bytes(row.checksum))
        shares.append(database.sealer.open(bytes(row.share), *place))
    return Total(reports=reports, checksum=checksum, share=task.vdaf.merge(shares))


def delete_total(tx: Transaction, task_id: bytes) -> None:
    """Delete the sum, once it is collected."""
    tx.execute(delete(accumulators).where(accumulators.c.task_id == task_id))


def _xor(left: bytes, right: bytes) -> bytes:
    number = int.from_bytes(left, "big") ^ int.from_bytes(right, "big")
    return number.to_bytes(CHECKSUM_BYTES, "big")
