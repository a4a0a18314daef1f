"""Collection jobs at the leader; stored responses at the helper, so that a retry gets the same."""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import Column, Table, delete, select, update

from chorister.aggregator.storage.database import Database, Transaction
from chorister.aggregator.storage.schema import aggregate_shares, collections, helper_jobs, tasks
from chorister.errors import ProblemError


class CollectionRef(NamedTuple):
    """One collection job."""

    task_id: bytes
    collection_id: bytes


class StoredCollection(NamedTuple):
    """A collection job as the database holds it."""

    request: bytes  # the CollectionJobReq as it came
    response: bytes | None  # the CollectionJobResp; None until there is a result
    refusal: ProblemError | None  # the helper refused it for good

    @property
    def pending(self) -> bool:
        """Whether it has neither a result nor a final refusal."""
        return self.response is None and self.refusal is None


class StoredResponse(NamedTuple):
    """A helper's resource: its id, the digest of the request that created it, and its body."""

    resource_id: bytes
    request_digest: bytes
    body: bytes


# --- the leader's collection jobs ---------------------------------------------------------------


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


def pending_collections(tx: Transaction, now: int) -> list[CollectionRef]:
    """List all collection jobs of live tasks without an outcome."""
    rows = tx.execute(
        select(collections.c.task_id, collections.c.collection_id)
        .join(tasks, tasks.c.task_id == collections.c.task_id)
        .where(collections.c.response.is_(None), collections.c.problem.is_(None))
        .where(tasks.c.ends > now)
        .order_by(collections.c.created, collections.c.task_id)
    )
    return [CollectionRef(bytes(task_id), bytes(number)) for task_id, number in rows]


def pending_collections_of(tx: Transaction, task_id: bytes) -> list[CollectionRef]:
    """List the collection jobs of one task without an outcome."""
    found = tx.execute(
        select(collections.c.collection_id).where(
            collections.c.task_id == task_id,
            collections.c.response.is_(None),
            collections.c.problem.is_(None),
        )
    ).scalars()
    return [CollectionRef(task_id, bytes(each)) for each in found]


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
    """Store that a collection job failed for good."""
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
