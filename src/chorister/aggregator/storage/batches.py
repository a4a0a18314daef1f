"""A task's only batch: its state, the sum so far, and what was released of it.

The row in `batches` is where everything meets. A transaction that adds to a batch (an upload, a
job) holds it shared; one that changes its state holds it exclusively; both until they commit. So no
report slips into a batch that is being frozen or collected, and once the state has changed,
everything added before is visible. SQLite has one writer at a time, and needs no row locks.
PostgreSQL grants a shared row lock even while somebody waits for the exclusive one. Under a stream
of uploads to a few servers there is always a holder, and nobody could ever freeze the batch. So
everybody queues at an advisory lock first, which is granted in the order of asking.

Locks are always taken in the same order (batch, ids ascending, sum, counters), so transactions
never deadlock.

A leader keeps collection jobs with their results, a helper its responses: a retry gets the same.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy import Column, Table, bindparam, delete, func, select, update

from chorister._native import Aggregated
from chorister.aggregator.known_tasks import KnownTask
from chorister.aggregator.storage.database import Database, Transaction
from chorister.aggregator.storage.schema import (
    BatchState,
    accumulators,
    aggregate_shares,
    batches,
    collections,
    helper_jobs,
    tasks,
)
from chorister.dap.draft import CHECKSUM_BYTES
from chorister.errors import ProblemError

# Built once: building these statements takes longer than executing them.
_STATE: Final = select(batches.c.state).where(batches.c.task_id == bindparam("task"))
_LOCK_EXCLUSIVE: Final = _STATE.with_for_update()
_LOCK_SHARED: Final = _STATE.with_for_update(read=True)
# PostgreSQL only, by `exclusive`. Ids are digests: eight bytes of one are unique enough, and two
# batches with the same lock would merely wait for each other.
_QUEUE: Final = {
    True: select(func.pg_advisory_xact_lock(bindparam("number"))),
    False: select(func.pg_advisory_xact_lock_shared(bindparam("number"))),
}


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
    if tx.dialect.name == "postgresql":
        tx.execute(_QUEUE[exclusive], {"number": int.from_bytes(task_id[:8], "big", signed=True)})
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


# --- the leader's collection jobs ---------------------------------------------------------------


class CollectionRef(NamedTuple):
    """One collection job."""

    task_id: bytes
    collection_id: bytes


class StoredCollection(NamedTuple):
    """A collection job as the database holds it."""

    request: bytes  # the CollectionJobReq, unchanged
    response: bytes | None  # the CollectionJobResp; None until there is a result
    refusal: ProblemError | None  # the helper refused it permanently

    @property
    def pending(self) -> bool:
        """Whether it has neither a result nor a final refusal."""
        return self.response is None and self.refusal is None


def find_collection(tx: Transaction, ref: CollectionRef) -> StoredCollection | None:
    """Find a collection job."""
    row = tx.execute(select(collections).filter_by(**ref._asdict())).one_or_none()
    if row is None:
        return None
    refusal = None
    if row.problem is not None:
        status = row.problem_status
        refusal = ProblemError(row.problem, row.failure, status=status, task_id=ref.task_id)
    return StoredCollection(
        request=bytes(row.request),
        response=None if row.response is None else bytes(row.response),
        refusal=refusal,
    )


def add_collection(
    database: Database, tx: Transaction, ref: CollectionRef, *, request: bytes, now: int
) -> None:
    """Store a new collection job."""
    row = ref._asdict() | {"created": now, "request": request}
    database.insert_new(tx, collections, [row])


def delete_collection(tx: Transaction, ref: CollectionRef) -> None:
    """Delete a collection job and its result."""
    tx.execute(delete(collections).filter_by(**ref._asdict()))


def pending_collections(
    tx: Transaction, *, live_at: int | None = None, task_id: bytes | None = None
) -> list[CollectionRef]:
    """List collection jobs without an outcome: of live tasks, or of one task."""
    query = (
        select(collections.c.task_id, collections.c.collection_id)
        .where(collections.c.response.is_(None), collections.c.problem.is_(None))
        .order_by(collections.c.created, collections.c.task_id)
    )
    if live_at is not None:
        live = (tasks.c.task_id == collections.c.task_id) & (tasks.c.ends > live_at)
        query = query.join(tasks, live)
    if task_id is not None:
        query = query.where(collections.c.task_id == task_id)
    return [CollectionRef(bytes(task), bytes(number)) for task, number in tx.execute(query)]


def store_result(tx: Transaction, ref: CollectionRef, response: bytes) -> bool:
    """Store the result; False if the job was deleted meanwhile, or has a result."""
    stored = tx.execute(
        update(collections)
        .filter_by(**ref._asdict())
        .where(collections.c.response.is_(None))
        .values(response=response, problem=None, failure=None)
    )
    return bool(stored.rowcount)


def store_refusal(tx: Transaction, ref: CollectionRef, error: ProblemError, failure: str) -> None:
    """Store that a collection job failed permanently."""
    tx.execute(
        update(collections)
        .filter_by(**ref._asdict())
        .where(collections.c.response.is_(None))
        .values(problem=error.problem, problem_status=error.status, failure=failure)
    )


def record_collection_failure(database: Database, ref: CollectionRef, reason: str) -> None:
    """Remember why a collection job waits; writes only if the reason is a new one."""
    with database.read() as tx:
        known = tx.scalar(select(collections.c.failure).filter_by(**ref._asdict()))
    if known != reason:
        with database.write(durable=False) as tx:
            tx.execute(update(collections).filter_by(**ref._asdict()).values(failure=reason))


# --- the helper's responses ---------------------------------------------------------------------


class StoredResponse(NamedTuple):
    """A helper's resource: its id, the digest of the request that created it, and its body."""

    resource_id: bytes
    request_digest: bytes
    body: bytes


class ResponseStore:
    """The responses that a helper stores, in one table."""

    def __init__(self, table: Table, id_column: Column[bytes]) -> None:
        self._table = table
        self._id = id_column

    def find(self, tx: Transaction, task_id: bytes, resource_id: bytes) -> StoredResponse | None:
        own = (self._table.c.task_id == task_id) & (self._id == resource_id)
        row = tx.execute(select(self._table).where(own)).one_or_none()
        if row is None:
            return None
        return StoredResponse(resource_id, bytes(row.request_digest), bytes(row.response))

    def add(
        self, database: Database, tx: Transaction, task_id: bytes, response: StoredResponse
    ) -> bool:
        """Store a response; False if there is one with this id."""
        row = {
            "task_id": task_id,
            self._id.name: response.resource_id,
            "request_digest": response.request_digest,
            "response": response.body,
        }
        return bool(database.insert_new(tx, self._table, [row]))

    def delete(self, tx: Transaction, task_id: bytes, resource_id: bytes | None = None) -> None:
        """Delete one response of a task, or all of them."""
        own = self._table.c.task_id == task_id
        if resource_id is not None:
            own &= self._id == resource_id
        tx.execute(delete(self._table).where(own))


JOB_RESPONSES: Final = ResponseStore(helper_jobs, helper_jobs.c.job_id)
SHARES: Final = ResponseStore(aggregate_shares, aggregate_shares.c.share_id)
